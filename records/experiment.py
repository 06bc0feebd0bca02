"""`run`, `ab` and `reproduce`. The last two are the only commands that execute code from a record: they ask first.

The runs of an experiment lie at logs/<experiment>-<number>, an id that holds the code's hash and the number of runs: a
call that was interrupted goes on where it stopped, and another number of runs is another experiment.
"""
import hashlib
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time

import numpy as np

from records import render, stats
from records.compare import side_of
from records.files import RecordError, read_text, write_whole
from records.judge import check_run
from records.ledger import Ledger
from records.log import BLOCK, START, order_of_pairs, parse_log
from records.record import chain, speed_figures
from records.source import config_of

RUN_OF = "\n    run_of: str = knob("  # the field of a script that is told its place in a batch


# ----- the machine

def fingerprint():
    """What times depend on beside the code."""
    import torch  # here alone: nothing that only reads needs it, and train_gpt.py is code of the branch at hand

    import train_gpt
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {"device": train_gpt.device_name(device), "cpu": train_gpt.device_name(torch.device("cpu")),
             "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30,
             "system": platform.platform(), "python": platform.python_version(), "torch": torch.__version__,
             "threads": os.environ.get("OMP_NUM_THREADS", "default")}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
        facts["gpus"] = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[:-1]
    return facts


def consent(what, yes):
    """Say that foreign code is about to run; RecordError unless the user agrees."""
    print(f"This executes {what} on this machine, with your rights. `python -m records diff` shows what it changes.")
    if yes:
        return
    if not sys.stdin.isatty():
        raise RecordError("not confirmed: nothing was run; add --yes when you have read that code")
    if input("Type yes to go on: ").strip() != "yes":
        raise RecordError("not confirmed: nothing was run")


# ----- runs that go on where they stopped

class Experiment:
    """Scripts by letter, their runs under logs/, and what has been completed. Counted runs are a batch of the first
    script's code."""

    def __init__(self, repository, name, scripts, track, world_size, count, counted=True):
        self.logs, self.name, self.scripts = repository.root / "logs", name, scripts
        self.root, self.track, self.world_size = repository.root, track, world_size
        self.count, self.counted = count, counted
        self.folder, self.ledger = self.logs / name, Ledger(self.logs / "runs.jsonl")
        self.code = hashlib.sha256(next(iter(scripts.values())).encode()).hexdigest()
        self.wall = {}  # seconds that the processes of runs made now lived, by run id

    def prepare(self):
        """Extract the scripts; RecordError when the experiment was begun on another machine."""
        facts, path = {**fingerprint(), "world_size": self.world_size}, self.folder / "machine.json"
        for letter, source in self.scripts.items():
            (self.folder / letter).mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / letter / "train_gpt.py", source)
        if path.exists() and json.loads(path.read_text()) != facts:
            raise RecordError(f"{path}: the runs there are another machine's or software's; move {self.folder} away to "
                              f"begin anew")
        write_whole(path, json.dumps(facts, indent=1) + "\n")
        print("machine: " + json.dumps(facts))
        if os.getloadavg()[0] > 0.5:
            print(f"note: the load is {os.getloadavg()[0]:.1f}; times are those of a busy machine")

    def plan(self):
        """[(letter, number), ...] in the order of the runs. That of pairs is drawn, so that nothing that the machine
        does beside can follow it."""
        if len(self.scripts) == 1:
            return [(letter, number) for letter in self.scripts for number in range(1, self.count + 1)]
        batch = self.ledger.batch_of(self.track, self.code, self.name)
        return order_of_pairs(self.code, batch, self.count)

    def seeds(self):
        """Of runs that do not count: drawn at their first call, and kept."""
        path = self.folder / "seeds.json"
        if not path.exists():
            write_whole(path, json.dumps([int.from_bytes(os.urandom(4), "little") for _ in range(self.count)]))
        return json.loads(path.read_text())

    def command(self, letter, number, run_id):
        """The words that start a run, which counts from now on."""
        script = str(self.folder / letter / "train_gpt.py")
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.world_size}"]
        words = [sys.executable, *(launcher if self.world_size > 1 else []), script, "--track", self.track,
                 "--run-id", run_id]
        if not self.counted:
            return [*words, "--seed", str(self.seeds()[number - 1])]
        place = self.ledger.start(self.track, self.code, self.count, run_id)
        told = ["--run-of", str(place)] if RUN_OF in self.scripts[letter] else []
        return [*words, "--seed", str(place.seed(self.code)), *told]

    def completed(self, run_id):
        """The Run of a complete log, or None."""
        try:
            return parse_log(self.logs / run_id / "log.txt")
        except RecordError:
            return None

    def run(self, letter, number, run_id):
        """The Run, made now. What an interrupted run left is put aside."""
        folder = self.logs / run_id
        if folder.exists():
            folder.rename(self.folder / f"{run_id}.stopped-{time.time_ns()}")
        words, log = self.command(letter, number, run_id), folder / "log.txt"
        began, clock = time.time(), time.monotonic()
        try:
            with open(self.folder / "console.txt", "a") as console:
                code = subprocess.run(words, cwd=self.root, stdout=console, stderr=console).returncode
        finally:
            if self.counted and not (log.exists() and f"\n{START}\n" in log.read_text(errors="replace")):
                self.ledger.take_back(run_id)
        for checkpoint in folder.glob("*.pt*"):  # one is hundreds of MiB, and nothing here reads it
            checkpoint.unlink()
        done = self.completed(run_id)
        wall = self.wall[run_id] = time.monotonic() - clock
        if done and (done.train_time_ms > 1000 * wall + 1 or done.started and not (
                began - 1 <= done.started.timestamp() <= began + wall + 1)):
            raise RecordError(f"run {run_id}: its log says {done.train_time_ms / 1000:.1f} s of training, started at "
                              f"{done.started:%H:%M:%S}; the process lived for {wall:.1f} s and ended at "
                              f"{time.strftime('%H:%M:%S', time.gmtime())}: its clock is wrong")
        if code or done is None:
            raise RecordError(f"run {run_id} ended with exit status {code}; see {self.folder}/console.txt, and call "
                              f"again to go on")
        return done

    def run_all(self, enough=lambda runs: False):
        """The Run of every (letter, number) of the plan, in order, made now unless it is there. Tells how far it is.
        enough: of the runs so far, whether the rest can be spared."""
        self.prepare()
        runs, spent, plan = {}, [], self.plan()
        for place, (letter, number) in enumerate(plan, 1):
            run_id = f"{self.name}-{number:02d}{letter}"
            began, there = time.monotonic(), self.completed(run_id)
            print(f"run {place}/{len(plan)} {run_id} ... ", end="", flush=True)
            runs[letter, number] = run = there or self.run(letter, number, run_id)
            spent += [] if there else [time.monotonic() - began]
            left = f", about {sum(spent) / len(spent) * (len(plan) - place) / 60:.0f} min to go" if spent else ""
            print(f"val_loss {run.val_loss:.5f} time {run.train_time_ms / 1000:.1f} s"
                  f"{' (was there)' if there else ''}{left}", flush=True)
            if enough(runs):
                break
        return runs


