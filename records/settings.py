"""What this package reads of its own folder: the rules of boards, the forms of what people and
trainers write, and the pages that are filled in. A damaged file is named in one line."""

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

from records.files import about, parse_json, read_text, require

HOME = Path(__file__).parent
BIGGEST = 2**64  # number that a setting may be

# The shape of a file: a type, [the shape of each item], or {name: shape}. A name with a question
# mark may be absent, and `str` stands for all names that are not listed.
BOARD = {
    "track": str,
    "config": {"target_loss": float, "val_sha256": str, str: object},
    "manifest_sha256": str,
    "copy_loss": float,
    "closed?": bool,
    "gpus?": [int],
    "judged_by?": str,
    "older_scripts?": [str],
    "plain?": {"record?": str, "factor?": float, str: object},
    "provisional?": str,
    "stages?": {str: object},
}
SHAPES = {
    "rules.json": {
        "alpha": float,
        "default_track": str,
        "packages": [str],
        "boards": {str: {str: object}},  # of which each has a shape when it is complete
    },
    "forms.toml": {
        **dict.fromkeys(("asked", "authors", "coding"), re.Pattern),
        **dict.fromkeys(("called", "loaders", "names"), [str]),
        "head": [[str]],
        "kinds": {str: re.Pattern},
        "limits": {
            **dict.fromkeys(("choosing", "dtypes", "gates", "machine"), [str]),
            **dict.fromkeys(("copied", "lag", "least_mfu", "least_work", "most_mfu"), float),
            **dict.fromkeys(("block", "clock_minutes", "compared", "logs", "losses"), int),
            **dict.fromkeys(("number", "pairs", "power", "script", "steps", "wait_days"), int),
        },
        "odd_prose": [re.Pattern],
        "step": str,
        "tail": [[str]],
    },
    "gains.toml": dict.fromkeys(("first", "first_of_steps", "none", "pairs", "steps"), str),
    "commands.toml": {
        "commands": {str: [str]},
        "options": {
            **dict.fromkeys(("--name", "--by"), {"required": bool, str: str}),
            **dict.fromkeys(("--runs", "--world-size"), {"default": int, str: str}),
            str: {str: str},
        },
    },
}


def check_shape(found, due, place=""):
    """RecordError unless a value, which stands at a place of a file, has the shape that is due."""
    kind = due if isinstance(due, type) else type(due)
    takes = {float: (int, float), re.Pattern: str}.get(kind, kind)
    is_kind = isinstance(found, takes) and (type(found) is not bool or kind in (bool, object))
    shown = ascii(found)[:60]
    require(is_kind, f"{place or 'it'} is {shown}, a {kind.__name__} is due")
    if kind in (int, float):
        require(0 <= found <= BIGGEST, f"{place} is {shown}, a number up to {BIGGEST} is due")
    elif kind is re.Pattern:
        re.compile(found)
    elif kind is list:
        for number, value in enumerate(found):
            check_shape(value, due[0], f"{place}[{number}]")
    elif kind is dict:
        listed = {name.removesuffix("?"): name for name in due if name is not str}
        missing = [name for name in listed.values() if name not in found and name[-1] != "?"]
        require(not missing, f"{place or 'it'} has no {', '.join(missing)}")
        for name, value in found.items():
            shown = ascii(name)[1:-1][:60]
            require(
                name in listed or str in due, f"{place or 'it'} has {shown}, which is not known"
            )
            check_shape(value, due[listed.get(name, str)], f"{place}.{shown}".lstrip("."))


def settings(name):
    """What a file of settings holds, which has its shape."""
    with about(HOME / name):
        text = read_text(HOME / name)
        found = parse_json(text) if name.endswith(".json") else tomllib.loads(text)
        check_shape(found, SHAPES[name])
        return found


def boards_of(rules):
    """{board: what no record of it changes}. A board of another one's track has all that the other
    one fixes, and what it says itself."""
    boards = {}
    for name, own in rules["boards"].items():
        other = boards.get(own.get("track"), {})
        config = {**other.get("config", {}), **own.get("config", {})}
        boards[name] = {"track": name, **other, **own, "config": config}
        check_shape(boards[name], BOARD, name)
    return boards


def filled(page, /, **fields):
    """A page of this folder, whose fields in braces are filled in."""
    with about(HOME / page):
        return read_text(HOME / page).format(**fields)


RULES = settings("rules.json")
with about(HOME / "rules.json"):
    BOARDS = boards_of(RULES)
    default = RULES["default_track"]
    require(default in BOARDS, f"default_track is {ascii(default)[:60]}, which is no board")
GAINS = settings("gains.toml")  # what a record's page says of them
FORMS = settings("forms.toml")
LIMITS = SimpleNamespace(**FORMS["limits"])
