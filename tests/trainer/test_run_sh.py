"""run.sh: set-up, data, number of ranks, arguments, exit status. Its shell part runs in a copy of
the folder, with a stub in Python's place that writes down its calls; its Python part runs in this
process."""

import contextlib
import os
import re
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
import train_gpt
from helpers import ROOT, content_of, make_trainer

TRACK = helpers.TINY["track"]
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # which run.sh takes over
# Stands for the Python that makes .venv, and for .venv's own.
STUB = """#!/bin/sh
echo "$*" >>"$STUB_CALLS"
case "$*" in
*version_info*) exit "${STUB_TOO_OLD:-0}" ;;
"-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
"-m pip install "*) exit "${STUB_PIP_STATUS:-0}" ;;
- | "- "*) echo status:ok; exit "${STUB_STATUS:-0}" ;;
esac
"""
LAUNCH = re.search(r"<<'PYTHON'\n(.*?\n)PYTHON\n", (ROOT / "run.sh").read_text(), re.DOTALL)[1]


@pytest.fixture
def call(tmp_path):
    """call(*words, **variables): run.sh in a copy of its folder, called from another one: (exit
    status, stdout, stderr, the stub's calls). start: the command in run.sh's place."""
    for name in ("run.sh", "requirements.txt", ".ci/run"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python, calls = tmp_path / "python-stub", tmp_path / "calls"
    python.write_text(STUB)
    python.chmod(0o755)
    own = {**os.environ, "PYTHON": str(python), "STUB_CALLS": str(calls), "PATH": "/usr/bin:/bin"}

    def run(*words, start=(tmp_path / "run.sh",), **variables):
        calls.write_text("")
        options = {"cwd": "/", "env": own | variables, "text": True, "capture_output": True}
        done = subprocess.run([*start, *words], timeout=100, **options)
        return done.returncode, done.stdout, done.stderr, calls.read_text().splitlines()

    return run


def test_set_up_happens_once_and_again_for_other_requirements(call, tmp_path):
    code, out, _, calls = call("--help")
    assert (code, calls) == (0, []) and "./run.sh test" in out
    code, _, _, calls = call("english", STUB_PIP_STATUS="1")
    assert code == 1 and "pip install" in calls[-1]  # nothing was launched
    link = tmp_path / "a link's folder" / "train"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "run.sh")
    code, out, err, calls = call("english", "--data", "my own", start=["sh", link])
    assert (code, out) == (0, "status:ok\n"), err  # stdout is the trainer's
    assert any("pip install" in call for call in calls)
    assert calls[-1] == "- --track english --data my own"
    assert call("--steps", "10", STUB_STATUS="2")[::3] == (2, ["- --steps 10"])
    assert call("test", "-k", "x")[3] == ["-m pytest --numprocesses=2 --dist=worksteal -k x"]
    with open(tmp_path / "requirements.txt", "a") as file:
        file.write("another==1.0\n")
    _, _, _, calls = call(start=[tmp_path / ".ci/run"])
    assert any("pip install" in call for call in calls) and not any(
        "venv" in call for call in calls
    )
    assert calls[-1] == "-m pytest --numprocesses=2 --dist=worksteal --all"


