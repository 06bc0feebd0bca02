"""`submit`: a record's folder out of logs, judged before it takes its name."""

import json
import shutil
from datetime import UTC, datetime

from records import render, stats
from records.files import LOG_LIMIT, RecordError, read_text
from records.judge import judge_one
from records.log import run_at, thin
from records.record import FOLDER, MOST_LOGS, SCHEMA, chain, figures, load, place_of


def gather(paths):
    """The Runs of log files or run folders, in the order of their counters."""
    runs = [run_at(path) for path in paths]
    if len(runs) > MOST_LOGS:
        raise RecordError(f"{len(runs)} logs: a record holds at most {MOST_LOGS}")
    return sorted(runs, key=place_of)


def lay_out(folder, runs, baseline):
    """Write the source and thin logs into a new folder."""
    for part, logs in (("logs", runs), ("baseline", baseline)):
        if logs:
            (folder / part).mkdir(parents=True)
        for run in logs:
            (folder / part / f"{run.run}.txt").write_text(thin(read_text(run.path, LOG_LIMIT)))
    (folder / "train_gpt.py").write_text(runs[0].source)


def write_figures(folder, repository, track):
    """Add result.json and README.md to a folder of source and logs."""
    links = chain(repository.records[track])
    parent = links[-1] if links else None
    known = {"schema": SCHEMA, "parent": parent.name if parent else None}
    write_result(folder, known)  # which says whose script the logs of the parent's runs lack
    record = load(folder, track, repository.track_folder(track))
    content = figures(record, repository.rules[track], parent)
    write_result(folder, content)
    (folder / "README.md").write_text(render.record_readme(content))


def write_result(folder, content):
    """Write a record's result.json."""
    (folder / "result.json").write_text(json.dumps(content, indent=1) + "\n")


def check_track(runs, repository):
    """The track of runs of which a record can be tried at all, or RecordError."""
    track = runs[0].track
    if track not in repository.rules:
        known = ", ".join(repository.rules)
        raise RecordError(f"track {ascii(track)} of the logs is none of {known}")
    for run in runs:
        if run.batch is None:
            raise RecordError(
                f"{run.path}: no declared number of runs; use `python -m records run`"
            )
    return track


def submit(repository, name, logs, baseline=()):
    """Make records/<track>/<date>_<name>/ of logs. Returns (record, failures): the folder exists
    only if there are no failures. RecordError for what cannot be tried at all."""
    folder_name = f"{datetime.now(UTC):%Y-%m-%d}_{name}"
    if not FOLDER.fullmatch(folder_name):
        raise RecordError(
            f"--name {ascii(name)}: up to 60 letters, digits and '-', a letter or digit first"
        )
    runs = gather(logs)
    base = gather(baseline)
    track = check_track(runs, repository)
    final = repository.track_folder(track) / folder_name
    if final.exists():
        raise RecordError(f"{final} exists; choose another --name")
    staging = repository.track_folder(track) / ".submitting" / folder_name
    shutil.rmtree(staging.parent, ignore_errors=True)  # of a submission that was killed
    try:
        lay_out(staging, runs, base)
        write_figures(staging, repository, track)
        record = load(staging, track, repository.track_folder(track))
        failures = judge_one(record, repository, draft=True)
        if not failures:
            staging.rename(final)
            record.folder = final
        return record, failures
    finally:
        shutil.rmtree(staging.parent, ignore_errors=True)


def pull_request(record):
    """The description of the pull request that adds a record."""
    figures = record.result
    loss = figures["loss"]
    return "\n".join(
        [
            f"# {record.track}: {record.name[11:]}",
            "",
            f"- Record: `records/{record.track}/{record.name}/`",
            f"- Training time: {render.seconds(figures['train_time_ms']['mean'])} s on "
            f"{render.cell(render.hardware(figures))}",
            f"- Validation loss: {loss['mean']:.5f} ± {loss['std']:.5f}, "
            f"n = {len(figures['runs'])}, target {loss['target']:g}, {render.p_text(loss['p'])}",
            f"- Against its parent: {claim(figures)}",
            f"- Code: {figures['lines_added']} lines added, {figures['lines_removed']} removed",
            "",
            "## Why it works",
            "",
            render.WHY,
            "",
            "- [x] `python -m records verify` passes",
            "- [ ] the record's README says why",
        ]
    )


def claim(figures):
    """What a pull request says of the gain in time."""
    speed = figures["speed"]
    if not speed:
        return "no claim of speed"
    return (
        f"{render.difference(speed)} against {figures['parent']} in {speed['pairs']} interleaved "
        f"pairs ({stats.CONFIDENCE:.0%} interval), {render.clocks(speed)}, "
        f"{render.p_text(speed['p'])}"
    )
