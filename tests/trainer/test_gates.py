"""Honest models pass the validity gates, and cheating ones are caught.

All weights are random: in a model that has not been trained, gates and projections of zero would
hide what it sees.
"""

import dataclasses
import re
import sys

import cheats
import numpy as np
import pytest

import ranks
import train_gpt
from helpers import EOT, LAYERED, NO_TABLE, ONE_LAYER, byte_documents, layers_of, make_trainer
from records import gates

VAL_TOKENS = 4096  # 16 passes
SLOW = pytest.mark.slow


def validation_text():
    """Documents of 25 to 215 tokens that begin alike and repeat a phrase, which copies find, behind
    one that is longer than a pass."""
    source = [token for token in byte_documents(12000) if token != EOT]
    licence = list(b"# MIT licence\n")
    tokens, low = [EOT, *source[:600]], 600
    for length in np.random.default_rng(0).integers(10, 200, size=80):
        phrase = source[low : low + 24]
        tokens += [EOT, *licence, *[*phrase * 9][:length]]
        low += 24
    return np.array(tokens[: VAL_TOKENS + 1], dtype=np.uint16)


VAL = validation_text()


def gated_trainer(seed=1, **changes):
    """A trainer whose gates look at the places of a seed."""
    trainer = make_trainer(**{"val_tokens": VAL_TOKENS, **changes})
    trainer.config = dataclasses.replace(trainer.config, seed=seed)
    return trainer


def failed(trainer, val=VAL):
    """The names of the gates that a trainer does not pass."""
    step = trainer.config.steps
    reported = trainer.evaluate(step, val)
    verdict = gates.check_gates(trainer, step, val, reported, train_gpt.state_digest)
    assert list(verdict.passed) == ["causal", "normalised", "local", "unmoved"]
    assert verdict.cuts > 0
    return {name for name, is_passed in verdict.passed.items() if not is_passed}


# ----- honest models


@pytest.mark.parametrize(
    "changes",
    [
        {},
        NO_TABLE,
        LAYERED,
        {"random_weights": False},
        {"untie_at": 1.0, "softmax_rows": 256, "mtp_weights": (1.0, 0.5)},
        {"val_batch_tokens": 1024},
        {"val_batch_tokens": 64, "windows": (16, 32), "val_windows": (16, 32), "val_tokens": 128},
        {**ONE_LAYER, "ngram_rows": 3},
    ],
    ids=str,
)
def test_an_honest_model_passes(changes):
    trainer = gated_trainer(**changes)
    assert failed(trainer, VAL[: trainer.config.val_tokens + 1]) == set()


@pytest.mark.parametrize(
    "starts",
    [[0], [], range(0, 257, 2), range(257), [0, 1, 102, 256]],
    ids=["one", "none begins", "short ones", "empty ones", "one at the very end"],
)
@pytest.mark.parametrize("length", [64, 256])
def test_few_and_short_documents_are_no_cheat(starts, length):
    val = np.random.default_rng(0).integers(0, EOT, 257).astype(np.uint16)
    val[list(starts)] = EOT
    trainer = gated_trainer(val_batch_tokens=length, val_tokens=256, copy_orders=(2,))
    assert failed(trainer, val) == set()


def test_tokens_of_one_logit_are_no_cheat():
    """As in bfloat16, where many are equal: a loss need not change with its target."""
    trainer = gated_trainer(dtype="bfloat16")
    trainer.model.head.data[2:] = trainer.model.head.data[:2].repeat(128, 1)[:-1]
    assert failed(trainer) == set()


def verdicts_of_rank(runtime, cheat, deceiver):
    trainer = gated_trainer(runtime=runtime, val_tokens=1280, dtype="bfloat16")  # 5 passes
    if runtime.rank == deceiver:
        cheat(trainer, None)
    return failed(trainer, VAL[:1281])


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=SLOW)])
def test_ranks_agree(world_size):
    honest = ranks.on_ranks(world_size, verdicts_of_rank, None, None)
    assert honest == [set()] * world_size
    # One rank alone finds something wrong, and all of them go on to the end.
    _, cheat = cheats.CAUGHT["training_on_what_was_scored"]
    first, *others = ranks.on_ranks(world_size, verdicts_of_rank, cheat, world_size - 1)
    assert first >= {"causal", "unmoved"} and others == [first] * len(others)


# ----- where the gates look


def cuts_of_run(seed):
    """Places that the gates compare in a run of a seed."""
    passes = gates.Gates(gated_trainer(seed=seed), 4, VAL)
    rng = np.random.default_rng(seed)
    cuts = []
    for low in range(0, VAL_TOKENS, passes.length):
        noisy, kept = passes.with_noise(VAL, low, rng)
        is_same = noisy == VAL
        np.testing.assert_array_equal(is_same[low : low + passes.length], kept > gates.NOISE)
        assert not np.any(noisy[~is_same] == EOT)
        is_cut = (kept > gates.NOISE) & (np.append(kept[1:], 0) == gates.NOISE)
        cuts += [*low + np.flatnonzero(is_cut)]
    return cuts


