"""The benchmarks' logic on tiny shapes: they measure what they say, and leave their results."""

import contextlib
import json
import re
import types

import pytest
import torch

import train_gpt
from benchmarks import common, cuda_codegen, gpu_checks, ngram_exchange, projection, qr
from helpers import ROOT, python

pytestmark = pytest.mark.slow


def test_exchange_leaves_its_results(tmp_path):
    words = ["--tiny", "--world-sizes", "3", "--repeats", "2", "--device", "cpu"]
    done = python("benchmarks/ngram_exchange.py", *words, "--results", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    last = dict(word.split(":") for word in done.stdout.splitlines()[-1].split())
    assert 1 <= float(last["routed_over_bound"]) < 1.1
    cases = json.loads((tmp_path / "ngram_exchange.json").read_text())["cases"]
    assert {case["orders"] for case in cases} == set(ngram_exchange.ORDERS)
    for case in cases:
        # All ranks send and receive two thirds of the whole table's gradient, twice.
        dense = 2 * 2 * 4 * case["rows"] * ngram_exchange.DIM / 3
        assert case["dense"] == pytest.approx(dense) and case["bound"] < case["dense"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return str(common.sources(tmp_path_factory.mktemp("text")))


def findings_of(call, folder, *words):
    """[(finding, verdict, value as text)] of a tiny call in this process, and its exit status."""
    status = gpu_checks.main([call, "--device", "cpu", "--tiny", "--results", str(folder), *words])
    text = (folder / f"tiny_{call}.txt").read_text()
    found = re.findall(r"^ *[\d.]+ (ok|FAIL|-) +(.*?): (.*)$", text, re.MULTILINE)
    return [(item, verdict, value) for verdict, item, value in found], status


def test_the_whole_trainer_passes_with_every_part(text, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_checks, "PLACE", tmp_path)
    monkeypatch.setitem(gpu_checks.TINY, "compile", False)
    found, status = findings_of("whole", tmp_path, "--data", text)
    assert status == 0, found
    assert len(found) == 13 and {verdict for _, verdict, _ in found} == {"ok"}


def test_gradients_that_are_compiled_wrong_fail(text):
    values = {"data": text, "val_tokens": 4096, "seed": 1}
    config = train_gpt.with_values(train_gpt.TRACKS["english"], values)
    found = {}
    with contextlib.closing(common.Training(config)) as training:
        model = training.trainer.model
        training.trainer.forward = lambda *read: (1.1 * model(*read)[0], *model(*read)[1:])
        gpu_checks.compare_with_plain(training, lambda item, value, ok: found.update({item: ok}))
    assert found["gradient of head, compiled less eager"] is False


LINE = "step:{}/16 train_loss:{} lr_mul:1.000 train_time:{}0ms step_avg:1\n"


@pytest.mark.parametrize(
    "part, old, new",
    [
        (None, "", ""),
        ("resumed losses less those before", "2.00", "2.00001"),
        ("saved and resumed", "step:8/16\n", "step:4/16\n"),
        ("end", "status:ok", "status:nan"),
        ("final validation", "final val_loss:1.5", "final val_loss:3.5"),
        ("final that of the mean", "mean_val_loss:1.7", "mean_val_loss:3.5"),
        ("gate causal", "causal:ok", "causal:FAILED"),
        ("losses", LINE.format(16, "2.00", 16), ""),
        ("ended early", "mean_val_loss", "none"),
        ("without the pointer", "status:ok of the last run", "status:nan"),
    ],
)
def test_what_fails_in_the_trainer_is_named(part, old, new, text, tmp_path, monkeypatch):
    def printed(words, report, until=None):
        if until:
            lines = [LINE.format(step, "2.0", step) for step in range(1, 11)]
            lines.append("step:8/16 val_loss:3.0\n")
        elif "--resume" not in words:
            assert words[words.index("--pointer-window") + 1] == "0"
            lines = ["status:ok of the last run"]
        else:
            lines = [f"resumed:{words[1]} step:8/16\n"]
            lines += [LINE.format(step, "2.00", step) for step in range(9, 17)]
            lines.append("validity: causal:ok normalised:ok local:ok unmoved:ok\n")
            lines.append("val_bytes:9 mean_val_loss:1.7\nfinal val_loss:1.5\nstatus:ok\n")
        return "".join(lines).replace(old, new)

    monkeypatch.setattr(gpu_checks, "printed", printed)
    found, status = findings_of("whole", tmp_path, "--data", text)
    failed = [item for item, verdict, _ in found if verdict == "FAIL"]
    assert (part is None or part in failed) and status == bool(failed) == bool(part)


def test_what_is_tiny_is_compiled_as_the_track_is(text):
    arguments = types.SimpleNamespace(tiny=True, data=text, device="cpu")
    config = train_gpt.with_values(train_gpt.TRACKS["fineweb"], gpu_checks.values_of(arguments))
    assert config.compile and len(config.stages) == 4
    kinds = {name for layer in config.layers for name, value in vars(layer).items() if value}
    assert kinds == set(vars(train_gpt.Layer()))


def test_a_profile_has_all_times_of_two_checkouts(text, tmp_path, monkeypatch):
    monkeypatch.setitem(gpu_checks.TINY, "compile", False)
    beside = ["--beside", str(ROOT / "train_gpt.py")]
    rows, status = findings_of("profile", tmp_path, "--data", text, *beside)
    assert status == 0, rows
    losses = [row for row in rows if row[0].startswith("loss")]
    assert losses[0] == losses[1] and losses[0][1] == "ok"
    apart = [value for item, _, value in rows if item.endswith("compiled less eager")]
    assert len(apart) > 20 and {*apart} == {"0"}
    items = [item for item, *_ in rows]
    stages = [f"stage {n}, peak memory, MiB" for n in (1, 2, 3, 4)]
    rates = [f"mean loss of steps 16 to 25, ngram_lr {rate}" for rate in ("0.15", "0.05")]
    assert set(stages + rates) < set(items)
    cut = items.index(rates[-1]) + 1
    for half in (rows[:cut], rows[cut:]):
        times = {item: float(value) for item, _, value in half if item.startswith("ms ")}
        host, loader = times["ms a step of the host"], times["ms a step of the loader"]
        assert times["ms a step"] >= host > loader > 0
        assert times["ms a step, all kernels"] > times["ms a step, products"] > 0


def test_launches_in_generated_code_are_counted_without_assertions():
    body = """def call(self, args):
        extern_kernels.mm(arg0, arg1, out=buf0)
        buf1 = torch.ops.attention.default(buf0)
        assert_alignment(buf1, 16, 'torch.ops.attention.default')"""
    read = cuda_codegen.read_graph(body)
    assert (read["triton"], read["other"]) == (0, 2)


def test_all_methods_come_as_near_to_the_eigenvectors():
    factors, bases = qr.factors_and_bases(3, 24, torch.device("cpu"))
    spectrum = torch.linalg.eigvalsh(factors.double())
    assert (spectrum[:, -1] / spectrum[:, 0] > 1e4).all()  # ill-conditioned, as real ones are
    before = qr.off_diagonal_share(factors, bases)
    found = {name: qr.new_bases(name, factors, bases) for name in qr.METHODS}
    assert (qr.off_diagonal_share(factors, found["eigh"]) < 1e-5).all() and (before > 0.01).all()
    expected = qr.off_diagonal_share(factors, found["loop"])
    assert torch.allclose(qr.off_diagonal_share(factors, found["batched"]), expected, rtol=0.01)


def test_wrong_coefficients_leave_what_is_frozen():
    case = projection.measure((2, 6, 4, 16), 1, torch.device("cpu"))
    errors = {name: case[name]["error"] for name in projection.FORMS}
    assert max(errors.values()) < 1e-5 < 1e-2 < case["wrong"]["error"]


@pytest.mark.parametrize("script, name", [(qr, "qr"), (projection, "projection")])
def test_the_last_line_and_the_results(script, name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(projection, "SIZES", ((3, 6, 4, 16),))
    sizes = ["--sizes", "16,24"] if script is qr else []
    script.main(["--repeats", "1", "--device", "cpu", "--results", str(tmp_path), *sizes])
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(rf"{name}_speedup:\d+\.\d\d max_error:\d", last)
    assert json.loads((tmp_path / f"{name}.json").read_text())["cases"]
