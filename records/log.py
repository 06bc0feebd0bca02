"""One run's log.txt, parsed strictly and never executed; the trainer writes it (`Log`, `log_header`, `finish`)."""
import hashlib
import itertools
import re
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from records.files import LOG_LIMIT, RecordError, parse_json, read_text

END_OF_CODE, START = "===== END OF CODE =====", "===== START ====="
SOURCE_LINES, STEP_LIMIT = 10_000, 10_000_000
BLOCK = 2  # pairs whose runs are shuffled among each other
NUMBER = r"\d{1,19}"
KINDS = {  # of what stands in a line
    "name": r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",  # of a run: also the name of its log in a record, so no path
    "word": r"\S+", "text": r".{1,200}?", "bit": "[01]", "number": NUMBER, "decimal": rf"{NUMBER}\.\d{{1,2}}",
    "loss": rf"{NUMBER}\.\d{{5}}", "split": "train|val", "moment": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"}


def pattern(template):
    """The expression of a whole line, in which `<name=kind>` stands for what is kept."""
    return re.compile(re.sub(r"<(\w+)=(\w+)>", lambda found: f"(?P<{found[1]}>{KINDS[found[2]]})", template), re.ASCII)


HEADER = pattern("run:<run=name> track:<track=word> commit:<commit=word> dirty:<dirty=bit> "
                 "code_sha256:<code_sha256=word> seed:<seed=number> world_size:<world_size=number> "
                 "device:<device=text> torch:<torch=word> cuda:<cuda=word> triton:<triton=word>"
                 "(?: started:<started=moment>)?(?: .*)?")
DATA = pattern("data:<data_sha256=word>(?: shards:<shards=word>)? backends:.+")
BATCH = pattern("batch:<number=number> counter:<counter=number>/<declared=number> start:<start=number>")
STEP = pattern(r"step:<step=number>/<steps=number> <split=split>_loss:<loss=loss> (?:\S+ )*?"
               "train_time:<time=number>ms step_avg:<average=decimal>ms(?: .*)?")
FINAL = pattern("final val_loss:<loss=loss> train_time:<time=number>ms tokens:<tokens=number> "
                "peak_memory:<memory=number>MiB(?: tokens_per_s:\\S+ mfu:\\S+ cpu_time:<cpu=number>ms)?(?: .*)?")
STATUS = pattern("status:ok run:<run=word> val_loss:<loss=loss> train_time:<time=decimal>s .*")


@dataclass(frozen=True)
class Batch:
    """This run among those declared together: batch number of this code, place, declared size, how often started."""
    number: int
    counter: int
    declared: int
    start: int

    def __str__(self):
        """As a trainer's `run_of`."""
        return f"{self.number}:{self.counter}/{self.declared}:{self.start}"

    def seed(self, code_sha256):
        """That of this run, or of both runs of this pair: from a hash of the code, the batch and the counter alone, so
        that nobody chooses it, and a run that is started again is the same."""
        return drawn(f"{code_sha256}:{self.number}:{self.counter}")


def drawn(text):
    """The number of 32 bits that everybody draws who draws for this text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def order_of_pairs(code_sha256, batch, declared):
    """[(side, counter), ...] in the order of a batch's runs. Two pairs in a row are a block, whose four runs come in
    one of the six orders that two runs of each side have; a pair that is left over has an order of two."""
    order = []
    for first in range(1, declared + 1, BLOCK):
        counters = range(first, min(first + BLOCK, declared + 1))
        orders = sorted(set(itertools.permutations("ab" * len(counters))))
        sides = orders[drawn(f"{code_sha256}:{batch}:order:{first}") % len(orders)]
        left = {side: iter(counters) for side in "ab"}
        order += [(side, next(left[side])) for side in sides]
    return order


@dataclass(frozen=True)
class Point:
    step: int
    loss: float
    time_ms: int


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
    cpu_time_ms: int | None  # processor time of the (first) process while that clock ran; older logs lack it
    tokens: int
    memory_mib: int

    @property
    def steps(self):
        return self.config["steps"]


def match(expression, line, what):
    found = expression.fullmatch(line)
    if not found:
        raise RecordError(f"unreadable {what} line: {ascii(line[:80])}")
    return found


def split_source(text):
    """(source, event lines) of a log."""
    source, sentinel, events = text.partition(f"\n{END_OF_CODE}\n")
    if not sentinel:
        raise RecordError(f"no line {END_OF_CODE!r}: the log holds no source, or was cut")
    if source.count("\n") >= SOURCE_LINES:
        raise RecordError(f"the source has more than {SOURCE_LINES:,} lines")
    lines = events.split("\n")
    if END_OF_CODE in lines:
        raise RecordError(f"the line {END_OF_CODE!r} stands twice")
    if lines.pop() != "":
        raise RecordError("the last line is cut")
    return source + "\n", lines


def only(lines, prefix, required=True):
    """The one line that starts with `prefix`; None if there is none and none is required."""
    found = [line for line in lines if line.startswith(prefix)]
    if len(found) > 1 or (required and not found):
        raise RecordError(f"{len(found) or 'no'} lines {prefix!r}, one is needed" + ("" if found else ": cut?"))
    return found[0] if found else None


def parse_config(line, header):
    config = parse_json(line.removeprefix("config:"))
    wanted = {"run_id": str, "track": str, "seed": int, "steps": int, "data": str, "tokenizer": str,
              "log_every": int, "val_every": int, "val_tokens": int, "val_sha256": str, "target_loss": float}
    for name, kind in wanted.items():
        if not isinstance(config, dict) or type(config.get(name)) is not kind:
            raise RecordError(f"config has no {name} of type {kind.__name__}")
    for name, value in (("run_id", header["run"]), ("track", header["track"]), ("seed", int(header["seed"]))):
        if config[name] != value:
            raise RecordError(f"{name} is {ascii(config[name])} in the config line and {value} in the run line")
    if not 0 < config["steps"] <= STEP_LIMIT:
        raise RecordError(f"steps is {config['steps']}, must be 1 to {STEP_LIMIT:,}")
    return config


def parse_overrides(line):
    overrides = parse_json(line.removeprefix("overrides:")) if line else {}
    if not isinstance(overrides, dict):
        raise RecordError(f"overrides: {ascii(overrides)[:60]} is no object of fields and values")
    return overrides


def parse_validity(line):
    """{gate or fact: what the line says}."""
    words = [word.partition(":")[::2] for word in line.split()[1:]]
    if len(dict(words)) < len(words):
        raise RecordError(f"the validity line says something twice: {ascii(line[:80])}")
    return dict(words)


def kinds_of(lines):
    """The first words of lines, in their order; of lines in a row of one kind only the first one's."""
    return tuple(word for word, _ in itertools.groupby(re.match("[a-z_]*", line)[0] for line in lines))


def parse_curves(lines, config):
    """Training and validation losses by step, after checking that steps and times agree with each other and that
    every step is there that the configuration logs."""
    steps, curves, before = config["steps"], {"train": [], "val": []}, Point(0, 0.0, 0)
    for line in lines:
        found = match(STEP, line, "step")
        point = Point(int(found["step"]), float(found["loss"]), int(found["time"]))
        if point.step == 0 and found["split"] == "val":
            continue  # a run that goes on with a trained model is validated before its first step
        if int(found["steps"]) != steps or not 0 < point.step <= steps:
            raise RecordError(f"step {found['step']}/{found['steps']}: the configuration has {steps} steps")
        if point.step < before.step or point.time_ms < before.time_ms:
            raise RecordError(f"step {point.step}: steps and times must not fall")
        # time and average are rounded on their own, to 1 ms and to 0.01 ms a step
        if abs(float(found["average"]) * point.step - point.time_ms) > 0.501 + 0.00501 * point.step:
            raise RecordError(f"step {point.step}: step_avg {found['average']} ms is not train_time / step")
        curves[found["split"]].append(point)
        before = point
    for kind, every in (("train", config["log_every"]), ("val", config["val_every"])):
        every = every if 0 < every < steps else steps
        expected, logged = range(every, steps + every, every), curves[kind]
        if len(logged) != len(expected) or any(point.step != min(step, steps) for point, step in zip(logged, expected)):
            raise RecordError(f"{kind}_loss lines: {len(logged)} found, one every {every} of {steps} steps needed: "
                              f"cut, or added to?")
    return curves


def moment(text):
    """The time that a text of the kind `moment` names, or None without a text."""
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        raise RecordError(f"started: {text} is no moment of the calendar") from None


def run_at(path):
    """The Run of a log, or of the one in a run's folder. A RecordError names the log."""
    path = Path(path) / "log.txt" if Path(path).is_dir() else Path(path)
    try:
        return parse_log(path)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def parse_log(path):
    """The Run of a complete log. Raises RecordError with what is missing, unreadable or contradicts itself."""
    text = read_text(path, LOG_LIMIT)
    source, lines = split_source(text)
    if not lines or not lines[-1].startswith("status:"):
        raise RecordError("no status line at the end: the run was killed, or the log cut")
    if not lines[-1].startswith("status:ok "):
        raise RecordError(f"the run did not complete: {ascii(lines[-1][:80])}")
    header = match(HEADER, lines[0], "run").groupdict()
    if header["code_sha256"] != hashlib.sha256(source.encode()).hexdigest():
        raise RecordError("code_sha256 is not that of the source in the log: source or hash was edited, or the source "
                          "does not end in exactly one line break")
    if lines.count(START) != 1:
        raise RecordError(f"the line {START!r} must stand once")
    head, body = lines[1:lines.index(START)], lines[lines.index(START) + 1:]
    config = parse_config(only(head, "config:"), header)
    overrides = only(head, "overrides:", required=False)
    data = match(DATA, only(head, "data:"), "data")
    batch = only(head, "batch:", required=False)
    curves = parse_curves([line for line in body if line.startswith("step:")], config)
    validity = parse_validity(only(body, "validity: "))
    final = match(FINAL, only(body, "final "), "final")
    status = match(STATUS, only(body, "status:"), "status")
    last = curves["val"][-1] if curves["val"] else Point(0, 0.0, 0)
    if last.step != config["steps"]:
        raise RecordError(f"no validation at the last step ({config['steps']}): cut?")
    loss, time_ms = float(final["loss"]), int(final["time"])
    if last.loss != loss or float(status["loss"]) != loss:
        raise RecordError(f"the final loss is {final['loss']} in the final line, {last.loss:.5f} at the last step and "
                          f"{status['loss']} in the status line")
    if last.time_ms != time_ms or abs(float(status["time"]) - time_ms / 1000) > 0.051:
        raise RecordError(f"the training time is {time_ms} ms in the final line, {last.time_ms} ms at the last step "
                          f"and {status['time']} s in the status line")
    for what, took in (("training", time_ms), ("processor", final["cpu"])):
        if took is not None and not int(took):
            raise RecordError(f"the {what} time is 0 ms, which no run takes")
    if status["run"] != header["run"]:
        raise RecordError(f"the status line is run {ascii(status['run'])}'s, the log {header['run']}'s")
    return Run(
        path=Path(path), source=sys.intern(source), run=header["run"], track=header["track"],
        code_sha256=header["code_sha256"], seed=int(header["seed"]), world_size=int(header["world_size"]),
        **{name: header[name] for name in ("device", "torch", "cuda", "triton")}, started=moment(header["started"]),
        config=config, shards=data["shards"] or "unknown",
        overrides=parse_overrides(overrides), kinds=kinds_of(lines[1:]),
        data_sha256=data["data_sha256"], validity=validity, curves=curves, val_loss=loss, train_time_ms=time_ms,
        batch=Batch(*(int(value) for value in match(BATCH, batch, "batch").groups())) if batch else None,
        resumed=any(line.startswith("resumed:") for line in lines), tokens=int(final["tokens"]),
        memory_mib=int(final["memory"]), cpu_time_ms=int(final["cpu"]) if final["cpu"] else None)
