"""Models that cheat, with the gates that catch each, and those that no gate can catch.

A cheat is a function of a Trainer, which it makes cheat; what it patches beside it is undone by
pytest's monkeypatch.
"""

import dataclasses
import math

import numpy as np
import torch
import torch.nn.functional as F

import train_gpt
from helpers import EOT

CAUGHT = {}  # {name: (cheat, gates that it fails, by whatever chance others as well)}
PASSING = {}  # {name: (cheat, why)}


def caught_by(*gates):
    """Enter a function of (trainer, monkeypatch) that makes the model cheat."""

    def enter(cheat):
        CAUGHT[cheat.__name__] = cheat, set(gates)
        return cheat

    return enter


def passes_because(why):
    """Enter a cheat, a function of (trainer, monkeypatch, val), that all gates let pass."""

    def enter(cheat):
        PASSING[cheat.__name__] = cheat, why
        return cheat

    return enter


# ----- what they are made of


def see(trainer, extra):
    """Every layer receives extra(window, micro_batch), (T, model_dim), with the table's rows."""
    honest = trainer.read

    def read(window):
        micro_batch, ngram = honest(window)
        return micro_batch, ngram + extra(window, micro_batch).to(ngram.dtype)

    trainer.read = read


def see_target_where(trainer, condition):
    """Every layer receives the target where condition(position) is true."""

    def extra(window, micro_batch):
        return embedding(trainer, micro_batch.targets) * condition(positions(micro_batch))

    see(trainer, extra)


def see_follower(trainer, source):
    """Every layer receives what has followed the last three tokens in source(window), an earlier
    piece of the text; nothing where they are not in it."""

    def extra(window, micro_batch):
        known = followers(source(window))
        guesses = [known.get(gram, EOT) for gram in grams(window)]
        return embedding(trainer, torch.tensor(guesses))

    see(trainer, extra)


def followers(tokens):
    """{three tokens: the one behind them, where they stood last}"""
    tokens = list(map(int, tokens))
    return {tuple(tokens[i - 3 : i]): tokens[i] for i in range(3, len(tokens))}


def grams(window):
    """The last three tokens of the document at each place of a window."""
    text, found = window.text, []
    for low, high in window.spans:
        start = text.starts[text.starts <= low][-1]
        tokens = [EOT, EOT, *text.tokens[start:high].tolist()]
        found += [tuple(tokens[i : i + 3]) for i in range(low - start, high - start)]
    return found


def as_losses(trainer, change):
    """The forward pass returns change(losses, logits, targets) for its losses."""

    def forward(*inputs):
        loss, losses, hidden = trainer.model(*inputs)
        return loss, change(losses, trainer.model.logits(hidden), inputs[0].targets), hidden

    trainer.forward = forward


def as_mean(trainer, mean):
    """`evaluate` returns mean(losses (passes, T))."""

    def evaluate(step, val):
        text, config = train_gpt.Text(val, trainer.config), trainer.config
        lows = range(0, config.val_tokens, config.val_batch_tokens)
        losses = torch.stack([trainer.score(step, text, low)[0] for low in lows])
        return mean(losses.double()).item()

    trainer.evaluate = evaluate


def attention_ahead(trainer, reach):
    """Queries see the keys of their document up to reach(i) positions ahead."""
    back_end = trainer.model.back_end
    back_end.prepare = lambda micro_batch, phase, dtype: micro_batch.segment_start

    def attend(q, k, v, segment_start, window, scale):
        index = torch.arange(len(q))
        is_before = index <= (index + reach(index))[:, None]
        is_near = (index > index[:, None] - window.size) & (index >= segment_start[:, None])
        scores = torch.einsum("ihd,jhd->hij", q.float(), k.float()) * scale
        weights = scores.masked_fill(~(is_before & is_near), -math.inf).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, v.float()).to(v.dtype)

    back_end.attend = attend


def embedding(trainer, ids):
    return F.embedding(ids, trainer.model.embed)


def positions(micro_batch):
    return torch.arange(len(micro_batch.inputs))[:, None]


# ----- models that see later tokens


@caught_by("causal", "local")
def attention_sixty_ahead(trainer, monkeypatch):
    attention_ahead(trainer, lambda index: 60)


@caught_by("causal", "local")
def attention_one_ahead(trainer, monkeypatch):
    attention_ahead(trainer, lambda index: 1)


