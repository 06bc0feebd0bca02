"""continual.py: what a projected update may not touch, on which ranks, and whole runs that start from another."""
import shutil

import numpy as np
import pytest
import torch

import continual
import ranks
import sample
import train_gpt
from continual import ContinualConfig, frozen_count, frozen_directions, project_update, protect
from helpers import (EOT, INDEX, assert_bitwise, make_corpus, make_trainer, refusal, tiny_config, with_manifest,
                     write_shard)
from optimizer_cases import accumulate, batch_of, draw, optimizer_of, under_way
from records.log import run_at
from train_gpt import Config, Runtime

RULES = pytest.mark.parametrize("rule, dtype", [*((rule, "float32") for rule in train_gpt.MATRIX_RULES),
                                                ("muon", "bfloat16")])


# ----- how many, and which

@pytest.mark.parametrize("rank, ratio, frozen", [(1000, 0.9, 100), (1000, 0.1, 900), (768, 0.25, 576), (8, 0.5, 4),
                                                 (10, 0.29, 7), (10, 1.0, 0), (3, 0.5, 1)])
def test_what_may_move_is_rounded(rank, ratio, frozen):
    assert frozen_count(rank, ratio) == frozen


@pytest.mark.parametrize("count", [0, 2, 4])
@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 12, 5), (2, 5, 12), (0, 6, 4)], ids=str)
def test_frozen_directions_are_the_top_ones(shape, count):
    matrices = draw(1, shape)
    left, right = frozen_directions(matrices, count)
    assert left.shape == (*shape[:2], count) and right.shape == (shape[0], count, shape[2])
    for matrix, u, v in zip(matrices.double(), left.double(), right.double()):
        exact = torch.linalg.svd(matrix, full_matrices=False)
        top = exact.U[:, :count] * exact.S[:count] @ exact.Vh[:count]
        torch.testing.assert_close(u @ u.T @ matrix, top, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(matrix @ v.T @ v, top, atol=1e-5, rtol=1e-5)


def test_the_directions_of_bfloat16_weights_are_worked_out_in_float32():
    matrices = draw(1, (2, 6, 6)).bfloat16()
    for factor, exact in zip(frozen_directions(matrices, 3), frozen_directions(matrices.float(), 3)):
        assert factor.dtype == torch.float32
        assert_bitwise(factor, exact)


# ----- one projection

CASES = [((2, 12, 7), 3), ((2, 7, 12), 6), ((3, 8, 8), 4), ((1, 1, 4), 1)]


@pytest.mark.parametrize("shape, count", CASES, ids=str)
def test_projected_updates_against_float64(shape, count):
    left, right = frozen_directions(draw(1, shape), count)
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
    shape, count = CASES[2]
    batched = project_update(draw(2, shape), *frozen_directions(draw(1, shape), count))
    for index in range(len(batched)):
        own = slice(index, index + 1)
        single = project_update(draw(2, shape)[own], *frozen_directions(draw(1, shape)[own], count))
        torch.testing.assert_close(batched[own], single, atol=1e-6, rtol=1e-5)


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

BANKS = {"attention": (5, 16, 16), "mlp": (3, 24, 16)}  # 2, 2, 1 and 1, 1, 1 matrices on three ranks


def stepped(runtime, rule, dtype="float32", count=100, ratio=0.5):
    """What steps leave of the hidden matrices: {"start", "end": float32 weights, "state", "sent", "frozen"}."""
    optimizer = optimizer_of(runtime, BANKS, dtype, steps=1000, matrix_update=rule, matrix_lr=0.1, basis_every=2)
    matrices = optimizer.matrices
    start = {name: layout.param.detach().float().clone() for name, layout in matrices.layouts.items()}
    matrices.load(under_way(matrices.full_state()))
    runtime.ledger.clear()
    frozen = protect(matrices, start, ratio) if ratio < 1 else "none"
    assert not runtime.ledger  # each rank splits what it owns
    for step in range(1, 1 + count):
        accumulate(optimizer, step, runtime)
        optimizer.step(step, 1.0)
    sent, state = {key: list(value) for key, value in runtime.ledger.items()}, matrices.full_state()
    end = {name: train_gpt.join_mantissa(layout.param.detach(), state[name]["mantissa"]) if dtype == "bfloat16"
           else layout.param.detach() for name, layout in matrices.layouts.items()}
    return {"start": start, "end": end, "state": state, "sent": sent, "frozen": frozen}


def movement(found, ratio=0.5):
    """The largest change of U_hᵀ W and W V_hᵀ, relative to what they were, and the smallest of a whole bank."""
    moved, changed = 0.0, float("inf")
    for name, start in found["start"].items():
        end = found["end"][name]
        left, right = frozen_directions(start, frozen_count(min(start.shape[1:]), ratio))
        for of in (lambda w: left.mT.double() @ w.double(), lambda w: w.double() @ right.mT.double()):
            moved = max(moved, ((of(end) - of(start)).norm() / of(start).norm()).item())
        changed = min(changed, ((end - start).norm() / start.norm()).item())
    return moved, changed


@RULES
def test_frozen_directions_stay_where_they_are(rule, dtype):
    found = stepped(Runtime("cpu"), rule, dtype)
    moved, changed = movement(found)
    assert moved < 1e-5 and changed > 0.05
    assert found["frozen"] == "attention=8/16 mlp=8/16"
    for name, start in found["start"].items():  # the decomposition is still one: U_hᵀ W = S_h V_h, W V_hᵀ = U_h S_h
        left, right = frozen_directions(start, 8)
        scale = (left.mT @ start @ right.mT).diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(left.mT @ found["end"][name], scale[..., None] * right, atol=5e-5, rtol=1e-4)
        torch.testing.assert_close(found["end"][name] @ right.mT, left * scale[:, None], atol=5e-5, rtol=1e-4)


@RULES
def test_without_protection_they_move(rule, dtype):
    assert movement(stepped(Runtime("cpu"), rule, dtype, count=20, ratio=1))[0] > 1e-2


@RULES
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_world_sizes_take_the_same_steps(world_size, rule, dtype):
    alone = stepped(Runtime("cpu"), rule, dtype, count=3)
    first, *others = ranks.on_ranks(world_size, stepped, rule, dtype, 3)
    for other in others:
        assert_bitwise((other["end"], other["state"]), (first["end"], first["state"]))
    tolerance = 1e-4 if dtype == "float32" else 2**-7
    torch.testing.assert_close(first["end"], alone["end"], atol=tolerance, rtol=tolerance)
    assert movement(first)[0] < 1e-5 < 1e-3 < movement(first)[1]
    # Of a step travel the gradients and the new weights, as without frozen directions.
    sent = {key: value for key, value in first["sent"].items() if key[1] in BANKS}
    assert {collective for collective, _ in sent} == {"reduce_scatter", "all_gather"}
    if dtype == "float32":
        for name, (count, *shape) in BANKS.items():
            chunk = -(-count // world_size) * int(np.prod(shape)) * 4 * (world_size - 1)
            assert sent["reduce_scatter", name] == sent["all_gather", name] == [3 * chunk, 3 * (world_size - 1)]


# ----- whole runs

@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """A corpus of another domain: the first one's with the case of its letters turned."""
    folder = make_corpus(tmp_path_factory.mktemp("second") / "cpp")
    for path in folder.glob("*.bin"):
        tokens = np.array(train_gpt.open_shard(path))
        write_shard(path, np.where((tokens != EOT) & (tokens > 64), tokens ^ 32, tokens))
    return with_manifest(folder)


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory):
    """A trained model of the nano track's kind: its run, with another checkpoint on the way."""
    run = ranks.train(tmp_path_factory.mktemp("base"), {**tiny, **INDEX, "steps": 30, "save_every": 20,
                                                         "run_id": "base"})
    assert run.code == 0, run.stdout + run.stderr
    return run


@pytest.fixture(scope="module")
def values(tiny, second, base):
    """Configuration values of a continual run; six micro-batches suit 1, 2 and 3 ranks."""
    return {**tiny, **INDEX, "data": str(second), "first_data": tiny["data"], "steps": 8, "val_every": 4,
            "micro_batches": ((0.0, 6),), "init_from": str(base.folder / "checkpoint.pt"), "run_id": "second"}


@pytest.fixture(scope="module")
def run_of(values, tmp_path_factory):
    """run_of(world size): this run, with a checkpoint after five steps, on that many ranks; each is run once."""
    runs = {}

    def run(world_size):
        if world_size not in runs:
            runs[world_size] = ranks.train(tmp_path_factory.mktemp(f"second{world_size}"), {**values, "save_every": 5},
                                           world_size=world_size, main=continual.main)
            assert runs[world_size].code == 0, runs[world_size].stdout + runs[world_size].stderr
        return runs[world_size]

    return run


@pytest.fixture
def go_on(cli):
    """go_on(*words): continual.py's command line in this process."""
    return lambda *words, **values: cli(*words, main=continual.main, **values)


def test_a_run_protects_what_it_started_from(run_of, values, base):
    run, start = run_of(1), base.checkpoint()
    end = run.checkpoint()
    assert end.keys() == start.keys()  # plain dense weights and their state under the usual names
    for name in ("attention", "mlp"):
        moved = end["model"][name] - start["model"][name]
        left, right = frozen_directions(start["model"][name], 16)
        assert moved.norm() > 1e-2 and end["model"][name].shape == start["model"][name].shape
        assert (left.mT @ moved).norm() < 1e-5 and (moved @ right.mT).norm() < 1e-5
        assert end["groups"]["matrices"][name].keys() == start["groups"]["matrices"][name].keys()
    for name in set(end["model"]) - {"attention", "mlp"}:
        assert_bitwise(end["model"][name], start["model"][name])
        state = (end["groups"]["small"] | end["groups"]["embeddings"])[name]
        assert not any(value.any() for value in state.values())
    assert_bitwise(end["groups"]["ngram_table"]["weight"], start["groups"]["ngram_table"]["weight"])
    assert not end["groups"]["ngram_table"]["second"].any()
    line, = (line for line in run.lines if line.startswith("started_from:"))
    assert line == f"started_from:{values['init_from']} step:30 frozen: attention=16/32 mlp=16/32"


def test_both_losses_are_logged(run_of, values, base):
    run = run_of(1)
    logged = [event for event in run.metrics if "val_loss" in event]
    assert [event["step"] for event in logged] == [0, 4, 8]
    # The output at the start is that of the model it came from.
    assert logged[0]["first_val_loss"] == base.result["val_loss"]
    assert logged[-1]["val_loss"] < logged[0]["val_loss"]
    assert run.result["first_val_loss"] == logged[-1]["first_val_loss"] != logged[0]["first_val_loss"]
    assert run.result["val_loss"] == logged[-1]["val_loss"]
    assert run.result["overrides"]["init_from"] == values["init_from"]
    lines = (run.folder / "log.txt").read_text().partition("===== START =====\n")[2].splitlines()
    assert lines[0].startswith("started_from:") and lines[1].startswith("step:0/8 val_loss:")
    assert f"first_val_loss:{base.result['val_loss']:.5f} train_time:0ms step_avg:0.00ms" in lines[1]
    first = f"first_val_loss:{run.result['first_val_loss']:.5f}"
    assert any(line.startswith(f"step:8/8 val_loss:{run.result['val_loss']:.5f} {first} ") for line in lines)
    assert any(line.startswith("final val_loss:") and line.endswith(f" {first}") for line in lines)


def test_without_a_first_domain_and_validation_on_the_way(values, go_on):
    run = go_on(**{**values, "first_data": "", "val_every": 0})
    assert run.code == 0 and "first_val_loss" not in run.stdout
    assert run_at(run.folder).val_loss == round(run.result["val_loss"], 5)  # as the records package reads it
    assert run.val_losses == {8: run.result["val_loss"]}


def test_with_all_directions_free_this_is_fine_tuning(values, base, go_on, cli):
    free = go_on(**{**values, "trained": "all", "unfreeze_rank_ratio": 1, "ngram_lr": 0.1})
    assert free.code == 0 and "frozen: none" in free.stdout
    expected, result = free.checkpoint(), free.result
    plain = {key: value for key, value in values.items() if key not in ("init_from", "first_data")}
    track = train_gpt.TRACKS["continual"]
    plain |= {"matrix_lr": track.matrix_lr, "adam_lr": track.adam_lr, "run_id": "plain"}

    def extend(config):
        def load(run):  # what fine-tuning is: the same loop from other weights
            content = base.checkpoint()
            run.trainer.model.load_state_dict(content["model"])
            table = content["groups"]["ngram_table"]
            run.trainer.table.weight.copy_(table["weight"])
            run.trainer.table.index.slots.copy_(table["index"])
            run.trainer.table.scale = table["scale"]
        return load

    run = cli(main=lambda argv: train_gpt.main(argv, extend), **plain)
    assert run.code == 0, run.stdout
    for part in ("model", "groups", "rng", "loader"):
        assert_bitwise(run.checkpoint()[part], expected[part], part)
    assert run.result["val_loss"] == result["val_loss"]
    assert all(not torch.equal(expected["model"][name], start) for name, start in base.checkpoint()["model"].items())
    assert not torch.equal(expected["groups"]["ngram_table"]["weight"],
                           base.checkpoint()["groups"]["ngram_table"]["weight"])


def test_all_weights_may_move_but_a_frozen_table(values, base, go_on):
    run = go_on(**{**values, "trained": "all", "unfreeze_rank_ratio": 0.25})
    assert run.code == 0 and "frozen: attention=24/32 mlp=24/32" in run.stdout
    end, start = run.checkpoint(), base.checkpoint()
    assert all(not torch.equal(end["model"][name], start["model"][name]) for name in end["model"])
    assert_bitwise(end["groups"]["ngram_table"]["weight"], start["groups"]["ngram_table"]["weight"])


def test_frozen_groups_take_no_gradients():
    trainer = make_trainer()
    tokens = np.random.default_rng(0).integers(0, EOT, 257)
    continual.train_matrices_alone(trainer)
    before = train_gpt.state_digest(trainer)
    trainer.accumulate(0, batch_of(trainer, tokens))
    assert {name for name, layout in trainer.optimizer.layouts.items() if layout.grad.any()} == {"attention", "mlp"}
    trainer.optimizer.matrices.layouts["attention"].grad.zero_()
    trainer.optimizer.matrices.layouts["mlp"].grad.zero_()
    assert train_gpt.state_digest(trainer) == before and not trainer.table.grads


def test_the_same_matrices_alone(values, base, go_on):
    run = go_on(**{**values, "unfreeze_rank_ratio": 1})
    end, start = run.checkpoint(), base.checkpoint()
    assert {name for name in end["model"] if not torch.equal(end["model"][name], start["model"][name])} == {
        "attention", "mlp"}


def assert_resumes_bitwise(whole, folder, resume):
    """Copy a run under `folder` as if it had been stopped after its checkpoint of step 5, and resume it there."""
    shutil.copytree(whole.folder, folder / "logs" / "second", ignore=shutil.ignore_patterns("checkpoint.*", "result.*"))
    run, expected = resume(), whole.checkpoint()
    assert run.code == 0 and "started_from:" not in run.stdout, run.stdout + run.stderr
    run.folder = folder / "logs" / "second"
    again = run.checkpoint()
    for part in ("step", "model", "groups", "loader", "rng", "config"):
        assert_bitwise(again[part], expected[part], part)
    for key in ("val_loss", "first_val_loss"):
        assert run.result[key] == whole.result[key]


def test_a_resumed_run_ends_bitwise_the_same(run_of, go_on, tmp_path):
    assert_resumes_bitwise(run_of(1), tmp_path, lambda: go_on(resume="second"))


def test_two_ranks_resume_bitwise(run_of, tmp_path):
    assert_resumes_bitwise(run_of(2), tmp_path, lambda: ranks.train(tmp_path, {"resume": "second"}, world_size=2,
                                                                    main=continual.main))


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16", "matrix_update": "soap_muon"},
                                     {"trained": "all", "ngram_lr": 0.1, "unfreeze_rank_ratio": 0.25}], ids=str)
