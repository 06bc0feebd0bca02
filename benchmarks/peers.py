"""English's recipe beside what people know: nanoGPT's Shakespeare, in nats a byte.

    python benchmarks/peers.py input.txt [--minutes 60] [--own FILE]

The text is data/tinyshakespeare/input.txt of github.com/karpathy/char-rnn, which is no part of this
repository. As in nanoGPT, the first 90 % train and the last 10 % validate, but for what fills no
whole pass. The text is ASCII, so a byte is a character.

`ours` is the track english with the changes of OURS. What the network does not come to is read into
the index alone, half of the training text at least. `--own FILE` adds a table of another text, a
file in UTF-8: ours, one seed, a long run of it, and PPMd. `plain GPT` is plain_gpt.py at the sizes
of nanoGPT's quick start on a CPU, and should end at 1.90 ± 0.03. PPMd is measured where pyppmd is
installed (`pip install pyppmd==1.3.1`).

Seconds are processor time of one thread, so that other work hardly changes them: of training and of
reading the index, without warm-up and validation. Five seeds take about half an hour of a free
core. A call goes on where the last one stopped, and begins no run once its minutes are over.

Results: benchmarks/results/peers.{json,md}. The last line,
`tinyshakespeare:<nats a byte> seconds:<s> nanogpt_ratio:<r>`, has the loss and the seconds of
`ours`, and how many times as long as `ours, short` the plain GPT takes to no lower a loss: medians
of seconds, since other work makes some runs longer.
"""

import hashlib
import itertools
import json
import math
import statistics
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
TEXT = "tinyshakespeare"
TEXT_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
BYTES = {"tokenizer": "bytes", "vocab_size": 384, "eot_token": 256, "val_sha256": ""}

