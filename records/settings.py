"""What this package reads of its own folder: the rules of boards, the forms of what people and
trainers write, and the pages that are filled in. A damaged file is named in one line."""

import tomllib
from pathlib import Path
from types import SimpleNamespace

from records.files import about, parse_json, read_text

HOME = Path(__file__).parent


def settings(name):
    """What a file of settings holds."""
    with about(HOME / name):
        text = read_text(HOME / name)
        return parse_json(text) if name.endswith(".json") else tomllib.loads(text)


def boards_of(rules):
    """{board: its rules}. A board that names another one's track takes over its other rules."""
    boards = {}
    for name, own in rules["boards"].items():
        other = boards.get(own.get("track"), {})
        boards[name] = {"track": name, **other, **own}
    return boards


RULES = settings("rules.json")
with about(HOME / "rules.json"):
    BOARDS = boards_of(RULES)
FORMS = settings("forms.toml")  # of what people and trainers write
LIMITS = SimpleNamespace(**FORMS["limits"])