@caught_by("causal")
def attention_one_ahead_at_multiples_of_64(trainer, monkeypatch):
    attention_ahead(trainer, lambda index: (index % 64 == 0).long())


@caught_by("causal")
def attention_one_ahead_at_every_eighth_position(trainer, monkeypatch):
    attention_ahead(trainer, lambda index: (index % 8 == 3).long())


@caught_by("causal", "local")
def inputs_are_the_targets(trainer, monkeypatch):
    def forward(micro_batch, *rest):
        changed = dataclasses.replace(micro_batch, inputs=micro_batch.targets.int())
        return trainer.model(changed, *rest)

    trainer.forward = forward


@caught_by("causal", "local")
def target_at_odd_positions(trainer, monkeypatch):
    see_target_where(trainer, lambda position: position % 2)


@caught_by("causal")
def target_at_the_last_position(trainer, monkeypatch):
    last = trainer.config.val_batch_tokens - 1
    see_target_where(trainer, lambda position: position == last)


@caught_by("causal", "local")
def embeddings_of_a_later_block(trainer, monkeypatch):
    def extra(window, micro_batch):
        return embedding(trainer, micro_batch.inputs).roll(-64, 0)

    see(trainer, extra)


@caught_by("causal", "local")
def smear_from_the_next_token(trainer, monkeypatch):
    honest = F.pad

    def pad(x, widths, *rest):
        return honest(x, (0, 0, -1, 1) if tuple(widths) == (0, 0, 1, -1) else widths, *rest)

    monkeypatch.setattr(train_gpt.F, "pad", pad)


@caught_by("causal", "local")
def keys_shifted_from_the_next_token(trainer, monkeypatch):
    honest = train_gpt.shifted

    def shifted(k, is_first):
        return honest(k.roll(-2, 0), torch.zeros_like(is_first))

    monkeypatch.setattr(train_gpt, "shifted", shifted)


@caught_by("causal", "local")
def rows_of_the_next_token(trainer, monkeypatch):
    honest = train_gpt.table_rows

    def table_rows(*words):
        rows, signs = honest(*words)
        return np.roll(rows, -1, axis=0), np.roll(signs, -1, axis=0)

    monkeypatch.setattr(train_gpt, "table_rows", table_rows)


@caught_by("causal", "local")
def copies_from_behind(trainer, monkeypatch):
    """What follows the next occurrence of the last three tokens."""

    def extra(window, micro_batch):
        tokens, low = window.text.tokens.tolist(), window.spans[0][0]
        known, guesses = {}, []
        for at in range(len(tokens) - 2, low - 1, -1):  # from the end of the text
            gram = tuple(tokens[max(at - 2, 0) : at + 1])
            guesses.append(known.get(gram, EOT))
            known[gram] = tokens[at + 1]
        guesses = guesses[::-1][: len(micro_batch.inputs)]
        return embedding(trainer, torch.tensor(guesses))

    see(trainer, extra)


@caught_by("causal")
def the_next_token_begins_a_document(trainer, monkeypatch):
    def extra(window, micro_batch):
        return (micro_batch.targets == EOT).float()[:, None]

    see(trainer, extra)


@caught_by("causal", "local")
def tokens_left_in_the_document(trainer, monkeypatch):
    def extra(window, micro_batch):
        position, bounds = positions(micro_batch), micro_batch.segment_bounds
        ends = bounds[torch.searchsorted(bounds, position[:, 0], right=True)]
        return (ends[:, None] - position) / 100

    see(trainer, extra)


@caught_by("causal", "local")
def only_tokens_that_occur_are_probable(trainer, monkeypatch):
    logits, occurs = trainer.model.logits, torch.zeros(EOT + 1, dtype=torch.bool)

    def forward(micro_batch, *rest):
        occurs.zero_()[micro_batch.targets] = True
        loss, _, hidden = trainer.model(micro_batch, *rest)
        own = trainer.model.logits(hidden)
        return loss, F.cross_entropy(own, micro_batch.targets, reduction="none"), hidden

    trainer.model.logits = lambda hidden: logits(hidden).masked_fill(~occurs, -math.inf)
    trainer.forward = forward


@caught_by("causal", "local", "normalised")
def softmax_over_rows_that_the_targets_decide(trainer, monkeypatch):
    """Training's softmax over a sample of the vocabulary, in evaluation too."""
    honest = train_gpt.evaluation_phase

    def phase(*words):
        return honest(*words)._replace(softmax_rows=160)

    monkeypatch.setattr(train_gpt, "evaluation_phase", phase)


