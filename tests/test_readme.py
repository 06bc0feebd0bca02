"""README.md and the pages beside it say what the repository holds: tables, paths, keys, chapters,
targets, claims."""

import dataclasses
import json
import re
import statistics
import xml.etree.ElementTree

import pytest

import train_gpt
from benchmarks import readme
from continual import ContinualConfig
from helpers import ROOT

PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "records/README.md")}
TEXT = PAGES["README.md"]
SOURCE = (ROOT / "train_gpt.py").read_text()
LINKED = [*PAGES, "CONTRIBUTING.md", "records/NOTES.md", "benchmarks/README.md"]
SVG = "{http://www.w3.org/2000/svg}"


def test_it_is_a_page():
    assert len(TEXT.splitlines()) <= 160


def test_result_tables_are_current():
    assert readme.BLOCK.search(TEXT)
    assert readme.with_results(TEXT) == TEXT


def test_the_run_is_shown_as_it_was_logged():
    """In whole lines, of which the last one is the log's."""
    shown = (ROOT / "benchmarks/results/nano_run.md").read_text().strip("`\n").splitlines()
    log = (ROOT / "benchmarks/results/nano_run.log").read_text().splitlines()
    assert len(shown) > 4 and shown[-1] == log[-1] and shown[-1].startswith("status:ok")
    assert all(line in log for line in shown)


@pytest.mark.parametrize("page", LINKED)
def test_named_files_exist(page):
    text = (ROOT / page).read_text()
    for path in re.findall(r"(?<![\w/])(?:data|benchmarks|records)/\w+\.(?:py|sh|md)\b", text):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"(?:\]\(|src=\"|srcset=\"|href=\")(?!https?:)([^)#\"]+)", text):
        # GitHub serves a workflow and its badge beside the repository's pages.
        workflow = re.match(r"\.\./\.\./actions/workflows/(\w+\.yml)", path)
        target = f".github/workflows/{workflow[1]}" if workflow else path
        assert (ROOT / page).parent.joinpath(target).exists(), path


def anchor_of(heading):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", LINKED)
def test_anchors_lead_to_headings(page):
    for path, anchor in re.findall(r"\]\(([\w./]*)#([\w-]+)\)", (ROOT / page).read_text()):
        target = (ROOT / page).parent / path if path else ROOT / page
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
        assert anchor in map(anchor_of, headings), (path, anchor)


def test_both_drawings_are_one_but_for_their_colours():
    light, dark = (
        (ROOT / f"docs/how-it-works-{theme}.svg").read_text() for theme in ("light", "dark")
    )
    colour = r"#[0-9a-f]{6}|#[0-9a-f]{3}"
    assert light != dark and re.sub(colour, "", light) == re.sub(colour, "", dark)
    for drawing in (light, dark):
        width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', drawing).groups())
        for text in xml.etree.ElementTree.fromstring(drawing).iter(f"{SVG}text"):
            assert 0 <= int(float(text.get("x"))) < width and 0 < int(text.get("y")) < height


@pytest.mark.parametrize("page", PAGES)
def test_named_keys_exist_and_are_spelt_one_way(page):
    fields = {field.name for field in dataclasses.fields(ContinualConfig)}
    elsewhere = {
        "help",
        "check",
        "checkpoint",
        "prompt",
        "eval",
        "out",
        "nproc_per_node",
        "max_restarts",
        "nnodes",
        "rdzv_backend",
        "rdzv_endpoint",
        "name",
        "by",
        "runs",
        "world_size",
        "yes",
        "tree",
    }
    written = re.sub(r"<!-- results/.*?<!-- end -->", "", PAGES[page], flags=re.DOTALL)
    for key in re.findall(r"--([a-z][a-z_-]*)", written):
        if key != "nproc_per_node":  # as torchrun's own users write it
            assert "_" not in key and key.replace("-", "_") in fields | elsewhere, key


def test_chapters_of_the_map_are_those_of_the_file():
    banners = [
        (number, name.rstrip(" ="))
        for number, name in re.findall(r"^# (\d+)\. (.+)$", SOURCE, re.MULTILINE)
    ]
    assert len(banners) == 18
    assert re.findall(r"^\| (\d+) ([^|]+?) \|", TEXT, re.MULTILINE) == banners
    assert re.findall(r"^ +(\d+)\. (.+?) {2,}", train_gpt.__doc__, re.MULTILINE) == banners


def test_the_map_names_what_the_file_defines():
    table = TEXT[TEXT.index("| chapter |") : TEXT.index("## Try an idea")]
    for name in set(re.findall(r"`([A-Za-z_.]+)`", table)):
        assert re.search(rf"^ *(def |class |){name.split('.')[-1]}\b", SOURCE, re.MULTILINE), name


def test_targets_are_those_of_the_tracks():
    for track in ("nano", "mini", "fineweb"):
        row = re.search(rf"^\| `{track}` \|.*\| ([\d.]+) nats per", TEXT, re.MULTILINE)
        target = train_gpt.TRACKS[track].target_loss
        assert float(row[1]) == target
        if track in readme.WHAT:
            assert f"target {target:g}" in readme.WHAT[track]


def test_the_table_of_results_follows_from_logs_and_results():
    """A newer record does not make it wrong: it is compared with the records that it names."""
    rows = readme.BLOCK.search(TEXT)[0].splitlines()[3:-1]
    named = re.findall(r"\(records/(\w+)/([^/]+)/\)", TEXT)
    assert len(rows) == 4 and {"nano", "mini"} <= dict(named).keys()
    expected = [
        readme.row_of_record(track, ROOT / "records" / track / name) for track, name in named
    ]
    expected.append(readme.row_of_world_sizes(ROOT / "benchmarks/results"))
    for row, cells in zip(rows, expected, strict=False):
        assert row == "| " + " | ".join(map(str, cells)) + " |"
    assert rows[3].count("not measured yet") == 2 and "GPU" in rows[3]


def test_nothing_claims_a_gpu_while_no_result_is_of_one():
    """As soon as one is, the first page must say so."""
    of_gpus = list((ROOT / "benchmarks/results").glob("gpu_*.json"))
    assert ("Nobody has run this on a GPU yet" in TEXT) == (not of_gpus)


def test_the_fastest_record_is_of_the_latest_machine(monkeypatch):
    runs = {
        "old and fast": ("EPYC", "T1", 5.0),
        "slow": ("Xeon", "T2", 9.0),
        "fast": ("Xeon", "T3", 7.0),
        "latest": ("Xeon", "T4", 8.0),
    }

    def runs_of(name):
        device, started, seconds = runs[name]
        return [{"device": device, "started": started, "seconds": seconds}]

    monkeypatch.setattr(readme.common, "record_folders", lambda track: list(runs))
    monkeypatch.setattr(readme.common, "runs_of_record", runs_of)
    assert readme.fastest_record("nano") == "fast"


def test_what_it_says_of_the_table_follows_from_the_figures():
    runs = json.loads((ROOT / "benchmarks/results/parts.json").read_text())["runs"]
    nano, without = (
        statistics.mean(run["val_loss"] for run in runs if run["arm"] == arm)
        for arm in ("nano", "without the table")
    )
    words = f"without its table it ends at {without:.3f} instead of {nano:.3f}"
    assert words in " ".join(TEXT.split())
    assert (without - nano) / without > 0.5  # "most of its low loss"
