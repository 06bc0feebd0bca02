"""The launcher. run.sh, with a stub in Python's place that writes down its calls; launch.py in this
process, or in one of its own where ranks are killed."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import continual
import helpers
import launch
import train_gpt
from helpers import ROOT, content_of, make_trainer

TRACK = helpers.TINY["track"]

# ----- run.sh

# All that run.sh calls beside Python, so that it finds no nvidia-smi
TOOLS = "bash sh basename cat cksum cmp cp cut dirname grep ln mkdir readlink rm sed".split()
# Stands for the Python that makes .venv, and for .venv's own.
STUB = f"""#!/bin/sh
echo "$*" >>"$STUB_CALLS"
case "$*" in
*version_info*) [ -z "$STUB_REASON" ] || {{ printf "$STUB_REASON" >&2; exit 1; }} ;;
"-m venv .venv")
    mkdir -p .venv/bin && [ -z "$STUB_TORN" ] && cp "$0" .venv/bin/python ;;
"-m pip config list") exec {sys.executable} "$@" ;;
"-m pip install "*"$STUB_NO_PIP"*) [ -z "$STUB_NO_PIP" ] ;;
launch.py*)
    echo "$0" >"$STUB_CALLS.python"
    echo "$TORCHINDUCTOR_CACHE_DIR" >>"$STUB_CALLS.python"
    echo status:ok
    exit "${{STUB_STATUS:-0}}" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A folder whose path has a space, with run.sh and what it reads."""
    folder = tmp_path / "a checkout"
    folder.mkdir()
    for name in ("run.sh", "requirements.txt", "requirements-test.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def call(checkout, tmp_path):
    """call(*words, **variables): (exit status, stdout, stderr, the stub's calls) of the checkout's
    run.sh, on Linux unless told otherwise, without settings of pip."""
    python, calls = tmp_path / "python-stub", tmp_path / "calls"
    (tmp_path / "bin").mkdir()
    for name in TOOLS:
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    for path, text in ((python, STUB), (tmp_path / "bin/uname", "#!/bin/sh\necho $STUB_SYSTEM\n")):
        path.write_text(text)
        path.chmod(0o755)
    own = {"PYTHON": python, "STUB_CALLS": calls, "STUB_SYSTEM": "Linux", "HOME": tmp_path}
    own |= {"PATH": str(tmp_path / "bin"), "PIP_CONFIG_FILE": os.devnull}

    def run(*words, start=(checkout / "run.sh",), **variables):
        calls.write_text("")
        options = {"cwd": "/", "env": own | variables, "text": True, "capture_output": True}
        done = subprocess.run([*start, *words], timeout=100, **options)
        return done.returncode, done.stdout, done.stderr, calls.read_text().splitlines()

    return run


def installed(calls):
    """The words of each call of `pip install`."""
    start = "-m pip install "
    return [call.removeprefix(start) for call in calls if call.startswith(start)]


def test_set_up_happens_once_and_again_for_other_requirements(call, checkout):
    # What is half made is removed.
    assert call("english", STUB_TORN="1")[0] != 0 and not (checkout / ".venv").exists()
    code, _, _, calls = call("english", STUB_NO_PIP="requirements.txt")
    assert code == 1 and installed(calls[-1:])  # nothing was launched
    link = checkout / "a link's folder" / "train"
    link.parent.mkdir()
    link.symlink_to("../again")
    (checkout / "again").symlink_to("run.sh")
    code, out, err, calls = call("english", "--data", "my own", start=["sh", link])
    assert (code, out) == (0, "status:ok\n"), err  # stdout is the trainer's
    assert installed(calls)[-1] == "--requirement requirements.txt"
    assert calls[-1] == "launch.py --track english --data my own"
    assert call("--steps", "10", STUB_STATUS="2")[::3] == (2, ["launch.py --steps 10"])
    assert call()[3] == ["launch.py"]
    tests = "-m pytest -n 2 --dist=worksteal"
    wanted = ["-m pip install --requirement requirements-test.txt", f"{tests} -k x"]
    assert call("test", "-k", "x")[3] == wanted and call("test")[3] == [tests]
    with open(checkout / "requirements.txt", "a") as file:
        file.write("another==1.0\n")
    _, _, _, calls = call()
    assert installed(calls) and not any("venv" in call for call in calls)


@pytest.mark.parametrize(
    "variables, reason",
    [
        ({"STUB_REASON": "older than Python 3.11"}, "python-stub: older than Python 3.11; "),
        ({"STUB_REASON": "no module\\nencodings"}, "python-stub: no module encodings; "),
        ({"PYTHON": "python4"}, "run.sh: python4: command not found; "),
    ],
)
def test_a_python_that_cannot_be_used_is_named_with_its_reason(variables, reason, call, checkout):
    code, out, err, calls = call("english", **variables)
    assert code == 2 and not out and not installed(calls) and not (checkout / ".venv").exists()
    assert reason in err and "PYTHON=" in err and err.count("\n") == 1


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_venv_whose_python_is_gone_is_named(is_installed, call, checkout):
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/bin/python").symlink_to("/gone/python3.11")
    if is_installed:
        shutil.copy(checkout / "requirements.txt", checkout / ".venv/installed-requirements.txt")
    told = "run.sh: .venv/bin/python: a link to a Python that is gone; move .venv away\n"
    assert call("english") == (2, "", told, [])


def test_the_check_of_a_python_is_by_its_version():
    """The check itself, with this Python."""
    check = (ROOT / "run.sh").read_text().split('check="')[1].split('"')[0]
    for version, code in ((check, 0), (check.replace("3, 11", "4, 0"), 1)):
        done = subprocess.run([sys.executable, "-c", version], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (code, "older than Python 3.11\n" * code)


CPU_INDEX = "https://download.pytorch.org/whl/cpu"
HAS_DEVICE = os.path.exists("/proc/driver/nvidia")


@pytest.mark.skipif(HAS_DEVICE, reason="has an NVIDIA device")
@pytest.mark.parametrize("is_in_reach", [True, False])
def test_torch_comes_without_cuda_where_no_device_is(is_in_reach, call):
    variables = {} if is_in_reach else {"STUB_NO_PIP": "--index-url"}
    code, out, err, calls = call("english", **variables)
    alone, rest = installed(calls)
    assert code == 0 and out == "status:ok\n" and rest == "--requirement requirements.txt"
    [pinned] = [word for word in alone.split() if word.startswith("torch==")]
    assert pinned in (ROOT / "requirements.txt").read_text().split()
    assert f"--no-deps --retries 1 --index-url {CPU_INDEX}" in alone
    told = [CPU_INDEX, "PIP_EXTRA_INDEX_URL", "downloads 0.3 GB"]
    assert all(word in err for word in told)
    assert is_in_reach != ("2.8 GB" in err)


OWN_INDEX = "[global]\nindex-url = https://mirror.example/simple\n"


@pytest.mark.parametrize(
    "variables, size",
    [
        ({"PIP_EXTRA_INDEX_URL": "https://mirror.example/simple"}, "2.8 GB"),
        ({"PIP_INDEX_URL": "https://mirror.example/simple"}, "2.8 GB"),
        ({"PIP_NO_INDEX": "1"}, "2.8 GB"),
        ({"PIP_CONFIG_FILE": "pip.conf"}, "2.8 GB"),
        ({"nvidia-smi": "a tool of a GPU"}, "2.8 GB"),
        ({"STUB_SYSTEM": "Darwin"}, "0.2 GB"),
    ],
    ids=str,
)
def test_an_index_of_one_s_own_and_other_machines_keep_pip_s_index(variables, size, call, tmp_path):
    (tmp_path / "pip.conf").write_text(OWN_INDEX)
    variables = {k: v.replace("pip.conf", str(tmp_path / "pip.conf")) for k, v in variables.items()}
    if variables.pop("nvidia-smi", None):
        (tmp_path / "bin/nvidia-smi").symlink_to(shutil.which("cat"))
    code, _, err, calls = call("english", **variables)
    assert code == 0 and installed(calls) == ["--requirement requirements.txt"]
    assert size in err and err.count("\n") == 1


def test_paths_of_torch_s_compiler_have_no_space(call, checkout, tmp_path):
    """It does not quote the folder of its libraries."""
    code, _, err, _ = call("english")
    python, cache = (tmp_path / "calls.python").read_text().splitlines()
    root = Path(python).parents[2]
    assert code == 0 and " " not in python + cache, err
    assert root.samefile(checkout) and cache == f"{root}/.cache/inductor"
    call("english", TORCHINDUCTOR_CACHE_DIR="/mine")
    assert (tmp_path / "calls.python").read_text() == f"{python}\n/mine\n"
    root.unlink()


# ----- launch.py


@pytest.fixture
def launched(tmp_path, monkeypatch, capsys):
    """launched(*words, gpus): (ranks, 0 without a process of their own; script and its words; how
    ranks are started; builders called; stderr) of launch.py on a machine with two cores."""
    builders, started = [], []

    def start(train, args, nprocs, join, start_method):
        main, words = args
        main(words, nprocs, start_method)
        return SimpleNamespace(join=lambda **options: True)

    monkeypatch.chdir(tmp_path)
    for script in (train_gpt, continual):

        def main(words, ranks=0, method="", name=Path(script.__file__).name):
            started.append((ranks, [name, *words], method))

        monkeypatch.setattr(script, "main", main)
    monkeypatch.setattr(torch.multiprocessing, "start_processes", start)
    monkeypatch.setattr(subprocess, "call", lambda words, **_: builders.append(words[1:]))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "environ", {**os.environ, "START_METHOD": ""})
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(launch, "limits", lambda *names: ())

    def call(*words, gpus=0):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        launch.main(list(words))
        return *started[-1], builders, capsys.readouterr().err

    return call


OWN = "0::/user/job\n"  # of cgroup v2, below the root
OLD = "5:cpu,cpuacct:/job\n4:memory:/a/job\n0::/\n"  # of v1
OLD_CPU = "cpu,cpuacct/job/cpu.cfs_"


@pytest.mark.parametrize(
    "room, groups, limits",
    [
        (8, OWN, {"cpu.max": "max 100000", "memory.max": "max"}),
        (4.5, "0::/\n", {"cpu.max": "450000 100000"}),
        (2.5, OWN, {"user/job/cpu.max": "250000 100000", "cpu.max": "450000 100000"}),
        (0.5, OWN, {"user/job/memory.max": "671088640"}),
        (2, OWN, {"user/job/memory.max": "max", "user/memory.high": "2684354560"}),
        (2.5, OLD, {OLD_CPU + "quota_us": "250000", OLD_CPU + "period_us": "100000"}),
        (8, OLD, {OLD_CPU + "quota_us": "-1", OLD_CPU + "period_us": "100000"}),
        (2, OLD, {"memory/a/memory.limit_in_bytes": "2684354560"}),
    ],
    ids=str,
)
def test_ranks_have_a_core_and_memory_each(room, groups, limits, monkeypatch, capsys):
    files = {f"/sys/fs/cgroup/{name}": content for name, content in limits.items()}
    files["/proc/self/cgroup"] = groups
    monkeypatch.setattr(launch, "read", lambda path: files.get(str(path), ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 2**36}.get)
    config = helpers.tiny_config(model_dim=32, ngram_rows=2**21, vocab_size=257)
    assert launch.room_on_cpu(config) == pytest.approx(room, rel=1e-3)
    said = capsys.readouterr().err
    assert said.startswith("run.sh: ") and (", memory for 0.5 rank(s)" in said) == (room == 0.5)


def test_a_system_without_linux_s_files_and_calls_has_its_cores(monkeypatch, tmp_path):
    assert launch.read(tmp_path / "absent") == launch.read(tmp_path) == ""
    (tmp_path / "bytes").write_bytes(b"0::/\xff")
    assert launch.read(tmp_path / "bytes").startswith("0::/")
    monkeypatch.setattr(launch, "Path", lambda *names: tmp_path / "absent")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(os, "sysconf", int)  # of a name: a ValueError, as where it is not known
    assert launch.room_on_cpu(helpers.tiny_config()) == 3


@pytest.mark.parametrize("ranks, gpus, counts", [(1, 1, 8), (2, 3, 8), (2, 8, 6), (8, 11, 8)])
def test_ranks_divide_the_micro_batches_of_a_step(ranks, gpus, counts, launched):
    words = ["--track", "fineweb", "--micro-batches", str(counts)]
    assert launched(*words, gpus=gpus)[:2] == (ranks, ["train_gpt.py", *words])


@pytest.mark.parametrize(
    "system, asked, method",
    [("linux", "", "fork"), ("linux", "spawn", "spawn"), ("darwin", "", "spawn")],
)
def test_ranks_are_forks_where_a_fork_is_safe(system, asked, method, launched, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setitem(os.environ, "START_METHOD", asked)
    assert launched("--track", "fineweb", gpus=2)[2] == method


@pytest.mark.parametrize(
    "ranks, words, builder",
    [
        (2, f"--track {TRACK} --device cpu", ["data/text.py", "--corpus", "english"]),
        (8, "--track fineweb", ["data/fineweb.py"]),
    ],
)
def test_a_corpus_is_built_where_it_is_absent(ranks, words, builder, launched):
    """There is a rank a GPU, or a core where the CPU is asked for."""
    words = words.split()
    assert launched(*words, gpus=8)[:4] == (ranks, ["train_gpt.py", *words], "fork", [builder])
    folder = Path(train_gpt.TRACKS[words[1]].data)
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    assert launched(*words, gpus=8)[3] == [builder]  # not once more


def test_a_run_is_resumed_by_the_script_of_its_track(launched, tmp_path):
    (tmp_path / "logs" / "run").mkdir(parents=True)
    trainer = make_trainer(track="continual", run_id="run", ngram_lr=0)
    content_of(trainer, 2, tmp_path / "logs" / "run")
    assert launched("--resume", "run")[1] == ["continual.py", "--resume", "run"]


@pytest.mark.parametrize("track, script", [(TRACK, "train_gpt.py"), ("continual", "continual.py")])
def test_a_check_and_a_wrong_call_are_answered_at_once(track, script, launched):
    for words in (["--check", "--data", "mine"], ["--stepz", "3"]):
        words = ["--track", track, *words]
        assert launched(*words) == (0, [script, *words], "", [], "")


ON_TWO_CORES = """import os, sys, launch
os.sched_getaffinity = lambda pid: {0, 1}
sys.exit(launch.main(sys.argv[1:]))"""
KILLED = "was ended by SIGKILL: killed, perhaps by the system for memory"


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
@pytest.mark.parametrize(
    "ranks, number, code, last",
    [
        (2, signal.SIGTERM, 130, "status:interrupted"),  # to the launcher; the others to a rank
        (2, signal.SIGKILL, 1, f"status:error rank 1 {KILLED}"),
        (1, signal.SIGKILL, 1, f"status:error rank 0 {KILLED}"),
        (2, signal.SIGSEGV, 1, "status:error rank 1 was ended by SIGSEGV"),
    ],
)
def test_a_signal_ends_the_run_and_is_named(ranks, number, code, last, tiny, tmp_path):
    values = {**tiny, "steps": 20_000, "run_id": "run", "micro_batches": ranks}
    is_own = number == signal.SIGTERM
    said = []
    command, own = ["-c", ON_TWO_CORES], {"stderr": subprocess.DEVNULL, "START_METHOD": ""}
    with helpers.launched(tmp_path, command, values, **own) as process:
        for line in process.stdout:
            said.append(line)
            if line.startswith("step:2/"):
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                ids = [int(number) for number in children.split()]
                os.kill(process.pid if is_own else ids[-1], number)
        process.wait()
    assert (process.returncode, said[-1]) == (code, last + "\n")
    log = helpers.log_of(tmp_path / "logs" / "run")
    assert ("interrupted" in "".join(said + log)) == is_own
    assert log[-1].startswith("status:") == (ranks > 1)  # nobody else writes it


@pytest.mark.slow
def test_ranks_that_are_no_forks_train_and_hear_signals(tiny, tmp_path):
    """The file itself, which new processes import again; on one core there is one rank."""
    values = {**tiny, "steps": 20_000, "run_id": "run"}
    said = []
    own = {"stderr": subprocess.DEVNULL, "START_METHOD": "spawn"}
    with helpers.launched(tmp_path, [ROOT / "launch.py"], values, **own) as process:
        for line in process.stdout:
            said.append(line)
            if line.startswith("step:2/"):
                process.send_signal(signal.SIGINT)
        process.wait()
    assert (process.returncode, said[-1]) == (130, "status:interrupted\n"), "".join(said)
