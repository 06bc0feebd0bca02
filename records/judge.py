"""`verify`: what a record must fulfil. Everything is read, nothing from a record is executed.

Each check is told a function `fail`, which it calls with a path and a reason for what is wrong.
"""

import operator
import re
from collections import Counter
from datetime import UTC, date, datetime, timedelta

from records import render, stats
from records.files import RecordError, read_text
from records.log import NOWHERE, order_of_pairs
from records.record import FOLDER, MOST_LOGS, Failure, age_of, chain, figures
from records.source import DTYPES, NEUTRAL_FIELDS, config_of, micro_batches_of, training_tokens

# The validity gates, and the day from which on a record's runs must pass each.
GATES = {"causal": "", "normalised": "", "local": "2026-11-22", "unmoved": "2026-11-23"}
MOST_RESTARTS = 1  # of a declared batch: a machine may fail, but runs are not to be picked
# The first words of a log's lines behind the first, in their order.
KINDS = ("config", "batch", "data", "size", "", "step", "comms", "validity", "final", "status")
SAME_LOSS = 1e-4  # curves of losses that are never further apart than this are one run's
FASTEST = 0.001  # of a run's mean time a step: what no stretch of its steps can stay below


def judge(record, repository, draft=False):
    """Every Failure of one record. draft: its README need not yet say why it works."""
    failures = list(record.failures)

    def fail(path, reason):
        failures.append(Failure(path, reason))

    rules = repository.rules[record.track]
    check_name(record, fail)
    for run in [*record.runs, *record.baseline]:
        check_run(run, rules, fail)
    check_gates(record, fail)
    check_distinct(record.folder / "logs", record.runs, fail)
    check_distinct(record.folder / "baseline", record.baseline, fail)
    check_one_machine(record, fail)
    check_validation_hash(record, rules, repository, fail)
    check_code(record, fail)
    check_batch(record, "logs", record.runs, fail)
    check_batch(record, "baseline", record.baseline, fail)
    check_places(record, fail)
    check_order(record, fail)
    parent = check_lineage(record, repository, draft, fail)
    if not failures:
        check_claims(record, rules, parent, draft, fail)
    return sorted(failures, key=path_of)


def path_of(failure):
    """What sorts failures."""
    return str(failure.path)


def check_name(record, fail):
    """A record's folder is named by its day, which has come, and its name."""
    found = FOLDER.fullmatch(record.name)
    tomorrow = datetime.now(UTC).date() + timedelta(days=1)  # clocks differ
    try:
        day = date.fromisoformat(found[1] if found else "")
    except ValueError:
        fail(
            record.folder,
            "a record's folder is named <YYYY-MM-DD>_<Name>, Name of letters, digits and '-'",
        )
        return
    if day > tomorrow:
        fail(
            record.folder,
            f"is dated {record.date}, which is yet to come; the date is that of `submit`",
        )


# ----- one run


def check_run(run, rules, fail, counted=True):
    """One log against the rules of its track. counted: it must say its place in a batch."""
    if run.overrides and not is_told_its_dtype(run):
        named = ", ".join(map(ascii, run.overrides))
        fail(run.path, f"overrides: {named}; a record's settings stand in its code")
    check_lines(run, fail, counted)
    if run.track != rules.name:
        fail(
            run.path,
            f"is a run of track {ascii(run.track)}, the record lies under {rules.name}",
        )
    for name, wanted in rules.fixed.items():
        found = run.config.get(name, "not there")
        if found != wanted:
            fail(run.path, f"{name} is {ascii(found)[:80]}, the track's is {wanted}")
    check_configuration(run, fail)
    check_figures(run, fail)
    scored = run.validity.get("val_tokens")
    if scored != str(rules.val_tokens):
        fail(
            run.path,
            f"{ascii(scored)} validation tokens were scored, the track has {rules.val_tokens}",
        )
    if rules.manifest_sha256 and run.data_sha256 != rules.manifest_sha256:
        fail(
            run.path,
            f"data manifest {ascii(run.data_sha256)[1:13]}... is not the track's "
            f"({rules.manifest_sha256[:12]}...); build it with run.sh",
        )
    if run.shards != "ok":
        fail(
            run.path,
            f"shards: {ascii(run.shards)}; those that a record's run reads must be the manifest's "
            f"(ok)",
        )


