"""benchmarks/copies.py: its guesses are those of the trainer's rows, and it leaves its results."""

import dataclasses
import json

import numpy as np
import pytest

import train_gpt
from benchmarks import common, copies
from helpers import INDEX, NO_TABLE, byte_documents, slow_row, tiny_config

ROWS = 2**31 - 1


def test_guesses_are_those_of_the_rows():
    config = tiny_config(
        **{**NO_TABLE, **INDEX, "copy_orders": (3, 6), "copy_reach": 150, "ngram_rows": ROWS}
    )
    tokens, index = np.asarray(byte_documents(3000), dtype=np.uint16), train_gpt.TextIndex(config)
    index.read(np.asarray(byte_documents(9000, seed=2), dtype=np.uint16), train_gpt.Runtime("cpu"))
    guesses = copies.guesses_of(config, index, tokens)
    place = train_gpt.Placement(train_gpt.Text(tokens, config), np.arange(3000), None)
    rows, signs = train_gpt.table_rows(place, config, index)
    made = guesses != train_gpt.NO_GUESS
    assert np.array_equal(made, signs != 0) and (made.any(0) & ~made.all(0)).all()
    for at in range(0, 3000, 7):
        for column in range(5):
            if made[at, column]:
                possible = {
                    slow_row(int(guesses[at, column]) + 2**16 * confidence, column, ROWS)
                    for confidence in range(4 if column == 4 else 1)
                }
                assert (rows[at, column], signs[at, column]) in possible


def test_coverage_and_hits_are_counted_on_every_validation_token():
    config = tiny_config(**{**NO_TABLE, "copy_orders": (2, 3), "copy_places": 3}, val_tokens=512)
    # two documents of 256 tokens
    cycle = np.array([256, *[1, 2, 3] * 85, 256, *[1, 2, 3] * 85, 1, 256], np.uint16)
    cycle[100] = 9  # a token that nobody could know
    rows = copies.success(
        dataclasses.replace(config, copy_reach=1000), train_gpt.TextIndex(config), cycle
    )
    # A document's first copy of order n is at its token n + 3, and its last guess is of a token
    # that is another one.
    for (kind, places), (n, row) in zip(
        [("latest place", 1)] * 2 + [("place before", 2)] * 2 + [("place 3", 3)] * 2,
        zip((2, 3) * 3, rows, strict=True),
        strict=True,
    ):
        after = n  # tokens at and behind the strange one that end no known n-gram
        covered = 512 - 2 * (n + 3 * places) - after
        assert row == {
            "kind": f"copy, {kind}",
            "order": n,
            "coverage": covered / 512,
            "hit_rate": pytest.approx((covered - 2 - 1) / covered),
        }


def test_the_benchmark_leaves_its_results(corpus, tmp_path, capsys):
    copies.main(
        [
            "--tiny",
            "--rounds",
            "2",
            "--steps",
            "2",
            "--data",
            str(corpus),
            "--results",
            str(tmp_path),
        ]
    )
    words = dict(word.split(":") for word in capsys.readouterr().out.splitlines()[-1].split())
    assert float(words["loader_over_step"]) > 0 and words["index_steps"]
    data, text = (
        json.loads((tmp_path / "copies.json").read_text()),
        (tmp_path / "copies.md").read_text(),
    )
    assert len(data["ratios"]) == 5 and all(len(own) == 2 for own in data["ratios"].values())
    assert min(data["index_seconds"]) > 0 and len(data["step_seconds"]) == 2
    track = dataclasses.replace(train_gpt.TRACKS["nano"], **common.TINY)
    assert [row["order"] for row in data["columns"]] == [
        *track.copy_orders * track.copy_places,
        *track.index_orders,
    ]
    assert (
        all(f"| {name} |" in text for name in data["ratios"]) and "2,048 validation tokens" in text
    )
