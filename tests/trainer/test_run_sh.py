"""run.sh: its shell part with a stub in Python's place that writes down its calls; its Python part
in this process, or in one of its own where ranks are killed."""

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
    """call(*words, **variables): (exit status, stdout, stderr, the stub's calls) of a copy."""
    for name in ("run.sh", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
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
    assert call("test", "-k", "x")[3] == ["-m pytest -n 2 --dist=worksteal -k x"]
    with open(tmp_path / "requirements.txt", "a") as file:
        file.write("another==1.0\n")
    _, _, _, calls = call()
    assert any("pip install" in call for call in calls)
    assert not any("venv" in call for call in calls)


def test_an_old_python_is_refused_in_one_line(call, tmp_path):
    code, _, err, calls = call("english", STUB_TOO_OLD="1")
    assert code == 2 and len(calls) == 1 and not (tmp_path / ".venv").exists()
    named = (str(tmp_path / "python-stub"), "3.11", "PYTHON=")
    assert all(word in err for word in named) and err.count("\n") == 1


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """launch(*words, gpus): (ranks; script and its words; builders called; stderr) of the Python
    part on a machine with two cores."""
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
    monkeypatch.setattr(subprocess, "call", lambda words, **_: builders.append(words[1:]))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(os, "environ", {**os.environ})
    source = LAUNCH.replace('"/proc/self/cgroup"', '"absent"')

    def launched(*words, gpus=0):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(sys, "argv", ["-", *words])
        with contextlib.suppress(SystemExit):
            exec(compile(source, "run.sh", "exec"), {})
        return *started[-1], builders, capsys.readouterr().err

    return launched


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
    functions = {}
    exec(LAUNCH.partition("words = ")[0], functions)
    functions["read"] = lambda path: files.get(str(path), "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 2**36}.get)
    config = helpers.tiny_config(model_dim=32, ngram_rows=2**21, vocab_size=257)
    assert functions["room_on_cpu"](config) == pytest.approx(room, rel=1e-3)
    said = capsys.readouterr().err
    assert said.startswith("run.sh: ") and (", memory for 0.5 rank(s)" in said) == (room == 0.5)


@pytest.mark.parametrize("ranks, gpus, counts", [(1, 1, 8), (2, 3, 8), (2, 8, 6), (8, 11, 8)])
def test_ranks_divide_the_micro_batches_of_a_step(ranks, gpus, counts, launch):
    words = ["--track", "fineweb", "--micro-batches", str(counts)]
    assert launch(*words, gpus=gpus)[:2] == (ranks, ["train_gpt.py", *words])


@pytest.mark.parametrize(
    "ranks, words, builder",
    [
        (2, f"--track {TRACK} --device cpu", ["data/text.py", "--corpus", "english"]),
        (8, "--track fineweb", ["data/fineweb.py"]),
    ],
)
def test_a_corpus_is_built_where_it_is_absent(ranks, words, builder, launch):
    """There is a rank a GPU, or a core where the CPU is asked for."""
    words = words.split()
    assert launch(*words, gpus=8)[:3] == (ranks, ["train_gpt.py", *words], [builder])
    folder = Path(train_gpt.TRACKS[words[1]].data)
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    assert launch(*words, gpus=8)[2] == [builder]  # not once more


def test_a_run_is_resumed_by_the_script_of_its_track(launch, tmp_path):
    (tmp_path / "logs" / "run").mkdir(parents=True)
    trainer = make_trainer(track="continual", run_id="run", ngram_lr=0)
    content_of(trainer, 2, tmp_path / "logs" / "run")
    assert launch("--resume", "run")[1] == ["continual.py", "--resume", "run"]


@pytest.mark.parametrize("track, script", [(TRACK, "train_gpt.py"), ("continual", "continual.py")])
def test_a_check_and_a_wrong_call_are_answered_at_once(track, script, launch):
    for words in (["--check", "--data", "mine"], ["--stepz", "3"]):
        words = ["--track", track, *words]
        assert launch(*words) == (1, [script, *words], [], "")


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
