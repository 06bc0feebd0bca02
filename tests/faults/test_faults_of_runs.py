"""What a run promises under faults: kills, torn files, full disks, two processes at once, signals, odd checkpoints."""

import copy
import errno
import fcntl
import functools
import itertools
import json
import os
import re
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
from helpers import (
    INDEX,
    TRAINER,
    arguments,
    assert_bitwise,
    environment,
    make_corpus,
    make_trainer,
    refusal,
    started,
    with_manifest,
)
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
            if (
                path.stem == "checkpoint"
                and step < 8
                or path.name == "result.json"
                or (path.stem.startswith("step_") and int(path.stem[5:]) > step)
            ):
                path.unlink()
        for name, mark in (
            ("log.txt", f"step:{step}/8 train"),
            ("metrics.jsonl", f'{{"step": {step}, "train'),
        ):
            lines = (folder / name).read_text().splitlines(keepends=True)
            last = max(index for index, line in enumerate(lines) if line.startswith(mark))
            (folder / name).write_text("".join(lines[: last + 1]))
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
    assert all(
        line.startswith(
            (
                "step:",
                "run:",
                "config:",
                "data:",
                "size:",
                "overrides:",
                "=====",
                "status:",
                "resumed:",
                "comms:",
                "validity:",
                "final ",
                "note:",
            )
        )
        for line in log_of(folder)
    )


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
    assert sorted(path.name for path in run.folder.glob("*.pt")) == [
        "checkpoint.pt",
        "step_000006.pt",
        "step_000007.pt",
    ]
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
        path.write_bytes(raw[: len(raw) // 2])
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
    assert (
        len([line for line in run.lines if line.startswith("status:error ")]) == 1
        and part in run.lines[-1]
    )


def parts_of(tree, path=()):
    """(keys, part) of all that is in nested dicts."""
    for key, inside in tree.items():
        yield (*path, key), inside
        if isinstance(inside, dict):
            yield from parts_of(inside, (*path, key))


def spoiled(part):
    """What may stand in a checkpoint in the place of one of its parts, by what is wrong with it."""
    if isinstance(part, dict):
        return {"empty": {}, "more": {**part, "more": 1}, "a list": list(part)}
    if not isinstance(part, torch.Tensor):
        return {
            "another type": 3 if type(part) is str else "x",
            **({"inf": float("inf")} if type(part) is float else {}),
        }
    odd = {
        "its type": part.to(torch.float64),
        "one more axis": part[None],
        "one more row": torch.cat([part, part[:1]]),
    }
    if part.is_floating_point():
        odd["a leaf"] = part.clone().requires_grad_()
    if part.is_floating_point() and part.numel():
        odd |= {what: part.clone() for what in ("nan", "-inf")}
        for what in ("nan", "-inf"):
            odd[what].view(-1)[-1] = float(what)
    return odd


@pytest.mark.parametrize(
    "changes", [{}, {"dtype": "bfloat16", "matrix_update": "soap"}], ids=["muon", "soap"]
)
def test_every_part_of_a_checkpoint_is_looked_at(changes, tmp_path):
    trainer, path = make_trainer(**changes, index_orders=(4,)), tmp_path / "odd.pt"
    content = train_gpt.checkpoint_content(trainer, 2, train_gpt.LOADER_START, 1.0)
    train_gpt.check_parts(content, content)
    tried = 0
    for keys, part in [*parts_of(content)]:
        for how, odd in {"missing": None, **spoiled(part)}.items():
            changed = copy.deepcopy(content)
            holder = functools.reduce(dict.__getitem__, keys[:-1], changed)
            holder[keys[-1]] = odd
            if how == "missing":
                del holder[keys[-1]]
            with pytest.raises(
                (ConfigError, FloatingPointError), match=re.escape(".".join(keys))
            ) as refused:
                train_gpt.check_parts(changed, content)
                pytest.fail(f"{keys} {how}")
            assert str(refused.value).isprintable()
            tried += 1
    assert tried > 250


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content["model"].update(mlp=content["model"]["mlp"][:1]),
        lambda content: content["model"].update(mlp="no tensor"),
        lambda content: content["groups"]["ngram_table"].update(second=torch.zeros(3)),
        lambda content: content["groups"]["matrices"].pop("mlp"),
        lambda content: content.update(step=-1),
        lambda content: content.update(step="2"),
        lambda content: content["config"].update(steps=2.5),
        lambda content: content["config"].update(data="\0"),
        lambda content: content.update(rng=torch.zeros(3)),
        lambda content: content.update(rng=torch.zeros_like(content["rng"])),
        lambda content: content["loader"].update(shard=10**20),
        lambda content: content["loader"].update(piece=10**9),
        lambda content: content["loader"].update(offset=-1),
        lambda content: content["loader"].update(offset=10**9),
        lambda content: content.update(train_seconds=-1.0),
        lambda content: content.update(data="none"),
    ],
    ids=range(16),
)
def test_an_odd_checkpoint_is_refused_in_one_line_and_changes_nothing(
    spoil, killed, cli, monkeypatch
):
    whole, _, leave = killed
    for path in leave(6).glob("*.pt"):
        content = torch.load(path, weights_only=True)
        spoil(content)
        torch.save(content, path)
        path.with_suffix(".sha256").write_text(train_gpt.file_sha256(path))
    built, trainer_of = [], train_gpt.Trainer

    def recorded(config, runtime):
        trainer = trainer_of(config, runtime)
        built.append((trainer, train_gpt.state_digest(trainer)))
        return trainer

    monkeypatch.setattr(train_gpt, "Trainer", recorded)
    log = (whole / "log.txt").read_bytes()
    run = cli(resume="whole")
    assert run.code == 2 and run.lines == [
        line for line in run.lines if line.startswith("status:error ")
    ], run.stdout
    assert len(run.lines) == 1 and (whole / "log.txt").read_bytes() == log
    assert all(train_gpt.state_digest(trainer) == before for trainer, before in built)


