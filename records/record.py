"""The repository, a record's folder, and every figure that follows from its logs."""
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from records import stats
from records.files import RULES, RecordError, parse_json, read_text
from records.log import parse_log
from records.source import NEUTRAL_FIELDS

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


@dataclass(frozen=True)
class Failure:
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
        return self.folder.name

    @property
    def date(self):
        return self.name[:10]

    @property
    def parent(self):
        return self.result.get("parent")

    @property
    def claims_speed(self):
        return bool(self.baseline)

    @property
    def age(self):
        """What sorts records by their time."""
        return self.date, min((str(run.started) for run in self.runs if run.started), default=""), self.name

    @property
    def code_sha256(self):
        return self.runs[0].code_sha256 if self.runs else ""

    def fail(self, path, reason):
        self.failures.append(Failure(path, reason))


@dataclass(frozen=True)
class Repository:
    """A working tree: records/<track>/<date>_<Name>/, records/README.md, train_gpt.py."""
    root: Path
    rules: dict  # TrackRules by track

    @classmethod
    def at(cls, root=None):
        """The tree that this package lies in, or another one; the rules are always this package's own."""
        root = Path(root) if root else Path(__file__).parent.parent
        return cls(root.resolve(), {name: TrackRules(name, **values) for name, values in RULES["tracks"].items()})

    @property
    def readme(self):
        return self.root / "records" / "README.md"

    def track_folder(self, track):
        return self.root / "records" / track

    @cached_property
    def records(self):
        """Every record by track, in the order of their folders' names."""
        found = {}
        for track in self.rules:
            folder = self.track_folder(track)
            entries = sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
            found[track] = [load(entry, track) for entry in entries if not entry.name.startswith(".")]
        return found

    def strangers(self):
        """What lies where only tracks and records do."""
        folder = self.root / "records"
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            if entry.is_symlink():
                yield Failure(entry, "is a symbolic link; records lie in a folder")
            elif entry.name in self.rules and entry.is_dir():
                yield from (Failure(inside, "is hidden; remove it, or give it a record's name")
                            for inside in sorted(entry.iterdir()) if inside.name.startswith("."))
            elif entry.name in self.rules or entry.is_dir() and entry.name != "__pycache__":
                yield Failure(entry, f"is no track's folder; those are {', '.join(self.rules)}")


def chain(records):
    """The track's records each of which was measured against the one before: its first record, then, as far as they
    go, the speed claims against the last. Of two against one record it is the older one."""
    after = {}
    for record in sorted(records, key=lambda record: record.age):
        if record.claims_speed or not record.parent:
            after.setdefault(record.parent, record)
    found, current = [], after.get(None)
    while current and current not in found:
        found.append(current)
        current = after.get(current.name)
    return found


def load(folder, track):
    """Read a record's folder. Nothing outside of it is opened, no link is followed."""
    record = Record(Path(folder), track)
    if record.folder.is_symlink() or not record.folder.is_dir():
        record.fail(record.folder, "is no folder (links are not followed); a record is a folder of its own")
        return record
    known = {"train_gpt.py", "result.json", "README.md", "logs", "baseline"}
    for entry in sorted(record.folder.iterdir()):
        if entry.is_symlink():
            record.fail(entry, "is a symbolic link; put the file itself there")
            known.discard(entry.name)
        elif entry.name not in known:
            record.fail(entry, f"is no part of a record; those are {', '.join(sorted(known))}")
    for name in sorted(known - {"baseline"} - {entry.name for entry in record.folder.iterdir()}):
        record.fail(record.folder / name, "is missing")
    present = {name for name in known if (record.folder / name).exists()}
    for name, attribute in (("train_gpt.py", "source"), ("README.md", "readme"), ("result.json", "result")):
        if name in present:
            try:
                text = read_text(record.folder / name)
                setattr(record, attribute, parse_result(text) if attribute == "result" else text)
            except RecordError as error:
                record.fail(record.folder / name, str(error))
    for name, runs in (("logs", record.runs), ("baseline", record.baseline)):
        if name in present:
            load_logs(record, record.folder / name, runs)
    return record


def parse_result(text):
    """The JSON object of a result.json whose parent, if any, is the name of a record."""
    result = parse_json(text)
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise RecordError(f"is no object with schema {SCHEMA}; write it with `python -m records submit`")
    parent = result.get("parent")
    if parent is not None and not (isinstance(parent, str) and FOLDER.fullmatch(parent)):
        raise RecordError(f"parent {ascii(parent)[:80]} is no name of a record")
    return result


