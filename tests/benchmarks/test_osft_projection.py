"""benchmarks/osft_projection.py: which projections of shared factors are right at 1 to 4 ranks, and what they send."""
import dataclasses
import statistics

import pytest
import torch

import continual
import helpers
import train_gpt
from benchmarks import osft_projection as osft
from helpers import assert_bitwise
from ranks import on_ranks

# (N, M, k_h, k_l) of the matrices of a case. Five rows go 2, 2, 1, 0 over four ranks, one row goes 1, 0, 0, 0.
FACTORS = {"even": [(24, 12, 12, 12), (12, 24, 12, 12)], "uneven": [(13, 7, 5, 2), (5, 11, 2, 3)],
           "one frozen": [(9, 6, 1, 5), (5, 5, 1, 4)], "one free": [(9, 6, 5, 1), (6, 10, 5, 1)]}
LIMITS = (1, 7, 2**20)  # coefficients in one all-reduce
WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def factors(case):
    """[(U_h, dU, V_h, dV), ...] float32, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)
    return [(torch.linalg.qr(draw(n, k_h)).Q.float(), draw(n, k_l).float(),
             torch.linalg.qr(draw(m, k_h)).Q.T.float().contiguous(), draw(k_l, m).float())
            for n, m, k_h, k_l in FACTORS[case]]


def projections(case, runtime):
    """This rank's parts of the projected gradients, {way: [(dU, dV), ...]}; coefficients give dV transposed."""
    def part(tensor):
        return tensor[slice(*runtime.share(len(tensor)))].clone()
    found, cache = {}, {}
    for way in ("gathered", "fills cache", "cached", "gram"):
        found[way] = []
        runtime.ledger.clear()
        for key, (_, _, frozen, grad) in enumerate(factors(case)):
            grad, kept = part(grad), part(frozen)
            if way == "gram":
                osft.project_by_gram(grad, kept, runtime)
            else:
                whole = osft.gathered_right(kept, len(frozen), runtime, None if way == "gathered" else cache, key)
                osft.project_right(grad, whole)
            found[way].append(grad)
        found[f"{way} sent"] = sum(size for size, _ in runtime.ledger.values())
    for limit in LIMITS:
        sides = [side for left, du, right, dv in factors(case)
                 for side in (osft.Side(part(du), part(left)), osft.Side(part(dv.T), part(right.T)))]
        # One that all ranks hold whole, among the shared ones.
        replicated = osft.Side(factors(case)[0][1].clone(), factors(case)[0][0], shared=False)
        runtime.ledger.clear()
        osft.project_by_coefficients([*sides[:1], replicated, *sides[1:]], runtime, limit)
        found[limit] = [side.grad for side in sides]
        found[f"{limit} messages"] = sum(count for _, count in runtime.ledger.values())
        found[f"{limit} replicated"] = replicated.grad
    if case == "even":
        found["wrong"] = []
        for _, _, frozen, grad in factors(case):
            found["wrong"].append(part(grad))
            osft.project_wrongly(found["wrong"][-1], part(frozen), runtime)
    return found


@pytest.fixture(scope="module")
def results_of():
    """results_of(world size): the projections of all cases, one dict a rank; each is worked out once."""
    known = {}

    def results(world_size):
        if world_size not in known:
            known[world_size] = on_ranks(world_size, lambda runtime: {
                case: projections(case, runtime) for case in FACTORS})
        return known[world_size]

    return results


def right_error(case, way, results):
    """(relative error of dV, relative energy of its frozen part) of the ranks' parts put together."""
    error = left_over = 0.0
    for index, (_, _, frozen, grad) in enumerate(factors(case)):
        whole = torch.cat([result[case][way][index] for result in results]).double()
        frozen, grad = frozen.double(), grad.double()
        exact = grad - (grad @ frozen.T) @ frozen
        error = max(error, ((whole - exact).norm() / grad.norm()).item())
        left_over = max(left_over, ((whole @ frozen.T).norm() / (grad @ frozen.T).norm()).item())
    return error, left_over


