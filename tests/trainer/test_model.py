"""Attention, rotary embedding, the GPT against a slow float64 reference, what it may see."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt
from benchmarks.common import reference_attention
from helpers import (
    EOT,
    NO_TABLE,
    assert_bitwise,
    byte_documents,
    documents_of,
    make_trainer,
    randomise,
    read,
    tiny_config,
)
from train_gpt import (
    GPT,
    BlockedAttention,
    Phase,
    Runtime,
    Trainer,
    VarlenAttention,
    rotary_tables,
    rotate,
)

CPU = torch.device("cpu")


def hidden_and_losses(trainer, tokens, step=0):
    """Final hidden states and next-token losses of the first micro-batch of `tokens`."""
    text = train_gpt.Text(np.asarray(tokens, dtype=np.uint16), trainer.config)
    losses, hidden = trainer.score(step, text, 0)
    return hidden, losses


def training_pass(trainer, step, micro_batch, ngram):
    """(summed training loss, losses, hidden states) of a training step's forward pass."""
    phase = train_gpt.training_phase(trainer.config, step)
    return trainer.forward(micro_batch, ngram, *trainer.inputs(step, micro_batch, phase))


# ----- attention


def segments_at(length, starts):
    first = np.zeros(length, dtype=np.int32)
    first[sorted(starts)] = sorted(starts)
    return torch.from_numpy(np.maximum.accumulate(first))


SEGMENTS = {
    "one document": [0],
    "many": [0, 1, 2, 30, 63, 64, 65, 127, 190, 255],
    "aligned": [0, 64, 128],
}


def phase_of(window, longest=256):
    return Phase((window,), (1.0,), longest, 0, False)


