"""Synthetic records: logs as the trainer writes them, from a source that must never run; and a
script that stands in for a trainer."""

import contextlib
import io
import json
import re
from datetime import UTC, datetime, timedelta

import numpy as np

from records import files, render, stats
from records.__main__ import main
from records.experiment import lay_out, write_figures
from records.files import RecordError
from records.log import parse_log, split_log
from records.record import Repository
from records.source import sha256_of as sha_of

TRACK = files.RULES["default_track"]
YESTERDAY = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)  # when runs began
LATER = YESTERDAY + timedelta(hours=6)  # than all runs of `pristine`
WHY = "It takes fewer steps, since each of them does more."
FIXED = {"tokenizer": "bytes", "val_tokens": 262_144, "val_sha256": "5e" * 32}
FIXED["target_loss"] = 0.88
RULES = {
    TRACK: {"config": FIXED, "manifest_sha256": "da" * 32, "copy_loss": 0.004},
    "web": {"config": {**FIXED, "val_sha256": ""}, "manifest_sha256": "", "copy_loss": 0.004},
}
SCHEDULE = {"steps": 60, "log_every": 10, "val_every": 0, "micro_batch_tokens": 512}
STAGES = [{"start": 0.0, "micro_batches": 8, "lr": 1.0}]
RUN = {"seed": -1, "run_id": "", "resume": "", "run_of": ""}
MODEL = {"cooldown": 0.45, "layers": [0, 2], "matrix_lr": 0.025, "dtype": "auto"}
CONFIG = {"track": TRACK, **FIXED, **SCHEDULE, "stages": STAGES, **MODEL, **RUN}
CLASSES = """
def knob(default, help_text):
    return field(default=default)


@dataclass(frozen=True)
class Stage:
    start: float = knob(MISSING, "where it begins")
    micro_batches: int = knob(MISSING, "of a step")
    lr: float = 1.0


@dataclass(frozen=True)
class Config:
"""


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


def log_text(
    run,
    source,
    seed=1,
    loss=0.87,
    time_ms=60_000,
    place="1:1/4:1",
    config=CONFIG,
    dtype="bfloat16",
    started=YESTERDAY,
):
    """The log that the trainer writes for one complete run. dtype: what it makes of `auto`."""
    values = {**config, "seed": seed, "run_id": run, "run_of": place}
    if values["dtype"] == "auto":
        values["dtype"] = dtype
    tokens = 60 * 8 * 512
    batch, counter, start = place.split(":")
    lines = [
        source.rstrip("\n"),
        "===== END OF CODE =====",
        f"run:{run} track:{values['track']} commit:{'0' * 40} dirty:0 "
        f"code_sha256:{sha_of(source)} seed:{seed} world_size:1 device:Slow CPU (R) @ 2.00GHz x2 "
        f"torch:2.13.0+cpu cuda:none triton:none started:{started:%Y-%m-%dT%H:%M:%SZ}",
        "config:" + json.dumps(values),
        f"batch:{batch} counter:{counter} start:{start}",
        f"data:{RULES[TRACK]['manifest_sha256']} shards:ok "
        "backends:attention=sdpa,matmul=torch-bfloat16,compile=inductor",
        "size: matrices=1 embeddings_and_head=2 ngram_table=3",
        "===== START =====",
        *step_lines(seed, loss, time_ms),
        "comms: sent_bytes per step (messages) none=0(0)",
        "gates: cuts:26 missed_1pct:0.77004 time:0.1s",
        f"validity: causal:ok normalised:ok local:ok unmoved:ok val_tokens:{values['val_tokens']} "
        f"val_sha256:{values['val_sha256'] or 'ab' * 32}",
        f"final val_loss:{loss:.5f} train_time:{time_ms}ms tokens:{tokens} "
        f"peak_memory:900MiB tokens_per_s:{1000 * tokens / time_ms:.0f} mfu:1.5% "
        f"cpu_time:{2 * time_ms}ms",
        f"status:ok run:{run} val_loss:{loss:.5f} train_time:{time_ms / 1000:.1f}s "
        f"log:logs/{run}/log.txt plot:logs/{run}/loss.png",
    ]
    return "\n".join(lines) + "\n"


