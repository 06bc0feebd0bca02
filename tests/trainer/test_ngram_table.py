"""The table on 1 to 4 ranks against slow dense references: plans, values, bytes on the wire."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import sabotage
import torch

import ranks
from helpers import INDEX, NO_TABLE, assert_bitwise, byte_documents, make_trainer, read, tiny_config
from train_gpt import (
    ConfigError,
    NgramTable,
    Runtime,
    group_equal,
    plan_rows,
    stable_order,
    sum_groups,
    wait,
)

SEVERAL = [2, 3, pytest.param(4, marks=pytest.mark.slow)]
ALL = pytest.mark.parametrize("world_size", [1, *SEVERAL])


# ----- groups


@pytest.mark.parametrize("count", [0, 1, 7, 3000])
def test_group_equal_against_a_dict(count):
    some = [0, 1, 2, 7, 65535, 65536, 2**20, 2**20 + 65536, 2**31 - 1]
    ids = np.random.default_rng(count).choice(some, size=count).astype(np.int32)
    assert np.array_equal(stable_order(ids), np.argsort(ids, kind="stable"))
    expected = {}
    for position, number in enumerate(ids.tolist()):
        expected.setdefault(number, []).append(position)
    distinct, positions, offsets = group_equal(ids)
    assert distinct.tolist() == sorted(expected)
    assert distinct.dtype == positions.dtype == offsets.dtype == np.int32
    bounds = itertools.pairwise([*offsets.tolist(), count])
    found = [positions[low:high].tolist() for low, high in bounds]
    assert dict(zip(distinct.tolist(), found, strict=True)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("count", [0, 1, 200])
def test_sums_of_groups_against_float64(count, weighted, dtype):
    rng = np.random.default_rng(count)
    ids = rng.integers(0, 40, size=count)
    weights = torch.from_numpy(rng.standard_normal(count)).float()
    values = torch.from_numpy(rng.standard_normal((count, 5))).to(dtype)
    expected = torch.zeros(40, 5, dtype=torch.float64)
    for value, number, weight in zip(values.double(), ids, weights.double(), strict=True):
        expected[number] += value * (weight if weighted else 1)
    distinct, *groups = group_equal(ids)
    positions, offsets = map(torch.from_numpy, groups)
    sums = sum_groups(values, positions, offsets, weights[positions] if weighted else None)
    assert sums.dtype == torch.float32 and sums.shape == (len(set(ids)), 5)
    torch.testing.assert_close(sums.double(), expected[distinct], atol=1e-5, rtol=1e-5)


# ----- the plan of one process


def random_reads(count, columns, rows):
    """Row ids (count, columns) with repetitions, and their signs."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, rows, size=(count, columns)).astype(np.int32)
    return ids, rng.choice([-1.0, 0.0, 1.0], size=(count, columns)).astype(np.float32)


def plan_alone(rows, signs, micro_batches):
    return plan_rows(rows, signs, micro_batches, tiny_config(), Runtime("cpu"), None, "test")


@pytest.mark.parametrize("count, columns", [(60, 1), (60, 3), (60, 0), (0, 3)])
def test_plan_rows_against_a_dict(count, columns):
    rows, signs = random_reads(count, columns, 40)
    expected = {}
    for token, column in np.ndindex(count, columns):
        pair = (token, float(signs[token, column]))
        expected.setdefault(int(rows[token, column]), []).append(pair)
    micro_batches = count // 20
    plan = plan_alone(rows, signs, micro_batches)
    pairs = list(zip(plan.token.tolist(), plan.token_signs.tolist(), strict=True))
    bounds = itertools.pairwise([*plan.offsets.tolist(), len(pairs)])
    found = [pairs[low:high] for low, high in bounds]
    assert dict(zip(plan.owned.tolist(), found, strict=True)) == expected
    assert plan.owned.tolist() == plan.asked.tolist() == sorted(expected) and not plan.merge
    assert len(plan.slots) == len(plan.signs) == micro_batches
    assert np.array_equal(plan.slots.reshape(rows.shape), rows)  # the table itself is read
    assert np.array_equal(plan.signs.reshape(rows.shape), signs)


