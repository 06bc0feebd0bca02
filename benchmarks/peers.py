"""English's recipe beside what people know: nanoGPT's Shakespeare, in nats a byte.

    python benchmarks/peers.py input.txt [--minutes 60]

The text is data/tinyshakespeare/input.txt of github.com/karpathy/char-rnn, which is no part of this
repository. As in nanoGPT, the first 90 % train and the last 10 % validate, but for what fills no
whole pass. The text is ASCII, so a byte is a character.

`ours` is the track english with the changes of OURS. The last part of its training text is read
into the index alone, and the network trains on the rest. `plain GPT` is plain_gpt.py at the sizes
of nanoGPT's quick start on a CPU, and should end at 1.90 ± 0.03. PPMd is measured where pyppmd is
installed (`pip install pyppmd==1.3.1`).

Seconds are processor time of one thread, so that other work hardly changes them: of training and of
reading the index, without warm-up and validation. Five seeds take about half an hour of a free
core. A call goes on where the last one stopped, and begins no run once its minutes are over.

Results: benchmarks/results/peers.{json,md}. The last line,
`tinyshakespeare:<nats a byte> seconds:<s> nanogpt_ratio:<r>`, has the loss and the seconds of
`ours`, and how many times as long as `ours, short` the plain GPT takes to no lower a loss.
"""

import hashlib
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common, plain_gpt
from benchmarks.common import train_gpt

try:
    import pyppmd
except ImportError:
    pyppmd = None

NAME = "peers"
SEEDS = (1, 2, 3, 4, 5)
INDEX_SHARE = 0.5  # of the training text, for the index alone
TEXT_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
BYTES = {"tokenizer": "bytes", "vocab_size": 384, "eot_token": 256, "val_sha256": ""}

OURS = {  # what differs from the track english
    "copy_orders": (3, 5, 8, 12),
    "copy_reach": 65536,
    "document_cap": 1024,
    "index_order": 8,
    "index_bits": 20,
}
NO_TABLE = {"ngram_orders": (), "copy_orders": (), "index_order": 0}
ARMS = {
    "ours, short": {**OURS, "steps": 16, "copy_reach": 2048},
    "ours": {**OURS, "steps": 200},
    "ours without the table": {**OURS, **NO_TABLE, "steps": 200},
}
# nanoGPT's quick start on a CPU: layers, heads, channels, context, batch of 12 windows, rate.
PLAIN = plain_gpt.Setting(width=128, layers=4, context=64, batch=12 * 64, rate=1e-3)
PLAIN_STEPS = 2000
PPMD_ORDERS = (6, 16)

# From the README of github.com/karpathy/nanoGPT.
COMMAND = "python train.py config/train_shakespeare_char.py"
QUICK_START = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 "
    "--n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)
PUBLISHED = (
    [f"nanoGPT on an A100: `{COMMAND}`", "256 bytes", 1.4697, "3 minutes of the GPU", "not told"],
    [f"nanoGPT: `{COMMAND} {QUICK_START}`", "64 bytes", 1.88, "3 minutes", "not told"],
)


class Run(NamedTuple):
    """One training: a row of the table, its setting in words, and the seed."""

    arm: str
    setting: str
    seed: int


# ----- runs


