"""ab and reproduce with scripts that write a log in no time; their statistics; diff. `run` is in
test_ledger.py."""

import hashlib
import json
import re
from collections import Counter
from types import SimpleNamespace

import pytest

import helpers
import records_helpers as made
import train_gpt
from records import experiment, stats
from records.compare import Side, describe, seed_only
from records.ledger import Ledger
from records.log import Batch, order_of_pairs, parse_log
from records.record import config_changes, speed_figures
from records_helpers import call


@pytest.fixture
def repository(tmp_path):
    """A working script that is faster and better than the other one, of which there is one log."""
    repository = made.make_repository(tmp_path)
    (tmp_path / "train_gpt.py").write_text(made.fake_trainer())
    add_other(repository, made.fake_trainer(loss=0.85, time=150))
    return repository


def add_other(repository, source):
    (repository.root / "logs" / "other").mkdir(parents=True, exist_ok=True)
    (repository.root / "logs" / "other" / "log.txt").write_text(made.log_text("other", source))


# ----- ab


def logs_of(repository, name):
    return [
        parse_log(path) for path in sorted((repository.root / "logs").glob(f"{name}-*/log.txt"))
    ]


def drawn_order(count, loss=0.80, batch=1):
    """Numbers of pairs' runs with their letters, in the order that follows from the code of the
    working script."""
    return [
        f"{number:02d}{side}"
        for side, number in order_of_pairs(made.sha_of(made.fake_trainer(loss=loss)), batch, count)
    ]


def test_ab_takes_turns_and_goes_on_where_it_stopped(repository, capsys):
    words = ("ab", repository.root / "logs" / "other", "--runs", 6, "--yes", "--compare")
    planned = drawn_order(6)
    assert (
        len({tuple(side for _, _, side in planned[at : at + 4]) for at in range(0, 12, 4)}) > 1
    )  # orders differ
    (repository.root / "stop").write_text(f"{planned[2]} failed")
    status, out, err = call(repository, capsys, *words)
    assert status == 2
    assert re.search(
        rf"run ab-\S+-{planned[2]} ended with exit status 1; see .*console.txt, and call again", err
    )
    assert "This executes 12 runs of train_gpt.py" in out and out.count("val_loss") == 2
    status, out, err = call(repository, capsys, *words)
    assert status == 0, out + err
    assert out.count("(was there)") == 2 and "min to go" in out and '"device"' in out
    assert [run for run, _ in made.order_of(repository)] == [*planned[:3], *planned[2:]]
    assert re.search(r"^time A - B: -\d\.\d\d s \(-\d.* to -\d.*\)$", out, re.MULTILINE), out
    assert re.search(
        r"^in relation to B: wall time -\d\d.\d % \(.*\); fastest parts -\d\d.\d %$", out, re.M
    ), out
    assert re.search(r"^that A is faster: p = 0.0046: shown, by wall time$", out, re.MULTILINE), out
    assert re.search(
        r"^loss A - B: -0\.0\d+ \(95%: .*\), p = \S+: A is lower$", out, re.MULTILINE
    ), out
    assert re.search(r"^in steps: A's loss is that of B \+0\.5 steps later", out, re.MULTILINE), out
    logs = repository.root / "logs"
    assert (
        not list(logs.glob("ab-*-n6-*/*.pt"))
        and len(list(logs.glob(f"ab-*-n6/*-{planned[2]}.stopped-*"))) == 1
    )
    assert len(list(logs.glob("ab-*-n6-*a"))) == len(list(logs.glob("ab-*-n6-*b"))) == 6


def test_runs_of_a_pair_share_a_seed_that_follows_from_the_code(repository, capsys):
    """And their place in the batch; a run that is started again has the same; the parent's own code
    counts nothing."""
    (repository.root / "stop").write_text(f"{drawn_order(3)[-1]} failed")
    words = ("ab", repository.root / "logs" / "other", "--runs", 3, "--yes", "--compare")
    assert call(repository, capsys, *words)[0] == 2 and call(repository, capsys, *words)[0] == 0
    code = made.sha_of(made.fake_trainer())
    for run in logs_of(repository, "ab"):
        number, again = int(run.run[-3:-1]), run.run[-3:] == drawn_order(3)[-1]
        assert run.batch == Batch(1, number, 3, 2 if again else 1)
        assert run.seed == run.batch.seed(code)
    entries = Ledger(repository.root / "logs" / "runs.jsonl").read()
    assert [entry["code"] for entry in entries] == [["nano", code]] * 7
    assert len({run.seed for run in logs_of(repository, "ab")}) == 3


