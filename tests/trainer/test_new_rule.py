"""README.md's example of a new update rule, executed as it stands there: SGD with momentum, a
function and a row."""

import functools
import re

import pytest
import torch
from optimizer_cases import (
    MICRO_BATCHES,
    RULES,
    Weights,
    accumulate,
    gradient,
    optimizer_of,
    state_of,
)

import train_gpt
from helpers import NO_TABLE, ROOT
from ranks import on_ranks
from train_gpt import Runtime, momentum_at

BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
(BLOCK,) = [block for block in BLOCKS if "MATRIX_RULES" in block]
# Five matrices go 2, 2, 1 over three ranks, three go 1, 1, 1.
SHAPES = {"query_key": (5, 6, 6), "mlp": (3, 10, 7)}
CASES = (("float32", 0.0), ("float32", 0.3), ("bfloat16", 0.0))  # dtype, decay
STEPS, LR_MUL = 12, 0.5


@pytest.fixture(scope="module", autouse=True)
def rule():
    names, rules = set(vars(train_gpt)), set(train_gpt.MATRIX_RULES)
    exec(BLOCK, vars(train_gpt))
    yield
    for name in set(train_gpt.MATRIX_RULES) - rules:
        del train_gpt.MATRIX_RULES[name]
    for name in set(vars(train_gpt)) - names:
        delattr(train_gpt, name)


def config_of(decay):
    return {"matrix_update": "sgd", "matrix_decay": decay, "matrix_lr": 0.1, "steps": STEPS}


def train(runtime):
    """{case: the float32 weights that some steps leave}."""
    left = {}
    for dtype, decay in CASES:
        optimizer = optimizer_of(runtime, SHAPES, dtype, **config_of(decay))
        for step in range(STEPS):
            accumulate(optimizer, step, runtime)
            optimizer.step(step, LR_MUL)
        full, is_half = optimizer.matrices.full_state(), dtype == "bfloat16"
        left[dtype, decay] = {
            name: full[name]["master"] if is_half else layout.param.data
            for name, layout in optimizer.layouts.items()
        }
        for state in state_of(optimizer).values():
            assert list(state) == ["momentum"] + ["master"] * is_half
    return left


@functools.cache
def trained(world_size):
    return on_ranks(world_size, train) if world_size > 1 else [train(Runtime("cpu"))]


@functools.cache
def reference(dtype, decay):
    """The same steps in float64: torch's SGD, whose weights shrink first where that takes them the
    way of the step."""
    model = Weights(dtype, SHAPES).double()
    config = optimizer_of(Runtime("cpu"), SHAPES, **config_of(decay)).matrices.config
    sgd = torch.optim.SGD(model.parameters(), lr=0.1 * LR_MUL, momentum=0.9)
    for step in range(STEPS):
        sgd.param_groups[0]["momentum"] = momentum_at(config, step)
        for name, param in model.named_parameters():
            parts = [gradient(step, index, name, param.shape) for index in range(MICRO_BATCHES)]
            param.grad = sum(parts).double() / MICRO_BATCHES
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        sgd.step()
        for name, param in model.named_parameters():
            step_taken = before[name] - param.detach()
            is_agreed = step_taken * before[name] >= 0
            rate = 0.1 * LR_MUL * decay * RULES[name].decay
            param.data.sub_(rate * before[name] * is_agreed)
    return dict(model.state_dict())


def test_the_example_is_short():
    assert len([line for line in BLOCK.splitlines() if line.strip()]) <= 10


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_sgd_is_torchs_sgd_on_any_number_of_ranks(world_size, case):
    for left in trained(world_size):
        for name, expected in reference(*case).items():
            found = left[case][name].double()
            torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)


def test_sgd_trains_a_model(cli, tiny):
    changes = {"matrix_update": "sgd", "matrix_lr": 0.1, "steps": 12, **NO_TABLE}
    run = cli(**{**tiny, "run_id": "sgd", **changes})
    assert run.code == 0 and run.train_losses[12] < run.train_losses[1] - 0.3
