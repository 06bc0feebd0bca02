"""`verify`: what a record must fulfil. Nothing of it is executed; the first RecordError ends it."""

import filecmp
import itertools
import math
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from records import render, stats
from records.files import RecordError, about, read_text, require, require_same
from records.log import PLAIN, due_losses
from records.record import CACHE, FOLDER, chain, end_of, figures, paths_in
from records.source import config_of, sha256_of

DTYPES = {"bfloat16", "float32"}  # what a script may make of the dtype `auto`
PLACE = ("seed", "run_id", "run_of")  # fields that say as which run a script ran, and not what
GATES = ("causal", "normalised", "local", "unmoved")  # the older scripts lack the last
CLOCKS = timedelta(minutes=10)  # by which clocks differ
WAIT = timedelta(days=31)  # so long runs may be over before they make a record
IDLE = 0.1  # of a run's time: what a process on a CPU works at least
LEAST_MFU = 0.05  # per cent, of a processor, where logs have tenths; small models on GPUs have none
MOST_MFU = 500  # per cent of the product that is measured beside the run, and may be slow
COMPARED = 100  # losses of a run that are compared with other runs', the first ones
NEAR = 0.75  # of these losses: a run is another one's copy if so many agree
AUTHORS = re.compile(PLAIN + r"[^\W_](?:[^\W_]|[ .,'&()@/-]){0,99}")
# What prose has none of: letters that nobody sees; Markdown of HTML, links, code, formulas and
# emphasis; and, where a line begins, headings and lines under one, quoted ones too.
ODD_PROSE = re.compile(
    r"(?m)[\t\xad\u200b-\u200f\u2060-\u206f\ufeff\U000e0000-\U000e0fff]"
    r"|<[A-Za-z/!?]|[\[\]`|$\\]|://|www\.|\w@|&#?\w{1,40};|\S[*~]|[*]\S|\b_|_\b"
    r"|^[ >*+\d.)-]*#|^[ >]*[-=_*][-=_* ]*$"
)
MACHINE = ("device", "world_size", "torch", "cuda", "triton", "dtype")  # one for all runs
CHOOSING = ("attention", "compile", "dtype")  # fields that back ends follow from


# ----- one run


def check_run(run, track, rules):
    """One log against the rules of its track, and against the script that it ran."""
    with about(run.path):
        data = {"its track": run.track, "data manifest": run.manifest, "shards": run.shards}
        manifest = rules["manifest_sha256"] or run.manifest
        require_same(data, {"its track": track, "data manifest": manifest, "shards": "ok"})

        over = f"{end_of(run):%Y-%m-%d %H:%M:%S}"
        require(end_of(run) <= datetime.now(UTC) + CLOCKS, f"was over at {over}, which is to come")
        check_fixed(run.config, track, rules)
        is_older = run.code_sha256 in rules.get("older_scripts", ())
        if not is_older:
            check_configuration(run)

        tokens, text = run.config["val_tokens"], run.config["val_sha256"]
        gates = dict.fromkeys(GATES[:3] if is_older else GATES, "ok")
        with about("validity"):
            require_same(run.validity, {**gates, "val_tokens": str(tokens), "val_sha256": text})
        check_rates(run)


def check_fixed(config, track, rules):
    """A configuration has what the rules fix of its track, whose validation tokens are known."""
    fixed = rules["config"]
    hint = "propose that of the validity line"
    require(fixed["val_sha256"], f"rules.json has no val_sha256 of {track} yet; {hint}")
    found = {name: config[name] for name in fixed if name in config}
    require_same(found, fixed, ", the track's is ")
    due_losses(config)


def check_configuration(run):
    """The logged configuration is that of the track in the script."""
    script = config_of(run.source, run.track)
    wanted = {**script, **{name: run.config[name] for name in PLACE}}
    if script.get("dtype") == "auto":
        hint = "in the config line, where a log has what it became"
        require(run.dtype in DTYPES, f"dtype is {ascii(run.dtype)[:60]} {hint}")
        wanted["dtype"] = run.dtype
    require_same(run.config, wanted, " in the config line, in the script it is ")


