"""What frozen directions are worth: loss on Python against loss on C++, on curves over learning rates.

    python benchmarks/continual.py [--jobs 2] [--seeds 3]

For each seed a model of the nano track is trained on Python, 313 steps by default, and goes on with C++ headers:
    full             all weights move
    same matrices    only those that OSFT changes: attention and MLP
    OSFT r           the same, but only a share r of each matrix' singular directions
The n-gram table is frozen in all of them: see the track's values in continual.py. Each arm runs at several learning
rates; Adam's rates, where weights under Adam move, follow in the track's proportion. A single rate compares how far the
arms went; so each arm's loss on Python is read, seed by seed, where its curve passes through the same loss on C++.
Logs, less the source that they begin with, are kept in benchmarks/results/continual/, beside the plot. A run whose log
lies there is not repeated, and all figures come from these logs. Results: benchmarks/results/continual.{json,md}.
"""
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common  # noqa: E402
import continual  # noqa: E402, F401: the script beside train_gpt.py, whose import registers the track
import train_gpt  # noqa: E402

TRACK = train_gpt.TRACKS["continual"]
ARMS = {"full": ("all", 1.0), "same matrices": ("matrices", 1.0), "OSFT 0.5": ("matrices", 0.5),
        "OSFT 0.25": ("matrices", 0.25)}  # (trained, unfreeze_rank_ratio)
# Learning rates of the matrices: the less may move, the higher, so that the arms' losses on C++ overlap.
RATES = {"full": (0.001, 0.003, 0.01), "same matrices": (0.001, 0.003, 0.01, 0.03), "OSFT 0.5": (0.006, 0.02, 0.06),
         "OSFT 0.25": (0.01, 0.03, 0.1)}
REFERENCE = "same matrices"
LEVELS = 3  # losses on C++ at which the arms are compared


# ----- runs

def pretrain(arguments, seed):
    """The id of a run on the first domain, kept in --work."""
    run_id = f"python_seed{seed}"
    common.train(arguments.work, run_id, [
        "--track", "nano", "--data", str(arguments.first_data.resolve()), "--device", "cpu", "--val-every", "0",
        "--steps", str(arguments.pretrain_steps), "--val-tokens", str(arguments.val_tokens), "--seed", str(seed),
        *arguments.options])
    keep_log(arguments, run_id)
    return run_id


def name_of(arm, rate, seed):
    return f"{common.slug(arm)}_lr{rate:g}_seed{seed}"


def go_on(arguments, arm, rate, seed):
    """One run on the second domain. Its checkpoint goes when it is done: each takes half a gigabyte."""
    (trained, ratio), run_id = ARMS[arm], name_of(arm, rate, seed)
    first = (arm, rate) == (REFERENCE, RATES[arm][0])  # also scores the model that all arms start from
    common.train(arguments.work, run_id, script="continual.py", options=[
        "--init-from", f"python_seed{seed}", "--data", str(arguments.data.resolve()),
        "--first-data", str(arguments.first_data.resolve()), "--device", "cpu", "--seed", str(seed),
        "--val-every", str(arguments.steps if first else 0), "--steps", str(arguments.steps),
        "--val-tokens", str(arguments.val_tokens), "--trained", trained, "--unfreeze-rank-ratio", str(ratio),
        "--matrix-lr", f"{rate:g}", "--adam-lr", f"{rate * TRACK.adam_lr / TRACK.matrix_lr:g}", *arguments.options])
    keep_log(arguments, run_id)
    for ending in (".pt", ".sha256"):
        (arguments.work / "logs" / run_id / f"checkpoint{ending}").unlink(missing_ok=True)


def logs_of(arguments):
    return arguments.results / "continual"


def keep_log(arguments, run_id):
    (logs_of(arguments) / f"{run_id}.log").write_text(common.log_tail(arguments.work, run_id))
    print(run_id, flush=True)


# ----- figures

def read_log(text):
    """{"arm", "rate", "seed", "steps", "B", "A", "start": (B, A) or None} of a complete continual run's log."""
    config = json.loads(re.search(r"^config:(.+)$", text, re.MULTILINE)[1])
    losses = r"val_loss:(\S+) first_val_loss:(\S+)"
    start = re.search(rf"^step:0/\d+ {losses} ", text, re.MULTILINE)
    end = re.search(rf"^step:{config['steps']}/\d+ {losses} ", text, re.MULTILINE)
    if not text.splitlines()[-1].startswith("status:ok "):
        raise SystemExit(f"the log of run {config['run_id']} is not that of a complete run; remove it")
    arm = next(name for name, key in ARMS.items() if key == (config["trained"], config["unfreeze_rank_ratio"]))
    return {"arm": arm, "rate": config["matrix_lr"], "seed": config["seed"], "steps": config["steps"],
            "B": float(end[1]), "A": float(end[2]), "start": start and (float(start[1]), float(start[2]))}


def curves_of(runs):
    """{arm: {seed: [(B, A), ...] by rising learning rate}}"""
    curves = {arm: {} for arm in ARMS}
    for run in sorted(runs, key=lambda run: run["rate"]):
        curves[run["arm"]].setdefault(run["seed"], []).append((run["B"], run["A"]))
    return curves


