"""`plot`: losses of runs or records as a PNG. `report`: leaderboards, the ladder of records and
interactive curves as one HTML page. Both draw other people's logs beside them, and say so.

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

from records import foreign, render, stats
from records.compare import side_of
from records.files import RecordError, write_whole
from records.judge import judge_records
from records.record import age_of

POINTS = 400  # of one curve in the report; more would not be told apart
FOREIGN = " (another trainer's, not verified)"
REASON = 200  # characters of a record's reasons that a row of the ladder has room for
STYLES = {  # of the two kinds of curves in `plot`
    "train": {"linewidth": 0.6, "alpha": 0.25},
    "val": {"marker": "o", "markersize": 3},
}


# ----- plot


def read(path, repository):
    """[(name, runs, track, or None of another trainer's log), ...] of a path: of a record, a run, a
    log of any trainer, or a folder of other trainers' logs."""
    try:
        side = side_of(path, repository)
        return [(Path(side.label).name, side.runs, side.track)]
    except RecordError as error:
        if (Path(path) / "logs").is_dir() or (Path(path) / "log.txt").exists():
            raise
        own = str(error)
    try:
        runs = [foreign.read(log) for log in foreign.logs_in(path)]
    except RecordError as error:
        reason = str(error)
        raise RecordError(own if "this trainer" in reason else reason) from None
    return [(run.name, (run,), None) for run in runs]


def plot(repository, paths, out):
    """Draw losses against time and steps of runs or records into a PNG: one colour a path, training
    losses faint, those of other trainers dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sides = [side for path in paths for side in read(path, repository)]
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained", sharey=True)
    for number, (name, runs, track) in enumerate(sides):
        draw_runs(panels, name, runs, track, color=f"C{number}")
    for track in sorted({track for _, _, track in sides if track}):
        target = repository.rules[track].target_loss
        panels[0].axhline(target, color="grey", linestyle=":", label=f"target of {track}")
        panels[1].axhline(target, color="grey", linestyle=":")
    panels[0].set(xlabel="training time, s", ylabel="loss, nats per token")
    panels[1].set(xlabel="step")
    for axes in panels:
        axes.grid(alpha=0.3)
    panels[0].legend()
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png", dpi=120)
    plt.close(figure)


def draw_runs(panels, name, runs, track, color):
    """Draw the curves of one path into both panels, under one name."""
    name = name.replace("$", r"\$")  # a dollar sign would begin a formula
    linestyle = "-"
    if not track:
        name += FOREIGN
        linestyle = "--"
    for run in runs:
        for kind, style in STYLES.items():
            curve = run.curves[kind]
            losses = [point.loss for point in curve]
            label = name if kind == "val" and run is runs[0] else None
            for axes, xs in zip(panels, points_of(curve), strict=True):
                axes.plot(xs, losses, color=color, label=label, linestyle=linestyle, **style)


def seconds_of(point):
    """Training time; None in a log without times."""
    return None if point.time_ms is None else point.time_ms / 1000


def points_of(curve):
    """(times in s, nan where there are none; steps) of a curve."""
    times = [seconds_of(point) for point in curve]
    times = [math.nan if time is None else time for time in times]
    return times, [point.step for point in curve]


def thinned(curve):
    """[[time in s or None, step, loss], ...], at most POINTS of a curve, the last one among
    them."""
    stride = max(1, math.ceil(len(curve) / POINTS))
    first = (len(curve) - 1) % stride
    return [[seconds_of(point), point.step, point.loss] for point in curve[first::stride]]


# ----- report


def report(repository, out, paths=(), beside="fineweb"):
    """Write the page; returns the number of records shown and the failures of `verify`, which the
    page counts. paths: of other people's logs, which are drawn in the chart of the track
    `beside`."""
    if beside not in repository.rules:
        raise RecordError(f"--track {ascii(beside)}: is none of {', '.join(repository.rules)}")
    others = [foreign.read(log) for path in paths for log in foreign.logs_in(path)]
    out = Path(out)
    failures = judge_records(repository)
    failed = folders_that_failed(repository, failures)
    sections = []
    data = {}
    count = 0
    for track, records in repository.records.items():
        good = [record for record in records if record.folder not in failed]
        drawn = others if track == beside else []
        if good or drawn:
            rules = repository.rules[track]
            sections.append(section(track, render.ranked(good), rules, out.parent))
            data[track] = track_data(render.ranked(good), rules, drawn)
            count += len(good)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page_of(sections, data, len(failed)))
    return count, failures


def folders_that_failed(repository, failures):
    """The folders of records in which something is wrong."""
    wrong = set()
    for failure in failures:
        wrong |= {failure.path, *failure.path.parents}
    folders = {record.folder for records in repository.records.values() for record in records}
    return folders & wrong


def page_of(sections, data, failed):
    """The text of the page, of sections, what its script draws, and a number of records that are
    left out."""
    style = (Path(__file__).parent / "report.css").read_text()
    script = (Path(__file__).parent / "report.js").read_text()
    note = ""
    if failed:
        note = f"<p>{failed} records do not pass verify and are left out.</p>"
    return PAGE.format(
        style_hash=content_hash(style),
        script_hash=content_hash(script),
        style=style,
        script=script,
        sections="".join(sections) or "<p>No records yet.</p>",
        data=json.dumps(data).replace("<", "\\u003c"),  # no </script> inside of it
        failed=note,
    )


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
<p>Training times compare on one machine only. A gain counts when it was measured in pairs of \
runs.</p>
{failed}{sections}
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def content_hash(text):
    """The word by which a content security policy lets a text run."""
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode()


def track_data(records, rules, others):
    """What the page's script draws."""
    drawn = []
    for record in records:
        runs = [curves_of(run, f"seed {run.seed}") for run in record.runs]
        drawn.append({"name": record.name, "foreign": False, "runs": runs})
    for run in others:
        runs = [curves_of(run, "another trainer's log")]
        drawn.append({"name": run.name + FOREIGN, "foreign": True, "runs": runs})
    return {"target": rules.target_loss, "records": drawn}


def curves_of(run, title):
    """The curves of one run, as the page's script takes them."""
    return {
        "title": title,
        "train": thinned(run.curves["train"]),
        "val": thinned(run.curves["val"]),
    }


def link(path, text, page_folder):
    """An <a> from the page to a file of the repository."""
    address = quote(os.path.relpath(path, page_folder).replace(os.sep, "/"))
    return f'<a href="{html.escape(address)}">{html.escape(text)}</a>'


def section(track, records, rules, page_folder):
    """A track's leaderboard with links to every log, and the place for its curves."""
    title = f"<h2>{html.escape(track)}: {rules.target_loss:g} nats per token</h2>"
    chart = f'<div class="chart" data-track="{html.escape(track)}"></div>'
    if not records:
        return f"<section>{title}<p>No records yet.</p>{chart}</section>"
    names = [*render.LEADERBOARD, "logs"]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    rows = "".join(leaderboard_row(record, page_folder) for record in records)
    return (
        f'<section>{title}<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'
        f"{ladder(records, page_folder)}<h3>Losses</h3>{chart}</section>"
    )


def leaderboard_row(record, page_folder):
    """A record's row of the leaderboard, with a link to each of its logs."""
    logs = []
    for number, run in enumerate(record.runs, 1):
        logs.append(link(run.path, str(number), page_folder))
    cells = [link(record.folder, record.name[11:], page_folder)]
    cells += [html.escape(text) for text in render.leaderboard_cells(record)]
    cells += [" ".join(logs)]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def what_changed(record):
    """The first paragraph of a record's reasons, cut to a size that a row of the ladder has room
    for."""
    first, _, _ = render.why_of(record.readme).partition("\n\n")
    first = " ".join(first.split())
    if len(first) <= REASON:
        return first
    whole_words, _, _ = first[: REASON - 1].rpartition(" ")
    return whole_words + " ..."


def time_of(record):
    """(mean, low, high): the mean training time of a record's runs in s, with its interval where
    that can be told, and else the mean thrice."""
    mean, low, high = stats.interval([run.train_time_ms / 1000 for run in record.runs])
    if not math.isfinite(high):
        return mean, mean, mean
    return mean, max(0.0, low), high


def ladder(records, page_folder):
    """The records, oldest first, each with a bar for its mean training time, that with its
    interval, and its reason."""
    steps = sorted(records, key=age_of)
    longest = max(high for _, _, high in map(time_of, steps))
    rows = []
    for record in steps:
        mean, low, high = time_of(record)
        rows.append(
            f"<tr><td>{link(record.folder, record.name[11:], page_folder)}<br>{record.date}</td>"
            f"<td>{bar(mean, low, high, longest)}{mean:.1f} s ({low:.1f} to {high:.1f})</td>"
            f"<td>{html.escape(what_changed(record))}</td></tr>"
        )
    return (
        f'<h3>The ladder</h3><table class="ladder"><tr><th>record</th>'
        f"<th>mean training time of a run, s ({stats.CONFIDENCE:.0%} interval), bars from 0 to "
        f"{longest:.1f} s</th><th>what changed</th></tr>{''.join(rows)}</table>"
    )


def bar(mean, low, high, longest):
    """An SVG bar for a time, with its interval, of 300 units for the longest."""
    at = round(300 * mean / longest, 2)
    begin = round(300 * low / longest, 2)
    end = round(300 * high / longest, 2)
    return (
        f'<svg class="bar" viewBox="0 0 302 16" preserveAspectRatio="none" role="img" '
        f'aria-label="{mean:.1f} s"><rect class="mean" x="0" y="3" width="{at}" height="10"/>'
        f'<rect class="interval" x="{begin}" y="7" width="{max(end - begin, 0.5):.2f}" '
        f'height="2"/></svg>'
    )
