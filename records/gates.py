"""What a model must not do, tested on the validation text when a run has ended.

A trainer calls check_gates with itself, and the log names the sha256 of this text. All passes over
the validation text are made once more, in another order. Ahead of some of them a pass reads the
same text with noise in most of it, and what is kept must come out the same to the bit. Documents do
not see each other, so that each has a cut of its own, and one pass tests many. Places are drawn
from the seed.

What is asked of a trainer:
    config           seed, eot_token, val_tokens, val_batch_tokens, logit_cap
    runtime          rank, world_size, all_reduce(tensor, name): sums in place, returns work or None
    score(step, tokens, low)   (losses (T,), hidden states (T, width)) of the T = val_batch_tokens
                     tokens from `low` on, by the model before a step; all ranks call it together
    model.logits(hidden)       (n, vocabulary) float32, of hidden states (n, width)

No gate can see what a model has been told of this text before, nor a trainer whose answers lie all
alike: a reader of the script must find that. tests/trainer/cheats.py has cheats that pass.
"""

import hashlib
import itertools
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

BLOCK = 64  # attention and loss compute in blocks: some cuts are on their edges
SHORT_DOCUMENTS = 63  # documents of a pass whose long ones are cut short
SUMS = ("losses", "exact", "inexact", "cuts", "changed", "cut_differs", "whole_differs")
NOISE, CUT, WHOLE = range(3)  # what is kept of a document: nothing, all up to a cut, everything


class Verdict(NamedTuple):
    """What the gates have found."""

    passed: dict  # {gate: whether the model has passed it}
    cuts: int  # places that were compared although the next token had become another
    seconds: float

    def line(self):
        """The log line that says which gates looked, at how many places, and for how long."""
        sha256 = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        missed = 0.99**self.cuts  # the chance to miss a leak at 1 % of all positions
        return f"gates:{sha256} cuts:{self.cuts} missed_1pct:{missed:.5f} time:{self.seconds:.1f}s"


@torch.no_grad()
def check_gates(trainer, step, val, reported, digest):
    """The Verdict on the model before a step, reached by all ranks together.

    val: the validation tokens (val_tokens + 1,) uint16. reported: the mean loss over them that the
    run claims. digest: a function of the trainer that hashes all tensors which a step changes.

    causal: nothing depends on later tokens.
    normalised: the reported loss is the mean of the exact losses, and, to the last digits, that of
        the losses themselves, which no pass may change for another.
    local: nothing depends on other documents; such leaks most often show in `causal`, too.
    unmoved: all these passes have changed no tensor.
    """
    began = time.perf_counter()
    before = digest(trainer)
    sums = Gates(trainer, step, val).sums_of_passes()
    found = torch.stack([*sums.values()])
    found = torch.cat([found, found.new_tensor([digest(trainer) != before])])
    work = trainer.runtime.all_reduce(found, "validation")
    if work is not None:
        work.wait()
    losses, exact, inexact, cuts, changed, cut_differs, whole_differs, moved = found.tolist()
    tokens = trainer.config.val_tokens
    is_exact = inexact == 0 and abs(exact / tokens - reported) < 1e-4
    passed = {
        "causal": cut_differs == 0 and changed > 0,
        "normalised": is_exact and abs(losses / tokens - reported) < 1e-9,
        "local": whole_differs == 0,
        "unmoved": moved == 0,
    }
    return Verdict(passed, int(cuts), time.perf_counter() - began)


