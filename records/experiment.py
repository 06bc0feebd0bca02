"""`run`, `ab` and `reproduce`, the commands that train, and `submit`, which makes a record of runs.

The runs of an experiment lie at logs/<experiment>-<number><side>, its scripts and what was stopped
in logs/<experiment>. Its name holds the hashes of its scripts and the number of runs, so that the
same command goes on where an earlier one was interrupted. A script has one experiment that counts.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from records import render, stats
from records.files import LOG_LIMIT, RecordError, about, read_text, require
from records.judge import DTYPES, MACHINE, check_fixed, check_one, check_records, check_run
from records.log import END_OF_CODE, START, parse_log, split_log
from records.record import FOLDER, SCHEMA, Repository, figures, read_script, speed_figures
from records.source import changed_lines, config_of, sha256_of


def own_script(repository, track):
    """The text of train_gpt.py, which is no record of the track yet."""
    known = ", ".join(repository.rules)
    require(track in repository.rules, f"--track {ascii(track)}: is none of {known}")
    source = read_script(repository.root / "train_gpt.py")
    for record in repository.records[track]:
        is_own = record.source != source
        require(is_own, f"train_gpt.py is the code of {record.name}; change it first")
    return source


def batches_of(repository, track, source):
    """The names of the experiments with a script on a track whose runs count."""
    code = sha256_of(source)[:8]
    folders = (repository.root / "logs").glob(f"*-{track}-{code}*-n*")
    names = {re.sub(r"(-n\d+)-.*", r"\1", path.name) for path in folders}
    return sorted(name for name in names if name.startswith(("run-", "ab-")))


def consent(what, yes):
    """Say that foreign code is about to run; RecordError unless the user agrees."""
    print(f"This executes {what} on this machine, with your rights.")
    is_agreed = yes or sys.stdin.isatty() and input("Type yes to go on: ").strip() == "yes"
    require(is_agreed, "not confirmed: nothing was run; read what `diff` shows, or add --yes")


class Experiment:
    """Runs of scripts, by side, under logs/. Those of batch 1 may be a record of side a's script;
    the runs of two scripts are pairs."""

    def __init__(self, repository, kind, scripts, track, world_size, count, batch=1):
        codes = [sha256_of(source) for source in scripts.values()]
        self.name = "-".join([kind, track, *(code[:8] for code in codes), f"n{count}"])
        self.repository = repository
        self.rules = repository.rules[track]
        self.scripts = scripts
        self.code = codes[0]
        self.track = track
        self.world_size = world_size
        self.count = count
        self.batch = batch
        self.logs = repository.root / "logs"
        self.folder = self.logs / self.name
        self.is_over = False  # as the user asked
        # What scripts say of the dtype, and what they are told that leave it to the machine.
        self.dtypes = {side: self.dtype_of(source) for side, source in scripts.items()}
        named = {*self.dtypes.values()} & {*DTYPES}
        hint = "another dtype alone is no idea"
        require(len(named) <= 1, f"the scripts name different dtypes; {hint}")
        self.dtype = "".join(named)

    def dtype_of(self, source):
        """The dtype of a script, which none of the older scripts leaves to the machine."""
        is_older = sha256_of(source) in self.rules.get("older_scripts", ())
        return "" if is_older else config_of(source, self.track).get("dtype")

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
        if self.dtypes[side] == "auto" and self.dtype:
            words += ["--dtype", self.dtype]
        return words

    def completed(self, side, run_id):
        """What a complete log says, or None."""
        try:
            return parse_log(self.logs / run_id / "log.txt", self.scripts[side])
        except RecordError:
            return None

    def run(self, side, number, run_id):
        """Make a run. One that began and did not end is put aside, and counts as a start."""
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
        said = console.read_text(errors="replace").strip().splitlines() or ["nothing"]
        ended = f"run {run_id} ended with exit status {status}: {said[-1][:200]!r}"
        require(run and not status, f"{ended}; {console} has more; the same command goes on")
        # A run cannot train longer than its process lived, nor start outside of that.
        lived = time.time() - began
        is_inside = -1 <= run.started.timestamp() - began <= lived + 1
        is_right = is_inside and run.train_time_ms <= 1000 * lived + 1
        said = f"{run.train_time_ms / 1000:.1f} s of training, started at {run.started:%H:%M:%S}"
        require(
            is_right, f"its log says {said}, but it lived for {lived:.1f} s: its clock is wrong"
        )
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
        """[the runs of side a, those of side b], made now unless they are there. RecordError where
        another experiment runs, where no record can come of a run, or the user asked to stop."""
        self.logs.mkdir(exist_ok=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
        with open(self.logs / "records.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RecordError("another `python -m records` is making runs here") from None
            begun = batches_of(self.repository, self.track, self.scripts["a"])
            others = ", ".join(name for name in begun if name != self.name and self.batch == 1)
            hint = "finish these, or change it"
            require(not others, f"this script has the runs of {others} in logs/; {hint}")
            for side, source in self.scripts.items():
                (self.folder / side).mkdir(parents=True, exist_ok=True)
                (self.folder / side / "train_gpt.py").write_text(source)
            runs = self.run_missing()
        sides = [[run for place, run in runs.items() if place[0] == side] for side in self.scripts]
        return [sorted(side, key=lambda run: run.counter) for side in sides]

    def run_missing(self):
        """{(side, number): run} of all runs."""
        order = [("a", number) for number in range(1, self.count + 1)]
        if len(self.scripts) > 1:  # drawn, so that nothing that the machine does can follow it
            order = stats.order_of_pairs(self.code, self.batch, self.count)
        runs = {}
        for side, number in order:
            run_id = f"{self.name}-{number:02d}{side if len(self.scripts) > 1 else ''}"
            print(f"run {len(runs) + 1}/{len(order)} {run_id} ... ", end="", flush=True)
            run = self.completed(side, run_id) or self.run(side, number, run_id)
            print(f"val_loss {run.val_loss:.5f} time {run.train_time_ms / 1000:.1f} s")
            runs[side, number] = run
            self.dtype = self.dtype or run.dtype
            check_one(MACHINE, runs.values())
            check_run(run, self.track, self.rules)
            goes_on = not self.is_over or len(runs) == len(order)
            ended = f"ended after {len(runs)} of {len(order)} runs, as asked"
            require(goes_on, f"{ended}; the same command makes the others")
        return runs


def ab(repository, options):
    """Make what is missing of the runs that a record needs: of the working script in pairs with the
    last record's; or, as `run`, of the former alone, for a record that claims no gain."""
    track, count = options.track, options.runs
    source = own_script(repository, track)
    # That no record could come of these runs is told before hours of runs, not after.
    check_fixed(config_of(source, track), track, repository.rules[track])
    scripts = {"a": source}
    world_size = options.world_size or 1
    if options.command == "ab":
        require(count <= stats.MOST_PAIRS, f"--runs {count}: pairs are at most {stats.MOST_PAIRS}")
        tip = repository.tip(track)
        hint = "make the first one with `python -m records run`"
        require(tip, f"track {track} has no record to compare with; {hint}")
        added, removed = changed_lines(tip.source, source)
        print(f"train_gpt.py differs from {tip.name}: {added} lines added, {removed} removed.")
        consent(f"{2 * count} runs of train_gpt.py and of the code of {tip.name}", options.yes)
        world_size = options.world_size or tip.runs[0].world_size
        scripts["b"] = tip.source
    experiment = Experiment(repository, options.command, scripts, track, world_size, count)
    runs, *others = experiment.run_all()
    print_losses(repository, runs)
    for base in others:
        apart = [run.val_loss - other.val_loss for run, other in zip(runs, base, strict=True)]
        mean, low, high = stats.interval(apart)
        speed = speed_figures(runs, base)
        print(
            f"In pairs with {tip.name} the loss differs by {mean:+.5f} ({low:+.5f} to {high:+.5f})"
        )
        print(f"and time by {render.percent(speed['relative'])}; less: {stats.p_text(speed['p'])}.")
    print(f"To claim it: python -m records submit --track {track} --name NAME --by WHO")


