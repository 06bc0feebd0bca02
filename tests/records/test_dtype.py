"""The type of a run's numbers, where a script leaves it to the machine: one for all runs of a
comparison, named beside the hardware, and no override that keeps a run from being a record."""

import json
import re

import pytest
import torch

import records_helpers as made
import train_gpt
from records import render
from records.log import Batch, parse_log
from records.record import config_changes
from records.submit import submit
from records_helpers import call, edit

OPEN = {"dtype": "auto"}
FIXED = {"dtype": "bfloat16"}


@pytest.fixture
def slow_bfloat16(monkeypatch):
    """A machine that is fast in float32."""
    asked = []

    def resolve_dtype(dtype, device):
        asked.append((dtype, device))
        return "float32"

    monkeypatch.setattr(train_gpt, "resolve_dtype", resolve_dtype)
    yield
    assert set(asked) == {("auto", torch.device("cpu"))}


def logs_of(repository, name):
    return [parse_log(path) for path in sorted((repository.root / "logs").glob(f"{name}/log.txt"))]


def submitted(repository, capsys, name, *words):
    """The folder that `submit` makes, with its reasons."""
    status, out, err = call(repository, capsys, "submit", *words, "--name", name)
    assert status == 0, out + err
    folder = next((repository.root / "records" / "nano").glob(f"*_{name}"))
    edit(folder / "README.md", re.escape(render.WHY), made.WHY)
    return folder, out


# ----- what the commands do


def test_runs_of_a_comparison_share_the_dtype_of_the_machine(tmp_path, capsys, slow_bfloat16):
    """A first record of an older script in bfloat16, whose log calls float32 an override, and a
    faster script that leaves the dtype open."""
    repository = made.make_repository(tmp_path)
    old = made.fake_trainer(tracks=made.older_tracks_text, time=150, **FIXED)
    (tmp_path / "train_gpt.py").write_text(old)
    assert call(repository, capsys, "run", "--runs", 2)[0] == 0
    runs = logs_of(repository, "run-*-n2-*")
    assert [run.overrides for run in runs] == 2 * [{"dtype": "float32"}]
    assert [run.batch for run in runs] == [Batch(1, 1, 2, 1), Batch(1, 2, 2, 1)]
    first, _ = submitted(repository, capsys, "First", *(tmp_path / "logs").glob("run-*-n2-*"))
    assert ", world size 1, float32, torch" in (first / "README.md").read_text()

    (tmp_path / "train_gpt.py").write_text(made.fake_trainer(**OPEN))
    status, out, err = call(repository, capsys, "ab", "--runs", 8, "--yes")
    assert status == 0, out + err
    assert "\nboth on fake, world size 1, float32\n" in out and '"dtype": "float32"' in out
    logs = tmp_path / "logs"
    assert {run.dtype for run in logs_of(repository, "ab-*-n8-*")} == {"float32"}
    assert not any(run.overrides for run in logs_of(repository, "ab-*-n8-*a"))
    assert all(run.overrides for run in logs_of(repository, "ab-*-n8-*b"))
    words = [*logs.glob("ab-*-n8-*a"), "--baseline", *logs.glob("ab-*-n8-*b")]
    faster, out = submitted(repository, capsys, "Faster", *words)
    assert re.search(r"^- Training time: \S+ s on fake, world size 1, float32$", out, re.MULTILINE)
    result = json.loads((faster / "result.json").read_text())
    assert result["dtype"] == "float32" and "dtype" not in result["config_changes"]
    assert call(repository, capsys, "table")[0] == 0
    assert "| fake, world size 1, float32 |" in repository.readme.read_text()
    assert call(repository, capsys, "verify") == (0, "verify: ok, 2 records\n", "")


