"""Every command of the trainer's docstring, of --help and of README.md, run as it is printed.

They run in a copy of the repository whose nano track is short: a few steps and a small index. What
is left out, or ends in a refusal, is named here with the reason.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import train_gpt
from helpers import ROOT

README = (ROOT / "README.md").read_text()

# The nano track of the copy: text of its literal, and what stands there instead.
SHORTER = {
    "steps=128,": "steps=2,",
    "val_tokens=1_048_576,": "val_tokens=4096,",
    "ngram_rows=2**19,": "ngram_rows=2**12,",
    "index_bits=25,": "index_bits=12,",
    'knob("compile the model with torch.compile", default=True)': 'knob("compile", default=False)',
}
SHORTER_CONTINUAL = {
    '"steps": 300,': '"steps": 2,',
    '"val_tokens": 524_288,': '"val_tokens": 4096,',
}
LEFT_OUT = {
    "./run.sh test": "it is what runs this test",
    "python -m records": "tests/records runs these lines on a tiny track",
    "$EDITOR": "it is the reader's",
    "git add": "it is the reader's",
    "python data/fineweb.py": "it needs the network; tests/data runs it against a local server",
    "torchrun --nnodes=2": "it needs two nodes; tests/faults runs two on this machine",
}
REFUSED = "--track fineweb"  # where its shards are not present


def commands_of(text):
    """The command lines of a text's indented or fenced lines, without their remarks."""
    text = text.replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        command = re.split(r" {2,}(?![-])|\s+#", line.strip())[0]
        if re.match(r"(\./run\.sh|python |torchrun |\$EDITOR|git add)", command):
            found.append(command)
    return found


def code_blocks(page):
    """The fenced blocks of a page that are in no programming language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return "\n".join(text for language, text in blocks if not language)


DOCSTRING = commands_of(train_gpt.__doc__)
COMMANDS = list(dict.fromkeys([*DOCSTRING, *commands_of(code_blocks(README))]))
RUNNING = [line for line in COMMANDS if not any(line.startswith(words) for words in LEFT_OUT)]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository's outer files with a short nano track and one finished run, and the
    environment to run its commands in."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("train_gpt.py", "continual.py", "sample.py", "run.sh", "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "data", folder / "data", ignore=shutil.ignore_patterns("fineweb10B"))
    shutil.copytree(ROOT / "records", folder / "records", ignore=shutil.ignore_patterns("nano"))
    (folder / ".venv").symlink_to(ROOT / ".venv")
    shorten(folder / "train_gpt.py", SHORTER)
    shorten(folder / "continual.py", SHORTER_CONTINUAL)
    (folder / "notes").mkdir()
    sentence = "To run what is printed is to believe it, said reader {}.\n"
    for number in range(20):
        text = "".join(sentence.format(1000 * number + line) for line in range(1000))
        (folder / "notes" / f"{number}.txt").write_text(text)
    shutil.copy(folder / "notes" / "0.txt", folder / "book.txt")
    paths = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": paths, "HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    run(folder, environment, "./run.sh nano --run-id RUN --save-every 1")
    (folder / "logs/RUN/result.json").unlink()  # so that it can be resumed
    run(folder, environment, "python data/text.py --corpus cpp")
    return folder, environment


def shorten(script, changes):
    source = script.read_text()
    for text, shorter in changes.items():
        assert text in source, text
        source = source.replace(text, shorter)
    script.write_text(source)


def run(folder, environment, command):
    words = [os.path.expanduser(word.replace("~", str(folder))) for word in shlex.split(command)]
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=230
    )


def test_the_commands_are_found():
    assert "torchrun --nproc_per_node=8 train_gpt.py" in DOCSTRING
    assert len(DOCSTRING) == 4
    assert {"./run.sh", "python sample.py --checkpoint logs/RUN/checkpoint.pt --eval"} <= {*RUNNING}


def test_no_gpu_idles_in_the_printed_commands():
    """Their numbers of processes divide the micro-batches of every step."""
    for command in COMMANDS:
        per_node = re.search(r"--nproc[-_]per[-_]node=(\d+)", command)
        nodes = re.search(r"--nnodes=(\d+)", command)
        world_size = int(per_node[1]) if per_node else 1
        world_size *= int(nodes[1]) if nodes else 1
        for stage in train_gpt.TRACKS["fineweb"].stages:
            assert stage.micro_batches % world_size == 0, command


def test_help_prints_the_docstrings_commands(capsys):
    assert train_gpt.main(["--help"]) == 0
    assert set(DOCSTRING) <= set(commands_of(capsys.readouterr().out))


@pytest.mark.slow
def test_a_reader_need_not_read_to_the_end():
    """The difference from the first record is longer than a pipe holds."""
    first = min((ROOT / "records/nano").glob("2*"))
    words = f"set -o pipefail; {sys.executable} -m records diff {first} | head -1"
    done = subprocess.run(["bash", "-c", words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 141) and done.stderr == "" and "train_gpt.py" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNNING)
def test_the_command_does_what_it_says(copy, command):
    done = run(*copy, command)
    if REFUSED in command:
        assert done.returncode != 0
        assert "data/fineweb10B: no *_train_*.bin shards" in done.stdout
        return
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    if command.endswith("--check"):
        assert last == "check:ok"
    elif "--help" not in command and re.search(r"run\.sh|train_gpt|continual", command):
        assert last.startswith("status:ok")
