"""Checkpoints: atomic, checksummed files, and runs that go on from them as if nothing had happened,
whatever a kill, a full disk or damage has left."""

import dataclasses
import os
import resource
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import helpers
import ranks
import train_gpt
from train_gpt import ConfigError, find_checkpoint, save_checkpoint

TRAINER = helpers.make_trainer(dtype="bfloat16")
with tempfile.TemporaryDirectory() as scratch:
    CONTENT = helpers.content_of(TRAINER, 3, Path(scratch))


# ----- files


def without(tree, *path):
    """A copy of nested dicts without what is at a path."""
    kept = dict(tree)
    if len(path) > 1:
        kept[path[0]] = without(tree[path[0]], *path[1:])
    else:
        del kept[path[0]]
    return kept


FOREIGN = {
    "a list": [1, 2],
    "another table's rows": {**CONTENT, "rows": "another"},
    "what could run code": {"step": Path("x")},
    **{f"no {part}": without(CONTENT, part) for part in ("config", "rows")},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_another_kind_is_refused(name, tmp_path):
    path = tmp_path / "other.pt"
    torch.save(FOREIGN[name], path)
    path.with_suffix(".sha256").write_text(train_gpt.file_sha256(path))
    with pytest.raises(ConfigError, match="other.pt: cannot be read "):
        find_checkpoint(str(path))


def test_a_table_of_other_rows_has_another_fingerprint():
    """What a token reads is hashed: the orders, the size of the table."""
    changes = [{}, {"ngram_rows": 999}, {"ngram_orders": (2, 3)}, helpers.NO_TABLE]
    prints = {train_gpt.row_fingerprint(helpers.tiny_config(**change)) for change in changes}
    assert len(prints) == len(changes)
    assert train_gpt.row_fingerprint(helpers.tiny_config(seed=5)) in prints


PARTS = (
    ("rng",),
    ("model", "mlp"),
    ("groups", "matrices", "mlp"),
    ("groups", "ngram_table", "rows", "second"),
)


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_parts_that_are_not_this_models_are_refused(part):
    with pytest.raises(ConfigError, match="the checkpoint is not of this model"):
        train_gpt.restore(TRAINER, without(CONTENT, *part))


@pytest.mark.parametrize("limit", [10_000, 2_000_000])
def test_a_full_disk_leaves_the_former_file(limit, tmp_path):
    path = tmp_path / "a.pt"
    save_checkpoint(path, CONTENT)
    larger = {**CONTENT, "model": {"weight": torch.zeros(1_000_000)}}
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, former[1]))
    try:
        with pytest.raises(OSError, match="a.pt|too large"):
            save_checkpoint(path, larger)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    helpers.assert_bitwise(torch.load(path, weights_only=True), CONTENT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "a.sha256"]


