"""Command lines of train_gpt.py, through main() up to where a run would allocate anything."""
import dataclasses
import os

import pytest
from hypothesis import strategies as st

import fuzzing
import helpers
import train_gpt
from train_gpt import ConfigError

FIELDS = dataclasses.fields(train_gpt.Config)
NAMES = [field.name for field in FIELDS]


def start(config, overrides, runtime, content=None, hook=None, check=False):
    """Stands in for `train`: looks at what a run looks at before it builds its tensors."""
    try:
        for step in {0, config.steps // 2, config.steps - 1}:
            train_gpt.lr_multiplier(config, step)
            train_gpt.phase_at(config, step)
            train_gpt.windows_until(config, step)
        train_gpt.check_room(config, runtime)
        train_gpt.open_corpus(config)
    except (ConfigError, OSError) as error:
        print(f"status:error {train_gpt.one_line(error)}")
        return 2
    finally:
        runtime.close()
    return 0


@pytest.fixture(scope="module")
def outcome_of(tmp_path_factory):
    """outcome_of(words): what main() makes of a command line, in a folder with a tiny corpus of the default's name."""
    folder = tmp_path_factory.mktemp("commands")
    helpers.make_corpus(folder / "data" / "python")
    (folder / "logs" / "old").mkdir(parents=True)
    (folder / "logs" / "old" / "checkpoint.pt").write_bytes(b"no checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(train_gpt, "train", start)
        patch.setattr(train_gpt.signal, "signal", lambda *_: None)  # the handlers here are the fuzzer's
        yield lambda words: fuzzing.status_line(fuzzing.observe(lambda: train_gpt.main(words), lines=None))
    assert sorted(os.listdir(folder)) == ["data", "logs"] and os.listdir(folder / "logs") == ["old"]


@st.composite
def literals(draw):
    """Texts of nested tuples, as schedules are written, often nearly right."""
    atom = st.one_of(fuzzing.ODD_INT, fuzzing.ODD_FLOAT, st.sampled_from([0, 1, 2, 4, 8, 64, 128, 0.0, 0.5, 1 / 3]),
                     st.booleans(), st.none(), st.text(max_size=3))
    value = draw(st.recursive(atom, lambda inside: st.one_of(
        st.lists(inside, max_size=4).map(tuple), st.tuples(st.sampled_from([0, 0.0, 0.5, 1, -1]), inside),
        st.lists(inside, max_size=3), st.dictionaries(st.integers(), inside, max_size=2)), max_leaves=8))
    return repr(value)


def values_of(field):
    """Texts for a field's value: right ones, nearly right ones, and anything."""
    kind, shown = type(field.default), str(field.default)
    typed = {bool: st.sampled_from(["true", "False", "1", "0", "yes"]), int: fuzzing.ODD_INT.map(str),
             float: fuzzing.ODD_FLOAT.map(repr), tuple: literals(), str: fuzzing.ODD_TEXT}[kind]
    return st.one_of(typed, typed, st.just(shown), fuzzing.ODD_TEXT, literals())


def near_values(field):
    """Texts of values that may well be right: those of the tracks, and numbers like them."""
    known = [getattr(track, field.name) for track in train_gpt.TRACKS.values()]
    if type(field.default) in (int, float):
        return st.sampled_from([text for value in known for text in map(str, (
            value, value // 2, value * 2, value + 1) if type(value) is int else (value, value / 2, value * 1.5))])
    words = [*map(str, known), *field.metadata["help"].split(":")[0].split(" | ")]
    return st.sampled_from([*words, "true", "false"] if type(field.default) is bool else words)


@st.composite
def near_options(draw):
    field = draw(st.sampled_from(FIELDS))
    return [f"--{field.name}", draw(near_values(field))]


@st.composite
def options(draw):
    """One `--key value` or `--key=value`, or what is not quite that."""
    field = draw(st.sampled_from(FIELDS))
    name, value = field.name, draw(values_of(field))
    if draw(st.booleans()):
        name = name.replace("_", "-")
    form = draw(st.integers(0, 19))
    if form == 0:
        return [draw(fuzzing.ODD_TEXT)]
    if form == 1:
        return ["--" + draw(fuzzing.ODD_TEXT), value]
    if form == 2:
        return [f"--{name[:-1]}", value]
    return [f"--{name}={value}"] if form < 8 else [f"--{name}", value]


TINY = helpers.arguments({**helpers.TINY, "data": "data/python"})
COMMANDS = st.tuples(
    st.sampled_from([[], [], TINY, ["--track", "fineweb"], ["--track", "continual"], ["--resume", "old"], ["--check"]]),
    st.lists(options(), max_size=4) | st.lists(near_options(), max_size=4)).map(lambda parts: [*parts[0], *(word for option in parts[1] for word in option)]
                                         ).filter(lambda words: not {"--help", "-h"} & set(words))


@pytest.mark.parametrize("words", [
    [], TINY, ["--" + "-" * 5000, "1"], ["--micro_batches", "((0.0,4),(0.5,))"], ["--steps", "9" * 400],
    ["--steps", "100000000"], ["--num_layers", "10000000000", "--value_embedding_layers", "(0.5,)"],
    ["--ngram_orders", "(2.0,)"], ["--model_dim", "1000000000"], ["--run_id", "a\nb"], ["--data", "\x1b[2J"],
    ["--data", "\udcff"], ["--data", "\0"], ["--data", "x" * 5000], ["--resume", "\0"], ["--resume", "x" * 5000],
    ["--track", "\ud800"], ["--epochs", "1" + "0" * 300], ["--windows", "((0.0, (64, 128), 3),)"],
    ["--momentum", "(" * 300 + ")" * 300], ["--long_layers", "9" * 5000], ["\n", "x"], ["--\udcff", "x"]],
    ids=lambda words: ascii(" ".join(words))[:60])
def test_a_command_line_that_was_hard(words, outcome_of):
    outcome = outcome_of(words)
    assert not outcome.problem, outcome.problem


def test_command_lines(outcome_of):
    fuzzing.hold(COMMANDS, outcome_of, 300)


@fuzzing.in_parts
def test_many_command_lines(part, outcome_of):
    fuzzing.survey("command lines of train_gpt.py", part, COMMANDS, outcome_of, 20_000)