def test_resuming_is_exact_whatever_the_configuration(changes, values, go_on, tmp_path):
    whole = go_on(**{**values, **changes, "save_every": 5})
    assert whole.code == 0, whole.stdout
    whole.folder = (tmp_path / "logs").rename(tmp_path / "whole") / "second"
    assert_resumes_bitwise(whole, tmp_path, lambda: go_on(resume="second"))


@pytest.mark.parametrize("world_size", [2, 3])
def test_more_ranks_learn_what_one_does(world_size, run_of):
    for key in ("val_loss", "first_val_loss"):
        assert run_of(world_size).result[key] == pytest.approx(run_of(1).result[key], abs=1e-4)


def test_a_run_may_start_from_a_continual_one(run_of, values, go_on):
    first = run_of(1)
    further = go_on(**{**values, "init_from": first.folder / "checkpoint.pt", "run_id": "third"})
    assert further.code == 0, further.stdout
    assert further.metrics[0]["val_loss"] == first.result["val_loss"]


def test_its_checkpoints_are_scored_and_sampled(run_of, tiny, cli):
    run = run_of(1)
    words = ["--checkpoint", run.folder / "checkpoint.pt"]
    scored = [cli(*words, "--eval", *more, main=sample.main).stdout for more in ([], ["--data", tiny["data"]])]
    for line, name in zip(scored, ("val_loss", "first_val_loss")):
        assert line.startswith(f"eval val_loss:{run.result[name]:.5f} ")
    sampled = cli(*words, "--prompt", "IMPORT", "--tokens", 3, main=sample.main)
    assert sampled.code == 0 and sampled.stdout.startswith("IMPORT")


