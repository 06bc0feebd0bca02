"""Which test finds a gain in time with few pairs of runs, on a machine that others use too?

    python benchmarks/records_power.py [--trials 1000]
    python benchmarks/records_power.py --add NAME LOG ...

With --add it first keeps what the clocks said in runs of one script.

Runs of one and the same script, made one after another, show how far its clocks scatter: wall time,
the lower quartile of the wall time of a run's parts, and processor time. Pairs are then drawn with
noise of that size in several kinds: independent, bursts of load, drift, autocorrelated (AR(1)),
heavy-tailed, and blocks of the measured runs themselves. Orders of runs are drawn as `ab` draws
them. For each test stands the share of comparisons without any difference that it calls a gain,
which must not exceed its level, and the share of gains of 5 % that it finds.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import numpy as np
from scipy import stats as scipy_stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common
from records import stats
from records.files import read_text
from records.log import parse_log, split_log
from records.stats import BLOCK

RESULTS, MEASURED = (
    common.ROOT / "benchmarks/results",
    common.ROOT / "benchmarks/results/records_noise.json",
)
GAIN, PAIRS, LEVEL = 0.05, 12, 0.01
PARTS = 10  # of a run
CLOCKS = ("wall time", "lower quartile", "processor time")


# ----- measured runs


def parts_of(run):
    """Milliseconds of each of PARTS parts of equally many steps."""
    points = [(0, 0), *((point.step / run.steps, point.time_ms) for point in run.curves["train"])]
    return (
        np.diff(np.interp(np.linspace(0, 1, PARTS + 1), *zip(*points, strict=True)))
        .round()
        .tolist()
    )


def add(name, paths):
    """Keep what the clocks said in some logs as a set of measured runs."""
    sets = json.loads(MEASURED.read_text())
    sets[name] = []
    for path in paths:
        source, _ = split_log(read_text(path))
        run = parse_log(path, source)
        clocks = {"wall_ms": run.train_time_ms, "cpu_ms": run.cpu_time_ms}
        sets[name].append({**clocks, "parts_ms": parts_of(run)})
    MEASURED.write_text(json.dumps(sets, indent=0) + "\n")


def clocks_of(runs):
    """Logarithms of what each of CLOCKS said of measured runs: (clocks, runs). The first part of a
    run holds the index, which is read once; of the others the lower quartile counts."""
    quartiles = [
        run["parts_ms"][0] + np.quantile(run["parts_ms"][1:], 0.25) * (PARTS - 1) for run in runs
    ]
    return np.log([[run["wall_ms"] for run in runs], quartiles, [run["cpu_ms"] for run in runs]])


# ----- noise: of `count` runs in a row, for each of `trials`, with standard deviation about 1


def independent(rng, trials, count):
    return rng.standard_normal((trials, count))


def bursts(rng, trials, count):
    """Other work comes, takes its share for about three runs, and goes."""
    noise, load = np.empty((trials, count)), np.zeros(trials)
    for run in range(count):
        begins, ends = rng.random((2, trials)) < [[0.15], [1 / 3]]
        load = np.where(load > 0, load * ~ends, begins * rng.exponential(1.5, trials))
        noise[:, run] = load + 0.2 * rng.standard_normal(trials)
    return noise / 1.25


def drift(rng, trials, count):
    return rng.choice((-1.5, 1.5), (trials, 1)) * np.linspace(
        -1, 1, count
    ) + 0.5 * rng.standard_normal((trials, count))


def autocorrelated(rng, trials, count, memory=0.8):
    noise = rng.standard_normal((trials, count))
    for run in range(1, count):
        noise[:, run] = memory * noise[:, run - 1] + (1 - memory**2) ** 0.5 * noise[:, run]
    return noise


def heavy_tails(rng, trials, count):
    return rng.standard_t(2, (trials, count)) / 2


KINDS = {
    "independent": independent,
    "bursts": bursts,
    "drift": drift,
    "AR(1)": autocorrelated,
    "heavy tails": heavy_tails,
    "measured": None,
}


def simulated(rng, kind, logs, trials, pairs):
    """Logarithms of times of two scripts without any difference, with noise as in logs (clocks,
    measured runs), in an order that is drawn: (clocks, trials, sides, pairs)."""
    block = 2 * BLOCK
    if kind == "measured":  # runs that were made one after another, from any place
        starts = rng.integers(0, logs.shape[1] - block + 1, (trials, pairs // BLOCK, 1))
        slots = logs[:, starts + np.arange(block)]
    else:
        noise = KINDS[kind](rng, trials, 2 * pairs).reshape(trials, pairs // BLOCK, block)
        slots = logs.std(axis=1, ddof=1)[:, None, None, None] * noise
    halves = np.array(
        [
            [*half, *sorted(set(range(block)) - set(half))]
            for half in itertools.combinations(range(block), BLOCK)
        ]
    )
    drawn = halves[rng.integers(0, len(halves), slots.shape[1:3])]
    sides = np.take_along_axis(slots, np.broadcast_to(drawn, slots.shape), axis=-1)
    sides = sides.reshape(len(logs), trials, pairs // BLOCK, 2, BLOCK).swapaxes(2, 3)
    return sides.reshape(len(logs), trials, 2, pairs)


# ----- tests: p of each trial (trials, sides, pairs) of logarithms


def t_of_differences(sides):
    """The test that records had before."""
    return scipy_stats.ttest_1samp(
        np.exp(sides[:, 0]) - np.exp(sides[:, 1]), 0, axis=1, alternative="less"
    ).pvalue


def t_of_logarithms(sides):
    return scipy_stats.ttest_1samp(sides[:, 0] - sides[:, 1], 0, axis=1, alternative="less").pvalue


def flipped(scores):
    """Of the sum of scores, among all their signs."""
    signs = np.array(list(itertools.product((1, -1), repeat=scores.shape[1])), float)
    sums = scores @ signs.T
    return (sums <= sums[:, :1] + 1e-9).mean(axis=1)


def sign_flips(sides):
    return flipped(sides[:, 0] - sides[:, 1])


def wilcoxon(sides):
    logs = sides[:, 0] - sides[:, 1]
    return flipped(np.sign(logs) * scipy_stats.rankdata(abs(logs), axis=1))


def clipped(sides):
    """Sign flips of logarithms that count for no more than their median size."""
    logs = sides[:, 0] - sides[:, 1]
    bound = np.median(abs(logs), axis=1, keepdims=True)
    return flipped(np.clip(logs, -bound, bound))


def permutations(sides):
    """The test that records have, of the wall time's logarithms."""
    sums = np.zeros((len(sides), 1))
    for first in range(0, sides.shape[2], BLOCK):
        block = sides[:, :, first : first + BLOCK].reshape(len(sides), 2 * BLOCK)
        ways = np.array(
            [
                np.isin(range(2 * BLOCK), half)
                for half in itertools.combinations(range(2 * BLOCK), BLOCK)
            ]
        )
        sums = (sums[:, :, None] + (block @ np.where(ways, 1.0, -1.0).T)[:, None]).reshape(
            len(sides), -1
        )
    return (sums <= sums[:, :1] + 1e-9).mean(axis=1)


