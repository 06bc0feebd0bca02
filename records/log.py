"""One run's log.txt, which the trainer writes. It is parsed strictly and never executed."""

import hashlib
import itertools
import re
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from records.files import LOG_LIMIT, RecordError, parse_json, read_text

END_OF_CODE = "===== END OF CODE ====="
START = "===== START ====="
SOURCE_LINES = 10_000
STEP_LIMIT = 10_000_000
BLOCK = 2  # pairs whose runs are shuffled among each other
NUMBER = r"\d{1,19}"
KINDS = {  # of what stands in a line
    # A run's name is also that of its log in a record, and so it is no path.
    "name": r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
    "word": r"\S+",
    "text": r".{1,200}?",
    "bit": "[01]",
    "number": NUMBER,
    "decimal": rf"{NUMBER}\.\d{{1,2}}",
    "loss": rf"{NUMBER}\.\d{{5}}",
    "split": "train|val",
    "moment": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ",
}


def pattern(template):
    """The expression of a whole line, in which `<name=kind>` stands for what is kept."""

    def group(found):
        name, kind = found.groups()
        return f"(?P<{name}>{KINDS[kind]})"

    return re.compile(re.sub(r"<(\w+)=(\w+)>", group, template), re.ASCII)


HEADER = pattern(
    "run:<run=name> track:<track=word> commit:<commit=word> dirty:<dirty=bit> "
    "code_sha256:<code_sha256=word> seed:<seed=number> world_size:<world_size=number> "
    "device:<device=text> torch:<torch=word> cuda:<cuda=word> triton:<triton=word>"
    "(?: started:<started=moment>)?(?: .*)?"
)
DATA = pattern("data:<data_sha256=word>(?: shards:<shards=word>)? backends:.+")
BATCH = pattern(
    "batch:<number=number> counter:<counter=number>/<declared=number> start:<start=number>"
)
RUN_OF = pattern("<number=number>:<counter=number>/<declared=number>:<start=number>")
STEP = pattern(
    r"step:<step=number>/<steps=number> <split=split>_loss:<loss=loss> (?:\S+ )*?"
    "train_time:<time=number>ms step_avg:<average=decimal>ms(?: .*)?"
)
FINAL = pattern(
    "final val_loss:<loss=loss> train_time:<time=number>ms tokens:<tokens=number> "
    "peak_memory:<memory=number>MiB(?: tokens_per_s:\\S+ mfu:\\S+ cpu_time:<cpu=number>ms)?(?: .*)?"
)
STATUS = pattern("status:ok run:<run=word> val_loss:<loss=loss> train_time:<time=decimal>s .*")
CONFIG_FIELDS = {  # that every configuration has, with their types
    "run_id": str,
    "track": str,
    "seed": int,
    "steps": int,
    "data": str,
    "tokenizer": str,
    "log_every": int,
    "val_every": int,
    "val_tokens": int,
    "val_sha256": str,
    "target_loss": float,
}


@dataclass(frozen=True)
class Batch:
    """A run's place among those that were declared together."""

    number: int  # of the batch among those of this code
    counter: int  # of the run, from 1
    declared: int  # runs of the batch
    start: int  # how often the run was started

    def __str__(self):
        """The place as a trainer's `run_of` takes it."""
        return f"{self.number}:{self.counter}/{self.declared}:{self.start}"

    def seed(self, code_sha256):
        """The seed of this run, or of both runs of this pair. It follows from a hash of the code,
        the batch and the counter alone, so that nobody chooses it, and a run that is started again
        is the same."""
        return drawn(f"{code_sha256}:{self.number}:{self.counter}")


