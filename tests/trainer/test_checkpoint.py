"""Chapter 15: atomic, checksummed checkpoints; resuming keeps the trajectory."""

import dataclasses
import resource
import shutil
from pathlib import Path

import pytest
import torch

import ranks
import train_gpt
from helpers import NO_TABLE, TINY, arguments, assert_bitwise, make_trainer, refusal, tiny_config
from train_gpt import ConfigError, TrainLoader, load_checkpoint, save_checkpoint

TRAINER = make_trainer(dtype="bfloat16")
CONTENT = train_gpt.checkpoint_content(TRAINER, 3, TrainLoader.START, 1.5)


def write(path, content):
    """Save what need not be a checkpoint, with a sha256 that fits."""
    torch.save(content, path)
    path.with_suffix(".sha256").write_text(train_gpt.file_sha256(path))


# ----- files


def test_a_checkpoint_is_read_back(tmp_path):
    save_checkpoint(tmp_path / "a.pt", CONTENT)
    assert_bitwise(load_checkpoint(tmp_path / "a.pt"), CONTENT)
    assert_bitwise(torch.load(tmp_path / "a.pt", weights_only=True), CONTENT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "a.sha256"]


@pytest.mark.parametrize("length", [0, 10, 10_000])
def test_a_truncated_file_is_noticed(length, tmp_path):
    path = tmp_path / "a.pt"
    save_checkpoint(path, CONTENT)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ConfigError, match="a.pt.*sha256"):
        load_checkpoint(path)
    path.with_suffix(".sha256").write_text(train_gpt.file_sha256(path))
    with pytest.raises(ConfigError, match="a.pt: cannot be read"):
        load_checkpoint(path)


@pytest.mark.parametrize("content", [[1, 2], {"step": 3}, {**CONTENT, "rows": "another"}])
def test_a_file_of_another_kind_is_refused(content, tmp_path):
    write(tmp_path / "other.pt", content)
    with pytest.raises(ConfigError, match="other.pt: cannot be read .*; use another checkpoint"):
        load_checkpoint(tmp_path / "other.pt")


def test_a_table_of_other_rows_has_another_fingerprint():
    """What a token reads is hashed: the orders, the places, the size of the table."""
    changes = [{}, {"ngram_rows": 999}, {"ngram_orders": (2, 3)}, {"copy_places": 1}, NO_TABLE]
    changes += [{"copy_reach": 3}, {"index_orders": (4,)}]
    prints = {train_gpt.row_fingerprint(tiny_config(**change)) for change in changes}
    assert len(prints) == len(changes)
    assert train_gpt.row_fingerprint(tiny_config(seed=5)) in prints


def test_a_pickle_that_could_run_code_is_refused(tmp_path):
    write(tmp_path / "evil.pt", {"step": Path("x")})
    with pytest.raises(ConfigError, match="evil.pt.*Weights only load failed"):
        load_checkpoint(tmp_path / "evil.pt")


def without(tree, *path):
    """A copy of nested dicts without what is at a path."""
    kept = dict(tree)
    if len(path) > 1:
        kept[path[0]] = without(tree[path[0]], *path[1:])
    else:
        del kept[path[0]]
    return kept


@pytest.mark.parametrize(
    "content",
    [
        without(CONTENT, "model"),
        without(CONTENT, "rng"),
        without(CONTENT, "model", "mlp"),
        without(CONTENT, "groups", "matrices"),
        without(CONTENT, "groups", "matrices", "mlp"),
        without(CONTENT, "groups", "ngram_table", "second"),
        {**CONTENT, "model": {**CONTENT["model"], "more": torch.zeros(1)}},
        {**CONTENT, "model": {**CONTENT["model"], "mlp": torch.zeros(4, 64, 31)}},
        {**CONTENT, "rng": torch.zeros(3)},
    ],
    ids=range(9),
)
def test_parts_that_are_not_this_models_are_refused(content):
    with pytest.raises(ConfigError, match="the checkpoint is not of this model"):
        train_gpt.restore(TRAINER, content)


def test_restoring_brings_back_the_random_numbers():
    torch.manual_seed(5)
    content = train_gpt.checkpoint_content(TRAINER, 2, TrainLoader.START, 0.0)
    expected = torch.rand(3)
    train_gpt.restore(TRAINER, content)
    assert_bitwise(torch.rand(3), expected)


def test_a_full_disk_leaves_the_former_file(tmp_path):
    path = tmp_path / "a.pt"
    save_checkpoint(path, CONTENT)
    larger = {**CONTENT, "model": {"weight": torch.zeros(1_000_000)}}
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, former[1]))
    try:
        with pytest.raises(OSError):
            save_checkpoint(path, larger)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert_bitwise(load_checkpoint(path), CONTENT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "a.sha256"]


