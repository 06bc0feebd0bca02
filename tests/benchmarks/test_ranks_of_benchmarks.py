"""How benchmarks start ranks: as many as they say, and never from within a launcher's own."""

import importlib
import sys

import pytest

import benchmarks
from benchmarks import common
from helpers import ROOT

pytestmark = pytest.mark.slow

WITHOUT_RANKS = {
    "__init__",
    "common",
    "plain_gpt",
    "readme",
    "records_power",
    "records_verify",
}
SCRIPTS = sorted({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - WITHOUT_RANKS)

# In one write, so that the words of two ranks do not mix.
REPORTER = """import os, sys
names = "RANK", "WORLD_SIZE", "OMP_NUM_THREADS"
words = [str(os.environ.get(name)) for name in names] + sys.argv[1:]
os.write(1, (" ".join(words) + "\\n").encode())
"""


def test_benchmarks_are_those_of_the_repository():
    assert list(benchmarks.__path__) == [str(ROOT / "benchmarks")]


@pytest.mark.parametrize(
    "world_size, lines", [(1, {"None None 1 --word"}), (2, {"0 2 1 --word", "1 2 1 --word"})]
)
def test_a_script_runs_on_that_many_ranks(world_size, lines, tmp_path):
    script = tmp_path / "reporter.py"
    script.write_text(REPORTER)
    done = common.on_ranks(
        script, world_size, ["--word"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and set(done.stdout.splitlines()) == lines, done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_launchers_rank_is_refused_in_one_line(name, monkeypatch, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])

    def on_ranks(*words, **options):
        pytest.fail("it has started ranks")

    monkeypatch.setattr(common, "on_ranks", on_ranks)
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 2
    out, err = capsys.readouterr()
    remedy = "start it with python, not with torchrun"
    assert not out and err == f"error: {name}.py starts its ranks itself; {remedy}\n"


def test_words_are_those_of_the_trainers_command_line():
    words = common.words_of({"val_tokens": 8, "windows": (1, 2)})
    assert words == ["--val-tokens", "8", "--windows", "(1, 2)"]
