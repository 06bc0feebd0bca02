"""`verify`: what a record must fulfil. Nothing of it is executed; the first RecordError ends it."""

import filecmp
import itertools
import math
import re
import statistics
import unicodedata
from datetime import UTC, datetime, timedelta
from pathlib import Path

from records import render, stats
from records.files import FORMS, LIMITS, RULES, about, read_text, require, require_same
from records.record import FOLDER, NOBODYS, paths_in
from records.source import config_of, is_same_code, sha256_of

AUTHORS = re.compile(FORMS["authors"])
CLOCKS = timedelta(minutes=LIMITS.clock_minutes)
ODD_PROSE = re.compile("|".join(FORMS["odd_prose"]), re.MULTILINE)


# ----- one run


def check_run(run, board, rules, record="", is_proof=True):
    """One log against the rules of its board, and against the script that it ran. record: its name,
    if older gates may have judged it. is_proof: whether the script must log what they ask for."""
    track = rules["track"]
    with about(run.path):
        check_fixed(run.config, board, rules)
        due = {"track": track, "manifest": rules["manifest_sha256"] or run.manifest}
        due["val_tokens"] = rules["config"]["val_tokens"]
        due["val_sha256"] = rules["config"]["val_sha256"] or run.val_sha256
        require_same({name: getattr(run, name) for name in due}, due)
        is_past = run.over <= datetime.now(UTC) + CLOCKS
        require(is_past, f"was over at {run.over:%Y-%m-%d %H:%M:%S}, which is to come")
        check_gpus(run.world_size, board, rules)
        is_gpu = run.cuda != "none" or "gpus" not in rules
        require(is_gpu, f"ran without a GPU, and the board {board} is one of GPUs")
        place = f"{run.batch}:{run.counter}/{run.declared}:{run.start}"
        told = {"run_id": run.run, "track": run.track, "run_of": place, "seed": run.seed}
        wanted = {**config_of(run.source, track), **told}
        require_same(run.config, wanted, " in the config line, in the script or other lines it is ")
        check_rates(run)
        if record not in RULES["older_gates"].get(run.gates, ()):
            check_gates(run, rules, is_proof)


def check_gates(run, rules, is_proof):
    """What today's gates say of a run: the text that they looked at is the board's, at enough
    places, and the model knew nothing ahead."""
    hint = "rules.json has those of the records/gates.py that may judge a run"
    require(run.gates in RULES["gates_sha256"], f"gates have the sha256 {run.gates}; {hint}")
    due = {"text": run.val_sha256, "scored": run.val_tokens, "eot": run.config.get("eot_token")}
    due |= {"eot": rules["config"].get("eot_token", due["eot"])}
    require_same({name: vars(run).get(name) for name in due}, due, ", of the board it is ")
    shown = f"gates have cut at {run.cuts} places, {LIMITS.cuts} are needed"
    require(run.cuts >= LIMITS.cuts, shown)
    require(run.gates_time > 0, "gates took no time")
    has_all = hasattr(run, "untrained") and math.isfinite(run.control)
    hint = "the trainer of the main branch logs both"
    require(has_all or not is_proof, f"the untrained model's loss or a control is missing; {hint}")
    least = math.log(run.eot + 1) - LIMITS.untrained
    loss = vars(run).get("untrained", least)
    shown = f"the untrained model has a loss of {loss:.5f}, {least:.5f} are the least without"
    require(loss >= least, f"{shown} what it must learn")


def check_fixed(config, board, rules):
    """A configuration has what the rules of its board fix. A hash may be missing on either side:
    the gates tell that of the text."""
    fixed = rules["config"]
    fixed = {name: fixed[name] for name in fixed if "" not in (fixed[name], config.get(name))}
    found = {name: config[name] for name in fixed if name in config}
    require_same(found, fixed, ", the track's is ")


def check_gpus(world_size, board, rules):
    """As many processes, one a GPU, as a board takes that says how many."""
    least, most = rules.get("gpus", (1, math.inf))
    takes = f"{board} takes {least} to {most} GPUs"
    hint = "--world-size gives their number, --track another board"
    require(least <= world_size <= most, f"world size {world_size}: {takes}; {hint}")


