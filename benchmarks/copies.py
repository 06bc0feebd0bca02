"""What copies and the index of training text cost, and how often they say what comes next.

    python benchmarks/copies.py [--rounds 3] [--steps 142]

Cost is processor time of one thread: of the loader's for making the batches of a run, a step, over
that of a step's forward and backward passes, in one process and by turns. Other work on the machine
hardly changes that ratio. Copies are looked for where the first piece of a document comes, and
remembered. The arms give the nano track's loader n-grams alone, then copies that look back further
and further, then the track's own copies and index. The index reads its text in pieces of a million
tokens, and the time of one is told in such steps, too. The loops are compiled ahead, as in a run.

How often: over the first --val-tokens validation tokens, for each order of the track, `coverage` is
the share of tokens at which it makes a guess, and `hit rate` the share of these guesses that name
the next token. Results: benchmarks/results/copies.{json,md}; the last line is
`loader_over_step:<ratio of the track> index_steps:<steps that a million tokens of the index take
the time of>`.
"""

import dataclasses
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common

WHOLE = 10**9  # tokens, more than any document has
PIECE = 1_000_000  # tokens of the index that are read, and timed, at once


def arms(config):
    """{name: Config} of the loaders; the last one is the track's own."""
    reaches = {"reach 4,096": 4096, "reach 65,536": 65536, "whole documents": WHOLE}
    found = {"n-grams alone": dataclasses.replace(config, **common.N_GRAMS_ALONE)}
    for name, reach in reaches.items():
        of_reach = dataclasses.replace(config, copy_reach=reach, index_orders=())
        found[f"copies, {name}"] = of_reach
    found[f"the track: reach {config.copy_reach:,}, and the index"] = config
    return found


class Loader(train_gpt.TrainLoader):
    """Notes the processor time of each batch that its thread makes."""

    def __init__(self, *words):
        self.seconds = []
        super().__init__(*words)

    def make_batch(self, step):
        began = time.thread_time()
        batch = super().make_batch(step)
        self.seconds.append(time.thread_time() - began)
        return batch


def read_index(index, indexed):
    """Seconds of processor time that a million tokens take, from each piece of the text."""
    seconds = []
    for low in range(0, len(indexed), PIECE):
        piece = indexed[low : low + PIECE]
        began = time.thread_time()
        index.read(piece)
        seconds.append((time.thread_time() - began) * PIECE / len(piece))
    return seconds


def load_steps(config, shards, trainer):
    """(batches of a run's steps, the loader's mean seconds for one)."""
    loader = Loader(config, shards, trainer.runtime, trainer.table.index)
    batches = [loader.next_batch() for _ in range(config.steps)]
    loader.close()
    return batches, statistics.mean(loader.seconds)


def train_on(trainer, batches):
    """The median of seconds that forward and backward passes take a step."""
    seconds = []
    for step, batch in enumerate(batches):
        began = time.thread_time()
        trainer.accumulate(step, batch)
        seconds.append(time.thread_time() - began)
        trainer.optimizer.step(step, 1.0)
    return statistics.median(seconds)


@dataclasses.dataclass
class Measured:
    """What measure() returns, in seconds of processor time."""

    loading: dict  # {arm: a step's, of each round}
    passes: list  # a step's forward and backward passes, of each round
    reading: list  # a million tokens' of the index, of each piece
    index: train_gpt.TextIndex
    val: np.ndarray  # the validation tokens


def measure(config, runtime, rounds):
    trainer = train_gpt.Trainer(config, runtime)
    corpus = train_gpt.open_corpus(config)
    train_gpt.warm_up(trainer)
    index = trainer.table.index
    found = Measured({}, [], read_index(index, corpus.indexed), index, corpus.val)
    for turn in range(rounds):
        for name, of_arm in arms(config).items():
            of_turn = dataclasses.replace(of_arm, seed=turn)  # other pieces of text
            batches, seconds = load_steps(of_turn, corpus.shards, trainer)
            found.loading.setdefault(name, []).append(seconds)
        found.passes.append(train_on(trainer, batches))
    return found


