"""`plot`: losses of runs or records as a PNG. `report`: leaderboards and interactive curves as one HTML page.

The page needs no network. Its content security policy lets only its own script and style run, and every word that
comes from a log is escaped, or set as text by the script.
"""
import base64
import hashlib
import html
import json
import os
from pathlib import Path
from urllib.parse import quote

from records import render
from records.compare import side_of
from records.files import write_whole
from records.judge import judge_records

POINTS = 400  # of one curve in the report; more would not be told apart


def plot(repository, paths, out):
    """Draw losses against time and steps of runs or records into a PNG: one colour a path, training losses faint."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    sides = [side_of(path, repository) for path in paths]
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained", sharey=True)
    styles = (("train", {"linewidth": 0.6, "alpha": 0.25}), ("val", {"marker": "o", "markersize": 3}))
    for number, side in enumerate(sides):
        name = Path(side.label).name.replace("$", r"\$")  # no formula
        for run in side.runs:
            for kind, style in styles:
                label = name if kind == "val" and run is side.runs[0] else None
                for axes, xs in zip(panels, points_of(run.curves[kind])):
                    axes.plot(xs, [point.loss for point in run.curves[kind]], color=f"C{number}", label=label, **style)
    for track in sorted({side.track for side in sides}):
        panels[0].axhline(repository.rules[track].target_loss, color="grey", linestyle=":", label=f"target of {track}")
        panels[1].axhline(repository.rules[track].target_loss, color="grey", linestyle=":")
    panels[0].set(xlabel="training time, s", ylabel="loss, nats per token")
    panels[1].set(xlabel="step")
    for axes in panels:
        axes.grid(alpha=0.3)
    panels[0].legend()
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png", dpi=120)
    plt.close(figure)


def points_of(curve):
    """(times in s, steps) of a curve."""
    return [point.time_ms / 1000 for point in curve], [point.step for point in curve]


def thinned(curve):
    """[[time in s, step, loss], ...], at most POINTS of a curve, the last one among them."""
    stride = -(-len(curve) // POINTS)
    return [[point.time_ms / 1000, point.step, point.loss] for point in curve[::-1][::stride][::-1]]


def report(repository, out):
    """Write the page; returns the number of records shown and the failures of `verify`, which the page counts."""
    out = Path(out)
    failures = judge_records(repository)
    failed = {record.folder for records in repository.records.values() for record in records
              if any(record.folder in (failure.path, *failure.path.parents) for failure in failures)}
    shown = {track: [record for record in render.ranked(good)]
             for track, records in repository.records.items()
             if (good := [record for record in records if record.folder not in failed])}
    parts = {name: (Path(__file__).parent / name).read_text() for name in ("report.css", "report.js")}
    data = json.dumps({track: track_data(records, repository.rules[track]) for track, records in shown.items()})
    sections = "".join(section(track, records, repository.rules[track], out.parent) for track, records in shown.items())
    page = PAGE.format(
        style_hash=content_hash(parts["report.css"]), script_hash=content_hash(parts["report.js"]),
        style=parts["report.css"], script=parts["report.js"], sections=sections or "<p>No records yet.</p>",
        data=data.replace("<", "\\u003c"),  # no </script> inside of it
        failed=f"<p>{len(failed)} records do not pass verify and are left out.</p>" if failed else "")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page)
    return sum(map(len, shown.values())), failures


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src '{style_hash}'; \
script-src '{script_hash}'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>GPT speedrun records</title>
<style>{style}</style>
</head>
<body>
<h1>GPT speedrun records</h1>
<p>Training times compare on one kind of hardware only. A gain counts when it was measured in interleaved pairs.</p>
{failed}{sections}
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def content_hash(text):
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def track_data(records, rules):
    return {"target": rules.target_loss, "records": [
        {"name": record.name, "runs": [{"run": run.run, "seed": run.seed, "train": thinned(run.curves["train"]),
                                        "val": thinned(run.curves["val"])} for run in record.runs]}
        for record in records]}


def link(path, text, page_folder):
    """An <a> from the page to a file of the repository."""
    address = quote(os.path.relpath(path, page_folder).replace(os.sep, "/"))
    return f'<a href="{html.escape(address)}">{html.escape(text)}</a>'


def section(track, records, rules, page_folder):
    """A track's leaderboard with links to every log, and the place for its curves."""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in [*render.LEADERBOARD, "logs"])
    rows = []
    for record in records:
        logs = " ".join(link(run.path, str(number), page_folder) for number, run in enumerate(record.runs, 1))
        cells = [link(record.folder, record.name[11:], page_folder),
                 *map(html.escape, render.leaderboard_cells(record)), logs]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return (f"<section><h2>{html.escape(track)}: {rules.target_loss:g} nats per token</h2>"
            f"<table><tr>{head}</tr>{''.join(rows)}</table>"
            f'<div class="chart" data-track="{html.escape(track)}"></div></section>')
