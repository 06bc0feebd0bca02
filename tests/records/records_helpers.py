"""Synthetic records: logs as the trainer writes them, from a source that must never run; and scripts that stand in for
a trainer."""
import hashlib
import json
import re
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

import train_gpt
from records import render
from records.__main__ import main
from records.log import Batch, order_of_pairs
from records.record import Repository
from records.submit import submit

STEPS = 60
YESTERDAY = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)  # when runs began
TARGET = 0.88  # of the nano track here, whatever it is now
MANIFEST = Repository.at().rules["nano"].manifest_sha256
WHY = "It takes fewer steps, since each of them does more."
README = "# A repository\n\n<!-- records/nano -->\nNo records yet.\n<!-- end -->\n\nThe end.\n"


def tracks_text(config, calls=""):
    """The lines of a script that say what its tracks are: of one track, with these fields."""
    fields = "".join(f"    {name}: object = knob({value!r}, '')\n" for name, value in config.items())
    return f"\n\nclass Config:\n{fields}\n\nTRACKS = {{\n    {config['track']!r}: Config({calls}),\n}}\n"


def config_of_nano(**changes):
    return {**asdict(train_gpt.TRACKS["nano"]), "target_loss": TARGET, "steps": STEPS, **changes}


def source_of(word="first", padding=0, **changes):
    """A script that leaves a file behind if anything imports or runs it."""
    lines = [f"# {word}: line {number} of the padding\n" for number in range(padding)]
    return (f"open('executed', 'w').write({word!r})\nraise SystemExit('executed')\n" + "".join(lines)
            + tracks_text(config_of_nano(**changes)))


def log_text(run, source=None, seed=1, loss=0.87, time_ms=60_000, counter=1, declared=4, batch=1, start=1, steps=STEPS,
             device="Slow CPU (R) @ 2 GHz x2", data=MANIFEST, config=None, cpu_ms=None,
             started=YESTERDAY):
    """What Log, log_header and finish write for one complete run on the nano track."""
    source = source_of() if source is None else source
    values = json.loads(json.dumps(config_of_nano(seed=seed, run_id=run, steps=steps, **config or {})))
    sha = hashlib.sha256(source.encode()).hexdigest()
    rng, lines = np.random.default_rng(seed), []
    for step in range(1, steps + 1):
        at = round(time_ms * step / steps)
        tail = f"train_time:{at}ms step_avg:{at / step:.2f}ms"
        if step % values["log_every"] == 0 or step == steps:
            noisy = loss + 3 / step + 0.1 * rng.random()
            lines.append(f"step:{step}/{steps} train_loss:{noisy:.5f} lr_mul:1.000 {tail}")
        if step == steps or (values["val_every"] and step % values["val_every"] == 0):
            lines.append(f"step:{step}/{steps} val_loss:{loss + 2 * (steps - step) / steps:.5f} {tail}")
    return "\n".join([
        source.rstrip("\n"), "===== END OF CODE =====",
        f"run:{run} track:nano commit:{'0' * 40} dirty:0 code_sha256:{sha} seed:{seed} world_size:1 device:{device} "
        f"torch:2.13.0+cpu cuda:none triton:none started:{started:%Y-%m-%dT%H:%M:%SZ}",
        "config:" + json.dumps(values), f"batch:{batch} counter:{counter}/{declared} start:{start}",
        f"data:{data} shards:ok backends:attention=sdpa,matmul=torch-bfloat16,compile=inductor",
        "size: matrices=1 embeddings_and_head=2 ngram_table=3", "===== START =====", *lines,
        "comms: sent_bytes per step none=0",
        f"validity: causal:ok normalised:ok local:ok val_tokens:{values['val_tokens']} "
        f"val_sha256:{values['val_sha256']}",
        f"final val_loss:{loss:.5f} train_time:{time_ms}ms tokens:{4096 * steps} peak_memory:900MiB tokens_per_s:4096 "
        f"mfu:1.5% cpu_time:{2 * time_ms if cpu_ms is None else cpu_ms}ms",
        f"status:ok run:{run} val_loss:{loss:.5f} train_time:{time_ms / 1000:.1f}s log:logs/{run}/log.txt "
        f"plot:logs/{run}/loss.png"]) + "\n"