def reproduce(repository, options):
    """Run a record's code with seeds of the day, judge its runs, and print whether their losses
    reach the target."""
    folder = Path(options.folder).absolute()
    record = next((record for record in repository.all if record.folder == folder), None)
    require(record, f"{options.folder}: is no folder of a record")
    consent(f"{options.runs} runs of the code of {record.name}", options.yes)
    batch = int(f"{datetime.now(UTC):%Y%m%d}")
    scripts = {"a": record.source}
    world_size = options.world_size or record.runs[0].world_size
    words = (f"reproduce-{batch}", scripts, record.track, world_size, options.runs, batch)
    (runs,) = Experiment(repository, *words).run_all()
    print_losses(repository, runs)
    claimed = render.seconds(record.result["train_time_ms"]["mean"])
    print(f"The record says {claimed} s, on {record.result['hardware']}.")
    print("What no run shows: whether the code reads validation text, slows its clock or fakes its")
    print("gates. Read `python -m records diff` for that.")


def print_losses(repository, runs):
    """Print the mean time and loss of runs, and how far that is shown to be below the target."""
    took, _ = stats.mean_and_std([run.train_time_ms for run in runs])
    print(f"\nMean time {render.seconds(took)} s, on {runs[0].hardware};")
    losses = [run.val_loss for run in runs]
    mean, _ = stats.mean_and_std(losses)
    target = repository.rules[runs[0].track]["config"]["target_loss"]
    p = stats.p_text(stats.p_below(losses, target))
    print(f"mean loss {mean:.5f}; that it is below the target {target:g}: {p}.")


