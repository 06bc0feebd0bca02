"""Train a GPT to a target validation loss as fast as this machine allows, in one file.

    python train_gpt.py                            one process, on one GPU or one core of a CPU
    torchrun --nproc_per_node=8 train_gpt.py       one a GPU or a core (several nodes: see README)
    python train_gpt.py --track english-net --check everything but the steps: would this run start?
    python train_gpt.py --help                     every field of the configuration

Without --track it takes `fineweb` where CUDA and FineWeb's shards are, else `english-net`.

Chapters, in reading order:
     1. Configuration     every number of a run with its check, the tracks, the schedules
     2. Tokens            shards, micro-batches of whole documents, a loader that works ahead
     3. Table             a token's rows and guesses, who holds a row, how rows travel
     4. Layers            norm, rotary positions, attention, MLP
     5. Loss              cross-entropy in one pass, over the vocabulary or a sample of it
     6. Model             the GPT, and the rule of each of its parameters
     7. Update rules      Adam, Muon, SOAP and its relatives, eigenbases by one batched QR
     8. Parameter groups  who reduces, updates and sends what, and in which order
     9. Trainer           forward and backward pass, one step, evaluation, warm-up
    10. Validity gates    what a model must not do, tested on the validation text
    11. Runtime           ranks, devices, clock, collectives that count their bytes
    12. A run's life      command line, log, checkpoints, opening, result, how errors end it
    13. The run           the steps

A step's global batch is a fixed list of micro-batches. Rank r of W takes every W-th of them, if
there are so many. So all world sizes see the same tokens, and they take the same step up to the
order in which floats are added.
"""

import argparse
import ast
import contextlib
import ctypes
import dataclasses
import datetime
import difflib
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# torch reads these once: large tensors on the CPU go into huge pages, and on a GPU buffers of ever
# new sizes, as the rows of a step are, grow in place.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

try:
    import fcntl
    import resource

    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch import distributed as dist
    from torch.utils import _pytree as pytree
except ImportError as error:  # Windows has no fcntl
    remedy = "./run.sh installs all of it into .venv; Windows is not supported: call it in WSL"
    print(f"status:error {error}; {remedy}")
    sys.exit(2)

# 1. Configuration ================================================================================

ATTENTION_BLOCK = 64  # at most: queries of a block share their keys, in the back end `sdpa`
GATE_DIM = 12  # gates read the first few channels of the residual stream


class ConfigError(ValueError):
    """Something the user can put right: the message holds the value, the limits and the remedy."""


def require(condition, where, problem="", remedy=""):
    """Raise ConfigError, `where: problem; remedy`, unless the condition holds."""
    if not condition:
        message = ": ".join(str(part) for part in (where, problem) if part)
        raise ConfigError("; ".join(part for part in (message, remedy) if part))


def one_line(error):
    """What an error says, on one printable line; of a long text the beginning and the end."""
    text = ascii(str(error))[1:-1]
    return text if len(text) <= 1000 else f"{text[:500]} ... {text[-500:]}"


def nearest(name, names):
    close = difflib.get_close_matches(name, names, 1, cutoff=0.0)
    return f"did you mean {close[0]}?" if close else ""


class Check(NamedTuple):
    """What the values of a field must be like."""

    is_good: Callable  # of a value: whether it will do
    limits: str  # the same in words, for the error message


def between(low, high):
    return Check(lambda value: low <= value <= high, f"must be {low:,} to {high:,}")


def multiple_of(unit, high):
    limits = f"must be a multiple of {unit}, up to {high:,}"
    return Check(lambda value: 0 < value <= high and value % unit == 0, limits)


def one_of(*names):
    return Check(lambda value: value in names, f"must be one of {', '.join(names)}")


def matching(pattern, limits):
    return Check(lambda value: re.fullmatch(pattern, value, re.ASCII), limits)


def are_whole(values, allowed):
    """Whether these are whole numbers of a range."""
    return all(type(value) is int and value in allowed for value in values)


def distinct(allowed, limits):
    """A tuple of different whole numbers of a range."""

    def is_good(values):
        return are_whole(values, allowed) and len(set(values)) == len(values)

    return Check(is_good, limits)


def are_skips(values):
    """Whether these are pairs of layers, the later one second."""
    return all(LAYERS.is_good(pair) and len(pair) == 2 and pair[0] < pair[1] for pair in values)


def are_windows(values):
    """Whether these are attention windows, the short one first and the long one last."""
    return are_whole(values, range(16, 65537, 16)) and len(values) > 1


def are_loss_weights(values):
    """Whether these are weights of the next, second-next, ... token."""
    return 0 < len(values) <= 16 and values[0] > 0 and all(0 <= weight < 1e9 for weight in values)


ANYTHING = Check(lambda value: True, "must be printable, and of the field's type")
SPAN = Check(
    lambda ends: len(ends) == 2 and 0 <= ends[0] <= ends[1] <= 1,
    "must be a first and a last fraction, such as (0.4, 1)",
)
# Where a logit is 70 below another, its probability is still a float32 above 0.
CAP = Check(
    lambda cap: 0.1 <= cap[0] <= 70 and abs(cap[1]) <= 80 and len(cap) == 2,
    "must be a cap, of 0.1 to 70, and a shift, such as (30, 0)",
)
POSITIVE = Check(lambda value: 0 < value <= 1e30, "must be positive, and at most 1e30")
NOT_NEGATIVE = Check(lambda value: 0 <= value <= 1e30, "must be 0, or positive and at most 1e30")
FRACTION = between(0, 1)
MOMENTUM = Check(lambda value: 0 <= value < 1, "must be at least 0, and below 1")
COUNT = between(1, 65536)
OFTEN = between(1, 999_999)
SIZE = between(0, 10**9)
ORDERS = distinct(range(2, 33), "must be distinct orders from 2 to 32, such as (2, 3); () for none")
LAYERS = distinct(range(1024), "must be distinct layers, such as (0, 2); () for none")
SKIPS = Check(are_skips, "must be pairs of layers, such as ((3, 6),); () for none")
WINDOWS = Check(are_windows, "must be a short and a long window, multiples of 16, such as (32, 64)")
LOSS_WEIGHTS = Check(are_loss_weights, "must be 1 to 16 weights, the first above 0")
DEVICES = one_of("auto", "cpu", "cuda")
DTYPES = one_of("bfloat16", "float32")
BACK_ENDS = one_of("auto", "sdpa", "varlen")
PASS = multiple_of(ATTENTION_BLOCK, 2**24)
NAME = matching(r"[\w.-]{1,100}", "must be a name, such as bytes or gpt2")
RUN_ID = matching(r"(\w[\w.+=@-]{0,99})?", "must be at most 100 letters, digits, _ . + = @ or -")
RUN_OF = matching(
    r"(\d{1,9}:\d{1,9}/\d{1,9}:\d{1,9})?",
    "must read like 1:3/8:1; let `python -m records run` set it",
)


def knob(default, help_text, check=ANYTHING):
    """A field with its default, its line of --help and its check."""
    return dataclasses.field(default=default, metadata={"help": help_text, "check": check})


def check_fields(values, where=""):
    """Check each field of a dataclass alone: its type first, then its limits."""
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        check = field.metadata["check"]
        is_good = type(value) is field.type or (field.type is float and type(value) is int)
        try:
            is_good = is_good and check.is_good(value) and str(value).isprintable()
        except (TypeError, ValueError, IndexError):  # a tuple of wrong things
            is_good = False
        require(is_good, f"{where}{field.name}={value}", check.limits)


@dataclass(frozen=True)
class Stage:
    """One row of a track's schedule: what holds from the fraction `start` of the steps on."""

    start: float = knob(0.0, "fraction of the steps at which the stage begins", MOMENTUM)
    micro_batches: int = knob(8, "micro-batches of a step, which ranks share out", COUNT)
    document_cap: int = knob(896, "tokens of a document that attention sees at once", COUNT)
    windows: tuple = knob((128, 384), "attention windows, a short and a long one", WINDOWS)
    lr_mul: float = knob(1.0, "factor of all learning rates, ahead of the cooldown", POSITIVE)
    mtp_weights: tuple = knob((1.0,), "loss weights of the tokens to come", LOSS_WEIGHTS)
    prefix_weight: float = knob(0.0, "loss weight of the next token's prefix", FRACTION)
    softmax_rows: int = knob(0, "rows of training's softmax, a sample; 0: all of them", SIZE)


def as_stages(rows, **changes):
    """Rows of a schedule, Stages or dicts of their fields, as Stages with some other values."""
    try:
        stages = [Stage(**row) if isinstance(row, dict) else row for row in rows]
        return tuple(dataclasses.replace(stage, **changes) for stage in stages)
    except TypeError as error:
        raise ConfigError(f"stages: rows are dicts of a Stage's fields ({error})") from None


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run, resolved. The defaults are those of the track fineweb, and most of its numbers are
    the field's: records/NOTES.md has their sources. None has been tuned on a GPU. Raises
    ConfigError for values that cannot be run."""

    # --- data
    track: str = knob("fineweb", "name of the track that these values belong to")
    data: str = knob("data/fineweb10B", "folder of *_train_*.bin, *_val_*.bin and manifest.json")
    tokenizer: str = knob("gpt2", "what the token ids mean; a manifest of `data` says it", NAME)
    vocab_size: int = knob(50304, "rows of embedding and head; likewise", between(2, 65536))
    eot_token: int = knob(50256, "the largest id, with which documents start; likewise", COUNT)
    epochs: int = knob(1, "passes over the training shards that a run may take", OFTEN)
    # --- schedule
    steps: int = knob(1285, "optimizer steps, the length of every schedule", OFTEN)
    micro_batch_tokens: int = knob(16384, "tokens of a micro-batch", PASS)
    micro_batches_a_pass: int = knob(3, "micro-batches that one forward pass reads, at most", COUNT)
    stages: tuple = knob(
        # start, micro-batches, document cap, windows (short, long), rate, loss weights of the next
        # tokens and of a prefix, softmax
        (
            Stage(0.0, 8, 896, (128, 384), 1.0, (1.0, 0.5, 0.25), 0.25, 16384),
            Stage(423 / 1285, 16, 2048, (384, 896), 1.52, (1.0, 0.5), 0.25, 16384),
            Stage(847 / 1285, 24, 2048, (640, 1408), 1.73, (1.0,), 0.0, 16384),
            Stage(1270 / 1285, 24, 2048, (768, 1664), 1.73),
        ),
        "rows of the schedule; fields of a stage are options, too, for all stages",
    )
    cooldown: tuple = knob((508 / 1285, 1270 / 1285), "fractions between which rates fall", SPAN)
    final_lr: float = knob(0.15, "factor of the rates at the end of the cooldown", FRACTION)
    untie_at: float = knob(0.66, "fraction at which head and embedding part; 0: apart", FRACTION)
    # --- model
    model_dim: int = knob(768, "width of the residual stream", between(GATE_DIM, 65536))
    num_layers: int = knob(11, "transformer blocks", between(1, 1024))
    head_dim: int = knob(128, "width of an attention head", multiple_of(4, 65536))
    mlp_dim: int = knob(3072, "hidden width of the ReLU^2 MLP", between(1, 2**20))
    mlp_only_layers: tuple = knob((6,), "layers without attention", LAYERS)
    long_layers: tuple = knob((3, 10), "layers that attend through the long window", LAYERS)
    value_embedding_layers: tuple = knob((1, 2, 8, 9, 10), "layers with value embeddings", LAYERS)
    shifted_layers: tuple = knob((3, 10), "layers where half of a key is that before", LAYERS)
    paired_layers: tuple = knob((0, 2, 5, 9), "layers whose heads share keys, in pairs", LAYERS)
    exclusive_layers: tuple = knob((1, 3, 4, 7), "layers that leave out own values", LAYERS)
    skips: tuple = knob(((3, 6),), "pairs (a, b): layer b also reads what leaves layer a", SKIPS)
    shared_input: tuple = knob((7,), "a layer whose output all later attention reads", LAYERS)
    dense_layers: tuple = knob((3, 7), "layers whose outputs the last one mixes in", LAYERS)
    deciding_layers: tuple = knob((0, 4, 8), "layers before which tokens decide gates", LAYERS)
    mlp_reach: int = knob(3, "tokens before its own that an MLP reads; 0: none", between(0, 16))
    value_std: float = knob(0.25, "std of values' matrices at first, times sqrt(width)", FRACTION)
    output_std: float = knob(0.5, "likewise, of the projections behind attention", FRACTION)
    attention_scale: float = knob(0.1, "factor of scores ahead of the softmax", POSITIVE)
    logit_cap: tuple = knob((23.0, 5.0), "(a, b): a logit is a sigmoid((z + b) / 7.5)", CAP)
    # --- table
    ngram_orders: tuple = knob((2, 3), "orders of hashed n-grams", ORDERS)
    # These are 6 GiB over all ranks; raise it as far as their memory goes.
    ngram_rows: int = knob(2**21, "rows of the table, for all columns", between(1, 2**31 - 1))
    copy_orders: tuple = knob((2, 3, 5, 8), "orders of copies from the document", ORDERS)
    copy_reach: int = knob(2048, "tokens that copies look back", SIZE)
    # --- optimizer
    matrix_update: str = knob("muon", "rule of the hidden matrices, a row of UPDATE_RULES")
    matrix_lr: float = knob(0.023, "RMS of a matrix' step times sqrt(columns)", POSITIVE)
    matrix_decay: float = knob(1.2, "cautious decay of matrices, over two rates", NOT_NEGATIVE)
    momentum_start: float = knob(0.85, "Muon's momentum at the first step, and the last", MOMENTUM)
    momentum_peak: float = knob(0.95, "Muon's momentum in between", MOMENTUM)
    momentum_warmup: float = knob(300 / 1285, "fraction of the run in which it rises", FRACTION)
    momentum_cooldown: float = knob(50 / 1285, "fraction of the run in which it falls", FRACTION)
    basis_every: int = knob(10, "soap rules: a matrix gets new eigenbases every k-th step", OFTEN)
    one_sided_above: int = knob(1024, "soap rules: a larger side has no eigenbasis", SIZE)
    adam_lr: float = knob(0.008, "rate of embeddings, head and scalars under Adam", POSITIVE)
    embed_lr: float = knob(1.0, "rate of embedding and head, over adam_lr", POSITIVE)
    embed_scale_lr: float = knob(0.1, "rate of the embedding's shares, over adam_lr", POSITIVE)
    adam_every: int = knob(2, "Adam steps every k-th step, on the sum of gradients", OFTEN)
    ngram_lr: float = knob(0.15, "row-wise Adagrad's rate of the table; 0: frozen", NOT_NEGATIVE)
    ngram_floor: float = knob(0.2, "gradient RMS of a token below which rows slow down", POSITIVE)
    # --- evaluation
    val_tokens: int = knob(10_485_760, "validation tokens that are scored", between(1, 10**9))
    val_sha256: str = knob("", "sha256 of those tokens and the next (uint16); empty: not compared")
    val_batch_tokens: int = knob(65536, "validation tokens of a forward pass", PASS)
    val_windows: tuple = knob((768, 2560), "attention windows of the final validation", WINDOWS)
    val_every: int = knob(250, "validate every so many steps (untimed); 0: at the end", SIZE)
    target_loss: float = knob(3.28, "the target, in nats a token; 0: none", NOT_NEGATIVE)
    # --- bookkeeping
    log_every: int = knob(20, "log the training loss every so many steps", OFTEN)
    save_every: int = knob(0, "steps between checkpoints, of which two are kept; 0: none", SIZE)
    run_id: str = knob("", "folder under logs/; empty: drawn from date and time", RUN_ID)
    resume: str = knob("", "run id or checkpoint to go on with; auto: --run-id, if it is there")
    run_of: str = knob("", "BATCH:COUNTER/RUNS:START, the run's place in a record", RUN_OF)
    # --- machine
    seed: int = knob(-1, "seed of weights and data order; -1: drawn", between(-1, 2**63 - 1))
    device: str = knob("auto", "auto | cpu | cuda: where it computes", DEVICES)
    dtype: str = knob("bfloat16", "bfloat16 | float32: of matrices and activations", DTYPES)
    attention: str = knob("auto", "auto | sdpa | varlen: back end of attention", BACK_ENDS)
    compile: bool = knob(True, "compile the model with torch.compile")

    def __post_init__(self):
        object.__setattr__(self, "stages", as_stages(self.stages))
        check_fields(self)
        for number, stage in enumerate(self.stages):
            check_fields(stage, f"stages[{number}].")
            rows, most = stage.softmax_rows, self.vocab_size
            require(rows <= most, f"softmax_rows={rows}", f"at most the vocabulary's {most}")
        self.check_together()

    def require(self, name, condition, problem):
        """Refuse the value that a field has, unless the condition holds."""
        require(condition, f"{name}={getattr(self, name)}", problem)

    def check_together(self):
        """Check what depends on several fields."""
        starts = [stage.start for stage in self.stages]
        is_rising = starts == sorted({0, *starts})
        require(is_rising, f"stages: starts {starts} must begin at 0, and then rise")
        heads, rest = divmod(self.model_dim, self.head_dim)
        self.require("head_dim", rest == 0, f"must divide model_dim={self.model_dim}")
        for name, unit in (("val_tokens", "val_batch_tokens"), ("save_every", "adam_every")):
            rest = getattr(self, name) % getattr(self, unit)
            self.require(name, rest == 0, f"must be a multiple of {unit}={getattr(self, unit)}")
        last = self.num_layers - 1
        for field in dataclasses.fields(self):
            if field.metadata["check"] in (LAYERS, SKIPS):
                is_there = np.max(getattr(self, field.name), initial=0) <= last
                self.require(field.name, is_there, f"layers are 0 to {last}")
        is_one = len(self.shared_input) <= 1
        self.require("shared_input", is_one, "must be one layer, such as (2,); or ()")
        is_earlier = last not in self.dense_layers
        self.require("dense_layers", is_earlier, f"must be below the last, {last}")
        for name in ("value_embedding", "shifted", "paired", "exclusive"):
            mute = sorted({*getattr(self, f"{name}_layers")} & {*self.mlp_only_layers})
            require(not mute, f"{name}_layers: {mute} have no attention; see --mlp-only-layers")
        is_even = not self.paired_layers or heads % 2 == 0
        self.require("paired_layers", is_even, f"{heads} heads make no pairs")
        is_there = self.eot_token < self.vocab_size
        self.require("eot_token", is_there, f"must be below vocab_size={self.vocab_size}")
        is_named = self.resume != "auto" or self.run_id
        self.require("resume", is_named, "it goes on with the run of --run-id; name one")

    @property
    def torch_dtype(self):
        return getattr(torch, self.dtype)


# fineweb's recipe at small scale, to see on a CPU what a change is worth: a twelfth of its
# channels, four layers of all its kinds, one stage, and a small vocabulary.
SMALL = {
    "data": "data/english",
    "tokenizer": "english1024.tiktoken",
    "vocab_size": 1024,
    "eot_token": 1023,
    "micro_batch_tokens": 1024,
    "micro_batches_a_pass": 1,
    "stages": (Stage(0.0, 2, 512, (64, 256)),),
    "cooldown": (0.25, 1.0),
    "final_lr": 0.1,
    "untie_at": 0.0,
    "model_dim": 64,
    "num_layers": 4,
    "head_dim": 32,
    "mlp_dim": 64,
    "mlp_only_layers": (),
    "long_layers": (1, 3),
    "value_embedding_layers": (0, 3),
    "shifted_layers": (1, 3),
    "paired_layers": (0, 2),
    "exclusive_layers": (0, 1),
    "skips": ((0, 3),),
    "shared_input": (1,),
    "dense_layers": (0, 1),
    "deciding_layers": (),
    "mlp_reach": 0,
    "value_std": 0.6,
    "output_std": 0.0,  # every block starts as the identity
    "attention_scale": 0.24,
    "logit_cap": (30.0, 0.0),
    "ngram_orders": (2,),
    "ngram_rows": 2**18,
    "one_sided_above": 128,
    "embed_scale_lr": 5.0,
    "val_tokens": 262_144,
    "val_sha256": "cdf79be5415e8fdfa3e67f5e38a2d95a0db7abc021b652193350bc2f69c021f1",
    "val_batch_tokens": 4096,
    "val_windows": (64, 640),
    "val_every": 0,
    "dtype": "float32",
    "compile": False,  # compiling takes longer than the run
}
TRACKS = {
    "fineweb": Config(),
    "english-net": Config(
        **SMALL,
        track="english-net",
        steps=162,
        copy_orders=(),
        matrix_lr=0.025,
        adam_lr=0.018,
        embed_lr=2.0,
        adam_every=1,
        target_loss=3.37,
    ),
}


# They say where a run computes and how it is watched, not what: with other values than the track's
# it may still be a record.
NEUTRAL_FIELDS = {"seed", "device", "log_every", "save_every", "run_id", "resume", "run_of"}


def default_track():
    """(name of the track to run where none is named, the reason in words)."""
    if not torch.cuda.is_available():
        has_apple = torch.backends.mps.is_available()
        apple = ", and Apple GPUs are not supported" if has_apple else ""
        return "english-net", f"torch sees no CUDA device{apple}"
    if not any(Path(TRACKS["fineweb"].data).glob("*_train_*.bin")):
        return "english-net", f"no shards in {TRACKS['fineweb'].data}"
    return "fineweb", "CUDA and FineWeb's shards are present"


def with_values(config, values):
    """The Config with other values, those of a Stage's fields in all stages."""
    values = dict(values)
    of_stages = {field.name for field in dataclasses.fields(Stage)} & values.keys()
    changes = {name: values.pop(name) for name in of_stages}
    unknown = values.keys() - {field.name for field in dataclasses.fields(config)}
    require(not unknown, f"track {config.track} has no {', '.join(sorted(unknown))}")
    stages = as_stages(values.pop("stages", config.stages), **changes)
    return dataclasses.replace(config, stages=stages, **values)