def test_cuts_are_on_edges_and_off_them_and_others_in_each_run():
    runs = [cuts_of_run(seed) for seed in range(8)]
    assert len({tuple(run) for run in runs}) == 8
    cuts = np.concatenate(runs)
    assert {0, 63, 127, 255} <= set(cuts % 256) and len(set(cuts % 64)) > 48
    starts = np.flatnonzero(VAL == EOT)[1:]
    for shift in (-1, 0):  # the last token of a document, and the first
        assert np.isin(starts + shift, cuts).sum() > 4


def test_long_documents_are_cut_short_for_more_cuts():
    passes = gates.Gates(gated_trainer(val_batch_tokens=1024), 4, VAL)
    tokens = passes.with_short_documents(1024, np.random.default_rng(0))
    starts = np.flatnonzero(tokens == EOT)
    assert set(np.flatnonzero(tokens != VAL)) <= set(starts)
    assert 50 < np.sum(starts // 1024 == 1) < 128


# ----- cheating ones

SHIFTED = layers_of(2, is_long=(1,), shifted_keys=(0,), skip={1: 1})
CHANGES = {"copy_reach": 4096, "layers": SHIFTED}
# As many passes as english has: a leak at one place of a pass shows in few of them.
MANY_PASSES = {"val_batch_tokens": 64, "windows": (16, 32), "val_windows": (16, 32), **CHANGES}
# Layers of all kinds; and a narrow type, in which losses of single tokens may be off by much more.
AMONG_LAYERS = (
    "attention_across_documents",
    "keys_across_documents",
    "keys_from_ahead",
    "smear_from_ahead",
)
NARROW = ("attention_one_ahead", "losses_less_a_thousandth", "target_in_signs_of_zeros")


@pytest.mark.parametrize(
    "name, changes",
    [(name, CHANGES) for name in cheats.CAUGHT if name != "target_at_the_last_position"]
    + [("target_at_the_last_position", MANY_PASSES)]
    + [(name, LAYERED) for name in AMONG_LAYERS]
    + [pytest.param(name, {"dtype": "bfloat16"}, marks=SLOW) for name in NARROW],
    ids=str,
)
def test_a_cheat_is_caught(name, changes, monkeypatch):
    expected, cheat = cheats.CAUGHT[name]
    trainer = gated_trainer(**changes)
    cheat(trainer, monkeypatch)
    assert failed(trainer) >= set(expected.split())


@pytest.mark.parametrize("cheat", cheats.PASSING)
def test_what_the_gates_let_pass(cheat):
    """For a reviewer: these are real, since the loss is another one, and no gate sees them."""
    trainer = gated_trainer()
    honest = trainer.evaluate(4, VAL)
    cheat(trainer, VAL)
    assert failed(trainer) == set()
    assert trainer.evaluate(4, VAL) != honest


# ----- in a run


def test_a_failed_gate_is_logged_and_fails_the_run(tiny, cli, monkeypatch):
    _, cheat = cheats.CAUGHT["rows_of_the_next_token"]
    cheat(None, monkeypatch)
    run = cli(**{**tiny, "run_id": "leaky"})
    assert run.code == 1 and run.lines[-1].startswith("status:error ")
    assert "causal" in run.lines[-1] == run.log[-1]
    (line,) = (line for line in run.log if line.startswith("gates:"))
    form = r"gates:(\w{64}) cuts:(\d+) missed_1pct:(\S+) time:\d+\.\ds"
    sha256, cuts, missed = re.fullmatch(form, line).groups()
    assert sha256 == train_gpt.file_sha256(gates.__file__)
    assert float(missed) == pytest.approx(0.99 ** int(cuts), abs=1e-5)
    assert "validity: causal:FAILED normalised:ok local:FAILED unmoved:ok " in run.stdout


def test_a_trainer_that_stands_alone_is_not_checked(tiny, cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "records", None)  # as where there is no such package
    run = cli(**{**tiny, "run_id": "alone"})
    assert run.code == 0 and run.result["validity"] == "unchecked"
    validity = [line for line in run.log if line.startswith(("validity", "gates:"))]
    assert len(validity) == 1 and validity[0].startswith("validity:unchecked")


def test_a_validation_that_trains_ends_the_run(tiny, cli, monkeypatch):
    """An earlier one, too: the gates at the end would see an honest model."""
    honest, calls = train_gpt.Trainer.evaluate, []

    def evaluate(self, step, val):
        loss = honest(self, step, val)
        if not calls:
            self.model.head.data.mul_(1.01)
        calls.append(step)
        return loss

    monkeypatch.setattr(train_gpt.Trainer, "evaluate", evaluate)
    run = cli(**{**tiny, "run_id": "learns", "val_every": 2})
    assert run.code == 1 and "validation has changed" in run.lines[-1]
    assert calls == [2]
