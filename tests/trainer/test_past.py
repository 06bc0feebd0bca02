"""Chapter 4: from a token to its rows of the table, by n-grams, copies and the index, against slow
references with Python's integers; and worker threads."""

import dataclasses
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from numba import njit
from optimizer_cases import batch_of

import ranks
import train_gpt
from helpers import (
    EOT,
    INDEX,
    NO_TABLE,
    ONE_LAYER,
    assert_bitwise,
    byte_documents,
    documents_of,
    make_corpus,
    make_trainer,
    ngram_rows,
    read,
    refusal,
    slow_key,
    slow_row,
    tiny_config,
    window_of,
    write_shard,
)
from train_gpt import (
    NO_GUESS,
    Runtime,
    Text,
    TextIndex,
    TokenWindow,
    TrainLoader,
    contiguous_window,
    latest_matches,
    open_corpus,
    rolling_hash,
    table_rows,
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
    there is none: of the latest one at each order, then of the one before, and so on."""
    start = documents_of(tokens[: at + 1])[at]
    tokens, found = tokens.tolist(), []
    for n in config.copy_orders:
        gram = tokens[at - n + 1 : at + 1]
        copies = []
        # Of ends of n-grams that the document has within reach, the latest first.
        for end in range(at - 1, max(start + n - 1, at - config.copy_reach) - 1, -1):
            if tokens[end - n + 1 : end + 1] == gram and at - n + 1 >= start:
                copies.append(tokens[end + 1])
        found.append((copies + [None] * config.copy_places)[: config.copy_places])
    return [
        found[order][place] for place in range(config.copy_places) for order in range(len(found))
    ]


class SlowIndex:
    """The index of one order as a dict {entry: (tag, votes, three tokens)}, in plain Python."""

    def __init__(self, n, bits):
        self.n, self.bits = n, bits
        self.table, self.cases = {}, set()

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
        case, entry = self.judge(entry or (tag, 0, []), token, tag)
        self.cases.add(case)
        return entry

    def judge(self, entry, token, tag):
        """(what has happened, the entry after it)."""
        old_tag, votes, tokens = entry
        nobody = int(NO_GUESS)
        doubted = max(0, votes - 1)
        if not tokens or (tag != old_tag and not votes):
            return "taken", (tag, 0, [token, nobody, nobody])
        if tag != old_tag:
            return "defended", (old_tag, doubted, tokens)
        first, second, third = tokens
        if token == first:
            return "confirmed", (tag, min(3, votes + 1), tokens)
        if token == third:
            return "up to the second place", (tag, doubted, [first, third, second])
        if token == second and not votes:
            return "up to the first place", (tag, 0, [second, first, third])
        if token == second:
            return "stays second", (tag, doubted, tokens)
        if second == nobody:
            return "new in the second place", (tag, doubted, [first, token, third])
        return "new in the third place", (tag, doubted, [first, second, token])

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


def assert_rows(actual, columns, num_rows=ROWS):
    """That (rows, signs) are those of keys and guesses (t, C). Of None any row will do, with a sign
    of 0."""
    rows, signs = actual
    assert rows.dtype == np.int32 and signs.dtype == np.float32
    assert rows.shape == signs.shape == (len(columns), len(columns[0]))
    assert rows.min() >= 0 and rows.max() < num_rows
    for i, line in enumerate(columns):
        for column, key in enumerate(line):
            if key is None:
                assert signs[i, column] == 0
            else:
                found = int(rows[i, column]), float(signs[i, column])
                assert found == slow_row(key, column, num_rows), (i, column)


def shuffled_pieces(tokens, config, count, seed=0, longest=25):
    """A TokenWindow of about `count` tokens: pieces of documents in random order."""
    rng = np.random.default_rng(seed)
    edges = np.cumsum(rng.integers(1, longest, size=len(tokens) // 2))
    cuts = np.union1d(np.flatnonzero(tokens == EOT), edges[edges < len(tokens)])
    cuts = np.unique([0, *cuts, len(tokens)])
    pieces = np.stack([cuts[:-1], cuts[1:]], 1)[rng.permutation(len(cuts) - 1)]
    taken = np.searchsorted(np.cumsum(pieces[:, 1] - pieces[:, 0]), count) + 1
    return TokenWindow(Text(tokens, config), [tuple(piece) for piece in pieces[:taken].tolist()])


def positions_of(window):
    return [at for low, high in window.spans for at in range(low, high)]


# ----- keys of n-grams


@pytest.mark.parametrize("n", [1, 2, 5, 32])
def test_keys_against_python_integers(n):
    text = np.random.default_rng(n).integers(0, 2**16, size=70).astype(np.uint16)
    text[[3, 50]] = 2**16 - 1
    expected = [slow_key(text[max(0, at - n + 1) : at + 1]) for at in range(70)]
    for high in (70, n, n + 1, 1, 0):
        keys = rolling_hash(text[:high], n, 2**16)
        assert keys.dtype == np.uint64 and keys.tolist() == expected[:high]
    text[[0, 20, 21, 40]] = EOT
    expected = [slow_key(slow_gram(text, at, n)) for at in range(70)]
    made = Text(text, past_config())
    for low, high in ((0, 70), (0, 1), (1, 40), (22, 23), (n, n + 1), (69, 70)):
        keys = made.keys(low, high, (3, n))
        assert keys.dtype == np.uint64 and keys[:, 1].tolist() == expected[low:high]


def test_keys_are_equal_where_the_tokens_are_and_nowhere_else():
    """All texts of six letters from an alphabet of three, laid end to end: 4,374 positions."""
    text = np.stack(np.meshgrid(*[np.arange(3)] * 6), -1).reshape(-1).astype(np.uint16)
    assert len(text) == 6 * 3**6
    seen = {}
    for n in (6, 5, 4, 3, 2, 1):
        for at, key in enumerate(rolling_hash(text, n, EOT).tolist()):
            gram = tuple(text[max(0, at - n + 1) : at + 1].tolist())  # shorter at the beginning
            assert seen.setdefault(gram, key) == key
    assert len(seen) == len(set(seen.values())) == sum(3**n for n in range(1, 7))


@pytest.mark.parametrize(
    "orders, rows",
    [((2, 3, 4, 5, 6), 1000), ((2,), 1), ((5, 2), 2**19), ((32, 3), 2**31 - 1)],
)
def test_ngram_rows_against_python_integers(orders, rows):
    tokens = np.asarray(byte_documents(300, seed=1), dtype=np.uint16)
    assert 0 < documents_of(tokens)[-1]
    config = past_config(ngram_orders=orders)
    positions = np.random.default_rng(0).permutation(300)
    columns = [slow_columns(tokens, at, config) for at in positions.tolist()]
    assert_rows(ngram_rows(tokens, positions, orders, rows), columns, rows)


# (row, sign) of each column at a position: n-grams of 2 and 5 tokens, copies by 3 tokens from the
# latest place and the one before, and three guesses of the index by 4.
TEXT = b"the cat sat on the mat, the cat ran, the cat sat down"
INDEXED = [b"the cat sat on the hat and the cat sat in the sun", b"two cats", b"a cat, a hen"]
KNOWN_ROWS = {
    0: [(1846174919, -1), (1923868769, -1), None, None, (1466996429, -1), (1988162757, -1), None],
    7: [
        (996877796, -1),
        (97169466, 1),
        None,
        None,
        (27559749, -1),
        (1119766260, -1),
        (683457494, -1),
    ],
    31: [
        (996877796, -1),
        (97169466, 1),
        (2104950046, -1),
        None,
        (27559749, -1),
        (1119766260, -1),
        (683457494, -1),
    ],
    45: [
        (261312373, -1),
        (143308440, -1),
        (2143060768, 1),
        (1306560353, -1),
        (1640700694, 1),
        None,
        None,
    ],
    52: [(1282385581, -1), (1430251905, -1), None, None, None, None, None],
}


def known_rows():
    """What the rows of KNOWN_ROWS are."""
    config = past_config(
        ngram_orders=(2, 5),
        copy_orders=(3,),
        copy_places=2,
        copy_reach=1000,
        index_orders=(4,),
        index_bits=16,
    )
    index = TextIndex(config)
    for text in INDEXED:
        index.read(np.array([EOT, *text], np.uint16))
    text = Text(np.array([EOT, *TEXT], np.uint16), config)
    rows, signs = table_rows(window_of(text, KNOWN_ROWS), config, index)
    found = {}
    for at, *line in zip(KNOWN_ROWS, rows.tolist(), signs.tolist(), strict=True):
        found[at] = [(row, sign) if sign else None for row, sign in zip(*line, strict=True)]
    return found


def test_rows_are_the_known_ones():
    assert known_rows() == KNOWN_ROWS


def other_loops(monkeypatch, name, value):
    """Give a number of the hash another value. Compiled loops have the old one, so that Python
    itself takes their place."""
    monkeypatch.setattr(train_gpt, name, value)
    for loop in ("rolling_hash", "rows_and_signs", "vote", "look_up", "slot_and_tag", "voted"):
        monkeypatch.setattr(train_gpt, loop, getattr(train_gpt, loop).py_func)


def other_token_hash():
    return np.random.default_rng(1).integers(0, 2**64, size=2**16, dtype=np.uint64)


OTHER_HASH = {
    "MIX": lambda: np.uint64(0x9E3779B97F4A7C17),
    "HASH_BASE": lambda: np.uint64(3),
    "TOKEN_HASH": other_token_hash,
}


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("name", [None, *OTHER_HASH])
def test_a_checkpoint_knows_another_hash(name, monkeypatch):
    config = tiny_config(**INDEX, ngram_rows=2**20)
    before = train_gpt.row_fingerprint(config)
    value = OTHER_HASH[name]() if name else train_gpt.MIX
    other_loops(monkeypatch, name or "MIX", value)
    is_same = train_gpt.row_fingerprint(config) == before
    assert is_same == (name is None)  # that Python itself computes changes nothing


def test_a_checkpoint_knows_other_columns():
    config = tiny_config(**INDEX)
    found = {train_gpt.row_fingerprint(config)}
    for changes in (
        {"ngram_orders": (2, 3, 4, 7)},
        {"copy_orders": (5, 3)},
        {"copy_places": 3},
        {"copy_reach": 2},
        {"index_orders": (3,)},
        {"ngram_rows": 1001},
    ):
        found.add(train_gpt.row_fingerprint(dataclasses.replace(config, **changes)))
    assert len(found) == 7


def test_every_order_has_a_hash_and_signs_of_its_own():
    orders = tuple(range(2, 33))
    same = np.full(200, 7, dtype=np.uint16)  # n-grams of all orders look alike
    rows, signs = ngram_rows(same, np.arange(200), orders, ROWS)
    for at in (0, 1, 10, 199):  # at a document's start they have the same tokens
        assert len(set(rows[at].tolist())) == len(orders)
    assert (rows[40:] == rows[40]).all() and (signs[40:] == signs[40]).all()
    tokens = np.random.default_rng(3).integers(0, EOT, size=20_000).astype(np.uint16)
    rows, signs = ngram_rows(tokens, np.arange(20_000), orders, 1000)
    agree = signs.T @ signs / len(signs)
    assert abs(agree - np.eye(len(orders))).max() < 6 / 20_000**0.5  # six standard deviations
    assert abs(signs.mean(0)).max() < 6 / 20_000**0.5
    for column in range(1, len(orders)):
        assert (rows[:, column] == rows[:, column - 1]).mean() < 0.005


def test_rows_and_signs_are_spread_evenly():
    tokens = np.random.default_rng(2).integers(0, EOT, size=40_000).astype(np.uint16)
    rows, signs = ngram_rows(tokens, np.arange(40_000), (4, 5), 100)
    for column in range(2):
        counts = np.bincount(rows[:, column], minlength=100)
        assert abs(counts - 400).max() < 6 * 20  # six standard deviations
        assert abs(signs[:, column].mean()) < 6 / 200
        # The sign tells n-grams of one row apart, so it must not follow from the row.
        means = [signs[rows[:, column] == row, column].mean() for row in range(100)]
        assert max(map(abs, means)) < 6 / 20


# ----- copies


def slow_matches(keys, first):
    expected, seen = [], {}
    for at, key in enumerate(keys.tolist()):
        expected.append(seen.get(key, -1) if at >= first else -1)
        if at >= first:
            seen[key] = at
    return expected


@pytest.mark.parametrize("first", [0, 2, 40, 3000])
def test_latest_matches_against_a_dict(first):
    some = np.random.default_rng(first).integers(0, 300, size=2000).astype(np.uint64)
    keys = {
        "an alphabet of three": rolling_hash(small_alphabet(2000, 3, longest=None), 5, EOT),
        "distinct": rolling_hash(np.arange(50).astype(np.uint16), 2, EOT),
        "equal": np.full(40, 7, np.uint64),
        "of the first place in the hash table": some,
        "of the last one": ~some,
        "one": some[:1],
        "none": some[:0],
    }
    for name, values in keys.items():
        assert latest_matches(values, first).tolist() == slow_matches(values, first), name


@pytest.mark.parametrize(
    "orders, reach, stretch",
    [
        ((2, 3, 5), 0, 2**18),
        ((7, 2), 1, 64),
        ((3,), 5, 2**18),
        ((32, 12, 4), 30, 64),
        ((2, 3, 5), 10_000, 2**18),
        ((32, 12, 4), 10_000, 64),
    ],
    ids=str,
)
def test_copies_against_a_search(orders, reach, stretch, monkeypatch):
    monkeypatch.setattr(train_gpt, "STRETCH", stretch)
    found, asked = 0, 0
    for letters, longest in ((1, 90), (2, 60), (3, 400), (4, 1)):
        tokens = small_alphabet(500, letters, longest=longest)
        config = past_config(copy_orders=orders, copy_reach=reach, copy_places=letters)
        window = shuffled_pieces(tokens, config, 250)
        columns = [slow_columns(tokens, at, config) for at in positions_of(window)]
        assert_rows(table_rows(window, config, TextIndex(config)), columns)
        found += sum(guess is not None for line in columns for guess in line)
        asked += len(columns) * config.columns
    assert (found == 0) == (reach == 0) and found < asked


def test_copies_of_a_corpus_that_is_one_document():
    tokens = small_alphabet(600, 3, longest=None)
    for reach in (40, 1000):
        config = past_config(copy_orders=(2, 6), copy_reach=reach)
        for low in (0, 100, 499):
            window = contiguous_window(Text(tokens, config), low, 100)
            columns = [slow_columns(tokens, at, config) for at in range(low, low + 100)]
            assert_rows(table_rows(window, config, TextIndex(config)), columns)


def test_tokens_that_never_recur_have_no_copies():
    tokens = np.arange(1000, 1600).astype(np.uint16)
    config = past_config(copy_orders=(2, 9), copy_reach=1000)
    window = contiguous_window(Text(tokens, config), 0, 600)
    assert not table_rows(window, config, TextIndex(config))[1].any()


def test_copies_over_a_document_of_megabytes():
    """Sources again and again, with a mistake every so often: searched from the end by
    bytes.rfind."""
    rng = np.random.default_rng(0)
    line = np.asarray(byte_documents(200_000), dtype=np.uint16)
    text = np.tile(np.where(line == EOT, ord("\n"), line), 16).astype(np.uint8)
    wrong = rng.integers(0, len(text), size=len(text) // 500)
    text[wrong] = rng.integers(32, 127, size=len(wrong))
    tokens = np.concatenate([[EOT], text]).astype(np.uint16)
    orders, raw, far = (4, 12, 32), text.tobytes(), []
    config = past_config(copy_orders=orders, copy_reach=len(tokens))
    low = len(tokens) - 300
    window = contiguous_window(Text(tokens, config), low, 256)
    columns = []
    for at in range(low - 1, low + 255):  # in raw, which has no end-of-text token at its beginning
        ends = []
        for place in range(2):
            for column, n in enumerate(orders):
                before = at if place == 0 else max(0, ends[column] - 1)
                ends.append(raw.rfind(raw[at - n + 1 : at + 1], 0, before) + n)
        copies = zip(ends, orders * 2, strict=True)
        columns.append([raw[end] if end >= n else None for end, n in copies])
        far += [at - end for end in ends[:3]]
    assert_rows(table_rows(window, config, TextIndex(config)), columns)
    assert min(far) < 100 and sum(100_000 < distance < 10**6 for distance in far) > 200
    assert len({guess for line in columns for guess in line}) > 20


def test_copies_are_remembered_within_bounds(monkeypatch):
    """What is asked for again is not looked for again, until later ones have taken its place."""
    monkeypatch.setattr(train_gpt, "COPIES_KEPT", 500)
    monkeypatch.setattr(train_gpt, "STRETCH", 64)
    tokens = small_alphabet(3000, 3, longest=400)
    config = past_config(copy_orders=(2, 4), copy_reach=300)
    looked, find_copies = [], Text.find_copies

    def watched(self, *stretch):
        looked.append(stretch)
        return find_copies(self, *stretch)

    text, kept = Text(tokens, config), []
    rng = np.random.default_rng(0)
    for low in rng.integers(0, 2999, size=150).tolist():
        ends = text.starts[text.starts > low].tolist()
        high = min(low + int(rng.integers(1, 200)), *ends, 3000)
        copies = text.copies(low, high)
        assert np.array_equal(copies, Text(tokens, config).copies(low, high))
        kept.append(text.kept)
        assert text.kept == sum(map(len, text.stretches.values()))
    assert 400 < max(kept) <= 500
    monkeypatch.setattr(Text, "find_copies", watched)
    text.copies(low, low + 1)
    assert not looked  # the latest is there
    text.copies(2999, 3000)
    text.copies(2999, 3000)
    assert len(looked) <= 1
    monkeypatch.setattr(train_gpt, "COPIES_KEPT", 3)  # there is always room for one stretch
    text.copies(0, 1)
    assert len(text.stretches) == 1


def test_threads_may_look_for_the_same_copies(monkeypatch):
    """All look for them at once; they are kept, and counted, once."""
    tokens = small_alphabet(900, 3, longest=None)
    config = past_config(copy_orders=(2, 4), copy_reach=300)
    expected = Text(tokens, config).copies(100, 700)
    together, find_copies = threading.Barrier(4), Text.find_copies

    def find_together(self, *stretch):
        together.wait(30)
        copies = find_copies(self, *stretch)
        together.wait(30)
        return copies

    monkeypatch.setattr(Text, "find_copies", find_together)
    text = Text(tokens, config)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: text.copies(100, 700), range(4)))
    for copies in found:
        assert np.array_equal(copies, expected)
    assert list(text.stretches) == [(0, 0)] and text.kept == 900
    assert np.array_equal(text.copies(100, 700), expected)  # with nobody to wait for


def test_threads_have_the_rows_of_one(monkeypatch):
    """The loops run without the interpreter's lock, on one Text, and forget what others ask for."""
    monkeypatch.setattr(train_gpt, "STRETCH", 256)
    monkeypatch.setattr(train_gpt, "COPIES_KEPT", 1000)
    tokens = small_alphabet(6000, 4, longest=900)
    config = past_config(**ALL_KINDS)
    index = trained_index(config)
    text = Text(tokens, config)
    windows = [contiguous_window(text, low, 700) for low in range(0, 5000, 250)]
    expected = [table_rows(window, config, index) for window in windows]
    for _ in range(3):
        text = Text(tokens, config)
        windows = [TokenWindow(text, window.spans) for window in windows]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda window: table_rows(window, config, index), windows))
        for pair in zip(found, expected, strict=True):
            assert_same_arrays(*pair)
        assert text.kept == sum(map(len, text.stretches.values())) <= 1000


