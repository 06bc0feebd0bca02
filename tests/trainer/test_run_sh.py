"""run.sh: set-up, choice of track and processes, arguments, exit status. In a copy of the
repository's outer files where Python is a stub that writes down how it was called."""

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

import continual  # noqa: F401  its track becomes known
import train_gpt
from helpers import TINY

ROOT = Path(train_gpt.__file__).resolve().parent

# Stands for the Python that makes .venv, and for .venv's own.
STUB = """#!/bin/sh
if [ "$1" = - ]; then
    shift
    for word; do printf '%s\\0' "$word"; done >plan_arguments
    if [ "$STUB_REAL_PYTHON" ]; then exec "$STUB_REAL_PYTHON" - "$@"; fi
    echo "$STUB_PLANNED"; exit
fi
echo "$*" >>"$STUB_CALLS"
case "$*" in
*version_info*) exit "${STUB_TOO_OLD:-0}" ;;
--version) echo "Python 3.9.6" ;;
"-m venv --clear .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
"-m pip install "*) exit "${STUB_PIP_STATUS:-0}" ;;
*train_gpt.py* | *continual.py*)
    echo "OMP $OMP_NUM_THREADS CACHE $TORCHINDUCTOR_CACHE_DIR" >>"$STUB_CALLS"
    echo status:ok; exit "${STUB_STATUS:-0}" ;;
esac
exit 0
"""
NOTHING_PLANNED = "1 train_gpt.py -"
PLAN = re.search(r"<<'PYTHON'\n(.*?\n)PYTHON\n", (ROOT / "run.sh").read_text(), re.DOTALL)[1]


class Copy:
    """A repository with run.sh, and a way to call it."""

    def __init__(self, folder):
        self.folder, self.calls_file = folder, folder / "calls"
        for name in ("run.sh", "requirements.txt", ".ci/run"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        for name in ("train_gpt.py", "continual.py"):
            (folder / name).symlink_to(ROOT / name)
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
        shutil.copy(
            self.folder / "requirements.txt", self.folder / ".venv/installed-requirements.txt"
        )
        return self

    def run(self, *words, gpus=None, **options):
        """Call run.sh. Returns (exit status, stdout, stderr, the stub's calls). With gpus, the
        launch plan is made by this process, which sees so many devices then, for the words that a
        first call has passed to it."""
        if gpus is None:
            return self.call(*words, **options)
        self.call(*words)
        planned, said = self.plan(gpus)
        code, out, err, calls = self.call(*words, planned=planned, **options)
        return code, out, said + err, calls

    def call(self, *words, script="run.sh", planned=NOTHING_PLANNED, **variables):
        """Call it from another folder, with the launch plan `planned`."""
        self.calls_file.write_text("")
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in ("OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR")
        }
        environment |= {
            "PYTHON": str(self.python),
            "STUB_CALLS": str(self.calls_file),
            "STUB_PLANNED": planned,
        }
        done = subprocess.run(
            [self.folder / script, *words],
            cwd="/",
            env={**environment, **variables},
            text=True,
            capture_output=True,
            timeout=100,
        )
        return done.returncode, done.stdout, done.stderr, self.calls_file.read_text().splitlines()

    def plan(self, gpus):
        """(stdout, stderr) of the Python in run.sh."""
        arguments = (self.folder / "plan_arguments").read_text().split("\0")[:-1]
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.chdir(self.folder)
            patch.setattr(sys, "argv", ["-", *arguments])
            patch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
            patch.setattr(torch.cuda, "device_count", lambda: gpus)
            with contextlib.suppress(SystemExit):
                exec(compile(PLAN, "run.sh", "exec"), {})
        return out.getvalue(), err.getvalue()


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


def launch_of(calls):
    """The call that starts the trainer."""
    return next(call for call in calls if "train_gpt.py" in call or "continual.py" in call)


@pytest.mark.parametrize("name", ["run.sh", ".ci/run", "benchmarks/gpu.sh"])
def test_scripts_are_executable_and_parse(name):
    subprocess.run(["bash", "-n", ROOT / name], check=True)
    assert os.access(ROOT / name, os.X_OK)


