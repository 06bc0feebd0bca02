"""Steps of the optimizer that several tests share: weights of awkward shapes, and gradients that
add up to the same at any world size. test_distributed.py compares ranks."""

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

import ranks
import train_gpt
from helpers import EOT, LAYERED, NO_TABLE, tiny_config
from train_gpt import GPT, Hyper, NgramTable, Optimizer

MICRO_BATCHES = 12  # of a step
MODEL = GPT(tiny_config(**LAYERED), back_end=None)
RULES = {name: param.rule for name, param in MODEL.named_parameters()}
# Here a bank of the MLP has any number of matrices, and one of values and outputs has four.
RATES = torch.tensor([1.0, 2.0, 0.5, 3.0])
RULES["mlp"] = dataclasses.replace(RULES["mlp"], lr_mul=1.0)
RULES["value_output"] = dataclasses.replace(RULES["value_output"], lr_mul=RATES[:, None, None])


def draw(*key_and_shape):
    """Normal float32 numbers that depend on the key alone."""
    *key, shape = key_and_shape
    generator = np.random.default_rng([*key])
    return torch.from_numpy(generator.standard_normal(shape)).float()


def normal(*shape, seed=0):
    return draw(seed, shape)


def hyper(count=1, lr=0.1, decay=0.0, momentum=0.9, betas=(0.9, 0.95)):
    return Hyper(count, lr, decay, momentum, betas, torch.float32)


def adam_step(adam, decay):
    """A step of torch's AdamW of one parameter, without a decay of its own, and then ours, over its
    rate: where update and weight agree in sign."""
    (group,) = adam.param_groups
    (param,) = group["params"]
    before = param.detach().clone()
    adam.step()
    with torch.no_grad():
        is_agreed = (before - param) * before > 0
        param -= group["lr"] * decay * before * is_agreed


def composed_polynomials(values):
    """What Muon's polynomials make of singular values."""
    for a, b, c in train_gpt.POLAR_EXPRESS:
        values = a * values + b * values**3 + c * values**5
    return values


def slow_muon(weight, buffer, second, grad, lr, momentum, decay, whitened=lambda mixed: mixed):
    """One matrix in float64, from the description: its new weight, momentum and mean square."""
    rows, columns = weight.shape
    buffer = momentum * buffer + (1 - momentum) * grad
    nesterov = whitened(momentum * buffer + (1 - momentum) * grad)
    u, values, vt = np.linalg.svd(nesterov, full_matrices=False)
    update = (u * composed_polynomials(values / (np.linalg.norm(values) * 1.02 + 1e-12))) @ vt
    size = np.linalg.norm(update)
    axis = 1 if rows >= columns else 0
    second = 0.95 * second + 0.05 * (update**2).mean(axis, keepdims=True)
    update = update / np.sqrt(second)
    update = update * size / np.linalg.norm(update)
    lr = lr * max(1, rows / columns) ** 0.5
    decayed = np.where(update * weight > 0, decay * weight, 0)
    return weight - lr * (update + decayed), buffer, second


# ----- optimizers


class Weights(nn.Module):
    """Parameters of the given names and shapes, of `dtype` but for *_scale, which are float32.
    rules: of some of them, where it is not that of the model."""

    def __init__(self, dtype, shapes, rules=None):
        super().__init__()
        for index, (name, shape) in enumerate(shapes.items()):
            kind = torch.float32 if name.endswith("_scale") else getattr(torch, dtype)
            param = nn.Parameter(draw(1, index, shape).to(kind))
            param.rule = (rules or {}).get(name, RULES[name])
            setattr(self, name, param)


def optimizer_of(runtime, shapes, dtype="float32", rules=None, **changes):
    """An Optimizer of Weights, without a table unless `changes` of the configuration ask for it."""
    config = tiny_config(**{**NO_TABLE, "dtype": dtype, **changes})
    return Optimizer(config, Weights(dtype, shapes, rules), NgramTable(config, runtime), runtime)


