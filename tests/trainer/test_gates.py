"""Chapter 12: honest models pass the validity gates, and cheating ones are caught.

All weights are random: in a model that has not been trained, gates and projections of zero would
hide what it sees.
"""

import json

import cheats
import numpy as np
import pytest
import torch

import ranks
import train_gpt
from helpers import (
    EOT,
    GATE_PLACES,
    INDEX,
    LAYERED,
    NO_TABLE,
    ONE_LAYER,
    byte_documents,
    make_trainer,
    tiny_config,
)
from train_gpt import Runtime

VAL_TOKENS = 2048  # 8 passes


def validation_text():
    """Documents that begin alike, of 45 to 415 tokens, behind one that is longer than a pass."""
    source = [token for token in byte_documents(6000) if token != EOT]
    licence = list(b"# MIT licence\n")
    tokens, low = [EOT, *source[:600]], 600
    for length in np.random.default_rng(0).integers(30, 400, size=20):
        tokens += [EOT, *licence, *source[low : low + length]]
        low += int(length)
    return np.array(tokens[: VAL_TOKENS + 1], dtype=np.uint16)


VAL = validation_text()


@pytest.fixture(autouse=True)
def few_places(monkeypatch):
    """Half as many as in a run that somebody starts."""
    monkeypatch.setattr(train_gpt, "GATE_PLACES", GATE_PLACES // 2)


def gated_trainer(runtime=None, **changes):
    """A trainer on one thread, so that models which remember are no race."""
    runtime = runtime or Runtime("cpu", workers=1)
    return make_trainer(runtime=runtime, **{"val_tokens": VAL_TOKENS, **changes})


def failed(trainer, val=VAL):
    """The names of the gates that a trainer does not pass."""
    step = trainer.config.steps
    verdicts = train_gpt.check_gates(trainer, step, val, trainer.evaluate(step, val))
    assert list(verdicts) == ["causal", "normalised", "local", "unmoved"]
    return {name for name, is_passed in verdicts.items() if not is_passed}


# ----- honest models


@pytest.mark.parametrize(
    "changes",
    [
        {},
        INDEX,
        NO_TABLE,
        LAYERED,
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16", **LAYERED}, marks=pytest.mark.slow),
        {"untie_at": 1.0, "softmax_rows": 200, "mtp_weights": (1.0, 0.5)},
        pytest.param(
            {"dtype": "bfloat16", "seed": 2, **ONE_LAYER, "ngram_rows": 3}, marks=pytest.mark.slow
        ),
        {"val_batch_tokens": 1024},
        {"val_batch_tokens": 32, "windows": (16, 32), "val_windows": (16, 32), "val_tokens": 64},
    ],
    ids=str,
)
def test_an_honest_model_passes(changes):
    trainer = gated_trainer(**changes)
    trainer.table.index.read(np.array(byte_documents(3000, seed=7), dtype=np.uint16))
    assert failed(trainer, VAL[: trainer.config.val_tokens + 1]) == set()


@pytest.mark.slow
def test_an_honest_compiled_model_passes():
    trainer = gated_trainer(dtype="bfloat16")
    trainer.forward = torch.compile(trainer.model, backend="aot_eager", dynamic=False)
    assert failed(trainer) == set()
    torch._dynamo.reset()


def documents_of_lengths(lengths, count=257):
    text = list(np.random.default_rng(0).integers(0, EOT, sum(lengths)))
    tokens = []
    for length in lengths:
        tokens += [EOT, *text[:length]]
        text = text[length:]
    return np.array(tokens[:count], dtype=np.uint16)


@pytest.mark.parametrize(
    "val",
    [
        documents_of_lengths([256]),
        documents_of_lengths([257])[1:],
        documents_of_lengths([0, 1, 2] * 100),
        documents_of_lengths([0] * 257),
        documents_of_lengths([0, 100, 0, 155]),
    ],
    ids=["one", "none begins", "of 1 to 3 tokens", "of no tokens", "one at the very end"],
)
def test_few_and_short_documents_are_no_cheat(val):
    val = np.append(val, EOT)[:257].astype(np.uint16)
    changes = {"val_batch_tokens": 64, "val_tokens": 256, "copy_orders": (2,)}
    trainer = make_trainer(**changes)
    assert failed(trainer, val) == set()


def test_tokens_of_one_logit_are_no_cheat():
    """As in bfloat16, where many are equal: a loss need not change with its target."""
    trainer = gated_trainer(dtype="bfloat16")
    trainer.model.head.data[2:] = trainer.model.head.data[:2].repeat(128, 1)[:-1]
    assert failed(trainer) == set()


def verdicts_of_rank(runtime, cheat, deceiver):
    train_gpt.GATE_PLACES = 4  # all ranks make the same passes
    trainer = gated_trainer(runtime, val_tokens=1280, dtype="bfloat16")  # 5 passes
    if cheat and runtime.rank == deceiver:
        cheat(trainer, None)
    return failed(trainer, VAL[:1281])


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_agree(world_size):
    honest = ranks.on_ranks(world_size, verdicts_of_rank, None, None)
    assert honest == [set()] * world_size
    # One rank alone finds something wrong, and all of them go on to the end.
    cheat = cheats.target_at_odd_positions
    first, *others = ranks.on_ranks(world_size, verdicts_of_rank, cheat, world_size - 1)
    assert first >= {"causal", "local"} and others == [first] * len(others)


def test_workers_that_share_the_passes_pass():
    assert failed(gated_trainer(Runtime("cpu", workers=2))) == set()


# ----- where the gates look


def places_of(gate, monkeypatch, val=VAL, **changes):
    """The places that a gate looks at."""
    found = []

    def spy(trainer, step, val, places, rng):
        found.extend(places)
        return True

    monkeypatch.setattr(train_gpt, "depends_on_kept_alone", spy)
    monkeypatch.setattr(train_gpt, "GATE_PLACES", GATE_PLACES)
    values = {"val_tokens": VAL_TOKENS, **changes}
    trainer = type("Trainer", (), {"config": tiny_config(**values)})
    assert train_gpt.GATES[gate](trainer, 4, val, 0.0)
    return found


def test_cuts_are_on_edges_and_off_them_and_others_in_each_run(monkeypatch):
    first, again, other = (places_of("causal", monkeypatch, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    for places in (first, other):
        cuts = {last - low for low, _, last in places}
        assert {0, 127, 128, 255} <= cuts <= set(range(256))
        assert {cut % 16 for cut in cuts} == set(range(16))
        assert all(low % 256 == 0 and first == 0 for low, first, _ in places)
        assert len({low for low, _, _ in places}) > 4
        # The token before a document, its first and its second.
        lasts = [last for _, _, last in places[-3:]]
        assert VAL[lasts[1]] == EOT and np.diff(lasts).tolist() == [1, 1]


def test_documents_are_kept_whole_and_alone(monkeypatch):
    """The long one stands in three passes, whose parts of it are kept up to the pass' end."""
    starts = np.flatnonzero(VAL == EOT).tolist()
    places = places_of("local", monkeypatch)
    for low, first, last in places:
        end = min([start for start in starts if start > first], default=len(VAL))
        assert first in starts and last == min(end, low + 256) - 1
        assert low <= last and first < low + 256
    assert len(set(places)) > 8 and any(first < low for low, first, _ in places)


# ----- cheating ones


def assert_caught(name, **changes):
    """Most cheats show at a few places, and all of them at as many as a run's gates look at."""
    cheat, gates = cheats.CAUGHT[name]
    for places in (4, GATE_PLACES):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_gpt, "GATE_PLACES", places)
            trainer = gated_trainer(**changes)
            cheat(trainer, patch)
            found = failed(trainer)
        if found >= gates:
            return
    raise AssertionError(f"{name} fails {found or 'nothing'} instead of {gates}")


@pytest.mark.parametrize("name", cheats.CAUGHT)
def test_a_cheat_is_caught(name):
    assert_caught(name, **INDEX, copy_reach=4096, shifted_layers=(0,))


@pytest.mark.parametrize(
    "name",
    ["attention_across_documents", "keys_shifted_from_the_document_before"]
    + ["keys_shifted_from_the_next_token", "smear_from_the_next_token"],
)
def test_a_cheat_is_caught_among_layers_of_all_kinds(name):
    assert_caught(name, **LAYERED)


def test_pairs_of_heads_that_see_the_document_before_are_caught(monkeypatch):
    """Where its start is a token and not the first of the token's two positions."""

    def prepare(self, micro_batch, phase, dtype):
        start = micro_batch.segment_start
        return {
            window: train_gpt.blocked_bias(
                start.repeat_interleave(window.positions), window.size, dtype
            )
            for window in set(phase.windows)
        }

    monkeypatch.setattr(train_gpt.BlockedAttention, "prepare", prepare)
    assert failed(gated_trainer()) == set()
    assert failed(gated_trainer(paired_layers=(0,))) == {"local"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["attention_one_ahead", "attention_across_documents", "losses_less_a_thousandth"]
    + ["losses_of_other_hidden_states", "training_that_is_taken_back"]
    + ["keys_shifted_from_the_document_before"],
)
def test_a_cheat_in_bfloat16_is_caught(name):
    """Where losses of single tokens may be off by much more."""
    assert_caught(name, dtype="bfloat16", shifted_layers=(0,))


def test_one_place_shows_what_a_model_remembers_of_it(monkeypatch):
    """In a long text no place is likely to be looked at twice."""
    for cheat, is_honest in (
        (lambda *words: None, True),
        (cheats.what_was_here_when_the_place_was_scored_before, False),
    ):
        trainer = gated_trainer()
        cheat(trainer, monkeypatch)
        trainer.evaluate(4, VAL)
        places, rng = [(256, 0, 300)], np.random.default_rng(0)
        found = train_gpt.depends_on_kept_alone(trainer, 4, VAL, places, rng)
        assert found == is_honest


def test_look_ahead_far_into_a_document_is_caught_where_there_is_one(monkeypatch):
    """Copies that look ahead from a document's second stretch on: without so long a document no
    validation loss is any better for it."""
    honest = train_gpt.Text.find_copies

    def find_copies(self, start, number):
        copies = honest(self, start, number)
        if number:
            low = start + number * train_gpt.STRETCH
            following = self.tokens[low + 1 : low + 1 + len(copies)]
            copies[: len(following), 0] = following
        return copies

    monkeypatch.setattr(train_gpt.Text, "find_copies", find_copies)
    assert failed(gated_trainer()) == set()
    monkeypatch.setattr(train_gpt, "STRETCH", 200)
    assert failed(gated_trainer()) == {"causal", "local"}


def test_workers_that_see_each_others_passes_are_caught():
    trainer = gated_trainer(Runtime("cpu", workers=2))
    latest = torch.zeros(trainer.config.model_dim)

    def extra(window, micro_batch):
        seen = latest.clone()
        latest.copy_(cheats.embedding(trainer, micro_batch.targets[-1]))
        return seen[None]

    cheats.see(trainer, extra)
    assert "normalised" in failed(trainer)


@pytest.mark.parametrize("name", cheats.PASSING)
def test_what_the_gates_let_pass(name, monkeypatch):
    """For a reviewer: these are real, since the loss is another one, and no gate sees them."""
    cheat, why = cheats.PASSING[name]
    trainer = gated_trainer(**INDEX)
    honest = trainer.evaluate(4, VAL)
    cheat(trainer, monkeypatch, VAL)
    assert failed(trainer) == set(), f"caught now, though {why}"
    assert trainer.evaluate(4, VAL) != honest


# ----- in a run


def test_a_failed_gate_is_logged_and_fails_the_run(tiny, cli, monkeypatch, capsys, tmp_path):
    cheats.rows_of_the_next_token(None, monkeypatch)
    with pytest.raises(RuntimeError, match="causal"):
        cli(**{**tiny, "run_id": "leaky"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("status:error ") and "causal" in lines[-1]
    verdicts = "validity: causal:FAILED normalised:ok local:FAILED unmoved:ok "
    assert any(line.startswith(verdicts) for line in lines)
    assert (tmp_path / "logs/leaky/log.txt").read_text().splitlines()[-1] == lines[-1]
    result = json.loads((tmp_path / "logs/leaky/result.json").read_text())
    assert result["validity"] == {
        "causal": False,
        "normalised": True,
        "local": False,
        "unmoved": True,
    }


def test_a_validation_that_trains_ends_the_run(tiny, cli, monkeypatch, capsys):
    """An earlier one, too: the gates at the end would see an honest model."""
    honest, calls = train_gpt.Trainer.evaluate, []

    def evaluate(self, step, val):
        loss = honest(self, step, val)
        if not calls:
            self.model.head.data.mul_(1.01)
        calls.append(step)
        return loss

    monkeypatch.setattr(train_gpt.Trainer, "evaluate", evaluate)
    with pytest.raises(RuntimeError, match="validation has changed"):
        cli(**{**tiny, "run_id": "learns", "val_every": 2})
    assert calls == [2]


def test_a_model_may_read_the_training_text():
    """The table is not much else. When a run reads it, and whether its clock runs then, is for a
    reviewer."""
    trainer = gated_trainer()
    before = trainer.evaluate(4, VAL)
    known = cheats.followers(byte_documents(5000, seed=7))

    def extra(window, micro_batch):
        guesses = [known.get(gram, EOT) for gram in cheats.grams(window)]
        return cheats.embedding(trainer, torch.tensor(guesses))

    cheats.see(trainer, extra)
    assert failed(trainer) == set() and trainer.evaluate(4, VAL) != before
