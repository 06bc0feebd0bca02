"""`verify`: what a record must fulfil. Everything is read, nothing from a record is executed.

Each check raises a RecordError that says what is wrong with a run, or with a record.
"""

import filecmp
import itertools
import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import numpy as np

from records import render, report, stats
from records.files import RULES, RecordError, read_text, require, require_same, require_same_items
from records.log import Point
from records.record import AUTHORS, FOLDER, Failure, chain, figures, paths_in
from records.source import (
    DTYPES,
    check_source,
    config_of,
    micro_batches_of,
    sha256_of,
    training_tokens,
    without_place,
)

GATES = ("causal", "normalised", "local", "unmoved")
MOST_RESTARTS = 1  # of a side: a machine may fail, but runs are not to be picked
FASTEST = 0.001  # of a run's mean time a step: what no stretch of its steps can stay below
IDLE = 0.1  # of a run's time: what a process on a CPU works at least
MOST_MFU = 500  # per cent of the product that is measured beside the run, and may be slow
COMMON = 3  # losses that two runs must have at the same steps, so that they can be compared
# What prose has none of: HTML, headings, tables, and lines under a heading, quoted ones too.
ODD_PROSE = re.compile(
    r"<[A-Za-z/!?]|^[ >\t*+-]*(?:#|\|)|^[ >\t]*(?:-{2,}|=+)[ \t]*$", re.MULTILINE
)
MACHINE = ("device", "world_size", "torch", "cuda", "triton", "dtype")  # one for all runs
CHOOSING = ("attention", "compile", "dtype", "float8")  # fields that back ends follow from


def judge(record, repository):
    """Every Failure of one record."""
    if record.failures:
        return record.failures
    rules = repository.rules[record.track]
    record.try_to(record.folder / "train_gpt.py", check_source, record.source)
    for run in [*record.runs, *record.baseline]:
        record.try_to(run.path, check_run, run, rules)
    if not record.failures:
        record.try_to(record.folder, check_record, record, repository)
    return record.failures


# ----- one run


def check_run(run, rules):
    """One log against the rules of its track, and against the script that it ran."""
    require_same("its track", run.track, rules.name)
    check_fixed(run.config, rules)
    check_configuration(run)
    check_validity(run, rules)
    check_times(run)
    check_memory(run)


def check_fixed(config, rules):
    """A configuration has what the rules fix of its track, whose validation tokens are known by
    their hash."""
    hint = "propose that of a run's validity line, which all will share"
    require(rules.val_sha256, f"rules.json has no val_sha256 of {rules.name} yet; {hint}")
    for name, wanted in rules.fixed.items():
        require_same(name, config.get(name, "not there"), wanted, ", the track's is ")


def check_configuration(run):
    """The logged configuration is that of the track in the script, and the tokens follow from
    it."""
    found = without_place(run.config)
    wanted = without_place(config_of(run.source, run.track))
    if wanted.get("dtype") == "auto":
        shown = f"dtype is {ascii(run.dtype)[:60]} in the config line"
        require(found.get("dtype") in DTYPES, f"{shown}, where a log has what it became")
        wanted["dtype"] = run.dtype
    require_same_items(found, wanted, " in the config line, in the script it is ")
    require_same("tokens", run.tokens, training_tokens(run.config), "; the schedule takes ")
    counts = [count for _, count in micro_batches_of(run.config)]
    divides = run.world_size and not any(count % run.world_size for count in counts)
    require(divides, f"world size {run.world_size} does not divide the micro-batches of each step")


def check_validity(run, rules):
    """All gates passed, over the track's validation tokens and the corpus' own shards."""
    gates = GATES[: 3 if run.code_sha256 in RULES["scripts_before_unmoved"] else 4]
    expected = {"val_tokens": str(rules.val_tokens), "val_sha256": rules.val_sha256}
    expected |= dict.fromkeys(gates, "ok")
    require_same_items(run.validity, expected, ", must be ", "validity: ")
    if rules.manifest_sha256:
        require_same("data manifest", run.manifest, rules.manifest_sha256, ", the track's is ")
    require_same("shards", run.shards, "ok")


