"""`run`, `ab` and `reproduce`. The last two are the only commands that execute code from a record: they ask first.

The runs of an experiment lie at logs/<experiment>-<number>, an id that holds the code's hash and the number of runs: a
call that was interrupted goes on where it stopped, and another number of runs is another experiment.
"""
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time

import numpy as np
import torch

import train_gpt
from records import render, stats
from records.files import RecordError, write_whole
from records.ledger import Ledger
from records.log import START, order_of_pairs, parse_log

RUN_OF = "\n    run_of: str = knob("  # the field of a script that is told its place in a batch


# ----- the machine

def fingerprint():
    """What times depend on beside the code."""
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
        """[(letter, number), ...] in the order of the runs. That of pairs is drawn, so that nothing that the machine does
        beside can follow it."""
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
        try:
            with open(self.folder / "console.txt", "a") as console:
                code = subprocess.run(words, cwd=self.root, stdout=console, stderr=console).returncode
        finally:
            if self.counted and not (log.exists() and f"\n{START}\n" in log.read_text(errors="replace")):
                self.ledger.take_back(run_id)
        for checkpoint in folder.glob("*.pt*"):  # one is hundreds of MiB, and nothing here reads it
            checkpoint.unlink()
        done = self.completed(run_id)
        if code or done is None:
            raise RecordError(f"run {run_id} ended with exit status {code}; see {self.folder}/console.txt, and call "
                              f"again to go on")
        return done

    def run_all(self):
        """The Run of every (letter, number) of the plan, in order, made now unless it is there. Tells how far it is."""
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
        return runs


# ----- run

def run(repository, track, count, world_size):
    """The runs of a record of the working script that are still missing, one after another. Prints as it goes."""
    if track not in repository.rules:
        raise RecordError(f"--track {ascii(track)}: is none of {', '.join(repository.rules)}")
    source = (repository.root / "train_gpt.py").read_text()
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


def ab_report(a, b):
    """The text that `ab` ends with, for Runs in pairs."""
    times = [(run.train_time_ms - base.train_time_ms) / 1000 for run, base in zip(a, b)]
    losses = [run.val_loss - base.val_loss for run, base in zip(a, b)]
    rows = [[str(number), f"{one.val_loss:.5f}", f"{two.val_loss:.5f}", f"{one.train_time_ms / 1000:.2f}",
             f"{two.train_time_ms / 1000:.2f}", f"{time_s:+.2f}"]
            for number, (one, two, time_s) in enumerate(zip(a, b, times), 1)]
    lines = [render.table(["pair", "loss A", "loss B", "time A, s", "time B, s", "A - B, s"], rows), ""]
    for what, unit, digits, values in (("time", " s", 2, times), ("loss", "", 5, losses)):
        mean, low, high = stats.interval(values)
        p = stats.p_below(values if mean < 0 else [-value for value in values], 0)
        verdict = f"A is {'lower' if mean < 0 else 'higher'}" if p < stats.ALPHA else "undecided"
        if verdict == "undecided":
            needed = stats.runs_needed(values)
            verdict += f"; about {needed} pairs would tell" if needed else f"; {stats.MOST_RUNS:,} pairs would not tell"
        lines.append(f"{what} A - B: {mean:+.{digits}f}{unit} ({stats.CONFIDENCE:.0%}: {low:+.{digits}f} to "
                     f"{high:+.{digits}f}), p = {p:.2g}: {verdict}")
    slope = slope_at_end(b)
    if slope is None or slope >= 0:
        lines.append("in steps: cannot be told, B's loss does not fall at its end")
    else:
        mean, low, high = (value / slope for value in stats.interval(losses))
        lines.append(f"in steps: A's loss is that of B {mean:+.1f} steps later ({high:+.1f} to {low:+.1f}), at B's "
                     f"slope of {slope:.2g} a step")
    return "\n".join(lines)


def ab(repository, other, pairs, world_size, yes):
    """Interleaved runs of the working script (A) and another's (B), a Side of compare.py. Prints as it goes."""
    source = (repository.root / "train_gpt.py").read_text()
    world_size = world_size or other.runs[0].world_size
    a_hash, b_hash = digest(source), digest(other.source)
    consent(f"{2 * pairs} runs of train_gpt.py ({a_hash}) and of the code in {other.label} ({b_hash})", yes)
    name = f"ab-{other.track}-{a_hash}-{b_hash}-n{pairs}"
    experiment = Experiment(repository, name, {"a": source, "b": other.source}, other.track, world_size, pairs)
    runs = experiment.run_all()
    a, b = ([runs[letter, number] for number in range(1, pairs + 1)] for letter in "ab")
    print(f"\nA: train_gpt.py ({a_hash})\nB: {other.label} ({b_hash})\n\n{ab_report(a, b)}\n\n"
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
    """Run a record's code with fresh seeds and judge its losses. Returns the verdict."""
    code = digest(record.source)
    consent(f"{count} runs of the code in {record.label} ({code})", yes)
    experiment = Experiment(repository, f"reproduce-{record.track}-{code}-n{count}", {"r": record.source}, record.track,
                            world_size or record.runs[0].world_size, count, counted=False)
    runs = experiment.run_all().values()
    losses, claimed = ([run.val_loss for run in some] for some in (runs, record.runs))
    answer, reason = verdict(losses, claimed, repository.rules[record.track].target_loss)
    mean_s, claimed_s = (stats.mean_and_std([run.train_time_ms / 1000 for run in some])[0]
                         for some in (runs, record.runs))
    print(f"\ntime: {mean_s:.1f} s here, {claimed_s:.1f} s on {record.runs[0].device}\n"
          f"loss reproduced: {answer}, n = {count}: {reason}")
    return answer
