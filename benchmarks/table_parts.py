"""What each part of the table is worth on english: the loss without it, and with other numbers.

    python benchmarks/table_parts.py [--minutes 60]

A row is the track english with one change: a part is left out, or has another number. Rows of
parts have five seeds, rows of numbers the first three of these. As many runs go on at once as there
are cores, each with one thread; seconds are processor time, of training and of reading the index. A
call goes on where the last one stopped, and begins no run once its minutes are over. At first it
looks at the loss of a run in training, seed 1, at every step, beside what needs no training on the
same text: the index alone, and PPMd, which is measured where pyppmd is installed (`pip install
pyppmd==1.3.1`).

Results: benchmarks/results/table_parts.{json,md}. The last line is
`table_parts whole:<nats a token> without:<nats a token> seeds:<n>`, without the whole table, and
`ppmd_passed_after:<seconds>`: processor seconds until a look finds less than PPMd of order 16.
"""

import functools
import hashlib
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tiktoken.load import load_tiktoken_bpe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common, peers, plain_gpt
from benchmarks.common import train_gpt

NAME = "table_parts"
TRACK = "english"
SEEDS = (1, 2, 3, 4, 5)
SEEDS_OF_NUMBERS = SEEDS[:3]
WHOLE = "the whole table"
WITHOUT = "no table"
UNKNOWN = "not measured"
LOOK_EVERY = 1  # steps
NO_TABLE = {"ngram_orders": (), "copy_orders": (), "index_order": 0}

PARTS = {  # what differs from the track
    WHOLE: {},
    "no index": {"index_order": 0},
    "no copies": {"copy_orders": ()},
    "no n-grams": {"ngram_orders": ()},
    WITHOUT: NO_TABLE,
}
NUMBERS = {
    "index of contexts up to 2": {"index_order": 2},
    "index of contexts up to 3": {"index_order": 3},
    "index of contexts up to 5": {"index_order": 5},
    "index of contexts up to 6": {"index_order": 6},
    "index of a quarter of its text": {"index_tokens": 1_475_000},
    "copies of order 2": {"copy_orders": (2,)},
    "copies of orders 2, 3, 5": {"copy_orders": (2, 3, 5)},
    "n-grams of orders 2, 3": {"ngram_orders": (2, 3)},
}


class Run(NamedTuple):
    """One training: the row that it belongs to, its setting in words, and the seed."""

    row: str
    setting: str
    seed: int


def config_of(row, seed):
    """The Config of a run."""
    own = {"seed": seed, "device": "cpu", **{**PARTS, **NUMBERS}[row]}
    return train_gpt.with_values(train_gpt.TRACKS[TRACK], own)


def wanted():
    """All runs in their order."""
    for rows, seeds in ((PARTS, SEEDS), (NUMBERS, SEEDS_OF_NUMBERS)):
        for row, seed in itertools.product(rows, seeds):
            setting = repr(config_of(row, seed))
            yield Run(row, hashlib.sha256(setting.encode()).hexdigest()[:16], seed)


def measure(run, deadline):
    """The figures of a run, as they stand in the results; None once the time is over."""
    if time.time() > deadline:
        return None
    torch.set_num_threads(1)
    loss, seconds = common.trained(config_of(run.row, run.seed))
    return {**run._asdict(), "loss": loss, "seconds": round(seconds, 2)}


def measured(due, deadline):
    """Yield what `measure` finds of these runs, as many at once as there are cores."""
    if due:
        with multiprocessing.get_context("spawn").Pool(train_gpt.usable_cores()) as pool:
            yield from pool.imap_unordered(functools.partial(measure, deadline=deadline), due)


def report(runs):
    """(the page, the last line) of the figures of the runs that are wanted."""
    found = {run: None for run in wanted()}
    found |= {run_of(figures): figures for figures in runs if run_of(figures) in found}
    of_row = {run.row: [] for run in found}
    for run, figures in found.items():
        of_row[run.row] += [figures] if figures else []
    of_seed = {own["seed"]: own["loss"] for own in of_row[WHOLE]}
    rows = []
    for row, own in of_row.items():
        losses = [figures["loss"] for figures in own]
        gaps = [own["loss"] - of_seed[own["seed"]] for own in own if own["seed"] in of_seed]
        loss = common.spread(losses, 4) if own else UNKNOWN
        worse = f"{statistics.mean(gaps):+.4f}" if gaps and row != WHOLE else ""
        seconds = common.spread([figures["seconds"] for figures in own], 1) if own else ""
        rows.append([row, loss, worse, seconds, len(own)])
    header = ["english with", "validation loss", "worse by", "processor seconds", "n"]
    whole, without = (
        f"{statistics.mean(own['loss'] for own in of_row[row]):.4f}" if of_row[row] else UNKNOWN
        for row in (WHOLE, WITHOUT)
    )
    line = f"{NAME} whole:{whole} without:{without} seeds:{len(of_row[WITHOUT])}"
    return common.markdown_table(header, rows), line


