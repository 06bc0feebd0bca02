"""Attention, rotary embedding, the GPT against a slow float64 reference, what it may see."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from optimizer_cases import normal

import train_gpt
from benchmarks.common import reference_attention
from helpers import (
    EOT,
    LAYERED,
    NO_TABLE,
    ONE_LAYER,
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
    Window,
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
    """A Phase of one layer with this window, whose micro-batches have segments of any length."""
    return Phase((window,), (1.0,), longest, 0, False)


def of_positions(starts, count):
    """The first positions of segments that begin at these tokens, with `count` of a token."""
    return [count * start for start in starts]


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
@pytest.mark.parametrize("size", [1, 16, 32, 48, 64, 96, 128, 192, 256, 320])
def test_blocked_attention_against_the_reference(size, segments, dtype, tolerance):
    inputs, back_end = attention_inputs(dtype), BlockedAttention()
    start = segments_at(256, SEGMENTS[segments])
    micro_batch = SimpleNamespace(segment_start=start)
    window = Window(size, positions=1)
    biases = back_end.prepare(micro_batch, phase_of(window), dtype)
    out = back_end.attend(*inputs[:3], biases, window, 0.3)
    assert out.dtype == dtype
    outputs = out, *torch.autograd.grad(out, inputs[:3], inputs[3])
    assert_close_to_reference(outputs, inputs, start, size, 0.3, tolerance)


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("size", [16, 48, 64, 320])
def test_blocked_attention_with_two_positions_a_token(size, segments):
    """Of 128 tokens; a layer with one position a token has the same back end."""
    inputs, back_end = attention_inputs(torch.float32), BlockedAttention()
    starts = [start for start in SEGMENTS[segments] if start < 128]
    window, other = Window(size, positions=2), Window(size, positions=1)
    phase = phase_of(window)._replace(windows=(window, other))
    micro_batch = SimpleNamespace(segment_start=segments_at(128, starts))
    biases = back_end.prepare(micro_batch, phase, torch.float32)
    for each, count in ((window, 2), (other, 1)):
        own = [x[: count * 128].detach().requires_grad_() for x in inputs]
        out = back_end.attend(*own[:3], biases, each, 0.3)
        outputs = out, *torch.autograd.grad(out, own[:3], own[3])
        start = segments_at(count * 128, of_positions(starts, count))
        assert_close_to_reference(outputs, own, start, size, 0.3, 1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention needs CUDA")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("size", [16, 64, 192, 320])
def test_varlen_attention_against_the_reference(size, segments, count):
    """With `count` positions a token."""
    inputs, back_end = [], VarlenAttention()
    for x in attention_inputs(torch.bfloat16):
        inputs.append(x.detach().repeat(1, 1, 4).cuda().requires_grad_())
    tokens = 256 // count
    starts = [start for start in SEGMENTS[segments] if start < tokens]
    bounds = torch.full((20,), tokens, dtype=torch.int32)
    bounds[: len(starts)] = torch.tensor(starts)
    micro_batch = SimpleNamespace(segment_bounds=bounds.cuda())
    window = Window(size, count)
    prepared = back_end.prepare(micro_batch, phase_of(window, tokens), torch.bfloat16)
    out = back_end.attend(*inputs[:3], prepared, window, 0.1)
    outputs = out, *torch.autograd.grad(out, inputs[:3], inputs[3])
    start = segments_at(256, of_positions(starts, count))
    assert_close_to_reference(outputs, inputs, start, size, 0.1, 3e-2)


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


# ----- what layers do with heads, keys and values


def test_keys_are_shifted_within_their_segment():
    """Of each half of a head's channels the second half stands still, and is the key before's."""
    keys = torch.arange(1.0, 1 + 5 * 2 * 8).view(5, 2, 8)
    is_first = torch.tensor([True, False, False, True, False])
    found = train_gpt.shifted(keys, is_first)
    turning = [0, 1, 4, 5]
    still = [2, 3, 6, 7]
    assert_bitwise(found[:, :, turning], keys[:, :, turning])
    for token, before in enumerate([None, 0, 1, None, 3]):
        expected = torch.zeros(2, 4) if before is None else keys[before][:, still]
        assert_bitwise(found[token][:, still], expected)
    cos, sin, _ = rotary_tables(9, 8, (64,), CPU, torch.float32)
    alone = torch.zeros(1, 1, 8).index_fill(2, torch.tensor(still), 1.0)
    assert torch.equal(rotate(alone, cos[8:], sin[8:]), alone)  # these channels do stand still


def test_pairs_of_heads_take_turns():
    heads = torch.arange(3 * 4 * 2).view(3, 4, 2)
    found = train_gpt.in_pairs(heads)
    assert found.shape == (6, 2, 2)
    for token in range(3):
        for head in range(4):
            assert_bitwise(found[2 * token + head % 2, head // 2], heads[token, head])
    assert_bitwise(train_gpt.out_of_pairs(found), heads)


def test_an_output_without_its_own_value_has_nothing_along_it():
    y, v = normal(3, 2, 8, seed=1), normal(3, 2, 8, seed=2)
    v[0, 0] = 0  # the output stays as it is
    share = torch.tensor([1.0, 0.0, 0.5])[:, None, None].expand(3, 2, 1)
    found = train_gpt.without_own_value(y, v, share)
    cosines = F.cosine_similarity(found, v, dim=-1)
    assert cosines[0].abs().max() < 1e-6 and cosines[1].abs().min() > 1e-2
    assert_bitwise(found[0, 0], y[0, 0])
    assert_bitwise(found[1], y[1])
    none_left = train_gpt.without_own_value(y, v, torch.ones(3, 2, 1))
    torch.testing.assert_close(found[2], (y[2] + none_left[2]) / 2)


# ----- initialisation


def gpt_of(**changes):
    return GPT(tiny_config(**changes), BlockedAttention())


def test_weights_follow_from_the_seed():
    one, same, other = (gpt_of(seed=seed) for seed in (1, 1, 2))
    assert_bitwise(dict(one.named_parameters()), dict(same.named_parameters()))
    for bank in ("query_key", "value_output", "mlp"):
        assert not torch.equal(getattr(one, bank), getattr(other, bank))
    assert not torch.equal(one.embed, other.embed)


def test_the_embedding_starts_as_the_head_only_where_it_is_tied_to_it():
    # A tenth of four steps is none.
    for untie_at, is_tied in ((0.0, False), (0.1, False), (0.25, True)):
        model = gpt_of(untie_at=untie_at)
        assert torch.equal(model.embed, model.head) == is_tied
        assert model.embed.std().item() == pytest.approx(0.005 if is_tied else 0.7, rel=0.1)


def test_banks_hold_the_matrices_of_all_layers():
    """Queries and keys are cut into pairs of heads, or not at all where their number is odd."""
    for model_dim, shape in ((16, (8, 16, 16)), (32, (16, 16, 32)), (24, (8, 24, 24))):
        changes = {**LAYERED, "paired_layers": (), "model_dim": model_dim, "head_dim": 8}
        model = gpt_of(**changes)
        assert model.query_key.shape == shape
        assert model.value_output.shape == (8, model_dim, model_dim)
        assert model.mlp.shape == (8, 64, model_dim)


def test_parameters_of_features_exist_where_a_layer_has_them():
    optional = {"exclusive_gate", "skip_scale"}
    without = {name for name, _ in gpt_of(skips=()).named_parameters()}
    model = gpt_of(**LAYERED)
    assert {name for name, _ in model.named_parameters()} - without == optional
    assert not without & optional
    assert model.exclusive_gate.shape == (2, 2, 12)
    assert_bitwise(model.skip_scale.data, torch.full((3,), 0.1))


@pytest.mark.parametrize("changes", [{"num_layers": 4, "long_layers": (3,)}, LAYERED], ids=str)
def test_every_block_is_the_identity_at_the_start_and_learns_at_once(changes):
    trainer = make_trainer(random_weights=False, **changes)
    tokens = byte_documents(300)
    hidden, losses = hidden_and_losses(trainer, tokens)
    embedded = F.embedding(torch.tensor(tokens[:256]), trainer.model.embed)
    torch.testing.assert_close(hidden, F.rms_norm(embedded, (32,)))
    assert abs(losses.mean().item() - math.log(257)) < 0.2  # nothing is predicted yet
    loss, *_ = training_pass(trainer, 0, *read(trainer, tokens))
    projections = [trainer.model.value_output, trainer.model.mlp]
    for grad in torch.autograd.grad(loss, projections):
        assert grad[1::2].flatten(1).any(1).all()


# ----- the whole network


def rms(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def shifted_within(document, k):
    """Keys (T, heads, head_dim) with the standing channels of the token before in its document."""
    quarter = k.shape[-1] // 4
    result = k.copy()
    for i in range(len(k)):
        for start in (quarter, 3 * quarter):
            still = slice(start, start + quarter)
            result[i, :, still] = k[i - 1, :, still] if document[i] != i else 0
    return result


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

    def matrices(self, layer):
        """q, k, v and o of a layer."""
        config, weights = self.config, self.weights
        dim = config.model_dim
        query, key = weights["query_key"].reshape(-1, 2, dim, dim)[layer]
        value, output = weights["value_output"][2 * layer : 2 * layer + 2]
        return query, key, value, output

    def gates(self, name, layers, layer, x):
        """A layer's gates of heads, by the residual stream x: (T, heads)."""
        return 2 * sigmoid(x[:, :12] @ self.weights[name][layers.index(layer)].T)

    def attention(self, x, layer, inputs, document, window):
        config = self.config
        shape = len(x), -1, config.head_dim
        *qkv, o_matrix = self.matrices(layer)
        q, k, v = ((rms(x) @ matrix.T).reshape(shape) for matrix in qkv)
        if layer in config.value_embedding_layers:
            gates = self.gates("value_gate", config.value_embedding_layers, layer, x)
            which = config.value_embedding_layers.index(layer)
            v = v + gates[:, :, None] * self.weights["value_embed"][which][inputs].reshape(shape)
        q, k = rms(q), rms(k)
        if layer in config.shifted_layers:
            k = shifted_within(document, k)
        mixed = np.zeros(v.shape)
        count = 2 if layer in config.paired_layers else 1  # heads that see each other's keys
        for head in range(v.shape[1]):
            first = head - head % count
            # Position n is of token n // count, and of the head first + n % count.
            values = v[:, first : first + count].reshape(-1, config.head_dim)
            keys = k[:, first : first + count].reshape(-1, config.head_dim)
            keys = np.array([self.turned(key, n) for n, key in enumerate(keys)])
            for i in range(len(x)):
                n = count * i + head % count
                low = max(count * document[i], n - window + 1)
                scores = np.exp(self.scale * (keys[low : n + 1] @ self.turned(q[i, head], n)))
                mixed[i, head] = scores / scores.sum() @ values[low : n + 1]
        if layer in config.exclusive_layers:
            shares = self.gates("exclusive_gate", config.exclusive_layers, layer, x) - 1
            length = np.sqrt((v * v).sum(-1, keepdims=True))
            along = (mixed * v / length).sum(-1, keepdims=True) * v / length
            mixed = mixed - shares[:, :, None] * along
        return mixed.reshape(len(x), -1) @ o_matrix.T

    def log_probabilities(self, inputs, document, windows, is_tied):
        """Log-probabilities (T, vocabulary) of the next token."""
        config, weights = self.config, self.weights
        ngram = self.summed_rows(inputs)
        embedded = x = self.embedding(inputs, document, is_tied)
        layers, left = config.num_layers, {}
        for layer in range(layers):
            for number, (source, target) in enumerate(config.skips):
                if target == layer:
                    x = x + weights["skip_scale"][number] * left[source]
            x = weights["residual_scale"][layer] * x + weights["embed_scale"][layer] * embedded
            x = x + 2 * sigmoid(x[:, :12] @ weights["ngram_gate"][layer])[:, None] * ngram
            x = x + self.attention(x, layer, inputs, document, windows[layer])
            up, down = weights["mlp"][2 * layer], weights["mlp"][2 * layer + 1]
            x = x + np.maximum(rms(x) @ up.T, 0) ** 2 @ down
            left[layer] = x
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


