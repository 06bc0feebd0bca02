"""What a run on several ranks promises under faults: when one rank fails, the others end, and
torchrun names it; restarts and `--resume auto` go on."""

import datetime
import os
import re
import signal
import subprocess
import time
from random import Random

import pytest
from faults import kills
from trainer import sabotage

import ranks
import train_gpt
from helpers import TRAINER, arguments, command, environment, run_trainer, started


def log_of(folder):
    return (folder / "log.txt").read_text().partition("===== END OF CODE =====\n")[2].splitlines()


@pytest.mark.parametrize("rank", [0, 1])
def test_where_a_rank_dies_the_others_end(rank, tiny, tmp_path, monkeypatch):
    """Nobody tells them to."""
    monkeypatch.setattr(ranks, "OWN_SECONDS", 60)
    values = {**tiny, "steps": 100, "micro_batches": 3, "run_id": "dies"}
    began = time.monotonic()
    run = ranks.train(tmp_path, values, world_size=3, before=lambda: sabotage.die(rank))
    assert run.code == 3 and time.monotonic() - began < 50
    survivors = {1, 2} if rank == 0 else {2}
    for survivor in survivors:
        assert f"rank {survivor}: status:error RuntimeError: " in run.stderr
    if rank:
        assert log_of(run.folder)[-1] == run.lines[-1]
        assert run.lines[-1].startswith("status:error RuntimeError: ")
        assert log_of(run.folder)[-2].startswith("step:2/100 ")


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
    assert re.match("status:error RuntimeError: .*([Tt]imed out|timeout)", log_of(run.folder)[-1])


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
    (tmp_path / "broken.py").write_text(BROKEN)
    script = tmp_path / "broken.py"
    run = run_trainer(tmp_path, {**tiny, "run_id": "fails"}, TRAINER, world_size=2, script=script)
    assert run.code == 1 and "rank 1: status:error ZeroDivisionError: by accident" in run.stderr
    root_cause = run.stderr.partition("Root Cause (first observed failure)")[2]
    assert re.search(r"rank +: 1 \(local_rank: 1\)", root_cause)
    assert "ZeroDivisionError: by accident" in root_cause


def test_an_error_of_one_rank_alone_before_the_start_is_told(tiny, tmp_path, monkeypatch):
    def before():
        if os.environ["RANK"] == "1":
            os.chdir(tmp_path / "elsewhere")  # another node, without the checkpoint

    (tmp_path / "elsewhere").mkdir()
    first = ranks.train(tmp_path, {**tiny, "save_every": 2, "run_id": "one"})
    (first.folder / "result.json").unlink()
    monkeypatch.setattr(ranks, "LAST_SECONDS", 1)
    run = ranks.train(tmp_path, {"resume": "one"}, world_size=2, before=before)
    assert run.code == 2 and "status:error --resume one: no checkpoint" in run.stderr


def test_peers_out_of_reach_at_the_start_are_one_line(tiny, tmp_path, monkeypatch):
    def unreachable(*words, **options):
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:553] closed by peer\nmore")

    monkeypatch.setattr(train_gpt.dist, "new_group", unreachable)
    run = ranks.train(tmp_path, {**tiny, "micro_batches": 2}, world_size=2)
    assert run.code == 2 and not (tmp_path / "logs").exists() and "Traceback" not in run.stderr
    assert re.fullmatch("status:error Gloo connectFullMesh failed .*closed by peer.*\n", run.stdout)


def kill_when(process, folder, step, victims):
    """SIGKILL to what victims(pid of the launcher) names, once a step is in the log."""
    for _ in range(6000):
        log = folder / "log.txt"
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
    *launcher, script = command(2)
    words = [*launcher, "--max-restarts=2", script, *arguments(values)]
    folder, out = tmp_path / "logs" / "again", subprocess.PIPE
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment(), stdout=out, stderr=subprocess.STDOUT, text=True
    ) as process:
        kill_when(process, folder, 9, lambda launcher: children_of(launcher)[1:])
        said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    log = log_of(folder)
    assert log[-1].startswith("status:ok ")
    resumed = log.index("resumed:again step:8/20 world_size:2")
    assert log[resumed - 1].startswith("status:")
    whole, state = rich_run_of(2), kills.state_of(tmp_path, "again")
    assert state[1] == whole.train_losses and state[2] == whole.result["val_loss"]


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


@pytest.mark.slow
def test_a_few_kills_at_random_moments(tmp_path, corpus):
    runs, done, wrong = kills.kill_runs("two ranks", 2, tmp_path, corpus, Random(2))
    assert done >= 2 and not wrong, wrong
