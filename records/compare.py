"""`diff`: what two scripts differ in, of records or working ones."""

import difflib
from pathlib import Path

from records.files import SCRIPT_LIMIT, RecordError, read_text
from records.record import changed_lines
from records.source import config_of, without_place


def script_at(path):
    """The text of a script, or of that of a record's folder."""
    path = Path(path)
    try:
        return read_text(path / "train_gpt.py" if path.is_dir() else path, SCRIPT_LIMIT)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def difference(before, after, track):
    """In a line, what two scripts differ in: how many lines, and which fields of a track."""
    added, removed = changed_lines(before, after)
    old = without_place(config_of(before, track))
    new = without_place(config_of(after, track))
    names = sorted(old.keys() | new.keys())
    changes = [name for name in names if old.get(name, "none") != new.get(name, "none")]
    fields = ", ".join(changes) or "no field"
    return f"lines: {added} added, {removed} removed; configuration of {track}: {fields}"


def describe(before, after, labels, track):
    """The text that `diff` prints for two scripts with their labels."""
    lines = [text.splitlines(keepends=True) for text in (before, after)]
    changes = "".join(difflib.unified_diff(*lines, *labels))
    return changes + difference(before, after, track)
