"""The loss in one pass over the logits, and over a sample of the vocabulary, against the plain form
of what they compute, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt

T = 150
DIM = 24
VOCAB = 70
AHEAD = 3


def drawn(*shape, scale=1.0, seed=0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close_as_a_whole(actual, expected, tolerance):
    """The difference's norm is below `tolerance` of the expected one's."""
    assert actual.shape == expected.shape
    assert (actual.double() - expected).norm() < tolerance * expected.norm()


def loss_inputs(scale, dtype=torch.float32):
    """Hidden states, head, share of the softmax and what the pointer adds, targets, some of which
    are the same, and weights, some of them 0."""
    targets = torch.randint(VOCAB, (T, AHEAD), generator=torch.Generator().manual_seed(1))
    targets[::5, 1] = targets[::5, 0]
    targets[::7, 2] = targets[::7, 0]
    weights = drawn(T, AHEAD, seed=2).abs() / T
    weights[::4, 2] = 0
    weights[::11] = 0
    leaves = [drawn(T, DIM).to(dtype), drawn(VOCAB, DIM, scale=scale, seed=3).to(dtype)]
    share = drawn(T, AHEAD, seed=4).sigmoid()
    share[::3] = 1
    pointed = (1 - share) * drawn(T, AHEAD, seed=5).sigmoid()
    return *(leaf.requires_grad_() for leaf in (*leaves, share, pointed)), targets, weights


def plain_loss(
    hidden, head, share, pointed, targets, weights, cap, counts=None, dtype=torch.float64
):
    """(weighted sum of losses, losses (T, K), gradients of the sum) by torch's cross-entropy."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, head)]
    mixture = [tensor.detach().double().requires_grad_() for tensor in (share, pointed)]
    top, shift = cap
    products = F.linear(*leaves[:2])
    products = products if dtype == torch.float64 else products.float()
    logits = top * torch.sigmoid((products + shift) / 7.5)
    if counts is not None:  # each row stands for so many of the same logit; a target for itself
        logits = logits + counts.double().log()
    losses = [F.cross_entropy(logits, target, reduction="none") for target in targets.T]
    losses = -(mixture[0] * torch.exp(-torch.stack(losses, 1)) + mixture[1]).log()
    loss = (losses * weights).sum()
    return loss, losses, *torch.autograd.grad(loss, (*leaves, *mixture))


def one_pass(hidden, head, share, pointed, targets, weights, cap, counts=None):
    """(weighted sum of losses, losses of the first targets, gradients of three times the sum)."""
    leaves = hidden, head, share, pointed
    loss, losses = train_gpt.CappedCrossEntropy.apply(*leaves, targets, weights, counts, cap)
    return loss, losses, *torch.autograd.grad(3 * loss, leaves)


class Largest(TorchDispatchMode):
    """Notes how many values the largest tensor has that torch makes."""

    values = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.values = max(self.values, made.numel())
        return made


@pytest.mark.parametrize("chunk", [T, 64])
@pytest.mark.parametrize(
    "cap, scale, stood_for",
    [
        ((30.0, 0.0), 1.0, 1.0),
        ((6.0, 2.0), 2.0, 1.0),
        ((80.0, -3.0), 10.0, 1.0),
        ((80.0, 0.0), 1e-3, 1.0),
        ((23.0, 5.0), 1.0, 3.5),
    ],
)
def test_loss_and_gradients_are_those_of_the_plain_form(cap, scale, stood_for, chunk, monkeypatch):
    """The last rows of the head, which are no targets, may stand for several of their kind. Logits
    exist of a few tokens at a time: of a micro-batch of fineweb's they would take 3 GiB."""
    monkeypatch.setitem(train_gpt.LOSS_CHUNK, "cpu", chunk)
    *states, targets, weights = loss_inputs(scale)
    counts = None
    if stood_for > 1:
        targets %= 30
        counts = torch.where(torch.arange(VOCAB) < 30, 1.0, stood_for)
    inputs = *states, targets, weights, cap, counts
    with Largest() as largest:
        loss, losses, *grads = one_pass(*inputs)
    assert largest.values == chunk * VOCAB > T * DIM
    expected_loss, expected, *expected_grads = plain_loss(*inputs)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses.double(), expected[:, 0], rtol=1e-5, atol=2e-5)
    assert not losses.requires_grad
    for grad, wanted in zip(grads, expected_grads, strict=True):
        assert_close_as_a_whole(grad, 3 * wanted, 1e-5)
    assert not grads[0][::11].any()  # where no target has a weight


