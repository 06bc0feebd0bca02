"""Forgeries that logs can show, each done as carefully as the tool's own functions allow: log,
result.json, README and leaderboard say the same. Every one is caught with one line; none ends in a
traceback or reaches the terminal."""

import json
import re
import shutil
from datetime import timedelta

import pytest

import records_helpers as made
from records import render
from records.__main__ import main
from records.files import CONTROL
from records.log import Batch, parse_log
from records.record import Repository, figures, load
from records.submit import submit
from records_helpers import edit

FIRST, FASTER = "First", "Faster"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Two records, the second of which claims speed against the first. Not to be changed."""
    repository = made.make_repository(tmp_path_factory.mktemp("pristine"))
    made.add_first(repository)
    made.add_faster(repository)
    assert main(["table"], made.fresh(repository)) == 0
    return repository


@pytest.fixture
def repository(pristine, tmp_path):
    """A copy to tamper with."""
    shutil.copytree(pristine.root, tmp_path / "repository")
    return Repository(tmp_path / "repository", pristine.rules)


def folder_of(repository, name):
    return next((repository.root / "records" / "nano").glob(f"*_{name}"))


def logs_of(folder, part="logs"):
    return sorted((folder / part).iterdir())


def rewrite(repository, folder):
    """Make result.json, README and leaderboard those that the tool writes for the logs of a
    folder."""
    again = made.fresh(repository)
    record = load(folder, "nano")
    parent = next((other for other in again.records["nano"] if other.name == record.parent), None)
    if not record.failures:
        content = figures(record, again.rules["nano"], parent)
        (folder / "result.json").write_text(json.dumps(content, indent=1) + "\n")
        (folder / "README.md").write_text(render.record_readme(content, made.WHY))
    main(["table"], made.fresh(repository))


def every(old, new, part="logs"):
    """The same edit in every log."""

    def tamper(repository):
        for path in logs_of(folder_of(repository, FIRST), part):
            edit(path, old, new)

    return FIRST, tamper


def second(old, new):
    """An edit in one log."""
    return FIRST, lambda repository: edit(logs_of(folder_of(repository, FIRST))[1], old, new)


def with_losses_of(path, run, noise=0.0):
    """The text of another run's log, with the losses of `run`, up to an alternating noise."""
    text, sign = path.read_text(), 1
    own = parse_log(path) if path.name == "log.txt" else made.stored(path)
    for kind in ("train", "val"):
        for old, new in zip(own.curves[kind], run.curves[kind], strict=True):
            sign = -sign
            text = text.replace(
                f"step:{old.step}/{own.steps} {kind}_loss:{old.loss:.5f}",
                f"step:{old.step}/{own.steps} {kind}_loss:{new.loss + sign * noise:.5f}",
            )
    last = re.findall(r"^step:\S+ val_loss:([0-9.]+)", text, re.MULTILINE)[-1]
    return re.sub(
        r"^((?:final|status:ok run:\S+) val_loss:)[0-9.]+",
        rf"\g<1>{last}",
        text,
        flags=re.MULTILINE,
    )


def same_run_again(noise):
    def tamper(repository):
        first, *others = logs_of(folder_of(repository, FIRST))
        for path in others:
            path.write_text(with_losses_of(path, made.stored(first), noise))

    return FIRST, tamper


def whole_record_with_a_comment(repository):
    """Its seeds, names and starts are right; its losses are another record's, which was first."""
    source = made.source_of("second") + "# another idea\n"
    base = made.source_of("first")
    logs, bases = made.write_logs(
        repository.root / "copy",
        source,
        base,
        4,
        9,
        time_ms=40_000,
        base_ms=60_000,
        began=made.YESTERDAY + timedelta(hours=5),
    )
    for paths, part in ((logs, "logs"), (bases, "baseline")):
        others = logs_of(folder_of(repository, FASTER), part)[: len(paths)]
        for path, own in zip(paths, others, strict=True):
            path.write_text(with_losses_of(path, made.stored(own)))
    put(repository, "Zcopy", logs, bases, folder_of(repository, FIRST).name)


