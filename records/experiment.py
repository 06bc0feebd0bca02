"""`run`, `ab` and `reproduce`, the commands that train. The last two execute code from a record:
they ask first.

The runs of an experiment lie at logs/<experiment>-<number><side>. An experiment's name holds the
hashes of its scripts and the number of runs; what it was begun with is in its plan.json, so that a
call that was interrupted goes on where it stopped. A script has one experiment that counts.
"""

import contextlib
import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time

from records import render, stats
from records.compare import difference, script_at
from records.files import RecordError, require, require_same, write_whole
from records.judge import check_rules, check_run
from records.log import START, parse_log
from records.record import hardware_of, speed_figures
from records.source import DTYPES, check_source, config_of, sha256_of
from records.submit import own_script

COUNTED = ("run", "ab")  # kinds of experiments whose runs may be a record's


def fingerprint(scripts, track):
    """What times depend on beside the code, and the dtype that all runs are told where a script
    leaves it to the machine. RecordError where two scripts name different ones."""
    # They are imported here alone: nothing that only reads needs torch, and train_gpt.py is code of
    # the branch at hand.
    import torch

    import train_gpt

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    named = {config_of(source, track).get("dtype") for source in scripts.values()} & {*DTYPES}
    require(len(named) <= 1, "the scripts name different dtypes; another dtype alone is no idea")
    return {
        "device": train_gpt.device_name(device),
        "cpu": train_gpt.device_name(torch.device("cpu")),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "dtype": named.pop() if named else train_gpt.resolve_dtype("auto", device),
    }


def consent(what, yes):
    """Say that foreign code is about to run; RecordError unless the user agrees."""
    print(
        f"This executes {what} on this machine, with your rights. `python -m records diff` shows "
        f"what it changes."
    )
    if not yes:
        hint = "not confirmed: nothing was run; add --yes when you have read that code"
        require(sys.stdin.isatty() and input("Type yes to go on: ").strip() == "yes", hint)


