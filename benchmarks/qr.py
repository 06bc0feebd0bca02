"""Eigenbases by QR: many factors in one batch against one after another.

    python benchmarks/qr.py [--sizes 64,128,256,512,1024] [--repeats 3] [--device auto]

Factors are running means of products of gradients whose spectrum spans three decades, and their
bases are the eigenvectors of one gradient before. The first two orthonormalise factor @ basis:
    batched   the trainer's eigenbasis_step by Cholesky QR, all factors of a size at once
    loop      torch.linalg.qr (Householder), matrix by matrix
    eigh      torch.linalg.eigh, matrix by matrix: the eigenvectors themselves
The distance to eigh is the off-diagonal share of the Frobenius norm of basisᵀ factor basis, which
eigh makes zero. Results: benchmarks/results/qr.{json,md}. The last line is `qr_speedup:<median over
sizes of the loop's time over that of batched> max_error:<max |QᵀQ - I| of batched>`.
"""

import functools
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common

FACTORS_OF_ALL_SIZES = 2**20  # entries of the factors of a size, at most


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


METHODS = ("batched", "loop", "eigh")


def new_bases(method, factors, bases):
    """The bases (k, n, n) that one of METHODS makes of those before."""
    if method == "batched":
        return train_gpt.eigenbasis_step(factors, bases, "cholesky")[0]
    if method == "eigh":
        return torch.stack([torch.linalg.eigh(factor).eigenvectors.flip(-1) for factor in factors])
    pairs = zip(factors, bases, strict=True)
    return torch.stack([torch.linalg.qr(factor @ basis).Q for factor, basis in pairs])


def measure(size, count, repeats, device):
    """{method: seconds, error and distance} of a size; methods take turns."""
    factors, bases = factors_and_bases(count, size, device)
    new, order = train_gpt.eigenbasis_step(factors, bases, "cholesky")
    is_kept = (new == bases.gather(-1, order[:, None].expand_as(bases))).all((-2, -1))
    case = {"size": size, "count": count, "rejects": int(is_kept.sum())}
    case["before"] = off_diagonal_share(factors, bases).median().item()
    case |= {name: {"seconds": []} for name in METHODS}
    for _ in range(repeats):
        for name in METHODS:
            work = functools.partial(new_bases, name, factors, bases)
            seconds, found = common.timed(work, device)
            case[name]["seconds"].append(seconds)
            error = found.mT @ found - torch.eye(size, device=device)
            case[name]["error"] = error.abs().max().item()
            case[name]["distance"] = off_diagonal_share(factors, found).median().item()
    return case


def report(cases):
    """The table of all sizes, and the last line."""
    rows = []
    speedups = []
    for case in cases:
        milliseconds = {}
        for name in METHODS:
            milliseconds[name] = 1000 * statistics.median(case[name]["seconds"])
        speedups.append(milliseconds["loop"] / milliseconds["batched"])
        row = [case["size"], case["count"]]
        row += [f"{value:.1f}" for value in milliseconds.values()]
        row += [f"{case['batched']['error']:.1e}", case["rejects"], f"{case['before']:.1e}"]
        row += [f"{case[name]['distance']:.1e}" for name in METHODS]
        rows.append(row)
    header = ["size", "factors", *[f"{name}, ms" for name in METHODS]]
    header += ["largest error, batched", "rejects", "distance before"]
    header += [f"after {name}" for name in METHODS]
    error = max(case["batched"]["error"] for case in cases)
    line = f"qr_speedup:{statistics.median(speedups):.2f} max_error:{error:.1e}"
    return common.markdown_table(header, rows), line


def main(argv=None):
    defaults = {"sizes": "64,128,256,512,1024", "repeats": 3, "device": "auto"}
    arguments = common.parser(__doc__, **defaults).parse_args(argv)
    device = train_gpt.Runtime(arguments.device).device  # on a CPU it computes with one thread
    cases = []
    for size in map(int, arguments.sizes.split(",")):
        count = max(2, min(64, FACTORS_OF_ALL_SIZES // size**2))
        cases.append(measure(size, count, arguments.repeats, device))
    table, line = report(cases)
    facts = common.environment(device)
    common.write_results(arguments.results, "qr", facts, {"cases": cases}, f"{table}\n\n`{line}`")
    print(f"{table}\n{line}")


if __name__ == "__main__":
    main()
