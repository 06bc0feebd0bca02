"""`verify`: what a record must fulfil. Everything is read, nothing from a record is executed."""
import re
from collections import Counter
from datetime import date

from records import render
from records.files import RecordError, read_text
from records.log import order_of_pairs
from records.record import FOLDER, MOST_LOGS, Failure, figures

GATES = {"causal": "", "normalised": "", "local": "2026-11-22"}  # and the day from which a record's runs must pass each
MOST_RESTARTS = 1  # of a declared batch: a machine may fail, but runs are not to be picked


def judge(record, repository):
    """Every Failure of one record."""
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
        check_batch(record.folder / part, runs, fail)
    check_places(record, fail)
    check_order(record, fail)
    parent = check_lineage(record, repository, fail)
    if not failures:
        check_claims(record, rules, parent, fail)
    return sorted(failures, key=lambda failure: str(failure.path))


def check_name(record, fail):
    found = FOLDER.fullmatch(record.name)
    try:
        date.fromisoformat(found[1] if found else "")
    except ValueError:
        fail(record.folder, "a record's folder is named <YYYY-MM-DD>_<Name>, Name of letters, digits and '-'")


def check_run(run, rules, fail):
    """One log against the rules of its track."""
    if run.overrides:
        fail(run.path, f"overrides: {', '.join(map(ascii, run.overrides))}; a record's settings stand in its code")
    if run.resumed:
        fail(run.path, "the run was resumed; a record's runs are whole")
    if run.track != rules.name:
        fail(run.path, f"is a run of track {ascii(run.track)}, the record lies under {rules.name}")
    for name in ("tokenizer", "val_tokens", "val_sha256", "target_loss"):
        if run.config[name] != getattr(rules, name):
            fail(run.path, f"{name} is {ascii(run.config[name])}, the track's is {getattr(rules, name)}")
    if run.validity.get("val_tokens") != str(rules.val_tokens):
        fail(run.path, f"{ascii(run.validity.get('val_tokens'))} validation tokens were scored, the track has "
                       f"{rules.val_tokens}")
    if rules.manifest_sha256 and run.data_sha256 != rules.manifest_sha256:
        fail(run.path, f"data manifest {ascii(run.data_sha256)[1:13]}... is not the track's "
                       f"({rules.manifest_sha256[:12]}...); build it with run.sh")
    if run.shards != "ok":
        fail(run.path, f"shards: {ascii(run.shards)}; those that a record's run reads must be the manifest's (ok)")


def check_gates(record, fail):
    """Runs pass each validity gate that their log names, and lack none; a parent's code may be older than a gate."""
    for runs, day in ((record.runs, record.date), (record.baseline, "")):
        for run in runs:
            for gate, since in GATES.items():
                if run.validity.get(gate) != "ok" and (gate in run.validity or day >= since):
                    fail(run.path, f"validity gate {gate} is {ascii(run.validity.get(gate))}, must be ok")


def check_distinct(folder, runs, fail):
    """No run counts twice: seeds, run ids and curves all differ."""
    for what, key in (("seed", lambda run: run.seed), ("run", lambda run: run.run),
                      ("curve of losses", lambda run: str(run.curves["train"]))):
        seen = {}
        for run in runs:
            first = seen.setdefault(key(run), run)
            if first is not run:
                shown = f" {key(run)}" if what != "curve of losses" else ""
                fail(folder, f"{run.path.name} and {first.path.name} have the same {what}{shown}; a run counts once")


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


def check_batch(folder, runs, fail):
    """All declared runs of a side are there: none dropped, none added, few restarted."""
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
        missing = sorted(set(range(1, declared + 1)) - set(present))
        if missing:
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
    order = order_of_pairs(record.code_sha256, batch.number, min(batch.declared, MOST_LOGS)) if record.baseline and batch \
        else sorted(places)
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


