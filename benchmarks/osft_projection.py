"""Projecting away frozen singular directions: which collective is right where factors are shared by rows, and its cost.

    python benchmarks/osft_projection.py [--world-sizes 2,4] [--repeats 5] [--device auto]

The trainer keeps matrices dense and whole on their owners (continual.py, project_update), so nothing travels. Code that
trains the factors U_l and V_l themselves, and shares the rows of every tensor among ranks (FSDP), has to project their
gradients against U_h and V_h of which it holds a part. The ways to do so are functions here, and the arms:
    gram           V's side by the (M, M) matrix V_hᵀ V_h, summed over ranks
    gathered       V's side by V_h, all-gathered; cached: gathered once and kept
    coefficients   V stored transposed, so that ranks share the model's dimension on both sides: products with the
                   frozen factors are partial sums, and one all-reduce serves all matrices
    owned          the trainer's own: dense updates of whole matrices, matrix by matrix on its owner
    wrong          V's side by the all-reduce of local products, which are blocks and no partial sums
Starts itself through torchrun at each world size (gloo on CPUs, NCCL where there are that many GPUs). Errors are
relative to float64, bytes are those that Runtime counts, times are medians as ratios to `gathered`, arms taking turns.
Then, in one process: the forward pass, dense and factored, and what the projection adds to the continual track's step.
Results: benchmarks/results/osft_projection.{json,md}. Exit status 1 where an arm that ought to be right is not.
"""
import dataclasses
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common  # noqa: E402
import continual  # noqa: E402
import train_gpt  # noqa: E402

# (rows N, columns M) of a layer's matrices. Float64 references and CPU ranks ask for less than the models' sizes.
SHAPES = {
    "GPT-2 small, widths / 2": ((384, 384), (384, 384), (1536, 384)),
    "Llama 8B, widths / 8": ((512, 512), (128, 512), (1792, 512)),
    "nothing divides": ((203, 101), (67, 301))}
TINY_SHAPES = {"even": ((16, 8), (8, 24)), "nothing divides": ((13, 7), (5, 11))}
RATIO = 0.5
ARMS = ("gram", "gathered", "cached", "coefficients", "owned", "wrong")
TOLERANCE = 1e-5


# ----- projections of gradients of shared factors

class Side(NamedTuple):
    """One side of a matrix of which ranks share rows along the model's dimension d: U, or V stored transposed."""
    grad: Tensor    # (d, k_l), of the trained factor; changed in place
    frozen: Tensor  # (d, k_h)
    shared: bool = True  # whether these are this rank's rows; False: every rank holds all of them


def plan_chunks(shapes, limit):
    """Cut the coefficients of several matrices, (k_h, k_l) each, by columns into chunks of at most `limit` values, or
    of one column. Returns [[(matrix, first column, end), ...], ...]. Sizes are global: all ranks plan the same."""
    chunks, room = [[]], limit
    for index, (rows, columns) in enumerate(shapes):
        first = 0
        while first < columns and rows:
            fit = room // rows
            if fit <= 0 and chunks[-1]:
                chunks.append([])
                room = limit
                continue
            end = min(columns, first + max(1, fit))
            chunks[-1].append((index, first, end))
            room, first = room - rows * (end - first), end
    return [chunk for chunk in chunks if chunk]


def project_by_coefficients(sides, runtime, limit=2**24):
    """Project all sides in place, with one all-reduce for each `limit` coefficients of all of them together.

    frozenᵀ grad over the rows of a rank is a partial sum of the product over all rows, so summing is right. What every
    rank holds whole is not summed: that would multiply it by the world size."""
    shared = [side for side in sides if side.shared]
    for side in sides:
        if not side.shared:
            side.grad.sub_(side.frozen @ (side.frozen.T @ side.grad))
    for chunk in plan_chunks([(side.frozen.size(1), side.grad.size(1)) for side in shared], limit):
        parts = [(shared[index], shared[index].grad[:, first:end]) for index, first, end in chunk]
        products = [side.frozen.T @ grad for side, grad in parts]
        flat = torch.cat([product.flatten() for product in products])
        train_gpt.wait(runtime.all_reduce(flat, "coefficients"))
        for (side, grad), product in zip(parts, flat.split([product.numel() for product in products])):
            grad.sub_(side.frozen @ product.view(side.frozen.size(1), -1))