@pytest.mark.parametrize("part", ["model.mlp", "matrices.mlp.momentum", "ngram_table.second"])
def test_weights_that_are_not_finite_are_not_saved(part, tiny, cli, monkeypatch):
    step = train_gpt.Trainer.step

    def spoiled(self, number, *rest):
        result = step(self, number, *rest)
        if number == 3:
            parts = {
                "model.mlp": self.model.mlp.data,
                "ngram_table.second": self.table.second,
                "matrices.mlp.momentum": self.optimizer.matrices.state["mlp"]["momentum"],
            }
            parts[part].fill_(float("nan"))
        return result

    monkeypatch.setattr(train_gpt, "warm_up", lambda trainer: None)
    monkeypatch.setattr(train_gpt.Trainer, "step", spoiled)
    run = cli(**{**tiny, "steps": 8, "save_every": 2, "log_every": 100, "run_id": "spoiled"})
    assert run.code == 1 and run.lines[-1].startswith("status:nan ") and part in run.lines[-1]
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


@pytest.mark.parametrize(
    "run_id", ["..", "../x", "/tmp/x", "a/b", ".", "", "-x", "a\nb", "x" * 200, "a b"]
)
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

    run = ranks.train(tmp_path, {**tiny, "run_id": "saving"}, before=before)
    assert run.code == 130 and run.lines[-1] == "status:interrupted" and run.stderr == "", (
        run.stdout + run.stderr
    )
    assert log_of(run.folder)[-1] == "status:interrupted"
    assert sorted(path.name for path in run.folder.iterdir()) == ["log.txt", "metrics.jsonl"]


def signal_in(monkeypatch, at, name="step", number=signal.SIGTERM, times=1):
    """Send this process signals while the trainer works at a step, which then ends as if nothing had happened."""
    honest = getattr(train_gpt.Trainer, name)

    def signalled(self, step, *rest):
        if step == at and os.path.exists("logs"):  # the warm-up is over
            for _ in range(times):
                os.kill(os.getpid(), number)
        return honest(self, step, *rest)

    monkeypatch.setattr(train_gpt.Trainer, name, signalled)
    monkeypatch.setattr(train_gpt, "warm_up", lambda trainer: None)


