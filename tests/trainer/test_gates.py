"""Chapter 7: the validity gates, honest models that pass them, and cheating ones with the gates that catch them.

All weights are random: in a model that has not been trained, gates and projections of zero would hide what it sees."""
import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt
from helpers import EOT, byte_documents, make_trainer, tiny_config

VAL = np.asarray(byte_documents(1100), dtype=np.uint16)


def failed(trainer, val=VAL):
    """The names of the gates that a trainer does not pass."""
    return {name for name, gate in train_gpt.GATES.items() if not gate(trainer, trainer.config.steps, val)}


# ----- honest models

@pytest.mark.parametrize("changes", [
    {}, {"dtype": "bfloat16"}, {"ngram_orders": ()}, {"untie_at": 0.5}, {"untie_at": 1.0, "dtype": "bfloat16"},
    {"mtp_weights": ((0.0, (1.0, 0.5)),)}, {"num_layers": 1, "long_layers": (0,)}, {"seed": 2}, {"ngram_rows": 3},
    {"micro_batch_tokens": 64}, {"micro_batch_tokens": 32, "windows": ((0.0, (16, 32)),)}, {"val_tokens": 256},
], ids=str)
def test_an_honest_model_passes_the_gates(changes):
    assert failed(make_trainer(**changes)) == set()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_honest_compiled_model_passes_the_gates(dtype):
    trainer = make_trainer(dtype=dtype)
    trainer.forward = torch.compile(trainer.model, backend="aot_eager", dynamic=False)
    assert failed(trainer) == set()
    torch._dynamo.reset()


@pytest.mark.parametrize("val", [[EOT, *range(1, 65)], range(1, 66), [EOT, EOT, EOT, *range(1, 63)]],
                         ids=["one document", "no document begins", "documents of one token"])
def test_gates_work_on_few_and_short_documents(val):
    assert failed(make_trainer(micro_batch_tokens=64, val_tokens=64), np.asarray(val, dtype=np.uint16)) == set()


def test_cuts_are_on_edges_and_off_them_and_others_in_each_run(monkeypatch):
    monkeypatch.setattr(train_gpt, "unaffected", lambda trainer, step, tokens, low, spans: [
        end - low - 1 for start, end in spans])
    first, again, other = (train_gpt.check_causal(SimpleNamespace(
        config=tiny_config(micro_batch_tokens=1024, seed=seed)), 4, VAL) for seed in (1, 1, 2))
    assert first == again != other
    for cuts in (first, other):
        assert {0, 340, 511, 512, 1023} <= set(cuts) <= set(range(1024))
        assert {cut % 16 for cut in cuts} == set(range(16)) and len(set(cuts)) >= 16


