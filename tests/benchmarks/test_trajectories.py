"""benchmarks/trajectories.py: one trainer on both sides does not differ, a changed number does."""

import json
import re

import pytest

from benchmarks import trajectories
from helpers import TRAINER
from train_gpt import TRACKS

pytestmark = pytest.mark.slow

NESTEROV = """direction = grad.lerp(state["momentum"], hyper.momentum)
    orthogonal_step"""  # of Muon alone
LOSSES = [5.0, 4.0, 3.9]  # of two steps and a validation


@pytest.fixture
def compare_with(tmp_path, monkeypatch, capsys):
    """compare_with(source, *words): main() against that source, in few steps, Adam's every second.

    Returns (status, lines of stdout)."""
    monkeypatch.setattr(trajectories, "ADAM_EVERY", (2,))
    monkeypatch.setitem(trajectories.CASE, "steps", 10)

    def run(source, *words):
        def git(*words):
            return "0123456789abcdef\n" if words[0] == "rev-parse" else source

        monkeypatch.setattr(trajectories, "git", git)
        status = trajectories.main([*words, "--results", str(tmp_path)])
        return status, capsys.readouterr().out.splitlines()

    return run


def made_up(monkeypatch, after):
    """Let compare() find LOSSES on the one side, and after(dtype, case) on the other."""

    def compare(sources, corpus, dtype, cases):
        facts = {"dtype": dtype, "before": LOSSES}
        return [{**facts, "case": case, "after": after(dtype, case)} for case in cases]

    monkeypatch.setattr(trajectories, "compare", compare)


def test_the_same_rule_does_not_differ_and_a_changed_one_does(compare_with, tmp_path):
    source = TRAINER.read_text()
    assert source.count(NESTEROV) == 1
    changed = source.replace(
        NESTEROV, NESTEROV.replace("hyper.momentum)", "hyper.momentum + 1e-4)")
    )
    words = ("--rules", "muon", "adam", "--world-sizes", "2", "--dtypes", "float64")
    status, lines = compare_with(changed, *words)
    assert status == 1 and lines[-1] == "cases:2 too_far:1"
    text = (tmp_path / "trajectories.md").read_text()
    assert lines[2].endswith(" | 0.0e+00 |") and lines[2] in text
    assert "commit 0123456789ab." in text and "on purpose" not in text
    muon, adam = json.loads((tmp_path / "trajectories.json").read_text())["cases"]
    assert muon["case"][1] == "muon" and muon["before"][0] == muon["after"][0]
    assert 1e-6 < trajectories.difference(muon["before"], muon["after"]) < 1
    assert len(adam["before"]) == trajectories.CASE["steps"] + 1
    assert adam["before"][0] > 5 > adam["before"][-1]  # log(257) is 5.55; the model learns


def test_float64_decides_and_float32_may_differ_as_the_version_before_does(
    compare_with, monkeypatch
):
    off = {"float32": 1e-4, "float64": 0.0}
    made_up(monkeypatch, lambda dtype, case: [loss + off[dtype] for loss in LOSSES])
    words = ("--rules", "muon", "--world-sizes", "1,2")
    source = TRAINER.read_text()
    status, lines = compare_with(source, *words)  # which is the same at both world sizes
    assert status == 1 and lines[-1] == "cases:4 too_far:2"
    monkeypatch.setattr(trajectories, "of_rounding", lambda found, row: 2e-5)
    status, lines = compare_with(source, *words)
    assert status == 0 and lines[-1] == "cases:4 too_far:0"
    off["float64"] = 2e-6
    assert compare_with(source, *words)[0] == 1


def test_differences_of_the_version_before_are_those_between_its_world_sizes():
    def row(dtype, world_size, rule, *losses):
        return {"dtype": dtype, "case": [world_size, rule, 1], "before": losses, "after": losses}

    found = [
        row("float32", 1, "muon", 5.0, 4.0),
        row("float32", 2, "muon", 5.0, 4.5),
        row("float32", 4, "muon", 5.25, 4.0),
        row("float32", 1, "adam", 9.0, 9.0),
        row("float64", 1, "muon", 1.0, 1.0),
    ]
    assert [trajectories.of_rounding(found, one) for one in found] == [0.5, 0.5, 0.5, 0.0, 0.0]


