"""The repository, a record's folder, and every figure that follows from its logs."""

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from records import stats
from records.files import RULES, RecordError, parse_json, read_text
from records.log import parse_log
from records.source import NEUTRAL_FIELDS, config_of

SCHEMA = 1  # of result.json
FOLDER = re.compile(r"(\d{4}-\d\d-\d\d)_([A-Za-z0-9][A-Za-z0-9-]{0,59})", re.ASCII)
MOST_LOGS = 100


@dataclass(frozen=True)
class TrackRules:
    """What no record of a track may change, from rules.json."""

    name: str
    tokenizer: str
    val_tokens: int
    val_sha256: str  # empty: not known to the repository, and that of the parent record counts
    target_loss: float
    manifest_sha256: str  # empty: any; fineweb's depends on how many shards were fetched
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
    def date(self):
        """The day of `submit`, as YYYY-MM-DD."""
        return self.name[:10]

    @property
    def parent(self):
        """The name of the record that this one is measured against, or None."""
        return self.result.get("parent")

    @property
    def claims_speed(self):
        """Whether the parent ran beside this record, so that it can be called faster."""
        return bool(self.baseline)

    @property
    def age(self):
        """What sorts records by their time: the day, the first start of a run, the name."""
        starts = [str(run.started) for run in self.runs if run.started]
        return self.date, min(starts, default=""), self.name

    @property
    def code_sha256(self):
        """The hash of the code that ran, "" where no log could be read."""
        return self.runs[0].code_sha256 if self.runs else ""

    def fail(self, path, reason):
        """Note what could not be read."""
        self.failures.append(Failure(path, reason))


@dataclass(frozen=True)
class Repository:
    """A working tree: records/<track>/<date>_<Name>/, records/README.md, train_gpt.py."""

    root: Path
    rules: dict  # TrackRules by track

    @classmethod
    def at(cls, root=None):
        """The tree that this package lies in, or another one. The rules are always this package's
        own."""
        root = Path(root) if root else Path(__file__).parent.parent
        rules = {name: TrackRules(name, **values) for name, values in RULES["tracks"].items()}
        return cls(root.resolve(), rules)

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
            folder = self.track_folder(track)
            found[track] = []
            if folder.is_symlink():
                continue
            for entry in entries_of(folder):
                if not entry.name.startswith("."):
                    found[track].append(load(entry, track))
        return found

    def strangers(self):
        """A Failure of everything that lies where only tracks and records do."""
        for entry in entries_of(self.root / "records"):
            is_track = entry.name in self.rules
            if entry.is_symlink():
                yield Failure(entry, "is a symbolic link; records lie in a folder")
            elif is_track and entry.is_dir():
                for inside in entries_of(entry):
                    if inside.name.startswith("."):
                        yield Failure(inside, "is hidden; remove it, or give it a record's name")
            elif is_track or entry.is_dir() and entry.name != "__pycache__":
                yield Failure(entry, f"is no track's folder; those are {', '.join(self.rules)}")


def entries_of(folder):
    """What a folder holds, in the order of the names; nothing where there is no such folder."""
    return sorted(folder.iterdir()) if folder.is_dir() else []


def age_of(record):
    """What sorts records by their time."""
    return record.age


def chain(records):
    """The track's records each of which was measured against the one before: its first record,
    then, as far as they go, the speed claims against the last. Of two against one record it is the
    older one."""
    after = {}
    for record in sorted(records, key=age_of):
        if record.claims_speed or not record.parent:
            after.setdefault(record.parent, record)
    found = []
    current = after.get(None)
    while current and current not in found:
        found.append(current)
        current = after.get(current.name)
    return found


def load(folder, track, home=None):
    """Read a record's folder, with the script of its parent, which lies beside it or in the folder
    `home`. Nothing else is opened, no link is followed."""
    record = Record(Path(folder), track)
    if record.folder.is_symlink() or not record.folder.is_dir():
        reason = "is no folder (links are not followed); a record is a folder of its own"
        record.fail(record.folder, reason)
        return record
    present = parts_present(record)
    if "train_gpt.py" in present:
        record.source = load_file(record, "train_gpt.py", str, "")
    if "README.md" in present:
        record.readme = load_file(record, "README.md", str, "")
    if "result.json" in present:
        record.result = load_file(record, "result.json", parse_result, {})
    if "logs" in present:
        load_logs(record, "logs", record.runs, record.source)
    if "baseline" in present:
        source = parent_source(record, home or record.folder.parent)
        load_logs(record, "baseline", record.baseline, source)
    return record


