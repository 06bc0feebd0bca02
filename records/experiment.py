"""`run`, `ab` and `reproduce`, which train, and `submit`, which makes a record of runs."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from records import render, stats
from records.files import LIMITS, RecordError, about, read_text, require
from records.judge import check_fixed, check_gpus, check_one, check_records, check_run
from records.log import END_OF_CODE, START, parse_log, split_log
from records.record import FOLDER, Repository, add_baseline, gain_of, read_script
from records.source import changed_lines, config_of, sha256_of


def own_script(repository, track):
    """The text of train_gpt.py, of which a record of the board can come. That none can is told
    before hours of runs, not after."""
    rules = repository.rules_of(track)
    source = read_script(repository.root / "train_gpt.py")
    same = [record.name for record in repository.records[track] if record.source == source]
    require(not same, f"train_gpt.py is the code of {', '.join(same)}; change it first")
    check_fixed(config_of(source, rules["track"]), track, rules)
    return source


def folder_of(repository, track, source, batch=1):
    """The folder of an experiment. Its batch is 1 if it counts; its runs lie beside its folder."""
    again = f"reproduce-{batch}-" if batch > 1 else ""
    return repository.root / "logs" / f"{again}{track}-{sha256_of(source)[:8]}"


def execute(words, place, folder, log, source):
    """Make a run. One that began and did not end is put aside, and counts as a start."""
    run_id = log.parent.name
    if log.is_file() and f"\n{START}\n" in log.read_text(errors="replace"):
        log.parent.rename(folder / f"{run_id}.stopped-{time.time_ns()}")
    shutil.rmtree(log.parent, ignore_errors=True)
    start = 1 + len(list(folder.glob(f"{run_id}.stopped-*")))
    words = [*words, "--run-of", f"{place}:{start}", "--run-id", run_id]
    root = folder.parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
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

    said = console.read_text(errors="replace").strip().splitlines() or ["nothing"]
    ended = f"run {run_id} ended with exit status {status}: {said[-1][:200]!r}"
    require(not status, f"{ended}; {console} has more; the same command goes on")
    run = parse_log(log, source)
    # A run cannot train longer than its process lived, nor start outside of that.
    lived = time.time() - began
    took = run.train_time_ms / 1000
    is_right = -1 <= run.started.timestamp() - began <= lived + 1 and took <= lived + 0.001
    said = f"{took:.1f} s of training, started at {run.started:%H:%M:%S}"
    require(is_right, f"its log says {said}, but it lived for {lived:.1f} s: its clock is wrong")
    return run


def keep_plan(folder, scripts, count):
    """Write an experiment's plan and its scripts. RecordError where another plan is there."""
    due = f"{count} runs of {' and of '.join(map(sha256_of, scripts.values()))}"
    plan = folder / "plan.txt"
    begun = read_text(plan) if plan.exists() else due
    require(begun == due, f"{plan} has {begun}; finish these, or change the script")
    plan.write_text(due)
    for side, source in scripts.items():
        (folder / side).mkdir(exist_ok=True)
        (folder / side / "train_gpt.py").write_text(source)


def make_runs(repository, track, scripts, count, world_size, batch=1):
    """[the runs of side a, those of side b], which are pairs, made now unless they are there."""
    rules = repository.rules[track]
    name = rules["track"]  # of the trainer's, which several boards may share
    check_gpus(world_size, track, rules)
    most = LIMITS.pairs if len(scripts) > 1 else LIMITS.logs
    require(2 <= count <= most, f"--runs {count}: takes 2, for statistics, to {most}")
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
        with about("another `python -m records` is making runs here"):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        keep_plan(folder, scripts, count)
        for done, (side, number) in enumerate(order, 1):
            words = [*begin, str(folder / side / "train_gpt.py"), "--track", name]
            words += ["--seed", str(stats.seed_of(code, batch, number))]
            log = folder.with_name(f"{folder.name}-{number:02d}{side}") / "log.txt"
            print(f"run {done}/{len(order)} {log.parent.name} ... ", end="", flush=True)
            place = f"{batch}:{number}/{count}"
            try:
                run = parse_log(log, scripts[side])
            except RecordError:
                run = execute(words, place, folder, log, scripts[side])
            print(f"val_loss {run.val_loss:.5f} time {run.train_time_ms / 1000:.1f} s")
            sides[side].append(run)
            check_one(LIMITS.machine, sum(sides.values(), []))
            check_run(run, track, rules)
    return list(sides.values())


