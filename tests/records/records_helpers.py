"""Synthetic records: logs as the trainer writes them, from a source that must never run; and a
script that stands in for a trainer."""

import contextlib
import io
import json
import math
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from records import files, render, stats
from records.__main__ import main
from records.experiment import lay_out
from records.files import RecordError
from records.log import parse_log, split_log
from records.record import Repository
from records.source import sha256_of as sha_of

TRACK = files.RULES["default_track"]
YESTERDAY = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)  # when runs began
LATER = YESTERDAY + timedelta(hours=6)  # than all runs of `pristine`
WHY = "It takes fewer steps, since each of them does more."
VALIDATION = {"val_tokens": 262_144, "val_sha256": "5e" * 32}
FIXED = {"tokenizer": "bytes", "eot_token": 256, **VALIDATION, "target_loss": 0.88}
BOARD = {"track": TRACK, "config": FIXED, "manifest_sha256": "da" * 32, "copy_loss": 0.004}
WEB = {**BOARD, "track": "web", "config": {**FIXED, "val_sha256": ""}}
RULES = {TRACK: BOARD, "web": WEB}
GATES = "6a" * 32  # of the gates that judge these runs
files.RULES["gates_sha256"].append(GATES)
SCHEDULE = {"steps": 60, "log_every": 10, "val_every": 0, "micro_batch_tokens": 512}
STAGES = [{"start": 0.0, "micro_batches": 8, "lr": 1.0}]
RUN = {"seed": -1, "run_id": "", "resume": "", "run_of": ""}
MODEL = {"cooldown": 0.45, "layers": [0, 2], "matrix_lr": 0.025, "dtype": "bfloat16"}
CONFIG = {"track": TRACK, **FIXED, **SCHEDULE, "stages": STAGES, **MODEL, **RUN}
FIRST_PAGE = "# First\n\n<!-- headline -->\n<!-- end -->\n\n<!-- records -->\n<!-- end -->\n"
HERE = Path(__file__).parent
CLASSES = (HERE / "classes.txt").read_text()  # of a configuration


def tracks_text(config):
    """The lines of a script that say what its only track is."""
    stages = [f"Stage({row['start']}, {row['micro_batches']})" for row in config["stages"]]
    fields = []
    for name, value in config.items():
        shown = repr(tuple(value) if isinstance(value, list) else value)
        shown = f"({', '.join(stages)},)" if name == "stages" else shown
        fields.append(f"    {name}: object = knob({shown}, 'what it is')\n")
    track = config["track"]
    return f"{CLASSES}{''.join(fields)}\n\nTRACKS = {{{track!r}: Config(track={track!r})}}\n"


def source_of(word="first", **changes):
    """A script that leaves a file behind if anything imports or runs it."""
    lines = f"open('executed', 'w').write({word!r})\nraise SystemExit('executed')\n"
    return lines + tracks_text({**CONFIG, **changes})


def step_lines(seed, loss, time_ms):
    """The lines of a run's losses, the last of which is `loss`."""
    rng = np.random.default_rng(seed)
    lines = []
    for step in range(10, 61, 10):
        at = round(time_ms * step / 60)
        tail = f"train_time:{at}ms step_avg:{at / step:.2f}ms"
        noisy = loss + 3 / step + rng.random()
        lines.append(f"step:{step}/60 train_loss:{noisy:.5f} lr_mul:1.000 {tail}")
    return [*lines, f"step:60/60 val_loss:{loss:.5f} {tail}"]


def log_text(run, source, seed, place="1:1/4:1", config=CONFIG, started=YESTERDAY, **result):
    """The log that the trainer writes for one complete run. result: its loss and time_ms, say."""
    loss, time_ms = result["loss"], result["time_ms"]
    values = {**config, "seed": seed, "run_id": run, "run_of": place}
    batch, counter, begun = place.split(":")
    facts = {"run": run, "batch": batch, "counter": counter, "start": begun}
    facts |= {"cpu_ms": 2 * time_ms, "seconds": time_ms / 1000}
    facts |= {"tokens": 60 * 8 * 512, "speed": 60 * 8 * 512_000 / time_ms}
    facts |= {"source": source.rstrip("\n"), "code_sha256": sha_of(source), "gates": GATES}
    facts |= {"started": f"{started:%Y-%m-%dT%H:%M:%SZ}", "config": json.dumps(values)}
    facts |= {"losses": "\n".join(step_lines(seed, loss, time_ms))}
    facts |= {"val_sha256": values["val_sha256"] or "ab" * 32, "manifest": BOARD["manifest_sha256"]}
    facts |= {"bits": loss / math.log(2), "control": loss - 0.09}
    return (HERE / "log.txt").read_text().format(**{**values, **facts, **result})


