"""Checks and benchmarks that need a GPU; benchmarks/gpu.sh starts them all.

    python benchmarks/gpu_checks.py [--only PART ...] [--results FOLDER]
    python benchmarks/gpu_checks.py --device cpu --tiny       try out the script without a GPU

A part is a function in the registry PARTS (see `part`). It runs in a process of its own with a time
limit, so that one that fails, hangs or breaks the CUDA context leaves the others alone; what it
reported until then counts. A new check is one more function. Shards of data/ are used where
present, else corpora are made for the occasion: speed and correctness do not depend on what the
tokens mean.

Results: a table, and benchmarks/results/gpu_<device>_<date>.{json,md} (tiny_... with --tiny).
Exit status: 0 all passed, 1 some failed, 2 no CUDA device.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import batched_qr, common

BUDGET_SECONDS = 530  # for all parts; a part's own limit stands beside it
GRACE_SECONDS = 10  # for a part to end by itself before it is killed
NUDGE = 1e-6  # relative errors, of the size of a few roundings, that show how far these grow
MUON = train_gpt.MATRIX_RULES["muon"]
PARTS = {}


def part(seconds):
    """Enter a function of a Session into the registry, with its time limit."""

    def enter(function):
        PARTS[function.__name__] = (function, seconds)
        return function

    return enter


class Session:
    """What a part works with: device, folder for temporary files, corpora, and `report`."""

    def __init__(self, name, device, tiny, work):
        self.name = name
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.tiny = tiny
        self.work = Path(work)

    def report(self, item, ok, text, **values):
        """One row of the table. ok: True, False, or None for what is only measured."""
        row = {"part": self.name, "item": item, "ok": ok, "text": text, **values}
        with open(self.work / f"{self.name}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    def config(self, track, **changes):
        """The track's Config on this session's device and corpus.

        Changes outrank the tiny values."""
        values = {"device": self.device.type, "seed": 1, "val_sha256": ""}
        if self.tiny:
            values.update(common.TINY)
        values.update(changes)
        base = train_gpt.with_values(train_gpt.TRACKS[track], values)
        dtype = train_gpt.resolve_dtype(base.dtype, torch.device(base.device))
        return dataclasses.replace(base, data=str(self.corpus(base)), dtype=dtype)

    def corpus(self, config):
        """The track's shards where they are present, else a corpus large enough for the steps."""
        present = common.ROOT / config.data
        is_there = any(present.glob("*_train_*.bin")) and any(present.glob("*_val_*.bin"))
        if is_there and not self.tiny:
            return present
        needed = train_gpt.training_tokens(config) + 4 * config.micro_batch_tokens
        needed = round(needed / (1 - config.index_share))
        folder = self.work / f"{config.tokenizer}_{needed}_{config.val_tokens}"
        if not folder.exists():
            # Validation takes whole documents, the largest of torch's sources has 700 kB.
            limit = needed + config.val_tokens + 1_000_000
            if config.tokenizer == "bytes":
                documents = common.python_documents(limit)
            else:
                rng = np.random.default_rng(0)
                documents = common.random_documents(limit, config.eot_token, rng)
            common.write_corpus(folder, documents, config.eot_token, config.val_tokens)
        return folder

    def trainer(self, config):
        torch.manual_seed(config.seed)
        return train_gpt.Trainer(config, train_gpt.Runtime(config.device))

    def milliseconds(self, function, repeats=10):
        """Mean time of a call, after three untimed ones; by CUDA events where there is CUDA."""

        def call_often():
            for _ in range(repeats):
                function()

        for _ in range(3):
            function()
        if not self.cuda:
            return 1000 * common.timed(call_often, self.device)[0] / repeats
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call_often()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / repeats


def relative_error(value, reference):
    """Norm of the difference over the norm of the reference, in float64 on the CPU."""
    value = value.detach().double().cpu()
    reference = reference.detach().double().cpu()
    return ((value - reference).norm() / reference.norm().clamp_min(1e-300)).item()


def loader_of(trainer, shards, first_step=0):
    """A TrainLoader that begins at a step, to be closed."""
    config, index = trainer.config, trainer.table.index
    return contextlib.closing(
        train_gpt.TrainLoader(config, shards, trainer.runtime, index, first_step)
    )


def train_some(trainer, shards, steps, first_step=0):
    """Take steps as the training loop does.

    Returns (mean training losses, a tensor a step; seconds of the steps)."""
    losses = []
    clock = train_gpt.Clock(trainer.runtime)
    with loader_of(trainer, shards, first_step) as loader:
        batch = loader.next_batch()  # the loader has started
        clock.start()
        for step in range(first_step, first_step + steps):
            is_last = step + 1 == first_step + steps
            upcoming = None if is_last else loader.next_batch()
            losses.append(trainer.step(step, batch, upcoming) / batch.tokens)
            batch = upcoming
        clock.stop()
    return losses, clock.total


def tokens_of_step(config, step):
    return train_gpt.stage_at(config, step).micro_batches * config.micro_batch_tokens


# ----- attention back ends


def segment_layouts(length, rng):
    """{name: sorted starts of the segments of a micro-batch of `length` tokens}."""

    def cut(lengths):
        starts = np.concatenate(([0], np.cumsum(lengths)))
        return starts[starts < length]

    return {
        "one": np.array([0]),
        "long": cut(rng.integers(length // 8, length // 3, size=32)),
        "short": cut(rng.integers(16, 48, size=length // 16)),
        "on edges": np.arange(0, length, 128),
    }


def micro_batch_of(starts, length, device):
    """A MicroBatch with these segments; its tokens mean nothing."""
    text = train_gpt.Text(np.zeros(length + 1, np.uint16), train_gpt.TRACKS["nano"])
    spans = list(itertools.pairwise([*starts.tolist(), length]))
    window = train_gpt.TokenWindow(text, spans)
    nothing = np.empty((length, 0))
    return train_gpt.assemble(window, nothing.astype(np.int32), nothing.astype(np.float32), device)


def masks_of(back_end, micro_batch, window, dtype):
    """What a back end prepares for layers of one Window."""
    length = len(micro_batch.inputs)
    phase = train_gpt.Phase((window,), (1.0,), length, softmax_rows=0, is_tied=False)
    return back_end.prepare(micro_batch, phase, dtype)


def attention_errors(session, back_end, dtype, windows, length, heads, dim):
    """Worst relative errors over windows and layouts.

    Returns ({"out", "dq", "dk", "dv": error}, where it was)."""
    rng = np.random.default_rng(0)
    _, _, scale = train_gpt.rotary_tables(1, dim, (), "cpu", dtype)
    generator = torch.Generator().manual_seed(0)
    worst = dict.fromkeys(("out", "dq", "dk", "dv"), 0.0)
    where = ""
    for layout, starts in segment_layouts(length, rng).items():
        micro_batch = micro_batch_of(starts, length, session.device)
        for size in windows:
            window = train_gpt.Window(size, positions=1)
            drawn = torch.randn(4, length, heads, dim, generator=generator)
            q, k, v, upstream = drawn.to(session.device, dtype)
            q, k = train_gpt.norm(q), train_gpt.norm(k)
            mine = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
            masks = masks_of(back_end, micro_batch, window, dtype)
            out = back_end.attend(*mine, masks, window, scale)
            reference = common.reference_attention(*exact, micro_batch.segment_start, size, scale)
            values = [out, *torch.autograd.grad(out, mine, upstream)]
            references = [reference, *torch.autograd.grad(reference, exact, upstream.double())]
            for key, value, reference in zip(worst, values, references, strict=True):
                error = relative_error(value, reference)
                if not error <= worst[key]:  # a NaN counts as worst
                    worst[key] = error
                    where = f"window {size}, segments {layout}"
    return worst, where


def attention_milliseconds(session, back_end, size, length, heads, dim):
    """Time of forward and backward at the size of a fineweb micro-batch; sdpa is compiled."""
    window = train_gpt.Window(size, positions=1)
    micro_batch = micro_batch_of(np.arange(0, length, 700), length, session.device)
    drawn = torch.randn(4, length, heads, dim, device=session.device, dtype=torch.bfloat16)
    *inputs, upstream = drawn.unbind(0)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    masks = masks_of(back_end, micro_batch, window, torch.bfloat16)
    attend = back_end.attend
    if isinstance(back_end, train_gpt.BlockedAttention) and not session.tiny:
        attend = torch.compile(attend, dynamic=False)

    def forward_and_backward():
        torch.autograd.grad(attend(*inputs, masks, window, 0.1), inputs, upstream)

    return session.milliseconds(forward_and_backward)


@part(seconds=120)
def attention(session):
    """Back ends against the quadratic reference in float64, with gradients; then their speed."""
    config = session.config("fineweb")
    pairs = [config.val_windows, *(stage.windows for stage in config.stages)]
    windows = sorted({window for pair in pairs for window in pair})
    heads, dim = config.model_dim // config.head_dim, config.head_dim
    length = 256 if session.tiny else 2048

    def measure(label, back_end, tolerances):
        for dtype, tolerance in tolerances.items():
            worst, where = attention_errors(session, back_end, dtype, windows, length, heads, dim)
            text = " ".join(f"{key} {error:.1e}" for key, error in worst.items())
            session.report(
                f"{label} {str(dtype)[6:]}",
                all(error < tolerance for error in worst.values()),
                f"relative errors {text} ({where})",
                errors=worst,
                tolerance=tolerance,
            )
        for window in (windows[0], windows[-1]):
            tokens = config.micro_batch_tokens
            ms = attention_milliseconds(session, back_end, window, tokens, heads, dim)
            session.report(
                f"{label} speed",
                None,
                f"{ms:.2f} ms forward and backward of {tokens} tokens, window {window}",
                ms=ms,
                window=window,
            )

    blocked, varlen = train_gpt.BlockedAttention(), train_gpt.VarlenAttention()
    measure("sdpa", blocked, {torch.float32: 2e-5, torch.bfloat16: 2e-2})
    if session.cuda:
        measure("varlen FA2", varlen, {torch.bfloat16: 2e-2})
        try:
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl("FA3")
        except Exception as error:  # whatever an absent or unfit package raises
            session.report("varlen FA3", None, f"not available: {type(error).__name__}")
            return
        measure("varlen FA3", varlen, {torch.bfloat16: 2e-2})


# ----- update rules


def movement(function, weight, device, dtype, *tensors):
    """What function(weight, *tensors) adds to a weight in place, in float64 on the CPU.

    It works on copies of all, on the device."""
    weight_there, *there = (tensor.to(device, dtype, copy=True) for tensor in (weight, *tensors))
    function(weight_there, *there)
    return weight_there.double().cpu() - weight.double()


def zero_state(weight):
    """What the rules keep of a bank (k, m, n) before the first step, less factors and bases."""

    def zeros(*shape):
        return torch.zeros(len(weight), *shape, device=weight.device)

    rows, columns = weight.shape[1:]
    return {
        "momentum": zeros(rows, columns),
        "moment": zeros(rows, columns),
        "second": zeros(rows, 1) if rows >= columns else zeros(1, columns),
        "count": zeros(1, 1),
    }


def take_steps(rule, weight, grads, state, lr, decay, dtype=torch.float32, step=None):
    """Take steps of an update rule, in place, as one rank does, by train_gpt.take_step or another
    form of it."""
    step = step or train_gpt.take_step
    for count, grad in enumerate(grads, start=1):
        hyper = train_gpt.Hyper(count, lr, decay, 0.9, (0.9, 0.95), dtype)
        step(rule.update, weight, grad, state, hyper)


def adam_state(weight):
    return {key: torch.zeros_like(weight, dtype=torch.float32) for key in ("first", "second")}


def check_adam(session, shape, generator):
    weight, *grads = torch.randn(4, *shape, generator=generator)

    def update(weight, *grads):
        state = {key: torch.zeros_like(weight) for key in ("first", "second")}
        take_steps(train_gpt.ADAM, weight, grads, state, 0.01, 0.1)

    error = relative_error(
        movement(update, weight, session.device, torch.float32, *grads),
        movement(update, weight, "cpu", torch.float64, *grads),
    )
    session.report(
        "adam",
        error < 1e-4,
        f"relative error {error:.1e} against float64 after 3 steps",
        error=error,
    )


def check_muon(session, label, shape, generator):
    weight, *grads = torch.randn(4, *shape, generator=generator)

    def moved(device, dtype):
        def update(weight, *grads):
            take_steps(MUON, weight, grads, zero_state(weight), 0.02, 0.1, dtype)

        return movement(update, weight, device, torch.float32, *grads)

    expected = moved("cpu", torch.float32)
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        error = relative_error(moved(session.device, dtype), expected)
        session.report(
            f"muon {label} {str(dtype)[6:]}",
            error < tolerance,
            f"relative error {error:.1e} against CPU float32 after 3 steps",
            error=error,
        )


def check_compiled(session, shape, generator):
    """The updates as they are on CUDA, a handful of kernels, against the same ones not compiled."""
    weight, *grads = torch.randn(4, *shape, generator=generator)

    def moved(rule, new_state, step):
        def update(weight, *grads):
            take_steps(rule, weight, grads, new_state(weight), 0.01, 0.1, step=step)

        return movement(update, weight, session.device, torch.float32, *grads)

    rules = {"adam": (train_gpt.ADAM, adam_state), "muon": (MUON, zero_state)}
    for name, rule in rules.items():
        compiled = moved(*rule, train_gpt.compiled_updates())
        error = relative_error(compiled, moved(*rule, train_gpt.take_step))
        session.report(
            f"compiled {name}",
            error < 1e-3,
            f"relative error {error:.1e} against the plain one, after 3 steps",
            error=error,
        )


def check_table(session, config, generator):
    """Two steps of the n-gram table's rows, through NgramTable itself."""
    tokens = 16 * 256
    rng = np.random.default_rng(0)
    config = dataclasses.replace(config, ngram_rows=4096)
    rows = rng.integers(0, config.ngram_rows, (tokens, 3)).astype(np.int32)
    signs = rng.choice((-1, 1), (tokens, 3)).astype(np.float32)
    weight = torch.randn(config.ngram_rows, config.model_dim, generator=generator)
    grad = torch.randn(tokens, config.model_dim, generator=generator)

    def update(weight, grad):
        table = train_gpt.NgramTable(config, train_gpt.Runtime(weight.device.type))
        table.weight.copy_(weight)
        plan, _ = train_gpt.plan_rows(rows, signs, config, table.runtime)
        table.start_pull(plan)
        for step in range(2):
            table.accumulate(grad)
            table.update(step, 1.0, table.reduce(step))
        weight.copy_(table.weight)

    error = relative_error(
        movement(update, weight, session.device, torch.float32, grad),
        movement(update, weight, "cpu", torch.float32, grad),
    )
    session.report(
        "adagrad rows",
        error < 1e-4,
        f"relative error {error:.1e} against CPU after 2 steps",
        error=error,
    )


def check_master(session, shape, generator):
    """A bfloat16 weight is the rounded one of a float32 master, which steps as if it were alone."""
    drawn, *grads = torch.randn(4, *shape, generator=generator).to(session.device)
    alone, rounded = drawn.clone(), drawn.bfloat16()
    with_master = {**adam_state(drawn), "master": drawn.clone()}
    take_steps(train_gpt.ADAM, alone, grads, adam_state(drawn), 0.01, 0.1)
    take_steps(train_gpt.ADAM, rounded, grads, with_master, 0.01, 0.1)
    is_same = torch.equal(with_master["master"], alone)
    is_rounded = torch.equal(rounded, alone.bfloat16())
    text = "bitwise: a master steps like a float32 weight, and its weight is it, rounded"
    session.report("master", is_same and is_rounded, text)


@part(seconds=60)
def updates(session):
    """Update rules on the device against the same functions on the CPU; then their speed."""
    config = session.config("fineweb")
    generator = torch.Generator().manual_seed(0)
    dim, mlp_dim = config.model_dim, config.mlp_dim
    check_adam(session, (dim, mlp_dim), generator)
    check_muon(session, "square", (4, dim, dim), generator)
    check_muon(session, "tall", (2, mlp_dim, dim), generator)
    check_muon(session, "wide", (4, dim // 3, dim), generator)
    if session.cuda:  # where they are compiled
        check_compiled(session, (4, dim, dim), generator)
    check_table(session, config, generator)
    check_master(session, (dim, dim), generator)

    heads = dim // config.head_dim
    group = heads if heads % 2 else 2
    banks = {
        "query_key": (2 * config.num_layers * heads // group, group * config.head_dim, dim),
        "value_output": (2 * config.num_layers, dim, dim),
        "mlp": (2 * config.num_layers, mlp_dim, dim),
    }
    for label, shape in banks.items():
        weight, grad = torch.randn(2, *shape, device=session.device)
        words = MUON, weight, [grad], zero_state(weight), 1e-6, 0.0, torch.bfloat16
        ms = session.milliseconds(functools.partial(take_steps, *words), repeats=5)
        text = f"{ms:.2f} ms for {'x'.join(map(str, shape))}"
        session.report(f"muon speed, {label} bank", None, text, ms=ms)


@part(seconds=60)
def eigenbases(session):
    """Eigenbases and the soap rules on the device against the CPU.

    Every method of refreshing, then one step a rule."""
    generator = torch.Generator().manual_seed(0)
    size = 32 if session.tiny else 256
    factor, basis = batched_qr.training_factors(4, size, torch.device("cpu"))
    weight, grad = torch.randn(2, 4, size, size, generator=generator)

    def side(name, device):
        factor_there, basis_there = factor.to(device, copy=True), basis.to(device, copy=True)
        return {f"{name}_factor": factor_there, f"{name}_basis": basis_there}

    def update(rule, weight, grad):
        device = weight.device
        state = {**zero_state(weight), **side("row", device), **side("column", device)}
        state["moment"] += rule == "soap_muon"
        take_steps(train_gpt.MATRIX_RULES[rule], weight, [grad], state, 0.1, 0.1)

    def found_on(device):
        found = {}
        for method in ("eigh", "householder", "cholesky"):
            bank = {
                **side("row", device),
                "moment": torch.ones(4, size, size, device=device),
                "rejects": torch.zeros(4, dtype=torch.int32, device=device),
            }
            train_gpt.refresh_eigenbases([bank], method)
            bases, rejects = bank["row_basis"], int(bank["rejects"].sum())
            leading = bases[:, :, : size // 8]
            # The space they span, whatever their signs.
            found[f"refresh {method}"] = leading @ leading.mT
            if device is session.device:
                error = (bases.mT @ bases - torch.eye(size, device=device)).abs().max().item()
                session.report(
                    f"orthonormal, {method}",
                    error < 1e-5 and not rejects,
                    f"max |QᵀQ - I| {error:.1e}, {rejects} rejects",
                    error=error,
                )
        for rule in ("soap", "soap_muon"):
            of_rule = functools.partial(update, rule)
            found[rule] = movement(of_rule, weight, device, torch.float32, grad)
        return found

    expected = found_on(torch.device("cpu"))
    for item, value in found_on(session.device).items():
        error = relative_error(value, expected[item])
        session.report(
            item, error < 1e-2, f"relative error {error:.1e} against the CPU", error=error
        )


# ----- bitwise checks


@part(seconds=150)
def gates(session):
    """The nano track, compiled, on every attention back end: warm-up and the validity gates."""
    for name in ("sdpa", "varlen") if session.cuda else ("sdpa",):
        config = session.config("nano", steps=12, attention=name, val_tokens=8192)
        corpus = train_gpt.open_corpus(config)
        trainer = session.trainer(config)
        # It raises unless the state is bitwise what it was.
        warm_up = functools.partial(train_gpt.warm_up, trainer)
        seconds, _ = common.timed(warm_up, session.device)
        session.report(
            f"warm-up restored, {trainer.attention_name}",
            True,
            f"bitwise; it took {seconds:.1f} s",
            seconds=seconds,
        )
        # A model at its start hardly looks at other tokens.
        train_some(trainer, corpus.shards, config.steps)
        loss = trainer.evaluate(config.steps, corpus.val)
        verdicts = train_gpt.check_gates(trainer, config.steps, corpus.val, loss)
        for label, passed in verdicts.items():
            item = f"{label}, {trainer.attention_name}"
            session.report(item, passed, f"after {config.steps} steps")


@part(seconds=100)
def trajectory(session):
    """Twenty float32 steps of the nano track, compiled on the device, against the CPU, plain."""
    steps = 4 if session.tiny else 20
    losses = {}
    plain = {"device": "cpu", "compile": False}
    for key, changes in (("device", {}), ("cpu", plain), ("nudged", plain)):
        config = session.config("nano", steps=steps, dtype="float32", **changes)
        shards = train_gpt.open_corpus(config).shards
        trainer = session.trainer(config)
        generator = torch.Generator().manual_seed(0)
        if key == "nudged":
            for param in trainer.model.parameters():
                param.data *= 1 + NUDGE * torch.randn(param.shape, generator=generator)
        losses[key] = [loss.item() for loss in train_some(trainer, shards, steps)[0]]

    def difference(key):
        return max(abs(a - b) for a, b in zip(losses[key], losses["cpu"], strict=True))

    apart, rounding = difference("device"), difference("nudged")
    first = abs(losses["device"][0] - losses["cpu"][0])
    session.report(
        "device against CPU",
        apart < 10 * rounding and first < 1e-4,
        f"training losses differ by at most {apart:.1e} over {steps} steps, by {first:.1e} at the "
        f"first; weights that begin with relative errors of {NUDGE} differ by {rounding:.1e}",
        losses=losses,
    )


# ----- the fineweb track


def time_phases(session, trainer, shards):
    """Time steps in each phase of the schedule, and report them."""
    config = trainer.config

    def phase(step):
        return train_gpt.training_phase(config, step), tokens_of_step(config, step)

    edges = [step for step in range(1, config.steps) if phase(step) != phase(step - 1)]
    phases = itertools.pairwise([0, *edges, config.steps])
    for number, (first, end) in enumerate(phases, start=1):
        timed = min(2 if session.tiny else 8, end - first - 3)
        if timed < 1:
            text = f"only {end - first} steps of {config.steps}: not timed"
            session.report(f"phase {number}", None, text)
            continue
        train_some(trainer, shards, 2, first)
        if session.cuda:
            torch.cuda.reset_peak_memory_stats()
        losses, seconds = train_some(trainer, shards, timed, first + 2)
        seconds /= timed
        tokens = tokens_of_step(config, first)
        (memory,) = trainer.runtime.peak_memory_mib()
        session.report(
            f"phase {number}",
            bool(torch.isfinite(losses[-1])),
            f"{1000 * seconds:.1f} ms a step of {tokens:,} tokens, {tokens / seconds:,.0f} "
            f"tokens/s, peak {memory:,} MiB",
            step_ms=1000 * seconds,
            tokens_per_second=tokens / seconds,
            peak_memory_mib=memory,
        )


def measure_first_phase(session):
    """Ten steps of the fineweb track's first phase, compiled.

    Returns (milliseconds a step, the Trainer, losses)."""
    length = 512 if session.tiny else 16384
    config = session.config("fineweb", steps=60, val_batch_tokens=length, val_tokens=length)
    shards = train_gpt.open_corpus(config).shards
    trainer = session.trainer(config)
    _, seconds = train_some(trainer, shards, 2)
    session.report(
        "compiled",
        True,
        f"two steps took {seconds:.1f} s; attention {trainer.attention_name}, compile "
        f"{trainer.compile_name}",
        seconds=seconds,
    )
    losses, seconds = train_some(trainer, shards, 10, 2)
    return 100 * seconds, trainer, losses


@part(seconds=180)
def ten_steps(session):
    """Does the fineweb track train, how fast, in how much memory?"""
    step_ms, trainer, losses = measure_first_phase(session)
    rate = tokens_of_step(trainer.config, 0) / (step_ms / 1000)
    mfu = train_gpt.mfu_percent(trainer, rate)
    (memory,) = trainer.runtime.peak_memory_mib()
    session.report(
        "ten steps",
        bool(losses[-1] < losses[0]),
        f"{step_ms:.1f} ms a step, {rate:,.0f} tokens/s, {mfu:.1f} % of a matrix product's rate, "
        f"peak {memory:,} MiB, loss {losses[0]:.3f} to {losses[-1]:.3f}",
        step_ms=step_ms,
        mfu_percent=mfu,
        peak_memory_mib=memory,
    )


STEP_LINE = re.compile(r"^step:(\d+)/\d+ .*?train_time:([\d.]+)ms", re.MULTILINE)


def step_ms_of(log, warm=10, steps=30):
    """Milliseconds a step by the first so many steps of a log behind the warm ones.

    None while it has fewer."""
    times = {int(step): float(time) for step, time in STEP_LINE.findall(log)}
    if warm not in times or warm + steps not in times:
        return None
    return (times[warm + steps] - times[warm]) / steps


@part(seconds=500)
def published(session):
    """A published single-file trainer on this GPU, where PUBLISHED_TRAINER names its file, and then
    the fineweb track's first phase. It runs in its folder, where its shards are, until its log,
    with lines like `step:40/1285 train_time:6800ms`, has told enough; the batches must be equal for
    the ratio to mean something, and are at the first stages of modded-nanogpt's and ours."""
    path = os.environ.get("PUBLISHED_TRAINER")
    if not path:
        text = "PUBLISHED_TRAINER=/path/to/train_gpt.py names none"
        session.report("published trainer", None, text)
        return
    script = Path(path).resolve()
    log = session.work / "published.log.txt"
    began = time.monotonic()
    theirs = None
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    command = [sys.executable, *launcher, str(script)]
    with open(log, "w") as file:
        process = subprocess.Popen(
            command,
            cwd=script.parent,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while theirs is None and process.poll() is None and time.monotonic() - began < 330:
            time.sleep(0.2)
            theirs = step_ms_of(log.read_text(errors="replace"))
    finally:
        stop_group(process)
    output = log.read_text(errors="replace")
    theirs = theirs or step_ms_of(output)
    if theirs is None:
        text = f"{script}: no 40 steps; its output ends in {output[-150:]!r}"
        session.report("published trainer", False, text)
        return
    session.report("published trainer", None, f"{theirs:.1f} ms a step at first", step_ms=theirs)
    ours, *_ = measure_first_phase(session)
    session.report(
        "against it",
        ours <= 0.9 * theirs or None,
        f"{ours:.1f} ms a step: {ours / theirs:.3f} of the published trainer's (0.9 is the aim)",
        step_ms=ours,
        ratio=ours / theirs,
    )


@part(seconds=280)
def fineweb(session):
    """The fineweb model, compiled, in each phase of its schedule: speed and memory."""
    steps, val_tokens = (24, 2048) if session.tiny else (60, 8 * 16384)
    config = session.config("fineweb", steps=steps, val_tokens=val_tokens)
    corpus = train_gpt.open_corpus(config)
    trainer = session.trainer(config)
    warm_up = functools.partial(train_gpt.warm_up, trainer)
    seconds, _ = common.timed(warm_up, session.device)
    session.report(
        "warm-up restored",
        True,
        f"bitwise; it took {seconds:.1f} s with compilation; attention "
        f"{trainer.attention_name}, compile {trainer.compile_name}",
        seconds=seconds,
    )
    time_phases(session, trainer, corpus.shards)
    with loader_of(trainer, corpus.shards, config.steps - 6) as loader:
        began = time.perf_counter()
        tokens = sum(loader.next_batch().tokens for _ in range(6))
        seconds = time.perf_counter() - began
    session.report(
        "loader alone",
        None,
        f"{tokens / seconds:,.0f} tokens/s",
        tokens_per_second=tokens / seconds,
    )
    evaluate = functools.partial(trainer.evaluate, config.steps, corpus.val)
    seconds, loss = common.timed(evaluate, session.device)
    session.report(
        "validation",
        None,
        f"{config.val_tokens / seconds:,.0f} tokens/s",
        tokens_per_second=config.val_tokens / seconds,
    )
    if session.cuda:
        torch.cuda.reset_peak_memory_stats()
    verdicts = train_gpt.check_gates(trainer, config.steps, corpus.val, loss)
    (memory,) = trainer.runtime.peak_memory_mib()
    for label, passed in verdicts.items():
        session.report(label, passed, f"on the trained weights; all gates' peak {memory:,} MiB")


# ----- whole runs of the trainer


def run_trainer(session, config, processes, timeout):
    """Start train_gpt.py as its users do. Returns (exit status, last line, result.json or None)."""
    run_id = f"{session.name}-{processes}"
    defaults = dataclasses.asdict(train_gpt.TRACKS[config.track])
    values = dataclasses.asdict(config)
    changes = {key: value for key, value in values.items() if value != defaults[key]}
    words = common.words_of({"track": config.track, **changes, "run_id": run_id})
    with subprocess.Popen(
        [*common.rank_command(common.ROOT / "train_gpt.py", processes), *words],
        cwd=session.work,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun passes it on to its workers
            output, _ = process.communicate()
    print(output)
    lines = output.splitlines() or ["no output"]
    last = [line for line in lines if line.startswith("status:")] or lines
    path = session.work / "logs" / run_id / "result.json"
    result = json.loads(path.read_text()) if path.is_file() else None
    return process.returncode, last[-1], result


@part(seconds=150)
def nano_run(session):
    """The nano track from start to end through the trainer, with a short schedule."""
    steps, val_tokens = (6, 2048) if session.tiny else (100, 131_072)
    config = session.config("nano", steps=steps, val_every=0, val_tokens=val_tokens)
    status, last, result = run_trainer(session, config, processes=1, timeout=130)
    if status or not result:
        session.report("run", False, f"exit status {status}: {last}")
        return
    # log(257) is 5.55; a model that learns passes 2 in 50 steps.
    limit = 5.5 if session.tiny else 2.0
    session.report(
        "run",
        result["val_loss"] < limit,
        f"loss {result['val_loss']:.4f} after {config.steps} steps, "
        f"{result['train_time_ms'] / config.steps:.1f} ms a step, "
        f"{1000 * result['tokens'] / result['train_time_ms']:,.0f} tokens/s",
        result=result,
    )


@part(seconds=200)
def fineweb_world(session):
    """The fineweb track through torchrun on all GPUs; nothing where there is one."""
    gpus = torch.cuda.device_count() if session.cuda else 2
    if gpus < 2:
        session.report("all GPUs", None, "only one here")
        return
    steps, val_tokens = (6, 2048) if session.tiny else (24, 8 * 16384)
    values = {"steps": steps, "val_tokens": val_tokens, "val_every": 0, "log_every": 2}
    config = session.config("fineweb", **values)
    largest = math.gcd(*(stage.micro_batches for stage in config.stages))
    processes = max(count for count in range(1, gpus + 1) if largest % count == 0)
    status, last, result = run_trainer(session, config, processes, timeout=180)
    if status or not result:
        session.report(f"{processes} processes", False, f"exit status {status}: {last}")
        return
    sent = sum(size for size, _ in result["sent_per_step"].values()) / 2**20
    session.report(
        f"{processes} processes",
        math.isfinite(result["val_loss"]),
        f"{result['train_time_ms'] / config.steps:.1f} ms a step, "
        f"{1000 * result['tokens'] / result['train_time_ms']:,.0f} tokens/s, peak "
        f"{max(result['peak_memory_mib_by_rank']):,} MiB, {sent:,.0f} MiB sent a step and rank",
        result=result,
    )


# ----- running the parts

# The first say most about whether the fineweb track works; each is started only where its whole
# limit still fits.
BY_WORTH = (
    "attention",
    "ten_steps",
    "updates",
    "gates",
    "fineweb",
    "trajectory",
    "eigenbases",
    "nano_run",
    "fineweb_world",
    "published",
)


def run_part(name, command, seconds, work):
    """Run a part's process, at most so many seconds.

    Returns its rows, and one more if it did not end well."""
    log = Path(work, f"{name}.log")
    failure = ""
    began = time.monotonic()
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(timeout=seconds)
            if status:
                lines = log.read_text(errors="replace").splitlines()
                tail = [line for line in lines if line.strip()]
                failure = f"exit status {status}: {tail[-1] if tail else 'no output'}"
        except subprocess.TimeoutExpired:
            failure = f"timed out after {seconds:.0f} s"
        finally:
            stop_group(process)
    rows_file = Path(work, f"{name}.jsonl")
    rows = []
    if rows_file.is_file():
        rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    if failure:
        rows.append({"part": name, "item": "ended early", "ok": False, "text": failure[:300]})
    failed = sum(row["ok"] is False for row in rows)
    if failed:
        print("\n".join(log.read_text(errors="replace").splitlines()[-15:]), file=sys.stderr)
    seconds = time.monotonic() - began
    print(f"{name}: {len(rows)} rows, {failed} failed, {seconds:.0f} s", flush=True)
    return rows


def stop_group(process):
    """End a process and all that it started.

    Politely first, so that torchrun takes its workers along."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
            process.wait(timeout=GRACE_SECONDS)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def parse_arguments(argv):
    parser = common.parser(__doc__, tiny=False)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        metavar="PART",
        help=f"these parts, of {', '.join(PARTS)}",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # of a part's own process
    return parser.parse_args(argv)


def main(argv=None):
    arguments = parse_arguments(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            "error: torch sees no CUDA device, which these checks are about; --device cpu --tiny "
            "only tries out the script",
            file=sys.stderr,
        )
        return 2
    if arguments.work:  # this is a part's own process
        name = arguments.only[0]
        PARTS[name][0](Session(name, arguments.device, arguments.tiny, arguments.work))
        return 0
    facts = common.environment(torch.device(arguments.device))
    rows = []
    began = time.monotonic()
    print(common.environment_line(facts), flush=True)
    with tempfile.TemporaryDirectory() as work:
        for name in arguments.only or BY_WORTH:
            left = BUDGET_SECONDS - (time.monotonic() - began)
            limit = PARTS[name][1]
            if left < limit:
                text = (
                    f"may take {limit} s, and {left:.0f} of {BUDGET_SECONDS} s are left; run it "
                    f"with --only {name}"
                )
                rows.append({"part": name, "item": "not started", "ok": None, "text": text})
                continue
            words = ["--only", name, "--device", arguments.device, "--work", work]
            if arguments.tiny:
                words.append("--tiny")
            command = [sys.executable, __file__, *words]
            rows += run_part(name, command, limit, work)
    seconds = time.monotonic() - began
    verdicts = {True: "ok", False: "FAIL", None: "-"}
    table = common.markdown_table(
        ["part", "item", "verdict", "figures"],
        [
            [row["part"], row["item"], verdicts[row["ok"]], row["text"].replace("|", "/")]
            for row in rows
        ],
    )
    kind = "tiny" if arguments.tiny else "gpu"
    name = f"{kind}_{common.slug(facts['device'])}_{datetime.now():%Y-%m-%d}"
    common.write_results(
        arguments.results,
        name,
        facts,
        {"seconds": seconds, "rows": rows},
        f"# Checks on {facts['device']}\n\n{table}\n\nThey took {seconds:.0f} s.",
    )
    failed = sum(row["ok"] is False for row in rows)
    totals = f"{len(rows)} rows, {failed} failed, {seconds:.0f} s"
    print(f"\n{table}\n\n{totals}; {arguments.results / name}.md")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
