"""Chapters 3 and 4: shards, the loader, hashed n-gram rows and the row plan of one process."""
import dataclasses
import threading

import numpy as np
import pytest
import torch

import train_gpt
from helpers import (EOT, NO_TABLE, byte_documents, documents_of, make_corpus, make_trainer, ngram_rows, refusal,
                     slow_key, slow_row, tiny_config, with_manifest, write_shard)
from optimizer_cases import batch_of
from ranks import on_ranks
from train_gpt import ConfigError, Runtime, TrainLoader, open_corpus, open_shard, place_contiguous, plan_rows

# ----- shards


def test_a_shard_is_read_back(tmp_path):
    tokens = byte_documents(500)
    assert open_shard(write_shard(tmp_path / "x.bin", tokens)).tolist() == tokens


def test_a_corpus_joins_its_validation_shards(tmp_path):
    folder = make_corpus(tmp_path / "corpus", shards=3)
    write_shard(folder / "tiny_val_000001.bin", byte_documents(300))
    with_manifest(folder)
    train, _, val = open_corpus(tiny_config(data=str(folder), val_tokens=4096))
    assert len(train) == 3
    joined = np.concatenate([open_shard(path) for path in sorted(folder.glob("*_val_*"))])
    assert val.tolist() == joined[:4097].tolist() and len(joined) == 4300


TRAIN, SECOND, VAL = "tiny_train_000000.bin", "tiny_train_000001.bin", "tiny_val_000000.bin"

# What is done to a good corpus, and what the message must say.
DAMAGE = {
    "truncated": (lambda path: (path / TRAIN).write_bytes((path / TRAIN).read_bytes()[:-10]),
                  [TRAIN, "header says", "truncated", "data/text.py"]),
    "longer": (lambda path: (path / TRAIN).write_bytes((path / TRAIN).read_bytes() + b"ab"),
               [TRAIN, "header says"]),
    "half a token": (lambda path: (path / VAL).write_bytes((path / VAL).read_bytes() + b"a"),
                     [VAL, "header says"]),
    "header cut": (lambda path: (path / TRAIN).write_bytes(b"0" * 100),
                   [TRAIN, "100 bytes", "1024-byte header"]),
    "empty file": (lambda path: (path / TRAIN).write_bytes(b""), [TRAIN, "0 bytes", "1024-byte header"]),
    "magic": (lambda path: write_shard(path / TRAIN, [EOT] * 100, magic=20240801),
              [TRAIN, "magic 20240801", "expected 20240520"]),
    "version": (lambda path: write_shard(path / VAL, [EOT] * 100, version=7),
                [VAL, "version 7", "expected 1"]),
    "no tokens": (lambda path: write_shard(path / TRAIN, []), [TRAIN, "no tokens"]),
    "negative count": (lambda path: write_shard(path / TRAIN, [EOT] * 100, count=-100),
                       [TRAIN, "header says -100"]),
    "beyond vocabulary": (lambda path: write_shard(path / TRAIN, [EOT, 300, *byte_documents(5000)]),
                          [TRAIN, "300", "0 to 256", "--tokenizer"]),
    "beyond vocabulary in val": (lambda path: write_shard(path / VAL, [*byte_documents(5000), 50256]),
                                 [VAL, "50256", "0 to 256", "--tokenizer"]),
    "no train": (lambda path: [shard.unlink() for shard in path.glob("*_train_*")],
                 ["*_train_*.bin", "data/text.py", "--data"]),
    "no val": (lambda path: (path / VAL).unlink(), ["*_val_*.bin", "data/text.py", "--data"]),
    "no folder": (lambda path: path.rename(path.with_name("elsewhere")),
                  ["*_train_*.bin", "data/text.py", "--data"]),
    "few train": (lambda path: [write_shard(shard, byte_documents(1000)) for shard in path.glob("*train*")],
                  ["2,048", "1,536", "--steps", "--epochs"]),
    "few val": (lambda path: write_shard(path / VAL, byte_documents(1024)),
                ["1,024", "--val-tokens", "768"]),
    "another shard": (lambda path: write_shard(path / TRAIN, byte_documents(45_000, seed=7)),
                      [TRAIN, "sha256 is not the manifest's", "again"]),
    "one token changed": (lambda path: change_token(path / TRAIN, 20_000), [TRAIN, "sha256 is not the manifest's"]),
    "one validation token changed": (lambda path: change_token(path / VAL, 9), [VAL, "sha256 is not the manifest's"]),
    "shorter, with a header that says so": (lambda path: write_shard(path / TRAIN, byte_documents(44_000)),
                                            [TRAIN, "sha256 is not the manifest's"]),
    "shards exchanged": (lambda path: exchange(path / TRAIN, path / SECOND),
                         [TRAIN, "sha256 is not the manifest's"]),
    "a shard that the manifest lacks": (lambda path: (path / VAL).rename(path / "another_val_000000.bin"),
                                        ["another_val_000000.bin", "sha256 is not the manifest's"]),
    **{f"manifest {text[:12]}": (lambda path, text=text: (path / "manifest.json").write_text(text),
                                 [TRAIN, "sha256 is not the manifest's"])
       for text in ("", "[]", "{}", '{"shards": [{}]}', '{"shards": {"file": 1}}', "[" * 100_000)},
}
AS_BUILT = {"another shard", "one token changed", "one validation token changed", "shorter, with a header that says so",
            "shards exchanged", "a shard that the manifest lacks", *(name for name in DAMAGE if "manifest " in name)}