def cores_of(run):
    """The cores of the processor that a run was made on, None of a GPU."""
    found = re.search(r" x(\d{1,4})$", run.device)
    return int(found[1]) if found and run.cuda == "none" else None


def check_times(run):
    """Times and rates that a run can have."""
    mean = run.train_time_ms / run.steps
    for before, point in itertools.pairwise([Point(0, 0.0, 0), *run.curves["train"]]):
        took = point.time_ms - before.time_ms
        least = FASTEST * mean * (point.step - before.step) - 0.5  # times are rounded to 1 ms
        shown = f"steps {before.step} to {point.step} took {took} ms"
        require(took >= least, f"{shown}, of {mean:.1f} ms each; no part of a run is so fast")
    rate = 1000 * run.tokens / run.train_time_ms
    room = 1 + 0.6 * rate / run.train_time_ms  # the rate is rounded, and the time to 1 ms
    is_rate = abs(run.speed - rate) <= room
    require(is_rate, f"tokens_per_s is {run.speed}; tokens and time make {rate:.0f}")
    require(run.mfu <= MOST_MFU, f"mfu is {run.mfu} %, at most {MOST_MFU} can be")
    cores = cores_of(run)
    can_be = not cores or IDLE <= run.cpu_time_ms / run.train_time_ms <= 1.1 * cores
    shown = f"{run.cpu_time_ms} ms of {cores} processors in {run.train_time_ms} ms"
    require(can_be, f"cpu_time: {shown}")


def check_memory(run):
    """On a CPU, parameters and tables are held in memory, two bytes a value or more."""
    values = sum(map(int, re.findall(r"=(\d+)", run.sizes.replace(",", ""))))
    least = 2 * values / run.world_size / 2**20
    fits = run.memory_mib >= least or not cores_of(run)
    require(fits, f"peak_memory {run.memory_mib} MiB; its values take {least:.0f} MiB")


# ----- a record


def check_record(record, repository):
    """All that several of its runs, or several records, show."""
    rules = repository.rules[record.track]
    check_name(record)
    parent = check_lineage(record, repository)
    check_one_machine(record, parent)
    check_batch(record)
    check_order(record, parent)
    found = figures(record, rules, parent, record.result.get("by"))
    check_claims(record, found)
    check_written(record, found)


def check_name(record):
    """A record's folder is named by its day, which has come, and its name."""
    try:
        day = date.fromisoformat(record.date if FOLDER.fullmatch(record.name) else "")
    except ValueError:
        words = "is named <YYYY-MM-DD>_<Name>, Name of letters, digits and '-'"
        raise RecordError(f"a record's folder {words}") from None
    tomorrow = datetime.now(UTC).date() + timedelta(days=1)  # clocks differ
    require(day <= tomorrow, f"is dated {record.date}, which is yet to come")


def check_lineage(record, repository):
    """The parent's Record, or None: the last of the chain of records that are older."""
    others = [other for other in repository.records[record.track] if other.name != record.name]
    older = [other for other in others if other.age < record.age]
    code = sha256_of(record.source)
    for other in older:
        is_own = sha256_of(other.source) != code
        require(is_own, f"train_gpt.py is the code of {other.name}; a record has code of its own")
    last = next(reversed(chain(older)), None)
    words = "; a record is measured against the last of the track's chain before it, which is "
    require_same("its parent", record.parent, last and last.name, words)
    return last


def check_one_machine(record, parent):
    """Times and losses are those of one kind of machine, of one type of numbers, and of one way to
    compute."""
    runs = [*record.runs, *record.baseline]
    for name in MACHINE:
        check_one(name, runs)
    sides = [record.runs, record.baseline]
    kinds = [[side[0].config.get(name) for name in CHOOSING] for side in sides if side]
    for side in [runs] if len(kinds) == 1 or kinds[0] == kinds[1] else sides:
        check_one("backends", side)
    check_one("sizes", record.runs)
    check_one("sizes", [*record.baseline, *(parent.runs if parent else [])])