def test_gradients_in_bfloat16_are_as_close_as_those_of_the_plain_form():
    inputs = *loss_inputs(1.0, torch.bfloat16), (23.0, 5.0)
    _, _, *exact = plain_loss(*inputs)
    _, _, *rough = plain_loss(*inputs, dtype=torch.bfloat16)
    _, _, *grads = one_pass(*inputs)
    for grad, plain, wanted in zip(grads[:2], rough, exact, strict=False):
        assert grad.dtype == torch.bfloat16
        error = (grad.double() / 3 - wanted).norm()
        assert error < 1.75 * (plain.double() - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("count", [40, 55, VOCAB])
def test_sampled_rows_are_the_targets_and_others_that_lie_apart(count):
    odd = torch.randint(VOCAB // 4, (T,), generator=torch.Generator().manual_seed(4)) * 2 + 1
    rows, positions, counts = train_gpt.sampled_rows(odd, VOCAB, count)
    assert rows.tolist() == sorted(set(rows.tolist())) and len(rows) == count
    assert torch.equal(rows[positions[odd]], odd) and counts[positions[odd]].eq(1).all()
    assert counts.sum().item() == pytest.approx(VOCAB)
    elsewhere = train_gpt.sampled_rows(torch.cat([odd, odd[:1]]), VOCAB, count)[0]
    assert torch.equal(elsewhere, rows) == (count == VOCAB)
    rows, *_ = train_gpt.sampled_rows(odd[:1], 50_000, 1000)
    assert rows.diff().max() < 3 * 50


@pytest.mark.parametrize("is_compiled", [False, True])
def test_loss_over_sampled_rows_against_its_definition(is_compiled):
    """torch 2.13 has compiled other ways to write the counts to wrong losses, without an error."""
    hidden, head, share, pointed, targets, _ = loss_inputs(1.0)
    both = F.pad(share[:, :1], (0, 1), value=1.0), F.pad(pointed[:, :1], (0, 1))
    targets = targets[:, 0] % 30
    start = torch.arange(T) // 40 * 40
    summed_loss = train_gpt.summed_loss
    if is_compiled:
        summed_loss = torch.compile(summed_loss, dynamic=False)
    cap = 23.0, 5.0
    states = hidden, share[:, 0], pointed[:, 0]
    loss, losses = summed_loss(*states, targets, start, head, 50, torch.tensor([1.0, 0.5]), cap)
    grads = torch.autograd.grad(loss, (hidden, head))
    torch._dynamo.reset()
    rows, positions, counts = train_gpt.sampled_rows(targets, VOCAB, 50)
    predicted = positions[torch.stack([targets, targets.roll(-1)], 1)]
    is_same_segment = start == start.roll(-1)
    weights = torch.stack([torch.ones(T), 0.5 * is_same_segment], 1)
    inputs = hidden, head[rows], *both, predicted, weights, cap, counts
    expected_loss, expected, *expected_grads = plain_loss(*inputs)
    torch.testing.assert_close(losses.double(), expected[:, 0], rtol=1e-5, atol=1e-5)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    for grad, wanted in zip((grads[0], grads[1][rows]), expected_grads[:2], strict=True):
        assert_close_as_a_whole(grad, wanted, 1e-5)
