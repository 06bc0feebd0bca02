"""benchmarks/qr.py and projection.py: what they compare is what their lines say."""

import dataclasses
import json
import re

import pytest
import torch

import train_gpt
from benchmarks import projection, qr
from helpers import make_corpus

pytestmark = pytest.mark.slow


def test_all_methods_come_as_near_to_the_eigenvectors():
    factors, bases = qr.factors_and_bases(3, 24, torch.device("cpu"))
    spectrum = torch.linalg.eigvalsh(factors.double())
    assert (spectrum[:, -1] / spectrum[:, 0] > 1e4).all()  # ill-conditioned, as real ones are
    before = qr.off_diagonal_share(factors, bases)
    found = {name: method(factors, bases) for name, method in qr.METHODS.items()}
    assert (qr.off_diagonal_share(factors, found["eigh"]) < 1e-5).all() and (before > 0.01).all()
    expected = qr.off_diagonal_share(factors, found["loop"])
    for name in ("cholesky", "householder"):
        assert torch.allclose(qr.off_diagonal_share(factors, found[name]), expected, rtol=0.01)


def test_the_share_is_of_the_norm_off_the_diagonal():
    factor = torch.tensor([[[3.0, 4.0], [4.0, 3.0]], [[2.0, 0.0], [0.0, 1.0]]])
    share = qr.off_diagonal_share(factor, torch.eye(2).expand(2, 2, 2))
    assert share.tolist() == pytest.approx([(32 / 50) ** 0.5, 0.0])


@pytest.mark.parametrize("rule", ["soap_muon", "kl_soap"])
def test_without_a_threshold_it_is_the_trainers_refresh(rule, tmp_path):
    config = dataclasses.replace(
        train_gpt.TRACKS["mini"],
        data=str(make_corpus(tmp_path)),
        steps=27,
        val_tokens=2048,
        val_batch_tokens=1024,
        val_sha256="",
        matrix_update=rule,
        device="cpu",
        seed=1,
    )
    run = qr.adaptive_run(config, "in turns")
    own = qr.common.Training(config)
    for step in range(config.steps):
        own.step(step)
    assert run["loss"] == own.loss() and run["skipped"] == 0
    own.close()


def test_a_factor_that_is_diagonal_enough_keeps_its_basis():
    factor, basis = qr.factors_and_bases(2, 8, torch.device("cpu"))
    factor[0] = basis[0] @ torch.diag(torch.arange(8.0, 0, -1)) @ basis[0].mT
    state = {"row_factor": factor, "row_basis": basis.clone(), "moment": torch.rand(2, 8, 4)}
    state["rejects"] = torch.zeros(2, dtype=torch.int32)
    before = {key: value.clone() for key, value in state.items()}
    adaptive = qr.Adaptive(None, threshold=0.01, every=1)
    (side,) = train_gpt.eigen_sides(state)
    adaptive.refresh(state, side, torch.arange(2), step=100)
    assert adaptive.skipped == 1 and len(adaptive.shares) == 2
    for key in ("row_basis", "moment"):
        assert torch.equal(state[key][0], before[key][0])
    expected = train_gpt.eigenbasis_step(factor[1:], before["row_basis"][1:], "householder")[0]
    leading = slice(0, 4)  # the other columns are limited by rounding
    assert torch.allclose(state["row_basis"][1:, :, leading], expected[..., leading], atol=1e-4)


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
def test_the_last_line_and_the_results(script, line, tmp_path, capsys):
    sizes = ["--sizes", "16,24"] if script is qr else []
    script.main(["--tiny", "--repeats", "1", "--device", "cpu", "--results", str(tmp_path), *sizes])
    out = capsys.readouterr().out
    assert re.fullmatch(line, out.splitlines()[-1])
    name = script.__name__.rpartition(".")[2]
    assert (tmp_path / f"{name}.md").read_text().startswith(out.splitlines()[0])
    assert json.loads((tmp_path / f"{name}.json").read_text())["cases"]
