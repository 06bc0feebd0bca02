"""What the tests share: a tiny configuration, a tiny corpus, and ways to run the trainer."""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import train_gpt

ROOT = Path(train_gpt.__file__).resolve().parent
TRAINER = ROOT / "train_gpt.py"
# The environment in which Python takes text for ASCII.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
BYTES = hashlib.sha256(json.dumps([[*[1] * 256, 0], "bytes"]).encode()).hexdigest()  # vocabulary
EOT = 256  # every document of the byte corpus starts with it


def layers_of(count, mlp_only=(), **numbers):
    """Rows of Config.layers, as a command line has them: `numbers` says of a field in which layers
    it is set."""
    rows = []
    for number in range(count):
        row = {field: number in those for field, those in numbers.items()}
        row["attends"] = number not in mlp_only
        rows.append(row)
    return tuple(rows)


# Small enough that a step takes milliseconds, with every part of the model in use. What is not
# named is the track's.
TINY = {
    "track": "english",  # by default it is told why this one is taken
    "tokenizer": "bytes",
    "vocab_size": 257,
    "eot_token": EOT,
    "steps": 4,
    "micro_batch_tokens": 256,
    "micro_batches_a_pass": 1,
    "stages": ({"micro_batches": 2, "document_cap": 128, "windows": (32, 64)},),
    "mean_share": 0.0,
    "val_windows": (32, 64),
    "model_dim": 32,
    "layers": layers_of(2, is_long=(1,), value_embedding=(0,)),
    "head_dim": 16,
    "mlp_dim": 64,
    "mlp_reach": 0,
    "adam_lr": 0.015,
    "adam_every": 1,
    "ngram_orders": (2, 3, 4, 6),
    "ngram_rows": 1000,
    "copy_orders": (3, 5),
    "copy_reach": 64,
    "pointer_window": 32,
    "val_tokens": 1024,
    "val_sha256": "",
    "val_batch_tokens": 256,
    "val_every": 0,
    "log_every": 1,
    "seed": 1,
    "device": "cpu",
    "dtype": "float32",
    "matmul_precision": "highest",  # on each processor
    "compile": False,
}

NO_TABLE = {"ngram_orders": (), "copy_orders": ()}
ONE_LAYER = {"layers": layers_of(1, is_long=(0,), value_embedding=(0,))}

# The last layer is of each kind.
KINDS = {
    "is_long": (3,),
    "value_embedding": (0, 3),
    "shifted_keys": (0, 3),
    "paired_heads": (1, 3),
    "exclusive": (1, 3),
}
LAYERED = {"layers": layers_of(4, **KINDS), "mlp_reach": 2}
FEEDING = {"feeds_last": (0, 1), "decides_gates": (0, 2)}

# A run in which every number of a stage changes on the way, and with all kinds of rows and layers;
# six micro-batches suit 1, 2 and 3 ranks.
EARLY = {"micro_batches": 6, "document_cap": 96, "windows": (32, 64), "mtp_weights": (1.0, 0.5)}
LATE = {"micro_batches": 6, "document_cap": 192, "windows": (64, 128), "mtp_weights": (1.0,)}
RICH = {
    **TINY,
    "steps": 20,
    "micro_batch_tokens": 128,
    "stages": ({"start": 0.0, **EARLY}, {"start": 0.5, **LATE}),
    "val_windows": (64, 128),
    "untie_at": 0.25,
    "mean_share": 0.6,
    "adam_every": 2,
    "val_every": 10,
    "save_every": 10,
    "mlp_reach": 2,
    "layers": layers_of(4, **KINDS, **FEEDING),
}


def tiny_config(**changes):
    """The tiny Config; changes may name fields of a Stage, which then hold in all stages."""
    return train_gpt.with_values(train_gpt.TRACKS["english"], {**TINY, **changes})


def arguments(values):
    """Command-line words for a dict of configuration values."""
    return [
        word for key, value in values.items() for word in (f"--{key.replace('_', '-')}", str(value))
    ]


