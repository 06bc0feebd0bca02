"""`run`, `ab`, `rehearse` and `reproduce`, which train, and `submit`, which makes a record."""

import fcntl
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from records import render, stats
from records.files import LIMITS, RecordError, about, boards_of, read_text, require, write_text
from records.judge import (
    check_fixed,
    check_gpus,
    check_one,
    check_own,
    check_records,
    check_run,
    untold_seconds,
)
from records.log import END_OF_CODE, START, parse_log, split_log
from records.record import FOLDER, FORM, Repository, add_baseline, gain_of, parent_of, read_script
from records.source import changed_lines, config_of, sha256_of

RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}  # a cluster sets them for another program
LIVED = "lived.txt"  # beside a run's log: the seconds from its process' start to its end


REHEARSAL = 0  # the batch of runs that count for nothing; a record's is 1, others are days
KINDS = {1: "", REHEARSAL: "rehearsal-"}  # how the names of their runs begin


def own_script(repository, track, is_form=False):
    """The text of train_gpt.py, of which a record of the board can come. That none can is told
    before hours of runs, not after."""
    rules = repository.rules_of(track)
    source = read_script(repository.root / "train_gpt.py")
    config = config_of(source, rules["track"])
    for record in repository.records[track]:
        check_own(record, source, is_form)
    check_fixed(config, track, rules)
    steps, val_every = config["steps"], config["val_every"] or config["steps"]
    count = 2 + (steps - 1) // config["log_every"] + (steps - 1) // val_every
    hint = f"lower log_every={config['log_every']}"
    require(count >= LIMITS.losses, f"it logs {count} losses, {LIMITS.losses} are due; {hint}")
    return source


def folder_of(repository, track, source, batch=1):
    """The folder of an experiment; its runs lie beside it."""
    kind = KINDS.get(batch, f"reproduce-{batch}-")
    return repository.root / "logs" / f"{kind}{track}-{sha256_of(source)[:8]}"


def environment_of(root):
    """A run's environment: this process's, without another launcher's ranks. The repository comes
    before what is imported from PYTHONPATH, torch perhaps."""
    environment = {name: value for name, value in os.environ.items() if name not in RANKS}
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    places = [str(root), *(os.path.abspath(place) for place in places if place)]
    return {**environment, "PYTHONPATH": os.pathsep.join(places)}


def execute(words, place, folder, log, source):
    """Make a run. One that began without a known end is put aside, and counts as a start."""
    run_id = log.parent.name
    if log.is_file() and f"\n{START}\n" in log.read_text("utf-8", "replace"):
        log.parent.rename(folder / f"{run_id}.stopped-{time.time_ns()}")
    shutil.rmtree(log.parent, ignore_errors=True)
    start = 1 + len(list(folder.glob(f"{run_id}.stopped-*")))
    words = [*words, "--run-of", f"{place}:{start}", "--run-id", run_id]
    root = folder.parent.parent
    environment = environment_of(root)
    console = folder / "console.txt"
    began = time.time()
    with open(console, "w") as file:
        process = subprocess.Popen(words, cwd=root, env=environment, stdout=file, stderr=file)
    try:
        status = process.wait()
    finally:
        process.terminate()  # which does nothing to one that has ended
        process.wait()
        for checkpoint in log.parent.glob("*.pt*"):  # hundreds of MiB, which nothing here reads
            checkpoint.unlink()

    said = console.read_text("utf-8", "replace").strip().splitlines() or ["nothing"]
    ended = f"run {run_id} ended with exit status {status}: {said[-1][:200]!r}"
    require(not status, f"{ended}; {console} has more; the same command goes on")
    run = parse_log(log, source)
    # A run cannot train longer than its process lived, nor start outside of that.
    lived = run.lived = time.time() - began
    took = run.train_time_ms / 1000
    is_right = -1 <= run.started.timestamp() - began <= lived + 1 and took <= lived + 0.001
    said = f"{took:.1f} s of training, started at {run.started:%H:%M:%S}"
    require(is_right, f"its log says {said}, but it lived for {lived:.1f} s: its clock is wrong")
    write_text(log.with_name(LIVED), f"{lived:.1f}")
    return run