def assert_same_arrays(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert np.array_equal(one, other)


# ----- what may bear on a row

ALL_KINDS = {
    "ngram_orders": (2, 5),
    "copy_orders": (2, 4, 3),
    "copy_reach": 100,
    "index_orders": (3, 4),
    "index_bits": 10,
}


def trained_index(config, seed=5):
    """A TextIndex that has read texts of four letters."""
    index = TextIndex(config)
    for part in range(6):
        index.read(small_alphabet(3000, 4, seed + part))
    return index


def test_rows_read_neither_other_documents_nor_the_future():
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, 5, size=400).astype(np.uint16)
    tokens[[0, 150, 260]] = EOT
    config = past_config(**{**ALL_KINDS, "ngram_orders": tuple(range(2, 33))})
    index, positions = trained_index(config), np.arange(400)

    def read(tokens):
        return table_rows(window_of(Text(tokens, config), positions), config, index)

    def assert_same(other, low, high):
        assert_same_arrays([part[low:high] for part in other], (rows[low:high], signs[low:high]))

    rows, signs = read(tokens)
    assert (np.abs(signs).mean(0) > 0.02).all()  # no column is empty
    noise = np.where(tokens == EOT, EOT, tokens % 4 + 1).astype(np.uint16)
    for low, high in ((150, 260), (260, 400)):
        before = np.where(positions < low, noise, tokens)  # other documents in front
        assert_same(read(before), low, high)
    for at in (0, 1, 148, 149, 150, 200, 350):
        other = read(np.where(positions > at, noise, tokens))
        assert_same(other, 0, at + 1)
        if tokens[at + 1] != EOT:
            assert not np.array_equal(other[0][at + 1], rows[at + 1])
    # The row of order n changes with each of its n tokens, and with no other.
    for back in range(8):
        changed = tokens.copy()
        changed[220 - back] = tokens[220 - back] % 4 + 1
        other, _ = read(changed)
        is_other = other[220, :31] != rows[220, :31]
        assert is_other.tolist() == [back < order for order in config.ngram_orders]