def test_requirements_are_pinned():
    lines = [
        line
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if line and line[0] != "#"
    ]
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+==[0-9][0-9.]*", line) for line in lines), lines
    assert {line.split("==")[0] for line in lines} >= {
        "torch",
        "numpy",
        "tiktoken",
        "huggingface_hub",
        "tqdm",
        "matplotlib",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
    }


# ----- set-up


def test_help_sets_nothing_up(copy):
    code, out, _, calls = copy.run("--help")
    assert (code, calls) == (0, []) and "./run.sh test" in out


def test_set_up_happens_once(copy):
    code, out, err, calls = copy.run("nano")
    assert (code, out) == (0, "status:ok\n"), err  # stdout is the trainer's
    assert "-m venv --clear .venv" in calls and any("pip install" in call for call in calls)
    _, _, err, calls = copy.run("nano")
    assert not err and not any("venv" in call or "pip" in call for call in calls)


def test_changed_requirements_are_installed_into_the_same_environment(copy):
    copy.set_up()
    with open(copy.folder / "requirements.txt", "a") as file:
        file.write("another==1.0\n")
    _, _, _, calls = copy.run("nano")
    assert any("pip install" in call for call in calls) and not any(
        "-m venv" in call for call in calls
    )


def test_failed_install_is_done_again(copy):
    code, _, _, calls = copy.run("nano", STUB_PIP_STATUS="1")
    assert code == 1 and "pip install" in calls[-1]  # and nothing was launched
    code, _, _, calls = copy.run("nano")
    assert code == 0 and any("pip install" in call for call in calls) and launch_of(calls)


def test_old_python_is_refused_in_one_line(copy):
    code, _, err, _ = copy.run("nano", STUB_TOO_OLD="1")
    assert code == 2 and not (copy.folder / ".venv").exists()
    assert err.count("\n") == 1 and "3.11" in err and "3.9.6" in err and "PYTHON=" in err


# ----- tracks, processes, arguments


def test_options_alone_go_to_the_default_track(copy):
    code, _, err, calls = copy.set_up().run("--steps", "10", gpus=0)
    assert (code, err) == (0, "")
    assert calls[0] == "data/text.py"
    assert launch_of(calls) == "train_gpt.py --steps 10"
    assert calls[-1] == f"OMP  CACHE {copy.folder}/.cache/inductor"


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the plan would be for the GPUs that are here"
)
@pytest.mark.slow
def test_the_plan_is_made_by_the_environments_python(copy):
    """The one test whose plan is not made in this process."""
    words = "nano --steps 10 --data".split()
    code, _, err, calls = copy.set_up().run(*words, "my own", STUB_REAL_PYTHON=sys.executable)
    assert (code, err) == (0, "")
    assert launch_of(calls) == calls[0] == "train_gpt.py --track nano --steps 10 --data my own"


def test_fineweb_is_the_default_where_gpus_and_shards_are(copy):
    shards = copy.set_up().folder / "data" / "fineweb10B"
    shards.mkdir(parents=True)
    for split in ("train", "val"):
        (shards / f"fineweb_{split}_000000.bin").touch()
    _, _, err, calls = copy.run(gpus=8)
    words = "-m torch.distributed.run --standalone --nproc_per_node=8 train_gpt.py"
    assert (launch_of(calls), err) == (words, "")
    assert not any("fineweb.py" in call for call in calls)
    (shards / "fineweb_train_000001.bin.part").touch()  # a download that was cut short
    _, _, _, calls = copy.run("fineweb", gpus=8)
    assert calls[0] == "data/fineweb.py"


def test_the_continual_track_builds_both_corpora_and_has_its_own_script(copy):
    _, _, _, calls = copy.set_up().run("continual", "--init-from", "first", gpus=0)
    assert calls[:2] == ["data/text.py", "data/text.py --corpus cpp"]
    assert launch_of(calls) == "continual.py --track continual --init-from first"


def test_the_continual_track_runs_on_several_gpus(copy):
    _, _, _, calls = copy.set_up().run("--track", "continual", "--init-from=first", gpus=2)
    assert launch_of(calls) == (
        "-m torch.distributed.run --standalone --nproc_per_node=2 continual.py "
        "--track continual --init-from=first"
    )


