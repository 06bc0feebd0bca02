"""Chapter 5: eigenbases and the update rules that work in them, against slow float64 references; bad input."""
import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt
from helpers import assert_bitwise, make_trainer, tiny_config
from train_gpt import (FACTOR_BETA, GPT, KL_FLOOR, SOAP_RULES, ConfigError, Optimizer, Runtime, Side, eigenbasis_step,
                       known_bases, polar_express, refresh_eigenbases, refresh_method, soap_muon_update, soap_update,
                       update_factors)

METHODS = ("eigh", "householder", "cholesky", "cholesky_lr")
ITERATIVE = METHODS[1:]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


def orthogonal(*shape, seed=0):
    return torch.linalg.qr(normal(*shape, seed=seed).double()).Q.float()


def factors(count, size, seed=0, steps=30):
    """What training makes of a factor: a running mean of products of gradients whose spectrum spans six decades."""
    left, factor = orthogonal(count, size, size, seed=seed), torch.zeros(count, size, size)
    for step in range(steps):
        grad = left * torch.logspace(0, -3, size) @ normal(count, size, size, seed=1000 * seed + step + 1)
        factor.lerp_(grad @ grad.mT / size, 1 - FACTOR_BETA)
    return factor


def side(axis, count, rows, columns, seed=0):
    size = rows if axis == -2 else columns
    return Side(axis, factors(count, size, seed), orthogonal(count, size, size, seed=seed + 50),
                normal(count, rows, columns, seed=seed).square(), torch.zeros(count, dtype=torch.int32))


def copy_of(sides):
    return [Side(*(value.clone() if isinstance(value, torch.Tensor) else value
                   for value in (getattr(one, field.name) for field in dataclasses.fields(Side)))) for one in sides]


def tensors(one):
    return {key: getattr(one, key) for key in ("factor", "basis", "moment", "rejects")}


def sorted_columns(factor, basis):
    """The order of a basis's columns by falling Rayleigh quotient."""
    return torch.stack([(q * (k @ q)).sum(0) for k, q in zip(factor, basis)]).argsort(descending=True, stable=True)


# ----- the refresh

@pytest.mark.parametrize("method", ITERATIVE)
@pytest.mark.parametrize("size", [1, 2, 7, 32, 96])
def test_a_step_is_the_qr_of_factor_times_basis(size, method):
    factor = factors(3, size)
    basis = orthogonal(3, size, size, seed=9)
    for _ in range(3):  # from a random basis to one near the eigenvectors
        new, order, rejected = eigenbasis_step(factor, basis, method)
        assert not rejected.any() and torch.equal(order, sorted_columns(factor, basis))
        sorted_basis = basis.gather(-1, order[:, None].expand_as(basis)).double()
        assert (new.mT @ new - torch.eye(size)).abs().max() <= 1e-5
        product = factor.double() @ sorted_basis
        triangle = torch.tril(new.double().mT @ product, -1)  # zero for the orthogonal factor of a QR
        assert (triangle.flatten(1).norm(dim=1) <= 1e-5 * product.flatten(1).norm(dim=1)).all()
        basis = new


