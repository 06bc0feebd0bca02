"""Show which projection of shared factors off frozen directions is right, and what it costs.

    python benchmarks/osft_projection.py [--world-sizes 2,4] [--repeats 5] [--device auto]

The trainer keeps matrices dense and whole on their owners (continual.py, project_update), so
nothing travels. Code that trains the factors U_l and V_l themselves, and shares the rows of every
tensor among ranks (FSDP), has to project their gradients against U_h and V_h of which it holds a
part. The ways to do so are functions here, and the arms:
    gram           V's side by the (M, M) matrix V_hᵀ V_h, summed over ranks
    gathered       V's side by V_h, all-gathered; cached: gathered once and kept
    coefficients   V stored transposed, so that ranks share the model's dimension on both sides:
                   products with the frozen factors are partial sums, and one all-reduce serves all
                   matrices
    owned          the trainer's own: dense updates of whole matrices, each on its owner
    wrong          V's side by the all-reduce of local products, which are blocks and no partial
                   sums
Starts itself through torchrun at each world size (gloo on CPUs, NCCL where there are that many
GPUs). Errors are relative to float64, bytes are those that Runtime counts, times are medians as
ratios to `gathered`, arms taking turns. Then, in one process: the forward pass, dense and factored,
and what the projection adds to the continual track's step. Results:
benchmarks/results/osft_projection.{json,md}. Exit status 1 where an arm that ought to be right is
not.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import continual
import train_gpt
from benchmarks import common

# (rows N, columns M) of a layer's matrices. Float64 references and CPU ranks ask for less than the
# models' sizes.
SHAPES = {
    "GPT-2 small, widths / 2": ((384, 384), (384, 384), (1536, 384)),
    "Llama 8B, widths / 8": ((512, 512), (128, 512), (1792, 512)),
    "nothing divides": ((203, 101), (67, 301)),
}
TINY_SHAPES = {"even": ((16, 8), (8, 24)), "nothing divides": ((13, 7), (5, 11))}
RATIO = 0.5
ARMS = ("gram", "gathered", "cached", "coefficients", "owned", "wrong")
TOLERANCE = 1e-5


# ----- projections of gradients of shared factors


class Side(NamedTuple):
    """One side of a matrix of which ranks share rows along the model's dimension d: U, or V stored
    transposed."""

    grad: Tensor  # (d, k_l), of the trained factor; changed in place
    frozen: Tensor  # (d, k_h)
    is_shared: bool = True  # whether these are this rank's rows; else every rank holds all of them


def plan_chunks(shapes, limit):
    """Cut the coefficients of several matrices, (k_h, k_l) each, by columns into chunks of at most
    `limit` values, or of one column.

    Returns [[(matrix, first column, end), ...], ...]. Sizes are global: all ranks plan the same.
    """
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
            room -= rows * (end - first)
            first = end
    return [chunk for chunk in chunks if chunk]


def project_by_coefficients(sides, runtime, limit=2**24):
    """Project all sides in place, with one all-reduce for each `limit` coefficients of all of them
    together.

    frozenᵀ grad over the rows of a rank is a partial sum of the product over all rows, so summing
    is right. What every rank holds whole is not summed: that would multiply it by the world size.
    """
    shared = [side for side in sides if side.is_shared]
    for side in sides:
        if not side.is_shared:
            side.grad.sub_(side.frozen @ (side.frozen.T @ side.grad))
    sizes = [(side.frozen.size(1), side.grad.size(1)) for side in shared]
    for chunk in plan_chunks(sizes, limit):
        parts = [(shared[index], shared[index].grad[:, first:end]) for index, first, end in chunk]
        products = [side.frozen.T @ grad for side, grad in parts]
        flat = torch.cat([product.flatten() for product in products])
        train_gpt.wait(runtime.all_reduce(flat, "coefficients"))
        summed = flat.split([product.numel() for product in products])
        for (side, grad), product in zip(parts, summed, strict=True):
            grad.sub_(side.frozen @ product.view(side.frozen.size(1), -1))


def gathered_right(frozen, count, runtime, cache=None, key=None):
    """The whole V_h (count, M) of the ranks' rows of it.

    All ranks gather or none does: `count` is global, and how many rows a rank holds, if any,
    decides nothing. cache: a dict that keeps V_h by key. It is the caller's, never part of a state
    dict, and has to be cleared when matrices are decomposed again.
    """
    if cache is not None and key in cache:
        return cache[key]
    whole = runtime.join(frozen, count, "V_h")
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
    """What a published implementation does to V's side. Needs equal shares.

    The product of a rank's rows of V_l with its own rows of V_h is one block of V_l V_hᵀ, and
    all-reduce adds blocks up that belong side by side.
    """
    product = grad @ frozen.T
    train_gpt.wait(runtime.all_reduce(product, "wrong"))
    grad.sub_(product @ frozen)


# ----- one layer


class Matrix(NamedTuple):
    """Orthonormal factors and gradients of a matrix, float64."""

    left_frozen: Tensor  # U_h (N, k_h)
    left: Tensor  # dU (N, k_l)
    right_frozen: Tensor  # V_h (k_h, M)
    right: Tensor  # dV (k_l, M)
    update: Tensor  # dW (N, M)

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
    return Matrix(
        left_frozen=torch.linalg.qr(draw(rows, frozen)).Q,
        right_frozen=torch.linalg.qr(draw(columns, frozen)).Q.T.contiguous(),
        left=draw(rows, rank - frozen),
        right=draw(rank - frozen, columns),
        update=draw(rows, columns),
    )


class Layer:
    """One rank's shares of the matrices of a layer, and what they have to become."""

    def __init__(self, matrices, runtime, is_turned):
        """is_turned: whether V is stored transposed."""
        self.matrices, self.runtime, self.is_turned = matrices, runtime, is_turned
        self.lefts = [self.side(matrix.left, matrix.left_frozen) for matrix in matrices]
        self.rights = [
            self.side(self.turn(matrix.right), self.turn(matrix.right_frozen))
            for matrix in matrices
        ]

    def turn(self, tensor):
        return tensor.T if self.is_turned else tensor

    def part(self, tensor):
        low, high = self.runtime.owned_range(len(tensor))
        return tensor[low:high]

    def side(self, grad, frozen):
        device = self.runtime.device
        return Side(*(self.part(each).to(device, torch.float32) for each in (grad, frozen)))

    def pairs(self):
        """[(a gradient, its part of the reference), ...]"""
        found = []
        for left, right, matrix in zip(self.lefts, self.rights, self.matrices, strict=True):
            du, dv, _ = matrix.projected()
            found.append((left.grad, self.part(du)))
            found.append((right.grad, self.part(self.turn(dv))))
        return found

    def project(self, arm, cache):
        """Project all gradients by one arm, in place."""
        if arm == "coefficients":
            project_by_coefficients(self.lefts + self.rights, self.runtime)
            return
        for index, (left, right) in enumerate(zip(self.lefts, self.rights, strict=True)):
            project_by_coefficients([left], self.runtime)
            if arm == "gram":
                project_by_gram(right.grad, right.frozen, self.runtime)
            elif arm == "wrong":
                project_wrongly(right.grad, right.frozen, self.runtime)
            else:
                count, kept = len(self.matrices[index].right_frozen), None
                if arm == "cached":
                    kept = cache
                whole = gathered_right(right.frozen, count, self.runtime, kept, index)
                project_right(right.grad, whole)


