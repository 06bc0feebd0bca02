"""benchmarks/trajectories.py: one trainer on both sides does not differ, a changed number does, a
failed run speaks."""

import json
import re

import pytest

from benchmarks import trajectories
from helpers import TRAINER


@pytest.fixture
def compare_with(tmp_path, monkeypatch, capsys):
    """compare_with(source, *words): main() against that source, in two cases. Returns (status,
    lines of stdout)."""
    monkeypatch.setattr(trajectories, "ADAM_EVERY", (2,))

    def run(source, *words):
        monkeypatch.setattr(
            trajectories,
            "git",
            lambda *git: "0123456789abcdef\n" if git[0] == "rev-parse" else source,
        )
        status = trajectories.main([*words, "--results", str(tmp_path)])
        return status, capsys.readouterr().out.splitlines()

    return run


def test_the_same_trainer_does_not_differ(compare_with, tmp_path):
    status, lines = compare_with(TRAINER.read_text(), "--rules", "muon", "--world-sizes", "2")
    assert status == 0 and lines[-1] == "max_difference:0.0e+00 cases:2"
    rows = ["| 2 | replicated | 2 | 0.0e+00 |", "| 2 | sharded | 2 | 0.0e+00 |"]
    text = (tmp_path / "trajectories.md").read_text()
    assert lines[2:4] == rows and "\n".join(rows) in text and "commit 0123456789ab." in text
    for case in json.loads((tmp_path / "trajectories.json").read_text())["cases"]:
        assert case["first"] > 5 > case["last"]  # log(257) is 5.55, and the model has learned


def test_a_changed_number_is_noticed(compare_with):
    source, count = re.subn(
        r"(matrix_lr: float = knob\()[\d.]+", r"\g<1>0.0151", TRAINER.read_text()
    )
    assert count == 1
    words = ("--rules", "muon", "adam", "--world-sizes", "1")
    status, lines = compare_with(source, *words)
    last = dict(word.split(":") for word in lines[-1].split())
    assert status == 1 and 1e-6 < float(last["max_difference"]) < 1 and last["cases"] == "4"


def test_rules_that_are_expected_to_differ_do_not_count(compare_with, monkeypatch):
    monkeypatch.setattr(
        trajectories,
        "compare",
        lambda files, cases: [
            {
                "case": case,
                "difference": 0.25 if case[1] == "soap" else 0.0,
                "first": 5.0,
                "last": 4.0,
            }
            for case in cases
        ],
    )
    assert compare_with("", "--rules", "muon", "soap", "--world-sizes", "1,2")[0] == 1
    status, lines = compare_with(
        "", "--rules", "muon", "soap", "--world-sizes", "1,2", "--expected-to-differ", "soap"
    )
    assert status == 0 and lines[-1] == "max_difference:0.0e+00 cases:4"
    assert (
        "| 2 | sharded | 2 | 0.0e+00 | 2.5e-01 |" in lines
        and "not counted: soap 2.5e-01." in lines[-2]
    )


def test_there_are_60_cases(monkeypatch, tmp_path):
    monkeypatch.setattr(trajectories, "git", lambda *words: "0123456789abcdef")
    counted = []
    monkeypatch.setattr(
        trajectories,
        "compare",
        lambda files, cases: (
            counted.extend(cases) or [{"case": case, "difference": 0.0} for case in cases]
        ),
    )
    assert trajectories.main(["--results", str(tmp_path)]) == 0 and len(set(counted)) == 60


def test_a_run_that_fails_ends_the_comparison():
    with pytest.raises(SystemExit, match="no such rule.* failed: status:error matrix_update"):
        trajectories.compare([TRAINER, TRAINER], [(1, "no such rule", "sharded", 1)] * 3)
