"""`python -m records verify`: untouched records pass, tampered ones are caught with the right
reason, malicious ones harm nothing. The records are synthetic, the track's rules are the nano
track's own."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import records_helpers as made
import train_gpt
from data import text as data_text
from records.__main__ import main
from records.judge import check_gates, judge, judge_all
from records.log import Batch, parse_log
from records.record import load
from records.source import config_of
from records.submit import submit
from records_helpers import edit

FIRST, FASTER = "First", "Faster"
RUN = made.name_of(made.source_of("first"))
PAIR = made.name_of(made.source_of("second"), made.source_of("first"))
LOG = f"logs/{RUN}-02.txt"
SEEDS = {
    number: Batch(1, number, 4, 1).seed(made.sha_of(made.source_of("first"))) for number in (1, 2)
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Two records, the second of which claims speed against the first, and a current README. Not to
    be changed."""
    repository = made.make_repository(tmp_path_factory.mktemp("pristine"))
    made.add_first(repository)
    made.add_faster(repository)
    assert main(["table"], made.fresh(repository)) == 0
    return repository


@pytest.fixture
def repository(pristine, tmp_path):
    """A copy to tamper with."""
    shutil.copytree(pristine.root, tmp_path / "repository", symlinks=True)
    return type(pristine)(tmp_path / "repository", pristine.rules)


def folder_of(repository, name):
    return next((repository.root / "records" / "nano").glob(f"*_{name}"))


def failures_of(repository):
    return [
        f"{failure.path.relative_to(repository.root)}: {failure.reason}"
        for failure in judge_all(made.fresh(repository))
    ]


def test_untouched_records_pass(repository, capsys):
    assert failures_of(repository) == []
    assert main(["verify"], made.fresh(repository)) == 0
    assert capsys.readouterr().out == "verify: ok, 2 records\n"
    assert main(["verify", str(folder_of(repository, FASTER))], made.fresh(repository)) == 0
    assert not list(repository.root.rglob("executed")) and not Path("executed").exists()


def test_records_of_this_repository_pass():
    assert judge_all(made.Repository.at()) == []


# ----- tampered records: which record, what is done to its folder, the file and the reason told


def replace_in(path, old, new, count=0):
    return lambda folder: edit(folder / path, old, new, count)


def everywhere(old, new):
    """The same edit in one log, result.json and README.md: a careful forger."""

    def tamper(folder):
        for path in (LOG, "result.json", "README.md"):
            text = (folder / path).read_text()
            (folder / path).write_text(re.sub(old, new, text))

    return tamper


def loss_of_log(folder):
    return f"{made.stored(folder / LOG).val_loss:.5f}"


def edit_loss(*paths):
    def tamper(folder):
        old = loss_of_log(folder)
        for path in paths:
            edit(folder / path, re.escape(old.rstrip("0")) + "0*", "0.50000")

    return tamper


def second_version(folder):
    made.fatten(folder / LOG, r"^open\(", "OPEN(")


def copied_run(folder):
    """Run 1 again, under run 2's name and seed."""
    text = (folder / f"logs/{RUN}-01.txt").read_text().replace(f"{RUN}-01", f"{RUN}-02")
    (folder / LOG).write_text(
        text.replace(str(SEEDS[1]), str(SEEDS[2])).replace("counter:1/", "counter:2/")
    )


def without_batch(folder):
    for path in (folder / "logs").iterdir():
        edit(path, r"^batch:.*\n", "")


def all_logs(old, new, part="logs"):
    def tamper(folder):
        for path in (folder / part).iterdir():
            edit(path, old, new)

    return tamper


def extra_log(folder):
    text = (
        (folder / LOG).read_text().replace(f"{RUN}-02", f"{RUN}-09").replace(str(SEEDS[2]), "109")
    )
    (folder / f"logs/{RUN}-09.txt").write_text(text.replace("loss:2", "loss:3"))


def result(key, value):
    def tamper(folder):
        content = json.loads((folder / "result.json").read_text())
        content[key] = value
        (folder / "result.json").write_text(json.dumps(content))

    return tamper


