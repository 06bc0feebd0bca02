"""What a run promises under faults that come from outside: kills, other processes, consoles, disks,
corpora; of its ranks, their launcher and their nodes. What a checkpoint promises is in
tests/trainer/test_checkpoint.py, signals are in tests/trainer/test_loop.py."""

import contextlib
import datetime
import fcntl
import gc
import os
import re
import signal
import socket
import subprocess
import time

import pytest

import ranks
import train_gpt
from helpers import Run, assert_same_end, launched, make_corpus, refusal

# ----- kills


def wait_for_step(folder, step):
    """Return once a step is in the log."""
    log = folder / "log.txt"
    for _ in range(6000):
        if log.exists() and re.search(rf"^step:{step}/", log.read_text(errors="replace"), re.M):
            return
        time.sleep(0.02)


def children_of(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True)
    return [int(word) for word in found.stdout.split()]


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_was_killed(rich, rich_run_of, tmp_path):
    values = {**rich, "save_every": 4, "run_id": "again", "resume": "auto"}
    folder, words = tmp_path / "logs" / "again", ("--nproc-per-node=2", "--max-restarts=2")
    with launched(tmp_path, values, "--standalone", *words) as process:
        wait_for_step(folder, 9)
        os.kill(children_of(process.pid)[1], signal.SIGKILL)
        out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    run = Run(process.returncode, out, "", folder)
    assert_same_end(run, rich_run_of(2))
    resumed = run.log.index("resumed:again step:8/20 world_size:2")
    assert run.log[resumed - 1].startswith("status:") and run.log[-1].startswith("status:ok ")


# ----- ranks and nodes


@pytest.mark.parametrize("rank", [0, 1])
def test_where_a_rank_dies_the_others_end(rank, tiny, tmp_path, monkeypatch):
    """Nobody tells them to."""
    monkeypatch.setattr(ranks, "OWN_SECONDS", 60)
    values = {**tiny, "steps": 100, "micro_batches": 3, "run_id": "dies"}
    began = time.monotonic()
    before = ranks.acting(lambda: os._exit(3), 2, rank)
    run = ranks.train(tmp_path, values, world_size=3, before=before)
    assert run.code == 3 and time.monotonic() - began < 50
    for survivor in {1, 2} - {rank}:
        assert f"rank {survivor}: status:error RuntimeError: " in run.stderr
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


@pytest.mark.parametrize(
    "resume, words", [("auto", "all must share logs/"), ("one", "--resume one: no checkpoint")]
)
def test_nodes_that_see_different_checkpoints_are_refused(
    resume, words, tiny, tmp_path, monkeypatch
):
    def before():
        if os.environ["RANK"] == "1":
            os.chdir(tmp_path / "elsewhere")

    monkeypatch.setattr(ranks, "LAST_SECONDS", 1)
    (tmp_path / "elsewhere").mkdir()
    values = {**tiny, "save_every": 2, "run_id": "one", "resume": "auto"}
    ranks.train(tmp_path, values)
    run = ranks.train(tmp_path, {**values, "resume": resume}, world_size=2, before=before)
    assert run.code in (1, 2) and words in run.stdout + run.stderr
    assert not (tmp_path / "elsewhere" / "logs").exists()


def test_ranks_that_see_different_corpora_are_refused(tiny, tmp_path, monkeypatch):
    def before():
        os.chdir(os.environ["RANK"])

    monkeypatch.setattr(ranks, "LAST_SECONDS", 1)
    for rank in ("0", "1"):
        make_corpus(tmp_path / rank / "c", train_tokens=60_000 + 1000 * int(rank))
    run = ranks.train(tmp_path, {**tiny, "data": "c"}, world_size=2, before=before)
    assert run.code == 2 and "c: another rank has another corpus there" in run.stdout + run.stderr


@pytest.mark.slow
def test_two_nodes_train_as_one(rich, rich_run_of, tmp_path):
    """Two launchers, which find each other as those of two machines do."""
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


# ----- two processes, one run


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


# ----- folders and corpora


@pytest.mark.parametrize("name", ["", "checkpoint.pt", "checkpoint.sha256"])
def test_what_stands_in_the_way_of_a_run_is_named(name, tiny, cli, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: None)
    if name:
        (tmp_path / "logs" / "odd" / name).mkdir(parents=True)
    else:
        (tmp_path / "logs").write_text("no folder")
    run = cli(**{**tiny, "run_id": "odd"})
    assert run.code in (1, 2) and run.lines[-1].startswith("status:error "), run.stdout
    assert (name or "logs") in run.lines[-1] and not list(tmp_path.glob("logs/*/*.tmp"))


def test_a_shard_that_vanishes_during_a_run_is_named(tiny, cli, tmp_path, monkeypatch):
    """It is read when its turn comes. The run goes on when it is back, in the same process, too,
    where nobody has collected yet what the error holds."""
    folder = make_corpus(tmp_path / "corpus", train_tokens=6000)
    values = {**tiny, "steps": 8, "save_every": 2, "data": str(folder)}
    whole = cli(**values, run_id="whole")
    assert whole.code == 0
    second, elsewhere = folder / "tiny_train_000001.bin", tmp_path / "elsewhere"
    warm_up = train_gpt.warm_up

    def vanishing(*words):  # ahead of what opens the next shard
        warm_up(*words)
        second.rename(elsewhere)

    gc.disable()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(train_gpt, "warm_up", vanishing)
            run = cli(**values, run_id="gone")
        assert run.code == 2 and second.name in run.lines[-1] == run.log[-1]
        assert "no such file" in refusal(cli(resume="gone"))
        elsewhere.rename(second)
        assert cli(resume="gone").code == 0 and run.result["val_loss"] == whole.result["val_loss"]
    finally:
        gc.enable()