@pytest.mark.parametrize("bad", [-1, 1000, 2**31 - 1])
def test_rows_outside_the_table_are_refused(bad):
    rows, signs = random_reads(60, 3, 1000)
    rows[30] = 0, 999, 0
    plan_alone(rows, signs, 1)
    rows[30, 1] = bad
    with pytest.raises(ConfigError, match="rows leave the table's range 0 to 999"):
        plan_alone(rows, signs, 1)


# ----- made-up reads and gradients

ORDERS = 2
INDEX_BITS = 5
MICRO_BATCHES = 12


@dataclasses.dataclass(frozen=True)
class Case:
    """A table, and what is read of it."""

    rows: int  # 0: as many as ranks
    steps: int
    pick: str = "skewed"  # how rows are drawn, see `draw`
    tokens: int = 3  # of a micro-batch in the first step; one and two more in the next ones
    dim: int = 16


CASES = {
    "twelve steps": Case(rows=101, steps=12, tokens=2),
    "ranges that are empty": Case(rows=5, steps=4),
    "a row for each rank": Case(rows=0, steps=4),
    "own rows alone": Case(rows=101, steps=3, pick="own"),
    "one row for all": Case(rows=20, steps=3, pick="same"),
    "an idle rank": Case(rows=20, steps=3, pick="idle"),
    "wide": Case(rows=3000, steps=2, pick="uniform", tokens=60, dim=128),
}


def rows_of(case, world_size):
    return case.rows or world_size


def owner_bounds(case, world_size, rank):
    """The rows [low, high) that a rank owns."""
    rows = rows_of(case, world_size)
    chunk = (rows + world_size - 1) // world_size
    return min(rows, rank * chunk), min(rows, (rank + 1) * chunk)


def lr_multiplier(case, step):
    return 1 - 0.5 * step / case.steps


@functools.cache
def draw(name, world_size, step):
    """What the micro-batches of a step read, of which the m-th is rank m % world_size's.

    Returns a list of (rows (n, O), signs (n, O), gradients of the tokens' losses (n, dim)).
    """
    case, rng = CASES[name], np.random.default_rng([*name.encode(), world_size, step])
    parts = []
    for micro_batch in range(MICRO_BATCHES):
        rank = micro_batch % world_size
        is_idle = case.pick == "idle" and rank == 0
        shape = (0 if is_idle else case.tokens + step % 3, ORDERS)
        low, high = 0, rows_of(case, world_size)
        if case.pick == "own":
            low, high = owner_bounds(case, world_size, rank)
        skew = 1 if case.pick == "uniform" else 2  # low rows are read most
        ids = low + (rng.random(shape) ** skew * (high - low)).astype(np.int32)
        if case.pick == "same":
            ids[:] = 7
        signs = rng.choice([-1.0, 1.0, 0.0], p=[0.4, 0.4, 0.2], size=shape).astype(np.float32)
        grads = 0.3 * rng.standard_normal((len(ids), case.dim)).astype(np.float32)
        parts.append((ids, signs, grads))
    return parts


def start_of(name, world_size):
    """The table's full state before the first step."""
    case, rng = CASES[name], np.random.default_rng(0)
    rows = rows_of(case, world_size)
    index = rng.integers(0, 2**31, (1, 2**INDEX_BITS)).astype(np.int32)
    return {
        "weight": torch.from_numpy(rng.standard_normal((rows, case.dim))).float(),
        "second": torch.from_numpy(rng.random(rows)).float(),
        "index": torch.from_numpy(index),
    }


# ----- one rank's steps


