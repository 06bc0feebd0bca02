"""What a script's tracks are, read from its source by `ast`: nothing of it runs.

A script has dataclasses, one of which is called Config, and a dict of tracks that begins and ends
at the start of a line:

    TRACKS = {
        "name": Config(field=value, ...),
    }

A value is a literal, arithmetic on numbers, a constant of the module, or a call of one of the
dataclasses, which is read as {field: value}. A field that a call does not name has the default that
its class gives it: `name: type = 1.0`, or `name: type = made(..., default=1.0)`, whatever `made`
is. Scripts of an older form are read as well, see `older_default`.
"""

import ast
import functools
import itertools
import math
import operator
import re
import warnings

from records.files import RecordError

# Fields that say where a run computes and as which run it is watched, and not what it computes.
NEUTRAL_FIELDS = {
    "seed",
    "device",
    "workers",
    "log_every",
    "save_every",
    "run_id",
    "resume",
    "run_of",
    "pass_tokens",  # this one and the next are fields of older scripts
    "keep",
}
DTYPES = ("bfloat16", "float32")  # what a script may make of the dtype `auto`
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
LARGEST = 2**64  # number that arithmetic may come to
HIGHEST_POWER = 64
UNREADABLE = (
    SyntaxError,
    ValueError,
    ArithmeticError,
    AttributeError,
    TypeError,
    RecursionError,
    MemoryError,
)


