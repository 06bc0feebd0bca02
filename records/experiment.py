"""`run`, `ab` and `reproduce`. The last two are the only commands that execute code from a record:
they ask first.

The runs of an experiment lie at logs/<experiment>-<number>, an id that holds the code's hash and
the number of runs: a call that was interrupted goes on where it stopped, and another number of runs
is another experiment. On a CPU all its runs are told one dtype, the one that this machine is fast
in, whatever each script would choose.
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
from records.judge import GATES, check_run
from records.ledger import Ledger
from records.log import BLOCK, START, order_of_pairs, parse_log
from records.record import chain, speed_figures
from records.source import config_of, has_field

# ----- the machine


def fingerprint():
    """What times depend on beside the code. The dtype is that of all runs, on a CPU."""
    # They are imported here alone: nothing that only reads needs torch, and train_gpt.py is code of
    # the branch at hand.
    import torch

    import train_gpt

    cpu = torch.device("cpu")
    device = torch.device("cuda") if torch.cuda.is_available() else cpu
    facts = {
        "device": train_gpt.device_name(device),
        "cpu": train_gpt.device_name(cpu),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
    }
    if device == cpu:
        facts["dtype"] = train_gpt.resolve_dtype("auto", cpu)
    if shutil.which("nvidia-smi"):
        facts["gpus"] = query_gpus()
    return facts


def query_gpus():
    """A line of names and limits for each GPU, as its driver states them."""
    query = "--query-gpu=name,driver_version,power.limit,clocks.max.sm"
    words = ["nvidia-smi", query, "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True).stdout.splitlines()


def consent(what, yes):
    """Say that foreign code is about to run; RecordError unless the user agrees."""
    print(
        f"This executes {what} on this machine, with your rights. `python -m records diff` shows "
        f"what it changes."
    )
    if yes:
        return
    if not sys.stdin.isatty():
        raise RecordError("not confirmed: nothing was run; add --yes when you have read that code")
    if input("Type yes to go on: ").strip() != "yes":
        raise RecordError("not confirmed: nothing was run")


# ----- runs that go on where they stopped


def never(runs):
    """Whether the runs so far are enough: never, so that all are made."""
    return False


class Experiment:
    """Scripts by letter, their runs under logs/, and what has been completed. Counted runs are a
    batch of the first script's code."""

    def __init__(self, repository, name, scripts, track, world_size, count, counted=True):
        """Nothing is written or run yet; `run_all` does that."""
        self.root = repository.root
        self.logs = repository.root / "logs"
        self.folder = self.logs / name
        self.ledger = Ledger(self.logs / "runs.jsonl")
        self.name = name
        self.scripts = scripts
        self.track = track
        self.world_size = world_size
        self.count = count
        self.counted = counted
        self.code = sha256_of(next(iter(scripts.values())))
        self.dtype = None  # that all runs are told, once it is known
        self.wall = {}  # seconds that the processes of runs made now lived, by run id

    def prepare(self):
        """Extract the scripts; RecordError when the experiment was begun on another machine."""
        facts = {**fingerprint(), "world_size": self.world_size}
        for letter, source in self.scripts.items():
            (self.folder / letter).mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / letter / "train_gpt.py", source)
        path = self.folder / "machine.json"
        begun = json.loads(path.read_text()) if path.exists() else facts
        if "dtype" in begun and "dtype" in facts:
            # A machine that is about as fast in both types may seem faster in the other one now.
            facts["dtype"] = begun["dtype"]
        self.dtype = facts.get("dtype")
        if begun != facts:
            raise RecordError(
                f"{path}: the runs there are another machine's or software's; move {self.folder} "
                f"away to begin anew"
            )
        write_whole(path, json.dumps(facts, indent=1) + "\n")
        print("machine: " + json.dumps(facts))
        load, _, _ = os.getloadavg()
        if load > 0.5:
            print(f"note: the load is {load:.1f}; times are those of a busy machine")

    def plan(self):
        """[(letter, number), ...] in the order of the runs. That of pairs is drawn, so that nothing
        that the machine does beside can follow it."""
        if len(self.scripts) > 1:
            batch = self.ledger.batch_of(self.track, self.code, self.name)
            return order_of_pairs(self.code, batch, self.count)
        numbers = range(1, self.count + 1)
        return [(letter, number) for letter in self.scripts for number in numbers]

    def seeds(self):
        """The seeds of runs that do not count, which are drawn at their first call, and kept."""
        path = self.folder / "seeds.json"
        if not path.exists():
            drawn = [int.from_bytes(os.urandom(4), "little") for _ in range(self.count)]
            write_whole(path, json.dumps(drawn))
        return json.loads(path.read_text())

    def command(self, letter, number, run_id):
        """The words that start a run, which counts from now on."""
        source = self.scripts[letter]
        words = [sys.executable]
        if self.world_size > 1:
            words += ["-m", "torch.distributed.run", "--standalone"]
            words += [f"--nproc_per_node={self.world_size}"]
        words += [str(self.folder / letter / "train_gpt.py")]
        words += ["--track", self.track, "--run-id", run_id]
        is_free = config_of(source, self.track).get("dtype") != "float32"
        if self.dtype and is_free and has_field(source, "dtype"):
            words += ["--dtype", self.dtype]
        if not self.counted:
            return [*words, "--seed", str(self.seeds()[number - 1])]
        place = self.ledger.start(self.track, self.code, self.count, run_id)
        if has_field(source, "run_of"):
            words += ["--run-of", str(place)]
        return [*words, "--seed", str(place.seed(self.code))]

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
        words = self.command(letter, number, run_id)
        began = time.time()
        clock = time.monotonic()
        try:
            with open(self.folder / "console.txt", "a") as console:
                done = subprocess.run(words, cwd=self.root, stdout=console, stderr=console)
        finally:
            if self.counted and not has_begun(folder / "log.txt"):
                self.ledger.take_back(run_id)
        for checkpoint in folder.glob("*.pt*"):  # one is hundreds of MiB, and nothing here reads it
            checkpoint.unlink()
        run = self.completed(run_id)
        self.wall[run_id] = time.monotonic() - clock
        if run:
            check_clock(run, began, self.wall[run_id])
        if done.returncode or run is None:
            raise RecordError(
                f"run {run_id} ended with exit status {done.returncode}; see "
                f"{self.folder}/console.txt, and call again to go on"
            )
        return run

    def run_all(self, enough=never):
        """The Run of every (letter, number) of the plan, in order, made now unless it is there.
        Tells how far it is. enough: of the runs so far, whether the rest can be spared."""
        self.prepare()
        runs = {}
        spent = []  # seconds of the runs that were made now
        plan = self.plan()
        for place, (letter, number) in enumerate(plan, 1):
            run_id = f"{self.name}-{number:02d}{letter}"
            print(f"run {place}/{len(plan)} {run_id} ... ", end="", flush=True)
            began = time.monotonic()
            run = self.completed(run_id)
            there = run is not None
            if not there:
                run = self.run(letter, number, run_id)
                spent.append(time.monotonic() - began)
            runs[letter, number] = run
            words = f"val_loss {run.val_loss:.5f} time {run.train_time_ms / 1000:.1f} s"
            if there:
                words += " (was there)"
            if spent:
                minutes = sum(spent) / len(spent) * (len(plan) - place) / 60
                words += f", about {minutes:.0f} min to go"
            print(words, flush=True)
            if enough(runs):
                break
        return runs