def submit(repository, options):
    """Make a record of the runs of the working script, and print its page, which describes its pull
    request as well. Its folder stays only if it is good."""
    name = f"{datetime.now(UTC):%Y-%m-%d}_{options.name}"
    hint = "up to 60 letters, digits and '-', no '-' first"
    require(FOLDER.fullmatch(name), f"--name {ascii(options.name)}: {hint}")
    folder = repository.home / options.track / name
    require(not folder.exists(), f"{folder} exists; choose another --name")
    source = own_script(repository, options.track)
    logs = logs_of(repository, options.track, source)
    try:
        lay_out(repository, folder, logs, source, options.by)
        check_records(Repository(repository.root, repository.rules))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    print((folder / "README.md").read_text())
    print(f"made {folder.relative_to(repository.root)}; write why it works into its")
    print("README.md, then: python -m records table && python -m records verify")


def logs_of(repository, track, source):
    """The paths of the logs of a script's runs on a track. A script has one batch."""
    found = batches_of(repository, track, source)
    shown = f"{len(found)} batches of runs of train_gpt.py ({sha256_of(source)[:8]}) on {track}"
    hint = "`python -m records ab` makes the one that is due"
    require(len(found) == 1, f"{shown} lie in logs/: {', '.join(found)}; {hint}")
    return sorted((repository.root / "logs").glob(f"{found[0]}-*/log.txt"))


def lay_out(repository, folder, logs, source, authors):
    """Write a record's folder: the script, thin logs, and the figures that follow from them."""
    tip = repository.tip(folder.parent.name)
    folder.mkdir(parents=True)
    for path in logs:
        run_id = path.parent.name
        part = folder / ("baseline" if run_id.endswith("b") else "logs")
        part.mkdir(parents=True, exist_ok=True)
        text = read_text(path, LOG_LIMIT)
        with about(path):
            _, lines = split_log(text)
        (part / f"{run_id}.txt").write_text("\n".join([END_OF_CODE, *lines, ""]))
    (folder / "train_gpt.py").write_text(source)
    (folder / "README.md").write_text("")
    known = {"schema": SCHEMA, "parent": tip.name if tip else None}
    (folder / "result.json").write_text(json.dumps(known))
    write_figures(repository, repository.load(folder), tip, authors)


def write_figures(repository, record, parent, authors):
    """Write a record's result.json and README.md, the latter with the reasons that it has."""
    found = figures(record, repository.rules[record.track], parent, authors)
    why = render.why_of(record.readme) or render.WHY
    (record.folder / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    (record.folder / "README.md").write_text(render.record_readme(record, found, why))
