"""What the benchmarks share: command lines, temporary corpora, runs and ranks, machine and code, tables, results."""
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
import train_gpt  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"

# Overrides that shrink any track to seconds on one core: for trying out a benchmark's logic, not for
# measuring. Layers stay, since fields of the Config name them by number.
TINY = {"model_dim": 32, "head_dim": 16, "mlp_dim": 64, "micro_batch_tokens": 512, "ngram_rows": 4096,
        "windows": ((0.0, (64, 128)),), "document_cap": ((0.0, 256),), "steps": 6, "val_tokens": 2048, "val_batch_tokens": 0,
        "micro_batches": ((0.0, 2), (0.5, 4)), "index_bits": 12, "index_share": 0.25, "tokenizer": "bytes",
        "compile": False, "val_sha256": ""}
N_GRAMS_ALONE = {"copy_orders": (), "index_orders": ()}
NO_TABLE = {**N_GRAMS_ALONE, "ngram_orders": ()}


# ----- command lines

HELP = {"data": "folder of the corpus", "work": "folder of the runs", "results": "folder of the results",
        "tiny": "tiny shapes, not compiled: tries out the script, and measures nothing", "pretrain_steps": "on Python",
        "jobs": "runs side by side, one thread each", "rounds": "of measured steps", "before": "commit to compare with",
        "seconds": "training time of each baseline", "seed": "the first one", "seeds": "repetitions of all arms"}


class Parser(argparse.ArgumentParser):
    def parse_args(self, *words):
        """Refuses a launcher's ranks: each would measure while the others do, and write the same results."""
        arguments = super().parse_args(*words)
        if "WORLD_SIZE" in os.environ and not getattr(arguments, "worker", None):
            self.exit(2, f"error: {self.prog} starts its ranks itself; start it with python, not with torchrun\n")
        return arguments


def parser(doc, **defaults):
    """The command line of the benchmark with this docstring: an option for each default, a flag where that is False."""
    made = Parser(description=doc.splitlines()[0])
    for name, default in {**defaults, "results": RESULTS}.items():
        kind = {"action": "store_true"} if default is False else {"type": type(default), "default": default}
        made.add_argument(f"--{name.replace('_', '-')}", help=f"{HELP.get(name, '')} [{default}]", **kind,
                          **{"choices": ("auto", "cpu", "cuda")} if name == "device" else {})
    return made


def ranks_parser(doc, **defaults):
    """The same for a benchmark whose cases are measured by ranks that it starts itself, see cases_of_ranks."""
    made = parser(doc, repeats=5, device="auto", tiny=False, **defaults)
    made.add_argument("--worker", help="internal: this process is a rank; the file for rank 0's figures")
    return made


def words_of(values):
    """The command-line words of train_gpt.py for a dict of configuration values."""
    return [word for key, value in values.items() for word in (f"--{key.replace('_', '-')}", str(value))]


# ----- corpora

def python_documents(limit):
    """Python sources of the installed torch as byte tokens, about `limit` in all: real text everywhere."""
    documents, total = [], 0
    for path in sorted(Path(torch.__file__).parent.rglob("*.py")):
        content = path.read_bytes()
        if content:
            documents.append(np.frombuffer(content, np.uint8).astype(np.uint16))
            total += len(content)
        if total >= limit:
            break
    return documents


