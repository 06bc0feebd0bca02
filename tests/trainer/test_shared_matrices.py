"""Real processes with gloo: matrices shared whole, by rows or by columns step as they do in one process."""
import functools

import pytest
import torch

from helpers import assert_bitwise, ranks
from optimizer_cases import EVERY, MATRICES, SHAPES, SHARDS, steps_of
from ranks import on_ranks
from train_gpt import EIGH_STEPS, MATRIX_RULES, Runtime

SHARDED = [case for case in MATRICES if case[1] != "whole"]
SIDES = [(10, 3), (7, 3), (5, 5), (5, 5)]  # of SHAPES, as (size, matrices)


@functools.cache
def results_of(world_size):
    """What the steps of all cases left, one dict a rank."""
    work = steps_of(MATRICES)
    return on_ranks(world_size, work) if world_size > 1 else [work(Runtime("cpu"))]


def batches(steps):
    """Of each step and size of sides: (size, how many factors are due)."""
    due = [sum(step < EIGH_STEPS or (step - index) % EVERY == 0 for index in range(count))
           for step in steps for _, count in SIDES]
    found = [{} for _ in steps]
    for index, count in enumerate(due):
        counts, size = found[index // len(SIDES)], SIDES[index % len(SIDES)][0]
        counts[size] = counts.get(size, 0) + count
    return [item for counts in found for item in counts.items()]


def assert_same_step(actual, expected, exact):
    """Equal weights and states, up to the order of sums. exact: a trajectory of many steps, or one step of soap."""
    atol, rtol = (1e-4, 1e-4) if exact else (1e-3, 1e-3)
    for name, param in expected["params"].items():
        # A bfloat16 weight is rounded: a last bit of float32 may carry over into its own last bit.
        torch.testing.assert_close(actual["params"][name], param, atol=atol,
                                   rtol=rtol if param.dtype == torch.float32 else 2**-7)
    for name, state in expected["full"]["matrices"].items():
        assert state.keys() == actual["full"]["matrices"][name].keys()
        for key, value in state.items():
            other = actual["full"]["matrices"][name][key]
            assert other.shape == value.shape
            if key.endswith("basis"):  # the sign of a column means nothing
                other, value = other.abs(), value.abs()
            if key != "mantissa":
                torch.testing.assert_close(other, value, atol=atol, rtol=rtol)


def assert_same_steps(actual, expected, case):
    compared = len(MATRICES[case].steps) if MATRICES[case].settled else 1
    assert len(actual["steps"]) == len(expected["steps"]) == compared
    for pair in zip(actual["steps"], expected["steps"]):
        assert_same_step(*pair, exact=not MATRICES[case].settled)


@pytest.mark.parametrize("case", MATRICES, ids=" ".join)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shared_matrices_step_as_whole_ones(world_size, case):
    """Eight steps under muon and adam; test_distributed.py takes twenty with a model. Rounding may turn null spaces of
    soap's factors, so that only its single steps from the same well-separated bases agree."""
    first, *others = [result[case] for result in results_of(world_size)]
    for other in others:  # all ranks hold the same
        assert_bitwise(other["steps"], first["steps"])
    assert_same_steps(first, results_of(1)[0][case], case)


@pytest.mark.parametrize("case", SHARDED, ids=" ".join)
def test_the_kind_of_share_does_not_matter(case):
    alone = results_of(1)[0]
    if (case[0], "whole") in MATRICES:
        assert_same_steps(alone[case], alone[case[0], "whole"], case)
    assert alone[case]["sent"] == {}


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("shard", SHARDS)
def test_each_factor_is_decomposed_once(shard, world_size):
    for rule in [name for name, rule in MATRIX_RULES.items() if rule.bases]:
        due = batches(MATRICES[rule, shard].steps)
        counts = [result[rule, shard]["decomposed"] for result in results_of(world_size)]
        assert sum(counts) == sum(count for _, count in due)
        if shard != "whole":  # ranks share out each batch
            assert counts == [sum(high - low for low, high in (Runtime.share(rank, count) for _, count in due))
                              for rank in ranks(world_size)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("shard, axis", [("rows", 1), ("cols", 2)])
def test_the_ledger_counts_what_shared_matrices_cost(shard, axis, world_size):
    peers = world_size - 1
    for rule, gathers in (("muon", 1), ("soap_muon", 2), ("soap", 2)):
        sent, count = results_of(world_size)[0][rule, shard]["sent"], len(MATRICES[rule, shard].steps)
        for name in ("attention", "mlp"):
            shape = list(SHAPES[name])
            shape[axis] = -(-shape[axis] // world_size)
            size = count * peers * 4 * torch.Size(shape).numel()
            assert sent[f"reduce_scatter/{name}"] == sent[f"all_gather/{name}"] == (size, count * peers)
            assert sent[f"all_gather/{name} parts"] == (gathers * size, gathers * count * peers)
        assert ("all_gather/eigenbases" in sent) == (rule != "muon")
    # What decompositions send: basis, order and verdict of as many matrices as the busiest rank has.
    due = batches(MATRICES["soap", shard].steps)
    sizes = [peers * 4 * size * (size + 2) * -(-count // world_size) for size, count in due]
    assert results_of(world_size)[0]["soap", shard]["sent"]["all_gather/eigenbases"] == (sum(sizes), len(due) * peers)


@pytest.mark.parametrize("world_size", [3, 4])
def test_momentum_is_shared_and_uneven(world_size):
    held = [result["soap", "rows"]["held"] for result in results_of(world_size)]
    rows = {3: [4, 4, 2], 4: [3, 3, 3, 1]}[world_size]
    assert held == [3 * 7 * share for share in rows]
