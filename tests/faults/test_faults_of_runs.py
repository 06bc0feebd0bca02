"""What a run promises under faults: kills, torn files, full disks, two processes at once, signals, odd checkpoints."""
import errno
import fcntl
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import ranks
import train_gpt
from helpers import TRAINER, arguments, environment, refusal, started
from train_gpt import Config, ConfigError


def log_of(folder):
    return (folder / "log.txt").read_text().partition("===== END OF CODE =====\n")[2].splitlines()


EIGHT = {"steps": 8, "save_every": 2, "keep": 10}


@pytest.fixture(scope="session")
def whole_run(tiny, tmp_path_factory):
    """Eight steps with checkpoints at every second one."""
    run = ranks.train(tmp_path_factory.mktemp("whole"), {**tiny, **EIGHT, "run_id": "whole"})
    assert run.code == 0, run.stdout + run.stderr
    return run


@pytest.fixture
def killed(whole_run, tmp_path):
    """(The run's folder, its final loss, leave): leave(step) makes a copy of it what a kill after that step leaves."""
    folder = tmp_path / "logs" / "whole"
    shutil.copytree(whole_run.folder, folder)

    def leave(step):
        for path in folder.iterdir():
            if path.stem == "checkpoint" and step < 8 or path.name == "result.json" or (
                    path.stem.startswith("step_") and int(path.stem[5:]) > step):
                path.unlink()
        for name, mark in (("log.txt", f"step:{step}/8 train"), ("metrics.jsonl", f'{{"step": {step}, "train')):
            lines = (folder / name).read_text().splitlines(keepends=True)
            last = max(index for index, line in enumerate(lines) if line.startswith(mark))
            (folder / name).write_text("".join(lines[:last + 1]))
        return folder

    return folder, whole_run.result["val_loss"], leave


# ----- runs that were killed go on

def test_a_kill_during_the_final_validation_leaves_a_run_that_can_be_finished(killed, cli):
    whole, loss, leave = killed
    folder = leave(8)
    assert (folder / "checkpoint.pt").exists()
    run = cli(resume="whole")
    assert run.code == 0, run.stdout
    assert json.loads((folder / "result.json").read_text())["val_loss"] == loss
    assert "complete" in refusal(cli(resume="whole"))


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl"])
def test_a_torn_last_line_is_trimmed(name, killed, cli):
    whole, loss, leave = killed
    folder = leave(6)
    text = (folder / name).read_text()
    (folder / name).write_text(text[:-20])
    run = cli(resume="whole")
    assert run.code == 0, run.stdout
    assert json.loads((folder / "result.json").read_text())["val_loss"] == loss
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in metrics if "train_loss" in event][-2:] == [7, 8]
    assert all(line.startswith(("step:", "run:", "config:", "data:", "size:", "overrides:", "=====", "status:", "resumed:",
                                "comms:", "validity:", "final ", "note:")) for line in log_of(folder))


def test_the_next_start_closes_the_log_of_a_killed_run(killed, cli):
    whole, _, leave = killed
    folder = leave(6)
    assert cli(resume="whole").code == 0
    log = log_of(folder)
    at = next(index for index, line in enumerate(log) if line.startswith("resumed:whole step:6/8"))
    assert log[at - 1].startswith("status:error ended without a word")
    assert sum(line.startswith("status:") for line in log) == 2


def test_left_over_temporary_files_go_at_the_next_start(killed, cli):
    whole, _, leave = killed
    (leave(4) / "step_000006.pt.tmp").write_bytes(b"half")
    assert cli(resume="whole").code == 0
    assert not list(whole.glob("*.tmp"))


def test_a_run_that_was_killed_before_it_saved_anything_starts_again(killed, cli, tiny):
    whole, loss, leave = killed
    folder = leave(1)
    line = refusal(cli(resume="whole"))
    assert "no checkpoint" in line
    words = {**tiny, **EIGHT, "run_id": "whole"}
    assert "exists" in refusal(cli(**words))
    run = cli(**words, resume="auto")
    assert run.code == 0, run.stdout
    assert run.result["val_loss"] == loss and log_of(folder)[0].startswith("run:whole ")


# ----- --resume auto, --keep

