"""The records tool on logs of the trainer itself: what it writes is what `records` reads. A copy of the trainer gets a
tiny track, so that its runs need no overrides and are candidates for a record."""
import hashlib
import re
import shutil
import subprocess
import sys

import pytest

import helpers
import records_helpers as made
import train_gpt
from records.__main__ import main
from records.log import parse_log
from records.record import TrackRules
from records_helpers import call

DECLARED = 2
# Of the first record's script, which waits for a while: more than the load of a machine should hide.
SLOW = ("batch = loader.next()", "batch = loader.next(); time.sleep(3)")


def script_with_track(corpus, **changes):
    """The trainer's source with a track "tiny" on the tests' corpus."""
    values = {**helpers.TINY, "track": "tiny", "data": str(corpus), "val_every": 2, "target_loss": 8.0, "seed": -1,
              "val_sha256": "", **changes}
    words = ", ".join(f"{key}={value!r}" for key, value in values.items())
    code = helpers.TRAINER.read_text().replace("TRACKS = {\n", f'TRACKS = {{\n    "tiny": Config({words}),\n', 1)
    assert "tiny" in code
    return code


@pytest.fixture(scope="module")
def made_once(corpus, tmp_path_factory):
    """A repository with the tiny track alone, and the runs of `python -m records run` on it. Not to be changed."""
    root = tmp_path_factory.mktemp("real")
    *_, val = train_gpt.open_corpus(helpers.tiny_config(data=str(corpus)))
    val_sha256 = train_gpt.validation_hash(helpers.tiny_config(), val)
    manifest = hashlib.sha256((corpus / "manifest.json").read_bytes()).hexdigest()
    rules = TrackRules("tiny", "bytes", helpers.TINY["val_tokens"], val_sha256, 8.0, manifest)
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
    return made.Repository(shutil.copytree(made_once.root, tmp_path / "repository"), made_once.rules)


def runs_of(repository):
    """The folders of the two runs."""
    return sorted((repository.root / "logs").glob(f"run-tiny-*-n{DECLARED}-*"))


def test_log_is_read_as_the_trainer_meant_it(repository):
    runs = [parse_log(folder / "log.txt") for folder in runs_of(repository)]
    assert [(run.batch.number, run.batch.counter, run.batch.declared, run.batch.start) for run in runs] == [
        (1, 1, DECLARED, 1), (1, 2, DECLARED, 1)]
    result = helpers.Run(0, "", "", runs_of(repository)[0]).result
    assert [run.seed for run in runs] == [run.batch.seed(run.code_sha256) for run in runs]
    assert all(run.shards == "ok" for run in runs) and runs[1].started > runs[0].started
    run = runs[0]
    assert run.source == (repository.root / "train_gpt.py").read_text()
    assert (run.seed, run.tokens, run.device) == tuple(
        result[key] for key in ("seed", "tokens", "device"))
    assert run.val_loss == round(result["val_loss"], 5) and run.train_time_ms == round(result["train_time_ms"])
    assert run.cpu_time_ms == round(result["cpu_time_ms"]) > 0
    assert [point.step for point in run.curves["train"]] == [1, 2, 3, 4]
    assert [point.step for point in run.curves["val"]] == [2, 4]


def test_submit_verify_table_diff(repository, capsys):
    logs = runs_of(repository)
    assert call(repository, capsys, "submit", *logs[:1], "--name", "Half")[1].startswith("logs: 2 runs were declared")
    status, out, err = call(repository, capsys, "submit", *logs, "--name", "Tiny-start")
    assert status == 0, out + err
    folder = next((repository.root / "records" / "tiny").glob("*_Tiny-start"))
    assert f"- Record: `records/tiny/{folder.name}/`" in out
    assert {path.name for path in folder.iterdir()} == {"train_gpt.py", "logs", "result.json", "README.md"}
    assert (folder / "train_gpt.py").read_bytes() == (repository.root / "train_gpt.py").read_bytes()
    assert call(repository, capsys, "verify")[1].startswith(
        "records/README.md: a leaderboard is not current; run `python -m ")
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
    run = helpers.run_trainer(tmp_path, {"run_id": "other", "matrix_lr": 0.01, "track": "tiny"},
                              script=repository.root / "train_gpt.py")
    assert run.code == 0, run.stdout
    assert parse_log(log).overrides == {"matrix_lr": 0.01} and parse_log(log).batch is None
    status, _, err = call(repository, capsys, "submit", log, "--name", "Tuned")
    assert status == 2 and "no declared number of runs; use `python -m records run`" in err


# ----- code of a record runs

def test_reproduce_runs_real_code(repository, capsys):
    log = runs_of(repository)[0]
    status, out, err = call(repository, capsys, "reproduce", log, "--runs", 2)
    assert status == 2 and "nothing was run; add --yes" in err and "This executes 2 runs of the code in" in out
    status, out, err = call(repository, capsys, "reproduce", log, "--runs", 2, "--yes")
    assert status == 0, out + err
    assert re.search(r"^loss reproduced: (yes|no|undecided), n = 2: ", out, re.MULTILINE), out
    made_runs = sorted(path for path in (repository.root / "logs").glob("reproduce-tiny-*-n2-0?r"))
    assert len(made_runs) == 2 and not list(made_runs[0].glob("*.pt*"))
    assert parse_log(made_runs[0] / "log.txt").seed != parse_log(made_runs[1] / "log.txt").seed
    _, out, _ = call(repository, capsys, "reproduce", log, "--runs", 2, "--yes")
    assert out.count("(was there)") == 2


def test_from_ab_to_a_record(repository, capsys, monkeypatch):
    """A faster script against the first record in real runs, and the claim submitted as `ab` says."""
    monkeypatch.setitem(train_gpt.TRACKS, "tiny", helpers.tiny_config())  # of which `diff` would show the differences
    logs = repository.root / "logs"
    assert call(repository, capsys, "submit", *runs_of(repository), "--name", "Slow")[0] == 0
    script = repository.root / "train_gpt.py"
    script.write_text(script.read_text().replace(*SLOW[::-1]))
    slow = next((repository.root / "records" / "tiny").glob("*_Slow"))
    status, out, err = call(repository, capsys, "ab", slow, "--runs", 3, "--yes")
    assert status == 0, out + err
    assert re.search(r"^time A - B: -\d\.\d\d s .*: A is lower$", out, re.MULTILINE), out
    sides = [sorted(logs.glob(f"ab-*-n3-*{letter}")) for letter in "ab"]
    assert f"submit --name NAME logs/{sides[0][0].name[:-3]}*a --baseline" in out
    status, out, err = call(repository, capsys, "submit", *sides[0], "--name", "Fast", "--baseline", *sides[1])
    assert status == 0, out + err
    assert "3 interleaved pairs" in out
    assert call(repository, capsys, "table")[0] == 0
    assert call(repository, capsys, "verify") == (0, "verify: ok, 2 records\n", "")


def test_command_line():
    """`python -m records` as users call it, from the repository's root."""
    done = subprocess.run([sys.executable, "-m", "records", "verify", "nowhere"], cwd=helpers.ROOT, capture_output=True,
                          text=True, env=helpers.environment())
    assert done.returncode == 2
    assert re.fullmatch(r"records: .*nowhere: lies in no track's folder; those are nano, fineweb.*\n", done.stderr)


def test_the_repositorys_own_records_pass():
    done = subprocess.run([sys.executable, "-m", "records", "verify"], cwd=helpers.ROOT, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("verify: ok, ")