NETWORKS = {
    "four layers": {"num_layers": 4, "skips": ((0, 3), (1, 2))},
    "five layers, tied": {"num_layers": 5, "skips": ((0, 4), (1, 3)), "untie_at": 0.75},
    "layered": {**LAYERED, "head_dim": 8},
    "three heads": {
        "num_layers": 4,
        "model_dim": 48,
        "shifted_layers": (0, 1, 3),
        "exclusive_layers": (0, 1),
        "skips": ((0, 3), (1, 3), (2, 3)),
    },
    "pairs in all layers": {
        "num_layers": 4,
        "head_dim": 8,
        "shifted_layers": (1,),
        "paired_layers": (0, 1, 2, 3),
        "exclusive_layers": (3,),
        "skips": (),
        "untie_at": 0.75,
    },
}


@pytest.mark.parametrize("mtp_weights", [(1.0,), (0.7, 0.4, 0.2)])
@pytest.mark.parametrize("changes", NETWORKS.values(), ids=NETWORKS)
def test_the_network_against_a_slow_float64_reference(changes, mtp_weights):
    values = {
        "micro_batch_tokens": 128,
        "long_layers": (1, 3),
        "value_embedding_layers": (0, 3),
        "logit_cap": 5.0,
        "mtp_weights": mtp_weights,
        "ngram_orders": (2, 3),
    }
    config = tiny_config(**{**values, **changes})
    (later,) = config.stages
    stages = dataclasses.replace(later, windows=(16, 32)), dataclasses.replace(later, start=0.25)
    trainer = Trainer(dataclasses.replace(config, stages=stages), Runtime("cpu"))
    randomise(trainer)
    text = byte_documents(400)
    # The first document has lost its start.
    tokens = [*text[1:60], EOT, *text[60:70], EOT, *text[100:158]]
    document = documents_of(tokens[:128])
    step = 1  # windows have grown once, and the head is still tied if it ever was
    is_tied = config.untie_at > 0
    windows = [64 if layer in config.long_layers else 32 for layer in range(config.num_layers)]
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


