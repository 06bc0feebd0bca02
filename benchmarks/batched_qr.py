"""Measure the eigenbasis refresh against a loop of torch.linalg.qr, as in published code.

    python benchmarks/batched_qr.py [--device auto] [--repeats 7] [--scale N]

All do one whole refresh: factor times basis, columns sorted by Rayleigh quotient, an orthonormal
basis of them, and the second moment permuted alike. `loop` does so matrix by matrix with
torch.linalg.qr, `streams` (CUDA) spreads that over eight streams, `eigh` decomposes each factor,
`refresh` is train_gpt.refresh_eigenbases with the method that training would use on the device, and
the other methods stand beside it. Factors are made as training makes them: running means of
products of low-rank gradients whose spectrum spans decades; each basis is that of the factor one
step before.

Counts and sizes of all but the nano track's shapes are divided by --scale: on a CPU by 4 unless
told otherwise. The last line then is of the nano track's shapes alone, those that a CPU trains.
Arms take turns; times are medians, speed-ups the medians of each round's. Results:
benchmarks/results/batched_qr.{json,md}, named batched_qr_<device> for CUDA.
"""

import functools
import math
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common

SHAPES = ((60, 256), (22, 768), (96, 1024), (22, 3072))  # matrices, size
ENOUGH_SECONDS = 20  # of one arm on one shape: it is not repeated beyond
STREAMS = 8


def nano_shapes():
    """All bases of the nano track at once, and the share of one staggered step."""
    config = train_gpt.TRACKS["nano"]
    sides = {config.model_dim: 10 * config.num_layers, config.mlp_dim: 2 * config.num_layers}
    kept = [(count, size) for size, count in sides.items() if size <= config.one_sided_above]
    found = []
    for count, size in kept:
        found += [(count, size), (math.ceil(count / config.basis_every), size)]
    return found


