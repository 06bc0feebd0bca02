"""Steps of the soap rules on matrices that ranks share, run by every rank of a process group.

    python -m torch.distributed.run --nproc_per_node=W soap_ranks.py FOLDER

Every rank leaves FOLDER/rank<r>.pt, {(rule, shard): what `steps` returns}. test_soap_ranks.py compares world sizes.
"""
import sys
from pathlib import Path

import torch
from torch import nn

import train_gpt
from helpers import tiny_config
from optimizer_ranks import draw, plus_one
from train_gpt import Optimizer, Runtime

# Sides of 5 go 2, 2, 1, 0 over four ranks, 10 go 3, 3, 3, 1, and 7 go 3, 3, 1 over three; 11 is above the limit.
SHAPES = {"attention": (5, 5, 5), "mlp": (3, 10, 7), "embed": (2, 8)}
WIDE = {"attention": (2, 7, 11), "mlp": (1, 1, 6)}
CASES = {(rule, shard): (SHAPES, torch.float32) for rule in ("muon", "adam", "soap", "soap_muon", "kl_soap")
         for shard in ("whole", "rows", "cols")}
CASES |= {("soap_muon wide", shard): (WIDE, torch.float32) for shard in ("whole", "rows", "cols")}
CASES |= {("soap_muon bfloat16", shard): (SHAPES, torch.bfloat16) for shard in ("rows", "cols")}
MICRO_BATCHES, STEPS, EVERY, LIMIT = 12, range(1, 7), 2, 10


class Weights(nn.Module):
    def __init__(self, shapes, dtype):
        super().__init__()
        for index, (name, shape) in enumerate(shapes.items()):
            setattr(self, name, nn.Parameter(draw(1, index, shape).to(dtype)))


def under_way(full):
    """A state as if training went on for long: eigenvalues apart from each other, so that eigenvectors are well-defined
    and rounding, which differs between world sizes, stays what it is."""
    for state in full.values():
        for key in [key for key in state if key.endswith("basis")]:
            count, size, _ = state[key].shape
            basis = torch.linalg.qr(draw(6, size, (count, size, size)).double()).Q
            values = torch.logspace(0, -1, size, dtype=torch.float64)
            state[key] = basis.float()
            state[key.replace("basis", "factor")] = (basis * values @ basis.mT).float()
        for key in {"moment", "count"} & state.keys():
            state[key] = draw(7, state[key].shape).square() + 0.1
    return full


def steps(case, runtime):
    """STEPS of the optimizer on gradients of twelve micro-batches. Returns what they left, and what they cost."""
    (rule, shard), (shapes, dtype) = case, CASES[case]
    config = tiny_config(steps=10, matrix_update=rule.split()[0], matrix_shard=shard, basis_every=EVERY,
                         one_sided_above=LIMIT, dtype="float32" if dtype == torch.float32 else "bfloat16")
    model, decomposed = Weights(shapes, dtype), []
    optimizer = Optimizer(config, model, runtime)
    optimizer.load_full_state(under_way(optimizer.full_state()))
    runtime.ledger.clear()
    exact = train_gpt.eigenbasis_step
    train_gpt.eigenbasis_step = lambda factors, *rest: decomposed.append(len(factors)) or exact(factors, *rest)
    for step in STEPS:
        for micro_batch in range(runtime.rank, MICRO_BATCHES, runtime.world_size):
            optimizer.accumulate({name: draw(3, step, micro_batch, index, shape) / MICRO_BATCHES
                                  for index, (name, shape) in enumerate(shapes.items())})
        optimizer.step(step, 0.5)
    train_gpt.eigenbasis_step = exact
    sent = {f"{collective}/{name}": count[0] for (collective, name), count in runtime.ledger.items()}
    runtime.ledger.clear()
    full = optimizer.full_state()
    optimizer.load_full_state(plus_one(full))
    raised = optimizer.full_state()
    return {"params": dict(model.state_dict()), "full": full, "raised": raised, "sent": sent,
            "decomposed": sum(decomposed), "held": optimizer.state["mlp"]["first"].numel()}


if __name__ == "__main__":
    runtime = Runtime("cpu", timeout_s=60)
    torch.save({case: steps(case, runtime) for case in CASES}, Path(sys.argv[1]) / f"rank{runtime.rank}.pt")
    runtime.close()