@pytest.mark.parametrize("changes", [{}, LAYERED], ids=["tiny", "layered"])
def test_gradients_against_finite_differences(changes):
    trainer = make_trainer(micro_batch_tokens=64, mtp_weights=(1.0, 0.5), **changes)
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


# One layer of all kinds.
DENSE = {
    "num_layers": 1,
    "skips": (),
    "long_layers": (0,),
    "shifted_layers": (0,),
    "paired_layers": (0,),
    "exclusive_layers": (0,),
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(DENSE, id="one layer"),
        pytest.param(LAYERED, id="layered", marks=pytest.mark.slow),
    ],
)
def test_compiled_equals_eager(changes):
    trainer, results = make_trainer(mtp_weights=(1.0, 0.5), **changes), []
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


@pytest.mark.parametrize("model_dim, heads", [(64, 4), (48, 3)])
def test_half_of_a_shifted_layers_keys_begin_as_queries(model_dim, heads):
    config = tiny_config(**{**LAYERED, "paired_layers": ()}, model_dim=model_dim)
    model = GPT(config, back_end=None)
    weights = model.query_key.detach().reshape(config.num_layers, 2, heads, 16, model_dim)
    turning, still = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    for layer, (queries, keys) in enumerate(weights):
        is_shifted = layer in config.shifted_layers
        assert torch.equal(keys[:, still], queries[:, still]) == is_shifted
        assert keys[:, turning].any().item() == (not is_shifted)
        assert queries.std().item() == pytest.approx(0.6 / model_dim**0.5, rel=0.1)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_untrained_shifted_layer_attends_to_what_followed_equal_tokens(seed):
    """To at least half, where even attention would give it a sixteenth."""
    config = dataclasses.replace(train_gpt.TRACKS["mini"], seed=seed)
    model = GPT(config, back_end=None)
    length, width = 256, config.model_dim
    tokens = torch.randint(16, (length,), generator=torch.Generator().manual_seed(seed))
    query_key = model.query_key.detach().view(config.num_layers, 2 * width, width)
    cos, sin, scale = rotary_tables(length, config.head_dim, [256], CPU, torch.float32)
    follows = torch.zeros(length, length, dtype=torch.bool)
    follows[:, 1:] = tokens[:, None] == tokens[:-1]
    is_past = torch.ones(length, length).tril().bool()
    for layer in config.shifted_layers:
        x = train_gpt.norm(model.embed.detach()[tokens]) @ query_key[layer].T
        q, k = train_gpt.norm(x.view(length, -1, config.head_dim)).chunk(2, dim=1)
        k = train_gpt.shifted(k, torch.arange(length) == 0)
        scores = scale * torch.einsum("ihd,jhd->hij", rotate(q, cos, sin), rotate(k, cos, sin))
        weights = scores.masked_fill(~is_past, -math.inf).softmax(-1)
        assert (weights * follows)[:, 64:].sum(-1).mean() > 0.5


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
    "one layer": {**ONE_LAYER, "windows": (64, 256)},
    "layered": LAYERED,
    "layered bfloat16": {**LAYERED, "dtype": "bfloat16"},
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


