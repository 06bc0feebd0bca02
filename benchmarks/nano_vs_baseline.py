"""How much sooner the nano track reaches the loss at which a plain GPT ends.

    python benchmarks/nano_vs_baseline.py [--seconds 180] [--seeds 1] [--steps N]

Five arms train on the same corpus and are scored on the same validation tokens, in one process:
    baseline            the GPT below: four layers, learned positions, LayerNorm, biases, GELU,
                        AdamW with warm-up and cosine, float32, random windows of 256 tokens
    baseline + n-grams  the same, given the track's table with its n-grams alone: orders, rows,
                        hash, row-wise Adagrad
    baseline + copies   the same, given the n-grams and the copies
    nano                the track as it stands; its index reads text that the others may train on,
                        on the arm's clock
    nano, no table      the track without n-grams, copies and index
All are compiled. They take turns, a slice of training time each, so that a busy machine slows all
alike. The length of a schedule is fixed beforehand (the baselines': `--seconds` over the step time
of a calibration; the track's: its `steps`), and an arm stops at its end. The clock stands still
during compilation and validation.

The ratio is that of times to one loss, the one at which the baseline ends: the baseline's whole
training time over the time after which the track had that loss, on the way along its own, longer
schedule. Between two validation points losses are interpolated linearly in time, which errs against
the track on a convex curve.

Results: benchmarks/results/nano_vs_baseline.{json,md,png}, and nano_vs_baseline_short.md, the table
of README.md. Exit status: 0, or 2 for something to correct.
"""

import dataclasses
import itertools
import math
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common

NAME = "nano_vs_baseline"
ARMS = ("baseline", "baseline + n-grams", "baseline + copies", "nano", "nano, no table")
SHORT_NAMES = (
    "plain GPT",
    "plain GPT + n-grams",
    "plain GPT + n-grams and copies",
    "nano",
    "nano without the table",
)  # of README.md's table
BASELINE_LAYERS = 4  # the track has one, which its table makes up for
BLOCK = 256  # tokens of a baseline's window
SLICE_SECONDS = 10.0  # of training time before the next arm's turn
POINTS = 12  # validation points of a curve
CURVE_TOKENS = 131_072  # validation tokens of a point; the end is scored on all of the track's
# of the schedule; points lie on a geometric scale, for losses fall fastest early
FIRST_POINT = 1 / 40

# ----- the baseline: GPT-2's architecture and nanoGPT's recipe (Karpathy 2022) at the track's size


