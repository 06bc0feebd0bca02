"""What the n-gram table's update costs on the wire and in time, beside a dense all-reduce.

    python benchmarks/ngram_exchange.py [--world-sizes 2,4,8] [--repeats 5] [--device auto]

Starts itself through torchrun at each world size (gloo on CPUs, NCCL where there are that many
GPUs). The ranks hash windows of the Python sources inside torch, as the nano track does, and take
steps with random gradients:
    dense     every rank holds the whole table, whose gradient is all-reduced like any other's
    routed    the trainer's NgramTable: owners hold rows, readers pull them and push gradients
Bytes are those that Runtime counts where it sends them: exact, averaged over ranks and steps. Times
are medians as ratios to dense in the same process; arms take turns. The lower bound is each
distinct foreign row that a rank's tokens read, once each way at 4 bytes a value. Results:
benchmarks/results/ngram_exchange.{json,md,png}; the .md has the largest case of each world size,
and ngram_exchange_all.md has all of them.
"""

import dataclasses
import functools
import math
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common

ORDERS = {"bigrams": (2,), "six orders": (2, 3, 4, 5, 6, 8)}
# (tokens of a rank and step, table rows)
SIZES = {"full": ((1024, 4096), (2**16, 2**18)), "tiny": ((256,), (2**12,))}
DIM = 128
ARMS = ("dense", "routed")
HEADER = (
    "world size",
    "orders",
    "tokens a rank",
    "table rows",
    "dense, KiB",
    "routed, KiB",
    "bound, KiB",
    "routed / bound",
    "time of routed / dense",
)


class Dense:
    """A whole table on every rank, whose whole gradient is all-reduced."""

    def __init__(self, config, runtime):
        self.config, self.runtime = config, runtime
        self.low, self.high = 0, config.ngram_rows
        shape = config.ngram_rows, config.model_dim
        self.weight = torch.zeros(shape, device=runtime.device)
        self.second = torch.zeros(shape[0], device=runtime.device)

    def step(self, rows, signs, grad):
        config, device = self.config, self.runtime.device
        sums = torch.zeros_like(self.weight)
        for column in range(rows.shape[1]):
            ids = train_gpt.to_device(rows[:, column].astype(np.int64), device)
            sign = train_gpt.to_device(np.ascontiguousarray(signs[:, column]), device)
            sums.index_add_(0, ids, grad * sign[:, None])
        train_gpt.wait(self.runtime.all_reduce(sums, "ngram_table"))
        every_row = torch.arange(len(sums), device=device)
        rates = config.ngram_lr, config.ngram_floor
        train_gpt.adagrad_rows_update(self.weight, self.second, every_row, sums, *rates)


class Routed(train_gpt.NgramTable):
    """The table through a whole step: plan, pull, gradients, update."""

    def step(self, rows, signs, grad):
        plan, _ = train_gpt.plan_rows(rows, signs, self.config, self.runtime)
        self.values_of(plan)
        self.accumulate(grad)
        self.receive(self.update(0, 1.0, self.reduce(0)))


def text_of_sources(limit):
    eot = np.array([train_gpt.EOT_TOKEN["bytes"]], dtype=np.uint16)
    parts = []
    for document in common.python_documents(limit):
        parts += [eot, document]
    return np.concatenate(parts)


