"""Boards, which are entries of rules.json: a number of GPUs, and the factor over plain training.
And how their records are shown."""

import json
import os
import re
import shutil
from datetime import datetime
from pathlib import Path

import pytest

import helpers
import records_helpers as made
from records import files, render
from records_helpers import TRACK, call, done, fake_trainer, folder_of, refusal, refused


def test_a_board_has_what_its_track_fixes():
    boards = files.boards_of({"boards": {"a": {"x": 1, "gpus": [2, 8]}, "b": {"track": "a"}}})
    assert boards["b"] == {"track": "a", "x": 1, "gpus": [2, 8]}


def test_runs_that_their_board_does_not_take(pristine, tmp_path, capsys):
    """Records of them are refused, and none are made for nothing."""
    assert "ran without a GPU, and the board" in refusal(made.ruled(pristine.root, gpus=(1, 1)))
    reason = r"world size 1: \S+ takes 2 to 8 GPUs; --world-size"
    assert re.search(reason, refusal(made.ruled(pristine.root, gpus=(2, 8))))
    made.make_repository(tmp_path)
    (tmp_path / "train_gpt.py").write_text(fake_trainer())
    said = refused(made.ruled(tmp_path, gpus=(2, 8)), capsys, "run", "--runs", 2)
    assert re.search(reason, said)
    assert not (tmp_path / "order.txt").exists()


def test_the_first_page_has_the_newest_record_and_its_picture(repository, capsys):
    """The picture is there as soon as the plain GPT's curve is, and is the same each time."""
    folder = folder_of(repository, "Faster")
    ruled_so = made.ruled(repository.root, plain={"record": folder.name, "factor": 7.0})
    done(ruled_so, capsys, "table")
    text = (repository.root / "README.md").read_text()
    assert f"| `{TRACK}` | 0.88 | [Faster](records/{TRACK}/{folder.name}/) | 50.0 |" in text
    assert " | 7.0 times |\n| `web` | 0.88 | not measured yet | - | - | - | - |\n<!-- end" in text
    picture = repository.home / f"{TRACK}.svg"
    assert ".svg" not in text and not picture.exists()
    curve = repository.root / render.PLAIN
    curve.parent.mkdir(parents=True)
    curve.write_text('{"seconds": [10.0, 600.0], "loss": [4.0, 0.9]}')
    assert "README.md: is not current" in refusal(ruled_so)
    done(ruled_so, capsys, "table")
    text = (repository.root / "README.md").read_text()
    assert f"<!-- headline -->\n![Loss of {TRACK} against" in text
    assert f"(records/{TRACK}.svg)\n\n**On the board `{TRACK}` a GPT reaches the target" in text
    assert " in 50.0 s of training, 7.0 times as fast as a [plain GPT]" in text
    assert re.search(r"validation loss is 0\.8\S+ ± \S+, n = 6, on Slow CPU", text)
    drawn = picture.read_text()
    for words in (*render.LINES, "target 0.88", "training time, s"):
        assert words in drawn
    assert refusal(ruled_so) == ""
    done(ruled_so, capsys, "table")
    assert picture.read_text() == drawn
    curve.write_text('{"seconds": 1}')
    assert "plain_curve.json: " in refused(ruled_so, capsys, "table")


def test_machine_prints_the_row_of_a_complete_run(repository, capsys):
    """Not of one with settings of its own, nor of another board's, nor of a part of one."""
    log = next((repository.root / "logs").glob("*-01a")) / "log.txt"
    text = log.read_text()
    (began,) = re.findall(r" started:(\S+)$", text, re.MULTILINE)
    end = datetime.fromisoformat(began).timestamp() + 71.25
    os.utime(log, (end, end))
    out = done(repository, capsys, "machine", log.parent.name)
    loss, took = re.search(r"^final val_loss:(\S+) train_time:(\d+)ms", text, re.MULTILINE).groups()
    row = ["Slow CPU (R) @ 2.00GHz x2", "1", f"{int(took) / 1000:.1f}", "71.2"]
    row += [f"{float(loss):.4f}", "torch 2.13.0+cpu, CUDA none", "00000000", began[:10]]
    assert out == f"| {' | '.join(row)} |\n"
    page = (helpers.ROOT / "records/README.md").read_text()
    (header,) = re.findall(r"^\| processor or GPU .*$", page, re.MULTILINE)
    assert header.count("|") == out.count("|")
    for old, new, reason in (
        ("\nbatch:.*", '\noverrides:{"steps": 9}', "settings of its own"),
        (f" track:{TRACK} ", " track:web ", "track web"),
        ("\nstatus:ok .*", "", "did not complete"),
    ):
        log.write_text(re.sub(old, new, text))
        assert reason in refused(repository, capsys, "machine", log.parent.name)
    log.write_text(text)
    for seconds in (-60, int(took) / 1000, 3600):  # gates, too, take their time
        os.utime(log, (end - 71.25 + seconds,) * 2)
        said = refused(repository, capsys, "machine", log.parent.name)
        assert f"date is {seconds:.1f} s after its start, and it tells of 6" in said
    assert "No such file" in call(repository, capsys, "machine", "none")[2]


@pytest.fixture
def package(tmp_path):
    """A copy of the package without records, which is called in its own folder."""
    outside = shutil.ignore_patterns("english*", "__pycache__")
    return shutil.copytree(helpers.ROOT / "records", tmp_path / "records", ignore=outside)


@pytest.mark.parametrize("name, old", [("rules.json", '"alpha": 0.01,'), ("commands.toml", " = ")])
def test_damaged_settings_are_told_in_one_line(package, name, old):
    made.edit(package / name, old, "", count=1)
    done = helpers.python("-m", "records", "verify", cwd=package.parent)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("records: ")


def test_changed_gates_may_judge_after_one_command(package):
    """Those before them, by which no record was judged, may not any more."""
    gates = package / "gates.py"
    gates.write_text(gates.read_text() + "# another\n")
    rules = json.loads((package / "rules.json").read_text())
    assert helpers.python("-m", "records", "gates", cwd=package.parent).returncode == 0
    expected = rules | {"gates_sha256": [made.sha_of(gates.read_text())], "older_gates": {}}
    assert json.loads((package / "rules.json").read_text()) == expected


def test_pages_are_utf8_whatever_the_locale_and_written_whole(package):
    page = Path(shutil.copy(helpers.ROOT / "README.md", package.parent))
    page.write_bytes(page.read_bytes() + "é ± \U0001f600\n".encode())
    done = helpers.python("-m", "records", "table", cwd=package.parent, **helpers.ASCII)
    before = page.read_bytes()
    assert done.returncode == 0 and before.endswith("é ± \U0001f600\n".encode()), done.stderr
    with pytest.raises(OSError), files.whole(page) as partial:
        partial.write_text("half of it")
        raise OSError(28, "No space left on device")
    assert page.read_bytes() == before and not [*package.parent.glob(".partial*")]


def test_a_picture_is_drawn_in_our_style(package, tmp_path):
    """Whatever a user wants of matplotlib."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nlines.linewidth: 9\n")
    (tmp_path / "log.txt").write_text("step:1/2 val_loss:4.0 train_time:9ms\n")
    drawn = []
    for variables in ({}, {"MATPLOTLIBRC": str(tmp_path)}):
        words = "-m records plot log.txt --out plot.svg".split()
        done = helpers.python(*words, cwd=tmp_path, **variables)
        assert done.returncode == 0, done.stderr
        drawn.append((tmp_path / "plot.svg").read_bytes())
    assert drawn[0] == drawn[1]
