"""Update rules against torch and slow float64 references; the rules of parameters; whole steps."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import optimizer_cases as cases
import pytest
import torch
from torch import nn

import helpers
import train_gpt
from helpers import EOT


def gpt_of(config):
    return train_gpt.GPT(config, train_gpt.BlockedAttention())


def optimizer_of(model=None, **changes):
    """An Optimizer of the GPT without a table, in this process alone."""
    config = helpers.tiny_config(**{**helpers.NO_TABLE, **changes})
    runtime = train_gpt.Runtime("cpu")
    return train_gpt.Optimizer(
        config, model or gpt_of(config), train_gpt.NgramTable(config, runtime), runtime
    )


# ----- Adam


@pytest.mark.parametrize(
    "betas, decay", [((0.9, 0.95), 0.0), ((0.8, 0.999), 10.0), ((0.0, 0.5), 0.0)]
)
def test_adam_is_torchs_but_for_its_decay(betas, decay):
    weight = cases.normal(5, 7).double()
    param = nn.Parameter(weight.clone())
    reference = torch.optim.AdamW([param], lr=0.01, betas=betas, eps=0.0, weight_decay=0)
    state = {key: torch.zeros_like(weight) for key in ("first", "second")}
    for step in range(1, 9):
        lr = 0.01 * step
        grad = cases.normal(5, 7, seed=step).double() * 10.0 ** (2 * step - 12)
        reference.param_groups[0]["lr"] = lr
        param.grad = grad.clone()
        cases.adam_step(reference, decay)
        train_gpt.adam_update(weight, grad, state, cases.hyper(step, lr, decay, betas=betas))
        torch.testing.assert_close(weight, param.data, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state["first"], reference.state[param]["exp_avg"])
    torch.testing.assert_close(state["second"], reference.state[param]["exp_avg_sq"])


@pytest.mark.parametrize("shape", [(7,), (5, 7), (3, 5, 7)], ids=str)
def test_adam_leaves_values_alone_whose_gradients_are_rounding(shape):
    """They are tiny beside the others of a vector, of a row of an embedding, or of a matrix."""
    grad = cases.normal(*shape).double()
    grad[..., 0] *= 1e-7
    weight = torch.zeros_like(grad)
    state = {"first": torch.zeros_like(grad), "second": torch.zeros_like(grad)}
    train_gpt.adam_update(weight, grad, state, cases.hyper(lr=0.1))
    expected = -0.1 * grad.sign()
    expected[..., 0] = 0
    torch.testing.assert_close(weight, expected)


def losses_of_steps(monkeypatch, chunk, together):
    """Losses of 20 steps of eight micro-batches each, of which a pass reads so many, and whose loss
    works on so many rows at once: orders in which the same numbers are added."""
    monkeypatch.setitem(train_gpt.LOSS_CHUNK, "cpu", chunk)
    trainer = helpers.make_trainer(random_weights=False, steps=20, micro_batch_tokens=64)
    device, losses = trainer.runtime.device, []
    text = np.array(helpers.byte_documents(20 * 512 + 1), np.uint16)
    for step in range(20):
        lows = range(512 * step, 512 * (step + 1), 64)
        passages = [train_gpt.contiguous_passage(text, EOT, low, 64) for low in lows]
        parts = [passages[low : low + together] for low in range(0, 8, together)]
        passes = [train_gpt.make_pass(part, trainer.config, device) for part in parts]
        batch = train_gpt.Batch(passes, trainer.table.look_up(passages), 512)
        losses.append(trainer.step(step, batch).item() / batch.tokens)
    return losses


def test_no_step_is_made_of_rounding(monkeypatch):
    """At the start the first gradients of residual_scale, embed_scale and skip_scale are zero but
    for rounding, so that the order of sums decides on their signs."""
    losses = losses_of_steps(monkeypatch, 64, 1)
    assert losses[-1] < losses[0] - 2
    assert losses_of_steps(monkeypatch, 256, 8) == pytest.approx(losses, abs=1e-4)


@pytest.mark.parametrize("track", ["english", "fineweb"])
def test_a_first_step_of_an_output_s_scale_is_twice_the_matrices_rate(track):
    """Whatever Adam's rate is, which differs between these tracks."""
    small = {"model_dim": 64, "head_dim": 16, "mlp_dim": 16, "vocab_size": 64, "eot_token": 63}
    config = train_gpt.with_values(train_gpt.TRACKS[track], {**small, "softmax_rows": 0})
    scale = gpt_of(config).output_scale
    assert scale.shape == (len(config.layers), 2) and (scale == 1).all()
    state = {"first": torch.zeros_like(scale), "second": torch.zeros_like(scale)}
    lr = config.adam_lr * scale.rule.lr_mul
    train_gpt.adam_update(scale.data, torch.ones_like(scale), state, cases.hyper(lr=lr))
    torch.testing.assert_close(scale.data, torch.full_like(scale, 1 - 2 * config.matrix_lr))


