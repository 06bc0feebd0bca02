"""Hard command lines, and damaged files that the scripts read. Whatever they are given, they end
within seconds in success or in one printable line, never in a traceback."""

import os
import resource
import shutil
from pathlib import Path

import pytest

import continual
import helpers
import ranks
import sample
import train_gpt
from data import text as data_text

LONGEST_LINE = 2000
MEMORY = 4 << 30  # bytes, beyond what the process has


@pytest.fixture(autouse=True)
def little_memory():
    """Raise MemoryError in what takes too much."""
    memory = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, memory[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, memory)


# ----- command lines

HARD = [
    [],
    helpers.arguments({**helpers.TINY, "data": "data/english"}),
    ["--" + "-" * 5000, "1"],
    ["--\udcff", "x"],
    ["--steps", "9" * 5000],
    ["--windows", "(64, 0x" + "f" * 20000 + ")"],
    ["--stages", "({},)" * 5000],
    ["--stages", str(tuple({"start": i / 100} for i in range(100)))],
    ["--stages", "({'a\\nb': 0},)"],
    ["--data", "a\x1b[2Jb"],
    ["--data", "\0"],
    ["--resume", "\0"],
    ["--track", "\ud800"],
]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("words", HARD, ids=lambda words: ascii(" ".join(words))[:60])
def test_a_command_line_that_was_hard(words, cli, tmp_path):
    """A refusal is one line of stdout, its last; notes go to stderr."""
    helpers.make_corpus(tmp_path / "data" / "english")
    run = cli("--check", *words)
    said = [line for line in run.lines if line.startswith("status:")]
    assert run.code in (0, 1, 2) and "Traceback" not in run.stderr, run
    assert run.code == 0 or said == run.lines[-1:], run
    for line in (run.stdout + run.stderr).split("\n"):
        assert line.replace("\t", " ").isprintable(), ascii(line)
        assert run.code == 0 or len(line) <= LONGEST_LINE, line[:100]
    assert not (tmp_path / "logs").exists()


# ----- files

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
    "build": (data_text, "book.txt --tokenizer corpus/english1024.tiktoken --out new".split()),
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a corpus in pieces of words, and what a run on it left at a kill."""
    root = tmp_path_factory.mktemp("trained")
    vocabulary = helpers.ROOT / "data" / "english1024.tiktoken"
    texts = [str(path) for path in helpers.ROOT.glob("*/*.md")]
    words = ["--tokenizer", str(vocabulary), "--out", str(root / "corpus")]
    assert data_text.main([*texts, *words]) == 0
    run = ranks.train(root, {**RUN, "save_every": 2, "run_id": "run"})
    assert run.code == 0, run.stdout
    for path in run.folder.glob("checkpoint.*"):
        path.unlink()
    return root


def file_damages(kept):
    """What may stand in the place of a file: other bytes, nothing, a pipe, a folder."""
    yield from (b"", b"\0" * len(kept), b"\xff" * 100, b"[]", b"{}", b"null", b'"x"')
    yield from (kept[: len(kept) // 2], kept[:-1], kept + kept[:1000])
    for at in (0, len(kept) // 3, len(kept) - 1):
        yield kept[:at] + bytes([kept[at] ^ 16]) + kept[at + 1 :]
    yield from (lambda path: None, os.mkfifo, os.mkdir)


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_damaged_files(name, trained, cli, tmp_path):
    """A checkpoint has the sha256 that fits, so that what is in it is looked at."""
    (tmp_path / "book.txt").write_text("A word that is read. " * 500)
    path = tmp_path / name
    for damage in file_damages((trained / name).read_bytes()):
        for command in READ[name]:
            for folder in ("logs", "corpus"):
                shutil.rmtree(tmp_path / folder, ignore_errors=True)
                shutil.copytree(trained / folder, tmp_path / folder)
            path.unlink()
            path.write_bytes(damage) if isinstance(damage, bytes) else damage(path)
            if name.endswith(".pt") and path.is_file():
                path.with_suffix(".sha256").write_text(train_gpt.file_sha256(path) + "\n")
            script, words = COMMANDS[command]
            run = cli(*words, main=script.main)
            shown = damage, command, run.code, run.stdout[-500:], run.stderr[-500:]
            assert run.code in (0, 1, 2) and "Traceback" not in run.stdout + run.stderr, shown
            last = run.stderr if script is data_text else [run.stderr, *run.lines][-1]
            assert run.code == 0 or last.startswith(("status:", "error: ")), shown
