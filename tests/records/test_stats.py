"""Pairs: the level of the permutation test, by going through every order of the runs; both clocks;
ending early."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import permutation_test as reference

import records_helpers as made
from records import stats
from records.judge import judge_all
from records.submit import submit
from records_helpers import call


def every_order(times):
    """(times of A, times of B) for each order in which the runs of all blocks could have been
    made."""
    blocks = [times[at : at + 4] for at in range(0, len(times), 4)]
    halves = [
        [
            (list(chosen), [at for at in range(len(block)) if at not in chosen])
            for chosen in itertools.combinations(range(len(block)), len(block) // 2)
        ]
        for block in blocks
    ]
    for choice in itertools.product(*halves):
        yield [
            np.concatenate([block[part[side]] for block, part in zip(blocks, choice, strict=True)])
            for side in (0, 1)
        ]


@pytest.mark.parametrize(
    "declared, level", [(4, 0.05), (4, 0.1), (5, 0.1), (6, 0.05), (6, 0.0139), (7, 0.03)]
)
@pytest.mark.parametrize("noise", ["heavy tails", "drift", "ties"])
def test_the_level_holds_in_every_order(declared, level, noise, monkeypatch):
    """Times of the slots are what they are; the script in each slot was drawn. Looks at 2, 4, ...
    pairs."""
    monkeypatch.setattr(stats, "LEAST_PAIRS", 2)
    rng = np.random.default_rng(declared)
    times = {
        "heavy tails": rng.standard_t(1, 2 * declared),
        "drift": np.arange(2.0 * declared) ** 2,
        "ties": rng.integers(0, 2, 2 * declared).astype(float),
    }[noise]
    found = [stats.permutation_test(*sides, declared, level) for sides in every_order(times)]
    assert np.mean([p <= level for p, _ in found]) <= level
    assert all((p <= level) == (look is not None) for p, look in found)
    if noise == "heavy tails":
        assert any(look for _, look in found) == (
            level * len(found) >= 1
        )  # and it does find something


def test_one_look_is_the_permutation_test_of_scipy():
    """Where a block is all that there is, of four runs; and of pairs alone, whose permutations are
    signs."""
    for times, others in (([1.0, 2.5], [2.0, 4.0]), ([3.0, 1.5], [2.0, 1.0])):
        expected = reference(
            (times, others), lambda a, b: sum(a) - sum(b), alternative="less"
        ).pvalue
        assert stats.permutation_test(times, others, 2, 0.001)[0] == pytest.approx(expected)
    assert stats.permutation_test([1.0], [2.0], 1, 0.01)[0] == 0.5


def test_no_spread_and_no_difference_show_nothing():
    assert stats.permutation_test([1.0] * 8, [1.0] * 8, 8, 0.01) == (1.0, None)
    assert stats.permutation_test([1.0] * 2, [1.001] * 2, 8, 0.01) == (
        1.0,
        None,
    )  # two pairs, 1 ms: no look yet
    assert stats.permutation_test([1.0] * 8, [1.001] * 8, 8, 0.01) == (6.0**-4, 8)


def test_an_early_look_spends_a_part():
    """8 of 12 pairs: of the level the share (8 / 12)^3, which one of 1,296 orders is below 0.004
    of."""
    assert (
        stats.looks(12) == [8, 10, 12]
        and stats.looks(8) == [8]
        and stats.looks(4) == [4]
        and stats.looks(9) == [8, 9]
    )
    p, look = stats.permutation_test([1.0] * 8, [2.0] * 8, 12, 0.004)
    assert look == 8 and p == pytest.approx(6.0**-4 / (8 / 12) ** 3)
    assert stats.permutation_test([1.0] * 8, [2.0] * 8, 12, 0.002) == (pytest.approx(p), None)
    assert stats.permutation_test([1.0] * 10, [2.0] * 10, 12, 0.002)[1] == 10


def test_levels_of_all_batches_stay_below_one_percent():
    assert stats.level(1) == 0.005 and sum(map(stats.level, range(1, 60))) <= stats.ALPHA
    assert stats.level(10**19) == 0.0


def run(wall, processor, steps=4, device="CPU x2", **values):
    points = [
        SimpleNamespace(step=step, time_ms=wall * step / steps) for step in range(1, steps + 1)
    ]
    return SimpleNamespace(
        train_time_ms=wall,
        cpu_time_ms=processor,
        steps=steps,
        device=device,
        world_size=1,
        val_loss=0.5,
        curves={"train": points, "val": []},
        **values,
    )


def paired(walls, processors, count=8, **values):
    rng = np.random.default_rng(1)
    noise = 1 + 0.001 * rng.standard_normal((count, 2))
    return [
        tuple(
            run(wall * factor, processor and processor * factor, **values)
            for wall, processor, factor in zip(walls, processors, factors, strict=True)
        )
        for factors in noise
    ]


def test_processor_time_shows_a_gain_that_a_busy_machine_hides():
    pairs = paired((1000, 1000), (1900, 2000))
    for number, (a, b) in enumerate(
        pairs
    ):  # bursts on the wall; the fastest parts are those of runs without
        for side in (a, b)[number % 2 : number % 2 + 1]:
            side.train_time_ms *= 3
    pairs[0][0].curves["train"][:] = run(950, 1).curves["train"]
    pairs[0][0].train_time_ms = 950
    found = stats.speed(pairs, 8, 0.005)
    assert found["shown_by"] == "processor" and found["p"] <= 0.005 and found["fastest_parts"] < 0
    assert found["differences"]["processor"][0] == pytest.approx(-0.05, abs=0.002)


def test_less_work_in_more_time_is_no_gain():
    """Processor time does not see that a script uses one core where the other uses two."""
    found = stats.speed(paired((1800, 1000), (1800, 2000)), 8, 0.005)
    assert (
        found["shown_by"] is None
        and found["p"] == 1.0
        and found["fastest_parts"] == pytest.approx(0.8, abs=0.01)
    )


def test_a_gain_by_overlap_shows_on_the_wall():
    """Which has the lesser part of the level where processor time counts, and all of it where that
    does not."""
    found = stats.speed(paired((900, 1000), (2000, 2000)), 8, 0.005)
    assert found["shown_by"] == "wall" and found["p"] == pytest.approx(6.0**-4 / 0.2)
    for values in ({"device": "NVIDIA H100 80GB HBM3"}, {}):
        pairs = paired((900, 1000), (2000, 2000) if values else (None, None), **values)
        assert stats.speed(pairs, 8, 0.005)["p"] == 6.0**-4


def test_pairs_needed_depend_on_size_and_noise():
    assert stats.pairs_needed(paired((900, 1000), (1800, 2000)), 0.005) == stats.LEAST_PAIRS
    assert stats.pairs_needed(paired((1100, 1000), (2200, 2000)), 0.005) is None
    assert 8 < stats.pairs_needed(paired((999.5, 1000), (1999, 2000)), 0.005) < 100


# ----- ending early


def test_ab_ends_when_all_is_shown(tmp_path, capsys):
    repository = made.make_repository(tmp_path)
    (tmp_path / "train_gpt.py").write_text(made.fake_trainer())
    (tmp_path / "logs" / "other").mkdir(parents=True)
    (tmp_path / "logs" / "other" / "log.txt").write_text(
        made.log_text("other", made.fake_trainer(loss=0.85, time=150))
    )
    status, out, err = call(
        repository, capsys, "ab", tmp_path / "logs" / "other", "--runs", 12, "--yes", "--compare"
    )
    assert status == 0, out + err
    assert (
        "pairs 2/12, A in relation to B: wall time -" in out
        and "is likely to take 6 pairs more" in out
    )
    assert "pairs 1 to 8 show the gain and the target; the other 4 are spared" in out
    assert len(made.order_of(repository)) == 16
    status, out, err = call(
        repository, capsys, "ab", tmp_path / "logs" / "other", "--runs", 17, "--yes", "--compare"
    )
    assert status == 2 and "pairs are at most 16" in err


def submitted(tmp_path, kept, declared=12):
    """(record, failures) of the first `kept` of so many declared pairs."""
    repository = made.make_repository(tmp_path)
    made.add_first(repository)
    sides = made.write_logs(
        tmp_path / "logs",
        made.source_of("second"),
        made.source_of("first"),
        declared,
        5,
        time_ms=50_000,
        base_ms=60_000,
        began=made.YESTERDAY + made.timedelta(hours=2),
    )
    logs, base = ([path for path in side if int(path.parent.name[-3:-1]) in kept] for side in sides)
    record, failures = submit(made.fresh(repository), "Early", logs, base)
    return repository, record, [failure.reason for failure in failures]


def test_a_record_may_end_at_a_look(tmp_path):
    repository, record, failures = submitted(tmp_path, range(1, 9))
    assert (
        failures == []
        and record.result["speed"]["pairs"] == 8
        and record.result["declared_runs"] == 12
    )
    assert record.result["loss"]["p_needed"] == pytest.approx(0.005 / 3, rel=1e-5)
    made.edit(record.folder / "README.md", "^Write here what .*", made.WHY)
    assert [failure.reason for failure in judge_all(made.fresh(repository))] == [
        "a leaderboard is not current; run `python -m records table`"
    ]


@pytest.mark.parametrize(
    "kept, reason",
    [
        (range(1, 8), "run 8, 9, 10, 11, 12 missing"),
        (range(5, 13), "run 1, 2, 3, 4"),
        ([*range(1, 8), 9], "run 8, 10, 11, 12 missing"),
    ],
)
def test_a_record_may_not_end_elsewhere(tmp_path, kept, reason):
    assert any(reason in failure for failure in submitted(tmp_path, kept)[2])


def test_more_pairs_than_the_test_takes_are_refused(tmp_path):
    assert any("at most 16" in reason for reason in submitted(tmp_path, range(1, 41), 40)[2])
