"""Command lines of train_gpt.py, through main() up to where a run would allocate anything.

Whatever it is given, it ends within seconds in success or in one printable line, never in a
traceback. What the messages hold is tested in tests/trainer/test_config.py.
"""

import contextlib
import dataclasses
import io
import os
import resource
import signal
import traceback
from pathlib import Path
from signal import signal as set_handler  # tests keep the trainer from calling the other one

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import helpers
import train_gpt

LONGEST_LINE = 2000
SECONDS = 5  # of processor time, which other processes do not lengthen
MEMORY = 4 << 30  # bytes, beyond what the process has


class Hang(BaseException):
    pass


@contextlib.contextmanager
def limited():
    """Raise Hang in what takes too long, and MemoryError in what takes too much."""

    def stop(number, frame):
        raise Hang()

    handler = set_handler(signal.SIGPROF, stop)
    memory = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, memory[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, memory)
        signal.setitimer(signal.ITIMER_PROF, 0)
        set_handler(signal.SIGPROF, handler)


def problem_of(call):
    """How call(), which returns an exit status, breaks the promise, in words; "" if it keeps it. A
    refusal is one line of stdout, its last; notes go to stderr."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            with limited():
                status = call()
    except (Exception, SystemExit, Hang):
        return traceback.format_exc()
    out, err = (stream.buffer.getvalue().decode() for stream in streams)
    if status not in (0, 1, 2):
        return f"status {status!r}"
    for line in (out + err).split("\n"):
        if not line.replace("\t", " ").isprintable():
            return f"cannot be printed: {ascii(line[:200])}"
        if status and len(line) > LONGEST_LINE:
            return f"{len(line)} characters: {line[:80]}"
    lines = out.splitlines()
    said = [line for line in lines if line.startswith("status:")]
    if status and (len(said) != 1 or lines[-1] != said[0]):
        return f"{len(said)} status lines: {lines[:3]}"
    return ""


def look_at(config, overrides, runtime, log, checkpoint, is_check):
    """Stands in for `open_run`: looks at what a run looks at before it builds its tensors."""
    for step in {0, config.steps // 2, config.steps - 1}:
        train_gpt.lr_multiplier(config, step)
        train_gpt.training_phase(config, step)
        train_gpt.evaluation_phase(config, step, config.val_batch_tokens)
        train_gpt.long_windows_until(config, step)
    train_gpt.open_corpus(config)


@pytest.fixture(scope="module")
def problem_with(tmp_path_factory):
    """problem_with(words): what is wrong with main()'s answer to a command line, in a folder with a
    tiny corpus of the default's name."""
    folder = tmp_path_factory.mktemp("commands")
    helpers.make_corpus(folder / "data" / "python")
    (folder / "logs" / "old").mkdir(parents=True)
    (folder / "logs" / "old" / "checkpoint.pt").write_bytes(b"no checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(train_gpt, "open_run", look_at)
        patch.setattr(train_gpt, "listen_for_signals", lambda: None)
        yield lambda words: problem_of(lambda: train_gpt.main(["--check", *words]))
    assert sorted(os.listdir(folder)) == ["data", "logs"]
    assert os.listdir(folder / "logs") == ["old"]


# ----- examples

ODD_WORDS = ["", " ", "-", "--", "auto", "..", "../x", "/", "/dev/null", "~", "nan", "inf", "-inf"]
ODD_WORDS += ["1e400", "1e-400", "-0.0", "0x10", "1_000", "\u0663", "None", "True", "%s", "{}"]
ODD_WORDS += ["a\nb", *(character * 5000 for character in "*(-9")]
ODD_TEXT = st.one_of(
    st.text(max_size=20),
    st.text("\n\r\x1b\x00\x85\u2028\u202e\ud800\udcff", max_size=4),
    st.sampled_from(ODD_WORDS),
)
LARGE = [2**bits + more for bits in (15, 16, 31, 32, 53, 63, 64) for more in (-1, 0)]
LARGE += [sign * 10**digits for sign in (1, -1) for digits in (5, 19, 39, 400)]
ODD_INT = st.one_of(st.integers(-2, 300), st.integers(), st.sampled_from(LARGE))
ODD_FLOAT = st.one_of(st.floats(), st.sampled_from([0.0, -0.0, 1.0, 0.5, 1e-300, 1e300, 1 - 1e-16]))
MINI = train_gpt.TRACKS["mini"]
OPTIONS = [
    *(field for field in dataclasses.fields(MINI) if field.name != "rules"),
    *(field for field in dataclasses.fields(MINI.stages[0]) if field.name != "start"),
]


def literals():
    """Texts of nested tuples and rows of stages, often nearly right."""
    near = st.sampled_from([0, 1, 2, 4, 8, 64, 128, 0.0, 0.5, 1 / 3, True, None, "a"])
    names = st.sampled_from([field.name for field in dataclasses.fields(train_gpt.Stage)])

    def nested(inside):
        return st.one_of(
            st.lists(inside, max_size=4).map(tuple),
            st.lists(inside, max_size=3),
            st.dictionaries(st.one_of(names, st.integers()), inside, max_size=3),
        )

    atom = st.one_of(ODD_INT, ODD_FLOAT, near)
    return st.recursive(atom, nested, max_leaves=8).map(repr)


def values_of(field):
    """Texts for a field's value: right ones, nearly right ones, and anything."""
    holders = [*train_gpt.TRACKS.values()]
    holders += [stage for config in train_gpt.TRACKS.values() for stage in config.stages]
    known = [getattr(holder, field.name) for holder in holders if hasattr(holder, field.name)]
    if field.type in (int, float):
        known = [near for value in known for near in (value, value // 2, value * 2, value + 1)]
    typed = {
        bool: st.sampled_from(["true", "False", "1", "0", "yes"]),
        int: ODD_INT.map(str),
        float: ODD_FLOAT.map(repr),
        tuple: literals(),
        str: ODD_TEXT,
    }[field.type]
    return st.one_of(typed, typed, st.sampled_from(known).map(str), ODD_TEXT, literals())


@st.composite
def options(draw):
    """One `--key value` or `--key=value`, or what is not quite that."""
    field = draw(st.sampled_from(OPTIONS))
    name, value = "--" + field.name.replace("_", "-"), draw(values_of(field))
    usual = [[name, value]] * 10 + [[f"{name}={value}"]] * 5
    odd = [[draw(ODD_TEXT)], ["--" + draw(ODD_TEXT), value], [name[:-1], value], [name]]
    return draw(st.sampled_from([*usual, *odd]))


TINY = helpers.arguments({**helpers.TINY, "data": "data/python"})
STARTS = [[], [], TINY, ["--track", "fineweb"], ["--track", "continual"], ["--resume", "old"]]


@st.composite
def commands(draw):
    """The words of a command line, none of which asks for help."""
    words = list(draw(st.sampled_from(STARTS)))
    for option in draw(st.lists(options(), max_size=4)):
        words += option
    return [word for word in words if word not in ("--help", "-h")]


HARD = [
    [],
    TINY,
    ["--" + "-" * 5000, "1"],
    ["--\udcff", "x"],
    ["--steps", "9" * 5000],
    ["--steps", "100000000"],
    ["--epochs", "1" + "0" * 300],
    ["--long-layers", "(" * 300 + ")" * 300],
    ["--num-layers", "10000000000", "--value-embedding-layers", "(0.5,)"],
    ["--model-dim", "1000000000000"],
    ["--windows", "(64, 0x" + "f" * 20000 + ")"],
    ["--mtp-weights", str((1.0,) * 5000)],
    ["--stages", "({},)" * 5000],
    ["--stages", str(tuple({"start": i / 100} for i in range(100)))],
    ["--stages", "({'a\\nb': 0},)"],
    ["--data", "a\x1b[2Jb"],
    ["--data", "\0"],
    ["--data", "x" * 5000],
    ["--resume", "\0"],
    ["--resume", "a\nb"],
    ["--run-id", "a\nb"],
    ["--matrix-update", "\n"],
    ["--track", "\ud800"],
]


@pytest.mark.parametrize("words", HARD, ids=lambda words: ascii(" ".join(words))[:60])
def test_a_command_line_that_was_hard(words, problem_with):
    assert problem_with(words) == ""


@pytest.mark.slow
def test_command_lines(problem_with):
    """The same ones each time; the first that is wrong is made as small as may be."""

    @seed(0)
    @settings(
        max_examples=300,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(commands())
    def keep_the_promise(words):
        assert problem_with(words) == ""

    keep_the_promise()
