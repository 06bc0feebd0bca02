"""Markdown: a record's README and the leaderboards. All that comes from a log is escaped."""

import html
import re

from records import stats
from records.files import RecordError
from records.record import chain

END = "<!-- end -->"
WHY = "Write here what the idea is, why it works, and what was tried beside it."


def cell(value):
    """Text for a Markdown table: no HTML, no links, no cell borders."""
    return re.sub(r"[|`\[\]\\*]", lambda found: f"&#{ord(found[0])};", html.escape(str(value)))


def table(header, rows):
    """A Markdown table of cells that are Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def seconds(milliseconds):
    """A time as tables show it."""
    return f"{milliseconds / 1000:.1f}"


def percent(difference):
    """(mean, low, high) of a relative difference, such as `-5.1 % (-6.4 to -3.9)`."""
    mean, low, high = (100 * value for value in difference)
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"


# ----- a record's README


def run_table(runs, baseline):
    """The table of runs, each beside the parent's run of its pair if there is one."""
    header = ["run", "started, UTC", "seed", "loss", "time, s"]
    if baseline:
        header += ["parent's loss", "parent's time, s"]
    rows = []
    for number, run in enumerate(runs, 1):
        row = [str(number), f"{run.started:%Y-%m-%d %H:%M:%S}", str(run.seed)]
        for side in [run, *baseline[number - 1 : number]]:
            row += [f"{side.val_loss:.5f}", f"{side.train_time_ms / 1000:.2f}"]
        rows.append(row)
    return table(header, rows)


def parent_text(found):
    """What differs from the parent's script, and how much faster that is."""
    if found["parent"] is None:
        return "It is the first record of its track."
    text = (
        f"Its parent is [{found['parent']}](../{found['parent']}/): {found['lines_added']} lines "
        f"added, {found['lines_removed']} removed."
    )
    speed = found["speed"]
    if not speed:
        return text + " No gain in time is claimed, since the parent did not run beside it."
    return (
        f"{text} In {speed['pairs']} pairs on one machine its training time differs from the "
        f"parent's ({seconds(speed['parent_ms'])} s) by {percent(speed['relative'])}, "
        f"{stats.CONFIDENCE:.0%} interval; p = {speed['p']:.2g} in the permutation test, at most "
        f"{stats.ALPHA:g} is needed."
    )


def record_readme(record, found, why):
    """A record's whole README.md, of its figures."""
    loss = found["loss"]
    time_ms = found["train_time_ms"]
    place = f"records/{found['track']}/{found['name']}"
    before = f"records/{found['track']}/{found['parent']} " if found["parent"] else ""
    return f"""# {found["name"][11:]}, {found["track"]} track

By {cell(found["by"])}.

## Why

{why}

## Figures

Written by `python -m records submit` from the logs; `verify` compares them.

- Validation loss {loss["mean"]:.5f}, standard deviation {loss["std"]:.5f}, of \
{found["declared_runs"]} declared runs ({found["restarts"]} started again). Below the target \
{loss["target"]:g}: p = {loss["p"]:.2g} in the t-test, at most {stats.ALPHA:g} is needed.
- Training time {seconds(time_ms["mean"])} s, standard deviation {seconds(time_ms["std"])} s, on \
{cell(found["hardware"])}; {cell(found["software"])}.
- {parent_text(found)}

{run_table(record.runs, record.baseline)}

```
python -m records diff {before}{place}
python -m records reproduce {place}
```
"""


def why_of(readme):
    """What a record's README says of its reasons."""
    _, _, rest = readme.partition("\n## Why\n\n")
    why, _, _ = rest.partition("\n\n## Figures\n\n")
    return why


# ----- the leaderboards

LEADERBOARD = [
    "record",
    "date",
    "by",
    "training time, s",
    "validation loss",
    "time against its parent's, in pairs",
    "hardware, dtype",
]


def ranked(records):
    """The track's chain, its last record first, then those beside it, the latest first. Times of
    different machines do not compare, and so they rank nothing."""
    links = chain(records)
    beside = [record for record in records if record not in links]
    return [*reversed(links), *sorted(beside, key=lambda record: record.age, reverse=True)]


def leaderboard_cells(record):
    """The columns of LEADERBOARD after the first as plain text, from a verified result.json."""
    found = record.result
    runs = found["declared_runs"]
    loss = found["loss"]
    speed = found["speed"]
    gain = "no claim" if found["parent"] else "first"
    if speed:
        gain = f"{percent(speed['relative'])}, p = {speed['p']:.2g}"
    return [
        record.date,
        found["by"],
        seconds(found["train_time_ms"]["mean"]),
        f"{loss['mean']:.4f} ± {loss['std']:.4f}, n = {runs}, p = {loss['p']:.2g}",
        gain,
        found["hardware"],
    ]


def leaderboard(records):
    """The table of a track's verified records, as `ranked`, from their result.json."""
    if not records:
        return "No records yet.\n"
    rows = []
    for record in ranked(records):
        link = f"[{record.title}]({record.track}/{record.name}/)"
        rows.append([link, *map(cell, leaderboard_cells(record))])
    return table(LEADERBOARD, rows) + "\n"


def with_leaderboards(text, records):
    """README text with every track's leaderboard renewed, each between its marker and END."""
    for track, entries in records.items():
        marker = f"<!-- records/{track} -->\n"
        if not entries and marker not in text:
            continue
        before, found, rest = text.partition(marker)
        _, end, after = rest.partition(END)
        if not found or not end or marker in after:
            raise RecordError(f"the marker {marker.strip()}, and {END} behind it, are needed once")
        text = f"{before}{marker}{leaderboard(entries)}{END}{after}"
    return text