# ----- what submit would refuse

def obstacles(repository, track, source, other=None):
    """[reason, ...] for which no record could be made of runs of this source, or of its pairs with another: told before
    hours of runs, not after."""
    rules, found = repository.rules[track], []
    records, code = repository.records[track], hashlib.sha256(source.encode()).hexdigest()
    try:
        config = config_of(source, track)
    except RecordError as error:
        return [f"train_gpt.py: {error}"]
    for name in ("tokenizer", "val_tokens", "val_sha256", "target_loss"):
        if config.get(name) != getattr(rules, name):
            found.append(f"train_gpt.py: {name} is {ascii(config.get(name))[:60]}, by the rules {getattr(rules, name)}")
    if "run_of" not in config:
        found.append("train_gpt.py: Config has no field run_of, so that its log cannot say its place in the batch")
    manifest = repository.root / str(config.get("data")) / "manifest.json"
    if rules.manifest_sha256 and manifest.is_file() and (
            hashlib.sha256(manifest.read_bytes()).hexdigest() != rules.manifest_sha256):
        found.append(f"{manifest}: is not the track's; build it with run.sh")
    found += [f"train_gpt.py: is the code of {record.name}; change it first" for record in records
              if record.code_sha256 == code][:1]
    if other is not None:
        tip = (chain(records) or [None])[-1]
        if tip is None:
            found.append(f"track {track} has no record yet; make the first one with `python -m records run`")
        elif tip.source != other.source:
            found.append(f"{other.label}: is not the code of {tip.name}, the last of the track's chain of records, "
                         f"which a new one is measured against")
    return found


def check_obstacles(found, compare=False):
    if found and not compare:
        raise RecordError(f"{found[0]} (submit would refuse the runs)")
    for reason in found:
        print(f"note: no record will come of this: {reason}")


# ----- run