def overrides_of(config):
    """{field: value} of what differs from the values of the config's track and is not neutral."""
    own = dataclasses.asdict(TRACKS[config.track])
    values = dataclasses.asdict(config)
    changed = {name for name in values if values[name] != own[name]} - NEUTRAL_FIELDS
    return {name: values[name] for name in values if name in changed}


def config_from(given):
    """The Config of a track and the values given on the command line."""
    track = given.get("track", default_track()[0])
    hint = f"{nearest(track, TRACKS)} Tracks: {', '.join(TRACKS)}"
    require(track in TRACKS, f"--track {track}", "no such track", hint)
    track = TRACKS[track]
    data = given.get("data", track.data)
    config = with_values(track, {**vocabulary_of(data, track), **given})
    return with_values(config, {**room_of(config), **given}) if "data" in given else config


def stage_at(config, step):
    """The Stage that is in force at a step."""
    return [stage for stage in config.stages if stage.start * config.steps <= step][-1]


def loss_weights_at(config, step):
    """The loss weights at a step, of the next token, the second-next, ..., and of the next one's
    prefix: those of the stage, which move in a line towards the next stage's."""
    stages = config.stages
    stage = stage_at(config, step)
    following = stages[min(stages.index(stage) + 1, len(stages) - 1)]
    done = (step / config.steps - stage.start) / max(1e-9, following.start - stage.start)
    count = len(stage.mtp_weights)
    goals = [*following.mtp_weights, *[0.0] * count][:count] + [following.prefix_weight]
    weights = *stage.mtp_weights, stage.prefix_weight
    return tuple(now + done * (goal - now) for now, goal in zip(weights, goals, strict=True))


def micro_batches_of_pass(config, step, runtime):
    """How many micro-batches each pass of a rank reads at a step: as many as it may, but the same
    number in all of the step, since each number is compiled anew."""
    own = len(range(runtime.rank, stage_at(config, step).micro_batches, runtime.world_size))
    return max(count for count in range(1, config.micro_batches_a_pass + 1) if own % count == 0)


def training_tokens(config):
    """How many tokens the whole schedule trains on."""
    micro_batches = sum(stage_at(config, step).micro_batches for step in range(config.steps))
    return micro_batches * config.micro_batch_tokens


def lr_multiplier(config, step):
    """The stage's factor, then a linear fall to final_lr in the cooldown."""
    begin, end = config.cooldown
    left = (end * config.steps - step) / max(1.0, (end - begin) * config.steps)
    peak = stage_at(config, step).lr_mul
    return config.final_lr + (peak - config.final_lr) * min(1.0, max(0.0, left))


def momentum_at(config, step):
    """Muon's momentum: a linear rise, a plateau, and a linear fall at the end."""
    risen = step / max(1.0, config.momentum_warmup * config.steps)
    left = (config.steps - step) / max(1.0, config.momentum_cooldown * config.steps)
    low = config.momentum_start
    high = config.momentum_peak
    return low + (high - low) * min(1.0, risen, left)


def untie_step(config):
    """The step before which head and embedding are one tensor; 0 if they always are two. It starts
    a cycle of Adam's, whose summed gradients belong to one model."""
    cycles = math.ceil(round(config.untie_at * config.steps) / config.adam_every)
    return cycles * config.adam_every


def is_tied_before(config, step):
    """Whether head and embedding are one in the model that the steps before this one leave."""
    return step <= untie_step(config) and untie_step(config) > 0


class Window(NamedTuple):
    """Which keys a layer's queries see, at most."""

    size: int  # positions, the query's own among them
    positions: int  # of a token: 1, or one for each of a pair of heads


class Phase(NamedTuple):
    """What the compiled model depends on: each new value is compiled anew."""

    windows: tuple  # the Window of each layer
    max_segment: int  # tokens of the longest segment that attention sees at once
    is_tied: bool  # whether the head is the embedding, too
    targets: int = 1  # that a position predicts: the next token, the second-next, ...
    has_prefix: bool = False  # whether it predicts the prefix of the next one, too
    softmax_rows: int = 0  # rows of the vocabulary in the softmax; 0: all


def layer_windows(config, sizes):
    """The Window of each layer: the last of `sizes` in long layers, elsewhere the first."""
    windows = []
    for layer in range(config.num_layers):
        size = sizes[-1] if layer in config.long_layers else sizes[0]
        windows.append(Window(size, positions=2 if layer in config.paired_layers else 1))
    return tuple(windows)


def training_phase(config, step):
    """The Phase of a training step."""
    stage = stage_at(config, step)
    return Phase(
        windows=layer_windows(config, stage.windows),
        max_segment=min(stage.document_cap, config.micro_batch_tokens),
        is_tied=step < untie_step(config),
        targets=len(stage.mtp_weights),
        has_prefix=stage.prefix_weight > 0,
        softmax_rows=stage.softmax_rows,
    )


def evaluation_phase(config, step, length):
    """The Phase of a forward pass over `length` tokens outside training, before a step: the model
    as the last step left it, since untying is the first thing that the next one does."""
    windows = config.val_windows if step == config.steps else stage_at(config, step).windows
    return Phase(layer_windows(config, windows), length, is_tied_before(config, step))


def long_windows_until(config, step):
    """The long windows that training has used until a step, in order: what YaRN needs to know."""
    last = min(step, config.steps - 1)
    used = [stage.windows[-1] for stage in config.stages if stage.start * config.steps <= last]
    return tuple(window for window, _ in itertools.groupby(used))


# 2. Tokens =======================================================================================

SHARD_KIND = [20240520, 1]  # magic number and version, before the count of tokens
HEADER_INTS = 256
PREFETCH = 4  # steps that the loader's thread works ahead
# Segments that a passage has room for, or one for 256 tokens: FlashAttention starts blocks for
# each. FineWeb has at most 56 in 16,384 tokens (modded-nanogpt, record of 2026-03-22). For more of
# them it is the next power of two, at one compilation more.
SEGMENT_ROOM = 64


def open_shard(path):
    """Map a token shard (llm.c's format) as a read-only uint16 array. Raises ConfigError."""
    path = Path(path).absolute()
    remedy = "rebuild or download it again (data/text.py, data/fineweb.py)"
    require(path.is_file(), path, "no file, and a shard is one")
    header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    kind = header[:2].tolist()
    is_shard = len(header) == HEADER_INTS and kind == SHARD_KIND
    require(is_shard, path, f"begins with {kind}, not {SHARD_KIND}, or is cut: no shard", remedy)
    held = (path.stat().st_size - header.nbytes) / 2
    words = f"header says {header[2]} tokens, the file holds {held:.12g}"
    require(header[2] == held > 0, path, words, remedy)
    return np.memmap(path, dtype="<u2", mode="r", offset=header.nbytes)


def file_sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder):
    """The manifest of a corpus, with its shards as {file name: sha256}; empty where it has none.
    Raises ConfigError."""
    path = Path(folder, "manifest.json").absolute()
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_bytes())
        shards = {row["file"]: row["sha256"] for row in manifest["shards"]}
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path}: cannot be read ({one_line(error)}); build it again") from None
    ids = [manifest.get("vocab_size"), manifest.get("eot_token")]
    is_named = are_whole(ids, range(2**16)) and 0 < ids[1] == ids[0] - 1 < 65535
    words = f"has vocab_size and eot_token {ids}: documents start with the last id, below 65535"
    require(is_named, path, words, "build it again")
    sizes = manifest.get("token_bytes", [0] * ids[0])  # 0: not known
    is_whole = type(sizes) is list and len(sizes) == ids[0] and are_whole(sizes, range(2**16))
    require(is_whole, path, f"token_bytes are no {ids[0]} whole numbers", "build it again")
    return {**manifest, "shards": shards, "token_bytes": sizes}


def vocabulary_of(folder, track):
    """{field: value} of the vocabulary of a corpus that is not the track's, in multiples of 128, as
    tensor cores like."""
    manifest = read_manifest(folder)
    eot_token = manifest.get("eot_token", track.eot_token)
    if eot_token == track.eot_token:
        return {}
    size = 128 * math.ceil(manifest["vocab_size"] / 128)
    name = str(manifest.get("tokenizer", "own"))
    return {"tokenizer": name, "vocab_size": size, "eot_token": eot_token}


def room_of(config):
    """{field: value} for a corpus that is smaller than the track takes: it scores what there is to
    validate on, and repeats the training text as often as needed."""
    held = {}
    for split in ("train", "val"):
        shards = map(open_shard, Path(config.data).glob(f"*_{split}_*.bin"))
        held[split] = sum(len(shard) - 1 for shard in shards)
    passes = min(held["val"], config.val_tokens) // config.val_batch_tokens
    needed = training_tokens(config) + config.micro_batch_tokens
    is_large = held["train"] >= needed
    kept = held["train"] - config.micro_batch_tokens
    # What is too little for a pass or a micro-batch is refused by open_corpus.
    if passes == 0 or kept <= 0 or (is_large and held["val"] > config.val_tokens):
        return {}
    return {
        "val_tokens": passes * config.val_batch_tokens,
        "epochs": max(config.epochs, math.ceil(training_tokens(config) / kept)),
    }


def prefix_tokens(config):
    """(vocab_size,) int64: the longest token that a token begins with, by the corpus' manifest; its
    own id where there is none, or where no loss asks for it. Raises ConfigError."""
    prefixes = np.arange(config.vocab_size)
    if any(stage.prefix_weight > 0 for stage in config.stages):
        found = read_manifest(config.data).get("prefix_tokens", [])
        path = Path(config.data, "manifest.json").absolute()
        words = f"{path} has {len(found)} prefix_tokens of {config.vocab_size}"
        is_there = len(found) == config.eot_token + 1 and are_whole(found, range(config.vocab_size))
        require(is_there, "prefix_weight", words, "build it again, or --prefix-weight 0")
        prefixes[: len(found)] = found
    return prefixes


def manifest_hash(config):
    path = Path(config.data, "manifest.json")
    return file_sha256(path) if path.is_file() else "none"


def checked_shard(path, config, manifest):
    """Open a shard that is what its manifest says, and whose ids suit the tokenizer."""
    tokens = open_shard(path)
    largest = int(tokens.max())
    words = f"token id {largest} is beyond the {config.tokenizer} vocabulary's {config.eot_token}"
    require(largest <= config.eot_token, path, words, "is --eot-token right?")
    is_whole = not manifest or manifest["shards"].get(path.name) == file_sha256(path)
    remedy = "build or download the corpus again, in an empty folder"
    require(is_whole, path, "its sha256 is not the manifest's: changed or damaged", remedy)
    return tokens


class Corpus(NamedTuple):
    """The tokens of a run, uint16."""

    shards: list  # training shards, mapped files
    val: Any  # (val_tokens + 1,), the first ones of the validation split