def gathered_right(frozen, count, runtime, cache=None, key=None):
    """The whole V_h (count, M) of the ranks' rows of it. All ranks gather or none does: `count` is global, and how many
    rows a rank holds, if any, decides nothing. cache: a dict that keeps V_h by key. It is the caller's, never part of
    a state dict, and has to be cleared when matrices are decomposed again."""
    if cache is not None and key in cache:
        return cache[key]
    whole, work = runtime.gather_shares(frozen, count, "V_h")
    train_gpt.wait(work)
    if cache is not None:
        cache[key] = whole
    return whole


def project_right(grad, whole):
    """grad (rows of V_l, M), in place, against the whole V_h (k_h, M)."""
    grad.sub_((grad @ whole.T) @ whole)


def project_by_gram(grad, frozen, runtime):
    """The same by V_hᵀ V_h, from the ranks' rows of V_h."""
    gram = frozen.T @ frozen
    train_gpt.wait(runtime.all_reduce(gram, "gram"))
    grad.sub_(grad @ gram)


def project_wrongly(grad, frozen, runtime):
    """What a published implementation does to V's side: the product of a rank's rows of V_l with its own rows of V_h is
    one block of V_l V_hᵀ, and all-reduce adds blocks up that belong side by side. Needs equal shares."""
    product = grad @ frozen.T
    train_gpt.wait(runtime.all_reduce(product, "wrong"))
    grad.sub_(product @ frozen)


# ----- one layer

class Matrix(NamedTuple):
    """Orthonormal factors and gradients, float64: U_h (N, k_h), dU (N, k_l), V_h (k_h, M), dV (k_l, M), dW (N, M)."""
    left_frozen: Tensor
    left: Tensor
    right_frozen: Tensor
    right: Tensor
    update: Tensor

    def projected(self):
        """(dU, dV, dW) without their frozen parts: the reference."""
        def off_left(x):
            return x - self.left_frozen @ (self.left_frozen.T @ x)
        def off_right(x):
            return x - (x @ self.right_frozen.T) @ self.right_frozen
        return off_left(self.left), off_right(self.right), off_right(off_left(self.update))


def draw_matrix(rows, columns, seed, ratio=RATIO):
    generator = torch.Generator().manual_seed(seed)
    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)
    rank = min(rows, columns)
    frozen = continual.frozen_count(rank, ratio)
    left, right = (torch.linalg.qr(draw(size, frozen)).Q for size in (rows, columns))
    return Matrix(left, draw(rows, rank - frozen), right.T.contiguous(), draw(rank - frozen, columns),
                  draw(rows, columns))


def run_arm(arm, matrices, runtime, cache):
    """Project a layer by one arm from this rank's shares, float32. Returns (seconds, [(what was computed, its part of
    the reference), ...])."""
    def part(tensor):
        return tensor[slice(*runtime.share(len(tensor)))]
    def load(tensor):
        return tensor.to(runtime.device, torch.float32)
    references = [matrix.projected() for matrix in matrices]
    pairs = []
    if arm == "owned":
        low, high = runtime.share(len(matrices))
        mine = [[load(tensor)[None] for tensor in (matrix.update, matrix.left_frozen, matrix.right_frozen)]
                for matrix in matrices[low:high]]
        pairs = [(parts[0], reference[2][None]) for parts, reference in zip(mine, references[low:high])]
    else:
        turned = arm == "coefficients"  # V is stored transposed
        lefts = [Side(load(part(matrix.left)), load(part(matrix.left_frozen))) for matrix in matrices]
        rights = [Side(*(load(part(whole.T if turned else whole)) for whole in (matrix.right, matrix.right_frozen)))
                  for matrix in matrices]
        for left, right, (du, dv, _) in zip(lefts, rights, references):
            pairs += [(left.grad, part(du)), (right.grad, part(dv.T if turned else dv))]
    if runtime.world_size > 1:
        torch.distributed.barrier()
    runtime.synchronize()
    began = time.perf_counter()
    if arm == "owned":
        for parts in mine:
            continual.project_update(*parts)
    elif arm == "coefficients":
        project_by_coefficients(lefts + rights, runtime)
    else:
        for index, (left, right, matrix) in enumerate(zip(lefts, rights, matrices)):
            project_by_coefficients([left], runtime)
            if arm == "gram":
                project_by_gram(right.grad, right.frozen, runtime)
            elif arm == "wrong":
                project_wrongly(right.grad, right.frozen, runtime)
            else:
                project_right(right.grad, gathered_right(right.frozen, len(matrix.right_frozen), runtime,
                                                         cache if arm == "cached" else None, index))
    runtime.synchronize()
    return time.perf_counter() - began, pairs