# ----- Muon


def test_the_polynomials_bring_singular_values_near_1():
    values = cases.composed_polynomials(np.geomspace(1e-3, 1 / 1.02, 100_000))
    assert values.min() > 0.8 and values.max() < 1.2


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-3), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("rows, columns", [(24, 24), (40, 16), (16, 40), (1, 8), (8, 1)])
def test_polar_express_against_the_svd(rows, columns, dtype, tolerance):
    """The same singular vectors, each value sent through the polynomials; of a matrix whose norm
    overflows NaN, since a step of zero would go unnoticed."""
    scales = torch.tensor([1e-6, 1.0, 1e4, 0.0, 1e30])
    matrices = cases.normal(5, rows, columns) * scales[:, None, None]
    if dtype == torch.bfloat16 and min(rows, columns) == 1:
        tolerance = 0.3  # the one value of a vector lies where the polynomials are steepest
    out = train_gpt.polar_express(matrices, dtype)
    assert out.dtype == torch.float32 and out.shape == matrices.shape
    for matrix, polar in zip(matrices[:3].double(), out[:3].double(), strict=True):
        u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
        wanted = cases.composed_polynomials(values / (values.norm() * 1.02))
        assert (polar - (u * wanted) @ vt).norm() <= tolerance * wanted.norm()
    assert not out[3].any() and out[4].isnan().all()


@pytest.mark.parametrize("rows, columns", [(12, 12), (24, 8), (8, 24)])
def test_muon_against_a_slow_float64_reference(rows, columns):
    weight = cases.normal(3, rows, columns)
    second = torch.zeros((3, rows, 1) if rows >= columns else (3, 1, columns))
    state = {"momentum": torch.zeros_like(weight), "row_square": second}
    tensors = weight, state["momentum"], state["row_square"]
    slow = [[tensor[k].double().numpy() for tensor in tensors] for k in range(3)]
    for step in range(4):
        lr, momentum = 0.05 * (step + 1), 0.85 + 0.03 * step
        grad = cases.normal(3, rows, columns, seed=step + 1)
        train_gpt.muon_update(weight, grad.clone(), state, cases.hyper(step + 1, lr, 0.5, momentum))
        for k in range(3):
            exact = grad[k].double().numpy()
            slow[k] = cases.slow_muon(*slow[k], exact, lr, momentum, 0.5)
            for actual, expected in zip(tensors, slow[k], strict=True):
                found = actual[k].double().numpy()
                np.testing.assert_allclose(found, expected, atol=2e-4, rtol=2e-3)


# ----- bfloat16 weights with a float32 master


def test_bfloat16_training_is_float32_training_bitwise():
    changes = {"dtype": "bfloat16", "untie_at": 0.5, "steps": 8}
    config = helpers.tiny_config(**helpers.NO_TABLE, **changes)
    models = gpt_of(config), gpt_of(config).float()
    pair = [optimizer_of(model, **changes) for model in models]
    for step in range(6):
        for optimizer in pair:
            params = cases.params_of(optimizer)
            # Whole numbers, whose sums are exact in both types.
            grads = {
                name: (4 * cases.normal(*param.shape, seed=step)).round()
                for name, param in params.items()
            }
            cases.take_step(optimizer, step, grads, lr_mul=0.7)
    state, masters = cases.state_of(pair[0]), []
    exact = cases.params_of(pair[1])
    for name, param in cases.params_of(pair[0]).items():
        helpers.assert_bitwise(param, exact[name].to(param.dtype), name)
        if name in state:
            helpers.assert_bitwise(state[name]["master"], exact[name], name)
            masters.append(name)
    helpers.assert_bitwise(state["small"], cases.state_of(pair[1])["small"])
    assert len(masters) == 6 and not torch.equal(
        exact["mlp"], cases.params_of(pair[0])["mlp"].float()
    )


