"""What is known of features that set what a change sets: their prices on eight GPUs and here."""

import re
import tomllib

from records.files import read_text


def changed_fields(before, after):
    """The fields {name: value} that two configurations do not share, but for the steps."""
    every = before.keys() | after.keys()
    return {name for name in every if before.get(name) != after.get(name)} - {"steps"}


def known_prices(root, fields):
    """Lines on the features of benchmarks/prices.toml that set any of these fields, as the first
    table of the page of their results has them; none where a checkout has no such page."""
    plan = root / "benchmarks/prices.toml"
    page = root / "benchmarks/results/prices.md"
    if not fields or not page.is_file():
        return []
    text = read_text(page)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    prices = {row[0]: (row[3], row[4]) for row in reversed(rows) if len(row) == 8}
    features = tomllib.loads(read_text(plan))["feature"]
    setting = [feature["name"] for feature in features if fields & feature.get("change", {}).keys()]
    shown = [
        "  {}: {} there, {} here".format(name, *prices[name]) for name in setting if name in prices
    ]
    names = ", ".join(sorted(fields))
    if not shown:
        return [f"no feature that sets {names} has a price on eight GPUs"]
    agreement = re.search(r"rank_correlation:(\S+) low:(\S+) high:(\S+)", text)
    words = "rank correlation of both prices {}, {} to {}".format(*agreement.groups())
    return [f"per cent of steps saved on eight GPUs by what sets {names}; {words}:", *shown]
