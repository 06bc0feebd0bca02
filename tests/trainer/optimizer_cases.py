"""Steps of the optimizer that several tests share: weights of awkward shapes, gradients that add up to the same at any
world size, and what some steps leave on each rank. test_distributed.py and test_shared_matrices.py compare ranks."""
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

import train_gpt
from helpers import NO_TABLE, tiny_config
from train_gpt import Hyper, NgramTable, Optimizer

MICRO_BATCHES = 12  # of a step, which suits 1, 2, 3 and 4 ranks


def draw(*key_and_shape):
    """Normal float32 numbers that depend on the key alone."""
    *key, shape = key_and_shape
    generator = np.random.default_rng([*key])
    return torch.from_numpy(generator.standard_normal(shape)).float()


def normal(*shape, seed=0):
    return draw(seed, shape)


def hyper(step=1, lr=0.1, decay=0.0, momentum=0.9, betas=(0.9, 0.95), dtype=torch.float32):
    return Hyper(step, lr, decay, momentum, betas, dtype)


# ----- optimizers

class Weights(nn.Module):
    """Parameters of the given names and shapes, of `dtype`, but for those named *_scale, which are always float32."""

    def __init__(self, dtype, shapes):
        super().__init__()
        for index, (name, shape) in enumerate(shapes.items()):
            kind = torch.float32 if name.endswith("_scale") else getattr(torch, dtype)
            setattr(self, name, nn.Parameter(draw(1, index, shape).to(kind)))


def optimizer_of(runtime, shapes, dtype="float32", **changes):
    """An Optimizer of Weights, without an n-gram table unless `changes` of the configuration ask for it."""
    config = tiny_config(**{**NO_TABLE, "dtype": dtype, **changes})
    return Optimizer(config, Weights(dtype, shapes), NgramTable(config, runtime), runtime)


def state_of(optimizer):
    """{parameter: what this rank keeps for it}."""
    return {name: state for group in optimizer.groups if hasattr(group, "state") for name, state in group.state.items()}


def gradient(step, micro_batch, name, shape):
    return draw(2, step, micro_batch, list(train_gpt.RULES).index(name), shape) / MICRO_BATCHES


def accumulate(optimizer, step, runtime, unused=()):
    """Add the gradients of this rank's micro-batches; parameters in `unused` have none."""
    for micro_batch in range(runtime.rank, MICRO_BATCHES, runtime.world_size):
        optimizer.accumulate({name: None if name in unused else gradient(step, micro_batch, name, layout.param.shape)
                              for name, layout in optimizer.layouts.items()})


def waiting(layout):
    """The sum of the gradients that a parameter has not stepped on yet; the next one overwrites a sum that it has."""
    return torch.zeros_like(layout.grad) if layout.fresh else layout.grad.clone()


def full_state(optimizer):
    """What a checkpoint keeps of each group that has parameters."""
    return {group.name: group.full_state() for group in optimizer.groups if group.size() or hasattr(group, "state")}


def load(optimizer, full):
    for group in optimizer.groups:
        if group.name in full:
            group.load(full[group.name])


def batch_of(trainer, *tokens):
    """A Batch of contiguous micro-batches, each the first of its tokens, as the loader would make it."""
    texts = [train_gpt.Text(np.asarray(each, dtype=np.uint16), trainer.config) for each in tokens]
    places = [train_gpt.place_contiguous(text, 0, trainer.config) for text in texts]
    hashed = [train_gpt.table_rows(place, trainer.config, trainer.table.index) for place in places]
    rows, signs = map(np.concatenate, zip(*hashed))
    plan, slots = train_gpt.plan_rows(rows, signs, trainer.config, trainer.runtime)
    slots, signs = np.split(slots, len(places)), np.split(signs, len(places))
    return train_gpt.Batch([train_gpt.assemble(*each, trainer.runtime.device) for each in zip(places, slots, signs)],
                           plan, {})


def under_way(full):
    """A state of the matrices as if training went on for long: eigenvalues apart from each other, so that eigenvectors
    are well-defined and rounding, which differs between world sizes, stays what it is."""
    for state in full.values():
        for key in [key for key in state if key.endswith("basis")]:
            count, size, _ = state[key].shape
            basis = torch.linalg.qr(draw(6, size, (count, size, size)).double()).Q
            values = torch.logspace(0, -1, size, dtype=torch.float64)
            state[key] = basis.float()
            state[key.replace("basis", "factor")] = (basis * values @ basis.mT).float()
        for key in {"moment", "count", "second"} & state.keys():
            state[key] = draw(7, state[key].shape).square() + 0.1
        state["momentum"] = 0.1 * draw(8, state["momentum"].shape)
    return full


# ----- cases, which ranks step through

