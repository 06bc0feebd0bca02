"""benchmarks/qr.py and projection.py: what they compare is what their lines say."""

import json
import re

import pytest
import torch

from benchmarks import projection, qr

pytestmark = pytest.mark.slow


def test_all_methods_come_as_near_to_the_eigenvectors():
    factors, bases = qr.factors_and_bases(3, 24, torch.device("cpu"))
    spectrum = torch.linalg.eigvalsh(factors.double())
    assert (spectrum[:, -1] / spectrum[:, 0] > 1e4).all()  # ill-conditioned, as real ones are
    before = qr.off_diagonal_share(factors, bases)
    found = {name: qr.new_bases(name, factors, bases) for name in qr.METHODS}
    assert (qr.off_diagonal_share(factors, found["eigh"]) < 1e-5).all() and (before > 0.01).all()
    expected = qr.off_diagonal_share(factors, found["loop"])
    for name in ("cholesky", "householder"):
        assert torch.allclose(qr.off_diagonal_share(factors, found[name]), expected, rtol=0.01)


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
def test_the_last_line_and_the_results(script, line, tmp_path, capsys):
    sizes = ["--sizes", "16,24"] if script is qr else []
    script.main(["--tiny", "--repeats", "1", "--device", "cpu", "--results", str(tmp_path), *sizes])
    out = capsys.readouterr().out
    assert re.fullmatch(line, out.splitlines()[-1])
    name = script.__name__.rpartition(".")[2]
    assert (tmp_path / f"{name}.md").read_text().startswith(out.splitlines()[0])
    assert json.loads((tmp_path / f"{name}.json").read_text())["cases"]
