"""Train a GPT to a target validation loss as fast as this machine allows, in one file.

    python train_gpt.py --track nano                    one process: every core of a CPU, or one GPU
    torchrun --nproc_per_node=8 train_gpt.py            one process per GPU (several nodes: see README)
    python train_gpt.py --help                          every configuration field, default and meaning
    python train_gpt.py --track nano --check            everything but the steps: would this run start?

Chapters, in reading order:
    1. Configuration, tracks and schedules   one frozen dataclass, each field beside its check
    2. Runtime and log                       ranks, device, collectives that count their bytes, the log
    3. Data                                  shards, micro-batches of whole documents, a loader that works ahead
    4. N-gram table                          n-grams, copies, the index: from a token to its rows and back
    5. Model                                 rotary positions, the GPT
    6. Optimizer                             update rules, eigenbases, and the groups of parameters that they step
    7. Trainer and validity gates            forward and backward pass, a step, validation
    8. Checkpoints                           atomic, checksummed, independent of the world size
    9. Run                                   warm-up and its proof, the clock, the steps, the result
   10. Commands                              what the command line says
   11. Kernels                               what a GPU computes faster by hand, each with its plain form; back ends

A step's global batch is a fixed list of micro-batches. Rank r of W takes every W-th, which on a CPU its threads share.
All world sizes see the same tokens, and under muon and adam they take the same step up to the order of float sums.
"""
import ast, collections, contextlib, copy, dataclasses, datetime, difflib, fcntl, functools, hashlib, importlib.util
import itertools, json, math, os, platform, re, resource, shutil, signal, socket, subprocess, sys, sysconfig, threading
import time, timeit, types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, NamedTuple

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it once: large tensors on the CPU go into huge pages
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, distributed as dist, nn
from torch.utils.checkpoint import checkpoint

# 1. Configuration, tracks and schedules =====================================================================
ATTENTION_BLOCK = 64  # back end sdpa: queries of a block share their keys
GATE_DIM = 12  # gates read the first few channels of the residual stream
EOT_TOKEN = {"bytes": 256, "gpt2": 50256}  # the largest id of each tokenizer; every document starts with it
VOCAB_SIZE = {"bytes": 257, "gpt2": 50304}  # rows of embedding and head; tensor cores like multiples of 128
CHECKPOINT_FORMAT = 6
TIMEOUT = datetime.timedelta(minutes=10)  # for which ranks wait for each other
ANSWER_SECONDS = 5  # for which a rank that fails waits to hear how others do

class ConfigError(ValueError):
    """Something the user can put right: the message holds the value, the constraint and the remedy."""

def refuse(bad, message):
    if bad:
        raise ConfigError(message)

def one_line(error):  # what it says, printable; of a long text the beginning and the end
    return re.sub("^(.{500}).+(.{500})$", r"\1 ... \2", ascii(str(error))[1:-1])

def knob(default, help, good=lambda value: True, limits="must be printable, and of its type", schedule=False):
    """A field of Config. good: whether a value is acceptable; limits: what the error says where it is not."""
    return dataclasses.field(default=default, metadata=dict(help=help, good=good, limits=limits, schedule=schedule))

def choice(*allowed, help):
    return knob(allowed[0], f"{' | '.join(allowed)}: {help}", allowed.__contains__, f"one of {', '.join(allowed)}")

def schedule(value, help, good_value, limits, end=math.nextafter(1, 0)):
    def good(pairs):
        starts = [start for start, value in pairs if 0 <= start <= end and good_value(value)]
        return len(starts) == len(pairs) < 65 and starts == sorted({0, *starts})
    return knob(((0.0, value),), f"schedule: {help}", good, "a schedule is 1 to 64 (fraction, value) pairs, fractions "
                f"from 0 rising below 1, such as ((0.0, A), (0.5, B)); values are {limits}", schedule=True)

within = lambda low, high: (lambda value: low <= value <= high, f"must be {low:,} to {high:,}")
positive = (lambda value: 0 < value <= 1e30, "must be positive, at most 1e30")
not_negative = (lambda value: 0 <= value <= 1e30, "must not be negative, nor above 1e30; 0 switches it off")
often = within(1, 999_999)
fraction = (lambda value: 0 <= value <= 1, "is a fraction, from 0 to 1")
counts = (lambda value: type(value) is int and 0 < value <= 65536, "positive integers, at most 65536")
pairs = (lambda it: type(it) is tuple and len(it) == 2 and all(map(counts[0], it)), "pairs of positive integers")
orders = (lambda ns: all(type(n) is int and 1 < n < 33 for n in ns) and len({*ns}) == len(ns), "distinct, from 2 to 32")
weights = (lambda w: tuple(w[:16]) == w and w[0] > 0 <= min(w) <= max(w) < 1e9, "tuples of weights, the first above 0")

@dataclasses.dataclass(frozen=True)
class Config:
    """One run, resolved. Schedules are (fraction of the run, value) pairs; on the command line one value will do."""
    # --- data
    track: str = knob("nano", "name of the track these values belong to")
    data: str = knob("data/python", "corpus folder with *_train_*.bin, *_val_*.bin and manifest.json")
    tokenizer: str = choice("bytes", "gpt2", help="what the token ids mean")
    epochs: int = knob(1, "passes over the training shards that a run may take", *often)
    # --- batch
    steps: int = knob(142, "optimizer steps, the length of every schedule", *often)
    micro_batch_tokens: int = knob(1024, "tokens of a micro-batch, which one rank works out", *within(1, 2**24))
    micro_batches: tuple = schedule(4, "micro-batches of a step, which ranks share out", *counts)
    document_cap: tuple = schedule(512, "longest piece of a document that attention sees at once", *counts)
    # --- model
    model_dim: int = knob(128, "width of the residual stream", *within(GATE_DIM, 65536))
    num_layers: int = knob(1, "transformer blocks", *within(1, 1024))
    head_dim: int = knob(64, "width of an attention head", lambda dim: dim > 0 and dim % 4 == 0, "a multiple of 4")
    mlp_dim: int = knob(256, "hidden width of the ReLU^2 MLP", *within(1, 2**20))
    windows: tuple = schedule((32, 64), "(short, long) attention windows; at 1: the final validation's", *pairs, end=1)
    long_layers: tuple = knob((0,), "layers that attend through the long window")
    value_embedding_layers: tuple = knob((0,), "layers whose values receive a gated token embedding")
    logit_cap: float = knob(15.0, "tanh squashes logits into (-cap, cap)", lambda cap: 0 < cap <= 40, "above 0 to 40")
    ngram_orders: tuple = knob((2, 3, 4, 6), "orders of hashed n-grams; () for none", *orders)
    ngram_rows: int = knob(2**19, "rows of the table, for all columns", lambda rows: 0 < rows < 2**31, "1 to 2^31 - 1")
    copy_orders: tuple = knob((2, 3, 4, 6, 9, 14, 20, 32), "orders of copies from the document; () for none", *orders)
    copy_places: int = knob(2, "places to copy from at each order, the latest ones", *within(1, 64))
    copy_reach: int = knob(65536, "tokens that copies look back", *within(0, 10**9))
    index_orders: tuple = knob((4, 6, 9, 13, 20), "orders of the text index; () for none", *orders)
    index_bits: int = knob(24, "slots of the index for an order: 2 to this", lambda bits: 0 < bits < 32, "1 to 31")
    index_share: float = knob(0.97, "share of the first training shard that is indexed, not trained on", *fraction)
    # --- optimizer; see RULES for what applies to which parameter
    matrix_update: str = knob("muon", "rule of the hidden matrices, a row of MATRIX_RULES")
    matrix_lr: float = knob(0.025, "rate of hidden matrices; a step's RMS is this / sqrt(columns) at most", *positive)
    matrix_decay: float = knob(0.02, "cautious weight decay of hidden matrices, per unit of rate", *not_negative)
    basis_every: int = knob(10, "soap rules: each matrix gets new eigenbases every k-th step, staggered", *often)
    one_sided_above: int = knob(256, "soap rules: a matrix side larger than this gets no eigenbasis", *within(0, 10**9))
    momentum: tuple = knob((0.85, 0.95), "Muon's momentum: first, then; rising over 0.1 of the run, falling over 0.0",
                           lambda m: len(m) in (2, 4) and 0 <= min(m) <= max(m) < 1, "two or four values in [0, 1)")
    adam_lr: float = knob(0.015, "learning rate of embeddings, head and scalars under Adam", *positive)
    adam_every: int = knob(1, "Adam parameters step every k-th step, on the mean gradient since the last", *often)
    grad_comms: str = choice("float32", "bfloat16", help="what gradients of embeddings and matrices travel as")
    ngram_lr: float = knob(0.1, "rate of the n-gram table (row-wise Adagrad); 0: it is frozen", *not_negative)
    ngram_floor: float = knob(0.2, "gradient RMS of one token below which a table row's steps shrink", *positive)
    ngram_decay: float = knob(0.01, "weight decay of the n-gram table, per unit of learning rate", *not_negative)
    ngram_comms: str = choice("replicated", "sharded", help="a rank holds the whole n-gram table, or its share")
    ngram_host: bool = knob(False, "keep a sharded table in host memory instead of the device's")
    lr_stages: tuple = schedule(1.0, "factor of all learning rates, ahead of the cooldown", *positive)
    cooldown: float = knob(0.45, "last fraction of the run over which learning rates fall linearly", *fraction)
    final_lr: float = knob(0.1, "learning-rate multiplier at the end of the cooldown", *fraction)
    mtp_weights: tuple = schedule((1.0,), "loss weights of the next, second-next, ... token", *weights)
    softmax_rows: int = knob(0, "vocabulary rows of training's softmax: a micro-batch's targets, and others at even "
                             "distances that stand for the rest; 0: the whole vocabulary", *within(0, 10**9))
    untie_at: float = knob(0.0, "fraction of the run at which head and embedding part; 0: never tied", *fraction)
    # --- evaluation and bookkeeping
    val_tokens: int = knob(1_048_576, "tokens of the validation split that are scored", *within(1, 10**9))
    val_sha256: str = knob("b966f400d6117f6907939cab7d973eba68b35e02d73334687b9e7074ac88eb2c",
                           "sha256 of those tokens and the next (uint16); empty: not compared")
    val_batch_tokens: int = knob(0, "validation tokens of one forward pass; 0: micro_batch_tokens", *within(0, 2**24))
    val_every: int = knob(0, "validate every so many steps (untimed); 0: only at the end", *within(0, 10**9))
    target_loss: float = knob(0.69315, "the track's target validation loss, in nats per token; 0: none", *not_negative)
    log_every: int = knob(20, "log the training loss every so many steps", *often)
    save_every: int = knob(0, "keep a checkpoint every so many steps; 0: only the final one", *within(0, 10**9))
    keep: int = knob(2, "of the checkpoints on the way, so many are kept, the newest", *often)
    run_id: str = knob("", "name of the folder under logs/; empty: drawn from date and time", lambda text: re.fullmatch(
        r"(\w[\w.+=@-]{0,99})?", text, re.ASCII), "at most 100 letters, digits, _ . + = @ -, the first no sign")
    resume: str = knob("", "run id or checkpoint file to continue; auto: continue --run-id, or start it")
    run_of: str = knob("", "BATCH:COUNTER/RUNS:START, the run's place in a record", lambda text: re.fullmatch(
        r"(\d{1,9}:\d{1,9}/\d{1,9}:\d{1,9})?", text), "must read like 1:3/8:1; let `python -m records run` set it")
    # --- machine
    seed: int = knob(-1, "seed of weights and data order; -1: drawn", lambda n: -1 <= n < 2**63, "-1, or 0 to 2^63 - 1")
    device: str = choice("auto", "cpu", "cuda", help="where the run computes")
    dtype: str = choice("bfloat16", "float32", help="matrices and activations; reductions are float32")
    attention: str = choice("auto", "sdpa", "varlen", help="back end of attention")
    float8: str = choice("off", "on", "emulated", help="forward products of head and MLP in 8 bits, on Hopper GPUs")
    compile: bool = knob(True, "compile the model with torch.compile where a compiler is found")
    pass_tokens: int = knob(0, "tokens of a pass; 0: those of a micro-batch, or what memory allows", *within(0, 2**24))
    workers: int = knob(0, "threads of a process that take micro-batches on a CPU; 0: one a core", *within(0, 1024))
    def __post_init__(self):  # check each field alone, then those that depend on each other; raises ConfigError
        def demand(good, name, limits):
            refuse(not good, f"{name}={getattr(self, name)}: {limits}")
        for field in dataclasses.fields(self):
            good, value, kind = False, getattr(self, field.name), type(field.default)
            with contextlib.suppress(TypeError, ValueError, IndexError):  # a tuple of the wrong things
                good = type(value) in (kind, int if kind is float else kind) and field.metadata["good"](value)
            demand(good and str(value).isprintable(), field.name, field.metadata["limits"])
        length = self.micro_batch_tokens
        blocks = [(window, min(window, ATTENTION_BLOCK)) for _, pair in self.windows for window in pair]
        demand(all(window % block == length % block == self.pass_tokens % block == 0 for window, block in blocks),
               "windows", f"a window is at most {ATTENTION_BLOCK} or a multiple, and its block must divide "
               f"micro_batch_tokens={length} and pass_tokens={self.pass_tokens}")
        demand(not self.pass_tokens or self.longest_segment <= self.pass_tokens <= length and not self.softmax_rows,
               "pass_tokens", f"a segment's {self.longest_segment} to a micro-batch's {length}, without softmax_rows")
        demand(self.model_dim % self.head_dim == 0, "head_dim", f"must divide model_dim={self.model_dim}")
        for name in ("long_layers", "value_embedding_layers"):
            demand(all(type(layer) is int and 0 <= layer < self.num_layers for layer in getattr(self, name)),
                   name, f"layers are 0 to {self.num_layers - 1}")
        demand(self.ngram_lr * self.ngram_decay < 1, "ngram_decay",
               f"times ngram_lr={self.ngram_lr} must be below 1, or a step would turn the rows' signs")
        demand(not self.ngram_host or self.ngram_comms == "sharded", "ngram_host",
               f"needs --ngram-comms sharded (it is {self.ngram_comms}): replicas stay on the device")
        demand(self.softmax_rows <= self.vocab_size, "softmax_rows", f"at most the vocabulary, {self.vocab_size}")
        demand(self.resume != "auto" or self.run_id, "resume", "goes on with the run of --run-id; name one")
        demand(self.save_every % self.adam_every == 0, "save_every",
               f"must be a multiple of adam_every={self.adam_every}, for gradients that wait are not saved")
        demand(self.val_length % length == 0, "val_batch_tokens", f"must be a multiple of micro_batch_tokens={length}")
        best = max(1, round(self.val_tokens / self.val_length)) * self.val_length
        demand(self.val_tokens == best, "val_tokens", f"a pass (val_batch_tokens) is {self.val_length}; nearest {best}")
    eot_token = property(lambda self: EOT_TOKEN[self.tokenizer])
    val_length = property(lambda self: self.val_batch_tokens or self.micro_batch_tokens)
    pass_length = property(lambda self: self.pass_tokens or self.micro_batch_tokens)
    longest_segment = property(lambda self: min(max(cap for _, cap in self.document_cap), self.micro_batch_tokens))
    columns = property(lambda self: len(self.ngram_orders + self.copy_orders * self.copy_places + self.index_orders))
    vocab_size = property(lambda self: VOCAB_SIZE[self.tokenizer])

# Numbers are the field's, or were tuned; records/NOTES.md has the source of each. None of fineweb's was tried on a GPU.
TRACKS = {
    "nano": Config(),
    "fineweb": Config(
        track="fineweb", data="data/fineweb10B", tokenizer="gpt2", steps=1600, micro_batch_tokens=16384,
        micro_batches=((0.0, 8), (1 / 3, 16), (0.667, 24)), document_cap=((0.0, 896), (1 / 3, 2048)), model_dim=768,
        num_layers=12, head_dim=128, mlp_dim=3072, long_layers=(3, 7, 11), value_embedding_layers=(1, 2, 10, 11),
        windows=((0.0, (128, 384)), (1 / 3, (384, 896)), (0.667, (640, 1408)), (0.99, (768, 1664)), (1.0, (768, 2560))),
        ngram_orders=(2, 3), ngram_rows=5 * 50304, ngram_comms="sharded", copy_orders=(2, 3, 5, 8), copy_places=1,
        copy_reach=2048, index_orders=(), matrix_lr=0.023, matrix_decay=0.03, momentum=(0.85, 0.95, 0.19, 0.03),
        one_sided_above=1024, adam_lr=0.008, adam_every=2, ngram_lr=0.05, ngram_decay=0.0, cooldown=0.6, final_lr=0.15,
        lr_stages=((0.0, 1.0), (1 / 3, 1.52), (0.667, 1.73)), val_tokens=10_485_760, val_batch_tokens=65536,
        untie_at=0.667, mtp_weights=((0.0, (1.0, 0.5, 0.25)), (1 / 3, (1.0, 0.5)), (0.667, (1.0,))), val_every=250,
        val_sha256="", target_loss=3.28),
}

# Fields that say where and as which run it is watched, not what it computes: with such overrides it may be a record.
NEUTRAL_FIELDS = {*"seed device pass_tokens workers log_every save_every keep run_id resume run_of".split()}

# ----- schedules: pure functions of the step
def at_step(schedule, step, config):  # the value of (fraction, value) pairs that is in force at the step
    return [value for start, value in schedule if start * config.steps <= step][-1]

def training_tokens(config):  # of the whole schedule
    edges = [math.ceil(start * config.steps) for start, _ in config.micro_batches] + [config.steps]
    return config.micro_batch_tokens * sum(n * (b - a) for (_, n), a, b in zip(config.micro_batches, edges, edges[1:]))

def lr_multiplier(config, step):  # the stage's factor, then a linear fall over the last `cooldown`, to `final_lr`
    left = (config.steps - step) / max(1.0, config.cooldown * config.steps)
    return config.final_lr + (at_step(config.lr_stages, step, config) - config.final_lr) * min(1.0, left)

def momentum_at(config, step):
    low, high, rise, fall = (*config.momentum, 0.1, 0.0)[:4]
    ramps = step / max(1.0, rise * config.steps), (config.steps - step) / max(1.0, fall * config.steps)
    return low + (high - low) * min(1.0, *ramps)

