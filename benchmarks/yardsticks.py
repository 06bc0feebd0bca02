"""What compressors make of the nano track.

PPMd, xz and zstd read its training text and score its validation tokens.

    python benchmarks/yardsticks.py [--repeats 3]    # half an hour on one core, up to 4 GiB
    python benchmarks/yardsticks.py --draw           # the picture alone, from present results

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

The clock is that of a reading without any copies; like the track's it leaves validation out. It
counts the processor time of the one thread, which on an idle machine is that on the wall, and
which other work hardly changes; the wall's is kept, too. Settings are chosen on the last documents
of the training text, which they do not read then, and not on validation.

Results: benchmarks/results/yardsticks.{json,md,png}. The picture shows beside the compressors the
arms of nano_vs_baseline.json and the nano track's records.
Exit status: 0, or 2 for something to correct.
"""

import functools
import itertools
import json
import lzma
import math
import os
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
import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common, nano_vs_baseline
from records.record import Repository

NAME = "yardsticks"
CPU = torch.device("cpu")
END_OF_TEXT = b"\0"
# of a logarithmic axis
LOSS_TICKS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
# Bytes of training text at the first point of a curve; the amounts double from there.
FIRST_AMOUNT = 500_000
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


def zstd(level, span):
    """The Setting of zstd with matches at any distance in the text.

    Beyond the reach of the level's own tables they are long ones."""
    window_log = max(span.bit_length(), zstandard.WINDOWLOG_MIN)

    def start():
        parameters = zstandard.ZstdCompressionParameters.from_level(
            level, source_size=span, window_log=window_log, enable_ldm=True
        )
        encoder = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        return Stream(encoder.compress, encoder.flush)

    return Setting(f"level {level}, long matches", start)


def candidates(span):
    """{arm: settings to choose from}.

    span: bytes that a window has to reach back, training text and document. 16 is the highest
    order of variant I, 64 that of variant H, and 4,095 MiB the most memory that pyppmd takes."""
    small = [ppmd("H", order, 1024) for order in (8, 12, 16, 24)]
    small += [ppmd("I", order, 1024) for order in (8, 12, 16)]
    large = [ppmd("H", order, 4095) for order in (24, 32, 48, 64)]
    return {
        "PPMd": small + large,
        "PPMd in 1 GiB": small,
        "xz": [xz(span)],
        "zstd": [zstd(19, span), zstd(22, span)],
    }


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


def hold_out(text, least):
    """Cut training text in two: what comes before, and the last documents.

    Those together have at least so many bytes."""
    cut = text.rindex(END_OF_TEXT, 0, len(text) - least)
    return text[:cut], text[cut:]


def amounts_of(total, read_by_track):
    """Bytes of training text at the points of a curve, in order.

    They double, and there are as many as the track reads, and all."""
    amounts = {min(read_by_track, total), total}
    amount = FIRST_AMOUNT
    while amount < total:
        amounts.add(amount)
        amount *= 2
    return sorted(amounts)


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


def measure(setting, text, amounts, documents=()):
    """Read the text up to the last of the amounts, and score the documents at each of them.

    Returns a dict an amount: tokens read, seconds of reading on the processor and on the wall.
    Where there are documents it holds their loss, too, and the seconds that it took. Those are on
    the wall, for the copies are processes of their own."""
    stream = setting.start()
    view = memoryview(text)
    points = []
    spent = 0.0
    wall = 0.0
    for low, high in itertools.pairwise((0, *amounts)):
        before = time.thread_time()
        seconds, _ = common.timed(functools.partial(read, stream, view[low:high]), CPU)
        wall += seconds
        spent += time.thread_time() - before
        point = {"tokens": high, "seconds": spent, "wall_seconds": wall}
        if documents:
            score = functools.partial(document_sizes, stream, documents)
            seconds, sizes = common.timed(score, CPU)
            point["loss"] = nats_per_token(sizes, documents)
            point["score_seconds"] = seconds
        points.append(point)
    return points


def choose(arms, text, least):
    """Try every setting once on documents held out of the training text.

    least: bytes that those have at least. Returns ({arm: the setting of the lowest loss}, one dict
    a setting)."""
    train, held_out = hold_out(text, least)
    documents = documents_of(held_out)
    tried = {}
    chosen = {}
    for arm, settings in arms.items():
        for setting in settings:
            if setting.words in tried:
                continue
            (point,) = measure(setting, train, [len(train)], documents)
            tried[setting.words] = {"compressor": arm, "setting": setting.words, **point}
            choice = f"compressor:{arm} setting:{setting.words} loss:{point['loss']:.4f}"
            print(f"choice {choice}", flush=True)
        losses = [tried[setting.words]["loss"] for setting in settings]
        chosen[arm] = settings[losses.index(min(losses))]
    return chosen, list(tried.values())


