"""The n-gram table, and whole runs with it, on several ranks. Ranks are forked from this process, which has imported
torch by then: a group of them starts in a fraction of a second.

    python ngram_ranks.py FOLDER CORPUS

FOLDER/table<W>/rank<r>.pt has {case: {variant: what `take_steps` returns}} of rank r of W, and what came of
`exchanges`. FOLDER/runs/<name>/ is where a run of RUNS or RESUMED worked; out<r>.txt and err<r>.txt have the words
of rank r, code.txt the exit status. test_ngram_table.py compares all that with slow references.
"""
import dataclasses
import functools
import os
import shutil
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

import numpy as np
import torch

import train_gpt
from helpers import TINY, arguments, tiny_config
from train_gpt import NgramTable, Runtime, plan_rows

WORLD_SIZES = (1, 2, 3, 4, 8)
MICRO_BATCHES, ORDERS = 24, 2
ONE_RANK_SECONDS = 100  # after which something hangs
VARIANTS = {"tokens": {"ngram_comms": "tokens"}, "rows": {"ngram_comms": "rows"},
            "row_sharded": {"ngram_comms": "row_sharded"},
            "host": {"ngram_comms": "row_sharded", "ngram_host": True}}


# ----- made-up reads and gradients

@dataclasses.dataclass(frozen=True)
class Case:
    """A table and what is read of it. rows 0: as many as ranks. pick: how rows are drawn, see `draw`."""
    rows: int
    steps: int
    every: int = 1
    dim: int = 16
    decay: float = 0.0
    pick: str = "skewed"
    tokens: int = 3  # of a micro-batch in the first step; the next two have one and two more, and so on
    variants: tuple = ("tokens", "rows", "row_sharded")


CASES = {
    "one step": Case(rows=101, steps=1, variants=tuple(VARIANTS)),
    "fifty steps": Case(rows=101, steps=50, tokens=2),
    "two steps a cycle": Case(rows=101, steps=7, every=2, decay=0.3, variants=tuple(VARIANTS)),
    "three steps a cycle": Case(rows=50, steps=7, every=3),
    "shares that are empty": Case(rows=5, steps=4),
    "a row for each rank": Case(rows=0, steps=4),
    "own rows alone": Case(rows=101, steps=3, pick="own"),
    "foreign rows alone": Case(rows=101, steps=3, pick="foreign"),
    "one row for all": Case(rows=20, steps=3, pick="same"),
    "an idle rank": Case(rows=20, steps=3, pick="idle", variants=("rows", "row_sharded")),
    "decay": Case(rows=60, steps=200, decay=0.5, pick="silent", tokens=1, variants=("row_sharded",)),
    "wide": Case(rows=3000, steps=2, dim=128, tokens=60, pick="uniform"),
}


def rows_of(case, world_size):
    return case.rows or world_size