def has_begun(log):
    """Whether a log has its header, so that the run trained."""
    return log.exists() and f"\n{START}\n" in log.read_text(errors="replace")


def check_clock(run, began, wall):
    """A run cannot train longer than its process lived, from the time `began` for `wall` seconds,
    nor start outside of that. RecordError where its log says so."""
    is_right = run.train_time_ms <= 1000 * wall + 1
    if run.started:
        is_right &= began - 1 <= run.started.timestamp() <= began + wall + 1
    if not is_right:
        started = f", started at {run.started:%H:%M:%S}" if run.started else ""
        raise RecordError(
            f"run {run.run}: its log says {run.train_time_ms / 1000:.1f} s of training{started}; "
            f"the process lived for {wall:.1f} s and ended at "
            f"{time.strftime('%H:%M:%S', time.gmtime())}: its clock is wrong"
        )


def sha256_of(source):
    """The hash that stands for a script."""
    return hashlib.sha256(source.encode()).hexdigest()


def digest(source):
    """The first digits of a script's hash, for names."""
    return sha256_of(source)[:8]


# ----- what submit would refuse


def check_track(repository, track):
    """RecordError for a track that has no rules."""
    if track not in repository.rules:
        known = ", ".join(repository.rules)
        raise RecordError(f"--track {ascii(track)}: is none of {known}")


