"""One run's log.txt, which the trainer writes. It is parsed strictly and never executed.

A log is the script that ran, END_OF_CODE, and then one event a line. A record keeps the script once
and its logs from END_OF_CODE on; `code_sha256` says which script they belong to.
"""

import functools
import itertools
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace

from records.files import LOG_LIMIT, RecordError, parse_json, read_text, require, require_same
from records.source import sha256_of

END_OF_CODE = "===== END OF CODE ====="
START = "===== START ====="
STEP_LIMIT = 10_000_000


def moment(text):
    """The moment, in UTC, that a text such as 2026-11-23T09:30:00Z names."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        raise RecordError(f"{text} is no moment of the calendar") from None


def pairs(text):
    """{name: word} of `name:word name:word`, in which no name stands twice."""
    found = [word.partition(":")[::2] for word in text.split()]
    require(len(dict(found)) == len(found), f"{ascii(text)[:80]} says something twice")
    return dict(found)


NUMBER = r"(?:0|[1-9]\d{0,14})"
KINDS = {  # of what stands in a line: its expression, and what is made of it
    # A run's name is also that of its log in a record, and so it is no path.
    "name": (r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", str),
    "word": (r"\S{1,200}", str),
    "text": (r".{1,200}?", str),
    "hash": ("[0-9a-f]{64}", str),
    "number": (NUMBER, int),
    "decimal": (rf"{NUMBER}\.\d{{1,2}}", float),
    "loss": (rf"{NUMBER}\.\d{{5}}", float),
    "moment": (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", moment),
    "json": (r"\{.*\}", parse_json),
    "pairs": (r"\S+:\S+(?: \S+:\S+)*", pairs),
    "sizes": (r"\w+=\d[\d,]{0,19}(?: \w+=\d[\d,]{0,19})*", str),
}
SLOT = re.compile(r"<(\w+)=(\w+)>")
# The lines of a log, in their order, but for those of its steps: expressions of whole lines, in
# which `<name=kind>` stands for what is kept.
HEAD = {
    "run": "run:<run=name> track:<track=word> commit:<commit=word> dirty:[01] "
    "code_sha256:<code_sha256=hash> seed:<seed=number> world_size:<world_size=number> "
    "device:<device=text> torch:<torch=word> cuda:<cuda=word> triton:<triton=word> "
    "started:<started=moment>",
    "config": "config:<config=json>",
    "batch": "batch:<batch=number> counter:<counter=number>/<declared=number> start:<start=number>",
    "data": "data:<manifest=word> shards:<shards=word> backends:<backends=text>",
    "size": "size: <sizes=sizes>",
    START: START,
}
STEP = (
    r"step:<step=number>/<steps=number> (?P<kind>train|val)_loss:<loss=loss>(?: lr_mul:\d+\.\d+)? "
    "train_time:<time_ms=number>ms step_avg:<average=decimal>ms"
)
TAIL = {
    "comms": "comms: sent_bytes per step .*",
    "validity": "validity: <validity=pairs>",
    "final": "final val_loss:<val_loss=loss> train_time:<train_time_ms=number>ms "
    "tokens:<tokens=number> peak_memory:<memory_mib=number>MiB tokens_per_s:<speed=number> "
    "mfu:<mfu=decimal>% cpu_time:<cpu_time_ms=number>ms",
    "status": "status:ok run:<status_run=name> val_loss:<status_loss=loss> "
    "train_time:<status_time=decimal>s log:logs/<folder=name>/log.txt(?: plot:.*)?",
}


class Run(SimpleNamespace):
    """What a complete log says: `path`, `source`, `curves`, which are {"train": [Point, ...],
    "val": [Point, ...]}, and whatever the lines above keep, under its name there. Losses are in
    nats per token, times in ms, memory in MiB, `speed` in tokens a second.

    `counter` from 1 to `declared` is the run's place in its `batch`, which is 1 for runs that
    count, and `start` says how often it was started. `cpu_time_ms` is that of the first process
    while the clock of the training time ran. `shards` is `ok` where those that were read are the
    manifest's.
    """

    @property
    def steps(self):
        """Optimizer steps of the whole run."""
        return self.config["steps"]

    @property
    def dtype(self):
        """The type of matrices and activations that the run computed in."""
        return str(self.config.get("dtype", ""))


@dataclass(frozen=True)
class Point:
    """One logged loss of a run's curve."""

    step: int
    loss: float
    time_ms: int


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


@functools.cache
def expression_of(template):
    """(the compiled expression of a line, {name: what makes a value of its text})."""
    kinds = dict(SLOT.findall(template))
    text = SLOT.sub(lambda found: f"(?P<{found[1]}>{KINDS[found[2]][0]})", template)
    return re.compile(text, re.ASCII), {name: KINDS[kind][1] for name, kind in kinds.items()}