def guesses_of(config, index, tokens):
    """The tokens (n, C) that copies and the index guess to follow each of these, or NO_GUESS."""
    text = train_gpt.Text(tokens, config)
    parts = []
    for low, high in train_gpt.contiguous_window(text, 0, len(tokens)).spans:
        guesses = index.guesses(text.keys(low, high, config.index_orders))
        is_made = guesses != train_gpt.NO_GUESS
        tokens_alone = np.where(is_made, guesses & np.uint64(0xFFFF), guesses)  # without votes
        parts.append(np.concatenate([text.copies(low, high), tokens_alone], axis=1))
    return np.concatenate(parts)


def columns_of(config):
    """[(kind, order), ...] of the guesses' columns."""
    places = ["latest place", "place before"]
    places += [f"place {number}" for number in range(3, config.copy_places + 1)]
    found = []
    for place in places[: config.copy_places]:
        found += [(f"copy, {place}", order) for order in config.copy_orders]
    return found + [("index", order) for order in config.index_orders]


def success(config, index, val):
    """[{"kind", "order", "coverage", "hit_rate"}] on the validation tokens."""
    guesses = guesses_of(config, index, np.array(val[: config.val_tokens]))
    is_made = guesses != train_gpt.NO_GUESS
    is_right = guesses == val[1 : config.val_tokens + 1, None]
    rows = []
    for column, (kind, order) in enumerate(columns_of(config)):
        made = is_made[:, column].sum()
        rows.append(
            {
                "kind": kind,
                "order": order,
                "coverage": is_made[:, column].mean(),
                "hit_rate": is_right[:, column].sum() / max(1, made),
            }
        )
    return rows


def report(config, found, ratios, rates, rounds, load):
    """The page, in Markdown."""
    step, piece = statistics.median(found.passes), statistics.median(found.reading)
    costs = []
    for name, own in ratios.items():
        extremes = f"{min(own):.3f} to {max(own):.3f}"
        milliseconds = f"{1000 * statistics.median(found.loading[name]):.1f}"
        costs.append([name, f"{statistics.median(own):.3f}", extremes, milliseconds])
    header = ["loader with", "time / forward and backward", "range", "ms a step"]
    guesses = [
        [row["kind"], row["order"], f"{row['coverage']:.1%}", f"{row['hit_rate']:.1%}"]
        for row in rates
    ]
    return f"""{common.markdown_table(header, costs)}

Processor time of one thread, over the {config.steps} steps of a run, whose forward and backward
passes take {1000 * step:.1f} ms each: medians of {rounds} rounds. A million tokens take the index
{piece / step:.1f} times as long, {piece:.2f} s. The load average at the start was {load:.1f}, on
{os.cpu_count()} cores.

{common.markdown_table(["guesses of", "order", "coverage", "hit rate"], guesses)}

{config.val_tokens:,} validation tokens; the index has read some {len(found.reading)} million tokens
of training text."""


def main(argv=None):
    track = train_gpt.TRACKS["nano"]
    defaults = {"rounds": 3, "steps": track.steps, "val_tokens": track.val_tokens}
    data = str(common.ROOT / track.data)
    arguments = common.parser(__doc__, **defaults, data=data, tiny=False).parse_args(argv)
    values = {"val_tokens": arguments.val_tokens, "val_sha256": ""}
    if arguments.tiny:
        values = common.TINY
    runtime = train_gpt.Runtime("cpu", workers=1)
    values = {**values, "data": arguments.data, "steps": arguments.steps}
    config = common.config_of("nano", runtime, **values, seed=0)
    load = os.getloadavg()[0]
    found = measure(config, runtime, arguments.rounds)
    ratios = {
        name: [own / step for own, step in zip(seconds, found.passes, strict=True)]
        for name, seconds in found.loading.items()
    }
    rates = success(config, found.index, found.val)
    text = report(config, found, ratios, rates, arguments.rounds, load)
    data = {
        "ratios": ratios,
        "loader_seconds": found.loading,
        "step_seconds": found.passes,
        "index_seconds": found.reading,
        "columns": rates,
        "load_average": load,
        "dtype": config.dtype,
        "compile": config.compile,
    }
    common.write_results(arguments.results, "copies", common.environment("cpu"), data, text)
    print(text)
    own = statistics.median(list(ratios.values())[-1])
    index_steps = statistics.median(found.reading) / statistics.median(found.passes)
    print(f"loader_over_step:{own:.3f} index_steps:{index_steps:.1f}")


if __name__ == "__main__":
    main()