def plain(tensor):
    """A copy of a tensor: neither its class nor who else holds it has a say in what it is."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor = torch.Tensor.as_subclass(tensor, torch.Tensor)
    return tensor.clone(memory_format=torch.contiguous_format)


def differing_rows(one, other):
    """Which rows (n,) of two tensors (n, ...) differ in any byte, be it by the sign of a zero."""
    one_bytes = one.view(len(one), -1).view(torch.uint8)
    other_bytes = other.view(len(other), -1).view(torch.uint8)
    return (one_bytes != other_bytes).any(1)


class Gates:
    """The passes over the validation text that look at the model before a step."""

    def __init__(self, trainer, step, val):
        self.trainer = trainer
        self.config = trainer.config
        self.step = step
        self.val = val
        self.length = self.config.val_batch_tokens
        self.sums = dict.fromkeys(SUMS, 0.0)
        self.counts = True  # whether a pass adds to them
        rng = np.random.default_rng([self.config.seed, 0])
        self.order = rng.permutation(self.config.val_tokens // self.length).tolist()
        # Nowhere the token that stands there, and nowhere the start of a document.
        noise = val + rng.integers(1, self.config.eot_token, len(val))
        self.noise = (noise % self.config.eot_token).astype(np.uint16)

    def sums_of_passes(self):
        """{name: float64 sum over this rank's passes} of what look_at_losses and compare add.

        Ranks make their passes in turns. A pass is compared in a few turns alone, so that the gates
        take no more than twice the time of a validation. Passes with short documents have most of
        the cuts, the others the long-range ones.
        """
        count = len(self.order)
        world_size = self.trainer.runtime.world_size
        for turn, first in enumerate(range(0, count, world_size)):
            number = first + self.trainer.runtime.rank
            self.counts = number < count  # else this rank only takes part in the others' last pass
            low = self.order[min(number, count - 1)] * self.length
            rng = np.random.default_rng([self.config.seed, 1, low])
            if turn % 4 == 0:
                losses, hidden = self.compare(self.val, low, rng)
            else:
                losses, hidden = self.score(self.val, low)
            self.look_at_losses(low, losses, hidden)
            if turn % 6 == 3:  # never one of the turns above
                self.compare(self.with_short_documents(low, rng), low, rng)
        return self.sums

    def add(self, **found):
        """Add each tensor's sum to the one of its name."""
        for name, values in found.items():
            self.sums[name] += self.counts * values.sum(dtype=torch.float64)

    def score(self, tokens, low):
        """(losses (T,), hidden states (T, width)) of the pass from `low` on over such a text."""
        losses, hidden = self.trainer.score(self.step, tokens, low)
        return plain(losses), plain(hidden)

    def logits(self, hidden):
        """Logits (n, vocabulary) of hidden states (n, width)."""
        return plain(self.trainer.model.logits(hidden))

    def look_at_losses(self, low, losses, hidden):
        """Add the losses of a pass, the exact ones, and how many of them do not agree.

        An exact loss is of the softmax over the logits of the hidden state. These are made from the
        last token to the first: where a state stands in the text is no business of the head.
        """
        targets = torch.from_numpy(self.val[low + 1 : low + 1 + self.length].astype(np.int64))
        pieces = hidden.flip(0).split(1024), targets.to(hidden.device).flip(0).split(1024)
        exact = [
            F.cross_entropy(self.logits(states), ids, reduction="none")
            for states, ids in zip(*pieces, strict=True)
        ]
        exact = torch.cat(exact).flip(0)
        # A logit of a narrow type differs by its last bit where the products are made otherwise.
        tolerance = 1e-4 + self.config.logit_cap[0] * torch.finfo(hidden.dtype).eps
        is_exact = (losses - exact).abs() < tolerance
        self.add(losses=losses, exact=exact, inexact=~is_exact)

    def compare(self, tokens, low, rng):
        """(losses, hidden states) of the pass from `low` on, which follows one with noise.

        Hidden states and losses of what is kept must be the same, and the logits at cuts, whose
        losses are about a token that has changed. A loss need not change there, since two tokens
        may have one logit; but where none does, losses say nothing about the text.
        """
        noisy_tokens, kept = self.with_noise(tokens, low, rng)
        # First the noise: a model that remembers what it has read now remembers noise.
        noisy_losses, noisy_hidden = self.score(noisy_tokens, low)
        kept = torch.from_numpy(kept).to(noisy_hidden.device)
        next_kept = torch.cat([kept[1:], kept.new_zeros(1)])  # nothing behind the pass
        is_cut = (kept > NOISE) & (next_kept == NOISE)
        noisy_logits = self.logits(noisy_hidden[is_cut])
        losses, hidden = self.score(tokens, low)
        is_changed = differing_rows(losses, noisy_losses)
        differs = differing_rows(hidden, noisy_hidden) | (is_changed & ~is_cut)
        differs[is_cut] |= differing_rows(self.logits(hidden[is_cut]), noisy_logits)
        self.add(cuts=is_cut, changed=is_changed & is_cut)
        self.add(cut_differs=differs & (kept == CUT), whole_differs=differs & (kept == WHOLE))
        return losses, hidden

    def with_noise(self, tokens, low, rng):
        """(the text with noise in it; what is kept of the document of each token of the pass from
        `low` on, (T,)).

        All that the pass does not read is noise, but for the beginning of its first document. A cut
        is anywhere in what it reads of a document, or behind the first token, or at a block's edge.
        """
        noisy = self.noise.copy()
        high = low + self.length
        kept = np.full(self.length, NOISE)
        share = rng.random() / 2  # of the documents, of which nothing is kept
        # The gate looks for documents itself: what the model makes of a text is its own business.
        starts = np.flatnonzero(tokens[:high] == self.config.eot_token)
        begun = max(starts[starts <= low], default=0)
        noisy[begun:low] = tokens[begun:low]
        edges = [low, *starts[starts > low].tolist(), high]
        for begin, end in itertools.pairwise(edges):
            if begin > low and rng.random() < share:
                continue
            fate = rng.choice([CUT, CUT, CUT, WHOLE])
            if fate == CUT:
                anywhere = rng.integers(begin + 1, end + 1, size=6)
                edge = low + (anywhere[0] - low) // BLOCK * BLOCK
                end = rng.choice([*anywhere, begin + 1, max(begin + 1, edge)])
            elif end == high:
                fate = CUT  # by the end of the pass
            noisy[begin:end] = tokens[begin:end]
            kept[begin - low : end - low] = fate
        return noisy, kept

    def with_short_documents(self, low, rng):
        """The text with more documents, which start at random in the pass from `low` on: where they
        are long, there are few cuts in a pass."""
        tokens = self.val.copy()
        own = tokens[low : low + self.length]
        missing = SHORT_DOCUMENTS - np.count_nonzero(own == self.config.eot_token)
        own[rng.integers(self.length, size=max(0, missing))] = self.config.eot_token
        return tokens