def test_help_tells_of_this_script_and_of_its_fields(cli):
    run = cli("--help", main=continual.main)
    assert run.code == 0
    for word in ("--init-from", "--unfreeze-rank-ratio", "--matrix-lr", "continual.py --resume RUN"):
        assert word in run.stdout


def test_a_check_stops_before_the_first_step(values, go_on, tmp_path):
    run = go_on("--check", **values)
    assert run.code == 0 and run.lines[-1] == "check:ok" and "val_loss" not in run.stdout
    assert any(line.endswith("frozen: attention=16/32 mlp=16/32") for line in run.lines)
    assert not (tmp_path / "logs").exists()


# ----- bad input

@pytest.mark.parametrize("changes, words", [
    ({"unfreeze_rank_ratio": 0}, ["unfreeze_rank_ratio=0.0", "above 0"]),
    ({"unfreeze_rank_ratio": 1.5}, ["unfreeze_rank_ratio=1.5", "at most 1"]),
    ({"unfreeze_rank_ratio": -0.5}, ["unfreeze_rank_ratio=-0.5"]),
    ({"unfreeze_rank_ratio": "nan"}, ["unfreeze_rank_ratio=nan"]),
    ({"unfreeze_rank_ratio": 0.99}, ["32", "nothing is protected"]),
    ({"unfreeze_rank_ratio": 0.01}, ["0 of", "nothing learns"]),
    ({"ngram_lr": 0.1}, ["ngram_lr=0.1", "--ngram-lr 0"]),
    ({"trained": "some"}, ["trained=some", "matrices, all"]),
    ({"track": "nano", "init_from": None, "first_data": None}, ["track nano", "train_gpt.py"]),
    ({"init_from": ""}, ["--init-from", "./run.sh nano"]),
    ({"init_from": "nowhere"}, ["--init-from nowhere", "no checkpoint"]),
    ({"model_dim": 64}, ["track nano, with model_dim=32", "64", "--model_dim"]),
    ({"windows": "((0.0, (64, 128)),)"}, ["windows"]),
    ({"ngram_rows": 2000}, ["ngram_rows=1000", "2000"]),
    ({"copy_orders": (3,)}, ["copy_orders=(3, 5)", "(3,)"]),
    ({"index_bits": 10}, ["index_bits=12", "10"]),
    ({"untie_at": 0.5}, ["untie_at=False", "True"]),
    ({"data": "gone/cpp"}, ["`python data/text.py --corpus cpp`", "--data"]),
    ({"first_data": "gone/python"}, ["`python data/text.py`", "--first-data"]),
    ({"first_data": "gone/mine"}, ["`python data/text.py PATH`"]),
], ids=str)
@pytest.mark.parametrize("check", [False, True])
def test_bad_input_ends_in_one_line(check, changes, words, values, go_on, tmp_path):
    changed = {key: value for key, value in {**values, **changes}.items() if value is not None}
    line = refusal(go_on(*(["--check"] if check else []), **changed))
    assert all(word in line for word in words), line
    assert not (tmp_path / "logs").exists()


