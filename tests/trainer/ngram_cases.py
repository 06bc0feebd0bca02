"""The n-gram table, and whole runs with it, on several ranks: what is read and updated, and
functions that ranks call. test_ngram_table.py compares what they return with slow references."""

import dataclasses
import functools

import numpy as np
import torch

import train_gpt
from helpers import INDEX, NO_TABLE, TINY, make_trainer, tiny_config
from train_gpt import NgramTable, plan_rows

ORDERS = 2
INDEX_BITS = 5
MICRO_BATCHES = 12


# ----- made-up reads and gradients


@dataclasses.dataclass(frozen=True)
class Case:
    """A table, and what is read of it."""

    rows: int  # 0: as many as ranks
    steps: int
    dim: int = 16
    pick: str = "skewed"  # how rows are drawn, see `draw`
    tokens: int = 3  # of a micro-batch in the first step; one and two more in the next ones


CASES = {
    "one step": Case(rows=101, steps=1),
    "twenty steps": Case(rows=101, steps=20, tokens=2),
    "half as many rows": Case(rows=50, steps=7),
    "ranges that are empty": Case(rows=5, steps=4),
    "a row for each rank": Case(rows=0, steps=4),
    "own rows alone": Case(rows=101, steps=3, pick="own"),
    "foreign rows alone": Case(rows=101, steps=3, pick="foreign"),
    "one row for all": Case(rows=20, steps=3, pick="same"),
    "an idle rank": Case(rows=20, steps=3, pick="idle"),
    "wide": Case(rows=3000, steps=2, dim=128, tokens=60, pick="uniform"),
}


def rows_of(case, world_size):
    return case.rows or world_size


def owner_bounds(case, world_size, rank):
    """The rows [low, high) that a rank owns."""
    rows = rows_of(case, world_size)
    chunk = (rows + world_size - 1) // world_size
    return min(rows, rank * chunk), min(rows, (rank + 1) * chunk)


def lr_multiplier(case, step):
    return 1 - 0.5 * step / case.steps


@functools.cache
def draw(name, world_size, step):
    """What the micro-batches of a step read, of which the m-th is rank m % world_size's.

    Returns a list of (rows (n, O), signs (n, O), gradients of the tokens' losses (n, dim)).
    """
    case, rng = CASES[name], np.random.default_rng([*name.encode(), world_size, step])
    rows, parts = rows_of(case, world_size), []
    for micro_batch in range(MICRO_BATCHES):
        rank = micro_batch % world_size
        is_idle = case.pick == "idle" and rank == 0
        shape = (0 if is_idle else case.tokens + step % 3, ORDERS)
        low, high = 0, rows
        if case.pick == "own":
            low, high = owner_bounds(case, world_size, rank)
        if case.pick == "foreign":
            low, high = owner_bounds(case, world_size, (rank + 1) % world_size)
        skew = 1 if case.pick == "uniform" else 2  # low rows are read most
        ids = low + (rng.random(shape) ** skew * (high - low)).astype(np.int32)
        if case.pick == "same":
            ids[:] = 7
        signs = rng.choice([-1.0, 1.0, 0.0], p=[0.4, 0.4, 0.2], size=shape).astype(np.float32)
        grads = rng.standard_normal((len(ids), case.dim)).astype(np.float32)
        parts.append((ids, signs, 0.3 * grads))
    return parts


def start_of(name, world_size):
    """The table's full state before the first step."""
    case, rng = CASES[name], np.random.default_rng(0)
    rows = rows_of(case, world_size)
    index = rng.integers(0, 2**31, (1, 2**INDEX_BITS)).astype(np.int32)
    return {
        "weight": torch.from_numpy(rng.standard_normal((rows, case.dim))).float(),
        "second": torch.from_numpy(rng.random(rows)).float(),
        "index": torch.from_numpy(index),
    }


# ----- one rank's steps


def plan_step(name, step, config, runtime):
    """A step as this rank's loader and model would hand it over: (plan, slots, rows, gradients of
    each micro-batch)."""
    parts = draw(name, runtime.world_size, step)[runtime.rank :: runtime.world_size]
    rows = np.concatenate([ids for ids, _, _ in parts])
    signs = np.concatenate([of_ids for _, of_ids, _ in parts])
    grads = [torch.from_numpy(grad).to(runtime.device) for _, _, grad in parts]
    return *plan_rows(rows, signs, config, runtime, runtime.loader_group), rows, grads


def read_outside_training(table, rows):
    """The values of rows (n, 1), as validation reads them."""
    signs = np.ones(rows.shape, dtype=np.float32)
    plan, slots = plan_rows(rows, signs, table.config, table.runtime, name="validation")
    values, work = table.fetch(plan, "validation")
    train_gpt.wait(work)
    return values.cpu()[slots]


