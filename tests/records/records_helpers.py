"""Synthetic records: logs as the trainer writes them, from a source that must never run; and
scripts that stand in for a trainer."""

import contextlib
import io
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from records import render, stats
from records.__main__ import main
from records.files import RecordError  # noqa: F401 (for the tests)
from records.log import parse_log, split_log
from records.record import Repository
from records.source import sha256_of as sha_of

STEPS = 60
YESTERDAY = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)  # when runs began
TARGET = 0.88  # of the mini track here, whatever it is now
RULES = Repository.at().rules["mini"]
MANIFEST = RULES["manifest_sha256"]
WHY = "It takes fewer steps, since each of them does more."
BOARDS = [
    f"<!-- records/{track} -->\nNo records yet.\n<!-- end -->" for track in Repository.at().rules
]
README = "\n\n".join(["# A repository", *BOARDS, "The end.\n"])


# What a log says of a configuration; the source says it in the trainer's form, see `tracks_text`.
CONFIG = {
    "track": "mini",
    "data": "data/python",
    "tokenizer": "bytes",
    "steps": STEPS,
    "micro_batch_tokens": 512,
    "stages": [{"start": 0.0, "micro_batches": 8, "lr": 1.0}],
    "rules": {"attention": {"group": "matrices", "lr_mul": [1.0, 0.5]}},
    "matrix_lr": 0.025,
    "cooldown": 0.45,
    "val_tokens": RULES["config"]["val_tokens"],
    "val_sha256": RULES["config"]["val_sha256"],
    "val_every": 0,
    "target_loss": TARGET,
    "dtype": "auto",
    "log_every": 20,
    "seed": -1,
    "run_id": "",
    "resume": "",
    "run_of": "",
}
NO_DEFAULT = {*CONFIG} - {"log_every", "seed", "run_id", "resume", "run_of"}
CLASSES = """
@dataclass(frozen=True)
class Stage:
    start: float
    micro_batches: int
    lr: float = 1.0


@dataclass(frozen=True)
class Rule:
    group: str
    lr_mul: float | tuple = 1.0


@dataclass(frozen=True, kw_only=True)
class Config:
"""


def config_of_mini(**changes):
    """The configuration that synthetic sources have."""
    return {**CONFIG, **changes}


def literal(value):
    """How a track of the trainer's form writes a value of a configuration."""
    if isinstance(value, (list, tuple)):
        return f"({''.join(literal(item) + ', ' for item in value)})"
    if isinstance(value, dict) and ("start" in value or "group" in value):
        kind = "Stage" if "start" in value else "Rule"
        words = []
        for name, item in value.items():
            if name not in ("lr", "lr_mul") or item != 1.0:  # which has that default
                words.append(f"{name}={literal(item)}")
        return f"{kind}({', '.join(words)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {literal(item)}" for key, item in value.items()) + "}"
    return repr(value)


def tracks_text(config):
    """The lines of a script that say what its tracks are: of one track, with these fields."""
    fields = []
    words = []
    for name, value in config.items():
        if name in NO_DEFAULT:
            fields.append(f"    {name}: object = knob('what it is')\n")
            words.append(f"        {name}={literal(value)},\n")
        else:
            fields.append(f"    {name}: object = knob('what it is', default={literal(value)})\n")
    track = f"    {config['track']!r}: Config(\n{''.join(words)}    ),\n"
    return f"{CLASSES}{''.join(fields)}\n\nTRACKS = {{\n{track}}}\n"


def source_of(word="first", padding=0, **changes):
    """A script that leaves a file behind if anything imports or runs it."""
    lines = [f"# {word}: line {number} of the padding\n" for number in range(padding)]
    return (
        f"open('executed', 'w').write({word!r})\nraise SystemExit('executed')\n"
        + "".join(lines)
        + tracks_text(config_of_mini(**changes))
    )


def step_lines(values, rng, loss, time_ms):
    """The lines of a run's losses, the last of which is `loss`."""
    steps = values["steps"]
    lines = []
    for step in range(1, steps + 1):
        at = round(time_ms * step / steps)
        tail = f"train_time:{at}ms step_avg:{at / step:.2f}ms"
        if step % values["log_every"] == 0 or step == steps:
            noisy = loss + 3 / step + rng.random()
            lines.append(f"step:{step}/{steps} train_loss:{noisy:.5f} lr_mul:1.000 {tail}")
        if step == steps or (values["val_every"] and step % values["val_every"] == 0):
            above = loss + 2 * (steps - step) / steps
            lines.append(f"step:{step}/{steps} val_loss:{above:.5f} {tail}")
    return lines