def name_of(source, track=TRACK):
    """What the experiment with a script is called."""
    return f"{track}-{sha_of(source)[:8]}"


def write_logs(
    root, source, base="", count=4, time_ms=60_000, began=YESTERDAY, slower=1 / 1.2, **values
):
    """Logs of a batch of runs in a repository, with scattered losses and times, in pairs with those
    of a base if there is one, which takes a fifth longer unless told; returns their paths, those of
    the source first. values: of log_text."""
    rng = np.random.default_rng(list(source.encode()))
    track = values.get("config", CONFIG)["track"]
    paths = []
    order = stats.order_of_pairs(sha_of(source), 1, count)
    for side, number in [place for place in order if base or place[0] == "a"]:
        run = f"{name_of(source, track)}-{number:02d}{side}"
        took = time_ms * (1 + 0.002 * rng.standard_normal())
        text = log_text(
            run,
            base if side == "b" else source,
            stats.seed_of(sha_of(source), 1, number),
            loss=0.87 + 0.001 * rng.standard_normal(),
            time_ms=round(took / slower if side == "b" else took),
            place=f"1:{number}/{count}:1",
            started=began,
            **values,
        )
        path = root / "logs" / run / "log.txt"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        paths.append(path)
        began += timedelta(milliseconds=took / slower if side == "b" else took, seconds=20)
    return sorted(paths, key=lambda path: (path.parent.name[-1], path))


def pairs(repository, word="third", before="second", began=LATER, tail=""):
    """Runs of another idea beside its parent's, in logs/; returns its script."""
    source = source_of(word) + tail
    write_logs(repository.root, source, source_of(before), 6, 50_000, began)
    return source


def make_repository(root):
    """An empty repository."""
    (root / "records" / TRACK).mkdir(parents=True)
    boards = [f"<!-- records/{track} -->\nNo records yet.\n<!-- end -->" for track in RULES]
    (root / "records" / "README.md").write_text("\n\n".join(["# A repository", *boards, "End.\n"]))
    (root / "README.md").write_text(FIRST_PAGE)
    return Repository(root, RULES)


def ruled(root, **rules):
    """The repository in a folder, whose board has these rules, too."""
    return Repository(root, {**RULES, TRACK: {**RULES[TRACK], **rules}})


def fresh(repository):
    """The same repository, read again."""
    return Repository(repository.root, repository.rules, repository.merged)


def make_two_records(root):
    """A repository of two records, First and Faster, the second of which claims speed against the
    first, and current pages."""
    repository = make_repository(root)
    write_logs(root, source_of("first"))
    submitted(repository, "First", source_of("first"))
    began = YESTERDAY + timedelta(hours=2)
    submitted(repository, "Faster", pairs(repository, "second", "first", began))
    assert main(["table"], fresh(repository)) == 0
    return repository


def submitted(repository, name, source):
    """The folder of a record of the runs of a script, which are good, with its reasons."""
    (repository.root / "train_gpt.py").write_text(source)
    words = ["submit", "--name", name, "--by", "A. Speedrunner"]
    assert main(words, fresh(repository)) == 0
    folder = folder_of(repository, name)
    edit(folder / "README.md", re.escape(render.WHY), WHY)
    return folder


def folder_of(repository, name):
    """The folder of a record, by its name without the date."""
    return next((repository.home / TRACK).glob(f"*_{name}"))


def logs_in(folder, part="logs"):
    return sorted((folder / part).iterdir())