def run(repository, options):
    """Make runs of the working script alone, for the first record of a board."""
    track = options.track
    source = own_script(repository, track)
    require(not repository.records[track], f"{track} has records; `ab` makes pairs with the last")
    (runs,) = make_runs(repository, track, {"a": source}, options.runs, options.world_size or 1)
    print_means(repository.rules[track], runs, "train_gpt.py")
    print(f"To claim it: python -m records submit --track {track} --name NAME --by WHO")


def ab(repository, options):
    """Make a record's runs: in pairs with the last record's script."""
    track = options.track
    tip = repository.tip(track)
    source = own_script(repository, track)
    added, removed = changed_lines(tip.source, source)
    print(f"train_gpt.py differs from {tip.name}: {added} lines added, {removed} removed.")
    scripts = {"a": source, "b": tip.source}
    world_size = options.world_size or tip.runs[0].world_size
    runs, base = make_runs(repository, track, scripts, options.runs, world_size)
    print_means(repository.rules[track], runs, "train_gpt.py")
    print_means(repository.rules[track], base, f"{tip.name}, in pairs with it")
    gain, p = gain_of(runs, base)
    print(f"time differs by {render.percent(gain)}; that it is less: {stats.p_text(p)}")
    print(f"To claim it: python -m records submit --track {track} --name NAME --by WHO")


def reproduce(repository, options):
    """Run a record's code with seeds of the day, and print what comes of it."""
    if options.folder:
        record = repository.load(Path(options.folder).absolute())
    else:
        record = repository.tip(options.track)
    rules = repository.rules_of(record.track)
    print(f"{options.runs} runs of the code of {record.name}, with your rights on this machine")
    world_size = options.world_size or record.runs[0].world_size
    batch = int(f"{datetime.now(UTC):%Y%m%d}")
    scripts = {"a": record.source}
    (runs,) = make_runs(repository, record.track, scripts, options.runs, world_size, batch)
    for made, name in (record.runs, record.name), (runs, "now"):
        print_means(rules, made, name)
    print("Whether the code cheats, no run shows; read `python -m records diff` for that.")


def print_means(rules, runs, name):
    """Print the mean time and loss of runs, and how far that is shown to be below the target."""
    took, _ = stats.mean_and_std([run.train_time_ms / 1000 for run in runs])
    losses = [run.val_loss for run in runs]
    loss, _ = stats.mean_and_std(losses)
    target = rules["config"]["target_loss"]
    print(f"\n{name}, on {runs[0].hardware}: {took:.1f} s, mean loss {loss:.5f}")
    print(f"loss below the target {target:g}: {stats.p_text(stats.p_below(losses, target))}")


def submit(repository, options):
    """Make a record of the working script's runs, which stays if it is good, and print its page."""
    name = f"{datetime.now(UTC):%Y-%m-%d}_{options.name}"
    hint = "up to 60 letters, digits and '-', no '-' first"
    require(FOLDER.fullmatch(name), f"--name {ascii(options.name)}: {hint}")
    folder = repository.home / options.track / name
    require(not folder.exists(), f"{folder} exists; choose another --name")
    source = own_script(repository, options.track)
    try:
        lay_out(repository, folder, source, options.by)
        check_records(Repository(repository.root, repository.rules))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    print((folder / "README.md").read_text())
    print(f"made {folder.relative_to(repository.root)}; write why it works into its README.md,")
    print("then: python -m records table && python -m records verify")


def lay_out(repository, folder, source, authors):
    """Write a record's folder: the script, its thin logs, and the figures that follow from them."""
    track = folder.parent.name
    parent = repository.records[track][-1] if repository.records[track] else None
    runs = folder_of(repository, track, source)
    logs = sorted(runs.parent.glob(f"{runs.name}-*/log.txt"))
    require(logs, f"there are no runs {runs}-*; make them with `python -m records ab`")
    for path in logs:
        part = folder / ("baseline" if path.parent.name.endswith("b") else "logs")
        part.mkdir(parents=True, exist_ok=True)
        text = read_text(path)
        with about(path):
            _, lines = split_log(text)
        (part / f"{path.parent.name}.txt").write_text("\n".join([END_OF_CODE, *lines, ""]))
    (folder / "train_gpt.py").write_text(source)
    (folder / "README.md").write_text(f"By {authors}.\n")
    record = repository.load(folder)
    add_baseline(record, parent)
    (folder / "README.md").write_text(render.record_readme(record, render.WHY))
