"""Eigenbases and the update rules that work in them, against slow float64 references; bad input.

How ranks share them is in test_distributed.py.
"""

import math

import numpy as np
import pytest
import torch
from optimizer_cases import batch_of, hyper, normal, optimizer_of, state_of
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt
from helpers import NO_TABLE, assert_bitwise, make_trainer
from train_gpt import (
    FACTOR_BETA,
    KL_FLOOR,
    MATRIX_RULES,
    Runtime,
    Side,
    eigen_sides,
    eigenbasis_step,
    polar_express,
    refresh_eigenbases,
    refresh_method,
    soap_muon_update,
    soap_update,
    update_factors,
)

METHODS = ("eigh", "householder", "cholesky")
ITERATIVE = METHODS[1:]
SOAP_RULES = [name for name, rule in MATRIX_RULES.items() if rule.has_bases]


def orthogonal(*shape, seed=0):
    return torch.linalg.qr(normal(*shape, seed=seed).double()).Q.float()


def factors(count, size, seed=0, steps=30):
    """What training makes of a factor: a running mean of products of gradients whose spectrum spans
    six decades."""
    left, factor = orthogonal(count, size, size, seed=seed), torch.zeros(count, size, size)
    for step in range(steps):
        drawn = normal(count, size, size, seed=1000 * seed + step + 1)
        grad = left * torch.logspace(0, -3, size) @ drawn
        factor.lerp_(grad @ grad.mT / size, 1 - FACTOR_BETA)
    return factor


def bank(count, rows, columns, seed=0, keys=("row", "column")):
    """The state of a bank under a soap rule, as training makes it, but for bases that are
    random."""
    state = {
        "moment": normal(count, rows, columns, seed=seed).square(),
        "rejects": torch.zeros(count, dtype=torch.int32),
    }
    for key in keys:
        size = rows if key == "row" else columns
        state[f"{key}_factor"] = factors(count, size, seed + (key == "column"))
        state[f"{key}_basis"] = orthogonal(count, size, size, seed=seed + 50 + (key == "column"))
    return state


def copy_of(state):
    return {key: value.clone() for key, value in state.items()}


def one_matrix(state, index):
    return {key: value[index : index + 1] for key, value in state.items()}


def sorted_columns(factor, basis):
    """The order of a basis's columns by falling Rayleigh quotient."""
    quotients = torch.stack([(q * (k @ q)).sum(0) for k, q in zip(factor, basis, strict=True)])
    return quotients.argsort(descending=True, stable=True)


def in_order(basis, order):
    return basis.gather(-1, order[:, None].expand_as(basis))


def error_of(basis):
    """How far bases are from orthonormal."""
    return (basis.mT @ basis - torch.eye(basis.size(-1))).abs().max()


def off_diagonal_share(factor, basis):
    """How much of a factor is off the diagonal in a basis, at most."""
    rotated = basis.mT @ factor @ basis
    rotated = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
    return (rotated.flatten(1).norm(dim=1) / factor.flatten(1).norm(dim=1)).max()


# ----- the refresh


@pytest.mark.parametrize("method", ITERATIVE)
@pytest.mark.parametrize("exponent", [-36, -20, 0, 30])
@pytest.mark.parametrize("size", [1, 7, 48])
def test_a_step_is_the_qr_of_factor_times_basis(size, exponent, method):
    """Whatever the scale of gradients: only squares of them near float32's ends are out of
    reach."""
    factor, basis = factors(3, size) * 10.0**exponent, orthogonal(3, size, size, seed=9)
    for _ in range(3):  # from a random basis to one near the eigenvectors
        new, order, rejected = eigenbasis_step(factor, basis, method)
        assert not rejected.any() and torch.equal(order, sorted_columns(factor, basis))
        assert error_of(new) <= 1e-5
        product = factor.double() * 10.0**-exponent @ in_order(basis, order).double()
        # Zero for the orthogonal factor of a QR.
        triangle = torch.tril(new.double().mT @ product, -1).flatten(1).norm(dim=1)
        assert (triangle <= 1e-5 * product.flatten(1).norm(dim=1)).all()
        basis = new


