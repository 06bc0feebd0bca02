"""Eigenbases by QR: many factors in one batch against one after another; and may some be skipped?

    python benchmarks/qr.py [--sizes 64,128,256,512,1024] [--repeats 3] [--device auto]
    python benchmarks/qr.py --adaptive [--seeds 1,2,3] [--rules soap_muon]

Factors are running means of products of gradients whose spectrum spans three decades, and their
bases are the eigenvectors of one gradient before. All methods orthonormalise factor @ basis:
    cholesky      eigenbasis_step by Cholesky, all factors of a size at once: the trainer's on CUDA
    householder   eigenbasis_step by LAPACK's Householder QR, on a batch: the trainer's on a CPU
    loop          torch.linalg.qr, matrix by matrix
    eigh          torch.linalg.eigh, matrix by matrix: the eigenvectors themselves
The distance to eigh is the off-diagonal share of the Frobenius norm of basisᵀ factor basis, which
eigh makes zero. Results: benchmarks/results/qr.{json,md}. The last line is `qr_speedup:<median over
sizes of the loop's time over the trainer's on this device> max_error:<max |QᵀQ - I| of both>`.

--adaptive trains the track mini by soap rules. A refresh of a basis is skipped where the factor's
off-diagonal share in the old basis is below a threshold. All bases are looked at in each step, or
in turns of ten, as the trainer refreshes them; time is that of deciding and refreshing. Runs that
stand in benchmarks/results/qr_adaptive.json are not repeated.
"""

import dataclasses
import functools
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common

FACTORS_OF_ALL_SIZES = 2**20  # entries of the factors of a size, at most
THRESHOLDS = (0.01, 0.02, 0.05, 0.1)
# A threshold and how many steps a turn has. The first is what the trainer does.
ARMS = {"in turns": (0.0, 10), "in each step": (0.0, 1)}
ARMS |= {f"in each step, skipped below {limit}": (limit, 1) for limit in THRESHOLDS}
ARMS |= {f"in turns, skipped below {limit}": (limit, 10) for limit in THRESHOLDS[2:]}


