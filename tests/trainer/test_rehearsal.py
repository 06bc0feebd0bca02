"""The fineweb track from its start to `status:ok`, with its own schedule, table, kinds of layers
and number of micro-batches, on eight ranks and on one: in a model so narrow and micro-batches so
short that two cores do it, on GPT-2 tokens in documents of FineWeb's lengths.
"""

import dataclasses

import numpy as np
import pytest

import ranks
import train_gpt
from helpers import with_manifest, write_shard

FINEWEB, SCALE = train_gpt.TRACKS["fineweb"], 16  # documents and windows are shorter by this
STEPS = 10
# start, document cap, windows; all else is the track's
SHORTER = ((0.0, 28, (16, 16)), (1 / 3, 64, (16, 32)), (0.667, 64, (32, 64)), (0.9, 64, (64, 128)))
STAGES = tuple(
    dataclasses.replace(stage, start=start, document_cap=cap, windows=windows)
    for stage, (start, cap, windows) in zip(FINEWEB.stages, SHORTER, strict=True)
)
NARROW = {
    "track": "fineweb",
    "device": "cpu",
    "dtype": "float32",
    "compile": False,
    "seed": 1,
    "steps": STEPS,
    "log_every": 1,
    "val_every": 4,
    "micro_batch_tokens": 64,
    "model_dim": 16,
    "head_dim": 8,
    "mlp_dim": 24,
    "ngram_rows": 4096,
    "copy_reach": 128,
    "val_tokens": 512,
    "val_batch_tokens": 128,
    "val_windows": (64, 192),
    "stages": tuple(dataclasses.asdict(stage) for stage in STAGES),
}


def fineweb_like(count, rng):
    """`count` tokens of documents with FineWeb's median and mean, 403 and 690, divided by SCALE;
    words are as frequent as in Zipf's law, and phrases come back, so that copies are found."""
    tokens, spread = [], np.sqrt(2 * np.log(690 / 403))
    while len(tokens) < count:
        length = max(2, round(rng.lognormal(np.log(403), spread) / SCALE))
        words = np.minimum(rng.zipf(1.2, length), FINEWEB.eot_token - 1)
        words[length // 2 :] = words[: length - length // 2]
        tokens += [FINEWEB.eot_token, *words]
    return tokens[:count]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_are_complete_and_valid_and_eight_ranks_take_the_steps_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "ONE_RANK_SECONDS", 500)  # all ranks have two cores
    rng, runs = np.random.default_rng(0), {}
    for name, count in (("train_000001", 12_000), ("train_000002", 8_000), ("val_000000", 2_000)):
        write_shard(tmp_path / f"fineweb_{name}.bin", fineweb_like(count, rng))
    ids = FINEWEB.eot_token + 1
    numbers = {"vocab_size": ids, "eot_token": ids - 1, "token_bytes": [1] * ids}
    with_manifest(tmp_path, tokenizer="gpt2", **numbers)
    for world_size in (1, 8):
        values = {**NARROW, "data": str(tmp_path), "run_id": f"ranks{world_size}"}
        run = runs[world_size] = ranks.train(tmp_path, values, world_size=world_size)
        said = run.stdout[-2000:] + run.stderr[-2000:]
        assert run.code == 0 and run.lines[-1].startswith("status:ok"), said
        assert "validity: causal:ok normalised:ok local:ok unmoved:ok " in run.stdout
        assert f" world_size:{world_size} " in run.log[0]
        assert run.train_losses[STEPS] < run.train_losses[1] - 0.3  # it learns
    assert len(runs[1].train_losses) == STEPS and len(runs[1].val_losses) == 3
    assert runs[8].train_losses == pytest.approx(runs[1].train_losses, abs=2.1e-5)
    assert runs[8].val_losses == pytest.approx(runs[1].val_losses, abs=2.1e-5)
