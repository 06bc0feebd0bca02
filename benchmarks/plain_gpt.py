"""A plain GPT, well tuned: how long GPT-2's architecture and AdamW take to the target on two cores.

    python benchmarks/plain_gpt.py [--minutes 60]                            tunes it
    python benchmarks/plain_gpt.py --turns 3 [--script FILE] [--corpus DIR]  times it beside ours
    python benchmarks/plain_gpt.py --curve                                   its losses, after turns

The model has learned positions, LayerNorm, biases, GELU, and a head tied to the embedding, as
nanoGPT trains it (Karpathy 2022): random windows, AdamW, a clipped gradient, a linear warm-up and
then a cosine. It is tuned once. Each setting of the grid below has 60 seconds; the finalists have
ten minutes, and the best two shapes of them also nine: two seeds, and for each length a schedule of
its own. Between the two lengths the time to the target is interpolated. A long run is given up
where its loss is far above what the reference shape had by then. All are scored on 262,144
validation tokens, in blocks of their own context.

The tuning counts time in steps, so that other work on the machine changes no figure: a step of a
shape takes the mean of the fastest tenth of 60 steps, which are measured in three turns of all
shapes, and S seconds are as many of these. New shapes are timed beside the reference shape, whose
time stays that of the first machine. A call goes on where the last one stopped, and ends when
no run fits into its minutes. Results: benchmarks/results/plain_gpt.{json,md}; the last line is
`plain_gpt loss:<the target> seconds:<to it> steps:<to it> tokens:<to it> seeds:<n>`.

The tuning takes matrix products as torch does by default, and --turns takes those of our track
(`matmul_precision`), which are faster on some processors. There the yardstick is whichever of the
best two shapes then reaches the target first. A turn takes one whole run of --script on the CPU's
track and two ranks, and then 60 steps of that shape. Its time is that of its steps to the target,
by the mean of these; ours is the run's training time. The factor is the median of their ratios. On
another --corpus of the same vocabulary each turn has a seed of its own, and the plain GPT trains
until its validation loss is no higher than ours. Results: benchmarks/results/plain_turns.{json,md},
where a call replaces the turns of its corpus. The last line is
`<corpus> factor:<median> low:<smallest> high:<largest> turns:<n>`.
"""

import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common

NAME = "plain_gpt"
ENGLISH = common.ROOT / common.TRACK.data
THREADS = 2
HEAD_DIM = 32
VAL_TOKENS = 262_144
WARM_UP = 100  # steps at least, for a short run's high rate breaks the model after fewer
SHORT, LONG = 60, 600  # seconds
GIVE_UP = {0.4: 3.501, 0.8: 3.074}  # at this share of a long run: 0.12, 0.05 above the reference
LENGTHS = (540, LONG)  # seconds of the best settings' runs
SEEDS = (1, 2)
CONTENDERS = 2  # shapes that have runs of all lengths
TURNS, STEPS_OF_TURN = 3, 20  # of calibration
STEPS_TIMED = 60  # in a turn beside our trainer
LOOKS = 40  # at the validation loss, in a run on another corpus


class Setting(NamedTuple):
    """A row of the grid: channels, layers, tokens of the context and of a step, AdamW's rate."""

    width: int
    layers: int
    context: int
    batch: int
    rate: float

    @property
    def shape(self):
        """What a step's time depends on, as text."""
        return f"{self.width}x{self.layers}, context {self.context}, batch {self.batch}"


class Run(NamedTuple):
    """A setting, its seconds and its seed."""

    setting: Setting
    seconds: int
    seed: int


