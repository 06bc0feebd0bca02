"""The tests that records are judged by, and what is drawn: seeds and the order of runs."""

import hashlib
import itertools
import math
import statistics

import numpy as np
from scipy import special  # and not scipy.stats, which takes longer to import than all records

from records.files import LIMITS, RULES

ALPHA = RULES["alpha"]  # one-sided, for every claim
CONFIDENCE = 0.95  # of the intervals that are shown


def drawn(text):
    """The number of 32 bits that everybody draws who draws for this text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def seed_of(code_sha256, batch, counter):
    """The seed of a run, or of both runs of a pair, which nobody chooses."""
    return drawn(f"{code_sha256}:{batch}:{counter}")


def order_of_pairs(code_sha256, batch, declared):
    """[(side, counter), ...] of a batch's runs. The four of a block come in one of six orders."""
    order = []
    for first in range(1, declared + 1, LIMITS.block):
        counters = range(first, min(first + LIMITS.block, declared + 1))
        orders = sorted(set(itertools.permutations("ab" * len(counters))))
        number = drawn(f"{code_sha256}:{batch}:order:{first}")
        left = {side: iter(counters) for side in "ab"}
        order += [(side, next(left[side])) for side in orders[number % len(orders)]]
    return order


def mean_and_std(values):
    """Mean and sample standard deviation (0 for one value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def p_below(values, bound):
    """One-sided p of a t-test that the mean of `values` is below `bound`; 1.0 without spread."""
    mean, std = mean_and_std(values)
    if std == 0:
        return 1.0
    t = (mean - bound) / (std / math.sqrt(len(values)))
    return float(special.stdtr(len(values) - 1, t))


def p_text(p):
    """A p as it is told, beside what a claim takes."""
    return f"p = {p:.2g}, at most {ALPHA:g} is needed"


def p_faster(times, others):
    """One-sided p that `times` tend to lie below `others`, those of pairs; 1.0 above 16 pairs.

    Without a difference the scripts could as well have changed places in a block, in any way. p is
    the share of all ways whose sum of differences of logarithms is no greater than the measured.
    """
    if len(times) > LIMITS.pairs:
        return 1.0
    logs = np.log([times, others])
    sums = np.zeros(1)
    for first in range(0, len(times), LIMITS.block):
        block = logs[:, first : first + LIMITS.block]
        ways = itertools.combinations(block.ravel(), block.shape[1])  # the measured one first
        differences = np.array([2 * sum(chosen) - block.sum() for chosen in ways])
        sums = np.add.outer(sums, differences).ravel()
    sums = np.round(sums, 12)  # so that equal sums are equal in spite of rounding
    return float(np.mean(sums <= sums[0]))


def differences(times, others):
    """Differences of the logarithms of times of pairs."""
    return list(np.log(times) - np.log(others))


def pooled(samples):
    """The standard deviation of several samples around the mean of each."""
    squares = sum(np.var(sample) * len(sample) for sample in samples)
    return math.sqrt(squares / sum(len(sample) - 1 for sample in samples))


def least_gain(spread, count):
    """The gain that so many pairs of such a spread show in four of five trials, by the t-test."""
    quantiles = special.stdtrit(count - 1, 1 - ALPHA) + special.stdtrit(count - 1, 0.8)
    return float(quantiles * spread / math.sqrt(count))


def gain(times, others):
    """(mean, low, high) of the relative difference of times of two pairs or more, with the ends of
    its two-sided confidence interval: -0.2 is a fifth less."""
    mean, std = mean_and_std(differences(times, others))
    quantile = special.stdtrit(len(times) - 1, (1 + CONFIDENCE) / 2)
    half = quantile * std / math.sqrt(len(times))
    return tuple(map(math.expm1, (mean, mean - half, mean + half)))
