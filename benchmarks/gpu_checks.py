"""Check the track fineweb on a GPU, in two calls: both within fifteen minutes, by estimate.

    python benchmarks/gpu_checks.py whole      run the trainer's own command through all its parts
    python benchmarks/gpu_checks.py profile    time its stages, and say where the time goes
    python benchmarks/gpu_checks.py profile --beside FILE      then time another checkout's trainer
    python benchmarks/gpu_checks.py CALL --device cpu --tiny   try a call out without a GPU

On a bare machine without a network call `whole`, then `profile`, which finds compiled code in
.cache. Carry the repository and .cache/english_gpt2, 9 MB: the dictionary of the track english in
GPT-2's tokens, which a first call builds (--data takes another text). It takes torch, numpy,
tiktoken and 20 GB of disk. Copy back benchmarks/results/gpu_*.txt: each finding goes there at once,
with the seconds so far and a verdict. On a CPU a tiny `whole` compiles for a quarter of an hour.
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
OF_ENGLISH = ("model_dim", "head_dim", "mlp_dim", "micro_batches_a_pass", "dtype")
TINY = {name: getattr(common.TRACK, name) for name in OF_ENGLISH}
TINY |= {"micro_batch_tokens": 256, "val_tokens": 1024, "val_batch_tokens": 512}
LAYERS = (0, 5, 6, 9)  # which have all kinds
TINY["layers"] = tuple(vars(FINEWEB.layers[n]) for n in LAYERS)
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


def values_of(arguments):
    """{field: value} of what a call changes of the track: all stages take equally many steps."""
    rows = [dataclasses.asdict(stage) for stage in FINEWEB.stages]
    for number, row in enumerate(rows):
        row["start"] = number / len(rows)
        if arguments.tiny:
            row["micro_batches"] //= 4
            row["softmax_rows"] //= 32
    values = {"data": arguments.data, "device": arguments.device, "stages": tuple(rows)}
    values |= {**SMALLER, **train_gpt.vocabulary_of(arguments.data)}
    return {**values, **TINY} if arguments.tiny else values


# ----- the trainer, whole

SAVED = 8  # the step behind which it validates and saves
KILLED = 10  # the step behind which the first process is killed
GATES = "causal", "normalised", "local", "unmoved"
LOGGED = re.compile(r"^step:(\d+)/\d+ train_loss:(\S+) ", re.MULTILINE)


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
    """Train four steps of each stage, kill it, and go on; then two steps without the pointer."""
    steps = 4 * len(FINEWEB.stages)
    run_id = f"gpu_checks_{os.getpid()}"
    plain = {"track": "fineweb", "log_every": 1, **values_of(arguments)}
    values = {**plain, "steps": steps, "run_id": run_id, "untie_at": (KILLED + 2) / steps}
    words = common.words_of({**values, "save_every": SAVED, "val_every": SAVED})
    text = printed(words, report, until=KILLED)
    report.note("killed", f"behind step {KILLED}", ok="status:" not in text)
    text += printed(["--resume", run_id], report)
    parts = {"end": "status:ok"} | {f"gate {gate}": f" {gate}:ok" for gate in GATES}
    parts["validation on the way"] = f"step:{SAVED}/{steps} val_loss:"
    parts["saved and resumed"] = f"resumed:{run_id} step:{SAVED}/{steps}"
    for part, due in parts.items():
        report.note(part, due, ok=due in text)
    logged = [(int(step), float(loss)) for step, loss in LOGGED.findall(text)]
    losses = dict(logged)
    report.note("losses", list(losses.values()), ok=[*losses] == [*range(1, steps + 1)])
    again = [abs(loss - losses[step]) for step, loss in logged[SAVED:KILLED]]
    # On CUDA bits cannot agree: gradients of attention and of embeddings are summed by atomics.
    largest = 0.0 if arguments.device == "cpu" else 0.01
    is_near = len(logged) == steps + KILLED - SAVED and max(again) <= largest
    report.note("resumed losses less those before", again, ok=is_near)
    for what, key in (("validation", "final val_loss"), ("that of the mean", " mean_val_loss")):
        loss = float(re.search(rf"{key}:(\S+)", text)[1])
        report.note(f"final {what}", loss, ok=loss < losses[1])
    first = {"stages": plain["stages"][:1], "steps": 2, "val_every": 0, "pointer_window": 0}
    text = printed(common.words_of({**plain, **first}), report)
    report.note("without the pointer", "status:ok", ok="status:ok" in text)


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


def start_at(training, step):
    """Let the loader go on with the batch of this step, and the peak of memory begin anew."""
    training.loader.close()
    shards = training.corpus.shards
    training.loader = train_gpt.TrainLoader(training.config, shards, training.runtime, step)
    if training.runtime.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def profile_stages(training, note):
    """Take three steps of each stage, of which the first compiles: their times and memory."""
    runtime = training.runtime
    for stage, first in enumerate(range(0, training.config.steps, 25), start=1):
        start_at(training, first)
        take(training, first, 1)
        _, (loader, _, took) = take(training, first + 1, 2)
        note(f"stage {stage}, ms a step, and of it in next_batch", [round(took), round(loader)])
        note(f"stage {stage}, peak memory, MiB", runtime.peak_memory_mib())
    estimate = 1024 * train_gpt.peak_memory(training.config, runtime)
    note("peak memory by the estimate of --check, MiB", estimate)


def compare_rates(training, kept, note):
    """Take the first 25 steps at the table's rate and at a third of it, from the state `kept`."""
    table = training.trainer.table
    for rate in (FINEWEB.ngram_lr, FINEWEB.ngram_lr / 3):
        for tensor, values in kept:
            tensor.copy_(values)
        table.row = table.row._replace(lr=rate)
        start_at(training, 0)
        losses, _ = take(training, 0, 25)
        note(f"mean loss of steps 16 to 25, ngram_lr {rate:.2g}", sum(losses[15:]) / 10)


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
    key = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    kernels = {}
    for event in profile.key_averages():
        if event.device_type.name.lower() == device.type and not event.is_user_annotation:
            kernels[event.key] = getattr(event, key) / 2000
    for kind, pattern in KINDS.items():
        spent = sum(kernels[name] for name in kernels if re.search(pattern, name))
        note(f"ms a step, {kind}", spent)
    note("ms a step without a kernel", took - sum(kernels.values()))
    for name in sorted(kernels, key=kernels.get, reverse=True)[:40]:
        note(f"kernel {name[:90]}", kernels[name])


def check_profile(arguments, report):
    """Time the stages in this checkout, and the first one in another checkout's file."""
    values = values_of(arguments)
    values |= {"steps": 25 * len(values["stages"]), "untie_at": 1.0, "cooldown": (0.99, 1.0)}
    for path in filter(None, (train_gpt.__file__, arguments.beside)):
        report.line(path)
        spec = importlib.util.spec_from_file_location("profiled", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.with_values(module.TRACKS["fineweb"], values)
        with contextlib.closing(common.Training(config, module)) as training:
            groups = training.trainer.optimizer.groups
            tensors = [tensor for group in groups for tensor in group.tensors().values()]
            kept = [(tensor, tensor.to("cpu", copy=True)) for tensor in tensors]
            profile_steps(training, report.note)
            if path == train_gpt.__file__:
                profile_stages(training, report.note)
                compare_rates(training, kept, report.note)
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
