"""benchmarks/continual.py: curves, matched losses, figures from logs alone."""

import dataclasses
import json

import pytest

import train_gpt
from benchmarks import continual

pytestmark = pytest.mark.slow

LOSSES = {  # (on C++, price in loss on Python)
    "full": (2.0, 0.2),
    "same matrices": (2.1, 0.1),
    "OSFT 0.5": (2.2, 0.05),
    "OSFT 0.25": (2.3, 0.02),
}


def log_of(arm, rate, seed, b, a, steps=120, start=None, status="ok"):
    trained, ratio = continual.ARMS[arm]
    config = dataclasses.replace(
        train_gpt.TRACKS["continual"],
        trained=trained,
        unfreeze_rank_ratio=ratio,
        seed=seed,
        matrix_lr=rate,
        steps=steps,
        run_id=continual.name_of(arm, rate, seed),
    )
    lines = ["run:x", "config:" + json.dumps(dataclasses.asdict(config)), "===== START ====="]
    times = "train_time:5ms step_avg:1.00ms"
    if start:
        losses = f"val_loss:{start[0]:.5f} first_val_loss:{start[1]:.5f}"
        lines.append(f"step:0/{steps} {losses} {times}")
    lines.append(f"step:{steps // 2}/{steps} train_loss:9.00000 lr_mul:1.000 {times}")
    lines.append(f"step:{steps}/{steps} val_loss:{b:.5f} first_val_loss:{a:.5f} {times}")
    lines.append(f"status:{status} run:x")
    return "\n".join(lines) + "\n"


def test_a_log_says_all():
    found = continual.read_log(log_of("OSFT 0.25", 0.03, 2, 1.5, 0.9, start=(3.0, 0.8)))
    assert found == {
        "arm": "OSFT 0.25",
        "rate": 0.03,
        "seed": 2,
        "steps": 120,
        "B": 1.5,
        "A": 0.9,
        "start": (3.0, 0.8),
    }
    assert continual.read_log(log_of("full", 0.03, 2, 1.5, 0.9))["start"] is None


def test_a_log_of_a_run_that_failed_is_refused():
    with pytest.raises(SystemExit, match="complete"):
        continual.read_log(log_of("full", 0.03, 2, 1.5, 0.9, status="nan"))


@pytest.mark.parametrize(
    "level, loss", [(2.0, 1.0), (1.75, 1.1), (1.5, 1.2), (1.3, 1.6), (2.1, None), (1.0, None)]
)
def test_curves_are_read_between_neighbouring_rates(level, loss):
    curve = [(2.0, 1.0), (1.5, 1.2), (1.2, 1.8), (1.6, 3.0)]  # too high a rate ends worse in both
    found = continual.at_level(curve, level)
    assert found == (None if loss is None else pytest.approx(loss))


def test_a_level_stretch_of_a_curve_is_read_at_its_first_rate():
    assert continual.at_level([(2.0, 1.0), (2.0, 3.0)], 2.0) == 1.0


def test_levels_are_where_all_curves_are():
    curves = {
        "a": {1: [(3.0, 1), (1.0, 2)], 2: [(2.8, 1), (1.2, 2)]},
        "b": {1: [(2.5, 1), (0.5, 2)]},
    }
    assert continual.levels_of(curves) == pytest.approx([2.5, 1.85, 1.2])
    apart = {"a": {1: [(3.0, 1), (2.0, 2)]}, "b": {1: [(1.9, 1), (1.0, 2)]}}
    assert continual.levels_of(apart) == []


def write_logs(folder, gap=0.0, steps=120):
    """Straight curves: each unit of loss gained on C++ costs a share of the arm's own on Python."""
    for number, (arm, (_, price)) in enumerate(LOSSES.items()):
        for seed in (1, 2):
            for index, rate in enumerate(continual.RATES[arm]):
                b = 2.0 - 0.5 * index + gap * number
                is_first = arm == continual.REFERENCE and index == 0
                start = (3.0, 0.7) if is_first else None
                a = 1.0 + 0.1 * seed + price * (2.0 - b)
                text = log_of(arm, rate, seed, b, a, steps, start)
                (folder / f"{continual.name_of(arm, rate, seed)}.log").write_text(text)


def test_figures_come_from_the_logs_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(continual.common, "train", lambda *_: pytest.fail("all runs are there"))
    logs = tmp_path / "work" / "kept"
    logs.mkdir(parents=True)
    write_logs(logs)
    words = ["--seeds", "2", "--work", str(tmp_path / "work"), "--results", str(tmp_path)]
    continual.main(words)
    out = capsys.readouterr().out
    assert (tmp_path / "continual.md").read_text().startswith(out.strip())
    assert (tmp_path / "continual.png").stat().st_size > 10_000
    assert "| before | - | 2 | 3.0000 ± 0.0000 | 0.7000 ± 0.0000 |" in out
    # At 1.5 on C++ an arm with price p is at 1.15 + p / 2 on average, the reference at 1.2.
    for arm, (_, price) in LOSSES.items():
        less = f"{0.5 * price - 0.05:.4f} ± 0.0000"
        if arm == continual.REFERENCE:
            less = "-"
        assert f"| 1.5000 | {arm} | 2 | {1.15 + 0.5 * price:.4f} ± 0.0707 | {less} |" in out
    runs = json.loads((tmp_path / "continual.json").read_text())["runs"]
    assert len(runs) == 2 * sum(map(len, continual.RATES.values()))
    with pytest.raises(SystemExit, match="--steps"):
        continual.main([*words, "--steps", "60"])


def test_missing_runs_are_started_as_users_would(tmp_path, monkeypatch):
    """Words that train_gpt.py and continual.py understand."""
    started = []

    def train(folder, run_id, options, script="train_gpt.py"):
        given = train_gpt.parse_command_line(list(map(str, options)))
        started.append((run_id, script, given))

    monkeypatch.setattr(continual.common, "train", train)
    unfinished = log_of("full", 0.03, 2, 1.5, 0.9, status="nan")
    monkeypatch.setattr(continual.common, "log_tail", lambda folder, run_id: unfinished)
    with pytest.raises(SystemExit, match="not that of a complete run"):
        continual.main(["--seeds", "1", "--work", str(tmp_path), "--results", str(tmp_path)])
    assert [run_id for run_id, *_ in started[:2]] == ["python_seed1", "full_lr0.001_seed1"]
    assert len(started) == 1 + sum(map(len, continual.RATES.values()))
    for _, script, given in started[1:]:
        assert script == "continual.py" and given["init_from"] == "python_seed1"
        config = train_gpt.with_values(continual.TRACK, given)
        assert config.adam_lr / config.matrix_lr == pytest.approx(0.3)


def test_arms_that_do_not_meet_are_not_compared(tmp_path):
    write_logs(tmp_path, gap=-3.0)
    text = continual.report(
        [continual.read_log(path.read_text()) for path in tmp_path.glob("*.log")]
    )
    assert "nothing can be compared" in text and "matched loss on C++, interp" not in text
