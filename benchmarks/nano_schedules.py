"""What the nano track reaches on other schedules than its record's: how far seeds agree, and what
more time buys.

    python benchmarks/nano_schedules.py

Each run is one of `train_gpt.py`, as its users start it: 313 steps with four seeds, and with four
layers 720 steps and a schedule of about three minutes, which validates on the way. Results:
benchmarks/results/nano_schedules.{json,md}; the last line is `seeds_within:<largest less smallest
loss> long_schedule:<its last loss>`.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common

CORPUS = common.ROOT / "data/python"
FOUR_LAYERS = {
    "num_layers": 4,
    "long_layers": (3,),
    "value_embedding_layers": (0, 3),
    "skips": ((0, 3), (1, 2)),
    "mlp_dim": 512,
    "windows": (64, 128),
    "val_windows": (64, 128),
    "ngram_orders": (2, 3, 4, 6, 8, 12),
    "ngram_rows": 2**20,
    "index_orders": (4, 5, 6, 8, 10, 13, 17, 24),
    "index_share": 0.85,
    "matrix_lr": 0.015,
    "adam_lr": 0.01,
    "cooldown": 0.6,
    "final_lr": 0.02,
}
SCHEDULES = {  # name: overrides, and the seeds
    "313 steps": ({"steps": 313, "val_tokens": 262_144}, (1, 2, 3, 4)),
    "720 steps, four layers": ({"steps": 720, **FOUR_LAYERS}, (1,)),
    "1,180 steps, four layers": ({"steps": 1180, **FOUR_LAYERS, "val_every": 236}, (1,)),
}
HEADER = (
    "schedule",
    "seed",
    "tokens",
    "training time, s",
    "validation tokens",
    "validation loss",
    "peak memory, MiB",
)


def train(folder, run_id, values):
    """One run: {"result", "validation": its points on the way}."""
    values = {"track": "nano", "data": CORPUS, "device": "cpu", **values}
    result = common.train(folder, run_id, common.words_of(values))
    run = Path(folder) / "logs" / run_id
    (run / "checkpoint.pt").unlink()
    curve = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        event = json.loads(line)
        if "val_loss" in event:
            curve.append({key: event[key] for key in ("step", "train_time", "val_loss")})
    return {"result": result, "validation": curve}


def row_of(name, seed, result):
    return [
        name,
        seed,
        f"{result['tokens']:,}",
        f"{result['train_time_ms'] / 1000:.1f}",
        f"{result['config']['val_tokens']:,}",
        f"{result['val_loss']:.5f}",
        f"{max(result['peak_memory_mib_by_rank']):,}",
    ]


def main(argv=None):
    arguments = common.parser(__doc__).parse_args(argv)
    rows = []
    data = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (changes, seeds) in SCHEDULES.items():
            for seed in seeds:
                run = train(folder, f"{common.slug(name)}-{seed}", {**changes, "seed": seed})
                data.setdefault(name, []).append(run)
                rows.append(row_of(name, seed, run["result"]))
                print(*rows[-1], flush=True)
    *_, (long,) = data.values()
    points = [
        [f"{event['train_time'] / 1000:.1f}", f"{event['val_loss']:.4f}"]
        for event in long["validation"]
    ]
    losses = [run["result"]["val_loss"] for run in data["313 steps"]]
    within = max(losses) - min(losses)
    text = f"""{common.markdown_table(HEADER, rows)}

313 steps: {common.spread(losses, 5)} over {len(losses)} seeds, {within:.5f} from the smallest to
the largest (median {statistics.median(losses):.5f}).

The long schedule on its way, at the rates of its own schedule:

{common.markdown_table(["training time, s", "validation loss"], points)}"""
    facts = common.environment("cpu")
    common.write_results(arguments.results, "nano_schedules", facts, {"runs": data}, text)
    print(f"seeds_within:{within:.5f} long_schedule:{long['result']['val_loss']:.5f}")


if __name__ == "__main__":
    main()