def state_of(optimizer):
    """{parameter: what this rank keeps for it}."""
    found = {}
    for group in optimizer.parameter_groups:
        found.update(group.state)
    return found


def gradient(step, micro_batch, name, shape):
    """The gradient of a micro-batch's summed loss: all of a step's together are of size 1 or so."""
    return draw(2, step, micro_batch, list(RULES).index(name), shape) / MICRO_BATCHES


def parameters_of(optimizer):
    """{name: parameter of the model}."""
    found = {}
    for group in optimizer.parameter_groups:
        found.update(getattr(group, "members", group.params))
    return found


def params_of(optimizer):
    """{name: this rank's copy of the parameter}."""
    return {name: param.data for name, param in parameters_of(optimizer).items()}


def add(optimizer, grads):
    """Add the gradients {name: tensor, or None} of summed losses, as autograd does."""
    for name, param in parameters_of(optimizer).items():
        if grads.get(name) is not None:
            param.grad = train_gpt.gradient(param) + grads[name].to(param.dtype)


def accumulate(optimizer, step, runtime):
    """Add the gradients of this rank's micro-batches."""
    for micro_batch in range(runtime.rank, MICRO_BATCHES, runtime.world_size):
        grads = {}
        for name, param in params_of(optimizer).items():
            grads[name] = gradient(step, micro_batch, name, param.shape)
        add(optimizer, grads)


def take_step(optimizer, step, grads, lr_mul=1.0):
    """One step on the gradients {name: tensor}."""
    add(optimizer, grads)
    optimizer.step(step, lr_mul)


def waiting(optimizer, name):
    """The sum of the gradients that a parameter has not stepped on yet."""
    return train_gpt.gradient(parameters_of(optimizer)[name])


def full_state(optimizer):
    """What a checkpoint keeps of each group."""
    return {group.name: ranks.whole_state(group) for group in optimizer.groups}


def load(optimizer, full):
    for group in optimizer.groups:
        group.load(full[group.name])


def batch_of(trainer, *tokens):
    """A Batch of contiguous micro-batches, each the first of its tokens, as the loader would make
    it."""
    length = trainer.config.micro_batch_tokens
    texts = [np.asarray(each, np.uint16) for each in tokens]
    passages = [train_gpt.contiguous_passage(text, EOT, 0, length) for text in texts]
    device = trainer.runtime.device
    passes = [train_gpt.make_pass([passage], trainer.config, device) for passage in passages]
    tokens = len(passages) * length * trainer.runtime.world_size
    return train_gpt.Batch(passes, trainer.table.look_up(passages), tokens)


def under_way(full):
    """A state of the matrices as if training went on for long. Eigenvalues stand apart from each
    other, so that rounding, which differs between world sizes, turns no eigenvectors."""
    for state in full.values():
        for key in [key for key in state if key.endswith("basis")]:
            count, size, _ = state[key].shape
            basis = torch.linalg.qr(draw(6, size, (count, size, size)).double()).Q
            values = torch.logspace(0, -1, size, dtype=torch.float64)
            state[key] = basis.float()
            state[key.replace("basis", "factor")] = (basis * values @ basis.mT).float()
        for key in {"moment", "count", "row_square"} & state.keys():
            state[key] = draw(7, state[key].shape).square() + 0.1
        state["momentum"] = 0.1 * draw(8, state["momentum"].shape)
    return full


# ----- cases, which ranks step through


@dataclass
class Case:
    """Steps on parameters of some shapes."""

    shapes: dict
    changes: dict = field(default_factory=dict)  # of the configuration
    dtype: str = "float32"
    steps: tuple = (0, 1, 2, 3)
    # Each step starts from the same weights and the same well-separated bases, so that one step is
    # compared, whatever rounding would do to the next ones.
    is_settled: bool = False


