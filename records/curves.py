"""`plot`: losses of runs or records as a PNG. `report`: leaderboards, the ladder of records and interactive curves as
one HTML page. Both draw other people's logs beside them, and say so.

The page needs no network. Its content security policy lets only its own script and style run, and every word that
comes from a log is escaped, or set as text by the script.
"""
import base64
import hashlib
import html
import json
import math
import os
from pathlib import Path
from urllib.parse import quote

from records import foreign, render, stats
from records.compare import side_of
from records.files import RecordError, write_whole
from records.judge import judge_records

POINTS = 400  # of one curve in the report; more would not be told apart
FOREIGN = " (another trainer's, not verified)"


def read(path, repository):
    """[(name, runs, track, or None of another trainer's log), ...] of a path: of a record, a run, a log of any trainer,
    or a folder of other trainers' logs."""
    try:
        side = side_of(path, repository)
        return [(Path(side.label).name, side.runs, side.track)]
    except RecordError as error:
        if (Path(path) / "logs").is_dir() or (Path(path) / "log.txt").exists():
            raise
        try:
            return [(run.name, (run,), None) for run in map(foreign.read, foreign.logs_in(path))]
        except RecordError as other:
            raise RecordError(f"{error}" if "this trainer" in str(other) else f"{other}") from None


def plot(repository, paths, out):
    """Draw losses against time and steps of runs or records into a PNG: one colour a path, training losses faint, those
    of other trainers dashed."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    sides = [side for path in paths for side in read(path, repository)]
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained", sharey=True)
    styles = (("train", {"linewidth": 0.6, "alpha": 0.25}), ("val", {"marker": "o", "markersize": 3}))
    for number, (name, runs, track) in enumerate(sides):
        name = name.replace("$", r"\$") + ("" if track else FOREIGN)  # no formula
        for run in runs:
            for kind, style in styles:
                label = name if kind == "val" and run is runs[0] else None
                for axes, xs in zip(panels, points_of(run.curves[kind])):
                    axes.plot(xs, [point.loss for point in run.curves[kind]], color=f"C{number}", label=label,
                              linestyle="-" if track else "--", **style)
    for track in sorted({track for _, _, track in sides if track}):
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


def seconds_of(point):
    """Training time; None in a log without times."""
    return None if point.time_ms is None else point.time_ms / 1000


def points_of(curve):
    """(times in s, nan where there are none; steps) of a curve."""
    return [math.nan if point.time_ms is None else point.time_ms / 1000 for point in curve], [
        point.step for point in curve]


def thinned(curve):
    """[[time in s or None, step, loss], ...], at most POINTS of a curve, the last one among them."""
    stride = max(1, -(-len(curve) // POINTS))
    return [[seconds_of(point), point.step, point.loss] for point in curve[::-1][::stride][::-1]]


def report(repository, out, paths=(), beside="fineweb"):
    """Write the page; returns the number of records shown and the failures of `verify`, which the page counts. paths: of
    other people's logs, which are drawn in the chart of the track `beside`."""
    if beside not in repository.rules:
        raise RecordError(f"--track {ascii(beside)}: is none of {', '.join(repository.rules)}")
    others = [foreign.read(log) for path in paths for log in foreign.logs_in(path)]
    out = Path(out)
    failures = judge_records(repository)
    failed = {record.folder for records in repository.records.values() for record in records
              if any(record.folder in (failure.path, *failure.path.parents) for failure in failures)}
    shown = {track: [record for record in render.ranked(good)]
             for track, records in repository.records.items()
             if (good := [record for record in records if record.folder not in failed]) or others and track == beside}
    parts = {name: (Path(__file__).parent / name).read_text() for name in ("report.css", "report.js")}
    data = json.dumps({track: track_data(records, repository.rules[track], others if track == beside else ())
                       for track, records in shown.items()})
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
<p>Training times compare on one machine only. A gain counts when it was measured in pairs of runs.</p>
{failed}{sections}
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def content_hash(text):
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def track_data(records, rules, others):
    """What the page's script draws."""
    def curves(run):
        return {kind: thinned(run.curves[kind]) for kind in ("train", "val")}
    return {"target": rules.target_loss, "records": [
        *({"name": record.name, "foreign": False, "runs": [{"title": f"seed {run.seed}", **curves(run)}
                                                           for run in record.runs]} for record in records),
        *({"name": run.name + FOREIGN, "foreign": True, "runs": [{"title": "another trainer's log", **curves(run)}]}
          for run in others)]}


def link(path, text, page_folder):
    """An <a> from the page to a file of the repository."""
    address = quote(os.path.relpath(path, page_folder).replace(os.sep, "/"))
    return f'<a href="{html.escape(address)}">{html.escape(text)}</a>'


def section(track, records, rules, page_folder):
    """A track's leaderboard with links to every log, and the place for its curves."""
    if not records:
        return (f"<section><h2>{html.escape(track)}: {rules.target_loss:g} nats per token</h2><p>No records yet.</p>"
                f'<div class="chart" data-track="{html.escape(track)}"></div></section>')
    head = "".join(f"<th>{html.escape(title)}</th>" for title in [*render.LEADERBOARD, "logs"])
    rows = []
    for record in records:
        logs = " ".join(link(run.path, str(number), page_folder) for number, run in enumerate(record.runs, 1))
        cells = [link(record.folder, record.name[11:], page_folder),
                 *map(html.escape, render.leaderboard_cells(record)), logs]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return (f"<section><h2>{html.escape(track)}: {rules.target_loss:g} nats per token</h2>"
            f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>{ladder(records, page_folder)}'
            f'<h3>Losses</h3><div class="chart" data-track="{html.escape(track)}"></div></section>')


def what_changed(record):
    """The first line of a record's reasons, cut to a size that a row of the ladder has room for."""
    first = " ".join(render.why_of(record.readme).partition("\n\n")[0].split())
    return first if len(first) <= 200 else first[:199].rpartition(" ")[0] + " ..."


def ladder(records, page_folder):
    """The records, oldest first, each with a bar for its mean training time, that with its interval, and its reason."""
    rows, steps = [], sorted(records, key=lambda record: record.age)
    times = [stats.interval([run.train_time_ms / 1000 for run in record.runs]) for record in steps]
    longest = max(high if math.isfinite(high) else mean for mean, _, high in times)
    for record, (mean, low, high) in zip(steps, times):
        low, high = (max(0.0, low), high) if math.isfinite(high) else (mean, mean)
        at, begin, end = (round(300 * value / longest, 2) for value in (mean, low, high))
        bar = (f'<svg class="bar" viewBox="0 0 302 16" preserveAspectRatio="none" role="img" aria-label="{mean:.1f} s">'
               f'<rect class="mean" x="0" y="3" width="{at}" height="10"/>'
               f'<rect class="interval" x="{begin}" y="7" width="{max(end - begin, 0.5):.2f}" height="2"/></svg>')
        rows.append(f"<tr><td>{link(record.folder, record.name[11:], page_folder)}<br>{record.date}</td>"
                    f"<td>{bar}{mean:.1f} s ({low:.1f} to {high:.1f})</td>"
                    f"<td>{html.escape(what_changed(record))}</td></tr>")
    return (f'<h3>The ladder</h3><table class="ladder"><tr><th>record</th><th>mean training time of a run, s '
            f"({stats.CONFIDENCE:.0%} interval), bars from 0 to {longest:.1f} s</th><th>what changed</th></tr>"
            f"{''.join(rows)}</table>")