def keep_plan(folder, scripts, count, batch):
    """Write an experiment's plan and its scripts. RecordError where a record has another plan."""
    due = f"{count} runs of {' and of '.join(map(sha256_of, scripts.values()))}"
    plan = folder / "plan.txt"
    begun = read_text(plan) if plan.exists() and batch == 1 else due
    require(begun == due, f"{plan} has {begun}; finish these, or change the script")
    write_text(plan, due)
    for side, source in scripts.items():
        (folder / side).mkdir(exist_ok=True)
        write_text(folder / side / "train_gpt.py", source)


def make_runs(repository, track, scripts, count, world_size, batch=1):
    """[the runs of side a, those of side b], which are pairs, made now unless they are there."""
    rules = repository.rules[track]
    name = rules["track"]  # of the trainer's, which several boards may share
    check_gpus(world_size, track, rules)
    is_claim = len(scripts) > 1 and batch == 1
    least, most = (LIMITS.pairs_least, LIMITS.pairs) if is_claim else (2, LIMITS.logs)
    require(least <= count <= most, f"--runs {count}: takes {least}, for statistics, to {most}")
    folder = folder_of(repository, track, scripts["a"], batch)
    folder.mkdir(parents=True, exist_ok=True)
    code = sha256_of(scripts["a"])
    dtypes = sorted({str(config_of(source, name).get("dtype")) for source in scripts.values()})
    require(len(dtypes) == 1, f"dtypes are {' and '.join(dtypes)}; pairs run in one")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    begin = [sys.executable, *(launcher if world_size > 1 else [])]

    # The order is drawn, so that nothing that the machine does can follow it.
    order = [place for place in stats.order_of_pairs(code, batch, count) if place[0] in scripts]
    sides = {side: [] for side in scripts}
    with open(folder.parent / "records.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "wait for it, or end it"
            raise RecordError(f"another `python -m records` is making runs here; {hint}") from None
        except OSError as error:
            print(f"note: {lock.name}: {error.strerror}; call it once at a time", file=sys.stderr)
        keep_plan(folder, scripts, count, batch)
        for done, (side, number) in enumerate(order, 1):
            words = [*begin, str(folder / side / "train_gpt.py"), "--track", name]
            words += ["--seed", str(stats.seed_of(code, batch, number))]
            log = folder.with_name(f"{folder.name}-{number:02d}{side}") / "log.txt"
            print(f"run {done}/{len(order)} {log.parent.name} ... ", end="", flush=True)
            place = f"{batch}:{number}/{count}"
            try:
                run = parse_log(log, scripts[side])
                run.lived = float(read_text(log.with_name(LIVED)))
            except RecordError:
                run = execute(words, place, folder, log, scripts[side])
            shown = f"{log.parent}: ran with world size {run.world_size}, not {world_size}"
            other = "change the script" if batch == 1 else f"delete logs/{folder.name}-*"
            hint = f"go on with --world-size {run.world_size}, or {other}"
            require(run.world_size == world_size, f"{shown}; {hint}")
            print(f"val_loss {run.val_loss:.5f} time {run.train_time_ms / 1000:.1f} s")
            sides[side].append(run)
            check_one(LIMITS.machine, sum(sides.values(), []))
            check_run(run, track, rules, is_proof=side == "a" and batch <= 1)
    return list(sides.values())


def run(repository, options):
    """Make runs of the working script alone, for the first record of a board."""
    track = options.track
    source = own_script(repository, track)
    require(not repository.records[track], f"{track} has records; `ab` makes pairs with the last")
    (runs,) = make_runs(repository, track, {"a": source}, options.runs, options.world_size or 1)
    p = print_means(repository.rules[track], runs, "train_gpt.py")
    print_claim(track, p <= stats.ALPHA)


def pairs(repository, options, batch, is_form=False):
    """(runs of the working script, those of the last record's, that record, the p that the loss is
    below the target), made in pairs and told."""
    track = options.track
    tip = repository.tip(track, is_form)
    least = LIMITS.usual_pairs * is_form
    require(options.runs >= least, f"--runs {options.runs}: a change of form takes {least} pairs")
    source = own_script(repository, track, is_form)
    print(difference(repository.root, tip.name, tip.source, source))
    scripts = {"a": source, "b": tip.source}
    world_size = options.world_size or tip.runs[0].world_size
    runs, base = make_runs(repository, track, scripts, options.runs, world_size, batch)
    loss_p = print_means(repository.rules[track], runs, "train_gpt.py")
    print_means(repository.rules[track], base, f"{tip.name}, in pairs with it")
    return runs, base, tip, loss_p


def ab(repository, options):
    """Make a record's runs: in pairs with the last record's script."""
    runs, base, _, loss_p = pairs(repository, options, 1, options.form)
    gain, p = gain_of(runs, base)
    print(f"time differs by {render.percent(gain)}; that it is less: {stats.p_text(p)}")
    is_shown = gain[2] <= LIMITS.form_slower if options.form else p <= stats.ALPHA
    print_claim(options.track, is_shown and loss_p <= stats.ALPHA, " --form" * options.form)


def print_claim(track, is_shown, form=""):
    if is_shown:
        words = f"--track {track} --name NAME --by WHO{form}"
        print(f"To claim it: python -m records submit {words}")
    else:
        print("It is no record. Other contestants read records/NOTES.md: add a row to it.")


def git(root, *words):
    """What git says in a folder; nothing where it fails."""
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True).stdout


