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

from helpers import ROOT, content_of, make_trainer

# Stands for the Python that makes .venv, and for .venv's own.
STUB = """#!/bin/sh
echo "$*" >>"$STUB_CALLS"
case "$*" in
*version_info*) exit "${STUB_TOO_OLD:-0}" ;;
--version) echo "Python 3.9.6" ;;
"-m venv --clear .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
"-m pip install "*) exit "${STUB_PIP_STATUS:-0}" ;;
- | "- "*) echo status:ok; exit "${STUB_STATUS:-0}" ;;
esac
exit 0
"""
LAUNCH = re.search(r"<<'PYTHON'\n(.*?\n)PYTHON\n", (ROOT / "run.sh").read_text(), re.DOTALL)[1]


class Copy:
    """A repository with run.sh, and a way to call it."""

    def __init__(self, folder):
        self.folder, self.calls_file = folder, folder / "calls"
        for name in ("run.sh", "requirements.txt", ".ci/run"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        self.python = self.stub("python-stub")

    def stub(self, name):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STUB)
        path.chmod(0o755)
        return path

    def set_up(self):
        """As after a first call."""
        self.stub(".venv/bin/python")
        stamp = self.folder / ".venv/installed-requirements.txt"
        shutil.copy(self.folder / "requirements.txt", stamp)
        return self

    def run(self, *words, script="run.sh", **variables):
        """Call it from another folder. Returns (exit status, stdout, stderr, the stub's calls)."""
        self.calls_file.write_text("")
        names = {"PYTHON": str(self.python), "STUB_CALLS": str(self.calls_file)}
        done = subprocess.run(
            [self.folder / script, *words],
            cwd="/",
            env={**os.environ, **names, **variables},
            text=True,
            capture_output=True,
            timeout=100,
        )
        return done.returncode, done.stdout, done.stderr, self.calls_file.read_text().splitlines()


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


# ----- set-up


def test_help_sets_nothing_up(copy):
    code, out, _, calls = copy.run("--help")
    assert (code, calls) == (0, []) and "./run.sh test" in out


def test_set_up_happens_once_and_again_for_other_requirements(copy):
    code, out, err, calls = copy.run("mini", "--data", "my own")
    assert (code, out) == (0, "status:ok\n"), err  # stdout is the trainer's
    assert "-m venv --clear .venv" in calls and any("pip install" in call for call in calls)
    assert calls[-1] == "- --track mini --data my own"
    _, _, err, calls = copy.run("--steps", "10")
    assert (err, calls) == ("", ["- --steps 10"])
    with open(copy.folder / "requirements.txt", "a") as file:
        file.write("another==1.0\n")
    _, _, _, calls = copy.run("mini")
    assert any("pip install" in call for call in calls)
    assert not any("-m venv" in call for call in calls)


def test_a_failed_install_is_done_again(copy):
    code, _, _, calls = copy.run("mini", STUB_PIP_STATUS="1")
    assert code == 1 and "pip install" in calls[-1]  # and nothing was launched
    code, _, _, calls = copy.run("mini", STUB_STATUS="2")
    assert code == 2 and any("pip install" in call for call in calls) and calls[-1][0] == "-"


def test_old_python_is_refused_in_one_line(copy):
    code, _, err, _ = copy.run("mini", STUB_TOO_OLD="1")
    assert code == 2 and not (copy.folder / ".venv").exists()
    assert err.count("\n") == 1 and "3.11" in err and "3.9.6" in err and "PYTHON=" in err


# ----- data, ranks, arguments

