"""What a run promises under faults that come from outside: kills, other processes, consoles, disks,
corpora; of its ranks, their launcher and their nodes. What a checkpoint promises is in
tests/trainer/test_checkpoint.py, signals are in tests/trainer/test_loop.py."""

import datetime
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from random import Random

import pytest
from faults import kills
from trainer import sabotage

import ranks
import train_gpt
from helpers import (
    INDEX,
    TRAINER,
    Run,
    arguments,
    assert_same_end,
    command,
    environment,
    log_of,
    make_corpus,
    refusal,
    run_trainer,
    started,
    with_manifest,
)

# ----- kills


@pytest.mark.parametrize("name", ["one rank", pytest.param("two ranks", marks=pytest.mark.slow)])
def test_a_few_kills_at_random_moments(name, tmp_path, corpus):
    _, done, wrong = kills.kill_runs(name, 2, tmp_path, corpus, Random(2))
    assert done >= 2 and not wrong, wrong


def kill_when(process, folder, step, victims):
    """SIGKILL to what victims(pid of the launcher) names, once a step is in the log."""
    log = folder / "log.txt"
    for _ in range(6000):
        if log.exists() and re.search(rf"^step:{step}/", log.read_text(errors="replace"), re.M):
            break
        time.sleep(0.02)
    for pid in victims(process.pid):
        os.kill(pid, signal.SIGKILL)


def children_of(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True)
    return [int(word) for word in found.stdout.split()]


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_was_killed(rich, rich_run_of, tmp_path):
    values = {**rich, "save_every": 4, "run_id": "again", "resume": "auto"}
    folder = tmp_path / "logs" / "again"
    with started(tmp_path, values, "--max-restarts=2", world_size=2) as process:
        kill_when(process, folder, 9, lambda launcher: children_of(launcher)[1:])
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    run = Run(process.returncode, out, err, folder)
    assert_same_end(run, rich_run_of(2))
    resumed = run.log.index("resumed:again step:8/20 world_size:2")
    assert run.log[resumed - 1].startswith("status:") and run.log[-1].startswith("status:ok ")


@pytest.mark.slow
def test_ranks_end_when_their_launcher_was_killed(tiny, tmp_path):
    values = {**tiny, "steps": 4000, "epochs": 1000, "run_id": "alone"}
    folder, left = tmp_path / "logs" / "alone", []

    def note_ranks(launcher):
        left.extend(children_of(launcher))
        return [launcher]

    with started(tmp_path, values, world_size=2) as process:
        kill_when(process, folder, 3, note_ranks)
        deadline = time.monotonic() + 30
        while any(os.path.exists(f"/proc/{pid}") for pid in left) and time.monotonic() < deadline:
            time.sleep(0.1)
    assert len(left) == 2 and not any(os.path.exists(f"/proc/{pid}") for pid in left)
    assert log_of(folder)[-1].startswith("status:")


# ----- ranks and nodes


@pytest.mark.parametrize("rank", [0, 1])
def test_where_a_rank_dies_the_others_end(rank, tiny, tmp_path, monkeypatch):
    """Nobody tells them to."""
    monkeypatch.setattr(ranks, "OWN_SECONDS", 60)
    values = {**tiny, "steps": 100, "micro_batches": 3, "run_id": "dies"}
    began = time.monotonic()
    run = ranks.train(tmp_path, values, world_size=3, before=lambda: sabotage.die(rank))
    assert run.code == 3 and time.monotonic() - began < 50
    for survivor in {1, 2} - {rank}:
        assert f"rank {survivor}: status:error RuntimeError: " in run.stderr
    if rank:
        assert run.log[-1] == run.lines[-1] and run.log[-2].startswith("step:2/100 ")
        assert run.lines[-1].startswith("status:error RuntimeError: ")


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_within_the_timeout(tiny, tmp_path, monkeypatch):
    def before():
        train_gpt.TIMEOUT = datetime.timedelta(seconds=4)
        sabotage.before_third_step(1, lambda: os.kill(os.getpid(), signal.SIGSTOP))

    monkeypatch.setattr(ranks, "LAST_SECONDS", 1)
    values = {**tiny, "steps": 100, "run_id": "hangs"}
    began = time.monotonic()
    run = ranks.train(tmp_path, values, world_size=2, before=before)
    assert run.code and time.monotonic() - began < 40
    assert re.match("status:error RuntimeError: .*([Tt]imed out|timeout)", run.log[-1])