def run(repository, track, count, world_size):
    """The runs of a record of the working script that are still missing, one after another. Prints as it goes."""
    if track not in repository.rules:
        raise RecordError(f"--track {ascii(track)}: is none of {', '.join(repository.rules)}")
    source = read_text(repository.root / "train_gpt.py")
    check_obstacles(obstacles(repository, track, source))
    name = f"run-{track}-{digest(source)}-n{count}"
    experiment = Experiment(repository, name, {"": source}, track, world_size or 1, count)
    runs = experiment.run_all().values()
    losses, target = [run.val_loss for run in runs], repository.rules[track].target_loss
    print(f"\nmean loss {np.mean(losses):.5f}, target {target:g}, p = {stats.p_below(losses, target):.2g}; mean time "
          f"{np.mean([run.train_time_ms for run in runs]) / 1000:.1f} s\n\n"
          f"To claim it: python -m records submit --name NAME logs/{name}-*")


# ----- ab

def slope_at_end(runs):
    """Loss per step at the end of the runs' curves, from the last two validations, else the last quarter of the
    training losses; None where it cannot be told."""
    curve = [point for run in runs for point in run.curves["val"][-2:]]
    if len({point.step for point in curve}) < 2:
        curve = [point for run in runs for point in run.curves["train"] if point.step > 0.75 * run.steps]
    if len({point.step for point in curve}) < 2:
        return None
    return float(np.polyfit([point.step for point in curve], [point.loss for point in curve], 1)[0])


def complete_pairs(runs):
    """[(run of A, run of B), ...] of the pairs that are complete, of Runs by (letter, number)."""
    numbers = itertools.takewhile(lambda number: {("a", number), ("b", number)} <= runs.keys(), itertools.count(1))
    return [(runs["a", number], runs["b", number]) for number in numbers]


def shown_early(pairs, declared, level, target):
    """Whether fewer pairs than were declared show what a record claims, gain and target. Prints how it stands."""
    speed, left = speed_figures(pairs, declared, level), declared - len(pairs)
    needed = stats.pairs_needed(pairs, level)
    loss_p = stats.p_below([run.val_loss for run, _ in pairs], target)
    if len(pairs) in stats.looks(declared)[:-1] and speed["shown_by"] and loss_p < level / len(stats.looks(declared)):
        print(f"pairs 1 to {len(pairs)} show the gain and the target; the other {left} are spared")
        return True
    outlook = "complete" if not left else "no number of pairs would show a gain" if needed is None else (
        f"a gain of this size is likely to take {max(needed - len(pairs), 1)} pairs more")
    print(f"pairs {len(pairs)}/{declared}, A in relation to B: {render.clocks(speed)}; {outlook}", flush=True)
    return False


def ab_report(a, b, speed, level):
    """The text that `ab` ends with, for Runs in pairs."""
    times = [(run.train_time_ms - base.train_time_ms) / 1000 for run, base in zip(a, b)]
    losses = [run.val_loss - base.val_loss for run, base in zip(a, b)]
    rows = [[str(number), f"{one.val_loss:.5f}", f"{two.val_loss:.5f}", f"{one.train_time_ms / 1000:.2f}",
             f"{two.train_time_ms / 1000:.2f}", f"{time_s:+.2f}"]
            for number, (one, two, time_s) in enumerate(zip(a, b, times), 1)]
    shown = f"shown, by {speed['shown_by']} time" if speed["shown_by"] else f"not shown, at most {level:g} is needed"
    mean, low, high = stats.interval(losses)
    p = stats.p_below(losses if mean < 0 else [-loss for loss in losses], 0)
    verdict = f"A is {'lower' if mean < 0 else 'higher'}" if p < stats.ALPHA else "undecided"
    if verdict == "undecided":
        needed = stats.runs_needed(losses)
        verdict += f"; about {needed} pairs would tell" if needed else f"; {stats.MOST_RUNS:,} pairs would not tell"
    lines = [render.table(["pair", "loss A", "loss B", "time A, s", "time B, s", "A - B, s"], rows), "",
             f"time A - B: {render.difference(speed)}",
             f"in relation to B: {render.clocks(speed)}; fastest parts {100 * speed['fastest_parts']:+.1f} %",
             f"that A is faster: {render.p_text(speed['p'])}: {shown}",
             f"loss A - B: {mean:+.5f} ({stats.CONFIDENCE:.0%}: {low:+.5f} to {high:+.5f}), {render.p_text(p)}: "
             f"{verdict}"]
    slope = slope_at_end(b)
    if slope is None or slope >= 0:
        lines.append("in steps: cannot be told, B's loss does not fall at its end")
    else:
        mean, low, high = (value / slope for value in stats.interval(losses))
        lines.append(f"in steps: A's loss is that of B {mean:+.1f} steps later ({high:+.1f} to {low:+.1f}), at B's "
                     f"slope of {slope:.2g} a step")
    return "\n".join(lines)


def tip_of(repository, track):
    """The Side of the last record of a track's chain."""
    if track not in repository.rules:
        raise RecordError(f"--track {ascii(track)}: is none of {', '.join(repository.rules)}")
    if not (links := chain(repository.records[track])):
        raise RecordError(f"track {track} has no record to compare with; name a run or a log, or make the first record "
                          f"with `python -m records run`")
    return side_of(links[-1].folder, repository)