class OwnedLayer:
    """The whole matrices of a layer that a rank owns."""

    def __init__(self, matrices, runtime):
        low, high = runtime.owned_range(len(matrices))
        self.matrices, self.factors = matrices[low:high], []
        for matrix in self.matrices:
            parts = (matrix.update, matrix.left_frozen, matrix.right_frozen)
            self.factors.append([part[None].to(runtime.device, torch.float32) for part in parts])

    def pairs(self):
        references = [matrix.projected()[2][None] for matrix in self.matrices]
        updates = [update for update, _, _ in self.factors]
        return list(zip(updates, references, strict=True))

    def project(self, arm, cache):
        for update, left, right in self.factors:
            continual.project_update(update, left, right)


def run_arm(arm, matrices, runtime, cache):
    """Project a layer by one arm from this rank's shares, float32.

    Returns (seconds, [(what was computed, its part of the reference), ...]).
    """
    if arm == "owned":
        layer = OwnedLayer(matrices, runtime)
    else:
        layer = Layer(matrices, runtime, is_turned=arm == "coefficients")
    if runtime.world_size > 1:
        torch.distributed.barrier()
    runtime.synchronize()
    began = time.perf_counter()
    layer.project(arm, cache)
    runtime.synchronize()
    return time.perf_counter() - began, layer.pairs()