def is_told_its_dtype(run):
    """Whether nothing but the dtype was set from outside, as `records` does to run both sides of a
    comparison in the one that the machine is fast in."""
    return run.dtype in DTYPES and run.overrides == {"dtype": run.dtype}


def check_lines(run, fail, counted):
    """A whole run's log has lines of all kinds in their order, and none beside."""
    if run.resumed or run.config.get("resume"):
        fail(run.path, "the run was resumed; a record's runs are whole")
        return
    if counted and run.batch is None:
        return  # which check_batch tells
    kinds = kinds_due(run, counted)
    if list(run.kinds) != kinds:
        odd = sorted(set(run.kinds) - set(kinds)) or run.kinds
        found = ", ".join(map(ascii, odd))
        wanted = ", ".join(filter(None, kinds))
        fail(
            run.path,
            f"lines begin with {found[:200]}; a record's log has, in this order, {wanted}",
        )


def kinds_due(run, counted):
    """The kinds of lines that a log must have. Older scripts log overrides in the place of a run's
    place in its batch, which then stands in its configuration."""
    kinds = list(KINDS)
    if not counted or (run.overrides and "batch" not in run.kinds):
        kinds.remove("batch")
    if run.overrides:
        kinds.insert(1, "overrides")
    return kinds


def check_configuration(run, fail):
    """The logged configuration is that of the track in the logged source, and the tokens follow
    from it."""
    try:
        odd = configuration_differs(run)
        if odd:
            fail(run.path, odd)
            return
        tokens = training_tokens(run.config)
        if run.tokens != tokens:
            fail(run.path, f"{run.tokens} tokens in the final line; the schedule takes {tokens}")
        counts = [count for _, count in micro_batches_of(run.config)]
        if run.world_size < 1 or any(count % run.world_size for count in counts):
            shown = f"the micro-batches of a step ({counts})"
            fail(run.path, f"world size {run.world_size} does not divide {shown}"[:200])
    except RecordError as error:
        fail(run.path, str(error))


def configuration_differs(run):
    """What in a run's configuration is otherwise than its source says, or None."""
    expected = dict(config_of(run.source, run.track))
    is_open = expected.get("dtype") == "auto"
    if is_open and run.config.get("dtype") not in DTYPES:
        return f"dtype is {ascii(run.dtype)[:60]}, where a log has {' or '.join(DTYPES)}"
    if is_open or is_told_its_dtype(run):
        expected["dtype"] = run.dtype
    odd = []
    for name in sorted((expected.keys() | run.config.keys()) - NEUTRAL_FIELDS):
        is_on_one_side = name not in expected or name not in run.config
        if is_on_one_side or run.config[name] != expected[name]:
            odd.append(name)
    if not odd:
        return None
    name = odd[0]
    found = ascii(run.config.get(name, "not there"))[:60]
    wanted = ascii(expected.get(name, "not there"))[:60]
    more = f"; {len(odd) - 1} more fields differ" if len(odd) > 1 else ""
    shown = ascii(name)[1:-1][:40]
    return f"{shown} is {found} in the config line, {wanted} in the source{more}"


def check_figures(run, fail):
    """Times that a run can take: no stretch of steps without any."""
    mean = run.train_time_ms / run.steps
    if not run.train_time_ms:
        fail(run.path, "the training time is 0 ms")
    before = NOWHERE
    for point in run.curves["train"]:
        took = point.time_ms - before.time_ms
        # Times are rounded to whole milliseconds.
        if took < FASTEST * mean * (point.step - before.step) - 0.5:
            fail(
                run.path,
                f"steps {before.step} to {point.step} took {took} ms, but a step {mean:.1f} ms on "
                f"average; no part of a run is so fast",
            )
            return
        before = point


# ----- the runs of a record


