"""What a run on several nodes promises: here two launchers, which find each other as those of two
machines do. The slow tests give each a network namespace of its own, joined by a link that can be
cut; that takes root and `ip`."""

import contextlib
import os
import re
import socket
import subprocess
import time
from pathlib import Path

import pytest
from faults import kills
from test_faults_of_ranks import children_of, kill_when, log_of

import ranks
from helpers import TRAINER, arguments, command, environment

PATIENT = Path(__file__).with_name("patient.py")
PORT = "29577"


def start(
    number, address, interface, folder, values, words=(), script=(TRAINER,), prefix=(), **variables
):
    """The launcher of one node, 1 or 2, of one rank; the first one's address is the rendezvous."""
    port = PORT if prefix else variables.pop("port")
    first = f"{address.rpartition('.')[0]}.1:{port}"
    torchrun = [
        *prefix,
        *command(1)[:3],
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        *words,
        f"--rdzv-endpoint={first}",
        f"--rdzv-conf=is_host={2 - number}",
        f"--local-addr={address}",
    ]
    with open(folder / f"node{number}.txt", "w") as said:
        return subprocess.Popen(
            [*torchrun, *map(str, script), *arguments(values)],
            cwd=folder,
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**environment(), "GLOO_SOCKET_IFNAME": interface, **variables},
        )


@contextlib.contextmanager
def running(nodes):
    try:
        yield
    finally:
        for node in nodes:
            node.kill()  # its rank ends by itself
            node.wait()


def finish(nodes, folder, seconds=200):
    """What the nodes said, once all of them have ended well."""
    codes = [node.wait(timeout=seconds) for node in nodes]
    said = [(folder / f"node{number}.txt").read_text() for number in (1, 2)]
    assert codes == [0, 0], said
    return said


def assert_same_run(folder, run_id, whole):
    """The run of two nodes has the losses of one of two ranks on one node, bit for bit."""
    _, losses, val_loss = kills.state_of(folder, run_id)
    assert losses == whole.train_losses and val_loss == whole.result["val_loss"]


@pytest.mark.slow
def test_two_nodes_train_as_one(rich, rich_run_of, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    values = {**rich, "run_id": "nodes", "resume": "auto"}
    nodes = [
        start(number, f"127.0.0.{number}", "lo", tmp_path, values, port=port) for number in (1, 2)
    ]
    with running(nodes):
        finish(nodes, tmp_path)
    assert_same_run(tmp_path, "nodes", rich_run_of(2))


def test_nodes_that_see_different_checkpoints_are_refused(tiny, tmp_path):
    def before():
        if os.environ["RANK"] == "1":
            os.chdir(tmp_path / "elsewhere")

    (tmp_path / "elsewhere").mkdir()
    values = {**tiny, "save_every": 2, "run_id": "one", "resume": "auto"}
    (ranks.train(tmp_path, values).folder / "result.json").unlink()
    run = ranks.train(tmp_path, values, world_size=2, before=before)
    assert run.code in (1, 2) and "all must share logs/" in run.stdout + run.stderr
    assert not (tmp_path / "elsewhere" / "logs").exists()


# ----- two namespaces


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


@pytest.fixture
def network():
    """(start_node, link): start_node(number, ...) is `start` in one of two joined namespaces;
    link("up" or "down") joins and cuts them."""
    names = [f"speedrun{os.getpid()}n{number}" for number in (1, 2)]
    ends = ["node", "netns", names[0], "type", "veth", "peer", "name", "node", "netns", names[1]]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", *ends)
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "node")
            for device in ("lo", "node"):
                ip("-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces: {getattr(error, 'stderr', error)}")

    def start_node(number, *words, **options):
        prefix = ["ip", "netns", "exec", names[number - 1]]
        return start(number, f"10.77.0.{number}", "node", *words, prefix=prefix, **options)

    try:
        yield start_node, lambda state: ip("-n", names[0], "link", "set", "node", state)
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


@pytest.mark.slow
def test_a_cut_link_ends_both_nodes_and_resume_goes_on(rich, rich_run_of, tmp_path, network):
    """A minute. The launcher that has lost the rendezvous would wait for some more; its rank has
    ended by then."""
    start_node, link = network
    values = {**rich, "save_every": 4, "run_id": "cut", "resume": "auto"}
    folder = tmp_path / "logs" / "cut"
    nodes = [start_node(number, tmp_path, values, script=(PATIENT, 8)) for number in (1, 2)]
    with running(nodes):
        kill_when(nodes[0], folder, 9, lambda launcher: [])
        link("down")
        began = time.monotonic()
        said = [tmp_path / f"node{number}.txt" for number in (1, 2)]
        while not all("status:" in path.read_text() for path in said):
            assert time.monotonic() < began + 40
            time.sleep(0.1)
    assert log_of(folder)[-1].startswith("status:")
    assert re.search("^rank 1: status:", said[1].read_text(), re.MULTILINE)
    link("up")
    nodes = [start_node(number, tmp_path, values) for number in (1, 2)]
    with running(nodes):
        assert "resumed:cut step:8/20" in finish(nodes, tmp_path)[0]
    assert_same_run(tmp_path, "cut", rich_run_of(2))


@pytest.mark.slow
def test_two_nodes_are_restarted_when_a_rank_of_either_dies(rich, rich_run_of, tmp_path, network):
    """A minute."""
    start_node, _ = network
    values = {**rich, "save_every": 4, "run_id": "again", "resume": "auto"}
    folder, own_store = tmp_path / "logs" / "again", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    nodes = [
        start_node(number, tmp_path, values, ["--max-restarts=3"], **own_store) for number in (1, 2)
    ]
    with running(nodes):
        for step, node in ((9, nodes[1]), (14, nodes[0])):
            kill_when(node, folder, step, children_of)
        finish(nodes, tmp_path)
    found = [
        re.fullmatch(r"resumed:again step:(\d+)/20 world_size:2", line) for line in log_of(folder)
    ]
    resumed = [int(match[1]) for match in found if match]
    # A kill takes a moment, in which a busy machine may have saved once more.
    assert len(resumed) == 2 and {*resumed} <= {8, 12, 16}
    assert_same_run(tmp_path, "again", rich_run_of(2))
