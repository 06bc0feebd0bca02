"""Muon and the rules with eigenbases, against slow float64 references; bad factors.

How ranks share them is in test_distributed.py.
"""

import copy
import functools
import math

import optimizer_cases as cases
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt
from helpers import assert_bitwise

METHODS = ("eigh", "cholesky")
SOAP_RULES = [name for name, rule in train_gpt.UPDATE_RULES.items() if rule.follow]
EACH_METHOD = pytest.mark.parametrize("method", METHODS)
EACH_RULE = pytest.mark.parametrize("kind", SOAP_RULES)
BOTH = ("row", "column")


def orthogonal(*shape, seed=0):
    return torch.linalg.qr(cases.normal(*shape, seed=seed).double()).Q.float()


def factors(count, size, seed=0):
    """What training makes of a factor: a running mean of products of gradients whose spectrum spans
    six decades."""
    left, factor = orthogonal(count, size, size, seed=seed), torch.zeros(count, size, size)
    for step in range(30):
        drawn = cases.normal(count, size, size, seed=1000 * seed + step + 1)
        grad = left * torch.logspace(0, -3, size) @ drawn
        factor.lerp_(grad @ grad.mT / size, 1 - train_gpt.FACTOR_BETA)
    return factor


def bank(count, rows, columns, keys=BOTH):
    """The state of a bank under a soap rule, as training makes it, but for bases that are
    random."""
    state = {"moment": cases.normal(count, rows, columns).square()}
    for key in keys:
        size = rows if key == "row" else columns
        state[f"{key}_factor"] = factors(count, size, seed=len(key))
        state[f"{key}_basis"] = orthogonal(count, size, size, seed=50 + len(key))
    return state


def sorted_columns(factor, basis):
    """The order of a basis's columns by falling Rayleigh quotient."""
    quotients = torch.stack([(q * (k @ q)).sum(0) for k, q in zip(factor, basis, strict=True)])
    return quotients.argsort(descending=True, stable=True)


def in_order(basis, order):
    return basis.gather(-1, order[:, None].expand_as(basis))


def error_of(basis):
    """How far bases are from orthonormal."""
    return (basis.mT @ basis - torch.eye(basis.size(-1))).abs().max()


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
def test_moments_follow_the_sort(method):
    state = bank(3, 10, 6)
    before = copy.deepcopy(state)
    train_gpt.refresh_eigenbases([state], method)
    expected = before["moment"]
    for key, axis in (("row", 1), ("column", 2)):
        order = sorted_columns(before[f"{key}_factor"], before[f"{key}_basis"])
        assert not torch.equal(order[0], torch.arange(len(order[0])))
        expected = torch.stack([expected[k].index_select(axis - 1, order[k]) for k in range(3)])
        assert_bitwise(state[f"{key}_factor"], before[f"{key}_factor"])
    assert_bitwise(state["moment"], expected)


BAD_FACTORS = {
    "nan": torch.full((6, 6), math.nan),
    "infinite": torch.full((6, 6), math.inf),
    "zero": torch.zeros(6, 6),  # which keeps its basis, too, but is no failure
    "indefinite": torch.diag(torch.tensor([0.0, 0, 0, -1, 3, 2])),
}
EACH_BAD = [(name, method) for name in BAD_FACTORS for method in METHODS]
EACH_BAD.remove(("indefinite", "eigh"))


@pytest.mark.parametrize("name, method", EACH_BAD)
def test_a_bad_matrix_keeps_its_basis_and_spoils_no_other(name, method):
    clean = bank(3, 10, 6, keys=("column",))
    clean["column_basis"][1] = torch.eye(6)
    bad = copy.deepcopy(clean)
    bad["column_factor"][1] = BAD_FACTORS[name]
    moment = bad["moment"][1].clone()
    train_gpt.refresh_eigenbases([clean], method)
    train_gpt.refresh_eigenbases([bad], method)
    for key in ("column_basis", "moment"):
        assert_bitwise(bad[key][::2], clean[key][::2])
    # The old columns, here those of the identity, in some order, and the moment in the same.
    order = bad["column_basis"][1].argmax(0)
    assert_bitwise(bad["column_basis"][1], torch.eye(6)[:, order])
    assert_bitwise(bad["moment"][1], moment[:, order])
    if name == "indefinite":
        assert order.tolist() == [4, 5, 0, 1, 2, 3]