BANKS = {
    "query_key": (2, 8, 8),
    "value_output": (4, 8, 8),
    "mlp": (1, 8, 8),
    "embed": (5, 8),
    "head": (5, 8),
}

# Leading dimensions that no world size divides, that are smaller than it, and that are empty.
CASES = {
    "float32": Case(
        {
            **BANKS,
            "query_key": (5, 8, 8),
            "mlp": (3, 16, 8),
            "embed": (7, 8),
            "value_embed": (9, 8),
            "smear_gate": (1, 5),
            "residual_scale": (3,),
        }
    ),
    "bfloat16": Case(
        {
            **BANKS,
            "mlp": (6, 8, 16),
            "embed": (1, 8),
            "head": (13, 8),
            "value_gate": (2, 3, 4),
            "embed_scale": (3,),
        },
        dtype="bfloat16",
    ),
    "empty": Case({**BANKS, "value_embed": (0, 8), "value_gate": (0, 2, 4)}),
    "every third": Case({**BANKS, "smear_gate": (1, 12)}, {"adam_every": 3}),
    # At the last of four steps, three sixths of the run.
    "untied": Case({**BANKS, "smear_gate": (1, 12)}, {"untie_at": 0.5}),
}

# Five matrices go 3, 2 over two ranks, 2, 2, 1 over three and 2, 2, 1, 0 over four; a side of 11 is
# above the limit.
SMALL = {"smear_scale": (1,)}
SHAPES = {**SMALL, "query_key": (5, 5, 5), "mlp": (3, 10, 7), "embed": (2, 8)}
WIDE = {**SMALL, "query_key": (2, 7, 11), "mlp": (1, 1, 6)}  # some ranks have none
EVERY = 2  # basis_every
LIMIT = 10  # one_sided_above


def matrix_case(rule, shapes=SHAPES, dtype="float32", is_settled=True):
    """A Case of the hidden matrices under a rule."""
    is_settled = is_settled and train_gpt.UPDATE_RULES[rule].has_bases
    changes = {"matrix_update": rule, "basis_every": EVERY, "one_sided_above": LIMIT, "steps": 25}
    return Case(shapes, changes, dtype, (1, 3, 4) if is_settled else tuple(range(8)), is_settled)


# With factors of full rank, which are those of short sides, from the very first step.
ONE_SIDED = {**SMALL, "query_key": (3, 6, 12), "mlp": (2, 14, 5)}
MATRICES = ("query_key", "value_output", "mlp")
CASES |= {
    **{rule: matrix_case(rule) for rule in train_gpt.UPDATE_RULES},
    "soap_muon wide": matrix_case("soap_muon", WIDE),
    "soap_muon bfloat16": matrix_case("soap_muon", dtype="bfloat16"),
    "soap one-sided": matrix_case("soap", ONE_SIDED, is_settled=False),
    "kl_soap one-sided": matrix_case("kl_soap", ONE_SIDED, is_settled=False),
}


def take_steps(case, runtime):
    """What a case's steps on gradients of twelve micro-batches leave on this rank, and send."""
    optimizer = optimizer_of(runtime, case.shapes, case.dtype, **{"steps": 6, **case.changes})
    params = params_of(optimizer)
    full = full_state(optimizer)
    weights = {name: param.clone() for name, param in params.items()}
    if case.is_settled:
        under_way(full["matrices"])
    found = []
    runtime.ledger.clear()
    for step in case.steps:
        if case.is_settled:
            load(optimizer, full)
            for name, param in params.items():
                param.copy_(weights[name])
        accumulate(optimizer, step, runtime)
        optimizer.step(step, 0.5)
        if case.is_settled or step == case.steps[-1]:
            copies = {name: param.clone() for name, param in params.items()}
            found.append({"params": copies, "full": full_state(optimizer)})
    ledger = runtime.ledger.items()
    sent = {"/".join(key): size for key, size in ledger}
    return {
        "steps": found,
        "sent": sent,
        "left": {name: waiting(optimizer, name) for name in params},
    }