def obstacles(repository, track, source, other=None):
    """[reason, ...] for which no record could be made of runs of this source, or of its pairs with
    another: told before hours of runs, not after."""
    try:
        config = config_of(source, track)
    except RecordError as error:
        return [f"train_gpt.py: {error}"]
    rules = repository.rules[track]
    records = repository.records[track]
    found = []
    for name, wanted in rules.fixed.items():
        value = config.get(name, "not there")
        if value != wanted:
            found.append(f"train_gpt.py: {name} is {ascii(value)[:60]}, by the rules {wanted}")
    if "run_of" not in config:
        found.append(
            "train_gpt.py: Config has no field run_of, so that its log cannot say its place in the "
            "batch"
        )
    manifest = repository.root / str(config.get("data")) / "manifest.json"
    if rules.manifest_sha256 and manifest.is_file():
        if hashlib.sha256(manifest.read_bytes()).hexdigest() != rules.manifest_sha256:
            found.append(f"{manifest}: is not the track's; build it with run.sh")
    same = [record.name for record in records if record.code_sha256 == sha256_of(source)]
    if same:
        found.append(f"train_gpt.py: is the code of {same[0]}; change it first")
    if other is not None:
        found += obstacles_beside(track, chain(records), other)
    return found


def obstacles_beside(track, links, other):
    """[reason, ...] for which the Side that a script is measured against makes no record of it."""
    if not links:
        return [f"track {track} has no record yet; make the first one with `python -m records run`"]
    tip = links[-1]
    if tip.source != other.source:
        return [
            f"{other.label}: is not the code of {tip.name}, the last of the track's chain of "
            f"records, which a new one is measured against"
        ]
    return []


def check_obstacles(found, compare=False):
    """Refuse to go on where no record can come of it; with `compare` say so only."""
    if found and not compare:
        raise RecordError(f"{found[0]} (submit would refuse the runs)")
    for reason in found:
        print(f"note: no record will come of this: {reason}")


# ----- run


def run(repository, track, count, world_size):
    """The runs of a record of the working script that are still missing, one after another. Prints
    as it goes."""
    check_track(repository, track)
    source = read_text(repository.root / "train_gpt.py")
    check_obstacles(obstacles(repository, track, source))
    name = f"run-{track}-{digest(source)}-n{count}"
    experiment = Experiment(repository, name, {"": source}, track, world_size or 1, count)
    runs = list(experiment.run_all().values())
    target = repository.rules[track].target_loss
    losses = [run.val_loss for run in runs]
    seconds = np.mean([run.train_time_ms for run in runs]) / 1000
    print(
        f"\nmean loss {np.mean(losses):.5f}, target {target:g}, "
        f"p = {stats.p_below(losses, target):.2g}; mean time {seconds:.1f} s\n\n"
        f"To claim it: python -m records submit --name NAME logs/{name}-*"
    )


# ----- ab


def slope_at_end(runs):
    """Loss per step at the end of the runs' curves, from the last two validations, else the last
    quarter of the training losses; None where it cannot be told."""
    curve = [point for run in runs for point in run.curves["val"][-2:]]
    if len({point.step for point in curve}) < 2:
        points = [(run, point) for run in runs for point in run.curves["train"]]
        curve = [point for run, point in points if point.step > 0.75 * run.steps]
    if len({point.step for point in curve}) < 2:
        return None
    slope, _ = np.polyfit([point.step for point in curve], [point.loss for point in curve], 1)
    return float(slope)


def complete_pairs(runs):
    """[(run of A, run of B), ...] of the pairs that are complete, of Runs by (letter, number)."""
    pairs = []
    for number in itertools.count(1):
        if ("a", number) not in runs or ("b", number) not in runs:
            return pairs
        pairs.append((runs["a", number], runs["b", number]))


def shown_early(pairs, declared, level, target):
    """Whether fewer pairs than were declared show what a record claims, gain and target. Prints how
    it stands."""
    speed = speed_figures(pairs, declared, level)
    left = declared - len(pairs)
    looks = stats.looks(declared)
    loss_p = stats.p_below([run.val_loss for run, _ in pairs], target)
    is_shown = speed["shown_by"] and loss_p < level / len(looks)
    if is_shown and len(pairs) in looks[:-1]:
        print(f"pairs 1 to {len(pairs)} show the gain and the target; the other {left} are spared")
        return True
    clocks = render.clocks(speed)
    prospect = outlook(pairs, left, level)
    print(f"pairs {len(pairs)}/{declared}, A in relation to B: {clocks}; {prospect}", flush=True)
    return False


