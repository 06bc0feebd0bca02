"""What the table's update costs on the wire and in time, beside a dense all-reduce.

    python benchmarks/ngram_exchange.py [--world-sizes 2,4,8] [--repeats 5] [--device auto]

Starts itself through torchrun at each world size (gloo on CPUs, NCCL where there are that many
GPUs). The ranks hash windows of the Python sources inside torch, and take steps with random
gradients:
    dense     every rank holds the whole table, whose gradient is all-reduced like any other's
    routed    the trainer's NgramTable: owners hold rows, readers pull them and push gradients
Bytes are those that Runtime counts where it sends them: exact, averaged over ranks and steps. Times
are medians as ratios to dense in the same process; arms take turns. The lower bound is each
distinct foreign row that a rank's tokens read, once each way at 4 bytes a value. Results:
benchmarks/results/ngram_exchange.{json,md}.
"""

import dataclasses
import functools
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.distributed import ReduceOp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common

ORDERS = {"bigrams": (2,), "six orders": (2, 3, 4, 5, 6, 8)}
SIZE = (4096, 2**18)  # tokens of a rank and step, table rows
TINY_SIZE = (256, 2**12)
DIM = 128
ARMS = ("dense", "routed")


class Dense:
    """A whole table on every rank, whose whole gradient is all-reduced."""

    def __init__(self, config, runtime):
        self.config = config
        self.runtime = runtime
        self.low = 0
        self.high = config.ngram_rows
        self.weight = torch.zeros(self.high, config.model_dim, device=runtime.device)
        self.second = torch.zeros(self.high, device=runtime.device)

    def step(self, passage, rows, signs, grad):
        sums = torch.zeros_like(self.weight)
        for ids, sign in zip(rows.T.astype(np.int64), signs.T.copy(), strict=True):
            weighted = grad * train_gpt.to_device(sign, grad.device)[:, None]
            sums.index_add_(0, train_gpt.to_device(ids, grad.device), weighted)
        train_gpt.wait(self.runtime.all_reduce(sums, "ngram_table"))
        every_row = torch.arange(len(sums), device=grad.device)
        rates = self.config.ngram_lr, self.config.ngram_floor
        train_gpt.adagrad_rows_update(self.weight, self.second, every_row, sums, *rates)


class Routed(train_gpt.NgramTable):
    """The table through a whole step: plan, pull, gradients, update."""

    def step(self, passage, rows, signs, grad):
        self.values_of(self.plan_step([passage]))
        self.accumulate(grad)
        self.receive(self.update(0, 1.0, self.reduce(0)))


def text_of_sources(limit):
    eot_token = train_gpt.EOT_TOKEN["bytes"]
    parts = [np.insert(one, 0, eot_token) for one in common.python_documents(limit)]
    return train_gpt.Text(np.concatenate(parts), eot_token)


