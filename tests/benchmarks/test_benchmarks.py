"""The benchmarks' logic on tiny shapes: they measure what they say, and leave their results."""

import json
import math
import sys
import time

import numpy as np
import pytest
import torch

import train_gpt
from benchmarks import common, gpu_checks
from benchmarks import nano_vs_baseline as versus

pytestmark = pytest.mark.slow


def tiny(**changes):
    values = {**common.TINY, "device": "cpu", "dtype": "float32", "seed": 1, **changes}
    return train_gpt.with_values(train_gpt.TRACKS["nano"], values)


# ----- shared


def test_made_corpora_pass_the_trainers_checks(tmp_path):
    for name, documents, tokenizer in (
        ("text", common.python_documents(30_000), "bytes"),
        ("random", common.random_documents(30_000, 50256, np.random.default_rng(0)), "gpt2"),
    ):
        eot_token = train_gpt.EOT_TOKEN[tokenizer]
        folder = common.write_corpus(tmp_path / name, documents, eot_token, 2048)
        config = tiny(data=str(folder), tokenizer=tokenizer, steps=1)
        corpus = train_gpt.open_corpus(config)
        assert len(corpus.val) > 2048
        assert corpus.val[0] == corpus.shards[0][0] == eot_token
        assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


# ----- nano against the baseline


def test_baseline_is_causal_and_of_gpt_2s_proportions():
    config = train_gpt.TRACKS["nano"]
    model = versus.Baseline(config)
    model.initialise(0)
    assert model.matrix_parameters() == 12 * config.num_layers * config.model_dim**2
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(257, (1, versus.BLOCK + 1), generator=generator)
    ngram = torch.randn(1, versus.BLOCK, config.model_dim, generator=generator)
    changed = tokens.clone()
    changed[:, 129:] = (changed[:, 129:] + 1) % 257  # tokens after position 128, and their n-grams
    changed_ngram = ngram.clone()
    changed_ngram[:, 129:] += 1
    with torch.no_grad():
        for ngrams in ((None, None), (ngram, changed_ngram)):
            before = model(tokens[:, :-1], tokens[:, 1:], ngrams[0])
            after = model(changed[:, :-1], changed[:, 1:], ngrams[1])
            assert torch.equal(before[:, :128], after[:, :128])
            assert not torch.equal(before, after)
    assert before.mean().item() < 20
    at_start = model(tokens[:, :-1], tokens[:, 1:]).mean().item()
    assert at_start == pytest.approx(math.log(257), abs=0.1)


def test_baseline_scores_every_validation_token_once(tmp_path):
    folder = common.write_corpus(tmp_path / "corpus", common.python_documents(60_000), 256, 2048)
    config = tiny(data=str(folder), steps=1, **common.NO_TABLE)
    arm = versus.BaselineArm("baseline", config, train_gpt.Runtime("cpu"))
    windows = np.array(arm.val_text.tokens[:2049]).astype(np.int64)
    inputs = torch.from_numpy(windows[:-1]).view(-1, versus.BLOCK)
    targets = torch.from_numpy(windows[1:]).view(-1, versus.BLOCK)
    with torch.no_grad():
        expected = arm.model(inputs, targets).mean().item()
    found = arm.mean_loss(range(0, 2048, config.val_batch_tokens))
    assert found == pytest.approx(expected, abs=1e-5)
    arm.close()


def test_time_to_a_loss_is_interpolated():
    curve = ((0, 5.5), (10, 3.0), (20, 2.0), (30, 1.5))
    points = [{"seconds": seconds, "loss": loss} for seconds, loss in curve]
    assert versus.seconds_to(points, 2.5) == pytest.approx(15)
    assert versus.seconds_to(points, 1.5) == pytest.approx(30)
    assert versus.seconds_to(points, 1.4) is None