def factors_and_bases(count, size, device, steps=12):
    """Factors (count, size, size), and their bases of the step before the last."""
    generator = torch.Generator().manual_seed(size)
    frame = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
    frame = (frame * torch.logspace(0, -3, size)).to(device)
    factors = torch.zeros(count, size, size, device=device)
    for _ in range(steps):
        before = factors.clone()
        noise = torch.randn(count, size, max(1, size // 4), generator=generator).to(device)
        grads = 1e-3 * frame @ noise
        factors.lerp_(grads @ grads.mT / size, 1 - train_gpt.FACTOR_BETA)
    bases = torch.linalg.eigh(before).eigenvectors.flip(-1)
    return factors, bases


def off_diagonal_share(factors, bases):
    """(k,): how far bases are from eigenvectors; 0 is a factor that they make diagonal."""
    rotated = bases.mT @ factors @ bases
    diagonal = rotated.diagonal(dim1=-2, dim2=-1)
    off_diagonal = rotated - torch.diag_embed(diagonal)
    return off_diagonal.norm(dim=(-2, -1)) / rotated.norm(dim=(-2, -1)).clamp_min(1e-38)


def in_a_loop(decompose, factors, bases):
    """The Q of each product, or the eigenvectors of each factor, one after another."""
    if decompose is torch.linalg.eigh:
        return torch.stack([decompose(factor).eigenvectors.flip(-1) for factor in factors])
    pairs = zip(factors, bases, strict=True)
    return torch.stack([decompose(factor @ basis).Q for factor, basis in pairs])


def in_a_batch(method, factors, bases):
    """What the trainer makes of all bases at once."""
    new, _, _ = train_gpt.eigenbasis_step(factors, bases, method)
    return new


BATCHED = ("cholesky", "householder")
METHODS = {name: functools.partial(in_a_batch, name) for name in BATCHED}
METHODS["loop"] = functools.partial(in_a_loop, torch.linalg.qr)
METHODS["eigh"] = functools.partial(in_a_loop, torch.linalg.eigh)


def measure(size, count, repeats, device):
    """{method: seconds, error and distance} of a size; methods take turns."""
    factors, bases = factors_and_bases(count, size, device)
    _, _, is_rejected = train_gpt.eigenbasis_step(factors, bases, "cholesky")
    case = {"size": size, "count": count, "rejects": int(is_rejected.sum())}
    case["before"] = off_diagonal_share(factors, bases).median().item()
    for name in METHODS:
        case[name] = {"seconds": []}
    for _ in range(repeats):
        for name, method in METHODS.items():
            seconds, found = common.timed(functools.partial(method, factors, bases), device)
            case[name]["seconds"].append(seconds)
            error = found.mT @ found - torch.eye(size, device=device)
            case[name]["error"] = error.abs().max().item()
            case[name]["distance"] = off_diagonal_share(factors, found).median().item()
    return case


def report(cases, device):
    """The table of all sizes, and the last line."""
    of_trainer = "cholesky" if device.type == "cuda" else "householder"
    rows = []
    speedups = []
    for case in cases:
        milliseconds = {}
        for name in METHODS:
            milliseconds[name] = 1000 * statistics.median(case[name]["seconds"])
        speedups.append(milliseconds["loop"] / milliseconds[of_trainer])
        row = [case["size"], case["count"]]
        row += [f"{value:.1f}" for value in milliseconds.values()]
        row += [f"{case[name]['error']:.1e}" for name in BATCHED]
        row += [case["rejects"], f"{case['before']:.1e}"]
        row += [f"{case[name]['distance']:.1e}" for name in METHODS]
        rows.append(row)
    header = ["size", "factors", *[f"{name}, ms" for name in METHODS]]
    header += ["largest error, cholesky", "of householder", "rejects", "distance before"]
    header += [f"after {name}" for name in METHODS]
    error = max(case[name]["error"] for case in cases for name in BATCHED)
    line = f"qr_speedup:{statistics.median(speedups):.2f} max_error:{error:.1e}"
    return common.markdown_table(header, rows), line


# ----- the adaptive criterion


class Adaptive:
    """Follows gradients as ParameterGroup does, but for factors that their old basis makes nearly
    diagonal, and keeps the shares of all that it has looked at."""

    def __init__(self, group, threshold, every):
        self.group = group
        self.threshold = threshold
        self.every = every
        self.shares = []
        self.skipped = 0
        self.seconds = 0.0

    def follow_gradients(self, step, grads):
        every = self.every if step >= train_gpt.EIGH_STEPS else 1
        for name, grad in grads.items():
            state = self.group.state[name]
            sides = train_gpt.eigen_sides(state)
            train_gpt.update_factors(grad, sides, self.group.rule.is_kl)
            began = time.thread_time()
            for side in sides:
                turn = torch.arange(step % every, len(grad), every)
                self.refresh(state, side, turn, step)
            self.seconds += time.thread_time() - began

    def refresh(self, state, side, turn, step):
        """Refresh the bases of one side of the matrices whose turn it is."""
        shares = off_diagonal_share(side.factor[turn], side.basis[turn])
        if step >= train_gpt.HOUSEHOLDER_STEPS:
            self.shares += shares.tolist()
        if step >= train_gpt.EIGH_STEPS:
            is_due = ~(shares < self.threshold)
            self.skipped += int((~is_due).sum())
            turn = turn[is_due]
        name = "row" if side.axis == -2 else "column"
        keys = f"{name}_factor", f"{name}_basis", "moment", "rejects"
        bank = {key: state[key][turn] for key in keys}
        method = "eigh" if step < train_gpt.EIGH_STEPS else "householder"  # as on any CPU
        train_gpt.refresh_eigenbases([bank], method)
        for key, value in bank.items():
            state[key][turn] = value


def adaptive_run(config, arm):
    """One run of the track by an arm: its loss, what it skipped, and its time."""
    run = common.Training(config)
    adaptive = Adaptive(run.trainer.optimizer.matrices, *ARMS[arm])
    adaptive.group.follow_gradients = adaptive.follow_gradients
    began = time.thread_time()
    for step in range(config.steps):
        run.step(step)
    seconds = time.thread_time() - began
    shares = torch.tensor(adaptive.shares)
    found = {
        "arm": arm,
        "rule": config.matrix_update,
        "seed": config.seed,
        "steps": config.steps,
        "below": {str(limit): (shares < limit).float().mean().item() for limit in THRESHOLDS},
        "loss": run.loss(),
        "seconds": seconds,
        "refreshing": adaptive.seconds,
        "skipped": adaptive.skipped,
    }
    run.close()
    return found


def adaptive_table(runs):
    rows = []
    for rule, arm in dict.fromkeys((run["rule"], run["arm"]) for run in runs):
        own = [run for run in runs if (run["rule"], run["arm"]) == (rule, arm)]
        steps = own[0]["steps"]
        row = [rule, arm, len(own), common.spread([run["loss"] for run in own], 4)]
        for key in ("seconds", "refreshing"):
            row.append(f"{1000 * statistics.mean(run[key] for run in own) / steps:.1f}")
        row.append(f"{statistics.mean(run['skipped'] for run in own):.0f}")
        for limit in THRESHOLDS:
            share = statistics.mean(run["below"][str(limit)] for run in own)
            row.append(f"{100 * share:.1f}")
        rows.append(row)
    header = ["rule", "refreshed", "n", "final loss", "ms a step", "of it deciding and refreshing"]
    header += ["refreshes skipped", *[f"shares below {limit}, %" for limit in THRESHOLDS]]
    return common.markdown_table(header, rows)


def settle_adaptive(arguments):
    """Make the runs of all arms that are not there yet, and keep each."""
    path = arguments.results / "qr_adaptive.json"
    runs = json.loads(path.read_text())["runs"] if path.is_file() else []
    done = {(run["rule"], run["arm"], run["seed"]) for run in runs}
    track = dataclasses.replace(train_gpt.TRACKS["mini"], device="cpu", val_sha256="")
    if arguments.tiny:
        track = dataclasses.replace(track, steps=30, val_tokens=4096)
    seeds = map(int, arguments.seeds.split(","))
    for seed, rule, arm in itertools.product(seeds, arguments.rules.split(","), ARMS):
        if (rule, arm, seed) not in done:
            config = dataclasses.replace(track, seed=seed, matrix_update=rule)
            runs.append(adaptive_run(config, arm))
            facts = common.environment("cpu")
            text = adaptive_table(runs)
            common.write_results(arguments.results, "qr_adaptive", facts, {"runs": runs}, text)
            print(runs[-1], flush=True)


def main(argv=None):
    defaults = {"sizes": "64,128,256,512,1024", "repeats": 3, "device": "auto", "tiny": False}
    defaults |= {"adaptive": False, "seeds": "1,2,3", "rules": "soap_muon"}
    arguments = common.parser(__doc__, **defaults).parse_args(argv)
    if arguments.adaptive:
        return settle_adaptive(arguments)
    device = train_gpt.Runtime(arguments.device).device  # on a CPU it computes with one thread
    cases = []
    for size in map(int, arguments.sizes.split(",")):
        count = max(2, min(64, FACTORS_OF_ALL_SIZES // size**2))
        cases.append(measure(size, 2 if arguments.tiny else count, arguments.repeats, device))
    table, line = report(cases, device)
    facts = common.environment(device)
    common.write_results(arguments.results, "qr", facts, {"cases": cases}, f"{table}\n\n`{line}`")
    print(f"{table}\n{line}")


if __name__ == "__main__":
    main()
