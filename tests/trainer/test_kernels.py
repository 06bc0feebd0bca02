"""Chapters 6 and 7: the loss in one pass, and products in 8 bits, against the plain form of what
they compute, in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt
from helpers import byte_documents, make_trainer, read, tiny_config

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


# ----- the loss in one pass


def loss_inputs(scale, dtype=torch.float32):
    """Hidden states, head, targets and weights.

    Some positions have a target twice or three times, some weights are 0, and of some positions all
    are.
    """
    targets = torch.randint(VOCAB, (T, AHEAD), generator=torch.Generator().manual_seed(1))
    targets[::5, 1] = targets[::5, 0]
    targets[::7, 2] = targets[::7, 0]
    weights = drawn(T, AHEAD, seed=2).abs() / T
    weights[::4, 2] = 0
    weights[::11] = 0
    return (
        drawn(T, DIM).to(dtype),
        drawn(VOCAB, DIM, scale=scale, seed=3).to(dtype),
        targets,
        weights,
    )


def plain_loss(hidden, head, targets, weights, cap, counts=None):
    """Losses (T, K) by torch's own cross-entropy, their weighted sum and its gradients, in
    float64."""
    hidden, head = (tensor.detach().double().requires_grad_() for tensor in (hidden, head))
    logits = cap * torch.tanh(hidden @ head.T / cap)
    if counts is not None:  # each row stands for so many of the same logit; a target for itself
        logits = logits + counts.double().log()
    losses = [F.cross_entropy(logits, target, reduction="none") for target in targets.T]
    losses = torch.stack(losses, 1)
    loss = (losses * weights).sum()
    return loss, losses, *torch.autograd.grad(loss, (hidden, head))


def one_pass(hidden, head, targets, weights, cap, counts=None, use_float8=False):
    """(weighted sum of losses, losses of the first targets, gradients of three times the sum)."""
    hidden, head = (tensor.clone().requires_grad_() for tensor in (hidden, head))
    loss, losses = train_gpt.CappedCrossEntropy.apply(
        hidden, head, targets, weights, counts, cap, True, use_float8
    )
    return loss, losses, *torch.autograd.grad(3 * loss, (hidden, head))


@pytest.mark.parametrize("chunk", [1000, 64])
@pytest.mark.parametrize("cap, scale", [(15.0, 1.0), (3.0, 2.0), (40.0, 20.0), (40.0, 1e-3)])
def test_loss_and_gradients_are_those_of_the_plain_form(cap, scale, chunk, monkeypatch):
    monkeypatch.setattr(train_gpt, "LOSS_CHUNK", chunk)
    inputs = loss_inputs(scale)
    loss, losses, *grads = one_pass(*inputs, cap)
    expected_loss, expected, *expected_grads = plain_loss(*inputs, cap)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses.double(), expected[:, 0], rtol=1e-5, atol=2e-5)
    assert not losses.requires_grad
    for grad, wanted in zip(grads, expected_grads, strict=True):
        assert_close_as_a_whole(grad, 3 * wanted, 1e-5)
    assert not grads[0][::11].any()  # where no target has a weight


def test_loss_over_rows_that_stand_for_several():
    hidden, head, targets, weights = loss_inputs(1.0)
    targets %= 30
    counts = torch.where(torch.arange(VOCAB) < 30, 1.0, 3.5)
    loss, losses, *grads = one_pass(hidden, head, targets, weights, 15.0, counts)
    expected_loss, expected, *expected_grads = plain_loss(
        hidden, head, targets, weights, 15.0, counts
    )
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses.double(), expected[:, 0], rtol=1e-5, atol=2e-5)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        assert_close_as_a_whole(grad, 3 * wanted, 1e-5)


def test_gradients_in_bfloat16_are_as_close_as_those_of_the_plain_form():
    hidden, head, targets, weights = loss_inputs(1.0, torch.bfloat16)
    *_, wanted_hidden, wanted_head = plain_loss(hidden, head, targets, weights, 15.0)
    *_, grad_hidden, grad_head = one_pass(hidden, head, targets, weights, 15.0)
    leaves = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    logits = 15 * torch.tanh(F.linear(*leaves).float() / 15)
    losses = [F.cross_entropy(logits, target, reduction="none") for target in targets.T]
    plain = torch.autograd.grad((torch.stack(losses, 1) * weights).sum(), leaves)
    ours = (grad_hidden, grad_head)
    for grad, theirs, wanted in zip(ours, plain, (wanted_hidden, wanted_head), strict=True):
        assert grad.dtype == torch.bfloat16
        error = (grad.double() / 3 - wanted).norm()
        assert error < 1.5 * (theirs.double() - wanted).norm() < 0.02 * wanted.norm()


class Largest(TorchDispatchMode):
    """Notes how many values the largest tensor has that torch makes."""

    values = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.values = max(self.values, tensor.numel())
        return made


def test_logits_exist_of_a_few_tokens_at_a_time(monkeypatch):
    """Of all of a micro-batch of fineweb's they would take 3 GiB, and as much again for each loss
    weight of a token further ahead."""
    monkeypatch.setattr(train_gpt, "LOSS_CHUNK", 64)
    with Largest() as largest:
        one_pass(*loss_inputs(1.0), 15.0)
    assert largest.values == 64 * VOCAB > T * DIM


def test_without_gradients_the_losses_are_the_same():
    inputs = loss_inputs(1.0)
    with torch.no_grad():
        scored = train_gpt.CappedCrossEntropy.apply(*inputs, None, 15.0, False, False)
    for ours, learned in zip(scored, one_pass(*inputs, 15.0), strict=False):
        assert torch.equal(ours, learned)


# ----- a softmax over some of the vocabulary


@pytest.mark.parametrize("count", [40, 55, VOCAB])
def test_sampled_rows_are_the_targets_and_others_at_even_distances(count):
    odd = torch.randint(VOCAB // 4, (T,), generator=torch.Generator().manual_seed(4)) * 2 + 1
    rows, positions, counts = train_gpt.sampled_rows(odd, VOCAB, count)
    assert rows.tolist() == sorted(set(rows.tolist())) and len(rows) == count
    assert torch.equal(rows[positions[odd]], odd) and counts[positions[odd]].eq(1).all()
    assert counts.sum().item() == pytest.approx(VOCAB)
    others = sorted(set(range(VOCAB)) - set(odd.tolist()))
    taken = [others.index(row) for row in rows.tolist() if row in others]
    pairs = zip(taken, [*taken[1:], taken[0] + len(others)], strict=True)
    gaps = {after - before for before, after in pairs}
    assert max(gaps) - min(gaps) <= 1
    elsewhere = train_gpt.sampled_rows(torch.cat([odd, odd[:1]]), VOCAB, count)[0]
    assert torch.equal(elsewhere, rows) == (count == VOCAB)


def test_each_row_stands_for_the_others_as_often_as_any():
    """So that the sum over the vocabulary is right on average: over places that targets decide."""
    target = torch.tensor([2])
    stood_for = torch.zeros(VOCAB)
    for repeated in range(1, VOCAB):  # one target, that many times: the place moves by two rows
        rows, _, counts = train_gpt.sampled_rows(target.repeat(repeated), VOCAB, 24)
        stood_for[rows] += counts / (VOCAB - 1)
    torch.testing.assert_close(stood_for, torch.ones(VOCAB))


def test_loss_over_sampled_rows_against_its_definition():
    trainer = make_trainer(softmax_rows=120, mtp_weights=(1.0, 0.5))
    micro_batch, _ = read(trainer, byte_documents(300, seed=1))
    phase = train_gpt.training_phase(trainer.config, 0)
    assert (phase.softmax_rows, phase.mtp_weights) == (120, (1.0, 0.5))
    hidden = F.rms_norm(drawn(256, 32), (32,)).requires_grad_()
    head = drawn(257, 32, scale=0.3, seed=5).requires_grad_()
    loss, losses = train_gpt.summed_loss(hidden, head, micro_batch, phase, 15.0, False)
    rows, _, counts = train_gpt.sampled_rows(micro_batch.targets, 257, 120)
    exact = [hidden.detach().double().requires_grad_(), head.detach().double().requires_grad_()]
    logits = 15 * torch.tanh(exact[0] @ exact[1].T / 15)
    normaliser = torch.logsumexp(logits[:, rows] + counts.double().log(), 1)
    first = normaliser - logits.gather(1, micro_batch.targets[:, None])[:, 0]
    second = normaliser[:-1] - logits[:-1].gather(1, micro_batch.targets[1:, None])[:, 0]
    start = micro_batch.segment_start
    expected = first.sum() + 0.5 * (second * (start[1:] == start[:-1])).sum()
    assert (start[1:] != start[:-1]).any()
    torch.testing.assert_close(losses.double(), first, rtol=1e-5, atol=1e-5)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    ours = torch.autograd.grad(loss, (hidden, head))
    for grad, wanted in zip(ours, torch.autograd.grad(expected, exact), strict=True):
        assert_close_as_a_whole(grad, wanted, 1e-5)


def test_validation_knows_no_sampled_rows_and_all_of_them_change_nothing():
    validation, training = {}, {}
    for rows in (0, 120, 257):
        trainer = make_trainer(softmax_rows=rows)
        micro_batch, ngram = read(trainer, byte_documents(300))
        phases = (
            (validation, train_gpt.evaluation_phase(trainer.config, 0, 256)),
            (training, train_gpt.training_phase(trainer.config, 0)),
        )
        with torch.no_grad():
            for losses, phase in phases:
                inputs = trainer.inputs(0, micro_batch, phase)
                losses[rows] = trainer.model(micro_batch, ngram, *inputs)[1]
    assert torch.equal(validation[120], validation[0])
    assert torch.equal(validation[257], validation[0])
    assert (training[120] - training[0]).abs().max() > 1e-3
    torch.testing.assert_close(training[257], training[0])


def test_too_few_rows_for_the_targets_end_in_one_line(cli, tiny):
    run = cli(**tiny, softmax_rows=5)
    assert run.code == 2 and "softmax_rows=5: a micro-batch of step 0 has" in run.lines[-1]
    with pytest.raises(train_gpt.ConfigError, match="softmax_rows=258: at most the vocabulary's"):
        tiny_config(softmax_rows=258)


# ----- the MLP


def plain_mlp(x, up, down):
    return F.relu(x @ up.T).square() @ down


def mlp_inputs():
    """x with rows of RMS 1, up and down (n, DIM)."""
    x = F.rms_norm(drawn(T, DIM), (DIM,))
    return x, drawn(VOCAB, DIM, scale=0.3, seed=1), drawn(VOCAB, DIM, scale=0.3, seed=2)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_mlp_is_that_of_the_plain_form(dtype, tolerance):
    leaves = [leaf.to(dtype) for leaf in mlp_inputs()]
    made = train_gpt.mlp(*leaves, False)
    assert made.dtype == dtype
    assert_close_as_a_whole(made, plain_mlp(*(leaf.double() for leaf in leaves)), tolerance)


# ----- products in 8 bits, of which _scaled_mm is a GPU's; torch multiplies in its place


def emulated_scaled_mm(left, right, left_scale, right_scale, out_dtype, use_fast_accum):
    """What float8 tensor cores compute, for factors (n, k) and (k, m) in 8 bits."""
    assert left.dtype == right.dtype == torch.float8_e4m3fn
    assert left.is_contiguous() and right.T.is_contiguous()  # the layouts that cuBLAS takes
    assert left_scale.dtype == right_scale.dtype == torch.float32
    assert left_scale.numel() == right_scale.numel() == 1
    product = (left.float() @ right.float()) * (left_scale * right_scale)
    return product.to(out_dtype)


@pytest.fixture
def products(monkeypatch):
    """A list of the shapes (n, k, m) of all products that are made in 8 bits."""
    made = []

    def recorded(left, right, *scales, **options):
        made.append((*left.shape, right.shape[1]))
        return emulated_scaled_mm(left, right, *scales, **options)

    monkeypatch.setattr(torch, "_scaled_mm", recorded)
    return made


def rounded(values, largest):
    """The numbers that in_float8 stands for."""
    narrow, scale = train_gpt.in_float8(values, largest)
    return narrow.float() * scale


def rounded_factors(x, weight):
    return rounded(x, torch.tensor(DIM**0.5)), rounded(weight, weight.abs().amax())


def test_float8_products_round_once_and_never_overflow(products):
    x = F.rms_norm(drawn(T, DIM), (DIM,))
    x[0] = F.one_hot(torch.tensor(3), DIM) * DIM**0.5  # as large as a value can be
    weight = drawn(VOCAB, DIM, scale=0.02, seed=1)
    made = train_gpt.float8_product(x, weight)
    assert products == [(T, DIM, VOCAB)] and made.dtype == x.dtype
    exact = x.double() @ weight.double().T
    # Each factor is rounded by at most one sixteenth; the smallest ones by more.
    size = x.double().abs() @ weight.double().abs().T
    assert made.isfinite().all()
    assert ((made - exact).abs() <= size * ((1 + 1 / 16) ** 2 - 1) + 1e-3).all()
    assert 1e-3 < (made - exact).norm() / exact.norm() < 0.05
    for values, largest in ((x, torch.tensor(DIM**0.5)), (weight, weight.abs().amax())):
        narrow, _ = train_gpt.in_float8(values, largest)
        assert narrow.float().abs().max() == 448
    assert not train_gpt.float8_product(x, torch.zeros(VOCAB, DIM)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_in_8_bits_has_the_gradients_of_the_exact_one(dtype, products):
    x, weight, _ = (leaf.to(dtype).requires_grad_() for leaf in mlp_inputs())
    upstream = drawn(T, VOCAB, seed=7).to(dtype)
    made = train_gpt.Float8Linear.apply(x, weight)
    expected = torch.autograd.grad(F.linear(x, weight), (x, weight), upstream)
    for grad, wanted in zip(
        torch.autograd.grad(made, (x, weight), upstream), expected, strict=True
    ):
        assert grad.dtype == dtype
        assert_close_as_a_whole(grad, wanted.double(), 1e-6 if dtype == torch.float32 else 1e-2)
    assert len(products) == 1  # forward alone
    assert made.dtype == dtype and not torch.equal(made, F.linear(x, weight))


def test_a_float8_mlp_is_that_of_rounded_factors(products):
    x, up, down = mlp_inputs()
    expected = plain_mlp(*rounded_factors(x, up), down)
    torch.testing.assert_close(train_gpt.mlp(x, up, down, True), expected, rtol=1e-4, atol=1e-5)
    assert len(products) == 1  # the second is of the squares, whose size nobody knows ahead


@pytest.mark.parametrize("chunk", [1000, 64])
def test_a_float8_loss_is_that_of_rounded_logits(chunk, products, monkeypatch):
    """Its gradients are at these logits, by the exact hidden states and head."""
    monkeypatch.setattr(train_gpt, "LOSS_CHUNK", chunk)
    _, head, targets, weights = loss_inputs(1.0)
    x = F.rms_norm(drawn(T, DIM), (DIM,))
    loss, losses, *grads = one_pass(x, head, targets, weights, 15.0, use_float8=True)
    assert len(products) == len(range(0, T, chunk))
    narrow_x, narrow_head = rounded_factors(x, head)
    product = (narrow_x.double() @ narrow_head.double().T).requires_grad_()
    logits = 15 * torch.tanh(product / 15)
    expected = [F.cross_entropy(logits, target, reduction="none") for target in targets.T]
    expected = torch.stack(expected, 1)
    torch.testing.assert_close(losses.double(), expected[:, 0], rtol=1e-4, atol=1e-4)
    expected_loss = (expected * weights).sum()
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    (grad,) = torch.autograd.grad(3 * expected_loss, product)
    assert_close_as_a_whole(grads[0], grad @ head.double(), 1e-5)
    assert_close_as_a_whole(grads[1], grad.T @ x.double(), 1e-5)


def float8_trainer(monkeypatch, **changes):
    monkeypatch.setattr(train_gpt, "choose_matmul", lambda *words: (True, "emulated"))
    return make_trainer(float8=True, **changes)


def test_validation_is_never_in_8_bits(products, monkeypatch):
    """What is reported is a function of the model's hidden states that torch's own cross-entropy
    gives, too."""
    trainer = float8_trainer(monkeypatch)
    of_mlp, of_head = (256, 32, 64), (256, 32, 257)
    text = train_gpt.Text(np.array(byte_documents(300), np.uint16), trainer.config)
    losses, hidden = trainer.score(0, text, 0)
    assert products == []
    targets = torch.from_numpy(text.tokens[1:257].astype(np.int64))
    expected = F.cross_entropy(trainer.model.logits(hidden), targets, reduction="none")
    torch.testing.assert_close(losses, expected)
    products.clear()
    micro_batch, ngram = read(trainer, byte_documents(300))
    phase = train_gpt.training_phase(trainer.config, 0)
    loss, *_ = trainer.model(micro_batch, ngram, *trainer.inputs(0, micro_batch, phase))
    assert products == [of_mlp] * 2 + [of_head]
    loss.backward()
    assert len(products) == 3


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_float8_run_passes_the_gates(dtype, products, cli, tiny, monkeypatch):
    values = {**tiny, "dtype": dtype, "mtp_weights": (1.0, 0.5)}
    plain = cli(**{**values, "run_id": "plain"})
    assert plain.code == 0 and not products
    monkeypatch.setattr(train_gpt, "choose_matmul", lambda *words: (True, "emulated"))
    run = cli(**{**values, "float8": True, "run_id": "narrow"})
    assert run.code == 0 and "causal:ok normalised:ok local:ok unmoved:ok" in run.stdout
    assert (256, 32, 257) in products and run.result["overrides"]["float8"] is True
    assert run.train_losses != plain.train_losses
    assert run.train_losses == pytest.approx(plain.train_losses, abs=0.05)
    assert run.result["val_loss"] == pytest.approx(plain.result["val_loss"], abs=0.05)


def test_float8_says_where_it_is_not_to_be_had(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    config = tiny_config(float8=True)
    assert train_gpt.choose_matmul(tiny_config(), cpu) == (False, "torch-float32")
    words = "torch-float32 (float8 wants a Hopper GPU and bfloat16)"
    assert train_gpt.choose_matmul(config, cpu) == (False, words)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert train_gpt.choose_matmul(config, gpu) == (False, words)
    config = train_gpt.with_values(
        config, {"dtype": "bfloat16", "tokenizer": "gpt2", "softmax_rows": 256}
    )
    assert train_gpt.choose_matmul(config, gpu) == (True, "torch-bfloat16+float8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert train_gpt.choose_matmul(config, gpu)[0] is False


def test_float8_wants_multiples_of_16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = tiny_config(float8=True, dtype="bfloat16")
    with pytest.raises(
        train_gpt.ConfigError, match=r"these are \(32, 64, 257, 0\); leave --float8"
    ):
        train_gpt.choose_matmul(config, torch.device("cuda", 0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_hopper_gpus_products_are_the_emulated_ones():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    x = F.rms_norm(drawn(256, 128), (128,)).bfloat16().cuda()
    weight = drawn(512, 128, scale=0.02, seed=1).bfloat16().cuda()
    ours = train_gpt.float8_product(x, weight)
    left, left_scale = train_gpt.in_float8(x, torch.tensor(128**0.5))
    right, right_scale = train_gpt.in_float8(weight, weight.abs().amax())
    expected = (left.double() @ right.double().T) * (left_scale.double() * right_scale.double())
    assert ours.dtype == torch.bfloat16
    assert_close_as_a_whole(ours, expected, 1e-2)
