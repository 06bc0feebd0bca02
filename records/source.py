"""What a script's tracks are, read from its source by `ast`: nothing of it runs.

A script has dataclasses, one of which is called Config, and a dict of tracks that begins and ends
at the start of a line:

    TRACKS = {
        "name": Config(field=value, ...),
    }

A value is a literal, arithmetic on numbers, a constant of the module, or a call of one of the
dataclasses, which is read as {field: value}. A field that a call does not name has the default that
its class gives it: `name: type = 1.0`, or `name: type = made(..., default=1.0)`, whatever `made`
is. In the scripts of the first records it is the first word of a call: `knob(1.0, "what it is")`.
"""

import ast
import functools
import hashlib
import itertools
import math
import operator
import re
import symtable
import warnings

from records.files import RecordError, require

DTYPES = ("bfloat16", "float32")  # what a script may make of the dtype `auto`
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
PLACE_FIELDS = ("seed", "run_id", "run_of")
LARGEST = 2**64  # number that may stand in a track, or that arithmetic may come to
HIGHEST_POWER = 64
CODING = re.compile(r"[ \t\f]*#.*?coding[:=]")  # PEP 263: a line that changes what text means
# Modules of the repository whose text no log holds; records.picture draws when all is over.
ELSEWHERE = re.compile(
    r"^\s*(?:from|import)\s+((?:benchmarks|continual|data|sample|tests|records(?!\.picture))\b\S*)",
    re.MULTILINE,
)


@functools.lru_cache(maxsize=512)
def sha256_of(source):
    """The hash that stands for a script."""
    return hashlib.sha256(source.encode()).hexdigest()