def test_auto_starts_a_run_and_goes_on_with_it(killed, cli, tiny):
    whole, loss, leave = killed
    words = {**tiny, **EIGHT, "resume": "auto"}
    new = cli(**words, run_id="new")
    assert new.code == 0 and new.result["val_loss"] == loss
    leave(4)
    run = cli(**words, run_id="whole")
    assert run.code == 0 and run.result["val_loss"] == loss
    assert "resumed:whole step:4/8 world_size:1" in run.lines
    again = cli(**words, run_id="whole")  # it is complete: its end is worked out again
    assert again.code == 0 and again.result["val_loss"] == loss


def test_auto_wants_a_name_and_keeps_the_log_of_a_complete_run(killed, cli, tiny):
    assert "--run-id" in refusal(cli(**tiny, resume="auto"))
    whole, _, leave = killed
    before = (whole / "log.txt").read_bytes()
    for path in whole.glob("*.pt"):
        path.unlink()
    assert "exists" in refusal(cli(**{**tiny, "steps": 8, "run_id": "whole", "resume": "auto"}))
    assert (whole / "log.txt").read_bytes() == before


def test_the_newest_checkpoints_are_kept(tiny, cli):
    run = cli(**{**tiny, "steps": 8, "save_every": 1, "run_id": "kept"})
    assert sorted(path.name for path in run.folder.glob("*.pt")) == ["checkpoint.pt", "step_000006.pt", "step_000007.pt"]
    assert len(list(run.folder.glob("*.sha256"))) == 3