def curves_of_arms(chosen, text, amounts, documents, repeats):
    """One dict an arm, with its points.

    Readings take turns, so that a busy machine slows all alike."""
    readings = {arm: [] for arm in chosen}
    for _ in range(repeats):
        for arm, setting in chosen.items():
            readings[arm].append(measure(setting, text, amounts))
    results = []
    for arm, setting in chosen.items():
        points = measure(setting, text, amounts, documents)
        for index, point in enumerate(points):
            for clock in ("seconds", "wall_seconds"):
                times = [reading[index][clock] for reading in readings[arm]]
                point[f"all_{clock}"] = times
                point[clock] = statistics.median(times)
        results.append({"arm": arm, "setting": setting.words, "points": points})
        end = points[-1]
        figures = f"train_time:{1000 * end['seconds']:.0f}ms val_loss:{end['loss']:.5f}"
        print(f"arm:{arm} setting:{setting.words} {figures}", flush=True)
    return results


# ----- figures


def mean_curve(curves):
    """The mean of curves [(seconds, loss), ...], point by point, without the point at time 0.

    It is as long as the shortest of the curves."""
    means = []
    for points in zip(*curves, strict=False):
        seconds = statistics.mean(point[0] for point in points)
        loss = statistics.mean(point[1] for point in points)
        if seconds > 0:
            means.append((seconds, loss))
    return means


def arm_curves(path):
    """{arm: [(training seconds, loss), ...]} of yardsticks.json or nano_vs_baseline.json.

    arm_curves(common.RESULTS / "yardsticks.json")["PPMd"] is PPMd's curve. Points are means over
    an arm's seeds, losses in nats per token."""
    curves = {}
    for result in json.loads(Path(path).read_text())["results"]:
        curve = [(point["seconds"], point["loss"]) for point in result["points"]]
        curves.setdefault(result["arm"], []).append(curve)
    return {arm: mean_curve(of_arm) for arm, of_arm in curves.items()}


def record_curves(track="nano", kind="val"):
    """{record: [(training seconds, loss), ...]} of a track's records, means over a record's runs.

    A record that was validated at its end only is a single point; its training losses are those of
    kind "train"."""
    curves = {}
    for record in Repository.at().records[track]:
        of_runs = []
        for run in record.runs:
            of_runs.append([(point.time_ms / 1000, point.loss) for point in run.curves[kind]])
        name = record.name[len("YYYY-MM-DD_") :]
        curves[name] = mean_curve(of_runs)
    return curves


def plot(path, curves, dashed=()):
    """Draw {label: [(training seconds, loss), ...]}.

    The labels in `dashed` have dashed lines in greys; records are points without a line."""
    greys = {label: str(0.7 * index / len(dashed)) for index, label in enumerate(dashed)}
    with common.picture(path, figsize=(9, 5)) as axes:
        for label, points in curves.items():
            style = "-"
            if label in greys:
                style = "--"
            elif label.endswith("records"):
                style = ""
            seconds = [point[0] for point in points]
            losses = [point[1] for point in points]
            color = greys.get(label)
            look = {"marker": ".", "linewidth": 1, "linestyle": style, "color": color}
            axes.plot(seconds, losses, label=label, **look)
        axes.set(xscale="log", yscale="log")
        axes.set(xlabel="training time, s", ylabel="validation loss, nats per byte")
        axes.set(title="Compressors and language models on the nano track")
        axes.set_yticks(LOSS_TICKS, map(str, LOSS_TICKS))
        axes.set_yticks([], minor=True)
        axes.grid(alpha=0.3, which="both")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def draw(results):
    """Draw the picture of what a folder of results holds, and of the records."""
    compressors = arm_curves(results / f"{NAME}.json")
    others = results / f"{nano_vs_baseline.NAME}.json"
    curves = dict(compressors)
    if others.is_file():
        curves |= arm_curves(others)
    curves["the track's records"] = sorted(curve[-1] for curve in record_curves().values())
    plot(results / f"{NAME}.png", curves, compressors)


def ends_table(results):
    """The table of what each compressor gave after all of the training text."""
    header = [
        "compressor",
        "setting",
        "time to read, s",
        "on the wall, s",
        "to score, s",
        "validation loss, nats per token",
        "bits per token",
    ]
    rows = []
    for result in results:
        end = result["points"][-1]
        fastest = min(end["all_seconds"])
        slowest = max(end["all_seconds"])
        row = [
            result["arm"],
            result["setting"],
            f"{end['seconds']:.1f} ({fastest:.1f} to {slowest:.1f})",
            f"{end['wall_seconds']:.1f}",
            f"{end['score_seconds']:.1f}",
            f"{end['loss']:.4f}",
            f"{end['loss'] / math.log(2):.3f}",
        ]
        rows.append(row)
    return common.markdown_table(header, rows)


