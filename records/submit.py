"""`submit`: a record's folder out of the runs of the working script, judged before it takes its
name."""

import json
import re
import shutil
from datetime import UTC, datetime

from records import render
from records.files import LOG_LIMIT, SCRIPT_LIMIT, read_text, require
from records.judge import judge_one
from records.log import thin
from records.record import AUTHORS, DRAFTS, FOLDER, SCHEMA, figures
from records.source import sha256_of


def own_script(repository, track):
    """The text of train_gpt.py, which is no record of the track yet."""
    known = ", ".join(repository.rules)
    require(track in repository.rules, f"--track {ascii(track)}: is none of {known}")
    source = read_text(repository.root / "train_gpt.py", SCRIPT_LIMIT)
    for record in repository.records[track]:
        is_own = record.source != source
        require(is_own, f"train_gpt.py is the code of {record.name}; change it first")
    return source


def logs_of(repository, track, source):
    """{"a": [paths], "b": [paths]} of the logs that `run` or `ab` left of a script on a track. A
    script has one batch."""
    code = sha256_of(source)[:8]
    found = {}
    for folder in sorted((repository.root / "logs").glob(f"*-{track}-{code}*-n*-*")):
        name, _, counter = folder.name.rpartition("-")
        if re.match(rf"(run-{track}-{code}|ab-{track}-{code}-[0-9a-f]{{8}})-n\d+$", name):
            side = "b" if counter.endswith("b") else "a"
            found.setdefault(name, {"a": [], "b": []})[side].append(folder / "log.txt")
    require(
        len(found) == 1,
        f"{len(found)} batches of runs of train_gpt.py ({code}) on {track} lie in logs/"
        f"{': ' * bool(found)}{', '.join(found)}; `python -m records ab` makes the one that is due",
    )
    return next(iter(found.values()))


def submit(repository, name, track, authors):
    """Make records/<track>/<date>_<name>/ of the runs of the working script. Returns (record,
    failures): the folder exists only if there are no failures. RecordError for what cannot be
    tried at all."""
    folder_name = f"{datetime.now(UTC):%Y-%m-%d}_{name}"
    is_name = FOLDER.fullmatch(folder_name)
    require(is_name, f"--name {ascii(name)}: up to 60 letters, digits and '-', no '-' first")
    shown = ascii(authors)[:60]
    require(AUTHORS.fullmatch(authors), f"--by {shown}: say who had the idea, in 100 letters")
    source = own_script(repository, track)
    logs = logs_of(repository, track, source)
    home = repository.track_folder(track)
    final = home / folder_name
    require(not final.exists(), f"{final} exists; choose another --name")
    staging = home / DRAFTS / folder_name
    shutil.rmtree(staging.parent, ignore_errors=True)  # of a submission that was killed
    try:
        record = lay_out(repository, staging, track, logs, source, authors)
        if not record.failures:
            write_figures(record, repository, authors)
            record = repository.load(staging, track)
        failures = judge_one(record, repository)
        if not failures:
            staging.rename(final)
            record = repository.load(final, track)
        return record, failures
    finally:
        shutil.rmtree(staging.parent, ignore_errors=True)


def lay_out(repository, folder, track, logs, source, authors):
    """The Record of a new folder of the script, thin logs, and who is its parent."""
    tip = repository.tip(track)
    for part, paths in (("logs", logs["a"]), ("baseline", logs["b"])):
        if paths:
            (folder / part).mkdir(parents=True)
        for path in paths:
            text = thin(read_text(path, LOG_LIMIT + SCRIPT_LIMIT))
            (folder / part / f"{path.parent.name}.txt").write_text(text)
    (folder / "train_gpt.py").write_text(source)
    (folder / "README.md").write_text("")
    known = {"schema": SCHEMA, "by": authors, "parent": tip.name if tip else None}
    (folder / "result.json").write_text(json.dumps(known))
    return repository.load(folder, track)


def write_figures(record, repository, authors):
    """Write a record's result.json and README.md, the latter with the reasons that it has."""
    parents = {other.name: other for other in repository.records[record.track]}
    parent = parents.get(record.parent)
    found = figures(record, repository.rules[record.track], parent, authors)
    why = render.why_of(record.readme) or render.WHY
    text = json.dumps(found, indent=1) + "\n"
    (record.folder / "result.json").write_text(text)
    (record.folder / "README.md").write_text(render.record_readme(record, found, why))