@pytest.mark.parametrize("method", METHODS)
def test_repeated_steps_find_the_eigenvectors(method):
    factor = factors(2, 12)
    basis = torch.eye(12).repeat(2, 1, 1)
    for _ in range(1 if method == "eigh" else 400):
        basis, _, rejected = eigenbasis_step(factor, basis, method)
        assert not rejected.any()
    assert off_diagonal_share(factor, basis) < 1e-3


def low_rank(count, size, rank):
    """Factors of few gradients' directions, and their eigenvectors."""
    columns = normal(count, size, rank, seed=rank)
    factor = columns @ columns.mT / rank
    return factor, torch.linalg.eigh(factor.double()).eigenvectors.flip(-1).float()


@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("method", ITERATIVE)
def test_a_factor_of_low_rank_is_followed_by_bases_near_it(method, rank):
    """As after the first steps, whose bases are exact: nothing is rejected, and the space that
    gradients span stays."""
    for size, exponent in ((9, 0), (48, -30), (48, 20)):
        factor, basis = low_rank(2, size, rank)
        space = basis[:, :, :rank].double()
        for _ in range(5):
            basis, _, rejected = eigenbasis_step(factor * 10.0**exponent, basis, method)
            assert not rejected.any()
        assert error_of(basis) <= 1e-5
        cosines = torch.linalg.svdvals(space.mT @ basis[:, :, :rank].double())
        assert cosines.min() > 1 - 1e-5


