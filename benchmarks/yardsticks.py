"""What compressors make of the nano track: PPMd, xz and zstd read its training text and score its validation tokens.

    python benchmarks/yardsticks.py [--repeats 3]    # half an hour on one core, up to 4 GiB of memory
    python benchmarks/yardsticks.py --draw           # the picture alone, from the results that are there

How tokens are counted. The end-of-text token is written as the zero byte, which no document holds, so that every token
is one byte. The scored bytes are the track's val_tokens targets, each once, end-of-text among them: a document is coded
up to and with the end-of-text that follows it, and the first token of all, which the track only reads, is not counted.
Losses therefore are in nats per token of the track.

How a document is scored. A forked copy of the compressor, as it stands after the training text, compresses the document
and ends its output. The document's size is that of the output from the fork on, less what a copy gives that ends at
once; what an end of output costs cancels but for the rounding to whole bytes. No document helps another, and every
copy has read end-of-text before. Within a document a compressor learns from what it has coded, as a GPT reads it.

The clock is that of a reading without any copies; like the track's it leaves validation out. It counts the processor
time of the one thread, which on an idle machine is that on the wall, and which other work hardly changes; the wall's is
kept, too. Settings are chosen on the last documents of the training text, which they do not read then, and not on
validation.

Results: benchmarks/results/yardsticks.{json,md,png}. The picture shows beside the compressors the arms of
nano_vs_baseline.json and the nano track's records. Exit status: 0, or 2 for something to correct.
"""
import dataclasses
import itertools
import json
import lzma
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import pyppmd
import torch
import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt  # noqa: E402
from benchmarks import common, nano_vs_baseline  # noqa: E402
from records.record import Repository  # noqa: E402

NAME = "yardsticks"
CPU = torch.device("cpu")
END_OF_TEXT = b"\0"
LOSS_TICKS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)  # of a logarithmic axis
FIRST_AMOUNT = 500_000  # bytes of training text at the first point of a curve; the amounts double from there
# pyppmd 1.3.1 drops output bytes where 32 KiB of one call's output fill up, and it never releases what it was given to
# read. So it gets pieces whose output is far from that, as views of one text.
PIECE = 4096


# ----- compressors

class Stream(NamedTuple):
    """A compressor at work: compress(bytes) and flush() each return output; nothing follows a flush."""
    compress: Callable
    flush: Callable


class Setting(NamedTuple):
    """A compressor with its settings: what a table calls them, and start(), which returns a new Stream."""
    words: str
    start: Callable


def ppmd(variant, order, mebibytes):
    """Variant H is that of 7-Zip, I that of ZIP. A model that outgrows its memory starts again from nothing."""
    def start():
        kind = pyppmd.Ppmd7Encoder if variant == "H" else pyppmd.Ppmd8Encoder
        encoder = kind(order, mebibytes << 20)
        return Stream(encoder.encode, lambda: encoder.flush(endmark=False))
    return Setting(f"variant {variant}, order {order}, {mebibytes:,} MiB", start)