@pytest.mark.parametrize("method", ITERATIVE)
def test_leading_directions_agree_with_float64_householder(method):
    factor, size = factors(4, 48), 48
    basis = torch.linalg.eigh(factors(4, 48, steps=29)).eigenvectors.flip(-1)
    new, order, _ = eigenbasis_step(factor, basis, method)
    exact = torch.linalg.qr(factor.double() @ basis.gather(-1, order[:, None].expand_as(basis)).double()).Q
    values = (exact * (factor.double() @ exact)).sum(-2)
    leading = values > 1e-3 * values[:, :1]
    assert leading.sum() >= 4 * size // 4
    cosine = (new * exact).sum(-2).abs()
    assert (1 - cosine)[leading].max() < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_repeated_steps_find_the_eigenvectors(method):
    factor = factors(2, 12)
    basis = torch.eye(12).repeat(2, 1, 1)
    for _ in range(1 if method == "eigh" else 400):
        basis, _, rejected = eigenbasis_step(factor, basis, method)
        assert not rejected.any()
    rotated = basis.mT @ factor @ basis
    rotated = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
    assert rotated.flatten(1).norm(dim=1).max() < 1e-3 * factor.flatten(1).norm(dim=1).max()


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_its_matrices_one_by_one(method):
    together = [side(-2, 3, 16, 24), side(-1, 3, 16, 24, seed=1), side(-2, 2, 24, 16, seed=2), side(-1, 4, 8, 1)]
    alone = [copy_of([one])[0].staggered(index, 100) for one in together for index in range(len(one.basis))]
    alone = copy_of(alone)
    refresh_eigenbases(together, method)
    for one in alone:
        refresh_eigenbases([one], method)
    expected = iter(alone)
    for one in together:
        for index in range(len(one.basis)):
            single = next(expected)
            torch.testing.assert_close(one.basis[index], single.basis[0], atol=1e-5, rtol=0)
            assert_bitwise(one.moment[index], single.moment[0])


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_parameters_does_not_matter(method):
    forward = [side(-2, 3, 16, 24), side(-1, 3, 16, 24, seed=1), side(-2, 2, 24, 16, seed=2)]
    backward = copy_of(forward)[::-1]
    refresh_eigenbases(forward, method)
    refresh_eigenbases(backward, method)
    for one, other in zip(forward, backward[::-1]):
        torch.testing.assert_close(one.basis, other.basis, atol=1e-5, rtol=0)
        assert_bitwise(one.moment, other.moment)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("axis", [-2, -1])
def test_moments_follow_the_sort(axis, method):
    one, = copy_of([side(axis, 3, 10, 6)])
    before, = copy_of([one])
    refresh_eigenbases([one], method)
    order = sorted_columns(before.factor, before.basis)
    assert not torch.equal(order[0], torch.arange(len(order[0])))
    for index in range(3):
        expected = before.moment[index][order[index]] if axis == -2 else before.moment[index][:, order[index]]
        assert_bitwise(one.moment[index], expected)
    assert_bitwise(one.factor, before.factor)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_bad_matrix_keeps_its_basis_and_spoils_no_other(poison, method):
    clean = side(-1, 3, 10, 6)
    bad, = copy_of([clean])
    bad.factor[1, 2, 3] = poison
    old, = copy_of([bad])
    refresh_eigenbases([clean], method)
    refresh_eigenbases([bad], method)
    for index in (0, 2):
        assert_bitwise(bad.basis[index], clean.basis[index])
        assert_bitwise(bad.moment[index], clean.moment[index])
    assert bad.rejects.tolist() == [0, 1, 0] and not clean.rejects.any()
    # The old columns, in some order, and the moment in the same.
    order = [int((old.basis[1] == column[:, None]).all(0).nonzero()[0, 0]) for column in bad.basis[1].mT]
    assert sorted(order) == list(range(6))
    assert_bitwise(bad.moment[1], old.moment[1][:, order])


@pytest.mark.parametrize("method, lowest", [("cholesky", 0.0), ("cholesky_lr", -1.0)])
def test_a_rejected_matrix_is_sorted_with_its_moment(method, lowest, monkeypatch):
    monkeypatch.setitem(train_gpt.DAMPING, method, 0.0)
    one = side(-2, 2, 8, 5)
    one.factor[0] = torch.diag(torch.tensor([0.0, 0, 0, 0, 1, lowest, 3, 2]))  # not positive definite, and undamped
    one.basis[0] = torch.eye(8)
    moment = one.moment.clone()
    refresh_eigenbases([one], method)
    assert one.rejects.tolist() == [1, 0]
    order = [6, 7, 4, 0, 1, 2, 3, 5]
    assert_bitwise(one.basis[0], torch.eye(8)[:, order])
    assert_bitwise(one.moment[0], moment[0][order])


