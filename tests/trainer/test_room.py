"""Chapter 17: a run whose checkpoint would not fit onto the disk is refused before it starts."""

from types import SimpleNamespace

import pytest

import train_gpt
from helpers import refusal, tiny_config
from train_gpt import Runtime, Trainer


def said(config, world_size):
    """How large the checkpoint of so many ranks is to be."""
    runtime = Runtime("cpu")
    runtime.world_size = world_size
    return train_gpt.checkpoint_bytes(Trainer(config, runtime))


def test_a_checkpoint_is_about_as_large_as_is_said(rich_run):
    expected = said(train_gpt.config_of_checkpoint(rich_run.checkpoint()), 1)
    size = (rich_run.folder / "checkpoint.pt").stat().st_size
    assert expected < size < expected + 50_000  # a file has its own words for each tensor


def test_a_checkpoint_holds_the_parts_of_all_ranks():
    config = tiny_config(ngram_rows=100_000)
    alone = said(config, 1)
    assert alone > 100_000 * 33 * 4
    for world_size in (2, 3, 4):
        assert said(config, world_size) == pytest.approx(alone, rel=0.05)


@pytest.mark.parametrize("words", [[], ["--check"]], ids=str)
def test_a_run_without_room_is_refused_in_one_line(words, tiny, cli, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt, "checkpoint_bytes", lambda trainer: 2**20)
    monkeypatch.setattr(train_gpt.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    line = refusal(cli(*words, **tiny))
    assert "disk for a checkpoint: 0.00 GiB needed, 0.0 GiB free; make room" in line
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(train_gpt, "checkpoint_bytes", lambda trainer: 2**20 - 1)
    assert cli("--check", **tiny).code == 0
