"""`python -m records verify`: untouched records pass, tampered ones are caught with the right
reason, malicious ones harm nothing. The records are synthetic, the track's rules are the mini
track's own."""

import json
import os
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

import records_helpers as made
import train_gpt
from data import text as data_text
from records import files, stats
from records.__main__ import main
from records.source import config_of
from records_helpers import edit, refusal

FIRST, FASTER = "First", "Faster"
RUN = made.name_of(made.source_of("first"))
PAIR = made.name_of(made.source_of("second"))
LOG = f"logs/{RUN}-02a.txt"
SEEDS = {
    number: stats.seed_of(made.sha_of(made.source_of("first")), 1, number) for number in (1, 2)
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
    return next((repository.root / "records" / "mini").glob(f"*_{name}"))


def test_untouched_records_pass(repository, capsys):
    assert refusal(repository) == ""
    assert main(["verify"], made.fresh(repository)) == 0
    assert capsys.readouterr().out == "verify: ok, 2 records\n"
    assert not list(repository.root.rglob("executed")) and not Path("executed").exists()


def test_records_of_this_repository_pass():
    assert refusal(made.Repository.at()) == ""


# ----- tampered records: which record, what is done to its folder, the file and the reason told


def replace_in(path, old, new, count=0):
    return lambda folder: edit(folder / path, old, new, count)


def loss_of_log(folder):
    return f"{made.stored(folder / LOG).val_loss:.5f}"


def edit_loss(*paths):
    def tamper(folder):
        old = loss_of_log(folder)
        for path in paths:
            edit(folder / path, re.escape(old.rstrip("0")) + "0*", "0.50000")

    return tamper


def with_script(edited, rehashed):
    """A script before a thin log, which is not the folder's."""

    def tamper(folder):
        source = made.stored(folder / LOG).source
        changed = source.replace("open(", edited, 1)
        text = (folder / LOG).read_text()
        if rehashed:
            text = text.replace(made.sha_of(source), made.sha_of(changed))
        (folder / LOG).write_text(changed + text)

    return tamper


def copied_run(folder):
    """Run 1 again, under run 2's name and seed."""
    text = (folder / f"logs/{RUN}-01a.txt").read_text().replace(f"{RUN}-01a", f"{RUN}-02a")
    text = text.replace(str(SEEDS[1]), str(SEEDS[2])).replace("1:1/4:1", "1:2/4:1")
    began = re.search(r"started:\S+", (folder / LOG).read_text())[0]
    text = re.sub(r"started:\S+", began, text.replace("counter:1/", "counter:2/"))
    (folder / LOG).write_text(text)


def all_logs(old, new, part="logs"):
    def tamper(folder):
        for path in (folder / part).iterdir():
            edit(path, old, new)

    return tamper


def restarted(part):
    """Each run of a part was started twice, as its batch line and its configuration say."""

    def tamper(folder):
        for path in (folder / part).iterdir():
            edit(path, "start:1$", "start:2")
            edit(path, r'("run_of": "1:\d/\d:)1"', r'\g<1>2"')

    return tamper


def extra_log(folder):
    text = (folder / LOG).read_text().replace(f"{RUN}-02a", f"{RUN}-09a")
    (folder / f"logs/{RUN}-09a.txt").write_text(text)


def result(key, value):
    def tamper(folder):
        content = json.loads((folder / "result.json").read_text())
        content[key] = value
        (folder / "result.json").write_text(json.dumps(content))

    return tamper


def with_times(factor):
    """The parent takes so much of its time."""

    def tamper(folder):
        for path in (folder / "baseline").iterdir():
            again(path, time_ms=round(made.stored(path).train_time_ms * factor))

    return tamper


def with_losses(more, part="logs"):
    def tamper(folder):
        for path in (folder / part).iterdir():
            again(path, loss=made.stored(path).val_loss + more)

    return tamper


def again(path, **values):
    """Write a log of a record anew, with some values changed."""
    run = made.stored(path)
    kept = {
        "source": run.source,
        "seed": run.seed,
        "loss": run.val_loss,
        "counter": run.counter,
        "declared": run.declared,
        "time_ms": run.train_time_ms,
        "started": run.started,
    }
    path.write_text(made.log_text(run.run, **{**kept, **values}))


def chosen_seeds(folder):
    seed = stats.seed_of(made.sha_of(made.source_of("second")), 1, 3)
    for side in "ab":
        edit(next(folder.glob(f"*/{PAIR}-03{side}.txt")), str(seed), "7")


def other_order(folder):
    """The starts of two runs of a pair exchanged."""
    paths = [next(folder.glob(f"*/{PAIR}-02{side}.txt")) for side in "ab"]
    starts = [re.search(r"started:\S+", path.read_text())[0] for path in paths]
    for path, old, new in zip(paths, starts, starts[::-1], strict=True):
        edit(path, old, new)


def paired_by_rank(folder):
    """Baselines renumbered by their times, so that slow ones meet slow ones."""
    sides = [
        sorted(map(made.stored, (folder / part).iterdir()), key=lambda run: run.train_time_ms)
        for part in ("logs", "baseline")
    ]
    texts = {base.path: base.path.read_text() for base in sides[1]}
    for run, base in zip(*sides, strict=True):
        text = texts[base.path].replace(base.run, f"{run.run[:-1]}b")
        text = text.replace(f"1:{base.counter}/", f"1:{run.counter}/")
        text = text.replace(f"counter:{base.counter}/", f"counter:{run.counter}/")
        (folder / f"baseline/{run.run[:-1]}b.txt").write_text(text)


def rename(old, new):
    return lambda folder: (folder / old).rename(folder / new)


def in_log(old, new):
    return replace_in(LOG, old, new)


HALF = "\\\\ud800"  # of a character, as JSON writes it
DUE = "stands where .* due"
# What is done to First, and what `verify` says of it.
TAMPERED = {
    "edited loss, final line only": (
        in_log(r"^(final val_loss:)\S+", r"\g<1>0.50000"),
        r"the last val_loss is 0.8\d+, in the final line 0.5",
    ),
    "edited loss in the log": (
        lambda folder: again(folder / LOG, loss=made.stored(folder / LOG).val_loss + 0.001),
        "result.json: loss is {.*the logs say",
    ),
    "edited loss in result": (
        replace_in("result.json", '"mean": 0.87', '"mean": 0.5'),
        "result.json: loss is .*the logs say",
    ),
    "edited README": (edit_loss("README.md"), "README.md: only what stands under `## Why`"),
    "figures beside": (
        replace_in("README.md", "^## Figures", "## Figures\n\n| 1 s |\n\n## Figures"),
        "README.md: .* under `## Why`",
    ),
    "result with more": (
        result("reviewed", True),
        "result.json: reviewed is True, the logs say 'not there'",
    ),
    "nobody": (result("by", ""), "by is ''; names of 100 letters at most are due"),
    "odd author": (result("by", "<b>"), "by is '<b>'; names"),
    "edited time": (
        in_log(r"^(final .*train_time:)\d+", r"\g<1>40000"),
        "time is 40000 ms in the final",
    ),
    "edited time of a step": (
        in_log(r"^(step:40.*train_time:)\d+", r"\g<1>20100"),
        "step_avg .* is not train_time / step",
    ),
    "times that fall": (
        in_log(r"^(step:40.*train_time:)\d+ms step_avg:\S+", r"\g<1>10000ms step_avg:250.00ms"),
        "step 40: 10000 ms; times must not fall",
    ),
    "cut log": (in_log(r"^validity[\s\S]*", ""), "did not complete, or its log was cut"),
    "cut in a line": (in_log(r"loss.png\n", "loss"), "last line is cut"),
    "cut middle": (in_log(r"^step:20/.*\n", ""), "3 losses are logged, 4 are due"),
    "no validity line": (in_log(r"^validity.*\n", ""), f"'final .* validity .*due|{DUE}"),
    "no final line": (in_log(r"^final.*\n", ""), DUE),
    "a second final line": (in_log(r"^(final.*\n)", r"\1\1"), DUE),
    "a log after the log": (
        lambda folder: (folder / LOG).write_text((folder / LOG).read_text() * 2),
        "stands where the step line is due",
    ),
    "lines in another order": (in_log(r"^(comms:.*\n)(validity:.*\n)", r"\2\1"), DUE),
    "run that failed": (
        in_log(r"^status:ok.*", "status:nan training loss is nan at step 3"),
        "did not complete, or its log was cut: 'status:nan",
    ),
    "no sentinel": (in_log(r"^===== END OF CODE =====\n", ""), "no line '===== END OF CODE"),
    "edited code in the log": (with_script("OPEN(", False), "ran other code"),
    "two code versions": (with_script("OPEN(", True), "ran other code"),
    "edited code in the folder": (
        replace_in("train_gpt.py", r"^open\(", "OPEN("),
        "ran other code .* than the script it belongs to",
    ),
    "same seed twice": (in_log(str(SEEDS[2]), str(SEEDS[1])), "-02a has seed .*; its place has"),
    "seed of the config only": (
        in_log(f'"seed": {SEEDS[2]}', '"seed": 7'),
        "seed is 7 in the config",
    ),
    "chosen seed": (in_log(str(SEEDS[2]), "7"), f"-02a has seed 7; its place has {SEEDS[2]}"),
    "no time of a start": (in_log(" started:.*", ""), DUE),
    "no such time": (in_log(r"started:\d{4}-\d\d", "started:2026-13"), "month must be in 1..12"),
    "runs at once": (
        in_log(r"started:\S+", f"started:{made.YESTERDAY:%Y-%m-%dT%H:%M:%SZ}"),
        "which comes before it",
    ),
    "started after the record": (
        all_logs(r"started:\d{4}", "started:2099"),
        "_First: is dated .*, before the end of its runs or after today",
    ),
    "shards that were not checked": (in_log("shards:ok", "shards:unknown"), "shards is 'unknown'"),
    "shards of an older trainer": (in_log("shards:ok ", ""), DUE),
    "copied run": (copied_run, "result.json: loss is"),
    "missing run": (
        lambda folder: (folder / LOG).unlink(),
        r"4 runs were declared, logs has \[1, 3, 4\]; every run of",
    ),
    "no runs at all": (
        lambda folder: [path.unlink() for path in (folder / "logs").iterdir()],
        "logs: 1 to 100 logs are needed",
    ),
    "added run": (extra_log, "is that of several runs|every run of the one batch counts, once"),
    "undeclared runs": (all_logs(r"^batch:.*\n", ""), "where the batch line is due"),
    "another batch": (
        lambda folder: [
            edit(folder / LOG, "batch:1 ", "batch:2 "),
            edit(folder / LOG, '"run_of": "1:', '"run_of": "2:'),
        ],
        "batch differs between runs",
    ),
    "restarted runs": (restarted("logs"), "4 runs of logs were started again, at most 1 may be"),
    "overrides": (in_log(r"^data:", 'overrides:{"matrix_lr": 0.04}\ndata:'), DUE),
    "resumed run": (in_log(r"^step:40", "resumed:x step:39/60 world_size:1\nstep:40"), DUE),
    "started_from": (in_log("^step:20", "started_from:best step:285\nstep:20"), DUE),
    "init_from": (
        in_log(r"^config:\{", 'config:{"init_from": "best", '),
        "init_from is 'best' in the config line",
    ),
    "resume": (in_log('"resume": ""', '"resume": "best"'), "resume is 'best' in the config line"),
    "matrix_lr": (
        in_log('"matrix_lr": 0.025', '"matrix_lr": 0.05'),
        "matrix_lr is 0.05 in the config line, in the script it is 0.025",
    ),
    "micro_batches": (in_log('"micro_batches": 8', '"micro_batches": 16'), "stages is "),
    "a field less": (in_log(r'"matrix_lr": 0.025, ', ""), "matrix_lr is 'not there' in the config"),
    "tokens": (
        in_log(r"tokens:245760", "tokens:2457"),
        "tokens is 2457, world size 1; each takes whole micro-batches",
    ),
    "no time": (
        lambda folder: [
            edit(folder / LOG, r"train_time:\d+ms", "train_time:0ms"),
            edit(folder / LOG, r"train_time:[0-9.]+s", "train_time:0.0s"),
            edit(folder / LOG, r"step_avg:[0-9.]+", "step_avg:0.00"),
        ],
        "the training time is 0 ms",
    ),
    "world size 0": (
        all_logs("world_size:1", "world_size:0"),
        "world size 0; each takes whole micro-batches",
    ),
    "world size 64": (
        all_logs("world_size:1", "world_size:64"),
        "world size 64; each takes whole micro-batches",
    ),
    "wrong data": (in_log(r"^data:\w+", "data:" + "ab" * 32), "data manifest is 'abab"),
    "wrong validation tokens": (
        in_log(r"^(validity.*val_sha256:)\w+", r"\g<1>" + "cd" * 32),
        "validity: val_sha256 is 'cdcd",
    ),
    "fewer validation tokens": (
        in_log(r"^(validity.*val_tokens:)\d+", r"\g<1>1024"),
        "validity: val_tokens is '1024'",
    ),
    "wrong validation hash in the config": (
        in_log(r'("val_sha256": )"\w+"', r'\1""'),
        "val_sha256 is '', the track's is",
    ),
    "wrong target": (
        in_log(r'"target_loss": 0.88', '"target_loss": 1.5'),
        "target_loss is 1.5, the track's is 0.88",
    ),
    "wrong tokenizer": (
        in_log('"tokenizer": "bytes"', '"tokenizer": "gpt2"'),
        "tokenizer is 'gpt2'",
    ),
    "another track": (
        all_logs('track(:|": ")mini', r"track\1fineweb"),
        "its track is 'fineweb', must be 'mini'",
    ),
    "not causal": (
        in_log("causal:ok", "causal:FAILED"),
        "validity: causal is 'FAILED', must be 'ok'",
    ),
    "a gate that failed and passed": (
        in_log("causal:ok", "causal:FAILED causal:ok"),
        "a name stands twice",
    ),
    "gate left out": (in_log(" normalised:ok", ""), "validity: normalised is 'not there'"),
    "target not reached": (with_losses(0.0095), "target 0.88 not reached: mean loss"),
    "two machines": (in_log("Slow CPU", "Fast CPU"), "device differs between runs"),
    "two dtypes": (in_log('"dtype": "bfloat16"', '"dtype": "float32"'), "dtype differs between"),
    "renamed log": (rename(LOG, "logs/best.txt"), f"is the log of another run, {RUN}-02a.txt"),
    "no README": (lambda folder: (folder / "README.md").unlink(), "'README.md' is missing"),
    "a file too many": (
        lambda folder: (folder / "setup.py").write_text("1"),
        "'setup.py' is missing, or is no part of a record",
    ),
    "a placeholder": (
        replace_in("README.md", re.escape(made.WHY), made.render.WHY),
        "does not say why it works",
    ),
    "no reason": (replace_in("README.md", re.escape(made.WHY), "Magic."), "does not say why"),
    "HTML under Why": (
        replace_in("README.md", r"^(## Why\n\n)", r"\1<details hidden>"),
        "'<d' under `## Why`; prose",
    ),
    "half a character in a key": (
        in_log(r"^config:\{", f'config:{{"{HALF}": 1, '),
        r"\\ud800 is 1 in the config line, in the script it is 'not there'",
    ),
    "line break in the run id": (
        in_log(r'"run_id": "', '"run_id": "x\\\\nverify: ok, 9 records\\\\n'),
        r"run_id is 'x\\nverify: ok, 9 records",
    ),
    "escape in a key": (
        in_log(r"^config:\{", 'config:{"\\\\u001b[2J": 1, '),
        r"\\x1b\[2J is 1 in the config line",
    ),
}
# The same of Faster.
TAMPERED_PAIRS = {
    "a pair's chosen seed": (chosen_seeds, "-03a has seed 7"),
    "pairs in another order": (other_order, "which comes before it"),
    "no parent": (result("parent", None), "parent None is no name of a record"),
    "unknown parent": (
        result("parent", "2020-01-01_Nobody"),
        "2020-01-01_Nobody: No such file",
    ),
    "its own parent": (
        lambda folder: result("parent", folder.name)(folder),
        "baseline/.* ran other code",
    ),
    "parent is a path": (result("parent", "../../mini"), "no name of a record"),
    "baseline of other code": (
        all_logs(r"code_sha256:\w+", f"code_sha256:{'ab' * 32}", "baseline"),
        r"baseline/\S+-01b.txt: ran other code \(abababab\)",
    ),
    "dropped pair": (
        lambda folder: (folder / f"baseline/{PAIR}-03b.txt").unlink(),
        r"8 runs were declared, baseline has \[1, 2, 4",
    ),
    "dropped pair of both": (
        lambda folder: [next(folder.glob(f"*/{PAIR}-03{side}.txt")).unlink() for side in "ab"],
        r"8 runs were declared, logs has \[1, 2, 4",
    ),
    "the parent's target": (
        all_logs('"target_loss": 0.88', '"target_loss": 1.5', "baseline"),
        r"baseline/\S+: target_loss is 1.5, the track's is 0.88",
    ),
    "restarted baseline": (restarted("baseline"), "8 runs of baseline were started again"),
    "pairs by rank": (paired_by_rank, "-0.b has seed"),
    "not faster": (with_times(0.5), "not shown to be faster than"),
    "the parent misses the target": (with_losses(0.1, "baseline"), "parent's runs miss the target"),
    "speed claimed without runs": (
        lambda folder: shutil.rmtree(folder / "baseline"),
        "result.json: speed is",
    ),
}


@pytest.mark.parametrize("name", [*TAMPERED, *TAMPERED_PAIRS])
def test_tampered_record_is_caught(repository, name):
    which = FIRST if name in TAMPERED else FASTER
    tamper, reason = {**TAMPERED, **TAMPERED_PAIRS}[name]
    tamper(folder_of(repository, which))
    assert re.search(reason, refusal(repository)), refusal(repository)


def test_the_first_failure_is_one_line(repository):
    folder = folder_of(repository, FASTER)
    for path in sorted((folder / "logs").iterdir())[:2]:
        edit(path, "causal:ok", "causal:FAILED")
    path = f"records/mini/{folder.name}/logs/{PAIR}-01a.txt"
    assert refusal(repository) == f"{path}: validity: causal is 'FAILED', must be 'ok'"


# ----- submit


def submit(repository, *words):
    return main(["submit", "--by", "Me", *words], made.fresh(repository))


def write_third(repository):
    """The logs of a third script that is faster than the second, which is the working one now."""
    source = made.source_of("third")
    (repository.root / "train_gpt.py").write_text(source)
    logs, _ = made.write_logs(
        repository.root / "logs",
        source,
        made.source_of("second"),
        8,
        7,
        time_ms=40_000,
        base_ms=50_000,
        began=made.YESTERDAY + made.timedelta(hours=6),
    )
    return logs


@pytest.mark.parametrize("name", ["../../escape", "a/b", "", "-x", "a" * 61, "x\n", "naïve", "<b>"])
def test_submit_refuses_names_that_are_no_folder(repository, capsys, name):
    before = sorted(repository.root.rglob("*"))
    assert submit(repository, f"--name={name}") == 2
    assert "up to 60 letters, digits and '-'" in capsys.readouterr().err
    assert sorted(repository.root.rglob("*")) == before


def test_submit_refuses_what_verify_refuses(repository, capsys):
    """Code that is a record already, runs that are lacking, code that has not run; nothing is left
    behind."""

    def refused(*words):
        assert submit(repository, *words) == 2
        return capsys.readouterr().err

    before = sorted(repository.root.rglob("*"))
    assert "train_gpt.py is the code of " in refused("--name", "Again")
    assert "--track 'nono': is none of mini" in refused("--name", "Again", "--track", "nono")
    assert sorted(repository.root.rglob("*")) == before
    source = made.source_of("third")
    (repository.root / "train_gpt.py").write_text(source)
    assert f"there are no runs {repository.root}/logs/mini-" in refused("--name", "Chosen")
    logs = write_third(repository)
    kept = logs[3].read_text()
    shutil.rmtree(logs[3].parent)
    assert "8 runs were declared, logs has [1, 2, 3, 5" in refused("--name", "Chosen")
    logs[3].parent.mkdir()
    logs[3].write_text(kept[:-100])
    assert f"logs/{logs[3].parent.name}/log.txt: the last line is cut" in refused(
        "--name", "Chosen"
    )
    logs[3].write_text(kept.replace(" val_loss:", " val_los:"))
    assert f"{logs[3].parent.name}.txt: 'final val_los:" in refused("--name", "Chosen")
    logs[3].write_text(kept)
    assert "by is '<b>'; names of 100 letters" in refused("--name", "Chosen", "--by", "<b>")
    assert not list(repository.root.glob("records/mini/*Chosen*"))


def test_submit_leaves_other_runs_of_the_script_alone(repository):
    """Those on another track, and those that were reproduced."""
    for path in write_third(repository):
        folder = path.parent
        for kind in ("nano", "reproduce-20261123-mini"):
            shutil.copytree(folder, folder.with_name(folder.name.replace("mini", kind)))
    assert submit(repository, "--name", "Third") == 0


def test_submit_replaces_no_folder(repository, capsys):
    write_third(repository)
    folder = (repository.home / "mini") / f"{datetime.now(UTC):%Y-%m-%d}_Chosen"
    folder.mkdir()
    (folder / "README.md").write_text("somebody's")
    assert submit(repository, "--name", "Chosen") == 2
    assert "exists; choose another --name" in capsys.readouterr().err
    assert (folder / "README.md").read_text() == "somebody's"


def test_an_interrupted_submit_leaves_nothing(repository, monkeypatch):
    def interrupted(repository):
        raise KeyboardInterrupt

    write_third(repository)
    monkeypatch.setattr("records.experiment.check_records", interrupted)
    assert submit(repository, "--name", "Chosen") == 130
    assert not list(repository.root.glob("records/mini/*Chosen*"))


def test_a_record_s_logs_are_thin(repository):
    """And with the script before them they are what the trainer wrote."""
    for part, word in (("logs", "second"), ("baseline", "first")):
        for path in (folder_of(repository, FASTER) / part).iterdir():
            whole = (repository.root / "logs" / path.stem / "log.txt").read_text()
            assert path.read_text().startswith("===== END OF CODE =====\nrun:mini-")
            assert made.source_of(word) + path.read_text() == whole


def test_whole_logs_are_read_as_well(repository):
    """As records were kept at first."""
    for path in (folder_of(repository, FASTER) / "logs").iterdir():
        path.write_text(made.source_of("second") + path.read_text())
    assert refusal(repository) == ""


# ----- the repository around the records


def test_leaderboard_must_be_current(repository):
    edit((repository.home / "README.md"), r"(?<=/\) \| )\d+\.\d(?= \|)", "1.0", count=1)
    assert refusal(repository).startswith("records/README.md: is not current")
    assert main(["table"], made.fresh(repository)) == 0
    assert refusal(repository) == ""
    edit((repository.home / "README.md"), "<!-- records/mini -->", "")
    hint = "records/README.md: <!-- records/mini -->, and <!-- end --> behind it, are due once"
    assert refusal(repository) == hint


def test_a_run_counts_for_one_record(repository):
    folder = folder_of(repository, FIRST)
    shutil.copytree(folder, folder.with_name(f"{folder.name[:10]}_Zwin"))
    assert re.search("_Zwin: train_gpt.py is the code of .*_First", refusal(repository))


def test_the_staircase_must_be_current(repository):
    path = repository.root / "records/mini.svg"
    path.write_text(path.read_text().replace("Faster", "Fastest"))
    hint = "run `python -m records table`"
    assert refusal(repository) == f"records/mini.svg: is not current; {hint}"
    path.unlink()
    assert "records/mini.svg: No such file" in refusal(repository)


def test_one_chain_of_speed_claims(repository):
    """A second claim against a parent that was already beaten fails, and so does a second root."""
    folder = folder_of(repository, FASTER)
    rival = folder.with_name(f"{folder.name[:10]}_Rival")
    shutil.copytree(folder, rival)
    code = f"_Rival: train_gpt.py is the code of {folder.name}"
    assert code in refusal(repository)
    shutil.rmtree(rival / "baseline")
    result("parent", None)(rival)
    assert code in refusal(repository)


def test_git_keeps_the_logs_of_records():
    """`logs/` of the repository's root is ignored, a record's is not."""
    for path, ignored in (
        ("logs/run/log.txt", True),
        ("records/mini/2026-01-01_Name/logs/run.txt", False),
    ):
        done = subprocess.run(
            ["git", "check-ignore", "-q", path], cwd=Path(train_gpt.__file__).parent
        )
        assert done.returncode in (int(not ignored), 128), path  # 128: no git checkout


def test_folders_that_nothing_judges_are_told(repository):
    """Beside the tracks', where they look like a track's, and hidden among records."""
    records = repository.root / "records"
    (records / "notes.txt").write_text("which is no folder\n")
    assert refusal(repository) == ""
    shutil.copytree(records / "mini", records / "Nano")
    reason = "is no track's folder, and so nothing judges it"
    assert refusal(repository) == f"records/Nano: {reason}"
    shutil.rmtree(records / "Nano")
    (records / "mini" / ".hidden").mkdir()
    assert "records/mini/.hidden: 'README.md', 'logs'" in refusal(repository)


def test_a_record_s_day_has_come(repository):
    folder = folder_of(repository, FASTER)
    folder.rename(folder.with_name("2099-01-01_Faster"))
    assert "is dated 2099-01-01, before the end of its runs or after today" in refusal(repository)


def test_name_of_a_record(repository):
    shutil.rmtree(folder_of(repository, FASTER))
    folder = folder_of(repository, FIRST)
    for name in (
        "2026-13-01_First",
        "First",
        f"{folder.name[:10]}_First one",
        f"{folder.name[:10]}_Fir\nst",
    ):
        folder = folder.rename(folder.with_name(name))
        found = refusal(repository)
        assert re.search(
            "is not named <YYYY-MM-DD>_<Letters-and-digits>|is dated 2026-13-01", found
        ), found


def test_rules_are_those_of_the_trainer():
    rules = made.Repository.at().rules
    takes = {name: rule for name, rule in rules.items() if not rule.get("closed")}
    assert takes.keys() <= train_gpt.TRACKS.keys() and files.RULES["default_track"] in takes
    for name, rule in takes.items():
        config = config_of(Path(train_gpt.__file__).read_text(), name)
        for key, value in rule["config"].items():
            assert config[key] == value
    assert rules["mini"]["manifest_sha256"] == data_text.RECORD_SHA256["manifest.json"]


@pytest.mark.parametrize("orders", [(2,), (2, 3)])
def test_fields_that_the_rules_fix(tmp_path, capsys, orders):
    """A track's rules may fix more fields than those that each track's rules name."""
    repository = made.fixing(made.make_repository(tmp_path), ngram_orders=[2], copy_orders=[])
    fields = {"ngram_orders": orders, "copy_orders": ()}
    config = made.config_of_mini(**fields)
    source = made.source_of(**fields)
    made.write_logs(tmp_path / "logs", source, config=config)
    assert made.tried(repository, "Orders", source) == (0 if orders == (2,) else 2)
    reason = "ngram_orders is [2, 3], the track's is [2]"
    assert (reason in capsys.readouterr().err) == (orders == (2, 3))


# ----- malicious folders


def test_links_are_refused(repository, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret")
    folder = folder_of(repository, FIRST)
    for name in ("README.md", LOG):
        text = (folder / name).read_text()
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
        found = refusal(repository)
        assert (
            f"{folder.name}/{name}: Too many levels of symbolic links" in found
            and "a secret" not in found
        )
        (folder / name).unlink()
        (folder / name).write_text(text)
    shutil.move(folder_of(repository, FASTER), tmp_path / "elsewhere")
    link = folder.with_name("2026-01-01_Link")
    link.symlink_to(tmp_path / "elsewhere")
    assert "2026-01-01_Link: is no folder, or a link" in refusal(repository)
    link.unlink()
    shutil.move(repository.home / "mini", tmp_path / "mini")
    (repository.home / "mini").symlink_to(tmp_path / "mini")
    assert "records/mini: is a symbolic link" in refusal(repository)


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
    "huge": (sparse, "is larger than 4,194,304 bytes"),
    "binary": (hostile(b"\xff\xfe\x00" * 100), "codec can't decode byte"),
    "nul bytes": (hostile(b"\0" * 100), r"line 1 holds the control character '\\x00'"),
    "terminal escapes": (hostile(b"a\n\x1b[2Jb\n"), r"line 2 holds the control character '\\x1b'"),
    "hidden direction": (hostile("x = 1  # \u202e1 = x\n".encode()), r"'\\u202e'"),
    "pipe": (pipe, "no regular file"),
    "folder": (directory, "no regular file|Is a directory"),
    "empty": (hostile(b""), "no line '===== END OF CODE"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_log_is_refused(repository, name):
    attack, reason = HOSTILE[name]
    folder = folder_of(repository, FIRST)
    attack(folder / LOG)
    found = refusal(repository)
    assert found.startswith(f"records/mini/{folder.name}/{LOG}: ") and re.search(reason, found)


@pytest.mark.parametrize(
    "text, reason",
    {
        "[" * 100_000: "nested too deep",
        "[" * 30 + "]" * 30: "is no name of a record",
        '{"schema": 1, "schema": 1}': "stands twice",
        '{"schema": NaN}': "is no name of a record",
        '{"schema": 1e999}': "is no name of a record",
        "[]": "is no name of a record",
        '{"schema": 1}': "is no name of a record",
        '{"schema": 2, "parent": {"a": []}}': "no name of a record",
        "9" * 5000: "Exceeds the limit",
    }.items(),
    ids=range(9),
)
def test_weird_json_is_refused(repository, text, reason):
    folder = folder_of(repository, FIRST)
    (folder / "result.json").write_text(text)
    assert re.search(reason, refusal(repository)), refusal(repository)


@pytest.mark.parametrize(
    "old, new, reason",
    [
        (r"^run:\S+", "run:../../../etc/passwd", "where the run line is due"),
        (r"^run:\S+", "run:.hidden", "where the run line is due"),
        (r"counter:2/4", "counter:2/9999999999999999999", "where the batch line is due"),
        (r'"steps": 60', '"steps": 99999999999', "steps is 99999999999"),
        (r"^(step:40/60 train_loss:)\S+", r"\1nan", "where the step line is due"),
        (
            r"^(step:40/60 train_loss:\S+ .*train_time:)\d+",
            r"\g<1>" + "9" * 30,
            "where the step line is due",
        ),
        (r"^config:\{", 'config:{"a": ' + "[" * 500 + "]" * 500 + ", ", "nested too deep"),
        (r"^config:.*", "config:[]", "where the config line is due"),
    ],
)
def test_hostile_field_is_refused(repository, old, new, reason):
    folder = folder_of(repository, FIRST)
    edit(folder / LOG, old, new)
    assert re.search(reason, refusal(repository)), refusal(repository)
