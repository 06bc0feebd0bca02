"""The staircase and the leaderboards: they say what the records say, and escape all that comes from
logs."""

import shutil
import xml.etree.ElementTree as ElementTree

import pytest

import records_helpers as made
from records import ladder
from records.__main__ import main
from records.record import chain

EVIL = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\"'`|[a](javascript:1)"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Two records of a chain, and one beside it whose device is HTML."""
    repository = made.make_repository(tmp_path_factory.mktemp("report"))
    made.add_first(repository)
    made.add_faster(repository)
    source = made.source_of("evil")
    began = made.YESTERDAY + made.timedelta(hours=6)
    made.write_logs(repository.root / "logs", source, rng=9, device=EVIL, began=began)
    made.submitted(repository, "Zevil", source)
    assert main(["table"], made.fresh(repository)) == 0
    return repository


def test_the_staircase_follows_from_the_pairs(repository):
    """Each step is what is left of the first record's time, if the gains hold on its machine; its
    dots lie on a logarithmic scale."""
    links = chain(made.fresh(repository).records["nano"])
    first, second = ladder.ladder(links)
    runs = [sum(run.train_time_ms for run in side) for side in (links[1].runs, links[1].baseline)]
    assert first[:2] == ("First", pytest.approx(60, abs=0.2))
    assert second[1] / first[1] == pytest.approx(runs[0] / runs[1], rel=1e-3)
    picture = ElementTree.parse(repository.root / "records/nano.svg").getroot()
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert texts[0] == f"nano: {first[1]:.0f} s to {second[1]:.1f} s in 1 proven step"
    assert texts[1:5] == ["First", f"{first[1]:.1f} s", "Faster", f"{second[1]:.1f} s, -17 %"]
    dots = [float(dot.get("cx")) for dot in picture.iter(f"{SVG}circle")]
    assert dots[0] > dots[1]


def test_three_steps_are_apart_as_the_logarithms_of_their_times():
    class Link:
        def __init__(self, gain):
            self.title = "a"
            self.result = {"train_time_ms": {"mean": 8000}, "speed": {"relative": [gain]}}

    text = ladder.staircase("nano", [Link(None), Link(-0.5), Link(-0.75)])
    picture = ElementTree.fromstring(text)
    dots = [float(dot.get("cx")) for dot in picture.iter(f"{SVG}circle")]
    assert (dots[1] - dots[2]) / (dots[0] - dots[1]) == pytest.approx(2, rel=0.01)
    assert "prefers-color-scheme: dark" in text and "8.0 s" in text and "1.0 s, -75 %" in text


def test_this_repository_s_ladder_is_on_its_page():
    repository = made.Repository.at()
    readme = repository.readme.read_text()
    for track, records in repository.records.items():
        if len(chain(records)) > 1:
            assert f"]({track}.svg)" in readme


def test_markdown_is_escaped(repository):
    text = next((repository.root / "records" / "nano").glob("*_Zevil/README.md")).read_text()
    for page in (text, repository.readme.read_text()):
        assert "<script" not in page and "<img" not in page and "](javascript" not in page


def test_a_record_beside_the_chain_stands_below_it(repository):
    rows = [line for line in repository.readme.read_text().splitlines() if "](nano/" in line]
    assert [row.split("]")[0] for row in rows] == ["| [Faster", "| [First", "| [Zevil"]
    assert ["no claim" in row for row in rows] == [False, False, True]


def test_table_draws_nothing_of_records_that_fail(repository, tmp_path, capsys):
    root = shutil.copytree(repository.root, tmp_path / "copy")
    next(root.glob("records/nano/*_First/README.md")).write_text("")
    (root / "records/nano.svg").unlink()
    assert main(["table"], made.Repository(root, repository.rules)) == 1
    assert "_First: README.md: only what stands" in capsys.readouterr().out
    assert not (root / "records/nano.svg").exists()
