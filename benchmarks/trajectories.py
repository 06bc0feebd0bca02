"""Show that a rewrite of train_gpt.py trains as the version before it did, step by step.

    python benchmarks/trajectories.py [--before COMMIT] [--rules RULE ...] [--world-sizes 1,2,4]
                                      [--dtypes float32 float64]

Both sides, the train_gpt.py of --before and the working one, take 20 steps of a tiny model in which
every number of a stage changes on the way, for each type of numbers, world size, update rule of the
matrices, and cycle of Adam's steps: 60 cases. Their training losses of every step and their final
validation losses are compared. In float32 rounding alone makes differences far above 1e-6 where
SOAP steps along eigenvectors that it decides: the page tells how far the version before differs
from itself between world sizes. So all is compared in float64, too, where nothing but another
computation can differ as much.

CASE describes the run once; former_values() says it in the words of versions that had no stages
yet, and CHANGED_ON_PURPOSE brings those up to what was changed on purpose. A process imports each
side once and forks the ranks of its runs, because a start of Python takes longer than a run.
Results: benchmarks/results/trajectories.{json,md}. Exit status 1 if a loss differs by more than
1e-6, and in float32 by ten times what the version before differs from itself. Rules named by
--expected-to-differ do not count, and their differences are told apart.
"""

import contextlib
import functools
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common

BEFORE = "3df8563"
RULES = ("muon", "soap", "soap_muon", "kl_soap", "adam")
ADAM_EVERY = (1, 2)
DTYPES = ("float32", "float64")
TOLERANCE = 1e-6
# Sums over powers of two are scaled exactly. The head is untied after step 4, where a cycle of
# Adam's ends. The index of the training text is left out: it reads another way than it did. With
# seed 1 a value projection's first gradient under SOAP has rank 20 of 32, so that rounding chooses
# twelve eigenvectors along which the next step goes, in float64, too.
CASE = {
    "track": "nano",
    "run_id": "run",
    "device": "cpu",
    "compile": False,
    "seed": 2,
    "log_every": 1,
    "steps": 20,
    "micro_batch_tokens": 256,
    "stages": (
        {
            "start": 0.0,
            "micro_batches": 4,
            "document_cap": 96,
            "windows": (32, 64),
            "lr_mul": 1.0,
            "mtp_weights": (1.0, 0.5),
        },
        {
            "start": 0.5,
            "micro_batches": 4,
            "document_cap": 192,
            "windows": (64, 128),
            "lr_mul": 1.3,
            "mtp_weights": (1.0,),
        },
        {
            "start": 0.8,
            "micro_batches": 8,
            "document_cap": 192,
            "windows": (64, 128),
            "lr_mul": 1.3,
            "mtp_weights": (1.0,),
        },
    ),
    "untie_at": 0.2,
    "long_layers": (1,),
    "value_embedding_layers": (0,),
    "model_dim": 32,
    "mlp_dim": 64,
    "num_layers": 2,
    "head_dim": 16,
    "basis_every": 4,
    "one_sided_above": 48,
    "momentum_start": 0.85,
    "momentum_peak": 0.95,
    "momentum_warmup": 0.1,
    "momentum_cooldown": 0.2,
    "ngram_orders": (2, 3, 5),
    "ngram_rows": 4096,
    "copy_orders": (3, 5),
    "copy_reach": 256,
    "index_orders": (),
    "val_tokens": 1024,
    "val_batch_tokens": 256,
    "val_windows": (64, 256),
}

# What versions without stages did otherwise, and what the working one does: (what, text, text).
CHANGED_ON_PURPOSE = (
    (
        "Adam's epsilon is 1e-8",
        ".sqrt() + 1e-10)",
        ".sqrt() + 1e-8)",
    ),
    (
        "the losses of the second-next token are a mean over all tokens of a step",
        "weight / (phase.tokens - ahead)",
        "weight / phase.tokens",
    ),
    (
        "the norm's backward pass is autograd's",
        "norm = RMSNorm.apply\n",
        "def norm(x, cos=None, sin=None):\n"
        "    y = F.rms_norm(x, (x.size(-1),), eps=torch.finfo(torch.float32).eps)\n"
        "    return y if cos is None else rotate(y, cos, sin)\n",
    ),
    (
        "SOAP's momentum begins with the eigenbases",
        'state["momentum"].lerp_(grad, 1 - hyper.betas[0])\n    count.add_(known)',
        'state["momentum"].lerp_(grad, (1 - hyper.betas[0]) * known)\n    count.add_(known)',
    ),
    (
        "and its mean is corrected by their steps",
        "/ (1 - hyper.betas[0] ** hyper.step)\n    second = moment",
        "/ (1 - hyper.betas[0] ** count).clamp_min(1e-8)\n    second = moment",
    ),
)


