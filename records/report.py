"""`report`: ladder, leaderboards and learning curves as one HTML page; and the ladder alone as an
SVG, a staircase, which a README can show.

The page needs no network. Its content security policy lets only its own script and style run, and
every word that comes from a log is escaped, or set as text by the script.
"""

import base64
import hashlib
import html
import json
import math
import os
from pathlib import Path
from urllib.parse import quote

from records import render
from records.record import chain

POINTS = 200  # of one curve; more would not be told apart
# Of the staircase, in pixels.
WIDTH = 480
ROW = 46
HEAD = 54
EDGE = 14

STYLE = """
:root { --ink: #1f2328; --faint: #59636e; --grid: #d1d9e0; --mark: #0969da; --paper: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #f0f6fc; --faint: #9198a1; --grid: #3d444d; --mark: #4493f8; --paper: #0d1117; }
}
.stairs text { font: 14px system-ui, sans-serif; fill: var(--ink);
  paint-order: stroke; stroke: var(--paper); stroke-width: 5px; }
.stairs .head { font-weight: 600; font-size: 17px; }
.stairs .faint { fill: var(--faint); font-size: 12px; }
.stairs .paper { fill: var(--paper); }
.stairs path { fill: none; stroke: var(--mark); stroke-width: 3; }
.stairs circle { fill: var(--mark); }
.stairs line { stroke: var(--grid); }
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src '{style_hash}' '{stairs_hash}'; script-src '{script_hash}'; base-uri 'none'; \
form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>GPT speedrun records</title>
<style>{style}</style>
<style>{stairs}</style>
</head>
<body>
<h1>GPT speedrun records</h1>
<p>A step of the ladder is a gain in training time that pairs of runs on one machine have shown. \
Times of different machines do not compare.</p>
{sections}
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


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


def headline(track, links):
    """What a chain of records has come to, in a line."""
    steps = ladder(links)
    count = len(steps) - 1
    proven = f"in {count} proven step{'s' * (count != 1)}"
    return f"{track}: {steps[0][1]:.0f} s to {steps[-1][1]:.1f} s {proven}"


def staircase_body(track, links):
    """The SVG of a chain of records, one row each and time from right to left, without its
    style."""
    steps = ladder(links)
    height = HEAD + ROW * len(steps) + 30
    low = math.log(min(left for _, left, _ in steps))
    high = math.log(steps[0][1])

    def across(left):
        share = (math.log(left) - low) / (high - low or 1)
        return EDGE + 30 + share * (WIDTH - 2 * EDGE - 60)

    title = html.escape(headline(track, links))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="stairs" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{title}">',
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
    return "\n".join(parts)


def staircase(track, links):
    """The text of an SVG file, light or dark as its reader has it."""
    opening, rest = staircase_body(track, links).split("\n", 1)
    return f"{opening}\n<style>{STYLE}</style>\n{rest}\n"


def page(repository, folder):
    """The text of the page that shows all records; it lies in `folder`, to which links relate."""
    style = (Path(__file__).parent / "report.css").read_text()
    script = (Path(__file__).parent / "report.js").read_text()
    sections = []
    data = {}
    for track, records in repository.records.items():
        if records:
            rules = repository.rules[track]
            sections.append(section(track, records, rules, folder))
            data[track] = {
                "target": rules.target_loss,
                "records": list(map(curves_of, sorted(records, key=lambda record: record.age))),
            }
    return PAGE.format(
        style_hash=content_hash(style),
        stairs_hash=content_hash(STYLE),
        script_hash=content_hash(script),
        style=style,
        stairs=STYLE,
        script=script,
        sections="".join(sections) or "<p>No records yet.</p>",
        data=json.dumps(data).replace("<", "\\u003c"),  # no </script> inside of it
    )


def content_hash(text):
    """The word by which a content security policy lets a text run."""
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode()


def curves_of(record):
    """What the page's script draws of a record: [[time in s, step, loss], ...] of each run."""
    runs = []
    for run in record.runs:
        curves = {"title": f"seed {run.seed}"}
        for kind, curve in run.curves.items():
            stride = max(1, math.ceil(len(curve) / POINTS))
            last = curve[(len(curve) - 1) % stride :: stride]
            curves[kind] = [[point.time_ms / 1000, point.step, point.loss] for point in last]
        runs.append(curves)
    return {"name": record.title, "runs": runs}


def section(track, records, rules, folder):
    """A track's ladder, its leaderboard, the records beside it, and the place for its curves."""
    links = chain(records)
    beside = [record for record in render.ranked(records) if record not in links]
    name = html.escape(track)
    parts = [f"<section><h2>{name}: {rules.target_loss:g} nats per token</h2>"]
    if len(links) > 1:
        parts.append(f'<div class="ladder">{staircase_body(track, links)}</div>')
    parts.append(f"<h3>Records</h3>{leaderboard(links[::-1], folder)}")
    if beside:
        parts.append(f"<h3>Beside the ladder</h3>{leaderboard(beside, folder)}")
    parts.append(f'<h3>Learning curves</h3><div class="chart" data-track="{name}"></div></section>')
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