def test_the_draw_of_a_pair_is_fixed_for_all_time():
    """Or records would become invalid: the first bytes of a sha256, worked out by hand here."""
    digest = hashlib.sha256(b"c0de:2:3").digest()
    seed = sum(byte << 8 * at for at, byte in enumerate(digest[:4]))
    assert Batch(2, 3, 8, 1).seed("c0de") == Batch(2, 3, 12, 5).seed("c0de") == seed
    place = int.from_bytes(hashlib.sha256(b"c0de:2:order:3").digest()[:4], "little") % 6
    block = order_of_pairs("c0de", 2, 8)[4:8]
    assert (
        "".join(side for side, _ in block)
        == ("aabb", "abab", "abba", "baab", "baba", "bbaa")[place]
    )
    assert (
        [number for side, number in block if side == "a"]
        == [number for side, number in block if side == "b"]
        == [3, 4]
    )


def test_orders_of_blocks_are_equally_frequent():
    order = "".join(side for side, _ in order_of_pairs("c0de", 1, 1200))
    counts = Counter(order[at : at + 4] for at in range(0, 2400, 4))
    assert len(counts) == 6 and all(
        65 < count < 135 for count in counts.values()
    )  # of 600; standard deviation 9
    places = order_of_pairs("c0de", 1, 7)
    assert len(places) == len(set(places)) == 14 and {number for _, number in places[-2:]} == {
        7
    }  # a pair is left over


def test_another_batch_of_pairs_has_other_seeds(repository, capsys):
    for pairs in (2, 3):
        words = ("ab", repository.root / "logs" / "other", "--runs", pairs, "--yes", "--compare")
        assert call(repository, capsys, *words)[0] == 0
    runs = logs_of(repository, "ab")
    assert (
        sorted({run.batch.number for run in runs}) == [1, 2]
        and len({run.seed for run in runs}) == 5
    )
    assert [run for run, _ in made.order_of(repository)] == drawn_order(2) + drawn_order(3, batch=2)


def test_pairs_that_were_stopped_do_not_bind_the_parent(repository, capsys):
    """The idea changes after a run of the baseline; another number of pairs is begun with the new
    code."""
    other = repository.root / "logs" / "other"
    (repository.root / "stop").write_text(f"{drawn_order(8)[1]} failed")
    assert call(repository, capsys, "ab", other, "--runs", 8, "--yes", "--compare")[0] == 2
    (repository.root / "train_gpt.py").write_text(made.fake_trainer(loss=0.79))
    status, out, err = call(repository, capsys, "ab", other, "--runs", 5, "--yes", "--compare")
    assert status == 0, out + err
    assert len(logs_of(repository, "ab-*-n5")) == 10


def test_a_script_without_the_field_is_told_no_place(repository, capsys):
    add_other(repository, made.fake_trainer("", loss=0.85))
    assert (
        call(
            repository,
            capsys,
            "ab",
            repository.root / "logs" / "other",
            "--runs",
            2,
            "--yes",
            "--compare",
        )[0]
        == 0
    )
    told = sorted(made.order_of(repository))
    assert told == [("01a", "1:1/2:1"), ("01b", "-"), ("02a", "1:2/2:1"), ("02b", "-")]


def test_reproduced_runs_do_not_count(repository, capsys):
    """Their seeds are fresh, and kept for the case that they are stopped."""
    add_other(repository, made.fake_trainer())
    words = ("reproduce", repository.root / "logs" / "other", "--runs", 2, "--yes")
    assert call(repository, capsys, *words)[0] == 0
    assert made.order_of(repository) == [("01r", "-"), ("02r", "-")]
    assert not (repository.root / "logs" / "runs.jsonl").exists()
    runs = logs_of(repository, "reproduce")
    runs[1].path.unlink()
    assert call(repository, capsys, *words)[0] == 0
    assert [run.seed for run in runs] == [run.seed for run in logs_of(repository, "reproduce")]
    assert runs[0].seed != runs[1].seed


def test_ab_on_another_machine_is_refused(repository, capsys):
    words = ("ab", repository.root / "logs" / "other", "--runs", 2, "--yes", "--compare")
    assert call(repository, capsys, *words)[0] == 0
    path = next((repository.root / "logs").glob("ab-*/machine.json"))
    path.write_text(json.dumps({"device": "another"}))
    status, _, err = call(repository, capsys, *words)
    assert status == 2 and "another machine's" in err


