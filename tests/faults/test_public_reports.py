"""Kinds of faults that public reports of other trainers tell of: numbers of a resumed run, a disk
without room, a signal that nobody hears, a run named by its folder."""

import os
import re
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import ranks
import train_gpt
from helpers import refusal

# ----- numbers of a resumed run


@pytest.mark.parametrize("step", [10, 20])
def test_sums_of_a_resumed_run_are_those_of_the_whole_run(step, rich_run_of, tmp_path):
    """A kill after step 20 falls into the gates, and then no step is left."""
    whole = rich_run_of(2)
    folder = tmp_path / "logs" / "rich"
    left_out = shutil.ignore_patterns(*["checkpoint.*"] * (step == 10))
    shutil.copytree(whole.folder, folder, ignore=left_out)
    run = ranks.train(tmp_path, {"resume": "rich"}, world_size=2)
    assert run.code == 0, run.stdout + run.stderr
    run.folder = folder
    saved = whole.checkpoint(f"step_{step:06d}.pt" if step == 10 else "checkpoint.pt")
    cpu_time = int(run.result["cpu_time"].removesuffix("ms")) / 1000
    assert cpu_time + 1e-3 > saved["seconds"][1] > 0
    final = [line for line in run.log if line.startswith("final ")][-1]
    assert "MiB since resume tokens_per_s:" in final


# ----- the disk


def test_a_disk_that_is_not_there_is_told(tiny, cli, tmp_path):
    (tmp_path / "logs").symlink_to(tmp_path / "unmounted")
    line = refusal(cli("--check", **tiny))
    assert "logs: is no folder, or a link to none; mount its disk" in line


def test_room_is_asked_for_checkpoints_that_are_not_there(tiny, cli, tmp_path, monkeypatch):
    """A run that saves on the way keeps two of them while it writes the next."""
    monkeypatch.setattr(train_gpt.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    folder = tmp_path / "logs" / "run"
    folder.mkdir(parents=True)

    def needed(save_every):
        values = {**tiny, "ngram_rows": 2**20, "save_every": save_every, "run_id": "run"}
        return float(re.search("take (.*) GiB at", refusal(cli("--check", **values)))[1])

    one = needed(save_every=0)
    assert one > 0.1
    for held in range(3):
        assert needed(save_every=2) == pytest.approx((3 - held) * one, rel=0.1)
        (folder / f"step_{held:06d}.pt").touch()


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_result_comes_before_a_failed_write_is_told(world_size, tiny, tmp_path):
    def before():
        def save(content, file):
            if content["step"] == 4:
                raise OSError(28, "No space left on device")
            honest(content, file)

        honest, torch.save = torch.save, save

    values = {**tiny, "save_every": 2, "run_id": "full"}
    run = ranks.train(tmp_path, values, world_size=world_size, before=before)
    assert run.code == 1 and run.log[-1] in run.lines
    assert run.log[-1].startswith("status:error ") and "checkpoint.pt: not written" in run.log[-1]
    assert "No space left" in run.log[-1] and "rank 1" not in run.stderr
    assert float(run.result["val_loss"]) == run.val_losses[4]
    assert [path.name for path in run.folder.glob("*.pt")] == ["step_000002.pt"]


# ----- signals


def test_a_second_signal_is_heard_in_the_middle_of_a_collective(tiny, tmp_path, monkeypatch):
    """Python's own handlers wait until the call that waits for another rank returns."""

    def signal_twice():
        for pause in (0.5, 1.5):
            time.sleep(pause)
            os.kill(os.getpid(), signal.SIGTERM)

    def before():
        ranks.acting(lambda: time.sleep(90), 2, rank=1)()
        ranks.acting(threading.Thread(target=signal_twice).start, 2)()

    monkeypatch.setattr(ranks, "LAST_SECONDS", 1)
    began = time.monotonic()
    run = ranks.train(tmp_path, {**tiny, "run_id": "waits"}, world_size=2, before=before)
    assert run.code == 128 + signal.SIGTERM and time.monotonic() - began < 60
    assert "interrupted: ends after the step at hand" in run.stderr


# ----- variables


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "two"},
        {"LOCAL_RANK": "x"},
        {"RANK": "0", "WORLD_SIZE": ""},
    ],
    ids=str,
)
def test_half_of_a_launcher_s_variables_is_told(variables, tiny, cli, monkeypatch):
    """Clusters set some of them for other programs."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert "unset RANK, LOCAL_RANK and WORLD_SIZE" in refusal(cli(**tiny))


# ----- folders


def test_a_run_is_resumed_by_its_folder(tiny, cli, tmp_path):
    cli(**tiny, run_id="named")
    for name in ("logs/named", str(tmp_path / "logs/named"), "logs/named/checkpoint.pt"):
        assert cli(resume=name).code == 0


def test_a_dot_file_is_no_checkpoint(tiny, cli, tmp_path):
    folder = tmp_path / "logs" / "new"
    folder.mkdir(parents=True)
    (folder / "._checkpoint.pt").write_bytes(b"Mac OS X")
    assert cli(**tiny, run_id="new", resume="auto").code == 0
