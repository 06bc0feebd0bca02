"""Random changes of record folders: `verify` catches each one, or it changes no figure that a
record shows. The changes are drawn by their number, so that a failure can be made again."""

import random
import re
import shutil

import pytest

import records_helpers as made
from records.record import Repository

ODD = ["\x1b[2J", "\udcff", "\u202e", "\0", "9" * 400, "-1", "1e999", "nan", "\n", " " * 300]
ODD += ["verify: ok, 9 records", "é"]
KINDS = [*["line"] * 12, *["byte"] * 3, "cut", "gone", "renamed", "exchanged"]


def line_changed(draw, text, other):
    """A text of which one line is gone, twice, another's, or has another word."""
    lines = text.split("\n")
    at = draw.randrange(len(lines))
    old = draw.choice(re.findall(r"\d+|\w+", lines[at]) or [lines[at]])
    word = draw.choice([*ODD, str(draw.randrange(10**9)), *re.findall(r"\w+", other)[:9]])
    reworded = [lines[at].replace(old, word, 1)]
    others = [[], [lines[at]] * 2, [draw.choice(other.split("\n"))], reworded, reworded, reworded]
    lines[at : at + 1] = draw.choice(others)
    return "\n".join(lines) or "\n"


def mutate(draw, root):
    """Change something in one record's folder. Returns what was done."""
    files = sorted(path for path in root.glob("records/*/*/**/*") if path.is_file())
    path, other = draw.choice(files), draw.choice(files)
    content = path.read_bytes()
    how = draw.choice(KINDS)
    if how == "line":
        text = line_changed(draw, path.read_text(), other.read_text())
        content = text.encode(errors="surrogatepass")
    elif how == "byte":
        at = draw.randrange(len(content))
        content = content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :]
    elif how == "cut":
        content = content[: draw.randrange(len(content))]
    elif how == "exchanged":
        content, _ = other.read_bytes(), other.write_bytes(content)
    path.write_bytes(content)
    if how == "gone":
        path.unlink()
    elif how == "renamed":
        path.rename(path.with_name(draw.choice(["x", "run.txt", f"{other.name}x"])))
    return how


def claims(root):
    """The figures of the records, and the leaderboard."""
    pages = {path.parent.name: path.read_text() for path in root.glob("records/*/*/README.md")}
    figures = {name: text.partition("## Figures")[2] for name, text in pages.items()}
    return figures, (root / "records" / "README.md").read_text()


@pytest.mark.slow
def test_changes_of_records_are_caught_or_harmless(pristine, tmp_path):
    before, caught, count = claims(pristine.root), 0, 150
    for number in range(count):
        root = tmp_path / str(number)
        shutil.copytree(pristine.root / "records", root / "records")
        shutil.copy(pristine.root / "README.md", root / "README.md")
        how = mutate(random.Random(number), root)
        is_caught = bool(made.refusal(Repository(root, pristine.rules)))
        assert is_caught or claims(root) == before, (number, how)
        caught += is_caught
        shutil.rmtree(root)
    assert caught > 0.9 * count