def put(repository, name, logs, bases, parent):
    """A record's folder as `submit` would make it, if it let everything pass."""
    folder = folder_of(repository, FIRST).with_name(
        f"{folder_of(repository, FIRST).name[:10]}_{name}"
    )
    for part, paths in (("logs", logs), ("baseline", bases)):
        if paths:
            (folder / part).mkdir(parents=True)
        for path in paths:
            shutil.copy(path, folder / part / f"{path.parent.name}.txt")
    (folder / "train_gpt.py").write_text(parse_log(logs[0]).source)
    record = load(folder, "nano")
    parents = {other.name: other for other in made.fresh(repository).records["nano"]}
    content = figures(record, repository.rules["nano"], parents.get(parent))
    (folder / "result.json").write_text(json.dumps(content))
    (folder / "README.md").write_text(render.record_readme(content, made.WHY))
    return folder


def own_slow_record_as_parent(repository):
    """An entry beside the chain that takes long, and then a gain against it."""
    slow, fast = made.source_of("slow"), made.source_of("fast")
    logs = made.write_logs(
        repository.root / "mine",
        slow,
        rng=11,
        time_ms=90_000,
        began=made.YESTERDAY + timedelta(hours=5),
    )
    parent = put(repository, "Slow", logs, [], folder_of(repository, FASTER).name)
    logs, base = made.write_logs(
        repository.root / "mine",
        fast,
        slow,
        8,
        12,
        time_ms=80_000,
        base_ms=90_000,
        began=made.YESTERDAY + timedelta(hours=8),
    )
    put(repository, "Zfast", logs, base, parent.name)


def code_of_the_parent(repository):
    """A claim whose code is the parent's own, on a better day."""
    code = made.source_of("second")
    logs, base = made.write_logs(
        repository.root / "mine",
        code,
        code,
        8,
        13,
        time_ms=40_000,
        base_ms=50_000,
        began=made.YESTERDAY + timedelta(hours=5),
        batch=2,
    )
    put(repository, "Zagain", logs, base, folder_of(repository, FASTER).name)


def dated_2099(repository):
    folder = folder_of(repository, FASTER)
    folder.rename(folder.with_name("2099-01-01_Faster"))


def slowest_baselines(repository):
    """Four of many baseline runs: their counters and batches are those of the runs that were
    kept."""
    folder = folder_of(repository, FASTER)
    for number, path in enumerate(logs_of(folder, "baseline"), 1):
        run = made.stored(path)
        seed = Batch(1 + number % 2, 30 + number, 40, 1).seed(made.sha_of(made.source_of("second")))
        path.write_text(path.read_text().replace(str(run.seed), str(seed)))


def all_time_in_the_last_step(repository):
    path = logs_of(folder_of(repository, FIRST))[1]
    run = made.stored(path)

    def timed(found):
        step = int(found[1])
        at = run.train_time_ms if step == run.steps else 0
        return f"step:{step}{found[2]}train_time:{at}ms step_avg:{at / step:.2f}ms"

    path.write_text(re.sub(r"step:(\d+)(.*)train_time:\d+ms step_avg:\S+", timed, path.read_text()))


def no_time(repository):
    for path in logs_of(folder_of(repository, FIRST)):
        text = re.sub(r"train_time:\d+ms", "train_time:0ms", path.read_text())
        text = re.sub(r"train_time:[0-9.]+s", "train_time:0.0s", text)
        path.write_text(re.sub(r"step_avg:[0-9.]+", "step_avg:0.00", text))


def bad_baseline(repository):
    path = logs_of(folder_of(repository, FASTER), "baseline")[2]
    loss = f"{made.stored(path).val_loss:.5f}"
    path.write_text(path.read_text().replace(f"val_loss:{loss}", "val_loss:5.00000"))


def in_readme(old, new):
    """An edit of a README that is not undone."""
    return (
        FIRST,
        lambda repository: edit(folder_of(repository, FIRST) / "README.md", old, new) or "keep",
    )


def hidden_block(repository):
    path = folder_of(repository, FIRST) / "README.md"
    text = path.read_text().replace("<!-- figures -->", "<details hidden>\n<!-- figures -->")
    path.write_text(text)
    return "keep"


def equal_losses(repository):
    """Two runs with one loss just below the target."""
    logs = made.write_logs(
        repository.root / "mine",
        made.source_of("twice"),
        count=2,
        loss=0.87999,
        spread=0.0,
        began=made.YESTERDAY + timedelta(hours=5),
    )
    put(repository, "Zequal", logs, [], folder_of(repository, FASTER).name)


