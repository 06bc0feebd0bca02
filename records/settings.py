"""What this package reads of its own folder: the rules of boards, the forms of what people and
trainers write, and the pages that are filled in. A damaged file is named in one line."""

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

from records.files import about, parse_json, read_text, require

HOME = Path(__file__).parent
KINDS = {"number": (int, float), "count": int, "text": str, "pattern": str, "truth": bool}
BIGGEST = 2**64  # number that a setting may be


def check_shape(found, due, place=""):
    """RecordError unless the value at a place of a file has the shape that shapes.toml asks for."""
    where, shown = place or "it", ascii(found)[:60]
    if isinstance(due, list):
        require(isinstance(found, list), f"{where} is {shown}, a list is due")
        for number, value in enumerate(found):
            check_shape(value, due[0], f"{place}[{number}]")
    elif isinstance(due, dict):
        require(isinstance(found, dict), f"{where} is {shown}, names with values are due")
        listed = {name.removesuffix("?"): shape for name, shape in due.items() if name != "*"}
        missing = [name for name in due if name not in found and name != "*" and name[-1] != "?"]
        require(not missing, f"{where} has no {', '.join(missing)}")
        for name, value in found.items():
            inner = f"{place}.{ascii(name)[1:-1][:60]}".lstrip(".")
            require(name in listed or "*" in due, f"{inner} is not known")
            check_shape(value, listed.get(name, due.get("*")), inner)
    elif due != "any":
        is_kind = isinstance(found, KINDS[due]) and (due == "truth" or type(found) is not bool)
        require(is_kind, f"{where} is {shown}, a {due} is due")
        if due == "pattern":
            re.compile(found)
        elif due in ("number", "count"):
            require(0 <= found <= BIGGEST, f"{where} is {shown}, 0 to {BIGGEST} is due")


with about(HOME / "shapes.toml"):
    SHAPES = tomllib.loads(read_text(HOME / "shapes.toml"))


def settings(name):
    """What a file of settings holds, which has its shape."""
    with about(HOME / name):
        text = read_text(HOME / name)
        found = parse_json(text) if name.endswith(".json") else tomllib.loads(text)
        check_shape(found, SHAPES[name])
        return found


def boards_of(rules):
    """{board: what no record of it changes}. One of another board's track fixes that one's, too."""
    boards = {}
    for name, own in rules["boards"].items():
        other = boards.get(own.get("track"), {})
        config = {**other.get("config", {}), **own.get("config", {})}
        boards[name] = {"track": name, **other, **own, "config": config}
        check_shape(boards[name], SHAPES["board"], name)
    default = rules["default_track"]
    require(default in boards, f"default_track is {ascii(default)[:60]}, which is no board")
    return boards


def filled(page, /, **fields):
    """A page of this folder, whose fields in braces are filled in."""
    with about(HOME / page):
        return read_text(HOME / page).format(**fields)


RULES = settings("rules.json")
with about(HOME / "rules.json"):
    BOARDS = boards_of(RULES)
GAINS = settings("gains.toml")  # what a record's page says of them
FORMS = settings("forms.toml")  # of what people and trainers write
LIMITS = SimpleNamespace(**FORMS["limits"])
