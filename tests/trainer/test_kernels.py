"""Chapter 11: each kernel against the plain form of what it computes, in float64."""
import dataclasses
import json
import os
import subprocess

import pytest
import torch
import torch.nn.functional as F

import helpers
import train_gpt
from benchmarks import cuda_codegen
from helpers import ROOT, byte_documents, make_trainer, read, tiny_config

T, DIM, VOCAB, AHEAD = 150, 24, 70, 3


def drawn(*shape, scale=1.0, seed=0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ----- the loss in one pass

def loss_inputs(scale):
    """Hidden states, head, targets that repeat within a position, and shares of which some are 0."""
    targets = torch.randint(VOCAB, (T, AHEAD), generator=torch.Generator().manual_seed(1))
    targets[::5, 1] = targets[::5, 0]
    targets[::7, 2] = targets[::7, 0]
    shares = drawn(T, AHEAD, seed=2).abs() / T
    shares[::4, 2] = 0
    return drawn(T, DIM), drawn(VOCAB, DIM, scale=scale, seed=3), targets, shares


def plain_loss(hidden, head, targets, shares, cap):
    """Losses (T, K) by torch's own cross-entropy, and the gradients of their weighted sum, in float64."""
    hidden, head = (tensor.detach().double().requires_grad_() for tensor in (hidden, head))
    logits = cap * torch.tanh(hidden @ head.T / cap)
    losses = torch.stack([F.cross_entropy(logits, target, reduction="none") for target in targets.T], 1)
    loss = (losses * shares).sum()
    return loss, losses, *torch.autograd.grad(loss, (hidden, head))


def one_pass(hidden, head, targets, shares, cap):
    hidden, head = (tensor.clone().requires_grad_() for tensor in (hidden, head))
    loss, losses = train_gpt.CappedCrossEntropy.apply(hidden, head, targets, shares, cap, True)
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
    for grad, wanted in zip(grads, expected_grads):
        assert (grad.double() - 3 * wanted).norm() < 2e-5 * wanted.norm()


def test_gradients_in_bfloat16_are_as_close_as_those_of_the_plain_form():
    hidden, head, targets, shares = loss_inputs(1.0)
    hidden, head = hidden.bfloat16(), head.bfloat16()
    *_, wanted_hidden, wanted_head = plain_loss(hidden, head, targets, shares, 15.0)
    *_, grad_hidden, grad_head = one_pass(hidden, head, targets, shares, 15.0)
    leaves = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    logits = 15 * torch.tanh(F.linear(*leaves).float() / 15)
    losses = torch.stack([F.cross_entropy(logits, target, reduction="none") for target in targets.T], 1)
    plain = torch.autograd.grad((losses * shares).sum(), leaves)
    for ours, theirs, wanted in zip((grad_hidden, grad_head), plain, (wanted_hidden, wanted_head)):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() / 3 - wanted).norm() < 1.5 * (theirs.double() - wanted).norm() < 0.02 * wanted.norm()


def test_without_gradients_the_losses_are_the_same():
    inputs = loss_inputs(1.0)
    with torch.no_grad():
        scored = train_gpt.CappedCrossEntropy.apply(*inputs, 15.0, False)
    for ours, learned in zip(scored, one_pass(*inputs, 15.0)):
        torch.testing.assert_close(ours, learned, rtol=0, atol=0)


# ----- a softmax over some of the vocabulary