def drawn(text):
    """The number of 32 bits that everybody draws who draws for this text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def order_of_pairs(code_sha256, batch, declared):
    """[(side, counter), ...] in the order of a batch's runs.

    Two pairs in a row are a block, whose four runs come in one of the six orders that two runs of
    each side have; a pair that is left over has an order of two.
    """
    order = []
    for first in range(1, declared + 1, BLOCK):
        counters = range(first, min(first + BLOCK, declared + 1))
        orders = sorted(set(itertools.permutations("ab" * len(counters))))
        number = drawn(f"{code_sha256}:{batch}:order:{first}")
        left = {side: iter(counters) for side in "ab"}
        for side in orders[number % len(orders)]:
            order.append((side, next(left[side])))
    return order


@dataclass(frozen=True)
class Point:
    """One logged loss of a run's curve."""

    step: int
    loss: float
    time_ms: int


NOWHERE = Point(0, 0.0, 0)


@dataclass(frozen=True)
class Run:
    """What a complete log says. Losses in nats per token, times in ms, memory in MiB."""

    path: Path
    source: str
    run: str
    track: str
    code_sha256: str
    seed: int
    world_size: int
    device: str
    torch: str
    cuda: str
    triton: str
    started: datetime | None  # UTC
    config: dict
    overrides: dict
    kinds: tuple  # the first words of the lines after the first, in their order
    data_sha256: str
    shards: str  # `ok`: those that the run read are the manifest's
    batch: Batch | None
    resumed: bool
    validity: dict
    curves: dict  # {"train": [Point, ...], "val": [Point, ...]}
    val_loss: float
    train_time_ms: int
    cpu_time_ms: int | None  # of the (first) process while that clock ran; older logs lack it
    tokens: int
    memory_mib: int

    @property
    def steps(self):
        """Optimizer steps of the whole run."""
        return self.config["steps"]

    @property
    def dtype(self):
        """The resolved type of matrices and activations; "" where a script has no such field."""
        return str(self.config.get("dtype", ""))


def match(expression, line, what):
    """The match of a whole line. RecordError where the line is otherwise."""
    found = expression.fullmatch(line)
    if not found:
        raise RecordError(f"unreadable {what} line: {ascii(line[:80])}")
    return found


def split_source(text):
    """(source, event lines) of a log. The source of a thin one, as records keep them, is empty."""
    source, sentinel, events = f"\n{text}".partition(f"\n{END_OF_CODE}\n")
    if not sentinel:
        raise RecordError(
            f"no line {END_OF_CODE!r}: the log holds no source, was cut, or is another trainer's, "
            f"which only `plot` and `report` read"
        )
    if source.count("\n") >= SOURCE_LINES:
        raise RecordError(f"the source has more than {SOURCE_LINES:,} lines")
    lines = events.split("\n")
    if END_OF_CODE in lines:
        raise RecordError(f"the line {END_OF_CODE!r} stands twice")
    if lines.pop() != "":
        raise RecordError("the last line is cut")
    return f"{source}\n"[1:], lines


def thin(text):
    """A whole log without its source, which a record keeps once, and not with each of its logs."""
    _, sentinel, events = f"\n{text}".partition(f"\n{END_OF_CODE}\n")
    return sentinel[1:] + events


def only(lines, prefix, required=True):
    """The one line that starts with `prefix`; None if there is none and none is required."""
    found = [line for line in lines if line.startswith(prefix)]
    if not found and not required:
        return None
    if not found:
        raise RecordError(f"no lines {prefix!r}, one is needed: cut?")
    if len(found) > 1:
        raise RecordError(f"{len(found)} lines {prefix!r}, one is needed")
    return found[0]


def parse_config(line, header):
    """The configuration of a log, which has the fields that are asked for and says the same as the
    first line."""
    config = parse_json(line.removeprefix("config:"))
    for name, kind in CONFIG_FIELDS.items():
        if not isinstance(config, dict) or type(config.get(name)) is not kind:
            raise RecordError(f"config has no {name} of type {kind.__name__}")
    said = {"run_id": header["run"], "track": header["track"], "seed": int(header["seed"])}
    for name, value in said.items():
        if config[name] != value:
            raise RecordError(
                f"{name} is {ascii(config[name])} in the config line and {value} in the run line"
            )
    if not 0 < config["steps"] <= STEP_LIMIT:
        raise RecordError(f"steps is {config['steps']}, must be 1 to {STEP_LIMIT:,}")
    return config