def attention_inputs(dtype, seed=0):
    """q, k, v and the gradient of the result."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for _ in range(4):
        drawn = torch.randn(256, 2, 16, generator=generator, dtype=torch.float64)
        inputs.append(drawn.to(dtype).requires_grad_())
    return inputs


def assert_close_to_reference(outputs, inputs, segment_start, window, scale, tolerance):
    """Compare a result and its gradients with those of the definition, in float64 on the CPU."""
    exact = [x.detach().double().cpu().requires_grad_() for x in inputs]
    expected = reference_attention(*exact[:3], segment_start, window, scale)
    grads = torch.autograd.grad(expected, exact[:3], exact[3])
    for actual, wanted in zip(outputs, (expected, *grads), strict=True):
        error = (actual.double().cpu() - wanted).abs().max()
        assert error <= tolerance * max(1, wanted.abs().max())


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("window", [1, 48, 256, 320])
def test_reference_attention_is_masked_softmax_attention(segments, window):
    q, k, v, _ = attention_inputs(torch.float64)
    start = segments_at(256, SEGMENTS[segments])
    visible = torch.zeros(256, 256, dtype=torch.bool)
    for i in range(256):
        visible[i, max(int(start[i]), i - window + 1) : i + 1] = True
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*heads_first, attn_mask=visible, scale=0.3)
    found = reference_attention(q, k, v, start, window, 0.3)
    torch.testing.assert_close(found, expected.transpose(0, 1))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("window", [1, 16, 32, 64, 128, 192, 256, 320])
def test_blocked_attention_against_the_reference(window, segments, dtype, tolerance):
    inputs, back_end = attention_inputs(dtype), BlockedAttention()
    start = segments_at(256, SEGMENTS[segments])
    micro_batch = SimpleNamespace(segment_start=start)
    biases = back_end.prepare(micro_batch, phase_of(window), dtype)
    out = back_end.attend(*inputs[:3], biases, window, 0.3)
    assert out.dtype == dtype
    outputs = out, *torch.autograd.grad(out, inputs[:3], inputs[3])
    assert_close_to_reference(outputs, inputs, start, window, 0.3, tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention needs CUDA")
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("window", [16, 64, 192, 320])
def test_varlen_attention_against_the_reference(window, segments):
    inputs, back_end = [], VarlenAttention()
    for x in attention_inputs(torch.bfloat16):
        inputs.append(x.detach().repeat(1, 1, 4).cuda().requires_grad_())
    bounds = torch.full((20,), 256, dtype=torch.int32)
    bounds[: len(SEGMENTS[segments])] = torch.tensor(SEGMENTS[segments])
    micro_batch = SimpleNamespace(segment_bounds=bounds.cuda())
    prepared = back_end.prepare(micro_batch, phase_of(window), torch.bfloat16)
    out = back_end.attend(*inputs[:3], prepared, window, 0.1)
    outputs = out, *torch.autograd.grad(out, inputs[:3], inputs[3])
    start = segments_at(256, SEGMENTS[segments])
    assert_close_to_reference(outputs, inputs, start, window, 0.1, 3e-2)


# ----- rotary embedding


def slow_speeds(head_dim, windows):
    """Radians a token of each channel pair."""
    pairs = head_dim // 2
    speeds = [1024 ** (-k / (pairs // 2 - 1)) for k in range(pairs // 2)]
    speeds += [0.0] * (pairs - pairs // 2)
    for old, new in zip(windows, windows[1:], strict=False):
        for pair, speed in enumerate(speeds):
            turns = old * speed / (2 * math.pi)
            keep = min(1.0, max(0.0, (turns - 1) / 31))  # 1: turns often enough to be left alone
            speeds[pair] = speed * ((1 - keep) * old / new + keep)
    return speeds


@pytest.mark.parametrize("windows", [(64,), (64, 128), (128, 256, 1024)])
def test_rotary_tables_turn_half_of_the_pairs(windows):
    cos, sin, _ = rotary_tables(70_000, 32, windows, CPU, torch.float32)
    assert cos.shape == sin.shape == (70_000, 1, 16)
    assert (cos[:, :, 8:] == 1).all() and (sin[:, :, 8:] == 0).all()
    assert (sin[1, :, :8] != 0).all()
    for position in (0, 1, 63, 69_999):  # late positions are as exact as early ones
        for pair, speed in enumerate(slow_speeds(32, windows)):
            assert abs(cos[position, 0, pair].item() - math.cos(position * speed)) < 2e-7
            assert abs(sin[position, 0, pair].item() - math.sin(position * speed)) < 2e-7


def test_yarn_slows_the_slow_pairs_and_spares_the_fast_ones():
    speeds = []
    for windows in ((256,), (256, 512)):
        cos, sin, _ = rotary_tables(2, 64, windows, CPU, torch.float64)
        found = torch.atan2(sin[1, 0], cos[1, 0])
        expected = torch.tensor(slow_speeds(64, windows), dtype=torch.float64)
        torch.testing.assert_close(found, expected)
        speeds.append(found[:16])  # the other half stands still
    turns = speeds[0] * 256 / (2 * math.pi)
    ratio = speeds[1] / speeds[0]
    assert (turns > 32).any() and (turns < 1).any()
    assert (ratio[turns > 32] - 1).abs().max() < 1e-9
    assert (ratio[turns < 1] - 0.5).abs().max() < 1e-9
    assert (ratio.diff() <= 1e-9).all()


def test_scores_depend_on_the_distance_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 32, generator=generator, dtype=torch.float64)
    cos, sin, _ = rotary_tables(200, 32, (64, 128), CPU, torch.float64)
    rotated_q = rotate(q.expand(200, 1, 32), cos, sin)
    rotated_k = rotate(k.expand(200, 1, 32), cos, sin)
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm(dim=-1).expand(200, 1))
    scores = rotated_q[:, 0] @ rotated_k[:, 0].T
    for distance in range(0, 200, 7):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[:, 0].std() > 0.1


def test_the_softmax_scale_grows_with_the_window():
    windows = (128,), (128, 256, 512)
    scales = [rotary_tables(2, 64, each, CPU, torch.float32)[2] for each in windows]
    assert scales == pytest.approx([1.35 / 8, 1.35 / 8 * (0.2 * math.log(2) + 1) ** 2])


# ----- initialisation


def gpt_of(**changes):
    return GPT(tiny_config(**changes), BlockedAttention())


def test_weights_follow_from_the_seed():
    one, same, other = (gpt_of(seed=seed) for seed in (1, 1, 2))
    assert_bitwise(dict(one.named_parameters()), dict(same.named_parameters()))
    assert not torch.equal(one.attention, other.attention)
    assert not torch.equal(one.embed, other.embed)


def test_the_embedding_starts_as_the_head_only_where_it_is_tied_to_it():
    # A tenth of four steps is none.
    for untie_at, is_tied in ((0.0, False), (0.1, False), (0.25, True)):
        model = gpt_of(untie_at=untie_at)
        assert torch.equal(model.embed, model.head) == is_tied
        assert model.embed.std().item() == pytest.approx(0.005 if is_tied else 0.7, rel=0.1)


def test_every_block_is_the_identity_at_the_start_and_learns_at_once():
    trainer = make_trainer(random_weights=False, num_layers=4, long_layers=(3,))
    tokens = byte_documents(300)
    hidden, losses = hidden_and_losses(trainer, tokens)
    embedded = F.embedding(torch.tensor(tokens[:256]), trainer.model.embed)
    torch.testing.assert_close(hidden, F.rms_norm(embedded, (32,)))
    assert abs(losses.mean().item() - math.log(257)) < 0.2  # nothing is predicted yet
    loss, *_ = training_pass(trainer, 0, *read(trainer, tokens))
    projections = [trainer.model.attention, trainer.model.mlp]
    attention, mlp = torch.autograd.grad(loss, projections)
    for layer in range(4):
        assert attention[4 * layer + 3].any() and mlp[2 * layer + 1].any()


# ----- the whole network


def rms(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class SlowGPT:
    """The forward pass by loops in float64, written from the model's description."""

    def __init__(self, trainer, long_windows):
        self.config, self.table = trainer.config, trainer.table
        self.weights = {}
        for name, param in trainer.model.named_parameters():
            self.weights[name] = param.detach().double().numpy()
        dim = self.config.head_dim
        self.speeds, self.scale = np.array(slow_speeds(dim, long_windows)), 1.35 / dim**0.5
        for old, new in zip(long_windows, long_windows[1:], strict=False):
            self.scale *= 0.2 * math.log(new / old) + 1

    def summed_rows(self, tokens):
        text = train_gpt.Text(np.asarray(tokens, dtype=np.uint16), self.config)
        window = train_gpt.TokenWindow(text, [(i, i + 1) for i in range(len(tokens))])
        rows, signs = train_gpt.table_rows(window, self.config, self.table.index)
        table = self.table.weight.double().numpy()
        return (signs[:, :, None] * table[rows]).sum(1)

    def embedding(self, inputs, document, is_tied):
        x = self.weights["head" if is_tied else "embed"][inputs]
        smeared = x.copy()
        for i in range(1, len(inputs)):
            if document[i] != i:
                gate = sigmoid(self.weights["smear_gate"][0] @ x[i, :12])
                smeared[i] += self.weights["smear_scale"][0] * gate * x[i - 1]
        return rms(smeared)

    def turned(self, x, i):
        c, s = np.cos(i * self.speeds), np.sin(i * self.speeds)
        a, b = np.split(x, 2)
        return np.concatenate([a * c + b * s, b * c - a * s])

    def attention(self, x, layer, inputs, document, window):
        config, weights = self.config, self.weights
        shape = len(x), -1, config.head_dim
        *qkv, o_matrix = weights["attention"][4 * layer : 4 * layer + 4]
        q, k, v = ((rms(x) @ matrix.T).reshape(shape) for matrix in qkv)
        if layer in config.value_embedding_layers:
            which = config.value_embedding_layers.index(layer)
            gate = 2 * sigmoid(x[:, :12] @ weights["value_gate"][which].T)
            v = v + gate[:, :, None] * weights["value_embed"][which][inputs].reshape(shape)
        q, k = rms(q), rms(k)
        mixed = np.zeros(v.shape)
        for head in range(v.shape[1]):
            keys = np.array([self.turned(k[j, head], j) for j in range(len(x))])
            for i in range(len(x)):
                low = max(document[i], i - window + 1)
                scores = np.exp(self.scale * (keys[low : i + 1] @ self.turned(q[i, head], i)))
                mixed[i, head] = scores / scores.sum() @ v[low : i + 1, head]
        return mixed.reshape(len(x), -1) @ o_matrix.T

    def log_probabilities(self, inputs, document, windows, is_tied):
        """Log-probabilities (T, vocabulary) of the next token."""
        config, weights = self.config, self.weights
        ngram = self.summed_rows(inputs)
        embedded = x = self.embedding(inputs, document, is_tied)
        layers, half, kept = config.num_layers, config.num_layers // 2, []
        for layer in range(layers):
            if layer >= layers - half:  # a skip connection from the mirrored layer
                mirrored = kept[layers - 1 - layer]
                x = x + weights["skip_scale"][layer - (layers - half)] * mirrored
            x = weights["residual_scale"][layer] * x + weights["embed_scale"][layer] * embedded
            x = x + 2 * sigmoid(x[:, :12] @ weights["ngram_gate"][layer])[:, None] * ngram
            x = x + self.attention(x, layer, inputs, document, windows[layer])
            up, down = weights["mlp"][2 * layer], weights["mlp"][2 * layer + 1]
            x = x + np.maximum(rms(x) @ up.T, 0) ** 2 @ down
            kept.append(x)
        x = rms(x + 2 * sigmoid(x[:, :12] @ weights["ngram_gate"][layers])[:, None] * ngram)
        logits = config.logit_cap * np.tanh(x @ weights["head"].T / config.logit_cap)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def slow_training_loss(log_probabilities, document, tokens, mtp_weights):
    """Position i is scored on the next token and, with other weights, on those after it in its
    document: the sum."""
    length, loss = len(document), 0.0
    for ahead, weight in enumerate(mtp_weights):
        for i in range(length - ahead):
            if ahead == 0 or document[i + ahead] == document[i]:
                loss -= weight * log_probabilities[i, tokens[i + 1 + ahead]]
    return loss