@pytest.mark.parametrize("count", [40, 55, VOCAB])
def test_sampled_rows_are_the_targets_and_others_at_even_distances(count):
    targets = 2 * torch.randint(VOCAB // 4, (T,), generator=torch.Generator().manual_seed(4)) + 1  # odd, to 33
    rows, places, counts = train_gpt.sampled_rows(targets, VOCAB, count)
    assert rows.tolist() == sorted(set(rows.tolist())) and len(rows) == count
    assert torch.equal(rows[places[targets]], targets) and counts[places[targets]].eq(1).all()
    assert counts.sum().item() == pytest.approx(VOCAB)
    others = sorted(set(range(VOCAB)) - set(targets.tolist()))
    taken = [others.index(row) for row in rows.tolist() if row in others]
    gaps = {(after - before) % len(others) or len(others) for before, after in zip(taken, [*taken[1:], taken[0]])}
    assert max(gaps) - min(gaps) <= 1
    elsewhere = train_gpt.sampled_rows(torch.cat([targets, targets[:1]]), VOCAB, count)[0]
    assert torch.equal(elsewhere, rows) == (count == VOCAB)


def test_loss_over_sampled_rows_against_its_definition():
    trainer = make_trainer(softmax_rows=120, mtp_weights=((0.0, (1.0, 0.5)),))
    micro_batch, ngram = read(trainer, byte_documents(300))
    phase = trainer.context(0, micro_batch, training=True).phase
    hidden = F.rms_norm(drawn(256, trainer.config.model_dim), (trainer.config.model_dim,)).requires_grad_()
    head = drawn(257, trainer.config.model_dim, scale=0.3, seed=5).requires_grad_()
    loss, losses = train_gpt.scored(hidden, head, micro_batch, phase, 15.0, "off")
    rows, _, counts = train_gpt.sampled_rows(micro_batch.targets, 257, 120)
    exact = [hidden.detach().double().requires_grad_(), head.detach().double().requires_grad_()]
    logits = 15 * torch.tanh(exact[0] @ exact[1].T / 15)
    normaliser = torch.logsumexp(logits[:, rows] + counts.double().log(), 1)
    def of(ahead):
        return normaliser[:256 - ahead] - logits[:256 - ahead].gather(1, micro_batch.targets[ahead:, None])[:, 0]
    same = micro_batch.segment_start[1:] == micro_batch.segment_start[:-1]
    expected = of(0).mean() + 0.5 * (of(1) * same).mean()
    torch.testing.assert_close(losses.double(), of(0), rtol=1e-5, atol=1e-5)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    for ours, wanted in zip(torch.autograd.grad(loss, (hidden, head)), torch.autograd.grad(expected, exact)):
        assert (ours.double() - wanted).norm() < 1e-5 * wanted.norm()


def test_validation_knows_no_sampled_rows_and_all_of_them_change_nothing():
    losses = []
    for rows in (0, 120, 257):
        trainer = make_trainer(softmax_rows=rows)
        micro_batch, ngram = read(trainer, byte_documents(300))
        with torch.no_grad():
            losses.append([trainer.model(micro_batch, ngram, trainer.context(0, micro_batch, training=training))[1]
                           for training in (False, True)])
    for scored, _ in losses:
        assert torch.equal(scored, losses[0][0])
    assert (losses[1][1] - losses[0][1]).abs().max() > 1e-3
    torch.testing.assert_close(losses[2][1], losses[0][1])


def test_too_few_rows_for_the_targets_end_in_one_line(cli, corpus):
    run = cli(**{**helpers.TINY, "data": str(corpus)}, softmax_rows=5)
    assert run.code == 2 and "softmax_rows=5: a micro-batch of step 0 has" in run.lines[-1]
    with pytest.raises(train_gpt.ConfigError, match="softmax_rows=258: at most the vocabulary, 257"):
        tiny_config(softmax_rows=258)


# ----- linear and ReLU^2

def plain_mlp(x, up, down):
    return F.relu(x @ up.T).square() @ down


def mlp_inputs(dtype):
    return [drawn(*shape, scale=scale, seed=seed).to(dtype) for seed, (shape, scale) in enumerate(
        [((T, DIM), 1.0), ((VOCAB, DIM), 0.3), ((VOCAB, DIM), 0.3), ((T, DIM), 1.0)])]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_mlp_and_its_gradients_are_those_of_the_plain_form(dtype, tolerance):
    *leaves, upstream = mlp_inputs(dtype)
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    expected = plain_mlp(*exact)
    wanted = [expected, *torch.autograd.grad(expected, exact, upstream.double())]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    made = train_gpt.ReluSquareMLP.apply(*leaves)
    for ours, value in zip([made, *torch.autograd.grad(made, leaves, upstream)], wanted):
        assert ours.dtype == dtype and (ours.double() - value).norm() < tolerance * value.norm()


# ----- norms

@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_norm_and_its_gradient_are_those_of_the_plain_form(dtype, tolerance, turned):
    x, upstream = drawn(T, 2, DIM, scale=3.0).to(dtype), drawn(T, 2, DIM, seed=1).to(dtype)
    x[3] *= 1e-4  # so small that the epsilon counts
    def tables(dtype):
        return train_gpt.rotary_tables(T, DIM, (), "cpu", dtype)[:2] if turned else ()
    exact, leaf = x.double().requires_grad_(), x.clone().requires_grad_()
    plain = F.rms_norm(exact, (DIM,), eps=torch.finfo(torch.float32).eps)
    plain = train_gpt.rotate(plain, *tables(torch.float64)) if turned else plain
    ours = train_gpt.norm(leaf, *tables(dtype))
    for one, value in ((ours, plain), (torch.autograd.grad(ours, leaf, upstream)[0],
                                       torch.autograd.grad(plain, exact, upstream.double())[0])):
        assert one.dtype == dtype
        assert ((one.double() - value).norm(dim=-1) < tolerance * value.norm(dim=-1)).all()


def kept_for_the_backward_pass(function, *inputs):
    """Bytes of the memory that the tensors lie in which autograd keeps, without that of the inputs."""
    kept = {}
    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*inputs)
    return sum(kept[place] for place in kept.keys() - {one.untyped_storage().data_ptr() for one in inputs})