def test_a_kill_while_one_is_saved_leaves_the_one_before(tmp_path, monkeypatch):
    folder = tmp_path / "logs" / "killed"
    folder.mkdir(parents=True)
    save_checkpoint(folder / "step_000003.pt", CONTENT)

    def killed(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(folder / "step_000004.pt", {**CONTENT, "step": 4})
    monkeypatch.chdir(tmp_path)
    assert train_gpt.find_checkpoint("killed")["step"] == 3


# ----- room on the disk


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_without_room_is_refused_in_one_line(world_size, rich, rich_run_of, tmp_path):
    """A checkpoint is no larger than is said before the start; two on the way stay while the last
    one is written."""
    size = 3 * (rich_run_of(world_size).folder / "checkpoint.pt").stat().st_size

    def refused_with(free):
        def before():
            train_gpt.shutil.disk_usage = lambda path: SimpleNamespace(free=free)

        run = ranks.train(tmp_path, rich, "--check", world_size=world_size, before=before)
        return run.code == 2 and "the disk of" in run.lines[-1] and "make room" in run.lines[-1]

    assert refused_with(size - 150_000) and not refused_with(2 * world_size * size)
    assert not list(tmp_path.iterdir())


# ----- resuming


def leave(run, tmp_path, step):
    """A copy of a run under tmp_path as a kill after a step leaves it: logs/<run id>."""
    folder = tmp_path / "logs" / run.folder.name
    shutil.copytree(run.folder, folder, ignore=shutil.ignore_patterns("loss.png"))
    for path in folder.glob("*.pt"):
        content = torch.load(path, weights_only=True)
        if content["step"] > step:
            path.unlink()
            path.with_suffix(".sha256").unlink()
    lines = (folder / "log.txt").read_text().splitlines(keepends=True)
    marks = [at for at, line in enumerate(lines) if line.startswith(f"step:{step}/")]
    (folder / "log.txt").write_text("".join(lines[: marks[-1] + 1]))
    return folder


def goes_on(run, folder, whole_run):
    """Whether a run has completed, as if nobody had killed it."""
    assert run.code == 0, run.stdout
    run.folder = folder
    helpers.assert_same_end(run, whole_run)
    return True


def test_the_newest_two_checkpoints_on_the_way_stay(tiny, cli):
    run = cli(**{**tiny, "steps": 5, "save_every": 1, "run_id": "kept"})
    names = {path.stem for path in run.folder.glob("*.sha256")}
    assert names == {"checkpoint", "step_000003", "step_000004"}
    assert names == {path.stem for path in run.folder.glob("*.pt")}


def test_a_resumed_run_is_the_run_that_was_not_interrupted(rich_run, tmp_path, cli):
    """It trims the log's last line, which may be torn."""
    folder = leave(rich_run, tmp_path, 13)
    with open(folder / "log.txt", "a") as log:
        log.write("step:14/20 train_lo")
    run = cli(resume="rich")
    assert goes_on(run, folder, rich_run)
    assert run.val_losses == rich_run.val_losses
    at = next(at for at, line in enumerate(run.log) if line.startswith("resumed:rich step:10/20 "))
    assert run.log[at - 1].startswith("step:13/20 ") and run.log[at + 1].startswith("step:11/20 ")
    before = rich_run.checkpoint("step_000010.pt")["seconds"][0]
    times = [event["train_time"] for event in run.events if event["step"] > 10]
    assert times[-1] > 1000 * before  # the clock goes on
    assert run.log[-1].startswith("status:ok ") and run.log.count("===== START =====") == 1


@pytest.mark.parametrize(
    "world_size, before, later, then",
    [(2, None, 1, None), (1, None, 2, ranks.share_out), (3, ranks.share_out, 3, ranks.share_out)],
)
def test_a_run_goes_on_with_any_number_of_ranks(
    world_size, before, later, then, rich_run_of, tmp_path
):
    """Whether they share parameters out, or each of them updates all."""
    whole = rich_run_of(world_size, before)
    folder = leave(whole, tmp_path, 13)
    run = ranks.train(tmp_path, {"resume": "rich"}, world_size=later, before=then)
    assert run.code == 0, run.stdout + run.stderr
    run.folder = folder
    assert run.train_losses == pytest.approx(whole.train_losses, abs=1e-4)
    assert world_size != later or goes_on(run, folder, whole)


# With a state of another kind than the twenty steps leave.
SOAP = {"matrix_update": "soap", "basis_every": 3, "dtype": "bfloat16", "mtp_weights": (1.0, 0.5)}
EIGHT = {"steps": 8, "save_every": 2, "adam_every": 2, **SOAP}


@pytest.fixture(scope="module")
def whole_run(tiny, tmp_path_factory):
    """Eight steps, with checkpoints of steps 4, 6 and 8."""
    run = ranks.train(tmp_path_factory.mktemp("whole"), {**tiny, **EIGHT, "run_id": "whole"})
    assert run.code == 0, run.stdout + run.stderr
    return run


@pytest.fixture
def killed(whole_run, tmp_path):
    """killed(step): what a kill after that step leaves."""
    return lambda step: leave(whole_run, tmp_path, step)


def test_a_kill_during_the_final_validation_leaves_a_run_that_can_be_finished(
    killed, whole_run, cli
):
    folder = killed(8)
    assert (folder / "checkpoint.pt").exists()
    assert goes_on(cli(resume="whole"), folder, whole_run)
    assert goes_on(cli(resume="whole"), folder, whole_run)  # the end is worked out again


def test_auto_starts_a_run_or_goes_on_with_it(killed, whole_run, cli, tiny):
    words = {**tiny, **EIGHT, "run_id": "whole"}
    folder = killed(1)  # before it has saved anything
    assert "no checkpoint" in helpers.refusal(cli(resume="whole"))
    before = (folder / "log.txt").read_bytes()
    refused = cli(**words)
    assert refused.code == 2 and (folder / "log.txt").read_bytes() == before
    assert "logs/whole exists; change --run-id, or --resume whole" in refused.lines[-1]
    assert goes_on(cli(**words, resume="auto"), folder, whole_run)
    for path in folder.glob("*.pt"):
        path.unlink()
    before = (folder / "log.txt").read_bytes()
    run = cli(**words, resume="auto")  # what is complete is kept
    assert run.code == 2 and "exists" in run.lines[-1]
    assert (folder / "log.txt").read_bytes() == before


def damage(path, how):
    raw, sha = bytearray(path.read_bytes()), path.with_suffix(".sha256")
    if how == "no sha256":
        sha.unlink()
    elif how == "odd sha256":
        sha.write_bytes(b"\xff\xfe")
    elif how == "truncated":
        path.write_bytes(raw[: len(raw) // 2])
    else:
        raw[len(raw) // 3] ^= 1
        path.write_bytes(raw)


@pytest.mark.parametrize("how", ["no sha256", "odd sha256", "truncated", "one bit"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(how, killed, whole_run, cli):
    folder = killed(6)
    damage(folder / "step_000006.pt", how)
    line = helpers.refusal(cli(resume="logs/whole/step_000006.pt"))
    assert "step_000006.pt" in line and "sha256" in line
    run = cli(resume="whole")
    (note,) = (line for line in run.stderr.splitlines() if line.startswith("note: "))
    assert "logs/whole/step_000006." in note and "resumed:whole step:4/8 world_size:1" in run.lines
    assert goes_on(run, folder, whole_run)


# ----- what has moved


def test_a_run_goes_on_where_it_was_moved_and_with_a_corpus_that_has_moved(tiny, cli, tmp_path):
    """Both are known by their content."""
    before, after, other = (tmp_path / name for name in ("before", "after's place", "other"))
    helpers.make_corpus(before)
    values = {**tiny, **EIGHT, "data": str(before)}
    whole = cli(**values, run_id="whole")
    folder = leave(whole, tmp_path / "a place", 6)
    before.rename(after)
    helpers.make_corpus(other, train_tokens=80_000)
    path = str(folder / "step_000006.pt")
    assert "--data" in helpers.refusal(cli(resume=path))
    assert "name its place by --data" in cli(resume=path, data=other).lines[-1]
    run = cli(resume=path, data=after)
    assert goes_on(run, folder, whole) and f" log:{folder}/log.txt" in run.lines[-1]
    assert os.listdir(tmp_path / "logs") == ["whole"]


def test_a_checkpoint_without_its_log_begins_one(killed, whole_run, cli, tmp_path):
    """In a copy under another name."""
    folder = killed(6)
    copied = tmp_path / "logs" / "copied"
    copied.mkdir()
    for name in ("step_000006.pt", "step_000006.sha256"):
        shutil.copy(folder / name, copied)
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    run = cli(resume="logs/copied")
    run.folder = copied
    assert run.code == 0, run.stdout
    helpers.assert_bitwise(run.checkpoint()["model"], whole_run.checkpoint()["model"])
    assert run.log[0].startswith("run:whole ")
    assert "resumed:whole step:6/8 world_size:1" in run.log
    assert kept == {path.name: path.read_bytes() for path in folder.iterdir()}


# ----- what resuming refuses

OTHERS = "--steps 30|--track fineweb|--stages ({'lr_mul': 2},)|--dtype float32|--run-id other"


@pytest.mark.parametrize("words", OTHERS.split("|"))
def test_resuming_with_another_configuration_is_refused(words, killed, cli):
    folder = killed(6)
    before = (folder / "log.txt").read_bytes()
    option, value = words.split(" ", 1)
    line = helpers.refusal(cli("--resume", "whole", option, value))
    assert option in line and "leave the key out" in line
    assert (folder / "log.txt").read_bytes() == before


def test_resuming_may_repeat_what_the_run_has_and_watch_it_in_another_way(
    killed, tmp_path, monkeypatch
):
    killed(6)
    monkeypatch.chdir(tmp_path)
    changes = {"log_every": 7, "save_every": 4, "device": "cpu"}
    config, content = train_gpt.resumed({"resume": "whole", "micro_batches": 2, **changes})
    assert content["step"] == 6
    assert config == dataclasses.replace(content["config"], **changes)