# ----- corpora


def write_shard(path, tokens, magic=20240520, version=1, count=None):
    """A shard in llm.c's format; magic, version and the header's token count can be made wrong."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    Path(path).write_bytes(header.tobytes() + np.asarray(tokens).astype("<u2").tobytes())
    return Path(path)


def byte_documents(count, seed=0):
    """`count` tokens of the standard library's sources, as documents of 20 to 400 bytes."""
    modules = (argparse, shutil, subprocess, tarfile)
    text = b"".join(Path(module.__file__).read_bytes() for module in modules)
    tokens, low = [], 0
    for length in np.random.default_rng(seed).integers(20, 400, size=count // 20 + 1):
        tokens += [EOT, *text[low : low + length]]
        low = (low + int(length)) % (len(text) - 400)
    return tokens[:count]


def make_corpus(folder, train_tokens=90_000, val_tokens=4_000, shards=2):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        tokens = byte_documents(train_tokens // shards, seed=shard)
        write_shard(folder / f"tiny_train_{shard:06d}.bin", tokens)
    write_shard(folder / "tiny_val_000000.bin", byte_documents(val_tokens, seed=99))
    return with_manifest(folder)


def with_manifest(folder, **fields):
    """The folder, after its manifest has been made that of the shards which are there, with some
    other fields."""
    shards = [
        {"file": path.name, "sha256": train_gpt.file_sha256(path)}
        for path in sorted(Path(folder).glob("*.bin"))
    ]
    manifest = {"tokenizer": "bytes", "vocab_size": 257, "eot_token": EOT, "shards": shards}
    manifest["token_bytes"] = [*[1] * 256, 0]
    manifest |= fields
    (folder / "manifest.json").write_text(json.dumps(manifest) + "\n")
    return folder


def documents_of(tokens):
    """The index at which the document of each token starts."""
    return np.maximum.accumulate(np.where(np.asarray(tokens) == EOT, np.arange(len(tokens)), 0))


def passage_of(tokens, places):
    """The Passage of the byte corpus whose segments are the single tokens at these places."""
    position = np.array(places)
    depth = position - documents_of(tokens)[position]
    return train_gpt.Passage(np.array(tokens, np.uint16), position, depth, np.arange(len(places)))


# ----- running the trainer


def log_of(folder):
    """The lines of a run's log behind the source."""
    return (folder / "log.txt").read_text().partition("===== END OF CODE =====\n")[2].splitlines()


@dataclass
class Run:
    """A finished process of the trainer and what it left behind."""

    code: int
    stdout: str
    stderr: str
    folder: Path  # logs/<run id>
    source: str = ""  # of the trainer, when it was started

    @property
    def lines(self):
        return self.stdout.splitlines()

    @property
    def log(self):
        return log_of(self.folder)

    @property
    def events(self):
        """Of each logged step {"step": its number, "train_loss" or "val_loss": ..., ...}."""
        number = r"(\w+):(-?[\d.]+|nan|inf)"
        lines = [line for line in self.log if line.startswith("step:")]
        return [{key: float(value) for key, value in re.findall(number, line)} for line in lines]

    def losses(self, name):
        """{step: loss} of the steps that have one of this name; of steps made twice the last."""
        return {int(event["step"]): event[name] for event in self.events if name in event}

    @property
    def train_losses(self):
        return self.losses("train_loss")

    @property
    def val_losses(self):
        return self.losses("val_loss")

    @property
    def result(self):
        """{name: text} of what the last lines of the log say."""
        kinds = "comms:", "validity:", "final "
        lines = [line for line in self.log[-8:] if line.startswith(kinds)]
        return dict(re.findall(r"([\w/]+)[:=](\S+)", " ".join(lines)))

    def checkpoint(self, name="checkpoint.pt"):
        return torch.load(self.folder / name, weights_only=True)


def refusal(run):
    """The one line of a run that refused its input, after checking that it did so properly."""
    assert run.code == 2, run.stdout
    assert len(run.lines) == 1 and run.lines[0].startswith("status:error "), run.stdout
    return run.lines[0]


def python(*words, cwd=ROOT, **variables):
    """A finished process of Python with these words; variables: of the environment."""
    options = {"cwd": cwd, "env": {**os.environ, **variables}, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *map(str, words)], **options)


def environment():
    """The variables of a child process: one thread, no trace of a launcher."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in launcher}
    places = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # perhaps of torch
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": places, "CUDA_VISIBLE_DEVICES": ""}


@contextlib.contextmanager
def launched(cwd, command, values, stderr=subprocess.STDOUT, **variables):
    """A script with the trainer's words as a running process, whose output is piped and which is
    not left behind whatever happens; variables: of the environment."""
    process = subprocess.Popen(
        [sys.executable, *command, *arguments(values)],
        cwd=cwd,
        env={**environment(), **variables},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()  # a launcher passes it on to its ranks
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()


def assert_bitwise(actual, expected, where=""):
    """Equal tensors bit for bit, through nested dicts and lists."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_bitwise(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_bitwise(*pair, f"{where}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape, where
        one, other = (tensor.detach().cpu().contiguous() for tensor in (actual, expected))
        is_same = torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
        assert is_same, f"{where} differs"
    else:
        assert actual == expected, where


def assert_same_end(run, whole):
    """A run has left bit for bit what another one has, and its losses."""
    for part in ("step", "model", "groups", "rng"):
        assert_bitwise(run.checkpoint()[part], whole.checkpoint()[part], part)
    assert run.result["val_loss"] == whole.result["val_loss"]
    assert run.train_losses == whole.train_losses


def randomise(trainer, seed=0):
    """Give every weight values at which every path of the network matters (not zero, not huge)."""
    generator = torch.Generator().manual_seed(seed)
    spread = {"query_key": 0.2, "value_output": 0.2, "mlp": 0.2, "embed": 0.7, "head": 0.3}
    with torch.no_grad():
        for name, param in trainer.model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            centre = 1.0 if name.endswith("_scale") else 0.0
            param.copy_(centre + spread.get(train_gpt.bank_name(name), 0.5) * noise)
    trainer.table.weight.copy_(0.3 * torch.randn(trainer.table.weight.shape, generator=generator))


def read(trainer, tokens):
    """The MicroBatch of the first tokens, as many as a training micro-batch has, and its summed
    rows."""
    config, table = trainer.config, trainer.table
    tokens = np.asarray(tokens, np.uint16)
    passage = train_gpt.contiguous_passage(tokens, EOT, 0, config.micro_batch_tokens)
    plan = train_gpt.plan_rows([passage], config, trainer.runtime)
    micro_batch = train_gpt.make_pass([passage], config, trainer.runtime.device)
    return micro_batch, table.summed(plan.slots, plan.signs, table.values_of(plan, "test"))


def content_of(trainer, step, folder):
    """What a run with this trainer keeps in a checkpoint after so many steps, which it writes as
    checkpoint.pt to the folder."""
    run = object.__new__(train_gpt.Run)  # without its corpus
    run.config, run.runtime, run.trainer = trainer.config, trainer.runtime, trainer
    run.log, run.clock = train_gpt.Log(is_main=True), train_gpt.Clock(trainer.runtime)
    run.folder, run.step = folder, step
    run.loss_tokens = 0
    run.saved = []
    run.corpus = SimpleNamespace(manifest={"sha256": "none", "vocabulary_sha256": BYTES})
    run.save("checkpoint.pt")
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def make_trainer(random_weights=True, seed=0, runtime=None, **changes):
    """A Trainer of the tiny model, of this process alone or of a rank's runtime; with random
    weights everywhere unless told otherwise."""
    trainer = train_gpt.Trainer(tiny_config(**changes), runtime or train_gpt.Runtime("cpu"))
    if random_weights:
        randomise(trainer, seed)
    return trainer
