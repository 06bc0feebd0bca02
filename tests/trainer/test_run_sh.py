"""run.sh: set-up, data, number of ranks, arguments, exit status. In a copy of the repository's
outer files where Python is a stub that writes down how it was called; the program that run.sh hands
to Python runs in this process."""

import contextlib
import io
import multiprocessing
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

# Stands for the Python that makes .venv, and for .venv's own.
STUB = """#!/bin/sh
echo "$*" >>"$STUB_CALLS"
case "$*" in
*version_info*) exit "${STUB_TOO_OLD:-0}" ;;
"-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
"-m pip install "*) exit "${STUB_PIP_STATUS:-0}" ;;
- | "- "*) echo status:ok; exit "${STUB_STATUS:-0}" ;;
esac
exit 0
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

    def run(*words, start=(tmp_path / "run.sh",), **variables):
        calls.write_text("")
        own = {"PYTHON": str(python), "STUB_CALLS": str(calls), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [*start, *words],
            cwd="/",
            env={**os.environ, **own, **variables},
            text=True,
            capture_output=True,
            timeout=100,
        )
        return done.returncode, done.stdout, done.stderr, calls.read_text().splitlines()

    return run


# ----- set-up


def test_set_up_happens_once_and_again_for_other_requirements(call, tmp_path):
    code, out, _, calls = call("--help")
    assert (code, calls) == (0, []) and "./run.sh test" in out
    code, out, err, calls = call("english", "--data", "my own")
    assert (code, out) == (0, "status:ok\n"), err  # stdout is the trainer's
    assert "-m venv .venv" in calls and any("pip install" in call for call in calls)
    assert calls[-1] == "- --track english --data my own"
    code, _, _, calls = call("--steps", "10", STUB_STATUS="2")
    assert (code, calls) == (2, ["- --steps 10"])
    with open(tmp_path / "requirements.txt", "a") as file:
        file.write("another==1.0\n")
    _, _, _, calls = call("english")
    assert any("pip install" in call for call in calls)
    assert not any("-m venv" in call for call in calls)


def test_a_failed_install_is_done_again(call):
    code, _, _, calls = call("english", STUB_PIP_STATUS="1")
    assert code == 1 and "pip install" in calls[-1]  # and nothing was launched
    code, _, _, calls = call("english")
    assert code == 0 and any("pip install" in call for call in calls) and calls[-1][0] == "-"


def test_old_python_is_refused_in_one_line(call, tmp_path):
    code, _, err, _ = call("english", STUB_TOO_OLD="1")
    assert code == 2 and not (tmp_path / ".venv").exists()
    assert "3.11" in err and str(tmp_path / "python-stub") in err and "PYTHON=" in err


def test_tests_run_with_further_arguments(call, tmp_path):
    call("--steps", "1")  # which sets up
    all_files = "-m pytest tests --numprocesses=2 --dist=worksteal"
    assert call("test", "-k", "some")[3] == [f"{all_files} -k some"]
    # Of chosen tests none is left out.
    chosen = "tests/trainer/test_run_sh.py"
    assert call("test", chosen, "-x")[3] == [f"-m pytest --all {chosen} -x"]
    assert call(start=[tmp_path / ".ci/run"])[3] == [f"{all_files} --all"]


def test_an_environment_that_cannot_be_used_is_left_alone(call, tmp_path):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    shutil.copy(tmp_path / "python-stub", tmp_path / ".venv/bin/python")
    code, _, err, calls = call(STUB_TOO_OLD="1")
    assert code == 2 and not any("venv" in call for call in calls)
    line = err.splitlines()[-1]
    assert "3.11" in line and str(tmp_path / ".venv") in line and "move" in line


def test_run_sh_finds_its_folder_and_bash(call, tmp_path):
    (tmp_path / "a link's folder").mkdir()
    link = tmp_path / "a link's folder" / "train"
    link.symlink_to(tmp_path / "run.sh")
    for start in ([link], ["sh", tmp_path / "run.sh"]):
        code, out, err, _ = call("--steps", "3", start=start)
        assert (code, out) == (0, "status:ok\n"), err
    assert (tmp_path / ".venv").exists() and os.listdir(link.parent) == ["train"]


# ----- data, ranks, arguments

ROOMY = {"/proc/meminfo": "MemTotal: 1 kB MemAvailable: 67108864 kB"}


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """launch(words, cores, gpus, files): what run.sh's program does on a machine with so much:
    (ranks, words of the script, builders called, what it says)."""
    builders, started = [], []

    def main(script):
        return lambda words: started.append((1, [script, *words]))

    class Process:
        """A rank that ends at once."""

        exitcode = 0

        def __init__(self, target, args):
            script = Path(target.__globals__["script"].__file__).name
            started.append((target.__globals__["ranks"], [script, *target.__globals__["words"]]))

        def start(self):
            """It has ended."""

    def build(words, **options):
        builders.append(words[1:])
        return SimpleNamespace(returncode=0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt, "main", main("train_gpt.py"))
    monkeypatch.setattr(continual, "main", main("continual.py"))
    fork = SimpleNamespace(Process=Process)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)
    monkeypatch.setattr(subprocess, "run", build)

    def launched(*words, cores=2, gpus=0, files=ROOMY):
        said = io.StringIO()
        with monkeypatch.context() as patch, contextlib.redirect_stderr(said):
            patch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
            patch.setattr(os, "environ", {**os.environ})
            patch.setattr(os, "access", lambda path, mode: str(path) in files)
            patch.setattr(Path, "read_text", lambda path: files[str(path)])
            patch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
            patch.setattr(torch.cuda, "device_count", lambda: gpus)
            patch.setattr(sys, "argv", ["-", *words])
            with contextlib.suppress(SystemExit):
                exec(compile(LAUNCH, "run.sh", "exec"), {})
        ranks, script = started[0]
        assert len(started) == ranks
        return ranks, script, builders, said.getvalue()

    return launched


def test_a_track_is_built_and_runs_on_every_core(launch):
    ranks, script, builders, said = launch("--track", "english", "--micro-batches", "8", cores=11)
    assert ranks == 8 and script == [
        "train_gpt.py",
        "--track",
        "english",
        "--micro-batches",
        "8",
    ]
    assert builders == [["data/text.py"]]
    assert said.startswith("run.sh: 8 rank(s), the most of 8, 4, 2 and 1 that 11 core(s), 64.0 GiB")
    assert said.endswith(" and [8] micro-batches a step allow\n") and said.count("\n") == 1


def limited(groups, *files):
    """A roomy machine whose process is in these control groups, which have limits."""
    limits = {f"/sys/fs/cgroup/{path}": words for path, words in files}
    return {**ROOMY, "/proc/self/cgroup": groups, **limits}


OWN = "0::/user/job\n"  # of cgroup v2, below the root
OLD = "5:cpu,cpuacct:/job\n4:memory:/a/job\n0::/\n"  # of v1


@pytest.mark.parametrize(
    "ranks, cores, micro_batches, files",
    [
        (1, 1, 8, ROOMY),
        (2, 3, 8, ROOMY),
        (2, 8, 6, ROOMY),
        (1, 8, 8, {"/proc/meminfo": "MemAvailable: 1048576 kB"}),
        (8, 8, 8, limited(OWN, ("cpu.max", "max 100000"), ("memory.max", "max"))),
        (4, 8, 8, limited("0::/\n", ("cpu.max", "450000 100000"))),
        (4, 8, 8, limited(OWN, ("user/cpu.max", "450000 100000"))),
        (2, 8, 8, limited(OWN, ("user/job/cpu.max", "250000 100000"))),
        (1, 8, 8, limited(OWN, ("user/job/cpu.max", "50000 100000"))),
        (2, 8, 8, limited(OWN, ("user/job/memory.max", "3000000000"))),
        (1, 8, 8, limited(OWN, ("user/job/memory.max", "500000000"))),
        (
            2,
            8,
            8,
            limited(
                OLD,
                ("cpu,cpuacct/job/cpu.cfs_quota_us", "250000"),
                ("cpu,cpuacct/job/cpu.cfs_period_us", "100000"),
            ),
        ),
        (8, 8, 8, limited(OLD, ("cpu,cpuacct/job/cpu.cfs_quota_us", "-1"))),
        (2, 8, 8, limited(OLD, ("memory/a/memory.limit_in_bytes", "3000000000"))),
    ],
    ids=str,
)
def test_ranks_suit_cores_memory_and_micro_batches(ranks, cores, micro_batches, files, launch):
    words = ["--track", "english", "--data", "mine", "--micro-batches", str(micro_batches)]
    found, script, builders, said = launch(*words, cores=cores, files=files)
    assert ("crawl" in said) == ("500000000" in str(files))
    assert (found, script, builders) == (ranks, ["train_gpt.py", *words], [])


@pytest.mark.parametrize(
    "ranks, words, corpus",
    [
        (8, [], "fineweb10B/fineweb"),
        (2, ["--track", "english", "--device", "cpu"], "english/english"),
    ],
)
def test_a_corpus_that_is_there_is_not_built_again(ranks, words, corpus, launch, tmp_path):
    """There is a rank a GPU, or a core where the CPU is asked for."""
    for split in ("train", "val"):
        path = tmp_path / f"data/{corpus}_{split}_000001.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = launch(*words, gpus=8)
    assert found[:3] == (ranks, ["train_gpt.py", *words], [])


def test_the_continual_track_has_its_own_corpus_and_script(launch):
    words = ["--track", "continual", "--init-from", "first"]
    _, script, builders, _ = launch(*words)
    assert script == ["continual.py", *words]
    assert builders == [["data/text.py", "--corpus", "verse"]]


@pytest.mark.parametrize(
    "track, script", [("english", "train_gpt.py"), ("continual", "continual.py")]
)
def test_a_run_is_resumed_by_the_script_of_its_track(track, script, launch, tmp_path):
    folder = tmp_path / "logs" / "continual"  # a name of a run is no track
    folder.mkdir(parents=True)
    content_of(make_trainer(track=track, run_id="continual", ngram_lr=0), 2, folder)
    assert launch("--resume", "continual")[1] == [script, "--resume", "continual"]


@pytest.mark.parametrize(
    "script, words",
    [
        ("train_gpt.py", "--track miin"),
        ("continual.py", "--track continual --stepz 3"),
        ("train_gpt.py", "--track english --check --data mine"),
    ],
)
def test_what_the_trainer_answers_reaches_it_at_once(script, words, launch):
    assert launch(*words.split(), gpus=8) == (1, [script, *words.split()], [], "")


# ----- the end of a rank


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_a_signal_ends_is_named(number, tiny, tmp_path):
    """And neither the log nor the last line says that the run was interrupted."""
    values = {**tiny, "track": "english", "steps": 2000, "run_id": "run"}
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
                os.kill(int(children.split()[1]), number)
    assert process.returncode == 1
    assert said[-1].startswith(f"status:error rank 1 was ended by {number.name}")
    assert ("perhaps by the system for memory" in said[-1]) == (number == signal.SIGKILL)
    log = helpers.log_of(tmp_path / "logs" / "run")
    assert log[-1].startswith("status:error") and "interrupted" not in "".join(said + log)