# ----- the rules of parameters


def test_every_parameter_moves_at_its_own_rate():
    """The first step of Adam is the learning rate; embedding and head have another."""
    optimizer = optimizer_of(**helpers.LAYERED, embed_lr=3.0)
    before = {name: param.clone() for name, param in cases.params_of(optimizer).items()}
    ones = {name: torch.ones_like(param) for name, param in before.items()}
    cases.take_step(optimizer, 0, ones, lr_mul=0.5)
    for name, param in cases.params_of(optimizer).items():
        moved = before[name] - param
        if cases.RULES[name].group == "matrices":
            assert moved.any()
        else:
            group_rate = 0.5 * helpers.tiny_config().adam_lr
            rate = group_rate * (3 if name in ("embed", "head") else cases.RULES[name].lr_mul)
            decayed = torch.where(before[name] > 0, cases.RULES[name].decay * before[name], 0)
            expected = rate * (1 + group_rate * decayed)
            torch.testing.assert_close(moved, expected, atol=1e-6, rtol=1e-3)


def test_matrices_of_a_bank_may_have_rates_of_their_own():
    """Rates are given to a bank as one tensor."""

    def moved(lr_mul):
        rules = {"mlp": dataclasses.replace(cases.RULES["mlp"], lr_mul=lr_mul)}
        shapes = {**cases.SMALL, "mlp": (2, 16, 8)}
        optimizer = cases.optimizer_of(train_gpt.Runtime("cpu"), shapes, rules=rules)
        cases.take_step(optimizer, 0, {"mlp": cases.normal(2, 16, 8)}, lr_mul=0.7)
        return cases.params_of(optimizer)["mlp"]

    mixed, slow, fast = map(moved, (torch.tensor([1.0, 2.0])[:, None, None], 1.0, 2.0))
    torch.testing.assert_close(mixed, torch.stack([slow[0], fast[1]]))
    assert not torch.equal(slow, fast)


# ----- sums of gradients


def test_moments_are_of_sums_over_the_tokens_of_a_cycle():
    """Adam waits for the second step of its cycle. Muon does not wait, which only its momentum
    shows."""
    grads = [cases.normal(257, 32, seed=seed) for seed in range(4)]
    mlp_grads = [cases.normal(4, 64, 32, seed=9 + seed) for seed in range(4)]
    config = helpers.tiny_config(steps=8)
    optimizer = optimizer_of(steps=8, adam_every=2)
    first, momentum = torch.zeros(257, 32), torch.zeros(4, 64, 32)
    for step in range(4):
        cases.add(optimizer, {"embed": grads[step] / 2, "mlp": mlp_grads[step]})
        cases.take_step(optimizer, step, {"embed": grads[step] / 2, "mlp": None})
        momentum.lerp_(mlp_grads[step], 1 - train_gpt.momentum_at(config, step))
        if step % 2:
            first.lerp_(grads[step - 1] + grads[step], 1 - cases.RULES["embed"].betas[0])
        torch.testing.assert_close(cases.state_of(optimizer)["embed"]["first"], first)
        torch.testing.assert_close(cases.state_of(optimizer)["mlp"]["momentum"], momentum)


# ----- compiled updates


@pytest.mark.parametrize("rule", train_gpt.UPDATE_RULES)
def test_compiled_updates_are_the_plain_ones_in_one_graph(rule, monkeypatch):
    """Traced as torch.compile does for a GPU, and executed by torch's own operations. Schedules
    compile nothing again; nor does a parameter of the same shape."""
    traced = []

    def count(graph, example):
        traced.append(graph)
        return graph

    options = {"fullgraph": True, "backend": count}
    compiler = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *words, **more: compiler(*words, **more, **options)
    )
    torch._dynamo.reset()
    banks = {"query_key": (4, 8, 8), "mlp": (4, 8, 8), "embed": (6, 8), "head": (6, 8)}
    shapes = {**cases.SMALL, **banks}
    runtime = train_gpt.Runtime("cpu")
    plain, compiled = (cases.optimizer_of(runtime, shapes, matrix_update=rule) for _ in range(2))
    for group in compiled.parameter_groups:
        group.take_step = train_gpt.compiled_updates()
    for step in range(4):
        for optimizer in (plain, compiled):
            cases.accumulate(optimizer, step, runtime)
            optimizer.step(step, 1 / (step + 1))
    assert len(traced) == 3  # of matrices, of embeddings, and of the small ones
    found = (cases.params_of(optimizer) for optimizer in (compiled, plain))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()


