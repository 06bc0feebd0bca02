"""Reading files that others wrote: regular ones only, of bounded size, as text without control
characters."""

import json
import os
import re
import stat
from pathlib import Path

LOG_LIMIT = 4 * 2**20  # bytes of a log; one of 10,000 logged steps takes about a fifth
SMALL_LIMIT = 2**20  # bytes of a README.md or a result.json
SCRIPT_LIMIT = 400_000  # bytes of a script, twice the trainer's; parsing it takes half a second
NESTING = 20  # levels of JSON
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


def require_same(name, found, wanted, words=", must be "):
    """RecordError unless what is found under a name is what is wanted; `words` stand between the
    two."""
    if found != wanted:
        shown = ascii(found)[:80]
        raise RecordError(f"{ascii(name)[1:-1][:60]} is {shown}{words}{ascii(wanted)[:80]}")


def require_same_items(found, wanted, words, prefix=""):
    """RecordError unless two dicts are the same, with the first name under which they differ."""
    for name in sorted(found.keys() | wanted.keys()):
        values = [content.get(name, "not there") for content in (found, wanted)]
        require_same(prefix + name, *values, words)


def read_bytes(path, limit):
    """The content of a regular file of at most `limit` bytes. RecordError for anything else."""
    try:
        # O_NOFOLLOW refuses a link, O_NONBLOCK does not wait for a pipe's other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise RecordError(f"cannot be read: {error.strerror}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise RecordError("is no regular file")
    with open(descriptor, "rb") as file:
        content = file.read(limit + 1)
    size = max(status.st_size, len(content))
    require(size <= limit, f"holds {size:,} bytes; at most {limit:,} are read")
    return content


def read_text(path, limit=SMALL_LIMIT):
    """The text of a regular file. A link, a pipe, a binary or a file above `limit` bytes raises
    RecordError."""
    content = read_bytes(path, limit)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise RecordError(f"is no UTF-8 text (byte {error.start})") from None
    found = CONTROL.search(text)
    if found:
        line = text.count("\n", 0, found.start()) + 1
        raise RecordError(f"line {line} holds the control character {ascii(found[0])}")
    return text


def object_of_unique_keys(pairs):
    """The dict of an object of JSON whose keys differ."""
    content = dict(pairs)
    require(len(content) == len(pairs), "a key stands twice")
    return content


def is_nested(value, levels):
    """Whether lists and objects of a value of JSON are nested deeper than so many levels."""
    if not isinstance(value, (dict, list)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return not levels or any(is_nested(item, levels - 1) for item in items)


def parse_json(text):
    """JSON without repeated keys or deep nesting; RecordError otherwise. Its texts may hold control
    characters, and its numbers may be infinite."""
    try:
        value = json.loads(text, object_pairs_hook=object_of_unique_keys)
        require(not is_nested(value, NESTING), f"nested deeper than {NESTING} levels")
        return value
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise RecordError(f"is no valid JSON: {reason[:120]}") from None


# The level of the tests, and what no record of a track changes.
RULES = parse_json(read_text(Path(__file__).parent / "rules.json"))


def printable(text):
    """Text for a terminal: one line, in which nothing moves the cursor or hides."""
    return HIDDEN.sub(lambda found: ascii(found[0])[1:-1], str(text))
