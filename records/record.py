"""The repository, a record's folder, and every figure that follows from its logs."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from records import stats
from records.files import RULES, SCRIPT_LIMIT, about, parse_json, read_text, require
from records.log import parse_log
from records.source import changed_lines, sha256_of

SCHEMA = 2  # of result.json
FOLDER = re.compile(r"\d{4}-\d\d-\d\d_[A-Za-z0-9][A-Za-z0-9-]{0,59}", re.ASCII)
MOST_LOGS = 100
PARTS = {"train_gpt.py", "result.json", "README.md", "logs"}


@dataclass
class Record:
    """A record's folder as read."""

    folder: Path
    track: str
    is_new: bool  # the checkout that judges does not have it
    source: str
    readme: str
    result: dict
    runs: list
    baseline: list  # the parent's runs, each of which is a pair with one of `runs`

    def __post_init__(self):
        self.name = self.folder.name
        self.date = self.name[:10]  # of `submit`
        self.title = self.name[11:]
        self.parent = self.result["parent"]  # the name of what it is measured against, or None

    @property
    def age(self):
        """What sorts records by their time: what is merged comes first, then the day counts, the
        start of the first run, the name."""
        return self.is_new, self.date, min(run.started for run in self.runs), self.name


@dataclass(frozen=True)
class Repository:
    """A working tree: records/<track>/<date>_<Name>/, records/README.md, train_gpt.py."""

    root: Path
    rules: dict  # by track, from rules.json
    merged: Path | None = None  # another tree, whose records this one must hold unchanged

    @classmethod
    def at(cls, root=None):
        """The tree that this package lies in, or another one, which is judged beside the former.
        The rules are always this package's own."""
        own = Path(__file__).parent.parent.resolve()
        return (
            cls(Path(root).absolute(), RULES["tracks"], own) if root else cls(own, RULES["tracks"])
        )

    @property
    def home(self):
        """The folder of all records, whose README.md holds the leaderboards."""
        return self.root / "records"

    @cached_property
    def records(self):
        """Every Record by track, in the order of their folders' names. RecordError where one cannot
        be read."""
        return {
            track: [self.load(path) for path in paths_in(self.home / track) if path.name[0] != "."]
            for track in self.rules
        }

    @property
    def all(self):
        """The records of all tracks."""
        return [record for records in self.records.values() for record in records]

    def tip(self, track):
        """The last record of a track's chain, or None."""
        return next(reversed(chain(self.records[track])), None)

    def load(self, folder):
        """The Record of a folder. Beside what lies in it, the script of its parent is read. No link
        is followed."""
        track = folder.parent.name
        check_parts(folder)
        source = read_script(folder / "train_gpt.py")
        result = read_result(folder / "result.json")
        runs = read_logs(folder / "logs", source)
        baseline = []
        if (folder / "baseline").exists():
            parent = folder.parent / str(result["parent"]) / "train_gpt.py"
            baseline = read_logs(folder / "baseline", read_script(parent))
        readme = read_text(folder / "README.md")
        is_new = not (self.merged and (self.merged / "records" / track / folder.name).is_dir())
        return Record(folder, track, is_new, source, readme, result, runs, baseline)


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


def check_parts(folder):
    """A record's folder holds what it needs and nothing else."""
    is_folder = folder.is_dir() and not folder.is_symlink()
    require(is_folder, f"{folder}: is no folder (links are not followed)")
    found = {path.name for path in paths_in(folder)}
    shown = ", ".join(map(ascii, sorted(PARTS ^ found - {"baseline"})))[:80]
    require(not shown, f"{folder}: {shown} is missing, or is no part of a record")


def read_script(path):
    """The text of a script, which has some; that of a record, where its folder is named."""
    path = path / "train_gpt.py" if path.is_dir() else path
    text = read_text(path, SCRIPT_LIMIT)
    require(text.strip(), f"{path}: is empty")
    return text


def read_result(path):
    """The JSON object of a result.json whose parent, if any, is the name of a record."""
    text = read_text(path)
    with about(path):
        result = parse_json(text)
        is_ours = isinstance(result, dict) and result.get("schema") == SCHEMA and "parent" in result
        require(is_ours, f"is no object with schema {SCHEMA}; `python -m records submit` writes it")
        parent = result["parent"]
        is_name = isinstance(parent, str) and FOLDER.fullmatch(parent)
        has_none = parent is None and not (path.parent / "baseline").exists()
        require(is_name or has_none, f"parent {ascii(parent)[:80]} is no name of a record")
    return result


def read_logs(folder, script):
    """What every log of a folder says, all of runs of one script, in the order of their
    counters."""
    paths = paths_in(folder)
    require(0 < len(paths) <= MOST_LOGS, f"{folder}: 1 to {MOST_LOGS} logs are needed")
    runs = [parse_log(path, script) for path in paths]
    for run in runs:
        name = f"{run.run}.txt"
        require(run.path.name == name, f"{run.path}: is the log of another run, {name}")
    return sorted(runs, key=lambda run: (run.counter, run.run))


# ----- the figures


def rounded(value):
    """Six significant digits: the same on every platform."""
    return float(f"{value:.6g}")


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
    loss, loss_std = stats.mean_and_std(losses)
    time, time_std = stats.mean_and_std([run.train_time_ms for run in record.runs])
    target = rules["config"]["target_loss"]
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
        "hardware": first.hardware,
        "software": f"torch {first.torch}, CUDA {first.cuda}, triton {first.triton}",
        "declared_runs": first.declared,
        "restarts": sum(run.start - 1 for run in record.runs),
        "loss": {
            "mean": rounded(loss),
            "std": rounded(loss_std),
            "target": target,
            "p": rounded(stats.p_below(losses, target)),
        },
        "train_time_ms": {"mean": rounded(time), "std": rounded(time_std)},
        "speed": speed_figures(record.runs, record.baseline) if record.baseline else None,
    }
