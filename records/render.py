"""What is drawn of records: their README.md, the leaderboards, the results on the first page and
the picture beside them. All that comes from a log is escaped."""

import html
import re

import numpy as np

from records import stats
from records.files import about, parse_json, read_text, require
from records.settings import filled

END = "<!-- end -->"
WHY = "Write here what the idea is, why it works, and what was tried beside it."
PLAIN = "benchmarks/results/plain_curve.json"  # the plain GPT's losses at their seconds
FIRST_PAGE = ("record", "training time, s", "validation loss", "hardware, dtype")  # its columns
CORNER, SIDES = np.array((60, 290)), np.array((380, -250))  # of the picture's axes, in pixels
SECONDS = [digit * ten for ten in (1, 10, 100, 1000) for digit in (1, 2, 5)]
LOSSES = range(1, 12)


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


# ----- a record's page


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


def gain_text(found):
    """What a record's page says of its gain."""
    parent, speed = found["parent"], found["speed"]
    if not parent:
        return "It is the first record of its board."
    return (
        f"Its parent is [{parent}](../{parent}/): {found['lines_added']} lines added, "
        f"{found['lines_removed']} removed. In {speed['pairs']} pairs on one machine its training "
        f"time differs from the parent's ({seconds(speed['parent_ms'])} s) by "
        f"{percent(speed['relative'])}, {stats.CONFIDENCE:.0%} interval; p = {speed['p']:.2g} in "
        f"the permutation test, at most {stats.ALPHA:g} is needed."
    )


def record_readme(record, found, why):
    """A record's whole README.md, of its figures."""
    time_ms = found["train_time_ms"]
    shown = {name: cell(found[name]) for name in ("by", "hardware", "software")}
    return filled(
        "record.md",
        **{**found, **shown},
        seconds=seconds(time_ms["mean"]),
        spread=seconds(time_ms["std"]),
        alpha=stats.ALPHA,
        title=record.title,
        why=why,
        against=gain_text(found),
        table=run_table(record.runs, record.baseline),
        before=f"records/{found['track']}/{found['parent']} " if found["parent"] else "",
    )


def why_of(readme):
    """What a record's README says of its reasons."""
    _, _, rest = readme.partition("\n## Why\n\n")
    why, _, _ = rest.partition("\n\n## Figures\n\n")
    return why


# ----- the leaderboards


def factors_of(records, rules):
    """{name: how many times faster than a plain GPT} of a board's records. rules.json has that
    factor of one record, measured in turns on one machine; the gains in pairs give the others."""
    plain = rules.get("plain", {})
    names = [record.name for record in records]
    if plain.get("record") not in names:
        return {}
    gains = [0.0, *(record.result["speed"]["relative"][0] for record in records[1:])]
    left = np.cumprod(np.add(gains, 1))  # of the first record's time
    factors = plain["factor"] * left[names.index(plain["record"])] / left
    return {name: f"{factor:.1f} times" for name, factor in zip(names, factors, strict=True)}


def board_of(records, rules, place):
    """The rows of a leaderboard, the latest record first. place: where a page's links begin."""
    factors = factors_of(records, rules)
    rows = []
    for record in reversed(records):
        found = record.result
        loss, speed = found["loss"], found["speed"]
        gain = f"{percent(speed['relative'])}, p = {speed['p']:.2g}" if speed else "first"
        spread = f"{loss['mean']:.4f} ± {loss['std']:.4f}"
        row = {
            "record": f"[{record.title}]({place}{record.track}/{record.name}/)",
            "training time, s": seconds(found["train_time_ms"]["mean"]),
            "time against its parent's, in pairs": gain,
            "validation loss": f"{spread}, n = {found['declared_runs']}, p = {loss['p']:.2g}",
            "hardware, dtype": cell(found["hardware"]),
            "date": record.date,
            "by": cell(found["by"]),
        }
        if factors:
            row["faster than a plain GPT"] = factors[record.name]
        rows.append(row)
    return rows


def with_block(page, text, name, block):
    """A page's text with what stands between the marker of a name and the end replaced."""
    marker = f"<!-- {name} -->"
    before, _, rest = text.partition(f"{marker}\n")
    _, end, after = rest.partition(END)
    require(end and marker not in after, f"{page}: {marker}, and {END} behind it, are due once")
    return f"{before}{marker}\n{block}\n{END}{after}"


def pages_of(repository):
    """{path: text} of what `table` writes: the leaderboards, the first page's results, and the
    picture of a board whose target a plain GPT sets."""
    page, first = repository.home / "README.md", repository.root / "README.md"
    pages = {page: read_text(page)}
    rows, drawn = [], ""
    for track, records in repository.records.items():
        rules = repository.rules[track]
        board = board_of(records, rules, "")
        block = table(board) if board else "No records yet."
        pages[page] = with_block(page, pages[page], f"records/{track}", block)
        row = {"board": f"`{track}`", "target": f"{rules['config']['target_loss']:g}"}
        row |= dict.fromkeys(FIRST_PAGE, "not measured yet")
        if records:
            newest = board_of(records, rules, "records/")[0]
            row |= {name: newest[name] for name in FIRST_PAGE}
        rows.append(row)
        if records and "plain" in rules and (repository.root / PLAIN).is_file():
            pages[repository.home / f"{track}.svg"] = picture(repository, records[-1])
            words = f"Loss of {track} against seconds, beside a plain GPT"
            drawn += f"\n\n![{words}](records/{track}.svg)"
    pages[first] = with_block(first, read_text(first), "records", table(rows) + drawn)
    return pages


# ----- the picture


def picture(repository, record):
    """An SVG file of loss against seconds, both on log scales: a record's runs and a plain GPT."""
    with about(PLAIN):
        plain = parse_json(read_text(repository.root / PLAIN))
        lines = [("plain", zip(plain["seconds"], plain["loss"], strict=True))]
        lines += [("record", run.curve) for run in record.runs]
        lines = [(kind, [point for point in line if point[0] > 0]) for kind, line in lines]
        points = np.log([point for _, line in lines for point in line])
    low, high = points.min(axis=0), points.max(axis=0)

    def place(point):
        return CORNER + (np.log(point) - low) / (high - low) * SIDES

    drawn = ""
    for kind, line in lines:
        shown = " ".join("{:.1f},{:.1f}".format(*place(point)) for point in line)
        drawn += f'<polyline class="{kind}" points="{shown}"/>\n'
    corner = np.exp(low)
    for value in SECONDS:
        x, y = place((value, corner[1]))
        if low[0] <= np.log(value) <= high[0]:
            drawn += f'<text x="{x:.1f}" y="{y + 20:.1f}" text-anchor="middle">{value} s</text>\n'
    for value in LOSSES:
        x, y = place((corner[0], value))
        if low[1] <= np.log(value) <= high[1]:
            drawn += f'<text x="{x - 8:.1f}" y="{y + 5:.1f}" text-anchor="end">{value}</text>\n'
    return filled("curves.svg", title=record.title, curves=drawn)