def owner_bounds(case, world_size, rank):
    """The rows [low, high) of a rank's share."""
    rows = rows_of(case, world_size)
    chunk = -(-rows // world_size)
    return min(rows, rank * chunk), min(rows, (rank + 1) * chunk)


def lr_at(case, step):
    return 0.1 * (1 - 0.5 * step / case.steps)


@functools.lru_cache(maxsize=300)
def draw(name, world_size, step):
    """What the micro-batches of a step read: a list of (rows (n, O), signs (n, O), gradients of the tokens' own losses
    (n, dim)). Micro-batch m is rank m % world_size's."""
    case, rng = CASES[name], np.random.default_rng([*name.encode(), world_size, step])
    rows, parts = rows_of(case, world_size), []
    for micro_batch in range(MICRO_BATCHES):
        rank = micro_batch % world_size
        shape = (0 if case.pick == "idle" and rank == 0 else case.tokens + step % 3, ORDERS)
        low, high = 0, rows
        if case.pick in ("own", "foreign"):
            low, high = owner_bounds(case, world_size, (rank + (case.pick == "foreign")) % world_size)
        if case.pick == "silent":  # some rows rest for 100 steps, some are never read
            high = rows // 2 if 50 <= step < 150 else rows - 5
        skew = 1 if case.pick == "uniform" else 2  # low rows are read most
        ids = low + (rng.random(shape) ** skew * (high - low)).astype(np.int32)
        if case.pick == "same":
            ids[:] = 7
        parts.append((ids, rng.choice([-1.0, 1.0], size=shape).astype(np.float32),
                      rng.standard_normal((len(ids), case.dim)).astype(np.float32)))
    return parts


def start_of(name, world_size):
    """The table's full state before the first step."""
    case, rng = CASES[name], np.random.default_rng(0)
    rows = rows_of(case, world_size)
    return {"weight": torch.from_numpy(rng.standard_normal((rows, case.dim))).float(),
            "second": torch.from_numpy(rng.random(rows)).float(), "scale": 1.0}


def cycles_of(case):
    return [range(first, min(first + case.every, case.steps)) for first in range(0, case.steps, case.every)]


# ----- one rank's steps

def plan_cycle(name, cycle, config, runtime):
    """(plan, gradients) of the steps of a cycle as this rank's loader and model would hand them over: those of the
    mean loss, a tensor a micro-batch."""
    own, readers = runtime.rank, [runtime.rank]
    if config.ngram_comms == "tokens":
        readers = range(runtime.world_size)
    rows, weights, grads = [], [], []
    for reader in readers:
        for step in cycle:
            parts = draw(name, runtime.world_size, step)
            total = sum(len(ids) for ids, _, _ in parts)
            for ids, signs, token_grads in parts[reader::runtime.world_size]:
                rows.append(ids), weights.append(signs * total)
                if reader == own:
                    grads.append(torch.from_numpy(token_grads / np.float32(total)).to(runtime.device))
    plan, slots = plan_rows(np.concatenate(rows), np.concatenate(weights), config, runtime)
    assert np.array_equal(plan.rows.cpu().numpy()[slots], np.concatenate(rows))
    return plan, grads


def take_steps(name, variant, runtime):
    """The case's steps with the table's own communication. Returns what they left."""
    case = CASES[name]
    config = tiny_config(model_dim=case.dim, head_dim=4, ngram_rows=rows_of(case, runtime.world_size), steps=case.steps,
                         ngram_every=case.every, ngram_decay=case.decay, **VARIANTS[variant])
    table = NgramTable(config, runtime)
    table.load_full_state(start_of(name, runtime.world_size))
    runtime.ledger.clear()
    pulled, sharded = [], config.ngram_comms == "row_sharded"
    cycles = cycles_of(case)
    plan, grads = plan_cycle(name, cycles[0], config, runtime)
    for number, cycle in enumerate(cycles):
        table.pull(plan)
        if sharded and number % 10 == 1:  # a validation between the prefetch and its use
            every_other = np.arange(runtime.rank, config.ngram_rows, 2, dtype=np.int32)[:, None]
            seen, _ = plan_rows(every_other, np.ones_like(every_other, dtype=np.float32), config, runtime,
                                name="validation")
            values = table.arrived(*table.start_pull(seen, "validation"))
            pulled.append((number, seen.rows, values * table.scale))
        if sharded:
            pulled.append((number, plan.rows, table.arrived(*table.pulled[1:]) * table.scale))
        table.grads = grads
        following = None
        if number + 1 < len(cycles):
            following, grads = plan_cycle(name, cycles[number + 1], config, runtime)
        table.send(plan)
        table.update(lr_at(case, cycle[-1]))
        if following:
            table.pull(following)
        table.finish()
        plan = following
    ledger = {f"{collective}/{what}": tuple(counts) for (collective, what), counts in runtime.ledger.items()}
    full = table.full_state()
    return {"full": full, "replica": None if sharded else table.weight.clone(), "pulled": pulled, "ledger": ledger,
            "reloaded": reload(full, config, runtime) if name == "two steps a cycle" else {}}


def reload(full, config, runtime):
    """{comms: the full state after it was loaded into a table that communicates so}."""
    full, states = runtime.broadcast_object(full), {}
    for comms in ("tokens", "rows", "row_sharded"):
        table = NgramTable(dataclasses.replace(config, ngram_comms=comms, ngram_host=False), runtime)
        table.load_full_state(full)
        states[comms] = table.full_state()
    return states


def sent_rows(source, target, world_size):
    """What rank `source` sends to rank `target` in `exchanges`: sometimes nothing."""
    return [(source * world_size + target) * 10 + row for row in range((source + 2 * target) % 3)]


def exchanges(runtime):
    """Uneven and empty all_to_alls. Returns what arrived, and the ledger."""
    rank, world_size = runtime.rank, runtime.world_size
    runtime.ledger.clear()
    counts = [[len(sent_rows(source, target, world_size)) for target in range(world_size)]
              for source in range(world_size)]
    mine = [row for target in range(world_size) for row in sent_rows(rank, target, world_size)]
    tensor = torch.tensor(mine, dtype=torch.float32)[:, None].expand(-1, 3)  # not contiguous
    out, work = runtime.all_to_all(tensor, counts[rank], [row[rank] for row in counts], "uneven")
    train_gpt.wait(work)
    nothing, work = runtime.all_to_all(torch.empty(0, 5), [0] * world_size, [0] * world_size, "empty")
    train_gpt.wait(work)
    return {"uneven": out.clone(), "empty": nothing, "ledger": dict(runtime.ledger)}


def tables(folder):
    runtime = Runtime("cpu", timeout_s=60)
    results = {name: {variant: take_steps(name, variant, runtime) for variant in case.variants}
               for name, case in CASES.items()}
    torch.save({"cases": results, "exchanges": exchanges(runtime)}, Path(folder) / f"rank{runtime.rank}.pt")
    runtime.close()


# ----- whole runs: 1 to 4 ranks; five validation micro-batches, so that some ranks have one less; a cycle of four
# steps, among them a validation and a step of more tokens, and one of the two steps that are left

COMMON = {**TINY, "steps": 6, "micro_batches": ((0.0, 4), (0.5, 8)), "val_tokens": 1280, "val_every": 2,
          "save_every": 4, "ngram_decay": 0.5, "run_id": "run"}
RUNS = {f"{comms} {every} {world_size}": (world_size, {"ngram_comms": comms, "ngram_every": every})
        for comms in ("tokens", "rows", "row_sharded") for every in (1, 4) for world_size in (1, 2, 4)}
RUNS["host"] = (2, {"ngram_comms": "row_sharded", "ngram_every": 4, "ngram_host": True})
RUNS["few rows"] = (4, {"ngram_rows": 3, "ngram_comms": "rows"})
for comms in ("rows", "row_sharded"):
    RUNS[f"{comms}, wrong"] = (2, {"ngram_comms": comms, "steps": 40})
    RUNS[f"{comms}, diverging"] = (2, {"ngram_comms": comms, "steps": 40, "adam_lr": 1e30})
RESUMED = {"resumed": ("row_sharded 4 2", 2), "resumed by one": ("row_sharded 4 2", 1),
           "resumed rows": ("rows 4 2", 2)}
WRONG_ROW = 123_456


def spoil_second_rank():
    """The hash leaves the table on rank 1, in the loader's thread alone."""
    honest = train_gpt.ngram_rows

    def wrong(*words):
        rows, signs = honest(*words)
        if threading.current_thread() is not threading.main_thread() and os.environ["RANK"] == "1":
            rows[5, 0] = WRONG_ROW
        return rows, signs

    train_gpt.ngram_rows = wrong


def train(folder, words, wrong):
    """The trainer's command line in `folder`. Returns its exit status."""
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}{os.environ['RANK']}.txt", os.O_WRONLY | os.O_CREAT), number)
    train_gpt.plot_losses = lambda folder: None  # half of the time of such a run
    if wrong:
        spoil_second_rank()
    return train_gpt.main(words)


