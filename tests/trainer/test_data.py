"""Shards and corpora, and the loader's micro-batches."""

import dataclasses
import functools
import itertools
import os
import threading

import numpy as np
import pytest
import torch

import train_gpt
from helpers import (
    EOT,
    TINY,
    assert_bitwise,
    byte_documents,
    make_corpus,
    refusal,
    tiny_config,
    with_manifest,
    write_shard,
)
from ranks import on_ranks
from train_gpt import (
    ConfigError,
    NgramTable,
    Runtime,
    Text,
    TrainLoader,
    contiguous_passage,
    open_corpus,
    stack_passages,
)

# ----- shards


def test_a_corpus_joins_its_validation_shards(tmp_path):
    folder = make_corpus(tmp_path / "corpus", shards=3)
    extra = byte_documents(300)
    write_shard(folder / "tiny_val_000001.bin", extra)
    corpus = open_corpus(tiny_config(data=str(with_manifest(folder)), val_tokens=4096))
    assert len(corpus.shards) == 3
    assert corpus.val.tolist() == (byte_documents(4000, seed=99) + extra)[:4097]


TRAIN, SECOND, VAL = "tiny_train_000000.bin", "tiny_train_000001.bin", "tiny_val_000000.bin"


def cut_off(folder):
    (folder / TRAIN).write_bytes((folder / TRAIN).read_bytes()[:-10])


def change_token(path, at):
    content = bytearray(path.read_bytes())
    content[1024 + 2 * at] ^= 1
    path.write_bytes(content)


def replace_by(make, path):
    path.unlink()
    make(path)


def exchange(folder):
    one, other = folder / TRAIN, folder / SECOND
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def shorten_training(folder):
    for shard in folder.glob("*train*"):
        write_shard(shard, byte_documents(1000))


def remove(folder, split):
    for shard in folder.glob(f"*_{split}_*"):
        shard.unlink()


# What is done to a good corpus, and what the message must say. Afterwards the manifest is made to
# agree with what is wrong.
DAMAGE = {
    "truncated": (cut_off, [TRAIN, "header says 45000", "44995", "data/text.py"]),
    "header cut": (
        lambda path: (path / TRAIN).write_bytes(b"0" * 100),
        [TRAIN, "is cut"],
    ),
    "magic": (
        lambda path: write_shard(path / TRAIN, [EOT] * 100, magic=20240801),
        [TRAIN, "20240801", "not [20240520, 1]"],
    ),
    "no tokens": (lambda path: write_shard(path / TRAIN, []), [TRAIN, "header says 0"]),
    "fewer than there are": (
        lambda path: write_shard(path / TRAIN, byte_documents(45_000), count=44_000),
        [TRAIN, "header says 44000"],
    ),
    "beyond vocabulary": (
        lambda path: write_shard(path / TRAIN, [EOT, 300, *byte_documents(5000)]),
        [TRAIN, "300", "256", "--tokenizer"],
    ),
    "no train": (
        lambda path: remove(path, "train"),
        ["*_train_*.bin", "data/text.py", "--data"],
    ),
    "few train": (shorten_training, ["2,048", "1,536", "--steps", "--epochs"]),
    "few val": (
        lambda path: write_shard(path / VAL, byte_documents(1024)),
        ["1,024", "--val-tokens", "768"],
    ),
}
# The same, where the manifest stays as it was built, or is what is wrong.
NOT_AS_BUILT = {
    "one token changed": (
        lambda path: change_token(path / TRAIN, 20_000),
        [TRAIN, "sha256 is not the manifest's", "again"],
    ),
    "shards exchanged": (exchange, [TRAIN, "sha256 is not the manifest's"]),
    "a shard that the manifest lacks": (
        lambda path: (path / VAL).rename(path / "another_val_000000.bin"),
        ["another_val_000000.bin", "sha256 is not the manifest's"],
    ),
    "a pipe, for which nobody waits": (
        lambda path: replace_by(os.mkfifo, path / TRAIN),
        [TRAIN, "no file, and a shard is one"],
    ),
}