def slower(folder):
    """Side b takes half of its time."""
    for path in (folder / "baseline").iterdir():
        run = made.stored(path)
        path.write_text(
            made.log_text(
                run.run,
                time_ms=run.train_time_ms // 2,
                seed=run.seed,
                loss=run.val_loss,
                counter=run.batch.counter,
                declared=run.batch.declared,
                source=run.source,
                started=run.started,
            )
        )


def above_target(folder):
    for path in (folder / "logs").iterdir():
        run = made.stored(path)
        path.write_text(
            made.log_text(
                run.run,
                seed=run.seed,
                loss=run.val_loss + 0.0095,
                counter=run.batch.counter,
                declared=run.batch.declared,
                time_ms=run.train_time_ms,
                source=run.source,
                started=run.started,
            )
        )


def chosen_seeds(folder):
    seed = Batch(1, 3, 4, 1).seed(made.sha_of(made.source_of("second")))
    for side in "ab":
        edit(next(folder.glob(f"*/{PAIR}-03{side}.txt")), str(seed), "7")


def other_order(folder):
    """The starts of two runs of a pair exchanged."""
    paths = [next(folder.glob(f"*/{PAIR}-02{side}.txt")) for side in "ab"]
    starts = [re.search(r"started:\S+", path.read_text())[0] for path in paths]
    for path, old, new in zip(paths, starts, starts[::-1], strict=True):
        edit(path, old, new)


def paired_by_rank(folder):
    """Baselines renumbered by their times, with seeds, names and starts as they are in the runs
    that they then meet."""
    sides = [
        [made.stored(path) for path in (folder / part).iterdir()] for part in ("logs", "baseline")
    ]
    order = [sorted(side, key=lambda run: run.train_time_ms) for side in sides]
    texts = {base.path: base.path.read_text() for base in sides[1]}
    for run, base in zip(*order, strict=True):
        path = folder / f"baseline/{run.run[:-1]}b.txt"
        text = texts[base.path].replace(base.run, f"{run.run[:-1]}b")
        path.write_text(
            text.replace(f"counter:{base.batch.counter}/", f"counter:{run.batch.counter}/")
        )


def rename(old, new):
    return lambda folder: (folder / old).rename(folder / new)