def untie_step(config):  # the step, of a cycle of Adam's the first, at whose start head and embedding part; 0: not tied
    return -(-round(config.untie_at * config.steps) // config.adam_every) * config.adam_every

def is_tied_before(config, step):  # whether head and embedding are one in the model that the steps before leave behind
    return step <= untie_step(config) > 0

# What a step is compiled for. tied: are head and embedding one; cap: of segments; tokens: that losses are a mean of.
Phase = collections.namedtuple("Phase", "windows mtp_weights tied cap softmax_rows tokens")

def phase_at(config, step):
    short, long = at_step(config.windows, step, config)
    windows = tuple(long if layer in config.long_layers else short for layer in range(config.num_layers))
    return Phase(windows, at_step(config.mtp_weights, step, config), step < untie_step(config),
                 min(at_step(config.document_cap, step, config), config.micro_batch_tokens), config.softmax_rows,
                 config.micro_batch_tokens)

def windows_until(config, step):  # the long windows that have been in force, in order: what YaRN needs to know
    longs = [long for start, (_, long) in config.windows if start * config.steps <= min(step, config.steps - 1)]
    return tuple(long for long, _ in itertools.groupby(longs))

# ----- the command line
def nearest(name, names):
    return f"did you mean {close[0]}?" if (close := difflib.get_close_matches(name, names, 1, cutoff=0.0)) else ""

def parse_value(field, text):
    """The value of one Config field from the command line's text; the default's type is the field's type."""
    kind = type(field.default)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        value = ast.literal_eval(text) if kind is tuple else kind(text)
        if field.metadata["schedule"] and not (type(value) is tuple and value and type(value[0]) is tuple):
            value = ((0.0, value),)
        str(value)  # raises for what is too large to be quoted
        return (value,) if kind is tuple and type(value) is not tuple else value
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError):
        raise ConfigError(f"--{field.name} {text}: expected {kind.__name__}, such as {field.default}") from None

def parse_arguments(argv):
    """Split `--key value` and `--key=value` into a dict of texts with underscores; refuse anything else."""
    given, words = {}, iter(argv)
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        value = value if equals else next(words, None)
        refuse(value is None or not word.startswith("--"),
               f"{word}: arguments come as --key value, and one of the two is missing; see --help")
        given[key.replace("-", "_")] = value
    return given

def parse_fields(given, config):  # values of the fields of a Config that `given` names, from texts
    fields = {field.name: field for field in dataclasses.fields(config)}
    for key in given:
        refuse(key not in fields, f"--{key}: no such key; {nearest(key, fields)} --help lists them all")
    return {key: parse_value(fields[key], text) for key, text in given.items()}

def config_from(given):  # a track and its overrides, texts by key, as (Config, overridden fields by name)
    track = given.get("track", "nano")
    refuse(track not in TRACKS, f"--track {track}: no such track; {nearest(track, TRACKS)} Tracks: {', '.join(TRACKS)}")
    base, values = TRACKS[track], parse_fields(given, TRACKS[track])
    overrides = {key: value for key, value in values.items() if value != getattr(base, key)}
    if overrides.keys() & {"data", "tokenizer", "val_tokens"}:  # other tokens than those the track's hash is of
        values = {"val_sha256": "", **values}
    return dataclasses.replace(base, **values), overrides

