"""Eigenbases and the update rules that work in them, against slow float64 references; bad input.

How ranks share them is in test_distributed.py.
"""

import math

import numpy as np
import optimizer_cases as cases
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt
from helpers import assert_bitwise

METHODS = ("eigh", "cholesky")
SOAP_RULES = [name for name, rule in train_gpt.UPDATE_RULES.items() if rule.has_bases]
EACH_METHOD = pytest.mark.parametrize("method", METHODS)
EACH_RULE = pytest.mark.parametrize("kind", SOAP_RULES)


def orthogonal(*shape, seed=0):
    return torch.linalg.qr(cases.normal(*shape, seed=seed).double()).Q.float()


def factors(count, size, seed=0, steps=30):
    """What training makes of a factor: a running mean of products of gradients whose spectrum spans
    six decades."""
    left, factor = orthogonal(count, size, size, seed=seed), torch.zeros(count, size, size)
    for step in range(steps):
        drawn = cases.normal(count, size, size, seed=1000 * seed + step + 1)
        grad = left * torch.logspace(0, -3, size) @ drawn
        factor.lerp_(grad @ grad.mT / size, 1 - train_gpt.FACTOR_BETA)
    return factor


def bank(count, rows, columns, seed=0, keys=("row", "column")):
    """The state of a bank under a soap rule, as training makes it, but for bases that are
    random."""
    state = {"moment": cases.normal(count, rows, columns, seed=seed).square()}
    for key in keys:
        size = rows if key == "row" else columns
        state[f"{key}_factor"] = factors(count, size, seed + (key == "column"))
        state[f"{key}_basis"] = orthogonal(count, size, size, seed=seed + 50 + (key == "column"))
    return state


def copy_of(state):
    return {key: value.clone() for key, value in state.items()}


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


@pytest.mark.parametrize("exponent", [-36, 0, 30])
@pytest.mark.parametrize("size", [1, 7, 48])
def test_a_step_is_householders_qr_of_factor_times_basis(size, exponent):
    """Whatever the scale of gradients: only squares of them near float32's ends are out of
    reach. The reference is LAPACK's, in float64; a column's sign means nothing."""
    factor, basis = factors(3, size) * 10.0**exponent, orthogonal(3, size, size, seed=9)
    for _ in range(3):  # from a random basis to one near the eigenvectors
        new, order = train_gpt.eigenbasis_step(factor, basis, "cholesky")
        assert torch.equal(order, sorted_columns(factor, basis))
        assert error_of(new) <= 2e-6
        product = factor.double() * 10.0**-exponent @ in_order(basis, order).double()
        # Zero for the orthogonal factor of a QR.
        triangle = torch.tril(new.double().mT @ product, -1).flatten(1).norm(dim=1)
        assert (triangle <= 1e-5 * product.flatten(1).norm(dim=1)).all()
        reference = torch.linalg.householder_product(*torch.geqrf(product))
        first = (reference[:, :, 0] * new[:, :, 0].double()).sum(1).abs()
        assert (first > 1 - 1e-6).all()
        basis = new


@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("size", [9, 48])
@EACH_METHOD
def test_a_factor_of_low_rank_never_makes_a_wrong_basis(method, size, rank):
    """From bases far from it, who is accepted has found the space that gradients span, and others
    keep their columns; from bases near it, as after the first steps, nothing is ever rejected."""
    columns = cases.normal(2, size, rank, seed=rank)
    factor = columns @ columns.mT / rank
    eigenvectors = torch.linalg.eigh(factor.double()).eigenvectors.flip(-1)
    space = eigenvectors[:, :, :rank]
    basis = orthogonal(2, size, size, seed=9)
    for turn in range(6):
        new, order = train_gpt.eigenbasis_step(factor, basis, method)
        rejected = (new == in_order(basis, order)).all((-2, -1))
        cosines = torch.linalg.svdvals(space.mT @ new[:, :, :rank].double())
        assert (cosines[~rejected] > 1 - 1e-4).all()
        assert error_of(new) <= (1e-5 if turn else 1e-4)
        assert turn == 0 or not rejected.any()
        basis = new if turn else eigenvectors.float()


