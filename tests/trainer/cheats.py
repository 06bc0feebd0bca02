"""Models that cheat, with the gates that catch each, and those that no gate can catch.

A cheat is a function of (trainer, patch): it makes the Trainer cheat, and what it patches beside it
is undone by pytest's monkeypatch. There is one of each kind; those of a few words stand at the end.
"""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

import train_gpt
from helpers import EOT

CAUGHT = {}  # {name: (gates that it fails, by whatever chance others as well; cheat)}


def caught_by(gates, *functions, **cheats):
    """Enter cheats into the table, functions under their own names."""
    cheats |= {function.__name__: function for function in functions}
    CAUGHT.update({name: (gates, cheat) for name, cheat in cheats.items()})


# ----- what they are made of


def maker(function):
    """Let function(..., trainer, patch) make a cheat of what stands before the trainer."""
    return partial(partial, function)


@maker
def seeing(extra, trainer, patch):
    """Every layer receives extra(trainer, passage, micro_batch), (T, model_dim), with its rows."""
    honest_score, honest_pass = trainer.score, trainer.forward_pass
    passage = None

    def score(step, tokens, low, length=None):
        nonlocal passage
        own = length or trainer.config.val_batch_tokens
        passage = train_gpt.contiguous_passage(tokens, EOT, low, own)
        return honest_score(step, tokens, low, length)

    def forward_pass(step, phase, loss_weights, micro_batch, ngram):
        ngram = ngram + extra(trainer, passage, micro_batch).to(ngram.dtype)
        return honest_pass(step, phase, loss_weights, micro_batch, ngram)

    trainer.score, trainer.forward_pass = score, forward_pass


def seeing_target(condition):
    """Every layer receives the target where condition(micro_batch, positions) is true."""

    def extra(trainer, passage, micro_batch):
        is_seen = condition(micro_batch, positions(micro_batch))
        return embedding(trainer, micro_batch.targets) * is_seen

    return seeing(extra)


def seeing_successors(part):
    """Every layer receives what follows its token where it stands last in a part of the text:
    part(tokens, start of the pass)."""

    def extra(trainer, passage, micro_batch):
        tokens = part(passage.text, passage.position[0])
        known = np.full(EOT + 1, EOT)
        known[tokens[:-1]] = tokens[1:]
        return embedding(trainer, torch.from_numpy(known)[micro_batch.inputs])

    return seeing(extra)


@maker
def replacing(name, other, trainer, patch, owner=train_gpt):
    """A function of the trainer's is other(honest, ...)."""
    patch.setattr(owner, name, partial(other, getattr(owner, name)))


attending = partial(replacing, "mask", owner=train_gpt.BlockedAttention)


def ahead(honest, *words, every=1):
    """Queries see the next key of their block, every so many positions."""
    rows = honest(None, *words)  # (blocks, 1, queries, keys)
    is_ahead = torch.arange(rows.size(2))[:, None] % every == 0
    return torch.where(is_ahead, rows.roll(-1, 2), rows)


def across_documents(honest, micro_batch, *words):
    start = torch.zeros_like(micro_batch.segment_start)
    return honest(None, micro_batch._replace(segment_start=start), *words)


@maker
def reading(change, trainer, patch):
    """The forward pass reads change(micro_batch)."""
    trainer.forward = lambda micro_batch, *rest: trainer.model(change(micro_batch), *rest)


@maker
def stating(change, trainer, patch):
    """The forward pass returns change(trainer, hidden, targets) for its hidden states, and their
    losses."""

    def forward(micro_batch, *rest):
        loss, _, states = trainer.model(micro_batch, *rest)
        hidden = change(trainer, states.hidden, micro_batch.targets)
        logits = trainer.model.logits(states._replace(hidden=hidden.as_subclass(torch.Tensor)))
        return loss, exactly(logits, micro_batch.targets), states._replace(hidden=hidden)

    trainer.forward = forward


@maker
def pointing(change, trainer, patch):
    """The pointer works on change(hidden, micro_batch), and hands on the states as they are."""
    honest = trainer.model.pointer.forward

    def forward(hidden, micro_batch):
        return honest(*change(hidden, micro_batch))._replace(hidden=hidden)

    trainer.model.pointer.forward = forward


