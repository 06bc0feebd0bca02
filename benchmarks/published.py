"""fineweb's recipe at 96 channels on a CPU, beside the published trainer at the same sizes.

    python benchmarks/published.py [--text english] [--steps 400] [--seeds 1,2,3] [--arm ours]

Both train on the same pieces of the same vocabulary in the same order, by the published schedule,
with windows and document caps of a quarter of the published ones, n-grams of order 2 alone in
equally many rows, and no copies. The published trainer is modded-nanogpt's train_gpt.py of commit
f411b3d3, run in float32 after replacements of text that let it run on a CPU. It is no part of this
repository; its figures are.

A run of 400 steps takes about four minutes of one core. Each adds a line to
benchmarks/results/published.jsonl, and published.md has them all; of two runs with one seed the
later counts.
"""

import dataclasses
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
# What is as on the CPU's track, so that both train on the same corpora.
SAME = ("tokenizer", "vocab_size", "eot_token", "micro_batch_tokens", "micro_batches_a_pass")
SAME += ("val_tokens", "val_batch_tokens", "val_every", "dtype", "compile")
# As many rows as the published table has at this size, at its rate, and no copies.
TABLE = {"ngram_orders": (2,), "ngram_rows": 7680, "ngram_lr": 0.6, "copy_orders": ()}
Stage = train_gpt.Stage
SCHEDULE = {  # that of the published trainer
    "stages": (
        Stage(0.0, 8, 896, (128, 384), 1.0, (1.0, 0.5, 0.25)),
        Stage(423 / 1285, 16, 2048, (384, 896), 1.52, (1.0, 0.5)),
        Stage(847 / 1285, 24, 2048, (640, 1408), 1.73),
        Stage(1270 / 1285, 24, 2048, (768, 1664), 1.73),
    ),
    "cooldown": (508 / 1285, 1270 / 1285),
    "final_lr": 0.15,
    "mean_share": 0.0,
    "untie_at": 0.66,
}
# What differs from fineweb, by the name of an arm.
ARMS = {
    "ours": {},
    # Of equal mean square, scores of 16 channels reach 4.5 at most, and those of 128 12.8.
    "ours, tuned": {"embed_lr": 2.0, "attention_scale": 0.5, "untie_at": 0.0},
}


def config_of(text, steps, arm, seed):
    """The Config of a run of ours on the corpus data/TEXT."""
    fineweb = train_gpt.TRACKS["fineweb"]
    stages = [
        dataclasses.replace(
            stage,
            micro_batches=stage.micro_batches // 8,
            document_cap=round(SCALE * stage.document_cap),
            windows=tuple(round(SCALE * window) for window in stage.windows),
        )
        for stage in SCHEDULE["stages"]
    ]
    values = {
        **SCHEDULE,
        "data": str(common.ROOT / "data" / text),
        "steps": steps,
        "seed": seed,
        "stages": stages,
        "model_dim": DIM,
        "head_dim": DIM // HEADS,
        "mlp_dim": 4 * DIM,
        # Scores of narrower heads are then as large as those of 128 channels.
        "attention_scale": fineweb.attention_scale * (fineweb.head_dim * HEADS / DIM) ** 0.5,
        "val_windows": tuple(round(SCALE * window) for window in fineweb.val_windows),
        "device": "cpu",
    }
    values |= {name: getattr(common.TRACK, name) for name in SAME}
    config = train_gpt.with_values(fineweb, {**values, **TABLE, **ARMS[arm]})
    tokens = train_gpt.fitting_val_tokens(config)
    return train_gpt.with_values(config, {"val_tokens": tokens})


def runs_in(folder):
    """All runs so far, a dict each."""
    path = Path(folder, f"{NAME}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


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
    torch.set_num_threads(1)
    facts = common.environment("cpu")
    for seed in [int(seed) for seed in arguments.seeds.split(",") if seed]:
        try:
            loss, seconds = common.trained(config_of(**of_all, seed=seed))
        except train_gpt.ConfigError as error:
            sys.exit(f"error: {error}")
        run = {**of_all, "seed": seed, "loss": loss, "seconds": round(seconds, 1), **facts}
        with open(Path(arguments.results, f"{NAME}.jsonl"), "a") as file:
            file.write(json.dumps(run) + "\n")
    table, lines = report(runs_in(arguments.results))
    page = "\n\n".join([table, *lines, common.environment_line(facts)])
    common.write_whole(arguments.results / f"{NAME}.md", page + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