@pytest.mark.parametrize("moment", [1, 2])
def test_a_kill_while_one_is_saved_leaves_the_one_before(moment, tmp_path, monkeypatch):
    folder = tmp_path / "logs" / "killed"
    folder.mkdir(parents=True)
    save_checkpoint(folder / "step_000003.pt", CONTENT)
    replace, calls = Path.replace, []

    def killed(self, target):
        calls.append(target)
        if len(calls) == moment:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(folder / "step_000004.pt", {**CONTENT, "step": 4})
    monkeypatch.chdir(tmp_path)
    assert train_gpt.find_checkpoint("killed")["step"] == 3


@pytest.mark.parametrize("size, name", [(350_000, "checkpoint.pt"), (20_000, "")])
def test_a_run_that_cannot_save_or_log_says_so(size, name, tiny, tmp_path):
    """No file may grow beyond so many bytes; the script itself is in the log."""

    def before():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    run = ranks.train(tmp_path, {**tiny, "run_id": "full"}, before=before)
    assert run.code == 1, run.stdout + run.stderr
    assert run.lines[-1].startswith("status:error ") and name in run.lines[-1]
    assert "Traceback" not in run.stderr
    assert sorted(path.name for path in run.folder.iterdir()) == ["log.txt", "metrics.jsonl"]
    if name:
        assert (run.folder / "log.txt").read_text().splitlines()[-1] == run.lines[-1]


# ----- what runs leave


def test_a_run_keeps_what_it_was_told_to(rich_run):
    files = ["log.txt", "metrics.jsonl", "result.json"]
    files += ["step_000010.pt", "step_000010.sha256", "checkpoint.pt", "checkpoint.sha256"]
    assert sorted(path.name for path in rich_run.folder.iterdir()) == sorted(files)
    half, end = rich_run.checkpoint("step_000010.pt"), rich_run.checkpoint()
    assert (half["step"], end["step"]) == (10, 20)
    for content in (half, end):
        config = train_gpt.config_of_checkpoint(content)
        table, states = content["groups"]["ngram_table"], {}
        for group in ("small", "embeddings", "matrices"):
            states.update(content["groups"][group])
        assert config.run_id == "rich"
        assert set(content["model"]) == set(states) <= set(config.rules)
        assert all(states.values())
        assert all(tensor.isfinite().all() for tensor in content["model"].values())
        assert all(table[name].any() for name in ("weight", "second", "index"))
    assert not torch.equal(half["model"]["mlp"], end["model"]["mlp"])
    assert half["train_seconds"] < end["train_seconds"]


def interrupted(run, tmp_path):
    """A copy under tmp_path of a run that was stopped after step 13: logs/<run id>."""
    folder = tmp_path / "logs" / run.folder.name
    left_out = shutil.ignore_patterns("checkpoint.*", "result.json", "loss.png")
    shutil.copytree(run.folder, folder, ignore=left_out)
    for name, mark in (("log.txt", "step:13/20"), ("metrics.jsonl", '{"step": 13,')):
        lines = (folder / name).read_text().splitlines(keepends=True)
        last = max(index for index, line in enumerate(lines) if line.startswith(mark))
        (folder / name).write_text("".join(lines[: last + 1]))
    return folder


def assert_same_end(actual, expected):
    for part in ("step", "model", "groups", "loader", "rng", "config"):
        assert_bitwise(actual[part], expected[part], part)