def lower_bound(all_rows, config, world_size):
    """Bytes that a rank must send on average: foreign rows, out as gradients and in as values."""
    chunk = math.ceil(config.ngram_rows / world_size)
    foreign = 0
    for rank, rows in enumerate(all_rows):
        foreign += int((np.unique(rows) // chunk != rank).sum())
    return 2 * foreign * 4 * config.model_dim / world_size


def over_ranks(value, operation):
    """A number of this rank, combined with those of all others."""
    total = torch.tensor([float(value)])
    torch.distributed.all_reduce(total, operation)
    return total.item()


def largest_difference(arm, dense):
    """How far an arm's rows differ from dense ones, over the largest of these, on any rank."""
    difference = (arm.weight - dense.weight[arm.low : arm.high]).abs()
    largest = difference.max() if len(difference) else 0.0
    return over_ranks(largest, ReduceOp.MAX) / dense.weight.abs().max().item()


def measure(config, runtime, text, repeats):
    """({arm: {"bytes": a step, "seconds": [...], "difference": from dense}}, lower bound)."""
    world_size = runtime.world_size
    length = config.micro_batch_tokens
    arms = {"dense": Dense(config, runtime), "routed": Routed(config, runtime)}
    results = {name: {"bytes": 0.0, "seconds": []} for name in arms}
    bound = 0.0
    for step in range(repeats):
        lows = [(step * world_size + rank) * length for rank in range(world_size)]
        passages = [train_gpt.contiguous_passage(text, low, length) for low in lows]
        found = [arms["routed"].finder.find(passage) for passage in passages]
        bound += lower_bound([rows for rows, _ in found], config, world_size) / repeats
        generator = torch.Generator().manual_seed(lows[runtime.rank])
        grad = torch.randn(length, config.model_dim, generator=generator).to(runtime.device)
        for name in ARMS if step % 2 else reversed(ARMS):
            runtime.ledger.clear()
            torch.distributed.barrier()
            own = passages[runtime.rank], *found[runtime.rank], grad
            seconds, _ = common.timed(functools.partial(arms[name].step, *own), runtime.device)
            results[name]["seconds"].append(seconds)
            sent = sum(size for size, _ in runtime.ledger.values())
            results[name]["bytes"] += over_ranks(sent, ReduceOp.SUM) / world_size / repeats
    for name, arm in arms.items():
        results[name]["difference"] = largest_difference(arm, arms["dense"])
    return results, bound


def work_as_rank(arguments):
    """Be one of the ranks that main() has started; rank 0 leaves the cases of this world size."""
    length, rows = TINY_SIZE if arguments.tiny else SIZE
    runtime = train_gpt.Runtime(arguments.device)
    text = text_of_sources((arguments.repeats + 1) * length * runtime.world_size)
    cases = []
    for name, orders in ORDERS.items():
        config = dataclasses.replace(
            train_gpt.TRACKS["mini"],
            copy_orders=(),
            index_orders=(),
            ngram_orders=orders,
            ngram_rows=rows,
            model_dim=DIM,
            micro_batch_tokens=length,
        )
        results, bound = measure(config, runtime, text, arguments.repeats)
        facts = {"world_size": runtime.world_size, "orders": name, "tokens": length, "rows": rows}
        cases.append({**facts, "arms": results, "bound": bound})
    if runtime.is_main:
        Path(arguments.worker).write_text(json.dumps(cases))
    runtime.close()


def over_bound(case):
    return case["arms"]["routed"]["bytes"] / case["bound"]


def row_of(case):
    median = {arm: statistics.median(case["arms"][arm]["seconds"]) for arm in ARMS}
    return [
        case["world_size"],
        case["orders"],
        case["tokens"],
        case["rows"],
        *[f"{case['arms'][arm]['bytes'] / 1024:,.0f}" for arm in ARMS],
        f"{case['bound'] / 1024:,.0f}",
        f"{over_bound(case):.3f}",
        f"{median['routed'] / median['dense']:.2f}",
    ]


def report(cases, repeats):
    """The table of all cases, and how far both arms differ."""
    header = ["world size", "orders", "tokens a rank", "table rows", "dense, KiB", "routed, KiB"]
    header += ["bound, KiB", "routed / bound", "time of routed / dense"]
    table = common.markdown_table(header, map(row_of, cases))
    difference = max(case["arms"]["routed"]["difference"] for case in cases)
    return (
        f"{table}\n\nKiB sent by a rank in an update, indices included. Medians of {repeats} "
        f"updates; {DIM} channels, float32; ranks beyond the cores share them. Largest difference "
        f"from dense, over the largest value: {difference:.1e}."
    )


def main(argv=None):
    defaults = {"world_sizes": "2,4,8", "repeats": 5, "device": "auto", "tiny": False}
    parser = common.parser(__doc__, **defaults)
    worker_help = "internal: this process is a rank; the file for rank 0's figures"
    parser.add_argument("--worker", help=worker_help)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        return work_as_rank(arguments)
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for world_size in map(int, arguments.world_sizes.split(",")):
            out = Path(folder) / f"{world_size}.json"
            device = common.device_of_ranks(arguments.device, world_size)
            words = ["--worker", str(out), "--repeats", str(arguments.repeats), "--device", device]
            words += ["--tiny"] if arguments.tiny else []
            common.on_ranks(__file__, world_size, words, check=True)
            cases += json.loads(out.read_text())
    text = report(cases, arguments.repeats)
    data = {"repeats": arguments.repeats, "cases": cases}
    common.write_results(
        arguments.results, "ngram_exchange", common.environment(device), data, text
    )
    print(text)
    print(f"routed_over_bound:{max(map(over_bound, cases)):.3f}")


if __name__ == "__main__":
    main()
