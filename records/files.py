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
DIGITS = 20  # of a whole number in JSON; Python refuses to print one of 4,300
CONTROL = re.compile(
    r"[^\t\n -\x7e\x80-\U0010ffff]|[\x80-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
SURROGATE = re.compile("[\ud800-\udfff]")


class RecordError(ValueError):
    """What is wrong with a file or an argument, in one line: value, constraint, remedy."""


def require(condition, message):
    """Raise RecordError with this message unless the condition holds."""
    if not condition:
        raise RecordError(message)


def read_bytes(path, limit):
    """The content of a regular file of at most `limit` bytes. RecordError for anything else."""
    require(not Path(path).is_symlink(), "is a symbolic link; put the file itself there")
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


def refuse_constant(constant):
    """Refuse NaN and the infinities, which Python reads although JSON has none."""
    raise ValueError(f"{constant} is no number of JSON")


def finite_number(text):
    """The float that a text writes, which must not be too large for one."""
    value = float(text)
    if value in (float("inf"), float("-inf")):
        refuse_constant(text)
    return value


def whole_number(text):
    """The int that a text writes, of moderate length."""
    if len(text) > DIGITS:
        raise ValueError(f"a number of {len(text)} digits; at most {DIGITS} are read")
    return int(text)


def object_of_unique_keys(pairs):
    """The dict of an object of JSON whose keys differ."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key stands twice")
    return content


def check_value(value, level=0):
    """Refuse texts that move a terminal's cursor, and values that are nested too deep."""
    if level > NESTING:
        raise ValueError(f"nested deeper than {NESTING} levels")
    if isinstance(value, str):
        if CONTROL.search(value) or SURROGATE.search(value) or "\n" in value:
            raise ValueError(f"{ascii(value)[:60]} holds a control character or half a character")
    elif isinstance(value, dict):
        for key, item in value.items():
            check_value(key, level)
            check_value(item, level + 1)
    elif isinstance(value, list):
        for item in value:
            check_value(item, level + 1)


def parse_json(text):
    """JSON without repeated keys, NaN, infinities, long numbers or deep nesting; RecordError
    otherwise."""
    try:
        value = json.loads(
            text,
            parse_constant=refuse_constant,
            parse_float=finite_number,
            parse_int=whole_number,
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
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def printable(text):
    """Text for a terminal: one line, in which nothing moves the cursor or hides."""
    text = SURROGATE.sub("?", str(text))
    text = CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
    return text.replace("\n", "\\n").replace("\t", "\\t")
