"""From a token to its rows of the table, its guesses and its prior, against slow references with
Python's integers."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from numba import njit

import helpers
import train_gpt
from helpers import EOT, text_of

ROWS = 2**31 - 1  # a table of so many rows hardly ever gives two keys the same one


def past_config(**changes):
    """A Config whose table has no rows but those of the orders in `changes`."""
    return helpers.tiny_config(**{**helpers.NO_TABLE, "ngram_rows": ROWS, **changes})


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
    start = helpers.documents_of(tokens[: at + 1])[at]
    return tokens[max(start, at - n + 1) : at + 1].tolist()


def slow_copies(tokens, at, config):
    """The tokens that followed the latest earlier occurrences of the last n tokens, None where
    there is none."""
    start = helpers.documents_of(tokens[: at + 1])[at]
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
    """Kneser and Ney's counts, from sets of n-grams, and what they say."""

    def __init__(self, texts, config):
        self.config = config
        self.order = order = config.index_order
        self.counts = [Counter() for _ in range(order + 1)]  # by the tokens of the context
        for text in texts:
            starts = helpers.documents_of(text)
            for at in range(1, len(text)):
                held = min(order, at - starts[at - 1])
                self.counts[held][*text[at - held : at + 1].tolist()] += 1
        for n in range(order, 0, -1):
            self.counts[n - 1].update(gram[1:] for gram in self.counts[n])

    def share(self, n):
        """What a count of 1 loses behind n tokens."""
        once, twice = (list(self.counts[n].values()).count(count) for count in (1, 2))
        return (once + 1) / (once + 2 * twice + 2)

    def prior(self, tokens, at, following):
        """The probability of a token behind the one at a position."""
        start = helpers.documents_of(tokens[: at + 1])[at]
        found = 1 / self.config.vocab_size
        for n in range(min(self.order, at + 1 - start) + 1):
            context = tuple(tokens[at + 1 - n : at + 1].tolist())
            own = {gram: count for gram, count in self.counts[n].items() if gram[:n] == context}
            if not own:
                break
            count = own.get((*context, following), 0)
            taken = sum(self.share(n) * other**0.4 for other in own.values())
            count -= self.share(n) * count**0.4 if count else 0
            found = (count + taken * found) / sum(own.values())
        return found


def slow_columns(tokens, at, config):
    """What each column at a position is of: a key, or a guess, or None for no guess."""
    grams = [helpers.slow_key(slow_gram(tokens, at, n)) for n in config.ngram_orders]
    return grams + slow_copies(tokens, at, config)


def assert_found(actual, columns):
    """That (rows, signs, (guesses, prior)) are those of positions' keys, and behind these their
    guesses. Returns the prior."""
    rows, signs, (guesses, prior) = actual
    orders = rows.shape[1]
    assert rows.dtype == np.int32 and signs.dtype == np.float32
    assert rows.shape == signs.shape == (len(columns), orders)
    assert guesses.shape == (len(columns), len(columns[0]) - orders)
    for i, line in enumerate(columns):
        for column, key in enumerate(line[:orders]):
            found = int(rows[i, column]), float(signs[i, column])
            assert found == helpers.slow_row(key, column, ROWS), (i, column)
        expected = [train_gpt.NO_TOKEN if guess is None else guess for guess in line[orders:]]
        assert guesses[i].tolist() == expected, i
    return prior


def passage_of(tokens, positions):
    """The Passage of single tokens at any positions."""
    return train_gpt.Passage(text_of([*tokens, 1]), [(int(at), int(at) + 1) for at in positions])


# ----- keys of n-grams


@pytest.mark.parametrize("n", [1, 2, 5, 32])
def test_keys_against_python_integers(n):
    text = np.random.default_rng(n).integers(0, 2**16, size=70).astype(np.uint16)
    text[[3, 50]] = 2**16 - 1
    text[[0, 20, 21, 40]] = EOT
    expected = [helpers.slow_key(slow_gram(text, at, n)) for at in range(70)]
    for high in (70, n, n + 1, 1, 0):
        keys = train_gpt.rolling_hash(text[:high], n, EOT)
        assert keys.dtype == np.uint64 and keys.tolist() == expected[:high]
    for low, high in ((0, 70), (0, 1), (1, 40), (22, 23), (n, n + 1), (69, 70)):
        keys = train_gpt.ngram_keys(text, low, high, n, EOT)
        assert keys.dtype == np.uint64 and keys.tolist() == expected[low:high]


# ----- copies


