"""Honest models pass the validity gates, and cheating ones are caught.

All weights are random: in a model that has not been trained, gates and projections of zero would
hide what it sees.
"""

import re
import sys
from typing import NamedTuple

import cheats
import numpy as np
import pytest
import torch
import torch.nn.functional as F

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


@pytest.fixture(autouse=True)
def places(monkeypatch):
    """The system's random numbers, which choose the places, are the same in each test."""
    monkeypatch.setattr(gates.secrets, "randbits", lambda bits: 1)


def gated_trainer(**changes):
    return make_trainer(**{"val_tokens": VAL_TOKENS, **changes})


def verdict_on(trainer, val=VAL, **words):
    step = trainer.config.steps
    reported = trainer.evaluate(step, val)
    return gates.check_gates(trainer, step, val, reported, train_gpt.state_digest, **words)


def failed(trainer, val=VAL):
    """The names of the gates that a trainer does not pass."""
    verdict = verdict_on(trainer, val)
    assert list(verdict.passed) == ["causal", "normalised", "local", "unmoved"]
    assert told(verdict)["cuts"] != "0"
    return {name for name, is_passed in verdict.passed.items() if not is_passed}


def told(verdict):
    """{name: value} of a verdict's line."""
    return dict(word.split(":") for word in verdict.line().split())


# ----- honest models


