"""What the fuzzers share: the promise that each example is held to, hypothesis without chance, and
the page of counts.

The promise: whatever it is given, a command ends within seconds in success or in one printable
line; never in a traceback."""

import contextlib
import fcntl
import io
import itertools
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from signal import signal as set_handler  # tests keep the trainer from calling the other one

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import train_gpt

PAGE = Path(__file__).with_name("fuzzing.md")
HEAD = """# Fuzzing

Written by `LONG=1 ./run.sh test tests/faults`, a row for the latest run of each part. The examples
are drawn by `hypothesis`, the same ones each time. Each must end in success or in one printable
line of at most {length:,} characters, within {seconds} s of processor time.

| what | tried | accepted | refused | tracebacks | hangs | other messages | slowest | commit |
|---|---|---|---|---|---|---|---|---|
"""
LONGEST_LINE = 2000
SECONDS = 5  # of processor time, which other processes do not lengthen
MEMORY = 4 << 30  # bytes, beyond what the process has
STUCK = 30  # of the clock: nothing is done, as when a pipe without a writer is read


class Hang(BaseException):
    pass


@contextlib.contextmanager
def limited():
    """Raise Hang in what takes too long, and MemoryError in what takes too much. The timer of
    pytest-timeout is put back."""

    def stop(number, frame):
        raise Hang()

    started = time.monotonic()
    handlers = [set_handler(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)]
    memory = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, memory[1]))
    # Again and again, where the first one only leads to another wait.
    left, _ = signal.setitimer(signal.ITIMER_REAL, STUCK, STUCK)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, memory)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGPROF, signal.SIGALRM), handlers, strict=True):
            set_handler(number, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.1, left - (time.monotonic() - started)))


class Outcome:
    """What a call came to: `status`, or in `problem` how it broke the promise: (kind, where)."""

    def __init__(self, status=None, out="", err="", problem=None):
        self.status, self.out, self.err, self.problem = status, out, err, problem

    @property
    def refused(self):
        return not self.problem and self.status != 0


def place_of(error):
    """Type and place of an error, the innermost of this repository: the same for all examples of
    one defect."""
    root = str(Path(__file__).parents[2])
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(root)
        and "/tests/" not in frame.filename
        and "/.venv/" not in frame.filename
    ]
    where = f" in {Path(frames[-1].filename).name}:{frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{where}: {str(error)[:120]!r}"