def check_gates(record, fail):
    """Runs pass each validity gate that their log names, and lack none; a parent's code may be
    older than a gate."""
    for runs, day in ((record.runs, record.date), (record.baseline, "")):
        for run in runs:
            for gate, since in GATES.items():
                word = run.validity.get(gate)
                if word != "ok" and (gate in run.validity or day >= since):
                    fail(run.path, f"validity gate {gate} is {ascii(word)}, must be ok")


def check_distinct(folder, runs, fail):
    """No run counts twice: seeds and run ids differ; check_copies compares the losses."""
    for what in ("seed", "run"):
        seen = {}
        for run in runs:
            key = getattr(run, what)
            first = seen.setdefault(key, run)
            if first is not run:
                fail(
                    folder,
                    f"{run.path.name} and {first.path.name} have one {what}, {key}; a run counts "
                    f"once",
                )


def check_one_machine(record, fail):
    """Times and losses are those of one kind of machine, and of one type of numbers."""
    for name in ("device", "world_size", "torch", "cuda", "triton", "dtype"):
        values = sorted({str(getattr(run, name)) for run in [*record.runs, *record.baseline]})
        if len(values) > 1:
            shown = ", ".join(map(ascii, values[:3]))
            fail(
                record.folder,
                f"{name} differs between runs: {shown}; a record is made on one machine, in one "
                f"dtype",
            )


def hashes_of(runs):
    """The hashes of the validation tokens that some runs scored."""
    return {run.validity.get("val_sha256") for run in runs}


def check_validation_hash(record, rules, repository, fail):
    """The scored tokens are the track's; where the repository does not know their hash, those of
    other records."""
    if rules.val_sha256:
        hashes = {rules.val_sha256}
    else:
        earlier = [other for other in repository.records[record.track] if other.name < record.name]
        hashes = hashes_of([run for other in earlier for run in other.runs[:1]])
        hashes = hashes or hashes_of(record.runs[:1])
    for run in [*record.runs, *record.baseline]:
        found = run.validity.get("val_sha256")
        if found not in hashes:
            fail(run.path, f"validation tokens {ascii(found)[1:13]}... are not the track's")


def check_code(record, fail):
    """All runs ran one source, which is the one in the folder."""
    codes = Counter(run.code_sha256 for run in record.runs)
    if len(codes) > 1:
        shown = ", ".join(code[:8] for code in codes)
        fail(
            record.folder / "logs",
            f"{len(codes)} versions of the code ({shown}); all runs of a record run the same",
        )
    elif record.runs and record.source != record.runs[0].source:
        fail(record.folder / "train_gpt.py", "is not the source in the logs; take theirs")


def unread(record, folder):
    """Whether a log of a folder could not be read, which has been told."""
    return any(folder in failure.path.parents for failure in record.failures)


def is_place(batch):
    """Whether a run's place in its batch can be one."""
    if batch is None or not batch.number or not batch.start:
        return False
    return 0 < batch.counter <= batch.declared <= MOST_LOGS


def check_batch(record, part, runs, fail):
    """All declared runs of a side are there: none dropped, none added, few restarted."""
    folder = record.folder / part
    for run in runs:
        if not is_place(run.batch):
            fail(
                run.path,
                f"no valid number of declared runs (2 to {MOST_LOGS}); use `python -m records run` "
                f"or `ab`",
            )
            return
    if len({(run.batch.number, run.batch.declared) for run in runs}) > 1:
        fail(
            folder,
            "runs of several batches; a record is one batch of `python -m records run` or `ab`",
        )
    elif runs:
        check_present(record, folder, runs, fail)
    restarts = sum(run.batch.start - 1 for run in runs)
    if restarts > MOST_RESTARTS:
        fail(
            folder, f"{restarts} runs were started again; at most {MOST_RESTARTS} of a batch may be"
        )