def parts_of(text):
    """(bytes to train on, bytes to validate on) of a text; of the latter what fills passes."""
    cut = int(0.9 * len(text))
    size = train_gpt.TRACKS["english"].val_batch_tokens
    return text[:cut], text[cut : cut + (len(text) - cut) // size * size]


def config_of(values, parts, folder, seed):
    """The Config of a run of ours, whose corpus is written to a new folder."""
    train, val = parts
    cut = len(train)
    if values.get("index_order", True):
        cut -= int(INDEX_SHARE * cut)
    documents = [val, train[:cut], train[cut:]]
    tokens = [np.frombuffer(document, np.uint8).astype("<u2") for document in documents if document]
    common.write_corpus(folder, tokens, BYTES["eot_token"], len(val))
    own = {"data": str(folder), "seed": seed, "device": "cpu", "epochs": 1000}
    own |= {"index_tokens": len(documents[2]) + 1, "val_tokens": len(val)}  # 1: its end-of-text
    return train_gpt.with_values(train_gpt.TRACKS["english"], {**BYTES, **own, **values})


def train_ours(values, parts, seed):
    """(loss in nats a byte, processor seconds) of a run of ours."""
    with tempfile.TemporaryDirectory() as place:
        return common.trained(config_of(values, parts, Path(place, "corpus"), seed))


def train_plain(parts, seed):
    """(loss in nats a byte, processor seconds) of the plain GPT, on characters."""
    content = np.frombuffer(b"".join(parts), np.uint8)
    characters, ids = np.unique(content, return_inverse=True)
    train, val = torch.from_numpy(ids).tensor_split([len(parts[0])])
    val = torch.cat([train[-1:], val])  # every scored byte follows one
    corpus = SimpleNamespace(vocab_size=len(characters), train=train, val=val)
    training = plain_gpt.Training(PLAIN, seed, PLAIN_STEPS, corpus)
    began = time.process_time()
    for step in range(PLAIN_STEPS):
        training.step(step)
    seconds = time.process_time() - began
    return training.loss(), seconds


def code_with_ppmd(order, parts):
    """(loss in nats a byte, processor seconds for the training text) of PPMd, variant H."""

    def size_of(content):
        encoder = pyppmd.Ppmd7Encoder(order, 2**28)  # bytes of memory, more than it takes
        starts = range(0, len(content), 4096)  # pyppmd 1.3.1 loses output of long calls
        size = sum(len(encoder.encode(content[at : at + 4096])) for at in starts)
        return size + len(encoder.flush(endmark=False))

    began = time.process_time()
    before = size_of(parts[0])
    seconds = time.process_time() - began
    bits = 8 * (size_of(b"".join(parts)) - before)
    return bits * math.log(2) / len(parts[1]), seconds


def wanted():
    """All runs, in their order: seed by seed, the quickest first. PPMd has no seed."""
    for seed in SEEDS:
        if seed == SEEDS[0]:
            yield from (Run(f"PPMd of order {order}", str(order), seed) for order in PPMD_ORDERS)
        yield from (Run(arm, json.dumps(values), seed) for arm, values in ARMS.items())
        yield Run("plain GPT", json.dumps([*PLAIN, PLAIN_STEPS]), seed)


def measure(run, parts):
    """The figures of a run, as they stand in the results; None for PPMd without pyppmd."""
    if run.arm in ARMS:
        loss, seconds = train_ours(ARMS[run.arm], parts, run.seed)
    elif run.arm == "plain GPT":
        loss, seconds = train_plain(parts, run.seed)
    elif pyppmd is None:
        return None
    else:
        loss, seconds = code_with_ppmd(int(run.setting), parts)
    return {**run._asdict(), "loss": loss, "seconds": round(seconds, 2)}


def run_of(figures):
    return Run(*(figures[name] for name in Run._fields))


# ----- the page


def context_of(arm):
    """What a row reads to predict a byte, in words."""
    if arm == "plain GPT":
        return f"{PLAIN.context} bytes"
    if arm not in ARMS:
        return "all before it"
    config = train_gpt.with_values(train_gpt.TRACKS["english"], {**BYTES, **ARMS[arm]})
    table = f"; copies from {config.copy_reach:,}; the index, of {INDEX_SHARE:.0%} of training"
    return f"{config.val_windows[-1]} bytes" + table * bool(config.copy_orders)


def report(runs):
    """(the page, the last line) of the figures of the runs that are wanted."""
    found = {run.arm: [] for run in wanted()}
    for figures in runs:
        if run_of(figures) in set(wanted()):
            found[figures["arm"]].append((figures["loss"], figures["seconds"]))
    rows = []
    mean = {}
    for arm, pairs in found.items():
        row = ["not measured", "not measured"]
        if pairs:
            mean[arm] = np.mean(pairs, axis=0)
            losses, times = zip(*pairs, strict=True)
            row = [common.spread(losses, 4), common.spread(times, 1)]
        rows.append([arm, context_of(arm), *row, len(pairs)])
    header = ["what", "context", "validation loss, nats a byte", "processor seconds", "n"]
    loss = seconds = ratio = "not measured"
    if "ours" in mean:
        loss, seconds = f"{mean['ours'][0]:.4f}", f"{mean['ours'][1]:.1f}"
    if {"ours, short", "plain GPT"} <= mean.keys():
        own, plain = mean["ours, short"], mean["plain GPT"]
        ratio = f"{plain[1] / own[1]:.1f}" if own[0] <= plain[0] else "not reached"
    line = f"tinyshakespeare:{loss} seconds:{seconds} nanogpt_ratio:{ratio}"
    return f"{common.markdown_table(header, [*rows, *PUBLISHED])}\n\n`{line}`", line


def main(argv=None):
    parser = common.parser(__doc__, minutes=60.0)
    parser.add_argument("text", type=Path, help="nanoGPT's input.txt")
    arguments = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * arguments.minutes
    text = arguments.text.read_bytes()
    if hashlib.sha256(text).hexdigest() != TEXT_SHA256:
        sys.exit(f"error: {arguments.text} is not data/tinyshakespeare/input.txt of char-rnn")
    torch.set_num_threads(1)
    facts = common.environment("cpu")
    path = Path(arguments.results) / f"{NAME}.json"
    runs = json.loads(path.read_text())["runs"] if path.is_file() else []
    done = {run_of(figures) for figures in runs}
    for run in wanted():
        is_due = run not in done and time.monotonic() < deadline
        figures = measure(run, parts_of(text)) if is_due else None
        if figures:
            runs.append({**figures, "commit": facts["commit"]})
            print(f"{run.arm} seed:{run.seed} loss:{figures['loss']:.4f}", flush=True)
        page, line = report(runs)
        common.write_results(arguments.results, NAME, facts, {"runs": runs}, page)
    print(line)


if __name__ == "__main__":
    main()