def check_one(name, runs):
    """Some runs agree in what their logs say of something."""
    values = sorted({str(getattr(run, name)) for run in runs})
    shown = ", ".join(ascii(value)[:60] for value in values[:3])
    require(len(values) <= 1, f"{name} differs between runs: {shown}; one of each is asked")


def check_batch(record):
    """All declared runs of both sides are there, none dropped, none added, few restarted; and each
    has the seed of its place."""
    declared = record.runs[0].declared
    code = sha256_of(record.source)
    for part, runs in (("logs", record.runs), ("baseline", record.baseline)):
        places = [(run.batch, run.counter, run.declared) for run in runs]
        due = [(1, counter, declared) for counter in range(1, declared + 1)]
        shown = f"{declared} runs were declared, {part} has {[run.counter for run in runs]}"[:120]
        require(places == due or not runs, f"{shown}; every run of the one batch counts, once")
        restarts = sum(run.start - 1 for run in runs)
        is_rare = restarts <= MOST_RESTARTS and all(run.start for run in runs)
        require(is_rare, f"{restarts} runs of {part} were started again, at most {MOST_RESTARTS}")
        for run in runs:
            seed = stats.seed_of(code, 1, run.counter)
            shown = f"{run.run} has seed {run.seed}; by its code and place it has {seed}"
            require(run.seed == seed, shown)


def check_order(record, parent):
    """Runs were started one after the other, those of pairs in the order that was drawn for them,
    after their parent's record, and before the day of their own."""
    planned = record.runs
    if record.baseline:
        sides = {"a": record.runs, "b": record.baseline}
        order = stats.order_of_pairs(sha256_of(record.source), 1, len(record.runs))
        planned = [sides[side][counter - 1] for side, counter in order]
    for run, following in itertools.pairwise(planned):
        apart = (following.started - run.started).total_seconds()
        shown = f"{following.run} was started {apart:.0f} s after {run.run}, which comes before it"
        seconds = run.train_time_ms / 1000
        # Starts are whole seconds.
        require(apart >= seconds - 1, f"{shown} and took {seconds:.0f} s")
    first, last = planned[0], planned[-1]
    day = f"{last.started:%Y-%m-%d}"
    require(day <= record.date, f"{last.run} was started on {day}, after the record's date")
    is_later = parent is None or first.started >= max(run.started for run in parent.runs)
    require(is_later, f"{first.run} was started before the parent's record was made")


def check_claims(record, found):
    """The target is reached, and the gain in time is shown against a parent that reaches it."""
    loss = found["loss"]
    target = loss["target"]
    shown = f"mean loss {loss['mean']:.5f}, {stats.p_text(loss['p'])}"
    require(loss["p"] <= stats.ALPHA, f"target {target:g} not reached: {shown}")
    speed = found["speed"]
    if speed is None:
        return
    shown = f"{render.percent(speed['relative'])}, {stats.p_text(speed['p'])}"
    is_faster = speed["p"] <= stats.ALPHA
    require(is_faster, f"not shown to be faster than {record.parent}: {shown}")
    mean, _ = stats.mean_and_std([run.val_loss for run in record.baseline])
    require(mean < target, f"the parent's runs miss the target {target:g}: mean loss {mean:.5f}")


def check_written(record, expected):
    """result.json and README.md are what `submit` writes for the logs, but for the reasons and who
    had the idea."""
    by = expected["by"]
    is_name = isinstance(by, str) and AUTHORS.fullmatch(by)
    require(is_name, f"result.json: by is {ascii(by)[:60]}; names of 100 letters at most are due")
    require_same_items(record.result, expected, ", the logs say ", "result.json: ")
    why = render.why_of(record.readme)
    is_same = record.readme == render.record_readme(record, expected, why)
    require(is_same, "README.md: only what stands under `## Why` may differ from what submit wrote")
    odd = ODD_PROSE.search(why)
    shown = odd and ascii(odd[0])
    require(not odd, f"README.md: {shown} under `## Why`; prose has no HTML, tables or headings")


# ----- all records