def change_token(path, at):
    content = bytearray(path.read_bytes())
    content[1024 + 2 * at] ^= 1
    path.write_bytes(content)


def exchange(one, other):
    contents = one.read_bytes(), other.read_bytes()
    for path, content in zip((other, one), contents):
        path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_corpus_ends_in_one_line_and_status_2(damage, cli, tiny, tmp_path):
    folder = make_corpus(tmp_path / "corpus")
    act, words = DAMAGE[damage]
    act(folder)
    if damage not in AS_BUILT and folder.exists():
        with_manifest(folder)  # which agrees with what is wrong
    run = cli(**{**tiny, "data": str(folder)})
    line = refusal(run)
    for word in words:
        assert word in line
    assert not (tmp_path / "logs").exists()


def test_shards_that_a_run_does_not_reach_are_not_read(cli, tiny, tmp_path):
    folder = make_corpus(tmp_path / "corpus")
    change_token(folder / SECOND, 7)
    run = cli(**{**tiny, "data": str(folder), "run_id": "first"})
    assert run.code == 0, run.stdout


def test_a_corpus_without_a_manifest_is_taken_as_it_is(cli, tiny, tmp_path):
    folder = make_corpus(tmp_path / "corpus")
    (folder / "manifest.json").unlink()
    run = cli(**{**tiny, "data": str(folder), "run_id": "foreign"})
    assert run.code == 0 and "data:none shards:unknown backends:" in run.stdout


@pytest.mark.parametrize("change, words", [
    (lambda folder: change_token(folder / TRAIN, 7), [TRAIN, "sha256 is not the manifest's"]),
    (lambda folder: with_manifest(change_token(folder / TRAIN, 7) or folder), ["manifest.json is not the one"]),
    (lambda folder: (folder / "manifest.json").unlink(), ["manifest.json is not the one", "none"])])
def test_a_run_is_resumed_on_the_corpus_that_it_began_with(change, words, cli, tiny, tmp_path):
    folder = make_corpus(tmp_path / "corpus")
    values = {**tiny, "data": str(folder), "run_id": "first", "save_every": 2}
    assert cli(**values).code == 0
    (tmp_path / "logs/first/checkpoint.pt").unlink()
    change(folder)
    line = refusal(cli(resume="first"))
    assert all(word in line for word in words), line


