"""What a GPU says of the track fineweb, in two calls of nine minutes at most.

    python benchmarks/gpu_checks.py whole      the trainer's own command, through all of its parts
    python benchmarks/gpu_checks.py profile    the time of a step of stage 1, and where it goes
    python benchmarks/gpu_checks.py profile --beside FILE      beside another checkout's trainer
    python benchmarks/gpu_checks.py CALL --device cpu --tiny   tries out a call without a GPU

Their text is the dictionary of the track english in GPT-2's tokens, which the first call builds in
.cache/, also on a machine without a GPU; --data takes another text. Compiled code is kept there,
too. Each call writes as it goes, so that one which is cut also tells: rows with verdicts to
benchmarks/results/gpu_CALL.{json,md}, and what the trainer prints, with seconds, to gpu_whole.txt
(tiny_* with --tiny). Exit status: 0 all passed, 1 something failed, 2 no CUDA device.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Torch reads this when it is imported, and keeps Triton's cache there, too.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / ".cache/inductor"))

import train_gpt  # ahead of torch, whose allocator it sets
from benchmarks import common

torch = train_gpt.torch
LIMIT_SECONDS = 540
FINEWEB = train_gpt.TRACKS["fineweb"]
PLACE = ROOT / ".cache"  # of texts, and of the runs' logs
SMALLER = {"ngram_rows": 2**18, "val_tokens": 131_072, "val_batch_tokens": 16_384, "seed": 1}
TINY = {
    "model_dim": 48,
    "head_dim": 8,
    "mlp_dim": 64,
    "micro_batch_tokens": 256,
    "micro_batches_a_pass": 1,
    "ngram_rows": 4096,
    "val_tokens": 1024,
    "val_batch_tokens": 512,
    "dtype": "float32",
    "compile": False,
}
KINDS = {  # of kernels, by their names
    "attention": "flash|attention",
    "products": "nvjet|gemm|cutlass|aten::(mm|addmm|bmm)$",
    "written by the compiler": "^triton_",
}
VERDICTS = {True: "ok", False: "FAIL", None: "-"}


class Report:
    """The rows of a call: printed at once, and kept in the file, however the call ends."""

    def __init__(self, path, facts):
        self.path = path
        self.facts = facts
        self.rows = []

    def note(self, item, value, ok=None):
        """ok: True, False, or None for what is only measured."""
        self.rows.append({"item": item, "value": value, "ok": ok})
        print(f"{item} [{VERDICTS[ok]}]: {in_words(value)}", flush=True)
        rows = [(row["item"], in_words(row["value"]), VERDICTS[row["ok"]]) for row in self.rows]
        table = common.markdown_table(["what", "found", "verdict"], rows)
        common.write_results(
            self.path.parent, self.path.name, self.facts, {"rows": self.rows}, table
        )


def in_words(value):
    """A value of a row, with numbers to four digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {in_words(part)}" for name, part in value.items())
    return ", ".join(map(in_words, value)) if isinstance(value, list) else str(value)


def values_of(arguments, stages):
    """{field: value} of the fields of the track that a call changes."""
    own = train_gpt.vocabulary_of(arguments.data)
    values = {**SMALLER, **own, "data": arguments.data, "device": arguments.device}
    stages = [dataclasses.asdict(stage) for stage in stages]
    if arguments.tiny:
        values |= TINY
        for stage in stages:
            stage["micro_batches"] //= 4
            stage["softmax_rows"] = min(512, stage["softmax_rows"])
    return {**values, "stages": tuple(stages)}


# ----- the trainer, whole

SAVED = 8  # the step behind which it validates and saves
KILLED = 10  # the step behind which the first process is killed
LOGGED = r"step:(\d+)/\d+ train_loss:(\S+) .*train_time:(\d+)ms"


def printed(words, transcript, until=None):
    """Run the trainer; kill it when it has logged the step `until`. Returns (exit status, its
    lines), which the transcript gets, too, with seconds."""
    command = [sys.executable, "-u", str(ROOT / "train_gpt.py"), *words]
    began = time.monotonic()
    lines = []
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=PLACE, **piped) as process:
        try:
            for line in process.stdout:
                lines.append(line.rstrip())
                transcript.write(f"{time.monotonic() - began:7.1f} {line}")
                if until is not None and line.startswith(f"step:{until}/"):
                    process.kill()
        except BaseException:
            process.kill()
            raise
    return process.returncode, lines


