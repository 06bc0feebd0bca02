"""The benchmarks' logic on tiny shapes: they measure what they say, and leave their results."""

import json
import math
import sys
import time

import numpy as np
import pytest
import torch

import train_gpt
from benchmarks import common, gpu_checks, parts, plain_gpt

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


# ----- records


def test_a_records_figures_are_those_of_its_own_logs(tmp_path):
    end = "===== END OF CODE =====\n"
    source = 'print("final val_loss:9.0 train_time:9ms")\nfinal val_loss:9.0 train_time:9ms\n'
    lines = "run:{0} track:nano seed:1 world_size:2 device:Some CPU x2 torch:2 started:T0{0}\n"
    lines += "final val_loss:0.5{0} train_time:7{0}50ms tokens:3\nstatus:ok\n"
    (tmp_path / "logs").mkdir()
    (tmp_path / "baseline").mkdir()
    for number, begin in enumerate((source + end, end)):  # with and without the source
        text = begin + lines.format(number)
        (tmp_path / "logs" / f"{number}.txt").write_text(text)
        (tmp_path / "baseline" / f"{number}.txt").write_text(text)
    assert common.runs_of_record(tmp_path) == [
        {"device": "Some CPU x2", "started": "T00", "loss": 0.50, "seconds": 7.05},
        {"device": "Some CPU x2", "started": "T01", "loss": 0.51, "seconds": 7.15},
    ]


# ----- a plain GPT


def test_the_plain_gpt_is_causal_and_begins_at_chance():
    config = train_gpt.TRACKS["mini"]
    model = plain_gpt.PlainGPT(config, 256)
    model.initialise(0)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(257, (1, 257), generator=generator)
    changed = tokens.clone()
    changed[:, 129:] = (changed[:, 129:] + 1) % 257  # tokens after position 128
    with torch.no_grad():
        before = model(tokens[:, :-1], tokens[:, 1:])
        after = model(changed[:, :-1], changed[:, 1:])
    assert torch.equal(before[:, :128], after[:, :128])
    assert not torch.equal(before, after)
    assert before.mean().item() == pytest.approx(math.log(257), abs=0.1)


# ----- nano's parts


def test_each_arm_lacks_what_its_name_says():
    track = train_gpt.TRACKS["nano"]
    kinds = {}
    for arm, changes in parts.ARMS.items():
        config = train_gpt.with_values(track, changes)
        kinds[arm] = (config.ngram_orders, config.copy_orders, config.index_orders)
    whole = (track.ngram_orders, track.copy_orders, track.index_orders)
    assert kinds == {
        "nano": whole,
        "without the index": (*whole[:2], ()),
        "without copies": (whole[0], (), whole[2]),
        "n-grams alone": (whole[0], (), ()),
        "without the table": ((), (), ()),
    }


def test_parts_leave_their_results(tmp_path, capsys, monkeypatch):
    losses = iter((0.5, 0.6, 0.7, 0.8, 0.9, 0.7, 0.8, 0.9, 1.0, 1.1))

    def train(folder, run_id, words):
        given = train_gpt.parse_command_line(list(map(str, words)))
        assert given["track"] == "nano" and run_id.endswith(f"_seed{given['seed']}")
        return {"val_loss": next(losses), "train_time_ms": 5, "tokens": 1000}

    monkeypatch.setattr(common, "train", train)
    parts.main(["--seeds", "2", "--work", str(tmp_path), "--results", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[-1] == "nano:0.6000 without_table:1.0000"
    text = (tmp_path / "parts.md").read_text()
    assert "| n-grams alone | 0.900 ± 0.141 | 2 |" in text and "1,000 training tokens" in text
    assert len(json.loads((tmp_path / "parts.json").read_text())["runs"]) == 10


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
