"""What a run promises under faults from outside: kills, signals, other processes, disks, corpora,
ranks, launchers and nodes. Checkpoints are in trainer/test_checkpoint.py, more of signals is in
trainer/test_loop.py."""

import contextlib
import datetime
import fcntl
import gc
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import helpers
import ranks
import train_gpt
from helpers import TRAINER, Run, assert_same_end, launched, make_corpus, refusal


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_was_killed(rich, rich_run_of, tmp_path):
    values = {**rich, "save_every": 4, "run_id": "again", "resume": "auto"}
    folder = tmp_path / "logs" / "again"
    words = "-m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=2".split()
    with launched(tmp_path, [*words, TRAINER], values) as process:
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

    monkeypatch.setattr(train_gpt, "save_checkpoint", slow)  # ranks inherit it
    monkeypatch.setattr(train_gpt, "TIMEOUT", datetime.timedelta(seconds=8))
    run = ranks.train(tmp_path, {**tiny, "run_id": "slow"}, world_size=2)
    assert run.code == 0 and run.lines[-1].startswith("status:ok "), run.stdout + run.stderr


def test_ranks_whose_small_parameters_differ_end_at_validation(tiny, tmp_path, monkeypatch):
    """In one bit of one rank, where no collective would bring them together again."""

    honest = train_gpt.SmallGroup.receive

    def receive(self, step, pending):
        if self.runtime.rank == 1 and step == 1:
            self.state["small"]["master"].view(torch.int32)[5] ^= 1
        honest(self, step, pending)

    monkeypatch.setattr(train_gpt.SmallGroup, "receive", receive)  # ranks inherit it
    monkeypatch.setattr(ranks, "LAST_SECONDS", 1)
    run = ranks.train(tmp_path, {**tiny, "val_every": 2, "run_id": "apart"}, world_size=2)
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
    words = "-m torch.distributed.run --nnodes=2 --rdzv-backend=c10d".split()
    words.append(f"--rdzv-endpoint=127.0.0.1:{port}")
    values = {**rich, "run_id": "nodes", "resume": "auto"}
    with contextlib.ExitStack() as stack:
        nodes = []
        for number in (1, 2):
            own = [f"--local-addr=127.0.0.{number}", f"--rdzv-conf=is_host={2 - number}"]
            command = [*words, *own, TRAINER]
            node = launched(tmp_path, command, values, GLOO_SOCKET_IFNAME="lo")
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


@pytest.mark.parametrize("name", ["file", "link", "checkpoint.pt", "checkpoint.sha256"])
def test_what_stands_in_the_way_of_a_run_is_named(name, tiny, cli, tmp_path):
    """As where a disk is not there, to which logs/ is a link."""
    logs, told = tmp_path / "logs", "logs: is no folder, or a link to none; mount its disk"
    if name == "file":
        logs.write_text("no folder")
    elif name == "link":
        logs.symlink_to(tmp_path / "unmounted")
    else:
        (logs / "odd" / name).mkdir(parents=True)
        told = name
    run = cli(**{**tiny, "run_id": "odd"})
    assert run.code in (1, 2) and run.lines[-1].startswith("status:error "), run.stdout
    assert told in run.lines[-1] and not list(tmp_path.glob("logs/*/*.tmp"))


def test_a_shard_that_vanishes_during_a_run_is_named(tiny, cli, tmp_path, monkeypatch):
    """It is read when its turn comes. The run goes on when it is back."""
    folder = make_corpus(tmp_path / "corpus", train_tokens=6000)
    values = {**tiny, "steps": 8, "save_every": 2, "data": str(folder)}
    whole = cli(**values, run_id="whole")
    second, elsewhere = folder / "tiny_train_000001.bin", tmp_path / "elsewhere"
    with monkeypatch.context() as patched:  # ahead of what opens the next shard
        patched.setattr(train_gpt, "warm_up", lambda *_: second.rename(elsewhere))
        run = cli(**values, run_id="gone")
    assert run.code == 1 and second.name in run.lines[-1] == run.log[-1]
    assert "no such file" in refusal(cli(resume="gone"))
    elsewhere.rename(second)
    assert cli(resume="gone").code == 0 and run.result["val_loss"] == whole.result["val_loss"]


@pytest.mark.parametrize("step", [10, 20])
def test_sums_of_a_resumed_run_are_those_of_the_whole_run(step, rich_run_of, tmp_path):
    """A kill after step 20 falls into the gates, and then no step is left."""
    whole = rich_run_of(2)
    left_out = shutil.ignore_patterns(*["checkpoint.*"] * (step == 10))
    shutil.copytree(whole.folder, tmp_path / "logs" / "rich", ignore=left_out)
    run = ranks.train(tmp_path, {"resume": "rich"}, world_size=2)
    assert run.code == 0, run.stdout + run.stderr
    saved = whole.checkpoint(f"step_{step:06d}.pt" if step == 10 else "checkpoint.pt")
    cpu_time = int(run.result["cpu_time"].removesuffix("ms")) / 1000
    assert cpu_time + 1e-3 > saved["seconds"][1] > 0
    final = [line for line in run.log if line.startswith("final ")][-1]
    assert "MiB since resume tokens_per_s:" in final


