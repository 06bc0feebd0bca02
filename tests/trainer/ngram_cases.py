"""The n-gram table, and whole runs with it, on several ranks: what is read and updated, and functions that ranks call.
test_ngram_table.py compares what they return with slow references."""
import dataclasses
import functools

import numpy as np
import torch
import torch.distributed as dist

import sabotage
import train_gpt
from helpers import INDEX, NO_TABLE, TINY, make_trainer, tiny_config
from train_gpt import NgramTable, plan_rows

WORLD_SIZES = (1, 2, 3, 4, 8)
ORDERS = 2
INDEX_BITS = 5
VARIANTS = {"replicated": {"ngram_comms": "replicated"}, "sharded": {"ngram_comms": "sharded"},
            "host": {"ngram_comms": "sharded", "ngram_host": True}}


# ----- made-up reads and gradients

@dataclasses.dataclass(frozen=True)
class Case:
    """A table and what is read of it. rows 0: as many as ranks. pick: how rows are drawn, see `draw`."""
    rows: int
    steps: int
    dim: int = 16
    decay: float = 0.0
    pick: str = "skewed"
    tokens: int = 3  # of a micro-batch in the first step; the next two have one and two more, and so on
    micro_batches: int = 24
    variants: tuple = ("replicated", "sharded")
    world_sizes: tuple = WORLD_SIZES


CASES = {
    "one step": Case(rows=101, steps=1, variants=tuple(VARIANTS)),
    "fifty steps": Case(rows=101, steps=50, tokens=2, world_sizes=(1, 2, 3)),
    "decay": Case(rows=101, steps=7, decay=0.3, variants=tuple(VARIANTS)),
    "half as many rows": Case(rows=50, steps=7),
    "shares that are empty": Case(rows=5, steps=4),
    "a row for each rank": Case(rows=0, steps=4),
    "own rows alone": Case(rows=101, steps=3, pick="own"),
    "foreign rows alone": Case(rows=101, steps=3, pick="foreign"),
    "one row for all": Case(rows=20, steps=3, pick="same"),
    "an idle rank": Case(rows=20, steps=3, pick="idle"),
    "wide": Case(rows=3000, steps=2, dim=128, tokens=60, pick="uniform"),
    "decay and folds": Case(rows=30, steps=1000, decay=1.0, pick="rare", micro_batches=4, dim=12, world_sizes=(1, 2)),
}
ALL = [(world_size, name, variant) for name, case in CASES.items() for variant in case.variants
       for world_size in case.world_sizes]


def rows_of(case, world_size):
    return case.rows or world_size