def launch(folder, world_size, words, wrong=False):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "code.txt").write_text(str(fork(world_size, train, folder, words, wrong)))


def fork(world_size, function, *words):
    """Call a function on so many ranks, each a process, as a launcher would: when one fails the others are ended.
    Returns the exit status of the first that failed, or 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    left, code = set(), 0
    for rank in range(world_size):
        child = os.fork()
        if not child:
            signal.alarm(ONE_RANK_SECONDS)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                              LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            status = 1
            try:
                status = function(*words) or 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(status)
        left.add(child)
    while left:
        child, status = os.wait()
        left.remove(child)
        if status:
            code = code or os.waitstatus_to_exitcode(status)
            for other in left:
                os.kill(other, signal.SIGTERM)
    return code


def main(folder, corpus):
    for world_size in WORLD_SIZES:
        place = folder / f"table{world_size}"
        place.mkdir()
        if fork(world_size, tables, place):
            return 1
    for name, (world_size, values) in RUNS.items():
        words = arguments({**COMMON, "data": corpus, **values})
        launch(folder / "runs" / name, world_size, words, wrong="wrong" in name)
    for name, (former, world_size) in RESUMED.items():
        logs = folder / "runs" / former / "logs"
        shutil.copytree(logs, folder / "runs" / name / "logs", ignore=shutil.ignore_patterns("checkpoint.*"))
        launch(folder / "runs" / name, world_size, ["--resume", "run"])
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
