"""The tests and intervals that records are judged by. Samples are lists of floats, one value a run."""
import math
import statistics
import warnings

import numpy as np
from scipy import stats

ALPHA = 0.01  # one-sided, for every claim
CONFIDENCE = 0.95  # of the intervals that are shown
POWER = 0.8  # of the number of runs that is proposed
MOST_RUNS = 10_000


def mean_and_std(values):
    """Mean and sample standard deviation (0 for one value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def p_below(values, bound):
    """One-sided p of a t-test that the mean of `values` is below `bound`; 1.0 for fewer than two values. Values
    without any spread leave no doubt: 0.0 below the bound, else 1.0."""
    if len(values) < 2:
        return 1.0
    if max(values) == min(values):
        return 0.0 if values[0] < bound else 1.0
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # nearly equal values: precision loss
        return float(stats.ttest_1samp(values, bound, alternative="less").pvalue)


def p_worse(values, reference):
    """One-sided p of Welch's t-test that the mean of `values` lies above that of `reference`."""
    if min(len(values), len(reference)) < 2:
        return 1.0
    if max(values) == min(values) and max(reference) == min(reference):
        return 0.0 if values[0] > reference[0] else 1.0
    return float(stats.ttest_ind(values, reference, equal_var=False, alternative="greater").pvalue)


def interval(values):
    """(mean, low, high): the two-sided confidence interval of the mean; infinite for fewer than two values."""
    mean, std = mean_and_std(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * std / math.sqrt(len(values))
    return mean, mean - half, mean + half


def runs_needed(differences):
    """Runs at which a one-sided t-test at ALPHA finds a difference of this mean and spread with probability POWER;
    None where that takes more than MOST_RUNS."""
    mean, std = mean_and_std(differences)
    if len(differences) < 2 or mean == 0:
        return None
    if std == 0:
        return 2
    counts = np.arange(2, MOST_RUNS + 1)
    critical = stats.t.ppf(1 - ALPHA, counts - 1)
    enough = stats.nct.sf(critical, counts - 1, np.sqrt(counts) * abs(mean) / std) >= POWER
    return int(counts[enough.argmax()]) if enough.any() else None
