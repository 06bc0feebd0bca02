"""Counting the runs of a record: the ledger itself, and `run` with scripts that write a log in no
time."""

import re

import pytest

import records_helpers as made
from records.files import RecordError
from records.ledger import Ledger
from records.log import parse_log
from records_helpers import call


@pytest.fixture
def repository(tmp_path):
    """A repository with a working script, and no runs."""
    repository = made.make_repository(tmp_path)
    (tmp_path / "train_gpt.py").write_text(made.fake_trainer())
    return repository


def ledger_of(repository):
    return Ledger(repository.root / "logs" / "runs.jsonl")


# ----- the ledger


def count(folder, *run_ids, runs=2, code="c0de", track="nano"):
    return [
        str(Ledger(folder / "runs.jsonl").start(track, code, runs, run_id)) for run_id in run_ids
    ]


def test_runs_are_counted_in_batches(tmp_path):
    assert count(tmp_path, "a", "b", "c") == ["1:1/2:1", "1:2/2:1", "2:1/2:1"]
    assert count(tmp_path, "a", "c", "d") == [
        "1:1/2:2",
        "2:1/2:2",
        "2:2/2:1",
    ]  # two of them started again
    assert count(tmp_path, "e", code="other") == ["1:1/2:1"]
    assert count(tmp_path, "f", track="fineweb") == ["1:1/2:1"]
    assert count(tmp_path, "g", runs=5) == ["3:1/5:1"]
    assert count(tmp_path, "a") == ["1:1/2:3"]


def test_another_number_within_a_batch_is_refused(tmp_path):
    count(tmp_path, "a")
    for run_id in ("a", "b"):
        with pytest.raises(
            RecordError,
            match=r"--runs 5 for .: batch 1 of this code has 2 runs, 1 begun \(last a\); "
            r"finish it first",
        ):
            count(tmp_path, run_id, runs=5)
    assert count(tmp_path, "b") == ["1:2/2:1"]


def test_a_start_can_be_taken_back(tmp_path):
    count(tmp_path, "a", "b")
    ledger = Ledger(tmp_path / "runs.jsonl")
    count(tmp_path, "a")
    ledger.take_back("a")
    assert count(tmp_path, "a") == ["1:1/2:2"]
    ledger.take_back("b")
    assert count(tmp_path, "c") == ["1:2/2:1"]


@pytest.mark.parametrize("cut", [1, 2, 40, 80])
def test_incomplete_last_line_is_ignored_and_told(tmp_path, capsys, cut):
    """A line that lacks nothing but its line break still counts: its run began."""
    count(tmp_path, "a", "b")
    path = tmp_path / "runs.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    again = count(tmp_path, "b")
    told = capsys.readouterr().out
    if cut == 1:
        assert again == ["1:2/2:2"] and not told
    elif cut == 80:  # all of b's line and some of a's
        assert again == ["1:1/2:1"] and "the last line is incomplete and is ignored: '{" in told
    else:
        assert again == ["1:2/2:1"] and "the last line is incomplete and is ignored: '{" in told
    assert (
        count(tmp_path, "b")[0].endswith("/2:3" if cut == 1 else "/2:2")
        and not capsys.readouterr().out
    )


def test_rubbish_after_a_crash_is_ignored(tmp_path, capsys):
    count(tmp_path, "a")
    with open(tmp_path / "runs.jsonl", "ab") as file:
        file.write(b"\0\xff\0")
    assert count(tmp_path, "b") == ["1:2/2:1"]
    assert r"is ignored: '\x00\xff\x00'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line", ["", "{}", "[]", '{"code": [], "place": [1], "run": "a"}', '{"code": ["na']
)
def test_unreadable_line_within_is_refused(tmp_path, line):
    count(tmp_path, "a", "b")
    path = tmp_path / "runs.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{line}\n{second}\n")
    with pytest.raises(
        RecordError, match="line 2 is no entry: .*; put it right, for every run counts"
    ):
        count(tmp_path, "c")
    assert path.read_text() == f"{first}\n{line}\n{second}\n"


# ----- run


def test_run_makes_a_batch_and_says_what_is_next(repository, capsys):
    status, out, err = call(repository, capsys, "run", "--runs", 3)
    assert status == 0, out + err
    name = re.search(
        r"^To claim it: python -m records submit --name NAME logs/(run-nano-[0-9a-f]{8}-n3)-\*$",
        out,
        re.MULTILINE,
    )[1]
    assert re.search(
        r"^mean loss 0\.80\d+, target 0\.88, p = \S+; mean time 0\.1 s$", out, re.MULTILINE
    ), out
    logs = sorted((repository.root / "logs").glob(f"{name}-*/log.txt"))
    assert [path.parent.name for path in logs] == [f"{name}-0{number}" for number in (1, 2, 3)]
    batches = [parse_log(path).batch for path in logs]
    assert [(batch.number, batch.counter, batch.declared, batch.start) for batch in batches] == [
        (1, 1, 3, 1),
        (1, 2, 3, 1),
        (1, 3, 3, 1),
    ]
    status, out, _ = call(repository, capsys, "run", "--runs", 3)
    assert status == 0 and out.count("(was there)") == 3 and len(made.order_of(repository)) == 3


