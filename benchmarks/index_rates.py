"""How fast the index of the training text is read, and asked, on one core.

    python benchmarks/index_rates.py [--tokens 16000000] [--repeats 3]

Random tokens with Zipf's frequencies, in documents of 690, are read into fineweb's index, by one
reader, and by one of 32, who hashes all tokens and counts the n-grams of two of 64 regions. Then
the priors of micro-batches of 16,384 tokens are looked up. Each time is the best of the repeats,
into memory that was written to before.

`budget` is the arithmetic for the track fineweb, where eight GPUs train on 4.6 million tokens a
second together: so many cores look these up, 32 more read, and so many tokens are read in 60
seconds. Results: benchmarks/results/index_rates.{json,md}. The last line is `index
read:<millions of tokens a second and core, of the longest text> lookup_ms:<a micro-batch>
cores:<n> budget:<billions of tokens>`.
"""

import sys
import timeit
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common

FINEWEB = train_gpt.TRACKS["fineweb"]
SHARES = (16, 4, 1)  # of the tokens, a whole, a fourth and a sixteenth are read
LENGTH = 16384
DOCUMENT = 690  # FineWeb's mean
SECONDS, TRAINED = 60, 4.6e6  # of a run; tokens a second on eight GPUs
READERS = 32


def text_of(count, seed):
    """Random tokens, (count,) uint16."""
    tokens = np.random.default_rng(seed).zipf(1.2, count) % FINEWEB.eot_token
    tokens[::DOCUMENT] = FINEWEB.eot_token
    return tokens.astype(np.uint16)


def measure(tokens, repeats):
    """The rates of an index of these tokens, each for one core."""
    changes = {"index_tokens": len(tokens), "ngram_orders": (), "copy_orders": ()}
    finder = train_gpt.RowFinder(train_gpt.with_values(FINEWEB, changes))
    index = finder.index

    def seconds(own, readers):
        """Of reading the text anew."""
        index.memory[:] = 0
        return timeit.timeit(lambda: index.read([tokens], own, readers), number=1)

    def best(function, *arguments):
        function(*arguments)
        return min(function(*arguments) for _ in range(repeats))

    among = best(seconds, [READERS - 1], READERS)
    alone = best(seconds, [0], 1)  # it leaves the whole text, for what is asked
    asked = train_gpt.contiguous_passage(
        train_gpt.Text(text_of(LENGTH + 1, 1), FINEWEB.eot_token), 0, LENGTH
    )
    return {
        "tokens": len(tokens),
        "alone": len(tokens) / alone,
        "among": len(tokens) / among,
        "lookup": best(lambda: timeit.timeit(lambda: finder.find([asked]), number=1)),
    }


def report(cases):
    """The table, and the last line."""
    rows = []
    for case in cases:
        rates = [f"{case[name] / 1e6:.1f}" for name in ("alone", "among")]
        rows.append([f"{case['tokens']:,}", *rates, f"{1000 * case['lookup']:.1f}"])
    last = cases[-1]
    busy = TRAINED / LENGTH * last["lookup"]  # cores that look up what is trained on
    cores = busy + READERS
    line = f"index read:{last['alone'] / 1e6:.1f} lookup_ms:{1000 * last['lookup']:.1f} "
    line += f"cores:{cores:.0f} budget:{SECONDS * last['among'] / 1e9:.1f}"
    unit = "million tokens a second"
    header = ["tokens", f"one reader, {unit}", "one of 32 readers, likewise"]
    table = common.markdown_table([*header, "lookup of 16,384 tokens, ms"], rows)
    return table, line


def main(argv=None):
    defaults = {"tokens": 16_000_000, "repeats": 3, "tiny": False}
    arguments = common.parser(__doc__, **defaults).parse_args(argv)
    tokens = text_of(20_000 if arguments.tiny else arguments.tokens, 0)
    cases = [measure(tokens[: len(tokens) // share], arguments.repeats) for share in SHARES]
    table, line = report(cases)
    facts = common.environment(train_gpt.Runtime("cpu").device)
    data = {"cases": cases}
    common.write_results(arguments.results, "index_rates", facts, data, f"{table}\n\n`{line}`")
    print(f"{table}\n{line}")


if __name__ == "__main__":
    main()