def log_text(
    run,
    source=None,
    seed=1,
    loss=0.87,
    time_ms=60_000,
    counter=1,
    declared=4,
    start=1,
    steps=STEPS,
    device="Slow CPU (R) @ 2 GHz x2",
    data=MANIFEST,
    config=None,
    dtype="bfloat16",
    cpu_ms=None,
    started=YESTERDAY,
):
    """The log that the trainer writes for one complete run on the mini track. dtype: what the
    machine makes of `auto`."""
    source = source_of() if source is None else source
    place = f"1:{counter}/{declared}:{start}"
    values = {**(config or CONFIG), "seed": seed, "run_id": run, "steps": steps, "run_of": place}
    if values["dtype"] == "auto":
        values["dtype"] = dtype
    cpu_ms = 2 * time_ms if cpu_ms is None else cpu_ms
    tokens = steps * values["stages"][0]["micro_batches"] * values["micro_batch_tokens"]
    lines = [
        source.rstrip("\n"),
        "===== END OF CODE =====",
        f"run:{run} track:mini commit:{'0' * 40} dirty:0 code_sha256:{sha_of(source)} seed:{seed} "
        f"world_size:1 device:{device} torch:2.13.0+cpu cuda:none triton:none "
        f"started:{started:%Y-%m-%dT%H:%M:%SZ}",
        "config:" + json.dumps(values),
        f"batch:1 counter:{counter}/{declared} start:{start}",
        f"data:{data} shards:ok backends:attention=sdpa,matmul=torch-bfloat16,compile=inductor",
        "size: matrices=1 embeddings_and_head=2 ngram_table=3",
        "===== START =====",
        *step_lines(values, np.random.default_rng(seed), loss, time_ms),
        "comms: sent_bytes per step (messages) none=0(0)",
        f"validity: causal:ok normalised:ok local:ok unmoved:ok val_tokens:{values['val_tokens']} "
        f"val_sha256:{values['val_sha256']}",
        f"final val_loss:{loss:.5f} train_time:{time_ms}ms tokens:{tokens} "
        f"peak_memory:900MiB tokens_per_s:{1000 * tokens / time_ms:.0f} mfu:1.5% "
        f"cpu_time:{cpu_ms}ms",
        f"status:ok run:{run} val_loss:{loss:.5f} train_time:{time_ms / 1000:.1f}s "
        f"log:logs/{run}/log.txt plot:logs/{run}/loss.png",
    ]
    return "\n".join(lines) + "\n"


def name_of(source):
    """What the experiment with a script on the mini track is called."""
    return f"mini-{sha_of(source)[:8]}"


def write_logs(
    folder,
    source,
    base="",
    count=4,
    rng=1,
    loss=0.87,
    time_ms=60_000,
    base_ms=0,
    spread=0.001,
    began=YESTERDAY,
    **values,
):
    """Logs of a batch of runs with scattered losses and times, in pairs with those of a base if
    there is one; returns the paths, of both sides with a base."""
    rng = np.random.default_rng(rng)
    paths = {"a": [], "b": []}
    order = stats.order_of_pairs(sha_of(source), 1, count)
    order = [place for place in order if base or place[0] == "a"]
    for side, number in order:
        run = f"{name_of(source)}-{number:02d}{side}"
        paths[side].append(Path(folder) / run / "log.txt")
        took = round((base_ms if side == "b" else time_ms) * (1 + 0.002 * rng.standard_normal()))
        text = log_text(
            run,
            **{
                "source": base if side == "b" else source,
                "seed": stats.seed_of(sha_of(source), 1, number),
                "loss": loss + spread * rng.standard_normal(),
                "counter": number,
                "declared": count,
                "time_ms": took,
                "started": began,
                **values,
            },
        )
        paths[side][-1].parent.mkdir(parents=True)
        paths[side][-1].write_text(text)
        began += timedelta(milliseconds=took, seconds=20)
    return (paths["a"], paths["b"]) if base else paths["a"]


