"""`verify`: what a record must fulfil. Everything is read, nothing from a record is executed."""
import re
from collections import Counter
from datetime import UTC, date, datetime, timedelta

from records import render, stats
from records.files import RecordError, read_text
from records.log import Point, order_of_pairs
from records.record import FOLDER, MOST_LOGS, Failure, chain, figures
from records.source import NEUTRAL_FIELDS, config_of, training_tokens

GATES = {"causal": "", "normalised": "", "local": "2026-11-22"}  # and the day from which a record's runs must pass each
MOST_RESTARTS = 1  # of a declared batch: a machine may fail, but runs are not to be picked
KINDS = ("config", "batch", "data", "size", "", "step", "comms", "validity", "final", "status")  # of a log's lines
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
    for part, runs in (("logs", record.runs), ("baseline", record.baseline)):
        check_distinct(record.folder / part, runs, fail)
    check_one_machine(record, fail)
    check_validation_hash(record, rules, repository, fail)
    check_code(record, fail)
    for part, runs in (("logs", record.runs), ("baseline", record.baseline)):
        check_batch(record.folder / part, runs, record.claims_speed, fail, unread(record, record.folder / part))
    check_places(record, fail)
    check_order(record, fail)
    parent = check_lineage(record, repository, draft, fail)
    if not failures:
        check_claims(record, rules, parent, draft, fail)
    return sorted(failures, key=lambda failure: str(failure.path))


def check_name(record, fail):
    found = FOLDER.fullmatch(record.name)
    try:
        tomorrow = datetime.now(UTC).date() + timedelta(days=1)  # clocks differ
        if date.fromisoformat(found[1] if found else "") > tomorrow:
            fail(record.folder, f"is dated {record.date}, which is yet to come; the date is that of `submit`")
    except ValueError:
        fail(record.folder, "a record's folder is named <YYYY-MM-DD>_<Name>, Name of letters, digits and '-'")


def check_run(run, rules, fail, counted=True):
    """One log against the rules of its track. counted: it must say its place in a batch."""
    kinds = [kind for kind in KINDS if counted or kind != "batch"]
    if run.overrides:
        fail(run.path, f"overrides: {', '.join(map(ascii, run.overrides))}; a record's settings stand in its code")
    if run.resumed or run.config.get("resume"):
        fail(run.path, "the run was resumed; a record's runs are whole")
    elif [*run.kinds] != kinds and not (counted and run.batch is None):
        odd = sorted(set(run.kinds) - set(KINDS)) or run.kinds
        fail(run.path, f"lines begin with {', '.join(map(ascii, odd))[:200]}; a record's log has, in this order, "
                       f"{', '.join(filter(None, kinds))}")
    if run.track != rules.name:
        fail(run.path, f"is a run of track {ascii(run.track)}, the record lies under {rules.name}")
    for name in ("tokenizer", "val_tokens", "val_sha256", "target_loss"):
        if run.config[name] != getattr(rules, name):
            fail(run.path, f"{name} is {ascii(run.config[name])}, the track's is {getattr(rules, name)}")
    check_configuration(run, fail)
    check_figures(run, fail)
    if run.validity.get("val_tokens") != str(rules.val_tokens):
        fail(run.path, f"{ascii(run.validity.get('val_tokens'))} validation tokens were scored, the track has "
                       f"{rules.val_tokens}")
    if rules.manifest_sha256 and run.data_sha256 != rules.manifest_sha256:
        fail(run.path, f"data manifest {ascii(run.data_sha256)[1:13]}... is not the track's "
                       f"({rules.manifest_sha256[:12]}...); build it with run.sh")
    if run.shards != "ok":
        fail(run.path, f"shards: {ascii(run.shards)}; those that a record's run reads must be the manifest's (ok)")


def check_configuration(run, fail):
    """The logged configuration is that of the track in the logged source, and the tokens follow from it."""
    try:
        expected = config_of(run.source, run.track)
        names = sorted((expected.keys() | run.config.keys()) - NEUTRAL_FIELDS)
        odd = [name for name in names if name not in expected or run.config.get(name, ...) != expected[name]]
        if odd:
            found, wanted = (ascii(side.get(odd[0], "not there"))[:60] for side in (run.config, expected))
            more = f"; {len(odd) - 1} more fields differ" if len(odd) > 1 else ""
            fail(run.path, f"{ascii(odd[0])[1:-1][:40]} is {found} in the config line, {wanted} in the source{more}")
            return
        tokens = training_tokens(run.config)
        if run.tokens != tokens:
            fail(run.path, f"{run.tokens} tokens in the final line; the schedule takes {tokens}")
        counts = [count for _, count in run.config["micro_batches"]]
        if run.world_size < 1 or any(count % run.world_size for count in counts):
            fail(run.path, f"world size {run.world_size} does not divide the micro-batches of a step ({counts})"[:200])
    except RecordError as error:
        fail(run.path, str(error))


