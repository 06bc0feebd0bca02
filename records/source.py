"""What a script's tracks are, read from its source without running it.

A dict TRACKS holds {"name": Config(field=value, ...)}. A value is a literal, arithmetic on small
numbers, or a call of one of the script's dataclasses. A field that a call does not name has the
default of its class: `name: type = 1.0`, `name: type = knob(1.0, ...)` or `= knob(default=1.0)`.
"""

import ast
import functools
import hashlib
import itertools
import json
import operator
import re
import sys
import warnings
from collections import Counter

from records.files import FORMS, LIMITS, RULES, RecordError, about, require

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
OPERATIONS |= {ast.Div: operator.truediv, ast.Pow: operator.pow}
PACKAGES = RULES["packages"]  # that scripts import, beside what Python brings along
OPEN = sys.stdlib_module_names - {*FORMS["loaders"]} | {*PACKAGES}
LOADING = {*FORMS["loading"]}
SETTINGS = tuple(FORMS["settings"])  # of what is imported, which scripts may change
ASKED = re.compile(FORMS["asked"], re.MULTILINE)


@functools.cache
def sha256_of(source):
    """The hash that stands for a script."""
    return hashlib.sha256(source.encode()).hexdigest()


def body_of(source):
    """The statements of a script, of which a reader sees what Python sees."""
    coded = any(re.match(FORMS["coding"], line) for line in source.split("\n")[:2])
    require(not coded, "the script has a coding line, by which comments may be code; leave it out")
    # A question mark stands nowhere in Python but in texts and comments, where any letter may.
    plain = re.sub("[^\0-\x7f]", "?", source)
    with about("the script is no Python with names in ASCII"):
        with warnings.catch_warnings(action="ignore"):  # of a backslash in a text
            tree = ast.parse(ASKED.sub("None", plain))
    check_imports(tree)
    check_assignments(tree)
    return tree.body


def imported_by(node):
    """The dotted names of what a node of the syntax tree imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        return [f"{module}.{alias.name}" for alias in node.names]
    return []


def check_imports(tree):
    """Nothing is imported but PACKAGES and what Python brings along. Who hides it better, in a text
    that is executed elsewhere, is found by the diff's reader."""
    for node in ast.walk(tree):
        words = {getattr(node, "id", ""), f".{getattr(node, 'attr', '')}"}
        for name in imported_by(node):
            parts = name.split(".")
            shown = f"the script imports {name[:60]}, whose text no log holds"
            hint = f"open are Python's own and {', '.join(PACKAGES)}"
            is_open = OPEN & {*itertools.accumulate(parts, "{}.{}".format)}
            require(is_open, f"{shown}; {hint}")
            words |= {f".{part}" for part in parts}
        for word in words & LOADING:
            shown = f"the script has the word {word.strip('.')}"
            raise RecordError(f"{shown}, by which code runs that no log holds")


def check_assignments(tree):
    """Nothing is assigned to what PACKAGES hold, so that their functions stay what they are for
    everybody. Who hides it under another name is found by the diff's reader."""
    roots = {package.split(".")[0] for package in PACKAGES}
    imported = set()
    for node in ast.walk(tree):
        for alias, name in zip(getattr(node, "names", []), imported_by(node), strict=False):
            if name.split(".")[0] in roots:
                imported.add(alias.asname or alias.name.split(".")[0])
    for node in ast.walk(tree):
        is_target = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            node, is_target = ast.Attribute(node.args[0], "*"), True
        owner = node
        while isinstance(owner, ast.Attribute | ast.Subscript):
            owner = owner.value
        if is_target and owner is not node and getattr(owner, "id", "") in imported:
            name = ast.unparse(node)
            hint = f"which it imports; open are {', '.join(SETTINGS)}"
            require(name.startswith(SETTINGS), f"the script changes {name[:60]}, {hint}")


@functools.cache
def skeleton_of(source):
    """A script's syntax tree without docstrings, as this Python shows it."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            if isinstance(body[0].value, ast.Constant):
                body[0].value.value = ""
    return ast.dump(tree)


def is_same_code(source, other):
    """Whether two scripts differ in comments, docstrings and layout alone."""
    return skeleton_of(source) == skeleton_of(other)


def default_of(value):
    """The expression of a field's default, or None: what its class assigns, or, where that is a
    call, its argument `default` or its first one."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
        return value
    first = value.args[0] if value.args else None
    return {word.arg: word.value for word in value.keywords}.get("default", first)


class Literals(ast.NodeTransformer):
    """It turns calls of a script's dataclasses into dicts, and arithmetic into numbers."""

    def __init__(self, body):
        self.classes = {}  # {class: {field: the expression of its default}}
        for kind in body:
            if isinstance(kind, ast.ClassDef):
                fields = [node for node in kind.body if isinstance(node, ast.AnnAssign)]
                defaults = {node.target.id: default_of(node.value) for node in fields}
                self.classes[kind.name] = defaults

    def visit_Call(self, call):
        defaults = self.classes[call.func.id]
        named = {word.arg: word.value for word in call.keywords}
        fields = {**defaults, **dict(zip(defaults, call.args, strict=False)), **named}
        if len(call.args) > len(defaults) or len(fields) > len(defaults):
            raise ValueError(f"line {call.lineno}: {call.func.id} has no such field")
        return ast.Dict(list(map(ast.Constant, fields)), list(map(self.visit, fields.values())))

    def visit_BinOp(self, node):
        numbers = [ast.literal_eval(self.visit(side)) for side in (node.left, node.right)]
        are_numbers = {*map(type, numbers)} <= {int, float}
        are_small = are_numbers and max(map(abs, numbers)) <= LIMITS.number
        is_power = isinstance(node.op, ast.Pow)
        if not are_small or is_power and abs(numbers[1]) > LIMITS.power:
            raise ValueError(f"line {node.lineno} is no arithmetic on small numbers")
        return ast.Constant(OPERATIONS[type(node.op)](*numbers))


@functools.cache
def tracks_of(source):
    """{track: {field: value as JSON keeps it}} of a script that hides no code."""
    body = body_of(source)
    hint = "a dict TRACKS of Config(field=value, ...), of literals, is needed"
    with about(f"its tracks cannot be read from the source; {hint}"):
        kinds = [node.name for node in body if isinstance(node, ast.ClassDef)]
        lines = re.findall(r"^TRACKS\b", source, re.MULTILINE)
        if kinds.count("Config") != 1 or len(lines) != 1:
            raise ValueError("one class Config and one line TRACKS = { are needed")
        assigned = [node for node in body if isinstance(node, ast.Assign)]
        (tracks,) = [node.value for node in assigned if ast.unparse(node.targets) == "TRACKS"]
        found = ast.literal_eval(Literals(body).visit(tracks))
        return {str(name): dict(config) for name, config in json.loads(json.dumps(found)).items()}


def config_of(source, track):
    """{field: value} of one track of a script. RecordError where it has none."""
    tracks = tracks_of(source)
    known = ", ".join(map(ascii, tracks))[:80]
    require(track in tracks, f"the source has no track {ascii(track)}, but {known}")
    return tracks[track]


def changed_lines(before, after):
    """(added, removed) lines between two sources; a line that only moved is no change."""
    before = Counter(before.splitlines())
    after = Counter(after.splitlines())
    return (after - before).total(), (before - after).total()
