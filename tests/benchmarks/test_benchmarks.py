"""The benchmarks' logic on tiny shapes: they measure what they say, and leave their results."""

import json
import os
import re
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from benchmarks import common, cuda_codegen, gpu_checks, ngram_exchange, projection, qr
from helpers import ROOT

pytestmark = pytest.mark.slow


# ----- the table


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


# ----- GPU checks


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return str(common.sources(tmp_path_factory.mktemp("text")))


def rows_of(call, folder, *words):
    """The rows of a tiny call in this process, and its exit status."""
    words = [call, "--device", "cpu", "--tiny", "--results", str(folder), *words]
    status = gpu_checks.main(words)
    rows = json.loads((folder / f"tiny_{call}.json").read_text())["rows"]
    return {row["item"]: row for row in rows}, status


def test_the_whole_trainer_passes_with_every_part(text, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_checks, "PLACE", tmp_path)
    rows, status = rows_of("whole", tmp_path, "--data", text)
    assert status == 0, rows
    stages = [f"stage {number}: ms of its last two steps" for number in (1, 2, 3, 4)]
    gates = [f"gate {name}" for name in ("causal", "normalised", "local", "unmoved")]
    parts = ["killed behind step", "validation on the way", "saved"]
    parts += ["resumed losses less those before", "end of the resumed run", "losses"]
    for part in (*parts, *stages, "final validation", *gates):
        assert rows[part]["ok"] is True, part
    # A warm-up of each stage's first step and validation, and of the last ones; and of what was
    # ahead of the resumed run.
    told = [rows[f"seconds of warm-up{words}"]["value"] for words in ("", ", resumed")]
    assert list(map(len, told)) == [10, 6]
    transcript = (tmp_path / "tiny_whole.txt").read_text().splitlines()
    assert all(re.match(r" *\d+\.\d ", line) for line in transcript)


def faulty_runs(tmp_path, monkeypatch, resumed_loss=2.0, status=-9, val_loss=1.5, gate="ok"):
    """Put a trainer that prints canned lines in the place of the real one."""

    def line(step, loss):
        return f"step:{step}/16 train_loss:{loss} lr_mul:1.000 train_time:{10 * step}ms step_avg:1"

    def printed(words, transcript, until=None):
        folder = tmp_path / "logs" / f"gpu_checks_{os.getpid()}"
        if until is None:
            validity = f"validity: causal:{gate} normalised:ok local:ok unmoved:ok"
            final = f"final val_loss:{val_loss} peak_memory:1MiB"
            (folder / "log.txt").write_text(f"{validity}\n{final}\nstatus:ok\n")
            return 0, [*(line(step, resumed_loss) for step in range(9, 17)), "status:ok"]
        folder.mkdir(parents=True)
        (folder / "step_000008.pt").touch()
        return status, [*(line(step, 2.0) for step in range(1, 11)), "step:8/16 val_loss:3.0 "]

    monkeypatch.setattr(gpu_checks, "PLACE", tmp_path)
    monkeypatch.setattr(gpu_checks, "printed", printed)


@pytest.mark.parametrize(
    "fault, part",
    [
        ({}, None),
        ({"resumed_loss": 2.00001}, "resumed losses less those before"),
        ({"status": 0}, "killed behind step"),
        ({"val_loss": 2.5}, "final validation"),
        ({"gate": "FAILED"}, "gate causal"),
    ],
)
def test_what_fails_in_the_trainer_is_named(fault, part, text, tmp_path, monkeypatch):
    faulty_runs(tmp_path, monkeypatch, **fault)
    rows, status = rows_of("whole", tmp_path, "--data", text)
    failed = [name for name, row in rows.items() if row["ok"] is False]
    assert failed == [part] * (part is not None) and status == len(failed)