@dataclass
class Case:
    """Steps on parameters of these shapes. settled: each step starts from the same weights and the same well-separated
    bases, so that one step is compared, whatever rounding would do to the next ones."""
    shapes: dict
    changes: dict = field(default_factory=dict)  # of the configuration
    dtype: str = "float32"
    steps: tuple = (0, 1, 2, 3)
    settled: bool = False


# Leading dimensions that no world size divides, that are smaller than it, and that are empty.
GROUPS = {
    "float32": Case(dict(attention=(5, 8, 8), mlp=(3, 16, 8), embed=(7, 8), head=(2, 8), value_embed=(1, 9, 8),
                         smear_gate=(1, 5), residual_scale=(3,))),
    "bfloat16": Case(dict(attention=(3, 8, 8), mlp=(6, 8, 16), embed=(1, 8), head=(13, 8), value_embed=(2, 3, 8),
                          value_gate=(2, 3, 4), embed_scale=(3,)), dtype="bfloat16"),
    "empty": Case(dict(attention=(4, 8, 8), mlp=(2, 8, 8), embed=(5, 8), head=(5, 8), value_embed=(0, 5, 8),
                       value_gate=(0, 2, 4), skip_scale=(0,), smear_scale=(1,))),
    "every third": Case(dict(attention=(4, 8, 8), mlp=(1, 8, 8), embed=(5, 8), head=(3, 8), smear_gate=(1, 12)),
                        {"adam_every": 3}),
    "untied": Case(dict(attention=(2, 8, 8), mlp=(1, 8, 8), embed=(5, 8), head=(5, 8), smear_gate=(1, 12)),
                   {"untie_at": 0.5}),  # at the last of four steps, three sixths of the run
}

# Five matrices go 3, 2 over two ranks, 2, 2, 1 over three and 2, 2, 1, 0 over four; a side of 11 is above the limit.
SHAPES = {"attention": (5, 5, 5), "mlp": (3, 10, 7), "embed": (2, 8)}
WIDE = {"attention": (2, 7, 11), "mlp": (1, 1, 6)}  # some ranks have none
EVERY, LIMIT = 2, 10  # basis_every and one_sided_above


def _shared(rule, shapes=SHAPES, dtype="float32"):
    settled = train_gpt.MATRIX_RULES[rule].bases
    steps = (1, 3, 4) if settled else range(8)
    return Case(shapes, {"matrix_update": rule, "basis_every": EVERY, "one_sided_above": LIMIT, "steps": 25}, dtype,
                steps, settled)


MATRICES = {**{rule: _shared(rule) for rule in train_gpt.MATRIX_RULES}, "soap_muon wide": _shared("soap_muon", WIDE),
            "soap_muon bfloat16": _shared("soap_muon", dtype="bfloat16")}


def steps(case, runtime):
    """A case's steps on gradients of twelve micro-batches. Returns what they left on this rank, and what they cost."""
    optimizer, decomposed = optimizer_of(runtime, case.shapes, case.dtype, **{"steps": 6, **case.changes}), []
    params = {name: layout.param.data for name, layout in optimizer.layouts.items()}
    full, weights = full_state(optimizer), {name: param.clone() for name, param in params.items()}
    if case.settled:
        under_way(full["matrices"])
    exact = train_gpt.eigenbasis_step
    train_gpt.eigenbasis_step = lambda factors, *rest: decomposed.append(len(factors)) or exact(factors, *rest)
    found, sent = [], {}
    for step in case.steps:
        if case.settled:
            load(optimizer, full)
            for name, param in params.items():
                param.copy_(weights[name])
        runtime.ledger.clear()
        if step and step == train_gpt.untie_step(optimizer.matrices.config):
            optimizer.untie()
        tied = train_gpt.phase_at(optimizer.matrices.config, step).tied
        accumulate(optimizer, step, runtime, unused=["embed"] * tied)
        optimizer.step(step, 0.5)
        for key, (size, messages) in runtime.ledger.items():
            before = sent.get("/".join(key), (0, 0))
            sent["/".join(key)] = before[0] + size, before[1] + messages
        if case.settled or step == case.steps[-1]:
            found.append({"params": {name: param.clone() for name, param in params.items()},
                          "full": full_state(optimizer)})
    train_gpt.eigenbasis_step = exact
    return {"steps": found, "sent": sent, "decomposed": sum(decomposed),
            "left": {name: waiting(layout) for name, layout in optimizer.layouts.items()},
            "held": len(state_of(optimizer)["attention"]["momentum"])}


def steps_of(cases):
    """What ranks.on_ranks calls: the steps of all cases."""
    return lambda runtime: {name: steps(case, runtime) for name, case in cases.items()}
