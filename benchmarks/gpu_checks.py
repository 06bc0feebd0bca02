"""The first hour on a GPU, in five calls, each within nine minutes.

    python benchmarks/gpu_checks.py attention      versions; attention against float64
    python benchmarks/gpu_checks.py profile        twelve steps, two of them kernel by kernel
    python benchmarks/gpu_checks.py trainer        the trainer itself: 60 steps and its gates
    python benchmarks/gpu_checks.py pairs          settings of speed, two by two in one process
    python benchmarks/gpu_checks.py loss           240 steps, with rates of this width and of 64
    python benchmarks/gpu_checks.py CALL --device cpu --tiny       tries out a call without a GPU

All of them are of the track fineweb, on its shards where they are present, on other shards of GPT-2
tokens with --data FOLDER, else on words of torch's Python sources, numbered by frequency: real text
whose copies and n-grams repeat. Compiled code is kept in .cache/, so that a call which ran into its
limit goes on where it was. Each call leaves benchmarks/results/gpu_CALL.{json,md} (tiny_CALL.* with
--tiny).
Exit status: 0 all passed, 1 something failed, 2 no CUDA device.
"""

import collections
import dataclasses
import itertools
import json
import os
import re
import signal
import sys
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Torch reads this when it is imported, and keeps Triton's cache there, too.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / ".cache/inductor"))

import numpy as np
import torch

import train_gpt
from benchmarks import common

LIMIT_SECONDS = 540
TINY = {  # fields of a Stage hold in all stages
    "model_dim": 32,
    "head_dim": 16,
    "mlp_dim": 64,
    "micro_batch_tokens": 512,
    "micro_batches": 2,
    "ngram_rows": 4096,
    "val_tokens": 2048,
    "val_batch_tokens": 512,
    "compile": False,
}
KINDS = {  # of kernels, by their names
    "attention": "flash|attention",
    "products": "nvjet|gemm|cutlass|aten::(mm|addmm|bmm)$",
    "written by the compiler": "^triton_",
}
VERDICTS = {True: "ok", False: "FAIL", None: "-"}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5}  # relative errors of attention


class Report:
    """The rows of a call: printed at once, and kept in the file, however the call ends."""

    def __init__(self, path, facts):
        self.path = path
        self.content = {"environment": facts, "rows": []}

    def note(self, item, value, ok=None):
        """ok: True, False, or None for what is only measured."""
        self.content["rows"].append({"item": item, "value": value, "ok": ok})
        print(f"{item} [{VERDICTS[ok]}]: {value}", flush=True)
        common.write_whole(self.path, json.dumps(self.content, indent=1) + "\n")
        common.write_whole(self.path.with_suffix(".md"), markdown(self.content))


def in_words(value):
    """A value of a row, with numbers to at least four digits, and of many the first six."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {in_words(part)}" for name, part in value.items())
    if isinstance(value, list):
        more = ["..."] * (len(value) > 6)
        return ", ".join([*map(in_words, value[:6]), *more])
    return str(value)


def markdown(content):
    """What a call has found, as a table and a line of where that was."""
    rows = [(row["item"], in_words(row["value"]), VERDICTS[row["ok"]]) for row in content["rows"]]
    table = common.markdown_table(["what", "found", "verdict"], rows)
    return f"{table}\n\n{common.environment_line(content['environment'])}\n"


# ----- configuration and tokens


def word_documents(limit, eot_token):
    """Torch's Python sources as words, numbered by frequency; all rare ones share a number."""
    texts = []
    for document in common.python_documents(limit):
        text = document.astype(np.uint8).tobytes().decode(errors="replace")
        texts.append(re.findall(r"\w+|\W", text))
    counts = collections.Counter(itertools.chain.from_iterable(texts))
    known = [word for word, _ in counts.most_common(eot_token - 1)]
    number = collections.defaultdict(lambda: len(known), zip(known, range(len(known)), strict=True))
    return [np.array([number[word] for word in text], np.uint16) for text in texts]


FINEWEB = train_gpt.TRACKS["fineweb"]
FIRST_STAGE = dataclasses.replace(
    FINEWEB, stages=FINEWEB.stages[:1], untie_at=1.0, cooldown=(1.0, 1.0)
)


def config_of(arguments, base=FIRST_STAGE, **changes):
    """The Config of a call, on tokens that are there; changes come last."""
    values = {
        "ngram_rows": 2**18,
        "val_tokens": 131_072,
        "val_batch_tokens": 16_384,
        "device": arguments.device,
        "seed": 1,
    }
    if arguments.tiny:
        values |= TINY
    config = train_gpt.with_values(base, {**values, **changes})
    if arguments.data:
        return train_gpt.with_values(config, {"data": arguments.data})
    if arguments.tiny or not any((ROOT / config.data).glob("*_train_*.bin")):
        folder = ROOT / ".cache" / f"words_{config.val_tokens}"
        if not folder.exists():
            documents = word_documents(400_000 if arguments.tiny else 10**9, config.eot_token)
            common.write_corpus(folder, documents, config.eot_token, config.val_tokens)
        # A word that is numbered begins with no other.
        config = train_gpt.with_values(config, {"data": str(folder), "prefix_weight": 0.0})
    return config


