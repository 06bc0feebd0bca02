"""Markdown: a record's README and the leaderboards. All that comes from a log is escaped."""
import html
import json
import re

from records import stats
from records.files import RecordError
from records.record import chain

END = "<!-- end -->"
FIGURES = "<!-- figures -->"
WHY = "Write here what the idea is, why it works, and what was tried beside it."


def cell(value):
    """Text for a Markdown table: no HTML, no links, no cell borders."""
    text = html.escape(str(value))
    return re.sub(r"[|`\[\]\\*]", lambda found: f"&#{ord(found[0])};", text)


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def seconds(milliseconds):
    return f"{milliseconds / 1000:.1f}"


def p_text(p):
    return f"p = {p:.2g}"


def difference(speed):
    """Time difference of paired runs, such as `-12.30 s (-13.01 to -11.59)`."""
    return (f"{speed['difference_ms'] / 1000:+.2f} s "
            f"({speed['low_ms'] / 1000:+.2f} to {speed['high_ms'] / 1000:+.2f})")


def percent(difference):
    """(mean, low, high) of a relative difference, such as `-5.1 % (-6.4 to -3.9)`."""
    mean, low, high = (100 * value for value in difference)
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"


def clocks(speed):
    """What the clocks say of paired runs, such as `processor time -5.1 % (-6.4 to -3.9), wall time ...`."""
    return ", ".join(f"{clock} time {percent(values)}" for clock, values in speed["relative"].items())


def run_table(runs):
    return table(["run", "started, UTC", "seed", "validation loss", "training time, s", "tokens", "peak memory, MiB"],
                 [[cell(run["run"]), str(run["started"]), str(run["seed"]), f"{run['val_loss']:.5f}",
                   seconds(run["train_time_ms"]), f"{run['tokens']:,}", f"{run['peak_memory_mib']:,}"] for run in runs])


def config_table(changes, before, after):
    return table(["field", cell(before), cell(after)],
                 [[cell(name), *(cell(json.dumps(value)) for value in values)] for name, values in changes.items()])


def record_block(figures):
    """What a record's README says between its markers: everything that follows from the logs."""
    loss, time_ms, first = figures["loss"], figures["train_time_ms"], figures["runs"][0]
    lines = [
        run_table(figures["runs"]), "",
        f"Validation loss {loss['mean']:.5f}, standard deviation {loss['std']:.5f}, n = "
        f"{len(figures['runs'])} (declared {figures['declared_runs']}, batch {figures['batch']} of this code, restarts "
        f"{figures['restarts']}).",
        f"Mean below the target {loss['target']:g}: {p_text(loss['p'])} (one-sided t-test; below "
        f"{loss['p_needed']:g} is needed).",
        f"Training time {seconds(time_ms['mean'])} s, standard deviation {seconds(time_ms['std'])} s.", "",
        f"Hardware: {cell(first['device'])}, world size {first['world_size']}, torch {cell(first['torch'])}, CUDA "
        f"{cell(first['cuda'])}, triton {cell(first['triton'])}.",
        f"Code: sha256 `{figures['code_sha256'][:16]}`.", "", "## Against the parent", ""]
    if figures["parent"] is None:
        lines.append("None: the first record of its track.")
    else:
        lines.append(f"[{figures['parent']}](../{figures['parent']}/): {figures['lines_added']} lines added, "
                     f"{figures['lines_removed']} removed; `python -m records diff records/{figures['track']}/"
                     f"{figures['parent']} records/{figures['track']}/{figures['name']}` shows them.")
        if figures["config_changes"]:
            lines += ["", config_table(figures["config_changes"], "parent", "this record")]
    speed = figures["speed"]
    if speed:
        lines += ["", f"Training time against the parent's on the same machine, {speed['pairs']} interleaved pairs: "
                  f"{difference(speed)} ({stats.CONFIDENCE:.0%} interval, parent "
                  f"{seconds(speed['baseline_mean_ms'])} s).",
                  f"In relation to the parent: {clocks(speed)}; fastest parts {100 * speed['fastest_parts']:+.1f} %. "
                  f"Permutation test: {p_text(speed['p'])} (at most {figures['p_needed']:g} is needed).", "",
                  "The parent's runs:", "", run_table(figures["baseline"])]
    elif figures["parent"]:
        lines += ["", "No claim of speed: the parent did not run beside it."]
    return "\n".join(lines) + "\n"


def record_readme(figures, why=WHY):
    return (f"# {figures['name'][11:]}, {figures['track']} track\n\n## Why\n\n{why}\n\n## Figures\n\n"
            f"Written by `python -m records submit` from the logs; `verify` compares them.\n\n"
            f"{FIGURES}\n{record_block(figures)}{END}\n\n## Again, on another machine\n\n"
            f"```\npython -m records reproduce records/{figures['track']}/{figures['name']}\n```\n")


# What prose has none of: HTML, tables, headings, pictures.
ODD_PROSE = re.compile(r"<[A-Za-z/!?]|^ *\||^ *:?-+:? *\||^ {0,3}#|^ *(?:-{3,}|=+) *$|!\[", re.MULTILINE)


def why_of(readme):
    """What a record's README says of its reasons."""
    return readme.partition("\n## Why\n\n")[2].partition("\n\n## Figures\n\n")[0]


def block_of(text, start):
    """What stands between a start marker and the next end marker; RecordError unless it is there just once."""
    if text.count(start) != 1:
        raise RecordError(f"holds the marker {start} {text.count(start)} times, once is needed")
    block, end, _ = text.partition(start + "\n")[2].partition(END)
    if not end:
        raise RecordError(f"has no {END} after {start}")
    return block


def marker(track):
    return f"<!-- records/{track} -->"


LEADERBOARD = ["record", "date", "training time, s", "validation loss", "against its parent, paired", "hardware"]


def ranked(records):
    """The track's chain, its last record first, then those beside it, the latest first. Times of different machines do
    not compare, and so they rank nothing."""
    links = chain(records)
    beside = sorted((record for record in records if record not in links), key=lambda record: record.age)
    return [*links[::-1], *beside[::-1]]


def leaderboard_cells(record):
    """The columns of LEADERBOARD after the first as plain text, from a verified result.json."""
    figures = record.result
    loss, first, speed = figures["loss"], figures["runs"][0], figures["speed"]
    against = f"{difference(speed)}, n = {speed['pairs']}" if speed else "no claim" if figures["parent"] else "first"
    return [record.date, seconds(figures["train_time_ms"]["mean"]),
            f"{loss['mean']:.4f} ± {loss['std']:.4f}, n = {len(figures['runs'])}, {p_text(loss['p'])}", against,
            f"{first['device']}, world size {first['world_size']}"]


def leaderboard(records):
    """The table of a track's verified records, as `ranked`."""
    rows = [[f"[{record.name[11:]}]({record.track}/{record.name}/)", *map(cell, leaderboard_cells(record))]
            for record in ranked(records)]
    return (table(LEADERBOARD, rows) if rows else "No records yet.") + "\n"


def with_leaderboards(text, records):
    """README text with every track's leaderboard renewed. A track without records needs no markers."""
    for track, entries in records.items():
        if entries or marker(track) in text:
            old = block_of(text, marker(track))
            text = text.replace(f"{marker(track)}\n{old}", f"{marker(track)}\n{leaderboard(entries)}")
    return text
