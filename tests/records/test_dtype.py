"""The type of a run's numbers, where a script leaves it to the machine: one for all runs of a
comparison, named beside the hardware, and no idea by itself."""

import json
import re

import pytest

import records_helpers as made
from records_helpers import call, edit

OPEN = {"dtype": "auto"}
FIXED = {"dtype": "bfloat16"}


def runs_in(repository, name):
    return [
        made.run_at(path) for path in sorted((repository.root / "logs").glob(f"{name}/log.txt"))
    ]


def with_first(root, **dtype):
    """A repository with a first record, whose script has this dtype."""
    repository = made.make_repository(root)
    source = made.fake_trainer(loss=0.85, time=150, **dtype)
    (root / "train_gpt.py").write_text(source)
    assert made.main(["run", "--runs", "2"], made.fresh(repository)) == 0
    made.submitted(repository, "First", source)
    return repository


def test_runs_of_a_comparison_share_the_dtype_of_the_machine(tmp_path, capsys):
    repository = with_first(tmp_path, **OPEN)
    first = next(tmp_path.glob("records/mini/*_First"))
    assert ", world size 1, float32; torch" in (first / "README.md").read_text()
    (tmp_path / "train_gpt.py").write_text(made.fake_trainer(**OPEN))
    status, out, err = call(repository, capsys, "ab", "--runs", 6)
    assert status == 0, out + err
    assert "\ntrain_gpt.py, on fake, world size 1, float32: 0." in out
    assert {
        run.dtype for run in runs_in(repository, f"{made.name_of(made.fake_trainer(**OPEN))}-*")
    } == {"float32"}
    status, out, err = call(repository, capsys, "submit", "--name", "Second", "--by", "Me")
    assert status == 0 and " s, on fake, world size 1, float32; torch" in out, out + err


@pytest.mark.parametrize("named", [{"a": FIXED, "b": OPEN}, {"a": OPEN, "b": FIXED}])
def test_a_script_that_names_a_dtype_decides(tmp_path, capsys, named):
    """The other one is told it, on whichever side it is."""
    repository = with_first(tmp_path, **named["b"])
    (tmp_path / "train_gpt.py").write_text(made.fake_trainer(**named["a"]))
    status, out, err = call(repository, capsys, "ab", "--runs", 2)
    assert status == 0 and "bfloat16" in out, out + err
    assert {
        run.dtype
        for run in runs_in(repository, f"{made.name_of(made.fake_trainer(**named['a']))}-*")
    } == {"bfloat16"}


def test_two_dtypes_do_not_compare(tmp_path, capsys):
    repository = with_first(tmp_path, dtype="float32")
    (tmp_path / "train_gpt.py").write_text(made.fake_trainer(**FIXED))
    status, _, err = call(repository, capsys, "ab", "--runs", 2)
    assert status == 2 and "another dtype alone is no idea" in err


def test_an_experiment_keeps_the_dtype_that_its_first_run_took(tmp_path, capsys):
    """Though the machine seems to be faster in the other one, when a call goes on."""
    repository = made.make_repository(tmp_path)
    (tmp_path / "train_gpt.py").write_text(made.fake_trainer(**OPEN))
    (tmp_path / "stop").write_text("02a failed")
    for status, found in ((2, "float32"), (0, "bfloat16")):
        (tmp_path / "fast.txt").write_text(found)
        assert call(repository, capsys, "run", "--runs", 2)[0] == status
    assert [run.dtype for run in runs_in(repository, "mini-*")] == ["float32", "float32"]


# ----- what verify accepts


def reason_of(root, capsys, source, change=None, **values):
    """What `submit` says of a record of such runs."""
    repository = made.make_repository(root)
    for path in made.write_logs(root / "logs", source, **values):
        if change:
            edit(path, *change)
    capsys.readouterr()
    assert made.tried(repository, "Record", source) in (0, 2)
    return capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_both_types_may_be_a_record(tmp_path, capsys, dtype):
    assert reason_of(tmp_path, capsys, made.source_of(), dtype=dtype) == ""
    readme = next(tmp_path.glob("records/mini/*_Record/README.md")).read_text()
    assert f", world size 1, {dtype}; torch" in readme


@pytest.mark.parametrize("dtype", ["auto", "float16", ["float32"], None])
def test_no_other_type_may_be_a_record(tmp_path, capsys, dtype):
    """Nor `auto` itself, as the source says: a log has what became of it."""
    change = ('"dtype": "bfloat16"', f'"dtype": {json.dumps(dtype)}')
    reason = reason_of(tmp_path, capsys, made.source_of(), change)
    shown = ascii(str(dtype))
    assert f": dtype is {shown} in the config line, where a log has what it became\n" in reason


def test_a_type_that_the_source_does_not_name_is_told(tmp_path, capsys):
    reason = reason_of(tmp_path, capsys, made.source_of(**FIXED), dtype="float32")
    assert ": dtype is 'float32' in the config line, in the script it is 'bfloat16'\n" in reason


def test_another_dtype_alone_is_no_idea(tmp_path, capsys):
    """It is the same code, whatever the machine makes of its dtype."""
    repository = made.make_repository(tmp_path)
    made.add_first(repository)
    for path in (tmp_path / "logs").glob("mini-*"):
        path.rename(tmp_path / f"old-{path.name}")
    made.write_logs(tmp_path / "logs", made.source_of("first"), rng=7, dtype="float32")
    assert made.tried(repository, "Again", made.source_of("first")) == 2
    assert re.search("train_gpt.py is the code of .*_First; change it", capsys.readouterr().err)
