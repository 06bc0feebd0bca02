"""What compressors make of the nano track, and nano's own curve beside theirs.

PPMd and xz read its training text and score its validation tokens; nano trains on it and scores
them every few steps.

    python benchmarks/yardsticks.py               # ten minutes on two cores, 4 GiB of memory
    python benchmarks/yardsticks.py --draw        # the picture alone, from present results
    python benchmarks/yardsticks.py --data FOLDER --results FOLDER      # of another text's shards

How tokens are counted. The end-of-text token is written as the zero byte, which no document
holds, so that every token is one byte. The scored bytes are the track's val_tokens targets, each
once, end-of-text among them: a document is coded up to and with the end-of-text that follows it,
and the first token of all, which the track only reads, is not counted. Losses therefore are in
nats per token of the track.

How a document is scored. A forked copy of the compressor, as it stands after the training text,
compresses the document and ends its output. The document's size is that of the output from the
fork on, less what a copy gives that ends at once; what an end of output costs cancels but for the
rounding to whole bytes. No document helps another, and every copy has read end-of-text before.
Within a document a compressor learns from what it has coded, as a GPT reads it.

A compressor's clock is the processor time of the one thread that reads; scoring is left out, as
the track's clock leaves validation out. On an idle machine it is the time on the wall, and other
work changes it less than that. Nano's clock is the track's, on all cores.

Results: benchmarks/results/yardsticks.{json,md,png}. The picture shows the nano track's records
beside the curves. The last line tells nano's final losses, PPMd's, and from which time on nano's
curves were below PPMd's, where each is compared with the next point of PPMd's that took as long or
longer. Exit status: 0, or 2 for something to correct.
"""

import functools
import itertools
import json
import lzma
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyppmd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common

NAME = "yardsticks"
CPU = torch.device("cpu")
END_OF_TEXT = b"\0"
LOSS_TICKS = (0.65, 0.7, 0.75, 0.8, 0.9, 1.0, 1.1)  # of a logarithmic axis
# Bytes of training text at a curve's points before the last.
AMOUNTS = (600_000, 3_000_000, 6_000_000, 9_000_000, 14_000_000, 25_000_000)
VAL_EVERY = 16  # steps between the points of nano's curve
SEEDS = ("1", "2")  # of nano's runs
# pyppmd 1.3.1 drops output bytes where 32 KiB of one call's output fill up, and it never releases
# what it was given to read. So it gets pieces whose output is far from that, as views of one text.
PIECE = 4096


# ----- compressors


class Stream(NamedTuple):
    """A compressor at work.

    compress(bytes) and flush() each return output; nothing follows a flush."""

    compress: Callable
    flush: Callable


class Setting(NamedTuple):
    """A compressor with its settings."""

    words: str  # what a table calls them
    start: Callable  # returns a new Stream


def ppmd(variant, order, mebibytes):
    """The Setting of PPMd. Variant H is that of 7-Zip, I that of ZIP.

    A model that outgrows its memory starts again from nothing."""
    encoders = {"H": pyppmd.Ppmd7Encoder, "I": pyppmd.Ppmd8Encoder}

    def start():
        encoder = encoders[variant](order, mebibytes << 20)
        return Stream(encoder.encode, functools.partial(encoder.flush, endmark=False))

    return Setting(f"variant {variant}, order {order}, {mebibytes:,} MiB", start)


def xz(span):
    """The Setting of xz's LZMA at its highest preset.

    It has no container, whose blocks and checksums are no part of a loss."""
    lzma_filter = {
        "id": lzma.FILTER_LZMA1,
        "preset": 9 | lzma.PRESET_EXTREME,
        "dict_size": 1 << span.bit_length(),
    }

    def start():
        encoder = lzma.LZMACompressor(lzma.FORMAT_RAW, filters=[lzma_filter])
        return Stream(encoder.compress, encoder.flush)

    return Setting("preset 9 extreme", start)


def arms_for(span):
    """{arm: its Setting}, each the best of some that were tried on held-out training text.

    span: bytes that a window has to reach back, training text and document. 64 is the highest order
    of variant H, and 4,095 MiB the most memory that pyppmd takes."""
    return {"PPMd": ppmd("H", 64, 4095), "PPMd of order 16": ppmd("H", 16, 4095), "xz": xz(span)}


# ----- text


def text_of(tokens, eot_token):
    """The bytes of byte tokens, with end-of-text as the zero byte.

    Raises ConfigError where a document holds that byte."""
    if not np.all(tokens):
        raise train_gpt.ConfigError(
            "a document holds the zero byte, which stands for end-of-text here; build the corpus "
            "with data/text.py, which leaves such files out"
        )
    return np.where(tokens == eot_token, 0, tokens).astype(np.uint8).tobytes()


def documents_of(text):
    """The scored bytes of a text, cut after each end-of-text; none of the documents is empty.

    The first byte of the text is only read."""
    *ended, last = text[1:].split(END_OF_TEXT)
    documents = [document + END_OF_TEXT for document in ended]
    if last:
        documents.append(last)
    return documents


