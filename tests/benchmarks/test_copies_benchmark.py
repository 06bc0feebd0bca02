"""benchmarks/copies.py: its guesses are those of the trainer's rows, and it leaves its results."""

import json

import numpy as np
import pytest

import train_gpt
from benchmarks import copies
from helpers import INDEX, NO_TABLE, byte_documents, slow_row, tiny_config

pytestmark = pytest.mark.slow

ROWS = 2**31 - 1


def test_guesses_are_those_of_the_rows():
    kinds = {**NO_TABLE, **INDEX, "copy_orders": (3, 6), "copy_places": 2}
    config = tiny_config(**{**kinds, "copy_reach": 150, "ngram_rows": ROWS})
    tokens = np.asarray(byte_documents(3000), dtype=np.uint16)
    index = train_gpt.TextIndex(config)
    index.read(np.asarray(byte_documents(9000, seed=2), dtype=np.uint16))
    guesses = copies.guesses_of(config, index, tokens)
    window = train_gpt.contiguous_window(train_gpt.Text(tokens, config), 0, 3000)
    rows, signs = train_gpt.table_rows(window, config, index)
    made = guesses != train_gpt.NO_GUESS
    assert np.array_equal(made, signs != 0) and (made.any(0) & ~made.all(0)).all()
    for at in range(0, 3000, 7):
        for column in np.flatnonzero(made[at]):
            guess = int(guesses[at, column])
            votes = range(4 if column == 4 else 1)
            possible = {slow_row(guess + 2**16 * vote, column, ROWS) for vote in votes}
            assert (rows[at, column], signs[at, column]) in possible


def test_coverage_and_hits_are_counted_on_every_validation_token():
    kinds = {**NO_TABLE, "copy_orders": (2, 3), "copy_places": 3, "copy_reach": 1000}
    config = tiny_config(**kinds, val_tokens=512)
    # Two documents of 256 tokens.
    cycle = np.array([256, *[1, 2, 3] * 85, 256, *[1, 2, 3] * 85, 1, 256], np.uint16)
    cycle[100] = 9  # a token that nobody could know
    rows = copies.success(config, train_gpt.TextIndex(config), cycle)
    # A document's first copy of an order is at that token + 3, and its last guess is of a token
    # that is another one.
    expected = []
    for places, kind in enumerate(("latest place", "place before", "place 3"), start=1):
        for order in (2, 3):
            after = order  # tokens at and behind the strange one that end no known n-gram
            covered = 512 - 2 * (order + 3 * places) - after
            expected.append(
                {
                    "kind": f"copy, {kind}",
                    "order": order,
                    "coverage": covered / 512,
                    "hit_rate": pytest.approx((covered - 2 - 1) / covered),
                }
            )
    assert rows == expected


def test_the_benchmark_leaves_its_results(corpus, tmp_path, capsys):
    words = ["--tiny", "--rounds", "2", "--steps", "2"]
    copies.main([*words, "--data", str(corpus), "--results", str(tmp_path)])
    last = dict(word.split(":") for word in capsys.readouterr().out.splitlines()[-1].split())
    assert float(last["loader_over_step"]) > 0 and last["index_steps"]
    data = json.loads((tmp_path / "copies.json").read_text())
    text = (tmp_path / "copies.md").read_text()
    assert len(data["ratios"]) == 5 and all(len(own) == 2 for own in data["ratios"].values())
    assert min(data["index_seconds"]) > 0 and len(data["step_seconds"]) == 2
    track = train_gpt.TRACKS["nano"]
    orders = track.copy_orders * track.copy_places + track.index_orders
    assert [row["order"] for row in data["columns"]] == list(orders)
    assert all(f"| {name} |" in text for name in data["ratios"])
    assert "2,048 validation tokens" in text
