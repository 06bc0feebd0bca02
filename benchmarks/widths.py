"""How large the gradient that reaches a token's rows is by width, and what a floor makes of it.

    python benchmarks/widths.py [--widths 64,128,256,512] [--steps 30]

Of the track `english-net`. A new row's first step is its rate times g / sqrt(g^2 + floor^2) for a
gradient of RMS g: means of the last two thirds of the steps, with floors that fall by several
powers of the width; the trainer's is 0.75. Results: benchmarks/results/widths.{json,md}.
"""

import dataclasses
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common

POWERS = (0.0, 0.5, 0.75, 1.0)


def gradient_sizes(config, steps):
    """The RMS of the gradient of a token's summed rows, of each micro-batch of the last steps."""
    training = common.Training(config)
    training.trainer.table.read_index(training.corpus.indexed)
    accumulate = training.trainer.table.accumulate
    sizes = []

    def measured(grad):
        sizes.append(grad.square().mean().sqrt().item())
        accumulate(grad)

    training.trainer.table.accumulate = measured
    for step in range(steps):
        training.step(step)
    training.close()
    return sizes[len(sizes) // 3 :]


def main(argv=None):
    arguments = common.parser(__doc__, widths="64,128,256,512", steps=30).parse_args(argv)
    track = dataclasses.replace(train_gpt.TRACKS["english-net"], seed=1, device="cpu")
    cases = {}
    for width in map(int, arguments.widths.split(",")):
        config = dataclasses.replace(track, model_dim=width, mlp_dim=width)
        sizes = gradient_sizes(config, arguments.steps)
        cases[width] = [statistics.mean(sizes)]
        for power in POWERS:
            floor = track.ngram_floor * (64 / width) ** power
            first_steps = [size / (size**2 + floor**2) ** 0.5 for size in sizes]
            cases[width].append(statistics.mean(first_steps))
    header = ["channels", "gradient's RMS a token", "first step over the rate, one floor"]
    header += [f"floor by the power {power} of the width" for power in POWERS[1:]]
    rows = [[width, *(f"{value:.3f}" for value in values)] for width, values in cases.items()]
    text = common.markdown_table(header, rows)
    facts = common.environment("cpu")
    common.write_results(arguments.results, "widths", facts, {"cases": cases}, text)
    print(text)


if __name__ == "__main__":
    main()
