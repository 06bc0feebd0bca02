"""The repository, a record's folder, and every figure that follows from its logs."""

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from records import stats
from records.files import RULES, SCRIPT_LIMIT, RecordError, parse_json, read_text, require
from records.log import parse_log
from records.source import config_of, sha256_of, without_place

SCHEMA = 2  # of result.json
FOLDER = re.compile(r"\d{4}-\d\d-\d\d_[A-Za-z0-9][A-Za-z0-9-]{0,59}", re.ASCII)
MOST_LOGS = 100
PARTS = ("train_gpt.py", "result.json", "README.md", "logs")
AUTHORS = re.compile(r"[^\W_][\w .,'&()@/-]{0,99}")


@dataclass(frozen=True)
class TrackRules:
    """What no record of a track may change, from rules.json."""

    name: str
    tokenizer: str
    val_tokens: int
    val_sha256: str
    target_loss: float
    manifest_sha256: str  # empty: any; fineweb's depends on how many shards were fetched
    copy_loss: float  # losses of runs of two seeds are further apart than this at some step
    config: dict = field(default_factory=dict)  # fields that this track fixes beyond those above

    @property
    def fixed(self):
        """{field: value} that the configuration of each run must have."""
        names = ("tokenizer", "val_tokens", "val_sha256", "target_loss")
        return {name: getattr(self, name) for name in names} | self.config


@dataclass(frozen=True)
class Failure:
    """What is wrong with a file or a folder, as one line of `verify` says it."""

    path: Path
    reason: str


@dataclass
class Record:
    """A record's folder as read; what could not be read is in `failures`."""

    folder: Path
    track: str
    is_new: bool = False  # the checkout that judges does not have it
    source: str = ""
    result: dict = field(default_factory=dict)
    readme: str = ""
    runs: list = field(default_factory=list)
    baseline: list = field(default_factory=list)
    failures: list = field(default_factory=list)

    @property
    def name(self):
        """The name of the folder, which no other record of the track has."""
        return self.folder.name

    @property
    def title(self):
        """The name without its date."""
        return self.name[11:]

    @property
    def date(self):
        """The day of `submit`, as YYYY-MM-DD."""
        return self.name[:10]

    @property
    def parent(self):
        """The name of the record that this one is measured against, or None."""
        return self.result.get("parent")

    @property
    def age(self):
        """What sorts records by their time: what is merged comes first, then the day counts, the
        start of the first run, the name."""
        starts = [str(run.started) for run in self.runs]
        return self.is_new, self.date, min(starts, default=""), self.name

    def try_to(self, path, action, *arguments):
        """What an action returns. Where it raises a RecordError, that is a failure of `path`, and
        the result is None."""
        try:
            return action(*arguments)
        except RecordError as error:
            self.failures.append(Failure(path, str(error)))
            return None

    def read(self, path, reader, *arguments):
        """What a reader makes of a file, or None where that is a failure."""
        return self.try_to(path, reader, path, *arguments)


@dataclass(frozen=True)
class Repository:
    """A working tree: records/<track>/<date>_<Name>/, records/README.md, train_gpt.py."""

    root: Path
    rules: dict  # TrackRules by track
    merged: Path | None = None  # another tree, whose records this one must hold unchanged

    @classmethod
    def at(cls, root=None):
        """The tree that this package lies in, or another one, which is judged beside the former.
        The rules are always this package's own."""
        own = Path(__file__).parent.parent.resolve()
        rules = {name: TrackRules(name, **values) for name, values in RULES["tracks"].items()}
        return cls(Path(root).absolute(), rules, own) if root else cls(own, rules)

    @property
    def readme(self):
        """The page that holds the leaderboards."""
        return self.root / "records" / "README.md"

    def track_folder(self, track):
        """The folder of a track's records."""
        return self.root / "records" / track

    @cached_property
    def records(self):
        """Every record by track, in the order of their folders' names."""
        found = {}
        for track in self.rules:
            paths = paths_in(self.track_folder(track))
            found[track] = [self.load(path, track) for path in paths if path.name[0] != "."]
        return found

    @property
    def all(self):
        """The records of all tracks."""
        return [record for records in self.records.values() for record in records]

    def tip(self, track):
        """The last record of a track's chain, or None."""
        return next(reversed(chain(self.records[track])), None)

    def load(self, folder, track):
        """Read a record's folder, and the script of its parent in the track's folder. Nothing else
        is opened, no link is followed."""
        record = Record(folder, track)
        if self.merged:
            record.is_new = not (self.merged / "records" / track / record.name).is_dir()
        record.read(folder, check_parts)
        if record.failures:
            return record
        record.source = record.read(folder / "train_gpt.py", read_script) or ""
        record.readme = record.read(folder / "README.md", read_text) or ""
        record.result = record.read(folder / "result.json", read_result) or {}
        if record.source:
            load_logs(record, "logs", record.runs, record.source)
        if record.parent and (folder / "baseline").exists():
            script = self.track_folder(track) / record.parent / "train_gpt.py"
            source = record.read(script, read_script)
            if source:
                load_logs(record, "baseline", record.baseline, source)
        return record

    def at_path(self, folder):
        """The Record of a folder that a user names."""
        found = [record for record in self.all if record.folder == Path(folder).absolute()]
        require(found, f"{folder}: is no folder of a record")
        return found[0]


