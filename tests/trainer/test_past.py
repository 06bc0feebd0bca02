"""Chapters 2 to 4: what a token's past says of the next one. Keys of n-grams, copies, guesses of the index and the text
that it reads; worker threads."""
import dataclasses
import threading

import numpy as np
import pytest
import torch

import ranks
import train_gpt
from helpers import (EOT, INDEX, NO_TABLE, assert_bitwise, byte_documents, documents_of, make_corpus, make_trainer,
                     read, refusal, slow_key, slow_row, tiny_config, write_shard)
from optimizer_cases import batch_of
from train_gpt import (NO_GUESS, Runtime, Text, TextIndex, TrainLoader, gram_keys, latest_matches, open_corpus,
                       place_contiguous, stable_order, table_rows)

ROWS = 2**31 - 1  # a table of so many rows hardly ever gives two of them to one


def past_config(**changes):
    """A Config whose table has no rows but those of the orders in `changes`."""
    return tiny_config(**{**NO_TABLE, "ngram_rows": ROWS, **changes})


def small_alphabet(count, letters, seed=0, longest=60):
    """Tokens 1 to `letters` in documents of 1 to `longest` tokens, or in one, as a shard holds them: n-grams recur."""
    rng = np.random.default_rng([seed, letters])
    tokens = rng.integers(1, letters + 1, size=count).astype(np.uint16)
    starts = np.cumsum(rng.integers(1, longest + 1, size=count)) if longest else np.empty(0, int)
    tokens[starts[starts < count]] = EOT
    tokens[0] = EOT
    return tokens


def rows_of(guesses, first_column=0):
    """(rows, signs) of guesses (t, O), where None stands for no guess: its row may be any, and its sign is 0."""
    found = [[(None, 0.0) if guess is None else slow_row(guess, first_column + column, ROWS)
              for column, guess in enumerate(line)] for line in guesses]
    return [[row for row, _ in line] for line in found], [[sign for _, sign in line] for line in found]


def assert_rows(actual, guesses):
    """That (rows, signs) of table_rows are those of the guesses."""
    (rows, signs), (expected_rows, expected_signs) = actual, rows_of(guesses)
    assert rows.dtype == np.int32 and signs.dtype == np.float32 and rows.min() >= 0
    assert signs.tolist() == expected_signs
    assert np.where(signs, rows, 0).tolist() == [[row or 0 for row in line] for line in expected_rows]


# ----- keys of n-grams

@pytest.mark.parametrize("n", [1, 2, 5, 32])
def test_keys_against_python_integers(n):
    text = np.random.default_rng(n).integers(0, 2**16, size=70).astype(np.uint16)
    expected = [slow_key(text[max(0, at - n + 1):at + 1]) for at in range(70)]
    for high in (70, n, n + 1, 1, 0):
        keys, others = gram_keys(text[:high], (n, 3))
        assert keys.dtype == np.uint64 and keys.tolist() == expected[:high] and len(others) == high
    place = np.random.default_rng(0).permutation(70)
    keys = Text(text, past_config()).keys(place, (3, n))
    assert keys.dtype == np.uint64 and keys[:, 1].tolist() == [expected[at] for at in place]


def test_keys_are_equal_where_the_tokens_are_and_nowhere_else():
    """All texts of six letters from an alphabet of three, laid end to end: 4,374 places."""
    text = np.stack(np.meshgrid(*[np.arange(3)] * 6), -1).reshape(-1).astype(np.uint16)
    assert len(text) == 6 * 3**6
    orders, seen = (6, 5, 4, 3, 2, 1), {}
    for n, keys in zip(orders, gram_keys(text, orders)):
        for at, key in enumerate(keys.tolist()):
            gram = tuple(text[max(0, at - n + 1):at + 1].tolist())  # shorter at the beginning
            assert seen.setdefault(gram, key) == key
    assert len(seen) == len(set(seen.values())) == sum(3**n for n in range(1, 7))


# ----- copies

@pytest.mark.parametrize("bits, dtype", [(16, np.int32), (32, np.int64), (48, np.uint64)])
def test_stable_order_against_numpys(bits, dtype):
    values = np.random.default_rng(bits).integers(0, 2**bits, size=3000) >> np.arange(3000) % bits  # many are equal
    for count in (3000, 1, 0):
        assert np.array_equal(stable_order(values[:count].astype(dtype), bits), np.argsort(values[:count], kind="stable"))


