"""Train a GPT to a target validation loss as fast as this machine allows, in one file.

    python train_gpt.py                            one process, on one GPU or one core of a CPU
    torchrun --nproc_per_node=8 train_gpt.py       one a GPU or a core (several nodes: see README)
    python train_gpt.py --track english --check    everything but the steps: would this run start?
    python train_gpt.py --help                     every field of the configuration

Without --track it takes `fineweb` where CUDA and FineWeb's shards are, else `english`.

To change what is trained, read part I. Start with `train`, at its end, then read `GPT.hidden`, then
`Optimizer.step`. Part II is for whoever changes files, the command line or the log.

Part I: what is trained
     1. Configuration     every number of a run with its check, the tracks, the schedules
     2. Layers            norm, rotary positions, parts of attention and MLP
     3. Attention         its back ends: any device, FlashAttention
     4. Loss              cross-entropy in one pass, over the vocabulary or a sample of it
     5. Model             a transformer block, and the GPT that ties blocks together
     6. Update rules      Adam, Muon, and the table that names all rules
     7. SOAP              rules in eigenbases, by batched QR; without this chapter the rest works
     8. Ranks             processes, devices, collectives that count their bytes
     9. Parameter groups  who sums, updates and sends which parameters
    10. The table         rows of n-grams: hash, plan, exchange, update
    11. Batches           passages of documents, copies, a loader that works ahead
    12. Training          a step, evaluation, warm-up, and `train`: the whole run

Part II: what keeps a run
    13. Corpus            shards of tokens, which are checked before anything compiles
    14. Command line      options, and what may change when a run is resumed
    15. What a run keeps  log, clock, checkpoints, signals
    16. The run           its opening, its log lines, its result, and how errors end it

A step's global batch is a fixed list of micro-batches. Rank r of W takes every W-th of them, if
there are so many. So all world sizes see the same tokens, and they take the same step up to the
order in which floats are added.
"""

import argparse
import ast
import bisect
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import importlib.util
import inspect
import itertools
import json
import lzma
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

# torch reads these once. Large tensors on the CPU go into huge pages, and on a GPU buffers of ever
# new sizes, as the rows of a step are, grow in place.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
# Compiled graphs that hold our own autograd function, the loss, may be cached, too.
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD", "1")

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

# 1. Configuration =================================================================================

ATTENTION_BLOCK = 64  # at most: queries of a block share their keys, in BlockedAttention
GATE_DIM = 12  # gates read the first few channels of the residual stream


class ConfigError(ValueError):
    """Something the user can put right: the message holds the value, the limits and the remedy."""


def require(condition, where, problem="", remedy=""):
    """Raise ConfigError, `where: problem; remedy`, unless the condition holds."""
    if not condition:
        message = ": ".join(str(words) for words in (where, problem) if words)
        raise ConfigError("; ".join(words for words in (message, remedy) if words))


def one_line(error):
    """An error's message on one printable line. A long one is cut in its middle."""
    text = ascii(str(error))[1:-1]
    return text if len(text) <= 1000 else f"{text[:500]} ... {text[-500:]}"


def knob(default, help_text, low=None, high=None, unit=None, form=".*"):
    """A field with its default, its line of --help and its limits: numbers, also those in a tuple,
    are `low` to `high` and multiples of `unit`, and text matches the regular expression `form`."""
    metadata = {"help": help_text, "limits": (low, high, unit, form)}
    return dataclasses.field(default=default, metadata=metadata)


def has_type(value, kind):
    """Whether a value has the type of a field. An int may stand for a float."""
    kinds = get_args(kind)
    if kinds:  # a tuple, whose items are all of one type
        is_tuple = type(value) is tuple and (... in kinds or len(value) == len(kinds))
        return is_tuple and all(has_type(item, kinds[0]) for item in value)
    return type(value) is kind or (kind is float and type(value) is int)


FORMS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def form_of(field):
    """What a user writes for a field, in words."""
    kinds = get_args(field.type)
    if not kinds:
        return FORMS[field.type]
    length = "" if ... in kinds else "two "
    whole = "whole " if kinds[0] is int else ""
    return f"{length}{whole}numbers, as in {field.default or (2, 3)}"


def check_fields(values, where=""):
    """Check the type and the limits of each field of a dataclass. Raises ConfigError."""
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        shown = f"{where}{field.name}={value!r}"
        low, high, unit, form = field.metadata["limits"]
        require(has_type(value, field.type), shown, f"must be {form_of(field)}")
        for number in value if isinstance(value, tuple) else (value,):
            require(low is None or low <= number <= high, shown, f"must be {low} to {high}")
            require(unit is None or number % unit == 0, shown, f"must be a multiple of {unit}")
        is_text = str(value).isprintable() and re.fullmatch(form, str(value), re.ASCII)
        require(is_text, shown, f"must match {form}, and be printable")


Pair = tuple[float, float]
Orders = tuple[int, ...]
Windows = tuple[int, int]  # a short and a long one
OFTEN = 1, 999_999
SIZE = 0, 10**9
PASS = ATTENTION_BLOCK, 2**24, ATTENTION_BLOCK
WINDOW = 16, 65536, 16
POSITIVE = 1e-30, 1e30
NOT_NEGATIVE = 0, 1e30
RUN_ID = r"(\w[\w.+=@-]{0,99})?"
RUN_OF = r"(\d{1,9}:\d{1,9}/\d{1,9}:\d{1,9})?"  # as `python -m records run` writes it


@dataclass(frozen=True)
class Stage:
    """One row of a track's schedule: what holds from the fraction `start` of the steps on."""

    start: float = knob(0.0, "fraction of the steps at which the stage begins", 0, 1)
    micro_batches: int = knob(8, "micro-batches of a step, which the ranks share", 1, 65536)
    document_cap: int = knob(896, "tokens of a document that attention sees at once", 1, 65536)
    # In layers with paired heads a window holds two positions a token, so half as many tokens.
    windows: Windows = knob((128, 384), "attention windows: short, long", *WINDOW)
    lr_mul: float = knob(1.0, "factor of all rates but the table's", *POSITIVE)
    mtp_weights: tuple[float, ...] = knob((1.0,), "loss weights of the tokens to come", *SIZE)
    softmax_rows: int = knob(0, "rows of the vocabulary in training's softmax; 0: all", *SIZE)


@dataclass(frozen=True)
class Layer:
    """One row of a track's model: a transformer block, and what it does beyond a plain one.

    Before a field stands what it gained: nats, the text, how measured (records/NOTES.md).
    """

    # 0.064 on English, in two layers of four, 300 steps
    attends: bool = knob(True, "it has attention, else only an MLP")
    # Nothing: on English a long window of 128 tokens is as good as one of 256
    is_long: bool = knob(False, "it attends through the long window, else through the short one")
    # Not tried alone
    value_embedding: bool = knob(False, "its values have embeddings of their tokens added")
    # 0.236 on bytes, three seeds
    shifted_keys: bool = knob(False, "half of each key is that of the token before")
    # 0.032 on bytes, three seeds; 0.011 on English
    paired_heads: bool = knob(False, "pairs of heads see each other's keys and values")
    # 0.008 on bytes, three seeds; nothing on English
    exclusive: bool = knob(False, "from each head's output it takes part of the token's own value")
    # 0.006 on English, three seeds; nothing on verse
    decides_gates: bool = knob(False, "before it a small MLP computes each token's gates of heads")
    # 0.019 on English, five seeds
    feeds_last: bool = knob(False, "the last layer mixes in its output")


def as_rows(kind, rows, **changes):
    """A tuple of objects of a kind, made of these or of dicts of their fields, with changes."""
    try:
        rows = [kind(**row) if isinstance(row, dict) else row for row in rows]
        return tuple(dataclasses.replace(row, **changes) for row in rows)
    except TypeError as error:
        name = kind.__name__
        raise ConfigError(f"{name.lower()}s: rows have the fields of a {name} ({error})") from None


@dataclass(frozen=True, kw_only=True)
class Config:
    """All values of a run. The defaults are those of the track fineweb: records/NOTES.md has their
    sources, and none has been tuned on a GPU. Raises ConfigError."""

    # --- data
    track: str = knob("fineweb", "name of the track that these values belong to")
    data: str = knob("data/fineweb10B", "folder of *_train_*.bin, *_val_*.bin and manifest.json")
    tokenizer: str = knob("gpt2", "what token ids mean; the corpus' manifest says it")
    vocab_size: int = knob(50304, "rows of embedding and head; likewise", 2, 65536)
    eot_token: int = knob(50256, "the largest id, with which documents start; likewise", 1, 65535)
    # --- schedule
    steps: int = knob(1285, "optimizer steps, the length of every schedule", *OFTEN)
    micro_batch_tokens: int = knob(16384, "tokens of a micro-batch", *PASS)
    micro_batches_a_pass: int = knob(3, "the most micro-batches of a forward pass", 1, 65536)
    stages: tuple[Stage, ...] = knob(
        (  # start, micro-batches, cap, (short, long) windows, rate, weights of tokens, softmax
            Stage(0.0, 8, 896, (128, 384), 1.0, (1.0, 0.5, 0.25), 16384),
            Stage(423 / 1285, 16, 2048, (384, 896), 1.52, (1.0, 0.5), 16384),
            Stage(847 / 1285, 24, 2048, (640, 1408), 1.73, (1.0,), 16384),
            Stage(1270 / 1285, 24, 2048, (768, 1664), 1.73),
        ),
        "rows of the schedule; fields of a stage are options, too, for all stages",
    )
    cooldown: Pair = knob((508 / 1285, 1270 / 1285), "rates fall between these fractions", 0, 1)
    final_lr: float = knob(0.15, "factor of the rates at the end of the cooldown", 0, 1)
    mean_share: float = knob(0.1, "last share of the steps, over which weights are averaged", 0, 1)
    takes_mean: bool = knob(False, "weights go half of the way to that mean, else its loss is told")
    untie_at: float = knob(0.66, "fraction at which head and embedding part", 0, 1)
    # --- model
    model_dim: int = knob(768, "width of the residual stream", GATE_DIM, 65536)
    head_dim: int = knob(128, "width of an attention head", 4, 65536, 4)
    mlp_dim: int = knob(2816, "hidden width of the ReLU^2 MLP", 1, 2**20)
    layers: tuple[Layer, ...] = knob(
        (
            Layer(paired_heads=True, decides_gates=True),
            Layer(value_embedding=True, exclusive=True),
            Layer(value_embedding=True, paired_heads=True),
            Layer(is_long=True, shifted_keys=True, exclusive=True, feeds_last=True),
            Layer(attends=False),
            Layer(attends=False),
            Layer(exclusive=True, decides_gates=True, feeds_last=True),
            Layer(attends=False),
            Layer(value_embedding=True, paired_heads=True, decides_gates=True),
            Layer(is_long=True, value_embedding=True, shifted_keys=True),
        ),
        "rows of the model, a transformer block each",
    )
    mlp_reach: int = knob(3, "tokens before its own that an MLP reads; 0: none", 0, 16)
    value_std: float = knob(0.25, "initial std of the value matrices, times sqrt(model_dim)", 0, 1)
    output_std: float = knob(0.5, "the same of the output matrices of attention", 0, 1)
    attention_scale: float = knob(0.1, "factor of scores ahead of the softmax", *POSITIVE)
    logit_cap: Pair = knob((23.0, 5.0), "(a, b): logits are a sigmoid((z + b) / 7.5)", 0, 70)
    # --- table
    ngram_orders: Orders = knob((2, 3), "orders of hashed n-grams", 2, 32)
    # They take 12 GiB over all ranks; by record #92's sizes they should gain 0.005 nats over 2^21.
    ngram_rows: int = knob(2**22, "rows of the table, for all columns", 1, 2**31 - 1)
    copy_orders: Orders = knob((2, 3, 5, 8), "orders of copies from the document", 2, 32)
    copy_reach: int = knob(2048, "tokens that copies look back", *SIZE)
    # 0.06 nats on English, two seeds, 0.014 on verse; on a GPU not measured
    pointer_window: int = knob(128, "tokens that the pointer looks back; 0: none", 0, 65536, 16)
    # --- optimizer
    matrix_update: str = knob("muon", "rule of the hidden matrices, a row of UPDATE_RULES")
    matrix_lr: float = knob(0.023, "RMS of a matrix's step times sqrt(columns)", *POSITIVE)
    momentum: float = knob(0.95, "Muon's momentum, which rises from 0.85 and falls to it", 0, 0.999)
    matrix_decay: float = knob(1.2, "cautious decay of matrices, times lr squared", *NOT_NEGATIVE)
    basis_every: int = knob(10, "soap rules: steps between new eigenbases", *OFTEN)
    one_sided_above: int = knob(1024, "soap rules: a larger side has no eigenbasis", *SIZE)
    adam_lr: float = knob(0.008, "rate of embeddings, head and scalars under Adam", *POSITIVE)
    embed_lr: float = knob(1.0, "rate of embedding and head, as a multiple of adam_lr", *POSITIVE)
    adam_every: int = knob(2, "Adam steps every k-th step, on the sum of gradients", *OFTEN)
    ngram_lr: float = knob(0.15, "the table's constant rate (Adagrad); 0: frozen", *NOT_NEGATIVE)
    ngram_floor: float = knob(0.2, "a row slows down below this gradient RMS", *POSITIVE)
    # --- evaluation
    val_tokens: int = knob(10_485_760, "validation tokens that are scored", 1, 10**9)
    val_sha256: str = knob("", "sha256 of those tokens and the next (uint16), which boards compare")
    val_batch_tokens: int = knob(65536, "validation tokens of a forward pass", *PASS)
    val_windows: Windows = knob((768, 2560), "windows of the final validation", 16, 65536, 16)
    val_every: int = knob(250, "validate every so many steps (untimed); 0: at the end", *SIZE)
    target_loss: float = knob(3.28, "the target, in nats a token; 0: none", *NOT_NEGATIVE)
    # --- bookkeeping
    log_every: int = knob(20, "log the training loss every so many steps", *OFTEN)
    save_every: int = knob(0, "steps between checkpoints, of which two are kept; 0: none", *SIZE)
    run_id: str = knob("", "folder under logs/; empty: drawn from date and time", form=RUN_ID)
    resume: str = knob("", "run id or checkpoint to go on with; auto: --run-id, if it is there")
    run_of: str = knob("", "BATCH:COUNTER/RUNS:START, the run's place in a record", form=RUN_OF)
    # --- machine
    seed: int = knob(-1, "seed of weights and data order; -1: drawn", -1, 2**63 - 1)
    device: str = knob("auto", "where it computes", form="auto|cpu|cuda")
    dtype: str = knob("bfloat16", "of matrices and activations", form="bfloat16|float32")
    attention: str = knob("auto", "back end of attention", form="auto|sdpa")
    matmul_precision: str = knob("highest", "of float32 products, on a CPU", form="highest|medium")
    compile: bool = knob(True, "compile the model with torch.compile")

    def __post_init__(self):
        for name, kind in (("stages", Stage), ("layers", Layer)):
            rows = as_rows(kind, getattr(self, name))
            object.__setattr__(self, name, rows)
            for number, row in enumerate(rows):
                check_fields(row, f"{name}[{number}].")
        check_fields(self)
        self.check_together()

    def check_together(self):
        """Check what depends on several fields, where a run would fail obscurely, or go wrong."""
        self.check_schedule()
        is_inside = self.eot_token < self.vocab_size
        require(is_inside, f"vocab_size={self.vocab_size}", "must be above eot_token")
        self.check_multiple("model_dim", "head_dim")
        self.check_multiple("val_tokens", "val_batch_tokens")
        self.check_multiple("save_every", "adam_every")  # gradients that wait are not saved
        heads = self.model_dim // self.head_dim
        for number, layer in enumerate(self.layers):
            where = f"layers[{number}]"
            is_even = not layer.paired_heads or heads % 2 == 0
            require(is_even, where, f"paired_heads: {heads} heads make no pairs")
            kinds = layer.value_embedding, layer.shifted_keys, layer.paired_heads, layer.exclusive
            require(layer.attends or not any(kinds), where, "has no attention to change")
            has_gates = not layer.decides_gates or self.layers_gated_by(number)
            require(has_gates, where, "decides_gates: no layer has attention until the next such")
        # cap_slope divides by the cap.
        cap_is_positive = self.logit_cap[0] > 0
        require(cap_is_positive, f"logit_cap={self.logit_cap}", "must begin above 0")
        is_closed = self.layers and not self.layers[-1].feeds_last
        require(is_closed, "layers", "must be one or more, and the last has no feeds_last")
        require(self.resume != "auto" or self.run_id, "resume=auto", "needs --run-id")

    def check_multiple(self, name, unit):
        """Refuse a field that is no multiple of another one."""
        value = getattr(self, name)
        size = getattr(self, unit)
        require(value % size == 0, f"{name}={value}", f"must be a multiple of {unit}={size}")

    def check_schedule(self):
        """Check the edges of the schedule, which must rise, and what the stages say together."""
        starts = [stage.start for stage in self.stages]
        is_rising = starts == sorted({0, *starts})
        require(is_rising, f"stages: starts {starts} must begin at 0, and then rise")
        low, high = self.cooldown
        require(low <= high, f"cooldown={self.cooldown}", "must not fall, as in (0.4, 1.0)")
        for stage in self.stages:
            require(stage.mtp_weights, "mtp_weights=()", "must be one or more")
            rows = stage.softmax_rows  # among which is each token of a micro-batch
            least = self.micro_batch_tokens
            message = f"must be 0, or at least micro_batch_tokens={least}"
            require(rows == 0 or rows >= least, f"softmax_rows={rows}", message)

    @property
    def torch_dtype(self):
        """The type of matrices and activations."""
        return getattr(torch, self.dtype)

    def layers_with(self, field):
        """Numbers of the layers where this field of their row is set."""
        return [number for number, layer in enumerate(self.layers) if getattr(layer, field)]

    def layers_gated_by(self, number):
        """Numbers of the layers whose gates this layer decides: until the next one that decides."""
        later = [layer for layer in self.layers_with("decides_gates") if layer > number]
        end = min(later, default=len(self.layers))
        return [layer for layer in self.layers_with("attends") if number <= layer < end]


TRACKS = {
    "fineweb": Config(),
    # fineweb's recipe at small scale, for a CPU: a twelfth of its channels, and two layers.
    "english": Config(
        track="english",
        data="data/english",
        tokenizer="english1024.tiktoken",
        vocab_size=1024,
        eot_token=1023,
        steps=127,
        micro_batch_tokens=1024,
        micro_batches_a_pass=4,
        stages=(
            Stage(0.0, 2, 512, (64, 128)),
            Stage(0.25, 4, 512, (64, 128), 1.2),
            Stage(0.6, 8, 512, (64, 128), 1.4),
        ),
        cooldown=(0.25, 1.0),
        final_lr=0.3,
        mean_share=0.25,
        takes_mean=True,
        untie_at=0.0,
        model_dim=64,
        layers=(
            Layer(attends=False, feeds_last=True),
            Layer(is_long=True, value_embedding=True, shifted_keys=True),
        ),
        head_dim=32,
        mlp_dim=128,
        mlp_reach=0,
        value_std=0.6,
        output_std=0.0,  # every block starts as the identity
        attention_scale=0.24,
        logit_cap=(30.0, 0.0),
        ngram_orders=(2, 3, 4),
        ngram_rows=2**20,
        copy_orders=(2, 4),
        matrix_lr=0.032,
        momentum=0.9,
        adam_lr=0.022,
        adam_every=1,
        embed_lr=2.0,
        ngram_lr=0.4,
        val_tokens=262_144,
        val_sha256="cdf79be5415e8fdfa3e67f5e38a2d95a0db7abc021b652193350bc2f69c021f1",
        val_batch_tokens=4096,
        val_windows=(64, 160),
        val_every=0,
        target_loss=2.954,
        dtype="float32",
        # On a CPU with AVX-512 torch then multiplies by oneDNN, not by MKL: on AMD in half the
        # time, at equal precision. Intel's AMX and ARM's units may round to bfloat16.
        matmul_precision="medium",
        compile=False,  # compiling takes longer than the run
    ),
}