def test_factors_against_a_slow_reference():
    sides, grad = train_gpt.eigen_sides(bank(3, 6, 9)), cases.normal(3, 6, 9, seed=2)
    beta = train_gpt.FACTOR_BETA
    before = [side.factor.double() for side in sides]
    train_gpt.update_factors(grad, sides)
    for side, old, g in zip(sides, before, (grad.double(), grad.double().mT), strict=True):
        expected = beta * old + (1 - beta) * g @ g.mT / g.size(-1)
        torch.testing.assert_close(side.factor.double(), expected, rtol=1e-4, atol=1e-5)


# ----- update rules


def decayed(weight, update, lr, decay):
    return weight - lr * (update + decay * weight * (update * weight > 0))


def slow_sgd(weight, momentum, moment, second, grad, left, right, numbers):
    """README.md's example, in float64: the new weight, momentum, moment and mean square."""
    momentum = numbers.momentum * momentum + grad
    return decayed(weight, momentum, numbers.lr, numbers.decay), momentum, moment, second


def slow_soap(weight, momentum, moment, second, grad, left, right, numbers):
    """Adam in the eigenbasis."""
    beta1, beta2 = numbers.betas
    momentum = beta1 * momentum + (1 - beta1) * grad
    moment = beta2 * moment + (1 - beta2) * (left.mT @ grad @ right) ** 2
    first = left.mT @ momentum @ right / (1 - beta1**numbers.count)
    ratio = first / (moment / (1 - beta2**numbers.count)).sqrt()
    update = left @ ratio @ right.mT / math.sqrt(grad.size(-1))
    return decayed(weight, update, numbers.lr, numbers.decay), momentum, moment, second


def slow_muon(weight, momentum, moment, second, grad, left, right, numbers, is_whitened=False):
    """Muon, or SOAP-Muon, which divides the momentum by the root of its moment."""
    rows, columns = weight.shape[1:]
    momentum = numbers.momentum * momentum + (1 - numbers.momentum) * grad
    direction = numbers.momentum * momentum + (1 - numbers.momentum) * grad
    if is_whitened:
        rotated = left.mT @ direction @ right
        moment = 0.9 * moment + 0.1 * rotated**2
        direction = left @ (rotated / moment.clamp_min(1e-16).sqrt()) @ right.mT
    u, values, vt = torch.linalg.svd(direction, full_matrices=False)
    values = values / (1.02 * values.norm(dim=-1, keepdim=True))
    update = u * cases.composed_polynomials(values)[:, None] @ vt
    size = update.norm(dim=(-2, -1), keepdim=True)
    axis = -1 if rows >= columns else -2
    second = 0.95 * second + 0.05 * update.square().mean(axis, keepdim=True)
    update = update / second.sqrt()
    update = update * size / update.norm(dim=(-2, -1), keepdim=True)
    lr = numbers.lr * max(1, rows / columns) ** 0.5
    return decayed(weight, update, lr, numbers.decay), momentum, moment, second