def observe(call, lines=1, statuses=(0, 1, 2)):
    """The Outcome of call(), which returns an exit status. A refusal may print `lines` lines; None
    for any number."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    kept, problem, status = (sys.stdout, sys.stderr), None, None
    sys.stdout, sys.stderr = streams
    try:
        with limited():
            status = call()
    except Hang as error:
        problem = "hang", place_of(error)
    except (Exception, SystemExit) as error:
        problem = "traceback", place_of(error)
    finally:
        sys.stdout, sys.stderr = kept
    out, err = (stream.buffer.getvalue().decode() for stream in streams)
    if not problem:
        problem = message_problem(status, out, err, lines, statuses)
    return Outcome(status, out, err, problem)


def message_problem(status, out, err, lines, statuses):
    if status not in statuses:
        return "message", f"status {status!r}"
    said = (out + err).split("\n")
    if status and lines is not None and len(said) != lines + 1:
        return "message", f"{len(said) - 1} lines: {said[:3]}"
    for line in said:
        if not line.replace("\t", " ").isprintable():
            return "message", f"cannot be printed: {ascii(line[:200])}"
        if status and len(line) > LONGEST_LINE:
            return "message", f"{len(line)} characters: {line[:80]}"
    return None


def status_line(outcome):
    """The outcome; with a problem where a refusal is not told in one line of stdout, its last.
    Notes go to stderr."""
    lines = outcome.out.splitlines()
    said = [line for line in lines if line.startswith("status:")]
    if outcome.refused and (len(said) != 1 or lines[-1] != said[0]):
        outcome.problem = "message", f"{len(said)} status lines: {lines[:3]}"
    return outcome


# ----- hypothesis


def explore(strategy, trial, count, number=0, shrink=True):
    """Call trial(example) on `count` examples, the same ones for the same number; the first that
    raises is made as small as may be."""
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    options = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    seed(number)(options(given(strategy)(trial)))()


def hold(strategy, outcome_of, count):
    """Hold `count` examples to the promise; for the tests of every commit."""

    def trial(example):
        outcome = outcome_of(example)
        assert not outcome.problem, outcome.problem

    explore(strategy, trial, count)


PARTS = 4  # of what takes long: pytest shares them out among processes


def in_parts(test):
    return pytest.mark.long(pytest.mark.parametrize("part", range(1, PARTS + 1))(test))


def survey(name, part, strategy, outcome_of, total):
    """Try this part's share of `total` examples, whatever they come to, and write a row of the
    page; then hold them to the promise."""
    count, found, slowest = total // PARTS, {}, 0.0
    counts = dict.fromkeys(["tried", "accepted", "refused", "traceback", "hang", "message"], 0)

    def trial(example):
        nonlocal slowest
        started = time.process_time()
        outcome = outcome_of(example)
        slowest = max(slowest, time.process_time() - started)
        counts["tried"] += 1
        if outcome.problem:
            counts[outcome.problem[0]] += 1
            kind = re.sub(r"\d+", "0", str(outcome.problem))
            found.setdefault(kind, (outcome.problem, repr(example)[:2000]))
        else:
            counts["refused" if outcome.refused else "accepted"] += 1

    for number in itertools.count(1000 * part):
        if counts["tried"] == count:
            break
        # by few, as hypothesis becomes slow after thousands
        explore(strategy, trial, min(500, count - counts["tried"]), number, shrink=False)
    cells = [f"{value:,}" for value in counts.values()]
    commit = train_gpt.git_state()[0][:12]
    write_row([f"{name}, part {part} of {PARTS}", *cells, f"{slowest:.1f} s", commit])
    assert not found, "\n".join(f"{problem}: {example}" for problem, example in found.values())


def write_row(cells):
    """Replace a row of the page, or append it."""
    with open(PAGE, "a+") as page:
        fcntl.flock(page, fcntl.LOCK_EX)
        page.seek(0)
        rows = [
            row
            for row in page.read().splitlines()[HEAD.count("\n") :]
            if not row.startswith(f"| {cells[0]} |")
        ]
        page.truncate(0)
        page.write(HEAD.format(length=LONGEST_LINE, seconds=SECONDS))
        page.write("\n".join(sorted([*rows, "| " + " | ".join(cells) + " |"])) + "\n")


# ----- examples

ODD_TEXT = st.one_of(
    st.text(max_size=20),
    st.text("\n\r\x1b\x00\x85\u2028\u202e\ud800\udcff", max_size=4),
    st.sampled_from(
        [
            "",
            " ",
            "-",
            "--",
            "auto",
            "..",
            "../x",
            "/",
            "/dev/null",
            "/dev/zero",
            ".",
            "~",
            "nan",
            "inf",
            "-inf",
            "1e400",
            "1e-400",
            "-0.0",
            "0x10",
            "1_000",
            "\u0663",
            "None",
            "True",
            "*" * 5000,
            "(" * 5000,
            "-" * 5000,
            "9" * 5000,
            "\\",
            "$HOME",
            "%s",
            "{}",
            "a\nb",
        ]
    ),
)
ODD_INT = st.one_of(
    st.integers(-2, 300),
    st.integers(),
    st.sampled_from([2**bits + more for bits in (15, 16, 31, 32, 53, 63, 64) for more in (-1, 0)]),
    st.integers(5, 400).map(lambda digits: 10**digits),
    st.integers(5, 400).map(lambda digits: -(10**digits)),
)
ODD_FLOAT = st.one_of(st.floats(), st.sampled_from([0.0, -0.0, 1.0, 0.5, 1e-300, 1e300, 1 - 1e-16]))
ODD_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), ODD_INT, ODD_FLOAT, ODD_TEXT),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(ODD_TEXT, inside, max_size=3),
    max_leaves=6,
)


class Files(dict):
    """Contents by name; hypothesis need not write them out."""

    def __repr__(self):
        return f"{len(self)} files"


def change(path, action, argument):
    """Make something else of a file: bytes, gone, link, folder, pipe; or rename or copy it."""
    if action in ("rename", "copy"):
        with contextlib.suppress(OSError, ValueError):  # no name, or one that is there
            if action == "rename":
                path.rename(path.with_name(argument))
            elif path.is_file():
                path.with_name(argument).write_bytes(path.read_bytes())
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if action == "bytes":
        path.write_bytes(argument)
    elif action == "link":
        path.symlink_to(argument)
    elif action == "folder":
        path.mkdir()
    elif action == "pipe":
        os.mkfifo(path)


@st.composite
def changed_bytes(draw, content):
    """A file's content after a few changes: cut, lengthened, overwritten, moved; or something else
    altogether."""
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        size = len(content)
        at = draw(
            st.one_of(
                st.integers(0, min(64, size)),
                st.integers(0, size),
                st.integers(max(0, size - 64), size),
            )
        )
        how = draw(
            st.sampled_from(
                ["cut", "append", "flip", "overwrite", "remove", "repeat", "empty", "fill"]
            )
        )
        if how == "cut":
            del content[at:]
        elif how == "append":
            content += draw(st.binary(max_size=40))
        elif how == "flip" and at < size:
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "overwrite":
            piece = draw(
                st.one_of(
                    st.binary(min_size=1, max_size=16),
                    ODD_INT.map(lambda value: (value % 2**64).to_bytes(8, "little")),
                )
            )
            content[at : at + len(piece)] = piece
        elif how == "remove":
            del content[at : at + draw(st.integers(1, 300))]
        elif how == "repeat":
            content[at:at] = content[at : at + draw(st.integers(1, 300))]
        elif how == "empty":
            content = bytearray()
        elif how == "fill":
            content = bytearray(draw(st.sampled_from([b"\0", b"\xff", b"[", b"PK\3\4"]))) * draw(
                st.integers(1, 3000)
            )
    return bytes(content)


def paths_in(value, path=()):
    """The paths of all that is in nested dicts and lists, themselves included."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, (list, tuple))
        else ()
    )
    for key, inside in items:
        yield from paths_in(inside, (*path, key))


def replaced(value, path, new):
    """A copy of nested dicts and lists in which new(what was at the path) stands there, or nothing,
    if that is DROP."""
    if not path:
        return new(value)
    items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    if path[0] in items:
        items[path[0]] = replaced(items[path[0]], path[1:], new)
        if items[path[0]] is DROP:
            del items[path[0]]
    return items if isinstance(value, dict) else type(value)(items.values())


DROP = type(
    "Drop", (), {"__repr__": lambda self: "DROP"}
)()  # the same text in each process that collects the tests