@WORLDS
@pytest.mark.parametrize("case", FACTORS)
@pytest.mark.parametrize("way", ["gathered", "cached", "gram"])
def test_factors_shared_by_singular_vectors(way, case, world_size, results_of):
    error, left_over = right_error(case, way, results_of(world_size))
    assert error < 2e-6 and left_over < 1e-5


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_wrong_all_reduce_fails_the_same_check(world_size, results_of):
    error, left_over = right_error("even", "wrong", results_of(world_size))
    assert error > 0.3 and left_over > 0.9


@WORLDS
@pytest.mark.parametrize("case", FACTORS)
def test_a_cache_changes_no_bit_and_saves_the_gather(case, world_size, results_of):
    for result in results_of(world_size):
        found = result[case]
        assert_bitwise(found["cached"], found["gathered"])
        assert found["cached sent"] == 0
        assert found["gathered sent"] == found["fills cache sent"]
    chunks = sum(-(-k_h // world_size) * m * 4 * (world_size - 1) for _, m, k_h, _ in FACTORS[case])
    assert results_of(world_size)[0][case]["gathered sent"] == chunks


@WORLDS
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("case", FACTORS)
def test_factors_shared_by_the_models_dimension(case, limit, world_size, results_of):
    results = [result[case] for result in results_of(world_size)]
    for index, (left, du, right, dv) in enumerate(factors(case)):
        for offset, frozen, grad in ((0, left, du), (1, right.T, dv.T)):
            whole = torch.cat([result[limit][2 * index + offset] for result in results]).double()
            exact = grad.double() - frozen.double() @ (frozen.double().T @ grad.double())
            assert (whole - exact).norm() < 2e-6 * grad.norm()
    left, du = factors(case)[0][:2]
    for result in results:  # what every rank holds is projected once, not as often as there are ranks
        torch.testing.assert_close(result[f"{limit} replicated"], du - left @ (left.T @ du), atol=1e-6, rtol=1e-5)
    if limit == max(LIMITS):  # one message for all matrices, both sides
        assert {result[f"{limit} messages"] for result in results} == {2 * (world_size - 1)}


@pytest.mark.parametrize("limit", [1, 4, 6, 7, 1000])
def test_chunks_cover_every_coefficient_once_within_the_limit(limit):
    shapes = [(3, 4), (5, 1), (0, 3), (2, 0), (4, 6)]
    covered = []
    for chunk in osft.plan_chunks(shapes, limit):
        size = sum(shapes[index][0] * (end - first) for index, first, end in chunk)
        assert 0 < size <= limit or len(chunk) == 1 and chunk[0][2] - chunk[0][1] == 1
        covered += [(index, column) for index, first, end in chunk for column in range(first, end)]
    assert covered == [(index, column) for index, (rows, columns) in enumerate(shapes) if rows
                       for column in range(columns)]


# ----- what the benchmark measures

@pytest.mark.parametrize("layer", osft.TINY_SHAPES)
def test_all_arms_but_one_are_right_and_bytes_rank_them(layer):
    for found in on_ranks(2, lambda runtime: osft.measure(layer, osft.TINY_SHAPES[layer], runtime, 1)):
        sent = {arm: own["bytes"] for arm, own in found["arms"].items()}
        assert 0 == sent["owned"] < sent["cached"] < sent["coefficients"] < sent["gathered"] < sent["gram"]
        assert ("wrong" in sent) == (layer == "even")
        assert all((own["error"] < osft.TOLERANCE) != (arm == "wrong") for arm, own in found["arms"].items())


def test_a_step_is_measured_with_and_without_the_projection(corpus, monkeypatch):
    projected = []
    monkeypatch.setattr(continual, "project_update", lambda update, *factors: projected.append(update.shape) or update)
    config = dataclasses.replace(train_gpt.TRACKS["continual"], **{**helpers.TINY, "steps": 40, "data": str(corpus)})
    added = osft.measure_step(config, rounds=2)
    assert {ratio: len(values) for ratio, values in added.items()} == {0.25: 2, 0.5: 2}
    assert all(abs(statistics.median(values)) < 10 for values in added.values())
    assert len(projected) == 3 * 4 * 2 * 2  # rounds, repeats, ratios, banks
