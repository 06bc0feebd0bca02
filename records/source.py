"""What a script's tracks are, read from its source without running it.

A dict TRACKS holds {"name": Config(field=value, ...)}. A value is a literal, arithmetic on small
numbers, or a call of one of the script's dataclasses, which may take over the fields of a dict of
the script, as in Config(**SHARED), that nothing else names. A field that a call does not name has
the default of its class: `name: type = 1.0`, or `name: type = made(1.0, ...)`, where the script
says `def made(default, ...)`. What a call is given by the name `default` is one as well.
"""

import ast
import functools
import hashlib
import json
import operator
import re
import sys
import warnings
from collections import Counter

from records.files import about, require
from records.settings import FORMS, LIMITS, RULES

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
OPERATIONS |= {ast.Div: operator.truediv, ast.Pow: operator.pow}
PACKAGES = RULES["packages"]  # that scripts import, beside what Python brings along
OPEN = sys.stdlib_module_names - {*FORMS["loaders"]} | {*PACKAGES}
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
            trees = [ast.parse(text) for text in (plain, ASKED.sub("None", plain))]
    check_imports(trees[1])
    return trees[0].body


def check_imports(tree):
    """Nothing is imported but PACKAGES and what Python brings along. Who hides it better, in a text
    that is executed elsewhere, is found by the diff's reader."""
    hint = f"open are Python's own and {', '.join(PACKAGES)}"
    for node in ast.walk(tree):
        modules = []
        words = [(getattr(node, "id", ""), "names"), (getattr(node, "attr", ""), "called")]
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            is_open = {f"{base}.{alias.name}" for alias in node.names} <= OPEN
            modules = [] if is_open else [base]
            words += [(alias.name, "called") for alias in node.names]
        for module in modules:
            is_open = {module, module.partition(".")[0]} & OPEN
            shown = f"the script imports {module[:60]}, whose text no log holds"
            require(is_open, f"{shown}; {hint}")
            words += [(part, "called") for part in module.split(".")]
        for word, kind in words:
            shown = f"the script has the word {word}, by which code runs that no log holds"
            require(word not in FORMS[kind], shown)


def default_of(value, helpers):
    """The expression of a field's default, or None. `value` is what its class assigns, and helpers
    are the parameters of the script's functions: what one of them calls `default` counts."""
    if not isinstance(value, ast.Call):
        return value
    named = dict(zip(helpers.get(ast.unparse(value.func), ()), value.args, strict=False))
    default = {**named, **{word.arg: word.value for word in value.keywords}}.get("default")
    is_none = default and ast.unparse(default).split(".")[-1] == "MISSING"
    return None if is_none else default


def is_spread(node):
    """Whether it is ** and a name, in a call."""
    return isinstance(node, ast.keyword) and not node.arg and isinstance(node.value, ast.Name)


class Literals(ast.NodeTransformer):
    """It turns calls of a script's dataclasses into dicts, and arithmetic into numbers."""

    def __init__(self, body, source):
        helpers = {}  # the names of each function's parameters
        for node in body:
            if isinstance(node, ast.FunctionDef):
                helpers[node.name] = [each.arg for each in node.args.posonlyargs + node.args.args]
        words = Counter(re.findall(r"\w+", source)) - Counter(re.findall(r"\*\*(\w+)", source))
        self.shared = {}  # the fields of each dict
        for node in body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                name = ast.unparse(node.targets)
                if words[name] == 1:  # else it may be another one by then
                    keys = map(ast.literal_eval, node.value.keys)
                    self.shared[name] = dict(zip(keys, node.value.values, strict=True))
        self.classes = {}
        for kind in body:
            if isinstance(kind, ast.ClassDef):
                fields = [node for node in kind.body if isinstance(node, ast.AnnAssign)]
                defaults = {node.target.id: default_of(node.value, helpers) for node in fields}
                self.classes[kind.name] = defaults

    def visit_Call(self, call):
        defaults = self.classes[call.func.id]
        named = {}
        for word in call.keywords:
            named |= self.shared[word.value.id] if is_spread(word) else {word.arg: word.value}
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
        found = ast.literal_eval(Literals(body, source).visit(tracks))
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
