"""Fineweb's recipe at small scale beside the published trainer.

    python benchmarks/recipe.py [--seeds 1,2,3] [--arms ours,fewer] [--jobs 2]

Both train a GPT of 96 channels, in six heads, on the same tokens in the same order: 400 steps,
824,320 bytes of Python sources. The published one is modded-nanogpt's train_gpt.py of 2026-08-01
(commit f411b3d3) in a float32 form for CPUs, with its own topology, rates and bigram table, at the
same widths, windows and document caps. PUBLISHED holds its figures, which this script does not
measure. All arms run as it did: eagerly, in one thread, in float32.

Arms: `ours` has the features of the track `mini` in the published trainer's shape, and SOAP-Muon;
`muon` has Muon in its place, which takes less time; `fewer` is `ours` on the shorter schedule of
the last line's tokens_ratio; `twice` has 800 steps; `track` and `track twice` are the track itself,
of its own shape, on as many tokens as `ours` and `twice`; `plain` is a GPT-2 of as many layers as
the published trainer with AdamW. Runs that stand in the results are not repeated: without
recipe.json all begin anew.

Results: benchmarks/results/recipe.{json,md}. The last line is
`ours:<mean final loss> published:<...> seeds:<n> tokens_ratio:<tokens of fewer over ours>`.
"""

import dataclasses
import json
import math
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common, plain_gpt

NAME = "recipe"
STEPS = 400  # of the published trainer's schedule
STEPS_OF = {  # of each arm. The track's own steps have 2,048 tokens.
    "ours": STEPS,
    "muon": STEPS,
    "fewer": 280,
    "twice": 2 * STEPS,
    "track": 402,
    "track twice": 805,
    "plain": STEPS,
}
# The published trainer at 96 channels: schedule, widths, layers, heads and rows of the table; and
# rates that were tuned in this shape.
STAGES = (  # start, micro-batches of a step, document cap, windows, rate
    train_gpt.Stage(0.0, 2, 224, (32, 96), 1.0),
    train_gpt.Stage(0.33, 4, 512, (96, 224), 1.52),
    train_gpt.Stage(0.6575, 6, 512, (160, 352), 1.73),
    train_gpt.Stage(0.9875, 6, 512, (192, 416), 1.73),
)
SHAPE = {
    "micro_batch_tokens": 512,
    "stages": STAGES,
    "final_lr": 0.15,
    "untie_at": 0.6575,
    "val_windows": (192, 640),
    "model_dim": 96,
    "head_dim": 16,
    "mlp_dim": 384,
    "num_layers": 12,
    "long_layers": (3, 7, 11),
    "value_embedding_layers": (1, 2, 10, 11),
    "shifted_layers": (3, 7, 11),
    "paired_layers": (0, 2, 5, 9),
    "exclusive_layers": (1, 3, 4, 7),
    "skips": ((0, 11), (1, 10), (2, 9), (3, 8), (4, 7), (5, 6)),
    "ngram_rows": 2880,
    "matrix_update": "soap_muon",
    "matrix_lr": 0.023,
    "adam_lr": 0.008,
    "ngram_lr": 0.05,
}
TOKENS = 824_320  # of 400 steps
# What `p_run.py --seed SEED --steps STEPS --unit 512` of the published trainer's CPU form ended at:
# steps, seed, validation loss, and seconds of processor time where they were measured. The times
# are of the machine of the other arms, an AMD EPYC, in the same hours. There the first three seeds
# ended at 1.3465, 1.3336 and 1.1586; these losses, and the fourth run, are an Intel Xeon's.
PUBLISHED = (
    (400, 1, 1.3496, 214.7),
    (400, 2, 1.3313, 203.6),
    (400, 3, 1.1559, 236.2),
    (800, 1, 1.0030, None),
    (800, 2, 1.1359, 456.9),
)
PLAIN_LR = 3e-3  # AdamW's, not tuned
PLAIN_BLOCK = 512  # tokens of the plain GPT's context


def config_of(arm, seed):
    """The Config of an arm of ours."""
    changes = {"seed": seed, "steps": STEPS_OF[arm], "device": "cpu"}
    if not arm.startswith("track"):
        changes |= SHAPE
    if arm == "muon":
        changes["matrix_update"] = "muon"
    return dataclasses.replace(train_gpt.TRACKS["mini"], **changes)


