"""Markdown: a record's README and the leaderboards. All that comes from a log is escaped."""

import html
import json
import re

from records import stats
from records.files import RecordError
from records.record import age_of, chain

END = "<!-- end -->"
FIGURES = "<!-- figures -->"
WHY = "Write here what the idea is, why it works, and what was tried beside it."


def as_entity(found):
    """A character as an entity of HTML, for a match of it."""
    return f"&#{ord(found[0])};"


def cell(value):
    """Text for a Markdown table: no HTML, no links, no cell borders."""
    return re.sub(r"[|`\[\]\\*]", as_entity, html.escape(str(value)))


def table(header, rows):
    """A Markdown table of cells that are Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def seconds(milliseconds):
    """A time as tables show it."""
    return f"{milliseconds / 1000:.1f}"


def p_text(p):
    """A p as texts show it."""
    return f"p = {p:.2g}"


def difference(speed):
    """Time difference of paired runs, such as `-12.30 s (-13.01 to -11.59)`."""
    mean = speed["difference_ms"] / 1000
    low = speed["low_ms"] / 1000
    high = speed["high_ms"] / 1000
    return f"{mean:+.2f} s ({low:+.2f} to {high:+.2f})"


def percent(difference):
    """(mean, low, high) of a relative difference, such as `-5.1 % (-6.4 to -3.9)`."""
    mean, low, high = (100 * value for value in difference)
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"


def clocks(speed):
    """What the clocks say of paired runs, such as `processor time -5.1 % (-6.4 to -3.9), wall time
    ...`."""
    words = [f"{clock} time {percent(values)}" for clock, values in speed["relative"].items()]
    return ", ".join(words)


def hardware(figures):
    """What a record's runs were made on, such as `AMD EPYC x2, world size 1`, with the dtype where
    the machine chose it. Plain text."""
    first = figures["runs"][0]
    words = [first["device"], f"world size {first['world_size']}"]
    if figures.get("dtype"):  # records from before that choice have no such figure
        words.append(figures["dtype"])
    return ", ".join(words)


RUN_TABLE = [
    "run",
    "started, UTC",
    "seed",
    "validation loss",
    "training time, s",
    "tokens",
    "peak memory, MiB",
]


def run_cells(run):
    """The columns of RUN_TABLE of one run's figures."""
    return [
        cell(run["run"]),
        str(run["started"]),
        str(run["seed"]),
        f"{run['val_loss']:.5f}",
        seconds(run["train_time_ms"]),
        f"{run['tokens']:,}",
        f"{run['peak_memory_mib']:,}",
    ]


def run_table(runs):
    """The table of some runs' figures."""
    return table(RUN_TABLE, [run_cells(run) for run in runs])


def config_table(changes, before, after):
    """The table of fields that differ between two configurations, under their names."""
    rows = []
    for name, values in changes.items():
        rows.append([cell(name), *(cell(json.dumps(value)) for value in values)])
    return table(["field", cell(before), cell(after)], rows)


def record_block(figures):
    """What a record's README says between its markers: everything that follows from the logs."""
    lines = [
        *lines_of_runs(figures),
        "",
        "## Against the parent",
        "",
        *lines_against_parent(figures),
    ]
    if figures["speed"]:
        lines += lines_of_speed(figures, figures["speed"])
    elif figures["parent"]:
        lines += ["", "No claim of speed: the parent did not run beside it."]
    return "\n".join(lines) + "\n"


def lines_of_runs(figures):
    """The record's own runs: their table, losses, times, and machine."""
    loss = figures["loss"]
    time_ms = figures["train_time_ms"]
    first = figures["runs"][0]
    return [
        run_table(figures["runs"]),
        "",
        f"Validation loss {loss['mean']:.5f}, standard deviation {loss['std']:.5f}, "
        f"n = {len(figures['runs'])} (declared {figures['declared_runs']}, "
        f"batch {figures['batch']} of this code, restarts {figures['restarts']}).",
        f"Mean below the target {loss['target']:g}: {p_text(loss['p'])} "
        f"(one-sided t-test; below {loss['p_needed']:g} is needed).",
        f"Training time {seconds(time_ms['mean'])} s, "
        f"standard deviation {seconds(time_ms['std'])} s.",
        "",
        f"Hardware: {cell(hardware(figures))}, torch {cell(first['torch'])}, "
        f"CUDA {cell(first['cuda'])}, triton {cell(first['triton'])}.",
        f"Code: sha256 `{figures['code_sha256'][:16]}`.",
    ]