@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("method", METHODS)
def test_a_factor_of_low_rank_never_makes_a_wrong_basis(method, rank):
    """From bases far from it: who is accepted has found the space that gradients span, others keep
    their columns."""
    for size in (9, 48):
        factor, eigenvectors = low_rank(2, size, rank)
        basis = orthogonal(2, size, size, seed=9)
        new, order, rejected = eigenbasis_step(factor, basis, method)
        assert error_of(new) <= 1e-4
        assert_bitwise(new[rejected], in_order(basis, order)[rejected])
        space = eigenvectors[:, :, :rank].double()
        cosines = torch.linalg.svdvals(space.mT @ new[:, :, :rank].double())
        assert (cosines[~rejected] > 1 - 1e-4).all()
        if method != "cholesky":
            assert not rejected.any()


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_its_matrices_one_by_one(method):
    together = [
        bank(3, 16, 24),
        bank(2, 24, 16, seed=2),
        bank(4, 8, 1, seed=4),
        bank(2, 16, 4, seed=6, keys=("row",)),
    ]
    alone = []
    for state in together:
        alone.append([copy_of(one_matrix(state, at)) for at in range(len(state["moment"]))])
    refresh_eigenbases(together, method)
    for state, singles in zip(together, alone, strict=True):
        for index, single in enumerate(singles):
            refresh_eigenbases([single], method)
            sides = eigen_sides(one_matrix(state, index))
            for side, other in zip(sides, eigen_sides(single), strict=True):
                torch.testing.assert_close(side.basis, other.basis, atol=1e-5, rtol=0)
            assert_bitwise(state["moment"][index], single["moment"][0])


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
            rows = expected[index]
            expected[index] = rows[order[index]] if key == "row" else rows[:, order[index]]
        assert_bitwise(state[f"{key}_factor"], before[f"{key}_factor"])
    assert_bitwise(state["moment"], expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_bad_matrix_keeps_its_basis_and_spoils_no_other(poison, method):
    clean = bank(3, 10, 6, keys=("column",))
    bad = copy_of(clean)
    bad["column_factor"][1, 2, 3] = bad["column_factor"][1, 3, 2] = poison
    old = copy_of(bad)
    refresh_eigenbases([clean], method)
    refresh_eigenbases([bad], method)
    for index in (0, 2):
        assert_bitwise(bad["column_basis"][index], clean["column_basis"][index])
        assert_bitwise(bad["moment"][index], clean["moment"][index])
    assert bad["rejects"].tolist() == [0, 1, 0] and not clean["rejects"].any()
    # The old columns, in some order, and the moment in the same.
    order = []
    for column in bad["column_basis"][1].mT:
        is_same = (old["column_basis"][1] == column[:, None]).all(0)
        order.append(int(is_same.nonzero()[0, 0]))
    assert sorted(order) == list(range(6))
    assert_bitwise(bad["moment"][1], old["moment"][1][:, order])


def test_a_rejected_matrix_is_sorted_with_its_moment():
    state = bank(2, 8, 5, keys=("row",))
    # Not positive definite.
    state["row_factor"][0] = torch.diag(torch.tensor([0.0, 0, 0, 0, 1, -1, 3, 2]))
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
def test_empty_batches_and_single_rows(method):
    refresh_eigenbases([], method)
    refresh_eigenbases([{key: value[5::10] for key, value in bank(2, 8, 8).items()}], method)
    nothing = torch.zeros(0, 4, 4)
    assert [len(value) for value in eigenbasis_step(nothing, nothing, method)] == [0, 0, 0]
    state = {
        "moment": normal(2, 1, 4),
        "rejects": torch.zeros(2, dtype=torch.int32),
        "row_factor": torch.full((2, 1, 1), 3.0),
        "row_basis": torch.ones(2, 1, 1),
    }
    moment = state["moment"].clone()
    refresh_eigenbases([state], method)
    torch.testing.assert_close(state["row_basis"].abs(), torch.ones(2, 1, 1))
    assert_bitwise(state["moment"], moment)


def test_the_method_depends_on_step_and_device():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    on_cpu = [refresh_method(step, cpu) for step in (0, 2, 3, 10_000)]
    assert on_cpu == ["eigh", "eigh", "householder", "householder"]
    on_cuda = [refresh_method(step, cuda) for step in (2, 3, 24, 25)]
    assert on_cuda == ["eigh", "householder", "householder", "cholesky"]


# ----- factors


@pytest.mark.parametrize("is_kl", [False, True])
def test_factors_against_a_slow_reference(is_kl):
    sides, grad = eigen_sides(bank(3, 6, 9)), normal(3, 6, 9, seed=2)
    before = [(side.factor.double().numpy(), side.basis.double().numpy()) for side in sides]
    update_factors(grad, sides, is_kl)
    for k in range(3):
        exact = grad[k].double().numpy()
        for one, g, other in ((0, exact, 1), (1, exact.T, 0)):
            metric = np.eye(g.shape[1])
            if is_kl:
                factor, basis = before[other][0][k], before[other][1][k]
                values = np.diag(basis.T @ factor @ basis)
                values = np.maximum(values / values.mean(), KL_FLOOR)
                metric = basis @ np.diag(1 / values) @ basis.T
            product = g @ metric @ g.T / g.shape[1]
            expected = FACTOR_BETA * before[one][0][k] + (1 - FACTOR_BETA) * product
            found, size = sides[one].factor[k].numpy(), np.abs(expected).max()
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * size)


def test_the_first_kl_factors_are_shampoos():
    banks = []
    for is_kl in (False, True):
        sides = []
        for axis, size in ((-2, 4), (-1, 5)):
            sides.append(Side(axis, torch.zeros(2, size, size), torch.eye(size).repeat(2, 1, 1)))
        update_factors(normal(2, 4, 5), sides, is_kl)
        banks.append(sides)
    for one, other in zip(*banks, strict=True):
        torch.testing.assert_close(one.factor, other.factor)
        assert other.factor.any()


# ----- update rules


def step_against(weight, update, lr, decay):
    return weight - lr * (update + np.where(update * weight >= 0, decay * weight, 0))


def second_of(count, rows, columns):
    return torch.zeros((count, rows, 1) if rows >= columns else (count, 1, columns))


SIDES = {
    "both": ("row", "column"),
    "rows only": ("row",),
    "columns only": ("column",),
    "none": (),
}