# The trainer itself, whose rank 1 fails where the warm-up ends.
BROKEN = """
import os, runpy, sys, torch

def broken(state):
    raise ZeroDivisionError("by accident")

if os.environ["RANK"] == "1":
    torch.set_rng_state = broken
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.slow
def test_torchrun_names_the_rank_that_failed_first_and_its_error(tiny, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    run = run_trainer(tmp_path, {**tiny, "run_id": "fails"}, TRAINER, world_size=2, script=script)
    assert run.code == 1 and "rank 1: status:error ZeroDivisionError: by accident" in run.stderr
    root_cause = run.stderr.partition("Root Cause (first observed failure)")[2]
    assert re.search(r"rank +: 1 \(local_rank: 1\)", root_cause)
    assert "ZeroDivisionError: by accident" in root_cause


def test_peers_out_of_reach_at_the_start_are_one_line(tiny, tmp_path, monkeypatch):
    def unreachable(*words, **options):
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:553] closed by peer\nmore")

    monkeypatch.setattr(train_gpt.dist, "new_group", unreachable)
    run = ranks.train(tmp_path, tiny, world_size=2)
    assert run.code == 2 and not (tmp_path / "logs").exists() and "Traceback" not in run.stderr
    assert re.fullmatch(
        "status:error ranks .*: Gloo connectFullMesh failed .*closed by peer.*\n", run.stdout
    )


def test_restarts_of_a_store_that_outlives_them(tiny, tmp_path, monkeypatch):
    """Ranks that start again find each other in a store where dead ones have left their
    addresses."""
    from torch.distributed import TCPStore

    monkeypatch.setattr(ranks, "OWN_SECONDS", 0.1)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launched = {"MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def before():
        os.environ.update(**launched, TORCHELASTIC_RESTART_COUNT=str(restart))
        if restart < 2:
            sabotage.die()

    for restart in range(3):
        values = {**tiny, "run_id": "again", "resume": "auto"}
        run = ranks.train(tmp_path, values, world_size=2, before=before)
        assert (run.code == 0) == (restart == 2), run.stdout + run.stderr


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
    (ranks.train(tmp_path, values).folder / "result.json").unlink()
    run = ranks.train(tmp_path, {**values, "resume": resume}, world_size=2, before=before)
    assert run.code in (1, 2) and words in run.stdout + run.stderr
    assert not (tmp_path / "elsewhere" / "logs").exists()


@pytest.mark.slow
def test_two_nodes_train_as_one(rich, rich_run_of, tmp_path):
    """Two launchers, which find each other as those of two machines do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = f"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port}".split()
    launcher = [*command(1)[:3], "--nproc-per-node=1", *rendezvous]
    words = [str(TRAINER), *arguments({**rich, "run_id": "nodes", "resume": "auto"})]
    nodes = []
    for number in (1, 2):
        own = [f"--local-addr=127.0.0.{number}", f"--rdzv-conf=is_host={2 - number}"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environ = {**environment(), "GLOO_SOCKET_IFNAME": "lo"}
        nodes.append(
            subprocess.Popen([*launcher, *own, *words], cwd=tmp_path, env=environ, **options)
        )
    try:
        said = [node.communicate(timeout=200)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
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
    assert sum(line.startswith("step:30/30 train") for line in log) == 1
    assert log[-1].startswith("status:ok ")


# ----- a signal while it saves, consoles, locales


def test_a_signal_during_a_save_leaves_it_whole(tiny, tmp_path):
    """It falls between the last write and the file's taking its name."""

    def before():
        def fsync(file):
            os.kill(os.getpid(), signal.SIGTERM)
            honest(file)

        honest, os.fsync = os.fsync, fsync

    run = ranks.train(tmp_path, {**tiny, "run_id": "saving"}, before=before)
    assert run.code == 130 and run.lines[-1] == "status:interrupted" == run.log[-1]
    assert train_gpt.load_checkpoint(run.folder / "checkpoint.pt")["step"] == 4
    assert not list(run.folder.glob("*.tmp")) and not (run.folder / "result.json").exists()


@pytest.mark.slow
def test_a_console_that_is_closed_and_a_locale_of_ascii_are_enough(tiny, tmp_path):
    sample = TRAINER.with_name("sample.py")
    train = [sys.executable, str(TRAINER), *arguments({**tiny, "run_id": "plain"})]
    use = "--checkpoint logs/plain/checkpoint.pt --tokens 2 --prompt \u00e4"
    script = f'"$@" >&- && {sys.executable} {sample} {use}'
    locale = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = subprocess.run(
        ["bash", "-c", script, "bash", *train],
        cwd=tmp_path,
        env={**environment(), **locale},
        capture_output=True,
        timeout=100,
    )
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    assert done.stdout.decode("ascii").startswith("\\udcc3\\udca4")
    assert log_of(tmp_path / "logs" / "plain")[-1].startswith("status:ok ")


# ----- folders and corpora


@pytest.mark.parametrize("name", ["", "checkpoint.pt", "checkpoint.sha256", "result.json"])
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


def test_a_shard_that_vanishes_during_a_run_is_named(tiny, cli, tmp_path, monkeypatch):
    """It is read when its turn comes. The run goes on when it is back; shards that join the corpus
    meanwhile change nothing."""
    folder = make_corpus(tmp_path / "corpus", train_tokens=6000)
    values = {**tiny, **INDEX, "steps": 8, "save_every": 2, "data": str(folder)}
    whole = cli(**values, run_id="whole")
    assert whole.code == 0 and whole.checkpoint()["loader"]["shard"] == 1
    second, step = folder / "tiny_train_000001.bin", train_gpt.Trainer.step
    kept = second.read_bytes()

    def vanishing_step(self, *rest):
        second.unlink(missing_ok=True)
        return step(self, *rest)

    def growing_step(self, *rest):
        shutil.copy(second, folder / "tiny_train_000002.bin")
        with_manifest(folder)
        return step(self, *rest)

    monkeypatch.setattr(train_gpt, "warm_up", lambda trainer: None)
    monkeypatch.setattr(train_gpt, "PREFETCH", 1)
    monkeypatch.setattr(train_gpt.Trainer, "step", vanishing_step)
    run = cli(**values, run_id="gone")
    assert run.code == 1 and second.name in run.lines[-1] == run.log[-1]
    assert "shards hold" in refusal(cli(resume="gone"))
    second.write_bytes(kept)
    monkeypatch.setattr(train_gpt.Trainer, "step", growing_step)
    assert cli(resume="gone").code == 0 and run.result["val_loss"] == whole.result["val_loss"]
