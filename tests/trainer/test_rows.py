"""A token's rows of the table and its copies, against slow references with Python's integers."""

import numpy as np
import pytest

import helpers
import train_gpt
from helpers import EOT

ROWS = 2**31 - 1  # a table of so many rows hardly ever gives two keys the same one


DRAWN = np.random.default_rng(20240520).integers(0, 2**64, size=2**16, dtype=np.uint64).tolist()
BASE = 0x9E3779B97F4A7C15


def slow_row(tokens, at, n, column):
    """(row, sign) that a column has for the last n tokens at a position, or fewer where its
    document begins later. The key is the polynomial of their random numbers in the inverse of the
    base, the last first."""
    start = helpers.documents_of(tokens[: at + 1])[at]
    gram = tokens[max(start, at - n + 1) : at + 1].tolist()
    powers = [pow(BASE, -back, 2**64) for back in range(len(gram))]
    mixed = DRAWN[column] + sum(DRAWN[gram[-1 - back]] * power for back, power in enumerate(powers))
    mixed %= 2**64
    mixed = (mixed ^ mixed >> 29) * BASE % 2**64
    mixed ^= mixed >> 32
    return mixed % 2**32 * ROWS // 2**32, 1.0 if mixed >> 40 & 1 else -1.0


def slow_copies(tokens, at, config):
    """The tokens that followed the latest earlier occurrences of the last n tokens, -1 where
    there is none."""
    start = helpers.documents_of(tokens[: at + 1])[at]
    tokens = tokens.tolist()
    found = [-1] * len(config.copy_orders)
    for column, n in enumerate(config.copy_orders):
        gram = tokens[at - n + 1 : at + 1]
        # Of ends of n-grams that the document has within reach, the latest last.
        for end in range(max(start + n - 1, at - config.copy_reach), at):
            if tokens[end - n + 1 : end + 1] == gram and at - n + 1 >= start:
                found[column] = tokens[end + 1]
    return found


def assert_found(passage, positions, config):
    """That rows and signs are those of the positions' n-grams, and guesses those of a search.
    Returns how many guesses there are."""
    tokens = passage.text
    rows, signs = train_gpt.rows_of([passage], config)
    guesses = train_gpt.copies(passage, config)
    assert (rows.dtype, signs.dtype, guesses.dtype) == (np.int32, np.float32, np.int32)
    assert rows.shape == signs.shape == (len(positions), len(config.ngram_orders))
    assert guesses.shape == (len(positions), len(config.copy_orders))
    for i, at in enumerate(positions):
        for column, n in enumerate(config.ngram_orders):
            expected = slow_row(tokens, at, n, column)
            assert (int(rows[i, column]), float(signs[i, column])) == expected, (at, n)
        assert guesses[i].tolist() == slow_copies(tokens, at, config), at
    return (guesses >= 0).sum()


@pytest.mark.parametrize("reach", [0, 1, 5, 30, 10_000])
@pytest.mark.parametrize("orders", [(2, 3, 5), (7, 2), (32, 12, 4)], ids=str)
def test_rows_and_copies_against_a_search(orders, reach):
    """In passages that begin and end anywhere in a document. A span of a passage may copy from all
    of its document that stands before it. Tokens are a few of the highest, so that n-grams recur,
    in documents of 1 to `longest` tokens."""
    past = {"ngram_orders": orders[:2], "copy_orders": orders, "copy_reach": reach}
    config = helpers.tiny_config(ngram_rows=ROWS, **past)
    count = 0
    for letters, longest in ((1, 90), (2, 60), (3, 400), (4, 1), (3, 10**9)):
        rng = np.random.default_rng(letters)
        tokens = rng.integers(2**16 - letters, 2**16, size=500).astype(np.uint16)
        starts = np.cumsum(rng.integers(1, longest + 1, size=500))
        tokens[[0, *starts[starts < 500]]] = EOT
        scattered = rng.permutation(500)[:100].tolist()
        passage = helpers.passage_of([*tokens, 1], scattered)
        count += assert_found(passage, scattered, config)
        whole = train_gpt.contiguous_passage(tokens, EOT, 70, 200)
        count += assert_found(whole, range(70, 270), config)
    assert (count == 0) == (reach == 0)
