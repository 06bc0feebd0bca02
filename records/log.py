"""One run's log: the script that ran, which a record keeps once, and then one event a line."""

import json
import math
import re
from datetime import datetime, timedelta
from types import SimpleNamespace

from records.files import FORMS, LIMITS, about, read_text, require
from records.source import sha256_of

END_OF_CODE = "===== END OF CODE ====="
START = "===== START ====="


def mapping(pairs):
    """A dict of pairs, whose keys are all different."""
    found = {}
    for key, value in pairs:
        require(key not in found, f"{ascii(key)[:80]} stands there twice")
        found[key] = value
    return found


def sums_of(text):
    """{name: text} of what stands as name=value."""
    return mapping(re.findall(r"((?:\w+/)?\w[\w ]*)=(\S+)", text))


MADE = {  # of what stands in a line, if that is no text
    **dict.fromkeys(["number", "count"], int),
    **dict.fromkeys(["average", "loss", "rate", "control"], float),
    "moment": datetime.fromisoformat,
    "json": lambda text: json.loads(text, object_pairs_hook=mapping),
    **dict.fromkeys(["sizes", "sums"], sums_of),
}
SLOT = re.compile(r"<(\w+)(?:=(\w+))?>")


def values_of(line, kind, template, said):
    """{name: value} of what is kept of a line; its text is kept in `said`, by name. RecordError
    where the line is not of this kind, or says something else than a line before it."""

    def expression(found):
        name, slot = found.groups()
        return f"(?P<{name}>{FORMS['kinds'][slot]})" if slot else re.escape(said[name])

    match = re.fullmatch(SLOT.sub(expression, template), line, re.ASCII)
    hint = "a record's run has no overrides, passed all gates, and its log agrees with itself"
    require(match, f"{ascii(line[:80])} stands where the {kind} line is due; {hint}")
    said.update(match.groupdict())
    kept = [(name, slot) for name, slot in SLOT.findall(template) if slot and match[name]]
    return {name: MADE.get(slot, str)(match[name]) for name, slot in kept}


def split_log(text):
    """(source, "" in a record's log; the lines behind it) of a log's text."""
    source, sentinel, events = f"\n{text}".partition(f"\n{END_OF_CODE}\n")
    require(sentinel, f"no line {END_OF_CODE!r}: the log was cut, or is another trainer's")
    lines = events.split("\n")
    require(lines.pop() == "", "the last line is cut")
    return f"{source}\n"[1:], lines


def check_points(points, steps):
    """The losses that were logged of a run of so many steps are in order, at times that agree."""
    shown = f"{len(points)} losses are logged, {LIMITS.losses} are needed to tell runs apart"
    require(len(points) >= LIMITS.losses, shown)
    places = [(point.step, point.kind) for point in points]
    is_due = places == sorted({*places}) and places[-1] == (steps, "val") and places[0][0] > 0
    is_due = is_due and {point.steps for point in points} == {steps}
    require(is_due, f"losses are due of {ascii(steps)[:60]} steps, in order, a validation at last")
    rates = [point.rate for point in points if hasattr(point, "rate")]
    learning = [step for step, rate in enumerate(rates) if rate]
    is_learning = len(learning) >= len(rates) / 2 and learning[-1] - learning[0] < len(learning)
    require(is_learning, "lr_mul is 0 at half of the logged steps, or between others")
    pace = points[-1].time_ms / steps
    before = SimpleNamespace(step=0, time_ms=0)
    for point in points:
        shown = f"step {point.step}: {point.time_ms} ms"
        took = point.time_ms - before.time_ms
        require(took >= 0, f"{shown}; times must not fall")
        least = LIMITS.standing * pace * (point.step - before.step)
        require(took >= least, f"{shown}; the clock stood still since step {before.step}")
        late = f"{shown} of {points[-1].time_ms}; so much time in the last steps cannot be"
        require(point.time_ms >= pace * (point.step - LIMITS.lag * steps), late)
        # Time and average are rounded on their own, to 1 ms and to 0.01 ms a step.
        is_mean = abs(point.average * point.step - point.time_ms) <= 0.501 + 0.00501 * point.step
        require(is_mean, f"{shown}, step_avg {point.average} ms is not train_time / step")
        before = point


