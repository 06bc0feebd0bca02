"""Reading files that others wrote: regular ones of bounded size, as text without control
characters."""

import contextlib
import json
import os
import re
import stat
from pathlib import Path

LOG_LIMIT = 4 * 2**20  # bytes of a log; one of 10,000 logged steps takes about a fifth
SMALL_LIMIT = 2**20  # bytes of a README.md or a result.json
SCRIPT_LIMIT = 400_000  # bytes of a script, twice the trainer's
MOST_BRACKETS = 500  # that JSON opens, and so can nest; a configuration has 63
# What moves no terminal's cursor, does not turn the direction of a text, and is no half character.
VISIBLE = r" -\x7e\xa0-\u2027\u202f-\u2065\u206a-\ud7ff\ue000-\U0010ffff"
HIDDEN = re.compile(f"[^{VISIBLE}]")
CONTROL = re.compile(rf"[^\t\n{VISIBLE}]")


class RecordError(ValueError):
    """What is wrong with a file or an argument, in one line: value, constraint, remedy."""


def require(condition, message):
    """Raise RecordError with this message unless the condition holds."""
    if not condition:
        raise RecordError(message)


def require_same(found, wanted, words=", must be "):
    """RecordError unless two dicts are the same: with the first name under which they differ, and
    `words` between the values that they have there."""
    for name in sorted(found.keys() | wanted.keys()):
        values = [content.get(name, "not there") for content in (found, wanted)]
        if values[0] != values[1]:
            shown, due = [ascii(value)[:80] for value in values]
            raise RecordError(f"{ascii(name)[1:-1][:60]} is {shown}{words}{due}")


@contextlib.contextmanager
def about(path):
    """Within it, a RecordError gets the path of the file that it is about."""
    try:
        yield
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def read_bytes(path, limit):
    """The content of a regular file of at most `limit` bytes. RecordError for anything else."""
    try:
        # O_NOFOLLOW refuses a link, O_NONBLOCK does not wait for a pipe's other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            content = file.read(limit + 1) if is_regular else b""
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
    require(is_regular, f"{path}: is no regular file")
    require(len(content) <= limit, f"{path}: is larger than {limit:,} bytes")
    return content


def read_text(path, limit=SMALL_LIMIT):
    """The text of such a file. A binary raises RecordError as well."""
    try:
        text = read_bytes(path, limit).decode()
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: is no UTF-8 text (byte {error.start})") from None
    found = CONTROL.search(text)
    if found:
        line = text.count("\n", 0, found.start()) + 1
        raise RecordError(f"{path}: line {line} holds the control character {ascii(found[0])}")
    return text


def object_of_unique_keys(pairs):
    """The dict of an object of JSON, no key of which stands twice."""
    require(len(dict(pairs)) == len(pairs), "a key stands twice")
    return dict(pairs)


def parse_json(text):
    """JSON without repeated keys or deep nesting; RecordError otherwise. Its texts may hold control
    characters, and its numbers may be infinite."""
    require(text.count("[") + text.count("{") <= MOST_BRACKETS, "is no JSON, or nested too deep")
    try:
        return json.loads(text, object_pairs_hook=object_of_unique_keys)
    except ValueError as error:
        raise RecordError(f"is no valid JSON: {' '.join(str(error).split())[:120]}") from None


def printable(text):
    """Text for a terminal: one line, in which nothing moves the cursor or hides."""
    return HIDDEN.sub(lambda found: ascii(found[0])[1:-1], str(text))


# The level of the tests, and what no record of a track changes.
RULES = parse_json(read_text(Path(__file__).parent / "rules.json"))
