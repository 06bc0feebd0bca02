"""The tests and intervals that records are judged by. Samples are lists of floats, one value a run.

Pairs of runs are compared by the logarithms of the ratios of their times. Which run of a pair goes first is drawn, so
that without a difference between the scripts every sign of such a logarithm is as likely as the other, whatever the
machine did beside: bursts of load, drift, and outliers change the logarithms' sizes, and the test holds these fixed.
"""
import functools
import math
import re
import statistics
import warnings

import numpy as np
from scipy import stats

ALPHA = 0.01  # one-sided, for every claim
CONFIDENCE = 0.95  # of the intervals that are shown
POWER = 0.8  # of the number of runs that is proposed
MOST_RUNS = 10_000
LEAST_PAIRS = 8  # of a claim of speed, and those after which `ab` looks for the first time whether it is shown
PROCESSOR_SHARE = 0.8  # of a claim's level belongs to processor time, where that counts, and the rest to wall time
FLIPS = 16  # 2 to this sign vectors at most are compared
PARTS = 10  # of a run, in `fastest_parts`


def level(batch):
    """What the claims of one batch of a code may spend of ALPHA: over all its batches that is less than ALPHA."""
    return ALPHA / 2**batch


def mean_and_std(values):
    """Mean and sample standard deviation (0 for one value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def p_below(values, bound):
    """One-sided p of a t-test that the mean of `values` is below `bound`; 1.0 for fewer than two values, and for values
    without any spread, of which nothing follows."""
    if len(values) < 2 or max(values) == min(values):
        return 1.0
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # nearly equal values: precision loss
        return float(stats.ttest_1samp(values, bound, alternative="less").pvalue)


def p_worse(values, reference):
    """One-sided p of Welch's t-test that the mean of `values` lies above that of `reference`; 1.0 where one has fewer
    than two values, or neither any spread."""
    if min(len(values), len(reference)) < 2 or max(values) == min(values) and max(reference) == min(reference):
        return 1.0
    return float(stats.ttest_ind(values, reference, equal_var=False, alternative="greater").pvalue)


def interval(values):
    """(mean, low, high): the two-sided confidence interval of the mean; infinite for fewer than two values."""
    mean, std = mean_and_std(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * std / math.sqrt(len(values))
    return mean, mean - half, mean + half


def runs_needed(differences, level=ALPHA):
    """Runs at which a one-sided t-test at `level` finds a difference of this mean and spread with probability POWER;
    None where that takes more than MOST_RUNS."""
    mean, std = mean_and_std(differences)
    if len(differences) < 2 or mean == 0:
        return None
    if std == 0:
        return LEAST_PAIRS
    counts = np.arange(2, MOST_RUNS + 1)
    critical = stats.t.ppf(1 - level, counts - 1)
    enough = stats.nct.sf(critical, counts - 1, np.sqrt(counts) * abs(mean) / std) >= POWER
    return int(counts[enough.argmax()]) if enough.any() else None


# ----- pairs

@functools.lru_cache(2)
def sign_vectors(count):
    """(signs of `count` pairs +-1, one row a vector): all of them, or for more than FLIPS pairs a subgroup of all, drawn
    once and for ever. The first row leaves every sign as it is."""
    free = min(count, FLIPS)
    rows = np.arange(2**free)[:, None] >> np.arange(free) & 1
    mixed = np.random.default_rng(0).integers(0, 2, (free, count - free))
    return (1 - 2 * np.hstack([rows, rows @ mixed % 2])).astype(np.int8)


def looks(declared):
    """The numbers of pairs, of so many declared, after which `ab` may stop because all is shown."""
    return range(min(LEAST_PAIRS, declared), declared + 1)


def flip_test(logs, declared, level):
    """One-sided p that the logarithms of paired ratios lie below 0: a sign-flip test of their sum at each of the `looks`
    that the pairs, in their order, have reached.

    At a look the sign vectors are ordered by their sums, behind those that an earlier look would have rejected; the p
    is the share of all vectors that come no later than the data's. Where it is at most `level` the look rejects.
    The level's proof: without a difference every sign vector is equally likely, whatever the sizes of the logarithms.
    The share of vectors that any look rejects, hence the probability that one does, is at most `level`.
    Returns (p, the number of pairs at the look that rejected, None if none did)."""
    signs = sign_vectors(declared)
    sums, allowed, p = np.zeros(len(signs)), int(level * len(signs) + 1e-9), 1.0
    for count, value in enumerate(logs, 1):
        sums = np.round(sums + signs[:, count - 1] * value, 12)  # so that equal sums are equal in spite of rounding
        if count in looks(declared):
            ahead = int(np.sum(sums <= sums[0]))
            p = ahead / len(signs)
            if ahead <= allowed:
                return p, count
            sums[sums < np.partition(sums, allowed)[allowed]] = -math.inf  # as many as are allowed; ties all or none
    return p, None


def fastest_parts(runs):
    """Milliseconds on the wall that runs of one script would take if nothing else were at work: the fastest run's of
    each of PARTS parts of equally many steps, summed."""
    ends, times = np.linspace(0, 1, PARTS + 1), []
    for run in runs:
        points = [(0, 0), *((point.step / run.steps, point.time_ms) for point in run.curves["train"])]
        times.append(np.interp(ends, *zip(*points)))
    return float(np.diff(times).min(axis=0).sum())


def has_processor_time(run):
    """Whether the processor time in a log tells what the run took: of one process on a CPU, whose name in the log ends
    in the number of its cores."""
    return bool(run.cpu_time_ms and run.world_size == 1 and re.search(r" x\d+$", run.device))


def clocks(pairs):
    """{clock: (its share of a claim's level, logarithms of the ratios of [(run, run of the other script), ...])}."""
    found = {"wall": (1.0, [math.log(a.train_time_ms / b.train_time_ms) for a, b in pairs])}
    if all(has_processor_time(run) for pair in pairs for run in pair):
        found = {"processor": (PROCESSOR_SHARE, [math.log(a.cpu_time_ms / b.cpu_time_ms) for a, b in pairs]),
                 "wall": (1 - PROCESSOR_SHARE, found["wall"][1])}
    return found


def speed(pairs, declared, level):
    """Of [(run, run of the other script), ...] in the order in which they were made, whether the former are faster: p is
    at most `level` where they are shown to be, and shown_by names the clock. Differences are (mean, low, high) of
    the ratio of times less 1, by clock.

    Where processor time counts, both clocks are tested and divide the level, so that no more than the whole is spent.
    As it does not see that a run waits or uses fewer cores, it only counts where the fastest parts agree with it."""
    found = clocks(pairs)
    fastest = fastest_parts([a for a, _ in pairs]) / fastest_parts([b for _, b in pairs]) - 1
    p = {clock: min(1.0, flip_test(logs, declared, share * level)[0] / share) for clock, (share, logs) in found.items()}
    clock = min((clock for clock in p if clock == "wall" or fastest < 0), key=p.get)
    return {"p": p[clock], "shown_by": clock if p[clock] <= level else None, "fastest_parts": fastest,
            "differences": {clock: tuple(map(math.expm1, interval(logs))) for clock, (_, logs) in found.items()}}


def pairs_needed(pairs, level):
    """About how many pairs in all would show with probability POWER that the first scripts' runs are faster, if they are
    by as much as these pairs say; None where none would."""
    found = [runs_needed(logs, share * level) for share, logs in clocks(pairs).values() if statistics.fmean(logs) < 0]
    return max(LEAST_PAIRS, min(filter(None, found))) if any(found) else None
