"""Show that the trajectory does not depend on the number of processes.

    python benchmarks/world_sizes.py [--steps 20] [--device auto]

Runs the tracks nano and mini in float32 with one seed at world sizes 1, 2, 4 and 8 (and, with 6
micro-batches a step, nano at 1 and 3), each as its users would: through torchrun. Compares the
training losses of all steps with those of world size 1. Results: benchmarks/results/world_sizes.
{json,md}. Exit status 1 if a loss differs by more than 1e-4.
"""

import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common

TOLERANCE = 1e-4
VALUES = {
    "data": common.ROOT / "data/python",
    "dtype": "float32",
    "compile": False,
    "log_every": 1,
    "val_tokens": 8192,
    "seed": 1,
}
SMALL_INDEX = {"index_share": 0.02, "index_bits": 18}
# A track's own options, the micro-batches of a step, world sizes.
CASES = (
    ("nano", SMALL_INDEX, 8, (1, 2, 4, 8)),
    ("nano", SMALL_INDEX, 6, (1, 3)),
    ("mini", {}, 8, (1, 2, 4, 8)),
)


def losses_of_run(folder, world_size, values):
    """Training loss of every step."""
    run_id = f"{values['track']}{values['micro_batches']}_{world_size}"
    common.train(folder, run_id, common.words_of({**VALUES, **values}), world_size)
    return common.train_losses(Path(folder) / "logs" / run_id)


def main(argv=None):
    arguments = common.parser(__doc__, steps=20, device="auto").parse_args(argv)
    rows = []
    data = {}
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for track, options, micro_batches, world_sizes in CASES:
            values = {**options, "track": track, "micro_batches": micro_batches}
            values["steps"] = arguments.steps
            for world_size in world_sizes:
                device = common.device_of_ranks(arguments.device, world_size)
                losses = losses_of_run(folder, world_size, {**values, "device": device})
                data[f"{track}/{micro_batches}/{world_size}"] = losses
                alone = data[f"{track}/{micro_batches}/1"]
                difference = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
                worst = max(worst, difference)
                ends = [f"{losses[0]:.5f}", f"{losses[-1]:.5f}"]
                rows.append([track, micro_batches, world_size, *ends, f"{difference:.1e}"])
    ends = ["loss, step 1", f"loss, step {arguments.steps}"]
    header = ["track", "micro-batches a step", "world size", *ends]
    table = common.markdown_table([*header, "largest difference from world size 1"], rows)
    has_cuda = arguments.device != "cpu" and torch.cuda.is_available()
    facts = common.environment("cuda" if has_cuda else "cpu")
    common.write_results(arguments.results, "world_sizes", facts, {"losses": data}, table)
    print(table)
    print(f"max_difference:{worst:.1e}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
