"""benchmarks/osft_projection.py: which projections of shared factors are right at 1 to 4 ranks, and
what they send."""

import math
import statistics

import pytest
import torch

import continual
import train_gpt
from benchmarks import osft_projection as osft
from helpers import TINY, assert_bitwise
from ranks import on_ranks

pytestmark = pytest.mark.slow

# (N, M, k_h, k_l) of the matrices of a case. Five rows go 2, 2, 1, 0 over four ranks, one row goes
# 1, 0, 0, 0.
FACTORS = {
    "even": [(24, 12, 12, 12), (12, 24, 12, 12)],
    "uneven": [(13, 7, 5, 2), (5, 11, 2, 3)],
    "one frozen": [(9, 6, 1, 5), (5, 5, 1, 4)],
    "one free": [(9, 6, 5, 1), (6, 10, 5, 1)],
}
LIMITS = (1, 7, 2**20)  # coefficients in one all-reduce
WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
EACH_CASE = pytest.mark.parametrize("case", FACTORS)


def factors(case):
    """[(U_h, dU, V_h, dV), ...] float32, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    found = []
    for n, m, k_h, k_l in FACTORS[case]:
        left = torch.linalg.qr(draw(n, k_h)).Q, draw(n, k_l)
        right = torch.linalg.qr(draw(m, k_h)).Q.T.contiguous(), draw(k_l, m)
        found.append([tensor.float() for tensor in (*left, *right)])
    return found


def part_of(runtime, tensor):
    low, high = runtime.owned_range(len(tensor))
    return tensor[low:high].clone()


def right_sides(case, way, runtime, cache):
    """(this rank's parts of the projected dV, bytes that it sent)."""
    found = []
    runtime.ledger.clear()
    for key, (_, _, frozen, grad) in enumerate(factors(case)):
        grad, kept = part_of(runtime, grad), part_of(runtime, frozen)
        if way == "gram":
            osft.project_by_gram(grad, kept, runtime)
        elif way == "wrong":
            osft.project_wrongly(grad, kept, runtime)
        else:
            own_cache = None if way == "gathered" else cache
            whole = osft.gathered_right(kept, len(frozen), runtime, own_cache, key)
            osft.project_right(grad, whole)
        found.append(grad)
    return found, sum(size for size, _ in runtime.ledger.values())


def both_sides(case, limit, runtime):
    """This rank's parts of [dU, dVᵀ, ...] by coefficients, what of one side every rank holds, and
    how many messages it took."""
    sides = []
    for left, du, right, dv in factors(case):
        sides.append(osft.Side(part_of(runtime, du), part_of(runtime, left)))
        sides.append(osft.Side(part_of(runtime, dv.T), part_of(runtime, right.T)))
    left, du = factors(case)[0][:2]
    replicated = osft.Side(du.clone(), left, is_shared=False)  # among the shared ones
    runtime.ledger.clear()
    osft.project_by_coefficients([sides[0], replicated, *sides[1:]], runtime, limit)
    messages = sum(count for _, count in runtime.ledger.values())
    return {
        "grads": [side.grad for side in sides],
        "replicated": replicated.grad,
        "messages": messages,
    }


def projections(case, runtime):
    """What this rank finds: {way: [dV, ...], "WAY sent": bytes, limit: both_sides}."""
    found, cache = {}, {}
    ways = ["gathered", "fills cache", "cached", "gram"]
    for way in ways + ["wrong"] * (case == "even"):
        found[way], found[f"{way} sent"] = right_sides(case, way, runtime, cache)
    for limit in LIMITS:
        found[limit] = both_sides(case, limit, runtime)
    return found


def all_projections(runtime):
    return {case: projections(case, runtime) for case in FACTORS}


@pytest.fixture(scope="module")
def results_of():
    """results_of(world size): the projections of all cases, one dict a rank; each is worked out
    once."""
    known = {}

    def results(world_size):
        if world_size not in known:
            known[world_size] = on_ranks(world_size, all_projections)
        return known[world_size]

    return results


def right_error(case, way, results):
    """(relative error of dV, relative energy of its frozen part) of the ranks' parts put
    together."""
    error = left_over = 0.0
    for index, (_, _, frozen, grad) in enumerate(factors(case)):
        whole = torch.cat([result[case][way][index] for result in results]).double()
        frozen, grad = frozen.double(), grad.double()
        exact = grad - (grad @ frozen.T) @ frozen
        error = max(error, ((whole - exact).norm() / grad.norm()).item())
        left_over = max(left_over, ((whole @ frozen.T).norm() / (grad @ frozen.T).norm()).item())
    return error, left_over


@WORLDS
@EACH_CASE
@pytest.mark.parametrize("way", ["gathered", "cached", "gram"])
def test_factors_shared_by_singular_vectors(way, case, world_size, results_of):
    error, left_over = right_error(case, way, results_of(world_size))
    assert error < 2e-6 and left_over < 1e-5


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_wrong_all_reduce_fails_the_same_check(world_size, results_of):
    error, left_over = right_error("even", "wrong", results_of(world_size))
    assert error > 0.3 and left_over > 0.9


@WORLDS
@EACH_CASE
def test_a_cache_changes_no_bit_and_saves_the_gather(case, world_size, results_of):
    for result in results_of(world_size):
        found = result[case]
        assert_bitwise(found["cached"], found["gathered"])
        assert found["cached sent"] == 0
        assert found["gathered sent"] == found["fills cache sent"]
    sent = [math.ceil(k_h / world_size) * m * 4 for _, m, k_h, _ in FACTORS[case]]
    assert results_of(world_size)[0][case]["gathered sent"] == sum(sent) * (world_size - 1)


@WORLDS
@pytest.mark.parametrize("limit", LIMITS)
@EACH_CASE
def test_factors_shared_by_the_models_dimension(case, limit, world_size, results_of):
    results = [result[case][limit] for result in results_of(world_size)]
    sides = [
        pair for left, du, right, dv in factors(case) for pair in ((left, du), (right.T, dv.T))
    ]
    for index, (frozen, grad) in enumerate(sides):
        whole = torch.cat([result["grads"][index] for result in results]).double()
        exact = grad.double() - frozen.double() @ (frozen.double().T @ grad.double())
        assert (whole - exact).norm() < 2e-6 * grad.norm()
    left, du = sides[0]
    exact = du - left @ (left.T @ du)
    for (
        result
    ) in results:  # what every rank holds is projected once, not as often as there are ranks
        torch.testing.assert_close(result["replicated"], exact, atol=1e-6, rtol=1e-5)
    if limit == max(LIMITS):  # one message for all matrices, both sides
        assert {result["messages"] for result in results} == {2 * (world_size - 1)}


@pytest.mark.parametrize("limit", [1, 4, 6, 7, 1000])
def test_chunks_cover_every_coefficient_once_within_the_limit(limit):
    shapes = [(3, 4), (5, 1), (0, 3), (2, 0), (4, 6)]
    covered = []
    for chunk in osft.plan_chunks(shapes, limit):
        size = sum(shapes[index][0] * (end - first) for index, first, end in chunk)
        assert 0 < size <= limit or len(chunk) == 1 and chunk[0][2] - chunk[0][1] == 1
        for index, first, end in chunk:
            covered += [(index, column) for column in range(first, end)]
    expected = []
    for index, (rows, columns) in enumerate(shapes):
        if rows:
            expected += [(index, column) for column in range(columns)]
    assert covered == expected


# ----- what the benchmark measures


def measure_layers(runtime):
    shapes = osft.TINY_SHAPES
    return {layer: osft.measure(layer, shapes[layer], runtime, 1) for layer in shapes}


def test_all_arms_but_one_are_right_and_bytes_rank_them():
    for layers in on_ranks(2, measure_layers):
        for layer, found in layers.items():
            sent = {arm: own["bytes"] for arm, own in found["arms"].items()}
            assert 0 == sent["owned"] < sent["cached"] < sent["coefficients"]
            assert sent["coefficients"] < sent["gathered"] < sent["gram"]
            assert ("wrong" in sent) == (layer == "even")
            for arm, own in found["arms"].items():
                assert (own["error"] < osft.TOLERANCE) == (arm != "wrong")


def test_the_factored_forward_pass_is_that_of_the_matrix():
    device = torch.device("cpu")
    found = osft.measure_forward({"layer": ((6, 8), (8, 6), (6, 8))}, device, 1, 4)
    assert [row["shape"] for row in found] == [(6, 8), (8, 6)]
    assert all(row["error"] < 1e-5 and row["expected"] == 6 * 14 / 48 for row in found)


def test_a_step_is_measured_with_and_without_the_projection(corpus, monkeypatch):
    projected = []

    def project_update(update, left, right):
        assert update.isfinite().all()
        projected.append(update.shape)
        return update

    monkeypatch.setattr(continual, "project_update", project_update)
    runtime = train_gpt.Runtime("cpu")
    values = {**TINY, "track": "continual", "steps": 40, "data": str(corpus)}
    config = train_gpt.with_values(train_gpt.TRACKS["continual"], values)
    added = osft.measure_step(config, runtime, rounds=2)
    assert {ratio: len(values) for ratio, values in added.items()} == {0.25: 2, 0.5: 2}
    assert all(abs(statistics.median(values)) < 10 for values in added.values())
    assert len(projected) == 3 * 4 * 2 * 3  # rounds, repeats, ratios, banks
