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
        micro_batch_tokens=32 * 2**4,
        stages=(
            Stage(start=0.0, micro_batches=4),
            Stage(1 / 3, 8, lr=1.5),
        ),
        rules={"attention": Rule(group="matrices"), "x": Rule(group="small", lr_mul=(1.0, 0.5))},
    ),
}
"""


def test_the_trainers_form_is_read():
    """Calls of dataclasses, and their defaults."""
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


def test_a_helper_says_which_of_its_arguments_is_the_default():
    """As the trainer's does, whose fields have the default first."""
    helper = """
def knob(default, help_text, check=None):
    return dataclasses.field(default=default)


"""
    text = changed("from dataclasses import dataclass\n", "import dataclasses\n" + helper)
    text = text.replace("@dataclass", "@dataclasses.dataclass").replace("made(in_vain)", "None")
    for old, new in {
        'knob("name of the track")': 'knob("one", "name of the track")',
        'knob("optimizer steps", at_least(1))': 'knob(2**21 - 1, "optimizer steps", 1)',
        'anything("tokens of a micro-batch")': 'knob(-1, help_text="tokens")',
        'knob("rows of the schedule")': 'knob((Stage(0.0, 2), Stage(1 / 3, 8)), "rows")',
        'knob("rules by name")': 'knob(dataclasses.MISSING, "rules by name")',
        'knob("seed of weights and data order", default=-1)': 'knob(help_text="s", default=-1)',
        'knob("place in a batch", default="")': 'knob("", "place")',
    }.items():
        assert old in text
        text = text.replace(old, new)
    tracks = {"one": "rules={}", "two": 'track="two", rules={"a": 1}, steps=3, stages=(), seed=2'}
    lines = [f"    {name!r}: Config({words}),\n" for name, words in tracks.items()]
    text = text[: text.index("TRACKS = {")] + f"TRACKS = {{\n{''.join(lines)}}}\n"
    names = {"__name__": "made"}
    exec(compile(text, "made", "exec"), names)
    for name in tracks:
        config = json.loads(json.dumps(dataclasses.asdict(names["TRACKS"][name])))
        assert source.config_of(text, name) == config
    with pytest.raises(RecordError, match="cannot be read"):
        source.config_of(text.replace("rules={}", ""), "one")


def test_synthetic_scripts_say_what_their_logs_say():
    """The tests' own scripts."""
    assert source.config_of(made.source_of(), "mini") == made.CONFIG


def test_configurations_are_read_off_the_trainer():
    """As they are when it runs."""
    text = Path(train_gpt.__file__).read_text()
    for name in ("mini", "fineweb"):  # another script may have added its own
        track = train_gpt.TRACKS[name]
        found = source.config_of(text, name)
        assert found == json.loads(json.dumps(dataclasses.asdict(track)))


# ----- sources that cannot be read


def default(field):
    return f"class Config:\n    a: int = {field}\n\nTRACKS = {{\n    'x': Config(),\n}}\n"


def changed(old, new):
    assert old in NEW
    return NEW.replace(old, new)


NEEDED = "one class Config and one line TRACKS = { are needed"
SMALL = "is no arithmetic on small numbers"
TRACK = "class Config:\n    a: int = 1\n\nTRACKS = {\n"
UNREADABLE = {
    "no text": ("", NEEDED),
    "no tracks": ("class Config:\n    a: int = 1\n", NEEDED),
    "no class": ("A = 1\n\nTRACKS = {\n}\n", NEEDED),
    "two classes": (changed("class Rule:", "class Config:"), NEEDED),
    "a large power": (default("9**9**9"), SMALL),
    "a large product": (default("2**63 * 2**63 * 2"), SMALL),
    "a large text": (default("9**9 * 'a'"), SMALL),
    "a large list": (default("(1, 2) * 9**9"), SMALL),
    "a number of many digits": (default(f"0x{'f' * 5000}"), "Exceeds the limit"),
    "a call of a function": (changed("steps=10", "steps=open('x')"), "KeyError"),
    "a field without a value": (default("1").replace(" = 1", ""), "cannot be read"),
    "a division by zero": (default("1/0"), "ZeroDivisionError"),
    "a root": (default("(-1) ** 0.5"), "complex is not JSON"),
    "many brackets": ("(" * 5000 + "\nTRACKS = {\n}\n", "the script is no Python"),
    "many signs": (default("-" * 3000 + "1"), "recursion depth exceeded"),
    "an unknown field": (TRACK + "    'x': Config(b=1),\n}\n", "Config has no such field"),
    "a track of a function": (TRACK + "    'x': made(),\n}\n", "KeyError"),
    "a track without a call": (TRACK + "    'x': 1,\n}\n", "cannot be read"),
    "tracks from elsewhere": (TRACK + "    **more,\n}\n", "cannot be read"),
    "tracks that change": (TRACK + "}\n\nTRACKS['x'] = 1\n", NEEDED),
    "tracks in a text": (
        '"""\nTRACKS = {\n    "mini": Config(),\n}\n"""\nclass Config: 1\n',
        "cannot be read",
    ),
    "a field that is not given": (changed("        steps=10,\n", ""), "cannot be read"),
    "a stage's field that is not given": (
        changed("Stage(start=0.0, micro_batches=4)", "Stage(start=0.0)"),
        "cannot be read",
    ),
    "an unknown field of a rule": (
        changed('group="small"', 'group="small", lr=2.0'),
        "Rule has no such field",
    ),
    "a stage with too much": (
        changed("Stage(1 / 3, 8, ", "Stage(1, 8, 1, 1, "),
        "has no such field",
    ),
    "a stage of a list": (changed("Stage(1 / 3, 8, ", "Stage(*row, "), "cannot be read"),
    "a class of elsewhere": (changed("Rule(group", "elsewhere.Rule(group"), "cannot be read"),
    "a name": (changed("32 * 2**4", "32 * WIDTH"), "malformed node"),
    "a default that is made": (
        changed('knob("place in a batch", default="")', 'knob("place", default=made())'),
        "KeyError",
    ),
    "a sum of texts": (changed("steps=10", "steps='a' + 'b'"), SMALL),
    "a text of bytes": (changed("steps=10", "steps=b'a'"), "bytes is not JSON"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_sources_whose_configuration_cannot_be_read_off(name):
    text, reason = UNREADABLE[name]
    with pytest.raises(RecordError, match=re.escape(reason)):
        source.config_of(text, "x")


def test_unknown_track_is_named():
    with pytest.raises(RecordError, match="the source has no track 'two', but 'one'"):
        source.config_of(NEW, "two")
