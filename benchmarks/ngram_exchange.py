"""What the n-gram table's update costs on the wire and in time, by the way that its rows travel.

    python benchmarks/ngram_exchange.py [--world-sizes 2,4,8] [--repeats 5] [--device auto]

Starts itself through torchrun at each world size (gloo on CPUs, NCCL where there are that many GPUs). The ranks hash
windows of the Python sources inside torch, as the nano track does, and take steps with random gradients:
    dense                  reduce-scatter of the whole table's gradient, update of the owner's share, all-gather
    replicated, sharded    NgramTable's two ways
Bytes are those that Runtime counts where it sends them: exact, averaged over ranks and steps. Times are medians as
ratios to dense in the same process; arms take turns. The lower bound is each distinct foreign row that a rank's tokens
read once each way at 4 bytes a value; for the new rows of replicas, each updated row once to each other rank.
Results: benchmarks/results/ngram_exchange.{json,md,png}; the .md has the largest case of each world size, and
ngram_exchange_all.md has all of them.
"""
import dataclasses
import functools
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common  # noqa: E402
import train_gpt  # noqa: E402

ORDERS = {"bigrams": (2,), "six orders": (2, 3, 4, 5, 6, 8)}
SIZES = {"full": ((1024, 4096), (2**16, 2**18)), "tiny": ((256,), (2**12,))}  # (tokens of a rank and step, table rows)
DIM = 128
ARMS = ("dense", "replicated", "sharded")