def check_lineage(record, repository, fail):
    """The parent's Record, or None. A speed claim extends the chain of records at its tip."""
    others = [other for other in repository.records[record.track] if other.name != record.name]
    path = record.folder / "result.json"
    if record.parent is None:
        roots = [other.name for other in others if other.result and not other.parent]
        if earlier := [name for name in roots if name < record.name]:
            fail(path, f"names no parent, though {earlier[0]} came before")
        return None
    parent = next((other for other in others if other.name == record.parent), None)
    if parent is None or parent.date > record.date:
        fail(path, f"parent {record.parent} is no earlier record of the track")
        return None
    ancestor, seen = parent, {record.name}
    while ancestor is not None:
        if ancestor.name in seen:
            fail(path, f"{record.name} is its own ancestor")
            return None
        seen.add(ancestor.name)
        ancestor = next((other for other in others if other.name == ancestor.parent), None)
    if not parent.runs or not parent.source:
        fail(path, f"parent {record.parent} cannot be read")
        return None
    for other in others:
        if record.claims_speed and other.claims_speed and other.parent == record.parent and other.name < record.name:
            fail(path, f"{record.parent} was already beaten by {other.name}; measure against that")
    for base in record.baseline:
        if base.code_sha256 != parent.code_sha256:
            fail(base.path, f"is no run of the parent {record.parent}: its code is {base.code_sha256[:8]}")
    return parent


def check_claims(record, rules, parent, fail):
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
    if not loss["p"] < p_needed:
        fail(record.folder / "logs", f"target {loss['target']:g} not reached: mean loss {loss['mean']:.5f} of "
                                     f"{len(record.runs)} runs, p = {loss['p']:.3g}, below {p_needed:g} is needed")
    if record.claims_speed and not (speed and speed["p"] < p_needed):
        shown = f"{render.difference(speed)}, p = {speed['p']:.3g}" if speed else "one pair only"
        fail(record.folder / "baseline", f"not shown to be faster than {record.parent}: {shown}, below {p_needed:g} is "
                                         f"needed")
    check_written(record, expected, fail)


def check_written(record, expected, fail):
    path = record.folder / "result.json"
    for key in sorted(expected.keys() | record.result.keys()):
        if key not in expected or record.result.get(key) != expected[key]:
            found, wanted = (ascii(side.get(key))[:100] for side in (record.result, expected))
            fail(path, f"{ascii(key)[1:-1][:40]} is {found}, the logs say {wanted}")
    try:
        if render.block_of(record.readme, render.FIGURES) != render.record_block(expected):
            fail(record.folder / "README.md", "the figures are not those of the logs; `submit` wrote other ones")
    except RecordError as error:
        fail(record.folder / "README.md", str(error))


def check_copies(records):
    """Failures of logs that stand in two of these records: a run counts for one."""
    seen, failures = {}, []
    for record in records:
        for run in [*record.runs, *record.baseline]:
            first = seen.setdefault((run.code_sha256, run.seed, str(run.curves["train"])), (record, run))
            if first[0] is not record:
                failures.append(Failure(run.path, f"is the run {first[1].run} of {first[0].name}; a run counts for one "
                                                  f"record"))
    return failures


def judge_one(record, repository):
    """Every Failure of one record among those of the repository, which may hold it or not."""
    others = [other for records in repository.records.values() for other in records
              if (other.track, other.name) != (record.track, record.name)]
    copies = check_copies([*others, record])
    return judge(record, repository) + [failure for failure in copies if failure.path.is_relative_to(record.folder)]


def judge_records(repository):
    """Every Failure of the repository's records."""
    everything = [record for records in repository.records.values() for record in records]
    failures = [failure for record in everything for failure in judge(record, repository)] + check_copies(everything)
    for track in repository.rules:
        if repository.track_folder(track).is_symlink():
            failures.append(Failure(repository.track_folder(track), "is a symbolic link; records lie in a folder"))
    return failures


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