def steps_of(lines):
    """{step: (training loss, milliseconds so far)} of what a trainer has printed."""
    found = filter(None, (re.match(LOGGED, line) for line in lines))
    return {int(match[1]): (float(match[2]), int(match[3])) for match in found}


def check_whole(arguments, report):
    """Train four steps of each stage, with untying and both validations; kill it, and go on."""
    note = report.note
    count = len(FINEWEB.stages)
    steps = 4 * count
    stages = [
        dataclasses.replace(stage, start=number / count)
        for number, stage in enumerate(FINEWEB.stages)
    ]
    run_id = f"gpu_checks_{os.getpid()}"
    folder = PLACE / "logs" / run_id
    values = {"track": "fineweb", "steps": steps, "log_every": 1, "run_id": run_id}
    values |= {"save_every": SAVED, "val_every": SAVED, "untie_at": (KILLED + 2) / steps}
    words = common.words_of({**values, **values_of(arguments, stages)})
    with open(report.path.with_suffix(".txt"), "w", buffering=1) as transcript:
        status, lines = printed(words, transcript, until=KILLED)
        note("seconds of warm-up", [line for line in lines if line.startswith("warm-up")])
        before = steps_of(lines)
        if KILLED not in before:
            note("end of the first run", lines[-1], ok=False)
            return
        note("killed behind step", max(before), ok=status < 0)
        told = [line for line in lines if " val_loss:" in line]
        note("validation on the way", told, ok=len(told) == 1)
        path = folder / f"step_{SAVED:06d}.pt"
        note("saved", path.name, ok=path.exists())
        status, lines = printed(["--resume", run_id], transcript)
    note("seconds of warm-up, resumed", [line for line in lines if line.startswith("warm-up")])
    note("end of the resumed run", lines[-1], ok=status == 0)
    after = steps_of(lines)
    if KILLED not in after:
        return
    apart = max(abs(after[step][0] - before[step][0]) for step in range(SAVED + 1, KILLED + 1))
    # On CUDA bits cannot agree: gradients of attention and of embeddings are summed by atomics.
    note("resumed losses less those before", apart, ok=apart <= 0.01 * (arguments.device != "cpu"))
    taken = {**before, **after}
    losses = {step: loss for step, (loss, _) in sorted(taken.items())}
    note("losses", losses, ok=list(losses) == list(range(1, steps + 1)))
    for number in range(count):
        last = 4 * number + 4
        spent = [taken[step][1] - taken[step - 1][1] for step in (last - 1, last)]
        note(f"stage {number + 1}: ms of its last two steps", spent, ok=min(spent) >= 0)
    result = common.result_of(folder)
    note("final validation", result["val_loss"], ok=float(result["val_loss"]) < losses[1])
    for gate in ("causal", "normalised", "local", "unmoved"):
        note(f"gate {gate}", result[gate], ok=result[gate] == "ok")
    note("peak memory", result["peak_memory"])


# ----- a profile

PROFILED = 2  # steps: one of them has Adam's update


@contextlib.contextmanager
def watched(owner, name, wait=lambda: None):
    """Keep of each call of a method: when it began, when it had launched what it does, and, if
    `wait` waits for the device, when that was done, in milliseconds."""
    function = getattr(owner, name)
    stamps = []

    def call(*words):
        wait()
        began = time.perf_counter()
        found = function(*words)
        launched = time.perf_counter()
        wait()
        stamps.append([1000 * moment for moment in (began, launched, time.perf_counter())])
        return found

    setattr(owner, name, call)
    yield stamps
    setattr(owner, name, function)