class Dense:
    """The table's whole gradient through the collectives of ordinary parameters; NgramTable's interface, in short."""

    def __init__(self, config, runtime):
        self.config, self.runtime, self.held = config, runtime, (0, config.ngram_rows)
        self.chunk = -(-config.ngram_rows // runtime.world_size)
        self.weight = torch.zeros(self.chunk * runtime.world_size, config.model_dim, device=runtime.device)
        self.second = torch.zeros(self.chunk, device=runtime.device)

    def step(self, rows, signs, grad, tokens):
        runtime, config = self.runtime, self.config
        dense = torch.zeros_like(self.weight)
        for column in range(rows.shape[1]):
            ids = train_gpt.to_device(rows[:, column].astype(np.int64), runtime.device)
            sign = train_gpt.to_device(np.ascontiguousarray(signs[:, column]), runtime.device)
            dense.index_add_(0, ids, grad * (tokens * sign)[:, None])
        sums, work = runtime.reduce_scatter(dense, "ngram_table")
        train_gpt.wait(work)
        share = self.weight[runtime.rank * self.chunk:][:self.chunk].clone()
        every_row = torch.arange(self.chunk, device=runtime.device)
        train_gpt.adagrad_rows_update(share, self.second, every_row, sums, config.ngram_lr, config.ngram_floor)
        self.weight, work = runtime.all_gather(share, self.chunk, "ngram_table")
        train_gpt.wait(work)


class Routed(train_gpt.NgramTable):
    """The table through a whole step: plan, pull, gradients, update, new rows."""

    def step(self, rows, signs, grad, tokens):
        plan, _ = train_gpt.plan_rows(rows, signs, self.config, self.runtime)
        self.pull(plan)
        self.arrived(*self.pulled)
        self.accumulate(grad, tokens)
        self.reduce(0)
        self.update(0, 1.0)
        self.receive(0)


def text(limit):
    eot = np.array([train_gpt.EOT_TOKEN["bytes"]], dtype=np.uint16)
    return np.concatenate([part for document in common.python_documents(limit) for part in (eot, document)])


def lower_bounds(all_rows, config, world_size):
    """Bytes that must be sent, on average over ranks: (foreign rows one way, updated rows to the other replicas)."""
    chunk, width = -(-config.ngram_rows // world_size), 4 * config.model_dim
    foreign = sum(int((np.unique(rows) // chunk != rank).sum()) for rank, rows in enumerate(all_rows))
    updated = len(np.unique(np.concatenate([rows.ravel() for rows in all_rows])))
    return foreign * width / world_size, updated * width * (world_size - 1) / world_size


def measure(config, runtime, tokens, repeats):
    """One configuration: {arm: {"bytes": {what: mean}, "seconds": [...], "difference": from dense}}, and its bounds."""
    world_size = runtime.world_size
    arms = {"dense": Dense(config, runtime)}
    for comms in ARMS[1:]:
        arms[comms] = Routed(dataclasses.replace(config, ngram_comms=comms), runtime)
    results = {arm: {"bytes": {}, "seconds": []} for arm in arms}
    bounds, nothing_read = np.zeros(2), train_gpt.TextIndex(config)
    need = config.micro_batch_tokens
    text = train_gpt.Text(tokens, config)
    for step in range(repeats):
        places = [train_gpt.place_contiguous(text, (step * world_size + rank) * need, config)
                  for rank in range(world_size)]
        hashed = [train_gpt.table_rows(place, config, nothing_read) for place in places]
        bounds += np.array(lower_bounds([rows for rows, _ in hashed], config, world_size)) / repeats
        generator = torch.Generator().manual_seed(step * world_size + runtime.rank)
        grad = torch.randn(need, config.model_dim, generator=generator).to(runtime.device) / (need * world_size)
        order = list(arms.items())
        for name, arm in order[step % len(order):] + order[:step % len(order)]:
            runtime.ledger.clear()
            torch.distributed.barrier()
            take_step = functools.partial(arm.step, *hashed[runtime.rank], grad, need * world_size)
            seconds, _ = common.timed(take_step, runtime.device)
            results[name]["seconds"].append(seconds)
            for (collective, what), (size, _) in runtime.ledger.items():
                sent = torch.tensor([float(size)])
                torch.distributed.all_reduce(sent)
                key = f"{collective}/{what}"
                results[name]["bytes"][key] = results[name]["bytes"].get(key, 0) + sent.item() / world_size / repeats
    truth = arms["dense"].weight[:config.ngram_rows]
    for name, arm in arms.items():
        low, high = arm.held
        difference = (arm.weight[:high - low] - truth[low:high]).abs().max() / truth.abs().max()
        worst = difference.reshape(1).cpu()
        torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
        results[name]["difference"] = worst.item()
    return results, bounds.tolist()


def measure_all(runtime, repeats, sizes):
    """The cases of this world size."""
    tokens = text((repeats + 1) * max(sizes[0]) * runtime.world_size)
    found = []
    for orders_name, orders in ORDERS.items():
        for need in sizes[0]:
            for rows in sizes[1]:
                config = dataclasses.replace(
                    train_gpt.TRACKS["nano"], ngram_orders=orders, ngram_rows=rows, model_dim=DIM,
                    micro_batch_tokens=need, val_tokens=need, ngram_decay=0.0, **common.N_GRAMS_ALONE)
                results, bounds = measure(config, runtime, tokens, repeats)
                found.append({"world_size": runtime.world_size, "orders": orders_name, "tokens": need, "rows": rows,
                              "arms": results, "foreign_bound": bounds[0], "updated_bound": bounds[1]})
    return found


def ratios(case):
    """(gradients' exchange of replicated over its bound, sharded both ways over its bound), indices included."""
    replicated, sharded = (case["arms"][arm]["bytes"] for arm in ARMS[1:])
    exchange = replicated["all_to_all/ngram_table"] + replicated["all_to_all/ngram_indices"]
    return exchange / case["foreign_bound"], sum(sharded.values()) / (2 * case["foreign_bound"])


def table_of(cases):
    header = ["world size", "orders", "tokens a rank", "table rows", *[f"{arm}, KiB" for arm in ARMS],
              "bound one way, KiB", "replicated's gradients / bound", "sharded / bound",
              *[f"time of {arm} / dense" for arm in ARMS[1:]]]
    lines = []
    for case in cases:
        median = {arm: statistics.median(case["arms"][arm]["seconds"]) for arm in ARMS}
        exchange, sharded = ratios(case)
        lines.append([case["world_size"], case["orders"], case["tokens"], case["rows"],
                      *[f"{sum(case['arms'][arm]['bytes'].values()) / 1024:,.0f}" for arm in ARMS],
                      f"{case['foreign_bound'] / 1024:,.0f}", f"{exchange:.3f}", f"{sharded:.3f}",
                      *[f"{median[arm] / median['dense']:.2f}" for arm in ARMS[1:]]])
    return common.markdown_table(header, lines)


def write(folder, cases, repeats, facts):
    """The result files of all cases; returns the table that says most."""
    difference = max(case["arms"][arm]["difference"] for case in cases for arm in ARMS)
    note = (f"KiB sent by a rank in an update, indices included. Medians of {repeats} updates; {DIM} channels, "
            f"float32; ranks beyond the cores share them. Largest difference from dense, over the largest value: "
            f"{difference:.1e}.")
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
        for axis, orders in zip(axes, ORDERS):
            mine = [case for case in cases if case["orders"] == orders]
            chosen = [case for case in mine if (case["tokens"], case["rows"]) == (mine[0]["tokens"], mine[-1]["rows"])]
            sizes = [case["world_size"] for case in chosen]
            for arm in ARMS:
                sent = [sum(case["arms"][arm]["bytes"].values()) / 2**20 for case in chosen]
                axis.plot(sizes, sent, marker="o", label=arm)
            axis.plot(sizes, [2 * case["foreign_bound"] / 2**20 for case in chosen], "k:", label="bound, both ways")
            axis.set(xscale="log", yscale="log", xlabel="world size",
                     title=f"{orders}, {chosen[0]['tokens']} tokens a rank")
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("MiB sent a rank and update")
        axes[-1].legend()


def main():
    arguments = common.ranks_parser(__doc__, world_sizes="2,4,8").parse_args()
    if arguments.worker:
        sizes = SIZES["tiny" if arguments.tiny else "full"]
        return common.work_as_rank(arguments, lambda runtime: measure_all(runtime, arguments.repeats, sizes))
    cases, device = common.cases_of_ranks(__file__, arguments)
    print(write(arguments.results, cases, arguments.repeats, common.environment(device)))
    worst = [max(values) for values in zip(*map(ratios, cases))]
    print(f"exchange_over_bound:{worst[0]:.3f} sharded_over_bound:{worst[1]:.3f}")


if __name__ == "__main__":
    main()