def owner_bounds(case, world_size, rank):
    """The rows [low, high) of a rank's share."""
    rows = rows_of(case, world_size)
    chunk = -(-rows // world_size)
    return min(rows, rank * chunk), min(rows, (rank + 1) * chunk)


def lr_multiplier(case, step):
    return 1 - 0.5 * step / case.steps


def pattern_of(case, step):
    """Steps of one pattern read the same: in the long case, whose plans would take long, there are few."""
    if case.pick != "rare":
        return step
    return 7 + step // 250 if step % 250 == 249 else step % 7


def draw(name, world_size, step):
    """What the micro-batches of a step read: a list of (rows (n, O), signs (n, O), gradients of the tokens' own losses
    (n, dim)). Micro-batch m is rank m % world_size's."""
    return draw_pattern(name, world_size, pattern_of(CASES[name], step))


@functools.cache
def draw_pattern(name, world_size, step):
    case, rng = CASES[name], np.random.default_rng([*name.encode(), world_size, step])
    rows, parts = rows_of(case, world_size), []
    for micro_batch in range(case.micro_batches):
        rank = micro_batch % world_size
        shape = (0 if case.pick == "idle" and rank == 0 else case.tokens + step % 3, ORDERS)
        low, high = 0, rows
        if case.pick in ("own", "foreign"):
            low, high = owner_bounds(case, world_size, (rank + (case.pick == "foreign")) % world_size)
        skew = 1 if case.pick == "uniform" else 2  # low rows are read most
        ids = low + (rng.random(shape) ** skew * (high - low)).astype(np.int32)
        if case.pick == "same":
            ids[:] = 7
        if case.pick == "rare":  # some rows rest for 250 steps, and five are never read
            ids = rng.integers(*((0, 10) if step < 7 else (10, rows - 5)), size=shape).astype(np.int32)
        parts.append((ids, rng.choice([-1.0, 1.0], size=shape).astype(np.float32),
                      rng.standard_normal((len(ids), case.dim)).astype(np.float32)))
    return parts


def start_of(name, world_size):
    """The table's full state before the first step."""
    case, rng = CASES[name], np.random.default_rng(0)
    rows = rows_of(case, world_size)
    return {"weight": torch.from_numpy(rng.standard_normal((rows, case.dim))).float(),
            "second": torch.from_numpy(rng.random(rows)).float(), "scale": 1.0,
            "index": torch.from_numpy(rng.integers(0, 2**31, (1, 2**INDEX_BITS)).astype(np.int32))}


# ----- one rank's steps

def plan_step(name, step, config, runtime):
    """A step as this rank's loader and model would hand it over: (plan, slots, rows, gradients), the last as arguments
    of `accumulate`, one of them a micro-batch."""
    rows, signs, grads = [], [], []
    parts = draw(name, runtime.world_size, step)
    total = sum(len(ids) for ids, _, _ in parts)
    for ids, of_ids, token_grads in parts[runtime.rank::runtime.world_size]:
        rows.append(ids), signs.append(of_ids)
        mean = token_grads / np.float32(max(1, total))  # the gradient of the mean loss
        grads.append((torch.from_numpy(mean).to(runtime.device), total))
    rows = np.concatenate(rows)
    return *plan_rows(rows, np.concatenate(signs), config, runtime), rows, grads


def take_steps(name, variant, runtime):
    """The case's steps with the table's own communication. Returns what they left."""
    case = CASES[name]
    config = tiny_config(model_dim=case.dim, head_dim=4, ngram_rows=rows_of(case, runtime.world_size),
                         steps=case.steps, ngram_decay=case.decay, index_bits=INDEX_BITS, **INDEX,
                         **VARIANTS[variant])
    table = NgramTable(config, runtime)
    table.load(start_of(name, runtime.world_size))
    runtime.ledger.clear()
    seen, known = [], {}  # seen: (step, rows, their values)

    def planned(step):
        pattern = pattern_of(case, step)
        if pattern not in known:
            known[pattern] = plan_step(name, step, config, runtime)
        return known[pattern]

    upcoming = planned(0)
    for step in range(case.steps):
        plan, slots, rows, grads = upcoming
        table.pull(plan)
        if step % 10 == 1:  # a validation between the prefetch and its use
            every_other = np.arange(runtime.rank, config.ngram_rows, 2, dtype=np.int32)[:, None]
            places, values = table.read(every_other, np.ones_like(every_other, dtype=np.float32))
            seen.append((step, torch.from_numpy(every_other), values.cpu()[places] * table.scale))
        seen.append((step, torch.from_numpy(rows), table.arrived(*table.pulled).cpu()[slots] * table.scale))
        for part in grads:
            table.accumulate(*part)
        if step + 1 < case.steps:
            upcoming = planned(step + 1)
        table.upcoming = upcoming[0]
        table.reduce(step)
        table.update(step, lr_multiplier(case, step))
        table.receive(step)
    ledger = {f"{collective}/{what}": tuple(counts) for (collective, what), counts in runtime.ledger.items()}
    full = table.full_state()
    return {"full": full, "replica": table.weight.clone() if variant == "replicated" else None, "seen": seen,
            "ledger": ledger, "reloaded": reload(full, config, runtime) if name == "decay" else {}}


def reload(full, config, runtime):
    """{comms: the full state after it was loaded into a table that communicates so}."""
    box, states = [full], {}
    if runtime.world_size > 1:
        dist.broadcast_object_list(box, src=0)
    full, = box
    for comms in ("replicated", "sharded"):
        table = NgramTable(dataclasses.replace(config, ngram_comms=comms, ngram_host=False), runtime)
        table.load(full)
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
    tensor = torch.tensor(mine, dtype=torch.float32)[:, None].repeat(1, 3)
    out, work = runtime.all_to_all(tensor, counts[rank], [row[rank] for row in counts], "uneven")
    train_gpt.wait(work)
    nothing, work = runtime.all_to_all(torch.empty(0, 5), [0] * world_size, [0] * world_size, "empty")
    train_gpt.wait(work)
    return {"uneven": out.clone(), "empty": nothing, "ledger": dict(runtime.ledger)}


def tables(runtime):
    """{"cases": {(case, variant): what take_steps returns}, "exchanges": ...} of one rank."""
    cases = {(name, variant): take_steps(name, variant, runtime) for world_size, name, variant in ALL
             if world_size == runtime.world_size}
    return {"cases": cases, "exchanges": exchanges(runtime)}


def warm_up_before_a_fold(runtime, comms):
    """Warm up with a table that folds its scale on the way. Returns how often it did; the state before, and after."""
    trainer = make_trainer(runtime=runtime, steps=8, ngram_decay=1.0, ngram_comms=comms,
                           windows=((0.0, (32, 64)), (0.5, (64, 128))))
    table, scales = trainer.table, []
    table.scale = 1.2 * table.FOLD_BELOW
    update = table.update

    def watched_update(step, lr_mul):
        scales.append(table.scale)
        return update(step, lr_mul)

    table.update = watched_update
    before = {name: tensor.clone() for name, tensor in table.tensors().items()}
    train_gpt.warm_up(trainer)
    folds = sum(after > before for before, after in zip(scales, scales[1:]))
    return folds, before, table.tensors()


def steps_with_a_frozen_table(runtime, corpus, comms):
    """Three steps and a validation with a table that has values but no learning rate. Returns (losses of the steps and
    of the validation, the table before, the table after)."""
    trainer = make_trainer(runtime=runtime, steps=3, val_tokens=1280, ngram_lr=0.0, ngram_decay=1.0, ngram_comms=comms,
                           data=str(corpus))
    config, generator = trainer.config, torch.Generator().manual_seed(0)
    before = {"weight": torch.randn(config.ngram_rows, config.model_dim, generator=generator),
              "second": torch.rand(config.ngram_rows, generator=generator), "scale": 0.5,
              "index": trainer.table.index.slots}
    trainer.table.load(before)
    shards, _, val = train_gpt.open_corpus(config)
    loader, losses = train_gpt.TrainLoader(config, shards, runtime), []
    batch = loader.next()
    for step in range(config.steps):
        total, batch = trainer.step(step, batch, loader.next if step + 1 < config.steps else lambda: None)
        train_gpt.wait(runtime.all_reduce(total, "loss"))
        losses.append(total.item() / 512)
    loader.close()
    return [*losses, trainer.evaluate(config.steps, val)], before, trainer.table.full_state()


# ----- whole runs: 1 to 4 ranks; five validation micro-batches, so that some ranks have one less

COMMON = {**TINY, "steps": 6, "micro_batches": ((0.0, 4), (0.5, 8)), "val_tokens": 1280, "val_every": 2,
          "save_every": 4, "ngram_decay": 0.5, "run_id": "run", **INDEX}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: its ranks, values beside COMMON, and the name of that run of one process which must have its losses."""
    world_size: int
    values: dict
    alone: str = ""


RUNS = {
    "alone": Run(1, {}),
    "alone, no table": Run(1, NO_TABLE),
    "alone, few rows": Run(1, {"ngram_rows": 1}),
    "sharded 1": Run(1, {"ngram_comms": "sharded"}, "alone"),
    "host": Run(2, {"ngram_comms": "sharded", "ngram_host": True}, "alone"),
}
for comms in ("replicated", "sharded"):
    RUNS |= {f"{comms} {world_size}": Run(world_size, {"ngram_comms": comms}, "alone") for world_size in (2, 4)}
    RUNS |= {f"{comms}, {case}": Run(2, {"ngram_comms": comms, **RUNS[f"alone, {case}"].values}, f"alone, {case}")
             for case in ("no table", "few rows")}
FAILING = {f"{comms}, {case}": Run(2, {"ngram_comms": comms, "steps": 40, **values})
           for comms in ("replicated", "sharded") for case, values in (("wrong", {}), ("diverging", {"adam_lr": 1e30}))}
RESUMED = {"resumed": ("sharded 2", 2), "resumed by one": ("sharded 2", 1), "resumed replicas": ("replicated 2", 2)}


def sabotage_of(name):
    return sabotage.spoil_second_rank if name.endswith("wrong") else None