@contextlib.contextmanager
def interrupts():
    """A list that holds the first Ctrl-C which is pressed inside; the second one and SIGTERM raise
    KeyboardInterrupt."""
    pressed = []

    def note(number, _):
        if pressed or number == signal.SIGTERM:
            raise KeyboardInterrupt
        pressed.append(number)
        print("\nwill end after this run; Ctrl-C again ends it now, which costs a restart")

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield pressed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Experiment:
    """Scripts by side, and their runs under logs/. Those of `run` and `ab` count: they are a batch
    of side a's script."""

    def __init__(self, repository, kind, scripts, track, world_size, count):
        """Nothing is written or run yet; `run_all` does that."""
        hashes = [sha256_of(source)[:8] for source in scripts.values()]
        self.name = "-".join([kind, track, *hashes, f"n{count}"])
        self.root = repository.root
        self.logs = self.root / "logs"
        self.folder = self.logs / self.name
        self.scripts = scripts
        self.code = sha256_of(scripts["a"])
        self.track = track
        self.world_size = world_size
        self.count = count
        self.counted = kind in COUNTED
        self.plan = {}

    def prepare(self):
        """Extract the scripts, and read or write the plan. RecordError when the experiment was
        begun on another machine, or the script has another one that counts."""
        if self.counted:
            mine = f"-{self.track}-{self.code[:8]}*/plan.json"
            begun = [path.parent for kind in COUNTED for path in self.logs.glob(kind + mine)]
            others = [folder for folder in begun if folder != self.folder]
            shown = ", ".join(map(str, others))
            require(not others, f"this script has the runs of {shown}; finish these, or change it")
        machine = {**fingerprint(self.scripts, self.track), "world_size": self.world_size}
        self.plan = {"machine": machine, "batch": "1" if self.counted else os.urandom(8).hex()}
        path = self.folder / "plan.json"
        if path.exists():
            self.plan = json.loads(path.read_text())
            # A machine that is about as fast in both types may seem faster in the other one now.
            machine["dtype"] = self.plan["machine"]["dtype"]
            hint = f"move {self.folder} away to begin anew"
            is_same = self.plan["machine"] == machine
            require(is_same, f"{path}: the runs there are another machine's; {hint}")
        for side, source in self.scripts.items():
            write_whole(self.folder / side / "train_gpt.py", source)
        write_whole(path, json.dumps(self.plan, indent=1) + "\n")
        print("machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()))
        load, _, _ = os.getloadavg()
        if load > 0.5:
            print(f"note: the load is {load:.1f}; times are those of a busy machine")

    def command(self, side, number, run_id):
        """The words that start a run."""
        words = [sys.executable]
        if self.world_size > 1:
            words += ["-m", "torch.distributed.run", "--standalone"]
            words += [f"--nproc_per_node={self.world_size}"]
        words += [str(self.folder / side / "train_gpt.py"), "--track", self.track]
        words += ["--run-id", run_id]
        words += ["--seed", str(stats.seed_of(self.code, self.plan["batch"], number))]
        if config_of(self.scripts[side], self.track).get("dtype") == "auto":
            words += ["--dtype", self.plan["machine"]["dtype"]]
        if self.counted:
            start = 1 + len(list(self.folder.glob(f"{run_id}.stopped-*")))
            words += ["--run-of", f"1:{number}/{self.count}:{start}"]
        return words

    def completed(self, side, run_id):
        """The Run of a complete log, or None."""
        try:
            return parse_log(self.logs / run_id / "log.txt", self.scripts[side], self.counted)
        except RecordError:
            return None

    def run(self, side, number, run_id):
        """The Run, made now. One that began and did not end is put aside, and counts as a start."""
        folder = self.logs / run_id
        log = folder / "log.txt"
        if log.exists() and f"\n{START}\n" in log.read_text(errors="replace"):
            folder.rename(self.folder / f"{run_id}.stopped-{time.time_ns()}")
        shutil.rmtree(folder, ignore_errors=True)
        words = self.command(side, number, run_id)
        console = self.folder / "console.txt"
        began = time.time()
        # In a session of its own, a terminal's Ctrl-C does not reach it.
        with open(console, "w") as file:
            process = subprocess.Popen(
                words,
                cwd=self.root,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(self.root)},
            )
        try:
            status = process.wait()
        finally:
            process.terminate()  # which does nothing to one that has ended
            process.wait()
            for checkpoint in folder.glob("*.pt*"):  # hundreds of MiB, which nothing here reads
                checkpoint.unlink()
        run = self.completed(side, run_id)
        said = console.read_text(errors="replace").strip().splitlines()
        last = said[-1][:200] if said else "nothing"
        require(
            run and not status,
            f"run {run_id} ended with exit status {status}: {last!r}; {console} has more; the same "
            f"command goes on",
        )
        check_clock(run, began, time.time())
        return run

    def run_all(self):
        """{(side, number): Run} of all runs, in order, made now unless they are there. Tells how
        far it is. RecordError where another experiment runs, or the user asked to stop."""
        self.logs.mkdir(exist_ok=True)
        runs = {}
        spent = []  # seconds of the runs that were made now
        with open(self.logs / "records.lock", "w") as lock, interrupts() as pressed:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RecordError("another `python -m records` is making runs here") from None
            self.prepare()
            order = [("a", number) for number in range(1, self.count + 1)]
            if len(self.scripts) > 1:  # drawn, so that nothing that the machine does can follow it
                order = stats.order_of_pairs(self.code, self.plan["batch"], self.count)
            for place, (side, number) in enumerate(order, 1):
                run_id = f"{self.name}-{number:02d}{side if len(self.scripts) > 1 else ''}"
                print(f"run {place}/{len(order)} {run_id} ... ", end="", flush=True)
                run = self.completed(side, run_id)
                words = " (was there)"
                if run is None:
                    began = time.monotonic()
                    run = self.run(side, number, run_id)
                    spent.append(time.monotonic() - began)
                    minutes = sum(spent) / len(spent) * (len(order) - place) / 60
                    words = f", about {minutes:.0f} min to go"
                time_s = run.train_time_ms / 1000
                print(f"val_loss {run.val_loss:.5f} time {time_s:.1f} s{words}", flush=True)
                runs[side, number] = run
                shown = f"ended after {place} of {len(order)} runs, as asked"
                is_over = not pressed or place == len(order)
                require(is_over, f"{shown}; the same command makes the others")
        return runs


def check_clock(run, began, ended):
    """A run cannot train longer than its process lived, from `began` to `ended` in seconds since
    1970, nor start outside of that. RecordError where its log says so."""
    lived = ended - began
    is_inside = began - 1 <= run.started.timestamp() <= ended + 1
    require(
        is_inside and run.train_time_ms <= 1000 * lived + 1,
        f"run {run.run}: its log says {run.train_time_ms / 1000:.1f} s of training, started at "
        f"{run.started:%H:%M:%S}; the process lived for {lived:.1f} s until "
        f"{time.strftime('%H:%M:%S', time.gmtime(ended))}: its clock is wrong",
    )


# ----- run and ab


def working_script(repository, track):
    """The text of train_gpt.py. RecordError where no record could come of its runs: that is told
    before hours of runs, not after."""
    source = own_script(repository, track)
    check_source(source)
    config = config_of(source, track)
    rules = repository.rules[track]
    for name, wanted in {"run_of": "", **rules.fixed}.items():
        found = config.get(name, "not there")
        require_same(f"train_gpt.py: {name}", found, wanted, ", by the rules ")
    manifest = repository.root / str(config.get("data")) / "manifest.json"
    if rules.manifest_sha256 and manifest.is_file():
        is_ours = sha256_of(manifest.read_text()) == rules.manifest_sha256
        require(is_ours, f"{manifest}: is not the track's; build it with run.sh")
    return source


