"""Chapters 2 and 9: what a terminal shows, and the plot at the end of a run."""
import os
import pty
import re
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest

import ranks
import train_gpt

REWRITE = "\r\x1b[K"  # the terminal goes on at the start of an empty line
draw = train_gpt.plot  # the `cli` fixture replaces it


def screen(text):
    """The lines that a terminal shows in the end."""
    return [line.rpartition(REWRITE)[2] for line in text.replace("\r\n", "\n").removesuffix("\n").split("\n")]


def shapes(lines):
    """Lines without their numbers, names of runs and paths."""
    return [re.sub(r"-?\d+(\.\d+)?(e-?\d+)?|plain|shown", "#", line) for line in lines]


def on_terminal():
    """Make this process believe that it talks to a terminal."""
    sys.stdout.isatty = lambda: True


@pytest.fixture
def terminal(cli, monkeypatch):
    """Let `cli`, whose stream is another one in each phase of a test, believe so."""
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True, raising=False)


@pytest.fixture(scope="module")
def pair(tiny, tmp_path_factory):
    """The same run with its output in a pipe and on a terminal."""
    folder, values = tmp_path_factory.mktemp("console"), {**tiny, "val_every": 2}
    return [ranks.train(folder, {**values, "run_id": run_id}, before=before)
            for run_id, before in (("plain", None), ("shown", on_terminal))]


def logged(run):
    return (run.folder / "log.txt").read_text().split("===== END OF CODE =====\n")[1].splitlines()


def test_a_terminal_shows_header_validation_and_end(pair):
    plain, shown = pair
    assert plain.code == shown.code == 0 and shown.stderr == ""
    lines = screen(shown.stdout)
    kinds = [re.match(r"[a-z]+", line)[0] for line in lines]
    assert kinds[:5] == ["device", "backends", "corpus", "parameters", "memory"] and "disk" in kinds
    assert kinds[kinds.index("disk") + 1:] == ["step", "step", "final", "status"]
    steps = [re.match(r"step:(\d/4) val_loss:\d\.\d{5} train_time:", line)[1] for line in lines[-4:-2]]
    assert steps == ["2/4", "4/4"]
    assert lines[-1].startswith("status:ok ")


def test_the_log_of_a_run_on_a_terminal_has_every_line(pair):
    plain, shown = pair
    assert shapes(logged(shown)) == shapes(logged(plain)) == shapes(plain.lines)
    assert plain.train_losses == shown.train_losses and len(shown.train_losses) == 4


def test_a_pipe_gets_no_control_characters(pair):
    plain, shown = pair
    assert "\x1b" in shown.stdout and "\x1b" not in plain.stdout and "\r" not in plain.stdout
    assert "s to go" not in plain.stdout


def test_progress_is_rewritten_at_every_step(tiny, cli, terminal, monkeypatch):
    monkeypatch.setattr(train_gpt.Clock, "seconds", lambda self: 30.0)
    run = cli(**{**tiny, "run_id": "shown", "steps": 6, "log_every": 2})
    rewritten = re.findall(r"\r\x1b\[K(step \d/6.*? to go)(?=\r)", run.stdout)
    losses = {step: f"training loss {loss:.3f}  " for step, loss in run.train_losses.items()}
    assert rewritten == [
        "step 1/6  30 s, 150 s to go", f"step 2/6  {losses[2]}30 s, 60 s to go",
        f"step 3/6  {losses[2]}30 s, 30 s to go", f"step 4/6  {losses[4]}30 s, 15 s to go",
        f"step 5/6  {losses[4]}30 s, 6 s to go", f"step 6/6  {losses[6]}30 s, 0 s to go"]


def test_a_failure_on_a_terminal_ends_in_its_status(tiny, cli, terminal):
    run = cli(**{**tiny, "run_id": "shown", "steps": 10, "adam_lr": 1e30})
    assert run.code == 1 and screen(run.stdout)[-1] == logged(run)[-1] and logged(run)[-1].startswith("status:nan ")


