"""The tests that records are judged by: against textbook values, against scipy, and by going
through every order of the runs."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import permutation_test as reference

from records import stats


def every_order(times):
    """(times of A, times of B) for each order in which the runs of all blocks could have been
    made."""
    halves = []
    for at in range(0, len(times), 4):
        block = times[at : at + 4]
        ways = itertools.combinations(range(len(block)), len(block) // 2)
        halves.append([(block[list(way)], np.delete(block, list(way))) for way in ways])
    for choice in itertools.product(*halves):
        yield [np.concatenate([part[side] for part in choice]) for side in (0, 1)]


@pytest.mark.parametrize("pairs", [4, 5])
@pytest.mark.parametrize("noise", ["heavy tails", "drift", "ties"])
def test_the_level_holds_in_every_order(pairs, noise):
    """Times of the slots are what they are; which script ran in each was drawn. For each level, at
    most that share of the orders has a p at or below it, and each p is one of some order."""
    rng = np.random.default_rng(pairs)
    times = {
        "heavy tails": np.exp(rng.standard_t(1, 2 * pairs)),
        "drift": np.arange(1.0, 2 * pairs + 1) ** 2,
        "ties": rng.integers(1, 3, 2 * pairs).astype(float),
    }[noise]
    found = np.array([stats.p_faster(*sides) for sides in every_order(times)])
    assert len(found) == 6 ** (pairs // 2) * 2 ** (pairs % 2)
    for level in (0.005, 0.01, 0.05, 0.3):
        assert np.mean(found <= level) <= level
    if noise == "heavy tails":
        assert found.min() == pytest.approx(1 / len(found))


def test_a_block_is_the_permutation_test_of_scipy():
    """Of the logarithms of four runs; and of one pair, whose permutations are signs. Without a
    difference, or with too many pairs, nothing is shown."""
    for times, others in (([1.0, 2.5], [2.0, 4.0]), ([3.0, 1.5], [2.0, 1.0])):
        sides = (np.log(times), np.log(others))
        expected = reference(sides, lambda a, b: sum(a) - sum(b), alternative="less").pvalue
        assert stats.p_faster(times, others) == pytest.approx(expected)
    assert stats.p_faster([1.0], [2.0]) == 0.5
    assert stats.p_faster([1.0] * 8, [1.0] * 8) == 1.0
    assert stats.p_faster([1.0] * 8, [1.001] * 8) == pytest.approx(6.0**-4)
    assert stats.p_faster([1.0] * 17, [2.0] * 17) == 1.0


def test_t_test_and_gain_against_textbook_values():
    """Mean 4.9, standard deviation 0.158114, t = -1.414214 against 5.0 with 4 degrees of
    freedom. Nothing follows without any spread."""
    values = [5.1, 4.9, 5.0, 4.8, 4.7]
    assert stats.p_below(values, 5.0) == pytest.approx(0.1150998, abs=1e-6)
    logarithms = np.log1p(stats.gain(np.exp(values), np.ones(5)))
    assert logarithms == pytest.approx((4.9, 4.703676, 5.096324), abs=1e-5)
    assert stats.p_below([1.0], 5.0) == stats.p_below([1.0, 1.0], 5.0) == 1.0
    mean, low, high = stats.gain([50.0, 100.0], [100.0, 100.0])
    assert mean == pytest.approx(math.sqrt(0.5) - 1) and low < mean < high
    assert stats.pooled([[1.0, 3.0], [5.0, 5.0, 8.0]]) == pytest.approx(math.sqrt((2 + 6) / 3))


@pytest.mark.parametrize("declared", [2, 5])
def test_the_order_of_pairs_and_their_seeds(declared):
    """Each run once; blocks of two pairs in one of six orders, all of which come up."""
    seen = set()
    for code in range(60):
        order = stats.order_of_pairs(str(code), 1, declared)
        assert sorted(order) == sorted(itertools.product("ab", range(1, declared + 1)))
        for at in range(0, 2 * declared, 4):
            block = order[at : at + 4]
            assert {number for _, number in block} <= {at // 2 + 1, at // 2 + 2}
            seen.add("".join(side for side, _ in block))
    assert {word for word in seen if len(word) == 4} == {
        "".join(word) for word in itertools.permutations("aabb")
    }
    assert stats.seed_of("ab", 1, 2) == stats.drawn("ab:1:2") != stats.seed_of("ab", 1, 3)
    assert 0 <= stats.seed_of("ab", 1, 2) < 2**32


def test_the_least_gain_is_shown_in_four_of_five_trials():
    rng = np.random.default_rng(0)
    least = stats.least_gain(0.02, 8)
    trials = rng.normal(-least, 0.02, (2000, 8))
    assert 0.75 < np.mean([stats.p_below(list(trial), 0.0) <= 0.01 for trial in trials]) < 0.85