def lines_against_parent(figures):
    """What differs from the parent's code and configuration."""
    parent = figures["parent"]
    if parent is None:
        return ["None: the first record of its track."]
    track = figures["track"]
    lines = [
        f"[{parent}](../{parent}/): {figures['lines_added']} lines added, "
        f"{figures['lines_removed']} removed; `python -m records diff records/{track}/{parent} "
        f"records/{track}/{figures['name']}` shows them."
    ]
    if figures["config_changes"]:
        lines += ["", config_table(figures["config_changes"], "parent", "this record")]
    return lines


def lines_of_speed(figures, speed):
    """The gain in time, and the parent's runs."""
    return [
        "",
        f"Training time against the parent's on the same machine, {speed['pairs']} interleaved "
        f"pairs: {difference(speed)} ({stats.CONFIDENCE:.0%} interval, parent "
        f"{seconds(speed['baseline_mean_ms'])} s).",
        f"In relation to the parent: {clocks(speed)}; fastest parts "
        f"{100 * speed['fastest_parts']:+.1f} %. Permutation test: {p_text(speed['p'])} "
        f"(at most {figures['p_needed']:g} is needed).",
        "",
        "The parent's runs:",
        "",
        run_table(figures["baseline"]),
    ]


def record_readme(figures, why=WHY):
    """A record's whole README.md."""
    return (
        f"# {figures['name'][11:]}, {figures['track']} track\n\n## Why\n\n{why}\n\n## Figures\n\n"
        f"Written by `python -m records submit` from the logs; `verify` compares them.\n\n"
        f"{FIGURES}\n{record_block(figures)}{END}\n\n## Again, on another machine\n\n"
        f"```\npython -m records reproduce records/{figures['track']}/{figures['name']}\n```\n"
    )


# What prose has none of: HTML, tables, headings, pictures.
ODD_PROSE = re.compile(
    r"<[A-Za-z/!?]|^ *\||^ *:?-+:? *\||^ {0,3}#|^ *(?:-{3,}|=+) *$|!\[", re.MULTILINE
)


def why_of(readme):
    """What a record's README says of its reasons."""
    _, _, rest = readme.partition("\n## Why\n\n")
    why, _, _ = rest.partition("\n\n## Figures\n\n")
    return why


def block_of(text, start):
    """What stands between a start marker and the next end marker. RecordError unless it is there
    just once."""
    if text.count(start) != 1:
        raise RecordError(f"holds the marker {start} {text.count(start)} times, once is needed")
    _, _, rest = text.partition(start + "\n")
    block, end, _ = rest.partition(END)
    if not end:
        raise RecordError(f"has no {END} after {start}")
    return block


def marker(track):
    """The comment behind which a track's leaderboard begins."""
    return f"<!-- records/{track} -->"


LEADERBOARD = [
    "record",
    "date",
    "training time, s",
    "validation loss",
    "against its parent, paired",
    "hardware",
]


def ranked(records):
    """The track's chain, its last record first, then those beside it, the latest first. Times of
    different machines do not compare, and so they rank nothing."""
    links = chain(records)
    beside = [record for record in records if record not in links]
    return [*reversed(links), *sorted(beside, key=age_of, reverse=True)]


def against_parent(figures):
    """A leaderboard's word on the gain in time."""
    speed = figures["speed"]
    if speed:
        return f"{difference(speed)}, n = {speed['pairs']}"
    return "no claim" if figures["parent"] else "first"


def leaderboard_cells(record):
    """The columns of LEADERBOARD after the first as plain text, from a verified result.json."""
    figures = record.result
    loss = figures["loss"]
    return [
        record.date,
        seconds(figures["train_time_ms"]["mean"]),
        f"{loss['mean']:.4f} ± {loss['std']:.4f}, n = {len(figures['runs'])}, {p_text(loss['p'])}",
        against_parent(figures),
        hardware(figures),
    ]


def leaderboard(records):
    """The table of a track's verified records, as `ranked`."""
    if not records:
        return "No records yet.\n"
    rows = []
    for record in ranked(records):
        link = f"[{record.name[11:]}]({record.track}/{record.name}/)"
        rows.append([link, *map(cell, leaderboard_cells(record))])
    return table(LEADERBOARD, rows) + "\n"


def with_leaderboards(text, records):
    """README text with every track's leaderboard renewed. A track without records needs no
    markers."""
    for track, entries in records.items():
        start = marker(track)
        if entries or start in text:
            old = block_of(text, start)
            text = text.replace(f"{start}\n{old}", f"{start}\n{leaderboard(entries)}")
    return text
