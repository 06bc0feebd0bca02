"""Chapter 5: attention, rotary embedding, the GPT against a slow float64 reference, what it may see."""
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt
from benchmarks.common import reference_attention
from helpers import EOT, NO_TABLE, assert_bitwise, byte_documents, make_trainer, read, tiny_config
from train_gpt import GPT, rotary_tables, rotate

CPU = torch.device("cpu")


def hidden_and_losses(trainer, tokens, step=0):
    """Final hidden states and next-token losses of the first micro-batch of `tokens`."""
    losses, hidden = trainer.score(step, train_gpt.Text(np.asarray(tokens, dtype=np.uint16), trainer.config), 0)
    return hidden, losses


# ----- attention

def blocked(q, k, v, segment_start, window, scale):
    bias = train_gpt.blocked_bias(segment_start, window, q.dtype)
    micro_batch = SimpleNamespace(segment_start=segment_start)
    return train_gpt.blocked_attention(q, k, v, micro_batch, len(q), bias, window, scale)


def random_segments(length, starts):
    first = np.zeros(length, dtype=np.int32)
    first[sorted(starts)] = sorted(starts)
    return torch.from_numpy(np.maximum.accumulate(first))


SEGMENTS = {"one document": [0], "many": [0, 1, 2, 30, 63, 64, 65, 127, 190, 255], "aligned": [0, 64, 128]}


def attention_inputs(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(256, 2, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
            for _ in range(4)]


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("window", [1, 48, 256, 320])
def test_reference_attention_is_masked_softmax_attention(segments, window):
    q, k, v, _ = attention_inputs(torch.float64)
    start = random_segments(256, SEGMENTS[segments])
    visible = torch.zeros(256, 256, dtype=torch.bool)
    for i in range(256):
        visible[i, max(int(start[i]), i - window + 1):i + 1] = True
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*heads_first, attn_mask=visible, scale=0.3)
    torch.testing.assert_close(reference_attention(q, k, v, start, window, 0.3), expected.transpose(0, 1))