@pytest.mark.parametrize("is_there", [False, True])
def test_an_old_python_is_refused_in_one_line(is_there, call, tmp_path):
    """An environment that is there and cannot be used is left alone."""
    python = tmp_path / "python-stub"
    if is_there:
        (tmp_path / ".venv/bin").mkdir(parents=True)
        shutil.copy(python, tmp_path / ".venv/bin/python")
    code, _, err, calls = call("english", STUB_TOO_OLD="1")
    assert code == 2 and len(calls) == 1 and (tmp_path / ".venv").exists() == is_there
    named = (".venv/bin/python" if is_there else str(python), str(tmp_path), "3.11", "PYTHON=")
    assert all(word in err for word in named) and err.count("\n") == 1


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """launch(*words, cores, gpus, memory, groups, limits): what the Python part does on such a
    machine: (ranks, script and its words, builders called, what it says)."""
    builders, started = [], []

    def start(train, nprocs, **options):
        script = Path(train.__globals__["script"].__file__).name
        started.append((nprocs, [script, *train.__globals__["words"]]))
        return SimpleNamespace(join=lambda **options: True)

    monkeypatch.chdir(tmp_path)
    for script in (train_gpt, continual):
        name = Path(script.__file__).name
        main = lambda words, name=name: started.append((1, [name, *words]))  # noqa: E731
        monkeypatch.setattr(script, "main", main)
    monkeypatch.setattr(torch.multiprocessing, "start_processes", start)
    build = lambda words, **options: builders.append(words[1:])  # noqa: E731
    monkeypatch.setattr(subprocess, "call", build)
    source = LAUNCH.replace('"/proc/self/cgroup"', '"cgroup"').replace('"/sys/fs', '"sys')

    def launched(*words, cores=2, gpus=0, memory=2**36, groups="", limits=None):
        Path("cgroup").write_text(groups)
        for name, content in (limits or {}).items():
            path = Path("sys/cgroup", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": memory}
        with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
            patch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
            patch.setattr(os, "sysconf", pages.get)
            patch.setattr(os, "environ", {**os.environ})
            patch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
            patch.setattr(torch.cuda, "device_count", lambda: gpus)
            patch.setattr(sys, "argv", ["-", *words])
            handlers = {number: signal.getsignal(number) for number in SIGNALS}
            try:
                exec(compile(source, "run.sh", "exec"), {})
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        return *started[0], builders, capsys.readouterr().err

    return launched


def make_shards(prefix):
    """Empty shards of a corpus in the current folder."""
    Path(prefix).parent.mkdir(parents=True)
    for split in ("train", "val"):
        Path(f"{prefix}_{split}_000001.bin").touch()


OWN = "0::/user/job\n"  # of cgroup v2, below the root
OLD = "5:cpu,cpuacct:/job\n4:memory:/a/job\n0::/\n"  # of v1
OLD_CPU = "cpu,cpuacct/job/cpu.cfs_"


@pytest.mark.parametrize(
    "ranks, cores, micro_batches, groups, limits",
    [
        (1, 1, 8, "", {}),
        (2, 3, 8, "", {}),
        (8, 11, 8, "", {}),
        (2, 8, 6, "", {}),
        (8, 8, 8, OWN, {"cpu.max": "max 100000", "memory.max": "max"}),
        (4, 8, 8, "0::/\n", {"cpu.max": "450000 100000"}),
        (4, 8, 8, OWN, {"user/cpu.max": "450000 100000"}),
        (2, 8, 8, OWN, {"user/job/cpu.max": "250000 100000", "cpu.max": "450000 100000"}),
        (1, 8, 8, OWN, {"user/job/cpu.max": "50000 100000"}),
        (2, 8, 8, OWN, {"user/job/memory.max": "3000000000"}),
        (1, 8, 8, OWN, {"user/job/memory.max": "500000000"}),
        (2, 8, 8, OWN, {"user/job/memory.max": "max", "user/memory.high": "3000000000"}),
        (2, 8, 8, OLD, {OLD_CPU + "quota_us": "250000", OLD_CPU + "period_us": "100000"}),
        (8, 8, 8, OLD, {OLD_CPU + "quota_us": "-1", OLD_CPU + "period_us": "100000"}),
        (2, 8, 8, OLD, {"memory/a/memory.limit_in_bytes": "3000000000"}),
    ],
    ids=str,
)
def test_ranks_suit_cores_memory_and_micro_batches(
    ranks, cores, micro_batches, groups, limits, launch
):
    words = ["--track", TRACK, "--micro-batches", str(micro_batches)]
    make_shards("data/english/english")
    *found, said = launch(*words, cores=cores, groups=groups, limits=limits)
    assert found == [ranks, ["train_gpt.py", *words], []]
    assert said.startswith(f"run.sh: {ranks} rank(s): ") and said.count("\n") == 1
    assert (", memory for 0.4 rank(s)," in said) == ("500000000" in limits.values())


@pytest.mark.parametrize(
    "ranks, words, corpus",
    [
        (8, [], "fineweb10B/fineweb"),
        (2, ["--track", TRACK, "--device", "cpu"], "english/english"),
    ],
)
def test_a_corpus_is_built_where_it_is_absent(ranks, words, corpus, launch):
    """There is a rank a GPU, or a core where the CPU is asked for."""
    if words:
        assert launch(*words)[2] == [["data/text.py"]]
    make_shards(f"data/{corpus}")
    found, script, builders, _ = launch(*words, gpus=8)
    assert (found, script) == (ranks, ["train_gpt.py", *words]) and len(builders) == bool(words)


@pytest.mark.parametrize("track, script", [(TRACK, "train_gpt.py"), ("continual", "continual.py")])
def test_a_run_is_resumed_by_the_script_of_its_track(track, script, launch, tmp_path):
    folder = tmp_path / "logs" / "continual"  # a name of a run is no track
    folder.mkdir(parents=True)
    content_of(make_trainer(track=track, run_id="continual", ngram_lr=0), 2, folder)
    assert launch("--resume", "continual")[1] == [script, "--resume", "continual"]


@pytest.mark.parametrize(
    "script, words, builders",
    [
        ("train_gpt.py", "--track miin", []),
        ("train_gpt.py", f"--track {TRACK} --check --data mine", []),
        ("continual.py", "--track continual --stepz 3", []),
        (
            "continual.py",
            "--track continual --init-from x",
            [["data/text.py", "--corpus", "verse"]],
        ),
    ],
)
def test_a_track_has_its_script_which_answers_at_once(script, words, builders, launch):
    *found, said = launch(*words.split(), memory=2**30)
    assert found == [1, [script, *words.split()], builders] and bool(said) == bool(builders)


KILLED = "status:error rank 1 was ended by SIGKILL: killed, perhaps by the system for memory\n"


@pytest.mark.parametrize(
    "number, code, last",
    [
        (signal.SIGTERM, 130, "status:interrupted\n"),  # to run.sh itself; the others to a rank
        (signal.SIGKILL, 1, KILLED),
        (signal.SIGSEGV, 1, "status:error rank 1 was ended by SIGSEGV\n"),
    ],
)
def test_a_signal_ends_the_run_and_is_named(number, code, last, tiny, tmp_path):
    values = {**tiny, "steps": 20_000, "run_id": "run"}
    patches = "import os; os.sched_getaffinity = lambda pid: {0, 1}\n"
    with subprocess.Popen(
        [sys.executable, "-c", patches + LAUNCH, *helpers.arguments(values)],
        cwd=tmp_path,
        env=helpers.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("step:2/"):
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                is_own = number == signal.SIGTERM
                os.kill(process.pid if is_own else int(children.split()[1]), number)
    assert (process.returncode, said[-1]) == (code, last)
    log = helpers.log_of(tmp_path / "logs" / "run")
    assert ("interrupted" in "".join(said + log)) == is_own and log[-1].startswith("status:")
