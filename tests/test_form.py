"""The form of the Python files: what ruff says of them, and how tightly the trainer is packed."""

import ast
import subprocess
import sys

import pytest

from helpers import ROOT

DENSEST = 8.2  # nodes of the syntax tree a line; published code has 6 to 9


def tracked_files():
    """The Python files that git tracks, but the scripts in records' folders, which stay as they
    were."""
    command = ["git", "ls-files", "-z", "*.py", ":!records/*/*/*"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("this is no checkout of git, so what it tracks is not known")
    names = listed.stdout.rstrip("\0").split("\0")
    assert "train_gpt.py" in names
    return [name for name in names if (ROOT / name).is_file()]


@pytest.mark.parametrize("words", [["format", "--check"], ["check", "--output-format=concise"]])
def test_ruff_agrees(words):
    settings = ["--config", "pyproject.toml", "--no-cache"]
    command = [sys.executable, "-m", "ruff", *words, *settings, *tracked_files()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["train_gpt.py", "continual.py", "sample.py"])
def test_code_is_not_packed_too_tightly(name):
    source = (ROOT / name).read_text()
    nodes = len(list(ast.walk(ast.parse(source))))
    assert round(nodes / len(source.splitlines()), 1) <= DENSEST
