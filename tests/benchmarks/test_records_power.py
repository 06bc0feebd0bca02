"""benchmarks/records_power.py: its noise, its order of runs, its tests against the records' own."""

import json

import numpy as np
import pytest

from benchmarks import records_power as power
from records import stats

LOGS = np.log(
    [[100, 130, 90, 200, 110, 95], [100, 101, 99, 98, 102, 100], [50, 51, 49, 50.5, 50, 52]]
)


@pytest.mark.parametrize("kind", power.KINDS)
def test_noise_has_the_measured_size_and_no_side(kind):
    sides = power.simulated(np.random.default_rng(0), kind, LOGS, 2000, 8)
    assert sides.shape == (3, 2000, 2, 8)
    for logs, measured in zip(sides, LOGS, strict=True):
        spread = logs.std()
        assert (
            0.5 < spread / measured.std(ddof=1) < 4
            if kind == "heavy tails"
            else 0.6 < spread / measured.std(ddof=1) < 1.3
        )
        difference = np.clip((logs[:, 0] - logs[:, 1]).mean(axis=1), -3 * spread, 3 * spread)
        assert abs(difference.mean()) < 4 * difference.std() / 2000**0.5


def test_a_pair_s_sides_come_from_one_block():
    """In drift without other noise, times of a block lie together, and each side has two of it."""
    kinds = {
        **power.KINDS,
        "slots": lambda rng, trials, count: np.tile(np.arange(float(count)), (trials, 1)),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(power, "KINDS", kinds)
        sides = power.simulated(np.random.default_rng(0), "slots", LOGS[:1], 500, 4)[0] / LOGS[
            0
        ].std(ddof=1)
    slots = np.sort(sides.reshape(500, 2, 2, 2).swapaxes(1, 2).reshape(500, 2, 4), axis=-1)
    assert np.allclose(slots, np.arange(8).reshape(2, 4))
    orders = {
        tuple(np.argsort(row[:2].ravel().tolist() + row[2:].ravel().tolist()))
        for row in sides[:, :, :2].round()
    }
    assert len(orders) == 6  # each of the orders that `ab` draws from


def test_the_test_is_that_of_the_records():
    sides = power.simulated(np.random.default_rng(1), "independent", LOGS, 20, 8)[0]
    expected = [stats.p_faster(*np.exp(times)) for times in sides]
    assert power.permutations(sides) == pytest.approx(expected)
    assert power.t_of_logarithms(sides)[0] == pytest.approx(
        stats.p_below(list(sides[0, 0] - sides[0, 1]), 0)
    )


def test_a_small_study(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["records_power.py", "--trials", "4", "--results", str(tmp_path)]
    )
    monkeypatch.setattr(power, "PAIRS", 8)
    power.main()
    found = json.loads((tmp_path / "records_power.json").read_text())["sets"]
    measured = json.loads(power.MEASURED.read_text())
    assert found.keys() == measured.keys() and all(
        found[name]["runs"] == len(measured[name]) for name in found
    )
    assert (tmp_path / "records_power.md").read_text().startswith(capsys.readouterr().out.rstrip())


def test_figures_are_those_of_the_measured_runs():
    """The page's noise sizes follow from the runs that are kept."""
    shown = json.loads((power.RESULTS / "records_power.json").read_text())["sets"]
    for name, runs in json.loads(power.MEASURED.read_text()).items():
        assert shown[name]["spread"] == pytest.approx(
            power.clocks_of(runs).std(axis=1, ddof=1).tolist()
        )
        assert all(sum(run["parts_ms"]) == pytest.approx(run["wall_ms"], rel=0.01) for run in runs)
