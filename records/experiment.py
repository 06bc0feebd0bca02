"""`run`, `ab` and `reproduce`, the commands that train. The last two execute code from a record:
they ask first.

The runs of an experiment lie at logs/<experiment>-<number><side>, its scripts and what was stopped
in logs/<experiment>. Its name holds the hashes of its scripts and the number of runs, so that the
same command goes on where an earlier one was interrupted. A script has one experiment that counts.
"""

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time

from records import render, stats
from records.files import RecordError, require
from records.judge import MACHINE, check_fixed, check_one, check_run
from records.log import START, parse_log
from records.record import difference, hardware_of, script_at, speed_figures
from records.source import DTYPES, check_source, config_of, sha256_of
from records.submit import COUNTED, batches_of, own_script

CLAIM = "To claim it: python -m records submit --track {} --name NAME --by WHO"


def consent(what, yes):
    """Say that foreign code is about to run; RecordError unless the user agrees."""
    print(f"This executes {what} on this machine, with your rights.")
    if not yes:
        is_agreed = sys.stdin.isatty() and input("Type yes to go on: ").strip() == "yes"
        require(is_agreed, "not confirmed: nothing was run; read what `diff` shows, or add --yes")


class Experiment:
    """Scripts by side, and their runs under logs/. Those of `run` and `ab` count: they are a batch
    of side a's script."""

    def __init__(self, repository, kind, scripts, track, world_size, count):
        hashes = [sha256_of(source)[:8] for source in scripts.values()]
        self.name = "-".join([kind, track, *hashes, f"n{count}"])
        self.repository = repository
        self.kind = kind
        self.scripts = scripts
        self.code = sha256_of(scripts["a"])
        self.track = track
        self.world_size = world_size
        self.count = count
        self.logs = repository.root / "logs"
        self.folder = self.logs / self.name
        self.batch = "1"  # of runs that count
        self.dtype = ""  # what all runs are told where a script leaves it to the machine
        self.is_over = False  # as the user asked

    def prepare(self):
        """Write the scripts, and draw or read the batch of runs that do not count. RecordError
        where the script has another batch that counts, or two scripts name different dtypes."""
        if self.kind in COUNTED:
            begun = batches_of(self.repository, self.track, self.scripts["a"])
            others = ", ".join(name for name in begun if name != self.name)
            hint = "finish these, or change it"
            require(not others, f"this script has the runs of {others} in logs/; {hint}")
        named = {config_of(source, self.track).get("dtype") for source in self.scripts.values()}
        named &= {*DTYPES}
        require(
            len(named) <= 1, "the scripts name different dtypes; another dtype alone is no idea"
        )
        self.dtype = "".join(named)
        for side, source in self.scripts.items():
            (self.folder / side).mkdir(parents=True, exist_ok=True)
            (self.folder / side / "train_gpt.py").write_text(source)
        if self.kind not in COUNTED:
            drawn = self.folder / "batch.txt"
            if not drawn.exists():
                drawn.write_text(str(random.randint(2, 10**9 - 1)))
            self.batch = drawn.read_text()

    def command(self, side, number, run_id):
        """The words that start a run."""
        words = [sys.executable]
        if self.world_size > 1:
            words += ["-m", "torch.distributed.run", "--standalone"]
            words += [f"--nproc_per_node={self.world_size}"]
        start = 1 + len(list(self.folder.glob(f"{run_id}.stopped-*")))
        words += [str(self.folder / side / "train_gpt.py"), "--track", self.track]
        words += ["--run-id", run_id, "--seed", str(stats.seed_of(self.code, self.batch, number))]
        words += ["--run-of", f"{self.batch}:{number}/{self.count}:{start}"]
        is_open = config_of(self.scripts[side], self.track).get("dtype") == "auto"
        return words + ["--dtype", self.dtype] * (is_open and self.dtype != "")

    def completed(self, side, run_id):
        """The Run of a complete log, or None."""
        try:
            return parse_log(self.logs / run_id / "log.txt", self.scripts[side])
        except RecordError:
            return None

    def run(self, side, number, run_id):
        """The Run, made now. One that began and did not end is put aside, and counts as a start."""
        folder = self.logs / run_id
        log = folder / "log.txt"
        if log.exists() and f"\n{START}\n" in log.read_text(errors="replace"):
            folder.rename(self.folder / f"{run_id}.stopped-{time.time_ns()}")
        shutil.rmtree(folder, ignore_errors=True)
        console = self.folder / "console.txt"
        began = time.time()
        with open(console, "w") as file:
            process = subprocess.Popen(
                self.command(side, number, run_id),
                cwd=self.repository.root,
                stdout=file,
                stderr=file,
                start_new_session=True,  # which a terminal's Ctrl-C does not reach
                env={**os.environ, "PYTHONPATH": str(self.repository.root)},
            )
        try:
            status = self.wait(process)
        finally:
            process.terminate()  # which does nothing to one that has ended
            process.wait()
            for checkpoint in folder.glob("*.pt*"):  # hundreds of MiB, which nothing here reads
                checkpoint.unlink()
        run = self.completed(side, run_id)
        said = console.read_text(errors="replace").strip().splitlines()
        last = said[-1][:200] if said else "nothing"
        ended = f"run {run_id} ended with exit status {status}: {last!r}"
        require(run and not status, f"{ended}; {console} has more; the same command goes on")
        check_clock(run, began, time.time())
        return run

    def wait(self, process):
        """The exit status of a run, which the first Ctrl-C does not end."""
        try:
            return process.wait()
        except KeyboardInterrupt:
            self.is_over = True
            print("\nwill end after this run; Ctrl-C again ends it now, which costs a restart")
            return process.wait()

    def run_all(self):
        """{(side, number): Run} of all runs, in order, made now unless they are there. RecordError
        where another experiment runs, where no record can come of a run, or the user asked to
        stop."""
        self.logs.mkdir(exist_ok=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
        runs = {}
        with open(self.logs / "records.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RecordError("another `python -m records` is making runs here") from None
            self.prepare()
            order = [("a", number) for number in range(1, self.count + 1)]
            if len(self.scripts) > 1:  # drawn, so that nothing that the machine does can follow it
                order = stats.order_of_pairs(self.code, self.batch, self.count)
            for place, (side, number) in enumerate(order, 1):
                run_id = f"{self.name}-{number:02d}{side if len(self.scripts) > 1 else ''}"
                print(f"run {place}/{len(order)} {run_id} ... ", end="", flush=True)
                run = self.completed(side, run_id) or self.run(side, number, run_id)
                print(f"val_loss {run.val_loss:.5f} time {run.train_time_ms / 1000:.1f} s")
                runs[side, number] = run
                self.dtype = self.dtype or run.dtype
                for name in MACHINE:
                    check_one(name, runs.values())
                if self.kind != "compare":
                    check_run(run, self.repository.rules[self.track])
                goes_on = not self.is_over or place == len(order)
                ended = f"ended after {place} of {len(order)} runs, as asked"
                require(goes_on, f"{ended}; the same command makes the others")
        return runs


def check_clock(run, began, ended):
    """A run cannot train longer than its process lived, from `began` to `ended` in seconds since
    1970, nor start outside of that."""
    is_inside = began - 1 <= run.started.timestamp() <= ended + 1
    is_right = is_inside and run.train_time_ms <= 1000 * (ended - began) + 1
    said = f"{run.train_time_ms / 1000:.1f} s of training, started at {run.started:%H:%M:%S}"
    lived = f"its process lived for {ended - began:.1f} s"
    require(is_right, f"run {run.run}: its log says {said}, but {lived}: its clock is wrong")


# ----- run and ab


def working_script(repository, track):
    """The text of train_gpt.py. RecordError where no record could come of its runs: that is told
    before hours of runs, not after."""
    source = own_script(repository, track)
    check_source(source)
    check_fixed(config_of(source, track), repository.rules[track])
    return source


def run(repository, options):
    """The runs of the working script that are still missing, one after another: for a record that
    claims no gain in time. Prints as it goes."""
    track, count = options.track, options.runs
    scripts = {"a": working_script(repository, track)}
    experiment = Experiment(repository, "run", scripts, track, options.world_size or 1, count)
    runs = list(experiment.run_all().values())
    print(f"\n{loss_text(repository, runs)}\n\n{CLAIM.format(track)}")


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
    apart = [run.val_loss - base.val_loss for run, base in zip(a, b, strict=True)]
    mean, low, high = stats.interval(apart)
    speed = speed_figures(a, b)
    print(f"""
A: train_gpt.py
B, in the place of a parent: {label}
both on {hardware_of(a[0])}

{render.run_table(a, b)}

time of A in relation to B: {render.percent(speed["relative"])}
that A is faster: {stats.p_text(speed["p"])}
loss A - B: {mean:+.5f} ({low:+.5f} to {high:+.5f})

{loss_text(repository, a)}""")
    if not other:
        print(f"\n{CLAIM.format(track)}")


def loss_text(repository, runs):
    """The mean loss of runs, and how far it is shown to be below the target."""
    losses = [run.val_loss for run in runs]
    mean, _ = stats.mean_and_std(losses)
    target = repository.rules[runs[0].track].target_loss
    p = stats.p_text(stats.p_below(losses, target))
    return f"mean loss {mean:.5f}; that it is below the target {target:g}: {p}"


# ----- reproduce


def reproduce(repository, options):
    """Run a record's code with fresh seeds, judge its runs, and print whether their losses reach
    the target."""
    record = repository.at_path(options.folder)
    require(not record.failures, f"{record.folder}: does not pass verify")
    first = record.runs[0]
    consent(f"{options.runs} runs of the code of {record.name}", options.yes)
    world_size = options.world_size or first.world_size
    scripts = {"a": record.source}
    track = record.track
    experiment = Experiment(repository, "reproduce", scripts, track, world_size, options.runs)
    runs = list(experiment.run_all().values())
    took, _ = stats.mean_and_std([run.train_time_ms for run in runs])
    claimed = record.result["train_time_ms"]["mean"]
    print(f"""
time: {render.seconds(took)} s on {hardware_of(runs[0])}
claimed: {render.seconds(claimed)} s on {hardware_of(first)}
{loss_text(repository, runs)}
What no run shows: whether the code reads validation text, slows its clock or fakes its gates.
Read `python -m records diff` for that.""")