def settled(which, rows, columns):
    """A state with known bases before its first step, and each matrix's bases in float64: (left,
    right) of each."""
    state = {
        **bank(3, rows, columns, keys=SIDES[which]),
        "momentum": torch.zeros(3, rows, columns),
        "moment": torch.zeros(3, rows, columns),
        "count": torch.zeros(3, 1, 1),
        "second": second_of(3, rows, columns),
    }

    def bases(key, size):
        if key in SIDES[which]:
            return state[f"{key}_basis"].double().numpy()
        return np.stack([np.eye(size)] * 3)

    return state, list(zip(bases("row", rows), bases("column", columns), strict=True))


SHAPES = pytest.mark.parametrize("rows, columns", [(12, 5), (5, 12), (1, 6)])


@pytest.mark.parametrize("which", SIDES)
@SHAPES
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
            m = 0.9 * m + 0.1 * rotated
            v = 0.95 * v + 0.05 * rotated**2
            ratio = (m / (1 - 0.9**step)) / np.sqrt(v / (1 - 0.95**step))
            update = left @ ratio @ right.T
            w = step_against(w, update / math.sqrt(columns), 0.1 * step, 0.5)
            slow[k] = w, m, v
            np.testing.assert_allclose(weight[k].numpy(), w, atol=2e-4, rtol=1e-3)
            np.testing.assert_allclose(state["moment"][k].numpy(), v, atol=1e-9, rtol=1e-3)


@pytest.mark.parametrize("which", SIDES)
@SHAPES
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
            v = 0.9 * v + 0.1 * rotated**2
            whitened = left @ (rotated / np.sqrt(np.maximum(v, 1e-16))) @ right.T
            polar = polar_express(torch.from_numpy(whitened)[None], torch.float64)
            update = polar[0].double().numpy()
            size, axis = np.linalg.norm(update), 1 if rows >= columns else 0
            s = 0.95 * s + 0.05 * (update**2).mean(axis, keepdims=True)
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
    momentum, count = 0.01 * normal(2, 9, 7, seed=5), torch.full((2, 1, 1), 2.0)
    state = {**bank(2, 9, 7), "momentum": momentum, "count": count}
    state["moment"] *= 1e-4
    changed, moment = copy_of(state), state["moment"]
    for key, size, axis in (("row", 9, 1), ("column", 7, 2)):
        order = normal(size, seed=size).argsort()
        signs = normal(size, seed=size + 1).sign()
        changed[f"{key}_basis"] = (state[f"{key}_basis"] * signs)[:, :, order]
        moment = moment.index_select(axis, order)
    changed["moment"] = moment
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
        zeros, count = torch.zeros(3, rows, columns), torch.full((3, 1, 1), 2.0)
        state = {**bank(3, rows, columns), "momentum": zeros, "count": count}
        state["moment"] = torch.zeros(3, rows, columns)
        for side in eigen_sides(state):
            side.factor[2] = 0
        grad = normal(3, rows, columns, seed=3)
        grad[1, 0, 0], grad[2] = poison, 0
        weight = run_rule(kind, normal(3, rows, columns), grad, state)
        update_factors(grad, eigen_sides(state), MATRIX_RULES[kind].is_kl)
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

BANKS = {"query_key": (8, 32, 32), "mlp": (4, 64, 32)}


def banks_of(kind, shapes=BANKS, **changes):
    """An Optimizer of banks of matrices alone."""
    changes = {"matrix_update": kind, "basis_every": 2, "steps": 40, **changes}
    return optimizer_of(Runtime("cpu"), shapes, **changes)


def weights_of(optimizer, name="mlp"):
    return optimizer.layouts[name].param.detach()


def add_gradients(optimizer, step):
    grads = {}
    for index, (name, layout) in enumerate(optimizer.layouts.items()):
        grads[name] = 1e-3 * normal(*layout.param.shape, seed=10 * step + index)
    optimizer.accumulate(grads)
    optimizer.count(1)


