"""Damaged files that the trainer, sample.py and data/text.py read: each command ends within seconds
in success or in one printable line, never in a traceback."""

import os
import shutil
from pathlib import Path

import pytest
from test_fuzz_commands import limited

import continual
import helpers
import ranks
import sample
import train_gpt
from data import text as data_text


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a corpus in pieces of words, and what a run on it left at a kill."""
    root = tmp_path_factory.mktemp("trained")
    vocabulary = helpers.ROOT / "data" / "english1024.tiktoken"
    pages = "CONTRIBUTING.md", "README.md", "benchmarks/README.md", "records/NOTES.md"
    texts = [str(helpers.ROOT / page) for page in pages]
    words = ["--tokenizer", str(vocabulary), "--out", str(root / "corpus")]
    assert data_text.main([*texts, *words]) == 0
    run = ranks.train(root, {**RUN, "save_every": 2, "run_id": "run"})
    assert run.code == 0, run.stdout
    for path in run.folder.glob("checkpoint.*"):
        path.unlink()
    return root


WORDS = {"tokenizer": "english1024.tiktoken", "vocab_size": 1024, "eot_token": 1023}
RUN = {**helpers.TINY, **WORDS, "data": "corpus"}
SHAPE = {name: value for name, value in RUN.items() if name != "track"}
COMMANDS = {
    "check": (train_gpt, ["--check", *helpers.arguments(RUN)]),
    "resume": (train_gpt, ["--resume", "run"]),
    "resume, checked": (train_gpt, ["--check", "--resume", "logs/run/step_000002.pt"]),
    "score": (sample, ["--checkpoint", "logs/run/step_000002.pt", "--eval"]),
    "sample": (sample, ["--checkpoint", "run", "--prompt", "a", "--tokens", "2"]),
    "go on": (continual, ["--check", "--init-from", "run", *helpers.arguments(SHAPE)]),
    "build": (
        data_text,
        ["book.txt", "--tokenizer", "corpus/english1024.tiktoken", "--out", "new"],
    ),
}
READ = {  # by which commands a file is read
    "corpus/manifest.json": ["check", "resume, checked", "score", "sample", "go on"],
    "corpus/corpus_train_000000.bin": ["check", "resume, checked", "go on"],
    "corpus/corpus_val_000000.bin": ["check", "resume, checked", "score"],
    "corpus/english1024.tiktoken": ["sample", "build"],
    "logs/run/step_000002.pt": ["resume, checked", "score", "go on"],
    "logs/run/step_000002.sha256": ["resume, checked", "sample"],
    "logs/run/log.txt": ["resume"],
}


def file_damages(kept):
    """Functions of a path, each of which does another damage."""

    def write(content):
        return lambda path: path.write_bytes(content)

    yield from map(write, [b"", b"\0" * len(kept), b"\xff" * 100, b"[]", b"{}", b"null", b'"x"'])
    yield from map(write, [kept[: len(kept) // 2], kept[:-1], kept + kept[:1000]])
    for at in (0, len(kept) // 3, len(kept) - 1):
        yield write(kept[:at] + bytes([kept[at] ^ 16]) + kept[at + 1 :])
    yield Path.unlink
    for make in (os.mkfifo, os.mkdir):

        def replace(path, make=make):
            path.unlink()
            make(path)

        yield replace


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_damaged_files(name, trained, cli, tmp_path):
    """A checkpoint has the sha256 that fits, so that what is in it is looked at."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    (tmp_path / "book.txt").write_text("A word that is read. " * 500)
    path = tmp_path / name
    kept = path.read_bytes()
    for number, act in enumerate(file_damages(kept)):
        for command in READ[name]:
            shutil.rmtree(tmp_path / "logs")
            shutil.copytree(trained / "logs", tmp_path / "logs")
            shutil.rmtree(tmp_path / "corpus")
            shutil.copytree(trained / "corpus", tmp_path / "corpus")
            act(path)
            if name.endswith(".pt") and path.is_file():
                path.with_suffix(".sha256").write_text(train_gpt.file_sha256(path) + "\n")
            script, words = COMMANDS[command]
            with limited():
                run = cli(*words, main=script.main)
            shown = number, command, run.code, run.stdout[-500:], run.stderr[-500:]
            assert run.code in (0, 1, 2) and "Traceback" not in run.stdout + run.stderr, shown
            last = [*run.lines, run.stderr][-1 if script is data_text else len(run.lines) - 1]
            assert run.code == 0 or last.startswith(("status:", "error: ")), shown