@pytest.mark.parametrize(
    "at, number", [(0, signal.SIGINT), (4, signal.SIGTERM), (4, signal.SIGHUP), (7, signal.SIGTERM)]
)
def test_a_run_that_saves_is_saved_at_an_interruption(
    at, number, whole_run, tiny, cli, monkeypatch
):
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with monkeypatch.context() as patch:
        signal_in(patch, at, number=number)
        run = cli(**{**tiny, **EIGHT, "save_every": 100, "run_id": "whole"})
    signal.signal(signal.SIGHUP, former)
    assert run.code == 130 and run.lines[-1] == "status:interrupted" == log_of(run.folder)[-1], (
        run.stdout
    )
    saved = {0: "step_000001.pt", 4: "step_000005.pt", 7: "checkpoint.pt"}[at]
    assert [path.name for path in run.folder.glob("*.pt")] == [saved]
    again = cli(resume="whole")
    run.code = again.code
    assert again.code == 0 and run.result["val_loss"] == whole_run.result["val_loss"], again.stdout
    assert run.train_losses == whole_run.train_losses
    for part in ("model", "groups", "loader", "rng"):
        assert_bitwise(run.checkpoint()[part], whole_run.checkpoint()[part], part)


def test_an_interruption_waits_for_gradients_that_are_summed_up(tiny, cli, monkeypatch):
    values = {**tiny, "steps": 8, "save_every": 100, "adam_every": 4}
    whole = cli(**{**values, "run_id": "whole"})
    for at, saved in ((1, "step_000004.pt"), (4, "checkpoint.pt")):
        with monkeypatch.context() as patch:
            signal_in(patch, at)
            run = cli(**{**values, "run_id": f"at{at}"})
        assert run.code == 130 and [path.name for path in run.folder.glob("*.pt")] == [saved], (
            run.stdout
        )
        assert (
            cli(resume=f"at{at}").code == 0 and run.result["val_loss"] == whole.result["val_loss"]
        )


@pytest.mark.parametrize(
    "name, times, save_every", [("step", 1, 0), ("step", 2, 100), ("evaluate", 2, 100)]
)
def test_a_second_signal_or_one_to_a_run_that_does_not_save_ends_it_now(
    name, times, save_every, tiny, cli, monkeypatch
):
    signal_in(monkeypatch, 4, name, times=times)
    run = cli(**{**tiny, **EIGHT, "val_every": 4, "save_every": save_every, "run_id": "now"})
    assert (
        run.code == 130
        and run.lines[-1] == "status:interrupted"
        and not list(run.folder.glob("*.pt"))
    )
    assert max(event["step"] for event in run.metrics) == 4


def test_a_save_at_an_interruption_that_fails_is_told(tiny, cli, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    close = train_gpt.Runtime.close

    def interrupted_close(self, failed=False):
        os.kill(os.getpid(), signal.SIGTERM)  # which nobody waits for any more
        close(self, failed)

    signal_in(monkeypatch, 4)
    monkeypatch.setattr(train_gpt, "save_checkpoint", full)
    monkeypatch.setattr(train_gpt.Runtime, "close", interrupted_close)
    run = cli(**{**tiny, **EIGHT, "save_every": 100, "run_id": "full"})
    assert (
        run.code == 1
        and run.lines[-1].startswith("status:error [Errno 28]")
        and "step_000005" in run.lines[-1]
    )


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


@pytest.mark.parametrize(
    "error, status",
    [
        (ConfigError("broken"), (2, "status:error broken")),
        (
            RuntimeError("Connection closed by peer"),
            (1, "status:error RuntimeError: Connection closed by peer"),
        ),
    ],
)
@pytest.mark.parametrize("saves", [False, True])
def test_a_signal_at_any_moment_of_an_error_leaves_a_status(
    error, status, saves, monkeypatch, capsys
):
    """One run for each operation of the interpreter between the error and the end, before which the signal comes."""
    runtime, seen, left = train_gpt.Runtime("cpu"), [], None

    def fail(*words):  # in place of the run; the operations are counted from here on
        nonlocal left
        left = len(seen) + 1
        if saves:
            train_gpt.SAVES.set()
        raise error

    def trace(frame, event, word):
        nonlocal left
        if frame.f_code is not train_gpt.train.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and left:
            left -= 1
            if not left:
                train_gpt.interrupt(signal.SIGTERM, frame)
        return trace

    monkeypatch.setattr(train_gpt, "open_run", fail)
    while not left:  # else the run has ended before its moment
        left = None
        train_gpt.INTERRUPTED.clear(), train_gpt.SAVES.clear()
        sys.settrace(trace)
        try:
            code = train_gpt.train(Config(), {}, runtime)
        except (
            RuntimeError,
            KeyboardInterrupt,
        ) as raised:  # an error that nobody knows keeps its traceback
            code = 1 if raised is error else None
        finally:
            sys.settrace(None)
        seen.append(
            (
                code,
                *[
                    line
                    for line in capsys.readouterr().out.splitlines()
                    if line.startswith("status:")
                ],
            )
        )
    assert len(seen) > 50 and set(seen) == {status, (130, "status:interrupted")}


@pytest.mark.parametrize("console", ["| head -2", ">&-"])
def test_a_run_goes_on_without_its_console(console, tiny, tmp_path):
    words = " ".join(
        f"'{word}'" for word in [sys.executable, TRAINER, *arguments({**tiny, "run_id": "piped"})]
    )
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words} {console}"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert log_of(tmp_path / "logs" / "piped")[-1].startswith("status:ok ")