def curves_table(results):
    """The table of losses and times, with a row for each amount of text and a column an arm."""
    header = ["tokens read", *(f"{result['arm']}: loss (s)" for result in results)]
    rows = []
    for points in zip(*(result["points"] for result in results), strict=True):
        cells = [f"{point['loss']:.4f} ({point['seconds']:.2f})" for point in points]
        rows.append([f"{points[0]['tokens']:,}", *cells])
    return common.markdown_table(header, rows)


def trials_table(choice):
    """The table of all settings that were tried."""
    rows = []
    for trial in choice:
        figures = [f"{trial['seconds']:.1f}", f"{trial['loss']:.4f}"]
        rows.append([trial["compressor"], trial["setting"], *figures])
    header = ["compressor", "setting", "time to read, s", "loss on held-out text"]
    return common.markdown_table(header, rows)


def report(settings, choice, results):
    """The Markdown text of the results."""
    versions = ", ".join(f"{name} {version}" for name, version in settings["versions"].items())
    held_out = f"{settings['held_out_tokens']:,}"
    validation = (
        f"{settings['val_tokens']:,} validation tokens in {settings['documents']} documents"
    )
    return f"""After all {settings["train_tokens"]:,} tokens of training text:

{ends_table(results)}

After the first of them, the loss and the seconds of reading so far:

{curves_table(results)}

Settings were chosen on {held_out} tokens at the end of the training text, after reading what comes
before them:

{trials_table(choice)}

Losses are over {validation}, each scored by a copy
of the compressor that has seen no other. Sizes are whole bytes: the rounding moves a loss by at
most {settings["rounding"]:.4f}. Times to read are processor time of one thread, medians of
{settings["repeats"]}, with the smallest and the largest. Beside them stand the medians of a clock
on the wall, which other work on the machine prolongs, as it does the time to score; that includes
the copies. {versions}."""


# ----- command line


def benchmark(arguments, config):
    """Choose, measure, and write the results."""
    # What open_corpus says of training text depends on how much of it a run reads.
    *_, val = train_gpt.open_corpus(config)
    paths = sorted(Path(config.data).glob("*_train_*.bin"))
    tokens = np.concatenate([train_gpt.open_shard(path) for path in paths])
    text = text_of(tokens, config.eot_token)
    documents = documents_of(text_of(val[: config.val_tokens + 1], config.eot_token))
    facts = common.environment(CPU)
    arms = candidates(len(text) + config.val_tokens)
    chosen, choice = choose(arms, text, config.val_tokens)
    amounts = amounts_of(len(text), train_gpt.training_tokens(config))
    results = curves_of_arms(chosen, text, amounts, documents, arguments.repeats)
    _, held_out = hold_out(text, config.val_tokens)
    settings = {
        "data": Path(config.data).name,
        "tiny": arguments.tiny,
        "repeats": arguments.repeats,
        "train_tokens": len(text),
        "val_tokens": config.val_tokens,
        "documents": len(documents),
        "held_out_tokens": len(held_out) - 1,
        "rounding": nats_per_token([1] * len(documents), documents),
        "versions": {
            "pyppmd": pyppmd.__version__,
            "zstandard": zstandard.__version__,
            "zstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
        },
    }
    data = {"settings": settings, "choice": choice, "results": results}
    page = report(settings, choice, results)
    common.write_results(arguments.results, NAME, facts, data, page)


def tiny_changes(folder):
    """Write a small corpus into the folder. Returns the configuration's values that it needs."""
    corpus = Path(folder, "corpus")
    documents = common.python_documents(400_000)
    eot_token = train_gpt.EOT_TOKEN["bytes"]
    common.write_corpus(corpus, documents, eot_token, common.TINY["val_tokens"])
    return {**common.TINY, "data": str(corpus)}


def parse_arguments(argv):
    """Read the command line, whose mistakes end the process."""
    data = common.ROOT / train_gpt.TRACKS["nano"].data
    parser = common.parser(__doc__, tiny=False, data=str(data))
    repeats_help = "of a reading, of which the median counts [3]"
    parser.add_argument("--repeats", type=int, default=3, help=repeats_help)
    draw_help = "draw the picture from results that are there"
    parser.add_argument("--draw", action="store_true", help=draw_help)
    arguments = parser.parse_args(argv)
    if arguments.repeats < 1:
        parser.error(f"--repeats {arguments.repeats}: must be positive")
    return arguments


def main(argv=None):
    """Command line. Returns the exit status."""
    arguments = parse_arguments(argv)
    if not arguments.draw:
        with tempfile.TemporaryDirectory() as temporary:
            changes = {"data": arguments.data}
            if arguments.tiny:
                changes = tiny_changes(temporary)
            try:
                benchmark(arguments, train_gpt.with_values(train_gpt.TRACKS["nano"], changes))
            except train_gpt.ConfigError as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
        print((arguments.results / f"{NAME}.md").read_text())
    draw(arguments.results)
    seconds, loss = arm_curves(arguments.results / f"{NAME}.json")["PPMd"][-1]
    print(f"ppmd_loss:{loss:.4f} ppmd_seconds:{seconds:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
