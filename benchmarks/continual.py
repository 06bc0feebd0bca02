"""Show what frozen directions are worth: loss on Python against loss on C++, over learning rates.

    python benchmarks/continual.py [--jobs 2] [--seeds 3]

For each seed a model of the nano track is trained on Python, 313 steps by default, and goes on with
C++ headers:
    full             all weights move
    same matrices    only those that OSFT changes: attention and MLP
    OSFT r           the same, but only a share r of each matrix' singular directions
The table is frozen in all of them: see the track's values in continual.py. Each arm runs at several
learning rates; Adam's rates, where weights under Adam move, follow in the track's proportion. A
single rate compares how far the arms went; so each arm's loss on Python is read, seed by seed,
where its curve passes through the same loss on C++. Logs, less the source that they begin with, are
kept in --work. A run whose log lies there is not repeated, and all figures come from these logs.
Results: benchmarks/results/continual.{json,md,png}.
"""

import itertools
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import continual  # noqa: F401 (the script, not this file: its import registers the track)
import train_gpt
from benchmarks import common

TRACK = train_gpt.TRACKS["continual"]
ARMS = {  # (trained, unfreeze_rank_ratio)
    "full": ("all", 1.0),
    "same matrices": ("matrices", 1.0),
    "OSFT 0.5": ("matrices", 0.5),
    "OSFT 0.25": ("matrices", 0.25),
}
# Learning rates of the matrices: the less may move, the higher, so that the arms' losses on C++
# overlap.
RATES = {
    "full": (0.001, 0.003, 0.01),
    "same matrices": (0.001, 0.003, 0.01, 0.03),
    "OSFT 0.5": (0.006, 0.02, 0.06),
    "OSFT 0.25": (0.01, 0.03, 0.1),
}
REFERENCE = "same matrices"
LEVELS = 3  # losses on C++ at which the arms are compared


# ----- runs


def pretrain(arguments, seed):
    """Train on the first domain, in --work."""
    run_id = f"python_seed{seed}"
    values = {
        "track": "nano",
        "data": arguments.first_data.resolve(),
        "device": "cpu",
        "val_every": 0,
        "steps": arguments.pretrain_steps,
        "val_tokens": arguments.val_tokens,
        "seed": seed,
    }
    common.train(arguments.work, run_id, [*common.words_of(values), *arguments.options])
    keep_log(arguments, run_id)


def name_of(arm, rate, seed):
    return f"{common.slug(arm)}_lr{rate:g}_seed{seed}"


def go_on(arguments, arm, rate, seed):
    """One run on the second domain. Its checkpoint goes when it is done: each takes half a
    gigabyte."""
    (trained, ratio), run_id = ARMS[arm], name_of(arm, rate, seed)
    is_first = (arm, rate) == (
        REFERENCE,
        RATES[arm][0],
    )  # also scores the model that all start from
    values = {
        "init_from": f"python_seed{seed}",
        "data": arguments.data.resolve(),
        "first_data": arguments.first_data.resolve(),
        "device": "cpu",
        "seed": seed,
        "val_every": arguments.steps if is_first else 0,
        "steps": arguments.steps,
        "val_tokens": arguments.val_tokens,
        "trained": trained,
        "unfreeze_rank_ratio": ratio,
        "matrix_lr": f"{rate:g}",
        "adam_lr": f"{rate * TRACK.adam_lr / TRACK.matrix_lr:g}",
    }
    options = [*common.words_of(values), *arguments.options]
    common.train(arguments.work, run_id, options, script="continual.py")
    keep_log(arguments, run_id)
    for ending in (".pt", ".sha256"):
        (arguments.work / "logs" / run_id / f"checkpoint{ending}").unlink(missing_ok=True)


def logs_of(arguments):
    return arguments.work / "kept"


def keep_log(arguments, run_id):
    (logs_of(arguments) / f"{run_id}.log").write_text(common.log_tail(arguments.work, run_id))
    print(run_id, flush=True)


# ----- figures


def read_log(text):
    """{"arm", "rate", "seed", "steps", "B", "A", "start": (B, A) or None} of a complete continual
    run's log."""
    config = json.loads(re.search(r"^config:(.+)$", text, re.MULTILINE)[1])
    if not text.splitlines()[-1].startswith("status:ok "):
        sys.exit(f"the log of run {config['run_id']} is not that of a complete run; remove it")

    def losses_at(step):
        pattern = rf"^step:{step}/\d+ val_loss:(\S+) first_val_loss:(\S+) "
        found = re.search(pattern, text, re.MULTILINE)
        return found and (float(found[1]), float(found[2]))

    ratio = config["trained"], config["unfreeze_rank_ratio"]
    end = losses_at(config["steps"])
    return {
        "arm": next(name for name, key in ARMS.items() if key == ratio),
        "rate": config["matrix_lr"],
        "seed": config["seed"],
        "steps": config["steps"],
        "B": end[0],
        "A": end[1],
        "start": losses_at(0),
    }


def curves_of(runs):
    """{arm: {seed: [(B, A), ...] by rising learning rate}}"""
    curves = {arm: {} for arm in ARMS}
    for run in sorted(runs, key=lambda run: run["rate"]):
        curves[run["arm"]].setdefault(run["seed"], []).append((run["B"], run["A"]))
    return curves


