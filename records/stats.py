"""The tests and intervals that records are judged by. Samples are lists of floats, one value a run.

Times of pairs are compared by a permutation test, whose level holds whatever the machine does
beside.
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
LEAST_PAIRS = 8  # of a claim of speed; after so many `ab` looks for the first time
# Where processor time counts, this share of a claim's level belongs to it, and the rest to wall
# time.
PROCESSOR_SHARE = 0.8
MOST_PAIRS = 16  # their runs come in one of 1.7 million orders; the test shows nothing of more
SPENDING = 3  # a look may spend the level times the share of pairs that it has, to this power
PARTS = 10  # of a run, in `fastest_parts`


def level(batch):
    """What the claims of one batch of a code may spend of ALPHA. Over all its batches that is less
    than ALPHA."""
    return math.ldexp(ALPHA, -batch)


def mean_and_std(values):
    """Mean and sample standard deviation (0 for one value)."""
    if len(values) == 1:
        return statistics.fmean(values), 0.0
    return statistics.fmean(values), statistics.stdev(values)


def p_below(values, bound):
    """One-sided p of a t-test that the mean of `values` is below `bound`.

    It is 1.0 for fewer than two values, and for values without any spread, of which nothing
    follows.
    """
    if len(values) < 2 or max(values) == min(values):
        return 1.0
    # SciPy warns that it loses precision with values that are nearly equal.
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return float(stats.ttest_1samp(values, bound, alternative="less").pvalue)


def p_worse(values, reference):
    """One-sided p of Welch's t-test that the mean of `values` lies above that of `reference`.

    It is 1.0 where one of them has fewer than two values, or neither has any spread.
    """
    if len(values) < 2 or len(reference) < 2:
        return 1.0
    if max(values) == min(values) and max(reference) == min(reference):
        return 1.0
    return float(stats.ttest_ind(values, reference, equal_var=False, alternative="greater").pvalue)


def interval(values):
    """(mean, low, high): the two-sided confidence interval of the mean, which is infinite for fewer
    than two values."""
    mean, std = mean_and_std(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * std / math.sqrt(len(values))
    return mean, mean - half, mean + half


def runs_needed(differences, level=ALPHA):
    """Runs at which a one-sided t-test at `level` finds a difference of this mean and spread with
    probability POWER; None where that takes more than MOST_RUNS."""
    mean, std = mean_and_std(differences)
    if len(differences) < 2 or mean == 0:
        return None
    if std == 0:
        return LEAST_PAIRS
    counts = np.arange(2, MOST_RUNS + 1)
    critical = stats.t.ppf(1 - level, counts - 1)
    power = stats.nct.sf(critical, counts - 1, np.sqrt(counts) * abs(mean) / std)
    enough = counts[power >= POWER]
    if not len(enough):
        return None
    return int(enough[0])


# ----- pairs


def looks(declared):
    """The numbers of pairs, of so many declared, after which `ab` may stop because all is shown."""
    first = min(LEAST_PAIRS, declared)
    early = [count for count in range(first, declared) if count % BLOCK == 0]
    return [*early, declared]


def arrangements(times, others):
    """Sums of the first side's values less those of the second, if any as many of the block's
    values had been the first side's: the sum as it is, then all others."""
    block = [*times, *others]
    total = sum(times) + sum(others)
    ways = itertools.combinations(block, len(times))
    return np.array([2 * sum(chosen) - total for chosen in ways])


