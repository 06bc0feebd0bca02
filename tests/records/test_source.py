"""Configurations that are read off a script's source, and sources that cannot be read. The older
form, whose defaults are all named, is that of merged records, which test_verify.py reads."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import train_gpt
from records import files, source
from records.files import RecordError

NEW = """
import dataclasses
from dataclasses import dataclass


def knob(default, help_text, check=None):
    return dataclasses.field(default=default)


@dataclass(frozen=True)
class Stage:
    start: float
    micro_batches: int = knob(dataclasses.MISSING, "micro-batches of a step")
    lr: float = 1.0


@dataclass
class Never:
    made: list = None


@dataclass(frozen=True)
class Config:
    track: str = knob("one", "name of the track", Never)
    micro_batch_tokens: int = knob(32 * 2**4 - 1, "tokens of a micro-batch")
    stages: tuple = knob((Stage(0.0, 4), Stage(1 / 3, 8, lr=1.5)), "rows of the schedule")
    steps: int = knob(help_text="optimizer steps", default=10)
    seed: int = knob(-1, "seed of weights and data order")
    plain: float = 0.5

    def __post_init__(self):
        pass


TRACKS = {
    "one": Config(),
    "two": Config(track="two", steps=20, stages=(Stage(0.0, micro_batches=2),)),
}
"""


def test_what_is_read_is_what_python_makes_of_it():
    names = {"__name__": "made"}
    exec(compile(NEW, "made", "exec"), names)
    tracks = {name: dataclasses.asdict(config) for name, config in names["TRACKS"].items()}
    assert source.tracks_of(NEW) == json.loads(json.dumps(tracks))


def test_configurations_are_read_off_the_trainer():
    """As they are when it runs."""
    text = Path(train_gpt.__file__).read_text()
    for name, rules in files.RULES["tracks"].items():  # another script may have added its own
        if not rules.get("closed"):
            config = json.loads(json.dumps(dataclasses.asdict(train_gpt.TRACKS[name])))
            assert source.config_of(text, name) == config


# ----- what scripts import

IMPORTS = {
    "import json, data.text": "data.text",
    "if True: import data as json": "data",
    "def f():\n    from continual import main": "continual",
    "from . import sample": ".",
    "import helpers": "helpers",
    "from records import experiment": "records",
    "import records.pictures": "records.pictures",
    "import importlib": "importlib",
    "import importlib.machinery": "importlib.machinery",
    "from importlib import import_module": "importlib",
    "import importlib.util\nimportlib.import_module('data')": "import_module",
    "__builtins__.eval('x')": "__builtins__",
    "import importlib.util\nload = importlib": "importlib",
    "import importlib.util\nimportlib.util.spec_from_file_location": "importlib",
    "from runpy import run_path": "runpy",
    "__import__('data')": "__import__",
    "exec(open('data/text.py').read())": "exec",
    "f.__import__": "__import__",
}


@pytest.mark.parametrize("line", IMPORTS)
def test_scripts_import_nothing_of_the_repository(line):
    with pytest.raises(
        RecordError, match=rf"(imports|word) {re.escape(IMPORTS[line])}, .* no log holds"
    ):
        source.tracks_of(f"{line}\n{NEW}")


def test_what_scripts_may_import():
    lines = ["import os.path, torch.nn as nn", "from numba import njit", "import importlib.util"]
    lines += [
        "importlib.util.find_spec('torch')",
        "from records.picture import plot_run",
        "model.eval()",
    ]
    assert source.tracks_of("\n".join([*lines, NEW])) == source.tracks_of(NEW)


# ----- sources that cannot be read


def default(field):
    return f"class Config:\n    a: int = {field}\n\nTRACKS = {{\n    'x': Config(),\n}}\n"


def changed(old, new):
    assert old in NEW
    return NEW.replace(old, new)


NEEDED = "one class Config and one line TRACKS = { are needed"
SMALL = "is no arithmetic on small numbers"
UNREAD = "its tracks cannot be read from the source"
TRACK = "class Config:\n    a: int = 1\n\nTRACKS = {\n"
UNREADABLE = {
    "no text": ("", NEEDED),
    "no tracks": ("class Config:\n    a: int = 1\n", NEEDED),
    "no class": ("A = 1\n\nTRACKS = {\n}\n", NEEDED),
    "two classes": (changed("class Never:", "class Config:"), NEEDED),
    "a large power": (default("9**9**9"), SMALL),
    "a large product": (default("2**63 * 2**63 * 2"), SMALL),
    "a large text": (default("9**9 * 'a'"), SMALL),
    "a large list": (default("(1, 2) * 9**9"), SMALL),
    "a number of many digits": (default(f"0x{'f' * 5000}"), "Exceeds the limit"),
    "a call of a function": (changed("steps=20", "steps=open('x')"), "KeyError"),
    "a field without a value": (default("1").replace(" = 1", ""), UNREAD),
    "a division by zero": (default("1/0"), "ZeroDivisionError"),
    "a root": (default("(-1) ** 0.5"), "complex is not JSON"),
    "many brackets": ("(" * 5000 + "\nTRACKS = {\n}\n", "the script is no Python"),
    "many signs": (default("-" * 3000 + "1"), "recursion depth exceeded"),
    "an unknown field": (TRACK + "    'x': Config(b=1),\n}\n", "Config has no such field"),
    "a track of a function": (TRACK + "    'x': made(),\n}\n", "KeyError"),
    "a track without a call": (TRACK + "    'x': 1,\n}\n", UNREAD),
    "tracks from elsewhere": (TRACK + "    **more,\n}\n", UNREAD),
    "tracks that change": (TRACK + "}\n\nTRACKS['x'] = 1\n", NEEDED),
    "tracks in a text": (f'"""\n{TRACK}}}\n"""\nclass Config: 1\n', UNREAD),
    "a default that is missing": (changed('knob("one"', "knob(dataclasses.MISSING"), UNREAD),
    "a stage's field that is missing": (changed("Stage(0.0, 4)", "Stage(0.0)"), UNREAD),
    "a stage with too much": (changed("Stage(1 / 3, 8, ", "Stage(1, 8, 1, 1, "), "no such field"),
    "a stage of a list": (changed("Stage(1 / 3, 8, ", "Stage(*row, "), UNREAD),
    "a class of elsewhere": (changed("Stage(0.0, 4)", "elsewhere.Stage(0.0, 4)"), UNREAD),
    "a name": (changed("32 * 2**4", "32 * WIDTH"), "malformed node"),
    "a default of a list": (changed('knob(-1, "seed', 'knob(*row, "seed'), UNREAD),
    "a default that is made": (changed("knob(-1,", "knob(made(),"), "KeyError"),
    "a helper of elsewhere": (changed("knob(-1,", "other.knob(-1,"), UNREAD),
    "a sum of texts": (changed("steps=20", "steps='a' + 'b'"), SMALL),
    "a text of bytes": (changed("steps=20", "steps=b'a'"), "bytes is not JSON"),
    "no such track": (NEW, "the source has no track 'x', but 'one', 'two'"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_sources_whose_configuration_cannot_be_read_off(name):
    text, reason = UNREADABLE[name]
    with pytest.raises(RecordError, match=re.escape(reason)):
        source.config_of(text, "x")