def test_norms_keep_their_result_and_gates_a_few_channels():
    x, weight = drawn(T, DIM).requires_grad_(), drawn(2, train_gpt.GATE_DIM, seed=1).requires_grad_()
    def normed(x):
        return train_gpt.norm(x * 2)
    result, factors, few = 4 * T * DIM, 4 * T, 4 * T * train_gpt.GATE_DIM
    assert kept_for_the_backward_pass(normed, x) <= result + factors + 4
    def gated(x, weight):
        return train_gpt.GPT.gate(x * 2, weight)
    assert kept_for_the_backward_pass(gated, x, weight) <= few + 2 * factors + 4
    torch.testing.assert_close(train_gpt.GPT.gate(x, weight),
                               2 * torch.sigmoid(F.linear(x[:, :train_gpt.GATE_DIM], weight)))


# ----- products in 8 bits

def test_emulated_float8_products_round_once_and_never_overflow():
    x = F.rms_norm(drawn(T, DIM), (DIM,))
    x[0] = F.one_hot(torch.tensor(3), DIM) * DIM**0.5  # as large as a value can be
    matrix = drawn(VOCAB, DIM, scale=0.02, seed=1)
    narrow_x, narrow = train_gpt.states_in_float8(x), train_gpt.in_float8(matrix, matrix.abs().amax())
    made = train_gpt.float8_product(narrow_x, narrow, torch.float32, "emulated")
    exact = x.double() @ matrix.double().T
    size = x.double().abs() @ matrix.double().abs().T  # each factor is rounded by at most one sixteenth
    assert made.isfinite().all() and narrow[0].float().abs().max() == 448
    assert ((made - exact).abs() <= size * ((1 + 1 / 16)**2 - 1) + 1e-3).all()
    assert 1e-3 < (made - exact).norm() / exact.norm() < 0.05


def test_float8_mlp_and_loss_are_those_of_rounded_factors():
    x, up, down, _ = mlp_inputs(torch.float32)
    x = F.rms_norm(x, (DIM,))
    def rounded(pair):
        return pair[0].float() * pair[1]
    narrow_x, narrow_up = (rounded(pair) for pair in (train_gpt.states_in_float8(x),
                                                      train_gpt.in_float8(up, up.abs().amax())))
    torch.testing.assert_close(train_gpt.ReluSquareMLP.apply(x, up, down, "emulated"),
                               plain_mlp(narrow_x, narrow_up, down), rtol=1e-4, atol=1e-5)
    _, head, targets, shares = loss_inputs(1.0)
    narrow_head = rounded(train_gpt.in_float8(head, head.abs().amax()))
    for ours, plain in zip(train_gpt.CappedCrossEntropy.apply(x, head, targets, shares, 15.0, True, "emulated"),
                           train_gpt.CappedCrossEntropy.apply(narrow_x, narrow_head, targets, shares, 15.0, True)):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("float8, mode, words", [("off", "off", "torch-float32"), ("emulated", "emulated", "emulated"),
                                                 ("on", "off", r"float8 wants a Hopper GPU and bfloat16")])