@pytest.mark.parametrize("mtp_weights", [(1.0,), (0.7, 0.4, 0.2)])
@pytest.mark.parametrize("num_layers, is_tied", [(4, False), (5, True)])
def test_the_network_against_a_slow_float64_reference(num_layers, is_tied, mtp_weights):
    config = tiny_config(
        micro_batch_tokens=128,
        num_layers=num_layers,
        long_layers=(1, 3),
        value_embedding_layers=(0, 3),
        logit_cap=5.0,
        mtp_weights=mtp_weights,
        ngram_orders=(2, 3),
        untie_at=0.75 if is_tied else 0.0,
    )
    (later,) = config.stages
    stages = dataclasses.replace(later, windows=(16, 32)), dataclasses.replace(later, start=0.25)
    trainer = Trainer(dataclasses.replace(config, stages=stages), Runtime("cpu"))
    randomise(trainer)
    text = byte_documents(400)
    # The first document has lost its start.
    tokens = [*text[1:60], EOT, *text[60:70], EOT, *text[100:158]]
    document = documents_of(tokens[:128])
    step = 1  # windows have grown once, and the head is still tied if it ever was
    windows = [64 if layer in (1, 3) else 32 for layer in range(num_layers)]
    slow = SlowGPT(trainer, (32, 64))
    expected = slow.log_probabilities(np.array(tokens[:128]), document, windows, is_tied)
    with torch.no_grad():
        loss, losses, _ = training_pass(trainer, step, *read(trainer, tokens))
    slow_losses = -expected[np.arange(128), tokens[1:129]]
    np.testing.assert_allclose(losses.double().numpy(), slow_losses, atol=2e-4)
    slow_loss = slow_training_loss(expected, document, tokens, mtp_weights)
    assert loss.item() / 128 == pytest.approx(slow_loss / 128, abs=1e-4)
    assert slow_losses.std() > 0.1


