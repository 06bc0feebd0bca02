"""Chapter 8: atomic, checksummed checkpoints; resuming keeps the trajectory."""
import resource
import shutil
from pathlib import Path

import pytest
import torch

import ranks
import train_gpt
from helpers import NO_TABLE, assert_bitwise, make_trainer, refusal
from train_gpt import ConfigError, load_checkpoint, save_checkpoint

CONTENT = train_gpt.checkpoint_content(make_trainer(dtype="bfloat16"), 3, train_gpt.LOADER_START, 1.5)


# ----- files

def test_a_checkpoint_is_read_back(tmp_path):
    save_checkpoint(tmp_path / "a.pt", CONTENT)
    assert_bitwise(load_checkpoint(tmp_path / "a.pt"), CONTENT)
    assert_bitwise(torch.load(tmp_path / "a.pt", weights_only=True), CONTENT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "a.sha256"]


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_flipped_bit_is_noticed(place, tmp_path):
    path = tmp_path / "a.pt"
    save_checkpoint(path, CONTENT)
    raw = bytearray(path.read_bytes())
    raw[{"first": 0, "middle": len(raw) // 2, "last": len(raw) - 1}[place]] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match="a.pt.*sha256"):
        load_checkpoint(path)


@pytest.mark.parametrize("keep_digest", [True, False])
@pytest.mark.parametrize("length", [0, 10, 10_000])
def test_a_truncated_file_is_noticed(length, keep_digest, tmp_path):
    path = tmp_path / "a.pt"
    save_checkpoint(path, CONTENT)
    path.write_bytes(path.read_bytes()[:length])
    if not keep_digest:
        path.with_suffix(".sha256").unlink()
    with pytest.raises(ConfigError, match="a.pt"):
        load_checkpoint(path)


@pytest.mark.parametrize("content", [[1, 2], {"step": 3}, {"format": 3, "step": 3}, {"format": 999, "step": 3}])
def test_other_files_of_torch_are_no_checkpoints(content, tmp_path):
    torch.save(content, tmp_path / "other.pt")
    (tmp_path / "other.sha256").write_text(train_gpt.file_sha256(tmp_path / "other.pt"))
    with pytest.raises(ConfigError, match="other.pt.*format"):
        load_checkpoint(tmp_path / "other.pt")


def test_a_pickle_that_could_run_code_is_refused(tmp_path):
    torch.save({"format": 1, "step": Path("x")}, tmp_path / "evil.pt")
    (tmp_path / "evil.sha256").write_text(train_gpt.file_sha256(tmp_path / "evil.pt"))
    with pytest.raises(ConfigError, match="evil.pt.*Weights only load failed"):
        load_checkpoint(tmp_path / "evil.pt")


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
    assert train_gpt.open_checkpoint("killed")["step"] == 3


def small_disk(size):
    """What a rank does before it starts: no file may grow beyond `size` bytes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_run_that_cannot_save_says_so(tiny, tmp_path):
    run = ranks.train(tmp_path, {**tiny, "run_id": "full"}, before=small_disk(350_000))
    assert run.code == 1, run.stdout + run.stderr
    assert run.lines[-1].startswith("status:error ") and "checkpoint.pt" in run.lines[-1]
    assert (run.folder / "log.txt").read_text().splitlines()[-1] == run.lines[-1]
    assert sorted(path.name for path in run.folder.iterdir()) == ["log.txt", "metrics.jsonl"]
    assert "Traceback" not in run.stderr


def test_a_run_that_cannot_log_says_so(tiny, tmp_path):
    run = ranks.train(tmp_path, {**tiny, "run_id": "full"}, before=small_disk(20_000))
    assert run.code == 1
    assert run.lines and run.lines[-1].startswith("status:error ")
    assert "Traceback" not in run.stderr


# ----- what runs leave

def test_a_run_keeps_what_it_was_told_to(rich_run):
    names = {path.name for path in rich_run.folder.iterdir()}
    assert names == {"log.txt", "metrics.jsonl", "result.json", "step_000010.pt",
                     "step_000010.sha256", "checkpoint.pt", "checkpoint.sha256"}
    half, end = rich_run.checkpoint("step_000010.pt"), rich_run.checkpoint()
    assert (half["step"], end["step"]) == (10, 20)
    for content in (half, end):
        assert train_gpt.config_of_checkpoint(content).run_id == "rich"
        table, groups = content["groups"]["ngram_table"], ("small", "embeddings", "matrices")
        states = {name: state for group in groups for name, state in content["groups"][group].items()}
        assert set(content["model"]) == set(states) <= set(train_gpt.RULES)
        assert all(state for state in states.values())
        assert all(tensor.isfinite().all() for tensor in content["model"].values())
        assert table["weight"].any() and table["second"].any() and 0 < table["scale"] < 1 and table["index"].any()
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
        (folder / name).write_text("".join(lines[:last + 1]))
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
    resumed = {event["step"]: event["train_loss"] for event in run.metrics[-11:] if "train_loss" in event}
    assert resumed == {step: loss for step, loss in rich_run.train_losses.items() if step > 10}
    assert run.result["val_loss"] == rich_run.result["val_loss"]
    assert run.result["overrides"] == rich_run.result["overrides"]
    after = next(event for event in run.metrics[-11:] if event["step"] == 11)
    before = rich_run.checkpoint("step_000010.pt")["train_seconds"]
    assert after["train_time"] > 1000 * before  # the clock goes on
    log = (run.folder / "log.txt").read_text().splitlines()
    assert any(line.startswith("resumed:rich step:10/20 ") for line in log)
    assert log[-1].startswith("status:ok ") and log.count("===== START =====") == 1


def test_restoring_brings_back_the_random_numbers():
    trainer = make_trainer()
    torch.manual_seed(5)
    content = train_gpt.checkpoint_content(trainer, 2, train_gpt.LOADER_START, 0.0)
    expected = torch.rand(3)
    train_gpt.restore(trainer, content)
    assert_bitwise(torch.rand(3), expected)


@pytest.mark.parametrize("changes", [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float32", "adam_every": 5, "micro_batches": ((0.0, 1), (0.5, 2))},
    {"dtype": "float32", **NO_TABLE, "untie_at": 0.6},
], ids=str)
def test_resuming_is_exact_whatever_the_configuration(changes, tiny, tmp_path, cli):
    values = {**tiny, "steps": 8, "save_every": 5, "run_id": "whole", **changes}
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
    torch.testing.assert_close(run.checkpoint()["model"], two.checkpoint()["model"], atol=2e-3, rtol=1e-2)


# ----- what resuming refuses

@pytest.fixture
def interrupted_run(rich_run, tmp_path):
    return interrupted(rich_run, tmp_path)


OTHER_CONFIGURATIONS = [
    (["--steps", "30"], "20"),
    (["--adam-lr", "0.5"], str(train_gpt.TRACKS["nano"].adam_lr)),
    (["--track", "fineweb"], "nano"),
    (["--document-cap", "64"], "192"),
    (["--dtype", "bfloat16"], "float32"),
    (["--stepz", "20"], "steps"),
    (["--seed", "2"], "1"),
    (["--run-id", "other"], "rich"),
]


@pytest.mark.parametrize("words, hint", OTHER_CONFIGURATIONS, ids=[c[0][0] for c in OTHER_CONFIGURATIONS])
def test_resuming_with_another_configuration_is_refused(words, hint, interrupted_run, cli):
    before = (interrupted_run / "log.txt").read_bytes()
    run = cli("--resume", "rich", *words)
    line = refusal(run)
    assert words[0].replace("-", "_")[2:] in line.replace("-", "_") and hint in line
    assert (interrupted_run / "log.txt").read_bytes() == before


@pytest.mark.parametrize("words", [
    ["--steps", "20"], ["--micro-batch-tokens", "256"], ["--val-tokens", "1024"], ["--head-dim", "16"],
    ["--seed", "1", "--track", "nano"],
], ids=" ".join)
def test_resuming_may_repeat_what_the_run_has(words, interrupted_run, cli):
    config, _, content = train_gpt.resumed(train_gpt.parse_arguments(["--resume", "rich", *words]))
    assert content["step"] == 10 and config.steps == 20


def test_resuming_may_watch_the_run_in_another_way(interrupted_run, cli):
    given = {"resume": "rich", "log_every": "7", "save_every": "4", "device": "cpu", "workers": "3"}
    config, _, _ = train_gpt.resumed(given)
    assert (config.log_every, config.save_every, config.workers, config.steps) == (7, 4, 3, 20)


def test_a_complete_run_is_not_resumed(rich_run, tmp_path, cli):
    shutil.copytree(rich_run.folder, tmp_path / "logs" / "rich")
    run = cli(resume="rich")
    line = refusal(run)
    assert "complete" in line and "20 steps" in line


def test_an_unknown_run_is_not_resumed(interrupted_run, cli):
    run = cli(resume="ritch")
    line = refusal(run)
    assert "ritch" in line and "did you mean rich?" in line


def test_a_damaged_checkpoint_is_not_resumed(interrupted_run, cli):
    path = interrupted_run / "step_000010.pt"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 16
    path.write_bytes(raw)
    run = cli(resume="rich")
    line = refusal(run)
    assert "step_000010.pt" in line and "damaged" in line
