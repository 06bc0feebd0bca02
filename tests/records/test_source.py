"""Configurations that are read off a script's source: of the trainer, of its older form, and of
sources that cannot be read."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import records_helpers as made
import train_gpt
from records import source
from records.files import RecordError

NEW = """
from dataclasses import dataclass

SIZE = 2**4
FADING = (1.0, 0.5)


@dataclass(frozen=True)
class Stage:
    start: float
    micro_batches: int
    lr: float = 1.0


@dataclass(frozen=True)
class Rule:
    group: str
    lr_mul: float | tuple = 1.0
    betas: tuple = (0.9, 0.95)


@dataclass
class Never:
    made: list = made(in_vain)


@dataclass(frozen=True, kw_only=True)
class Config:
    track: str = knob("name of the track")
    steps: int = knob("optimizer steps", at_least(1))
    micro_batch_tokens: int = anything("tokens of a micro-batch")
    stages: tuple = knob("rows of the schedule")
    rules: dict = knob("rules by name")
    seed: int = knob("seed of weights and data order", default=-1)
    run_of: str = knob("place in a batch", default="")
    plain: float = 0.5

    def __post_init__(self):
        pass


TRACKS = {
    "one": Config(
        track="one",
        steps=10,
        micro_batch_tokens=32 * SIZE,
        stages=(
            Stage(start=0.0, micro_batches=4),
            Stage(1 / 3, 8, lr=1.5),
        ),
        rules={"attention": Rule(group="matrices"), "x": Rule(group="small", lr_mul=FADING)},
    ),
}
"""


def test_the_trainers_form_is_read():
    """Calls of dataclasses, their defaults, and constants of the module."""
    assert source.tracks_of(NEW) == {
        "one": {
            "track": "one",
            "steps": 10,
            "micro_batch_tokens": 512,
            "stages": [
                {"start": 0.0, "micro_batches": 4, "lr": 1.0},
                {"start": 1 / 3, "micro_batches": 8, "lr": 1.5},
            ],
            "rules": {
                "attention": {"group": "matrices", "lr_mul": 1.0, "betas": [0.9, 0.95]},
                "x": {"group": "small", "lr_mul": [1.0, 0.5], "betas": [0.9, 0.95]},
            },
            "seed": -1,
            "run_of": "",
            "plain": 0.5,
        }
    }


def test_what_is_read_is_what_python_makes_of_it():
    """The same text, run with a `knob` as trainers have it, and logged as they do."""

    def knob(*words, **default):
        return dataclasses.field(**default)

    text = NEW.replace("made(in_vain)", "None")
    names = {"knob": knob, "anything": knob, "at_least": lambda number: None, "__name__": "made"}
    exec(compile(text, "made", "exec"), names)
    config = json.loads(json.dumps(dataclasses.asdict(names["TRACKS"]["one"])))
    assert source.config_of(NEW, "one") == config


def test_the_older_form_is_read():
    """Defaults by position, those of a schedule for all steps; a track may name nothing."""
    text = """
@dataclasses.dataclass(frozen=True)
class Config:
    track: str = knob("nano", "name of the track")
    micro_batches: tuple = schedule(4, "micro-batches of a step")
    windows: tuple = schedule((32, 64), "of attention")
    dtype: str = choice("bfloat16", "float32", help="of matrices")
    lr: float = knob(2 * -0.5, "rate", *not_negative)

TRACKS = {
    "nano": Config(),
    "other": Config(track="other", micro_batches=((0.0, 4), (1 / 3, 8))),
}
"""
    nano = {
        "track": "nano",
        "micro_batches": [[0.0, 4]],
        "windows": [[0.0, [32, 64]]],
        "dtype": "bfloat16",
        "lr": -1.0,
    }
    other = {**nano, "track": "other", "micro_batches": [[0.0, 4], [1 / 3, 8]]}
    assert source.tracks_of(text) == {"nano": nano, "other": other}


@pytest.mark.parametrize("tracks", [made.tracks_text, made.older_tracks_text])
def test_synthetic_scripts_say_what_their_logs_say(tracks):
    """The tests' own scripts, of both forms."""
    assert source.config_of(made.source_of(tracks=tracks), "nano") == made.CONFIG


def test_configurations_are_read_off_the_trainer():
    """As they are when it runs; so are the tokens."""
    text = Path(train_gpt.__file__).read_text()
    for name in ("nano", "mini", "fineweb"):  # another script may have added its own
        track = train_gpt.TRACKS[name]
        found = source.config_of(text, name)
        assert found == json.loads(json.dumps(dataclasses.asdict(track)))
        assert source.training_tokens(found) == train_gpt.training_tokens(track)


# ----- tokens


def stage(start, micro_batches):
    return {"start": start, "micro_batches": micro_batches}


