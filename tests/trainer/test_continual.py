"""continual.py: what a projected update may not touch, and whole runs that start from another."""

import functools
import shutil

import numpy as np
import pytest
import torch
from optimizer_cases import draw

import continual
import helpers
import ranks
import train_gpt
from continual import frozen_count, frozen_directions, project_update
from helpers import EOT

MATRICES = {"query_key", "value_output", "mlp"}
EACH_WORLD_SIZE = pytest.mark.parametrize(
    "world_size", [1, pytest.param(2, marks=pytest.mark.slow)]
)
ON_RANKS = {"main": continual.main, "before": ranks.share_out}


def test_what_may_move_is_rounded():
    cases = [(1000, 0.9, 100), (768, 0.25, 576), (10, 0.29, 7), (10, 1.0, 0), (3, 0.5, 1)]
    assert all(frozen_count(rank, ratio) == frozen for rank, ratio, frozen in cases)


@pytest.mark.parametrize("count", [0, 4])
@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 12, 5), (2, 5, 12), (0, 6, 4)], ids=str)
def test_updates_leave_the_top_directions_alone(shape, count):
    matrices = draw(1, shape)
    left, right = frozen_directions(matrices, count)
    assert left.shape == (*shape[:2], count) and right.shape == (shape[0], count, shape[2])
    exact = torch.linalg.svd(matrices.double(), full_matrices=False)
    u, v = exact.U[..., :count], exact.Vh[:, :count]
    torch.testing.assert_close(left.double() @ left.double().mT, u @ u.mT, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(right.double().mT @ right.double(), v.mT @ v, atol=1e-5, rtol=1e-5)
    update = draw(2, shape)
    rows, columns = (torch.eye(size, dtype=torch.float64) for size in shape[1:])
    expected = (rows - u @ u.mT) @ update.double() @ (columns - v.mT @ v)
    once = project_update(update.clone(), left, right)
    torch.testing.assert_close(once.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """A corpus of another domain: the first one's with the case of its letters turned."""
    folder = helpers.make_corpus(tmp_path_factory.mktemp("second") / "cpp")
    for path in folder.glob("*.bin"):
        tokens = train_gpt.open_shard(path, train_gpt.file_sha256(path)).read()
        helpers.write_shard(path, np.where((tokens != EOT) & (tokens > 64), tokens ^ 32, tokens))
    return helpers.with_manifest(folder)


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory):
    """A trained model of the english track's kind: its run, with another checkpoint on the way."""
    values = {**tiny, "steps": 30, "save_every": 20, "run_id": "base"}
    run = ranks.train(tmp_path_factory.mktemp("base"), values)
    assert run.code == 0, run.stdout + run.stderr
    return run


@pytest.fixture(scope="module")
def values(tiny, second, base):
    """Configuration values of a continual run."""
    return {
        **tiny,
        "track": "continual",
        "data": str(second),
        "steps": 8,
        "val_every": 4,
        "micro_batches": 4,
        "init_from": str(base.folder / "checkpoint.pt"),
        "run_id": "second",
    }


@pytest.fixture(scope="module")
def run_of(values, tmp_path_factory):
    """run_of(world size): this run, with a checkpoint after five steps; each is run once."""

    @functools.cache
    def run(world_size):
        folder = tmp_path_factory.mktemp(f"second{world_size}")
        done = ranks.train(folder, {**values, "save_every": 5}, world_size=world_size, **ON_RANKS)
        assert done.code == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def go_on(cli):
    """go_on(*words): continual.py's command line in this process."""
    return lambda *words, **values: cli(*words, main=continual.main, **values)


@EACH_WORLD_SIZE
def test_a_run_protects_what_it_started_from(world_size, run_of, values, base):
    run, start = run_of(world_size), base.checkpoint()
    end = run.checkpoint()
    assert end.keys() == start.keys()  # plain dense weights and their state under the usual names
    matrices = {name for name in end["model"] if train_gpt.bank_name(name) in MATRICES}
    for name in matrices:
        moved = end["model"][name] - start["model"][name]
        left, right = frozen_directions(start["model"][name], 16)
        assert moved.norm() > 1e-2 and moved.shape == start["model"][name].shape
        assert (left.mT @ moved).norm() < 1e-5 and (moved @ right.mT).norm() < 1e-5
    for name in set(end["model"]) - matrices:
        helpers.assert_bitwise(end["model"][name], start["model"][name])
    for state in (end["groups"]["small"] | end["groups"]["embeddings"]).values():
        assert not any(value.any() for key, value in state.items() if key != "master")
    tables = [each["groups"]["ngram_table"]["rows"] for each in (end, start)]
    helpers.assert_bitwise(tables[0]["weight"], tables[1]["weight"])
    assert not tables[0]["second"].any()
    (line,) = (line for line in run.lines if line.startswith("started_from:"))
    frozen = "frozen: query_key=16/32 value_output=16/32 mlp=16/32"
    assert line == f"started_from:{values['init_from']} step:30 {frozen}"
    own, first = run.val_losses, run.losses("first_val_loss")
    assert [*own] == [*first] == [0, 4, 8] and own[8] < own[0] and first[8] != first[0]
    # The output at the start is that of the model it came from.
    assert first[0] == pytest.approx(float(base.result["val_loss"]), abs=6e-6)
    assert run.result["val_loss"] == f"{own[8]:.5f}"


def test_masters_of_narrow_weights_start_where_these_do(base):
    """Else the first update would put back what the weights were drawn as."""
    trainer = helpers.make_trainer(dtype="bfloat16")
    continual.start_from(trainer, base.checkpoint())
    for group in trainer.optimizer.parameter_groups:
        for name, param in group.params.items():
            assert torch.equal(group.state[name]["master"], param.data.float())


@pytest.mark.parametrize(
    "trained, ratio, frozen", [("all", 0.25, "query_key=24/32"), ("matrices", 1, "none")]
)
def test_what_is_trained_moves_and_nothing_else(trained, ratio, frozen, values, base, go_on):
    own = {name: value for name, value in values.items() if name != "track"}  # it has one track
    own |= {"trained": trained, "unfreeze_rank_ratio": ratio, "steps": 2, "val_every": 0}
    run = go_on(**own, resume="auto")  # with nothing that is there yet
    assert run.code == 0 and f"frozen: {frozen}" in run.stdout
    end, start = run.checkpoint(), base.checkpoint()
    moved = {name for name, weight in end["model"].items() if weight.ne(start["model"][name]).any()}
    whole = {name for name, weight in end["model"].items() if weight.numel()}
    matrices = {name for name in whole if train_gpt.bank_name(name) in MATRICES}
    assert moved == (whole if trained == "all" else matrices)
    tables = [each["groups"]["ngram_table"]["rows"]["weight"] for each in (end, start)]
    helpers.assert_bitwise(*tables)


@EACH_WORLD_SIZE
def test_a_resumed_run_ends_bitwise_the_same(world_size, run_of, tmp_path):
    """A copy of a run as if it had been stopped after its checkpoint of step 5."""
    whole = run_of(world_size)
    left_out = shutil.ignore_patterns("checkpoint.*")
    shutil.copytree(whole.folder, tmp_path / "logs" / "second", ignore=left_out)
    run = ranks.train(tmp_path, {"resume": "second"}, world_size=world_size, **ON_RANKS)
    assert run.code == 0 and "started_from:" not in run.stdout, run.stdout + run.stderr
    helpers.assert_same_end(run, whole)
    for key in ("val_loss", "first_val_loss"):
        assert run.losses(key) == whole.losses(key)
        assert run.losses(key) == pytest.approx(run_of(1).losses(key), abs=1e-4)


BAD_INPUT = [
    ({"unfreeze_rank_ratio": 0.99}, ["32", "nothing is protected"]),
    ({"unfreeze_rank_ratio": 0.05, "head_dim": 4}, ["0 of", "8 directions", "nothing learns"]),
    ({"ngram_lr": 0.1}, ["ngram_lr=0.1", "--ngram-lr 0"]),
    ({"init_from": ""}, ["--init-from", "./run.sh english"]),
    ({"track": "english"}, ["track english has no init_from"]),
    ({"matrix_update": "moun"}, ["matrix_update=moun: must be one of adam, muon"]),
    ({"init_from": "nowhere"}, ["--init-from nowhere", "no checkpoint"]),
    ({"vocab_size": 384}, ["track english, with vocab_size=257", "384", "--vocab-size"]),
    ({"data": "gone/verse"}, ["gone/verse/manifest.json: no such file", "by --data"]),
    ({"first_data": "gone/english"}, ["gone/english/manifest.json: no such", "by --first-data"]),
    ({"data": "other"}, ["--data other: has another vocabulary", "bytes", "--tokenizer"]),
    ({"first_data": "other"}, ["/other: has another vocabulary", "--first-data", "--tokenizer"]),
]


@pytest.mark.parametrize("changes, words", BAD_INPUT, ids=str)
def test_bad_input_ends_in_one_line(changes, words, values, go_on, tmp_path):
    other = helpers.make_corpus(tmp_path / "other")
    helpers.with_manifest(other, vocabulary={"sha256": "0" * 64, "pattern": "."})
    line = helpers.refusal(go_on(**{**values, **changes}))
    assert all(word in line for word in words), line
    assert not (tmp_path / "logs").exists()


def test_a_first_corpus_that_was_built_again_is_refused(values, base, go_on, tmp_path):
    content = base.checkpoint() | {"data": "0" * 64}
    train_gpt.save_checkpoint(tmp_path / "checkpoint.pt", content)
    values = {**values, "init_from": "checkpoint.pt"}
    line = helpers.refusal(go_on(**values))
    assert "not the one that --init-from has read" in line and "--first-data" in line
    assert go_on("--check", **values, first_data=content["config"]["data"]).code == 0


def test_a_resumed_run_wants_the_checkpoint_that_it_started_from(values, base, go_on, tmp_path):
    started = shutil.copytree(base.folder, tmp_path / "logs" / "base")
    whole = go_on(**{**values, "init_from": "base", "save_every": 1, "steps": 2, "val_every": 0})
    (whole.folder / "checkpoint.pt").unlink()
    (started / "checkpoint.pt").unlink()  # the run's older one is found now
    run = go_on(resume="second")
    assert run.code == 2 and "another checkpoint" in run.lines[-1], run.stdout
    shutil.rmtree(started)
    assert "--init-from base: no checkpoint" in helpers.refusal(go_on(resume="second"))


def test_each_script_knows_its_own_runs(run_of, base, go_on, cli, monkeypatch):
    assert "train_gpt.py" in helpers.refusal(go_on(f"--resume={base.folder}/step_000020.pt"))
    checkpoint = run_of(1).folder / "step_000005.pt"
    monkeypatch.delitem(train_gpt.TRACKS, "continual")  # as where continual.py was not imported
    assert "the script that it began with" in helpers.refusal(cli(resume=checkpoint))