def permutation_test(times, others, declared, level):
    """One-sided p that `times` tend to lie below `others`, the logarithms of times of paired runs,
    in the order of the pairs: after each number of pairs of `looks` that there is. Returns (p, the
    number of pairs at which it was at most `level`, or None).

    The order of a block's runs was drawn. So without a difference the scripts could as well have
    changed places in it, in any way, and each way is as likely as what happened, whatever else the
    machine did. At a look all ways are ordered by the sum of differences, behind those with which
    an earlier look would have ended; p is the share of all that come no later than what happened.
    An early look may bring the share that ended to a part of `level` only. The level's proof: what
    happened is one of all ways with equal probability, and of these at most the share `level` ends
    at any look.
    """
    sums = np.zeros(1)
    p = 1.0
    if declared > MOST_PAIRS:
        return p, None
    for first in range(0, min(declared, len(times)), BLOCK):
        count = min(first + BLOCK, declared)
        if count > len(times):
            break
        block = arrangements(times[first:count], others[first:count])
        sums = np.add.outer(sums, block).ravel()
        sums = np.round(sums, 12)  # so that equal sums are equal in spite of rounding
        if count in looks(declared):
            part = (count / declared) ** SPENDING
            ahead = int(np.sum(sums <= sums[0]))
            allowed = int(part * level * len(sums) + 1e-9)
            p = min(1.0, ahead / len(sums) / part)
            if ahead <= allowed:
                return p, count
            # As many ways as are allowed would have ended here; of ties all or none.
            bound = np.partition(sums, allowed)[allowed]
            sums[sums < bound] = -math.inf
    return p, None


def fastest_parts(runs):
    """Milliseconds on the wall that runs of one script would take if nothing else were at work: the
    fastest run's of each of PARTS parts of equally many steps, summed; at least 1."""
    ends = np.linspace(0, 1, PARTS + 1)
    times = []
    for run in runs:
        points = run.curves["train"]
        shares = [0, *(point.step / run.steps for point in points), 1]
        clock = [0, *(point.time_ms for point in points), run.train_time_ms]
        times.append(np.interp(ends, shares, clock))
    fastest = np.diff(times).min(axis=0)
    return max(1.0, float(fastest.sum()))


def has_processor_time(run):
    """Whether the processor time in a log tells what the run took: of one process on a CPU, whose
    name in the log ends in the number of its cores."""
    on_cpu = re.search(r" x\d+$", run.device)
    return bool(run.cpu_time_ms and run.world_size == 1 and on_cpu)


def clocks(pairs):
    """{clock: (its share of a claim's level, logarithms of times of both sides)} of pairs
    [(run, run of the other script), ...]."""
    wall = np.log([(a.train_time_ms, b.train_time_ms) for a, b in pairs]).T
    if not all(has_processor_time(run) for pair in pairs for run in pair):
        return {"wall": (1.0, wall)}
    processor = np.log([(a.cpu_time_ms, b.cpu_time_ms) for a, b in pairs]).T
    return {"processor": (PROCESSOR_SHARE, processor), "wall": (1 - PROCESSOR_SHARE, wall)}


def speed(pairs, declared, level):
    """Of [(run, run of the other script), ...] in the order of their counters, whether the former
    are faster: p is at most `level` where they are shown to be, and shown_by names the clock.
    Differences are (mean, low, high) of the ratio of times less 1, by clock.

    Where processor time counts, both clocks are tested and divide the level, so that no more than
    the whole is spent. As it does not see that a run waits or uses fewer cores, it only counts
    where the fastest parts agree with it.
    """
    fastest = fastest_parts([a for a, _ in pairs]) / fastest_parts([b for _, b in pairs]) - 1
    p = {}
    differences = {}
    for clock, (share, logs) in clocks(pairs).items():
        found, _ = permutation_test(*logs, declared, share * level)
        p[clock] = min(1.0, found / share)
        ratios = interval(list(logs[0] - logs[1]))
        differences[clock] = tuple(math.expm1(ratio) for ratio in ratios)
    best = "wall"
    if "processor" in p and fastest < 0 and p["processor"] <= p["wall"]:
        best = "processor"
    return {
        "p": p[best],
        "shown_by": best if p[best] <= level else None,
        "fastest_parts": fastest,
        "differences": differences,
    }


def pairs_needed(pairs, level):
    """About how many pairs in all would show with probability POWER that the former scripts' runs
    are faster, if they are by as much as these pairs say; None where no number would."""
    numbers = []
    for share, (times, others) in clocks(pairs).values():
        if np.mean(times - others) < 0:
            numbers.append(runs_needed(list(times - others), share * level))
    numbers = [number for number in numbers if number]
    if not numbers:
        return None
    return max(LEAST_PAIRS, min(numbers))