def damage(path, how):
    raw = bytearray(path.read_bytes())
    if how == "no sha256":
        path.with_suffix(".sha256").unlink()
    elif how == "empty sha256":
        path.with_suffix(".sha256").write_text("")
    elif how == "bytes that are no text":
        path.with_suffix(".sha256").write_bytes(b"\xff\xfe")
    elif how == "truncated":
        path.write_bytes(raw[:len(raw) // 2])
    else:
        raw[len(raw) // 3] ^= 1
        path.write_bytes(raw)


DAMAGES = ["no sha256", "empty sha256", "bytes that are no text", "truncated", "one bit"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(how, killed, cli):
    whole, loss, leave = killed
    folder = leave(6)
    damage(folder / "step_000006.pt", how)
    run = cli(resume="whole")
    assert run.code == 0, run.stdout
    assert "step_000006" in run.stderr and run.stderr.count("\n") == 1
    assert "resumed:whole step:4/8 world_size:1" in run.lines and run.code == 0
    assert json.loads((folder / "result.json").read_text())["val_loss"] == loss


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_alone_is_refused(how, killed, cli, tmp_path):
    whole, _, leave = killed
    damage(whole / "checkpoint.pt", how)
    line = refusal(cli(resume=str(whole / "checkpoint.pt")))
    assert "checkpoint.pt" in line and "sha256" in line


# ----- what a checkpoint holds

@pytest.mark.parametrize("part", ["model", "groups", "rng", "loader", "step", "config"])
def test_a_checkpoint_without_one_of_its_parts_is_refused(part, killed, cli):
    whole, _, leave = killed
    folder = leave(6)
    for path in folder.glob("*.pt"):
        content = torch.load(path, weights_only=True)
        del content[part]
        torch.save(content, path)
        path.with_suffix(".sha256").write_text(train_gpt.file_sha256(path))
    run = cli(resume="whole")
    assert run.code == 2, run.stdout
    assert len([line for line in run.lines if line.startswith("status:error ")]) == 1 and part in run.lines[-1]


@pytest.mark.parametrize("spoil", [
    lambda content: content["model"].update(mlp=content["model"]["mlp"][:1]),
    lambda content: content["model"].update(mlp="no tensor"),
    lambda content: content["groups"]["ngram_table"].update(second=torch.zeros(3)),
    lambda content: content["groups"]["matrices"].pop("mlp"),
    lambda content: content.update(step=-1), lambda content: content.update(step="2"),
    lambda content: content["config"].update(steps=2.5), lambda content: content["config"].update(data="\0"),
    lambda content: content.update(rng=torch.zeros(3)),
], ids=range(9))
def test_an_odd_checkpoint_is_refused_in_one_line(spoil, killed, cli):
    whole, _, leave = killed
    for path in leave(6).glob("*.pt"):
        content = torch.load(path, weights_only=True)
        spoil(content)
        torch.save(content, path)
        path.with_suffix(".sha256").write_text(train_gpt.file_sha256(path))
    run = cli(resume="whole")
    assert run.code == 2 and run.lines[-1].startswith("status:error "), run.stdout


def test_weights_that_are_not_finite_are_not_saved(tiny, cli, monkeypatch):
    step = train_gpt.Trainer.step

    def spoiled(self, number, *rest):
        result = step(self, number, *rest)
        if number == 3:
            self.model.mlp.data.fill_(float("nan"))
        return result

    monkeypatch.setattr(train_gpt, "warm_up", lambda trainer: None)
    monkeypatch.setattr(train_gpt.Trainer, "step", spoiled)
    run = cli(**{**tiny, "steps": 8, "save_every": 2, "log_every": 100, "run_id": "spoiled"})
    assert run.code == 1 and run.lines[-1].startswith("status:nan ") and "mlp" in run.lines[-1]
    assert "--resume" not in run.lines[-1]  # which would end in the same way
    assert [path.name for path in run.folder.glob("*.pt")] == ["step_000002.pt"]


# ----- two processes, one run

def test_a_run_is_written_by_one_process(killed, cli):
    whole, _, leave = killed
    folder = leave(6)
    with open(folder / "log.txt", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        before = (folder / "log.txt").read_bytes()
        run = cli(resume="whole")
        assert run.code == 2 and "another process writes this run" in run.lines[-1]
        assert (folder / "log.txt").read_bytes() == before
    assert cli(resume="whole").code == 0


def test_of_two_starts_at_once_one_goes_on(tiny, tmp_path):
    values = {**tiny, "steps": 30, "run_id": "both"}
    with started(tmp_path, values) as first, started(tmp_path, values) as second:
        said = [process.communicate(timeout=100)[0].splitlines()[-1] for process in (first, second)]
    assert sorted(process.returncode for process in (first, second)) == [0, 2], said
    loser = next(line for line in said if not line.startswith("status:ok "))
    assert "another process writes this run" in loser or "exists" in loser
    log = log_of(tmp_path / "logs" / "both")
    assert sum(line.startswith("run:") for line in log) == 1 and log[-1].startswith("status:ok ")
    assert sum(line.startswith("step:30/30 train") for line in log) == 1


@pytest.mark.parametrize("run_id", ["..", "../x", "/tmp/x", "a/b", ".", "", "-x", "a\nb", "x" * 200, "a b"])
def test_a_run_stays_in_its_folder(run_id):
    if run_id:
        with pytest.raises(ConfigError, match="run_id"):
            Config(run_id=run_id)


# ----- signals and consoles

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_a_save_is_an_interruption(number, tiny, tmp_path):
    def before():
        save = torch.save

        class Slow:  # the signal falls between two writes of torch's own
            def __init__(self, file):
                self.file, self.writes = file, itertools.count()

            def write(self, data):
                if next(self.writes) == 2:
                    os.kill(os.getpid(), number)
                return self.file.write(data)

            def __getattr__(self, name):
                return getattr(self.file, name)

        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        torch.save = lambda content, file: save(content, Slow(file))
    run = ranks.train(tmp_path, {**tiny, "save_every": 2, "run_id": "saving"}, before=before)
    assert run.code == 130 and run.lines[-1] == "status:interrupted" and run.stderr == "", run.stdout + run.stderr
    assert log_of(run.folder)[-1] == "status:interrupted" and not list(run.folder.glob("step*"))


def test_a_second_signal_changes_nothing(tiny, tmp_path):
    def before():
        close = train_gpt.Runtime.close

        def interrupted_close(self, failed=False):
            os.kill(os.getpid(), signal.SIGTERM)
            close(self, failed)
        train_gpt.Runtime.close = interrupted_close
        step = train_gpt.Trainer.step

        def interrupted_step(self, number, *rest):
            os.kill(os.getpid(), signal.SIGINT)
            return step(self, number, *rest)
        train_gpt.Trainer.step = interrupted_step
        train_gpt.warm_up = lambda trainer: None
    run = ranks.train(tmp_path, {**tiny, "run_id": "twice"}, before=before)
    assert run.code == 130 and run.stderr == "" and log_of(run.folder)[-1] == "status:interrupted"


@pytest.mark.parametrize("console", ["| head -2", ">&-"])
def test_a_run_goes_on_without_its_console(console, tiny, tmp_path):
    words = " ".join(f"'{word}'" for word in [sys.executable, TRAINER, *arguments({**tiny, "run_id": "piped"})])
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {words} {console}"], cwd=tmp_path, env=environment(),
                          capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert log_of(tmp_path / "logs" / "piped")[-1].startswith("status:ok ")


# ----- disks, folders, memory, clocks

@pytest.mark.parametrize("code, advice", [(errno.ENOSPC, "disk is not full"), (errno.EISDIR, "check the path")])
def test_a_file_that_cannot_be_written_is_one_line(code, advice, tiny, cli, monkeypatch):
    def failing(path, content):
        raise OSError(code, os.strerror(code), str(path))
    monkeypatch.setattr(train_gpt, "save_checkpoint", failing)
    run = cli(**{**tiny, "run_id": "full"})
    assert run.code == 1 and run.lines[-1].startswith("status:error [Errno") and advice in run.lines[-1]
    assert not (run.folder / "result.json").exists() and not list(run.folder.glob("*.tmp"))


def test_a_disk_that_is_full_while_logging_leaves_a_run_that_goes_on(killed, tmp_path, tiny):
    whole, loss, leave = killed
    folder = leave(6)

    def full():
        size = (folder / "log.txt").stat().st_size + 150
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    run = ranks.train(tmp_path, {"resume": "whole"}, before=full)
    assert run.code == 1 and run.lines[-1].startswith("status:error ") and "Traceback" not in run.stderr
    again = ranks.train(tmp_path, {"resume": "whole"})
    assert again.code == 0, again.stdout + again.stderr
    assert json.loads((folder / "result.json").read_text())["val_loss"] == loss


def test_memory_that_the_host_does_not_have_is_one_line(tiny, cli, monkeypatch):
    monkeypatch.setattr(train_gpt, "available_memory", lambda device: 2**60)
    monkeypatch.setattr(train_gpt.shutil, "disk_usage", lambda path: type("", (), {"free": 2**60}))
    run = cli(**{**tiny, "ngram_rows": 2**31 - 1, "model_dim": 65536, "run_id": "large"})
    assert run.code == 1 and run.lines[-1].startswith("status:oom ") and "--micro-batch-tokens" in run.lines[-1]


def test_a_clock_that_jumps_changes_nothing(tiny, cli, monkeypatch):
    expected = cli(**{**tiny, "run_id": "steady"}).result["val_loss"]
    jumps = itertools.cycle([0, 10**9, -10**9])
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + next(jumps))
    run = cli(**{**tiny, "run_id": "jumps"})
    assert run.code == 0 and run.result["val_loss"] == expected
    assert all(0 < event["train_time"] < 1e6 for event in run.metrics if event["step"])


# ----- command lines

@pytest.mark.parametrize("words", [
    ["-" * 5000, "1"], ["--" + "-" * 5000, "1"], ["--steps", "-" * 5000], ["--windows", "-" * 5000 + "1"],
    ["--micro-batches", "((0.0,4),(0.5,))"], ["--steps", "1" * 400], ["--adam-lr", "1" * 400],
    ["--momentum", f"({'1' * 400}, 0.9)"], ["--windows", f"(64, {'1' * 400})"], ["--windows", "(64, 0x" + "f" * 20000 + ")"],
    ["--steps", "100000000"], ["--num-layers", "10000000000", "--value-embedding-layers", "(0.5,)"],
    ["--ngram-orders", "(2.0,)"], ["--micro-batches", "1000000000"], ["--data", "a\nb"], ["--data", "a\x1b[2Jb"],
    ["--resume", "x" * 5000], ["--resume", "a\nb"], ["--run-of", "a\nb"], ["--matrix-update", "\n"],
    ["--micro-batches", str(tuple((i / 100, 4) for i in range(100)))], ["--mtp-weights", str((1.0,) * 5000)],
    ["--model-dim", "1000000000000"], ["--index-bits", "1" * 30], ["--workers", "1000000"],
], ids=lambda words: words[0][:20] + " " + words[-1][:20].encode("unicode_escape").decode())
def test_a_command_line_is_refused_at_once_in_one_printable_line(words, cli, tmp_path):
    began = time.monotonic()
    line = refusal(cli(*words))
    assert line.isprintable() and len(line) < 1100 and time.monotonic() - began < 5
    assert not list(tmp_path.iterdir())