def test_reproduced_runs_have_the_dtype_of_the_machine(tmp_path, capsys, slow_bfloat16):
    """Of a record of an older script, for which that is an override: a defect of no run."""
    repository = made.make_repository(tmp_path)
    old = made.fake_trainer(tracks=made.older_tracks_text, **FIXED)
    (tmp_path / "logs" / "other").mkdir(parents=True)
    (tmp_path / "logs" / "other" / "log.txt").write_text(made.log_text("other", old))
    words = ("reproduce", tmp_path / "logs" / "other", "--runs", 2, "--yes")
    status, out, err = call(repository, capsys, *words)
    assert status == 0, out + err
    assert "loss reproduced: yes" in out or "loss reproduced: undecided" in out, out
    assert [run.overrides for run in logs_of(repository, "reproduce-*r")] == 2 * [
        {"dtype": "float32"}
    ]


def test_an_experiment_keeps_the_dtype_that_it_began_with(tmp_path, capsys, monkeypatch):
    """Though the machine seems to be faster in the other one, when a call goes on."""
    repository = made.make_repository(tmp_path)
    (tmp_path / "train_gpt.py").write_text(made.fake_trainer(**OPEN))
    (tmp_path / "stop").write_text("02 failed")
    for status, found in ((2, "float32"), (0, "bfloat16")):
        monkeypatch.setattr(train_gpt, "resolve_dtype", lambda *_, dtype=found: dtype)
        assert call(repository, capsys, "run", "--runs", 2)[0] == status
    assert [run.dtype for run in logs_of(repository, "run-*-n2-*")] == ["float32", "float32"]


def test_a_script_without_the_field_is_told_no_dtype(tmp_path, capsys, slow_bfloat16):
    repository = made.make_repository(tmp_path)
    script = made.fake_trainer() + 'assert "--dtype" not in argv\n'
    (tmp_path / "train_gpt.py").write_text(script)
    status, out, err = call(repository, capsys, "run", "--runs", 2)
    assert status == 0, out + err
    assert not any(run.dtype for run in logs_of(repository, "run-*-n2-*"))


# ----- what verify accepts


def make_record(root, source=None, **values):
    """(repository, the failures of a record of four runs, each of which `values` describe)."""
    repository = made.make_repository(root)
    logs = made.write_logs(root / "logs", source or made.source_of(), **values)
    return repository, logs


def reasons_of(repository, logs):
    _, failures = submit(made.fresh(repository), "Record", logs)
    return [failure.reason for failure in failures]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_both_types_may_be_a_record(tmp_path, dtype):
    repository, logs = make_record(tmp_path, dtype=dtype)
    record, failures = submit(made.fresh(repository), "Record", logs)
    assert not failures and record.result["dtype"] == dtype
    assert f", world size 1, {dtype}, torch" in record.readme


def test_a_type_that_the_source_names_is_not_repeated(tmp_path):
    source = made.source_of(tracks=made.older_tracks_text, **FIXED)
    repository, logs = make_record(tmp_path, source, config=made.config_of_nano(**FIXED))
    record, failures = submit(made.fresh(repository), "Record", logs)
    assert not failures and record.result["dtype"] is None
    assert ", world size 1, torch" in record.readme


@pytest.mark.parametrize("dtype", ["auto", "float16", ["float32"], None])
def test_no_other_type_may_be_a_record(tmp_path, dtype):
    """Nor `auto` itself, as the source says: a log has what became of it."""
    repository, logs = make_record(tmp_path)
    for path in logs:
        edit(path, '"dtype": "bfloat16"', f'"dtype": {json.dumps(dtype)}')
    assert any("dtype is " in reason for reason in reasons_of(repository, logs))


def test_a_type_that_the_source_does_not_name_is_told(tmp_path):
    """Without an override that says so."""
    repository, logs = make_record(tmp_path, made.source_of(**FIXED), dtype="float32")
    reasons = reasons_of(repository, logs)
    assert len(reasons) == 4
    assert set(reasons) == {"dtype is 'float32' in the config line, 'bfloat16' in the source"}


