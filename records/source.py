"""What a script's tracks are, read from its source by `ast`: nothing of it runs.

A script has a class `Config`, each field of which is `name: type = knob(default, ...)`, `choice(default, ...)` or
`schedule(default, ...)`, and a dict `TRACKS = {name: Config(field=value, ...)}`, of literals and of arithmetic on them.
"""
import ast
import functools
import math
import operator
import re
import warnings

from records.files import RecordError

# Fields that say where and as which run it is watched, and not what it computes.
NEUTRAL_FIELDS = {"seed", "device", "pass_tokens", "workers", "log_every", "save_every", "keep", "run_id", "resume",
                  "run_of"}
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
              ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow}
LARGEST = 2**64  # number that arithmetic may come to


def value_of(node, names):
    """What a literal is, or arithmetic on numbers; `names` are the constants that it may name. ValueError otherwise."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Tuple):
        return tuple(value_of(item, names) for item in node.elts)
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -number_of(node.operand, names)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = number_of(node.left, names), number_of(node.right, names)
        if isinstance(node.op, ast.Pow) and abs(right) > 64:
            raise ValueError(f"an exponent of {right}")
        value = OPERATIONS[type(node.op)](left, right)
        if not isinstance(value, complex) and abs(value) <= LARGEST:
            return value
    raise ValueError(f"line {getattr(node, 'lineno', '?')} is no literal and no arithmetic on small numbers")


def number_of(node, names):
    value = value_of(node, names)
    if type(value) not in (int, float) or not abs(value) <= LARGEST:
        raise ValueError(f"line {node.lineno}: {ascii(value)[:40]} is no small number")
    return value


def default_of(node, names):
    """The default of a field, from the call that makes it."""
    kind = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    if kind not in ("knob", "choice", "schedule") or not node.args:
        raise ValueError(f"line {node.lineno}: a field of Config is a call of knob, choice or schedule")
    value = value_of(node.args[0], names)
    return ((0.0, value),) if kind == "schedule" else value


def one(nodes, what):
    if len(found := list(nodes)) != 1:
        raise ValueError(f"{len(found)} {what}, one is needed")
    return found[0]


def as_logged(value):
    """As JSON keeps it: tuples are lists."""
    return [as_logged(item) for item in value] if isinstance(value, tuple) else value


@functools.lru_cache(maxsize=512)
def tracks_of(source):
    """{track: {field: value as JSON keeps it}} of a script. RecordError where they cannot be read off."""
    try:
        head, _, rest = source.partition("\nTRACKS = {")
        if len(re.findall(r"^TRACKS\b", source, re.MULTILINE)) != 1 or "\n}\n" not in rest:
            raise ValueError("no line TRACKS = {, more than one line that begins with TRACKS, or no line } behind it")
        # What follows cannot change what is read, and parsing it would take ten times as long.
        with warnings.catch_warnings(action="ignore"):  # of a backslash in a text
            body = ast.parse(head + "\nTRACKS = {" + rest.partition("\n}\n")[0] + "\n}\n").body
        names = {}
        for node in body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                try:
                    names[name] = value_of(node.value, names)
                except (ValueError, ArithmeticError):
                    names.pop(name, None)
        config = one((node for node in body if isinstance(node, ast.ClassDef) and node.name == "Config"),
                     "classes Config")
        fields = {node.target.id: default_of(node.value, names) for node in config.body
                  if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
        tracks, found = body[-1].value, {}
        for key, call in zip(tracks.keys, tracks.values):
            if not isinstance(call, ast.Call) or call.args or getattr(call.func, "id", "") != "Config":
                raise ValueError(f"line {call.lineno}: a track is Config(field=value, ...)")
            given = {word.arg: value_of(word.value, names) for word in call.keywords}
            if unknown := given.keys() - fields.keys():
                raise ValueError(f"line {call.lineno}: Config has no field {ascii(min(map(str, unknown)))}")
            found[value_of(key, names)] = {name: as_logged(value) for name, value in {**fields, **given}.items()}
        return found
    except (SyntaxError, ValueError, ArithmeticError, AttributeError, TypeError, RecursionError, MemoryError) as error:
        raise RecordError(f"its tracks cannot be read from the source ({type(error).__name__}: "
                          f"{ascii(str(error))[1:-1][:100]}); a class Config of knob, choice and schedule, and a dict "
                          f"TRACKS of Config(field=value, ...), of literals, are needed") from None


def config_of(source, track):
    """{field: value} of one track of a script. RecordError where it has none."""
    tracks = tracks_of(source)
    if track not in tracks:
        raise RecordError(f"the source has no track {ascii(track)}, but {', '.join(map(ascii, tracks))}")
    return tracks[track]


def training_tokens(config):
    """Tokens that a run of this configuration trains on. RecordError where it has no readable schedule of batches."""
    try:
        length, steps, schedule = config["micro_batch_tokens"], config["steps"], config["micro_batches"]
        edges = [math.ceil(start * steps) for start, _ in schedule] + [steps]
        return length * sum(count * (end - start) for (_, count), start, end in zip(schedule, edges, edges[1:]))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise RecordError("micro_batch_tokens and micro_batches are no length and no schedule of (fraction, number): "
                          "the tokens of the run cannot be worked out") from None