def parse_overrides(line):
    """{field: value} of what the command line changed, nothing without such a line."""
    if line is None:
        return {}
    overrides = parse_json(line.removeprefix("overrides:"))
    if not isinstance(overrides, dict):
        raise RecordError(f"overrides: {ascii(overrides)[:60]} is no object of fields and values")
    return overrides


def parse_batch(line, overrides, config):
    """The Batch of a log, or None. A script of the first records logs its overrides in the place
    of this line, and then says in its configuration alone which run of a batch it was."""
    if line is not None:
        found = match(BATCH, line, "batch")
    elif overrides and config.get("run_of"):
        found = match(RUN_OF, str(config["run_of"]), "run_of")
    else:
        return None
    return Batch(*map(int, found.groups()))


def parse_validity(line):
    """{gate or fact: what the line says}."""
    words = [word.partition(":")[::2] for word in line.split()[1:]]
    if len(dict(words)) < len(words):
        raise RecordError(f"the validity line says something twice: {ascii(line[:80])}")
    return dict(words)


def kinds_of(lines):
    """The first words of lines, in their order; of lines in a row of one kind only the first
    one's."""
    words = [re.match("[a-z_]*", line)[0] for line in lines]
    return tuple(word for word, _ in itertools.groupby(words))


def parse_point(line, steps, before):
    """(train or val, Point) of a line of a run of so many steps, behind the Point `before`."""
    found = match(STEP, line, "step")
    point = Point(int(found["step"]), float(found["loss"]), int(found["time"]))
    if point.step == 0 and found["split"] == "val":
        return "before", point
    if int(found["steps"]) != steps or not 0 < point.step <= steps:
        raise RecordError(
            f"step {found['step']}/{found['steps']}: the configuration has {steps} steps"
        )
    if point.step < before.step or point.time_ms < before.time_ms:
        raise RecordError(f"step {point.step}: steps and times must not fall")
    # Time and average are rounded on their own, to 1 ms and to 0.01 ms a step.
    apart = abs(float(found["average"]) * point.step - point.time_ms)
    if apart > 0.501 + 0.00501 * point.step:
        raise RecordError(
            f"step {point.step}: step_avg {found['average']} ms is not train_time / step"
        )
    return found["split"], point


def parse_curves(lines, config):
    """Training and validation losses by step, after checking that steps and times agree with each
    other and that every step is there that the configuration logs."""
    curves = {"train": [], "val": []}
    before = NOWHERE
    for line in lines:
        kind, point = parse_point(line, config["steps"], before)
        if kind != "before":  # a run that goes on with a trained model is validated at step 0
            curves[kind].append(point)
            before = point
    check_complete("train", curves["train"], config["log_every"], config["steps"])
    check_complete("val", curves["val"], config["val_every"], config["steps"])
    return curves


def check_complete(kind, curve, every, steps):
    """A curve has a point at each multiple of `every` and at the last step, and no other."""
    if not 0 < every < steps:
        every = steps
    due = range(every, steps + every, every)
    if len(curve) != len(due) or any(
        point.step != min(step, steps) for point, step in zip(curve, due, strict=True)
    ):
        raise RecordError(
            f"{kind}_loss lines: {len(curve)} found, one every {every} of {steps} steps needed: "
            f"cut, or added to?"
        )


def moment(text):
    """The time that a text of the kind `moment` names, or None without a text."""
    if not text:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise RecordError(f"started: {text} is no moment of the calendar") from None


