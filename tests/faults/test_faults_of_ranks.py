"""What a run on several ranks promises under faults: errors of one rank, ranks that die or hang, restarts, kills."""
import datetime
import os
import re
import signal
import subprocess
import time

import pytest

import ranks
import train_gpt
from faults import kills
from helpers import arguments, command, environment, started
from trainer import sabotage


def log_of(folder):
    return (folder / "log.txt").read_text().partition("===== END OF CODE =====\n")[2].splitlines()


def patient(seconds):
    """What ranks do before they start, so that tests need not wait as long as runs do."""
    train_gpt.TIMEOUT = datetime.timedelta(seconds=seconds)


@pytest.fixture
def quick(monkeypatch):
    """Ranks answer each other within three seconds here."""
    monkeypatch.setattr(train_gpt, "ANSWER_SECONDS", 3)


@pytest.mark.parametrize("seconds", [0, 20], ids=["SIGTERM at once", "no SIGTERM"])
def test_a_rank_that_dies_is_named_with_its_step(seconds, tiny, tmp_path, monkeypatch, quick):
    monkeypatch.setattr(ranks, "OWN_SECONDS", seconds)  # after which the launcher ends the others
    values = {**tiny, "steps": 100, "micro_batches": 3, "run_id": "dies"}
    run = ranks.train(tmp_path, values, world_size=3, before=sabotage.die)
    last = log_of(run.folder)[-1]
    assert last == run.lines[-1] and last.startswith("status:error at step 3: no word from rank 1 (")
    assert last.endswith("; --resume auto goes on") and log_of(run.folder)[-2].startswith("step:2/100 ")
    assert run.code == 3 and "status:" not in run.stderr  # the others do not say it again


def test_where_the_first_rank_dies_the_next_one_names_it(tiny, tmp_path, monkeypatch, quick):
    from torch.distributed import TCPStore
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's, which outlives ranks
    def before():
        os.environ.update(MASTER_PORT=str(server.port), TORCHELASTIC_USE_AGENT_STORE="True")
        sabotage.die(rank=0)
    monkeypatch.setattr(ranks, "OWN_SECONDS", 0)
    values = {**tiny, "steps": 100, "micro_batches": 3, "run_id": "dies"}
    run = ranks.train(tmp_path, values, world_size=3, before=before)
    told, = [line for line in run.stderr.splitlines() if "status:" in line]
    assert told.startswith("rank 1: status:error at step 3: no word from rank 0 (") and "--resume auto" in told


def test_what_ended_one_rank_is_told_by_the_first(tiny, tmp_path, monkeypatch, quick):
    def full():
        raise MemoryError("no more")
    monkeypatch.setattr(ranks, "OWN_SECONDS", 0)
    run = ranks.train(tmp_path, {**tiny, "steps": 100, "run_id": "full"}, world_size=2,
                      before=lambda: sabotage.before_third_step(1, full))
    last = log_of(run.folder)[-1]
    assert last.startswith("status:error at step 3: rank 1 ended: oom no more; set --pass-tokens")
    assert re.findall("^rank 1: status:oom no more;.*", run.stderr, re.MULTILINE)


def test_a_rank_that_hangs_ends_the_run_within_the_timeout(tiny, tmp_path, monkeypatch, quick):
    def before():
        patient(4)
        sabotage.before_third_step(1, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    monkeypatch.setattr(ranks, "LAST_SECONDS", 1)
    began = time.monotonic()
    run = ranks.train(tmp_path, {**tiny, "steps": 100, "run_id": "hangs"}, world_size=2, before=before)
    assert run.code and time.monotonic() - began < 40
    assert log_of(run.folder)[-1].startswith("status:error at step 3: no word from rank 1 (killed, hung or cut off")


def test_an_error_of_one_rank_alone_before_the_start_is_told(tiny, tmp_path, monkeypatch):
    def before():
        if os.environ["RANK"] == "1":
            os.chdir(tmp_path / "elsewhere")  # another node, without the checkpoint
    (tmp_path / "elsewhere").mkdir()
    first = ranks.train(tmp_path, {**tiny, "steps": 4, "save_every": 2, "run_id": "one"})
    (first.folder / "result.json").unlink()
    monkeypatch.setattr(ranks, "OWN_SECONDS", 5)
    monkeypatch.setattr(ranks, "LAST_SECONDS", 1)
    run = ranks.train(tmp_path, {"resume": "one"}, world_size=2, before=before)
    assert run.code == 2 and "rank 1: status:error --resume one: no checkpoint" in run.stderr


def test_peers_out_of_reach_at_the_start_are_one_line(tiny, tmp_path, monkeypatch):
    def unreachable(*words):
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:553] Connection closed by peer\nmore lines")
    monkeypatch.setattr(train_gpt.dist, "new_group", unreachable)
    run = ranks.train(tmp_path, {**tiny, "micro_batches": 2}, world_size=2)
    assert run.code == 2 and not (tmp_path / "logs").exists() and "Traceback" not in run.stderr
    assert re.fullmatch("status:error Gloo connectFullMesh failed .*Connection closed by peer.*\n", run.stdout)