# 2. Runtime and log =========================================================================================
class Runtime:
    """This process among its peers: rank, world size, device, and the collectives, which are asynchronous and return
    work for `wait`. Without torchrun's environment variables the world size is 1, and each returns its argument and no
    work. `ledger` holds what this rank handed to the network: [bytes, messages] by (collective, name)."""
    def __init__(self, device="auto", workers=1):
        self.rank, self.local_rank, self.world_size = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
        self.is_main, self.launcher, self.ledger, self.loader_group = self.rank == 0, os.getppid(), {}, None
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.device = choose_device(device, self.local_rank, here)
        if cuda := self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # operations of this size lose to threads that wait for each other by spinning
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.workers, self._pool = 1 if cuda else workers or max(1, cores // here), None
        if self.workers > 1:
            sys.setswitchinterval(1e-4)  # with Python's 5 ms, threads wait for the interpreter much of a step
            self._pool = ThreadPoolExecutor(self.workers, "worker", torch.set_num_threads, (torch.get_num_threads(),))
        if self.world_size > 1:
            # Naming cuda:nccl without CUDA raises; with its device NCCL connects here and now, not at its first call.
            backend, card = ("cpu:gloo,cuda:nccl", self.device) if cuda else ("gloo", None)
            # torchrun's store outlives a restart, with the addresses of the dead; nodes do not count restarts alike.
            told, several = os.environ.get, os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
            kept = told("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and told("TORCHELASTIC_USE_AGENT_STORE") == "True"
            refuse(several and kept, "--max-restarts on several nodes: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all")
            restart = "" if several else told("TORCHELASTIC_RESTART_COUNT", "")
            self.store = dist.PrefixStore(restart, next(dist.rendezvous("env://", timeout=TIMEOUT))[0])
            dist.init_process_group(backend, None, TIMEOUT, self.world_size, self.rank, self.store, device_id=card)
            self.loader_group = dist.new_group(None, TIMEOUT, "gloo")  # its thread keeps an order of its own
            dist.monitored_barrier(self.loader_group, TIMEOUT)  # to leave earlier would fail those that still connect
    def alone(self):  # this process as if it had no peers
        lone = copy.copy(self)
        lone.rank, lone.world_size, lone.is_main = 0, 1, True
        return lone
    def map(self, function, items):  # function(item) of all, in their order; on a CPU worker threads share them
        return self._pool.map(function, items) if self._pool else map(function, items)
    def share(self, count):  # the range [low, high) of `count` units that this rank owns; equal ones but for the last
        chunk = -(-count // self.world_size)
        return min(self.rank * chunk, count), min((self.rank + 1) * chunk, count)
    def _count(self, collective, name, tensor, size, messages):  # `size` bytes of a tensor are about to be sent
        assert tensor.is_contiguous(), f"{name}: a collective of a strided tensor is silently wrong"
        entry = self.ledger.setdefault((collective, name), [0, 0])
        entry[:] = entry[0] + size, entry[1] + messages
    def all_reduce(self, tensor, name):  # a sum in place; returns work
        if self.world_size == 1:
            return None
        peers = self.world_size - 1
        self._count("all_reduce", name, tensor, 2 * tensor.nbytes * peers // self.world_size, 2 * peers)
        return dist.all_reduce(tensor, async_op=True)
    def reduce_scatter(self, tensor, name):
        """Sum `tensor` (world_size * n, ...) over ranks. Returns (this rank's n of the sums, work)."""
        if self.world_size == 1:
            return tensor, None
        part, peers = tensor.new_empty(len(tensor) // self.world_size, *tensor.shape[1:]), self.world_size - 1
        self._count("reduce_scatter", name, tensor, part.nbytes * peers, peers)
        return part, dist.reduce_scatter_single(part, tensor, async_op=True)
    def all_gather(self, part, chunk, name, group=None):
        """Join the ranks' `part` (n, ...), padded to `chunk` >= n with 0. Returns ((world_size * chunk, ...), work)."""
        if self.world_size == 1:
            return part, None
        padded, whole = (part.new_zeros(chunk * ranks, *part.shape[1:]) for ranks in (1, self.world_size))
        padded[:len(part)] = part
        self._count("all_gather", name, padded, padded.nbytes * (self.world_size - 1), self.world_size - 1)
        # int16 cannot travel by gloo; its bytes can.
        return whole, dist.all_gather_single(*(x.view(torch.uint8) for x in (whole, padded)), group, async_op=True)
    def gather_shares(self, part, count, name):
        """Join the ranks' shares, in the sense of `share`, of `count` units. Returns (whole (count, ...), work)."""
        whole, work = self.all_gather(part, -(-count // self.world_size), name)
        return whole[:count], work
    def joined(self, part, count, name="checkpoint"):  # what gather_shares returns, waited for
        whole, work = self.gather_shares(part, count, name)
        wait(work)
        return whole
    def all_to_all(self, tensor, send, receive, name, group=None):
        """Send the first send[0] rows of `tensor` to rank 0, and so on. Returns (receive[r] rows of rank r, work)."""
        if self.world_size == 1:
            return tensor, None
        abroad = [count for rank, count in enumerate(send) if rank != self.rank and count]
        size = sum(abroad) * math.prod(tensor.shape[1:]) * tensor.element_size()
        self._count("all_to_all", name, tensor, size, len(abroad))
        out = tensor.new_empty(sum(receive), *tensor.shape[1:])
        return out, dist.all_to_all_single(out, tensor, receive, send, group=group, async_op=True)
    def synchronize(self):
        return self.device.type == "cuda" and torch.cuda.synchronize(self.device)
    def peak_memory_mib(self):
        """Peak memory of each rank in MiB: of the device's allocator on CUDA, of the process on a CPU."""
        peak = (torch.cuda.max_memory_allocated(self.device) // 2**20 if self.device.type == "cuda" else
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10))
        return self.joined(torch.tensor([peak]), self.world_size, "validation").tolist()
    def roll_call(self, word):
        """Leave the peers, and tell them how this rank has ended. Returns {rank: word} of those that answer in time."""
        for number in os.listdir("/dev/fd"):  # who waits for this rank shall hear of it now; the store stays
            with contextlib.suppress(OSError, IndexError), socket.socket(fileno=os.dup(int(number))) as link:
                if int(os.environ["MASTER_PORT"]) not in (link.getsockname()[1], link.getpeername()[1]):
                    link.shutdown(socket.SHUT_RDWR)
        heard, end = {}, time.monotonic() + ANSWER_SECONDS
        def ask():
            with contextlib.suppress(dist.DistError):  # the store may be gone, with its node or the launcher
                self.store.set(f"end/{self.rank}", word)
                while len(heard) < self.world_size and time.monotonic() < end:
                    time.sleep(0.05)
                    heard.update({rank: self.store.get(f"end/{rank}").decode() for rank in range(self.world_size)
                                  if self.store.check([f"end/{rank}"])})
        thread = threading.Thread(target=ask, daemon=True)  # where the network is cut no timeout of the store holds
        thread.start()
        thread.join(ANSWER_SECONDS + 1)
        return heard
    def close(self, failed=False):
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        if dist.is_initialized():
            if not failed:
                dist.barrier()
            dist.destroy_process_group()

def wait(work):
    return work is None or work.wait()

def git_state():  # (commit sha, 1 if the work tree differs from it else 0), or ("none", 0) outside a git checkout
    run = functools.partial(subprocess.run, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        sha, changes = (run(["git", *words]).stdout.strip() for words in (["rev-parse", "HEAD"], ["status", "-s"]))
        return sha, int(bool(changes))
    return "none", 0

class Log:
    """The run's log.txt, metrics.jsonl and console lines; silent on every rank but 0. On a terminal the console shows
    what a person wants to read there: a short header, a progress line, and how it ended. All else shows every line."""
    def __init__(self, runtime):
        self.is_main, self.text, self.metrics = runtime.is_main, None, None
        self.live = self.is_main and sys.stdout is not None and sys.stdout.isatty()
    def open(self, folder, code="", again=False):
        """Begin the files with the run's source, or go on with those that are there. again: these may make room."""
        if self.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            log = folder / "log.txt"
            refuse(code and log.exists() and not again, f"{folder} exists; change --run-id, or --resume {folder.name}")
            files = [open(path, "a", buffering=1, encoding="utf-8") for path in (log, folder / "metrics.jsonl")]
            fcntl.flock(files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            ended = re.search(rb"\nstatus:.*\n\Z", log.read_bytes())
            for file in files:  # a kill may have torn the last line
                file.truncate(0 if code else Path(file.name).read_bytes().rfind(b"\n") + 1)
            collections.deque(map(Path.unlink, folder.glob("*.tmp")), 0)
            self.text, self.metrics = files
            self.text.write(code.rstrip("\n") + "\n===== END OF CODE =====\n" if code else "" if ended else
                            "status:error ended without a word: killed, or its machine stopped\n")
    def show(self, text, end="\n"):
        try:
            print(text, end=end, flush=True)
        except OSError:  # the console has gone away, which ends nothing; Python would try again at its own end
            sys.stdout = open(os.devnull, "w")
    def line(self, text, on_terminal=True):
        """One event, to the file and to the console; on a terminal only where a person should see it."""
        if self.is_main:
            if on_terminal or not self.live:
                self.show(("\r\x1b[K" if self.live else "") + text)
            if self.text:
                self.text.write(text + "\n")
    def step(self, step, steps, seconds, **values):
        """One logged step, as a line and as a JSON record; losses have five decimals, times are in ms."""
        values |= {"train_time": 1000 * seconds, "step_avg": 1000 * seconds / max(1, step)}
        formats = {"lr_mul": "{:.3f}", "train_time": "{:.0f}ms", "step_avg": "{:.2f}ms"}
        words = " ".join(f"{key}:{formats.get(key, '{:.5f}').format(value)}" for key, value in values.items())
        self.line(f"step:{step}/{steps} {words}", on_terminal="val_loss" in values)
        if self.is_main:
            self.metrics.write(json.dumps({"step": step, **values}) + "\n")
    def progress(self, step, steps, loss, seconds):  # rewrites the terminal's last line
        if self.live:
            shown, left = f"training loss {loss:.3f}  " if loss else "", seconds / step * (steps - step)
            self.show(f"\r\x1b[Kstep {step}/{steps}  {shown}{seconds:.0f} s, {left:.0f} s to go", end="")

# 3. Data ====================================================================================================
SHARD_MAGIC, SHARD_VERSION, HEADER_INTS = 20240520, 1, 256
# Segments that a micro-batch has room for: FlashAttention starts blocks for each. FineWeb has at most 56 in 16,384
# tokens (modded-nanogpt, record of 2026-03-22). For more it is the next power of two, at one compilation more.
BOUNDS = 64

def open_shard(path):
    """Map a token shard (llm.c's format) as a read-only uint16 array; ConfigError where the header is wrong."""
    refuse(not Path(path).is_file(), f"{path}: no file, and a shard is one")
    path, header = Path(path), np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    held = (path.stat().st_size - 4 * HEADER_INTS) / 2
    problem = (f"{path.stat().st_size} bytes, shorter than the {4 * HEADER_INTS}-byte header" if held < 0 else
               f"magic {header[0]}, expected {SHARD_MAGIC}: not a token shard" if header[0] != SHARD_MAGIC else
               f"shard version {header[1]}, expected {SHARD_VERSION}" if header[1] != SHARD_VERSION else
               f"header says {header[2]} tokens, the file holds {held:.12g}: truncated" if header[2] != held else
               "no tokens" if not held else "")
    refuse(problem, f"{path}: {problem}; rebuild or download it again (data/text.py, data/fineweb.py)")
    return np.memmap(path, dtype="<u2", mode="r", offset=4 * HEADER_INTS)

def stamps_of(folder):  # {shard: what changes when it is written to, or another file takes its place}
    return {path: ((it := path.stat()).st_size, it.st_mtime_ns, it.st_ino) for path in Path(folder).glob("*.bin")}

def file_sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

def open_corpus(config):
    """(training shards, tokens for the index, val tokens) of the corpus; ConfigError where ids, sizes or the manifest's
    sha256 do not suit the run. The index gets the end of the first shard, whole documents, which are not trained on."""
    folder, length, needed = Path(config.data), config.micro_batch_tokens, training_tokens(config)
    manifest, share = Path(folder, "manifest.json"), config.index_share if config.index_orders else 0.0
    def whole(tokens):  # what micro-batches can take of a shard, whose last token is only a target
        return (len(tokens) - 1) // length * length
    found, known, build = {}, {}, {"python": "text.py", "cpp": "text.py --corpus cpp", "fineweb10B": "fineweb.py"}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # then it knows of no shard
        known = {it["file"]: it["sha256"] for it in json.loads(manifest.is_file() and manifest.read_bytes())["shards"]}
    for split in ("train", "val"):
        paths = sorted(folder.glob(f"*_{split}_*.bin"))
        refuse(not paths, f"{folder}: no *_{split}_*.bin shards; build them with `python data/"
               f"{build.get(folder.name, 'text.py PATH')}`, or name another folder with --data")
        found[split] = [open_shard(path) for path in paths]
        read = -share * len(found[split][0])  # training tokens, up to the end of a shard
        for path, tokens in zip(paths, found[split]):
            if split == "train" and read > needed:
                break  # the run does not get here
            read += whole(tokens)
            refuse((largest := int(tokens.max())) > config.eot_token, f"{path}: token id {largest} is beyond the "
                   f"{config.tokenizer} vocabulary (0 to {config.eot_token}); is --tokenizer right?")
            refuse(manifest.is_file() and known.get(path.name) != file_sha256(path), f"{path}: its sha256 is not the "
                   "manifest's: changed or damaged; build or download the corpus again, in an empty folder")
    first, cut = found["train"][0], round(len(found["train"][0]) * (1 - share))
    cut += int(np.argmax(np.append(first[cut:] == config.eot_token, True)))  # the start of a document, or the end
    found["train"][0], indexed = np.array(first[:cut + 1]), np.array(first[cut:])  # in memory, whatever befalls it
    available = sum(map(whole, found["train"])) * config.epochs
    refuse(needed > available, f"{folder}: the schedule takes {needed:,} training tokens, shards hold {available:,} in "
           f"{config.epochs} epoch(s) beside the index; lower --steps or --index-share, raise --epochs, or add shards")
    val = np.concatenate([tokens[:config.val_tokens + 1] for tokens in found["val"]])[:config.val_tokens + 1]
    refuse(len(val) <= config.val_tokens, f"{folder}: val_tokens={config.val_tokens:,}, but the validation split holds "
           f"{len(val):,}; --val-tokens at most {whole(val)}")
    return found["train"], indexed, val

def validation_hash(config, val):
    return hashlib.sha256(np.ascontiguousarray(val[:config.val_tokens + 1]).tobytes()).hexdigest()

@dataclasses.dataclass
class MicroBatch:
    """One forward pass: a micro-batch or a window of it. T tokens, O columns of the table. On the model's device."""
    inputs: Tensor          # (T,) int32 token ids
    targets: Tensor         # (T,) int64 next token ids
    segment_start: Tensor   # (T,) int32: index in [0, T) at which the token's attention segment starts
    segment_bounds: Tensor  # (S+1,) int32: where segments start, then T (varlen attention's cu_seqlens); see BOUNDS
    slots: Tensor           # (T, O) int32: which of the values that NgramTable.lookup is given are the token's rows
    signs: Tensor           # (T, O) float32 of +-1, or 0 for no row
    span: slice | None = None      # of the tokens, those that count; the others count in another pass
    counted: Tensor | None = None  # (T,) float32: 1 there, else 0; None where all count

# Of a micro-batch's T tokens the places in a Text, (T,) int64; where in it their attention segments start, (T,) int32.
Placement = collections.namedtuple("Placement", "text position segment_start")
# One rank's part of a global step; the RowPlan of its rows of the n-gram table; the loader's state after it.
Batch = collections.namedtuple("Batch", "micro_batches plan state")
LOADER_START = {"shard": 0, "piece": 0, "offset": 0}  # shards opened before; piece of the shard; token of the piece

def to_device(array, device):  # copy a numpy array to the device; through pinned memory and without a sync on CUDA
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

def place_contiguous(text, low, config, length=0):  # placement of T tokens from `low` on of a Text, cut at documents
    position = np.arange(low, low + (length or config.micro_batch_tokens))
    return Placement(text, position, (text.starts[text.documents(position)] - low).clip(0).astype(np.int32))

def assemble(place, slots, signs, device):
    """Build the MicroBatch of a Placement and its n-grams' slots and signs (numpy) on the device."""
    length = len(place.position)
    starts = np.flatnonzero(place.segment_start == np.arange(length, dtype=np.int32))
    room = max(BOUNDS, 1 << (len(starts) - 1).bit_length())
    bounds = np.append(starts, np.full(room + 1 - len(starts), length)).astype(np.int32)
    tokens, position = place.text.tokens, place.position
    arrays = tokens[position].astype(np.int32), tokens[position + 1].astype(np.int64), place.segment_start, bounds
    return MicroBatch(*(to_device(array, device) for array in (*arrays, slots, signs)), slice(0, length))

def assemble_passes(place, slots, signs, config, device):
    """The MicroBatches of a Placement, of pass_length tokens each: windows that are cut where segments are, so that
    each token counts once, in one that holds all of its segment. The last one overlaps the one before."""
    length, size, low = len(place.position), min(config.pass_length, len(place.position)), 0
    edges = np.append(np.flatnonzero(place.segment_start == np.arange(length)), length)
    while low < length:
        reach, begin, counted = edges[edges <= low + size][-1], min(low, length - size), np.zeros(size, np.float32)
        high = int(reach) if reach > low else low + size  # a longer segment, which only the warm-up has
        window, span = slice(begin, begin + size), slice(low - begin, high - begin)
        part = Placement(place.text, place.position[window], (place.segment_start[window] - begin).clip(0))
        made, counted[span], low = assemble(part, slots[window], signs[window], device), 1, high
        made.span, made.counted = span, to_device(counted, device) if size < length else None
        yield made

class TrainLoader:
    """Deterministic stream of steps, assembled ahead by a thread. Documents are cut into pieces of at most the largest
    document cap; a shard's pieces are shuffled by seed and laid end to end into micro-batches, which begin with the
    rest of a piece. A smaller cap at a step splits pieces further. At a shard's end what fills none is dropped."""
    def __init__(self, config, shards, runtime, first_step=0, state=None, index=None):
        self.config, self.shards, self.runtime, self.index = config, shards, runtime, index or TextIndex(config)
        self.state, self._ahead = dict(state or LOADER_START), collections.deque()
        self._open_shard()
        length = np.append(self.piece_length[self.order], 1)[self.state["piece"]:][:1]  # none beyond the shard
        within = self.state["shard"] < config.epochs * len(shards) and (self.state["offset"] < length).any()
        refuse(not within, f"a place beyond the corpus, {self.state}; use another checkpoint")
        on_device = functools.partial(torch.cuda.set_device, runtime.device)  # the current device is each thread's own
        self._thread = ThreadPoolExecutor(1, initializer=on_device if runtime.device.type == "cuda" else None)
        self._batches = (self._next_batch(step) for step in range(first_step, config.steps))  # which an error ends
    def _open_shard(self):
        opened = self.state["shard"]
        tokens = self.shards[opened % len(self.shards)]
        if isinstance(tokens, np.memmap):  # to read a mapped file that was cut short would end the process
            tokens = np.fromfile(tokens.filename, "<u2", offset=4 * HEADER_INTS)
        self.text = Text(tokens, self.config)
        lengths = np.diff(np.append(starts := self.text.starts, len(self.text.tokens) - 1))  # the last one is a target
        cap = max(cap for _, cap in self.config.document_cap)
        pieces = -(-lengths // cap)
        number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # in its document
        self.piece_start = np.repeat(starts, pieces) + number * cap
        self.piece_length = np.minimum(np.repeat(starts + lengths, pieces) - self.piece_start, cap)
        self.order = np.random.default_rng([self.config.seed, opened]).permutation(len(self.piece_start))
    def _place_next(self, cap):  # placement of the next micro-batch, its segments at most `cap` tokens long
        length, filled = self.config.micro_batch_tokens, 0
        position, segment_start = np.empty(length, np.int64), np.empty(length, np.int32)
        while filled < length:
            if self.state["piece"] == len(self.order):
                self.state = {"shard": self.state["shard"] + 1, "piece": 0, "offset": 0}
                self._open_shard()
                filled = 0
            piece, offset = self.order[self.state["piece"]], self.state["offset"]
            low, left = self.piece_start[piece] + offset, self.piece_length[piece] - offset
            take = int(min(left, cap, length - filled))
            position[filled:filled + take], segment_start[filled:filled + take] = np.arange(low, low + take), filled
            filled += take
            done = int(take == left)
            self.state |= {"piece": self.state["piece"] + done, "offset": 0 if done else offset + take}
        return Placement(self.text, position, segment_start)
    def _next_batch(self, step):
        config, runtime = self.config, self.runtime
        cap, count = (at_step(schedule, step, config) for schedule in (config.document_cap, config.micro_batches))
        places = [self._place_next(cap) for _ in range(count)][runtime.rank::runtime.world_size]
        rows, signs = map(np.concatenate, zip(*runtime.map(lambda it: table_rows(it, config, self.index), places)))
        plan, slots = plan_rows(rows, signs, config, runtime, runtime.loader_group)
        parts = zip(places, np.split(slots, len(places)), np.split(signs, len(places)))
        distinct = max(len(np.unique(p.text.tokens[p.position + 1])) for p in places) if config.softmax_rows else 0
        refuse(distinct > config.softmax_rows, f"softmax_rows={config.softmax_rows}: a micro-batch of step {step} has "
               f"{distinct} different targets, which all take part; raise it, or 0 for the whole vocabulary")
        made = [batch for part in parts for batch in assemble_passes(*part, config, runtime.device)]
        return Batch(made, plan, dict(self.state))
    def next(self):  # the next step's Batch; raises what the thread raised
        while len(self._ahead) < 4:
            self._ahead.append(self._thread.submit(next, self._batches, None))
        return self._ahead.popleft().result()
    def close(self):
        self._thread.shutdown(cancel_futures=True)  # a thread inside torch would abort a process that ends

# 4. N-gram table ============================================================================================
# Each token reads rows of one table (table_rows): of the n-grams that end there; of the tokens that followed these
# earlier in the document, copies; of those that mostly follow them in a part of the training text, the index. The
# loader's thread plans the step (plan_rows): which rows are read, who owns them, and at which slot a row will stand
# among pulled values. The rest is NgramTable's: `pull` brings the step's rows here; `lookup` sums those of each token,
# for the model's residual stream; `accumulate` keeps the gradients of these sums; `reduce` sums them by row and sends
# them to the rows' owners; `update` is the owner's step, after which replicas `receive` the new rows, or else the next
# step's rows are pulled. No row travels to its owner, and others do once, however many tokens read them.

GRAM_BASE = 0x9E3779B97F4A7C15  # odd, and so with an inverse modulo 2^64
GRAM_INVERSE = pow(GRAM_BASE, -1, 2**64)
NO_GUESS = 2**16 - 1  # no token's id
GRAM_TOKENS = np.random.default_rng(20240520).integers(0, 2**64, size=2**16, dtype=np.uint64)  # one a token id

@functools.lru_cache(maxsize=64)
def powers(base, count):
    return np.multiply.accumulate(np.append(np.uint64(1), np.full(count - 1, base, np.uint64)))

def gram_keys(text, orders):
    """Keys of all n-grams of a text (L,), or of shorter ones where it begins, order after order: (L,) 64-bit numbers,
    equal where the tokens are. A key is the polynomial of their random numbers modulo 2^64 (Karp & Rabin 1987): by
    prefix sums, one difference and one product at any order."""
    rising, falling = (powers(base, 1 << len(text).bit_length())[:len(text)] for base in (GRAM_BASE, GRAM_INVERSE))
    sums = np.cumsum(GRAM_TOKENS.take(text) * rising)
    for n in orders:
        keys = sums.copy()
        keys[n:] -= sums[:-n]
        yield keys * falling

def stable_order(values, bits):
    """What sorts integers (n,) stably by their low bits: 16 at a time, of which numpy does a radix sort."""
    order = np.argsort(values.astype(np.uint16), kind="stable")
    for shift in range(16, bits, 16):
        order = order[np.argsort((values >> shift).astype(np.uint16)[order], kind="stable")]
    return order

def latest_matches(text, orders):
    """For each token of a text (L,) and each order, the latest earlier one at which the same n-gram ends: int32
    (L, len(orders)), -1 for none. What recurs nowhere at one order does not at a longer one."""
    found, recurs = np.full((len(text), len(orders)), -1, np.int32), np.ones(len(text), bool)
    for n, keys in zip(sorted(orders), gram_keys(text, sorted(orders))):
        place = n - 1 + np.flatnonzero(recurs[n - 1:])
        place = place[stable_order(keys[place], 48)]
        same = np.diff(keys[place]) == 0
        found[place[1:][same], orders.index(n)] = place[:-1][same]
        recurs[:] = False
        recurs[place[1:][same]] = recurs[place[:-1][same]] = True
    return found

class Text:
    """Tokens (L,), and what stands before each of them in its document; a shard may begin inside one. `starts`: of the
    documents. Copies are looked for in a long stretch of one at once and remembered: two bytes each."""
    STRETCH = 2**18
    def __init__(self, tokens, config):
        self.tokens, self.orders, self.places = tokens, config.copy_orders, config.copy_places
        self.reach, self.starts = config.copy_reach, np.union1d([0], np.flatnonzero(tokens == config.eot_token))
        self.stretch = functools.lru_cache(maxsize=2048)(self._stretch)
    def documents(self, position):
        return np.searchsorted(self.starts, position, side="right") - 1
    def keys(self, position, orders):
        """Of the n-grams that end at positions (t,), or of shorter ones where documents begin: (t, len(orders))."""
        past = position[:, None] - np.arange(max([0, *orders]))
        numbers = GRAM_TOKENS.take(self.tokens[past.clip(0)]) * powers(GRAM_INVERSE, 32)[:past.shape[1]]
        numbers[past < self.starts[self.documents(position), None]] = 0
        return numbers.cumsum(1)[:, np.array(orders, int) - 1]
    def _stretch(self, document, number):  # copies, as below, at all tokens of one stretch of a document
        low = self.starts[document] + number * self.STRETCH
        begin = max(self.starts[document], low - self.reach - max(self.orders) + 1)
        end = min([low + self.STRETCH, len(self.tokens), *self.starts[document + 1:document + 2]])
        matches = [match := latest_matches(self.tokens[begin:end], self.orders)]
        while len(matches) < self.places:  # the latest match of a match is the one before it
            matches.append(np.where(matches[-1] < 0, -1, np.take_along_axis(match, matches[-1].clip(0), 0)))
        match = np.concatenate(matches, 1)[low - begin:]
        near = (match >= 0) & (np.arange(low - begin, end - begin)[:, None] - match <= self.reach)
        return np.where(near, self.tokens[begin + 1 + match], np.uint16(NO_GUESS))
    def copies(self, position):
        """For each of positions (t,) and each order, what token followed the last n tokens at their latest place in the
        document, at most `reach` back; then at the place before that, ...: (t, places * O) uint64, else NO_GUESS."""
        document, found = self.documents(position), np.empty((len(position), self.places * len(self.orders)), np.uint64)
        number, offset = np.divmod(position - self.starts[document], self.STRETCH)
        for stretch in {*zip(document.tolist(), number.tolist())} if self.orders else ():
            at = np.flatnonzero((document == stretch[0]) & (number == stretch[1]))
            found[at] = self.stretch(*stretch)[offset[at]]
        return found

class TextIndex:
    """Which token follows an n-gram in training text. An n-gram's hash has a slot in the order's table: a token (16
    bits), a confidence (2), a tag of the n-gram (14). When that is read again the token gains confidence if it follows,
    else loses it until another takes its place: a majority vote (Boyer & Moore 1981), as among n-grams of one slot."""
    CHUNK = 2**15  # n-grams that are read at once; of equal ones the last one counts
    def __init__(self, config):
        self.orders, self.bits = config.index_orders, config.index_bits
        self.slots = torch.zeros(len(self.orders), 2**self.bits, dtype=torch.int32)
    def _find(self, column, keys):  # (The order's table, slots and tags of n-grams), by their keys
        tags = (keys >> (32 - self.bits)).astype(np.uint32) & 0xFFFC0000  # the 14 bits after those of the slot
        slots = (keys >> (64 - self.bits)).view(np.int64)  # signed numbers are numpy's faster indices
        return self.slots[column].numpy().view(np.uint32), slots, tags
    def read(self, text, runtime, *others):  # take in training text, (n,) tokens; others: calls to be made meanwhile
        def read_orders(columns):
            for low in range(0, len(text) - 1, self.CHUNK):
                begin, end = max(0, low - max(self.orders) + 1), min(low + self.CHUNK, len(text) - 1)
                for column, keys in zip(columns, gram_keys(text[begin:end], [self.orders[it] for it in columns])):
                    table, slots, tags = self._find(column, keys[low - begin:])
                    new, old = tags | text[low + 1:end + 1], table[slots]
                    confidence = old & 0x30000
                    more = new | np.minimum(confidence + 0x10000, 0x30000)
                    table[slots] = np.where(old - confidence == new, more, np.where(confidence, old - 0x10000, new))
        orders, workers = range(len(self.orders)), runtime.workers
        calls = [functools.partial(read_orders, orders[first::workers]) for first in range(workers)]
        collections.deque(runtime.map(lambda call: call(), [*calls, *others]), 0)
    def guesses(self, keys):
        """For each n-gram, by keys (t, O), a token with its confidence: (t, O) uint64, NO_GUESS for none."""
        found = np.empty_like(keys)
        for column in range(len(self.orders)):
            table, slots, tags = self._find(column, keys[:, column])
            entries = table[slots]
            found[:, column] = np.where((entries & 0xFFFC0000 == tags) & (entries != 0), entries & 0x3FFFF, NO_GUESS)
        return found

def table_rows(place, config, index):
    """Rows of the table (T, config.columns) int32 in [0, config.ngram_rows) that the tokens of a Placement read, and
    their signs, float32 of +-1, or 0 for no row. index: a TextIndex. A row is a hash, by columns in this order, of
    - n-grams: the last n tokens, or fewer where the document begins later;
    - copies: the order, and what followed the last n tokens at one of their latest places (Text.copies);
    - the index: the order, the token that it guesses, and the confidence.
    The sign is one more bit of the hash: two that share a row push it apart half of the time (count-sketch's trick).
    Nothing before the document's start or behind a position bears on its rows."""
    keys = place.text.keys(place.position, config.ngram_orders + config.index_orders)
    keys, indexed = np.split(keys, [len(config.ngram_orders)], axis=1)
    guesses = np.concatenate([place.text.copies(place.position), index.guesses(indexed)], 1)
    keys = np.concatenate([keys, guesses], 1) + GRAM_TOKENS[:config.columns]  # for orders to have rows of their own
    keys = (keys ^ keys >> 29) * GRAM_BASE
    keys ^= keys >> 32
    signs = (keys >> 40 & 1).astype(np.float32) * 2 - 1
    signs[:, len(config.ngram_orders):] *= guesses != NO_GUESS
    return ((keys & 0xFFFFFFFF) * config.ngram_rows >> 32).astype(np.int32), signs

# ----- which rows a step touches, and their routes between ranks
@dataclasses.dataclass
class RowPlan:
    """The rows that the tokens of a step read, and the routes of their values and gradients. This rank's N (token,
    order) pairs read U distinct rows. All ranks read R rows of this rank's share, V distinct ones. At world size 1
    every row is owned: `asked` and `owned` are the rows read, and there is nothing to merge."""
    token: Tensor            # (N,) int32: the tokens that read the first of the U rows, then those that read the second
    offsets: Tensor          # (U,) int32: where in `token` those of each row begin
    signs: Tensor            # (N,) float32 of +-1 or 0, in the order of `token`
    send: list               # how many of the U rows each rank owns: rows are in the order of their ids, hence of ranks
    receive: list            # how many of `asked` each rank reads
    asked: Tensor            # (R,) int64, counted from the share's start, rank after rank
    owned: Tensor            # (V,) int64, likewise, rising
    merge: tuple = ()        # positions in `asked` of owned[0], then of owned[1], ... (R,) int32; offsets (V,) int32
    updated: tuple = ()      # replicas: ids of all rows that ranks update, int64; their slots among all ranks' chunks
    chunk: int = 0           # replicas: the most rows that a rank updates

def group_equal(ids):
    """The distinct ones of integers (n,) from 0 to 2^32 - 1, rising, (u,); int32 positions (n,) of the first one's
    occurrences, then of the second's, and so on; where in these each begins, (u,) int32."""
    order = stable_order(ids, 32)
    ordered = ids[order]
    offsets = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))[:len(ids)])
    return ordered[offsets], order.astype(np.int32), offsets.astype(np.int32)

def sum_groups(values, positions, offsets, weights=None):
    """Sums (u, d) float32 of the rows of values (n, d) that `group_equal` put together, in that order: no atomics."""
    return F.embedding_bag(positions, values.float(), offsets, mode="sum", per_sample_weights=weights)

def table_is_here(config, runtime):
    """Whether lookups read the table itself; else they read values that were pulled, and slots are places in these."""
    return config.ngram_comms == "replicated" or runtime.world_size == 1 and not config.ngram_host

def plan_rows(rows, signs, config, runtime, lane=None, name="ngram_indices"):
    """Build the RowPlan of a step, together with all ranks. rows, signs: (n, O) of this rank's tokens. lane: the
    process group of the calling thread. name: for the ledger. Counts and indices travel here, on the CPU, ahead of the
    values, whose sizes both sides then know. Returns (plan, slots (n, O) int32: where lookups find each of `rows`)."""
    distinct, order, offsets = group_equal(rows.ravel())
    if len(distinct) and not 0 <= distinct[0] <= distinct[-1] < config.ngram_rows:
        raise ConfigError(f"n-gram rows {distinct[0]} to {distinct[-1]}: the hash leaves the table's range 0 to "
                          f"{config.ngram_rows - 1}; correct table_rows(), or raise --ngram-rows")
    device, home = runtime.device, torch.device("cpu") if config.ngram_host else runtime.device
    routes = {"send": [len(distinct)], "receive": [len(distinct)]}
    routes["asked"] = routes["owned"] = to_device(distinct.astype(np.int64), home)
    if runtime.world_size > 1:
        routes = plan_routes(distinct, config, runtime, home, lane, name)
    plan = RowPlan(to_device(order // max(1, rows.shape[1]), device), to_device(offsets, device),
                   to_device(signs.ravel()[order], device), **routes)
    if table_is_here(config, runtime):
        return plan, rows
    slots = np.empty(rows.size, dtype=np.int32)
    slots[order] = np.repeat(np.arange(len(distinct), dtype=np.int32), np.diff(np.append(offsets, rows.size)))
    return plan, slots.reshape(rows.shape)

def plan_routes(distinct, config, runtime, home, lane, name):
    """Tell owners which rows this rank reads, and hear which of its own are read. Returns fields of RowPlan."""
    world_size, low, each = runtime.world_size, runtime.share(config.ngram_rows)[0], [1] * runtime.world_size
    def travelled(collective, array, *words):
        out, work = collective(torch.from_numpy(array.astype(np.int32)), *words, lane)
        wait(work)
        return out.numpy()
    send = np.bincount(distinct // -(-config.ngram_rows // world_size), minlength=world_size)
    receive = travelled(runtime.all_to_all, send, each, each, name)
    asked = travelled(runtime.all_to_all, distinct, send.tolist(), receive.tolist(), name) - low
    owned, *merge = group_equal(asked)
    routes = {"send": send.tolist(), "receive": receive.tolist(), "asked": to_device(asked.astype(np.int64), home),
              "owned": to_device(owned.astype(np.int64), home), "merge": [to_device(part, home) for part in merge]}
    if config.ngram_comms == "replicated":
        chunk = int(travelled(runtime.all_gather, np.array([len(owned)]), 1, "ngram_updated").max())
        ids = travelled(runtime.all_gather, owned + low + 1, chunk, "ngram_updated")  # where a rank has fewer, 0
        slots = np.flatnonzero(ids)
        routes.update(chunk=chunk, updated=[to_device(part.astype(np.int64), home) for part in (ids[slots] - 1, slots)])
    return routes

# ----- the table, the first of four groups of parameters; chapter 6 has the others
class Group:
    """Parameters that step, travel and are saved together. Optimizer.step takes all groups that are due through:
        reduce(step)           start to sum their gradients over ranks
        update(step, lr_mul)   wait for the sums, update this rank's share, and start to send the new values
        receive(step)          take over what other ranks have sent, and begin the next sum of gradients at zero
    `tensors()` are all that a step changes on this rank, by name; `size()` counts the group's values; `full_state()` is
    what a checkpoint keeps of it, whatever the world size, and `load` its inverse."""
    every, frozen = 1, False
    def due(self, step):  # whether the group steps at this step: at every k-th, and at the run's last
        return not self.frozen and ((step + 1) % self.every == 0 or step + 1 == self.config.steps)
    def keep(self):  # a function that puts all tensors back to what they are now
        kept = [(tensor, tensor.clone()) for tensor in self.tensors().values()]
        return lambda: [tensor.copy_(before) for tensor, before in kept]

def adagrad_rows_update(table, second, rows, grads, lr, floor):
    """Row-wise Adagrad on distinct rows (u,) of the n-gram table (n, dim), in place; cost is that of these rows.
    second: (n,), the sum of each row's mean squared gradients. grads: (u, dim), sums over tokens, each of its own loss.
    floor: a gradient RMS added to the moment: a row that is new where tokens are predicted well should hardly move."""
    moment = second[rows] + grads.square().mean(1)
    second[rows] = moment
    # A third of the time on a CPU that table[rows] -= ... takes, and the same bits: no row comes twice.
    table.scatter_add_(0, rows[:, None].expand_as(grads), grads * (-lr * (moment + floor * floor).rsqrt())[:, None])

class NgramTable(Group):
    """The table: this rank's rows, their optimizer state, and all that travels of them. The rank that owns a row
    updates it, on summed gradients. Config.ngram_comms says who holds it: all ranks (replicated), which get the new
    row; or the owner alone (sharded; in host memory with ngram_host), from whom readers pull it before a step. At world
    size 1 both are the plain table; benchmarks/README.md has the bytes. Weight decay acts on all rows at each update,
    at no cost: the table is `weight` times the number `scale`, which alone shrinks."""
    name, FOLD_BELOW = "ngram_table", 2.0**-20  # where scale is folded into weight, long before float32 ends
    def __init__(self, config, runtime):
        self.config, self.runtime, self.index = config, runtime, TextIndex(config)
        self.frozen = not (config.columns and config.ngram_lr)
        pinned = config.ngram_host and runtime.device.type == "cuda"
        self.home = torch.device("cpu") if pinned else runtime.device
        self.rows = config.ngram_rows if config.columns else 0
        self.owned = runtime.share(self.rows)  # the rows updated here
        self.held = (0, self.rows) if config.ngram_comms == "replicated" else self.owned
        self.weight = torch.zeros(self.held[1] - self.held[0], config.model_dim, device=self.home, pin_memory=pinned)
        self.second = torch.zeros(self.owned[1] - self.owned[0], device=self.home, pin_memory=pinned)
        self.own_rows = self.weight[self.owned[0] - self.held[0]:self.owned[1] - self.held[0]]
        self.scale, self.grads = 1.0, []  # grads of the step so far: (of one micro-batch, tokens of the step)
        self.plan = self.upcoming = self.pulled = None  # this step's RowPlan, the next step's, (values, work)
    def fetch(self, plan, name):  # start bringing the rows of `plan` here. Returns (values that slots point into, work)
        if table_is_here(self.config, self.runtime):
            return self.weight, None
        return self.runtime.all_to_all(self.weight[plan.asked], plan.receive, plan.send, name)
    def pull(self, plan):  # start bringing the rows of a training step here, unless they are on their way
        if plan is not self.plan:
            self.plan, self.pulled = plan, self.fetch(plan, self.name)
    def arrived(self, values, work):  # what `fetch` has brought, on the model's device
        wait(work)
        return values.to(self.runtime.device, non_blocking=True)
    def read(self, rows, signs):
        """Bring rows (n, O) here outside training, where all ranks must do so together. Returns (slots, values)."""
        if table_is_here(self.config, self.runtime):
            return rows, self.weight
        plan, slots = plan_rows(rows, signs, self.config, self.runtime, name="validation")
        return slots, self.arrived(*self.fetch(plan, "validation"))
    def lookup(self, micro_batch, values):
        """Sum of the signed rows of each token's n-grams: (T, model_dim), a leaf in the compute dtype, whose gradient
        is for `accumulate`; autograd never sees the table. values: what slots point into. None without n-grams."""
        if not self.config.columns:
            return None
        summed = F.embedding_bag(micro_batch.slots, values, mode="sum", per_sample_weights=micro_batch.signs)
        return (summed * self.scale).to(getattr(torch, self.config.dtype)).requires_grad_(not self.frozen)
    def accumulate(self, grad, tokens):
        """Keep a micro-batch's gradient (T, model_dim) of the loss that is a mean over the `tokens` of its step."""
        self.grads.append((grad, tokens))
    def reduce(self, step):
        """Sum the step's gradients by row, as those of each token's own loss, and start sending them to the owners."""
        grads = torch.cat([grad.float() * tokens for grad, tokens in self.grads])
        sums = sum_groups(grads, self.plan.token, self.plan.offsets, self.plan.signs).to(self.home)
        self.sums, self.work = self.runtime.all_to_all(sums, self.plan.send, self.plan.receive, self.name)
        self.grads = []
    def update(self, step, lr_mul):
        plan, lr = self.plan, self.config.ngram_lr * lr_mul
        wait(self.work)
        sums = sum_groups(self.sums, *plan.merge) if plan.merge else self.sums
        self.scale *= 1 - lr * self.config.ngram_decay
        if self.scale < self.FOLD_BELOW:  # at the same update on every rank
            self.weight *= self.scale
            self.scale = 1.0
        adagrad_rows_update(self.own_rows, self.second, plan.owned, sums, lr / self.scale, self.config.ngram_floor)
        if plan.updated:
            self.gathered, self.work = self.runtime.all_gather(self.own_rows[plan.owned], plan.chunk, self.name)
        elif self.upcoming and not table_is_here(self.config, self.runtime):
            self.pull(self.upcoming)
    def receive(self, step):
        if self.plan.updated:
            rows, slots = self.plan.updated
            wait(self.work)
            self.weight[rows] = self.gathered[slots]
    def size(self):
        return self.rows * self.config.model_dim
    def tensors(self):
        return {"weight": self.weight, "second": self.second, "scale": torch.tensor([self.scale], dtype=torch.float64),
                "index": self.index.slots}
    def keep(self):  # As Group.keep, but of the rows of the step at hand alone: the table is too large for a copy
        owned, scale = self.plan.owned, self.scale
        rows = self.plan.updated[0] if self.plan.updated else owned
        soon = scale * (1 - self.config.ngram_lr * self.config.ngram_decay) ** 64  # after more updates than will follow
        rows = slice(None) if soon < self.FOLD_BELOW else rows  # folding changes every row
        weight, second = self.weight[rows].clone(), self.second[owned]
        def put_back():
            self.weight[rows], self.second[owned], self.scale, self.grads, self.plan = weight, second, scale, [], None
        return put_back
    def full_state(self):
        """{"weight", "second": the whole tables on the host, "scale", "index"} on all ranks, which all call it."""
        host = "meta" if self.weight.is_meta else "cpu"
        weight, second = self.weight.to(host), self.runtime.joined(self.second.to(host), self.rows)
        weight = weight if self.config.ngram_comms == "replicated" else self.runtime.joined(weight, self.rows)
        return {"weight": weight, "second": second, "scale": self.scale, "index": self.index.slots}
    def load(self, full):
        self.weight.copy_(full["weight"][slice(*self.held)])
        self.second.copy_(full["second"][slice(*self.owned)])
        self.scale = full["scale"]
        self.index.slots.copy_(full["index"])

# 5. Model ===================================================================================================
def rotary_tables(length, head_dim, windows_so_far, device, dtype):
    """(cos, sin, scale): rotary position embedding, (length, 1, head_dim // 2) each, and the softmax scale for unit-RMS
    queries and keys. Half of the channel pairs rotate, at 1 .. 1/1024 radians a token. As the long window grows YaRN
    (Peng et al. 2023) slows the pairs that turn less than once in the old one by old/new, leaves those that turn over
    32 times, and sharpens the scale by 0.2 ln(new/old) + 1. In float64, for positions of a long batch to be exact."""
    pairs, scale = head_dim // 2, 1.35 / math.sqrt(head_dim)
    speed = F.pad((1 / 1024) ** torch.linspace(0, 1, pairs // 2, dtype=torch.float64), (0, pairs - pairs // 2))
    for old, new in zip(windows_so_far, windows_so_far[1:]):
        keep = ((old * speed / (2 * math.pi) - 1) / 31).clamp(0, 1)
        speed, scale = speed * (old / new + keep * (1 - old / new)), scale * (0.2 * math.log(new / old) + 1)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * speed
    return *(table[:, None].to(device=device, dtype=dtype) for table in (angle.cos(), angle.sin())), scale

def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)

# What the model needs beside tokens and weights: a Phase, what rotary_tables returns, {window: blocked_bias} for sdpa.
Context = collections.namedtuple("Context", "phase rotary biases")

# Calls a function now and again in the backward pass, so that what it makes from token ids is not kept in between.
recomputed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

class GPT(nn.Module):
    """Decoder-only transformer over packed documents. Two banks hold its matrices, for batched updates: `attention`
    (4 * layers, model_dim, model_dim) q, k, v, o of each layer, `mlp` (2 * layers, mlp_dim, model_dim) up and downᵀ."""
    def __init__(self, config, attention, drawn=True, float8="off"):
        super().__init__()
        self.config, self.attend, self.float8 = config, ATTENTION[attention], float8
        dim, layers, vocab = config.model_dim, config.num_layers, config.vocab_size
        dtype, generator = getattr(torch, config.dtype), torch.Generator().manual_seed(config.seed)
        def matrix(*shape, std):
            values = torch.randn(*shape, generator=generator) * std if std and drawn else torch.zeros(*shape)
            return nn.Parameter(values.to(dtype))
        self.embed = matrix(vocab, dim, std=0.7)
        self.head = matrix(vocab, dim, std=0.005)
        if untie_step(config):
            self.embed.data.copy_(self.head.data)  # tied at first: one table, started at the head's scale
        self.attention = matrix(4 * layers, dim, dim, std=0.6 / math.sqrt(dim))
        self.mlp = matrix(2 * layers, config.mlp_dim, dim, std=0.6 / math.sqrt(dim))
        self.attention.data[3::4], self.mlp.data[1::2] = 0, 0  # output projections: every block starts as the identity
        values = len(config.value_embedding_layers)
        self.value_embed = matrix(values, vocab, dim, std=0.01)
        self.value_gate = matrix(values, dim // config.head_dim, GATE_DIM, std=0)
        self.smear_gate = matrix(1, GATE_DIM, std=0)
        self.smear_scale = nn.Parameter(torch.zeros(1))
        self.residual_scale = nn.Parameter(torch.ones(layers))
        self.embed_scale = nn.Parameter(torch.zeros(layers))
        if config.columns:
            self.ngram_gate = matrix(layers + 1, GATE_DIM, std=0)  # before each layer and before the head
        self.skip_scale = nn.Parameter(torch.full((layers // 2,), 0.1))
    @staticmethod
    def gate(x, weight):  # learned gates in (0, 2), 1 at the start: (T, n) from the first channels of x (T, model_dim)
        first = x[:, None, :GATE_DIM].contiguous()  # a view, kept for the backward pass, would keep all of x
        return 2 * torch.sigmoid((first.float() * weight).sum(-1).to(x.dtype))
    def hidden(self, micro_batch, ngram, context):
        """Final hidden states (T, model_dim), normalised. ngram: (T, model_dim), from NgramTable.lookup, or None."""
        config, phase, (cos, sin, scale) = self.config, context.phase, context.rotary
        length, layers, head_dim = micro_batch.inputs.size(0), config.num_layers, config.head_dim
        def smeared(table):  # each token's embedding with a gated share of the previous one's, within a segment
            x = F.embedding(micro_batch.inputs, table)
            first = micro_batch.segment_start == torch.arange(length, device=x.device, dtype=torch.int32)
            smear = torch.sigmoid(F.linear(x[:, :GATE_DIM], self.smear_gate)).masked_fill(first[:, None], 0)
            return x + self.smear_scale[0] * smear * F.pad(x, (0, 0, 1, -1))
        def with_rows(v, gate, table):
            return v + gate[..., None] * F.embedding(micro_batch.inputs, table).view_as(v)
        embedded = x = norm(recomputed(smeared, self.head if phase.tied else self.embed))
        skips = []
        for layer in range(layers):
            if layer >= layers - len(self.skip_scale):
                x = x + self.skip_scale[layer - layers] * skips.pop()
            x = self.residual_scale[layer] * x + self.embed_scale[layer] * embedded
            if ngram is not None:
                x = x + self.gate(x, self.ngram_gate[layer:layer + 1]) * ngram
            q, k, v = F.linear(norm(x), self.attention[4 * layer:4 * layer + 3].flatten(0, 1)).view(
                length, 3, -1, head_dim).unbind(1)
            q, k, v = norm(q, cos, sin), norm(k, cos, sin), v.contiguous()  # for v as a view would keep all three
            if layer in config.value_embedding_layers:
                which = config.value_embedding_layers.index(layer)
                v = recomputed(with_rows, v, self.gate(x, self.value_gate[which]), self.value_embed[which])
            window = phase.windows[layer]
            y = self.attend(q, k, v, micro_batch, phase.cap, context.biases.get(window), window, scale)
            x = x + F.linear(y.flatten(1), self.attention[4 * layer + 3])
            x = x + ReluSquareMLP.apply(norm(x), self.mlp[2 * layer], self.mlp[2 * layer + 1], self.float8)
            if layer < len(self.skip_scale):
                skips.append(x)
        if ngram is not None:
            x = x + self.gate(x, self.ngram_gate[layers:]) * ngram
        return norm(x)
    def logits(self, hidden):  # soft-capped logits (n, vocab_size), float32, of hidden states (n, model_dim)
        return self.config.logit_cap * torch.tanh(F.linear(hidden, self.head).float() / self.config.logit_cap)
    def forward(self, micro_batch, ngram, context):
        """Returns (training loss, a mean with multi-token weights; the next token's losses (T,); hidden states)."""
        hidden, phase = self.hidden(micro_batch, ngram, context), context.phase
        loss, losses = scored(hidden, self.head, micro_batch, phase, self.config.logit_cap, self.float8)
        return loss, losses, hidden.detach()

# 6. Optimizer ===============================================================================================
class Rule(NamedTuple):
    """Which group steps a parameter, and with which numbers."""
    group: str              # small | embeddings | matrices
    lr_mul: float | tuple = 1.0  # times the group's learning rate; a tuple: of the matrices of a bank in turn
    decay_mul: float = 0.0  # times Config.matrix_decay for matrices, else the decay itself
    betas: tuple = (0.9, 0.95)  # muon and soap_muon read the second only; their momentum follows a schedule

RULES = {
    **dict.fromkeys(("attention", "mlp"), Rule("matrices", decay_mul=1.0)),
    **dict.fromkeys(("embed", "value_embed"), Rule("embeddings", lr_mul=3.0)),
    "head": Rule("embeddings", lr_mul=0.5),
    **dict.fromkeys(("value_gate", "smear_gate", "smear_scale", "residual_scale", "embed_scale", "ngram_gate",
                     "skip_scale"), Rule("small")),
}

# modded-nanogpt's, whose Adam decays by the rate squared, where update and weight agree in sign: here half of the mean.
TRACK_RULES = {"fineweb": {
    "attention": Rule("matrices", 1.0, 1.0, (0.9, 0.9)), "mlp": Rule("matrices", (1.0, 2.0), 1.0, (0.9, 0.9)),
    **dict.fromkeys(("embed", "head"), Rule("embeddings", 1.0, 0.003, (0.5, 0.95))),
    "value_embed": Rule("embeddings", 75.0, 0.008, (0.75, 0.95)), "residual_scale": Rule("small", 5.0),
    **dict.fromkeys(("embed_scale", "skip_scale", "smear_scale"), Rule("small", 5.0, 0.0, (0.9, 0.99))),
    **dict.fromkeys(("value_gate", "ngram_gate"), Rule("small", 1.0, 0.0, (0.9, 0.99))),
    "smear_gate": Rule("small", 0.01, 0.0, (0.9, 0.99)),
}}

# The numbers of one update: step, counted from 1; rate; decay, per unit of rate; momentum; betas; dtype of products.
Hyper = collections.namedtuple("Hyper", "step lr decay momentum betas dtype")

def join_mantissa(high, low):
    """The float32 tensor that split_mantissa has taken apart into `high` (bfloat16) and `low` (int16)."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)

def split_mantissa(value, high, low):
    """Write float32 `value` as the nearest bfloat16 and the bits that are left: so bf16 weights take exact updates."""
    bits = value.view(torch.int32)
    nearest = (bits + 0x8000 >> 16).to(torch.int16).view(torch.bfloat16)
    high.copy_(torch.where(value.isnan(), value.to(torch.bfloat16), nearest))  # the sum wraps for some NaNs
    low.copy_(bits.to(torch.int16))  # the low 16 bits; as a signed number, what rounding has added or taken

def adam_update(weight, grad, state, hyper):
    """Adam (Kingma & Ba 2015) with decoupled weight decay, in place; float32 tensors of one shape."""
    betas, first, second = hyper.betas, state["first"], state["second"]
    first.lerp_(grad, 1 - betas[0])
    second.lerp_(grad.square(), 1 - betas[1])
    update = (first / (1 - betas[0] ** hyper.step)) / ((second / (1 - betas[1] ** hyper.step)).sqrt() + 1e-10)
    weight.mul_(1 - hyper.lr * hyper.decay).sub_(update * hyper.lr)

# Polar Express (Amsel et al. 2025): the composed odd polynomials that bring singular values in [1e-3, 1] closest to 1
# in five steps; coefficients by the paper's method, with a cushion of 0.02 and a safety factor of 2 % (theirs is 1 %).
POLAR_EXPRESS = ((8.156554524902461, -22.48329292557795, 15.878769915207462),
                 (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                 (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                 (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                 (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))

def polar_express(matrices, dtype):
    """Approximate polar factor of a batch (k, m, n): singular values near 1; 0 stays 0. Products in `dtype`."""
    x = matrices.to(dtype)
    if tall := x.size(-2) > x.size(-1):
        x = x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-12).to(dtype)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()

# ----- update rules of the hidden matrices; MATRIX_RULES, below, has a row for each
# A rule changes weight and state {key: tensor} in place: weight and grad (k, m, n) float32, a rank's part of a bank.

def cautious_step(weight, update, lr, decay):
    """Step against `update` with weight decay only where both agree in sign, in place; tensors of one shape."""
    weight.sub_(lr * (update + decay * weight * (update * weight >= 0)))

def orthogonal_step(weight, direction, state, hyper):
    """Muon's step along `direction` (k, m, n): orthogonalisation, NorMuon's scaling (Li et al. 2025: divide each row,
    or column of a wide matrix, by its running RMS, at unchanged Frobenius norm), cautious decay. The rate grows with
    sqrt(m / n) of tall matrices: whatever the shape, the RMS of a step is lr / sqrt(n)."""
    update, second = polar_express(direction, hyper.dtype), state["second"]
    rows, columns = update.shape[-2:]
    before = update.norm(dim=(-2, -1), keepdim=True)
    second.lerp_(update.square().mean(-1 if rows >= columns else -2, keepdim=True), 1 - hyper.betas[1])
    update = update * second.clamp_min(1e-10).rsqrt()
    update = update * (before / update.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10))
    cautious_step(weight, update, hyper.lr * max(1.0, rows / columns) ** 0.5, hyper.decay)

def muon_update(weight, grad, state, hyper):  # Muon (Jordan et al. 2024): Nesterov momentum, then orthogonal_step
    state["momentum"].lerp_(grad, 1 - hyper.momentum)
    orthogonal_step(weight, grad.lerp(state["momentum"], hyper.momentum), state, hyper)

# SOAP (Vyas et al. 2024) and its relatives keep, for the rows and for the columns of a matrix G, a Kronecker factor
# (the running mean of G Gᵀ, of Gᵀ G) and a basis that follows the factor's eigenvectors. Momentum stays in the
# parameters' own basis; only the second moment lives in the eigenbasis, and it is permuted with it.
FACTOR_BETA = 0.9  # of the factors, and of the second moment of soap_muon
KL_FLOOR = 1e-3    # eigenvalues below this share of their mean are taken to be it
EIGH_STEPS = 3     # at first all bases are exact: behind zero-initialised projections, gradients come two steps later
DAMPING = 3e-6  # added to a factor before Cholesky, as a share of its largest eigenvalue
HOUSEHOLDER_STEPS = 25  # then factors are conditioned well enough for Cholesky; on the nano track they always were

# The rows (axis -2) or columns (-1) of a bank of k matrices: factor (k, s, s), symmetric, zero until the first
# gradient; basis (k, s, s), orthonormal columns, the largest eigenvalue's first.
Side = collections.namedtuple("Side", "axis factor basis")

def sides_of(state):
    return [Side(axis, state[f"{key}_factor"], state[f"{key}_basis"])
            for key, axis in (("row", -2), ("column", -1)) if f"{key}_factor" in state]

def change_basis(x, sides, back=False):  # matrices (k, m, n) from the parameters' basis to the eigenbasis, or back
    for axis, _, basis in sides:
        basis = basis if back else basis.mT
        x = basis @ x if axis == -2 else x @ basis.mT
    return x

def known_bases(state):  # (k, 1, 1): 1.0 where the matrix has had a gradient that its bases could follow, else 0.0
    had = [(side.factor.diagonal(dim1=-2, dim2=-1).sum(-1) > 0)[:, None, None] for side in sides_of(state)]
    return math.prod(had, start=torch.ones_like(state["moment"][:, :1, :1]))

def soap_update(weight, grad, state, hyper):
    """SOAP: Adam in the eigenbasis, then cautious decay; scaled by 1 / sqrt(n), so that a rate means what it does for
    Muon. Without bases a matrix only decays, without sides this is Adam."""
    sides, known, moment, count = sides_of(state), known_bases(state), state["moment"], state["count"]
    state["momentum"].lerp_(grad, 1 - hyper.betas[0])
    count.add_(known)
    moment.lerp_(change_basis(grad, sides).square(), (1 - hyper.betas[1]) * known)
    first = change_basis(state["momentum"], sides) / (1 - hyper.betas[0] ** hyper.step)
    second = moment / (1 - hyper.betas[1] ** count).clamp_min(1e-8)
    update = change_basis(known * first * second.clamp_min(1e-16).rsqrt(), sides, back=True)
    cautious_step(weight, update / update.size(-1) ** 0.5, hyper.lr, hyper.decay)

def soap_muon_update(weight, grad, state, hyper):
    """SOAP-Muon: Muon of a momentum that is divided, in the eigenbasis, by the root of its own second moment."""
    sides, known, moment = sides_of(state), known_bases(state), state["moment"]
    state["momentum"].lerp_(grad, 1 - hyper.momentum)
    direction = grad.lerp(state["momentum"], hyper.momentum)
    rotated = change_basis(direction, sides)
    moment.lerp_(rotated.square(), (1 - FACTOR_BETA) * known)
    whitened = change_basis(rotated * moment.clamp_min(1e-16).rsqrt(), sides, back=True)
    orthogonal_step(weight, torch.where(known > 0, whitened, direction), state, hyper)

class MatrixRule(NamedTuple):
    """An update rule, and the state that it needs: see ParameterGroup.new_state."""
    update: Callable
    keeps: tuple = ("momentum",)
    bases: bool = False  # eigenbases, which follow the gradients after each update
    kl: bool = False     # whose factors are KL-Shampoo's

ADAM = MatrixRule(adam_update, ("first", "second"))
MATRIX_RULES = {
    "muon": MatrixRule(muon_update, ("momentum", "second")),
    "soap": MatrixRule(soap_update, ("momentum", "moment", "count"), bases=True),
    "soap_muon": MatrixRule(soap_muon_update, ("momentum", "second", "moment"), bases=True),
    # The weights step before the bases follow, as in the authors' optim/kl_opt.py (github.com/yorkerlin/KL-Methods).
    "kl_soap": MatrixRule(soap_update, ("momentum", "moment", "count"), bases=True, kl=True),
    "adam": MatrixRule(soap_update, ("momentum", "moment", "count")),
}

# ----- eigenbases
def update_factors(grad, sides, kl):
    """Take gradients (k, m, n) into the factors of their sides, in place. kl: KL-Shampoo's estimate (Lin et al. 2025):
    each side's gradient is first whitened by the other side's factor, with eigenvalues over their mean: only the
    product of both factors' scales means something, and the split between the two would drift."""
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

def eigenbasis_step(factors, bases, method):
    """Bring orthonormal bases (k, s, s) closer to the eigenvectors of symmetric factors (k, s, s), both float32:
    orthonormalises factor @ basis, columns by falling Rayleigh quotient. Methods:
      eigh          the eigenvectors themselves; on CUDA the only one that waits for the device
      householder   LAPACK's QR, matrix by matrix, which is fastest on a CPU
      cholesky      batched: B = basisᵀ factor basis = RᵀR, R Rᵀ = SᵀS, then basis Rᵀ / S: an LR step (Rutishauser)
                    on the scaled factor, which squares no condition number, and two Newton-Schulz steps behind it
    Returns (bases, order (k, s) that sorted the old columns, rejected (k,)): where a factor is not finite or too close
    to singular, that matrix keeps its old basis, sorted; where it is zero too, but that is no reject."""
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
        product = product / spectrum[:, :1, None].clamp_min(1e-38) + DAMPING * old
        upper, failed = torch.linalg.cholesky_ex(old.mT @ product, upper=True)
        again, info = torch.linalg.cholesky_ex(upper @ upper.mT, upper=True)
        new, info = old @ torch.linalg.solve_triangular(again, upper.mT, upper=True, left=False), info + failed
        for _ in range(2):
            new = 1.5 * new - 0.5 * new @ (new.mT @ new)
        error = new.mT @ new - torch.eye(size, device=bases.device)
        accepted &= (info == 0) & (error.abs().amax((-2, -1)) < 1e-4)
    return torch.where(accepted[:, None, None], new, old), order, ~accepted & (spectrum != 0).any(-1)

def refresh_eigenbases(banks, method):
    """One eigenbasis_step, a batch a size, for all sides of banks' states, in place; nothing waits for the device."""
    sides = [(state, side) for state in banks for side in sides_of(state) if len(side.basis)]
    for size in {side.basis.size(-1) for _, side in sides}:
        found = [(state, side) for state, side in sides if side.basis.size(-1) == size]
        factors, bases = (torch.cat([getattr(side, key) for _, side in found]) for key in ("factor", "basis"))
        counts = [len(side.basis) for _, side in found]
        stepped = (part.split(counts) for part in eigenbasis_step(factors, bases, method))
        for (state, side), basis, order, rejected in zip(found, *stepped):
            side.basis.copy_(basis)
            index = order[:, :, None] if side.axis == -2 else order[:, None]
            state["moment"].copy_(state["moment"].gather(side.axis, index.expand_as(state["moment"])))
            state["rejects"].add_(rejected)

def refresh_method(step, device):
    """How to step the eigenbases at a step: exactly at first, then without fail, then in batches where that is fast."""
    if step < EIGH_STEPS:
        return "eigh"
    return "householder" if device.type == "cpu" or step < HOUSEHOLDER_STEPS else "cholesky"

# ----- the groups of the model's parameters
class Layout:
    """How ranks share a parameter along its first axis, as Runtime.share says: of a bank whole matrices. Each holds all
    of `param` and updates its part. Only the float32 sum of gradients is padded: collectives ask for equal parts."""
    def __init__(self, name, param, runtime, rule):
        self.name, self.param, self.count, self.rule, self.lr_mul = name, param, len(param), rule, rule.lr_mul
        (self.low, self.high), self.fresh = runtime.share(self.count), True  # fresh: the next gradient begins a sum
        if type(rule.lr_mul) is tuple:
            self.lr_mul = torch.tensor(rule.lr_mul * self.count, device=param.device)[self.low:self.high, None, None]
        self.grad = torch.zeros(self.count + -self.count % runtime.world_size, *param.shape[1:], device=param.device)
    def own(self, tensor):  # this rank's part of a tensor that has the parameter's shape
        return tensor[self.low:self.high]

def take_step(update, part, grad, waited, state, hyper):
    """An update of this rank's part of a parameter, in place. grad: the sum of so many steps' gradients."""
    mantissa, grad = state.get("mantissa"), grad.float() / waited if waited > 1 else grad.float()
    weight = part if mantissa is None else join_mantissa(part, mantissa)
    update(weight, grad, state, hyper)
    if mantissa is not None:
        split_mantissa(weight, part, mantissa)

class ParameterGroup(Group):
    """Parameters of the model under one rule, with a Layout and a state {key: tensor} each."""
    def __init__(self, name, config, params, runtime):
        self.name, self.config, self.runtime = name, config, runtime
        self.rule, self.every, self.lr, self.decay = ADAM, config.adam_every, config.adam_lr, 1.0
        if name == "matrices":
            rule = config.matrix_update
            refuse(rule not in MATRIX_RULES, f"matrix_update={rule}: must be one of {', '.join(MATRIX_RULES)}")
            self.rule, self.every, self.lr, self.decay = MATRIX_RULES[rule], 1, config.matrix_lr, config.matrix_decay
        self.take_step = compiled_updates() if runtime.device.type == "cuda" and config.compile else take_step
        self.wire = getattr(torch, config.grad_comms if runtime.world_size > 1 else "float32")
        rules = RULES | TRACK_RULES.get(config.track, {})
        self.layouts = {key: Layout(key, param, runtime, rules[key]) for key, param in params.items()}
        self.state = {key: self.new_state(layout.own(layout.param.data)) for key, layout in self.layouts.items()}
    def new_state(self, part):  # what the rule keeps of this rank's part of a parameter, at its start
        shapes, zeros = {}, functools.partial(torch.zeros, device=part.device)
        if self.name == "matrices":  # `second` is a value a row, or a column of wide ones
            count, rows, columns = part.shape
            shapes = {"count": (count, 1, 1), "second": (count, rows, 1) if rows >= columns else (count, 1, columns)}
        state = {key: zeros(shapes.get(key, part.shape)) for key in self.rule.keeps}
        if part.dtype == torch.bfloat16:
            state["mantissa"] = zeros(part.shape, dtype=torch.int16)
        if self.rule.bases:
            state["rejects"] = zeros(count, dtype=torch.int32)
            for side, size in (("row", rows), ("column", columns)):
                if size <= self.config.one_sided_above:
                    state[f"{side}_factor"] = zeros(count, size, size)
                    state[f"{side}_basis"] = torch.eye(size, device=part.device).repeat(count, 1, 1)
        return state
    def stepping(self, step):
        """The layouts of the parameters that take part in a step: all but a tied embedding, which has no gradient."""
        return [layout for name, layout in self.layouts.items() if name != "embed" or step >= untie_step(self.config)]
    def reduce(self, step):
        for layout in self.stepping(step):
            if layout.fresh:  # no gradient has come
                layout.grad.zero_()
            summed, layout.work = self.runtime.reduce_scatter(layout.grad.to(self.wire), layout.name)
            layout.sum, layout.fresh = summed[:layout.high - layout.low], True
    def update(self, step, lr_mul):
        waited, dtype = step % self.every + 1, getattr(torch, self.config.dtype)  # steps whose gradients were added up
        for layout in self.stepping(step):
            hyper = Hyper(-(-(step + 1) // self.every), self.lr * layout.lr_mul * lr_mul, self.decay *
                          layout.rule.decay_mul, momentum_at(self.config, step), layout.rule.betas, dtype)
            part = layout.own(layout.param.data)
            wait(layout.work)
            self.take_step(self.rule.update, part, layout.sum, waited, self.state[layout.name], hyper)
            layout.joined, layout.work = self.runtime.gather_shares(part, layout.count, layout.name)
        if self.rule.bases:  # follow the gradients while the new weights travel; a matrix' bases step in their turn
            banks, every = [], self.config.basis_every if step >= EIGH_STEPS else 1
            for layout, state in zip(self.layouts.values(), self.state.values()):
                update_factors(layout.sum.float(), sides_of(state), self.rule.kl)
                banks.append({key: value[(step - layout.low) % every::every] for key, value in state.items()})
            refresh_eigenbases(banks, refresh_method(step, self.runtime.device))
    def receive(self, step):
        for layout in self.stepping(step):
            if layout.work is not None:
                wait(layout.work)
                layout.param.data.copy_(layout.joined)
    def size(self):
        return sum(layout.param.numel() for layout in self.layouts.values())
    def tensors(self):
        return {f"{name}.{key}": value for name, layout in self.layouts.items() for key, value in
                {"param": layout.param.data, "grad": layout.grad, **self.state[name]}.items()}
    def full_state(self):
        """{name: {key: tensor of the whole parameter, or of all matrices}} on every rank, whatever the world size."""
        return {name: {key: self.runtime.joined(part, self.layouts[name].count).clone() for key, part in state.items()}
                for name, state in self.state.items()}
    def load(self, full):
        for name, state in self.state.items():
            for key, value in state.items():
                value.copy_(self.layouts[name].own(full[name][key]))

class SmallGroup(ParameterGroup):
    """Small parameters: their gradients are summed as one bucket, and every rank updates all of them."""
    def __init__(self, name, config, params, runtime):
        super().__init__(name, config, params, runtime.alone())
        self.among, sizes = runtime, [param.numel() for param in params.values()]
        self.bucket = torch.zeros(sum(sizes), device=runtime.device)
        for layout, part in zip(self.layouts.values(), self.bucket.split(sizes)):
            layout.grad = part.view_as(layout.param)
    def reduce(self, step):
        super().reduce(step)
        self.work = self.among.all_reduce(self.bucket, self.name)
    def update(self, step, lr_mul):
        wait(self.work)
        super().update(step, lr_mul)

class Optimizer:
    """All groups, in the one order in which their communication is started and waited for: the small ones first, so
    that no small transfer queues behind a large one, and updates hide the transfers of the groups behind them."""
    def __init__(self, config, model, table, runtime):
        kinds = {"small": SmallGroup, "embeddings": ParameterGroup, "matrices": ParameterGroup}
        self.runtime, members = runtime, {key: {} for key in kinds}
        for name, param in model.named_parameters():
            refuse(name not in RULES or RULES[name].group not in kinds, f"no optimizer rule for {name}; give it a row "
                   f"of RULES, in one of the groups {', '.join(kinds)}")
            members[RULES[name].group][name] = param
        small, self.embeddings, self.matrices = (kinds[key](key, config, members[key], runtime) for key in kinds)
        self.groups = [small, self.embeddings, table, self.matrices]
        self.layouts = {**small.layouts, **self.embeddings.layouts, **self.matrices.layouts}
    def accumulate(self, grads):
        """Add one micro-batch's gradients, {name: tensor or None for a parameter that was not used}."""
        for name, grad in grads.items():
            if grad is not None:
                layout, total = self.layouts[name], self.layouts[name].grad[:len(grad)]
                (total.copy_ if layout.fresh else total.add_)(grad)
                layout.fresh = False
    def step(self, step, lr_mul):
        def take(groups):
            for group in groups:
                group.reduce(step)
            for group in groups:
                group.update(step, lr_mul)
            for group in groups:
                group.receive(step)
        due, alone = [group for group in self.groups if group.due(step)], self.runtime.world_size == 1
        # Of one rank nothing travels, so there is no order to keep.
        collections.deque(self.runtime.map(take, [[group] for group in due] if alone else [due]), 0)
    def untie(self):  # give the embedding the weights and optimizer state that the tied head has learned
        state = self.embeddings.state
        self.layouts["embed"].param.data.copy_(self.layouts["head"].param.data)
        for key, value in state["embed"].items():
            value.copy_(state["head"][key])

# 7. Trainer and validity gates ==============================================================================
class Trainer:
    """Model, optimizer and compiled forward of one run: what training, evaluation and sampling share."""
    def __init__(self, config, runtime):
        self.config, self.runtime = config, runtime
        torch.set_float32_matmul_precision("highest")
        self.data_sha256 = file_sha256(path) if (path := Path(config.data, "manifest.json")).is_file() else "none"
        attention, self.attention_name = choose_attention(config, runtime.device)
        float8, self.matmul_name = choose_float8(config, runtime.device)
        self.model = GPT(config, attention, float8=float8).to(runtime.device)
        self.table = NgramTable(config, runtime)
        self.optimizer = Optimizer(config, self.model, self.table, runtime)
        self.rotary = functools.cache(lambda length, windows: rotary_tables(
            length, config.head_dim, windows, runtime.device, getattr(torch, config.dtype)))
        self.compile_name = choose_compile(config, runtime.device)
        self.forward = compiled_model(self.model, runtime.device) if self.compile_name == "inductor" else self.model
    def context(self, step, micro_batch, training=False):
        """The model's Context at `step`. Outside training only the next token is scored, whatever the schedule says."""
        config, phase, dtype = self.config, phase_at(self.config, step), getattr(torch, self.config.dtype)
        length = len(micro_batch.inputs)
        if not training:  # the model as the last step left it: untying is the first thing that the next one does
            phase = phase._replace(mtp_weights=(1.0,), tied=is_tied_before(config, step), cap=length, softmax_rows=0,
                                   tokens=length)
        windows = set(phase.windows) if self.model.attend is blocked_attention else ()
        biases = {window: blocked_bias(micro_batch.segment_start, window, dtype) for window in windows}
        return Context(phase, self.rotary(length, windows_until(config, step)), biases)
    def accumulate(self, step, batch):
        """Add up the gradients of this rank's passes. Returns their summed losses, a 0-dim tensor."""
        if step and step == untie_step(self.config):
            self.optimizer.untie()
        self.table.pull(batch.plan)
        values, loss_sum = self.table.arrived(*self.table.pulled), 0.0
        params = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        tokens = self.runtime.world_size * sum(part.span.stop - part.span.start for part in batch.micro_batches)
        def gradients(micro_batch):
            ngram = self.table.lookup(micro_batch, values)
            loss, losses, _ = self.forward(micro_batch, ngram, self.context(step, micro_batch, training=True))
            leaves = [*params.values(), ngram] if ngram is not None and ngram.requires_grad else [*params.values()]
            share = loss / (tokens / self.config.micro_batch_tokens)
            return torch.autograd.grad(share, leaves, allow_unused=True), losses[micro_batch.span]
        # Whoever works out a micro-batch, its gradients are added in its turn: so workers change no bit of a run.
        for part, (grads, losses) in zip(batch.micro_batches, self.runtime.map(gradients, batch.micro_batches)):
            self.optimizer.accumulate(dict(zip(params, grads)))
            if len(grads) > len(params):
                self.table.accumulate(grads[-1][part.span], tokens)
            loss_sum = loss_sum + losses.sum()
        return loss_sum
    def step(self, step, batch, following=lambda: None):
        """One optimizer step. Returns this rank's summed losses and the next step's Batch, from `following`: called
        while the backward pass is under way, so that the batch's rows can be pulled early."""
        loss_sum, upcoming = self.accumulate(step, batch), following()
        self.table.upcoming = upcoming and upcoming.plan
        self.optimizer.step(step, lr_multiplier(self.config, step))
        return loss_sum, upcoming
    def read(self, place):
        """(MicroBatch, its summed n-gram rows) of a Placement outside training. All ranks must call it together."""
        rows, signs = table_rows(place, self.config, self.table.index)
        slots, values = self.table.read(rows, signs)
        return (made := assemble(place, slots, signs, self.runtime.device)), self.table.lookup(made, values)
    @torch.no_grad()
    def score(self, step, text, low):
        """Losses (val_length,) of the tokens behind those from `low` on of a Text, and hidden states, before `step`."""
        micro_batch, ngram = self.read(place_contiguous(text, low, self.config, self.config.val_length))
        return self.forward(micro_batch, ngram, self.context(step, micro_batch))[1:]
    def evaluate(self, step, val):
        """Mean loss over the track's validation tokens, in nats per token; micro-batches are shared among ranks."""
        length, runtime, text = self.config.val_length, self.runtime, Text(val, self.config)
        count, here = self.config.val_tokens // length, table_is_here(self.config, runtime)
        def summed(index):
            # Ranks without a last micro-batch score one again, at weight 0, since reading rows takes all of them.
            return self.score(step, text, min(index, count - 1) * length)[0].double().sum() * (index < count)
        indices = range(runtime.rank, count + runtime.rank, runtime.world_size)
        total = sum((runtime.map if here else map)(summed, indices))
        wait(runtime.all_reduce(total, "validation"))
        return total.item() / self.config.val_tokens

def unaffected(trainer, step, tokens, low, spans):
    """Whether, for each (a, b) of `spans`, losses and hidden states of tokens[a:b] stay bitwise the same when all other
    tokens become noise without ends of text. The last of these states predicts the token behind, whose loss changes."""
    eot, same, score = trainer.config.eot_token, True, lambda text: trainer.score(step, Text(text, trainer.config), low)
    before = score(tokens)
    for a, b in spans:
        changed = ((tokens + np.random.default_rng(b).integers(1, eot, len(tokens))) % eot).astype(np.uint16)
        changed[a:b] = tokens[a:b]
        after = score(changed)
        for old, new, end in zip(before, after, (b - 1, b)):
            same &= torch.equal(old[max(0, a - low):end - low], new[max(0, a - low):end - low])
    return same and not torch.equal(before[0], after[0])  # as those of a constant would be

def check_causal(trainer, step, val):
    """Nothing depends on later tokens: cuts are at both ends, at edges of blocks and documents, and drawn anew."""
    length, rng = trainer.config.val_length, np.random.default_rng(trainer.config.seed)
    tokens = np.resize(val[:trainer.config.val_tokens], 2 * length + 1)  # the first half is there to look back at
    tokens[length + length // 3] = trainer.config.eot_token
    drawn = (np.arange(16) + 16 * rng.integers(-(-length // 16), size=16)) % length  # all residues of 2, 4, 8, 16
    cuts = [*drawn, length // 2 - 1, length // 2, length // 3 - 1, length - 1, 0]
    return unaffected(trainer, step, tokens, length, [(0, length + cut + 1) for cut in cuts])

def check_local(trainer, step, val):
    """Nothing depends on other documents, of sixteen with the same text: what is looked up in them would be found."""
    length, eot = trainer.config.val_length, trainer.config.eot_token
    size = max(length // 16, 16) | 1  # odd, so that documents begin anywhere in a block of attention
    tokens = np.resize(np.where(val[:size] == eot, 0, val[:size]), 2 * size + length)
    tokens[::size] = eot  # the first document stands before the micro-batch
    return unaffected(trainer, step, tokens, size, [(low, low + size + 1) for low in range(size, size + length, size)])

@torch.no_grad()
def check_normalised(trainer, step, val):
    """Losses are the negative log-softmax, over the whole vocabulary, of the logits at the hidden states that the same
    forward pass ends in, up to a logit's last bit; `evaluate` is their mean, in whatever order they are scored."""
    config, length, exact, same = trainer.config, trainer.config.val_length, [], True
    count = min(config.val_tokens // length, trainer.runtime.world_size + 1)  # shares of ranks are uneven
    for low in reversed(range(0, count * length, length)):
        losses, hidden = trainer.score(step, Text(val, config), low)
        targets = to_device(val[low + 1:low + 1 + length].astype(np.int64), losses.device)
        for part in torch.arange(length, device=losses.device).split(1024):  # bounds the memory
            exact.append(F.cross_entropy(trainer.model.logits(hidden[part]).double(), targets[part], reduction="none"))
            same &= (losses[part] - exact[-1]).abs().max() < 1e-4 + config.logit_cap * torch.finfo(hidden.dtype).eps
    short = copy.copy(trainer)
    short.config = dataclasses.replace(config, val_tokens=count * length)
    return bool(same) and abs(short.evaluate(step, val) - torch.cat(exact).mean().item()) < 1e-4

GATES = {"causal": check_causal, "normalised": check_normalised, "local": check_local}

# 8. Checkpoints =============================================================================================
@contextlib.contextmanager
def atomic_file(path):
    """A temporary file that becomes `path` when the block ends well: a kill or a full disk leaves what was there."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

def check_parts(found, own, name="checkpoint"):
    """Name the first part that is not of the trainer's own kind, by ConfigError; not finite, by FloatingPointError."""
    def kind(part):
        plain = type(part) is Tensor and not (part.is_sparse or part.requires_grad)
        return f"{part.dtype} {tuple(part.shape)}" if plain else type(part).__name__
    refuse(kind(found) != kind(own), f"{name} is {kind(found)}, expected {kind(own)}")
    for key in {**own, **found} if isinstance(own, dict) else ():
        refuse(key not in found or key not in own, f"{name}.{key} is {'missing' if key in own else 'unknown'}")
        check_parts(found[key], own[key], f"{name}.{key}")
    ends = [found] if type(found) is float else found.aminmax() if type(found) is Tensor and found.numel() else []
    if not all(map(math.isfinite, ends)):  # one pass over a table, and no copy
        raise FloatingPointError(f"{name} is not finite")

def outline(config, runtime):  # of a rank's Trainer what a checkpoint holds, of tensors without memory
    ghost = copy.copy(runtime)
    ghost.device = torch.device("meta")
    with ghost.device:
        model = GPT(config, "sdpa", drawn=False)
        optimizer = Optimizer(config, model, NgramTable(config, ghost), ghost)
    return types.SimpleNamespace(config=config, data_sha256="", model=model, optimizer=optimizer)

def save_checkpoint(path, content):
    """Write `content` (tensors and plain types), and the file's sha256 beside it, atomically. Raises OSError."""
    check_parts(content, content)
    with atomic_file(path) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's zip writer reports a failed write so
            raise OSError(f"{path}: {str(error).splitlines()[0]}") from error
        file.flush()
        with atomic_file(path.with_suffix(".sha256")) as beside:
            beside.write(f"{file_sha256(file.name)}  {path.name}\n".encode())

def load_checkpoint(path):
    """Read a checkpoint, whose sha256 must be there, and whose parts those of its configuration. Raises ConfigError."""
    refuse(not (path := Path(path)).is_file(), f"{path}: no such checkpoint; a run leaves logs/RUN/checkpoint.pt")
    try:
        recorded = path.with_suffix(".sha256")
        refuse(file_sha256(path).encode() not in recorded.read_bytes(), f"sha256 differs from {recorded.name}: damaged")
        content = torch.load(path, map_location="cpu", weights_only=True)
        refuse(not isinstance(content, dict) or content.get("format") != CHECKPOINT_FORMAT,
               f"not of this trainer's format {CHECKPOINT_FORMAT}")
        own = outline(config := config_of_checkpoint(content), Runtime.__new__(Runtime).alone())
        check_parts(content, checkpoint_content(own, 0, LOADER_START, 0.0))
        numbers = {key: content[key] for key in ("step", "train_seconds")} | content["loader"]
        refuse(min(numbers.values()) < 0 or content["step"] > config.steps, f"{numbers} of {config.steps} steps")
        torch.Generator().set_state(content["rng"])  # refuses what the run's own would
    except Exception as error:  # torch raises several types for a damaged file
        raise ConfigError(f"{path}: cannot be read ({type(error).__name__}: {one_line(error)}); use another "
                          f"checkpoint") from None
    return content

def config_of_checkpoint(content):  # the Config that it was made with
    track = content["config"]["track"]
    refuse(track not in TRACKS, f"of track {track}; use the script that it began with")
    return type(TRACKS[track])(**content["config"])

def checkpoint_content(trainer, step, loader_state, seconds):
    """What a checkpoint holds. Every rank must call this: sharded states are gathered."""
    groups = {group.name: group.full_state() for group in trainer.optimizer.groups}
    return {"format": CHECKPOINT_FORMAT, "step": step, "config": dataclasses.asdict(trainer.config), "groups": groups,
            "data": trainer.data_sha256, "model": trainer.model.state_dict(), "rng": torch.get_rng_state(),
            "loader": loader_state, "train_seconds": seconds}

def restore(trainer, content):  # weights, optimizer state and the state of the random numbers
    trainer.model.load_state_dict(content["model"])
    for group in trainer.optimizer.groups:
        group.load(content["groups"][group.name])
    torch.set_rng_state(content["rng"])

def open_checkpoint(run, key="resume"):  # the content of a file, or of a run id's newest sound checkpoint
    folder, damaged = Path("logs", run), []
    for path in filter(Path.is_file, (Path(run), folder / "checkpoint.pt", *sorted(folder.glob("step_*.pt"))[::-1])):
        try:
            return load_checkpoint(path)
        except ConfigError as error:
            print(f"note: {one_line(error)}", file=sys.stderr)
            damaged.append(str(error))
    others = [path.parent.name for path in Path("logs").glob("*/*.pt")]
    raise ConfigError("; ".join(damaged) or f"--{key} {run}: no checkpoint under {folder}; {nearest(run, others)}")

def resumed(given):  # (config, overrides, checkpoint content) of `--resume RUN`; no content where `auto` starts it
    run, auto = given["resume"], given["resume"] == "auto"
    if auto and not any(Path("logs", run := given.get("run_id", "")).glob("*.pt")):
        return *config_from(given), None
    content = open_checkpoint(run)
    saved = config_of_checkpoint(content)
    refuse(not auto and content["step"] == saved.steps and Path("logs", saved.run_id, "result.json").exists(),
           f"--resume {run}: this run is complete, all {saved.steps} steps")
    values, free = parse_fields(given, saved), (NEUTRAL_FIELDS - {"seed", "run_id", "run_of"})
    for key, value in values.items():
        refuse(key not in free and value != getattr(saved, key),
               f"--{key} {given[key]}: the run to resume has {getattr(saved, key)}, and keeps it; leave the key out")
    config = dataclasses.replace(saved, **{**values, "resume": saved.resume})
    overrides = {field.name: value for field in dataclasses.fields(config) if field.name != "val_sha256"
                 and (value := getattr(config, field.name)) != getattr(TRACKS[config.track], field.name)}
    return config, overrides, content

# 9. Run =====================================================================================================
INTERRUPTED, SAVES = threading.Event(), threading.Event()  # SAVES: the first signal waits for a step that can be saved

def interrupt(signum, frame):
    """Signal handler: end the run now, once, or at the next step if the exception falls where Python drops it."""
    again = INTERRUPTED.is_set()
    INTERRUPTED.set()
    if again == SAVES.is_set():
        SAVES.clear()
        raise KeyboardInterrupt

class Clock:
    """Seconds of training, and those that processors worked for this process. Only start and stop await the device."""
    def __init__(self, runtime, seconds=0.0):
        self.runtime, self.total, self.since, self.processor = runtime, seconds, None, 0.0
    def start(self):
        self.runtime.synchronize()
        self.since, self.processor = time.perf_counter(), self.processor - time.process_time()
    def stop(self):
        self.runtime.synchronize()
        self.total, self.since, self.processor = self.seconds(), None, self.processor + time.process_time()
    def seconds(self):
        return self.total + (time.perf_counter() - self.since if self.since is not None else 0.0)

def state_digest(trainer):  # sha256 over every tensor that a step changes on this rank: equal digests, equal bits
    digest = hashlib.sha256(torch.get_rng_state().numpy())
    for group in trainer.optimizer.groups:
        for tensor in group.tensors().values():
            digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy())
    return digest.hexdigest()

def warm_up(trainer):
    """Compile and run every phase of the schedule on synthetic tokens, then put the state back; digests prove it."""
    config, runtime = trainer.config, trainer.runtime
    before, rng = state_digest(trainer), torch.get_rng_state()
    tokens = np.random.default_rng(0).integers(0, config.eot_token, config.val_length + 1).astype(np.uint16)
    tokens[0] = config.eot_token
    place = place_contiguous(text := Text(tokens, config), 0, config)
    rows, signs = table_rows(place, config, trainer.table.index)
    plan, slots = plan_rows(rows, signs, config, runtime)
    batch = Batch([*assemble_passes(place, slots, signs, config, runtime.device)], plan, {})
    trainer.table.pull(plan)
    put_back = [group.keep() for group in trainer.optimizer.groups]
    first = {(phase_at(config, step), windows_until(config, step)): step for step in reversed(range(config.steps))}
    # Adam's first step and the run's last: all groups step at these, on sums of as many steps as they ever do.
    for step in sorted({*first.values(), min(config.adam_every, config.steps) - 1, config.steps - 1}):
        for _ in range(2):  # the second call is the first without compilation
            trainer.step(step, batch)
            trainer.score(step, text, 0)
    trainer.score(config.steps, text, 0)
    for put_group_back in put_back:
        put_group_back()
    torch.set_rng_state(rng)
    if state_digest(trainer) != before:
        raise RuntimeError("the state after warm-up is not bitwise the state before it")
    runtime.ledger.clear()

class Run(types.SimpleNamespace):
    """A run between opening and result. vals: validation tokens by the name of their loss; step: how many are done."""
    def validate(self):
        """Log the validation losses of the model as it stands, and return them by name. The clock must stand still."""
        losses = {name: self.trainer.evaluate(self.step, val) for name, val in self.vals.items()}
        self.log.step(self.step, self.config.steps, self.clock.seconds(), **losses)
        if not all(map(math.isfinite, losses.values())):
            raise FloatingPointError(f"validation loss is {' and '.join(map(str, losses.values()))}")
        return losses
    def check_shards(self):  # ConfigError where one is not what was there, and was hashed, when the run began
        for path, _ in sorted(self.stamps.items() - stamps_of(self.config.data).items()):
            raise ConfigError(f"{path}: changed or gone since the run began; bring it back, and --resume the run")
    def save(self, name=None):
        content = checkpoint_content(self.trainer, self.step, self.loader_state, self.clock.seconds())
        if self.log.is_main:
            save_checkpoint(self.folder / (name or f"step_{self.step:06d}.pt"), content)
            for old in sorted(self.folder.glob("step_*.pt"))[:-self.config.keep]:
                old.unlink()
                old.with_suffix(".sha256").unlink(missing_ok=True)

def state_bytes(config, runtime):  # {group: bytes} of a rank's weights, gradients and optimizer state
    groups = outline(config, runtime).optimizer.groups
    return {group.name: sum(tensor.nbytes for tensor in group.tensors().values()) for group in groups}

def check_room(config, runtime):  # lines on memory and disk; raises ConfigError where a run would not fit
    (parts, hosted), lines = memory_parts(config, runtime), []
    shares = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
    for what, needed, free in (
            ("memory", sum(parts.values()), available_memory(runtime.device)),
            ("host memory for the table and the index", hosted, available_memory(torch.device("cpu"))),
            ("disk for a checkpoint", sum(state_bytes(config, runtime.alone()).values()), shutil.disk_usage(".").free)):
        lines.append(f"{what}: {needed / 2**30:.2f} GiB needed, {free / 2**30:.1f} GiB free")
        refuse(needed > free, f"{lines[-1]} (GiB: {shares}); make room, lower --ngram-rows={config.ngram_rows:,} or "
               "--micro-batch-tokens, or share the table among more ranks with --ngram-comms sharded")
    return lines

def open_run(config, overrides, runtime, log, content, check):
    """Look at all that a run needs, then build it; raises ConfigError. content: of the checkpoint to go on from."""
    seed = config.seed if config.seed >= 0 else int.from_bytes(os.urandom(4), "little")
    run_id = config.run_id or f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.urandom(2).hex()}"
    step = other = content["step"] if content else 0
    if runtime.world_size > 1:  # those of the rank that comes first
        seed, run_id, other = json.loads(runtime.store.compare_set("run", "", json.dumps([seed, run_id, step])))
    refuse(step != other, f"--resume {run_id}: of step {step} here, but {other} on another node; all must share logs/")
    config, folder = dataclasses.replace(config, seed=seed, run_id=run_id), Path("logs", run_id)
    for _, count in config.micro_batches:
        refuse(count % runtime.world_size, f"world size {runtime.world_size}: must divide the {count} micro-batches of "
               "a step; start another number of processes, or change --micro-batches")
    config = with_passes_that_fit(config, runtime)
    room, stamps, (shards, indexed, val) = check_room(config, runtime), stamps_of(config.data), open_corpus(config)
    torch.manual_seed(seed)
    trainer, code, (sha, dirty) = Trainer(config, runtime), Path(__file__).read_text("utf-8"), git_state()
    refuse(content and content["data"] != trainer.data_sha256, f"--resume {run_id}: {config.data}/manifest.json is not "
           f"the one that the run began with (sha256 {trainer.data_sha256[:12]}); bring its corpus back")
    triton = sys.modules.get("triton") or importlib.util.find_spec("triton") and importlib.import_module("triton")
    facts = {"commit": sha, "dirty": dirty, "code_sha256": hashlib.sha256(code.encode()).hexdigest(), "seed": seed,
             "world_size": runtime.world_size, "device": device_name(runtime.device), "torch": torch.__version__,
             "cuda": torch.version.cuda or "none", "triton": triton.__version__ if triton else "none",
             "started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"}
    overrides = {key: value for key, value in overrides.items() if key not in NEUTRAL_FIELDS}
    run = Run(config=config, overrides=overrides, folder=folder, trainer=trainer, log=log, clock=Clock(runtime), step=0,
              shards=shards, indexed=indexed, vals={"val_loss": val}, facts=facts, check=check, stamps=stamps,
              loader_state=None)
    if content:
        TrainLoader(config, shards, runtime, content["step"], content["loader"])
        run.step, run.loader_state, run.clock.total = map(content.get, ("step", "loader", "train_seconds"))
        restore(trainer, content)
    if check or log.live:  # what a person wants to know before it starts
        log.line("\n".join([
            f"device: {facts['device']}, world size {runtime.world_size}, {runtime.workers} CPU worker(s)",
            f"backends: attention={trainer.attention_name} compile={trainer.compile_name} matmul={trainer.matmul_name}",
            f"corpus: {config.data}: {sum(map(len, shards)):,} training tokens in {len(shards)} shard(s), the schedule "
            f"takes {training_tokens(config):,}; {config.val_tokens:,} validation tokens are scored",
            "parameters: " + ", ".join(f"{group.name} {group.size():,}" for group in trainer.optimizer.groups), *room]))
    if not check:
        log.open(folder, "" if content else code, config.resume == "auto" and not (folder / "result.json").exists())
        if content:
            log.line(f"resumed:{run_id} step:{run.step}/{config.steps} world_size:{runtime.world_size}")
        else:
            log_header(run)
    if config.val_sha256 and validation_hash(config, val) != config.val_sha256:
        log.line(f"note: {config.data} has other validation tokens than track {config.track}: losses do not compare")
    if config.pass_tokens:
        log.line(f"note: micro-batches are split into passes of {config.pass_tokens:,} tokens: the same up to rounding")
    return run

def log_header(run):  # the lines that make a run reproducible: machine, resolved configuration, data, back ends
    config, trainer, data = run.config, run.trainer, run.trainer.data_sha256
    facts = " ".join(f"{key}:{value}" for key, value in run.facts.items())
    place = "batch:{} counter:{} start:{}".format(*config.run_of.split(":")) if config.run_of else ""
    run.log.line("\n".join(filter(None, [
        f"run:{config.run_id} track:{config.track} {facts}", "config:" + json.dumps(dataclasses.asdict(config)),
        "overrides:" + json.dumps(run.overrides) if run.overrides else place,
        f"data:{data} shards:{'unknown' if data == 'none' else 'ok'} backends:attention={trainer.attention_name},"
        f"matmul={trainer.matmul_name},compile={trainer.compile_name}",
        "size: " + " ".join(f"{group.name}={group.size():,}" for group in trainer.optimizer.groups),
        "===== START ====="])), on_terminal=False)

def train_steps(run):  # the steps that are left, on the clock. Returns how many there were
    config, trainer, log, clock, runtime = run.config, run.trainer, run.log, run.clock, run.trainer.runtime
    first, index, loss, total, seen = run.step, trainer.table.index, None, 0.0, 0  # the last mean; then sum and number
    clock.start()
    with contextlib.closing(TrainLoader(config, run.shards, runtime, run.step, run.loader_state, index)) as loader:
        if not run.step and index.orders:  # meanwhile a worker looks for copies, in documents that can be remembered
            index.read(run.indexed, runtime, lambda: loader.text.copies(loader.text.starts[:1024]))
        if config.save_every and runtime.world_size == 1:  # several ranks would have to agree on the step
            SAVES.set()
        batch = loader.next()
        for step in range(run.step, config.steps):
            if step == first or batch.state["shard"] != run.loader_state["shard"]:  # which was read into memory
                run.check_shards()
            orphan = os.getppid() != runtime.launcher and runtime.world_size > 1
            if orphan or INTERRUPTED.is_set() and not (SAVES.is_set() and step % config.adam_every):
                if SAVES.is_set() and step:
                    run.save()
                raise KeyboardInterrupt
            run.step, run.loader_state, is_last = step + 1, batch.state, step + 1 == config.steps
            loss_sum, batch = trainer.step(step, batch, (lambda: None) if is_last else loader.next)
            total += loss_sum.double()
            seen += at_step(config.micro_batches, step, config) * config.micro_batch_tokens
            if run.step % config.log_every == 0 or is_last:
                wait(runtime.all_reduce(total, "training loss"))
                loss, total, seen = total.item() / seen, 0.0, 0
                log.step(run.step, config.steps, clock.seconds(), train_loss=loss, lr_mul=lr_multiplier(config, step))
                if not math.isfinite(loss):
                    raise FloatingPointError(f"training loss is {loss} at step {run.step}")
            log.progress(run.step, config.steps, loss, clock.seconds())
            for every, act in ((config.val_every, run.validate), (config.save_every, run.save)):
                if every and run.step % every == 0 and not is_last:
                    clock.stop()
                    act()
                    clock.start()
    SAVES.clear(), clock.stop()
    return config.steps - first

def finish(run, steps):  # checkpoint, final validation, validity gates and result; returns the final validation loss
    config, trainer, log, runtime = run.config, run.trainer, run.log, run.trainer.runtime
    sent = {"/".join(key): [round(count / max(1, steps), 1) for count in entry]  # bytes, messages; of training alone
            for key, entry in sorted(runtime.ledger.items()) if key[1] not in ("validation", "checkpoint")}
    memory, val, matrices = runtime.peak_memory_mib(), run.vals["val_loss"], trainer.optimizer.matrices
    if steps:  # else it is what the run was resumed from
        run.save("checkpoint.pt")
    if INTERRUPTED.is_set():  # during the last step
        raise KeyboardInterrupt
    losses, digest = run.validate(), validation_hash(config, val)
    gates = {name: gate(trainer, config.steps, val) for name, gate in GATES.items()}
    run.check_shards()
    comms = [f"{key}={size:.0f}({messages:g})" for key, (size, messages) in sent.items()] or ["none=0(0)"]
    log.line(f"comms: sent_bytes per step (messages) {' '.join(comms)}", on_terminal=False)
    verdicts = " ".join(f"{name}:{'ok' if passed else 'FAILED'}" for name, passed in gates.items())
    log.line(f"validity: {verdicts} val_tokens:{config.val_tokens} val_sha256:{digest}", not all(gates.values()))
    seconds, cpu_ms, tokens = run.clock.seconds(), 1000 * run.clock.processor, training_tokens(config)
    # Of matrices and head alone, 6 operations a weight and token; attention's scores are not counted.
    operations = 6 * (matrices.size() + trainer.model.head.numel()) * tokens / seconds
    mfu = 100 * operations / (runtime.world_size * matmul_rate(runtime.device, getattr(torch, config.dtype)))
    log.line(f"final val_loss:{losses['val_loss']:.5f} train_time:{1000 * seconds:.0f}ms tokens:{tokens} "
             f"peak_memory:{max(memory)}MiB tokens_per_s:{tokens / seconds:.0f} mfu:{mfu:.1f}% cpu_time:{cpu_ms:.0f}ms"
             + "".join(f" {name}:{loss:.5f}" for name, loss in losses.items() if name != "val_loss"))
    if log.is_main:
        result = {"run": config.run_id, "track": config.track, **losses, "train_time_ms": 1000 * seconds,
                  "cpu_time_ms": cpu_ms, "steps": config.steps, "tokens": tokens, "target_loss": config.target_loss,
                  **run.facts, "tokens_per_s": tokens / seconds, "mfu_percent": mfu, "peak_memory_mib_by_rank": memory,
                  "validity": gates, "val_sha256": digest, "overrides": run.overrides, "sent_per_step": sent,
                  "basis_rejects": sum(int(s["rejects"].sum()) for s in matrices.state.values() if "rejects" in s),
                  "config": dataclasses.asdict(config)}
        with atomic_file(run.folder / "result.json") as file:
            file.write((json.dumps(result, indent=1) + "\n").encode())
    if not all(gates.values()):
        raise RuntimeError(f"validity gate failed: {verdicts}; the model sees its future, or gives no distribution")
    return losses["val_loss"]

def plot(folder):  # by the records package. Returns the status line's word for it; a failure ends nothing
    try:
        from records.picture import plot_run
        return f" plot:{plot_run(folder)}"
    except Exception as error:
        print(f"no plot: {type(error).__name__}: {error}", file=sys.stderr)
        return ""

ENDINGS = {  # of a run that an exception has ended: exit status, word of the status line, what the user can do
    KeyboardInterrupt: (130, "interrupted", ""), ConfigError: (2, "error ", ""),
    FloatingPointError: (1, "nan ", "; start another run with a lower learning rate"),
    (torch.OutOfMemoryError, MemoryError): (1, "oom ", "; set --pass-tokens to a part of --micro-batch-tokens"),
    BlockingIOError: (2, "error ", "; another process writes this run: wait for it, or stop it"),
    OSError: (1, "error ", "; check the path, and that the disk is not full")}

def after_roll_call(runtime, step, said):
    """What a run says that ends on this rank by `said`, or "" where others were lost, and whether this rank says it."""
    heard = runtime.roll_call(said)
    silent = [str(rank) for rank in range(runtime.world_size) if rank not in heard]
    ended = [f"rank {rank} ended: {word}" for rank, word in heard.items() if word not in ("", "interrupted")]
    if said not in ("", "interrupted"):
        return said, heard.get(0) != said
    if "interrupted" in (said, *heard.values()) and not (ended or heard and silent):
        return "interrupted", False
    lost = f"no word from rank {', '.join(silent)} (killed, hung or cut off: see the launcher)"
    what = ended[0] if ended else lost if heard and silent else "rank 0, its node or the launcher is out of reach"
    return f"error at step {step}: {what}; --resume auto goes on", runtime.rank == min(heard, default=runtime.rank)

def train(config, overrides, runtime, content=None, hook=lambda run: None, check=False):
    """A whole run; returns the exit status. content: of a checkpoint. hook: gets the Run. check: stop at warm-up."""
    log, run, code, said, speaks, stopped = Log(runtime), None, 1, "error", False, False
    try:
        try:
            run = open_run(config, overrides, runtime, log, content, check)
            hook(run)
            if not check:
                warm_up(run.trainer)
                val_loss = finish(run, train_steps(run))
                said = (f"ok run:{run.config.run_id} val_loss:{val_loss:.5f} train_time:{run.clock.seconds():.1f}s"
                        f" log:{run.folder}/log.txt{plot(run.folder) if log.is_main else ''}")
            code = runtime.close() or 0
        finally:  # a signal raises up to here, and is caught below; what comes later is torchrun's, which saw a failure
            stopped = INTERRUPTED.is_set() and not SAVES.is_set()
            SAVES.clear(), INTERRUPTED.set()
    except (KeyboardInterrupt, Exception) as error:
        if stopped:  # whatever torch has made of the signal
            error = KeyboardInterrupt()
        elif "can't allocate memory" in str(error):
            error = MemoryError(error)
        known = next((kinds for kinds in ENDINGS if isinstance(error, kinds)), None)
        lost = not known and runtime.world_size > 1 and re.search("gloo|nccl|connection|pair closure", str(error), re.I)
        code, word, remedy = ENDINGS.get(known, (1, f"error {type(error).__name__}: ", ""))
        said = "" if lost else f"{word}{one_line(error)}{remedy}"
        if runtime.world_size > 1:
            said, speaks = after_roll_call(runtime, run.step if run else 0, said)
            code = 130 if said == "interrupted" else 1 if code == 130 else code
        if not (known or lost):
            raise
    finally:
        with contextlib.suppress(OSError):  # the disk may be full; the console still gets the status
            log.line("check:ok" if check and not code else f"status:{said}")
        if speaks and not runtime.is_main:
            print(f"rank {runtime.rank}: status:{said}", file=sys.stderr, flush=True)
        if code:
            runtime.close(failed=True)
    return code

# 10. Commands ===============================================================================================
def main(argv=None, extend=None):
    """Returns the exit status: 0 complete, 1 failed on the way, 2 bad input, 130 interrupted. extend: another script's
    way to build on this one: given the Config, it checks it and returns the hook of `train`."""
    argv, rank = list(sys.argv[1:] if argv is None else argv), int(os.environ.get("RANK", 0))
    INTERRUPTED.clear(), SAVES.clear()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # torchrun ends its workers with SIGTERM
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, interrupt)
    try:
        if "--help" in argv or "-h" in argv:
            every = {field.name: field for track in TRACKS.values() for field in dataclasses.fields(track)}
            rows = [f"  --{key.replace('_', '-'):<24}{it.metadata['help']} [{it.default}]" for key, it in every.items()]
            print(__doc__.split("\n\nChapters")[0], f"\nTracks (--track): {', '.join(TRACKS)}",
                  "Fields, with their defaults on the nano track:", *rows, sep="\n")
            return 0
        given = parse_arguments([word for word in argv if word != "--check"])
        config, overrides, content = resumed(given) if given.get("resume") else (*config_from(given), None)
        hook = extend(config) if extend else lambda run: None
        runtime = Runtime(config.device, config.workers)
    except (ConfigError, OSError, RuntimeError, KeyboardInterrupt) as error:  # gloo's own are plain RuntimeErrors
        said = "status:interrupted" if INTERRUPTED.is_set() else f"status:error {one_line(error)}"
        print(f"rank {rank}: " * (rank > 0) + said, file=sys.stderr if rank else None, flush=True)
        return 130 if INTERRUPTED.is_set() else 2
    return train(config, overrides, runtime, content, hook, "--check" in argv)

# 11. Kernels ================================================================================================
LOSS_CHUNK = 2048  # tokens whose logits exist at a time

class CappedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of soft-capped logits, and its gradients, of which a compiler makes one pass over the logits; the
    plain form is GPT.logits and F.cross_entropy. A logit, cap * tanh(z / cap), lies `below` the cap by at most 2 * cap,
    so that exp(-below) can be summed without a maximum, if the cap is small. In the same pass the logits give way to
    their gradients times the sum, which is not known yet: dividing rows by it commutes with the products that follow.
    Only the targets' columns are mended afterwards. Arguments: hidden (T, dim); head (vocab, dim); targets (T, K) and
    shares (T, K): the loss weights of K tokens a position; learning: whether gradients will be asked for;
    counts (vocab,): how many rows of the vocabulary each row of head stands for, 1 for targets.
    Returns (loss, the sum with these weights; losses (T,) of the first targets)."""
    @staticmethod
    def forward(ctx, hidden, head, targets, shares, cap, learning, float8="off", counts=None):
        def slope(below):  # of a capped logit, by the logit itself
            return below * (2 * cap - below) / cap**2
        losses, grad_hidden, grad_head, columns = [], [], None, torch.arange(len(head), device=head.device)
        narrow = in_float8(head, head.abs().amax()) if float8 != "off" else None
        weights = ((targets[:, :, None] == targets[:, None]) * shares[:, None]).sum(-1)  # of equal targets together
        for x, target, weight, share in zip(*(tensor.split(LOSS_CHUNK) for tensor in (
                hidden, targets, weights, shares.sum(1, keepdim=True)))):
            raw = float8_product(states_in_float8(x), narrow, x.dtype, float8) if narrow else x @ head.T
            below = 2 * cap * torch.sigmoid(raw.float() * (-2 / cap))
            mass = torch.exp(-below) if counts is None else torch.exp(-below) * counts
            total = mass.sum(1, keepdim=True)
            at_target = torch.stack([torch.where(columns == one[:, None], below, 0).sum(1) for one in target.T], 1)
            losses.append(total.log() + at_target)
            if learning:
                scale = share / total
                mended = (torch.exp(-at_target) - weight / scale.clamp_min(1e-30)) * slope(at_target)
                grad = (mass * slope(below)).to(x.dtype).scatter(1, target, mended.to(x.dtype))
                grad_hidden.append(((grad @ head) * scale).to(x.dtype))
                scaled = (x * scale).to(x.dtype)
                grad_head = grad.T @ scaled if grad_head is None else torch.addmm(grad_head, grad.T, scaled)
        losses = torch.cat(losses)
        if learning:
            ctx.save_for_backward(torch.cat(grad_hidden), grad_head)
        first = losses[:, 0].clone()
        ctx.mark_non_differentiable(first)
        return (losses * shares).sum(), first
    @staticmethod
    def backward(ctx, upstream, _):
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * upstream, grad_head * upstream, None, None, None, None, None, None

def sampled_rows(targets, vocab, count):
    """`count` of the vocabulary's rows: all targets, at most so many, and others at even distances, from a place on
    that the targets decide. Returns (rows (count,) int64, rising; where each row of the vocabulary stands among them,
    (vocab,), meaningless for those that do not; how many rows each stands for: so sums are right on average)."""
    index = torch.arange(vocab, device=targets.device)
    wanted = torch.zeros_like(index).index_fill(0, targets, 1)
    others = vocab - wanted.sum()
    taken = (count - wanted.sum()).clamp_min(0)  # of the others
    turn = ((1 - wanted).cumsum(0) - 1 + targets.sum()) % others.clamp_min(1)
    picked = (1 - wanted) * ((turn + 1) * taken // others.clamp_min(1) - turn * taken // others.clamp_min(1))
    places = ((wanted + picked).cumsum(0) - 1).clamp(0, count - 1)
    rows = torch.zeros(count + 1, dtype=index.dtype, device=index.device).scatter(
        0, torch.where(wanted + picked > 0, places, count), index)[:count]  # what is not taken goes to the end
    return rows, places, torch.where(wanted[rows] > 0, 1.0, others / taken.clamp_min(1))

def scored(hidden, head, micro_batch, phase, cap, float8):
    """(training loss, the next token's losses (T,)) of final hidden states, as CappedCrossEntropy returns them."""
    length, following, counts = len(hidden), micro_batch.targets, None
    if phase.softmax_rows:
        rows, places, counts = sampled_rows(following, len(head), phase.softmax_rows)
        head, following = head.index_select(0, rows), places[following]
    targets, shares = [], []
    for ahead, weight in enumerate(phase.mtp_weights):
        # Position i also scores the token `ahead` after its target, where that is of the same segment.
        same = micro_batch.segment_start[ahead:] == micro_batch.segment_start[:length - ahead]
        targets.append(following.roll(-ahead))  # at the end they are others of the batch, of no weight
        shares.append(F.pad(same * (weight / (phase.tokens - ahead)), (0, ahead)))
        if micro_batch.counted is not None:
            shares[-1] = shares[-1] * micro_batch.counted
    return CappedCrossEntropy.apply(hidden, head, torch.stack(targets, 1), torch.stack(shares, 1), cap,
                                    torch.is_grad_enabled(), float8, counts)

# ----- products in 8 bits
FLOAT8 = torch.float8_e4m3fn

def in_float8(values, largest):
    """(values rounded to 8 bits, so scaled that `largest`, a 0-dim tensor, just fits; what they are to be multiplied by
    again, float32)."""
    scale = (largest.float() / torch.finfo(FLOAT8).max).clamp_min(1e-30)
    return (values.float() / scale).to(FLOAT8), scale

def states_in_float8(x):
    """The same of x (T, dim), whose rows have an RMS of 1: no value is larger than sqrt(dim)."""
    return in_float8(x, torch.full((), x.size(1) ** 0.5, device=x.device))

def float8_product(x, matrix, dtype, float8):
    """x matrixᵀ in dtype, of results of in_float8. On Hopper by its tensor cores; "emulated" it is the product of the
    same rounded values in dtype, and differs in the order of sums alone."""
    (left, of_left), (right, of_right) = x, matrix
    if float8 == "on":
        return torch._scaled_mm(left, right.T, of_left, of_right, out_dtype=dtype, use_fast_accum=True)
    return ((left.to(dtype) @ right.to(dtype).T).float() * (of_left * of_right)).to(dtype)

def choose_float8(config, device):
    """Resolve Config.float8. Returns (off, on or emulated; the products' description for the log)."""
    if config.float8 == "off":
        return "off", f"torch-{config.dtype}"
    if config.float8 == "emulated":
        return "emulated", f"torch-{config.dtype}+float8-emulated"
    able = device.type == "cuda" and config.dtype == "bfloat16" and torch.cuda.get_device_capability(device) == (9, 0)
    sides = config.model_dim, config.mlp_dim, config.vocab_size, config.softmax_rows
    refuse(able and any(side % 16 for side in sides), "float8=on: tensor cores want multiples of 16 as model_dim, "
           f"mlp_dim, vocabulary and softmax_rows, and these are {sides}; use --float8 off")
    return ("on", "torch-bfloat16+float8") if able else ("off", f"torch-{config.dtype} (float8 wants a Hopper GPU and "
                                                         "bfloat16)")

# ----- linear and ReLU^2
try:  # triton comes with torch's builds for CUDA
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:
    triton, tl, jit = None, collections.namedtuple("Language", "constexpr")(None), lambda kernel: kernel

def kernels_run(tensor):
    """Whether Triton's kernels are what computes with this tensor; the plain form does elsewhere."""
    return triton is not None and tensor.is_cuda

@jit
def relu_square_kernel(left, right, post, scale, out, rows, columns: tl.constexpr, depth: tl.constexpr,
                       TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr):
    """out (rows, columns): relu(left rightᵀ)^2 of left (rows, depth) and right (columns, depth); where post is given,
    the gradient through that, 2 sqrt(post) left rightᵀ. scale: a number to multiply the product by, or None. One
    program a tile of out; those of a row of tiles are neighbours, so that what they share of left comes from the cache,
    as do all of right's."""
    tile = tl.program_id(0)
    across = tl.cdiv(columns, WIDE)
    row, column = tile // across * TALL + tl.arange(0, TALL), tile % across * WIDE + tl.arange(0, WIDE)
    inner = tl.arange(0, DEEP)
    left_at = left + (row % rows)[:, None] * depth + inner[None, :]
    right_at = right + (column % columns)[None, :] * depth + inner[:, None]
    total = tl.zeros((TALL, WIDE), tl.float32)
    for low in range(0, depth, DEEP):
        here = inner < depth - low
        total = tl.dot(tl.load(left_at + low, here[None, :], 0.0), tl.load(right_at + low, here[:, None], 0.0), total)
    at = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if scale is not None:
        total *= tl.load(scale)
    if post is None:
        total = tl.maximum(total, 0.0)
        total = total * total
    else:
        total = 2 * total * tl.sqrt(tl.load(post + at, inside, 0.0).to(tl.float32))
    tl.store(out + at, total.to(out.dtype.element_ty), inside)

def relu_square_by_kernel(left, right, post, scale, dtype):
    out = left.new_empty(len(left), len(right), dtype=dtype)
    tall, wide, deep = 128, 256, 128 // left.element_size()
    tiles = triton.cdiv(len(left), tall) * triton.cdiv(len(right), wide)
    relu_square_kernel[(tiles,)](left, right, post, scale, out, len(left), len(right), left.size(1), tall, wide, deep,
                                 num_warps=8, num_stages=3)
    return out

def relu_square(left, right, post=None):
    """What relu_square_kernel computes, by the kernel where it runs: the product never reaches memory."""
    if kernels_run(left):
        return relu_square_by_kernel(left, right, post, None, left.dtype)
    product = left @ right.T
    return F.relu(product).square() if post is None else product * (2 * post.sqrt())

def relu_square_float8(x, up, float8):
    """relu_square(x, up) of a product in 8 bits."""
    left, right = states_in_float8(x), in_float8(up, up.abs().amax())
    if float8 == "on" and kernels_run(x):
        return relu_square_by_kernel(left[0], right[0], None, left[1] * right[1], x.dtype)
    return F.relu(float8_product(left, right, x.dtype, float8)).square()

class ReluSquareMLP(torch.autograd.Function):
    """relu(x upᵀ)^2 down, of x (T, dim), up and down (mlp_dim, dim). Only the square is kept for the backward pass,
    which wants the root of it. The product with down stays as it is: rounding the square to 8 bits would cost as much
    time as the product would save."""
    @staticmethod
    def forward(ctx, x, up, down, float8="off"):
        post = relu_square(x, up) if float8 == "off" else relu_square_float8(x, up, float8)
        ctx.save_for_backward(x, up, down, post)
        return post @ down
    @staticmethod
    def backward(ctx, grad):
        x, up, down, post = ctx.saved_tensors
        grad = grad.contiguous()
        grad_product = relu_square(grad, down, post)
        return grad_product @ up, grad_product.T @ x, post.T @ grad, None

# ----- norms
class RMSNorm(torch.autograd.Function):
    """RMSNorm of x without weights and, where cos and sin are given, a rotation of the result. The backward pass reads
    that alone, so that x need not be kept: as rotations keep angles, the norm's gradient can be taken behind them."""
    @staticmethod
    def forward(ctx, x, cos=None, sin=None):
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps)
        y = (x * scale).to(x.dtype)
        y = y if cos is None else rotate(y, cos, sin)
        ctx.save_for_backward(y, scale, cos, sin)
        return y
    @staticmethod
    def backward(ctx, grad):
        y, scale, cos, sin = ctx.saved_tensors
        grad = ((grad - y * (grad.float() * y).mean(-1, keepdim=True)) * scale).to(grad.dtype)
        return grad if cos is None else rotate(grad, cos, -sin), None, None

norm = RMSNorm.apply

# ----- devices and back ends, and what says that one is not to be had
def line_of(path, beginning):
    """What follows the colon in the first line of a file under /proc that begins so; "" where there is none."""
    with contextlib.suppress(OSError, TypeError):  # no such file, no such line
        return re.search(f"^{beginning}.*?:(.*)", Path(path).read_text(errors="replace"), re.MULTILINE)[1].strip()
    return ""

def available_memory(device):
    """Bytes that this process could take: free ones of the GPU; of the host its part of those that are available."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    told = line_of("/proc/meminfo", "MemAvailable").removesuffix(" kB")
    there = int(told) * 1024 if told else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return there // int(os.environ.get("LOCAL_WORLD_SIZE", 1))

def device_name(device):
    cpu = f"{line_of('/proc/cpuinfo', 'model name') or platform.processor() or platform.machine()} x{os.cpu_count()}"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu

def why_no_cuda():
    """What keeps torch from this machine's NVIDIA GPU; "" where there is none, or CUDA_VISIBLE_DEVICES hides it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not list(Path("/dev").glob("nvidia[0-9]*")):
        return ""
    driver = line_of("/proc/driver/nvidia/version", "NVRM version") or "unknown"
    return (f", for its CUDA {torch.version.cuda} does not run with this driver: {driver} (CUDA 13 needs 580 or newer)"
            if torch.version.cuda else ", for this wheel is built without; install the one with CUDA (PyPI's has it)")

def choose_device(device, local_rank, here):
    """The device of one of the `here` processes on this machine."""
    cuda = device != "cpu" and torch.cuda.is_available()
    reason = "" if cuda or device == "cpu" else why_no_cuda()
    refuse(reason or device == "cuda" and not cuda, f"device={device}: torch {torch.__version__} sees no CUDA "
           f"device{reason}; use --device cpu to train without one")
    refuse(cuda and max(here, local_rank + 1) > torch.cuda.device_count(), f"{here} processes on a node with "
           f"{torch.cuda.device_count()} GPU(s): start at most one a GPU (--nproc-per-node)")
    return torch.device("cuda", local_rank) if cuda else torch.device("cpu")

def memory_parts(config, runtime):
    """({part: bytes} that a rank takes of its device's memory, bytes that it takes of the host's beside): estimates."""
    parts, value = state_bytes(config, runtime), 2 if config.dtype == "bfloat16" else 4
    # About 34 values a channel and layer; float32 logits twice, of the tokens whose loss is worked out.
    parts["activations"] = config.pass_length * 34 * config.num_layers * config.model_dim * value
    parts["activations"] += min(config.pass_length, LOSS_CHUNK) * 8 * config.vocab_size
    parts["text_index"] = 4 * len(config.index_orders) << config.index_bits
    parts["ngram_table"] -= parts["text_index"]
    hosts = ("text_index", "ngram_table")[:1 + config.ngram_host] if runtime.device.type == "cuda" else ()
    return parts, sum(map(parts.pop, hosts))

def with_passes_that_fit(config, runtime):
    """The Config with the longest passes that fit into the free memory of all ranks, by estimate, or the shortest."""
    block = math.lcm(*(min(window, ATTENTION_BLOCK) for _, pair in config.windows for window in pair))
    sizes = [-(-(config.micro_batch_tokens // k + config.longest_segment) // block) * block for k in (2, 4, 8, 16)]
    tries = [config, *(dataclasses.replace(config, pass_tokens=size) for size in sizes
                       if size < config.pass_length and not config.softmax_rows)]
    free = available_memory(runtime.device)
    here = next((n for n, it in enumerate(tries) if sum(memory_parts(it, runtime)[0].values()) <= free), len(tries) - 1)
    return tries[runtime.joined(torch.tensor([here]), runtime.world_size).max()]

def matmul_rate(device, dtype):
    """Floating-point operations a second of a large square matrix product, best of six: what MFU is a share of."""
    size = 8192 if device.type == "cuda" else 1024
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / min(timeit.repeat(lambda: (matrix @ matrix)[0, 0].item(), number=1, repeat=6))  # item waits

def blocked_bias(segment_start, window, dtype):
    """What blocked_attention adds to its scores, (blocks, block, window + block): 0 where query i sees key j, where
    max(segment_start[i], i - window + 1) <= j <= i, else -inf. The keys of a block of queries start `window` before it.
    Worked out once a micro-batch, for all layers."""
    block = min(window, ATTENTION_BLOCK)
    index = torch.arange(len(segment_start), dtype=torch.int32, device=segment_start.device).view(-1, block, 1)
    key = index[:, :1] - window + torch.arange(window + block, dtype=torch.int32, device=index.device)
    visible = (key <= index) & (key > index - window) & (key >= segment_start.view(-1, block, 1))
    return torch.zeros(visible.shape, dtype=dtype, device=index.device).masked_fill_(~visible, -math.inf)

def blocked_attention(q, k, v, micro_batch, cap, bias, window, scale):
    """Back end `sdpa`: scaled dot-product attention on any device, in time linear in T. A block of queries attends to
    its own and the preceding blocks' keys that the window can reach; the products are written out, since bf16 SDPA on a
    CPU takes twice their time. q, k, v, result: (T, H, D), T a multiple of the block; cap: for the other back end."""
    length, heads, dim = q.shape
    block = min(window, ATTENTION_BLOCK)
    def spans(x):  # (T, H, D) -> (H, blocks, window + block, D), zeros before the start
        padded = F.pad(x.transpose(0, 1), (0, 0, window, 0))
        return torch.cat([padded[:, start:start + length].reshape(heads, -1, block, dim)
                          for start in range(0, window + block, block)], dim=2)
    scores = q.transpose(0, 1).reshape(heads, -1, block, dim) @ spans(k).transpose(-1, -2)
    weights = (scores.float() * scale + bias).softmax(-1).to(v.dtype)
    return (weights @ spans(v)).view(heads, length, dim).transpose(0, 1)

def varlen_attention(q, k, v, micro_batch, cap, bias, window, scale):
    """Back end `varlen`: FlashAttention over packed segments (CUDA, half precision) of at most `cap` tokens: for each
    head and segment its grid has a block for every 128 of these. Other arguments as blocked_attention's."""
    from torch.nn.attention.varlen import varlen_attn
    bounds = micro_batch.segment_bounds
    return varlen_attn(q, k, v, bounds, bounds, cap, cap, scale=scale, window_size=(window - 1, 0))

ATTENTION = {"sdpa": blocked_attention, "varlen": varlen_attention}

def choose_attention(config, device):
    """Resolve the attention back end. Returns (name in ATTENTION, description for the log)."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    refuse(device.type == "cuda" and config.dtype == "bfloat16" and capability < (8, 0), f"dtype=bfloat16: "
           f"{device_name(device)} has no bfloat16 (compute capability {capability}, from (8, 0) on); --dtype float32")
    able = (device.type, config.dtype) == ("cuda", "bfloat16") and importlib.util.find_spec("torch.nn.attention.varlen")
    refuse(config.attention == "varlen" and not able, "attention=varlen: needs CUDA, bfloat16 and torch.nn.attention."
           f"varlen, and has {device.type}, {config.dtype} and torch {torch.__version__}; use --attention sdpa")
    if config.attention == "sdpa" or not able:
        return "sdpa", "sdpa"
    newer = {9: "FA3", 10: "FA4"}.get(capability[0], "newer one for this device")
    try:  # where its package is installed, else the FlashAttention 2 that torch holds
        from torch.nn.attention import activate_flash_attention_impl
        activate_flash_attention_impl(newer)
        return "varlen", f"varlen-{newer} (activated; only a profile proves that its kernels run)"
    except Exception as error:  # whatever an absent or unfit package raises
        return "varlen", f"varlen-FA2 (no {newer}: {type(error).__name__})"

def compiled_model(model, device):
    torch._dynamo.config.recompile_limit = 64  # a phase is two graphs, and torch's default limit is 8
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # never eager in silence
    # On a CPU the compiled code calls its kernels itself: else the interpreter's lock would halt other workers.
    return torch.compile(model, dynamic=False, options={"cpp_wrapper": device.type == "cpu"})

def compiled_updates():
    """take_step as a handful of kernels. What changes from step to step is a tensor on the CPU: nothing recompiles."""
    step = torch.compile(take_step, dynamic=False)
    def call(update, part, grad, waited, state, hyper):
        changing = {key: torch.as_tensor(getattr(hyper, key)) for key in ("step", "lr", "momentum")}
        step(update, part, grad, waited, state, hyper._replace(**changing))
    return call

def choose_compile(config, device):
    """inductor where it can work, else why not: for the log, and on CUDA, where a run would crawl, an error."""
    if not config.compile:
        return "off"
    lacks = "" if Path(sysconfig.get_paths()["include"], "Python.h").is_file() else "Python.h: install python3-dev"
    try:  # inductor's and triton's wrappers of kernels take both
        from torch._inductor.cpp_builder import get_cpp_compiler
        get_cpp_compiler()
    except Exception:  # inductor raises its own types for a missing compiler
        lacks = "C++ compiler: install g++"
    refuse(lacks and device.type == "cuda", f"compile=True: no {lacks}, or go without by --compile false")
    return f"off (no {lacks})" if lacks else "inductor"

if __name__ == "__main__":
    sys.exit(main())