@pytest.mark.parametrize("dtype, tolerance", [
    (torch.float32, 1e-5), (torch.float64, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("window", [1, 16, 32, 64, 128, 192, 256, 320])
def test_blocked_attention_against_the_reference(window, segments, dtype, tolerance):
    inputs = attention_inputs(dtype)
    start = random_segments(256, SEGMENTS[segments])
    out = blocked(*inputs[:3], start, window, 0.3)
    grads = torch.autograd.grad(out, inputs[:3], inputs[3])
    assert out.dtype == dtype
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = reference_attention(*exact[:3], start, window, 0.3)
    expected_grads = torch.autograd.grad(expected, exact[:3], exact[3])
    for actual, wanted in zip((out, *grads), (expected, *expected_grads)):
        assert (actual.double() - wanted).abs().max() <= tolerance * max(1, wanted.abs().max())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="variable-length FlashAttention needs CUDA")
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("window", [16, 64, 192, 320])
def test_varlen_attention_against_the_reference(window, segments):
    inputs = [x.detach().repeat(1, 1, 4).cuda().requires_grad_() for x in attention_inputs(torch.bfloat16)]
    bounds = torch.full((20,), 256, dtype=torch.int32)
    bounds[:len(SEGMENTS[segments])] = torch.tensor(SEGMENTS[segments])
    micro_batch = SimpleNamespace(segment_bounds=bounds.cuda())
    out = train_gpt.varlen_attention(*inputs[:3], micro_batch, 256, None, window, 0.1)
    grads = torch.autograd.grad(out, inputs[:3], inputs[3])
    exact = [x.detach().double().cpu().requires_grad_() for x in inputs]
    expected = reference_attention(*exact[:3], random_segments(256, SEGMENTS[segments]), window, 0.1)
    expected_grads = torch.autograd.grad(expected, exact[:3], exact[3])
    for actual, wanted in zip((out, *grads), (expected, *expected_grads)):
        assert (actual.double().cpu() - wanted).abs().max() <= 3e-2 * max(1, wanted.abs().max())


# ----- rotary embedding

def slow_speeds(head_dim, windows):
    """Radians a token of each channel pair."""
    pairs = head_dim // 2
    speeds = [1024 ** (-k / (pairs // 2 - 1)) for k in range(pairs // 2)] + [0.0] * (pairs - pairs // 2)
    for old, new in zip(windows, windows[1:]):
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
    before, after = slow_speeds(64, (256,)), slow_speeds(64, (256, 512))
    tables = [torch.atan2(*reversed([t[1, 0] for t in rotary_tables(2, 64, w, CPU, torch.float64)[:2]]))
              for w in ((256,), (256, 512))]
    torch.testing.assert_close(tables[0], torch.tensor(before, dtype=torch.float64))
    torch.testing.assert_close(tables[1], torch.tensor(after, dtype=torch.float64))
    turns = tables[0] * 256 / (2 * math.pi)
    ratio, turns = (tables[1] / tables[0])[:16], turns[:16]  # the other half stands still
    assert (turns > 32).any() and (turns < 1).any()
    assert (ratio[turns > 32] - 1).abs().max() < 1e-9 and (ratio[turns < 1] - 0.5).abs().max() < 1e-9
    assert (ratio.diff() <= 1e-9).all()


def test_scores_depend_on_the_distance_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 32, generator=generator, dtype=torch.float64)
    *tables, _ = rotary_tables(200, 32, (64, 128), CPU, torch.float64)
    rotated_q, rotated_k = rotate(q.expand(200, 1, 32), *tables), rotate(k.expand(200, 1, 32), *tables)
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm(dim=-1).expand(200, 1))
    scores = rotated_q[:, 0] @ rotated_k[:, 0].T
    for distance in range(0, 200, 7):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[:, 0].std() > 0.1


def test_the_softmax_scale_grows_with_the_window():
    scales = [rotary_tables(2, 64, windows, CPU, torch.float32)[2] for windows in ((128,), (128, 256, 512))]
    assert scales == pytest.approx([1.35 / 8, 1.35 / 8 * (0.2 * math.log(2) + 1) ** 2])


# ----- initialisation

def test_weights_follow_from_the_seed():
    one, same, other = (GPT(tiny_config(seed=seed), "sdpa") for seed in (1, 1, 2))
    assert_bitwise(dict(one.named_parameters()), dict(same.named_parameters()))
    assert not torch.equal(one.attention, other.attention) and not torch.equal(one.embed, other.embed)


def test_the_embedding_starts_as_the_head_only_where_it_is_tied_to_it():
    for untie_at, tied in ((0.0, False), (0.1, False), (0.25, True)):  # a tenth of four steps is none
        model = GPT(tiny_config(untie_at=untie_at), "sdpa")
        assert torch.equal(model.embed, model.head) == tied
        assert model.embed.std().item() == pytest.approx(0.005 if tied else 0.7, rel=0.1)


def test_every_block_is_the_identity_at_the_start():
    trainer = make_trainer(random_weights=False, num_layers=4, long_layers=(3,))
    tokens = byte_documents(300)
    hidden, losses = hidden_and_losses(trainer, tokens)
    embedded = F.embedding(torch.tensor(tokens[:256]), trainer.model.embed)
    torch.testing.assert_close(hidden, F.rms_norm(embedded, (32,)))
    assert abs(losses.mean().item() - math.log(257)) < 0.2  # nothing is predicted yet


def test_the_projections_that_start_at_zero_learn_at_once():
    trainer = make_trainer(random_weights=False)
    micro_batch, ngram = read(trainer, byte_documents(300))
    loss, *_ = trainer.model(micro_batch, ngram, trainer.context(0, micro_batch, training=True))
    attention, mlp = torch.autograd.grad(loss, [trainer.model.attention, trainer.model.mlp])
    for layer in range(2):
        assert attention[4 * layer + 3].any() and mlp[2 * layer + 1].any()


# ----- the whole network

def rms(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True))


def slow_forward(trainer, tokens, windows, long_windows, tied):
    """Log-probabilities (T, vocabulary) by loops in float64, written from the model's description."""
    config, table = trainer.config, trainer.table.weight.double().numpy()
    weights = {name: param.detach().double().numpy() for name, param in trainer.model.named_parameters()}
    length, heads, dim = config.micro_batch_tokens, config.model_dim // config.head_dim, config.head_dim
    inputs = np.asarray(tokens[:length])
    document = [max(j for j in range(i + 1) if j == 0 or inputs[j] == EOT) for i in range(length)]
    place = train_gpt.Placement(train_gpt.Text(inputs, config), np.arange(length), None)
    rows, signs = train_gpt.table_rows(place, config, trainer.table.index)
    ngram = np.zeros((length, config.model_dim))
    for i in range(length):
        for row, sign in zip(rows[i], signs[i]):
            ngram[i] += sign * table[row]

    speeds = np.array(slow_speeds(dim, long_windows))
    scale = 1.35 / dim ** 0.5
    for old, new in zip(long_windows, long_windows[1:]):
        scale *= 0.2 * math.log(new / old) + 1
    def turned(x, i):
        c, s = np.cos(i * speeds), np.sin(i * speeds)
        a, b = x[:dim // 2], x[dim // 2:]
        return np.concatenate([a * c + b * s, b * c - a * s])
    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    token_table = weights["head" if tied else "embed"]
    x = token_table[inputs]
    smeared = x.copy()
    for i in range(1, length):
        if document[i] != i:
            gate = sigmoid(weights["smear_gate"][0] @ x[i, :12])
            smeared[i] += weights["smear_scale"][0] * gate * x[i - 1]
    embedded = x = rms(smeared)
    half, kept = config.num_layers // 2, []
    for layer in range(config.num_layers):
        if layer >= config.num_layers - half:  # a skip connection from the mirrored layer
            mirrored = kept[config.num_layers - 1 - layer]
            x = x + weights["skip_scale"][layer - (config.num_layers - half)] * mirrored
        x = weights["residual_scale"][layer] * x + weights["embed_scale"][layer] * embedded
        x = x + 2 * sigmoid(x[:, :12] @ weights["ngram_gate"][layer])[:, None] * ngram
        *qkv, o_matrix = weights["attention"][4 * layer:4 * layer + 4]
        q, k, v = ((rms(x) @ matrix.T).reshape(length, heads, dim) for matrix in qkv)
        if layer in config.value_embedding_layers:
            which = config.value_embedding_layers.index(layer)
            gate = 2 * sigmoid(x[:, :12] @ weights["value_gate"][which].T)
            v = v + gate[:, :, None] * weights["value_embed"][which][inputs].reshape(length, heads, dim)
        q, k = rms(q), rms(k)
        mixed = np.zeros((length, heads, dim))
        for head in range(heads):
            keys = np.array([turned(k[j, head], j) for j in range(length)])
            for i in range(length):
                low = max(document[i], i - windows[layer] + 1)
                scores = np.exp(scale * (keys[low:i + 1] @ turned(q[i, head], i)))
                mixed[i, head] = scores / scores.sum() @ v[low:i + 1, head]
        x = x + mixed.reshape(length, -1) @ o_matrix.T
        up, down = weights["mlp"][2 * layer], weights["mlp"][2 * layer + 1]
        x = x + np.maximum(rms(x) @ up.T, 0) ** 2 @ down
        kept.append(x)
    x = rms(x + 2 * sigmoid(x[:, :12] @ weights["ngram_gate"][config.num_layers])[:, None] * ngram)
    logits = config.logit_cap * np.tanh(x @ weights["head"].T / config.logit_cap)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True)), document


def slow_training_loss(log_probabilities, document, tokens, mtp_weights):
    """Position i is scored on the next token and, with other weights, on those after it in its document."""
    length = len(document)
    loss = 0.0
    for ahead, weight in enumerate(mtp_weights):
        scored = 0.0
        for i in range(length - ahead):
            if ahead == 0 or document[i + ahead] == document[i]:
                scored -= log_probabilities[i, tokens[i + 1 + ahead]]
        loss += weight * scored / (length - ahead)
    return loss


@pytest.mark.parametrize("mtp_weights", [(1.0,), (1.0, 0.5), (0.7, 0.4, 0.2)])
@pytest.mark.parametrize("num_layers, tied", [(4, False), (5, True)])
def test_the_network_against_a_slow_float64_reference(num_layers, tied, mtp_weights):
    config = dict(
        micro_batch_tokens=128, num_layers=num_layers, long_layers=(1, 3), value_embedding_layers=(0, 3),
        logit_cap=5.0, windows=((0.0, (16, 32)), (0.25, (32, 64))), mtp_weights=((0.0, mtp_weights),),
        ngram_orders=(2, 3), untie_at=0.75 if tied else 0.0)
    trainer = make_trainer(**config)
    text = byte_documents(400)
    tokens = [*text[1:60], EOT, *text[60:70], EOT, *text[100:158]]  # the first document has lost its start
    step = 1  # windows have grown once, and the head is still tied if it ever was
    windows = tuple(64 if layer in (1, 3) else 32 for layer in range(num_layers))
    expected, document = slow_forward(trainer, tokens, windows, (32, 64), tied)
    micro_batch, ngram = read(trainer, tokens)
    with torch.no_grad():
        loss, losses, _ = trainer.model(micro_batch, ngram, trainer.context(step, micro_batch, training=True))
    slow = -expected[np.arange(128), tokens[1:129]]
    np.testing.assert_allclose(losses.double().numpy(), slow, atol=2e-4)
    slow_loss = slow_training_loss(expected, document, tokens, mtp_weights)
    assert loss.item() == pytest.approx(slow_loss, abs=1e-4)
    assert slow.std() > 0.1


def test_validation_scores_the_next_token_alone():
    trainer = make_trainer(mtp_weights=((0.0, (1.0, 0.5)),))
    micro_batch, ngram = read(trainer, byte_documents(300))
    _, losses = hidden_and_losses(trainer, byte_documents(300))
    with torch.no_grad():
        whole, alone, _ = trainer.model(micro_batch, ngram, trainer.context(0, micro_batch, training=True))
    assert_bitwise(losses, alone)
    assert abs(whole.item() - alone.mean().item()) > 0.1


def test_gradients_against_finite_differences():
    trainer = make_trainer(micro_batch_tokens=64, mtp_weights=((0.0, (1.0, 0.5)),))
    model = trainer.model
    micro_batch, ngram = read(trainer, byte_documents(100))
    context = trainer.context(0, micro_batch, training=True)
    def loss():
        return model(micro_batch, ngram, context)[0]
    params = {**dict(model.named_parameters()), "summed rows": ngram}
    grads = dict(zip(params, torch.autograd.grad(loss(), list(params.values()))))
    generator = torch.Generator().manual_seed(0)
    for name, param in params.items():
        direction = torch.randn(param.shape, generator=generator)
        direction *= 1e-2 / direction.norm()
        with torch.no_grad():
            param.add_(direction)
            above = loss().double()
            param.sub_(2 * direction)
            below = loss().double()
            param.add_(direction)
        expected = (grads[name] * direction).sum().item()
        assert (above - below).item() / 2 == pytest.approx(expected, rel=0.05, abs=5e-6), name


def test_compiled_equals_eager():
    trainer = make_trainer(mtp_weights=((0.0, (1.0, 0.5)),))
    micro_batch, _ = read(trainer, byte_documents(300))
    compiled = torch.compile(trainer.model, backend="aot_eager", dynamic=False)
    results, weights = [], list(trainer.model.parameters())
    for forward in (trainer.model, compiled):
        _, ngram = read(trainer, byte_documents(300))
        outputs = forward(micro_batch, ngram, trainer.context(0, micro_batch, training=True))
        results.append([*outputs, *torch.autograd.grad(outputs[0], [*weights, ngram])])
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()


def test_logits_are_capped_and_give_the_losses():
    trainer = make_trainer(logit_cap=3.0)
    tokens = byte_documents(300)
    hidden, losses = hidden_and_losses(trainer, tokens)
    logits = trainer.model.logits(hidden)
    assert logits.dtype == losses.dtype == torch.float32 and logits.shape == (256, 257)
    torch.testing.assert_close(losses, F.cross_entropy(logits, torch.tensor(tokens[1:257]), reduction="none"))
    large = trainer.model.logits(100 * hidden)
    assert large.abs().max() <= 3 and large.abs().max() > 2.9


def test_a_lookup_sums_signed_rows():
    trainer = make_trainer()
    trainer.table.scale = 0.75  # what decay has left of the table
    micro_batch, summed = read(trainer, byte_documents(300))
    for i in range(0, 256, 13):
        rows = zip(micro_batch.slots[i], micro_batch.signs[i])
        expected = 0.75 * sum(sign * trainer.table.weight[row] for row, sign in rows)
        torch.testing.assert_close(summed[i].detach(), expected)
    assert summed.is_leaf and summed.requires_grad
    half = make_trainer(dtype="bfloat16")
    assert read(half, byte_documents(300))[1].dtype == torch.bfloat16 and half.table.weight.dtype == torch.float32


# ----- the tied head

def test_a_tied_head_is_the_embedding_until_it_is_untied():
    trainer = make_trainer(untie_at=0.5, mtp_weights=((0.0, (1.0, 0.5)),))
    model = trainer.model
    micro_batch, ngram = read(trainer, byte_documents(300))
    def loss_and_grads(step):
        loss, *_ = model(micro_batch, ngram, trainer.context(step, micro_batch, training=True))
        return loss.detach(), *torch.autograd.grad(loss, [model.embed, model.head], allow_unused=True)
    tied, unused, both = loss_and_grads(step=1)
    assert unused is None
    assert not torch.equal(tied, loss_and_grads(step=2)[0])
    with torch.no_grad():
        model.embed.copy_(model.head)
    untied, from_embedding, from_head = loss_and_grads(step=2)
    assert torch.equal(tied, untied)
    torch.testing.assert_close(both, from_embedding + from_head)


def test_untying_hands_over_weights_and_moments():
    trainer = make_trainer(random_weights=False, untie_at=0.5, dtype="bfloat16")
    model, state = trainer.model, trainer.optimizer.embeddings.state
    assert_bitwise(model.embed.data, model.head.data)  # one table from the start
    assert len(state["head"]) == 3  # two moments and a mantissa
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
    "short windows": {"windows": ((0.0, (16, 32)),)},
    "one layer": {"num_layers": 1, "long_layers": (0,), "windows": ((0.0, (64, 256)),)},
    "no table": NO_TABLE,
    "rows that are pulled": {"ngram_comms": "sharded", "ngram_host": True},
    "tied": {"untie_at": 1.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("last", [0, 1, 63, 64, 100, 254])
def test_nothing_before_a_changed_token_changes(last, variant):
    trainer = make_trainer(**VARIANTS[variant])
    rng = np.random.default_rng(last)
    tokens = np.asarray(byte_documents(257))
    changed = tokens.copy()
    changed[last + 1:] = (changed[last + 1:] + rng.integers(1, 257, size=256 - last)) % 257
    hidden, losses = hidden_and_losses(trainer, tokens)
    other_hidden, other_losses = hidden_and_losses(trainer, changed)
    assert_bitwise(other_hidden[:last + 1], hidden[:last + 1])
    assert_bitwise(other_losses[:last], losses[:last])
    assert not torch.equal(other_losses[last:], losses[last:])


@pytest.mark.parametrize("variant", ["float32", "bfloat16", "tied"])
def test_documents_of_a_micro_batch_are_independent(variant):
    trainer = make_trainer(windows=((0.0, (64, 256)),), **VARIANTS[variant])
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, EOT, size=257)
    bounds = (0, 90, 170, 256)
    tokens[list(bounds[:3])] = EOT
    _, losses = hidden_and_losses(trainer, tokens)
    for low, high in zip(bounds, bounds[1:]):
        changed = tokens.copy()
        changed[low + 1:high] = (changed[low + 1:high] + rng.integers(1, EOT, size=high - low - 1)) % EOT
        _, other = hidden_and_losses(trainer, changed)
        same = other == losses
        assert same[:low].all() and same[high:].all()
        assert not same[low:high - 1].any()


def test_windows_bound_what_is_seen():
    trainer = make_trainer(windows=((0.0, (32, 64)),), **NO_TABLE)
    tokens = np.random.default_rng(0).integers(0, EOT, size=257)
    changed = tokens.copy()
    changed[50] = (changed[50] + 1) % EOT
    hidden, _ = hidden_and_losses(trainer, tokens)
    other, _ = hidden_and_losses(trainer, changed)
    differs = (hidden != other).any(-1)
    # Two layers reach back 31 + 63 tokens, smearing one more.
    assert not differs[:50].any() and differs[50:50 + 32].all()
    assert differs[50 + 94] and not differs[50 + 96:].any()


# ----- compilation

@pytest.mark.parametrize("missing, reason", [("Python.h", "no Python.h"), ("compiler", "no C++ compiler")])
def test_compilation_is_switched_off_aloud_where_it_cannot_work(missing, reason, monkeypatch, tmp_path):
    from torch._inductor import cpp_builder, exc
    def compiler():
        if missing == "compiler":
            raise exc.InvalidCxxCompiler()
        return "g++"
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", compiler)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "Python.h").touch()
    include = tmp_path / ("here" if missing == "compiler" else "elsewhere")
    monkeypatch.setattr(train_gpt.sysconfig, "get_paths", lambda: {"include": str(include)})
    assert reason in train_gpt.choose_compile(tiny_config(compile=True), CPU)
    with pytest.raises(train_gpt.ConfigError, match=rf"compile=True: {re.escape(reason)}: install .*--compile false"):
        train_gpt.choose_compile(tiny_config(compile=True), torch.device("cuda", 0))
    for device in (CPU, torch.device("cuda", 0)):
        assert train_gpt.choose_compile(tiny_config(compile=False), device) == "off"
    if missing == "compiler":
        monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "g++")
        assert train_gpt.choose_compile(tiny_config(compile=True), CPU) == "inductor"