def relative_error(pairs, summed, runtime):
    """The largest |x - reference| / |reference| (Frobenius norms) of the tensors of a layer, on all ranks the same.
    summed: ranks hold parts of the same tensors, whose squares add up; else each holds tensors of its own."""
    sums = torch.tensor([[(x.double().cpu() - reference.cpu()).square().sum(), reference.square().sum()]
                         for x, reference in pairs] or [[0.0, 1.0]], dtype=torch.float64)
    if summed and runtime.world_size > 1:
        torch.distributed.all_reduce(sums)
    error = (sums[:, 0] / sums[:, 1]).max().sqrt()
    if runtime.world_size > 1:
        torch.distributed.all_reduce(error, torch.distributed.ReduceOp.MAX)
    return error.item()


def measure(name, shapes, runtime, repeats):
    """One layer: {"shapes", arm: {"error", "bytes" sent by this rank, "seconds"}}. `wrong` needs equal shares, and sits
    out where they differ."""
    matrices = [draw_matrix(rows, columns, seed) for seed, (rows, columns) in enumerate(shapes)]
    equal = all(len(part) % runtime.world_size == 0 for matrix in matrices for part in matrix[2:4])
    found, cache = {}, {}
    for arm in ARMS:
        if arm != "wrong" or equal:
            found[arm] = {"error": 0.0, "bytes": 0, "seconds": []}
    for repeat in range(repeats + 1):  # the first warms up, and fills the cache
        order = list(found)
        for arm in order[repeat % len(order):] + order[:repeat % len(order)]:
            runtime.ledger.clear()
            seconds, pairs = run_arm(arm, matrices, runtime, cache)
            if repeat:
                found[arm]["seconds"].append(seconds)
                found[arm]["bytes"] = sum(size for size, _ in runtime.ledger.values())
            found[arm]["error"] = max(found[arm]["error"], relative_error(pairs, arm != "owned", runtime))
    return {"layer": name, "shapes": shapes, "world_size": runtime.world_size, "arms": found}


# ----- the forward pass

def forward_naive(x, left, scale, right, left_low, scale_low, right_low):
    """x (B, T, M) through U diag(S) V, frozen and trained apart: left (N, k_h), scale (k_h,), right (k_h, M)."""
    return (x @ right.T * scale) @ left.T + (x @ right_low.T * scale_low) @ left_low.T


def forward_fused(x, left, scale, right, left_low, scale_low, right_low):
    """The same on flat rows, the second product added where the first one lies."""
    flat = x.flatten(0, 1)
    y = torch.mm(torch.mm(flat, right.T).mul_(scale), left.T)
    y.addmm_(torch.mm(flat, right_low.T).mul_(scale_low), left_low.T)
    return y.view(*x.shape[:2], -1)