class Block(nn.Module):
    def __init__(self, dim, heads, mlp_dim):
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, mlp_dim), nn.Linear(mlp_dim, dim)

    def forward(self, x):  # (B, T, dim)
        q, k, v = (
            self.qkv(self.norm_attention(x))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class Baseline(nn.Module):
    """A plain GPT with the head tied to the embedding. With n-grams, the summed rows of the table
    join the residual stream where the track adds them: before each layer and before the head, with
    learned scales."""

    def __init__(self, config):
        super().__init__()
        dim, layers = config.model_dim, config.num_layers
        self.embed, self.position = nn.Embedding(config.vocab_size, dim), nn.Embedding(BLOCK, dim)
        heads = dim // config.head_dim
        self.blocks = nn.ModuleList(Block(dim, heads, 4 * dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        if config.columns:
            self.ngram_scale = nn.Parameter(torch.ones(layers + 1))

    @torch.no_grad()
    def initialise(self, seed):
        """GPT-2's: normal of 0.02, less by sqrt(2 layers) into the residual stream; zero biases."""
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * len(self.blocks)) if residual else 0.02
                param.copy_(torch.randn(param.shape, generator=generator) * std)
            else:
                param.fill_(0.0 if name.endswith("bias") else 1.0)

    def matrix_parameters(self):
        return sum(param.numel() for param in self.blocks.parameters() if param.ndim == 2)

    def forward(self, inputs, targets, ngram=None):
        """inputs, targets: (B, T) token ids. ngram: (B, T, dim). Returns losses (B, T)."""
        x = self.embed(inputs) + self.position.weight[: inputs.size(1)]
        for layer, block in enumerate(self.blocks):
            x = block(x if ngram is None else x + self.ngram_scale[layer] * ngram)
        x = self.norm(x if ngram is None else x + self.ngram_scale[-1] * ngram)
        logits = F.linear(x, self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(
            targets.shape
        )


# ----- arms: what trains, in steps; each has its own clock


class Arm:
    """What one model has done so far, with a clock of its own."""

    def __init__(self, name, config, runtime):
        self.name, self.config, self.runtime = name, config, runtime
        self.corpus = train_gpt.open_corpus(config)
        self.val_text = train_gpt.Text(self.corpus.val, config)
        self.clock = train_gpt.Clock(runtime)
        self.steps = 0  # length of the schedule
        self.done = 0  # steps taken
        self.points = []  # (training seconds, step, loss)

    def set_steps(self, steps):
        self.steps = steps
        shares = [FIRST_POINT ** (1 - i / (POINTS - 1)) for i in range(POINTS)]
        self.marks = {max(1, round(steps * share)) for share in shares}

    def mean_loss(self, pieces):
        """Mean validation loss over pieces of val_batch_tokens that start at the given tokens."""
        total = sum(self.piece_losses(low).double().sum() for low in pieces)
        return float(total) / (len(pieces) * self.config.val_batch_tokens)

    def curve_point(self):
        """Score pieces spread evenly over the validation tokens."""
        length = self.config.val_batch_tokens
        whole = self.config.val_tokens // length
        pieces = np.linspace(0, whole - 1, min(whole, CURVE_TOKENS // length)).astype(int) * length
        self.points.append((self.clock.total, self.done, self.mean_loss(pieces)))

    def train_for(self, seconds):
        """Take steps for so much training time, or to the schedule's end; validate at the marks."""
        if not self.points:
            self.curve_point()  # before the first step
        self.clock.start()
        until = self.clock.seconds() + seconds
        while self.done < self.steps and self.clock.seconds() < until:
            self.train_step()
            self.done += 1
            if self.done in self.marks:
                self.clock.stop()
                self.curve_point()
                self.clock.start()
        self.clock.stop()

    def result(self):
        """The arm's figures after its schedule, with the loss over all validation tokens."""
        length, tokens = self.config.val_batch_tokens, self.tokens_seen()
        final = self.mean_loss(range(0, self.config.val_tokens, length))
        return {
            "arm": self.name,
            "seed": self.config.seed,
            "steps": self.steps,
            "seconds": self.clock.total,
            "tokens": tokens,
            "tokens_per_second": tokens / self.clock.total,
            "val_loss": final,
            "matrix_parameters": self.matrix_parameters(),
            "table_values": self.table_values(),
            "points": [{"seconds": s, "step": n, "loss": loss} for s, n, loss in self.points],
        }

    def table_values(self):
        return self.config.ngram_rows * self.config.model_dim if self.config.columns else 0


class NanoArm(Arm):
    """The track: its trainer, loader, schedule and warm-up."""

    def __init__(self, name, config, runtime):
        super().__init__(name, config, runtime)
        self.loader = None
        self.batch = None
        torch.manual_seed(config.seed)
        self.trainer = train_gpt.Trainer(config, runtime)
        train_gpt.warm_up(self.trainer)
        self.set_steps(config.steps)

    def train_step(self):
        # On the clock, as in a run; in other arms' turns the loader fills its queue.
        if self.loader is None:
            index = self.trainer.table.index
            index.read(self.corpus.indexed, self.runtime.in_parallel)
            shards = self.corpus.shards
            self.loader = train_gpt.TrainLoader(self.config, shards, self.runtime, index)
            self.batch = self.loader.next_batch()
        is_last = self.done + 1 == self.steps
        upcoming = None if is_last else self.loader.next_batch()
        self.trainer.step(self.done, self.batch, upcoming)
        self.batch = upcoming

    def piece_losses(self, low):
        return self.trainer.score(self.done, self.val_text, low)[0]

    def matrix_parameters(self):
        return self.trainer.optimizer.matrices.size()

    def tokens_seen(self):
        """Those of the whole schedule, which is over by then."""
        return train_gpt.training_tokens(self.config)

    def close(self):
        if self.loader is not None:
            self.loader.close()


class BaselineArm(Arm):
    """The plain GPT. A thread prepares the next batch during a step, as the track's loader does."""

    LEARNING_RATE, FINAL_LR, DECAY, CLIP = 2e-3, 0.1, 0.1, 1.0
    WARM_UP = 0.05  # of the schedule
    # Tuned, for a baseline that is worth beating: after 25 s on two busy cores 8, 16 and 32 windows
    # a step stood at 2.65, 2.94 and 3.02, and 8 at twice the learning rate at 2.90.
    WINDOWS = 8

    def __init__(self, name, config, runtime):
        super().__init__(name, config, runtime)
        self.texts = [train_gpt.Text(shard, self.config) for shard in self.corpus.shards]
        self.model = Baseline(config).to(runtime.device)
        self.forward = self.model
        if config.compile:
            self.forward = torch.compile(self.model, dynamic=False)
        self.pool = ThreadPoolExecutor(1)
        self.reset()
        self.set_steps(1)
        self.train_step()  # compile
        self.piece_losses(0)
        self.reset()

    def reset(self):
        """The state before the first step."""
        self.model.initialise(self.config.seed)
        matrices = [param for param in self.model.parameters() if param.ndim == 2]
        others = [param for param in self.model.parameters() if param.ndim != 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.DECAY},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=self.LEARNING_RATE,
            betas=(0.9, 0.95),
            fused=True,
        )
        in_float32 = dataclasses.replace(self.config, dtype="float32")
        self.table = train_gpt.NgramTable(in_float32, self.runtime)
        self.rng = np.random.default_rng(self.config.seed)
        self.done = 0
        self.next_batch = None

    def windows_at(self, text, lows):
        """(MicroBatch, RowPlan) of windows of BLOCK tokens that start at `lows`, laid end to
        end."""
        spans = []
        for low in lows:
            spans += train_gpt.contiguous_window(text, int(low), BLOCK).spans
        window = train_gpt.TokenWindow(text, spans)
        rows, signs = train_gpt.table_rows(window, self.config, self.table.index)
        plan, slots = train_gpt.plan_rows(rows, signs, self.config, self.runtime)
        return train_gpt.assemble(window, slots, signs, self.runtime.device), plan

    def random_batch(self):
        """(MicroBatch, RowPlan) of random windows of one shard, drawn by size."""
        sizes = np.array([len(text.tokens) for text in self.texts], dtype=float)
        which = self.rng.choice(len(sizes), p=sizes / sizes.sum())
        lows = self.rng.integers(0, int(sizes[which]) - BLOCK, size=self.WINDOWS)
        return self.windows_at(self.texts[which], lows)

    def losses(self, micro_batch, ngram):
        windows = [tensor.view(-1, BLOCK) for tensor in (micro_batch.inputs, micro_batch.targets)]
        if ngram is not None:
            ngram = ngram.view(-1, BLOCK, self.config.model_dim)
        return self.forward(*windows, ngram)

    def lr_multiplier(self):
        warm_up = max(1, round(self.WARM_UP * self.steps))
        if self.done < warm_up:
            return (self.done + 1) / warm_up
        progress = (self.done - warm_up) / max(1, self.steps - warm_up)
        return self.FINAL_LR + (1 - self.FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress))

    def train_step(self):
        waiting = self.next_batch or self.pool.submit(self.random_batch)
        micro_batch, plan = waiting.result()
        self.next_batch = self.pool.submit(self.random_batch)
        lr_mul = self.lr_multiplier()
        for group in self.optimizer.param_groups:
            group["lr"] = self.LEARNING_RATE * lr_mul
        ngram = self.table.lookup(micro_batch, self.table.weight)
        self.losses(micro_batch, ngram).mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if ngram is not None:
            self.table.start_pull(plan)
            self.table.accumulate(ngram.grad * len(ngram))  # the loss is a mean
            self.table.update(self.done, lr_mul, self.table.reduce(self.done))

    @torch.no_grad()
    def piece_losses(self, low):
        lows = np.arange(low, low + self.config.val_batch_tokens, BLOCK)
        micro_batch, _ = self.windows_at(self.val_text, lows)
        return self.losses(micro_batch, self.table.lookup(micro_batch, self.table.weight))

    def matrix_parameters(self):
        return self.model.matrix_parameters()

    def tokens_seen(self):
        return self.done * self.WINDOWS * BLOCK

    def close(self):
        self.pool.shutdown()


def calibrate(arms, seconds):
    """Fix each baseline's schedule: `seconds` over the median time of a step.

    The arms take turns of four steps."""
    times = {arm: [] for arm in arms}
    for _ in range(3):
        for arm in arms:
            for _ in range(4):
                times[arm].append(common.timed(arm.train_step, arm.runtime.device)[0])
    for arm in arms:
        arm.reset()
        arm.set_steps(max(1, round(seconds / statistics.median(times[arm]))))


def run_seed(config, seconds, runtime):
    """Train all arms with config.seed. Returns their results."""
    torch._dynamo.reset()  # the graphs of the last seed's models
    deeper = dataclasses.replace(config, num_layers=BASELINE_LAYERS)
    kinds = (
        (BaselineArm, deeper, common.NO_TABLE),
        (BaselineArm, deeper, common.N_GRAMS_ALONE),
        (BaselineArm, deeper, {"index_orders": ()}),
        (NanoArm, config, {}),
        (NanoArm, config, common.NO_TABLE),
    )
    arms = []
    for name, (kind, base, changes) in zip(ARMS, kinds, strict=True):
        arms.append(kind(name, dataclasses.replace(base, **changes), runtime))
    calibrate(arms[:3], seconds)
    try:
        while any(arm.done < arm.steps for arm in arms):
            for arm in [arm for arm in arms if arm.done < arm.steps]:
                arm.train_for(min(SLICE_SECONDS, seconds / 3))
                print(
                    f"seed:{config.seed} arm:{arm.name} step:{arm.done}/{arm.steps} "
                    f"train_time:{1000 * arm.clock.total:.0f}ms loss:{arm.points[-1][2]:.5f} "
                    f"at_step:{arm.points[-1][1]}",
                    flush=True,
                )
        return [arm.result() for arm in arms]
    finally:
        for arm in arms:
            arm.close()


# ----- figures


def seconds_to(points, loss):
    """Training seconds at which a curve first has `loss`, linear between points, or None."""
    for before, after in itertools.pairwise(points):
        if after["loss"] <= loss < before["loss"]:
            share = (before["loss"] - loss) / (before["loss"] - after["loss"])
            return before["seconds"] + share * (after["seconds"] - before["seconds"])
    return None


def compare(results):
    """Every other arm against each baseline: a dict a pair, with an entry a seed in its lists."""
    by_arm = {arm: [result for result in results if result["arm"] == arm] for arm in ARMS}
    pairs = []
    for target in ARMS[:2]:
        for arm in ARMS:
            if arm != target:
                ends = [result["points"][-1] for result in by_arm[target]]
                times = [
                    seconds_to(result["points"], end["loss"])
                    for result, end in zip(by_arm[arm], ends, strict=True)
                ]
                ratios = [end["seconds"] / t for end, t in zip(ends, times, strict=True) if t]
                pairs.append(
                    {
                        "arm": arm,
                        "target": target,
                        "target_losses": [end["loss"] for end in ends],
                        "target_seconds": [end["seconds"] for end in ends],
                        "seconds": times,
                        "ratio": statistics.mean(ratios) if len(ratios) == len(ends) else None,
                    }
                )
    return pairs


def report(settings, results, pairs):
    """The Markdown text of the results, and that of the table for README.md."""
    seeds = len({result["seed"] for result in results})
    rows = []
    for arm in ARMS:
        of_arm = [result for result in results if result["arm"] == arm]
        first = of_arm[0]
        means = [
            f"{statistics.mean(result[key] for result in of_arm):,.0f}"
            for key in ("tokens_per_second", "tokens")
        ]
        rows.append(
            [
                arm,
                f"{first['matrix_parameters']:,}",
                f"{first['table_values']:,}",
                *means,
                *(
                    common.spread([result[key] for result in of_arm], digits)
                    for key, digits in (("seconds", 1), ("val_loss", 4))
                ),
            ]
        )
    arms = common.markdown_table(
        [
            "arm",
            "matrix parameters",
            "table values",
            "tokens/s",
            "tokens seen",
            "training time, s",
            f"final validation loss, n={seeds}",
        ],
        rows,
    )
    short = common.markdown_table(
        ["arm", "tokens/s", "training time, s", "final validation loss", "n"],
        [[name, row[3], *row[5:], seeds] for name, row in zip(SHORT_NAMES, rows, strict=True)],
    )
    rows = []
    for pair in pairs:
        reached = [t for t in pair["seconds"] if t is not None]
        rows.append(
            [
                f"{pair['target']} at its end",
                common.spread(pair["target_losses"], 4),
                common.spread(pair["target_seconds"], 1),
                pair["arm"],
                common.spread(reached, 1) if len(reached) == seeds else "not reached",
                "not reached" if pair["ratio"] is None else f"{pair['ratio']:.2f}",
            ]
        )
    times = common.markdown_table(
        [
            "loss of",
            "loss (curve's tokens)",
            "its training time, s",
            "arm",
            "time to that loss, s",
            "ratio of times",
        ],
        rows,
    )
    text = f"""{arms}

{times}

Training times leave out compilation and validation. The baseline: learned positions, LayerNorm,
biases, GELU, AdamW {BaselineArm.LEARNING_RATE} with warm-up and cosine, float32,
{BaselineArm.WINDOWS} random windows of {BLOCK} tokens a step. With n-grams it has the track's table
of n-grams and row-wise Adagrad as well, with copies its copies too, but no index. The track in
{settings["config"]["dtype"]}. torch.compile for all arms: {settings["compile"]}. Final losses are
over {settings["val_tokens"]:,} validation tokens, those of the curve over at most
{CURVE_TOKENS:,} of them."""
    return text, (
        f"{short}\n\nMatrix parameters: {results[0]['matrix_parameters']:,} of the plain GPT, "
        f"{first['matrix_parameters']:,} of nano. "
        f"{max(result['table_values'] for result in results):,} values in the table, "
        f"{settings['val_tokens']:,} validation tokens."
    )


def plot(path, results, pairs):
    """Loss against training time, one line an arm and seed; dashes mark where the baselines end."""
    names = ("tab:gray", "tab:brown", "tab:olive", "tab:blue", "tab:cyan")
    colours = dict(zip(ARMS, names, strict=True))
    labelled = set()
    with common.picture(path, figsize=(8, 5)) as axes:
        for result in results:
            # The first stands at time 0, which a logarithmic axis has not.
            points = result["points"][1:]
            arm = result["arm"]
            axes.plot(
                [p["seconds"] for p in points],
                [p["loss"] for p in points],
                marker=".",
                linewidth=1,
                color=colours[arm],
                label=None if arm in labelled else arm,
            )
            labelled.add(arm)
        for pair in {pair["target"]: pair for pair in pairs}.values():
            loss, colour = statistics.mean(pair["target_losses"]), colours[pair["target"]]
            axes.axhline(loss, color=colour, linestyle="--", linewidth=0.8)
        axes.set(
            xscale="log",
            xlabel="training time, s",
            ylabel="validation loss, nats per byte",
            title="The nano track against a plain GPT",
        )
        axes.grid(alpha=0.3, which="both")
        axes.legend()


def parse_arguments(argv):
    parser = common.parser(
        __doc__,
        seconds=180.0,
        seeds=1,
        seed=0,
        device="auto",
        tiny=False,
        data=str(common.ROOT / train_gpt.TRACKS["nano"].data),
    )
    parser.add_argument("--steps", type=int, help="schedule of the track [the track's]")
    arguments = parser.parse_args(argv)
    for name in ("seconds", "seeds"):
        if not getattr(arguments, name) > 0:
            parser.error(f"--{name} {getattr(arguments, name)}: must be positive")
    return arguments


def benchmark(arguments, values):
    """Run every seed; results are written after each. Returns the comparison's pairs."""
    runtime = train_gpt.Runtime(arguments.device)
    config = common.config_of("nano", runtime, **values)
    facts = common.environment(runtime.device)
    settings = {
        "seconds": arguments.seconds,
        "slice_seconds": SLICE_SECONDS,
        "tiny": arguments.tiny,
        "curve_tokens": CURVE_TOKENS,
        "val_tokens": config.val_tokens,
        "block": BLOCK,
        "windows": BaselineArm.WINDOWS,
        "learning_rate": BaselineArm.LEARNING_RATE,
        "compile": "inductor" if config.compile else "off",
        "config": {**dataclasses.asdict(config), "data": Path(config.data).name},
    }
    results = []
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        of_seed = dataclasses.replace(config, seed=seed)
        # An arm might run eagerly otherwise.
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            results += run_seed(of_seed, arguments.seconds, runtime)
        pairs = compare(results)
        data = {"settings": settings, "results": results, "comparison": pairs}
        text, short = report(settings, results, pairs)
        common.write_results(arguments.results, NAME, facts, data, text)
        short = f"{short} {common.environment_line(facts)}\n"
        (arguments.results / f"{NAME}_short.md").write_text(short)
        plot(arguments.results / f"{NAME}.png", results, pairs)
    return pairs


def main(argv=None):
    arguments = parse_arguments(argv)
    with tempfile.TemporaryDirectory() as temporary:
        try:
            values = {"device": arguments.device, "data": arguments.data}
            if arguments.tiny:
                values.update({**common.TINY, "data": str(Path(temporary, "corpus"))})
                documents = common.python_documents(400_000)
                eot_token, val_tokens = train_gpt.EOT_TOKEN["bytes"], common.TINY["val_tokens"]
                common.write_corpus(values["data"], documents, eot_token, val_tokens)
            if arguments.steps is not None:
                values["steps"] = arguments.steps
            pairs = benchmark(arguments, values)
        except train_gpt.ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    print((arguments.results / f"{NAME}.md").read_text())
    ratios = [
        next(pair["ratio"] for pair in pairs if (pair["arm"], pair["target"]) == (ARMS[3], target))
        for target in ARMS[:2]
    ]
    texts = ["not_reached" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
    print(f"speedup_vs_baseline:{texts[0]} speedup_vs_baseline_with_ngrams:{texts[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
