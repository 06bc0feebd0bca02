"""The pages: links lead to something, commands are real ones, tables are current, and the tests
that a page names exist."""

import dataclasses
import re

import pytest

import train_gpt
from continual import ContinualConfig
from helpers import ROOT
from records import render
from records.files import settings
from records.record import Repository

PAGES = ["README.md", "CONTRIBUTING.md", "tests/faults/README.md", "benchmarks/README.md"]
PAGES += [f"records/{name}.md" for name in ("README", "NOTES", "HISTORY")]
FIELDS = dataclasses.fields(ContinualConfig) + dataclasses.fields(train_gpt.Stage)
# Of the trainer's command line, of torchrun's, and of pytest's.
KEYS = {field.name for field in FIELDS} | {"help", "check", "all"}
KEYS |= {"nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint", "max_restarts"}
COMMAND = r"(?:\S+/)?(?:python3?|torchrun|\./run\.sh)\b.*"


def anchor_of(heading):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_something(page):
    folder = (ROOT / page).parent
    links = re.findall(r"(?:\]\(|(?:src|srcset|href)=\")([^)\s\"]+)", (ROOT / page).read_text())
    for link in links:
        if "://" in link or link.startswith("../../actions/"):  # GitHub's own page of a workflow
            continue
        name, _, anchor = link.partition("#")
        path = folder / name if name else ROOT / page
        assert path.exists(), link
        headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in map(anchor_of, headings), link


def commands_of(page):
    """The commands of a page: lines of its blocks of code, and code in its sentences."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line.partition("  #")[0] for block in blocks for line in block.splitlines()]
    lines += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    return [part for line in lines for part in line.split(" && ") if re.match(COMMAND, part)]


def known_options(command):
    """The options that a command takes, as names of fields."""
    if "-m records" in command:
        line = settings("commands.toml")
        _, *options = line["commands"][command.split("-m records ")[1].split()[0]]
        return {option.strip("-").replace("-", "_") for option in options}
    script = next((word for word in command.split() if word.endswith(".py")), "train_gpt.py")
    path = ROOT / script
    assert path.is_file(), command
    if script == "train_gpt.py":
        return KEYS
    text = path.read_text() + (ROOT / "benchmarks/common.py").read_text()
    return set(re.findall(r"\b\w+\b", text.replace("-", "_").replace("__", " ")))


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_real_ones(page):
    for command in commands_of(page):
        if "-m venv" in command or "-m pip" in command:
            continue
        options = {key.replace("-", "_") for key in re.findall(r"--([a-z][\w-]*)", command)}
        assert options <= known_options(command), command


def test_tables_are_current():
    for path, wanted in render.pages_of(Repository.at()).items():
        assert path.read_text() == wanted, path
    banners = re.findall(r"^# (\d+)\. (.+?) =+$", (ROOT / "train_gpt.py").read_text(), re.MULTILINE)
    assert re.findall(r"^ +(\d+)\. (.+?) {2,}", train_gpt.__doc__, re.MULTILINE) == banners


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page):
    code = "".join(path.read_text() for path in ROOT.glob("tests/**/*.py"))
    for name in re.findall(r"\btest_\w+\b(?!\.py)", (ROOT / page).read_text()):
        assert f"def {name}(" in code or (ROOT / f"tests/{name}.py").exists(), name
