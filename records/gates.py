"""What a model must not do, tested on the validation text when a run has ended.

A trainer calls check_gates with itself, and the log names the sha256 of this text. All passes over
the validation text are made once more, in another order. Before many of them a pass reads a part
of the same tokens at another place of a text of noise, and what is kept must come out the same to
the bit. Documents do not see each other, so that each has a cut of its own, and one pass tests
many. The system's random numbers choose the places: nobody knows them ahead.

What is asked of a trainer:
    config      eot_token, val_batch_tokens, logit_cap, torch_dtype
    runtime     rank, world_size, all_reduce(tensor, name): sums in place, returns work or None
    score(step, tokens, low)    (losses (T,), states) of the T = val_batch_tokens tokens from `low`
                on, by the model before a step; all ranks call it together. States are a tensor
                (T, ...) or a tuple of them, and hold all that a prediction needs
    model.logits(states)        (n, vocabulary) float32, of n picked states: logits, or logarithms
                of probabilities

No gate can see what a model has been told of this text before, nor a trainer whose answers lie all
alike: a reader of the script must find that. tests/trainer/cheats.py has cheats that pass.
"""

import hashlib
import itertools
import math
import secrets
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

CUTS = 300  # at least: a leak at 1 % of all positions is missed in 5 % of runs
CHECKED = 1024  # exact losses of a pass that numpy works out, fewer of a large vocabulary
CHECKED_VALUES = 2**24  # their logits at most
SUMS = ("losses", "exact", "inexact", "cuts", "changed", "cut_differs", "whole_differs", "size")
SUMS += ("control", "moved")
# What is kept of a document: nothing; all up to a cut; its first token; everything.
NOISE, CUT, FIRST, WHOLE = range(4)


class Verdict(NamedTuple):
    """What the gates have found."""

    passed: dict  # {gate: whether the model has passed it}
    reason: str  # what the gates have seen, with its size
    found: str  # the same as name:value

    def line(self):
        """The log line that says which gates looked at which text, and what they found."""
        return f"gates:{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()} {self.found}"


@torch.no_grad()
def check_gates(trainer, step, val, reported, digest, control=(), stopped=None):
    """The Verdict on the model before a step, reached by all ranks together.

    val: the validation tokens and the next one, uint16. reported: the mean loss that the run
    claims. digest: a function of the trainer that hashes all tensors which a step changes. control:
    tokens behind them that no run trains on or is judged by. stopped: the digest when the clock
    stopped. Raises ValueError where passes do not divide the validation tokens.

    causal: nothing depends on later tokens.
    normalised: the reported loss is the mean of the exact losses, and, to the last digits, that of
        the losses themselves, which no pass may change for another.
    local: nothing depends on other documents; such leaks most often show in `causal`, too.
    unmoved: no tensor has changed since the clock stopped.
    """
    began = time.perf_counter()
    before = digest(trainer)
    gates = Gates(trainer, step, val)
    gates.look_at_validation()
    gates.look_at_control(control)
    gates.sums["moved"] += digest(trainer) != before or stopped not in (None, before)
    sums = SimpleNamespace(**gates.total(**gates.sums))
    loss, exact = sums.losses / (len(val) - 1), sums.exact / (len(val) - 1)
    is_exact = sums.inexact == 0 and abs(exact - reported) < 1e-4
    passed = {
        "causal": sums.cut_differs == 0 and sums.changed > 0,
        "normalised": is_exact and abs(loss - reported) < 1e-9,
        "local": sums.whole_differs == 0,
        "unmoved": sums.moved == 0,
    }
    size = sums.size / max(1, sums.cut_differs + sums.whole_differs)
    reason = (
        f"{sums.cut_differs:.0f} states change with later tokens, {sums.whole_differs:.0f} with "
        f"other documents, and their losses by {size:.1g} in the mean; {sums.changed:.0f} of "
        f"{sums.cuts:.0f} losses change with their own token; the run reports {reported:.9f}, "
        f"its passes {loss:.9f}, and their states {exact:.9f}, in {sums.inexact:.0f} losses others"
    )
    found = (
        f"text:{hashlib.sha256(val.tobytes()).hexdigest()} tokens:{len(val) - 1} "
        f"eot:{trainer.config.eot_token} places:{gates.places} "
        # Of cuts anywhere, and the chance that they all miss a leak at 1 % of all positions.
        f"cuts:{sums.cuts:.0f} missed_1pct:{0.99**sums.cuts:.5f} "
        f"control:{sums.control or math.nan:.5f}"
    )
    return Verdict(passed, reason, f"{found} time:{time.perf_counter() - began:.1f}s")


@torch.no_grad()
def untrained_loss(trainer, step, val):
    """The mean exact loss over the first validation pass, which a trainer logs ahead of its clock.
    All ranks call it together."""
    gates = Gates(trainer, step, val)
    _, states = gates.score(val, 0)
    return gates.exact_losses(val, 0, states).double().mean().item()