ODD_TEXTS = {
    "one document": [EOT],
    "one token that starts none": [5],
    "two tokens": [EOT, 5],
    "documents of one token": [EOT] * 40,
    "it begins within a document": [1, 2, 3, 1, 2, 3, 1, 2, EOT, 1, 2, 3, 1, 2, 3],
    "it ends where a document starts": [EOT, 1, 2, 1, 2, 1, 2, EOT],
    "no document starts": [1, 2, 3] * 10,
    "the largest numbers": [EOT, *[65535, 65534] * 10, 65535, 65535, 65535, EOT, 65535, 1, 65535],
    "nothing but the largest number": [65535] * 20,
}


@pytest.mark.parametrize(
    "are_checked",
    [
        pytest.param(False, id="as they are"),
        pytest.param(True, id="with checked bounds", marks=pytest.mark.slow),
    ],
)
def test_odd_texts(are_checked, monkeypatch):
    """At stretches, and chunks of the index, that end within a document, too."""
    if are_checked:
        # What a loop calls comes ahead of it: it is taken over when the loop is compiled.
        loops = ["slot_and_tag", "packed", "unpacked", "voted", "vote", "look_up", "rolling_hash"]
        for name in [*loops, "latest_matches", "copy_tokens", "rows_and_signs"]:
            loop = njit(boundscheck=True)(getattr(train_gpt, name).py_func)
            monkeypatch.setattr(train_gpt, name, loop)
    config = past_config(**ALL_KINDS)
    for size in (2**15, 4, 1):
        monkeypatch.setattr(train_gpt, "STRETCH", size)
        monkeypatch.setattr(train_gpt, "INDEX_CHUNK", size)
        for name, tokens in ODD_TEXTS.items():
            tokens = np.array(tokens, np.uint16)
            index, indexes = TextIndex(config), [SlowIndex(n, 10) for n in (3, 4)]
            index.read(tokens)
            for column, slow in enumerate(indexes):
                slow.read(tokens, size)
                assert np.array_equal(index.entries_of(column), slow.entries()), name
            positions = range(len(tokens))
            columns = [slow_columns(tokens, at, config, indexes) for at in positions]
            text = Text(tokens, config)
            assert_rows(table_rows(window_of(text, positions), config, index), columns)
            whole = contiguous_window(text, 0, len(tokens))
            assert_rows(table_rows(whole, config, index), columns)