def sha_of(source):
    return hashlib.sha256(source.encode()).hexdigest()


def name_of(source, base="", count=0):
    """What `run`, or with a base `ab`, calls its experiment, of 4 runs or 8 pairs where no count is given."""
    count = count or (8 if base else 4)
    pair = f"-{sha_of(base)[:8]}" if base else ""
    return f"{'ab' if base else 'run'}-nano-{sha_of(source)[:8]}{pair}-n{count}"


def write_logs(folder, source, base="", count=4, rng=1, loss=0.87, time_ms=60_000, base_ms=0, spread=0.001, batch=1,
               began=YESTERDAY, **values):
    """Logs of a batch of runs with scattered losses and times, in pairs with those of a base if there is one; returns
    the paths, of both sides with a base."""
    rng, paths = np.random.default_rng(rng), {"a": [], "b": []}
    order = order_of_pairs(sha_of(source), batch, count) if base else [("a", number) for number in range(1, count + 1)]
    for side, number in order:
        run = f"{name_of(source, base, count)}-{number:02d}{side if base else ''}"
        paths[side].append(Path(folder) / run / "log.txt")
        took = round((base_ms if side == "b" else time_ms) * (1 + 0.002 * rng.standard_normal()))
        text = log_text(run, **{
            "source": base if side == "b" else source, "seed": Batch(batch, number, count, 1).seed(sha_of(source)),
            "loss": loss + spread * rng.standard_normal(), "counter": number, "declared": count, "batch": batch,
            "time_ms": took, "started": began, **values})
        paths[side][-1].parent.mkdir(parents=True)
        paths[side][-1].write_text(text)
        began += timedelta(milliseconds=took, seconds=20)
    return (paths["a"], paths["b"]) if base else paths["a"]


def make_repository(root):
    """An empty repository with the real tracks, but for the target of one."""
    (root / "records" / "nano").mkdir(parents=True)
    (root / "records" / "README.md").write_text(README)
    rules = Repository.at().rules
    return Repository(root, {**rules, "nano": replace(rules["nano"], target_loss=TARGET)})


def fresh(repository):
    """The same repository, read again."""
    return Repository(repository.root, repository.rules)


def add_first(repository, count=4, padding=0):
    """A first record; returns its folder."""
    logs = write_logs(repository.root / "logs", source_of("first", padding), count=count)
    record, failures = submit(fresh(repository), "First", logs)
    assert not failures, failures
    edit(record.folder / "README.md", re.escape(render.WHY), WHY)
    return record.folder


def add_faster(repository, name="Faster", before="first", word="second", rng=5, count=8, padding=0, time_ms=50_000):
    """A record with pairs against the last one, whose source has the word `before`; returns its folder."""
    logs, base = write_logs(repository.root / "logs", source_of(word, padding), source_of(before, padding), count, rng,
                            time_ms=time_ms, base_ms=1.2 * time_ms, began=YESTERDAY + timedelta(hours=2))
    record, failures = submit(fresh(repository), name, logs, base)
    assert not failures, failures
    edit(record.folder / "README.md", re.escape(render.WHY), WHY)
    return record.folder


def edit(path, old, new, count=0):
    """Replace a regular expression in a file; it must be found."""
    text = path.read_text()
    changed = re.sub(old, new, text, count=count, flags=re.MULTILINE)
    assert changed != text, (path, old)
    path.write_text(changed)


def rehash(path):
    """Make a log's code_sha256 that of its source, as a careful forger would."""
    text = path.read_text()
    sha = hashlib.sha256((text.partition("\n===== END OF CODE")[0] + "\n").encode()).hexdigest()
    path.write_text(re.sub(r"code_sha256:\w+", f"code_sha256:{sha}", text))