# ----- one side: a process that has imported one version of the trainer


def load(file):
    """Import the trainer in `file` as this process's module train_gpt."""
    spec = importlib.util.spec_from_file_location("train_gpt", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)


def has_stages(source):
    """Whether this is the source of a trainer whose schedules are rows of stages."""
    return "class Stage:" in source


def brought_up(source):
    """The source of a trainer, with what was changed on purpose since then where it has no stages.

    Each replaced text must be there exactly once."""
    if has_stages(source):
        return source
    for what, text, replacement in CHANGED_ON_PURPOSE:
        if source.count(text) != 1:
            raise SystemExit(f"{what}: the version before has not this text once: {text!r}")
        source = source.replace(text, replacement)
    return source


def in_double(source):
    """The source of a trainer that calculates in float64 wherever it would in float32."""
    source = re.sub("(?<!set_)float32", "float64", source).replace(".float()", ".double()")
    first = "import torch.nn.functional as F\n"
    if source.count(first) != 1:
        raise SystemExit(f"a trainer has not this line once: {first}")
    return source.replace(first, f"{first}\ntorch.set_default_dtype(torch.float64)\n")


def former_values(values):
    """The values of a case for a trainer without stages: a schedule for each field of a stage."""
    values = dict(values)
    stages = values.pop("stages")
    for name in ("micro_batches", "document_cap", "windows", "lr_mul", "mtp_weights"):
        values[name] = tuple((stage["start"], stage[name]) for stage in stages)
    values["windows"] += ((1.0, values.pop("val_windows")),)
    values["lr_stages"] = values.pop("lr_mul")
    momentum = ("momentum_start", "momentum_peak", "momentum_warmup", "momentum_cooldown")
    values["momentum"] = tuple(values.pop(name) for name in momentum)
    return {**values, "ngram_comms": "sharded", "ngram_decay": 0.0}


