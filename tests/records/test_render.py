"""What is drawn of records: a staircase that says what they say, and cells of plain text."""

import re
import shutil
import xml.etree.ElementTree as ElementTree

import pytest

import records_helpers as made
from records import render
from records.__main__ import main
from records.record import Repository, chain

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def repository(pristine, tmp_path_factory):
    """Two records of a chain, and one beside it."""
    root = tmp_path_factory.mktemp("drawn") / "repository"
    shutil.copytree(pristine.root, root)
    repository = Repository(root, pristine.rules)
    source = made.source_of("beside")
    made.write_logs(root, source, began=made.LATER)
    made.submitted(repository, "Beside", source)
    assert main(["table"], made.fresh(repository)) == 0
    return repository


def test_cells_are_plain_text():
    evil = "<script>x</script>\"'`|[a](javascript:1)*\\"
    shown = render.cell(evil)
    assert not re.search(r"[<>\"'`|\[\]*\\]", shown)


def test_the_staircase_follows_from_the_pairs(repository):
    """Each step is what is left of the first record's time, if the gains hold on its machine."""
    links = chain(made.fresh(repository).records[made.TRACK])
    runs = [sum(run.train_time_ms for run in side) for side in (links[1].runs, links[1].baseline)]
    picture = ElementTree.parse(repository.root / f"records/{made.TRACK}.svg").getroot()
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    first = sum(run.train_time_ms for run in links[0].runs) / 4000
    second = first * runs[0] / runs[1]
    assert texts[0] == f"{made.TRACK}: {first:.0f} s to {second:.1f} s in 1 proven step"
    assert texts[1:5] == ["First", f"{first:.1f} s", "Faster", f"{second:.1f} s, -17 %"]