def values_of(line, template):
    """{name: value} of what a template keeps of a line, or None where the line is otherwise."""
    expression, makers = expression_of(template)
    match = expression.fullmatch(line)
    return match and {name: makers.get(name, str)(text) for name, text in match.groupdict().items()}


def matched(lines, templates):
    """{name: value} of what templates keep of as many lines. RecordError where one is otherwise."""
    found = {}
    for line, kind in itertools.zip_longest(lines, templates, fillvalue=""):
        values = values_of(line, templates[kind])
        shown = f"{ascii(line[:80])} stands where the {kind} line is due"
        require(
            values is not None, f"{shown}; a record's run has no overrides, and its log is whole"
        )
        found.update(values)
    return found


def check_config(said):
    """The configuration of a log says the same as the lines beside it."""
    config = said["config"]
    place = "{batch}:{counter}/{declared}:{start}".format_map(said)
    told = {"run_id": said["run"], "track": said["track"], "run_of": place, "seed": said["seed"]}
    for name, value in told.items():
        words = " in the config line, in the lines beside it "
        require_same(name, config.get(name, "not there"), value, words)
    for name in ("steps", "log_every", "val_every"):
        value = config.get(name)
        is_count = type(value) is int and (name == "steps") <= value <= STEP_LIMIT
        require(is_count, f"{name} is {ascii(value)[:60]}, a whole number is needed")


def parse_curves(lines, config):
    """{"train": [Point, ...], "val": [Point, ...]}: losses by step, after checking that steps and
    times agree with each other and that every step is there that the configuration logs."""
    curves = {"train": [], "val": []}
    steps = config["steps"]
    before = Point(0, 0.0, 0)
    for line in lines:
        found = values_of(line, STEP)
        require(found, f"{ascii(line[:80])} stands where only lines of steps are due")
        point = Point(found["step"], found["loss"], found["time_ms"])
        is_step = found["steps"] == steps and 0 < point.step <= steps
        shown = f"step {point.step}/{found['steps']}"
        require(is_step, f"{shown}: the configuration has {steps} steps")
        is_later = point.step >= before.step and point.time_ms >= before.time_ms
        require(is_later, f"step {point.step}: steps and times must not fall")
        # Time and average are rounded on their own, to 1 ms and to 0.01 ms a step.
        apart = abs(found["average"] * point.step - point.time_ms)
        shown = f"step {point.step}: step_avg {found['average']} ms"
        require(apart <= 0.501 + 0.00501 * point.step, f"{shown} is not train_time / step")
        curves[found["kind"]].append(point)
        before = point
    for kind, curve in curves.items():
        every = config["log_every" if kind == "train" else "val_every"]
        every = every if 0 < every < steps else steps
        due = [min(step, steps) for step in range(every, steps + every, every)]
        shown = f"{len(curve)} found, one every {every} of {steps} steps needed"
        require([point.step for point in curve] == due, f"{kind}_loss lines: {shown}")
    return curves


def check_end(said, last):
    """The last lines of a log say the same as the last Point of its validation curve."""
    losses = [last.loss, said["val_loss"], said["status_loss"]]
    require(len(set(losses)) == 1, f"the last lines of the log have several losses: {losses}")
    time_ms = said["train_time_ms"]
    is_same = last.time_ms == time_ms and abs(said["status_time"] - time_ms / 1000) < 0.051
    shown = f"{last.time_ms} ms at the last step, {said['status_time']} s in the status line"
    require(is_same, f"the training time is {time_ms} ms in the final line, {shown}")
    require(time_ms, "the training time is 0 ms, which no run takes")
    names = {said["run"], said["status_run"], said["folder"]}
    require(len(names) == 1, f"the log is that of several runs: {', '.join(sorted(names))}")


def parse_log(path, script):
    """The Run of a complete log of a script. Raises RecordError with what is missing, unreadable or
    contradicts itself."""
    source, lines = split_log(read_text(path, LOG_LIMIT))
    ending = lines[-1] if lines else ""
    require(ending.startswith("status:"), "no status line at the end: killed, or the log was cut")
    require(ending.startswith("status:ok "), f"the run did not complete: {ascii(ending[:80])}")
    said = matched(lines[: len(HEAD)], HEAD)
    code = said["code_sha256"]
    is_own = code == sha256_of(script) and source in ("", script)
    require(is_own, f"ran other code ({code[:8]}) than the script it belongs to")
    check_config(said)
    body = lines[len(HEAD) :]
    steps = list(itertools.takewhile(lambda line: line.startswith("step:"), body))
    tail = body[len(steps) :]
    said.update(matched(tail[: len(TAIL)], TAIL))
    require(len(tail) == len(TAIL), f"{len(tail)} lines behind the steps, {len(TAIL)} are due")
    curves = parse_curves(steps, said["config"])
    check_end(said, curves["val"][-1])
    return Run(path=path, source=script, curves=curves, **said)