def test_room_is_asked_for_checkpoints_that_are_not_there(tiny, tmp_path, monkeypatch):
    """A run that saves on the way keeps two of them while it writes the next."""
    monkeypatch.setattr(train_gpt.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    run = object.__new__(train_gpt.Run)
    run.trainer = helpers.make_trainer(random_weights=False, ngram_rows=2**20)
    run.runtime, run.folder = run.trainer.runtime, tmp_path
    sizes = []
    for save_every, saved in ((0, []), (2, [1, 2]), (2, [1]), (2, [])):
        run.config, run.saved = helpers.tiny_config(save_every=save_every), saved
        with pytest.raises(train_gpt.ConfigError) as refused:
            run.check_room()
        sizes.append(float(re.search("take (.*) GiB at", str(refused.value))[1]))
    assert sizes[0] > 0.1 and sizes == pytest.approx([n * sizes[0] for n in (1, 1, 2, 3)], rel=0.1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_result_comes_before_a_failed_write_is_told(world_size, tiny, tmp_path, monkeypatch):
    honest = torch.save

    def save(content, file):
        if content["step"] == 4:
            raise OSError(28, "No space left on device")
        honest(content, file)

    monkeypatch.setattr(torch, "save", save)  # ranks inherit it
    values = {**tiny, "save_every": 2, "run_id": "full"}
    run = ranks.train(tmp_path, values, world_size=world_size)
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


def test_a_check_tries_what_a_run_opens(tiny, cli, tmp_path, monkeypatch):
    """And leaves what it finds."""
    values = {**tiny, "run_id": "kept"}
    folder = cli(**values).folder
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert "kept/checkpoint.pt: is of the run kept; " in refusal(cli("--check", **values))
    with open(folder / "log.txt") as other:
        assert cli("--check", resume="kept").lines[-1] == "check:ok"
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another process writes" in refusal(cli("--check", resume="kept"))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(37, "No locks available")))
    for words in (("--check",), ()):
        run = cli(*words, **{**values, "run_id": "open"})
        assert run.code == 0 and run.stderr.count("No locks available") == 1
        assert run.folder.exists() == (not words)
    (tmp_path / "logs").rename(tmp_path / "away")
    (tmp_path / "logs").symlink_to("/proc/self")  # where nobody can write
    monkeypatch.setattr(train_gpt.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**60))
    for words in ((), ("--check",)):
        assert cli(*words, **values).lines[-1].startswith("status:error [")


@pytest.mark.parametrize("last, code", [(12, 0), (99, 1)])
def test_a_log_that_cannot_be_written_ends_no_run(last, code, tiny, cli, monkeypatch):
    """It is whole once there is room again; else the console has the result. The disk takes half of
    the write before those that fail."""

    def opened(log, *words):
        begins = honest(log, *words)
        file, number = log.file, itertools.count()

        def write(content):
            at = next(number)
            if 5 < at < last:
                raise OSError(28, "No space left on device")
            return file.write(content[: len(content) // (2 if at == 5 else 1)])

        log.file = Mock(wraps=file, write=write)
        log.file.name = file.name
        return begins

    honest = train_gpt.Log.open
    monkeypatch.setattr(train_gpt.Log, "open", opened)
    run = cli(**tiny, run_id="full")
    shown = [line for line in run.lines if not line.startswith("warm-up: ")]
    assert run.code == code and shown[-2].startswith("final val_loss:")
    if code:
        assert "status:error logs/full/log.txt: not written: [Errno 28] No" in run.lines[-1]
    else:
        assert [line for line in run.log if not line.startswith("config:")] == shown


# ----- what a run takes of its process


def test_a_run_leaves_its_process_as_it_was(tiny, cli):
    def state():
        gc.collect()  # an earlier test's error may hold a file
        time.sleep(0.1)  # in which the thread that has listened ends
        handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        signal.set_wakeup_fd(wakeup := signal.set_wakeup_fd(-1))
        return handlers, wakeup, os.listdir("/proc/self/fd"), threading.enumerate()

    before = state()
    assert cli("--check", **tiny).code == 0
    with pytest.raises(SystemExit):
        train_gpt.main(["--help"])
    assert state() == before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with ThreadPoolExecutor() as pool:  # where signals cannot be set
        assert pool.submit(train_gpt.main, ["--check", *helpers.arguments(tiny)]).result() == 0


def test_peak_memory_is_the_runs_own(monkeypatch):
    """getrusage counts what a parent had, too."""
    of_parent = Mock(return_value=SimpleNamespace(ru_maxrss=2**40))
    monkeypatch.setattr(train_gpt.resource, "getrusage", of_parent)
    rss = int(re.search(r"VmRSS:\s+(\d+)", open("/proc/self/status").read())[1]) // 2**10
    assert rss <= train_gpt.Runtime("cpu").peak_memory_mib() < 2**20
    monkeypatch.setattr(train_gpt.re, "search", lambda *words: None)  # an older system
    assert train_gpt.Runtime("cpu").peak_memory_mib() == 2**30


def test_a_commit_is_that_of_the_scripts_own_repository(tmp_path, monkeypatch):
    """What git does not say is unknown."""

    def state(place):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(train_gpt, "__file__", str(tmp_path / place / "train_gpt.py"))
        return train_gpt.git_state()

    def git(*words):
        call = ["git", "-c", "user.name=x", "-c", "user.email=x@x", *words]
        return subprocess.run(call, cwd=tmp_path, capture_output=True, text=True).stdout.strip()

    unknown = "unknown", "unknown"
    assert state(".") == unknown
    git("init")
    assert state(".") == unknown  # without a commit
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "first")
    sha = git("rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert [state(place) for place in (".", "logs/a", "ours")] == [(sha, 0), (sha, 0), unknown]
    (tmp_path / "a").write_text("2")
    assert state(".") == (sha, 1)
    (tmp_path / ".git" / "index").write_text("damaged")
    assert state(".") == (sha, "unknown")
    monkeypatch.setenv("PATH", "")
    assert state(".") == unknown
