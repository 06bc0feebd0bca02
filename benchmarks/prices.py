"""What a feature is worth on a laptop's track, beside its price on eight GPUs.

    python benchmarks/prices.py [--minutes 60] [--jobs 2]      # all runs of prices.toml take hours

Each feature of prices.toml is taken out of `english`, or put into it, at equal steps and seeds. Its
worth is the difference of the final losses, with and without, as a share of the steps: 1 - exp(-d /
k), where k is the fall of loss with the logarithm of steps, from controls of fewer and more steps.
Each run takes one core. What stands in prices.json is not repeated: a call goes on where the last
one stopped, seed by seed, and ends when its minutes are over. Where numbers of english change that
a configuration takes over, its runs do not compare, and are refused until prices.toml closes it.

The features are split in two by lot, by their names: whoever changes the track so that it predicts
better looks at the half `tuning` alone, and at the half `scoring` once.

Results: benchmarks/results/prices.{json,md,png}. The last line is
`rank_correlation:<r> low:<l> high:<h> features:<n> signs:<a>/<n>`.
"""

import contextlib
import hashlib
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
import tomllib
from concurrent import futures
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from scipy.stats import rankdata

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common
from benchmarks.common import train_gpt
from benchmarks.price_variants import VARIANTS
from records.stats import drawn

NAME = "prices"
PLAN = tomllib.loads(Path(__file__).with_name("prices.toml").read_text())
TRACK = train_gpt.TRACKS["english"]
FEATURES = {feature["name"]: feature for feature in PLAN["feature"]}
CONFIGURATIONS = PLAN["configuration"]
RESERVED = {"closed", "controls", "features"}  # of a configuration, no values
# The configuration that the last line, the picture and the page's first table are of.
LATEST = "scaled_outputs"
CONTROL = "control"
DRAWS = 4000  # of the bootstrap


class Run(NamedTuple):
    """One training: where it is priced, what is changed, and the seed."""

    configuration: str
    change: str  # a feature, `control`, or the steps of a control
    seed: int


# ----- runs


