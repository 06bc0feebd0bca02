"""Other people's logs, for `plot` and `report` alone: nothing of them is verified, and no other
command reads them.

Two kinds are read. Speedruns write modded-nanogpt's
`step:125/1750 val_loss:4.6 train_time:21243ms step_avg:169.94ms`, after its source and rows of `=`,
with times in ms or s and whatever words stand between. llm.c writes `s:250 tel:5.1` for validation
and `s:250 trl:5.2 lr:...` for training, which has no times.
"""

import math
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from records.files import RecordError
from records.log import END_OF_CODE

LIMIT = 32 * 2**20  # bytes of a log
ENDINGS = {".txt", ".log", ".out", ".stdout"}  # of logs in a folder
LINE = re.compile(r"\s*(?:step|s):\s*(\d{1,9})(?:/\d{1,9})?((?:\s+[A-Za-z]\w*:\s*\S+)+)", re.ASCII)
WORD = re.compile(r"([A-Za-z]\w*):\s*(\S+)", re.ASCII)
TIME = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ms|s)", re.ASCII)
MILLISECONDS = {"ms": 1, "s": 1000}
LOSSES = {"val_loss": "val", "tel": "val", "train_loss": "train", "trl": "train"}


@dataclass(frozen=True)
class ForeignPoint:
    """One loss of another trainer's curve."""

    step: int
    loss: float
    time_ms: float | None  # None where the log has no times


@dataclass(frozen=True)
class ForeignRun:
    """The curves of another trainer's log, under a name of its own."""

    name: str
    curves: dict  # {"train": [ForeignPoint, ...], "val": [ForeignPoint, ...]}


def number(text):
    """A finite float, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def milliseconds(words, step):
    """The training time that a line's words say, or what its mean step says; None where neither
    does."""
    for key, times in (("train_time", 1), ("step_avg", step)):
        found = TIME.fullmatch(words.get(key, ""))
        if found:
            return float(found[1]) * MILLISECONDS[found[2]] * times
    return None


def parse(text):
    """{"train": [...], "val": [...]} of a log's text. Where steps begin again, another run does,
    and the last counts."""
    curves = {"train": [], "val": []}
    for line in text.splitlines():
        found = LINE.match(line)
        if not found:
            continue
        step = int(found[1])
        words = dict(WORD.findall(found[2]))
        for key in words.keys() & LOSSES.keys():
            loss = number(words[key])
            if loss is not None:
                point = ForeignPoint(step, loss, milliseconds(words, step))
                append(curves[LOSSES[key]], point)
    return curves


def append(curve, point):
    """Add a point to a curve, which begins anew where the point lies before its end."""
    if curve and point.step < curve[-1].step:
        curve.clear()
    curve.append(point)


def read_content(path):
    """The bytes of a regular file of bounded size; links are followed, for nothing is judged."""
    try:
        # O_NONBLOCK does not wait for a pipe's other end
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RecordError(f"{path}: is no regular file")
        content = file.read(LIMIT + 1)
    if len(content) > LIMIT:
        raise RecordError(f"{path}: holds more than {LIMIT:,} bytes")
    return content


def read(path):
    """The ForeignRun of a file. RecordError where it is none, or is a log of this trainer, which
    has to be whole."""
    path = Path(path)
    text = read_content(path).decode(errors="replace")
    if f"\n{END_OF_CODE}\n" in text:
        raise RecordError(f"{path}: is a log of this trainer, and not whole")
    curves = parse(text)
    if not any(curves.values()):
        raise RecordError(
            f"{path}: holds no curve: neither lines `step:N/M val_loss:X train_time:Tms` nor "
            f"`s:N tel:X`"
        )
    return ForeignRun(name_of(path), curves)


def name_of(path):
    """A log's folder and the beginning of its name, which often is a long hash."""
    path = path.absolute()
    name = f"{path.parent.name}/{path.stem[:12]}"
    return re.sub(r"[^ -~]", "?", name)


def logs_in(path):
    """Files of a path: itself, or what a folder holds directly."""
    path = Path(path)
    if not path.is_dir():
        return [path]
    logs = [entry for entry in path.iterdir() if entry.suffix in ENDINGS]
    found = sorted(log for log in logs if not log.is_symlink())
    if not found:
        raise RecordError(f"{path}: holds no file that ends in {', '.join(sorted(ENDINGS))}")
    return found