def check_present(record, folder, runs, fail):
    """Each run of a batch is there once. Of pairs, those up to one of the looks are enough:
    `check_claims` asks whether all was shown by then."""
    declared = runs[0].batch.declared
    present = [run.batch.counter for run in runs]
    due = declared
    if record.claims_speed:
        if max(present) in stats.looks(declared):
            due = max(present)
        if declared > stats.MOST_PAIRS:
            fail(
                folder,
                f"{declared} pairs were declared; a claim of speed rests on at most "
                f"{stats.MOST_PAIRS}",
            )
    missing = sorted(set(range(1, due + 1)) - set(present))
    if missing and not unread(record, folder):
        shown = ", ".join(map(str, missing[:8]))
        fail(folder, f"{declared} runs were declared, run {shown} missing; every run counts")
    if len(set(present)) < len(present):
        fail(folder, f"run counters {present} repeat; every run counts once")


def check_places(record, fail):
    """Each run has the seed and the name that follow from code, batch and counter; a pair shares
    the former's seed."""
    code = record.code_sha256
    base = record.baseline[0].code_sha256 if record.baseline else ""
    for side, runs in (("a", record.runs), ("b", record.baseline)):
        for run in runs:
            if run.batch is None:
                continue
            check_run_name(run, side, code, base, fail)
            seed = run.batch.seed(code)
            if run.seed != seed:
                fail(
                    run.path,
                    f"has seed {run.seed}; run {run.batch.counter} of batch {run.batch.number} of "
                    f"the code {code[:8]} has seed {seed}, which `python -m records` passes",
                )


def check_run_name(run, side, code, base, fail):
    """A run is called as `ab` calls its side of a pair, or in a record without pairs as `run` does,
    or `ab` against whatever code."""
    number = f"n{run.batch.declared}-{run.batch.counter:02d}"
    if base:
        shown = run.run
        named = [f"ab-{run.track}-{code[:8]}-{base[:8]}-{number}{side}"]
    else:
        shown = re.sub(r"^(ab-.*-)[0-9a-f]{8}(-n\d+-\d+a)$", r"\1OTHER\2", run.run)
        named = [
            f"run-{run.track}-{code[:8]}-{number}",
            f"ab-{run.track}-{code[:8]}-OTHER-{number}a",
        ]
    if shown not in named:
        wanted = " or ".join(map(ascii, named))
        fail(run.path, f"is called {run.run}; `python -m records` calls it {wanted}")


def in_planned_order(record):
    """The runs that have a place, in the order in which they were to be started."""
    places = {}
    for side, runs in (("a", record.runs), ("b", record.baseline)):
        for run in runs:
            if run.batch:
                places[side, run.batch.counter] = run
    order = sorted(places)
    batches = [run.batch for run in record.runs if run.batch]
    if record.baseline and batches:
        declared = min(batches[0].declared, MOST_LOGS)
        order = order_of_pairs(record.code_sha256, batches[0].number, declared)
    return [places[place] for place in order if place in places]


def check_order(record, fail):
    """Runs were started one after the other, those of pairs in the order that was drawn for
    them."""
    planned = in_planned_order(record)
    for run in planned:
        if run.started is None:
            fail(
                run.path,
                "no time of its start (started:); made by an older trainer, and must be made again",
            )
            return
    for run, following in zip(planned, planned[1:], strict=False):
        seconds = run.train_time_ms / 1000
        apart = (following.started - run.started).total_seconds()
        if apart < seconds - 1:  # starts are whole seconds
            fail(
                following.path,
                f"was started at {following.started:%H:%M:%S}; {run.run}, which comes before it, "
                f"was started at {run.started:%H:%M:%S} and took {seconds:.0f} s",
            )
    for run in planned:
        day = f"{run.started:%Y-%m-%d}"
        if day > record.date:
            fail(run.path, f"was started on {day}, after the record's date {record.date}")


# ----- the record among others