def test_float8_says_what_it_resolves_to(float8, mode, words):
    chosen, name = train_gpt.choose_float8(tiny_config(float8=float8), torch.device("cpu"))
    assert chosen == mode and words in name


def test_float8_wants_multiples_of_16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = tiny_config(float8="on", dtype="bfloat16")
    with pytest.raises(train_gpt.ConfigError, match=r"float8=on: .* these are \(\d+, \d+, 257, 0\); use --float8 off"):
        train_gpt.choose_float8(config, torch.device("cuda", 0))
    config = dataclasses.replace(config, tokenizer="gpt2", softmax_rows=256)
    assert train_gpt.choose_float8(config, torch.device("cuda", 0)) == ("on", "torch-bfloat16+float8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert train_gpt.choose_float8(config, torch.device("cuda", 0))[0] == "off"


# ----- on a GPU's terms: Triton's interpreter, and the code for sm_90

needs_cuda_build = pytest.mark.skipif(not cuda_codegen.cuda_python(), reason="no CUDA build of torch with triton; "
                                      "`python benchmarks/cuda_codegen.py --setup` makes an environment that has one")


def with_cuda_build(script, **environment):
    """The last line of a script's output, as JSON, in the Python that has triton."""
    done = subprocess.run([cuda_codegen.cuda_python(), "-c", script], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


INTERPRETED = """
import json, torch, train_gpt
found = []
for dtype in (torch.float32, torch.float16):
    torch.manual_seed(0)
    left, right = torch.randn(150, 40).to(dtype), (torch.randn(300, 40) / 6).to(dtype)
    plain = train_gpt.relu_square(left, right)
    plain = plain, train_gpt.relu_square(left, right, plain)
    if dtype == torch.float32:  # the same tiles from factors in 8 bits
        x = torch.nn.functional.rms_norm(left, (40,))
        plain8 = train_gpt.relu_square_float8(x, right, "emulated")
    honest, train_gpt.kernels_run = train_gpt.kernels_run, lambda tensor: True
    ours = train_gpt.relu_square(left, right), train_gpt.relu_square(left, right, plain[0])
    if dtype == torch.float32:
        ours, plain = (*ours, train_gpt.relu_square_float8(x, right, "on")), (*plain, plain8)
    train_gpt.kernels_run = honest
    found += [((a - b).norm() / b.norm()).item() for a, b in zip(ours, plain)]
print(json.dumps(found))
"""


@needs_cuda_build
def test_the_triton_kernel_computes_what_the_plain_form_does():
    """In float32 and float16: Triton's interpreter multiplies no bfloat16."""
    found = with_cuda_build(INTERPRETED, TRITON_INTERPRET="1")
    assert max(found[:3]) < 1e-6 and 0 < min(found[3:]) and max(found[3:]) < 1e-3


ASSEMBLED = """
import json, torch, train_gpt
from benchmarks import cuda_codegen as codegen
codegen.pretend_h100()
generator = codegen.Generator()
with codegen.FakeTensorMode():
    leaves = [torch.empty(rows, 768, dtype=torch.bfloat16, requires_grad=True) for rows in (16384, 3072, 3072)]
    made = generator.compile(train_gpt.ReluSquareMLP.apply, dynamic=False)(*leaves)
    torch.autograd.grad(made.sum(), leaves)
    with torch.no_grad():
        generator.compile(lambda *words: train_gpt.relu_square_float8(*words, "on"), dynamic=False)(*leaves[:2])
print(json.dumps([[codegen.read_graph(graph), codegen.assemble(graph)] for graph in generator.graphs]))
"""


@needs_cuda_build
def test_the_triton_kernel_is_assembled_for_sm_90_and_keeps_products_out_of_memory():
    forward, backward, eight = with_cuda_build(ASSEMBLED)
    for (read, rows), reads_post in ((forward, False), (backward, True)):
        assert [(name, spilled) for name, _, spilled in rows] == [("relu_square_kernel", 0)]
        assert read["gigabytes"] == pytest.approx(reads_post * 2 * 16384 * 3072 / 1e9)
    assert "relu_square_kernel" in {name for name, *_ in eight[1]} and not any(spilled for *_, spilled in eight[1])
