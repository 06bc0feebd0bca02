"""Chapters 3 and 9: a micro-batch that does not fit into memory is worked out in passes, and the step stays the same."""
import numpy as np
import pytest
import torch

import ranks
import train_gpt
from helpers import NO_TABLE, RICH, byte_documents, refusal, tiny_config
from train_gpt import Runtime, Text, TrainLoader, with_passes_that_fit

LARGE = {**RICH, "micro_batch_tokens": 1024, "micro_batches": ((0.0, 2),), "val_tokens": 1024, "save_every": 0,
         "val_every": 0}
HALVES, QUARTERS = 512 + 192, 256 + 192  # and the longest segment


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """Training losses of a run whose micro-batches are not split."""
    values = {**LARGE, "data": str(corpus), "run_id": "whole"}
    run = ranks.train(tmp_path_factory.mktemp("whole"), values)
    assert run.code == 0 and "note: " not in run.stdout, run.stdout + run.stderr
    return values, run


def differs(run, whole):
    assert run.code == 0, run.stdout + run.stderr
    losses, expected = ([*it.train_losses.values(), it.result["val_loss"]] for it in (run, whole))
    assert len(losses) == 21
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


@pytest.mark.parametrize("world_size, length", [
    (1, QUARTERS), (2, HALVES), *(pytest.param(*case, marks=pytest.mark.long) for case in (
        (1, HALVES), (1, 192), (2, QUARTERS)))])
def test_passes_change_a_run_by_the_order_of_sums_alone(world_size, length, whole, tmp_path):
    values = {**whole[0], "pass_tokens": length, "run_id": "split"}
    assert differs(ranks.train(tmp_path, values, world_size=world_size), whole[1]) < 1e-5


@pytest.fixture
def room(monkeypatch):
    """room(tokens): memory suffices for passes of so many tokens of the large configuration, on each rank."""
    def set_room(tokens, world_size=1):
        runtime = Runtime("cpu")
        runtime.world_size = world_size
        parts, _ = train_gpt.memory_parts(train_gpt.Config(**LARGE, pass_tokens=tokens), runtime)
        monkeypatch.setattr(train_gpt, "available_memory", lambda device: sum(parts.values()))
    return set_room


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_run_without_memory_for_its_micro_batches_splits_them(world_size, whole, room, tmp_path):
    room(QUARTERS, world_size)
    run = ranks.train(tmp_path, {**whole[0], "run_id": "little"}, world_size=world_size)
    assert differs(run, whole[1]) < 1e-5
    log = (run.folder / "log.txt").read_text()
    assert f"\nnote: micro-batches are split into passes of {QUARTERS} tokens: " in log
    assert run.result["config"]["pass_tokens"] == QUARTERS and run.result["overrides"] == whole[1].result["overrides"]


@pytest.mark.parametrize("fits, length", [(1024, HALVES), pytest.param(QUARTERS, QUARTERS, marks=pytest.mark.long)])
def test_a_resumed_run_keeps_its_passes_or_takes_shorter_ones(fits, length, whole, room, tmp_path):
    room(HALVES)
    first = ranks.train(tmp_path, {**whole[0], "save_every": 18, "run_id": "again"})
    for name in ("result.json", "checkpoint.pt"):
        (first.folder / name).unlink()
    room(fits)
    run = ranks.train(tmp_path, {"run_id": "again", "resume": "auto"})
    assert differs(run, whole[1]) < 1e-5 and run.result["config"]["pass_tokens"] == length


def test_ranks_take_the_passes_of_the_one_with_the_least_memory(tmp_path, monkeypatch):
    def passes(runtime):
        config = train_gpt.Config(**LARGE)
        parts, _ = train_gpt.memory_parts(train_gpt.Config(**LARGE, pass_tokens=QUARTERS), runtime)
        train_gpt.available_memory = lambda device: sum(parts.values()) + 10**9 * (1 - runtime.rank)
        return with_passes_that_fit(config, runtime).pass_tokens
    assert ranks.on_ranks(2, passes) == [QUARTERS, QUARTERS]


def test_memory_that_suffices_for_no_pass_is_refused(whole, cli, monkeypatch):
    monkeypatch.setattr(train_gpt, "available_memory", lambda device: 100_000)
    assert "memory: " in refusal(cli(**{**whole[0], "run_id": "none"}))


@pytest.mark.parametrize("changes", [{"pass_tokens": 128}, {"pass_tokens": 2048}, {"pass_tokens": 200},
                                     {"pass_tokens": HALVES, "softmax_rows": 250}], ids=str)
def test_passes_that_cannot_be(changes):
    with pytest.raises(train_gpt.ConfigError, match="pass_tokens"):
        train_gpt.Config(**{**LARGE, **changes})


def test_sampled_softmax_is_not_split(room):
    room(QUARTERS)
    assert with_passes_that_fit(train_gpt.Config(**LARGE, softmax_rows=250), Runtime("cpu")).pass_tokens == 0


@pytest.mark.parametrize("length", [HALVES, QUARTERS, 192])
def test_every_token_counts_once_beside_its_whole_segment(length):
    config = train_gpt.Config(**{**LARGE, **NO_TABLE}, pass_tokens=length)
    shards = [np.array(byte_documents(20_000), dtype=np.uint16)]
    loaders = [TrainLoader(one, shards, Runtime("cpu"), index=None) for one in (
        config, tiny_config(**{**LARGE, **NO_TABLE}))]
    passes, wholes = (loader.next().micro_batches for loader in loaders)
    for loader in loaders:
        loader.close()
    assert len(wholes) == 2 and len(passes) > 3 and {len(it.inputs) for it in passes} == {length}
    for name in ("inputs", "targets"):
        cut, expected = (torch.cat([getattr(it, name)[it.span] for it in some]) for some in (passes, wholes))
        assert torch.equal(cut, expected)
    lengths = [torch.cat([(torch.arange(len(it.inputs)) - it.segment_start)[it.span] for it in some])
               for some in (passes, wholes)]
    assert torch.equal(*lengths)  # how far each token's segment reaches back
    for it in passes:
        assert torch.equal(it.counted.nonzero().flatten(), torch.arange(len(it.inputs))[it.span])
        assert 0 < it.span.stop <= length and (it.span.stop == length or it.segment_start[it.span.stop] == it.span.stop)