def rows_in_training(runtime, config, shard, entries):
    """[(positions, rows, signs)] of all micro-batches that a rank's loader makes of a shard."""
    index, made, honest = TextIndex(config), [], table_rows
    index.entries.copy_(entries)

    def recorded(window, *rest):
        found = honest(window, *rest)
        made.append((np.array(positions_of(window)), *found))
        return found

    train_gpt.table_rows = recorded
    try:
        loader = TrainLoader(config, [shard], runtime, index)
        for _ in range(config.steps):
            loader.next_batch()
        loader.close()
    finally:
        train_gpt.table_rows = honest
    return made


@pytest.mark.parametrize("world_size, cap", [(1, 50), (1, 256), (3, 120)])
def test_a_token_has_the_same_rows_in_training_and_validation(world_size, cap):
    """Whatever piece and micro-batch it stands in, and whatever rank reads it."""
    shard = small_alphabet(12 * 256 + 1, 4, longest=600)
    config = past_config(
        **{**ALL_KINDS, "copy_reach": 300},
        steps=2,
        micro_batches=6,
        document_cap=cap,
        seed=3,
    )
    index, text = trained_index(config), Text(shard, config)
    windows = [contiguous_window(text, low, 256) for low in range(0, 12 * 256, 256)]
    found = [table_rows(window, config, index) for window in windows]
    rows, signs = map(np.concatenate, zip(*found, strict=True))
    work = (config, shard, index.entries)
    if world_size > 1:
        made = ranks.on_ranks(world_size, rows_in_training, *work)
    else:
        made = [rows_in_training(Runtime("cpu"), *work)]
    seen = np.concatenate([positions for rank in made for positions, _, _ in rank])
    assert np.array_equal(np.sort(seen), np.arange(12 * 256)) and (np.diff(seen) != 1).sum() > 12
    for rank in made:
        for positions, *parts in rank:
            assert_same_arrays(parts, (rows[positions], signs[positions]))
    assert (np.abs(signs[:, 2:]).mean(0) > 0.1).all() and (signs[:, 2:] == 0).any(0).all()


