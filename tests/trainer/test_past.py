"""From a token to its rows of the table and its guesses, against slow references with Python's
integers."""

import dataclasses

import numpy as np
import pytest
from numba import njit

import train_gpt
from helpers import (
    EOT,
    NO_TABLE,
    byte_documents,
    documents_of,
    make_corpus,
    make_trainer,
    slow_key,
    slow_row,
    text_of,
    tiny_config,
    with_manifest,
    write_shard,
)
from train_gpt import (
    NO_GUESS,
    ConfigError,
    Passage,
    RowFinder,
    contiguous_passage,
    latest_matches,
    ngram_keys,
    open_corpus,
    rolling_hash,
)

ROWS = 2**31 - 1  # a table of so many rows hardly ever gives two keys the same one


def past_config(**changes):
    """A Config whose table has no rows but those of the orders in `changes`."""
    return tiny_config(**{**NO_TABLE, "ngram_rows": ROWS, **changes})


def small_alphabet(count, letters, seed=0, longest=60):
    """Tokens 1 to `letters`, among which n-grams recur, in documents of 1 to `longest` tokens; in
    one where that is None."""
    rng = np.random.default_rng([seed, letters])
    tokens = rng.integers(1, letters + 1, size=count).astype(np.uint16)
    if longest:
        starts = np.cumsum(rng.integers(1, longest + 1, size=count))
        tokens[starts[starts < count]] = EOT
    tokens[0] = EOT
    return tokens


# ----- slow references


def slow_gram(tokens, at, n):
    """The last n tokens at a position, or fewer where its document begins later."""
    start = documents_of(tokens[: at + 1])[at]
    return tokens[max(start, at - n + 1) : at + 1].tolist()


def slow_copies(tokens, at, config):
    """The tokens that followed the latest earlier occurrences of the last n tokens, None where
    there is none."""
    start = documents_of(tokens[: at + 1])[at]
    tokens, found = tokens.tolist(), []
    for n in config.copy_orders:
        gram = tokens[at - n + 1 : at + 1]
        copies = [None]
        # Of ends of n-grams that the document has within reach, the latest last.
        for end in range(max(start + n - 1, at - config.copy_reach), at):
            if tokens[end - n + 1 : end + 1] == gram and at - n + 1 >= start:
                copies.append(tokens[end + 1])
        found.append(copies[-1])
    return found


class SlowIndex:
    """The index of one order as a dict {entry: (tag, votes, three tokens)}, in plain Python."""

    def __init__(self, n, bits):
        self.n, self.bits = n, bits
        self.table = {}

    def locate(self, gram):
        """(number of the entry, tag) of an n-gram."""
        key = slow_key(gram)
        return key >> 64 - self.bits, key >> 50 - self.bits & 0x3FFF

    def read(self, text, chunk):
        for low in range(0, len(text) - 1, chunk):
            voted = {}  # all n-grams of a chunk find what was there before it
            for at in range(low, min(low + chunk, len(text) - 1)):
                entry, tag = self.locate(slow_gram(text, at, self.n))
                voted[entry] = self.vote(self.table.get(entry), int(text[at + 1]), tag)
            self.table.update(voted)

    def vote(self, entry, token, tag):
        """The entry after the token has followed an n-gram with the tag."""
        nobody = int(NO_GUESS)
        old_tag, votes, tokens = entry or (None, 0, [])
        doubted = max(0, votes - 1)
        if tag != old_tag:
            return (old_tag, doubted, tokens) if votes else (tag, 0, [token, nobody, nobody])
        first, second, third = tokens
        if token == first:
            return tag, min(3, votes + 1), tokens
        if token == third:
            return tag, doubted, [first, third, second]
        if token == second:
            return tag, doubted, tokens if votes else [second, first, third]
        if second == nobody:
            return tag, doubted, [first, token, third]
        return tag, doubted, [first, second, token]

    def guesses(self, gram):
        """Three tokens, two bits of votes above the first one."""
        number, tag = self.locate(gram)
        old_tag, votes, tokens = self.table.get(number, (None, 0, []))
        if old_tag != tag:
            return [None] * 3
        return [tokens[0] + 2**16 * votes, *tokens[1:]]

    def entries(self):
        made = np.zeros(2**self.bits, np.uint64)
        for number, (tag, votes, (first, second, third)) in self.table.items():
            made[number] = tag * 2**50 + votes * 2**48 + third * 2**32 + second * 2**16 + first
        return made


def slow_columns(tokens, at, config, indexes=()):
    """What each column at a position is of: a key, or a guess, or None for no guess."""
    grams = [slow_key(slow_gram(tokens, at, n)) for n in config.ngram_orders]
    guesses = slow_copies(tokens, at, config)
    for index in indexes:
        guesses += index.guesses(slow_gram(tokens, at, index.n))
    return grams + [None if guess == NO_GUESS else guess for guess in guesses]


