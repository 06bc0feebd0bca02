"""The tests and intervals that records are judged by. Samples are lists of floats, one value a run.

Times of pairs are compared by a permutation test, whose level holds whatever the machine does beside.
"""
import itertools
import math
import re
import statistics
import warnings

import numpy as np
from scipy import stats

from records.files import RULES
from records.log import BLOCK

ALPHA = RULES["alpha"]  # one-sided, for every claim
CONFIDENCE = 0.95  # of the intervals that are shown
POWER = 0.8  # of the number of runs that is proposed
MOST_RUNS = 10_000
LEAST_PAIRS = 8  # of a claim of speed, and those after which `ab` looks for the first time whether it is shown
PROCESSOR_SHARE = 0.8  # of a claim's level belongs to processor time, where that counts, and the rest to wall time
MOST_PAIRS = 16  # their runs come in one of 1.7 million orders; the test shows nothing of more
SPENDING = 3  # a look may spend the level times the share of pairs that it has, to this power
PARTS = 10  # of a run, in `fastest_parts`


def level(batch):
    """What the claims of one batch of a code may spend of ALPHA: over all its batches that is less than ALPHA."""
    return math.ldexp(ALPHA, -batch)


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

def looks(declared):
    """The numbers of pairs, of so many declared, after which `ab` may stop because all is shown."""
    return [count for count in range(min(LEAST_PAIRS, declared), declared) if count % BLOCK == 0] + [declared]


def arrangements(times, others):
    """Sums of the first side's values less those of the second, if any as many of the block's values had been the first
    side's: the sum as it is, then all others."""
    block, total = [*times, *others], sum(times) + sum(others)
    return np.array([2 * sum(chosen) - total for chosen in itertools.combinations(block, len(times))])


def permutation_test(times, others, declared, level):
    """One-sided p that `times` tend to lie below `others`, the logarithms of times of paired runs, in the order of the
    pairs: after each number of pairs of `looks` that there is. Returns (p, the number of pairs at which it was at
    most `level`, or None).

    The order of a block's runs was drawn. So without a difference the scripts could as well have changed places in it,
    in any way, and each way is as likely as what happened, whatever else the machine did. At a look all ways are
    ordered by the sum of differences, behind those with which an earlier look would have ended; p is the share of all
    that come no later than what happened. An early look may bring the share that ended to a part of `level` only.
    The level's proof: what happened is one of all ways with equal probability, and of these at most the share `level`
    ends at any look."""
    sums, p = np.zeros(1), 1.0
    if declared > MOST_PAIRS:
        return p, None
    for first in range(0, min(declared, len(times)), BLOCK):
        count = min(first + BLOCK, declared)
        if count > len(times):
            break
        block = arrangements(times[first:count], others[first:count])
        sums = np.round(np.add.outer(sums, block).ravel(), 12)  # so that equal sums are equal in spite of rounding
        if count in looks(declared):
            part = (count / declared) ** SPENDING
            ahead, allowed = int(np.sum(sums <= sums[0])), int(part * level * len(sums) + 1e-9)
            p = min(1.0, ahead / len(sums) / part)
            if ahead <= allowed:
                return p, count
            sums[sums < np.partition(sums, allowed)[allowed]] = -math.inf  # as many as are allowed; ties all or none
    return p, None


def fastest_parts(runs):
    """Milliseconds on the wall that runs of one script would take if nothing else were at work: the fastest run's of
    each of PARTS parts of equally many steps, summed; at least 1."""
    ends, times = np.linspace(0, 1, PARTS + 1), []
    for run in runs:
        points = [(0, 0), *((point.step / run.steps, point.time_ms) for point in run.curves["train"]),
                  (1, run.train_time_ms)]
        times.append(np.interp(ends, *zip(*points)))
    return max(1.0, float(np.diff(times).min(axis=0).sum()))


def has_processor_time(run):
    """Whether the processor time in a log tells what the run took: of one process on a CPU, whose name in the log ends
    in the number of its cores."""
    return bool(run.cpu_time_ms and run.world_size == 1 and re.search(r" x\d+$", run.device))


def clocks(pairs):
    """{clock: (its share of a claim's level, logarithms of times of [(run, run of the other script), ...])}."""
    found = {"wall": (1.0, np.log([(a.train_time_ms, b.train_time_ms) for a, b in pairs]).T)}
    if all(has_processor_time(run) for pair in pairs for run in pair):
        found = {"processor": (PROCESSOR_SHARE, np.log([(a.cpu_time_ms, b.cpu_time_ms) for a, b in pairs]).T),
                 "wall": (1 - PROCESSOR_SHARE, found["wall"][1])}
    return found


def speed(pairs, declared, level):
    """Of [(run, run of the other script), ...] in the order of their counters, whether the former are faster: p is at
    most `level` where they are shown to be, and shown_by names the clock. Differences are (mean, low, high) of the
    ratio of times less 1, by clock.

    Where processor time counts, both clocks are tested and divide the level, so that no more than the whole is spent.
    As it does not see that a run waits or uses fewer cores, it only counts where the fastest parts agree with it."""
    found = clocks(pairs)
    fastest = fastest_parts([a for a, _ in pairs]) / fastest_parts([b for _, b in pairs]) - 1
    p = {clock: min(1.0, permutation_test(*logs, declared, share * level)[0] / share)
         for clock, (share, logs) in found.items()}
    clock = min((clock for clock in p if clock == "wall" or fastest < 0), key=p.get)
    return {"p": p[clock], "shown_by": clock if p[clock] <= level else None, "fastest_parts": fastest,
            "differences": {clock: tuple(map(math.expm1, interval(list(a - b))))
                            for clock, (_, (a, b)) in found.items()}}


def pairs_needed(pairs, level):
    """About how many pairs in all would show with probability POWER that the former scripts' runs are faster, if they
    are by as much as these pairs say; None where no number would."""
    found = [runs_needed(list(a - b), share * level) for share, (a, b) in clocks(pairs).values() if np.mean(a - b) < 0]
    return max(LEAST_PAIRS, min(filter(None, found))) if any(found) else None