@pytest.mark.parametrize("index", [{}, {"index_orders": (4,), "index_share": 0.9}], ids=["all", "beside the index"])
def test_every_shard_that_a_run_reaches_is_checked(index, cli, tiny, tmp_path):
    folder = make_corpus(tmp_path / "corpus", train_tokens=12 * 500, shards=12)  # one micro-batch each
    if index:  # which leaves three micro-batches of the first shard at most
        write_shard(folder / TRAIN, byte_documents(5000))
    for shard in (6, 7, 8):
        write_shard(folder / f"tiny_train_{shard:06d}.bin", [*byte_documents(490), *range(300, 310)])
    with_manifest(folder)
    run = cli(**{**tiny, "data": str(folder), "steps": 5, **index})  # takes ten of them
    line = refusal(run)
    assert "tiny_train_000006.bin: token id 309" in line


def test_epochs_make_up_for_few_tokens(tmp_path):
    folder = make_corpus(tmp_path / "corpus", train_tokens=2_000, shards=1)
    config = tiny_config(data=str(folder), steps=4, micro_batches=((0.0, 3),))
    with pytest.raises(ConfigError, match="--epochs"):
        open_corpus(config)
    open_corpus(dataclasses.replace(config, epochs=2))


# ----- the loader; the tokens of `countable` shards are all different, so that a token tells its place

GPT2_EOT = 50256


def countable(tokens, first=0, seed=0, longest=300):
    """A shard whose n-th token is first + n, but for document starts. Its length is about `tokens`."""
    shard = np.arange(first, first + tokens, dtype=np.uint16)
    starts = np.cumsum(np.random.default_rng(seed).integers(20, longest, size=tokens))
    shard[0] = GPT2_EOT
    shard[starts[starts < tokens - 2]] = GPT2_EOT
    return shard


def places(batch_inputs, batch_targets, first=0):
    """Index in its countable shard of each input; a document start is told by its target."""
    inputs, targets = batch_inputs.long().numpy(), batch_targets.numpy()
    return np.where(inputs == GPT2_EOT, targets - 1, inputs) - first


def loader_config(**changes):
    return tiny_config(tokenizer="gpt2", **{"micro_batches": ((0.0, 4),), **changes})


def load_all(config, shards, runtime=None, first_step=0, state=None):
    """Every Batch from first_step to the end of the run."""
    loader = TrainLoader(config, shards, runtime or Runtime("cpu"), first_step, state)
    try:
        return [loader.next() for _ in range(first_step, config.steps)]
    finally:
        loader.close()


def same_micro_batch(one, other):
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one)]
    return all(torch.equal(*pair) if torch.is_tensor(pair[0]) else pair[0] == pair[1] for pair in pairs)


