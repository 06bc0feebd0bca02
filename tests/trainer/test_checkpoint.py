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
    **{f"no {part}": without(CONTENT, part) for part in ("config", "rows", "vocabulary_sha256")},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_another_kind_is_refused(name, tmp_path):
    path = tmp_path / "other.pt"
    torch.save(FOREIGN[name], path)
    path.with_suffix(".sha256").write_text(train_gpt.file_sha256(path))
    with pytest.raises(ConfigError, match="other.pt: cannot be read "):
        find_checkpoint(str(path))


PARTS = ("rng", "model blocks.0.mlp", "groups matrices mlp", "groups ngram_table rows second")


@pytest.mark.parametrize("part", PARTS)
def test_parts_that_are_not_this_models_are_refused(part):
    with pytest.raises(ConfigError, match="the checkpoint is not of this model"):
        train_gpt.restore(TRAINER, without(CONTENT, *part.split()))


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
    def killed(self, target):
        raise KeyboardInterrupt

    save_checkpoint(tmp_path / "step_000003.pt", CONTENT)
    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "step_000004.pt", {**CONTENT, "step": 4})
    assert find_checkpoint(str(tmp_path))["step"] == 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_without_room_is_refused_in_one_line(world_size, rich, rich_run_of, tmp_path):
    """A checkpoint is no larger than is said before the start; two on the way stay while the last
    one is written. The disk that is asked is the one that will be written: logs/ is a link."""
    size = 3 * (rich_run_of(world_size).folder / "checkpoint.pt").stat().st_size
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "logs").symlink_to(tmp_path / "elsewhere")
    for free, code in ((size - 150_000, 2), (2 * world_size * size, 0)):

        def usage(path, free=free):
            return SimpleNamespace(free=free if "elsewhere" in path.resolve().parts else 0)

        with pytest.MonkeyPatch.context() as patched:  # ranks inherit it
            patched.setattr(train_gpt.shutil, "disk_usage", usage)
            run = ranks.train(tmp_path, rich, "--check", world_size=world_size)
        assert run.code == code, run.stdout
        assert ("the disk of" in run.lines[-1] and "make room" in run.lines[-1]) == (code == 2)
    assert not list((tmp_path / "elsewhere").iterdir())


# ----- resuming


def leave(run, tmp_path, step):
    """A copy of a run under tmp_path as a kill after a step leaves it: logs/<run id>."""
    folder = tmp_path / "logs" / run.folder.name
    shutil.copytree(run.folder, folder, ignore=shutil.ignore_patterns("loss.png"))
    for path in folder.glob("*.pt"):
        if torch.load(path, weights_only=True)["step"] > step:
            path.unlink()
            path.with_suffix(".sha256").unlink()
    lines = (folder / "log.txt").read_text().splitlines(keepends=True)
    marks = [at for at, line in enumerate(lines) if line.startswith(f"step:{step}/")]
    (folder / "log.txt").write_text("".join(lines[: marks[-1] + 1]))
    return folder


def goes_on(run, whole_run):
    """Whether a run has completed, as if nobody had killed it."""
    assert run.code == 0, run.stdout + run.stderr
    helpers.assert_same_end(run, whole_run)
    return True


def test_a_resumed_run_is_the_run_that_was_not_interrupted(rich_run, tmp_path, cli):
    """It trims the log's last line, which may be torn."""
    folder = leave(rich_run, tmp_path, 13)
    with open(folder / "log.txt", "a") as log:
        log.write("step:14/20 train_lo")
    run = cli(resume="rich")
    assert goes_on(run, rich_run)
    assert run.val_losses == rich_run.val_losses
    at = next(at for at, line in enumerate(run.log) if line.startswith("resumed:rich step:10/20 "))
    assert run.log[at - 1].startswith("step:13/20 ") and run.log[at + 1].startswith("step:11/20 ")
    before = rich_run.checkpoint("step_000010.pt")["seconds"][0]
    assert run.events[-1]["train_time"] > 1000 * before  # the clock goes on
    assert run.log[-1].startswith("status:ok ") and run.log.count("===== START =====") == 1


SHARED = pytest.param(3, ranks.share_out, 3, ranks.share_out, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "world_size, before, later, then", [(2, None, 1, None), (1, None, 2, ranks.share_out), SHARED]
)
def test_a_run_goes_on_with_any_number_of_ranks(
    world_size, before, later, then, rich_run_of, tmp_path
):
    """Whether they share parameters out, or each of them updates all."""
    whole = rich_run_of(world_size, before)
    leave(whole, tmp_path, 13)
    run = ranks.train(tmp_path, {"resume": "rich"}, world_size=later, before=then)
    assert run.code == 0, run.stdout + run.stderr
    assert run.train_losses == pytest.approx(whole.train_losses, abs=1e-4)
    assert world_size != later or goes_on(run, whole)


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


def test_the_newest_two_checkpoints_on_the_way_stay(whole_run):
    names = {path.stem for path in whole_run.folder.glob("*.sha256")}
    assert names == {"checkpoint", "step_000004", "step_000006"}
    assert names == {path.stem for path in whole_run.folder.glob("*.pt")}


def test_a_kill_during_the_final_validation_leaves_a_run_that_can_be_finished(
    killed, whole_run, cli
):
    killed(8)
    for _ in range(2):  # the end is worked out again
        assert goes_on(cli(resume="whole"), whole_run)


