"""What n-grams are worth: the nano track without a table, with bigrams alone, with all its orders.

    python benchmarks/ngram_ablation.py [--seeds 3] [--steps 313]

313 steps by default (1.3 M tokens), everything else as in the track, but for copies and the index,
which no arm has; seeds 1 to n, arms taking turns. Every run counts. Results:
benchmarks/results/ngram_ablation.{json,md}, and the runs' logs, less the source that they begin
with, under benchmarks/results/ngram_ablation/. A run that is complete in --work is not repeated.
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common

ARMS = {"no n-grams": (), "bigrams": (2,), "all orders": train_gpt.TRACKS["nano"].ngram_orders}
HEADER = (
    "arm",
    "orders",
    "table rows",
    "table values",
    "n",
    "validation loss, mean",
    "standard deviation",
    "training time / all orders",
)


def summary(arm, runs, reference):
    """One line of the table; reference: the seconds of the last arm's runs, seed by seed."""
    config, losses = runs[0]["config"], [run["val_loss"] for run in runs]
    rows = config["ngram_rows"] if config["ngram_orders"] else 0
    ratios = [run["train_time_ms"] / of for run, of in zip(runs, reference, strict=True)]
    return [
        arm,
        ", ".join(map(str, config["ngram_orders"])) or "-",
        f"{rows:,}",
        f"{rows * config['model_dim']:,}",
        len(losses),
        f"{statistics.mean(losses):.5f}",
        f"{statistics.stdev(losses):.5f}" if len(losses) > 1 else "-",
        f"{statistics.median(ratios):.2f}",
    ]


def run_arm(arguments, orders, run_id, seed):
    """The result of one run."""
    values = {
        "track": "nano",
        "data": arguments.data.resolve(),
        "device": "cpu",
        "steps": arguments.steps,
        "val_tokens": arguments.val_tokens,
        "seed": seed,
        **common.N_GRAMS_ALONE,
        "ngram_orders": orders,
    }
    return common.train(arguments.work, run_id, common.words_of(values))


def main(argv=None):
    defaults = {"seeds": 3, "steps": 313, "val_tokens": train_gpt.TRACKS["nano"].val_tokens}
    folders = {"data": common.ROOT / "data/python", "work": common.ROOT / "logs/ngram_ablation"}
    arguments = common.parser(__doc__, **defaults, **folders).parse_args(argv)
    arguments.work.mkdir(parents=True, exist_ok=True)
    logs = arguments.results / "ngram_ablation"
    logs.mkdir(parents=True, exist_ok=True)
    runs = {arm: [] for arm in ARMS}
    for seed in range(1, arguments.seeds + 1):
        for arm, orders in ARMS.items():
            run_id = f"{common.slug(arm)}_seed{seed}"
            runs[arm].append(run_arm(arguments, orders, run_id, seed))
            (logs / f"{run_id}.log").write_text(common.log_tail(arguments.work, run_id))
            print(f"{run_id}: {runs[arm][-1]['val_loss']:.5f}", flush=True)
    reference = [run["train_time_ms"] for run in runs["all orders"]]
    rows = [summary(arm, found, reference) for arm, found in runs.items()]
    table = common.markdown_table(HEADER, rows)
    note = (
        f"{arguments.steps} steps, {arguments.val_tokens:,} validation tokens, one thread a run; "
        "times are medians of ratios, seed by seed. Logs: benchmarks/results/ngram_ablation/."
    )
    facts = common.environment("cpu")
    text = f"{table}\n\n{note}"
    common.write_results(arguments.results, "ngram_ablation", facts, {"runs": runs}, text)
    print(table)


if __name__ == "__main__":
    main()