def call(repository, capsys, *words):
    """(exit status, stdout, stderr) of `python -m records` with these words, in this process."""
    capsys.readouterr()
    status = main([*map(str, words)], fresh(repository))
    return status, *capsys.readouterr()


# ----- scripts that stand in for a trainer

# Writes the log of a complete run in no time, and notes the order of runs and how each one was told its place. A file
# `stop` holds the number of a run and how it ends: "refused" before its log has a header, "failed" and "interrupted"
# (the caller is, as by Ctrl-C) after that.
FAKE = '''import hashlib, json, os, signal, sys, time
from pathlib import Path

def knob(default, help):
    return default


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
batch = ""
if "--run-of" in argv:
    batch = "batch:%s counter:%s start:%s\\n" % tuple(argv["--run-of"].split(":"))
folder = Path("logs") / run
folder.mkdir()
(folder / "checkpoint.pt").write_text("weights")
config = {{**{config}, "run_id": run, "seed": seed}}
header = f"""{{code.rstrip()}}
{{"=" * 5}} END OF CODE {{"=" * 5}}
run:{{run}} track:nano commit:0 dirty:0 code_sha256:{{hashlib.sha256(code.encode()).hexdigest()}} seed:{{seed}} \\
world_size:1 device:fake torch:1 cuda:none triton:none started:{{time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}}
config:{{json.dumps(config)}}
{{batch}}data:{manifest} shards:ok backends:none
size: small=1
{{"=" * 5}} START {{"=" * 5}}
"""
(folder / "log.txt").write_text(header)
if end == "interrupted":
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
if end:
    sys.exit(1)
loss, took = f"{{LOSS + (seed % 1000 + os.getpid() % 97) / 1e6:.5f}}", TIME + seed % 10 * 2 + os.getpid() % 10 * 2
time.sleep(took / 1000)
(folder / "log.txt").write_text(f"""{{header}}\\
step:1/2 train_loss:2.00000 train_time:{{took // 2}}ms step_avg:{{took // 2:.2f}}ms
step:1/2 val_loss:{{LOSS + 0.1:.5f}} train_time:{{took // 2}}ms step_avg:{{took // 2:.2f}}ms
step:2/2 train_loss:1.00000 train_time:{{took}}ms step_avg:{{took / 2:.2f}}ms
step:2/2 val_loss:{{loss}} train_time:{{took}}ms step_avg:{{took / 2:.2f}}ms
comms: none
validity: causal:ok normalised:ok local:ok val_tokens:{{config['val_tokens']}} val_sha256:{{config['val_sha256']}}
final val_loss:{{loss}} train_time:{{took}}ms tokens:2048 peak_memory:1MiB
status:ok run:{{run}} val_loss:{{loss}} train_time:{{took / 1000:.1f}}s log:l plot:p
""")
'''


def fake_trainer(field="run_of", loss=0.80, time=50, **changes):
    """A stand-in for a trainer, with or without the field that tells its place."""
    config = {"track": "nano", "run_id": "", "seed": -1, "steps": 2, "data": "d", "tokenizer": "bytes",
              "micro_batch_tokens": 1024, "micro_batches": ((0.0, 1),), "log_every": 1, "val_every": 1,
              **{key: config_of_nano()[key] for key in ("val_tokens", "val_sha256", "target_loss")}, **changes}
    tracks = tracks_text({**config, field: ""} if field else config).replace("run_of: object", "run_of: str")
    return FAKE.format(loss=loss, time=time, tracks=tracks, config=json.loads(json.dumps(config)), manifest=MANIFEST)


def order_of(repository):
    """[(number of a run with its letter, what it was told of its place), ...] of the stand-ins' runs."""
    return [tuple(line.split()) for line in (repository.root / "order.txt").read_text().splitlines()]
