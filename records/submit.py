"""`submit`: a record's folder out of the runs of the working script, which stays if it is good."""

import dataclasses
import json
import re
import shutil
from datetime import UTC, datetime

from records import render
from records.files import LOG_LIMIT, SCRIPT_LIMIT, RecordError, read_text, require
from records.judge import judge_records
from records.log import thin
from records.record import FOLDER, SCHEMA, figures
from records.source import sha256_of

COUNTED = ("run", "ab")  # kinds of experiments whose runs may be a record's


def own_script(repository, track):
    """The text of train_gpt.py, which is no record of the track yet."""
    known = ", ".join(repository.rules)
    require(track in repository.rules, f"--track {ascii(track)}: is none of {known}")
    source = read_text(repository.root / "train_gpt.py", SCRIPT_LIMIT)
    for record in repository.records[track]:
        is_own = record.source != source
        require(is_own, f"train_gpt.py is the code of {record.name}; change it first")
    return source


def batches_of(repository, track, source):
    """The names of the experiments with a script on a track whose runs count."""
    code = sha256_of(source)[:8]
    logs = repository.root / "logs"
    folders = [path for kind in COUNTED for path in logs.glob(f"{kind}-{track}-{code}*-n*")]
    return sorted({re.sub(r"(-n\d+)-.*", r"\1", path.name) for path in folders})


def logs_of(repository, track, source):
    """{part of a record: [paths]} of the logs of a script's runs on a track. A script has one
    batch."""
    found = batches_of(repository, track, source)
    require(
        len(found) == 1,
        f"{len(found)} batches of runs of train_gpt.py ({sha256_of(source)[:8]}) on {track} lie in "
        f"logs/{': ' * bool(found)}{', '.join(found)}; `python -m records ab` makes the one that "
        f"is due",
    )
    logs = {"logs": [], "baseline": []}
    for path in sorted((repository.root / "logs").glob(f"{found[0]}-*/log.txt")):
        logs["baseline" if path.parent.name.endswith("b") else "logs"].append(path)
    return logs


def submit(repository, name, track, authors):
    """Make records/<track>/<date>_<name>/ of the runs of the working script. Returns (record,
    failures): the folder stays only if there are no failures. RecordError for what cannot be
    tried at all."""
    folder_name = f"{datetime.now(UTC):%Y-%m-%d}_{name}"
    is_name = FOLDER.fullmatch(folder_name)
    require(is_name, f"--name {ascii(name)}: up to 60 letters, digits and '-', no '-' first")
    source = own_script(repository, track)
    logs = logs_of(repository, track, source)
    folder = repository.track_folder(track) / folder_name
    require(not folder.exists(), f"{folder} exists; choose another --name")
    failures = None
    try:
        record = lay_out(repository, folder, track, logs, source)
        if not record.failures:
            write_figures(record, repository, authors)
        failures = judge_records(dataclasses.replace(repository))
        return record, failures
    finally:
        if failures != []:
            shutil.rmtree(folder, ignore_errors=True)


def lay_out(repository, folder, track, logs, source):
    """The Record of a new folder of the script, thin logs, and who is its parent."""
    tip = repository.tip(track)
    for part, paths in logs.items():
        if paths:
            (folder / part).mkdir(parents=True)
        for path in paths:
            (folder / part / f"{path.parent.name}.txt").write_text(thin_log(path))
    (folder / "train_gpt.py").write_text(source)
    (folder / "README.md").write_text("")
    known = {"schema": SCHEMA, "parent": tip.name if tip else None}
    (folder / "result.json").write_text(json.dumps(known))
    return repository.load(folder, track)


def thin_log(path):
    """What a record keeps of a run's log."""
    try:
        return thin(read_text(path, LOG_LIMIT + SCRIPT_LIMIT))
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def write_figures(record, repository, authors):
    """Write a record's result.json and README.md, the latter with the reasons that it has."""
    parents = {other.name: other for other in repository.records[record.track]}
    parent = parents.get(record.parent)
    found = figures(record, repository.rules[record.track], parent, authors)
    why = render.why_of(record.readme) or render.WHY
    text = json.dumps(found, indent=1) + "\n"
    (record.folder / "result.json").write_text(text)
    (record.folder / "README.md").write_text(render.record_readme(record, found, why))