@pytest.mark.parametrize("first", [0, 2, 3000])
@pytest.mark.parametrize("is_last", [False, True])
def test_latest_copies_against_a_dict(first, is_last):
    """Of keys that want the first places of the hash table, or the last ones. Each token is the
    number of tokens before it."""
    keys = np.random.default_rng(first).integers(0, 300, size=2000).astype(np.uint64)
    keys = ~keys if is_last else keys
    for reach in (100, 2000):
        expected, seen = [], {}
        for at, key in enumerate(keys.tolist()):
            latest = seen.get(key, -1)
            is_near = 0 <= latest and at - latest <= reach
            expected.append(latest + 1 if is_near else train_gpt.NO_TOKEN)
            if at >= first:
                seen[key] = at
        tokens = np.arange(2000, dtype=np.uint16)
        assert train_gpt.latest_copies(tokens, keys, first, reach).tolist() == expected


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
            (range(70, 270), train_gpt.contiguous_passage(text_of(tokens), 70, 200)),
        ):
            columns = [slow_columns(tokens, at, config) for at in positions]
            assert_found(train_gpt.RowFinder(config).find([passage]), columns)
            found += [guess for line in columns for guess in line if guess is not None]
    assert (not found) == (reach == 0)


# ----- odd texts

ALL_KINDS = {"ngram_orders": (2, 5), "copy_orders": (2, 4, 3), "copy_reach": 100, "index_order": 4}


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
    loops = ["hash_sums", "key_of", "discount", "first_place", "place_of", "read_ahead"]
    loops += ["count_one", "count_up", "priors_of", "rolling_hash", "latest_copies"]
    for name in loops:
        loop = njit(boundscheck=True)(getattr(train_gpt, name).py_func)
        monkeypatch.setattr(train_gpt, name, loop)
    for size in (2**15, 4, 1):
        monkeypatch.setattr(train_gpt, "INDEX_CHUNK", size)
        for text in ODD_TEXTS:
            tokens = np.array(text, np.uint16)
            config = past_config(**ALL_KINDS, index_tokens=len(tokens), vocab_size=2**16)
            finder = train_gpt.RowFinder(config)
            slow = SlowIndex([tokens], config)
            finder.index.read([tokens])
            assert_counted(finder.index, slow)
            positions = range(len(tokens))
            columns = [slow_columns(tokens, at, config) for at in positions]
            following = [*text[1:], 1]
            expected = [slow.prior(tokens, at, following[at]) for at in positions]
            whole = train_gpt.contiguous_passage(text_of([*text, 1]), 0, len(tokens))
            for passage in (passage_of(tokens, positions), whole):
                prior = assert_found(finder.find([passage]), columns)
                np.testing.assert_allclose(prior, expected, rtol=1e-6)


# ----- the index of training text

TEXTS = {
    "letters": small_alphabet(1500, 3),
    "sources": np.asarray(helpers.byte_documents(1500), dtype=np.uint16),
    "nothing": np.empty(0, np.uint16),
}


def assert_counted(index, slow):
    """That the index holds these n-grams, their counts and discounts, each in its region, and no
    others."""
    counts = index.counts
    by_token = counts.unigrams.sum(0)
    assert {(token,): by_token[token] for token in np.flatnonzero(by_token)} == slow.counts[0]
    heads, discounts = counts.contexts[:, 0], counts.discounts[:, 1]
    contexts = 0
    for n in range(1, slow.order + 1):
        followed = {}
        for gram, count in slow.counts[n].items():
            followed.setdefault(gram[:-1], []).append(count)
            part = (n - 1) * train_gpt.REGIONS + train_gpt.REGION_OF[gram[-2]]
            key = np.uint64(helpers.slow_key(gram))
            place = train_gpt.place_of(counts.grams, counts.gram_edges, part, key)
            assert counts.grams[place] & train_gpt.COUNT == count, gram
        for context, own in followed.items():
            part = (n - 1) * train_gpt.REGIONS + train_gpt.REGION_OF[context[-1]]
            key = np.uint64(helpers.slow_key(context))
            place = train_gpt.place_of(heads, counts.context_edges, part, key)
            assert heads[place] & train_gpt.COUNT == sum(own), context
            assert discounts[place] == pytest.approx(sum(count**0.4 for count in own)), context
        contexts += len(followed)
    assert (counts.grams != 0).sum() == sum(map(len, slow.counts[1:]))
    assert (heads != 0).sum() == contexts


@pytest.mark.parametrize("chunk", [2**15, 40, 1])
@pytest.mark.parametrize("name", TEXTS)
def test_the_index_against_dicts(name, chunk, monkeypatch):
    """Two texts are read, of which the second one is the end of a document that has lost the rest;
    asked is about another text, from its documents' first tokens on."""
    monkeypatch.setattr(train_gpt, "INDEX_CHUNK", chunk)
    texts = [TEXTS[name], TEXTS["letters"][3:90]]
    finder = train_gpt.RowFinder(past_config(index_order=4))
    finder.index.read(texts)
    slow = SlowIndex(texts, finder.config)
    assert_counted(finder.index, slow)
    sources = np.asarray(helpers.byte_documents(100), dtype=np.uint16)
    asked = np.concatenate([TEXTS["letters"][700:800], sources, [5]]).astype(np.uint16)
    expected = [slow.prior(asked, at, asked[at + 1]) for at in range(200)]
    _, _, (_, prior) = finder.find([train_gpt.contiguous_passage(text_of(asked), 0, 200)])
    np.testing.assert_allclose(prior, expected, rtol=1e-6)
    assert prior.max() > 0.3 > 1e-3 > prior.min()