def assert_found(actual, columns):
    """That (rows, signs, guesses) are those of positions' keys, and behind these their guesses."""
    rows, signs, guesses = actual
    orders = rows.shape[1]
    assert rows.dtype == np.int32 and signs.dtype == np.float32
    assert rows.shape == signs.shape == (len(columns), orders)
    assert guesses.shape == (len(columns), len(columns[0]) - orders)
    for i, line in enumerate(columns):
        for column, key in enumerate(line[:orders]):
            found = int(rows[i, column]), float(signs[i, column])
            assert found == slow_row(key, column, ROWS), (i, column)
        expected = [int(NO_GUESS) if guess is None else guess for guess in line[orders:]]
        assert guesses[i].tolist() == expected, i


def passage_of(tokens, positions):
    """The Passage of single tokens at any positions."""
    return Passage(text_of(tokens), [(int(at), int(at) + 1) for at in positions])


# ----- keys of n-grams


@pytest.mark.parametrize("n", [1, 2, 5, 32])
def test_keys_against_python_integers(n):
    text = np.random.default_rng(n).integers(0, 2**16, size=70).astype(np.uint16)
    text[[3, 50]] = 2**16 - 1
    text[[0, 20, 21, 40]] = EOT
    expected = [slow_key(slow_gram(text, at, n)) for at in range(70)]
    for high in (70, n, n + 1, 1, 0):
        keys = rolling_hash(text[:high], n, EOT)
        assert keys.dtype == np.uint64 and keys.tolist() == expected[:high]
    for low, high in ((0, 70), (0, 1), (1, 40), (22, 23), (n, n + 1), (69, 70)):
        keys = ngram_keys(text, low, high, n, EOT)
        assert keys.dtype == np.uint64 and keys.tolist() == expected[low:high]


# ----- copies


@pytest.mark.parametrize("first", [0, 2, 3000])
@pytest.mark.parametrize("is_last", [False, True])
def test_latest_matches_against_a_dict(first, is_last):
    """Of keys that want the first places of the hash table, or the last ones."""
    keys = np.random.default_rng(first).integers(0, 300, size=2000).astype(np.uint64)
    keys = ~keys if is_last else keys
    expected, seen = [], {}
    for at, key in enumerate(keys.tolist()):
        expected.append(seen.get(key, -1))
        if at >= first:
            seen[key] = at
    assert latest_matches(keys, first).tolist() == expected


@pytest.mark.parametrize("reach", [0, 1, 5, 30, 10_000])
@pytest.mark.parametrize("orders", [(2, 3, 5), (7, 2), (32, 12, 4)], ids=str)
def test_copies_against_a_search(orders, reach):
    """In passages that begin and end anywhere in a document."""
    found = []
    for letters, longest in ((1, 90), (2, 60), (3, 400), (4, 1), (3, None)):
        tokens = small_alphabet(500, letters, longest=longest)
        config = past_config(copy_orders=orders, copy_reach=reach)
        scattered = np.random.default_rng(letters).permutation(500)[:100]
        for positions, passage in (
            (scattered.tolist(), passage_of(tokens, scattered)),
            (range(70, 270), contiguous_passage(text_of(tokens), 70, 200)),
        ):
            columns = [slow_columns(tokens, at, config) for at in positions]
            assert_found(RowFinder(config).find([passage]), columns)
            found += [guess for line in columns for guess in line if guess is not None]
    assert (not found) == (reach == 0)


# ----- odd texts

ALL_KINDS = {
    "ngram_orders": (2, 5),
    "copy_orders": (2, 4, 3),
    "copy_reach": 100,
    "index_orders": (3, 4),
    "index_bits": 10,
}


ODD_TEXTS = [
    [EOT],
    [5],
    [EOT, 5],
    [EOT] * 40,
    [1, 2, 3, 1, 2, 3, 1, 2, EOT, 1, 2, 3, 1, 2, 3],
    [EOT, 1, 2, 1, 2, 1, 2, EOT],
    [1, 2, 3] * 10,
    [EOT, *[65535, 65534] * 10, 65535, 65535, 65535, EOT, 65535, 1, 65535],
    [65535] * 20,
]


@pytest.mark.slow
def test_odd_texts_with_checked_bounds(monkeypatch):
    """At chunks of the index that end within a document, too."""
    # What a loop calls comes ahead of it: it is taken over when the loop is compiled.
    loops = ["slot_and_tag", "packed", "unpacked", "voted", "vote", "look_up", "rolling_hash"]
    for name in [*loops, "latest_matches"]:
        loop = njit(boundscheck=True)(getattr(train_gpt, name).py_func)
        monkeypatch.setattr(train_gpt, name, loop)
    config = past_config(**ALL_KINDS)
    for size in (2**15, 4, 1):
        monkeypatch.setattr(train_gpt, "INDEX_CHUNK", size)
        for text in ODD_TEXTS:
            tokens = np.array(text, np.uint16)
            finder, indexes = RowFinder(config), [SlowIndex(n, 10) for n in (3, 4)]
            finder.read([tokens])
            for column, slow in enumerate(indexes):
                slow.read(tokens, size)
                assert np.array_equal(finder.entries[column], slow.entries()), text
            positions = range(len(tokens))
            columns = [slow_columns(tokens, at, config, indexes) for at in positions]
            assert_found(finder.find([passage_of(tokens, positions)]), columns)
            whole = contiguous_passage(text_of(tokens), 0, len(tokens))
            assert_found(finder.find([whole]), columns)