def test_a_resumed_run_is_the_run_that_was_not_interrupted(rich_run, tmp_path, cli):
    interrupted(rich_run, tmp_path)
    run = cli(resume="rich")
    run.folder = tmp_path / "logs" / "rich"
    assert run.code == 0, run.stdout
    assert_same_end(run.checkpoint(), rich_run.checkpoint())
    events = run.metrics[-11:]
    resumed = {event["step"]: event["train_loss"] for event in events if "train_loss" in event}
    assert resumed == {step: loss for step, loss in rich_run.train_losses.items() if step > 10}
    assert run.result["val_loss"] == rich_run.result["val_loss"]
    assert run.result["overrides"] == rich_run.result["overrides"]
    after = next(event for event in events if event["step"] == 11)
    before = rich_run.checkpoint("step_000010.pt")["train_seconds"]
    assert after["train_time"] > 1000 * before  # the clock goes on
    log = (run.folder / "log.txt").read_text().splitlines()
    assert any(line.startswith("resumed:rich step:10/20 ") for line in log)
    assert log[-1].startswith("status:ok ") and log.count("===== START =====") == 1


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"dtype": "bfloat16", "workers": 2}, marks=pytest.mark.slow),
        {"adam_every": 5, "stages": ({}, {"start": 0.5, "document_cap": 64})},
        pytest.param({**NO_TABLE, "untie_at": 0.6}, marks=pytest.mark.slow),
        {"matrix_update": "soap", "basis_every": 3, "index_orders": (4,), "index_share": 0.25},
    ],
    ids=str,
)
def test_resuming_is_exact_whatever_the_configuration(changes, tiny, tmp_path, cli):
    """Also where a step's gradients are summed over several, and the cap of documents changes."""
    values = {**tiny, "steps": 8, "save_every": 5, "run_id": "whole", **changes}
    if "stages" in changes:
        values = {name: value for name, value in values.items() if name != "document_cap"}
    whole = cli(**values)
    assert whole.code == 0
    expected, losses = whole.checkpoint(), whole.train_losses
    (whole.folder / "checkpoint.pt").unlink()
    (whole.folder / "metrics.jsonl").unlink()
    run = cli(resume="whole")
    run.folder = whole.folder
    assert run.code == 0
    assert run.train_losses == {step: loss for step, loss in losses.items() if step > 5}
    assert_same_end(run.checkpoint(), expected)


@pytest.mark.slow
def test_two_ranks_may_be_continued_by_one(rich_run, rich_run_of, tmp_path, cli):
    two = rich_run_of(2)
    interrupted(two, tmp_path)
    run = cli(resume="rich")
    run.folder = tmp_path / "logs" / "rich"
    assert run.code == 0
    assert run.result["world_size"] == 1
    for step in range(11, 21):
        assert run.train_losses[step] == pytest.approx(two.train_losses[step], abs=1e-4)
        assert run.train_losses[step] == pytest.approx(rich_run.train_losses[step], abs=1e-4)
    one, both = run.checkpoint()["model"], two.checkpoint()["model"]
    torch.testing.assert_close(one, both, atol=2e-3, rtol=1e-2)


# ----- what resuming refuses


@pytest.fixture
def interrupted_run(rich_run, tmp_path):
    return interrupted(rich_run, tmp_path)


OTHER_CONFIGURATIONS = [
    (["--steps", "30"], "20"),
    (["--adam-lr", "0.5"], str(TINY["adam_lr"])),
    (["--track", "fineweb"], "nano"),
    (["--document-cap", "64"], "96, 192"),
    (["--stages", "({},)"], "document_cap=96"),
    (["--dtype", "bfloat16"], "float32"),
    (["--stepz", "20"], "--steps"),
    (["--seed", "2"], "1"),
    (["--run-id", "other"], "rich"),
]


@pytest.mark.parametrize(
    "words, hint", OTHER_CONFIGURATIONS, ids=[row[0][0] for row in OTHER_CONFIGURATIONS]
)
def test_resuming_with_another_configuration_is_refused(words, hint, interrupted_run, cli):
    before = (interrupted_run / "log.txt").read_bytes()
    line = refusal(cli("--resume", "rich", *words))
    assert words[0] in line and hint in line
    assert (interrupted_run / "log.txt").read_bytes() == before


def test_resuming_may_repeat_what_the_run_has(interrupted_run, rich, cli):
    """All words of the command, as a launcher does that starts a run again, or some of them."""
    whole = train_gpt.parse_command_line(arguments({**rich, "run_id": "rich", "resume": "auto"}))
    for given in (whole, {"resume": "rich", "steps": 20, "micro_batches": 6, "seed": 1}):
        config, overrides, content = train_gpt.resumed(given)
        assert content["step"] == 10 and config == train_gpt.config_of_checkpoint(content)
        assert overrides["steps"] == 20 and overrides["stages"][1]["document_cap"] == 192


def test_resuming_may_watch_the_run_in_another_way(interrupted_run, cli):
    changes = {"log_every": 7, "save_every": 4, "device": "cpu", "workers": 3}
    config, _, content = train_gpt.resumed({"resume": "rich", **changes})
    assert config == dataclasses.replace(train_gpt.config_of_checkpoint(content), **changes)


def test_a_complete_run_is_not_resumed(rich_run, tmp_path, cli):
    shutil.copytree(rich_run.folder, tmp_path / "logs" / "rich")
    line = refusal(cli(resume="rich"))
    assert "complete" in line and "20 steps" in line


def test_an_unknown_run_is_not_resumed(interrupted_run, cli):
    line = refusal(cli(resume="ritch"))
    assert "ritch" in line and "did you mean rich?" in line
