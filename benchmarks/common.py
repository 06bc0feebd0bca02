"""What the benchmarks share.

Contents: command lines -> corpora -> runs and ranks -> records -> machine and code -> output.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that every script of this folder runs by its path, too
import train_gpt

RESULTS = ROOT / "benchmarks" / "results"

# Values that shrink any track to seconds on one core, those of a Stage in all stages. They are for
# trying out a benchmark's logic, not for measuring. Layers stay, since fields of the Config name
# them by number.
TINY = {
    "model_dim": 32,
    "head_dim": 16,
    "mlp_dim": 64,
    "micro_batch_tokens": 512,
    "ngram_rows": 4096,
    "windows": (64, 128),
    "document_cap": 256,
    "steps": 6,
    "val_tokens": 2048,
    "val_batch_tokens": 512,
    "val_windows": (64, 128),
    "micro_batches": 2,
    "softmax_rows": 0,
    "index_bits": 12,
    "index_share": 0.25,
    "tokenizer": "bytes",
    "compile": False,
    "val_sha256": "",
}
N_GRAMS_ALONE = {"copy_orders": (), "index_orders": ()}
NO_TABLE = {**N_GRAMS_ALONE, "ngram_orders": ()}


# ----- command lines

HELP = {
    "data": "folder of the corpus",
    "work": "folder of the runs",
    "results": "folder of the results",
    "tiny": "tiny shapes, not compiled: tries out the script, and measures nothing",
    "pretrain_steps": "on Python",
    "jobs": "runs side by side, one thread each",
    "draw": "the picture alone, from results that are there",
    "seeds": "repetitions of all arms",
}


class Parser(argparse.ArgumentParser):
    """The command line of a benchmark, which no launcher may start."""

    def parse_args(self, *words):
        """Read the command line, but refuse a launcher's ranks.

        Each rank would measure while the others do, and write the same results."""
        arguments = super().parse_args(*words)
        is_worker = getattr(arguments, "worker", None)
        if "WORLD_SIZE" in os.environ and not is_worker:
            remedy = "start it with python, not with torchrun"
            self.exit(2, f"error: {self.prog} starts its ranks itself; {remedy}\n")
        return arguments


def parser(doc, **defaults):
    """The command line of the benchmark with this docstring.

    It has an option for each default, and a flag for each default that is False."""
    made = Parser(description=doc.splitlines()[0])
    defaults["results"] = RESULTS
    for name, default in defaults.items():
        options = {"help": f"{HELP.get(name, '')} [{default}]"}
        if default is False:
            options["action"] = "store_true"
        else:
            options["type"] = type(default)
            options["default"] = default
        if name == "device":
            options["choices"] = ("auto", "cpu", "cuda")
        made.add_argument(option_of(name), **options)
    return made


def ranks_parser(doc, **defaults):
    """The command line of a benchmark that starts the ranks that measure, see cases_of_ranks."""
    made = parser(doc, repeats=5, device="auto", tiny=False, **defaults)
    worker_help = "internal: this process is a rank; the file for rank 0's figures"
    made.add_argument("--worker", help=worker_help)
    return made


def option_of(name):
    """The command-line option of a name: `--run-id` for run_id."""
    return f"--{name.replace('_', '-')}"


def words_of(values):
    """The command-line words of train_gpt.py for a dict of configuration values."""
    words = []
    for name, value in values.items():
        words += [option_of(name), str(value)]
    return words


def config_of(track, runtime, **changes):
    """The track's Config with other values, those of a Stage's fields in all stages.

    What is drawn or measured is resolved, as when a run is opened."""
    config = train_gpt.with_values(train_gpt.TRACKS[track], changes)
    return train_gpt.resolve(config, runtime)


# ----- corpora


def python_documents(limit):
    """Python sources of the installed torch as byte tokens: real text everywhere.

    Returns one uint16 array a source, as many as it takes to reach `limit` tokens."""
    documents = []
    total = 0
    for path in sorted(Path(torch.__file__).parent.rglob("*.py")):
        content = path.read_bytes()
        if content:
            documents.append(np.frombuffer(content, np.uint8).astype(np.uint16))
            total += len(content)
        if total >= limit:
            break
    return documents


def random_documents(count, vocab_size, rng):
    """Random tokens below vocab_size, `count` of them, in documents of about 800.

    Frequencies follow Zipf's law, so that n-grams, and rows of the n-gram table, repeat much as
    in text."""
    share = np.cumsum(1 / np.arange(1, vocab_size + 1))
    tokens = np.searchsorted(share, rng.random(count) * share[-1]).astype(np.uint16)
    places = np.arange(1, count)
    cuts = rng.choice(places, size=max(1, count // 800), replace=False)
    return np.split(tokens, np.sort(cuts))


def write_corpus(folder, documents, eot_token, val_tokens):
    """Write documents (integer arrays) as a corpus of one training and one validation shard.

    The first documents, as many as hold val_tokens, are for validation. The folder appears when
    it is complete. Returns its path."""
    folder = Path(folder)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    ends = np.cumsum([len(document) for document in documents])
    cut = int(np.searchsorted(ends, val_tokens)) + 1
    write_shard(partial / "made_val_000000.bin", documents[:cut], eot_token)
    write_shard(partial / "made_train_000000.bin", documents[cut:], eot_token)
    with contextlib.suppress(OSError):  # another process was first
        partial.rename(folder)
    shutil.rmtree(partial, ignore_errors=True)
    return folder


def write_shard(path, documents, eot_token):
    """Write documents as one shard, each after an end-of-text token."""
    pieces = []
    for document in documents:
        pieces += [[eot_token], document]
    tokens = np.concatenate(pieces).astype("<u2")
    header = np.zeros(train_gpt.HEADER_INTS, dtype="<i4")
    header[:3] = [train_gpt.SHARD_MAGIC, train_gpt.SHARD_VERSION, len(tokens)]
    path.write_bytes(header.tobytes() + tokens.tobytes())


# ----- runs and ranks


def rank_command(script, world_size):
    """The words that start a script on so many processes; a single one needs no launcher."""
    if world_size == 1:
        return [sys.executable, str(script)]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    return [sys.executable, *launcher, str(script)]


def on_ranks(script, world_size, words, **options):
    """Run a script on so many processes of one thread each.

    Takes the options of subprocess.run, and returns what it returns."""
    command = [*rank_command(script, world_size), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, **options)


def device_of_ranks(wanted, world_size):
    """The type of device for so many ranks: with "auto", GPUs where there are as many."""
    if wanted != "auto":
        return wanted
    if torch.cuda.is_available() and torch.cuda.device_count() >= world_size:
        return "cuda"
    return "cpu"


def cases_of_ranks(script, arguments):
    """Start `script --worker FILE` at each of arguments.world_sizes.

    Returns (the cases of all, the type of the last one's device)."""
    cases = []
    device = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        for world_size in map(int, arguments.world_sizes.split(",")):
            out = Path(folder) / f"{world_size}.json"
            words = ["--worker", str(out), "--repeats", str(arguments.repeats)]
            words += ["--device", device_of_ranks(arguments.device, world_size)]
            if arguments.tiny:
                words.append("--tiny")
            on_ranks(script, world_size, words, check=True)
            found = json.loads(out.read_text())
            cases += found["cases"]
            device = found["device"]
    return cases, device


def work_as_rank(arguments, measure):
    """Be a rank that cases_of_ranks has started.

    measure(runtime) returns the cases of this world size; rank 0 leaves them in the file."""
    runtime = train_gpt.Runtime(arguments.device)
    cases = measure(runtime)
    if runtime.is_main:
        found = {"cases": cases, "device": runtime.device.type}
        Path(arguments.worker).write_text(json.dumps(found))
    runtime.close()


def train(folder, run_id, options, world_size=1, script="train_gpt.py"):
    """Run train_gpt.py, or a script that builds on it, from `folder`, as its users would.

    A run that is complete is not repeated. Returns its result.json.
    Raises SystemExit with the run's last words when it fails."""
    run = Path(folder) / "logs" / run_id
    if not (run / "result.json").is_file():
        shutil.rmtree(run, ignore_errors=True)
        words = ["--run-id", run_id, *options]
        captured = {"cwd": folder, "capture_output": True, "text": True}
        done = on_ranks(ROOT / script, world_size, words, **captured)
        if done.returncode:
            sys.exit(f"{run_id} failed: {(done.stdout + done.stderr)[-600:]}")
    return json.loads(portable((run / "result.json").read_text()))


def train_losses(folder):
    """The training losses in a run's folder; one a step where --log-every is 1."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event["train_loss"] for event in events if "train_loss" in event]


def log_tail(folder, run_id):
    """The run's log without the source that it begins with."""
    log = (Path(folder) / "logs" / run_id / "log.txt").read_text()
    _, _, tail = log.partition("===== END OF CODE =====\n")
    return portable(tail)


def portable(text):
    """The text with paths relative to the repository: results must not tell where it lay."""
    return text.replace(f"{ROOT}/", "")


def reference_attention(
    q,  # (T, H, D), as k and v are
    k,
    v,
    segment_start,  # (T,)
    window,
    scale,
):
    """The definition that every attention back end is tested against: (T, H, D), O(T^2) memory.

    Position i sees j with max(segment_start[i], i - window + 1) <= j <= i."""
    index = torch.arange(q.size(0), device=q.device)
    distance = index[:, None] - index[None, :]
    is_near = (distance >= 0) & (distance < window)
    visible = is_near & (index[None, :] >= segment_start[:, None])
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v)


