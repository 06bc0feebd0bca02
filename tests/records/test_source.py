"""Configurations that are read off a script's source, and sources that cannot be read. The older
form, whose defaults are all named, is that of merged records, which test_verify.py reads."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest

import train_gpt
from records import source
from records.files import RecordError

HERE = Path(__file__).parent
NEW = (HERE / "good_source.txt").read_text()
MANY = {"MANY_F": "f" * 5000, "MANY_BRACKETS": "(" * 5000, "MANY_SIGNS": "-" * 3000}
ROWS = tomllib.loads((HERE / "sources.toml").read_text())
IMPORTS, UNREADABLE = ROWS["imports"], ROWS["unreadable"]


def test_what_is_read_is_what_python_makes_of_it():
    names = {"__name__": "made"}
    exec(compile(NEW, "made", "exec"), names)
    tracks = {name: dataclasses.asdict(config) for name, config in names["TRACKS"].items()}
    assert source.tracks_of(NEW) == json.loads(json.dumps(tracks))


def test_configurations_are_read_off_the_trainer():
    """As they are when it runs."""
    text = Path(train_gpt.__file__).read_text()
    for name, config in train_gpt.TRACKS.items():  # another script may have added its own
        found = source.tracks_of(text).get(name, {"track": "added"})
        config = json.loads(json.dumps(dataclasses.asdict(config)))
        assert found == config or found["track"] == "added"


# ----- what scripts import


@pytest.mark.parametrize("line", IMPORTS)
def test_scripts_import_nothing_of_the_repository(line):
    words = rf"(imports|word) {re.escape(IMPORTS[line])}, .* no log holds"
    with pytest.raises(RecordError, match=words):
        source.tracks_of(f"{line}\n{NEW}")


def test_what_scripts_may_import():
    lines = ["import os.path, torch.nn as nn", "from triton import jit", "import importlib.util"]
    lines += ["importlib.util.find_spec('torch')", "from records.picture import plot_run"]
    lines += ["from records import gates", "import records.gates", "model.eval()"]
    assert source.tracks_of("\n".join([*lines, NEW])) == source.tracks_of(NEW)


# ----- sources that cannot be read


def default(field):
    return f"class Config:\n    a: int = {field}\n\nTRACKS = {{\n    'x': Config(),\n}}\n"


def changed(old, new):
    assert old in NEW
    return NEW.replace(old, new)


@pytest.mark.parametrize("name", UNREADABLE)
def test_sources_whose_configuration_cannot_be_read_off(name):
    kind, *words, reason = UNREADABLE[name]
    text = {"str": str, "default": default, "changed": changed}[kind](*words)
    for word, value in MANY.items():
        text = text.replace(word, value)
    with pytest.raises(RecordError, match=re.escape(reason)):
        source.config_of(text, "x")