def test_code_runs_only_with_consent(repository, capsys, monkeypatch):
    other = repository.root / "logs" / "other"
    for command in ("ab", "reproduce"):
        status, out, err = call(
            repository, capsys, command, other, *["--compare"] * (command == "ab")
        )
        assert status == 2 and "This executes " in out and "nothing was run; add --yes" in err
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda prompt: "no")
    assert "not confirmed: nothing was run" in call(repository, capsys, "reproduce", other)[2]
    assert not (repository.root / "order.txt").exists()
    monkeypatch.setattr("builtins.input", lambda prompt: "yes")
    assert call(repository, capsys, "reproduce", other, "--runs", 2)[0] == 0


@pytest.mark.parametrize("count", [-1, 0, 1, 101])
def test_number_of_runs_has_bounds(repository, capsys, count):
    other = repository.root / "logs" / "other"
    for words in (["ab", other, "--yes"], ["reproduce", other, "--yes"], ["run"]):
        status, _, err = call(repository, capsys, *words, "--runs", count)
        assert (
            status == 2
            and err
            == f"records: --runs {count}: takes at least 2, for statistics, and at most 100\n"
        )


def test_report_of_an_undecided_comparison():
    values = [(0.87, 60_000), (0.88, 61_000), (0.875, 60_500), (0.874, 60_100)]
    a, b = (
        [
            SimpleNamespace(
                val_loss=loss, train_time_ms=time_ms, steps=1, curves={"val": [], "train": []}
            )
            for loss, time_ms in side
        ]
        for side in (values, values[::-1])
    )
    for run in (*a, *b):
        run.cpu_time_ms, run.world_size, run.device = 2 * run.train_time_ms, 1, "CPU x2"
    text = experiment.ab_report(a, b, speed_figures([*zip(a, b, strict=True)], 4, 0.005), 0.005)
    assert "time A - B: +0.00 s" in text and "pairs would not tell" in text
    assert "that A is faster: p = 1: not shown, at most 0.005 is needed" in text
    assert "in steps: cannot be told" in text


# ----- what submit would refuse is told first


def test_ab_is_against_the_last_record_unless_another_is_named(tmp_path, capsys):
    repository = made.make_repository(tmp_path)
    (tmp_path / "train_gpt.py").write_text(made.fake_trainer())
    status, _, err = call(repository, capsys, "ab", "--runs", 2, "--yes")
    assert status == 2 and "track nano has no record to compare with" in err
    made.add_first(repository)
    last = made.add_faster(repository)
    for words in ([], [last]):
        status, out, err = call(repository, capsys, "ab", *words, "--runs", 2)
        assert (
            status == 2 and "nothing was run; add --yes" in err and f"of the code in {last}" in out
        )


@pytest.mark.parametrize(
    "script, reason",
    [
        (lambda: made.source_of("second"), "is the code of .*_Faster; change it first"),
        (lambda: made.fake_trainer(target_loss=1.5), "target_loss is 1.5, by the rules 0.88"),
        (lambda: made.fake_trainer(val_tokens=1024), "val_tokens is 1024, by the rules 1048576"),
        (lambda: made.fake_trainer(""), "Config has no field run_of"),
        (lambda: "print(1)\n", "its tracks cannot be read from the source"),
    ],
)
def test_runs_of_which_no_record_can_come_are_refused_first(tmp_path, capsys, script, reason):
    repository = made.make_repository(tmp_path)
    made.add_first(repository)
    last = made.add_faster(repository)
    (tmp_path / "train_gpt.py").write_text(script())
    for words in (["run", "--runs", 2], ["ab", last, "--runs", 2, "--yes"]):
        status, out, err = call(repository, capsys, *words)
        assert status == 2 and re.search(reason, err) and "submit would refuse the runs" in err, (
            out + err
        )
    assert not (tmp_path / "order.txt").exists() and not (tmp_path / "logs" / "runs.jsonl").exists()


def test_a_field_that_the_rules_fix_is_asked_for_first(repository, capsys):
    ruled = made.fixing(repository, ngram_orders=[2])
    for changes, shown in (({"ngram_orders": (2, 3)}, "[2, 3]"), ({}, "'not there'")):
        (repository.root / "train_gpt.py").write_text(made.fake_trainer(**changes))
        status, _, err = call(ruled, capsys, "run", "--runs", 2)
        assert status == 2 and f"ngram_orders is {shown}, by the rules [2]" in err
    (repository.root / "train_gpt.py").write_text(made.fake_trainer(ngram_orders=(2,)))
    assert call(ruled, capsys, "run", "--runs", 2)[0] == 0


