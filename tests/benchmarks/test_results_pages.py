"""benchmarks/README.md shows every result as it is, and names what exists; benchmarks/readme.py
renews both pages."""

import json
import re
import subprocess

import pytest

from benchmarks import plain_gpt, plain_turns, readme
from helpers import ROOT

PAGE = ROOT / "benchmarks/README.md"
TEXT = PAGE.read_text()


def test_result_tables_are_current():
    assert readme.with_results(TEXT) == TEXT


def test_every_result_is_shown():
    shown = [match[2] for match in readme.BLOCK.finditer(TEXT)]
    kept = {path.name for path in (ROOT / "benchmarks/results").glob("*.md")}
    assert sorted(shown) == sorted(kept - {"first_page.md"})  # which is in README.md


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def test_tables_are_of_commits_in_this_history():
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("this is no whole clone, so its history is not known")
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        commit = json.loads(path.read_text()).get("environment", {}).get("commit", "HEAD")
        found = git("merge-base", "--is-ancestor", commit, "HEAD")
        assert found.returncode == 0, (path.name, commit)


def results_of(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def test_the_answers_follow_from_the_results():
    """Those of the page's first table that figures decide."""
    assert "by one unit of the log's last decimal at most" in TEXT
    sizes = results_of("world_sizes")["losses"]
    assert {key.split("/")[2] for key in sizes} == {"1", "2", "3", "4", "8"}
    for key, losses in sizes.items():
        alone = sizes[f"{key.rsplit('/', 1)[0]}/1"]
        assert losses == pytest.approx(alone, abs=1.1e-5, rel=0), key
    ratios = re.findall(r"\| (1\.\d{3}) \|\n", TEXT[TEXT.index("ngram_exchange.md") :])
    assert ratios and max(map(float, ratios)) <= 1.004  # "within 0.4 % of it"
    continual = TEXT[TEXT.index("results/continual.md") :]
    assert re.findall(r"\| OSFT 0\.\d+ \| 3 \| [^|]+ \| (-?)", continual) == [""] * 6


def test_the_factor_over_plain_training_is_that_of_its_turns():
    plain = json.loads((ROOT / "records/rules.json").read_text())["boards"]["english"]["plain"]
    _, line = plain_turns.report(results_of("plain_turns")["turns"])
    assert f"record:{plain['record']} factor:{plain['factor']} " in line
    losses = [run["loss"] for run in plain_gpt.finals_of(results_of("plain_gpt")["runs"])]
    assert round(sum(losses) / len(losses), 4) == plain["loss"]