def at_level(curve, level):
    """Loss on A where the sweep first passes through `level` on B, linear between neighbouring
    rates; None: nowhere."""
    for (b, a), (next_b, next_a) in itertools.pairwise(curve):
        if b == level == next_b:
            return a
        if min(b, next_b) <= level <= max(b, next_b):
            return a + (next_a - a) * (level - b) / (next_b - b)
    return None


def levels_of(curves):
    """Losses on B that every curve passes through, from the highest to the lowest; none where
    curves do not overlap."""
    every = [[b for b, _ in curve] for by_seed in curves.values() for curve in by_seed.values()]
    high, low = min(map(max, every)), max(map(min, every))
    if low >= high:
        return []
    return [high + (low - high) * i / (LEVELS - 1) for i in range(LEVELS)]


def rates_table(runs):
    """Every arm and rate, as markdown."""
    rows = []
    starts = {run["seed"]: run["start"] for run in runs if run["start"]}  # one model a seed
    if starts:
        losses = zip(*starts.values(), strict=True)
        rows.append(["before", "-", len(starts), *(common.spread(each, 4) for each in losses)])
    for arm in ARMS:
        for rate in sorted({run["rate"] for run in runs if run["arm"] == arm}):
            own = [run for run in runs if (run["arm"], run["rate"]) == (arm, rate)]
            losses = [common.spread([run[key] for run in own], 4) for key in "BA"]
            rows.append([arm, f"{rate:g}", len(own), *losses])
    header = ["arm", "learning rate", "n", "loss on C++", "loss on Python"]
    return common.markdown_table(header, rows)


def matched_table(curves):
    """The arms at the same losses on C++, as markdown; empty where their curves share none."""
    rows = []
    for level in levels_of(curves):
        at = {
            arm: {seed: at_level(curve, level) for seed, curve in curves[arm].items()}
            for arm in ARMS
        }
        for arm in ARMS:
            less = "-"
            if arm != REFERENCE:
                over = [loss - at[REFERENCE][seed] for seed, loss in at[arm].items()]
                less = common.spread(over, 4)
            found = list(at[arm].values())
            rows.append([f"{level:.4f}", arm, len(found), common.spread(found, 4), less])
    header = ["loss on C++", "arm", "n", "loss on Python there", f"less that of {REFERENCE}"]
    return common.markdown_table(header, rows) if rows else ""


def report(runs):
    """The two tables, as markdown: every arm and rate, and the arms at matched loss on C++."""
    rates, matched = rates_table(runs), matched_table(curves_of(runs))
    if not matched:
        return (
            f"{rates}\n\nThe arms' curves share no loss on C++, so nothing can be compared at "
            "matched loss."
        )
    return (
        f"{rates}\n\nAt matched loss on C++, interpolated along each arm's learning rates, seed by "
        f"seed (positive: forgets more than {REFERENCE}):\n\n{matched}"
    )


def plot(runs, path):
    colours = ("k", "tab:blue", "tab:orange", "tab:red")
    with common.picture(path, figsize=(7, 4.5)) as axis:
        for colour, (arm, by_seed) in zip(colours, curves_of(runs).items(), strict=True):
            label = arm
            for curve in by_seed.values():
                b, a = zip(*curve, strict=True)
                axis.plot(b, a, marker="o", markersize=4, linewidth=1, color=colour, label=label)
                label = None  # one in the legend
        label = "before"
        for run in runs:
            if run["start"]:
                axis.plot(*run["start"], "g*", markersize=10, label=label)
                label = None
        axis.set(xlabel="loss on C++, nats per byte", ylabel="loss on Python, nats per byte")
        axis.invert_xaxis()
        axis.grid(alpha=0.3)
        axis.legend()


def main(argv=None):
    parser = common.parser(
        __doc__,
        jobs=1,
        seeds=3,
        steps=120,
        pretrain_steps=313,
        val_tokens=131_072,
        data=common.ROOT / TRACK.data,
        first_data=common.ROOT / TRACK.first_data,
        work=common.ROOT / "logs/continual",
    )
    options_help = "after --: further words for train_gpt.py and continual.py"
    parser.add_argument("options", nargs="*", help=options_help)
    arguments = parser.parse_args(argv)
    logs = logs_of(arguments)
    for folder in (logs, arguments.results):
        folder.mkdir(parents=True, exist_ok=True)
    seeds = range(1, arguments.seeds + 1)
    keys = [(arm, rate, seed) for seed in seeds for arm in ARMS for rate in RATES[arm]]
    missing = [key for key in keys if not (logs / f"{name_of(*key)}.log").exists()]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        needed = sorted({seed for *_, seed in missing})
        list(pool.map(lambda seed: pretrain(arguments, seed), needed))
        list(pool.map(lambda key: go_on(arguments, *key), missing))
    runs = [read_log((logs / f"{name_of(*key)}.log").read_text()) for key in keys]
    if {run["steps"] for run in runs} != {arguments.steps}:
        sys.exit(f"{logs} holds logs of another --steps; remove them, or name another folder")
    text = report(runs)
    plot(runs, arguments.results / "continual.png")
    explained = (
        f"{text}\n\n{arguments.steps} steps on C++ after {arguments.pretrain_steps} on Python, "
        f"{arguments.val_tokens:,} validation tokens of each; mean ± standard deviation over "
        "seeds."
    )
    facts = common.environment("cpu")
    common.write_results(arguments.results, "continual", facts, {"runs": runs}, explained)
    print(text)


if __name__ == "__main__":
    main()