def forced(repository, name, source, track=TRACK, is_form=False):
    """A record's folder of the runs of a script as `submit` would make it, if it let everything
    pass."""
    again = fresh(repository)
    folder = again.home / track / f"{folder_of(repository, 'First').name[:10]}_{name}"
    with contextlib.suppress(RecordError):
        lay_out(again, folder, source, "A. Forger", is_form)
        edit(folder / "README.md", re.escape(render.WHY), WHY)
    return folder


def rewrite(repository):
    """Make all figures those that the tool writes for the logs, where it can read them."""
    again = fresh(repository)
    with contextlib.suppress(RecordError):
        for record in again.all:
            page = render.record_readme(record, render.why_of(record.readme))
            (record.folder / "README.md").write_text(page)


def refusal(repository):
    """The line with which `verify` refuses a repository; empty where it does not."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["verify"], fresh(repository))
    line = err.getvalue()
    assert status == (2 if line else 0) and bool(line) != bool(out.getvalue())
    assert not files.CONTROL.search(line)
    assert re.fullmatch(r"(records: (records|README)[^:]*: .*\n)?", line), line
    return line.removeprefix("records: ").removesuffix("\n")


def edit(path, old, new, count=0):
    """Replace a regular expression in a file, in which it must be found."""
    text = path.read_text()
    changed = re.sub(old, new, text, count=count, flags=re.MULTILINE)
    assert changed != text, (path, old)
    path.write_text(changed)


def stored(path):
    """The Run of a thin log in a record's folder, with the script that its code_sha256 names."""
    scripts = [script.read_text() for script in path.parents[2].glob("*/train_gpt.py")]
    code = re.search(r"code_sha256:(\w+)", path.read_text())[1]
    return parse_log(path, next(script for script in scripts if sha_of(script) == code))


def runs_in(repository, name):
    """The Runs of the folders in logs/ with such names, whose logs are whole."""
    paths = sorted(repository.root.glob(f"logs/{name}/log.txt"))
    return [parse_log(path, split_log(path.read_text())[0]) for path in paths]


def call(repository, capture, *words):
    """(exit status, stdout, stderr) of `python -m records` with these words, in this process."""
    capture.readouterr()
    status = main([*map(str, words)], fresh(repository))
    return status, *capture.readouterr()


def done(repository, capture, *words):
    """What a call prints that succeeds."""
    status, out, err = call(repository, capture, *words)
    assert status == 0, out + err
    return out


def refused(repository, capture, *words):
    """The one line with which a call is refused."""
    status, out, err = call(repository, capture, *words)
    assert status == 2 and err.count("\n") == 1, out + err
    return err


# ----- a script that stands in for a trainer


def fake_trainer(loss=0.80, time=50, **changes):
    """It writes the log of a complete run in no time, and notes the order of runs and how each one
    was told its place. A file `stop` holds the number of a run and how it ends: "refused" before
    its log has a header, "failed" after that, or a signal, which the caller gets."""
    steps = {"steps": 3, "log_every": 1, "val_every": 1, "micro_batch_tokens": 1024}
    stages = [{"start": 0.0, "micro_batches": 1, "lr": 1.0}]
    config = {**CONFIG, **steps, "stages": stages, "dtype": "float32", **changes}
    script = (HERE / "fake_trainer.txt").read_text().replace("@TRACKS@", tracks_text(config))
    script = script.replace("@MANIFEST@", BOARD["manifest_sha256"]).replace("@GATES@", GATES)
    return script.replace("@LOSS@", str(loss)).replace("@TIME@", str(time))


def order_of(repository):
    """[(number of a stand-in's run with its letter, what it was told of its place), ...]."""
    lines = (repository.root / "order.txt").read_text().splitlines()
    return [tuple(line.split()) for line in lines]


SLOW = fake_trainer(loss=0.85, time=150)


def make_first(root):
    """A repository with a first record, of a slow stand-in, and a working script that is faster."""
    repository = make_repository(root)
    (root / "train_gpt.py").write_text(SLOW)
    assert main(["run", "--runs", "3"], repository) == 0
    submitted(repository, "First", SLOW)
    (root / "order.txt").unlink()
    (root / "train_gpt.py").write_text(fake_trainer())
    return repository