@EACH_METHOD
@pytest.mark.parametrize("keys", [("row",), ("column",), ("row", "column")], ids="+".join)
def test_moments_follow_the_sort(keys, method):
    state = bank(3, 10, 6, keys=keys)
    before, expected = copy_of(state), state["moment"].clone()
    train_gpt.refresh_eigenbases([state], method)
    for key in keys:
        order = sorted_columns(before[f"{key}_factor"], before[f"{key}_basis"])
        assert not torch.equal(order[0], torch.arange(len(order[0])))
        for index in range(3):
            rows = expected[index]
            expected[index] = rows[order[index]] if key == "row" else rows[:, order[index]]
        assert_bitwise(state[f"{key}_factor"], before[f"{key}_factor"])
    assert_bitwise(state["moment"], expected)


BAD_FACTORS = {
    "nan": torch.full((6, 6), math.nan),
    "infinite": torch.full((6, 6), math.inf),
    "zero": torch.zeros(6, 6),  # which keeps its basis, too, but is no failure
}
EACH_BAD = [(name, method) for name in BAD_FACTORS for method in METHODS]
BAD_FACTORS["indefinite"] = torch.diag(torch.tensor([0.0, 0, 0, -1, 3, 2]))


@pytest.mark.parametrize("name, method", [*EACH_BAD, ("indefinite", "cholesky")])
def test_a_bad_matrix_keeps_its_basis_and_spoils_no_other(name, method):
    clean = bank(3, 10, 6, keys=("column",))
    clean["column_basis"][1] = torch.eye(6)
    bad = copy_of(clean)
    bad["column_factor"][1] = BAD_FACTORS[name]
    moment = bad["moment"][1].clone()
    train_gpt.refresh_eigenbases([clean], method)
    train_gpt.refresh_eigenbases([bad], method)
    for index in (0, 2):
        assert_bitwise(bad["column_basis"][index], clean["column_basis"][index])
        assert_bitwise(bad["moment"][index], clean["moment"][index])
    # The old columns, here those of the identity, in some order, and the moment in the same.
    order = bad["column_basis"][1].argmax(0)
    assert_bitwise(bad["column_basis"][1], torch.eye(6)[:, order])
    assert_bitwise(bad["moment"][1], moment[:, order])
    if name == "indefinite":
        assert order.tolist() == [4, 5, 0, 1, 2, 3]


# ----- factors


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("is_kl", [False, True])
def test_factors_against_a_slow_reference(is_kl, is_first):
    """KL's first factors are those of Shampoo."""
    sides, grad = train_gpt.eigen_sides(bank(3, 6, 9)), cases.normal(3, 6, 9, seed=2)
    if is_first:
        for side in sides:
            side.factor.zero_()
    before = [(side.factor.double().numpy(), side.basis.double().numpy()) for side in sides]
    train_gpt.update_factors(grad, sides, is_kl)
    for k in range(3):
        exact = grad[k].double().numpy()
        for one, g, other in ((0, exact, 1), (1, exact.T, 0)):
            metric = np.eye(g.shape[1])
            if is_kl and not is_first:
                factor, basis = before[other][0][k], before[other][1][k]
                values = np.diag(basis.T @ factor @ basis)
                values = np.maximum(values / values.mean(), train_gpt.KL_FLOOR)
                metric = basis @ np.diag(1 / values) @ basis.T
            product = g @ metric @ g.T / g.shape[1]
            expected = (
                train_gpt.FACTOR_BETA * before[one][0][k] + (1 - train_gpt.FACTOR_BETA) * product
            )
            found, size = sides[one].factor[k].numpy(), np.abs(expected).max()
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * size)


# ----- update rules


SIDES = {"both": ("row", "column"), "rows only": ("row",), "none": ()}
EACH_SHAPE = pytest.mark.parametrize("rows, columns", [(12, 5), (5, 12), (1, 6)])
EACH_SIDES = pytest.mark.parametrize("keys", SIDES.values(), ids=SIDES)