def test_validation_scores_the_next_token_alone():
    trainer = make_trainer(mtp_weights=(1.0, 0.5))
    tokens = byte_documents(300)
    _, losses = hidden_and_losses(trainer, tokens)
    with torch.no_grad():
        whole, alone, _ = training_pass(trainer, 0, *read(trainer, tokens))
    assert_bitwise(losses, alone)
    assert abs(whole.item() - alone.sum().item()) > 0.1 * len(alone)


def test_gradients_against_finite_differences():
    trainer = make_trainer(micro_batch_tokens=64, mtp_weights=(1.0, 0.5))
    micro_batch, ngram = read(trainer, byte_documents(100))

    def loss():
        return training_pass(trainer, 0, micro_batch, ngram)[0]

    params = {**dict(trainer.model.named_parameters()), "summed rows": ngram}
    grads = torch.autograd.grad(loss(), list(params.values()))
    generator = torch.Generator().manual_seed(0)
    for (name, param), grad in zip(params.items(), grads, strict=True):
        direction = torch.randn(param.shape, generator=generator)
        direction *= 1e-2 / direction.norm()
        with torch.no_grad():
            param.add_(direction)
            above = loss().double()
            param.sub_(2 * direction)
            below = loss().double()
            param.add_(direction)
        expected = (grad * direction).sum().item()
        assert (above - below).item() / 2 == pytest.approx(expected, rel=0.05, abs=3e-4), name


