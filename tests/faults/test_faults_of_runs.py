"""What a run promises under faults from outside: kills, signals, other processes, disks, corpora,
ranks, launchers and nodes. Checkpoints are in trainer/test_checkpoint.py, more of signals is in
trainer/test_loop.py."""

import contextlib
import datetime
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import ranks
import train_gpt
from helpers import Run, assert_same_end, launched, make_corpus, refusal


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_was_killed(rich, rich_run_of, tmp_path):
    values = {**rich, "save_every": 4, "run_id": "again", "resume": "auto"}
    folder, words = tmp_path / "logs" / "again", ("--nproc-per-node=2", "--max-restarts=2")
    with launched(tmp_path, values, "--standalone", *words) as process:
        log = folder / "log.txt"
        while process.poll() is None and not (log.exists() and "\nstep:9/" in log.read_text()):
            time.sleep(0.02)
        found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True)
        os.kill(int(found.stdout.split()[1]), signal.SIGKILL)
        out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    run = Run(process.returncode, out, "", folder)
    assert_same_end(run, rich_run_of(2))
    resumed = run.log.index("resumed:again step:8/20 world_size:2")
    assert run.log[resumed - 1].startswith("status:") and run.log[-1].startswith("status:ok ")


# ----- ranks and nodes


@pytest.mark.parametrize("rank", [0, 1])
def test_where_a_rank_dies_the_others_end(rank, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "OWN_SECONDS", 60)
    values = {**tiny, "steps": 100, "micro_batches": 3, "run_id": "dies"}
    began = time.monotonic()
    before = ranks.acting(lambda: os._exit(3), 2, rank)
    run = ranks.train(tmp_path, values, world_size=3, before=before)
    assert run.code == 3 and time.monotonic() - began < 50
    for survivor in {1, 2} - {rank}:
        told = rf"rank {survivor}: status:error (Runtime|DistNetwork)Error: "
        assert re.search(told, run.stderr)
    if rank:
        assert run.log[-1] == run.lines[-1] and run.log[-2].startswith("step:2/100 ")
        assert run.lines[-1].startswith("status:error RuntimeError: ")


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_within_the_timeout(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt, "TIMEOUT", datetime.timedelta(seconds=4))  # ranks inherit it
    monkeypatch.setattr(ranks, "LAST_SECONDS", 1)
    values = {**tiny, "steps": 100, "run_id": "hangs"}
    began = time.monotonic()
    before = ranks.acting(lambda: os.kill(os.getpid(), signal.SIGSTOP), 2, rank=1)
    run = ranks.train(tmp_path, values, world_size=2, before=before)
    assert run.code and time.monotonic() - began < 40
    assert re.match("status:error RuntimeError: .*([Tt]imed out|timeout)", run.log[-1])


@pytest.mark.slow
def test_ranks_wait_for_a_save_longer_than_for_each_other(tiny, tmp_path, monkeypatch):
    honest = train_gpt.save_checkpoint

    def slow(*words):
        time.sleep(12)
        honest(*words)

    def before():  # ranks are connected
        train_gpt.save_checkpoint = slow

    monkeypatch.setattr(train_gpt, "TIMEOUT", datetime.timedelta(seconds=8))  # ranks inherit it
    run = ranks.train(tmp_path, {**tiny, "run_id": "slow"}, world_size=2, before=before)
    assert run.code == 0 and run.lines[-1].startswith("status:ok "), run.stdout + run.stderr


def test_where_a_save_fails_the_others_go_on(tiny, tmp_path):
    def before():
        def full(*words):
            raise OSError("no space")

        train_gpt.save_checkpoint = full

    run = ranks.train(tmp_path, {**tiny, "run_id": "full"}, world_size=2, before=before)
    assert run.code == 1 and "no space" in run.lines[-1] and run.result["val_loss"]


def test_ranks_whose_small_parameters_differ_end_at_validation(tiny, tmp_path, monkeypatch):
    """In one bit of one rank, where no collective would bring them together again."""

    def before():
        honest = train_gpt.SmallGroup.receive

        def receive(self, step, pending):
            if self.runtime.rank == 1 and step == 1:
                self.state["small"]["master"].view(torch.int32)[5] ^= 1
            honest(self, step, pending)

        train_gpt.SmallGroup.receive = receive

    monkeypatch.setattr(ranks, "LAST_SECONDS", 1)
    values = {**tiny, "val_every": 2, "run_id": "apart"}
    run = ranks.train(tmp_path, values, world_size=2, before=before)
    assert run.code == 1
    assert "ranks hold different small parameters at step 2" in run.stdout + run.stderr


