"""The report and the staircase: they say what the records say, escape all that comes from logs,
and need no network."""

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
    """Two records of a chain, one beside it, and their report."""
    root = tmp_path_factory.mktemp("report") / "repository"
    shutil.copytree(pristine.root, root)
    repository = Repository(root, pristine.rules)
    source = made.source_of("beside")
    made.write_logs(root, source, began=made.LATER)
    made.submitted(repository, "Beside", source)
    assert main(["table"], made.fresh(repository)) == 0
    out = str(root / "site" / "report.html")
    assert main(["report", "--out", out], made.fresh(repository)) == 0
    return repository


@pytest.fixture(scope="module")
def page(repository):
    return repository.root / "site" / "report.html"


def test_page_has_no_code_and_links_to_records(page):
    text = page.read_text()
    assert not {"script", "link"} & {*re.findall(r"<(\w+)", text)}
    assert not re.search(r"<[^>]*\son\w+ *=", text)
    assert "default-src 'none'" in text and "script-src" not in text
    addresses = re.findall(r'(?:href|src) *= *"([^"]*)', text)
    (picture,) = [address for address in addresses if ":" in address]
    assert picture.startswith("data:image/png;base64,")
    folders = [page.parent / address for address in addresses if ":" not in address]
    assert len(folders) == 3 and all((folder / "README.md").is_file() for folder in folders)
    places = [text.index(f">{title}</a>") for title in ("Faster", "First", "Beside")]
    assert places == sorted(places)  # the chain, latest first, and what lies beside it


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


def test_a_report_of_a_bad_record_or_into_a_folder_leaves_nothing(repository, tmp_path, capsys):
    (tmp_path / "report.html").mkdir()
    status, _, err = made.call(repository, capsys, "report", "--out", tmp_path / "report.html")
    assert status == 2 and err.startswith("records: ")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    root = shutil.copytree(repository.root, tmp_path / "copy")
    next(root.glob("records/*/*_First/README.md")).write_text("")
    bad = Repository(root, repository.rules)
    status, _, err = made.call(bad, capsys, "report", "--out", tmp_path / "r.html")
    assert status == 2 and "_First: README.md: only what stands" in err
    assert not (tmp_path / "r.html").exists()