@pytest.mark.parametrize(
    "end, status, start", [("failed", 2, 2), ("interrupted", 130, 2), ("refused", 2, 1)]
)  # before its log had a header: nothing was trained
def test_run_goes_on_where_it_was_stopped(repository, capsys, end, status, start):
    (repository.root / "stop").write_text(f"02 {end}")
    stopped, out, err = call(repository, capsys, "run", "--runs", 3)
    assert stopped == status and out.count("val_loss") == 1
    assert (
        "records: interrupted; run, ab and" if status == 130 else "ended with exit status 1; see "
    ) in err
    assert call(repository, capsys, "run", "--runs", 3)[0] == 0
    assert made.order_of(repository) == [
        ("01", "1:1/3:1"),
        ("02", "1:2/3:1"),
        ("02", f"1:2/3:{start}"),
        ("03", "1:3/3:1"),
    ]
    logs = repository.root / "logs"
    assert len(list(logs.glob("run-*-n3-*"))) == 3  # what `submit` is given
    assert len(list(logs.glob("run-*-n3/*.stopped-*"))) == start - 1


def test_run_after_an_incomplete_line(repository, capsys):
    (repository.root / "stop").write_text("02 failed")
    call(repository, capsys, "run", "--runs", 2)
    with open(ledger_of(repository).path, "a") as file:
        file.write('{"code": ["nano", "')
    status, out, err = call(repository, capsys, "run", "--runs", 2)
    assert status == 0, out + err
    assert out.count("the last line is incomplete and is ignored") == 1
    assert (
        made.order_of(repository)[-1] == ("02", "1:2/2:2")
        and len(ledger_of(repository).read()) == 3
    )


def test_a_batch_is_finished_before_another_is_begun(repository, capsys):
    """Neither another number of runs nor another command comes between; a full batch is followed by
    the next."""
    other = repository.root / "logs" / "other"
    other.mkdir(parents=True)
    (other / "log.txt").write_text(made.log_text("other", made.fake_trainer(loss=0.85)))
    (repository.root / "stop").write_text("02 failed")
    call(repository, capsys, "run", "--runs", 3)
    for words in (["run", "--runs", 2], ["ab", other, "--runs", 3, "--yes", "--compare"]):
        status, _, err = call(repository, capsys, *words)
        assert status == 2 and re.search(
            r"^records: --runs \d for \S+-01\w?: batch 1 of this code has 3 runs, 2 begun "
            r"\(last run-nano-\w+-n3-02\); finish it first, with the command",
            err,
        ), err
    assert len(made.order_of(repository)) == 2
    assert call(repository, capsys, "run", "--runs", 3)[0] == 0
    assert call(repository, capsys, "run", "--runs", 2)[0] == 0
    assert made.order_of(repository)[-2:] == [("01", "2:1/2:1"), ("02", "2:2/2:1")]


def test_changed_code_is_another_batch(repository, capsys):
    (repository.root / "stop").write_text("02 failed")
    call(repository, capsys, "run", "--runs", 3)
    (repository.root / "train_gpt.py").write_text(made.fake_trainer(loss=0.79))
    assert call(repository, capsys, "run", "--runs", 2)[0] == 0
    assert made.order_of(repository)[-2:] == [("01", "1:1/2:1"), ("02", "1:2/2:1")]


def test_both_runs_of_a_pair_have_one_place(tmp_path):
    assert count(
        tmp_path, "ab-x-n2-01b", "ab-x-n2-01a", "ab-x-n2-01b", "ab-x-n2-02a", "ab-x-n2-02b"
    ) == ["1:1/2:1", "1:1/2:1", "1:1/2:2", "1:2/2:1", "1:2/2:1"]
    ledger = Ledger(tmp_path / "runs.jsonl")
    assert [ledger.batch_of("nano", "c0de", name) for name in ("ab-x-n2", "ab-y-n2")] == [1, 2]
    assert (
        ledger.batch_of("nano", "other", "ab-x-n2")
        == ledger.batch_of("fineweb", "c0de", "ab-x-n2")
        == 1
    )


def test_unknown_track_is_refused(repository, capsys):
    status, _, err = call(repository, capsys, "run", "--track", "micro")
    assert status == 2 and err == "records: --track 'micro': is none of nano, mini, fineweb\n"
    assert not (repository.root / "logs").exists()
