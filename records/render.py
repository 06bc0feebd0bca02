"""What is written of records: their README.md, the leaderboards, and the results on the first
page. All that comes from a log is escaped."""

import html
import re

import numpy as np

from records import stats
from records.files import read_text, require
from records.settings import filled

END = "<!-- end -->"
WHY = "Write here what the idea is, why it works, and what was tried beside it."
PLAIN = "benchmarks/results/plain_curve.json"  # the plain GPT's losses at their seconds
FIRST_PAGE = ["record", "training time, s", "validation loss", "hardware, dtype"]  # columns there
FIRST_PAGE += ["faster than a plain GPT"]


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


def pictures_of(repository):
    """{board: what its picture of loss against seconds shows}: the newest record, and the plain GPT
    that sets the target."""
    curve = repository.root / PLAIN
    shown = {}
    for track, records in repository.records.items():
        if records and "plain" in repository.rules[track] and curve.is_file():
            shown[track] = [records[-1].folder, curve]
    return shown


def first_page_row(track, records, rules):
    """A board's row of the first page's table."""
    row = {"board": f"`{track}`", "target": f"{rules['config']['target_loss']:g}"}
    newest = {"record": "not measured yet"}
    if records:
        newest = board_of(records, rules, "records/")[0]
    return row | {name: newest.get(name, "-") for name in FIRST_PAGE}


def pages_of(repository):
    """{path: text} of what `table` writes: the leaderboards, and the first page's results."""
    page, first = repository.home / "README.md", repository.root / "README.md"
    text = read_text(page)
    rows = []
    for track, records in repository.records.items():
        rules = repository.rules[track]
        board = board_of(records, rules, "")
        block = table(board) if board else "No records yet."
        text = with_block(page, text, f"records/{track}", block)
        rows.append(first_page_row(track, records, rules))
    block = table(rows)
    for track in pictures_of(repository):
        words = f"Loss of {track} against seconds, beside a plain GPT"
        block += f"\n\n![{words}](records/{track}.svg)"
    return {page: text, first: with_block(first, read_text(first), "records", block)}