def random_documents(count, vocab_size, rng):
    """Random tokens below vocab_size, `count` of them, in documents of about 800. Frequencies follow Zipf's
    law, so that n-grams, and rows of the n-gram table, repeat much as in text."""
    share = np.cumsum(1 / np.arange(1, vocab_size + 1))
    tokens = np.searchsorted(share, rng.random(count) * share[-1]).astype(np.uint16)
    cuts = np.sort(rng.choice(np.arange(1, count), size=max(1, count // 800), replace=False))
    return np.split(tokens, cuts)


def write_corpus(folder, documents, eot_token, val_tokens):
    """Write documents (integer arrays) as a corpus of one training and one validation shard: the first
    documents, as many as hold val_tokens, are for validation. The folder appears when complete."""
    folder = Path(folder)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    cut = int(np.searchsorted(np.cumsum([len(document) for document in documents]), val_tokens)) + 1
    splits = {"val": documents[:cut], "train": documents[cut:]}
    for split, parts in splits.items():
        pieces = [piece for document in parts for piece in ([eot_token], document)]
        tokens = np.concatenate(pieces).astype("<u2")
        header = np.zeros(train_gpt.HEADER_INTS, dtype="<i4")
        header[:3] = train_gpt.SHARD_MAGIC, train_gpt.SHARD_VERSION, len(tokens)
        (partial / f"made_{split}_000000.bin").write_bytes(header.tobytes() + tokens.tobytes())
    with contextlib.suppress(OSError):  # another process was first
        partial.rename(folder)
    shutil.rmtree(partial, ignore_errors=True)
    return folder


# ----- runs and ranks

def rank_command(script, world_size):
    """The words that start a script on so many processes; a single one needs no launcher."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    return [sys.executable, *(launcher if world_size > 1 else []), str(script)]


def on_ranks(script, world_size, words, **options):
    """Run a script on so many processes of one thread each. Takes and returns what subprocess.run does."""
    return subprocess.run([*rank_command(script, world_size), *words], env={**os.environ, "OMP_NUM_THREADS": "1"},
                          **options)


def cases_of_ranks(script, arguments):
    """Start `script --worker FILE` at each of arguments.world_sizes: on GPUs where there are as many, else on the CPU.
    Returns (the cases of all, the type of the last one's device)."""
    cases, device = [], "cpu"
    with tempfile.TemporaryDirectory() as folder:
        for world_size in map(int, arguments.world_sizes.split(",")):
            enough = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
            chosen = arguments.device if arguments.device != "auto" else "cuda" if enough else "cpu"
            out = Path(folder) / f"{world_size}.json"
            on_ranks(script, world_size, ["--worker", str(out), "--device", chosen, "--repeats", str(arguments.repeats),
                                          *["--tiny"] * arguments.tiny], check=True)
            found = json.loads(out.read_text())
            cases, device = cases + found["cases"], found["device"]
    return cases, device


def work_as_rank(arguments, measure):
    """Be such a rank: measure(runtime) returns the cases of this world size, and rank 0 leaves them in the file."""
    runtime = train_gpt.Runtime(arguments.device)
    cases = measure(runtime)
    if runtime.is_main:
        Path(arguments.worker).write_text(json.dumps({"cases": cases, "device": runtime.device.type}))
    runtime.close()


def train(folder, run_id, options, world_size=1, script="train_gpt.py"):
    """Run train_gpt.py, or a script that builds on it, from `folder`, as its users would, unless that run is complete.
    Returns its result.json.

    Raises SystemExit with the run's last words when it fails."""
    run = Path(folder) / "logs" / run_id
    if not (run / "result.json").is_file():
        shutil.rmtree(run, ignore_errors=True)
        done = on_ranks(ROOT / script, world_size, ["--run-id", run_id, *options], cwd=folder,
                        capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{run_id} failed: {(done.stdout + done.stderr)[-600:]}")
    return json.loads(portable((run / "result.json").read_text()))


def train_losses(folder):
    """The training losses that a run has left in its folder; as many as its steps where --log-every is 1."""
    events = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [event["train_loss"] for event in events if "train_loss" in event]


def log_tail(folder, run_id):
    """The run's log without the source that it begins with."""
    return portable((Path(folder) / "logs" / run_id / "log.txt").read_text().partition("===== END OF CODE =====\n")[2])


def portable(text):
    """The text with paths relative to the repository: results must not tell where it lay."""
    return text.replace(f"{ROOT}/", "")


def reference_attention(q, k, v, segment_start, window, scale):
    """The definition that every attention back end is tested against: (T, H, D) each; position i sees j with
    max(segment_start[i], i - window + 1) <= j <= i. O(T^2) memory."""
    index = torch.arange(q.size(0), device=q.device)
    distance = index[:, None] - index[None, :]
    visible = (distance >= 0) & (distance < window) & (index[None, :] >= segment_start[:, None])
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def timed(function, device):
    """(seconds, result) of a call, together with what it started on the device."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    began = time.perf_counter()
    result = function()
    synchronize()
    return time.perf_counter() - began, result


# ----- machine and code

def environment(device):
    """What a figure depends on beside the configuration: machine, versions, commit, time."""
    commit, dirty = train_gpt.git_state()
    try:
        import triton
        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return {"device": train_gpt.device_name(torch.device(device)), "torch": torch.__version__,
            "cuda": torch.version.cuda or "none", "triton": triton_version, "python": platform.python_version(),
            "threads": torch.get_num_threads(), "commit": commit, "dirty": dirty,
            "date": f"{datetime.now():%Y-%m-%d %H:%M}"}


def environment_line(facts):
    commit = facts["commit"][:12] + (" with changes" if facts["dirty"] else "")
    return (f"{facts['device']}, {facts['threads']} threads, torch {facts['torch']}, CUDA {facts['cuda']}, "
            f"triton {facts['triton']}, Python {facts['python']}, commit {commit}, {facts['date']}")


def slug(text):
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def spread(values, digits):
    """`mean ± standard deviation`, the mean alone for one value."""
    text = f"{statistics.mean(values):.{digits}f}"
    return text + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


# ----- output

def markdown_table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def write_results(folder, name, facts, data, text):
    """Write `data` as NAME.json and `text` as NAME.md, both with the environment; each file is whole or absent."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = json.dumps({"environment": facts, **data}, indent=1)
    for ending, content in ((".json", data), (".md", f"{text.rstrip()}\n\n{environment_line(facts)}")):
        partial = folder / f".{name}{ending}.partial"
        partial.write_text(content + "\n")
        partial.replace(folder / f"{name}{ending}")


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