@pytest.mark.parametrize(
    "steps, stages, batches",
    [
        (10, [stage(0.0, 4)], 40),
        # A stage holds from the first whole step at or behind its start: 10 / 3 is step 4.
        (10, [stage(0.0, 4), stage(1 / 3, 8)], 4 * 4 + 6 * 8),
        (9, [stage(0.0, 4), stage(1 / 3, 8)], 3 * 4 + 6 * 8),
        (10, [stage(0.0, 1), stage(0.5, 2), stage(0.95, 4), stage(1.0, 8)], 5 * 1 + 5 * 2),
    ],
)
def test_tokens_of_stages(steps, stages, batches):
    """And of the schedule that older scripts have for the same."""
    config = {"steps": steps, "micro_batch_tokens": 512}
    schedule = [[row["start"], row["micro_batches"]] for row in stages]
    assert source.training_tokens({**config, "stages": stages}) == 512 * batches
    assert source.training_tokens({**config, "micro_batches": schedule}) == 512 * batches


@pytest.mark.parametrize(
    "stages", [None, [4], [{"start": 0.0}], [stage("a", 4)], [stage(0.0, None)], [stage(1e999, 4)]]
)
def test_tokens_that_cannot_be_worked_out(stages):
    with pytest.raises(RecordError, match="the tokens of the run cannot be worked out"):
        source.training_tokens({"steps": 10, "micro_batch_tokens": 512, "stages": stages})
    with pytest.raises(RecordError, match="the tokens of the run cannot be worked out"):
        source.training_tokens({"steps": 10, "micro_batch_tokens": 512})
    with pytest.raises(RecordError, match="micro_batch_tokens are no whole numbers"):
        source.training_tokens({"steps": 10, "stages": [stage(0.0, 4)]})


# ----- sources that cannot be read


def older(field):
    return f"class Config:\n    a: int = {field}\n\nTRACKS = {{\n    'x': Config(),\n}}\n"


def changed(old, new):
    assert old in NEW
    return NEW.replace(old, new)


TRACK = "class Config:\n    a: int = knob(1, '')\n\nTRACKS = {\n"
UNREADABLE = {
    "no text": ("", "one line TRACKS"),
    "no tracks": ("class Config:\n    a: int = knob(1, '')\n", "one line TRACKS"),
    "no class": ("A = 1\n\nTRACKS = {\n}\n", "one class Config is needed"),
    "two classes": (changed("class Rule:", "class Config:"), "one class Config is needed"),
    "a large power": (older("knob(9**9**9, '')"), "no arithmetic on small numbers"),
    "a large product": (older("knob(2**63 * 2**63, '')"), "no arithmetic on small numbers"),
    "a call of a function": (older("knob(open('x'), '')"), "line 2 is no literal"),
    "a field without a value": (
        older("1").replace(" = 1", ""),
        "a is not given, nor has a default",
    ),
    "a division by zero": (older("knob(1/0, '')"), "ZeroDivisionError"),
    "many brackets": ("(" * 5000 + "\nTRACKS = {\n}\n", "SyntaxError"),
    "many signs": (older("knob(" + "-" * 3000 + "1, '')"), "RecursionError"),
    "an unknown field": (TRACK + "    'x': Config(b=1),\n}\n", "Config has no such field"),
    "a track by position": (TRACK + "    'x': Config(1),\n}\n", "a track is Config"),
    "a track of a function": (TRACK + "    'x': made(),\n}\n", "a track is Config"),
    "a track without a call": (TRACK + "    'x': 1,\n}\n", "cannot be read"),
    "tracks from elsewhere": (TRACK + "    **more,\n}\n", "cannot be read"),
    "tracks that change": (TRACK + "}\n\nTRACKS['x'] = 1\n", "one line TRACKS"),
    "tracks in a text": (
        '"""\nTRACKS = {\n    "nano": Config(),\n}\n"""\nclass Config: 1\n',
        "cannot be read",
    ),
    "a field that is not given": (
        changed("        steps=10,\n", ""),
        "steps is not given, nor has a default",
    ),
    "a stage's field that is not given": (
        changed("Stage(start=0.0, micro_batches=4)", "Stage(start=0.0)"),
        "micro_batches is not given, nor has a default",
    ),
    "an unknown field of a rule": (
        changed('group="small"', 'group="small", lr=2.0'),
        "Rule has no such field",
    ),
    "a stage with too much": (
        changed("Stage(1 / 3, 8, ", "Stage(1, 8, 1, 1, "),
        "has no such field",
    ),
    "a stage of a list": (changed("Stage(1 / 3, 8, ", "Stage(*row, "), "is no literal"),
    "a class of elsewhere": (changed("Rule(group", "elsewhere.Rule(group"), "is no literal"),
    "an unknown name": (changed("32 * SIZE", "32 * WIDTH"), "is no literal"),
    "a default that is made": (
        changed('knob("place in a batch", default="")', 'knob("place", default=made())'),
        "is no literal",
    ),
    "a key that is no text": (changed('{"attention": Rule', "{1: Rule"), "is no literal"),
    "a sum of texts": (changed("steps=10", "steps='a' + 'b'"), "is no literal"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_sources_whose_configuration_cannot_be_read_off(name):
    text, reason = UNREADABLE[name]
    with pytest.raises(RecordError, match=re.escape(reason)):
        source.config_of(text, "x")


def test_unknown_track_is_named():
    with pytest.raises(RecordError, match="the source has no track 'two', but 'one'"):
        source.config_of(NEW, "two")