@pytest.mark.parametrize("orders", [(3, 1, 9), (2,), ()], ids=str)
def test_latest_matches_against_a_dict(orders):
    for text in (small_alphabet(2000, 3, longest=None), np.arange(50).astype(np.uint16), np.full(40, 7, np.uint16)):
        expected, seen = np.full((len(text), len(orders)), -1), {}
        for at in range(len(text)):
            for column, n in enumerate(orders):
                if at >= n - 1:
                    gram = tuple(text[at - n + 1:at + 1].tolist())
                    expected[at, column] = seen.get(gram, -1)
                    seen[gram] = at
        assert np.array_equal(latest_matches(text, orders), expected)


def slow_copies(tokens, start, at, orders, reach, places):
    """The tokens that followed the latest earlier occurrences of the last n tokens, None where there is none: first those
    of the latest one at each order, then those of the one before."""
    tokens, found = tokens.tolist(), []
    for n in orders:
        ends = range(max(start + n - 1, at - reach), at)  # of n-grams that the document has, within reach
        same = [end for end in ends if tokens[end - n + 1:end + 1] == tokens[at - n + 1:at + 1] and at - n + 1 >= start]
        found.append([tokens[end + 1] for end in same[:-places - 1:-1]] + [None] * (places - len(same)))
    return [found[order][place] for place in range(places) for order in range(len(orders))]