def walk(optimizer, steps, first=0):
    for step in range(first, first + steps):
        add_gradients(optimizer, step)
        optimizer.step(step, 1.0)
    return optimizer


@pytest.mark.parametrize("kind", ["soap", "kl_soap", "adam"])
@pytest.mark.parametrize("correlation", [0.0, 0.9])
@pytest.mark.parametrize("limit", [0, 32, 64])
def test_the_first_step_with_bases_is_adams(limit, correlation, kind):
    """The momentum begins with the bases, as the second moment does: the step has an RMS of 1 in
    Adam's units, as a first step of Adam must. A momentum that knew of one gradient more would meet
    a moment that may be next to 0 in any entry: with one basis the RMS would be 30 and the largest
    entry 500 here, and thousands of times that in large banks."""
    optimizer = banks_of(kind, {"mlp": (2, 64, 32)}, one_sided_above=limit, matrix_decay=0.0)
    state, common = state_of(optimizer)["mlp"], normal(2, 64, 32, seed=99)
    has_bases = any(key.endswith("basis") for key in state)
    assert has_bases == (limit > 0 and kind != "adam")
    first = 1 if has_bases else 0  # the step that has something to step by
    for step in range(4):
        grad = normal(2, 64, 32, seed=step)
        grad = correlation**0.5 * common + (1 - correlation) ** 0.5 * grad
        optimizer.accumulate({"mlp": grad})
        optimizer.count(1)
        before = weights_of(optimizer).clone()
        optimizer.step(step, 1.0)
        moved = (weights_of(optimizer) - before) * 32**0.5 / optimizer.matrices.lr
        sizes = moved.square().mean((-2, -1)).sqrt()
        if step < first:
            assert not moved.any()
        elif step == first:
            torch.testing.assert_close(sizes, torch.ones(2), atol=1e-3, rtol=0)
            assert moved.abs().max() < 8
        elif correlation:  # else the next bases have little to do with the moment's
            assert sizes.max() < 2


@pytest.mark.parametrize("kind", SOAP_RULES)
def test_large_sides_get_no_basis(kind):
    state = state_of(walk(banks_of(kind, one_sided_above=32), 3))
    assert "row_basis" in state["query_key"] and "column_basis" in state["query_key"]
    assert "row_basis" not in state["mlp"] and state["mlp"]["column_basis"].shape == (4, 32, 32)
    without = walk(banks_of(kind, one_sided_above=0), 3)
    assert not any("basis" in key for key in state_of(without)["mlp"])
    if kind != "soap_muon":  # without sides they are Adam
        assert_bitwise(weights_of(without), weights_of(walk(banks_of("adam"), 3)))


def test_the_first_step_of_each_rule():
    """SOAP-Muon is Muon; the others wait for a basis."""
    start, moved = weights_of(banks_of("muon")).clone(), {}
    for kind in ("muon", *SOAP_RULES):
        moved[kind] = weights_of(walk(banks_of(kind, matrix_decay=0.0), 1)) - start
    assert moved["muon"].any() and not moved["soap"].any() and not moved["kl_soap"].any()
    torch.testing.assert_close(moved["soap_muon"], moved["muon"])


@pytest.mark.parametrize("kind", SOAP_RULES)
def test_an_update_is_rotated_by_the_last_steps_bases(kind, monkeypatch):
    optimizer, used = walk(banks_of(kind, basis_every=1), 4), []
    honest = train_gpt.from_eigenbasis

    def recorded(x, sides):
        used.append(sides[0].basis.clone())
        return honest(x, sides)

    monkeypatch.setattr(train_gpt, "from_eigenbasis", recorded)
    before = state_of(optimizer)["query_key"]["row_basis"].clone()
    walk(optimizer, 1, first=4)
    assert any(torch.equal(basis, before) for basis in used)  # one of three banks'
    assert not torch.equal(before, state_of(optimizer)["query_key"]["row_basis"])