def test_rules_that_are_expected_to_differ_do_not_count(compare_with, monkeypatch):
    def after(dtype, case):
        return [loss + 0.25 * (case[1] == "soap") for loss in LOSSES]

    made_up(monkeypatch, after)
    words = ("--rules", "muon", "soap", "--world-sizes", "1,2")
    source = TRAINER.read_text()
    assert compare_with(source, *words)[0] == 1
    status, lines = compare_with(source, *words, "--expected-to-differ", "soap")
    assert status == 0 and lines[-1] == "cases:8 too_far:0"
    assert "| 2 | 2 | 0.0e+00 | 2.5e-01 |" in lines
    assert any("not counted: soap 2.5e-01." in line for line in lines)


def test_there_are_60_cases(monkeypatch, tmp_path):
    monkeypatch.setattr(trajectories, "git", lambda *words: "0123456789abcdef")
    monkeypatch.setattr(trajectories, "brought_up", lambda source: source)
    made_up(monkeypatch, lambda dtype, case: LOSSES)
    assert trajectories.main(["--results", str(tmp_path)]) == 0
    cases = json.loads((tmp_path / "trajectories.json").read_text())["cases"]
    assert len({(row["dtype"], *row["case"]) for row in cases}) == len(cases) == 60


def test_a_run_that_fails_ends_the_comparison(corpus):
    words = [TRAINER.read_text()], str(corpus), "float32", [(1, "no such rule", 1)]
    with pytest.raises(SystemExit, match="no such rule.* failed: status:error matrix_update"):
        trajectories.compare(*words)


# ----- versions without stages


def test_a_version_without_stages_gets_its_own_words():
    values = trajectories.former_values({**trajectories.CASE, "dtype": "float32"})
    assert values["micro_batches"] == ((0.0, 4), (0.5, 4), (0.8, 8))
    assert values["lr_stages"] == ((0.0, 1.0), (0.5, 1.3), (0.8, 1.3))
    windows = ((0.0, (32, 64)), (0.5, (64, 128)), (0.8, (64, 128)), (1.0, (64, 256)))
    assert values["windows"] == windows and values["momentum"] == (0.85, 0.95, 0.1, 0.2)
    assert values["dtype"] == "float32" and values["ngram_decay"] == 0
    assert not {"stages", "val_windows", "lr_mul", "momentum_peak"} & values.keys()


def test_every_number_of_a_stage_changes_on_the_way():
    first, *_, last = trajectories.CASE["stages"]
    # Versions before had one number of softmax rows for all stages; none is sampled here.
    assert set(first) == set(vars(TRACKS["nano"].stages[0])) - {"softmax_rows"}
    assert all(first[name] != last[name] for name in first)


def test_what_was_changed_on_purpose_is_there_once_or_the_comparison_ends():
    source = "\n".join(text for _, text, _ in trajectories.CHANGED_ON_PURPOSE)
    replaced = "\n".join(text for _, _, text in trajectories.CHANGED_ON_PURPOSE)
    assert trajectories.brought_up(source) == replaced
    with pytest.raises(SystemExit, match="has not this text once"):
        trajectories.brought_up(source + source)
    assert trajectories.brought_up(TRAINER.read_text()) == TRAINER.read_text()


def test_float64_is_put_everywhere_but_in_the_names_of_torchs_functions():
    doubled = trajectories.in_double(TRAINER.read_text())
    assert re.findall(r"\w*float32\w*", doubled) == ["set_float32_matmul_precision"]
    assert ".float()" not in doubled and "set_default_dtype(torch.float64)" in doubled
    with pytest.raises(SystemExit, match="has not this line once"):
        trajectories.in_double("import torch\n")