@pytest.mark.parametrize("method", METHODS)
def test_a_zero_factor_keeps_its_basis(method):
    one = side(-2, 2, 8, 5)
    one.factor[0] = 0
    before, = copy_of([one])
    refresh_eigenbases([one], method)
    assert_bitwise(one.basis[0], before.basis[0])
    assert_bitwise(one.moment[0], before.moment[0])
    assert not torch.equal(one.basis[1], before.basis[1])
    assert not one.rejects.any()  # nothing failed


@pytest.mark.parametrize("method", METHODS)
def test_a_factor_that_stays_singular(method):
    """The same gradient of rank 1 at every step: all finite, orthonormal, and its direction is found."""
    grad = normal(1, 9, 1) @ normal(1, 1, 4, seed=1)
    one = Side(-2, torch.zeros(1, 9, 9), torch.eye(9)[None], torch.zeros(1, 9, 4), torch.zeros(1, dtype=torch.int32))
    for _ in range(40):
        update_factors(grad, [one], kl=False)
        refresh_eigenbases([one], method)
    assert (one.basis.mT @ one.basis - torch.eye(9)).abs().max() < 1e-5
    direction = torch.nn.functional.normalize(grad[0, :, 0], dim=0)
    assert (one.basis[0, :, 0] @ direction).abs() > 1 - 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_empty_batches_and_single_rows(method):
    refresh_eigenbases([], method)
    refresh_eigenbases([side(-2, 2, 8, 8).staggered(5, 10)], method)
    assert [len(value) for value in eigenbasis_step(torch.zeros(0, 4, 4), torch.zeros(0, 4, 4), method)] == [0, 0, 0]
    one = Side(-2, torch.full((2, 1, 1), 3.0), torch.ones(2, 1, 1), normal(2, 1, 4), torch.zeros(2, dtype=torch.int32))
    moment = one.moment.clone()
    refresh_eigenbases([one], method)
    torch.testing.assert_close(one.basis.abs(), torch.ones(2, 1, 1))
    assert_bitwise(one.moment, moment)


