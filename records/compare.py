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
    """One side of a comparison: a source with the configuration that it ran, and its runs if it has
    any."""

    label: str
    source: str
    config: dict
    track: str
    runs: tuple = ()


def side_of(path, repository):
    """The Side of a record's folder, a run's folder or a log. Raises RecordError where no log can
    be read."""
    path = Path(path)
    if (path / "logs").is_dir():
        runs = runs_of_record(path)
    else:
        runs = [run_at(path)]
    first = runs[0]
    if first.track not in repository.rules:
        known = ", ".join(repository.rules)
        raise RecordError(f"{path}: track {ascii(first.track)} is none of {known}")
    return Side(str(path), first.source, first.config, first.track, tuple(runs))


def runs_of_record(path):
    """The Runs of a record's folder, of which there is at least one."""
    record = load(path, path.resolve().parent.name)
    if record.runs:
        return record.runs
    reason = ""
    if record.failures:
        first = record.failures[0]
        reason = f" ({first.path}: {first.reason})"
    raise RecordError(f"{path}: holds no readable log{reason}")


def working_side(track, repository):
    """The Side of the working train_gpt.py on a track."""
    source = read_text(repository.root / "train_gpt.py")
    return Side("train_gpt.py", source, config_of(source, track), track)


def seed_only(before, after):
    """Whether two different sources agree but for the numbers of seeds."""
    return before != after and SEED.sub(r"\1N", before) == SEED.sub(r"\1N", after)


def describe(before, after):
    """The text that `diff` prints for two Sides."""
    parts = []
    if before.source != after.source:
        unified = difflib.unified_diff(
            before.source.splitlines(keepends=True),
            after.source.splitlines(keepends=True),
            before.label,
            after.label,
        )
        parts.append("".join(unified).rstrip("\n"))
    changes = config_changes(before.config, after.config)
    if changes:
        parts.append(render.config_table(changes, before.label, after.label))
    added, removed = changed_lines(before.source, after.source)
    parts.append(
        f"code: {added} lines added, {removed} removed; configuration: {len(changes)} fields differ"
    )
    if not changes:
        parts += verdict(before, after)
    return "\n\n".join(parts)


def verdict(before, after):
    """What is said of two Sides with one configuration whose code is the same but for seeds."""
    if seed_only(before.source, after.source):
        return ["a seed-only difference"]
    if before.source != after.source:
        return []
    if seeds(before) != seeds(after):
        return ["a seed-only difference"]
    return ["no difference"]


def seeds(side):
    """The seeds of a Side's runs."""
    return {run.seed for run in side.runs}