@pytest.mark.parametrize("order", [0, 1, 4])
def test_priors_of_all_tokens_are_a_distribution(order):
    text = TEXTS["sources"]
    index = train_gpt.Index(past_config(index_order=order))
    if order:
        index.read([text])
    slow = SlowIndex([text] if order else [], index.config)
    for end in (1, 2, 5, 700, 1400):
        found = index.distribution(text[:end])
        assert found.dtype == np.float32 and found.shape == (index.config.vocab_size,)
        expected = [slow.prior(text, end - 1, token) for token in range(EOT + 1)]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert found.sum(dtype=np.float64) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", ["all differ", "one token", "documents of one token"])
def test_a_text_that_fills_the_index(name):
    """It has room for any text of so many tokens, and says so of a longer one."""
    text = np.random.default_rng(0).integers(0, EOT, 3000).astype(np.uint16)
    text[:] = {"all differ": text, "one token": 7, "documents of one token": EOT}[name]
    index = train_gpt.Index(past_config(index_order=5, index_tokens=3000))
    index.read([text])
    assert_counted(index, SlowIndex([text], index.config))
    if name == "all differ":
        assert (index.counts.grams != 0).mean() > 0.7
    longer = np.append(text, text[:1])
    with pytest.raises(train_gpt.ConfigError, match="index_tokens=3000: .* raise it to 3001"):
        train_gpt.Index(index.config).read([longer])


# ----- what the index reads


DOCUMENTS = np.asarray(helpers.byte_documents(9000, seed=9000), dtype=np.uint16)
ONE_DOCUMENT = small_alphabet(9000, 20, longest=None)


@pytest.mark.parametrize("count", [0, 900, 4500, 8999, 9000, 9100, 20_000])
@pytest.mark.parametrize("last", [DOCUMENTS, ONE_DOCUMENT], ids=["documents", "one document"])
def test_training_and_the_index_share_out_the_shards(last, count, tmp_path):
    """The index gets whole documents, the last ones; their first token is a target, too."""
    first = np.asarray(helpers.byte_documents(9000, seed=5000), dtype=np.uint16)
    folder = helpers.make_corpus(tmp_path / "corpus")
    helpers.write_shard(folder / "tiny_train_000000.bin", first)
    helpers.write_shard(folder / "tiny_train_000001.bin", last)
    helpers.with_manifest(folder)
    config = helpers.tiny_config(data=str(folder), index_order=3, index_tokens=count, steps=1)
    if count > 18_000:
        with pytest.raises(train_gpt.ConfigError, match="shards hold 0 in"):
            train_gpt.open_corpus(config)
        return
    whole = np.concatenate([first, last])
    wanted = len(whole) - count
    starts = [at for at in range(wanted, len(whole)) if at == 9000 or whole[at] == EOT]
    cut = starts[0] if starts else len(whole)
    corpus = train_gpt.open_corpus(config)
    assert np.array_equal(np.concatenate([[], *corpus.indexed]), whole[cut:])
    training = [first, last[: cut - 9000 + 1]] if cut > 9000 else [first[: cut + 1]]
    for one, other in zip(corpus.shards, training, strict=True):
        assert np.array_equal(one, other)
    corpus = train_gpt.open_corpus(dataclasses.replace(config, index_order=0))
    # What nobody reads is trained on.
    assert np.array_equal(np.concatenate(corpus.shards), whole) and not corpus.indexed


@pytest.mark.parametrize("readers", [2, 3, 7, 80])
def test_any_number_of_readers_leaves_the_same_bits(readers):
    config = past_config(index_order=3, index_tokens=18_000)
    alone, together = train_gpt.Index(config), train_gpt.Index(config)
    texts = [DOCUMENTS, ONE_DOCUMENT]
    alone.read(texts)
    for reader in reversed(range(readers)):
        together.read(texts, [reader], readers)
    assert np.array_equal(alone.memory, together.memory)
    assert (alone.memory != 0).mean() > 0.1


def test_a_run_ends_whose_index_is_not_that_of_its_checkpoint(rich_run, rich, rich_run_of):
    """It is made anew by each process, and a checkpoint keeps its sha256 alone."""
    table = helpers.make_trainer(**rich).table
    indexed = train_gpt.open_corpus(helpers.tiny_config(**rich)).indexed
    kept = {rich_run_of(size).checkpoint("step_000010.pt")["index"] for size in (1, 2)}
    table.read_index(indexed)
    assert kept == {table.index_digest(*kept)} == {rich_run.checkpoint()["index"]}
    table.read_index(indexed)  # once more, into the same entries
    with pytest.raises(train_gpt.ConfigError, match="not that of the checkpoint"):
        table.index_digest(*kept)
