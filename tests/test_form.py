"""The form of the Python files: what ruff says of them, and how tightly the trainer is packed."""

import ast
import subprocess
import sys

import pytest

from helpers import ROOT

DENSEST = 8.2  # nodes of the syntax tree a line; published code has 6 to 9


@pytest.mark.parametrize("words", [["format", "--check"], ["check", "--output-format=concise"]])
def test_ruff_agrees(words):
    command = [sys.executable, "-m", "ruff", *words, "--no-cache", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["train_gpt.py", "continual.py", "sample.py"])
def test_code_is_not_packed_too_tightly(name):
    source = (ROOT / name).read_text()
    nodes = len(list(ast.walk(ast.parse(source))))
    assert round(nodes / len(source.splitlines()), 1) <= DENSEST
