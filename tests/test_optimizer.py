"""Chapter 5: update rules against torch and slow float64 references; the rule table; whole steps."""
import numpy as np
import pytest
import torch
from torch import nn

import train_gpt
from helpers import assert_bitwise, make_trainer, ranks, tiny_config
from train_gpt import (GPT, RULES, ConfigError, Optimizer, Runtime, adagrad_rows_update, adam_update, join_mantissa,
                       muon_update, polar_express, split_mantissa)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ----- Adam

@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.8, 0.999), (0.0, 0.5)])
def test_adam_is_torchs_adamw(betas, decay):
    weight = normal(5, 7, dtype=torch.float64)
    param = nn.Parameter(weight.clone())
    reference = torch.optim.AdamW([param], lr=0.01, betas=betas, eps=1e-10, weight_decay=decay)
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 9):
        lr = 0.01 * step
        grad = normal(5, 7, seed=step, dtype=torch.float64) * 10.0 ** (step - 6)
        reference.param_groups[0]["lr"] = lr
        param.grad = grad.clone()
        reference.step()
        adam_update(weight, grad, first, second, step, lr, betas, decay)
        torch.testing.assert_close(weight, param.data, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first, reference.state[param]["exp_avg"])
    torch.testing.assert_close(second, reference.state[param]["exp_avg_sq"])


def test_adam_leaves_a_weight_without_gradient_alone():
    weight = normal(4)
    before = weight.clone()
    zeros = torch.zeros(4)
    adam_update(weight, zeros.clone(), zeros.clone(), zeros.clone(), 1, 0.1, (0.9, 0.95), 0.0)
    assert_bitwise(weight, before)


# ----- Muon

def composed_polynomials(values):
    for a, b, c in train_gpt.POLAR_EXPRESS:
        values = a * values + b * values ** 3 + c * values ** 5
    return values


def test_the_polynomials_bring_singular_values_near_1():
    values = composed_polynomials(np.geomspace(1e-3, 1 / 1.02, 100_000))
    assert values.min() > 0.8 and values.max() < 1.2
    assert composed_polynomials(0.0) == 0


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-3), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("rows, columns", [(24, 24), (40, 16), (16, 40), (1, 8), (8, 1)])
def test_polar_express_against_the_svd(rows, columns, dtype, tolerance):
    matrices = normal(3, rows, columns) * torch.tensor([1e-6, 1.0, 1e4])[:, None, None]
    out = polar_express(matrices, dtype)
    assert out.dtype == torch.float32 and out.shape == matrices.shape
    for matrix, polar in zip(matrices.double(), out.double()):
        u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
        # The same singular vectors, each value sent through the polynomials.
        wanted = composed_polynomials(values / (values.norm() * 1.02))
        assert (polar - (u * wanted) @ vt).norm() <= tolerance * wanted.norm()
        if dtype == torch.float32 and values.min() > 2e-3 * values.norm():
            assert 0.8 < torch.linalg.svdvals(polar).min() and torch.linalg.svdvals(polar).max() < 1.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_matrix_stays_zero_in_polar_express(dtype):
    matrices = normal(3, 8, 12)
    matrices[1] = 0
    out = polar_express(matrices, dtype)
    assert not out[1].any()
    assert_bitwise(out[0], polar_express(matrices[:1], dtype)[0])
    assert out[2].any() and out.isfinite().all()


def slow_muon(weight, grad, buffer, second, lr, momentum, beta2, decay):
    """One matrix in float64, from the description. Returns its new weight, buffer and second."""
    rows, columns = weight.shape
    buffer = momentum * buffer + (1 - momentum) * grad
    nesterov = momentum * buffer + (1 - momentum) * grad
    u, values, vt = np.linalg.svd(nesterov, full_matrices=False)
    update = (u * composed_polynomials(values / (np.linalg.norm(values) * 1.02 + 1e-12))) @ vt
    size = np.linalg.norm(update)
    axis = 1 if rows >= columns else 0
    second = beta2 * second + (1 - beta2) * (update ** 2).mean(axis, keepdims=True)
    update = update / np.sqrt(second)
    update = update * size / np.linalg.norm(update)
    lr = lr * max(1, rows / columns) ** 0.5
    decayed = np.where(update * weight >= 0, decay * weight, 0)
    return weight - lr * (update + decayed), buffer, second


