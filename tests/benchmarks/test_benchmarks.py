"""The benchmarks' logic on tiny shapes: they measure what they say, and leave their results."""

import json
import subprocess
import sys
import types

import numpy as np
import pytest

import train_gpt
from benchmarks import common, gpu_checks, index_rates, ngram_exchange, widths
from helpers import ROOT

pytestmark = pytest.mark.slow

# ----- shared


def test_losses_of_a_log_are_those_behind_its_source(tmp_path):
    source = "step:1/2 train_loss:9.00000 lr_mul:1.000\n"
    tail = "step:1/2 train_loss:5.50000 lr_mul:1.000\nstep:1/2 val_loss:7.00000\n"
    tail += "step:2/2 train_loss:5.25000 lr_mul:1.000\n"
    (tmp_path / "log.txt").write_text(f"{source}===== END OF CODE =====\n{tail}")
    assert common.train_losses(tmp_path) == [5.5, 5.25]


# ----- the table


def test_the_index_leaves_its_rates_and_what_a_node_could_read(tmp_path):
    index_rates.main(["--tiny", "--repeats", "1", "--results", str(tmp_path)])
    *_, case = json.loads((tmp_path / "index_rates.json").read_text())["cases"]
    assert min(case.values()) > 0
    # Forty cores look up, and 32 read 50 million tokens a second.
    busy = {**case, "alone": 5e6, "among": 5e7, "lookup": 40 * 16384 / 4.6e6}
    line = "index read:5.0 lookup_ms:142.5 cores:72 budget:3.0"
    assert index_rates.report([busy])[1] == line


def test_the_bound_counts_foreign_rows_once_each_way():
    config = types.SimpleNamespace(ngram_rows=10, model_dim=32)
    # Ranks own rows 0 to 3, 4 to 7, 8 and 9.
    rows = [np.array([[0, 1], [9, 9]]), np.array([[4, 0], [3, 1]]), np.array([[0, 0]])]
    bound = ngram_exchange.lower_bound(rows, config, 3)
    width = 4 * config.model_dim
    assert bound == pytest.approx(2 * (1 + 3 + 1) * width / 3)  # 9; 0, 3, 1; 0


def test_exchange_leaves_its_results(tmp_path):
    words = ["--tiny", "--world-sizes", "3", "--repeats", "2", "--device", "cpu"]
    command = [sys.executable, ROOT / "benchmarks/ngram_exchange.py", *words]
    options = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([*command, "--results", tmp_path], **options)
    assert done.returncode == 0, done.stderr[-2000:]
    last = dict(word.split(":") for word in done.stdout.splitlines()[-1].split())
    assert 1 <= float(last["routed_over_bound"]) < 1.1
    cases = json.loads((tmp_path / "ngram_exchange.json").read_text())["cases"]
    assert {case["orders"] for case in cases} == set(ngram_exchange.ORDERS)
    for case in cases:
        # All ranks send and receive two thirds of the whole table's gradient, twice.
        dense = 2 * 2 * 4 * case["rows"] * ngram_exchange.DIM / 3
        assert case["dense"] == pytest.approx(dense) and case["bound"] < case["dense"]


def test_floors_by_width_leave_their_first_steps(tmp_path, monkeypatch):
    """Of gradients as large as the floor at 64 channels, which fall with the width."""
    monkeypatch.setattr(widths, "gradient_sizes", lambda config, steps: [12.8 / config.model_dim])
    widths.main(["--widths", "64,128", "--results", str(tmp_path)])
    cases = json.loads((tmp_path / "widths.json").read_text())["cases"]
    assert cases["64"] == pytest.approx([0.2] + [0.5**0.5] * 4)
    one, *_, by_width = cases["128"][1:]
    assert (one, by_width) == pytest.approx((0.1 / 0.05**0.5, 0.5**0.5))


# ----- GPU checks


def rows_of(call, folder):
    """The rows of a tiny call in this process, and its exit status."""
    words = [call, "--device", "cpu", "--tiny", "--results", str(folder)]
    status = gpu_checks.main(words)
    rows = json.loads((folder / f"tiny_{call}.json").read_text())["rows"]
    return {row["item"]: row for row in rows}, status


@pytest.fixture
def small_corpus(tmp_path, monkeypatch):
    """Few documents, of which the folder in .cache is not made."""
    monkeypatch.setattr(gpu_checks, "ROOT", tmp_path)


@pytest.mark.parametrize("call", ["attention", "profile", "trainer", "pairs", "loss"])
def test_calls_pass_and_leave_their_figures(call, tmp_path, small_corpus):
    rows, status = rows_of(call, tmp_path)
    assert status == 0 and len(rows) > 2, rows
    has_no_verdicts = call == "pairs"
    assert has_no_verdicts or any(row["ok"] for row in rows.values())


def test_wrong_attention_is_found(tmp_path, monkeypatch, small_corpus):
    right = train_gpt.BlockedAttention.attend

    def too_sharp(*words):
        return right(*words[:-1], 1.2 * words[-1])

    monkeypatch.setattr(train_gpt.BlockedAttention, "attend", too_sharp)
    rows, status = rows_of("attention", tmp_path)
    assert status == 1 and rows["window 128, segments one: relative error"]["ok"] is False


def test_a_call_that_fails_keeps_what_it_has_found(tmp_path, monkeypatch):
    def fail(arguments, report):
        report.note("first", 1, ok=True)
        raise TimeoutError("too slow")

    monkeypatch.setitem(gpu_checks.CALLS, "loss", fail)
    with pytest.raises(TimeoutError):
        rows_of("loss", tmp_path)
    rows = json.loads((tmp_path / "tiny_loss.json").read_text())["rows"]
    assert [row["ok"] for row in rows] == [True, False, None] and "too slow" in rows[1]["value"]
