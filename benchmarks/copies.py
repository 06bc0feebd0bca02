"""What copies and the index of training text cost, and how often they say what comes next.

    python benchmarks/copies.py [--rounds 3] [--steps 142]

Cost is processor time of one thread: of the loader's for making the batches of a run, a step, over that of a step's
forward and backward passes, in one process and by turns. Other work on the machine hardly changes that ratio. Copies
are looked for where the first piece of a document comes, and remembered; here the loader does so, in a run a worker,
while the index is read. The arms give the nano track's loader n-grams alone, then copies that look back further and
further, then the track's own copies and index. The index reads its text in pieces of a million tokens, and the time of
one is told in such steps, too.

How often: over the first --val-tokens validation tokens, for each order of the track, `coverage` is the share of tokens
at which it makes a guess, and `hit rate` the share of these guesses that name the next token.
Results: benchmarks/results/copies.{json,md}; the last line is `loader_over_step:<ratio of the track>
index_steps:<steps that a million tokens of the index take the time of>`.
"""
import dataclasses
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common  # noqa: E402
import train_gpt  # noqa: E402

WHOLE = 10**9  # tokens, more than any document has
PIECE = 1_000_000  # tokens of the index that are read, and timed, at once


def arms(config):
    """{name: Config} of the loaders."""
    reaches = {"reach 4,096": 4096, "reach 65,536": 65536, "whole documents": WHOLE}
    return {"n-grams alone": dataclasses.replace(config, **common.N_GRAMS_ALONE),
            **{f"copies, {name}": dataclasses.replace(config, copy_reach=reach, index_orders=())
               for name, reach in reaches.items()},
            f"the track: reach {config.copy_reach:,}, and the index": config}


class Loader(train_gpt.TrainLoader):
    """Notes the processor time of each batch that its thread makes."""

    def __init__(self, *words, **options):
        self.seconds = []
        super().__init__(*words, **options)

    def _next_batch(self, step):
        began = time.thread_time()
        batch = super()._next_batch(step)
        self.seconds.append(time.thread_time() - began)
        return batch


def read_index(index, indexed, runtime):
    """Seconds of processor time that a million tokens take, from each piece of the text."""
    seconds = []
    for low in range(0, len(indexed), PIECE):
        piece = indexed[low:low + PIECE]
        began = time.thread_time()
        index.read(piece, runtime)
        seconds.append((time.thread_time() - began) * PIECE / len(piece))
    return seconds


def measure(config, rounds):
    """({arm: the loader's seconds a step, one value a round}, the passes' seconds likewise, the index's for a million
    tokens of each piece, the index, the validation tokens)."""
    runtime = train_gpt.Runtime("cpu", workers=1)
    trainer, (shards, indexed, val) = train_gpt.Trainer(config, runtime), train_gpt.open_corpus(config)
    train_gpt.warm_up(trainer)
    reading = read_index(trainer.table.index, indexed, runtime)
    loading, passes = {name: [] for name in arms(config)}, []
    for turn in range(rounds):
        for name, of_arm in arms(config).items():
            index = trainer.table.index if of_arm.index_orders else None
            loader = Loader(dataclasses.replace(of_arm, seed=turn), shards, runtime, index=index)  # other pieces
            batches = [loader.next() for _ in range(config.steps)]
            loader.close()
            loading[name].append(statistics.mean(loader.seconds))
        seconds = []
        for step, batch in enumerate(batches):  # of the last arm, which is the track's own
            began = time.thread_time()
            trainer.accumulate(step, batch)
            seconds.append(time.thread_time() - began)
            trainer.optimizer.step(step, 1.0)
        passes.append(statistics.median(seconds))
    return loading, passes, reading, trainer.table.index, val


def guesses_of(config, index, tokens):
    """The tokens (n, O) that copies and the index guess to follow each of these, NO_GUESS for none."""
    text, position = train_gpt.Text(tokens, config), np.arange(len(tokens))
    return np.concatenate([text.copies(position), index.guesses(text.keys(position, config.index_orders)) & 0xFFFF], 1)


def success(config, index, val):
    """[{"kind", "order", "coverage", "hit_rate"}] on the validation tokens."""
    guesses = guesses_of(config, index, np.array(val[:config.val_tokens]))
    made, right = guesses != train_gpt.NO_GUESS, guesses == val[1:config.val_tokens + 1, None]
    places = ["latest place", "place before", *(f"place {number}" for number in range(3, config.copy_places + 1))]
    columns = [(f"copy, {place}", n) for place in places[:config.copy_places] for n in config.copy_orders] + [
        ("index", n) for n in config.index_orders]
    return [{"kind": kind, "order": n, "coverage": made[:, column].mean(),
             "hit_rate": right[:, column].sum() / max(1, made[:, column].sum())}
            for column, (kind, n) in enumerate(columns)]


def spread(values):
    return f"{statistics.median(values):.3f}", f"{min(values):.3f} to {max(values):.3f}"


def main(argv=None):
    track = train_gpt.TRACKS["nano"]
    arguments = common.parser(__doc__, rounds=3, steps=track.steps, val_tokens=track.val_tokens,
                              data=common.ROOT / track.data, tiny=False).parse_args(argv)
    overrides = common.TINY if arguments.tiny else {"val_tokens": arguments.val_tokens}
    config = dataclasses.replace(track, **{**overrides, "data": str(arguments.data), "device": "cpu", "seed": 0,
                                           "steps": arguments.steps, "val_sha256": ""})
    load = os.getloadavg()[0]
    loading, passes, reading, index, val = measure(config, arguments.rounds)
    ratios = {name: [own / step for own, step in zip(seconds, passes)] for name, seconds in loading.items()}
    step, piece = statistics.median(passes), statistics.median(reading)
    found = success(config, index, val)
    costs = common.markdown_table(["loader with", "time / forward and backward", "range", "ms a step"],
                                  [[name, *spread(ratios[name]), f"{1000 * statistics.median(loading[name]):.1f}"]
                                   for name in loading])
    rates = common.markdown_table(["guesses of", "order", "coverage", "hit rate"],
                                  [[row["kind"], row["order"], f"{row['coverage']:.1%}", f"{row['hit_rate']:.1%}"]
                                   for row in found])
    text = (f"{costs}\n\nProcessor time of one thread, over the {arguments.steps} steps of a run, whose forward and "
            f"backward passes take {1000 * step:.1f} ms each: medians of {arguments.rounds} rounds. A million tokens "
            f"take the index {piece / step:.1f} times as long, {piece:.2f} s. The load average at the start was "
            f"{load:.1f}, on {os.cpu_count()} cores.\n\n{rates}\n\n{config.val_tokens:,} validation tokens; the index "
            f"has read some {len(reading)} million tokens of training text.")
    data = {"ratios": ratios, "loader_seconds": loading, "step_seconds": passes, "index_seconds": reading,
            "columns": found, "load_average": load, "compile": train_gpt.choose_compile(config, torch.device("cpu"))}
    common.write_results(arguments.results, "copies", common.environment("cpu"), data, text)
    print(text)
    print(f"loader_over_step:{statistics.median(ratios[list(ratios)[-1]]):.3f} index_steps:{piece / step:.1f}")


if __name__ == "__main__":
    main()
