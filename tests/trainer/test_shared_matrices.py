"""Real processes with gloo: the hidden matrices, of which each rank has whole ones, step as they do in one process."""
import functools

import pytest
import torch

from helpers import assert_bitwise
from optimizer_cases import EVERY, MATRICES, SHAPES, steps_of
from ranks import on_ranks
from train_gpt import EIGH_STEPS, MATRIX_RULES, Runtime

SIDES = [3, 3, 5, 5]  # of SHAPES: how many matrices have the side, sides of 10, 7, 5 and 5


@functools.cache
def results_of(world_size):
    """What the steps of all cases left, one dict a rank."""
    work = steps_of(MATRICES)
    return on_ranks(world_size, work) if world_size > 1 else [work(Runtime("cpu"))]


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


@pytest.mark.parametrize("case", MATRICES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shared_matrices_step_as_in_one_process(world_size, case):
    """Eight steps under muon and adam; test_distributed.py takes twenty with a model. Rounding may turn null spaces of
    soap's factors, so that only its single steps from the same well-separated bases agree."""
    settled, (expected,) = MATRICES[case].settled, [result[case]["steps"] for result in results_of(1)]
    first, *others = [result[case]["steps"] for result in results_of(world_size)]
    for other in others:  # all ranks hold the same
        assert_bitwise(other, first)
    assert len(first) == len(expected) == (len(MATRICES[case].steps) if settled else 1)
    for pair in zip(first, expected):
        assert_same_step(*pair, exact=not settled)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", [name for name, rule in MATRIX_RULES.items() if rule.bases])
def test_each_factor_is_decomposed_once(rule, world_size):
    due = [step < EIGH_STEPS or (step - index) % EVERY == 0
           for step in MATRICES[rule].steps for count in SIDES for index in range(count)]
    assert sum(result[rule]["decomposed"] for result in results_of(world_size)) == sum(due)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("rule", MATRIX_RULES)
def test_nothing_but_gradients_and_weights_travels(rule, world_size):
    sent, steps, peers = results_of(world_size)[0][rule]["sent"], len(MATRICES[rule].steps), world_size - 1
    assert {key.split("/")[1] for key in sent} == {*SHAPES, "small"}
    for name in ("attention", "mlp"):
        count, *others = SHAPES[name]
        size = steps * peers * -(-count // world_size) * 4 * torch.Size(others).numel()
        assert sent[f"reduce_scatter/{name}"] == sent[f"all_gather/{name}"] == (size, steps * peers)


def test_state_is_shared_and_uneven():
    for world_size, counts in ((1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (4, [2, 2, 1, 0])):
        assert [result["soap"]["held"] for result in results_of(world_size)] == counts
