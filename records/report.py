"""`report`: ladder, leaderboards and learning curves as one HTML page; and the ladder alone as an
SVG, a staircase, which a README can show.

The page needs no network. Its content security policy lets no script run, and every word that comes
from a log is escaped.
"""

import base64
import html
import io
import math
import os
from pathlib import Path
from urllib.parse import quote

from records import picture, render
from records.record import chain

HOME = Path(__file__).parent
# Of the staircase, in pixels.
WIDTH = 480
ROW = 46
HEAD = 54
EDGE = 14


def ladder(links):
    """[(title, seconds, gain or None), ...] of a chain of records: the first one's time, and what
    is left of it if each gain that was measured in pairs holds on that machine."""
    left = links[0].result["train_time_ms"]["mean"] / 1000
    steps = [(links[0].title, left, None)]
    for record in links[1:]:
        gain = record.result["speed"]["relative"][0]
        left *= 1 + gain
        steps.append((record.title, left, gain))
    return steps


def staircase(track, links):
    """The text of an SVG file, light or dark as its reader has it: a chain of records, one row
    each and time from right to left."""
    steps = ladder(links)
    height = HEAD + ROW * len(steps) + 30
    low = math.log(min(left for _, left, _ in steps))
    high = math.log(steps[0][1])

    def across(left):
        share = (math.log(left) - low) / (high - low or 1)
        return EDGE + 30 + share * (WIDTH - 2 * EDGE - 60)

    count = len(steps) - 1
    proven = f"in {count} proven step{'s' * (count != 1)}"
    title = html.escape(f"{track}: {steps[0][1]:.0f} s to {steps[-1][1]:.1f} s {proven}")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="stairs" width="{WIDTH}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">',
        f"<style>\n{(HOME / 'staircase.css').read_text()}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text class="head" x="{EDGE}" y="24">{title}</text>',
    ]
    down = f"M{across(steps[0][1]):.1f} {HEAD + 30}"
    for number, (_, left, _) in enumerate(steps[1:], 1):
        down += f"V{HEAD + ROW * number + 30}H{across(left):.1f}"
    parts.append(f'<path d="{down}"/>')
    for number, (name, left, gain) in enumerate(steps):
        y = HEAD + ROW * number
        shown = f"{left:.1f} s" if gain is None else f"{left:.1f} s, {100 * gain:+.0f} %"
        parts += [
            f'<circle cx="{across(left):.1f}" cy="{y + 30}" r="5"/>',
            f'<text x="{EDGE}" y="{y + 16}">{html.escape(name)}</text>',
            f'<text x="{WIDTH - EDGE}" y="{y + 16}" text-anchor="end">{shown}</text>',
        ]
    note = "what the gains measured in pairs leave of the first record's time; log scale"
    parts.append(f'<text class="faint" x="{EDGE}" y="{height - 8}">{note}</text></svg>')
    return "\n".join(parts) + "\n"


def page(repository, folder):
    """The text of the page that shows all records; it lies in `folder`, to which links relate."""
    found = [
        section(track, records, repository.rules[track].target_loss, folder)
        for track, records in repository.records.items()
        if records
    ]
    return (
        (HOME / "report.html")
        .read_text()
        .format(
            style=(HOME / "report.css").read_text(),
            sections="\n".join(found) or "<p>No records yet.</p>",
        )
    )


def section(track, records, target, folder):
    """A track's ladder, its leaderboard, the records beside it, and its curves."""
    links = chain(records)
    beside = [record for record in render.ranked(records) if record not in links]
    parts = [f"<h2>{html.escape(track)}: {target:g} nats per token</h2>"]
    if len(links) > 1:
        parts.append(staircase(track, links))
    parts.append(f"<h3>Records</h3>{leaderboard(links[::-1], folder)}")
    if beside:
        parts.append(f"<h3>Beside the ladder</h3>{leaderboard(beside, folder)}")
    curves = io.BytesIO()
    picture.plot([record.folder for record in links + beside], curves, target)
    address = f"data:image/png;base64,{base64.b64encode(curves.getvalue()).decode()}"
    parts.append(f'<h3>Learning curves</h3><img alt="losses of all runs" src="{address}">')
    return "\n".join(parts)


def leaderboard(records, folder):
    """A table of records with links to them, that scrolls where the screen is narrow."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in render.LEADERBOARD)
    rows = []
    for record in records:
        address = quote(os.path.relpath(record.folder, folder).replace(os.sep, "/"))
        cells = [f'<a href="{html.escape(address)}">{html.escape(record.title)}</a>']
        cells += [html.escape(text) for text in render.leaderboard_cells(record)]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