HALF = "\\\\ud800"  # of a character, as JSON writes it
TABLE = {
    "best run several times": (
        *same_run_again(0.0),
        r"has the losses of run-nano-\S+-01 of \S+_First",
    ),
    "curves equal to 1e-5": (
        *same_run_again(1e-5),
        r"has the losses of run-nano-\S+-01 of \S+_First",
    ),
    "a record and a comment": (
        FASTER,
        whole_record_with_a_comment,
        r"_Zcopy/.* has the losses of ab-nano-\S+ of",
    ),
    "matrix_lr": (
        *every('"matrix_lr": 0.025', '"matrix_lr": 0.05'),
        "matrix_lr is 0.05 in the config line, 0.025 in",
    ),
    "micro_batches": (
        *every('"micro_batches": 8', '"micro_batches": 16'),
        "stages is ",
    ),
    "a field more": (
        *every(r"^config:\{", 'config:{"warmup": 3, '),
        "warmup is 3 in the config line, 'not there' in",
    ),
    "a field less": (
        *every(r'"matrix_lr": 0.025, ', ""),
        "matrix_lr is 'not there' in the config line",
    ),
    "overrides removed": (
        *every('"cooldown": 0.45', '"cooldown": 0.7'),
        "cooldown is 0.7 in the config line",
    ),
    "overrides indented": (
        *second("^data:", '  overrides:{"cooldown": 0.7}\ndata:'),
        "lines begin with ",
    ),
    "overrides after the start": (
        *second("^step:20", 'overrides:{"cooldown": 0.7}\nstep:20'),
        "lines begin with 'overrides'",
    ),
    "overrides a list": (*second("^data:", "overrides:[]\ndata:"), r"overrides: \[\] is no object"),
    "overrides a number": (*second("^data:", "overrides:5\ndata:"), "overrides: 5 is no object"),
    "init_from": (
        *every(r"^config:\{", 'config:{"init_from": "best", '),
        "init_from is 'best' in the config line",
    ),
    "resume": (*every('"resume": ""', '"resume": "best"'), "the run was resumed"),
    "started_from": (
        *second("^step:20", "started_from:best step:285\nstep:20"),
        "lines begin with 'started_from'",
    ),
    "tokens": (
        *second(r"tokens:245760", "tokens:2457"),
        "2457 tokens in the final line; the schedule takes 245760",
    ),
    "no time": (FIRST, no_time, "the training time is 0 ms"),
    "all time in the last step": (
        FIRST,
        all_time_in_the_last_step,
        "steps 0 to 20 took 0 ms, but a step 10",
    ),
    "world size 0": (*every("world_size:1", "world_size:0"), "world size 0 does not divide"),
    "world size 64": (*every("world_size:1", "world_size:64"), "world size 64 does not divide"),
    "a gate that failed and passed": (
        *second("causal:ok", "causal:FAILED causal:ok"),
        "line says something twice",
    ),
    "lines in another order": (
        *second(r"^(comms:.*\n)(validity:.*\n)", r"\2\1"),
        "a record's log has, in this order",
    ),
    "baseline loss": (FASTER, bad_baseline, "parent's runs miss the target 0.88"),
    "slowest baselines": (FASTER, slowest_baselines, r"has seed \d+; run \d+ of batch 1"),
    "own slow record as parent": (
        FIRST,
        own_slow_record_as_parent,
        r"_Slow is not of the track's chain of records",
    ),
    "the parent's code": (
        FIRST,
        code_of_the_parent,
        r"_Zagain/train_gpt.py: is the code of \S+_Faster",
    ),
    "a folder of 2099": (FIRST, dated_2099, "is dated 2099-01-01, which is yet to come"),
    "equal losses": (FIRST, equal_losses, "_Zequal/logs: target 0.88 not reached"),
    "figures beside the block": (
        *in_readme("^## Figures", "## Figures\n\n| time |\n|---|\n| 1 s |\n\n## Figures"),
        "only what stands under `## Why` may differ",
    ),
    "a table under Why": (
        *in_readme(r"^(## Why\n\n)", r"\1| time |\n|---|\n| 1 s |\n\n"),
        "under `## Why` stands",
    ),
    "HTML under Why": (
        *in_readme(r"^(## Why\n\n)", r"\1<b>1 s</b> "),
        "under `## Why` stands prose",
    ),
    "a hidden block": (FIRST, hidden_block, "only what stands under `## Why` may differ"),
    "a placeholder": (*in_readme(re.escape(made.WHY), render.WHY), "does not say why it works"),
    "no reason": (*in_readme(re.escape(made.WHY), "Magic."), "does not say why it works"),
    "half a character in the run id": (
        *second(r'"run_id": "', f'"run_id": "{HALF}'),
        "half a character",
    ),
    "half a character in a key": (
        *second(r"^config:\{", f'config:{{"{HALF}": 1, '),
        "half a character",
    ),
    "line break in the run id": (
        *second(r'"run_id": "', '"run_id": "x\\\\nverify: ok, 9 records\\\\n'),
        "control character",
    ),
    "escape in a key": (*second(r"^config:\{", 'config:{"\\\\u001b[2J": 1, '), "control character"),
    "a folder beside the tracks": (
        FIRST,
        lambda repository: (repository.root / "records" / "nano2").mkdir(),
        "nano2: is no track's folder; those are nano, mini, fineweb",
    ),
    "a hidden folder": (
        FIRST,
        lambda repository: (repository.root / "records" / "nano" / ".x").mkdir(),
        "is hidden",
    ),
}