def training_factors(count, size, device, seed=0, steps=12):
    """Kronecker factors (count, size, size) of a short history, and bases of the step before."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    spectrum = torch.logspace(0, -3, size, device=device)
    frame = torch.linalg.qr(normal(size, size)).Q * spectrum
    factor = torch.zeros(count, size, size, device=device)
    basis = torch.eye(size, device=device).repeat(count, 1, 1)
    for step in range(steps):
        # Near the eigenvectors, as after many refreshes, and cheaper than eigh for large sizes.
        if step == steps - 1:
            for _ in range(4):
                basis = train_gpt.eigenbasis_step(factor, basis, "householder")[0]
        grad = 1e-3 * frame @ normal(count, size, max(1, size // 4))
        factor.lerp_(grad @ grad.mT / size, 1 - train_gpt.FACTOR_BETA)
    return factor, basis


def by_qr(factor, product):
    return torch.linalg.qr(product).Q


def by_eigh(factor, product):
    return torch.linalg.eigh(factor).eigenvectors.flip(-1)


def refresh_one(factor, basis, moment, decompose):
    """What published code does for one matrix. Returns its new basis and moment."""
    product = factor @ basis
    order = (basis * product).sum(0).argsort(descending=True)
    return decompose(factor, product[:, order]), moment[order]


def arms(factor, basis):
    """{name: function that returns the new bases (count, size, size)} of one shape."""
    device = factor.device
    moment = torch.rand(factor.shape, device=device)
    rejects = torch.zeros(len(factor), dtype=torch.int32, device=device)

    def loop(decompose):
        matrices = zip(factor, basis, moment, strict=True)
        return torch.stack([refresh_one(*matrix, decompose)[0] for matrix in matrices])

    def streams():
        current = torch.cuda.current_stream()
        results = []
        pool = [torch.cuda.Stream() for _ in range(STREAMS)]
        for stream in pool:
            stream.wait_stream(current)
        for index, matrix in enumerate(zip(factor, basis, moment, strict=True)):
            with torch.cuda.stream(pool[index % STREAMS]):
                results.append(refresh_one(*matrix, by_qr)[0])
        for stream in pool:
            current.wait_stream(stream)
        return torch.stack(results)

    def refresh(method):
        bank = {
            "row_factor": factor,
            "row_basis": basis.clone(),
            "moment": moment.clone(),
            "rejects": rejects,
        }

        def run():
            rejects.zero_()
            train_gpt.refresh_eigenbases([bank], method)
            return bank["row_basis"]

        return run

    chosen = train_gpt.refresh_method(10**6, device)
    functions = {"loop": functools.partial(loop, by_qr), "refresh": refresh(chosen)}
    if device.type == "cuda":
        functions["streams"] = streams
    for method in ("householder", "cholesky"):
        if method != chosen:
            functions[method] = refresh(method)
    functions["eigh"] = functools.partial(loop, by_eigh)
    return functions, rejects


def measure(count, size, device, repeats):
    """Times, errors and rejects of one shape."""
    factor, basis = training_factors(count, size, device)
    functions, rejects = arms(factor, basis)
    seconds = {name: [] for name in functions}
    facts = {}
    for repeat in range(repeats + 1):  # the first warms up, and is looked at
        for name, function in functions.items():
            if sum(seconds[name]) > ENOUGH_SECONDS:
                continue
            if repeat == 0 and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            taken, bases = common.timed(function, device)
            if repeat or taken > ENOUGH_SECONDS:
                seconds[name].append(taken)
            if repeat == 0:
                error = (bases.mT @ bases - torch.eye(size, device=device)).abs().max().item()
                memory = None
                if device.type == "cuda":
                    memory = torch.cuda.max_memory_allocated() / 2**20
                facts[name] = {
                    "orth_error": error,
                    "peak_memory_mib": memory,
                    "rejects": int(rejects.sum()) if name not in ("loop", "streams", "eigh") else 0,
                }
            del bases
    for name, values in seconds.items():
        facts[name]["ms"] = 1000 * statistics.median(values)
        rounds = zip(seconds["loop"], values, strict=False)  # a slow one has fewer
        facts[name]["speedup"] = statistics.median(base / own for base, own in rounds)
    return {
        "count": count,
        "size": size,
        "method": train_gpt.refresh_method(10**6, device),
        "arms": facts,
    }


def report(results, scale):
    """(the text of the results, its last line)"""
    rows = []
    for result in results:
        shape = f"{result['count']}x{result['size']}²"
        if result["scaled"]:
            shape += " (scaled down)"
        for name, fact in result["arms"].items():
            label = f"refresh ({result['method']})" if name == "refresh" else name
            memory = fact["peak_memory_mib"]
            rows.append(
                [
                    shape,
                    label,
                    f"{fact['ms']:.2f}",
                    f"{fact['speedup']:.2f}x",
                    f"{fact['orth_error']:.1e}",
                    fact["rejects"],
                    "-" if memory is None else f"{memory:.0f}",
                ]
            )
    table = common.markdown_table(
        ["shape", "arm", "ms", "speed / loop", "orthogonality error", "rejects", "peak MiB"], rows
    )
    own = [result["arms"]["refresh"] for result in results if not result["scaled"]]
    speedup = min(fact["speedup"] for fact in own)
    error = max(fact["orth_error"] for fact in own)
    rejects = sum(fact["rejects"] for fact in own)
    last = f"qr_speedup:{speedup:.2f} max_orth_error:{error:.1e} rejects:{rejects}"
    note = ""
    if scale > 1:
        note = f"\n\nShapes are divided by {scale}; peak memory is measured on CUDA only."
    return f"{table}\n\n{last}{note}", last


def main(argv=None):
    parser = common.parser(__doc__, device="auto", repeats=7)
    scale_help = "divide counts and sizes by this (default: 1 on CUDA, 4 on a CPU)"
    parser.add_argument("--scale", type=int, help=scale_help)
    arguments = parser.parse_args(argv)
    device = train_gpt.Runtime(arguments.device).device
    scale = arguments.scale or (1 if device.type == "cuda" else 4)
    shapes = [(math.ceil(count / scale), size // scale) for count, size in SHAPES]
    results = []
    for count, size in [*shapes, *nano_shapes()]:
        scaled = scale > 1 and (count, size) in shapes
        results.append({**measure(count, size, device, arguments.repeats), "scaled": scaled})
        times = ", ".join(
            f"{name} {fact['ms']:.2f} ms" for name, fact in results[-1]["arms"].items()
        )
        print(f"{count}x{size}²: {times}", flush=True)
    facts = common.environment(device)
    text, last = report(results, scale)
    name = "batched_qr" if device.type == "cpu" else f"batched_qr_{common.slug(facts['device'])}"
    common.write_results(arguments.results, name, facts, {"scale": scale, "results": results}, text)
    print(f"scaled:{int(scale > 1)} device:{facts['device']}")
    print(last)
    return 0


if __name__ == "__main__":
    sys.exit(main())
