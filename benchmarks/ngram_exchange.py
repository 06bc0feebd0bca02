"""What the n-gram table's update costs on the wire and in time, by the way that its rows travel.

    python benchmarks/ngram_exchange.py [--world-sizes 2,4,8] [--repeats 5] [--device auto]

Starts itself through torchrun at each world size (gloo on CPUs, NCCL where there are that many GPUs). The ranks hash
windows of the Python sources inside torch, as the nano track does, and take update cycles with random gradients:
    dense         reduce-scatter of the whole table's gradient, update of the owner's share, all-gather
    tokens, rows, row_sharded         NgramTable's three ways
Bytes are those that Runtime counts where it sends them: exact, averaged over ranks and cycles. Times are medians as
ratios to dense in the same process; arms take turns. The lower bound is each distinct foreign row that a rank's tokens
read once each way at 4 bytes a value; for the new rows of replicas, each updated row once to each other rank.
Results: benchmarks/results/ngram_exchange.{json,md,png}; the .md has the largest case of each world size, and
ngram_exchange_all.md has all of them.
"""
import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common  # noqa: E402
import train_gpt  # noqa: E402

ORDERS = {"bigrams": (2,), "six orders": (2, 3, 4, 5, 6, 8)}
SIZES = {"full": ((1024, 4096), (2**16, 2**18)), "tiny": ((256,), (2**12,))}  # (tokens of a rank and cycle, table rows)
DIM, LR = 128, 0.1
ARMS = ("dense", "tokens", "rows", "row_sharded")


