"""The exchange benchmark's logic, and that a complete run is not repeated."""

import json
import subprocess
import sys

import numpy as np
import pytest

import train_gpt
from benchmarks import common, ngram_exchange
from helpers import ROOT, tiny_config

pytestmark = pytest.mark.slow


def test_the_bound_counts_foreign_rows_once_each_way():
    config = tiny_config(ngram_rows=10)
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
        assert all(len(case["arms"][arm]["seconds"]) == 2 for arm in ngram_exchange.ARMS)
        assert case["arms"]["routed"]["difference"] < 1e-5
        # All ranks send and receive two thirds of the whole table's gradient, twice.
        dense = 2 * 2 * 4 * case["rows"] * ngram_exchange.DIM // 3
        assert ngram_exchange.sent_by(case, "dense") == pytest.approx(dense, abs=1)
    assert (tmp_path / "ngram_exchange.png").stat().st_size > 10_000


def test_a_complete_run_is_not_repeated_and_a_failed_one_speaks(tmp_path):
    run = tmp_path / "logs/done"
    run.mkdir(parents=True)
    (run / "result.json").write_text('{"val_loss": 1.5}')
    assert common.train(tmp_path, "done", ["--no-such-key", "1"]) == {"val_loss": 1.5}
    with pytest.raises(SystemExit, match="no such key"):
        common.train(tmp_path, "other", ["--no-such-key", "1"])


def test_log_tail_leaves_the_source_out(tmp_path):
    run = tmp_path / "logs/r"
    run.mkdir(parents=True)
    (run / "log.txt").write_text("import os\n===== END OF CODE =====\nrun:r\nstatus:ok\n")
    assert common.log_tail(tmp_path, "r") == "run:r\nstatus:ok\n"
    assert train_gpt.__doc__ not in common.log_tail(tmp_path, "r")