@pytest.mark.parametrize("keys", [BOTH, ("row",), ()], ids="+".join)
@pytest.mark.parametrize("rows, columns", [(12, 5), (5, 12), (1, 6)])
@pytest.mark.parametrize(
    "update, slow, tolerance",
    [
        (train_gpt.sgd_update, slow_sgd, 1e-6),
        (train_gpt.muon_update, slow_muon, 2e-4),
        (train_gpt.soap_update, slow_soap, 2e-4),
        (train_gpt.soap_muon_update, functools.partial(slow_muon, is_whitened=True), 5e-4),
    ],
    ids=["sgd", "muon", "soap", "soap_muon"],
)
def test_steps_against_slow_float64_references(update, slow, tolerance, rows, columns, keys):
    weight = cases.normal(3, rows, columns)
    second = torch.zeros((3, rows, 1) if rows >= columns else (3, 1, columns))
    state = bank(3, rows, columns, keys)
    state |= {key: torch.zeros_like(weight) for key in ("momentum", "moment")}
    state |= {"row_square": second, "count": torch.zeros(3, 1, 1)}
    left = state.get("row_basis", torch.eye(rows)).double()
    right = state.get("column_basis", torch.eye(columns)).double()
    tensors = weight, state["momentum"], state["moment"], second
    expected = [tensor.double() for tensor in tensors]
    for step in range(1, 5):
        numbers = cases.hyper(step, 0.05 * step, 0.5, 0.82 + 0.03 * step)
        grad = 0.01 * cases.normal(3, rows, columns, seed=step)
        update(weight, grad, state, numbers)
        expected = slow(*expected, grad.double(), left, right, numbers)
        floors = tolerance, 1e-7, 1e-9, tolerance
        for tensor, wanted, atol in zip(tensors, expected, floors, strict=True):
            torch.testing.assert_close(tensor.double(), wanted, atol=atol, rtol=10 * tolerance)


# ----- in the optimizer

BANKS = {**cases.SMALL, "query_key": (8, 32, 32), "mlp": (4, 64, 32)}


def banks_of(kind, **changes):
    """An Optimizer of banks of matrices alone, without decay."""
    changes = {"matrix_update": kind, "matrix_decay": 0.0, "basis_every": 2, "steps": 40, **changes}
    return cases.optimizer_of(cases.Weights(BANKS), **changes)


def walk(optimizer, steps, size=1e-3):
    for step in steps:
        params = cases.params_of(optimizer).items()
        grads = {name: size * cases.normal(*param.shape, seed=step) for name, param in params}
        cases.take_step(optimizer, step, grads)
    return optimizer


@EACH_RULE
def test_bases_follow_the_factors_in_turn(kind):
    """At first all bases are exact; then matrix i steps where (step - i) divides by basis_every,
    the others rest."""
    optimizer = walk(banks_of(kind, basis_every=3), range(3))
    state = cases.state_of(optimizer)["query_key"]
    for key in BOTH:
        basis, factor = state[f"{key}_basis"], state[f"{key}_factor"]
        rotated = basis.mT @ factor @ basis
        off_diagonal = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
        assert (off_diagonal.flatten(1).norm(dim=1) < 1e-5 * factor.flatten(1).norm(dim=1)).all()
    for step in range(3, 8):
        before = copy.deepcopy(state)
        walk(optimizer, [step])
        for index in range(8):
            is_resting = index % 3 != step % 3
            for key in ("row_basis", "column_basis"):
                assert torch.equal(before[key][index], state[key][index]) == is_resting
            assert not torch.equal(before["row_factor"][index], state["row_factor"][index])


@pytest.mark.parametrize("kind", ["adam", *SOAP_RULES])
def test_zero_gradients_leave_everything_finite(kind):
    optimizer = banks_of(kind)
    weights = cases.params_of(optimizer)["mlp"]
    before = weights.clone()
    walk(optimizer, range(5), size=0.0)
    assert_bitwise(weights, before)
    if kind in SOAP_RULES:
        basis = cases.state_of(optimizer)["mlp"]["column_basis"]
        assert_bitwise(basis, torch.eye(32).repeat(4, 1, 1))
    walk(optimizer, range(5, 8))  # and the first gradients may come later
    assert weights.isfinite().all() and not torch.equal(weights, before)


class NoSync(TorchDispatchMode):
    """Refuses what makes the host wait for a device: reading a value, a shape that depends on
    values, exact eigenvectors."""

    REFUSED = "_local_scalar_dense|is_nonzero|nonzero|masked_select|equal|_linalg_eigh".split("|")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in self.REFUSED, name
        return function(*args, **(kwargs or {}))


@EACH_RULE
def test_nothing_waits_for_a_gpu(kind):
    """Bases are found exactly at first, where the host waits, and then in batches."""
    optimizer = banks_of(kind)
    with pytest.raises(AssertionError, match="eigh"), NoSync():
        walk(optimizer, [2])
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoSync():
        bool(torch.ones(1) > 0)
    with NoSync():
        walk(optimizer, [3])
