"""One run's log.txt, which the trainer writes. It is parsed strictly and never executed.

A log is the script that ran, END_OF_CODE, and then one event a line. A record keeps the script once
and its logs from END_OF_CODE on; `code_sha256` says which script they belong to.
"""

import itertools
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from records.files import LOG_LIMIT, RecordError, parse_json, read_text, require
from records.source import sha256_of

END_OF_CODE = "===== END OF CODE ====="
START = "===== START ====="
STEP_LIMIT = 10_000_000
NUMBER = r"\d{1,15}"
KINDS = {  # of what stands in a line
    # A run's name is also that of its log in a record, and so it is no path.
    "name": r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
    "word": r"\S{1,200}",
    "text": r".{1,200}?",
    "hash": "[0-9a-f]{64}",
    "number": NUMBER,
    "decimal": rf"{NUMBER}\.\d{{1,2}}",
    "loss": rf"{NUMBER}\.\d{{5}}",
    "moment": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ",
    "json": r"\{.*\}",
    "words": r"\S+:\S+(?: \S+:\S+)*",
}


def pattern(template):
    """The expression of a whole line, in which `<name=kind>` stands for what is kept."""

    def group(found):
        name, kind = found.groups()
        return f"(?P<{name}>{KINDS[kind]})"

    return re.compile(re.sub(r"<(\w+)=(\w+)>", group, template), re.ASCII)


# The lines of a log, in their order, but for those of its steps.
HEAD = {
    "run": pattern(
        "run:<run=name> track:<track=word> commit:<commit=word> dirty:[01] "
        "code_sha256:<code_sha256=hash> seed:<seed=number> world_size:<world_size=number> "
        "device:<device=text> torch:<torch=word> cuda:<cuda=word> triton:<triton=word> "
        "started:<started=moment>"
    ),
    "config": pattern("config:<config=json>"),
    "batch": pattern(
        "batch:<batch=number> counter:<counter=number>/<declared=number> start:<start=number>"
    ),
    "data": pattern("data:<manifest=word> shards:<shards=word> backends:<backends=text>"),
    "size": pattern(r"size: (?P<sizes>\w+=[\d,]{1,20}(?: \w+=[\d,]{1,20})*)"),
    START: pattern(START),
}
STEP = pattern(
    r"step:<step=number>/<steps=number> (?P<kind>train|val)_loss:<loss=loss>(?: lr_mul:\d+\.\d+)? "
    "train_time:<time=number>ms step_avg:<average=decimal>ms"
)
TAIL = {
    "comms": pattern("comms: sent_bytes per step .*"),
    "validity": pattern("validity: <validity=words>"),
    "final": pattern(
        "final val_loss:<final_loss=loss> train_time:<train_time_ms=number>ms "
        "tokens:<tokens=number> peak_memory:<memory_mib=number>MiB tokens_per_s:<speed=number> "
        "mfu:<mfu=decimal>% cpu_time:<cpu_time_ms=number>ms"
    ),
    "status": pattern(
        "status:ok run:<status_run=name> val_loss:<status_loss=loss> "
        "train_time:<status_time=decimal>s log:logs/<folder=name>/log.txt(?: plot:.*)?"
    ),
}
NUMBERS = (
    *("seed", "world_size", "batch", "counter", "declared", "start", "train_time_ms", "tokens"),
    *("memory_mib", "speed", "cpu_time_ms"),
)


@dataclass(frozen=True)
class Point:
    """One logged loss of a run's curve."""

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
    commit: str
    code_sha256: str
    seed: int
    world_size: int
    device: str
    torch: str
    cuda: str
    triton: str
    started: datetime  # UTC
    config: dict
    batch: int  # 1; a run that does not count has 0, and no place
    counter: int  # from 1
    declared: int  # runs of the batch, or pairs
    start: int  # how often the run was started
    manifest: str
    shards: str  # `ok`: those that the run read are the manifest's
    backends: str
    values: int  # of all parameters and tables
    sizes: str
    validity: dict
    curves: dict  # {"train": [Point, ...], "val": [Point, ...]}
    val_loss: float
    train_time_ms: int
    cpu_time_ms: int  # of the first process while that clock ran
    tokens: int
    speed: int  # tokens a second
    mfu: float
    memory_mib: int

    @property
    def steps(self):
        """Optimizer steps of the whole run."""
        return self.config["steps"]

    @property
    def dtype(self):
        """The type of matrices and activations that the run computed in."""
        return str(self.config.get("dtype", ""))


def split_log(text):
    """(source, "" in a record's log; the lines behind it) of a log's text."""
    source, sentinel, events = f"\n{text}".partition(f"\n{END_OF_CODE}\n")
    require(sentinel, f"no line {END_OF_CODE!r}: the log was cut, or is another trainer's")
    lines = events.split("\n")
    require(lines.pop() == "", "the last line is cut")
    return f"{source}\n"[1:], lines


def thin(text):
    """A log without its source, which a record keeps once."""
    _, lines = split_log(text)
    return "\n".join([END_OF_CODE, *lines, ""])


def matched(lines, patterns):
    """{name: text} of what `patterns` keep of as many lines. RecordError where one is otherwise."""
    found = {}
    lines = [*lines, *[""] * len(patterns)]
    for line, (kind, expression) in zip(lines, patterns.items(), strict=False):
        match = expression.fullmatch(line)
        require(
            match,
            f"{ascii(line[:80])} stands where the {kind} line is due; a record's log is what the "
            f"trainer wrote, whole and without overrides",
        )
        found.update(match.groupdict())
    return found