def check_lineage(record, repository, draft, fail):
    """The parent's Record, or None. A record is measured against the last of the track's chain. A
    draft is younger than all others; of two claims against one record the older one stands."""
    others = [other for other in repository.records[record.track] if other.name != record.name]
    check_own_code(record, others, draft, fail)
    path = record.folder / "result.json"
    links = chain(others if draft else [*others, record])
    names = [link.name for link in links]
    if record.parent is None:
        if links and links[0] is not record:
            fail(path, f"names no parent, though {names[0]} came before")
        return None
    parent = next((other for other in others if other.name == record.parent), None)
    if parent is None or parent.date > record.date:
        fail(path, f"parent {record.parent} is no earlier record of the track")
        return None
    if parent.name not in names:
        last = names[-1] if names else "none"
        fail(
            path,
            f"parent {parent.name} is not of the track's chain of records, which ends with {last}",
        )
        return None
    rival = rival_of(record, parent, links, draft)
    if rival:
        fail(
            path,
            f"parent {parent.name} was already beaten by {rival.name}; measure against the last "
            f"record",
        )
        return None
    if not parent.runs or not parent.source:
        fail(path, f"parent {record.parent} cannot be read")
        return None
    for base in record.baseline:
        if base.code_sha256 != parent.code_sha256:
            code = base.code_sha256[:8]
            fail(base.path, f"is no run of the parent {record.parent}: its code is {code}")
    return parent


def check_own_code(record, others, draft, fail):
    """No earlier record has the same code, in whatever dtype it ran."""
    for other in others:
        is_earlier = draft or other.age < record.age
        if record.code_sha256 and other.code_sha256 == record.code_sha256 and is_earlier:
            fail(
                record.folder / "train_gpt.py",
                f"is the code of {other.name}; a record has code of its own",
            )


def rival_of(record, parent, links, draft):
    """The record that follows the parent in the track's chain in the place of this one, or None."""
    place = links.index(parent) + 1
    if place == len(links) or links[place] is record:
        return None
    rival = links[place]
    if draft or record.claims_speed or rival.date < record.date:
        return rival
    return None


def check_claims(record, rules, parent, draft, fail):
    """The statistical claims, and that result.json and README.md say what the logs say."""
    baseline = record.folder / "baseline"
    if not record.runs:
        fail(record.folder / "logs", "holds no log")
        return
    if record.claims_speed and parent is None:
        fail(baseline, "there is no parent to compare with; leave the folder out")
        return
    try:
        expected = figures(record, rules, parent)
    except RecordError as error:
        fail(baseline, str(error))
        return
    loss = expected["loss"]
    if not loss["p"] < loss["p_needed"]:
        fail(
            record.folder / "logs",
            f"target {loss['target']:g} not reached: mean loss {loss['mean']:.5f} of "
            f"{len(record.runs)} runs, p = {loss['p']:.3g}, below {loss['p_needed']:g} is needed",
        )
    if record.claims_speed:
        check_speed(record, expected, fail)
    check_written(record, expected, draft, fail)


def check_speed(record, expected, fail):
    """The gain in time is shown, against a parent whose runs reach the target."""
    path = record.folder / "baseline"
    speed = expected["speed"]
    if not speed or not speed["shown_by"]:
        shown = "one pair only"
        if speed:
            shown = f"{render.difference(speed)}, p = {speed['p']:.3g}"
        fail(
            path,
            f"not shown to be faster than {record.parent}: {shown}, below "
            f"{expected['p_needed']:g} is needed",
        )
    target = expected["loss"]["target"]
    mean, _ = stats.mean_and_std([run.val_loss for run in record.baseline])
    if mean >= target:
        fail(path, f"the parent's runs miss the target {target:g}: mean loss {mean:.5f}")


def check_written(record, expected, draft, fail):
    """result.json and README.md are what `submit` writes for the logs, but for the reasons."""
    for key in sorted(expected.keys() | record.result.keys()):
        if key not in expected or record.result.get(key) != expected[key]:
            found = ascii(record.result.get(key))[:100]
            wanted = ascii(expected.get(key))[:100]
            fail(
                record.folder / "result.json",
                f"{ascii(key)[1:-1][:40]} is {found}, the logs say {wanted}",
            )
    try:
        reason = readme_differs(record, expected, draft)
    except RecordError as error:
        reason = str(error)
    if reason:
        fail(record.folder / "README.md", reason)


