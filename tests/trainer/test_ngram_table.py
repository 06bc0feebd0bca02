"""The table on 1 to 4 ranks against slow dense references: plans, values, bytes on the wire."""

import dataclasses
import functools
import itertools
import os
import threading

import numpy as np
import pytest
import torch

import ranks
import train_gpt
from helpers import NO_TABLE, assert_bitwise, byte_documents, make_trainer, read, tiny_config
from train_gpt import ConfigError, NgramTable, Runtime, group_equal, plan_rows

SEVERAL = [2, 3, pytest.param(4, marks=pytest.mark.slow)]
ALL = pytest.mark.parametrize("world_size", [1, *SEVERAL])


# ----- groups


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


@dataclasses.dataclass(frozen=True)
class Case:
    """A table, and what is read of it."""

    rows: int
    steps: int
    tokens: int = 3  # of a micro-batch in the first step; one and two more in the next ones
    picks: str = "any"  # any | own | none: which rows rank 0 reads, others read any


CASES = {
    "twelve steps": Case(rows=101, steps=12, tokens=2),
    "ranges that are empty": Case(rows=5, steps=4),
    "a row": Case(rows=1, steps=4),
    "own rows alone": Case(rows=101, steps=3, picks="own"),
    "an idle rank": Case(rows=20, steps=3, picks="none"),
    "many tokens": Case(rows=3000, steps=2, tokens=60),
}