@caught_by("causal", "local")
def target_if_the_text_is_as_long_as_the_validation_text(trainer, monkeypatch):
    def extra(window, micro_batch):
        is_it = len(window.text.tokens) == trainer.config.val_tokens + 1
        return embedding(trainer, micro_batch.targets) * is_it

    see(trainer, extra)


@caught_by("causal", "local")
def target_unless_there_is_noise(trainer, monkeypatch):
    def extra(window, micro_batch):
        low, high = window.spans[0][0], window.spans[-1][1]
        is_text = (window.text.tokens[low : high + 1] < 128).mean() > 0.9
        return embedding(trainer, micro_batch.targets) * is_text

    see(trainer, extra)


@caught_by("causal", "local")
def what_was_here_when_the_place_was_scored_before(trainer, monkeypatch):
    """In its second evaluation a model like this has seen all targets."""
    seen = torch.full((trainer.config.val_tokens,), EOT)

    def extra(window, micro_batch):
        here = slice(window.spans[0][0], window.spans[-1][1])
        remembered = embedding(trainer, seen[here])
        seen[here] = micro_batch.targets
        return remembered

    see(trainer, extra)


# ----- models that see other documents


@caught_by("local")
def attention_across_documents(trainer, monkeypatch):
    honest = train_gpt.blocked_bias

    def blocked_bias(segment_start, *rest):
        return honest(torch.zeros_like(segment_start), *rest)

    monkeypatch.setattr(train_gpt, "blocked_bias", blocked_bias)


@caught_by("local")
def keys_shifted_from_the_document_before(trainer, monkeypatch):
    honest = train_gpt.shifted
    monkeypatch.setattr(
        train_gpt, "shifted", lambda k, is_first: honest(k, torch.zeros_like(is_first))
    )


@caught_by("local")
def n_grams_that_reach_into_the_document_before(trainer, monkeypatch):
    honest = train_gpt.rolling_hash
    monkeypatch.setattr(
        train_gpt, "rolling_hash", lambda tokens, order, eot: honest(tokens, order, EOT + 1)
    )


@caught_by("local")
def copies_from_all_documents_before(trainer, monkeypatch):
    class OneDocument(train_gpt.Text):
        def __init__(self, tokens, config):
            super().__init__(tokens, config)
            self.all_starts, self.starts = self.starts, self.starts[:1]

    def contiguous_window(text, low, length):
        starts = [start for start in text.all_starts.tolist() if low < start < low + length]
        edges = [low, *starts, low + length]
        return train_gpt.TokenWindow(text, list(zip(edges, edges[1:], strict=False)))

    monkeypatch.setattr(train_gpt, "Text", OneDocument)
    monkeypatch.setattr(train_gpt, "contiguous_window", contiguous_window)


@caught_by("local")
def mean_of_all_earlier_tokens(trainer, monkeypatch):
    def extra(window, micro_batch):
        total = embedding(trainer, micro_batch.inputs).float().cumsum(0)
        return total / (1 + positions(micro_batch))

    see(trainer, extra)


@caught_by("local")
def what_followed_where_a_document_began_alike(trainer, monkeypatch):
    """After its first twelve tokens, as after a licence."""

    def extra(window, micro_batch):
        tokens = micro_batch.inputs.tolist()
        found, known = torch.zeros(len(tokens), trainer.config.model_dim), {}
        for start in range(len(tokens) - 12):
            beginning = tuple(tokens[start : start + 12])
            if tokens[start] == EOT:
                if beginning in known:
                    found[start + 11] = embedding(trainer, known[beginning])
                known[beginning] = micro_batch.inputs[start + 12]
        return found

    see(trainer, extra)


@caught_by("local")
def what_followed_before_the_micro_batch(trainer, monkeypatch):
    see_follower(trainer, lambda window: window.text.tokens[: window.spans[0][0] + 1])


@caught_by("local")
def what_followed_in_earlier_whole_micro_batches(trainer, monkeypatch):
    """As an index would say that goes on reading; the micro-batch just before is not read yet."""
    length = trainer.config.val_batch_tokens

    def source(window):
        return window.text.tokens[: max(0, window.spans[0][0] - length) + 1]

    see_follower(trainer, source)


@caught_by("local")
def what_followed_far_back(trainer, monkeypatch):
    see_follower(trainer, lambda window: window.text.tokens[: max(0, window.spans[0][0] - 700)])