def relative_error(pairs, is_summed, runtime):
    """The largest |x - reference| / |reference| (Frobenius norms) of the tensors of a layer, on all
    ranks the same.

    is_summed: ranks hold parts of the same tensors, whose squares add up; else each holds tensors
    of its own.
    """
    squares = [
        [(x.double().cpu() - reference.cpu()).square().sum(), reference.square().sum()]
        for x, reference in pairs
    ]
    sums = torch.tensor(squares or [[0.0, 1.0]], dtype=torch.float64)
    if is_summed and runtime.world_size > 1:
        torch.distributed.all_reduce(sums)
    error = (sums[:, 0] / sums[:, 1]).max().sqrt()
    if runtime.world_size > 1:
        torch.distributed.all_reduce(error, torch.distributed.ReduceOp.MAX)
    return error.item()


def measure(name, shapes, runtime, repeats):
    """One layer: {"layer", "shapes", "world_size", "arms": {arm: {"error", "bytes" sent by this
    rank, "seconds"}}}.

    `wrong` needs equal shares, and sits out where they differ.
    """
    matrices = [draw_matrix(rows, columns, seed) for seed, (rows, columns) in enumerate(shapes)]
    sizes = [len(part) for matrix in matrices for part in (matrix.right_frozen, matrix.right)]
    is_equal = all(size % runtime.world_size == 0 for size in sizes)
    arms = [arm for arm in ARMS if arm != "wrong" or is_equal]
    found = {arm: {"error": 0.0, "bytes": 0, "seconds": []} for arm in arms}
    cache = {}
    for repeat in range(repeats + 1):  # the first warms up, and fills the cache
        first = repeat % len(arms)
        for arm in arms[first:] + arms[:first]:
            runtime.ledger.clear()
            seconds, pairs = run_arm(arm, matrices, runtime, cache)
            own = found[arm]
            if repeat:
                own["seconds"].append(seconds)
                own["bytes"] = sum(size for size, _ in runtime.ledger.values())
            own["error"] = max(own["error"], relative_error(pairs, arm != "owned", runtime))
    return {"layer": name, "shapes": shapes, "world_size": runtime.world_size, "arms": found}


# ----- the forward pass


def forward_naive(x, left, scale, right, left_low, scale_low, right_low):
    """x (B, T, M) through U diag(S) V, frozen and trained apart: left (N, k_h), scale (k_h,),
    right (k_h, M)."""
    return (x @ right.T * scale) @ left.T + (x @ right_low.T * scale_low) @ left_low.T


def forward_fused(x, left, scale, right, left_low, scale_low, right_low):
    """The same on flat rows, the second product added where the first one lies."""
    flat = x.flatten(0, 1)
    y = torch.mm(torch.mm(flat, right.T).mul_(scale), left.T)
    y.addmm_(torch.mm(flat, right_low.T).mul_(scale_low), left_low.T)
    return y.view(*x.shape[:2], -1)