def outlook(pairs, left, level):
    """How many pairs more would show a gain, of which so many are left to be made."""
    if not left:
        return "complete"
    needed = stats.pairs_needed(pairs, level)
    if needed is None:
        return "no number of pairs would show a gain"
    return f"a gain of this size is likely to take {max(needed - len(pairs), 1)} pairs more"


def table_of_pairs(a, b):
    """The table of losses and times of Runs in pairs."""
    rows = []
    for number, (run, base) in enumerate(zip(a, b, strict=True), 1):
        apart = (run.train_time_ms - base.train_time_ms) / 1000
        rows.append(
            [
                str(number),
                f"{run.val_loss:.5f}",
                f"{base.val_loss:.5f}",
                f"{run.train_time_ms / 1000:.2f}",
                f"{base.train_time_ms / 1000:.2f}",
                f"{apart:+.2f}",
            ]
        )
    return render.table(["pair", "loss A", "loss B", "time A, s", "time B, s", "A - B, s"], rows)


def loss_line(losses):
    """What differences of losses A - B say."""
    mean, low, high = stats.interval(losses)
    signed = losses if mean < 0 else [-loss for loss in losses]
    p = stats.p_below(signed, 0)
    if p < stats.ALPHA:
        answer = "A is lower" if mean < 0 else "A is higher"
    else:
        needed = stats.runs_needed(losses)
        if needed:
            answer = f"undecided; about {needed} pairs would tell"
        else:
            answer = f"undecided; {stats.MOST_RUNS:,} pairs would not tell"
    return (
        f"loss A - B: {mean:+.5f} ({stats.CONFIDENCE:.0%}: {low:+.5f} to {high:+.5f}), "
        f"{render.p_text(p)}: {answer}"
    )


def steps_line(losses, slope):
    """What differences of losses A - B are in steps of B, whose loss has a slope at its end."""
    if slope is None or slope >= 0:
        return "in steps: cannot be told, B's loss does not fall at its end"
    mean, low, high = (value / slope for value in stats.interval(losses))
    return (
        f"in steps: A's loss is that of B {mean:+.1f} steps later ({high:+.1f} to {low:+.1f}), at "
        f"B's slope of {slope:.2g} a step"
    )


def ab_report(a, b, speed, level):
    """The text that `ab` ends with, for Runs in pairs."""
    losses = [run.val_loss - base.val_loss for run, base in zip(a, b, strict=True)]
    shown = f"not shown, at most {level:g} is needed"
    if speed["shown_by"]:
        shown = f"shown, by {speed['shown_by']} time"
    return "\n".join(
        [
            table_of_pairs(a, b),
            "",
            f"time A - B: {render.difference(speed)}",
            f"in relation to B: {render.clocks(speed)}; fastest parts "
            f"{100 * speed['fastest_parts']:+.1f} %",
            f"that A is faster: {render.p_text(speed['p'])}: {shown}",
            loss_line(losses),
            steps_line(losses, slope_at_end(b)),
        ]
    )


def tip_of(repository, track):
    """The Side of the last record of a track's chain."""
    check_track(repository, track)
    links = chain(repository.records[track])
    if not links:
        raise RecordError(
            f"track {track} has no record to compare with; name a run or a log, or make the first "
            f"record with `python -m records run`"
        )
    return side_of(links[-1].folder, repository)


