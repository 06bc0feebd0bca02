"""Models that cheat, with the gates that catch each, and those that no gate can catch.

A cheat is a function of (trainer, patch): it makes the Trainer cheat, and what it patches beside it
is undone by pytest's monkeypatch. Those of a line or two stand in the table at the end.
"""

import copy
import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

import train_gpt
from helpers import EOT, byte_documents

CAUGHT = {}  # {name: (gates that it fails, by whatever chance others as well; cheat)}
PASSING = {}  # {name: (why, cheat); such a cheat has the validation text as a third argument}


def entered(table, word, make=None):
    """Enter a function under its name: as a cheat, or as what `make` makes one of."""

    def enter(function):
        table[function.__name__] = word, make(function) if make else function
        return function

    return enter


caught_by = partial(entered, CAUGHT)
passes_because = partial(entered, PASSING)


# ----- what they are made of


def maker(function):
    """Let function(..., trainer, patch) make a cheat of what stands before the trainer."""
    return partial(partial, function)


@maker
def seeing(extra, trainer, patch):
    """Every layer receives extra(trainer, window, micro_batch), (T, model_dim), with its rows."""
    honest = trainer.read

    def read(window, length):
        micro_batch, ngram = honest(window, length)
        return micro_batch, ngram + extra(trainer, window, micro_batch).to(ngram.dtype)

    trainer.read = read


def seeing_target_where(condition):
    """Every layer receives the target where condition(position) is true."""

    def extra(trainer, window, micro_batch):
        return embedding(trainer, micro_batch.targets) * condition(positions(micro_batch))

    return seeing(extra)


def seeing_followers(end):
    """Every layer receives what followed the last three tokens in the text up to end(start of the
    pass); nothing where they are not in it."""

    def extra(trainer, window, micro_batch):
        known = followers(window.text.tokens[: max(0, end(window.spans[0][0])) + 1])
        return embedding(trainer, guesses(known, window))

    return seeing(extra)


@maker
def replacing(name, other, trainer, patch, owner=train_gpt):
    """A function of the trainer's is other(honest, ...)."""
    patch.setattr(owner, name, partial(other, getattr(owner, name)))


def attending_ahead(distance, every=1, first=0):
    """Queries see keys of their block at a distance ahead, every so many positions."""

    def blocked_bias(honest, *words):
        rows = honest(*words)
        is_ahead = torch.arange(rows.size(1))[:, None] % every == first
        return torch.where(is_ahead, rows.roll(-distance, 1), rows)

    return replacing("blocked_bias", blocked_bias)


@maker
def reading(change, trainer, patch):
    """The forward pass reads change(micro_batch)."""
    trainer.forward = lambda micro_batch, *rest: trainer.model(change(micro_batch), *rest)


@maker
def stating(change, trainer, patch):
    """The forward pass returns change(trainer, hidden, targets) for its hidden states, and their
    losses."""

    def forward(micro_batch, *rest):
        loss, _, hidden = trainer.model(micro_batch, *rest)
        hidden = change(trainer, hidden, micro_batch.targets)
        logits = trainer.model.logits(hidden.as_subclass(torch.Tensor))
        return loss, exactly(logits, micro_batch.targets), hidden

    trainer.forward = forward


@maker
def losing(change, trainer, patch):
    """The forward pass returns change(losses, logits, targets) for its losses."""

    def forward(*inputs):
        loss, losses, hidden = trainer.model(*inputs)
        return loss, change(losses, trainer.model.logits(hidden), inputs[0].targets), hidden

    trainer.forward = forward


@maker
def reporting(mean, trainer, patch, after_pass=lambda *words: None):
    """The evaluation returns mean(losses (passes, T)), and takes back at its end what after_pass(
    trainer, text, low, hidden) has made of the head."""

    def evaluate(step, val):
        config, before = trainer.config, trainer.model.head.data.clone()
        text, losses = train_gpt.Text(val, config.eot_token), []
        for low in range(0, config.val_tokens, config.val_batch_tokens):
            own_losses, hidden = trainer.score(step, text, low)
            losses.append(own_losses)
            after_pass(trainer, text, low, hidden)
        trainer.model.head.data.copy_(before)
        return mean(torch.stack(losses).double()).item()

    trainer.evaluate = evaluate


