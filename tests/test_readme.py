"""README.md and the pages beside it: their tables are current, and what they name exists."""

import re

import pytest

import train_gpt
from benchmarks import readme
from helpers import ROOT

TEXT = (ROOT / "README.md").read_text()
PAGES = ["README.md", "records/README.md", "CONTRIBUTING.md", "records/NOTES.md"]
PAGES.append("benchmarks/README.md")


def test_it_is_a_page_with_current_results():
    assert len(TEXT.splitlines()) <= 160
    assert readme.BLOCK.search(TEXT) and readme.with_results(TEXT) == TEXT
    banners = re.findall(r"^# (\d+)\. (.+?) =+$", (ROOT / "train_gpt.py").read_text(), re.MULTILINE)
    assert re.findall(r"^\| (\d+) ([^|]+?) \|", TEXT, re.MULTILINE) == banners
    assert re.findall(r"^ +(\d+)\. (.+?) {2,}", train_gpt.__doc__, re.MULTILINE) == banners


def test_no_page_claims_a_gpu_while_no_result_is_of_one():
    """As soon as one is, the first page must say so."""
    of_gpus = list((ROOT / "benchmarks/results").glob("gpu_*.json"))
    assert ("Nobody has run this on a GPU yet" in TEXT) == (not of_gpus)


def anchor_of(heading):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_named_files_and_anchors_exist(page):
    text, folder = (ROOT / page).read_text(), (ROOT / page).parent
    for path in re.findall(r"(?<![\w/])(?:data|benchmarks|records)/\w+\.(?:py|sh|md)\b", text):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"(?:\]\(|src=\"|srcset=\"|href=\")(?!https?:)([^)#\"]+)", text):
        # GitHub serves a workflow and its badge beside the repository's pages.
        workflow = re.match(r"\.\./\.\./actions/workflows/(\w+\.yml)", path)
        target = f".github/workflows/{workflow[1]}" if workflow else path
        assert (folder / target).exists(), path
    for path, anchor in re.findall(r"\]\(([\w./]*)#([\w-]+)\)", text):
        headings = re.findall(
            r"^#+ (.+)$", (folder / path if path else ROOT / page).read_text(), re.M
        )
        assert anchor in map(anchor_of, headings), (path, anchor)