def test_a_locale_of_ascii_is_enough(tiny, tmp_path):
    script = "import sys, train_gpt, sample; print(train_gpt.main(sys.argv[1:-1]), sample.main(sys.argv[-1].split()))"
    values, use = (
        {**tiny, "run_id": "plain"},
        "--checkpoint logs/plain/checkpoint.pt --tokens 2 --prompt \u00e4",
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments(values), use],
        cwd=tmp_path,
        capture_output=True,
        env={**environment(), "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
        timeout=100,
    )
    said = done.stdout.decode("ascii").splitlines()
    assert done.returncode == 0 and done.stderr == b"" and said[-1] == "0 0", done.stderr
    assert said[-3].startswith("status:ok ") and said[-2].startswith("\\udcc3\\udca4"), said


# ----- disks, folders, memory, clocks


@pytest.mark.parametrize(
    "code, advice", [(errno.ENOSPC, "disk is not full"), (errno.EISDIR, "check the path")]
)
def test_a_file_that_cannot_be_written_is_one_line(code, advice, tiny, cli, monkeypatch):
    def failing(path, content):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(train_gpt, "save_checkpoint", failing)
    run = cli(**{**tiny, "run_id": "full"})
    assert (
        run.code == 1
        and run.lines[-1].startswith("status:error [Errno")
        and advice in run.lines[-1]
    )
    assert not (run.folder / "result.json").exists() and not list(run.folder.glob("*.tmp"))


@pytest.mark.parametrize(
    "name", ["", "metrics.jsonl", "checkpoint.pt", "checkpoint.sha256", "result.json"]
)
def test_what_stands_in_the_way_of_a_run_is_named(name, tiny, cli, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt, "warm_up", lambda trainer: None)
    if name:
        (tmp_path / "logs" / "odd" / name).mkdir(parents=True)
    else:
        (tmp_path / "logs").write_text("no folder")
    run = cli(**{**tiny, "run_id": "odd"})
    assert (
        run.code in (1, 2)
        and run.lines[-1].startswith("status:error ")
        and (name or "logs") in run.lines[-1]
    ), run.stdout
    assert not name or not list(run.folder.glob("*.tmp"))


READ_ONLY = """
import json, os, sys, train_gpt
train_gpt.plot, train_gpt.warm_up = lambda folder: "", lambda trainer: None
for folder, words in json.loads(sys.argv[1]):
    os.chdir(folder)
    print("ended", train_gpt.main(words), flush=True)
"""