def difference(root, name, before, source):
    """How many lines of a record's script a script changes, and how many since it left main: the
    others are main's own changes since that record."""
    said = "train_gpt.py differs from {}: {} lines added, {} removed"
    said = said.format(name, *changed_lines(before, source))
    for branch in ("main", "origin/main"):
        base = git(root, "merge-base", branch, "HEAD").strip()
        if base:
            own = changed_lines(git(root, "show", f"{base}:train_gpt.py"), source)
            hint = f"of these, {{}} and {{}} since {branch}, as `diff --since {branch}` shows"
            return f"{said}; {hint.format(*own)}; the others are main's own."
    return f"{said}."


def rehearse(repository, options):
    """Make pairs that count for nothing, and forecast what a record's pairs would show."""
    runs, base, tip, _ = pairs(repository, options, REHEARSAL)
    print(*forecast(runs, base, tip), sep="\n")


def forecast(runs, base, tip):
    """Lines on what a record's pairs would show, by runs in pairs with those of the last record."""
    count = LIMITS.usual_pairs
    gain, _ = gain_of(runs, base)
    known = [(runs, base), *[(tip.runs, tip.baseline)] * bool(tip.baseline)]
    spread = stats.pooled([stats.differences(*map(times_of, sides)) for sides in known])
    least = stats.least_gain(spread, count)
    minutes = count * statistics.fmean(run.lived for run in runs + base) / 30
    losses = [[run.val_loss for run in side] for side in (runs, tip.runs)]
    room = tip.target - statistics.fmean(losses[0])
    if room < stats.least_gain(stats.pooled(losses), count):
        verdict = (
            f"No: they would not show the loss below the target, from which it is {-room:+.4f}."
        )
    elif -gain[0] < least:
        verdict = "No: they would not show this gain. Keep it for a larger change, or leave it."
    else:
        verdict = "Yes: they would show it, by `python -m records ab`."
    return (
        f"time differs by {render.percent(gain)}, in {len(runs)} pairs that count for nothing",
        f"{count} pairs: {minutes:.0f} minutes; at this spread they show {100 * least:.1f} %",
        verdict,
    )


def times_of(runs):
    return [run.train_time_ms for run in runs]


def reproduce(repository, options):
    """Run a record's code with seeds of the day, and print what comes of it."""
    from scipy.stats import ttest_ind  # slow to import

    record = repository.tip(options.track) if not options.folder else None
    if not record:
        folder = Path(options.folder).absolute()
        known = {known.folder: known for known in repository.all}
        record = known.get(folder) or repository.load(folder)
    rules = repository.rules_of(record.track)
    print(f"{options.runs} runs of the code of {record.name}, with your rights on this machine")
    world_size = options.world_size or record.runs[0].world_size
    batch = int(f"{datetime.now(UTC):%Y%m%d}")
    scripts = {"a": record.source}
    (runs,) = make_runs(repository, record.track, scripts, options.runs, world_size, batch)
    print_means(rules, record.runs, record.name)
    p = print_means(rules, runs, "now")
    print_wall(record, runs)
    losses = ([run.val_loss for run in side] for side in (runs, record.runs))
    is_worse = ttest_ind(*losses, equal_var=False, alternative="greater").pvalue <= stats.ALPHA
    if p <= stats.ALPHA:
        print("Reproduced: the loss is below the target.")
    elif is_worse:
        print("NOT reproduced: the loss is above the record's.")
    else:
        print("Open: so few runs show neither a loss below the target nor one above the record's.")
    if runs[0].hardware != record.runs[0].hardware:
        print("Their times do not compare: machine, processes or dtype are others.")
    print("Whether the code cheats, no run shows; read `python -m records diff` for that.")