def test_a_failed_gate_is_seen_on_a_terminal(tiny, cli, terminal, monkeypatch, capsys):
    monkeypatch.setitem(train_gpt.GATES, "normalised", lambda *words: False)
    with pytest.raises(RuntimeError, match="normalised"):
        cli(**{**tiny, "run_id": "shown", "steps": 1})
    *_, gates, _, status = screen(capsys.readouterr().out)
    assert gates.startswith("validity: causal:ok normalised:FAILED local:ok ") and status.startswith("status:error ")


def test_a_resumed_run_says_so_on_a_terminal(rich_run, tmp_path, cli, terminal):
    shutil.copytree(rich_run.folder, tmp_path / "logs" / "rich", ignore=shutil.ignore_patterns("checkpoint.*"))
    run = cli(resume="rich")
    assert run.code == 0 and "resumed:rich step:10/20 world_size:1" in screen(run.stdout)


def test_an_interrupted_run_on_a_real_terminal(tiny, tmp_path):
    outside, inside = pty.openpty()

    def before():
        os.dup2(inside, 1)
        step = train_gpt.Trainer.step

        def interrupted_step(self, number, *rest):
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return step(self, number, *rest)

        train_gpt.Trainer.step = interrupted_step

    run = ranks.train(tmp_path, {**tiny, "run_id": "shown"}, before=before)
    os.close(inside)
    text = os.read(outside, 100_000).decode()
    os.close(outside)
    assert run.code == 130 and run.stdout == run.stderr == ""
    lines = screen(text)
    assert lines[0].startswith("device: ") and lines[-1] == "status:interrupted"
    assert not any(line.startswith(("config:", "run:", "comms:")) or "train_loss" in line for line in lines)
    assert re.search(r"step 2/4  training loss \d\.\d{3}  \d+ s, \d+ s to go", text)
    assert [event["step"] for event in run.metrics] == [1, 2] and logged(run)[-1] == "status:interrupted"


# ----- the plot

@pytest.fixture
def plot_run(monkeypatch):
    """plot_run(function): it stands for records.picture.plot_run."""
    def replace(function):
        monkeypatch.setattr(train_gpt, "plot", draw)
        monkeypatch.setitem(sys.modules, "records.picture", SimpleNamespace(plot_run=function))
    return replace


def test_the_status_names_the_plot(tiny, cli, plot_run):
    plot_run(lambda folder: folder / "loss.png")
    run = cli(**{**tiny, "run_id": "drawn"})
    assert run.code == 0 and run.lines[-1].endswith(" log:logs/drawn/log.txt plot:logs/drawn/loss.png")


def broken(folder):
    raise ZeroDivisionError("no axis")


@pytest.mark.parametrize("function", [broken, None], ids=["an error", "nothing to call"])
def test_a_plot_that_fails_does_not_end_the_run(function, tiny, cli, plot_run):
    plot_run(function)
    run = cli(**{**tiny, "run_id": "undrawn"})
    assert run.code == 0 and run.lines[-1].endswith(" log:logs/undrawn/log.txt")
    assert re.fullmatch(r"no plot: (ZeroDivisionError: no axis|TypeError: .*)\n", run.stderr)
    assert logged(run)[-1] == run.lines[-1]


def test_a_run_without_the_records_package_does_not_need_it(tiny, cli, plot_run, monkeypatch):
    plot_run(broken)
    monkeypatch.setitem(sys.modules, "records.picture", None)  # as if it were not there
    run = cli(**{**tiny, "run_id": "undrawn"})
    assert run.code == 0 and "plot:" not in run.lines[-1] and run.stderr.startswith("no plot: ModuleNotFoundError: ")


def test_a_run_is_drawn(rich_run, tmp_path, monkeypatch):
    folder = tmp_path / "logs" / "rich"
    shutil.copytree(rich_run.folder, folder)
    monkeypatch.chdir(tmp_path)
    assert draw(folder.relative_to(tmp_path)) == " plot:logs/rich/loss.png"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