def copies(records, limit):
    """Failures of runs whose losses never differ by more than `limit` from those of an older run at
    the steps that both logged. Both runs of a pair share a seed, and may agree."""
    records = sorted(records, key=lambda record: record.age)
    runs = [(record, run) for record in records for run in [*record.runs, *record.baseline]]
    curves = []
    for _, run in runs:
        points = [(kind, point) for kind, curve in run.curves.items() for point in curve]
        curves.append({(kind, point.step): point.loss for kind, point in points})
    columns = sorted({place for curve in curves for place in curve})
    losses = np.array([[curve.get(place, np.nan) for place in columns] for curve in curves])
    failures = []
    for number, (_, run) in enumerate(runs):
        apart = np.abs(losses[:number] - losses[number])
        is_near = np.all((apart <= limit) | np.isnan(apart), axis=1)
        is_near &= np.sum(~np.isnan(apart), axis=1) >= COMMON
        for home, other in [runs[place] for place in np.flatnonzero(is_near)]:
            if run.seed != other.seed or run.code_sha256 == other.code_sha256:
                shown = f"has the losses of {other.run} of {home.name}, to {limit:g} in every step"
                failures.append(Failure(run.path, f"{shown}; a run counts once"))
                break
    return failures


def merged_failures(repository):
    """Failures of what was merged, and is not there byte for byte; and of links on the way to
    it."""
    for track in ["", *repository.rules]:
        folder = repository.root / "records" / track
        if folder.is_symlink():
            return [Failure(folder, "is a symbolic link; records lie in a folder")]
    if not repository.merged:
        return []
    failures = []
    own = repository.merged / "records"
    for path in filter(Path.is_file, sorted(own.glob("*/[0-9]*/**/*"))):
        other = repository.root / "records" / path.relative_to(own)
        is_linked = any(map(Path.is_symlink, [other, *other.parents[:2]]))
        if is_linked or not other.is_file() or not filecmp.cmp(path, other, shallow=False):
            failures.append(Failure(other, "is not what was merged; records stay as they are"))
    return failures


def strangers(repository):
    """Failures of folders that look like a track's or a record's, and that nothing judges."""
    home = repository.root / "records"
    tracks = [repository.track_folder(track) for track in repository.rules]
    known = [*tracks, home / "__pycache__"]
    beside = [path for path in paths_in(home) if path.is_dir() and path not in known]
    hidden = [path for track in tracks for path in paths_in(track) if path.name.startswith(".")]
    reason = "is no track's folder and no record's, and so nothing judges it"
    return [Failure(path, reason) for path in beside + hidden]


def judge_records(repository):
    """Every Failure of the repository's records; only of files, where some cannot be read."""
    failures = merged_failures(repository) + strangers(repository)
    failures += [failure for record in repository.all for failure in record.failures]
    if failures:
        return list(dict.fromkeys(failures))
    for track, records in repository.records.items():
        failures += [failure for record in records for failure in judge(record, repository)]
        failures += copies(records, repository.rules[track].copy_loss)
    return failures


def judge_all(repository):
    """Every Failure of the repository: its records, and where all of those are good their reasons,
    and what is drawn from them."""
    failures = judge_records(repository)
    if failures:
        return failures
    for record in repository.all:
        why = render.why_of(record.readme)
        if why.strip() == render.WHY or len(why.split()) < 5:
            reason = "does not say why it works; write that under `## Why`"
            failures.append(Failure(record.folder / "README.md", reason))
    path = repository.readme
    try:
        for path, wanted in drawn_files(repository).items():
            is_current = read_text(path) == wanted
            require(is_current, "is not current; run `python -m records table`")
    except RecordError as error:
        failures.append(Failure(path, str(error)))
    return failures


def drawn_files(repository):
    """{path: text} of what `table` writes: the page with the leaderboards, and the staircases."""
    files = {}
    text = read_text(repository.readme)
    files[repository.readme] = render.with_leaderboards(text, repository.records)
    for track, records in repository.records.items():
        if len(chain(records)) > 1:
            path = repository.root / "records" / f"{track}.svg"
            files[path] = report.staircase(track, chain(records))
    return files
