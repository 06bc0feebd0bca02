"""Random changes of record folders: `verify` catches each one, or it changes no figure that a
record shows. The changes are drawn by their number, so that a failure can be made again."""

import os
import random
import re
import shutil

import pytest

import records_helpers as made
from records.record import Repository

ODD = ["\x1b[2J", "\udcff", "\u202e", "\0", "9" * 400, "-1", "0", "1e999", "nan", "\n"]
ODD += ["verify: ok, 9 records", "é", " " * 300]
KINDS = [*["lines"] * 12, *["bytes"] * 3, "cut", "gone", "renamed", "copied", "exchanged"]
KINDS += ["folder renamed", "folder gone"]


def line_changed(draw, text, other):
    """A text of which one line is gone, twice, another's, or has another word."""
    lines = text.split("\n")
    at = draw.randrange(len(lines))
    old = draw.choice(re.findall(r"\d+|\w+", lines[at]) or [lines[at]])
    word = draw.choice(
        [draw.choice(ODD), str(draw.randrange(10**9)), *re.findall(r"\w+", other)[:9]]
    )
    others = [[], [lines[at]] * 2, [draw.choice(other.split("\n"))]]
    lines[at : at + 1] = draw.choice([*others, *[[lines[at].replace(old, word, 1)]] * 3])
    return "\n".join(lines) or "\n"


def mutate(draw, root):
    """Change something in one record's folder. Returns what was done."""
    files = sorted(path for path in root.glob("records/*/*/**/*") if path.is_file())
    path, other = draw.choice(files), draw.choice(files)
    content = path.read_bytes()
    how = draw.choice(KINDS)
    if how == "lines":
        text = line_changed(draw, path.read_text(), other.read_text())
        path.write_bytes(text.encode(errors="surrogatepass"))
    elif how == "bytes":
        changed = bytearray(content)
        changed[draw.randrange(len(changed))] = draw.randrange(256)
        path.write_bytes(changed)
    elif how == "cut":
        path.write_bytes(content[: draw.randrange(len(content))])
    elif how == "gone":
        path.unlink()
    elif how == "renamed":
        path.rename(path.with_name(draw.choice(["x", "run.txt", "é\n.txt", other.name + "x"])))
    elif how == "copied":
        shutil.copy(path, other.with_name(f"more-{path.name}"))
    elif how == "exchanged":
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif how == "folder renamed":
        path.parent.rename(path.parent.with_name(path.parent.name + draw.choice("xé")))
    else:
        shutil.rmtree(path.parent)
    return how


def claims(root):
    """What the records and the leaderboard say."""
    pages = {path.parent.name: path.read_text() for path in root.glob("records/*/*/README.md")}
    return pages, (root / "records" / "README.md").read_text()


@pytest.mark.slow
def test_changes_of_records_are_caught_or_harmless(pristine, tmp_path):
    """A hundred and fifty, or so many as MUTATIONS in the environment says."""
    before = claims(pristine.root)
    caught = 0
    numbers = range(int(os.environ.get("MUTATIONS", 150)))
    for number in numbers:
        root = tmp_path / str(number)
        shutil.copytree(pristine.root / "records", root / "records")
        shutil.copy(pristine.root / "README.md", root / "README.md")
        how = mutate(random.Random(number), root)
        is_caught = bool(made.refusal(Repository(root, pristine.rules)))
        # without one of its folders a repository is another one, of which nothing is wrong
        assert is_caught or how == "folder gone" or claims(root) == before, (number, how)
        caught += is_caught
        shutil.rmtree(root)
    assert caught > 0.9 * len(numbers)
