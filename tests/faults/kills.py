"""Kills at random moments, over many settings: each run is killed and resumed until it is complete,
and compared with one that nobody killed. Writes kills.md, the table of counts.

    python tests/faults/kills.py [--kills 200] [--out tests/faults/kills.md]
"""

import argparse
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch

import helpers
import ranks

SETTINGS = {  # name: (ranks before a kill, ranks after it, what differs from helpers.RICH)
    "one rank": (1, 1, {}),
    "bfloat16": (1, 1, {"dtype": "bfloat16"}),
    "no table": (1, 1, helpers.NO_TABLE),
    "two ranks": (2, 2, {}),
    "two ranks, soap": (2, 2, {"matrix_update": "soap", "basis_every": 3}),
    "three ranks": (3, 3, {}),
    "two ranks, then one": (2, 1, {}),
    "one rank, then two, adam": (1, 2, {"matrix_update": "adam"}),
}
ALWAYS = {"save_every": 4, "resume": "auto", "run_id": "run"}
TOLERANCE = 1e-4  # of losses where the number of ranks changes
PAGE = """Written by `python tests/faults/kills.py`. SIGKILL at a random moment, to all ranks or one
of them, then `--resume auto`: wrong is a run that does not finish, or whose checkpoint, training
losses or final loss differ from those of the run that nobody killed: by a bit, or, where the number
of ranks changes, by {tolerance}.

| setting | runs | kills | wrong |
|---|---|---|---|
{rows}

Seed {seed}, commit {commit}, torch {torch}.
"""


def train(place, values, world_size, after=None, victims=()):
    """Train on so many ranks in a folder; those of `victims` are killed after so many seconds.
    Returns the exit status."""

    def before():
        if after is not None and int(os.environ["RANK"]) in victims:
            killer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL))
            killer.daemon = True
            killer.start()

    return ranks.train(place, values, world_size=world_size, before=before)


def kill_and_resume(place, values, world_sizes, seconds, rng):
    """One run that is killed up to three times, within so many seconds of a start each. Returns
    (its last start, how often it was killed)."""
    world_size, kills = world_sizes[0], 0
    for attempt in range(100):
        everybody = range(world_size)
        victims = everybody if rng.random() < 0.5 else [rng.choice(everybody)]
        after = rng.uniform(0, seconds) if attempt < 3 else None
        run = train(place, values, world_size, after, victims)
        kills += run.code == -signal.SIGKILL
        if run.code == 0:
            break
        world_size = world_sizes[1]
    return run, kills


def difference(run, whole, is_exact):
    """What of a run is not as in the one that nobody killed, in words."""
    if run.code:
        return f"not finished: {run.stdout[-200:]}"
    if is_exact:
        try:
            helpers.assert_same_end(run, whole)
        except AssertionError as error:
            return f"differs: {error}"
        return ""
    losses, expected = run.train_losses, whole.train_losses
    worst = max(abs(losses[step] - loss) for step, loss in expected.items())
    return "" if worst < TOLERANCE else f"losses differ by {worst:.1e}"


def kill_runs(name, kills, folder, corpus, rng):
    """Runs of one setting until so many kills are done. Returns (runs, kills, what was wrong, as
    words)."""
    *world_sizes, changes = SETTINGS[name]
    values = {**helpers.RICH, "data": str(corpus), "val_every": 6, **ALWAYS, **changes}
    (folder / "whole").mkdir(parents=True)
    began = time.monotonic()
    whole = train(folder / "whole", values, world_sizes[0])
    assert whole.code == 0, whole.stdout + whole.stderr
    seconds = time.monotonic() - began
    runs, done, wrong = 0, 0, []
    while done < kills:
        place = folder / f"run{runs}"
        place.mkdir()
        run, times = kill_and_resume(place, values, world_sizes, seconds, rng)
        runs, done = runs + 1, done + times
        if found := difference(run, whole, world_sizes[0] == world_sizes[1]):
            wrong.append(f"{name}: {found}")
        shutil.rmtree(place)
    return runs, done, wrong


def write(path, rows, seed):
    """The table of what has been done so far, and of which commit."""
    sums = [sum(row[column] for row in rows) for column in (1, 2, 3)]
    lines = [f"| {' | '.join(map(str, row))} |" for row in [*rows, ("all", *sums)]]
    commit, is_dirty = ranks.train_gpt.git_state()
    commit = commit[:12] + " with changes" * is_dirty
    made_of = {"seed": seed, "commit": commit, "torch": torch.__version__}
    path.write_text(PAGE.format(rows="\n".join(lines), tolerance=TOLERANCE, **made_of))


def main():
    """Returns how many runs were wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    given = parser.parse_args()
    rng, rows = random.Random(given.seed), []
    with tempfile.TemporaryDirectory() as folder:
        corpus = helpers.make_corpus(Path(folder) / "corpus")
        for index, name in enumerate(SETTINGS):
            share = math.ceil(given.kills / len(SETTINGS))
            runs, kills, wrong = kill_runs(name, share, Path(folder) / str(index), corpus, rng)
            rows.append((name, runs, kills, len(wrong)))
            print(*rows[-1], *wrong, sep=" | ", flush=True)
            write(given.out, rows, given.seed)
    return sum(row[3] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