def text_of(tokens):
    """The UTF-8 bytes that tokens (n,) of the corpus stand for; ends of texts have none."""
    config = train_gpt.TRACKS[TRACK]
    ranks = load_tiktoken_bpe(str(common.ROOT / "data" / config.tokenizer))
    pieces = {number: piece for piece, number in ranks.items()}
    return b"".join(pieces.get(number, b"") for number in tokens.tolist())


def index_alone():
    """(nats a token, processor seconds) of the track's index without a model."""
    config = config_of(WHOLE, SEEDS[0])
    corpus = train_gpt.open_corpus(config)
    index = train_gpt.Index(config)
    train_gpt.row_fingerprint(config)  # compiles its loops
    began = time.process_time()
    index.read(corpus.indexed)
    prior = index.prior(corpus.val, 0, len(corpus.val) - 1)
    return -np.log(prior, dtype=np.float64).mean(), time.process_time() - began


def with_ppmd():
    """{what: (nats a token, processor seconds)} of PPMd on the text that the track reads."""
    if peers.pyppmd is None:
        return {}
    corpus = plain_gpt.Corpus(common.ROOT / train_gpt.TRACKS[TRACK].data)
    parts = [text_of(tokens) for tokens in (corpus.train, corpus.val[1:])]
    found = {}
    for order in map(str, peers.PPMD_ORDERS):  # as JSON has keys
        loss, seconds = peers.code_with_ppmd(int(order), parts)
        found[order] = loss * len(parts[1]) / (len(corpus.val) - 1), seconds
    return found


def run_of(figures):
    return Run(*(figures[name] for name in Run._fields))


def report_untrained(index, ppmd, looks):
    """(the second table, the end of the last line): the index, PPMd, and the looks at a run in
    training."""
    rows = [["the index alone", *index]] if index else []
    rows += [[f"PPMd of order {order}", *ppmd[order]] for order in ppmd]
    rows += [[f"english after {steps} steps", loss, seconds] for steps, seconds, loss in looks]
    shown = [[what, f"{loss:.4f}", f"{seconds:.1f}"] for what, loss, seconds in rows]
    bound, _ = ppmd.get(str(max(peers.PPMD_ORDERS)), (0.0, 0.0))
    passed = next((f"{seconds:.1f}" for _, seconds, loss in looks if loss < bound), UNKNOWN)
    header = ["what", "nats a token", "processor seconds"]
    return common.markdown_table(header, shown), f" ppmd_passed_after:{passed}"


def main(argv=None):
    arguments = common.parser(__doc__, minutes=60.0).parse_args(argv)
    deadline = time.time() + 60 * arguments.minutes
    facts = common.environment("cpu")
    path = Path(arguments.results) / f"{NAME}.json"
    known = {"runs": [], "index": [], "ppmd": {}, "looks": []}
    known |= json.loads(path.read_text()) if path.is_file() else {}
    done = {run_of(figures) for figures in known["runs"]}

    def keep():
        page, line = report(known["runs"])
        second, end = report_untrained(known["index"], known["ppmd"], known["looks"])
        text = f"{page}\n\n{second}\n\n`{line}{end}`"
        data = {name: known[name] for name in ("runs", "index", "ppmd", "looks")}
        common.write_results(arguments.results, NAME, facts, data, text)
        return line + end

    if not known["looks"] and time.time() < deadline:
        torch.set_num_threads(1)
        known["index"] = index_alone()
        known["ppmd"] |= with_ppmd()
        known["looks"] = list(common.curve(config_of(WHOLE, SEEDS[0]), LOOK_EVERY))
        keep()
    due = [run for run in wanted() if run not in done and time.time() < deadline]
    for figures in measured(due, deadline):
        known["runs"] += [{**figures, "commit": facts["commit"]}] if figures else []
        keep()
    print(keep())


if __name__ == "__main__":
    main()