def stages_until(config, step):
    """The Stages that have begun at a step."""
    return [stage for stage in config.stages if stage.start * config.steps <= step]


def stage_at(config, step):
    """The Stage that is in force at a step."""
    return stages_until(config, step)[-1]


def loss_weights_at(config, step):
    """The loss weights at a step, of the next token, the second-next, and so on: those of the
    stage, which move in a line towards the next stage's."""
    starts = [stage.start * config.steps for stage in config.stages]
    rows = [stage.mtp_weights for stage in config.stages]
    columns = itertools.zip_longest(*rows, fillvalue=0.0)
    weights = [np.interp(step, starts, column) for column in columns]
    return tuple(weights[: len(stage_at(config, step).mtp_weights)])


def micro_batches_at(config, step):
    """The number of micro-batches of a step, on all ranks."""
    return stage_at(config, step).micro_batches


def micro_batches_of_pass(config, step, runtime):
    """Micro-batches of each forward pass of a rank: as many as micro_batches_a_pass allows, but the
    same number in all passes of a step, since each number is compiled anew."""
    of_rank = len(range(runtime.rank, micro_batches_at(config, step), runtime.world_size))
    return max(n for n in range(1, config.micro_batches_a_pass + 1) if of_rank % n == 0)


def training_tokens(config, until=None):
    """How many tokens the steps before `until` train on, or all steps."""
    steps = range(config.steps)[:until]
    return sum(micro_batches_at(config, step) for step in steps) * config.micro_batch_tokens


def lr_multiplier(config, step):
    """The stage's factor, then a linear fall to final_lr in the cooldown."""
    edges = [share * config.steps for share in config.cooldown]
    return float(np.interp(step, edges, (stage_at(config, step).lr_mul, config.final_lr)))


def momentum_at(config, step):
    """Muon's momentum: a linear rise, a plateau, and a linear fall at the end."""
    edges = 0, 300 / 1285, 1235 / 1285, 1  # as shares of the steps
    values = 0.85, config.momentum, config.momentum, 0.85
    return float(np.interp(step / config.steps, edges, values))


def untie_step(config):
    """The first step that updates head and embedding apart; before it their weights are equal. A
    cycle of Adam begins there, so that the gradients of a cycle are of one model."""
    cycles = math.ceil(round(config.untie_at * config.steps) / config.adam_every)
    return cycles * config.adam_every


def long_windows_until(config, step):
    """The long windows that training has used until a step, in order: what YaRN needs to know."""
    used = [stage.windows[-1] for stage in stages_until(config, min(step, config.steps - 1))]
    return tuple(window for window, _ in itertools.groupby(used))


# 2. Layers ========================================================================================

NORM_EPS = torch.finfo(torch.float32).eps


class NormOnCPU(torch.autograd.Function):
    """norm() of float32 in few passes over memory: torch's takes several times as long on a CPU.

    It casts nothing: torch 2.11 compiles a Function that ends with a cast to the same type into one
    whose gradient is zero.
    """

    @staticmethod
    def forward(ctx, x):
        scale = (x.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, scale = ctx.saved_tensors
        along = (grad * y).mean(-1, keepdim=True)
        return (grad - along * y) * scale


def norm(x):
    """RMSNorm over the last axis, without weights."""
    if x.device.type == "cpu":
        return NormOnCPU.apply(x.float()).to(x.dtype)
    return F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)