@pytest.mark.parametrize(
    "changes",
    [
        {},
        NO_TABLE,
        LAYERED,
        {**LAYERED, "matmul_precision": "medium"},
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


class Mixture(NamedTuple):
    """States, and tensors beside them, the first of which holds whole numbers."""

    states: train_gpt.States
    numbers: tuple


def test_states_may_be_several_tensors_and_logits_logarithms_of_probabilities():
    """As where the prediction mixes two distributions; each tensor is picked like the others, and a
    target in any of them is seen."""
    for leak in (0, 1):
        trainer = gated_trainer()
        score, logits = trainer.score, trainer.model.logits

        def score_in_parts(step, tokens, low, length=None, score=score, leak=leak):
            losses, states = score(step, tokens, low, length)
            ids = torch.from_numpy(tokens[low : low + len(losses) + leak].astype(np.int64))
            return losses, Mixture(states, (ids[leak:], states.hidden.double()))

        def log_probabilities(mixture, logits=logits):
            assert mixture.numbers[0].shape == mixture.states.hidden.shape[:1]
            return F.log_softmax(logits(mixture.states), 1)

        trainer.score, trainer.model.logits = score_in_parts, log_probabilities
        assert ("causal" in failed(trainer)) == bool(leak)


def test_an_honest_cache_of_results_by_place_hides_nothing():
    """The gates look at another place, where nothing is kept yet."""
    for name in ("nothing", "rows_of_the_next_token"):
        trainer, patch = gated_trainer(), pytest.MonkeyPatch()
        if name in cheats.CAUGHT:
            cheats.CAUGHT[name][1](trainer, patch)
        honest, kept = trainer.score, {}

        def score(step, tokens, low, honest=honest, kept=kept):
            if low not in kept:
                kept[low] = honest(step, tokens, low)
            return kept[low]

        trainer.score = score
        assert ("causal" in failed(trainer)) == (name in cheats.CAUGHT)
        patch.undo()


def test_what_rounding_does_is_told_with_its_size(monkeypatch):
    """A segment's mean by a difference of sums over the pass, say."""

    def means(trainer, passage, micro_batch):
        x = F.embedding(micro_batch.inputs, trainer.model.embed).float()
        total = F.pad(x.cumsum(0), (0, 0, 1, 0))
        at = torch.arange(len(x))
        return total[at + 1] - total[micro_batch.segment_start.long()]

    trainer = gated_trainer()
    cheats.seeing(means)(trainer, monkeypatch)
    verdict = verdict_on(trainer)
    assert not verdict.passed["causal"] or not verdict.passed["local"]
    assert re.search(r"states change .* their losses by \d?e-0[5-9] in the mean", verdict.reason)


def test_a_loss_of_other_passes_is_told_beside_theirs(monkeypatch):
    """As where weights are a mean in `evaluate` alone."""
    trainer = gated_trainer()
    cheats.CAUGHT["mean_less_a_millionth"][1](trainer, monkeypatch)
    reason = verdict_on(trainer).reason
    losses = re.search(r"the run reports (\S+), its passes (\S+),", reason).groups()
    reported, passes = map(float, losses)
    assert passes - reported == pytest.approx(1e-6, abs=2e-9)


def test_validation_text_that_is_scored_in_part_is_refused():
    """No tail of it may stay without a loss."""
    trainer = gated_trainer(val_batch_tokens=1024)
    with pytest.raises(ValueError, match="tokens are 4000, no multiple of val_batch"):
        gates.check_gates(trainer, 4, VAL[:4001], 5.0, train_gpt.state_digest)


def test_the_gates_tell_the_end_of_text_that_they_looked_for():
    """One that never occurs makes one document of all: `verify` compares it with the rules."""
    trainer = gated_trainer()
    trainer.config = train_gpt.with_values(trainer.config, {"eot_token": 255})
    assert told(verdict_on(trainer))["eot"] == "255"


def test_weights_that_know_something_show_before_training():
    """The loss of the untrained model is that of its first pass over the whole vocabulary."""
    trainer = gated_trainer(random_weights=False, pointer_window=0)
    loss = gates.untrained_loss(trainer, 4, VAL)
    assert loss == pytest.approx(np.log(EOT + 1), abs=0.1)
    counts = np.bincount(VAL, minlength=EOT + 1) + 0.5
    logits = torch.from_numpy(np.log(counts / counts.sum())).float()
    trainer.model.logits = lambda states: logits.expand(len(states.hidden), -1)
    expected = F.cross_entropy(logits.expand(256, -1), torch.from_numpy(VAL[1:257].astype(int)))
    assert gates.untrained_loss(trainer, 4, VAL) == pytest.approx(expected.item(), abs=1e-5)
    assert expected < np.log(EOT + 1) - 0.5


def test_what_changes_while_the_clock_stands_is_seen():
    """Ahead of the validation, so that the gates themselves see one model only."""
    trainer = gated_trainer()
    stopped = train_gpt.state_digest(trainer)
    assert verdict_on(trainer, stopped=stopped).passed["unmoved"]
    trainer.model.head.data[0, 0] += 1
    assert not verdict_on(trainer, stopped=stopped).passed["unmoved"]


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


def comparisons(trainer, val=VAL):
    """[(start of a pass, what is kept of it), ...] that the gates have planned."""
    looking = gates.Gates(trainer, trainer.config.steps, val)
    order, kept_of = looking.plan()
    return looking, [
        (int(order[number]) * looking.length, kept)
        for number, plans in kept_of.items()
        for kept in plans
    ]


def test_a_pass_is_read_at_another_place_of_a_text_of_noise():
    """What is kept stands there, and the beginning of its first document; nothing else does."""
    trainer = gated_trainer()
    seen = []
    trainer.score = lambda step, tokens, low: seen.append((tokens, low)) or (torch.zeros(256),) * 2
    trainer.model.logits = lambda states: states
    looking, planned = comparisons(trainer)
    for low, kept in planned:
        looking.read_in_noise(low, kept)
        noisy, place = seen.pop()
        own = noisy[place : place + 257]
        is_same = own == VAL[low : low + 257]
        np.testing.assert_array_equal(is_same[:256], kept > gates.NOISE)
        assert not np.any(own[~is_same] == EOT)
        begun = max(np.flatnonzero(VAL == EOT)[np.flatnonzero(VAL == EOT) <= low])
        np.testing.assert_array_equal(noisy[place - low + begun : place], VAL[begun:low])
        outside = np.append(noisy[: place - low + begun], noisy[place + 257 :])
        assert len(noisy) == len(VAL) and not np.any(outside == EOT)
        assert place != low and 0 <= place <= VAL_TOKENS - 256


def test_cuts_are_spread_as_positions_are(monkeypatch):
    """By how far a pass reads into a document, and others in each run: a leak at 1 % of positions
    is missed as often as is told. As many are made as it takes."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, EOT, 65 * 1024 + 1).astype(np.uint16)
    text[np.cumsum(rng.integers(200, 600, 160))] = EOT
    text[0] = EOT
    trainer = gated_trainer(val_tokens=65 * 1024, val_batch_tokens=1024, copy_reach=64)
    starts = np.maximum.accumulate(np.where(text == EOT, np.arange(len(text)), 0))
    position = np.arange(65 * 1024)
    depth = position - np.maximum(starts[:-1], position // 1024 * 1024)
    found = []
    for seed in range(8):
        monkeypatch.setattr(gates.secrets, "randbits", lambda bits, seed=seed: seed)
        _, planned = comparisons(trainer, text)
        are_cuts = [gates.cuts_of(kept) & (kept == gates.CUT) for _, kept in planned]
        cuts = [
            low + np.flatnonzero(is_cut) for (low, _), is_cut in zip(planned, are_cuts, strict=True)
        ]
        found.append(np.concatenate(cuts))
        assert 300 <= len(found[-1]) < 310
    assert len({tuple(cuts) for cuts in found}) == 8
    cuts = np.concatenate(found)
    for quarter in np.array_split(np.sort(depth), 4):
        share = np.mean((depth[cuts] >= quarter[0]) & (depth[cuts] <= quarter[-1]))
        assert 0.2 < share < 0.3
    assert len(set(cuts % 64)) == 64


def test_cuts_behind_first_tokens_are_beside_those_that_are_told():
    looking, planned = comparisons(gated_trainer())
    first = [low + np.flatnonzero(kept == gates.FIRST) for low, kept in planned]
    first = np.concatenate(first)
    assert len(first) > 1 and set(VAL[first[first % 256 > 0]]) == {EOT}


def test_a_short_text_comes_to_an_end():
    trainer = gated_trainer(val_tokens=512)
    _, planned = comparisons(trainer, VAL[:513])
    assert [low for low, _ in planned].count(0) == [low for low, _ in planned].count(256) == 2
    verdict = verdict_on(trainer, VAL[:513], control=VAL[512:1281])
    assert told(verdict)["tokens"] == "512" and told(verdict)["places"] == "1"
    losses = [trainer.score(4, VAL, 512 + low)[0] for low in (0, 256, 512)]
    assert float(told(verdict)["control"]) == pytest.approx(
        torch.cat(losses).mean().item(), abs=1e-2
    )


# ----- cheating ones

SHIFTED = layers_of(2, is_long=(1,), shifted_keys=(0,))
CHANGES = {"copy_reach": 4096, "layers": SHIFTED}
# As many passes as english has: a leak at one place of a pass shows in few of them.
MANY_PASSES = {"val_batch_tokens": 64, "windows": (16, 32), "val_windows": (16, 32), **CHANGES}
# Layers of all kinds; and a narrow type, in which losses of single tokens may be off by much more.
AMONG_LAYERS = (
    "attention_across_documents",
    "keys_across_documents",
    "keys_from_ahead",
    "earlier_tokens_from_ahead",
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
    form = (
        r"gates:(\w{64}) text:(\w{64}) tokens:1024 eot:256 places:1 "
        r"cuts:(\d+) missed_1pct:(\S+) control:\S+ time:\d+\.\ds"
    )
    sha256, text, cuts, missed = re.fullmatch(form, line).groups()
    assert sha256 == train_gpt.file_sha256(gates.__file__)
    assert f"val_sha256:{text}" in run.stdout
    assert float(missed) == pytest.approx(0.99 ** int(cuts), abs=1e-5)
    assert "validity: causal:FAILED normalised:ok local:ok unmoved:ok " in run.stdout


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
    assert run.code == 1 and "while its clock stood still" in run.lines[-1]
    assert calls == [2]
