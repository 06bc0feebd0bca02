"""How many times as long as the english record a plain GPT trains: in turns, on one machine.

    python benchmarks/plain_turns.py [--turns 5] [--seconds 60]

A turn times so many seconds of the tuned plain GPT of plain_gpt.py, on two threads, and then a
run of train_gpt.py on two ranks, which must be the script of a record of english. The plain GPT's
time is that for the tokens that rules.json fixes, with which it reached the target in ten minutes
of an idle machine. The factor is the median over turns; rules.json takes it over, with the record's
name, and the leaderboard derives those of other records from it. A call adds its turns.

Results: benchmarks/results/plain_turns.{json,md}. The last line is
`plain_turns record:<name> factor:<x> low:<x> high:<x> turns:<n>`, with the extremes of turns.
"""

import json
import re
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common, plain_gpt
from records.record import Repository

NAME = "plain_turns"
TRACK = "english"
FINAL_LINE = re.compile(r"^final val_loss:(\S+) train_time:(\d+)ms", re.MULTILINE)


def record_here():
    """The name of the latest record whose script is train_gpt.py as it stands here."""
    script = (common.ROOT / "train_gpt.py").read_text()
    found = [record for record in Repository.at().records[TRACK] if record.source == script]
    if not found:
        sys.exit(f"error: train_gpt.py is not the script of a record of {TRACK}; check one out")
    return max(found, key=lambda record: record.runs[0].started).name


def plain_seconds(setting, corpus, seconds, tokens):
    """The plain GPT's seconds for so many tokens, by its mean step over some seconds."""
    training = plain_gpt.Training(setting, 1, tokens // setting.batch, corpus)
    training.step(0)  # it allocates, and is not counted
    times = []
    while sum(times) < seconds:
        times.append(training.step(1 + len(times)))
    return statistics.mean(times) * tokens / setting.batch


def record_run(number):
    """(seconds of training, validation loss) of a run of the track on two ranks."""
    values = {"track": TRACK, "device": "cpu", "seed": number}
    options = common.words_of(values)
    folder = common.train(common.ROOT, f"{NAME}-{number}", options, world_size=plain_gpt.THREADS)
    loss, milliseconds = FINAL_LINE.search(common.log_of(folder)).groups()
    return int(milliseconds) / 1000, float(loss)


def report(turns):
    """(the page, the last line) of the turns of the latest record among them."""
    record = turns[-1]["record"]
    own = [turn for turn in turns if turn["record"] == record]
    factors = [turn["plain_seconds"] / turn["seconds"] for turn in own]
    rows = [
        [number, f"{turn['plain_seconds']:.0f}", f"{turn['seconds']:.1f}", f"{factor:.1f}"]
        for number, (turn, factor) in enumerate(zip(own, factors, strict=True), 1)
    ]
    header = ["turn", "the plain GPT's seconds", "the record's seconds", "factor"]
    line = f"{NAME} record:{record} factor:{statistics.median(factors):.1f} "
    line += f"low:{min(factors):.1f} high:{max(factors):.1f} turns:{len(own)}"
    return f"{common.markdown_table(header, rows)}\n\n`{line}`", line


def main(argv=None):
    arguments = common.parser(__doc__, turns=5, seconds=60.0).parse_args(argv)
    torch.set_num_threads(plain_gpt.THREADS)
    facts = common.environment("cpu")
    record = record_here()
    plain = json.loads((common.ROOT / "records/rules.json").read_text())["boards"][TRACK]["plain"]
    corpus = plain_gpt.Corpus(common.ROOT / "data" / TRACK)
    tuning = json.loads((common.RESULTS / f"{plain_gpt.NAME}.json").read_text())["runs"]
    setting = plain_gpt.run_of(plain_gpt.finals_of(tuning)[0]).setting
    path = Path(arguments.results) / f"{NAME}.json"
    turns = json.loads(path.read_text())["turns"] if path.is_file() else []
    for _ in range(arguments.turns):
        turn = {"record": record}
        turn["plain_seconds"] = plain_seconds(setting, corpus, arguments.seconds, plain["tokens"])
        turn["seconds"], turn["loss"] = record_run(len(turns) + 1)
        turns.append(turn)
        common.write_results(arguments.results, NAME, facts, {"turns": turns}, report(turns)[0])
    print(report(turns)[1])


if __name__ == "__main__":
    main()
