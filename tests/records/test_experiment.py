"""run, ab and reproduce with scripts that write a log in no time; diff and plot."""

import fcntl
import os
import re
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import records_helpers as made
from records import experiment, picture, stats
from records.experiment import forecast
from records_helpers import TRACK, call, done, fake_trainer, folder_of, refused, runs_in

pytestmark = pytest.mark.usefixtures("no_pause")
NAME = made.name_of(fake_trainer())
MINE = f"{NAME}-*"


@pytest.fixture
def repository(tmp_path, no_pause):
    """A first record, and a working script that is faster and better."""
    return made.make_first(tmp_path)


def drawn_order(count):
    """Numbers of pairs' runs with their letters, in the order that follows from the code."""
    order = stats.order_of_pairs(made.sha_of(fake_trainer()), 1, count)
    return [f"{number:02d}{side}" for side, number in order]


def starts(repository):
    return {run.run[-3:]: run.start for run in runs_in(repository, MINE)}


# ----- ab


def test_ab_goes_on_where_it_stopped_and_its_pairs_are_a_record(repository, capsys):
    planned = drawn_order(6)
    (repository.root / "stop").write_text(f"{planned[2]} failed")
    status, out, err = call(repository, capsys, "ab", "--runs", 6)
    assert status == 2 and out.count("val_loss") == 2
    assert re.search(rf"-{planned[2]} ended with exit status 1: 'it broke'; .*console.txt has", err)
    assert "_First: 1 lines added, 1 removed.\n" in out
    out = done(repository, capsys, "ab", "--runs", 6)
    assert [run for run, _ in made.order_of(repository)] == [*planned[:3], *planned[2:]]
    gain = r"\ntime differs by -\d.* \(-\d.* to -\d.*\); that it is less: p = 0.0046,"
    assert re.search(gain, out)
    assert re.search(r"\ntrain_gpt.py, on fake x2, .*: 0.\d s, mean loss 0.80\d+\n", out), out
    assert re.search(r"_First, in pairs with it, on fake x2, .* mean loss 0.85\d+\n", out), out
    assert not list((repository.root / "logs").glob("*/*.pt"))
    found = {run: 2 if run == planned[2] else 1 for run in planned}
    assert starts(repository) == found
    # With another number of runs it would have another try.
    told = {run: f"1:{int(run[:2])}/6:{start}" for run, start in found.items()}
    assert dict(made.order_of(repository)) == told
    code = made.sha_of(fake_trainer())
    seeds = [stats.seed_of(code, 1, number // 2) for number in range(2, 14)]
    assert [run.seed for run in runs_in(repository, MINE)] == seeds
    assert "finish these, or change the script" in refused(repository, capsys, "ab", "--runs", 7)
    out = done(repository, capsys, "submit", "--name", "Second", "--by", "Me")
    assert "\nBy Me.\n" in out and f"reproduce records/{TRACK}/" in out


@pytest.mark.slow
def test_ends_of_a_run(repository, capsys):
    """A signal ends it and costs a start; what a script refuses before its log's header is no
    start, nor is a pipe instead of a log, for whose other end nobody waits."""
    first, second, third, *_ = drawn_order(6)
    stop, again = repository.root / "stop", ("ab", "--runs", 6)
    log = repository.root / "logs" / f"{NAME}-{third}" / "log.txt"
    log.parent.mkdir()
    os.mkfifo(log)
    stop.write_text(f"{first} refused")
    assert "'status:error no data'" in refused(repository, capsys, *again)
    stop.write_text(f"{first} SIGINT")
    status, _, err = call(repository, capsys, *again)
    assert status == 130 and "interrupted; the same command goes on" in err
    stop.write_text(f"{second} SIGTERM")
    signal.signal(signal.SIGTERM, lambda *_: None)  # which would let it go on
    with pytest.raises(SystemExit, match="terminated"):
        call(repository, capsys, *again)
    done(repository, capsys, *again)
    found = starts(repository)
    assert [found[run] for run in (first, second, third)] == [2, 2, 1]


def test_a_run_whose_seconds_are_not_known_is_made_again(repository, capsys):
    """It ended between its last line and the file of its seconds, and costs a start."""
    words = ("rehearse", "--runs", 2)
    done(repository, capsys, *words)
    lived = next((repository.root / "logs").glob(f"rehearsal-{NAME}-01a/{experiment.LIVED}"))
    lived.unlink()
    done(repository, capsys, *words)
    begun = {run.run[-3:]: run.start for run in runs_in(repository, f"rehearsal-{NAME}-*")}
    assert begun == {"01a": 2, "01b": 1, "02a": 1, "02b": 1} and lived.is_file()


@pytest.mark.slow
def test_two_at_once_and_another_machine_are_refused(repository, capsys):
    with open(repository.root / "logs" / "records.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = refused(repository, capsys, "ab", "--runs", 6)
    assert "another `python -m records` is making runs here" in said
    assert not (repository.root / "order.txt").exists()
    done(repository, capsys, "ab", "--runs", 6)
    path = next((repository.root / "logs").glob(f"{NAME}-01b/log.txt"))
    made.edit(path, r"^(run:[a-z].*) device:fake", r"\1 device:another")
    said = refused(repository, capsys, "ab", "--runs", 6)
    assert "device differs between runs: 'another x2', 'fake x2'" in said


@pytest.mark.parametrize(
    "words, start, other",
    [
        ("ab --runs 6", "", "change the script"),
        ("rehearse --runs 2", "rehearsal-", f"delete logs/rehearsal-{NAME}-*"),
    ],
)
def test_runs_of_another_world_size_are_no_answer(repository, capsys, words, start, other):
    done(repository, capsys, *words.split())
    said = refused(repository, capsys, *words.split(), "--world-size", 2)
    first = f"logs/{start}{NAME}-{made.order_of(repository)[0][0]}"
    hint = f"go on with --world-size 1, or {other}"
    assert said == f"records: {first}: ran with world size 1, not 2; {hint}\n"


def test_a_run_imports_what_this_process_does(monkeypatch):
    """But it is no rank of another launcher."""
    monkeypatch.chdir("/usr")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["lib/torch", "", "/opt"]))
    monkeypatch.setenv("WORLD_SIZE", "8")
    environment = experiment.environment_of(Path("/tree"))
    assert environment.pop("PYTHONPATH") == os.pathsep.join(["/tree", "/usr/lib/torch", "/opt"])
    kept = {*os.environ} - {"PYTHONPATH", "WORLD_SIZE", "RANK", "LOCAL_RANK"}
    assert environment == {name: os.environ[name] for name in kept}


# ----- rehearsals


def test_a_rehearsal_counts_for_nothing(repository, capsys):
    """Its seeds are none of the batch's, any number of pairs goes on from others, and no record
    comes of it."""
    out = done(repository, capsys, "rehearse", "--runs", 2)
    assert re.search(r"8 pairs: \d+ minutes; at this spread they show \d+.\d %\n(Yes|No): ", out)
    assert {place[:2] for _, place in made.order_of(repository)} == {"0:"}
    code = made.sha_of(fake_trainer())
    batch = {stats.seed_of(code, 1, number) for number in range(1, 17)}
    assert not batch & {run.seed for run in runs_in(repository, f"rehearsal-{NAME}-*")}
    done(repository, capsys, "rehearse", "--runs", 3)
    assert len(made.order_of(repository)) == 6
    words = ("submit", "--name", "Second", "--by", "Me")
    assert "there are no runs" in refused(repository, capsys, *words)


def forecast_of(gain, loss, seed):
    """The lines for two pairs of a script, and a last record whose eight pairs spread alike."""
    rng = np.random.default_rng(seed)

    def side(count, seconds, loss):
        times = 1000 * seconds * np.exp(0.01 * rng.standard_normal(count))
        losses = loss + 0.004 * rng.standard_normal(count)
        rows = zip(times, losses, strict=True)
        return [SimpleNamespace(train_time_ms=t, val_loss=v, lived=seconds + 16) for t, v in rows]

    tip = SimpleNamespace(runs=side(8, 24, 2.943), baseline=side(8, 26, 2.94), target=2.954)
    return forecast(side(2, 24 * (1 - gain), loss), side(2, 24, 2.943), tip)


def test_a_forecast_tells_a_large_gain_from_a_small_one_and_from_a_bad_idea():
    """In most of the draws, by two pairs alone."""
    cases = {"Yes": (0.06, 2.943, 36), "this gain": (0.01, 2.943, 28)}
    cases["the loss below"] = 0.06, 2.99, 39
    for words, (gain, loss, least) in cases.items():
        lines = [forecast_of(gain, loss, seed) for seed in range(40)]
        assert sum(words in verdict for *_, verdict in lines) >= least
    minutes = re.search(r"8 pairs: (\d+) minutes; at this spread they show (\S+) %", lines[0][1])
    assert minutes[1] == "10" and 1 < float(minutes[2]) < 3


def test_a_claim_is_hinted_at_where_there_is_one(repository, capsys):
    """Not for a script that is as slow as its parent's."""
    (repository.root / "train_gpt.py").write_text(made.SLOW + "SAME = True\n")
    out = done(repository, capsys, "ab", "--runs", 6)
    assert "It is no record." in out and "To claim it" not in out


# ----- what submit would refuse is told first

MINIMUM = "takes 6, for statistics, to"
REFUSED = {
    "a record's": (made.SLOW, "ab", "is the code of .*_First; change it first"),
    "target": (fake_trainer(target_loss=1.5), "ab", "target_loss is 1.5, the track's is 0.88"),
    "no tracks": ("print(1)\n", "ab", "its tracks cannot be read from the source"),
    "an import": (fake_trainer() + "\nimport tests\n", "ab", "imports tests, "),
    "two dtypes": (fake_trainer(dtype="bfloat16"), "ab", "are bfloat16 and float32; pairs run in"),
    "few losses": (fake_trainer(log_every=2), "ab", "logs 5 losses, 6 are due; lower log_every=2"),
    "comments": (made.SLOW + "# faster\n", "ab", "is the code of .*_First, but for comments and"),
    "F": (f"{fake_trainer()}\nimport torch\ntorch.sum = 1\n", "ab", "script changes torch.sum,"),
    "six of form": (fake_trainer(), "ab --runs 6 --form", "a change of form takes 8 pairs"),
    "five pairs": (fake_trainer(), "ab --runs 5", f"--runs 5: {MINIMUM} 16"),
    "17 pairs": (fake_trainer(), "ab --runs 17", f"--runs 17: {MINIMUM} 16"),
    "a second first": (fake_trainer(), "run", "has records; `ab` makes pairs with the last"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_runs_of_which_no_record_can_come_are_refused_first(repository, capsys, name):
    script, words, reason = REFUSED[name]
    (repository.root / "train_gpt.py").write_text(script)
    said = refused(repository, capsys, *words.split())
    assert re.search(reason, said) and not (repository.root / "order.txt").exists(), said


def test_a_board_without_records_and_one_that_is_not_open(repository, capsys):
    """All commands that need a record tell how the first is made."""
    empty = made.make_repository(repository.root / "empty")
    (empty.root / "train_gpt.py").write_text(fake_trainer())
    first = f"{TRACK} has no record yet; to make the first one, run `python -m records run"
    closed = f"--track 'nano': is no open board; open are {TRACK}, web; records/HISTORY.md has"
    for words, reason in (
        *((command, first) for command in ("ab", "diff", "reproduce")),
        *((f"{command} --track nano", closed) for command in ("ab", "run", "diff", "reproduce")),
        ("submit --name X --by Me --track nano", closed),
    ):
        assert refused(empty, capsys, *words.split()).startswith(f"records: {reason}")
    said = refused(empty, capsys, "submit", "--name", "X", "--by", "Me")
    assert f"there are no runs {empty.root}/logs/{NAME}-*" in said
    assert said.endswith(f"make them with `python -m records run --track {TRACK}`\n")


@pytest.mark.parametrize(
    "old, new, reason",
    [
        ("causal:ok", "causal:FAILED", "causal:FAILED .* stands where the validity line is due"),
        ("time.sleep(took / 1000)", "took += 60_000", r"says 60\.\d s .* its clock is wrong"),
    ],
)
def test_runs_are_judged_as_they_are_made(tmp_path, capsys, old, new, reason):
    """A minute is claimed by a script that trains for no time, say."""
    repository = made.make_repository(tmp_path)
    (tmp_path / "train_gpt.py").write_text(fake_trainer().replace(old, new))
    assert re.search(reason, refused(repository, capsys, "run", "--runs", 2))
    assert len(made.order_of(repository)) == 1


# ----- reproduce, diff and plot


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss, verdict",
    [(0.0, "Reproduced: the loss is below"), (0.04, "NOT reproduced: the loss is above")],
)
def test_reproduced_runs_have_a_verdict(repository, capsys, monkeypatch, loss, verdict):
    """By their losses; and seconds that the clock leaves out are told."""
    tip = folder_of(repository, "First")
    source = (tip / "train_gpt.py").read_text()
    wrapper = f"import time; time.sleep(5)\nLOSS_MORE = {loss}\n"
    slower = source.replace("loss = round(LOSS", f"{wrapper}loss = round({loss} + LOSS")
    honest = experiment.keep_plan

    def keep_plan(folder, scripts, *words):
        honest(folder, scripts, *words)
        (folder / "a" / "train_gpt.py").write_text(slower)

    code = f"code_sha256:{made.sha_of(source)}"
    slower = re.sub(r"code_sha256:\{.*?\}", code, slower).replace("{code.rstrip()}", "@CODE@")
    slower = slower.replace('f"""@CODE@', 'SOURCE.rstrip() + f"""')
    slower = slower.replace("LOSS, TIME", f"SOURCE = {source!r}\nLOSS, TIME", 1)
    monkeypatch.setattr(experiment, "keep_plan", keep_plan)
    out = done(repository, capsys, "reproduce", tip, "--runs", 3)
    assert verdict in out
    seconds = re.search(r"by the wall .* (\S+) s, by their clocks (\S+) s", out)
    assert float(seconds[1]) > float(seconds[2]) + 15
    assert re.search(r"WARNING: a clock leaves out [45]\.\d s more of a run", out)


@pytest.mark.slow
def test_reproduced_runs_do_not_count_and_are_judged(repository, capsys):
    """Their seeds are fresh, and kept for the case that they are stopped."""
    tip = folder_of(repository, "First")
    words = ("reproduce", tip, "--runs", 2)
    out = done(repository, capsys, *words)
    assert "\nloss below the target 0.88: p = " in out
    assert re.search(r"\nnow, on fake x2, world size 1, .*: 0\.\d s, mean loss 0.85\d+\n", out)
    told = dict(made.order_of(repository))
    assert list(told) == ["01a", "02a"] and not any(name[:2] == "1:" for name in told.values())
    runs = runs_in(repository, "reproduce-*-0?a")
    assert runs[0].seed != runs[1].seed
    runs[1].path.unlink()
    done(repository, capsys, *words)
    again = runs_in(repository, "reproduce-*-0?a")
    assert [run.seed for run in runs] == [run.seed for run in again]
    ruled = made.ruled(repository.root, config={**made.FIXED, "layers": [1]})
    status, out, err = call(ruled, capsys, *words)
    assert status == 2 and "mean loss" not in out and "layers is [0, 2], the track's is [1]" in err


def test_diff_shows_what_is_a_contestants_own(repository, capfd):
    """Main has changed two lines since the last record, and the contestant one."""
    script = repository.root / "train_gpt.py"
    cleaned = made.SLOW + "A = 1\nB = 2\n"
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y", "-C", str(repository.root)]
    script.write_text(cleaned)
    for words in (["init", "-q", "-b", "main"], ["add", "train_gpt.py"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    script.write_text(cleaned + "C = 3\n")
    first = done(repository, capfd, "diff").splitlines()[0]
    assert "_First: 3 lines added, 0 removed; of these, 1 and 0 since main, as" in first
    out = done(repository, capfd, "diff", "--since", "main")
    assert re.findall(r"^\+[^+].*", out, re.MULTILINE) == ["+C = 3"]
    status, _, err = call(repository, capfd, "diff", "--since", "nowhere")
    assert status == 2 and "--since nowhere: git shows no such commit" in err


def test_diff_knows_the_last_record(repository, capfd):
    tip = folder_of(repository, "First")
    out = done(repository, capfd, "diff")
    assert "1 file changed, 1 insertion(+), 1 deletion(-)" in out
    assert f"\n--- a{tip}/train_gpt.py\n+++ b{repository.root}/train_gpt.py\n" in out
    assert "+LOSS, TIME = 0.8, 50\n" in out
    assert done(repository, capfd, "diff", tip) == out
    said = refused(repository, capfd, "diff", repository.root / "none.py")
    assert "none.py: No such file" in said


THEIRS = """import torch
    print(f"step:{step}/{steps} val_loss:{loss:.4f}")
step:0/300 val_loss:10.8258 train_time:0ms step_avg:nanms
step:125/300 val_loss:4.6104 train_time:11.25s step_avg:90.00ms
"""


@pytest.mark.slow
def test_plot_draws_records_runs_and_other_trainers_logs(pristine, tmp_path, capsys):
    theirs = tmp_path / "theirs.log"
    theirs.write_bytes(THEIRS.encode() + b"\xff\x1b[2J\0\n")
    assert picture.curves_of(theirs) == {"train": [], "val": [(0.0, 10.8258), (11.25, 4.6104)]}
    run = next((pristine.root / "logs").glob("*-01a"))
    paths = [folder_of(pristine, "First"), run, theirs]
    out = tmp_path / "new" / "plot.svg"
    done(pristine, capsys, "plot", *paths, "--out", out)
    assert all(f">{path.name}<" in out.read_text() for path in paths)
    theirs.write_text("nothing\n")
    assert "holds no line `step" in refused(pristine, capsys, "plot", theirs, "--out", out)