def rotary_tables(length, head_dim, long_windows, device, dtype):
    """Rotary position embedding: (cos, sin), each (length, 1, head_dim). The first half belongs to
    the first channel of each pair, the second half to the second channel; there sin is negated.

    Half of the channel pairs rotate, by 1 to 1/1024 radians a token. For each change of the long
    window, which is one of long_windows, YaRN (Peng et al. 2023) slows the pairs that turn less
    than once in the old window by old/new, leaves those that turn over 32 times, and multiplies
    scores by 0.2 ln(new/old) + 1: queries and keys by its root. Angles are float64, so that late
    positions are exact.
    """
    root = 1.0
    pairs = head_dim // 2
    turning = (1 / 1024) ** torch.linspace(0, 1, pairs // 2, dtype=torch.float64)
    speed = F.pad(turning, (0, pairs - pairs // 2))
    for old, new in itertools.pairwise(long_windows):
        turns = old * speed / (2 * math.pi)
        kept = ((turns - 1) / 31).clamp(0, 1)
        speed = speed * (old / new + kept * (1 - old / new))
        root = root * (0.2 * math.log(new / old) + 1) ** 0.5
    angle = torch.arange(length, dtype=torch.float64)[:, None, None] * speed
    cos = root * torch.cat([angle.cos(), angle.cos()], dim=-1)
    sin = root * torch.cat([angle.sin(), -angle.sin()], dim=-1)
    return cos.to(device, dtype), sin.to(device, dtype)


def rotate(x, cos, sin):
    """Rotate the channel pairs of x (T, heads, head_dim) by the angles of their positions, whose
    cosines and sines are those of rotary_tables."""
    swapped = x.roll(x.size(-1) // 2, -1)
    return x * cos + swapped * sin


def shifted(k, is_first):
    """Keys (T, heads, head_dim) with the channels that do not rotate from the token before, or 0
    where is_first (T,). With them one layer finds what has followed a token before (modded-nanogpt,
    record of 2025-12-14)."""
    turning, still = k.unflatten(-1, (2, 2, -1)).unbind(-2)  # of each half of the channel pairs
    still = F.pad(still, (0, 0, 0, 0, 0, 0, 1, -1)).masked_fill(is_first[:, None, None, None], 0)
    return torch.stack([turning, still], dim=-2).flatten(-3)


def in_pairs(x):
    """Heads (T, heads, dim) as (2 T, heads / 2, dim): for each token one of a pair, then the other.
    So each sees the keys of both (modded-nanogpt, record of 2026-01-07)."""
    return x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(0, 1)


def out_of_pairs(y):
    """The inverse of in_pairs."""
    return y.unflatten(0, (-1, 2)).transpose(1, 2).flatten(1, 2)


def exclusive_attention(y, v, share):
    """Outputs of attention (T, heads, dim) less a share (T, heads, 1) of their part along v, the
    token's own value, which the residual stream has anyway (XSA, arXiv 2603.09078)."""
    along = (y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True).clamp_min(1e-8)
    return y - share * along * v


def convolved(x, kernel, position):
    """Each token of x (T, dim) plus shares of those before it in its segment: a Canon layer
    (Allen-Zhu 2025, arXiv 2512.17351). kernel: (reach, dim), the shares of the last token, of the
    one before that, and so on. position: (T,), of each token in its segment."""
    total = x
    for back, share in enumerate(kernel, start=1):
        # Multiplied before it is shifted, so that the gradient needs nothing but x.
        before = F.pad(share * x, (0, 0, back, -back))
        total = total + before.masked_fill((position < back)[:, None], 0)
    return total


GATE_MLP_DIM = 64  # hidden width
GATE_MLP_SCALE = 0.1  # of its outputs
POINTER_DIM = 32  # of the pointer's queries and keys


def gate(x, weight):
    """Learned gates in (0, 2), 1 at the start: (T, n), from the first channels of x (T, model_dim);
    weight (n, GATE_DIM)."""
    return 2 * torch.sigmoid(F.linear(x[:, :GATE_DIM], weight))


# 3. Attention =====================================================================================


# A block of queries attends to the keys of its own block and of the blocks before it that the
# window reaches. So time is linear in T.


def visible_keys(first, window):
    """Which keys each query sees: (blocks, block, window + block), whether query i sees key j,
    max(first[i], i - window + 1) <= j <= i. The keys of a block start `window` positions before its
    queries. first: (n,) int32."""
    block = math.gcd(window, ATTENTION_BLOCK)
    options = {"dtype": torch.int32, "device": first.device}
    start = torch.arange(0, len(first), block, **options)[:, None]
    # From here on positions count from the start of their block.
    query = torch.arange(block, **options)
    key = torch.arange(-window, block, **options)
    first = torch.maximum(first.view(-1, block) - start, query - window + 1)
    return (key >= first[:, :, None]) & (key <= query[:, None])


def reached(x, window):
    """What each block of queries reaches of x (n, ...): (blocks, window + block, ...), zeros before
    the first. The gradient of these slices is a copy; that of unfold is slow on a CPU."""
    block = math.gcd(window, ATTENTION_BLOCK)
    before = x.new_zeros(window, *x.shape[1:])
    blocks = torch.cat([before, x]).unflatten(0, (-1, block))
    count = len(x) // block
    slices = [blocks[low : low + count] for low in range(window // block + 1)]
    return torch.cat(slices, dim=1)


class BlockedAttention:
    """Back end `sdpa`: softmax attention on any device. On a CPU it multiplies whole blocks, while
    torch's fused kernel multiplies small parts of them, which oneDNN does slowly. In layers with
    paired heads a token has two positions.
    """

    def __init__(self, is_fused):
        self.is_fused = is_fused

    def mask(self, micro_batch, window, positions, phase, dtype):
        """What is added to scores, (blocks, 1, block, window + block): 0 or -inf."""
        start = (positions * micro_batch.segment_start).repeat_interleave(positions)
        return torch.where(visible_keys(start, window), 0.0, -math.inf).to(dtype)[:, None]

    def attend(self, q, k, v, mask, scale):
        """Attention of q, k, v (n, heads, head_dim), n a multiple of the block: the same shape."""
        window = mask.size(3) - mask.size(2)
        queries = q.unflatten(0, (len(mask), -1)).transpose(1, 2)
        keys, values = (reached(x, window).transpose(1, 2) for x in (k, v))
        if self.is_fused:
            y = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        else:
            scores = (scale * queries) @ keys.mT + mask
            y = scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ values
        return y.transpose(1, 2).reshape(q.shape)


class VarlenAttention:
    """Back end `varlen`: FlashAttention over packed segments (CUDA, half precision).

    For each head and segment its grid has a block for every 128 tokens of the longest segment.
    """

    def __init__(self, is_fa3=False):
        from torch.nn.attention.varlen import varlen_attn

        self.varlen_attn = varlen_attn
        # FlashAttention 3 would split keys, as blocks are few: partial sums, a second kernel. Torch
        # 2.11 does not let us choose.
        can_choose = "num_splits" in inspect.signature(varlen_attn).parameters
        self.options = {"num_splits": 1} if is_fa3 and can_choose else {}

    def mask(self, micro_batch, window, positions, phase, dtype):
        """(bounds of the segments, the longest one, the window), in positions."""
        return positions * micro_batch.segment_bounds, positions * phase.max_segment, window

    def attend(self, q, k, v, mask, scale):
        bounds, longest, window = mask
        both = bounds, bounds, longest, longest  # of queries and of keys
        sides = window - 1, 0
        return self.varlen_attn(q, k, v, *both, scale=scale, window_size=sides, **self.options)


def choose_attention(config, device):
    """The back end of attention, and its description for the log."""
    capability = (0, 0)
    if device.type == "cuda" and config.dtype == "bfloat16":
        capability = torch.cuda.get_device_capability(device)
    if config.attention == "sdpa" or capability < (8, 0):
        return BlockedAttention(is_fused=device.type == "cuda"), "sdpa"
    if capability[0] != 9 or not importlib.util.find_spec("flash_attn_interface"):
        return VarlenAttention(), "varlen-FA2"
    torch.nn.attention.activate_flash_attention_impl("FA3")
    return VarlenAttention(is_fa3=True), "varlen-FA3"


# 4. Loss ==========================================================================================

# Tokens whose logits exist at a time: on a CPU those of more leave its cache, and on a GPU those of
# fewer are more kernels to compile and to launch.
LOSS_CHUNK = {"cpu": 256, "cuda": 8192}
CAP_WIDTH = 7.5  # of the sigmoid that caps logits
BIT = math.log(2)  # in nats. Exponents are in bits: on a CPU exp2 takes a quarter of exp's time.
SPREAD = 2654435769  # 2^32 over the golden ratio: multiples of it lie far from each other


class CappedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of soft-capped logits, and its gradients, in one pass over the logits.

    With the capped logits' distances d <= 0 from the cap in bits, see below_cap(),
        p(target t)  =  share exp2(d_t) / sum_v exp2(d_v) + pointed
    So no maximum is needed, and gradients times the sum can be written before the sum is known:
    dividing rows by it commutes with the products that follow. The targets' columns are corrected
    afterwards. Logits learn from a loss by the part of p that is the softmax's.

    hidden (T, dim); head (V, dim); targets (T, K) int64: K tokens that a position predicts, and
    weights (T, K) of their losses; share, pointed (T, K): of the softmax, and what the pointer adds
    to the target's probability; multiplicity (V,) or None: how many rows of the vocabulary each row
    of head stands for, 1 for targets; cap: Config.logit_cap. Returns (the weighted sum of losses;
    losses (T,) of the first targets, detached).
    """

    @staticmethod
    def forward(ctx, hidden, head, share, pointed, targets, weights, multiplicity, cap):
        needs_grad = ctx.needs_input_grad[0]
        # Where a position has one target twice, both places get the sum of their weights.
        is_same = targets[:, :, None] == targets[:, None]
        probabilities = []
        hidden_grads = []
        head_grad = torch.zeros_like(head) if needs_grad else None
        length = LOSS_CHUNK[hidden.device.type]
        for low in range(0, len(hidden), length):
            chunk = slice(low, low + length)
            x = hidden[chunk]
            target = targets[chunk]
            product = x @ head.T
            below = below_cap(product, cap)
            exp_logits = torch.exp2(below)
            if multiplicity is not None:
                exp_logits = exp_logits * multiplicity
            sum_exp = exp_logits.sum(1, keepdim=True)
            # From the product, which is stored anyway; compiled code never stores the distances.
            target_below = below_cap(product.gather(1, target), cap)
            target_exp = torch.exp2(target_below)
            probability = target_exp / sum_exp
            probabilities.append(probability)
            if needs_grad:
                of_softmax = share[chunk] * probability
                weight = weights[chunk] * of_softmax / (of_softmax + pointed[chunk])
                target_weight = (is_same[chunk] * weight[:, None]).sum(-1)
                scale = weight.sum(1, keepdim=True) / sum_exp
                wanted = target_weight / scale.clamp_min(1e-30)
                target_grad = (target_exp - wanted) * cap_slope(target_below, cap)
                grad = exp_logits.mul_(cap_slope(below, cap)).to(x.dtype)
                grad.scatter_(1, target, target_grad.to(x.dtype))
                scale = scale * (-BIT / CAP_WIDTH)  # which cap_slope leaves out
                hidden_grads.append(((grad @ head) * scale).to(x.dtype))
                head_grad = torch.addmm(head_grad, grad.T, (x * scale).to(x.dtype))
        probability = torch.cat(probabilities)
        mixed = share * probability + pointed
        losses = -mixed.log()
        if needs_grad:
            mixed_grad = -weights / mixed
            grads = mixed_grad * probability, mixed_grad
            ctx.save_for_backward(torch.cat(hidden_grads), head_grad, *grads)
        first = losses[:, 0].clone()
        ctx.mark_non_differentiable(first)
        return (losses * weights).sum(), first

    @staticmethod
    def backward(ctx, upstream, _):
        grads = [grad * upstream for grad in ctx.saved_tensors]
        return *grads, None, None, None, None


def below_cap(products, cap):
    """(logits - top) / BIT, float32, at most 0. A logit is top sigmoid((z + shift) / CAP_WIDTH) of
    the product z of a hidden state and a row of the head."""
    top, shift = cap
    scaled = torch.rsub(products.float(), -shift / CAP_WIDTH, alpha=1 / CAP_WIDTH)
    return scaled.sigmoid_().mul_(-top / BIT)


def cap_slope(below, cap):
    """-CAP_WIDTH / BIT times the derivative of a capped logit by its product: with b = below,
    b + b^2 BIT / top."""
    return torch.addcmul(below, below, below, value=BIT / cap[0])


def sampled_rows(targets, vocab, size):
    """Choose `size` rows of the vocabulary, at least T, for a softmax: all targets (T,), and
    others, spread over the ids in an order that depends on the targets.

    Returns (rows (size,) int64, rising; positions (vocab,): where each chosen row stands among
    them, meaningless for the others; multiplicity (size,) float32: how many rows of the vocabulary
    each one stands for, so that the sum of exponentials is right on average).
    """
    ids = torch.arange(vocab, device=targets.device)
    is_target = torch.zeros_like(ids).index_fill(0, targets, 1)
    turn = (ids + targets.sum()) * SPREAD % 2**31
    rows = (turn + is_target * 2**31).topk(size).indices.sort().values
    positions = torch.zeros_like(ids).scatter(0, rows, ids[:size])
    distinct_targets = is_target.sum()
    of_others = (vocab - distinct_targets) / (size - distinct_targets).clamp_min(1)
    # A buffer of its own: compiled code would work out torch.where again for every logit. It must
    # be repeat: torch 2.13 compiles expand to wrong numbers here, without an error.
    multiplicity = of_others.repeat(size).index_fill(0, positions[targets], 1.0)
    return rows, positions, multiplicity


def summed_loss(
    hidden, share, pointed, targets, segment_start, head, softmax_rows, loss_weights, cap
):
    """(training loss, weighted and summed over tokens; losses (T,) of the next token).

    share, pointed: (T,), see CappedCrossEntropy, of the next token; later ones are the softmax's
    alone. targets, segment_start: (T,), of a MicroBatch. softmax_rows: see Phase. loss_weights:
    float32, of the next token, the second-next, and so on.
    """
    multiplicity = None
    if softmax_rows:
        rows, positions, multiplicity = sampled_rows(targets, len(head), softmax_rows)
        head = head.index_select(0, rows)
        targets = positions[targets]
    predicted = []
    weights = []
    for ahead, weight in enumerate(loss_weights):
        # A position also predicts the token `ahead` behind its target, within its segment.
        is_same_segment = segment_start[ahead:] == segment_start[: len(hidden) - ahead]
        predicted.append(targets.roll(-ahead))
        weights.append(F.pad(is_same_segment * weight, (0, ahead)))
    predicted = torch.stack(predicted, 1)
    weights = torch.stack(weights, 1)
    later = 0, len(loss_weights) - 1
    mixture = F.pad(share[:, None], later, value=1.0), F.pad(pointed[:, None], later)
    return CappedCrossEntropy.apply(hidden, head, *mixture, predicted, weights, multiplicity, cap)


# 5. Model =========================================================================================


@dataclass(frozen=True)
class Rule:
    """How a parameter starts, and how the optimizer steps it: its group, and its own numbers beside
    those of the group. Most numbers are modded-nanogpt's.

    Decay is by the group's rate times the parameter's, and only where update and weight agree in
    sign.
    """

    group: str = "small"  # a row of parameter_groups()
    std: float | Tensor = 0.0  # of its first values, which are drawn; 0: they are as given
    lr_mul: float | Tensor = 1.0  # times the group's rate, or one factor for each matrix, (k, 1, 1)
    decay: float = 0.0  # times the group's decay
    betas: tuple = (0.9, 0.99)  # Muon and SOAP-Muon read the second; the first follows a schedule


def ruled(values, **rule):
    """A parameter that starts with these values and carries its Rule."""
    param = nn.Parameter(values)
    param.rule = Rule(**rule)
    return param


def matrices(config, *shape, **rule):
    """Matrices (k, m, n) of attention or an MLP, which the rule `matrix_update` steps."""
    values = torch.zeros(shape, dtype=config.torch_dtype)
    return ruled(values, group="matrices", decay=1.0, betas=(0.9, 0.9), **rule)


def embedding(config, **rule):
    """A row of model_dim numbers for each token of the vocabulary."""
    values = torch.zeros(config.vocab_size, config.model_dim, dtype=config.torch_dtype)
    return ruled(values, group="embeddings", **rule)


def gates(config, outputs, **rule):
    """Weights (outputs, GATE_DIM) of gates, see gate(), which are 1 at first."""
    return ruled(torch.zeros(outputs, GATE_DIM, dtype=config.torch_dtype), **rule)


class TokenRows(torch.autograd.Function):
    """Rows (U, dim) of an embedding (V, dim), those of distinct tokens (U,).

    Their gradient is added to these rows of the embedding's, where autograd would make one of the
    whole vocabulary in each pass, and add that.
    """

    @staticmethod
    def forward(ctx, param, tokens):
        ctx.param = param
        ctx.save_for_backward(tokens)
        return param[tokens]

    @staticmethod
    def backward(ctx, grad):
        param = ctx.param
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad.index_add_(0, *ctx.saved_tensors, grad)
        return None, None


@torch.no_grad()
def draw_parameters(model, seed):
    """Draw the first values of a model's parameters, each with a generator of its own, seeded by
    (seed, name). So two scripts start from equal weights in all that they share."""
    for name, param in model.named_parameters():
        if torch.as_tensor(param.rule.std).any():
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
            param.copy_(torch.randn(param.shape, generator=generator) * param.rule.std)


class GateMLP(nn.Module):
    """A small MLP that computes n numbers of each token, 0 at first or `bias`: gates of heads, or
    weights of states."""

    def __init__(self, config, outputs, bias=None):
        super().__init__()
        dim = config.model_dim
        up = torch.zeros(GATE_MLP_DIM, dim, dtype=config.torch_dtype)
        self.up = ruled(up, std=(3 * dim) ** -0.5, lr_mul=0.25)
        self.down = ruled(up.new_zeros(outputs, GATE_MLP_DIM), lr_mul=0.25)
        self.bias = None if bias is None else ruled(bias / GATE_MLP_SCALE, lr_mul=0.25)

    def forward(self, x):
        """(T, n), of x (T, model_dim)."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return GATE_MLP_SCALE * F.linear(F.gelu(F.linear(x, self.up)), self.down, bias)


class Scene(NamedTuple):
    """What all blocks of a forward pass read."""

    slots: Tensor  # (T,) int32: where each token's rows stand among those of the embeddings
    position: Tensor  # (T,) of each token in its segment
    rotary: tuple  # see rotary_tables
    masks: dict  # {(is_long, paired_heads): the back end's mask}


class Block(nn.Module):
    """A transformer block: the parameters and the work of one row of Config.layers.

    Matrices have a leading axis. `query_key` is (k, m * head_dim, model_dim): q and k, cut into
    groups of m heads, each of which is one matrix to Muon: pairs of heads, or all heads where their
    number is odd. `value_output` is (2, model_dim, model_dim). `mlp` is (2, mlp_dim, model_dim), up
    and the transpose of down.
    """

    def __init__(self, config, number, back_end):
        super().__init__()
        layer = config.layers[number]
        self.config = config
        self.layer = layer
        self.back_end = back_end
        dim = config.model_dim
        heads = dim // config.head_dim
        std = 0.6 / math.sqrt(dim)
        if layer.attends:
            width = dim if heads % 2 else 2 * config.head_dim
            self.query_key = matrices(config, 2 * dim // width, width, dim, std=std)
            stds = torch.tensor([config.value_std, config.output_std]) / math.sqrt(dim)
            self.value_output = matrices(config, 2, dim, dim, std=stds[:, None, None])
        if layer.value_embedding:
            rule = {"lr_mul": 75.0, "decay": 1.875, "betas": (0.75, 0.95)}
            self.value_embed = embedding(config, std=0.01, **rule)
        if layer.exclusive:
            self.exclusive_gate = gates(config, heads)
        if layer.decides_gates:
            self.gated = config.layers_gated_by(number)
            self.gate_mlp = GateMLP(config, len(self.gated) * heads)
        rates = torch.tensor([1.0, 2.0])[:, None, None]
        stds = torch.tensor([std, 0.0])[:, None, None]
        self.mlp = matrices(config, 2, config.mlp_dim, dim, std=stds, lr_mul=rates)
        kernel = torch.zeros(config.mlp_reach, dim, dtype=config.torch_dtype)
        self.mlp_kernel = ruled(kernel, lr_mul=3.0)
        self.ngram_gate = gates(config, 1)
        # They multiply what attention and MLP add, and step by twice the matrices' rate: five times
        # Adam's, as others have it, was too much on english.
        lr_mul = 2 * config.matrix_lr / config.adam_lr
        self.output_scale = ruled(torch.ones(1 + layer.attends), lr_mul=lr_mul)

    @torch.no_grad()
    def start_shifted_keys(self):
        """Let a token attend to what followed its like, from the first step on: the half of a key
        that is of the token before starts as that token's query, the other half as zero."""
        heads = self.config.model_dim // self.config.head_dim
        # By q or k, head, side of a pair of channels, and whether the pair rotates or not.
        queries, keys = self.query_key.view(2, heads, 2, 2, -1, self.config.model_dim)
        keys[:, :, 0] = 0
        keys[:, :, 1] = queries[:, :, 1]

    def attention(self, x, scene, value_rows=None, mixture=None, head_gates=None):
        """What attention adds to the residual stream, computed from x (T, model_dim).

        value_rows (U, model_dim): of the layer's value embedding, see token_rows. mixture
        (T, model_dim), or None, is added to the values. head_gates: (T, heads), or None; each token
        scales each head's output by 1 + its own.
        """
        config = self.config
        layer = self.layer
        cos, sin = scene.rotary
        heads = config.model_dim // config.head_dim
        value, output = self.value_output.unbind()
        weights = torch.cat([self.query_key.flatten(0, 1), value])
        qkv = F.linear(norm(x), weights).view(len(x), -1, config.head_dim)
        qk, v = qkv.split([2 * heads, heads], dim=1)
        if layer.value_embedding:
            v = v + F.embedding(scene.slots, value_rows).view_as(v)
        if mixture is not None:
            v = v + mixture.view_as(v)
        qk = norm(qk)  # of all heads, queries before keys
        if layer.shifted_keys:
            q, k = qk.chunk(2, dim=1)
            qk = torch.cat([q, shifted(k, scene.position == 0)], dim=1)
        values = v
        if layer.paired_heads:
            qk = in_pairs(qk)
            values = in_pairs(v)
        q, k = rotate(qk, cos[: len(qk)], sin[: len(qk)]).chunk(2, dim=1)
        mask = scene.masks[layer.is_long, layer.paired_heads]
        y = self.back_end.attend(q, k, values, mask, config.attention_scale)
        if layer.paired_heads:
            y = out_of_pairs(y)
        if layer.exclusive:
            removed = gate(x, self.exclusive_gate) - 1
            y = exclusive_attention(y, v, removed[..., None])
        if head_gates is not None:
            y = y * (1 + head_gates)[..., None]
        # Scaling the last matrix scales what is added, with less to read and keep.
        return F.linear(y.flatten(1), self.output_scale[0] * output)

    def feed_forward(self, x, scene):
        """What the MLP adds to the residual stream x (T, model_dim)."""
        up, down = self.mlp.unbind()
        mlp_input = convolved(norm(x), self.mlp_kernel, scene.position)
        return F.relu(F.linear(mlp_input, up)).square() @ (self.output_scale[-1] * down)


class Mixer(nn.Module):
    """Dense connections of the last block, those of MUDD (Xiao et al. 2025): weighted sums of
    earlier states, whose weights a small MLP computes for each token.

    Two sums enter the block, into its values and into its input. A third one, which has the first
    value embedding among its states, is added behind it.
    """

    def __init__(self, config):
        super().__init__()
        states = 2 + len(config.layers_with("feeds_last"))
        self.before = GateMLP(config, 2 * states, torch.zeros(2 * states))
        bias = torch.zeros(states + bool(config.layers_with("value_embedding")))
        bias[states - 2] = -0.5  # of the last layer that feeds it: modded-nanogpt's backout
        self.behind = GateMLP(config, len(bias), bias)

    def enter(self, states):
        """What is added to the values of the last block, and to its input, from the states
        [(T, model_dim)]. The last state is that input."""
        weights = self.before(states[-1]).chunk(2, dim=1)
        return [weighted_sum(weight, states) for weight in weights]

    def leave(self, x, states):
        """What is added to x (T, model_dim) behind the last block."""
        return weighted_sum(self.behind(x), states)


class States(NamedTuple):
    """All that predictions are made of. The probability of token v after a position is
    share * softmax(logits)_v + weight * (the sum of the scores of tokens that are v).
    """

    hidden: Tensor  # (T, model_dim), normalised
    share: Tensor  # (T,) float32, of the softmax
    weight: Tensor  # (T,) float32
    scores: Tensor  # (T, n) float32, of the tokens that the pointer reaches
    tokens: Tensor  # (T, n) int32; where there is none, 0 with score 0

    def at(self, index):
        """The States at an index of positions."""
        return States(*(tensor[index] for tensor in self))


class Pointer(nn.Module):
    """Attention of final states on those before them in the segment, which gives probability to the
    tokens that followed these (pointer sentinel mixture, Merity et al. 2016; modded-nanogpt #379).
    """

    def __init__(self, config):
        super().__init__()
        self.window = config.pointer_window
        dim = config.model_dim
        projections = torch.zeros(2, POINTER_DIM, dim, dtype=config.torch_dtype)
        self.projections = ruled(projections, std=dim**-0.5, lr_mul=0.25)
        self.log_scale = ruled(torch.full((1,), math.log(10.0)))
        self.sink = ruled(torch.zeros(1), lr_mul=5.0)
        self.gate = ruled(torch.zeros(1, dim, dtype=config.torch_dtype), lr_mul=0.5)
        self.bias = ruled(torch.full((1,), -3.0), lr_mul=5.0)

    def forward(self, hidden, micro_batch):
        """The States of final hidden states (T, model_dim)."""
        both = F.linear(hidden, self.projections.flatten(0, 1)).float()
        query, key = F.normalize(both.unflatten(1, (2, -1)), dim=2).unbind(1)
        # A token's key is of the state before it, which the token has followed.
        keys = reached(F.pad(key, (0, 0, 1, -1)), self.window)
        # The scale is bounded, so exponentials are finite as they are.
        scale = self.log_scale.clamp(max=4).exp() / BIT
        queries = (scale * query).view(len(keys), -1, POINTER_DIM)
        is_visible = visible_keys(micro_batch.segment_start + 1, self.window).float()
        scores = (torch.exp2(queries @ keys.mT) * is_visible).flatten(0, 1)
        tokens = (reached(micro_batch.inputs, self.window)[:, None] * is_visible).flatten(0, 1)
        # The sink's part of the attention goes back to the softmax.
        sink = self.sink.exp()
        gate = torch.sigmoid(F.linear(hidden, self.gate).float() + self.bias)[:, 0]
        weight = gate / (scores.sum(1) + sink)
        return States(hidden, 1 - gate + weight * sink, weight, scores, tokens.int())


def weighted_sum(weights, states):
    """The sum of states [(T, model_dim)] with the weights (T, states) of each token."""
    columns = weights.split(1, dim=1)
    return sum(weight * state for weight, state in zip(columns, states, strict=True))


class GPT(nn.Module):
    """Decoder-only transformer over packed documents: embeddings, blocks, and what ties blocks."""

    def __init__(self, config, back_end):
        super().__init__()
        self.config = config
        self.back_end = back_end
        rule = {"lr_mul": config.embed_lr, "decay": 0.75, "betas": (0.5, 0.95)}
        self.embed = embedding(config, std=0.7, **rule)
        self.head = embedding(config, std=0.005, **rule)
        numbers = range(len(config.layers))
        self.blocks = nn.ModuleList(Block(config, number, back_end) for number in numbers)
        self.mixer = Mixer(config) if config.layers_with("feeds_last") else None
        self.ngram_gate = gates(config, 1)  # before the head
        self.copy_scale = ruled(torch.zeros(len(config.copy_orders)), lr_mul=20.0)
        self.pointer = Pointer(config) if config.pointer_window else None
        draw_parameters(self, config.seed)
        if untie_step(config):  # they are equal until then
            self.embed.data.copy_(self.head.data)
        for number in config.layers_with("shifted_keys"):
            self.blocks[number].start_shifted_keys()

    def masks(self, micro_batch, phase):
        """{(is_long, paired_heads): the back end's mask} for each kind of layers that attend."""
        masks = {}
        for layer in self.config.layers:
            kind = layer.is_long, layer.paired_heads
            if layer.attends and kind not in masks:
                window = phase.windows[-1 if layer.is_long else 0]
                positions = 2 if layer.paired_heads else 1
                dtype = self.config.torch_dtype
                masks[kind] = self.back_end.mask(micro_batch, window, positions, phase, dtype)
        return masks

    def token_rows(self, tokens):
        """{name: rows (U, model_dim)} of all embeddings, for distinct tokens (U,)."""
        rows = {}
        for name, param in self.named_parameters():
            if param.rule.group == "embeddings":
                rows[name] = TokenRows.apply(param, tokens)
                torch._dynamo.maybe_mark_dynamic(rows[name], 0)  # one graph serves any number
        return rows

    def copied(self, micro_batch, head_rows):
        """The sum of the head's rows of each token's copies, (T, model_dim), each weighted by its
        order. head_rows: see token_rows."""
        weights = self.copy_scale * (micro_batch.guesses >= 0)
        rows = F.embedding(micro_batch.slots[:, 1:], norm(head_rows))
        return (weights[..., None] * rows).sum(1).to(rows.dtype)

    def hidden(self, micro_batch, ngram, phase, rotary, rows):
        """Final hidden states (T, model_dim), normalised.

        ngram: (T, model_dim), the sum of each token's rows of the table. rotary: what rotary_tables
        returns. rows: what token_rows returns.
        """
        slots = micro_batch.slots[:, 0]
        start = micro_batch.segment_start
        position = torch.arange(len(start), device=start.device) - start
        x = norm(F.embedding(slots, rows["embed"]))
        value_rows = [rows.get(f"blocks.{n}.value_embed") for n in range(len(self.blocks))]
        scene = Scene(slots, position, rotary, self.masks(micro_batch, phase))
        states = []  # that the mixer reads
        head_gates = {}  # by layer
        for number, block in enumerate(self.blocks):
            layer = block.layer
            if layer.decides_gates:
                columns = block.gate_mlp(x).chunk(len(block.gated), dim=1)
                head_gates.update(zip(block.gated, columns, strict=True))
            x = x + gate(x, block.ngram_gate) * ngram
            mixture = None
            if number == 0:
                states.append(x)
            elif self.mixer and block is self.blocks[-1]:
                states.append(x)
                mixture, addend = self.mixer.enter(states)
                x = x + addend
            if layer.attends:
                own = value_rows[number], mixture, head_gates.get(number)
                x = x + block.attention(x, scene, *own)
            x = x + block.feed_forward(x, scene)
            if layer.feeds_last:
                states.append(x)
        x = x + gate(x, self.ngram_gate) * ngram
        if self.mixer:
            for number in self.config.layers_with("value_embedding")[:1]:
                states.append(F.embedding(slots, value_rows[number]))
            x = x + self.mixer.leave(x, states)
        return norm(x + self.copied(micro_batch, rows["head"]))

    def states(self, hidden, micro_batch):
        """The States of final hidden states (T, model_dim)."""
        if self.pointer:
            return self.pointer(hidden, micro_batch)
        none = torch.zeros(len(hidden), 1, device=hidden.device)
        return States(hidden, 1 - none[:, 0], none[:, 0], none, none.int())

    def logits(self, states):
        """Log-probabilities (n, vocab_size), float32, of the next token at n States."""
        cap = self.config.logit_cap
        exp_logits = torch.exp2(below_cap(F.linear(states.hidden, self.head), cap))
        share = states.share[:, None] / exp_logits.sum(1, keepdim=True)
        probabilities = share * exp_logits
        pointed = states.weight[:, None] * states.scores
        # One column after the other: so what equal tokens get is added in a fixed order.
        for probability, token in zip(pointed.T, states.tokens.T, strict=True):
            probabilities.scatter_add_(1, token[:, None].long(), probability[:, None])
        return probabilities.log()

    def forward(self, micro_batch, ngram, phase, loss_weights, rotary, rows):
        """(training loss, summed over tokens; losses (T,) of the next token; States)."""
        hidden = self.hidden(micro_batch, ngram, phase, rotary, rows)
        states = self.states(hidden, micro_batch)
        is_target = (states.tokens == micro_batch.targets.int()[:, None]).float()
        pointed = states.weight * (states.scores * is_target).sum(1)
        softmax_rows = phase.softmax_rows
        cap = self.config.logit_cap
        # A sampled softmax is of one micro-batch, however many the pass has.
        length = self.config.micro_batch_tokens if softmax_rows else len(hidden)
        tensors = hidden, states.share, pointed, micro_batch.targets, micro_batch.segment_start
        chunks = [tensor.split(length) for tensor in tensors]
        total = 0.0
        losses = []
        for chunk in zip(*chunks, strict=True):
            loss, next_losses = summed_loss(*chunk, self.head, softmax_rows, loss_weights, cap)
            total = total + loss
            losses.append(next_losses)
        return total, torch.cat(losses), States(*(tensor.detach() for tensor in states))


# 6. Update rules ==================================================================================


# A rule changes weight and state {key: tensor} in place. UPDATE_RULES, below, has a row for each.
class Hyper(NamedTuple):
    """The numbers of one update. Where updates are compiled, all but dtype are tensors."""

    count: Any  # of updates so far, this one included
    lr: Any
    decay: Any  # weight decay, as a multiple of lr, where update and weight have the same sign
    momentum: Any
    betas: Any
    dtype: torch.dtype  # of products


# Gradients below this share of their tensor's RMS, for small parameters of all of them together,
# count as rounding noise.
ROUNDING = 1e-5


def adam_update(weight, grad, state, hyper):
    """Adam (Kingma & Ba 2015) with cautious weight decay, in place; float32, of one shape.

    There is no epsilon. Values whose gradients are rounding do not step: at the start some scalars
    have no others, and their steps would depend on the order in which floats are added."""
    beta1, beta2 = hyper.betas
    state["first"].lerp_(grad, 1 - beta1)
    state["second"].lerp_(grad.square(), 1 - beta2)
    first = state["first"] / (1 - beta1**hyper.count)
    second = state["second"] / (1 - beta2**hyper.count)
    # The mean is over a matrix, a row of an embedding or a vector; no two ranks share one of these.
    axes = range(1, second.ndim) or (0,)
    root = second.sqrt()
    is_rounding = root <= ROUNDING * second.mean(tuple(axes), keepdim=True).sqrt()
    update = (first / root).masked_fill(is_rounding, 0.0)
    cautious_step(weight, update, hyper.lr, hyper.decay)


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
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
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


class UpdateRule(NamedTuple):
    """An update rule of a part of a parameter, and the state that it keeps of it."""

    update: Callable  # (weight, grad, state, hyper), see take_step
    keeps: tuple  # keys of zeros, float32, of the part's shape
    extra: Callable | None = None  # (part, config): what else it keeps
    follow: Callable | None = None  # (step, config, banks): what comes behind all updates


def row_squares(part, config):
    """What NorMuon keeps: a number for each row of a tall matrix, or column of a wide one."""
    matrices, rows, columns = part.shape
    shape = (matrices, rows, 1) if rows >= columns else (matrices, 1, columns)
    return {"row_square": part.new_zeros(shape, dtype=torch.float32)}


UPDATE_RULES = {
    "adam": UpdateRule(adam_update, ("first", "second")),
    "muon": UpdateRule(muon_update, ("momentum",), extra=row_squares),
}


class GroupRow(NamedTuple):
    """How a group is updated."""

    rule: str  # a row of UPDATE_RULES; the table has one of its own
    lr: float  # the rate
    decay: float  # weight decay, as a multiple of the rate
    every: int  # steps between updates
    may_share: bool  # whether ranks share a large group out


def group_rows(config):
    """{group: its GroupRow}. Raises ConfigError."""
    rule = config.matrix_update
    names = ", ".join(UPDATE_RULES)
    require(rule in UPDATE_RULES, f"matrix_update={rule}", f"must be one of {names}")
    adam = "adam", config.adam_lr, 1.0, config.adam_every
    matrices = rule, config.matrix_lr, config.matrix_decay, 1
    return {
        "small": GroupRow(*adam, may_share=False),
        "embeddings": GroupRow(*adam, may_share=True),
        "ngram_table": GroupRow("adagrad", config.ngram_lr, 0.0, 1, may_share=True),
        "matrices": GroupRow(*matrices, may_share=True),
    }


# 7. SOAP ==========================================================================================

# SOAP (Vyas et al. 2024) and SOAP-Muon keep, for the rows and for the columns of a matrix G, a
# Kronecker factor (the running mean of G Gᵀ, of Gᵀ G) and a basis that follows the factor's
# eigenvectors. Momentum stays in the parameters' own basis; only the second moment lives in the
# eigenbasis, and is permuted with it.
FACTOR_BETA = 0.9  # of the factors, and of SOAP-Muon's second moment
EIGH_STEPS = 3  # refreshes by eigh: zero-initialised projections give no gradient before step 2
DAMPING = 3e-6  # added to a factor before Cholesky, as a share of its largest eigenvalue


class Side(NamedTuple):
    """The rows (axis -2) or the columns (axis -1) of a bank of k matrices."""

    axis: int
    factor: Tensor  # (k, s, s), symmetric, zero until the first gradient
    basis: Tensor  # (k, s, s), orthonormal columns, the largest eigenvalue's first
    moment: Tensor  # (k, m, n), of gradients in the eigenbasis


def eigen_sides(state):
    """The sides of a bank that have an eigenbasis: none, one or both."""
    return [
        Side(axis, state[f"{key}_factor"], state[f"{key}_basis"], state["moment"])
        for key, axis in (("row", -2), ("column", -1))
        if f"{key}_factor" in state
    ]


def turned(x, sides, back=False):
    """Matrices (k, m, n) turned from the parameters' basis to the eigenbasis, or back."""
    for side in sides:
        turn = side.basis if back else side.basis.mT
        x = turn @ x if side.axis == -2 else x @ turn.mT
    return x


def has_basis(state):
    """(k, 1, 1): 1.0 once a matrix has had a gradient that its bases could follow, else 0.0."""
    sides = eigen_sides(state)
    if not sides:
        return torch.ones_like(state["moment"][:, :1, :1])
    trace = sides[0].factor.diagonal(dim1=-2, dim2=-1).sum(-1)  # both sides have it, or none
    return (trace > 0)[:, None, None].float()


def soap_update(weight, grad, state, hyper):
    """SOAP: Adam in the eigenbasis, times 1 / sqrt(n), so that a rate means what it does for Muon.

    A matrix's first gradient goes into the factors alone, as in the authors' code: in the momentum
    it would meet the second moment of another one, which makes steps of any size.
    """
    sides = eigen_sides(state)
    known = has_basis(state)
    momentum = state["momentum"]
    moment = state["moment"]
    count = state["count"]
    beta1, beta2 = hyper.betas
    count.add_(known)
    momentum.lerp_(grad, (1 - beta1) * known)
    moment.lerp_(turned(grad, sides).square(), (1 - beta2) * known)
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
    moment.lerp_(rotated.square(), (1 - FACTOR_BETA) * known)
    whitened = turned(rotated * moment.clamp_min(1e-16).rsqrt(), sides, back=True)
    orthogonal_step(weight, torch.where(known > 0, whitened, direction), state, hyper)


def update_factors(grad, sides):
    """Take gradients (k, m, n) into the factors of their sides, in place."""
    for side in sides:
        half = grad if side.axis == -2 else grad.mT
        side.factor.lerp_(half @ half.mT / half.size(-1), 1 - FACTOR_BETA)


def cholesky_qr_step(product, bases, largest):
    """Orthonormalise product = factor @ bases, all (k, s, s): batched, and without a host sync.

    With B = basesᵀ factor bases = RᵀR and R Rᵀ = SᵀS, the result is bases Rᵀ S⁻¹: an LR step
    (Rutishauser) on the scaled factor, which squares no condition number. Two Newton-Schulz steps
    follow. largest (k,): the factors' largest eigenvalues. Returns (the new bases, whether they are
    orthonormal (k,)).
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

    Both are float32. Columns are sorted by falling Rayleigh quotient first. Method `eigh` finds
    the eigenvectors themselves; on CUDA the host waits for the device. `cholesky` takes one step of
    orthogonal iteration, the Q of factor @ basis. Returns (bases, order (k, s) that sorted the old
    columns). Where a factor is zero, not finite or nearly singular, the old basis stays, sorted.
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
    else:
        new, is_orthonormal = cholesky_qr_step(product, old, largest)
        is_good = is_good & is_orthonormal
    return torch.where(is_good[:, None, None], new, old), order


def refresh_eigenbases(banks, method):
    """Take one eigenbasis_step with all sides of banks' states, in one batch for each size."""
    by_size = {}
    for state in banks:
        for side in eigen_sides(state):
            by_size.setdefault(side.basis.size(-1), []).append(side)
    for sides in by_size.values():
        factors = torch.cat([side.factor for side in sides])
        bases = torch.cat([side.basis for side in sides])
        lengths = [len(side.basis) for side in sides]
        bases, orders = eigenbasis_step(factors, bases, method)
        stepped = zip(sides, bases.split(lengths), orders.split(lengths), strict=True)
        for side, basis, order in stepped:
            side.basis.copy_(basis)
            index = order[:, :, None] if side.axis == -2 else order[:, None]
            side.moment.copy_(side.moment.gather(side.axis, index.expand_as(side.moment)))


def eigenbases(part, config):
    """What the SOAP rules keep of a part (k, m, n) of a bank beside zeros of its shape."""
    state = {"count": part.new_zeros(len(part), 1, 1, dtype=torch.float32)}
    state |= row_squares(part, config)  # SOAP-Muon's
    for side, size in zip(("row", "column"), part.shape[1:], strict=True):
        if size <= config.one_sided_above:
            identity = torch.eye(size, device=part.device)
            state[f"{side}_factor"] = part.new_zeros(len(part), size, size, dtype=torch.float32)
            state[f"{side}_basis"] = identity.repeat(len(part), 1, 1)
    return state


def follow_gradients(step, config, banks):
    """Take gradients into the factors, and refresh the bases of every k-th matrix, in turn; in the
    first steps those of all matrices.

    banks: (state, gradient (k, m, n), number of the bank's first matrix) of this rank's parts.
    """
    is_early = step < EIGH_STEPS
    every = 1 if is_early else config.basis_every
    due = []
    for state, grad, first in banks:
        update_factors(grad, eigen_sides(state))
        turn = (step - first) % every
        due.append({key: value[turn::every] for key, value in state.items()})
    refresh_eigenbases(due, "eigh" if is_early else "cholesky")


# Weights step before the bases follow, as in the authors' code.
SOAP_RULE = {"keeps": ("momentum", "moment"), "extra": eigenbases, "follow": follow_gradients}
UPDATE_RULES |= {
    "soap": UpdateRule(soap_update, **SOAP_RULE),
    "soap_muon": UpdateRule(soap_muon_update, **SOAP_RULE),
}

# 8. Ranks =========================================================================================

TIMEOUT = datetime.timedelta(minutes=10)  # for which ranks wait for each other
SAVE_TIMEOUT = datetime.timedelta(hours=2)  # and for rank 0 to write a checkpoint
# torch 2.13 has renamed these two, and warns of the old names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Runtime:
    """This process among its peers: rank, world size, device, and the collectives.

    Collectives are asynchronous and return work for `wait`. `ledger` counts the bytes that this
    rank has sent in training steps, by (collective, name).
    """

    def __init__(self, device="auto"):
        try:  # a cluster may have set some of these for another program
            self.rank = int(os.environ.get("RANK", 0))
            self.world_size = int(os.environ.get("WORLD_SIZE", 1))
            local_rank = int(os.environ.get("LOCAL_RANK", 0))
            words = f"RANK={self.rank}, LOCAL_RANK={local_rank}, WORLD_SIZE={self.world_size}"
            if not (0 <= self.rank < self.world_size and local_rank >= 0):
                raise ValueError(f"{words}: RANK must be below WORLD_SIZE, and none below 0")
            if self.world_size > 1:
                self.store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
        except ValueError as error:
            remedy = "start ranks by run.sh or torchrun, or unset RANK, LOCAL_RANK and WORLD_SIZE"
            raise ConfigError(f"{one_line(error)}; {remedy}") from None
        self.peers = self.world_size - 1
        self.is_main = self.rank == 0
        self.ledger = Counter()
        self.device = choose_device(device, local_rank)
        self.use_device()
        self.loader_group = None
        if self.world_size > 1:
            self.connect()

    def use_device(self):
        """Make the device current in the calling thread. On the host an operation gets one thread:
        more of them would spin while they wait for each other."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)

    def connect(self):
        """Join the process group; the loader's thread, which keeps another order, gets its own."""
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
            # torchrun's store outlives a restart, and still has the addresses of the dead. Nodes
            # do not count restarts alike, so several of them need a store of their own (README).
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self.store = dist.PrefixStore(restarts, self.store)
        options = {"timeout": TIMEOUT, "world_size": self.world_size, "rank": self.rank}
        if self.device.type == "cuda":
            # With its device NCCL connects here, not at its first call.
            options |= {"backend": "cpu:gloo,cuda:nccl", "device_id": self.device}
        dist.init_process_group(**{"backend": "gloo", **options}, store=self.store)
        self.loader_group = dist.new_group(timeout=TIMEOUT, backend="gloo")
        dist.monitored_barrier(self.loader_group, TIMEOUT)  # none leaves while others connect

    def agree(self, key, value):
        """The value that the first rank to call has under a key, on all ranks; of JSON's types."""
        if self.world_size == 1:
            return value
        return json.loads(self.store.compare_set(key, "", json.dumps(value)))

    def follow_main(self, event):
        """Let ranks wait until rank 0 is here, too: for longer than in a collective."""
        if self.world_size > 1 and self.is_main:
            self.store.set(event, "")
        elif self.world_size > 1:
            self.store.wait([event], SAVE_TIMEOUT)

    def owned_range(self, length):
        """The range [low, high) of an axis that this rank owns; the last may own fewer."""
        chunk = math.ceil(length / self.world_size)
        return min(self.rank * chunk, length), min((self.rank + 1) * chunk, length)

    def record_sent(self, collective, name, tensor, size):
        """Enter into the ledger that `size` bytes of a tensor are about to be sent."""
        assert tensor.is_contiguous(), f"{name}: a collective of a strided tensor is silently wrong"
        if name not in ("validation", "checkpoint"):  # which are no part of a step
            self.ledger[collective, name] += size

    def all_reduce(self, tensor, name):
        """Sum in place over ranks; returns work, none at world size 1."""
        if self.world_size == 1:
            return None
        size = 2 * self.peers * tensor.nbytes // self.world_size
        self.record_sent("all_reduce", name, tensor, size)
        return dist.all_reduce(tensor, async_op=True)

    def reduce_scatter(self, tensor, name):
        """Sum tensor (n, ...) over ranks. Returns (the sums of this rank's range, work)."""
        low, high = self.owned_range(len(tensor))
        chunk = math.ceil(len(tensor) / self.world_size)
        whole = padded(tensor, chunk * self.world_size)
        part = tensor.new_empty(chunk, *tensor.shape[1:])
        self.record_sent("reduce_scatter", name, whole, self.peers * part.nbytes)
        return part[: high - low], reduce_scatter(part, whole, async_op=True)

    def gather_ranges(self, tensor, name):
        """Fill a tensor (n, ...) with the range that each rank owns. Returns (the tensor; where
        ranges are uneven, a longer one that begins with its values; work)."""
        low, high = self.owned_range(len(tensor))
        chunk = math.ceil(len(tensor) / self.world_size)
        whole = tensor
        if len(tensor) % self.world_size:
            whole = tensor.new_empty(chunk * self.world_size, *tensor.shape[1:])
        part = padded(tensor[low:high], chunk)
        self.record_sent("all_gather", name, whole, self.peers * part.nbytes)
        return whole, all_gather(whole, part, async_op=True)

    def gather_on_main(self, part, length):
        """The ranges of all ranks, (length, ...), on the host of rank 0; nothing on the others."""
        chunk = math.ceil(length / self.world_size)
        send = [chunk, *[0] * self.peers]
        receive = [chunk * self.is_main] * self.world_size
        whole, work = self.all_to_all(padded(part.cpu(), chunk), send, receive, "checkpoint")
        wait(work)
        return whole[:length]  # padding is at the end

    def all_to_all(self, tensor, send, receive, name, group=None):
        """Send the first send[0] rows of a tensor to rank 0, and so on. Returns (receive[r] rows of
        each rank r, work); at world size 1 the tensor itself and no work."""
        if self.world_size == 1:
            return tensor, None
        size = (sum(send) - send[self.rank]) * tensor[:1].nbytes
        self.record_sent("all_to_all", name, tensor, size)
        out = tensor.new_empty(sum(receive), *tensor.shape[1:])
        work = dist.all_to_all_single(out, tensor, receive, send, group=group, async_op=True)
        return out, work

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory_mib(self):
        """Peak memory of this rank in MiB: of the GPU's allocator, or of the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) // 2**20
        with contextlib.suppress(OSError, TypeError):  # Linux, where getrusage counts a parent, too
            status = Path("/proc/self/status").read_text("utf-8")
            return int(re.search(r"^VmHWM:\s+(\d+) kB$", status, re.M)[1]) // 2**10
        unit = 2**20 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit

    def close(self):
        """End the process group together with the other ranks. A rank that has failed exits without
        it, since NCCL would wait for collectives that the other ranks cannot finish."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def padded(tensor, length):
    """A tensor (n, ...) with zeros behind it, (length, ...); the tensor itself if it is so long."""
    if len(tensor) == length:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])


def wait(work):
    if work is not None:
        work.wait()


def choose_device(name, local_rank):
    """The torch.device of the process of this number on its machine. Raises ConfigError."""
    gpus = torch.cuda.device_count()
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    has_gpus = gpus > 0 or (os.path.exists("/proc/driver/nvidia") and not is_hidden)
    if name == "cpu" or (name == "auto" and not has_gpus):
        return torch.device("cpu")
    problem = f"torch {torch.__version__} sees {gpus} GPUs, process {local_rank} has none"
    remedy = f"start one process a GPU, or update a driver below {LEAST_DRIVER}, or {OLDER_WHEEL}"
    require(local_rank < gpus, f"device={name}", problem, f"{remedy}, or add --device cpu")
    device = torch.device("cuda", local_rank)
    check_card(device)
    return device


LEAST_DRIVER = "580 (of CUDA 12: 525)"  # by NVIDIA's release notes
OLDER_WHEEL = "take torch's wheel of https://download.pytorch.org/whl/cu126"


def check_card(device):
    """Raise ConfigError unless torch's wheel has code for a GPU: for its generation, or in NVIDIA's
    intermediate language `compute`, which serves all later ones."""
    card = torch.cuda.get_device_capability(device)
    has_code = False
    for arch in torch.cuda.get_arch_list():
        kind, major, minor = re.match(r"(sm|compute)_(\d+)(\d)", arch).groups()
        serves = int(major) == card[0] or kind == "compute"
        has_code |= serves and (int(major), int(minor)) <= card
    problem = f"torch {torch.__version__} has no code for capability {card}"
    remedy = OLDER_WHEEL if card < (8, 0) else "take a newer wheel of torch"
    require(has_code, torch.cuda.get_device_name(device), problem, remedy)


def product_dtype(dtype, device):
    """The dtype to which products round their factors, for the log: some processors take bfloat16
    for float32 where the precision is "medium"."""
    x = torch.full((256, 256), 1 + 2**-10, dtype=dtype, device=device)
    # In bfloat16 x is 1, and the sums are 256. In float32 they are 256.5.
    return "float32" if (x @ x).max() > 256.25 else "bfloat16"


def to_device(array, device):
    """Copy a numpy array to the device; on CUDA through pinned memory, and without a sync."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


# 9. Parameter groups ==============================================================================


class Group:
    """Parameters that step, travel and are saved together.

    Optimizer.step takes all groups that are due through three calls, each of which gets what the
    one before it has returned:
        reduce(step)                   start to sum their gradients over ranks, if these share the
                                       group out; else Optimizer.reduce_whole does it
        update(step, lr_mul, pending)  wait for the sums, update, start to send the new values
        receive(step, pending)         take over what other ranks have sent
    """

    is_frozen = False
    is_shared_out = True  # or else every rank updates all of it

    def __init__(self, name, config, runtime):
        self.name = name
        self.config = config
        self.runtime = runtime
        self.row = group_rows(config)[name]
        self.lengths = {}  # {parameter: length of its first axis, along which ranks share it}
        self.state = {}  # {parameter: {key: tensor of this rank's part}}, which is saved
        self.members = {}  # {name: parameter of the model}

    def is_due(self, step):
        """Whether the group is updated at a step: every k-th, and the run's last."""
        is_last = step + 1 == self.config.steps
        return not self.is_frozen and ((step + 1) % self.row.every == 0 or is_last)

    def owned_range(self, name):
        """The range of a parameter's first axis that this rank updates."""
        length = self.lengths[name]
        return self.runtime.owned_range(length) if self.is_shared_out else (0, length)

    def part_of(self, name, tensor):
        """This rank's part of a tensor that has the parameter's first axis."""
        low, high = self.owned_range(name)
        return tensor[low:high]

    def tensors(self):
        """{name: tensor} of all that a step changes on this rank."""
        found = {}
        for name, state in self.state.items():
            found.update({f"{name}.{key}": value for key, value in state.items()})
        for name, param in self.members.items():
            found[f"{name}.param"] = param.data
            if param.grad is not None and self.row.every > 1:  # it waits for the next update
                found[f"{name}.grad"] = param.grad
        return found

    def full_state(self):
        """The state of whole parameters on rank 0; all ranks must call it."""
        if not self.is_shared_out:
            return self.state
        gather = self.runtime.gather_on_main
        return {
            name: {key: gather(part, self.lengths[name]) for key, part in state.items()}
            for name, state in self.state.items()
        }

    def load(self, full):
        """The inverse of full_state, at any world size."""
        for name, state in self.state.items():
            for key, value in state.items():
                value.copy_(self.part_of(name, full[name][key]))


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


# Ranks share out a group of more values than this. Every rank updates all of a smaller one: those
# take one collective together. To share a group out takes two for each parameter, and more time.
SHARE_ABOVE = 2**22


def gradient(param):
    """The gradient of the losses summed since the parameter's last update; 0 where it has none."""
    return torch.zeros_like(param) if param.grad is None else param.grad


def end_to_end(tensors, device):
    """All values of some tensors as one vector (n,) float32."""
    return torch.cat([torch.zeros(0, device=device), *(tensor.flatten() for tensor in tensors)])


class ParameterGroup(Group):
    """Parameters of the model under one update rule.

    Nothing divides the sums of gradients by the tokens of a step: where a batch grows, gradients
    grow, too, and Adam's steps are longer until its second moment has followed.

    Ranks share each parameter of a large group out along its first axis, whole matrices of a bank:
    every rank holds all of it, and updates the range that it owns.
    """

    def __init__(self, name, config, params, runtime):
        super().__init__(name, config, runtime)
        self.params = params  # {name: what the rule updates}
        self.members = params
        self.size = sum(param.numel() for param in params.values())
        is_large = self.row.may_share and self.size > SHARE_ABOVE
        self.is_shared_out = is_large and runtime.world_size > 1
        self.rule = UPDATE_RULES[self.row.rule]
        self.lr_muls = {}
        for key, param in params.items():
            self.lengths[key] = len(param)
            self.state[key] = self.new_state(self.part_of(key, param.data))
            self.lr_muls[key] = param.rule.lr_mul
            if isinstance(param.rule.lr_mul, Tensor):
                self.lr_muls[key] = self.part_of(key, param.rule.lr_mul.to(param.device))
        self.take_step = compiled_updates() if config.compile else take_step

    def new_state(self, part):
        """What the rule keeps of this rank's part of a parameter, at its start."""
        device = part.device
        keeps = list(self.rule.keeps)
        if self.config.mean_share > 0:
            keeps.append("mean")
        state = {key: torch.zeros(part.shape, device=device) for key in keeps}
        if self.rule.extra:
            state |= self.rule.extra(part, self.config)
        if part.dtype != torch.float32:
            state["master"] = part.float()
        return state

    def gradients(self, step):
        """{name: gradient (like the parameter)}, summed over this rank's passes."""
        return {name: gradient(param) for name, param in self.params.items()}

    def clear_gradients(self):
        """Begin a new sum of gradients."""
        for param in self.members.values():
            param.grad = None

    def reduce(self, step):
        scatter = self.runtime.reduce_scatter
        return [(name, *scatter(grad, name)) for name, grad in self.gradients(step).items()]

    def update(self, step, lr_mul, pending):
        travelling = []
        grads = {}
        rate = self.row.lr * lr_mul
        for name, grad, work in pending:
            wait(work)
            grads[name] = grad.float()
            param = self.params[name]
            hyper = Hyper(
                count=math.ceil((step + 1) / self.row.every),
                lr=rate * self.lr_muls[name],
                decay=rate * self.row.decay * param.rule.decay,
                momentum=momentum_at(self.config, step),
                betas=param.rule.betas,
                dtype=self.config.torch_dtype,
            )
            part = self.part_of(name, param.data)
            self.take_step(self.rule.update, part, grads[name], self.state[name], hyper)
            self.follow_mean(step, part, self.state[name])
            if self.is_shared_out:
                travelling.append((name, *self.runtime.gather_ranges(param.data, name)))
        if self.rule.follow:  # while the new weights travel
            banks = [
                (self.state[name], grad, self.owned_range(name)[0]) for name, grad in grads.items()
            ]
            self.rule.follow(step, self.config, banks)
        self.clear_gradients()
        return travelling

    def follow_mean(self, step, part, state):
        """Update the running mean of the weights of the last `length` steps."""
        config = self.config
        length = max(1, round(config.mean_share * config.steps))
        done = step + 1 - (config.steps - length)  # of these steps
        if done <= 0 or not config.mean_share:
            return
        weight = state.get("master", part)
        every = self.row.every
        kept = (1 - 2 / (length + 1)) ** every if done > every else 0.0
        state["mean"].lerp_(weight, 1 - kept)

    def take_mean(self):
        """Move weights half of the way to the mean (modded-nanogpt, record of 2026-09-28)."""
        sent = []
        for name, param in self.params.items():
            part = self.part_of(name, param.data)
            weight = self.state[name].get("master", part)
            weight.lerp_(self.state[name]["mean"], 0.5)
            part.copy_(weight)
            if self.is_shared_out:
                sent.append((name, *self.runtime.gather_ranges(param.data, "validation")))
        self.receive(self.config.steps - 1, sent)

    def receive(self, step, pending):
        for name, whole, work in pending:
            wait(work)
            param = self.params[name]
            if len(whole) > len(param):
                param.data.copy_(whole[: len(param)])


class EmbeddingGroup(ParameterGroup):
    """Embeddings and head. Until untie_step a step updates head and embedding as one: the
    embedding's gradient is added to the head's, and the embedding follows the head."""

    def gradients(self, step):
        grads = super().gradients(step)
        if step < untie_step(self.config):
            grads["head"] = grads["head"] + grads.pop("embed")
        return grads

    def receive(self, step, pending):
        super().receive(step, pending)
        if step < untie_step(self.config):
            self.params["embed"].data.copy_(self.params["head"].data)
            for key, value in self.state["embed"].items():
                value.copy_(self.state["head"][key])


def bank_name(name):
    """The name of the bank that a matrix of a block belongs to."""
    return name.rpartition(".")[2]


def banks_of(members):
    """{name: bank} of matrices: those of one name in all blocks, end to end. Values and gradients
    of the members become views of their bank's."""
    by_name = {}
    for name, param in members.items():
        by_name.setdefault(bank_name(name), []).append(param)
    banks = {}
    for name, params in by_name.items():
        bank = nn.Parameter(torch.cat([param.data for param in params]))
        bank.grad = torch.zeros_like(bank)
        lr_muls = [param.rule.lr_mul * torch.ones(len(param), 1, 1) for param in params]
        bank.rule = dataclasses.replace(params[0].rule, lr_mul=torch.cat(lr_muls))
        lengths = [len(param) for param in params]
        views = zip(bank.data.split(lengths), bank.grad.split(lengths), strict=True)
        for param, (values, grad) in zip(params, views, strict=True):
            param.data = values
            param.grad = grad
        banks[name] = bank
    return banks


class MatrixGroup(ParameterGroup):
    """Matrices of all blocks. Those of one name are a bank, so that their updates are batched.
    Autograd adds up gradients in the banks themselves, and a step copies nothing."""

    def __init__(self, config, members, runtime):
        super().__init__("matrices", config, banks_of(members), runtime)
        self.members = members
        self.views = {name: param.grad for name, param in members.items()}

    def gradients(self, step):
        for name, param in self.members.items():
            message = f"{name}: its gradient has left the bank; clear_gradients() keeps it there"
            assert param.grad is self.views[name], message
        return super().gradients(step)

    def clear_gradients(self):
        for bank in self.params.values():
            bank.grad.zero_()


class SmallGroup(ParameterGroup):
    """Gates, scales and other small parameters. They are updated as one float32 vector; afterwards
    the model's parameters are copied from its slices.

    Their first step moves nothing. Where projections start as zero, some gradients are nothing but
    rounding then, and Adam would make full steps of them.
    """

    def __init__(self, config, members, runtime):
        params = list(members.values())
        sizes = [param.numel() for param in params]
        rules = [param.rule for param in params]
        values = [param.data for param in params]
        vector = nn.Parameter(end_to_end(values, runtime.device))
        # Each number of its Rule is a vector, too.
        rows = [(rule.lr_mul, rule.decay, *rule.betas) for rule in rules]
        columns = np.repeat(np.array(rows, np.float32).T, sizes, axis=1)
        lr_mul, decay, beta1, beta2 = to_device(columns, runtime.device)
        vector.rule = Rule("small", lr_mul=lr_mul, decay=decay, betas=(beta1, beta2))
        super().__init__("small", config, {"small": vector}, runtime)
        self.members = members
        # A copy: torch.compile refuses an update of two tensors that share their memory.
        self.state["small"]["master"] = vector.data.clone()
        self.slices = vector.data.split(sizes)

    def gradients(self, step):
        grads = [gradient(param) for param in self.members.values()]
        return {"small": end_to_end(grads, self.runtime.device)}

    def update(self, step, lr_mul, pending):
        return super().update(step, lr_mul if step > 0 else 0.0, pending)

    def receive(self, step, pending):
        for param, values in zip(self.members.values(), self.slices, strict=True):
            param.data.view(-1).copy_(values)


class Optimizer:
    """All groups, in the one order in which their communication is started and waited for.

    Those of which every rank updates all start first, in one collective, so that no small transfer
    queues behind a large one. Updates hide the transfers of the groups behind them.
    """

    def __init__(self, config, model, table, runtime):
        members = {"small": {}, "embeddings": {}, "matrices": {}}
        for name, param in model.named_parameters():
            members[param.rule.group][name] = param  # an error where ruled() has not made it
        small = SmallGroup(config, members["small"], runtime)
        embeddings = EmbeddingGroup("embeddings", config, members["embeddings"], runtime)
        self.matrices = MatrixGroup(config, members["matrices"], runtime)
        self.config = config
        self.parameter_groups = [small, embeddings, self.matrices]
        self.groups = [small, embeddings, table, self.matrices]
        self.runtime = runtime

    def reduce_whole(self, groups, step):
        """Start to sum over ranks the gradients of groups of which every rank updates all: in one
        collective, since on a CPU each costs time, however small it is."""
        rows = []
        for group in groups:
            rows += [(group, name, grad) for name, grad in group.gradients(step).items()]
        sums = [grad for _, _, grad in rows]
        work = None
        if self.runtime.world_size > 1 and rows:
            bucket = end_to_end(sums, self.runtime.device)
            work = self.runtime.all_reduce(bucket, "_".join(group.name for group in groups))
            sums = bucket.split([grad.numel() for grad in sums])
        pending = {group: [] for group in groups}
        for (group, name, grad), summed in zip(rows, sums, strict=True):
            pending[group].append((name, summed.view_as(grad), work))
        return pending

    def step(self, step, lr_mul):
        """Update all groups that are due at a step."""
        due = [group for group in self.groups if group.is_due(step)]
        pending = self.reduce_whole([group for group in due if not group.is_shared_out], step)
        pending |= {group: group.reduce(step) for group in due if group.is_shared_out}
        for group in due:
            pending[group] = group.update(step, lr_mul, pending[group])
        for group in due:
            group.receive(step, pending[group])

    def take_mean(self):
        """Bring all weights but the table's closer to their mean, behind the run's last step."""
        for group in self.parameter_groups:
            if not group.is_frozen and self.config.mean_share:
                group.take_mean()


# 10. The table ====================================================================================

# The model reads three things of a token: its id; rows of a table, one for each order n, which a
# hash of the last n tokens (an n-gram) selects; and copies, which are guesses at the next token.
TOKEN_HASH = np.random.default_rng(20240520).integers(0, 2**64, size=2**16, dtype=np.uint64)
MIX = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, odd
HASH_POWERS = np.uint64(pow(MIX, -1, 2**64)) ** np.arange(33, dtype=np.uint64)


def ngram_keys(text, position, depth, order):
    """Hash keys (t,) uint64 of the n-grams of `order` tokens that end at positions (t,) of a text.

    A key is a polynomial of the tokens' random numbers modulo 2^64 (Karp & Rabin 1987). depth (t,):
    how many tokens of the document stand before each; where these are too few, n-grams are shorter.
    """
    keys = np.zeros(len(position), np.uint64)
    for back in range(order):
        term = TOKEN_HASH[text[position - back]] * HASH_POWERS[back]
        keys += np.where(back <= depth, term, np.uint64(0))
    return keys


def ngram_rows(text, position, depth, config):
    """Rows (T, C) int32 in [0, ngram_rows) of the table and signs (T, C) float32, for the n-grams
    that end at positions (T,) of a text, of whose documents depth (T,) tokens stand before them.

    Each order has a hash of its own. The sign is one more bit of it: two n-grams that share a row
    push it apart half of the time (count-sketch's trick).
    """
    mixed = np.empty((len(position), len(config.ngram_orders)), np.uint64)
    for column, order in enumerate(config.ngram_orders):
        mixed[:, column] = ngram_keys(text, position, depth, order) + TOKEN_HASH[column]
    mixed = (mixed ^ (mixed >> 29)) * MIX
    mixed ^= mixed >> 32
    rows = (mixed & 0xFFFFFFFF) * config.ngram_rows >> 32
    signs = (mixed >> 40 & 1).astype(np.float32) * 2 - 1
    return rows.astype(np.int32), signs


def row_fingerprint(config):
    """A hash of the rows of a fixed text: a table means nothing under another hash function."""
    text = np.random.default_rng(0).integers(0, 4, 99).astype(np.uint16)
    position = np.arange(len(text))
    rows, signs = ngram_rows(text, position, position, config)
    return hashlib.sha256(rows.tobytes() + signs.tobytes()).hexdigest()


ROW_MEMORY = 0.98  # what a row's moment keeps of itself at each of its updates


def adagrad_rows_update(table, second, rows, grads, lr, floor):
    """Row-wise Adagrad on distinct rows (u,) of the table (n, dim), in place, at their cost alone.

    It forgets: a rare row's steps shrink from `lr` on as Adagrad's do, and a frequent one's no
    further than to lr * sqrt(1 - ROW_MEMORY), so that it goes on to learn in a long run.

    second: (n,), the fading sum of each row's mean squared gradients. grads: (u, dim), sums over
    tokens. floor: added to each row's gradient RMS. Without it a new row would take a full step
    even where its tokens are predicted well.
    """
    moment = ROW_MEMORY * second[rows] + grads.square().mean(1)
    second[rows] = moment
    steps = grads * (-lr * (moment + floor * floor).rsqrt())[:, None]
    # On a CPU this takes a third of the time of table[rows] += steps, for the same bits.
    table.scatter_add_(0, rows[:, None].expand_as(steps), steps)


# A rank holds the rows that it owns, a range of the table. The loader's thread plans a step ahead
# of it, on the CPU: which rows are read, who owns them, and at which slot a row will stand among
# the values that travel here. The values are pulled before the step; the gradients of each row are
# summed here and pushed back to its owner, who sums and updates. So no row travels twice, and a row
# that is owned here never does. At world size 1 it is the plain table.
@dataclass
class RowPlan:
    """The rows that a rank reads in a step, and the routes of their values and gradients.

    This rank's N = T C pairs of token and order read U distinct rows. All ranks together read R
    rows of this rank's range, V distinct ones. At world size 1 U, R and V are the same.
    """

    slots: Tensor  # (T, C) int32: where a token's rows stand among the values that travel here
    signs: Tensor  # (T, C) float32 of +-1
    token: Tensor  # (N,) int32: tokens that read the first of the U rows, then the second, ...
    offsets: Tensor  # (U,) int32: where in `token` those of each row begin
    token_signs: Tensor  # (N,) float32: the signs, in the order of `token`
    rows_to_update: Tensor  # (V,) int64, rising, numbered from the start of this rank's range
    rows_to_send: Tensor  # (R,) int64, rank after rank, numbered likewise
    send: list  # number of the U rows that each rank owns; those of one owner stand together
    receive: list  # number of rows_to_send that each rank reads
    merge: tuple  # where rows_to_update[0] stands in rows_to_send, then [1], ... (R,); offsets (V,)
    pulled: tuple | None = None  # (values, work) of the U rows, once they are on their way


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
    return F.embedding_bag(positions, values, offsets, mode="sum", per_sample_weights=signs)


def rows_of(passages, config):
    """Rows and signs, see ngram_rows, of passages end to end."""
    shape = 0, len(config.ngram_orders)
    rows = [np.empty(shape, np.int32)]
    signs = [np.empty(shape, np.float32)]
    for passage in passages:
        of_passage = ngram_rows(passage.text, passage.position, passage.depth, config)
        rows.append(of_passage[0])
        signs.append(of_passage[1])
    return np.concatenate(rows), np.concatenate(signs)


def plan_rows(passages, config, runtime, group=None, name="ngram_indices"):
    """The RowPlan of a rank's passages, one a micro-batch; all ranks must call it together.

    group: the process group of the calling thread. name: for the ledger. Counts and indices travel
    here, ahead of the values, whose sizes both sides then know.
    """
    rows, signs = rows_of(passages, config)
    world_size = runtime.world_size
    distinct, order, offsets = group_equal(rows.ravel())

    def exchange(array, send, receive):
        tensor = torch.from_numpy(array.astype(np.int32))
        out, work = runtime.all_to_all(tensor, send, receive, name, group)
        wait(work)
        return out.numpy()

    owners = distinct // math.ceil(config.ngram_rows / world_size)
    send = np.bincount(owners, minlength=world_size)
    receive = exchange(send, [1] * world_size, [1] * world_size).tolist()
    rows_to_send = exchange(distinct, send.tolist(), receive).astype(np.int64)
    rows_to_send -= runtime.owned_range(config.ngram_rows)[0]
    rows_to_update = rows_to_send
    merge = ()
    slots = rows
    if world_size > 1:
        rows_to_update, *merge = group_equal(rows_to_send)
        slots = np.zeros(rows.size, np.int32)
        repeats = np.diff(np.append(offsets, len(order)))
        slots[order] = np.repeat(np.arange(len(distinct), dtype=np.int32), repeats)
    on_device = functools.partial(to_device, device=runtime.device)
    return RowPlan(
        slots=on_device(slots.reshape(rows.shape)),
        signs=on_device(signs),
        token=on_device(order // max(1, rows.shape[1])),
        offsets=on_device(offsets),
        token_signs=on_device(signs.ravel()[order]),
        rows_to_update=on_device(rows_to_update),
        rows_to_send=on_device(rows_to_send),
        send=send.tolist(),
        receive=receive,
        merge=tuple(map(on_device, merge)),
    )


class NgramTable(Group):
    """This rank's rows of the table, their optimizer state, and all that travels of them.

    Autograd never sees the table: `summed` adds the rows of each token, and `expect` takes the
    gradients of these sums.
    """

    def __init__(self, config, runtime):
        super().__init__("ngram_table", config, runtime)
        self.is_frozen = not config.ngram_orders or config.ngram_lr == 0
        self.lengths["rows"] = config.ngram_rows if config.ngram_orders else 0
        self.size = self.lengths["rows"] * config.model_dim
        low, high = self.owned_range("rows")
        self.second = torch.zeros(high - low, device=runtime.device)
        self.weight = self.second.new_zeros(high - low, config.model_dim)
        self.state["rows"] = {"weight": self.weight, "second": self.second}
        self.plan = None  # of the rows that the next update changes
        self.grads = []  # of the sums of these rows, (T, model_dim) for each pass
        self.upcoming = None  # the plan whose rows are pulled behind that update

    def start_pull(self, plan, name="ngram_table"):
        """Start to bring the rows of a plan here."""
        plan.pulled = self.weight, None
        if self.runtime.world_size > 1:
            rows = self.weight[plan.rows_to_send]
            plan.pulled = self.runtime.all_to_all(rows, plan.receive, plan.send, name)

    def values_of(self, plan, name="ngram_table"):
        """The values (n, model_dim), float32, that the slots of a plan point into."""
        if plan.pulled is None:
            self.start_pull(plan, name)
        values, work = plan.pulled
        wait(work)
        return values

    def expect(self, plan, grads, upcoming=None):
        """Take what the next update needs: the plan of the step's rows, the gradients of their
        sums, (T, model_dim) for each pass, and the plan whose rows are pulled behind it."""
        self.plan = plan
        self.grads = grads
        self.upcoming = upcoming

    def summed(self, slots, signs, values):
        """The sum of each token's signed rows: (T, model_dim), a leaf in the compute dtype; zeros
        without a table. slots, signs: (T, C), of a RowPlan whose values these are."""
        if not self.config.ngram_orders:
            return values.new_zeros(len(slots), values.size(1), dtype=self.config.torch_dtype)
        summed = F.embedding_bag(slots, values, mode="sum", per_sample_weights=signs)
        return summed.to(self.config.torch_dtype).requires_grad_(not self.is_frozen)

    def reduce(self, step):
        """Sum the step's gradients by row, and start to push them to the rows' owners."""
        plan = self.plan
        grads = torch.cat([self.weight[:0], *self.grads])
        sums = sum_groups(grads, plan.token, plan.offsets, plan.token_signs)
        self.grads = []
        return self.runtime.all_to_all(sums, plan.send, plan.receive, self.name)

    def update(self, step, lr_mul, pending):
        """Update the rows that are owned here. Losses are summed, not averaged: a row learns from
        its own tokens, however many others the step has. Its rate follows no schedule: Adagrad
        slows each row down by itself."""
        sums, work = pending
        wait(work)
        if self.plan.merge:
            sums = sum_groups(sums, *self.plan.merge)
        # The floor falls with the width as gradients do; then a new row's first step is equally
        # long at 64 and at 512 channels (records/NOTES.md, 2026-11-25).
        floor = self.config.ngram_floor * (64 / self.config.model_dim) ** 0.75
        rows = self.plan.rows_to_update
        adagrad_rows_update(self.weight, self.second, rows, sums, self.row.lr, floor)
        if self.upcoming is not None:
            self.start_pull(self.upcoming)  # while the matrices are updated

    def receive(self, step, pending):
        """Nothing to take over: the rows that others have updated are pulled when they are read."""


# 11. Batches ======================================================================================


class Passage(NamedTuple):
    """The T tokens of a micro-batch, where they stand in a text."""

    text: Any  # (L,) uint16: documents, each of which starts with eot_token
    position: Any  # (T,) int64, in the text
    depth: Any  # (T,) int64: how many tokens of its document stand before each
    segment_start: Any  # (T,) int64: the index in [0, T) at which the token's segment starts


def documents_of(text, eot_token):
    """The positions at which documents start. The first tokens are of a document, too."""
    return np.union1d([0], np.flatnonzero(text == eot_token))


def depth_of(position, documents):
    """How many tokens of its document stand before each position."""
    return position - documents[np.searchsorted(documents, position, side="right") - 1]


def contiguous_passage(text, eot_token, low, length):
    """The Passage of `length` tokens from `low` on, whose segments are its documents."""
    position = np.arange(low, low + length)
    documents = documents_of(text[: low + length], eot_token)
    depth = depth_of(position, documents)
    start = np.maximum(position - low - depth, 0)
    return Passage(text, position, depth, start)


PREFETCH = 4  # steps that the loader's thread works ahead


def copies(passage, config):
    """Guesses (T, G) int32 at the token that follows each token of a Passage, one for each order n:
    what followed the last earlier occurrence of the last n tokens in the same document, at most
    `copy_reach` tokens back. -1 where there is none."""
    text, position, depth, segment_start = passage
    index = np.arange(len(position))
    # In front of each segment stand up to `copy_reach` earlier tokens of its document, which are
    # searched, too.
    repeats = 1 + (segment_start == index) * np.minimum(depth, config.copy_reach)
    token = np.repeat(index, repeats)
    back = np.cumsum(repeats)[token] - 1 - np.arange(len(token))  # from the passage's token
    position = position[token] - back
    segment = segment_start[token].astype(np.uint64) * MIX
    guesses = np.full((len(token), len(config.copy_orders)), -1, np.int32)
    for column, order in enumerate(config.copy_orders):
        keys = ngram_keys(text, position, depth[token] - back, order) + segment
        by_key = np.argsort(keys, kind="stable")
        # Of two neighbours with the same key, the later one copies what followed the earlier one.
        earlier = by_key[:-1]
        later = by_key[1:]
        is_copy = (keys[earlier] == keys[later]) & (later - earlier <= config.copy_reach)
        followed = position[earlier[is_copy]]
        guesses[later[is_copy], column] = text[followed + 1]
    return guesses[back == 0]


class MicroBatch(NamedTuple):
    """The T tokens of one forward pass, on the model's device: one Passage, or several of them end
    to end."""

    inputs: Tensor  # (T,) int32 token ids
    targets: Tensor  # (T,) int64 next token ids
    segment_start: Tensor  # (T,) int32: index in [0, T) at which the token's segment starts
    segment_bounds: Tensor  # (S + 1,) int32: where the S segments start, then T
    guesses: Tensor  # (T, G) int32: at the next token, see copies()
    tokens: Tensor  # (U,) int64: the distinct ids of inputs and guesses, rising
    slots: Tensor  # (T, 1 + G) int32: where in `tokens` the input and the guesses stand


class Batch(NamedTuple):
    """One rank's part of a step."""

    passes: list  # the MicroBatch of each of its forward passes
    rows: Any  # RowPlan of the rows of the table that they read
    tokens: int  # of the step, on all ranks


def make_pass(passages, config, device):
    """The MicroBatch that reads these passages end to end."""
    inputs = []
    targets = []
    starts = []
    guesses = []
    for number, passage in enumerate(passages):
        inputs.append(passage.text[passage.position])
        targets.append(passage.text[passage.position + 1])
        starts.append(passage.segment_start + number * len(passage.position))
        guesses.append(copies(passage, config))
    inputs = np.concatenate(inputs, dtype=np.int32)
    guesses = np.concatenate(guesses)
    # Where there is no guess, the input stands, with weight 0: no row is read by all tokens.
    ids = np.column_stack([inputs, np.where(guesses < 0, inputs[:, None], guesses)])
    is_read = np.zeros(config.vocab_size, bool)
    is_read[ids] = True
    slots = np.cumsum(is_read, dtype=np.int32)[ids] - 1
    start = np.concatenate(starts, dtype=np.int32)
    first = np.flatnonzero(start == np.arange(len(start)))
    bounds = np.append(first, len(start)).astype(np.int32)
    return MicroBatch(
        inputs=to_device(inputs, device),
        targets=to_device(np.concatenate(targets, dtype=np.int64), device),
        segment_start=to_device(start, device),
        segment_bounds=to_device(bounds, device),
        guesses=to_device(guesses, device),
        tokens=to_device(np.flatnonzero(is_read), device),
        slots=to_device(slots, device),
    )


class TrainLoader:
    """Deterministic stream of steps, which a thread assembles ahead.

    Documents are cut into pieces of at most the largest document cap. A shard's pieces are shuffled
    by the seed and laid end to end into micro-batches; what fills none at a shard's end is dropped.
    A smaller cap at a step splits pieces further. So a micro-batch depends on its number alone.
    """

    def __init__(self, config, shards, runtime, first_step=0):
        self.config = config
        self.shards = shards
        self.runtime = runtime
        self.step = first_step  # the next one to assemble
        length = config.micro_batch_tokens
        self.number = training_tokens(config, first_step) // length  # of its first micro-batch
        lengths = [(shard.length - 1) // length for shard in shards]  # in micro-batches
        self.edges = [0, *itertools.accumulate(lengths)]
        self.last = self.place_of(training_tokens(config) // length - 1)[0]  # shard of the run
        self.opened = {}  # by number: the shard at hand and the next one, on their way
        self.opener = ThreadPoolExecutor(1)
        self.open(self.place_of(self.number)[0])  # ahead of the clock
        self.ahead = deque()
        sys.setswitchinterval(1e-4)  # seconds that the thread may keep the others waiting
        self.thread = ThreadPoolExecutor(1, initializer=runtime.use_device)

    def open(self, number):
        """What open_shard returns for a number. The next shard is opened meanwhile, since that
        takes longer than the steps which are assembled ahead."""
        self.opened = {key: shard for key, shard in self.opened.items() if key >= number}
        for key in range(number, min(number + 1, self.last) + 1):
            if key not in self.opened:
                self.opened[key] = self.opener.submit(self.open_shard, key)
        return self.opened[number].result()

    def open_shard(self, number):
        """Open the shard of a number, counted through all passes over the shards. Returns its text;
        where documents start; where pieces start, in shuffled order; and where each begins once
        they stand end to end."""
        config = self.config
        cap = max(stage.document_cap for stage in config.stages)
        text = self.shards[number % len(self.shards)].read()
        documents = documents_of(text, config.eot_token)
        edges = [*documents.tolist(), len(text) - 1]  # the last token is only a target
        pieces = np.concatenate([np.arange(*span, cap) for span in itertools.pairwise(edges)])
        lengths = np.diff(pieces, append=edges[-1])
        order = np.random.default_rng([config.seed, number]).permutation(len(pieces))
        pieces = pieces[order]
        lengths = lengths[order]
        return text, documents, pieces, np.cumsum(lengths) - lengths

    def place_of(self, number):
        """Where the micro-batch of this number is: (the number of its shard, counted through all
        passes; its index in that shard)."""
        passes, index = divmod(number, self.edges[-1])
        shard = bisect.bisect(self.edges, index) - 1
        return passes * len(self.shards) + shard, index - self.edges[shard]

    def passage(self, number, cap):
        """The Passage of a micro-batch, with segments of at most `cap` tokens."""
        shard, micro_batch = self.place_of(number)
        text, documents, pieces, begins = self.open(shard)
        index = np.arange(self.config.micro_batch_tokens)
        along = micro_batch * len(index) + index  # positions in the pieces as they lie end to end
        piece = np.searchsorted(begins, along, side="right") - 1  # the piece of each token
        position = pieces[piece] + along - begins[piece]
        segment_start = np.maximum(begins[piece] - along[0], 0)
        segment_start += (index - segment_start) // cap * cap
        return Passage(text, position, depth_of(position, documents), segment_start)

    def make_batch(self, step):
        """Assemble this rank's part of a step, in the thread; a rank may have no micro-batch."""
        config = self.config
        runtime = self.runtime
        numbers = range(self.number, self.number + micro_batches_at(config, step))
        self.number = numbers.stop
        of_rank = numbers[runtime.rank :: runtime.world_size]
        cap = stage_at(config, step).document_cap
        passages = [self.passage(number, cap) for number in of_rank]
        length = micro_batches_of_pass(config, step, runtime)
        passes = []
        for low in range(0, len(passages), length):
            passes.append(make_pass(passages[low : low + length], config, runtime.device))
        rows = plan_rows(passages, config, runtime, runtime.loader_group)
        return Batch(passes, rows, tokens=len(numbers) * config.micro_batch_tokens)

    def next_batch(self):
        """The Batch of the next step, or None after the last. Raises what the thread has raised."""
        while len(self.ahead) < PREFETCH and self.step < self.config.steps:
            self.ahead.append(self.thread.submit(self.make_batch, self.step))
            self.step += 1
        return self.ahead.popleft().result() if self.ahead else None

    def close(self):
        """End the threads: inside torch they would abort a process that ends."""
        self.thread.shutdown(cancel_futures=True)
        self.opener.shutdown(cancel_futures=True)


# 12. Training =====================================================================================


class Phase(NamedTuple):
    """What the compiled forward pass is specialised to: a new value means a new graph. With
    VarlenAttention the sizes in ANY_SIZE stay dynamic, and one graph serves them all."""

    windows: tuple  # of attention in short and in long layers, see Stage
    max_segment: int  # tokens of the longest segment that attention sees at once
    softmax_rows: int = 0  # rows of the vocabulary in the softmax; 0: all


# Dynamo's names of the sizes that may change without a new graph: a regular expression.
ANY_SIZE = r"L\['(phase'\]\.(windows|max_segment)|micro_batch'\]\.segment_bounds)"


def training_phase(config, step):
    """The Phase of a training step."""
    stage = stage_at(config, step)
    longest = min(stage.document_cap, config.micro_batch_tokens)
    rows = stage.softmax_rows if stage.softmax_rows < config.vocab_size else 0
    return Phase(stage.windows, longest, rows)


def evaluation_phase(config, step, length):
    """The Phase of a forward pass over `length` tokens outside training, before a step."""
    windows = config.val_windows if step == config.steps else stage_at(config, step).windows
    return Phase(windows, length)


class Trainer:
    """Model, table, optimizer and compiled forward pass of one run: what training, evaluation and
    sampling share."""

    def __init__(self, config, runtime):
        self.config = config
        self.runtime = runtime
        is_on_cpu = runtime.device.type == "cpu"  # on a GPU "medium" would mean TensorFloat-32
        precision = config.matmul_precision if is_on_cpu else "highest"
        torch.set_float32_matmul_precision(precision)
        self.matmul_name = product_dtype(config.torch_dtype, runtime.device)
        back_end, self.attention_name = choose_attention(config, runtime.device)
        self.model = GPT(config, back_end).to(runtime.device)
        self.table = NgramTable(config, runtime)
        self.optimizer = Optimizer(config, self.model, self.table, runtime)
        self.forward = self.model
        if config.compile:
            # A phase is two graphs, and torch's default limit is 8; never eager in silence.
            torch._dynamo.config.recompile_limit = 64
            torch._dynamo.config.fail_on_recompile_limit_hit = True
            if isinstance(back_end, VarlenAttention):
                torch.compiler.config.dynamic_sources = ANY_SIZE
            self.forward = torch.compile(self.model, dynamic=False)
        self.rotary_tables = functools.cache(rotary_tables)

    def forward_pass(self, step, phase, loss_weights, micro_batch, ngram):
        """What GPT.forward returns for a MicroBatch and its summed rows, in a phase of the run."""
        positions = 2 * len(micro_batch.inputs)  # of paired heads
        config = self.config
        device = self.runtime.device
        windows = long_windows_until(config, step)
        dim = config.head_dim
        rotary = self.rotary_tables(positions, dim, windows, device, config.torch_dtype)
        weights = to_device(np.array(loss_weights, np.float32), device)
        rows = self.model.token_rows(micro_batch.tokens)
        return self.forward(micro_batch, ngram, phase, weights, rotary, rows)

    def accumulate(self, step, batch, upcoming=None):
        """Add up the gradients of this rank's passes, autograd's in the parameters' `grad`. Returns
        the summed losses, 0-dim. upcoming: see step."""
        values = self.table.values_of(batch.rows)
        phase = training_phase(self.config, step)
        loss_weights = loss_weights_at(self.config, step)
        loss_sum = torch.zeros((), device=self.runtime.device)
        lengths = [len(micro_batch.inputs) for micro_batch in batch.passes]
        slots = batch.rows.slots.split(lengths)
        signs = batch.rows.signs.split(lengths)
        ngram_grads = []
        for micro_batch, *rows in zip(batch.passes, slots, signs, strict=True):
            ngram = self.table.summed(*rows, values)
            loss, losses, _ = self.forward_pass(step, phase, loss_weights, micro_batch, ngram)
            loss.backward()
            if ngram.requires_grad:
                ngram_grads.append(ngram.grad)
            loss_sum = loss_sum + losses.sum()
        self.table.expect(batch.rows, ngram_grads, upcoming and upcoming.rows)
        return loss_sum

    def step(self, step, batch, upcoming=None):
        """One optimizer step. Returns this rank's summed losses, 0-dim.

        upcoming: the next step's Batch, whose rows are pulled as soon as this one has updated them.
        """
        loss_sum = self.accumulate(step, batch, upcoming)
        self.optimizer.step(step, lr_multiplier(self.config, step))
        return loss_sum

    @torch.no_grad()
    def score(self, step, tokens, low, length=None):
        """(losses (length,), States) of `length` tokens from `low` on, val_batch_tokens unless told
        otherwise, by the model before a step. All ranks must call it together. records/gates.py
        calls it, too."""
        length = length or self.config.val_batch_tokens
        passage = contiguous_passage(tokens, self.config.eot_token, low, length)
        plan = plan_rows([passage], self.config, self.runtime, name="validation")
        values = self.table.values_of(plan, "validation")
        ngram = self.table.summed(plan.slots, plan.signs, values)
        micro_batch = make_pass([passage], self.config, self.runtime.device)
        phase = evaluation_phase(self.config, step, length)
        _, losses, states = self.forward_pass(step, phase, (1.0,), micro_batch, ngram)
        return losses, states

    def evaluate(self, step, val):
        """Mean loss over the validation tokens, in nats per token; ranks share the passes."""
        runtime = self.runtime
        length = self.config.val_batch_tokens
        passes = self.config.val_tokens // length
        total = torch.zeros((), dtype=torch.float64, device=runtime.device)
        for number in range(runtime.rank, passes + runtime.rank, runtime.world_size):
            # A rank with no pass left repeats one with weight 0: pulling rows needs every rank.
            losses, _ = self.score(step, val, min(number, passes - 1) * length)
            total += losses.double().sum() * (number < passes)
        wait(runtime.all_reduce(total, "validation"))
        return total.item() / self.config.val_tokens


def state_digest(trainer):
    """Bytes that tell whether any bit has changed in the tensors that a step changes on this rank.

    They are sums, each of 2^22 words times random odd numbers, one a place: a change of one word
    always changes its sum. The device works them out, so that no gigabytes travel.
    """
    odd = 2 * np.random.default_rng(0).integers(2**62, size=2**22) + 1
    odd = to_device(odd, trainer.runtime.device)
    sums = []
    for group in trainer.optimizer.groups:
        for tensor in group.tensors().values():
            words = tensor.contiguous().view(-1)
            words = words.view(torch.int32 if words.element_size() == 4 else torch.int16)
            sums += [(chunk * odd[: len(chunk)]).sum() for chunk in words.split(len(odd))]
    return torch.stack(sums).cpu().numpy().tobytes() + torch.get_rng_state().numpy().tobytes()


def warm_up(trainer, first_step=0, tell=lambda text: None):
    """Compile and run, on documents that no stage cuts, each kind of step and of validation that is
    ahead of a run at `first_step`, and its last step, in which all groups are updated. Then put the
    state back: digests prove that it is bitwise what it was.

    tell: called with a line after each of them; it may raise an error to end the run.
    """
    config = trainer.config
    runtime = trainer.runtime
    before = state_digest(trainer)
    rng_state = torch.get_rng_state()
    length = max(config.micro_batch_tokens, config.val_batch_tokens)
    tokens = np.random.default_rng(0).integers(0, config.eot_token, length + 1).astype(np.uint16)
    tokens[:: min(stage.document_cap for stage in config.stages)] = config.eot_token
    passage = contiguous_passage(tokens, config.eot_token, 0, config.micro_batch_tokens)

    def training(step):
        # A pass of one passage again and again: it reads the same rows, whatever their number.
        passages = [passage] * micro_batches_of_pass(config, step, runtime)
        micro_batch = make_pass(passages, config, runtime.device)
        trainer.step(step, Batch([micro_batch], plan_rows(passages, config, runtime), tokens=0))

    def validation(step):
        trainer.score(step, tokens, 0)

    rows = plan_rows([passage], config, runtime).rows_to_update
    kept = []  # on the host, and of the table only what changes
    for group in trainer.optimizer.groups:
        index = rows if group is trainer.table else ...
        for tensor in group.tensors().values():
            kept.append((tensor, index, tensor[index].to("cpu", copy=True)))
    ahead = range(first_step, config.steps)
    firsts = {stage_at(config, step): step for step in reversed(ahead)}.values()  # of each stage
    calls = [(training, step) for step in sorted({*firsts, *ahead[-1:]})]
    calls += [(validation, step) for step in firsts if config.val_every]
    calls += [(validation, config.steps)]
    # Where code is compiled, the second call is the first without compilation.
    for work, step in calls * (1 + config.compile):
        began = time.perf_counter()
        work(step)
        runtime.synchronize()
        tell(f"warm-up: {work.__name__} at step {step} took {time.perf_counter() - began:.1f} s")
    for group in trainer.optimizer.parameter_groups:
        group.clear_gradients()
    for tensor, index, values in kept:
        tensor[index] = values.to(tensor.device)
    torch.set_rng_state(rng_state)
    if state_digest(trainer) != before:
        raise RuntimeError("the state after warm-up is not bitwise the state before it")
    runtime.ledger.clear()


def train(run):
    """One whole run, from its warm-up to its result. Returns what the status line says of it."""
    config = run.config
    trainer = run.trainer
    clock = run.clock
    warm_up(trainer, run.first_step, run.tell)
    run.log_untrained()
    loader = TrainLoader(config, run.corpus.shards, run.runtime, run.first_step)
    clock.switch()
    with contextlib.closing(loader):
        batch = loader.next_batch()
        for step in range(run.first_step, config.steps):
            run.end_if_asked()
            upcoming = loader.next_batch()  # None behind the last step
            run.loss_sum += trainer.step(step, batch, upcoming).double()
            run.loss_tokens += batch.tokens
            run.step = step + 1
            if upcoming is None or run.is_due(config.log_every):
                run.log_training()
            if run.is_due(config.val_every):
                with clock.stopped():
                    run.validate()
            if run.is_due(config.save_every):
                with clock.stopped():
                    run.save()
            batch = upcoming
    is_new = run.first_step < config.steps
    if is_new and config.takes_mean:
        trainer.optimizer.take_mean()
    clock.switch()

    if is_new:  # else it is what the run was resumed from
        try:
            run.save("checkpoint.pt")
        except OSError as error:  # told behind the result, which needs no checkpoint
            run.unsaved = error
    stop_if_interrupted()
    loss = run.validate()["val_loss"]
    stop_if_interrupted()
    run.log_result(loss)
    words = f"run:{config.run_id} val_loss:{loss:.5f}"
    drawn = plot(run.folder) if run.log.is_main else ""
    return f"{words} train_time:{clock.seconds():.1f}s log:{run.folder}/log.txt{drawn}"


# Part II: what keeps a run. Nothing below changes what is trained.

# 13. Corpus =======================================================================================

SHARD_KIND = [20240520, 1]  # magic number and version, before the count of tokens
HEADER_INTS = 256
BUILD = "build it with data/text.py or data/fineweb.py, or name another folder by --data"


class Shard(NamedTuple):
    """A file of tokens in llm.c's format."""

    path: Path
    sha256: str  # by the manifest
    length: int  # in tokens

    def read(self):
        """Its tokens, uint16. Raises ConfigError where the file is not the manifest's."""
        content = np.fromfile(self.path, np.uint8)
        is_same = hashlib.sha256(content).hexdigest() == self.sha256
        remedy = f"bring it back, and --resume a run that this has ended; or {BUILD}"
        require(is_same, self.path, "its sha256 is not the manifest's", remedy)
        return content[4 * HEADER_INTS :].view("<u2")

    def checked(self, config):
        """Its tokens, after a check of their ids. Raises ConfigError."""
        tokens = self.read()
        message = f"token id {tokens.max()} is beyond the vocabulary's eot_token={config.eot_token}"
        remedy = f"leave --eot-token out, or {BUILD}"
        require(tokens.max() <= config.eot_token, self.path, message, remedy)
        return tokens


def file_sha256(path):
    """The sha256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_shard(path, sha256):
    """The Shard of a file, which should have this sha256. Raises ConfigError where it is none."""
    require(path.is_file(), path, "no such file", BUILD)
    length = (path.stat().st_size - 4 * HEADER_INTS) // 2
    header = np.fromfile(path, "<i4", 3).tolist()
    due = [*SHARD_KIND, length]
    message = f"its header is {header}, and {due} would fit its size"
    require(header == due and length > 0, path, message, BUILD)
    return Shard(path, sha256, length)


def open_split(config, manifest, split):
    """The Shards of a split, in the order of their names. Raises ConfigError."""
    folder = Path(config.data).absolute()
    names = sorted(name for name in manifest["shards"] if re.search(f"_{split}_[^_]*$", name))
    require(names, folder, f"no *_{split}_*.bin shards", BUILD)
    return [open_shard(folder / name, manifest["shards"][name]) for name in names]


def read_manifest(folder):
    """The manifest.json of a corpus, with its sha256, its vocabulary's, and its shards as {file
    name: sha256}. The corpus is what it names. Raises ConfigError."""
    path = Path(folder, "manifest.json").absolute()
    require(path.is_file(), path, "no such file", BUILD)
    try:
        content = path.read_bytes()
        manifest = json.loads(content)
        shards = {str(row["file"]): str(row["sha256"]) for row in manifest["shards"]}
        size = manifest["vocab_size"]
        is_last = 1 < size < 2**16 and manifest["eot_token"] == size - 1
        require(is_last, f"eot_token is not the last id of vocab_size={size}, below 65535")
        token_bytes = manifest.get("token_bytes", [0] * size)  # 0: not known
        manifest["token_bytes"] = np.array(token_bytes, np.uint16).tolist()
        require(len(token_bytes) == size, f"token_bytes are not {size} numbers")
        own = manifest.get("vocabulary") or {}  # else the tokenizer is known by its name
        meaning = own.get("sha256", token_bytes), own.get("pattern", manifest.get("tokenizer"))
        manifest["vocabulary_sha256"] = hashlib.sha256(json.dumps(meaning).encode()).hexdigest()
    except Exception as error:  # odd content raises many types
        raise ConfigError(f"{path}: cannot be read ({one_line(error)}); {BUILD}") from None
    return {**manifest, "sha256": hashlib.sha256(content).hexdigest(), "shards": shards}


def vocabulary_of(folder):
    """{field of Config: value} of a corpus' vocabulary. Tensor cores like multiples of 128."""
    manifest = read_manifest(folder)
    return {
        "tokenizer": str(manifest.get("tokenizer", "own")),
        "vocab_size": 128 * math.ceil(manifest["vocab_size"] / 128),
        "eot_token": manifest["eot_token"],
    }


def fitting_val_tokens(config):
    """val_tokens, or, of a smaller validation split, what fills batches of val_batch_tokens."""
    shards = open_split(config, read_manifest(config.data), "val")
    passes = (sum(shard.length for shard in shards) - 1) // config.val_batch_tokens
    return min(config.val_tokens, max(1, passes) * config.val_batch_tokens)


class Corpus(NamedTuple):
    """The corpus of a run, as it was when the run was opened."""

    manifest: dict  # see read_manifest
    shards: list  # the training Shards
    val: Any  # (val_tokens + 1,) uint16: the first tokens of the validation split
    control: Any  # uint16: up to an eighth as many from its last one on, which judge no run
    length: int  # training tokens that fill micro-batches
    is_own: bool  # it is a text of the user's, not the track's

    def require_same(self, sha256, message):
        """Raise ConfigError unless the manifest has this sha256, which a checkpoint names."""
        remedy = "bring that one back, or name its place by --data"
        require(self.manifest["sha256"] == sha256, message, remedy=remedy)


def open_corpus(config):
    """Open and check all shards that a run needs. Raises ConfigError where they do not suit it."""
    folder = Path(config.data).absolute()
    manifest = read_manifest(folder)
    message = f"its documents do not start with eot_token={config.eot_token}"
    require(manifest["eot_token"] == config.eot_token, folder, message, "leave --eot-token out")
    needed = config.val_tokens + 1
    shards = open_split(config, manifest, "val")
    most = needed + config.val_tokens // 8
    text = np.concatenate([shard.checked(config)[:most] for shard in shards])
    val = text[:needed]
    message = f"{len(val):,} validation tokens, val_tokens={config.val_tokens:,} takes one more"
    remedy = "lower --val-tokens and --val-batch-tokens, or add text to validate on"
    require(len(val) == needed, folder, message, remedy)
    shards = open_split(config, manifest, "train")
    needed = training_tokens(config)
    length = config.micro_batch_tokens
    held = 0  # tokens that fill micro-batches
    for shard in shards:
        if held < needed:  # the run gets here
            shard.checked(config)
        held += (shard.length - 1) // length * length
    message = f"no shard has {length:,} training tokens and one more"
    require(held > 0, folder, message, "lower --micro-batch-tokens, or add text")
    message = f"one pass over the shards has {held:,} tokens, the schedule takes {needed:,}"
    is_own = config.data != TRACKS[config.track].data  # it is read as often as needed
    require(is_own or needed <= held, folder, message, "lower --steps, or add text")
    return Corpus(manifest, shards, val, text[config.val_tokens : most], held, is_own)


def validation_hash(val):
    """The sha256 of validation tokens, uint16."""
    return hashlib.sha256(val.tobytes()).hexdigest()


# 14. Command line =================================================================================

# Fields that change nothing but the order of sums: a run with other values may still be a record.
NEUTRAL_FIELDS = {"seed", "device", "log_every", "save_every", "run_id", "resume", "run_of"}
NEUTRAL_FIELDS |= {"micro_batches_a_pass"}
# Fields that may change when a run is resumed: its corpus may have moved.
RESUMED_FIELDS = {"data", "device", "log_every", "save_every", "resume"}


def with_values(config, values):
    """The Config with other values, those of a Stage's fields in all stages."""
    changes = {"stages": config.stages}
    of_stages = {}
    for name, value in values.items():
        is_known = name in vars(config) or hasattr(Stage, name)
        require(is_known, f"track {config.track} has no {name}")
        if hasattr(Stage, name):
            of_stages[name] = value
        else:
            changes[name] = value
    changes["stages"] = as_rows(Stage, changes["stages"], **of_stages)
    return dataclasses.replace(config, **changes)


def overrides_of(config):
    """{field: value} of what differs from the values of the config's track and is not neutral."""
    own = dataclasses.asdict(TRACKS[config.track])
    values = dataclasses.asdict(config).items()
    return {k: value for k, value in values if value != own[k] and k not in NEUTRAL_FIELDS}


def config_from(given):
    """The Config of a track and the values given on the command line. Without a track it is fineweb
    where CUDA and its shards are, else english."""
    shards = Path(TRACKS["fineweb"].data).glob("[!.]*_train_*.bin")
    default = "fineweb" if torch.cuda.is_available() and any(shards) else "english"
    name = given.get("track", default)
    require(name in TRACKS, f"--track {name}", "no such track", f"there are {', '.join(TRACKS)}")
    track = TRACKS[name]
    data = given.get("data", track.data)
    if data == track.data:
        return with_values(track, given)
    config = with_values(track, {**vocabulary_of(data), **given})
    return with_values(config, {"val_tokens": fitting_val_tokens(config), **given})


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ConfigError(f"{message}; see --help")


def parse_literal(text, kind):
    """The value of a field of this type, a tuple or bool; a number alone is a tuple of one."""
    try:
        value = ast.literal_eval(text.title() if text.lower() in ("true", "false") else text)
        str(value)  # raises for integers that are too long to be quoted
    except Exception:  # of many types
        expected = "expected true or false, or a tuple such as (1, 2)"
        raise argparse.ArgumentTypeError(f"{text}: {expected}") from None
    is_number = type(value) in (int, float) and kind is not bool
    return (value,) if is_number else value


def parse_command_line(argv):
    """{field: value} of what the command line names. Raises ConfigError."""
    parser = Parser(
        usage="train_gpt.py [--key value ...]",
        description=f"Tracks: {', '.join(TRACKS)}.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--check", action="store_true", help="everything but the steps")
    fields = {}
    for values in (*TRACKS.values(), Stage()):  # another script's track may have fields of its own
        fields |= {field.name: field for field in dataclasses.fields(values)}
    del fields["start"]
    named = [word.removeprefix("--track=") for word in argv]
    shown = next((TRACKS[word] for word in named if word in TRACKS), Config())
    for name, field in fields.items():
        kind = field.type
        value = getattr(shown, name, "by stage")
        default = "" if name in ("stages", "layers") else f" [{value}]"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind if kind in (int, float, str) else functools.partial(parse_literal, kind=kind),
            metavar="",
            help=f"{field.metadata['help']}{default}".replace("%", "%%"),
        )
    return vars(parser.parse_args(argv))


# 15. What a run keeps =============================================================================


class Clock:
    """Seconds of training, and those of its processor. While it stands, the state of the run must
    not change."""

    def __init__(self, runtime, total=0.0, processor=0.0, digest=lambda: b""):
        self.runtime = runtime
        self.digest = digest
        self.stopped_at = None  # the digest of the state when it was stopped
        self.total = total  # while the clock runs, less the time at which it was started
        self.processor = processor
        self.is_running = False

    def switch(self):
        """Start the clock, or stop it, once the device has done its work. Raises RuntimeError where
        the state has changed since it was stopped."""
        self.runtime.synchronize()
        if not self.is_running and self.stopped_at not in (None, self.digest()):
            raise RuntimeError("the state of the run has changed while its clock stood still")
        sign = 1 if self.is_running else -1
        self.total += sign * time.perf_counter()
        self.processor += sign * time.process_time()
        self.is_running = not self.is_running
        if not self.is_running:
            self.stopped_at = self.digest()

    def seconds(self):
        return self.total + time.perf_counter() * self.is_running

    @contextlib.contextmanager
    def stopped(self):
        self.switch()
        yield
        self.switch()


def device_name(device):
    """The GPU's name, or the processor's with the number of its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, ValueError, IndexError):  # Linux; the first is often empty
        name = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)[0]
    return f"{name} x{os.cpu_count()}"


def git_state():
    """(commit, 1 if tracked files differ from it else 0); "unknown" is what git does not say."""
    command = "git rev-parse --show-prefix HEAD && git status --porcelain --untracked-files=no"
    command = f"unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE; {command}"  # which a hook has set
    options = {"cwd": Path(__file__).resolve().parent, "capture_output": True, "text": True}
    done = subprocess.run(command, shell=True, errors="replace", **options)
    found = re.match(r"(?:logs/.*)?\n([0-9a-f]{40,})\n", done.stdout)
    if not found:  # or it is the commit of a repository around this one
        return "unknown", "unknown"
    return found[1], "unknown" if done.returncode else int(found.end() < len(done.stdout))


CODE_SHA256 = file_sha256(__file__)  # of what runs: the file may be edited meanwhile
INTERRUPTED = threading.Event()  # by a signal: the run ends where it looks next


@contextlib.contextmanager
def signals_heard():
    """Let the first signal end the run after the step at hand, and another one, over a second
    later, at once. A thread hears it: the main one may wait for other ranks, or for memory. Behind
    the run signals do again what they did."""
    INTERRUPTED.clear()
    received, sent = os.pipe()
    os.set_blocking(sent, False)

    def watch():
        first = math.inf
        while number := os.read(received, 1)[0]:
            if not INTERRUPTED.is_set():
                INTERRUPTED.set()
                first = time.monotonic()
                with contextlib.suppress(OSError):  # of a console that is gone
                    os.write(2, b"interrupted: ends after the step at hand; again: at once\n")
            elif time.monotonic() - first >= 1:  # a launcher sends on what its ranks have got, too
                os._exit(128 + number)
        os.close(received)

    with contextlib.ExitStack() as after:
        after.callback(os.close, sent)
        after.callback(os.write, sent, b"\0")
        if threading.current_thread() is threading.main_thread():  # which alone may listen
            # The system's handler writes there, whatever Python does.
            after.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(sent))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # as under nohup
                    former = signal.signal(number, lambda number, frame: None)
                    after.callback(signal.signal, number, former)
        threading.Thread(target=watch, daemon=True).start()
        yield


def stop_if_interrupted():
    if INTERRUPTED.is_set():
        raise KeyboardInterrupt


class Log:
    """The run's log.txt and console lines; silent on every rank but 0."""

    def __init__(self, is_main):
        self.is_main = is_main
        self.file = None
        self.pending = b""  # what the disk has not taken yet
        self.unwritten = None  # why

    def open(self, folder, is_new, may_replace, is_check=False):
        """Begin a folder's log.txt with the script's source, or go on with it. Returns whether it
        begins. may_replace: whether a new run may replace one that has not completed; is_check:
        whether it is only tried. Raises ConfigError, also where another process writes the log."""
        if not self.is_main:
            return False
        path = folder / "log.txt"
        if not is_check:
            folder.mkdir(parents=True, exist_ok=True)
        is_file = path.is_file() or not path.exists()  # to open a pipe would wait for its writer
        require(is_file, path, "is no regular file", "move it away")
        file = tempfile.TemporaryFile(dir=next(filter(Path.is_dir, path.parents)))  # has no name
        if path.exists() or not is_check:
            file = open(path, "ab", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{path}: another process writes this run; wait for it") from None
        except OSError as error:
            print(f"note: {path}: {error.strerror}; start the run only once", file=sys.stderr)
        written = path.read_bytes() if path.exists() else b""
        may_replace = may_replace and b"\nstatus:ok " not in written
        is_free = not is_new or may_replace or not written
        require(is_free, f"{folder} exists", remedy=f"change --run-id, or --resume {folder.name}")
        if is_check:
            return True
        self.file = file
        kept = 0 if is_new else written.rfind(b"\n") + 1  # a kill may have torn the last line
        file.truncate(kept)
        if not kept:
            source = Path(__file__).read_text("utf-8")
            self.line(source.rstrip("\n") + "\n===== END OF CODE =====", on_console=False)
        return not kept

    def line(self, text, on_console=True, in_file=True):
        """One event, a line: to the file, and to the console. What the disk does not take goes
        ahead of the next line; until then `unwritten` says why."""
        if not self.is_main:
            return
        if on_console:
            try:
                print(text if text.isascii() else ascii(text)[1:-1], flush=True)
            except OSError:  # the console is gone, which ends no run; Python would write once more
                sys.stdout = open(os.devnull, "w")
        if in_file and self.file is not None:
            self.pending += f"{text}\n".encode(errors="backslashreplace")
            try:
                while self.pending:
                    self.pending = self.pending[self.file.write(self.pending) :]
                self.unwritten = None
            except OSError as error:
                self.unwritten = OSError(f"{self.file.name}: not written: {one_line(error)}")


def save_checkpoint(path, content):
    """Write `content` (nested dicts of tensors and plain types), and the file's sha256 beside it.
    What was there stays until the new file is whole. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        path.with_suffix(".sha256").write_text(f"{file_sha256(temporary)}  {path.name}\n")
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch's zip writer reports a failed write so
        raise OSError(f"{path}: not written: {one_line(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)


def find_checkpoint(run, key="resume"):
    """The content of a checkpoint, its Config and path, and words on another script that made it:
    of a file, or the newest sound one of a run, by its id or its folder. Raises ConfigError."""
    paths = [Path(run)]
    for folder in (Path("logs", run), Path(run)):
        paths += [folder / "checkpoint.pt", *sorted(folder.glob("step_*.pt"), reverse=True)]
    problem = f"no checkpoint in {Path('logs', run)}; name a run that has saved one"
    for path in filter(Path.is_file, paths):
        try:
            beside = path.with_suffix(".sha256")
            is_whole = beside.is_file() and file_sha256(path).encode() in beside.read_bytes()
            require(is_whole, "damaged: its sha256 is not the one beside it")
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            track = content["config"]["track"]
            require(track in TRACKS, f"track {track}", "use the script that it began with")
            config = type(TRACKS[track])(**content["config"])
            is_same = content["rows"] == row_fingerprint(config) and "vocabulary_sha256" in content
            require(is_same, "another version of the script has made it")
            code = content["code_sha256"]
            by = f" trained by another train_gpt.py, code_sha256:{code}" * (code != CODE_SHA256)
            return {**content, "config": config, "path": path, "by": by}
        except Exception as error:  # torch raises several types for a damaged file
            problem = f"{path}: cannot be read ({type(error).__name__}: {one_line(error)})"
            print(f"note: {problem}", file=sys.stderr)
    raise ConfigError(f"--{key} {run}: {problem}")


def restore(trainer, content):
    """Take over weights, optimizer state and random numbers. Raises ConfigError."""
    try:
        trainer.model.load_state_dict(content["model"])
        for group in trainer.optimizer.groups:
            group.load(content["groups"][group.name])
        torch.set_rng_state(content["rng"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        words = f"the checkpoint is not of this model: {one_line(error)}"
        raise ConfigError(f"{words}; use the script of its run") from None


def resumed(given):
    """(Config, the content of the checkpoint that --resume names, or None) of given values."""
    run = given.get("resume", "")
    if run == "auto":
        run = given.get("run_id", "")
        run = run if any(Path("logs", run).glob("[!.]*.pt")) else ""
    if not run:
        return config_from(given), None
    content = find_checkpoint(run)
    saved = content["config"]
    config = with_values(saved, {**given, "resume": saved.resume})
    for name in vars(saved).keys() - RESUMED_FIELDS:
        is_same = getattr(config, name) == getattr(saved, name)
        key = f"--{name.replace('_', '-')} {getattr(config, name)}"
        require(is_same, key, "the run to resume keeps what it has", "leave the key out")
    return config, content


# 16. The run ======================================================================================


def peak_memory(config, runtime):
    """The peak memory of a rank's GPU in GiB, by estimate."""
    dim = config.model_dim
    layers = len(config.layers)
    matrices = 4 * dim**2 * len(config.layers_with("attends")) + 2 * dim * config.mlp_dim * layers
    embeddings = (2 + len(config.layers_with("value_embedding"))) * dim * config.vocab_size
    passes = [micro_batches_of_pass(config, step, runtime) for step in range(config.steps)]
    rows = max(stage.softmax_rows or config.vocab_size for stage in config.stages)
    # Factors of what a pass keeps of a token in a layer are by generated code (NOTES, 2026-11-29).
    of_token = layers * (16.2 * dim + 2.2 * config.mlp_dim)
    narrow = 2 * (matrices + embeddings)  # with gradients
    narrow += max(passes) * config.micro_batch_tokens * of_token + 2 * LOSS_CHUNK["cuda"] * rows
    # Masters, moments, means and the table, which ranks share out
    wide = 3 * matrices + 4 * embeddings + dim * config.ngram_rows * bool(config.ngram_orders)
    size = config.torch_dtype.itemsize
    return 1 + (size * narrow + 4 * wide / runtime.world_size) / 2**30  # one is CUDA's own


def check_memory(config, runtime, free):
    """A line: what a rank takes of so many free GiB. Raises ConfigError where it takes more, with
    the options that help: smaller passes first, then fewer rows of the table."""
    tries = [{"micro_batches_a_pass": n} for n in range(config.micro_batches_a_pass, 0, -1)]
    tries += [{**tries[-1], "ngram_rows": config.ngram_rows >> n} for n in range(1, 8)]
    peaks = [peak_memory(dataclasses.replace(config, **values), runtime) for values in tries]
    words = f"{peaks[0]:.1f} GiB by estimate, {free:.1f} are free"
    remedy = "take more GPUs, or larger ones"
    for values in [values for values, peak in zip(tries, peaks, strict=True) if peak < free][:1]:
        remedy = f"add {' '.join(f'--{k} {v}' for k, v in values.items())}".replace("_", "-")
    require(peaks[0] < free, "memory", words, remedy)
    return f"memory: {words}"


class Run:
    """A run between its opening and its result."""

    def __init__(self, config, checkpoint, runtime, log, is_check):
        """Check all that a run needs, build it, and open its log unless it is only checked. With
        the content of a checkpoint it goes on from there. Raises ConfigError."""
        seed = config.seed if config.seed >= 0 else int.from_bytes(os.urandom(4), "little")
        run_id = config.run_id or f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.urandom(2).hex()}"
        seed, run_id = runtime.agree("run", [seed, run_id])  # what is drawn is so for all ranks
        config = dataclasses.replace(config, seed=seed, run_id=run_id)
        content = checkpoint or {"step": 0, "seconds": [0.0, 0.0]}
        step = runtime.agree("step", content["step"])
        problem = f"step {content['step']} here, {step} on another node"
        require(step == content["step"], "--resume", problem, "all must share logs/")
        self.config = config
        self.runtime = runtime
        self.log = log
        self.corpus = open_corpus(config)
        data = runtime.agree("data", self.corpus.manifest["sha256"])
        self.corpus.require_same(data, f"{config.data}: another rank has another corpus there")
        self.val_sets = {"val_loss": self.corpus.val}  # validation tokens by the name of their loss
        torch.manual_seed(seed)
        if is_check and runtime.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(runtime.device)
            log.line(check_memory(config, runtime, free / 2**30))
        self.trainer = Trainer(config, runtime)
        self.folder = Path("logs", run_id)
        self.unsaved = None  # why the last checkpoint is not there
        if checkpoint is not None:
            message = f"{config.data}/manifest.json is not the one that the run began with"
            self.corpus.require_same(content["data"], f"--resume: {message}")
            restore(self.trainer, content)
            self.folder = content["path"].parent
        steps = sorted(self.folder.glob("step_*.pt"))
        self.saved = [path for path in steps if path < content.get("path", path)]  # make room
        self.first_step = step  # of this process; later than 0 where it has resumed the run
        self.step = step  # how many are done
        digest = functools.partial(state_digest, self.trainer)
        self.clock = Clock(runtime, *content["seconds"], digest)
        self.loss_sum = 0.0  # of the steps since the last logged one, on this rank
        self.loss_tokens = 0  # of these steps, on all ranks
        self.check_room()
        is_new = checkpoint is None
        self.check_folder(is_new)
        if log.open(self.folder, is_new, config.resume == "auto", is_check):
            self.write_header()
        if not is_new:
            where = f"step:{step}/{config.steps} world_size:{runtime.world_size}"
            log.line(f"resumed:{run_id} {where}{content['by']}")

    def tell(self, line):
        """Show a line on the console alone. Raises KeyboardInterrupt after a signal."""
        stop_if_interrupted()
        self.log.line(line, in_file=False)

    def is_due(self, every):
        """Whether the steps done are a multiple of `every` (0: never), and steps are left."""
        return every > 0 and self.step % every == 0 and self.step < self.config.steps

    def log_losses(self, losses, words=""):
        """Log losses of the model as it stands, which must be finite, with five decimals."""
        said = " ".join(f"{name}:{loss:.5f}" for name, loss in losses.items())
        took = 1000 * self.clock.seconds()
        line = (
            f"step:{self.step}/{self.config.steps} {said}{words} "
            f"train_time:{took:.0f}ms step_avg:{took / max(1, self.step):.2f}ms"
        )
        self.log.line(line, on_console=False)
        self.log.line(line + self.time_left(), in_file=False)
        if not all(map(math.isfinite, losses.values())):
            raise FloatingPointError(f"{said} at step {self.step}")

    def time_left(self):
        """Words on how long training still takes, for a terminal; none for a pipe or a file."""
        if not os.isatty(1) or self.step == self.config.steps:
            return ""
        # By tokens, of which later steps may have more.
        done = training_tokens(self.config, self.step)
        share = training_tokens(self.config) / done - 1
        seconds = share * self.clock.seconds()
        return f" left:{datetime.timedelta(seconds=round(seconds))}"

    def log_training(self):
        """Log the mean loss of the training steps since the last logged one."""
        wait(self.runtime.all_reduce(self.loss_sum, "training loss"))
        losses = {"train_loss": self.loss_sum.item() / self.loss_tokens}
        lr_mul = lr_multiplier(self.config, self.step - 1)
        self.log_losses(losses, f" lr_mul:{lr_mul:.3f}")
        self.loss_sum = 0.0
        self.loss_tokens = 0

    def validate(self):
        """Log the validation losses by name, and return them. The clock stands still."""
        small = self.trainer.optimizer.groups[0].state["small"]["master"]
        digest = hashlib.sha256(small.cpu().numpy()).hexdigest()
        if self.runtime.agree(f"small {self.step}", digest) != digest:
            raise RuntimeError(f"ranks hold different small parameters at step {self.step}")
        val_sets = self.val_sets.items()
        losses = {name: self.trainer.evaluate(self.step, val) for name, val in val_sets}
        self.log_losses(losses)
        return losses

    def save(self, name=None):
        """Write a checkpoint, and keep the newest two that the run has written on the way. All
        ranks call it together; the clock stands still."""
        if self.loss_tokens:
            self.log_training()  # a checkpoint holds no losses
        content = {
            "step": self.step,
            "config": dataclasses.asdict(self.config),
            "rows": row_fingerprint(self.config),
            "data": self.corpus.manifest["sha256"],
            "vocabulary_sha256": self.corpus.manifest["vocabulary_sha256"],
            "code_sha256": CODE_SHA256,
            "model": self.trainer.model.state_dict(),
            "groups": {group.name: group.full_state() for group in self.trainer.optimizer.groups},
            "rng": torch.get_rng_state(),
            "seconds": [self.clock.total, self.clock.processor],
        }
        path = self.folder / (name or f"step_{self.step:06d}.pt")
        try:
            if self.log.is_main:
                save_checkpoint(path, content)
                self.saved += [path] * (name is None)
                while len(self.saved) > 2:
                    old = self.saved.pop(0)
                    old.unlink(missing_ok=True)
                    old.with_suffix(".sha256").unlink(missing_ok=True)
        finally:
            self.runtime.follow_main(f"saved {self.step}")

    def end_if_asked(self):
        """Raise KeyboardInterrupt once a signal has reached a rank, at a step that all ranks agree
        on, and after a save if the run saves at all."""
        runtime = self.runtime
        is_alone = runtime.world_size == 1
        if not INTERRUPTED.is_set() and (is_alone or not runtime.store.check(["stop"])):
            return
        # No rank is two prefetch windows ahead of another.
        stop = runtime.agree("stop", self.step if is_alone else self.step + 2 * PREFETCH)
        # Between Adam's steps gradients wait, and they are not saved.
        if self.step < stop or self.step % self.config.adam_every:
            return
        if self.config.save_every and self.step:
            with self.clock.stopped():
                self.save()
        raise KeyboardInterrupt

    def check_folder(self, is_new):
        """Raise ConfigError where a checkpoint in the folder is of another run."""
        for path in self.folder.glob("[!.]*.pt"):
            run_id = "?"
            with contextlib.suppress(Exception):  # of a damaged file
                content = torch.load(path, "cpu", weights_only=True, mmap=True)
                run_id = content["config"]["run_id"]
            is_own = run_id in ("?", self.config.run_id) and not is_new
            require(is_own, path, f"is of the run {run_id}", "move it away, or --resume that run")

    def check_room(self):
        """Raise ConfigError where the disk that will be written has no room for checkpoints."""
        tensors = (group.tensors().values() for group in self.trainer.optimizer.groups)
        size = sum(tensor.nbytes for tensor in itertools.chain(*tensors))
        # Two on the way stay while the next is written; a resumed run may have them already.
        files = max(1, 3 - len(self.saved)) if self.config.save_every else 1
        needed = files * size * self.runtime.world_size / 2**30  # the parts of all ranks
        path = self.folder.absolute()  # logs/ may be a link to another disk
        folder = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
        require(folder.is_dir(), folder, "is no folder, or a link to none", "mount its disk")
        free = shutil.disk_usage(folder).free / 2**30
        words = f"new checkpoints take {needed:.2f} GiB at most, {free:.2f} GiB are free"
        require(needed < free, f"the disk of {folder}", words, "make room")

    def write_header(self):
        """Log what makes the run reproducible: machine, configuration, data, back ends."""
        config = self.config
        log = self.log
        commit, is_dirty = git_state()
        triton = getattr(sys.modules.get("triton"), "__version__", "none")
        log.line(
            f"run:{config.run_id} track:{config.track} commit:{commit} dirty:{is_dirty} "
            f"code_sha256:{CODE_SHA256} seed:{config.seed} "
            f"world_size:{self.runtime.world_size} device:{device_name(self.runtime.device)} "
            f"torch:{torch.__version__} cuda:{torch.version.cuda or 'none'} triton:{triton} "
            f"started:{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"
        )
        log.line("config:" + json.dumps(dataclasses.asdict(config)), on_console=False)
        overrides = overrides_of(config)
        if overrides:
            log.line("overrides:" + json.dumps(overrides))
        elif config.run_of:
            log.line("batch:{} counter:{} start:{}".format(*config.run_of.split(":")))
        passes = math.ceil(training_tokens(config) / self.corpus.length)
        log.line(
            f"data:{self.corpus.manifest['sha256']} shards:ok passes:{passes} "
            f"backends:attention={self.trainer.attention_name},"
            f"matmul=torch-{self.trainer.matmul_name},"
            f"compile={'inductor' if config.compile else 'off'}"
        )
        groups = self.trainer.optimizer.groups
        log.line("size: " + " ".join(f"{group.name}={group.size:,}" for group in groups))
        log.line("===== START =====")

    def log_untrained(self):
        """Log the loss of the model before it is trained, ahead of the clock."""
        gates = self.gates()
        if gates and self.step == 0:
            loss = gates.untrained_loss(self.trainer, self.config.steps, self.corpus.val)
            self.log.line(f"untrained val_loss:{loss:.5f}")

    def gates(self):
        """The module records/gates.py, which judges a run; None where the trainer stands alone,
        without the repository: such a run is no record."""
        try:
            from records import gates
        except ImportError:
            return None
        return gates

    def check_validity(self, reported):
        """The Verdict of the gates on the loss that the run reports; None without them."""
        seen = self.trainer, self.step, self.corpus.val, reported, state_digest
        gates = self.gates()
        return gates and gates.check_gates(*seen, self.corpus.control, self.clock.stopped_at)

    def log_own_text(self):
        """Log what one reading of a text of the user's takes, and how well lzma packs the bytes
        that are scored, if tokens are bytes."""
        config = self.config
        length = self.corpus.length
        share = length / training_tokens(config)  # of a run
        steps = max(1, round(share * config.steps))
        seconds = share * self.clock.seconds()
        self.log.line(
            f"your text has {length:,} tokens; --steps {steps} reads it once, "
            f"about {seconds:.0f} s here"
        )
        # Of other tokens the trainer knows the number of their bytes alone.
        if config.tokenizer == "bytes":
            text = self.corpus.val[1:]
            text = text[text < 256].astype(np.uint8).tobytes()
            bits = 8 * len(lzma.compress(text)) / len(text)
            self.log.line(f"lzma bits_per_byte:{bits:.5f}")

    def log_result(self, loss):
        """Log what came of a run, of its validation loss and of the gates. Raises RuntimeError
        where a gate has failed."""
        config = self.config
        log = self.log
        verdict = self.check_validity(loss)
        since = " since resume" * (self.first_step > 0)
        steps = config.steps - self.first_step  # of this process
        sent = [f" {'/'.join(key)}={size / steps:.0f}" for key, size in self.runtime.ledger.items()]
        log.line(f"comms: sent_bytes per step{since}{''.join(sent) or ' none=0'}")
        if verdict:
            log.line(verdict.line())
        passed = verdict.passed if verdict else {}
        sizes = np.array(self.corpus.manifest["token_bytes"])
        val_bytes = int(sizes[self.corpus.val[1:]].sum())  # 0: not known
        bits = loss * config.val_tokens / math.log(2)
        words = f"bits_per_byte:{bits / (val_bytes or math.nan):.5f} val_bytes:{val_bytes}"
        if config.mean_share and not config.takes_mean:  # what it would have been
            self.trainer.optimizer.take_mean()
            words += f" mean_val_loss:{self.trainer.evaluate(self.step, self.corpus.val):.5f}"
        log.line(words)
        if self.corpus.is_own:
            self.log_own_text()
        gates = [f" {name}:{'ok' if is_passed else 'FAILED'}" for name, is_passed in passed.items()]
        validity = f"validity:{''.join(gates) or 'unchecked'}"
        sha256 = validation_hash(self.corpus.val)
        log.line(f"{validity} val_tokens:{config.val_tokens} val_sha256:{sha256}")
        tokens = training_tokens(config)
        seconds = self.clock.seconds()
        log.line(
            f"final val_loss:{loss:.5f} train_time:{1000 * seconds:.0f}ms tokens:{tokens} "
            f"peak_memory:{self.runtime.peak_memory_mib()}MiB{since} "
            f"tokens_per_s:{tokens / seconds:.0f} cpu_time:{1000 * self.clock.processor:.0f}ms"
        )
        if not all(passed.values()):
            raise RuntimeError(f"the gates refuse the model: {validity}; {verdict.reason}")


def plot(folder):
    """The status line's word for a plot of the run, which the records package draws if it can."""
    with contextlib.suppress(Exception):
        from records.picture import plot_run

        return f" plot:{plot_run(folder)}"
    return ""


ENDINGS = (  # what can end a program, the exit status, and what the status line says of it
    (KeyboardInterrupt, 130, "interrupted"),
    (ConfigError, 2, "error {said}"),
    (FloatingPointError, 1, "nan {said}; start another run with a lower learning rate"),
    (MemoryError, 1, "oom {said}; lower micro_batches_a_pass to 1, then ngram_rows"),
    (OSError, 1, "error {said}; check the path, and that the disk is not full"),
)


def ending_of(error):
    """(exit status, words of the status line) of a program that an error has ended; prints the
    traceback of an error in the script."""
    said = one_line(error)
    # On a CPU torch raises a RuntimeError, which only its words tell from others.
    if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in said:
        error = MemoryError(said)
    is_compiler = type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "triton"))
    if is_compiler and not INTERRUPTED.is_set():
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        error = ConfigError("")
        said += f"; go without the compiler by --compile false, or delete its cache, {cache_dir()}"
    for kinds, status, words in ENDINGS:
        if isinstance(error, kinds):
            return status, words.format(said=said)
    if INTERRUPTED.is_set():  # the compiler, or a collective whose other ranks have ended first
        return 130, "interrupted"
    traceback.print_exception(error)
    return 1, f"error {type(error).__name__}: {said}"


@signals_heard()
def main(argv=None, run_class=None):
    """Returns the exit status: 0 complete, 1 failed on the way, 2 bad input, 130 interrupted.

    run_class: another script's subclass of Run, which it trains.
    """
    log = Log(is_main=os.environ.get("RANK", "0") == "0")
    try:
        given = parse_command_line(sys.argv[1:] if argv is None else argv)
        is_check = given.pop("check", False)
        config, checkpoint = resumed(given)
        runtime = Runtime(config.device)
        run = (run_class or Run)(config, checkpoint, runtime, log, is_check)
        words = "check:ok" if is_check else f"status:ok {train(run)}"
        runtime.close()
        if run.unsaved is None:
            log.line(words, on_console=False)
        if run.unsaved or log.unwritten:  # the console has the result
            raise run.unsaved or log.unwritten
        log.line(words, in_file=False)
        return 0
    except (KeyboardInterrupt, Exception) as error:
        status, words = ending_of(error)
        log.line(f"status:{words}")
        if not log.is_main:
            print(f"rank {os.environ['RANK']}: status:{words}", file=sys.stderr, flush=True)
        return status
    finally:
        if log.file is not None:
            log.file.close()  # its lock, too: an error's traceback may hold the run for long


if __name__ == "__main__":
    sys.exit(main())
