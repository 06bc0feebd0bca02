"""What a model must not do, tested on the validation text when a run has ended.

A trainer calls check_gates with itself, and the log names the sha256 of this text. All passes over
the validation text are made once more, in another order. Before many of them a pass reads some of
the same tokens at another place of a text of noise, and what is kept must come out the same to the
bit. Each document has a cut of its own, so that one pass tests many. Places come from the system's
random numbers: nobody knows them ahead.

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
CHECKED = 1024  # exact losses of a pass that numpy works out, of 2^24 logits at most
SUMS = "losses exact inexact control cuts changed cut_differs whole_differs size moved".split()
# What is kept of a document: nothing; all up to a cut; its first token; everything.
NOISE, CUT, FIRST, WHOLE = range(4)


class Verdict(NamedTuple):
    """What the gates have found."""

    passed: dict  # {gate: whether the model has passed it}
    reason: str  # what was seen, with its size
    found: str  # which text was looked at, and what was found, as name:value

    def line(self):
        """The line of the log."""
        return f"gates:{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()} {self.found}"


@torch.no_grad()
def check_gates(trainer, step, val, reported, digest, control=(), stopped=None):
    """The Verdict on the model before a step, reached by all ranks together.

    val: the validation tokens and the next one, uint16. reported: the mean loss that the run
    claims. digest: a function of the trainer that hashes all tensors which a step changes. control:
    tokens behind them that no run trains on or is judged by. stopped: the digest when the clock
    stopped. Raises ValueError where passes do not divide the validation tokens.

    causal: nothing depends on later tokens; local: nor on other documents; unmoved: no tensor has
    changed since the clock stopped; normalised: the reported loss is the mean of the exact losses,
    and, to the last digits, that of the losses, which no pass may change for another.
    """
    began = time.perf_counter()
    before = digest(trainer)
    gates = Gates(trainer, step, val)
    gates.look_at_validation()
    gates.look_at_control(control)
    gates.sums["moved"] += digest(trainer) != before or stopped not in (None, before)
    sums = SimpleNamespace(**dict(zip(SUMS, gates.total(gates.sums.values()), strict=True)))
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
        f"other documents, their losses by {size:.1g} in the mean; {sums.changed:.0f} losses of "
        f"{sums.cuts:.0f} change with their token; the run reports {reported:.9f}, its passes "
        f"{loss:.9f}, softmaxes of their states {exact:.9f}, {sums.inexact:.0f} losses are others"
    )
    found = (
        f"text:{hashlib.sha256(val.tobytes()).hexdigest()} tokens:{len(val) - 1} "
        f"eot:{trainer.config.eot_token} places:{gates.places} "
        f"cuts:{sums.cuts:.0f} missed_1pct:{0.99**sums.cuts:.5f} "
        f"control:{sums.control or math.nan:.5f}"
    )
    return Verdict(passed, reason, f"{found} time:{time.perf_counter() - began:.1f}s")


@torch.no_grad()
def untrained_loss(trainer, step, val):
    """The mean exact loss of the first validation pass. All ranks call it together."""
    gates = Gates(trainer, step, val)
    return gates.exact_losses(val, 0, gates.score(val, 0)[1]).mean().item()


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
    one, other = (rows.view(len(rows), -1).view(torch.uint8) for rows in (one, other))
    return (one != other).any(1)


def cuts_of(kept):
    """Which tokens (T,) are kept and followed by noise."""
    return (kept > NOISE) & (np.append(kept[1:], NOISE) == NOISE)


class Gates:
    """The passes over the validation text that look at the model before a step."""

    def __init__(self, trainer, step, val):
        self.trainer, self.step, self.val = trainer, step, val
        self.config = trainer.config
        self.rank, self.world_size = trainer.runtime.rank, trainer.runtime.world_size
        self.length = self.config.val_batch_tokens
        self.device = next(trainer.model.parameters()).device
        if (len(val) - 1) % self.length:  # some would not be scored
            length = f"val_batch_tokens={self.length}; change that"
            raise ValueError(f"validation tokens are {len(val) - 1}, no multiple of {length}")
        self.starts = np.flatnonzero(val == self.config.eot_token)
        self.sums = dict.fromkeys(SUMS, 0.0)
        drawn = secrets.randbits(48) if self.rank == 0 else 0
        self.places = int(self.total([drawn])[0])
        self.rng = np.random.default_rng([self.places, self.rank])  # of this rank's passes
        noise = val + self.rng.integers(1, self.config.eot_token, len(val))  # never val's tokens
        self.noise = (noise % self.config.eot_token).astype(np.uint16)  # nor starts of documents

    def on_device(self, array):
        return torch.from_numpy(array).to(self.device)

    def total(self, numbers):
        """Sums over ranks of numbers, or of tensors of one number."""
        numbers = self.on_device(np.array([*map(float, numbers)]))
        work = self.trainer.runtime.all_reduce(numbers, "validation")
        if work is not None:
            work.wait()
        return numbers.tolist()

    def passes(self, count):
        """Yield this rank's passes. Without a last one it makes another's again, for nothing."""
        for number in range(self.rank, count + self.rank, self.world_size):
            self.counts = number < count
            yield min(number, count - 1)

    def look_at_validation(self):
        """Score each pass behind what is compared with it: what a model remembers is noise."""
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
        """(an order of passes; {number: what is kept of each token, (T,), in each comparison}), on
        all ranks: a quarter of the passes, and as many as CUTS take, but none more than twice."""
        rng = np.random.default_rng(self.places)
        order = rng.permutation((len(self.val) - 1) // self.length)
        kept_of = {number: [] for number in range(len(order))}
        cuts = 0
        for again, first in itertools.product((0, 1), range(0, len(order), self.world_size)):
            if cuts >= CUTS and (again or first >= len(order) / 4):
                break
            for number in range(first, min(first + self.world_size, len(order))):
                kept_of[number].append(self.draw_kept(int(order[number]) * self.length, rng))
                kept = kept_of[number][-1]
                cuts += np.count_nonzero(cuts_of(kept) & (kept == CUT))
        return order, kept_of

    def draw_kept(self, low, rng):
        """What is kept of each token's document in the pass from `low` on, cut where tokens are."""
        kept, is_kept = np.full(self.length, NOISE, np.int8), True
        # The gate looks for documents itself: what the model makes of a text is its own business.
        inside = self.starts[(self.starts > low) & (self.starts < low + self.length)] - low
        for begin, end in itertools.pairwise([0, *inside.tolist(), self.length]):
            fate = int(rng.choice([CUT, FIRST, WHOLE], p=[0.86, 0.04, 0.1]))
            # Short parts are cut as often as long ones, for which this power makes up.
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
        place = int(self.rng.integers(low - begun, len(self.val) - self.length))
        if self.val[begun] != self.config.eot_token:
            place = low  # nothing says where the document begins
        noisy = np.roll(self.noise, place - low)
        noisy[place - low + begun : place] = self.val[begun:low]
        at = np.flatnonzero(kept > NOISE)
        noisy[place + at] = self.val[low + at]
        losses, states = self.score(noisy, place)
        is_cut = self.on_device(cuts_of(kept))
        return losses, states, self.logits(states, is_cut), self.on_device(kept), is_cut

    def compare(self, losses, states, noisy_losses, noisy_states, noisy_logits, kept, is_cut):
        """Add what has changed of a pass since it was read in noise. States and losses of what is
        kept must not, nor logits at cuts, whose losses are about a token that has. Two tokens may
        have one logit; but where no loss changes at all, losses say nothing about the text."""
        is_changed = differing_rows(losses, noisy_losses)
        differs = differing_rows(states, noisy_states) | (is_changed & ~is_cut)
        differs[is_cut] |= differing_rows(self.logits(states, is_cut), noisy_logits)
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

    def logits(self, states, places):
        """Logits (n, vocabulary) of the states at n places."""
        return plain(self.trainer.model.logits(each(states, lambda tensor: tensor[places])))

    def exact_losses(self, tokens, low, states):
        """Losses (T,) float64 of the softmax over the states' logits, in a drawn order: the head
        must not know a state's place. Numpy makes the last, whatever torch's functions are."""
        ids = self.on_device(tokens[low + 1 : low + 1 + self.length].astype(np.int64))
        exact = torch.empty_like(ids, dtype=torch.float64)
        for places in self.on_device(self.rng.permutation(self.length)).split(CHECKED):
            logits = self.logits(states, places)
            exact[places] = F.cross_entropy(logits, ids[places], reduction="none").double()
        places = places[: 2**24 // logits.shape[1]]
        logits = logits[: len(places)].cpu().numpy().astype(np.float64)
        peaks = logits.max(1)
        sums = peaks + np.log(np.exp(logits - peaks[:, None]).sum(1))
        exact[places] = self.on_device(sums - logits[range(len(sums)), ids[places].cpu()])
        return exact
