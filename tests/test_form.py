"""The form of the Python files: what ruff says of them, and how tightly the trainer is packed."""

import ast
import bisect
import re
import symtable

import pytest

from helpers import ROOT, TRAINER, python

DENSEST = 8.2  # nodes of the syntax tree a line; published code has 6 to 9
LONGEST = 50  # lines of a function


@pytest.mark.parametrize("words", [["format", "--check"], ["check", "--output-format=concise"]])
def test_ruff_agrees(words):
    done = python("-m", "ruff", *words, "--no-cache", ".")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["train_gpt.py", "continual.py", "sample.py"])
def test_code_is_not_packed_too_tightly_and_no_function_is_too_long(name):
    source = (ROOT / name).read_text()
    nodes = list(ast.walk(ast.parse(source)))
    assert round(len(nodes) / len(source.splitlines()), 1) <= DENSEST
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < LONGEST, node.name


def names_read(scope):
    """(line, name) of what the functions inside a scope read of the module, but for `train`."""
    for inner in scope.get_children():
        if inner.get_name() != "train":
            globals_read = (each for each in inner.get_symbols() if each.is_global())
            yield from ((inner.get_lineno(), each.get_name()) for each in globals_read)
            yield from names_read(inner)


def test_no_chapter_uses_what_a_later_one_defines():
    """What runs when the module is imported could not; so these are what functions read."""
    source = TRAINER.read_text()
    lines = source.splitlines()
    titles = [number for number, line in enumerate(lines, 1) if re.match(r"# \d+\. .* ==", line)]
    assert len(titles) == 16
    homes = {}
    for statement in ast.parse(source).body:
        names = [getattr(statement, "name", None)]
        if not names[0]:
            nodes = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            names = [node.id for node in nodes if isinstance(node.ctx, ast.Store)]
        for name in names:
            homes.setdefault(name, bisect.bisect(titles, statement.lineno))
    for line, name in names_read(symtable.symtable(source, "train_gpt.py", "exec")):
        assert homes.get(name, 0) <= bisect.bisect(titles, line), f"{name}, in line {line}"