def parent_source(record, home):
    """The script of a record's parent, which the thin logs of the parent's runs have no copy of."""
    if not record.parent:
        return ""
    try:
        return read_text(home / record.parent / "train_gpt.py")
    except RecordError:
        return ""  # which the parent's own failures tell


def parts_present(record):
    """The names in a record's folder that may be read. What is too much or missing fails."""
    known = {"train_gpt.py", "result.json", "README.md", "logs", "baseline"}
    entries = sorted(record.folder.iterdir())
    for entry in entries:
        if entry.is_symlink():
            record.fail(entry, "is a symbolic link; put the file itself there")
            known.discard(entry.name)
        elif entry.name not in known:
            record.fail(entry, f"is no part of a record; those are {', '.join(sorted(known))}")
    present = known & {entry.name for entry in entries}
    for name in sorted(known - {"baseline"} - present):
        record.fail(record.folder / name, "is missing")
    return present


def load_file(record, name, parse, otherwise):
    """What `parse` makes of the text of a record's file, or `otherwise` where that fails."""
    try:
        return parse(read_text(record.folder / name))
    except RecordError as error:
        record.fail(record.folder / name, str(error))
        return otherwise


def parse_result(text):
    """The JSON object of a result.json whose parent, if any, is the name of a record."""
    result = parse_json(text)
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise RecordError(
            f"is no object with schema {SCHEMA}; write it with `python -m records submit`"
        )
    parent = result.get("parent")
    if parent is None:
        return result
    if not isinstance(parent, str) or not FOLDER.fullmatch(parent):
        raise RecordError(f"parent {ascii(parent)[:80]} is no name of a record")
    return result


def load_logs(record, part, runs, source):
    """Parse every log of a part of a record into `runs`, in the order of the runs. source: the
    script that they ran, where they hold none."""
    folder = record.folder / part
    if not folder.is_dir():
        record.fail(folder, "is no folder")
        return
    paths = sorted(folder.iterdir())
    if len(paths) > MOST_LOGS:
        record.fail(folder, f"holds {len(paths)} files; at most {MOST_LOGS} are read")
    for path in paths[:MOST_LOGS]:
        try:
            run = parse_log(path, [source])
            if path.name != f"{run.run}.txt":
                raise RecordError(f"is named otherwise than its run; call it {run.run}.txt")
            runs.append(run)
        except RecordError as error:
            record.fail(path, str(error))
    runs.sort(key=place_of)


def place_of(run):
    """What sorts the runs of a batch: their counters, then their names."""
    counter = run.batch.counter if run.batch else 0
    return counter, run.run


def changed_lines(before, after):
    """(added, removed) lines between two sources, as multisets: a line that only moved is no
    change."""
    before = Counter(before.splitlines())
    after = Counter(after.splitlines())
    return (after - before).total(), (before - after).total()


def config_changes(before, after):
    """{field: [value before, value after]} of two configurations, but for fields that say where and
    how a run is watched, or counted; a field that one of them lacks is None there."""
    changes = {}
    for name in sorted((before.keys() | after.keys()) - NEUTRAL_FIELDS):
        values = [before.get(name), after.get(name)]
        if name == "dtype" and "auto" in values:  # a source and a log, where the machine chose it
            continue
        if values[0] != values[1]:
            changes[name] = values
    return changes


def pairs_of(runs, baseline):
    """[(run, baseline run), ...] by their counters. RecordError when a run has no partner."""
    own = {run.batch.counter: run for run in runs if run.batch}
    others = {run.batch.counter: run for run in baseline if run.batch}
    alone = sorted(own.keys() ^ others.keys())
    if alone:
        shown = ", ".join(map(str, alone[:8]))
        raise RecordError(f"pairs: run {shown} ran on one side only; every pair counts")
    return [(own[counter], others[counter]) for counter in sorted(own)]


