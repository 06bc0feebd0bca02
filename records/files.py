"""Reading files that others wrote: regular ones only, of bounded size, as text without control
characters."""

import json
import math
import os
import re
import stat
from pathlib import Path

# Bytes of a log; one of 10,000 logged steps and 2,000 lines of source takes about a quarter.
LOG_LIMIT = 4 * 2**20
SMALL_LIMIT = 2**20  # bytes of a source, a README.md or a result.json
NESTING = 20  # levels of JSON
CONTROL = re.compile(
    r"[^\t\n -\x7e\x80-\U0010ffff]|[\x80-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
SURROGATE = re.compile("[\ud800-\udfff]")


class RecordError(ValueError):
    """What is wrong with a file or an argument, in one line: value, constraint, remedy."""


def read_bytes(path, limit):
    """The content of a regular file of at most `limit` bytes. RecordError for anything else."""
    try:
        # O_NOFOLLOW refuses a link, O_NONBLOCK does not wait for a pipe's other end
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        what = error.strerror
        if Path(path).is_symlink():
            what = "is a symbolic link; put the file itself there"
        raise RecordError(f"cannot be read: {what}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise RecordError("is no regular file")
    content = b""
    with open(descriptor, "rb") as file:
        if status.st_size <= limit:
            content = file.read(limit + 1)
    if status.st_size > limit or len(content) > limit:
        raise RecordError(f"holds {status.st_size:,} bytes; at most {limit:,} are read")
    return content


def read_text(path, limit=SMALL_LIMIT):
    """The text of a regular file. A link, a pipe, a binary or a file above `limit` bytes raises
    RecordError."""
    content = read_bytes(path, limit)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise RecordError(f"is no UTF-8 text (byte {error.start}); a log is text") from None
    found = CONTROL.search(text)
    if found:
        line = text.count("\n", 0, found.start()) + 1
        raise RecordError(
            f"line {line} holds the control character {ascii(found[0])}; a log is plain text"
        )
    return text


def refuse_constant(constant):
    """Refuse NaN and the infinities, which Python reads although JSON has none."""
    raise ValueError(f"{constant} is no number of JSON")


def finite_number(text):
    """The float that a text writes, which must not be too large for one."""
    value = float(text)
    if not math.isfinite(value):
        refuse_constant(text)
    return value


def object_of_unique_keys(pairs):
    """The dict of an object of JSON whose keys differ."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key stands twice")
    return content


def check_text(text):
    """Refuse a text that moves a terminal's cursor, or that cannot be encoded."""
    if CONTROL.search(text) or SURROGATE.search(text) or "\n" in text:
        raise ValueError(f"{ascii(text)[:60]} holds a control character or half a character")


def inside(container):
    """What a list or a dict of JSON holds directly, keys and values alike."""
    if isinstance(container, dict):
        return [*container, *container.values()]
    return container


def check_value(value):
    """Refuse odd texts, and lists and objects that are nested too deep. It goes level by level, so
    that the depth of the value does not matter."""
    level = [value]
    for _ in range(NESTING + 1):
        for item in level:
            if isinstance(item, str):
                check_text(item)
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [item for container in containers for item in inside(container)]
    if level:
        raise ValueError(f"nested deeper than {NESTING} levels")


def parse_json(text):
    """JSON without repeated keys, NaN, infinities or deep nesting; RecordError otherwise."""
    try:
        value = json.loads(
            text,
            parse_constant=refuse_constant,
            parse_float=finite_number,
            object_pairs_hook=object_of_unique_keys,
        )
        check_value(value)
        return value
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise RecordError(f"is no valid JSON: {reason[:120]}") from None


# The level of the tests, and what no record of a track changes.
RULES = parse_json(read_text(Path(__file__).parent / "rules.json"))


def write_whole(path, text):
    """Write a file that is whole or absent at any time."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def escaped(found):
    """A character as Python writes it, for a match of it."""
    return ascii(found[0])[1:-1]


def printable(text):
    """Text for a terminal: one line, in which nothing moves the cursor or hides."""
    text = SURROGATE.sub("?", str(text))
    text = CONTROL.sub(escaped, text)
    return text.replace("\n", "\\n").replace("\t", "\\t")