def print_wall(record, runs):
    """Print how long runs took by the wall and by their clocks; a warning where these leave out
    more than those of the record."""
    told = [run.train_time_ms / 1000 for run in runs]
    untold = [run.lived - seconds for run, seconds in zip(runs, told, strict=True)]
    seconds = f"{sum(told) + sum(untold):.1f} s, by their clocks {sum(told):.1f} s"
    print(f"\nby the wall they took {seconds}")
    then = untold_seconds(sorted(record.runs + record.baseline, key=lambda run: run.started))
    more = statistics.median(untold) - statistics.median(then or [math.inf])
    if more > LIMITS.untold and runs[0].cuda == "none":
        print(f"WARNING: a clock leaves out {more:.1f} s more of a run than in the record's logs.")


def print_means(rules, runs, name):
    """Print the mean time and loss of runs, and how far that is shown to be below the target;
    returns the p of this."""
    took, _ = stats.mean_and_std([run.train_time_ms / 1000 for run in runs])
    losses = [run.val_loss for run in runs]
    loss, _ = stats.mean_and_std(losses)
    target = rules["config"]["target_loss"]
    p = stats.p_below(losses, target)
    print(f"\n{name}, on {runs[0].hardware}: {took:.1f} s, mean loss {loss:.5f}")
    print(f"loss below the target {target:g}: {stats.p_text(p)}")
    return p


def submit(repository, options):
    """Make a record of the working script's runs, which stays if it is good, and print its page."""
    name = f"{datetime.now(UTC):%Y-%m-%d}_{options.name}"
    authors = os.fsencode(options.by).decode(errors="replace")  # whatever the locale
    hint = "up to 60 letters, digits and '-', no '-' first"
    require(FOLDER.fullmatch(name), f"--name {ascii(options.name)}: {hint}")
    folder = repository.home / options.track / name
    require(not folder.exists(), f"{folder} exists; choose another --name")
    source = own_script(repository, options.track, options.form)
    rules = repository.home / "rules.json"
    kept = read_text(rules) if rules.is_file() else None
    try:
        record = lay_out(repository, folder, source, authors, options.form)
        boards = repository.rules
        if not boards[options.track]["config"]["val_sha256"]:
            boards = propose_hash(rules, boards[options.track]["track"], record.runs[0].val_sha256)
        check_records(Repository(repository.root, boards))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if kept:
            write_text(rules, kept)
        raise
    print(read_text(folder / "README.md"))
    print(f"made {folder.relative_to(repository.root)}; write why it works into its README.md,")
    print("then: python -m records table && python -m records verify")


def propose_hash(path, track, val_sha256):
    """Write the hash of a track's validation tokens into rules.json; returns the new boards."""
    rules = json.loads(read_text(path))
    rules["boards"][track]["config"]["val_sha256"] = val_sha256
    write_text(path, f"{json.dumps(rules, indent=1)}\n")
    print(f"{path}: val_sha256 of {track} is what these runs say; whoever merges it compares it")
    return boards_of(rules)


def lay_out(repository, folder, source, authors, is_form=False):
    """Write a record's folder: the script, its thin logs, and the figures that follow from them;
    returns the record."""
    track = folder.parent.name
    older = repository.records[track]
    runs = folder_of(repository, track, source)
    logs = sorted(runs.parent.glob(f"{runs.name}-*/log.txt"))
    words = f"{'ab' if older else 'run'} --track {track}{' --form' * is_form}"
    require(logs, f"there are no runs {runs}-*; make them with `python -m records {words}`")
    for path in logs:
        part = folder / ("baseline" if path.parent.name.endswith("b") else "logs")
        part.mkdir(parents=True, exist_ok=True)
        text = read_text(path)
        with about(path):
            _, lines = split_log(text)
        write_text(part / f"{path.parent.name}.txt", "\n".join([END_OF_CODE, *lines, ""]))
    write_text(folder / "train_gpt.py", source)
    page = f"By {authors}.\n\n{FORM}\n" if is_form else f"By {authors}.\n"
    write_text(folder / "README.md", page)
    record = repository.load(folder)
    add_baseline(record, parent_of(record, older))
    write_text(folder / "README.md", render.record_readme(record, render.WHY))
    return record