def check_rates(run):
    """Rates, processor time and memory that a run can have in its time."""
    took = run.train_time_ms
    rate = 1000 * run.tokens / took
    room = 1 + 0.6 * rate / took  # both were rounded
    bounds = {"tokens_per_s": (rate - room, run.speed, rate + room)}
    if run.cuda == "none":
        cores = re.search(r" x(\d{1,4})$", run.device)
        shown = f"device is {ascii(run.device)}"
        require(cores, f"{shown}; a processor's ends with its cores, as in x8")
        # One of several processes may work for another, but not for all.
        most = min(1.1, 1.5 / run.world_size) * int(cores[1]) * took
        bounds["world size"] = 1, run.world_size, int(cores[1])
        bounds["cpu_time"] = LIMITS.least_work * took, run.cpu_time_ms, most
        # Parameters and tables are held in memory, two bytes a value or more.
        values = sum(int(size.replace(",", "")) for size in run.sizes.values())
        bounds["peak_memory"] = 2 * values / run.world_size / 2**20, run.memory_mib, math.inf
    for name, (low, value, high) in bounds.items():
        hint = "; was the machine busy? then remove these runs" if name == "cpu_time" else ""
        require(low <= value <= high, f"{name} is {value}; {low:.2f} to {high:.2f} can be{hint}")


# ----- a record


def check_record(record, older):
    """All that several of its runs, or several records of its track, show."""
    require(FOLDER.fullmatch(record.name), "is not named <YYYY-MM-DD>_<Letters-and-digits>")
    latest = min(datetime.now(UTC) + CLOCKS, record.over + timedelta(days=LIMITS.wait_days))
    is_between = f"{record.over:%Y-%m-%d}" <= record.date <= f"{latest:%Y-%m-%d}"
    hint = f"before the end of its runs, after today, or {LIMITS.wait_days} days after them"
    require(is_between, f"is dated {record.date}, {hint}")
    for other in older:
        check_own(other, record.source, record.is_form)
        is_own = other.title.casefold() != record.title.casefold()
        require(is_own, f"is named like {other.name}; a record has a name of its own")
    check_machine(record)
    check_runs(record)
    check_starts(record)
    check_figures(record)


def check_own(other, source, is_form):
    """A script is not that of another record; a change of form may be one of comments."""
    shown = f"train_gpt.py is the code of {other.name}"
    require(other.source != source, f"{shown}; change it first")
    is_same = not is_form and is_same_code(other.source, source)
    require(not is_same, f"{shown}, but for comments and layout; change it first")


def check_machine(record):
    """One kind of machine made all runs; back ends differ only with the fields that choose them."""
    runs = record.runs + record.baseline
    older = record.parent.runs if record.parent else []
    check_one(LIMITS.machine, runs)
    for side in (record.runs, record.baseline + older):
        check_one(["sizes", "tokens", "steps"], side)
    for _, alike in itertools.groupby(runs, lambda run: [*map(run.config.get, LIMITS.choosing)]):
        check_one(["backends"], [*alike])


def check_one(names, runs):
    """Runs agree in what their logs say of some things."""
    for name in names:
        values = sorted({str(getattr(run, name)) for run in runs})
        shown = ", ".join(ascii(value)[:60] for value in values[:3])
        require(len(values) <= 1, f"{name} differs between runs: {shown}; one of each is asked")


def check_runs(record):
    """All declared runs of one batch are there, once, few restarted, with the seeds of places."""
    runs = record.runs + record.baseline
    check_one(["batch", "declared"], runs)
    is_each = len({run.run.casefold() for run in runs}) == len(runs)
    require(is_each, "names of its runs are the same, or differ in the case of letters alone")
    for part, side in ("logs", record.runs), ("baseline", record.baseline):
        found = [run.counter for run in side]
        shown = f"{runs[0].declared} runs were declared, {part} has {found}"[:120]
        is_whole = not side or runs[0].declared == len(side) and found == [*range(1, 1 + len(side))]
        require(is_whole and runs[0].batch == 1, f"{shown}; every run of batch 1 counts, once")
        restarts = sum(run.start - 1 for run in side)
        is_rare = restarts <= 1 and all(run.start for run in side)
        require(is_rare, f"{restarts} runs of {part} were started again, at most 1 may be")
    code = sha256_of(record.source)
    for run in runs:
        seed = stats.seed_of(code, 1, run.counter)
        require(run.seed == seed, f"{run.run} has seed {run.seed}; its place has {seed}")