def plan_step(name, step, config, runtime):
    """A step as this rank's loader and model would hand it over: (plan, rows, gradients of each
    micro-batch)."""
    parts = draw(name, runtime.world_size, step)[runtime.rank :: runtime.world_size]
    rows, signs = (np.concatenate([part[number] for part in parts]) for number in (0, 1))
    grads = [torch.from_numpy(grad).to(runtime.device) for _, _, grad in parts]
    group = runtime.loader_group
    plan = plan_rows(rows, signs, len(parts), config, runtime, group, "ngram_indices")
    return plan, rows, grads


def read_outside_training(table, rows):
    """The values of rows (n, 1), as validation reads them."""
    signs = np.ones(rows.shape, dtype=np.float32)
    plan = plan_rows(rows, signs, 1, table.config, table.runtime, None, "validation")
    values, work = table.fetch(plan, "validation")
    wait(work)
    return values[plan.slots[0]].cpu()


def table_config(name, world_size):
    case = CASES[name]
    return tiny_config(
        model_dim=case.dim,
        head_dim=4,
        ngram_rows=rows_of(case, world_size),
        steps=case.steps,
        index_bits=INDEX_BITS,
        **INDEX,
    )


def take_steps(name, runtime):
    """The case's steps with the table's own communication. Returns what they left."""
    case = CASES[name]
    config = table_config(name, runtime.world_size)
    table = NgramTable(config, runtime)
    table.load(start_of(name, runtime.world_size))
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
        seen.append((step, torch.from_numpy(rows), values.view(*rows.shape, case.dim)))
        for grad in grads:
            table.accumulate(grad)
        if step + 1 < case.steps:
            upcoming = plan_step(name, step + 1, config, runtime)
        pending = table.reduce(step)
        table.receive(table.update(step, lr_multiplier(case, step), pending))
        if step + 1 < case.steps:
            table.start_pull(upcoming[0])
    ledger = {"/".join(key): tuple(counts) for key, counts in runtime.ledger.items()}
    full = table.full_state()
    table.load(full)
    return {"full": full, "again": table.full_state(), "held": held, "seen": seen, "ledger": ledger}


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
    case, config = CASES[name], table_config(name, world_size)
    start = start_of(name, world_size)
    weight, second = start["weight"].double(), start["second"].double()
    history = [weight.clone()]
    for step in range(case.steps):
        grads = torch.zeros_like(weight)
        for ids, signs, token_grads in draw(name, world_size, step):
            for column in range(ORDERS):
                signed = signs[:, column, None].astype(np.float64) * token_grads
                grads.index_add_(0, torch.from_numpy(ids[:, column]), torch.from_numpy(signed))
        lr = config.ngram_lr * lr_multiplier(case, step)
        second += grads.square().mean(1)
        weight -= lr * grads / (second + config.ngram_floor**2).sqrt()[:, None]
        history.append(weight.clone())
    return torch.stack(history), second


def assert_near(actual, expected):
    """Each row (..., d) differs by at most a millionth of its norm."""
    assert actual.shape == expected.shape
    differences, sizes = (rows.norm(dim=-1) for rows in (actual.double() - expected, expected))
    assert (differences <= 1e-6 * sizes).all(), (differences / sizes).max()


@ALL
@pytest.mark.parametrize("name", CASES)
def test_the_table_equals_the_dense_update(name, world_size, results_of):
    """What is read, what is left, and what a checkpoint keeps of it, on all ranks."""
    history, second = dense(name, world_size)
    start = start_of(name, world_size)
    reads = [rows for step in distinct_reads(name, world_size) for rows in step]
    never = np.setdiff1d(np.arange(len(second)), list(set.union(*reads)))
    for rank, results in enumerate(results_of(world_size)):
        left = results[name]
        assert_near(left["full"]["weight"], history[-1])
        assert_near(left["full"]["second"][:, None], second[:, None])
        assert_bitwise(left["full"]["weight"][never], start["weight"][never])
        assert_bitwise(left["again"], left["full"])
        low, high = owner_bounds(CASES[name], world_size, rank)
        assert left["held"] == (high - low, CASES[name].dim)
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