def test_what_is_not_the_last_record_is_compared_only_when_asked(repository, capsys):
    other = repository.root / "logs" / "other"
    status, _, err = call(repository, capsys, "ab", other, "--runs", 2, "--yes")
    assert (
        status == 2 and "has no record yet; make the first one with `python -m records run`" in err
    )
    folder = made.add_first(repository)
    status, _, err = call(repository, capsys, "ab", other, "--runs", 2, "--yes")
    assert status == 2 and f"is not the code of {folder.name}, the last of the track's chain" in err
    status, out, _ = call(repository, capsys, "ab", other, "--runs", 2, "--yes", "--compare")
    assert status == 0 and "note: no record will come of this: " in out


def test_another_corpus_is_refused_first(repository, capsys):
    (repository.root / "d").mkdir()
    (repository.root / "d" / "manifest.json").write_text("{}")
    status, _, err = call(repository, capsys, "run", "--runs", 2)
    assert status == 2 and "d/manifest.json: is not the track's; build it with run.sh" in err


# ----- reproduce


def test_a_clock_that_is_ahead_of_the_wall_is_told(repository, capsys):
    """A script that trains for no time and claims a minute."""
    other = repository.root / "logs" / "other"
    add_other(repository, made.fake_trainer().replace("time.sleep(took / 1000)", "took += 60_000"))
    for words in (
        ["reproduce", other, "--runs", 2, "--yes"],
        ["ab", other, "--runs", 2, "--yes", "--compare"],
    ):
        status, out, err = call(repository, capsys, *words)
        assert status == 2 and re.search(
            r"its log says 60\.\d s of training, .* lived for .* clock is wrong", err
        )


@pytest.mark.parametrize(
    "old, new, reason",
    [
        ("local:ok", "local:FAILED", "validity gate local is 'FAILED'"),
        ("shards:ok", "shards:unknown", "shards: 'unknown'"),
        ("tokens:2048", "tokens:20", "20 tokens in the final line; the schedule takes 2048"),
        (
            '"steps": 2, "micro',
            '"steps": 2, "init_from": "best", "micro',
            "init_from is 'best' in the config line",
        ),
        ("comms: none", "started_from: best", "lines begin with 'started_from'"),
    ],
)
def test_reproduced_runs_are_judged_like_others(repository, capsys, old, new, reason):
    source = (
        made.fake_trainer().replace(old, new).replace(old.replace('"', "'"), new.replace('"', "'"))
    )
    assert new in source or new.replace('"', "'") in source
    add_other(repository, source)
    status, out, err = call(
        repository, capsys, "reproduce", repository.root / "logs" / "other", "--runs", 2, "--yes"
    )
    assert status == 0, err
    assert re.search(f"^loss reproduced: no, n = 2: .*{re.escape(reason)}", out, re.MULTILINE), out


def test_reproduce_says_what_it_cannot_see(repository, capsys):
    add_other(repository, made.fake_trainer())
    _, out, _ = call(
        repository, capsys, "reproduce", repository.root / "logs" / "other", "--runs", 2, "--yes"
    )
    assert re.search(
        r"^time: 0\.1 s here \(\d\.\d s with all that is not timed\), ", out, re.MULTILINE
    ), out
    assert (
        "What no run shows: whether the code reads validation text, slows its clock or fakes its "
        "gates." in out
    )


@pytest.mark.parametrize(
    "losses, answer",
    [
        ([0.870, 0.871, 0.8705, 0.8702], "yes"),
        ([0.890, 0.891, 0.8905, 0.8902], "no"),  # above the target
        ([0.8785, 0.8786, 0.8787, 0.8785], "no"),  # below the target, but not what was claimed
        ([0.870, 0.89], "undecided"),
    ],
)
def test_verdict(losses, answer):
    assert experiment.verdict(losses, [0.8701, 0.8703, 0.8708, 0.8699], 0.88)[0] == answer


def test_verdict_says_how_many_runs_would_tell():
    assert re.search(
        r"about --runs \d+ would tell",
        experiment.verdict([0.870, 0.885, 0.874], [0.87, 0.88], 0.88)[1],
    )


# ----- statistics


