"""README.md and records/README.md say what the repository holds: tables, paths, keys, chapters,
targets, claims."""

import dataclasses
import json
import re

import pytest

import train_gpt
from benchmarks import readme
from continual import ContinualConfig
from helpers import ROOT

PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "records/README.md")}
TEXT = PAGES["README.md"]
SOURCE = (ROOT / "train_gpt.py").read_text()


def test_it_is_a_page():
    assert len(TEXT.splitlines()) <= 170


def test_result_tables_are_current():
    assert readme.BLOCK.search(TEXT)
    assert readme.with_results(TEXT) == TEXT


def test_the_run_is_shown_as_it_was_logged():
    """In whole lines, of which the last one is the log's."""
    shown = (ROOT / "benchmarks/results/nano_run.md").read_text().strip("`\n").splitlines()
    log = (ROOT / "benchmarks/results/nano_run.log").read_text().splitlines()
    assert len(shown) > 4 and shown[-1] == log[-1] and shown[-1].startswith("status:ok")
    assert all(line in log for line in shown)


def test_changed_results_are_noticed(tmp_path, monkeypatch):
    for name in {match[2] for match in readme.BLOCK.finditer(TEXT)}:
        target = tmp_path / "benchmarks" / "results" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("other\n")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    assert readme.with_results(TEXT) != TEXT


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page):
    for path in re.findall(r"\b(?:data|benchmarks|records)/\w+\.(?:py|sh|md)\b", PAGES[page]):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"\]\((?!https?:)([^)#]+)\)", PAGES[page]):
        assert (ROOT / page).parent.joinpath(path).exists(), path


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
    table = TEXT[TEXT.index("| chapter |") : TEXT.index("The command line changes")]
    for name in set(re.findall(r"`([A-Za-z_.]+)`", table)):
        assert re.search(rf"^ *(def |class |){name.split('.')[-1]}\b", SOURCE, re.MULTILINE), name


def test_targets_are_those_of_the_tracks():
    for track in ("nano", "fineweb"):
        row = re.search(rf"^\| `{track}` \|.*\| ([\d.]+) nats per", TEXT, re.MULTILINE)
        assert float(row[1]) == train_gpt.TRACKS[track].target_loss


def test_what_it_says_of_the_table_follows_from_the_figures():
    """It takes the plain GPT most of the way to nano, nano without it ends higher, and it outweighs
    the matrices."""
    results = json.loads((ROOT / "benchmarks/results/nano_vs_baseline.json").read_text())["results"]
    arms = {result["arm"]: result for result in results}
    plain, with_table, nano, without = (
        arms[name]["val_loss"]
        for name in ("baseline", "baseline + n-grams", "nano", "nano, no table")
    )
    assert (plain - with_table) / (plain - nano) > 0.5
    assert without > nano + 0.1
    assert arms["nano"]["table_values"] > 10 * arms["nano"]["matrix_parameters"]
