"""run, ab and reproduce with scripts that write a log in no time; diff and plot."""

import fcntl
import os
import re
import signal
import subprocess

import pytest
from matplotlib.axes import Axes

import records_helpers as made
from records import stats
from records_helpers import call

MINE = f"mini-{made.sha_of(made.fake_trainer())[:8]}-*"


@pytest.fixture
def repository(tmp_path):
    """A first record of four runs, and a working script that is faster and better."""
    repository = made.make_repository(tmp_path)
    slow = made.fake_trainer(loss=0.85, time=150)
    (tmp_path / "train_gpt.py").write_text(slow)
    assert main_run(repository) == 0
    made.submitted(repository, "First", slow)
    (tmp_path / "train_gpt.py").write_text(made.fake_trainer())
    (tmp_path / "order.txt").unlink()
    return repository


def main_run(repository):
    return made.main(["run", "--runs", "3"], made.fresh(repository))


def tip(repository):
    return next((repository.root / "records/mini").glob("*_First"))


def runs_in(repository, name):
    paths = sorted((repository.root / "logs").glob(f"{name}/log.txt"))
    return [made.run_at(path) for path in paths]


def drawn_order(count, source=None):
    """Numbers of pairs' runs with their letters, in the order that follows from the code."""
    code = made.sha_of(source or made.fake_trainer())
    return [f"{number:02d}{side}" for side, number in stats.order_of_pairs(code, 1, count)]


# ----- ab


def test_ab_goes_on_where_it_stopped_and_its_pairs_are_a_record(repository, capsys):
    planned = drawn_order(6)
    (repository.root / "stop").write_text(f"{planned[2]} failed")
    status, out, err = call(repository, capsys, "ab", "--runs", 6)
    assert status == 2 and out.count("val_loss") == 2
    assert re.search(rf"-{planned[2]} ended with exit status 1: 'it broke'; .*console.txt has", err)
    assert re.search(
        r"^train_gpt.py differs from \S+_First: 1 lines added, 1 removed\.$", out, re.M
    )
    status, out, err = call(repository, capsys, "ab", "--runs", 6)
    assert status == 0, out + err
    assert [run for run, _ in made.order_of(repository)] == [*planned[:3], *planned[2:]]
    gain = r"-\d\d\.\d % \(-\d.* to -\d.*\)"
    assert re.search(
        rf"^time differs by {gain}; that it is less: p = 0.0046, at most", out, re.M
    ), out
    assert re.search(r"^train_gpt.py, on fake, .*: 0.\d s, mean loss 0.80\d+$", out, re.M), out
    assert re.search(r"_First, in pairs with it, on fake, .* mean loss 0.85\d+$", out, re.M), out
    assert not list((repository.root / "logs").glob("*/*.pt"))
    starts = {run.run[-3:]: run.start for run in runs_in(repository, MINE)}
    assert starts.pop(planned[2]) == 2 and set(starts.values()) == {1}
    status, out, err = call(repository, capsys, "submit", "--name", "Second", "--by", "Me")
    assert status == 0, out + err
    assert "\nBy Me.\n" in out and "python -m records reproduce records/mini/" in out
    assert "made records/mini/" in out and "[x]" not in out


def test_runs_of_a_pair_share_a_seed_that_follows_from_the_code(repository, capsys):
    assert call(repository, capsys, "ab", "--runs", 2)[0] == 0
    runs = runs_in(repository, MINE)
    code = made.sha_of(made.fake_trainer())
    assert [run.seed for run in runs] == [stats.seed_of(code, 1, n) for n in (1, 1, 2, 2)]
    told = dict(made.order_of(repository))
    assert told == {"01a": "1:1/2:1", "01b": "1:1/2:1", "02a": "1:2/2:1", "02b": "1:2/2:1"}