def make_repository(root):
    """An empty repository with the real tracks, but for the target of one."""
    (root / "records" / "mini").mkdir(parents=True)
    (root / "records" / "README.md").write_text(README)
    fixed = {name: CONFIG[name] for name in ("tokenizer", "val_tokens", "val_sha256")}
    mini = {**RULES, "config": {**fixed, "target_loss": TARGET}}
    return Repository(root, {**Repository.at().rules, "mini": mini})


def fixing(repository, **fields):
    """The same repository, whose track's rules fix these fields of the configuration, too."""
    rules = repository.rules["mini"]
    mini = {**rules, "config": {**rules["config"], **fields}}
    return Repository(repository.root, {**repository.rules, "mini": mini})


def fresh(repository):
    """The same repository, read again."""
    return Repository(repository.root, repository.rules, repository.merged)


def add_first(repository, count=4, padding=0):
    """A first record; returns its folder."""
    source = source_of("first", padding)
    write_logs(repository.root / "logs", source, count=count)
    return submitted(repository, "First", source)


def tried(repository, name, source):
    """The exit status of `submit` with this script as the working one."""
    (repository.root / "train_gpt.py").write_text(source)
    words = ["submit", "--name", name, "--by", "A. Speedrunner"]
    return main(words, fresh(repository))


def submitted(repository, name, source):
    """The folder of a record of the runs of a script, which are good, with its reasons."""
    assert tried(repository, name, source) == 0
    (folder,) = (repository.home / "mini").glob(f"*_{name}")
    edit(folder / "README.md", re.escape(render.WHY), WHY)
    return folder


def add_faster(
    repository,
    name="Faster",
    before="first",
    word="second",
    rng=5,
    count=8,
    padding=0,
    time_ms=50_000,
):
    """A record with pairs against the last one, whose source has the word `before`; returns its
    folder."""
    write_logs(
        repository.root / "logs",
        source_of(word, padding),
        source_of(before, padding),
        count,
        rng,
        time_ms=time_ms,
        base_ms=1.2 * time_ms,
        began=YESTERDAY + timedelta(hours=2),
    )
    return submitted(repository, name, source_of(word, padding))


def refusal(repository):
    """The line with which `verify` refuses a repository; empty where it does not."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        status = main(["verify"], fresh(repository))
    assert status == (2 if said.getvalue() else 0)
    return said.getvalue().removeprefix("records: ").removesuffix("\n")


def edit(path, old, new, count=0, missing_ok=False):
    """Replace a regular expression in a file; it must be found, unless that is said."""
    text = path.read_text()
    changed = re.sub(old, new, text, count=count, flags=re.MULTILINE)
    assert missing_ok or changed != text, (path, old)
    path.write_text(changed)


def stored(path):
    """The Run of a thin log in a record's folder, with the script that its code_sha256 names."""
    scripts = [script.read_text() for script in Path(path).parents[2].glob("*/train_gpt.py")]
    code = re.search(r"code_sha256:(\w+)", Path(path).read_text())[1]
    return parse_log(path, next(script for script in scripts if sha_of(script) == code))


def run_at(path):
    """The Run of a whole log, or of the one in a run's folder."""
    path = Path(path) / "log.txt" if Path(path).is_dir() else Path(path)
    source, _ = split_log(path.read_text())
    return parse_log(path, source)


def call(repository, capsys, *words):
    """(exit status, stdout, stderr) of `python -m records` with these words, in this process."""
    capsys.readouterr()
    status = main([*map(str, words)], fresh(repository))
    return status, *capsys.readouterr()


# ----- scripts that stand in for a trainer