def name_of(source, track=TRACK):
    """What the experiment with a script is called."""
    return f"{track}-{sha_of(source)[:8]}"


def write_logs(root, source, base="", count=4, time_ms=60_000, began=YESTERDAY, **values):
    """Logs of a batch of runs in a repository, with scattered losses and times, in pairs with those
    of a base if there is one, which takes a fifth longer; returns their paths, those of the source
    first. values: of log_text."""
    rng = np.random.default_rng(list(source.encode()))
    track = values.get("config", CONFIG)["track"]
    paths = []
    for side, number in stats.order_of_pairs(sha_of(source), 1, count):
        if side == "b" and not base:
            continue
        run = f"{name_of(source, track)}-{number:02d}{side}"
        took = time_ms * (1 + 0.002 * rng.standard_normal())
        text = log_text(
            run,
            base if side == "b" else source,
            stats.seed_of(sha_of(source), 1, number),
            loss=0.87 + 0.001 * rng.standard_normal(),
            time_ms=round(1.2 * took if side == "b" else took),
            place=f"1:{number}/{count}:1",
            started=began,
            **values,
        )
        path = root / "logs" / run / "log.txt"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        paths.append(path)
        began += timedelta(milliseconds=1.2 * took, seconds=20)
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
    return Repository(root, RULES)


def fixing(repository, **fields):
    """The same repository, whose track's rules fix these fields of the configuration, too."""
    rules = repository.rules[TRACK]
    changed = {**rules, "config": {**rules["config"], **fields}}
    return Repository(repository.root, {**repository.rules, TRACK: changed})


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


def tried(repository, name, source):
    """The exit status of `submit` with this script as the working one."""
    (repository.root / "train_gpt.py").write_text(source)
    return main(["submit", "--name", name, "--by", "A. Speedrunner"], fresh(repository))


def submitted(repository, name, source):
    """The folder of a record of the runs of a script, which are good, with its reasons."""
    assert tried(repository, name, source) == 0
    folder = folder_of(repository, name)
    edit(folder / "README.md", re.escape(render.WHY), WHY)
    return folder


def folder_of(repository, name):
    """The folder of a record, by its name without the date."""
    return next((repository.home / TRACK).glob(f"*_{name}"))


def logs_in(folder, part="logs"):
    return sorted((folder / part).iterdir())


def forced(repository, name, source, track=TRACK):
    """A record's folder of the runs of a script as `submit` would make it, if it let everything
    pass."""
    again = fresh(repository)
    folder = again.home / track / f"{folder_of(repository, 'First').name[:10]}_{name}"
    with contextlib.suppress(RecordError):
        lay_out(again, folder, source, "A. Forger")
        edit(folder / "README.md", re.escape(render.WHY), WHY)
    return folder


def rewrite(repository):
    """Make all figures those that the tool writes for the logs, where it can read them."""
    again = fresh(repository)
    with contextlib.suppress(RecordError):
        names = {record.name: record for record in again.all}
        for record in again.all:
            write_figures(again, record, names.get(record.parent), record.result["by"])