def with_overrides(logs, overrides, replaced=True):
    """Logs as a script writes them that is told a field: in the place of its place in the batch,
    which then is in its configuration alone."""
    for path in logs:
        batch = parse_log(path).batch
        line = f"overrides:{json.dumps(overrides)}\n"
        if replaced:
            edit(path, r'"run_of": ""', f'"run_of": "{batch}"')
            edit(path, r"^batch:.*\n", line)
        else:
            edit(path, r"^batch:", line + "batch:")


@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize(
    "overrides, reason",
    [
        ({"dtype": "float32"}, None),
        ({"dtype": "bfloat16"}, "overrides: 'dtype'"),  # which is not the one that it ran in
        ({"dtype": "float32", "matrix_lr": 0.1}, "overrides: 'dtype', 'matrix_lr'"),
        ({"matrix_lr": 0.1}, "overrides: 'matrix_lr'"),
    ],
)
def test_no_override_but_the_dtype_may_be_a_record(tmp_path, overrides, reason, replaced):
    repository, logs = make_record(tmp_path, made.source_of(**FIXED), dtype="float32")
    with_overrides(logs, overrides, replaced)
    reasons = reasons_of(repository, logs)
    if reason is None:
        assert reasons == []
    else:
        assert any(found.startswith(reason) for found in reasons), reasons


def test_a_place_in_the_configuration_alone_is_none_without_overrides(tmp_path):
    repository, logs = make_record(tmp_path)
    for path in logs:
        edit(path, r'"run_of": ""', f'"run_of": "{parse_log(path).batch}"')
        edit(path, r"^batch:.*\n", "")
    assert parse_log(logs[0]).batch is None


@pytest.mark.parametrize("side", [0, 1])
def test_all_runs_of_a_comparison_have_one_dtype(tmp_path, side):
    """One run is otherwise, or all of one side are."""
    repository = made.make_repository(tmp_path)
    made.add_first(repository)
    sides = made.write_logs(
        tmp_path / "logs",
        made.source_of("second"),
        made.source_of("first"),
        8,
        5,
        time_ms=50_000,
        base_ms=60_000,
    )
    for paths in ([sides[side][0]], sides[side][1:]):
        for path in paths:
            edit(path, '"dtype": "bfloat16"', '"dtype": "float32"')
        _, failures = submit(made.fresh(repository), "Mixed", *sides)
        assert any(
            "dtype differs between runs: 'bfloat16', 'float32'" in failure.reason
            for failure in failures
        ), failures


def test_a_parent_of_another_machine_is_no_change_of_the_dtype(tmp_path):
    """Its record was made in bfloat16, and it ran again in float32 beside the new one."""
    repository = made.make_repository(tmp_path)
    made.add_first(repository)
    sides = made.write_logs(
        tmp_path / "logs",
        made.source_of("second"),
        made.source_of("first"),
        8,
        5,
        time_ms=50_000,
        base_ms=60_000,
        dtype="float32",
    )
    record, failures = submit(made.fresh(repository), "Other", *sides)
    assert not failures, failures
    assert record.result["dtype"] == "float32" and record.result["config_changes"] == {}


def test_another_dtype_alone_is_no_idea(tmp_path):
    """It is the same code, whatever the machine makes of its dtype."""
    repository = made.make_repository(tmp_path)
    folder = made.add_first(repository)
    logs = made.write_logs(tmp_path / "again", made.source_of("first"), rng=7, dtype="float32")
    _, failures = submit(made.fresh(repository), "Again", logs)
    assert any(f"is the code of {folder.name}" in failure.reason for failure in failures), failures


def test_an_open_dtype_is_no_difference():
    """Of a log and the working script."""
    assert config_changes({"dtype": "float32"}, OPEN) == {}
    assert config_changes(OPEN, FIXED) == {}
    assert config_changes({"dtype": "float32"}, FIXED) == {"dtype": ["float32", "bfloat16"]}