def test_without_columns_the_table_is_empty_and_frozen():
    trainer = make_trainer(**NO_TABLE)
    table = trainer.table
    assert table.size() == 0 and table.weight.shape == (0, 32)
    assert table.is_frozen and not table.is_due(3)
    assert read(trainer, byte_documents(300))[1] is None
    table.load(table.full_state())


def test_a_table_without_a_learning_rate_is_read_but_never_learns():
    trainer = make_trainer(ngram_lr=0.0)
    summed = read(trainer, byte_documents(300))[1]
    assert summed.any() and not summed.requires_grad
    assert not any(trainer.table.is_due(step) for step in range(4))


# ----- the ledger, against an independent count


@functools.cache
def distinct_reads(name, world_size):
    """For each step and rank, the set of rows that the rank reads."""
    steps = []
    for step in range(CASES[name].steps):
        parts = draw(name, world_size, step)
        of_ranks = [parts[rank::world_size] for rank in range(world_size)]
        steps.append([{row for ids, *_ in own for row in ids.ravel().tolist()} for own in of_ranks])
    return steps


def counted(name, world_size, me):
    """{collective/name: (bytes, messages)} that rank `me` should have sent, from sets of rows: each
    foreign row once there and once back, however many tokens read it."""
    case = CASES[name]
    peers = [rank for rank in range(world_size) if rank != me]
    sent = {"all_to_all/ngram_indices": [0, 0], "all_to_all/ngram_table": [0, 0]}

    def owned_by(rank, rows):
        low, high = owner_bounds(case, world_size, rank)
        return sum(low <= number < high for number in rows)

    def count(key, to_peers, size):
        sent[key][0] += sum(to_peers) * size
        sent[key][1] += sum(map(bool, to_peers))

    for reads in distinct_reads(name, world_size):
        asked = [owned_by(rank, reads[me]) for rank in peers]
        answered = [owned_by(me, reads[rank]) for rank in peers]
        count("all_to_all/ngram_indices", [1 for _ in peers], 4)  # how many rows
        count("all_to_all/ngram_indices", asked, 4)  # which ones
        count("all_to_all/ngram_table", answered, 4 * case.dim)  # their values
        count("all_to_all/ngram_table", asked, 4 * case.dim)  # their gradients
    return {key: tuple(entry) for key, entry in sent.items()} if peers else {}


@ALL
@pytest.mark.parametrize("name", CASES)
def test_the_ledger_is_an_independent_count(name, world_size, results_of):
    for rank, results in enumerate(results_of(world_size)):
        ledger = dict(results[name]["ledger"])
        ledger.pop("all_to_all/validation", None)
        assert ledger == counted(name, world_size, rank)
        if name == "own rows alone" and world_size > 1:
            assert ledger["all_to_all/ngram_table"] == (0, 0)


# ----- failures on the way


def test_a_failure_in_the_loaders_thread_of_one_rank_is_told_in_one_line(tiny, tmp_path):
    values = {**tiny, "steps": 40, "run_id": "wrong"}
    run = ranks.train(tmp_path, values, world_size=2, before=sabotage.spoil_second_rank)
    assert run.code != 0
    (told,) = (line for line in run.stderr.splitlines() if "rows leave the table's range" in line)
    assert told.startswith("rank 1: status:error n-gram rows ")
    assert run.lines[-1].startswith("status:") and "status:ok" not in run.stdout


def test_a_diverged_run_ends_while_loaders_talk_to_each_other(tiny, tmp_path):
    values = {**tiny, "steps": 40, "adam_lr": 1e30, "run_id": "diverging"}
    run = ranks.train(tmp_path, values, world_size=2)
    assert run.code == 1 and run.lines[-1].startswith("status:nan "), run.stdout + run.stderr
    assert 1 <= len(run.train_losses) < 40