def test_t_test_against_textbook_values():
    values = [
        5.1,
        4.9,
        5.0,
        4.8,
        4.7,
    ]  # mean 4.9, std 0.158114, t = -1.414214 against 5.0 with 4 degrees of freedom
    assert stats.p_below(values, 5.0) == pytest.approx(0.1150998, abs=1e-6)
    assert stats.interval(values) == pytest.approx((4.9, 4.703676, 5.096324), abs=1e-5)
    assert stats.p_below([1.0], 5.0) == 1.0
    assert (
        stats.p_below([1.0, 1.0], 5.0) == stats.p_below([5.0, 5.0], 5.0) == 1.0
    )  # nothing follows without any spread
    assert (
        stats.p_worse([2.0, 2.1, 2.2], [1.0, 1.1, 1.2])
        < 0.001
        < 0.9
        < stats.p_worse([1.0, 1.1], [2.0, 2.1])
    )
    assert stats.p_worse([2.0, 2.0], [1.0, 1.0]) == stats.p_worse([1.0], [2.0, 2.0]) == 1.0


def test_runs_needed_hold_what_they_promise():
    """Power of the proposed number, by simulation: at least 80 %, and less with two runs fewer."""
    import numpy as np

    difference = [0.4, -0.2, 0.9, 0.1, 0.3]
    mean, std = stats.mean_and_std(difference)
    count, rng = stats.runs_needed(difference), np.random.default_rng(0)

    def power(n):
        sample = rng.normal(mean, std, (4000, n))
        return np.mean(
            sample.mean(1) * n**0.5 / sample.std(1, ddof=1) > stats.stats.t.ppf(0.99, n - 1)
        )

    assert power(count) > 0.78 and power(count - 2) < 0.8
    assert stats.runs_needed([1.0, 1.0]) == stats.LEAST_PAIRS and stats.runs_needed([1.0]) is None
    assert stats.runs_needed([1.0, -1.0]) is None and stats.runs_needed([1.0, -0.9999]) is None


# ----- diff


def side(source, seed=1, **config):
    return Side(
        "x", source, {"seed": seed, "steps": 3, **config}, "nano", (SimpleNamespace(seed=seed),)
    )


def test_diff_counts_lines_and_fields():
    text = describe(side("a = 1\nb = 2\n"), side("b = 2\na = 3\nc = 4\n", steps=5, width=[[0, 1]]))
    assert text.startswith("--- x\n+++ x\n@@ ") and "+c = 4" in text
    assert "| steps | 3 | 5 |" in text and "| width | null | &#91;&#91;0, 1&#93;&#93; |" in text
    assert text.endswith("code: 2 lines added, 1 removed; configuration: 2 fields differ")


def test_seed_only_differences_are_called_so():
    assert seed_only('seed: int = knob(-1, "x")\n', 'seed: int = knob(7, "x")\n')
    assert not seed_only("seed = 1\nlr = 2\n", "seed = 1\nlr = 3\n") and not seed_only("a\n", "a\n")
    assert describe(side("seed = 1\n"), side("seed = 2\n")).endswith("a seed-only difference")
    assert describe(side("a\n", seed=1), side("a\n", seed=2)).endswith("a seed-only difference")
    assert describe(side("a\n"), side("a\n")).endswith("no difference")
    assert describe(side("seed = 1\n"), side("seed = 2\n", steps=9)).endswith("1 fields differ")


def test_diff_of_a_source_full_of_seeds_takes_no_time():
    """It took minutes when the expression looked from each word to the end of the file."""
    text = "seed " * 200_000
    assert not seed_only(text, text + "x") and seed_only(f"{text}1", f"{text}2")


def test_diff_leaves_out_what_changes_no_result():
    before = {"seed": 1, "steps": 3, "run_of": "1:2/8:1", "run_id": "a"}
    assert config_changes(before, {"seed": 2, "steps": 4, "run_of": "1:1/8:1", "run_id": "b"}) == {
        "steps": [3, 4]
    }


def test_diff_against_the_working_script(tmp_path, capsys):
    repository = made.make_repository(tmp_path)
    (tmp_path / "train_gpt.py").write_text(helpers.TRAINER.read_text())
    folder = made.add_first(repository)
    status, out, _ = call(repository, capsys, "diff", folder)
    assert status == 0 and "-raise SystemExit('executed')" in out and "+++ train_gpt.py" in out
    assert f"| steps | 60 | {train_gpt.TRACKS['nano'].steps} |" in out