@pytest.mark.parametrize("variant", ["float32", "bfloat16", "tied", "layered", "layered bfloat16"])
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


@pytest.mark.parametrize(
    "kinds, reach",
    [((), 31), (("paired",), 16), (("shifted",), 32), (("shifted", "paired"), 17)],
    ids=str,
)
def test_windows_bound_what_a_layer_sees(kinds, reach):
    """For a pair of heads 32 positions are 16 tokens. A shifted key knows of one token more."""
    features = {f"{kind}_layers": (0,) for kind in kinds}
    trainer = make_trainer(**{**ONE_LAYER, "windows": (16, 32), **NO_TABLE, **features})
    assert first_and_last_to_differ(trainer, 50) == (50, 50 + reach + 1)  # smearing one more


def test_windows_of_several_layers_add_up():
    trainer = make_trainer(windows=(32, 64), **NO_TABLE)
    assert first_and_last_to_differ(trainer, 50) == (50, 50 + 31 + 63 + 1)


def first_and_last_to_differ(trainer, place):
    """The first and the last position whose hidden state depends on the token at a place."""
    tokens = np.random.default_rng(0).integers(0, EOT, size=257)
    changed = tokens.copy()
    changed[place] = (changed[place] + 1) % EOT
    hidden, _ = hidden_and_losses(trainer, tokens)
    other, _ = hidden_and_losses(trainer, changed)
    differs = (hidden != other).any(-1).nonzero()
    return differs[0].item(), differs[-1].item()