TAMPERED = {
    "no processor time": (
        FIRST,
        replace_in(LOG, r"cpu_time:\d+ms", "cpu_time:0ms"),
        LOG,
        "the processor time is 0 ms",
    ),
    "edited loss, final line only": (
        FIRST,
        replace_in(LOG, r"^(final val_loss:)\S+", r"\g<1>0.50000"),
        LOG,
        "final loss is 0.50000 in the final line",
    ),
    "edited loss in the log": (FIRST, edit_loss(LOG), "result.json", "loss is {.*the logs say"),
    "edited loss in log and result": (
        FIRST,
        edit_loss(LOG, "result.json"),
        "result.json",
        "loss is",
    ),
    "edited loss in result": (
        FIRST,
        edit_loss("result.json"),
        "result.json",
        "runs is .*the logs say",
    ),
    "edited README": (
        FIRST,
        edit_loss("README.md"),
        "README.md",
        "figures are not those of the logs",
    ),
    "README without markers": (
        FIRST,
        replace_in("README.md", "<!-- figures -->", ""),
        "README.md",
        "0 times",
    ),
    "edited p": (
        FIRST,
        result("p_needed", 0.05),
        "result.json",
        "p_needed is 0.05, the logs say 0.005",
    ),
    "result with more": (
        FIRST,
        result("reviewed", True),
        "result.json",
        "reviewed is True, the logs say None",
    ),
    "edited time": (
        FIRST,
        replace_in(LOG, r"^(final .*train_time:)\d+", r"\g<1>40000"),
        LOG,
        "time is 40000 ms",
    ),
    "edited time of a step": (
        FIRST,
        replace_in(LOG, r"^(step:40.*train_time:)\d+", r"\g<1>20100"),
        LOG,
        "step_avg .* is not train_time / step",
    ),
    "cut log": (FIRST, replace_in(LOG, r"^validity[\s\S]*", ""), LOG, "no status line .*cut"),
    "cut in a line": (FIRST, replace_in(LOG, r"loss.png\n", "loss"), LOG, "last line is cut"),
    "cut middle": (
        FIRST,
        replace_in(LOG, r"^step:20/.*\n", ""),
        LOG,
        "2 found, one every 20 of 60 steps",
    ),
    "no validity line": (
        FIRST,
        replace_in(LOG, r"^validity.*\n", ""),
        LOG,
        "no lines 'validity: '",
    ),
    "no final line": (FIRST, replace_in(LOG, r"^final.*\n", ""), LOG, "no lines 'final '"),
    "a second final line": (
        FIRST,
        replace_in(LOG, r"^(final.*\n)", r"\1\1"),
        LOG,
        "2 lines 'final '",
    ),
    "a log after the log": (
        FIRST,
        lambda folder: (folder / LOG).write_text((folder / LOG).read_text() * 2),
        LOG,
        "'===== END OF CODE =====' stands twice",
    ),
    "run that failed": (
        FIRST,
        replace_in(LOG, r"^status:ok.*", "status:nan training loss is nan at step 3"),
        LOG,
        "did not complete: 'status:nan",
    ),
    "no sentinel": (
        FIRST,
        replace_in(LOG, r"^===== END OF CODE =====\n", ""),
        LOG,
        "no line '===== END OF CODE",
    ),
    "edited code in the log": (
        FIRST,
        lambda folder: (folder / LOG).write_text("OPEN(\n" + (folder / LOG).read_text()),
        LOG,
        "not that of the source in the log",
    ),
    "edited code in the folder": (
        FIRST,
        replace_in("train_gpt.py", r"^open\(", "OPEN("),
        LOG,
        "is not that of the train_gpt.py beside the logs",
    ),
    "two code versions": (FIRST, second_version, "logs", "2 versions of the code"),
    "same seed twice": (
        FIRST,
        replace_in(LOG, str(SEEDS[2]), str(SEEDS[1])),
        "logs",
        f"have one seed, {SEEDS[1]}",
    ),
    "seed of the config only": (
        FIRST,
        replace_in(LOG, f'"seed": {SEEDS[2]}', '"seed": 7'),
        LOG,
        "seed is 7 in the config",
    ),
    "chosen seed": (
        FIRST,
        replace_in(LOG, str(SEEDS[2]), "7"),
        LOG,
        f"has seed 7; run 2 of batch 1 of .* {SEEDS[2]}",
    ),
    "a pair's chosen seed": (
        FASTER,
        lambda folder: chosen_seeds(folder),
        f"baseline/{PAIR}-03b.txt",
        "has seed 7; run 3",
    ),
    "no time of a start": (
        FIRST,
        all_logs(" started:.*", ""),
        f"logs/{RUN}-01.txt",
        "no time of its start",
    ),
    "no such time": (
        FIRST,
        replace_in(LOG, r"started:\d{4}-\d\d", "started:2026-13"),
        LOG,
        "no moment of the calendar",
    ),
    "runs at once": (
        FIRST,
        replace_in(LOG, r"started:\S+", f"started:{made.YESTERDAY:%Y-%m-%dT%H:%M:%SZ}"),
        LOG,
        "which comes before it, was started at",
    ),
    "started after the record": (
        FIRST,
        all_logs(r"started:\d{4}", "started:2099"),
        f"logs/{RUN}-01.txt",
        "was started on 2099-.*, after the record's date",
    ),
    "pairs in another order": (
        FASTER,
        lambda folder: other_order(folder),
        "*",
        "which comes before it, was",
    ),
    "shards that were not checked": (
        FIRST,
        replace_in(LOG, "shards:ok", "shards:unknown"),
        LOG,
        "shards: 'unknown'",
    ),
    "shards of an older trainer": (
        FIRST,
        replace_in(LOG, "shards:ok ", ""),
        LOG,
        "shards: 'unknown'",
    ),
    "copied run": (FIRST, copied_run, LOG, f"has the losses of {RUN}-01"),
    "missing run": (
        FIRST,
        lambda folder: (folder / LOG).unlink(),
        "logs",
        "4 runs were declared, run 2 missing",
    ),
    "added run": (FIRST, extra_log, "logs", "run counters .* repeat"),
    "undeclared runs": (
        FIRST,
        without_batch,
        f"logs/{RUN}-01.txt",
        "no valid number of declared runs",
    ),
    "runs of two batches": (
        FIRST,
        replace_in(LOG, "batch:1 ", "batch:2 "),
        "logs",
        "several batches",
    ),
    "restarted runs": (FIRST, all_logs("start:1$", "start:2"), "logs", "4 runs were started again"),
    "third batch": (
        FIRST,
        all_logs("^batch:1 ", "batch:3 "),
        LOG,
        "run 2 of batch 3 of the code .* has seed",
    ),
    "overrides": (
        FIRST,
        replace_in(LOG, r"^data:", 'overrides:{"matrix_lr": 0.04}\ndata:'),
        LOG,
        "overrides: 'matrix_lr'",
    ),
    "resumed run": (
        FIRST,
        replace_in(LOG, r"^step:40", f"resumed:{RUN}-02 step:39/60 world_size:1\nstep:40"),
        LOG,
        "was resumed",
    ),
    "wrong data": (
        FIRST,
        replace_in(LOG, r"^data:\w+", "data:" + "ab" * 32),
        LOG,
        "data manifest abab",
    ),
    "wrong validation tokens": (
        FIRST,
        replace_in(LOG, r"^(validity.*val_sha256:)\w+", r"\g<1>" + "cd" * 32),
        LOG,
        "validation tokens cdcd",
    ),
    "fewer validation tokens": (
        FIRST,
        replace_in(LOG, r"^(validity.*val_tokens:)\d+", r"\g<1>1024"),
        LOG,
        "'1024' validation tokens were scored",
    ),
    "wrong validation hash in the config": (
        FIRST,
        replace_in(LOG, r'("val_sha256": )"\w+"', r'\1""'),
        LOG,
        "val_sha256 is '', the track's is",
    ),
    "wrong target": (
        FIRST,
        replace_in(LOG, r'"target_loss": 0.88', '"target_loss": 1.5'),
        LOG,
        "target_loss is 1.5, the track's is 0.88",
    ),
    "wrong target in result": (
        FIRST,
        replace_in("result.json", r'"target": 0.88', '"target": 1.5'),
        "result.json",
        "loss is",
    ),
    "wrong tokenizer": (
        FIRST,
        replace_in(LOG, '"tokenizer": "bytes"', '"tokenizer": "gpt2"'),
        LOG,
        "tokenizer is 'gpt2'",
    ),
    "another track": (
        FIRST,
        all_logs('track(:|": ")nano', r"track\1fineweb"),
        LOG,
        "run of track 'fineweb'",
    ),
    "not causal": (
        FIRST,
        replace_in(LOG, "causal:ok", "causal:FAILED"),
        LOG,
        "gate causal is 'FAILED'",
    ),
    "not local": (
        FIRST,
        replace_in(LOG, "local:ok", "local:FAILED"),
        LOG,
        "gate local is 'FAILED'",
    ),
    "gate left out": (FIRST, replace_in(LOG, " normalised:ok", ""), LOG, "gate normalised is None"),
    "target not reached": (FIRST, above_target, "logs", "target 0.88 not reached"),
    "two machines": (
        FIRST,
        replace_in(LOG, "Slow CPU", "Fast CPU"),
        "",
        "device differs between runs",
    ),
    "renamed log": (
        FIRST,
        rename(LOG, "logs/best.txt"),
        "logs/best.txt",
        "named otherwise than its run",
    ),
    "no README": (FIRST, lambda folder: (folder / "README.md").unlink(), "README.md", "is missing"),
    "a file too many": (
        FIRST,
        lambda folder: (folder / "setup.py").write_text("1"),
        "setup.py",
        "no part of a record",
    ),
    "no parent": (FASTER, result("parent", None), "result.json", "names no parent, though"),
    "unknown parent": (
        FASTER,
        result("parent", "2020-01-01_Nobody"),
        "result.json",
        "no earlier record",
    ),
    "its own parent": (
        FASTER,
        lambda folder: result("parent", folder.name)(folder),
        "result.json",
        "no earlier",
    ),
    "parent is a path": (
        FASTER,
        result("parent", "../../nano"),
        "result.json",
        "no name of a record",
    ),
    "baseline of other code": (
        FASTER,
        lambda folder: [
            made.fatten(path, r"^open\(", "OPEN(") for path in (folder / "baseline").iterdir()
        ],
        f"baseline/{PAIR}-01b.txt",
        "no run of the parent",
    ),
    "dropped pair": (
        FASTER,
        lambda folder: (folder / f"baseline/{PAIR}-03b.txt").unlink(),
        "baseline",
        "8 runs were declared, run 3 missing",
    ),
    "dropped pair of both": (
        FASTER,
        lambda folder: [next(folder.glob(f"*/{PAIR}-03{side}.txt")).unlink() for side in "ab"],
        "logs",
        "8 runs were declared, run 3 missing",
    ),
    "baseline without ab": (
        FASTER,
        lambda folder: [
            (
                edit(path, "ab-nano", "nano"),
                path.rename(path.with_name(path.name.replace("ab-nano", "nano"))),
            )
            for path in list((folder / "baseline").iterdir())
        ],
        f"baseline/{PAIR[3:]}-01b.txt",
        f"calls it '{PAIR}-01b'",
    ),
    "restarted baseline": (
        FASTER,
        all_logs("start:1$", "start:2", "baseline"),
        "baseline",
        "8 runs were started again",
    ),
    "baseline of another batch": (
        FASTER,
        replace_in(f"baseline/{PAIR}-01b.txt", "batch:1 ", "batch:2 "),
        "baseline",
        "several batches",
    ),
    "pairs by rank": (FASTER, paired_by_rank, f"baseline/{PAIR}-0", "has seed"),
    "not faster": (FASTER, slower, "baseline", "not shown to be faster"),
    "speed claimed without runs": (
        FASTER,
        lambda folder: shutil.rmtree(folder / "baseline"),
        "result.json",
        "claim is 'speed'",
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_tampered_record_is_caught(repository, name):
    which, tamper, file, reason = TAMPERED[name]
    folder = folder_of(repository, which)
    tamper(folder)
    found = failures_of(repository)
    expected = str((folder / file).relative_to(repository.root)) + ": " * (not file.endswith("-0"))
    expected = expected.removesuffix("*: ")  # whichever of its files
    assert any(line.startswith(expected) and re.search(reason, line) for line in found), found


@pytest.mark.parametrize(
    "day, part, fails",
    [
        ("2026-11-21", "runs", False),
        ("2026-11-22", "runs", True),
        ("2026-11-22", "baseline", False),
    ],
)
def test_a_gate_is_asked_of_records_since_it_exists(day, part, fails):
    """Parents are of any age; what a log says of a gate counts in any case."""
    failures, said = [], {"causal": "ok", "normalised": "ok"}
    for validity in (said, {**said, "local": "ok"}, {**said, "local": "FAILED"}):
        record = SimpleNamespace(date=day, runs=[], baseline=[])
        setattr(record, part, [SimpleNamespace(path="a log", validity=validity)])
        check_gates(record, lambda path, reason: failures.append(reason))
    reasons = [f"validity gate local is {word}, must be ok" for word in ("None", "'FAILED'")]
    assert failures == (reasons if fails else reasons[1:])


def test_each_failure_is_one_line_and_the_status_is_1(repository, capsys):
    folder = folder_of(repository, FIRST)
    for path in sorted((folder / "logs").iterdir())[:2]:
        edit(path, "causal:ok", "causal:FAILED")
    assert main(["verify"], made.fresh(repository)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    path = f"records/nano/{folder.name}/logs/{RUN}-01.txt"
    assert lines[0] == f"{path}: validity gate causal is 'FAILED', must be ok"
    assert main(["verify", str(folder_of(repository, FASTER))], made.fresh(repository)) == 0


# ----- submit


@pytest.mark.parametrize("name", ["../../escape", "a/b", "", "-x", "a" * 61, "x\n", "naïve", "<b>"])
def test_submit_refuses_names_that_are_no_folder(repository, capsys, name):
    before = sorted(repository.root.rglob("*"))
    logs = [str(path) for path in (repository.root / "logs").glob(f"{RUN}-*")]
    assert main(["submit", *logs, f"--name={name}"], made.fresh(repository)) == 2
    assert "up to 60 letters, digits and '-'" in capsys.readouterr().err
    assert sorted(repository.root.rglob("*")) == before


def test_submit_refuses_what_verify_refuses(repository, capsys):
    """Runs that stand in a record already, a target that is not reached; nothing is left behind."""
    before = sorted(repository.root.rglob("*"))
    logs = sorted(map(str, (repository.root / "logs").glob(f"{RUN}-*")))
    assert main(["submit", *logs, "--name", "Again"], made.fresh(repository)) == 1
    assert f"logs/{RUN}-01.txt: has the losses of {RUN}-01 of " in capsys.readouterr().out
    assert main(["submit", *logs[:3], "--name", "Chosen"], made.fresh(repository)) == 1
    assert "logs: 4 runs were declared, run 4 missing" in capsys.readouterr().out
    assert main(["submit", "nowhere", "--name", "Again"], made.fresh(repository)) == 2
    assert (
        capsys.readouterr().err == "records: nowhere: cannot be read: No such file or directory\n"
    )
    assert sorted(repository.root.rglob("*")) == before


# ----- the repository around the records


def test_leaderboard_must_be_current(repository):
    edit(repository.readme, r"\d+\.\d(?= \| 0\.8)", "1.0", count=1)
    assert re.match("records/README.md: a leaderboard is not current", failures_of(repository)[0])
    assert main(["table"], made.fresh(repository)) == 0
    assert failures_of(repository) == []
    edit(repository.readme, "<!-- records/nano -->", "")
    assert re.match(
        "records/README.md: holds the marker <!-- records/nano --> 0 times",
        failures_of(repository)[0],
    )


def test_a_run_counts_for_one_record(repository):
    folder = folder_of(repository, FIRST)
    shutil.copytree(folder, folder.with_name(f"{folder.name[:10]}_Zwin"))
    assert any(
        re.search(f"_Zwin/logs/{RUN}-01.txt: has the losses of {RUN}-01 of .*_First", line)
        for line in failures_of(repository)
    )


def test_one_chain_of_speed_claims(repository):
    """A second claim against a parent that was already beaten fails, and so does a second root."""
    folder = folder_of(repository, FASTER)
    shutil.copytree(folder, folder.with_name(f"{folder.name[:10]}_Rival"))
    found = failures_of(repository)
    assert any("already beaten by" in line for line in found), found
    rival = folder.with_name(f"{folder.name[:10]}_Rival")
    result("parent", None)(rival)
    assert any(
        "names no parent, though" in line and "_Rival" in line for line in failures_of(repository)
    )


def test_git_keeps_the_logs_of_records():
    """`logs/` of the repository's root is ignored, a record's is not."""
    for path, ignored in (
        ("logs/run/log.txt", True),
        ("records/nano/2026-01-01_Name/logs/run.txt", False),
    ):
        done = subprocess.run(
            ["git", "check-ignore", "-q", path], cwd=Path(train_gpt.__file__).parent
        )
        assert done.returncode in (int(not ignored), 128), path  # 128: no git checkout


def test_name_of_a_record(repository):
    folder = folder_of(repository, FIRST)
    for name in (
        "2026-13-01_First",
        "First",
        f"{folder.name[:10]}_First one",
        f"{folder.name[:10]}_Fir\nst",
    ):
        renamed = folder.rename(folder.with_name(name))
        assert any(
            "is named <YYYY-MM-DD>_<Name>" in failure.reason
            for failure in judge(load(renamed, "nano"), made.fresh(repository))
        ), name
        folder = renamed


def test_later_batches_of_a_code_share_the_level(tmp_path):
    """p between 0.0025 and 0.005 is enough for a first batch, not for a second one."""
    for batch, good in ((1, True), (2, False)):
        repository = made.make_repository(tmp_path / str(batch))
        logs = made.write_logs(repository.root / "logs", made.source_of(), batch=batch)
        for path, loss in zip(logs, ("0.87000", "0.87370", "0.87100", "0.87510"), strict=True):
            path.write_text(path.read_text().replace(f"{parse_log(path).val_loss:.5f}", loss))
        record, failures = submit(made.fresh(repository), f"Batch{batch}", logs)
        assert bool(failures) != good, failures
        assert 0.0025 < record.result["loss"]["p"] < 0.005
    assert "below 0.0025 is needed" in failures[0].reason


def test_rules_are_those_of_the_trainer():
    rules = made.Repository.at().rules
    assert rules.keys() == train_gpt.TRACKS.keys() - {"continual"}
    for name, rule in rules.items():
        config = config_of(Path(train_gpt.__file__).read_text(), name)
        for key, value in rule.fixed.items():
            assert config[key] == value
    assert rules["nano"].manifest_sha256 == data_text.RECORD_SHA256["manifest.json"]


@pytest.mark.parametrize("orders", [(2,), (2, 3)])
def test_fields_that_the_rules_fix(tmp_path, orders):
    """A track's rules may fix more fields than those that each track's rules name."""
    repository = made.fixing(made.make_repository(tmp_path), ngram_orders=[2], copy_orders=[])
    fields = {"ngram_orders": orders, "copy_orders": ()}
    config = made.config_of_nano(**fields)
    logs = made.write_logs(tmp_path / "logs", made.source_of(**fields), config=config)
    _, failures = submit(repository, "Orders", logs)
    reasons = [] if orders == (2,) else ["ngram_orders is [2, 3], the track's is [2]"] * len(logs)
    assert [failure.reason for failure in failures] == reasons


def test_fields_that_the_rules_fix_are_asked_of_the_parent_too(repository):
    stages = made.CONFIG["stages"]
    assert judge_all(made.fixing(repository, stages=stages, cooldown=0.45)) == []
    failures = judge_all(made.fixing(repository, stages=stages, ngram_orders=[2]))
    told = {failure.path for failure in failures}
    logs = set(repository.root.glob("records/nano/*/*/*.txt"))
    assert len(failures) == len(logs) and told == logs
    assert any(path.parent.name == "baseline" for path in told)
    assert {failure.reason for failure in failures} == {
        "ngram_orders is 'not there', the track's is [2]"
    }


def test_unknown_validation_hash_is_that_of_earlier_records(repository):
    """A track whose hash is not in its Config, as fineweb's: all records score the same tokens."""
    rules = {**repository.rules, "nano": replace(repository.rules["nano"], val_sha256="")}
    unknown = type(repository)(repository.root, rules)
    for path in repository.root.glob("records/nano/*/*/*.txt"):
        edit(path, r'("val_sha256": )"\w+"', r'\1""')
    assert not any("validation tokens" in failure.reason for failure in judge_all(unknown))
    edit(folder_of(repository, FIRST) / LOG, r"^(validity.*val_sha256:)\w+", r"\g<1>" + "cd" * 32)
    assert any(
        "validation tokens cdcd" in failure.reason
        for failure in judge_all(type(repository)(repository.root, rules))
    )


# ----- malicious folders


def test_links_are_refused(repository, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret")
    folder = folder_of(repository, FIRST)
    for name in (LOG, "README.md"):
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
    shutil.move(folder_of(repository, FASTER), tmp_path / "elsewhere")
    folder.with_name("2026-01-01_Link").symlink_to(tmp_path / "elsewhere")
    found = failures_of(repository)
    assert sum("symbolic link" in line or "links are not followed" in line for line in found) == 3
    assert "a secret" not in "".join(found)
    shutil.move(repository.root / "records" / "nano", tmp_path / "nano")
    (repository.root / "records" / "nano").symlink_to(tmp_path / "nano")
    assert any("records/nano: is a symbolic link" in line for line in failures_of(repository))


def hostile(content):
    def write(path):
        path.unlink()
        path.write_bytes(content)

    return write


def sparse(path):
    with open(path, "r+b") as file:
        file.truncate(2**40)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def directory(path):
    path.unlink()
    path.mkdir()


HOSTILE = {
    "huge": (sparse, "at most 4,194,304 are read"),
    "binary": (hostile(b"\xff\xfe\x00" * 100), "no UTF-8 text"),
    "nul bytes": (hostile(b"\0" * 100), r"line 1 holds the control character '\\x00'"),
    "terminal escapes": (hostile(b"a\n\x1b[2Jb\n"), r"line 2 holds the control character '\\x1b'"),
    "hidden direction": (hostile("x = 1  # \u202e1 = x\n".encode()), r"'\\u202e'"),
    "pipe": (pipe, "no regular file"),
    "folder": (directory, "no regular file"),
    "empty": (hostile(b""), "no line '===== END OF CODE"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_log_is_refused(repository, name):
    attack, reason = HOSTILE[name]
    folder = folder_of(repository, FIRST)
    attack(folder / LOG)
    assert any(
        line.startswith(f"records/nano/{folder.name}/{LOG}: ") and re.search(reason, line)
        for line in failures_of(repository)
    ), failures_of(repository)


@pytest.mark.parametrize(
    "text, reason",
    {
        "[" * 100_000: "no valid JSON",
        "[" * 30 + "]" * 30: "nested deeper",
        '{"schema": 1, "schema": 1}': "stands twice",
        '{"schema": NaN}': "NaN is no number",
        '{"schema": 1e999}': "1e999 is no number",
        "[]": "no object with schema 1",
        '{"schema": 2}': "no object with schema 1",
        '{"schema": 1, "parent": {"a": []}}': "no name of a record",
        "9" * 5000: "no valid JSON",
    }.items(),
    ids=range(9),
)
def test_weird_json_is_refused(repository, text, reason):
    folder = folder_of(repository, FIRST)
    (folder / "result.json").write_text(text)
    assert any(re.search(reason, line) for line in failures_of(repository)), failures_of(repository)


@pytest.mark.parametrize(
    "old, new, reason",
    [
        (r"^run:\S+", "run:../../../etc/passwd", "unreadable run line"),
        (r"^run:\S+", "run:.hidden", "unreadable run line"),
        (r"counter:2/4", "counter:2/9999999999999999999", "no valid number of declared runs"),
        (r'"steps": 60', '"steps": 99999999999', "steps is 99999999999"),
        (r"^(step:40/60 train_loss:)\S+", r"\1nan", "unreadable step line"),
        (
            r"^(step:40/60 train_loss:\S+ .*train_time:)\d+",
            r"\g<1>" + "9" * 30,
            "unreadable step line",
        ),
        (r"^config:\{", 'config:{"a": ' + "[" * 500 + "]" * 500 + ", ", "nested deeper"),
        (r"^config:.*", "config:[]", "config has no run_id"),
    ],
)
def test_hostile_field_is_refused(repository, old, new, reason):
    folder = folder_of(repository, FIRST)
    edit(folder / LOG, old, new)
    assert any(re.search(reason, line) for line in failures_of(repository)), failures_of(repository)