GRID = (
    Setting(128, 4, 256, 2048, 7.5e-4),
    Setting(128, 4, 256, 2048, 1.5e-3),
    Setting(128, 4, 256, 2048, 3e-3),
    Setting(128, 4, 256, 2048, 6e-3),
    Setting(128, 4, 256, 1024, 1.5e-3),
    Setting(128, 4, 256, 1024, 3e-3),
    Setting(128, 4, 256, 4096, 3e-3),
    Setting(128, 4, 256, 8192, 6e-3),
    Setting(128, 4, 128, 1024, 3e-3),
    Setting(128, 4, 128, 2048, 3e-3),
    Setting(128, 4, 128, 2048, 6e-3),
    Setting(128, 4, 512, 2048, 3e-3),
    Setting(128, 3, 128, 2048, 3e-3),
    Setting(128, 6, 128, 2048, 3e-3),
    Setting(192, 3, 128, 1024, 3e-3),
    Setting(192, 4, 128, 1024, 3e-3),
    Setting(192, 4, 128, 2048, 3e-3),
    Setting(192, 4, 256, 2048, 3e-3),
    Setting(256, 3, 128, 1024, 1.5e-3),
    Setting(256, 4, 128, 1024, 1.5e-3),
    Setting(128, 2, 64, 2048, 3e-3),
    Setting(128, 1, 64, 2048, 3e-3),
    Setting(128, 2, 64, 1024, 3e-3),
    Setting(128, 1, 64, 1024, 3e-3),
    Setting(128, 1, 32, 2048, 3e-3),
)
REFERENCE = Setting(128, 3, 128, 2048, 3e-3)
FINALISTS = (
    REFERENCE,
    Setting(192, 3, 128, 1024, 3e-3),
    Setting(128, 4, 128, 2048, 6e-3),
    Setting(192, 2, 128, 1024, 3e-3),
    Setting(192, 2, 128, 1024, 2e-3),
    Setting(128, 2, 128, 2048, 3e-3),
    Setting(128, 2, 128, 2048, 2e-3),
    Setting(128, 2, 128, 2048, 4e-3),
    Setting(128, 2, 128, 1024, 2e-3),
    Setting(128, 3, 128, 2048, 4e-3),
    Setting(192, 2, 128, 2048, 2e-3),
    Setting(192, 2, 128, 2048, 3e-3),
)


# ----- model


class Block(nn.TransformerEncoderLayer):
    """torch's, but for its attention, which is made of plain products, as in our trainer: torch's
    fused kernel takes longer where a product of matrices is fast."""

    def _sa_block(self, x, mask, key_padding_mask, is_causal=False):
        options = {"attn_mask": mask, "need_weights": True, "average_attn_weights": False}
        return self.self_attn(x, x, x, **options)[0]