def run(repository, options):
    """The runs of the working script that are still missing, one after another: for a record that
    claims no gain in time. Prints as it goes."""
    track, count = options.track, options.runs
    scripts = {"a": working_script(repository, track)}
    check_rules(repository.rules[track])
    experiment = Experiment(repository, "run", scripts, track, options.world_size or 1, count)
    runs = list(experiment.run_all().values())
    print(f"\n{loss_line(repository, runs)}\n\n{claim(track)}")


def loss_line(repository, runs):
    """The mean loss of runs, and whether it is below the target."""
    losses = [run.val_loss for run in runs]
    mean, _ = stats.mean_and_std(losses)
    target = repository.rules[runs[0].track].target_loss
    return f"mean loss {mean:.5f}, target {target:g}, p = {stats.p_below(losses, target):.2g}"


def claim(track):
    """How a record is made of runs."""
    return f"To claim it: python -m records submit --track {track} --name NAME --by WHO"


def ab(repository, options):
    """Interleaved runs of the working script (A), and of the last record's or another path's (B).
    Prints as it goes. Pairs with another path count for no record."""
    track, count, other = options.track, options.runs, options.other
    require(count <= stats.MOST_PAIRS, f"--runs {count}: pairs are at most {stats.MOST_PAIRS}")
    source = working_script(repository, track)
    world_size = options.world_size
    if other:
        kind, base, label = "compare", script_at(other), other
    else:
        tip = repository.tip(track)
        hint = "make the first one with `python -m records run`"
        require(tip, f"track {track} has no record to compare with; {hint}")
        kind, base, label = "ab", tip.source, tip.name
        world_size = world_size or tip.runs[0].world_size
    print(f"train_gpt.py differs from {label}: {difference(base, source, track)}")
    consent(f"{2 * count} runs of train_gpt.py and of the code of {label}", options.yes)
    scripts = {"a": source, "b": base}
    runs = Experiment(repository, kind, scripts, track, world_size or 1, count).run_all()
    a, b = ([runs[side, number] for number in range(1, count + 1)] for side in "ab")
    print(f"\nA: train_gpt.py\nB, in the place of a parent: {label}\nboth on {hardware_of(a[0])}\n")
    print(ab_report(a, b))
    print(f"\n{loss_line(repository, a)}")
    if not other:
        print(f"\n{claim(track)}")


def ab_report(a, b):
    """The text that says how Runs in pairs differ."""
    apart = [run.val_loss - base.val_loss for run, base in zip(a, b, strict=True)]
    mean, low, high = stats.interval(apart)
    speed = speed_figures(a, b)
    verdict = "shown" if speed["p"] <= stats.ALPHA else "not shown"
    return f"""{render.run_table(a, b)}

time of A in relation to B: {render.percent(speed["relative"])}
that A is faster: p = {speed["p"]:.2g}: {verdict}, {stats.ALPHA:g} is needed
loss A - B: {mean:+.5f} ({low:+.5f} to {high:+.5f})"""


# ----- reproduce


def reproduce(repository, options):
    """Run a record's code with fresh seeds, judge its runs, and print whether their losses reach
    the target: yes, no or undecided."""
    record = repository.at_path(options.folder)
    require(record.runs and not record.failures, f"{record.folder}: does not pass verify")
    track, count = record.track, options.runs
    first = record.runs[0]
    consent(f"{count} runs of the code of {record.name}", options.yes)
    world_size = options.world_size or first.world_size
    scripts = {"a": record.source}
    experiment = Experiment(repository, "reproduce", scripts, track, world_size, count)
    runs = list(experiment.run_all().values())
    rules = repository.rules[track]
    losses = [run.val_loss for run in runs]
    answer = "undecided"
    if stats.p_below(losses, rules.target_loss) <= stats.ALPHA:
        answer = "yes"
    elif stats.p_below([-loss for loss in losses], -rules.target_loss) <= stats.ALPHA:
        answer = "no"
    reason = loss_line(repository, runs)
    try:
        for run in runs:
            check_run(run, rules)
    except RecordError as error:
        answer, reason = "no", str(error)
    times = [
        stats.mean_and_std([run.train_time_ms for run in side])[0] for side in (runs, record.runs)
    ]
    print(
        f"\ntime: {render.seconds(times[0])} s on {hardware_of(runs[0])}, "
        f"{render.seconds(times[1])} s on {hardware_of(first)}\n"
        f"loss reproduced: {answer}, n = {count}: {reason}\n"
        f"What no run shows: whether the code reads validation text, slows its clock or fakes its "
        f"gates. Read `python -m records diff` for that."
    )
