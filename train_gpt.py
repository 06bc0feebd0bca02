"""Train a GPT to a target validation loss as fast as this machine allows, in one file.

    python train_gpt.py --track nano                    one process: laptop CPU or one GPU
    torchrun --nproc_per_node=8 train_gpt.py            one process per GPU (several nodes: see README)
    python train_gpt.py --help                          every configuration field, default and meaning
    python train_gpt.py --track nano --check            preflight only
    python train_gpt.py sample --checkpoint F --prompt "import torch"
    python train_gpt.py eval --checkpoint F

Chapters, in reading order:
    1. Configuration and tracks     one frozen, self-checking dataclass
    2. Runtime                      ranks, device, collectives that count their bytes, the log
    3. Data                         shards, document-aligned micro-batches, hashed n-gram rows, prefetching
    4. Model                        attention back ends, the GPT
    5. Optimizer                    the rule table, update rules, eigenbases, the n-gram table, sharding
    6. Schedules                    pure functions of the step
    7. Evaluation                   validation loss and the validity gates
    8. Checkpoints                  atomic, checksummed, world-size independent
    9. Training loop                warm-up and proven restore, starting models, clock, steps
   10. Commands                     train, --check, sample, eval

A step's global batch is a fixed list of micro-batches. Rank r of W takes every W-th, so world sizes
see the same tokens and take the same step up to the order of floating-point sums.
"""
import ast
import contextlib
import dataclasses
import difflib
import hashlib
import json
import math
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# ======================================================================================================
# 1. Configuration and tracks
# ======================================================================================================

ATTENTION_BLOCK = 64  # back end sdpa: queries of a block share their keys
GATE_DIM = 12  # gates read the first few channels of the residual stream
SOAP_RULES = ("soap", "soap_muon", "kl_soap")  # update rules that work in eigenbases
SHARD_AXIS = {"whole": 0, "rows": 1, "cols": 2}  # the axis of a bank (matrices, rows, columns) that ranks share
EOT_TOKEN = {"bytes": 256, "gpt2": 50256}  # the largest id of each tokenizer; every document starts with it


class ConfigError(ValueError):
    """Something the user can put right: the message holds the value, the constraint and the remedy."""