def test_a_script_has_one_batch(repository, capsys):
    """With another number of runs it would have another try."""
    assert call(repository, capsys, "ab", "--runs", 2)[0] == 0
    for words in (["ab", "--runs", 3], ["run", "--runs", 2]):
        status, _, err = call(repository, capsys, *words)
        assert status == 2 and "finish these, or change the script" in err
    (repository.root / "train_gpt.py").write_text(made.fake_trainer(loss=0.79))
    assert call(repository, capsys, "ab", "--runs", 3)[0] == 0


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_after_the_run_at_hand_and_a_second_one_at_once(repository, capsys, presses):
    first, *_ = drawn_order(2)
    (repository.root / "stop").write_text(f"{first} interrupted{presses}")
    status, out, err = call(repository, capsys, "ab", "--runs", 2)
    assert "will end after this run; Ctrl-C again ends it now" in out
    if presses == 1:
        assert status == 2 and f"{first}, as asked; the same command goes on" in err
        assert not out.count("val_loss")
    else:
        assert status == 130 and "interrupted; the same command goes on" in err
        assert not out.count("val_loss")
    assert call(repository, capsys, "ab", "--runs", 2)[0] == 0
    assert {run.run[-3:]: run.start for run in runs_in(repository, MINE)}[first] == presses