def test_a_failed_gate_fails_the_run(tiny, cli, monkeypatch, capsys):
    rows_of_the_next_token(None, monkeypatch)
    with pytest.raises(RuntimeError, match="causal"):
        cli(**{**tiny, "run_id": "leaky"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("status:error ") and "causal" in lines[-1]
    assert any(line.startswith("validity: causal:FAILED normalised:ok local:FAILED ") for line in lines)


# ----- what cheating models are made of

CHEATS = {}


def caught_by(*gates):
    """Enter a function of (trainer, monkeypatch) that makes the model cheat, and the gates that it then fails."""
    def enter(cheat):
        CHEATS[cheat.__name__] = cheat, set(gates)
        return cheat
    return enter


def into_the_residual_stream(trainer, extra):
    """Every layer receives extra(micro_batch), (T, model_dim), with the n-gram rows."""
    trainer.forward = lambda micro_batch, ngram, context: trainer.model(
        micro_batch, ngram + extra(micro_batch).to(ngram.dtype), context)


def rows_of(monkeypatch, change):
    """The table's rows are those of change(place), another Placement."""
    honest = train_gpt.Trainer.read
    monkeypatch.setattr(train_gpt.Trainer, "read", lambda self, place: (
        honest(self, place)[0], honest(self, change(place))[1]))


def as_losses(trainer, change):
    """The forward pass returns change(losses, logits, targets) for its losses."""
    def forward(*inputs):
        loss, losses, hidden = trainer.model(*inputs)
        return loss, change(losses, trainer.model.logits(hidden), inputs[0].targets), hidden
    trainer.forward = forward


def attention_ahead(trainer, reach):
    """Queries see the keys of their document up to reach(i) positions ahead."""
    def attend(q, k, v, micro_batch, cap, bias, window, scale):
        index = torch.arange(len(q))
        visible = ((index <= (index + reach(index))[:, None]) & (index > index[:, None] - window)
                   & (index >= micro_batch.segment_start[:, None]))
        scores = torch.einsum("ihd,jhd->hij", q.float(), k.float()) * scale
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, v.float()).to(v.dtype)
    trainer.model.attend = attend


def embedding(trainer, ids):
    return F.embedding(ids, trainer.model.embed)


def positions(micro_batch):
    return torch.arange(len(micro_batch.inputs))[:, None]


# ----- models that see later tokens

@caught_by("causal", "local")
def attention_one_ahead(trainer, monkeypatch):
    attention_ahead(trainer, lambda index: 1)


@caught_by("causal", "local")
def attention_sixty_ahead(trainer, monkeypatch):
    attention_ahead(trainer, lambda index: 60)


@caught_by("causal", "local")
def attention_one_ahead_but_at_multiples_of_64(trainer, monkeypatch):
    attention_ahead(trainer, lambda index: (index % 64 > 0).long())


@caught_by("causal")
def attention_one_ahead_at_multiples_of_64(trainer, monkeypatch):
    attention_ahead(trainer, lambda index: (index % 64 == 0).long())


@caught_by("causal", "local")
def attention_one_ahead_at_every_eighth_position(trainer, monkeypatch):
    attention_ahead(trainer, lambda index: (index % 8 == 3).long())


@caught_by("causal", "local")
def inputs_are_the_targets(trainer, monkeypatch):
    trainer.forward = lambda micro_batch, *rest: trainer.model(
        dataclasses.replace(micro_batch, inputs=micro_batch.targets.int()), *rest)


@caught_by("causal", "local")
def targets_at_odd_positions(trainer, monkeypatch):
    into_the_residual_stream(trainer, lambda batch: embedding(trainer, batch.targets) * (positions(batch) % 2))


@caught_by("causal", "local")
def target_at_the_last_position(trainer, monkeypatch):
    into_the_residual_stream(trainer, lambda batch: embedding(trainer, batch.targets) * (positions(batch) == 255))


@caught_by("causal", "local")
def embeddings_of_a_later_block(trainer, monkeypatch):
    into_the_residual_stream(trainer, lambda batch: embedding(trainer, batch.inputs).roll(-64, 0))


@caught_by("causal")
def smear_from_the_next_token(trainer, monkeypatch):
    pad = F.pad
    monkeypatch.setattr(train_gpt.F, "pad", lambda x, widths, *rest: pad(
        x, (0, 0, -1, 1) if tuple(widths) == (0, 0, 1, -1) else widths, *rest))


@caught_by("causal", "local")
def rows_of_the_next_token(trainer, monkeypatch):
    rows_of(monkeypatch, lambda place: place._replace(
        position=np.minimum(place.position + 1, len(place.text.tokens) - 2)))


@caught_by("causal")
def the_next_token_begins_a_document(trainer, monkeypatch):
    into_the_residual_stream(trainer, lambda batch: (batch.targets == EOT).float()[:, None])


@caught_by("causal", "local")
def tokens_left_in_the_document(trainer, monkeypatch):
    def left(batch):
        ends = batch.segment_bounds[torch.searchsorted(batch.segment_bounds, positions(batch)[:, 0], right=True)]
        return (ends[:, None] - positions(batch)) / 100
    into_the_residual_stream(trainer, left)


@caught_by("causal", "local")
def only_tokens_that_occur_are_probable(trainer, monkeypatch):
    logits, occurs = trainer.model.logits, torch.zeros(EOT + 1, dtype=torch.bool)

    def forward(micro_batch, *rest):
        occurs.zero_()[micro_batch.targets] = True
        loss, _, hidden = trainer.model(micro_batch, *rest)
        return loss, F.cross_entropy(trainer.model.logits(hidden), micro_batch.targets, reduction="none"), hidden
    monkeypatch.setattr(trainer.model, "logits", lambda hidden: logits(hidden).masked_fill(~occurs, -math.inf))
    trainer.forward = forward


# ----- models that see other documents

@caught_by("local")
def attention_across_documents(trainer, monkeypatch):
    honest = train_gpt.blocked_bias
    monkeypatch.setattr(train_gpt, "blocked_bias", lambda start, *rest: honest(torch.zeros_like(start), *rest))


@caught_by("local")
def rows_that_read_into_the_document_before(trainer, monkeypatch):
    def change(place):
        text = train_gpt.Text(place.text.tokens, trainer.config)
        text.starts = text.starts[:1]
        return place._replace(text=text)
    rows_of(monkeypatch, change)


@caught_by("local")
def mean_of_all_earlier_tokens(trainer, monkeypatch):
    into_the_residual_stream(trainer, lambda batch: embedding(trainer, batch.inputs).float().cumsum(0)
                             / (1 + positions(batch)))


@caught_by("local")
def what_followed_where_a_document_began_alike(trainer, monkeypatch):
    """After its first twelve tokens, as after a licence: found only if the gate has documents that begin alike."""
    def found(batch):
        tokens, extra, followers = batch.inputs.tolist(), torch.zeros(len(batch.inputs), trainer.config.model_dim), {}
        for start in range(len(tokens) - 12):
            if tokens[start] == EOT:
                beginning = tuple(tokens[start:start + 12])
                if beginning in followers:
                    extra[start + 11] = embedding(trainer, followers[beginning])
                followers[beginning] = batch.inputs[start + 12]
        return extra
    into_the_residual_stream(trainer, found)


@caught_by("causal", "local")
def norm_over_the_micro_batch(trainer, monkeypatch):
    monkeypatch.setattr(train_gpt, "norm", lambda x, *turns: x * x.float().square().mean().rsqrt().to(x.dtype))


# ----- models that pass something on from one micro-batch to the next

@caught_by("causal", "local", "normalised")
def state_of_the_micro_batch_before(trainer, monkeypatch):
    """Not what a reader of the file would expect, and ranks that share the micro-batches would score others."""
    state = torch.zeros(trainer.config.model_dim)

    def forward(micro_batch, ngram, context):
        outputs = trainer.model(micro_batch, ngram + state.to(ngram.dtype), context)
        state.copy_(outputs[2].float().mean(0))
        return outputs
    trainer.forward = forward


@caught_by("normalised")
def state_of_the_text_before(trainer, monkeypatch):
    """The same where the micro-batch goes on in the text: it looks at earlier tokens only, yet depends on the order."""
    state, honest = torch.zeros(trainer.config.model_dim), trainer.read

    def read(place):
        read.goes_on = place.position[0] == read.end
        read.end = place.position[-1] + 1
        return honest(place)

    def forward(micro_batch, ngram, context):
        outputs = trainer.model(micro_batch, ngram + state.to(ngram.dtype) * read.goes_on, context)
        state.copy_(outputs[2].float().mean(0))
        return outputs
    read.end = -1
    trainer.read, trainer.forward = read, forward


# ----- losses that are not those of a distribution, and means that are not those of the losses

@caught_by("normalised")
def losses_times_nine_tenths(trainer, monkeypatch):
    as_losses(trainer, lambda losses, logits, targets: 0.9 * losses)


@caught_by("normalised")
def losses_less_a_thousandth(trainer, monkeypatch):
    as_losses(trainer, lambda losses, logits, targets: losses - 1e-3)


@caught_by("normalised")
def losses_of_six_at_most(trainer, monkeypatch):
    """As two would be of a trained model; random weights have losses of seven."""
    as_losses(trainer, lambda losses, logits, targets: losses.clamp(max=6))


@caught_by("causal", "local", "normalised")
def worst_hundredth_of_the_losses_is_zero(trainer, monkeypatch):
    as_losses(trainer, lambda losses, logits, targets: losses * (losses < losses.quantile(0.99)))


@caught_by("normalised")
def normaliser_of_a_part_of_the_vocabulary(trainer, monkeypatch):
    as_losses(trainer, lambda losses, logits, targets: losses - logits.logsumexp(-1) + logits[:, :EOT].logsumexp(-1))


@caught_by("normalised")
def temperature_that_suits_the_target(trainer, monkeypatch):
    as_losses(trainer, lambda losses, logits, targets: torch.stack([
        F.cross_entropy(logits / temperature, targets, reduction="none") for temperature in (0.5, 1, 2)]).amin(0))


@caught_by("normalised")
def losses_of_other_hidden_states(trainer, monkeypatch):
    as_losses(trainer, lambda losses, logits, targets: F.cross_entropy(
        logits + F.one_hot(targets, EOT + 1), targets, reduction="none"))


@caught_by("causal", "local", "normalised")
def losses_in_another_order(trainer, monkeypatch):
    """The mean is right, but no loss is where it belongs: nothing else could then be said of them."""
    as_losses(trainer, lambda losses, logits, targets: losses.roll(1))


@caught_by("causal", "local")
def a_constant(trainer, monkeypatch):
    """Honest, but a forward pass that forgets the tokens looks like it."""
    trainer.model.head.data.zero_()


def weighted_mean(monkeypatch, weights):
    """`evaluate` returns the mean loss under weights(losses)."""
    def evaluate(self, step, val):
        text = train_gpt.Text(val, self.config)
        losses = torch.cat([self.score(step, text, low)[0] for low in range(0, self.config.val_tokens, 256)])
        return (losses * weights(losses)).sum().item() / weights(losses).sum().item()
    monkeypatch.setattr(train_gpt.Trainer, "evaluate", evaluate)


@caught_by("normalised")
def mean_without_the_first_tokens(trainer, monkeypatch):
    weighted_mean(monkeypatch, lambda losses: torch.arange(len(losses)) >= 16)


@caught_by("normalised")
def mean_without_the_last_micro_batch(trainer, monkeypatch):
    weighted_mean(monkeypatch, lambda losses: torch.arange(len(losses)) < len(losses) - 256)


@caught_by("normalised")
def mean_that_weights_good_losses_more(trainer, monkeypatch):
    weighted_mean(monkeypatch, lambda losses: torch.exp(-0.01 * losses))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_caught(name, dtype, monkeypatch):
    trainer, (cheat, gates) = make_trainer(dtype=dtype), CHEATS[name]
    cheat(trainer, monkeypatch)
    assert failed(trainer) == gates


# ----- what is allowed

def test_a_model_may_read_the_training_text():
    """The n-gram table is not much else. When a run reads it, and whether its clock runs then, is for a reviewer."""
    trainer = make_trainer()
    text = torch.tensor(byte_documents(5000, seed=7))
    follower = torch.zeros(EOT + 1, dtype=torch.long)
    follower[text[:-1]] = text[1:]
    before = trainer.evaluate(4, VAL)
    into_the_residual_stream(trainer, lambda batch: embedding(trainer, follower[batch.inputs]))
    assert failed(trainer) == set() and trainer.evaluate(4, VAL) != before
