"""What the benchmarks share: temporary corpora, the description of machine and code, tables, results."""
import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
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
        "windows": ((0.0, (64, 128)),), "document_cap": ((0.0, 256),), "steps": 6, "val_tokens": 2048,
        "micro_batches": ((0.0, 2), (0.5, 4)), "tokenizer": "bytes", "compile": False, "val_sha256": ""}


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


# ----- runs

def train(folder, run_id, options, world_size=1, threads=1):
    """Run train_gpt.py from `folder`, as its users would, unless that run is complete. Returns its result.json.

    Raises SystemExit with the run's last words when it fails."""
    run = Path(folder) / "logs" / run_id
    if not (run / "result.json").is_file():
        shutil.rmtree(run, ignore_errors=True)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
        launcher *= world_size > 1
        command = [sys.executable, *launcher, str(ROOT / "train_gpt.py"), "--run_id", run_id, *options]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": str(threads)})
        if done.returncode:
            sys.exit(f"{run_id} failed: {(done.stdout + done.stderr)[-600:]}")
    return json.loads(portable((run / "result.json").read_text()))


def log_tail(folder, run_id):
    """The run's log without the source that it begins with."""
    return portable((Path(folder) / "logs" / run_id / "log.txt").read_text().partition("===== END OF CODE =====\n")[2])


def portable(text):
    """The text with paths relative to the repository: results must not tell where it lay."""
    return text.replace(f"{ROOT}/", "")


# ----- machine and code

def environment(device):
    """What a figure depends on beside the configuration: machine, versions, commit, time."""
    commit, dirty = train_gpt.git_state()
    try:
        import triton
        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return {"device": train_gpt.device_name(device), "torch": torch.__version__,
            "cuda": torch.version.cuda or "none", "triton": triton_version,
            "python": platform.python_version(), "threads": torch.get_num_threads(), "commit": commit,
            "dirty": dirty, "date": f"{datetime.now():%Y-%m-%d %H:%M}"}


def environment_line(facts):
    commit = facts["commit"][:12] + (" with changes" if facts["dirty"] else "")
    return (f"{facts['device']}, {facts['threads']} threads, torch {facts['torch']}, CUDA {facts['cuda']}, "
            f"triton {facts['triton']}, Python {facts['python']}, commit {commit}, {facts['date']}")


def slug(text):
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


# ----- output

def markdown_table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def write_results(folder, name, data, text):
    """Write `data` as NAME.json and `text` as NAME.md; each file is whole or absent."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for ending, content in ((".json", json.dumps(data, indent=1) + "\n"), (".md", text.rstrip("\n") + "\n")):
        partial = folder / f".{name}{ending}.partial"
        partial.write_text(content)
        partial.replace(folder / f"{name}{ending}")
