"""What a run promises under faults: kills, torn files, full disks, two processes at once, a signal
while it saves, odd checkpoints. Interruptions are in tests/trainer/test_loop.py."""

import fcntl
import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import ranks
import train_gpt
from helpers import (
    INDEX,
    TRAINER,
    arguments,
    environment,
    make_corpus,
    refusal,
    started,
    with_manifest,
)


def log_of(folder):
    return (folder / "log.txt").read_text().partition("===== END OF CODE =====\n")[2].splitlines()


def loss_of(folder):
    return json.loads((folder / "result.json").read_text())["val_loss"]


EIGHT = {"steps": 8, "save_every": 2}


@pytest.fixture(scope="session")
def whole_run(tiny, tmp_path_factory):
    """Eight steps, with checkpoints of steps 4, 6 and 8."""
    run = ranks.train(tmp_path_factory.mktemp("whole"), {**tiny, **EIGHT, "run_id": "whole"})
    assert run.code == 0, run.stdout + run.stderr
    return run


@pytest.fixture
def killed(whole_run, tmp_path):
    """(Its final loss, leave): leave(step) makes a folder of what a kill after that step leaves."""
    folder = tmp_path / "logs" / "whole"
    shutil.copytree(whole_run.folder, folder)

    def leave(step):
        (folder / "result.json").unlink()
        for path in folder.glob("*.[ps][th]*"):  # checkpoints, each with its sha256
            saved_at = 8 if path.stem == "checkpoint" else int(path.stem[5:])
            if saved_at > step:
                path.unlink()
        marks = {"log.txt": f"step:{step}/8 train", "metrics.jsonl": f'{{"step": {step}, "train'}
        for name, mark in marks.items():
            lines = (folder / name).read_text().splitlines(keepends=True)
            last = max(index for index, line in enumerate(lines) if line.startswith(mark))
            (folder / name).write_text("".join(lines[: last + 1]))
        return folder

    return whole_run.result["val_loss"], leave


# ----- runs that were killed go on


def test_a_kill_during_the_final_validation_leaves_a_run_that_can_be_finished(killed, cli):
    loss, leave = killed
    folder = leave(8)
    assert (folder / "checkpoint.pt").exists()
    run = cli(resume="whole")
    assert run.code == 0, run.stdout
    assert loss_of(folder) == loss and "complete" in refusal(cli(resume="whole"))


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl"])
def test_a_torn_last_line_is_trimmed_and_the_log_closed(name, killed, cli):
    loss, leave = killed
    folder = leave(6)
    text = (folder / name).read_text()
    (folder / name).write_text(text[:-20])
    (folder / "step_000008.pt.tmp").write_bytes(b"half")
    run = cli(resume="whole")
    assert run.code == 0, run.stdout
    assert loss_of(folder) == loss and not list(folder.glob("*.tmp"))
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if "train_loss" in event][-2:] == [7, 8]
    log = log_of(folder)
    known = "step run config data size overrides ===== status resumed comms validity final note"
    kinds = tuple(known.split())
    assert all(line.startswith(kinds) for line in log)
    at = next(index for index, line in enumerate(log) if line.startswith("resumed:whole step:6/8"))
    assert log[at - 1].startswith("status:error ended without a word")
    assert sum(line.startswith("status:") for line in log) == 2


def test_a_run_that_was_killed_before_it_saved_anything_starts_again(killed, cli, tiny):
    loss, leave = killed
    folder = leave(1)
    assert "no checkpoint" in refusal(cli(resume="whole"))
    before, words = (folder / "log.txt").read_bytes(), {**tiny, **EIGHT, "run_id": "whole"}
    refused = cli(**words)
    assert refused.code == 2 and (folder / "log.txt").read_bytes() == before
    assert "logs/whole exists; change --run-id, or --resume whole" in refused.lines[-1]
    run = cli(**words, resume="auto")
    assert run.code == 0, run.stdout
    assert run.result["val_loss"] == loss and log_of(folder)[0].startswith("run:whole ")


def test_auto_starts_a_run_and_goes_on_with_it(killed, cli, tiny):
    loss, leave = killed
    words = {**tiny, **EIGHT, "resume": "auto"}
    new = cli(**words, run_id="new")
    assert new.code == 0 and new.result["val_loss"] == loss
    leave(4)
    run = cli(**words, run_id="whole")
    assert run.code == 0 and run.result["val_loss"] == loss
    assert "resumed:whole step:4/8 world_size:1" in run.lines
    again = cli(**words, run_id="whole")  # it is complete: its end is worked out again
    assert again.code == 0 and again.result["val_loss"] == loss


