"""What is drawn of records: their README.md, the leaderboards, the staircases, and `report`, one
HTML page, which needs no network and lets no script run. All that comes from a log is escaped."""

import base64
import html
import io
import math
import os
import re
from pathlib import Path
from urllib.parse import quote

from records import picture, stats
from records.files import read_text, require
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


def table(rows):
    """A Markdown table of rows, which are {column: Markdown}."""
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def seconds(milliseconds):
    return f"{milliseconds / 1000:.1f}"


def percent(difference):
    """(mean, low, high) of a relative difference, such as `-5.1 % (-6.4 to -3.9)`."""
    mean, low, high = (100 * value for value in difference)
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"


def run_table(runs, baseline):
    """The table of runs, each beside the parent's run of its pair if there is one."""
    rows = []
    for number, run in enumerate(runs, 1):
        started = f"{run.started:%Y-%m-%d %H:%M:%S}"
        row = {"run": str(number), "started, UTC": started, "seed": str(run.seed)}
        sides = [run, *baseline[number - 1 : number]]
        for whose, side in zip(("", "parent's "), sides, strict=False):
            row[f"{whose}loss"] = f"{side.val_loss:.5f}"
            row[f"{whose}time, s"] = f"{side.train_time_ms / 1000:.2f}"
        rows.append(row)
    return table(rows)


def parent_text(found):
    """What differs from the parent's script, and how much faster that is."""
    if found["parent"] is None:
        return "It is the first record of its track."
    lines = f"{found['lines_added']} lines added, {found['lines_removed']} removed"
    text = f"Its parent is [{found['parent']}](../{found['parent']}/): {lines}."
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


def ranked(records):
    """(the track's chain, those beside it), latest first: times of machines rank nothing."""
    links = chain(records)[::-1]
    beside = [record for record in records if record not in links]
    return links, sorted(beside, key=lambda record: record.age, reverse=True)


def leaderboard_row(record, link):
    """A row of the leaderboard, from a verified result.json and a link to the record."""
    found = record.result
    loss = found["loss"]
    gain = "no claim" if found["parent"] else "first"
    if found["speed"]:
        gain = f"{percent(found['speed']['relative'])}, p = {found['speed']['p']:.2g}"
    spread = f"{loss['std']:.4f}, n = {found['declared_runs']}, p = {loss['p']:.2g}"
    return {
        "record": link,
        "training time, s": seconds(found["train_time_ms"]["mean"]),
        "time against its parent's, in pairs": gain,
        "validation loss": f"{loss['mean']:.4f} ± {spread}",
        "hardware, dtype": cell(found["hardware"]),
        "date": record.date,
        "by": cell(found["by"]),
    }


def pages_of(repository):
    """{path: text} of what `table` writes: README.md with its leaderboards, and the staircases."""
    page = repository.home / "README.md"
    text = read_text(page)
    pages = {}
    for track, records in repository.records.items():
        links, beside = ranked(records)
        found = links + beside
        titles = [f"[{record.title}]({track}/{record.name}/)" for record in found]
        rows = list(map(leaderboard_row, found, titles))
        marker = f"<!-- records/{track} -->"
        before, _, rest = text.partition(f"{marker}\n")
        _, end, after = rest.partition(END)
        require(end and marker not in after, f"{page}: {marker}, and {END} behind it, are due once")
        board = table(rows) if rows else "No records yet."
        text = f"{before}{marker}\n{board}\n{END}{after}"
        if len(links) > 1:
            pages[repository.home / f"{track}.svg"] = staircase(track, links[::-1])
    return {page: text, **pages}


def staircase(track, links):
    """An SVG file of what the gains in pairs leave of the time of a chain's first record."""
    left = [links[0].result["train_time_ms"]["mean"] / 1000]
    shown = [f"{left[0]:.1f} s"]
    for record in links[1:]:
        gain = record.result["speed"]["relative"][0]
        left.append(left[-1] * (1 + gain))
        shown.append(f"{left[-1]:.1f} s, {100 * gain:+.0f} %")
    count = len(links) - 1
    proven = f"in {count} proven step{'s' * (count != 1)}"
    title = html.escape(f"{track}: {left[0]:.0f} s to {left[-1]:.1f} s {proven}")
    height = HEAD + ROW * len(links) + 30
    width = (WIDTH - 2 * EDGE - 60) / (math.log(left[0] / min(left)) or 1)
    across = [EDGE + 30 + width * math.log(time / min(left)) for time in left]
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
    for number, record in enumerate(links):
        y = HEAD + ROW * number
        parts += [
            f'<circle cx="{across[number]:.1f}" cy="{y + 30}" r="5"/>',
            f'<text x="{EDGE}" y="{y + 16}">{html.escape(record.title)}</text>',
            f'<text x="{WIDTH - EDGE}" y="{y + 16}" text-anchor="end">{shown[number]}</text>',
        ]
    note = "what the gains measured in pairs leave of the first record's time; log scale"
    parts.append(f'<text class="faint" x="{EDGE}" y="{height - 8}">{note}</text></svg>')
    return "\n".join(parts) + "\n"


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
            lines = []
            for record in board:
                address = quote(os.path.relpath(record.folder, folder).replace(os.sep, "/"))
                row = leaderboard_row(record, f'<a href="{address}">{record.title}</a>')
                lines.append(f"<tr><td>{'</td><td>'.join(row.values())}</td></tr>")
            if board:
                names = f"<tr><th>{'</th><th>'.join(row)}</th></tr>"
                parts.append(f'<h3>{head}</h3><div class="wide"><table>')
                parts += [names, *lines, "</table></div>"]
        curves = io.BytesIO()
        picture.plot([record.folder for record in links[::-1] + beside], curves, target)
        address = f"data:image/png;base64,{base64.b64encode(curves.getvalue()).decode()}"
        parts.append(f'<h3>Learning curves</h3><img alt="losses of all runs" src="{address}">')
    style = (HOME / "report.css").read_text()
    return (HOME / "report.html").read_text().format(style=style, sections="\n".join(parts))