@pytest.mark.parametrize("damage", [*DAMAGE, *NOT_AS_BUILT])
def test_a_damaged_corpus_ends_in_one_line_and_status_2(damage, cli, tiny, tmp_path):
    folder = make_corpus(tmp_path / "corpus")
    act, words = {**DAMAGE, **NOT_AS_BUILT}[damage]
    act(folder)
    if damage in DAMAGE:
        with_manifest(folder)
    line = refusal(cli(**{**tiny, "data": str(folder)}))
    assert all(word in line for word in words), line
    assert not (tmp_path / "logs").exists()


def test_a_manifest_that_cannot_be_read_is_refused(corpus, tmp_path):
    config = tiny_config(data=str(tmp_path))
    for path in corpus.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "manifest.json").unlink()
    for content in (b"", b"[]", b"{}", b'{"shards": [{}]}', b"[" * 100_000, b"9" * 5000, b"\xff"):
        (tmp_path / "manifest.json").write_bytes(content)
        with pytest.raises(ConfigError, match="manifest.json: cannot be read .*; build it again"):
            open_corpus(config)


def test_a_run_is_resumed_on_the_corpus_that_it_began_with(cli, tiny, tmp_path):
    folder = make_corpus(tmp_path / "corpus")
    values = {**tiny, "steps": 2, "data": str(folder), "run_id": "first", "save_every": 1}
    assert cli(**values).code == 0
    (tmp_path / "logs/first/checkpoint.pt").unlink()
    change_token(folder / TRAIN, 7)
    line = refusal(cli(resume="first"))
    assert TRAIN in line and "sha256 is not the manifest's" in line
    with_manifest(folder)
    assert "manifest.json is not the one" in refusal(cli(resume="first"))
    (folder / "manifest.json").unlink()
    assert "manifest.json is not the one" in refusal(cli(resume="first"))


@pytest.mark.parametrize("share", [0, 0.9], ids=["all", "beside the index"])
def test_every_shard_that_a_run_reaches_is_checked_and_no_other(share, tmp_path):
    # Of one micro-batch each; beside an index, three of the first shard are left at most.
    folder = make_corpus(tmp_path / "corpus", train_tokens=14 * 500, shards=14)
    changes = {"steps": 5, "data": str(folder)}
    if share:
        write_shard(folder / TRAIN, byte_documents(5000))
        changes |= {"index_orders": (4,), "index_share": share}
    with_manifest(folder)
    change_token(folder / "tiny_train_000013.bin", 7)
    open_corpus(tiny_config(**changes))  # it takes ten of them
    for shard in (6, 7, 8):
        tokens = [*byte_documents(490), *range(300, 310)]
        write_shard(folder / f"tiny_train_{shard:06d}.bin", tokens)
    with pytest.raises(ConfigError, match="tiny_train_000006.bin: token id 309"):
        open_corpus(tiny_config(**changes))


def test_epochs_make_up_for_few_tokens(tmp_path):
    folder = make_corpus(tmp_path / "corpus", train_tokens=2_000, shards=1)
    config = tiny_config(data=str(folder), steps=4, micro_batches=3)
    with pytest.raises(ConfigError, match="--epochs"):
        open_corpus(config)
    open_corpus(dataclasses.replace(config, epochs=2))


# ----- the loader; the tokens of `countable` shards are all different, so that a token tells its
# ----- position

GPT2_EOT = 50256


def countable(tokens, first=0, seed=0, longest=300):
    """A shard of `tokens` tokens, of which the n-th is first + n, but for document starts."""
    shard = np.arange(first, first + tokens, dtype=np.uint16)
    starts = np.cumsum(np.random.default_rng(seed).integers(20, longest, size=tokens))
    shard[0] = GPT2_EOT
    shard[starts[starts < tokens - 2]] = GPT2_EOT
    return shard


def positions(micro_batch, first=0):
    """Where in its countable shard each input stands; a document start is told by its target."""
    inputs, targets = micro_batch.inputs.long().numpy(), micro_batch.targets.numpy()
    return np.where(inputs == GPT2_EOT, targets - 1, inputs) - first


