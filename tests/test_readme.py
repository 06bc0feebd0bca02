"""The pages: links lead to something, and what a page names exists. And every command of README.md
and of the trainer's docstring is run as it is printed, in a copy of the repository whose tracks
take two steps.
"""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess

import pytest

import train_gpt
from continual import ContinualConfig
from helpers import ROOT

README = (ROOT / "README.md").read_text()
PAGES = "README.md CONTRIBUTING.md program.md tests/faults/README.md benchmarks/README.md".split()
PAGES += [f"records/{name}.md" for name in ("README", "NOTES", "HISTORY")]
EACH_PAGE = pytest.mark.parametrize("page", PAGES)


@EACH_PAGE
def test_links_lead_to_something(page):
    links = re.findall(r"(?:\]\(|(?:src|srcset|href)=\")([^)\s\"]+)", (ROOT / page).read_text())
    for link in links:
        if "://" in link or link.startswith("../../actions/"):  # GitHub's own page of a workflow
            continue
        name, _, anchor = link.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), link
        if anchor:  # as GitHub makes it of a heading
            headings = re.findall(r"^#+ (.+)$", path.read_text().lower(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings]
            assert anchor in anchors, link


OPTION = r"(?<![\w-])--([a-z][\w-]*)"
SOURCES = [ROOT.glob(f"{name}/**/*.py") for name in ("benchmarks", "data", "records", "tests")]
CODE = "".join(path.read_text() for paths in SOURCES for path in paths)
FIELDS = dataclasses.fields(ContinualConfig) + dataclasses.fields(train_gpt.Stage)


@EACH_PAGE
def test_options_scripts_and_tests_that_are_named_exist(page):
    text = (ROOT / page).read_text()
    known = {*re.findall(OPTION, CODE + (ROOT / "records/commands.toml").read_text())}
    known |= {field.name.replace("_", "-") for field in FIELDS}
    known |= {"nproc_per_node", "nnodes", "rdzv-backend", "rdzv-endpoint"}  # torchrun's
    commands = " ".join(re.findall(r"(?:python3?|torchrun|run\.sh) [^`\n]*", text))
    assert {*re.findall(OPTION, commands)} <= known
    for script in re.findall(r"python (\S+\.py)", text):
        assert (ROOT / script).is_file(), script
    for name in re.findall(r"\btest_\w+\b(?!\.py)", text):
        assert f"def {name}(" in CODE or (ROOT / f"tests/{name}.py").exists(), name


def test_the_docstring_has_the_chapters():
    banners = re.findall(r"^# (\d+)\. (.+?) =+$", (ROOT / "train_gpt.py").read_text(), re.MULTILINE)
    assert re.findall(r"^ +(\d+)\. (.+?) {2,}", train_gpt.__doc__, re.MULTILINE) == banners


# ----- commands

SHORTER = {  # what stands in front of a script's call of main()
    "train_gpt.py": 'SHORT = {"steps": 2, "val_tokens": 4096}\n'
    'TRACKS["english"] = with_values(TRACKS["english"], SHORT)',
    "continual.py": 'train_gpt.TRACKS["continual"] = dataclasses.replace('
    'train_gpt.TRACKS["continual"], steps=2, val_tokens=4096)',
}
CALL = 'if __name__ == "__main__":'
# Tests of tests/data, tests/faults and tests/records run these, with a local server and two nodes.
LEFT_OUT = ("./run.sh test", "python -m records", "python data/fineweb.py", "torchrun --nnodes=2")


BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
SHOWN = train_gpt.__doc__ + "".join(text for language, text in BLOCKS if not language)
LINES = [line.strip() for line in SHOWN.replace("\\\n", " ").splitlines()]
COMMANDS = [line for line in LINES if re.match(r"\./run\.sh|python |torchrun ", line)]
COMMANDS = dict.fromkeys(re.split(r" {2,}(?![-])|\s+#", line)[0] for line in COMMANDS)
RUNNING = [line for line in COMMANDS if not line.startswith(LEFT_OUT)]


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    """call(command): a finished process, in a copy of the repository with one run, RUN."""
    folder = tmp_path_factory.mktemp("copy")
    for name in (*SHORTER, "sample.py", "launch.py", "run.sh", "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    for name in ("data", "records"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("fineweb10B"))
    (folder / ".venv").symlink_to(ROOT / ".venv")
    for name, line in SHORTER.items():
        source = (folder / name).read_text()
        assert source.count(CALL) == 1
        (folder / name).write_text(source.replace(CALL, f"{line}\n{CALL}"))
    (folder / "notes").mkdir()
    text = "".join(f"To run line {line} is to believe it.\n" for line in range(20_000))
    for name in ("notes/0.txt", "book.txt"):
        (folder / name).write_text(text)
    paths = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": paths, "HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}

    def run(command):
        words = [word.replace("~", str(folder)) for word in shlex.split(command)]
        return subprocess.run(words, input="A word that\n", timeout=230, **options)

    first = run("./run.sh english --run-id RUN --adam-every 1")
    assert first.returncode == 0, first.stdout + first.stderr
    for words in ("--corpus verse", "notes book.txt --out data/mine"):
        run(f"python data/text.py {words}")
    return run


def test_the_commands_are_found():
    assert {"./run.sh", "torchrun --nproc_per_node=8 train_gpt.py"} <= {*RUNNING}


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNNING)
def test_the_command_does_what_it_says(call, command):
    done = call(command)
    if "--track fineweb" in command:  # its shards are absent
        assert done.returncode != 0
        assert "data/fineweb10B/manifest.json: no such file" in done.stdout
        return
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    if command.endswith("--check"):
        assert last == "check:ok"
    elif "--help" not in command and re.search(r"run\.sh|train_gpt|continual", command):
        assert last.startswith("status:ok")