def test_auto_starts_a_run_or_goes_on_with_it(killed, whole_run, cli, tiny):
    words = {**tiny, **EIGHT, "run_id": "whole"}
    folder = killed(1)  # before it has saved anything
    assert "no checkpoint" in helpers.refusal(cli(resume="whole"))
    before = (folder / "log.txt").read_bytes()
    (folder / "._checkpoint.pt").write_bytes(b"Mac OS X")  # which is none
    refused = cli(**words)
    assert refused.code == 2 and (folder / "log.txt").read_bytes() == before
    assert "logs/whole exists; change --run-id, or --resume whole" in refused.lines[-1]
    assert goes_on(cli(**words, resume="auto"), whole_run)
    for path in folder.glob("*.pt"):
        path.unlink()
    before = (folder / "log.txt").read_bytes()
    run = cli(**words, resume="auto")  # what is complete is kept
    assert run.code == 2 and "exists" in run.lines[-1]
    assert (folder / "log.txt").read_bytes() == before


def test_a_run_deletes_and_overwrites_only_what_is_its_own(tiny, cli):
    """Of another run's files it names one, and where it goes on from stays."""
    values = {**tiny, "steps": 8, "save_every": 3, "run_id": "own"}
    folder = cli(**values).folder
    names = "step_000003.pt", "step_000006.pt", "checkpoint.pt"
    origin, later, last = (folder / name for name in names)
    content = torch.load(last, weights_only=True)
    content["config"] = content["config"] | {"run_id": "other"}
    save_checkpoint(last, content)
    for run in (cli(resume=origin), cli("--check", resume=later)):
        assert f"{last.name}: is of the run other; " in helpers.refusal(run)
    later.unlink()
    last.unlink()
    later.write_bytes(b"damaged")
    content = torch.load(origin, weights_only=True)
    assert content["code_sha256"] == train_gpt.file_sha256(train_gpt.__file__)
    save_checkpoint(origin, content | {"code_sha256": "5" * 64})
    run = cli(resume=origin, save_every=1)
    run.folder = folder
    told = f"trained by another train_gpt.py, code_sha256:{'5' * 64}"
    assert run.code == 0 and told in run.stdout and told in "".join(run.log)
    assert {path.name for path in folder.glob("*.pt")} == {*names, "step_000007.pt"}
    (folder / "log.txt").unlink()
    before = last.read_bytes()
    line = helpers.refusal(cli(**values))
    assert ".pt: is of the run own; move it away, or --resume that run" in line
    assert last.read_bytes() == before


DAMAGES = {  # of a file with a suffix, made of its bytes
    "no sha256": (".sha256", None),
    "odd sha256": (".sha256", lambda raw: b"\xff\xfe"),
    "truncated": (".pt", lambda raw: raw[: len(raw) // 2]),
    "one bit": (".pt", lambda raw: raw[:999] + bytes([raw[999] ^ 1]) + raw[1000:]),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(how, killed, whole_run, cli):
    folder = killed(6)
    suffix, damaged = DAMAGES[how]
    path = folder / f"step_000006{suffix}"
    if damaged:
        path.write_bytes(damaged(path.read_bytes()))
    else:
        path.unlink()
    line = helpers.refusal(cli(resume="logs/whole/step_000006.pt"))
    assert "step_000006.pt" in line and "sha256" in line
    run = cli(resume="whole")
    (note,) = (line for line in run.stderr.splitlines() if line.startswith("note: "))
    assert "logs/whole/step_000006." in note and "resumed:whole step:4/8 world_size:1" in run.lines
    assert goes_on(run, whole_run)


# ----- what has moved, and what resuming refuses


def test_a_run_goes_on_where_it_was_moved_and_with_a_corpus_that_has_moved(tiny, cli, tmp_path):
    """Both are known by their content; where the log is lost another one begins."""
    before, after, other = (tmp_path / name for name in ("before", "after's place", "other"))
    helpers.make_corpus(before)
    whole = cli(**{**tiny, **EIGHT, "data": str(before)}, run_id="whole")
    kept = (whole.folder / "log.txt").read_bytes()
    folder = leave(whole, tmp_path / "a place", 6)
    (folder / "log.txt").unlink()
    before.rename(after)
    helpers.make_corpus(other, train_tokens=80_000)
    path = str(folder / "step_000006.pt")
    assert "--data" in helpers.refusal(cli(resume=path))
    assert "name its place by --data" in cli(resume=path, data=other).lines[-1]
    run = cli(resume=path, data=after)
    run.folder = folder
    assert run.code == 0 and f" log:{folder}/log.txt" in run.lines[-1]
    helpers.assert_bitwise(run.checkpoint()["model"], whole.checkpoint()["model"])
    assert run.log[0].startswith("run:whole ")
    assert "resumed:whole step:6/8 world_size:1" in run.log
    assert os.listdir(tmp_path / "logs") == ["whole"]
    assert (whole.folder / "log.txt").read_bytes() == kept


def test_resuming_with_another_configuration_is_refused(killed, cli):
    """But it may repeat what the run has, and watch it in another way."""
    folder = killed(6)
    before = (folder / "log.txt").read_bytes()
    others = {"track": "fineweb", "stages": ({"lr_mul": 2},), "dtype": "float32", "run_id": "other"}
    for name, value in {"steps": 30, **others}.items():
        line = helpers.refusal(cli(resume="whole", **{name: value}))
        assert f"--{name.replace('_', '-')}" in line and "leave the key out" in line
    assert (folder / "log.txt").read_bytes() == before
    changes = {"log_every": 7, "save_every": 4, "device": "cpu"}
    config, content = train_gpt.resumed({"resume": "whole", "micro_batches": 2, **changes})
    assert content["step"] == 6
    assert config == dataclasses.replace(content["config"], **changes)