def rank_main(rank, world_size, port, words):
    """The process of one rank, in the folder of its run, where a file receives its output."""
    trainer = sys.modules["train_gpt"]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # Without these no plot is drawn, which takes longer than the steps.
    sys.modules.update(matplotlib=None, records=None)
    output = os.open(f"rank{rank}.txt", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.exit(trainer.main(words))


def losses_of(values, case):
    """The losses of one case by the trainer that this process has imported: those of training,
    step by step, and the final validation's. values: what all cases share."""
    world_size, rule, adam_every = case
    values = {**values, "matrix_update": rule, "adam_every": adam_every}
    if not hasattr(sys.modules["train_gpt"], "Stage"):
        values = former_values(values)
    words = common.words_of(values)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        fork = multiprocessing.get_context("fork")
        ranks = [
            fork.Process(target=rank_main, args=(rank, world_size, port, words))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"{case} failed: {Path('rank0.txt').read_text()[-600:]}")
        result = json.loads(Path("logs/run/result.json").read_text())
        return [*common.train_losses("logs/run"), result["val_loss"]]


# ----- both sides


def compare(sources, corpus, dtype, cases):
    """Run cases in a dtype with the trainers of two sources.

    Returns [{"dtype", "case", "before": losses of the first, "after": of the second}, ...]."""
    found = []
    values = {**CASE, "data": corpus, "dtype": dtype}
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        runs = []
        for number, source in enumerate(sources):
            file = Path(folder, str(number), "train_gpt.py")
            file.parent.mkdir()
            file.write_text(in_double(source) if dtype == "float64" else source)
            pool = stack.enter_context(ProcessPoolExecutor(1, spawn, load, (str(file),)))
            stack.callback(pool.shutdown, cancel_futures=True)
            runs.append(pool.map(functools.partial(losses_of, values), cases))
        for case, before, after in zip(cases, *runs, strict=True):
            row = {"dtype": dtype, "case": case, "before": before, "after": after}
            found.append(row)
            print(f"{dtype} {case}: {difference(before, after):.1e}", file=sys.stderr, flush=True)
    return found


def difference(losses, others):
    """The largest difference between two runs' losses."""
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


def of_rounding(found, row):
    """How far the version before differs from itself, in a row's case, between world sizes."""
    dtype, (_, *rest) = row["dtype"], row["case"]
    runs = [
        other["before"]
        for other in found
        if other["dtype"] == dtype and list(other["case"][1:]) == rest
    ]
    return max(difference(one, another) for one in runs for another in runs)


def is_too_far(found, row):
    """Whether the two sides differ in a case by more than the order of sums explains."""
    allowed = TOLERANCE
    if row["dtype"] == "float32":
        allowed = max(allowed, 10 * of_rounding(found, row))
    return not difference(row["before"], row["after"]) <= allowed


def table_of(found, rules):
    """A table for each dtype.

    It has a line for each world size and cycle of Adam's steps, one more for the version before
    between world sizes, and a column for each rule."""
    parts = []
    for dtype in dict.fromkeys(row["dtype"] for row in found):
        lines = {}
        for row in found:
            world_size, rule, adam_every = row["case"]
            if row["dtype"] == dtype:
                cell = f"{difference(row['before'], row['after']):.1e}"
                lines.setdefault((world_size, adam_every), {})[rule] = cell
                own = f"{of_rounding(found, row):.1e}"
                lines.setdefault(("before, between them", adam_every), {})[rule] = own
        keys = sorted(lines, key=lambda key: (isinstance(key[0], str), key))
        rows = [[*key, *(lines[key][rule] for rule in rules)] for key in keys]
        parts.append(common.markdown_table([f"{dtype}, world size", "adam_every", *rules], rows))
    return "\n\n".join(parts)


def git(*words):
    command = ["git", *words]
    done = subprocess.run(command, cwd=common.ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def worst_of(found, dtype, rules):
    """The largest difference between the sides in a dtype and some rules."""
    rows = [row for row in found if row["dtype"] == dtype and row["case"][1] in rules]
    return max((difference(row["before"], row["after"]) for row in rows), default=0.0)


def text_of(found, rules, apart, source):
    """The page: the tables, and what they say. apart: rules that do not count."""
    counted = [rule for rule in rules if rule not in apart]
    dtypes = dict.fromkeys(row["dtype"] for row in found)
    worst = [f"{worst_of(found, dtype, counted):.1e} in {dtype}" for dtype in dtypes]
    note = (
        f"The largest differences are {' and '.join(worst)}, in {len(found)} cases of "
        f"{CASE['steps']} steps and a validation."
    )
    if apart:
        told = [f"{rule} {worst_of(found, 'float64', [rule]):.1e}" for rule in apart]
        note += f" Expected to differ, and not counted: {', '.join(told)}."
    if not has_stages(source):
        changes = "; ".join(what for what, _, _ in CHANGED_ON_PURPOSE)
        note += (
            f"\n\nThe version before was brought up to what was changed on purpose: {changes}. "
            "The decay of the table is 0 there, and neither side has an index of the training text."
        )
    return f"{table_of(found, rules)}\n\n{note}"


def main(argv=None):
    parser = common.parser(__doc__, before=BEFORE, world_sizes="1,2,4")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument(
        "--expected-to-differ", nargs="+", choices=RULES, default=(), metavar="RULE"
    )
    arguments = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the sides, which import torch
    world_sizes = map(int, arguments.world_sizes.split(","))
    commit = git("rev-parse", arguments.before).strip()
    former = git("show", f"{commit}:train_gpt.py")
    sources = [brought_up(former), Path(train_gpt.__file__).read_text()]
    cases = list(itertools.product(world_sizes, arguments.rules, ADAM_EVERY))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        documents, eot_token = common.python_documents(400_000), train_gpt.EOT_TOKEN["bytes"]
        place = Path(folder, "corpus")
        corpus = common.write_corpus(place, documents, eot_token, CASE["val_tokens"])
        for dtype in arguments.dtypes:
            found += compare(sources, str(corpus), dtype, cases)
    apart = [rule for rule in arguments.rules if rule in arguments.expected_to_differ]
    text = text_of(found, arguments.rules, apart, former)
    page = f"{text}\n\nThe version before is that of commit {commit[:12]}. The working version:"
    data = {"before": commit, "cases": found}
    common.write_results(arguments.results, "trajectories", common.environment("cpu"), data, page)
    too_far = [row for row in found if row["case"][1] not in apart and is_too_far(found, row)]
    print(f"{text}\ncases:{len(found)} too_far:{len(too_far)}")
    return int(bool(too_far))


if __name__ == "__main__":
    sys.exit(main())