def open_corpus(config):
    """Open and check all shards that a run needs. Raises ConfigError where they do not suit it."""
    folder = Path(config.data).absolute()
    manifest = read_manifest(folder)
    eot_token = manifest.get("eot_token", config.eot_token)
    words = f"documents start with {eot_token}, and not with eot_token={config.eot_token}"
    require(eot_token == config.eot_token, folder, words, "leave --eot-token out")
    builder = {"english": "text.py", "verse": "text.py --corpus verse", "fineweb10B": "fineweb.py"}
    remedy = f"run `python data/{builder.get(folder.name, 'text.py PATH')}`, or name --data"
    found = {}
    for split in ("train", "val"):
        found[split] = sorted(folder.glob(f"*_{split}_*.bin"))
        require(found[split], folder, f"no *_{split}_*.bin shards", remedy)
    needed = config.val_tokens + 1
    parts = [checked_shard(path, config, manifest)[:needed] for path in found["val"]]
    val = np.concatenate(parts)[:needed]
    most = (len(val) - 1) // config.val_batch_tokens * config.val_batch_tokens
    words = f"val_tokens={config.val_tokens:,}, but the validation split holds {len(val):,}"
    remedy = f"--val-tokens at most {most}" if most else "add text to validate on"
    require(len(val) == needed, folder, words, remedy)
    shards = [open_shard(path) for path in found["train"]]
    size = config.micro_batch_tokens

    def usable(shards):
        """The tokens of shards that fill micro-batches."""
        return sum((len(shard) - 1) // size * size for shard in shards)

    needed = training_tokens(config)
    for number, path in enumerate(found["train"]):
        if usable(shards[:number]) <= needed:  # the run gets here
            checked_shard(path, config, manifest)
    available = usable(shards)
    most = available * config.epochs
    words = f"{needed:,} training tokens, shards hold {most:,} in {config.epochs} epoch(s)"
    ways = ["add text"]
    if available:
        ways += ["lower --steps", f"take --epochs {math.ceil(needed / available)}"]
    words = f"the schedule takes {words}"
    require(needed <= most, folder, words, ", or ".join(ways))
    return Corpus(shards, val)


def validation_hash(val):
    return hashlib.sha256(val.tobytes()).hexdigest()


class Text:
    """Tokens (L,) uint16, and where their documents start."""

    def __init__(self, tokens, eot_token):
        self.tokens = tokens
        self.starts = np.union1d([0], np.flatnonzero(tokens == eot_token))

    def depth(self, position):
        """How many tokens of its document stand before each position."""
        return position - self.starts[np.searchsorted(self.starts, position, side="right") - 1]


class Passage(NamedTuple):
    """Where the tokens of a micro-batch stand: spans of a Text, each of one document."""

    text: Text
    spans: list  # [(low, high), ...]: attention segments, laid end to end

    def positions(self):
        """Where the tokens stand in the text: (T,) int64."""
        return np.concatenate([np.arange(low, high) for low, high in self.spans])

    def tokens(self, shift=0):
        """The tokens of the spans, or those that many places behind them."""
        tokens = self.text.tokens
        return np.concatenate([tokens[low + shift : high + shift] for low, high in self.spans])


def contiguous_passage(text, low, length):
    """The Passage of `length` tokens from `low` on, cut where documents start."""
    first, last = np.searchsorted(text.starts, [low + 1, low + length])
    edges = [low, *text.starts[first:last].tolist(), low + length]
    return Passage(text, list(itertools.pairwise(edges)))


class MicroBatch(NamedTuple):
    """The T tokens that one forward pass reads, on the model's device: in training those of a
    micro-batch, or of several, end to end."""

    inputs: Tensor  # (T,) int32 token ids
    targets: Tensor  # (T,) int64 next token ids
    segment_start: Tensor  # (T,) int32: index in [0, T) at which the token's segment starts
    segment_bounds: Tensor  # (S,) int32: where segments start, then T as often as there is room
    guesses: Tensor  # (T, G) int32: of the next token, see copies()


class Batch(NamedTuple):
    """One rank's part of a step."""

    stack: MicroBatch  # of the rank's passes, along a first axis of each tensor
    rows: Any  # RowPlan of the rows of the table that they read
    tokens: int  # of the step, on all ranks
    state: dict  # of the loader behind this step

    def passes(self):
        return map(MicroBatch, *(tensor.unbind() for tensor in self.stack))


def to_device(array, device):
    """Copy a numpy array to the device; on CUDA through pinned memory, and without a sync."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def stack_passages(passages, guesses, length, device, joined=1):
    """The MicroBatch of passages of `length` tokens, with guesses (n, G) of what follows all of
    these, so many joined in one pass; passes are stacked along a first axis of each tensor."""
    most = max((len(passage.spans) for passage in passages), default=0)
    room = max(SEGMENT_ROOM, length // 256, 1 << most.bit_length())
    shape = len(passages) // joined, joined * length
    inputs = np.empty(shape, np.int32)
    targets = np.empty(shape, np.int64)
    segment_start = np.empty(shape, np.int32)
    bounds = np.full((shape[0], joined * room), shape[1], np.int32)
    for number in range(shape[0]):
        own = passages[number * joined : (number + 1) * joined]
        lengths = np.array([high - low for passage in own for low, high in passage.spans])
        starts = np.cumsum(lengths) - lengths
        inputs[number] = np.concatenate([passage.tokens() for passage in own])
        targets[number] = np.concatenate([passage.tokens(shift=1) for passage in own])
        segment_start[number] = np.repeat(starts, lengths)
        bounds[number, : len(starts)] = starts  # behind them empty segments end the pass
    guesses = guesses.reshape(*shape, guesses.shape[1])
    arrays = inputs, targets, segment_start, bounds, guesses
    return MicroBatch(*(to_device(array, device) for array in arrays))


def check_distinct_targets(passage, config, step, prefixes):
    """Refuse a softmax that has no row left to stand for the rest of the vocabulary."""
    rows = stage_at(config, step).softmax_rows
    if rows in (0, config.vocab_size):
        return
    targets = passage.tokens(shift=1)
    is_found = np.zeros(config.vocab_size, bool)
    is_found[targets] = True
    is_found[prefixes[targets]] = True
    found = is_found.sum()
    words = f"step {step} has {found} different targets in a micro-batch, which all take part"
    remedy = "raise it, or 0 for the whole vocabulary"
    require(found < rows, f"softmax_rows={rows}", words, remedy)


class TrainLoader:
    """Deterministic stream of steps, which a thread assembles ahead.

    Documents are cut into pieces of at most the largest document cap. A shard's pieces are shuffled
    by the seed and laid end to end into micro-batches, which begin with the rest of a piece. A
    smaller cap at a step splits pieces further. What fills no micro-batch at a shard's end is
    dropped. `state` says where the stream is: shards opened before, piece of the shard, token of
    the piece. look_up: what finds the plan of the rows of this rank's passages, and their guesses.
    """

    START = {"shard": 0, "piece": 0, "offset": 0}

    def __init__(self, config, shards, runtime, look_up, first_step=0, state=None):
        self.config = config
        self.shards = shards
        self.runtime = runtime
        self.look_up = look_up
        self.state = dict(state or self.START)
        self.prefixes = prefix_tokens(config)
        self.step = first_step  # the next one to assemble
        self.text, self.pieces = self.open_shard(self.state["shard"])
        self.upcoming = None  # what comes of the next shard
        self.opener = ThreadPoolExecutor(1)
        self.ahead = deque()
        sys.setswitchinterval(1e-4)  # seconds that the thread may keep the others waiting
        self.thread = ThreadPoolExecutor(1, initializer=runtime.use_device)

    def open_shard(self, opened):
        """(Text, its pieces in a random order) of the shard behind so many opened ones."""
        cap = max(stage.document_cap for stage in self.config.stages)
        tokens = self.shards[opened % len(self.shards)]
        if isinstance(tokens, np.memmap):  # to read one that was cut short would end the process
            tokens = np.fromfile(tokens.filename, "<u2", len(tokens), offset=4 * HEADER_INTS)
        text = Text(tokens, self.config.eot_token)
        edges = [*text.starts.tolist(), len(tokens) - 1]  # the last token is only a target
        pieces = [
            (low, min(low + cap, end))
            for start, end in itertools.pairwise(edges)
            for low in range(start, end, cap)
        ]
        rng = np.random.default_rng([self.config.seed, opened])
        return text, [pieces[number] for number in rng.permutation(len(pieces))]

    def next_passage(self, cap):
        """The Passage of the next micro-batch, with segments of at most `cap` tokens."""
        spans = []
        missing = self.config.micro_batch_tokens
        while missing:
            following = self.state["shard"] + 1
            # Ahead by half a shard, so that no run opens one that it will not read.
            if self.upcoming is None and 2 * self.state["piece"] >= len(self.pieces):
                self.upcoming = self.opener.submit(self.open_shard, following)
            if self.state["piece"] == len(self.pieces):
                self.state = {**self.START, "shard": following}
                self.text, self.pieces = self.upcoming.result()
                self.upcoming = None
                return self.next_passage(cap)
            low, high = self.pieces[self.state["piece"]]
            low += self.state["offset"]
            taken = min(high - low, cap, missing)
            spans.append((low, low + taken))
            missing -= taken
            self.state["offset"] += taken
            if low + taken == high:
                self.state["piece"] += 1
                self.state["offset"] = 0
        return Passage(self.text, spans)

    def make_batch(self, step):
        """Assemble this rank's part of a step, in the thread; a rank may have no micro-batch."""
        config = self.config
        runtime = self.runtime
        cap = stage_at(config, step).document_cap
        passages = [self.next_passage(cap) for _ in range(stage_at(config, step).micro_batches)]
        own = passages[runtime.rank :: runtime.world_size]
        joined = micro_batches_of_pass(config, step, runtime)
        for passage in own:
            check_distinct_targets(passage, config, step, self.prefixes)
        rows, guesses = self.look_up(own)
        return Batch(
            stack=stack_passages(own, guesses, config.micro_batch_tokens, runtime.device, joined),
            rows=rows,
            tokens=len(passages) * config.micro_batch_tokens,
            state=dict(self.state),
        )

    def next_batch(self):
        """The next step's Batch, None behind the last one; raises what the thread has raised."""
        while len(self.ahead) < PREFETCH and self.step < self.config.steps:
            self.ahead.append(self.thread.submit(self.make_batch, self.step))
            self.step += 1
        return self.ahead.popleft().result() if self.ahead else None

    def close(self):
        """End the thread: one inside torch would abort a process that ends."""
        self.thread.shutdown(cancel_futures=True)
        self.opener.shutdown()


# 3. Table ========================================================================================
# Each token reads rows of one table, one for each order n: a hash of the last n tokens, an n-gram,
# says which. It also has guesses at the next token: what followed an earlier occurrence of the last
# n tokens in the document. The model reads guesses by its own embeddings (see GPT.guessed), so that
# what it learns of one token's guesses holds for those of all. All of this looks at the same
# document alone, at or before the token.
#
# A rank holds the rows that it owns, a range of the table. The loader's thread plans a step ahead
# of it, on the CPU: which rows are read, who owns them, and at which slot a row will stand among
# the values that travel here. The values are pulled before the step; the gradients of each row are
# summed here and pushed back to its owner, who sums and updates. So no row travels twice, and a row
# that is owned here never does. At world size 1 it is the plain table.

TOKEN_HASH = np.random.default_rng(20240520).integers(0, 2**64, size=2**16, dtype=np.uint64)
MIX = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, odd
HASH_POWERS = np.uint64(pow(MIX, -1, 2**64)) ** np.arange(33, dtype=np.uint64)
NO_TOKEN = 2**16 - 1  # no token's id


def ngram_keys(tokens, position, depth, order):
    """Hash keys (t,) uint64 of the n-grams of `order` tokens that end at positions (t,) of tokens.

    A key is a polynomial of the tokens' random numbers modulo 2^64 (Karp & Rabin 1987). depth (t,):
    how many tokens of the document stand before each; where these are fewer than the n-gram needs,
    the key is that of the shorter n-gram.
    """
    keys = np.zeros(len(position), np.uint64)
    for back in range(order):
        term = TOKEN_HASH[tokens[position - back]] * HASH_POWERS[back]
        keys += np.where(back <= depth, term, np.uint64(0))
    return keys


def ngram_rows(passage, config):
    """Rows (T, C) int32 in [0, ngram_rows) of the table and signs (T, C) float32, for the n-grams
    that end at the tokens of a Passage.

    Each order has rows of its own. The sign is one more bit of the hash: two n-grams that share a
    row push it apart half of the time (count-sketch's trick).
    """
    position = passage.positions()
    depth = passage.text.depth(position)
    shape = len(position), len(config.ngram_orders)
    keys = np.empty(shape, np.uint64)
    for column, order in enumerate(config.ngram_orders):
        keys[:, column] = ngram_keys(passage.text.tokens, position, depth, order)
    mixed = keys + TOKEN_HASH[: shape[1]]
    mixed = (mixed ^ (mixed >> 29)) * MIX
    mixed ^= mixed >> 32
    rows = (mixed & 0xFFFFFFFF) * config.ngram_rows >> 32
    signs = (mixed >> 40 & 1).astype(np.float32) * 2 - 1
    return rows.astype(np.int32), signs


def copies(passage, config):
    """Guesses (T, G) int32 at the token that follows each token of a Passage, one for each order n:
    what followed the last n tokens the last time in their document, at most `copy_reach` tokens
    back; NO_TOKEN where they are new."""
    text = passage.text
    reach = config.copy_reach + max(config.copy_orders, default=0)
    parts = []  # each span, with the part of its document that it may copy from
    for low, high in passage.spans:
        begin = max(low - text.depth(low), low - reach)
        parts.append(np.arange(begin, high))
    position = np.concatenate(parts)
    span = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    is_asked = position >= np.array(passage.spans)[span, 0]
    depth = text.depth(position)
    guesses = np.full((len(position), len(config.copy_orders)), NO_TOKEN, np.int32)
    for column, order in enumerate(config.copy_orders):
        keys = ngram_keys(text.tokens, position, depth, order) + TOKEN_HASH[span]
        sequence = np.argsort(keys, kind="stable")
        earlier, later = sequence[:-1], sequence[1:]
        is_copy = keys[earlier] == keys[later]
        is_copy &= depth[earlier] >= order - 1
        is_copy &= position[later] - position[earlier] <= config.copy_reach
        guesses[later[is_copy], column] = text.tokens[position[earlier[is_copy]] + 1]
    return guesses[is_asked]


def row_fingerprint(config):
    """A hash of the rows of a fixed text: a table means nothing under another hash function."""
    tokens = np.random.default_rng(0).integers(0, 4, 100).astype(np.uint16)
    rows, signs = ngram_rows(Passage(Text(tokens, config.eot_token), [(0, 99)]), config)
    return hashlib.sha256(rows.tobytes() + signs.tobytes()).hexdigest()


@dataclass
class RowPlan:
    """The rows that a rank reads in a step, and the routes of their values and gradients.

    This rank's N = T C pairs of token and order read U distinct rows. All ranks read R rows of this
    rank's range, V distinct ones. At world size 1 these are the same rows, and there is nothing to
    merge.
    """

    slots: Tensor  # (T, C) int32: where a token's rows stand among the values that travel here
    signs: Tensor  # (T, C) float32 of +-1
    token: Tensor  # (N,) int32: tokens that read the first of the U rows, then the second, ...
    offsets: Tensor  # (U,) int32: where in `token` those of each row begin
    token_signs: Tensor  # (N,) float32: the signs, in the order of `token`
    owned: Tensor  # (V,) int64, rising: the rows to update, counted from the range's start
    asked: Tensor  # (R,) int64, rank after rank: the rows to send, counted likewise
    send: list  # how many of the U rows each rank owns: their order is that of their ids
    receive: list  # how many of `asked` each rank reads
    merge: tuple  # positions in `asked` of owned[0], then owned[1], ... (R,); offsets (V,); int32


def group_equal(ids):
    """Group integers (n,) from 0 to 2^31 - 1. Returns the distinct ones, rising, (u,); int32
    positions (n,) of the first one's occurrences, then of the second's, and so on; and where in
    these each begins, (u,) int32."""
    # Of 16 bits numpy does a radix sort: two take a quarter of the time of its sort of 32.
    order = np.argsort(ids.astype(np.uint16), kind="stable")
    upper = (ids >> 16).astype(np.uint16)
    order = order[np.argsort(upper[order], kind="stable")]
    ordered = ids[order]
    is_first = np.ones(len(ids), bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    offsets = np.flatnonzero(is_first)
    return ordered[offsets], order.astype(np.int32), offsets.astype(np.int32)


def sum_groups(values, positions, offsets, signs=None):
    """Sums (u, d) float32 of the rows of values (n, d) that `group_equal` has put together: in a
    fixed order, and without atomics."""
    return F.embedding_bag(positions, values.float(), offsets, mode="sum", per_sample_weights=signs)


def plan_rows(rows, signs, config, runtime, group, name):
    """Build the RowPlan of a step, together with all ranks.

    rows, signs: (T, C) of this rank's tokens, of all its passes. group: the process group of the
    calling thread. name: for the ledger. Counts and indices travel here, ahead of the values, whose
    sizes both sides then know.
    """
    world_size = runtime.world_size
    distinct, order, offsets = group_equal(rows.ravel())
    last = config.ngram_rows - 1
    is_inside = not len(distinct) or 0 <= distinct[0] <= distinct[-1] <= last
    require(is_inside, f"n-gram rows leave the table's range 0 to {last}; correct ngram_rows")

    def exchange(array, send, receive):
        tensor = torch.from_numpy(array.astype(np.int32))
        out, work = runtime.all_to_all(tensor, send, receive, name, group)
        wait(work)
        return out.numpy()

    owners = distinct // math.ceil(config.ngram_rows / world_size)
    send = np.bincount(owners, minlength=world_size)
    receive = exchange(send, [1] * world_size, [1] * world_size).tolist()
    asked = exchange(distinct, send.tolist(), receive).astype(np.int64)
    asked -= runtime.owned_range(config.ngram_rows)[0]
    owned = asked
    merge = ()
    slots = rows
    if world_size > 1:
        owned, *merge = group_equal(asked)
        slots = np.zeros(rows.size, np.int32)
        counts = np.diff(np.append(offsets, len(order)))
        slots[order] = np.repeat(np.arange(len(distinct), dtype=np.int32), counts)
    there = functools.partial(to_device, device=runtime.device)
    return RowPlan(
        slots=there(slots.reshape(rows.shape)),
        signs=there(signs),
        token=there(order // max(1, rows.shape[1])),
        offsets=there(offsets),
        token_signs=there(signs.ravel()[order]),
        owned=there(owned),
        asked=there(asked),
        send=send.tolist(),
        receive=receive,
        merge=tuple(map(there, merge)),
    )


class Group:
    """Parameters that step, travel and are saved together.

    Optimizer.step takes all groups that are due through three calls, each of which gets what the
    one before it has returned:
        reduce(step)                   start to sum their gradients over ranks
        update(step, lr_mul, pending)  wait for the sums, update, start to send the new values
        receive(pending)               take over what other ranks have sent
    `tensors()` are all that a step changes on this rank, by name; `size()` counts the group's
    values; `full_state()` is what a checkpoint keeps of it, whatever the world size, and `load`
    takes that back.
    """

    every = 1  # steps between updates
    is_frozen = False
    is_shared_out = True  # or else every rank updates all of it

    def is_due(self, step):
        """Whether the group is updated at a step: every k-th, and the run's last."""
        is_last = step + 1 == self.config.steps
        return not self.is_frozen and ((step + 1) % self.every == 0 or is_last)

    def touched(self):
        """The tensors that a step changes, each with the index of what it changes there."""
        return [(tensor, ...) for tensor in self.tensors().values()]


ROW_MEMORY = 0.98  # what a row's moment keeps of itself at each of its updates


def adagrad_rows_update(table, second, rows, grads, lr, floor):
    """Row-wise Adagrad on distinct rows (u,) of the table (n, dim), in place, at their cost alone.

    It forgets: a rare row's steps shrink from `lr` on as Adagrad's do, and a frequent one's no
    further than to lr * sqrt(1 - ROW_MEMORY), so that it goes on to learn in a long run.

    second: (n,), the sum of each row's mean squared gradients. grads: (u, dim), sums over tokens.
    floor: a gradient RMS that is added to the moment: a row that is new where tokens are predicted
    well should hardly move.
    """
    moment = ROW_MEMORY * second[rows] + grads.square().mean(1)
    second[rows] = moment
    steps = grads * (-lr * (moment + floor * floor).rsqrt())[:, None]
    # On a CPU this takes a third of the time of table[rows] += steps, for the same bits.
    table.scatter_add_(0, rows[:, None].expand_as(steps), steps)


class NgramTable(Group):
    """This rank's rows of the table, their optimizer state, and all that travels of them.

    Autograd never sees the table: `summed` adds the rows of each token, and `accumulate` is given
    the gradients of these sums.
    """

    name = "ngram_table"

    def __init__(self, config, runtime):
        self.config = config
        self.runtime = runtime
        self.is_frozen = not config.ngram_orders or config.ngram_lr == 0
        self.rows = config.ngram_rows if config.ngram_orders else 0
        self.low, self.high = runtime.owned_range(self.rows)
        self.second = torch.zeros(self.high - self.low, device=runtime.device)
        self.weight = self.second.new_zeros(len(self.second), config.model_dim)
        self.grads = []  # of the step's passes, (T, model_dim) each
        self.plan = None  # of the step at hand, or of the next one once its rows are on their way
        self.pulled = None  # (values, work) of its rows
        self.upcoming = None  # the plan whose rows are pulled once this step has updated them

    def look_up(self, passages, group=None, name="ngram_indices"):
        """(RowPlan, guesses (T, G)) of a rank's passages, one a micro-batch; all ranks must call it
        together."""
        config = self.config
        rows = [np.empty((0, len(config.ngram_orders)), np.int32)]
        signs = [np.empty((0, len(config.ngram_orders)), np.float32)]
        guesses = [np.empty((0, len(config.copy_orders)), np.int32)]
        for passage in passages:
            own_rows, own_signs = ngram_rows(passage, config)
            rows.append(own_rows)
            signs.append(own_signs)
            guesses.append(copies(passage, config))
        read = np.concatenate(rows), np.concatenate(signs)
        plan = plan_rows(*read, config, self.runtime, group, name)
        return plan, np.concatenate(guesses)

    def fetch(self, plan, name):
        """Start to bring the rows of a plan here: (values (n, model_dim) float32, work)."""
        if self.runtime.world_size == 1:
            return self.weight, None
        rows = self.weight[plan.asked]
        return self.runtime.all_to_all(rows, plan.receive, plan.send, name)

    def start_pull(self, plan):
        """Start to bring the rows of a training step here, unless they are on their way."""
        if plan is not self.plan:
            self.plan = plan
            self.pulled = self.fetch(plan, self.name)

    def values_of(self, plan):
        """The values (n, model_dim), float32, that the slots of a training step point into."""
        self.start_pull(plan)
        values, work = self.pulled
        wait(work)
        return values

    def summed(self, slots, signs, values):
        """The sum of each token's signed rows: (T, model_dim), a leaf in the compute dtype; None
        without a table. slots, signs: (T, C), of a RowPlan whose values these are."""
        if not self.config.ngram_orders:
            return None
        summed = F.embedding_bag(slots, values, mode="sum", per_sample_weights=signs)
        return summed.to(self.config.torch_dtype).requires_grad_(not self.is_frozen)

    def accumulate(self, grad):
        """Keep the gradient (T, model_dim) of the next pass' summed loss."""
        self.grads.append(grad)

    def reduce(self, step):
        """Sum the step's gradients by row, and start to push them to the rows' owners."""
        plan = self.plan
        none = self.weight.new_empty(0, self.config.model_dim)
        grads = torch.cat([none, *self.grads])
        sums = sum_groups(grads, plan.token, plan.offsets, plan.token_signs)
        self.grads = []
        return [self.runtime.all_to_all(sums, plan.send, plan.receive, self.name)]

    def update(self, step, lr_mul, pending):
        """Update the rows that are owned here. Losses are summed, not averaged: a row learns from
        its own tokens, however many others the step has."""
        ((sums, work),) = pending
        wait(work)
        if self.plan.merge:
            sums = sum_groups(sums, *self.plan.merge)
        lr = self.config.ngram_lr * lr_mul
        # As the gradient falls with the width; so, from 64 to 512 channels, new rows make first
        # steps of one size (records/NOTES.md, 2026-11-25).
        floor = self.config.ngram_floor * (64 / self.config.model_dim) ** 0.75
        adagrad_rows_update(self.weight, self.second, self.plan.owned, sums, lr, floor)
        if self.upcoming is not None:
            self.start_pull(self.upcoming)  # while the matrices are updated

    def receive(self, pending):
        """Nothing to take over: the rows that others have updated are pulled when they are read."""

    def size(self):
        return self.rows * self.config.model_dim

    def touched(self):
        """As Group.touched, of the step at hand: the table is too large for a copy."""
        return [(self.weight, self.plan.owned), (self.second, self.plan.owned)]

    def tensors(self):
        return {"weight": self.weight, "second": self.second}

    def full_state(self):
        """The whole table on the host of rank 0; all ranks must call it."""
        return {
            name: self.runtime.gather_on_main(tensor.cpu(), self.rows)
            for name, tensor in self.tensors().items()
        }

    def load(self, state):
        self.weight.copy_(state["weight"][self.low : self.high])
        self.second.copy_(state["second"][self.low : self.high])


# 4. Layers =======================================================================================


def norm(x):
    """RMSNorm over the last axis, without weights."""
    return F.rms_norm(x, (x.size(-1),), eps=torch.finfo(torch.float32).eps)


def rotary_tables(length, head_dim, scale, long_windows, device, dtype):
    """Rotary position embedding, and the softmax scale, which is `scale` at first.

    Half of the channel pairs rotate, at 1 to 1/1024 radians a token. As the long window grows, YaRN
    (Peng et al. 2023) slows the pairs that turn less than once in the old one by old/new, leaves
    those that turn over 32 times, and sharpens the scale by 0.2 ln(new/old) + 1. In float64, for
    positions of a long batch to be exact. long_windows: those so far. Returns (cos, sin, scale),
    where the tables are (length, 1, head_dim): of the first channels of all pairs, then of the
    second ones, whose sines have the other sign.
    """
    pairs = head_dim // 2
    turning = (1 / 1024) ** torch.linspace(0, 1, pairs // 2, dtype=torch.float64)
    speed = F.pad(turning, (0, pairs - pairs // 2))
    for old, new in itertools.pairwise(long_windows):
        turns = old * speed / (2 * math.pi)
        kept = ((turns - 1) / 31).clamp(0, 1)
        speed = speed * (old / new + kept * (1 - old / new))
        scale = scale * (0.2 * math.log(new / old) + 1)
    angle = torch.arange(length, dtype=torch.float64)[:, None, None] * speed
    cos = torch.cat([angle.cos(), angle.cos()], dim=-1)
    sin = torch.cat([angle.sin(), -angle.sin()], dim=-1)
    return cos.to(device, dtype), sin.to(device, dtype), scale


def rotate(x, cos, sin):
    """Rotate the channel pairs of x (T, heads, head_dim) by the angles of their positions, whose
    cosines and sines are those of rotary_tables."""
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return x * cos + swapped * sin


def shifted(k, is_first):
    """Keys (T, heads, head_dim) whose channels that do not rotate are those of the token before,
    or 0 where is_first (T,).

    So one layer can find what followed a token earlier (modded-nanogpt, record of 2025-12-14).
    """
    turning, still = k.unflatten(-1, (2, 2, -1)).unbind(-2)  # of each half of the channel pairs
    still = F.pad(still, (0, 0, 0, 0, 0, 0, 1, -1)).masked_fill(is_first[:, None, None, None], 0)
    return torch.stack([turning, still], dim=-2).flatten(-3)


def in_pairs(x):
    """Heads (T, heads, dim) as (2 T, heads / 2, dim): for each token one of a pair, then the other.

    So a head sees the keys of both (modded-nanogpt, record of 2026-01-07).
    """
    return x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(0, 1)


def out_of_pairs(y):
    """The inverse of in_pairs."""
    return y.unflatten(0, (-1, 2)).transpose(1, 2).flatten(1, 2)


def without_own_value(y, v, share):
    """Outputs of attention (T, heads, dim) less a share (T, heads, 1) of their part along v, the
    token's own value, which the residual stream has anyway (XSA, arXiv 2603.09078)."""
    along = (y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True).clamp_min(1e-8)
    return y - share * along * v


class BlockedAttention:
    """Back end `sdpa`: softmax attention on any device, in time linear in T.

    A block of queries attends to the keys of its own and of the preceding blocks that the window
    reaches.
    """

    def prepare(self, micro_batch, phase, dtype):
        """{Window: what is added to its scores}, once a micro-batch, for all layers."""
        biases = {}
        for window in set(phase.windows):
            count = window.positions
            start = (count * micro_batch.segment_start).repeat_interleave(count)
            biases[window] = blocked_bias(start, window.size, dtype)
        return biases

    def attend(self, q, k, v, biases, window, scale):
        """Attention of q, k, v (n, heads, head_dim), n a multiple of the block: the same shape."""
        length, heads, dim = q.shape
        block = math.gcd(window.size, ATTENTION_BLOCK)

        def reached(x):
            """(blocks, heads, size + block, dim): what each block reaches, zeros before 0."""
            padded = F.pad(x, (0, 0, 0, 0, window.size, 0))
            return padded.unfold(0, window.size + block, block).transpose(-1, -2)

        queries = q.view(-1, block, heads, dim).transpose(1, 2)
        keys = reached(k)
        values = reached(v)
        bias = biases[window][:, None]
        y = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scale)
        return y.transpose(1, 2).reshape(length, heads, dim)


def blocked_bias(segment_start, window, dtype):
    """What BlockedAttention adds to its scores, (blocks, block, window + block).

    It is 0 where query i sees key j, max(segment_start[i], i - window + 1) <= j <= i, else -inf.
    The keys of a block of queries start `window` before it.
    """
    block = math.gcd(window, ATTENTION_BLOCK)
    device = segment_start.device
    query = torch.arange(len(segment_start), dtype=torch.int32, device=device).view(-1, block, 1)
    reach = torch.arange(window + block, dtype=torch.int32, device=device)
    key = query[:, :1] - window + reach
    first = torch.maximum(segment_start.view(-1, block, 1), query - window + 1)
    is_visible = (key >= first) & (key <= query)
    bias = torch.zeros(is_visible.shape, dtype=dtype, device=device)
    return bias.masked_fill_(~is_visible, -math.inf)


class VarlenAttention:
    """Back end `varlen`: FlashAttention over packed segments (CUDA, half precision).

    For each head and segment its grid has a block for every 128 tokens of the longest segment.
    """

    def prepare(self, micro_batch, phase, dtype):
        """{positions of a token: (bounds of its segments, the longest one)}."""
        return {
            count: (count * micro_batch.segment_bounds, count * phase.max_segment)
            for count in {window.positions for window in phase.windows}
        }

    def attend(self, q, k, v, segments, window, scale):
        from torch.nn.attention.varlen import varlen_attn

        bounds, longest = segments[window.positions]
        both = bounds, bounds, longest, longest  # of queries and of keys
        return varlen_attn(q, k, v, *both, scale=scale, window_size=(window.size - 1, 0))


def choose_attention(config, device):
    """Resolve Config.attention. Returns (back end, its description for the log)."""
    capability = (0, 0)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    has_varlen = importlib.util.find_spec("torch.nn.attention.varlen")
    is_able = has_varlen and capability >= (8, 0) and config.dtype == "bfloat16"
    needs = "needs bfloat16, compute capability 8.0 and torch.nn.attention.varlen"
    words = f"{needs}, and has {config.dtype}, {capability} and torch {torch.__version__}"
    is_met = is_able or config.attention != "varlen"
    require(is_met, "attention=varlen", words, "use --attention sdpa")
    if config.attention == "sdpa" or not is_able:
        return BlockedAttention(), "sdpa"
    newer = {9: "FA3", 10: "FA4"}.get(capability[0], "newer one for this device")
    from torch.nn import attention

    is_active = False
    try:  # where its package is installed, else the FlashAttention 2 that torch holds
        attention.activate_flash_attention_impl(newer)
        is_active = True
        try_varlen(config.head_dim, device)
        return VarlenAttention(), f"varlen-{newer}"
    except Exception as error:  # whatever an absent or unfit package raises
        if is_active:
            attention.restore_flash_attention_impl()
        return VarlenAttention(), f"varlen-FA2 (no {newer}: {type(error).__name__})"


def try_varlen(head_dim, device):
    """Attend once, forward and backward: a package that does not suit torch may fail only there."""
    x = torch.ones(64, 1, head_dim, dtype=torch.bfloat16, device=device, requires_grad=True)
    bounds = torch.tensor([0, len(x)], dtype=torch.int32, device=device)
    y = VarlenAttention().attend(x, x, x, {1: (bounds, len(x))}, Window(16, 1), 1.0)
    torch.autograd.grad(y.sum(), x)[0].sum().item()  # which waits for the device


def convolved(x, kernel, position):
    """Each token of x (T, dim) with shares of those before it in its segment, channel by channel: a
    Canon layer (Allen-Zhu 2025, arXiv 2512.17351).

    kernel: (reach, dim), the shares of the last token, of the one before that, and so on. position:
    (T,), of each token in its segment.
    """
    total = x
    for back, share in enumerate(kernel, start=1):
        # Multiplied before it is shifted, so that the gradient needs nothing but x.
        before = F.pad(share * x, (0, 0, back, -back))
        total = total + before.masked_fill((position < back)[:, None], 0)
    return total


def mlp(x, up, down):
    """The ReLU^2 MLP of x (T, dim); up and down (mlp_dim, dim)."""
    return F.relu(F.linear(x, up)).square() @ down


SHARE_DIM = 64  # hidden width of the networks that decide shares
SHARE_SCALE = 0.1  # of what they decide


def decided(x, up, down):
    """Shares (T, n) that each token decides by its x (T, model_dim), through a small network: up
    (SHARE_DIM, model_dim), down (n, SHARE_DIM)."""
    return SHARE_SCALE * F.linear(F.gelu(F.linear(x, up)), down)


def gate(x, weight):
    """Learned gates in (0, 2), 1 at the start: (T, n) from the first channels of x (T, model_dim).

    weight: (n, GATE_DIM).
    """
    return 2 * torch.sigmoid(F.linear(x[:, :GATE_DIM], weight))


# 5. Loss =========================================================================================

# Tokens whose logits exist at a time: on a CPU those of more leave its cache, and on a GPU those of
# fewer are more kernels to compile and to launch.
LOSS_CHUNK = {"cpu": 2048, "cuda": 8192}
CAP_WIDTH = 7.5  # of the sigmoid that caps logits
SPREAD = 2654435769  # 2^32 over the golden ratio: multiples of it lie far from each other


class CappedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of soft-capped logits, and its gradients, in one pass over the logits.

    The plain form is capped() and F.cross_entropy. With l = capped(z) for a product z of hidden
    state and head, and the gap g = top - l, which lies in (0, top):
        loss at target t  =  ln sum_v exp(l_v) - l_t  =  ln sum_v exp(-g_v) + g_t
        dl / dz           =  g (top - g) / (top CAP_WIDTH)
    So no maximum is needed, and the logits can give way to their gradients times the sum, which is
    not known yet: dividing rows by it commutes with the products that follow. Only the targets'
    columns are mended afterwards.

    hidden (T, dim); head (V, dim); targets (T, K) and weights (T, K): the loss weights of K tokens
    at a position; counts (V,) or None: how many rows of the
    vocabulary each row of head stands for, which must be 1 for targets; cap: see capped;
    needs_grad: whether gradients will be asked for.
    Returns (the weighted sum of losses; losses (T,) of the first targets, without a gradient).
    """

    @staticmethod
    def forward(ctx, hidden, head, targets, weights, counts, cap, needs_grad):
        top, shift = cap
        columns = torch.arange(len(head), device=head.device)
        # Where a position has one target twice, both places get the sum of their weights.
        is_same = targets[:, :, None] == targets[:, None]
        losses = []
        hidden_grads = []
        head_grad = torch.zeros_like(head) if needs_grad else None
        length = LOSS_CHUNK[hidden.device.type]
        for low in range(0, len(hidden), length):
            chunk = slice(low, low + length)
            x = hidden[chunk]
            target = targets[chunk]
            gap = top * torch.sigmoid(((x @ head.T).float() + shift) * (-1 / CAP_WIDTH))
            exp_logits = torch.exp(-gap)
            if counts is not None:
                exp_logits = exp_logits * counts
            sum_exp = exp_logits.sum(1, keepdim=True)
            # Gathered by comparison, which fuses with what made the logits.
            target_gaps = [
                torch.where(columns == one[:, None], gap, 0).sum(1) for one in target.unbind(1)
            ]
            target_gap = torch.stack(target_gaps, 1)
            losses.append(sum_exp.log() + target_gap)
            if needs_grad:
                weight = weights[chunk]
                target_weight = (is_same[chunk] * weight[:, None]).sum(-1)
                scale = weight.sum(1, keepdim=True) / sum_exp
                part = target_weight / scale.clamp_min(1e-30)
                target_grad = (torch.exp(-target_gap) - part) * cap_slope(target_gap, top)
                grad = (exp_logits * cap_slope(gap, top)).to(x.dtype)
                grad = grad.scatter(1, target, target_grad.to(x.dtype))
                hidden_grads.append(((grad @ head) * scale).to(x.dtype))
                head_grad = torch.addmm(head_grad, grad.T, (x * scale).to(x.dtype))
        losses = torch.cat(losses)
        if needs_grad:
            ctx.save_for_backward(torch.cat(hidden_grads), head_grad)
        first = losses[:, 0].clone()
        ctx.mark_non_differentiable(first)
        return (losses * weights).sum(), first

    @staticmethod
    def backward(ctx, upstream, _):
        grads = [grad * upstream for grad in ctx.saved_tensors]
        return *grads, None, None, None, None, None


def capped(products, cap):
    """Logits of products of hidden states and head: a sigmoid of them, whose cap is its (height,
    shift); of height 2 h and shift 0 it is h tanh(z / 15) but for a constant."""
    top, shift = cap
    return top * torch.sigmoid((products + shift) / CAP_WIDTH)


def cap_slope(gap, top):
    """The derivative of a capped logit by the product, from its gap to the top."""
    return gap * (top - gap) / (top * CAP_WIDTH)


def sampled_rows(targets, vocab, count):
    """Choose `count` rows of the vocabulary for a softmax: all targets (T,), fewer than `count`
    distinct ones, and others, spread over the ids in an order that the targets decide.

    Returns (rows (count,) int64, rising; positions (vocab,): where each row of the vocabulary
    stands among them, meaningless for those that do not; counts (count,) float32: how many rows
    each stands for, so that the sum of exponentials is right on average, to some per cent where
    few are chosen).
    """
    ids = torch.arange(vocab, device=targets.device)
    is_target = torch.zeros_like(ids).index_fill(0, targets, 1)
    turn = (ids + targets.sum()) * SPREAD % 2**31
    rows = (turn + is_target * 2**31).topk(count).indices.sort().values
    positions = torch.zeros_like(ids).scatter(0, rows, ids[:count])
    distinct_targets = is_target.sum()
    share = (vocab - distinct_targets) / (count - distinct_targets).clamp_min(1)
    counts = torch.where(is_target[rows] > 0, 1.0, share)
    return rows, positions, counts


def summed_loss(hidden, head, micro_batch, phase, loss_weights, prefixes, cap):
    """(training loss, summed over tokens and weighted; the next token's losses (T,)).

    loss_weights: float32, those of the next token, the second-next, ..., and of a prefix. prefixes:
    (V,) the id of each token's prefix, or its own if it has none.
    """
    length = len(hidden)
    following = micro_batch.targets
    prefix = prefixes[following]
    counts = None
    if phase.softmax_rows:
        present = torch.cat([following, prefix]) if phase.has_prefix else following
        rows, positions, counts = sampled_rows(present, len(head), phase.softmax_rows)
        head = head.index_select(0, rows)
        following = positions[following]
        prefix = positions[prefix]
    start = micro_batch.segment_start
    weights = []
    for ahead in range(phase.targets):
        # A position also scores the token `ahead` behind its target, within its segment.
        is_same_segment = start[ahead:] == start[: length - ahead]
        weights.append(F.pad(is_same_segment * loss_weights[ahead], (0, ahead)))
    targets = [following.roll(-ahead) for ahead in range(phase.targets)]
    if phase.has_prefix:
        targets.append(prefix)
        weights.append((prefix != following) * loss_weights[phase.targets])
    scored = torch.stack(targets, 1), torch.stack(weights, 1), counts
    return CappedCrossEntropy.apply(hidden, head, *scored, cap, torch.is_grad_enabled())


# 6. Model ========================================================================================


@dataclass(frozen=True)
class Rule:
    """Which group steps a parameter, and with which numbers; most of these are modded-nanogpt's.

    Decay is by the group's rate times the parameter's, and only where update and weight agree in
    sign.
    """

    group: str  # small | embeddings | matrices
    lr_mul: float | Tensor = 1.0  # times the group's rate; a tensor (k, 1, 1): of a bank's matrices
    decay: float = 0.0  # times matrix_decay for matrices, else the weight decay itself
    betas: tuple = (0.9, 0.99)  # Muon and SOAP-Muon read the second; the first follows a schedule
    # Adam's, 1e-8 on each of the 4,096 tokens between two of english's steps: a scalar whose
    # gradient is nothing but rounding must not make full steps.
    eps: float = 1e-8 * 4096


def ruled(values, *rule, **numbers):
    """A parameter with these values that carries its Rule, by which the optimizer steps it."""
    param = nn.Parameter(values)
    param.rule = Rule(*rule, **numbers)
    return param


def networks(up, shares):
    """Matrices up (k, SHARE_DIM, dim), which are given, and down of k small networks, which decide
    so many shares each, at first 0: see decided()."""
    down = up.new_zeros(len(up), shares, SHARE_DIM)
    return [ruled(matrices, "small", lr_mul=0.25) for matrices in (up, down)]


class GPT(nn.Module):
    """Decoder-only transformer over packed documents.

    Three banks hold its matrices, so that updates are batched: `query_key` (n, m * head_dim,
    model_dim) has q and k of each layer that attends, cut into groups of m heads, which are one
    matrix each to Muon: pairs, or all heads where their number is odd; `value_output` (2 * such
    layers, model_dim, model_dim) has v and o; `mlp` (2 * layers, mlp_dim, model_dim) has up and the
    transpose of down.
    """

    def __init__(self, config, back_end):
        super().__init__()
        self.config = config
        self.back_end = back_end
        dim = config.model_dim
        layers = config.num_layers
        vocab = config.vocab_size
        generator = torch.Generator().manual_seed(config.seed)

        def drawn(*shape, std):
            return (torch.randn(*shape, generator=generator) * std).to(config.torch_dtype)

        def gates(*shape, lr_mul=1.0):
            zeros = torch.zeros(*shape, GATE_DIM, dtype=config.torch_dtype)
            return ruled(zeros, "small", lr_mul=lr_mul)

        embed = drawn(vocab, dim, std=0.7)
        head = drawn(vocab, dim, std=0.005)
        # Where they part later, they are one table at first, at the head's scale.
        embed = head.clone() if untie_step(config) else embed
        # The gradient of a rare token is small, and must make full steps at any width.
        embeddings = functools.partial(ruled, group="embeddings", eps=1e-12)
        of_tokens = {"lr_mul": config.embed_lr, "decay": 0.75, "betas": (0.5, 0.95)}
        self.embed = embeddings(embed, **of_tokens)
        self.head = embeddings(head, **of_tokens)
        heads = dim // config.head_dim
        width = dim if heads % 2 else 2 * config.head_dim
        std = 0.6 / math.sqrt(dim)
        self.attending = [n for n in range(layers) if n not in config.mlp_only_layers]
        attending = len(self.attending)
        query_key = drawn(2 * attending * dim // width, width, dim, std=std)
        # By layer, q or k, head, side of a pair of channels, and whether the pair rotates or not.
        channels = query_key.view(attending, 2, heads, 2, 2, -1, dim)
        for layer in config.shifted_layers:
            # Half of a key is of the token before. It begins as that token's query, and the other
            # half as zero: from the first step a token attends to what followed its like.
            queries, keys = channels[self.attending.index(layer)]
            keys[:, :, 0] = 0
            keys[:, :, 1] = queries[:, :, 1]
        value_output = drawn(2 * attending, dim, dim, std=1 / math.sqrt(dim))
        mlps = drawn(2 * layers, config.mlp_dim, dim, std=std)
        value_output[::2] *= config.value_std
        value_output[1::2] *= config.output_std
        mlps[1::2] = 0
        matrices = functools.partial(ruled, group="matrices", decay=1.0, betas=(0.9, 0.9))
        self.query_key = matrices(query_key)
        self.value_output = matrices(value_output)
        self.mlp = matrices(mlps, lr_mul=torch.tensor([1.0, 2.0]).repeat(layers)[:, None, None])
        value_layers = len(config.value_embedding_layers)
        value_embed = drawn(value_layers * vocab, dim, std=0.01)
        self.value_embed = embeddings(value_embed, lr_mul=75.0, decay=1.875, betas=(0.75, 0.95))
        self.value_gate = gates(value_layers, heads)
        if config.exclusive_layers:
            self.exclusive_gate = gates(len(config.exclusive_layers), heads)
        self.smear_gate = gates(1, lr_mul=0.01)
        self.smear_scale = ruled(torch.zeros(1), "small", lr_mul=5.0)
        self.residual_scale = ruled(torch.ones(layers), "small", lr_mul=5.0, betas=(0.9, 0.95))
        # They multiply what attention and MLP add, and step by twice the matrices' rate: five times
        # Adam's, as others have it, was too much on english.
        lr_mul = 2 * config.matrix_lr / config.adam_lr
        self.output_scale = ruled(torch.ones(layers, 2), "small", lr_mul=lr_mul)
        self.embed_scale = ruled(torch.zeros(layers), "small", lr_mul=config.embed_scale_lr)
        if config.mlp_reach:
            kernels = torch.zeros(layers, config.mlp_reach, dim, dtype=config.torch_dtype)
            self.mlp_kernel = ruled(kernels, "small", lr_mul=3.0)
        if config.ngram_orders:
            self.ngram_gate = gates(layers + 1)  # before each layer and before the head
        if config.copy_orders:
            # What a guess weighs, by its order.
            guesses = len(config.copy_orders)
            self.guess_input = ruled(torch.full((guesses,), 0.1), "small")
            self.guess_output = ruled(torch.zeros(guesses), "small", lr_mul=20.0)
            self.guess_gate = gates(guesses, lr_mul=0.1)
        if config.skips:
            self.skip_scale = ruled(torch.full((len(config.skips),), 0.1), "small", lr_mul=5.0)
        if config.dense_layers:
            shares = 2 * (len(config.dense_layers) + 2)  # of states, for two sums: see mixtures()
            bias = torch.zeros(2, shares)
            bias[1, len(config.dense_layers)] = -0.5 / SHARE_SCALE  # the last of them, at the end
            up = drawn(2, SHARE_DIM, dim, std=(3 * dim) ** -0.5)
            self.dense_up, self.dense_down = networks(up, shares)
            self.dense_bias = ruled(bias, "small", lr_mul=0.25)
        if config.deciding_layers:
            up = drawn(len(config.deciding_layers), SHARE_DIM, dim, std=(3 * dim) ** -0.5)
            self.gate_up, self.gate_down = networks(up, layers * heads)

    def embedding(self, micro_batch, is_first, is_tied):
        """Each token's embedding with a gated share of the one before it in its segment."""
        x = F.embedding(micro_batch.inputs, self.head if is_tied else self.embed)
        share = torch.sigmoid(F.linear(x[:, :GATE_DIM], self.smear_gate))
        share = share.masked_fill(is_first[:, None], 0)
        before = F.pad(x, (0, 0, 1, -1))
        return norm(x + self.smear_scale[0] * share * before)

    def guessed(self, micro_batch, table, weights, share=0.0):
        """The sum of the rows of guesses in a table (vocab, model_dim) of tokens: (T, model_dim).
        Each has the weight of its order, of `weights`, and a share (T, G) of its token's own."""
        is_there = micro_batch.guesses < NO_TOKEN
        # In the place of none stands, without weight, the token at hand: no row is read by all.
        token = micro_batch.guesses.where(is_there, micro_batch.inputs[:, None])
        shares = (weights + share) * is_there
        # No bag of rows: on CUDA that has no gradient by its weights in bfloat16, and is slower.
        rows = F.embedding(token, norm(table))
        return (shares[..., None] * rows).sum(1).to(table.dtype)

    def attention_layer(self, x, layer, weights, values, gates, is_first, window, rotary, masks):
        """What attention adds to the residual stream, as it reads x (T, model_dim).

        weights: those of q and k (2 * model_dim, model_dim), and of v and o (2, ...). values: what
        is added to the values: the layer's value embeddings and a mixture of states, or None.
        gates: (T, heads); each token scales each head's output by 1 + its own. None: by 1.
        """
        config = self.config
        cos, sin, scale = rotary
        query_key, (value, output) = weights
        value_embedding, mixture = values
        x_normed = norm(x)
        heads = config.model_dim // config.head_dim
        qkv = F.linear(x_normed, torch.cat([query_key, value])).view(len(x), -1, config.head_dim)
        qk, v = qkv.split([2 * heads, heads], dim=1)
        if value_embedding is not None:
            number = config.value_embedding_layers.index(layer)
            half = GATE_DIM // 2
            read = torch.cat([x_normed[:, :half], value_embedding[:, :half]], dim=1)
            share = gate(read, self.value_gate[number])[..., None]
            v = v + share * value_embedding.view_as(v)
        if mixture is not None:
            v = v + mixture.view_as(v)
        qk = norm(qk)  # of all heads, queries before keys
        if layer in config.shifted_layers:
            q, k = qk.chunk(2, dim=1)
            qk = torch.cat([q, shifted(k, is_first)], dim=1)
        seen = v
        if window.positions == 2:
            qk = in_pairs(qk)
            seen = in_pairs(v)
        q, k = rotate(qk, cos[: len(qk)], sin[: len(qk)]).chunk(2, dim=1)
        y = self.back_end.attend(q, k, seen, masks, window, scale)
        if window.positions == 2:
            y = out_of_pairs(y)
        if layer in config.exclusive_layers:
            weight = self.exclusive_gate[config.exclusive_layers.index(layer)]
            y = without_own_value(y, v, (gate(x, weight) - 1)[..., None])
        if gates is not None:
            y = y * (1 + gates)[..., None]
        return F.linear(y.flatten(1), output)

    def mixtures(self, x, place, states):
        """Sums of n states (T, model_dim), as many as there are n shares, which each token's x
        decides: the dense connections of MUDD (Xiao et al. 2025), before the last layer (place 0)
        and behind it."""
        shares = decided(x, self.dense_up[place], self.dense_down[place])
        shares = shares + SHARE_SCALE * self.dense_bias[place].to(x.dtype)
        sums = []
        for part in shares.split(len(states), dim=1):
            if part.size(1) == len(states):
                terms = zip(part.split(1, dim=1), states, strict=True)
                sums.append(sum(share * state for share, state in terms))
        return sums

    def hidden(self, micro_batch, ngram, phase, rotary, masks):
        """Final hidden states (T, model_dim), normalised.

        ngram: (T, model_dim), from NgramTable.summed, or None. rotary: what rotary_tables returns.
        masks: what the back end prepares.
        """
        config = self.config
        layers = config.num_layers
        start = micro_batch.segment_start
        position = torch.arange(len(start), device=start.device) - start
        is_first = position == 0
        # Unbound at once, since the gradient of an index is as large as what was indexed.
        attending = len(self.attending)
        query_keys = self.query_key.view(attending, -1, config.model_dim).unbind()
        value_outputs = self.value_output.unflatten(0, (-1, 2)).unbind()
        attention_weights = dict(
            zip(self.attending, zip(query_keys, value_outputs, strict=True), strict=True)
        )
        mlps = self.mlp.unflatten(0, (-1, 2)).unbind()
        shape = len(config.value_embedding_layers), config.vocab_size, config.model_dim
        tables = self.value_embed.view(shape).unbind()
        value_embeddings = {
            layer: F.embedding(micro_batch.inputs, table)
            for layer, table in zip(config.value_embedding_layers, tables, strict=True)
        }
        outputs = []
        x = self.embedding(micro_batch, is_first, phase.is_tied)
        embedded = x
        if config.copy_orders:
            table = self.head if phase.is_tied else self.embed
            x = x + self.guessed(micro_batch, table, self.guess_input)
        gates = [None] * layers
        for layer in range(layers):
            if layer in config.deciding_layers:
                place = config.deciding_layers.index(layer)
                # Of all layers, but only those up to the next that decides will read them.
                gates = decided(x, self.gate_up[place], self.gate_down[place])
                gates = gates.unflatten(1, (layers, -1)).unbind(1)
            for number, (source, target) in enumerate(config.skips):
                if target == layer:
                    x = x + self.skip_scale[number] * outputs[source]
            x = self.residual_scale[layer] * x + self.embed_scale[layer] * embedded
            if ngram is not None:
                x = x + gate(x, self.ngram_gate[layer : layer + 1]) * ngram
            if layer == 0:
                states = [x]
            mixture = None
            if config.dense_layers and layer == layers - 1:
                states += [outputs[source] for source in config.dense_layers] + [x]
                mixture, addend = self.mixtures(x, 0, states)
                x = x + addend
            if layer in attention_weights:
                read = x
                if config.shared_input and layer > config.shared_input[0]:
                    read = outputs[config.shared_input[0]]
                values = value_embeddings.get(layer), mixture
                seen = is_first, phase.windows[layer], rotary, masks
                # To scale its last matrix scales what a sublayer adds, with less to read and keep.
                query_key, (value, output) = attention_weights[layer]
                weights = query_key, (value, self.output_scale[layer, 0] * output)
                x = x + self.attention_layer(read, layer, weights, values, gates[layer], *seen)
            up, down = mlps[layer]
            x_normed = norm(x)
            if config.mlp_reach:
                x_normed = convolved(x_normed, self.mlp_kernel[layer], position)
            x = x + mlp(x_normed, up, self.output_scale[layer, 1] * down)
            outputs.append(x)
        states += list(value_embeddings.values())[:1]
        return norm(self.ending(x, micro_batch, ngram, states))

    def ending(self, x, micro_batch, ngram, states):
        """What leaves the last layer, with all that is added behind it, (T, model_dim)."""
        if ngram is not None:
            x = x + gate(x, self.ngram_gate[-1:]) * ngram
        if self.config.dense_layers:
            x = x + self.mixtures(x, 1, states)[0]
        if self.config.copy_orders:
            share = F.linear(norm(x)[:, :GATE_DIM], self.guess_gate)
            x = x + self.guessed(micro_batch, self.head, self.guess_output, share)
        return x

    def logits(self, hidden):
        """Soft-capped logits (n, vocab_size), float32, of hidden states (n, model_dim)."""
        return capped(F.linear(hidden, self.head).float(), self.config.logit_cap)

    def forward(self, micro_batch, ngram, phase, loss_weights, prefixes, rotary, masks):
        """(training loss, summed over tokens; losses (T,) of the next token; hidden states)."""
        hidden = self.hidden(micro_batch, ngram, phase, rotary, masks)
        numbers = loss_weights, prefixes, self.config.logit_cap
        # A softmax over a sample is of one micro-batch, however many the pass has.
        length = self.config.micro_batch_tokens if phase.softmax_rows else len(hidden)
        read = hidden, *micro_batch[:3]
        parts = zip(*(tensor.split(length) for tensor in read), strict=True)
        found = []
        for states, *tokens in parts:
            part = MicroBatch(*tokens, segment_bounds=None, guesses=None)
            found.append(summed_loss(states, self.head, part, phase, *numbers))
        losses = [losses for _, losses in found]
        return sum(loss for loss, _ in found), torch.cat(losses), hidden.detach()


# 7. Update rules =================================================================================


# A rule changes weight and state {key: tensor} in place. UPDATE_RULES, below, has a row for each.


class Hyper(NamedTuple):
    """The numbers of one update. Where updates are compiled, all but dtype are tensors."""

    count: Any  # of updates so far, this one included
    lr: Any
    decay: Any  # of an agreeing weight, over lr
    momentum: Any
    betas: Any
    eps: Any  # Adam's
    dtype: torch.dtype  # of products


def adam_update(weight, grad, state, hyper):
    """Adam (Kingma & Ba 2015) with cautious weight decay, in place; float32, of one shape."""
    beta1, beta2 = hyper.betas
    state["first"].lerp_(grad, 1 - beta1)
    state["second"].lerp_(grad.square(), 1 - beta2)
    first = state["first"] / (1 - beta1**hyper.count)
    second = state["second"] / (1 - beta2**hyper.count)
    cautious_step(weight, first / (second.sqrt() + hyper.eps), hyper.lr, hyper.decay)


# Polar Express (Amsel et al. 2025): the composed odd polynomials that bring singular values in
# [1e-3, 1] closest to 1 in five steps; coefficients by the paper's method, with a cushion of 0.02
# and a safety factor of 2 % (theirs is 1 %).
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar_express(matrices, dtype):
    """Approximate polar factor of a batch (k, m, n), float32: singular values near 1; 0 stays 0.

    Products are in `dtype`.
    """
    if matrices.size(-2) > matrices.size(-1):
        return polar_express(matrices.mT, dtype).mT
    x = matrices.to(dtype)
    size = x.float().norm(dim=(-2, -1), keepdim=True)
    # If the norm overflows, NaN ends the run: a step of zero would go unnoticed.
    size = size.where(size.isfinite(), torch.nan)
    x = x / (size * 1.02 + 1e-12).to(dtype)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.float()


def cautious_step(weight, update, lr, decay):
    """Step against `update` in place, with weight decay only where both agree in sign."""
    is_agreed = update * weight > 0
    weight.sub_(lr * (update + decay * weight * is_agreed))


def orthogonal_step(weight, direction, state, hyper):
    """Muon's step along `direction` (k, m, n).

    Orthogonalisation; then NorMuon's scaling (Li et al. 2025), which divides each row, or column of
    a wide matrix, by its running RMS, at unchanged Frobenius norm; then cautious decay. The rate
    grows with sqrt(m / n) of tall matrices, so that the RMS of a step is lr / sqrt(n).
    """
    update = polar_express(direction, hyper.dtype)
    rows, columns = update.shape[-2:]
    norm_before = update.norm(dim=(-2, -1), keepdim=True)
    mean_square = update.square().mean(-1 if rows >= columns else -2, keepdim=True)
    state["row_square"].lerp_(mean_square, 1 - hyper.betas[1])
    update = update * state["row_square"].clamp_min(1e-10).rsqrt()
    norm_after = update.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10)
    update = update * (norm_before / norm_after)
    lr = hyper.lr * max(1.0, rows / columns) ** 0.5
    cautious_step(weight, update, lr, hyper.decay)


def muon_update(weight, grad, state, hyper):
    """Muon (Jordan et al. 2024): Nesterov momentum, then an orthogonal step."""
    state["momentum"].lerp_(grad, 1 - hyper.momentum)
    direction = grad.lerp(state["momentum"], hyper.momentum)
    orthogonal_step(weight, direction, state, hyper)


# SOAP (Vyas et al. 2024) and its relatives keep, for the rows and for the columns of a matrix G, a
# Kronecker factor (the running mean of G Gᵀ, of Gᵀ G) and a basis that follows the factor's
# eigenvectors. Momentum stays in the parameters' own basis; only the second moment lives in the
# eigenbasis, and is permuted with it.
FACTOR_BETA = 0.9  # of the factors, and of SOAP-Muon's second moment
KL_FLOOR = 1e-3  # eigenvalues below this share of their mean are taken to be it
EIGH_STEPS = 3  # refreshes by eigh: zero-initialised projections give no gradient before step 2
HOUSEHOLDER_STEPS = 25  # from then on factors are conditioned well enough for Cholesky
DAMPING = 3e-6  # added to a factor before Cholesky, as a share of its largest eigenvalue


class Side(NamedTuple):
    """The rows (axis -2) or the columns (axis -1) of a bank of k matrices."""

    axis: int
    factor: Tensor  # (k, s, s), symmetric, zero until the first gradient
    basis: Tensor  # (k, s, s), orthonormal columns, the largest eigenvalue's first


def eigen_sides(state):
    """The sides of a bank that have an eigenbasis: none, one or both."""
    return [
        Side(axis, state[f"{key}_factor"], state[f"{key}_basis"])
        for key, axis in (("row", -2), ("column", -1))
        if f"{key}_factor" in state
    ]


def turned(x, sides, back=False):
    """Matrices (k, m, n) turned from the parameters' basis to the eigenbasis, or back."""
    for axis, _, basis in sides:
        turn = basis if back else basis.mT
        x = turn @ x if axis == -2 else x @ turn.mT
    return x


def has_basis(state):
    """(k, 1, 1): 1.0 once a matrix has had a gradient that its bases could follow, else 0.0."""
    known = torch.ones_like(state["moment"][:, :1, :1])
    for side in eigen_sides(state):
        trace = side.factor.diagonal(dim1=-2, dim2=-1).sum(-1)
        known = known * (trace > 0)[:, None, None]
    return known


def soap_update(weight, grad, state, hyper):
    """SOAP: Adam in the eigenbasis, then cautious decay.

    It is scaled by 1 / sqrt(n), so that a rate means what it does for Muon. A matrix without bases
    only decays, and its first gradient goes into the factors alone, as in the authors' code: in the
    momentum it would meet the second moment of one other gradient, at up to thousands of times the
    step that Adam can make.
    """
    sides = eigen_sides(state)
    known = has_basis(state)
    momentum = state["momentum"]
    moment = state["moment"]
    count = state["count"]
    beta1, beta2 = hyper.betas
    count.add_(known)
    momentum.add_((grad - momentum) * ((1 - beta1) * known))
    moment.add_((turned(grad, sides).square() - moment) * ((1 - beta2) * known))
    first = turned(momentum, sides) / (1 - beta1**count).clamp_min(1e-8)
    second = moment / (1 - beta2**count).clamp_min(1e-8)
    update = turned(first * second.clamp_min(1e-16).rsqrt() * known, sides, back=True)
    cautious_step(weight, update / update.size(-1) ** 0.5, hyper.lr, hyper.decay)


def soap_muon_update(weight, grad, state, hyper):
    """SOAP-Muon: Muon of a momentum that is divided, in the eigenbasis, by the root of its own
    second moment."""
    sides = eigen_sides(state)
    known = has_basis(state)
    moment = state["moment"]
    state["momentum"].lerp_(grad, 1 - hyper.momentum)
    direction = grad.lerp(state["momentum"], hyper.momentum)
    rotated = turned(direction, sides)
    moment.add_((rotated.square() - moment) * ((1 - FACTOR_BETA) * known))
    whitened = turned(rotated * moment.clamp_min(1e-16).rsqrt(), sides, back=True)
    orthogonal_step(weight, torch.where(known > 0, whitened, direction), state, hyper)


class UpdateRule(NamedTuple):
    """An update rule, and the state that it needs: see ParameterGroup.new_state."""

    update: Callable
    keeps: tuple
    has_bases: bool = False  # eigenbases, which follow the gradients after each update
    is_kl: bool = False  # whether their factors are KL-Shampoo's


UPDATE_RULES = {
    "adam": UpdateRule(adam_update, ("first", "second")),
    "muon": UpdateRule(muon_update, ("momentum", "row_square")),
    "soap": UpdateRule(soap_update, ("momentum", "moment", "count"), has_bases=True),
    "soap_muon": UpdateRule(soap_muon_update, ("momentum", "row_square", "moment"), has_bases=True),
    # Weights step before the bases follow, as in github.com/yorkerlin/KL-Methods, optim/kl_opt.py.
    "kl_soap": UpdateRule(soap_update, ("momentum", "moment", "count"), has_bases=True, is_kl=True),
}


def update_factors(grad, sides, is_kl):
    """Take gradients (k, m, n) into the factors of their sides, in place.

    is_kl: KL-Shampoo's estimate (Lin et al. 2025): each side's gradient is first whitened by the
    other side's factor. Its eigenvalues are taken over their mean: only the product of both
    factors' scales means something, and the split between the two would drift.
    """
    products = []
    for side, other in zip(sides, reversed(sides), strict=True):
        half = grad if side.axis == -2 else grad.mT
        if is_kl and other is not side:
            spectrum = (other.basis * (other.factor @ other.basis)).sum(-2)
            mean = spectrum.mean(-1, keepdim=True)
            spectrum = torch.where(mean > 0, spectrum / mean, 1.0).clamp_min(KL_FLOOR)
            half = half @ other.basis * spectrum.rsqrt()[:, None]
        products.append(half @ half.mT / half.size(-1))
    for side, product in zip(sides, products, strict=True):
        side.factor.lerp_(product, 1 - FACTOR_BETA)


def cholesky_qr_step(product, bases, largest):
    """Orthonormalise product = factor @ bases, all (k, s, s): batched, and without a host sync.

    With B = basesᵀ factor bases = RᵀR and R Rᵀ = SᵀS, the result is bases Rᵀ S⁻¹: an LR step
    (Rutishauser) on the scaled factor, which squares no condition number, and two Newton-Schulz
    steps behind it. largest (k,): the factors' largest eigenvalues. Returns (the new bases,
    is_good (k,): whether they are orthonormal).
    """
    scaled = product / largest[:, None, None].clamp_min(1e-38) + DAMPING * bases
    upper, failed = torch.linalg.cholesky_ex(bases.mT @ scaled, upper=True)
    second_upper, failed_again = torch.linalg.cholesky_ex(upper @ upper.mT, upper=True)
    solved = torch.linalg.solve_triangular(second_upper, upper.mT, upper=True, left=False)
    new = bases @ solved
    for _ in range(2):
        new = 1.5 * new - 0.5 * new @ (new.mT @ new)
    error = new.mT @ new - torch.eye(new.size(-1), device=new.device)
    is_orthonormal = error.abs().amax((-2, -1)) < 1e-4
    return new, (failed + failed_again == 0) & is_orthonormal


def eigenbasis_step(factors, bases, method):
    """Bring orthonormal bases (k, s, s) closer to the eigenvectors of symmetric factors (k, s, s).

    Both are float32. Orthonormalises factor @ basis, columns by falling Rayleigh quotient. Methods:
      eigh         the eigenvectors themselves; on CUDA the only one that waits for the device
      householder  LAPACK's QR, matrix by matrix, which is fastest on a CPU
      cholesky     all matrices in one batch: cholesky_qr_step
    Returns (bases, order (k, s) that sorted the old columns, is_rejected (k,)). Where a factor is
    not finite or too close to singular, that matrix keeps its old basis, sorted. A zero factor also
    keeps it, but does not count as rejected.
    """
    product = factors @ bases
    spectrum = (bases * product).sum(-2)
    spectrum, order = spectrum.sort(descending=True, stable=True)
    columns = order[:, None].expand_as(bases)
    old = bases.gather(-1, columns)
    product = product.gather(-1, columns)
    largest = spectrum[:, 0]
    is_good = spectrum.isfinite().all(-1) & (largest > 0)
    if method == "eigh":
        identity = torch.eye(bases.size(-1), device=bases.device)
        safe = torch.where(is_good[:, None, None], factors, identity)  # eigh raises on NaN
        new = torch.linalg.eigh(safe).eigenvectors.flip(-1)
    elif method == "householder":
        new = torch.linalg.householder_product(*torch.geqrf(product))
    else:
        new, is_orthonormal = cholesky_qr_step(product, old, largest)
        is_good = is_good & is_orthonormal
    is_rejected = ~is_good & (spectrum != 0).any(-1)
    return torch.where(is_good[:, None, None], new, old), order, is_rejected


def refresh_eigenbases(banks, method):
    """One eigenbasis_step, a batch a size, for all sides of banks' states, in place."""
    by_size = {}
    for state in banks:
        for side in eigen_sides(state):
            if len(side.basis):
                by_size.setdefault(side.basis.size(-1), []).append((state, side))
    for members in by_size.values():
        factors = torch.cat([side.factor for _, side in members])
        bases = torch.cat([side.basis for _, side in members])
        counts = [len(side.basis) for _, side in members]
        new, order, _ = eigenbasis_step(factors, bases, method)
        stepped = new.split(counts), order.split(counts)
        for (state, side), basis, order in zip(members, *stepped, strict=True):
            side.basis.copy_(basis)
            index = order[:, :, None] if side.axis == -2 else order[:, None]
            moment = state["moment"]
            moment.copy_(moment.gather(side.axis, index.expand_as(moment)))


# 8. Parameter groups =============================================================================


def take_step(update, part, grad, state, hyper):
    """Update this rank's part of a parameter in place; a narrow one has a float32 master."""
    weight = state.get("master", part)
    update(weight, grad, state, hyper)
    if weight is not part:
        part.copy_(weight)


def compiled_updates():
    """take_step as a handful of kernels. All numbers of an update are tensors on the CPU, so that
    a schedule of any of them recompiles nothing."""
    step = torch.compile(take_step, dynamic=False)

    def call(update, part, grad, state, hyper):
        *numbers, dtype = hyper
        hyper = Hyper(*pytree.tree_map(torch.as_tensor, numbers), dtype)
        step(update, part, grad, state, hyper)

    return call


def state_shape(key, shape):
    """The shape of what a rule keeps under a key for a part of a parameter: mostly its own."""
    if key == "count":
        return shape[0], 1, 1
    if key == "row_square":  # of a wide matrix: of its columns
        count, rows, columns = shape
        return (count, rows, 1) if rows >= columns else (count, 1, columns)
    return shape


class ParameterGroup(Group):
    """Parameters of the model under one update rule, with the sums of their gradients.

    Nothing divides the sums by the tokens of a step: where a batch grows, gradients grow, too, and
    Adam's steps are longer until its second moment has followed.

    Ranks share each parameter out along its first axis, whole matrices of a bank: every rank holds
    all of it, and updates the range that it owns. The small ones are summed in one bucket instead,
    and updated by all.
    """

    def __init__(self, name, config, params, runtime):
        self.name = name
        self.config = config
        self.runtime = runtime
        self.params = params  # {name: parameter}
        self.is_shared_out = name != "small"
        self.lr = config.adam_lr
        self.decay = 1.0
        self.every = config.adam_every
        rule = "adam"
        if name == "matrices":
            rule = config.matrix_update
            names = ", ".join(UPDATE_RULES)
            config.require("matrix_update", rule in UPDATE_RULES, f"must be one of {names}")
            self.lr = config.matrix_lr
            self.decay = config.matrix_decay
            self.every = 1
        self.rule = UPDATE_RULES[rule]
        self.grads = {}  # of summed losses, float32, padded where collectives ask for equal parts
        self.state = {}  # what the rule keeps of this rank's part: {name: {key: tensor}}
        self.lr_muls = {}
        for key, param in params.items():
            count = len(param)
            if self.is_shared_out:
                count = math.ceil(count / runtime.world_size) * runtime.world_size
            self.grads[key] = torch.zeros(count, *param.shape[1:], device=param.device)
            self.state[key] = self.new_state(self.own(key, param.data))
            self.lr_muls[key] = param.rule.lr_mul
            if isinstance(param.rule.lr_mul, Tensor):
                self.lr_muls[key] = self.own(key, param.rule.lr_mul.to(param.device))
        self.take_step = take_step
        if runtime.device.type == "cuda" and config.compile:
            self.take_step = compiled_updates()

    def owned_range(self, name):
        """The range of a parameter's first axis that this rank updates."""
        count = len(self.params[name])
        return self.runtime.owned_range(count) if self.is_shared_out else (0, count)

    def own(self, name, tensor):
        """This rank's part of a tensor that has the parameter's first axis."""
        low, high = self.owned_range(name)
        return tensor[low:high]

    def new_state(self, part):
        """What the rule keeps of this rank's part of a parameter, at its start."""
        device = part.device
        state = {
            key: torch.zeros(state_shape(key, part.shape), device=device) for key in self.rule.keeps
        }
        if part.dtype != torch.float32:
            state["master"] = part.float()
        if self.rule.has_bases:
            count = len(part)
            for side, size in zip(("row", "column"), part.shape[1:], strict=True):
                if size <= self.config.one_sided_above:
                    identity = torch.eye(size, device=device)
                    state[f"{side}_factor"] = torch.zeros(count, size, size, device=device)
                    state[f"{side}_basis"] = identity.repeat(count, 1, 1)
        return state

    def accumulate(self, grads):
        """Add the gradients of a summed loss, {name: tensor, or None for one not in use}."""
        for name, total in self.grads.items():
            if grads.get(name) is not None:
                total[: len(grads[name])].add_(grads[name])

    def reduce(self, step):
        # A tied embedding takes no part in a step: it has no gradient.
        is_tied = step < untie_step(self.config)
        names = [name for name in self.params if name != "embed" or not is_tied]
        if self.is_shared_out or not names:
            # Most of a step's bytes are these gradients: they travel as narrow as the weights.
            dtype = torch.float32 if self.runtime.world_size == 1 else self.config.torch_dtype
            sums = {name: self.grads[name].to(dtype) for name in names}
            return [(name, *self.runtime.reduce_scatter(grad, name)) for name, grad in sums.items()]
        bucket = torch.cat([self.grads[name].flatten() for name in names])
        work = self.runtime.all_reduce(bucket, self.name)
        parts = bucket.split([self.grads[name].numel() for name in names])
        return [
            (name, part.view_as(self.grads[name]), work)
            for name, part in zip(names, parts, strict=True)
        ]

    def update(self, step, lr_mul, pending):
        travelling = []
        sums = {}
        rate = self.lr * lr_mul
        for name, grad, work in pending:
            wait(work)
            param = self.params[name]
            part = self.own(name, param.data)
            sums[name] = grad[: len(part)].float()
            hyper = Hyper(
                count=math.ceil((step + 1) / self.every),
                lr=rate * self.lr_muls[name],
                decay=rate * self.decay * param.rule.decay,
                momentum=momentum_at(self.config, step),
                betas=param.rule.betas,
                eps=param.rule.eps,
                dtype=self.config.torch_dtype,
            )
            self.take_step(self.rule.update, part, sums[name], self.state[name], hyper)
            if self.is_shared_out:
                travelling.append((name, *self.runtime.gather_ranges(part, len(param), name)))
        if self.rule.has_bases:
            self.follow_gradients(step, sums)  # while the new weights travel
        for name in sums:
            self.grads[name].zero_()
        return travelling

    def follow_gradients(self, step, grads):
        """Take the gradients into the factors, and refresh the bases of the matrices whose turn it
        is; with the first gradients it is everybody's."""
        every = self.config.basis_every if step >= EIGH_STEPS else 1
        banks = []
        for name, grad in grads.items():
            state = self.state[name]
            update_factors(grad, eigen_sides(state), self.rule.is_kl)
            turn = (step - self.owned_range(name)[0]) % every
            banks.append({key: value[turn::every] for key, value in state.items()})
        method = "cholesky"  # in batches on a GPU, but exactly at first, and then safely
        if self.runtime.device.type == "cpu" or step < HOUSEHOLDER_STEPS:
            method = "householder"
        refresh_eigenbases(banks, "eigh" if step < EIGH_STEPS else method)

    def receive(self, pending):
        for name, whole, work in pending:
            if work is not None:
                work.wait()
                self.params[name].data.copy_(whole)

    def size(self):
        return sum(param.numel() for param in self.params.values())

    def tensors(self):
        found = {}
        for name, param in self.params.items():
            parts = {"param": param.data, "grad": self.grads[name], **self.state[name]}
            found.update({f"{name}.{key}": value for key, value in parts.items()})
        return found

    def full_state(self):
        """{name: {key: tensor of the whole parameter}} on rank 0, whatever the world size; all
        ranks must call it."""
        return {
            name: {key: self.whole(name, part) for key, part in state.items()}
            for name, state in self.state.items()
        }

    def whole(self, name, part):
        """What the parts of all ranks make up, on rank 0."""
        if not self.is_shared_out:
            return part
        return self.runtime.gather_on_main(part, len(self.params[name]))

    def load(self, state):
        for name, own in self.state.items():
            for key, value in own.items():
                value.copy_(self.own(name, state[name][key]))


class Optimizer:
    """All groups, in the one order in which their communication is started and waited for.

    The small ones come first, so that no small transfer queues behind a large one, and updates hide
    the transfers of the groups behind them.
    """

    def __init__(self, config, model, table, runtime):
        members = {"small": {}, "embeddings": {}, "matrices": {}}
        for name, param in model.named_parameters():
            rule = getattr(param, "rule", None)
            is_ruled = rule is not None and rule.group in members
            groups = ", ".join(members)
            require(is_ruled, f"no rule for {name}: make it with ruled(), in one group of {groups}")
            members[rule.group][name] = param
        self.parameter_groups = [
            ParameterGroup(name, config, params, runtime) for name, params in members.items()
        ]
        small, self.embeddings, self.matrices = self.parameter_groups
        self.groups = [small, self.embeddings, table, self.matrices]

    def step(self, step, lr_mul):
        """Update all groups that are due at a step."""
        due = [group for group in self.groups if group.is_due(step)]
        reduced = [group.reduce(step) for group in due]
        updated = []
        for group, pending in zip(due, reduced, strict=True):
            updated.append(group.update(step, lr_mul, pending))
        for group, pending in zip(due, updated, strict=True):
            group.receive(pending)

    def untie(self):
        """Give the embedding the weights and optimizer state that the tied head has learned."""
        params = self.embeddings.params
        state = self.embeddings.state
        params["embed"].data.copy_(params["head"].data)
        for key, value in state["embed"].items():
            value.copy_(state["head"][key])


# 9. Trainer ======================================================================================


def compiler_remedy():
    """What helps where compiled code does not run."""
    # This import takes seconds, which a run that does not compile need not wait.
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    needs = "g++, python3-dev and an undamaged cache in a path without spaces or quotes"
    return f"go without by --compile false; else it needs {needs}: delete {cache_dir()}"


def prepare_compiler():
    """Let compiled code run where paths have spaces or quotes: torch 2.13 splits its call of the
    C++ compiler there. Libraries' folders are quoted; the cache goes to torch's own place."""
    from torch._inductor import cpp_builder
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    def quoted_folders(options):
        return [shlex.quote(folder) for folder in options._libraries_dirs]

    cpp_builder.BuildOptionsBase.get_libraries_dirs = quoted_folders
    if cache_dir() != shlex.quote(cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = default_cache_dir()


def probe_compiler(device):
    """Load what the compiler's cache holds, then compile a tiny function and call it. A library
    that a full disk has cut short ends the process, so that this takes one of its own; it prints
    what comes next."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    prepare_compiler()
    folder = cache_dir()
    for path in Path(folder).rglob("*.so"):
        print(f"loading {path}", flush=True)
        with contextlib.suppress(OSError):  # it says so where it is needed
            ctypes.CDLL(str(path))
    print(f"compiling in {folder}", flush=True)
    torch.compile(torch.neg)(torch.ones(8, device=device)).tolist()


def compiler_failure(device):
    """Why compiled code does not run on a device, or an empty text."""
    folder = str(Path(__file__).resolve().parent)
    code = f"import sys; sys.path.insert(0, {folder!r}); import train_gpt"
    command = [sys.executable, "-c", f"{code}; train_gpt.probe_compiler({device.type!r})"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    stop_if_interrupted()
    if done.returncode == 0:
        return ""
    reasons = re.findall(".*error: .*", done.stderr, re.IGNORECASE)
    reason = one_line(reasons[-1]) if reasons else f"exit status {done.returncode}"
    doing = done.stdout.strip().rpartition("\n")[2]
    return f"{reason} ({one_line(doing)})"


def choose_compile(config, runtime):
    """`inductor`, or `off`: without a compiler that works a CPU run is slow, and a GPU run crawls.
    A node's first rank finds out for all of them. Raises ConfigError on a GPU."""
    if not config.compile:
        return "off"
    prepare_compiler()
    key = f"compiler of the node of rank {runtime.rank - runtime.local_rank}"
    failure = ""
    if runtime.local_rank == 0:
        failure = runtime.agree(key, compiler_failure(runtime.device))
    runtime.barrier()
    failure = runtime.agree(key, failure)
    if not failure:
        return "inductor"
    words = f"compiled code does not run here: {failure}; {compiler_remedy()}"
    require(runtime.device.type == "cpu", f"compile=True: {words}")
    if runtime.is_main:
        print(f"note: goes on uncompiled: {words}", file=sys.stderr, flush=True)
    return "off (compiled code does not run)"


class Trainer:
    """Model, table, optimizer and compiled forward pass of one run: what training, evaluation and
    sampling share."""

    def __init__(self, config, runtime):
        self.config = config
        self.runtime = runtime
        torch.set_float32_matmul_precision("highest")
        back_end, self.attention_name = choose_attention(config, runtime.device)
        self.model = GPT(config, back_end).to(runtime.device)
        self.table = NgramTable(config, runtime)
        self.optimizer = Optimizer(config, self.model, self.table, runtime)
        self.compile_name = choose_compile(config, runtime)
        self.forward = self.model
        if self.compile_name == "inductor":
            # A phase is two graphs, and torch's default limit is 8; never eager in silence.
            torch._dynamo.config.recompile_limit = 64
            torch._dynamo.config.fail_on_recompile_limit_hit = True
            self.forward = torch.compile(self.model, dynamic=False)
        self.rotary_tables = functools.cache(rotary_tables)
        self.prefixes = to_device(prefix_tokens(config), runtime.device)

    def forward_pass(self, step, phase, loss_weights, micro_batch, ngram):
        """What GPT.forward returns for a MicroBatch and its summed rows, in a phase of the run.

        loss_weights: of as many targets a position as the phase has, and of a prefix.
        """
        positions = max(window.positions for window in phase.windows) * len(micro_batch.inputs)
        config = self.config
        device = self.runtime.device
        windows = long_windows_until(config, step)
        shape = positions, config.head_dim, config.attention_scale
        rotary = self.rotary_tables(*shape, windows, device, config.torch_dtype)
        masks = self.model.back_end.prepare(micro_batch, phase, config.torch_dtype)
        weights = to_device(np.array(loss_weights, np.float32), device)
        return self.forward(micro_batch, ngram, phase, weights, self.prefixes, rotary, masks)

    def accumulate(self, step, batch):
        """Add up the gradients of this rank's passes. Returns their summed losses, 0-dim."""
        if step and step == untie_step(self.config):
            self.optimizer.untie()
        values = self.table.values_of(batch.rows)
        phase = training_phase(self.config, step)
        loss_weights = loss_weights_at(self.config, step)
        loss_sum = torch.zeros((), device=self.runtime.device)
        length = batch.stack.inputs.size(1)
        read = zip(batch.rows.slots.split(length), batch.rows.signs.split(length), strict=True)
        for micro_batch, (slots, signs) in zip(batch.passes(), read, strict=False):
            ngram = self.table.summed(slots, signs, values)
            loss, losses, _ = self.forward_pass(step, phase, loss_weights, micro_batch, ngram)
            loss.backward()
            for group in self.optimizer.parameter_groups:
                group.accumulate({name: param.grad for name, param in group.params.items()})
            self.model.zero_grad()
            if ngram is not None and ngram.requires_grad:
                self.table.accumulate(ngram.grad)
            loss_sum = loss_sum + losses.sum()
        return loss_sum

    def step(self, step, batch, upcoming=None):
        """One optimizer step. Returns this rank's summed losses, 0-dim.

        upcoming: the next step's Batch, whose rows are pulled as soon as this one has updated them.
        """
        loss_sum = self.accumulate(step, batch)
        self.table.upcoming = None if upcoming is None else upcoming.rows
        self.optimizer.step(step, lr_multiplier(self.config, step))
        return loss_sum

    def read(self, passage, length):
        """(MicroBatch, its summed rows) of a Passage outside training."""
        plan, guesses = self.table.look_up([passage], name="validation")
        values, work = self.table.fetch(plan, "validation")
        wait(work)
        stack = stack_passages([passage], guesses, length, self.runtime.device)
        micro_batch = MicroBatch(*(tensor[0] for tensor in stack))
        return micro_batch, self.table.summed(plan.slots, plan.signs, values)

    @torch.no_grad()
    def score(self, step, text, low, length=None):
        """(losses (length,) of the tokens behind those of a Text from `low` on, hidden states) of
        the model before a step. All ranks must call it together. length: val_batch_tokens."""
        length = length or self.config.val_batch_tokens
        micro_batch, ngram = self.read(contiguous_passage(text, low, length), length)
        phase = evaluation_phase(self.config, step, length)
        _, losses, hidden = self.forward_pass(step, phase, (1.0,), micro_batch, ngram)
        return losses, hidden

    def evaluate(self, step, val):
        """Mean loss over the validation tokens, in nats per token; ranks share the passes."""
        text = Text(val, self.config.eot_token)

        def summed(number):
            losses, _ = self.score(step, text, number * self.config.val_batch_tokens)
            return losses.double().sum()

        return self.sum_over_passes(summed).item() / self.config.val_tokens

    def sum_over_passes(self, function):
        """The sum over all ranks of function(number), a tensor, for as many numbers as the
        validation tokens take passes."""
        runtime = self.runtime
        count = self.config.val_tokens // self.config.val_batch_tokens
        total = 0.0
        for number in range(runtime.rank, count + runtime.rank, runtime.world_size):
            # Ranks without a last pass make one again, at weight 0: reading rows takes all of them.
            total = total + function(min(number, count - 1)) * (number < count)
        wait(runtime.all_reduce(total, "validation"))
        return total


def state_digest(trainer):
    """A hash of all tensors that a step changes on this rank: equal digests, equal bits.

    It is made of sums, each of 2^18 words times random odd numbers, one a place: a change of one
    word always changes its sum. They are worked out on the device, so that no gigabytes travel.
    """
    odd = 2 * torch.randint(2**62, (2**18,), generator=torch.Generator().manual_seed(0)) + 1
    odd = odd.to(trainer.runtime.device)
    sums = []
    for group in trainer.optimizer.groups:
        for tensor in group.tensors().values():
            words = tensor.contiguous().view(-1)
            words = words.view(torch.int32 if words.element_size() == 4 else torch.int16)
            sums += [(chunk * odd[: len(chunk)]).sum() for chunk in words.split(len(odd))]
    digest = hashlib.sha256(torch.get_rng_state().numpy())
    digest.update(torch.stack(sums).cpu().numpy())
    return digest.hexdigest()


def warm_up(trainer):
    """Compile and run every phase of the schedule on synthetic tokens, then put the state back;
    digests prove that it is bitwise what it was."""
    config = trainer.config
    table = trainer.table
    before = state_digest(trainer)
    rng_state = torch.get_rng_state()
    length = max(config.micro_batch_tokens, config.val_batch_tokens)
    tokens = np.random.default_rng(0).integers(0, config.eot_token, length + 1).astype(np.uint16)
    tokens[0] = config.eot_token
    text = Text(tokens, config.eot_token)
    passage = contiguous_passage(text, 0, config.micro_batch_tokens)

    def batch_of(count):
        """A pass of one passage, so many times: whatever their number, these read the same rows."""
        passages = [passage] * count
        tokens = config.micro_batch_tokens
        rows, guesses = table.look_up(passages)
        stack = stack_passages(passages, guesses, tokens, trainer.runtime.device, count)
        return Batch(stack, rows, count * tokens, state={})

    table.start_pull(batch_of(1).rows)
    touched = itertools.chain(*(group.touched() for group in trainer.optimizer.groups))
    kept = [(tensor, index, tensor[index].clone()) for tensor, index in touched]
    # Ranks may differ in how many micro-batches they have, but all take the same steps.
    first_step = {}
    for step in range(config.steps):
        count = stage_at(config, step).micro_batches
        kind = training_phase(config, step), long_windows_until(config, step), count
        first_step.setdefault(kind, step)
    first_validation = {}
    every = config.val_every or config.steps
    for step in (*range(every, config.steps, every), config.steps):
        phase = evaluation_phase(config, step, config.val_batch_tokens)
        first_validation.setdefault((phase, long_windows_until(config, step)), step)
    # At Adam's first step and the run's last, all groups step, on sums of as many steps as ever.
    first_update = min(config.adam_every, config.steps) - 1
    # Where code is compiled, the second call is the first without compilation.
    calls = 2 if trainer.compile_name == "inductor" else 1
    for step in sorted([*first_step.values(), first_update, config.steps - 1] * calls):
        stop_if_interrupted()
        trainer.step(step, batch_of(micro_batches_of_pass(config, step, trainer.runtime)))
    for step in sorted([*first_validation.values()] * calls):
        stop_if_interrupted()
        trainer.score(step, text, 0)
    for tensor, index, values in kept:
        tensor[index] = values
    torch.set_rng_state(rng_state)
    if state_digest(trainer) != before:
        raise RuntimeError("the state after warm-up is not bitwise the state before it")
    trainer.runtime.ledger.clear()


# 10. Validity gates ==============================================================================
# What a model must not do is tested in place: all passes over the validation text are made once
# more, in another order. Before some of them, a pass reads the same text with noise in most of it,
# and what is kept must come out the same to the bit. Documents do not see each other, so that
# each has a cut of its own, with noise behind it, and one pass tests many cuts. Places are drawn
# from the seed. No gate can see what a model has been told of this text before;
# tests/trainer/cheats.py has the cheats that pass.

NOISE = 0  # what is kept of a document: nothing,
CUT = 1  # all up to a cut,
WHOLE = 2  # or everything


def plain(tensor):
    """A copy of a tensor: neither its class nor who else holds it has a say in what it is."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor = Tensor.as_subclass(tensor, Tensor)
    return tensor.clone(memory_format=torch.contiguous_format)


def differing_rows(one, other):
    """Which rows (n,) of two tensors (n, ...) differ in any byte, be it by the sign of a zero."""
    one_bytes = one.view(len(one), -1).view(torch.uint8)
    other_bytes = other.view(len(other), -1).view(torch.uint8)
    return (one_bytes != other_bytes).any(1)


class GatePasses:
    """The passes over the validation text that look at the model before a step."""

    def __init__(self, trainer, step, val):
        config = trainer.config
        self.trainer = trainer
        self.step = step
        self.val = val
        self.length = config.val_batch_tokens
        rng = np.random.default_rng([config.seed, 0])
        self.order = rng.permutation(config.val_tokens // self.length).tolist()
        # Nowhere the token that stands there, and nowhere the start of a document.
        noise = val + rng.integers(1, config.eot_token, len(val))
        self.noise = (noise % config.eot_token).astype(np.uint16)

    def find(self, number):
        """What the passes from one place on find: see look_at_losses and compare, a number each.

        What is compared depends on their turn, since all ranks make their passes together.
        """
        low = self.order[number] * self.length
        rng = np.random.default_rng([self.trainer.config.seed, 1, low])
        turn = number // self.trainer.runtime.world_size
        if turn % 3 == 0:
            outputs, compared = self.compare(self.val, low, rng, noise=rng.random())
        else:
            outputs = self.score(self.val, low)
            compared = torch.zeros(4, dtype=torch.float64, device=outputs[0].device)
        if turn % 6 == 2:
            short = self.with_short_documents(low, rng)
            _, compared = self.compare(short, low, rng, noise=0.2)
        return torch.cat([self.look_at_losses(low, *outputs), compared])

    def score(self, tokens, low):
        """(losses (length,), hidden states) of the pass from `low` on over such a text."""
        text = Text(tokens, self.trainer.config.eot_token)
        losses, hidden = self.trainer.score(self.step, text, low)
        return plain(losses), plain(hidden)

    def look_at_losses(self, low, losses, hidden):
        """(3,): the sums of the pass' losses and of the exact ones, and how many do not agree.

        An exact loss is of the softmax, over the whole vocabulary, of the logits that the hidden
        state has. These are made from the last token to the first: where a state stands in the text
        is no business of the head.
        """
        config = self.trainer.config
        model = self.trainer.model
        targets = self.val[low + 1 : low + 1 + self.length].astype(np.int64)
        targets = to_device(targets, hidden.device)
        exact = []
        read = hidden.flip(0).split(1024), targets.flip(0).split(1024)
        for states, ids in zip(*read, strict=True):
            own = F.softmax(plain(model.logits(states)), dim=-1).gather(1, ids[:, None])[:, 0]
            exact.append(-own.log())
        exact = torch.cat(exact).flip(0)
        # A logit of a narrow type differs by its last bit where the products are made otherwise.
        tolerance = 1e-4 + config.logit_cap[0] * torch.finfo(config.torch_dtype).eps
        is_exact = (losses - exact).abs() < tolerance
        return torch.stack([losses.double().sum(), exact.double().sum(), (~is_exact).sum()])

    def compare(self, tokens, low, rng, noise):
        """Make the pass from `low` on over a text with noise in it, and then over the text itself.

        Hidden states and losses of what is kept must be the same, and the logits at cuts, whose
        losses are about a token that has changed. A loss need not change there, since two tokens
        may have one logit; but where none does, losses say nothing about the text.

        Returns ((losses, hidden) of the text itself; (4,): how many cuts there are, how many of
        their losses have changed, and how many tokens of documents with a cut, and of whole ones,
        did not come out the same).
        """
        noisy_tokens, kept = self.with_noise(tokens, low, rng, noise)
        kept = to_device(kept, self.trainer.runtime.device)
        target_is_kept = kept[1:] > NOISE
        kept = kept[:-1]
        is_cut = (kept > NOISE) & ~target_is_kept
        # First the noise: a model that remembers what it has read now remembers noise.
        noisy_losses, noisy_hidden = self.score(noisy_tokens, low)
        noisy_logits = plain(self.trainer.model.logits(noisy_hidden[is_cut]))
        losses, hidden = self.score(tokens, low)
        logits = plain(self.trainer.model.logits(hidden[is_cut]))
        other_losses = differing_rows(losses, noisy_losses)
        differs = differing_rows(hidden, noisy_hidden) | (other_losses & target_is_kept)
        differs[is_cut] |= differing_rows(logits, noisy_logits)
        counted = [
            is_cut,
            other_losses & is_cut,
            differs & (kept == CUT),
            differs & (kept == WHOLE),
        ]
        return (losses, hidden), torch.stack(counted).sum(1).double()

    def with_noise(self, tokens, low, rng, noise):
        """(the text with noise in it; what is kept of the documents of the tokens from `low` on,
        and of the one behind them, (length + 1,)).

        noise: the share of documents of which nothing is kept; the first one is not among them.
        All that the pass does not read is noise, but for the beginning of its first document. A cut
        is anywhere in what it reads of a document, or behind the first token, or at a block's edge.
        """
        noisy = self.noise.copy()
        high = low + self.length
        kept = np.full(self.length + 1, NOISE)
        # The gate looks for documents itself: what the model makes of a text is its own business.
        starts = np.flatnonzero(tokens == self.trainer.config.eot_token)
        edges = np.unique([0, *starts, len(tokens)])
        edges = edges[np.searchsorted(edges, low, side="right") - 1 :]
        edges = edges[: np.searchsorted(edges, high) + 1]
        for start, behind in itertools.pairwise(edges.tolist()):
            if start > low and rng.random() < noise:
                continue
            fate = rng.choice([CUT, CUT, CUT, WHOLE])
            begin = max(start, low)
            end = min(behind, high)
            if fate == CUT:
                anywhere = rng.integers(begin + 1, end + 1, size=6)
                edge = low + (anywhere[0] - low) // ATTENTION_BLOCK * ATTENTION_BLOCK
                end = rng.choice([*anywhere, begin + 1, max(begin + 1, edge)])
            elif fate == WHOLE and behind > high:
                fate = CUT  # by the end of the pass
            noisy[start:end] = tokens[start:end]
            kept[begin - low : end - low] = fate
        return noisy, kept

    def with_short_documents(self, low, rng):
        """The text with more documents, which start at random in the pass from `low` on: where they
        are long, there are few cuts in a pass."""
        eot_token = self.trainer.config.eot_token
        tokens = self.val.copy()
        own = tokens[low : low + self.length]
        missing = SEGMENT_ROOM - 1 - np.count_nonzero(own == eot_token)
        own[rng.integers(self.length, size=max(0, missing))] = eot_token
        return tokens


@torch.no_grad()
def check_gates(trainer, step, val, reported):
    """What the gates find of the model before a step, on all ranks together: ({gate: whether the
    model has passed it}, how many places were compared although the next token had become another,
    seconds).

    reported: the mean loss over the validation tokens that the run claims.
    causal: nothing depends on later tokens. local: nothing depends on other documents, whose
    leaks most often show in both gates. normalised: the reported loss is the mean of the exact
    losses, and, to the last digits, that of the losses themselves, which no pass may change for
    another. unmoved: all these passes have changed no tensor.
    """
    began = time.perf_counter()
    before = state_digest(trainer)
    found = trainer.sum_over_passes(GatePasses(trainer, step, val).find).tolist()
    again, exact, wrong, cuts, changed, cut_differs, whole_differs = found
    is_moved = state_digest(trainer) != before
    moved = torch.tensor(float(is_moved), device=trainer.runtime.device)
    wait(trainer.runtime.all_reduce(moved, "validation"))
    tokens = trainer.config.val_tokens
    is_exact = wrong == 0 and abs(exact / tokens - reported) < 1e-4
    passed = {
        "causal": cut_differs == 0 and changed > 0,
        "normalised": is_exact and abs(again / tokens - reported) < 1e-9,
        "local": whole_differs == 0,
        "unmoved": moved.item() == 0,
    }
    return passed, int(cuts), time.perf_counter() - began


# 11. Runtime =====================================================================================

TIMEOUT = datetime.timedelta(minutes=10)  # for which ranks wait for each other
NVIDIA_DRIVER = Path("/proc/driver/nvidia")  # is there once the driver is loaded
INTERRUPTED = threading.Event()  # by a signal: the run ends where it looks next
# torch 2.13 has renamed these two, and warns of the old names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def launcher_number(name, default):
    """A number that torchrun sets in the environment. Raises ConfigError."""
    text = os.environ.get(name, str(default))
    words = f"{name}='{one_line(text)}': is a number where torchrun sets it; unset it"
    require(re.fullmatch("[0-9]{1,9}", text), words)
    return int(text)


class Runtime:
    """This process among its peers: rank, world size, device, and the collectives.

    Collectives are asynchronous and return work for `wait`. Without torchrun's environment
    variables the world size is 1, and each returns its argument and no work. `ledger` holds what
    this rank has handed to the network: [bytes, messages] by (collective, name).
    """

    def __init__(self, device="auto"):
        self.rank = launcher_number("RANK", 0)
        self.world_size = launcher_number("WORLD_SIZE", 1)
        self.local_rank = launcher_number("LOCAL_RANK", 0)
        self.local_world_size = launcher_number("LOCAL_WORLD_SIZE", 1)
        numbers = f"RANK={self.rank} of WORLD_SIZE={self.world_size}"
        require(self.rank < self.world_size, f"{numbers}: torchrun sets both, else unset both")
        self.peers = self.world_size - 1
        self.is_main = self.rank == 0
        self.ledger = {}
        self.device = choose_device(device, self.local_rank, self.local_world_size)
        self.use_device()
        self.loader_group = None
        if self.world_size > 1:
            try:
                self.connect()
            except (RuntimeError, TypeError, ValueError) as error:  # of gloo and of the store
                words = f"ranks do not find each other: {one_line(error)}"
                raise ConfigError(f"{words}; start with torchrun, or unset WORLD_SIZE") from error

    def use_device(self):
        """Make the device the calling thread's own; on a CPU, one thread an operation: those of
        this size lose to threads that spin while they wait for each other."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)

    def connect(self):
        """Join the process group; the loader's thread, which keeps another order, gets its own."""
        store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
            # torchrun's store outlives a restart, and still has the addresses of the dead. Nodes
            # do not count restarts alike, so that several of them need an own store: see README.
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(restart, store)
        self.store = store
        # Naming NCCL without CUDA raises; with its device it connects here, not at its first call.
        is_cuda = self.device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            timeout=TIMEOUT,
            world_size=self.world_size,
            rank=self.rank,
            store=store,
            device_id=self.device if is_cuda else None,
        )
        self.loader_group = dist.new_group(timeout=TIMEOUT, backend="gloo")
        # To leave earlier would fail those that still connect.
        dist.monitored_barrier(self.loader_group, TIMEOUT)

    def agree(self, key, value):
        """The value (of JSON) that the rank which comes first has under a key."""
        if self.world_size == 1:
            return value
        return json.loads(self.store.compare_set(key, "", json.dumps(value)))

    def agreed_stop(self, step):
        """The step before which all ranks end once a signal has reached one of them, else None.
        It is two prefetch windows ahead, so that no rank has passed it."""
        if self.world_size == 1:
            return step if INTERRUPTED.is_set() else None
        if INTERRUPTED.is_set() or self.store.check(["stop"]):
            return self.agree("stop", step + 2 * PREFETCH)
        return None

    def owned_range(self, count):
        """The range [low, high) of `count` units that this rank owns; the last may own fewer."""
        chunk = math.ceil(count / self.world_size)
        return min(self.rank * chunk, count), min((self.rank + 1) * chunk, count)

    def record_sent(self, collective, name, tensor, messages, size=None):
        """Enter into the ledger what is about to be sent: so many bytes, else a message's share of
        the tensor in each."""
        assert tensor.is_contiguous(), f"{name}: a collective of a strided tensor is silently wrong"
        entry = self.ledger.setdefault((collective, name), [0, 0])
        entry[0] += messages * tensor.nbytes // self.world_size if size is None else size
        entry[1] += messages

    def sent_in_training(self):
        """What of the ledger belongs to steps."""
        untimed = ("validation", "checkpoint")
        return {key: entry for key, entry in self.ledger.items() if key[1] not in untimed}

    def all_reduce(self, tensor, name):
        """Sum in place over ranks; returns work."""
        if self.world_size == 1:
            return None
        self.record_sent("all_reduce", name, tensor, 2 * self.peers)
        return dist.all_reduce(tensor, async_op=True)

    def reduce_scatter(self, tensor, name):
        """Sum tensor (world_size * n, ...) over ranks. Returns (this rank's n sums, work)."""
        if self.world_size == 1:
            return tensor, None
        part = tensor.new_empty(len(tensor) // self.world_size, *tensor.shape[1:])
        self.record_sent("reduce_scatter", name, tensor, self.peers)
        return part, reduce_scatter(part, tensor, async_op=True)

    def gather_ranges(self, part, count, name):
        """Join the ranks' owned ranges of `count` units. Returns (whole (count, ...), work)."""
        if self.world_size == 1:
            return part, None
        padded = part.new_zeros(math.ceil(count / self.world_size), *part.shape[1:])
        padded[: len(part)] = part
        whole = part.new_zeros(len(padded) * self.world_size, *part.shape[1:])
        self.record_sent("all_gather", name, whole, self.peers)
        return whole[:count], all_gather(whole, padded, async_op=True)

    def gather_on_main(self, part, count, name="checkpoint"):
        """Join the ranks' owned ranges of `count` units on rank 0; the others get none of them."""
        ranks = np.arange(self.world_size + 1)
        edges = np.minimum(ranks * math.ceil(count / self.world_size), count)
        receive = np.diff(edges) * self.is_main
        send = [len(part), *[0] * self.peers]
        whole, work = self.all_to_all(part, send, receive.tolist(), name)
        wait(work)
        return whole

    def all_to_all(self, tensor, send, receive, name, group=None):
        """Send the first send[0] rows of a tensor to rank 0, and so on. Returns (receive[r] rows of
        each rank r, work)."""
        if self.world_size == 1:
            return tensor, None
        sent = [count for rank, count in enumerate(send) if rank != self.rank and count]
        row_size = math.prod(tensor.shape[1:]) * tensor.element_size()
        self.record_sent("all_to_all", name, tensor, len(sent), sum(sent) * row_size)
        out = tensor.new_empty(sum(receive), *tensor.shape[1:])
        work = dist.all_to_all_single(out, tensor, receive, send, group=group, async_op=True)
        return out, work

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory_mib(self):
        """Peak memory of each rank in MiB, on rank 0: of the device's allocator on CUDA, else the
        process'."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) // 2**20
        else:
            unit = 2**20 if sys.platform == "darwin" else 2**10
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit
        return self.gather_on_main(torch.tensor([peak]), self.world_size, "validation").tolist()

    def close(self, has_failed=False):
        if dist.is_initialized():
            if not has_failed:
                dist.barrier()
            dist.destroy_process_group()


class Clock:
    """Seconds of training, and those of processors; only start and stop wait for the device."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.total = 0.0
        self.processor = 0.0
        self.since = None

    def start(self):
        self.runtime.synchronize()
        self.since = time.perf_counter()
        self.processor -= time.process_time()

    def stop(self):
        self.runtime.synchronize()
        self.total = self.seconds()
        self.since = None
        self.processor += time.process_time()

    def seconds(self):
        running = 0.0 if self.since is None else time.perf_counter() - self.since
        return self.total + running

    @contextlib.contextmanager
    def stopped(self):
        self.stop()
        yield
        self.start()


def wait(work):
    if work is not None:
        work.wait()


def choose_device(name, local_rank, local_world_size):
    """The torch.device of one of the processes on this machine. Raises ConfigError."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    has_driver = NVIDIA_DRIVER.exists() and not is_hidden
    if name == "cpu" or not (name == "cuda" or has_driver or torch.cuda.is_available()):
        return torch.device("cpu")
    words = f"device={name}: torch {torch.__version__} sees no CUDA device"
    hint = f", and {NVIDIA_DRIVER} is there: its driver may be too old; update it" * has_driver
    require(torch.cuda.is_available(), f"{words}{hint}; or train on the CPU by --device cpu")
    count = torch.cuda.device_count()
    words = f"{local_world_size} processes on a node with {count} GPU(s)"
    is_enough = max(local_world_size, local_rank + 1) <= count
    require(is_enough, f"{words}: start at most one a GPU (--nproc-per-node)")
    return torch.device("cuda", local_rank)


def device_name(device):
    """The GPU's name, or the processor's with the number of its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError):  # Linux, where the first is often empty
        name = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)[0]
    return f"{name} x{os.cpu_count()}"


def git_state():
    """(commit sha, 1 if tracked files differ from it else 0); ("none", 0) without git."""
    command = "git describe --always --dirty --abbrev=40 --exclude='*'"
    folder = Path(__file__).parent
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)
    commit, dirty, _ = done.stdout.strip().partition("-dirty")
    return commit or "none", int(bool(dirty))


def listen_for_signals():
    """The first signal ends the run behind the step at hand. Another one, over a second later,
    ends it at once, by a thread: the main one may wait for other ranks, or for memory."""
    INTERRUPTED.clear()
    received, sent = os.pipe()
    os.set_blocking(sent, False)
    former = signal.set_wakeup_fd(sent)  # the system's handler writes there, whatever Python does
    if former >= 0:
        os.close(former)  # which ends the thread of an earlier call
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def watch():
        first = math.inf
        while number := os.read(received, 1):
            if number[0] not in ending:
                continue
            if time.monotonic() - first > 1:  # a launcher sends on what its ranks have got, too
                os._exit(128 + number[0])
            if not INTERRUPTED.is_set():
                first = time.monotonic()
                INTERRUPTED.set()
                with contextlib.suppress(OSError):  # of a console that is gone
                    os.write(2, b"interrupted: ends after the step at hand; again: at once\n")
        os.close(received)

    for number in ending:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, frame: None)
    threading.Thread(target=watch, daemon=True).start()


def stop_if_interrupted():
    if INTERRUPTED.is_set():
        raise KeyboardInterrupt


# 12. A run's life ================================================================================


# ----- the command line


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ConfigError(f"{message}; see --help")


def parse_literal(text):
    """The value of a tuple or a truth value; a number alone is a tuple of one."""
    try:
        value = ast.literal_eval(text.title() if text.lower() in ("true", "false") else text)
        str(value)  # raises for integers that are too long to be quoted
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        expected = "expected true or false, or a tuple such as (1, 2)"
        raise argparse.ArgumentTypeError(f"{text}: {expected}") from None
    return value if isinstance(value, (tuple, bool)) else (value,)


def command_line_parser():
    """A Parser with an option for each field of the tracks' Configs, and for each one of Stage,
    which then holds in all stages."""
    parser = Parser(
        usage="train_gpt.py [--key value ...]",
        description=__doc__.split("\n\nChapters")[0] + f"\n\nTracks: {', '.join(TRACKS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--help", "-h", action="store_true", help="print this and exit")
    parser.add_argument("--check", action="store_true", help="everything but the steps")
    fields = {}
    for values in (*TRACKS.values(), Stage()):  # another script's track may have fields of its own
        fields |= {field.name: field for field in dataclasses.fields(values)}
    del fields["start"]
    for name, field in fields.items():
        default = "" if name == "stages" else f" [{field.default}]"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=parse_literal if field.type in (bool, tuple) else field.type,
            metavar="",
            help=f"{field.metadata['help']}{default}".replace("%", "%%"),
        )
    return parser


def parse_command_line(argv):
    """{field: value} of what the command line names. Raises ConfigError."""
    parser = command_line_parser()
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        hint = nearest(unknown[0].partition("=")[0], parser._option_string_actions)
        raise ConfigError(f"{unknown[0]}: no such key; {hint} Arguments come as --key value")
    given = vars(namespace)
    texts = {name: value for name, value in given.items() if isinstance(value, str)}
    return given | {name: os.path.expanduser(value) for name, value in texts.items()}


# ----- the log


class Log:
    """The run's log.txt and console lines; silent on every rank but 0."""

    def __init__(self, is_main):
        self.is_main = is_main
        self.file = None

    def open(self, folder, is_new, may_replace=False):
        """Begin a folder's log.txt with the script's source, or go on with it. Returns whether it
        begins. Raises ConfigError where it is another run's, or another process writes it."""
        if not self.is_main:
            return False
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "log.txt"
        is_free = not is_new or may_replace or not path.exists()
        require(is_free, f"{folder} exists; change --run-id, or --resume {folder.name}")
        file = open(path, "a", buffering=1, encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            words = f"{path}: another process writes this run; wait for it, or stop it"
            raise ConfigError(words) from None
        self.file = file
        for leftover in folder.glob("*.tmp"):
            leftover.unlink()
        written = b"" if is_new else path.read_bytes()
        file.truncate(written.rfind(b"\n") + 1)  # a kill may have torn the last line
        if not written:
            source = Path(__file__).read_text("utf-8")
            file.write(source.rstrip("\n") + "\n===== END OF CODE =====\n")
        elif not re.search(rb"\nstatus:.*\n\Z", written):
            file.write("status:error ended without a word: killed, or its machine stopped\n")
        return not written

    def line(self, text, on_console=True):
        """One event, a line: to the file, and to the console."""
        if not self.is_main:
            return
        if on_console:
            try:
                print(text, flush=True)
            except OSError:  # the console is gone, which ends no run; Python would write once more
                sys.stdout = open(os.devnull, "w")
        if self.file is not None:
            self.file.write(text + "\n")

    def close(self):
        if self.file is not None:
            self.file.close()


# ----- checkpoints


@contextlib.contextmanager
def atomic_file(path):
    """A temporary file that becomes `path` when the block ends well: whatever happens, what was
    there stays. Raises OSError, with the room that is left."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch's zip writer reports a failed write so
        free = shutil.disk_usage(path.parent).free / 2**20
        reason = str(error).splitlines()[0]
        raise OSError(f"{path}: not written, {free:.0f} MiB are free there ({reason})") from error
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(path, content):
    """Write `content` (nested dicts of tensors and plain types), and the file's sha256 beside it,
    atomically. Raises FloatingPointError rather than keep what is not finite."""
    for keys, values in pytree.tree_leaves_with_path(content):
        if isinstance(values, Tensor) and values.numel():
            low, high = values.aminmax()  # one pass over a table, and no copy
            if not (math.isfinite(low) and math.isfinite(high)):
                raise FloatingPointError(f"checkpoint{pytree.keystr(keys)} is not finite")
    with atomic_file(path) as file:
        torch.save(content, file)
        file.flush()
        with atomic_file(path.with_suffix(".sha256")) as beside:
            beside.write(f"{file_sha256(file.name)}  {path.name}\n".encode())


def load_checkpoint(path):
    """The content of a checkpoint file, a Path, with its Config and its folder. Raises ConfigError,
    also where no sha256 is beside it."""
    try:
        is_whole = file_sha256(path).encode() in path.with_suffix(".sha256").read_bytes()
        require(is_whole, "its sha256 is not the one beside it: damaged")
        content = torch.load(path, map_location="cpu", weights_only=True)
        config = content["config"]
        require(config["track"] in TRACKS, f"its track {config['track']} is not known here")
        content["config"] = type(TRACKS[config["track"]])(**config)
        is_same = content["rows"] == row_fingerprint(content["config"]) and "sent" in content
        require(is_same, "another version of the script has made it")
    except Exception as error:  # torch raises several types for a damaged file
        reason = f"{type(error).__name__}: {one_line(error)}"
        remedy = "use another checkpoint, or the script that it began with"
        raise ConfigError(f"{path}: cannot be read ({reason}); {remedy}") from None
    return {**content, "folder": path.parent}


def find_checkpoint(run, key="resume"):
    """The content of a checkpoint file, or of the newest sound checkpoint of a run, which its id
    or its folder names. Raises ConfigError."""
    paths = [Path(run)]
    for folder in (Path("logs", run), Path(run)):
        paths += [folder / "checkpoint.pt", *sorted(folder.glob("step_*.pt"), reverse=True)]
    damaged = ""
    for path in filter(Path.is_file, paths):
        try:
            return load_checkpoint(path)
        except ConfigError as error:
            damaged = one_line(error)
            print(f"note: {damaged}", file=sys.stderr)
    hint = nearest(run, [path.parent.name for path in Path("logs").glob("*/*.pt")])
    missing = f"no checkpoint in {Path('logs', run)}; {hint or 'no run has left one'}"
    raise ConfigError(damaged or f"--{key} {run}: {missing}")


def restore(trainer, content):
    """Take over weights, optimizer state and random numbers. Raises ConfigError if not this
    model's."""
    try:
        trainer.model.load_state_dict(content["model"])
        for group in trainer.optimizer.groups:
            group.load(content["groups"][group.name])
        torch.set_rng_state(content["rng"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        words = f"the checkpoint is not of this model ({one_line(error)})"
        raise ConfigError(f"{words}; use the script and configuration of its run") from None


def resumed(given):
    """(Config, the content of the checkpoint that --resume names, or None) of given values."""
    run = given.get("resume", "")
    is_auto = run == "auto"
    if is_auto:
        run = given.get("run_id", "")
    if not run or (is_auto and not any(Path("logs", run).glob("*.pt"))):
        return config_from(given), None
    content = find_checkpoint(run)
    saved = content["config"]
    is_complete = content["step"] == saved.steps and (content["folder"] / "result.json").exists()
    require(is_auto or not is_complete, f"--resume {run}: it is complete, all {saved.steps} steps")
    may_change = NEUTRAL_FIELDS - {"seed", "run_id", "run_of"} | {"data"}  # it may have moved
    if is_auto:
        may_change.add("run_id")
    for name in given.keys() - may_change:
        words = f"--{name.replace('_', '-')} {given[name]}: the run to resume keeps what it has"
        require(with_values(saved, {name: given[name]}) == saved, f"{words}; leave the key out")
    changes = {name: given[name] for name in given.keys() & may_change}
    return dataclasses.replace(saved, **{**changes, "resume": saved.resume}), content


# ----- the run


class Run:
    """A run between its opening and its result."""

    def __init__(self, config, runtime, log):
        """Look at all that it needs, and build it. Raises ConfigError."""
        seed = config.seed if config.seed >= 0 else int.from_bytes(os.urandom(4), "little")
        run_id = config.run_id or f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.urandom(2).hex()}"
        seed, run_id = runtime.agree("run", [seed, run_id])  # what is drawn is so for all ranks
        self.config = dataclasses.replace(config, seed=seed, run_id=run_id)
        self.runtime = runtime
        self.log = log
        self.clock = Clock(runtime)
        self.folder = Path("logs", run_id)
        self.corpus = open_corpus(self.config)
        self.val_sets = {"val_loss": self.corpus.val}  # validation tokens by the name of their loss
        torch.manual_seed(seed)
        self.trainer = Trainer(self.config, runtime)
        self.first_step = 0  # of this process; later than 0 where it has resumed the run
        self.step = 0  # how many are done
        self.loader_state = None  # behind these
        self.loss_sum = 0.0  # of the steps since the last logged one, on this rank
        self.loss_tokens = 0  # of these steps, on all ranks
        self.sent = {}  # by this rank in the steps of earlier processes, as Runtime.ledger has it
        self.unsaved = None  # why the last checkpoint is not there
        commit, is_dirty = git_state()
        triton = sys.modules.get("triton")
        self.facts = {  # of script, machine and versions
            "commit": commit,
            "dirty": is_dirty,
            "code_sha256": file_sha256(__file__),
            "seed": seed,
            "world_size": runtime.world_size,
            "device": device_name(runtime.device),
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "none",
            "triton": triton.__version__ if triton else "none",
            "started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
        }

    def resume(self, content):
        """Go on from a checkpoint's content. Raises ConfigError where something differs."""
        data = self.config.data
        is_there = data == content["config"].data or content["data"] != "none"
        is_same = is_there and content["data"] == manifest_hash(self.config)
        words = f"{Path(data, 'manifest.json').absolute()} is not the one that the run began with"
        require(is_same, f"--resume: {words}; bring its corpus back, or name its place by --data")
        self.folder = content["folder"]
        restore(self.trainer, content)
        self.first_step = content["step"]
        self.step = self.first_step
        self.loader_state = content["loader"]
        self.clock.total, self.clock.processor = content["seconds"]
        self.loss_tokens = content["loss_tokens"]
        if self.runtime.is_main:
            self.loss_sum = content["loss_sum"]
            self.sent = content["sent"]

    def is_due(self, every):
        """Whether the steps done are a multiple of `every` (0: never), and steps are left."""
        return every > 0 and self.step % every == 0 and self.step < self.config.steps

    def log_losses(self, losses, words=""):
        """Log losses of the model as it stands, which must be finite, with five decimals."""
        told = " ".join(f"{name}:{loss:.5f}" for name, loss in losses.items())
        took = 1000 * self.clock.seconds()
        times = f"train_time:{took:.0f}ms step_avg:{took / max(1, self.step):.2f}ms"
        self.log.line(f"step:{self.step}/{self.config.steps} {told}{words} {times}")
        for name, loss in losses.items():
            if not math.isfinite(loss):
                raise FloatingPointError(f"{name} is {loss} at step {self.step}")

    def summed_loss(self):
        """The training losses since the last logged one, summed over tokens and ranks."""
        total = torch.as_tensor(self.loss_sum, dtype=torch.float64)
        wait(self.runtime.all_reduce(total, "training loss"))
        return total.item()

    def log_training(self):
        """Log the mean loss of the training steps since the last logged one."""
        loss = self.summed_loss() / self.loss_tokens
        lr_mul = lr_multiplier(self.config, self.step - 1)
        self.log_losses({"train_loss": loss}, f" lr_mul:{lr_mul:.3f}")
        self.loss_sum = 0.0
        self.loss_tokens = 0

    def validate(self):
        """Log the validation losses of the model as it stands, and return them by name. The clock
        must stand still."""
        before = state_digest(self.trainer)
        losses = {
            name: self.trainer.evaluate(self.step, val) for name, val in self.val_sets.items()
        }
        if state_digest(self.trainer) != before:
            raise RuntimeError("validation has changed the state of the run")
        self.log_losses(losses)
        return losses

    def save(self, name=None):
        """Write a checkpoint; of those on the way, the newest two are kept. All ranks must call
        it: what they own is gathered. The clock must stand still."""
        content = {
            "step": self.step,
            "config": dataclasses.asdict(self.config),
            "rows": row_fingerprint(self.config),
            "data": manifest_hash(self.config),
            "model": self.trainer.model.state_dict(),
            "groups": {group.name: group.full_state() for group in self.trainer.optimizer.groups},
            "rng": torch.get_rng_state(),
            "loader": self.loader_state,
            "seconds": [self.clock.total, self.clock.processor],
            "loss_sum": self.summed_loss(),
            "loss_tokens": self.loss_tokens,
            "sent": self.runtime.sent_in_training(),
        }
        if not self.log.is_main:
            return
        save_checkpoint(self.folder / (name or f"step_{self.step:06d}.pt"), content)
        for old in sorted(self.folder.glob("step_*.pt"))[:-2]:
            old.unlink()
            old.with_suffix(".sha256").unlink(missing_ok=True)

    def end_if_asked(self):
        """Raise KeyboardInterrupt where a signal has come, after a save if the run saves at all."""
        if not self.config.save_every:
            stop_if_interrupted()
            return
        stop = self.runtime.agreed_stop(self.step)
        # Between Adam's steps gradients wait, and they are not saved.
        if stop is not None and self.step >= stop and self.step % self.config.adam_every == 0:
            if self.step:
                with self.clock.stopped():
                    self.save()
            raise KeyboardInterrupt


def open_run(config, checkpoint, runtime, log, is_check):
    """Build a run or take it up again, and begin its log, unless it is only checked. Raises
    ConfigError."""
    run = Run(config, runtime, log)
    config = run.config
    step = 0 if checkpoint is None else checkpoint["step"]
    other = runtime.agree("step", step)
    words = f"of step {step} here, but {other} on another node"
    require(step == other, f"--resume: {words}; all must share logs/")
    if checkpoint is not None:
        run.resume(checkpoint)
    check_room(run)
    if is_check:
        write_header(run)
        return run
    may_replace = config.resume == "auto" and not (run.folder / "result.json").exists()
    if log.open(run.folder, checkpoint is None, may_replace):
        write_header(run)
        log.line("===== START =====")
        if config.val_sha256 not in ("", validation_hash(run.corpus.val)):
            log.line(f"note: {config.data} has other validation tokens: losses do not compare")
    if checkpoint is not None:
        where = f"step:{step}/{config.steps} world_size:{runtime.world_size}"
        log.line(f"resumed:{config.run_id} {where}")
    return run


def check_room(run):
    """Say what memory and disk a run takes. Raises ConfigError where the disk is too small."""
    state = 0  # weights and all else on this rank
    checkpoint = 0  # weights once, and of the rest the part of every rank
    for group in run.trainer.optimizer.groups:
        for name, tensor in group.tensors().items():
            state += tensor.nbytes
            if not name.endswith(".grad"):
                is_part = group.is_shared_out and not name.endswith(".param")
                checkpoint += tensor.nbytes * (run.runtime.world_size if is_part else 1)
    count = 3 if run.config.save_every else 1  # two on the way stay while the next is written
    needed = count * checkpoint - sum(path.stat().st_size for path in run.folder.glob("*.pt"))
    # logs/ may be a link to another disk.
    place = next(path for path in (run.folder, *run.folder.parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    words = f"{count} x {checkpoint / 2**30:.2f} GiB of checkpoints, {free / 2**30:.1f} GiB free"
    full = f"the disk of {place.absolute()} is too small: {words}; make room"
    require(needed < free, full, remedy="or --save-every 0" * (count > 1))
    run.log.line(f"memory of weights and state: {state / 2**30:.2f} GiB a rank; disk: {words}")
    if run.trainer.compile_name == "inductor":
        run.log.line("compiling comes first, in silence: minutes in a first run, seconds later")


def write_header(run):
    """Log what makes the run reproducible: machine, configuration, data, back ends."""
    config = run.config
    trainer = run.trainer
    log = run.log
    words = " ".join(f"{key}:{value}" for key, value in run.facts.items())
    log.line(f"run:{config.run_id} track:{config.track} {words}")
    log.line("config:" + json.dumps(dataclasses.asdict(config)), on_console=False)
    overrides = overrides_of(config)
    if overrides:
        log.line("overrides:" + json.dumps(overrides))
    elif config.run_of:
        batch, counter, start = config.run_of.split(":")
        log.line(f"batch:{batch} counter:{counter} start:{start}")
    data = manifest_hash(config)
    log.line(
        f"data:{data} shards:{'unknown' if data == 'none' else 'ok'} "
        f"backends:attention={trainer.attention_name},matmul=torch-{config.dtype},"
        f"compile={trainer.compile_name}"
    )
    words = " ".join(f"{group.name}={group.size():,}" for group in trainer.optimizer.groups)
    log.line(f"size: {words}")


def write_result(run, losses, gates):
    """Log what came of a run, and write result.json. Raises RuntimeError where a gate has
    failed."""
    config = run.config
    runtime = run.runtime
    passed, cuts, gate_seconds = gates
    seconds = run.clock.seconds()
    tokens = training_tokens(config)
    peaks = runtime.peak_memory_mib()
    sent = {  # by this rank: [bytes, messages] in a training step
        "/".join(key): [round(count / config.steps, 1) for count in entry]
        for key, entry in sorted(runtime.sent_in_training().items())
    }
    result = {
        **losses,
        "train_time_ms": 1000 * seconds,
        "cpu_time_ms": 1000 * run.clock.processor,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        **run.facts,
        "peak_memory_mib_by_rank": peaks,
        "peak_memory_since_step": run.first_step,
        "validity": passed,
        "val_sha256": validation_hash(run.corpus.val),
        "overrides": overrides_of(config),
        "sent_per_step": sent,
        "config": dataclasses.asdict(config),
    }
    words = [f"{key}={size:.0f}({messages:g})" for key, (size, messages) in sent.items()]
    run.log.line(f"comms: sent_bytes per step (messages) {' '.join(words) or 'none=0(0)'}")
    missed = 0.99**cuts  # the chance to miss a leak at 1 % of all positions
    run.log.line(f"gates: cuts:{cuts} missed_1pct:{missed:.5f} time:{gate_seconds:.1f}s")
    sizes = read_manifest(config.data).get("token_bytes", [0] * config.vocab_size)
    val_bytes = np.array(sizes)[run.corpus.val[1:]].sum()
    bits = losses["val_loss"] * config.val_tokens / math.log(2)
    told = f"{bits / val_bytes:.5f}" if val_bytes else "unknown"
    run.log.line(f"bits_per_byte:{told} val_bytes:{val_bytes}")
    words = [f"{name}:{'ok' if is_passed else 'FAILED'}" for name, is_passed in passed.items()]
    validity = f"validity: {' '.join(words)}"
    run.log.line(f"{validity} val_tokens:{config.val_tokens} val_sha256:{result['val_sha256']}")
    others = [f" {name}:{loss:.5f}" for name, loss in losses.items() if name != "val_loss"]
    since = " since resume" * (run.first_step > 0)
    if run.log.is_main:
        run.log.line(
            f"final val_loss:{losses['val_loss']:.5f} train_time:{result['train_time_ms']:.0f}ms "
            f"tokens:{tokens} peak_memory:{max(peaks)}MiB{since} "
            f"tokens_per_s:{result['tokens_per_s']:.0f} "
            f"cpu_time:{result['cpu_time_ms']:.0f}ms{''.join(others)}"
        )
        with atomic_file(run.folder / "result.json") as file:
            file.write((json.dumps(result, indent=1) + "\n").encode())
    if not all(passed.values()):
        reason = "the model sees what it must not, or its losses are no distribution's"
        raise RuntimeError(f"{reason}: {validity}")


def plot(folder):
    """Draw the run's curve, by the records package. Returns the status line's word for it."""
    try:
        from records.picture import plot_run

        return f" plot:{plot_run(folder)}"
    except Exception as error:  # a failure to draw ends nothing
        print(f"no plot: {type(error).__name__}: {error}", file=sys.stderr)
        return ""


ENDINGS = (  # what can end a program, the exit status, and what the status line says of it
    (KeyboardInterrupt, 130, "interrupted"),
    (ConfigError, 2, "error {said}"),
    (FloatingPointError, 1, "nan {said}; start another run with a lower learning rate"),
    (MemoryError, 1, "oom {said}; lower micro_batches_a_pass, micro_batch_tokens or ngram_rows"),
    (OSError, 1, "error {said}; check the path, and that the disk is not full"),
    (ImportError, 2, "error {said}; ./run.sh installs what is missing"),
)


def ending_of(error):
    """(exit status, words of the status line) of a program that an error has ended; prints the
    traceback of one that nobody but the script can put right."""
    said = one_line(error)
    # On a CPU torch raises a RuntimeError, which only its words tell from others.
    if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in said:
        error = MemoryError(said)
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "triton")):
        # This import takes seconds, which a run that does not compile need not wait.
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        error = ConfigError("")
        said += f"; go without the compiler by --compile false, or delete its cache, {cache_dir()}"
    for kinds, status, words in ENDINGS:
        if isinstance(error, kinds):
            return status, words.format(said=said)
    if INTERRUPTED.is_set():
        return 130, "interrupted"  # another rank has ended first, and collectives fail here
    traceback.print_exception(error)
    return 1, f"error {type(error).__name__}: {said}"


# 13. The run =====================================================================================


def train(run):
    """One whole run, from its warm-up to its result. Returns the final validation loss."""
    config = run.config
    trainer = run.trainer
    clock = run.clock
    table = trainer.table
    warm_up(trainer)
    run.runtime.ledger.update(run.sent)
    look_up = functools.partial(table.look_up, group=run.runtime.loader_group)
    place = run.first_step, run.loader_state
    loader = TrainLoader(config, run.corpus.shards, run.runtime, look_up, *place)
    clock.start()
    with contextlib.closing(loader):
        batch = loader.next_batch()
        for step in range(run.first_step, config.steps):
            run.end_if_asked()
            is_last = step + 1 == config.steps
            upcoming = None if is_last else loader.next_batch()
            run.loss_sum += trainer.step(step, batch, upcoming).double()
            run.loss_tokens += batch.tokens
            run.step = step + 1
            run.loader_state = batch.state
            if is_last or run.is_due(config.log_every):
                run.log_training()
            if run.is_due(config.val_every):
                with clock.stopped():
                    run.validate()
            if run.is_due(config.save_every):
                with clock.stopped():
                    run.save()
            batch = upcoming
    clock.stop()

    if run.first_step < config.steps:  # else it is what the run was resumed from
        try:
            run.save("checkpoint.pt")
        except OSError as error:  # told once the result, which needs no checkpoint, is written
            run.unsaved = error
            run.log.line(f"note: {one_line(error)}; goes on to its result")
    stop_if_interrupted()
    losses = run.validate()
    stop_if_interrupted()
    gates = check_gates(trainer, config.steps, run.corpus.val, losses["val_loss"])
    stop_if_interrupted()
    write_result(run, losses, gates)
    return losses["val_loss"]


def main(argv=None, extend=None):
    """Returns the exit status: 0 complete, 1 failed on the way, 2 bad input, 130 interrupted.

    extend: another script's way to build on this one: given the Config, it returns a function that
    prepares the Run before it is warmed up.
    """
    log = Log(is_main=True)
    runtime = None
    listen_for_signals()
    try:
        log.is_main = launcher_number("RANK", 0) == 0
        given = parse_command_line(sys.argv[1:] if argv is None else argv)
        if given.pop("help", False):
            print(command_line_parser().format_help(), end="")
            return 0
        is_check = given.pop("check", False)
        if "track" not in given and "resume" not in given:
            given["track"], reason = default_track()
            log.line(f"track {given['track']} by default: {reason}")
        config, checkpoint = resumed(given)
        prepare = extend(config) if extend else None
        runtime = Runtime(config.device)
        run = open_run(config, checkpoint, runtime, log, is_check)
        if prepare is not None:
            prepare(run)
        words = "check:ok"
        if not is_check:
            val_loss = train(run)
            words = f"status:ok run:{run.config.run_id} val_loss:{val_loss:.5f} "
            words += f"train_time:{run.clock.seconds():.1f}s log:{run.folder}/log.txt"
        runtime.close()
        if run.unsaved is not None:
            raise run.unsaved
        log.line(words + (plot(run.folder) if log.is_main and not is_check else ""))
        return 0
    except (KeyboardInterrupt, Exception) as error:
        status, words = ending_of(error)
        with contextlib.suppress(OSError):  # the disk may be full; the console has the status
            log.line(f"status:{words}")
        if not log.is_main:
            print(f"rank {os.environ['RANK']}: status:{words}", file=sys.stderr, flush=True)
        if runtime is not None:
            runtime.close(has_failed=True)
        return status
    finally:
        log.close()  # who keeps the error that ended the run may keep this log as well


if __name__ == "__main__":
    sys.exit(main())