class Dense:
    """The table's whole gradient through the collectives of ordinary parameters; NgramTable's interface, in short."""

    def __init__(self, config, runtime):
        self.config, self.runtime = config, runtime
        chunk = -(-config.ngram_rows // runtime.world_size)
        self.weight = torch.zeros(chunk * runtime.world_size, config.model_dim, device=runtime.device)
        self.second = torch.zeros(chunk, device=runtime.device)

    def cycle(self, rows, weights, grads):
        runtime = self.runtime
        dense = torch.zeros_like(self.weight)
        for column in range(rows.shape[1]):
            ids = train_gpt.to_device(rows[:, column].astype(np.int64), runtime.device)
            sign = train_gpt.to_device(np.ascontiguousarray(weights[:, column]), runtime.device)
            dense.index_add_(0, ids, grads * sign[:, None])
        mine = dense.new_empty(len(self.second), dense.size(1))
        runtime.reduce_scatter(mine, dense, "ngram_table").wait()
        share = self.weight[runtime.rank * len(mine):(runtime.rank + 1) * len(mine)].clone()
        every_row = torch.arange(len(mine), device=runtime.device)
        train_gpt.adagrad_rows_update(share, self.second, every_row, mine, LR, self.config.ngram_floor)
        runtime.all_gather(self.weight, share, "ngram_table").wait()

    def held_rows(self):
        return self.weight[:self.config.ngram_rows]


class Routed:
    """An NgramTable through a whole cycle: plan, pull, gradients, update, new rows."""

    def __init__(self, config, runtime):
        self.config, self.runtime, self.table = config, runtime, train_gpt.NgramTable(config, runtime)

    def cycle(self, rows, weights, grads):
        plan, _ = train_gpt.plan_rows(rows, weights, self.config, self.runtime)
        self.table.pull(plan)
        if self.config.ngram_comms == "row_sharded":
            self.table.arrived(*self.table.pulled[1:])
        self.table.grads.append(grads)
        self.table.send(plan)
        self.table.update(LR)
        self.table.finish()

    def held_rows(self):
        return self.table.weight


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
    bounds = np.zeros(2)
    need = config.micro_batch_tokens
    for cycle in range(repeats):
        places = [train_gpt.place_contiguous(tokens, (cycle * world_size + rank) * need, config)
                  for rank in range(world_size)]
        hashed = [train_gpt.hash_placement(place, config) for place in places]
        bounds += np.array(lower_bounds([rows for rows, _ in hashed], config, world_size)) / repeats
        generator = torch.Generator().manual_seed(cycle * world_size + runtime.rank)
        grads = torch.randn(need, config.model_dim, generator=generator).to(runtime.device) / (need * world_size)
        order = list(arms.items())
        for name, arm in order[cycle % len(order):] + order[:cycle % len(order)]:
            readers = hashed if name == "tokens" else [hashed[runtime.rank]]
            rows, signs = (np.concatenate(parts) for parts in zip(*readers))
            runtime.ledger.clear()
            runtime.synchronize()
            torch.distributed.barrier()
            begin = time.perf_counter()
            arm.cycle(rows, signs * np.float32(need * world_size), grads)
            runtime.synchronize()
            results[name]["seconds"].append(time.perf_counter() - begin)
            for (collective, what), (size, _) in runtime.ledger.items():
                sent = torch.tensor([float(size)])
                torch.distributed.all_reduce(sent)
                key = f"{collective}/{what}"
                results[name]["bytes"][key] = results[name]["bytes"].get(key, 0) + sent.item() / world_size / repeats
    low, high = runtime.share(config.ngram_rows)
    truth = arms["dense"].held_rows()
    for name, arm in arms.items():
        reference = truth[low:high] if name == "row_sharded" else truth
        difference = (arm.held_rows() - reference).abs().max() / truth.abs().max()
        worst = difference.reshape(1).float().cpu()
        torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
        results[name]["difference"] = worst.item()
    return results, bounds.tolist()


def worker(out, device, repeats, sizes):
    runtime = train_gpt.Runtime(device)
    tokens = text((repeats + 1) * max(sizes[0]) * runtime.world_size)
    found = []
    for orders_name, orders in ORDERS.items():
        for need in sizes[0]:
            for rows in sizes[1]:
                config = dataclasses.replace(
                    train_gpt.TRACKS["nano"], ngram_orders=orders, ngram_rows=rows, model_dim=DIM,
                    micro_batch_tokens=need, val_tokens=need, ngram_comms="tokens", ngram_decay=0.0)
                results, bounds = measure(config, runtime, tokens, repeats)
                found.append({"world_size": runtime.world_size, "orders": orders_name, "tokens": need, "rows": rows,
                              "arms": results, "foreign_bound": bounds[0], "updated_bound": bounds[1]})
    if runtime.is_main:
        Path(out).write_text(json.dumps({"cases": found, "device": str(runtime.device.type)}))
    runtime.close()


def ratios(case):
    """(gradient exchange of rows over its bound, row_sharded both ways over its bound), indices included."""
    rows, sharded = case["arms"]["rows"]["bytes"], case["arms"]["row_sharded"]["bytes"]
    exchange = rows["all_to_all/ngram_table"] + rows["all_to_all/ngram_indices"]
    return exchange / case["foreign_bound"], sum(sharded.values()) / (2 * case["foreign_bound"])


def table_of(cases):
    header = ["world size", "orders", "tokens a rank", "table rows", *[f"{arm}, KiB" for arm in ARMS],
              "bound one way, KiB", "rows' gradients / bound", "row_sharded / bound",
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
    note = (f"KiB sent by a rank in an update, indices included. Medians of {repeats} updates; {DIM} channels, float32; "
            f"ranks beyond the cores share them. Largest difference from dense, over the largest value: "
            f"{difference:.1e}.\n{common.environment_line(facts)}")
    largest = [case for case in cases if (case["tokens"], case["rows"]) == max((c["tokens"], c["rows"]) for c in cases)]
    table = table_of(largest)
    common.write_results(folder, "ngram_exchange", {"environment": facts, "repeats": repeats, "cases": cases},
                         f"{table}\n\n{note}")
    (folder / "ngram_exchange_all.md").write_text(f"{table_of(cases)}\n\n{note}\n")
    plot(cases, folder / "ngram_exchange.png")
    return table


def plot(cases, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, len(ORDERS), figsize=(9, 4), sharey=True, layout="constrained")
    for axis, orders in zip(axes, ORDERS):
        mine = [case for case in cases if case["orders"] == orders]
        chosen = [case for case in mine if (case["tokens"], case["rows"]) == (mine[0]["tokens"], mine[-1]["rows"])]
        sizes = [case["world_size"] for case in chosen]
        for arm in ARMS:
            axis.plot(sizes, [sum(case["arms"][arm]["bytes"].values()) / 2**20 for case in chosen], marker="o", label=arm)
        axis.plot(sizes, [2 * case["foreign_bound"] / 2**20 for case in chosen], "k:", label="bound, both ways")
        axis.set(xscale="log", yscale="log", xlabel="world size", title=f"{orders}, {chosen[0]['tokens']} tokens a rank")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("MiB sent a rank and update")
    axes[-1].legend()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-sizes", default="2,4,8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--results", type=Path, default=common.RESULTS, help="folder of the result files")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try out the logic; measures nothing")
    parser.add_argument("--worker", help="internal: this process is a rank; the file for rank 0's figures")
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments.worker, arguments.device, arguments.repeats, SIZES["tiny" if arguments.tiny else "full"])
    cases, device = [], "cpu"
    with tempfile.TemporaryDirectory() as folder:
        for world_size in map(int, arguments.world_sizes.split(",")):
            enough = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
            chosen = arguments.device if arguments.device != "auto" else "cuda" if enough else "cpu"
            out = Path(folder) / f"{world_size}.json"
            words = ["--worker", str(out), "--device", chosen, "--repeats", str(arguments.repeats)]
            words += ["--tiny"] if arguments.tiny else []
            subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                            f"--nproc_per_node={world_size}", __file__, *words], check=True,
                           env={**os.environ, "OMP_NUM_THREADS": "1"})
            found = json.loads(out.read_text())
            cases += found["cases"]
            device = found["device"]
    facts = common.environment(torch.device(device))
    print(write(arguments.results, cases, arguments.repeats, facts))
    worst = [max(values) for values in zip(*map(ratios, cases))]
    print(f"exchange_over_bound:{worst[0]:.3f} sharded_over_bound:{worst[1]:.3f}")


if __name__ == "__main__":
    main()