def test_folders_that_cannot_be_written_to(killed, two_shards, tiny, tmp_path):
    """Of a file system that is mounted so, since permissions do not bind root. Nothing is ever written to a corpus."""
    if subprocess.run(["unshare", "-rm", "true"]).returncode:
        pytest.skip("this machine lends no file systems of one's own")
    leave, folder = killed[2], tmp_path / "read_only"
    shutil.copytree(leave(6), folder / "logs" / "whole")
    shutil.copytree(two_shards[0], folder / "corpus")
    values = {**tiny, **TWO_SHARDS, "data": str(folder / "corpus"), "run_id": "new"}
    calls = [
        (str(folder), arguments(values)),
        (str(folder), ["--resume", "whole"]),
        (str(tmp_path), arguments(values)),
    ]
    bind = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    done = subprocess.run(
        [
            "unshare",
            "-rm",
            "sh",
            "-c",
            bind,
            str(folder),
            sys.executable,
            "-c",
            READ_ONLY,
            json.dumps(calls),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    new, resumed, elsewhere = (
        said.splitlines() for said in re.split(r"ended \d\n", done.stdout)[:3]
    )
    assert re.findall(r"ended (\d)", done.stdout) == ["1", "1", "0"] and done.stderr == "", (
        done.stdout + done.stderr
    )
    for said in (new, resumed):
        assert len(said) == 1 and said[0].startswith(
            "status:error [Errno 30] Read-only file system: 'logs"
        ), said
    assert (
        elsewhere[-1].startswith("status:ok ") and f"val_loss:{two_shards[1]:.5f}" in elsewhere[-1]
    )


def test_a_disk_that_is_full_while_logging_leaves_a_run_that_goes_on(killed, tmp_path, tiny):
    whole, loss, leave = killed
    folder = leave(6)

    def full():
        size = (folder / "log.txt").stat().st_size + 150
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )

    run = ranks.train(tmp_path, {"resume": "whole"}, before=full)
    assert (
        run.code == 1
        and run.lines[-1].startswith("status:error ")
        and "Traceback" not in run.stderr
    )
    again = ranks.train(tmp_path, {"resume": "whole"})
    assert again.code == 0, again.stdout + again.stderr
    assert json.loads((folder / "result.json").read_text())["val_loss"] == loss


def cut_short(path):
    os.truncate(path, 1500)


def written_to(path):
    with open(path, "r+b") as file:
        file.seek(5000)
        file.write(b"0123456789")


def replaced(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[:-100] + b"\0" * 100)
    other.replace(path)


TWO_SHARDS = {**INDEX, "steps": 8, "save_every": 2}


@pytest.fixture(scope="session")
def two_shards(tiny, tmp_path_factory):
    """(A corpus, the final loss of a run on it, which opens the second shard on its way)."""
    folder = make_corpus(tmp_path_factory.mktemp("two") / "corpus", train_tokens=6000)
    run = ranks.train(folder.parent, {**tiny, **TWO_SHARDS, "data": str(folder), "run_id": "whole"})
    assert run.code == 0 and run.checkpoint()["loader"]["shard"] == 1, run.stdout
    return folder, run.result["val_loss"]


TRAIN, SECOND, VAL = "tiny_train_000000.bin", "tiny_train_000001.bin", "tiny_val_000000.bin"


@pytest.mark.parametrize(
    "change, shard, at, manifest",
    [
        *(
            (change, shard, 0, True)
            for change in (cut_short, written_to, os.unlink)
            for shard in (SECOND, VAL)
        ),
        (replaced, SECOND, 0, True),
        (written_to, SECOND, 0, False),
        (written_to, TRAIN, 7, True),
        (os.unlink, TRAIN, 7, False),
    ],
    ids=lambda it: str(getattr(it, "__name__", it)),
)
def test_a_run_whose_shards_change_does_not_end_well(
    change, shard, at, manifest, two_shards, tiny, cli, tmp_path, monkeypatch
):
    """Whether it opens the shard later, four steps on, or read it before; nor in a signal, as where a file is mapped and cut short."""
    folder, step = shutil.copytree(two_shards[0], tmp_path / "corpus"), train_gpt.Trainer.step
    if not manifest:
        (folder / "manifest.json").unlink()
    kept = (folder / shard).read_bytes()

    def changing_step(self, number, *rest):
        if number == at:
            change(folder / shard)
        return step(self, number, *rest)

    monkeypatch.setattr(train_gpt, "warm_up", lambda trainer: None)
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt.Trainer, "step", changing_step)
        run = cli(**{**tiny, **TWO_SHARDS, "data": str(folder), "run_id": "changed"})
    assert (
        run.code in (1, 2) and run.lines[-1].startswith("status:error ") and shard in run.lines[-1]
    ), run.stdout
    assert log_of(run.folder)[-1] == run.lines[-1] and not (run.folder / "result.json").exists()
    if change == os.unlink:
        assert "status:error" in cli(resume="changed").lines[-1]
    (folder / shard).write_bytes(kept)
    again = cli(resume="changed")
    assert again.code == 0, again.stdout
    assert run.result["val_loss"] == two_shards[1]


