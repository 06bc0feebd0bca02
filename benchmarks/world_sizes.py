"""Show that the trajectory does not depend on the number of processes.

    python benchmarks/world_sizes.py [--steps 20] [--device auto]

Runs the nano track in float32 with one seed at world sizes 1, 2 and 4 (and, with 6 micro-batches a step, 1 and 3),
each as its users would: through torchrun. Compares the training losses of all steps with those of world size 1.
Results: benchmarks/results/world_sizes.{json,md}. Exit status 1 if a loss differs by more than 1e-4.
"""
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common  # noqa: E402

TOLERANCE = 1e-4


def losses_of_run(folder, world_size, options):
    """Training loss of every step."""
    run_id = f"world{world_size}_" + "_".join(options[1::2]).replace("/", "-")
    common.train(folder, run_id, ["--track", "nano", "--data", str(common.ROOT / "data/python"), "--dtype", "float32",
                                  "--compile", "false", "--log-every", "1", "--val-every", "0", "--val-tokens", "8192",
                                  "--seed", "1", "--index-share", "0.02", "--index-bits", "18", *options],
                 world_size)
    return common.train_losses(Path(folder) / "logs" / run_id)


def main():
    arguments = common.parser(__doc__, steps=20, device="auto").parse_args()
    rows, data, worst = [], {}, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for micro_batches, world_sizes in ((4, (1, 2, 4)), (6, (1, 3))):
            options = common.words_of({"steps": arguments.steps, "micro_batches": micro_batches,
                                       "device": arguments.device})
            for world_size in world_sizes:
                losses = data[f"{micro_batches}/{world_size}"] = losses_of_run(folder, world_size, options)
                alone = data[f"{micro_batches}/1"]
                difference = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
                worst = max(worst, difference)
                rows.append([micro_batches, world_size, f"{losses[0]:.5f}", f"{losses[-1]:.5f}", f"{difference:.1e}"])
    device = "cpu" if arguments.device == "cpu" or not torch.cuda.is_available() else "cuda"
    table = common.markdown_table(["micro-batches a step", "world size", "loss, step 1",
                                   f"loss, step {arguments.steps}", "largest difference from world size 1"], rows)
    common.write_results(arguments.results, "world_sizes", common.environment(device), {"losses": data}, table)
    print(table)
    print(f"max_difference:{worst:.1e}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