class Plain:
    """GPT-2 with AdamW, on random windows of the same text, as many tokens a step."""

    def __init__(self, config):
        self.config = config
        self.model = plain_gpt.PlainGPT(config, PLAIN_BLOCK)
        self.model.initialise(config.seed)
        corpus = train_gpt.open_corpus(config)
        self.text = torch.from_numpy(corpus.shards[0].astype("int64"))
        self.val = torch.from_numpy(corpus.val.astype("int64"))
        self.generator = torch.Generator().manual_seed(config.seed)
        decayed = [param for param in self.model.parameters() if param.ndim == 2]
        others = [param for param in self.model.parameters() if param.ndim != 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=PLAIN_LR, betas=(0.9, 0.95), fused=True)

    def losses(self, tokens, starts):
        windows = torch.stack([tokens[low : low + PLAIN_BLOCK + 1] for low in starts])
        return self.model(windows[:, :-1], windows[:, 1:])

    def step(self, step):
        """One step at nanoGPT's schedule: warm-up over 5 %, then a cosine to a tenth."""
        progress = step / self.config.steps
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * (progress - 0.05) / 0.95))
        multiplier = min((progress + 1 / self.config.steps) / 0.05, cosine)
        for group in self.optimizer.param_groups:
            group["lr"] = PLAIN_LR * multiplier
        tokens = train_gpt.stage_at(self.config, step).micro_batches * 512
        last = len(self.text) - PLAIN_BLOCK - 1
        count = (tokens // PLAIN_BLOCK,)
        starts = torch.randint(last, count, generator=self.generator).tolist()
        self.losses(self.text, starts).mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def loss(self):
        starts = range(0, self.config.val_tokens, PLAIN_BLOCK)
        passes = [starts[low : low + 8] for low in range(0, len(starts), 8)]
        total = sum(self.losses(self.val, part).double().sum() for part in passes)
        return total.item() / self.config.val_tokens

    def close(self):
        """Nothing is open."""


def measure(arm, seed):
    """One run: its final loss and its processor time."""
    torch.set_num_threads(1)
    config = config_of(arm, seed)
    run = Plain(config) if arm == "plain" else common.Training(config)
    began = time.process_time()
    for step in range(config.steps):
        run.step(step)
    seconds = time.process_time() - began
    loss = run.loss()
    run.close()
    tokens = train_gpt.training_tokens(config)
    facts = {"arm": arm, "seed": seed, "steps": config.steps, "tokens": tokens}
    return {**facts, "loss": loss, "seconds": seconds}


def of_arm(runs, arm, steps=None):
    """The runs of an arm, by seed; the published trainer's need no measuring."""
    if arm == "published":
        names = ("steps", "seed", "loss", "seconds")
        runs = [dict(zip(names, run, strict=True)) for run in PUBLISHED if run[0] == steps]
        return [{**run, "tokens": TOKENS * steps // STEPS} for run in runs]
    return sorted((run for run in runs if run["arm"] == arm), key=lambda run: run["seed"])


def mean_loss(runs):
    return statistics.mean(run["loss"] for run in runs)


def losses_table(runs):
    """Final losses of the arms and of the published trainer, and processor time a token."""
    rows = []
    for arm, steps in [("published", STEPS), ("published", 2 * STEPS), *STEPS_OF.items()]:
        own = of_arm(runs, arm, steps)
        if own:
            losses = [run["loss"] for run in own]
            cost = [1e6 * run["seconds"] / run["tokens"] for run in own if run["seconds"]]
            each = ", ".join(f"{loss:.4f}" for loss in losses)
            mean_cost = f"{statistics.mean(cost):.0f}"
            rows.append([arm, steps, common.spread(losses, 4), each, mean_cost])
    header = ["arm", "steps", "final loss", "of each seed", "processor time, µs a token"]
    return common.markdown_table(header, rows)


def summary(runs):
    """The last line; without runs of `ours` it says so."""
    ours = of_arm(runs, "ours")
    if not ours:
        return "ours:not measured"
    fewer = of_arm(runs, "fewer")
    theirs = mean_loss(of_arm(runs, "published", STEPS))
    ratio = "not measured"
    if fewer:
        is_reached = mean_loss(fewer) <= theirs
        ratio = f"{fewer[0]['tokens'] / ours[0]['tokens']:.2f}" if is_reached else "not reached"
    losses = f"ours:{mean_loss(ours):.4f} published:{theirs:.4f}"
    return f"{losses} seeds:{len(ours)} tokens_ratio:{ratio}"


def main():
    parser = common.parser(__doc__, seeds="1,2,3", arms="ours,fewer", jobs=2)
    arguments = parser.parse_args()
    folder = Path(arguments.results)
    known = folder / f"{NAME}.json"
    runs = json.loads(known.read_text())["runs"] if known.is_file() else []
    facts = common.environment("cpu") | {"threads": 1}
    done = {(run["arm"], run["seed"]) for run in runs}
    arms = arguments.arms.split(",")
    wanted = [(arm, seed) for seed in map(int, arguments.seeds.split(",")) for arm in arms]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        pending = [pool.submit(measure, *run) for run in wanted if run not in done]
        for future in as_completed(pending):
            runs.append({**future.result(), "commit": facts["commit"][:12]})
            print("arm:{arm} seed:{seed} loss:{loss:.4f} seconds:{seconds:.0f}".format(**runs[-1]))
            text = f"{losses_table(runs)}\n\n`{summary(runs)}`"
            common.write_results(folder, NAME, facts, {"runs": runs}, text)
    print(summary(runs))


if __name__ == "__main__":
    main()
