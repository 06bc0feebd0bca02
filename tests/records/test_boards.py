"""Boards, which are entries of rules.json: a target that is provisional, a number of GPUs, steps in
the place of seconds, and the factor over plain training. And how their records are drawn."""

import contextlib
import re
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest

import records_helpers as made
from records import judge, render, settings
from records.files import RecordError
from records.record import Repository, chain
from records_helpers import TRACK, call, fake_trainer, refusal

STEPS = {"judged_by": "steps", "stages": {"micro_batches": 1}, "copy_loss": 1e-6}


def ruled(root, **rules):
    """The repository in a folder, whose board has these rules, too."""
    return Repository(root, {**made.RULES, TRACK: {**made.RULES[TRACK], **rules}})


def test_a_board_has_what_its_track_fixes():
    board, track = settings.BOARDS["english-steps"], settings.BOARDS["english"]
    assert board["config"].items() >= track["config"].items()
    assert board["manifest_sha256"] == track["manifest_sha256"]
    assert board.get("provisional") == track.get("provisional")
    assert settings.BOARDS["fineweb-1gpu"]["config"] == settings.BOARDS["fineweb"]["config"]


@pytest.mark.parametrize(
    "rules, reason",
    [
        (
            {"provisional": "one seed"},
            r"the target 0\.88 of \S+ is provisional \(one seed\); no record",
        ),
        ({"gpus": (1, 1)}, "ran without a GPU, and the board"),
        ({"gpus": (2, 8)}, r"world size 1: \S+ takes 2 to 8 GPUs; --world-size"),
        ({"stages": {"micro_batches": 4}}, r"stages: micro_batches is 8, each stage .* has 4"),
        ({"stages": {"windows": [64]}}, "stages: windows is 'not there', each stage"),
    ],
)
def test_a_record_that_its_board_does_not_take(pristine, rules, reason):
    assert re.search(reason, refusal(ruled(pristine.root, **rules)))


@pytest.mark.parametrize("rules", [{"provisional": "one seed"}, {"gpus": (2, 8)}])
def test_no_runs_are_made_for_nothing(tmp_path, capsys, rules):
    made.make_repository(tmp_path)
    (tmp_path / "train_gpt.py").write_text(fake_trainer())
    status, _, err = call(ruled(tmp_path, **rules), capsys, "run", "--runs", 2)
    assert status == 2 and err.count("\n") == 1
    assert not (tmp_path / "order.txt").exists()


def recorded(repository, capsys, name, script):
    """The exit status and the words of `submit` after three runs of a script."""
    (repository.root / "train_gpt.py").write_text(script)
    status, out, err = call(repository, capsys, "run", "--runs", 3)
    assert status == 0, out + err
    return call(repository, capsys, "submit", "--name", name, "--by", "Me")


def test_steps_are_counted_and_not_timed(tmp_path, capsys):
    """Fewer steps are a record though each takes longer, and as many are none though faster."""
    made.make_repository(tmp_path)
    repository = ruled(tmp_path, **STEPS)
    for name, script in (
        ("First", fake_trainer(steps=5)),
        ("Second", fake_trainer(time=90, steps=4)),
    ):
        status, out, err = recorded(repository, capsys, name, script)
        assert status == 0, out + err
    for steps in (4, 5):
        status, _, err = recorded(repository, capsys, "Third", fake_trainer(time=20, steps=steps))
        assert status == 2 and f"{steps} steps are no fewer than" in err
    larger = fake_trainer(steps=3).replace("size: small=1", "size: small=2")
    status, _, err = recorded(repository, capsys, "Third", larger)
    assert status == 2 and "sizes are 'small=2', the parent's 'small=1'; only small may" in err
    status, _, err = call(repository, capsys, "ab", "--runs", 2)
    assert status == 2 and "counts steps, which need no pairs; make its runs with" in err

    links = chain(made.fresh(repository).records[TRACK])
    assert [record.title for record in links] == ["First", "Second"]
    assert "It takes 4 steps, the parent 5." in links[1].readme
    assert "which counts steps: it takes 5." in links[0].readme
    for record in links:
        made.edit(record.folder / "README.md", re.escape(render.WHY), made.WHY)
    assert call(repository, capsys, "table")[0] == 0
    assert call(repository, capsys, "verify")[0] == 0
    assert "5 steps to 4 steps in 1 proven step" in (tmp_path / f"records/{TRACK}.svg").read_text()
    rows = render.board_of(links, repository.rules[TRACK], "{0.title}".format)
    assert [(row["record"], row["steps"]) for row in rows] == [("Second", "4"), ("First", "5")]


@pytest.mark.parametrize(
    "sizes, is_like",
    [
        ("small=10,100 matrices=98,304", True),
        ("small=9,900 matrices=98,304", True),
        ("small=10,101 matrices=98,304", False),
        ("small=10,000 matrices=98,305", False),
        ("small=10,000", False),
        ("small=10,000 matrices=98,304 more=1", False),
    ],
)
def test_a_few_scalars_more_are_the_same_model(sizes, is_like):
    older = SimpleNamespace(sizes="small=10,000 matrices=98,304")
    expected = contextlib.nullcontext()
    if not is_like:
        expected = pytest.raises(RecordError, match="only small may differ, by 1%")
    with expected:
        judge.check_sizes(SimpleNamespace(sizes=sizes), older)


def test_the_factor_over_plain_training_follows_the_gains(pristine):
    """It was measured for one record; the second took a sixth less time than the first in pairs."""
    records = made.fresh(pristine).records[TRACK]
    gain = records[1].result["speed"]["relative"][0]
    for number, factor in ((0, 12.0), (1, 12.0 / (1 + gain))):
        rules = {"plain": {"record": records[number].name, "factor": factor}}
        found = render.factors_of(records, rules)
        assert [*found.values()] == ["12.0 times", f"{12 / (1 + gain):.1f} times"]
        rows = render.board_of(records, rules, "{0.title}".format)
        assert rows[1]["faster than a plain GPT"] == "12.0 times"
    assert render.factors_of(records, {}) == {}
    assert render.factors_of([SimpleNamespace(name="a")], {"plain": {"record": "b"}}) == {}


def test_cells_are_plain_text():
    evil = "<script>x</script>\"'`|[a](javascript:1)*\\"
    shown = render.cell(evil)
    assert not re.search(r"[<>\"'`|\[\]*\\]", shown)


def test_the_staircase_follows_from_the_pairs(repository, capsys):
    """Each step is what is left of the first record's time, if the gains hold on its machine. A
    record beside the chain of two is none."""
    source = made.source_of("beside")
    made.write_logs(repository.root, source, began=made.LATER)
    made.submitted(repository, "Beside", source)
    assert call(repository, capsys, "table")[0] == 0
    links = chain(made.fresh(repository).records[TRACK])
    runs = [sum(run.train_time_ms for run in side) for side in (links[1].runs, links[1].baseline)]
    picture = ElementTree.parse(repository.root / f"records/{TRACK}.svg").getroot()
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    first = sum(run.train_time_ms for run in links[0].runs) / 4000
    second = first * runs[0] / runs[1]
    assert texts[0] == f"{TRACK}: {first:.0f} s to {second:.1f} s in 1 proven step"
    assert texts[1:5] == ["First", f"{first:.1f} s", "Faster", f"{second:.1f} s, -17 %"]
