"""README.md says what the repository holds: result tables are those of benchmarks/results, paths and keys exist."""
import dataclasses
import re
import sys
from pathlib import Path

import train_gpt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import readme  # noqa: E402

TEXT = (ROOT / "README.md").read_text()


def test_result_tables_are_current():
    assert readme.BLOCK.search(TEXT)
    assert readme.with_results(TEXT) == TEXT


def test_changed_results_are_noticed(tmp_path, monkeypatch):
    for name in {match[2] for match in readme.BLOCK.finditer(TEXT)}:
        target = tmp_path / "benchmarks" / "results" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("other\n")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    assert readme.with_results(TEXT) != TEXT


def test_named_files_exist():
    for path in re.findall(r"\b(?:data|benchmarks|records)/\w+\.(?:py|sh|md)\b", TEXT):
        assert (ROOT / path).is_file(), path


def test_named_keys_exist():
    fields = {field.name for field in dataclasses.fields(train_gpt.Config)}
    elsewhere = {"help", "check", "track", "checkpoint", "prompt", "out", "key",
                 "nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint", "name", "baseline"}
    for key in re.findall(r"--([a-z][a-z_-]*)", TEXT):
        assert key.replace("-", "_") in fields | elsewhere, key


def test_chapters_of_the_map_are_those_of_the_file():
    banners = re.findall(r"^# (\d+)\. ([^:\n]+)", (ROOT / "train_gpt.py").read_text(), re.MULTILINE)
    mapped = re.findall(r"^\| (\d+) ([^|]+) \|", TEXT, re.MULTILINE)
    assert [(n, name.strip()) for n, name in mapped] == [(n, name.strip()) for n, name in banners]
    docstring = re.findall(r"^ +(\d+)\. (.+?)  +", train_gpt.__doc__, re.MULTILINE)
    assert docstring == [(n, name.strip()) for n, name in banners]