def at_level(curve, level):
    """Loss on A where the sweep first passes through `level` on B, linear between neighbouring rates; None: nowhere."""
    for (b, a), (next_b, next_a) in zip(curve, curve[1:]):
        if min(b, next_b) <= level <= max(b, next_b):
            return a if next_b == b else a + (next_a - a) * (level - b) / (next_b - b)
    return None


def levels_of(curves):
    """Losses on B that every curve passes through, from the highest to the lowest; none where curves do not overlap."""
    every = [[b for b, _ in curve] for by_seed in curves.values() for curve in by_seed.values()]
    high, low = min(map(max, every)), max(map(min, every))
    if low >= high:
        return []
    return [high + (low - high) * i / (LEVELS - 1) for i in range(LEVELS)]


def report(runs):
    """The two tables, as markdown: every arm and rate, and the arms at matched loss on C++."""
    curves, rows = curves_of(runs), []
    for arm in ARMS:
        for rate in sorted({run["rate"] for run in runs if run["arm"] == arm}):
            own = [run for run in runs if (run["arm"], run["rate"]) == (arm, rate)]
            rows.append([arm, f"{rate:g}", len(own), *(common.spread([run[key] for run in own], 4) for key in "BA")])
    starts = list({run["seed"]: run["start"] for run in runs if run["start"]}.values())  # one model a seed
    if starts:
        rows.insert(0, ["before", "-", len(starts), *(common.spread(values, 4) for values in zip(*starts))])
    found = common.markdown_table(["arm", "learning rate", "n", "loss on C++", "loss on Python"], rows)
    matched = []
    for level in levels_of(curves):
        at = {arm: {seed: at_level(curve, level) for seed, curve in curves[arm].items()} for arm in ARMS}
        for arm in ARMS:
            over = [at[arm][seed] - at[REFERENCE][seed] for seed in at[arm]]
            matched.append([f"{level:.4f}", arm, len(over), common.spread(list(at[arm].values()), 4),
                            "-" if arm == REFERENCE else common.spread(over, 4)])
    if not matched:
        return f"{found}\n\nThe arms' curves share no loss on C++, so nothing can be compared at matched loss."
    table = common.markdown_table(["loss on C++", "arm", "n", "loss on Python there", f"less that of {REFERENCE}"],
                                  matched)
    return (f"{found}\n\nAt matched loss on C++, interpolated along each arm's learning rates, seed by seed (positive: "
            f"forgets more than {REFERENCE}):\n\n{table}")


def plot(runs, path):
    with common.picture(path, figsize=(7, 4.5)) as axis:
        for colour, (arm, by_seed) in zip(("k", "tab:blue", "tab:orange", "tab:red"), curves_of(runs).items()):
            for index, curve in enumerate(by_seed.values()):
                axis.plot(*zip(*curve), marker="o", markersize=4, linewidth=1, color=colour,
                          label=None if index else arm)
        for index, start in enumerate(run["start"] for run in runs if run["start"]):
            axis.plot(*start, "g*", markersize=10, label=None if index else "before")
        axis.set(xlabel="loss on C++, nats per byte", ylabel="loss on Python, nats per byte")
        axis.invert_xaxis()
        axis.grid(alpha=0.3)
        axis.legend()


def main(argv=None):
    parser = common.parser(__doc__, jobs=1, seeds=3, steps=120, pretrain_steps=313, val_tokens=131_072,
                           data=common.ROOT / TRACK.data, first_data=common.ROOT / TRACK.first_data,
                           work=common.ROOT / "logs/continual")
    parser.add_argument("options", nargs="*", help="after --: further words for train_gpt.py and continual.py")
    arguments = parser.parse_args(argv)
    logs = logs_of(arguments)
    for folder in (arguments.work, logs):
        folder.mkdir(parents=True, exist_ok=True)
    seeds = range(1, arguments.seeds + 1)
    keys = [(arm, rate, seed) for seed in seeds for arm in ARMS for rate in RATES[arm]]
    missing = [key for key in keys if not (logs / f"{name_of(*key)}.log").exists()]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda seed: pretrain(arguments, seed), sorted({seed for *_, seed in missing})))
        list(pool.map(lambda key: go_on(arguments, *key), missing))
    runs = [read_log((logs / f"{name_of(*key)}.log").read_text()) for key in keys]
    if {run["steps"] for run in runs} != {arguments.steps}:
        raise SystemExit(f"{logs} holds logs of another --steps; remove them, or name another folder")
    text = report(runs)
    plot(runs, logs / "continual.png")
    common.write_results(arguments.results, "continual", common.environment("cpu"), {"runs": runs},
                         f"{text}\n\n{arguments.steps} steps on C++ after {arguments.pretrain_steps} on Python, "
                         f"{arguments.val_tokens:,} validation tokens of each; mean ± standard deviation over seeds. "
                         f"Logs and plot: benchmarks/results/continual/.")
    print(text)


if __name__ == "__main__":
    main()