def loader_config(rows=None, **changes):
    """A Config for countable shards, with four micro-batches a step.

    rows: {start: {field: value}} of a schedule's rows, where it has several.
    """
    values = {**TINY, "tokenizer": "gpt2", "micro_batches": 4, **changes}
    if rows:
        for name in set().union(*rows.values()):
            values.pop(name)
        values["stages"] = tuple({"start": start, **row} for start, row in rows.items())
    return train_gpt.with_values(train_gpt.TRACKS["mini"], values)


def load_all(config, shards, runtime=None, first_step=0, state=None):
    """Every Batch from first_step to the end of the run."""
    runtime = runtime or Runtime("cpu")
    plan = functools.partial(NgramTable(config, runtime).plan_step, group=runtime.loader_group)
    loader = TrainLoader(config, shards, runtime, plan, first_step, state)
    try:
        return [loader.next_batch() for _ in range(first_step, config.steps)]
    finally:
        loader.close()


def load_on_rank(runtime, config, shards):
    """[(stack of micro-batches, signs of their rows, tokens, state)] of a rank's batches."""
    batches = load_all(config, shards, runtime)
    return [(tuple(batch.stack), batch.rows.signs, batch.tokens, batch.state) for batch in batches]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_world_sizes_share_out_the_same_micro_batches(world_size):
    config = loader_config(steps=3, micro_batches=12)
    shards = [countable(10_000)]
    alone = load_all(config, shards)
    for rank, parts in enumerate(on_ranks(world_size, load_on_rank, config, shards)):
        for whole, (stack, signs, tokens, state) in zip(alone, parts, strict=True):
            theirs = [*whole.stack, whole.rows.signs]
            for one, other in zip([*stack, signs], theirs, strict=True):
                assert torch.equal(one, other[rank::world_size])
            assert state == whole.state and tokens == whole.tokens == 12 * 256