def take_steps(name, runtime):
    """The case's steps with the table's own communication. Returns what they left."""
    case = CASES[name]
    config = tiny_config(
        model_dim=case.dim,
        head_dim=4,
        ngram_rows=rows_of(case, runtime.world_size),
        steps=case.steps,
        index_bits=INDEX_BITS,
        **INDEX,
    )
    table = NgramTable(config, runtime)
    table.load(start_of(name, runtime.world_size))
    held = table.weight.shape
    runtime.ledger.clear()
    seen = []  # (step, rows, their values)
    upcoming = plan_step(name, 0, config, runtime)
    for step in range(case.steps):
        plan, slots, rows, grads = upcoming
        if step % 10 == 1:  # a validation between the pull and its use
            every_other = np.arange(runtime.rank, config.ngram_rows, 2, dtype=np.int32)[:, None]
            values = read_outside_training(table, every_other)
            seen.append((step, torch.from_numpy(every_other), values))
        values = table.values_of(plan).cpu()
        seen.append((step, torch.from_numpy(rows), values[slots]))
        for grad in grads:
            table.accumulate(grad)
        if step + 1 < case.steps:
            upcoming = plan_step(name, step + 1, config, runtime)
        pending = table.reduce(step)
        table.receive(table.update(step, lr_multiplier(case, step), pending))
        if step + 1 < case.steps:
            table.start_pull(upcoming[0])
    ledger = {
        f"{collective}/{what}": tuple(counts)
        for (collective, what), counts in runtime.ledger.items()
    }
    full = table.full_state()
    table.load(full)
    return {"full": full, "again": table.full_state(), "held": held, "seen": seen, "ledger": ledger}


def sent_rows(source, target, world_size):
    """What rank `source` sends to rank `target` in `exchanges`: sometimes nothing."""
    first = 10 * (source * world_size + target)
    return [first + row for row in range((source + 2 * target) % 3)]


def exchanges(runtime):
    """Uneven and empty all_to_alls. Returns what arrived, and the ledger."""
    rank, world_size = runtime.rank, runtime.world_size
    runtime.ledger.clear()
    everyone = range(world_size)
    send = [len(sent_rows(rank, target, world_size)) for target in everyone]
    receive = [len(sent_rows(source, rank, world_size)) for source in everyone]
    mine = [row for target in everyone for row in sent_rows(rank, target, world_size)]
    tensor = torch.tensor(mine, dtype=torch.float32)[:, None].repeat(1, 3)
    out, work = runtime.all_to_all(tensor, send, receive, "uneven")
    train_gpt.wait(work)
    zeros = [0] * world_size
    nothing, work = runtime.all_to_all(torch.empty(0, 5), zeros, zeros, "empty")
    train_gpt.wait(work)
    return {"uneven": out.clone(), "empty": nothing, "ledger": dict(runtime.ledger)}


def steps_with_a_frozen_table(runtime, corpus):
    """Three steps and a validation with a table that has values but no learning rate.

    Returns (losses of the steps and of the validation, the table before, the table after).
    """
    trainer = make_trainer(
        runtime=runtime, steps=3, val_tokens=1280, ngram_lr=0.0, data=str(corpus)
    )
    config, generator = trainer.config, torch.Generator().manual_seed(0)
    before = {
        "weight": torch.randn(config.ngram_rows, config.model_dim, generator=generator),
        "second": torch.rand(config.ngram_rows, generator=generator),
        "index": trainer.table.index.entries,
    }
    trainer.table.load(before)
    found = train_gpt.open_corpus(config)
    loader = train_gpt.TrainLoader(config, found.shards, runtime, trainer.table.index)
    losses, batch = [], loader.next_batch()
    for step in range(config.steps):
        upcoming = loader.next_batch() if step + 1 < config.steps else None
        total = trainer.step(step, batch, upcoming)
        train_gpt.wait(runtime.all_reduce(total, "loss"))
        losses.append(total.item() / batch.tokens)
        batch = upcoming
    loader.close()
    return [*losses, trainer.evaluate(config.steps, found.val)], before, trainer.table.full_state()


def tables(runtime, corpus):
    """{"cases": {name: what take_steps returns}, "exchanges": ..., "frozen": ...} of one rank."""
    return {
        "cases": {name: take_steps(name, runtime) for name in CASES},
        "exchanges": exchanges(runtime),
        "frozen": steps_with_a_frozen_table(runtime, corpus) if runtime.world_size < 3 else None,
    }


# ----- whole runs: 1 to 4 ranks; five passes of validation, so that some ranks have one less

COMMON = {
    **{key: value for key, value in TINY.items() if key != "micro_batches"},
    "steps": 6,
    "stages": ({"start": 0.0, "micro_batches": 4}, {"start": 0.5, "micro_batches": 8}),
    "val_tokens": 1280,
    "val_every": 2,
    "save_every": 4,
    "run_id": "run",
    **INDEX,
}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: its ranks, values beside COMMON, and the name of that run of one process which must
    have its losses."""

    world_size: int
    values: dict
    alone: str = ""


FEW_ROWS = {"ngram_rows": 1}
RUNS = {
    "alone": Run(1, {}),
    "2 ranks": Run(2, {}, "alone"),
    "4 ranks": Run(4, {}, "alone"),
    "alone, no table": Run(1, NO_TABLE),
    "2 ranks, no table": Run(2, NO_TABLE, "alone, no table"),
    "alone, one row": Run(1, FEW_ROWS),
    "2 ranks, one row": Run(2, FEW_ROWS, "alone, one row"),
}
FAILING = {
    "wrong": Run(2, {"steps": 40}),
    "diverging": Run(2, {"steps": 40, "adam_lr": 1e30}),
}
