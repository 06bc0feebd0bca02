"""The optimizer benchmarks' logic on tiny shapes: that they measure what they say, and leave their
results behind."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

import train_gpt
from benchmarks import batched_qr, common, optimizer_rules, optimizer_step
from helpers import TINY, arguments, make_trainer

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


# ----- batched QR


def test_all_arms_find_the_same_bases():
    factor, basis = batched_qr.training_factors(3, 24, CPU)
    functions, rejects = batched_qr.arms(factor, basis)
    exact = functions.pop("eigh")()
    bases = {name: function() for name, function in functions.items()}
    assert set(bases) == {"loop", "refresh", "cholesky"} and not rejects.any()
    for found in bases.values():
        leading = (found * bases["loop"]).sum(-2).abs()[:, :8]
        torch.testing.assert_close(leading, torch.ones_like(leading), atol=1e-4, rtol=0)
        assert (found * exact).sum(-2).abs()[:, 0].min() > 0.9


def test_factors_are_ill_conditioned():
    factor, _ = batched_qr.training_factors(2, 64, CPU)
    values = torch.linalg.eigvalsh(factor.double())
    assert (values[:, -1] / values[:, 0].abs()).min() > 1e4
    torch.testing.assert_close(factor, factor.mT)


def test_the_qr_benchmark_leaves_its_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(batched_qr, "nano_shapes", lambda: [(2, 18)])
    words = ["--device", "cpu", "--scale", "64", "--repeats", "2", "--results", str(tmp_path)]
    assert batched_qr.main(words) == 0
    flag, last = capsys.readouterr().out.splitlines()[-2:]
    assert flag.startswith("scaled:1 ")
    values = dict(word.split(":") for word in last.split())
    assert list(values) == ["qr_speedup", "max_orth_error", "rejects"]
    assert (
        float(values["qr_speedup"]) > 0
        and float(values["max_orth_error"]) < 1e-5
        and values["rejects"] == "0"
    )
    data = json.loads((tmp_path / "batched_qr.json").read_text())
    assert [(result["count"], result["size"], result["scaled"]) for result in data["results"]] == [
        (1, 4, True),
        (1, 12, True),
        (2, 16, True),
        (1, 48, True),
        (2, 18, False),
    ]
    text = (tmp_path / "batched_qr.md").read_text()
    assert "1x48² (scaled down)" in text and last in text


# ----- cost of a step


def test_costs_are_shares_of_the_step():
    times = {
        "model": [8.0, 16.0],
        "table": [1.0, 2.0],
        ("muon", None): [1.0, 2.0],
        ("soap", 1): [3.0, 6.0],
    }
    results = optimizer_step.summary(times)
    assert results["muon", None] == {"ms": 1500, "share": 0.1, "over_muon": 0, "step_ratio": 1}
    assert results["soap", 1] == {"ms": 4500, "share": 0.25, "over_muon": 0.2, "step_ratio": 1.2}


def test_a_turn_is_of_the_trainers_own_gradients():
    trainer, other = make_trainer(), make_trainer(matrix_update="adam").optimizer
    other.groups = other.parameter_groups  # without the table
    for value, layout in enumerate(trainer.optimizer.layouts.values(), start=1):
        layout.grad.fill_(value)
    optimizer_step.take_turn(trainer, other, [0], 1.0)
    tokens = trainer.config.micro_batch_tokens
    for value, name in enumerate(trainer.optimizer.layouts, start=1):
        group = other.matrices if name in other.matrices.layouts else other.embeddings
        state = group.state.get(name, {})
        first = state.get("first", state.get("momentum"))
        if first is not None and first.numel():
            expected = (1 - other.layouts[name].rule.betas[0]) * value / tokens
            torch.testing.assert_close(first, torch.full_like(first, expected))


def test_the_step_benchmark_leaves_its_results(corpus, tmp_path, capsys):
    words = ["--tiny", "--device", "cpu", "--rounds", "2"]
    words += ["--data", str(corpus), "--results", str(tmp_path)]
    assert optimizer_step.main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("soap_muon_share:")
    data = json.loads((tmp_path / "optimizer_step.json").read_text())
    assert {(row["rule"], row["every"]) for row in data["results"]} == {
        ("muon", None),
        ("adam", None),
        *((rule, every) for rule in ("soap", "soap_muon", "kl_soap") for every in (1, 2, 5, 10)),
    }
    for row in data["results"]:
        assert 0 < row["share"] < 1 and row["ms"] > 0
        assert (row["step_ratio"] == 1) or row["rule"] != "muon"
    ratios = optimizer_rules.cost_ratios(tmp_path / "optimizer_step.json", 10)
    assert set(ratios) == set(optimizer_rules.CENTRES) and ratios["muon"] == 1


# ----- comparison of rules


def test_the_grid_grows_at_its_edges():
    best = optimizer_rules.best_multiple
    assert best({0.5: 2.0, 1.0: 1.0, 2.0: 3.0}) == (1.0, None)
    assert best({0.5: 1.0, 1.0: 2.0, 2.0: 3.0}) == (0.5, 0.25)
    assert best({0.5: 3.0, 1.0: 2.0, 2.0: 1.0}) == (2.0, 4.0)
    assert best({0.5: 3.0, 1.0: 2.0, 2.0: math.inf}) == (1.0, None)
    assert best({16.0: 1.0, 8.0: 2.0}) == (16.0, None)


@pytest.fixture
def ratios(tmp_path):
    rows = [
        {
            "rule": rule,
            "every": train_gpt.TRACKS["nano"].basis_every if "soap" in rule else None,
            "step_ratio": ratio,
        }
        for rule, ratio in (
            ("muon", 1.0),
            ("adam", 0.8),
            ("soap", 1.25),
            ("soap_muon", 2.0),
            ("kl_soap", 1.25),
        )
    ]
    path = tmp_path / "ratios.json"
    path.write_text(json.dumps({"results": rows}))
    return path


def test_rules_are_compared_at_equal_steps_and_time(ratios, tmp_path, monkeypatch, capsys):
    """Losses are made up: more steps are better, and so are rates near an optimum.

    It is 4 times the centre for soap, the centre for the others."""
    started = []

    def train(folder, run_id, options):
        values = dict(zip(options[::2], options[1::2], strict=True))
        rule, lr = values["--matrix-update"], float(values["--matrix-lr"])
        started.append(run_id)
        optimum = optimizer_rules.CENTRES[rule] * (4 if rule == "soap" else 1)
        if rule == "kl_soap" and lr > optimum:
            raise SystemExit(f"{run_id} failed: status:nan")
        loss = {"muon": 2, "soap_muon": 1.9}.get(rule, 2.2) + 0.001 * int(values["--seed"])
        loss += abs(math.log(lr / optimum)) + 50 / int(values["--steps"])
        return {"val_loss": loss, "train_time_ms": 1.0, "basis_rejects": 0}

    monkeypatch.setattr(common, "train", train)
    monkeypatch.setattr(common, "log_tail", lambda folder, run_id: "log\n")
    words = ["--steps", "100", "--seeds", "3", "--jobs", "2", "--ratios", str(ratios)]
    words += ["--work", str(tmp_path / "work"), "--results", str(tmp_path)]
    assert optimizer_rules.main(words) == 0
    assert len(started) == len(set(started))  # nothing runs twice
    assert capsys.readouterr().out.splitlines()[-1] == "best_at_equal_time:muon rejects:0"
    data = json.loads((tmp_path / "optimizer_rules.json").read_text())
    rows = {row["rule"]: row for row in data["rules"]}
    assert data["rules"][0]["rule"] == "muon"  # soap_muon is better at equal steps only
    assert sum(rows["soap_muon"]["equal_steps"]) < sum(rows["muon"]["equal_steps"])
    assert {rule: row["steps"] for rule, row in rows.items()} == {
        "muon": 100,
        "adam": 125,
        "soap": 80,
        "soap_muon": 50,
        "kl_soap": 80,
    }
    assert rows["soap"]["lr"] == pytest.approx(4 * optimizer_rules.CENTRES["soap"])
    assert (
        set(data["grid"]["soap"]) == {"0.5", "1.0", "2.0", "4.0", "8.0"}
        and len(data["grid"]["adam"]) == 3
    )
    assert all(len(row["equal_steps"]) == len(row["equal_time"]) == 3 for row in rows.values())
    assert (tmp_path / "optimizer_rules" / "muon_lr0.03_steps100_seed1.log").read_text() == "log\n"
    assert "| soap_muon | 0.03 | 3 |" in (tmp_path / "optimizer_rules.md").read_text()


def test_a_run_is_the_trainers_own_and_is_not_repeated(corpus, tmp_path, ratios):
    given = ("steps", "val_tokens", "val_every", "seed", "device")
    tiny = {key: value for key, value in TINY.items() if key not in given}
    parsed = SimpleNamespace(
        results=tmp_path,
        work=tmp_path / "work",
        jobs=1,
        data=corpus,
        val_tokens=1024,
        options=arguments(tiny),
    )
    runs = optimizer_rules.Runs(parsed)
    (loss,) = runs.losses([("soap_muon", 0.03, 2, 1)])
    folder = tmp_path / "work/logs/soap_muon_lr0.03_steps2_seed1"
    result = json.loads((folder / "result.json").read_text())
    assert result["config"]["matrix_update"] == "soap_muon" and result["val_loss"] == loss
    written = (folder / "log.txt").stat().st_mtime_ns
    assert optimizer_rules.Runs(parsed).losses([("soap_muon", 0.03, 2, 1)]) == [loss]
    assert (folder / "log.txt").stat().st_mtime_ns == written
    kept = (tmp_path / "optimizer_rules" / "soap_muon_lr0.03_steps2_seed1.log").read_text()
    assert "final val_loss:" in kept and "import torch" not in kept


def test_without_cost_ratios_there_is_no_comparison(tmp_path):
    with pytest.raises(SystemExit, match="optimizer_step.py first"):
        optimizer_rules.main(["--ratios", str(tmp_path / "none.json")])