def settled(keys, rows, columns):
    """A state with known bases before its first step, and each matrix's bases in float64: (left,
    right) of each."""
    state = {
        **bank(3, rows, columns, keys=keys),
        "momentum": torch.zeros(3, rows, columns),
        "moment": torch.zeros(3, rows, columns),
        "count": torch.zeros(3, 1, 1),
        "row_square": torch.zeros((3, rows, 1) if rows >= columns else (3, 1, columns)),
    }
    bases = []
    for key, size in (("row", rows), ("column", columns)):
        basis = state.get(f"{key}_basis", torch.eye(size).repeat(3, 1, 1))
        bases.append(basis.double().numpy())
    return state, list(zip(*bases, strict=True))


@EACH_SIDES
@EACH_SHAPE
def test_soap_is_adam_in_the_eigenbasis(rows, columns, keys):
    state, bases = settled(keys, rows, columns)
    weight = cases.normal(3, rows, columns)
    slow = [(weight[k].double().numpy(), 0, 0) for k in range(3)]
    for step in range(1, 5):
        grad = 0.01 * cases.normal(3, rows, columns, seed=step)
        train_gpt.soap_update(weight, grad, state, cases.hyper(step, 0.1 * step, 0.5))
        for k, (w, m, v) in enumerate(slow):
            left, right = bases[k]
            rotated = left.T @ grad[k].double().numpy() @ right
            m = 0.9 * m + 0.1 * rotated
            v = 0.95 * v + 0.05 * rotated**2
            ratio = (m / (1 - 0.9**step)) / np.sqrt(v / (1 - 0.95**step))
            update = left @ ratio @ right.T / math.sqrt(columns)
            lr = 0.1 * step
            w = w - lr * (update + np.where(update * w > 0, 0.5 * w, 0))
            slow[k] = w, m, v
            np.testing.assert_allclose(weight[k].numpy(), w, atol=2e-4, rtol=1e-3)
            np.testing.assert_allclose(state["moment"][k].numpy(), v, atol=1e-9, rtol=1e-3)


@EACH_SIDES
@EACH_SHAPE
def test_soap_muon_is_muon_on_the_whitened_momentum(rows, columns, keys):
    state, bases = settled(keys, rows, columns)
    weight = cases.normal(3, rows, columns)
    slow = [(weight[k].double().numpy(), 0, 0) for k in range(3)]
    moments = np.zeros((3, rows, columns))
    for step in range(4):
        lr, momentum = 0.05 * (step + 1), 0.85 + 0.03 * step
        grad = 0.01 * cases.normal(3, rows, columns, seed=step + 1)
        train_gpt.soap_muon_update(weight, grad, state, cases.hyper(step + 1, lr, 0.5, momentum))
        for k, (left, right) in enumerate(bases):

            def whitened(mixed, k=k, left=left, right=right):
                rotated = left.T @ mixed @ right
                moments[k] = 0.9 * moments[k] + 0.1 * rotated**2
                return left @ (rotated / np.sqrt(np.maximum(moments[k], 1e-16))) @ right.T

            exact = grad[k].double().numpy()
            slow[k] = w, b, _ = cases.slow_muon(*slow[k], exact, lr, momentum, 0.5, whitened)
            np.testing.assert_allclose(weight[k].numpy(), w, atol=5e-4, rtol=5e-3)
            np.testing.assert_allclose(state["momentum"][k].numpy(), b, atol=1e-7, rtol=1e-4)
            moment = state["moment"][k].numpy()
            np.testing.assert_allclose(moment, moments[k], atol=1e-9, rtol=1e-3)


# ----- in the optimizer

BANKS = {**cases.SMALL, "query_key": (8, 32, 32), "mlp": (4, 64, 32)}


def banks_of(kind, shapes=BANKS, **changes):
    """An Optimizer of banks of matrices alone, without decay."""
    changes = {"matrix_update": kind, "basis_every": 2, "steps": 40, **changes}
    return cases.optimizer_of(train_gpt.Runtime("cpu"), shapes, **changes, matrix_decay=0.0)


def walk(optimizer, steps):
    for step in steps:
        grads = {}
        for index, (name, param) in enumerate(cases.params_of(optimizer).items()):
            grads[name] = 1e-3 * cases.normal(*param.shape, seed=10 * step + index)
        cases.take_step(optimizer, step, grads)
    return optimizer