def owner_bounds(case, world_size, rank):
    """The rows [low, high) that a rank owns."""
    chunk = -(-case.rows // world_size)
    return min(case.rows, rank * chunk), min(case.rows, (rank + 1) * chunk)


def lr_multiplier(case, step):
    return 1 - 0.5 * step / case.steps


@functools.cache
def draw(name, world_size, step):
    """What the micro-batches of a step read, of which the m-th is rank m % world_size's.

    Returns a list of (rows (n, O), signs (n, O), gradients of the tokens' losses (n, DIM)).
    """
    case, rng = CASES[name], np.random.default_rng([*name.encode(), world_size, step])
    parts = []
    for micro_batch in range(MICRO_BATCHES):
        count, low, high = case.tokens + step % 3, 0, case.rows
        if micro_batch % world_size == 0 and case.picks == "none":
            count = 0
        if micro_batch % world_size == 0 and case.picks == "own":
            low, high = owner_bounds(case, world_size, 0)
        # Low rows are read most.
        ids = (low + rng.random((count, ORDERS)) ** 2 * (high - low)).astype(np.int32)
        signs = rng.choice([-1.0, 1.0], size=ids.shape)
        grads = 0.3 * rng.standard_normal((count, DIM))
        parts.append((ids, signs.astype(np.float32), grads.astype(np.float32)))
    return parts


def start_of(name):
    """The table's full state before the first step."""
    rows, rng = CASES[name].rows, np.random.default_rng(0)
    return {
        "weight": torch.from_numpy(rng.standard_normal((rows, DIM))).float(),
        "second": torch.from_numpy(rng.random(rows)).float(),
    }


# ----- one rank's steps


def plan_step(name, step, config, runtime):
    """A step as this rank's loader and model would hand it over: (plan, rows, gradients of each
    micro-batch)."""
    parts = draw(name, runtime.world_size, step)[runtime.rank :: runtime.world_size]
    rows, signs = (np.concatenate([part[number] for part in parts]) for number in (0, 1))
    grads = [torch.from_numpy(grad).to(runtime.device) for _, _, grad in parts]
    group = runtime.loader_group
    plan = plan_rows(rows, signs, config, runtime, group, "ngram_indices")
    return plan, rows, grads


def read_outside_training(table, rows):
    """The values of rows (n, 1), as validation reads them."""
    signs = np.ones(rows.shape, dtype=np.float32)
    plan = plan_rows(rows, signs, table.config, table.runtime, None, "validation")
    return table.values_of(plan, "validation")[plan.slots].cpu()


def table_config(name):
    shape = {"model_dim": DIM, "head_dim": 4, "ngram_rows": CASES[name].rows}
    return tiny_config(**shape, steps=CASES[name].steps)


def take_steps(name, runtime):
    """The case's steps with the table's own communication. Returns what they left."""
    case = CASES[name]
    config = table_config(name)
    table = NgramTable(config, runtime)
    table.load({"rows": start_of(name)})
    held = table.weight.shape
    runtime.ledger.clear()
    seen = []  # (step, rows, their values)
    upcoming = plan_step(name, 0, config, runtime)
    for step in range(case.steps):
        plan, rows, grads = upcoming
        if step % 10 == 1:  # a validation between the pull and its use
            every_other = np.arange(runtime.rank, config.ngram_rows, 2, dtype=np.int32)[:, None]
            values = read_outside_training(table, every_other)
            seen.append((step, torch.from_numpy(every_other), values))
        values = table.values_of(plan)[plan.slots].cpu()
        seen.append((step, torch.from_numpy(rows), values))
        for grad in grads:
            table.grads.append(grad)
        if step + 1 < case.steps:
            upcoming = plan_step(name, step + 1, config, runtime)
        pending = table.reduce(step)
        table.receive(step, table.update(step, lr_multiplier(case, step), pending))
        if step + 1 < case.steps:
            table.start_pull(upcoming[0])
    ledger = {"/".join(key): size for key, size in runtime.ledger.items()}
    full = ranks.whole_state(table)
    table.load(full)
    return {
        "full": full["rows"],
        "again": ranks.whole_state(table)["rows"],
        "held": held,
        "seen": seen,
        "ledger": ledger,
    }


@pytest.fixture(scope="module")
def results_of():
    """results_of(world size): what the steps of all cases left on each rank."""

    @functools.cache
    def results(world_size):
        for name, case in CASES.items():  # ranks inherit what this process has drawn
            for step in range(case.steps):
                draw(name, world_size, step)

        def steps(runtime):
            return {name: take_steps(name, runtime) for name in CASES}

        return ranks.on_ranks(world_size, steps)

    return results


# ----- values, against the dense update of the same rule


@functools.cache
def dense(name, world_size):
    """The whole table before each step and after the last, and its moments at the end: in float64,
    every row updated with the full matrix of gradients."""
    case, config = CASES[name], table_config(name)
    start = start_of(name)
    weight, second = start["weight"].double(), start["second"].double()
    history = [weight.clone()]
    for step in range(case.steps):
        grads = torch.zeros_like(weight)
        kept = torch.ones_like(second)
        for ids, signs, token_grads in draw(name, world_size, step):
            kept[torch.from_numpy(ids).flatten()] = 0.98
            for column in range(ORDERS):
                signed = signs[:, column, None].astype(np.float64) * token_grads
                grads.index_add_(0, torch.from_numpy(ids[:, column]), torch.from_numpy(signed))
        lr = config.ngram_lr * lr_multiplier(case, step)
        second = kept * second + grads.square().mean(1)
        floor = config.ngram_floor * (64 / config.model_dim) ** 0.75
        weight -= lr * grads / (second + floor**2).sqrt()[:, None]
        history.append(weight.clone())
    return torch.stack(history), second


def assert_near(actual, expected):
    """Each row (..., d) differs by at most a millionth of its norm."""
    assert actual.shape == expected.shape
    differences, sizes = (rows.norm(dim=-1) for rows in (actual.double() - expected, expected))
    assert (differences <= 1e-6 * sizes).all(), (differences / sizes).max()


def distinct_reads(name, world_size, step):
    """The rows that each rank reads in a step."""
    ids = [ids.ravel() for ids, _, _ in draw(name, world_size, step)]
    return [np.unique(np.concatenate(ids[rank::world_size])) for rank in range(world_size)]


@ALL
@pytest.mark.parametrize("name", CASES)
def test_the_table_equals_the_dense_update(name, world_size, results_of):
    """What is read, what is left, and what a checkpoint keeps of it, on all ranks."""
    history, second = dense(name, world_size)
    start = start_of(name)
    steps = range(CASES[name].steps)
    reads = [rows for step in steps for rows in distinct_reads(name, world_size, step)]
    never = np.setdiff1d(np.arange(len(second)), np.concatenate(reads))
    for rank, results in enumerate(results_of(world_size)):
        left = results[name]
        assert_near(left["full"]["weight"], history[-1])
        assert_near(left["full"]["second"][:, None], second[:, None])
        assert_bitwise(left["full"]["weight"][never], start["weight"][never])
        assert_bitwise(left["again"], left["full"])
        low, high = owner_bounds(CASES[name], world_size, rank)
        assert left["held"] == (high - low, DIM)
        assert {number for number, _, _ in left["seen"]} == set(range(len(history) - 1))
        for number, rows, values in left["seen"]:
            assert_near(values, history[number, rows.long()])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_table_on_a_gpu_is_the_table_on_the_cpu():
    full = take_steps("twelve steps", Runtime("cuda"))["full"]
    history, second = dense("twelve steps", 1)
    assert_near(full["weight"], history[-1])
    assert_near(full["second"][:, None], second[:, None])


# ----- a table that does not learn


def test_without_orders_the_table_is_empty_and_frozen():
    trainer = make_trainer(**NO_TABLE)
    table = trainer.table
    assert table.size == 0 and table.weight.shape == (0, 32)
    assert table.is_frozen and not table.is_due(3)
    assert read(trainer, byte_documents(300))[1] is None
    table.load(table.full_state())


def test_a_table_without_a_learning_rate_is_read_but_never_learns():
    trainer = make_trainer(ngram_lr=0.0)
    summed = read(trainer, byte_documents(300))[1]
    assert summed.any() and not summed.requires_grad
    assert not any(trainer.table.is_due(step) for step in range(4))


# ----- the ledger, against an independent count


def counted(name, world_size, me):
    """{collective/name: bytes} that rank `me` should have sent: each foreign row once there and
    once back, however many tokens read it."""
    sent = {"all_to_all/ngram_indices": 0, "all_to_all/ngram_table": 0}

    def count_asked(reads, owner):
        low, high = owner_bounds(CASES[name], world_size, owner)
        return np.sum((reads >= low) & (reads < high))

    for step in range(CASES[name].steps):
        reads = distinct_reads(name, world_size, step)
        for peer in range(world_size):
            if peer != me:
                asked, answered = count_asked(reads[me], peer), count_asked(reads[peer], me)
                for key, rows, row_size in (
                    ("all_to_all/ngram_indices", 1, 4),  # how many rows
                    ("all_to_all/ngram_indices", asked, 4),  # which ones
                    ("all_to_all/ngram_table", answered, 4 * DIM),  # their values
                    ("all_to_all/ngram_table", asked, 4 * DIM),  # their gradients
                ):
                    sent[key] += rows * row_size
    return sent if world_size > 1 else {}


@ALL
@pytest.mark.parametrize("name", CASES)
def test_the_ledger_is_an_independent_count(name, world_size, results_of):
    for rank, results in enumerate(results_of(world_size)):
        ledger = dict(results[name]["ledger"])
        ledger.pop("all_to_all/validation", None)
        assert ledger == counted(name, world_size, rank)


# ----- failures on the way


def spoil_second_rank():
    """The hash fails on rank 1, in the loader's thread alone."""
    honest = train_gpt.ngram_rows

    def wrong(passage, config):
        if threading.current_thread() is not threading.main_thread() and os.environ["RANK"] == "1":
            raise ConfigError("no rows")
        return honest(passage, config)

    train_gpt.ngram_rows = wrong


def test_a_failure_in_the_loaders_thread_of_one_rank_is_told_in_one_line(tiny, tmp_path):
    values = {**tiny, "steps": 40, "run_id": "wrong"}
    run = ranks.train(tmp_path, values, world_size=2, before=spoil_second_rank)
    assert run.code != 0
    assert run.stderr.splitlines().count("rank 1: status:error no rows") == 1
    assert run.lines[-1].startswith("status:") and "status:ok" not in run.stdout


def test_a_diverged_run_ends_while_loaders_talk_to_each_other(tiny, tmp_path):
    values = {**tiny, "steps": 40, "adam_lr": 1e30, "run_id": "diverging"}
    run = ranks.train(tmp_path, values, world_size=2)
    assert run.code == 1 and run.lines[-1].startswith("status:nan "), run.stdout + run.stderr
    assert 1 <= len(run.train_losses) < 40