@pytest.mark.parametrize("rows, columns", [(12, 12), (24, 8), (8, 24)])
def test_muon_against_a_slow_float64_reference(rows, columns):
    weight = normal(3, rows, columns)
    buffer = torch.zeros_like(weight)
    second = torch.zeros((3, rows, 1) if rows >= columns else (3, 1, columns))
    slow = [tuple(x[k].double().numpy() for x in (weight, buffer, second)) for k in range(3)]
    for step in range(4):
        lr, momentum = 0.05 * (step + 1), 0.85 + 0.03 * step
        grad = normal(3, rows, columns, seed=step + 1)
        muon_update(weight, grad.clone(), buffer, second, lr, momentum, 0.95, 0.5, torch.float32)
        slow = [slow_muon(w, grad[k].double().numpy(), b, s, lr, momentum, 0.95, 0.5)
                for k, (w, b, s) in enumerate(slow)]
        for k in range(3):
            for actual, expected in zip((weight, buffer, second), slow[k]):
                np.testing.assert_allclose(actual[k].double().numpy(), expected, atol=2e-4, rtol=2e-3)


def test_muons_decay_only_follows_the_update():
    grad = normal(1, 6, 6)
    results = []
    for decay in (0.0, 0.5):
        weight = normal(1, 6, 6, seed=1)
        muon_update(weight, grad.clone(), torch.zeros(1, 6, 6), torch.zeros(1, 6, 1), 0.1, 0.9, 0.95, decay,
                    torch.float32)
        results.append(weight)
    start = normal(1, 6, 6, seed=1)
    update = start - results[0]
    decayed = results[0] != results[1]
    assert torch.equal(decayed, update * start > 0)
    torch.testing.assert_close((results[0] - results[1])[decayed], (0.1 * 0.5 * start)[decayed])


# ----- bfloat16 weights with the rest of their float32 beside them

def all_kinds_of_floats():
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 1.4e-45, -1.4e-45, 3.4e38, -3.4e38,
                            float("inf"), -float("inf"), float("nan"), 1 + 2**-23, 1 - 2**-24, -(1 + 2**-8)])
    bits = torch.randint(-2**31, 2**31, (200_000,), generator=torch.Generator().manual_seed(0))
    return torch.cat([special, bits.to(torch.int32).view(torch.float32)])


def test_split_and_join_of_the_mantissa_are_exact():
    values = all_kinds_of_floats()
    high, low = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    split_mantissa(values, high, low)
    assert torch.equal(join_mantissa(high, low).view(torch.int32), values.view(torch.int32))
    high, values = high.float()[values.isfinite()], values[values.isfinite()]
    assert ((high - values).abs() <= values.abs() * 2**-7 + 1e-38).all()  # the upper half alone is close


def test_join_and_split_of_every_bfloat16():
    high = torch.arange(-2**15, 2**15).to(torch.int16).view(torch.bfloat16)
    for fill in (0, 1, -1, -2**15, 2**15 - 1):
        low = torch.full((2**16,), fill, dtype=torch.int16)
        other_high, other_low = torch.empty_like(high), torch.empty_like(low)
        split_mantissa(join_mantissa(high, low), other_high, other_low)
        assert_bitwise(other_high, high)
        assert_bitwise(other_low, low)