def profile_steps(training, note, is_cuda):
    """Ten steps to warm up, ten timed ones, and then where the time goes."""
    wait = training.runtime.synchronize
    trainer = training.trainer

    def take(steps):
        """(milliseconds a step, the losses) of some steps."""
        work = functools.partial(list, map(training.step, steps))
        seconds, losses = common.timed(work, training.runtime.device)
        return 1000 * seconds / len(steps), torch.stack(losses).tolist()

    took, first = take(range(10))
    note("ms a step of ten with compilation", took)
    with watched(training.loader, "next_batch") as waits:
        took, last = take(range(10, 20))
    note("loss, first and last", [first[0], last[-1]], ok=last[-1] < first[0])
    note("ms a step", took)
    note("of these for the loader", sum(end - begin for begin, end, _ in waits) / 10)
    note("peak memory, MiB", training.runtime.peak_memory_mib())
    with (
        watched(trainer, "forward") as passes,
        watched(trainer.optimizer, "step", wait) as updates,
    ):
        take(range(20, 24))
    each = len(passes) // 4
    # From an empty queue of launches: later passes wait for the device.
    pairs = zip(passes[0::each], passes[1::each], strict=True)
    host = [later[0] - earlier[0] for earlier, later in pairs]
    note(f"ms of the host for a pass, of {each} in a step", statistics.median(host))
    for kind, found in (("Muon", updates[0::2]), ("Muon and Adam", updates[1::2])):
        note(f"ms of the optimizer, {kind}", min(done - began for began, _, done in found))
        note(f"of these for the host, {kind}", min(end - began for began, end, _ in found))
    with torch.profiler.profile() as profile:
        take(range(24, 24 + PROFILED))
    key = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    place = torch.autograd.DeviceType.CUDA if is_cuda else torch.autograd.DeviceType.CPU
    kernels = {
        event.key: getattr(event, key) / 1000 / PROFILED
        for event in profile.key_averages()
        if event.device_type == place and getattr(event, key)
    }
    kinds = dict.fromkeys([*KINDS, "other"], 0.0)
    for kernel, milliseconds in kernels.items():
        found = [kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)]
        kinds[[*found, "other"][0]] += milliseconds
    note("ms a step by kinds of kernels", kinds)
    note("ms a step without a kernel", took - sum(kinds.values()))
    for kernel in sorted(kernels, key=kernels.get, reverse=True)[:40]:
        note(f"kernel {kernel[:90]}", kernels[kernel])


def check_profile(arguments, report):
    """Time the first stage, in this checkout and in another one's file."""
    values = values_of(arguments, FINEWEB.stages[:1])
    values |= {"steps": 100, "untie_at": 1.0, "cooldown": (1.0, 1.0)}
    modules = {"": train_gpt}
    if arguments.beside:
        spec = importlib.util.spec_from_file_location("train_gpt_beside", arguments.beside)
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        modules["beside: "] = sys.modules[spec.name]
        spec.loader.exec_module(modules["beside: "])
    for name, module in modules.items():

        def note(item, value, ok=None, name=name):
            report.note(name + item, value, ok)

        config = module.with_values(module.TRACKS["fineweb"], values)
        with contextlib.closing(common.Training(config, module)) as training:
            profile_steps(training, note, arguments.device == "cuda")


CALLS = {"whole": check_whole, "profile": check_profile}


def out_of_time(*_):
    raise TimeoutError(f"more than {LIMIT_SECONDS} s; call it again, compiled code is kept")


def main(argv=None):
    parser = common.parser(__doc__, device="cuda", data="", beside="", tiny=False)
    parser.add_argument("call", choices=CALLS)
    arguments = parser.parse_args(argv)
    text = common.sources if arguments.tiny else common.english_in_gpt2
    arguments.data = str(Path(arguments.data or text(PLACE)).absolute())
    if arguments.device == "cuda" and not torch.cuda.is_available():
        remedy = f"--device cpu --tiny only tries out the script; its text is in {arguments.data}"
        print(f"error: torch sees no CUDA device; {remedy}", file=sys.stderr)
        return 2
    name = f"{'tiny' if arguments.tiny else 'gpu'}_{arguments.call}"
    report = Report(arguments.results / name, common.environment(arguments.device))
    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(LIMIT_SECONDS)
    began = time.monotonic()
    try:
        CALLS[arguments.call](arguments, report)
    except (Exception, KeyboardInterrupt) as error:
        report.note("ended early", f"{type(error).__name__}: {error}"[:1000], ok=False)
        raise
    finally:
        signal.alarm(0)
        report.note("seconds", time.monotonic() - began)
    return int(any(row["ok"] is False for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
