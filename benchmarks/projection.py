"""The projection that keeps updates off frozen directions: forms of V <- V - V Hᵀ H.

    python benchmarks/projection.py [--repeats 5] [--device auto]

H (k, h, m) holds the frozen right singular vectors of k matrices and V (k, l, m) an update of the
others. Both lie in two parts along their singular directions, as two ranks would hold them:
    gram     matrix by matrix, through Hᵀ H (m, m)
    joined   all matrices in one batch, as (V Hᵀ) H, with the parts of H joined in each step
    cached   likewise, with H joined once: continual.project_update, whose ranks own whole matrices
    wrong    each rank subtracts the sum over ranks of its part of V times its part of Hᵀ, times its
             part of H: these products are blocks of different rows and columns, no partial sums. A
             published optimizer does so.
Errors are the largest difference from float64, over the largest entry of V. Results:
benchmarks/results/projection.{json,md}. The last line is `projection_speedup:<median over sizes of
the time of gram over that of cached> max_error:<of cached> wrong_form_error:<of wrong>`.
"""

import functools
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import continual
import train_gpt
from benchmarks import common

# Matrices of a bank, directions that may move, frozen ones, channels: as 64 channels, fineweb's
# attention and fineweb's MLP have them at an unfreeze_rank_ratio of a half.
SIZES = ((20, 32, 32, 64), (8, 384, 384, 768), (2, 384, 384, 3072))


def gram(update, frozen_parts):
    frozen = torch.cat(frozen_parts, 1)
    pairs = zip(update, frozen, strict=True)
    return torch.stack([one - one @ (own.mT @ own) for one, own in pairs])


def joined(update, frozen_parts):
    return cached(update, torch.cat(frozen_parts, 1))


def cached(update, frozen):
    """The trainer's form, in which no directions of the left side are frozen."""
    nothing = update.new_empty(*update.shape[:2], 0)
    return continual.project_update(update.clone(), nothing, frozen)


def wrong(update, frozen_parts):
    parts = list(zip(update.chunk(2, 1), frozen_parts, strict=True))
    reduced = sum(part @ own.mT for part, own in parts)
    return torch.cat([part - reduced @ own for part, own in parts], 1)


FORMS = {"gram": gram, "joined": joined, "cached": cached}


def measure(size, repeats, device):
    """{form: seconds and error} of a size; forms take turns."""
    count, moving, frozen, channels = size
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(count, channels, frozen, generator=generator)
    directions = torch.linalg.qr(drawn).Q.mT.contiguous().to(device)
    update = torch.randn(count, moving, channels, generator=generator).to(device)
    exact = update.double() - update.double() @ directions.double().mT @ directions.double()
    parts = directions.chunk(2, 1)
    case = {"size": size, **{name: {"seconds": []} for name in (*FORMS, "wrong")}}
    for _ in range(repeats + 1):
        for name, form in {**FORMS, "wrong": wrong}.items():
            frozen = directions if name == "cached" else parts
            seconds, found = common.timed(functools.partial(form, update, frozen), device)
            case[name]["seconds"].append(seconds)
            case[name]["error"] = ((found - exact).abs().max() / update.abs().max()).item()
    for name in (*FORMS, "wrong"):
        del case[name]["seconds"][0]  # the first call warms up
    return case


def time_of(case, form):
    return statistics.median(case[form]["seconds"])


def report(cases):
    """The table of all sizes, and the last line."""
    header = ["matrices, moving, frozen, channels", *[f"{name}, ms" for name in FORMS]]
    header += [f"error, {name}" for name in (*FORMS, "wrong")]
    rows = []
    for case in cases:
        times = [f"{1000 * time_of(case, name):.2f}" for name in FORMS]
        errors = [f"{case[name]['error']:.1e}" for name in (*FORMS, "wrong")]
        rows.append([", ".join(map(str, case["size"])), *times, *errors])
    speedup = statistics.median(time_of(case, "gram") / time_of(case, "cached") for case in cases)
    error = max(case["cached"]["error"] for case in cases)
    wrong_error = min(case["wrong"]["error"] for case in cases)
    line = f"projection_speedup:{speedup:.2f} max_error:{error:.1e} "
    return common.markdown_table(header, rows), f"{line}wrong_form_error:{wrong_error:.1e}"


def main(argv=None):
    arguments = common.parser(__doc__, repeats=5, device="auto").parse_args(argv)
    device = train_gpt.Runtime(arguments.device).device  # on a CPU it computes with one thread
    cases = [measure(size, arguments.repeats, device) for size in SIZES]
    table, line = report(cases)
    facts = common.environment(device)
    page = f"{table}\n\n`{line}`"
    common.write_results(arguments.results, "projection", facts, {"cases": cases}, page)
    print(f"{table}\n{line}")


if __name__ == "__main__":
    main()