def check_rates(run):
    """Tokens, rates, processor time and memory that a run can have in its time."""
    took = run.train_time_ms
    size = run.config.get("micro_batch_tokens")
    unit = size * run.world_size if type(size) is int else 0
    shown = f"tokens is {run.tokens}, world size {run.world_size}"
    require(unit > 0 and run.tokens % unit == 0, f"{shown}; each takes whole micro-batches")
    fewest, most = batches_of(run.config)
    rate = 1000 * run.tokens / took
    room = 1 + 0.6 * rate / took  # both were rounded
    bounds = {"number of micro-batches": (fewest, run.tokens / size, most)}
    bounds["tokens_per_s"] = rate - room, run.speed, rate + room
    cores = re.search(r" x(\d{1,4})$", run.device)
    shown = f"device is {ascii(run.device)}"
    require(cores or run.cuda != "none", f"{shown}; a processor's ends with its cores, as in x8")
    bounds["mfu"] = LEAST_MFU if cores else 0, run.mfu, MOST_MFU
    if cores:
        bounds["cpu_time"] = IDLE * took, run.cpu_time_ms, 1.1 * int(cores[1]) * took
        # Parameters and tables are held in memory, two bytes a value or more.
        values = sum(map(int, re.findall(r"=(\d+)", run.sizes.replace(",", ""))))
        bounds["peak_memory"] = 2 * values / run.world_size / 2**20, run.memory_mib, math.inf
    for name, (low, value, high) in bounds.items():
        require(low <= value <= high, f"{name} is {value}; {low:.0f} to {high:.0f} can be")


def batches_of(config):
    """The least and the largest number of micro-batches that the steps of a run can take.

    Where a stage begins is rounded to a step. Older and odd schedules do not say how large it is.
    """
    steps = config["steps"]
    stages = config.get("stages")
    try:
        starts = [float(stage["start"]) for stage in stages]
        counts = [int(stage["micro_batches"]) for stage in stages]
    except (ArithmeticError, KeyError, TypeError, ValueError):
        return steps, math.inf
    lengths = [end - start for start, end in zip(starts, [*starts[1:], 1.0], strict=True)]
    changes = [abs(after - before) for before, after in itertools.pairwise(counts)]
    expected = steps * sum(map(math.prod, zip(counts, lengths, strict=True)))
    room = sum(changes) + 0.01
    return expected - room, expected + room


# ----- a record


def check_name(record):
    """A record's folder is named by its day, when its runs were over, and its name."""
    require(FOLDER.fullmatch(record.name), "is not named <YYYY-MM-DD>_<Letters-and-digits>")
    latest = min(datetime.now(UTC) + CLOCKS, record.over + WAIT)
    is_between = f"{record.over:%Y-%m-%d}" <= record.date <= f"{latest:%Y-%m-%d}"
    hint = f"before the end of its runs, after today, or {WAIT.days} days after them"
    require(is_between, f"is dated {record.date}, {hint}")


def check_record(record, others, rules):
    """All that several of its runs, or several records of its track, show."""
    older = [other for other in others if other.age < record.age]
    twin = next((other.name for other in older if other.source == record.source), None)
    require(not twin, f"train_gpt.py is the code of {twin}; a record has code of its own")
    titles = {other.title.casefold(): other.name for other in older}
    alike = titles.get(record.title.casefold())
    require(not alike, f"is named like {alike}; a record has a name of its own")
    parent = next(reversed(chain(older)), None)
    words = "; a record is measured against the last of the track's chain before it, which is "
    require_same({"its parent": record.parent}, {"its parent": parent and parent.name}, words)

    check_machine(record, parent)
    check_batch(record.runs, "logs", record)
    check_batch(record.baseline, "baseline", record)
    check_order(record, parent)

    found = figures(record, rules, parent, record.result.get("by"))
    check_claims(record, found)
    check_written(record, found)


