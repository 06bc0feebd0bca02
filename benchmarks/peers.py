"""The recipe of the CPU's track on nanoGPT's own text, beside nanoGPT's figures.

    python benchmarks/peers.py input.txt [--minutes 60]

The text is data/tinyshakespeare/input.txt of github.com/karpathy/char-rnn, which is no part of this
repository. As in nanoGPT, the first 90 % train and the last 10 % validate, but for what fills no
whole pass. The text is ASCII, so a byte is a character, and losses are in nats a byte.

`ours` is the CPU's track with the changes of ARMS, whose steps and orders were chosen with the
first seed. It reads the text once, or a part of it. `plain GPT` is plain_gpt.py at the sizes of
nanoGPT's quick start on a CPU. Seconds are processor time of one thread, of training alone. A call
goes on where the last one stopped.

Results: benchmarks/results/peers.{json,md}. The last line is
`tinyshakespeare quick_start_ratio:<r> below_a100:<seconds> seeds:<n>`: how many times as long as
`ours, short` the plain GPT trains, to a loss that is no lower; and the seconds of `ours`, whose
loss is below that of nanoGPT on an A100. Seconds are medians, since other work makes some longer.
"""

import hashlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common, plain_gpt
from benchmarks.common import train_gpt

NAME = "peers"
SEEDS = (1, 2, 3, 4, 5)
TEXT_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
BYTES = {"tokenizer": "bytes", "vocab_size": 384, "eot_token": 256, "val_sha256": ""}
OF_BYTES = {"document_cap": 1024, "ngram_orders": (2, 3, 4, 6)}
ARMS = {  # what differs from the track
    "ours, short": {"steps": 8, **OF_BYTES},
    "ours": {"steps": 66, **OF_BYTES},
    "ours, as long as english": {"steps": 156, **OF_BYTES},
}
PLAIN_ARM = "plain GPT"
# nanoGPT's quick start on a CPU: layers, heads, channels, context, batch of 12 windows, rate.
PLAIN = plain_gpt.Setting(width=128, layers=4, context=64, batch=12 * 64, rate=1e-3)
PLAIN_STEPS = 2000

# From the README of github.com/karpathy/nanoGPT.
A100_LOSS = 1.4697
PUBLISHED = (
    [
        "nanoGPT's train_shakespeare_char on an A100",
        256,
        A100_LOSS,
        "3 minutes of the GPU",
        "unknown",
    ],
    ["nanoGPT's quick start on a CPU", 64, 1.88, "3 minutes", "unknown"],
)


# ----- runs


def parts_of(text):
    """(bytes to train on, bytes to validate on) of a text; the latter fill whole passes."""
    cut = int(0.9 * len(text))
    size = common.TRACK.val_batch_tokens
    return text[:cut], text[cut : cut + (len(text) - cut) // size * size]


def config_of(values, parts, folder, seed):
    """The Config of a run of ours, whose corpus is written to a new folder."""
    train, val = (np.frombuffer(part, np.uint8).astype("<u2") for part in parts)
    common.write_corpus(folder, [val, train], BYTES["eot_token"], len(val))
    own = {"data": str(folder), "val_tokens": len(val), "seed": seed, "device": "cpu"}
    return train_gpt.with_values(common.TRACK, {**BYTES, **own, **values})


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


def wanted():
    """All trainings in their order, as the figures that tell one from another."""
    settings = {**ARMS, PLAIN_ARM: [*PLAIN, PLAIN_STEPS]}
    for seed in SEEDS:
        for arm, setting in settings.items():
            yield {"arm": arm, "setting": json.dumps(setting), "seed": seed}


def measure(run, parts):
    """(loss in nats a byte, processor seconds) of one of the trainings that are wanted."""
    if run["arm"] == PLAIN_ARM:
        return train_plain(parts, run["seed"])
    return train_ours(ARMS[run["arm"]], parts, run["seed"])


def figures_of(run, runs):
    """The figures of a training among those that have run, or None."""
    return next((figures for figures in runs if run.items() <= figures.items()), None)


# ----- the page


def last_line(means, medians, seeds):
    """The last line, of {arm: mean loss} and {arm: median seconds} of the arms that have run."""
    ratio = below = "not measured"
    if {"ours, short", PLAIN_ARM} <= means.keys():
        is_reached = means["ours, short"] <= means[PLAIN_ARM]
        quotient = medians[PLAIN_ARM] / medians["ours, short"]
        ratio = f"{quotient:.1f}" if is_reached else "not reached"
    if "ours" in means:
        below = f"{medians['ours']:.1f}" if means["ours"] < A100_LOSS else "not reached"
    return f"tinyshakespeare quick_start_ratio:{ratio} below_a100:{below} seeds:{seeds}"


def report(runs):
    """(the page, the last line) of the figures of runs with today's settings."""
    found = {arm: [] for arm in (*ARMS, PLAIN_ARM)}
    for run in wanted():
        if figures := figures_of(run, runs):
            found[run["arm"]].append((figures["loss"], figures["seconds"]))
    rows = []
    means = {}
    medians = {}
    for arm, pairs in found.items():
        row = ["not measured", "not measured"]
        if pairs:
            losses, times = zip(*pairs, strict=True)
            means[arm] = statistics.mean(losses)
            medians[arm] = statistics.median(times)
            row = [common.spread(losses, 4), common.spread(times, 1)]
        context = PLAIN.context if arm == PLAIN_ARM else common.TRACK.copy_reach
        rows.append([arm, context, *row, len(pairs)])
    header = ["what", "context, bytes", "validation loss, nats a byte", "processor seconds", "n"]
    line = last_line(means, medians, min(map(len, found.values())))
    return f"{common.markdown_table(header, [*rows, *PUBLISHED])}\n\n`{line}`", line


def read_text(path):
    """The content of nanoGPT's input.txt. Ends the benchmark where the file is another."""
    try:
        text = path.read_bytes()
    except OSError as error:
        sys.exit(f"error: {path}: {error.strerror}; name a file of text")
    if hashlib.sha256(text).hexdigest() != TEXT_SHA256:
        sys.exit(f"error: {path} is not data/tinyshakespeare/input.txt of char-rnn")
    return text


def main(argv=None):
    parser = common.parser(__doc__, minutes=60.0)
    parser.add_argument("text", type=Path, help="nanoGPT's input.txt")
    arguments = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * arguments.minutes
    parts = parts_of(read_text(arguments.text))
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(common.TRACK.matmul_precision)  # of both sides
    facts = common.environment("cpu")
    path = Path(arguments.results) / f"{NAME}.json"
    runs = json.loads(path.read_text())["runs"] if path.is_file() else []
    for run in wanted():
        if figures_of(run, runs) or time.monotonic() > deadline:
            continue
        loss, seconds = measure(run, parts)
        runs.append({**run, "loss": loss, "seconds": seconds, "commit": facts["commit"]})
        print(f"{run['arm']} seed:{run['seed']} loss:{loss:.4f}", flush=True)
        common.write_results(arguments.results, NAME, facts, {"runs": runs}, report(runs)[0])
    print(report(runs)[1])


if __name__ == "__main__":
    main()
