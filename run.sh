#!/usr/bin/env bash
# One command for everything: set-up, data, launch, tests. `./run.sh --help` says how.
# All that this script says goes to stderr: stdout, and the exit status, are the trainer's own.
# With line ends of Windows, which every word then ends with, this text is not empty.
line_end=
if [ -n "$line_end" ]; then # told in lines that end in a comment
    printf '%s\n' "run.sh: it has line ends of Windows; run: tr -d '\r' <run.sh >unix.sh && cat unix.sh >run.sh" >&2 #
    exit 2 #
fi #
if [ -z "${BASH_VERSION:-}" ]; then exec bash "$0" "$@"; fi # sh run.sh
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
venv_python=.venv/bin/python

say() { echo "run.sh: $*" >&2; }

usage() {
    cat <<'TEXT'
./run.sh [TRACK] [--key value ...]   set up what is missing, then train; the keys go to the track's script
./run.sh TRACK --help                every key, with its default
./run.sh TRACK --check               everything but the steps: device, data, memory, disk
./run.sh test [pytest arguments]     set up, then run the tests that protect results; with --all all of them

Tracks: english-net (fineweb's recipe at small scale, a minute on a laptop), fineweb (1 to 8 GPUs), continual (a trained model goes on to verse; needs --init-from RUN). Without
TRACK it is fineweb where CUDA and FineWeb shards are present, else english-net. It starts one rank a GPU, or one a core. The
last line of a run names its log and plot.
The first call makes .venv, installs requirements.txt and builds the track's data. It uses uv where
that is present, and a .venv that is there; PYTHON=/path/to/python chooses the Python (3.11 or newer) of a new one.
It runs on Linux and macOS, on NVIDIA's GPUs or a CPU; Windows (but for WSL) and Apple's GPUs are not supported.
TEXT
}

# Print the first Python that is new enough: what PYTHON names, else the usual names.
find_python() {
    local name
    if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3 python3.13 python3.12 python3.11; fi
    for name in "$@"; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    say "needs Python 3.11 or newer, and $1 is $("$1" --version 2>/dev/null || echo missing);" \
        "install one, or name it: PYTHON=/path/to/python3.12 ./run.sh"
    return 2
}

# Make .venv where there is none, and install requirements.txt into it. The stamp is a copy of that
# file, written last: a killed install is done again, and so is one whose requirements have changed.
# An environment that is there, whoever has made it, is used, and never erased.
set_up() {
    local stamp=.venv/installed-requirements.txt base
    if cmp -s requirements.txt "$stamp"; then
        return
    fi
    rm -f "$stamp"
    if [ ! -e .venv ] && [ ! -L .venv ]; then
        base=$(find_python)
        say "making .venv with $base"
        if command -v uv >/dev/null; then
            uv venv --python "$base" .venv >&2
        else
            "$base" -m venv .venv >&2
        fi
    elif ! "$venv_python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        say "$PWD/.venv has no Python of 3.11 or newer that runs; move it away, and call this again"
        return 2
    fi
    say "installing requirements.txt"
    if command -v uv >/dev/null; then
        uv pip install --python "$venv_python" --requirement requirements.txt >&2
    elif "$venv_python" -m pip --version >/dev/null 2>&1 || "$venv_python" -m ensurepip >&2; then
        "$venv_python" -m pip install --disable-pip-version-check --requirement requirements.txt >&2
    else
        say "$PWD/.venv has no pip: install uv, or move .venv away, and call this again"
        return 2
    fi
    cp requirements.txt "$stamp"
}

# Build the data that a run lacks, choose its number of ranks, and start it. What the trainer is
# going to refuse goes to it as it is, since its message is the better one.
launch() {
    # What train_gpt.py sets ahead of its import of torch, which comes sooner here.
    export THP_MEM_ALLOC_ENABLE="${THP_MEM_ALLOC_ENABLE:-1}"
    exec "$venv_python" - "$@" <<'PYTHON'
import logging
import os
import subprocess
import sys
import uuid
from pathlib import Path

import continual  # its track becomes known
import torch
import train_gpt
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

ENGLISH = ["data/text.py"]
BUILDERS = {  # those of the corpora that this repository can build; others are the user's own
    "data/english": [ENGLISH],
    "data/verse": [ENGLISH, [*ENGLISH, "--corpus", "verse"]],
    "data/fineweb10B": [["data/fineweb.py"]],
}


def say(text):
    print(f"run.sh: {text}", file=sys.stderr, flush=True)


def read(path):
    """The words of a file of the system, none where it is absent."""
    return Path(path).read_text().split() if os.access(path, os.R_OK) else []


def cores_and_memory():
    """What this process may use of both, by its affinity and its container's limits."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    quota = read("/sys/fs/cgroup/cpu.max")
    if quota and quota[0] != "max":
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    free = read("/proc/meminfo")
    if "MemAvailable:" in free:
        memory = 1024 * int(free[free.index("MemAvailable:") + 1])
    limit = read("/sys/fs/cgroup/memory.max")
    if limit and limit[0] != "max":
        used = [*read("/sys/fs/cgroup/memory.stat"), "anon", 0]  # anon: what is no cache
        memory = min(memory, int(limit[0]) - int(used[used.index("anon") + 1]))
    return cores, memory


def memory_of(config, ranks):
    """Bytes that a rank takes, about: torch itself, weights with gradients and state, and its part
    of the table."""
    dim = config.model_dim
    tables = 2 + len(config.value_embedding_layers)
    matrices = config.num_layers * (4 * dim + 2 * config.mlp_dim)
    weights = dim * (config.vocab_size * tables + matrices)
    shared = 4 * dim * config.ngram_rows
    return 0.75 * 2**30 + 16 * weights + shared / ranks


def choose_ranks(config):
    """The number of ranks, which is said with its reason."""
    counts = {train_gpt.stage_at(config, step).micro_batches for step in range(config.steps)}
    if config.device != "cpu" and torch.cuda.is_available():
        most = torch.cuda.device_count()
        room = f"{most} GPU(s)"
    else:
        most, memory = cores_and_memory()
        room = f"{most} core(s), {memory / 2**30:.1f} GiB of memory"
        if torch.backends.mps.is_available():
            say("Apple GPUs are not supported: it computes on the CPU")
    for ranks in (8, 4, 2, 1):
        fits = ranks <= most and all(count % ranks == 0 for count in counts)
        if "core" in room:
            fits = fits and ranks * memory_of(config, ranks) <= memory
        if fits:
            break
    room += f" and {sorted(counts)} micro-batches a step"
    say(f"{ranks} rank(s), the most of 8, 4, 2 and 1 that {room} allow")
    return ranks


words = sys.argv[1:]
named = dict(zip(words, words[1:])).get("--track")
ranks = 1
try:
    given = train_gpt.parse_command_line(words)
    train_gpt.require("help" not in given, "help is no run")
    config, _ = train_gpt.resumed(given)
except (train_gpt.ConfigError, OSError):
    pass
else:
    named = config.track
    shards = [any(Path(config.data).glob(f"*_{split}_*.bin")) for split in ("train", "val")]
    if not all(shards):
        for builder in BUILDERS.get(config.data, []):
            built = subprocess.run([sys.executable, *builder], stdout=sys.stderr)
            if built.returncode:
                sys.exit(built.returncode)
    if "check" not in given:
        ranks = choose_ranks(config)
def train(words):
    """A rank, forked from this process, which has imported all that it needs."""
    sys.exit(script.main(words))


script = continual if named == "continual" else train_gpt
if ranks == 1:
    train(words)
try:
    if config.device != "cpu" and torch.cuda.is_available():  # what has seen CUDA cannot fork
        launcher = ["--standalone", f"--nproc_per_node={ranks}"]
        torchrun.run(torchrun.parse_args([*launcher, script.__file__, *words]))
    else:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        launcher = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            start_method="fork",
        )
        elastic_launch(launcher, train)(words)
except ChildFailedError as error:  # each rank has said why
    _, failure = error.get_first_failure()
    sys.exit(failure.exitcode if failure.exitcode > 0 else 1)
except SignalException:
    sys.exit(130)
PYTHON
}

run_tests() {
    local argument
    for argument in "$@"; do
        case $argument in tests/*) # the caller chose some of them, of which none is left out
            exec "$venv_python" -m pytest --all "$@" ;;
        esac
    done
    # Shared out among two processes, file by file, for what a file sets up stays in one; in the order of
    # tests/conftest.py.
    exec "$venv_python" -m pytest tests --numprocesses=2 --dist=worksteal "$@"
}

case ${1:-} in
--help | -h)
    usage
    exit ;;
esac
case $(uname -s) in
MINGW* | MSYS* | CYGWIN*)
    say "Windows is not supported: call it in WSL, https://learn.microsoft.com/windows/wsl"
    exit 2 ;;
esac
set_up
# A cache inside the repository outlives reboots that clear /tmp: only the first run compiles.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$PWD/.cache/inductor}"
if [ "${1:-}" = test ]; then
    shift
    run_tests "$@"
fi
case ${1:-} in
'' | -*) ;;
*)  track=$1
    shift
    set -- --track "$track" "$@" ;;
esac

launch "$@"