def knob(default, help):
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Config:
    """One run, resolved. A field that follows a schedule is a tuple of (fraction of the run, value) pairs;
    a bare value on the command line stands for a constant schedule."""
    # --- data
    track: str = knob("nano", "name of the track these values belong to")
    data: str = knob("data/python", "corpus folder with *_train_*.bin, *_val_*.bin and manifest.json")
    tokenizer: str = knob("bytes", "bytes | gpt2: what the token ids mean")
    epochs: int = knob(1, "passes over the training shards that a run may take")
    first_data: str = knob("", "corpus that the model of --init-from has learned, validated on as well; empty: none")
    # --- batch; schedules are (fraction of the run, value) pairs
    steps: int = knob(720, "optimizer steps, the length of every schedule")
    micro_batch_tokens: int = knob(1024, "tokens of one forward and backward pass on one rank")
    micro_batches: tuple = knob(((0.0, 4),), "schedule: micro-batches of a global step, a multiple of the world size")
    document_cap: tuple = knob(((0.0, 512),), "schedule: longest piece of a document that attention sees at once")
    # --- model
    model_dim: int = knob(128, "width of the residual stream")
    num_layers: int = knob(4, "transformer blocks")
    head_dim: int = knob(64, "width of an attention head; model_dim / head_dim heads")
    mlp_dim: int = knob(512, "hidden width of the ReLU^2 MLP")
    windows: tuple = knob(((0.0, (64, 128)),), "schedule: (short, long) attention windows in tokens")
    long_layers: tuple = knob((3,), "layers that attend through the long window")
    value_embedding_layers: tuple = knob((0, 3), "layers whose values receive a gated token embedding")
    logit_cap: float = knob(15.0, "logits are squashed into (-cap, cap) by tanh")
    ngram_orders: tuple = knob((2, 3, 4, 5, 6, 8, 12), "orders of the hashed n-gram embedding; () switches it off")
    ngram_rows: int = knob(2**20, "rows of the n-gram table, shared by all orders")
    # --- optimizer; see RULES for what applies to which parameter
    matrix_update: str = knob("muon", "muon | soap | soap_muon | kl_soap | adam: rule of the hidden matrices")
    matrix_lr: float = knob(0.015, "learning rate of hidden matrices; a step's RMS is this / sqrt(columns) at most")
    matrix_decay: float = knob(0.02, "cautious weight decay of hidden matrices, per unit of learning rate")
    basis_every: int = knob(10, "soap rules: each matrix gets new eigenbases every k-th step, staggered")
    one_sided_above: int = knob(256, "soap rules: a matrix side larger than this gets no eigenbasis")
    matrix_shard: str = knob("whole", "whole | rows | cols: ranks share whole matrices, or each one's rows or columns")
    momentum: tuple = knob((0.85, 0.95), "Muon's momentum at the start and after the first tenth of the run")
    adam_lr: float = knob(0.01, "learning rate of embeddings, head and scalars under Adam")
    adam_every: int = knob(1, "Adam parameters step every k-th step, on the mean gradient since the last")
    ngram_lr: float = knob(0.1, "learning rate of the n-gram table (row-wise Adagrad); 0: the table is frozen")
    ngram_floor: float = knob(0.2, "gradient RMS of one token below which a table row's steps shrink")
    ngram_decay: float = knob(0.01, "weight decay of the n-gram table, per unit of learning rate")
    ngram_every: int = knob(1, "the n-gram table steps every k-th step, on the gradients since the last")
    ngram_comms: str = knob("tokens", "tokens | rows | row_sharded: what travels of the n-gram table, see NgramTable")
    ngram_host: bool = knob(False, "keep a row_sharded table in host memory instead of the device's")
    cooldown: float = knob(0.6, "last fraction of the run over which learning rates fall linearly")
    final_lr: float = knob(0.02, "learning-rate multiplier at the end of the cooldown")
    mtp_weights: tuple = knob(((0.0, (1.0,)),), "schedule: loss weights of the next, second-next, ... token")
    untie_at: float = knob(0.0, "fraction of the run at which the head gets weights of its own; 0: never tied")
    # --- continual training, see frozen_directions
    init_from: str = knob("", "run id, or checkpoint file, whose weights and n-gram table a run starts from")
    trained: str = knob("all", "all | matrices: what steps change; the hidden matrices are the banks attention and mlp")
    unfreeze_rank_ratio: float = knob(1.0, "share of a hidden matrix' singular directions that may move; 1: all of it")
    adaptive_rank: bool = knob(False, "that share is a mean: layers that change their input more move more")
    # --- evaluation and bookkeeping
    val_tokens: int = knob(1_048_576, "tokens of the validation split that are scored")
    val_sha256: str = knob("b966f400d6117f6907939cab7d973eba68b35e02d73334687b9e7074ac88eb2c",
                           "sha256 of those tokens and the next (uint16); empty: not compared")
    val_every: int = knob(0, "validate every so many steps (untimed); 0: only at the end")
    target_loss: float = knob(0.88, "the track's target validation loss, in nats per token; 0: none")
    log_every: int = knob(20, "log the training loss every so many steps")
    save_every: int = knob(0, "keep a checkpoint every so many steps; 0: only the final one")
    run_id: str = knob("", "name of the folder under logs/; empty: drawn from date and time")
    resume: str = knob("", "run id, or checkpoint file, to continue from")
    runs: int = knob(0, "runs of a record, declared with each of them; 0: not for a record")
    # --- machine
    seed: int = knob(-1, "seed of initialisation and data order; -1: drawn, and logged")
    device: str = knob("auto", "auto | cpu | cuda")
    dtype: str = knob("bfloat16", "bfloat16 | float32: matrices and activations; reductions are float32")
    attention: str = knob("auto", "auto | sdpa | varlen")
    compile: bool = knob(True, "compile the model with torch.compile where a compiler is found")

    def __post_init__(self):
        def refuse_unless(good, name, constraint):
            if not good:
                raise ConfigError(f"{name}={getattr(self, name)}: {constraint}")
        for name in ("micro_batches", "document_cap", "windows", "mtp_weights"):
            starts = [pair[0] for pair in getattr(self, name) if type(pair) is tuple and len(pair) == 2]
            refuse_unless(starts and starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < 1, name,
                          "a schedule is (fraction, value) pairs that start at 0 and rise below 1, such as "
                          "((0.0, A), (0.5, B))")
        for name in ("micro_batches", "document_cap"):
            refuse_unless(all(type(value) is int and value > 0 for _, value in getattr(self, name)), name,
                          "values are positive integers")
        refuse_unless(all(type(pair) is tuple and len(pair) == 2 and all(type(w) is int and w > 0 for w in pair)
                          for _, pair in self.windows), "windows", "values are (short, long) pairs of positive integers")
        refuse_unless(all(type(weights) is tuple and weights and min(weights) >= 0 and weights[0] > 0
                          for _, weights in self.mtp_weights), "mtp_weights",
                      "values are tuples of weights, the first above 0")
        for name in ("epochs", "steps", "micro_batch_tokens", "model_dim", "num_layers", "head_dim", "mlp_dim",
                     "logit_cap", "matrix_lr", "basis_every", "adam_lr", "adam_every", "val_tokens", "log_every",
                     "ngram_floor", "ngram_every"):
            refuse_unless(getattr(self, name) > 0, name, "must be positive")
        for name in ("matrix_decay", "one_sided_above", "ngram_lr", "ngram_decay", "val_every", "save_every"):
            refuse_unless(getattr(self, name) >= 0, name, "must not be negative; 0 switches it off")
        for name in ("cooldown", "final_lr", "untie_at"):
            refuse_unless(0 <= getattr(self, name) <= 1, name, "is a fraction, from 0 to 1")
        for name, allowed in (("tokenizer", tuple(EOT_TOKEN)), ("device", ("auto", "cpu", "cuda")),
                              ("dtype", ("bfloat16", "float32")), ("matrix_shard", tuple(SHARD_AXIS)),
                              ("matrix_update", ("muon", *SOAP_RULES, "adam")),
                              ("attention", ("auto", "sdpa", "varlen")), ("trained", ("all", "matrices")),
                              ("ngram_comms", ("tokens", "rows", "row_sharded"))):
            refuse_unless(getattr(self, name) in allowed, name, f"must be one of {', '.join(allowed)}")
        refuse_unless(self.model_dim % self.head_dim == 0 and self.head_dim % 4 == 0, "head_dim",
                      f"must divide model_dim={self.model_dim}, and 4 must divide it")
        refuse_unless(self.model_dim >= GATE_DIM, "model_dim", f"gates read {GATE_DIM} channels: at least as many")
        refuse_unless(len(self.momentum) == 2 and all(0 <= value < 1 for value in self.momentum), "momentum",
                      "two values, each at least 0 and below 1")
        for window in {window for _, pair in self.windows for window in pair}:
            block = min(window, ATTENTION_BLOCK)
            refuse_unless(window % block == 0 and self.micro_batch_tokens % block == 0, "windows",
                          f"a window is at most {ATTENTION_BLOCK} or a multiple of it, and its block must divide "
                          f"micro_batch_tokens={self.micro_batch_tokens}")
        for name in ("long_layers", "value_embedding_layers"):
            refuse_unless(all(layer in range(self.num_layers) for layer in getattr(self, name)), name,
                          f"layers are 0 to {self.num_layers - 1}")
        orders = self.ngram_orders
        refuse_unless(all(order in range(2, 33) for order in orders) and len(set(orders)) == len(orders),
                      "ngram_orders", "distinct orders from 2 to 32; () for none")
        refuse_unless(not orders or 0 < self.ngram_rows < 2**31, "ngram_rows", "row ids are int32: 1 to 2^31 - 1 rows")
        refuse_unless(self.ngram_lr * self.ngram_decay < 1, "ngram_decay",
                      f"times ngram_lr={self.ngram_lr} must be below 1, or a step would turn the rows' signs")
        refuse_unless(not self.ngram_host or self.ngram_comms == "row_sharded", "ngram_host",
                      f"needs --ngram-comms row_sharded (it is {self.ngram_comms}): replicas stay on the device")
        for name in ("adam_every", "ngram_every"):
            refuse_unless(self.save_every % getattr(self, name) == 0, "save_every",
                          f"must be a multiple of {name}={getattr(self, name)}, for gradients that wait are not saved")
        ratio = self.unfreeze_rank_ratio
        refuse_unless(0 < ratio <= 1, "unfreeze_rank_ratio", "a share above 0, and at most 1, which is no constraint")
        for rank in (self.model_dim, min(self.model_dim, self.mlp_dim)) if ratio < 1 else ():
            refuse_unless(0 < frozen_count(rank, ratio) < rank, "unfreeze_rank_ratio",
                          f"rounds to {round(ratio * rank)} of a matrix' {rank} directions that may move; at 0 nothing "
                          f"learns, and at {rank} nothing is protected: say 1 if that is meant")
        refuse_unless(ratio == 1 or self.matrix_shard == "whole", "unfreeze_rank_ratio",
                      f"below 1 needs --matrix-shard whole (it is {self.matrix_shard}), for matrices are split whole")
        refuse_unless(not self.adaptive_rank or ratio < 1 and self.first_data, "adaptive_rank",
                      "shares out an --unfreeze-rank-ratio below 1, by text of --first-data")
        whole = max(1, round(self.val_tokens / self.micro_batch_tokens)) * self.micro_batch_tokens
        refuse_unless(self.val_tokens == whole, "val_tokens",
                      f"must be a multiple of micro_batch_tokens={self.micro_batch_tokens}; nearest {whole}")
        refuse_unless(self.runs >= 0, "runs", "must not be negative; 0: not for a record")
        refuse_unless(-1 <= self.seed < 2**63, "seed", "must be 0 to 2^63 - 1, or -1 to draw one")

    @property
    def eot_token(self):
        return EOT_TOKEN[self.tokenizer]

    @property
    def vocab_size(self):
        """Rows of embedding and head: the tokenizer's ids, rounded up to what tensor cores like for large ones."""
        ids = self.eot_token + 1
        return ids if ids < 1024 else -(-ids // 128) * 128


def frozen_count(rank, ratio):
    """How many of `rank` singular directions stay frozen. Rounds what may move: int(rank * (1 - ratio)) would lose one
    (1000 * (1 - 0.9) is below 100)."""
    return rank - round(ratio * rank)


# Numbers without a note were carried over from the field's records; tuned ones say so in records/NOTES.md.
TRACKS = {
    "nano": Config(),
    "fineweb": Config(
        track="fineweb", data="data/fineweb10B", tokenizer="gpt2",
        steps=1600, micro_batch_tokens=16384, micro_batches=((0.0, 8), (1 / 3, 16), (2 / 3, 24)),
        document_cap=((0.0, 896), (1 / 3, 2048)),
        model_dim=768, num_layers=12, head_dim=128, mlp_dim=3072,
        windows=((0.0, (128, 384)), (1 / 3, (256, 640)), (2 / 3, (384, 896))), long_layers=(3, 7, 11),
        value_embedding_layers=(1, 2, 10, 11), logit_cap=15.0,
        ngram_orders=(2, 3), ngram_rows=5 * 50304, matrix_lr=0.023, matrix_decay=1.2, one_sided_above=1024,
        adam_lr=0.008, adam_every=2, ngram_lr=0.05, ngram_decay=0.0, ngram_comms="row_sharded",
        cooldown=0.55, final_lr=0.1,
        mtp_weights=((0.0, (1.0, 0.5, 0.25)), (1 / 3, (1.0, 0.5)), (2 / 3, (1.0,))),
        untie_at=2 / 3, val_tokens=10_485_760, val_sha256="", val_every=250, target_loss=3.28),
}
# The nano track's model goes on to C++. The n-gram table is frozen, in baselines too: it holds 99 % of the parameters,
# has no directions to protect, and would learn much of C++ in rows of its own, whatever the matrices do.
TRACKS["continual"] = dataclasses.replace(
    TRACKS["nano"], track="continual", data="data/cpp", first_data="data/python", steps=300, trained="matrices",
    unfreeze_rank_ratio=0.5, matrix_lr=0.01, adam_lr=0.003, ngram_lr=0.0, val_tokens=524_288, val_every=100,
    val_sha256="5a9f95f8cf4677aa06071e6ba095f25381ac7da5fcaf84fb938244026e0cf2be", target_loss=0.0)


# Fields that describe where and how long a run is watched, not what it computes. Overriding one of them leaves
# the run a candidate for a record, and a resumed run may change them.
NEUTRAL_FIELDS = {"seed", "device", "log_every", "save_every", "run_id", "resume", "runs"}


def nearest(name, names):
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f"did you mean {close[0]}?" if close else ""


def parse_value(field, text):
    """Parse the command line's text for one Config field; the default's type is the field's type."""
    kind = type(field.default)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind is tuple:
            value = ast.literal_eval(text)
            if field.metadata["help"].startswith("schedule") and not (
                    isinstance(value, tuple) and value and isinstance(value[0], tuple)):
                return ((0.0, value),)
            return value if isinstance(value, tuple) else (value,)
        return kind(text)
    except (ValueError, TypeError, KeyError, SyntaxError):
        raise ConfigError(f"--{field.name} {text}: expected {kind.__name__}, such as {field.default}") from None


def parse_arguments(argv):
    """Split `--key value` and `--key=value` into a dict of texts with underscores; refuse anything else."""
    given, rest = {}, list(argv)
    while rest:
        key = rest.pop(0)
        if not key.startswith("--"):
            raise ConfigError(f"{key}: arguments come as --key value; see --help")
        key, equals, value = key[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"--{key}: its value is missing; see --help")
            value = rest.pop(0)
        given[key.replace("-", "_")] = value
    return given


def config_from(given):
    """Resolve a track and its overrides, as texts by key. Returns (Config, overridden fields by name)."""
    fields = {field.name: field for field in dataclasses.fields(Config)}
    given = dict(given)
    track = given.pop("track", "nano")
    if track not in TRACKS:
        raise ConfigError(f"--track {track}: no such track; {nearest(track, TRACKS)} Tracks: {', '.join(TRACKS)}")
    for key in given:
        if key not in fields:
            raise ConfigError(f"--{key}: no such key; {nearest(key, fields)} --help lists them all")
    values = {key: parse_value(fields[key], text) for key, text in given.items()}
    base = TRACKS[track]
    overrides = {key: value for key, value in values.items() if value != getattr(base, key)}
    if overrides.keys() & {"data", "tokenizer", "val_tokens"}:  # other tokens than those the track's hash is of
        values = {"val_sha256": "", **values}
    try:
        return dataclasses.replace(base, **values), overrides
    except TypeError as error:  # a tuple of the wrong things
        words = " ".join(f"--{key} {text}" for key, text in given.items())
        raise ConfigError(f"{words}: a value of the wrong kind ({error}); see --help") from None


def help_text():
    lines = [__doc__.split("\n\nChapters")[0], "", f"Tracks (--track): {', '.join(TRACKS)}",
             "Fields, with their defaults on the nano track:"]
    for field in dataclasses.fields(Config):
        lines.append(f"  --{field.name:<24}{field.metadata['help']} [{getattr(TRACKS['nano'], field.name)}]")
    return "\n".join(lines)


# ======================================================================================================
# 2. Runtime
# ======================================================================================================

# torch 2.13 renames these collectives, 2.11 only has the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Runtime:
    """This process among its peers: rank, world size, device, and the collectives.

    Without torchrun's environment variables it is world size 1 and every collective is skipped; nothing
    else differs. `ledger` holds what this rank handed to the network: [bytes, messages] by (collective, name).
    """

    def __init__(self, device="auto", timeout_s=600):
        self.rank = int(os.environ.get("RANK", 0))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.ledger = {}
        self.loader_group = None  # of the loader's thread, whose collectives keep an order of their own
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device=cuda: torch sees no CUDA device; use --device cpu")
        cuda = device != "cpu" and torch.cuda.is_available()
        if cuda and self.local_rank >= torch.cuda.device_count():
            raise ConfigError(f"local rank {self.local_rank}: this node has {torch.cuda.device_count()} GPUs; "
                              f"start as many processes as GPUs (--nproc_per_node)")
        self.device = torch.device("cuda", self.local_rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # operations of this size lose to threads that wait for each other by spinning
        if self.world_size > 1:
            # Gloo serves CPU tensors beside NCCL; naming cuda:nccl on a machine without CUDA raises.
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
            self.loader_group = dist.new_group(backend="gloo")

    @property
    def is_main(self):
        return self.rank == 0

    def share(self, count, rank=None):
        """The range [low, high) of `count` units that a rank (this one) owns; shares are equal but for the last."""
        chunk, rank = -(-count // self.world_size), self.rank if rank is None else rank
        return min(rank * chunk, count), min((rank + 1) * chunk, count)

    def _count(self, collective, name, peers_bytes, messages):
        entry = self.ledger.setdefault((collective, name), [0, 0])
        entry[0] += peers_bytes
        entry[1] += messages

    def all_reduce(self, tensor, name):
        """Sum `tensor` (contiguous) in place over ranks. Returns a work handle, or None at world size 1."""
        if self.world_size == 1:
            return None
        assert tensor.is_contiguous(), f"{name}: all_reduce of a non-contiguous tensor is silently wrong"
        peers = self.world_size - 1
        self._count("all_reduce", name, 2 * tensor.nbytes * peers // self.world_size, 2 * peers)
        return dist.all_reduce(tensor, async_op=True)

    def reduce_scatter(self, out, tensor, name):
        """Sum `tensor` (world_size * n, ...) over ranks; `out` (n, ...) receives this rank's part."""
        assert tensor.is_contiguous() and out.is_contiguous(), f"{name}: collectives need contiguous tensors"
        self._count("reduce_scatter", name, out.nbytes * (self.world_size - 1), self.world_size - 1)
        return _reduce_scatter(out, tensor, async_op=True)

    def all_gather(self, out, tensor, name):
        """Concatenate every rank's `tensor` (n, ...) into `out` (world_size * n, ...)."""
        assert tensor.is_contiguous() and out.is_contiguous(), f"{name}: collectives need contiguous tensors"
        self._count("all_gather", name, tensor.nbytes * (self.world_size - 1), self.world_size - 1)
        return _all_gather(out, tensor, async_op=True)

    def all_to_all(self, tensor, send, receive, name, group=None):
        """Send the first send[0] rows of `tensor` (n, ...) to rank 0, the next send[1] to rank 1, ... Returns (the rows
        that ranks 0, 1, ... sent here, receive[r] of each; work): at world size 1 the tensor itself."""
        if self.world_size == 1:
            return tensor, None
        abroad = [count for rank, count in enumerate(send) if rank != self.rank and count]
        self._count("all_to_all", name, sum(abroad) * math.prod(tensor.shape[1:]) * tensor.element_size(), len(abroad))
        out = tensor.new_empty(sum(receive), *tensor.shape[1:])
        return out, dist.all_to_all_single(out, tensor.contiguous(), receive, send, group=group, async_op=True)

    def gather_shares(self, part, count, name):
        """Join the ranks' shares, in the sense of `share`, of `count` units. Returns (whole (count, ...), work)."""
        if self.world_size == 1:
            return part, None
        chunk = -(-count // self.world_size)
        padded = part.new_zeros(chunk, *part.shape[1:])
        padded[:len(part)] = part
        whole = part.new_empty(chunk * self.world_size, *part.shape[1:])
        # int16 cannot travel by gloo; its bytes can.
        return whole[:count], self.all_gather(whole.view(torch.uint8), padded.view(torch.uint8), name)

    def broadcast_object(self, value):
        """Rank 0's small Python object, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory_mib(self):
        """Peak memory of each rank in MiB: of the device's allocator on CUDA, of the process on a CPU."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) // 2**20
        else:
            import resource  # not on every platform; only this line needs it
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)
        peaks = torch.zeros(self.world_size, dtype=torch.int64)
        peaks[self.rank] = peak
        wait(self.all_reduce(peaks, "validation"))
        return peaks.tolist()

    def close(self, failed=False):
        if dist.is_initialized():
            if not failed:
                dist.barrier()
            dist.destroy_process_group()


def wait(work):
    if work is not None:
        work.wait()


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':')[1].strip()} x{os.cpu_count()}"
    return f"{platform.processor() or platform.machine()} x{os.cpu_count()}"


def git_state():
    """(commit sha, 1 if the work tree differs from it else 0), or ("none", 0) outside a git checkout."""
    def git(*words):
        return subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    try:
        return git("rev-parse", "HEAD").stdout.strip(), int(bool(git("status", "--porcelain").stdout.strip()))
    except (OSError, subprocess.CalledProcessError):
        return "none", 0


class Log:
    """The run's log.txt, metrics.jsonl and console lines; silent on every rank but 0."""

    def __init__(self, runtime, folder, append):
        self.folder, self.is_main = Path(folder), runtime.is_main
        self.live = self.is_main and sys.stdout.isatty()  # a progress line makes sense on a terminal only
        if self.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            mode = "a" if append else "w"
            self.text = open(self.folder / "log.txt", mode, buffering=1)
            self.metrics = open(self.folder / "metrics.jsonl", mode, buffering=1)

    def source(self, code):
        if self.is_main:
            self.text.write(code.rstrip("\n") + "\n===== END OF CODE =====\n")

    def line(self, text):
        """One event: to the file and to the console."""
        if self.is_main:
            try:  # a console that is gone must not keep the line out of the log
                print(("\r\x1b[K" if self.live else "") + text, flush=True)
            finally:
                self.text.write(text + "\n")

    def step(self, step, steps, **values):
        """One logged step, as a line and as a JSON record; losses have five decimals, times are in ms."""
        fields = {"train_loss": "{:.5f}", "val_loss": "{:.5f}", "first_val_loss": "{:.5f}", "lr_mul": "{:.3f}",
                  "train_time": "{:.0f}ms", "step_avg": "{:.2f}ms"}
        self.line(f"step:{step}/{steps} " + " ".join(f"{k}:{fields[k].format(v)}" for k, v in values.items()))
        if self.is_main:
            self.metrics.write(json.dumps({"step": step, **values}) + "\n")

    def progress(self, step, steps, seconds):
        if self.live and step:
            eta = seconds / step * (steps - step)
            print(f"\r\x1b[Kstep {step}/{steps}  {seconds:.0f} s, {eta:.0f} s to go", end="", flush=True)

    def close(self):
        if self.is_main:
            self.text.close()
            self.metrics.close()


# ======================================================================================================
# 3. Data
# ======================================================================================================

SHARD_MAGIC, SHARD_VERSION, HEADER_INTS = 20240520, 1, 256


def open_shard(path):
    """Map a token shard (llm.c's format) as a read-only uint16 array, after checking header against size.

    Raises ConfigError when magic, version or length are wrong."""
    path = Path(path)
    size = path.stat().st_size
    remedy = "rebuild or download it again (data/text.py, data/fineweb.py)"
    if size < HEADER_INTS * 4:
        raise ConfigError(f"{path}: {size} bytes, shorter than the {HEADER_INTS * 4}-byte header; {remedy}")
    header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    if header[0] != SHARD_MAGIC:
        raise ConfigError(f"{path}: magic {header[0]}, expected {SHARD_MAGIC}: not a token shard; {remedy}")
    if header[1] != SHARD_VERSION:
        raise ConfigError(f"{path}: shard version {header[1]}, expected {SHARD_VERSION}; {remedy}")
    if size != HEADER_INTS * 4 + 2 * int(header[2]):
        raise ConfigError(f"{path}: header says {header[2]} tokens, the file holds {(size - 1024) / 2:g}: "
                          f"truncated; {remedy}")
    if not header[2]:
        raise ConfigError(f"{path}: no tokens; {remedy}")
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_INTS * 4)


def open_corpus(config, key="data"):
    """Open all shards of the corpus that a field names. Returns (train shards, val tokens) after checking that every id
    is in the vocabulary and that the run's tokens exist. Raises ConfigError with the remedy otherwise."""
    folder = Path(getattr(config, key))
    build = {"python": "python data/text.py", "cpp": "python data/text.py --corpus cpp",
             "fineweb10B": "python data/fineweb.py"}.get(folder.name, "python data/text.py PATH")
    needed = sum(micro_batches_at(config, step) for step in range(config.steps)) * config.micro_batch_tokens
    found = {}
    for split in ("train", "val"):
        paths = sorted(folder.glob(f"*_{split}_*.bin"))
        if not paths:
            raise ConfigError(f"{folder}: no *_{split}_*.bin shards; build them with `{build}`, or name a corpus "
                              f"folder with --{key}")
        found[split] = [open_shard(path) for path in paths]
        read = 0
        for path, tokens in zip(paths, found[split]):
            if split == "train" and read > needed:
                break  # the run does not get here
            read += (len(tokens) - 1) // config.micro_batch_tokens * config.micro_batch_tokens
            if (largest := int(tokens.max())) > config.eot_token:
                raise ConfigError(f"{path}: token id {largest} is beyond the {config.tokenizer} vocabulary "
                                  f"(0 to {config.eot_token}); is --tokenizer right?")
    whole = sum((len(shard) - 1) // config.micro_batch_tokens for shard in found["train"])
    available = whole * config.micro_batch_tokens * config.epochs
    if needed > available:
        raise ConfigError(f"{folder}: the schedule takes {needed:,} training tokens, the shards hold {available:,} in "
                          f"{config.epochs} epoch(s); lower --steps, add shards or raise --epochs")
    val = found["val"][0] if len(found["val"]) == 1 else np.concatenate(found["val"])
    if len(val) <= config.val_tokens:
        raise ConfigError(f"{folder}: val_tokens={config.val_tokens:,}, but the validation split holds {len(val):,}; "
                          f"--val-tokens at most "
                          f"{(len(val) - 1) // config.micro_batch_tokens * config.micro_batch_tokens}")
    return found["train"], val


# ----- hashed n-gram rows

NGRAM_PAD = 0xFFFF  # stands for the tokens before a document's start; no tokenizer uses this id


def _odd_constants():
    """Fixed odd 64-bit multipliers: one for each distance back, drawn once from a fixed seed."""
    return np.random.default_rng(20240520).integers(0, 2**63, size=64, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def ngram_rows(tokens, position, document_start, orders, rows):
    """Rows of the hashed n-gram table, and their signs, for tokens anywhere in a shard.

    tokens: (n,) integer array, the shard.
    position: (t,) int64, indices into tokens.
    document_start: (t,) int64, index at which each position's document starts; nothing before it is read.
    Returns row ids (t, len(orders)) int32 in [0, rows), and signs (t, len(orders)) float32 of +-1.

    The row of order n at position i is a hash of tokens i-n+1 .. i: the xor of each token times an odd constant of
    its distance, mixed, then mapped onto the table. One more hash bit is the sign that multiplies the row, so that
    two n-grams that share a row push it apart half of the time (count-sketch's sign trick).
    """
    odd = _odd_constants()
    ids = np.empty((len(position), len(orders)), dtype=np.int32)
    signs = np.empty((len(position), len(orders)), dtype=np.float32)
    rolling = np.zeros(len(position), dtype=np.uint64)
    for back in range(max(orders, default=0)):
        source = position - back
        inside = source >= document_start
        token = np.where(inside, tokens[np.where(inside, source, 0)], NGRAM_PAD).astype(np.uint64) + np.uint64(1)
        rolling ^= token * odd[back]
        if back + 1 in orders:
            column = orders.index(back + 1)
            mixed = (rolling ^ (rolling >> np.uint64(29))) * odd[32 + back]
            mixed ^= mixed >> np.uint64(32)
            # The low 32 bits scaled to [0, rows) pick the row, bit 40 the sign.
            ids[:, column] = ((mixed & np.uint64(0xFFFFFFFF)) * np.uint64(rows)) >> np.uint64(32)
            signs[:, column] = ((mixed >> np.uint64(40)) & np.uint64(1)).astype(np.float32) * 2 - 1
    return ids, signs


# ----- micro-batches

@dataclass
class Placement:
    """Where the T tokens of a micro-batch stand: `tokens` is a shard, the rest are (T,) arrays."""
    tokens: np.ndarray
    position: np.ndarray        # int64, indices into tokens
    document_start: np.ndarray  # int64, index into tokens of each position's document
    segment_start: np.ndarray   # int32, index within the micro-batch of each position's attention segment


@dataclass
class MicroBatch:
    """One forward pass: T = micro_batch_tokens, O = number of n-gram orders. All on the model's device."""
    inputs: Tensor          # (T,) int32 token ids
    targets: Tensor         # (T,) int64 next token ids
    segment_start: Tensor   # (T,) int32: index in [0, T) at which the token's attention segment starts
    segment_bounds: Tensor  # (S+1,) int32: all segment boundaries, padded with T (varlen attention's cu_seqlens)
    rows: Tensor            # (T, O) int32 rows of the n-gram table, or of the cache that stands for it
    signs: Tensor           # (T, O) float32 of +-1


@dataclass
class RowPlan:
    """The rows of the n-gram table that the tokens of an update cycle read, and the routes of their values.

    N (token, order) pairs of this rank (comms "tokens": of all ranks) read U distinct rows. All ranks read R rows, V
    distinct ones, of this rank's share. At world size 1 there are no routes, and asked = owned = rows."""
    rows: Tensor            # (U,) int64, rising
    token: Tensor           # (N,) int32: the tokens that read rows[0], then those that read rows[1], ...
    offsets: Tensor         # (U,) int32: where in `token` those of each row begin
    weights: Tensor         # (N,) float32: their signs times the tokens of the step, for gradients of the mean loss
    owned: Tensor           # (V,) int64, rising, counted from the share's start
    asked: Tensor           # (R,) int64, likewise, rank after rank
    merge: Tensor           # (R,) int32: positions in `asked` of owned[0], then those of owned[1], ...
    merge_offsets: Tensor   # (V,) int32
    send: list              # how many of `rows` each rank owns
    receive: list           # how many of `asked` each rank reads
    spread_rows: Tensor     # comms "rows": every row that some rank updates, int64
    spread_slots: Tensor    # and where it lies in the all-gather of updated rows
    spread_chunk: int       # rows of that all-gather on each rank


@dataclass
class Batch:
    """One rank's part of a global step, and the loader's state after it."""
    micro_batches: list
    row_plan: RowPlan | None
    state: dict


def to_device(array, device):
    """Copy a numpy array to the device; through pinned memory and without a sync on CUDA."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def place_contiguous(tokens, low, config):
    """Placement of tokens[low : low + T], cut into attention segments where documents start. Its n-grams may read
    tokens of the same document from before `low`."""
    high = low + config.micro_batch_tokens
    begin = max(0, low - max(config.ngram_orders, default=1))  # n-grams see no further back
    index = np.arange(begin, high)
    document_start = np.maximum.accumulate(np.where(tokens[begin:high] == config.eot_token, index, begin))
    document_start = document_start[low - begin:]
    return Placement(tokens, index[low - begin:], document_start,
                     (np.maximum(document_start, low) - low).astype(np.int32))


def hash_placement(place, config):
    return ngram_rows(place.tokens, place.position, place.document_start, config.ngram_orders, config.ngram_rows)


def assemble(place, rows, signs, device):
    """Build the MicroBatch of a Placement and its n-gram rows and signs (numpy) on the device."""
    length = len(place.position)
    starts = np.flatnonzero(place.segment_start == np.arange(length, dtype=np.int32))
    bounds = np.full(length // 16 + 2, length, dtype=np.int32)  # a fixed shape: no recompilation
    if len(starts) >= len(bounds):
        raise ConfigError(f"{len(starts)} documents in a micro-batch of {length} tokens: batches are laid out for 16 "
                          f"tokens a document on average; join short documents into longer ones")
    bounds[:len(starts)] = starts
    arrays = (place.tokens[place.position].astype(np.int32), place.tokens[place.position + 1].astype(np.int64),
              place.segment_start, bounds, rows, signs)
    return MicroBatch(*(to_device(array, device) for array in arrays))


# ----- which rows of the n-gram table a cycle touches, and their routes between ranks

def group(ids):
    """Group equal integers of ids (n,). Returns the distinct ones (u,), rising; int32 positions (n,) of the first one's
    occurrences in ids, then of the second's, ...; and where in these each begins, (u,) int32."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    offsets = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))[:len(ids)])
    return ordered[offsets], order.astype(np.int32), offsets.astype(np.int32)


def sum_groups(values, positions, offsets, weights=None):
    """Sums (u, d) float32 of the rows of values (n, d) that `group` put together, in that order: no atomics."""
    return F.embedding_bag(positions, values.float(), offsets, mode="sum", per_sample_weights=weights)


def plan_rows(rows, weights, config, runtime, lane=None, name="ngram_indices"):
    """Build the RowPlan of an update cycle. All ranks call it together when the table has owners.

    rows, weights: (n, O) of the cycle's tokens. lane: the process group of the calling thread. name: for the ledger.
    Counts and indices travel here, on the CPU, before the forward pass that reads the rows; values follow when there
    are any, without a word, for both sides know the sizes. Returns (plan, where in plan.rows each of `rows` is).
    Raises ConfigError for rows outside the table."""
    distinct, order, offsets = group(rows.ravel())
    if len(distinct) and not 0 <= distinct[0] <= distinct[-1] < config.ngram_rows:
        raise ConfigError(f"n-gram rows {distinct[0]} to {distinct[-1]}: the hash leaves the table's range 0 to "
                          f"{config.ngram_rows - 1}; correct ngram_rows(), or raise --ngram-rows")
    world_size, chunk = runtime.world_size, -(-config.ngram_rows // runtime.world_size)
    none = np.empty(0, dtype=np.int32)
    owned = asked = distinct
    merge = merge_offsets = spread_rows = spread_slots = none
    send = receive = [len(distinct)]
    spread_chunk = 0
    if config.ngram_comms != "tokens" and world_size > 1:
        def travel(array, send, receive, name=name):
            out, work = runtime.all_to_all(torch.from_numpy(array), send, receive, name, lane)
            wait(work)
            return out.numpy()
        send = np.bincount(distinct // chunk, minlength=world_size).tolist()
        each = [1] * world_size
        receive = travel(np.array(send, dtype=np.int32), each, each).tolist()
        asked = travel(distinct.astype(np.int32), send, receive) - runtime.share(config.ngram_rows)[0]
        owned, merge, merge_offsets = group(asked)
        if config.ngram_comms == "rows":
            counts = travel(np.full(world_size, len(owned), dtype=np.int32), each, each, "ngram_updated")
            updated = travel(np.tile(owned.astype(np.int32), world_size), [len(owned)] * world_size, counts.tolist(),
                             "ngram_updated")
            owner = np.repeat(np.arange(world_size), counts)
            spread_chunk = int(counts.max())
            spread_rows = updated + owner * chunk
            spread_slots = owner * spread_chunk + np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    device = runtime.device
    home = torch.device("cpu") if config.ngram_host else device
    plan = RowPlan(
        rows=to_device(distinct.astype(np.int64), device), token=to_device(order // rows.shape[1], device),
        offsets=to_device(offsets, device), weights=to_device(weights.ravel()[order], device),
        owned=to_device(owned.astype(np.int64), home), asked=to_device(asked.astype(np.int64), home),
        merge=to_device(merge, home), merge_offsets=to_device(merge_offsets, home), send=send, receive=receive,
        spread_rows=to_device(spread_rows.astype(np.int64), home),
        spread_slots=to_device(spread_slots.astype(np.int64), home), spread_chunk=spread_chunk)
    slots = np.empty(rows.size, dtype=np.int32)
    slots[order] = np.repeat(np.arange(len(distinct), dtype=np.int32), np.diff(np.append(offsets, rows.size)))
    return plan, slots.reshape(rows.shape)


# ----- the stream of steps

class TrainLoader:
    """Deterministic stream of global steps, assembled ahead by a thread.

    Documents are cut into pieces of at most the run's largest document cap; a shard's pieces are shuffled by seed
    and laid end to end into micro-batches (the last piece of one goes on in the next). A smaller cap in force at a
    step splits pieces further. The end of a shard that no longer fills a micro-batch is dropped.
    `state`, all it takes to continue: shards opened before this one, piece of the shard, token of the piece.
    """

    def __init__(self, config, shards, runtime, first_step=0, state=None):
        self.config, self.shards, self.runtime = config, shards, runtime
        self.state = dict(state or {"shard": 0, "piece": 0, "offset": 0})
        self._open_shard()
        self._queue, self._stopped = queue.Queue(maxsize=2), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(first_step,), daemon=True)
        self._thread.start()

    def _open_shard(self):
        opened = self.state["shard"]
        self.tokens = self.shards[opened % len(self.shards)]
        usable = len(self.tokens) - 1  # the last token is only a target
        # A shard may begin inside a document that the one before it could not hold.
        starts = np.union1d([0], np.flatnonzero(self.tokens[:usable] == self.config.eot_token))
        lengths = np.diff(np.append(starts, usable))
        cap = max(cap for _, cap in self.config.document_cap)
        pieces = -(-lengths // cap)
        self.piece_document = np.repeat(starts, pieces)
        number = np.arange(len(self.piece_document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self.piece_start = self.piece_document + number * cap
        self.piece_length = np.minimum(np.repeat(starts + lengths, pieces) - self.piece_start, cap)
        self.order = np.random.default_rng([self.config.seed, opened]).permutation(len(self.piece_start))

    def _place_next(self, cap):
        """Placement of the next micro-batch, its segments at most `cap` tokens long."""
        length, filled = self.config.micro_batch_tokens, 0
        position, document_start = np.empty(length, np.int64), np.empty(length, np.int64)
        segment_start = np.empty(length, np.int32)
        while filled < length:
            if self.state["piece"] == len(self.order):
                self.state = {"shard": self.state["shard"] + 1, "piece": 0, "offset": 0}
                self._open_shard()
                filled = 0
            piece, offset = self.order[self.state["piece"]], self.state["offset"]
            take = int(min(self.piece_length[piece] - offset, cap, length - filled))
            low = self.piece_start[piece] + offset
            position[filled:filled + take] = np.arange(low, low + take)
            document_start[filled:filled + take] = self.piece_document[piece]
            segment_start[filled:filled + take] = filled
            filled += take
            self.state["offset"] += take
            if self.state["offset"] == self.piece_length[piece]:
                self.state = {**self.state, "piece": self.state["piece"] + 1, "offset": 0}
        return Placement(self.tokens, position, document_start, segment_start)

    def _next_cycle(self, first):
        """The Batches of the steps from `first` to the n-gram table's next update."""
        config, runtime = self.config, self.runtime
        steps, states = [], []
        for step in range(first, min(first + config.ngram_every, config.steps)):
            cap, count = at_step(config.document_cap, step, config), micro_batches_at(config, step)
            steps.append([self._place_next(cap) for _ in range(count)])
            states.append(dict(self.state))
        mine = [places[runtime.rank::runtime.world_size] for places in steps]
        if not config.ngram_orders:
            none = np.empty((config.micro_batch_tokens, 0), dtype=np.int32)
            return [Batch([assemble(place, none, none, runtime.device) for place in places], None, state)
                    for places, state in zip(mine, states)]
        # Where token gradients are gathered, each rank updates every row and so hashes the tokens of all.
        readers = range(runtime.world_size) if config.ngram_comms == "tokens" else [runtime.rank]
        hashed = {}
        weights = []
        for rank in readers:
            for places in steps:
                for place in places[rank::runtime.world_size]:
                    hashed[id(place)] = rows, signs = hash_placement(place, config)
                    weights.append(signs * (len(places) * config.micro_batch_tokens))
        plan, slots = plan_rows(np.concatenate([rows for rows, _ in hashed.values()]), np.concatenate(weights), config,
                                runtime, runtime.loader_group)
        if config.ngram_comms == "row_sharded":  # the model reads a cache of the cycle's rows, not the table
            slots = np.split(slots, len(hashed))
            hashed = {key: (part, signs) for part, (key, (_, signs)) in zip(slots, hashed.items())}
        return [Batch([assemble(place, *hashed[id(place)], runtime.device) for place in places], plan, state)
                for places, state in zip(mine, states)]

    def _run(self, step):
        try:
            if self.runtime.device.type == "cuda":
                torch.cuda.set_device(self.runtime.device)  # the current device is each thread's own
            for first in range(step, self.config.steps, self.config.ngram_every):
                for batch in self._next_cycle(first):
                    self._put(batch)
                if self._stopped.is_set():
                    return
        except Exception as error:  # carried to the training loop, which raises it
            self._put(error)

    def _put(self, item):
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Full):
                return self._queue.put(item, timeout=0.2)

    def next(self):
        """The next step's Batch; raises what the thread raised."""
        item = self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def close(self):
        self._stopped.set()
        self._thread.join()  # a thread inside torch while the interpreter ends would abort the process


# ======================================================================================================
# 4. Model
# ======================================================================================================

def reference_attention(q, k, v, segment_start, window, scale):
    """The definition that every back end is tested against: (T, H, D) each; position i sees j with
    max(segment_start[i], i - window + 1) <= j <= i. O(T^2) memory."""
    index = torch.arange(q.size(0), device=q.device)
    distance = index[:, None] - index[None, :]
    visible = (distance >= 0) & (distance < window) & (index[None, :] >= segment_start[:, None])
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~visible, -math.inf).softmax(-1), v)


def blocked_bias(segment_start, window, dtype):
    """What blocked_attention adds to its scores: 0 where the query sees the key, else -inf.

    segment_start: (T,) int32. Returns (blocks, block, window + block) of `dtype`; the keys of a block of queries start
    `window` before it. Worked out once a micro-batch, for all layers of that window."""
    block = min(window, ATTENTION_BLOCK)
    index = torch.arange(len(segment_start), dtype=torch.int32, device=segment_start.device).view(-1, block, 1)
    key = index[:, :1] - window + torch.arange(window + block, dtype=torch.int32, device=index.device)
    visible = (key <= index) & (key > index - window) & (key >= segment_start.view(-1, block, 1))
    return torch.zeros(visible.shape, dtype=dtype, device=index.device).masked_fill_(~visible, -math.inf)


def blocked_attention(q, k, v, micro_batch, bias, window, scale):
    """Back end `sdpa`: scaled dot-product attention on any device, in time linear in T.

    A block of queries attends to its own and the preceding blocks' keys that the window can reach; the products are
    written out, since bf16 SDPA on a CPU takes twice their time at these sizes.
    q, k, v: (T, H, D) with T a multiple of the block. bias: from blocked_bias. Returns (T, H, D)."""
    length, heads, dim = q.shape
    block = min(window, ATTENTION_BLOCK)
    def spans(x):  # (T, H, D) -> (H, blocks, window + block, D), zeros before the start
        padded = F.pad(x.transpose(0, 1), (0, 0, window, 0))
        parts = [padded[:, start:start + length].reshape(heads, -1, block, dim)
                 for start in range(0, window + block, block)]
        return torch.cat(parts, dim=2)
    scores = q.transpose(0, 1).reshape(heads, -1, block, dim) @ spans(k).transpose(-1, -2)
    weights = (scores.float() * scale + bias).softmax(-1).to(v.dtype)
    return (weights @ spans(v)).view(heads, length, dim).transpose(0, 1)


def varlen_attention(q, k, v, micro_batch, bias, window, scale):
    """Back end `varlen`: FlashAttention over packed segments (CUDA, half precision); arguments as blocked_attention,
    bias unused."""
    from torch.nn.attention.varlen import varlen_attn
    length = q.size(0)
    return varlen_attn(q, k, v, micro_batch.segment_bounds, micro_batch.segment_bounds, length, length,
                       scale=scale, window_size=(window - 1, 0))


ATTENTION = {"sdpa": blocked_attention, "varlen": varlen_attention}


def choose_attention(config, device):
    """Resolve the attention back end. Returns (name in ATTENTION, description for the log)."""
    name = config.attention
    able = device.type == "cuda" and config.dtype == "bfloat16"
    if able:
        try:
            from torch.nn.attention import varlen  # noqa: F401
        except ImportError:
            able = False
    if name == "varlen" and not able:
        raise ConfigError(f"attention=varlen: needs CUDA, bfloat16 and torch.nn.attention.varlen (device={device.type}, "
                          f"dtype={config.dtype}, torch {torch.__version__}); use --attention sdpa")
    if name == "sdpa" or not able:
        return "sdpa", "sdpa"
    try:  # FlashAttention 3 where its package is installed, else the FlashAttention 2 that torch holds
        from torch.nn.attention import activate_flash_attention_impl
        activate_flash_attention_impl("FA3")
        return "varlen", "varlen-fa3"
    except Exception as error:  # whatever an absent or unfit package raises
        return "varlen", f"varlen-fa2 (no FA3: {type(error).__name__})"


def rotary_tables(length, head_dim, windows_so_far, device, dtype):
    """cos and sin, each (length, 1, head_dim // 2): rotary position embedding, half of it switched off.

    The faster half of the channel pairs rotates at 1 .. 1/1024 radians a token, the other half stands still. At each
    growth of the long window YaRN (Peng et al. 2023) slows the pairs that turn less than once in the old window
    by old/new and leaves those that turn over 32 times. Computed in float64: positions of a long batch are exact."""
    pairs = head_dim // 2
    speed = torch.cat([(1 / 1024) ** torch.linspace(0, 1, pairs // 2, dtype=torch.float64),
                       torch.zeros(pairs - pairs // 2, dtype=torch.float64)])
    for old, new in zip(windows_so_far, windows_so_far[1:]):
        turns = old * speed / (2 * math.pi)
        keep = ((turns - 1) / 31).clamp(0, 1)
        speed = speed * (old / new + keep * (1 - old / new))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * speed
    return tuple(table[:, None].to(device=device, dtype=dtype) for table in (angle.cos(), angle.sin()))


def attention_scale(head_dim, windows_so_far):
    """Softmax scale for unit-RMS queries and keys; YaRN sharpens it by 0.2 ln(new/old) + 1 at each window growth."""
    scale = 1.35 / math.sqrt(head_dim)
    for old, new in zip(windows_so_far, windows_so_far[1:]):
        scale *= 0.2 * math.log(new / old) + 1
    return scale


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


def norm(x):
    """RMSNorm without weights."""
    return F.rms_norm(x, (x.size(-1),))


@dataclass(frozen=True)
class Phase:
    """What of the schedules the model's code depends on; each distinct Phase is compiled once."""
    windows: tuple       # window of each layer
    mtp_weights: tuple   # loss weights of the next, second-next, ... token
    tied: bool           # the head is the embedding


@dataclass
class Context:
    """What the model needs beside tokens and weights."""
    phase: Phase
    rotary: tuple   # (cos, sin), as from rotary_tables
    scale: float    # of the attention scores
    biases: dict    # {window: blocked_bias}; empty for attention back ends that mask by themselves


class GPT(nn.Module):
    """Decoder-only transformer over packed documents. Its hidden matrices live in two banks: `attention`
    (4 * layers, model_dim, model_dim) holds q, k, v, o of each layer, `mlp` (2 * layers, mlp_dim, model_dim) holds up
    and the transpose of down, so that every update of a shape is one batched operation."""

    def __init__(self, config, attention):
        super().__init__()
        self.config, self.attend = config, ATTENTION[attention]
        dim, layers, vocab = config.model_dim, config.num_layers, config.vocab_size
        heads = dim // config.head_dim
        dtype = getattr(torch, config.dtype)
        generator = torch.Generator().manual_seed(config.seed)
        def matrix(*shape, std):
            values = torch.randn(*shape, generator=generator) * std if std else torch.zeros(*shape)
            return nn.Parameter(values.to(dtype))
        self.embed = matrix(vocab, dim, std=0.7)
        self.head = matrix(vocab, dim, std=0.005)
        if config.untie_at > 0:
            self.embed.data.copy_(self.head.data)  # tied at first: one table, started at the head's scale
        self.attention = matrix(4 * layers, dim, dim, std=0.6 / math.sqrt(dim))
        self.mlp = matrix(2 * layers, config.mlp_dim, dim, std=0.6 / math.sqrt(dim))
        with torch.no_grad():  # zero-initialised output projections: every block starts as the identity
            self.attention[3::4] = 0
            self.mlp[1::2] = 0
        values = len(config.value_embedding_layers)
        self.value_embed = matrix(values, vocab, dim, std=0.01)
        self.value_gate = matrix(values, heads, GATE_DIM, std=0)
        self.smear_gate = matrix(1, GATE_DIM, std=0)
        skips = layers // 2
        self.smear_scale = nn.Parameter(torch.zeros(1))
        self.residual_scale = nn.Parameter(torch.ones(layers))
        self.embed_scale = nn.Parameter(torch.zeros(layers))
        if config.ngram_orders:
            self.ngram_gate = matrix(layers + 1, GATE_DIM, std=0)  # before each layer and before the head
        self.skip_scale = nn.Parameter(torch.full((skips,), 0.1))

    @staticmethod
    def gate(x, weight):
        """Learned gates in (0, 2), 1 at the start: (T, n) from the first channels of x (T, model_dim), weight (n, 12)."""
        return 2 * torch.sigmoid(F.linear(x[:, :GATE_DIM], weight))

    def hidden(self, micro_batch, ngram, context, stream=None):
        """Final hidden states (T, model_dim), normalised. ngram: (T, model_dim), the NgramTable's part, or None.
        stream: a list that receives the residual stream before the first layer and after each."""
        config, phase, rotary = self.config, context.phase, context.rotary
        length, layers, head_dim = micro_batch.inputs.size(0), config.num_layers, config.head_dim
        x = F.embedding(micro_batch.inputs, self.head if phase.tied else self.embed)
        # Smear: a gated share of the previous token's embedding, within a segment.
        first = micro_batch.segment_start == torch.arange(length, device=x.device, dtype=torch.int32)
        smear = torch.sigmoid(F.linear(x[:, :GATE_DIM], self.smear_gate)).masked_fill(first[:, None], 0)
        x = x + self.smear_scale[0] * smear * F.pad(x, (0, 0, 1, -1))
        embedded = x = norm(x)
        skips = []
        for layer in range(layers):
            if stream is not None:
                stream.append(x)
            if layer >= layers - len(self.skip_scale):
                x = x + self.skip_scale[layer - layers] * skips.pop()
            x = self.residual_scale[layer] * x + self.embed_scale[layer] * embedded
            if ngram is not None:
                x = x + self.gate(x, self.ngram_gate[layer:layer + 1]) * ngram
            # Attention
            h = norm(x)
            q, k, v = F.linear(h, self.attention[4 * layer:4 * layer + 3].flatten(0, 1)).view(
                length, 3, -1, head_dim).unbind(1)
            if layer in config.value_embedding_layers:
                which = config.value_embedding_layers.index(layer)
                gate = self.gate(x, self.value_gate[which])[..., None]
                v = v + gate * F.embedding(micro_batch.inputs, self.value_embed[which]).view_as(v)
            q, k = rotate(norm(q), *rotary), rotate(norm(k), *rotary)
            window = phase.windows[layer]
            y = self.attend(q, k, v, micro_batch, context.biases.get(window), window, context.scale)
            x = x + F.linear(y.flatten(1), self.attention[4 * layer + 3])
            # MLP
            h = F.relu(F.linear(norm(x), self.mlp[2 * layer])).square()
            x = x + h @ self.mlp[2 * layer + 1]
            if layer < len(self.skip_scale):
                skips.append(x)
        if stream is not None:
            stream.append(x)
        if ngram is not None:
            x = x + self.gate(x, self.ngram_gate[layers:]) * ngram
        return norm(x)

    def next_token_losses(self, hidden, targets):
        """Cross-entropy of each position: losses (n,), log-normalisers (n,) and soft-capped logits (n, vocab_size),
        all float32."""
        cap = self.config.logit_cap
        logits = cap * torch.tanh(F.linear(hidden, self.head).float() / cap)
        normaliser = torch.logsumexp(logits, -1)
        return normaliser - logits.gather(1, targets[:, None])[:, 0], normaliser, logits

    def forward(self, micro_batch, ngram, context):
        """Returns (training loss, losses (T,)): the mean with multi-token weights, and the next token's alone."""
        hidden = self.hidden(micro_batch, ngram, context)
        losses, normaliser, logits = self.next_token_losses(hidden, micro_batch.targets)
        mtp_weights = context.phase.mtp_weights
        loss = mtp_weights[0] * losses.mean()
        for ahead, weight in enumerate(mtp_weights[1:], start=1):
            # Position i also scores the token `ahead` after its target, where that is of the same segment.
            far = micro_batch.targets[ahead:, None]
            same = micro_batch.segment_start[ahead:] == micro_batch.segment_start[:-ahead]
            loss = loss + weight * ((normaliser[:-ahead] - logits[:-ahead].gather(1, far)[:, 0]) * same).mean()
        return loss, losses


# ======================================================================================================
# 5. Optimizer
# ======================================================================================================

@dataclass(frozen=True)
class Rule:
    """How one parameter is updated, and how its gradient and value travel between ranks."""
    update: str            # adam | matrix (a bank: see Config.matrix_update) | adagrad (row-wise)
    comms: str             # sharded along dim 0 | replicated (small, one bucket) | ngram (see NgramTable)
    lr_mul: float = 1.0
    decay_mul: float = 0.0
    betas: tuple = (0.9, 0.95)  # muon and soap_muon read the second only; their momentum follows a schedule


RULES = {
    "attention": Rule("matrix", "sharded", decay_mul=1.0),
    "mlp": Rule("matrix", "sharded", decay_mul=1.0),
    "embed": Rule("adam", "sharded", lr_mul=3.0),
    "head": Rule("adam", "sharded", lr_mul=0.5),
    "value_embed": Rule("adam", "sharded", lr_mul=3.0),
    "value_gate": Rule("adam", "replicated"),
    "smear_gate": Rule("adam", "replicated"),
    "smear_scale": Rule("adam", "replicated"),
    "residual_scale": Rule("adam", "replicated"),
    "embed_scale": Rule("adam", "replicated"),
    "ngram_gate": Rule("adam", "replicated"),
    "skip_scale": Rule("adam", "replicated"),
    "ngram_table": Rule("adagrad", "ngram"),
}
# Communication starts in this order, largest first, and is consumed in the other: Adam updates and the table hide the
# transfer of the banks, and the banks' updates hide the way of the table's new rows.
LAUNCH_ORDER = ("mlp", "attention", "ngram_table", "value_embed", "embed", "head")
UPDATE_ORDER = ("head", "embed", "value_embed", "ngram_table", "attention", "mlp")


def join_mantissa(high, low):
    """The float32 tensor whose upper 16 bits are `high` (bfloat16) and whose lower 16 bits are `low` (int16)."""
    return ((high.view(torch.int16).to(torch.int32) << 16) | (low.to(torch.int32) & 0xFFFF)).view(torch.float32)


def split_mantissa(value, high, low):
    """Inverse of join_mantissa, in place: bf16 weights plus this buffer take exact float32 updates."""
    bits = value.view(torch.int32)
    high.copy_((bits >> 16).to(torch.int16).view(torch.bfloat16))
    low.copy_(bits.to(torch.int16))  # keeps the low 16 bits


def adam_update(weight, grad, first, second, step, lr, betas, decay):
    """Adam (Kingma & Ba 2015) with decoupled weight decay, in place; float32 tensors of one shape, `step` from 1."""
    first.lerp_(grad, 1 - betas[0])
    second.lerp_(grad.square(), 1 - betas[1])
    update = (first / (1 - betas[0] ** step)) / ((second / (1 - betas[1] ** step)).sqrt() + 1e-10)
    weight.mul_(1 - lr * decay).sub_(update * lr)


# Polar Express (Amsel et al. 2025): the composed odd polynomials that bring singular values in (0, 1] closest to 1
# in five steps; coefficients for a lower bound of 1e-3 with the paper's safety factor of 2 %.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar_express(matrices, dtype):
    """Approximate polar factor of a batch (k, m, n): the same singular vectors, singular values near 1. float32 in
    and out; the products run in `dtype`. A zero matrix stays zero."""
    x = matrices.to(dtype)
    if tall := x.size(-2) > x.size(-1):
        x = x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-12).to(dtype)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


# ----- hidden matrices under Muon

class Whole:
    """A bank whose matrices are whole on the rank that updates them: its part of a matrix is all of it."""
    gather = part = staticmethod(lambda matrices: matrices)


class Sharded:
    """A bank (k, m, n) of which every rank updates a share of axis 1 or 2, the tensor-parallel layout."""

    def __init__(self, runtime, name, axis, size):
        self.runtime, self.name, self.axis, self.size = runtime, name, axis, size

    def gather(self, part):
        """Whole matrices of the ranks' parts."""
        whole, work = self.runtime.gather_shares(part.transpose(0, self.axis), self.size, f"{self.name} parts")
        wait(work)
        return whole.transpose(0, self.axis)

    def part(self, whole):
        low, high = self.runtime.share(self.size)
        return whole.narrow(self.axis, low, high - low)


def cautious_step(weight, update, lr, decay):
    """Step against `update` with weight decay only where both agree in sign, in place; tensors of one shape."""
    agrees = (update * weight >= 0).to(weight.dtype)
    weight.sub_(lr * (update + decay * weight * agrees))


def orthogonal_step(weight, direction, second, lr, beta2, decay, dtype, shard):
    """Muon's step along `direction`, whole matrices (k, m, n): orthogonalisation, NorMuon's scaling (Li et al. 2025:
    divide each row, or column of a wide matrix, by its running RMS, at unchanged Frobenius norm; `second` is (k, m, 1)
    or (k, 1, n)), cautious decay. The rate grows with sqrt(m / n) of tall matrices, so that whatever the shape, the
    RMS of a step is lr / sqrt(n)."""
    update = polar_express(direction, dtype)
    rows, columns = update.shape[-2:]
    before = update.norm(dim=(-2, -1), keepdim=True)
    second.lerp_(update.square().mean(-1 if rows >= columns else -2, keepdim=True), 1 - beta2)
    update = update * second.clamp_min(1e-10).rsqrt()
    update = update * (before / update.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10))
    cautious_step(weight, shard.part(update), lr * max(1.0, rows / columns) ** 0.5, decay)


def muon_update(weight, grad, buffer, second, lr, momentum, beta2, decay, dtype, shard=Whole):
    """Muon (Jordan et al. 2024) on a bank (k, m, n) of float32 matrices, in place: Nesterov momentum in `buffer`, then
    orthogonal_step. weight, grad and buffer are this rank's part of the matrices, `second` is whole."""
    buffer.lerp_(grad, 1 - momentum)
    orthogonal_step(weight, shard.gather(grad.lerp(buffer, momentum)), second, lr, beta2, decay, dtype, shard)


# ----- hidden matrices under SOAP, SOAP-Muon and KL-SOAP

# SOAP (Vyas et al. 2024) and its relatives keep, for the rows and for the columns of a matrix G, a Kronecker factor
# (the running mean of G Gᵀ, of Gᵀ G) and a basis that follows the factor's eigenvectors. Momentum stays in the
# parameters' own basis; only the second moment lives in the eigenbasis, and it is permuted with it.
FACTOR_BETA = 0.9  # of the factors, and of the second moment of soap_muon
KL_FLOOR = 1e-3    # eigenvalues below this share of their mean are taken to be it
EIGH_STEPS = 3     # at first all bases are exact: behind zero-initialised projections, gradients come two steps later
HOUSEHOLDER_STEPS = 25  # then factors are conditioned well enough for Cholesky; on the nano track they always were


@dataclass
class Side:
    """The rows or the columns of a bank of k matrices (m, n), s = m or n; all float32 but the rejects."""
    axis: int        # -2: rows, -1: columns
    factor: Tensor   # (k, s, s), symmetric; zero until the first gradient
    basis: Tensor    # (k, s, s), orthonormal columns, the largest eigenvalue's first
    moment: Tensor   # (k, m, n), second moment in the eigenbasis, shared by both sides
    rejects: Tensor  # (k,) int32, refreshes that kept the old basis, shared by both sides

    def staggered(self, first, every):
        """The side of every so many of the matrices, as views."""
        return Side(self.axis, *(getattr(self, key)[first::every] for key in ("factor", "basis", "moment", "rejects")))


def rotate_to(x, sides):
    """Matrices (k, m, n) from the parameters' basis to the eigenbasis."""
    for side in sides:
        x = side.basis.mT @ x if side.axis == -2 else x @ side.basis
    return x


def rotate_from(x, sides):
    """Inverse of rotate_to."""
    for side in sides:
        x = side.basis @ x if side.axis == -2 else x @ side.basis.mT
    return x


def known_bases(sides, moment):
    """(k, 1, 1): 1.0 where the matrix has had a gradient that its bases could follow, else 0.0."""
    known = torch.ones_like(moment[:, :1, :1])
    for side in sides:
        known = known * (side.factor.diagonal(dim1=-2, dim2=-1).sum(-1) > 0)[:, None, None]
    return known


def soap_update(weight, grad, buffer, moment, count, sides, known, step, lr, betas, decay, shard=Whole):
    """SOAP on a bank (k, m, n) of float32 matrices, in place: Adam in the eigenbasis, then cautious decay. Scaled by
    1 / sqrt(n), so that a rate means what it means for Muon.

    weight, buffer: this rank's part. grad, moment: whole, `count` (k, 1, 1) gradients are in the moment. step: from 1.
    known: as known_bases; a matrix without bases stays where it is. Without sides this is Adam.

    KL-SOAP is this update in the bases of factors that have seen `grad` (update_factors with kl), with `known` from
    before: in the basis of a single gradient that gradient is diagonal, and all else is rounding, blown up."""
    buffer.lerp_(shard.part(grad), 1 - betas[0])
    count.add_(known)
    moment.lerp_(rotate_to(grad, sides).square(), (1 - betas[1]) * known)
    first = rotate_to(shard.gather(buffer), sides) / (1 - betas[0] ** step)
    second = moment / (1 - betas[1] ** count).clamp_min(1e-8)
    update = rotate_from(known * first * second.clamp_min(1e-16).rsqrt(), sides)
    cautious_step(weight, shard.part(update / update.size(-1) ** 0.5), lr, decay)


def soap_muon_update(weight, grad, buffer, second, moment, sides, known, lr, momentum, beta2, decay, dtype,
                     shard=Whole):
    """SOAP-Muon on a bank (k, m, n) of float32 matrices, in place: Muon whose Nesterov momentum is divided, in the
    eigenbasis, by the root of its own second moment. Arguments as muon_update's, but grad is whole; so is `moment`.
    A matrix that is not `known` takes a step of Muon."""
    grad = shard.part(grad)
    buffer.lerp_(grad, 1 - momentum)
    direction = shard.gather(grad.lerp(buffer, momentum))
    rotated = rotate_to(direction, sides)
    moment.lerp_(rotated.square(), (1 - FACTOR_BETA) * known)
    whitened = rotate_from(rotated * moment.clamp_min(1e-16).rsqrt(), sides)
    orthogonal_step(weight, torch.where(known > 0, whitened, direction), second, lr, beta2, decay, dtype, shard)


def update_factors(grad, sides, kl):
    """Take whole gradients (k, m, n) into the factors of their sides, in place.

    kl: KL-Shampoo's estimate (Lin et al. 2025): each side's gradient is first whitened by the other side's factor.
    Only the product of both factors' scales means something, so whitening uses eigenvalues over their mean: else
    the split between the two drifts, and with it how fast a factor forgets."""
    products = []
    for side, other in zip(sides, sides[::-1]):
        half = grad if side.axis == -2 else grad.mT
        if kl and other is not side:
            spectrum = (other.basis * (other.factor @ other.basis)).sum(-2)
            mean = spectrum.mean(-1, keepdim=True)
            spectrum = torch.where(mean > 0, spectrum / mean, 1.0).clamp_min(KL_FLOOR)
            half = half @ other.basis * spectrum.rsqrt()[:, None]
        products.append(half @ half.mT / half.size(-1))
    for side, product in zip(sides, products):
        side.factor.lerp_(product, 1 - FACTOR_BETA)


DAMPING = {"cholesky": 1e-7, "cholesky_lr": 1e-6}  # added to a factor, as a share of its largest eigenvalue


def eigenbasis_step(factors, bases, method):
    """Bring orthonormal bases (k, s, s) closer to the eigenvectors of symmetric factors (k, s, s), both float32.

    Orthonormalises factor @ basis, columns by falling Rayleigh quotient. torch.linalg.qr does so matrix by matrix,
    which is fastest on a CPU; Cholesky's way is batched products and factorisations:
      eigh          the eigenvectors themselves; on CUDA the only one that waits for the device
      householder   LAPACK's QR, as torch.linalg.qr without forming R
      cholesky      upper R with RᵀR = AᵀA in float64, then A / R
      cholesky_lr   float32: B = basisᵀ factor basis = RᵀR, R Rᵀ = SᵀS, then basis Rᵀ / S (an LR step of
                    Rutishauser's), which squares no condition number
    Cholesky's end in two Newton-Schulz steps. Returns (bases, order (k, s) that sorted the old columns, rejected (k,)):
    where a factor is not finite or too close to singular, that matrix keeps its old basis, sorted. So it does where
    the factor is zero, which is no reject: there was nothing to follow yet."""
    count, size = bases.shape[:2]
    product = bases.mT @ factors  # transposed: sorting moves whole rows
    spectrum, order = (bases.mT * product).sum(-1).sort(descending=True, stable=True)
    rows = (order + size * torch.arange(count, device=order.device)[:, None]).flatten()
    old, product = (lines.reshape(-1, size).index_select(0, rows).view_as(bases).mT for lines in (bases.mT, product))
    accepted = spectrum.isfinite().all(-1) & (spectrum[:, 0] > 0)
    if method == "eigh":
        safe = torch.where(accepted[:, None, None], factors, torch.eye(size, device=bases.device))  # eigh raises on NaN
        new = torch.linalg.eigh(safe).eigenvectors.flip(-1)
    elif method == "householder":
        new = torch.linalg.householder_product(*torch.geqrf(product))
    else:
        product = product + (DAMPING[method] * spectrum[:, :1, None]).clamp_min(1e-30) * old
        if method == "cholesky":
            product = (product / product.norm(dim=-2, keepdim=True)).double()
            upper, info = torch.linalg.cholesky_ex(product.mT @ product, upper=True)
            new = torch.linalg.solve_triangular(upper, product, upper=True, left=False).float()
        else:
            upper, failed = torch.linalg.cholesky_ex(old.mT @ product, upper=True)
            again, info = torch.linalg.cholesky_ex(upper @ upper.mT, upper=True)
            new, info = old @ torch.linalg.solve_triangular(again, upper.mT, upper=True, left=False), info + failed
        for _ in range(2):
            new = 1.5 * new - 0.5 * new @ (new.mT @ new)
        error = new.mT @ new - torch.eye(size, device=bases.device)
        accepted &= (info == 0) & (error.abs().amax((-2, -1)) < 1e-4)
    return torch.where(accepted[:, None, None], new, old), order, ~accepted & (spectrum != 0).any(-1)


def owned_eigenbasis_step(factors, bases, method, runtime, loads):
    """eigenbasis_step, each factor by one rank that sends the result to all: the one with the least to do so far.
    loads: the work of each rank until now, as a list; grows by s cubed a factor."""
    size, owners = bases.size(-1), []
    for _ in range(len(factors)):
        owners.append(loads.index(min(loads)))
        loads[owners[-1]] += size ** 3
    mine = [slice(i, i + 1) for i, owner in enumerate(owners) if owner == runtime.rank]
    basis, order, rejected = eigenbasis_step(*(torch.cat([tensor[:0], *(tensor[i] for i in mine)])
                                               for tensor in (factors, bases)), method)
    chunk = max(owners.count(rank) for rank in range(runtime.world_size))
    sent = basis.new_zeros(chunk, size + 2, size)
    sent[:len(mine)] = torch.cat([basis, order[:, None].float(), rejected[:, None, None].expand(-1, 1, size)], 1)
    received = sent.new_empty(chunk * runtime.world_size, size + 2, size)
    wait(runtime.all_gather(received, sent, "eigenbases"))
    slots = [owner * chunk + owners[:i].count(owner) for i, owner in enumerate(owners)]
    received = torch.cat([received[slot:slot + 1] for slot in slots])
    return received[:, :size], received[:, size].long(), received[:, size + 1, 0] > 0


def refresh_eigenbases(sides, method, runtime=None):
    """One eigenbasis_step for all matrices of all sides, in place: one batch a size. Nothing waits for the device.
    With a runtime its ranks, which must hold the same, share the work."""
    groups = {}
    for side in sides:
        if len(side.basis):
            groups.setdefault(side.basis.size(-1), []).append(side)
    loads = [0] * (runtime.world_size if runtime else 1)
    for _, group in sorted(groups.items(), reverse=True):
        factors, bases = (torch.cat([getattr(side, key) for side in group]) for key in ("factor", "basis"))
        stepped = (owned_eigenbasis_step(factors, bases, method, runtime, loads) if len(loads) > 1
                   else eigenbasis_step(factors, bases, method))
        counts = [len(side.basis) for side in group]
        for side, basis, order, rejected in zip(group, *(tensor.split(counts) for tensor in stepped)):
            side.basis.copy_(basis)
            index = order[:, :, None] if side.axis == -2 else order[:, None]
            side.moment.copy_(side.moment.gather(side.axis, index.expand_as(side.moment)))
            side.rejects.add_(rejected)


def refresh_method(step, device):
    """How to step the eigenbases at a step: exactly at first, then without fail, then in batches where that is fast."""
    if step < EIGH_STEPS:
        return "eigh"
    if device.type == "cpu" or step < HOUSEHOLDER_STEPS:
        return "householder"
    fast_float64 = torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0))  # A100, H100, B200
    return "cholesky" if fast_float64 else "cholesky_lr"


# ----- the n-gram table

def adagrad_rows_update(table, second, rows, grads, lr, floor):
    """Row-wise Adagrad on some rows of the n-gram table, in place; cost is that of these rows.

    table: (n, dim) float32. second: (n,) float32, the sum of each row's mean squared gradients.
    rows: (u,) int64, distinct. grads: (u, dim) float32, sums over tokens of the gradients of their own losses.
    floor: a token's gradient RMS that is added to the moment: a row seen first by a token that was predicted well
    anyway hardly moves, where plain Adagrad would take a full step."""
    moment = second[rows] + grads.square().mean(1)
    second[rows] = moment
    table[rows] -= grads * (lr * (moment + floor * floor).rsqrt())[:, None]


class NgramTable:
    """The hashed n-gram embedding: this rank's rows, their optimizer state, and all that travels of them.

    Config.ngram_comms says what does, per update cycle and rank (benchmarks/ngram_exchange.py has the bytes):
    - tokens: replicas; the gradients of tokens are gathered, and every rank updates every row that was read.
    - rows: replicas; a row's summed gradient goes to its owner, which updates it and sends the new row to all.
    - row_sharded: a rank holds only the rows it owns. Those that its tokens read are pulled into a cache before the
      cycle, their summed gradients go back the same way.
    Rows that a rank owns never travel, and a row travels once however many tokens read it.

    Weight decay acts on all rows at each update, at no cost: the table is `weight` times the number `scale`, and decay
    shrinks that number alone. So a row that is touched again after 100 updates has seen all their decays.
    """

    def __init__(self, config, runtime):
        self.config, self.runtime, self.comms = config, runtime, config.ngram_comms
        self.home = torch.device("cpu") if config.ngram_host else runtime.device
        whole = (0, config.ngram_rows)
        self.owned = whole if self.comms == "tokens" else runtime.share(config.ngram_rows)  # the rows updated here
        self.held = self.owned if self.comms == "row_sharded" else whole
        count, owned = self.held[1] - self.held[0], self.owned[1] - self.owned[0]
        needed, there = 4 * (count * config.model_dim + owned), available_memory(self.home)
        if self.home.type == "cpu":
            there //= int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of the ranks that share this host
        if needed > there:
            raise ConfigError(f"ngram_rows={config.ngram_rows:,}: a rank's {count:,} rows take {needed / 2**30:.1f} GiB, "
                              f"and {there / 2**30:.1f} GiB are free for it on {self.home}; lower --ngram-rows, or "
                              f"share them among more ranks with --ngram-comms row_sharded")
        pinned = self.home != runtime.device
        self.weight = torch.zeros(count, config.model_dim, device=self.home, pin_memory=pinned)
        self.second = torch.zeros(owned, device=self.home, pin_memory=pinned)
        self.scale = 1.0
        self.grads = []  # of the cycle's tokens so far, one tensor a micro-batch
        self.sent = None  # plan, gradients or new rows under way, work
        self.pulled = (None, None, None)  # plan, values, work

    def start_pull(self, plan, name):
        """Start bringing the rows of `plan` here from their owners. Returns (values (U, model_dim), work)."""
        return self.runtime.all_to_all(self.weight[plan.asked], plan.receive, plan.send, name)

    def pull(self, plan):
        """Start bringing the rows of a training cycle here, if they do not live here."""
        if self.comms == "row_sharded" and self.pulled[0] is not plan:
            self.pulled = (plan, *self.start_pull(plan, "ngram_table"))

    def arrived(self, values, work):
        """What a pull brought, on the model's device."""
        wait(work)
        return values.to(self.runtime.device, non_blocking=True)

    def lookup(self, micro_batch, cache=None):
        """Sum of the signed rows of each token's n-grams: (T, model_dim), a leaf in the compute dtype. Its gradient is
        for `grads`; autograd never sees the table. cache: stands for the table where micro_batch.rows point into it."""
        table = self.weight if cache is None else cache
        summed = F.embedding_bag(micro_batch.rows, table, mode="sum", per_sample_weights=micro_batch.signs)
        return (summed * self.scale).to(getattr(torch, self.config.dtype)).requires_grad_(self.config.ngram_lr > 0)

    def send(self, plan):
        """Start the way of the cycle's gradients to the ranks that update their rows."""
        runtime, grads = self.runtime, torch.cat(self.grads)
        self.grads = []
        if self.comms == "tokens":
            gathered, work = grads, None
            if runtime.world_size > 1:
                gathered = grads.new_empty(len(grads) * runtime.world_size, grads.size(1))
                work = runtime.all_gather(gathered, grads, "ngram_table")
            self.sent = (plan, gathered, work)
        else:
            sums = sum_groups(grads, plan.token, plan.offsets, plan.weights).to(self.home)
            self.sent = (plan, *runtime.all_to_all(sums, plan.send, plan.receive, "ngram_table"))

    def update(self, lr):
        """Update the owned rows that some rank's tokens read, and start sending them out where there are replicas."""
        config, runtime, (plan, grads, work) = self.config, self.runtime, self.sent
        wait(work)
        if self.comms == "tokens":
            grads = sum_groups(grads, plan.token, plan.offsets, plan.weights)
        elif runtime.world_size > 1:
            grads = sum_groups(grads, plan.merge, plan.merge_offsets)
        self.scale *= 1 - lr * config.ngram_decay
        low, high = self.owned
        weight = self.weight[low - self.held[0]:high - self.held[0]]
        adagrad_rows_update(weight, self.second, plan.owned, grads, lr / self.scale, config.ngram_floor)
        self.sent = (plan, None, None)
        if self.comms == "rows" and runtime.world_size > 1:
            share = weight.new_zeros(plan.spread_chunk, weight.size(1))
            share[:len(plan.owned)] = weight[plan.owned]
            gathered = share.new_empty(plan.spread_chunk * runtime.world_size, weight.size(1))
            self.sent = (plan, gathered, runtime.all_gather(gathered, share, "ngram_table"))

    def finish(self):
        """Receive the rows that other ranks have updated."""
        plan, gathered, work = self.sent
        if gathered is not None:
            wait(work)
            self.weight[plan.spread_rows] = gathered[plan.spread_slots]

    def full_state(self):
        """{"weight", "second": the whole tables on rank 0's host (None elsewhere), "scale"}. All ranks call it."""
        return {"weight": self._whole(self.weight, self.held), "second": self._whole(self.second, self.owned),
                "scale": self.scale}

    def _whole(self, part, held):
        runtime, rows = self.runtime, self.config.ngram_rows
        if held == (0, rows):
            return part.cpu()
        whole = torch.empty(rows, *part.shape[1:]) if runtime.is_main else None
        for rank in range(runtime.world_size):
            low, high = runtime.share(rows, rank)
            if rank == 0 and runtime.is_main:
                whole[low:high] = part
            elif runtime.is_main and high > low:
                dist.recv(whole[low:high], rank)
            elif runtime.rank == rank and high > low:
                dist.send(part.cpu(), 0)
        return whole

    def load_full_state(self, full):
        self.weight.copy_(full["weight"][slice(*self.held)])
        self.second.copy_(full["second"][slice(*self.owned)])
        self.scale = full["scale"]


# ----- frozen directions, for the continual track

# OSFT (Nayak et al. 2025): what a matrix knows is in its top singular directions, and a new domain may have the rest.
# The paper trains factors of the rest. What these can reach is W_0 plus any update whose rows and columns are
# orthogonal to the frozen, so here W stays dense and every update is projected, whatever the rule that made it.
# Projecting gradients instead would not do: Adam's scaling turns a step back.
FROZEN = ("frozen_left", "frozen_right")  # the factors, kept with the state of a bank
MIN_RETENTION = 0.1  # adaptive_rank: the share that a layer without importance keeps, the paper's value


def frozen_directions(matrices, counts, width):
    """The top counts[i] singular directions of each matrix (k, m, n): left (k, m, width), right (k, width, n), float32.
    Where a matrix has fewer than `width`, zeros fill up, which project nothing away."""
    left, _, right = torch.linalg.svd(matrices.float(), full_matrices=False)
    kept = torch.arange(width, device=left.device) < torch.tensor(counts, device=left.device)[:, None]
    return left[..., :width] * kept[:, None], right[:, :width] * kept[:, :, None]


def project_update(update, left, right):
    """Take what touches frozen directions out of updates (k, m, n) float32, in place: leftᵀ update = 0, update rightᵀ
    = 0. Neither (m, m) nor (n, n) matrices are formed."""
    update.baddbmm_(left, left.mT @ update, alpha=-1)
    return update.baddbmm_(update @ right.mT, right, alpha=-1)


# ----- state, sharding and order of communication

PARTS = ("first", "mantissa")  # the state of a bank that is shaped as its weights are; the rest goes by matrix


def matrix_state(config, count, rows, columns, device):
    """What the rule of the hidden matrices keeps for `count` of them, beside PARTS."""
    state, kind = {}, config.matrix_update
    if kind in ("muon", "soap_muon"):  # `second` is one value a row, or a column of wide matrices
        state["second"] = torch.zeros((count, rows, 1) if rows >= columns else (count, 1, columns), device=device)
    if kind != "muon":
        state["moment"] = torch.zeros(count, rows, columns, device=device)
        state["count"] = torch.zeros(count, 1, 1, device=device)
        state["rejects"] = torch.zeros(count, dtype=torch.int32, device=device)
    for key, size in (("row", rows), ("column", columns)):
        if kind in SOAP_RULES and size <= config.one_sided_above:
            state[f"{key}_factor"] = torch.zeros(count, size, size, device=device)
            state[f"{key}_basis"] = torch.eye(size, device=device).repeat(count, 1, 1)
    return state


class Optimizer:
    """Holds states, sums gradients and schedules communication; the update rules are the functions above.

    A `sharded` parameter is split along dimension 0 (banks: whole matrices) into shares of equal size but for the
    last ranks'. Gradients accumulate in float32 buffers that are padded to world_size equal chunks, which is what
    the collectives ask for; parameters and states are never padded. `replicated` parameters share one flat bucket.
    With Config.matrix_shard the banks are split along their rows or columns instead; then gradients, weights and
    momentum are shared, while second moments, factors and bases are whole on every rank.
    """

    def __init__(self, config, model, runtime, table=None):
        self.config, self.runtime, self.table = config, runtime, table
        self.params = dict(model.named_parameters())
        self.untrained = {name for name in self.params if config.trained != "all" and RULES[name].update != "matrix"}
        if unruled := set(self.params) - set(RULES):
            raise ConfigError(f"no optimizer rule for {', '.join(sorted(unruled))}; add one to RULES")
        self.sharded = [name for name in self.params if RULES[name].comms == "sharded"]
        self.replicated = [name for name in self.params if RULES[name].comms == "replicated"]
        device, float32 = runtime.device, torch.float32
        self.share, self.grads, self.state = {}, {}, {}
        self.banks, self.shard = [name for name in self.sharded if RULES[name].update == "matrix"], {}
        self.axis = {name: SHARD_AXIS[config.matrix_shard] if name in self.banks else 0 for name in self.sharded}
        for name in self.sharded:
            param, axis = self._shared_first(name), self.axis[name]
            self.share[name] = low, high = runtime.share(len(param))
            chunk = -(-len(param) // runtime.world_size)
            self.grads[name] = torch.zeros(runtime.world_size * chunk, *param.shape[1:], device=device)
            self.state[name] = {"first": torch.zeros(high - low, *param.shape[1:], device=device)}
            if param.dtype == torch.bfloat16:
                self.state[name]["mantissa"] = torch.zeros_like(self.state[name]["first"], dtype=torch.int16)
            if name in self.banks:
                self.shard[name] = Sharded(runtime, name, axis, len(param)) if axis else Whole
                count, *shape = self.params[name].shape
                self.state[name].update(matrix_state(config, count if axis else high - low, *shape, device))
            else:
                self.state[name]["second"] = torch.zeros(high - low, *param.shape[1:], device=device)
        for name in self.untrained:
            self.params[name].requires_grad_(False)
        sizes = [self.params[name].numel() for name in self.replicated]
        self.bucket = torch.zeros(sum(sizes), dtype=float32, device=device)
        for name, part in zip(self.replicated, self.bucket.split(sizes)):
            param = self.params[name]
            self.share[name] = (0, len(param))
            self.grads[name] = part.view_as(param)
            self.state[name] = {"first": torch.zeros_like(param, dtype=float32),
                                "second": torch.zeros_like(param, dtype=float32)}
            if param.dtype == torch.bfloat16:
                self.state[name]["mantissa"] = torch.zeros_like(param, dtype=torch.int16)

    def _shared_first(self, name):
        """A parameter's data, the axis that ranks share in front."""
        return self.params[name].data.transpose(0, self.axis.get(name, 0))

    def _sides(self, name):
        state = self.state[name]
        return [Side(axis, state[f"{key}_factor"], state[f"{key}_basis"], state["moment"], state["rejects"])
                for key, axis in (("row", -2), ("column", -1)) if f"{key}_factor" in state]

    def accumulate(self, grads):
        """Add one micro-batch's gradients, {name: tensor or None for a parameter that was not used}."""
        for name, grad in grads.items():
            if grad is not None:
                grad = grad.transpose(0, self.axis.get(name, 0))
                self.grads[name][:len(grad)] += grad

    def due(self, name, step):
        """Whether `name` steps at this step; Adam parameters and the table wait for every k-th, and for the last."""
        every = {"adam": self.config.adam_every, "adagrad": self.config.ngram_every}.get(RULES[name].update, 1)
        return name not in self.untrained and ((step + 1) % every == 0 or step + 1 == self.config.steps)

    def protect(self, counts):
        """Freeze the top singular directions of all hidden matrices as they stand; counts: {bank: one of each matrix}.
        A rank splits the matrices that it owns, and projects their updates, so nothing travels."""
        for name in self.banks:
            own = slice(*self.share[name])
            factors = frozen_directions(self.params[name].data[own], counts[name][own], max(counts[name]))
            self.state[name].update(zip(FROZEN, factors))

    def step(self, step, lr_mul, row_plan=None, next_plan=None):
        """Reduce what is due, update it and spread the new values.

        row_plan, next_plan: of the table's update cycle that this step is in, and that the next step is in."""
        config, runtime = self.config, self.runtime
        due = [name for name in self.sharded if self.due(name, step)]
        if row_plan is not None and config.ngram_lr and self.due("ngram_table", step):
            due.append("ngram_table")
        replicated = [name for name in self.replicated if self.due(name, step)]
        works, mine, gathers = {}, {}, {}
        for name in sorted(due, key=LAUNCH_ORDER.index):
            if name == "ngram_table":
                self.table.send(row_plan)
                continue
            buffer = self.grads[name]
            mine[name] = buffer
            if runtime.world_size > 1:
                mine[name] = buffer.new_empty(len(buffer) // runtime.world_size, *buffer.shape[1:])
                works[name] = runtime.reduce_scatter(mine[name], buffer, name)
        if replicated:
            wait(runtime.all_reduce(self.bucket, "replicated"))
            for name in replicated:
                self._update(name, self.grads[name], step, lr_mul)
        for name in sorted(due, key=UPDATE_ORDER.index):
            if name == "ngram_table":
                self.table.update(config.ngram_lr * RULES[name].lr_mul * lr_mul)
                if next_plan is not None:
                    self.table.pull(next_plan)
            elif name not in self.banks:
                wait(works.get(name))
                low, high = self.share[name]
                if high > low:
                    self._update(name, mine[name][:high - low], step, lr_mul)
                gathers[name] = self._start_gather(name)
        gathers.update(self._update_banks(works, mine, step, lr_mul))
        for name in due:
            if name == "ngram_table":
                self.table.finish()
            else:
                self._finish_gather(name, gathers[name])
                self.grads[name].zero_()
        for name in replicated:
            self.grads[name].zero_()

    def _update_banks(self, works, mine, step, lr_mul):
        """Update the hidden matrices and, under a soap rule, their factors and bases: before the weights for kl_soap,
        whose basis is of this step, after them for the others. Returns the gathers of new values under way."""
        kind, names, grads, gathers = self.config.matrix_update, sorted(self.banks, key=UPDATE_ORDER.index), {}, {}
        def gradient(name):
            if name not in grads:
                wait(works.get(name))
                low, high = self.share[name]
                part = mine[name][:high - low].transpose(0, self.axis[name])
                grads[name] = part if kind == "muon" else self.shard[name].gather(part)
            return grads[name]
        def refresh():
            sides = []
            for name in names:
                update_factors(gradient(name), self._sides(name), kind == "kl_soap")
                first = step - (0 if self.axis[name] else self.share[name][0])
                every = self.config.basis_every if step >= EIGH_STEPS else 1
                sides += [side.staggered(first % every, every) for side in self._sides(name)]
            refresh_eigenbases(sides, refresh_method(step, self.runtime.device),
                               self.runtime if self.config.matrix_shard != "whole" else None)
        known = {name: known_bases(self._sides(name), self.state[name]["moment"]) for name in names if kind != "muon"}
        if kind == "kl_soap":
            refresh()
        for name in names:
            self._update(name, gradient(name), step, lr_mul, known.get(name))
            gathers[name] = self._start_gather(name)
        if kind in ("soap", "soap_muon"):
            refresh()
        return gathers

    def _update(self, name, grad, step, lr_mul, known=None):
        config, rule, axis = self.config, RULES[name], self.axis.get(name, 0)
        state = {key: value.transpose(0, axis) if key in PARTS else value for key, value in self.state[name].items()}
        low, high = self.share[name]
        param = self._shared_first(name)[low:high].transpose(0, axis)
        weight = join_mantissa(param, state["mantissa"]) if "mantissa" in state else param
        if rule.update == "matrix":
            lr, decay = config.matrix_lr * rule.lr_mul * lr_mul, config.matrix_decay * rule.decay_mul
            sides, shard = self._sides(name), self.shard[name]
            before = weight.clone() if FROZEN[0] in state else None
            shared = (lr, momentum_at(config, step), rule.betas[1], decay, getattr(torch, config.dtype), shard)
            if config.matrix_update == "muon":
                muon_update(weight, grad, state["first"], state["second"], *shared)
            elif config.matrix_update == "soap_muon":
                soap_muon_update(weight, grad, state["first"], state["second"], state["moment"], sides, known,
                                 *shared)
            else:
                soap_update(weight, grad, state["first"], state["moment"], state["count"], sides, known, step + 1,
                            lr, rule.betas, decay, shard)
            if before is not None:  # decay included
                weight.copy_(before + project_update(weight - before, *(state[key] for key in FROZEN)))
        else:
            count = -(-(step + 1) // config.adam_every)
            waited = step % config.adam_every + 1  # steps whose gradients were added up
            adam_update(weight, grad / waited, state["first"], state["second"], count,
                        config.adam_lr * rule.lr_mul * lr_mul, rule.betas, rule.decay_mul)
        if "mantissa" in state:
            split_mantissa(weight, param, state["mantissa"])

    def _start_gather(self, name):
        """Start spreading this rank's share of a parameter. Returns (whole, work), or None at world size 1."""
        if self.runtime.world_size == 1:
            return None
        param, (low, high) = self._shared_first(name), self.share[name]
        return self.runtime.gather_shares(param[low:high], len(param), name)

    def _finish_gather(self, name, gather):
        if gather is not None:
            whole, work = gather
            wait(work)
            self._shared_first(name).copy_(whole)

    def untie(self):
        """Give the embedding the weights and optimizer state that the tied head has learned."""
        self.params["embed"].data.copy_(self.params["head"].data)
        for key, value in self.state["embed"].items():
            value.copy_(self.state["head"][key])

    def full_state(self):
        """{name: {key: tensor of the whole parameter}} on every rank: independent of the world size."""
        def whole(name, key, value):
            axis = self.axis.get(name)
            if axis is None or axis and key not in PARTS:
                return value.clone()
            joined, work = self.runtime.gather_shares(value, len(self._shared_first(name)), "checkpoint")
            wait(work)
            return joined.transpose(0, axis).clone(memory_format=torch.contiguous_format)
        return {name: {key: whole(name, key, value) for key, value in state.items()}
                for name, state in self.state.items()}

    def load_full_state(self, full):
        for name, state in self.state.items():
            (low, high), axis = self.share[name], self.axis.get(name, 0)
            state.update({key: torch.empty_like(full[name][key][low:high], device=self.runtime.device)
                          for key in FROZEN if key in full[name]})
            for key, value in state.items():
                given = full[name][key]
                value.copy_(given if axis and key not in PARTS else given.transpose(0, axis)[low:high])


# ======================================================================================================
# 6. Schedules: pure functions of the step
# ======================================================================================================

def at_step(schedule, step, config):
    """The value in force at `step` of (fraction, value) pairs."""
    return [value for start, value in schedule if start * config.steps <= step][-1]


def micro_batches_at(config, step):
    return at_step(config.micro_batches, step, config)


def lr_multiplier(config, step):
    """1, then a linear fall over the last `cooldown` of the run, down to `final_lr`."""
    left = (config.steps - step) / max(1.0, config.cooldown * config.steps)
    return config.final_lr + (1 - config.final_lr) * min(1.0, left)


def momentum_at(config, step):
    start, end = config.momentum
    return start + (end - start) * min(1.0, step / max(1.0, 0.1 * config.steps))


def untie_step(config):
    """The step before which the head is the embedding; 0 when it never is."""
    return round(config.untie_at * config.steps)


def phase_at(config, step):
    short, long = at_step(config.windows, step, config)
    windows = tuple(long if layer in config.long_layers else short for layer in range(config.num_layers))
    return Phase(windows, at_step(config.mtp_weights, step, config), step < untie_step(config))


def windows_until(config, step):
    """The long windows that have been in force up to `step`, in order: what YaRN needs to know."""
    longs = [long for start, (_, long) in config.windows if start * config.steps <= step]
    return tuple(long for i, long in enumerate(longs) if i == 0 or long != longs[i - 1])


# ======================================================================================================
# 7. Evaluation
# ======================================================================================================

class Stopwatch:
    """Adds up device time between pairs of marks. Reading waits for the device, marking does not."""

    def __init__(self, device):
        self.device, self.marks = device, []

    def mark(self):
        if self.device.type == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def seconds(self):
        pairs = list(zip(self.marks[::2], self.marks[1::2]))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return sum(begin.elapsed_time(end) for begin, end in pairs) / 1000
        return sum(end - begin for begin, end in pairs)


class Trainer:
    """Model, optimizer and compiled forward of one run: what training, evaluation and sampling share."""

    def __init__(self, config, runtime):
        self.config, self.runtime = config, runtime
        torch.set_float32_matmul_precision("highest")
        attention, self.attention_name = choose_attention(config, runtime.device)
        self.model = GPT(config, attention).to(runtime.device)
        self.table = NgramTable(config, runtime) if config.ngram_orders else None
        self.optimizer = Optimizer(config, self.model, runtime, self.table)
        self.stopwatch = Stopwatch(runtime.device)  # of the optimizer's steps
        self.compile_name = choose_compile(config)
        self.forward = self.model
        if self.compile_name == "inductor":
            # Each phase is a graph for training and one for validation; torch's default limit is 8.
            torch._dynamo.config.recompile_limit = 64
            torch._dynamo.config.fail_on_recompile_limit_hit = True  # never eager in silence
            self.forward = torch.compile(self.model, dynamic=False)
        self._rotary = {}

    def context(self, step, micro_batch, training=False):
        """The model's Context at `step`. Outside training only the next token is scored, whatever the schedule says."""
        config, dtype = self.config, getattr(torch, self.config.dtype)
        windows = windows_until(config, step)
        if windows not in self._rotary:
            self._rotary[windows] = rotary_tables(config.micro_batch_tokens, config.head_dim, windows,
                                                  self.runtime.device, dtype)
        phase = phase_at(config, step)
        if not training:  # the model as the last step left it: untying is the first thing that the next one does
            phase = dataclasses.replace(phase, mtp_weights=(1.0,), tied=step <= untie_step(config) > 0)
        biases = {}
        if self.model.attend is blocked_attention:
            biases = {window: blocked_bias(micro_batch.segment_start, window, dtype) for window in set(phase.windows)}
        return Context(phase, self._rotary[windows], attention_scale(config.head_dim, windows), biases)

    def read(self, place):
        """(MicroBatch, its summed n-gram rows) of a Placement outside training. When the table is shared out, all ranks
        must call it together; one that has nothing to read (place None) serves the others."""
        config, device, table = self.config, self.runtime.device, self.table
        if table is None or self.config.ngram_comms != "row_sharded":
            micro_batch = assemble(place, *hash_placement(place, config), device)
            return micro_batch, table and table.lookup(micro_batch)
        none = np.empty((0, len(config.ngram_orders)), dtype=np.int32)
        rows, signs = hash_placement(place, config) if place else (none, none)
        plan, slots = plan_rows(rows, signs, config, self.runtime, name="validation")
        cache = table.arrived(*table.start_pull(plan, "validation"))
        if place is None:
            return None, None
        micro_batch = assemble(place, slots, signs, device)
        return micro_batch, table.lookup(micro_batch, cache)

    def accumulate(self, step, batch):
        """Add up the gradients of this rank's micro-batches. Returns their summed losses, a 0-dim tensor."""
        if step and step == untie_step(self.config):
            self.optimizer.untie()
        total = len(batch.micro_batches) * self.runtime.world_size
        loss_sum, ngram, cache = 0.0, None, None
        if self.table is not None:
            self.table.pull(batch.row_plan)
            if self.config.ngram_comms == "row_sharded":
                cache = self.table.arrived(*self.table.pulled[1:])
        for micro_batch in batch.micro_batches:
            if self.table is not None:
                ngram = self.table.lookup(micro_batch, cache)
            loss, losses = self.forward(micro_batch, ngram, self.context(step, micro_batch, training=True))
            params = {name: param for name, param in self.optimizer.params.items() if param.requires_grad}
            learns_rows = ngram is not None and ngram.requires_grad
            leaves = list(params.values()) + ([ngram] if learns_rows else [])
            grads = torch.autograd.grad(loss / total, leaves, allow_unused=True)
            self.optimizer.accumulate(dict(zip(params, grads)))
            if learns_rows:
                self.table.grads.append(grads[-1])
            loss_sum = loss_sum + losses.detach().sum()
        return loss_sum

    def step(self, step, batch, following=None):
        """One optimizer step. Returns this rank's summed losses and the next step's Batch: what `following` returns,
        which is called when the backward pass is under way."""
        loss_sum = self.accumulate(step, batch)
        upcoming = following() if following else None
        self.stopwatch.mark()
        self.optimizer.step(step, lr_multiplier(self.config, step), batch.row_plan, upcoming and upcoming.row_plan)
        self.stopwatch.mark()
        return loss_sum, upcoming

    @torch.no_grad()
    def token_losses(self, step, micro_batch, ngram):
        """Validation loss of each token, (T,) float32, of the model as it stands before `step`."""
        return self.forward(micro_batch, ngram, self.context(step, micro_batch))[1]

    @torch.no_grad()
    def hidden(self, step, micro_batch, ngram):
        """Final hidden states, (T, model_dim), of the model as it stands before `step`."""
        return self.model.hidden(micro_batch, ngram, self.context(step, micro_batch))

    def evaluate(self, step, val):
        """Mean loss over the track's validation tokens, in nats per token; micro-batches are shared among ranks."""
        length, runtime = self.config.micro_batch_tokens, self.runtime
        total = torch.zeros((), dtype=torch.float64, device=runtime.device)
        count = self.config.val_tokens // length
        for first in range(0, count, runtime.world_size):  # ranks without a last micro-batch still serve rows
            index = first + runtime.rank
            place = place_contiguous(val, index * length, self.config) if index < count else None
            if place or self.config.ngram_comms == "row_sharded":
                micro_batch, ngram = self.read(place)
            if place:
                total += self.token_losses(step, micro_batch, ngram).double().sum()
        wait(self.runtime.all_reduce(total, "validation"))
        return total.item() / self.config.val_tokens

    def evaluate_all(self, step, vals):
        """{name of the loss: evaluate} of validation tokens by name."""
        return {name: self.evaluate(step, val) for name, val in vals.items()}


def choose_compile(config):
    """inductor where it can work, else why not: announced in the log, never silent."""
    if not config.compile:
        return "off"
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
        get_cpp_compiler()
    except Exception as error:  # inductor raises its own types for a missing compiler
        return f"off (no C++ compiler: {type(error).__name__})"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():  # inductor's and triton's wrappers include it
        return "off (no Python.h: install the python3-dev package)"
    return "inductor"


@torch.no_grad()
def check_causal(trainer, step, val):
    """Replace all tokens after the middle of a validation micro-batch by others: the losses whose targets come
    before must stay bitwise the same, n-gram rows, smearing and segment masks included."""
    length = trainer.config.micro_batch_tokens
    middle = length // 2
    original = np.array(val[:length + 1])
    changed = original.copy()
    noise = np.random.default_rng(0).integers(1, trainer.config.eot_token, size=length - middle)
    changed[middle + 1:] = (changed[middle + 1:].astype(np.int64) + noise) % (trainer.config.eot_token + 1)
    losses, hidden = [], []
    for tokens in (original, changed):
        micro_batch, ngram = trainer.read(place_contiguous(tokens, 0, trainer.config))
        losses.append(trainer.token_losses(step, micro_batch, ngram))
        hidden.append(trainer.hidden(step, micro_batch, ngram))
    # The state at the middle predicts the first changed token: a look one token ahead shows there and nowhere before.
    same = (torch.equal(losses[0][:middle], losses[1][:middle])
            and torch.equal(hidden[0][:middle + 1], hidden[1][:middle + 1]))
    return same and not torch.equal(losses[0][middle:], losses[1][middle:])


@torch.no_grad()
def check_normalised(trainer, step, val):
    """At a few positions, exp(-loss) over every possible target must sum to 1."""
    config = trainer.config
    hidden = trainer.hidden(step, *trainer.read(place_contiguous(val, 0, config)))
    for row in hidden[::max(1, len(hidden) // 8)]:
        total = 0.0
        for targets in torch.arange(config.vocab_size, device=row.device).split(1024):  # bounds the logits' memory
            losses = trainer.model.next_token_losses(row.expand(len(targets), -1), targets)[0]
            total += torch.exp(-losses.double()).sum().item()
        if not abs(total - 1) < 1e-4:
            return False
    return True


def validation_hash(config, val):
    return hashlib.sha256(np.ascontiguousarray(val[:config.val_tokens + 1]).tobytes()).hexdigest()


# ======================================================================================================
# 8. Checkpoints
# ======================================================================================================

CHECKPOINT_FORMAT = 2


@contextlib.contextmanager
def atomic_file(path):
    """Open a temporary file for writing bytes that becomes `path` when the block ends well: a kill or a full disk
    leaves the former file, or none, under the final name. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(path, content):
    """Write `content` (tensors and plain types), and the file's sha256 beside it, atomically. Raises OSError."""
    path = Path(path)
    with atomic_file(path) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's zip writer reports a failed write so
            raise OSError(f"{path}: {str(error).splitlines()[0]}") from error
        file.flush()
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        path.with_suffix(".sha256").unlink(missing_ok=True)
    with atomic_file(path.with_suffix(".sha256")) as beside:
        beside.write(f"{digest}  {path.name}\n".encode())


def load_checkpoint(path):
    """Read a checkpoint after checking its sha256. Raises ConfigError."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such checkpoint; runs leave theirs at logs/<run id>/checkpoint.pt")
    recorded = path.with_suffix(".sha256")
    if recorded.is_file():
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != recorded.read_text().split()[0]:
                raise ConfigError(f"{path}: sha256 differs from {recorded.name}: damaged; use another checkpoint")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises several types for a damaged file
        raise ConfigError(f"{path}: cannot be read ({type(error).__name__}: {str(error).partition(chr(10))[0]}); use "
                          f"another checkpoint") from None
    if not isinstance(content, dict) or content.get("format") != CHECKPOINT_FORMAT:
        raise ConfigError(f"{path}: not a checkpoint of this trainer's format {CHECKPOINT_FORMAT}")
    return content


def config_of_checkpoint(content):
    """The Config a checkpoint was made with; JSON-like lists become tuples again."""
    def tuples(value):
        return tuple(tuples(item) for item in value) if isinstance(value, (list, tuple)) else value
    known = {field.name for field in dataclasses.fields(Config)}
    return Config(**{key: tuples(value) for key, value in content["config"].items() if key in known})


# ======================================================================================================
# 9. Training loop
# ======================================================================================================

class NonFiniteLoss(RuntimeError):
    """The training or validation loss is NaN or infinite."""


INTERRUPTED = threading.Event()


def interrupt(signum, frame):
    """Signal handler: end the run at once, or at the next step if the exception falls where Python drops it (in a
    callback of the garbage collector, say)."""
    INTERRUPTED.set()
    raise KeyboardInterrupt


class Clock:
    """Training time in seconds. Starting and stopping wait for the device, nothing else does."""

    def __init__(self, runtime, seconds=0.0):
        self.runtime, self.total, self.before, self.since = runtime, seconds, seconds, None

    def start(self):
        self.runtime.synchronize()
        self.since = time.perf_counter()

    def stop(self):
        self.runtime.synchronize()
        self.total, self.since = self.seconds(), None

    def seconds(self):
        return self.total + (time.perf_counter() - self.since if self.since is not None else 0.0)


def local_state(trainer):
    """Every tensor that a step changes on this rank, by name."""
    tensors = dict(trainer.model.named_parameters())
    for name, state in trainer.optimizer.state.items():
        tensors.update({f"{name}.{key}": value for key, value in state.items()})
    tensors.update({f"{name}.grad": value for name, value in trainer.optimizer.grads.items()})
    if trainer.table:
        tensors.update({"ngram_table": trainer.table.weight, "ngram_table.second": trainer.table.second,
                        "ngram_table.scale": torch.tensor([trainer.table.scale], dtype=torch.float64)})
    tensors["rng"] = torch.get_rng_state()
    return {name: tensor.detach() for name, tensor in tensors.items()}


def state_digest(trainer):
    """sha256 over the bytes of local_state: equal digests, equal state, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(local_state(trainer).items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def warm_up(trainer):
    """Compile and run every phase of the schedule on synthetic tokens, then put the state back and prove it.

    The digest is taken before and after, apart from the copies that restore the state. Of the n-gram table only the
    rows that the synthetic tokens touch are copied."""
    config, runtime, table = trainer.config, trainer.runtime, trainer.table
    before = state_digest(trainer)
    kept = {name: tensor.clone() for name, tensor in local_state(trainer).items() if not name.startswith("ngram_table")}
    tokens = np.random.default_rng(0).integers(0, config.eot_token, size=config.micro_batch_tokens + 1).astype(np.uint16)
    tokens[0] = config.eot_token
    place = place_contiguous(tokens, 0, config)
    rows, signs = hash_placement(place, config)
    plan = None
    if table:
        readers = runtime.world_size if config.ngram_comms == "tokens" else 1
        plan, slots = plan_rows(np.tile(rows, (readers, 1)), np.tile(signs, (readers, 1)), config, runtime)
        if config.ngram_comms == "row_sharded":
            rows = slots
        touched = plan.owned if config.ngram_comms == "row_sharded" else plan.rows  # all ranks have the same tokens
        kept_rows, kept_second, kept_scale = table.weight[touched], table.second[plan.owned], table.scale
    micro_batch = assemble(place, rows, signs, runtime.device)
    seen = set()
    for step in range(config.steps):
        key = (phase_at(config, step), windows_until(config, step))
        if key in seen:
            continue
        seen.add(key)
        for _ in range(2):  # the second call is the first without compilation
            trainer.step(step, Batch([micro_batch], plan, {}))
            trainer.token_losses(step, *trainer.read(place))
    trainer.token_losses(config.steps, *trainer.read(place))
    for name, tensor in local_state(trainer).items():
        if name in kept and name != "rng":
            tensor.copy_(kept[name])
    if table:
        table.weight[touched], table.second[plan.owned], table.scale = kept_rows, kept_second, kept_scale
        table.grads.clear()
    torch.set_rng_state(kept["rng"])
    if state_digest(trainer) != before:
        raise RuntimeError("the state after warm-up is not bitwise the state before it")


def checkpoint_content(trainer, step, loader_state, clock):
    """What a checkpoint holds. Every rank must call this: sharded states are gathered."""
    optimizer = trainer.optimizer.full_state()
    return {"format": CHECKPOINT_FORMAT, "step": step, "config": dataclasses.asdict(trainer.config),
            "model": trainer.model.state_dict(), "optimizer": optimizer, "loader": loader_state,
            "ngram_table": trainer.table and trainer.table.full_state(), "rng": torch.get_rng_state(),
            "train_seconds": clock.seconds()}


def restore(trainer, content):
    """Load weights and, if the checkpoint is for training, optimizer state."""
    trainer.model.load_state_dict(content["model"])
    if trainer.table:
        trainer.table.load_full_state(content["ngram_table"])
    trainer.optimizer.load_full_state(content["optimizer"])
    torch.set_rng_state(content["rng"])


def initial_content(config):
    """The content of --init-from, None without. Raises ConfigError where it is missing or does not fit."""
    if not config.init_from:
        if config.first_data or config.unfreeze_rank_ratio < 1:
            raise ConfigError(f"track {config.track}: goes on with a trained model; name its run or checkpoint with "
                              f"--init-from (`./run.sh nano --run-id NAME` trains one)")
        return None
    def shape(config, step):  # what weights mean nothing without
        names = ("tokenizer", "model_dim", "num_layers", "head_dim", "mlp_dim", "long_layers", "value_embedding_layers",
                 "logit_cap", "ngram_orders", "ngram_rows")
        return {**{name: getattr(config, name) for name in names}, "untie_at": step <= untie_step(config) > 0,
                "windows": (at_step(config.windows, step, config), windows_until(config, step))}
    content = load_checkpoint(find_checkpoint(config.init_from, "init-from"))
    saved, here = config_of_checkpoint(content), shape(config, 0)
    for name, value in shape(saved, content["step"]).items():
        if value != here[name]:
            raise ConfigError(f"--init-from {config.init_from}: a checkpoint of track {saved.track}, with {name}="
                              f"{value} where this run has {here[name]}; choose one of its shape, or override --{name}")
    return content


@torch.no_grad()
def layer_importance(trainer, tokens):
    """OSFT's importance of each layer: the mean cosine between its input and its output over the first micro-batch of a
    shard, divided by the mean over layers. The residual stream's: other matrices' sides have no cosine."""
    micro_batch, ngram = trainer.read(place_contiguous(tokens, 0, trainer.config))
    stream = []
    trainer.model.hidden(micro_batch, ngram, trainer.context(0, micro_batch), stream)
    cosines = [F.cosine_similarity(x.float(), y.float(), dim=-1).mean().item() for x, y in zip(stream, stream[1:])]
    return [cosine * len(cosines) / sum(cosines) for cosine in cosines]


def start_from(trainer, content, tokens):
    """Take over a trained model, optimizer state apart, and freeze its top directions if the Config says so. tokens: a
    training shard of the domain that it knows. Returns a line for the log."""
    config, optimizer, table = trainer.config, trainer.optimizer, content["ngram_table"]
    trainer.model.load_state_dict(content["model"])
    if trainer.table:
        trainer.table.load_full_state({**table, "second": torch.zeros_like(table["second"])})
    ratio, line = config.unfreeze_rank_ratio, f"started_from:{config.init_from} step:{content['step']}"
    if ratio == 1:
        return line
    ratios = [ratio] * config.num_layers
    if config.adaptive_rank:
        low = min(MIN_RETENTION, 1 - ratio)
        ratios = [min(1.0, max(0.0, 1 - low - importance * (1 - ratio - low)))
                  for importance in trainer.runtime.broadcast_object(layer_importance(trainer, tokens))]
    ranks = {name: min(optimizer.params[name].shape[1:]) for name in optimizer.banks}
    layers = {name: [frozen_count(rank, own) for own in ratios] for name, rank in ranks.items()}
    optimizer.protect({name: [count for count in counts for _ in range(len(optimizer.params[name]) // len(counts))]
                       for name, counts in layers.items()})
    return f"{line} frozen: " + " ".join(f"{name}={layers[name]}/{rank}" for name, rank in ranks.items())


def count_run(config, code_sha256):
    """The log line of this run's place among those declared with --runs. logs/runs.jsonl counts every start: so many
    runs of one code and track are a batch, then the next begins; a run id that is started again keeps its place."""
    ledger, code = Path("logs/runs.jsonl"), [config.track, code_sha256]
    entries = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    entries = [entry for entry in entries if entry["code"] == code]
    again = [entry["place"] for entry in entries if entry["run"] == config.run_id]
    last = max((entry["place"] for entry in entries), default=[1, 0, config.runs])
    batch, counter, declared = again[-1] if again else last
    if not again:
        batch, counter, declared = (batch, counter + 1, declared) if counter < declared else (batch + 1, 1, config.runs)
    if declared != config.runs:
        raise ConfigError(f"--runs {config.runs}: {declared} were declared at the first run of this batch ({ledger}); "
                          f"keep to that number")
    with open(ledger, "a") as file:
        file.write(json.dumps({"code": code, "place": [batch, counter, declared], "run": config.run_id}) + "\n")
    return f"batch:{batch} counter:{counter}/{declared} start:{len(again) + 1}"


def log_header(log, trainer, config, overrides, code):
    """The lines that make a run reproducible: source, machine, resolved configuration, data, back ends."""
    runtime = trainer.runtime
    sha, dirty = git_state()
    try:
        import triton
        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    manifest = Path(config.data) / "manifest.json"
    data = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else "none"
    log.source(code)
    log.line(f"run:{config.run_id} track:{config.track} commit:{sha} dirty:{dirty} "
             f"code_sha256:{hashlib.sha256(code.encode()).hexdigest()} seed:{config.seed} "
             f"world_size:{runtime.world_size} device:{device_name(runtime.device)} torch:{torch.__version__} "
             f"cuda:{torch.version.cuda or 'none'} triton:{triton_version}")
    log.line("config:" + json.dumps(dataclasses.asdict(config)))
    if record_overrides := {key: value for key, value in overrides.items() if key not in NEUTRAL_FIELDS}:
        log.line("overrides:" + json.dumps(record_overrides))
    if config.runs and not record_overrides and runtime.is_main:
        log.line(count_run(config, hashlib.sha256(code.encode()).hexdigest()))
    log.line(f"data:{data} backends:attention={trainer.attention_name},matmul=torch-{config.dtype},"
             f"compile={trainer.compile_name}")
    sizes = {rule: sum(param.numel() for name, param in trainer.optimizer.params.items() if RULES[name].update == rule)
             for rule in ("matrix", "adam")}
    log.line(f"size: matrices={sizes['matrix']:,} embeddings_and_head={sizes['adam']:,} "
             f"ngram_table={config.ngram_rows * config.model_dim if config.ngram_orders else 0:,}")
    log.line("===== START =====")


def train_steps(trainer, log, shards, vals, clock, folder, first_step, loader_state):
    """The steps from first_step to the end; vals: validation tokens by name of the loss. Returns the loader's final
    state."""
    config, runtime = trainer.config, trainer.runtime
    tokens_of = config.micro_batch_tokens
    clock.start()
    loader = TrainLoader(config, shards, runtime, first_step, loader_state)
    try:
        batch = loader.next()
        for step in range(first_step, config.steps):
            if INTERRUPTED.is_set():
                raise KeyboardInterrupt
            loader_state, done = batch.state, step + 1
            loss_sum, batch = trainer.step(step, batch, loader.next if done < config.steps else None)
            if done % config.log_every == 0 or done == config.steps:
                total = loss_sum.double()
                wait(runtime.all_reduce(total, "training loss"))
                loss = total.item() / (micro_batches_at(config, step) * tokens_of)
                runtime.synchronize()
                seconds = clock.seconds()
                log.step(done, config.steps, train_loss=loss, lr_mul=lr_multiplier(config, step),
                         train_time=1000 * seconds, step_avg=1000 * seconds / done)
                if not math.isfinite(loss):
                    raise NonFiniteLoss(f"training loss is {loss} at step {done}")
            elif log.live:
                log.progress(done, config.steps, clock.seconds())
            if config.val_every and done % config.val_every == 0 and done < config.steps:
                clock.stop()
                log.step(done, config.steps, **trainer.evaluate_all(done, vals), train_time=1000 * clock.total,
                         step_avg=1000 * clock.total / done)
                clock.start()
            if config.save_every and done % config.save_every == 0 and done < config.steps:
                clock.stop()
                content = checkpoint_content(trainer, done, loader_state, clock)
                if runtime.is_main:
                    save_checkpoint(folder / f"step_{done:06d}.pt", content)
                clock.start()
    finally:
        loader.close()
    clock.stop()
    return loader_state


def finish(trainer, log, vals, clock, first_step, loader_state, folder, overrides, code):
    """Checkpoint, final validation, validity gates, plot and result. Returns the final validation loss."""
    config, runtime, val = trainer.config, trainer.runtime, vals["val_loss"]
    # Of training alone: before rank 0 collects the checkpoint.
    sent = {f"{collective}/{name}": [round(count / (config.steps - first_step), 1) for count in counts]
            for (collective, name), counts in sorted(runtime.ledger.items())
            if name not in ("validation", "checkpoint")}
    memory = runtime.peak_memory_mib()
    content = checkpoint_content(trainer, config.steps, loader_state, clock)
    if runtime.is_main:
        save_checkpoint(folder / "checkpoint.pt", content)
    losses = trainer.evaluate_all(config.steps, vals)
    val_loss = losses["val_loss"]
    log.step(config.steps, config.steps, **losses, train_time=1000 * clock.total,
             step_avg=1000 * clock.total / config.steps)
    if not all(map(math.isfinite, losses.values())):
        raise NonFiniteLoss(f"validation loss is {' and '.join(map(str, losses.values()))}")
    gates = {"causal": check_causal(trainer, config.steps, val),
             "normalised": check_normalised(trainer, config.steps, val)}
    digest = validation_hash(config, val)
    log.line("comms: sent_bytes per step (messages) "
             + (" ".join(f"{key}={size:.0f}({messages:g})" for key, (size, messages) in sent.items()) or "none=0(0)"))
    verdict = {name: "ok" if passed else "FAILED" for name, passed in gates.items()}
    log.line(f"validity: causal:{verdict['causal']} normalised:{verdict['normalised']} "
             f"val_tokens:{config.val_tokens} val_sha256:{digest}")
    share = 100 * trainer.stopwatch.seconds() / max(1e-9, clock.total - clock.before)  # since it was resumed
    rejects = sum(int(state["rejects"].sum()) for state in content["optimizer"].values() if "rejects" in state)
    log.line(f"optimizer: share:{share:.1f}% basis_rejects:{rejects}")
    tokens = sum(micro_batches_at(config, step) for step in range(config.steps)) * config.micro_batch_tokens
    log.line(f"final val_loss:{val_loss:.5f} train_time:{1000 * clock.total:.0f}ms tokens:{tokens} "
             f"peak_memory:{max(memory)}MiB" + "".join(f" {k}:{v:.5f}" for k, v in losses.items() if k != "val_loss"))
    if runtime.is_main:
        sha, dirty = git_state()
        result = {"run": config.run_id, "track": config.track, **losses, "seed": config.seed,
                  "train_time_ms": 1000 * clock.total, "steps": config.steps, "tokens": tokens,
                  "target_loss": config.target_loss, "world_size": runtime.world_size, "commit": sha, "dirty": dirty,
                  "code_sha256": hashlib.sha256(code.encode()).hexdigest(), "device": device_name(runtime.device),
                  "torch": torch.__version__, "peak_memory_mib_by_rank": memory, "validity": gates,
                  "optimizer_percent": share, "basis_rejects": rejects, "val_sha256": digest,
                  "overrides": {k: v for k, v in overrides.items() if k not in NEUTRAL_FIELDS},
                  "sent_bytes_per_step": {key: size for key, (size, _) in sent.items()},
                  "sent_messages_per_step": {key: messages for key, (_, messages) in sent.items()},
                  "config": dataclasses.asdict(config)}
        with atomic_file(folder / "result.json") as file:
            file.write((json.dumps(result, indent=1) + "\n").encode())
        plot_losses(folder)
    if not all(gates.values()):
        raise RuntimeError(f"validity gate failed: {', '.join(name for name in gates if not gates[name])}; the model "
                           f"sees tokens that it must not see, or its losses are not those of a distribution")
    return val_loss


def plot_losses(folder):
    """Draw the losses of metrics.jsonl against training time into loss.png, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed; requirements.txt has it", file=sys.stderr)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for key, style in (("train_loss", {"linewidth": 0.8, "alpha": 0.6}), ("val_loss", {"marker": "o"}),
                       ("first_val_loss", {"marker": "s"})):
        points = [(event["train_time"] / 1000, event[key]) for event in events if key in event]
        axes.plot(*zip(*points), label=key, **style) if points else None
    axes.set(xlabel="training time, s", ylabel="loss, nats per token", title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_file(folder / "loss.png") as file:
        figure.savefig(file, format="png", dpi=120)
    plt.close(figure)


def train(config, overrides, runtime, content=None):
    """Run a whole training run, from a checkpoint's content if given. Returns the exit status."""
    status, log, failed = "error", None, True
    try:
        seed = config.seed if config.seed >= 0 else int.from_bytes(os.urandom(4), "little")
        run_id = config.run_id or f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{os.urandom(2).hex()}"
        seed, run_id = runtime.broadcast_object((seed, run_id))
        config = dataclasses.replace(config, seed=seed, run_id=run_id)
        check_world_size(config, runtime.world_size)
        shards, val = open_corpus(config)
        vals, first_shards = {"val_loss": val}, [None]
        if config.first_data:
            first_shards, vals["first_val_loss"] = open_corpus(config, "first_data")
        initial = None if content else initial_content(config)
        folder = Path("logs") / run_id
        exists = runtime.broadcast_object((folder / "log.txt").exists())  # rank 0 decides, before it opens the log
        if not content and exists:
            raise ConfigError(f"{folder}: this run exists; choose another --run-id, or continue it with "
                              f"--resume {run_id}")
        torch.manual_seed(seed)
        trainer = Trainer(config, runtime)
        clock, first_step, loader_state = Clock(runtime), 0, None
        code = Path(__file__).read_text()
        log = Log(runtime, folder, append=content is not None)
        if content:
            restore(trainer, content)
            first_step, loader_state = content["step"], content["loader"]
            clock.total = clock.before = content["train_seconds"]
            log.line(f"resumed:{run_id} step:{first_step}/{config.steps} world_size:{runtime.world_size}")
        else:
            log_header(log, trainer, config, overrides, code)
        if initial:
            log.line(start_from(trainer, initial, first_shards[0]))
        if config.val_sha256 and validation_hash(config, val) != config.val_sha256:
            log.line(f"note: the validation tokens in {config.data} are not the {config.track} track's; losses are not "
                     f"comparable with its records")
        warm_up(trainer)
        runtime.ledger.clear()
        trainer.stopwatch.marks.clear()
        if initial and config.val_every:
            log.step(0, config.steps, **trainer.evaluate_all(0, vals), train_time=0.0, step_avg=0.0)
        loader_state = train_steps(trainer, log, shards, vals, clock, folder, first_step, loader_state)
        val_loss = finish(trainer, log, vals, clock, first_step, loader_state, folder, overrides, code)
        status, failed = (f"ok run:{run_id} val_loss:{val_loss:.5f} train_time:{clock.total:.1f}s "
                          f"log:{folder}/log.txt plot:{folder}/loss.png"), False
        return 0
    except KeyboardInterrupt:
        status = "interrupted"
        return 130
    except NonFiniteLoss as error:
        status = f"nan {error}; lower the learning rate or continue an earlier checkpoint with --resume"
        return 1
    except torch.OutOfMemoryError as error:
        status = f"oom {str(error).splitlines()[0]}; lower --micro-batch-tokens"
        return 1
    except ConfigError as error:
        status = f"error {error}"
        return 2
    except OSError as error:
        status = f"error {error}; free some disk space, or check the path"
        return 1
    except Exception as error:
        status = f"error {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise
    finally:
        if log is not None:
            with contextlib.suppress(OSError):  # the disk may be full; the console still gets the status
                log.line(f"status:{status}")
                log.close()
        elif runtime.is_main:
            print(f"status:{status}", flush=True)
        if not runtime.is_main and status.startswith("error"):
            print(f"rank {runtime.rank}: {status}", file=sys.stderr, flush=True)
        runtime.close(failed)


# ======================================================================================================
# 10. Commands
# ======================================================================================================

def check_world_size(config, world_size):
    if config.ngram_orders and config.ngram_rows < world_size:
        raise ConfigError(f"ngram_rows={config.ngram_rows}: fewer than world size {world_size}, so that some rank would "
                          f"own none; raise --ngram-rows, or start fewer processes")
    for _, count in config.micro_batches:
        if count % world_size:
            raise ConfigError(f"world size {world_size}: must divide the {count} micro-batches of a step; start a "
                              f"number of processes that divides it, or change --micro-batches")


def memory_estimate(config, world_size=1):
    """Rough bytes of a rank, banks unshared: weights, gradients, optimizer states, n-gram table, activations of one
    micro-batch (about 34 values a channel and layer, and the float32 logits twice)."""
    width = 2 if config.dtype == "bfloat16" else 4
    matrices = config.num_layers * (4 * config.model_dim + 2 * config.mlp_dim) * config.model_dim
    tables = (2 + len(config.value_embedding_layers)) * config.vocab_size * config.model_dim
    state = (matrices + tables) * (width + 4 + 8 + 2)
    if config.matrix_update in SOAP_RULES:  # a moment; factor and basis of each side
        sides = ((config.model_dim, 10 * config.num_layers), (config.mlp_dim, 2 * config.num_layers))
        state += 4 * matrices + sum(8 * count * size**2 for size, count in sides if size <= config.one_sided_above)
    if config.unfreeze_rank_ratio < 1:
        state += 8 * matrices  # at most, for square matrices of which nearly all is frozen
    table = config.ngram_rows * (config.model_dim + 1) * 4 if config.ngram_orders else 0
    if config.ngram_comms == "row_sharded":
        table //= world_size
    activations = config.micro_batch_tokens * (34 * config.num_layers * config.model_dim * width
                                               + 8 * config.vocab_size)
    return state + table + activations


def available_memory(device):
    """Bytes that a run could take: free on the GPU; available, or where that is not told all, on the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def preflight(config, runtime):
    """Say what a run would use; raises ConfigError when something is missing."""
    say = print if runtime.is_main else (lambda text: None)
    check_world_size(config, runtime.world_size)
    _, attention = choose_attention(config, runtime.device)
    say(f"device: {device_name(runtime.device)}, world size {runtime.world_size}, torch {torch.__version__}")
    say(f"backends: attention={attention} compile={choose_compile(config)} dtype={config.dtype}")
    shards, val = open_corpus(config)
    if config.first_data:
        open_corpus(config, "first_data")
    initial_content(config)
    needed = sum(micro_batches_at(config, step) for step in range(config.steps)) * config.micro_batch_tokens
    say(f"data: {config.data}: {sum(map(len, shards)):,} training tokens in {len(shards)} shard(s), the schedule takes "
        f"{needed:,}; {len(val):,} validation tokens, {config.val_tokens:,} are scored")
    estimate, free = memory_estimate(config, runtime.world_size), shutil.disk_usage(".").free
    checkpoint = memory_estimate(config)
    for what, taken, there, remedy in (
            ("memory: a run takes about", estimate, available_memory(runtime.device),
             "lower --micro-batch-tokens or --ngram-rows"),
            ("disk: a checkpoint takes up to", checkpoint, free, "make room, or run from another disk")):
        line = f"{what} {taken / 2**30:.1f} GiB, {there / 2**30:.1f} GiB are free"
        if taken > there:
            raise ConfigError(f"{line}; {remedy}")
        say(line)
    say("check:ok")


def find_checkpoint(run, key="resume"):
    """The newest checkpoint of a run id, or the file itself."""
    if Path(run).is_file():
        return Path(run)
    folder = Path("logs") / run
    kept = sorted(folder.glob("step_*.pt"))
    for path in [folder / "checkpoint.pt", *reversed(kept)]:
        if path.is_file():
            return path
    runs = [path.parent.name for path in Path("logs").glob("*/*.pt")]
    raise ConfigError(f"--{key} {run}: no checkpoint under {folder}; {nearest(run, runs)}")


def resumed(given):
    """(config, overrides, checkpoint content) of `--resume RUN`; other keys may only repeat what the run has, but for
    those that say where and how it is watched."""
    fields = {field.name: field for field in dataclasses.fields(Config)}
    content = load_checkpoint(find_checkpoint(given["resume"]))
    saved = config_of_checkpoint(content)
    if content["step"] >= saved.steps:
        raise ConfigError(f"--resume {given['resume']}: this run is complete ({content['step']} of {saved.steps} steps)")
    changed = {}
    for key, text in given.items():
        if key not in fields:
            raise ConfigError(f"--{key}: no such key; {nearest(key, fields)} --help lists them all")
        value = parse_value(fields[key], text)
        if key in ("device", "log_every", "save_every"):
            changed[key] = value
        elif key != "resume" and value != getattr(saved, key):
            raise ConfigError(f"--{key} {text}: the run to resume has {getattr(saved, key)}, and a resumed run keeps "
                              f"its configuration; leave the key out")
    config, base = dataclasses.replace(saved, **changed), TRACKS[saved.track]
    overrides = {name: getattr(config, name) for name in fields
                 if getattr(config, name) != getattr(base, name) and name != "val_sha256"}
    return config, overrides, content


def open_trained(given):
    """(trainer, step) of `--checkpoint F`, in this process alone."""
    if "checkpoint" not in given:
        raise ConfigError("--checkpoint F is missing; runs leave theirs at logs/<run id>/checkpoint.pt")
    content = load_checkpoint(given["checkpoint"])
    config = dataclasses.replace(config_of_checkpoint(content), compile=False, device=given.get("device", "auto"))
    if "data" in given:
        config = dataclasses.replace(config, data=given["data"])
    trainer = Trainer(config, Runtime(config.device))
    restore(trainer, content)
    return trainer, content["step"]


def refuse_unknown(given, known):
    for key in given:
        if key not in known:
            raise ConfigError(f"--{key}: no such key here; {nearest(key, known)} Keys: {', '.join(sorted(known))}")


def eval_command(given):
    """Validation loss of a checkpoint, as `eval val_loss:<nats per token> ...`."""
    refuse_unknown(given, {"checkpoint", "device", "data"})
    trainer, step = open_trained(given)
    _, val = open_corpus(trainer.config)
    loss = trainer.evaluate(step, val)
    print(f"eval val_loss:{loss:.5f} val_tokens:{trainer.config.val_tokens} "
          f"val_sha256:{validation_hash(trainer.config, val)}")


def text_codec(config):
    """(encode, decode) between text and token ids of the track's tokenizer."""
    if config.tokenizer == "bytes":
        return (lambda text: list(text.encode())), (lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace"))
    import tiktoken
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # requests' types, when neither network nor cache has the vocabulary
        raise ConfigError(f"tiktoken cannot load the gpt2 vocabulary ({type(error).__name__}); needs the network once, "
                          f"or a filled TIKTOKEN_CACHE_DIR") from None
    return encoding.encode_ordinary, encoding.decode


@torch.no_grad()
def sample_command(given):
    """Continue a prompt, token by token: --prompt TEXT, --tokens N, --temperature X, --seed N."""
    refuse_unknown(given, {"checkpoint", "device", "prompt", "tokens", "temperature", "seed"})
    try:
        count, temperature = int(given.get("tokens", 200)), float(given.get("temperature", 0.7))
        seed = int(given.get("seed", 0))
    except ValueError as error:
        raise ConfigError(f"--tokens, --seed and --temperature are numbers: {error}") from None
    trainer, step = open_trained(given)
    config = trainer.config
    if count < 1 or temperature < 0:
        raise ConfigError(f"--tokens {count} --temperature {temperature}: at least one token, no negative temperature")
    encode, decode = text_codec(config)
    tokens = [config.eot_token, *encode(given.get("prompt", ""))]
    generator = torch.Generator().manual_seed(seed)
    limit, made = config.micro_batch_tokens, []
    for _ in range(count):
        context = tokens[-limit:]
        padded = np.zeros(limit + 1, dtype=np.uint16)  # what follows the context is never attended to
        padded[:len(context)] = context
        micro_batch, ngram = trainer.read(place_contiguous(padded, 0, config))
        last = trainer.hidden(step, micro_batch, ngram)[len(context) - 1:len(context)]
        logits = trainer.model.next_token_losses(last, micro_batch.targets[:1])[2][0].cpu()[:config.eot_token + 1]
        if temperature:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).item()
        else:
            token = logits.argmax().item()
        if token == config.eot_token:
            break
        tokens.append(token), made.append(token)
    print(given.get("prompt", "") + decode(made))


def main(argv=None):
    """Returns the exit status: 0 complete, 1 failed on the way, 2 bad input, 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # torchrun ends its workers with the latter
        signal.signal(number, interrupt)
    commands = {"sample": sample_command, "eval": eval_command}
    try:
        if "--help" in argv or "-h" in argv:
            print(help_text())
            return 0
        if argv and argv[0] in commands:
            commands[argv[0]](parse_arguments(argv[1:]))
            return 0
        if check := "--check" in argv:
            argv.remove("--check")
        given = parse_arguments(argv)
        if given.get("resume"):
            config, overrides, content = resumed(given)
        else:
            (config, overrides), content = config_from(given), None
        runtime = Runtime(config.device)
        if check:
            preflight(config, runtime)
            return 0
    except (ConfigError, OSError) as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"status:error {error}", flush=True)
        return 2
    return train(config, overrides, runtime, content)


if __name__ == "__main__":
    sys.exit(main())