def test_an_error_of_all_ranks_is_told_once(tiny, tmp_path):
    run = ranks.train(tmp_path, {**tiny, "stepz": 4}, world_size=3)
    assert run.code == 2 and len(run.lines) == 1 and run.lines[0].startswith("status:error --stepz")


def kill_when(process, folder, step, victims):
    """SIGKILL to what victims(pid of the launcher) names, once a step is in the log."""
    for _ in range(6000):
        log = folder / "log.txt"
        if log.exists() and re.search(rf"^step:{step}/", log.read_text(errors="replace"), re.MULTILINE):
            break
        time.sleep(0.02)
    for pid in victims(process.pid):
        os.kill(pid, signal.SIGKILL)


def children_of(pid):
    return [int(word) for word in subprocess.run(["pgrep", "-P", str(pid)], capture_output=True).stdout.split()]


def test_torchrun_restarts_a_run_whose_rank_was_killed(rich, rich_run_of, tmp_path):
    values = {**rich, "save_every": 4, "run_id": "again", "resume": "auto"}
    words = [*command(2)[:-1], "--max-restarts=2", command(2)[-1], *arguments(values)]
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True) as process:
        folder = tmp_path / "logs" / "again"
        kill_when(process, folder, 9, lambda launcher: children_of(launcher)[1:])
        said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    log = log_of(folder)
    assert "resumed:again step:8/20 world_size:2" in log and log[-1].startswith("status:ok ")
    before = log[log.index("resumed:again step:8/20 world_size:2") - 1]
    assert re.match(r"status:error at step \d+: no word from rank 1 \(", before)
    whole = rich_run_of(2)
    assert kills.state_of(tmp_path, "again")[2] == whole.result["val_loss"]


def test_ranks_end_when_their_launcher_was_killed(tiny, tmp_path):
    values = {**tiny, "steps": 4000, "epochs": 1000, "run_id": "alone"}
    with started(tmp_path, values, world_size=2) as process:
        folder, of_launcher = tmp_path / "logs" / "alone", []
        kill_when(process, folder, 3, lambda launcher: [of_launcher.extend(children_of(launcher)), launcher][1:])
        deadline = time.monotonic() + 30
        while any(os.path.exists(f"/proc/{pid}") for pid in of_launcher) and time.monotonic() < deadline:
            time.sleep(0.1)
    assert len(of_launcher) == 2 and not any(os.path.exists(f"/proc/{pid}") for pid in of_launcher)
    assert log_of(folder)[-1].startswith("status:")


def test_restarts_of_a_store_that_outlives_them(tiny, tmp_path, monkeypatch, quick):
    """Ranks that start again find each other in a store where dead ones have left their addresses."""
    monkeypatch.setattr(ranks, "OWN_SECONDS", 0.1)
    from torch.distributed import TCPStore
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for restart in range(3):
        def before():
            os.environ.update(MASTER_PORT=str(server.port), TORCHELASTIC_USE_AGENT_STORE="True", GROUP_WORLD_SIZE="1",
                              TORCHELASTIC_RESTART_COUNT=str(restart))
            if restart < 2:
                sabotage.die()
        run = ranks.train(tmp_path, {**tiny, "run_id": "again", "resume": "auto"}, world_size=2, before=before)
        assert (run.code == 0) == (restart == 2), run.stdout + run.stderr


@pytest.mark.long
def test_kills_at_random_moments(tmp_path):
    """The whole campaign, as many kills as the table claims."""
    assert kills.main(["--out", str(tmp_path / "kills.md")]) == 0


def test_a_few_kills_at_random_moments(tmp_path, corpus, quick):
    runs, done, wrong = kills.kill_runs("two ranks", 2, tmp_path, corpus, kills.random.Random(2))
    assert done >= 2 and not wrong, wrong