@caught_by("causal", "local")
def norm_over_the_micro_batch(trainer, monkeypatch):
    def norm(x):
        return x * x.float().square().mean().rsqrt().to(x.dtype)

    monkeypatch.setattr(train_gpt, "norm", norm)


# ----- models that pass something on from one pass to the next


@caught_by("causal", "local", "normalised")
def state_of_the_pass_before(trainer, monkeypatch):
    """Ranks that share the passes would score others."""
    state = torch.zeros(trainer.config.model_dim)

    def forward(micro_batch, ngram, *rest):
        outputs = trainer.model(micro_batch, ngram + state.to(ngram.dtype), *rest)
        state.copy_(outputs[2].float().mean(0))
        return outputs

    trainer.forward = forward


@caught_by("normalised")
def state_of_the_text_before(trainer, monkeypatch):
    """Where a pass goes on in the text: it has looked at earlier tokens only, but in this order."""
    state, honest = torch.zeros(trainer.config.model_dim), trainer.score
    ends = [-1]

    def score(step, text, low):
        goes_on = ends[-1] == low
        ends.append(low + trainer.config.val_batch_tokens)

        def forward(micro_batch, ngram, *rest):
            return trainer.model(micro_batch, ngram + goes_on * state.to(ngram.dtype), *rest)

        trainer.forward = forward
        losses, hidden = honest(step, text, low)
        state.copy_(hidden.float().mean(0))
        return losses, hidden

    trainer.score = score


@caught_by("causal", "local", "normalised")
def cache_of_what_was_scored(trainer, monkeypatch):
    known = {}

    def extra(window, micro_batch):
        guesses = [known.get(gram, EOT) for gram in grams(window)]
        known.update(zip(grams(window), micro_batch.targets.tolist(), strict=True))
        return embedding(trainer, torch.tensor(guesses))

    see(trainer, extra)


@caught_by("causal", "local", "normalised", "unmoved")
def index_that_goes_on_reading(trainer, monkeypatch):
    """Each pass is read when it has been scored."""
    honest = trainer.score

    def score(step, text, low):
        result = honest(step, text, low)
        trainer.table.index.read(text.tokens[low : low + trainer.config.val_batch_tokens + 1])
        return result

    trainer.score = score


def learn(trainer, text, low, hidden):
    """A step on the targets of a pass that has been scored."""
    targets = torch.from_numpy(text.tokens[low + 1 : low + 1 + len(hidden)].astype(np.int64))
    trainer.model.head.data.index_add_(0, targets, 0.01 * hidden)


@caught_by("causal", "local", "normalised", "unmoved")
def training_on_what_was_scored(trainer, monkeypatch):
    honest = trainer.score

    def score(step, text, low):
        losses, hidden = honest(step, text, low)
        learn(trainer, text, low, hidden)
        return losses, hidden

    trainer.score = score


def evaluation_that_learns(trainer, every):
    """`evaluate` trains after each k-th pass, and takes it back at its end."""

    def evaluate(step, val):
        config, before = trainer.config, trainer.model.head.data.clone()
        text, total = train_gpt.Text(val, config), 0.0
        for low in range(0, config.val_tokens, config.val_batch_tokens):
            losses, hidden = trainer.score(step, text, low)
            total += losses.double().sum().item()
            if low // config.val_batch_tokens % every == 0:
                learn(trainer, text, low, hidden)
        trainer.model.head.data.copy_(before)
        return total / config.val_tokens

    trainer.evaluate = evaluate


@caught_by("normalised")
def training_that_is_taken_back(trainer, monkeypatch):
    evaluation_that_learns(trainer, every=1)


@caught_by("normalised")
def rare_training_that_is_taken_back(trainer, monkeypatch):
    evaluation_that_learns(trainer, every=5)


@caught_by("normalised")
def losses_no_worse_than_those_of_the_first_passes(trainer, monkeypatch):
    seen = []

    def change(losses, logits, targets):
        seen.append(losses.mean())
        return losses.clamp(max=max(seen[:2]).item())

    as_losses(trainer, change)


# ----- losses that are not those of a distribution


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


@caught_by("normalised")
def line_ends_cost_nothing(trainer, monkeypatch):
    as_losses(trainer, lambda losses, logits, targets: losses * (targets != ord("\n")))