def test_a_checkpoint_of_another_tokenizer_names_its_track(values, go_on, tmp_path):
    other = make_trainer(track="fineweb", tokenizer="gpt2")
    content = train_gpt.checkpoint_content(other, 4, train_gpt.LOADER_START, 1.0)
    train_gpt.save_checkpoint(tmp_path / "other.pt", content)
    line = refusal(go_on(**{**values, "init_from": str(tmp_path / "other.pt")}))
    assert "track fineweb" in line and "tokenizer=gpt2" in line and "bytes" in line


def test_a_resumed_run_wants_the_checkpoint_that_it_started_from(values, base, go_on, tmp_path):
    logs = tmp_path / "logs"
    (logs / "base").mkdir(parents=True)
    for ending in ("pt", "sha256"):
        shutil.copy(base.folder / f"checkpoint.{ending}", logs / "base")
    whole = go_on(**{**values, "init_from": "base", "save_every": 5})
    (whole.folder / "checkpoint.pt").unlink()
    (logs / "base" / "checkpoint.pt").unlink()
    assert "--init-from base: no checkpoint" in refusal(go_on(resume="second"))
    for ending in ("pt", "sha256"):
        shutil.copy(base.folder / f"step_000020.{ending}", logs / "base" / f"checkpoint.{ending}")
    run = go_on(resume="second")
    assert run.code == 2 and "another checkpoint" in run.lines[-1], run.stdout


def test_the_plain_trainer_knows_nothing_of_it(run_of, cli, monkeypatch):
    checkpoint = run_of(1).folder / "step_000005.pt"
    assert not {"init_from", "trained"} & vars(tiny_config()).keys()
    assert type(train_gpt.TRACKS["nano"]) is Config
    assert isinstance(train_gpt.TRACKS["continual"], ContinualConfig)
    monkeypatch.delitem(train_gpt.TRACKS, "continual")  # as in a process that has not imported continual.py
    assert "the script that it began with" in refusal(cli(resume=checkpoint))


def test_a_run_of_the_plain_trainer_is_not_resumed_here(base, go_on):
    assert "train_gpt.py" in refusal(go_on(f"--resume={base.folder}/step_000020.pt"))
