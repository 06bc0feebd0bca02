"""run.sh: set-up, data, number of ranks, arguments, exit status. In a copy of the repository's
outer files where Python is a stub that writes down how it was called; the program that run.sh hands
to Python runs in this process."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import run as torchrun

import continual
import train_gpt
from helpers import ROOT, content_of, make_trainer

# Stands for the Python that makes .venv, for .venv's own, and for uv where it is said to be there.
STUB = """#!/bin/sh
echo "$*" >>"$STUB_CALLS"
case "$*" in
*version_info*) exit "${STUB_TOO_OLD:-0}" ;;
--version) echo "Python 3.9.6" ;;
"-m venv .venv" | "venv --python "*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
"-m pip --version" | "-m ensurepip") exit "${STUB_NO_PIP:-0}" ;;
"-m pip install "*) exit "${STUB_PIP_STATUS:-0}" ;;
- | "- "*) echo status:ok; exit "${STUB_STATUS:-0}" ;;
esac
exit 0
"""
LAUNCH = re.search(r"<<'PYTHON'\n(.*?\n)PYTHON\n", (ROOT / "run.sh").read_text(), re.DOTALL)[1]


@pytest.fixture
def call(tmp_path):
    """call(*words, **variables): run.sh in a copy of its folder, called from another one: (exit
    status, stdout, stderr, the stub's calls). start: the command in run.sh's place; there: programs
    that the stub stands for."""
    for name in ("run.sh", "requirements.txt", ".ci/run"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python, calls, programs = (tmp_path / name for name in ("python-stub", "calls", "programs"))
    python.write_text(STUB)
    python.chmod(0o755)

    def run(*words, start=(tmp_path / "run.sh",), there=(), **variables):
        calls.write_text("")
        shutil.rmtree(programs, ignore_errors=True)
        programs.mkdir()
        for name in there:
            shutil.copy(python, programs / name)
        own = {"PYTHON": str(python), "STUB_CALLS": str(calls), "PATH": f"{programs}:/usr/bin:/bin"}
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
    code, _, err, calls = call("--steps", "10", STUB_STATUS="2")
    assert (code, err, calls) == (2, "", ["- --steps 10"])
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
    assert err.count("\n") == 1 and "3.11" in err and "3.9.6" in err and "PYTHON=" in err


def test_tests_run_with_further_arguments(call, tmp_path):
    call("--steps", "1")  # which sets up
    all_files = "-m pytest tests --numprocesses=2 --dist=worksteal"
    assert call("test", "-k", "some")[3] == [f"{all_files} -k some"]
    # Of chosen tests none is left out.
    chosen = "tests/trainer/test_run_sh.py"
    assert call("test", chosen, "-x")[3] == [f"-m pytest --all {chosen} -x"]
    assert call(start=[tmp_path / ".ci/run"])[3] == [f"{all_files} --all"]


UV = "pip install --python .venv/bin/python --requirement requirements.txt"


def test_uv_is_used_where_it_is_present(call, tmp_path):
    """In a copy of the repository it makes .venv, without pip, which it does not need either."""
    code, _, _, calls = call(there=["uv"], STUB_NO_PIP="1")
    assert code == 0 and f"venv --python {tmp_path / 'python-stub'} .venv" in calls
    assert UV in calls and not any("-m pip" in call for call in calls)


@pytest.mark.parametrize("no_pip, too_old, words", [("1", "0", "has no pip"), ("0", "1", "3.11")])
def test_an_environment_that_cannot_be_used_is_left_alone(no_pip, too_old, words, call, tmp_path):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    shutil.copy(tmp_path / "python-stub", tmp_path / ".venv/bin/python")
    code, _, err, calls = call(STUB_NO_PIP=no_pip, STUB_TOO_OLD=too_old)
    assert code == 2 and not any("venv" in call for call in calls)
    line = err.splitlines()[-1]
    assert words in line and str(tmp_path / ".venv") in line and "move" in line


def test_run_sh_finds_its_folder_and_bash(call, tmp_path):
    (tmp_path / "a link's folder").mkdir()
    link = tmp_path / "a link's folder" / "train"
    link.symlink_to(tmp_path / "run.sh")
    for start in ([link], ["sh", tmp_path / "run.sh"]):
        code, out, err, _ = call("--steps", "3", start=start)
        assert (code, out) == (0, "status:ok\n"), err
    assert (tmp_path / ".venv").exists() and os.listdir(link.parent) == ["train"]


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_line_ends_of_windows_are_told_with_a_remedy_that_works(call, tmp_path, shell):
    path = tmp_path / "run.sh"
    unix = path.read_bytes()
    path.write_bytes(unix.replace(b"\n", b"\r\n"))
    code, _, err, _ = call("--help", start=(shell, path))
    assert code == 2 and err.count("\n") == 1, err
    subprocess.run(err.partition("; run: ")[2], shell=True, check=True, cwd=tmp_path)
    assert path.read_bytes() == unix and os.access(path, os.X_OK)
    assert call("--help")[0] == 0


# ----- data, ranks, arguments

ROOMY = {"/proc/meminfo": "MemTotal: 1 kB MemAvailable: 67108864 kB"}


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """launch(words, cores, gpus, files): what run.sh's program does on a machine with so much:
    (ranks, words of the script, builders called, what it says)."""
    builders, started = [], []

    def main(script):
        return lambda words: started.append((1, [script, *words]))

    def run(arguments):
        words = [Path(arguments.training_script).name, *arguments.training_script_args]
        started.append((int(arguments.nproc_per_node), words))

    def fork(config, function):
        script = Path(function.__globals__["script"].__file__).name
        return lambda words: started.append((config.nproc_per_node, [script, *words]))

    def build(words, **options):
        builders.append(words[1:])
        return SimpleNamespace(returncode=0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt, "main", main("train_gpt.py"))
    monkeypatch.setattr(continual, "main", main("continual.py"))
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", fork)
    monkeypatch.setattr(torchrun, "run", run)
    monkeypatch.setattr(subprocess, "run", build)

    def launched(*words, cores=2, gpus=0, files=ROOMY):
        said = io.StringIO()
        with monkeypatch.context() as patch, contextlib.redirect_stderr(said):
            patch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
            patch.setattr(os, "access", lambda path, mode: str(path) in files)
            patch.setattr(Path, "read_text", lambda path: files[str(path)])
            patch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
            patch.setattr(torch.cuda, "device_count", lambda: gpus)
            patch.setattr(sys, "argv", ["-", *words])
            with contextlib.suppress(SystemExit):
                exec(compile(LAUNCH, "run.sh", "exec"), {})
        ((ranks, script),) = started
        return ranks, script, builders, said.getvalue()

    return launched


def test_a_track_is_built_and_runs_on_every_core(launch):
    ranks, script, builders, said = launch("--track", "english", "--micro-batches", "8", cores=11)
    assert ranks == 8 and script == ["train_gpt.py", "--track", "english", "--micro-batches", "8"]
    assert builders == [["data/text.py"]]
    assert said == (
        "run.sh: 8 rank(s), the most of 8, 4, 2 and 1 that 11 core(s), 64.0 GiB of memory and [8] "
        "micro-batches a step allow\n"
    )


def limit(file, words):
    """A roomy machine whose container has a limit."""
    return {**ROOMY, f"/sys/fs/cgroup/{file}": words}


@pytest.mark.parametrize(
    "ranks, cores, micro_batches, files",
    [
        (1, 1, 8, ROOMY),
        (2, 3, 8, ROOMY),
        (2, 8, 6, ROOMY),
        (4, 8, 8, limit("cpu.max", "450000 100000")),
        (8, 8, 8, limit("cpu.max", "max 100000") | limit("memory.max", "max")),
        (1, 8, 8, {"/proc/meminfo": "MemAvailable: 1048576 kB"}),
        (2, 8, 8, limit("memory.max", "3000000000") | limit("memory.stat", "anon 4096 file 9")),
    ],
    ids=str,
)
def test_ranks_suit_cores_memory_and_micro_batches(ranks, cores, micro_batches, files, launch):
    words = ["--track", "english", "--data", "mine", "--micro-batches", str(micro_batches)]
    found, script, builders, _ = launch(*words, cores=cores, files=files)
    assert (found, script, builders) == (ranks, ["train_gpt.py", *words], [])


@pytest.mark.parametrize(
    "ranks, words, corpus",
    [
        (8, [], "fineweb10B/fineweb"),
        (2, ["--track", "english", "--device", "cpu"], "english/english"),
    ],
)
def test_a_corpus_that_is_there_is_not_built_again(
    ranks, words, corpus, launch, tmp_path, monkeypatch
):
    """There is a rank a GPU, or a core where the CPU is asked for. Apple's GPUs do not count."""
    for split in ("train", "val"):
        path = tmp_path / f"data/{corpus}_{split}_000001.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    found = launch(*words, gpus=8)
    assert found[:3] == (ranks, ["train_gpt.py", *words], [])
    assert ("Apple GPUs are not supported" in found[3]) == ("cpu" in words)


def test_the_continual_track_builds_both_corpora_and_has_its_own_script(launch):
    words = ["--track", "continual", "--init-from", "first"]
    _, script, builders, _ = launch(*words)
    assert script == ["continual.py", *words]
    assert builders == [["data/text.py"], ["data/text.py", "--corpus", "verse"]]


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
        ("train_gpt.py", "--track english --help"),
        ("continual.py", "--track continual --stepz 3"),
        ("train_gpt.py", "--track english --check --data mine"),
    ],
)
def test_what_the_trainer_answers_reaches_it_at_once(script, words, launch):
    assert launch(*words.split(), gpus=8) == (1, [script, *words.split()], [], "")