def each(states, change):
    """States with change(tensor) in place of each of their tensors."""
    if isinstance(states, torch.Tensor):
        return change(states)
    changed = [each(part, change) for part in states]
    return type(states)(*changed) if hasattr(states, "_fields") else tuple(changed)


def plain(tensor):
    """A copy of a tensor: neither its class nor who else holds it has a say in what it is."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor = torch.Tensor.as_subclass(tensor, torch.Tensor)
    return tensor.clone(memory_format=torch.contiguous_format)


def differing_rows(one, other):
    """Which of n states (n,) differ in any byte, be it by the sign of a zero."""
    if not isinstance(one, torch.Tensor):
        return torch.stack([*map(differing_rows, one, other)]).any(0)
    one_bytes = one.view(len(one), -1).view(torch.uint8)
    other_bytes = other.view(len(other), -1).view(torch.uint8)
    return (one_bytes != other_bytes).any(1)


def cuts_of(kept):
    """Which tokens (T,) are kept and followed by noise."""
    return (kept > NOISE) & (np.append(kept[1:], NOISE) == NOISE)


class Gates:
    """The passes over the validation text that look at the model before a step."""

    def __init__(self, trainer, step, val):
        self.trainer = trainer
        self.config = trainer.config
        self.rank = trainer.runtime.rank
        self.world_size = trainer.runtime.world_size
        self.step = step
        self.val = val
        self.length = self.config.val_batch_tokens
        self.device = next(trainer.model.parameters()).device
        if (len(val) - 1) % self.length:
            problem = f"{len(val) - 1}, no multiple of val_batch_tokens={self.length}"
            raise ValueError(f"validation tokens are {problem}: each is scored; change the latter")
        self.starts = np.flatnonzero(val == self.config.eot_token)
        self.sums = dict.fromkeys(SUMS, 0.0)
        drawn = secrets.randbits(48) if self.rank == 0 else 0
        self.places = int(self.total(drawn=drawn)["drawn"])
        self.rng = np.random.default_rng([self.places, self.rank])  # of this rank's passes
        # Nowhere the token that stands there, and nowhere the start of a document.
        noise = val + self.rng.integers(1, self.config.eot_token, len(val))
        self.noise = (noise % self.config.eot_token).astype(np.uint16)

    def on_device(self, array):
        return torch.from_numpy(array).to(self.device)

    def total(self, **sums):
        """{name: sum over ranks} of numbers, or of tensors of one number."""
        numbers = self.on_device(np.array([*map(float, sums.values())]))
        work = self.trainer.runtime.all_reduce(numbers, "validation")
        if work is not None:
            work.wait()
        return dict(zip(sums, numbers.tolist(), strict=True))

    def passes(self, count):
        """Yield the numbers of this rank's passes. A rank without one in the last turn makes the
        last one again, for the others' sake, and adds nothing."""
        for number in range(self.rank, count + self.rank, self.world_size):
            self.counts = number < count
            yield min(number, count - 1)

    def look_at_validation(self):
        """Score each pass once, in a drawn order. Ahead of it comes what is compared with it: a
        model that remembers what it has read then remembers noise."""
        order, kept_of = self.plan()
        for number in self.passes(len(order)):
            low = int(order[number]) * self.length
            noisy = [self.read_in_noise(low, kept) for kept in kept_of[number]]
            losses, states = self.score(self.val, low)
            exact = self.exact_losses(self.val, low, states)
            # A logit of a narrow type differs by its last bit where products are made otherwise.
            tolerance = 1e-4 + self.config.logit_cap[0] * torch.finfo(self.config.torch_dtype).eps
            self.add(losses=losses, exact=exact, inexact=(losses - exact).abs() >= tolerance)
            for seen in noisy:
                self.compare(losses, states, *seen)

    def look_at_control(self, control):
        """Add the exact losses of the tokens on which nobody trains or is judged."""
        count = max(0, len(control) - 1) // self.length
        for number in self.passes(count):
            states = self.score(control, number * self.length)[1]
            exact = self.exact_losses(control, number * self.length, states)
            self.add(control=exact / (count * self.length))

    def plan(self):
        """(an order of passes; {number in it: what is kept of each token, (T,), in each comparison
        of a pass}), the same on all ranks. A quarter of all passes is compared, and as many as it
        takes to cut CUTS times, but none more than twice."""
        rng = np.random.default_rng(self.places)
        order = rng.permutation((len(self.val) - 1) // self.length)
        kept_of = {number: [] for number in range(len(order))}
        cuts = 0
        for again, first in itertools.product((0, 1), range(0, len(order), self.world_size)):
            if cuts < CUTS or (not again and first < len(order) / 4):
                for number in range(first, min(first + self.world_size, len(order))):
                    kept = self.draw_kept(int(order[number]) * self.length, rng)
                    kept_of[number].append(kept)
                    cuts += np.count_nonzero(cuts_of(kept) & (kept == CUT))
        return order, kept_of

    def draw_kept(self, low, rng):
        """What is kept of the document of each token of the pass from `low` on. Cuts are spread as
        positions are, but for those behind a document's first token."""
        kept = np.full(self.length, NOISE, np.int8)
        is_kept = True
        # The gate looks for documents itself: what the model makes of a text is its own business.
        inside = self.starts[(self.starts > low) & (self.starts < low + self.length)] - low
        for begin, end in itertools.pairwise([0, *inside.tolist(), self.length]):
            fate = int(rng.choice([CUT, FIRST, WHOLE], p=[0.86, 0.04, 0.1]))
            # A part is cut as often as a longer one: this power makes up for it.
            cut = begin + math.ceil((end - begin) * (1 - rng.random()) ** 0.65)
            stop = {CUT: cut, FIRST: begin + 1, WHOLE: end}[fate]
            if is_kept:
                kept[begin:stop] = CUT if stop == self.length else fate  # by the end of the pass
            # Half of those behind whole ones are not: where a document ends is no business of it.
            is_kept = rng.random() < (0.5 if fate == WHOLE else 0.95)
        return kept

    def read_in_noise(self, low, kept):
        """(losses, states, logits at cuts, what is kept, where cuts are) of the pass from `low` on,
        of which only what is kept is there, at another place of a text of noise."""
        begun = max(self.starts[self.starts <= low], default=0)
        place = low
        if self.val[begun] == self.config.eot_token:  # else nothing says where the document begins
            place = int(self.rng.integers(low - begun, len(self.val) - self.length))
        noisy = np.roll(self.noise, place - low)
        noisy[place - (low - begun) : place] = self.val[begun:low]
        own = noisy[place : place + self.length]
        own[kept > NOISE] = self.val[low : low + self.length][kept > NOISE]
        losses, states = self.score(noisy, place)
        is_cut = self.on_device(cuts_of(kept))
        logits = self.logits(each(states, lambda tensor: tensor[is_cut]))
        return losses, states, logits, self.on_device(kept), is_cut

    def compare(self, losses, states, noisy_losses, noisy_states, noisy_logits, kept, is_cut):
        """Add what has changed of a pass since it was read in noise.

        States and losses of what is kept must be the same, and the logits at cuts, whose losses are
        about a token that has changed. A loss need not change there, since two tokens may have one
        logit; but where none does, losses say nothing about the text.
        """
        is_changed = differing_rows(losses, noisy_losses)
        differs = differing_rows(states, noisy_states) | (is_changed & ~is_cut)
        logits = self.logits(each(states, lambda tensor: tensor[is_cut]))
        differs[is_cut] |= differing_rows(logits, noisy_logits)
        differs &= kept > NOISE
        size = (losses - noisy_losses).abs() * (differs & ~is_cut)
        is_cut &= kept == CUT
        self.add(cuts=is_cut, changed=is_changed & is_cut, size=size)
        self.add(cut_differs=differs & (kept < WHOLE), whole_differs=differs & (kept == WHOLE))

    def add(self, **found):
        """Add each tensor's sum to the one of its name, unless the pass only fills a turn."""
        for name, values in found.items():
            self.sums[name] += self.counts * values.sum(dtype=torch.float64)

    def score(self, tokens, low):
        """(losses (T,), states) of the pass from `low` on over such a text."""
        losses, states = self.trainer.score(self.step, tokens, low)
        return plain(losses), each(states, plain)

    def logits(self, states):
        """Logits (n, vocabulary) of n states."""
        return plain(self.trainer.model.logits(states))

    def exact_losses(self, tokens, low, states):
        """Losses (T,) float64 of the softmax over the states' logits, made in a drawn order: where
        a state stands in the text is no business of the head. Numpy works out the last of them,
        whatever torch's functions have become."""
        ids = self.on_device(tokens[low + 1 : low + 1 + self.length].astype(np.int64))
        exact = torch.empty(self.length, dtype=torch.float64, device=self.device)
        for places in self.on_device(self.rng.permutation(self.length)).split(CHECKED):
            logits = self.logits(each(states, lambda tensor, places=places: tensor[places]))
            exact[places] = F.cross_entropy(logits, ids[places], reduction="none").double()
        places = places[: CHECKED_VALUES // logits.shape[1]]
        logits = logits[: len(places)].cpu().numpy().astype(np.float64)
        peaks = logits.max(1)
        sums = peaks + np.log(np.exp(logits - peaks[:, None]).sum(1))
        exact[places] = self.on_device(sums - logits[range(len(sums)), ids[places].cpu()])
        return exact