@pytest.mark.parametrize("device, is_compiled", [("cpu", True), ("cuda", False), ("cuda", True)])
def test_updates_are_compiled_on_cuda_alone(device, is_compiled, monkeypatch):
    monkeypatch.setattr(train_gpt, "compiled_updates", lambda: "compiled")
    runtime = train_gpt.Runtime("cpu")
    runtime.device = SimpleNamespace(type=device)
    config = helpers.tiny_config(compile=is_compiled)
    group = train_gpt.ParameterGroup("matrices", config, {}, runtime)
    assert (group.take_step == "compiled") == (device == "cuda" and is_compiled)


# ----- the head, which is the embedding too until it is untied


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_untying_inside_a_cycle_is_torchs_adam_on_one_table_then_on_two(dtype):
    """Every third step, and at the end on what is left; four steps in, the head is to be untied, so
    that it is at six.

    The reference knows a table, which has the gradients of both its uses, and from then on its
    copy with the table's moments. Both see sums over whole cycles.
    """
    changes = {"steps": 13, "adam_every": 3, "untie_at": 4 / 13, "dtype": dtype}
    config = helpers.tiny_config(**helpers.NO_TABLE, **changes)
    model = gpt_of(config)
    optimizer = optimizer_of(model, **changes)
    assert torch.equal(model.embed, model.head)

    def adam_of(name, table):
        rule = cases.RULES[name]
        lr = config.adam_lr * rule.lr_mul
        return torch.optim.AdamW([table], lr, rule.betas, 1e-12, weight_decay=0)

    head = nn.Parameter(model.head.detach().double())
    tables, adam = {"head": head}, {"head": adam_of("head", head)}
    for step in range(13):
        is_tied = step < 6
        if step == 6:
            tables["embed"] = nn.Parameter(head.detach().clone())
            adam["embed"] = adam_of("embed", tables["embed"])
            adam["embed"].state[tables["embed"]] = copy.deepcopy(adam["head"].state[head])
        names = ("head", "embed")
        shape = model.head.shape
        # Whole numbers, whose sums are exact in both types.
        grads = {name: (4 * cases.draw(step, len(name), shape)).round() for name in names}
        cycle = range(13)[step // 3 * 3 :][:3]
        for name, grad in grads.items():
            table = tables["head" if is_tied else name]
            table.grad = grad.double() + (0 if table.grad is None else table.grad)
        cases.take_step(optimizer, step, grads)
        assert torch.equal(model.embed, model.head) == is_tied or step < 8
        if step == cycle[-1]:
            for name, optimizer_of_one in adam.items():
                decay = config.adam_lr * cases.RULES[name].decay
                cases.adam_step(optimizer_of_one, decay)
                optimizer_of_one.zero_grad()
        for name, table in tables.items():
            exact = cases.state_of(optimizer)[name].get("master", cases.params_of(optimizer)[name])
            torch.testing.assert_close(exact.double(), table.data, atol=1e-6, rtol=1e-5)
    assert not torch.equal(model.embed, model.head)


def test_a_tied_embedding_and_the_head_are_one_table_to_the_trainer():
    """Until they part both have the same weights after each step, of both their gradients."""
    trainer = helpers.make_trainer(random_weights=False, steps=8, untie_at=0.5, **helpers.NO_TABLE)
    embed, head = trainer.model.embed, trainer.model.head
    for step in range(5):
        before = head.detach().clone()
        trainer.step(step, cases.batch_of(trainer, np.arange(300) % 37))
        assert not torch.equal(head, before)
        assert torch.equal(embed, head) == (step < 4)


# ----- the mean of the last weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_weights_go_half_of_the_way_to_their_running_mean(dtype):
    """Of the weights behind each update of the last five steps of eight; until then nothing
    changes. Adam's parameters step every other time, and at the last step."""
    changes = {"steps": 8, "adam_every": 2, "dtype": dtype, **helpers.LAYERED}
    averaged, plain = (optimizer_of(**changes, mean_share=share) for share in (0.625, 0.0))

    def weights_of(optimizer):
        found = {}
        for group in optimizer.parameter_groups:
            for name, param in group.params.items():
                found[name] = group.state[name].get("master", param.data).double().clone()
        return found

    means = {}
    for step in range(8):
        before = weights_of(averaged)
        for optimizer in (averaged, plain):
            params = cases.params_of(optimizer)
            generator = torch.Generator().manual_seed(step)
            grads = {
                name: torch.randn(param.shape, generator=generator).to(param.dtype)
                for name, param in params.items()
            }
            cases.take_step(optimizer, step, grads)
        now = weights_of(plain)
        for name, weight in now.items():
            every = 1 if name in ("query_key", "value_output", "mlp") else 2
            if step < 3 or (step + 1) % every:
                continue
            kept = (2 / 3) ** every if name in means else 0.0  # 1 - 2 / (5 + 1) a step
            means[name] = kept * means.get(name, 0.0) + (1 - kept) * weight
        if step < 7:
            helpers.assert_bitwise(weights_of(averaged), now)
            assert any(not torch.equal(now[name], before[name]) for name in now)
    for name, weight in weights_of(averaged).items():
        expected = (now[name] + means[name]) / 2
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(weight, now[name], rtol=1e-5, atol=1e-6)
    for group in averaged.parameter_groups[1:]:
        for name, param in group.params.items():
            master = group.state[name].get("master", param.data)
            assert torch.equal(param.data, master.to(param.dtype))


# ----- who owns what


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_owned_ranges_cover_every_unit_once(world_size):
    for count in range(12):
        bounds = [train_gpt.Runtime.owned_range(rank, count) for rank in helpers.ranks(world_size)]
        covered = [unit for low, high in bounds for unit in range(low, high)]
        assert covered == list(range(count))
        chunk = math.ceil(count / world_size)  # what the collectives give each rank
        for rank, (low, high) in enumerate(bounds):
            assert low == min(rank * chunk, count) and high - low <= chunk


# ----- what must not depend on width and batch


@pytest.mark.parametrize("width", [32, 256])
def test_the_first_step_of_a_rare_token_is_its_rate(width):
    """At eight times the width, too, Adam's first step is 1 in units of the rate, after some steps
    without."""
    trainer = helpers.make_trainer(random_weights=False, model_dim=width, mlp_dim=width, steps=100)
    for step in range(6):
        text = helpers.byte_documents(300, seed=step)
        text[:100] = range(130, 230) if step == 5 else [32] * 100  # no text before has had these
        before = trainer.model.value_embed.detach().clone()
        trainer.step(step, cases.batch_of(trainer, text))
    rule, config = cases.RULES["value_embed"], trainer.config
    beta1, beta2 = rule.betas
    expected = (1 - beta1) / (1 - beta1**6) / math.sqrt((1 - beta2) / (1 - beta2**6))
    moved = (trainer.model.value_embed.detach() - before)[130:230].abs()
    sizes = moved / (config.adam_lr * rule.lr_mul * train_gpt.lr_multiplier(config, 5))
    assert sizes.median().item() == pytest.approx(expected, rel=0.02)


def test_the_floor_of_rows_falls_with_the_width():
    """So new rows make first steps of one size, where gradients fall so: measured from 64 to 512
    channels."""
    moved = []
    for width in (64, 1024):
        table = helpers.make_trainer(random_weights=False, model_dim=width, ngram_floor=0.2).table
        table.plan = SimpleNamespace(owned=torch.tensor([3]), merge=())
        gradient = torch.full((1, width), 0.1 * (64 / width) ** 0.75)
        before = table.weight.clone()
        table.update(0, 1.0, (gradient, None))
        moved.append((table.weight - before)[3, 0].item())
    assert moved[1] == pytest.approx(moved[0], rel=1e-4)