class Steps(common.Training):
    """A training whose steps are timed."""

    def __init__(self, config):
        super().__init__(config)
        self.done = 0

    def take(self, count):
        """Take steps. Returns (their losses, milliseconds a step, those of the host alone)."""
        self.runtime.synchronize()
        began = time.perf_counter()
        losses = [self.step(step) for step in range(self.done, self.done + count)]
        host = time.perf_counter() - began
        self.runtime.synchronize()
        whole = time.perf_counter() - began
        self.done += count
        return [loss.item() for loss in losses], 1000 * whole / count, 1000 * host / count


# ----- the five calls


def attention_error(back_end, device, dtype, size, starts, length):
    """The largest relative error of attention and its gradients against float64."""
    bounds = torch.tensor([*starts, length], dtype=torch.int32, device=device)
    segment_start = bounds[:-1].repeat_interleave(bounds.diff())
    micro_batch = types.SimpleNamespace(segment_start=segment_start, segment_bounds=bounds)
    phase = types.SimpleNamespace(max_segment=length)
    drawn = torch.randn(4, length, 2, 128, generator=torch.Generator().manual_seed(0))
    q, k, v, upstream = drawn.to(device, dtype)
    mine = [tensor.requires_grad_() for tensor in (train_gpt.norm(q), train_gpt.norm(k), v)]
    exact = [tensor.detach().double().requires_grad_() for tensor in mine]
    mask = back_end.mask(micro_batch, size, 1, phase, dtype)
    out = back_end.attend(*mine, mask, 0.1)
    reference = common.reference_attention(*exact, segment_start, size, 0.1)
    values = [out, *torch.autograd.grad(out, mine, upstream)]
    references = [reference, *torch.autograd.grad(reference, exact, upstream.double())]
    errors = [
        (value - reference).norm() / reference.norm()
        for value, reference in zip(values, references, strict=True)
    ]
    return torch.stack(errors).max().item()  # a NaN is the largest


