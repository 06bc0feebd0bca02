"""Show that a rewrite of train_gpt.py trains as the version before it did: the training losses of both, step by step.

    python benchmarks/trajectories.py [--before COMMIT] [--rules RULE ...] [--world-sizes 1,2,4]

Both sides, the train_gpt.py of --before and the working one, take 20 float32 steps of a tiny model in which every
schedule changes on the way, for each world size, update rule of the matrices, layout of the matrices on the ranks, way
to keep the n-gram table, and pair of update cycles: 180 cases. They get the same words on the command line, which is
the interface that versions share. A process imports each side once and forks the ranks of its runs, because a start of
Python takes longer than a run. Results: benchmarks/results/trajectories.{json,md}. Exit status 1 if a loss differs by
more than 1e-6. Rules named by --expected-to-differ do not count, and their differences are told apart.
"""
import contextlib
import functools
import importlib.util
import io
import itertools
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common  # noqa: E402
import train_gpt  # noqa: E402

BEFORE = "ecccfa1"
RULES = ("muon", "soap", "soap_muon", "kl_soap", "adam")
LAYOUTS = ("whole", "rows", "cols")
OLD_COMMS = {"replicated": "rows", "sharded": "row_sharded"}  # what older versions call the ways to keep the table
CYCLES = ((1, 1), (3, 2))  # (ngram_every, adam_every)
TOLERANCE = 1e-6
# Sums over powers of two are scaled exactly. The head is untied after step 4, where a cycle of Adam's ends.
CONFIG = {
    "track": "nano", "run_id": "run", "device": "cpu", "dtype": "float32", "compile": False, "seed": 1, "log_every": 1,
    "steps": 20, "micro_batch_tokens": 256, "micro_batches": ((0.0, 4), (0.8, 8)), "val_tokens": 512, "untie_at": 0.2,
    "document_cap": ((0.0, 96), (0.5, 192)), "windows": ((0.0, (32, 64)), (0.5, (64, 128))), "long_layers": (1,),
    "mtp_weights": ((0.0, (1.0, 0.5)), (0.5, (1.0,))), "value_embedding_layers": (0,), "model_dim": 32, "mlp_dim": 64,
    "num_layers": 2, "head_dim": 16, "basis_every": 4, "one_sided_above": 48, "ngram_orders": (2, 3, 5),
    "ngram_rows": 4096, "ngram_decay": 0.01, "copy_orders": (3, 5), "copy_reach": 256, "index_orders": (4,),
    "index_bits": 12, "index_share": 0.25}


# ----- one side: a process that has imported one version of the trainer

def load(file):
    """Import the trainer in `file` as this process's module train_gpt."""
    spec = importlib.util.spec_from_file_location("train_gpt", file)
    module = sys.modules["train_gpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def rank_main(rank, world_size, port, words, comms):
    """The process of one rank, in the folder of its run, where a file receives its output."""
    trainer = sys.modules["train_gpt"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    sys.modules.update(matplotlib=None, records=None)  # without them no plot is drawn; it takes longer than the steps
    with contextlib.redirect_stdout(io.StringIO()) as help_text, contextlib.suppress(SystemExit):
        trainer.main(["--help"])
    if OLD_COMMS["sharded"] in help_text.getvalue():
        comms = OLD_COMMS[comms]
    output = os.open(f"rank{rank}.txt", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.exit(trainer.main([*words, "--ngram-comms", comms]))


def losses_of(corpus, case):
    """The training loss of every step of one case, by the trainer that this process has imported."""
    world_size, rule, layout, comms, (ngram_every, adam_every) = case
    words = common.words_of({**CONFIG, "data": corpus, "matrix_update": rule, "matrix_shard": layout,
                             "ngram_every": ngram_every, "adam_every": adam_every})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        fork, place = multiprocessing.get_context("fork"), (world_size, port, words, comms)
        ranks = [fork.Process(target=rank_main, args=(rank, *place)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"{case} failed: {Path('rank0.txt').read_text()[-600:]}")
        return common.train_losses("logs/run")


# ----- both sides

def compare(files, cases):
    """[{"case", "difference": the largest over the steps, "first" and "last": losses of the first file}, ...]"""
    found, spawn = [], multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        corpus = common.write_corpus(Path(folder, "corpus"), common.python_documents(400_000),
                                     train_gpt.EOT_TOKEN["bytes"], CONFIG["val_tokens"])
        pools = [ProcessPoolExecutor(1, spawn, load, (str(file),)) for file in files]
        try:
            runs = [pool.map(functools.partial(losses_of, str(corpus)), cases) for pool in pools]
            for case, before, after in zip(cases, *runs):
                difference = max(abs(a - b) for a, b in zip(before, after, strict=True))
                found.append({"case": case, "difference": difference, "first": before[0], "last": before[-1]})
                print(f"{case}: {difference:.1e}", file=sys.stderr, flush=True)
        finally:
            for pool in pools:
                pool.shutdown(cancel_futures=True)
    return found


def table_of(found, rules):
    """The largest difference over the layouts of the matrices, for each rule in a column of its own."""
    rows = {}
    for row in found:
        world_size, rule, _, comms, cycles = row["case"]
        line = rows.setdefault((world_size, comms, *cycles), dict.fromkeys(rules, 0.0))
        line[rule] = max(line[rule], row["difference"])
    return common.markdown_table(["world size", "table", "ngram_every", "adam_every", *rules],
                                 [[*key, *(f"{value:.1e}" for value in line.values())] for key, line in rows.items()])


def git(*words):
    return subprocess.run(["git", *words], cwd=common.ROOT, check=True, capture_output=True, text=True).stdout


def main(argv=None):
    parser = common.parser(__doc__, before=BEFORE, world_sizes="1,2,4")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--expected-to-differ", nargs="+", choices=RULES, default=(), metavar="RULE")
    arguments = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the sides, which import torch
    world_sizes, commit = map(int, arguments.world_sizes.split(",")), git("rev-parse", arguments.before).strip()
    cases = list(itertools.product(world_sizes, arguments.rules, LAYOUTS, OLD_COMMS, CYCLES))
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder, "train_gpt.py")
        before.write_text(git("show", f"{commit}:train_gpt.py"))
        found = compare([before, train_gpt.__file__], cases)
    counted = [row["difference"] for row in found if row["case"][1] not in arguments.expected_to_differ]
    apart = [f"{rule} {max(row['difference'] for row in found if row['case'][1] == rule):.1e}"
             for rule in arguments.rules if rule in arguments.expected_to_differ]
    table, worst = table_of(found, arguments.rules), max(counted, default=0.0)
    note = (f"The largest difference of all is {worst:.1e}, in {len(counted)} cases of {CONFIG['steps']} steps." +
            f" Expected to differ, and not counted: {', '.join(apart)}." * bool(apart))
    text = f"{table}\n\n{note}\n\nThe version before is that of commit {commit[:12]}. The working version:"
    data = {"before": commit, "cases": found}
    common.write_results(arguments.results, "trajectories", common.environment("cpu"), data, text)
    print(f"{table}\n\n{note}\nmax_difference:{worst:.1e} cases:{len(counted)}")
    return int(not worst <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
