"""What is drawn of records: their README.md, the leaderboards, the staircases, and `report`, one
HTML page. The page needs no network, and its content security policy lets no script run. All that
comes from a log is escaped."""

import base64
import html
import io
import math
import os
import re
from pathlib import Path
from urllib.parse import quote

from records import picture, stats
from records.files import require
from records.record import chain

END = "<!-- end -->"
WHY = "Write here what the idea is, why it works, and what was tried beside it."
HOME = Path(__file__).parent
# Of the staircase, in pixels.
WIDTH = 480
ROW = 46
HEAD = 54
EDGE = 14


def cell(value):
    """Text for Markdown or HTML: no tags, no links, no borders of cells."""
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
    return f"""# {record.title}, {found["track"]} track

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
    """(the track's chain, its last record first; the records beside it, the latest first). Times of
    different machines do not compare, and so they rank nothing."""
    links = chain(records)[::-1]
    beside = [record for record in records if record not in links]
    return links, sorted(beside, key=lambda record: record.age, reverse=True)


def leaderboard_cells(record):
    """The columns of LEADERBOARD after the first, from a verified result.json."""
    found = record.result
    loss = found["loss"]
    speed = found["speed"]
    gain = "no claim" if found["parent"] else "first"
    if speed:
        gain = f"{percent(speed['relative'])}, p = {speed['p']:.2g}"
    spread = f"± {loss['std']:.4f}, n = {found['declared_runs']}, p = {loss['p']:.2g}"
    time = seconds(found["train_time_ms"]["mean"])
    texts = [record.date, found["by"], time, f"{loss['mean']:.4f} {spread}", gain]
    return [cell(text) for text in [*texts, found["hardware"]]]


def leaderboard(records):
    """The table of a track's verified records."""
    links, beside = ranked(records)
    rows = []
    for record in links + beside:
        link = f"[{record.title}]({record.track}/{record.name}/)"
        rows.append([link, *leaderboard_cells(record)])
    return table(LEADERBOARD, rows) if rows else "No records yet."


def with_leaderboards(text, records):
    """README text with every track's leaderboard renewed, each between its marker and END."""
    for track, entries in records.items():
        marker = f"<!-- records/{track} -->"
        board = f"{marker}\n{leaderboard(entries)}\n{END}"
        pattern = re.compile(f"{marker}\n.*?{END}", re.DOTALL)
        text, count = pattern.subn(lambda _, board=board: board, text)
        is_there = count == 1 or not entries
        require(is_there, f"the marker {marker}, and {END} behind it, are needed once")
    return text


# ----- the staircase


def ladder(links):
    """[(title, seconds, gain in per cent), ...] of a chain of records: the first one's time, and
    what is left of it if each gain that was measured in pairs holds on that machine."""
    left = links[0].result["train_time_ms"]["mean"] / 1000
    steps = [(links[0].title, left, "")]
    for record in links[1:]:
        gain = record.result["speed"]["relative"][0]
        left *= 1 + gain
        steps.append((record.title, left, f", {100 * gain:+.0f} %"))
    return steps


def staircase(track, links):
    """The text of an SVG file, light or dark as its reader has it: a chain of records, one row
    each and time from right to left."""
    steps = ladder(links)
    height = HEAD + ROW * len(steps) + 30
    logs = [math.log(left) for _, left, _ in steps]
    width = WIDTH - 2 * EDGE - 60
    across = [EDGE + 30 + width * (log - min(logs)) / (logs[0] - min(logs) or 1) for log in logs]
    count = len(steps) - 1
    proven = f"in {count} proven step{'s' * (count != 1)}"
    title = html.escape(f"{track}: {steps[0][1]:.0f} s to {steps[-1][1]:.1f} s {proven}")
    path = f"M{across[0]:.1f} {HEAD + 30}"
    for number, x in enumerate(across[1:], 1):
        path += f"V{HEAD + ROW * number + 30}H{x:.1f}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="stairs" width="{WIDTH}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">',
        f"<style>\n{(HOME / 'staircase.css').read_text()}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text class="head" x="{EDGE}" y="24">{title}</text>',
        f'<path d="{path}"/>',
    ]
    for number, (name, left, gain) in enumerate(steps):
        y = HEAD + ROW * number
        parts += [
            f'<circle cx="{across[number]:.1f}" cy="{y + 30}" r="5"/>',
            f'<text x="{EDGE}" y="{y + 16}">{html.escape(name)}</text>',
            f'<text x="{WIDTH - EDGE}" y="{y + 16}" text-anchor="end">{left:.1f} s{gain}</text>',
        ]
    note = "what the gains measured in pairs leave of the first record's time; log scale"
    parts.append(f'<text class="faint" x="{EDGE}" y="{height - 8}">{note}</text></svg>')
    return "\n".join(parts) + "\n"


# ----- the page


def page(repository, folder):
    """The text of the page that shows all records; it lies in `folder`, to which links relate."""
    parts = []
    for track, records in repository.records.items():
        if not records:
            continue
        links, beside = ranked(records)
        target = repository.rules[track]["config"]["target_loss"]
        parts.append(f"<h2>{track}: {target:g} nats per token</h2>")
        if len(links) > 1:
            parts.append(staircase(track, links[::-1]))
        for head, board in (("Records", links), ("Beside the ladder", beside)):
            if board:
                parts.append(f"<h3>{head}</h3>{html_table(board, folder)}")
        curves = io.BytesIO()
        picture.plot([record.folder for record in links[::-1] + beside], curves, target)
        address = f"data:image/png;base64,{base64.b64encode(curves.getvalue()).decode()}"
        parts.append(f'<h3>Learning curves</h3><img alt="losses of all runs" src="{address}">')
    style = (HOME / "report.css").read_text()
    return (HOME / "report.html").read_text().format(style=style, sections="\n".join(parts))


def html_table(records, folder):
    """A table of records with links to them, that scrolls where the screen is narrow."""
    rows = ["".join(f"<th>{name}</th>" for name in LEADERBOARD)]
    for record in records:
        address = quote(os.path.relpath(record.folder, folder).replace(os.sep, "/"))
        link = f'<a href="{address}">{record.title}</a>'
        rows.append("".join(f"<td>{text}</td>" for text in [link, *leaderboard_cells(record)]))
    return f'<div class="wide"><table><tr>{"</tr><tr>".join(rows)}</tr></table></div>'