# ----- measuring


def read(stream, text):
    """Compress a text, in pieces. Returns the bytes of output so far."""
    view = memoryview(text)
    size = 0
    for low in range(0, len(view), PIECE):
        size += len(stream.compress(view[low : low + PIECE]))
    return size


def in_a_fork(function):
    """The number that function() returns in a forked copy of this process.

    Nothing else is left of the copy. It only compresses: it is one thread, whatever libraries have
    started threads here."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(sink, b"%d" % function())
        finally:
            os._exit(0)
    os.close(sink)
    with open(source, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    if not answer:
        reason = "the copy of a compressor died while it scored a document; is there memory enough?"
        raise ChildProcessError(reason)
    return int(answer)


def size_to_the_end(stream, document):
    """Compress end-of-text and a document, and end the output. Returns the bytes of it."""
    size = read(stream, END_OF_TEXT)
    size += read(stream, document)
    return size + len(stream.flush())


def document_sizes(stream, documents):
    """Bytes that each document adds to what the stream has compressed.

    The stream is afterwards as it was before."""
    nothing = in_a_fork(functools.partial(size_to_the_end, stream, b""))
    sizes = []
    for document in documents:
        size = in_a_fork(functools.partial(size_to_the_end, stream, document))
        sizes.append(size - nothing)
    return sizes


def nats_per_token(sizes, documents):
    """The mean loss over all bytes of the documents, which are compressed to so many bytes each."""
    return sum(sizes) * 8 * math.log(2) / sum(map(len, documents))


def measure(setting, text, documents):
    """Read the text, and score the documents at each of AMOUNTS and at its end.

    Returns a dict a point: tokens read, seconds of processor time of reading, loss."""
    stream = setting.start()
    view = memoryview(text)
    ends = sorted({amount for amount in AMOUNTS if amount < len(text)} | {len(text)})
    points = []
    spent = 0.0
    for low, high in itertools.pairwise((0, *ends)):
        before = time.thread_time()
        read(stream, view[low:high])
        spent += time.thread_time() - before
        loss = nats_per_token(document_sizes(stream, documents), documents)
        points.append({"tokens": high, "seconds": spent, "loss": loss})
    return points


# ----- nano


def nano_curve(folder, seed, options):
    """Train nano in a folder, by train_gpt.py's own command line. Returns a dict a point: steps,
    seconds of training, loss."""
    run_id = f"nano-{seed}"
    words = ["--track", "nano", "--seed", str(seed), "--val-every", str(VAL_EVERY), *options]
    common.train(folder, run_id, words)
    lines = (Path(folder) / "logs" / run_id / "metrics.jsonl").read_text().splitlines()
    return [
        {
            "steps": event["step"],
            "seconds": event["train_time"] / 1000,
            "loss": event["val_loss"],
        }
        for event in map(json.loads, lines)
        if "val_loss" in event
    ]


def below_from(curve, bound):
    """The time of a curve's first point from which on all of its points are below `bound`, another
    curve: below the first of its points that took as long or longer, or else below its last. None
    if the curve's last point is not."""
    since = None
    for point in curve:
        slower = [other for other in bound if other["seconds"] >= point["seconds"]]
        if point["loss"] >= (slower or bound[-1:])[0]["loss"]:
            since = None
        elif since is None:
            since = point["seconds"]
    return since


# ----- figures


def record_ends():
    """[(mean training seconds, mean final loss), ...] of the nano track's records, by time."""
    ends = []
    for folder in common.record_folders("nano"):
        runs = common.runs_of_record(folder)
        seconds = statistics.mean(run["seconds"] for run in runs)
        ends.append((seconds, statistics.mean(run["loss"] for run in runs)))
    return sorted(ends)


def draw(results):
    """Draw the picture of what a folder of results holds, and of the records."""
    data = json.loads((results / f"{NAME}.json").read_text())
    curves = {result["arm"]: result["points"] for result in data["results"]}
    curves["nano"] = data["nano"]["1"]
    with common.picture(results / f"{NAME}.png", figsize=(7, 4)) as axes:
        for arm, points in curves.items():
            seconds = [point["seconds"] for point in points]
            losses = [point["loss"] for point in points]
            (line,) = axes.plot(seconds, losses, marker=".", linewidth=1.5)
            label_last(axes, arm, seconds[-1], losses[-1], line.get_color())
        seconds, losses = zip(*record_ends(), strict=True)
        dots = axes.scatter(seconds, losses, color="black", zorder=3)
        dots.set_label("nano's records")
        axes.legend(loc="upper right")
        axes.set(xscale="log", yscale="log")
        axes.set(xlabel="training time, s", ylabel="validation loss, nats per byte")
        axes.set_yticks(LOSS_TICKS, map(str, LOSS_TICKS))
        axes.set_yticks([], minor=True)
        axes.grid(alpha=0.3, which="both")


def label_last(axes, label, x, y, color):
    """Write a curve's name above its last point."""
    offset = {"xytext": (4, 10), "textcoords": "offset points", "ha": "center"}
    axes.annotate(label, (x, y), color=color, **offset)