def load_on_rank(runtime, config, shards):
    """[(micro-batches, state)] of the batches that a rank gets."""
    return [(batch.micro_batches, batch.state) for batch in load_all(config, shards, runtime)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_world_sizes_share_out_the_same_micro_batches(world_size):
    config = loader_config(steps=5)
    shards = [countable(6000)]
    alone = load_all(config, shards)
    for rank, parts in enumerate(on_ranks(world_size, load_on_rank, config, shards)):
        for whole, (micro_batches, state) in zip(alone, parts, strict=True):
            assert len(micro_batches) == 4 // world_size
            for mine, theirs in zip(micro_batches, whole.micro_batches[rank::world_size], strict=True):
                assert same_micro_batch(mine, theirs)
            assert state == whole.state


@pytest.mark.parametrize("seed", [1, 2])
def test_an_epoch_covers_each_shard_exactly_once(seed):
    shards = [countable(5000, seed=1), countable(4001, first=10_000, seed=2),
              countable(3333, first=20_000, seed=3)]
    shards[1][0] = 10_000  # begins inside a document
    micro_batches = [(len(shard) - 1) // 256 for shard in shards]
    config = loader_config(steps=sum(micro_batches), micro_batches=((0.0, 1),), seed=seed)
    batches = [batch.micro_batches[0] for batch in load_all(config, shards)]
    low = 0
    for shard, count, first in zip(shards, micro_batches, (0, 10_000, 20_000)):
        part, low = batches[low:low + count], low + count
        seen = np.concatenate([places(batch.inputs, batch.targets, first) for batch in part])
        # Each place at most once, and all but the end that fills no micro-batch.
        assert len(np.unique(seen)) == len(seen) == count * 256
        assert len(shard) - 1 - len(seen) < 256
        assert not (np.diff(seen) == 1).all()  # pieces are shuffled
        for batch in part:
            where = places(batch.inputs, batch.targets, first)
            assert np.array_equal(shard[where], batch.inputs.numpy())
            assert np.array_equal(shard[where + 1], batch.targets.numpy())


def test_a_second_epoch_has_another_order():
    shards = [countable(3000)]
    config = loader_config(steps=22, micro_batches=((0.0, 1),), epochs=2)
    seen = [places(b.micro_batches[0].inputs, b.micro_batches[0].targets) for b in load_all(config, shards)]
    first, second = np.concatenate(seen[:11]), np.concatenate(seen[11:])
    assert len(np.unique(first)) == len(np.unique(second)) == 11 * 256
    assert not np.array_equal(first, second)


def segments(micro_batch):
    """[(start, end)] of the attention segments, after checking segment_start against segment_bounds."""
    start = micro_batch.segment_start.numpy()
    length = len(start)
    first = np.flatnonzero(start == np.arange(length))
    assert first[0] == 0 and (np.diff(start) >= 0).all() and np.isin(start, first).all()
    bounds = micro_batch.segment_bounds.numpy()
    assert np.array_equal(bounds[:len(first)], first) and (bounds[len(first):] == length).all()
    assert bounds[-1] == length
    return list(zip(first, [*first[1:], length]))


def test_segments_respect_the_cap_in_force_and_never_join_documents():
    shards = [countable(12_000, longest=600)]
    caps = ((0.0, 64), (0.5, 160), (0.75, 100))
    config = loader_config(steps=8, document_cap=caps)
    longest = []
    for step, batch in enumerate(load_all(config, shards)):
        cap = train_gpt.at_step(caps, step, config)
        lengths = []
        for micro_batch in batch.micro_batches:
            where = places(micro_batch.inputs, micro_batch.targets)
            for low, high in segments(micro_batch):
                lengths.append(high - low)
                assert (np.diff(where[low:high]) == 1).all()
                assert GPT2_EOT not in micro_batch.inputs[low + 1:high]
        assert max(lengths) <= cap
        longest.append(max(lengths))
    assert longest == [64] * 4 + [160] * 2 + [100] * 2


def test_the_schedule_of_micro_batches_is_followed():
    config = loader_config(steps=4, micro_batches=((0.0, 2), (0.5, 6)))
    batches = load_all(config, [countable(6000)])
    assert [len(batch.micro_batches) for batch in batches] == [2, 2, 6, 6]


def test_the_order_depends_on_the_seed_alone():
    shards = [countable(5000)]
    def inputs(seed):
        batches = load_all(loader_config(steps=4, seed=seed), shards)
        return torch.cat([micro_batch.inputs for batch in batches for micro_batch in batch.micro_batches])
    assert torch.equal(inputs(1), inputs(1))
    assert not torch.equal(inputs(1), inputs(2))


def test_a_stream_goes_on_from_the_state_of_any_step():
    shards = [countable(2100, longest=900), countable(2500, first=10_000, longest=900)]
    config = loader_config(steps=9, micro_batches=((0.0, 2),), document_cap=((0.0, 150),), epochs=2)
    whole = load_all(config, shards)
    assert any(batch.state["offset"] for batch in whole) and whole[-1].state["shard"] >= 1
    for step in range(1, config.steps):
        rest = load_all(config, shards, first_step=step, state=whole[step - 1].state)
        for one, other in zip(rest, whole[step:], strict=True):
            assert all(map(same_micro_batch, one.micro_batches, other.micro_batches))
            assert one.state == other.state


def test_an_error_of_the_loading_thread_reaches_the_training_loop(monkeypatch):
    def broken(*words):
        raise ConfigError("what only the thread knows")
    monkeypatch.setattr(train_gpt, "assemble", broken)
    loader = TrainLoader(tiny_config(), [np.full(3000, EOT, dtype=np.uint16)], Runtime("cpu"))
    with pytest.raises(ConfigError, match="what only the thread knows"):
        loader.next()
    loader.close()


@pytest.mark.parametrize("documents, room", [(1, 64), (63, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256)])
def test_bounds_have_room_for_64_documents_or_the_next_power_of_two(documents, room):
    """All starts in their order, then the end: an attention kernel gets as many segments as there is room for."""
    tokens = np.ones(257, dtype=np.uint16)
    tokens[np.linspace(0, 255, documents).round().astype(int)] = EOT
    config = tiny_config(**NO_TABLE)
    place = place_contiguous(train_gpt.Text(tokens, config), 0, config)
    nothing = np.zeros((256, 0), np.int32)
    bounds = train_gpt.assemble(place, nothing, nothing.astype(np.float32), torch.device("cpu")).segment_bounds
    assert bounds.dtype == torch.int32 and len(bounds) == room + 1
    assert bounds.tolist() == np.flatnonzero(tokens == EOT).tolist() + [256] * (room + 1 - documents)


def test_attention_is_told_the_longest_segment_that_it_can_get():
    """The document cap in force while it trains, as far as a micro-batch goes; in validation, which cuts no piece, T."""
    config = tiny_config(steps=8, document_cap=((0.0, 64), (0.5, 1000)), val_batch_tokens=512)
    assert [train_gpt.phase_at(config, step).cap for step in range(8)] == [64] * 4 + [256] * 4
    trainer = make_trainer(steps=8, document_cap=((0.0, 64), (0.5, 1000)), val_batch_tokens=512, **NO_TABLE)
    told, attend = [], trainer.model.attend
    def asked(q, k, v, micro_batch, cap, bias, window, scale):
        told.append(cap)
        return attend(q, k, v, micro_batch, cap, train_gpt.blocked_bias(micro_batch.segment_start, window, q.dtype),
                      window, scale)
    trainer.model.attend = asked
    tokens = np.ones(513, dtype=np.uint16)
    for step in (0, 4):
        trainer.step(step, batch_of(trainer, tokens[:257]))
    trainer.score(8, train_gpt.Text(tokens, trainer.config), 0)
    assert told == [64] * 2 + [256] * 2 + [512] * 2


def test_closing_the_loader_ends_its_thread():
    """One that is inside torch when the interpreter goes away aborts the process."""
    before = set(threading.enumerate())
    loader = TrainLoader(loader_config(steps=5), [countable(6000)], Runtime("cpu"))
    loader.next()
    loader.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("orders", [(2, 3, 4, 5, 6), (9,), ()])
@pytest.mark.parametrize("low", [0, 256, 300, 1024])
def test_contiguous_micro_batches(low, orders):
    config = tiny_config(**{**NO_TABLE, "ngram_orders": orders})
    tokens = np.asarray(byte_documents(2000), dtype=np.uint16)
    place = place_contiguous(train_gpt.Text(tokens, config), low, config)
    rows, signs = train_gpt.table_rows(place, config, train_gpt.TextIndex(config))
    micro_batch = train_gpt.assemble(place, rows, signs, torch.device("cpu"))
    assert np.array_equal(micro_batch.inputs, tokens[low:low + 256])
    assert np.array_equal(micro_batch.targets, tokens[low + 1:low + 257])
    starts = [start - low for start in range(low, low + 256) if start == low or tokens[start] == EOT]
    assert [start for start, _ in segments(micro_batch)] == starts
    # The n-grams know the whole document, also what lies before this micro-batch.
    expected = ngram_rows(tokens, np.arange(low, low + 256), orders, config.ngram_rows)
    assert np.array_equal(rows, expected[0]) and np.array_equal(signs, expected[1])


# ----- hashed n-gram rows

def slow_ngram_rows(tokens, position, document_start, orders, rows):
    """ngram_rows with Python's integers, from the definition."""
    found = [[slow_row(slow_key(tokens[max(start, at - order + 1):at + 1]), column, rows)
              for column, order in enumerate(orders)] for at, start in zip(position, document_start)]
    ids, signs = zip(*(zip(*each) for each in found))
    return [list(each) for each in ids], [list(each) for each in signs]


@pytest.mark.parametrize("orders", [(2, 3, 4, 5, 6), (2,), (5, 2), (32, 3)])
@pytest.mark.parametrize("rows", [1, 1000, 2**19, 2**31 - 1])
def test_ngram_rows_against_python_integers(orders, rows):
    tokens = np.asarray(byte_documents(300), dtype=np.uint16)
    position = np.random.default_rng(0).permutation(300)
    start = documents_of(tokens)[position]
    ids, signs = ngram_rows(tokens, position, orders, rows)
    assert ids.dtype == np.int32 and signs.dtype == np.float32
    assert ids.min() >= 0 and ids.max() < rows
    slow_ids, slow_signs = slow_ngram_rows(tokens, position, start, orders, rows)
    assert ids.tolist() == slow_ids and signs.tolist() == slow_signs


def test_ngram_rows_read_neither_other_documents_nor_the_future():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, EOT, size=400).astype(np.uint16)
    tokens[[0, 150, 260]] = EOT
    orders = tuple(range(2, 33))
    position = np.arange(400)
    ids, signs = ngram_rows(tokens, position, orders, 2**31 - 1)
    noise = (tokens + rng.integers(1, 200, size=400).astype(np.uint16)) % EOT
    for low, high in ((150, 260), (260, 400)):
        before = np.where(position < low, noise, tokens)  # other documents in front
        other = ngram_rows(before, position, orders, 2**31 - 1)
        assert np.array_equal(other[0][low:high], ids[low:high])
        assert np.array_equal(other[1][low:high], signs[low:high])
    for at in (0, 1, 149, 150, 200):
        after = np.where(position > at, noise, tokens)
        other = ngram_rows(after, position, orders, 2**31 - 1)
        assert np.array_equal(other[0][:at + 1], ids[:at + 1])
        assert np.array_equal(other[1][:at + 1], signs[:at + 1])
    # The row of order n changes with each of its n tokens, and with no other.
    for back in range(8):
        changed = tokens.copy()
        changed[220 - back] = (int(tokens[220 - back]) + 1) % EOT
        other = ngram_rows(changed, position, orders, 2**31 - 1)
        assert (other[0][220] != ids[220]).tolist() == [back < order for order in orders]


def test_every_order_has_a_hash_and_signs_of_its_own():
    orders = tuple(range(2, 33))
    same = np.full(200, 7, dtype=np.uint16)  # one token again and again: n-grams of all orders look alike
    position = np.arange(200)
    ids, signs = ngram_rows(same, position, orders, 2**31 - 1)
    for at in (0, 1, 10, 199):  # at a document's start they have the same tokens
        assert len(set(ids[at].tolist())) == len(orders)
    assert (ids[40:] == ids[40]).all() and (signs[40:] == signs[40]).all()
    tokens = np.random.default_rng(3).integers(0, EOT, size=20_000).astype(np.uint16)
    ids, signs = ngram_rows(tokens, np.arange(20_000), orders, 1000)
    agree = signs.T @ signs / len(signs)
    assert abs(agree - np.eye(len(orders))).max() < 6 / 20_000 ** 0.5  # six standard deviations
    assert abs(signs.mean(0)).max() < 6 / 20_000 ** 0.5
    for column in range(1, len(orders)):
        assert (ids[:, column] == ids[:, column - 1]).mean() < 0.005


def test_the_loaders_ngrams_read_whole_documents_and_no_others():
    """A piece of a document knows the tokens before it, whatever was laid in front of it."""
    shard = countable(6000)
    config = loader_config(steps=5, document_cap=((0.0, 50),), **{**NO_TABLE, "ngram_orders": (2, 5, 17)})
    for batch in load_all(config, [shard]):
        for micro_batch in batch.micro_batches:
            where = places(micro_batch.inputs, micro_batch.targets)
            ids, signs = ngram_rows(shard, where, config.ngram_orders, config.ngram_rows, tokenizer=config.tokenizer)
            assert np.array_equal(micro_batch.slots.numpy(), ids) and np.array_equal(micro_batch.signs.numpy(), signs)


def test_rows_and_signs_are_spread_evenly():
    tokens = np.random.default_rng(2).integers(0, EOT, size=40_000).astype(np.uint16)
    ids, signs = ngram_rows(tokens, np.arange(40_000), (4, 5), 100)
    for column in range(2):
        counts = np.bincount(ids[:, column], minlength=100)
        assert abs(counts - 400).max() < 6 * 20  # six standard deviations
        assert abs(signs[:, column].mean()) < 6 / 200
        # The sign tells n-grams of one row apart, so it must not follow from the row.
        means = [signs[ids[:, column] == row, column].mean() for row in range(100)]
        assert max(map(abs, means)) < 6 / 20


# ----- the row plan of one process; test_ngram_table.py has those of several

def random_reads(count, orders, rows, seed=0):
    """Row ids (count, orders) with repetitions, and their signs."""
    rng = np.random.default_rng(seed)
    return (rng.integers(0, rows, size=(count, orders)).astype(np.int32),
            rng.choice([-1.0, 1.0], size=(count, orders)).astype(np.float32))


def reads_of(plan, rows):
    """{row: [(token, sign), ...]} of a RowPlan of one process, which reads the distinct `rows`."""
    lows = plan.offsets.tolist()
    pairs = list(zip(plan.token.tolist(), plan.signs.tolist(), strict=True))
    return {row: pairs[low:high] for row, low, high in zip(rows, lows, [*lows, len(pairs)][1:], strict=True)}


@pytest.mark.parametrize("comms", [{"ngram_comms": "replicated"}, {"ngram_comms": "sharded"},
                                   {"ngram_comms": "sharded", "ngram_host": True}], ids=str)
@pytest.mark.parametrize("count, orders", [(60, 1), (60, 3), (60, 0), (0, 3)])
def test_plan_rows_against_a_dict(count, orders, comms):
    rows, signs = random_reads(count, orders, 40)
    expected = {}
    for token in range(count):
        for column in range(orders):
            expected.setdefault(int(rows[token, column]), []).append((token, float(signs[token, column])))
    plan, slots = plan_rows(rows, signs, tiny_config(**comms), Runtime("cpu"))
    assert reads_of(plan, sorted(expected)) == expected
    assert plan.owned.tolist() == plan.asked.tolist() == sorted(expected)
    assert plan.send == plan.receive == [len(expected)] and not plan.merge and not plan.updated
    assert slots.shape == rows.shape and slots.dtype == np.int32
    if "ngram_host" in comms:  # places among the pulled values
        assert np.array_equal(plan.asked.numpy()[slots], rows)
    else:  # the table itself is read
        assert np.array_equal(slots, rows)


@pytest.mark.parametrize("bad", [-1, 1000, 2**31 - 1])
def test_rows_outside_the_table_are_refused(bad):
    rows, signs = random_reads(60, 3, 1000)
    rows[30] = 0, 999, 0
    plan_rows(rows, signs, tiny_config(), Runtime("cpu"))
    rows[30, 1] = bad
    with pytest.raises(ConfigError, match=rf"{bad}.*0 to 999.*--ngram-rows"):
        plan_rows(rows, signs, tiny_config(), Runtime("cpu"))


# ----- the plans of steps

def test_each_step_plans_what_its_micro_batches_read():
    config = loader_config(steps=5, micro_batches=((0.0, 2), (0.4, 4)))
    here, pulled = (load_all(dataclasses.replace(config, **comms), [countable(6000)])
                    for comms in ({}, {"ngram_comms": "sharded", "ngram_host": True}))
    assert len({id(batch.plan) for batch in here}) == 5
    for one, other in zip(here, pulled, strict=True):
        expected = {}
        for index, part in enumerate(one.micro_batches):
            for token, (rows, signs) in enumerate(zip(part.slots.tolist(), part.signs.tolist())):
                for row, sign in zip(rows, signs):
                    expected.setdefault(row, []).append((256 * index + token, sign))
        for batch in (one, other):
            assert reads_of(batch.plan, batch.plan.asked.tolist()) == expected
        assert one.state == other.state
        for part, same in zip(one.micro_batches, other.micro_batches, strict=True):
            assert torch.equal(part.slots, other.plan.asked[same.slots].int())  # slots are places among pulled values
            assert torch.equal(part.signs, same.signs)
