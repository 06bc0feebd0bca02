"""Check the track fineweb on a GPU, in two calls of some minutes.

    python benchmarks/gpu_checks.py whole      run the trainer's own command through all its parts
    python benchmarks/gpu_checks.py profile    time a step of stage 1, and say where the time goes
    python benchmarks/gpu_checks.py profile --beside FILE      then time another checkout's trainer
    python benchmarks/gpu_checks.py CALL --device cpu --tiny   try a call out without a GPU

The first call builds the text in .cache/: the dictionary of the track english in GPT-2's tokens.
A machine without a GPU can build it, too; --data takes another text. Compiled code is kept there.
A call prints each finding at once, with the seconds so far and a verdict, and writes it to
benchmarks/results/gpu_CALL.txt (tiny_CALL.txt): a call that is cut leaves what it has found.
Exit status: 0 all passed, 1 something failed, 2 no CUDA device.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".cache"  # of the text, compiled code, and the runs' logs
sys.path.insert(0, str(ROOT))
# Torch reads this when it is imported, and keeps Triton's cache there, too.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(PLACE / "inductor"))

import train_gpt  # ahead of torch, whose allocator it sets
from benchmarks import common

torch = train_gpt.torch
FINEWEB = train_gpt.TRACKS["fineweb"]
SMALLER = {"ngram_rows": 2**18, "val_tokens": 131_072, "val_batch_tokens": 16_384, "seed": 1}
OF_ENGLISH = ("model_dim", "head_dim", "mlp_dim", "micro_batches_a_pass", "dtype", "compile")
TINY = {name: getattr(common.TRACK, name) for name in OF_ENGLISH}
TINY |= {"micro_batch_tokens": 256, "val_tokens": 1024, "val_batch_tokens": 512}
KINDS = {  # of kernels, by their names
    "attention": "flash|attention",
    "products": "nvjet|gemm|cutlass|aten::(mm|addmm|bmm)$",
    "compiled code": "^triton_",
    "all kernels": "",
}


class Report:
    """The findings of a call: lines that are printed, and written to a file at once."""

    def __init__(self, path, device):
        self.file = open(path, "w", buffering=1)
        self.began = time.monotonic()
        self.failed = []
        self.line(common.environment_line(common.environment(device)))

    def line(self, text):
        """Tell a line, with the seconds of the call so far."""
        text = f"{time.monotonic() - self.began:7.1f} {text}"
        print(text, flush=True)
        self.file.write(f"{text}\n")

    def note(self, item, value, ok=None):
        """Tell a finding. ok: True, False, or None for what is only measured."""
        if ok is False:
            self.failed.append(item)
        verdict = {True: "ok", False: "FAIL", None: "-"}[ok]
        shown = f"{value:.4g}" if isinstance(value, float) else value
        self.line(f"{verdict:4} {item}: {shown}")


def values_of(arguments, count):
    """{field: value} of what a call changes of the track. It takes the first `count` stages, each
    for an equal share of the steps."""
    rows = [dataclasses.asdict(stage) for stage in FINEWEB.stages[:count]]
    for number, row in enumerate(rows):
        row["start"] = number / count
        if arguments.tiny:
            row["micro_batches"] //= 4
            row["softmax_rows"] //= 32
    values = {"data": arguments.data, "device": arguments.device, "stages": tuple(rows)}
    values |= {**SMALLER, **train_gpt.vocabulary_of(arguments.data)}
    return {**values, **TINY} if arguments.tiny else values


# ----- the trainer, whole

SAVED = 8  # the step behind which it validates and saves
KILLED = 10  # the step behind which the first process is killed
LOGGED = re.compile(r"^step:(\d+)/\d+ train_loss:(\S+) .*train_time:(\d+)ms", re.MULTILINE)


def printed(words, report, until=None):
    """Run the trainer, and kill it when it has logged the step `until`. Returns what it prints."""
    command = [sys.executable, "-u", str(ROOT / "train_gpt.py"), *words]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    text = ""
    with subprocess.Popen(command, cwd=PLACE, **piped) as process:
        try:
            for line in process.stdout:
                text += line
                report.line(f"  {line.rstrip()}")
                if line.startswith(f"step:{until}/"):
                    process.kill()
        finally:
            process.kill()
    return text


def check_whole(arguments, report):
    """Train four steps of each stage, with untying and both validations; kill it, and go on."""
    note = report.note
    count = len(FINEWEB.stages)
    steps = 4 * count
    run_id = f"gpu_checks_{os.getpid()}"
    values = {"track": "fineweb", "steps": steps, "log_every": 1, "run_id": run_id}
    values |= {"save_every": SAVED, "val_every": SAVED, "untie_at": (KILLED + 2) / steps}
    words = common.words_of({**values, **values_of(arguments, count)})
    text = printed(words, report, until=KILLED)
    note("killed", f"behind step {KILLED}", ok="status:" not in text)
    text += printed(["--resume", run_id], report)
    gates = ("causal", "normalised", "local", "unmoved")
    parts = {f"gate {gate}": f" {gate}:ok" for gate in gates}
    parts["validation on the way"] = f"step:{SAVED}/{steps} val_loss:"
    parts["saved and resumed"] = f"resumed:{run_id} step:{SAVED}/{steps}"
    parts["end"] = "status:ok"
    for part, due in parts.items():
        note(part, due, ok=due in text)
    logged = [(int(step), float(loss), int(ms)) for step, loss, ms in LOGGED.findall(text)]
    losses = {step: loss for step, loss, _ in logged}
    times = {step: ms for step, _, ms in logged}
    note("losses", list(losses.values()), ok=[*losses] == [*range(1, steps + 1)])
    again = [abs(loss - losses[step]) for step, loss, _ in logged[SAVED:KILLED]]
    # On CUDA bits cannot agree: gradients of attention and of embeddings are summed by atomics.
    largest = 0.0 if arguments.device == "cpu" else 0.01
    is_near = len(logged) == steps + KILLED - SAVED and max(again) <= largest
    note("resumed losses less those before", again, ok=is_near)
    for stage in range(1, count + 1):
        spent = times[4 * stage] - times[4 * stage - 1]
        note(f"ms of the last step of stage {stage}", spent, ok=spent >= 0)
    final = float(re.search(r"^final val_loss:(\S+)", text, re.MULTILINE)[1])
    note("final validation", final, ok=final < losses[1])


# ----- a profile


def take(training, first, count):
    """Take steps. Returns (their losses, milliseconds a step: of the loader, of the host in all,
    and until the device was done)."""
    losses = []
    loader = 0.0
    training.runtime.synchronize()
    began = time.perf_counter()
    for step in range(first, first + count):
        asked = time.perf_counter()
        batch = training.loader.next_batch()
        loader += time.perf_counter() - asked
        losses.append(training.trainer.step(step, batch) / batch.tokens)
    host = time.perf_counter() - began
    training.runtime.synchronize()
    times = loader, host, time.perf_counter() - began
    return torch.stack(losses).tolist(), [1000 * seconds / count for seconds in times]


def gradients(training, batch, forward):
    """{parameter: its gradient} of a batch at the weights as they are, by one form of the model."""
    trainer = training.trainer
    trainer.forward = forward
    trainer.accumulate(0, batch)
    params = trainer.model.named_parameters()
    found = {name: param.grad.float().clone() for name, param in params if param.grad is not None}
    found["ngram_table"] = torch.cat(trainer.table.grads).float()
    for group in trainer.optimizer.parameter_groups:
        group.clear_gradients()
    return found


def compare_with_plain(training, note):
    """Compare gradients of compiled code with those of the same model in eager code. Those of small
    parameters are sums that cancel, so only large ones are judged."""
    compiled = training.trainer.forward
    batch = training.loader.next_batch()
    plain = gradients(training, batch, training.trainer.model)
    for name, grad in gradients(training, batch, compiled).items():
        exact = plain[name]
        apart = ((grad - exact).norm() / exact.norm().clamp_min(1e-30)).item()
        is_near = apart < 0.05 if grad.numel() > 10_000 else None
        note(f"gradient of {name}, compiled less eager", apart, ok=is_near)


def profile_steps(training, note):
    """Take ten steps to warm up and ten timed ones, and note where the time goes."""
    device = training.runtime.device
    first, (_, _, took) = take(training, 0, 10)
    note("ms a step of ten with compilation", took)
    last, (loader, host, took) = take(training, 10, 10)
    note("loss, first and last", [first[0], last[-1]], ok=last[-1] < first[0])
    note("ms a step", took)
    note("ms a step of the host", host)
    note("ms a step of the loader", loader)
    note("peak memory, MiB", training.runtime.peak_memory_mib())
    for step, kind in ((20, "Muon"), (21, "Muon and Adam")):
        training.trainer.accumulate(step, training.loader.next_batch())
        update = functools.partial(training.trainer.optimizer.step, step, 1.0)
        note(f"ms of the optimizer alone, {kind}", 1000 * common.timed(update, device)[0])
    compare_with_plain(training, note)
    with torch.profiler.profile() as profile:
        take(training, 22, 2)
    place = getattr(torch.autograd.DeviceType, device.type.upper())
    key = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    kernels = {}
    for event in profile.key_averages():
        if event.device_type == place and not event.is_user_annotation:
            kernels[event.key] = getattr(event, key) / 2000
    for kind, pattern in KINDS.items():
        spent = sum(kernels[name] for name in kernels if re.search(pattern, name))
        note(f"ms a step, {kind}", spent)
    note("ms a step without a kernel", took - sum(kernels.values()))
    for name in sorted(kernels, key=kernels.get, reverse=True)[:40]:
        note(f"kernel {name[:90]}", kernels[name])


def check_profile(arguments, report):
    """Time the first stage, in this checkout and in another one's file."""
    values = values_of(arguments, 1)
    values |= {"steps": 100, "untie_at": 1.0, "cooldown": (1.0, 1.0)}
    for path in filter(None, (train_gpt.__file__, arguments.beside)):
        report.line(path)
        if arguments.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        spec = importlib.util.spec_from_file_location("profiled", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.with_values(module.TRACKS["fineweb"], values)
        with contextlib.closing(common.Training(config, module)) as training:
            profile_steps(training, report.note)
        del training  # or its memory would count in the next one's peak


CALLS = {"whole": check_whole, "profile": check_profile}


def main(argv=None):
    parser = common.parser(__doc__, device="cuda", data="", beside="", tiny=False)
    parser.add_argument("call", choices=CALLS)
    arguments = parser.parse_args(argv)
    text = common.sources if arguments.tiny else common.english_in_gpt2
    arguments.data = str(Path(arguments.data or text(PLACE)).absolute())
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"no CUDA device, only the text in {arguments.data}; try --device cpu --tiny")
    name = f"{'tiny' if arguments.tiny else 'gpu'}_{arguments.call}.txt"
    report = Report(arguments.results / name, arguments.device)
    try:
        CALLS[arguments.call](arguments, report)
    except (Exception, KeyboardInterrupt) as error:
        report.note("ended early", f"{type(error).__name__}: {error}"[:1000], ok=False)
    report.line(f"failed: {', '.join(report.failed) or 'nothing'}")
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main())