def ab(repository, other, pairs, world_size, yes, compare=False):
    """Interleaved runs of the working script (A) and another's (B), a Side of compare.py. Prints as
    it goes."""
    if pairs > stats.MOST_PAIRS:
        raise RecordError(f"--runs {pairs}: pairs are at most {stats.MOST_PAIRS}")
    track = other.track
    source = read_text(repository.root / "train_gpt.py")
    check_obstacles(obstacles(repository, track, source, other), compare)
    world_size = world_size or other.runs[0].world_size
    a_hash = digest(source)
    b_hash = digest(other.source)
    both = f"train_gpt.py ({a_hash}) and of the code in {other.label} ({b_hash})"
    consent(f"{2 * pairs} runs of {both}", yes)
    name = f"ab-{track}-{a_hash}-{b_hash}-n{pairs}"
    scripts = {"a": source, "b": other.source}
    experiment = Experiment(repository, name, scripts, track, world_size, pairs)
    level = stats.level(experiment.ledger.batch_of(track, experiment.code, name))
    target = repository.rules[track].target_loss

    def enough(runs):
        """Asked after each run, answered after each block of pairs."""
        made = complete_pairs(runs)
        is_whole = len(made) % BLOCK == 0 or len(made) == pairs
        if not is_whole or len(runs) > 2 * len(made):
            return False
        return shown_early(made, pairs, level, target)

    runs = complete_pairs(experiment.run_all(enough))
    a, b = zip(*runs, strict=True)
    report = ab_report(a, b, speed_figures(runs, pairs, level), level)
    machine = [a[0].device, f"world size {world_size}", a[0].dtype]
    print(
        f"\nA: train_gpt.py ({a_hash})\nB: {other.label} ({b_hash})\n"
        f"both on {', '.join(filter(None, machine))}\n\n{report}\n\n"
        f"To claim it: python -m records submit --name NAME logs/{name}-*a "
        f"--baseline logs/{name}-*b"
    )


# ----- reproduce


def verdict(losses, claimed, target):
    """(yes | no | undecided, reason) for the losses of new runs, the record's own, and the
    target."""
    mean, _ = stats.mean_and_std(losses)
    claimed_mean, _ = stats.mean_and_std(claimed)
    above = stats.p_below([-loss for loss in losses], -target)
    if above < stats.ALPHA:
        return "no", f"the mean {mean:.5f} lies above the target {target:g}, p = {above:.2g}"
    worse = stats.p_worse(losses, claimed)
    if worse < stats.ALPHA:
        return (
            "no",
            f"the mean {mean:.5f} lies above the record's {claimed_mean:.5f}, p = {worse:.2g}",
        )
    below = stats.p_below(losses, target)
    if below < stats.ALPHA:
        return "yes", f"the mean {mean:.5f} lies below the target {target:g}, p = {below:.2g}"
    needed = stats.runs_needed([loss - target for loss in losses])
    remedy = f"about --runs {needed} would tell" if needed else "more runs may tell"
    return "undecided", f"mean {mean:.5f}, target {target:g}, p = {below:.2g}; {remedy}"


def defects_of(run, rules):
    """[reason, ...] for which a run that does not count would be no run of a record."""
    found = []

    def fail(path, reason):
        found.append(f"{path.parent.name} {reason}")

    check_run(run, rules, fail, counted=False)
    for gate in GATES:
        word = run.validity.get(gate)
        if word not in ("ok", None):
            found.append(f"{run.run} validity gate {gate} is {ascii(word)}")
    return found


def mean_seconds(runs):
    """The mean training time of some runs."""
    mean, _ = stats.mean_and_std([run.train_time_ms / 1000 for run in runs])
    return mean


def reproduce(repository, record, count, world_size, yes):
    """Run a record's code with fresh seeds and judge its runs and their losses. Returns the
    verdict."""
    track = record.track
    code = digest(record.source)
    rules = repository.rules[track]
    consent(f"{count} runs of the code in {record.label} ({code})", yes)
    name = f"reproduce-{track}-{code}-n{count}"
    first = record.runs[0]
    world_size = world_size or first.world_size
    scripts = {"r": record.source}
    experiment = Experiment(repository, name, scripts, track, world_size, count, counted=False)
    runs = list(experiment.run_all().values())
    defects = [reason for run in runs for reason in defects_of(run, rules)]
    if defects:
        answer, reason = "no", defects[0]
    else:
        losses = [run.val_loss for run in runs]
        claimed = [run.val_loss for run in record.runs]
        answer, reason = verdict(losses, claimed, rules.target_loss)
    wall = ""
    if experiment.wall:
        seconds = np.mean(list(experiment.wall.values()))
        wall = f" ({seconds:.1f} s with all that is not timed)"
    print(
        f"\ntime: {mean_seconds(runs):.1f} s here{wall}, {mean_seconds(record.runs):.1f} s on "
        f"{first.device}\n"
        f"loss reproduced: {answer}, n = {count}: {reason}\n"
        f"What no run shows: whether the code reads validation text, slows its clock or fakes its "
        f"gates. Read `python -m records diff` for that."
    )
    return answer
