"""The records tool on logs of the trainer itself: what it writes is what `records` reads. A copy of
the trainer gets a tiny track, so that its runs need no overrides and are candidates for a
record."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

import helpers
import records_helpers as made
import train_gpt
from records import render
from records.__main__ import main
from records.log import parse_log
from records.record import TrackRules
from records_helpers import call

DECLARED = 2
# The first record's script waits for a while: more than the load of a machine should hide.
SLOW = ("batch = loader.next_batch()", "batch = time.sleep(3) or loader.next_batch()")


def script_with_track(corpus, **changes):
    """The trainer's source with a track "tiny" on the tests' corpus, of an open dtype."""
    own = {"data": str(corpus), "val_every": 2, "target_loss": 30.0, "seed": -1, "dtype": "auto"}
    config = replace(helpers.tiny_config(**own, **changes), track="tiny")
    code = helpers.TRAINER.read_text()
    code = code.replace("TRACKS = {\n", f'TRACKS = {{\n    "tiny": {config!r},\n', 1)
    assert "tiny" in code
    return code


@pytest.fixture(scope="module")
def made_once(corpus, tmp_path_factory):
    """A repository with the tiny track alone, and the runs of `python -m records run` on it. Not to
    be changed."""
    root = tmp_path_factory.mktemp("real")
    val = train_gpt.open_corpus(helpers.tiny_config(data=str(corpus))).val
    val_sha256 = train_gpt.validation_hash(val)
    manifest = hashlib.sha256((corpus / "manifest.json").read_bytes()).hexdigest()
    rules = TrackRules("tiny", "bytes", helpers.TINY["val_tokens"], val_sha256, 30.0, manifest)
    repository = made.Repository(root, {"tiny": rules})
    (root / "records").mkdir()
    repository.readme.write_text(made.README.replace("records/nano", "records/tiny"))
    code = script_with_track(corpus, val_sha256=val_sha256)
    assert SLOW[0] in code
    (root / "train_gpt.py").write_text(code.replace(*SLOW))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in helpers.environment().items():
            patch.setenv(name, value)
        status = main(["run", "--track", "tiny", "--runs", str(DECLARED)], repository)
    consoles = [path.read_text() for path in root.glob("logs/run-*/console.txt")]
    assert status == 0, consoles
    return repository


@pytest.fixture
def repository(made_once, tmp_path):
    """A copy of it for each test."""
    return made.Repository(
        shutil.copytree(made_once.root, tmp_path / "repository"), made_once.rules
    )


def runs_of(repository):
    """The folders of the two runs."""
    return sorted((repository.root / "logs").glob(f"run-tiny-*-n{DECLARED}-*"))


def test_log_is_read_as_the_trainer_meant_it(repository):
    runs = [parse_log(folder / "log.txt") for folder in runs_of(repository)]
    assert [
        (run.batch.number, run.batch.counter, run.batch.declared, run.batch.start) for run in runs
    ] == [(1, 1, DECLARED, 1), (1, 2, DECLARED, 1)]
    result = helpers.Run(0, "", "", runs_of(repository)[0]).result
    assert [run.seed for run in runs] == [run.batch.seed(run.code_sha256) for run in runs]
    assert all(run.shards == "ok" for run in runs) and runs[1].started > runs[0].started
    run = runs[0]
    assert run.dtype in ("bfloat16", "float32") and not run.overrides
    assert run.source == (repository.root / "train_gpt.py").read_text()
    assert (run.seed, run.tokens, run.device) == tuple(
        result[key] for key in ("seed", "tokens", "device")
    )
    assert run.val_loss == round(result["val_loss"], 5) and run.train_time_ms == round(
        result["train_time_ms"]
    )
    assert run.cpu_time_ms == round(result["cpu_time_ms"]) > 0
    assert [point.step for point in run.curves["train"]] == [1, 2, 3, 4]
    assert [point.step for point in run.curves["val"]] == [2, 4]


def test_submit_verify_table_diff(repository, capsys):
    logs = runs_of(repository)
    assert call(repository, capsys, "submit", *logs[:1], "--name", "Half")[1].startswith(
        "logs: 2 runs were declared"
    )
    status, out, err = call(repository, capsys, "submit", *logs, "--name", "Tiny-start")
    assert status == 0, out + err
    folder = next((repository.root / "records" / "tiny").glob("*_Tiny-start"))
    assert f"- Record: `records/tiny/{folder.name}/`" in out
    assert {path.name for path in folder.iterdir()} == {
        "train_gpt.py",
        "logs",
        "result.json",
        "README.md",
    }
    assert (folder / "train_gpt.py").read_bytes() == (repository.root / "train_gpt.py").read_bytes()
    assert (
        "README.md: does not say why it works; write that under `## Why`"
        in call(repository, capsys, "verify")[1]
    )
    made.edit(folder / "README.md", render.WHY, made.WHY)
    assert call(repository, capsys, "verify")[1].startswith(
        "records/README.md: a leaderboard is not current; run `python -m "
    )
    status, out, _ = call(repository, capsys, "table")
    assert status == 0 and f"[Tiny-start](tiny/{folder.name}/)" in out
    assert out in repository.readme.read_text()
    assert call(repository, capsys, "verify") == (0, "verify: ok, 1 record\n", "")
    _, out, _ = call(repository, capsys, "diff", *sorted((folder / "logs").iterdir()))
    assert out.endswith("a seed-only difference\n")
    status, _, err = call(repository, capsys, "submit", *logs, "--name", "Tiny-start")
    assert status == 2 and "exists; choose another --name" in err


def test_overrides_and_other_data_are_no_record(repository, corpus, tmp_path, capsys):
    """A run of the same script with an override, made without `run` or `ab`."""
    log = tmp_path / "logs" / "other" / "log.txt"
    run = helpers.run_trainer(
        tmp_path,
        {"run_id": "other", "matrix_lr": 0.01, "track": "tiny"},
        script=repository.root / "train_gpt.py",
    )
    assert run.code == 0, run.stdout
    assert parse_log(log).overrides == {"matrix_lr": 0.01} and parse_log(log).batch is None
    status, _, err = call(repository, capsys, "submit", log, "--name", "Tuned")
    assert status == 2 and "no declared number of runs; use `python -m records run`" in err


# ----- code of a record runs


@pytest.mark.slow
def test_reproduce_runs_real_code(repository, capsys):
    log = runs_of(repository)[0]
    status, out, err = call(repository, capsys, "reproduce", log, "--runs", 2)
    assert (
        status == 2
        and "nothing was run; add --yes" in err
        and "This executes 2 runs of the code in" in out
    )
    status, out, err = call(repository, capsys, "reproduce", log, "--runs", 2, "--yes")
    assert status == 0, out + err
    assert re.search(r"^loss reproduced: (yes|no|undecided), n = 2: ", out, re.MULTILINE), out
    made_runs = sorted(path for path in (repository.root / "logs").glob("reproduce-tiny-*-n2-0?r"))
    assert len(made_runs) == 2 and not list(made_runs[0].glob("*.pt*"))
    assert parse_log(made_runs[0] / "log.txt").seed != parse_log(made_runs[1] / "log.txt").seed
    _, out, _ = call(repository, capsys, "reproduce", log, "--runs", 2, "--yes")
    assert out.count("(was there)") == 2


# ----- the README's lines


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_the_readme_says_makes_a_record_of_a_clean_clone(made_once, corpus, tmp_path):
    """Its five lines, as they stand there, but for the track, the number of runs, and who answers
    and writes: a clone with the tiny track, whose record is made of `run`, and an idea that makes
    steps faster."""
    clone, runs = tmp_path / "clone", 3
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=helpers.ROOT, capture_output=True, text=True
    )
    if files.returncode:
        pytest.skip("no git checkout to clone")
    for name in filter(None, files.stdout.split("\0")):
        if (helpers.ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(helpers.ROOT / name, clone / name)
    rules = made_once.rules["tiny"]
    (clone / "records/rules.json").write_text(
        json.dumps(
            {
                "alpha": 0.9,
                "tracks": {
                    "tiny": {key: value for key, value in asdict(rules).items() if key != "name"}
                },
            }
        )
    )
    text = (clone / "records/README.md").read_text()
    (clone / "records/README.md").write_text(
        text.replace("<!-- records/nano -->", "<!-- records/tiny -->")
    )
    shutil.rmtree(clone / "records/nano", ignore_errors=True)
    shutil.copy(made_once.root / "train_gpt.py", clone)
    why = f"s/^{render.WHY[:20]}.*/It waits less, so that it ends sooner./"
    (tmp_path / "editor").write_text(f"#!/bin/sh\nsed -i '{why}' $1\n")
    (tmp_path / "editor").chmod(0o755)
    environment = {
        **helpers.environment(),
        "EDITOR": str(tmp_path / "editor"),
        "PATH": os.environ["PATH"],
        **{
            f"GIT_{who}_{what}": "tiny"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        },
    }

    def shell(*lines):
        done = subprocess.run(
            ["bash", "-ec", "\n".join(lines).replace("python ", f"{sys.executable} ")],
            cwd=clone,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    shutil.copytree(made_once.root / "logs", clone / "logs")
    shell(
        "git init -q .",
        f"python -m records submit --name Slow logs/run-tiny-*-n{DECLARED}-*",
        "$EDITOR records/tiny/*_Slow/README.md",
        "python -m records table",
        "git add -A",
        "git commit -qm start",
    )
    script = clone / "train_gpt.py"
    script.write_text(script.read_text().replace(*SLOW[::-1]))
    slow = next((clone / "records/tiny").glob("*_Slow")).name
    chapter = (
        (helpers.ROOT / "README.md").read_text().partition("## Compare, and submit a record")[2]
    )
    lines = re.search(r"```\n(.*?)```", chapter, re.DOTALL)[1].splitlines()
    assert 5 <= len(lines) <= 6
    said = shell(
        *(
            line.replace("nano", "tiny")
            .replace("PARENT", slow)
            .replace("--runs 8", f"--runs {runs} --yes")
            .replace("-n8-", f"-n{runs}-")
            .replace(" ab --runs", " ab --track tiny --runs")
            for line in lines
        )
    )
    assert (
        "verify: ok, 2 records" in said and f"- Record: `records/tiny/{slow[:10]}_My-idea/`" in said
    )
    assert shell("git status -s", "git log --format=%s").split("\n")[0] in (
        "Record: My-idea",
        " M train_gpt.py",
    )


def test_command_line():
    """`python -m records` as users call it, from the repository's root."""
    done = subprocess.run(
        [sys.executable, "-m", "records", "verify", "nowhere"],
        cwd=helpers.ROOT,
        capture_output=True,
        text=True,
        env=helpers.environment(),
    )
    assert done.returncode == 2
    assert re.fullmatch(
        r"records: .*nowhere: lies in no track's folder; those are nano, mini, fineweb.*\n",
        done.stderr,
    )


def test_the_repositorys_own_records_pass():
    done = subprocess.run(
        [sys.executable, "-m", "records", "verify"],
        cwd=helpers.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("verify: ok, ")