# ----- the index of training text

CASES = {
    "taken",
    "defended",
    "confirmed",
    "up to the second place",
    "up to the first place",
    "stays second",
    "new in the second place",
    "new in the third place",
}
TEXTS = {
    "letters": small_alphabet(1500, 3),
    "sources": np.asarray(byte_documents(1500), dtype=np.uint16),
    "shorter than the order": small_alphabet(4, 3),
    "one token": small_alphabet(1, 3),
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
    for workers in (1, 3):
        runtime, index = Runtime("cpu", workers=workers), TextIndex(config)
        index.read(text, runtime.in_parallel)
        runtime.close()
        assert index.entries.dtype == torch.int64
        assert np.array_equal(index.entries.numpy().view(np.uint64), expected)
    if len(text) == 1500 and chunk < 2**15:
        assert set.union(*[slow.cases for slow in indexes]) == CASES
    # What is known of another text, from its documents' first tokens on.
    sources = np.asarray(byte_documents(100), dtype=np.uint16)
    asked = np.concatenate([TEXTS["letters"][700:800], sources])
    columns = [slow_columns(asked, at, config, indexes) for at in range(200)]
    window = contiguous_window(Text(asked, config), 0, 200)
    assert_rows(table_rows(window, config, index), columns)
    guessed = {guess is not None for line in columns for guess in line}
    assert len(text) < 1500 or guessed == {True, False}


def test_the_index_guesses_from_a_documents_first_tokens_on():
    config = past_config(index_orders=(6,), index_bits=16)
    index = TextIndex(config)
    index.read(np.array([EOT, 1, 2, 3, 4, EOT], np.uint16))
    index.read(np.array([EOT, 1, 2, 5], np.uint16))
    text = Text(np.array([9, 9, 9, EOT, 1, 2, EOT, 1], np.uint16), config)
    guesses = index.guesses(text.keys(0, 8, (6,)))
    known = [int(guess) for guess in guesses[:, 0] % 2**16]
    assert known == [int(NO_GUESS)] * 3 + [1, 2, 3, 1, 2]
    assert guesses[5].tolist() == [3, 5, NO_GUESS]  # two documents begin with 1, 2


def test_the_most_frequent_successors_come_first(monkeypatch):
    monkeypatch.setattr(train_gpt, "INDEX_CHUNK", 1)
    config = past_config(index_orders=(2,), index_bits=20)

    def guesses_after(successors):
        index = TextIndex(config)
        text = [token for successor in successors for token in (7, 8, successor)]
        index.read(np.array(text, np.uint16))
        keys = rolling_hash(np.array([7, 8], np.uint16), 2, EOT)[:, None]
        first, *others = index.guesses(keys)[1].tolist()
        return first % 2**16, first // 2**16, [token for token in others if token != NO_GUESS]

    assert guesses_after([5]) == (5, 0, [])
    assert guesses_after([5, 5]) == (5, 1, [])
    assert guesses_after([5] * 9) == (5, 3, [])
    assert guesses_after([5, 5, 6]) == (5, 0, [6])
    assert guesses_after([5, 5, 6, 6]) == (6, 0, [5])
    assert guesses_after([5, 5, 5, 6, 7, 9]) == (5, 0, [6, 9])
    assert guesses_after([5, 5, 5, 5, 6, 7, 7]) == (5, 0, [7, 6])
    assert guesses_after([6, 5, 5, 6, 5]) == (5, 0, [6])


@pytest.mark.parametrize("bits", [10, 24])
def test_a_stranger_is_taken_for_what_was_read_once_in_16384_times(bits):
    """N-grams of random tokens never recur: where an entry is filled, the tag alone tells them
    apart."""
    config = past_config(index_orders=(4,), index_bits=bits)
    index, rng, asked = TextIndex(config), np.random.default_rng(0), 2**19
    text = rng.integers(EOT + 1, 2**16, size=2**18 + asked).astype(np.uint16)
    index.read(text[: 2**18])
    filled = (index.entries != 0).double().mean().item()
    assert filled == pytest.approx({10: 1.0, 24: 2**18 / 2**24}[bits], rel=0.02)
    keys = rolling_hash(text[2**18 :], 4, EOT)
    strangers = (index.guesses(keys[:, None])[:, 0] != NO_GUESS).sum()
    expected = asked * filled / 2**14
    assert abs(strangers - expected) < 6 * expected**0.5 + 2


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
    first = np.asarray(byte_documents(9000, seed=9000), dtype=np.uint16)
    second = np.asarray(byte_documents(5000, seed=5000), dtype=np.uint16)
    folder = corpus_of(tmp_path / "corpus", first, second)
    config = tiny_config(data=str(folder), index_orders=(4,), index_share=share)
    corpus = open_corpus(config)
    assert len(corpus.shards) == 2 and np.array_equal(corpus.shards[1], second)
    assert len(corpus.val) == 1025
    later = [at for at in range(round(9000 * (1 - share)), 9000) if first[at] == EOT]
    cut = later[0] if later else 9000
    assert np.array_equal(corpus.indexed, first[cut:])
    # The last one is a target only.
    assert np.array_equal(corpus.shards[0], first[: cut + 1])
    assert (len(corpus.indexed) == 0) == (share == 0.0)
    assert abs(len(corpus.indexed) - 9000 * share) < 400
    corpus = open_corpus(dataclasses.replace(config, index_orders=()))
    # What nobody reads is trained on.
    assert np.array_equal(corpus.shards[0], first) and len(corpus.indexed) == 0


def test_a_corpus_of_one_document_has_no_text_for_an_index(tiny, cli, tmp_path):
    folder = corpus_of(tmp_path / "corpus", small_alphabet(9000, 20, longest=None))
    for share in (0.5, 0.9999):
        config = tiny_config(data=str(folder), index_orders=(4,), index_share=share)
        corpus = open_corpus(config)
        assert len(corpus.shards[0]) == 9000 and len(corpus.indexed) == 0
    config = dataclasses.replace(config, index_share=0.999999)  # all of it is the index's
    with pytest.raises(
        train_gpt.ConfigError, match="hold 0 in 1 epoch.*beside the index.*--index-share"
    ):
        open_corpus(config)
    values = {**tiny, **INDEX, "index_share": 0.5, "data": str(folder), "run_id": "one"}
    run = cli(**{**values, "steps": 1})
    assert run.code == 0 and not run.checkpoint()["groups"]["ngram_table"]["index"].any()


def test_a_first_shard_may_be_the_indexs_alone(tiny, cli, tmp_path):
    folder = make_corpus(tmp_path / "corpus")
    values = {**tiny, **INDEX, "steps": 2, "index_share": 0.999999, "data": str(folder)}
    run = cli(**{**values, "run_id": "whole"})
    assert run.code == 0 and list(run.train_losses) == [1, 2]
    corpus = open_corpus(tiny_config(**values))
    assert len(corpus.shards[0]) == 1 and len(corpus.indexed) == 45_000


def test_too_few_training_tokens_beside_the_index_are_refused_in_one_line(tiny, cli, tmp_path):
    folder = make_corpus(tmp_path / "corpus", train_tokens=3000, shards=1)
    values = {**tiny, **INDEX, "data": str(folder), "run_id": "few"}  # 2,048 tokens
    line = refusal(cli(**{**values, "index_share": 0.5}))
    assert "2,048" in line and "--index-share" in line and "--steps" in line
    assert not (tmp_path / "logs").exists()
    open_corpus(tiny_config(**{**values, "index_share": 0.1}))


def test_a_checkpoint_keeps_the_index_that_the_run_has_read(rich_run, rich):
    config = tiny_config(**rich)
    index = TextIndex(config)
    index.read(open_corpus(config).indexed)
    for name in ("step_000010.pt", "checkpoint.pt"):
        kept = rich_run.checkpoint(name)["groups"]["ngram_table"]["index"]
        assert torch.equal(kept, index.entries)
    assert (index.entries != 0).double().mean() > 0.3


def test_a_run_trains_the_rows_that_its_index_guesses(tiny, cli):
    values = {**tiny, **NO_TABLE, **INDEX, "steps": 2}
    run, config = cli(**{**values, "run_id": "guesses"}), tiny_config(**values)
    corpus, index, guessed = open_corpus(config), TextIndex(config), set()
    index.read(corpus.indexed)
    loader = TrainLoader(config, corpus.shards, Runtime("cpu"), index)
    for micro_batch in loader.next_batch().micro_batches + loader.next_batch().micro_batches:
        guessed |= set(micro_batch.slots[micro_batch.signs != 0].tolist())
    loader.close()
    assert run.code == 0 and len(guessed) > 20
    second = run.checkpoint()["groups"]["ngram_table"]["second"]
    assert set(second.nonzero()[:, 0].tolist()) == guessed


def test_validation_asks_the_index():
    trainer, asked = make_trainer(**{**NO_TABLE, **INDEX}), byte_documents(300)
    trainer.table.index.read(np.asarray(byte_documents(9000, seed=2), dtype=np.uint16))
    micro_batch, summed = read(trainer, asked)
    text = Text(np.asarray(asked, dtype=np.uint16), trainer.config)
    window = contiguous_window(text, 0, 256)
    rows, signs = map(torch.from_numpy, table_rows(window, trainer.config, trainer.table.index))
    expected = (signs[..., None] * trainer.table.weight[rows.long()]).sum(1)
    torch.testing.assert_close(summed.detach(), expected)
    assert 50 < (signs[:, 0] != 0).sum() < 250 and torch.equal(micro_batch.signs, signs)


# ----- worker threads

WORKERS = {
    "muon float32": {"dtype": "float32"},
    "soap bfloat16": {"dtype": "bfloat16", "matrix_update": "soap", "basis_every": 2},
    "soap_muon": {"matrix_update": "soap_muon", "adam_every": 2, "mtp_weights": (1.0, 0.5)},
}
# Numbers of micro-batches that workers cannot share evenly.
UNEVEN = ({"start": 0.0, "micro_batches": 3}, {"start": 0.5, "micro_batches": 5})


def assert_same_runs(one, other):
    for run in (one, other):
        assert run.code == 0, run.stdout + run.stderr
    assert other.train_losses == one.train_losses
    assert other.result["val_loss"] == one.result["val_loss"]
    for part in ("model", "groups", "loader", "rng"):
        assert_bitwise(other.checkpoint()[part], one.checkpoint()[part], part)


@pytest.mark.parametrize(
    "name",
    ["muon float32", *(pytest.param(name, marks=pytest.mark.slow) for name in list(WORKERS)[1:])],
)
def test_any_number_of_workers_gives_the_same_run(name, tiny, cli, monkeypatch):
    values = {**tiny, **INDEX, "stages": UNEVEN, "steps": 6, "untie_at": 0.5, **WORKERS[name]}
    del values["micro_batches"]
    inputs, threads, runs = train_gpt.Trainer.inputs, set(), []

    def watched_inputs(*words):
        threads.add(threading.current_thread())
        return inputs(*words)

    monkeypatch.setattr(train_gpt.Trainer, "inputs", watched_inputs)
    for workers in (1, 2, 3):
        threads.clear()
        runs.append(cli(**{**values, "workers": workers, "run_id": f"workers{workers}"}))
        assert runs[-1].code == 0, runs[-1].stdout + runs[-1].stderr
        others = threads - {threading.main_thread()}
        assert len(others) == 0 if workers == 1 else 2 <= len(others) <= workers
        assert not any(thread.is_alive() for thread in others)
    for run in runs[1:]:
        assert_same_runs(runs[0], run)
    assert len(set(runs[0].train_losses.values())) == 6
    assert "workers" not in runs[2].result["overrides"]


def test_ranks_may_have_workers(tiny, tmp_path):
    values = {**tiny, **INDEX, "micro_batches": 6}
    one, other = (
        ranks.train(
            tmp_path,
            {**values, "workers": workers, "run_id": f"workers{workers}"},
            world_size=2,
        )
        for workers in (1, 2)
    )
    assert_same_runs(one, other)


@pytest.mark.parametrize(
    "error, code, words",
    [
        (
            train_gpt.ConfigError("what only a worker knows"),
            2,
            "status:error what only a worker knows",
        ),
        (ZeroDivisionError("by accident"), None, "status:error ZeroDivisionError: by accident"),
    ],
    ids=["known", "unexpected"],
)
@pytest.mark.timeout(60)
def test_an_error_of_a_worker_ends_the_run(error, code, words, tiny, cli, monkeypatch, capsys):
    inputs, raised = train_gpt.Trainer.inputs, []

    def failing_inputs(self, step, *words):
        if step == 2 and not raised:
            raised.append(threading.current_thread())
            raise error
        return inputs(self, step, *words)

    monkeypatch.setattr(train_gpt.Trainer, "inputs", failing_inputs)
    before = set(threading.enumerate())
    values = {**tiny, "micro_batches": 5, "workers": 2, "run_id": "failing"}
    if code:
        run = cli(**values)
        lines = run.lines
        assert run.code == code
    else:
        with pytest.raises(ZeroDivisionError):  # Python itself prints it, and exits with 1
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

    assert (workers(), workers(workers=4), workers(workers=1)) == (6, 4, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (workers(), workers(workers=4)) == (1, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert workers() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert workers() == 1


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="no compiler")
@pytest.mark.timeout(600)  # compilers are slow on a busy machine
def test_workers_share_a_compiled_model():
    trainer = make_trainer(**ONE_LAYER, compile=True, micro_batch_tokens=128, val_batch_tokens=128)
    single = batch_of(trainer, byte_documents(300, 0))
    batch = batch_of(trainer, *(byte_documents(300, seed) for seed in range(3)))
    found = []

    def gradients(batch):
        """The summed loss and all sums of gradients, which begin anew."""
        made = {"loss": trainer.accumulate(0, batch), "table": trainer.table.grads}
        for name, layout in trainer.optimizer.layouts.items():
            made[name] = layout.finish_sum().clone()
        trainer.table.grads = []
        return made

    for workers in (2, 1, 3):
        trainer.runtime = Runtime("cpu", workers=workers)
        gradients(single)  # the first of all compiles, in a worker
        found.append(gradients(batch))
        trainer.runtime.close()
    for other in found[1:]:
        assert_bitwise(other, found[0])