def check_starts(record):
    """Each run was started after the parent's record, and the run that was drawn before it."""
    sides = {"a": record.runs, "b": record.baseline}
    order = stats.order_of_pairs(sha256_of(record.source), 1, len(record.runs))
    planned = [sides[side][counter - 1] for side, counter in order if sides[side]]
    second = timedelta(seconds=1)  # starts are whole ones
    over = record.parent.over if record.parent else planned[0].started
    event = "the parent's record was made"
    for run in planned:
        require(run.started + second >= over, f"{run.run} was started before {event}")
        over = run.over + timedelta(seconds=LIMITS.pause * hasattr(run, "text"))
        event = f"the end of {run.run}, which comes before it, and {LIMITS.pause} s more"
    untold = {side: [] for side in sides}
    places = [side for side, _ in order if sides[side]]
    for side, seconds in zip(places[:-1], untold_seconds(planned), strict=True):
        untold[side].append(seconds)
    if record.parent and planned[0].cuda == "none":
        more = statistics.median(untold["a"]) - statistics.median(untold["b"])
        shown = f"the script's clock leaves out {more:.1f} s more of a run than the parent's"
        require(
            more <= LIMITS.untold, f"{shown}, by starts of runs; at most {LIMITS.untold} s may be"
        )


def untold_seconds(runs):
    """Of all runs but the last, in order, the seconds until the next one's start that its clock has
    not counted."""
    return [
        (other.started - run.started).total_seconds() - run.train_time_ms / 1000
        for run, other in itertools.pairwise(runs)
    ]


def check_figures(record):
    """The target is reached, a gain is shown against a parent that reaches it, and the record's
    page is what `submit` writes, but for the reasons and who had the idea."""
    shown = f"mean loss {record.loss:.5f}, {stats.p_text(record.loss_p)}"
    is_reached = record.loss_p <= stats.ALPHA
    require(is_reached, f"target {record.target:g} not reached: {shown}")
    if record.parent:
        shown = f"{record.parent.name}: {render.percent(record.gain)}"
        if record.is_form:
            check_form(record, shown)
        else:
            is_faster = record.p <= stats.ALPHA
            require(is_faster, f"not shown to be faster than {shown}, {stats.p_text(record.p)}")
        mean, _ = stats.mean_and_std([run.val_loss for run in record.baseline])
        require(mean < record.target, f"the parent's runs miss the target: mean loss {mean:.5f}")
        check_control(record)

    check_author(record.by)
    why = render.why_of(record.readme)
    is_same = record.readme == render.record_readme(record, why)
    require(is_same, "README.md: only what stands under `## Why` may differ from what submit wrote")
    due = "under `## Why`; what is due there is plain prose"
    require(len(why) <= LIMITS.why, f"README.md: {len(why):,} letters {due} of {LIMITS.why:,}")
    odd = ODD_PROSE.findall(why)
    require(not odd, f"README.md: {odd[:1]!a} {due}")


def check_form(record, shown):
    """A change of form claims no gain, and loses little."""
    least = LIMITS.usual_pairs
    pairs = len(record.runs)
    require(pairs >= least, f"{pairs} pairs of a change of form; {least} or more are due")
    is_near = record.gain[2] <= LIMITS.form_slower
    require(is_near, f"a change of form may be 5 % slower at most than {shown}")