def check_attention(arguments, report):
    """What is installed, and whether attention is right on all kinds of segments."""
    report.note("has collectives of one tensor", hasattr(torch.distributed, "all_gather_single"))
    device = torch.device(arguments.device)
    back_end, name = train_gpt.choose_attention(config_of(arguments), device)
    report.note("attention", name)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    length = 512 if arguments.tiny else 4096
    drawn = np.random.default_rng(0).integers(1, length, size=length // 32)
    short = np.unique(np.append(0, drawn))
    layouts = {"one": [0], "short": short, "on edges": range(0, length, 128)}
    for size in (128, 256 if arguments.tiny else 2560):
        for layout, starts in layouts.items():
            error = attention_error(back_end, device, dtype, size, starts, length)
            item = f"window {size}, segments {layout}: relative error"
            report.note(item, error, ok=error < TOLERANCE[dtype])


def check_profile(arguments, report):
    """Twelve steps: speed, memory, host against device, and the kernels that take longest."""
    steps = Steps(config_of(arguments, steps=12))
    first, *milliseconds = steps.take(2)
    report.note("ms a step of two with compilation, and of the host alone", milliseconds)
    _, *milliseconds = steps.take(8)
    report.note("ms a step, and of the host alone", milliseconds)
    report.note("peak memory, MiB", steps.runtime.peak_memory_mib())
    with torch.profiler.profile() as profile:
        last, *_ = steps.take(2)
    report.note("loss, first and last", [first[0], last[-1]], ok=last[-1] < first[0])
    is_cuda = arguments.device == "cuda"
    key = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    place = torch.autograd.DeviceType.CUDA if is_cuda else torch.autograd.DeviceType.CPU
    kernels = {}  # ms a step
    for event in profile.key_averages():
        if event.device_type == place and getattr(event, key):
            kernels[event.key] = getattr(event, key) / 2000  # from microseconds of two steps
    kinds = dict.fromkeys([*KINDS, "other"], 0.0)
    for name, time_taken in kernels.items():
        found = [kind for kind, pattern in KINDS.items() if re.search(pattern, name)]
        kinds[[*found, "other"][0]] += time_taken
    report.note("ms a step by kinds of kernels", kinds)
    report.note("idle, ms a step", milliseconds[0] - sum(kinds.values()))
    for name in sorted(kernels, key=kernels.get, reverse=True)[:60]:
        report.note(f"kernel {name[:90]}", kernels[name])
    steps.close()


def check_trainer(arguments, report):
    """The whole program as users start it, with all stages in 60 steps."""
    steps = 12 if arguments.tiny else 60
    run_id = f"gpu_checks_{os.getpid()}"
    config = config_of(arguments, FINEWEB, steps=steps, log_every=1)
    defaults = dataclasses.asdict(FINEWEB)
    values = dataclasses.asdict(config)
    changed = {name: value for name, value in values.items() if value != defaults[name]}
    folder = common.train(ROOT, run_id, common.words_of({"track": "fineweb", **changed}))
    log = common.log_of(folder)
    gates = re.findall(r"^validity: (.*)$", log, re.MULTILINE)
    report.note("gates", gates, ok=len(gates) == 1)
    times = re.findall(r"^step:(\d+)/.* train_loss:.* train_time:(\d+)ms", log, re.MULTILINE)
    report.note("train_time, ms, by step", {step: int(time) for step, time in times})
    losses = re.findall(r"^step:.* train_loss:(\S+)", log, re.MULTILINE)
    report.note("losses", list(map(float, losses)))
    report.note("result", json.loads((folder / "result.json").read_text()))


def check_pairs(arguments, report):
    """Settings beside the track's, in turns, warm, in one process."""
    chunk = train_gpt.LOSS_CHUNK[arguments.device]
    arms = {  # fields of the Config, and tokens of a chunk of the loss
        "without copies": ({"copy_orders": ()}, chunk),
        "chunks of a quarter as many tokens": ({}, chunk // 4),
        "one micro-batch a pass": ({"micro_batches_a_pass": 1}, chunk),
    }
    count = 1 if arguments.tiny else 4  # steps of a turn
    for name, (changes, own_chunk) in arms.items():
        pair = [Steps(config_of(arguments, steps=4 * count, **own)) for own in ({}, changes)]
        times = []
        for turn in range(8):
            train_gpt.LOSS_CHUNK[arguments.device] = own_chunk if turn % 2 else chunk
            times.append(pair[turn % 2].take(count)[1])
        report.note(f"ms a step by turns, of which two compile: track, {name}, track, ...", times)
        for steps in pair:
            steps.close()
    train_gpt.LOSS_CHUNK[arguments.device] = chunk


def scale_gradients(group, factor=1e-7):
    """Make Adam's epsilon 1e-8 instead of 1e-15, which is relative to gradients, and change nothing
    else."""
    take_step = group.take_step

    def scaled(update, part, grad, state, hyper):
        take_step(update, part, factor * grad, state, hyper)

    group.take_step = scaled


def check_loss(arguments, report):
    """The losses of stage 1 with the rates of this width, and with those of small scale.

    modded-nanogpt's losses at step 250 were 4.432 and, without dense connections, 4.525."""
    count = 6 if arguments.tiny else 240
    small_scale = FINEWEB.ngram_floor * (FINEWEB.model_dim / 64) ** 0.75
    for name, floor in (("as it is", FINEWEB.ngram_floor), ("of small scale", small_scale)):
        steps = Steps(config_of(arguments, steps=count, ngram_floor=floor))
        if name == "of small scale":
            scale_gradients(steps.trainer.optimizer.embeddings)
        losses, *_ = steps.take(count)
        report.note(f"losses, {name}", losses, ok=losses[-1] < losses[0])
        steps.close()


CHECKS = (check_attention, check_profile, check_trainer, check_pairs, check_loss)
CALLS = {function.__name__.removeprefix("check_"): function for function in CHECKS}


def out_of_time(*_):
    raise TimeoutError(f"more than {LIMIT_SECONDS} s; call it again, compiled code is kept")


def main(argv=None):
    parser = common.parser(__doc__, device="cuda", data="", tiny=False)
    parser.add_argument("call", choices=CALLS)
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        remedy = "--device cpu --tiny only tries out the script"
        print(f"error: torch sees no CUDA device; {remedy}", file=sys.stderr)
        return 2
    arguments.results.mkdir(parents=True, exist_ok=True)
    facts = common.environment(arguments.device)
    name = f"{'tiny' if arguments.tiny else 'gpu'}_{arguments.call}.json"
    report = Report(arguments.results / name, facts)
    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(LIMIT_SECONDS)
    began = time.monotonic()
    try:
        CALLS[arguments.call](arguments, report)
    except (Exception, SystemExit) as error:
        report.note("ended early", f"{type(error).__name__}: {error}"[:1000], ok=False)
        raise
    finally:
        signal.alarm(0)
        report.note("seconds", time.monotonic() - began)
    return int(any(row["ok"] is False for row in report.content["rows"]))


if __name__ == "__main__":
    sys.exit(main())
