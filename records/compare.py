"""`diff`: what two records, or a record and the working script, differ in."""
import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from records import render
from records.files import RecordError, read_text
from records.log import run_at
from records.record import changed_lines, config_changes, load
from records.source import config_of

SEED = re.compile(r"(\bseed\b[^\d\n]{0,80}?)-?\d+")


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a source with the configuration that it ran, and its runs if it has any."""
    label: str
    source: str
    config: dict
    track: str
    runs: tuple = ()


def side_of(path, repository):
    """The Side of a record's folder, a run's folder or a log. Raises RecordError where no log can be read."""
    path = Path(path)
    if (path / "logs").is_dir():
        record = load(path, path.resolve().parent.name)
        if not record.runs:
            reasons = [f"{failure.path}: {failure.reason}" for failure in record.failures]
            raise RecordError(f"{path}: holds no readable log" + (f" ({reasons[0]})" if reasons else ""))
        runs = tuple(record.runs)
    else:
        runs = (run_at(path),)
    if runs[0].track not in repository.rules:
        raise RecordError(f"{path}: track {ascii(runs[0].track)} is none of {', '.join(repository.rules)}")
    return Side(str(path), runs[0].source, runs[0].config, runs[0].track, runs)


def working_side(track, repository):
    """The Side of the working train_gpt.py on a track."""
    source = read_text(repository.root / "train_gpt.py")
    return Side("train_gpt.py", source, config_of(source, track), track)


def seed_only(before, after):
    """Whether two different sources agree but for the numbers of seeds."""
    return before != after and SEED.sub(r"\1N", before) == SEED.sub(r"\1N", after)


def describe(before, after):
    """The text that `diff` prints for two Sides."""
    unified = difflib.unified_diff(before.source.splitlines(keepends=True), after.source.splitlines(keepends=True),
                                   before.label, after.label)
    changes = config_changes(before.config, after.config)
    added, removed = changed_lines(before.source, after.source)
    same = before.source == after.source
    parts = ["".join(unified).rstrip("\n")] if not same else []
    if changes:
        parts.append(render.config_table(changes, before.label, after.label))
    parts.append(f"code: {added} lines added, {removed} removed; configuration: {len(changes)} fields differ")
    if not changes and (same or seed_only(before.source, after.source)):
        parts.append("a seed-only difference" if not same or seeds(before) != seeds(after) else "no difference")
    return "\n\n".join(parts)


def seeds(side):
    return {run.seed for run in side.runs}