def lower_bound(all_rows, config, world_size):
    """Bytes that a rank must send on average: foreign rows, out as gradients and in as values."""
    chunk = math.ceil(config.ngram_rows / world_size)
    foreign = 0
    for rank, rows in enumerate(all_rows):
        foreign += int((np.unique(rows) // chunk != rank).sum())
    return 2 * foreign * 4 * config.model_dim / world_size


def mean_over_ranks(value, runtime):
    total = torch.tensor([float(value)])
    torch.distributed.all_reduce(total)
    return total.item() / runtime.world_size


def largest_difference(arm, dense):
    """How far an arm's rows differ from dense ones, over the largest of these, on any rank."""
    truth = dense.weight[arm.low : arm.high]
    difference = torch.zeros(1)
    if len(truth):
        difference[0] = (arm.weight - truth).abs().max().cpu()
    largest = dense.weight.abs().max().cpu()
    torch.distributed.all_reduce(difference, torch.distributed.ReduceOp.MAX)
    return (difference / largest).item()


def measure(config, runtime, tokens, repeats):
    """({arm: {"bytes": {what: mean}, "seconds": [...], "difference": from dense}}, lower bound)."""
    world_size, length = runtime.world_size, config.micro_batch_tokens
    arms = {"dense": Dense(config, runtime), "routed": Routed(config, runtime)}
    results = {arm: {"bytes": {}, "seconds": []} for arm in arms}
    text = train_gpt.Text(tokens, config)
    bound = 0.0
    for step in range(repeats):
        hashed = []
        for rank in range(world_size):
            low = (step * world_size + rank) * length
            window = train_gpt.contiguous_window(text, low, length)
            hashed.append(train_gpt.table_rows(window, config, arms["routed"].index))
        bound += lower_bound([rows for rows, _ in hashed], config, world_size) / repeats
        generator = torch.Generator().manual_seed(step * world_size + runtime.rank)
        grad = torch.randn(length, config.model_dim, generator=generator).to(runtime.device)
        names = list(arms)
        for name in names[step % len(names) :] + names[: step % len(names)]:
            runtime.ledger.clear()
            torch.distributed.barrier()
            take_step = functools.partial(arms[name].step, *hashed[runtime.rank], grad)
            seconds, _ = common.timed(take_step, runtime.device)
            results[name]["seconds"].append(seconds)
            sent = results[name]["bytes"]
            for (collective, what), (size, _) in runtime.ledger.items():
                key = f"{collective}/{what}"
                sent[key] = sent.get(key, 0) + mean_over_ranks(size, runtime) / repeats
    for name, arm in arms.items():
        results[name]["difference"] = largest_difference(arm, arms["dense"])
    return results, bound


def measure_all(runtime, repeats, sizes):
    """The cases of this world size."""
    tokens = text_of_sources((repeats + 1) * max(sizes[0]) * runtime.world_size)
    found = []
    for name, orders in ORDERS.items():
        for length in sizes[0]:
            for rows in sizes[1]:
                config = dataclasses.replace(
                    train_gpt.TRACKS["nano"],
                    **common.N_GRAMS_ALONE,
                    ngram_orders=orders,
                    ngram_rows=rows,
                    model_dim=DIM,
                    micro_batch_tokens=length,
                )
                results, bound = measure(config, runtime, tokens, repeats)
                facts = {"world_size": runtime.world_size, "orders": name, "tokens": length}
                found.append({**facts, "rows": rows, "arms": results, "bound": bound})
    return found


def sent_by(case, arm):
    """Bytes that a rank has sent in an update, indices included."""
    return sum(case["arms"][arm]["bytes"].values())


def over_bound(case):
    return sent_by(case, "routed") / case["bound"]


def table_of(cases):
    lines = []
    for case in cases:
        median = {arm: statistics.median(case["arms"][arm]["seconds"]) for arm in ARMS}
        lines.append(
            [
                case["world_size"],
                case["orders"],
                case["tokens"],
                case["rows"],
                *[f"{sent_by(case, arm) / 1024:,.0f}" for arm in ARMS],
                f"{case['bound'] / 1024:,.0f}",
                f"{over_bound(case):.3f}",
                f"{median['routed'] / median['dense']:.2f}",
            ]
        )
    return common.markdown_table(HEADER, lines)


def write(folder, cases, repeats, facts):
    """The result files of all cases; returns the table that says most."""
    difference = max(case["arms"]["routed"]["difference"] for case in cases)
    note = (
        f"KiB sent by a rank in an update, indices included. Medians of {repeats} updates; {DIM} "
        "channels, float32; ranks beyond the cores share them. Largest difference from dense, over "
        f"the largest value: {difference:.1e}."
    )
    size = max((case["tokens"], case["rows"]) for case in cases)
    table = table_of([case for case in cases if (case["tokens"], case["rows"]) == size])
    data = {"repeats": repeats, "cases": cases}
    common.write_results(folder, "ngram_exchange", facts, data, f"{table}\n\n{note}")
    all_cases = f"{table_of(cases)}\n\n{note}\n\n{common.environment_line(facts)}\n"
    (folder / "ngram_exchange_all.md").write_text(all_cases)
    plot(cases, folder / "ngram_exchange.png")
    return table


def plot(cases, path):
    with common.picture(path, 1, len(ORDERS), figsize=(9, 4), sharey=True) as axes:
        for axis, orders in zip(axes, ORDERS, strict=True):
            mine = [case for case in cases if case["orders"] == orders]
            size = mine[0]["tokens"], mine[-1]["rows"]
            chosen = [case for case in mine if (case["tokens"], case["rows"]) == size]
            sizes = [case["world_size"] for case in chosen]
            for arm in ARMS:
                sent = [sent_by(case, arm) / 2**20 for case in chosen]
                axis.plot(sizes, sent, marker="o", label=arm)
            bounds = [case["bound"] / 2**20 for case in chosen]
            axis.plot(sizes, bounds, "k:", label="bound, both ways")
            title = f"{orders}, {size[0]} tokens a rank"
            axis.set(xscale="log", yscale="log", xlabel="world size", title=title)
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("MiB sent a rank and update")
        axes[-1].legend()


def main(argv=None):
    arguments = common.ranks_parser(__doc__, world_sizes="2,4,8").parse_args(argv)
    if arguments.worker:
        sizes = SIZES["tiny" if arguments.tiny else "full"]
        return common.work_as_rank(
            arguments, functools.partial(measure_all, repeats=arguments.repeats, sizes=sizes)
        )
    cases, device = common.cases_of_ranks(__file__, arguments)
    print(write(arguments.results, cases, arguments.repeats, common.environment(device)))
    print(f"routed_over_bound:{max(map(over_bound, cases)):.3f}")


if __name__ == "__main__":
    main()
