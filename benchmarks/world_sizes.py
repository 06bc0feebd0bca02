"""Show that the trajectory does not depend on the number of processes.

    python benchmarks/world_sizes.py [--steps 20] [--device auto]

Runs the track english in float32 with one seed at world sizes 1, 2, 4 and 8, and, with 6
micro-batches a step, at 1 and 3, each as its users would: through torchrun. Its rates suit
longer runs: those of english, for six large steps, make more of a last bit. Compares the training
losses of all steps, which a log has to five decimals, with those of world size 1. Results:
benchmarks/results/world_sizes.{json,md}. Exit status 1 if a loss differs by more than 1e-5.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common

TOLERANCE = 1e-5 + 1e-9  # one unit of the log's last decimal
TRACK = "english"
VALUES = {
    "track": TRACK,
    "data": common.ROOT / "data/english",
    "dtype": "float32",
    "compile": False,
    "log_every": 1,
    "val_tokens": 8192,
    "seed": 1,
    "matrix_lr": 0.025,
    "adam_lr": 0.024,
}
CASES = {8: (1, 2, 4, 8), 6: (1, 3)}  # world sizes by micro-batches of a step


def main(argv=None):
    arguments = common.parser(__doc__, steps=20, device="auto").parse_args(argv)
    rows = []
    data = {}
    with tempfile.TemporaryDirectory() as folder:
        for micro_batches, world_sizes in CASES.items():
            for world_size in world_sizes:
                device = common.device_of_ranks(arguments.device, world_size)
                changes = {"micro_batches": micro_batches, "steps": arguments.steps}
                options = common.words_of({**VALUES, **changes, "device": device})
                run_id = f"{micro_batches}_{world_size}"
                losses = common.train_losses(common.train(folder, run_id, options, world_size))
                data[f"{TRACK}/{micro_batches}/{world_size}"] = losses
                alone = data[f"{TRACK}/{micro_batches}/1"]
                difference = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
                ends = [f"{losses[0]:.5f}", f"{losses[-1]:.5f}"]
                rows.append([TRACK, micro_batches, world_size, *ends, f"{difference:.5f}"])
    ends = ["loss, step 1", f"loss, step {arguments.steps}"]
    header = ["track", "micro-batches a step", "world size", *ends]
    table = common.markdown_table([*header, "largest difference from world size 1"], rows)
    facts = common.environment(common.device_of_ranks(arguments.device, 1))
    common.write_results(arguments.results, "world_sizes", facts, {"losses": data}, table)
    worst = max(float(row[-1]) for row in rows)
    print(f"{table}\nmax_difference:{worst:.5f}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