def check_machine(record, parent):
    """One kind of machine made all runs; back ends differ only with the fields that choose them."""
    runs = record.runs + record.baseline
    check_one(MACHINE, runs)

    sides = [side for side in (record.runs, record.baseline) if side]
    kinds = [[side[0].config.get(name) for name in CHOOSING] for side in sides]
    for side in [runs] if kinds[0] == kinds[-1] else sides:
        check_one(["backends"], side)

    check_one(["sizes", "tokens"], record.runs)
    check_one(["sizes", "tokens"], record.baseline + (parent.runs if parent else []))


def check_one(names, runs):
    """Runs agree in what their logs say of some things."""
    for name in names:
        values = sorted({str(getattr(run, name)) for run in runs})
        shown = ", ".join(ascii(value)[:60] for value in values[:3])
        require(len(values) <= 1, f"{name} differs between runs: {shown}; one of each is asked")


def check_batch(runs, part, record):
    """All declared runs of a part of a record are there, none dropped, none added, few restarted;
    and each has the seed of its place."""
    declared = record.runs[0].declared
    names = {run.run.casefold() for run in record.runs + record.baseline}
    is_each = len(names) == len(record.runs + record.baseline)
    require(is_each, "names of its runs are the same, or differ in the case of letters alone")
    check_one(["batch", "declared"], record.runs + record.baseline)
    found = [run.counter for run in runs]
    is_whole = runs == [] or runs[0].batch == 1 and found == list(range(1, declared + 1))
    shown = f"{declared} runs were declared, {part} has {found}"[:120]
    require(is_whole, f"{shown}; every run of the one batch counts, once")

    restarts = sum(run.start - 1 for run in runs)
    is_rare = restarts <= 1 and all(run.start for run in runs)
    require(is_rare, f"{restarts} runs of {part} were started again, at most 1 may be")

    for run in runs:
        seed = stats.seed_of(sha256_of(record.source), 1, run.counter)
        require(run.seed == seed, f"{run.run} has seed {run.seed}; its place has {seed}")


def check_order(record, parent):
    """Runs were started after the parent's record, one after the other in the order drawn."""
    sides = {"a": record.runs, "b": record.baseline}
    order = stats.order_of_pairs(sha256_of(record.source), 1, len(record.runs))
    planned = [sides[side][counter - 1] for side, counter in order if sides[side]]

    for run, following in itertools.pairwise(planned):
        took = timedelta(milliseconds=run.train_time_ms - 1000)  # starts are whole seconds
        shown = f"{following.run} was started before the end of {run.run}"
        require(following.started >= run.started + took, f"{shown}, which comes before it")

    is_later = parent is None or planned[0].started + timedelta(seconds=1) >= parent.over
    require(is_later, f"{planned[0].run} was started before the parent's record was made")


def check_claims(record, found):
    """The target is reached, and the gain in time is shown against a parent that reaches it."""
    loss, speed = found["loss"], found["speed"]
    shown = f"mean loss {loss['mean']:.5f}, {stats.p_text(loss['p'])}"
    require(loss["p"] <= stats.ALPHA, f"target {loss['target']:g} not reached: {shown}")
    if speed:
        shown = f"{render.percent(speed['relative'])}, {stats.p_text(speed['p'])}"
        require(speed["p"] <= stats.ALPHA, f"not shown to be faster than {record.parent}: {shown}")
        mean, _ = stats.mean_and_std([run.val_loss for run in record.baseline])
        require(mean < loss["target"], f"the parent's runs miss the target: mean loss {mean:.5f}")


