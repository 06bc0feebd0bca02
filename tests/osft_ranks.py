"""Frozen directions on a process group: shared factors, and banks owned by ranks; run by every rank.

    python -m torch.distributed.run --nproc_per_node=W osft_ranks.py FOLDER

Every rank leaves FOLDER/rank<r>.pt: {"factors": {case: its parts}, "steps": {case: what steps left}}.
"""
import sys
from pathlib import Path

import torch

import train_gpt
from benchmarks import osft_projection as osft
from helpers import tiny_config
from optimizer_ranks import Weights, draw
from soap_ranks import under_way
from train_gpt import Optimizer, Runtime

# (N, M, k_h, k_l) of the matrices of a case. Five rows go 2, 2, 1, 0 over four ranks, one row goes 1, 0, 0, 0.
FACTORS = {"even": [(24, 12, 12, 12), (12, 24, 12, 12)], "uneven": [(13, 7, 5, 2), (5, 11, 2, 3)],
           "one frozen": [(9, 6, 1, 5), (5, 5, 1, 4)], "one free": [(9, 6, 5, 1), (6, 10, 5, 1)]}
LIMITS = (1, 7, 2**20)  # coefficients in one all-reduce
BANKS = {"attention": (5, 6, 6), "mlp": (3, 10, 6), "embed": (4, 6)}
COUNTS = {"attention": [3, 1, 5, 3, 0], "mlp": [2, 2, 4]}
STEPS = (("muon", "float32"), ("adam", "float32"), ("soap_muon", "float32"), ("muon", "bfloat16"))
MICRO_BATCHES = 12


def factors(case):
    """[(U_h, dU, V_h, dV), ...] float32, the same on all ranks."""
    def orthonormal(size, count, seed):
        return torch.linalg.qr(draw(seed, (size, count)).double()).Q.float()
    return [(orthonormal(n, k_h, 10 + i), draw(20 + i, (n, k_l)), orthonormal(m, k_h, 30 + i).T.contiguous(),
             draw(40 + i, (k_l, m))) for i, (n, m, k_h, k_l) in enumerate(FACTORS[case])]


def projections(case, runtime):
    """This rank's parts of the projected gradients, {way: [(dU, dV), ...]}; coefficients give dV transposed."""
    def part(tensor):
        return tensor[slice(*runtime.share(len(tensor)))].clone()
    found, cache = {}, {}
    for way in ("gathered", "fills cache", "cached", "gram"):
        found[way], sent = [], runtime.ledger.clear()
        for key, (_, _, frozen, grad) in enumerate(factors(case)):
            grad, kept = part(grad), part(frozen)
            if way == "gram":
                osft.project_by_gram(grad, kept, runtime)
            else:
                whole = osft.gathered_right(kept, len(frozen), runtime, None if way == "gathered" else cache, key)
                osft.project_right(grad, whole)
            found[way].append(grad)
        found[f"{way} sent"] = sent or sum(size for size, _ in runtime.ledger.values())
    for limit in LIMITS:
        sides = [side for left, du, right, dv in factors(case)
                 for side in (osft.Side(part(du), part(left)), osft.Side(part(dv.T), part(right.T)))]
        # One that all ranks hold whole, among the shared ones.
        replicated = osft.Side(factors(case)[0][1].clone(), factors(case)[0][0], shared=False)
        runtime.ledger.clear()
        osft.project_by_coefficients([*sides[:1], replicated, *sides[1:]], runtime, limit)
        found[limit] = [side.grad for side in sides]
        found[f"{limit} messages"] = sum(count for _, count in runtime.ledger.values())
        found[f"{limit} replicated"] = replicated.grad
    if case == "even":
        found["wrong"] = []
        for _, _, frozen, grad in factors(case):
            found["wrong"].append(part(grad))
            osft.project_wrongly(found["wrong"][-1], part(frozen), runtime)
    return found


def steps(rule, dtype, runtime, count=3):
    """Steps of the optimizer on protected banks."""
    config = tiny_config(steps=20, matrix_update=rule, dtype=dtype, basis_every=2)
    model = Weights(dtype, BANKS)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = Optimizer(config, model, runtime)
    if rule == "soap_muon":
        optimizer.load_full_state(under_way(optimizer.full_state()))
    runtime.ledger.clear()
    optimizer.protect(COUNTS)
    traffic = {"protect": dict(runtime.ledger)}
    before = optimizer.full_state()
    runtime.ledger.clear()
    for step in range(1, 1 + count):
        for micro_batch in range(runtime.rank, MICRO_BATCHES, runtime.world_size):
            optimizer.accumulate({name: draw(3, step, micro_batch, index, shape) / MICRO_BATCHES
                                  for index, (name, shape) in enumerate(BANKS.items())})
        optimizer.step(step, 1.0)
    traffic["steps"] = {key: tuple(value) for key, value in runtime.ledger.items()}
    full = optimizer.full_state()
    empty = Optimizer(config, Weights(dtype, BANKS), runtime)  # as after --resume: without factors of its own
    empty.load_full_state(full)
    return {"start": start, "params": dict(model.state_dict()), "before": before, "full": full,
            "again": empty.full_state(), "traffic": traffic}


if __name__ == "__main__":
    runtime = Runtime("cpu", timeout_s=60)
    torch.save({"factors": {case: projections(case, runtime) for case in FACTORS},
                "steps": {case: steps(*case, runtime) for case in STEPS}},
               Path(sys.argv[1]) / f"rank{runtime.rank}.pt")
    runtime.close()