def test_ratio_is_of_times_to_the_baselines_last_loss():
    def result(arm, *points):
        return {"arm": arm, "points": [{"seconds": s, "loss": loss} for s, loss in points]}

    results = [
        result("baseline", (0, 5), (100, 2)),
        result("baseline + n-grams", (0, 5), (90, 1.5)),
        result("baseline + copies", (0, 5), (80, 2.5)),
        result("nano", (0, 5), (10, 2), (40, 1)),
        result("nano, no table", (0, 5), (50, 1.75)),
    ]
    ratios = {(pair["arm"], pair["target"]): pair["ratio"] for pair in versus.compare(results)}
    assert ratios["nano", "baseline"] == pytest.approx(10)
    assert ratios["nano", "baseline + n-grams"] == pytest.approx(90 / 25)
    assert ratios["nano, no table", "baseline + n-grams"] is None


def test_comparison_leaves_its_results(tmp_path, capsys):
    words = ["--tiny", "--seconds", "0.3", "--device", "cpu", "--results", str(tmp_path)]
    assert versus.main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("speedup_vs_baseline:")
    data = json.loads((tmp_path / "nano_vs_baseline.json").read_text())
    assert [result["arm"] for result in data["results"]] == list(versus.ARMS)
    for result in data["results"]:
        assert result["points"][-1]["step"] == result["steps"] and math.isfinite(result["val_loss"])
        assert result["points"][-1]["seconds"] == pytest.approx(result["seconds"], abs=0.1)
    assert data["results"][1]["val_loss"] != data["results"][0]["val_loss"]  # the table is in use
    text = (tmp_path / "nano_vs_baseline.md").read_text()
    assert all(f"| {arm} |" in text for arm in versus.ARMS) and data["environment"]["torch"] in text
    assert (tmp_path / "nano_vs_baseline.png").stat().st_size > 10_000


def test_comparison_without_a_corpus_ends_in_one_line(tmp_path, capsys):
    words = ["--data", str(tmp_path), "--device", "cpu", "--results", str(tmp_path)]
    assert versus.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1


# ----- GPU checks


def rows_of(name, work):
    """Run a part in this process. Returns its rows."""
    gpu_checks.PARTS[name][0](gpu_checks.Session(name, "cpu", True, work))
    return [json.loads(line) for line in (work / f"{name}.jsonl").read_text().splitlines()]


# `updates` is run by a later test, through the command line.
@pytest.mark.parametrize("name", ["attention", "eigenbases", "gates", "ten_steps", "trajectory"])
def test_parts_pass(name, tmp_path):
    rows = rows_of(name, tmp_path)
    assert any(row["ok"] for row in rows) and not any(row["ok"] is False for row in rows), rows


def test_wrong_attention_is_found(tmp_path, monkeypatch):
    right = train_gpt.BlockedAttention.attend

    def too_sharp(*words):
        return right(*words[:-1], 1.2 * words[-1])

    monkeypatch.setattr(train_gpt.BlockedAttention, "attend", too_sharp)
    rows = {row["item"]: row["ok"] for row in rows_of("attention", tmp_path)}
    assert rows["sdpa float32"] is False and rows["sdpa bfloat16"] is False


def test_parts_that_fail_or_hang_leave_a_row(tmp_path):
    failing = [sys.executable, "-c", "raise SystemExit('went wrong')"]
    (row,) = gpu_checks.run_part("failing", failing, 60, tmp_path)
    assert row["ok"] is False and "went wrong" in row["text"]
    first = {"part": "hanging", "item": "first", "ok": True, "text": ""}
    (tmp_path / "hanging.jsonl").write_text(json.dumps(first) + "\n")
    began = time.monotonic()
    hanging = [sys.executable, "-c", "import time; time.sleep(60)"]
    rows = gpu_checks.run_part("hanging", hanging, 0.5, tmp_path)
    assert [row["ok"] for row in rows] == [True, False] and "timed out" in rows[1]["text"]
    assert time.monotonic() - began < 20