def test_shards_that_join_a_corpus_during_a_run_change_nothing(tiny, cli, tmp_path, monkeypatch):
    folder, step = make_corpus(tmp_path / "corpus"), train_gpt.Trainer.step

    def growing_step(self, *rest):
        shutil.copy(folder / "tiny_train_000001.bin", folder / "tiny_train_000002.bin")
        with_manifest(folder)
        return step(self, *rest)

    monkeypatch.setattr(train_gpt.Trainer, "step", growing_step)
    assert cli(**{**tiny, "data": str(folder), "run_id": "grows"}).code == 0


def test_memory_that_the_host_does_not_have_is_one_line(tiny, cli, monkeypatch):
    monkeypatch.setattr(train_gpt, "available_memory", lambda device: 2**60)
    monkeypatch.setattr(train_gpt.shutil, "disk_usage", lambda path: type("", (), {"free": 2**60}))
    run = cli(**{**tiny, "ngram_rows": 2**31 - 1, "model_dim": 65536, "run_id": "large"})
    assert (
        run.code == 1
        and run.lines[-1].startswith("status:oom ")
        and "--micro-batch-tokens" in run.lines[-1]
    )


def test_a_clock_that_jumps_changes_nothing(tiny, cli, monkeypatch):
    expected = cli(**{**tiny, "run_id": "steady"}).result["val_loss"]
    jumps = itertools.cycle([0, 10**9, -(10**9)])
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + next(jumps))
    run = cli(**{**tiny, "run_id": "jumps"})
    assert run.code == 0 and run.result["val_loss"] == expected
    assert all(0 < event["train_time"] < 1e6 for event in run.metrics if event["step"])


# ----- command lines


@pytest.mark.parametrize(
    "words",
    [
        ["-" * 5000, "1"],
        ["--" + "-" * 5000, "1"],
        ["--steps", "-" * 5000],
        ["--windows", "-" * 5000 + "1"],
        ["--micro-batches", "((0.0,4),(0.5,))"],
        ["--steps", "1" * 400],
        ["--adam-lr", "1" * 400],
        ["--momentum", f"({'1' * 400}, 0.9)"],
        ["--windows", f"(64, {'1' * 400})"],
        ["--windows", "(64, 0x" + "f" * 20000 + ")"],
        ["--steps", "100000000"],
        ["--num-layers", "10000000000", "--value-embedding-layers", "(0.5,)"],
        ["--ngram-orders", "(2.0,)"],
        ["--micro-batches", "1000000000"],
        ["--data", "a\nb"],
        ["--data", "a\x1b[2Jb"],
        ["--resume", "x" * 5000],
        ["--resume", "a\nb"],
        ["--run-of", "a\nb"],
        ["--matrix-update", "\n"],
        ["--micro-batches", str(tuple((i / 100, 4) for i in range(100)))],
        ["--mtp-weights", str((1.0,) * 5000)],
        ["--model-dim", "1000000000000"],
        ["--index-bits", "1" * 30],
        ["--workers", "1000000"],
    ],
    ids=lambda words: words[0][:20] + " " + words[-1][:20].encode("unicode_escape").decode(),
)
def test_a_command_line_is_refused_at_once_in_one_printable_line(words, cli, tmp_path):
    began = time.process_time()
    line = refusal(cli(*words))
    assert line.isprintable() and len(line) < 1100 and time.process_time() - began < 5
    assert not list(tmp_path.iterdir())