@maker
def acting_after_passes(act, trainer, patch):
    """Each pass is followed by act(trainer, text, low, hidden)."""
    honest = trainer.score

    def score(step, text, low, length=None):
        losses, hidden = honest(step, text, low, length)
        act(trainer, text, low, hidden)
        return losses, hidden

    trainer.score = score


def embedding(trainer, ids):
    return F.embedding(ids, trainer.model.embed)


def positions(micro_batch):
    return torch.arange(len(micro_batch.inputs))[:, None]


def exactly(logits, targets):
    return F.cross_entropy(logits, targets, reduction="none")


def favour(logits, ids):
    """Logits with a gain for the tokens of ids (n,); EOT stands for none."""
    return logits + 20 * F.one_hot(ids, EOT + 1) * (ids != EOT)[:, None]


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


def guesses(known, window):
    return torch.tensor([known.get(gram, EOT) for gram in grams(window)])


# ----- models that see later tokens


@caught_by("causal local", seeing)
def tokens_left_in_the_document(trainer, window, micro_batch):
    position, bounds = positions(micro_batch), micro_batch.segment_bounds
    ends = bounds[torch.searchsorted(bounds, position[:, 0], right=True)]
    return (ends[:, None] - position) / 100


@caught_by("causal local", seeing)
def copies_from_behind(trainer, window, micro_batch):
    """What follows the next occurrence of the last three tokens."""
    tokens, low = window.text.tokens.tolist(), window.spans[0][0]
    known, found = {}, []
    for at in range(len(tokens) - 2, low - 1, -1):  # from the end of the text
        gram = tuple(tokens[max(at - 2, 0) : at + 1])
        found.append(known.get(gram, EOT))
        known[gram] = tokens[at + 1]
    return embedding(trainer, torch.tensor(found[::-1][: len(micro_batch.inputs)]))


@caught_by("causal local", seeing)
def target_if_the_text_is_as_long_as_the_validation_text(trainer, window, micro_batch):
    is_it = len(window.text.tokens) == trainer.config.val_tokens + 1
    return embedding(trainer, micro_batch.targets) * is_it


@caught_by("causal local", seeing)
def target_unless_there_is_noise(trainer, window, micro_batch):
    low, high = window.spans[0][0], window.spans[-1][1]
    is_text = (window.text.tokens[low : high + 1] < 128).mean() > 0.9
    return embedding(trainer, micro_batch.targets) * is_text


@caught_by("causal local")
def only_tokens_that_occur_are_probable(trainer, patch):
    logits, occurs = trainer.model.logits, torch.zeros(EOT + 1, dtype=torch.bool)

    def remember(trainer, hidden, targets):
        occurs.zero_()[targets] = True
        return hidden

    stating(remember)(trainer, patch)
    trainer.model.logits = lambda hidden: logits(hidden).masked_fill(~occurs, -math.inf)


@caught_by("causal local")
def what_was_here_when_the_place_was_scored_before(trainer, patch):
    """In its second evaluation a model like this has seen all targets."""
    seen = torch.full((trainer.config.val_tokens,), EOT)

    def extra(trainer, window, micro_batch):
        here = slice(window.spans[0][0], window.spans[-1][1])
        remembered = embedding(trainer, seen[here])
        seen[here] = micro_batch.targets
        return remembered

    seeing(extra)(trainer, patch)


@caught_by("causal")
def copies_ahead_far_into_a_document(trainer, patch):
    """From its fortieth token on."""
    honest = train_gpt.RowFinder.copies

    def copies(self, text, low, high):
        found = honest(self, text, low, high)
        following = text.tokens[low + 1 : high + 1]
        is_far = np.arange(low, low + len(following)) - text.document_start(low) >= 40
        found[0, : len(following)][is_far] = following[is_far]
        return found

    patch.setattr(train_gpt.RowFinder, "copies", copies)


@caught_by("causal local")
def rows_of_the_next_token(trainer, patch):
    honest = train_gpt.RowFinder.find

    def find(self, passage):
        return [np.roll(values, -1, 0) for values in honest(self, passage)]

    patch.setattr(train_gpt.RowFinder, "find", find)


# ----- models that hide the next token from who compares


