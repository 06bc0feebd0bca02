"""Frozen directions and the continual track: what a projected update may not touch, on which ranks, and whole runs."""
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import osft_ranks
import train_gpt
from benchmarks import osft_projection as osft
from helpers import (EOT, ROOT, assert_bitwise, command, environment, make_corpus, make_trainer, refusal, run_trainer,
                     tiny_config, write_shard)
from optimizer_ranks import draw
from train_gpt import ConfigError, frozen_count, frozen_directions, open_shard, project_update

HERE = ROOT / "tests"


# ----- how many, and which

@pytest.mark.parametrize("rank, ratio, frozen", [(1000, 0.9, 100), (1000, 0.1, 900), (768, 0.25, 576), (8, 0.5, 4),
                                                 (10, 0.29, 7), (10, 1.0, 0), (3, 0.5, 1)])
def test_what_may_move_is_rounded(rank, ratio, frozen):
    assert frozen_count(rank, ratio) == frozen


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 12, 5), (2, 5, 12)])
def test_frozen_directions_are_the_top_ones(shape):
    matrices, counts = draw(1, shape), [4, 0, 2][:shape[0]]
    left, right = frozen_directions(matrices, counts, 4)
    assert left.shape == (shape[0], shape[1], 4) and right.shape == (shape[0], 4, shape[2])
    for matrix, count, u, v in zip(matrices.double(), counts, left.double(), right.double()):
        exact = torch.linalg.svd(matrix, full_matrices=False)
        top = exact.U[:, :count] * exact.S[:count] @ exact.Vh[:count]
        torch.testing.assert_close(u @ u.T @ matrix, top, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(matrix @ v.T @ v, top, atol=1e-5, rtol=1e-5)
        assert not u[:, count:].any() and not v[count:].any()


def test_the_directions_of_bfloat16_weights_are_worked_out_in_float32():
    matrices = draw(1, (2, 6, 6)).bfloat16()
    for factor, exact in zip(frozen_directions(matrices, [3, 3], 3), frozen_directions(matrices.float(), [3, 3], 3)):
        assert factor.dtype == torch.float32
        assert_bitwise(factor, exact)


# ----- one projection

CASES = [((2, 12, 7), [3, 3]), ((2, 7, 12), [6, 1]), ((3, 8, 8), [1, 4, 7]), ((1, 1, 4), [1])]


@pytest.mark.parametrize("shape, counts", CASES, ids=str)
def test_projected_updates_against_float64(shape, counts):
    left, right = frozen_directions(draw(1, shape), counts, max(counts))
    update = draw(2, shape)
    u, v = left.double(), right.double()
    eye = [torch.eye(size, dtype=torch.float64) for size in shape[1:]]
    expected = (eye[0] - u @ u.mT) @ update.double() @ (eye[1] - v.mT @ v)
    scale = update.norm().item()
    once = project_update(update.clone(), left, right)
    assert (once.double() - expected).norm() < 1e-6 * scale
    assert (left.mT @ once).norm() < 1e-6 * scale and (once @ right.mT).norm() < 1e-6 * scale
    twice = project_update(once.clone(), left, right)
    assert (twice - once).norm() < 1e-6 * scale
    assert (once.norm() > 0.05 * scale) == (shape[1] > 1)


def test_batched_projections_are_those_of_each_matrix():
    (shape, counts) = CASES[2]
    left, right = frozen_directions(draw(1, shape), counts, 7)
    batched = project_update(draw(2, shape), left, right)
    for index, count in enumerate(counts):
        own = frozen_directions(draw(1, shape)[index:index + 1], [count], count)
        single = project_update(draw(2, shape)[index:index + 1], *own)
        torch.testing.assert_close(batched[index:index + 1], single, atol=1e-6, rtol=1e-5)


def test_what_factors_can_reach_is_what_projected_updates_can():
    """A step of trained factors, gradients projected, is a dense change without frozen parts."""
    weight = draw(1, (1, 9, 6)).double()
    full = torch.linalg.svd(weight[0], full_matrices=False)
    left, low = full.U[:, :3], full.U[:, 3:]
    right, low_right = full.Vh[:3], full.Vh[3:]
    du, dv = draw(2, low.shape).double(), draw(3, low_right.shape).double()
    du, dv = du - left @ (left.T @ du), dv - (dv @ right.T) @ right
    scales = full.S[3:] + draw(4, (3,))
    change = (low + du) * scales @ (low_right + dv) - low * full.S[3:] @ low_right
    projected = project_update(change[None].clone(), left[None], right[None])[0]
    torch.testing.assert_close(projected, change, atol=1e-12, rtol=1e-12)


# ----- many steps

def long_run(rule, dtype="float32", protect=True, count=500):
    """(start, weights after `count` steps, factors before, factors after) by bank; exact float32 weights."""
    shapes, counts = {"attention": (2, 16, 16), "mlp": (2, 24, 16)}, {"attention": [8, 4], "mlp": [8, 8]}
    runtime = train_gpt.Runtime("cpu")
    model = osft_ranks.Weights(dtype, shapes)
    optimizer = train_gpt.Optimizer(tiny_config(steps=count, matrix_update=rule, dtype=dtype), model, runtime)
    start = {name: param.detach().float().clone() for name, param in model.named_parameters()}
    if protect:
        optimizer.protect(counts)
    before = optimizer.full_state()
    for step in range(count):
        optimizer.accumulate({name: draw(5, step, index, shape) + 0.3 * start[name]
                              for index, (name, shape) in enumerate(shapes.items())})
        optimizer.step(step, 1.0)
    end = {name: train_gpt.join_mantissa(param.detach(), optimizer.state[name]["mantissa"])
           if dtype == "bfloat16" else param.detach() for name, param in model.named_parameters()}
    factors = {name: frozen_directions(start[name], counts[name], 8) for name in shapes}
    return start, end, before, optimizer.full_state(), factors


def frozen_movement(start, end, factors):
    """The largest change of U_hᵀ W and W V_hᵀ, relative to what they were, and the smallest change of a whole bank."""
    moved, changed = 0.0, float("inf")
    for name, (left, right) in factors.items():
        for of in (lambda w: left.mT.double() @ w.double(), lambda w: w.double() @ right.mT.double()):
            moved = max(moved, ((of(end[name]) - of(start[name])).norm() / of(start[name]).norm()).item())
        changed = min(changed, ((end[name] - start[name]).norm() / start[name].norm()).item())
    return moved, changed


@pytest.mark.parametrize("rule, dtype", [("adam", "float32"), ("muon", "float32"), ("muon", "bfloat16")])
def test_frozen_directions_stay_where_they_are(rule, dtype):
    start, end, before, after, factors = long_run(rule, dtype)
    moved, changed = frozen_movement(start, end, factors)
    assert moved < 1e-5 and changed > 0.1
    for name, (left, right) in factors.items():  # the decomposition is still one: U_hᵀ W = S_h V_h, W V_hᵀ = U_h S_h
        scale = (left.mT @ start[name] @ right.mT).diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(left.mT @ end[name], scale[..., None] * right, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(end[name] @ right.mT, left * scale[:, None], atol=2e-5, rtol=1e-4)
        for key in train_gpt.FROZEN:  # bitwise
            assert_bitwise(after[name][key], before[name][key])


@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_without_protection_they_move(rule):
    start, end, _, after, factors = long_run(rule, protect=False, count=50)
    assert frozen_movement(start, end, factors)[0] > 1e-2
    assert not set(train_gpt.FROZEN) & set(after["mlp"])


# ----- ranks

@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """results_of(world size): what osft_ranks.py left, one dict a rank."""
    known = {}

    def results(world_size):
        if world_size not in known:
            folder = tmp_path_factory.mktemp(f"osft{world_size}")
            done = subprocess.run([*command(world_size, HERE / "osft_ranks.py"), str(folder)], cwd=folder,
                                  env={**environment(), "PYTHONPATH": f"{ROOT}:{HERE}"}, capture_output=True, text=True,
                                  timeout=120)
            assert done.returncode == 0, done.stderr
            known[world_size] = [torch.load(folder / f"rank{rank}.pt") for rank in range(world_size)]
        return known[world_size]

    return results


def right_error(world, case, way, results):
    """(relative error of dV, relative energy of its frozen part) of the ranks' parts put together."""
    error = left_over = 0.0
    for index, (_, _, frozen, grad) in enumerate(osft_ranks.factors(case)):
        whole = torch.cat([result["factors"][case][way][index] for result in results]).double()
        frozen, grad = frozen.double(), grad.double()
        exact = grad - (grad @ frozen.T) @ frozen
        error = max(error, ((whole - exact).norm() / grad.norm()).item())
        left_over = max(left_over, ((whole @ frozen.T).norm() / (grad @ frozen.T).norm()).item())
    return error, left_over


WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


@WORLDS
@pytest.mark.parametrize("case", osft_ranks.FACTORS)
@pytest.mark.parametrize("way", ["gathered", "cached", "gram"])
def test_factors_shared_by_singular_vectors(way, case, world_size, results_of):
    error, left_over = right_error(world_size, case, way, results_of(world_size))
    assert error < 2e-6 and left_over < 1e-5


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_wrong_all_reduce_fails_the_same_check(world_size, results_of):
    error, left_over = right_error(world_size, "even", "wrong", results_of(world_size))
    assert error > 0.3 and left_over > 0.9


@WORLDS
@pytest.mark.parametrize("case", osft_ranks.FACTORS)
def test_a_cache_changes_no_bit_and_saves_the_gather(case, world_size, results_of):
    for result in results_of(world_size):
        found = result["factors"][case]
        assert_bitwise(found["cached"], found["gathered"])
        assert found["cached sent"] == 0
        assert found["gathered sent"] == found["fills cache sent"]
    chunks = sum(-(-k_h // world_size) * m * 4 * (world_size - 1) for _, m, k_h, _ in osft_ranks.FACTORS[case])
    assert results_of(world_size)[0]["factors"][case]["gathered sent"] == chunks


@WORLDS
@pytest.mark.parametrize("limit", osft_ranks.LIMITS)
@pytest.mark.parametrize("case", osft_ranks.FACTORS)
def test_factors_shared_by_the_models_dimension(case, limit, world_size, results_of):
    results = [result["factors"][case] for result in results_of(world_size)]
    for index, (left, du, right, dv) in enumerate(osft_ranks.factors(case)):
        for offset, frozen, grad in ((0, left, du), (1, right.T, dv.T)):
            whole = torch.cat([result[limit][2 * index + offset] for result in results]).double()
            exact = grad.double() - frozen.double() @ (frozen.double().T @ grad.double())
            assert (whole - exact).norm() < 2e-6 * grad.norm()
    left, du = osft_ranks.factors(case)[0][:2]
    for result in results:  # what every rank holds is projected once, not as often as there are ranks
        torch.testing.assert_close(result[f"{limit} replicated"], du - left @ (left.T @ du), atol=1e-6, rtol=1e-5)
    if limit == max(osft_ranks.LIMITS):  # one message for all matrices, both sides
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


@WORLDS
@pytest.mark.parametrize("case", osft_ranks.STEPS, ids=" ".join)
def test_owned_banks_step_the_same_on_all_world_sizes(case, world_size, results_of):
    expected = results_of(1)[0]["steps"][case]
    first, *others = [result["steps"][case] for result in results_of(world_size)]
    for other in others:
        assert_bitwise(other["params"], first["params"])
        assert_bitwise(other["full"], first["full"])
    tolerance = 2e-5 if case[1] == "float32" else 2**-7
    torch.testing.assert_close(first["params"], expected["params"], atol=tolerance, rtol=tolerance)
    assert_bitwise(first["again"], first["full"])  # factors included
    assert first["traffic"]["protect"] == {}
    for name in ("attention", "mlp"):
        left, right = (first["full"][name][key] for key in train_gpt.FROZEN)
        assert_bitwise(first["before"][name]["frozen_left"], left)
        torch.testing.assert_close(left, expected["full"][name]["frozen_left"], atol=1e-5, rtol=1e-4)
        weight = first["params"][name]
        if case[1] == "bfloat16":
            weight = train_gpt.join_mantissa(weight, first["full"][name]["mantissa"])
        moved = weight - first["start"][name].float()
        assert (left.mT @ moved).norm() < 1e-5 and (moved @ right.mT).norm() < 1e-5 < 1e-2 < moved.norm()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_projecting_owned_banks_sends_nothing(world_size, results_of):
    """Of a step travel the gradients and the new weights, as without frozen directions."""
    sent = results_of(world_size)[0]["steps"]["muon", "float32"]["traffic"]["steps"]
    assert {collective for collective, _ in sent} == {"reduce_scatter", "all_gather"}
    for name, (count, *shape) in osft_ranks.BANKS.items():
        chunk = -(-count // world_size) * int(np.prod(shape)) * 4 * (world_size - 1)
        assert sent["reduce_scatter", name] == sent["all_gather", name] == (3 * chunk, 3 * (world_size - 1))


# ----- whole runs

@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """A corpus of another domain: the first one's with the case of its letters turned."""
    folder = make_corpus(tmp_path_factory.mktemp("second") / "cpp")
    for path in folder.glob("*.bin"):
        tokens = np.array(open_shard(path))
        write_shard(path, np.where((tokens != EOT) & (tokens > 64), tokens ^ 32, tokens))
    return folder


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory):
    """A trained model of the nano track's kind: its run."""
    run = run_trainer(tmp_path_factory.mktemp("base"), {**tiny, "steps": 30, "run_id": "base"})
    assert run.code == 0, run.stdout + run.stderr
    return run


@pytest.fixture
def values(tiny, second, base):
    """Configuration values of a continual run."""
    return {**tiny, "track": "continual", "data": str(second), "first_data": tiny["data"], "steps": 8, "val_every": 4,
            "init_from": str(base.folder / "checkpoint.pt"), "run_id": "second"}


def test_a_run_protects_what_it_started_from(values, base, cli):
    run = cli(**values)
    assert run.code == 0, run.stdout
    end, start = run.checkpoint(), base.checkpoint()
    assert set(end["model"]) == set(start["model"])  # plain dense weights under the usual names
    for name in ("attention", "mlp"):
        moved = end["model"][name] - start["model"][name]
        left, right = frozen_directions(start["model"][name], [16] * len(moved), 16)
        assert moved.norm() > 1e-2 and end["model"][name].shape == start["model"][name].shape
        assert (left.mT @ moved).norm() < 1e-5 and (moved @ right.mT).norm() < 1e-5
        assert_bitwise(end["optimizer"][name]["frozen_left"], left)
    for name in set(end["model"]) - {"attention", "mlp"}:
        assert_bitwise(end["model"][name], start["model"][name])
    assert_bitwise(end["ngram_table"]["weight"], start["ngram_table"]["weight"])
    assert any(line.startswith("started_from:") and line.endswith("attention=[16, 16]/32 mlp=[16, 16]/32")
               for line in run.lines)


def test_both_losses_are_logged(values, base, cli):
    run = cli(**values)
    logged = [event for event in run.metrics if "val_loss" in event]
    assert [event["step"] for event in logged] == [0, 4, 8]
    # The output at the start is that of the model it came from.
    assert logged[0]["first_val_loss"] == base.result["val_loss"]
    assert logged[-1]["val_loss"] < logged[0]["val_loss"]
    assert run.result["first_val_loss"] == logged[-1]["first_val_loss"] != logged[0]["first_val_loss"]
    assert run.result["val_loss"] == logged[-1]["val_loss"]
    text = (run.folder / "log.txt").read_text()
    assert f"step:8/8 val_loss:{run.result['val_loss']:.5f} first_val_loss:{run.result['first_val_loss']:.5f} " in text
    assert f" first_val_loss:{run.result['first_val_loss']:.5f}\n" in text.partition("final val_loss")[2]


def test_full_fine_tuning_changes_everything_but_a_frozen_table(values, base, cli):
    run = cli(**{**values, "trained": "all", "unfreeze_rank_ratio": 1, "ngram_lr": 0.0})
    assert run.code == 0, run.stdout
    end, start = run.checkpoint(), base.checkpoint()
    assert all(not torch.equal(end["model"][name], start["model"][name]) for name in end["model"])
    assert_bitwise(end["ngram_table"]["weight"], start["ngram_table"]["weight"])
    assert "frozen_left" not in end["optimizer"]["mlp"]


def test_the_same_matrices_alone_and_a_table_that_learns(values, base, cli):
    run = cli(**{**values, "unfreeze_rank_ratio": 1, "ngram_lr": 0.1})
    end, start = run.checkpoint(), base.checkpoint()
    changed = {name for name in end["model"] if not torch.equal(end["model"][name], start["model"][name])}
    assert changed == {"attention", "mlp"}
    assert not torch.equal(end["ngram_table"]["weight"], start["ngram_table"]["weight"])


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16", "adaptive_rank": True}], ids=str)
def test_a_resumed_run_ends_bitwise_the_same(changes, values, cli):
    whole = cli(**{**values, **changes, "save_every": 5})
    assert whole.code == 0, whole.stdout
    expected, losses = whole.checkpoint(), whole.result
    for name in ("checkpoint.pt", "result.json"):
        (whole.folder / name).unlink()
    run = cli(resume="second")
    assert run.code == 0, run.stdout
    again = torch.load(whole.folder / "checkpoint.pt", weights_only=True)
    for part in ("model", "optimizer", "ngram_table", "loader", "rng"):
        assert_bitwise(again[part], expected[part], part)
    result = json.loads((whole.folder / "result.json").read_text())
    assert (result["val_loss"], result["first_val_loss"]) == (losses["val_loss"], losses["first_val_loss"])


def test_two_ranks_learn_what_one_does(values, cli, tmp_path):
    alone = cli(**values)
    two = run_trainer(tmp_path, {**values, "run_id": "two"}, world_size=2)
    assert two.code == 0, two.stdout + two.stderr
    for key in ("val_loss", "first_val_loss"):
        assert two.result[key] == pytest.approx(alone.result[key], abs=1e-4)


def test_a_continual_checkpoint_is_a_checkpoint(values, base, second, tiny, cli):
    run = cli(**values)
    path = run.folder / "checkpoint.pt"
    scored = cli("eval", "--checkpoint", path)
    assert scored.lines[0].startswith(f"eval val_loss:{run.result['val_loss']:.5f} ")
    scored = cli("eval", "--checkpoint", path, "--data", tiny["data"])
    assert scored.lines[0].startswith(f"eval val_loss:{run.result['first_val_loss']:.5f} ")
    sampled = cli("sample", "--checkpoint", path, "--prompt", "IMPORT", "--tokens", 3)
    assert sampled.code == 0 and sampled.stdout.startswith("IMPORT")
    further = cli(**{**values, "init_from": "second", "run_id": "third"})
    assert further.code == 0
    third = torch.load(path.parents[1] / "third" / "checkpoint.pt", weights_only=True)
    assert third["step"] == 8
    events = [json.loads(line) for line in (path.parents[1] / "third" / "metrics.jsonl").read_text().splitlines()]
    assert events[0]["val_loss"] == run.result["val_loss"]


def test_the_model_loads_without_the_factors(values, cli):
    """Weights alone give the same logits: nothing of a decomposition is part of the model."""
    run = cli(**values)
    trained, step = train_gpt.open_trained({"checkpoint": str(run.folder / "checkpoint.pt"), "device": "cpu"})
    content = run.checkpoint()
    plain = make_trainer(random_weights=False)
    plain.model.load_state_dict(content["model"])
    plain.table.load_full_state(content["ngram_table"])
    _, val = train_gpt.open_corpus(trained.config)
    assert plain.evaluate(step, val) == trained.evaluate(step, val)


# ----- shares by layer

def test_importance_is_one_on_average_and_sees_what_layers_do():
    trainer = make_trainer(num_layers=2)
    with torch.no_grad():
        trainer.model.attention[4:] = 0  # the second layer passes its input on
        trainer.model.mlp[2:] = 0
        trainer.model.ngram_gate[1] = 0
        trainer.model.skip_scale.zero_()
        trainer.model.embed_scale.zero_()
        trainer.table.weight.zero_()
    tokens = np.tile(np.array([EOT, *b"abcdefghijklmnopqrstuvwxyz"]), 20)
    first, second = train_gpt.layer_importance(trainer, tokens)
    assert first + second == pytest.approx(2) and second > 1.02 > 0.98 > first


def test_adaptive_shares_follow_importance(values, base, cli, monkeypatch):
    monkeypatch.setattr(train_gpt, "layer_importance", lambda trainer, tokens: [0.5, 1.5])
    run = cli(**{**values, "adaptive_rank": True, "unfreeze_rank_ratio": 0.25})
    assert run.code == 0, run.stdout
    # Kept: .1 + importance * (.75 - .1), of 32; what may move is rounded, and a layer cannot keep more than it has.
    counts = [32 - round(32 * (1 - 0.425)), 32]
    assert any(line.endswith(f"attention={counts}/32 mlp={counts}/32") for line in run.lines)
    moved = run.checkpoint()["model"]["mlp"] - base.checkpoint()["model"]["mlp"]
    assert moved[:2].norm() > 1e-3 > 1e-5 > moved[2:].norm()


# ----- bad input

@pytest.mark.parametrize("changes, words", [
    ({"unfreeze_rank_ratio": 0}, ["unfreeze_rank_ratio=0.0", "above 0"]),
    ({"unfreeze_rank_ratio": 1.5}, ["unfreeze_rank_ratio=1.5", "at most 1"]),
    ({"unfreeze_rank_ratio": -0.5}, ["unfreeze_rank_ratio=-0.5"]),
    ({"unfreeze_rank_ratio": "nan"}, ["unfreeze_rank_ratio=nan"]),
    ({"unfreeze_rank_ratio": 0.99}, ["32", "nothing is protected"]),
    ({"unfreeze_rank_ratio": 0.01}, ["0 of", "nothing learns"]),
    ({"matrix_shard": "rows"}, ["--matrix-shard whole", "rows"]),
    ({"adaptive_rank": "true", "unfreeze_rank_ratio": 1}, ["adaptive_rank", "--unfreeze-rank-ratio"]),
    ({"trained": "some"}, ["trained=some", "all, matrices"]),
    ({"init_from": ""}, ["--init-from", "./run.sh nano"]),
    ({"init_from": "nowhere"}, ["--init-from nowhere", "no checkpoint"]),
    ({"model_dim": 64}, ["track nano, with model_dim=32", "64", "--model_dim"]),
    ({"windows": "((0.0, (64, 128)),)"}, ["windows"]),
    ({"ngram_rows": 2000}, ["ngram_rows=1000", "2000"]),
    ({"untie_at": 0.5}, ["untie_at=False", "True"]),
    ({"data": "gone/cpp"}, ["`python data/text.py --corpus cpp`", "--data"]),
    ({"first_data": "gone/python"}, ["`python data/text.py`", "--first_data"]),
    ({"first_data": "gone/mine"}, ["`python data/text.py PATH`"]),
], ids=str)
@pytest.mark.parametrize("check", [False, True])
def test_bad_input_ends_in_one_line(check, changes, words, values, cli, tmp_path):
    run = cli(*(["--check"] if check else []), **{**values, **changes})
    assert run.code == 2
    line = run.lines[-1] if check else refusal(run)
    assert line.startswith("status:error ") and all(word in line for word in words), line
    assert "check:ok" not in run.stdout and not (tmp_path / "logs").exists()


def test_a_checkpoint_of_another_tokenizer_names_its_track(values, base, cli, tmp_path):
    content = base.checkpoint()
    content["config"] = {**content["config"], "track": "fineweb", "tokenizer": "gpt2"}
    train_gpt.save_checkpoint(tmp_path / "other.pt", content)
    line = refusal(cli(**{**values, "init_from": str(tmp_path / "other.pt")}))
    assert "track fineweb" in line and "tokenizer=gpt2" in line and "bytes" in line


def test_a_plain_run_knows_nothing_of_it(tiny):
    config = tiny_config()
    assert (config.trained, config.unfreeze_rank_ratio, config.init_from, config.first_data) == ("all", 1.0, "", "")
    assert train_gpt.initial_content(config) is None
    with pytest.raises(ConfigError, match="--init-from"):
        train_gpt.initial_content(tiny_config(unfreeze_rank_ratio=0.5))


# ----- the benchmark

def test_the_projection_benchmark_tells_right_from_wrong(second, tmp_path):
    done = subprocess.run([*command(None, ROOT / "benchmarks/osft_projection.py"), "--tiny", "--world-sizes", "2",
                           "--repeats", "2", "--rounds", "2", "--device", "cpu", "--results", str(tmp_path), "--data",
                           str(second)], capture_output=True, text=True, timeout=150, env=environment())
    assert done.returncode == 0, done.stderr[-2000:]
    last = dict(word.split(":") for word in done.stdout.splitlines()[-1].split())
    assert float(last["max_error"]) < 1e-5 < 0.3 < float(last["wrong_allreduce_error"])
    found = json.loads((tmp_path / "osft_projection.json").read_text())
    for case in found["cases"]:
        sent = {arm: own["bytes"] for arm, own in case["arms"].items()}
        assert sent["owned"] == 0 < sent["cached"] < sent["coefficients"] < sent["gathered"] < sent["gram"]
        assert ("wrong" in sent) == (case["layer"] == "even")
    assert all(len(values) == 2 for values in found["added_to_step"].values())
    assert Path(tmp_path / "osft_projection.md").read_text().count("multiplications") == 1
