"""Steps of the optimizer that several tests share: weights of awkward shapes, and gradients that
add up to the same at any world size. test_distributed.py compares ranks."""

import dataclasses
import re
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

import ranks
import train_gpt
from helpers import EOT, LAYERED, NO_TABLE, ROOT, tiny_config

MICRO_BATCHES = 12  # of a step
MATRICES = ("query_key", "value_output", "mlp")
MODEL = train_gpt.GPT(tiny_config(**LAYERED), back_end=None)
RULES = {train_gpt.bank_name(name): param.rule for name, param in MODEL.named_parameters()}
# Here a bank of the MLP has any number of matrices, and one of values and outputs has four.
RATES = torch.tensor([1.0, 2.0, 0.5, 3.0])
RULES["mlp"] = dataclasses.replace(RULES["mlp"], lr_mul=1.0)
RULES["value_output"] = dataclasses.replace(RULES["value_output"], lr_mul=RATES[:, None, None])

# README.md's example of a new update rule, as it stands there: SGD with momentum.
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
(EXAMPLE,) = [block for block in BLOCKS if "UPDATE_RULES" in block]
exec(EXAMPLE, vars(train_gpt))


def draw(*key_and_shape):
    """Normal float32 numbers that depend on the key alone."""
    *key, shape = key_and_shape
    generator = np.random.default_rng([*key])
    return torch.from_numpy(generator.standard_normal(shape)).float()


def normal(*shape, seed=0):
    return draw(seed, shape)


# ----- references


def hyper(count=1, lr=0.1, decay=0.0, momentum=0.9, betas=(0.9, 0.95)):
    return train_gpt.Hyper(count, lr, decay, momentum, betas, torch.float32)


def torch_step(optimizer, decay):
    """A step of one of torch's optimizers, which has no decay of its own, and then our decay, over
    the rate: where update and weight agree in sign."""
    rates = {param: group["lr"] for group in optimizer.param_groups for param in group["params"]}
    before = {param: param.detach().clone() for param in rates}
    optimizer.step()
    for param, lr in rates.items():
        is_agreed = (before[param] - param.detach()) * before[param] > 0
        param.data.sub_(lr * decay * before[param] * is_agreed)


def composed_polynomials(values):
    """What Muon's polynomials make of singular values."""
    for a, b, c in train_gpt.POLAR_EXPRESS:
        values = a * values + b * values**3 + c * values**5
    return values


# ----- optimizers


class Weights(nn.Module):
    """Parameters of the given names and shapes, of `dtype` but for *_scale, which are float32."""

    def __init__(self, shapes, dtype="float32"):
        super().__init__()
        for index, (name, shape) in enumerate(shapes.items()):
            kind = torch.float32 if name.endswith("_scale") else getattr(torch, dtype)
            param = nn.Parameter(draw(1, index, shape).to(kind))
            param.rule = RULES[name]
            setattr(self, name, param)


def gpt_of(**changes):
    """The tiny GPT without a table."""
    return train_gpt.GPT(tiny_config(**{**NO_TABLE, **changes}), back_end=None)


def optimizer_of(model, runtime=None, **changes):
    """An Optimizer of a model without a table, in this process alone unless told otherwise."""
    config = tiny_config(**{**NO_TABLE, **changes})
    runtime = runtime or train_gpt.Runtime("cpu")
    table = train_gpt.NgramTable(config, runtime)
    return train_gpt.Optimizer(config, model, table, runtime)


def state_of(optimizer):
    """{parameter: what this rank keeps for it}."""
    found = {}
    for group in optimizer.parameter_groups:
        found.update(group.state)
    return found


def parameters_of(optimizer):
    """{name: parameter of the model}."""
    found = {}
    for group in optimizer.parameter_groups:
        found.update(group.members)
    return found


def params_of(optimizer):
    """{name: this rank's copy of the parameter}."""
    return {name: param.data for name, param in parameters_of(optimizer).items()}


def gradient(step, micro_batch, name, shape):
    """The gradient of a micro-batch's summed loss: all of a step's together are of size 1 or so."""
    return draw(2, step, micro_batch, list(RULES).index(name), shape) / MICRO_BATCHES


