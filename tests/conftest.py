"""Fixtures: a tiny corpus, the command line in this process, and training runs that several tests
read."""

import functools
import os
import signal
import sys
from pathlib import Path

# Before torch is imported: bitwise comparisons with child processes need it.
os.environ["OMP_NUM_THREADS"] = "1"
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # a launcher's: this process is alone
    os.environ.pop(name, None)
# Background jobs of a shell ignore SIGINT, and hand that down.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The repository stands before this folder, which has some of the same names.
TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

import pytest  # noqa: E402
import torch  # noqa: E402

import helpers  # noqa: E402
import ranks  # noqa: E402
import train_gpt  # noqa: E402

SECONDS, SLOW_SECONDS = 240, 600  # after which a test hangs


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the tests that are marked `slow`, too")


def pytest_collection_modifyitems(config, items):
    """Leave out what was not asked for; pyproject.toml says what the mark means."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS if item in slow else SECONDS))
    if not config.getoption("--all"):
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder with two training shards and one of validation; not to be written to."""
    return helpers.make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def tiny(corpus):
    """Configuration values of a four-step run on the tiny corpus."""
    return {**helpers.TINY, "data": str(corpus)}


@pytest.fixture(scope="session")
def rich(corpus):
    """Configuration values of a twenty-step run in which every schedule changes, with all kinds of
    rows and layers."""
    return {**helpers.RICH, "data": str(corpus)}


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """The command line without a new process: cli(*words) runs main() in tmp_path, without a plot
    at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt, "plot", lambda folder: "")
    rng = torch.get_rng_state()

    def run(*words, main=train_gpt.main, **values):
        capsys.readouterr()
        code = main([*map(str, words), *helpers.arguments(values)])
        out, err = capsys.readouterr()
        run_id = values.get("run_id") or values.get("resume", "")
        return helpers.Run(code, out, err, tmp_path / "logs" / str(run_id))

    yield run
    torch.set_rng_state(rng)


@pytest.fixture(scope="session")
def rich_run_of(rich, tmp_path_factory):
    """rich_run_of(world size, before): the twenty steps, with a checkpoint after ten, on that many
    ranks, each of which first calls `before`; each is run once."""

    @functools.cache
    def run_of(world_size, before=None):
        folder = tmp_path_factory.mktemp(f"ranks{world_size}")
        values = {**rich, "run_id": "rich"}
        run = ranks.train(folder, values, world_size=world_size, before=before)
        assert run.code == 0, run.stdout + run.stderr
        return run

    return run_of


@pytest.fixture(scope="session")
def rich_run(rich_run_of):
    """The twenty steps on one rank."""
    return rich_run_of(1)
