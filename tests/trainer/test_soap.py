"""Chapter 6: eigenbases and the update rules that work in them, against slow float64 references; bad input."""
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt
from helpers import NO_TABLE, assert_bitwise, make_trainer, tiny_config
from optimizer_cases import batch_of, full_state, hyper, load, normal, state_of
from train_gpt import (FACTOR_BETA, GPT, KL_FLOOR, MATRIX_RULES, ConfigError, NgramTable, Optimizer, Runtime, Side,
                       eigenbasis_step, polar_express, refresh_eigenbases, refresh_method, sides_of, soap_muon_update,
                       soap_update, update_factors)

METHODS = ("eigh", "householder", "cholesky")
ITERATIVE = METHODS[1:]
SOAP_RULES = [name for name, rule in MATRIX_RULES.items() if rule.bases]


def orthogonal(*shape, seed=0):
    return torch.linalg.qr(normal(*shape, seed=seed).double()).Q.float()


def factors(count, size, seed=0, steps=30):
    """What training makes of a factor: a running mean of products of gradients whose spectrum spans six decades."""
    left, factor = orthogonal(count, size, size, seed=seed), torch.zeros(count, size, size)
    for step in range(steps):
        grad = left * torch.logspace(0, -3, size) @ normal(count, size, size, seed=1000 * seed + step + 1)
        factor.lerp_(grad @ grad.mT / size, 1 - FACTOR_BETA)
    return factor


def bank(count, rows, columns, seed=0, keys=("row", "column")):
    """The state of a bank under a soap rule, as training makes it, but for bases that are random."""
    state = {"moment": normal(count, rows, columns, seed=seed).square(),
             "rejects": torch.zeros(count, dtype=torch.int32)}
    for key in keys:
        size = rows if key == "row" else columns
        state[f"{key}_factor"] = factors(count, size, seed + (key == "column"))
        state[f"{key}_basis"] = orthogonal(count, size, size, seed=seed + 50 + (key == "column"))
    return state


def copy_of(state):
    return {key: value.clone() for key, value in state.items()}


def one_matrix(state, index):
    return {key: value[index:index + 1] for key, value in state.items()}


def sorted_columns(factor, basis):
    """The order of a basis's columns by falling Rayleigh quotient."""
    return torch.stack([(q * (k @ q)).sum(0) for k, q in zip(factor, basis)]).argsort(descending=True, stable=True)


def in_order(basis, order):
    return basis.gather(-1, order[:, None].expand_as(basis))


# ----- the refresh

@pytest.mark.parametrize("method", ITERATIVE)
@pytest.mark.parametrize("size", [1, 2, 7, 32, 96])
def test_a_step_is_the_qr_of_factor_times_basis(size, method):
    factor = factors(3, size)
    basis = orthogonal(3, size, size, seed=9)
    for _ in range(3):  # from a random basis to one near the eigenvectors
        new, order, rejected = eigenbasis_step(factor, basis, method)
        assert not rejected.any() and torch.equal(order, sorted_columns(factor, basis))
        sorted_basis = in_order(basis, order).double()
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
    exact = torch.linalg.qr(factor.double() @ in_order(basis, order).double()).Q
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


@pytest.mark.parametrize("exponent", [-36, -30, -20, 0, 20, 30])
@pytest.mark.parametrize("method", ITERATIVE)
def test_the_scale_of_a_factor_does_not_matter(method, exponent):
    """Gradients may be tiny or huge: only squares of them near float32's ends are out of reach."""
    for size in (7, 48):
        factor, basis = factors(3, size), orthogonal(3, size, size, seed=9)
        scaled = factor * 10.0 ** exponent
        new, order, rejected = eigenbasis_step(scaled, basis, method)
        assert not rejected.any()
        assert (new.mT @ new - torch.eye(size)).abs().max() <= 1e-5
        product = (scaled.double() * 10.0 ** -exponent) @ in_order(basis, order).double()
        triangle = torch.tril(new.double().mT @ product, -1)
        assert (triangle.flatten(1).norm(dim=1) <= 1e-5 * product.flatten(1).norm(dim=1)).all()