def test_bfloat16_training_is_float32_training_bitwise():
    config = tiny_config(dtype="bfloat16", untie_at=0.5, steps=8)
    model, master = GPT(config, "sdpa"), GPT(config, "sdpa")
    master.float()
    pair = [Optimizer(config, each, Runtime("cpu")) for each in (model, master)]
    for step in range(6):
        for name, param in pair[0].params.items():
            grad = normal(*param.shape, seed=step)
            for optimizer in pair:
                optimizer.accumulate({name: grad})
        for optimizer in pair:
            optimizer.step(step, 0.7)
    halves = 0
    for name, param in pair[0].params.items():
        exact = pair[1].params[name].data
        if param.dtype == torch.bfloat16:
            halves += 1
            joined = join_mantissa(param.data, pair[0].state[name]["mantissa"])
            assert_bitwise(joined, exact, name)
            if param.numel():
                assert pair[0].state[name]["mantissa"].any(), name
        else:
            assert_bitwise(param.data, exact, name)
    assert halves >= 7


# ----- row-wise Adagrad

@pytest.mark.parametrize("floor", [1e-6, 3.0])
def test_adagrad_rows_against_a_dense_reference(floor):
    rng = np.random.default_rng(0)
    count, dim = 50, 6
    table, second = normal(count, dim), torch.zeros(count)
    dense, dense_second = table.double().clone(), second.double().clone()
    for step in range(4):
        rows = torch.from_numpy(np.sort(rng.choice(count, size=25, replace=False)))
        grads = normal(len(rows), dim, seed=step)
        before = table.clone(), second.clone()
        adagrad_rows_update(table, second, rows, grads, lr=0.1, floor=floor)
        for row, grad in zip(rows, grads.double()):
            dense_second[row] += grad.square().mean()
            dense[row] -= 0.1 * grad / (dense_second[row] + floor ** 2).sqrt()
        torch.testing.assert_close(table.double(), dense, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(second.double(), dense_second, atol=1e-6, rtol=1e-6)
        untouched = ~torch.isin(torch.arange(count), rows)
        assert_bitwise(table[untouched], before[0][untouched])
        assert_bitwise(second[untouched], before[1][untouched])


def test_adagrad_takes_no_rows_and_rows_without_gradient():
    table, second = torch.ones(8, 2), torch.zeros(8)
    adagrad_rows_update(table, second, torch.empty(0, dtype=torch.int64), torch.empty(0, 2), lr=0.5, floor=1e-6)
    adagrad_rows_update(table, second, torch.tensor([3, 5]), torch.tensor([[0.0, 0.0], [4.0, 0.0]]), 0.5, 1e-6)
    assert_bitwise(table[[0, 3]], torch.ones(2, 2))  # stays finite
    assert second.tolist() == [0, 0, 0, 0, 0, 8, 0, 0]
    torch.testing.assert_close(table[5], torch.tensor([1 - 0.5 * 2 ** 0.5, 1.0]))


# ----- the rule table

CONFIGS = {"tiny": {}, "no n-grams": {"ngram_orders": ()}, "untied later": {"untie_at": 0.5},
           "no value embeddings": {"value_embedding_layers": ()},
           "one layer": {"num_layers": 1, "long_layers": ()}}


@pytest.mark.parametrize("config", CONFIGS)
def test_every_parameter_has_one_rule(config):
    trainer = make_trainer(random_weights=False, **CONFIGS[config])
    names = {name for name, _ in trainer.model.named_parameters()}
    optimizer = trainer.optimizer
    assert names <= set(RULES)
    assert sorted([*optimizer.sharded, *optimizer.replicated]) == sorted(names)
    for name in names:
        assert RULES[name].update in ("adam", "muon") and RULES[name].comms in ("sharded", "replicated")
        assert set(optimizer.state[name])  # and state of its own


def test_a_parameter_without_a_rule_is_refused():
    model = GPT(tiny_config(), "sdpa")
    model.stranger = nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match="stranger.*RULES"):
        Optimizer(tiny_config(), model, Runtime("cpu"))