def table_of(results):
    """The table of losses and times, with a row for each compressor and amount of text."""
    rows = []
    for result in results:
        for point in result["points"]:
            figures = [f"{point['tokens']:,}", f"{point['seconds']:.1f}", f"{point['loss']:.4f}"]
            rows.append([f"{result['arm']}, {result['setting']}", *figures])
    header = ["compressor", "bytes read", "time to read, s", "validation loss"]
    return common.markdown_table(header, rows)


def nano_table(curves):
    """The table of nano's curves, {seed: points}, with a row for each point."""
    rows = []
    for points in zip(*curves.values(), strict=True):
        row = [str(points[0]["steps"])]
        for point in points:
            row += [f"{point['seconds']:.1f}", f"{point['loss']:.4f}"]
        rows.append(row)
    header = ["nano, steps"]
    for seed in curves:
        header += [f"seed {seed}: time, s", "validation loss"]
    return common.markdown_table(header, rows)


def verdict(results, curves):
    """A line that compares nano's curves with the compressors'."""
    words = []
    for seed, points in curves.items():
        words.append(f"nano_{seed}:{points[-1]['loss']:.4f}/{points[-1]['seconds']:.1f}s")
    for result in results:
        name = result["arm"].replace(" ", "_")
        end = result["points"][-1]
        words.append(f"{name}:{end['loss']:.4f}/{end['seconds']:.1f}s")
        times = [below_from(points, result["points"]) for points in curves.values()]
        since = ",".join("never" if time is None else f"{time:.1f}s" for time in times)
        words.append(f"nano_below_it_from:{since}")
    return " ".join(words)


def report(settings, results, curves):
    """The Markdown text of the results."""
    versions = ", ".join(f"{name} {version}" for name, version in settings["versions"].items())
    return f"""{table_of(results)}

{nano_table(curves)}

`{verdict(results, curves)}`

Losses are over {settings["val_tokens"]:,} validation tokens in {settings["documents"]} documents,
each scored by a copy of the compressor that has seen no other. Sizes are whole bytes: the rounding
moves a loss by at most {settings["rounding"]:.4f}. Times are processor time of one thread, of one
reading, and for nano the track's clock, on all cores. {versions}."""


# ----- command line


def benchmark(arguments, config, changes, folder):
    """Measure, with runs of nano in a folder, and write the results."""
    # What open_corpus says of training text depends on how much of it a run reads.
    *_, val = train_gpt.open_corpus(config)
    paths = sorted(Path(config.data).glob("*_train_*.bin"))
    tokens = np.concatenate([train_gpt.open_shard(path) for path in paths])
    text = text_of(tokens, config.eot_token)
    documents = documents_of(text_of(val[: config.val_tokens + 1], config.eot_token))
    facts = common.environment(CPU)
    results = []
    for arm, setting in arms_for(len(text) + config.val_tokens).items():
        points = measure(setting, text, documents)
        results.append({"arm": arm, "setting": setting.words, "points": points})
        print(f"{arm}: {points[-1]['loss']:.5f} after {points[-1]['seconds']:.1f} s", flush=True)
    options = common.words_of(changes)
    curves = {seed: nano_curve(folder, seed, options) for seed in SEEDS}
    settings = {
        "train_tokens": len(text),
        "val_tokens": config.val_tokens,
        "documents": len(documents),
        "rounding": nats_per_token([1] * len(documents), documents),
        "versions": {"pyppmd": pyppmd.__version__, "Python": platform.python_version()},
    }
    data = {"settings": settings, "results": results, "nano": curves}
    text = report(settings, results, curves)
    common.write_results(arguments.results, NAME, facts, data, text)


def tiny_changes(folder):
    """Write a small corpus into the folder. Returns the configuration's values that it needs."""
    corpus = Path(folder, "corpus")
    documents = common.python_documents(400_000)
    eot_token = train_gpt.EOT_TOKEN["bytes"]
    common.write_corpus(corpus, documents, eot_token, common.TINY["val_tokens"])
    return {**common.TINY, "data": str(corpus)}


def main(argv=None):
    """Command line. Returns the exit status."""
    data = common.ROOT / train_gpt.TRACKS["nano"].data
    parser = common.parser(__doc__, tiny=False, draw=False, data=str(data))
    arguments = parser.parse_args(argv)
    if not arguments.draw:
        with tempfile.TemporaryDirectory() as temporary:
            changes = {"data": str(Path(arguments.data).resolve())}
            if arguments.tiny:
                changes = tiny_changes(temporary)
            try:
                config = train_gpt.with_values(train_gpt.TRACKS["nano"], changes)
                benchmark(arguments, config, changes, temporary)
            except train_gpt.ConfigError as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
        print((arguments.results / f"{NAME}.md").read_text())
    draw(arguments.results)
    data = json.loads((arguments.results / f"{NAME}.json").read_text())
    print(verdict(data["results"], data["nano"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
