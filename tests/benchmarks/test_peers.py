"""benchmarks/peers.py: what trains and what is scored, and what the last line says."""

import numpy as np
import pytest

import train_gpt
from benchmarks import peers

TEXT = bytes(np.random.default_rng(0).integers(97, 123, 45_000, np.uint8))
SMALL = {"steps": 2, "ngram_rows": 1024}


def test_nine_tenths_train_and_the_rest_fills_whole_passes(tmp_path):
    config = peers.config_of(SMALL, peers.parts_of(TEXT), tmp_path / "corpus", seed=1)
    corpus = train_gpt.open_corpus(config)
    (shard,) = corpus.shards
    trained = shard.read()
    assert trained[0] == corpus.val[0] == peers.BYTES["eot_token"]
    assert bytes(trained[1:].astype(np.uint8)) == TEXT[:40_500]
    assert bytes(corpus.val[1:].astype(np.uint8)) == TEXT[40_500 : 40_500 + 4096]


@pytest.mark.parametrize(
    "plain, ours, words",
    [
        (1.9, 1.46, "quick_start_ratio:10.0 below_a100:200.0"),
        (1.89, 1.47, "quick_start_ratio:not reached below_a100:not reached"),
    ],
)
def test_a_ratio_is_of_a_loss_that_is_reached(plain, ours, words):
    means = {"ours, short": 1.9, "plain GPT": plain, "ours": ours}
    medians = {"ours, short": 15.0, "plain GPT": 150.0, "ours": 200.0}
    assert peers.last_line(means, medians, 3) == f"tinyshakespeare {words} seeds:3"