def shuffled_pieces(tokens, config, count, seed=0, longest=25):
    """A Placement of `count` tokens: pieces of documents in random order, as the training loader cuts and lays them."""
    rng = np.random.default_rng(seed)
    cuts = np.union1d(np.flatnonzero(tokens == EOT), np.cumsum(rng.integers(1, longest, size=len(tokens) // 2)))
    pieces = np.split(np.arange(len(tokens)), cuts[(0 < cuts) & (cuts < len(tokens))])
    position = np.concatenate([pieces[piece] for piece in rng.permutation(len(pieces))])[:count]
    return train_gpt.Placement(Text(tokens, config), position, None)


@pytest.mark.parametrize("orders", [(2, 3, 5), (7, 2), (32, 12, 4), (3,)], ids=str)
@pytest.mark.parametrize("reach, stretch", [(0, 2**18), (1, 64), (5, 2**18), (30, 64), (10_000, 2**18), (10_000, 64)])
def test_copies_against_a_search(reach, stretch, orders, monkeypatch):
    monkeypatch.setattr(Text, "STRETCH", stretch)
    found, asked = 0, 0
    for letters, longest in ((1, 90), (2, 60), (3, 400), (4, 1)):
        tokens, places = small_alphabet(700, letters, longest=longest), letters
        config = past_config(copy_orders=orders, copy_reach=reach, copy_places=places)
        place, starts = shuffled_pieces(tokens, config, 450), documents_of(tokens)
        guesses = [slow_copies(tokens, starts[at], at, orders, reach, places) for at in place.position]
        assert_rows(table_rows(place, config, TextIndex(config)), guesses)
        found, asked = found + sum(guess is not None for line in guesses for guess in line), asked + 450 * config.columns
    assert (found == 0) == (reach == 0) and found < asked


def test_copies_of_a_corpus_that_is_one_document():
    tokens = small_alphabet(900, 3, longest=None)
    for config in (past_config(copy_orders=(2, 6), copy_reach=reach, micro_batch_tokens=256) for reach in (40, 1000)):
        for low in (0, 256, 643):
            place = place_contiguous(Text(tokens, config), low, config)
            guesses = [slow_copies(tokens, 0, at, (2, 6), config.copy_reach, 2) for at in range(low, low + 256)]
            assert_rows(table_rows(place, config, TextIndex(config)), guesses)
            assert any(guess is None for line in guesses for guess in line) or config.copy_reach == 1000


def test_tokens_that_never_recur_have_no_copies():
    tokens = np.arange(1, 601).astype(np.uint16)
    config = past_config(copy_orders=(2, 9), copy_reach=1000)
    place = train_gpt.Placement(Text(tokens, config), np.arange(600), None)
    assert not table_rows(place, config, TextIndex(config))[1].any()


def test_copies_over_a_document_of_megabytes():
    """Sources again and again, with a mistake every so often: searched for from the end by bytes.rfind."""
    rng, line = np.random.default_rng(0), np.asarray(byte_documents(200_000), dtype=np.uint16)
    text = np.tile(np.where(line == EOT, ord("\n"), line), 16).astype(np.uint8)
    wrong = rng.integers(0, len(text), size=len(text) // 500)
    text[wrong] = rng.integers(32, 127, size=len(wrong))
    tokens = np.concatenate([[EOT], text]).astype(np.uint16)
    orders, raw, far = (4, 12, 32), text.tobytes(), []
    config = past_config(copy_orders=orders, copy_reach=len(tokens))
    low = len(tokens) - 300
    place = place_contiguous(Text(tokens, config), low, config)
    guesses = []
    for at in range(low - 1, low + 255):  # in raw, which has no end-of-text token at its beginning
        ends = [raw.rfind(raw[at - n + 1:at + 1], 0, at) + n for n in orders]
        before = [raw.rfind(raw[at - n + 1:at + 1], 0, max(0, end - 1)) + n for end, n in zip(ends, orders)]
        guesses.append([raw[end] if end >= n else None for end, n in zip(ends + before, orders * 2)])
        far += [at - end for end in ends]
    assert_rows(table_rows(place, config, TextIndex(config)), guesses)
    assert min(far) < 100 and sum(100_000 < distance < 10**6 for distance in far) > 200
    assert len({guess for line in guesses for guess in line}) > 20


# ----- what may bear on a row

ALL_KINDS = dict(ngram_orders=(2, 5), copy_orders=(2, 4, 3), copy_reach=100, index_orders=(3, 4), index_bits=10)


def trained_index(config, seed=5):
    """A TextIndex that has read a text of four letters."""
    index = TextIndex(config)
    index.read(small_alphabet(3000, 4, seed), Runtime("cpu"))
    return index


def test_rows_read_neither_other_documents_nor_the_future():
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, 5, size=400).astype(np.uint16)
    tokens[[0, 150, 260]] = EOT
    config = past_config(**ALL_KINDS)
    index, position = trained_index(config), np.arange(400)
    def read(tokens):
        return table_rows(train_gpt.Placement(Text(tokens, config), position, None), config, index)
    def assert_same(other, low, high):
        for one, another in zip(other, (rows, signs)):
            assert np.array_equal(one[low:high], another[low:high])
    rows, signs = read(tokens)
    assert (np.abs(signs).mean(0) > 0.02).all()  # no column is empty
    noise = np.where(tokens == EOT, EOT, tokens % 4 + 1).astype(np.uint16)
    for low, high in ((150, 260), (260, 400)):
        assert_same(read(np.where(position < low, noise, tokens)), low, high)  # other documents in front
    for at in (0, 1, 148, 150, 200, 350):
        other = read(np.where(position > at, noise, tokens))
        assert_same(other, 0, at + 1)
        assert not np.array_equal(other[0][at + 1], rows[at + 1])
    # A copy is of the token that it names: with another one there, that is what the row is of.
    for at in range(290, 400):
        for column, n in enumerate((2, 4, 3), start=2):
            if signs[at, column]:
                same = [end for end in range(max(260 + n - 1, at - 100), at)
                        if np.array_equal(tokens[end - n + 1:end + 1], tokens[at - n + 1:at + 1])]
                assert (rows[at, column], signs[at, column]) == slow_row(int(tokens[max(same) + 1]), column, ROWS)


def rows_in_training(runtime, config, shard, slots):
    """[(position, rows, signs)] of all micro-batches that a rank's loader makes of a shard."""
    index, made, honest = TextIndex(config), [], table_rows
    index.slots.copy_(slots)

    def recorded(place, *rest):
        found = honest(place, *rest)
        made.append((place.position, *found))
        return found

    train_gpt.table_rows = recorded
    try:
        loader = TrainLoader(config, [shard], runtime, index=index)
        for _ in range(config.steps):
            loader.next()
        loader.close()
    finally:
        train_gpt.table_rows = honest
    return made


@pytest.mark.parametrize("world_size, cap", [(1, 50), (1, 256), (2, 120)])
def test_a_token_has_the_same_rows_in_training_and_validation(world_size, cap):
    """Whatever piece and micro-batch it stands in, and whatever rank reads it."""
    shard = small_alphabet(12 * 256 + 1, 4, longest=600)
    config = past_config(**{**ALL_KINDS, "copy_reach": 300}, steps=3, micro_batches=((0.0, 4),),
                         document_cap=((0.0, cap),), seed=3)
    index = trained_index(config)
    rows, signs = map(np.concatenate, zip(*(
        table_rows(place_contiguous(Text(shard, config), low, config), config, index)
        for low in range(0, 12 * 256, 256))))
    work = (config, shard, index.slots)
    made = (ranks.on_ranks(world_size, rows_in_training, *work) if world_size > 1
            else [rows_in_training(Runtime("cpu"), *work)])
    seen = np.concatenate([position for rank in made for position, _, _ in rank])
    assert np.array_equal(np.sort(seen), np.arange(12 * 256)) and (np.diff(seen) != 1).sum() > 12
    for rank in made:
        for position, of_rows, of_signs in rank:
            assert np.array_equal(of_rows, rows[position]) and np.array_equal(of_signs, signs[position])
    assert (np.abs(signs[:, 2:]).mean(0) > 0.1).all() and (signs[:, 2:] == 0).any(0).all()


# ----- the index of training text

class SlowIndex:
    """One order's table as a dict {slot: (token, confidence, tag)}, with Python's integers."""

    def __init__(self, n, bits):
        self.n, self.bits, self.table, self.votes = n, bits, {}, set()

    def place(self, gram):
        """(slot, tag) of an n-gram."""
        key = slow_key(gram)
        return key >> 64 - self.bits, key >> 50 - self.bits & 0x3FFF

    def read(self, text, chunk):
        text = text.tolist()
        for low in range(0, len(text) - 1, chunk):
            voted = {}  # all n-grams of a chunk find what was there before it
            for at in range(low, min(low + chunk, len(text) - 1)):
                slot, tag = self.place(text[max(0, at - self.n + 1):at + 1])
                voted[slot] = self.vote(self.table.get(slot), text[at + 1], tag)
            self.table.update(voted)

    def vote(self, entry, token, tag):
        if entry is None:
            self.votes.add("empty")
            return token, 0, tag
        if (entry[0], entry[2]) == (token, tag):
            self.votes.add("confirmed")
            return token, min(3, entry[1] + 1), tag
        self.votes.add("doubted" if entry[1] else "replaced")
        return (entry[0], entry[1] - 1, entry[2]) if entry[1] else (token, 0, tag)

    def guess(self, gram):
        """The token and two bits of confidence above it, or None."""
        slot, tag = self.place(gram)
        entry = self.table.get(slot)
        return entry[0] + 2**16 * entry[1] if entry and entry[2] == tag else None

    def slots(self):
        made = np.zeros(2**self.bits, np.int32)
        for slot, (token, confidence, tag) in self.table.items():
            made.view(np.uint32)[slot] = tag * 2**18 + confidence * 2**16 + token
        return made


TEXTS = {"letters": small_alphabet(1500, 3), "sources": np.asarray(byte_documents(1500), dtype=np.uint16),
         "shorter than the order": small_alphabet(4, 3), "one token": small_alphabet(1, 3),
         "nothing": np.empty(0, np.uint16)}


@pytest.mark.parametrize("chunk", [2**15, 40, 1])
@pytest.mark.parametrize("name", TEXTS)
def test_the_index_against_a_dict(name, chunk, monkeypatch):
    monkeypatch.setattr(TextIndex, "CHUNK", chunk)
    orders, text = (2, 5, 3), TEXTS[name]
    config = past_config(index_orders=orders, index_bits=7)
    expected = [SlowIndex(n, 7) for n in orders]
    for slow in expected:
        slow.read(text, chunk)
    for workers in (1, 2, 3):
        runtime, index, called = Runtime("cpu", workers=workers), TextIndex(config), []
        index.read(text, runtime, lambda: called.append(1), lambda: called.append(2))
        runtime.close()
        assert sorted(called) == [1, 2]
        assert index.slots.dtype == torch.int32
        assert np.array_equal(index.slots.numpy(), np.stack([slow.slots() for slow in expected]))
    if len(text) == 1500 and chunk < 2**15:
        assert all(slow.votes == {"empty", "confirmed", "doubted", "replaced"} for slow in expected)
    # What is known of another text, whose documents begin with shorter n-grams.
    asked = np.concatenate([TEXTS["letters"][700:900], np.asarray(byte_documents(300), dtype=np.uint16)])
    starts = documents_of(asked)
    guesses = [[slow.guess(asked[max(start, at - slow.n + 1):at + 1].tolist()) for slow in expected]
               for at, start in enumerate(starts)]
    place = train_gpt.Placement(Text(asked, config), np.arange(500), None)
    assert_rows(table_rows(place, config, index), guesses)
    assert len(text) < 1500 or {True, False} == {guess is None for line in guesses for guess in line}


def test_the_most_frequent_successor_wins_with_growing_confidence(monkeypatch):
    monkeypatch.setattr(TextIndex, "CHUNK", 1)
    config = past_config(index_orders=(2,), index_bits=20)
    def guess_after(successors):
        index, text = TextIndex(config), [token for successor in successors for token in (7, 8, successor)]
        index.read(np.array(text, np.uint16), Runtime("cpu"))
        guess, = index.guesses(np.stack([*gram_keys(np.array([7, 8], np.uint16), (2,))], 1))[1].tolist()
        return guess % 2**16, guess // 2**16
    assert guess_after([5]) == (5, 0)
    assert guess_after([5, 5]) == (5, 1)
    assert guess_after([5] * 9) == (5, 3)
    assert guess_after([5, 5, 6]) == (5, 0)
    assert guess_after([5, 5, 6, 6]) == (6, 0)
    assert guess_after([6, 5, 5, 6, 5]) == (5, 1)


@pytest.mark.parametrize("bits", [10, 24])
def test_a_stranger_is_taken_for_what_was_read_once_in_16384_times(bits):
    """N-grams of random tokens never recur: where a slot is filled, the tag alone tells them apart."""
    config = past_config(index_orders=(4,), index_bits=bits)
    index, rng, asked = TextIndex(config), np.random.default_rng(0), 2**19
    index.read(rng.integers(0, 2**16, size=2**18).astype(np.uint16), Runtime("cpu"))
    filled = (index.slots != 0).double().mean().item()
    assert filled == pytest.approx({10: 1.0, 24: 2**18 / 2**24}[bits], rel=0.02)
    keys, = gram_keys(rng.integers(0, 2**16, size=asked).astype(np.uint16), (4,))
    strangers = (index.guesses(keys[:, None]) != NO_GUESS).sum()
    expected = asked * filled / 2**14
    assert abs(strangers - expected) < 6 * expected ** 0.5 + 2


# ----- what the index reads

def corpus_of(folder, *shards, val_tokens=2000):
    """A corpus of these training shards."""
    folder.mkdir()
    for number, shard in enumerate(shards):
        write_shard(folder / f"made_train_{number:06d}.bin", shard)
    write_shard(folder / "made_val_000000.bin", byte_documents(val_tokens, seed=99))
    return folder


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.85])
def test_training_and_the_index_share_out_the_first_shard(share, tmp_path):
    first, second = (np.asarray(byte_documents(count, seed=count), dtype=np.uint16) for count in (9000, 5000))
    config = tiny_config(data=str(corpus_of(tmp_path / "corpus", first, second)), index_orders=(4,), index_share=share)
    shards, indexed, val = open_corpus(config)
    assert len(shards) == 2 and np.array_equal(shards[1], second) and len(val) == 1025
    cut = next((at for at in range(round(9000 * (1 - share)), 9000) if first[at] == EOT), 9000)
    assert np.array_equal(indexed, first[cut:])
    assert np.array_equal(shards[0], first[:cut + 1])  # of which the last one is a target only
    assert (len(indexed) == 0) == (share == 0.0) and abs(len(indexed) - 9000 * share) < 400
    shards, indexed, _ = open_corpus(dataclasses.replace(config, index_orders=()))
    assert np.array_equal(shards[0], first) and len(indexed) == 0  # what nobody reads is trained on


def test_a_corpus_of_one_document_has_no_text_for_an_index(tiny, cli, tmp_path):
    folder = corpus_of(tmp_path / "corpus", small_alphabet(9000, 20, longest=None))
    for share, training in ((0.5, 9000), (0.9999, 9000), (0.999999, 1)):
        config = tiny_config(data=str(folder), index_orders=(4,), index_share=share)
        if training == 1:  # the whole document is the index's
            with pytest.raises(train_gpt.ConfigError, match="hold 0 in 1 epoch.*beside the index.*--index-share"):
                open_corpus(config)
        else:
            shards, indexed, _ = open_corpus(config)
            assert len(shards[0]) == training and len(indexed) == 0
    run = cli(**{**tiny, **INDEX, "index_share": 0.5, "data": str(folder), "run_id": "one"})
    assert run.code == 0 and not run.checkpoint()["groups"]["ngram_table"]["index"].any()


def test_a_first_shard_may_be_the_indexs_alone(tiny, cli, tmp_path):
    folder = make_corpus(tmp_path / "corpus")
    values = {**tiny, **INDEX, "index_share": 0.999999, "data": str(folder)}
    run = cli(**{**values, "run_id": "whole"})
    assert run.code == 0 and list(run.train_losses) == [1, 2, 3, 4]
    shards, indexed, _ = open_corpus(tiny_config(**values))
    assert len(shards[0]) == 1 and len(indexed) == 45_000


def test_too_few_training_tokens_beside_the_index_are_refused_in_one_line(tiny, cli, tmp_path):
    folder = make_corpus(tmp_path / "corpus", train_tokens=3000, shards=1)
    values = {**tiny, "data": str(folder), "run_id": "few"}  # 2,048 tokens
    line = refusal(cli(**{**values, **INDEX, "index_share": 0.5}))
    assert "2,048" in line and "--index-share" in line and "--steps" in line
    assert not (tmp_path / "logs").exists()
    assert cli(**{**values, **INDEX, "index_share": 0.1}).code == 0


def test_a_checkpoint_keeps_the_index_that_the_run_has_read(rich_run, rich):
    config = tiny_config(**rich)
    index = TextIndex(config)
    index.read(open_corpus(config)[1], Runtime("cpu"))
    for name in ("step_000010.pt", "checkpoint.pt"):
        assert torch.equal(rich_run.checkpoint(name)["groups"]["ngram_table"]["index"], index.slots)
    assert (index.slots != 0).double().mean() > 0.3


def test_a_run_trains_the_rows_that_its_index_guesses(tiny, cli):
    values = {**tiny, **NO_TABLE, **INDEX, "steps": 2}
    run, config = cli(**{**values, "run_id": "guesses"}), tiny_config(**values)
    (shards, indexed, _), index, guessed = open_corpus(config), TextIndex(config), set()
    index.read(indexed, Runtime("cpu"))
    loader = TrainLoader(config, shards, Runtime("cpu"), index=index)
    for micro_batch in loader.next().micro_batches + loader.next().micro_batches:
        guessed |= set(micro_batch.slots[micro_batch.signs != 0].tolist())
    loader.close()
    assert run.code == 0 and len(guessed) > 20
    assert set(run.checkpoint()["groups"]["ngram_table"]["second"].nonzero()[:, 0].tolist()) == guessed


def test_validation_asks_the_index():
    trainer, asked = make_trainer(**NO_TABLE | INDEX), byte_documents(300)
    trainer.table.index.read(np.asarray(byte_documents(9000, seed=2), dtype=np.uint16), trainer.runtime)
    micro_batch, summed = read(trainer, asked)
    place = place_contiguous(Text(np.asarray(asked, dtype=np.uint16), trainer.config), 0, trainer.config)
    (column,), (signs,) = (part.T for part in table_rows(place, trainer.config, trainer.table.index))
    expected = torch.from_numpy(signs)[:, None] * trainer.table.weight[torch.from_numpy(column).long()]
    torch.testing.assert_close(summed.detach(), expected)
    assert 50 < (signs != 0).sum() < 250 and np.array_equal(micro_batch.signs[:, 0], signs)


# ----- worker threads

WORKERS = {
    "muon float32": dict(dtype="float32"),
    "soap bfloat16": dict(dtype="bfloat16", matrix_update="soap", basis_every=2),
    "soap_muon": dict(matrix_update="soap_muon", adam_every=2, mtp_weights=((0.0, (1.0, 0.5)),)),
}


def assert_same_runs(one, other):
    for run in (one, other):
        assert run.code == 0, run.stdout + run.stderr
    assert other.train_losses == one.train_losses and other.result["val_loss"] == one.result["val_loss"]
    for part in ("model", "groups", "loader", "rng"):
        assert_bitwise(other.checkpoint()[part], one.checkpoint()[part], part)


@pytest.mark.parametrize("name", WORKERS)
def test_any_number_of_workers_gives_the_same_run(name, tiny, cli, monkeypatch):
    """With numbers of micro-batches that workers cannot share evenly."""
    values = {**tiny, **INDEX, "micro_batches": ((0.0, 3), (0.5, 5)), "steps": 6, "untie_at": 0.5, **WORKERS[name]}
    context, threads, runs = train_gpt.Trainer.context, set(), []

    def watched_context(*words, **options):
        threads.add(threading.current_thread())
        return context(*words, **options)

    monkeypatch.setattr(train_gpt.Trainer, "context", watched_context)
    for workers in (1, 2, 3):
        threads.clear()
        runs.append(cli(**{**values, "workers": workers, "run_id": f"workers{workers}"}))
        assert runs[-1].code == 0, runs[-1].stdout + runs[-1].stderr
        assert len(threads - {threading.main_thread()}) == (workers if workers > 1 else 0)
        assert not any(thread.is_alive() for thread in threads - {threading.main_thread()})
    for run in runs[1:]:
        assert_same_runs(runs[0], run)
    assert len(set(runs[0].train_losses.values())) == 6 and "workers" not in runs[2].result["overrides"]


@pytest.mark.parametrize("comms", ["replicated", "sharded"])
def test_ranks_may_have_workers(comms, tiny, tmp_path):
    one, other = (ranks.train(tmp_path, {**tiny, **INDEX, "micro_batches": ((0.0, 6),), "ngram_comms": comms,
                                         "workers": workers, "run_id": f"workers{workers}"}, world_size=2)
                  for workers in (1, 2))
    assert_same_runs(one, other)


@pytest.mark.parametrize("error, code, words", [
    (train_gpt.ConfigError("what only a worker knows"), 2, "status:error what only a worker knows"),
    (ZeroDivisionError("by accident"), None, "status:error ZeroDivisionError: by accident"),
], ids=["known", "unexpected"])
@pytest.mark.timeout(60)
def test_an_error_of_a_worker_ends_the_run(error, code, words, tiny, cli, monkeypatch, capsys):
    context, raised = train_gpt.Trainer.context, []

    def failing_context(self, step, micro_batch, training=False):
        if training and step == 2 and not raised:
            raised.append(threading.current_thread())
            raise error
        return context(self, step, micro_batch, training)

    monkeypatch.setattr(train_gpt.Trainer, "context", failing_context)
    before = set(threading.enumerate())
    values = {**tiny, "micro_batches": ((0.0, 5),), "workers": 2, "run_id": "failing"}
    if code:
        run = cli(**values)
        lines = run.lines
        assert run.code == code
    else:
        with pytest.raises(ZeroDivisionError):  # main() lets it through: Python prints it and exits with 1
            cli(**values)
        lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == words and lines[-2].startswith("step:2/4 ")
    assert raised[0] is not threading.main_thread() and set(threading.enumerate()) <= before


def test_a_process_has_a_worker_a_core_unless_it_is_told(monkeypatch):
    monkeypatch.setattr(train_gpt.os, "sched_getaffinity", lambda process: set(range(6)))
    def workers(**options):
        runtime = Runtime("cpu", **options)
        runtime.close()
        return runtime.workers
    assert (workers(), workers(workers=0), workers(workers=4)) == (1, 6, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (workers(workers=0), workers(workers=4)) == (1, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert workers(workers=0) == 1


@pytest.mark.skipif(train_gpt.choose_compile(tiny_config(compile=True), torch.device("cpu")) != "inductor", reason="no compiler")
@pytest.mark.timeout(600)  # compilers are slow on a busy machine
def test_workers_share_a_compiled_model():
    trainer = make_trainer(compile=True, num_layers=1, long_layers=(), micro_batch_tokens=128, val_tokens=1024)
    single, batch = (batch_of(trainer, *(byte_documents(300, seed) for seed in range(count))) for count in (1, 3))
    found, optimizer = [], trainer.optimizer
    for workers in (2, 1, 3):
        trainer.runtime = Runtime("cpu", workers=workers)
        trainer.accumulate(0, single)  # the first of all compiles, in a worker
        trainer.table.grads.clear()
        for layout in optimizer.layouts.values():
            layout.grad.zero_()
        trainer.table.pull(batch.plan)
        loss = trainer.accumulate(0, batch)
        found.append({"loss": loss, "table": trainer.table.grads[:],
                      **{name: layout.grad.clone() for name, layout in optimizer.layouts.items()}})
        trainer.table.grads.clear()
        trainer.runtime.close()
    for other in found[1:]:
        assert_bitwise(other, found[0])