def refusal(repository):
    """The line with which `verify` refuses a repository; empty where it does not."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["verify"], fresh(repository))
    line = err.getvalue()
    assert status == (2 if line else 0) and bool(line) != bool(out.getvalue())
    assert not files.CONTROL.search(line)
    assert re.fullmatch(r"(records: records[^:]*: .*\n)?", line), line
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


# ----- a script that stands in for a trainer

# It writes the log of a complete run in no time, and notes the order of runs and how each one was
# told its place. A file `stop` holds the number of a run and how it ends: "refused" before its log
# has a header, "failed" after that, "interrupted1" or "interrupted2": so often the caller is, as by
# Ctrl-C.
FAKE = '''import hashlib, json, os, random, signal, sys, time
from dataclasses import MISSING, asdict, dataclass, field
from pathlib import Path

{tracks}

LOSS, TIME = {loss}, {time}
argv = dict(zip(sys.argv[1::2], sys.argv[2::2]))
run, code, seed = argv["--run-id"], Path(__file__).read_text(), int(argv["--seed"])
number, stop, end = run.rpartition("-")[2], Path("stop"), None
place = argv["--run-of"]
with open("order.txt", "a") as order:
    order.write(number + " " + place + "\\n")
if stop.exists() and stop.read_text().split()[0] == number:
    end = stop.read_text().split()[1]
    stop.unlink()
if end == "refused":
    sys.exit("status:error no data")
folder = Path("logs") / run
folder.mkdir()
(folder / "checkpoint.pt").write_text("weights")
config = {{**asdict(TRACKS[argv["--track"]]), "run_id": run, "seed": seed, "run_of": place}}
if config["dtype"] == "auto":
    fast = Path("fast.txt")  # the dtype that the machine is fast in
    config["dtype"] = argv.get("--dtype", fast.read_text() if fast.exists() else "float32")
header = f"""{{code.rstrip()}}
{{"=" * 5}} END OF CODE {{"=" * 5}}
run:{{run}} track:{{config["track"]}} commit:0 dirty:0 \\
code_sha256:{{hashlib.sha256(code.encode()).hexdigest()}} \\
seed:{{seed}} world_size:1 device:fake x2 torch:1 cuda:none triton:none \\
started:{{time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}}
config:{{json.dumps(config)}}
batch:{{place.split(":")[0]}} counter:{{place.split(":")[1]}} start:{{place.split(":")[2]}}
data:{manifest} shards:ok backends:none
size: small=1
{{"=" * 5}} START {{"=" * 5}}
"""
(folder / "log.txt").write_text(header)
for _ in range(int((end or "0")[-1:]) if (end or "").startswith("inter") else 0):
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.4)  # what Python takes for one press is over after 0.25 s
if end == "failed":
    sys.exit("it broke")
loss = round(LOSS + (seed % 1000 + os.getpid() % 97) / 1e6, 5)
took = TIME + seed % 10 * 2 + os.getpid() % 10 * 2
time.sleep(took / 1000)
lines = []
for step in (1, 2, 3):
    at = took * step // 3
    tail = f"train_time:{{at}}ms step_avg:{{at / step:.2f}}ms"
    lines.append(f"step:{{step}}/3 train_loss:{{2 + random.random():.5f}} lr_mul:1.000 {{tail}}")
    shown = loss if step == 3 else 2 + random.random()
    lines.append(f"step:{{step}}/3 val_loss:{{shown:.5f}} {{tail}}")
lines = "\\n".join(lines)
(folder / "log.txt").write_text(f"""{{header}}\\
{{lines}}
comms: sent_bytes per step (messages) none=0(0)
validity: causal:ok normalised:ok local:ok unmoved:ok val_tokens:{{config['val_tokens']}} \\
val_sha256:{{config['val_sha256']}}
final val_loss:{{loss:.5f}} train_time:{{took}}ms tokens:3072 peak_memory:1MiB \\
tokens_per_s:{{round(3072000 / took)}} mfu:1.5% cpu_time:{{took}}ms
status:ok run:{{run}} val_loss:{{loss:.5f}} train_time:{{took / 1000:.1f}}s log:logs/{{run}}/log.txt
""")
'''


def fake_trainer(loss=0.80, time=50, **changes):
    """A stand-in for a trainer."""
    steps = {"steps": 3, "log_every": 1, "val_every": 1, "micro_batch_tokens": 1024}
    stages = [{"start": 0.0, "micro_batches": 1, "lr": 1.0}]
    config = {**CONFIG, **steps, "stages": stages, "dtype": "float32", **changes}
    manifest = RULES[TRACK]["manifest_sha256"]
    return FAKE.format(loss=loss, time=time, tracks=tracks_text(config), manifest=manifest)


def order_of(repository):
    """[(number of a run with its letter, what it was told of its place), ...] of the stand-ins'
    runs."""
    lines = (repository.root / "order.txt").read_text().splitlines()
    return [tuple(line.split()) for line in lines]