class Reader:
    """It evaluates the expressions that may stand in a track. Whatever else stands there raises
    ValueError, or another of UNREADABLE."""

    def __init__(self, body):
        """Collect what expressions may name: the classes and the constants of a module's body."""
        self.classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        self.constants = {}
        for node in body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.read_constant(node.targets[0].id, node.value)

    def read_constant(self, name, node):
        """Remember what an assignment makes of a name, or that it is none of the constants."""
        try:
            self.constants[name] = self.value(node)
        except (ValueError, ArithmeticError):
            self.constants.pop(name, None)

    def value(self, node):
        """What an expression comes to, in the types that JSON knows."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.Tuple, ast.List)):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Dict):
            return {
                self.name(key): self.value(item)
                for key, item in zip(node.keys, node.values, strict=True)
            }
        if isinstance(node, ast.Call):
            return self.instance(node)
        if isinstance(node, ast.Name) and node.id in self.constants:
            return self.constants[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.number(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return self.arithmetic(node)
        raise no_literal(node)

    def name(self, node):
        """A key of a dict, which is a text."""
        key = self.value(node)
        if not isinstance(key, str):
            raise ValueError(f"line {node.lineno}: the key {ascii(key)[:40]} is no text")
        return key

    def number(self, node):
        """What an operand comes to, which has to be a number of moderate size."""
        value = self.value(node)
        if type(value) not in (int, float) or not abs(value) <= LARGEST:
            raise ValueError(f"line {node.lineno}: {ascii(value)[:40]} is no small number")
        return value

    def arithmetic(self, node):
        """What an operation on two numbers comes to, which never takes long to work out."""
        left = self.number(node.left)
        right = self.number(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > HIGHEST_POWER:
            raise ValueError(f"an exponent of {right}")
        value = OPERATIONS[type(node.op)](left, right)
        if isinstance(value, complex) or not abs(value) <= LARGEST:
            raise no_literal(node)
        return value

    def instance(self, call):
        """{field: value} of a dataclass that is called."""
        kind = getattr(call.func, "id", None)
        if kind not in self.classes:
            raise no_literal(call)
        fields = fields_of(self.classes[kind])
        if len(call.args) > len(fields):
            raise ValueError(f"line {call.lineno}: {kind} has {len(fields)} fields")
        given = dict(zip(fields, map(self.value, call.args), strict=False))
        given.update({word.arg: self.value(word.value) for word in call.keywords})
        unknown = given.keys() - fields.keys()
        if unknown:
            odd = ascii(min(map(str, unknown)))
            raise ValueError(f"line {call.lineno}: {kind} has no field {odd}")
        older = is_older(self.classes[kind])
        for name, node in fields.items():
            if name not in given:
                given[name] = self.older_default(node) if older else self.default(name, node, call)
        return given

    def default(self, name, node, call):
        """What a field is where a call does not name it."""
        if isinstance(node, ast.Call):
            words = [word.value for word in node.keywords if word.arg == "default"]
            node = words[0] if words else None
        if node is None:
            raise ValueError(f"line {call.lineno}: {name} is not given, and has no default")
        return self.value(node)

    def older_default(self, node):
        """The default of a field in the scripts of the first records: the first word of a call.

        Such a field is `name: type = knob(default, ...)`, `choice(default, ...)`, or
        `schedule(default, ...)`, which stands for the same value in every step.
        """
        kind = getattr(node, "func", None)
        kind = getattr(kind, "id", "")
        if kind not in ("knob", "choice", "schedule") or not node.args:
            line = getattr(node, "lineno", "?")
            raise ValueError(f"line {line}: an older field is a knob, choice or schedule")
        value = self.value(node.args[0])
        if kind == "schedule":
            return [[0.0, value]]
        return value


def no_literal(node):
    """The error that says where something stands that is not evaluated."""
    line = getattr(node, "lineno", "?")
    return ValueError(f"line {line} is no literal and no arithmetic on small numbers")


def fields_of(kind):
    """{name: the expression behind its `=`, or None} of the annotated names of a class."""
    return {
        node.target.id: node.value
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def is_older(kind):
    """Whether a class is the Config of a script as the first records have it: its fields may be
    given by position, since each of them has a default."""
    words = [
        word.arg
        for call in kind.decorator_list
        if isinstance(call, ast.Call)
        for word in call.keywords
    ]
    return kind.name == "Config" and "kw_only" not in words


def body_of(source):
    """The statements of a script up to its tracks, which are the last of them.

    What follows the tracks cannot change what is read, and parsing it would take ten times as long.
    """
    head, _, rest = source.partition("\nTRACKS = {")
    tracks, end, _ = rest.partition("\n}\n")
    if len(re.findall(r"^TRACKS\b", source, re.MULTILINE)) != 1 or not end:
        raise ValueError(
            "no line TRACKS = {, more than one line that begins with TRACKS, or no line } behind it"
        )
    with warnings.catch_warnings(action="ignore"):  # of a backslash in a text
        return ast.parse(head + "\nTRACKS = {" + tracks + end).body


def read_tracks(source):
    """{track: {field: value as JSON keeps it}} of a script; raises one of UNREADABLE."""
    body = body_of(source)
    count = sum(isinstance(node, ast.ClassDef) and node.name == "Config" for node in body)
    if count != 1:
        raise ValueError(f"{count} classes Config, one is needed")
    reader = Reader(body)
    tracks = body[-1].value
    for call in tracks.values:
        if getattr(getattr(call, "func", None), "id", "") != "Config" or call.args:
            raise ValueError(f"line {call.lineno}: a track is Config(field=value, ...)")
    return reader.value(tracks)


@functools.lru_cache(maxsize=512)
def tracks_of(source):
    """{track: {field: value as JSON keeps it}} of a script. RecordError where it is unreadable."""
    try:
        return read_tracks(source)
    except UNREADABLE as error:
        reason = f"{type(error).__name__}: {ascii(str(error))[1:-1][:100]}"
        raise RecordError(
            f"its tracks cannot be read from the source ({reason}); a dataclass Config, and a dict "
            f"TRACKS of Config(field=value, ...), of literals, are needed"
        ) from None


def config_of(source, track):
    """{field: value} of one track of a script. RecordError where it has none."""
    tracks = tracks_of(source)
    if track not in tracks:
        known = ", ".join(map(ascii, tracks))
        raise RecordError(f"the source has no track {ascii(track)}, but {known}")
    return tracks[track]


def has_field(source, name):
    """Whether a script's Config can be told a field, judged by a line that annotates this name."""
    return bool(re.search(rf"^    {name}\s*:", source, re.MULTILINE))


def micro_batches_of(config):
    """[(fraction of the steps from which it holds, micro-batches of a step), ...] of a run, from
    its stages, or in older scripts from a schedule. RecordError where neither can be read."""
    try:
        if "stages" in config:
            return [(stage["start"], stage["micro_batches"]) for stage in config["stages"]]
        return [(start, count) for start, count in config["micro_batches"]]
    except (KeyError, TypeError, ValueError):
        raise RecordError(
            "there are no stages with a start and a number of micro_batches, and no schedule "
            "micro_batches of (fraction, number): the tokens of the run cannot be worked out"
        ) from None


def training_tokens(config):
    """Tokens that a run of this configuration trains on. RecordError where it does not say so."""
    schedule = micro_batches_of(config)
    try:
        steps = config["steps"]
        edges = [math.ceil(start * steps) for start, _ in schedule]
        lengths = [end - begin for begin, end in itertools.pairwise([*edges, steps])]
        taken = [count * length for (_, count), length in zip(schedule, lengths, strict=True)]
        return config["micro_batch_tokens"] * sum(taken)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise RecordError(
            "steps, micro_batch_tokens and the numbers of micro-batches are no numbers: the tokens "
            "of the run cannot be worked out"
        ) from None
