"""The form of the Python files: what ruff says of them, and how tightly the trainer is packed."""

import ast
import subprocess
import sys

import pytest

from helpers import ROOT

DENSEST = 9.5  # nodes of the syntax tree a line; published code has 6 to 9


def tracked_files():
    """The Python files that git tracks, relative to the repository.

    The scripts within the records' folders stay as they were, and are left out."""
    command = ["git", "ls-files", "-z", "*.py", ":!records/*/*/*"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("this is no checkout of git, so what it tracks is not known")
    names = listed.stdout.rstrip("\0").split("\0")
    return [name for name in names if (ROOT / name).is_file()]


def assert_ruff_agrees(*words):
    """Run ruff with the repository's settings on all tracked files, and show what it says."""
    settings = ["--config", "pyproject.toml", "--no-cache"]
    command = [sys.executable, "-m", "ruff", *words, *settings, *tracked_files()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def nodes_a_line(paths):
    """How tightly files are packed: nodes of their syntax trees a line, blank lines included."""
    sources = [path.read_text() for path in paths]
    nodes = sum(len(list(ast.walk(ast.parse(source)))) for source in sources)
    return nodes / sum(len(source.splitlines()) for source in sources)


def test_records_copies_are_left_out():
    names = tracked_files()
    assert "train_gpt.py" in names and "records/stats.py" in names
    assert not any(name.startswith("records/nano/") for name in names)


def test_every_file_is_formatted():
    assert_ruff_agrees("format", "--check")


def test_lint_finds_nothing():
    assert_ruff_agrees("check", "--output-format=concise")


@pytest.mark.parametrize("pattern", ["train_gpt.py", "records/*.py"])
def test_code_is_not_packed_too_tightly(pattern):
    assert nodes_a_line(ROOT.glob(pattern)) <= DENSEST