@pytest.mark.parametrize("track", ["nano", "continual"])
def test_a_run_is_resumed_by_the_script_of_its_track(track, copy):
    folder = copy.set_up().folder / "logs" / "continual"  # a name of a run is no track
    folder.mkdir(parents=True)
    values = {**TINY, "track": track, "run_id": "continual"}
    config = train_gpt.with_values(train_gpt.TRACKS[track], values)
    trainer = train_gpt.Trainer(config, train_gpt.Runtime("cpu"))
    state = train_gpt.TrainLoader.START
    content = train_gpt.checkpoint_content(trainer, 2, state, 1.0)
    train_gpt.save_checkpoint(folder / "step_000002.pt", content)
    _, _, _, calls = copy.run("--resume", "continual", gpus=0)
    script = {"nano": "train_gpt.py", "continual": "continual.py"}[track]
    assert launch_of(calls) == f"{script} --resume continual"
    assert calls[:1] == ["data/text.py"]


def test_idle_gpus_are_announced(copy):
    _, _, err, calls = copy.set_up().run("nano", "--micro-batches", "6", gpus=4)
    assert "1 of 4 GPUs idle" in err
    assert "--nproc_per_node=3 train_gpt.py --track nano --micro-batches 6" in launch_of(calls)


def test_one_process_on_the_cpu_if_asked_for(copy):
    words = ["nano", "--device", "cpu", "--data", "my own/corpus"]
    _, _, _, calls = copy.set_up().run(*words, gpus=8)  # no builder, no torchrun
    assert calls[0] == "train_gpt.py --track nano --device cpu --data my own/corpus"


@pytest.mark.parametrize(
    "words, script",
    [
        (("naon",), "train_gpt.py"),
        (("nano", "--stepz", "3"), "train_gpt.py"),
        (("nano", "--help"), "train_gpt.py"),
        (("continual", "--help"), "continual.py"),
        (("continual", "--stepz", "3"), "continual.py"),
    ],
    ids=str,
)
def test_what_the_trainer_answers_reaches_it_at_once(copy, words, script):
    code, _, err, calls = copy.set_up().run(*words, gpus=8, STUB_STATUS="2")
    assert code == 2 and not err
    assert calls[0] == " ".join([script, "--track", *words])


# ----- tests

ALL_FILES = "-m pytest tests --numprocesses=2 --dist=worksteal"


def test_tests_run_with_further_arguments(copy):
    for words in ("-k some", "--all"):
        _, _, _, calls = copy.set_up().run("test", *words.split())
        assert calls == [f"{ALL_FILES} {words}"]


def test_of_chosen_tests_none_is_left_out(copy):
    _, _, _, calls = copy.set_up().run("test", "tests/trainer/test_run_sh.py", "-x")
    assert calls == ["-m pytest --all tests/trainer/test_run_sh.py -x"]


@pytest.mark.parametrize("with_all", [False, True])
@pytest.mark.parametrize("with_long", [False, True])
def test_what_is_marked_runs_where_it_is_asked_for(with_all, with_long, pytestconfig, monkeypatch):
    class Item:
        path = "tests/test_any.py"

        def __init__(self, *marks):
            self.marks = {mark: mark for mark in marks}
            self.get_closest_marker, self.add_marker = (
                self.marks.get,
                lambda mark: self.marks.update(timeout=mark),
            )

    items = [quick, slow, long] = [Item(), Item("slow"), Item("long")]
    left_out = []
    config = SimpleNamespace(
        getoption={"--all": with_all}.get,
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
    )
    conftest = next(
        plugin
        for plugin in pytestconfig.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(ROOT / "tests/conftest.py")
    )
    monkeypatch.setenv("LONG", "1" if with_long else "")
    conftest.pytest_collection_modifyitems(config, items)
    assert items == [quick, *[slow] * with_all, *[long] * with_long]
    assert left_out == [*[slow] * (not with_all), *[long] * (not with_long)]
    seconds = [item.marks["timeout"].args[0] for item in (quick, slow, long)]
    assert seconds == sorted(set(seconds))


def test_ci_runs_all_tests(copy):
    _, _, _, calls = copy.set_up().run(script=".ci/run")
    assert calls == [f"{ALL_FILES} --all"]
