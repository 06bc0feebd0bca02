"""benchmarks/peers.py: what trains, what is indexed and what is scored; a call that goes on."""

import hashlib
import json
import math
import types

import numpy as np
import pytest

import train_gpt
from benchmarks import peers

TEXT = bytes(np.random.default_rng(0).integers(97, 123, 45_000, np.uint8))
SMALL = {"steps": 2, "ngram_rows": 1024}


def opened(values, folder):
    parts = peers.parts_of(TEXT)
    return train_gpt.open_corpus(peers.config_of(values, parts, folder / "corpus", seed=1))


def test_the_index_the_network_and_the_validation_have_texts_of_their_own(tmp_path):
    corpus = opened({**peers.OURS, "ngram_rows": 1024}, tmp_path)
    (trained,), (indexed,) = corpus.shards, corpus.indexed
    eot = peers.BYTES["eot_token"]
    assert [part[0] for part in (trained, indexed, corpus.val)] == [eot] * 3
    # The last token to train on is the end-of-text ahead of the index, as a target.
    assert bytes(trained[1:-1].astype(np.uint8)) == TEXT[:20_250] and trained[-1] == eot
    assert bytes(indexed[1:].astype(np.uint8)) == TEXT[20_250:40_500]
    assert bytes(corpus.val[1:].astype(np.uint8)) == TEXT[40_500 : 40_500 + 4096]


def test_more_is_indexed_where_the_network_reads_less(tmp_path):
    corpus = opened({**peers.OURS, **SMALL}, tmp_path)
    read = 2 * 2 * 1024  # steps of two micro-batches
    assert len(corpus.shards[0]) == 1 + read + 1 and len(corpus.indexed[0]) == 1 + 40_500 - read


def test_without_the_table_all_of_the_training_text_trains(tmp_path):
    corpus = opened({**peers.NO_TABLE, **SMALL}, tmp_path)
    assert len(corpus.shards[0]) == 1 + 40_500 and corpus.indexed == []


def test_ppmd_pays_for_the_validation_part_alone(monkeypatch):
    """Of a compressor that halves its text, each byte costs four bits."""

    class Halves:
        def __init__(self, order, memory):
            assert order == 6

        def encode(self, content):
            return content[::2]

        def flush(self, endmark):
            return b"end"

    monkeypatch.setattr(peers, "pyppmd", types.SimpleNamespace(Ppmd7Encoder=Halves))
    loss, _ = peers.code_with_ppmd(6, peers.parts_of(TEXT))
    assert loss == pytest.approx(4 * math.log(2), rel=1e-3)


def figures(arm, loss, seconds):
    (run,) = [run for run in peers.wanted(peers.TEXT) if run.arm == arm and run.seed == 1]
    return {**run._asdict(), "loss": loss, "seconds": seconds}


def test_the_ratio_is_of_a_loss_that_is_reached():
    runs = [figures("ours", 1.4, 70.0), figures("ours, short", 1.9, 4.0)]
    assert peers.report(runs)[1].endswith("seconds:70.0 nanogpt_ratio:not measured")
    plain = figures("plain GPT", 1.9, 160.0)
    assert peers.report([*runs, plain])[1].endswith(" nanogpt_ratio:40.0")
    others = [{**plain, "seed": seed, "seconds": 160.0 + seed} for seed in (2, 3, 1000)]
    assert peers.report([*runs, plain, *others])[1].endswith(" nanogpt_ratio:40.6")  # 162.5 / 4
    plain["loss"] = 1.89
    _, line = peers.report([*runs, plain])
    assert line == "tinyshakespeare:1.4000 seconds:70.0 nanogpt_ratio:not reached"


def test_a_call_goes_on_where_the_last_one_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers.torch, "set_num_threads", lambda _: None)  # other tests' are kept
    monkeypatch.setattr(peers, "pyppmd", None)
    monkeypatch.setattr(peers, "SEEDS", (1,))
    monkeypatch.setattr(peers, "TEXT_SHA256", hashlib.sha256(TEXT).hexdigest())
    monkeypatch.setattr(peers, "PLAIN_STEPS", 2)
    arms = {arm: {**values, **SMALL} for arm, values in peers.ARMS.items()}
    monkeypatch.setattr(peers, "ARMS", arms)
    (tmp_path / "input.txt").write_bytes(TEXT)
    (tmp_path / "own.txt").write_bytes(2 * TEXT)
    words = [str(tmp_path / "input.txt"), "--own", str(tmp_path / "own.txt")]
    words += ["--results", str(tmp_path)]
    peers.main([*words, "--minutes", "0"])
    assert capsys.readouterr().out.startswith("tinyshakespeare:not measured")
    peers.main(words)
    runs = json.loads((tmp_path / "peers.json").read_text())["runs"]
    trained = {run["arm"] for run in runs if run["text"] == peers.TEXT}
    assert trained == {*peers.TEXT_ARMS, "plain GPT"}
    own = [run for run in runs if run["text"].startswith("own.txt, 90,000 bytes, sha256 ")]
    assert [run["arm"] for run in own] == [*peers.OWN_ARMS]
    # After two steps all know little of 26 letters, and they know something.
    assert all(run["loss"] < 7 and run["seconds"] > 0 for run in runs)
    kept = runs[1:]
    (tmp_path / "peers.json").write_text(json.dumps({"runs": kept}))
    peers.main(words)
    again = json.loads((tmp_path / "peers.json").read_text())["runs"]
    assert again[:-1] == kept and again[-1]["loss"] == runs[0]["loss"]
    page = (tmp_path / "peers.md").read_text()
    assert page.count("| not measured | not measured | 0 |") == 2 * len(peers.PPMD_ORDERS)
