"""What an update of the table costs on the wire, beside an all-reduce of its whole gradient.

    python benchmarks/ngram_exchange.py [--world-sizes 2,4,8] [--repeats 5] [--device auto]

The script starts its own ranks at each world size (gloo on CPUs, NCCL where there are as many
GPUs). The ranks read passages of the Python sources inside torch, and take the table's own steps:
owners hold rows, readers pull them and push gradients (`routed`). Bytes are those that Runtime
counts where it sends them, indices included: exact, averaged over ranks and steps. `dense` is what
a ring sends for the whole gradient. The lower bound is each distinct foreign row that a rank's
tokens read, once each way at 4 bytes a value.
Results: benchmarks/results/ngram_exchange.{json,md}. The last line is `routed_over_bound:<the
largest>`.
"""

import dataclasses
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common

ORDERS = {"bigrams": (2,), "six orders": (2, 3, 4, 5, 6, 8)}
SIZE = (4096, 2**18)  # tokens of a rank and step, table rows
TINY_SIZE = (256, 2**12)
DIM = 128
EOT_TOKEN = 256  # tokens are bytes


def text_of_sources(limit):
    """`limit` tokens or a little more, (n,) uint16: the bytes of the installed torch's Python
    sources, a document each."""
    documents = []
    total = 0
    for path in sorted(Path(torch.__file__).parent.rglob("*.py")):
        content = np.frombuffer(path.read_bytes(), np.uint8).astype(np.uint16)
        documents.append(np.insert(content, 0, EOT_TOKEN))
        total += len(content)
        if total >= limit:
            break
    return np.concatenate(documents)


def lower_bound(all_rows, config, world_size):
    """Bytes that a rank must send on average: foreign rows, out as gradients and in as values."""
    chunk = math.ceil(config.ngram_rows / world_size)
    foreign = 0
    for rank, rows in enumerate(all_rows):
        foreign += int((np.unique(rows) // chunk != rank).sum())
    return 2 * foreign * 4 * config.model_dim / world_size


def measure(config, runtime, text, repeats):
    """The bytes of a step that a rank sends and must send: {"routed", "dense", "bound"}."""
    world_size = runtime.world_size
    length = config.micro_batch_tokens
    table = train_gpt.NgramTable(config, runtime)
    bounds = []
    runtime.ledger.clear()
    for step in range(repeats):
        lows = [(step * world_size + rank) * length for rank in range(world_size)]
        passages = [
            train_gpt.contiguous_passage(text, config.eot_token, low, length) for low in lows
        ]
        rows = [train_gpt.rows_of([passage], config)[0] for passage in passages]
        bounds.append(lower_bound(rows, config, world_size))
        plan = train_gpt.plan_rows([passages[runtime.rank]], config, runtime)
        table.values_of(plan)
        table.expect(plan, [torch.ones(length, config.model_dim, device=runtime.device)])
        table.receive(0, table.update(0, 1.0, table.reduce(0)))
    sent = torch.tensor([float(sum(runtime.ledger.values()))])
    torch.distributed.all_reduce(sent)
    whole = 4 * config.ngram_rows * config.model_dim
    return {
        "routed": sent.item() / world_size / repeats,
        "dense": 2 * whole * (world_size - 1) / world_size,
        "bound": statistics.mean(bounds),
    }


def work_as_rank(arguments):
    """Be one of the ranks that main() has started; rank 0 leaves the cases of this world size."""
    length, rows = TINY_SIZE if arguments.tiny else SIZE
    runtime = train_gpt.Runtime(arguments.device)
    text = text_of_sources((arguments.repeats + 1) * length * runtime.world_size)
    shape = {"ngram_rows": rows, "model_dim": DIM, "micro_batch_tokens": length}
    shape |= {"vocab_size": EOT_TOKEN + 1, "eot_token": EOT_TOKEN, "copy_orders": ()}
    track = dataclasses.replace(common.TRACK, **shape)
    cases = []
    for name, orders in ORDERS.items():
        config = dataclasses.replace(track, ngram_orders=orders)
        sizes = measure(config, runtime, text, arguments.repeats)
        facts = {"world_size": runtime.world_size, "orders": name, "tokens": length, "rows": rows}
        cases.append({**facts, **sizes})
    if runtime.is_main:
        Path(arguments.worker).write_text(json.dumps(cases))
    runtime.close()


def report(cases, repeats):
    """The table of all cases."""
    rows = []
    for case in cases:
        sizes = [f"{case[name] / 1024:,.0f}" for name in ("dense", "routed", "bound")]
        ratio = f"{case['routed'] / case['bound']:.3f}"
        facts = [case[name] for name in ("world_size", "orders", "tokens", "rows")]
        rows.append([*facts, *sizes, ratio])
    header = ["world size", "orders", "tokens a rank", "table rows", "dense, KiB", "routed, KiB"]
    table = common.markdown_table([*header, "bound, KiB", "routed / bound"], rows)
    return f"{table}\n\nKiB that a rank sends, means of {repeats} updates; {DIM} channels, float32."


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
            device = arguments.device
            if device == "auto":
                device = "cuda" if torch.cuda.device_count() >= world_size else "cpu"
            words = ["--worker", str(out), "--repeats", str(arguments.repeats), "--device", device]
            words += ["--tiny"] if arguments.tiny else []
            common.on_ranks(__file__, world_size, words, check=True)
            cases += json.loads(out.read_text())
    text = report(cases, arguments.repeats)
    facts = common.environment(device)
    common.write_results(arguments.results, "ngram_exchange", facts, {"cases": cases}, text)
    ratio = max(case["routed"] / case["bound"] for case in cases)
    print(f"{text}\nrouted_over_bound:{ratio:.3f}")


if __name__ == "__main__":
    main()
