"""Reading files that others wrote: regular ones only, of bounded size, as text without control characters."""
import json
import math
import os
import re
import stat
from pathlib import Path

LOG_LIMIT = 4 * 2**20  # bytes; a log of 10,000 logged steps and 2,000 lines of source takes about one
SMALL_LIMIT = 2**20  # source, README.md, result.json
NESTING = 20  # levels of JSON
CONTROL = re.compile(r"[^\t\n -\x7e\x80-\U0010ffff]|[\x80-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
SURROGATE = re.compile("[\ud800-\udfff]")


class RecordError(ValueError):
    """What is wrong with a file or an argument, in one line: value, constraint, remedy."""


def read_text(path, limit=SMALL_LIMIT):
    """The text of a regular file. A link, a pipe, a binary or a file above `limit` bytes raises RecordError."""
    try:  # O_NOFOLLOW refuses a link, O_NONBLOCK does not wait for a pipe's other end
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        what = "is a symbolic link; put the file itself there" if Path(path).is_symlink() else error.strerror
        raise RecordError(f"cannot be read: {what}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise RecordError("is no regular file")
    with open(descriptor, "rb") as file:
        content = b"" if status.st_size > limit else file.read(limit + 1)
    if status.st_size > limit or len(content) > limit:
        raise RecordError(f"holds {status.st_size:,} bytes; at most {limit:,} are read")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise RecordError(f"is no UTF-8 text (byte {error.start}); a log is text") from None
    if found := CONTROL.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise RecordError(f"line {line} holds the control character {ascii(found[0])}; a log is plain text")
    return text


def parse_json(text):
    """JSON without repeated keys, NaN, infinities or deep nesting; RecordError otherwise."""
    def refuse(constant):
        raise ValueError(f"{constant} is no number of JSON")

    def finite(text):
        value = float(text)
        return value if math.isfinite(value) else refuse(text)

    def unique(pairs):
        content = dict(pairs)
        if len(content) < len(pairs):
            raise ValueError("a key stands twice")
        return content
    try:
        value = json.loads(text, parse_constant=refuse, parse_float=finite, object_pairs_hook=unique)
        layers, level = 0, [value]
        while level:
            for text in level:
                if isinstance(text, str) and (CONTROL.search(text) or SURROGATE.search(text) or "\n" in text):
                    raise ValueError(f"{ascii(text)[:60]} holds a control character or half a character")
            level = [item for container in level if isinstance(container, (dict, list))
                     for item in ((*container, *container.values()) if isinstance(container, dict) else container)]
            if (layers := layers + 1) > NESTING and level:
                raise ValueError(f"nested deeper than {NESTING} levels")
        return value
    except (ValueError, RecursionError) as error:
        raise RecordError(f"is no valid JSON: {' '.join(str(error).split())[:120]}") from None


RULES = parse_json(read_text(Path(__file__).parent / "rules.json"))  # the level, and what no record of a track changes


def write_whole(path, text):
    """Write a file that is whole or absent at any time."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def printable(text):
    """Text for a terminal: one line, in which nothing moves the cursor or hides."""
    text = CONTROL.sub(lambda found: ascii(found[0])[1:-1], SURROGATE.sub("?", str(text)))
    return text.replace("\n", "\\n").replace("\t", "\\t")
