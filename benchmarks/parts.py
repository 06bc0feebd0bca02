"""What the parts of nano's table are worth: the track, and the track without some of them.

    python benchmarks/parts.py [--seeds 1]

Every arm is a run of train_gpt.py as its users would start it: the track's own steps, seeds 1 to n,
arms taking turns. An index reads most of the training text, on the clock. Without one, the model
draws its tokens from all of that text. A run that is complete in --work is not repeated. Results:
benchmarks/results/parts.{json,md}; the last line is `nano:<its loss> without_table:<that loss>`.
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common

ARMS = {
    "nano": {},
    "without the index": {"index_orders": ()},
    "without copies": {"copy_orders": ()},
    "n-grams alone": common.N_GRAMS_ALONE,
    "without the table": common.NO_TABLE,
}


def train_arm(arguments, arm, seed):
    """One run of an arm. Returns its figures."""
    values = {"track": "nano", "data": Path(arguments.data).resolve(), "seed": seed, **ARMS[arm]}
    if arguments.tiny:
        values = {**common.TINY, **values}
    run_id = f"{common.slug(arm)}_seed{seed}"
    found = common.train(arguments.work, run_id, common.words_of(values))
    print(f"{run_id}: {found['val_loss']:.5f}", flush=True)
    figures = {key: found[key] for key in ("val_loss", "train_time_ms", "tokens")}
    return {"arm": arm, "seed": seed, **figures}


def main(argv=None):
    """Command line. Raises SystemExit with the last words of a run that fails."""
    folders = {"data": common.ROOT / "data/python", "work": common.ROOT / "logs/parts"}
    arguments = common.parser(__doc__, seeds=1, tiny=False, **folders).parse_args(argv)
    arguments.work.mkdir(parents=True, exist_ok=True)
    facts = common.environment("cpu")
    runs = []
    for seed in range(1, arguments.seeds + 1):
        for arm in ARMS:
            runs.append(train_arm(arguments, arm, seed))
    losses = {arm: [run["val_loss"] for run in runs if run["arm"] == arm] for arm in ARMS}
    rows = [[arm, common.spread(found, 3), len(found)] for arm, found in losses.items()]
    table = common.markdown_table(["arm", "final validation loss", "n"], rows)
    note = f"{runs[0]['tokens']:,} training tokens each."
    common.write_results(arguments.results, "parts", facts, {"runs": runs}, f"{table}\n\n{note}")
    print(table)
    nano = statistics.mean(losses["nano"])
    without_table = statistics.mean(losses["without the table"])
    print(f"nano:{nano:.4f} without_table:{without_table:.4f}")


if __name__ == "__main__":
    main()