def chosen_dtype(run):
    """The type that a run computed in, where the machine or its user chose it; None where it is
    the one that the source names."""
    if run.dtype == config_of(run.source, run.track).get("dtype", ""):
        return None
    return run.dtype


# ----- the figures


def rounded(value):
    """Six significant digits: the same on every platform."""
    return float(f"{value:.6g}")


def mean_figures(values):
    """Mean and standard deviation as figures."""
    mean, std = stats.mean_and_std(values)
    return {"mean": rounded(mean), "std": rounded(std)}


def run_figures(run):
    """What a table of runs says of one of them."""
    return {
        "run": run.run,
        "started": f"{run.started:%Y-%m-%d %H:%M:%S}" if run.started else None,
        "seed": run.seed,
        "val_loss": run.val_loss,
        "train_time_ms": run.train_time_ms,
        "tokens": run.tokens,
        "peak_memory_mib": run.memory_mib,
        "world_size": run.world_size,
        "device": run.device,
        "torch": run.torch,
        "cuda": run.cuda,
        "triton": run.triton,
    }


def speed_figures(pairs, declared, level):
    """Of the record against its parent, from paired runs; negative differences are gains."""
    found = stats.speed(pairs, declared, level)
    differences = [run.train_time_ms - base.train_time_ms for run, base in pairs]
    mean, low, high = stats.interval(differences)
    base_mean, _ = stats.mean_and_std([base.train_time_ms for _, base in pairs])
    relative = {}
    for clock, values in found["differences"].items():
        relative[clock] = [rounded(value) for value in values]
    return {
        "pairs": len(pairs),
        "baseline_mean_ms": rounded(base_mean),
        "difference_ms": rounded(mean),
        "low_ms": rounded(low),
        "high_ms": rounded(high),
        "p": rounded(found["p"]),
        "shown_by": found["shown_by"],
        "fastest_parts": rounded(found["fastest_parts"]),
        "relative": relative,
    }


def parent_figures(record, parent):
    """What changed in code and configuration since the parent, a Record or None. Where the parent
    ran beside the record, it did so in the same dtype, and its configuration is that of these
    runs."""
    if parent is None:
        return {"parent": None, "lines_added": 0, "lines_removed": 0, "config_changes": {}}
    added, removed = changed_lines(parent.source, record.source)
    before = (record.baseline or parent.runs)[0].config
    return {
        "parent": parent.name,
        "lines_added": added,
        "lines_removed": removed,
        "config_changes": config_changes(before, record.runs[0].config),
    }


def loss_figures(record, target, level):
    """The losses of a record's runs, and the test that their mean is below the target."""
    losses = [run.val_loss for run in record.runs]
    looks = 1
    if record.claims_speed:
        looks = len(stats.looks(record.runs[0].batch.declared))
    return {
        **mean_figures(losses),
        "target": target,
        "p": rounded(stats.p_below(losses, target)),
        "p_needed": rounded(level / looks),
    }


def figures(record, rules, parent):
    """The content of result.json, from the logs alone; `parent` is a Record or None. Needs runs
    that declare their batch. RecordError when baseline runs do not pair."""
    batch = record.runs[0].batch
    level = stats.level(batch.number)
    pairs = []
    speed = None
    if record.claims_speed:
        pairs = pairs_of(record.runs, record.baseline)
    if len(pairs) > 1:
        speed = speed_figures(pairs, batch.declared, level)
    return {
        "schema": SCHEMA,
        "name": record.name,
        "track": record.track,
        "claim": "speed" if record.claims_speed else "entry",
        "code_sha256": record.code_sha256,
        **parent_figures(record, parent),
        "dtype": chosen_dtype(record.runs[0]),
        "declared_runs": batch.declared,
        "batch": batch.number,
        "restarts": sum(run.batch.start - 1 for run in record.runs),
        "loss": loss_figures(record, rules.target_loss, level),
        "p_needed": rounded(level),
        "train_time_ms": mean_figures([run.train_time_ms for run in record.runs]),
        "speed": speed,
        "runs": [run_figures(run) for run in record.runs],
        "baseline": [run_figures(base) for _, base in pairs],
    }
