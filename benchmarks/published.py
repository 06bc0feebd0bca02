"""fineweb's recipe at 96 channels on a CPU, beside the published trainer at the same sizes.

    python benchmarks/published.py [--text english] [--steps 400] [--seeds 1,2,3] [--arm ours]

Both train on the same pieces of the same vocabulary in the same order, by the published schedule,
with windows and document caps of a quarter of the published ones, n-grams of order 2 alone in
equally many rows, and neither index nor copies. The published trainer is modded-nanogpt's
train_gpt.py of commit f411b3d3, run in float32 after replacements of text that let it run on a CPU.
It is no part of this repository; its figures are.

A run of 400 steps takes about four minutes of one core. Each adds a line to
benchmarks/results/published.jsonl, and published.md has them all; `--seeds ""` writes the page
alone.
"""

import dataclasses
import itertools
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

from benchmarks import common
from benchmarks.common import train_gpt

NAME = "published"
DIM = 96
HEADS = 6
SCALE = 1 / 4  # of windows and document caps
# 7,680 rows learn with the published table's rate. fineweb has more rows, and an index beside them.
ROWS = {"ngram_orders": (2,), "ngram_rows": 7680, "ngram_lr": 0.6}
NO_HINTS = {"copy_orders": (), "index_order": 0}
# What differs from fineweb, by the name of an arm.
ARMS = {
    "ours": {},
    # Of equal mean square, scores of 16 channels reach 4.5 at most, and those of 128 12.8.
    "ours, tuned": {"embed_lr": 2.0, "attention_scale": 0.5, "untie_at": 0.0},
}


def config_of(text, steps, seed, arm="ours"):
    """The Config of a run of ours on the corpus data/TEXT."""
    fineweb = train_gpt.TRACKS["fineweb"]
    small = train_gpt.TRACKS["english-net"]
    stages = [
        dataclasses.replace(
            stage,
            micro_batches=stage.micro_batches // 8,
            document_cap=round(SCALE * stage.document_cap),
            windows=tuple(round(SCALE * window) for window in stage.windows),
            softmax_rows=0,
        )
        for stage in fineweb.stages
    ]
    values = {
        "data": str(common.ROOT / "data" / text),
        "tokenizer": small.tokenizer,
        "vocab_size": small.vocab_size,
        "eot_token": small.eot_token,
        "steps": steps,
        "seed": seed,
        "micro_batch_tokens": small.micro_batch_tokens,
        "micro_batches_a_pass": 1,
        "stages": stages,
        "model_dim": DIM,
        "head_dim": DIM // HEADS,
        "mlp_dim": 4 * DIM,
        # So that scores of narrower heads are as large as those of 128 channels.
        "attention_scale": fineweb.attention_scale * (fineweb.head_dim * HEADS / DIM) ** 0.5,
        "val_tokens": small.val_tokens,
        "val_batch_tokens": small.val_batch_tokens,
        "val_windows": tuple(round(SCALE * window) for window in fineweb.val_windows),
        "val_every": 0,
        "dtype": "float32",
        "compile": False,
        "device": "cpu",
    }
    config = train_gpt.with_values(fineweb, {**values, **ROWS, **NO_HINTS, **ARMS[arm]})
    tokens = train_gpt.fitting_val_tokens(config)
    return train_gpt.with_values(config, {"val_tokens": tokens})


def runs_in(folder):
    """All runs that were ever added, a dict each."""
    path = Path(folder, f"{NAME}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add_run(folder, run):
    """Append a run in one piece, so that two processes can at a time."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder, f"{NAME}.jsonl"), "a") as file:
        file.write(json.dumps(run) + "\n")


def report(runs):
    """(a table of runs, a row for each text, number of steps and arm; the lines of results)."""
    losses, seconds = {}, {}
    for run in runs:
        key = run["text"], run["steps"], run["arm"]
        losses.setdefault(key, {})[run["seed"]] = run["loss"]
        seconds.setdefault(key, []).append(run["seconds"])
    rows = []
    lines = []
    for (text, steps, arm), own in sorted(losses.items()):
        took = round(statistics.median(seconds[text, steps, arm]))
        rows.append([text, steps, arm, common.spread(own.values(), 4), len(own), took])
        # Beside the published arm with the same changes, and the published trainer as it is.
        peers = [arm.replace("ours", "published"), "published"] if arm in ARMS else []
        for peer in dict.fromkeys(peers):
            other = losses.get((text, steps, peer), {})
            both = own.keys() & other.keys()
            if both:
                means = [statistics.mean(side[seed] for seed in both) for side in (own, other)]
                words = f"ours:{means[0]:.4f} published:{means[1]:.4f} seeds:{len(both)}"
                lines.append(f"`{text} {words} steps:{steps}` ({arm}; {peer})")
    header = ["text", "steps", "arm", "loss", "n", "processor seconds"]
    return common.markdown_table(header, rows), lines


def main(argv=None):
    defaults = {"text": "english", "steps": 400, "seeds": "1,2,3", "arm": "ours"}
    arguments = common.parser(__doc__, **defaults).parse_args(argv)
    if arguments.arm not in ARMS:
        sys.exit(f"error: --arm {arguments.arm}: no such arm; they are {'; '.join(ARMS)}")
    of_all = {name: getattr(arguments, name) for name in ("text", "steps", "arm")}
    seeds = [int(seed) for seed in arguments.seeds.split(",") if seed]
    for seed, known in itertools.product(seeds, runs_in(arguments.results)):
        if {**of_all, "seed": seed}.items() <= known.items():
            sys.exit(f"error: --seeds {seed}: it has been run; name others, or other --results")
    torch.set_num_threads(1)
    facts = common.environment("cpu")
    for seed in seeds:
        config = config_of(arguments.text, arguments.steps, seed, arguments.arm)
        try:
            loss, seconds = common.trained(config)
        except train_gpt.ConfigError as error:
            sys.exit(f"error: {error}")
        run = {**of_all, "seed": seed, "loss": loss, "seconds": round(seconds, 1)}
        run |= {name: facts[name] for name in ("commit", "dirty", "date", "torch", "device")}
        add_run(arguments.results, run)
    runs = runs_in(arguments.results)
    table, lines = report(runs)
    last = [run for run in runs if run["arm"].startswith("ours")][-1]
    words = f"{last['device']}, one thread, torch {last['torch']}, last run of ours: commit"
    page = [table, *lines, f"{words} {last['commit'][:12]}, {last['date']}"]
    common.write_whole(arguments.results / f"{NAME}.md", "\n\n".join(page) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