@torch.no_grad()
def measure_forward(shapes, device, repeats, tokens):
    """[{"shape", "naive" and "fused": time over dense, "expected": their multiplications over dense, "error"}]."""
    rows_found = []
    for rows, columns in dict.fromkeys(shape for layer in shapes.values() for shape in layer):
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(rows, columns, generator=generator).to(device)
        left, scale, right = torch.linalg.svd(weight, full_matrices=False)
        cut = continual.frozen_count(len(scale), RATIO)
        factors = [part.contiguous() for half in (slice(cut), slice(cut, None))
                   for part in (left[:, half], scale[half], right[half])]
        x = torch.randn(2, tokens // 2, columns, generator=generator).to(device)
        arms = {"dense": lambda: x @ weight.T, "naive": lambda: forward_naive(x, *factors),
                "fused": lambda: forward_fused(x, *factors)}
        seconds, error = {arm: [] for arm in arms}, 0.0
        exact = x.double() @ weight.double().T
        for repeat in range(repeats + 1):
            for arm, function in arms.items():
                taken, y = common.timed(function, device)
                if repeat:
                    seconds[arm].append(taken)
                error = max(error, ((y.double() - exact).norm() / exact.norm()).item())
        median = {arm: statistics.median(values) for arm, values in seconds.items()}
        rows_found.append({"shape": (rows, columns), "naive": median["naive"] / median["dense"],
                           "fused": median["fused"] / median["dense"], "error": error,
                           "expected": len(scale) * (rows + columns) / (rows * columns)})
    return rows_found


# ----- a training step

def measure_step(config, rounds, ratios=(0.25, 0.5)):
    """{ratio: [what the projection adds to a step, one value a round]}, as a share of the step without it.

    One model, one gradient: the optimizer's step runs with and without frozen factors in turns, which change nothing
    else about it; the forward and backward passes of the round are the rest of the step."""
    runtime = train_gpt.Runtime(config.device)
    trainer = train_gpt.Trainer(config, runtime)
    shards, *_ = train_gpt.open_corpus(config)
    loader = train_gpt.TrainLoader(config, shards, runtime)
    continual.train_matrices_alone(trainer)
    matrices = trainer.optimizer.matrices
    rules = {None: matrices.rule}
    for ratio in ratios:
        matrices.rule = rules[None]
        continual.protect(matrices, trainer.model.state_dict(), ratio)
        rules[ratio] = matrices.rule
    added = {ratio: [] for ratio in ratios}
    try:
        for turn in range(rounds + 1):
            batch, seconds = loader.next(), {ratio: 0.0 for ratio in rules}
            passes, _ = common.timed(lambda: trainer.accumulate(turn, batch), runtime.device)
            grads = {layout: layout.grad.clone() for layout in matrices.layouts.values()}
            for repeat in range(4):
                for ratio, matrices.rule in list(rules.items())[::1 if repeat % 2 else -1]:
                    for layout, grad in grads.items():
                        layout.grad.copy_(grad)
                    taken, _ = common.timed(lambda: trainer.optimizer.step(turn, 1e-3), runtime.device)
                    seconds[ratio] += taken / 4
            if turn:  # the first compiles
                for ratio in ratios:
                    added[ratio].append((seconds[ratio] - seconds[None]) / (passes + seconds[None]))
    finally:
        loader.close()
    return added


# ----- report

def exchange_table(cases):
    lines = []
    for case in cases:
        base = statistics.median(case["arms"]["gathered"]["seconds"])
        for arm in ARMS:
            if own := case["arms"].get(arm):
                lines.append([case["layer"], case["world_size"], arm, f"{own['error']:.1e}",
                              f"{own['bytes'] / 1024:,.1f}", f"{statistics.median(own['seconds']) / base:.2f}"])
            else:
                lines.append([case["layer"], case["world_size"], arm, "shares of different sizes", "-", "-"])
    return common.markdown_table(["layer", "world size", "arm", "error against float64", "KiB sent by rank 0",
                                  "time / gathered"], lines)


def main():
    arguments = common.ranks_parser(__doc__, world_sizes="2,4", rounds=15,
                                    data=str(common.ROOT / train_gpt.TRACKS["continual"].data)).parse_args()
    shapes = TINY_SHAPES if arguments.tiny else SHAPES
    if arguments.worker:
        return common.work_as_rank(arguments, lambda runtime: [measure(name, layer, runtime, arguments.repeats)
                                                               for name, layer in shapes.items()])
    cases, device = common.cases_of_ranks(__file__, arguments)
    here = train_gpt.Runtime(arguments.device).device
    forward = measure_forward(shapes, here, arguments.repeats, 64 if arguments.tiny else 2048)
    tiny = {**common.TINY, "micro_batches": ((0.0, 2),), "steps": 40} if arguments.tiny else {}
    config = {"device": arguments.device, "data": arguments.data, "seed": 1, **tiny}
    added = measure_step(dataclasses.replace(train_gpt.TRACKS["continual"], **config), arguments.rounds)
    table = exchange_table(cases)
    forwards = common.markdown_table(
        ["matrix", "multiplications / dense", "time / dense, naive", "time / dense, fused", "error against float64"],
        [["x".join(map(str, row["shape"])), f"{row['expected']:.2f}", f"{row['naive']:.2f}", f"{row['fused']:.2f}",
          f"{row['error']:.1e}"] for row in forward])
    steps = ", ".join(f"{100 * statistics.median(values):.1f} % at ratio {ratio} (quartiles "
                      f"{' to '.join(f'{100 * q:.1f}' for q in statistics.quantiles(values, n=4)[::2])})"
                      for ratio, values in added.items())
    text = (f"{table}\n\nHalf of the directions frozen; medians of {arguments.repeats}; float32; more ranks than cores "
            f"share them.\n\nForward pass, all factors, 2,048 tokens:\n\n{forwards}\n\nWhat the projection adds to a "
            f"step of the continual track: {steps}.")
    figures = {"cases": cases, "forward": forward, "added_to_step": added}
    common.write_results(arguments.results, "osft_projection", common.environment(device), figures, text)
    print(table, forwards, f"projection adds {steps}", sep="\n\n")
    right = max(own["error"] for case in cases for arm, own in case["arms"].items() if arm != "wrong")
    wrong = min((case["arms"]["wrong"]["error"] for case in cases if "wrong" in case["arms"]), default=float("nan"))
    print(f"max_error:{max(right, *(row['error'] for row in forward)):.1e} wrong_allreduce_error:{wrong:.3f}")
    return int(not right < TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