class Reader:
    """It evaluates the expressions that may stand in a track, and raises an error where something
    else stands there."""

    def __init__(self, body):
        """Collect what expressions may name: the classes and the constants of a module's body."""
        self.classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        self.constants = {}
        for node in body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                try:
                    self.constants[name] = self.value(node.value)
                except (ValueError, ArithmeticError):
                    self.constants.pop(name, None)  # which no track may name

    def value(self, node):
        """What an expression comes to, in the types that JSON knows."""
        if isinstance(node, ast.Constant):
            is_number = type(node.value) in (int, float)
            return small(node.value, node) if is_number else node.value
        if isinstance(node, (ast.Tuple, ast.List)):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Dict):
            keys = [self.value(key) for key in node.keys]
            if not all(isinstance(key, str) for key in keys):
                raise no_literal(node)
            return dict(zip(keys, map(self.value, node.values), strict=True))
        if isinstance(node, ast.Call):
            return self.instance(node)
        if isinstance(node, ast.Name) and node.id in self.constants:
            return self.constants[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -small(self.value(node.operand), node)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return self.arithmetic(node)
        raise no_literal(node)

    def arithmetic(self, node):
        """What an operation on two numbers comes to, which never takes long to work out."""
        left = small(self.value(node.left), node)
        right = small(self.value(node.right), node)
        if isinstance(node.op, ast.Pow) and abs(right) > HIGHEST_POWER:
            raise no_literal(node)
        return small(OPERATIONS[type(node.op)](left, right), node)

    def instance(self, call):
        """{field: value} of a dataclass that is called."""
        kind = self.classes.get(getattr(call.func, "id", None))
        if kind is None:
            raise no_literal(call)
        defaults = defaults_of(kind)
        given = dict(zip(defaults, map(self.value, call.args), strict=False))
        given.update({word.arg: self.value(word.value) for word in call.keywords})
        if len(call.args) > len(defaults) or given.keys() - defaults.keys():
            raise ValueError(f"line {call.lineno}: {kind.name} has no such field")
        for name, node in defaults.items():
            if name not in given:
                if node is None:
                    raise ValueError(f"line {call.lineno}: {name} is not given, nor has a default")
                given[name] = self.value(node)
        return given


def small(value, node):
    """A number, which has to be real and of moderate size."""
    if type(value) not in (int, float) or not abs(value) <= LARGEST:
        raise no_literal(node)
    return value


def no_literal(node):
    """The error that says where something stands that is not evaluated."""
    line = getattr(node, "lineno", "?")
    return ValueError(f"line {line} is no literal and no arithmetic on small numbers")


def defaults_of(kind):
    """{field: the expression of its default, or None where it has none} of a dataclass."""
    # In the scripts of the first records each field of Config has its default in front.
    older = kind.name == "Config" and "kw_only" not in "".join(map(ast.dump, kind.decorator_list))
    fields = [node for node in kind.body if isinstance(node, ast.AnnAssign)]
    return {node.target.id: default_of(node.value, older) for node in fields}


def default_of(node, older):
    """The expression of the default of a field, whose value in its class is this node or None."""
    if not isinstance(node, ast.Call):
        return node
    words = [word.value for word in node.keywords if word.arg == "default"]
    words = node.args if older else words
    if older and getattr(node.func, "id", "") == "schedule":  # the same value in every step
        return ast.List([ast.List([ast.Constant(0.0), *words[:1]])])
    return words[0] if words else None


def body_of(source):
    """The statements of a script up to its tracks, which are the last of them.

    What follows the tracks cannot change what is read, and parsing it would take ten times as long.
    """
    head, _, rest = source.partition("\nTRACKS = {")
    tracks, end, _ = rest.partition("\n}\n")
    if len(re.findall(r"^TRACKS\b", source, re.MULTILINE)) != 1 or not end:
        raise ValueError("one line TRACKS = {, and behind it a line }, are needed")
    with warnings.catch_warnings(action="ignore"):  # of a backslash in a text
        return ast.parse(head + "\nTRACKS = {" + tracks + end).body


@functools.lru_cache(maxsize=512)
def tracks_of(source):
    """{track: {field: value as JSON keeps it}} of a script. RecordError where it is unreadable."""
    try:
        body = body_of(source)
        if sum(isinstance(node, ast.ClassDef) and node.name == "Config" for node in body) != 1:
            raise ValueError("one class Config is needed")
        tracks = body[-1].value
        for call in tracks.values:
            if call.func.id != "Config" or call.args:
                raise ValueError(f"line {call.lineno}: a track is Config(field=value, ...)")
        return Reader(body).value(tracks)
    except Exception as error:
        reason = f"{type(error).__name__}: {ascii(str(error))[1:-1][:100]}"
        hint = "a dict TRACKS of Config(field=value, ...), of literals, is needed"
        raise RecordError(f"its tracks cannot be read from the source ({reason}); {hint}") from None


def config_of(source, track):
    """{field: value} of one track of a script. RecordError where it has none."""
    tracks = tracks_of(source)
    known = ", ".join(map(ascii, tracks))
    require(track in tracks, f"the source has no track {ascii(track)}, but {known}")
    return tracks[track]


def without_place(config):
    """The fields of a configuration that say what ran, and not as which run."""
    return {name: value for name, value in config.items() if name not in PLACE_FIELDS}


@functools.lru_cache(maxsize=512)
def check_source(source):
    """RecordError where a script is none, or a reader of it would not see what Python sees."""
    coded = any(CODING.match(line) for line in source.split("\n")[:2])
    require(not coded, "the script has a coding line, by which comments may be code; leave it out")
    found = ELSEWHERE.search(source)
    require(not found, f"the script imports {found and found[1]}, whose text no log holds")
    # A question mark stands nowhere in Python but in texts and comments, where any letter may.
    plain = re.sub("[^\0-\x7f]", "?", source)
    try:
        with warnings.catch_warnings(action="ignore"):  # of a backslash in a text
            symtable.symtable(plain, "the script", "exec")  # the quickest way to parse all of it
    except Exception as error:
        reason = ascii(str(error))[1:-1][:100]
        raise RecordError(f"the script is no Python with names in ASCII: {reason}") from None


def micro_batches_of(config):
    """[(fraction of the steps from which it holds, micro-batches of a step), ...] of a run, from
    its stages, or in older scripts from a schedule. RecordError where neither can be read."""
    try:
        if "stages" in config:
            found = [(stage["start"], stage["micro_batches"]) for stage in config["stages"]]
        else:
            found = [(start, count) for start, count in config["micro_batches"]]
        if not all(0 <= start <= 1 and type(count) is int and count > 0 for start, count in found):
            raise ValueError
        return found
    except (KeyError, TypeError, ValueError):
        hint = "stages with a start and a number of micro_batches are needed"
        raise RecordError(f"{hint}: the tokens of the run cannot be worked out") from None


def training_tokens(config):
    """Tokens that a run of this configuration trains on. RecordError where it does not say so."""
    schedule = micro_batches_of(config)
    steps = config.get("steps")
    micro_batch = config.get("micro_batch_tokens")
    are_numbers = type(steps) is int and type(micro_batch) is int
    require(are_numbers, "steps and micro_batch_tokens are no whole numbers")
    edges = [*(math.ceil(start * steps) for start, _ in schedule), steps]
    lengths = [end - begin for begin, end in itertools.pairwise(edges)]
    batches = sum(count * length for (_, count), length in zip(schedule, lengths, strict=True))
    return micro_batch * batches