def check_figures(run, fail):
    """Times that a run can take: no stretch of steps without any."""
    mean, before = run.train_time_ms / run.steps, Point(0, 0.0, 0)
    if not run.train_time_ms:
        fail(run.path, "the training time is 0 ms")
    for point in run.curves["train"]:
        if point.time_ms - before.time_ms < FASTEST * mean * (point.step - before.step) - 0.5:  # times are rounded
            took = point.time_ms - before.time_ms
            fail(run.path, f"steps {before.step} to {point.step} took {took} ms, but a step {mean:.1f} ms on average; "
                           f"no part of a run is so fast")
            return
        before = point


def check_gates(record, fail):
    """Runs pass each validity gate that their log names, and lack none; a parent's code may be older than a gate."""
    for runs, day in ((record.runs, record.date), (record.baseline, "")):
        for run in runs:
            for gate, since in GATES.items():
                if run.validity.get(gate) != "ok" and (gate in run.validity or day >= since):
                    fail(run.path, f"validity gate {gate} is {ascii(run.validity.get(gate))}, must be ok")


def check_distinct(folder, runs, fail):
    """No run counts twice: seeds and run ids differ; check_copies compares the losses."""
    for what, key in (("seed", lambda run: run.seed), ("run", lambda run: run.run)):
        seen = {}
        for run in runs:
            first = seen.setdefault(key(run), run)
            if first is not run:
                fail(folder, f"{run.path.name} and {first.path.name} have one {what}, {key(run)}; a run counts once")


def check_one_machine(record, fail):
    """Times and losses are those of one kind of machine."""
    for name in ("device", "world_size", "torch", "cuda", "triton"):
        values = sorted({str(getattr(run, name)) for run in [*record.runs, *record.baseline]})
        if len(values) > 1:
            fail(record.folder, f"{name} differs between runs: {', '.join(map(ascii, values[:3]))}; a record is made "
                                f"on one machine")


def check_validation_hash(record, rules, repository, fail):
    """The scored tokens are the track's; where the repository does not know their hash, those of other records."""
    hashes = {rules.val_sha256} if rules.val_sha256 else {
        run.validity.get("val_sha256") for other in repository.records[record.track] for run in other.runs[:1]
        if other.name < record.name} or {run.validity.get("val_sha256") for run in record.runs[:1]}
    for run in [*record.runs, *record.baseline]:
        if run.validity.get("val_sha256") not in hashes:
            fail(run.path, f"validation tokens {ascii(run.validity.get('val_sha256'))[1:13]}... are not the track's")


def check_code(record, fail):
    codes = Counter(run.code_sha256 for run in record.runs)
    if len(codes) > 1:
        shown = ", ".join(code[:8] for code in codes)
        fail(record.folder / "logs", f"{len(codes)} versions of the code ({shown}); all runs of a record run the same")
    elif record.runs and record.source and record.source != record.runs[0].source:
        fail(record.folder / "train_gpt.py", "is not the source in the logs; take theirs")


def unread(record, folder):
    """Whether a log of a folder could not be read, which has been told."""
    return any(folder in failure.path.parents for failure in record.failures)


def check_batch(folder, runs, pairs, fail, others=False):
    """All declared runs of a side are there: none dropped, none added, few restarted. Of pairs, those up to one of the
    looks are enough: `check_claims` asks whether all was shown by then. others: some logs are unreadable."""
    for run in runs:
        batch = run.batch
        if batch is None or not (0 < batch.counter <= batch.declared <= MOST_LOGS and batch.number and batch.start):
            fail(run.path, f"no valid number of declared runs (2 to {MOST_LOGS}); use `python -m records run` or `ab`")
            return
    if len({(run.batch.number, run.batch.declared) for run in runs}) > 1:
        fail(folder, "runs of several batches; a record is one batch of `python -m records run` or `ab`")
    elif runs:
        declared = runs[0].batch.declared
        present = [run.batch.counter for run in runs]
        due = max(present) if pairs and max(present) in stats.looks(declared) else declared
        missing = sorted(set(range(1, due + 1)) - set(present))
        if pairs and declared > stats.MOST_PAIRS:
            fail(folder, f"{declared} pairs were declared; a claim of speed rests on at most {stats.MOST_PAIRS}")
        if missing and not others:
            shown = ", ".join(map(str, missing[:8]))
            fail(folder, f"{declared} runs were declared, run {shown} missing; every run counts")
        if len(set(present)) < len(present):
            fail(folder, f"run counters {present} repeat; every run counts once")
    restarts = sum(run.batch.start - 1 for run in runs)
    if restarts > MOST_RESTARTS:
        fail(folder, f"{restarts} runs were started again; at most {MOST_RESTARTS} of a batch may be")