def readme_differs(record, expected, draft):
    """What is wrong with a record's README.md, or None. RecordError where it has not the parts that
    it needs."""
    if render.block_of(record.readme, render.FIGURES) != render.record_block(expected):
        return "the figures are not those of the logs; `submit` wrote other ones"
    why = render.why_of(record.readme)
    if record.readme != render.record_readme(expected, why):
        return "only what stands under `## Why` may differ from what `submit` wrote"
    odd = render.ODD_PROSE.search(why)
    if odd:
        return (
            f"{ascii(odd[0])[:40]}: under `## Why` stands prose, without HTML, tables, headings or "
            f"pictures; the figures are those below"
        )
    if not draft and (why.strip() == render.WHY or len(why.split()) < 5):
        return "does not say why it works; write that under `## Why`"
    return None


# ----- runs that are there twice


def losses_of(run):
    """All losses that a run logged."""
    return [point.loss for kind in ("train", "val") for point in run.curves[kind]]


def steps_of(run):
    """The steps at which a run logged its losses, with the kinds of those."""
    return tuple((kind, point.step) for kind in ("train", "val") for point in run.curves[kind])


def may_agree(run, other):
    """Whether two runs may have the same losses: both runs of a pair share a seed."""
    return run.seed == other.seed and run.code_sha256 != other.code_sha256


def are_near(losses, others):
    """Whether no two losses of the same step are further apart than those of one run."""
    return all(abs(a - b) <= SAME_LOSS for a, b in zip(losses, others, strict=True))


def same_losses(runs):
    """[(run, earlier one), ...] of Runs whose losses are nearly equal at every logged step, though
    their seeds differ, or though they are of one script."""
    alike = {}
    for order, run in enumerate(runs):
        alike.setdefault(steps_of(run), []).append((losses_of(run), order, run))
    found = []
    for group in alike.values():
        group.sort(key=operator.itemgetter(0, 1))  # so that near ones stand close to each other
        for place, (losses, order, run) in enumerate(group):
            for others, earlier, other in group[place + 1 :]:
                if others[0] - losses[0] > SAME_LOSS:
                    break
                if may_agree(run, other) or not are_near(losses, others):
                    continue
                found.append((run, other) if order > earlier else (other, run))
    return found


def check_copies(records):
    """Failures of runs whose losses are another run's, of the same record or of an earlier one: a
    run counts once."""
    runs = []
    home = {}
    for record in records:
        for run in [*record.runs, *record.baseline]:
            runs.append(run)
            home[id(run)] = record.name
    failures = []
    for run, other in same_losses(runs):
        reason = f"has the losses of {other.run} of {home[id(other)]} (to {SAME_LOSS:g})"
        failures.append(Failure(run.path, f"{reason}; a run counts once"))
    return failures


# ----- all records


def everything_in(repository):
    """Every record of a repository."""
    return [record for records in repository.records.values() for record in records]


def judge_one(record, repository, draft=False):
    """Every Failure of one record among those of the repository, which may hold it or not."""
    others = [
        other
        for other in everything_in(repository)
        if (other.track, other.name) != (record.track, record.name)
    ]
    copies = check_copies([*others, record])
    own = [failure for failure in copies if failure.path.is_relative_to(record.folder)]
    return judge(record, repository, draft) + own


def judge_records(repository):
    """Every Failure of the repository's records."""
    records = everything_in(repository)
    failures = [failure for record in records for failure in judge(record, repository)]
    failures += check_copies(sorted(records, key=age_of))
    return failures + list(repository.strangers())


def judge_all(repository):
    """Every Failure of the repository: its records, and where all of those are good the
    leaderboards."""
    failures = judge_records(repository)
    if failures:
        return failures
    try:
        text = read_text(repository.readme)
        if render.with_leaderboards(text, repository.records) == text:
            return []
        reason = "a leaderboard is not current; run `python -m records table`"
    except RecordError as error:
        reason = str(error)
    return [Failure(repository.readme, reason)]
