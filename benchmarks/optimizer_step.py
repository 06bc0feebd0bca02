"""Measure what each update rule of the hidden matrices costs, as a share of a nano step.

    python benchmarks/optimizer_step.py [--device auto] [--rounds 7]

The step is the track's own: forward and backward passes of its micro-batches, compiled where it can
be, and the update of all parameters. Rules take turns on the gradients of that model; a turn is ten
steps, so that every stagger sees each matrix as often as it would. `share` is the rule's update
(Adam's parameters included, the n-gram table not) over the whole step with that rule, `over muon`
what it adds to Muon's step, `step / muon` the ratio of whole steps, which optimizer_rules.py takes
for equal time. All are medians over rounds of ratios within a round. Results:
benchmarks/results/optimizer_step.{json,md}, named optimizer_step_<device> for CUDA.
"""

import contextlib
import copy
import dataclasses
import functools
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common

STAGGERS = (1, 2, 5, 10)
FIRST_STEP = 100  # so late that bases are refreshed as in most of a run
TURN = range(FIRST_STEP, FIRST_STEP + 10)  # of a rule; every stagger divides their number


def arms(config):
    """{(rule, stagger or None): Config}."""
    found = {}
    for kind, rule in train_gpt.MATRIX_RULES.items():
        own = dataclasses.replace(config, matrix_update=kind)
        if not rule.has_bases:
            found[kind, None] = own
            continue
        for every in STAGGERS:
            found[kind, every] = dataclasses.replace(own, basis_every=every)
    return found


def give(trainer, optimizer):
    """Copy a trainer's summed gradients to another optimizer, as of a step's micro-batches."""
    for name, layout in trainer.optimizer.layouts.items():
        optimizer.layouts[name].grad.copy_(layout.grad)
        optimizer.layouts[name].is_empty = False
    for group in optimizer.parameter_groups:
        group.tokens = trainer.config.micro_batch_tokens


def take_turn(trainer, optimizer, steps, lr_mul):
    for step in steps:
        give(trainer, optimizer)
        optimizer.step(step, lr_mul)


def measure(config, runtime, rounds):
    """Seconds of each round.

    {"model": forward and backward, "table": the n-gram table's update, arm: its update}. The
    table's is what the trainer's own update takes beyond that of the same rule without a table."""
    shards = train_gpt.open_corpus(config).shards
    trainer = train_gpt.Trainer(config, runtime)
    loader = train_gpt.TrainLoader(config, shards, runtime, trainer.table.index)
    no_table = train_gpt.NgramTable(dataclasses.replace(config, **common.NO_TABLE), runtime)
    optimizers = {
        arm: train_gpt.Optimizer(own, copy.deepcopy(trainer.model), no_table, runtime)
        for arm, own in arms(config).items()
    }

    def seconds_of(function, *words):
        return common.timed(functools.partial(function, *words), runtime.device)[0]

    times = {key: [] for key in ("model", "table", *optimizers)}
    with contextlib.closing(loader):
        for step in range(3):  # compiles, and makes the first bases
            trainer.accumulate(step, loader.next_batch())
            for optimizer in optimizers.values():
                take_turn(trainer, optimizer, [step], 1.0)
            trainer.optimizer.step(step, 1.0)
        for _ in range(rounds):
            batch = loader.next_batch()
            times["model"].append(seconds_of(trainer.accumulate, FIRST_STEP, batch))
            for arm, optimizer in optimizers.items():
                copying = seconds_of(give, trainer, optimizer)
                turn = seconds_of(take_turn, trainer, optimizer, TURN, 1e-3)
                times[arm].append(turn / len(TURN) - copying)
            together = seconds_of(trainer.optimizer.step, FIRST_STEP, 1e-3)
            times["table"].append(together - times["muon", None][-1])
    return times


def summary(times):
    """{arm: {"ms", "share", "over_muon", "step_ratio"}}, medians over rounds."""
    rest = [model + table for model, table in zip(times["model"], times["table"], strict=True)]
    found = {}
    for arm, seconds in times.items():
        if arm in ("model", "table"):
            continue
        rounds = list(zip(seconds, times["muon", None], rest, strict=True))
        found[arm] = {
            "ms": 1000 * statistics.median(seconds),
            "share": statistics.median(own / (other + own) for own, _, other in rounds),
            "over_muon": statistics.median(
                (own - muon) / (other + muon) for own, muon, other in rounds
            ),
            "step_ratio": statistics.median(
                (other + own) / (other + muon) for own, muon, other in rounds
            ),
        }
    return found


def main(argv=None):
    data = str(common.ROOT / "data/python")
    parser = common.parser(__doc__, device="auto", rounds=7, data=data, tiny=False)
    arguments = parser.parse_args(argv)
    values = {"data": arguments.data, "device": arguments.device, "seed": 1}
    if arguments.tiny:
        values = {**common.TINY, "steps": 200, "epochs": 5, **values}
    runtime = train_gpt.Runtime(arguments.device)
    config = common.config_of("nano", runtime, **values)
    times = measure(config, runtime, arguments.rounds)
    results = summary(times)
    rows = [
        [
            kind,
            every or "-",
            f"{fact['ms']:.2f}",
            f"{fact['share']:.1%}",
            f"{fact['over_muon']:+.1%}",
            f"{fact['step_ratio']:.3f}",
        ]
        for (kind, every), fact in results.items()
    ]
    table = common.markdown_table(
        ["rule", "new bases every", "ms a step", "share", "over muon", "step / muon"], rows
    )
    device = runtime.device
    facts = common.environment(device)
    rest = " and ".join(
        f"{1000 * statistics.median(times[key]):.1f} ms {text}"
        for key, text in (("model", "forward and backward"), ("table", "n-gram table"))
    )
    name = (
        "optimizer_step"
        if device.type == "cpu"
        else f"optimizer_step_{common.slug(facts['device'])}"
    )
    data = {
        "one_sided_above": config.one_sided_above,
        "basis_every": config.basis_every,
        "results": [
            {"rule": kind, "every": every, **fact} for (kind, every), fact in results.items()
        ],
        "seconds": {
            key if isinstance(key, str) else " ".join(map(str, key)): own
            for key, own in times.items()
        },
    }
    common.write_results(
        arguments.results,
        name,
        facts,
        data,
        f"{table}\n\nBeside it, per step: {rest}. Sides above "
        f"{config.one_sided_above} have no basis.",
    )
    print(table)
    chosen = results["soap_muon", config.basis_every if config.basis_every in STAGGERS else 10]
    print(f"soap_muon_share:{chosen['share']:.4f} soap_muon_over_muon:{chosen['over_muon']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