ROOMY = {"/proc/meminfo": "MemTotal: 1 kB MemAvailable: 67108864 kB"}
CGROUP = "/sys/fs/cgroup/"


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """launch(words, cores, gpus, files): what run.sh's program does on a machine with so much:
    (ranks, words of the script, builders called, what it says)."""
    builders, started = [], []

    def execv(path, words):
        started.append((1, words[1:]))
        raise SystemExit(0)

    def run(arguments):
        words = [arguments.training_script, *arguments.training_script_args]
        started.append((int(arguments.nproc_per_node), words))

    def build(words, **options):
        builders.append(words[1:])
        return SimpleNamespace(returncode=0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(torchrun, "run", run)
    monkeypatch.setattr(subprocess, "run", build)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

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
    ranks, script, builders, said = launch("--track", "mini", "--micro-batches", "8", cores=11)
    assert ranks == 8 and script == ["train_gpt.py", "--track", "mini", "--micro-batches", "8"]
    assert builders == [["data/text.py"]]
    assert said == (
        "run.sh: 8 rank(s), the most of 8, 4, 2 and 1 that 11 core(s), 64.0 GiB of memory and [8] "
        "micro-batches a step allow\n"
    )


@pytest.mark.parametrize(
    "ranks, cores, micro_batches, files",
    [
        (1, 1, 8, ROOMY),
        (2, 3, 8, ROOMY),
        (2, 8, 6, ROOMY),
        (4, 8, 8, ROOMY | {CGROUP + "cpu.max": "450000 100000"}),
        (8, 8, 8, ROOMY | {CGROUP + "cpu.max": "max 100000", CGROUP + "memory.max": "max"}),
        (1, 8, 8, {"/proc/meminfo": "MemAvailable: 1048576 kB"}),
        (
            2,
            8,
            8,
            ROOMY
            | {CGROUP + "memory.max": "3000000000", CGROUP + "memory.stat": "anon 4096 file 9"},
        ),
    ],
    ids=str,
)
def test_ranks_suit_cores_memory_and_micro_batches(ranks, cores, micro_batches, files, launch):
    words = ["--track", "mini", "--data", "mine", "--micro-batches", str(micro_batches)]
    found, script, builders, _ = launch(*words, cores=cores, files=files)
    assert (found, script, builders) == (ranks, ["train_gpt.py", *words], [])


def test_a_rank_a_gpu_and_the_track_of_the_shards_that_are_there(launch, tmp_path):
    (tmp_path / "data/fineweb10B").mkdir(parents=True)
    for name in ("train_000001", "val_000000"):
        (tmp_path / f"data/fineweb10B/fineweb_{name}.bin").touch()
    ranks, script, builders, said = launch(gpus=8)
    assert (ranks, script) == (8, ["train_gpt.py"]) and "8 GPU(s)" in said
    assert not builders


def test_a_corpus_that_is_there_is_not_built_again(launch, tmp_path):
    (tmp_path / "data/python").mkdir(parents=True)
    for split in ("train", "val"):
        (tmp_path / f"data/python/python_{split}_000000.bin").touch()
    ranks, _, builders, _ = launch("--track", "mini", "--device", "cpu", gpus=8)
    assert ranks == 2 and not builders  # of the CPU's cores, as it is asked to


def test_the_continual_track_builds_both_corpora_and_has_its_own_script(launch):
    words = ["--track", "continual", "--init-from", "first"]
    _, script, builders, _ = launch(*words)
    assert script == ["continual.py", *words]
    assert builders == [["data/text.py"], ["data/text.py", "--corpus", "cpp"]]


@pytest.mark.parametrize("track", ["mini", "continual"])
def test_a_run_is_resumed_by_the_script_of_its_track(track, launch, tmp_path):
    folder = tmp_path / "logs" / "continual"  # a name of a run is no track
    folder.mkdir(parents=True)
    content_of(make_trainer(track=track, run_id="continual", ngram_lr=0), 2, folder)
    _, script, _, _ = launch("--resume", "continual")
    name = {"mini": "train_gpt.py", "continual": "continual.py"}[track]
    assert script == [name, "--resume", "continual"]


@pytest.mark.parametrize(
    "words, script",
    [
        (["--track", "miin"], "train_gpt.py"),
        (["--track", "mini", "--stepz", "3"], "train_gpt.py"),
        (["--track", "mini", "--help"], "train_gpt.py"),
        (["--track", "continual", "--stepz", "3"], "continual.py"),
        (["--track", "mini", "--check", "--data", "mine"], "train_gpt.py"),
    ],
    ids=str,
)
def test_what_the_trainer_answers_reaches_it_at_once(words, script, launch):
    assert launch(*words, gpus=8) == (1, [script, *words], [], "")


# ----- tests

ALL_FILES = "-m pytest tests --numprocesses=2 --dist=worksteal"


def test_tests_run_with_further_arguments(copy):
    for words in ("-k some", "--all"):
        _, _, _, calls = copy.set_up().run("test", *words.split())
        assert calls == [f"{ALL_FILES} {words}"]
    # Of chosen tests none is left out.
    _, _, _, calls = copy.run("test", "tests/trainer/test_run_sh.py", "-x")
    assert calls == ["-m pytest --all tests/trainer/test_run_sh.py -x"]
    _, _, _, calls = copy.run(script=".ci/run")
    assert calls == [f"{ALL_FILES} --all"]
