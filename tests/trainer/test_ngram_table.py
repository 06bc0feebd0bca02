"""The table on 1 to 4 ranks against slow dense references. benchmarks/ngram_exchange.py counts the
bytes that it sends."""

import functools
import itertools
import math
import os
import threading

import numpy as np
import pytest
import torch
from optimizer_cases import batch_of

import ranks
import train_gpt
from helpers import NO_TABLE, assert_bitwise, byte_documents, make_trainer, read, tiny_config
from train_gpt import ConfigError, NgramTable, Runtime, group_equal, plan_rows


@pytest.mark.parametrize("count", [0, 1, 7, 3000])
def test_group_equal_against_a_dict(count):
    some = [0, 1, 2, 7, 65535, 65536, 2**20, 2**20 + 65536, 2**31 - 1]
    ids = np.random.default_rng(count).choice(some, size=count).astype(np.int32)
    expected = {}
    for position, number in enumerate(ids.tolist()):
        expected.setdefault(number, []).append(position)
    distinct, positions, offsets = group_equal(ids)
    assert distinct.tolist() == sorted(expected)
    assert distinct.dtype == positions.dtype == offsets.dtype == np.int32
    bounds = itertools.pairwise([*offsets.tolist(), count])
    found = [positions[low:high].tolist() for low, high in bounds]
    assert dict(zip(distinct.tolist(), found, strict=True)) == expected


# ----- made-up reads and gradients

ORDERS = 2
DIM = 16
MICRO_BATCHES = 12
CASES = {"some rows": (101, 6), "ranges that are empty": (5, 4), "a row": (1, 3)}  # rows, steps


@functools.cache
def draw(name, step):
    """What the micro-batches of a step read: of each (rows (n, O), signs (n, O), gradients of the
    tokens' losses (n, DIM))."""
    rng = np.random.default_rng([*name.encode(), step])
    parts = []
    for _ in range(MICRO_BATCHES):
        shape = 2 + step % 3, ORDERS
        rows = (rng.random(shape) ** 2 * CASES[name][0]).astype(np.int32)  # low ones most
        signs = rng.choice([-1.0, 1.0], shape).astype(np.float32)
        parts.append((rows, signs, rng.standard_normal((len(rows), DIM)).astype(np.float32)))
    return parts


def start_of(name):
    """The table's full state before the first step."""
    rows, rng = CASES[name][0], np.random.default_rng(0)
    return {
        "weight": torch.from_numpy(rng.standard_normal((rows, DIM))).float(),
        "second": torch.from_numpy(rng.random(rows)).float(),
    }


def config_of(name):
    rows, steps = CASES[name]
    return tiny_config(model_dim=DIM, head_dim=4, ngram_rows=rows, steps=steps)


def take_steps(name, runtime):
    """The case's steps with the table's own communication. Returns what they left."""
    config = config_of(name)
    table = NgramTable(config, runtime)
    table.load({"rows": start_of(name)})

    def read_step(step):
        """A step as this rank's loader and model hand it over: (plan, rows, gradients)."""
        parts = draw(name, step)[runtime.rank :: runtime.world_size]
        rows, signs, grads = (np.concatenate(column) for column in zip(*parts, strict=True))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(train_gpt, "rows_of", lambda passages, config: (rows, signs))
            plan = plan_rows([], config, runtime, runtime.loader_group)
        return plan, rows, torch.from_numpy(grads).to(runtime.device)

    seen = []  # (step, rows, their values)
    upcoming = read_step(0)
    for step in range(config.steps):
        plan, rows, grads = upcoming
        values = table.values_of(plan)[plan.slots].cpu()
        seen.append((step, torch.from_numpy(rows), values))
        upcoming = read_step(step + 1) if step + 1 < config.steps else None
        table.expect(plan, list(grads.chunk(2)), upcoming and upcoming[0])
        pending = table.reduce(step)
        table.receive(step, table.update(step, 1 - 0.1 * step, pending))
    return {"full": ranks.whole_state(table)["rows"], "held": len(table.weight), "seen": seen}


@pytest.fixture(scope="module")
def results_of():
    """results_of(world size): what the steps of all cases left on each rank."""

    def steps(runtime):
        return {name: take_steps(name, runtime) for name in CASES}

    return functools.cache(lambda world_size: ranks.on_ranks(world_size, steps))