# Writes the log of a complete run in no time, and notes the order of runs and how each one was told
# its place. A file `stop` holds the number of a run and how it ends: "refused" before its log has a
# header, "failed" after that, "interrupted1" or "interrupted2": so often the caller is, as by
# Ctrl-C.
FAKE = '''import hashlib, json, os, random, signal, sys, time
from dataclasses import dataclass, field
from pathlib import Path


def knob(help, **default):
    return field(**default)

{tracks}

LOSS, TIME = {loss}, {time}
argv = dict(zip(sys.argv[1::2], sys.argv[2::2]))
run, code, seed = argv["--run-id"], Path(__file__).read_text(), int(argv["--seed"])
number, stop, end = run.rpartition("-")[2], Path("stop"), None
with open("order.txt", "a") as order:
    order.write(number + " " + argv.get("--run-of", "-") + "\\n")
if stop.exists() and stop.read_text().split()[0] == number:
    end = stop.read_text().split()[1]
    stop.unlink()
if end == "refused":
    sys.exit("status:error no data")
place = ""
if "--run-of" in argv:
    place = "batch:%s counter:%s start:%s\\n" % tuple(argv["--run-of"].split(":"))
folder = Path("logs") / run
folder.mkdir()
(folder / "checkpoint.pt").write_text("weights")
config = {{**{config}, "run_id": run, "seed": seed, "run_of": argv.get("--run-of", "")}}
if config.get("dtype") == "auto":
    fast = Path("fast.txt")  # the dtype that the machine is fast in
    config["dtype"] = argv.get("--dtype", fast.read_text() if fast.exists() else "float32")
header = f"""{{code.rstrip()}}
{{"=" * 5}} END OF CODE {{"=" * 5}}
run:{{run}} track:mini commit:0 dirty:0 code_sha256:{{hashlib.sha256(code.encode()).hexdigest()}} \\
seed:{{seed}} world_size:1 device:fake torch:1 cuda:none triton:none \\
started:{{time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}}
config:{{json.dumps(config)}}
{{place}}data:{manifest} shards:ok backends:none
size: small=1
{{"=" * 5}} START {{"=" * 5}}
"""
(folder / "log.txt").write_text(header)
for _ in range(int((end or "0")[-1:]) if (end or "").startswith("inter") else 0):
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.4)  # what Python takes for one press is over after 0.25 s
if end == "failed":
    sys.exit("it broke")
loss = f"{{LOSS + (seed % 1000 + os.getpid() % 97) / 1e6:.5f}}"
first = f"{{2 + 1000 * random.random():.5f}}"
took = TIME + seed % 10 * 2 + os.getpid() % 10 * 2
time.sleep(took / 1000)
(folder / "log.txt").write_text(f"""{{header}}\\
step:1/2 train_loss:{{first}} train_time:{{took // 2}}ms step_avg:{{took // 2:.2f}}ms
step:1/2 val_loss:{{LOSS + 0.1:.5f}} train_time:{{took // 2}}ms step_avg:{{took // 2:.2f}}ms
step:2/2 train_loss:1.00000 train_time:{{took}}ms step_avg:{{took / 2:.2f}}ms
step:2/2 val_loss:{{loss}} train_time:{{took}}ms step_avg:{{took / 2:.2f}}ms
comms: sent_bytes per step (messages) none=0(0)
validity: causal:ok normalised:ok local:ok unmoved:ok val_tokens:{{config['val_tokens']}} \\
val_sha256:{{config['val_sha256']}}
final val_loss:{{loss}} train_time:{{took}}ms tokens:2048 peak_memory:1MiB \\
tokens_per_s:{{round(2048000 / took)}} mfu:1.5% cpu_time:{{took}}ms
status:ok run:{{run}} val_loss:{{loss}} train_time:{{took / 1000:.1f}}s log:logs/{{run}}/log.txt
""")
'''


def fake_trainer(loss=0.80, time=50, **changes):
    """A stand-in for a trainer."""
    config = {
        "track": "mini",
        "data": "d",
        "tokenizer": "bytes",
        "steps": 2,
        "micro_batch_tokens": 1024,
        "stages": [{"start": 0.0, "micro_batches": 1, "lr": 1.0}],
        "val_tokens": RULES["config"]["val_tokens"],
        "val_sha256": RULES["config"]["val_sha256"],
        "val_every": 1,
        "target_loss": TARGET,
        "log_every": 1,
        "seed": -1,
        "run_id": "",
        "run_of": "",
        **changes,
    }
    tracks = tracks_text(config)
    return FAKE.format(loss=loss, time=time, tracks=tracks, config=config, manifest=MANIFEST)


def order_of(repository):
    """[(number of a run with its letter, what it was told of its place), ...] of the stand-ins'
    runs."""
    return [
        tuple(line.split()) for line in (repository.root / "order.txt").read_text().splitlines()
    ]