def synchronize(device):
    """Wait for what was started on a GPU; on other devices nothing is left to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(function, device):
    """(seconds, result) of a call, together with what it started on the device."""
    synchronize(device)
    began = time.perf_counter()
    result = function()
    synchronize(device)
    return time.perf_counter() - began, result


# ----- records

RUN_LINE = re.compile(r"^run:.* device:(.+?) torch:.* started:(\S+)", re.MULTILINE)
FINAL_LINE = re.compile(r"^final val_loss:([\d.]+) train_time:(\d+)ms", re.MULTILINE)


def record_folders(track):
    """The folders of a track's records, oldest day first."""
    return sorted(path.parent for path in (ROOT / "records" / track).glob("*/train_gpt.py"))


def runs_of_record(folder):
    """What the logs of a record's own runs say of loss, training time (seconds), machine, start."""
    runs = []
    for path in sorted((folder / "logs").glob("*.txt")):
        *_, tail = path.read_text().rpartition("===== END OF CODE =====\n")
        device, started = RUN_LINE.search(tail).groups()
        loss, milliseconds = FINAL_LINE.search(tail).groups()
        figures = {"loss": float(loss), "seconds": int(milliseconds) / 1000}
        runs.append({"device": device, "started": started, **figures})
    return runs


# ----- machine and code


