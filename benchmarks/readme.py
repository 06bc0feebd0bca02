"""Write the first page's table of results, and copy result tables into the pages that show them.

    python benchmarks/readme.py      # after a benchmark, and after a new record

The table of README.md, benchmarks/results/first_page.md, comes from the logs of records and from
results of benchmarks. Between `<!-- results/NAME.md -->` and `<!-- end -->` of a page stands the
content of benchmarks/results/NAME.md. Tests fail when a page and the results differ.
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common, plain_gpt, plain_turns
from records.record import Repository

ROOT = common.ROOT
PAGES = ("README.md", "benchmarks/README.md")
BLOCK = re.compile(r"(<!-- results/(\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEADER = ("what", "machine", "validation loss", "training time", "n")
NOT_MEASURED = ["**not measured yet**"] * 2
WHAT = {"english": "fineweb's recipe at small scale; target 2.954"}


def machine(device):
    """The name of a machine in words, from a log's."""
    name, _, cores = device.replace("(R)", "").rpartition(" x")
    return f"{name}, {cores} cores"


def latest_record(track):
    """A track's latest record: it was faster than the one before it in pairs, while times of other
    days do not compare."""
    return max(Repository.at().records[track], key=lambda record: record.runs[0].started)


def row_of_record(track, record):
    """What the logs of a record's runs say, as a row of the table."""
    runs = record.runs
    loss = common.spread([run.val_loss for run in runs], 4)
    seconds = common.spread([run.train_time_ms / 1000 for run in runs], 1)
    what = f"[`{track}`](records/{track}/{record.name}/): {WHAT[track]}"
    return [what, machine(runs[0].device), loss, f"{seconds} s", len(runs)]


def row_of_plain(results):
    """The row of a plain GPT: its loss, and its time in turns with a record of english."""
    found, turns = (
        json.loads((results / f"{script.NAME}.json").read_text())
        for script in (plain_gpt, plain_turns)
    )
    losses = [figures["loss"] for figures in plain_gpt.finals_of(found["runs"])]
    words = re.search(r"record:\S{10}_(\S+) factor:(\S+)", plain_turns.report(turns["turns"])[1])
    record, factor = words.groups()
    what = (
        "[a plain GPT](benchmarks/README.md#a-plain-gpt) with AdamW, well tuned, on the same text"
    )
    where = machine(turns["environment"]["device"])
    time = f"{factor} times that of {record}, in turns"
    return [what, where, common.spread(losses, 4), time, len(losses)]


def row_of_world_sizes(results):
    """The row of equal trajectories, of the runs with 8 micro-batches a step."""
    found = json.loads((results / "world_sizes.json").read_text())
    runs = {
        int(key.split("/")[2]): losses for key, losses in found["losses"].items() if "/8/" in key
    }
    alone = runs[1]
    gap = max(abs(a - b) for own in runs.values() for a, b in zip(own, alone, strict=True))
    sizes = ", ".join(map(str, sorted(runs)))
    (track,) = {key.split("/")[0] for key in found["losses"]}
    what = f"first {len(alone)} steps of `{track}` on {sizes} processes"
    words = "equal in all five decimals" if gap == 0 else f"within {gap:.5f}"
    loss = f"{alone[-1]:.5f} in training, {words}"
    return [what, machine(found["environment"]["device"]), loss, "not compared", len(runs)]


def first_page(results=common.RESULTS):
    """The table of README.md, in Markdown."""
    rows = [row_of_record(track, latest_record(track)) for track in WHAT]
    rows.append(row_of_plain(results))
    rows.append(row_of_world_sizes(results))
    rows.append(["`fineweb`: GPT-2 small on FineWeb, to 3.28", "1 to 8 GPUs", *NOT_MEASURED, 0])
    return common.markdown_table(HEADER, rows) + "\n"


def renewed_block(match):
    """The text of one block with the results of today."""
    begin, name, end = match.groups()
    results = (ROOT / "benchmarks/results" / name).read_text()
    return begin + results + end


def with_results(text):
    """Renew every block of a page's text. Raises FileNotFoundError for a block without results."""
    return BLOCK.sub(renewed_block, text)


def main():
    """Write the table, and renew the pages in their places."""
    common.write_whole(common.RESULTS / "first_page.md", first_page())
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_results(path.read_text()))


if __name__ == "__main__":
    main()
