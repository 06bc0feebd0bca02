"""Every command of the trainer's docstring and of README.md, run as it is printed.

They run in a copy of the repository whose tracks take two steps. What is left out, or ends in a
refusal, is named here with the reason.
"""

import math
import os
import re
import shlex
import shutil
import subprocess

import pytest

import train_gpt
from helpers import ROOT

README = (ROOT / "README.md").read_text()

SHORTER = {  # what stands in front of a script's call of main()
    "train_gpt.py": 'SHORT = {"steps": 2, "val_tokens": 4096}\n'
    'TRACKS["english"] = with_values(TRACKS["english"], SHORT)',
    "continual.py": 'train_gpt.TRACKS["continual"] = dataclasses.replace('
    'train_gpt.TRACKS["continual"], steps=2, val_tokens=4096)',
}
CALL = 'if __name__ == "__main__":'
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


DOCSTRING = commands_of(train_gpt.__doc__)
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
SHOWN = "\n".join(text for language, text in BLOCKS if not language)
COMMANDS = list(dict.fromkeys([*DOCSTRING, *commands_of(SHOWN)]))
RUNNING = [line for line in COMMANDS if not any(line.startswith(words) for words in LEFT_OUT)]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository's outer files with one unfinished run, and the environment to run
    its commands in."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("train_gpt.py", "continual.py", "sample.py", "run.sh", "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("fineweb10B", "nano", "mini")
    for name in ("data", "records"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    for name, line in SHORTER.items():
        source = (folder / name).read_text()
        assert source.count(CALL) == 1
        (folder / name).write_text(source.replace(CALL, f"{line}\n{CALL}"))
    (folder / "notes").mkdir()
    sentence = "To run what is printed is to believe it, said reader {}.\n"
    for number in range(20):
        text = "".join(sentence.format(1000 * number + line) for line in range(1000))
        (folder / "notes" / f"{number}.txt").write_text(text)
    shutil.copy(folder / "notes" / "0.txt", folder / "book.txt")
    paths = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": paths, "HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    first = run(folder, environment, "./run.sh english --run-id RUN --adam-every 1")
    assert first.returncode == 0, first.stdout + first.stderr
    run(folder, environment, "python data/text.py --corpus verse")
    return folder, environment


def run(folder, environment, command):
    words = [word.replace("~", str(folder)) for word in shlex.split(command)]
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=230
    )


def test_the_commands_are_found_and_leave_no_gpu_idle():
    """Their numbers of processes divide the micro-batches of every step."""
    assert "torchrun --nproc_per_node=8 train_gpt.py" in DOCSTRING and len(DOCSTRING) == 4
    assert {"./run.sh", "python sample.py --checkpoint RUN --eval"} <= {*RUNNING}
    config = train_gpt.TRACKS["fineweb"]
    counts = {train_gpt.stage_at(config, step).micro_batches for step in range(config.steps)}
    for command in COMMANDS:
        sizes = re.findall(r"--(?:nproc[-_]per[-_]node|nnodes)=(\d+)", command)
        world_size = math.prod(map(int, sizes))
        assert all(count % world_size == 0 for count in counts), command


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNNING)
def test_the_command_does_what_it_says(copy, command):
    done = run(*copy, command)
    if REFUSED in command:
        assert done.returncode != 0
        assert "data/fineweb10B/manifest.json: no such file" in done.stdout
        return
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    if command.endswith("--check"):
        assert last == "check:ok"
    elif "--help" not in command and re.search(r"run\.sh|train_gpt|continual", command):
        assert last.startswith("status:ok")