def check_places(record, fail):
    """Each run has the seed and the name that follow from code, batch and counter; a pair shares the former's seed."""
    code, base = (runs[0].code_sha256 if runs else "" for runs in (record.runs, record.baseline))
    for side, runs in (("a", record.runs), ("b", record.baseline)):
        for run in runs:
            if run.batch is None:
                continue
            seed, number = run.batch.seed(code), f"n{run.batch.declared}-{run.batch.counter:02d}"
            named = [f"ab-{run.track}-{code[:8]}-{base[:8]}-{number}{side}"] if record.baseline else [
                f"run-{run.track}-{code[:8]}-{number}", f"ab-{run.track}-{code[:8]}-OTHER-{number}a"]
            shown = run.run if record.baseline else re.sub(r"^(ab-.*-)[0-9a-f]{8}(-n\d+-\d+a)$", r"\1OTHER\2", run.run)
            if shown not in named:
                fail(run.path, f"is called {run.run}; `python -m records` calls it {' or '.join(map(ascii, named))}")
            if run.seed != seed:
                fail(run.path, f"has seed {run.seed}; run {run.batch.counter} of batch {run.batch.number} of the code "
                               f"{code[:8]} has seed {seed}, which `python -m records` passes")


def check_order(record, fail):
    """Runs were started one after the other, those of pairs in the order that was drawn for them."""
    places = {(side, run.batch.counter): run for side, runs in (("a", record.runs), ("b", record.baseline))
              for run in runs if run.batch}
    batch = next((run.batch for run in record.runs if run.batch), None)
    order = sorted(places)
    if record.baseline and batch:
        order = order_of_pairs(record.code_sha256, batch.number, min(batch.declared, MOST_LOGS))
    planned = [places[place] for place in order if place in places]
    for run in planned:
        if run.started is None:
            fail(run.path, "no time of its start (started:); made by an older trainer, and must be made again")
            return
    for run, following in zip(planned, planned[1:]):
        if (following.started - run.started).total_seconds() < run.train_time_ms / 1000 - 1:  # starts are whole seconds
            fail(following.path, f"was started at {following.started:%H:%M:%S}; {run.run}, which comes before it, was "
                                 f"started at {run.started:%H:%M:%S} and took {run.train_time_ms / 1000:.0f} s")
    for run in planned:
        if f"{run.started:%Y-%m-%d}" > record.date:
            fail(run.path, f"was started on {run.started:%Y-%m-%d}, after the record's date {record.date}")


def check_lineage(record, repository, draft, fail):
    """The parent's Record, or None. A record is measured against the last of the track's chain. A draft is younger than
    all others; of two claims against one record the older one stands."""
    others = [other for other in repository.records[record.track] if other.name != record.name]
    path = record.folder / "result.json"
    for other in others:
        if record.code_sha256 and other.code_sha256 == record.code_sha256 and (draft or other.age < record.age):
            fail(record.folder / "train_gpt.py", f"is the code of {other.name}; a record has code of its own")
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
        fail(path, f"parent {parent.name} is not of the track's chain of records, which ends with "
                   f"{(names or ['none'])[-1]}")
        return None
    after = [link for link in links[names.index(parent.name) + 1:][:1] if link is not record]
    if after and (draft or record.claims_speed or after[0].date < record.date):
        fail(path, f"parent {parent.name} was already beaten by {after[0].name}; measure against the last record")
        return None
    if not parent.runs or not parent.source:
        fail(path, f"parent {record.parent} cannot be read")
        return None
    for base in record.baseline:
        if base.code_sha256 != parent.code_sha256:
            fail(base.path, f"is no run of the parent {record.parent}: its code is {base.code_sha256[:8]}")
    return parent


