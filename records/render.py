"""What is written of records: their README.md, the leaderboards, and the results on the first
page. What comes from a log is plain text, by the forms in forms.toml."""

from records import stats
from records.files import HOME, LIMITS, read_text, require
from records.record import FORM
from records.source import changed_lines

END = "<!-- end -->"
WHY = "Write here what the idea is, why it works, and what was tried beside it."
PLAIN = "benchmarks/results/plain_curve.json"  # the plain GPT's losses at their seconds
# The lines of the first page's picture, as a reader would name them.
LINES = ["this trainer: the newest record, each run", "a plain GPT with AdamW, tuned for this text"]
FIRST_PAGE = ["record", "training time, s", "validation loss", "hardware, dtype"]  # columns there
FIRST_PAGE += ["faster than a plain GPT"]


def table(rows):
    """A Markdown table of rows, which are {column: Markdown}."""
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def percent(difference):
    """(mean, low, high) of a relative difference, such as `-5.1 % (-6.4 to -3.9)`."""
    mean, low, high = (100 * value for value in difference)
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"


# ----- a record's page


def gain_text(record):
    """What a record's page says of its gain."""
    parent = record.parent
    if not parent:
        return "It is the first record of its board."
    added, removed = changed_lines(parent.source, record.source)
    said = (
        f"Its parent is [{parent.name}](../{parent.name}/): {added} lines added, {removed} "
        f"removed. In pairs on one machine its training time differs by {percent(record.gain)}, "
        f"{stats.CONFIDENCE:.0%} interval"
    )
    if record.is_form:
        return f"{said}, whose upper end is at most {LIMITS.form_slower:.0%}."
    return f"{said}; p = {record.p:.2g} in the permutation test, at most {stats.ALPHA:g} is needed."


def record_readme(record, why):
    """A record's whole README.md."""
    return read_text(HOME / "record.md").format(
        record=record,
        run=record.runs[0],
        runs=len(record.runs),
        restarts=sum(run.start - 1 for run in record.runs),
        alpha=stats.ALPHA,
        why=why,
        gain=gain_text(record),
        form=f"\n{FORM}\n" * record.is_form,
        before=f"records/{record.track}/{record.parent.name} " if record.parent else "",
    )


def why_of(readme):
    """What a record's README says of its reasons."""
    rest = readme.partition("\n## Why\n\n")[2]
    return rest.partition("\n\n## Figures\n\n")[0]


# ----- the leaderboards


def factors_of(records, rules):
    """{name: how many times faster than a plain GPT} of a board's records. rules.json has that
    factor of one record, measured in turns on one machine; the gains in pairs give the others."""
    plain = rules.get("plain", {})
    names = [record.name for record in records]
    if plain.get("record") not in names:
        return {}
    left = {names[0]: 1.0}  # of the first record's time
    for record in records[1:]:
        left[record.name] = left[record.parent.name] * (1 + record.gain[0])
    factors = [plain["factor"] * left[plain["record"]] / left[name] for name in names]
    return {
        record.name: "-" if record.is_form else f"{factor:.1f} times"
        for record, factor in zip(records, factors, strict=True)
    }


def board_of(records, rules, place):
    """The rows of a leaderboard, the latest record first. place: where a page's links begin."""
    factors = factors_of(records, rules)
    rows = []
    for record in reversed(records):
        shown = f"{percent(record.gain)}, p = {record.p:.2g}" if record.parent else "first"
        if record.is_form:
            shown = f"form: {percent(record.gain)}"
        spread = f"{record.loss:.4f} ± {record.loss_std:.4f}, n = {len(record.runs)}"
        row = {
            "record": f"[{record.title}]({place}{record.track}/{record.name}/)",
            "training time, s": f"{record.seconds:.1f}",
            "time against its parent's, in pairs": shown,
            "validation loss": f"{spread}, p = {record.loss_p:.2g}",
            "hardware, dtype": record.runs[0].hardware,
            "date": record.date,
            "by": record.by,
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


def headline_of(track, row):
    """What the first page begins with: a board's newest record, a row of its leaderboard."""
    loss = row["validation loss"].partition(", p =")[0]
    plain = "[plain GPT](benchmarks/README.md#a-plain-gpt)"
    return (
        f"![Loss of {track} against seconds, beside a plain GPT](records/{track}.svg)\n\n"
        f"**On the board `{track}` a GPT reaches the target loss in {row['training time, s']} s of "
        f"training, {row['faster than a plain GPT']} as fast as a {plain}.** "
        f"Its validation loss is {loss}, on {row['hardware, dtype']}."
    )


def machine_row(run):
    """A run of machine_of() as a line of the table of other machines."""
    versions = f"torch {run['torch']}, CUDA {run['cuda']}"
    row = {
        "processor or GPU": run["device"],
        "ranks": f"{run['world_size']}",
        "training, s": f"{run['time_ms'] / 1000:.1f}",
        "from start to result, s": f"{run['seconds']:.1f}",
        "validation loss": f"{run['loss']:.4f}",
        "versions": versions,
        "commit": run["commit"][:8],
        "date": f"{run['started']:%Y-%m-%d}",
    }
    return table([row]).splitlines()[-1]


def pages_of(repository):
    """{path: text} of what `table` writes: the leaderboards, and the first page's headline and
    results."""
    page, first = repository.home / "README.md", repository.root / "README.md"
    text = read_text(page)
    rows = []
    headlines = []
    pictures = pictures_of(repository)
    for track, records in repository.records.items():
        rules = repository.rules[track]
        board = board_of(records, rules, "")
        block = table(board) if board else "No records yet."
        text = with_block(page, text, f"records/{track}", block)
        row = {"board": f"`{track}`", "target": f"{rules['config']['target_loss']:g}"}
        shown = board_of(records, rules, "records/")
        gained = [
            row for row, record in zip(shown, records[::-1], strict=True) if not record.is_form
        ]
        newest = gained[:1] or [{"record": "not measured yet"}]
        rows.append(row | {name: newest[0].get(name, "-") for name in FIRST_PAGE})
        if track in pictures:
            headlines.append(headline_of(track, newest[0]))
    top = with_block(first, read_text(first), "headline", "\n\n".join(headlines))
    return {page: text, first: with_block(first, top, "records", table(rows))}
