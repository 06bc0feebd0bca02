"""README.md's example of a new update rule, executed as it stands there: SGD with momentum, a
function and a row."""

import re

import optimizer_cases as cases
import pytest
import torch

import train_gpt
from helpers import ROOT
from ranks import on_ranks
from train_gpt import momentum_at

BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
(BLOCK,) = [block for block in BLOCKS if "UPDATE_RULES" in block]
# Over three ranks the banks go 2, 2, 1 and 1, 1, 1.
SHAPES = {**cases.SMALL, "query_key": (5, 6, 6), "mlp": (3, 10, 7)}
CHANGES = {"matrix_update": "sgd", "matrix_decay": 5.0, "matrix_lr": 0.1, "steps": 12}
LR_MUL = 0.5


def trained(runtime):
    """(the configuration, the weights that some steps leave)."""
    optimizer = cases.optimizer_of(runtime, SHAPES, **CHANGES)
    for step in range(CHANGES["steps"]):
        cases.accumulate(optimizer, step, runtime)
        optimizer.step(step, LR_MUL)
    return optimizer.matrices.config, cases.params_of(optimizer)


@pytest.mark.parametrize("world_size", [1, 3])
def test_sgd_is_torchs_sgd_on_any_number_of_ranks(world_size, monkeypatch):
    """In float64, with weights that shrink first where that takes them the way of the step."""
    monkeypatch.setattr(train_gpt, "UPDATE_RULES", dict(train_gpt.UPDATE_RULES))
    exec(BLOCK, {**vars(train_gpt)})
    ranks = on_ranks(world_size, trained)
    config = ranks[0][0]
    model = cases.Weights("float32", SHAPES).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1 * LR_MUL, momentum=0.9)
    for step in range(CHANGES["steps"]):
        sgd.param_groups[0]["momentum"] = momentum_at(config, step)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        for name, param in model.named_parameters():
            parts = [
                cases.gradient(step, index, name, param.shape)
                for index in range(cases.MICRO_BATCHES)
            ]
            param.grad = sum(parts).double()
        sgd.step()
        for name, param in model.named_parameters():
            is_agreed = (before[name] - param.detach()) * before[name] > 0
            decay = (0.1 * LR_MUL) ** 2 * CHANGES["matrix_decay"] * cases.RULES[name].decay
            param.data.sub_(decay * before[name] * is_agreed)
    for _, found in ranks:
        for name in ("query_key", "mlp"):
            expected = model.get_parameter(name)
            torch.testing.assert_close(found[name].double(), expected.data, atol=2e-6, rtol=2e-6)