@pytest.mark.parametrize("kind", ["soap", "kl_soap"])
@pytest.mark.parametrize("limit", [0, 32, 64])
def test_the_first_step_with_bases_is_adams(limit, kind):
    """The momentum begins with the bases, as the second moment does: the step has an RMS of 1 in
    Adam's units, as a first step of Adam must. A momentum that knew of one gradient more would meet
    a moment that may be next to 0 in any entry: with one basis the RMS would be 30 and the largest
    entry 500 here, and thousands of times that in large banks."""
    optimizer = banks_of(kind, {**cases.SMALL, "mlp": (2, 64, 32)}, one_sided_above=limit)
    has_bases = any(key.endswith("basis") for key in cases.state_of(optimizer)["mlp"])
    assert has_bases == (limit > 0)
    first = 1 if has_bases else 0  # the step that has something to step by
    for step in range(first + 1):
        before = cases.params_of(optimizer)["mlp"].clone()
        cases.take_step(optimizer, step, {"mlp": cases.normal(2, 64, 32, seed=step)})
        moved = (cases.params_of(optimizer)["mlp"] - before) * 32**0.5 / optimizer.matrices.lr
        assert step == first or not moved.any()
    sizes = moved.square().mean((-2, -1)).sqrt()
    torch.testing.assert_close(sizes, torch.ones(2), atol=1e-3, rtol=0)
    assert moved.abs().max() < 8


def test_before_there_are_bases_soap_muon_is_muon():
    first = {
        kind: cases.params_of(walk(banks_of(kind), [0]))["mlp"] for kind in ("muon", "soap_muon")
    }
    torch.testing.assert_close(first["soap_muon"], first["muon"])
    assert not torch.equal(first["muon"], cases.params_of(banks_of("muon"))["mlp"])


@EACH_RULE
def test_bases_follow_the_factors_in_turn(kind):
    """At first all bases are exact; then matrix i steps where (step - i) divides by basis_every,
    the others rest."""
    optimizer = walk(banks_of(kind, basis_every=3), range(3))
    state = cases.state_of(optimizer)["query_key"]
    for key in ("row", "column"):
        assert off_diagonal_share(state[f"{key}_factor"], state[f"{key}_basis"]) < 1e-5
    for step in range(3, 8):
        before = copy_of(state)
        walk(optimizer, [step])
        for index in range(8):
            is_resting = index % 3 != step % 3
            for key in ("row_basis", "column_basis"):
                assert torch.equal(before[key][index], state[key][index]) == is_resting
            assert not torch.equal(before["row_factor"][index], state["row_factor"][index])


@pytest.mark.parametrize("kind", ["adam", *SOAP_RULES])
def test_zero_gradients_leave_everything_finite(kind):
    optimizer = banks_of(kind)
    before = cases.params_of(optimizer)["mlp"].clone()
    for step in range(5):
        cases.take_step(optimizer, step, {})
    assert_bitwise(cases.params_of(optimizer)["mlp"], before)
    if kind in SOAP_RULES:
        assert_bitwise(
            cases.state_of(optimizer)["mlp"]["column_basis"], torch.eye(32).repeat(4, 1, 1)
        )
    walk(optimizer, range(5, 8))  # and the first gradients may come later
    assert cases.params_of(optimizer)["mlp"].isfinite().all()
    assert not torch.equal(cases.params_of(optimizer)["mlp"], before)


class NoSync(TorchDispatchMode):
    """Refuses what makes the host wait for a device: reading a value, or a shape that depends on
    values."""

    REFUSED = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in self.REFUSED, name
        return function(*args, **(kwargs or {}))


@EACH_RULE
def test_nothing_waits_for_a_gpu(kind, monkeypatch):
    """Bases are found exactly at first, where the host waits, and then in batches."""
    optimizer, used = banks_of(kind), []
    honest = train_gpt.refresh_eigenbases

    def recorded(banks, method):
        used.append(method)
        honest(banks, method)

    monkeypatch.setattr(train_gpt, "refresh_eigenbases", recorded)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoSync():
        bool(torch.ones(1) > 0)
    walk(optimizer, [2])
    grads = {name: cases.normal(*shape) for name, shape in BANKS.items()}
    with NoSync():
        cases.take_step(optimizer, 3, grads)
    assert used == ["eigh", "cholesky"]
