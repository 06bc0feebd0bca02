"""Command lines of train_gpt.py, through main() up to where a run would allocate much; and of all
programs, as processes.

Whatever they are given, they end within seconds in success or in one printable line, never in a
traceback. What the messages hold is tested in tests/trainer/test_config.py.
"""

import contextlib
import os
import resource
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

import helpers
import train_gpt

LONGEST_LINE = 2000
SECONDS = 5  # of processor time, which other processes do not lengthen
MEMORY = 4 << 30  # bytes, beyond what the process has


@contextlib.contextmanager
def limited():
    """Fail in what takes too long, and raise MemoryError in what takes too much."""
    handler = signal.signal(signal.SIGPROF, lambda number, frame: pytest.fail("a hang"))
    memory = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, memory[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, memory)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)


Run = train_gpt.Run


def look_at(config, checkpoint, runtime, log, is_check):
    """Stands in for `Run`: looks at what a run looks at before it builds its tensors, and goes
    on with the true one where these are small."""
    for step in {0, config.steps // 2, config.steps - 1}:
        train_gpt.lr_multiplier(config, step)
        train_gpt.training_phase(config, step)
        train_gpt.evaluation_phase(config, step, config.val_batch_tokens)
        train_gpt.long_windows_until(config, step)
    train_gpt.open_corpus(config)
    tokens = config.micro_batch_tokens + config.val_batch_tokens
    size = len(config.layers) * config.model_dim * (config.vocab_size + config.ngram_rows + tokens)
    if size < 10_000_000:
        return Run(config, checkpoint, runtime, log, is_check)
    return SimpleNamespace(unsaved=None)


@pytest.fixture
def assert_promise_kept(cli, tmp_path, monkeypatch):
    """assert_promise_kept(words): of a command line in a folder with a tiny corpus of the default's
    name. A refusal is one line of stdout, its last; notes go to stderr."""
    helpers.make_corpus(tmp_path / "data" / "english")
    (tmp_path / "logs" / "old").mkdir(parents=True)
    (tmp_path / "logs" / "old" / "checkpoint.pt").write_bytes(b"no checkpoint")
    monkeypatch.setattr(train_gpt, "Run", look_at)

    def check(words):
        with limited():
            run = cli("--check", *words)
        said = [line for line in run.lines if line.startswith("status:")]
        told = words, run.stdout, run.stderr
        assert run.code in (0, 1, 2) and "Traceback" not in run.stderr, told
        assert run.code == 0 or said == run.lines[-1:], told
        for line in (run.stdout + run.stderr).split("\n"):
            assert line.replace("\t", " ").isprintable(), (words, ascii(line))
            assert run.code == 0 or len(line) <= LONGEST_LINE, (words, line[:100])

    yield check
    assert os.listdir(tmp_path / "logs") == ["old"]


TINY = helpers.arguments({**helpers.TINY, "data": "data/english"})
HARD = [
    [],
    TINY,
    ["--" + "-" * 5000, "1"],
    ["--\udcff", "x"],
    ["--steps", "9" * 5000],
    ["--steps", "100000000"],
    ["--long-layers", "(" * 300 + ")" * 300],
    ["--num-layers", "10000000000", "--value-embedding-layers", "(0.5,)"],
    ["--windows", "(64, 0x" + "f" * 20000 + ")"],
    ["--mtp-weights", str((1.0,) * 5000)],
    ["--stages", "({},)" * 5000],
    ["--stages", str(tuple({"start": i / 100} for i in range(100)))],
    ["--stages", "({'a\\nb': 0},)"],
    ["--data", "a\x1b[2Jb"],
    ["--data", "\0"],
    ["--data", "x" * 5000],
    ["--resume", "\0"],
    ["--resume", "a\nb"],
    ["--track", "\ud800"],
]


@pytest.mark.parametrize("words", HARD, ids=lambda words: ascii(" ".join(words))[:60])
def test_a_command_line_that_was_hard(words, assert_promise_kept):
    assert_promise_kept(words)