class PlainGPT(nn.Module):
    """A GPT of so many tokens, channels and layers, with a context of `block` tokens."""

    def __init__(self, vocab_size, dim, layers, block):
        super().__init__()
        options = {"activation": "gelu", "batch_first": True, "norm_first": True, "dropout": 0.0}
        self.embed = nn.Embedding(vocab_size, dim)
        self.position = nn.Embedding(block, dim)
        self.blocks = nn.ModuleList(
            Block(dim, dim // HEAD_DIM, 4 * dim, **options) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)

    @torch.no_grad()
    def initialise(self, seed):
        """GPT-2's: normal of 0.02, less by sqrt(2 layers) into the residual stream; zero biases."""
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                is_residual = name.endswith(("out_proj.weight", "linear2.weight"))
                std = 0.02 / math.sqrt(2 * len(self.blocks)) if is_residual else 0.02
                param.copy_(torch.randn(param.shape, generator=generator) * std)
            else:
                param.fill_(0.0 if name.endswith("bias") else 1.0)

    def forward(self, inputs, targets):
        """The losses (B, T) of the targets (B, T) that follow the inputs (B, T), token ids."""
        length = inputs.size(1)
        x = self.embed(inputs) + self.position.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        logits = F.linear(self.norm(x), self.embed.weight)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape)


# ----- training


class Corpus:
    """The tokens of a folder of shards, int64: `train` (n,), and `val`, one more than is scored."""

    def __init__(self, folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        parts = {"train": [], "val": []}
        for shard in manifest["shards"]:
            tokens = np.fromfile(folder / shard["file"], "<u2", offset=1024)
            parts[shard["split"]].append(torch.from_numpy(tokens.astype(np.int64)))
        self.vocab_size = manifest["vocab_size"]
        self.train = torch.cat(parts["train"])
        val = torch.cat(parts["val"])
        scored = min(VAL_TOKENS, len(val) - 1)
        scored -= scored % common.TRACK.val_batch_tokens  # our runs score whole passes
        self.val = val[: scored + 1]


class Training:
    """A model in training, from which `step` takes one step after another."""

    def __init__(self, setting, seed, steps, corpus):
        self.setting = setting
        self.steps = steps
        self.corpus = corpus
        sizes = setting.width, setting.layers, setting.context
        self.model = PlainGPT(corpus.vocab_size, *sizes)
        self.model.initialise(seed)
        self.generator = torch.Generator().manual_seed(seed)
        decayed = [param for param in self.model.parameters() if param.ndim == 2]
        others = [param for param in self.model.parameters() if param.ndim != 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)

    def rate(self, step):
        """The rate of a step: a linear warm-up, then a cosine to a tenth."""
        warm_up = max(WARM_UP, self.steps // 20)
        if step < warm_up:
            return self.setting.rate * (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.steps - warm_up)
        return self.setting.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    def step(self, step):
        """Take the step of this number. Returns its seconds."""
        began = time.perf_counter()
        context = self.setting.context
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        count = (self.setting.batch // context, 1)
        starts = torch.randint(len(self.corpus.train) - context, count, generator=self.generator)
        windows = self.corpus.train[starts + torch.arange(context + 1)]
        self.model(windows[:, :-1], windows[:, 1:]).mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began

    @torch.no_grad()
    def loss(self):
        """The mean validation loss, nats a token."""
        inputs = self.corpus.val[:-1].view(-1, self.setting.context)
        targets = self.corpus.val[1:].view(-1, self.setting.context)
        passes = zip(inputs.split(16), targets.split(16), strict=True)
        total = sum(self.model(*blocks).double().sum().item() for blocks in passes)
        return total / targets.numel()


def fastest(seconds):
    """The mean of the fastest tenth of times."""
    return statistics.mean(sorted(seconds)[: max(1, len(seconds) // 10)])


def calibrate(settings, corpus):
    """{shape: seconds a step} of settings, whose turns are spread over the whole time."""
    times = {setting.shape: [] for setting in settings}
    of_shape = {setting.shape: setting for setting in settings}
    for _ in range(TURNS):
        for shape, setting in of_shape.items():
            training = Training(setting, 1, STEPS_OF_TURN, corpus)
            times[shape] += [training.step(step) for step in range(STEPS_OF_TURN)]
    return {shape: fastest(seconds) for shape, seconds in times.items()}


def measure(run, step_seconds, corpus):
    """The figures of a run, as they stand in the results."""
    setting = run.setting
    steps = round(run.seconds / step_seconds[setting.shape])
    training = Training(setting, run.seed, steps, corpus)
    bounds = {}
    if run.seconds == LONG:
        bounds = {round(share * steps): bound for share, bound in GIVE_UP.items()}
    for taken in range(1, steps + 1):
        training.step(taken - 1)
        if taken in bounds and training.loss() > bounds[taken]:
            break
    return {
        **setting._asdict(),
        "seconds": run.seconds,
        "seed": run.seed,
        "steps": taken,
        "planned": steps,
        "tokens": taken * setting.batch,
        "loss": training.loss(),
    }


# ----- the tuning


def wanted(losses):
    """Yield all runs in order; who asks for one has put the losses of those before into `losses`,
    {run: loss}."""
    yield from (Run(setting, SHORT, 1) for setting in GRID)
    yield from (Run(setting, LONG, 1) for setting in FINALISTS)
    best = sorted(FINALISTS, key=lambda setting: losses[Run(setting, LONG, 1)])
    # Of one shape the better rate alone.
    of_shape = {}
    for setting in best:
        of_shape.setdefault(setting.shape, setting)
    best = [*of_shape.values()][:CONTENDERS]
    yield from (Run(one, seconds, seed) for one in best for seconds in LENGTHS for seed in SEEDS)


def run_of(figures):
    """The Run whose figures these are."""
    setting = Setting(*(figures[name] for name in Setting._fields))
    return Run(setting, figures["seconds"], figures["seed"])


def next_run(runs):
    """The first run of the tuning that is not among these figures, None when all are."""
    losses = {run_of(figures): figures["loss"] for figures in runs}
    return next((run for run in wanted(losses) if run not in losses), None)


def contenders_of(runs):
    """Figures of runs that would end at the target, a setting each, by their seconds: of all that
    have runs of both LENGTHS around it. They are interpolated between the mean losses of seeds."""
    target = common.TRACK.target_loss
    losses = {}
    for figures in runs:
        of_length = losses.setdefault(run_of(figures).setting, {})
        of_length.setdefault(figures["seconds"], []).append(figures["loss"])
    found = []
    for setting, own in losses.items():
        if not own.keys() >= {*LENGTHS}:
            continue
        above, below = (statistics.mean(own[seconds]) for seconds in LENGTHS)
        if not above >= target >= below:
            continue
        # np.interp wants rising losses.
        seconds = float(np.interp(target, (below, above), LENGTHS[::-1]))
        final = next(figures for figures in runs if run_of(figures) == Run(setting, LONG, 1))
        steps = round(seconds / LONG * final["planned"])
        sizes = {"steps": steps, "tokens": steps * setting.batch, "seeds": len(own[LONG])}
        found.append({**final, **sizes, "seconds": seconds, "loss": target})
    return sorted(found, key=lambda figures: figures["seconds"])


def yardstick_of(contenders, corpus):
    """The contender that reaches the target first, by torch's products as they are set now."""
    times = calibrate([run_of(figures).setting for figures in contenders], corpus)
    return min(contenders, key=lambda one: one["steps"] * times[run_of(one).setting.shape])


def report(runs, step_seconds):
    """The table of all settings, and the last line."""
    by_setting = {}
    for figures in runs:
        by_setting.setdefault((figures["seconds"], run_of(figures).setting), []).append(figures)
    rows = []
    for (seconds, setting), own in by_setting.items():
        losses = [figures["loss"] for figures in own]
        milliseconds = f"{1000 * step_seconds[setting.shape]:.0f}"
        steps = own[0]["steps"]
        planned = own[0].get("planned", steps)
        taken = steps if steps == planned else f"{steps} of {planned}"
        sizes = [taken, f"{own[0]['tokens']:,}"]
        rows.append([seconds, *setting, milliseconds, *sizes, common.spread(losses, 4), len(own)])
    rows.sort(key=lambda row: (row[0], row[-2]))
    header = ["seconds", "width", "layers", "context", "batch, tokens", "rate", "ms a step"]
    header += ["steps", "tokens", "validation loss", "n"]
    line = f"{NAME} loss:not measured"
    contenders = contenders_of(runs)
    if contenders:
        found = contenders[0]
        line = f"{NAME} loss:{found['loss']} seconds:{found['seconds']:.0f} "
        line += f"steps:{found['steps']} tokens:{found['tokens']} seeds:{found['seeds']}"
    return common.markdown_table(header, rows), line


def keep(folder, facts, runs, step_seconds):
    """Write the results as they are now."""
    table, line = report(runs, step_seconds)
    data = {"step_seconds": step_seconds, "runs": runs}
    common.write_results(folder, NAME, facts, data, f"{table}\n\n`{line}`")


# ----- turns with our trainer


def train_ours(script, seed, folder):
    """Train the CPU's track on two ranks, on the corpus in `folder`.

    Returns (validation loss, seconds of training)."""
    run_id = f"{NAME}-{os.getpid()}-{seed}"
    values = {"track": common.TRACK.track, "device": "cpu", "seed": seed}
    if folder != common.TRACK.data:
        values["data"] = folder
    log = common.train(common.ROOT, run_id, common.words_of(values), THREADS, script)
    result = common.result_of(log)
    return float(result["val_loss"]), int(result["train_time"].removesuffix("ms")) / 1000


def seconds_of_steps(setting, steps, corpus):
    """The plain GPT's seconds for so many steps, by the mean of STEPS_TIMED of them."""
    training = Training(setting, 1, steps, corpus)
    training.step(0)  # it allocates memory, and is not timed
    times = [training.step(step) for step in range(1, 1 + STEPS_TIMED)]
    return statistics.mean(times) * steps


def looks_at(training):
    """Train a plain GPT, and yield LOOKS times (steps so far, their seconds, validation loss)."""
    every = math.ceil(training.steps / LOOKS)
    seconds = 0.0
    for step in range(training.steps):
        seconds += training.step(step)
        if (step + 1) % every == 0 or step + 1 == training.steps:
            yield step + 1, seconds, training.loss()


def seconds_to_loss(training, loss):
    """Train a plain GPT until its smoothed validation loss is no higher than `loss`.

    The smoothed loss is the mean of three looks, told at the time of the second. Returns (seconds
    of training, smoothed loss) of the first that is low enough, or else of the last."""
    looks = []
    for _, seconds, value in looks_at(training):
        looks.append((seconds, value))
        smoothed = statistics.mean(value for _, value in looks[-3:])
        if len(looks) >= 3 and smoothed <= loss:
            break
    return looks[-2][0], smoothed


def record_curve(folder, contenders):
    """Take the steps to the target of the contender that has had the turns, and write its losses at
    their seconds: the first page draws them beside the newest record. It writes as it goes. A
    step's seconds are the mean of those in the turns, so that other work on the machine changes no
    figure."""
    path = folder / "plain_turns.json"
    if not path.is_file():
        sys.exit(f"error: {path}: no such file; call this with --turns 3 first")
    turns = json.loads(path.read_text())["turns"][ENGLISH.name]
    final = next(one for one in contenders if run_of(one).setting.shape == turns[0]["plain"])
    step_seconds = statistics.mean(turn["plain_seconds"] for turn in turns) / final["steps"]
    training = Training(run_of(final).setting, final["seed"], final["steps"], Corpus(ENGLISH))
    curve = {"environment": common.environment("cpu"), "seconds": [], "loss": []}
    for steps, _, loss in looks_at(training):
        curve["seconds"].append(round(steps * step_seconds, 1))
        curve["loss"].append(round(loss, 4))
        (folder / "plain_curve.json").write_text(json.dumps(curve, indent=1) + "\n")


def take_turn(final, script, seed, folder):
    """The figures of one turn, as they stand in the results.

    final: the figures that yardstick_of returns."""
    corpus = Corpus(common.ROOT / folder)
    setting = run_of(final).setting
    loss, seconds = train_ours(script, seed, folder)
    if folder == common.TRACK.data:
        plain_seconds = seconds_of_steps(setting, final["steps"], corpus)
        plain_loss = final["loss"]
    else:
        training = Training(setting, seed, final["steps"], corpus)
        plain_seconds, plain_loss = seconds_to_loss(training, loss)
        if plain_loss > loss:  # it is never as good, and the factor has no upper limit
            plain_seconds = math.inf
    losses = {"plain_loss": plain_loss, "loss": loss}
    sides = {"plain": setting.shape, "plain_seconds": plain_seconds, "seconds": seconds}
    return {"seed": seed, **losses, **sides}


def report_turns(turns):
    """(the table of all turns in Markdown, {corpus: its last line}), of {corpus: turns}."""
    rows = []
    lines = {}
    for corpus, own in turns.items():
        factors = [turn["plain_seconds"] / turn["seconds"] for turn in own]
        for turn, factor in zip(own, factors, strict=True):
            losses = [f"{turn[name]:.4f}" for name in ("plain_loss", "loss")]
            seconds = [f"{turn[name]:.1f}" for name in ("plain_seconds", "seconds")]
            rows.append([corpus, turn["seed"], *losses, *seconds, f"{factor:.2f}"])
        line = f"{corpus} factor:{statistics.median(factors):.2f} low:{min(factors):.2f} "
        lines[corpus] = f"{line}high:{max(factors):.2f} turns:{len(own)}"
    header = ["corpus", "seed", "the plain GPT's loss", "our loss", "the plain GPT's seconds"]
    return common.markdown_table([*header, "our seconds", "factor"], rows), lines


def run_turns(arguments, final):
    """Take the turns that a call asks for. They replace earlier ones on the same corpus."""
    facts = common.environment("cpu")
    path = Path(arguments.results) / "plain_turns.json"
    turns = json.loads(path.read_text())["turns"] if path.is_file() else {}
    corpus = Path(arguments.corpus).name
    turns[corpus] = []
    for seed in range(1, arguments.turns + 1):
        turn = take_turn(final, common.ROOT / arguments.script, seed, arguments.corpus)
        turns[corpus].append({**turn, "script": arguments.script})
        table, lines = report_turns(turns)
        page = "\n\n".join([table, *(f"`{line}`" for line in lines.values())])
        common.write_results(arguments.results, "plain_turns", facts, {"turns": turns}, page)
    print(lines[corpus])


def main(argv=None):
    defaults = {
        "minutes": 60.0,
        "turns": 0,
        "curve": False,
        "script": "train_gpt.py",
        "corpus": common.TRACK.data,
    }
    arguments = common.parser(__doc__, **defaults).parse_args(argv)
    deadline = time.monotonic() + 60 * arguments.minutes
    torch.set_num_threads(THREADS)
    facts = common.environment("cpu")
    path = Path(arguments.results) / f"{NAME}.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    runs = known.get("runs", [])
    if arguments.turns or arguments.curve:
        contenders = contenders_of(runs)
        if not contenders:
            sys.exit(f"error: {path} has no runs of {LENGTHS} seconds; call this without --turns")
        if arguments.curve:
            return record_curve(Path(arguments.results), contenders)
        torch.set_float32_matmul_precision(common.TRACK.matmul_precision)
        return run_turns(arguments, yardstick_of(contenders, Corpus(ENGLISH)))
    if arguments.corpus != common.TRACK.data:
        sys.exit(
            f"error: --corpus {arguments.corpus}: it is tuned on {common.TRACK.data}; add --turns N"
        )
    corpus = Corpus(ENGLISH)
    step_seconds = known.get("step_seconds", {})
    settings = (*GRID, *FINALISTS)
    if new := [setting for setting in settings if setting.shape not in step_seconds]:
        times = calibrate([REFERENCE, *new], corpus)
        scale = step_seconds.get(REFERENCE.shape, times[REFERENCE.shape]) / times[REFERENCE.shape]
        step_seconds = {shape: scale * own for shape, own in times.items()} | step_seconds
        keep(arguments.results, facts, runs, step_seconds)
    while (run := next_run(runs)) and time.monotonic() + run.seconds < deadline:
        runs.append(measure(run, step_seconds, corpus))
        keep(arguments.results, facts, runs, step_seconds)
        print(run, f"loss:{runs[-1]['loss']:.4f}", flush=True)
    print(report(runs, step_seconds)[1])


if __name__ == "__main__":
    main()