@maker
def losing(change, trainer, patch):
    """The forward pass returns change(losses, targets) for its losses."""

    def forward(micro_batch, *rest):
        loss, losses, states = trainer.model(micro_batch, *rest)
        return loss, change(losses, micro_batch.targets), states

    trainer.forward = forward


@maker
def acting_after_passes(act, trainer, patch):
    """Each pass is followed by act(trainer, tokens, low, hidden)."""
    honest = trainer.score

    def score(step, tokens, low, length=None):
        losses, states = honest(step, tokens, low, length)
        act(trainer, tokens, low, states.hidden)
        return losses, states

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


# ----- cheats of more than a few words


@maker
def what_was_here_when_the_place_was_scored(keeps_first, trainer, patch):
    """In its second evaluation a model like this has seen all targets. It may keep what it saw
    first."""
    seen = torch.full((2 * trainer.config.val_tokens,), EOT)

    def extra(trainer, passage, micro_batch):
        known = seen[passage.position]
        is_kept = keeps_first & (known != EOT)
        seen[passage.position] = torch.where(is_kept, known, micro_batch.targets)
        return embedding(trainer, known)

    seeing(extra)(trainer, patch)


def target_where_a_seed_says_that_no_gate_looks(trainer, patch):
    """It is honest in a quarter of the passes, and in texts that are not the validation's."""
    rng = np.random.default_rng([trainer.config.seed, 0])
    length = trainer.config.val_batch_tokens
    order = rng.permutation(trainer.config.val_tokens // length) * length
    compared = {*order[::4].tolist()}

    def extra(trainer, passage, micro_batch):
        place = int(passage.position[0])
        is_seen = place % length == 0 and place not in compared
        return embedding(trainer, micro_batch.targets) * is_seen

    seeing(extra)(trainer, patch)


def cross_entropy_that_is_cheaper(trainer, patch):
    """For everybody who calls it: the losses agree with it."""
    honest = F.cross_entropy
    patch.setattr(F, "cross_entropy", lambda *words, **options: 0.95 * honest(*words, **options))
    losing(lambda losses, ids: 0.95 * losses)(trainer, patch)


def target_in_a_second_tensor(trainer, patch):
    """Its states are a pair, and the head reads the second one."""
    logits, score = trainer.model.logits, trainer.score

    def pair(step, tokens, low, length=None):
        losses, states = score(step, tokens, low, length)
        ids = torch.from_numpy(tokens[low + 1 : low + 1 + len(losses)].astype(np.int64))
        return exactly(favour(logits(states), ids), ids), (states, ids)

    trainer.score = pair
    trainer.model.logits = lambda states: favour(logits(states[0]), states[1])


def undivided(passage):
    """A passage of the same tokens as one segment of a text that is one document."""
    start = np.zeros_like(passage.segment_start)
    return passage._replace(depth=passage.position, segment_start=start)


def mean_of_all_earlier_tokens(trainer, passage, micro_batch):
    total = embedding(trainer, micro_batch.inputs).float().cumsum(0)
    return total / (1 + positions(micro_batch))


def target_in_signs_of_zeros(trainer, patch):
    """Nine channels of each hidden state are zeros, and the head reads their signs."""
    logits, powers = trainer.model.logits, 2 ** torch.arange(9)

    def with_zeros(trainer, hidden, targets):
        signs = 1.0 - 2.0 * (targets[:, None] // powers % 2)
        return torch.cat([0.0 * signs, hidden[:, 9:]], 1).to(hidden.dtype)

    def reading_signs(states):
        ids = (torch.signbit(states.hidden[:, :9]) * powers).sum(1)
        return favour(logits(states), ids)

    stating(with_zeros)(trainer, patch)
    trainer.model.logits = reading_signs


class Agreeable(torch.Tensor):
    """A tensor that equals all others, as do its copies."""

    @classmethod
    def __torch_function__(cls, function, types, words=(), options=None):
        result = super().__torch_function__(function, types, words, options or {})
        return torch.zeros_like(result) if function is torch.Tensor.ne else result

    def clone(self, **options):
        return torch.zeros(self.shape)


def logits_that_know_the_target_of_each_state(trainer, patch):
    """States are honest; the head knows them again, and what followed them when they were made."""
    logits, known = trainer.model.logits, {}

    def keys_of(hidden):
        return [state.tobytes() for state in hidden.float().numpy()]

    def remember(trainer, hidden, targets):
        known.update(zip(keys_of(hidden), targets.tolist(), strict=True))
        return hidden

    def knowing(states):
        ids = [known.get(key, EOT) for key in keys_of(states.hidden)]
        return favour(logits(states), torch.tensor(ids))

    stating(remember)(trainer, patch)
    trainer.model.logits = knowing


def logits_that_know_the_targets_of_a_pass_in_order(trainer, patch):
    """Of a head that counts the states that it is asked about since the pass."""
    logits, left = trainer.model.logits, []

    def remember(trainer, hidden, targets):
        left[:] = 2 * targets.tolist()  # its own losses ask first
        return hidden

    def knowing(states):
        count = len(states.hidden)
        ids = torch.tensor([*left, *[EOT] * count][:count])
        del left[:count]
        return favour(logits(states), ids)

    stating(remember)(trainer, patch)
    trainer.model.logits = knowing


def state_of_the_text_before(trainer, patch):
    """Where a pass goes on in the text: it has looked at earlier tokens only, but in this order."""
    state, ends = torch.zeros(trainer.config.model_dim), [-1]

    def extra(trainer, passage, micro_batch):
        return state * bool(passage.position[0] == ends[-1])

    def remember(trainer, tokens, low, hidden):
        ends.append(low + len(hidden))
        state.copy_(hidden.float().mean(0))

    seeing(extra)(trainer, patch)
    acting_after_passes(remember)(trainer, patch)


def training_on_what_was_scored(trainer, tokens, low, hidden):
    targets = torch.from_numpy(tokens[low + 1 : low + 1 + len(hidden)].astype(np.int64))
    trainer.model.head.data.index_add_(0, targets, 0.01 * hidden)


def training_that_is_taken_back(trainer, patch):
    """At the end of the evaluation, ahead of the gates."""
    honest, score = trainer.evaluate, trainer.score

    def evaluate(step, val):
        before = trainer.model.head.data.clone()
        acting_after_passes(training_on_what_was_scored)(trainer, patch)
        loss = honest(step, val)
        trainer.score = score
        trainer.model.head.data.copy_(before)
        return loss

    trainer.evaluate = evaluate


def mean_less_a_millionth(trainer, patch):
    honest = trainer.evaluate
    trainer.evaluate = lambda step, val: honest(step, val) - 1e-6


def a_constant(trainer, patch):
    """Honest, but a forward pass that forgets the tokens looks like it."""
    trainer.model.head.data.zero_()
    trainer.model.pointer.bias.data.fill_(-1000.0)


# ----- cheats that pass


def memory_of_an_earlier_evaluation(trainer, val):
    """It has been told this text by what is no tensor of the state."""
    seeing_successors(lambda tokens, low: val)(trainer, None)


def temperature_fitted_to_the_validation_text(trainer, val):
    """One number of the distribution is chosen by the text, the same way each time."""
    heat, logits, honest = [1.0], trainer.model.logits, trainer.evaluate
    trainer.model.logits = lambda hidden: logits(hidden) / heat[0]

    def evaluate(step, val):
        def loss_at(temperature):
            heat[0] = temperature
            return honest(step, val)

        heat[0] = min((0.5, 1.0, 2.0, 4.0), key=loss_at)
        return honest(step, val)

    stating(lambda trainer, hidden, targets: hidden)(trainer, None)
    trainer.evaluate = evaluate


PASSING = [memory_of_an_earlier_evaluation, temperature_fitted_to_the_validation_text]


# ----- the table: those above, and those of a few words

AHEAD = {(0, 0, 1, -1): (0, 0, -1, 1)}  # of what is padded by the token before, the next one

# Models that see later tokens.
caught_by(
    "causal",
    target_where_a_seed_says_that_no_gate_looks,
    target_in_a_second_tensor,
    a_constant,
    what_was_here_when_the_place_was_scored_first=what_was_here_when_the_place_was_scored(True),
    attention_one_ahead_at_edges=attending(partial(ahead, every=32)),
    target_at_the_last_position=seeing_target(lambda _, at: at == at.max()),
    target_far_into_documents=seeing_target(
        lambda batch, at: at - batch.segment_start[:, None] >= 40
    ),
    guesses_of_the_next_token=replacing(
        "copies", lambda honest, *words: np.roll(honest(*words), -1, 0)
    ),
    target_at_one_token_in_fifty=seeing_target(
        lambda batch, at: (131 * batch.inputs[:, None] + 7 * at) % 50 == 0
    ),
)
caught_by(
    "causal local",
    target_in_signs_of_zeros,
    logits_that_know_the_target_of_each_state,
    what_was_here_when_the_place_was_scored_before=what_was_here_when_the_place_was_scored(False),
    attention_one_ahead=attending(ahead),
    target_unless_noise=seeing_target(lambda batch, at: (batch.inputs < 128).float().mean() > 0.9),
    successors_from_behind=seeing_successors(lambda tokens, low: tokens[low:]),
    pointing_at_the_target=pointing(
        lambda x, batch: (x, batch._replace(inputs=batch.targets.int()))
    ),
    pointing_by_the_next_state=pointing(lambda x, batch: (x.roll(-1, 0), batch)),
    inputs_are_the_targets=reading(lambda batch: batch._replace(slots=batch.slots.roll(-1, 0))),
    rows_of_the_next_token=replacing(
        "ngram_rows", lambda honest, *words: [np.roll(rows, -1, 0) for rows in honest(*words)]
    ),
    earlier_tokens_from_ahead=replacing(
        "pad", lambda honest, x, by, **rest: honest(x, AHEAD.get(by, by), **rest), owner=F
    ),
    keys_from_ahead=replacing(
        "shifted", lambda honest, k, first: honest(k.roll(-2, 0), first & False)
    ),
    norm_of_all_tokens=replacing(
        "norm", lambda honest, x: x * x.float().square().mean().rsqrt().to(x.dtype)
    ),
    target_in_a_tensor_that_equals_all_others=stating(
        lambda trainer, hidden, ids: (hidden + embedding(trainer, ids)).as_subclass(Agreeable)
    ),
)

# Models that see other documents.
caught_by(
    "local",
    attention_across_documents=attending(across_documents),
    pointing_across_documents=pointing(
        lambda x, batch: (x, batch._replace(segment_start=0 * batch.segment_start))
    ),
    keys_across_documents=replacing("shifted", lambda honest, k, first: honest(k, first & False)),
    n_grams_across_documents=replacing(
        "ngram_keys", lambda honest, tokens, at, _, n: honest(tokens, at, at, n)
    ),
    copies_across_documents=replacing(
        "copies", lambda honest, text, config: honest(undivided(text), config)
    ),
    mean_of_all_earlier_tokens=seeing(mean_of_all_earlier_tokens),
    # A cut behind a whole document shows it.
    document_begins_next=seeing(lambda trainer, _, batch: (batch.targets == EOT).float()[:, None]),
    # The micro-batch just before is not read yet, as of a cache that lags behind.
    successors_from_long_before=seeing_successors(lambda tokens, low: tokens[: max(0, low - 256)]),
)

# Models that pass something on, and losses that are not those of a distribution.
caught_by(
    "normalised",
    logits_that_know_the_targets_of_a_pass_in_order,
    state_of_the_text_before,
    training_that_is_taken_back,
    cross_entropy_that_is_cheaper,
    mean_less_a_millionth,
    losses_less_a_thousandth=losing(lambda losses, ids: losses - 1e-3),
    line_ends_cost_nothing=losing(lambda losses, ids: losses * (ids != 10)),
    losses_of_the_inputs=reading(lambda batch: batch._replace(targets=batch.inputs.long())),
)
caught_by(
    "causal local normalised",
    softmax_over_rows_that_the_targets_decide=replacing(
        "evaluation_phase", lambda honest, *words: honest(*words)._replace(softmax_rows=160)
    ),
    losses_in_another_order=losing(lambda losses, ids: losses.roll(1)),
)
caught_by(
    "causal local normalised unmoved",
    training_on_what_was_scored=acting_after_passes(training_on_what_was_scored),
)