def ab(repository, other, pairs, world_size, yes, compare=False):
    """Interleaved runs of the working script (A) and another's (B), a Side of compare.py. Prints as it goes."""
    if pairs > stats.MOST_PAIRS:
        raise RecordError(f"--runs {pairs}: pairs are at most {stats.MOST_PAIRS}")
    source = read_text(repository.root / "train_gpt.py")
    check_obstacles(obstacles(repository, other.track, source, other), compare)
    world_size = world_size or other.runs[0].world_size
    a_hash, b_hash = digest(source), digest(other.source)
    consent(f"{2 * pairs} runs of train_gpt.py ({a_hash}) and of the code in {other.label} ({b_hash})", yes)
    name = f"ab-{other.track}-{a_hash}-{b_hash}-n{pairs}"
    experiment = Experiment(repository, name, {"a": source, "b": other.source}, other.track, world_size, pairs)
    level = stats.level(experiment.ledger.batch_of(other.track, experiment.code, name))
    target = repository.rules[other.track].target_loss

    def enough(runs):
        """Asked after each run, answered after each block of pairs."""
        made = complete_pairs(runs)
        return len(runs) == 2 * len(made) and (len(made) % BLOCK == 0 or len(made) == pairs) and shown_early(
            made, pairs, level, target)
    runs = complete_pairs(experiment.run_all(enough))
    a, b = zip(*runs)
    report = ab_report(a, b, speed_figures(runs, pairs, level), level)
    print(f"\nA: train_gpt.py ({a_hash})\nB: {other.label} ({b_hash})\n\n{report}\n\n"
          f"To claim it: python -m records submit --name NAME logs/{name}-*a --baseline logs/{name}-*b")


def digest(source):
    return hashlib.sha256(source.encode()).hexdigest()[:8]


# ----- reproduce

def verdict(losses, claimed, target):
    """(yes | no | undecided, reason) for the losses of new runs, the record's own, and the target."""
    below, worse = stats.p_below(losses, target), stats.p_worse(losses, claimed)
    above = stats.p_below([-loss for loss in losses], -target)
    mean, claimed_mean = (stats.mean_and_std(some)[0] for some in (losses, claimed))
    if above < stats.ALPHA:
        return "no", f"the mean {mean:.5f} lies above the target {target:g}, p = {above:.2g}"
    if worse < stats.ALPHA:
        return "no", f"the mean {mean:.5f} lies above the record's {claimed_mean:.5f}, p = {worse:.2g}"
    if below < stats.ALPHA:
        return "yes", f"the mean {mean:.5f} lies below the target {target:g}, p = {below:.2g}"
    needed = stats.runs_needed([loss - target for loss in losses])
    remedy = f"about --runs {needed} would tell" if needed else "more runs may tell"
    return "undecided", f"mean {mean:.5f}, target {target:g}, p = {below:.2g}; {remedy}"


def reproduce(repository, record, count, world_size, yes):
    """Run a record's code with fresh seeds and judge its runs and their losses. Returns the verdict."""
    code, rules = digest(record.source), repository.rules[record.track]
    consent(f"{count} runs of the code in {record.label} ({code})", yes)
    experiment = Experiment(repository, f"reproduce-{record.track}-{code}-n{count}", {"r": record.source}, record.track,
                            world_size or record.runs[0].world_size, count, counted=False)
    runs, broken = [*experiment.run_all().values()], []
    for run in runs:
        check_run(run, rules, lambda path, reason: broken.append(f"{path.parent.name} {reason}"), counted=False)
        broken += [f"{run.run} validity gate {gate} is {ascii(word)}" for gate in ("causal", "normalised", "local")
                   if (word := run.validity.get(gate)) not in ("ok", None)]
    losses, claimed = ([run.val_loss for run in some] for some in (runs, record.runs))
    answer, reason = ("no", broken[0]) if broken else verdict(losses, claimed, rules.target_loss)
    mean_s, claimed_s = (stats.mean_and_std([run.train_time_ms / 1000 for run in some])[0]
                         for some in (runs, record.runs))
    wall = f" ({np.mean([*experiment.wall.values()]):.1f} s with all that is not timed)" if experiment.wall else ""
    print(f"\ntime: {mean_s:.1f} s here{wall}, {claimed_s:.1f} s on {record.runs[0].device}\n"
          f"loss reproduced: {answer}, n = {count}: {reason}\n"
          f"What no run shows: whether the code reads validation text, slows its clock or fakes its gates. Read "
          f"`python -m records diff` for that.")
    return answer