# ----- values, against the dense update of the same rule


@functools.cache
def dense(name):
    """The whole table before each step and after the last, and its moments at the end: in float64,
    every row updated with the full matrix of gradients."""
    config, start = config_of(name), start_of(name)
    weight, second = start["weight"].double(), start["second"].double()
    history = [weight.clone()]
    for step in range(config.steps):
        grads = torch.zeros_like(weight)
        kept = torch.ones_like(second)
        for part in draw(name, step):
            ids, signs, token_grads = map(torch.from_numpy, part)
            kept[ids.flatten()] = 0.98
            for column in range(ORDERS):
                signed = signs[:, column, None].double() * token_grads
                grads.index_add_(0, ids[:, column], signed)
        second = kept * second + grads.square().mean(1)
        floor = config.ngram_floor * (64 / config.model_dim) ** 0.75
        weight -= config.ngram_lr * grads / (second + floor**2).sqrt()[:, None]
        history.append(weight.clone())
    return torch.stack(history), second


def assert_near(actual, expected):
    """Each row (..., d) differs by at most a millionth of its norm."""
    assert actual.shape == expected.shape
    differences, sizes = (rows.norm(dim=-1) for rows in (actual.double() - expected, expected))
    assert (differences <= 1e-6 * sizes).all(), (differences / sizes).max()


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_the_table_equals_the_dense_update(name, world_size, results_of):
    """What is read, what is left, and what a checkpoint keeps of it, on all ranks."""
    history, second = dense(name)
    reads = [rows.ravel() for step in range(len(history) - 1) for rows, _, _ in draw(name, step)]
    never = np.setdiff1d(np.arange(len(second)), np.concatenate(reads))
    for rank, results in enumerate(results_of(world_size)):
        left = results[name]
        assert_near(left["full"]["weight"], history[-1])
        assert_near(left["full"]["second"][:, None], second[:, None])
        assert_bitwise(left["full"]["weight"][never], start_of(name)["weight"][never])
        chunk = math.ceil(len(second) / world_size)
        assert left["held"] == max(0, min(chunk, len(second) - rank * chunk))
        for number, rows, values in left["seen"]:
            assert_near(values, history[number, rows.long()])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_table_on_a_gpu_is_the_table_on_the_cpu():
    full = take_steps("some rows", Runtime("cuda"))["full"]
    history, second = dense("some rows")
    assert_near(full["weight"], history[-1])
    assert_near(full["second"][:, None], second[:, None])


@pytest.mark.parametrize("changes", [NO_TABLE, {"ngram_lr": 0.0}], ids=str)
def test_a_table_without_orders_or_a_rate_never_learns(changes):
    trainer = make_trainer(**changes)
    summed = read(trainer, byte_documents(300))[1]
    assert not any(trainer.table.is_due(step) for step in range(4))
    if changes == NO_TABLE:
        assert not summed.any() and trainer.table.weight.shape == (0, 32)
        trainer.table.load(trainer.table.full_state())
    else:
        assert summed.any() and not summed.requires_grad


def test_a_score_between_gradients_and_step_changes_nothing():
    ends = []
    for is_scored in (False, True):
        trainer = make_trainer()
        batch = batch_of(trainer, byte_documents(300))
        trainer.accumulate(0, batch)
        if is_scored:
            trainer.score(0, np.array(byte_documents(300, seed=1), np.uint16), 0)
        trainer.optimizer.step(0, 1.0)
        ends.append([group.tensors() for group in trainer.optimizer.groups])
    assert_bitwise(*ends)


def test_a_failure_in_the_loaders_thread_of_one_rank_is_told_in_one_line(
    tiny, tmp_path, monkeypatch
):
    honest = train_gpt.ngram_rows

    def wrong(*words):
        if threading.current_thread() is not threading.main_thread() and os.environ["RANK"] == "1":
            raise ConfigError("no rows")
        return honest(*words)

    monkeypatch.setattr(train_gpt, "ngram_rows", wrong)  # ranks inherit it
    run = ranks.train(tmp_path, {**tiny, "steps": 40, "run_id": "wrong"}, world_size=2)
    assert run.code != 0
    assert run.stderr.splitlines().count("rank 1: status:error no rows") == 1
    assert run.lines[-1].startswith("status:") and "status:ok" not in run.stdout
