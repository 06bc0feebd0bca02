"""How many times as long as the english record a plain GPT trains: in turns, on one machine.

    python benchmarks/plain_turns.py [--turns 5] [--seconds 60] [--elsewhere data/verse]

A turn times so many seconds of the tuned plain GPT of plain_gpt.py, on two threads, and then a
run of the script of the latest record of english, on two ranks. The plain GPT's time is that for
the tokens that rules.json fixes, with which it reached the target in ten minutes of an idle
machine. The factor is the median over turns; rules.json takes it over, with the record's
name, and the leaderboard derives those of other records from it. A call adds its turns. With
`--elsewhere`, both train on another corpus of the same vocabulary instead, one seed: the plain GPT
on as many tokens as on english, or until its loss on the same tokens is no higher than the
record's, at which it looks forty times. The factor is of its seconds until then.

Results: benchmarks/results/plain_turns.{json,md}. The last line is
`plain_turns record:<name> factor:<x> low:<x> high:<x> turns:<n>`, with the extremes of turns.
"""

import json
import math
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
LOOKS = 40  # at the plain GPT's loss on another corpus
FINAL_LINE = re.compile(r"^final val_loss:(\S+) train_time:(\d+)ms", re.MULTILINE)


def latest_record():
    """The folder of the latest record."""
    records = Repository.at().records[TRACK]
    return max(records, key=lambda record: record.runs[0].started).folder


def plain_seconds(setting, corpus, seconds, tokens):
    """The plain GPT's seconds for so many tokens, by its mean step over some seconds."""
    training = plain_gpt.Training(setting, 1, tokens // setting.batch, corpus)
    training.step(0)  # it allocates, and is not counted
    times = []
    while sum(times) < seconds:
        times.append(training.step(1 + len(times)))
    return statistics.mean(times) * tokens / setting.batch


def record_run(folder, number, **changes):
    """(seconds of training, validation loss) of a run of a record's script on two ranks."""
    run_id = f"{NAME}-{number}"
    values = {"track": TRACK, "run_id": run_id, "device": "cpu", "seed": number, **changes}
    options = {"cwd": common.ROOT, "capture_output": True, "text": True}
    words = common.words_of(values)
    done = common.on_ranks(folder / "train_gpt.py", plain_gpt.THREADS, words, **options)
    if done.returncode:
        sys.exit(f"{run_id} failed: {(done.stdout + done.stderr)[-600:]}")
    loss, milliseconds = FINAL_LINE.search(common.log_of(common.ROOT / "logs" / run_id)).groups()
    return int(milliseconds) / 1000, float(loss)


def seconds_to_loss(training, loss):
    """(seconds, loss) of a plain GPT in training once its loss is no higher, or at its end."""
    seconds = 0.0
    for step in range(training.steps):
        seconds += training.step(step)
        is_last = step + 1 == training.steps
        if (step + 1) % math.ceil(training.steps / LOOKS) == 0 or is_last:
            reached = training.loss()
            if reached <= loss:
                break
    return seconds, reached


def both_on(folder, setting, steps, record):
    """The losses and seconds of both on another corpus, as they stand in the results."""
    corpus = plain_gpt.Corpus(common.ROOT / folder)
    config = common.train_gpt.config_from({"track": TRACK, "data": folder})
    corpus.val = corpus.val[: config.val_tokens + 1]
    found = {"corpus": Path(folder).name, "record": record.name, "val_tokens": config.val_tokens}
    found["seconds"], found["loss"] = record_run(record, 1, data=folder)
    training = plain_gpt.Training(setting, 1, steps, corpus)
    found["plain_seconds"], found["plain_loss"] = seconds_to_loss(training, found["loss"])
    return {**found, "looks": LOOKS}


def report_elsewhere(others):
    """A table of other corpora, empty without any."""
    if not others:
        return ""
    rows = [
        [other["corpus"], f"{other['val_tokens']:,}"]
        + [f"{other[name]:.4f}" for name in ("plain_loss", "loss")]
        + [f"{other['plain_seconds']:.0f}", f"{other['seconds']:.1f}"]
        # The first was of all tokens, without a look.
        + [f"{other['plain_seconds'] / other['seconds']:.1f}" if "looks" in other else "-"]
        for other in others
    ]
    header = ["corpus", "validation tokens", "the plain GPT's loss", "the record's loss"]
    header += ["the plain GPT's seconds", "the record's seconds", "factor"]
    return common.markdown_table(header, rows)


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
    return common.markdown_table(header, rows), line


def main(argv=None):
    words = common.parser(__doc__, turns=5, seconds=60.0, elsewhere="")
    arguments = words.parse_args(argv)
    torch.set_num_threads(plain_gpt.THREADS)
    facts = common.environment("cpu")
    record = latest_record()
    rules = json.loads((common.ROOT / "records/rules.json").read_text())
    tokens = rules["boards"][TRACK]["plain"]["tokens"]
    corpus = plain_gpt.Corpus(common.ROOT / common.train_gpt.TRACKS[TRACK].data)
    tuning = json.loads((common.RESULTS / f"{plain_gpt.NAME}.json").read_text())["runs"]
    setting = plain_gpt.run_of(plain_gpt.finals_of(tuning)[0]).setting
    path = Path(arguments.results) / f"{NAME}.json"
    known = {"turns": [], "others": []}
    known |= json.loads(path.read_text()) if path.is_file() else {}
    turns, others = known["turns"], known["others"]

    def keep():
        page, line = report(turns)
        data = {"turns": turns, "others": others}
        parts = page, report_elsewhere(others), f"`{line}`"
        text = "\n\n".join(filter(None, parts))
        common.write_results(arguments.results, NAME, facts, data, text)

    if arguments.elsewhere:
        steps = tokens // setting.batch
        others.append(both_on(arguments.elsewhere, setting, steps, record))
        keep()
        return
    for _ in range(arguments.turns):
        turn = {"record": record.name}
        turn["plain_seconds"] = plain_seconds(setting, corpus, arguments.seconds, tokens)
        turn["seconds"], turn["loss"] = record_run(record, len(turns) + 1)
        turns.append(turn)
        keep()
    print(report(turns)[1])


if __name__ == "__main__":
    main()
