"""Reading files: regular ones of bounded size, without control characters; and writing them, whole.
Two of this package's have the rules of boards, and the forms of what people and trainers write."""

import contextlib
import json
import os
import re
import stat
import tomllib
from pathlib import Path
from types import SimpleNamespace

HOME = Path(__file__).parent
# What moves a terminal's cursor, turns the direction of a text, or is half a character.
CONTROL = re.compile(r"[^\t\n -\x7e\xa0-\u2027\u202f-\u2065\u206a-\ud7ff\ue000-\U0010ffff]")


class RecordError(ValueError):
    """What is wrong with a file or an argument, in one line: value, constraint, remedy."""


def require(condition, message):
    """Raise RecordError with this message unless the condition holds."""
    if not condition:
        raise RecordError(message)


def require_same(found, wanted, words=", must be "):
    """RecordError unless two dicts are the same JSON, in which 1, 1.0 and true are three values."""
    for name in sorted(found.keys() | wanted.keys()):
        sides = [{name: side[name]} if name in side else {} for side in (found, wanted)]
        texts = {json.dumps(side, sort_keys=True) for side in sides}
        shown = [ascii(side.get(name, "not there"))[:80] for side in sides]
        require(len(texts) == 1, f"{ascii(name)[1:-1][:60]} is {shown[0]}{words}{shown[1]}")


@contextlib.contextmanager
def about(path):
    """Any error within becomes a RecordError that begins with the path, or with words: whatever
    cannot be judged is refused."""
    try:
        yield
    except (RecordError, OSError) as error:
        raise RecordError(f"{path}: {getattr(error, 'strerror', error)}") from None
    except Exception as error:
        reason = f"{type(error).__name__}: {ascii(str(error))[1:-1][:100]}"
        raise RecordError(f"{path}: {reason}") from None


def read_text(path, limit=4 * 2**20):
    """The text of a regular file of at most `limit` bytes, without control characters. A log of
    10,000 logged steps takes a fifth of four MiB."""
    with about(path):
        # O_NOFOLLOW refuses a link, O_NONBLOCK does not wait for a pipe's other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            require(stat.S_ISREG(os.fstat(descriptor).st_mode), "is no regular file")
            content = file.read(limit + 1)
        require(len(content) <= limit, f"is larger than {limit:,} bytes")
        text = content.decode()
        found = CONTROL.search(text)
        line = found and text.count("\n", 0, found.start()) + 1
        require(not found, f"line {line} holds the control character {found and ascii(found[0])}")
    return text


@contextlib.contextmanager
def whole(path):
    """A path to write to. Its file takes the place of the other once it is whole, so that a full
    disk or an error leaves what was there."""
    path = Path(os.path.realpath(path))  # a link stays one
    if path.exists() and not path.is_file():  # /dev/null, a pipe
        yield path
        return
    partial = path.with_name(f".partial-{path.name}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path, text):
    """Write a file in UTF-8, whole."""
    with whole(path) as partial:
        partial.write_text(text, "utf-8")


def settings(name):
    """What a file of this package's settings holds."""
    with about(HOME / name):
        text = read_text(HOME / name)
        return json.loads(text) if name.endswith(".json") else tomllib.loads(text)


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