def test_a_profile_has_all_times_of_two_checkouts(text, tmp_path):
    beside = ["--beside", str(ROOT / "train_gpt.py")]
    rows, status = rows_of("profile", tmp_path, "--data", text, *beside)
    assert status == 0, rows
    found = {name: row["value"] for name, row in rows.items()}
    for name in ("", "beside: "):
        assert found[f"{name}ms a step"] > found[f"{name}of these for the loader"] > 0
        both, muon = (f"{name}ms of the optimizer, {kind}" for kind in ("Muon and Adam", "Muon"))
        assert found[both] > found[muon] > 0
        assert found[f"{name}ms of the host for a pass, of 2 in a step"] > 0
        assert found[f"{name}ms a step by kinds of kernels"]["products"] > 0
    losses = "loss, first and last"
    assert found[losses] == found[f"beside: {losses}"] and rows[losses]["ok"] is True


def test_a_call_that_fails_keeps_what_it_has_found(text, tmp_path, monkeypatch):
    def fail(arguments, report):
        report.note("first", 1, ok=True)
        raise TimeoutError("too slow")

    monkeypatch.setitem(gpu_checks.CALLS, "whole", fail)
    with pytest.raises(TimeoutError):
        rows_of("whole", tmp_path, "--data", text)
    rows = json.loads((tmp_path / "tiny_whole.json").read_text())["rows"]
    assert [row["ok"] for row in rows] == [True, False, None] and "too slow" in rows[1]["value"]


# ----- generated code


def test_launches_are_counted_without_what_is_asserted_of_their_results():
    body = """def call(self, args):
        extern_kernels.mm(arg0_1, arg1_1, out=buf0)
        buf1 = torch.ops.torch_attn._varlen_attn.default(buf0, buf0, buf0)
        assert_size_stride(buf2, (6, 128), (128, 1), 'torch.ops.torch_attn._varlen_attn.default')
        assert_alignment(buf2, 16, 'torch.ops.torch_attn._varlen_attn.default')
        triton_a.run(buf0, 1024, stream=stream0)
    """
    read = cuda_codegen.read_graph(body)
    assert (read["triton"], read["other"]) == (0, 2)  # that of Triton is not defined in this text


# ----- bases and projections


def test_all_methods_come_as_near_to_the_eigenvectors():
    factors, bases = qr.factors_and_bases(3, 24, torch.device("cpu"))
    spectrum = torch.linalg.eigvalsh(factors.double())
    assert (spectrum[:, -1] / spectrum[:, 0] > 1e4).all()  # ill-conditioned, as real ones are
    before = qr.off_diagonal_share(factors, bases)
    found = {name: qr.new_bases(name, factors, bases) for name in qr.METHODS}
    assert (qr.off_diagonal_share(factors, found["eigh"]) < 1e-5).all() and (before > 0.01).all()
    expected = qr.off_diagonal_share(factors, found["loop"])
    assert torch.allclose(qr.off_diagonal_share(factors, found["batched"]), expected, rtol=0.01)


def test_the_share_is_of_the_norm_off_the_diagonal():
    factor = torch.tensor([[[3.0, 4.0], [4.0, 3.0]], [[2.0, 0.0], [0.0, 1.0]]])
    share = qr.off_diagonal_share(factor, torch.eye(2).expand(2, 2, 2))
    assert share.tolist() == pytest.approx([(32 / 50) ** 0.5, 0.0])


def test_wrong_coefficients_leave_what_is_frozen():
    case = projection.measure((2, 6, 4, 16), 1, torch.device("cpu"))
    errors = {name: case[name]["error"] for name in projection.FORMS}
    assert max(errors.values()) < 1e-5 < 1e-2 < case["wrong"]["error"]


@pytest.mark.parametrize(
    "script, line",
    [
        (qr, r"qr_speedup:\d+\.\d\d max_error:\d\.\de-0\d"),
        (projection, r"projection_speedup:\d+\.\d\d max_error:\S+ wrong_form_error:\S+"),
    ],
)
def test_the_last_line_and_the_results(script, line, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(projection, "SIZES", ((3, 6, 4, 16),))
    sizes = ["--sizes", "16,24"] if script is qr else []
    script.main(["--repeats", "1", "--device", "cpu", "--results", str(tmp_path), *sizes])
    out = capsys.readouterr().out
    assert re.fullmatch(line, out.splitlines()[-1])
    name = script.__name__.rpartition(".")[2]
    assert (tmp_path / f"{name}.md").read_text().startswith(out.splitlines()[0])
    assert json.loads((tmp_path / f"{name}.json").read_text())["cases"]
