"""Forty one-line mutations of train_gpt.py, and whether the tests that are aimed at them notice.

    python tests/mutations.py               all of them, some minutes
    python tests/mutations.py rotary polar  those of these names

Each is made alone, in a copy of the tree, and the tests of its row run there; without a mutation
these must pass. mutations.md beside this file is the table of results. Where the trainer's text
changes, a row follows it: what is broken stays the same.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600  # after which tests hang, which is a failure, too
FAILED = (1, 2)  # pytest's exit status where tests fail, or cannot be collected
# A run of a test needs no history, corpus or record, but it does need the package of the records.
LEFT_OUT = shutil.ignore_patterns(".*", "logs", "__pycache__", "*.bin", "nano", "mini")


class Mutation(NamedTuple):
    """A change of one line."""

    name: str
    old: str  # stands once in train_gpt.py
    new: str
    tests: str  # words for pytest: the tests that must notice


MUTATIONS = [
    # --- schedules
    Mutation(
        "cooldown",
        "left = (config.steps - step) / max(1.0, config.cooldown * config.steps)",
        "left = (config.steps - step - 1) / max(1.0, config.cooldown * config.steps)",
        "trainer/test_loop.py",
    ),
    Mutation(
        "momentum",
        "return low + (high - low) * min(1.0, risen, left)",
        "return low + (high - low) * min(1.0, risen)",
        "trainer/test_loop.py",
    ),
    # --- shards and their order
    Mutation(
        "shard's length",
        "header[2] == held > 0,",
        "0 < header[2] <= held,",
        "trainer/test_data.py",
    ),
    Mutation(
        "shard's sha256",
        "manifest is None or manifest.get(path.name) == file_sha256(path)",
        "manifest is None or path.name in manifest",
        "trainer/test_data.py",
    ),
    Mutation(
        "share of the index",
        "return np.array(tokens[: cut + 1]), np.array(tokens[cut:])",
        "return np.array(tokens[:cut]), np.array(tokens[cut:])",
        "trainer/test_past.py",
    ),
    Mutation(
        "order of a second epoch",
        "rng = np.random.default_rng([self.config.seed, opened])",
        "rng = np.random.default_rng([self.config.seed, 0])",
        "trainer/test_data.py",
    ),
    Mutation(
        "cap of documents",
        "taken = min(high - low, cap, missing)",
        "taken = min(high - low, missing)",
        "trainer/test_data.py",
    ),
    # --- rows of the table
    Mutation(
        "hash across documents",
        "if i - start >= order:",
        "if i >= order:",
        "trainer/test_past.py",
    ),
    Mutation(
        "reach of copies",
        "(match >= positions - config.copy_reach)",
        "(match > positions - config.copy_reach)",
        "trainer/test_past.py",
    ),
    Mutation(
        "votes of the index",
        "elif votes == NO_VOTE:",
        "elif votes <= ONE_VOTE:",
        "trainer/test_past.py",
    ),
    Mutation(
        "ranges of ranks",
        "min((self.rank + 1) * chunk, count)",
        "(self.rank + 1) * chunk",
        "trainer/test_optimizer.py",
    ),
    Mutation(
        "exchange of rows",
        "sums = sum_groups(sums, *self.plan.merge)",
        "sums = sum_groups(sums, *self.plan.merge) / 2",
        "trainer/test_ngram_table.py",
    ),
    # --- layers
    Mutation(
        "rotary",
        "second * cos - first * sin",
        "second * cos + first * sin",
        "trainer/test_model.py",
    ),
    Mutation(
        "attention's bias",
        "first = torch.maximum(segment_start.view(-1, block, 1), query - window + 1)",
        "first = torch.maximum(segment_start.view(-1, block, 1), query - window)",
        "trainer/test_model.py",
    ),
    Mutation(
        "shifted keys",
        ".masked_fill(is_first[:, None, None, None], 0)",
        "",
        "trainer/test_model.py",
    ),
    Mutation(
        "pairs of heads",
        "return y.unflatten(0, (-1, 2)).transpose(1, 2).flatten(1, 2)",
        "return y.unflatten(0, (-1, 2)).flatten(1, 2)",
        "trainer/test_model.py",
    ),
    Mutation(
        "own values",
        "return y - share * along * v",
        "return y - along * v",
        "trainer/test_model.py",
    ),
    # --- loss
    Mutation(
        "gradient of a target twice",
        "share = target_weights[chunk] / scale.clamp_min(1e-30)",
        "share = weights[chunk] / scale.clamp_min(1e-30)",
        "trainer/test_kernels.py",
    ),
    Mutation(
        "what a sampled row stands for",
        "share = (vocab - distinct_targets) / (count - distinct_targets).clamp_min(1)",
        "share = vocab / (count - distinct_targets).clamp_min(1)",
        "trainer/test_kernels.py",
    ),
    Mutation(
        "tokens ahead",
        "is_same_segment = start[ahead:] == start[: length - ahead]",
        "is_same_segment = start[ahead:] == start[ahead:]",
        "trainer/test_model.py",
    ),
    # --- update rules
    Mutation(
        "adam's decay",
        "weight.mul_(1 - hyper.lr * hyper.decay)",
        "weight.mul_(1 - hyper.decay)",
        "trainer/test_optimizer.py",
    ),
    Mutation(
        "muon of tall matrices",
        "lr = hyper.lr * max(1.0, rows / columns) ** 0.5",
        "lr = hyper.lr * max(1.0, rows / columns)",
        "trainer/test_optimizer.py",
    ),
    Mutation(
        "cautious decay",
        "is_agreed = update * weight >= 0",
        "is_agreed = update * weight <= 0",
        "trainer/test_optimizer.py",
    ),
    Mutation(
        "polar express",
        "(3.8916678022926607, -2.772484153217685, 0.5060648178503393),",
        "(3.7916678022926607, -2.772484153217685, 0.5060648178503393),",
        "trainer/test_optimizer.py",
    ),
    Mutation(
        "soap's moments",
        "moment.copy_(moment.gather(side.axis, index.expand_as(moment)))",
        "moment.copy_(moment)",
        "trainer/test_soap.py",
    ),
    Mutation(
        "kl factors",
        "spectrum = torch.where(mean > 0, spectrum / mean, 1.0).clamp_min(KL_FLOOR)",
        "spectrum = torch.where(mean > 0, spectrum, 1.0).clamp_min(KL_FLOOR)",
        "trainer/test_soap.py",
    ),
    Mutation(
        "rejected bases",
        "is_good = is_good & is_orthonormal",
        "is_good = is_good.clone()",
        "trainer/test_soap.py",
    ),
    # --- parameter groups
    Mutation(
        "mean gradient",
        "means[name] = grad[: len(part)].div_(self.tokens)",
        "means[name] = grad[: len(part)].div_(self.tokens / self.every)",
        "trainer/test_optimizer.py",
    ),
    Mutation(
        "turns of bases",
        "turn = (step - self.owned_range(name)[0]) % every",
        "turn = step % every",
        "trainer/test_distributed.py",
    ),
    Mutation(
        "sum over ranks",
        "return part, dist.reduce_scatter_single(part, tensor, async_op=True)",
        "return part, dist.reduce_scatter_single(part, tensor, dist.ReduceOp.MAX, async_op=True)",
        "trainer/test_distributed.py",
    ),
    Mutation(
        "untied embedding",
        'value.copy_(state["head"][key])',
        "value.copy_(value)",
        "trainer/test_optimizer.py",
    ),
    # --- gates
    Mutation(
        "gate: unmoved",
        '"unmoved": moved.item() == 0,',
        '"unmoved": True,',
        "trainer/test_gates.py",
    ),
    Mutation(
        "gate: normalised",
        '"normalised": is_exact and abs(again / tokens - reported) < 1e-9,',
        '"normalised": is_exact,',
        "trainer/test_gates.py",
    ),
    Mutation(
        "gate: of all ranks",
        'wait(trainer.runtime.all_reduce(moved, "validation"))',
        "wait(None)",
        "trainer/test_gates.py",
    ),
    # --- a run's life
    Mutation(
        "clock during validation",
        "if run.is_due(config.val_every):\n                with clock.stopped():",
        "if run.is_due(config.val_every):\n                with contextlib.nullcontext():",
        "trainer/test_loop.py",
    ),
    Mutation(
        "checkpoint's sha256",
        "is_whole = file_sha256(path).encode() in beside.read_bytes()",
        "is_whole = beside.is_file()",
        "trainer/test_checkpoint.py",
    ),
    Mutation(
        "loader's place",
        'self.loader_state = content["loader"]',
        "self.loader_state = None",
        "trainer/test_checkpoint.py",
    ),
    Mutation(
        "weights that are not finite",
        "if not (math.isfinite(low) and math.isfinite(high)):",
        "if not (math.isfinite(low) or math.isfinite(high)):",
        "trainer/test_checkpoint.py",
    ),
    Mutation(
        "overrides",
        'log.line("overrides:" + json.dumps(overrides))',
        'log.line("overrides:" + json.dumps({}))',
        "trainer/test_loop.py",
    ),
    Mutation(
        "second signal",
        "elif time.monotonic() - first[0] > 1:",
        "elif time.monotonic() - first[0] > 1e9:",
        "trainer/test_loop.py",
    ),
]


def tests_fail(folder, tests):
    """Whether tests fail in a copy of the tree."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--all", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=folder / "tests",
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return True
    if done.returncode not in (0, *FAILED):
        sys.exit(f"pytest ends with status {done.returncode}: {done.stdout[-2000:]}")
    return done.returncode in FAILED


def choose(names, source):
    """The mutations of these names, or all; each must find its text once in the source."""
    known = [mutation.name for mutation in MUTATIONS]
    unknown = set(names) - set(known)
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: no such mutation; they are {', '.join(known)}")
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    for mutation in chosen:
        count = source.count(mutation.old)
        if count != 1:
            sys.exit(f"{mutation.name}: its old text stands {count} times in train_gpt.py")
    return chosen


def main(names):
    source = (ROOT / "train_gpt.py").read_text("utf-8")
    chosen = choose(names, source)
    all_tests = sorted({word for mutation in chosen for word in mutation.tests.split()})
    caught = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "tree")
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
        if tests_fail(folder, all_tests):
            sys.exit(f"tests fail without any mutation: {' '.join(all_tests)}")
        for mutation in chosen:
            mutated = source.replace(mutation.old, mutation.new)
            (folder / "train_gpt.py").write_text(mutated, "utf-8")
            is_caught = tests_fail(folder, mutation.tests.split())
            caught += is_caught
            print(f"{'caught' if is_caught else 'MISSED'}  {mutation.name}", flush=True)
    print(f"mutations: {caught}/{len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
