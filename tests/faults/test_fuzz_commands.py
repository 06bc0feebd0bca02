"""Command lines of train_gpt.py, through main() up to where a run would allocate anything. What the
messages hold is tested in tests/trainer/test_config.py."""

import dataclasses
import os

import pytest
from hypothesis import strategies as st

import fuzzing
import helpers
import train_gpt

NANO = train_gpt.TRACKS["nano"]
OPTIONS = [
    *(field for field in dataclasses.fields(NANO) if field.name != "rules"),
    *(field for field in dataclasses.fields(NANO.stages[0]) if field.name != "start"),
]


def known_values(field):
    """The values of a field in the tracks and their stages."""
    configs = train_gpt.TRACKS.values()
    holders = [*configs, *(stage for config in configs for stage in config.stages)]
    return [getattr(holder, field.name) for holder in holders if hasattr(holder, field.name)]


def look_at(config, overrides, runtime, log, checkpoint, is_check):
    """Stands in for `open_run`: looks at what a run looks at before it builds its tensors."""
    for step in {0, config.steps // 2, config.steps - 1}:
        train_gpt.lr_multiplier(config, step)
        train_gpt.training_phase(config, step)
        train_gpt.evaluation_phase(config, step, config.val_batch_tokens)
        train_gpt.long_windows_until(config, step)
    train_gpt.open_corpus(config)


@pytest.fixture(scope="module")
def outcome_of(tmp_path_factory):
    """outcome_of(words): what main() makes of a command line, in a folder with a tiny corpus of the
    default's name."""
    folder = tmp_path_factory.mktemp("commands")
    helpers.make_corpus(folder / "data" / "python")
    (folder / "logs" / "old").mkdir(parents=True)
    (folder / "logs" / "old" / "checkpoint.pt").write_bytes(b"no checkpoint")

    def outcome(words):
        seen = fuzzing.observe(lambda: train_gpt.main(["--check", *words]), lines=None)
        return fuzzing.status_line(seen)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(train_gpt, "open_run", look_at)
        # the handlers here are the fuzzer's
        patch.setattr(train_gpt, "listen_for_signals", lambda: None)
        yield outcome
    assert sorted(os.listdir(folder)) == ["data", "logs"]
    assert os.listdir(folder / "logs") == ["old"]


@st.composite
def literals(draw):
    """Texts of nested tuples and rows of stages, often nearly right."""
    atom = st.one_of(
        fuzzing.ODD_INT,
        fuzzing.ODD_FLOAT,
        st.sampled_from([0, 1, 2, 4, 8, 64, 128, 0.0, 0.5, 1 / 3]),
        st.booleans(),
        st.none(),
        st.text(max_size=3),
    )
    names = st.sampled_from([field.name for field in dataclasses.fields(train_gpt.Stage)])

    def nested(inside):
        return st.one_of(
            st.lists(inside, max_size=4).map(tuple),
            st.lists(inside, max_size=3),
            st.dictionaries(names, inside, max_size=3),
            st.dictionaries(st.integers(), inside, max_size=2),
        )

    return repr(draw(st.recursive(atom, nested, max_leaves=8)))


def values_of(field):
    """Texts for a field's value: right ones, nearly right ones, and anything."""
    typed = {
        bool: st.sampled_from(["true", "False", "1", "0", "yes"]),
        int: fuzzing.ODD_INT.map(str),
        float: fuzzing.ODD_FLOAT.map(repr),
        tuple: literals(),
        str: fuzzing.ODD_TEXT,
    }[field.type]
    known = st.sampled_from(known_values(field)).map(str)
    return st.one_of(typed, typed, known, fuzzing.ODD_TEXT, literals())


def near_values(field):
    """Texts of values that may well be right: those of the tracks, and numbers like them."""
    known = known_values(field)
    if field.type is int:
        known = [near for value in known for near in (value, value // 2, value * 2, value + 1)]
    if field.type is float:
        known = [near for value in known for near in (value, value / 2, value * 1.5)]
    words = field.metadata["help"].split(":")[0].split(" | ")
    return st.sampled_from([*map(str, known), *words])


def option_of(field):
    return "--" + field.name.replace("_", "-")


@st.composite
def near_options(draw):
    field = draw(st.sampled_from(OPTIONS))
    return [option_of(field), draw(near_values(field))]


@st.composite
def options(draw):
    """One `--key value` or `--key=value`, or what is not quite that."""
    field = draw(st.sampled_from(OPTIONS))
    name, value = option_of(field), draw(values_of(field))
    form = draw(st.integers(0, 19))
    if form == 0:
        return [draw(fuzzing.ODD_TEXT)]
    if form == 1:
        return ["--" + draw(fuzzing.ODD_TEXT), value]
    if form == 2:
        return [name[:-1], value]
    if form == 3:
        return [f"--{field.name}", value]
    if form < 9:
        return [f"{name}={value}"]
    return [name, value]


TINY = helpers.arguments({**helpers.TINY, "data": "data/python"})
STARTS = [[], [], TINY, ["--track", "fineweb"], ["--track", "continual"], ["--resume", "old"]]


@st.composite
def commands(draw):
    """The words of a command line, none of which asks for help."""
    words = list(draw(st.sampled_from(STARTS)))
    kind = draw(st.sampled_from([options(), near_options()]))
    for option in draw(st.lists(kind, max_size=4)):
        words += option
    return [word for word in words if word not in ("--help", "-h")]


HARD = [
    [],
    TINY,
    ["-" * 5000, "1"],
    ["--" + "-" * 5000, "1"],
    ["\n", "x"],
    ["--\udcff", "x"],
    ["--steps", "-" * 5000],
    ["--steps", "9" * 400],
    ["--steps", "9" * 5000],
    ["--steps", "100000000"],
    ["--adam-lr", "1" * 400],
    ["--epochs", "1" + "0" * 300],
    ["--long-layers", "9" * 5000],
    ["--long-layers", "(" * 300 + ")" * 300],
    ["--num-layers", "10000000000", "--value-embedding-layers", "(0.5,)"],
    ["--ngram-orders", "(2.0,)"],
    ["--model-dim", "1000000000000"],
    ["--index-bits", "1" * 30],
    ["--workers", "1000000"],
    ["--windows", "-" * 5000 + "1"],
    ["--windows", f"(64, {'1' * 400})"],
    ["--windows", "(64, 0x" + "f" * 20000 + ")"],
    ["--mtp-weights", str((1.0,) * 5000)],
    ["--stages", "({},)" * 5000],
    ["--stages", str(tuple({"start": i / 100} for i in range(100)))],
    ["--stages", "({'start': 0}, {'start': 'x'})"],
    ["--stages", "({'a\\nb': 0},)"],
    ["--data", "a\nb"],
    ["--data", "a\x1b[2Jb"],
    ["--data", "\udcff"],
    ["--data", "\0"],
    ["--data", "x" * 5000],
    ["--resume", "\0"],
    ["--resume", "x" * 5000],
    ["--resume", "a\nb"],
    ["--run-id", "a\nb"],
    ["--run-of", "a\nb"],
    ["--matrix-update", "\n"],
    ["--track", ""],
    ["--track", "\ud800"],
]


@pytest.mark.parametrize("words", HARD, ids=lambda words: ascii(" ".join(words))[:60])
def test_a_command_line_that_was_hard(words, outcome_of):
    outcome = outcome_of(words)
    assert not outcome.problem, outcome.problem


@pytest.mark.slow
def test_command_lines(outcome_of):
    fuzzing.hold(commands(), outcome_of, 300)


@fuzzing.in_parts
def test_many_command_lines(part, outcome_of):
    name = "command lines of train_gpt.py"
    fuzzing.survey(name, part, commands(), outcome_of, 20_000)