def test_compiled_equals_eager():
    trainer, results = make_trainer(mtp_weights=(1.0, 0.5)), []
    weights = list(trainer.model.parameters())
    for forward in (
        trainer.model,
        torch.compile(trainer.model, backend="aot_eager", dynamic=False),
    ):
        trainer.forward = forward
        micro_batch, ngram = read(trainer, byte_documents(300))
        outputs = training_pass(trainer, 0, micro_batch, ngram)
        results.append([*outputs, *torch.autograd.grad(outputs[0], [*weights, ngram])])
    torch.testing.assert_close(results[1], results[0], atol=1e-3, rtol=1e-4)
    torch._dynamo.reset()


def test_logits_are_capped_and_give_the_losses():
    trainer = make_trainer(logit_cap=3.0)
    tokens = byte_documents(300)
    hidden, losses = hidden_and_losses(trainer, tokens)
    logits = trainer.model.logits(hidden)
    assert logits.dtype == losses.dtype == torch.float32 and logits.shape == (256, 257)
    expected = F.cross_entropy(logits, torch.tensor(tokens[1:257]), reduction="none")
    torch.testing.assert_close(losses, expected)
    large = trainer.model.logits(100 * hidden)
    assert large.abs().max() <= 3 and large.abs().max() > 2.9


def test_a_lookup_sums_signed_rows():
    trainer = make_trainer()
    micro_batch, summed = read(trainer, byte_documents(300))
    for i in range(0, 256, 13):
        rows = zip(micro_batch.slots[i], micro_batch.signs[i], strict=True)
        expected = sum(sign * trainer.table.weight[row] for row, sign in rows)
        torch.testing.assert_close(summed[i].detach(), expected)
    assert summed.is_leaf and summed.requires_grad
    half = make_trainer(dtype="bfloat16")
    assert read(half, byte_documents(300))[1].dtype == torch.bfloat16
    assert half.table.weight.dtype == torch.float32


# ----- the tied head


