"""benchmarks/table_parts.py: what rows change."""

import base64

import numpy as np

import train_gpt
from benchmarks import table_parts
from helpers import ROOT

SMALL = {
    "steps": 2,
    "tokenizer": "bytes",
    "vocab_size": 257,
    "eot_token": 256,
    "val_tokens": 1024,
    "val_batch_tokens": 256,
    "val_sha256": "",
    "micro_batch_tokens": 256,
    "index_tokens": 10_000,
    "ngram_rows": 1024,
}


def figures(row, seed, loss):
    (run,) = [run for run in table_parts.wanted() if (run.row, run.seed) == (row, seed)]
    return {**run._asdict(), "loss": loss, "seconds": 30.0}


def test_every_row_is_another_run():
    track = train_gpt.TRACKS[table_parts.TRACK]
    rows = {**table_parts.PARTS, **table_parts.NUMBERS}
    configs = {row: table_parts.config_of(row, track.seed) for row in rows}
    assert len({repr(config) for config in configs.values()}) == len(rows)
    same = train_gpt.with_values(configs[table_parts.WHOLE], {"device": track.device})
    assert same == track


def test_gaps_are_of_equal_seeds():
    runs = [figures(table_parts.WHOLE, 1, 3.0), figures(table_parts.WHOLE, 2, 3.2)]
    runs += [figures("no index", 2, 3.5), figures(table_parts.WITHOUT, 1, 4.0)]
    page, line = table_parts.report([*runs, {**runs[0], "setting": "of another day"}])
    assert "| no index | 3.5000 | +0.3000 | 30.0 | 1 |" in page
    assert line == "table_parts whole:3.1000 without:4.0000 seeds:1"
    assert table_parts.report([])[1].endswith("whole:not measured without:not measured seeds:0")


def test_what_passes_ppmd_is_below_it():
    looks = [[20, 5.0, 3.3], [40, 9.0, 3.2]]
    ppmd = {"6": [3.25, 2.0], "16": [3.3, 4.0]}
    page, end = table_parts.report_untrained([3.4, 1.0], ppmd, looks)
    assert "| PPMd of order 16 | 3.3000 | 4.0 |" in page and end == " ppmd_passed_after:9.0"
    assert "| the index alone | 3.4000 | 1.0 |" in page
    assert table_parts.report_untrained([], {}, looks)[1] == " ppmd_passed_after:not measured"


def test_the_text_of_tokens():
    lines = (ROOT / "data/english1024.tiktoken").read_text().split()
    pieces = {
        int(number): base64.b64decode(piece)
        for piece, number in zip(lines[::2], lines[1::2], strict=True)
    }
    eot = train_gpt.TRACKS[table_parts.TRACK].eot_token
    asked = np.array([5, eot, 1022, 300, 5])
    assert table_parts.text_of(asked) == pieces[5] + pieces[1022] + pieces[300] + pieces[5]


def test_a_run_learns(monkeypatch, corpus):
    small = {**SMALL, "data": str(corpus)}
    run = next(table_parts.wanted())
    monkeypatch.setattr(table_parts, "PARTS", {table_parts.WHOLE: small})
    monkeypatch.setattr(table_parts.torch, "set_num_threads", lambda _: None)  # others' are kept
    found = table_parts.measure(run, float("inf"))
    assert found["loss"] < np.log(SMALL["vocab_size"]) and found["seconds"] > 0
    assert table_parts.measure(run, 0) is None
    loss, seconds = table_parts.index_alone()
    assert loss < np.log(SMALL["vocab_size"]) - 1 and seconds > 0