def check_claims(record, rules, parent, draft, fail):
    """The statistical claims, and that result.json and README.md say what the logs say."""
    if not record.runs:
        fail(record.folder / "logs", "holds no log")
        return
    if record.claims_speed and parent is None:
        fail(record.folder / "baseline", "there is no parent to compare with; leave the folder out")
        return
    try:
        expected = figures(record, rules, parent)
    except RecordError as error:
        fail(record.folder / "baseline", str(error))
        return
    loss, speed, p_needed = expected["loss"], expected["speed"], expected["p_needed"]
    if not loss["p"] < loss["p_needed"]:
        fail(record.folder / "logs", f"target {loss['target']:g} not reached: mean loss {loss['mean']:.5f} of "
                                     f"{len(record.runs)} runs, p = {loss['p']:.3g}, below "
                                     f"{loss['p_needed']:g} is needed")
    if record.claims_speed and not (speed and speed["shown_by"]):
        shown = f"{render.difference(speed)}, p = {speed['p']:.3g}" if speed else "one pair only"
        fail(record.folder / "baseline", f"not shown to be faster than {record.parent}: {shown}, below {p_needed:g} is "
                                         f"needed")
    base = stats.mean_and_std([run.val_loss for run in record.baseline])[0] if record.baseline else 0.0
    if base >= loss["target"]:
        fail(record.folder / "baseline", f"the parent's runs miss the target {loss['target']:g}: mean loss {base:.5f}")
    check_written(record, expected, draft, fail)


def check_written(record, expected, draft, fail):
    path = record.folder / "result.json"
    for key in sorted(expected.keys() | record.result.keys()):
        if key not in expected or record.result.get(key) != expected[key]:
            found, wanted = (ascii(side.get(key))[:100] for side in (record.result, expected))
            fail(path, f"{ascii(key)[1:-1][:40]} is {found}, the logs say {wanted}")
    try:
        if render.block_of(record.readme, render.FIGURES) != render.record_block(expected):
            fail(record.folder / "README.md", "the figures are not those of the logs; `submit` wrote other ones")
            return
        why = render.why_of(record.readme)
        if record.readme != render.record_readme(expected, why):
            fail(record.folder / "README.md", "only what stands under `## Why` may differ from what `submit` wrote")
        elif found := render.ODD_PROSE.search(why):
            fail(record.folder / "README.md", f"{ascii(found[0])[:40]}: under `## Why` stands prose, without HTML, "
                                              f"tables, headings or pictures; the figures are those below")
        elif not draft and (why.strip() == render.WHY or len(why.split()) < 5):
            fail(record.folder / "README.md", "does not say why it works; write that under `## Why`")
    except RecordError as error:
        fail(record.folder / "README.md", str(error))


def losses_of(run):
    return [point.loss for kind in ("train", "val") for point in run.curves[kind]]


def same_losses(runs):
    """[(run, earlier one), ...] of Runs whose losses are nearly equal at every logged step, though their seeds differ,
    or though they are of one script. Both runs of a pair share a seed, and may share all losses."""
    found, alike = [], {}
    for order, run in enumerate(runs):
        steps = tuple((kind, point.step) for kind in ("train", "val") for point in run.curves[kind])
        alike.setdefault(steps, []).append((losses_of(run), order, run))
    for group in alike.values():
        group.sort(key=lambda item: item[:2])
        for place, (losses, order, run) in enumerate(group):
            for others, earlier, other in group[place + 1:]:
                if others[0] - losses[0] > SAME_LOSS:
                    break
                if run.seed == other.seed and run.code_sha256 != other.code_sha256:
                    continue
                if all(abs(a - b) <= SAME_LOSS for a, b in zip(losses, others)):
                    found.append((run, other) if order > earlier else (other, run))
    return found


def check_copies(records):
    """Failures of runs whose losses are another run's, of the same record or of an earlier one: a run counts once."""
    home = {id(run): record for record in records for run in [*record.runs, *record.baseline]}
    found = same_losses([run for record in records for run in [*record.runs, *record.baseline]])
    return [Failure(run.path, f"has the losses of {other.run} of {home[id(other)].name} (to {SAME_LOSS:g}); a run "
                              f"counts once") for run, other in found]


def judge_one(record, repository, draft=False):
    """Every Failure of one record among those of the repository, which may hold it or not."""
    others = [other for records in repository.records.values() for other in records
              if (other.track, other.name) != (record.track, record.name)]
    copies = check_copies([*others, record])
    own = [failure for failure in copies if failure.path.is_relative_to(record.folder)]
    return judge(record, repository, draft) + own


def judge_records(repository):
    """Every Failure of the repository's records."""
    everything = [record for records in repository.records.values() for record in records]
    failures = [failure for record in everything for failure in judge(record, repository)]
    failures += check_copies(sorted(everything, key=lambda record: record.age))
    return failures + list(repository.strangers())


def judge_all(repository):
    """Every Failure of the repository: its records, and where all of those are good the leaderboards."""
    failures = judge_records(repository)
    if not failures:
        try:
            text = read_text(repository.readme)
            if render.with_leaderboards(text, repository.records) != text:
                failures.append(Failure(repository.readme, "a leaderboard is not current; run `python -m records "
                                                           "table`"))
        except RecordError as error:
            failures.append(Failure(repository.readme, str(error)))
    return failures
