"""Which rule should update the hidden matrices: adam, muon, soap, soap_muon or kl_soap.

    python benchmarks/optimizer_rules.py [--steps 313] [--seeds 3] [--jobs 1]

1. Each rule's learning rate is tuned on the nano track, on the same grid around a centre of its
   own, with one seed; where the best is at an edge, the grid grows until it is not.
2. At its best rate each rule runs with every seed, at equal steps,
3. and at equal time: with as many steps as fit into the time of Muon's, by the cost ratios that
   optimizer_step.py has measured in turns on a quiet machine, so that no other load decides.
All else is as in the track, schedule included, which ends with the run. Every run counts and is a
process of its own; one that is complete in --work is not repeated. Results:
benchmarks/results/optimizer_rules.{json,md}, and the runs' logs, less the source that they begin
with, under benchmarks/results/optimizer_rules/.
"""

import json
import math
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common

TRACK = train_gpt.TRACKS["nano"]
# The centre of each rule's grid: in 60 steps this rate did better than its double for all five.
CENTRES = dict.fromkeys(train_gpt.MATRIX_RULES, 0.03)
GRID = (0.5, 1.0, 2.0)
WIDEST = (1 / 16, 16.0)  # beyond, a rule is taken to have no best rate


def best_multiple(losses):
    """The multiple with the lowest loss, and the one to try next.

    That is None where neighbours on both sides are worse."""
    best = min(losses, key=losses.get)
    if best == min(losses) and best > WIDEST[0]:
        return best, best / 2
    if best == max(losses) and best < WIDEST[1]:
        return best, best * 2
    return best, None


def cost_ratios(file, basis_every):
    """{rule: time of a training step over that with Muon}, from optimizer_step.py's results."""
    if not file.is_file():
        remedy = "run benchmarks/optimizer_step.py first, for equal time needs its ratios"
        raise SystemExit(f"{file} is missing: {remedy}")
    rows = json.loads(file.read_text())["results"]
    found = {(row["rule"], row["every"]): row["step_ratio"] for row in rows}
    ratios = {}
    try:
        for name in CENTRES:
            has_bases = train_gpt.MATRIX_RULES[name].has_bases
            ratios[name] = found[name, basis_every if has_bases else None]
    except KeyError as error:
        raise SystemExit(
            f"{file} has no {error.args[0]}: run benchmarks/optimizer_step.py again"
        ) from None
    return ratios