def add(optimizer, grads):
    """Add the gradients {name: tensor, or None} of summed losses, as autograd does."""
    for name, param in parameters_of(optimizer).items():
        if grads.get(name) is not None:
            param.grad = train_gpt.gradient(param)  # of a matrix, a view of its bank's
            param.grad += grads[name].to(param.dtype)


def take_step(optimizer, step, grads, lr_mul=1.0):
    """One step on the gradients {name: tensor}."""
    add(optimizer, grads)
    optimizer.step(step, lr_mul)


def step_of_ranks(optimizer, step, runtime):
    """One step on the gradients of this rank's micro-batches."""
    for micro_batch in range(runtime.rank, MICRO_BATCHES, runtime.world_size):
        grads = {}
        for name, param in params_of(optimizer).items():
            grads[name] = gradient(step, micro_batch, name, param.shape)
        add(optimizer, grads)
    optimizer.step(step, 0.5)


def batch_of(trainer, *texts, together=1):
    """A Batch of micro-batches, each the first one of a text, of which a pass reads so many."""
    length = trainer.config.micro_batch_tokens
    texts = [np.asarray(text, np.uint16) for text in texts]
    passages = [train_gpt.contiguous_passage(text, EOT, 0, length) for text in texts]
    parts = [passages[low : low + together] for low in range(0, len(passages), together)]
    device = trainer.runtime.device
    passes = [train_gpt.make_pass(part, trainer.config, device) for part in parts]
    tokens = len(passages) * length * trainer.runtime.world_size
    rows = train_gpt.plan_rows(passages, trainer.config, trainer.runtime)
    return train_gpt.Batch(passes, rows, tokens)


# ----- cases, which ranks step through


class Case(NamedTuple):
    """Steps on parameters of some shapes."""

    shapes: dict
    changes: dict = {}  # of the configuration
    dtype: str = "float32"
    steps: int = 4


BANKS = {
    "query_key": (2, 8, 8),
    "value_output": (4, 8, 8),
    "mlp": (1, 8, 8),
    "embed": (5, 8),
    "head": (5, 8),
}
# Five matrices go 3, 2 over two ranks, 2, 2, 1 over three and 2, 2, 1, 0 over four. Only short
# sides have bases: their factors have full rank from the first step, so that rounding, which
# differs between world sizes, turns no eigenvectors.
SMALL = {"copy_scale": (1,)}
SHORT_SIDES = {**SMALL, "query_key": (5, 6, 12), "mlp": (1, 14, 5), "embed": (2, 8)}
SOAP = {"basis_every": 2, "one_sided_above": 10}

# Leading dimensions that no world size divides, that are smaller than it, and that are empty.
CASES = {
    "float32": Case(
        {
            **BANKS,
            "query_key": (5, 8, 8),
            "mlp": (3, 16, 8),
            "embed": (7, 8),
            "value_embed": (0, 8),
            "ngram_gate": (1, 5),
            "copy_scale": (3,),
        }
    ),
    "bfloat16": Case(
        {
            **BANKS,
            "mlp": (6, 8, 16),
            "embed": (1, 8),
            "head": (13, 8),
            "exclusive_gate": (2, 3, 4),
            "log_scale": (3,),
        },
        dtype="bfloat16",
    ),
    "every third": Case({**BANKS, "ngram_gate": (1, 12)}, {"adam_every": 3}),
    # At the last of four steps, three sixths of the run.
    "untied": Case({**BANKS, "ngram_gate": (1, 12)}, {"untie_at": 0.5}),
}
for rule in train_gpt.UPDATE_RULES:
    CASES[rule] = Case(SHORT_SIDES, {**SOAP, "matrix_update": rule, "steps": 25}, steps=8)


def take_steps(case, runtime):
    """What a case's steps on gradients of twelve micro-batches leave on this rank, and send."""
    changes = {"steps": 6, "dtype": case.dtype, **case.changes}
    optimizer = optimizer_of(Weights(case.shapes, case.dtype), runtime, **changes)
    runtime.ledger.clear()
    for step in range(case.steps):
        step_of_ranks(optimizer, step, runtime)
    waiting = parameters_of(optimizer).items()
    return {
        "sent": {"/".join(key): size for key, size in runtime.ledger.items()},
        "params": params_of(optimizer),
        "full": {group.name: ranks.whole_state(group) for group in optimizer.parameter_groups},
        "left": {name: train_gpt.gradient(param) for name, param in waiting},
    }