def test_every_parameter_moves_at_its_own_rate():
    trainer = make_trainer(random_weights=False)
    optimizer = trainer.optimizer
    before = {name: param.detach().clone() for name, param in optimizer.params.items()}
    optimizer.accumulate({name: torch.ones_like(param) for name, param in optimizer.params.items()})
    optimizer.step(0, 0.5)
    for name, param in optimizer.params.items():
        moved = (before[name] - param.detach())
        if RULES[name].update == "adam":  # the first step of Adam is the learning rate
            expected = torch.full_like(moved, 0.5 * trainer.config.adam_lr * RULES[name].lr_mul)
            torch.testing.assert_close(moved, expected, atol=1e-6, rtol=1e-3)
        else:
            assert moved.any()
    assert not any(grad.any() for grad in optimizer.grads.values())


# ----- Adam parameters that step every k-th step

def adam_only(steps, every, grads, names=("embed", "smear_scale")):
    """Values of `names` after `steps` steps on per-step gradients {name: [tensor, ...]}."""
    config = tiny_config(steps=steps, adam_every=every, cooldown=0.0)
    optimizer = Optimizer(config, GPT(config, "sdpa"), Runtime("cpu"))
    history = []
    for step in range(steps):
        optimizer.accumulate({name: grads[name][step] for name in names})
        optimizer.step(step, 1.0)
        history.append({name: optimizer.params[name].detach().clone() for name in names})
    return history


def test_adam_every_steps_on_the_mean_gradient():
    shapes = {"embed": (257, 32), "smear_scale": (1,)}
    grads = {name: [normal(*shape, seed=step) for step in range(6)] for name, shape in shapes.items()}
    means = {name: [sum(values[:3]) / 3, sum(values[3:]) / 3] for name, values in grads.items()}
    delayed, direct = adam_only(6, 3, grads), adam_only(2, 1, means)
    torch.testing.assert_close(delayed[2], direct[0])
    torch.testing.assert_close(delayed[5], direct[1])
    for step in (3, 4):
        assert_bitwise(delayed[step], delayed[2])


def test_the_last_step_takes_the_mean_of_what_is_left():
    shapes = {"embed": (257, 32), "smear_scale": (1,)}
    grads = {name: [normal(*shape, seed=step) for step in range(4)] for name, shape in shapes.items()}
    means = {name: [sum(values[:3]) / 3, values[3]] for name, values in grads.items()}
    delayed, direct = adam_only(4, 3, grads), adam_only(2, 1, means)
    torch.testing.assert_close(delayed[3], direct[1])


def test_muon_does_not_wait_for_adam():
    config = tiny_config(steps=6, adam_every=3)
    optimizer = Optimizer(config, GPT(config, "sdpa"), Runtime("cpu"))
    for step in range(3):
        before = optimizer.params["mlp"].detach().clone()
        optimizer.accumulate({"mlp": normal(4, 64, 32, seed=step)})
        optimizer.step(step, 1.0)
        assert not torch.equal(before, optimizer.params["mlp"])
        assert not optimizer.grads["mlp"].any()


def test_gradients_of_micro_batches_add_up():
    optimizer = make_trainer(random_weights=False).optimizer
    parts = [normal(257, 32, seed=seed) for seed in range(3)]
    for part in parts:
        optimizer.accumulate({"embed": part, "head": None})
    torch.testing.assert_close(optimizer.grads["embed"], sum(parts))
    assert not optimizer.grads["head"].any()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_shares_cover_every_unit_once(world_size):
    for count in range(12):
        bounds = [Runtime.share(rank, count) for rank in ranks(world_size)]
        assert [unit for low, high in bounds for unit in range(low, high)] == list(range(count))
        chunk = -(-count // world_size)  # what the collectives give each rank
        for rank, (low, high) in enumerate(bounds):
            assert low == min(rank * chunk, count) and high - low <= chunk