class Runs:
    """Runs of the trainer by (rule, learning rate, steps, seed), kept as files."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.logs = arguments.results / "optimizer_rules"
        self.results = {}
        self.logs.mkdir(parents=True, exist_ok=True)
        arguments.work.mkdir(parents=True, exist_ok=True)

    def one(self, key):
        """The run's result.json; its loss is infinite where the run's own was not finite."""
        rule, lr, steps, seed = key
        run_id = f"{rule}_lr{lr:g}_steps{steps}_seed{seed}"
        values = {
            "track": "nano",
            "data": self.arguments.data.resolve(),
            "device": "cpu",
            "val_tokens": self.arguments.val_tokens,
            "steps": steps,
            "seed": seed,
            "matrix_update": rule,
            "matrix_lr": f"{lr:g}",
        }
        words = [*common.words_of(values), *self.arguments.options]
        try:
            result = common.train(self.arguments.work, run_id, words)
            (self.logs / f"{run_id}.log").write_text(common.log_tail(self.arguments.work, run_id))
        except SystemExit as failure:
            if "status:nan" not in str(failure):
                raise
            result = {"val_loss": math.inf, "train_time_ms": math.nan, "basis_rejects": 0}
        print(f"{run_id}: {result['val_loss']:.5f}", flush=True)
        return result

    def losses(self, keys):
        """The validation losses of these runs, `jobs` of which run side by side, a thread each."""
        missing = [key for key in dict.fromkeys(keys) if key not in self.results]
        with ThreadPoolExecutor(self.arguments.jobs) as pool:
            self.results.update(zip(missing, pool.map(self.one, missing), strict=True))
        return [self.results[key]["val_loss"] for key in keys]


def tune(runs, steps):
    """{rule: {multiple of its centre: loss}} with seed 1, each with its best multiple inside."""
    found = {rule: {} for rule in CENTRES}
    wanted = {rule: list(GRID) for rule in CENTRES}
    while any(wanted.values()):
        pairs = [(rule, multiple) for rule, multiples in wanted.items() for multiple in multiples]
        losses = runs.losses([(rule, by * CENTRES[rule], steps, 1) for rule, by in pairs])
        for (rule, multiple), loss in zip(pairs, losses, strict=True):
            found[rule][multiple] = loss
        following = {rule: best_multiple(losses)[1] for rule, losses in found.items()}
        wanted = {
            rule: [multiple] if multiple and multiple not in found[rule] else []
            for rule, multiple in following.items()
        }
    return found


def compare(runs, grid, ratios, arguments):
    """[{rule, lr, ratio, steps, equal_steps, equal_time}], best at equal time first.

    The last two are losses."""
    rows = []
    seeds = range(1, arguments.seeds + 1)
    for rule, losses in grid.items():
        lr = best_multiple(losses)[0] * CENTRES[rule]
        steps = round(arguments.steps / ratios[rule])
        rows.append({"rule": rule, "lr": lr, "ratio": ratios[rule], "steps": steps})
    runs.losses(
        [
            (row["rule"], row["lr"], steps, seed)
            for row in rows
            for steps in (arguments.steps, row["steps"])
            for seed in seeds
        ]
    )
    for row in rows:
        for name, steps in (("equal_steps", arguments.steps), ("equal_time", row["steps"])):
            row[name] = runs.losses([(row["rule"], row["lr"], steps, seed) for seed in seeds])
    return sorted(rows, key=lambda row: statistics.mean(row["equal_time"]))


def report(rows, grid, arguments):
    multiples = sorted({multiple for losses in grid.values() for multiple in losses})
    tuning = common.markdown_table(
        ["rule", *(f"x{multiple:g}" for multiple in multiples), "centre"],
        [
            [
                rule,
                *(f"{losses[m]:.5f}" if m in losses else "-" for m in multiples),
                f"{CENTRES[rule]:g}",
            ]
            for rule, losses in grid.items()
        ],
    )
    muon = statistics.mean(next(row for row in rows if row["rule"] == "muon")["equal_time"])
    final = common.markdown_table(
        [
            "rule",
            "learning rate",
            "n",
            "loss at equal steps",
            "step time / muon",
            "steps at equal time",
            "loss at equal time",
            "less muon's",
        ],
        [
            [
                row["rule"],
                f"{row['lr']:g}",
                len(row["equal_time"]),
                common.spread(row["equal_steps"], 5),
                f"{row['ratio']:.3f}",
                row["steps"],
                common.spread(row["equal_time"], 5),
                f"{statistics.mean(row['equal_time']) - muon:+.5f}",
            ]
            for row in rows
        ],
    )
    return f"""{final}

{arguments.steps} steps at equal steps, {arguments.val_tokens:,} validation tokens; mean ± standard
deviation over seeds, best at equal time first. Learning rates were tuned with seed 1, loss by
multiple of the centre:

{tuning}

Logs: benchmarks/results/optimizer_rules/."""


def main(argv=None):
    parser = common.parser(
        __doc__,
        steps=313,
        val_tokens=262_144,
        seeds=3,
        jobs=1,
        data=common.ROOT / "data/python",
        work=common.ROOT / "logs/optimizer_rules",
        ratios=common.RESULTS / "optimizer_step.json",
    )
    parser.add_argument("options", nargs="*", help="after --: further words for train_gpt.py")
    arguments = parser.parse_args(argv)
    ratios = cost_ratios(arguments.ratios, TRACK.basis_every)
    runs = Runs(arguments)
    grid = tune(runs, arguments.steps)
    rows = compare(runs, grid, ratios, arguments)
    text = report(rows, grid, arguments)
    found = []
    for key, result in runs.results.items():
        of_run = dict(zip(("rule", "lr", "steps", "seed"), key, strict=True))
        kept = {name: result[name] for name in ("val_loss", "train_time_ms", "basis_rejects")}
        found.append({**of_run, **kept})
    data = {"grid": grid, "rules": rows, "runs": found}
    facts = common.environment("cpu")
    common.write_results(arguments.results, "optimizer_rules", facts, data, text)
    rejects = sum(run["basis_rejects"] for run in found)
    print(text)
    print(f"best_at_equal_time:{rows[0]['rule']} rejects:{rejects}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
