"""What a model must not do, tested on the validation text when a run has ended.

This is the judge's file: a trainer calls check_gates with itself, and the log names the sha256 of
this text. All passes over the validation text are made once more, in another order. Ahead of some
of them a pass reads the same text with noise in most of it, and what is kept must come out the same
to the bit. Documents do not see each other, so that each has a cut of its own, with noise behind
it, and one pass tests many cuts. Places are drawn from the seed.

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
import math
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

BLOCK = 64  # attention and loss compute in blocks: some cuts are on their edges
SHORT_DOCUMENTS = 63  # documents of a pass whose long ones are cut short
NOISE = 0  # what is kept of a document: nothing,
CUT = 1  # all up to a cut,
WHOLE = 2  # or everything


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
    found = Gates(trainer, step, val).find()
    is_moved = found.new_tensor([digest(trainer) != before])
    found = torch.cat([found, is_moved])
    work = trainer.runtime.all_reduce(found, "validation")
    if work is not None:
        work.wait()
    again, exact, wrong, cuts, changed, cut_differs, whole_differs, moved = found.tolist()
    tokens = trainer.config.val_tokens
    is_exact = wrong == 0 and abs(exact / tokens - reported) < 1e-4
    passed = {
        "causal": cut_differs == 0 and changed > 0,
        "normalised": is_exact and abs(again / tokens - reported) < 1e-9,
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
        rng = np.random.default_rng([self.config.seed, 0])
        self.order = rng.permutation(self.config.val_tokens // self.length).tolist()
        # Nowhere the token that stands there, and nowhere the start of a document.
        noise = val + rng.integers(1, self.config.eot_token, len(val))
        self.noise = (noise % self.config.eot_token).astype(np.uint16)

    def find(self):
        """(7,) float64: the sums over this rank's passes of what look_at_losses and compare find.

        Ranks make their passes in turns, and in each turn they all compare, or none of them does.
        One without a last pass makes another one again, which does not count.
        """
        rank = self.trainer.runtime.rank
        world_size = self.trainer.runtime.world_size
        count = len(self.order)
        found = 0.0
        for turn in range(math.ceil(count / world_size)):
            number = turn * world_size + rank
            low = self.order[min(number, count - 1)] * self.length
            found = found + self.find_in_pass(low, turn) * (number < count)
        return found

    def find_in_pass(self, low, turn):
        """What the pass from `low` on adds to find(). Few turns compare, so that the gates take no
        more than twice the time of a validation; those with short documents have most of the cuts,
        the others have the long-range ones."""
        rng = np.random.default_rng([self.config.seed, 1, low])
        if turn % 4 == 0:
            outputs, compared = self.compare(self.val, low, rng, noise=rng.random() / 2)
        else:
            outputs = self.score(self.val, low)
            compared = torch.zeros(4, dtype=torch.float64, device=outputs[0].device)
        if turn % 6 == 3:  # never one of the turns above
            short = self.with_short_documents(low, rng)
            _, compared = self.compare(short, low, rng, noise=0.2)
        return torch.cat([self.look_at_losses(low, *outputs), compared])

    def score(self, tokens, low):
        """(losses (T,), hidden states (T, width)) of the pass from `low` on over such a text."""
        losses, hidden = self.trainer.score(self.step, tokens, low)
        return plain(losses), plain(hidden)

    def logits(self, hidden):
        """Logits (n, vocabulary) of hidden states (n, width)."""
        return plain(self.trainer.model.logits(hidden))

    def look_at_losses(self, low, losses, hidden):
        """(3,): the sums of the pass' losses and of the exact ones, and how many do not agree.

        An exact loss is of the softmax, over the whole vocabulary, of the logits that the hidden
        state has. These are made from the last token to the first: where a state stands in the text
        is no business of the head.
        """
        targets = self.val[low + 1 : low + 1 + self.length].astype(np.int64)
        targets = torch.from_numpy(targets).to(hidden.device)
        exact = []
        read = hidden.flip(0).split(1024), targets.flip(0).split(1024)
        for states, ids in zip(*read, strict=True):
            exact.append(F.cross_entropy(self.logits(states), ids, reduction="none"))
        exact = torch.cat(exact).flip(0)
        # A logit of a narrow type differs by its last bit where the products are made otherwise.
        tolerance = 1e-4 + self.config.logit_cap[0] * torch.finfo(hidden.dtype).eps
        is_exact = (losses - exact).abs() < tolerance
        return torch.stack([losses.double().sum(), exact.double().sum(), (~is_exact).sum()])

    def compare(self, tokens, low, rng, noise):
        """Make the pass from `low` on over a text with noise in it, and then over the text itself.

        Hidden states and losses of what is kept must be the same, and the logits at cuts, whose
        losses are about a token that has changed. A loss need not change there, since two tokens
        may have one logit; but where none does, losses say nothing about the text.

        Returns ((losses, hidden) of the text itself; (4,): how many cuts there are, how many of
        their losses have changed, and how many tokens of documents with a cut, and of whole ones,
        did not come out the same).
        """
        noisy_tokens, kept = self.with_noise(tokens, low, rng, noise)
        # First the noise: a model that remembers what it has read now remembers noise.
        noisy_losses, noisy_hidden = self.score(noisy_tokens, low)
        kept = torch.from_numpy(kept).to(noisy_hidden.device)
        target_is_kept = kept.roll(-1) > NOISE
        target_is_kept[-1] = False  # it is behind the pass
        is_cut = (kept > NOISE) & ~target_is_kept
        noisy_logits = self.logits(noisy_hidden[is_cut])
        losses, hidden = self.score(tokens, low)
        other_losses = differing_rows(losses, noisy_losses)
        differs = differing_rows(hidden, noisy_hidden) | (other_losses & target_is_kept)
        differs[is_cut] |= differing_rows(self.logits(hidden[is_cut]), noisy_logits)
        is_changed = other_losses & is_cut
        counted = [is_cut, is_changed, differs & (kept == CUT), differs & (kept == WHOLE)]
        return (losses, hidden), torch.stack(counted).sum(1).double()

    def with_noise(self, tokens, low, rng, noise):
        """(the text with noise in it; what is kept of the document of each token of the pass from
        `low` on, (T,)).

        noise: the share of documents of which nothing is kept; the first one is not among them.
        All that the pass does not read is noise, but for the beginning of its first document. A cut
        is anywhere in what it reads of a document, or behind the first token, or at a block's edge.
        """
        noisy = self.noise.copy()
        high = low + self.length
        kept = np.full(self.length, NOISE)
        # The gate looks for documents itself: what the model makes of a text is its own business.
        starts = np.flatnonzero(tokens == self.config.eot_token)
        edges = np.unique([0, *starts, len(tokens)])
        first = np.searchsorted(edges, low, side="right") - 1
        last = np.searchsorted(edges, high)
        for start, behind in itertools.pairwise(edges[first : last + 1].tolist()):
            if start > low and rng.random() < noise:
                continue
            fate = rng.choice([CUT, CUT, CUT, WHOLE])
            begin = max(start, low)
            end = min(behind, high)
            if fate == CUT:
                anywhere = rng.integers(begin + 1, end + 1, size=6)
                edge = low + (anywhere[0] - low) // BLOCK * BLOCK
                end = rng.choice([*anywhere, begin + 1, max(begin + 1, edge)])
            elif behind > high:
                fate = CUT  # by the end of the pass
            noisy[start:end] = tokens[start:end]
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
