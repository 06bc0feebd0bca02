"""The repository, a record's folder, and every figure that follows from its logs."""

import operator
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

from records import stats
from records.files import about, parse_json, read_text, require
from records.log import parse_log
from records.settings import BOARDS, LIMITS
from records.source import changed_lines, sha256_of

FOLDER = re.compile(r"20\d\d-[01]\d-[0-3]\d_[A-Za-z0-9][A-Za-z0-9-]{0,59}", re.ASCII)
CACHE = "__pycache__"
PARTS = {"train_gpt.py", "result.json", "README.md", "logs"}


@dataclass(frozen=True)
class Repository:
    """A working tree: records/<track>/<date>_<Name>/, records/README.md, train_gpt.py."""

    root: Path
    rules: dict  # by board, from rules.json
    merged: Path | None = None  # another tree, whose records this one must hold unchanged

    @classmethod
    def at(cls, root=None):
        """The tree that this package lies in, or another one, judged by this one's rules."""
        own = Path(__file__).parent.parent.resolve()
        return cls(Path(root).absolute(), BOARDS, own) if root else cls(own, BOARDS)

    @property
    def home(self):
        """The folder of all records, whose README.md holds the leaderboards."""
        return self.root / "records"

    @cached_property
    def records(self):
        """Every record by board, by age. RecordError where one cannot be read."""
        folders = {track: paths_in(self.home / track) for track in self.rules}
        by_age = operator.attrgetter("age")
        return {track: sorted(map(self.load, folders[track]), key=by_age) for track in folders}

    @property
    def all(self):
        return sum(self.records.values(), [])

    def rules_of(self, track):
        """The rules of a board that takes records. RecordError where there is none of that name."""
        known = f"open are {', '.join(self.rules)}; records/HISTORY.md has the closed ones"
        require(track in self.rules, f"--track {ascii(track)}: is no open board; {known}")
        return self.rules[track]

    def tip(self, track):
        """The last record of a board. RecordError says how the first is made where none is."""
        self.rules_of(track)
        hint = f"run `python -m records run --track {track} --runs 8`, and then submit it"
        require(self.records[track], f"{track} has no record yet; to make the first one, {hint}")
        return self.records[track][-1]

    def load(self, folder):
        """What a record's folder says. Beside what lies in it, its parent's script is read."""
        require(folder.is_dir() and not folder.is_symlink(), f"{folder}: is no folder, or a link")
        odd = PARTS ^ {path.name for path in paths_in(folder)} - {"baseline"}
        shown = ", ".join(map(ascii, sorted(odd)))[:80]
        require(not odd, f"{folder}: {shown} is missing, or is no part of a record")
        record = SimpleNamespace(folder=folder, track=folder.parent.name, name=folder.name)
        record.date, record.title = folder.name[:10], folder.name[11:]
        record.source = read_script(folder)
        record.readme = read_text(folder / "README.md")
        text = read_text(folder / "result.json")
        has_baseline = (folder / "baseline").exists()
        with about(folder / "result.json"):
            record.result = parse_json(text)
            record.parent = record.result.get("parent", "")
            is_first = record.parent is None and not has_baseline
            is_name = is_first or FOLDER.fullmatch(str(record.parent))
            require(is_name, f"its parent {ascii(record.parent)[:80]} is no name of a record")
        record.runs = read_logs(folder / "logs", record.source)
        record.baseline = []  # the parent's runs, each a pair with one of `runs`
        if has_baseline:
            parent = read_script(folder.with_name(record.parent))
            record.baseline = read_logs(folder / "baseline", parent)
        # Records are sorted by their age: what is merged comes first, then the day counts.
        is_new = not (self.merged and (self.merged / folder.relative_to(self.root)).is_dir())
        record.age = is_new, record.date, min(run.started for run in record.runs), record.name
        record.over = max(run.over for run in record.runs + record.baseline)
        return record


def paths_in(folder):
    """What a folder holds, by name, but for Python's caches; nothing of a link, or of no folder."""
    is_folder = folder.is_dir() and not folder.is_symlink()
    return sorted(path for path in folder.iterdir() if path.name != CACHE) if is_folder else []


def read_script(path):
    """The text of a script, or of the one in a record's folder."""
    path = path / "train_gpt.py" if path.is_dir() else path
    text = read_text(path, LIMITS.script)
    require(text.strip(), f"{path}: is empty")
    return text


def read_logs(folder, script):
    """What the logs of a script's runs say, in the order of their counters."""
    paths = paths_in(folder)
    require(0 < len(paths) <= LIMITS.logs, f"{folder}: 1 to {LIMITS.logs} logs are needed")
    runs = [parse_log(path, script) for path in paths]
    for run in runs:
        is_named = run.path.name == f"{run.run}.txt"
        require(is_named, f"{run.path}: is the log of another run, {run.run}.txt")
    return sorted(runs, key=lambda run: (run.counter, run.run))


def rounded(value):
    """Six significant digits: the same on every platform."""
    return float(f"{value:.6g}")


def summary(values):
    """Mean and standard deviation, as result.json has them."""
    return dict(zip(("mean", "std"), map(rounded, stats.mean_and_std(values)), strict=True))


def speed_figures(runs, baseline):
    """The gain in time of paired runs, in the order of their counters."""
    times = [run.train_time_ms for run in runs[: len(baseline)]]
    others = [run.train_time_ms for run in baseline[: len(runs)]]
    return {
        "pairs": len(times),
        "parent_ms": summary(others)["mean"],
        "relative": [rounded(value) for value in stats.gain(times, others)],
        "p": rounded(stats.p_faster(times, others)),
    }


def figures(record, rules, parent, authors):
    """The content of result.json, which follows from logs, but for the names of the authors."""
    first = record.runs[0]
    losses = [run.val_loss for run in record.runs]
    target = rules["config"]["target_loss"]
    p = rounded(stats.p_below(losses, target))
    added, removed = changed_lines(parent.source, record.source) if parent else (0, 0)
    return {
        "schema": 2,
        "name": record.name,
        "track": record.track,
        "by": authors,
        "parent": parent.name if parent else None,
        "code_sha256": sha256_of(record.source),
        "lines_added": added,
        "lines_removed": removed,
        "hardware": first.hardware,
        "software": f"torch {first.torch}, CUDA {first.cuda}, triton {first.triton}",
        "declared_runs": first.declared,
        "restarts": sum(run.start - 1 for run in record.runs),
        "loss": {**summary(losses), "target": target, "p": p},
        "train_time_ms": summary([run.train_time_ms for run in record.runs]),
        "speed": speed_figures(record.runs, record.baseline) if record.baseline else None,
    }