@caught_by("causal", "local", "normalised")
def worst_hundredth_of_the_losses_is_zero(trainer, monkeypatch):
    as_losses(trainer, lambda losses, logits, targets: losses * (losses < losses.quantile(0.99)))


@caught_by("normalised")
def normaliser_of_a_part_of_the_vocabulary(trainer, monkeypatch):
    def change(losses, logits, targets):
        return losses - logits.logsumexp(-1) + logits[:, :EOT].logsumexp(-1)

    as_losses(trainer, change)


@caught_by("normalised")
def temperature_that_suits_the_target(trainer, monkeypatch):
    def change(losses, logits, targets):
        of = [F.cross_entropy(logits / heat, targets, reduction="none") for heat in (0.5, 1, 2)]
        return torch.stack(of).amin(0)

    as_losses(trainer, change)


@caught_by("normalised")
def losses_of_other_hidden_states(trainer, monkeypatch):
    def change(losses, logits, targets):
        nearer = logits + F.one_hot(targets, EOT + 1)
        return F.cross_entropy(nearer, targets, reduction="none")

    as_losses(trainer, change)


@caught_by("normalised")
def losses_of_the_tokens_themselves(trainer, monkeypatch):
    """What stands at a position, which the model has read, in place of what follows."""

    def forward(micro_batch, *rest):
        own = dataclasses.replace(micro_batch, targets=micro_batch.inputs.long())
        return trainer.model(own, *rest)

    trainer.forward = forward


@caught_by("causal", "local", "normalised")
def losses_in_another_order(trainer, monkeypatch):
    """The mean is right, but no loss is where it belongs: nothing else could be said of them."""
    as_losses(trainer, lambda losses, logits, targets: losses.roll(1))


@caught_by("causal", "local")
def a_constant(trainer, monkeypatch):
    """Honest, but a forward pass that forgets the tokens looks like it."""
    trainer.model.head.data.zero_()


# ----- means that are not those of the losses


@caught_by("normalised")
def nine_tenths_if_all_tokens_are_asked_for(trainer, monkeypatch):
    as_mean(trainer, lambda losses: 0.9 * losses.mean())


@caught_by("normalised")
def one_per_cent_less_behind_the_first_two_passes(trainer, monkeypatch):
    as_mean(trainer, lambda losses: (losses.sum() - 0.01 * losses[2:].sum()) / losses.numel())


@caught_by("normalised")
def mean_less_a_millionth(trainer, monkeypatch):
    """No gain, but this mean is not that of the losses, which come out the same each time."""
    as_mean(trainer, lambda losses: losses.mean() - 1e-6)


@caught_by("normalised")
def mean_without_the_worst_pass(trainer, monkeypatch):
    as_mean(trainer, lambda losses: losses.mean(1).sort().values[:-1].mean())


@caught_by("normalised")
def mean_without_the_first_tokens(trainer, monkeypatch):
    as_mean(trainer, lambda losses: losses.flatten()[16:].mean())


@caught_by("normalised")
def mean_that_weights_good_losses_more(trainer, monkeypatch):
    def mean(losses):
        weights = torch.exp(-0.01 * losses)
        return (losses * weights).sum() / weights.sum()

    as_mean(trainer, mean)


# ----- cheats that pass


@passes_because("the index holds the validation text, and what it was told is its own business")
def index_that_has_read_the_validation_text(trainer, monkeypatch, val):
    trainer.table.index.read(val)


@passes_because("an earlier evaluation has told it this text, by what is no tensor of the state")
def memory_of_an_earlier_evaluation(trainer, monkeypatch, val):
    known = followers(val)

    def extra(window, micro_batch):
        return embedding(trainer, torch.tensor([known.get(gram, EOT) for gram in grams(window)]))

    see(trainer, extra)


@passes_because("one number of the distribution is chosen by the text, the same way each time")
def temperature_fitted_to_the_validation_text(trainer, monkeypatch, val):
    heat, logits, honest = [1.0], trainer.model.logits, trainer.evaluate
    trainer.model.logits = lambda hidden: logits(hidden) / heat[0]

    def change(losses, logits, targets):
        return F.cross_entropy(logits, targets, reduction="none")

    def evaluate(step, val):
        def loss_at(temperature):
            heat[0] = temperature
            return honest(step, val)

        heat[0] = min((0.5, 1.0, 2.0, 4.0), key=loss_at)
        return honest(step, val)

    as_losses(trainer, change)
    trainer.evaluate = evaluate