def parse_config(text, said):
    """The configuration of a log, which says the same as its first lines."""
    config = parse_json(text)
    place = ""
    if said["batch"]:
        place = f"{said['batch']}:{said['counter']}/{said['declared']}:{said['start']}"
    told = {"run_id": said["run"], "track": said["track"], "run_of": place}
    for name, value in {**told, "seed": int(said["seed"])}.items():
        shown = ascii(config.get(name))[:80]
        is_said = name in config and config[name] == value
        require(is_said, f"{name} is {shown} in the config line, {value!r} in the lines beside it")
    for name in ("steps", "log_every", "val_every"):
        value = config.get(name)
        is_count = type(value) is int and 0 <= value <= STEP_LIMIT
        require(is_count, f"{name} is {ascii(value)[:60]}, a whole number is needed")
    require(config["steps"], "steps is 0, one is needed")
    return config


def parse_curves(lines, config):
    """{"train": [Point, ...], "val": [Point, ...]}: losses by step, after checking that steps and
    times agree with each other and that every step is there that the configuration logs."""
    curves = {"train": [], "val": []}
    steps = config["steps"]
    before = Point(0, 0.0, 0)
    for line in lines:
        found = STEP.fullmatch(line)
        require(found, f"{ascii(line[:80])} stands where only lines of steps are due")
        point = Point(int(found["step"]), float(found["loss"]), int(found["time"]))
        require(
            int(found["steps"]) == steps and 0 < point.step <= steps,
            f"step {found['step']}/{found['steps']}: the configuration has {steps} steps",
        )
        is_later = point.step >= before.step and point.time_ms >= before.time_ms
        require(is_later, f"step {point.step}: steps and times must not fall")
        # Time and average are rounded on their own, to 1 ms and to 0.01 ms a step.
        apart = abs(float(found["average"]) * point.step - point.time_ms)
        require(
            apart <= 0.501 + 0.00501 * point.step,
            f"step {point.step}: step_avg {found['average']} ms is not train_time / step",
        )
        curves[found["kind"]].append(point)
        before = point
    for kind, curve in curves.items():
        every = config["log_every" if kind == "train" else "val_every"]
        every = every if 0 < every < steps else steps
        due = [min(step, steps) for step in range(every, steps + every, every)]
        require(
            [point.step for point in curve] == due,
            f"{kind}_loss lines: {len(curve)} found, one every {every} of {steps} steps needed: "
            f"cut, or added to?",
        )
    return curves


def check_end(said, last):
    """The last lines of a log say the same as the last Point of its validation curve."""
    losses = [last.loss, float(said["final_loss"]), float(said["status_loss"])]
    require(len(set(losses)) == 1, f"the last lines of the log have several losses: {losses}")
    time_ms = int(said["train_time_ms"])
    apart = abs(float(said["status_time"]) - time_ms / 1000)
    require(
        last.time_ms == time_ms and apart < 0.051,
        f"the training time is {time_ms} ms in the final line, {last.time_ms} ms at the last step "
        f"and {said['status_time']} s in the status line",
    )
    require(time_ms, "the training time is 0 ms, which no run takes")
    names = {said["run"], said["status_run"], said["folder"]}
    require(len(names) == 1, f"the log is that of several runs: {', '.join(sorted(names))}")


def parse_log(path, script, counted=True):
    """The Run of a complete log of a script. counted: it must say its place in a batch. Raises
    RecordError with what is missing, unreadable or contradicts itself."""
    source, lines = split_log(read_text(path, LOG_LIMIT))
    ending = lines[-1] if lines else ""
    require(ending.startswith("status:"), "no status line at the end: killed, or the log was cut")
    require(ending.startswith("status:ok "), f"the run did not complete: {ascii(ending[:80])}")
    head = dict(HEAD)
    if not counted:
        del head["batch"]
    said = {"batch": "", **matched(lines[: len(head)], head)}
    require(
        said["code_sha256"] == sha256_of(script) and source in ("", script),
        f"ran other code ({said['code_sha256'][:8]}) than the script it belongs to "
        f"({sha256_of(script)[:8]})",
    )
    config = parse_config(said["config"], said)
    body = lines[len(head) :]
    steps = list(itertools.takewhile(lambda line: line.startswith("step:"), body))
    tail = body[len(steps) :]
    said.update(matched(tail, TAIL))
    require(len(tail) == len(TAIL), f"{len(tail)} lines behind the steps, {len(TAIL)} are due")
    curves = parse_curves(steps, config)
    check_end(said, curves["val"][-1])
    validity = [word.partition(":")[::2] for word in said["validity"].split()]
    require(len(dict(validity)) == len(validity), "the validity line says something twice")
    try:
        started = datetime.fromisoformat(said["started"]).replace(tzinfo=UTC)
    except ValueError:
        raise RecordError(f"started: {said['started']} is no moment of the calendar") from None
    numbers = {name: int(said.get(name) or 0) for name in NUMBERS}
    texts = ("run", "track", "commit", "code_sha256", "device", "torch", "cuda", "triton")
    sizes = re.findall(r"=([\d,]+)", said["sizes"])
    return Run(
        path=Path(path),
        source=script,
        started=started,
        config=config,
        validity=dict(validity),
        curves=curves,
        val_loss=float(said["final_loss"]),
        values=sum(int(size.replace(",", "") or 0) for size in sizes),
        mfu=float(said["mfu"]),
        **{name: said[name] for name in (*texts, "manifest", "shards", "backends", "sizes")},
        **numbers,
    )