def test_an_epoch_covers_each_shard_exactly_once():
    firsts = (0, 10_000, 20_000)
    lengths = (5000, 4001, 3333)
    shards = [countable(*it) for it in zip(lengths, firsts, strict=True)]
    shards[1][0] = 10_000  # begins inside a document
    counts = [(length - 1) // 256 for length in lengths]
    # Pieces of the second cap, which the first one splits further.
    caps = {0.0: {"document_cap": 50}, 0.3: {"document_cap": 300}}
    config = loader_config(caps, steps=sum(counts), micro_batches=1)
    stream = (batch for each in load_all(config, shards) for batch in each.micro_batches())
    for shard, count, first in zip(shards, counts, firsts, strict=True):
        micro_batches = list(itertools.islice(stream, count))
        seen = np.concatenate([positions(micro_batch, first) for micro_batch in micro_batches])
        # Each position at most once, and all but the end that fills no micro-batch.
        assert len(np.unique(seen)) == len(seen) == count * 256
        assert len(shard) - 1 - len(seen) < 256
        assert not (np.diff(seen) == 1).all()  # pieces are shuffled
        for micro_batch in micro_batches:
            where = positions(micro_batch, first)
            assert np.array_equal(shard[where], micro_batch.inputs.numpy())
            assert np.array_equal(shard[where + 1], micro_batch.targets.numpy())


def test_the_order_depends_on_the_seed_and_the_epoch_alone():
    shards = [countable(3000)]

    def seen(seed):
        batches = load_all(loader_config(steps=22, micro_batches=1, epochs=2, seed=seed), shards)
        return np.concatenate([positions(*batch.micro_batches()) for batch in batches])

    assert np.array_equal(seen(1), seen(1)) and not np.array_equal(seen(1), seen(2))
    first, second = np.split(seen(1), 2)
    assert len(np.unique(first)) == len(np.unique(second)) == 11 * 256
    assert not np.array_equal(first, second)


def segments(micro_batch):
    """[(start, end)] of the segments, after a comparison of segment_start and segment_bounds."""
    start = micro_batch.segment_start.numpy()
    length = len(start)
    first = np.flatnonzero(start == np.arange(length))
    assert first[0] == 0 and (np.diff(start) >= 0).all() and np.isin(start, first).all()
    bounds = micro_batch.segment_bounds.numpy()
    assert np.array_equal(bounds[: len(first)], first) and (bounds[len(first) :] == length).all()
    assert bounds[-1] == length
    return list(itertools.pairwise([*first, length]))


def test_segments_respect_the_cap_in_force_and_never_join_documents():
    caps = {0.0: 64, 0.5: 160, 0.75: 100}
    config = loader_config({start: {"document_cap": cap} for start, cap in caps.items()}, steps=8)
    longest = []
    for step, batch in enumerate(load_all(config, [countable(12_000, longest=600)])):
        lengths = []
        for micro_batch in batch.micro_batches():
            where = positions(micro_batch)
            for low, high in segments(micro_batch):
                lengths.append(high - low)
                assert (np.diff(where[low:high]) == 1).all()
                assert GPT2_EOT not in micro_batch.inputs[low + 1 : high]
        assert max(lengths) <= train_gpt.training_phase(config, step).max_segment
        longest.append(max(lengths))
    assert longest == [64] * 4 + [160] * 2 + [100] * 2


def test_a_stream_goes_on_from_the_state_of_any_step():
    shards = [countable(2100, longest=900), countable(2500, first=10_000, longest=900)]
    rows = {0.0: {"micro_batches": 2}, 0.5: {"micro_batches": 3}}
    config = loader_config(rows, steps=8, document_cap=150, epochs=2)
    whole = load_all(config, shards)
    assert any(batch.state["offset"] for batch in whole) and whole[-1].state["shard"] >= 1
    assert [batch.tokens // 256 for batch in whole] == [2] * 4 + [3] * 4
    for step in range(1, config.steps):
        rest = load_all(config, shards, first_step=step, state=whole[step - 1].state)
        for one, other in zip(rest, whole[step:], strict=True):
            assert_bitwise(tuple(one.stack), tuple(other.stack))
            assert_bitwise(vars(one.rows), vars(other.rows))
            assert one.state == other.state


def test_an_error_of_the_loading_thread_reaches_the_training_loop_and_closing_ends_it(monkeypatch):
    """A thread that is inside torch when the interpreter goes away aborts the process."""

    def broken(*words, **options):
        raise ConfigError("what only the thread knows")

    before = set(threading.enumerate())
    monkeypatch.setattr(NgramTable, "plan_step", broken)
    with pytest.raises(ConfigError, match="what only the thread knows"):
        load_all(tiny_config(), [np.full(3000, EOT, dtype=np.uint16)])
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("softmax_rows, is_refused", [(201, False), (200, True), (0, False)])
def test_a_softmax_without_a_row_for_the_rest_of_the_vocabulary_is_refused(
    softmax_rows, is_refused
):
    """Of one micro-batch, which has 200 different targets."""
    tokens = np.array([EOT, *(np.arange(256) % 200)], dtype=np.uint16)
    changes = {"steps": 1, "micro_batches": 1, "document_cap": 256, "softmax_rows": softmax_rows}
    if is_refused:
        with pytest.raises(ConfigError, match="softmax_rows=200: .*step 0 has 200 different"):
            load_all(tiny_config(**changes), [tokens])
    else:
        (batch,) = load_all(tiny_config(**changes), [tokens])
        assert batch.stack.targets.unique().tolist() == [*range(200)]


@pytest.mark.parametrize("documents, room", [(1, 64), (63, 64), (64, 128), (255, 256)])
def test_bounds_have_room_for_63_documents_or_more_powers_of_two(documents, room):
    """They are all starts in their order, then the end as often as there is room for: attention
    kernels get no other shape."""
    tokens = np.ones(257, dtype=np.uint16)
    tokens[np.linspace(0, 255, documents).round().astype(int)] = EOT
    text = Text(tokens, EOT)
    passages = [contiguous_passage(text, 0, 256), contiguous_passage(text, 0, 256)]
    stack = stack_passages(passages, 256, torch.device("cpu"))
    starts = np.flatnonzero(tokens == EOT).tolist()
    assert stack.segment_bounds.dtype == torch.int32
    assert stack.segment_bounds.tolist() == [starts + [256] * (room - documents)] * 2