def test_nodes_that_see_different_checkpoints_are_refused(tiny, tmp_path, monkeypatch):
    def before():
        if os.environ["RANK"] == "1":
            os.chdir(tmp_path / "elsewhere")

    monkeypatch.setattr(ranks, "LAST_SECONDS", 1)
    (tmp_path / "elsewhere").mkdir()
    values = {**tiny, "save_every": 2, "run_id": "one", "resume": "auto"}
    ranks.train(tmp_path, values)
    run = ranks.train(tmp_path, values, world_size=2, before=before)
    assert run.code in (1, 2) and "all must share logs/" in run.stdout + run.stderr
    assert not (tmp_path / "elsewhere" / "logs").exists()


def test_ranks_that_see_different_corpora_are_refused(tiny, tmp_path, monkeypatch):
    def before():
        os.chdir(os.environ["RANK"])

    monkeypatch.setattr(ranks, "LAST_SECONDS", 1)
    for rank in ("0", "1"):
        make_corpus(tmp_path / rank / "c", train_tokens=60_000 + 1000 * int(rank))
    run = ranks.train(tmp_path, {**tiny, "data": "c"}, world_size=2, before=before)
    assert run.code in (1, 2)  # 1: the other rank may have lost this one meanwhile
    assert "c: another rank has another corpus there" in run.stdout + run.stderr


@pytest.mark.slow
def test_two_nodes_train_as_one(rich, rich_run_of, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = f"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port}".split()
    values = {**rich, "run_id": "nodes", "resume": "auto"}
    with contextlib.ExitStack() as stack:
        nodes = []
        for number in (1, 2):
            own = [f"--local-addr=127.0.0.{number}", f"--rdzv-conf=is_host={2 - number}"]
            node = launched(tmp_path, values, *rendezvous, *own, GLOO_SOCKET_IFNAME="lo")
            nodes.append(stack.enter_context(node))
        said = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert_same_end(Run(0, "", "", tmp_path / "logs" / "nodes"), rich_run_of(2))


def test_a_run_is_written_by_one_process(tiny, cli):
    values = {**tiny, "run_id": "held", "resume": "auto", "save_every": 2}
    run = cli(**values)
    with open(run.folder / "log.txt", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        before = (run.folder / "log.txt").read_bytes()
        refused = cli(**values)
        assert refused.code == 2 and "another process writes this run" in refused.lines[-1]
        assert (run.folder / "log.txt").read_bytes() == before
    assert cli(**values).code == 0


# ----- folders, corpora, disks


@pytest.mark.parametrize("name", ["", "checkpoint.pt", "checkpoint.sha256"])
def test_what_stands_in_the_way_of_a_run_is_named(name, tiny, cli, tmp_path):
    if name:
        (tmp_path / "logs" / "odd" / name).mkdir(parents=True)
    else:
        (tmp_path / "logs").write_text("no folder")
    run = cli(**{**tiny, "run_id": "odd"})
    assert run.code in (1, 2) and run.lines[-1].startswith("status:error "), run.stdout
    assert (name or "logs") in run.lines[-1] and not list(tmp_path.glob("logs/*/*.tmp"))


def test_a_shard_that_vanishes_during_a_run_is_named(tiny, cli, tmp_path, monkeypatch):
    """It is read when its turn comes. The run goes on when it is back."""
    folder = make_corpus(tmp_path / "corpus", train_tokens=6000)
    values = {**tiny, "steps": 8, "save_every": 2, "data": str(folder)}
    whole = cli(**values, run_id="whole")
    second, elsewhere = folder / "tiny_train_000001.bin", tmp_path / "elsewhere"
    warm_up = train_gpt.warm_up

    def vanishing(*words):  # ahead of what opens the next shard
        warm_up(*words)
        second.rename(elsewhere)

    with monkeypatch.context() as patched:
        patched.setattr(train_gpt, "warm_up", vanishing)
        run = cli(**values, run_id="gone")
    assert run.code == 1 and second.name in run.lines[-1] == run.log[-1]
    assert "no such file" in refusal(cli(resume="gone"))
    elsewhere.rename(second)
    assert cli(resume="gone").code == 0 and run.result["val_loss"] == whole.result["val_loss"]


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


@pytest.mark.parametrize("variable", ["WORLD_SIZE=2", "WORLD_SIZE=two", "LOCAL_RANK=x"])
def test_half_of_a_launcher_s_variables_is_told(variable, tiny, cli, monkeypatch):
    """Clusters set some of them for other programs."""
    monkeypatch.setenv(*variable.split("="))
    assert "unset RANK, LOCAL_RANK and WORLD_SIZE" in refusal(cli(**tiny))


def test_a_run_is_resumed_by_its_folder(tiny, cli, tmp_path):
    cli(**tiny, run_id="named")
    for name in ("logs/named", str(tmp_path / "logs/named"), "logs/named/checkpoint.pt"):
        assert cli(resume=name).code == 0


def test_a_dot_file_is_no_checkpoint(tiny, cli, tmp_path):
    folder = tmp_path / "logs" / "new"
    folder.mkdir(parents=True)
    (folder / "._checkpoint.pt").write_bytes(b"Mac OS X")
    assert cli(**tiny, run_id="new", resume="auto").code == 0
