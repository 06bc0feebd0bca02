"""One run's log: the script that ran, which a record keeps once, and then one event a line."""

import itertools
import math
import re
from datetime import datetime
from types import SimpleNamespace

from records import files
from records.files import about, read_text, require, require_same
from records.source import sha256_of

END_OF_CODE = "===== END OF CODE ====="
START = "===== START ====="
MOST_STEPS = 1_000_000
LEAST_LOSSES = 6  # of a run: fewer could agree with another run's by chance
LAG = 0.4  # of a run's time: so far its steps may lie behind an even pace
NUMBER = r"(?:0|[1-9]\d{0,14})"
# What a page shows as it stands: no word is emphasized, a link, or somebody who is called.
PLAIN = r"(?!.*(?:www\.|\b_|_\b|\w@))"
KINDS = {  # of what stands in a line: its expression, and what is made of it
    # A run's name is also that of its log in a record, and so it is no path.
    "name": (r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", str),
    "word": (r"\S{1,200}", str),
    "text": (r".{1,200}?", str),
    "device": (PLAIN + r"[A-Za-z0-9(][\w .,()/+-]{0,150}(?: @ [\d.]+[GM]Hz)?(?: x\d{1,4})?", str),
    "version": (r"[A-Za-z0-9][A-Za-z0-9.+-]{0,60}", str),
    "hash": ("[0-9a-f]{64}", str),
    "number": (NUMBER, int),
    "decimal": (rf"{NUMBER}\.\d{{1,2}}", float),
    "loss": (rf"{NUMBER}\.\d{{5}}", float),
    "kind": ("train|val", str),
    "rate": (rf"{NUMBER}\.\d{{1,6}}", str),
    "moment": (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", datetime.fromisoformat),
    "json": (r"\{.*\}", files.parse_json),
    "words": (r"[^\s:]+:\S+(?: [^\s:]+:\S+)*", str),
    "sizes": (r"\w+=\d[\d,]{0,19}(?: \w+=\d[\d,]{0,19})*", str),
}
HEAD = 6  # of the lines that follow stand before those of the steps, the others behind them
LINES = {  # `<name=kind>` stands for what is kept
    "run": "run:<run=name> track:<track=word> commit:<commit=word> dirty:[01] "
    "code_sha256:<code_sha256=hash> seed:<seed=number> world_size:<world_size=number> "
    "device:<device=device> torch:<torch=version> cuda:<cuda=version> triton:<triton=version> "
    "started:<started=moment>",
    "config": "config:<config=json>",
    "batch": "batch:<batch=number> counter:<counter=number>/<declared=number> start:<start=number>",
    "data": "data:<manifest=word> shards:<shards=word> backends:<backends=text>",
    "size": "size: <sizes=sizes>",
    START: START,
    "comms": "comms: sent_bytes per step .*",
    "gates": "gates: cuts:<cuts=number> missed_1pct:<missed=loss> time:<gates_time=decimal>s",
    "validity": "validity: <validity=words>",
    "final": "final val_loss:<val_loss=loss> train_time:<train_time_ms=number>ms "
    "tokens:<tokens=number> peak_memory:<memory_mib=number>MiB tokens_per_s:<speed=number> "
    "mfu:<mfu=decimal>% cpu_time:<cpu_time_ms=number>ms",
    "status": "status:ok run:<status_run=name> val_loss:<status_loss=loss> "
    "train_time:<status_time=decimal>s log:logs/<folder=name>/log.txt(?: plot:.*)?",
}
STEP = (
    r"step:<step=number>/<steps=number> <kind=kind>_loss:<loss=loss>(?: lr_mul:<rate=rate>)? "
    "train_time:<time_ms=number>ms step_avg:<average=decimal>ms"
)
SLOT = re.compile(r"<(\w+)=(\w+)>")


def values_of(line, template, kind):
    """{name: value} of what is kept of a line. RecordError where it is not of this kind."""
    text = SLOT.sub(lambda found: f"(?P<{found[1]}>{KINDS[found[2]][0]})", template)
    match = re.fullmatch(text, line, re.ASCII)
    hint = "a record's run has no overrides, and its log is whole"
    require(match, f"{ascii(line[:80])} stands where the {kind} line is due; {hint}")
    return {name: KINDS[slot][1](match[name]) for name, slot in SLOT.findall(template)}


def split_log(text):
    """(source, "" in a record's log; the lines behind it) of a log's text."""
    source, sentinel, events = f"\n{text}".partition(f"\n{END_OF_CODE}\n")
    require(sentinel, f"no line {END_OF_CODE!r}: the log was cut, or is another trainer's")
    lines = events.split("\n")
    require(lines.pop() == "", "the last line is cut")
    return f"{source}\n"[1:], lines


def due_losses(config):
    """{kind: steps between its losses} of a configuration, and how many losses a run logs."""
    for name in ("steps", "log_every", "val_every"):
        value = config.get(name)
        is_count = type(value) is int and (name == "steps") <= value <= MOST_STEPS
        require(is_count, f"{name} is {ascii(value)[:60]}, a number up to {MOST_STEPS:,} is due")
    steps = config["steps"]
    found = {"train": config["log_every"], "val": config["val_every"]}
    found = {kind: every if 0 < every < steps else steps for kind, every in found.items()}
    count = sum(math.ceil(steps / every) for every in found.values())
    shown = f"{count} losses are logged, {LEAST_LOSSES} are needed to tell runs apart"
    require(count >= LEAST_LOSSES, f"{shown}; change log_every or val_every")
    return found, count


def points_of(lines, config):
    """The losses that were logged, at the steps of the configuration and at times that agree."""
    steps = config["steps"]
    every, count = due_losses(config)
    points = [SimpleNamespace(**values_of(line, STEP, "step")) for line in lines]
    found = [(point.step, point.kind, point.steps) for point in points]
    due = []
    for kind, pace in every.items() if len(found) == count else ():
        due += [(min(step, steps), kind, steps) for step in range(pace, steps + pace, pace)]
    shown = f"{len(found)} losses are logged, {count} are due"
    require(found == sorted(due), f"{shown}, at the steps of the configuration and in order")

    took = points[-1].time_ms
    for before, point in zip([points[0], *points], points, strict=False):
        shown = f"step {point.step}: {point.time_ms} ms"
        require(point.time_ms >= before.time_ms, f"{shown}; times must not fall")
        is_even = point.time_ms >= took * (point.step / steps - LAG)
        require(is_even, f"{shown} of {took}; so much time in the last steps cannot be")
        # Time and average are rounded on their own, to 1 ms and to 0.01 ms a step.
        apart = abs(point.average * point.step - point.time_ms)
        agrees = apart <= 0.501 + 0.00501 * point.step
        require(agrees, f"{shown}, step_avg {point.average} ms is not train_time / step")
        is_rate = point.kind == "train" and (point.step == steps or point.rate.strip("0.") != "")
        is_good = is_rate if point.rate != "None" else point.kind == "val"
        require(is_good, f"step {point.step}: lr_mul is {point.rate} beside a {point.kind}_loss")
    return points


def check_agreement(run):
    """What several lines of a log say is the same in all of them."""
    place = f"{run.batch}:{run.counter}/{run.declared}:{run.start}"
    told = {"run_id": run.run, "track": run.track, "run_of": place, "seed": run.seed}
    found = {name: run.config.get(name, "not there") for name in told}
    require_same(found, told, " in the config line, in the lines beside it ")
    last = run.curves["val"][-1]
    losses = {"the last val_loss": last.loss, "val_loss of the status": run.status_loss}
    require_same(losses, dict.fromkeys(losses, run.val_loss), ", in the final line ")
    names = {"run of the status": run.status_run, "folder": run.folder}
    require_same(names, dict.fromkeys(names, run.run), ", in the first line ")
    if hasattr(run, "cuts"):
        shown = f"cuts is {run.cuts}, and missed_1pct {run.missed}"
        require(abs(0.99**run.cuts - run.missed) <= 1e-5, f"{shown}; it is 0.99 to the cuts")
    took = run.train_time_ms
    is_same = last.time_ms == took > 0 and abs(run.status_time - took / 1000) < 0.051
    shown = f"{last.time_ms} ms at the last step, {run.status_time} s in the status line"
    require(is_same, f"the training time is {took} ms in the final line, {shown}")


def parse_log(path, script):
    """What the complete log of a script's run says: what LINES keep, and its curves. Times are in
    ms, `speed` in tokens a second; `start` says how often the run was started."""
    text = read_text(path)
    with about(path):
        source, lines = split_log(text)
        ending = lines[-1] if lines else ""
        is_complete = ending.startswith("status:ok ")
        require(is_complete, f"the run did not complete, or its log was cut: {ascii(ending[:80])}")
        run = SimpleNamespace(path=path, source=script)
        has_gates = any(line.startswith("gates: ") for line in lines[-4:])  # the first logs lack it
        kinds = [kind for kind in LINES if kind != "gates" or has_gates]
        behind = HEAD - len(kinds)
        for line, kind in itertools.zip_longest(lines[:HEAD] + lines[behind:], kinds, fillvalue=""):
            vars(run).update(values_of(line, LINES[kind], kind))
        is_own = run.code_sha256 == sha256_of(script) and source in ("", script)
        require(is_own, f"ran other code ({run.code_sha256[:8]}) than the script it belongs to")
        run.curves = {"train": [], "val": []}
        points = points_of(lines[HEAD:behind], run.config)
        for point in points:
            run.curves[point.kind].append(point)
        run.losses = {(point.kind, point.step): point.loss for point in points}
        check_agreement(run)
        run.validity = files.unique([word.split(":", 1) for word in run.validity.split()])
        run.steps = run.config["steps"]
        run.dtype = str(run.config.get("dtype"))
        run.hardware = f"{run.device}, world size {run.world_size}, {run.dtype}"
    return run