def triton_version():
    """The version of triton, or "none" where it is not installed."""
    try:
        import triton
    except ImportError:
        return "none"
    return triton.__version__


def environment(device):
    """What a figure depends on beside the configuration: machine, versions, commit, time."""
    commit, dirty = train_gpt.git_state()
    return {
        "device": train_gpt.device_name(torch.device(device)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": triton_version(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "commit": commit,
        "dirty": dirty,
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
    }


def environment_line(facts):
    """One line of text for the facts that environment() returns."""
    commit = facts["commit"][:12]
    if facts["dirty"]:
        commit += " with changes"
    return (
        f"{facts['device']}, {facts['threads']} threads, torch {facts['torch']}, "
        f"CUDA {facts['cuda']}, triton {facts['triton']}, Python {facts['python']}, "
        f"commit {commit}, {facts['date']}"
    )


def slug(text):
    """The text in small letters and digits, with a dash for all that lies between them."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def spread(values, digits):
    """`mean ± standard deviation`, the mean alone for one value."""
    text = f"{statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.{digits}f}"
    return text


# ----- output


def markdown_table(header, rows):
    """A table in Markdown, of cells of any type."""
    lines = []
    for cells in [header, ["---"] * len(header), *rows]:
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def write_results(folder, name, facts, data, text):
    """Write `data` as NAME.json and `text` as NAME.md, both with the environment.

    Each file is whole or absent."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = json.dumps({"environment": facts, **data}, indent=1)
    text = f"{text.rstrip()}\n\n{environment_line(facts)}"
    write_whole(folder / f"{name}.json", data + "\n")
    write_whole(folder / f"{name}.md", text + "\n")


def write_whole(path, content):
    """Write a text file beside its place, and move it there when it is complete."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(content)
    partial.replace(path)


@contextlib.contextmanager
def picture(path, *grid, **options):
    """The axes of a figure (matplotlib's subplots), which becomes a PNG when they are drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(*grid, layout="constrained", **options)
    yield axes
    figure.savefig(path, dpi=120)
    plt.close(figure)
