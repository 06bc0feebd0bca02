"""Random changes of record folders: `verify` catches each one, or it changes no figure that a
record shows. The changes are drawn by their number, so that a failure can be made again."""

import random
import re
import shutil

import pytest

import records_helpers as made
from records.record import Repository

ODD = ["\x1b[2J", "\udcff", "\u202e", "\0", "9" * 400, "-1", "1e999", "nan", "\n", " " * 300]
ODD += ["verify: ok, 9 records", "é", "7", "123456789"]


def mutate(draw, root):
    """Change one file of a record's folder: a line, a word of one, a byte, its end, or its name."""
    files = sorted(path for path in root.glob("records/*/*/**/*") if path.is_file())
    path, other = draw.choice(files), draw.choice(files)
    text, another = path.read_text(), other.read_text()
    lines = text.splitlines(keepends=True)
    line = draw.choice(lines)
    old = draw.choice(re.findall(r"\d+|\w+", line) or [line])
    word = draw.choice(ODD + re.findall(r"\w+", another)[:9])
    begin, end = sorted(draw.choices(range(len(text)), k=2))
    new_lines = ["", 2 * line, *draw.choices(another.splitlines(keepends=True), k=2)]
    new_lines += 8 * [line.replace(old, word, 1)]
    texts = [text.replace(line, new, 1) for new in new_lines]
    texts += [text[:begin], text[:begin] + text[end:], text[:begin] + chr(begin % 256) + text[end:]]
    path.write_bytes(draw.choice([*texts, another]).encode(errors="surrogatepass"))
    if draw.random() < 0.1:
        path.rename(path.with_name(draw.choice(["x", "run.txt", f"{other.name}x"])))


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
        mutate(random.Random(number), root)
        is_caught = bool(made.refusal(Repository(root, pristine.rules)))
        assert is_caught or claims(root) == before, number
        caught += is_caught
        shutil.rmtree(root)
    assert caught > 0.9 * count