def as_tuples(value):
    """A value of TOML as a Config wants it, with tuples for lists."""
    if isinstance(value, dict):
        return {name: as_tuples(item) for name, item in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def values_of(configuration):
    """What a configuration sets of english, {field: value}."""
    own = CONFIGURATIONS[configuration]
    return {name: own[name] for name in own.keys() - RESERVED}


def fingerprint(configuration):
    """A hash of all numbers that the runs of a configuration have in common, and of the model's
    parameters with their rules."""
    config = train_gpt.with_values(TRACK, as_tuples(values_of(configuration)))
    unused = train_gpt.NEUTRAL_FIELDS
    if not config.index_order:
        unused = unused | {"index_tokens"}
    said = {name: value for name, value in vars(config).items() if name not in unused}
    for name, param in train_gpt.GPT(config, back_end=None).named_parameters():
        said[f"parameter {name}"] = param.shape, param.rule
    return hashlib.sha256(repr(sorted(said.items())).encode()).hexdigest()[:16]


def fingerprints():
    """{configuration: its fingerprint} of those that may get runs."""
    return {name: fingerprint(name) for name in open_ones()}


def open_ones():
    """The names of configurations that may get runs."""
    return [name for name, values in CONFIGURATIONS.items() if "closed" not in values]


def changes_of(run):
    """({field: value}, {name in train_gpt: replacement}) of a run."""
    values = values_of(run.configuration)
    replaced = {}
    if run.change in FEATURES:
        feature = FEATURES[run.change]
        for name in feature.get("halved", ()):
            values[name] = values.get(name, getattr(TRACK, name)) / 2
        values.update(feature.get("change", {}))
        if "variant" in feature:
            replaced = VARIANTS[feature["variant"]]()
    elif run.change != CONTROL:
        values["steps"] = int(run.change)
    return as_tuples(values), replaced


def measure(run, **others):
    """The figures of a run, as they stand in the results; others: further values, for tests."""
    values, replaced = changes_of(run)
    config = train_gpt.with_values(TRACK, {**values, "device": "cpu", "seed": run.seed, **others})
    began = time.process_time()
    with contextlib.ExitStack() as stack:
        for name, replacement in replaced.items():
            stack.enter_context(mock.patch.object(train_gpt, name, replacement))
        training = stack.enter_context(contextlib.closing(common.Training(config)))
        training.trainer.table.read_index(training.corpus.indexed)
        for step in range(config.steps):
            training.step(step)
        loss = training.loss()
    seconds = round(time.process_time() - began, 1)
    return {**run._asdict(), "loss": loss, "core_seconds": seconds}


def wanted():
    """All runs, in their order: seed by seed, where each is complete for itself."""
    for configuration in open_ones():
        values = CONFIGURATIONS[configuration]
        changes = [CONTROL, *map(str, values["controls"]), *values.get("features", FEATURES)]
        for seed, change in itertools.product(PLAN["seeds"], changes):
            yield Run(configuration, change, seed)


def run_of(figures):
    return Run(*(figures[name] for name in Run._fields))


def missing(runs):
    """The runs that are not among these figures, a seed of all configurations after the other."""
    known = {run_of(figures) for figures in runs}
    left = [run for run in wanted() if run not in known]
    return sorted(left, key=lambda run: run.seed)


# ----- worth


def losses_of(runs, configuration):
    """{change: {seed: loss}} of a configuration."""
    losses = {}
    for figures in runs:
        if figures["configuration"] == configuration:
            losses.setdefault(figures["change"], {})[figures["seed"]] = figures["loss"]
    return losses


def fall_of_loss(losses, controls):
    """How much the final loss falls with the natural logarithm of the steps, by runs of so many."""
    fewer, more = map(str, controls)
    seeds = losses.get(fewer, {}).keys() & losses.get(more, {}).keys()
    if not seeds:
        return None
    falls = [losses[fewer][seed] - losses[more][seed] for seed in seeds]
    return statistics.mean(falls) / math.log(int(more) / int(fewer))


def shares(gains, fall):
    """Gains of loss as shares of the steps, in per cent."""
    return 100 * (1 - np.exp(-np.asarray(gains) / fall))


def gains_of(losses):
    """{feature: how much lower the loss is with it, a figure a seed}."""
    gains = {}
    for name, feature in FEATURES.items():
        own, control = losses.get(name, {}), losses.get(CONTROL, {})
        sign = 1 if feature["english"] else -1
        pairs = [sign * (own[seed] - control[seed]) for seed in sorted(own.keys() & control.keys())]
        if pairs:
            gains[name] = np.array(pairs)
    return gains


def half_of(name):
    """The half that the lot has put a feature into."""
    return "scoring" if drawn(name) % 2 else "tuning"


# ----- the verdict


def rank_correlation(first, second):
    """Spearman's, along the last axis; 0 where one of them is constant."""
    ranks = [rankdata(values, axis=-1) for values in (first, second)]
    first, second = (own - own.mean(-1, keepdims=True) for own in ranks)
    size = np.sqrt((first**2).sum(-1) * (second**2).sum(-1))
    return (first * second).sum(-1) / np.maximum(size, 1e-9)


def area(helpful, dropped):
    """How often a helpful feature is worth more than a dropped one; ties count one half."""
    ranks = rankdata(np.concatenate([helpful, dropped]))
    count = len(helpful)
    above = ranks[:count].sum() - count * (count + 1) / 2
    return above / (count * len(dropped))


def verdict(gains, fall, names):
    """The figures of agreement over these features, as a dict."""
    generator = np.random.default_rng(0)
    priced = [name for name in names if "saved" in FEATURES[name]]
    there = np.array([FEATURES[name]["saved"] for name in priced])
    errors = np.array([FEATURES[name]["error"] for name in priced])
    here = np.array([shares(gains[name].mean(), fall) for name in priced])
    own_errors = np.array([standard_error(shares(gains[name], fall)) for name in priced])
    # The interval is of other features, with other seeds: both are drawn again.
    again = [generator.choice(gains[name], (DRAWS, len(gains[name]))).mean(1) for name in priced]
    again = shares(np.stack(again, 1), fall)
    chosen = generator.integers(len(priced), size=(DRAWS, len(priced)))
    drawn_again = rank_correlation(there[chosen], np.take_along_axis(again, chosen, 1))
    low, high = np.quantile(drawn_again, [0.025, 0.975])
    # Were both prices of one truth, their errors alone would keep them apart.
    noise = generator.normal(size=(2, DRAWS, len(priced)))
    at_best = rank_correlation(there + errors * noise[0], there + own_errors * noise[1])
    is_helpful = {name: FEATURES[name].get("saved", 0) > 0 for name in names}
    split = [
        [gains[name].mean() for name in names if is_helpful[name] is side] for side in (True, False)
    ]
    return {
        "rank_correlation": rank_correlation(there, here),
        "low": low,
        "high": high,
        "features": len(priced),
        "signs": int(sum(np.sign(there) == np.sign(here))),
        "at_best": at_best.mean(),
        "area": area(*split) if all(split) else None,
    }


def standard_error(values):
    """Of the mean; a single value has none, and counts as exact."""
    return values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def line_of(found):
    return (
        f"rank_correlation:{found['rank_correlation']:.2f} low:{found['low']:.2f} "
        f"high:{found['high']:.2f} features:{found['features']} "
        f"signs:{found['signs']}/{found['features']}"
    )


# ----- the page


def rows_of_features(gains, fall):
    """A row for each feature, the dearest on GPUs first."""
    rows = []
    for name in sorted(gains, key=lambda name: -FEATURES[name].get("saved", -100)):
        feature = FEATURES[name]
        own = shares(gains[name], fall)
        there = feature.get("dropped") or f"{feature['saved']:.1f} ± {feature['error']:.1f}"
        here = f"{shares(gains[name].mean(), fall):.1f} ± {standard_error(own):.1f}"
        nats = f"{gains[name].mean():+.4f}"
        rows.append(
            [name, feature["kind"], half_of(name), there, here, nats, len(own), feature["source"]]
        )
    return rows


def rows_of_verdicts(gains, fall, configuration):
    """A row for all features, for each half, and for each kind that has three priced ones."""
    groups = {"all": list(gains)}
    for name in gains:
        groups.setdefault(f"half: {half_of(name)}", []).append(name)
        groups.setdefault(FEATURES[name]["kind"], []).append(name)
    rows = []
    for group, names in groups.items():
        if sum("saved" in FEATURES[name] for name in names) > 2:
            found = verdict(gains, fall, names)
            interval = f"{found['low']:.2f} to {found['high']:.2f}"
            signs = f"{found['signs']}/{found['features']}"
            told_apart = "no pair" if found["area"] is None else f"{found['area']:.2f}"
            rows.append(
                [
                    configuration,
                    group,
                    f"{found['rank_correlation']:.2f}",
                    interval,
                    f"{found['at_best']:.2f}",
                    signs,
                    told_apart,
                ]
            )
    return rows


def picture(gains, fall, path):
    """Both prices as axes, with names at the points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), layout="constrained")
    axes = figure.subplots()
    for name, own in gains.items():
        if "saved" in FEATURES[name]:
            point = FEATURES[name]["saved"], float(shares(own.mean(), fall))
            axes.plot(*point, "o", markersize=3, color="black")
            axes.annotate(name, point, xytext=(3, 2), textcoords="offset points", fontsize=7)
    axes.axhline(0, linewidth=0.5, color="grey")
    axes.axvline(0, linewidth=0.5, color="grey")
    axes.set(xscale="symlog", yscale="symlog")
    axes.set(xlabel="steps saved on eight H100s, %", ylabel=f"steps saved on {LATEST}, %")
    figure.savefig(path, format="png", dpi=120)


def report(runs, folder):
    """(the page, the last line); draws the picture."""
    tables = []
    verdicts = []
    line = "rank_correlation:not measured"
    header = [
        "feature",
        "kind",
        "half",
        "saved on 8 GPUs, %",
        "saved here, %",
        "nats here",
        "n",
        "record of modded-nanogpt",
    ]
    for configuration in sorted(CONFIGURATIONS, key=lambda name: name != LATEST):
        losses = losses_of(runs, configuration)
        fall = fall_of_loss(losses, CONFIGURATIONS[configuration]["controls"])
        gains = gains_of(losses)
        if fall is None or sum("saved" in FEATURES[name] for name in gains) < 3:
            continue
        title = f"`{configuration}`: the loss falls by {fall:.3f} with the logarithm of steps."
        tables += [title, common.markdown_table(header, rows_of_features(gains, fall))]
        verdicts += rows_of_verdicts(gains, fall, configuration)
        if configuration == LATEST:
            line = line_of(verdict(gains, fall, list(gains)))
            picture(gains, fall, Path(folder) / f"{NAME}.png")
    header = [
        "configuration",
        "features",
        "rank correlation",
        "of 95 %",
        "at best",
        "signs",
        "helpful above dropped",
    ]
    hours = sum(figures["core_seconds"] for figures in runs) / 3600
    left = len(missing(runs))
    text = f"{len(runs)} runs of {hours:.1f} hours of a core; {left} more are wanted."
    page = [common.markdown_table(header, verdicts), *tables, text, f"`{line}`"]
    return "\n\n".join(page), line


def keep(folder, facts, runs):
    """Write the runs as they are now."""
    runs = sorted(runs, key=lambda own: run_of(own))
    data = {"environment": facts, "tracks": fingerprints(), "runs": runs}
    common.write_whole(Path(folder) / f"{NAME}.json", json.dumps(data, indent=1) + "\n")


def main(argv=None):
    arguments = common.parser(__doc__, minutes=60.0, jobs=2).parse_args(argv)
    deadline = time.monotonic() + 60 * arguments.minutes
    facts = common.environment("cpu")
    path = Path(arguments.results) / f"{NAME}.json"
    known = {"tracks": {}, "runs": []}
    known |= json.loads(path.read_text()) if path.is_file() else {}
    runs = known["runs"]
    for name in {run["configuration"] for run in runs} & set(open_ones()):
        if known["tracks"].get(name) != fingerprint(name):
            sys.exit(f"error: {path} has runs of {name} as it was; close it in prices.toml")
    count = len(runs)
    left = iter(missing(runs))
    spawn = multiprocessing.get_context("spawn")
    alone = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with futures.ProcessPoolExecutor(arguments.jobs, mp_context=spawn, **alone) as pool:

        def started(count):
            """So many of the runs that are left, while there is time."""
            chosen = itertools.islice(left, count if time.monotonic() < deadline else 0)
            return {pool.submit(measure, run) for run in chosen}

        pending = started(arguments.jobs)
        while pending:
            done, pending = futures.wait(pending, return_when=futures.FIRST_COMPLETED)
            runs += [{**future.result(), "commit": facts["commit"]} for future in done]
            keep(arguments.results, facts, runs)
            pending |= started(len(done))
    if len(runs) == count:
        facts = known.get("environment", facts)
    page, line = report(runs, arguments.results)
    common.write_results(
        arguments.results, NAME, facts, {"tracks": fingerprints(), "runs": runs}, page
    )
    print(line)


if __name__ == "__main__":
    main()
