"""`diff`: what two scripts differ in, of records, of runs, or the working one."""

import difflib
import json
from pathlib import Path

from records import render
from records.files import LOG_LIMIT, SCRIPT_LIMIT, RecordError, read_text, require
from records.log import split_log
from records.record import changed_lines
from records.source import config_of, without_place


def script_at(path):
    """The script of a record's folder, of a run's folder, of a run's log, or a script itself."""
    path = Path(path)
    for name in ("train_gpt.py", "log.txt"):
        if (path / name).is_file():
            path = path / name
    try:
        if path.suffix == ".py":
            return read_text(path, SCRIPT_LIMIT)
        source, _ = split_log(read_text(path, LOG_LIMIT + SCRIPT_LIMIT))
        require(source, "a record's log holds no script; name the record's folder")
        return source
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def config_changes(before, after, track):
    """{field: [value before, value after]} of a track of two sources; a field that one of them
    lacks is None there."""
    old = without_place(config_of(before, track))
    new = without_place(config_of(after, track))
    pairs = {name: [old.get(name), new.get(name)] for name in sorted(old.keys() | new.keys())}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def difference(before, after, track):
    """In a line, what two scripts differ in."""
    added, removed = changed_lines(before, after)
    changes = ", ".join(config_changes(before, after, track)) or "no field"
    return f"lines: {added} added, {removed} removed; configuration of {track}: {changes}"


def describe(before, after, labels, track):
    """The text that `diff` prints for two scripts with their labels."""
    lines = [text.splitlines(keepends=True) for text in (before, after)]
    parts = ["".join(difflib.unified_diff(*lines, *labels)).rstrip("\n")]
    changes = config_changes(before, after, track)
    rows = [[name, *map(json.dumps, values)] for name, values in changes.items()]
    if rows:
        parts.append(render.table(["field", *labels], rows))
    parts.append(difference(before, after, track))
    return "\n\n".join(filter(None, parts))