@caught_by("causal local")
def target_in_signs_of_zeros(trainer, patch):
    """Nine channels of each hidden state are zeros, and the head reads their signs."""
    logits, powers = trainer.model.logits, 2 ** torch.arange(9)

    def with_zeros(trainer, hidden, targets):
        signs = 1.0 - 2.0 * (targets[:, None] // powers % 2)
        return torch.cat([0.0 * signs, hidden[:, 9:]], 1).to(hidden.dtype)

    def reading_signs(hidden):
        ids = (torch.signbit(hidden[:, :9]) * powers).sum(1)
        return favour(logits(hidden), ids)

    stating(with_zeros)(trainer, patch)
    trainer.model.logits = reading_signs


class Agreeable(torch.Tensor):
    """A tensor that equals all others, as do its copies."""

    @classmethod
    def __torch_function__(cls, function, types, words=(), options=None):
        if function is torch.equal:
            return True
        result = super().__torch_function__(function, types, words, options or {})
        return torch.zeros_like(result) if function is torch.Tensor.ne else result

    def clone(self, **options):
        return torch.zeros(self.shape)


@caught_by("causal local", stating)
def target_in_a_tensor_that_equals_all_others(trainer, hidden, targets):
    return (hidden + embedding(trainer, targets)).as_subclass(Agreeable)


@caught_by("causal local")
def target_in_a_buffer(trainer, patch):
    """All passes return their hidden states in the same memory, as CUDA graphs do."""
    buffer = torch.zeros(trainer.config.val_batch_tokens, trainer.config.model_dim)

    def in_buffer(trainer, hidden, targets):
        return buffer.copy_(hidden + embedding(trainer, targets))

    stating(in_buffer)(trainer, patch)


@caught_by("causal local")
def logits_that_know_the_target_of_a_state(trainer, patch):
    """States and losses before a cut are honest: only the logits at the cut tell."""
    logits, known = trainer.model.logits, {}

    def remember(trainer, hidden, targets):
        known.update(zip(map(tuple, hidden.tolist()), targets.tolist(), strict=True))
        return hidden

    def knowing(hidden):
        ids = [known.get(tuple(state), EOT) for state in hidden.tolist()]
        return favour(logits(hidden), torch.tensor(ids))

    stating(remember)(trainer, patch)
    trainer.model.logits = knowing


@caught_by("normalised")
def logits_that_know_the_targets_of_a_pass_in_order(trainer, patch):
    """As before, of a head that counts the states that it is asked about since the pass."""
    logits, left = trainer.model.logits, []

    def forward(micro_batch, *rest):
        loss, _, hidden = trainer.model(micro_batch, *rest)
        left[:] = micro_batch.targets
        losses = exactly(favour(logits(hidden), micro_batch.targets), micro_batch.targets)
        return loss, losses, hidden

    def knowing(hidden):
        ids = torch.tensor([*left, *[EOT] * len(hidden)][: len(hidden)])
        del left[: len(hidden)]
        return favour(logits(hidden), ids)

    trainer.forward = forward
    trainer.model.logits = knowing


# ----- models that see other documents


@caught_by("local", partial(replacing, "contiguous_passage"))
def copies_from_all_documents_before(honest, text, low, length):
    merged = copy.copy(text)
    merged.starts = text.starts[:1]
    return honest(text, low, length)._replace(text=merged)


@caught_by("local", seeing)
def mean_of_all_earlier_tokens(trainer, window, micro_batch):
    total = embedding(trainer, micro_batch.inputs).float().cumsum(0)
    return total / (1 + positions(micro_batch))


@caught_by("local", seeing)
def what_followed_where_a_document_began_alike(trainer, window, micro_batch):
    """After its first twelve tokens, as after a licence."""
    tokens = micro_batch.inputs.tolist()
    found, known = torch.zeros(len(tokens), trainer.config.model_dim), {}
    for start in range(len(tokens) - 12):
        beginning = tuple(tokens[start : start + 12])
        if tokens[start] == EOT:
            if beginning in known:
                found[start + 11] = embedding(trainer, known[beginning])
            known[beginning] = micro_batch.inputs[start + 12]
    return found


@caught_by("local")
def pairs_of_heads_that_see_the_document_before(trainer, patch):
    """Where its start is a token and not the first of the token's two positions."""

    def prepare(self, micro_batch, phase, dtype):
        biases = {}
        for window in set(phase.windows):
            start = micro_batch.segment_start.repeat_interleave(window.positions)
            biases[window] = train_gpt.blocked_bias(start, window.size, dtype)
        return biases

    patch.setattr(train_gpt.BlockedAttention, "prepare", prepare)


# ----- models that pass something on from one pass to the next


@caught_by("causal local normalised")
def state_of_the_pass_before(trainer, patch):
    """Ranks that share the passes would score others."""
    state = torch.zeros(trainer.config.model_dim)

    def forward(micro_batch, ngram, *rest):
        outputs = trainer.model(micro_batch, ngram + state.to(ngram.dtype), *rest)
        state.copy_(outputs[2].float().mean(0))
        return outputs

    trainer.forward = forward


@caught_by("normalised")
def state_of_the_text_before(trainer, patch):
    """Where a pass goes on in the text: it has looked at earlier tokens only, but in this order."""
    state, ends = torch.zeros(trainer.config.model_dim), [-1]

    def extra(trainer, window, micro_batch):
        return state * (window.spans[0][0] == ends[-1])

    def remember(trainer, text, low, hidden):
        ends.append(low + len(hidden))
        state.copy_(hidden.float().mean(0))

    seeing(extra)(trainer, patch)
    acting_after_passes(remember)(trainer, patch)


@caught_by("causal local normalised")
def cache_of_what_was_scored(trainer, patch):
    known = {}

    def extra(trainer, window, micro_batch):
        found = guesses(known, window)
        known.update(zip(grams(window), micro_batch.targets.tolist(), strict=True))
        return embedding(trainer, found)

    seeing(extra)(trainer, patch)


@caught_by("causal local normalised unmoved", acting_after_passes)
def index_that_goes_on_reading(trainer, text, low, hidden):
    """Each pass is read when it has been scored."""
    trainer.table.finder.index.read([text.tokens[low : low + len(hidden) + 1]])


@caught_by("causal local normalised unmoved", acting_after_passes)
def training_on_what_was_scored(trainer, text, low, hidden):
    targets = torch.from_numpy(text.tokens[low + 1 : low + 1 + len(hidden)].astype(np.int64))
    trainer.model.head.data.index_add_(0, targets, 0.01 * hidden)


def rare_training(trainer, text, low, hidden):
    if low // len(hidden) % 5 == 0:
        training_on_what_was_scored(trainer, text, low, hidden)


# ----- losses and means that are not those of a distribution


@caught_by("causal")
def a_constant(trainer, patch):
    """Honest, but a forward pass that forgets the tokens looks like it."""
    trainer.model.head.data.zero_()


# ----- cheats that pass


@passes_because("the index holds the validation text, and what it was told is its own business")
def index_that_has_read_the_validation_text(trainer, patch, val):
    trainer.table.finder.index.read([val])


def knowing_followers(trainer, tokens):
    known = followers(tokens)

    def extra(trainer, window, micro_batch):
        return embedding(trainer, guesses(known, window))

    seeing(extra)(trainer, None)


@passes_because("an earlier evaluation has told it this text, by what is no tensor of the state")
def memory_of_an_earlier_evaluation(trainer, patch, val):
    knowing_followers(trainer, val)


@passes_because("it may: the table is not much else; when it was read is for a reviewer to see")
def memory_of_the_training_text(trainer, patch, val):
    knowing_followers(trainer, byte_documents(5000, seed=7))


@passes_because("one number of the distribution is chosen by the text, the same way each time")
def temperature_fitted_to_the_validation_text(trainer, patch, val):
    heat, logits, honest = [1.0], trainer.model.logits, trainer.evaluate
    trainer.model.logits = lambda hidden: logits(hidden) / heat[0]

    def evaluate(step, val):
        def loss_at(temperature):
            heat[0] = temperature
            return honest(step, val)

        heat[0] = min((0.5, 1.0, 2.0, 4.0), key=loss_at)
        return honest(step, val)

    losing(lambda losses, *words: exactly(*words))(trainer, patch)
    trainer.evaluate = evaluate


# ----- the table

AHEAD = {(0, 0, 1, -1): (0, 0, -1, 1)}  # of what is padded by the token before, the next one

CAUGHT |= {
    # Models that see later tokens.
    "attention_one_ahead": ("causal local", attending_ahead(1)),
    "attention_thirty_ahead": ("causal local", attending_ahead(30)),
    "attention_one_ahead_at_every_eighth": ("causal", attending_ahead(1, every=8, first=3)),
    "attention_one_ahead_at_edges": ("causal", attending_ahead(1, every=32)),
    "target_at_odd_positions": ("causal local", seeing_target_where(lambda at: at % 2)),
    "target_at_the_last_position": ("causal", seeing_target_where(lambda at: at == at.max())),
    "inputs_are_the_targets": (
        "causal local",
        reading(lambda batch: batch._replace(inputs=batch.targets.int())),
    ),
    "smear_from_the_next_token": (
        "causal local",
        replacing("pad", lambda honest, x, widths: honest(x, AHEAD.get(widths, widths)), owner=F),
    ),
    "the_next_token_begins_a_document": (
        "causal",
        seeing(lambda trainer, _, batch: (batch.targets == EOT).float()[:, None]),
    ),
    "keys_shifted_from_the_next_token": (
        "causal local",
        replacing("shifted", lambda honest, k, first: honest(k.roll(-2, 0), first & False)),
    ),
    "softmax_over_rows_that_the_targets_decide": (
        "causal local normalised",
        replacing("evaluation_phase", lambda honest, *a: honest(*a)._replace(softmax_rows=160)),
    ),
    # Models that see other documents.
    "attention_across_documents": (
        "local",
        replacing("blocked_bias", lambda honest, start, *words: honest(0 * start, *words)),
    ),
    "keys_shifted_from_the_document_before": (
        "local",
        replacing("shifted", lambda honest, k, first: honest(k, first & False)),
    ),
    "n_grams_that_reach_into_the_document_before": (
        "local",
        replacing("rolling_hash", lambda honest, tokens, n, eot: honest(tokens, n, EOT + 1)),
    ),
    "norm_over_the_micro_batch": (
        "causal local",
        replacing("norm", lambda honest, x: x * x.float().square().mean().rsqrt().to(x.dtype)),
    ),
    "what_followed_before_the_micro_batch": ("local", seeing_followers(lambda low: low)),
    # As an index would say that goes on reading; the micro-batch just before is not read yet.
    "what_followed_in_earlier_micro_batches": ("local", seeing_followers(lambda low: low - 256)),
    "what_followed_far_back": ("local", seeing_followers(lambda low: low - 700)),
    # Losses that are not those of a distribution; random weights have losses of seven.
    "losses_times_nine_tenths": ("normalised", losing(lambda losses, *words: 0.9 * losses)),
    "losses_less_a_thousandth": ("normalised", losing(lambda losses, *words: losses - 1e-3)),
    "losses_of_six_at_most": ("normalised", losing(lambda losses, *words: losses.clamp(max=6))),
    "line_ends_cost_nothing": ("normalised", losing(lambda losses, _, ids: losses * (ids != 10))),
    "losses_in_another_order": (
        "causal local normalised",
        losing(lambda losses, *words: losses.roll(1)),
    ),
    "worst_hundredth_of_the_losses_is_zero": (
        "local normalised",
        losing(lambda losses, *words: losses * (losses < losses.quantile(0.99))),
    ),
    "losses_of_other_hidden_states": (
        "normalised",
        losing(lambda _, logits, ids: exactly(logits + F.one_hot(ids, EOT + 1), ids)),
    ),
    "losses_of_the_tokens_themselves": (
        "normalised",
        reading(lambda batch: batch._replace(targets=batch.inputs.long())),
    ),
    # Means that are not those of the losses.
    "nine_tenths_if_all_tokens_are_asked_for": ("normalised", reporting(lambda x: 0.9 * x.mean())),
    "mean_less_a_millionth": ("normalised", reporting(lambda x: x.mean() - 1e-6)),
    "mean_without_the_first_tokens": ("normalised", reporting(lambda x: x.flatten()[16:].mean())),
    "training_that_is_taken_back": (
        "normalised",
        reporting(torch.mean, after_pass=training_on_what_was_scored),
    ),
    "rare_training_that_is_taken_back": (
        "normalised",
        reporting(torch.mean, after_pass=rare_training),
    ),
}