class NoSync(TorchDispatchMode):
    """Refuses what makes the host wait for a device: reading a value, or a shape that depends on values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal"), name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", SOAP_RULES)
def test_nothing_waits_for_the_device(kind, monkeypatch):
    optimizer = optimizer_of(kind)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoSync():
        bool(torch.ones(1) > 0)
    for step, method in enumerate(("householder", "cholesky", "cholesky_lr")):
        monkeypatch.setattr(train_gpt, "refresh_method", lambda *words: method)
        accumulate(optimizer, step)
        with NoSync():
            optimizer.step(step, 1.0)


def test_the_method_depends_on_step_and_device(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    expected = ["eigh", "eigh", "householder", "householder"]
    assert [refresh_method(step, cpu) for step in (0, 2, 3, 10_000)] == expected
    for capability, fast in (((9, 0), "cholesky"), ((8, 0), "cholesky"), ((8, 9), "cholesky_lr")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert [refresh_method(step, cuda) for step in (2, 24, 25)] == ["eigh", "householder", fast]


# ----- factors

@pytest.mark.parametrize("kl", [False, True])
def test_factors_against_a_slow_reference(kl):
    sides = [side(-2, 3, 6, 9), side(-1, 3, 6, 9, seed=1)]
    before, grad = copy_of(sides), normal(3, 6, 9, seed=2)
    update_factors(grad, sides, kl)
    for k in range(3):
        g = grad[k].double().numpy()
        for one, g, other in ((0, g, 1), (1, g.T, 0)):
            metric = np.eye(g.shape[1])
            if kl:
                basis, factor = (getattr(before[other], key)[k].double().numpy() for key in ("basis", "factor"))
                values = np.array([basis[:, i] @ factor @ basis[:, i] for i in range(len(factor))])
                metric = basis @ np.diag(1 / np.maximum(values / values.mean(), KL_FLOOR)) @ basis.T
            expected = (FACTOR_BETA * before[one].factor[k].double().numpy()
                        + (1 - FACTOR_BETA) * g @ metric @ g.T / g.shape[1])
            tolerance = 1e-5 * np.abs(expected).max()
            np.testing.assert_allclose(sides[one].factor[k].numpy(), expected, rtol=1e-4, atol=tolerance)


def test_the_first_kl_factors_are_shampoos():
    plain, kl = ([Side(axis, torch.zeros(2, size, size), torch.eye(size).repeat(2, 1, 1), torch.zeros(2, 4, 5),
                       torch.zeros(2, dtype=torch.int32)) for axis, size in ((-2, 4), (-1, 5))] for _ in range(2))
    update_factors(normal(2, 4, 5), plain, kl=False)
    update_factors(normal(2, 4, 5), kl, kl=True)
    for one, other in zip(plain, kl):
        torch.testing.assert_close(one.factor, other.factor)


# ----- update rules

def rotation(one, k):
    return one.basis[k].double().numpy()


def step_against(weight, update, lr, decay):
    return weight - lr * (update + np.where(update * weight >= 0, decay * weight, 0))


SIDES = {"both": (-2, -1), "rows only": (-2,), "columns only": (-1,), "none": ()}


def given_sides(which, rows, columns):
    sides = [side(axis, 3, rows, columns, seed=-axis) for axis in SIDES[which]]
    for one in sides:
        one.moment = torch.zeros(3, rows, columns)
    return sides, torch.zeros(3, rows, columns)


@pytest.mark.parametrize("which", SIDES)
@pytest.mark.parametrize("rows, columns", [(8, 8), (12, 5), (5, 12), (1, 6)])
def test_soap_is_adam_in_the_eigenbasis(rows, columns, which):
    sides, moment = given_sides(which, rows, columns)
    weight, buffer, count = normal(3, rows, columns), torch.zeros(3, rows, columns), torch.zeros(3, 1, 1)
    left = [rotation(sides[0], k) if -2 in SIDES[which] else np.eye(rows) for k in range(3)]
    right = [rotation(sides[-1], k) if -1 in SIDES[which] else np.eye(columns) for k in range(3)]
    slow = [(weight[k].double().numpy(), 0, 0) for k in range(3)]
    for step in range(1, 5):
        grad = 0.01 * normal(3, rows, columns, seed=step)
        soap_update(weight, grad, buffer, moment, count, sides, torch.ones(3, 1, 1), step, 0.1 * step, (0.9, 0.95), 0.5)
        for k, (w, m, v) in enumerate(slow):
            rotated = left[k].T @ grad[k].double().numpy() @ right[k]
            m, v = 0.9 * m + 0.1 * rotated, 0.95 * v + 0.05 * rotated ** 2
            update = left[k] @ ((m / (1 - 0.9 ** step)) / np.sqrt(v / (1 - 0.95 ** step))) @ right[k].T
            w = step_against(w, update / math.sqrt(columns), 0.1 * step, 0.5)
            slow[k] = w, m, v
            np.testing.assert_allclose(weight[k].numpy(), w, atol=2e-4, rtol=1e-3)
            np.testing.assert_allclose(moment[k].numpy(), v, atol=1e-9, rtol=1e-3)


@pytest.mark.parametrize("which", SIDES)
@pytest.mark.parametrize("rows, columns", [(8, 8), (12, 5), (5, 12), (1, 6)])
def test_soap_muon_is_muon_on_the_whitened_momentum(rows, columns, which):
    sides, moment = given_sides(which, rows, columns)
    weight, buffer = normal(3, rows, columns), torch.zeros(3, rows, columns)
    second = torch.zeros((3, rows, 1) if rows >= columns else (3, 1, columns))
    left = [rotation(sides[0], k) if -2 in SIDES[which] else np.eye(rows) for k in range(3)]
    right = [rotation(sides[-1], k) if -1 in SIDES[which] else np.eye(columns) for k in range(3)]
    slow = [(weight[k].double().numpy(), 0, 0, 0) for k in range(3)]
    for step in range(4):
        lr, momentum = 0.05 * (step + 1), 0.85 + 0.03 * step
        grad = 0.01 * normal(3, rows, columns, seed=step + 1)
        soap_muon_update(weight, grad, buffer, second, moment, sides, torch.ones(3, 1, 1), lr, momentum, 0.95, 0.5,
                         torch.float32)
        for k, (w, b, v, s) in enumerate(slow):
            g = grad[k].double().numpy()
            b = momentum * b + (1 - momentum) * g
            rotated = left[k].T @ (momentum * b + (1 - momentum) * g) @ right[k]
            v = 0.9 * v + 0.1 * rotated ** 2
            whitened = left[k] @ (rotated / np.sqrt(np.maximum(v, 1e-16))) @ right[k].T
            update = polar_express(torch.from_numpy(whitened)[None], torch.float64)[0].double().numpy()
            size = np.linalg.norm(update)
            s = 0.95 * s + 0.05 * (update ** 2).mean(1 if rows >= columns else 0, keepdims=True)
            update = update / np.sqrt(s)
            update *= size / np.linalg.norm(update)
            w = step_against(w, update, lr * max(1, rows / columns) ** 0.5, 0.5)
            slow[k] = w, b, v, s
            np.testing.assert_allclose(weight[k].numpy(), w, atol=5e-4, rtol=5e-3)
            np.testing.assert_allclose(buffer[k].numpy(), b, atol=1e-7, rtol=1e-4)
            np.testing.assert_allclose(moment[k].numpy(), v, atol=1e-9, rtol=1e-3)


def run_rule(kind, weight, grad, sides, moment, buffer):
    (count, rows, columns), known = weight.shape, known_bases(sides, moment)
    if kind == "soap":
        counted = torch.full((count, 1, 1), 2.0)
        soap_update(weight, grad, buffer, moment, counted, sides, known, 3, 0.1, (0.9, 0.95), 0.5)
    else:
        second = torch.zeros((count, rows, 1) if rows >= columns else (count, 1, columns))
        soap_muon_update(weight, grad, buffer, second, moment, sides, known, 0.1, 0.9, 0.95, 0.5, torch.float32)
    return weight


@pytest.mark.parametrize("kind", ["soap", "soap_muon"])
def test_signs_and_order_of_the_columns_do_not_matter(kind):
    """The eigenbasis is only known up to signs, and up to an order that the moment shares."""
    sides = [side(-2, 2, 9, 7), side(-1, 2, 9, 7, seed=1)]
    moment, results = 1e-4 * normal(2, 9, 7).square(), []
    rows, columns = torch.randperm(9), torch.randperm(7)
    changed = copy_of(sides)
    changed[0].basis = (changed[0].basis * torch.tensor([1.0, -1, 1, 1, -1, -1, 1, -1, 1]))[:, :, rows]
    changed[1].basis = (changed[1].basis * torch.tensor([-1.0, -1, 1, 1, -1, 1, 1]))[:, :, columns]
    for these, this in ((sides, moment.clone()), (changed, moment[:, rows][:, :, columns].clone())):
        results.append(run_rule(kind, normal(2, 9, 7, seed=3), 0.01 * normal(2, 9, 7, seed=4), these, this,
                                0.01 * normal(2, 9, 7, seed=5)))
    torch.testing.assert_close(*results, atol=2e-5, rtol=1e-4)
    assert (results[0] - normal(2, 9, 7, seed=3)).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["soap", "soap_muon"])
@pytest.mark.parametrize("rows, columns", [(1, 6), (6, 4)])
def test_bad_gradients_spoil_no_other_matrix(rows, columns, kind):
    """NaN in one matrix, zero in another."""
    results = []
    for poison in (0.5, float("nan")):
        sides = [side(axis, 3, rows, columns, seed=-axis) for axis in (-2, -1)]
        for one in sides:
            one.factor[2] = 0
        grad = normal(3, rows, columns, seed=3)
        grad[1, 0, 0], grad[2] = poison, 0
        weight = run_rule(kind, normal(3, rows, columns), grad, sides, torch.zeros(3, rows, columns),
                          torch.zeros(3, rows, columns))
        update_factors(grad, sides, kl=False)
        refresh_eigenbases(sides, "householder")
        results.append((weight, sides))
    (good, good_sides), (bad, bad_sides) = results
    for index in (0, 2):
        assert_bitwise(bad[index], good[index])
        for one, other in zip(good_sides, bad_sides):
            assert_bitwise(one.basis[index], other.basis[index])
    assert good.isfinite().all() and not bad[1].isfinite().all()
    assert [one.rejects.tolist() for one in bad_sides] == [[0, 1, 0]] * 2


# ----- in the optimizer

def optimizer_of(kind, **changes):
    config = tiny_config(**{"matrix_update": kind, "basis_every": 2, "steps": 40, "adam_every": 1, **changes})
    return Optimizer(config, GPT(config, "sdpa"), Runtime("cpu"))


def accumulate(optimizer, step, scale=1e-3):
    optimizer.accumulate({name: scale * normal(*optimizer.params[name].shape, seed=10 * step + index)
                          for index, name in enumerate(("attention", "mlp"))})


def walk(optimizer, steps, first=0):
    for step in range(first, first + steps):
        accumulate(optimizer, step)
        optimizer.step(step, 1.0)
    return optimizer


@pytest.mark.parametrize("kind", ["muon", "adam", *SOAP_RULES])
def test_state_survives_a_round_trip_bitwise(kind):
    through = walk(optimizer_of(kind), 9)
    first = walk(optimizer_of(kind), 5)
    second = optimizer_of(kind)
    second.load_full_state(first.full_state())
    for name, param in second.params.items():
        param.data.copy_(first.params[name].data)
    walk(second, 4, first=5)
    assert_bitwise(second.full_state(), through.full_state())
    assert_bitwise(second.params["mlp"].data, through.params["mlp"].data)
    keys = set(through.full_state()["attention"])
    assert ("row_basis" in keys) == ("column_factor" in keys) == (kind in SOAP_RULES)


@pytest.mark.parametrize("kind", SOAP_RULES)
def test_large_sides_get_no_basis(kind):
    state = walk(optimizer_of(kind, one_sided_above=32), 3).full_state()
    assert "row_basis" in state["attention"] and "column_basis" in state["attention"]
    assert "row_basis" not in state["mlp"] and state["mlp"]["column_basis"].shape == (4, 32, 32)
    state = walk(optimizer_of(kind, one_sided_above=0), 3).full_state()
    assert not any("basis" in key for key in state["mlp"])


def test_soap_without_bases_is_adam():
    soap, adam = (walk(optimizer_of(kind, one_sided_above=0), 4) for kind in ("soap", "adam"))
    assert_bitwise(soap.params["mlp"].data, adam.params["mlp"].data)


def test_the_first_step_of_each_rule():
    """SOAP-Muon is Muon; the others wait for a basis."""
    start = optimizer_of("muon").params["mlp"].detach().clone()
    moved = {kind: walk(optimizer_of(kind, matrix_decay=0.0), 1).params["mlp"].detach() - start
             for kind in ("muon", *SOAP_RULES)}
    assert not moved["soap"].any()
    torch.testing.assert_close(moved["soap_muon"], moved["muon"])
    assert not moved["kl_soap"].any()


@pytest.mark.parametrize("kind", SOAP_RULES)
def test_only_kl_soap_knows_the_gradient_it_steps_on(kind, monkeypatch):
    """Its update is rotated into the basis of the factors that this step leaves behind, the others' into the last's."""
    optimizer, used = walk(optimizer_of(kind, basis_every=1), 4), []
    monkeypatch.setattr(train_gpt, "rotate_from", lambda x, sides: used.append(sides[0].basis.clone()) or x)
    before = optimizer.state["attention"]["row_basis"].clone()
    walk(optimizer, 1, first=4)
    after = optimizer.state["attention"]["row_basis"]
    assert_bitwise(used[0], after if kind == "kl_soap" else before)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("kind", SOAP_RULES)
def test_bases_follow_the_factors_in_turn(kind):
    """At first all bases are exact; then matrix i steps where (step - i) divides by basis_every, the others rest."""
    optimizer = walk(optimizer_of(kind, basis_every=3), 3)
    state = optimizer.state["attention"]
    for key in ("row", "column"):
        rotated = state[f"{key}_basis"].mT @ state[f"{key}_factor"] @ state[f"{key}_basis"]
        off = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
        assert (off.flatten(1).norm(dim=1) < 1e-5 * rotated.flatten(1).norm(dim=1)).all()
    for step in range(3, 8):
        before = {key: value.clone() for key, value in state.items()}
        walk(optimizer, 1, first=step)
        for index in range(8):
            for key in ("row_basis", "column_basis"):
                assert torch.equal(before[key][index], state[key][index]) == (index % 3 != step % 3)
            assert not torch.equal(before["row_factor"][index], state["row_factor"][index])
    assert not state["rejects"].any()


def test_a_step_without_a_refresh_leaves_bases_alone():
    optimizer = walk(optimizer_of("soap_muon", basis_every=100), 3)
    before = optimizer.full_state()
    walk(optimizer, 1, first=50)  # turn of matrix 50, which there is not
    for name in ("attention", "mlp"):
        for key in ("row_basis", "column_basis"):
            assert_bitwise(optimizer.state[name][key], before[name][key])
    nothing = [one.staggered(90, 100) for one in optimizer._sides("mlp")]
    kept = {key: value.clone() for key, value in optimizer.state["mlp"].items()}
    refresh_eigenbases(nothing, "cholesky")
    assert_bitwise(optimizer.state["mlp"], kept)


@pytest.mark.parametrize("kind", ["adam", *SOAP_RULES])
def test_zero_gradients_leave_everything_finite(kind):
    optimizer = optimizer_of(kind, matrix_decay=0.0)
    before = optimizer.params["mlp"].detach().clone()
    for step in range(5):
        optimizer.step(step, 1.0)
    assert_bitwise(optimizer.params["mlp"].detach(), before)
    assert_bitwise(optimizer.full_state()["mlp"].get("row_basis", torch.eye(64).repeat(4, 1, 1)),
                   torch.eye(64).repeat(4, 1, 1))
    walk(optimizer, 3, first=5)  # and the first gradients may come later
    assert optimizer.params["mlp"].isfinite().all() and not torch.equal(optimizer.params["mlp"], before)


@pytest.mark.parametrize("kind", ["muon", "adam", *SOAP_RULES])
def test_every_rule_learns(kind):
    """A whole model on one batch it can remember: real, ill-conditioned gradients. Rejects stay at zero."""
    trainer = make_trainer(random_weights=False, matrix_update=kind, steps=60, basis_every=2, ngram_orders=())
    tokens = np.arange(300, dtype=np.uint16) % 37
    place = train_gpt.place_contiguous(tokens, 0, trainer.config)
    batch = train_gpt.Batch([trainer.read(place)[0]], None, {})
    losses = [trainer.step(step, batch)[0].item() / 256 for step in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    assert not any(state["rejects"].any() for state in trainer.optimizer.state.values() if "rejects" in state)


@pytest.mark.parametrize("field, value", [("matrix_update", "sopa"), ("matrix_shard", "row"), ("basis_every", 0),
                                          ("one_sided_above", -1), ("matrix_lr", 0.0)])
def test_wrong_values_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field}={value}: must"):
        tiny_config(**{field: value})


def test_the_log_tells_share_and_rejects(cli, tiny):
    run = cli(**{**tiny, "run_id": "soaped", "matrix_update": "soap_muon"})
    assert run.code == 0
    line, = [line for line in run.lines if line.startswith("optimizer: ")]
    share, rejects = (word.partition(":")[2] for word in line.split()[1:])
    assert 0 < float(share.rstrip("%")) < 100 and rejects == "0"
    assert run.result["basis_rejects"] == 0
    assert run.result["optimizer_percent"] == pytest.approx(float(share[:-1]), abs=0.1)


@pytest.mark.parametrize("kind", ["adam", *SOAP_RULES])
def test_a_run_that_diverges_ends_as_nan(kind, cli, tiny):
    run = cli(**{**tiny, "run_id": "diverged", "matrix_update": kind, "matrix_lr": 1e30, "steps": 8})
    assert run.code == 1 and run.lines[-1].startswith("status:nan ")
