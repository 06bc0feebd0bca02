"""Attention, rotary embedding, the GPT against a slow float64 reference, what it may see."""

import functools
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.debugging import aot_eager

import helpers
import train_gpt
from helpers import EOT, FEEDING, KINDS, LAYERED, layers_of
from train_gpt import BlockedAttention, Runtime, VarlenAttention


def training_pass(trainer, step, micro_batch, ngram):
    """(summed training loss, losses, hidden states) of a training step's forward pass."""
    phase = train_gpt.training_phase(trainer.config, step)
    loss_weights = train_gpt.loss_weights_at(trainer.config, step)
    return trainer.forward_pass(step, phase, loss_weights, micro_batch, ngram)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_norm_is_torchs_in_float64_and_so_is_its_gradient(dtype, tolerance):
    x, upstream = (torch.randn(7, 3, 32).to(dtype) for _ in range(2))
    x[0] *= 1e-4
    exact = x.double().requires_grad_()
    expected = F.rms_norm(exact, (32,), eps=torch.finfo(torch.float32).eps)
    y = train_gpt.norm(x.requires_grad_())
    (grad,) = torch.autograd.grad(y, x, upstream)
    (expected_grad,) = torch.autograd.grad(expected, exact, upstream.double())
    for actual, wanted in ((y, expected), (grad, expected_grad)):
        assert actual.dtype == dtype
        assert (actual.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


def outputs_and_gradients(trainer):
    """[loss, losses, hidden states, gradients of the loss] of a training step's forward pass."""
    micro_batch, ngram = helpers.read(trainer, helpers.byte_documents(300))
    outputs = training_pass(trainer, 0, micro_batch, ngram)
    outputs[0].backward()
    params = [param for param in trainer.model.parameters() if param.numel()]
    return [*outputs, *(param.grad for param in params), ngram.grad]


ALL_KINDS = {"layers": layers_of(4, mlp_only=(2,), **KINDS, **FEEDING), "mlp_reach": 2}
SEGMENTS = [[0], [0, 1, 2, 30, 63, 64, 65, 127, 190, 255], [0, 64, 128]]
POSITIONS = 256
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention needs CUDA")


@pytest.mark.parametrize(
    "back_end, device, dtype, tolerance",
    [
        (BlockedAttention(is_fused=True), "cpu", torch.float32, 1e-5),
        (BlockedAttention(is_fused=True), "cpu", torch.bfloat16, 3e-2),
        (BlockedAttention(is_fused=False), "cpu", torch.float32, 1e-5),
        (BlockedAttention(is_fused=False), "cpu", torch.bfloat16, 3e-2),
        pytest.param(VarlenAttention(), "cuda", torch.bfloat16, 3e-2, marks=NEEDS_CUDA),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", [16, 48, 64, 96, 320])
@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
def test_attention_is_torchs(segments, size, count, back_end, device, dtype, tolerance):
    """And its gradients, in float64 on the CPU, with `count` positions a token."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(4, POSITIONS, 2, 64, generator=generator).to(device, dtype)
    inputs = [each.requires_grad_() for each in drawn]  # q, k, v and the result's gradient
    starts = np.array([start for start in segments if count * start < POSITIONS])
    first = np.repeat(starts, np.diff([*starts, POSITIONS // count]))
    bounds = np.append(starts, [POSITIONS // count] * 10)
    micro_batch = SimpleNamespace(
        segment_start=torch.tensor(first, dtype=torch.int32, device=device),
        segment_bounds=torch.tensor(bounds, dtype=torch.int32, device=device),
    )
    phase = train_gpt.training_phase(helpers.tiny_config(), 0)._replace(max_segment=POSITIONS)
    mask = back_end.mask(micro_batch, size, count, phase, dtype)
    output = back_end.attend(*inputs[:3], mask, 0.1)
    assert output.dtype == dtype
    place = torch.arange(POSITIONS)
    low = torch.maximum(torch.from_numpy(count * first.repeat(count)), place - size + 1)
    is_visible = (place >= low[:, None]) & (place <= place[:, None])
    q, k, v, upstream = (x.detach().double().cpu().requires_grad_() for x in inputs)
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*heads_first, attn_mask=is_visible, scale=0.1)
    expected = expected.transpose(0, 1)
    outputs = output, *torch.autograd.grad(output, inputs[:3], inputs[3])
    wanted = expected, *torch.autograd.grad(expected, (q, k, v), upstream)
    for actual, exact in zip(outputs, wanted, strict=True):
        error = (actual.double().cpu() - exact).abs().max()
        assert error <= tolerance * max(1, exact.abs().max())


def test_faster_products_change_little():
    """Nothing but rounding, by some processors to bfloat16."""
    assert train_gpt.TRACKS["english"].matmul_precision == "medium"
    losses = {}
    for precision in ("medium", "highest"):
        trainer = helpers.make_trainer(matmul_precision=precision)
        assert torch.get_float32_matmul_precision() == precision
        losses[precision] = outputs_and_gradients(trainer)[1]
    torch.testing.assert_close(losses["medium"], losses["highest"], rtol=1e-2, atol=1e-2)


def test_the_log_tells_to_what_products_round(monkeypatch):
    """Also where a processor takes bfloat16 for float32."""
    torch.set_float32_matmul_precision("highest")
    found = functools.partial(train_gpt.product_dtype, device=torch.device("cpu"))
    assert (found(torch.float32), found(torch.bfloat16)) == ("float32", "bfloat16")
    honest = torch.Tensor.__matmul__

    def rounding(x, y):
        return honest(x.bfloat16(), y.bfloat16()).float()

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounding)
    assert found(torch.float32) == "bfloat16"


def slow_rotary(head_dim, windows):
    """(radians a token of each channel pair, factor of scores)."""
    pairs, factor = head_dim // 2, 1.0
    speeds = [1024 ** (-k / (pairs // 2 - 1)) for k in range(pairs // 2)]
    speeds += [0.0] * (pairs - pairs // 2)
    for old, new in zip(windows, windows[1:], strict=False):
        factor *= 0.2 * math.log(new / old) + 1
        for pair, speed in enumerate(speeds):
            turns = old * speed / (2 * math.pi)
            keep = min(1.0, max(0.0, (turns - 1) / 31))  # 1: turns often enough to be left alone
            speeds[pair] = speed * ((1 - keep) * old / new + keep)
    return np.array(speeds), factor


@pytest.mark.parametrize("windows", [(64,), (64, 128), (128, 256, 1024)])
def test_rotary_tables_against_a_slow_reference(windows):
    tables = train_gpt.rotary_tables(70_000, 32, windows, torch.device("cpu"), torch.float32)
    speeds, factor = slow_rotary(32, windows)
    root = factor**0.5  # of queries and of keys
    for position in (0, 1, 63, 69_999):  # late positions are as exact as early ones
        cos, sin = np.cos(position * speeds), np.sin(position * speeds)
        expected = np.append(cos, cos), np.append(sin, -sin)
        for table, exact in zip(tables, expected, strict=True):
            assert table.shape == (70_000, 1, 32)
            np.testing.assert_allclose(table[position, 0].double() / root, exact, atol=2e-7)


# ----- initialisation


@pytest.mark.parametrize("untie_at, is_tied", [(0.0, False), (0.1, False), (0.25, True)])
def test_the_embedding_starts_as_the_head_only_where_it_is_tied_to_it(untie_at, is_tied):
    # A tenth of four steps is none.
    model = helpers.make_trainer(random_weights=False, untie_at=untie_at).model
    assert torch.equal(model.embed, model.head) == is_tied
    assert model.embed.std().item() == pytest.approx(0.005 if is_tied else 0.7, rel=0.1)


@pytest.mark.parametrize("changes", [{}, LAYERED], ids=["plain", "layered"])
def test_every_block_is_the_identity_at_the_start_and_learns_at_once(changes):
    trainer = helpers.make_trainer(
        random_weights=False, copy_orders=(), pointer_window=0, **changes
    )
    tokens = helpers.byte_documents(300)
    losses, states = trainer.score(0, np.array(tokens, np.uint16), 0)
    embedded = F.embedding(torch.tensor(tokens[:256]), trainer.model.embed)
    torch.testing.assert_close(states.hidden, F.rms_norm(embedded, (32,)))
    assert abs(losses.mean().item() - math.log(257)) < 0.2  # nothing is predicted yet
    loss, *_ = training_pass(trainer, 0, *helpers.read(trainer, tokens))
    matrices = [(block.value_output, block.mlp) for block in trainer.model.blocks]
    for _, projection in torch.autograd.grad(loss, itertools.chain(*matrices)):
        assert projection.any()


def test_half_of_a_shifted_layers_keys_begin_as_queries():
    layers = layers_of(4, shifted_keys=(0, 3))
    model = helpers.make_trainer(random_weights=False, layers=layers, model_dim=48).model
    turning, still = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    for layer, block in enumerate(model.blocks):
        queries, keys = block.query_key.detach().reshape(2, 3, 16, 48)
        is_shifted = layer in (0, 3)
        assert torch.equal(keys[:, still], queries[:, still]) == is_shifted
        assert keys[:, turning].any().item() == (not is_shifted)
        assert queries.std().item() == pytest.approx(0.6 / 48**0.5, rel=0.1)


def test_scripts_start_from_equal_weights_in_all_that_they_share():
    """A parameter's first values depend on seed and name alone, and no two are the same."""

    def start(**changes):
        model = train_gpt.GPT(helpers.tiny_config(**changes), back_end=None)
        return {name: param.data for name, param in model.named_parameters()}

    whole = start(**ALL_KINDS)
    drawn = {name: each for name, each in whole.items() if len(each.unique()) > 2}
    assert len({each.numpy().tobytes() for each in drawn.values()}) == len(drawn) >= 18
    for name, other in start(**ALL_KINDS, seed=2).items():
        assert torch.equal(other, whole[name]) == (name not in drawn)
    fewer = start(copy_orders=(2,), mlp_dim=128, layers=layers_of(3, shifted_keys=(0,)))
    shared = [name for name in fewer.keys() & drawn if fewer[name].shape == drawn[name].shape]
    assert len(shared) == 7
    for name in shared:
        helpers.assert_bitwise(fewer[name], whole[name], name)


def test_rows_of_tokens_have_the_gradient_that_autograd_gives_an_embedding():
    """Added to what is there: of another pass, or of another use of the embedding in this one."""
    param, tokens = torch.randn(9, 4, requires_grad=True), torch.tensor([1, 4, 5, 8])
    ids = torch.tensor([[5, 1], [8, 5], [5, 4]])
    plain = param.detach().clone().requires_grad_()
    for scale in (1.0, -3.0):
        rows = train_gpt.TokenRows.apply(param, tokens)
        read = F.embedding(torch.searchsorted(tokens, ids), rows)
        assert torch.equal(read, F.embedding(ids, param))
        for leaf, looked_up in ((param, read), (plain, F.embedding(ids, plain))):
            (scale * (looked_up**3).sum() + leaf[7:].sum()).backward()
    torch.testing.assert_close(param.grad, plain.grad, atol=1e-6, rtol=1e-6)
    assert not train_gpt.TokenRows.apply(param.detach(), tokens).requires_grad


def test_no_parameter_is_dead():
    """Each number has a gradient, those of embeddings where a token is read."""
    trainer = helpers.make_trainer(**ALL_KINDS)
    micro_batch, ngram = helpers.read(trainer, helpers.byte_documents(300))
    training_pass(trainer, 0, micro_batch, ngram)[0].backward()
    for name, param in trainer.model.named_parameters():
        is_read = micro_batch.inputs.unique() if name.endswith("embed") else ...
        assert param.grad[is_read].ne(0).all(), name


# ----- the whole network


def rms(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def earlier(x, document, back=1):
    """What x (T, ...) has of the token so far before each one; zeros where its document begins
    later."""
    is_there = np.arange(len(x)) - back >= document
    return (np.roll(x, back, 0).T * is_there).T


class SlowGPT:
    """The forward pass by loops in float64, written from the model's description."""

    def __init__(self, trainer, long_windows):
        self.config, self.table = trainer.config, trainer.table
        named = trainer.model.named_parameters()
        self.weights = {name: param.detach().double().numpy() for name, param in named}
        self.speeds, factor = slow_rotary(self.config.head_dim, long_windows)
        self.scale = self.config.attention_scale * factor
        self.dim = self.config.model_dim

    def part(self, layer, name):
        """A parameter of a layer."""
        return self.weights[f"blocks.{layer}.{name}"]

    def looked_up(self, tokens):
        """(the tokens' summed rows (T, dim), their guesses (T, G))."""
        tokens = np.append(tokens, EOT)  # the last one is only a target
        passage = helpers.passage_of(tokens, range(len(tokens) - 1))
        rows, signs = train_gpt.rows_of([passage], self.config)
        guesses = train_gpt.copies(passage, self.config)
        table = self.table.weight.double().numpy()
        return (signs[:, :, None] * table[rows]).sum(1), guesses.astype(np.int64)

    def copied(self, guesses):
        """The sum of the head's rows of guesses (T, G), by the scales of their orders."""
        total = np.zeros((len(guesses), self.dim))
        for i, column in np.argwhere(guesses >= 0):
            scale = self.weights["copy_scale"][column]
            total[i] += scale * rms(self.weights["head"][guesses[i, column]])
        return total

    def turned(self, x, i):
        c, s = np.cos(i * self.speeds), np.sin(i * self.speeds)
        a, b = np.split(x, 2)
        return np.concatenate([a * c + b * s, b * c - a * s])

    def gate_mlp(self, x, place):
        """What each token's x decides by a gate MLP."""
        up, down = (self.weights[f"{place}.{name}"] for name in ("up", "down"))
        wanted = x @ up.T
        wanted = wanted * np.array([[0.5 * (1 + math.erf(v / 2**0.5)) for v in r] for r in wanted])
        return 0.1 * (wanted @ down.T)

    def mixture(self, x, place, states, half=0):
        """A sum of states, by the shares that each token's x asks for."""
        shares = self.gate_mlp(x, place) + 0.1 * self.weights[f"{place}.bias"]
        assert shares.shape[1] % len(states) == 0  # each is used
        shares = shares[:, half * len(states) :]
        return sum(shares[:, n, None] * state for n, state in enumerate(states))

    def gates(self, layer, name, x):
        """A layer's gates of heads, by the residual stream x: (T, heads, 1)."""
        return 2 * sigmoid(x[:, :12] @ self.part(layer, name).T)[:, :, None]

    def attention(self, x, layer, inputs, document, window, addend, head_gates):
        config = self.config
        row = config.layers[layer]
        shape = len(x), -1, config.head_dim
        query, key = self.part(layer, "query_key").reshape(2, self.dim, self.dim)
        value, output = self.part(layer, "value_output")
        q, k, v = ((rms(x) @ matrix.T).reshape(shape) for matrix in (query, key, value))
        if row.value_embedding:
            v = v + self.part(layer, "value_embed")[inputs].reshape(shape)
        v = v + np.reshape(addend, shape)
        q, k = rms(q), rms(k)
        if row.shifted_keys:
            is_standing = np.arange(config.head_dim) // (config.head_dim // 4) % 2 == 1
            k = np.where(is_standing, earlier(k, document), k)
        mixed = np.zeros(v.shape)
        count = 2 if row.paired_heads else 1  # heads that see each other's keys
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
        if row.exclusive:
            unit = v / np.sqrt((v * v).sum(-1, keepdims=True))
            along = (mixed * unit).sum(-1, keepdims=True) * unit
            mixed = mixed - (self.gates(layer, "exclusive_gate", x) - 1) * along
        mixed = mixed * (1 + head_gates)[:, :, None]
        return mixed.reshape(len(x), -1) @ output.T

    def mlp_input(self, x, layer, document):
        """What a layer's MLP reads of the residual stream x: each token, and some of those before
        it in its document."""
        read = x = rms(x)
        for back in range(1, self.config.mlp_reach + 1):
            read = read + self.part(layer, "mlp_kernel")[back - 1] * earlier(x, document, back)
        return read

    def log_probabilities(self, inputs, document, windows):
        """Log-probabilities (T, vocabulary) of the next token."""
        config, weights = self.config, self.weights
        ngram, guesses = self.looked_up(inputs)
        x = rms(self.weights["embed"][inputs])
        left, states = {}, []
        last = len(config.layers) - 1
        heads = self.dim // config.head_dim
        gates = {}  # of layers, what tokens have decided last
        feeding = config.layers_with("feeds_last")
        for layer, row in enumerate(config.layers):
            if row.decides_gates:
                later = [n for n in config.layers_with("decides_gates") if n > layer]
                until = min([*later, last + 1])
                gated = [n for n in config.layers_with("attends") if layer <= n < until]
                columns = np.split(self.gate_mlp(x, f"blocks.{layer}.gate_mlp"), len(gated), axis=1)
                gates.update(zip(gated, columns, strict=True))
            x = x + 2 * sigmoid(x[:, :12] @ self.part(layer, "ngram_gate").T) * ngram
            states, addend = states or [x], np.zeros_like(x)
            if feeding and layer == last:
                states += [*(left[source] for source in feeding), x]
                addend = self.mixture(x, "mixer.before", states)
                x = x + self.mixture(x, "mixer.before", states, half=1)
            scales = self.part(layer, "output_scale")
            if row.attends:
                head_gates = gates.get(layer, np.zeros((len(x), heads)))
                seen = inputs, document, windows[layer]
                added = self.attention(x, layer, *seen, addend, head_gates)
                x = x + scales[0] * added
            up, down = self.part(layer, "mlp")
            added = np.maximum(self.mlp_input(x, layer, document) @ up.T, 0) ** 2 @ down
            x = x + scales[-1] * added
            left[layer] = x
        x = x + 2 * sigmoid(x[:, :12] @ weights["ngram_gate"].T) * ngram
        if feeding:
            for layer in config.layers_with("value_embedding")[:1]:
                states.append(self.part(layer, "value_embed")[inputs])
            x = x + self.mixture(x, "mixer.behind", states)
        if config.copy_orders:
            x = x + self.copied(guesses)
        cap, shift = config.logit_cap
        exponentials = np.exp(cap * sigmoid((rms(x) @ weights["head"].T + shift) / 7.5))
        softmax = exponentials / exponentials.sum(-1, keepdims=True)
        return np.log(self.mixed(softmax, rms(x), inputs, document)), np.log(softmax)

    def mixed(self, softmax, hidden, inputs, document):
        """Probabilities of the softmax and of the pointer, whose place is in what has followed
        earlier states of the document."""
        own = {
            n: self.weights[f"pointer.{n}"] for n in ("projections", "log_scale", "sink", "bias")
        }
        query, key = (hidden @ matrix.T for matrix in own["projections"])
        query, key = (x / np.sqrt((x * x).sum(-1, keepdims=True)) for x in (query, key))
        gates = sigmoid(hidden @ self.weights["pointer.gate"][0] + own["bias"][0])
        mixed = softmax.copy()
        for i in range(len(hidden)):
            low = max(document[i], i - self.config.pointer_window)
            scores = np.exp(np.exp(own["log_scale"]) * (key[low:i] @ query[i]))
            shares = gates[i] * scores / (scores.sum() + np.exp(own["sink"][0]))
            mixed[i] *= 1 - shares.sum()
            np.add.at(mixed[i], inputs[low + 1 : i + 1], shares)
        return mixed


def slow_training_loss(log_probabilities, of_softmax, document, tokens, mtp_weights):
    """Position i is scored on the next token and on those after it in its document, these by the
    softmax alone."""
    length, loss = len(document), 0.0
    for ahead, weight in enumerate(mtp_weights):
        for i in range(length - ahead):
            if document[i + ahead] == document[i]:
                row = of_softmax[i] if ahead else log_probabilities[i]
                loss -= weight * row[tokens[i + 1 + ahead]]
    return loss


NETWORKS = {
    "three heads": {"layers": layers_of(4, **{**KINDS, "paired_heads": ()}), "model_dim": 48},
    "no value embeddings": {
        "layers": layers_of(4, **{**KINDS, "value_embedding": ()}, feeds_last=(0,))
    },
    "fineweb's kinds": {
        "layers": layers_of(
            5, mlp_only=(2,), **{**KINDS, **FEEDING, "paired_heads": (1, 4), "feeds_last": (0, 2)}
        ),
        "mlp_reach": 3,
        "head_dim": 8,
        "logit_cap": (9.0, 2.0),
    },
}


@pytest.mark.parametrize("mtp_weights", [(1.0,), (0.7, 0.4, 0.2)])
@pytest.mark.parametrize("changes", NETWORKS.values(), ids=NETWORKS)
def test_the_network_against_a_slow_float64_reference(changes, mtp_weights):
    (later,) = helpers.TINY["stages"]
    stages = later | {"windows": (16, 32)}, later | {"start": 0.25}
    values = {"micro_batch_tokens": 128, "logit_cap": (5.0, 0.0), "ngram_orders": (2, 3)}
    values |= {"mtp_weights": mtp_weights, "stages": stages, **changes}
    trainer = helpers.make_trainer(**values)
    text = helpers.byte_documents(400)
    # The first document has lost its start.
    tokens = [*text[1:60], EOT, *text[60:70], EOT, *text[100:158]]
    document = helpers.documents_of(tokens[:128])
    step = 1  # windows have grown once
    windows = [64 if layer.is_long else 32 for layer in trainer.config.layers]
    slow = SlowGPT(trainer, (32, 64))
    expected, of_softmax = slow.log_probabilities(np.array(tokens[:128]), document, windows)
    with torch.no_grad():
        loss, losses, states = training_pass(trainer, step, *helpers.read(trainer, tokens))
    slow_losses = -expected[np.arange(128), tokens[1:129]]
    np.testing.assert_allclose(losses.double().numpy(), slow_losses, atol=2e-4)
    with torch.no_grad():
        backwards = trainer.model.logits(states.at(range(127, -1, -1))).flip(0).double().numpy()
    np.testing.assert_allclose(backwards, expected, atol=1e-3)
    np.testing.assert_allclose(np.exp(backwards).sum(1), 1, atol=1e-5)
    slow_loss = slow_training_loss(expected, of_softmax, document, tokens, mtp_weights)
    assert loss.item() / 128 == pytest.approx(slow_loss / 128, abs=1e-4)
    assert slow_losses.std() > 0.1


def test_a_pointer_of_any_scale_gives_a_distribution():
    trainer = helpers.make_trainer(micro_batch_tokens=128)
    trainer.model.pointer.log_scale.data.fill_(50.0)
    with torch.no_grad():
        read = helpers.read(trainer, helpers.byte_documents(129))
        _, losses, states = training_pass(trainer, 0, *read)
        probabilities = trainer.model.logits(states).exp().double()
    assert losses.isfinite().all()
    torch.testing.assert_close(probabilities.sum(1), torch.ones(128).double(), atol=1e-5, rtol=0)


def varlen(q, k, v, bounds, same, longest, also, scale, window_size):
    """Attention within segments, as FlashAttention has it: none is longer than it is told."""
    assert bounds is same and bounds.dtype == torch.int32 and longest == also <= len(q)
    place = torch.arange(len(q))
    segment = torch.searchsorted(bounds, place.int(), right=True)
    distance = place[:, None] - place
    is_near = (distance >= 0) & (distance <= window_size[0]) & (distance < longest)
    is_visible = is_near & (segment[:, None] == segment)
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    weights = scores.masked_fill(~is_visible, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v)


def test_one_graph_serves_all_windows(monkeypatch):
    """One of training, of four stages with other windows and other segments, and one of evaluation.
    Losses and gradients are those of blocked attention without a compiler."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    rows = zip((32, 48, 64, 80), (96, 112, 160, 176), (64, 100, 128, 250), strict=True)
    stages = [
        {"start": i / 4, "windows": (short, long), "document_cap": cap, "mtp_weights": (1.0, 0.5)}
        for i, (short, long, cap) in enumerate(rows)
    ]
    values = {"val_windows": (96, 192), "stages": stages, **LAYERED}
    traced = []
    place = np.arange(300)
    texts = [
        np.where(place % gap, place % 61, EOT).astype(np.uint16) for gap in (40, 25, 60, 9, 299)
    ]

    def count(graph, example):
        traced.append(graph)
        return aot_eager(graph, example)

    def losses_of(**changes):
        trainer = helpers.make_trainer(**values, **changes)
        read = [helpers.read(trainer, text) for text in texts[:4]]
        losses = [training_pass(trainer, step, *inputs)[1] for step, inputs in enumerate(read)]
        losses += [trainer.score(step, text, 0)[0] for step, text in enumerate(texts)]
        return torch.stack(losses), outputs_and_gradients(trainer)

    expected = losses_of()
    monkeypatch.setattr(train_gpt, "choose_attention", lambda *_: (VarlenAttention(), "varlen"))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    torch._dynamo.reset()
    with torch.compiler.config.patch(dynamic_sources=""):
        found = losses_of(compile=True)
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
    assert len(traced) == 2


@NEEDS_CUDA
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-3), ("bfloat16", 0.1)])
def test_the_model_on_a_gpu_is_the_model_on_the_cpu(dtype, tolerance):
    layers = {"mtp_weights": (1.0, 0.5), "head_dim": 8, "document_cap": 512, **LAYERED}
    reference = helpers.make_trainer(**layers)
    trainer = helpers.make_trainer(runtime=Runtime("cuda"), dtype=dtype, **layers)
    trainer.model.load_state_dict(reference.model.state_dict())
    trainer.table.weight.copy_(reference.table.weight)
    found, expected = outputs_and_gradients(trainer), outputs_and_gradients(reference)
    for actual, exact in zip(found, expected, strict=True):
        assert (actual.cpu() - exact).double().norm() <= tolerance * exact.norm()