def test_auto_keeps_the_log_of_a_complete_run(whole_run, cli, tiny, tmp_path):
    folder = tmp_path / "logs" / "whole"
    shutil.copytree(whole_run.folder, folder, ignore=shutil.ignore_patterns("*.pt"))
    before = (folder / "log.txt").read_bytes()
    run = cli(**{**tiny, "steps": 8, "run_id": "whole", "resume": "auto"})
    assert run.code == 2 and "exists" in run.lines[-1]
    assert (folder / "log.txt").read_bytes() == before


def test_the_newest_two_checkpoints_are_kept(tiny, cli):
    run = cli(**{**tiny, "steps": 5, "save_every": 1, "run_id": "kept"})
    stems = ["checkpoint", "step_000003", "step_000004"]
    assert sorted(path.stem for path in run.folder.glob("*.pt")) == stems
    assert sorted(path.stem for path in run.folder.glob("*.sha256")) == stems


def damage(path, how):
    raw, sha = bytearray(path.read_bytes()), path.with_suffix(".sha256")
    if how == "no sha256":
        sha.unlink()
    elif how == "empty sha256":
        sha.write_text("")
    elif how == "bytes that are no text":
        sha.write_bytes(b"\xff\xfe")
    elif how == "truncated":
        path.write_bytes(raw[: len(raw) // 2])
    else:
        raw[len(raw) // 3] ^= 1
        path.write_bytes(raw)


DAMAGES = ["no sha256", "empty sha256", "bytes that are no text", "truncated", "one bit"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(how, killed, cli):
    loss, leave = killed
    folder = leave(6)
    damage(folder / "step_000006.pt", how)
    config, _, content = train_gpt.resumed({"resume": "whole"})
    assert content["step"] == 4 and config.run_id == "whole"
    if how == "one bit":  # of the others, what was found is enough
        run = cli(resume="whole")
        assert run.code == 0 and loss_of(folder) == loss, run.stdout
        assert run.stderr.startswith("note: logs/whole/step_000006.pt: ")
        assert run.stderr.count("\n") == 1
        assert "resumed:whole step:4/8 world_size:1" in run.lines


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_alone_is_refused(how, whole_run, cli, tmp_path):
    for name in ("checkpoint.pt", "checkpoint.sha256"):
        shutil.copy(whole_run.folder / name, tmp_path / name)
    damage(tmp_path / "checkpoint.pt", how)
    line = refusal(cli(resume="checkpoint.pt"))
    assert "checkpoint.pt" in line and "sha256" in line


@pytest.mark.parametrize("part", ["model", "groups", "rng", "config", "rows"])
def test_a_checkpoint_without_one_of_its_parts_is_refused(part, whole_run, cli, tmp_path):
    path, content = tmp_path / "less.pt", whole_run.checkpoint()
    del content[part]
    torch.save(content, path)
    path.with_suffix(".sha256").write_text(train_gpt.file_sha256(path))
    run = cli(resume="less.pt")
    assert run.code == 2 and part in refusal(run) and not (tmp_path / "logs").exists()


@pytest.mark.parametrize("part", ["model.mlp", "matrices.mlp.momentum", "ngram_table.second"])
def test_weights_that_are_not_finite_are_not_saved(part, tiny, cli, monkeypatch):
    step = train_gpt.Trainer.step

    def spoiled(self, number, *rest):
        result = step(self, number, *rest)
        parts = {
            "model.mlp": self.model.mlp.data,
            "ngram_table.second": self.table.second,
            "matrices.mlp.momentum": self.optimizer.matrices.state["mlp"]["momentum"],
        }
        if number == 3:
            parts[part].fill_(float("nan"))
        return result

    monkeypatch.setattr(train_gpt, "warm_up", lambda trainer: None)
    monkeypatch.setattr(train_gpt.Trainer, "step", spoiled)
    run = cli(**{**tiny, **EIGHT, "log_every": 100, "run_id": "spoiled"})
    assert run.code == 1 and run.lines[-1].startswith("status:nan ") and part in run.lines[-1]
    assert "--resume" not in run.lines[-1]  # which would end in the same way
    assert [path.name for path in run.folder.glob("*.pt")] == ["step_000002.pt"]


# ----- two processes, one run


def test_a_run_is_written_by_one_process(killed, cli):
    folder = killed[1](6)
    with open(folder / "log.txt", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        before = (folder / "log.txt").read_bytes()
        run = cli(resume="whole")
        assert run.code == 2 and "another process writes this run" in run.lines[-1]
        assert (folder / "log.txt").read_bytes() == before
    assert cli(resume="whole").code == 0


@pytest.mark.slow
def test_of_two_starts_at_once_one_goes_on(tiny, tmp_path):
    values = {**tiny, "steps": 30, "run_id": "both"}
    with started(tmp_path, values) as first, started(tmp_path, values) as second:
        both = first, second
        said = [process.communicate(timeout=100)[0].splitlines()[-1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    (loser,) = [line for line in said if not line.startswith("status:ok ")]
    assert "another process writes this run" in loser or "exists" in loser
    log = log_of(tmp_path / "logs" / "both")
    assert sum(line.startswith("run:") for line in log) == 1
    assert log[-1].startswith("status:ok ")
    assert sum(line.startswith("step:30/30 train") for line in log) == 1


# ----- signals, consoles, locales


def test_a_signal_during_a_save_leaves_it_whole(tiny, tmp_path):
    """It falls between two writes of torch's own."""

    def before():
        class Signalled:
            def __init__(self, file):
                self.file, self.writes = file, itertools.count()

            def write(self, data):
                if next(self.writes) == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                return self.file.write(data)

            def __getattr__(self, name):
                return getattr(self.file, name)

        save = torch.save
        torch.save = lambda content, file: save(content, Signalled(file))

    run = ranks.train(tmp_path, {**tiny, "run_id": "saving"}, before=before)
    assert run.code == 130 and run.lines[-1] == "status:interrupted" == log_of(run.folder)[-1]
    assert train_gpt.load_checkpoint(run.folder / "checkpoint.pt")["step"] == 4
    assert not list(run.folder.glob("*.tmp")) and not (run.folder / "result.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("console", ["| head -2", ">&-"])
def test_a_run_goes_on_without_its_console(console, tiny, tmp_path):
    words = [sys.executable, TRAINER, *arguments({**tiny, "run_id": "piped"})]
    quoted = " ".join(f"'{word}'" for word in words)
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {quoted} {console}"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert log_of(tmp_path / "logs" / "piped")[-1].startswith("status:ok ")


@pytest.mark.slow
def test_a_locale_of_ascii_is_enough(tiny, tmp_path):
    script = """
import sys, train_gpt, sample
print(train_gpt.main(sys.argv[1:-1]), sample.main(sys.argv[-1].split()))
"""
    values = {**tiny, "run_id": "plain"}
    use = "--checkpoint logs/plain/checkpoint.pt --tokens 2 --prompt \u00e4"
    locale = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments(values), use],
        cwd=tmp_path,
        capture_output=True,
        env={**environment(), **locale},
        timeout=100,
    )
    said = done.stdout.decode("ascii").splitlines()
    assert done.returncode == 0 and done.stderr == b"" and said[-1] == "0 0", done.stderr
    assert said[-3].startswith("status:ok ") and said[-2].startswith("\\udcc3\\udca4"), said


# ----- disks, folders, corpora


NAMES = ["", "metrics.jsonl", "checkpoint.pt", "checkpoint.sha256", "result.json"]


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_in_the_way_of_a_run_is_named(name, tiny, cli, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt, "warm_up", lambda trainer: None)
    if name:
        (tmp_path / "logs" / "odd" / name).mkdir(parents=True)
    else:
        (tmp_path / "logs").write_text("no folder")
    run = cli(**{**tiny, "run_id": "odd"})
    assert run.code in (1, 2) and run.lines[-1].startswith("status:error "), run.stdout
    assert (name or "logs") in run.lines[-1]
    assert not name or not list(run.folder.glob("*.tmp"))


READ_ONLY = """
import json, os, sys, train_gpt
train_gpt.plot, train_gpt.warm_up = lambda folder: "", lambda trainer: None
for folder, words in json.loads(sys.argv[1]):
    os.chdir(folder)
    print("ended", train_gpt.main(words), flush=True)
"""


@pytest.mark.slow
def test_folders_that_cannot_be_written_to(killed, two_shards, tiny, tmp_path):
    """Of a file system that is mounted so, since permissions do not bind root. Nothing is ever
    written to a corpus."""
    if subprocess.run(["unshare", "-rm", "true"]).returncode:
        pytest.skip("this machine lends no file systems of one's own")
    folder = tmp_path / "read_only"
    shutil.copytree(killed[1](6), folder / "logs" / "whole")
    shutil.copytree(two_shards[0], folder / "corpus")
    values = {**tiny, **TWO_SHARDS, "data": str(folder / "corpus"), "run_id": "new"}
    calls = [
        (str(folder), arguments(values)),
        (str(folder), ["--resume", "whole"]),
        (str(tmp_path), arguments(values)),
    ]
    bind = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    script = [sys.executable, "-c", READ_ONLY, json.dumps(calls)]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", bind, str(folder), *script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert re.findall(r"ended (\d)", done.stdout) == ["1", "1", "0"], done.stdout + done.stderr
    new, resumed, elsewhere = (
        said.splitlines()[-1] for said in re.split(r"ended \d\n", done.stdout)[:3]
    )
    for line in (new, resumed):
        assert line.startswith("status:error [Errno 30] Read-only file system: 'logs"), line
    assert elsewhere.startswith("status:ok ") and f"val_loss:{two_shards[1]:.5f}" in elsewhere


def test_a_disk_that_is_full_while_logging_leaves_a_run_that_goes_on(killed, tmp_path, tiny):
    loss, leave = killed
    folder = leave(6)

    def full():
        size = (folder / "log.txt").stat().st_size + 150
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    run = ranks.train(tmp_path, {"resume": "whole"}, before=full)
    assert run.code == 1 and run.lines[-1].startswith("status:error ")
    assert "Traceback" not in run.stderr
    again = ranks.train(tmp_path, {"resume": "whole"})
    assert again.code == 0 and loss_of(folder) == loss, again.stdout + again.stderr


TWO_SHARDS = {**INDEX, "steps": 8, "save_every": 2}


@pytest.fixture(scope="session")
def two_shards(tiny, tmp_path_factory):
    """(A corpus, the final loss of a run on it, which opens the second shard on its way)."""
    folder = make_corpus(tmp_path_factory.mktemp("two") / "corpus", train_tokens=6000)
    values = {**tiny, **TWO_SHARDS, "data": str(folder), "run_id": "whole"}
    run = ranks.train(folder.parent, values)
    assert run.code == 0 and run.checkpoint()["loader"]["shard"] == 1, run.stdout
    return folder, run.result["val_loss"]


def test_a_shard_that_vanishes_during_a_run_is_named(two_shards, tiny, cli, tmp_path, monkeypatch):
    """It is read when its turn comes. The run goes on when it is back."""
    folder, step = shutil.copytree(two_shards[0], tmp_path / "corpus"), train_gpt.Trainer.step
    second = folder / "tiny_train_000001.bin"
    kept = second.read_bytes()

    def vanishing_step(self, *rest):
        second.unlink(missing_ok=True)
        return step(self, *rest)

    monkeypatch.setattr(train_gpt, "warm_up", lambda trainer: None)
    monkeypatch.setattr(train_gpt, "PREFETCH", 1)
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt.Trainer, "step", vanishing_step)
        run = cli(**{**tiny, **TWO_SHARDS, "data": str(folder), "run_id": "gone"})
    assert run.code == 1 and second.name in run.lines[-1] == log_of(run.folder)[-1]
    assert "shards hold" in refusal(cli(resume="gone"))
    second.write_bytes(kept)
    assert cli(resume="gone").code == 0 and run.result["val_loss"] == two_shards[1]


def test_shards_that_join_a_corpus_during_a_run_change_nothing(tiny, cli, tmp_path, monkeypatch):
    folder, step = make_corpus(tmp_path / "corpus"), train_gpt.Trainer.step

    def growing_step(self, *rest):
        shutil.copy(folder / "tiny_train_000001.bin", folder / "tiny_train_000002.bin")
        with_manifest(folder)
        return step(self, *rest)

    monkeypatch.setattr(train_gpt.Trainer, "step", growing_step)
    assert cli(**{**tiny, "data": str(folder), "run_id": "grows"}).code == 0