def check_losses(run, points):
    """Losses of training lie between half of the last validation's, and twice the untrained
    model's, if the log has that; bits are those of the loss."""
    most = 2 * vars(run).get("untrained", math.inf)
    for point in points:
        shown = f"step {point.step}: {point.kind}_loss {point.loss}"
        is_between = run.val_loss / 2 <= point.loss <= most
        require(is_between, f"{shown}; {run.val_loss / 2:.5f} to {most:.5f} can be")
    if run.val_bytes:
        bits = run.val_loss * run.val_tokens / math.log(2) / run.val_bytes
        is_same = abs(float(run.bits) - bits) <= 1e-5 + 1e-5 * run.val_tokens / run.val_bytes
        require(is_same, f"bits_per_byte is {run.bits[:20]}; of this loss it is {bits:.5f}")


def check_complete(lines):
    """RecordError unless a log's lines end as those of a run that is complete."""
    ending = lines[-1] if lines else ""
    is_complete = ending.startswith("status:ok ")
    require(is_complete, f"the run did not complete, or its log was cut: {ascii(ending[:80])}")


def machine_of(path, track):
    """{name: value} of what a complete run's log says of the machine and of the result, and the
    `seconds` from its start to the last line that was written to it. RecordError where it is no run
    of the track as it stands."""
    with about(path):
        _, lines = split_log(read_text(path))
        check_complete(lines)
        is_own = not any(line.startswith(("overrides:", "resumed:")) for line in lines)
        require(is_own, "the run has settings of its own, or was resumed; send one without")
        tail = [FORMS["step"], *FORMS["tail"]]
        said = {}
        found = {}
        rows = [FORMS["head"][0], *tail]
        for line, (kind, template) in zip([lines[0], *lines[-len(tail) :]], rows, strict=True):
            found |= values_of(line, kind, template, said)
        require(said["track"] == track, f"track {said['track']}, and the table is of {track}")
        seconds = path.stat().st_mtime - found["started"].timestamp()
        told = found["time_ms"] / 1000 + found["gates_time"]
        shown = f"its date is {seconds:.1f} s after its start, and it tells of {told:.1f} s"
        hint = "it was copied or changed; name the original, or make another run"
        require(told <= seconds <= LIMITS.beside * told, f"{shown}: {hint}")
        return found | {"seconds": seconds}


def parse_log(path, script):
    """What the complete log of a script's run says: what FORMS keep, times in ms, and `losses` to
    compare, by their kind and step, where 0 is the last step of any run."""
    text = read_text(path)
    with about(path):
        source, lines = split_log(text)
        check_complete(lines)
        head, tail = FORMS["head"], FORMS["tail"]
        if lines[len(head) : len(head) + 1] and lines[len(head)].startswith("untrained"):
            head = [*head, FORMS["untrained"]]
        rows = [*head, *[FORMS["step"]] * (len(lines) - len(head) - len(tail)), *tail]
        run = SimpleNamespace(path=path, source=script)
        points = []
        said = {}
        for line, (kind, template) in zip(lines, rows, strict=False):
            values = values_of(line, kind, template, said)
            if kind == "step":
                points.append(SimpleNamespace(**values))
            else:
                vars(run).update(values)
        is_own = run.code_sha256 == sha256_of(script) and source in ("", script)
        require(is_own, f"ran other code ({run.code_sha256[:8]}) than the script it belongs to")
        check_points(points, run.config.get("steps"))
        shown = f"cuts is {run.cuts}, and missed_1pct {run.missed}"
        require(abs(0.99**run.cuts - run.missed) <= 1e-5, f"{shown}; it is 0.99 to the cuts")
        run.val_loss = points[-1].loss
        run.train_time_ms = points[-1].time_ms
        run.steps = [(point.step, point.kind) for point in points]
        compared = [*points[: LIMITS.compared], *points[-2:]]
        run.losses = {(point.kind, point.step % point.steps): point.loss for point in compared}
        check_losses(run, points)
        seconds = run.train_time_ms / 1000 + run.gates_time * hasattr(run, "text")
        run.over = run.started + timedelta(seconds=seconds)
        run.dtype = str(run.config.get("dtype"))
        run.hardware = f"{run.device}, world size {run.world_size}, {run.dtype}"
    return run