def check_control(record):
    """Validation text is to the model what the tokens behind it are: who trains on it, shows it."""
    differences = [
        run.val_loss - run.control - (other.val_loss - other.control)
        for run, other in zip(record.runs, record.baseline, strict=True)
        if hasattr(run, "control") and math.isfinite(vars(other).get("control", math.nan))
    ]
    mean = statistics.fmean(differences or [0.0])
    shown = f"validation less control is {-mean:.5f} below the parent's"
    require(mean >= -LIMITS.control, f"{shown}, {LIMITS.control} may be: was it trained on?")


def check_author(by):
    """A name is shown as it stands, and each of its words in one script."""
    shown = f"README.md: by is {ascii(by)[:60]}"
    due = "letters, digits, blanks, .,'&()@/- and, within words, _"
    require(AUTHORS.fullmatch(by), f"{shown}; names of 100 letters at most are due, of {due}")
    for word in re.findall(r"[^\W\d_]+", by):
        scripts = sorted({unicodedata.name(letter, "?").split()[0] for letter in word})
        is_one = len(scripts) == 1 or "LATIN" not in scripts
        require(is_one, f"{shown}; letters of a word are {' and '.join(scripts)}")


# ----- all records


def check_copies(runs, limit):
    """No run has the losses of an older one, to `limit` at nearly all steps that both logged and
    at the end, or to a tenth of it at many. Both runs of a pair share a seed, and may agree."""
    for run, other in itertools.combinations(reversed(runs), 2):
        is_pair = run.seed == other.seed and run.code_sha256 != other.code_sha256
        shared = [] if is_pair else run.losses.keys() & other.losses.keys()
        gaps = [abs(run.losses[place] - other.losses[place]) for place in shared]
        for share, bound in zip(LIMITS.copied, (limit, limit / 10), strict=True):
            near = sum(gap <= bound for gap in gaps)
            shown = f"has the losses of {other.run}, to {bound:g} at {near} of {len(gaps)} places"
            is_own = is_pair or near < share * len(gaps)
            require(is_own, f"{run.path}: {shown}; a run counts once")


def check_folders(repository):
    """What was merged is there, byte for byte, behind no link, and each folder is a board's."""
    home = repository.home
    boards = [home / track for track in repository.rules]
    for folder in [home, *boards]:
        require(not folder.is_symlink(), f"{folder}: is a symbolic link; records lie in a folder")
    for folder in filter(Path.is_dir, paths_in(home)):
        require(folder in boards, f"{folder}: is no open board's folder")
    own = repository.merged and repository.merged / "records"
    for path in sorted(own.glob("*/[0-9]*/**/*")) if own else ():
        place = path.relative_to(own)
        other = home / place
        is_there = other.is_file() and other.resolve() == home.resolve() / place
        is_same = is_there and filecmp.cmp(path, other, shallow=False)
        is_same = is_same or path.is_dir() or any(part.startswith(NOBODYS) for part in place.parts)
        require(is_same, f"{other}: is not what was merged; records stay as they are")


def check_records(repository):
    """RecordError with the first thing that is wrong with the repository's records."""
    check_folders(repository)
    for track, records in repository.records.items():
        rules = repository.rules[track]
        is_known = not records or rules["config"]["val_sha256"]
        hint = "the first record's `submit` proposes one"
        require(is_known, f"{repository.home}/{track}: rules.json has no val_sha256; {hint}")
        for record in records:
            for run in record.runs:
                check_run(run, track, rules, record.name)
            has_proof = record.parent and hasattr(record.parent.runs[0], "untrained")
            for run in record.baseline:
                check_run(run, track, rules, record.name, has_proof)
        for number, record in enumerate(records):
            with about(record.folder):
                check_record(record, records[:number])
        runs = [run for record in records for run in record.runs + record.baseline]
        check_copies(runs, rules["copy_loss"])


def check_pages(repository):
    """Each record says why it works, and what is drawn of all of them is current."""
    for record in repository.all:
        why = render.why_of(record.readme)
        with about(record.folder / "README.md"):
            says = why.strip() != render.WHY and len(why.split()) >= 5
            require(says, "does not say why it works; write that under `## Why`")
    for path, wanted in render.pages_of(repository).items():
        require(read_text(path) == wanted, f"{path}: is not current; run `python -m records table`")