OURS = {  # what differs from the track english
    "steps": 150,
    "copy_orders": (2, 3, 5, 8, 12),
    "copy_reach": 65536,
    "document_cap": 1024,
    "index_order": 8,
    "matrix_lr": 0.035,
    "adam_lr": 0.05,
}
NO_TABLE = {"ngram_orders": (), "copy_orders": (), "index_order": 0}
ARMS = {
    "ours, short": {**OURS, "steps": 10, "copy_reach": 2048},
    "ours": OURS,
    "ours without the table": {**OURS, **NO_TABLE},
    "ours, long": {**OURS, "steps": 2400, "index_order": 11, "matrix_lr": 0.03, "adam_lr": 0.03},
}
TEXT_ARMS = ("ours, short", "ours", "ours without the table")
OWN_ARMS = ("ours", "ours, long")  # of another text, which should be ten times as long
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
    """One training: the text, a row of its table, its setting in words, and the seed."""

    text: str
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
    own = {"data": str(folder), "seed": seed, "device": "cpu", "epochs": 1000}
    config = train_gpt.with_values(train_gpt.TRACKS["english"], {**BYTES, **own, **values})
    cut = len(train)
    sizes = {"val_tokens": len(val)}
    if config.index_order:
        read = config.steps * config.stages[0].micro_batches * config.micro_batch_tokens
        cut = min(cut - cut // 2, read)
        indexed = len(train) - cut
        sizes["index_tokens"] = indexed + 1  # with the end-of-text ahead of it
    documents = [val, train[:cut], train[cut:]]
    tokens = [np.frombuffer(document, np.uint8).astype("<u2") for document in documents if document]
    common.write_corpus(folder, tokens, BYTES["eot_token"], len(val))
    return train_gpt.with_values(config, {**sizes, **values})


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


def settings_of(text):
    """{arm: its setting in words} of the table of a text."""
    settings = {f"PPMd of order {order}": str(order) for order in PPMD_ORDERS}
    chosen = TEXT_ARMS if text == TEXT else OWN_ARMS
    settings |= {arm: json.dumps(ARMS[arm]) for arm in chosen}
    if text == TEXT:
        settings["plain GPT"] = json.dumps([*PLAIN, PLAIN_STEPS])
    return settings


def wanted(text):
    """All runs, in their order: seed by seed, the quickest first. PPMd has no seed."""
    for seed in SEEDS if text == TEXT else SEEDS[:1]:
        for arm, setting in settings_of(text).items():
            if seed == SEEDS[0] or not arm.startswith("PPMd"):
                yield Run(text, arm, setting, seed)


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
    table = f"; copies from {config.copy_reach:,}; the index"
    return f"{config.val_windows[-1]} bytes" + table * bool(config.copy_orders)


def table_of(runs, text):
    """(the table of a text in Markdown, {arm: its mean loss and its median of seconds})."""
    settings = settings_of(text)
    found = {arm: [] for arm in settings}
    for figures in runs:
        run = run_of(figures)
        if run.text == text and run.setting == settings.get(run.arm):
            found[run.arm].append((figures["loss"], figures["seconds"]))
    rows = []
    mean = {}
    for arm, pairs in found.items():
        row = ["not measured", "not measured"]
        if pairs:
            losses, times = zip(*pairs, strict=True)
            mean[arm] = statistics.mean(losses), statistics.median(times)
            row = [common.spread(losses, 4), common.spread(times, 1)]
        rows.append([arm, context_of(arm), *row, len(pairs)])
    rows += PUBLISHED if text == TEXT else ()
    header = ["what", "context", "validation loss, nats a byte", "processor seconds", "n"]
    return common.markdown_table(header, rows), mean


def report(runs):
    """(the page, the last line) of the figures of the runs that are wanted."""
    table, mean = table_of(runs, TEXT)
    loss = seconds = ratio = "not measured"
    if "ours" in mean:
        loss, seconds = f"{mean['ours'][0]:.4f}", f"{mean['ours'][1]:.1f}"
    if {"ours, short", "plain GPT"} <= mean.keys():
        own, plain = mean["ours, short"], mean["plain GPT"]
        ratio = f"{plain[1] / own[1]:.1f}" if own[0] <= plain[0] else "not reached"
    line = f"tinyshakespeare:{loss} seconds:{seconds} nanogpt_ratio:{ratio}"
    parts = [table, f"`{line}`"]
    for text in sorted({run_of(figures).text for figures in runs} - {TEXT}):
        parts += [f"{text}:", table_of(runs, text)[0]]
    return "\n\n".join(parts), line


def read(path):
    """The content of a file; the benchmark ends where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        sys.exit(f"error: {path}: {error.strerror}; name a file of text")


def own_text(path):
    """{its name: its content} of another text; empty without one."""
    if path is None:
        return {}
    content = read(path)
    if not parts_of(content)[1]:
        sys.exit(f"error: {path} has {len(content):,} bytes; a table needs 45,000 or more")
    digest = hashlib.sha256(content).hexdigest()[:12]
    return {f"{path.name}, {len(content):,} bytes, sha256 {digest}": content}


def main(argv=None):
    parser = common.parser(__doc__, minutes=60.0)
    parser.add_argument("text", type=Path, help="nanoGPT's input.txt")
    parser.add_argument("--own", type=Path, help="another text, for a table of its own")
    arguments = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * arguments.minutes
    text = read(arguments.text)
    if hashlib.sha256(text).hexdigest() != TEXT_SHA256:
        sys.exit(f"error: {arguments.text} is not data/tinyshakespeare/input.txt of char-rnn")
    texts = {TEXT: text, **own_text(arguments.own)}
    torch.set_num_threads(1)
    facts = common.environment("cpu")
    path = Path(arguments.results) / f"{NAME}.json"
    runs = json.loads(path.read_text())["runs"] if path.is_file() else []
    done = {run_of(figures) for figures in runs}
    for run in itertools.chain.from_iterable(map(wanted, reversed(texts))):
        is_due = run not in done and time.monotonic() < deadline
        figures = measure(run, parts_of(texts[run.text])) if is_due else None
        if figures:
            runs.append({**figures, "commit": facts["commit"]})
            print(f"{run.text}, {run.arm} seed:{run.seed} loss:{figures['loss']:.4f}", flush=True)
        page, line = report(runs)
        common.write_results(arguments.results, NAME, facts, {"runs": runs}, page)
    print(line)


if __name__ == "__main__":
    main()