def xz(span):
    """xz's LZMA at its highest preset, without the container, whose blocks and checksums are no part of a loss."""
    def start():
        encoder = lzma.LZMACompressor(lzma.FORMAT_RAW, filters=[
            {"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << span.bit_length()}])
        return Stream(encoder.compress, encoder.flush)
    return Setting("preset 9 extreme", start)


def zstd(level, span):
    """zstd with matches at any distance in the text; beyond the reach of the level's own tables they are long ones."""
    def start():
        parameters = zstandard.ZstdCompressionParameters.from_level(
            level, source_size=span, window_log=max(span.bit_length(), zstandard.WINDOWLOG_MIN), enable_ldm=True)
        encoder = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        return Stream(encoder.compress, encoder.flush)
    return Setting(f"level {level}, long matches", start)


def candidates(span):
    """{arm: settings to choose from}; span: bytes that a window has to reach back, training text and document.

    16 is the highest order of variant I, 64 that of variant H, and 4,095 MiB the most memory that pyppmd takes."""
    small = [*(ppmd("H", order, 1024) for order in (8, 12, 16, 24)), *(ppmd("I", order, 1024) for order in (8, 12, 16))]
    large = [ppmd("H", order, 4095) for order in (24, 32, 48, 64)]
    return {"PPMd": small + large, "PPMd in 1 GiB": small, "xz": [xz(span)], "zstd": [zstd(19, span), zstd(22, span)]}


# ----- text

def text_of(tokens, eot_token):
    """The bytes of byte tokens, with end-of-text as the zero byte; ConfigError where a document holds that byte."""
    train_gpt.refuse(not np.all(tokens), "a document holds the zero byte, which stands for end-of-text here; build the "
                     "corpus with data/text.py, which leaves such files out")
    return np.where(tokens == eot_token, 0, tokens).astype(np.uint8).tobytes()


def documents_of(text):
    """The scored bytes of a text whose first byte is only read, cut after each end-of-text: none of them is empty."""
    parts = text[1:].split(END_OF_TEXT)
    return [part for part in [*(part + END_OF_TEXT for part in parts[:-1]), parts[-1]] if part]


def hold_out(text, least):
    """(what comes before, the last documents with at least so many bytes) of training text."""
    cut = text.rindex(END_OF_TEXT, 0, len(text) - least)
    return text[:cut], text[cut:]


def amounts_of(total, read_by_track):
    """Bytes of training text at the points of a curve: doubling, and as many as the track reads, and all."""
    doubling = itertools.takewhile(lambda amount: amount < total, (FIRST_AMOUNT << i for i in itertools.count()))
    return sorted({*doubling, min(read_by_track, total), total})


# ----- measuring

def read(stream, text):
    """Compress a text, in pieces. Returns the bytes of output so far."""
    view = memoryview(text)
    return sum(len(stream.compress(view[low:low + PIECE])) for low in range(0, len(view), PIECE))


def in_a_fork(function):
    """The number that function() returns in a forked copy of this process, of which nothing else is left.

    The copy only compresses: it is one thread, whatever libraries have started threads here."""
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
        raise ChildProcessError("the copy of a compressor died while it scored a document; is there memory enough?")
    return int(answer)


def document_sizes(stream, documents):
    """Bytes that each document adds to what the stream has compressed. The stream is as it was before."""
    def ended(document):
        return in_a_fork(lambda: read(stream, END_OF_TEXT) + read(stream, document) + len(stream.flush()))
    nothing = ended(b"")
    return [ended(document) - nothing for document in documents]


def nats_per_token(sizes, documents):
    """The mean loss in nats over all bytes of the documents, which are compressed to so many bytes each."""
    return sum(sizes) * 8 * math.log(2) / sum(map(len, documents))


def measure(setting, text, amounts, documents=()):
    """Read the text up to the last of the amounts, and score the documents, if there are any, at each of them.

    Returns a dict an amount: tokens read, seconds of reading on the processor and on the wall, and, where documents are
    scored, the loss with the seconds that it took, on the wall, for the copies are processes of their own."""
    stream, points, spent, wall = setting.start(), [], 0.0, 0.0
    for low, high in itertools.pairwise((0, *amounts)):
        before = time.thread_time()
        wall += common.timed(lambda: read(stream, memoryview(text)[low:high]), CPU)[0]
        spent += time.thread_time() - before
        points.append({"tokens": high, "seconds": spent, "wall_seconds": wall})
        if documents:
            seconds, sizes = common.timed(lambda: document_sizes(stream, documents), CPU)
            points[-1] |= {"loss": nats_per_token(sizes, documents), "score_seconds": seconds}
    return points


def choose(arms, text, least):
    """Try every setting once on documents held out of the training text, at least so many bytes of them.

    Returns ({arm: the setting of the lowest loss}, one dict a setting)."""
    train, held_out = hold_out(text, least)
    tried, chosen = {}, {}
    for arm, settings in arms.items():
        for setting in settings:
            if setting.words not in tried:
                point, = measure(setting, train, [len(train)], documents_of(held_out))
                tried[setting.words] = {"compressor": arm, "setting": setting.words, **point}
                print(f"choice compressor:{arm} setting:{setting.words} loss:{point['loss']:.4f}", flush=True)
        chosen[arm] = min(settings, key=lambda setting: tried[setting.words]["loss"])
    return chosen, list(tried.values())


def curves_of_arms(chosen, text, amounts, documents, repeats):
    """One dict an arm, with its points. Readings take turns, so that a busy machine slows all alike."""
    rounds = [{arm: measure(setting, text, amounts) for arm, setting in chosen.items()} for _ in range(repeats)]
    results = []
    for arm, setting in chosen.items():
        points = measure(setting, text, amounts, documents)
        for point, *timed in zip(points, *(of_round[arm] for of_round in rounds), strict=True):
            for clock in ("seconds", "wall_seconds"):
                point[f"all_{clock}"] = [other[clock] for other in timed]
                point[clock] = statistics.median(point[f"all_{clock}"])
        results.append({"arm": arm, "setting": setting.words, "points": points})
        print(f"arm:{arm} setting:{setting.words} train_time:{1000 * points[-1]['seconds']:.0f}ms "
              f"val_loss:{points[-1]['loss']:.5f}", flush=True)
    return results


# ----- figures

def mean_curve(curves):
    """[(seconds, loss), ...], each the mean of the points at the same place in all curves, without those at time 0."""
    means = [tuple(map(statistics.mean, zip(*points))) for points in zip(*curves)]
    return [(seconds, loss) for seconds, loss in means if seconds > 0]


def arm_curves(path):
    """{arm: [(training seconds, loss), ...]} of yardsticks.json or nano_vs_baseline.json, means over an arm's seeds:
    arm_curves(common.RESULTS / "yardsticks.json")["PPMd"] is PPMd's curve. Losses in nats per token."""
    results = json.loads(Path(path).read_text())["results"]
    return {arm: mean_curve([[(point["seconds"], point["loss"]) for point in result["points"]]
                             for result in results if result["arm"] == arm])
            for arm in dict.fromkeys(result["arm"] for result in results)}


def record_curves(track="nano", kind="val"):
    """{record: [(training seconds, loss), ...]} of a track's records, means over a record's runs. A record that was
    validated at its end only is a single point; its training losses are those of kind "train"."""
    return {record.name[11:]: mean_curve([[(point.time_ms / 1000, point.loss) for point in run.curves[kind]]
                                          for run in record.runs])
            for record in Repository.at().records[track]}


def plot(path, curves, dashed=()):
    """Draw {label: [(training seconds, loss), ...]}; the labels in `dashed` have dashed lines in greys, records none."""
    greys = {label: str(0.7 * index / len(dashed)) for index, label in enumerate(dashed)}
    with common.picture(path, figsize=(9, 5)) as axes:
        for label, points in curves.items():
            style = "--" if label in greys else "" if label.endswith("records") else "-"
            axes.plot(*zip(*points), marker=".", linewidth=1, linestyle=style, color=greys.get(label), label=label)
        axes.set(xscale="log", yscale="log", xlabel="training time, s", ylabel="validation loss, nats per byte",
                 title="Compressors and language models on the nano track")
        axes.set_yticks(LOSS_TICKS, map(str, LOSS_TICKS))
        axes.set_yticks([], minor=True)
        axes.grid(alpha=0.3, which="both")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def draw(results):
    """The picture of what a folder of results holds, and of the records."""
    compressors, others = arm_curves(results / f"{NAME}.json"), results / f"{nano_vs_baseline.NAME}.json"
    models = arm_curves(others) if others.is_file() else {}
    ends = sorted(curve[-1] for curve in record_curves().values())
    plot(results / f"{NAME}.png", {**compressors, **models, "the track's records": ends}, compressors)


def report(settings, choice, results):
    """The Markdown text of the results."""
    rows = []
    for result in results:
        end = result["points"][-1]
        seconds = end["all_seconds"]
        times = f"{end['seconds']:.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
        rows.append([result["arm"], result["setting"], times, f"{end['wall_seconds']:.1f}",
                     f"{end['score_seconds']:.1f}", f"{end['loss']:.4f}", f"{end['loss'] / math.log(2):.3f}"])
    ends = common.markdown_table(["compressor", "setting", "time to read, s", "on the wall, s",
                                  "to score, s", "validation loss, nats per token", "bits per token"], rows)
    rows = [[f"{points[0]['tokens']:,}", *(f"{point['loss']:.4f} ({point['seconds']:.2f})" for point in points)]
            for points in zip(*(result["points"] for result in results))]
    curves = common.markdown_table(["tokens read", *(f"{result['arm']}: loss (s)" for result in results)], rows)
    rows = [[trial["compressor"], trial["setting"], f"{trial['seconds']:.1f}", f"{trial['loss']:.4f}"]
            for trial in choice]
    trials = common.markdown_table(["compressor", "setting", "time to read, s", "loss on held-out text"], rows)
    versions = ", ".join(f"{name} {version}" for name, version in settings["versions"].items())
    return f"""After all {settings['train_tokens']:,} tokens of training text:

{ends}

After the first of them, the loss and the seconds of reading so far:

{curves}

Settings were chosen on {settings['held_out_tokens']:,} tokens at the end of the training text, after reading what comes
before them:

{trials}

Losses are over {settings['val_tokens']:,} validation tokens in {settings['documents']} documents, each scored by a copy
of the compressor that has seen no other. Sizes are whole bytes: the rounding moves a loss by at most
{settings['rounding']:.4f}. Times to read are processor time of one thread, medians of {settings['repeats']}, with the
smallest and the largest. Beside them stand the medians of a clock on the wall, which other work on the machine
prolongs, as it does the time to score; that includes the copies. {versions}."""


def benchmark(arguments, config):
    """Choose, measure, and write the results. Returns them, one dict an arm."""
    *_, val = train_gpt.open_corpus(config)  # what it says of training text depends on how much of it a run reads
    shards = [train_gpt.open_shard(path) for path in sorted(Path(config.data).glob("*_train_*.bin"))]
    text = text_of(np.concatenate(shards), config.eot_token)
    documents = documents_of(text_of(val[:config.val_tokens + 1], config.eot_token))
    facts = common.environment(CPU)
    chosen, choice = choose(candidates(len(text) + config.val_tokens), text, config.val_tokens)
    results = curves_of_arms(chosen, text, amounts_of(len(text), train_gpt.training_tokens(config)), documents,
                             arguments.repeats)
    settings = {"data": Path(config.data).name, "tiny": arguments.tiny, "repeats": arguments.repeats,
                "train_tokens": len(text), "val_tokens": config.val_tokens, "documents": len(documents),
                "held_out_tokens": len(hold_out(text, config.val_tokens)[1]) - 1,
                "rounding": nats_per_token([1] * len(documents), documents),
                "versions": {"pyppmd": pyppmd.__version__, "zstandard": zstandard.__version__,
                             "zstd": ".".join(map(str, zstandard.ZSTD_VERSION))}}
    common.write_results(arguments.results, NAME, facts, {"settings": settings, "choice": choice, "results": results},
                         report(settings, choice, results))
    return results


def parse_arguments(argv):
    parser = common.parser(__doc__, tiny=False, data=str(common.ROOT / train_gpt.TRACKS["nano"].data))
    parser.add_argument("--repeats", type=int, default=3, help="of a reading, of which the median counts [3]")
    parser.add_argument("--draw", action="store_true", help="draw the picture from results that are there")
    arguments = parser.parse_args(argv)
    if arguments.repeats < 1:
        parser.error(f"--repeats {arguments.repeats}: must be positive")
    return arguments


def main(argv=None):
    arguments = parse_arguments(argv)
    if not arguments.draw:
        with tempfile.TemporaryDirectory() as temporary:
            try:
                changes = {"data": arguments.data}
                if arguments.tiny:
                    changes = {**common.TINY, "data": str(Path(temporary, "corpus"))}
                    common.write_corpus(changes["data"], common.python_documents(400_000),
                                        train_gpt.EOT_TOKEN["bytes"], common.TINY["val_tokens"])
                benchmark(arguments, dataclasses.replace(train_gpt.TRACKS["nano"], **changes))
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