def load_logs(record, folder, runs):
    """Parse every log of a folder into `runs`, in the order of the runs."""
    if not folder.is_dir():
        record.fail(folder, "is no folder")
        return
    paths = sorted(folder.iterdir())
    if len(paths) > MOST_LOGS:
        record.fail(folder, f"holds {len(paths)} files; at most {MOST_LOGS} are read")
    for path in paths[:MOST_LOGS]:
        try:
            run = parse_log(path)
            if path.name != f"{run.run}.txt":
                raise RecordError(f"is named otherwise than its run; call it {run.run}.txt")
            runs.append(run)
        except RecordError as error:
            record.fail(path, str(error))
    runs.sort(key=lambda run: (run.batch.counter if run.batch else 0, run.run))


def changed_lines(before, after):
    """(added, removed) lines between two sources, as multisets: a line that only moved is no change."""
    before, after = (Counter(text.splitlines()) for text in (before, after))
    return (after - before).total(), (before - after).total()


def config_changes(before, after):
    """{field: [value before, value after]} of two logged configurations, but for fields that say where and how a run
    is watched, or counted; a field that one of them lacks is None there."""
    names = sorted((before.keys() | after.keys()) - NEUTRAL_FIELDS)
    return {name: [before.get(name), after.get(name)] for name in names if before.get(name) != after.get(name)}


def pairs_of(runs, baseline):
    """[(run, baseline run), ...] by their counters. RecordError when a run has no partner."""
    sides = [{run.batch.counter: run for run in part if run.batch} for part in (runs, baseline)]
    if alone := sorted(sides[0].keys() ^ sides[1].keys()):
        raise RecordError(f"pairs: run {', '.join(map(str, alone[:8]))} ran on one side only; every pair counts")
    return [(sides[0][counter], sides[1][counter]) for counter in sorted(sides[0])]


def rounded(value):
    """Six significant digits: the same on every platform."""
    return float(f"{value:.6g}")


def run_figures(run):
    return {"run": run.run, "started": f"{run.started:%Y-%m-%d %H:%M:%S}" if run.started else None, "seed": run.seed,
            "val_loss": run.val_loss, "train_time_ms": run.train_time_ms, "tokens": run.tokens,
            "peak_memory_mib": run.memory_mib, "world_size": run.world_size,
            "device": run.device, "torch": run.torch, "cuda": run.cuda, "triton": run.triton}


def speed_figures(pairs, declared, level):
    """Of the record against its parent, from paired runs; negative differences are gains."""
    found = stats.speed(pairs, declared, level)
    differences = [run.train_time_ms - base.train_time_ms for run, base in pairs]
    mean, low, high = map(rounded, stats.interval(differences))
    base = stats.mean_and_std([base.train_time_ms for _, base in pairs])[0]
    return {"pairs": len(pairs), "baseline_mean_ms": rounded(base), "difference_ms": mean, "low_ms": low,
            "high_ms": high, "p": rounded(found["p"]), "shown_by": found["shown_by"],
            "fastest_parts": rounded(found["fastest_parts"]),
            "relative": {clock: [*map(rounded, values)] for clock, values in found["differences"].items()}}


def figures(record, rules, parent):
    """The content of result.json, from the logs alone; `parent` is a Record or None. Needs runs that declare their
    batch. RecordError when baseline runs do not pair."""
    losses = [run.val_loss for run in record.runs]
    times = [run.train_time_ms for run in record.runs]
    loss, loss_std = map(rounded, stats.mean_and_std(losses))
    time_ms, time_std = map(rounded, stats.mean_and_std(times))
    batch = record.runs[0].batch
    level = stats.level(batch.number)
    added, removed = changed_lines(parent.source, record.source) if parent else (0, 0)
    pairs = pairs_of(record.runs, record.baseline) if record.claims_speed else []
    return {
        "schema": SCHEMA, "name": record.name, "track": record.track,
        "claim": "speed" if record.claims_speed else "entry", "parent": parent.name if parent else None,
        "code_sha256": record.code_sha256, "lines_added": added, "lines_removed": removed,
        "config_changes": config_changes(parent.runs[0].config, record.runs[0].config) if parent else {},
        "declared_runs": batch.declared, "batch": batch.number,
        "restarts": sum(run.batch.start - 1 for run in record.runs),
        "loss": {"mean": loss, "std": loss_std, "target": rules.target_loss,
                 "p": rounded(stats.p_below(losses, rules.target_loss)),
                 "p_needed": rounded(level / len(stats.looks(batch.declared) if record.claims_speed else [1]))},
        "p_needed": rounded(level),
        "train_time_ms": {"mean": time_ms, "std": time_std},
        "speed": speed_figures(pairs, batch.declared, level) if len(pairs) > 1 else None,
        "runs": [run_figures(run) for run in record.runs],
        "baseline": [run_figures(base) for _, base in pairs]}
