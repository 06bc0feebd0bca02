"""What is drawn of records: their README.md, the leaderboards, and the staircases. All that comes
from a log is escaped."""

import html
import re

import numpy as np

from records import stats
from records.files import about, read_text, require
from records.record import chain
from records.settings import GAINS, HOME, filled

END = "<!-- end -->"
WHY = "Write here what the idea is, why it works, and what was tried beside it."
# Of the staircase, in pixels: its left end, its width, its first step, and the height of all.
LEFT, ACROSS, TOP, STEP = 44, 392, 84, 46


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
    for number, run in enumerate(runs):
        started = f"{run.started:%Y-%m-%d %H:%M:%S}"
        row = {"run": f"{number + 1}", "started, UTC": started, "seed": f"{run.seed}"}
        sides = [run, *baseline[number : number + 1]]
        for whose, side in zip(("", "parent's "), sides, strict=False):
            row[f"{whose}loss"] = f"{side.val_loss:.5f}"
            row[f"{whose}time, s"] = f"{side.train_time_ms / 1000:.2f}"
        rows.append(row)
    return table(rows)


def record_readme(record, found, why):
    """A record's whole README.md, of its figures."""
    time_ms, speed = found["train_time_ms"], found["speed"]
    kind = "pairs" if speed else "none"
    if "steps" in found:
        kind = "steps" if found["parent"] else "first_of_steps"
    elif not found["parent"]:
        kind = "first"
    shown = {name: cell(found[name]) for name in ("by", "hardware", "software")}
    shown |= {"seconds": seconds(time_ms["mean"]), "spread": seconds(time_ms["std"])}
    if speed:
        shown |= {"gain": percent(speed["relative"]), "parent_s": seconds(speed["parent_ms"])}
    shown = {**found, **shown, "alpha": stats.ALPHA, "confidence": stats.CONFIDENCE}
    with about(HOME / "gains.toml"):
        against = GAINS[kind].format(**shown)
    return filled(
        "record.md",
        **shown,
        title=record.title,
        why=why,
        against=against,
        table=run_table(record.runs, record.baseline),
        before=f"records/{found['track']}/{found['parent']} " if found["parent"] else "",
    )


def why_of(readme):
    """What a record's README says of its reasons."""
    _, _, rest = readme.partition("\n## Why\n\n")
    why, _, _ = rest.partition("\n\n## Figures\n\n")
    return why


def board_of(records, rules, link):
    """The rows of the leaderboard: the track's chain, and then those beside it, latest first."""
    links = chain(records)
    found = links[::-1]
    found += [record for record in reversed(records) if record not in found]
    rows = [leaderboard_row(record, link(record)) for record in found]
    if factors := factors_of(links, rules):
        for record, row in zip(found, rows, strict=True):
            row["faster than a plain GPT"] = factors.get(record.name, "")
    return rows


def left_of(links):
    """What each record of a chain takes: steps, or what gains leave of the first one's seconds."""
    if links and links[0].by_steps:
        return np.array([float(record.result["steps"]["count"]) for record in links])
    gains = [0.0, *(record.result["speed"]["relative"][0] for record in links[1:])]
    first = links[0].result["train_time_ms"]["mean"] / 1000
    return first * np.cumprod(np.add(gains, 1))


def factors_of(links, rules):
    """{name: by what factor it beats plain training} of a chain that is judged by seconds, where
    rules.json has the factor of one of its records, from turns with a plain GPT on one machine."""
    plain = rules.get("plain", {})
    names = [record.name for record in links]
    if plain.get("record") not in names or links[0].by_steps:
        return {}
    left = left_of(links)
    factors = plain["factor"] * left[names.index(plain["record"])] / left
    return {name: f"{factor:.1f} times" for name, factor in zip(names, factors, strict=True)}


def leaderboard_row(record, link):
    """A row of the leaderboard, from a verified result.json and a link to the record."""
    found = record.result
    gain = "no claim" if found["parent"] else "first"
    if speed := found["speed"]:
        gain = f"{percent(speed['relative'])}, p = {speed['p']:.2g}"
    shown = {name: cell(found[name]) for name in ("by", "hardware")}
    shown |= {"link": link, "date": record.date, "gain": gain}
    shown |= {"seconds": seconds(found["train_time_ms"]["mean"])}
    with about(HOME / "gains.toml"):
        columns = GAINS["columns_of_steps" if record.by_steps else "columns"]
        return {name: template.format(**{**found, **shown}) for name, template in columns}


def pages_of(repository):
    """{path: text} of what `table` writes: README.md with its leaderboards, and the staircases."""
    page = repository.home / "README.md"
    text = read_text(page)
    pages = {}
    for track, records in repository.records.items():
        rules = repository.rules[track]
        rows = board_of(records, rules, "[{0.title}]({0.track}/{0.name}/)".format)
        marker = f"<!-- records/{track} -->"
        before, _, rest = text.partition(f"{marker}\n")
        _, end, after = rest.partition(END)
        require(end and marker not in after, f"{page}: {marker}, and {END} behind it, are due once")
        board = table(rows) if rows else "No records yet."
        text = f"{before}{marker}\n{board}\n{END}{after}"
        if stairs := staircase(track, chain(records)):
            pages[repository.home / f"{track}.svg"] = stairs
    return {page: text, **pages}


def staircase(track, links):
    """An SVG file of what is left of a chain's first record; "" where there is no second one."""
    if len(links) < 2:
        return ""
    left = left_of(links)
    gains = 100 * np.diff(left, prepend=left[0]) / np.roll(left, 1)
    unit, digits = ("steps", 0) if links[0].by_steps else ("s", 1)
    logs = np.log(left / left.min())
    across = LEFT + ACROSS * logs / (logs[0] or 1)
    steps = ""
    for number, record in enumerate(links):
        shown = f"{left[number]:.{digits}f} {unit}"
        shown += f", {gains[number]:+.0f} %" if number else ""
        steps += filled(
            "step.svg",
            title=record.title,
            shown=shown,
            x=across[number],
            before=across[max(number - 1, 0)],
            y=TOP + STEP * number,
            rise=-STEP * (number > 0),
        )
    proven = f"in {len(links) - 1} proven step{'s' * (len(links) > 2)}"
    return filled(
        "staircase.svg",
        title=f"{track}: {left[0]:.0f} {unit} to {left[-1]:.{digits}f} {unit} {proven}",
        style=read_text(HOME / "staircase.css"),
        steps=steps,
        height=TOP + STEP * len(links),
        bottom=TOP + STEP * len(links) - 8,
    )