# ----- the index of training text

TEXTS = {
    "letters": small_alphabet(1500, 3),
    "sources": np.asarray(byte_documents(1500), dtype=np.uint16),
    "nothing": np.empty(0, np.uint16),
}


@pytest.mark.parametrize("chunk", [2**15, 40, 1])
@pytest.mark.parametrize("name", TEXTS)
def test_the_index_against_a_dict(name, chunk, monkeypatch):
    monkeypatch.setattr(train_gpt, "INDEX_CHUNK", chunk)
    orders, text = (2, 5, 3), TEXTS[name]
    config = past_config(index_orders=orders, index_bits=7)
    indexes = [SlowIndex(n, 7) for n in orders]
    for slow in indexes:
        slow.read(text, chunk)
    expected = np.stack([slow.entries() for slow in indexes])
    finder = RowFinder(config)
    finder.read([text])
    assert np.array_equal(finder.entries, expected)
    # What is known of another text, from its documents' first tokens on.
    sources = np.asarray(byte_documents(100), dtype=np.uint16)
    asked = np.concatenate([TEXTS["letters"][700:800], sources])
    columns = [slow_columns(asked, at, config, indexes) for at in range(200)]
    assert_found(finder.find([contiguous_passage(text_of(asked), 0, 200)]), columns)
    guessed = {guess is not None for line in columns for guess in line}
    assert len(text) < 1500 or guessed == {True, False}


# ----- what the index reads


DOCUMENTS = np.asarray(byte_documents(9000, seed=9000), dtype=np.uint16)
ONE_DOCUMENT = small_alphabet(9000, 20, longest=None)


@pytest.mark.parametrize("count", [0, 900, 4500, 8999, 9000, 9100, 20_000])
@pytest.mark.parametrize("last", [DOCUMENTS, ONE_DOCUMENT], ids=["documents", "one document"])
def test_training_and_the_index_share_out_the_shards(last, count, tmp_path):
    """The index gets whole documents, the last ones; their first token is a target, too."""
    first = np.asarray(byte_documents(9000, seed=5000), dtype=np.uint16)
    folder = make_corpus(tmp_path / "corpus")
    write_shard(folder / "tiny_train_000000.bin", first)
    write_shard(folder / "tiny_train_000001.bin", last)
    with_manifest(folder)
    config = tiny_config(data=str(folder), index_orders=(4,), index_tokens=count, steps=1)
    if count > 18_000:
        with pytest.raises(ConfigError, match="shards hold 0 in"):
            open_corpus(config)
        return
    whole = np.concatenate([first, last])
    wanted = len(whole) - count
    starts = [at for at in range(wanted, len(whole)) if at == 9000 or whole[at] == EOT]
    cut = starts[0] if starts else len(whole)
    corpus = open_corpus(config)
    assert np.array_equal(np.concatenate([[], *corpus.indexed]), whole[cut:])
    training = [first, last[: cut - 9000 + 1]] if cut > 9000 else [first[: cut + 1]]
    for one, other in zip(corpus.shards, training, strict=True):
        assert np.array_equal(one, other)
    corpus = open_corpus(dataclasses.replace(config, index_orders=()))
    # What nobody reads is trained on.
    assert np.array_equal(np.concatenate(corpus.shards), whole) and not corpus.indexed


@pytest.mark.parametrize("readers", [2, 3, 7])
def test_any_number_of_readers_leaves_the_same_bits(readers):
    config = past_config(index_orders=(3, 4), index_bits=12)
    alone, together = RowFinder(config), RowFinder(config)
    texts = [DOCUMENTS, ONE_DOCUMENT]
    alone.read(texts)
    for reader in reversed(range(readers)):
        together.read(texts, reader, readers)
    assert np.array_equal(alone.entries, together.entries)
    assert (alone.entries != 0).mean() > 0.5


def test_a_run_ends_whose_index_is_not_that_of_its_checkpoint(rich_run, rich, rich_run_of):
    """It is made anew by each process, and a checkpoint keeps its sha256 alone."""
    table = make_trainer(**rich).table
    indexed = open_corpus(tiny_config(**rich)).indexed
    kept = {rich_run_of(size).checkpoint("step_000010.pt")["index"] for size in (1, 2)}
    assert kept == {table.read_index(indexed)} == {rich_run.checkpoint()["index"]}
    with pytest.raises(ConfigError, match="not that of the checkpoint"):
        table.read_index(indexed, *kept)  # once more, into the same entries