def check_written(record, expected):
    """result.json and README.md are what `submit` writes for the logs, but for the reasons and who
    had the idea."""
    by = expected["by"]
    is_name = isinstance(by, str) and AUTHORS.fullmatch(by)
    require(is_name, f"result.json: by is {ascii(by)[:60]}; names of 100 letters at most are due")
    with about("result.json"):
        require_same(record.result, expected, ", the logs say ")

    why = render.why_of(record.readme)
    is_same = record.readme == render.record_readme(record, expected, why)
    require(is_same, "README.md: only what stands under `## Why` may differ from what submit wrote")
    odd = ODD_PROSE.search(why)
    shown = odd and ascii(odd[0])
    require(not odd, f"README.md: {shown} under `## Why`; what is due there is plain prose")


# ----- all records


def check_copies(records, limit):
    """No run has the losses of an older one, to `limit` in nearly all of those at the steps that
    both logged and at the end. Both runs of a pair share a seed, and may agree."""
    records = sorted(records, key=lambda record: record.age)
    runs = [run for record in records for run in record.runs + record.baseline]
    losses = {run.path: losses_of(run) for run in runs}
    for run, other in itertools.combinations(reversed(runs), 2):
        found, others = losses[run.path], losses[other.path]
        shared = found.keys() & others.keys()
        near = sum(abs(found[place] - others[place]) <= limit for place in shared)
        is_pair = run.seed == other.seed and run.code_sha256 != other.code_sha256
        if near >= NEAR * len(shared) and not is_pair:
            shown = f"has the losses of {other.run}, to {limit:g} at {near} of {len(shared)} places"
            raise RecordError(f"{run.path}: {shown}; a run counts once")


def losses_of(run):
    """{place: loss} of a run, by which it is compared with others. The end is a place of its own,
    since runs may have other numbers of steps."""
    places = [place for place in run.losses if place[1] < run.steps]
    found = {place: run.losses[place] for place in places[:COMPARED]}
    return {**found, **{kind: points[-1].loss for kind, points in run.curves.items()}}


def check_folders(repository):
    """What was merged is there, byte for byte, no link leads to it, and each folder is a record's
    or a track's, so that all of them are judged."""
    home = repository.home
    tracks = [home / track for track in repository.rules]
    for folder in [home, *tracks]:
        require(not folder.is_symlink(), f"{folder}: is a symbolic link; records lie in a folder")

    if repository.merged:
        own = repository.merged / "records"
        for path in filter(Path.is_file, sorted(own.glob("*/[0-9]*/**/*"))):
            other = home / path.relative_to(own)
            if CACHE in path.parts:
                continue
            is_linked = any(map(Path.is_symlink, [other, *other.parents[:2]]))
            is_same = not is_linked and other.is_file() and filecmp.cmp(path, other, shallow=False)
            require(is_same, f"{other}: is not what was merged; records stay as they are")

    for path in paths_in(home):
        is_known = not path.is_dir() or path in tracks
        require(is_known, f"{path}: is no track's folder, and so nothing judges it")


def check_records(repository):
    """RecordError with the first thing that is wrong with the repository's records."""
    check_folders(repository)
    for track, records in repository.records.items():
        rules = repository.rules[track]
        for record in records:
            for run in record.runs + record.baseline:
                check_run(run, track, rules)
            with about(record.folder):
                check_name(record)
                is_late = rules.get("closed") and repository.merged and record.age[0]
                require(not is_late, f"is new, and the track {track} is closed")
        for record in records:
            with about(record.folder):
                check_record(record, records, rules)
        if records:
            check_copies(records, rules["copy_loss"])


def check_pages(repository):
    """Each record says why it works, and what is drawn of all of them is current."""
    for record in repository.all:
        why = render.why_of(record.readme)
        with about(record.folder / "README.md"):
            says = why.strip() != render.WHY and len(why.split()) >= 5
            require(says, "does not say why it works; write that under `## Why`")
    for path, wanted in render.pages_of(repository).items():
        require(read_text(path) == wanted, f"{path}: is not current; run `python -m records table`")