@pytest.mark.parametrize("kind", SOAP_RULES)
def test_bases_follow_the_factors_in_turn(kind):
    """At first all bases are exact; then matrix i steps where (step - i) divides by basis_every,
    the others rest."""
    optimizer = walk(banks_of(kind, basis_every=3), 3)
    state = state_of(optimizer)["query_key"]
    for key in ("row", "column"):
        assert off_diagonal_share(state[f"{key}_factor"], state[f"{key}_basis"]) < 1e-5
    for step in range(3, 8):
        before = copy_of(state)
        walk(optimizer, 1, first=step)
        for index in range(8):
            is_resting = index % 3 != step % 3
            for key in ("row_basis", "column_basis"):
                assert torch.equal(before[key][index], state[key][index]) == is_resting
            assert not torch.equal(before["row_factor"][index], state["row_factor"][index])
    assert not state["rejects"].any()


@pytest.mark.parametrize("kind", ["adam", *SOAP_RULES])
def test_zero_gradients_leave_everything_finite(kind):
    optimizer = banks_of(kind, matrix_decay=0.0)
    before = weights_of(optimizer).clone()
    for step in range(5):
        optimizer.accumulate({})
        optimizer.count(1)
        optimizer.step(step, 1.0)
    assert_bitwise(weights_of(optimizer), before)
    if kind in SOAP_RULES:
        assert_bitwise(state_of(optimizer)["mlp"]["column_basis"], torch.eye(32).repeat(4, 1, 1))
    walk(optimizer, 3, first=5)  # and the first gradients may come later
    assert weights_of(optimizer).isfinite().all()
    assert not torch.equal(weights_of(optimizer), before)


class NoSync(TorchDispatchMode):
    """Refuses what makes the host wait for a device: reading a value, or a shape that depends on
    values."""

    REFUSED = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in self.REFUSED, name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", SOAP_RULES)
def test_nothing_waits_for_the_device(kind, monkeypatch):
    optimizer = banks_of(kind)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoSync():
        bool(torch.ones(1) > 0)
    for step, method in enumerate(ITERATIVE):
        monkeypatch.setattr(train_gpt, "refresh_method", lambda *words, method=method: method)
        add_gradients(optimizer, step)
        with NoSync():
            optimizer.step(step, 1.0)


# ----- whole runs


@pytest.mark.parametrize("kind", MATRIX_RULES)
def test_every_rule_learns(kind):
    """A whole model on one batch that it can remember: real, ill-conditioned gradients."""
    changes = {"matrix_update": kind, "steps": 60, "basis_every": 2, **NO_TABLE}
    trainer = make_trainer(random_weights=False, **changes)
    batch = batch_of(trainer, np.arange(300) % 37)
    losses = [trainer.step(step, batch).item() for step in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    assert trainer.optimizer.matrices.rejects() == 0


def test_the_result_counts_rejects(cli, tiny, monkeypatch):
    """None in an honest run, and each one where every decomposition fails."""
    honest = cli(**{**tiny, "run_id": "honest", "matrix_update": "soap_muon"})
    assert honest.code == 0 and honest.result["basis_rejects"] == 0
    exact = train_gpt.eigenbasis_step

    def failing(factors, bases, method):
        return exact(torch.full_like(factors, float("nan")), bases, method)

    monkeypatch.setattr(train_gpt, "eigenbasis_step", failing)
    run = cli(**{**tiny, "run_id": "failing", "matrix_update": "soap_muon"})
    assert run.code == 0  # both sides of each matrix three times, then of each bank's matrix 3
    assert run.result["basis_rejects"] == 2 * (3 * (4 + 4 + 4) + 3)


@pytest.mark.parametrize("kind", ["soap", "soap_muon"])
def test_a_run_that_diverges_ends_as_nan(kind, cli, tiny):
    changes = {"run_id": "diverged", "matrix_update": kind, "matrix_lr": 1e30, "steps": 8}
    run = cli(**{**tiny, **changes})
    assert run.code == 1 and run.lines[-1].startswith("status:nan ")