def check_end(final, status, header, last, steps):
    """The last lines of a log say the same: the Point `last` of the validation curve, the final
    line and the status line."""
    if last.step != steps:
        raise RecordError(f"no validation at the last step ({steps}): cut?")
    loss = float(final["loss"])
    if last.loss != loss or float(status["loss"]) != loss:
        raise RecordError(
            f"the final loss is {final['loss']} in the final line, {last.loss:.5f} at the last "
            f"step and {status['loss']} in the status line"
        )
    time_ms = int(final["time"])
    if last.time_ms != time_ms or abs(float(status["time"]) - time_ms / 1000) > 0.051:
        raise RecordError(
            f"the training time is {time_ms} ms in the final line, {last.time_ms} ms at the last "
            f"step and {status['time']} s in the status line"
        )
    for what, took in (("training", time_ms), ("processor", final["cpu"])):
        if took is not None and not int(took):
            raise RecordError(f"the {what} time is 0 ms, which no run takes")
    if status["run"] != header["run"]:
        raise RecordError(
            f"the status line is run {ascii(status['run'])}'s, the log {header['run']}'s"
        )


def run_at(path):
    """The Run of a log, or of the one in a run's folder. A RecordError names the log."""
    path = Path(path)
    if path.is_dir():
        path = path / "log.txt"
    try:
        return parse_log(path)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def parse_header(lines):
    """The facts in the first line of a log's events, if the run completed."""
    if not lines or not lines[-1].startswith("status:"):
        raise RecordError("no status line at the end: the run was killed, or the log cut")
    if not lines[-1].startswith("status:ok "):
        raise RecordError(f"the run did not complete: {ascii(lines[-1][:80])}")
    return match(HEADER, lines[0], "run").groupdict()


def script_of(code_sha256, source, scripts):
    """The source that a run ran: the one in its log, or in a thin log the one of `scripts` whose
    hash the log names."""
    for script in [source] if source else scripts:
        if sha256_of(script) == code_sha256:
            return script
    if source:
        raise RecordError(
            "code_sha256 is not that of the source in the log: source or hash was edited, or the "
            "source does not end in exactly one line break"
        )
    raise RecordError(
        f"code_sha256 {ascii(code_sha256)[1:9]} is not that of the train_gpt.py beside the logs, "
        f"nor of the parent's; a record's log is read with its folder"
    )


def sha256_of(source):
    """The hash that stands for a script."""
    return hashlib.sha256(source.encode()).hexdigest()


def parse_log(path, scripts=()):
    """The Run of a complete log. scripts: the sources that it may have run if it holds none.
    Raises RecordError with what is missing, unreadable or contradicts itself."""
    source, lines = split_source(read_text(path, LOG_LIMIT))
    header = parse_header(lines)
    source = script_of(header["code_sha256"], source, scripts)
    if lines.count(START) != 1:
        raise RecordError(f"the line {START!r} must stand once")
    start = lines.index(START)
    head = lines[1:start]
    body = lines[start + 1 :]
    config = parse_config(only(head, "config:"), header)
    overrides = parse_overrides(only(head, "overrides:", required=False))
    data = match(DATA, only(head, "data:"), "data")
    batch = parse_batch(only(head, "batch:", required=False), overrides, config)
    curves = parse_curves([line for line in body if line.startswith("step:")], config)
    validity = parse_validity(only(body, "validity: "))
    final = match(FINAL, only(body, "final "), "final")
    status = match(STATUS, only(body, "status:"), "status")
    last = curves["val"][-1] if curves["val"] else NOWHERE
    check_end(final, status, header, last, config["steps"])
    return Run(
        path=Path(path),
        source=sys.intern(source),
        run=header["run"],
        track=header["track"],
        code_sha256=header["code_sha256"],
        seed=int(header["seed"]),
        world_size=int(header["world_size"]),
        device=header["device"],
        torch=header["torch"],
        cuda=header["cuda"],
        triton=header["triton"],
        started=moment(header["started"]),
        config=config,
        overrides=overrides,
        kinds=kinds_of(lines[1:]),
        data_sha256=data["data_sha256"],
        shards=data["shards"] or "unknown",
        batch=batch,
        resumed=any(line.startswith("resumed:") for line in lines),
        validity=validity,
        curves=curves,
        val_loss=float(final["loss"]),
        train_time_ms=int(final["time"]),
        cpu_time_ms=int(final["cpu"]) if final["cpu"] else None,
        tokens=int(final["tokens"]),
        memory_mib=int(final["memory"]),
    )