TESTS = {
    "paired t, differences (before)": t_of_differences,
    "paired t, logarithms": t_of_logarithms,
    "signs flipped": sign_flips,
    "Wilcoxon": wilcoxon,
    "signs flipped, clipped": clipped,
    "permutations in blocks": permutations,
}


def compare_tests(rng, logs, trials):
    """{clock: {test: {kind: [share of false gains, share of true gains found]}}} with PAIRS pairs
    at LEVEL."""
    found = {clock: {test: {} for test in TESTS} for clock in CLOCKS}
    for kind in KINDS:
        for clock, sides in zip(CLOCKS, simulated(rng, kind, logs, trials, PAIRS), strict=True):
            gains = sides + np.log([[1 - GAIN], [1]])
            for name, test in TESTS.items():
                found[clock][name][kind] = [
                    float(
                        np.mean(
                            np.concatenate(
                                [test(part) for part in np.array_split(both, max(1, trials // 50))]
                            )
                            <= LEVEL
                        )
                    )
                    for both in (sides, gains)
                ]
    return found


# ----- the rule: wall time, at one level


def rule(rng, logs, kind, gain, trials, pairs):
    """The share of trials in which the rule of records shows a gain of the wall time."""
    sides = simulated(rng, kind, logs, trials, pairs)[0] + np.log([[1 - gain], [1]])
    return float(np.mean([stats.p_faster(*np.exp(times)) <= stats.ALPHA for times in sides]))


def study(sets, trials):
    rng = np.random.default_rng(0)
    found = {}
    for name, runs in sets.items():
        logs = clocks_of(runs)
        found[name] = {
            "runs": len(runs),
            "spread": logs.std(axis=1, ddof=1).tolist(),
            "tests": compare_tests(rng, logs, trials),
            "rule": {
                kind: {
                    f"8 {gain}": rule(rng, logs, kind, gain, trials // 2, 8)
                    for gain in (0, GAIN, 2 * GAIN)
                }
                for kind in KINDS
            },
        }
    return found


def page(found, trials):
    """The tables as text; those of all tests for the first set of measured runs alone."""

    lines = []
    for number, (name, entry) in enumerate(found.items()):
        spread = ", ".join(
            f"{clock} {100 * value:.1f} %"
            for clock, value in zip(CLOCKS, entry["spread"], strict=True)
        )
        lines += [
            f"**{name}**: {entry['runs']} runs of one script. Standard deviation between runs: "
            f"{spread}.",
            "",
        ]
        if not number:
            rows = [
                [
                    clock,
                    test,
                    *(f"{100 * kinds[kind][0]:.1f} / {100 * kinds[kind][1]:.0f}" for kind in KINDS),
                ]
                for clock, tests in entry["tests"].items()
                for test, kinds in tests.items()
            ]
            lines += [
                f"False gains / gains of {GAIN:.0%} found, in %, with {PAIRS} pairs at a level of "
                f"{LEVEL:.0%}:",
                "",
                common.markdown_table(["clock", "test", *KINDS], rows),
                "",
            ]
        rows = []
        for gain in (0, GAIN, 2 * GAIN):
            shares = [entry["rule"][kind][f"8 {gain}"] for kind in KINDS]
            rows.append([f"{gain:.0%}", *(f"{100 * share:.1f}" for share in shares)])
        lines += [
            f"The rule of records, wall time at a level of {stats.ALPHA:.0%}: gains shown, in % of "
            "comparisons with 8 pairs:",
            "",
            common.markdown_table(["true gain", *KINDS], rows),
            "",
        ]
    error = 100 * (LEVEL * (1 - LEVEL) / trials) ** 0.5
    return "\n".join(
        [
            *lines,
            f"{trials} comparisons for each figure of the tests, of which a true share of "
            f"{LEVEL:.0%} has a standard error of {error:.2f} %; {trials // 2} for each of the "
            "rule.",
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--add", nargs="+", default=[], metavar=("NAME", "LOG"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.add:
        add(arguments.add[0], arguments.add[1:])
    found = study(json.loads(MEASURED.read_text()), arguments.trials)
    text = page(found, arguments.trials)
    common.write_results(
        arguments.results, "records_power", common.environment("cpu"), {"sets": found}, text
    )
    print(text)


if __name__ == "__main__":
    main()