def test_sigterm_ends_the_run_at_hand(repository, capsys, monkeypatch):
    """It would go on by itself, in a session of its own."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # which would let it
    started = []
    wait = subprocess.Popen.wait

    def waiting(process, *words):
        if process not in started:
            started.append(process)
            os.kill(os.getpid(), signal.SIGTERM)
        return wait(process, *words)

    monkeypatch.setattr(subprocess.Popen, "wait", waiting)
    with pytest.raises(SystemExit, match="terminated"):
        call(repository, capsys, "ab", "--runs", 2)
    assert [process.returncode for process in started] == [-signal.SIGTERM]


def test_a_refusal_before_the_header_is_no_start(repository, capsys):
    first, *_ = drawn_order(2)
    (repository.root / "stop").write_text(f"{first} refused")
    status, _, err = call(repository, capsys, "ab", "--runs", 2)
    assert status == 2 and "'status:error no data'" in err
    assert call(repository, capsys, "ab", "--runs", 2)[0] == 0
    assert {run.start for run in runs_in(repository, MINE)} == {1}


def test_two_at_once_are_refused(repository, capsys):
    with open(repository.root / "logs" / "records.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, _, err = call(repository, capsys, "ab", "--runs", 2)
    assert status == 2 and "another `python -m records` is making runs here" in err
    assert not (repository.root / "order.txt").exists()


def test_another_machine_is_refused(repository, capsys):
    """As soon as there is a run of it."""
    assert call(repository, capsys, "ab", "--runs", 2)[0] == 0
    path = next((repository.root / "logs").glob("mini-*-01b/log.txt"))
    made.edit(path, r"^(run:mini-.*) device:fake", r"\1 device:another")
    status, _, err = call(repository, capsys, "ab", "--runs", 2)
    assert status == 2 and "device differs between runs: 'another', 'fake'" in err


@pytest.mark.parametrize("count", [-1, 0, 1, 101])
def test_number_of_runs_has_bounds(repository, capsys, count):
    for words in (["ab"], ["reproduce", tip(repository)], ["run"]):
        status, _, err = call(repository, capsys, *words, "--runs", count)
        assert status == 2
        assert err == f"records: --runs {count}: takes 2, for statistics, to 100\n"
    status, _, err = call(repository, capsys, "ab", "--runs", 17)
    assert status == 2 and "--runs 17: pairs are at most 16" in err


# ----- what submit would refuse is told first


@pytest.mark.parametrize(
    "script, reason",
    [
        (
            lambda: made.fake_trainer(loss=0.85, time=150),
            "is the code of .*_First; change it first",
        ),
        (lambda: made.fake_trainer(target_loss=1.5), "target_loss is 1.5, the track's is 0.88"),
        (lambda: made.fake_trainer(val_tokens=1024), "val_tokens is 1024, the track's is 262144"),
        (lambda: "print(1)\n", "its tracks cannot be read from the source"),
        (
            lambda: made.fake_trainer() + "\nimport tests\n",
            "imports tests, whose text no log holds",
        ),
        (lambda: made.fake_trainer() + "\n(", "the script is no Python"),
    ],
)
def test_runs_of_which_no_record_can_come_are_refused_first(repository, capsys, script, reason):
    (repository.root / "train_gpt.py").write_text(script())
    for words in (["run", "--runs", 2], ["ab", "--runs", 2]):
        status, out, err = call(repository, capsys, *words)
        assert status == 2 and re.search(reason, err), out + err
    assert not (repository.root / "order.txt").exists()


def test_a_track_without_a_record_is_told(repository, capsys):
    status, _, err = call(repository, capsys, "ab", "--track", "nono")
    assert status == 2 and "--track 'nono': is none of mini" in err
    empty = made.make_repository(repository.root / "empty")
    (empty.root / "train_gpt.py").write_text(made.fake_trainer())
    status, _, err = call(empty, capsys, "ab")
    assert status == 2 and "track mini has no record; make one with" in err


def test_a_closed_track_takes_no_runs(repository, capsys):
    rules = {**repository.rules, "mini": {**repository.rules["mini"], "closed": True}}
    closed = made.Repository(repository.root, rules)
    words = {"ab": [], "run": [], "submit": ["--name", "X", "--by", "Me"]}
    for command, more in words.items():
        status, _, err = call(closed, capsys, command, *more)
        assert status == 2
        assert err == ("records: --track mini: is closed, its records stay; open are fineweb\n")
    assert call(closed, capsys, "table")[0] == 0
    made.edit(tip(repository) / "README.md", made.render.WHY, made.WHY, missing_ok=True)
    assert call(closed, capsys, "verify")[0] == 0
    empty = made.Repository(repository.root, rules, repository.root / "empty")
    assert "is new, and the track mini is closed" in call(empty, capsys, "verify")[2]


def test_a_field_that_the_rules_fix_is_asked_for_first(repository, capsys):
    ruled = made.fixing(repository, ngram_orders=[2])
    for changes, shown in (({"ngram_orders": (2, 3)}, "[2, 3]"), ({}, "'not there'")):
        (repository.root / "train_gpt.py").write_text(made.fake_trainer(**changes))
        status, _, err = call(ruled, capsys, "run", "--runs", 2)
        assert status == 2 and f"ngram_orders is {shown}, the track's is [2]" in err


def test_a_track_of_unknown_validation_tokens_is_told_first(repository, capsys):
    script = made.fake_trainer(
        track="fineweb", tokenizer="gpt2", val_tokens=10_485_760, val_sha256="", target_loss=3.28
    )
    (repository.root / "train_gpt.py").write_text(script)
    status, _, err = call(repository, capsys, "run", "--track", "fineweb")
    assert (
        status == 2
        and "rules.json has no val_sha256 of fineweb yet; propose that of the validity line" in err
    )


def test_runs_are_judged_as_they_are_made(repository, capsys):
    """What no script shows ends an experiment after its first run."""
    script = made.fake_trainer().replace("causal:ok", "causal:FAILED")
    (repository.root / "train_gpt.py").write_text(script)
    for _ in range(2):
        status, out, err = call(repository, capsys, "run", "--runs", 2)
        assert status == 2 and out.count("val_loss") == 1
        assert "validity: causal is 'FAILED', must be 'ok'" in err
    assert len(made.order_of(repository)) == 1


# ----- reproduce


def test_reproduced_runs_do_not_count(repository, capsys):
    """Their seeds are fresh, and kept for the case that they are stopped."""
    words = ("reproduce", tip(repository), "--runs", 2)
    status, out, err = call(repository, capsys, *words)
    assert status == 0, out + err
    assert re.search(r"^loss below the target 0.88: p = ", out, re.M), out
    assert re.search(r"^now, on fake, world size 1, .*: 0\.\d s, mean loss 0.85\d+$", out, re.M)
    assert "Whether the code cheats, no run shows" in out
    told = dict(made.order_of(repository))
    assert list(told) == ["01a", "02a"] and not any(
        place.startswith("1:") for place in told.values()
    )
    runs = runs_in(repository, "reproduce-*-0?a")
    assert runs[0].seed != runs[1].seed
    runs[1].path.unlink()
    assert call(repository, capsys, *words)[0] == 0
    assert [run.seed for run in runs] == [
        run.seed for run in runs_in(repository, "reproduce-*-0?a")
    ]


def test_reproduced_runs_are_judged(repository, capsys):
    ruled = made.fixing(repository, ngram_orders=[2])
    status, out, err = call(ruled, capsys, "reproduce", tip(repository), "--runs", 2)
    assert status == 2 and "mean loss" not in out
    assert "ngram_orders is 'not there', the track's is [2]" in err


def test_a_record_that_cannot_be_read_is_not_run(repository, capsys):
    (tip(repository) / "README.md").unlink()
    status, _, err = call(repository, capsys, "reproduce", tip(repository))
    assert status == 2 and "'README.md' is missing" in err
    assert not (repository.root / "order.txt").exists()


def test_a_clock_that_is_ahead_of_the_wall_is_told(repository, capsys):
    """A script that trains for no time and claims a minute."""
    script = made.fake_trainer().replace("time.sleep(took / 1000)", "took += 60_000")
    (repository.root / "train_gpt.py").write_text(script)
    status, _, err = call(repository, capsys, "run", "--runs", 2)
    assert status == 2
    assert re.search(r"its log says 60\.\d s of training, .* lived for .* clock is wrong", err)


# ----- diff


def test_diff_knows_the_last_record(repository, capfd):
    status, out, _ = call(repository, capfd, "diff")
    assert status == 0 and "1 file changed, 1 insertion(+), 1 deletion(-)" in out
    assert f"\n--- a{tip(repository)}/train_gpt.py\n" in out
    assert f"\n+++ b{repository.root}/train_gpt.py\n" in out
    assert "+LOSS, TIME = 0.8, 50\n" in out
    assert call(repository, capfd, "diff", tip(repository))[1] == out
    status, _, err = call(repository, capfd, "diff", repository.root / "none.py")
    assert status == 2 and "none.py: No such file" in err


# ----- plot

THEIRS = f"""import torch
    print(f"step:{{step}}/{{steps}} val_loss:{{loss:.4f}}")
{"=" * 100}
step:0/300 val_loss:10.8258 train_time:0ms step_avg:nanms
step:125/300 val_loss:4.6104 train_time:11.25s step_avg:90.00ms
step:300/300 val_loss:3.2791 train_time:27000ms step_avg:90.00ms
"""


def test_plot_draws_records_runs_and_other_trainers_logs(repository, tmp_path, capsys, monkeypatch):
    drawn = []
    plot = Axes.plot

    def noted(axes, xs, ys, **style):
        drawn.append((list(xs), list(ys), style.get("label")))
        return plot(axes, xs, ys, **style)

    monkeypatch.setattr(Axes, "plot", noted)
    (tmp_path / "theirs.log").write_bytes(THEIRS.encode() + b"\xff\x1b[2J\0\n")
    run = next((tmp_path / "logs").glob("mini-*-01a"))
    out = tmp_path / "new" / "plot.png"
    words = [tip(repository), run, tmp_path / "theirs.log"]
    assert call(repository, capsys, "plot", *words, "--out", out)[0] == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert len(drawn) == 4 * (3 + 1 + 1) + 3
    assert ([0.0, 11.25, 27.0], [10.8258, 4.6104, 3.2791], None) in drawn
    assert {label for *_, label in drawn} == {tip(repository).name, run.name, "theirs.log", None}
    (tmp_path / "odd.log").write_text("nothing\n")
    os.mkfifo(tmp_path / "pipe.log")
    for name, reason in (("odd.log", "holds no line `step"), ("pipe.log", "no regular file")):
        status, _, err = call(repository, capsys, "plot", tmp_path / name, "--out", out)
        assert status == 2 and reason in err and err.count("\n") == 1