def test_a_tied_head_is_the_embedding_until_it_is_untied():
    trainer = make_trainer(untie_at=0.5, mtp_weights=(1.0, 0.5))
    model = trainer.model
    micro_batch, ngram = read(trainer, byte_documents(300))

    def loss_and_grads(step):
        loss, *_ = training_pass(trainer, step, micro_batch, ngram)
        tables = [model.embed, model.head]
        return loss.detach(), *torch.autograd.grad(loss, tables, allow_unused=True)

    tied, unused, both = loss_and_grads(step=1)
    assert unused is None
    assert not torch.equal(tied, loss_and_grads(step=2)[0])
    with torch.no_grad():
        model.embed.copy_(model.head)
    untied, from_embedding, from_head = loss_and_grads(step=2)
    assert torch.equal(tied, untied)
    torch.testing.assert_close(both, from_embedding + from_head, atol=1e-4, rtol=1e-4)


def test_untying_hands_over_weights_and_moments():
    trainer = make_trainer(random_weights=False, untie_at=0.5, dtype="bfloat16")
    model, state = trainer.model, trainer.optimizer.embeddings.state
    assert_bitwise(model.embed.data, model.head.data)  # one table from the start
    assert set(state["head"]) == {"first", "second", "master"}
    for tensor in (model.head.data, *state["head"].values()):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) % 100)
    trainer.optimizer.untie()
    assert_bitwise(model.embed.data, model.head.data)
    assert_bitwise(state["embed"], state["head"])
    assert model.embed[3].any() and model.embed.data_ptr() != model.head.data_ptr()


# ----- what a position may see

VARIANTS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "short windows": {"windows": (16, 32)},
    "one layer": {"num_layers": 1, "long_layers": (0,), "windows": (64, 256)},
    "no table": NO_TABLE,
    "tied": {"untie_at": 1.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("last", [0, 63, 64, 254])
def test_nothing_before_a_changed_token_changes(last, variant):
    trainer = make_trainer(**VARIANTS[variant])
    rng = np.random.default_rng(last)
    tokens = np.asarray(byte_documents(257))
    changed = tokens.copy()
    changed[last + 1 :] = (changed[last + 1 :] + rng.integers(1, 257, size=256 - last)) % 257
    hidden, losses = hidden_and_losses(trainer, tokens)
    other_hidden, other_losses = hidden_and_losses(trainer, changed)
    assert_bitwise(other_hidden[: last + 1], hidden[: last + 1])
    assert_bitwise(other_losses[:last], losses[:last])
    assert not torch.equal(other_losses[last:], losses[last:])


@pytest.mark.parametrize("variant", ["float32", "bfloat16", "tied"])
def test_documents_of_a_micro_batch_are_independent(variant):
    trainer = make_trainer(**{"windows": (64, 256), **VARIANTS[variant]})
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, EOT, size=257)
    bounds = (0, 90, 170, 256)
    tokens[list(bounds[:3])] = EOT
    _, losses = hidden_and_losses(trainer, tokens)
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
        changed, noise = tokens.copy(), rng.integers(1, EOT, size=high - low - 1)
        changed[low + 1 : high] = (changed[low + 1 : high] + noise) % EOT
        _, other = hidden_and_losses(trainer, changed)
        is_same = other == losses
        assert is_same[:low].all() and is_same[high:].all()
        assert not is_same[low : high - 1].any()


def test_windows_bound_what_is_seen():
    trainer = make_trainer(windows=(32, 64), **NO_TABLE)
    tokens = np.random.default_rng(0).integers(0, EOT, size=257)
    changed = tokens.copy()
    changed[50] = (changed[50] + 1) % EOT
    hidden, _ = hidden_and_losses(trainer, tokens)
    other, _ = hidden_and_losses(trainer, changed)
    differs = (hidden != other).any(-1)
    # Two layers reach back 31 + 63 tokens, smearing one more.
    assert not differs[:50].any() and differs[50 : 50 + 32].all()
    assert differs[50 + 94] and not differs[50 + 96 :].any()