PUBLISHED = """
import os, time
assert os.environ["WORLD_SIZE"] == "1" and os.path.samefile(os.getcwd(), os.path.dirname(__file__))
print("compiling")
for step in range(50 if os.environ.get("ENOUGH") else 20):
    milliseconds = 5000 * (step < 1) + 4000 + 25 * step
    print(f"step:{step}/1285 train_time:{milliseconds:.0f}ms step_avg:9ms", flush=True)
time.sleep(600 if os.environ.get("ENOUGH") else 0)
"""


def test_a_published_trainer_is_timed_until_its_log_says_enough(tmp_path, monkeypatch):
    script = tmp_path / "train_gpt.py"
    script.write_text(PUBLISHED)

    def rows(name):
        (tmp_path / name).mkdir()
        return rows_of("published", tmp_path / name)

    # The test of ten_steps is one of the other.
    monkeypatch.setattr(gpu_checks, "measure_first_phase", lambda session: (20.0, None, None))
    (row,) = rows("without")
    assert row["ok"] is None and "PUBLISHED_TRAINER=" in row["text"]
    monkeypatch.setenv("PUBLISHED_TRAINER", str(script))
    (row,) = rows("short")
    assert row["ok"] is False and "step:19/1285" in row["text"]
    assert "no 40 steps; its output ends in" in row["text"]
    monkeypatch.setenv("ENOUGH", "1")
    theirs, ours = rows("enough")
    assert theirs["step_ms"] == 25 and ours["ratio"] == pytest.approx(0.8) and ours["ok"]


def test_checks_leave_their_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--device", "cpu", "--tiny", "--results", str(tmp_path), "--only", "updates"]
    assert gpu_checks.main(words) == 0
    assert "| updates | adam | ok |" in capsys.readouterr().out
    (data_file,), (text_file,) = tmp_path.glob("tiny_*.json"), tmp_path.glob("tiny_*.md")
    assert all(row["part"] == "updates" for row in json.loads(data_file.read_text())["rows"])
    assert "| updates | master | ok |" in text_file.read_text()


def test_parts_start_by_worth_and_only_where_their_limit_fits(tmp_path, monkeypatch, capsys):
    assert sorted(gpu_checks.BY_WORTH) == sorted(gpu_checks.PARTS)
    assert list(gpu_checks.BY_WORTH[:2]) == ["attention", "ten_steps"]
    now = [0.0]
    started = []
    monkeypatch.setattr(gpu_checks.time, "monotonic", lambda: now[0])

    def run_part(name, command, seconds, work):
        started.append(name)
        assert seconds == gpu_checks.PARTS[name][1]
        now[0] += seconds  # each takes all that it may
        return [{"part": name, "item": "some", "ok": True, "text": ""}]

    monkeypatch.setattr(gpu_checks, "run_part", run_part)
    assert gpu_checks.main(["--device", "cpu", "--tiny", "--results", str(tmp_path)]) == 0
    left = gpu_checks.BUDGET_SECONDS
    expected = []
    for name in gpu_checks.BY_WORTH:
        if gpu_checks.PARTS[name][1] <= left:
            expected.append(name)
            left -= gpu_checks.PARTS[name][1]
    assert started == expected
    assert {"attention", "ten_steps", "updates"} <= set(started) < set(gpu_checks.PARTS)
    out = capsys.readouterr().out
    for name in set(gpu_checks.PARTS) - set(started):
        assert f"| {name} | not started | - | may take" in out and f"--only {name}" in out


def test_failed_checks_end_in_status_1(tmp_path, monkeypatch):
    failed = {"part": "updates", "item": "some", "ok": False, "text": ""}
    monkeypatch.setattr(gpu_checks, "run_part", lambda *words: [failed])
    words = ["--device", "cpu", "--tiny", "--results", str(tmp_path), "--only", "updates"]
    assert gpu_checks.main(words) == 1


def test_without_cuda_checks_end_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_checks.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1