def factors_of(weight):
    """(left, scale, right) of the frozen part of a matrix, and of the trained one, as six
    tensors."""
    left, scale, right = torch.linalg.svd(weight, full_matrices=False)
    cut = continual.frozen_count(len(scale), RATIO)
    found = []
    for half in (slice(cut), slice(cut, None)):
        found += [left[:, half].contiguous(), scale[half], right[half].contiguous()]
    return found


@torch.no_grad()
def measure_matrix_forward(rows, columns, device, repeats, tokens):
    """{"shape", "naive" and "fused": time over dense, "expected": their multiplications over dense,
    "error"} of one matrix."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator).to(device)
    x = torch.randn(2, tokens // 2, columns, generator=generator).to(device)
    exact = x.double() @ weight.double().T
    factors = factors_of(weight)
    arms = {
        "dense": lambda: x @ weight.T,
        "naive": lambda: forward_naive(x, *factors),
        "fused": lambda: forward_fused(x, *factors),
    }
    seconds, error = {arm: [] for arm in arms}, 0.0
    for repeat in range(repeats + 1):
        for arm, function in arms.items():
            taken, y = common.timed(function, device)
            if repeat:
                seconds[arm].append(taken)
            error = max(error, ((y.double() - exact).norm() / exact.norm()).item())
    median = {arm: statistics.median(values) for arm, values in seconds.items()}
    return {
        "shape": (rows, columns),
        "naive": median["naive"] / median["dense"],
        "fused": median["fused"] / median["dense"],
        "error": error,
        "expected": min(rows, columns) * (rows + columns) / (rows * columns),
    }


def measure_forward(shapes, device, repeats, tokens):
    """What measure_matrix_forward finds for each shape of the layers."""
    distinct = dict.fromkeys(shape for layer in shapes.values() for shape in layer)
    return [measure_matrix_forward(*shape, device, repeats, tokens) for shape in distinct]


# ----- a training step


class StepArms:
    """The optimizer's step of the hidden matrices with and without frozen factors.

    They take turns on one model and one gradient, and differ in nothing else.
    """

    def __init__(self, trainer, ratios):
        continual.train_matrices_alone(trainer)
        self.trainer, self.matrices = trainer, trainer.optimizer.matrices
        self.take_step = {None: self.matrices.take_step}
        for ratio in ratios:
            self.matrices.take_step = self.take_step[None]
            continual.protect(self.matrices, trainer.model.state_dict(), ratio)
            self.take_step[ratio] = self.matrices.take_step

    def seconds(self, turn, batch, repeats=4):
        """(seconds of the forward and backward passes, {ratio: those of the step}) of a batch."""
        matrices, device = self.matrices, self.trainer.runtime.device
        passes, _ = common.timed(lambda: self.trainer.accumulate(turn, batch), device)
        grads = {layout: layout.grad.clone() for layout in matrices.layouts.values()}
        tokens, seconds = matrices.tokens, dict.fromkeys(self.take_step, 0.0)
        for repeat in range(repeats):
            order = list(seconds)
            if repeat % 2:
                order.reverse()
            for ratio in order:
                matrices.take_step, matrices.tokens = self.take_step[ratio], tokens
                for layout, grad in grads.items():
                    layout.grad.copy_(grad)
                    layout.is_empty = False
                taken, _ = common.timed(lambda: self.trainer.optimizer.step(turn, 1e-3), device)
                seconds[ratio] += taken / repeats
        return passes, seconds


def measure_step(config, runtime, rounds, ratios=(0.25, 0.5)):
    """{ratio: [what the projection adds to a step, one value a round]}, as a share of the step
    without it."""
    trainer = train_gpt.Trainer(config, runtime)
    shards, index = train_gpt.open_corpus(config).shards, trainer.table.index
    arms = StepArms(trainer, ratios)
    added = {ratio: [] for ratio in ratios}
    loader = train_gpt.TrainLoader(config, shards, runtime, index)
    try:
        for turn in range(rounds + 1):
            passes, seconds = arms.seconds(turn, loader.next_batch())
            whole = passes + seconds[None]
            if turn:  # the first compiles
                for ratio in ratios:
                    added[ratio].append((seconds[ratio] - seconds[None]) / whole)
    finally:
        loader.close()
    return added


# ----- report


def exchange_table(cases):
    lines = []
    for case in cases:
        base = statistics.median(case["arms"]["gathered"]["seconds"])
        for arm in ARMS:
            own, cells = case["arms"].get(arm), ["shares of different sizes", "-", "-"]
            if own:
                ratio = statistics.median(own["seconds"]) / base
                cells = [f"{own['error']:.1e}", f"{own['bytes'] / 1024:,.1f}", f"{ratio:.2f}"]
            lines.append([case["layer"], case["world_size"], arm, *cells])
    header = ["layer", "world size", "arm", "error against float64", "KiB sent by rank 0"]
    return common.markdown_table([*header, "time / gathered"], lines)


def forward_table(rows):
    header = ["matrix", "multiplications / dense", "time / dense, naive", "time / dense, fused"]
    lines = [
        [
            "x".join(map(str, row["shape"])),
            f"{row['expected']:.2f}",
            f"{row['naive']:.2f}",
            f"{row['fused']:.2f}",
            f"{row['error']:.1e}",
        ]
        for row in rows
    ]
    return common.markdown_table([*header, "error against float64"], lines)


def step_line(added):
    """What the projection adds to a step, in words."""
    parts = []
    for ratio, values in added.items():
        low, _, high = (100 * value for value in statistics.quantiles(values, n=4))
        median = 100 * statistics.median(values)
        parts.append(f"{median:.1f} % at ratio {ratio} (quartiles {low:.1f} to {high:.1f})")
    return ", ".join(parts)


def errors_of(cases, forward):
    """(the largest error of what ought to be right, the smallest of the arm that is wrong)."""
    right, wrong = [row["error"] for row in forward], []
    for case in cases:
        for arm, own in case["arms"].items():
            (wrong if arm == "wrong" else right).append(own["error"])
    return max(right), min(wrong, default=float("nan"))


def main():
    data = str(common.ROOT / train_gpt.TRACKS["continual"].data)
    parser = common.ranks_parser(__doc__, world_sizes="2,4", rounds=15, data=data)
    arguments = parser.parse_args()
    shapes = TINY_SHAPES if arguments.tiny else SHAPES
    if arguments.worker:

        def measure_all(runtime):
            repeats = arguments.repeats
            return [measure(name, layer, runtime, repeats) for name, layer in shapes.items()]

        return common.work_as_rank(arguments, measure_all)
    cases, device = common.cases_of_ranks(__file__, arguments)
    runtime = train_gpt.Runtime(arguments.device)
    tokens = 64 if arguments.tiny else 2048
    forward = measure_forward(shapes, runtime.device, arguments.repeats, tokens)
    changes = {"data": arguments.data, "seed": 1}
    if arguments.tiny:
        changes.update(common.TINY, steps=40)
    config = common.config_of("continual", runtime, **changes)
    added = measure_step(config, runtime, arguments.rounds)
    tables = [exchange_table(cases), forward_table(forward)]
    text = (
        f"{tables[0]}\n\nHalf of the directions frozen; medians of {arguments.repeats}; float32; "
        "more ranks than cores share them.\n\nForward pass, all factors, 2,048 tokens:\n\n"
        f"{tables[1]}\n\nWhat the projection adds to a step of the continual track: "
        f"{step_line(added)}."
    )
    figures = {"cases": cases, "forward": forward, "added_to_step": added}
    facts = common.environment(device)
    common.write_results(arguments.results, "osft_projection", facts, figures, text)
    print(*tables, f"projection adds {step_line(added)}", sep="\n\n")
    right, wrong = errors_of(cases, forward)
    print(f"max_error:{right:.1e} wrong_allreduce_error:{wrong:.3f}")
    return int(not right < TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
