"""Real processes with gloo: matrices shared whole, by rows or by columns step as they do in one process."""
import subprocess

import pytest
import torch

import soap_ranks
from helpers import ROOT, assert_bitwise, command, environment
from optimizer_ranks import plus_one
from train_gpt import Runtime

HERE = ROOT / "tests"
SHARDED = [case for case in soap_ranks.CASES if case[1] != "whole"]
# Sides of each case's matrices that have a basis, as (size, matrices).
SIDES = {"soap": [(10, 3), (7, 3), (5, 5), (5, 5)], "soap_muon wide": [(7, 2), (6, 1), (1, 1)]}


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """results_of(world size): what soap_ranks.py left, one dict a rank."""
    alone = Runtime("cpu")
    known = {1: [{case: soap_ranks.steps(case, alone) for case in soap_ranks.CASES}]}

    def results(world_size):
        if world_size not in known:
            folder = tmp_path_factory.mktemp(f"soap{world_size}")
            env = {**environment(), "PYTHONPATH": f"{ROOT}:{HERE}"}
            done = subprocess.run([*command(world_size, HERE / "soap_ranks.py"), str(folder)], env=env, cwd=folder,
                                  capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            known[world_size] = [torch.load(folder / f"rank{rank}.pt") for rank in range(world_size)]
        return known[world_size]

    return results


def refreshes():
    """How often each matrix index is due in the steps of a case."""
    return [sum(step < 3 or (step - index) % soap_ranks.EVERY == 0 for step in soap_ranks.STEPS)
            for index in range(5)]


def assert_same_state(actual, expected):
    for name, param in expected["params"].items():
        tolerance = 2e-4 if param.dtype == torch.float32 else 2**-6  # a bfloat16 weight is cut, not rounded
        torch.testing.assert_close(actual["params"][name], param, atol=tolerance / 2, rtol=tolerance)
    for name, state in expected["full"].items():
        assert state.keys() == actual["full"][name].keys()
        for key, value in state.items():
            other = actual["full"][name][key]
            assert other.shape == value.shape
            if key.endswith("basis"):  # the sign of a column means nothing
                other, value = other.abs(), value.abs()
            if key != "mantissa":
                torch.testing.assert_close(other, value, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("case", soap_ranks.CASES, ids=" ".join)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shared_matrices_step_as_whole_ones(world_size, case, results_of):
    first, *others = [result[case] for result in results_of(world_size)]
    for other in others:  # all ranks hold the same
        assert_bitwise(other["params"], first["params"])
        assert_bitwise(other["full"], first["full"])
    assert_same_state(first, results_of(1)[0][case])


@pytest.mark.parametrize("case", SHARDED, ids=" ".join)
def test_the_kind_of_share_does_not_matter(case, results_of):
    whole = (case[0], "whole")
    if whole in soap_ranks.CASES:
        assert_same_state(results_of(1)[0][case], results_of(1)[0][whole])
    assert results_of(1)[0][case]["sent"] == {}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("case", soap_ranks.CASES, ids=" ".join)
def test_the_full_state_survives_a_round_trip(case, world_size, results_of):
    for result in results_of(world_size):
        assert_bitwise(result[case]["raised"], plus_one(result[case]["full"]))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("shard", ["whole", "rows", "cols"])
def test_each_factor_is_decomposed_once(shard, world_size, results_of):
    times = refreshes()
    for rule in ("soap", "soap_muon", "kl_soap"):
        counts = [result[rule, shard]["decomposed"] for result in results_of(world_size)]
        assert sum(counts) == sum(sum(times[:matrices]) for _, matrices in SIDES["soap"])
        if shard != "whole":  # and the work is balanced
            assert max(counts) - min(counts) <= sum(counts) / 2


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("shard, axis", [("rows", 1), ("cols", 2)])
def test_the_ledger_counts_what_shared_matrices_cost(shard, axis, world_size, results_of):
    peers, count = world_size - 1, len(soap_ranks.STEPS)
    for rule, gathers in (("muon", 1), ("soap_muon", 2), ("soap", 2)):
        sent = results_of(world_size)[0][rule, shard]["sent"]
        for name in ("attention", "mlp"):
            shape = list(soap_ranks.SHAPES[name])
            chunk = -(-shape[axis] // world_size)
            shape[axis] = chunk
            part = 4 * torch.Size(shape).numel()
            assert sent[f"reduce_scatter/{name}"] == sent[f"all_gather/{name}"] == count * peers * part
            assert sent[f"all_gather/{name} parts"] == gathers * count * peers * part
        assert ("all_gather/eigenbases" in sent) == (rule != "muon")
    # What decompositions send: basis, order and verdict of at most as many matrices as the busiest rank has.
    total = sum(4 * size * (size + 2) * sum(refreshes()[:matrices]) for size, matrices in SIDES["soap"])
    least = total * peers / world_size
    sent = results_of(world_size)[0]["soap", shard]["sent"]["all_gather/eigenbases"]
    assert least <= sent <= 2 * least + peers * 4 * 12 * 10 * count


@pytest.mark.parametrize("world_size", [3, 4])
def test_momentum_is_shared_and_uneven(world_size, results_of):
    held = [result["soap", "rows"]["held"] for result in results_of(world_size)]
    rows = {3: [4, 4, 2], 4: [3, 3, 3, 1]}[world_size]
    assert held == [3 * 7 * share for share in rows]
