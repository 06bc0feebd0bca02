"""Optimizer steps on awkward shapes, run by every rank of a process group.

    python -m torch.distributed.run --nproc_per_node=W optimizer_ranks.py FOLDER

Every rank leaves FOLDER/rank<r>.pt, {case: what `steps` returns}. test_distributed.py compares world sizes.
"""
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from helpers import tiny_config
from train_gpt import Optimizer, Runtime

MICRO_BATCHES, STEPS = 12, 4

# Leading dimensions that no world size divides, that are smaller than it, and that are empty.
CASES = {
    "float32": dict(attention=(5, 8, 8), mlp=(3, 16, 8), embed=(7, 8), head=(2, 8), value_embed=(1, 9, 8),
                    smear_gate=(1, 5), residual_scale=(3,)),
    "bfloat16": dict(attention=(3, 8, 8), mlp=(6, 8, 16), embed=(1, 8), head=(13, 8), value_embed=(2, 3, 8),
                     value_gate=(2, 3, 4), embed_scale=(3,)),
    "empty": dict(attention=(4, 8, 8), mlp=(2, 8, 8), embed=(5, 8), head=(5, 8), value_embed=(0, 5, 8),
                  value_gate=(0, 2, 4), skip_scale=(0,), smear_scale=(1,)),
    "every third": dict(attention=(4, 8, 8), mlp=(1, 8, 8), embed=(5, 8), head=(3, 8), smear_gate=(1, 12)),
}


def draw(*key_and_shape):
    *key, shape = key_and_shape
    generator = np.random.default_rng([*key])
    return torch.from_numpy(generator.standard_normal(shape)).float()


class Weights(nn.Module):
    def __init__(self, case, shapes):
        super().__init__()
        dtype = torch.bfloat16 if case == "bfloat16" else torch.float32
        for index, (name, shape) in enumerate(shapes.items()):
            scalars = name.endswith("_scale")  # these stay in float32
            setattr(self, name, nn.Parameter(draw(1, index, shape).to(torch.float32 if scalars else dtype)))


def plus_one(full):
    return {name: {key: value + 1 for key, value in state.items()} for name, state in full.items()}


def steps(case, runtime):
    """STEPS optimizer steps on gradients of twelve micro-batches. Returns what it left."""
    config = tiny_config(steps=6, adam_every=3 if case == "every third" else 1)
    shapes = CASES[case]
    model = Weights(case, shapes)
    optimizer = Optimizer(config, model, runtime)
    mine = range(runtime.rank, MICRO_BATCHES, runtime.world_size)
    for step in range(STEPS):
        for micro_batch in mine:
            optimizer.accumulate({name: draw(2, step, micro_batch, index, shape) / MICRO_BATCHES
                                  for index, (name, shape) in enumerate(shapes.items())})
        optimizer.step(step, 0.5)
    sent = {f"{collective}/{name}": count for (collective, name), (count, _) in runtime.ledger.items()}
    messages = {f"{collective}/{name}": count for (collective, name), (_, count) in runtime.ledger.items()}
    runtime.ledger.clear()
    full = optimizer.full_state()
    optimizer.load_full_state(plus_one(full))
    raised = optimizer.full_state()  # what was loaded must come out again
    optimizer.load_full_state(full)
    return {"params": dict(model.state_dict()), "full": full, "raised": raised,
            "again": optimizer.full_state(), "sent": sent, "messages": messages,
            "left": {name: grad.clone() for name, grad in optimizer.grads.items()}}


if __name__ == "__main__":
    runtime = Runtime("cpu", timeout_s=60)
    results = {case: steps(case, runtime) for case in CASES}
    torch.save(results, Path(sys.argv[1]) / f"rank{runtime.rank}.pt")
    runtime.close()