@pytest.mark.parametrize("row", TABLE)
def test_forgeries_that_logs_show_are_caught(repository, capsys, row):
    which, tamper, reason = TABLE[row]
    folder = folder_of(repository, which)
    if tamper(repository) != "keep" and folder.exists():
        rewrite(repository, folder)
    capsys.readouterr()
    assert main(["verify"], made.fresh(repository)) == 1
    out, err = capsys.readouterr()
    assert err == "" and not CONTROL.search(out)
    assert any(re.search(reason, line) for line in out.splitlines()), out
    assert all(re.match(r"records\S*: ", line) for line in out.splitlines()), out


def test_an_unreadable_log_is_told_once(repository, capsys):
    edit(logs_of(folder_of(repository, FIRST))[1], r"^status:.*\n", "")
    assert main(["verify"], made.fresh(repository)) == 1
    out = capsys.readouterr().out
    assert "no status line at the end" in out and "were declared" not in out


def test_a_careful_rewrite_of_nothing_passes(repository):
    """What the forger's functions write is what the tool writes."""
    for name in (FIRST, FASTER):
        rewrite(repository, folder_of(repository, name))
    assert main(["verify"], made.fresh(repository)) == 0


def test_pairs_may_have_equal_losses(repository):
    """An idea that only makes steps faster: both runs of a pair, which share a seed, have the same
    losses."""
    logs, base = made.write_logs(
        repository.root / "mine",
        made.source_of("third"),
        made.source_of("second"),
        8,
        14,
        time_ms=30_000,
        base_ms=50_000,
        began=made.YESTERDAY + timedelta(hours=5),
    )
    for path, other in zip(logs, base, strict=True):
        path.write_text(with_losses_of(path, parse_log(other)))
    record, failures = submit(made.fresh(repository), "Kernel", logs, base)
    assert not failures, failures


def test_rules_of_another_tree_do_not_count(repository, capsys):
    """A branch is judged by the rules and the code of the checkout that the tool is called in."""
    (repository.root / "records" / "rules.json").write_text('{"alpha": 1, "tracks": {}}')
    (repository.root / "train_gpt.py").write_text(
        "open('executed', 'w').write('x')\nraise SystemExit('executed')\n"
    )
    assert main(["verify", "--tree", str(repository.root)]) == 1
    out = capsys.readouterr().out
    assert "target_loss is 0.88, the track's is 0.69315" in out and not list(
        repository.root.rglob("executed")
    )


def test_reading_imports_no_code_of_the_branch():
    """Neither the trainer nor torch: `verify`, `table`, `diff`, `plot` and `report` need nothing of
    them."""
    import subprocess
    import sys

    import helpers

    code = (
        "import sys, records.__main__\n"
        "print([name for name in ('torch', 'train_gpt', 'data') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=helpers.ROOT, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr
