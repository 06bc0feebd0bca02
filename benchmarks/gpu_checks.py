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
import dataclasses
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
# relative errors, of the size of a few roundings, that show how far these grow
NUDGE = 1e-6
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
        self.name, self.device, self.tiny, self.work = name, torch.device(device), tiny, Path(work)
        self.cuda = self.device.type == "cuda"

    def report(self, item, ok, text, **values):
        """One row of the table. ok: True, False, or None for what is measured only or does not
        apply."""
        row = {"part": self.name, "item": item, "ok": ok, "text": text, **values}
        with open(self.work / f"{self.name}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    def config(self, track, **changes):
        """The track's Config on this session's device and corpus; changes outrank the tiny
        overrides."""
        values = {
            "device": self.device.type,
            "seed": 1,
            "val_sha256": "",
            **(common.TINY if self.tiny else {}),
            **changes,
        }
        base = dataclasses.replace(train_gpt.TRACKS[track], **values)
        return dataclasses.replace(base, data=str(self.corpus(base)))

    def corpus(self, config):
        """The track's shards where they are present, else a corpus just large enough for the
        steps."""
        present = common.ROOT / config.data
        if (
            not self.tiny
            and any(present.glob("*_train_*.bin"))
            and any(present.glob("*_val_*.bin"))
        ):
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
                documents = common.random_documents(
                    limit, config.eot_token, np.random.default_rng(0)
                )
            common.write_corpus(folder, documents, config.eot_token, config.val_tokens)
        return folder

    def trainer(self, config):
        torch.manual_seed(config.seed)
        return train_gpt.Trainer(config, train_gpt.Runtime(config.device))

    def milliseconds(self, function, repeats=10):
        """Mean time of a call, after three untimed ones; by CUDA events where there is CUDA."""
        for _ in range(3):
            function()
        if not self.cuda:
            return (
                1000
                * common.timed(lambda: [function() for _ in range(repeats)], self.device)[0]
                / repeats
            )
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / repeats


def relative_error(value, reference):
    """Norm of the difference over the norm of the reference, in float64 on the CPU."""
    value, reference = (tensor.detach().double().cpu() for tensor in (value, reference))
    return ((value - reference).norm() / reference.norm().clamp_min(1e-300)).item()


def train_some(trainer, shards, steps, first_step=0):
    """Take steps as the training loop does. Returns (mean training losses, a tensor a step; seconds
    of the steps)."""
    config, losses, clock = trainer.config, [], train_gpt.Clock(trainer.runtime)
    loader = train_gpt.TrainLoader(config, shards, trainer.runtime, first_step)
    try:
        batch = loader.next()  # the loader has started
        clock.start()
        for step in range(first_step, first_step + steps):
            tokens = (
                train_gpt.at_step(config.micro_batches, step, config) * config.micro_batch_tokens
            )
            following = loader.next if step + 1 < first_step + steps else lambda: None
            loss_sum, batch = trainer.step(step, batch, following)
            losses.append(loss_sum / tokens)
        clock.stop()
    finally:
        loader.close()
    return losses, clock.total


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
    index = np.arange(length)
    segment_start = starts[np.searchsorted(starts, index, side="right") - 1].astype(np.int32)
    text = train_gpt.Text(np.zeros(length + 1, np.uint16), train_gpt.TRACKS["nano"])
    place = train_gpt.Placement(text, index, segment_start)
    nothing = np.empty((length, 0))
    return train_gpt.assemble(place, nothing.astype(np.int32), nothing.astype(np.float32), device)


def attend(name, q, k, v, micro_batch, window, scale):
    bias = (
        train_gpt.blocked_bias(micro_batch.segment_start, window, q.dtype)
        if name == "sdpa"
        else None
    )
    return train_gpt.ATTENTION[name](q, k, v, micro_batch, len(q), bias, window, scale)


def attention_errors(session, name, dtype, windows, length, heads, dim):
    """Worst relative errors over windows and layouts: ({"out", "dq", "dk", "dv": error}, where it
    was)."""
    rng, (_, _, scale) = np.random.default_rng(0), train_gpt.rotary_tables(1, dim, (), "cpu", dtype)
    generator = torch.Generator().manual_seed(0)
    worst, where = dict.fromkeys(("out", "dq", "dk", "dv"), 0.0), ""
    for layout, starts in segment_layouts(length, rng).items():
        micro_batch = micro_batch_of(starts, length, session.device)
        for window in windows:
            drawn = torch.randn(4, length, heads, dim, generator=generator)
            q, k, v, upstream = drawn.to(session.device, dtype)
            q, k = train_gpt.norm(q), train_gpt.norm(k)
            mine = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
            out = attend(name, *mine, micro_batch, window, scale)
            reference = common.reference_attention(*exact, micro_batch.segment_start, window, scale)
            values = [out, *torch.autograd.grad(out, mine, upstream)]
            references = [reference, *torch.autograd.grad(reference, exact, upstream.double())]
            for key, value, reference in zip(worst, values, references, strict=True):
                error = relative_error(value, reference)
                if not error <= worst[key]:  # a NaN counts as worst
                    worst[key], where = error, f"window {window}, segments {layout}"
    return worst, where


def attention_milliseconds(session, name, window, length, heads, dim):
    """Time of forward and backward at the size of a fineweb micro-batch; sdpa compiled, as it is
    used."""
    micro_batch = micro_batch_of(np.arange(0, length, 700), length, session.device)
    q, k, v, upstream = (
        torch.randn(length, heads, dim, device=session.device, dtype=torch.bfloat16)
        for _ in range(4)
    )
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    bias = (
        train_gpt.blocked_bias(micro_batch.segment_start, window, q.dtype)
        if name == "sdpa"
        else None
    )
    forward = train_gpt.ATTENTION[name]
    if name == "sdpa" and not session.tiny:
        forward = torch.compile(forward, dynamic=False)
    return session.milliseconds(
        lambda: torch.autograd.grad(
            forward(*inputs, micro_batch, length, bias, window, 0.1), inputs, upstream
        )
    )


@part(seconds=120)
def attention(session):
    """Back ends against the quadratic reference in float64, forward and gradients; then their
    speed."""
    config = session.config("fineweb")
    windows = sorted({window for _, pair in config.windows for window in pair})
    heads, dim = config.model_dim // config.head_dim, config.head_dim
    length = 256 if session.tiny else 2048

    def measure(label, name, tolerances):
        for dtype, tolerance in tolerances.items():
            worst, where = attention_errors(session, name, dtype, windows, length, heads, dim)
            text = " ".join(f"{key} {error:.1e}" for key, error in worst.items())
            session.report(
                f"{label} {str(dtype)[6:]}",
                all(error < tolerance for error in worst.values()),
                f"relative errors {text} ({where})",
                errors=worst,
                tolerance=tolerance,
            )
        for window in (windows[0], windows[-1]):
            ms = attention_milliseconds(
                session, name, window, config.micro_batch_tokens, heads, dim
            )
            session.report(
                f"{label} speed",
                None,
                f"{ms:.2f} ms forward and backward of {config.micro_batch_tokens} "
                f"tokens, window {window}",
                ms=ms,
                window=window,
            )

    measure("sdpa", "sdpa", {torch.float32: 2e-5, torch.bfloat16: 2e-2})
    if session.cuda:
        measure("varlen FA2", "varlen", {torch.bfloat16: 2e-2})
        try:
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl("FA3")
        except Exception as error:  # whatever an absent or unfit package raises
            session.report("varlen FA3", None, f"not available: {type(error).__name__}")
            return
        measure("varlen FA3", "varlen", {torch.bfloat16: 2e-2})


# ----- update rules


def movement(function, weight, device, dtype, *tensors):
    """What function(weight, *tensors) adds to a weight in place, from copies of all on the device;
    float64, CPU."""
    weight_there, *there = (tensor.to(device, dtype, copy=True) for tensor in (weight, *tensors))
    function(weight_there, *there)
    return weight_there.double().cpu() - weight.double()


def zero_state(weight):
    """What the rules keep of a bank (k, m, n) on its device, less factors and bases, before the
    first step."""

    def zeros(*shape):
        return torch.zeros(len(weight), *shape, device=weight.device)

    rows, columns = weight.shape[1:]
    return {
        "momentum": zeros(rows, columns),
        "moment": zeros(rows, columns),
        "second": zeros(rows, 1),
        "count": zeros(1, 1),
    }


def update_bank(rule, weight, grads, state, lr, decay, dtype=torch.float32):
    """Take steps of a rule of the hidden matrices, in place, as one rank does."""
    for step, grad in enumerate(grads, start=1):
        train_gpt.MATRIX_RULES[rule].update(
            weight, grad, state, train_gpt.Hyper(step, lr, decay, 0.9, (0.9, 0.95), dtype)
        )


def check_adam(session, shape, generator):
    weight, *grads = torch.randn(4, *shape, generator=generator)

    def update(weight, *grads):
        state = {key: torch.zeros_like(weight) for key in ("first", "second")}
        for step, grad in enumerate(grads, start=1):
            train_gpt.adam_update(
                weight, grad, state, train_gpt.Hyper(step, 0.01, 0.1, 0.9, (0.9, 0.95), None)
            )

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
            update_bank("muon", weight, grads, zero_state(weight), 0.02, 0.1, dtype)

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
    """The updates as they are on CUDA, a handful of kernels, against the same functions outside of
    torch.compile."""
    weight, *grads = torch.randn(4, *shape, generator=generator)
    for name, rule in (("adam", train_gpt.ADAM), ("muon", train_gpt.MATRIX_RULES["muon"])):

        def moved(step):
            def update(weight, *grads):
                state = {
                    **zero_state(weight),
                    "first": torch.zeros_like(weight),
                    "second": torch.zeros_like(weight),
                }
                state["second"] = (
                    zero_state(weight)["second"] if name == "muon" else state["second"]
                )
                for number, grad in enumerate(grads, start=1):
                    step(
                        rule.update,
                        weight,
                        grad,
                        1,
                        state,
                        train_gpt.Hyper(number, 0.01, 0.1, 0.9, (0.9, 0.95), torch.float32),
                    )

            return movement(update, weight, session.device, torch.float32, *grads)

        error = relative_error(moved(train_gpt.compiled_updates()), moved(train_gpt.take_step))
        session.report(
            f"compiled {name}",
            error < 1e-3,
            f"relative error {error:.1e} against the plain one, after 3 steps",
            error=error,
        )


def check_table(session, config, generator):
    """Two steps of the n-gram table's rows, through NgramTable itself."""
    tokens, rng = 16 * 256, np.random.default_rng(0)
    config = dataclasses.replace(config, ngram_rows=4096)
    rows = rng.integers(0, config.ngram_rows, (tokens, 3)).astype(np.int32)
    signs = rng.choice((-1, 1), (tokens, 3)).astype(np.float32)
    weight, grad = (
        torch.randn(count, config.model_dim, generator=generator)
        for count in (config.ngram_rows, tokens)
    )

    def update(weight, grad):
        table = train_gpt.NgramTable(config, train_gpt.Runtime(weight.device.type))
        table.weight.copy_(weight)
        table.pull(train_gpt.plan_rows(rows, signs, config, table.runtime)[0])
        for step in range(2):
            table.accumulate(grad / tokens, tokens)
            table.reduce(step)
            table.update(step, 1.0)
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


@part(seconds=60)
def updates(session):
    """Update rules on the device against the same functions on the CPU; then their speed."""
    config, generator = session.config("fineweb"), torch.Generator().manual_seed(0)
    dim, mlp_dim = config.model_dim, config.mlp_dim
    check_adam(session, (dim, mlp_dim), generator)
    check_muon(session, "square", (4, dim, dim), generator)
    check_muon(session, "tall", (2, mlp_dim, dim), generator)
    if session.cuda:  # where they are compiled
        check_compiled(session, (4, dim, dim), generator)
    check_table(session, config, generator)

    value = torch.randn(dim, dim, generator=generator).to(session.device)
    high, low = (torch.empty_like(value, dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
    train_gpt.split_mantissa(value, high, low)
    session.report(
        "mantissa",
        torch.equal(train_gpt.join_mantissa(high, low), value),
        "float32 split into bfloat16 and 16 more bits, and joined again",
    )

    layers = config.num_layers
    for label, shape in (
        ("attention", (4 * layers, dim, dim)),
        ("mlp", (2 * layers, mlp_dim, dim)),
    ):
        weight, grad = (torch.randn(shape, device=session.device) for _ in range(2))
        state = zero_state(weight)
        ms = session.milliseconds(
            lambda: update_bank("muon", weight, [grad], state, 1e-6, 0.0, torch.bfloat16), repeats=5
        )
        session.report(
            f"muon speed, {label} bank", None, f"{ms:.2f} ms for {'x'.join(map(str, shape))}", ms=ms
        )


@part(seconds=60)
def eigenbases(session):
    """Eigenbases and the soap rules on the device against the CPU: every method of refreshing, then
    one step a rule."""
    generator, size = torch.Generator().manual_seed(0), 32 if session.tiny else 256
    factor, basis = batched_qr.training_factors(4, size, torch.device("cpu"))
    weight, grad = torch.randn(2, 4, size, size, generator=generator)

    def found_on(device):
        def side(name):
            return {
                f"{name}_factor": factor.to(device, copy=True),
                f"{name}_basis": basis.to(device, copy=True),
            }

        found = {}
        for method in ("eigh", "householder", "cholesky"):
            bank = {
                **side("row"),
                "moment": torch.ones(4, size, size, device=device),
                "rejects": torch.zeros(4, dtype=torch.int32, device=device),
            }
            train_gpt.refresh_eigenbases([bank], method)
            bases, rejects = bank["row_basis"], int(bank["rejects"].sum())
            leading = bases[:, :, : size // 8]
            # the space they span, whatever their signs
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

            def update(weight, grad):
                state = {**zero_state(weight), **side("row"), **side("column")}
                state["moment"] += rule == "soap_muon"
                update_bank(rule, weight, [grad], state, 0.1, 0.1)

            found[rule] = movement(update, weight, device, torch.float32, grad)
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
    """The nano track, compiled, on every attention back end: warm-up restored, and the validity
    gates."""
    for name in ("sdpa", "varlen") if session.cuda else ("sdpa",):
        config = session.config("nano", steps=12, attention=name, val_tokens=8192)
        shards, _, val = train_gpt.open_corpus(config)
        trainer = session.trainer(config)
        # It raises unless the state is bitwise what it was.
        seconds, _ = common.timed(lambda: train_gpt.warm_up(trainer), session.device)
        session.report(
            f"warm-up restored, {trainer.attention_name}",
            True,
            f"bitwise; it took {seconds:.1f} s",
            seconds=seconds,
        )
        # a model at its start hardly looks at other tokens
        train_some(trainer, shards, config.steps)
        for label, check in train_gpt.GATES.items():
            session.report(
                f"{label}, {trainer.attention_name}",
                check(trainer, config.steps, val),
                f"after {config.steps} steps",
            )


@part(seconds=100)
def trajectory(session):
    """Twenty float32 steps of the nano track, compiled on the device, against the CPU, not
    compiled."""
    steps = 4 if session.tiny else 20
    losses, plain = {}, {"device": "cpu", "compile": False}
    for key, changes in (("device", {}), ("cpu", plain), ("nudged", plain)):
        config = session.config("nano", steps=steps, dtype="float32", **changes)
        shards, *_ = train_gpt.open_corpus(config)
        trainer, generator = session.trainer(config), torch.Generator().manual_seed(0)
        for param in trainer.model.parameters() if key == "nudged" else ():
            param.data *= 1 + NUDGE * torch.randn(param.shape, generator=generator)
        losses[key] = [loss.item() for loss in train_some(trainer, shards, steps)[0]]
    apart, rounding = (
        max(abs(a - b) for a, b in zip(losses[key], losses["cpu"], strict=True))
        for key in ("device", "nudged")
    )
    first = abs(losses["device"][0] - losses["cpu"][0])
    session.report(
        "device against CPU",
        apart < 10 * rounding and first < 1e-4,
        f"training losses differ by at most "
        f"{apart:.1e} over {steps} steps, by {first:.1e} at the first; weights that begin with relative "
        f"errors of {NUDGE} differ by {rounding:.1e}",
        losses=losses,
    )


# ----- the fineweb track


def time_phases(session, trainer, shards):
    """Time steps in each phase of the schedule, and report them."""
    config = trainer.config

    def phase(step):
        return train_gpt.phase_at(config, step), train_gpt.at_step(
            config.micro_batches, step, config
        )

    firsts = [step for step in range(config.steps) if step == 0 or phase(step) != phase(step - 1)]
    for number, (first, end) in enumerate(
        zip(firsts, [*firsts[1:], config.steps], strict=True), start=1
    ):
        timed = min(2 if session.tiny else 8, end - first - 3)
        if timed < 1:
            session.report(
                f"phase {number}", None, f"only {end - first} steps of {config.steps}: not timed"
            )
            continue
        train_some(trainer, shards, 2, first)
        if session.cuda:
            torch.cuda.reset_peak_memory_stats()
        losses, seconds = train_some(trainer, shards, timed, first + 2)
        seconds /= timed
        tokens = train_gpt.at_step(config.micro_batches, first, config) * config.micro_batch_tokens
        (memory,) = trainer.runtime.peak_memory_mib()
        session.report(
            f"phase {number}",
            bool(torch.isfinite(losses[-1])),
            f"{1000 * seconds:.1f} ms a step of {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s, peak "
            f"{memory:,} MiB",
            step_ms=1000 * seconds,
            tokens_per_second=tokens / seconds,
            peak_memory_mib=memory,
        )


def measure_first_phase(session):
    """Ten steps of the fineweb track's first phase, compiled. Returns (milliseconds a step, the
    Trainer, losses)."""
    config = session.config(
        "fineweb", steps=60, val_batch_tokens=0, val_tokens=2048 if session.tiny else 16384
    )
    shards, *_ = train_gpt.open_corpus(config)
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
    config = trainer.config
    rate = (
        train_gpt.at_step(config.micro_batches, 0, config)
        * config.micro_batch_tokens
        / (step_ms / 1000)
    )
    # Of matrices and head alone, as in a run's result.
    operations = 6 * (trainer.optimizer.matrices.size() + trainer.model.head.numel()) * rate
    mfu = 100 * operations / train_gpt.matmul_rate(session.device, getattr(torch, config.dtype))
    (memory,) = trainer.runtime.peak_memory_mib()
    session.report(
        "ten steps",
        bool(losses[-1] < losses[0]),
        f"{step_ms:.1f} ms a step, {rate:,.0f} tokens/s, {mfu:.1f} "
        f"% of a matrix product's rate, peak {memory:,} MiB, loss {losses[0]:.3f} to {losses[-1]:.3f}",
        step_ms=step_ms,
        mfu_percent=mfu,
        peak_memory_mib=memory,
    )


STEP_LINE = re.compile(r"^step:(\d+)/\d+ .*?train_time:([\d.]+)ms", re.MULTILINE)


def step_ms_of(log, warm=10, steps=30):
    """Milliseconds a step by the first so many steps of a log behind the warm ones; None while it
    has fewer."""
    times = {int(step): float(time) for step, time in STEP_LINE.findall(log)}
    return (
        (times[warm + steps] - times[warm]) / steps
        if {warm, warm + steps} <= times.keys()
        else None
    )


@part(seconds=500)
def published(session):
    """A published single-file trainer on this GPU, where PUBLISHED_TRAINER names its file, and then
    the fineweb track's first phase. It runs in its folder, where its shards are, until its log,
    with lines like `step:40/1285 train_time:6800ms`, has told enough; the batches must be equal for
    the ratio to mean something, and are at the first stages of modded-nanogpt's and ours."""
    if not (path := os.environ.get("PUBLISHED_TRAINER")):
        session.report(
            "published trainer", None, "PUBLISHED_TRAINER=/path/to/train_gpt.py names none"
        )
        return
    script, log, began, theirs = (
        Path(path).resolve(),
        session.work / "published.log.txt",
        time.monotonic(),
        None,
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=1",
        str(script),
    ]
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
    theirs = theirs or step_ms_of(text := log.read_text(errors="replace"))
    if theirs is None:
        session.report(
            "published trainer", False, f"{script}: no 40 steps; its output ends in {text[-150:]!r}"
        )
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
    """The fineweb model, compiled, in each phase of its schedule on one device: speed and
    memory."""
    config = session.config(
        "fineweb", steps=24 if session.tiny else 60, val_tokens=2048 if session.tiny else 8 * 16384
    )
    shards, _, val = train_gpt.open_corpus(config)
    trainer = session.trainer(config)
    seconds, _ = common.timed(lambda: train_gpt.warm_up(trainer), session.device)
    session.report(
        "warm-up restored",
        True,
        f"bitwise; it took {seconds:.1f} s with compilation; attention "
        f"{trainer.attention_name}, compile {trainer.compile_name}",
        seconds=seconds,
    )
    time_phases(session, trainer, shards)
    loader = train_gpt.TrainLoader(config, shards, trainer.runtime, config.steps - 6)
    seconds, _ = common.timed(lambda: [loader.next() for _ in range(6)], session.device)
    loader.close()
    tokens = 6 * config.micro_batches[-1][1] * config.micro_batch_tokens
    session.report(
        "loader alone",
        None,
        f"{tokens / seconds:,.0f} tokens/s",
        tokens_per_second=tokens / seconds,
    )
    seconds, _ = common.timed(lambda: trainer.evaluate(config.steps, val), session.device)
    session.report(
        "validation",
        None,
        f"{config.val_tokens / seconds:,.0f} tokens/s",
        tokens_per_second=config.val_tokens / seconds,
    )
    for label, check in train_gpt.GATES.items():
        if session.cuda:
            torch.cuda.reset_peak_memory_stats()
        session.report(
            label,
            check(trainer, config.steps, val),
            f"on the trained weights, peak {trainer.runtime.peak_memory_mib()[0]:,} MiB",
        )


# ----- whole runs of the trainer


def run_trainer(session, config, processes, timeout):
    """Start train_gpt.py as its users do. Returns (exit status, last line, result.json or None)."""
    run_id = f"{session.name}-{processes}"
    defaults = dataclasses.asdict(train_gpt.TRACKS[config.track])
    changes = {
        key: value for key, value in dataclasses.asdict(config).items() if value != defaults[key]
    }
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
    lines = [
        line for line in output.splitlines() if line.startswith("status:")
    ] or output.splitlines()[-1:]
    result = session.work / "logs" / run_id / "result.json"
    return (
        process.returncode,
        lines[-1] if lines else "no output",
        json.loads(result.read_text()) if result.is_file() else None,
    )


@part(seconds=150)
def nano_run(session):
    """The nano track from start to end through the trainer, with a short schedule."""
    config = session.config(
        "nano",
        steps=6 if session.tiny else 100,
        val_every=0,
        val_tokens=2048 if session.tiny else 131_072,
    )
    status, last, result = run_trainer(session, config, processes=1, timeout=130)
    if status or not result:
        session.report("run", False, f"exit status {status}: {last}")
        return
    # log(257) is 5.55; a model that learns passes 2 in 50 steps
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
    config = session.config(
        "fineweb",
        steps=6 if session.tiny else 24,
        val_every=0,
        log_every=2,
        val_tokens=2048 if session.tiny else 8 * 16384,
    )
    counts = [count for _, count in config.micro_batches]
    processes = max(n for n in range(1, gpus + 1) if all(count % n == 0 for count in counts))
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
    """Run a part's process, at most so many seconds. Returns its rows, one more if it did not end
    well."""
    log = Path(work, f"{name}.log")
    failure, began = "", time.monotonic()
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if status := process.wait(timeout=seconds):
                tail = [
                    line for line in log.read_text(errors="replace").splitlines() if line.strip()
                ]
                failure = f"exit status {status}: {tail[-1] if tail else 'no output'}"
        except subprocess.TimeoutExpired:
            failure = f"timed out after {seconds:.0f} s"
        finally:
            stop_group(process)
    rows_file = Path(work, f"{name}.jsonl")
    rows = (
        [json.loads(line) for line in rows_file.read_text().splitlines()]
        if rows_file.is_file()
        else []
    )
    if failure:
        rows.append({"part": name, "item": "ended early", "ok": False, "text": failure[:300]})
    failed = sum(row["ok"] is False for row in rows)
    if failed:
        print("\n".join(log.read_text(errors="replace").splitlines()[-15:]), file=sys.stderr)
    print(
        f"{name}: {len(rows)} rows, {failed} failed, {time.monotonic() - began:.0f} s", flush=True
    )
    return rows


def stop_group(process):
    """End a process and all that it started: politely first, so that torchrun takes its workers
    along."""
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
    facts, rows, began = common.environment(torch.device(arguments.device)), [], time.monotonic()
    print(common.environment_line(facts), flush=True)
    with tempfile.TemporaryDirectory() as work:
        for name in arguments.only or BY_WORTH:
            left, limit = BUDGET_SECONDS - (time.monotonic() - began), PARTS[name][1]
            if left < limit:
                rows.append(
                    {
                        "part": name,
                        "item": "not started",
                        "ok": None,
                        "text": f"may take {limit} s, "
                        f"and {left:.0f} of {BUDGET_SECONDS} s are left; run it with --only {name}",
                    }
                )
                continue
            command = [
                sys.executable,
                __file__,
                "--only",
                name,
                "--device",
                arguments.device,
                "--work",
                work,
                *["--tiny"] * arguments.tiny,
            ]
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
    print(
        f"\n{table}\n\n{len(rows)} rows, {failed} failed, {seconds:.0f} s; {arguments.results / name}.md"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