def low_rank(count, size, rank):
    """Factors of few gradients' directions, and their eigenvectors."""
    columns = normal(count, size, rank, seed=rank)
    factor = columns @ columns.mT / rank
    return factor, torch.linalg.eigh(factor.double()).eigenvectors.flip(-1).float()


@pytest.mark.parametrize("exponent", [-30, 0, 20])
@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("method", ITERATIVE)
def test_a_factor_of_low_rank_is_followed_by_bases_near_it(method, rank, exponent):
    """As after the first steps, whose bases are exact: nothing is rejected, and the space that gradients span stays."""
    for size in (9, 48, 128):
        factor, basis = low_rank(2, size, rank)
        space = basis[:, :, :rank].double()
        for _ in range(5):
            basis, _, rejected = eigenbasis_step(factor * 10.0 ** exponent, basis, method)
            assert not rejected.any()
        assert (basis.mT @ basis - torch.eye(size)).abs().max() <= 1e-5
        assert torch.linalg.svdvals(space.mT @ basis[:, :, :rank].double()).min() > 1 - 1e-5


@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("method", METHODS)
def test_a_factor_of_low_rank_never_makes_a_wrong_basis(method, rank):
    """From bases far from it: who is accepted has found the space that gradients span, others keep their columns."""
    for size in (9, 48, 128):
        factor, eigenvectors = low_rank(2, size, rank)
        basis = orthogonal(2, size, size, seed=9)
        new, order, rejected = eigenbasis_step(factor, basis, method)
        assert (new.mT @ new - torch.eye(size)).abs().max() <= 1e-4
        assert_bitwise(new[rejected], in_order(basis, order)[rejected])
        cosines = torch.linalg.svdvals(eigenvectors[:, :, :rank].double().mT @ new[:, :, :rank].double())
        assert (cosines[~rejected] > 1 - 1e-4).all()
        if method in ("eigh", "householder"):
            assert not rejected.any()


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_its_matrices_one_by_one(method):
    together = [bank(3, 16, 24), bank(2, 24, 16, seed=2), bank(4, 8, 1, seed=4), bank(2, 16, 4, seed=6, keys=("row",))]
    alone = [copy_of(one_matrix(state, index)) for state in together for index in range(len(state["moment"]))]
    refresh_eigenbases(together, method)
    for state in alone:
        refresh_eigenbases([state], method)
    expected = iter(alone)
    for state in together:
        for index in range(len(state["moment"])):
            single = next(expected)
            for side, other in zip(sides_of(one_matrix(state, index)), sides_of(single)):
                torch.testing.assert_close(side.basis, other.basis, atol=1e-5, rtol=0)
            assert_bitwise(state["moment"][index], single["moment"][0])


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_parameters_does_not_matter(method):
    forward = [bank(3, 16, 24), bank(2, 24, 16, seed=2)]
    backward = [copy_of(state) for state in reversed(forward)]
    refresh_eigenbases(forward, method)
    refresh_eigenbases(backward, method)
    for one, other in zip(forward, reversed(backward)):
        for key in ("row_basis", "column_basis"):
            torch.testing.assert_close(one[key], other[key], atol=1e-5, rtol=0)
        assert_bitwise(one["moment"], other["moment"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keys", [("row",), ("column",), ("row", "column")], ids="+".join)
def test_moments_follow_the_sort(keys, method):
    state = bank(3, 10, 6, keys=keys)
    before, expected = copy_of(state), state["moment"].clone()
    refresh_eigenbases([state], method)
    for key in keys:
        order = sorted_columns(before[f"{key}_factor"], before[f"{key}_basis"])
        assert not torch.equal(order[0], torch.arange(len(order[0])))
        for index in range(3):
            expected[index] = expected[index][order[index]] if key == "row" else expected[index][:, order[index]]
        assert_bitwise(state[f"{key}_factor"], before[f"{key}_factor"])
    assert_bitwise(state["moment"], expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_bad_matrix_keeps_its_basis_and_spoils_no_other(poison, method):
    clean = bank(3, 10, 6, keys=("column",))
    bad = copy_of(clean)
    bad["column_factor"][1, 2, 3] = poison
    old = copy_of(bad)
    refresh_eigenbases([clean], method)
    refresh_eigenbases([bad], method)
    for index in (0, 2):
        assert_bitwise(bad["column_basis"][index], clean["column_basis"][index])
        assert_bitwise(bad["moment"][index], clean["moment"][index])
    assert bad["rejects"].tolist() == [0, 1, 0] and not clean["rejects"].any()
    # The old columns, in some order, and the moment in the same.
    order = [int((old["column_basis"][1] == column[:, None]).all(0).nonzero()[0, 0])
             for column in bad["column_basis"][1].mT]
    assert sorted(order) == list(range(6))
    assert_bitwise(bad["moment"][1], old["moment"][1][:, order])


def test_a_rejected_matrix_is_sorted_with_its_moment():
    state = bank(2, 8, 5, keys=("row",))
    state["row_factor"][0] = torch.diag(torch.tensor([0.0, 0, 0, 0, 1, -1, 3, 2]))  # not positive definite
    state["row_basis"][0] = torch.eye(8)
    moment = state["moment"].clone()
    refresh_eigenbases([state], "cholesky")
    assert state["rejects"].tolist() == [1, 0]
    order = [6, 7, 4, 0, 1, 2, 3, 5]
    assert_bitwise(state["row_basis"][0], torch.eye(8)[:, order])
    assert_bitwise(state["moment"][0], moment[0][order])


@pytest.mark.parametrize("method", METHODS)
def test_a_zero_factor_keeps_its_basis(method):
    state = bank(2, 8, 5, keys=("row",))
    state["row_factor"][0] = 0
    before = copy_of(state)
    refresh_eigenbases([state], method)
    assert_bitwise(state["row_basis"][0], before["row_basis"][0])
    assert_bitwise(state["moment"][0], before["moment"][0])
    assert not torch.equal(state["row_basis"][1], before["row_basis"][1])
    assert not state["rejects"].any()  # nothing failed


@pytest.mark.parametrize("method", METHODS)
def test_a_factor_that_stays_singular(method):
    """The same gradient of rank 1 at every step: all finite, orthonormal, and its direction is found."""
    grad = normal(1, 9, 1) @ normal(1, 1, 4, seed=1)
    state = {"moment": torch.zeros(1, 9, 4), "rejects": torch.zeros(1, dtype=torch.int32),
             "row_factor": torch.zeros(1, 9, 9), "row_basis": torch.eye(9)[None]}
    for _ in range(40):
        update_factors(grad, sides_of(state), kl=False)
        refresh_eigenbases([state], method)
    basis = state["row_basis"]
    assert (basis.mT @ basis - torch.eye(9)).abs().max() < 1e-5
    direction = nn.functional.normalize(grad[0, :, 0], dim=0)
    assert (basis[0, :, 0] @ direction).abs() > 1 - 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_empty_batches_and_single_rows(method):
    refresh_eigenbases([], method)
    refresh_eigenbases([{key: value[5::10] for key, value in bank(2, 8, 8).items()}], method)
    assert [len(value) for value in eigenbasis_step(torch.zeros(0, 4, 4), torch.zeros(0, 4, 4), method)] == [0, 0, 0]
    state = {"moment": normal(2, 1, 4), "rejects": torch.zeros(2, dtype=torch.int32),
             "row_factor": torch.full((2, 1, 1), 3.0), "row_basis": torch.ones(2, 1, 1)}
    moment = state["moment"].clone()
    refresh_eigenbases([state], method)
    torch.testing.assert_close(state["row_basis"].abs(), torch.ones(2, 1, 1))
    assert_bitwise(state["moment"], moment)


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
    for step, method in enumerate(("householder", "cholesky")):
        monkeypatch.setattr(train_gpt, "refresh_method", lambda *words: method)
        accumulate(optimizer, step)
        with NoSync():
            optimizer.step(step, 1.0)


def test_the_method_depends_on_step_and_device():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    expected = ["eigh", "eigh", "householder", "householder"]
    assert [refresh_method(step, cpu) for step in (0, 2, 3, 10_000)] == expected
    assert [refresh_method(step, cuda) for step in (2, 3, 24, 25)] == ["eigh", "householder", "householder", "cholesky"]


# ----- factors

@pytest.mark.parametrize("kl", [False, True])
def test_factors_against_a_slow_reference(kl):
    sides = sides_of(bank(3, 6, 9))
    before, grad = [Side(one.axis, one.factor.clone(), one.basis.clone()) for one in sides], normal(3, 6, 9, seed=2)
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
    plain, kl = ([Side(axis, torch.zeros(2, size, size), torch.eye(size).repeat(2, 1, 1))
                  for axis, size in ((-2, 4), (-1, 5))] for _ in range(2))
    update_factors(normal(2, 4, 5), plain, kl=False)
    update_factors(normal(2, 4, 5), kl, kl=True)
    for one, other in zip(plain, kl):
        torch.testing.assert_close(one.factor, other.factor)
        assert other.factor.any()


# ----- update rules

def step_against(weight, update, lr, decay):
    return weight - lr * (update + np.where(update * weight >= 0, decay * weight, 0))


def second_of(count, rows, columns):
    return torch.zeros((count, rows, 1) if rows >= columns else (count, 1, columns))


SIDES = {"both": ("row", "column"), "rows only": ("row",), "columns only": ("column",), "none": ()}


def settled(which, rows, columns):
    """A state with known bases before its first step, and each matrix's bases in float64: (left, right) of each."""
    state = {**bank(3, rows, columns, keys=SIDES[which]), "momentum": torch.zeros(3, rows, columns),
             "moment": torch.zeros(3, rows, columns), "count": torch.zeros(3, 1, 1),
             "second": second_of(3, rows, columns)}
    def basis(key, size, k):
        return state[f"{key}_basis"][k].double().numpy() if key in SIDES[which] else np.eye(size)
    return state, [(basis("row", rows, k), basis("column", columns, k)) for k in range(3)]


@pytest.mark.parametrize("which", SIDES)
@pytest.mark.parametrize("rows, columns", [(8, 8), (12, 5), (5, 12), (1, 6)])
def test_soap_is_adam_in_the_eigenbasis(rows, columns, which):
    state, bases = settled(which, rows, columns)
    weight = normal(3, rows, columns)
    slow = [(weight[k].double().numpy(), 0, 0) for k in range(3)]
    for step in range(1, 5):
        grad = 0.01 * normal(3, rows, columns, seed=step)
        soap_update(weight, grad, state, hyper(step, 0.1 * step, 0.5))
        for k, (w, m, v) in enumerate(slow):
            left, right = bases[k]
            rotated = left.T @ grad[k].double().numpy() @ right
            m, v = 0.9 * m + 0.1 * rotated, 0.95 * v + 0.05 * rotated ** 2
            update = left @ ((m / (1 - 0.9 ** step)) / np.sqrt(v / (1 - 0.95 ** step))) @ right.T
            w = step_against(w, update / math.sqrt(columns), 0.1 * step, 0.5)
            slow[k] = w, m, v
            np.testing.assert_allclose(weight[k].numpy(), w, atol=2e-4, rtol=1e-3)
            np.testing.assert_allclose(state["moment"][k].numpy(), v, atol=1e-9, rtol=1e-3)


@pytest.mark.parametrize("which", SIDES)
@pytest.mark.parametrize("rows, columns", [(8, 8), (12, 5), (5, 12), (1, 6)])
def test_soap_muon_is_muon_on_the_whitened_momentum(rows, columns, which):
    state, bases = settled(which, rows, columns)
    weight = normal(3, rows, columns)
    slow = [(weight[k].double().numpy(), 0, 0, 0) for k in range(3)]
    for step in range(4):
        lr, momentum = 0.05 * (step + 1), 0.85 + 0.03 * step
        grad = 0.01 * normal(3, rows, columns, seed=step + 1)
        soap_muon_update(weight, grad, state, hyper(step + 1, lr, 0.5, momentum))
        for k, (w, b, v, s) in enumerate(slow):
            left, right = bases[k]
            g = grad[k].double().numpy()
            b = momentum * b + (1 - momentum) * g
            rotated = left.T @ (momentum * b + (1 - momentum) * g) @ right
            v = 0.9 * v + 0.1 * rotated ** 2
            whitened = left @ (rotated / np.sqrt(np.maximum(v, 1e-16))) @ right.T
            update = polar_express(torch.from_numpy(whitened)[None], torch.float64)[0].double().numpy()
            size = np.linalg.norm(update)
            s = 0.95 * s + 0.05 * (update ** 2).mean(1 if rows >= columns else 0, keepdims=True)
            update = update / np.sqrt(s)
            update *= size / np.linalg.norm(update)
            w = step_against(w, update, lr * max(1, rows / columns) ** 0.5, 0.5)
            slow[k] = w, b, v, s
            np.testing.assert_allclose(weight[k].numpy(), w, atol=5e-4, rtol=5e-3)
            np.testing.assert_allclose(state["momentum"][k].numpy(), b, atol=1e-7, rtol=1e-4)
            np.testing.assert_allclose(state["moment"][k].numpy(), v, atol=1e-9, rtol=1e-3)


def run_rule(kind, weight, grad, state):
    """One step of a rule on a copy of the state. Returns the weights it leaves."""
    state, weight = {**copy_of(state), "second": second_of(*weight.shape)}, weight.clone()
    MATRIX_RULES[kind].update(weight, grad, state, hyper(3, decay=0.5))
    return weight


@pytest.mark.parametrize("kind", SOAP_RULES)
def test_signs_and_order_of_the_columns_do_not_matter(kind):
    """The eigenbasis is only known up to signs, and up to an order that the moment shares."""
    state = {**bank(2, 9, 7), "momentum": 0.01 * normal(2, 9, 7, seed=5), "count": torch.full((2, 1, 1), 2.0)}
    state["moment"] *= 1e-4
    rows, columns = torch.randperm(9), torch.randperm(7)
    changed = copy_of(state)
    changed["row_basis"] = (state["row_basis"] * torch.tensor([1.0, -1, 1, 1, -1, -1, 1, -1, 1]))[:, :, rows]
    changed["column_basis"] = (state["column_basis"] * torch.tensor([-1.0, -1, 1, 1, -1, 1, 1]))[:, :, columns]
    changed["moment"] = state["moment"][:, rows][:, :, columns]
    weight, grad = normal(2, 9, 7, seed=3), 0.01 * normal(2, 9, 7, seed=4)
    results = [run_rule(kind, weight, grad, these) for these in (state, changed)]
    torch.testing.assert_close(*results, atol=2e-5, rtol=1e-4)
    assert (results[0] - weight).abs().max() > 0.01


@pytest.mark.parametrize("kind", SOAP_RULES)
@pytest.mark.parametrize("rows, columns", [(1, 6), (6, 4)])
def test_bad_gradients_spoil_no_other_matrix(rows, columns, kind):
    """NaN in one matrix, zero in another."""
    results = []
    for poison in (0.5, float("nan")):
        state = {**bank(3, rows, columns), "momentum": torch.zeros(3, rows, columns),
                 "moment": torch.zeros(3, rows, columns), "count": torch.full((3, 1, 1), 2.0)}
        for side in sides_of(state):
            side.factor[2] = 0
        grad = normal(3, rows, columns, seed=3)
        grad[1, 0, 0], grad[2] = poison, 0
        weight = run_rule(kind, normal(3, rows, columns), grad, state)
        update_factors(grad, sides_of(state), MATRIX_RULES[kind].kl)
        refresh_eigenbases([state], "householder")
        results.append((weight, state))
    (good, good_state), (bad, bad_state) = results
    for index in (0, 2):
        assert_bitwise(bad[index], good[index])
        for key in ("row_basis", "column_basis"):
            assert_bitwise(bad_state[key][index], good_state[key][index])
    assert good.isfinite().all() and not bad[1].isfinite().all()
    assert bad_state["rejects"].tolist() == [0, 2, 0]  # by both sides


# ----- in the optimizer

def optimizer_of(kind, **changes):
    config, runtime = tiny_config(**{"matrix_update": kind, "basis_every": 2, "steps": 40, **NO_TABLE,
                                     **changes}), Runtime("cpu")
    return Optimizer(config, GPT(config, "sdpa"), NgramTable(config, runtime), runtime)


def weights_of(optimizer, name="mlp"):
    return optimizer.layouts[name].param.detach()


def accumulate(optimizer, step, scale=1e-3):
    optimizer.accumulate({name: scale * normal(*weights_of(optimizer, name).shape, seed=10 * step + index)
                          for index, name in enumerate(("attention", "mlp"))})


def walk(optimizer, steps, first=0):
    for step in range(first, first + steps):
        accumulate(optimizer, step)
        optimizer.step(step, 1.0)
    return optimizer


@pytest.mark.parametrize("kind", MATRIX_RULES)
def test_state_survives_a_round_trip_bitwise(kind):
    through = walk(optimizer_of(kind), 9)
    first = walk(optimizer_of(kind), 5)
    second = optimizer_of(kind)
    load(second, full_state(first))
    for name in second.layouts:
        weights_of(second, name).copy_(weights_of(first, name))
    walk(second, 4, first=5)
    assert_bitwise(full_state(second), full_state(through))
    assert_bitwise(weights_of(second), weights_of(through))
    keys = set(full_state(through)["matrices"]["attention"])
    assert ("row_basis" in keys) == ("column_factor" in keys) == (kind in SOAP_RULES)


@pytest.mark.parametrize("kind", SOAP_RULES)
def test_large_sides_get_no_basis(kind):
    state = state_of(walk(optimizer_of(kind, one_sided_above=32), 3))
    assert "row_basis" in state["attention"] and "column_basis" in state["attention"]
    assert "row_basis" not in state["mlp"] and state["mlp"]["column_basis"].shape == (4, 32, 32)
    state = state_of(walk(optimizer_of(kind, one_sided_above=0), 3))
    assert not any("basis" in key for key in state["mlp"])


def test_soap_without_bases_is_adam():
    soap, adam = (walk(optimizer_of(kind, one_sided_above=0), 4) for kind in ("soap", "adam"))
    assert_bitwise(weights_of(soap), weights_of(adam))


def test_the_first_step_of_each_rule():
    """SOAP-Muon is Muon; the others wait for a basis."""
    start = weights_of(optimizer_of("muon")).clone()
    moved = {kind: weights_of(walk(optimizer_of(kind, matrix_decay=0.0), 1)) - start
             for kind in ("muon", *SOAP_RULES)}
    assert moved["muon"].any() and not moved["soap"].any()
    torch.testing.assert_close(moved["soap_muon"], moved["muon"])
    assert not moved["kl_soap"].any()


# Whose factors a rule's update is rotated by: those that the last step left, or those that know this step's gradient.
BASES_OF_AN_UPDATE = {"soap": "last step's", "soap_muon": "last step's", "kl_soap": "last step's"}


@pytest.mark.parametrize("kind", SOAP_RULES)
def test_which_bases_an_update_is_rotated_by(kind, monkeypatch):
    optimizer, used = walk(optimizer_of(kind, basis_every=1), 4), []
    honest = train_gpt.change_basis

    def recorded(x, sides, back=False):
        if back:
            used.append(sides[0].basis.clone())
        return honest(x, sides, back)

    monkeypatch.setattr(train_gpt, "change_basis", recorded)
    before = state_of(optimizer)["attention"]["row_basis"].clone()
    walk(optimizer, 1, first=4)
    after = state_of(optimizer)["attention"]["row_basis"]
    assert_bitwise(used[0], {"last step's": before, "this step's": after}[BASES_OF_AN_UPDATE[kind]])
    assert not torch.equal(before, after)


@pytest.mark.parametrize("kind", SOAP_RULES)
def test_bases_follow_the_factors_in_turn(kind):
    """At first all bases are exact; then matrix i steps where (step - i) divides by basis_every, the others rest."""
    optimizer = walk(optimizer_of(kind, basis_every=3), 3)
    state = state_of(optimizer)["attention"]
    for key in ("row", "column"):
        rotated = state[f"{key}_basis"].mT @ state[f"{key}_factor"] @ state[f"{key}_basis"]
        off = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
        assert (off.flatten(1).norm(dim=1) < 1e-5 * rotated.flatten(1).norm(dim=1)).all()
    for step in range(3, 8):
        before = copy_of(state)
        walk(optimizer, 1, first=step)
        for index in range(8):
            for key in ("row_basis", "column_basis"):
                assert torch.equal(before[key][index], state[key][index]) == (index % 3 != step % 3)
            assert not torch.equal(before["row_factor"][index], state["row_factor"][index])
    assert not state["rejects"].any()


def test_a_step_without_a_refresh_leaves_bases_alone():
    optimizer = walk(optimizer_of("soap_muon", basis_every=100), 3)
    before = {name: copy_of(state) for name, state in state_of(optimizer).items()}
    walk(optimizer, 1, first=50)  # turn of matrix 50, which there is not
    for name in ("attention", "mlp"):
        for key in ("row_basis", "column_basis"):
            assert_bitwise(state_of(optimizer)[name][key], before[name][key])
        assert not torch.equal(state_of(optimizer)[name]["row_factor"], before[name]["row_factor"])


@pytest.mark.parametrize("kind", ["adam", *SOAP_RULES])
def test_zero_gradients_leave_everything_finite(kind):
    optimizer = optimizer_of(kind, matrix_decay=0.0)
    before = weights_of(optimizer).clone()
    for step in range(5):
        optimizer.step(step, 1.0)
    assert_bitwise(weights_of(optimizer), before)
    if kind in SOAP_RULES:
        assert_bitwise(state_of(optimizer)["mlp"]["row_basis"], torch.eye(64).repeat(4, 1, 1))
    walk(optimizer, 3, first=5)  # and the first gradients may come later
    assert weights_of(optimizer).isfinite().all() and not torch.equal(weights_of(optimizer), before)


@pytest.mark.parametrize("kind", MATRIX_RULES)
def test_every_rule_learns(kind):
    """A whole model on one batch it can remember: real, ill-conditioned gradients. Rejects stay at zero."""
    trainer = make_trainer(random_weights=False, matrix_update=kind, steps=60, basis_every=2, **NO_TABLE)
    batch = batch_of(trainer, np.arange(300) % 37)
    losses = [trainer.step(step, batch)[0].item() / 256 for step in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    rejects = [state["rejects"] for state in state_of(trainer.optimizer).values() if "rejects" in state]
    assert len(rejects) == 2 * (kind in SOAP_RULES) and not any(each.any() for each in rejects)


@pytest.mark.parametrize("field, value", [("basis_every", 0), ("one_sided_above", -1), ("matrix_lr", 0.0)])
def test_wrong_values_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field}={value}: must"):
        tiny_config(**{field: value})


def test_the_result_counts_rejects(cli, tiny, monkeypatch):
    """None in an honest run, and each one where every decomposition fails."""
    honest = cli(**{**tiny, "run_id": "honest", "matrix_update": "soap_muon"})
    assert honest.code == 0 and honest.result["basis_rejects"] == 0
    exact = train_gpt.eigenbasis_step
    monkeypatch.setattr(train_gpt, "eigenbasis_step", lambda factors, bases, method: exact(
        torch.full_like(factors, float("nan")), bases, method))
    failing = cli(**{**tiny, "run_id": "failing", "matrix_update": "soap_muon"})
    assert failing.code == 0  # both sides of each matrix three times, then of matrix 3
    assert failing.result["basis_rejects"] == 2 * (3 * (8 + 4) + 2)


@pytest.mark.parametrize("kind", ["adam", *SOAP_RULES])
def test_a_run_that_diverges_ends_as_nan(kind, cli, tiny):
    run = cli(**{**tiny, "run_id": "diverged", "matrix_update": kind, "matrix_lr": 1e30, "steps": 8})
    assert run.code == 1 and run.lines[-1].startswith("status:nan ")