def paths_in(folder):
    """What a folder holds, by name; nothing where there is no such folder, or a link to one."""
    return sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def chain(records):
    """The track's records each of which was measured against the one before: its first record,
    then, as far as they go, the speed claims against the last. Of two against one record it is the
    older one."""
    links = []
    for record in sorted(records, key=lambda record: record.age):
        parent = links[-1].name if links else None
        if record.parent == parent and (record.baseline or not parent):
            links.append(record)
    return links


def read_script(path):
    """The text of a script, which has some."""
    text = read_text(path, SCRIPT_LIMIT)
    require(text.strip(), "is empty")
    return text


def script_at(path):
    """The text of a script that a user names, or of that of a record's folder."""
    path = Path(path)
    try:
        return read_script(path / "train_gpt.py" if path.is_dir() else path)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def check_parts(folder):
    """A record's folder holds what it needs and nothing else."""
    is_folder = folder.is_dir() and not folder.is_symlink()
    require(is_folder, "is no folder (links are not followed); a record is a folder of its own")
    found = {path.name for path in paths_in(folder)}
    missing = sorted(set(PARTS) - found)
    require(not missing, f"{', '.join(missing)} is missing")
    odd = sorted(found - {*PARTS, "baseline"})
    require(not odd, f"{', '.join(map(ascii, odd))[:80]} is no part of a record")


def read_result(path):
    """The JSON object of a result.json whose parent, if any, is the name of a record."""
    result = parse_json(read_text(path))
    is_ours = isinstance(result, dict) and result.get("schema") == SCHEMA
    require(is_ours, f"is no object with schema {SCHEMA}; `python -m records submit` writes it")
    parent = result.get("parent")
    is_name = parent is None or isinstance(parent, str) and FOLDER.fullmatch(parent)
    require(is_name, f"parent {ascii(parent)[:80]} is no name of a record")
    has_parent = parent is not None or not (path.parent / "baseline").exists()
    require(has_parent, "names no parent, whose runs lie in baseline/")
    return result


def load_logs(record, part, runs, script):
    """Parse every log of a part of a record, all of runs of one script, into `runs`, in the order
    of their counters."""
    folder = record.folder / part
    paths = paths_in(folder)
    record.try_to(folder, require, 0 < len(paths) <= MOST_LOGS, f"1 to {MOST_LOGS} logs are needed")
    for path in paths[:MOST_LOGS]:
        run = record.read(path, parse_log, script)
        if run:
            name = f"{run.run}.txt"
            record.try_to(path, require, path.name == name, f"is the log of another run, {name}")
            runs.append(run)
    runs.sort(key=lambda run: (run.counter, run.run))


# ----- the figures


def changed_lines(before, after):
    """(added, removed) lines between two sources, as multisets: a line that only moved is no
    change."""
    before = Counter(before.splitlines())
    after = Counter(after.splitlines())
    return (after - before).total(), (before - after).total()


def difference(before, after, track):
    """In a line, what two scripts differ in: how many lines, and which fields of a track."""
    added, removed = changed_lines(before, after)
    old = without_place(config_of(before, track))
    new = without_place(config_of(after, track))
    names = sorted(old.keys() | new.keys())
    changes = [name for name in names if old.get(name, "none") != new.get(name, "none")]
    fields = ", ".join(changes) or "no field"
    return f"lines: {added} added, {removed} removed; configuration of {track}: {fields}"


def rounded(value):
    """Six significant digits: the same on every platform."""
    return float(f"{value:.6g}")


def mean_figures(values):
    """Mean and standard deviation as figures."""
    mean, std = stats.mean_and_std(values)
    return {"mean": rounded(mean), "std": rounded(std)}


def hardware_of(run):
    """What a run was made on, such as `AMD EPYC x2, world size 1, bfloat16`."""
    return f"{run.device}, world size {run.world_size}, {run.dtype}"


def speed_figures(runs, baseline):
    """The gain in time of paired runs, in the order of their counters."""
    pairs = list(zip(runs, baseline, strict=False))
    times = [run.train_time_ms for run, _ in pairs]
    others = [run.train_time_ms for _, run in pairs]
    return {
        "pairs": len(pairs),
        "parent_ms": rounded(stats.mean_and_std(others)[0]),
        "relative": [rounded(value) for value in stats.gain(times, others)],
        "p": rounded(stats.p_faster(times, others)),
    }


def figures(record, rules, parent, authors):
    """The content of result.json, from the logs of a record, whose runs are whole pairs if it has
    its parent's; `parent` is a Record or None. Only who made it stands in no log."""
    first = record.runs[0]
    losses = [run.val_loss for run in record.runs]
    added, removed = changed_lines(parent.source, record.source) if parent else (0, 0)
    return {
        "schema": SCHEMA,
        "name": record.name,
        "track": record.track,
        "by": authors,
        "parent": parent.name if parent else None,
        "code_sha256": sha256_of(record.source),
        "lines_added": added,
        "lines_removed": removed,
        "hardware": hardware_of(first),
        "software": f"torch {first.torch}, CUDA {first.cuda}, triton {first.triton}",
        "declared_runs": first.declared,
        "restarts": sum(run.start - 1 for run in record.runs),
        "loss": {
            **mean_figures(losses),
            "target": rules.target_loss,
            "p": rounded(stats.p_below(losses, rules.target_loss)),
        },
        "train_time_ms": mean_figures([run.train_time_ms for run in record.runs]),
        "speed": speed_figures(record.runs, record.baseline) if record.baseline else None,
    }
