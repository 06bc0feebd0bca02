"""The repository, a record's folder, and the figures that follow from its logs."""

import operator
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

from records import stats
from records.files import BOARDS, LIMITS, read_text, require
from records.log import parse_log

FOLDER = re.compile(r"20\d\d-[01]\d-[0-3]\d_[A-Za-z0-9][A-Za-z0-9-]{0,59}", re.ASCII)
PARTS = {"train_gpt.py", "README.md", "logs"}
NOBODYS = ("._", ".DS_Store", "__pycache__")  # so begin names that macOS and Python leave there
FORM = "It is a change of form, and claims no gain."


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
        if root is None:
            return cls(own, BOARDS)
        is_tree = root != "" and Path(root, "records").is_dir()
        require(is_tree, f"--tree {ascii(root)}: name a checkout, the folder with records/ in it")
        return cls(Path(root).absolute(), BOARDS, own)

    @property
    def home(self):
        """The folder of all records, whose README.md holds the leaderboards."""
        return self.root / "records"

    @cached_property
    def records(self):
        """Every record by board, by age. RecordError where one cannot be read."""
        found = {}
        for track in self.rules:
            records = map(self.load, paths_in(self.home / track))
            found[track] = sorted(records, key=operator.attrgetter("age"))
            for number, record in enumerate(found[track]):
                add_baseline(record, parent_of(record, found[track][:number]))
        return found

    @property
    def all(self):
        return sum(self.records.values(), [])

    def rules_of(self, track):
        """The rules of a board that takes records. RecordError where there is none of that name."""
        known = f"open are {', '.join(self.rules)}; records/HISTORY.md has the closed ones"
        require(track in self.rules, f"--track {ascii(track)}: is no open board; {known}")
        return self.rules[track]

    def tip(self, track, is_form=False):
        """The last record of a board, or, for a change of form, the last with a gain. RecordError
        says how the first is made where none is."""
        self.rules_of(track)
        hint = f"run `python -m records run --track {track} --runs 8`, and then submit it"
        require(self.records[track], f"{track} has no record yet; to make the first one, {hint}")
        records = self.records[track]
        return [record for record in records if not (is_form and record.is_form)][-1]

    def load(self, folder):
        """What a record's folder says, but for its parent's runs."""
        require(folder.is_dir() and not folder.is_symlink(), f"{folder}: is no folder, or a link")
        odd = PARTS ^ {path.name for path in paths_in(folder)} - {"baseline"}
        shown = ", ".join(map(ascii, sorted(odd)))[:80]
        require(not odd, f"{folder}: {shown} is missing, or is no part of a record")
        record = SimpleNamespace(folder=folder, track=folder.parent.name, name=folder.name)
        record.parent, record.baseline = None, []
        record.date, record.title = folder.name[:10], folder.name[11:]
        record.source = read_script(folder / "train_gpt.py")
        record.readme = read_text(folder / "README.md")
        record.by = "".join(re.findall(r"^By (.+)\.$", record.readme, re.MULTILINE)[:1])
        record.is_form = f"\n{FORM}\n" in record.readme
        record.runs = read_logs(folder / "logs", record.source)
        record.target = self.rules_of(record.track)["config"]["target_loss"]
        losses = [run.val_loss for run in record.runs]
        record.loss, record.loss_std = stats.mean_and_std(losses)
        record.loss_p = stats.p_below(losses, record.target)
        seconds = [run.train_time_ms / 1000 for run in record.runs]
        record.seconds, record.seconds_std = stats.mean_and_std(seconds)
        # Records are sorted by their age: what is merged comes first, then the day counts.
        is_new = not (self.merged and (self.merged / folder.relative_to(self.root)).is_dir())
        record.age = is_new, record.date, min(run.started for run in record.runs), record.name
        return record


def paths_in(folder):
    """What a folder holds, by name, but for NOBODYS; nothing of a link, or of no folder."""
    found = folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ()
    paths = []
    for path in sorted(found):
        if not path.name.startswith(NOBODYS):
            paths.append(path)
        elif path.is_file():
            size = path.stat().st_size
            require(
                size <= LIMITS.ignored, f"{path}: {size:,} bytes, which nobody reads; delete it"
            )
    return paths


def parent_of(record, older):
    """The record that one is compared with: the last of those older, and for a change of form the
    last with a gain, so that slow changes do not add up. None if there is none."""
    return ([None] + [other for other in older if not (record.is_form and other.is_form)])[-1]


def read_script(path):
    """The text of a script."""
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


def add_baseline(record, parent):
    """Read the runs of a record's parent, the one before it, each a pair with one of its own."""
    folder = record.folder / "baseline"
    require(parent or not folder.exists(), f"{folder}: the first record of a board has no parent")
    record.parent = parent
    record.baseline = read_logs(folder, parent.source) if parent else []
    record.gain, record.p = gain_of(record.runs, record.baseline) if parent else (None, None)
    record.over = max(run.over for run in record.runs + record.baseline)


def gain_of(runs, baseline):
    """((mean, low, high), p) of the relative gain in time of paired runs."""
    times = [run.train_time_ms for run in runs[: len(baseline)]]
    others = [run.train_time_ms for run in baseline[: len(runs)]]
    return stats.gain(times, others), stats.p_faster(times, others)
