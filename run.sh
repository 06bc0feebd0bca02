#!/usr/bin/env bash
# One command for everything: set-up, data, launch, tests. `./run.sh --help` says how.
# All that this script says goes to stderr: stdout, and the exit status, are the trainer's own.
if [ -z "${BASH_VERSION:-}" ]; then exec bash "$0" "$@"; fi # sh run.sh
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
python=.venv/bin/python
installed=.venv/installed-requirements.txt # written last: a killed install is done again
is_new='import sys; sys.exit(sys.version_info < (3, 11))'
names=(python3 python3.13 python3.12 python3.11)
if [ -n "${PYTHON:-}" ]; then names=("$PYTHON"); fi

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    cat <<'TEXT'
./run.sh [TRACK] [--key value ...]   set up what is missing, then train; the keys go to the track's script
./run.sh TRACK --help                every key, with its default
./run.sh TRACK --check               everything but the steps: device, data, memory, disk
./run.sh test [pytest arguments]     set up, then run the tests that protect results; with --all all of them

README.md lists the tracks. Without TRACK it is fineweb where CUDA and FineWeb shards are present, else the CPU's track.
The first call makes .venv, installs requirements.txt and builds the track's data. A .venv that is there is used;
PYTHON=/path/to/python chooses the Python (3.11 or newer) of a new one. A run has one rank a GPU, or one a core.
It needs Linux, macOS or WSL, and computes on NVIDIA's GPUs or on a CPU.
TEXT
    exit
fi
if [ ! -e .venv ]; then
    for name in "${names[@]}"; do
        if "$name" -c "$is_new" 2>/dev/null; then
            echo "run.sh: making .venv with $name" >&2
            "$name" -m venv .venv >&2
            break
        fi
    done
fi
if ! cmp -s requirements.txt "$installed"; then
    if ! "$python" -c "$is_new" 2>/dev/null; then
        echo "run.sh: needs Python 3.11 or newer, which neither $PWD/.venv nor ${names[*]} is;" \
            "install one, or call PYTHON=/path/to/python ./run.sh, and move away a .venv that is there" >&2
        exit 2
    fi
    echo "run.sh: installing requirements.txt" >&2
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >&2
    "$python" -m pip install --disable-pip-version-check --requirement requirements.txt >&2
    cp requirements.txt "$installed"
fi
export PYTORCH_NVML_BASED_CUDA_CHECK=1 # it asks for GPUs without CUDA, which a process that forks cannot hand on
# A cache inside the repository outlives reboots that clear /tmp: only the first run compiles.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$PWD/.cache/inductor}"
if [ "${1:-}" = test ]; then
    case "$*" in
    *" tests/"*) exec "$python" -m pytest --all "${@:2}" ;; # of chosen tests none is left out
    *) exec "$python" -m pytest tests --numprocesses=2 --dist=worksteal "${@:2}" ;;
    esac
fi
if [[ ${1:-} == [!-]* ]]; then set -- --track "$@"; fi
exec "$python" - "$@" <<'PYTHON'
import math
import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import continual  # its track becomes known
import train_gpt
from train_gpt import dist, torch

BUILDERS = {
    "data/english": ["data/text.py"],
    "data/verse": ["data/text.py", "--corpus", "verse"],
    "data/fineweb10B": ["data/fineweb.py"],
}


def read(*path):
    """The words of a file of the system, none where it is absent."""
    return Path(*path).read_text().split() if os.access(Path(*path), os.R_OK) else []


def limits(*names):
    """The numbers in files of this process' control groups, its own and those above it."""
    for group in read("/proc/self/cgroup"):
        _, controllers, name = group.split(":", 2)  # no controllers: cgroup v2
        own = Path("/sys/fs/cgroup", controllers, name.strip("/"))
        for folder in (own, *own.parents):
            words = [word for name in names for word in read(folder, name)]
            if words and words[0].isdigit():  # neither `max` nor -1: these are no limits
                yield [int(word) for word in words]


def choose_ranks(config):
    """The number of ranks, which is said with its reason."""
    dim = config.model_dim
    tables = config.vocab_size * (2 + len(config.layers_with("value_embedding")))
    weights = dim * (tables + len(config.layers) * (4 * dim + 2 * config.mlp_dim))
    # Torch itself; weights with gradients and state; rows of n-grams
    needed = 0.75 * 2**30 + 16 * weights + 4 * dim * config.ngram_rows
    free = read("/proc/meminfo")
    memory = 1024 * int(free[free.index("MemAvailable:") + 1]) if free else math.inf
    for limit, *_ in limits("memory.max", "memory.limit_in_bytes"):
        memory = min(memory, limit)
    most = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        most = len(os.sched_getaffinity(0))
    for quota, period in limits("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        most = max(1, min(most, quota // period))
    room = f"{most} core(s), {memory / 2**30:.1f} GiB of memory for {needed / 2**30:.1f} a rank"
    if config.device != "cpu" and torch.cuda.is_available():
        most = torch.cuda.device_count()
        room, needed = f"{most} GPU(s)", 0
    counts = sorted({stage.micro_batches for stage in config.stages})
    for ranks in (8, 4, 2, 1):
        is_divisor = not any(count % ranks for count in counts)
        if ranks <= most and ranks * needed <= memory and is_divisor:
            break
    reason = f"the most of 8, 4, 2 and 1 that {room} and {counts} micro-batches a step allow"
    if needed > memory:
        reason = f"which may end for lack of memory, or crawl: {room}"
    print(f"run.sh: {ranks} rank(s), {reason}", file=sys.stderr, flush=True)
    return ranks


def train(rank):
    """A rank: a fork of this process, which has imported all that it needs."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.exit(script.main(words))


def pass_on(number, frame):
    """A first signal ends the ranks behind their step, another one a second later at once."""
    asked.append(time.monotonic())
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, number if asked[-1] < asked[0] + 1 else signal.SIGKILL)


words = sys.argv[1:]
track, ranks = "".join(words[1:2]), 1
try:
    config, _ = train_gpt.resumed(train_gpt.parse_command_line(words))
except (train_gpt.ConfigError, OSError):
    pass  # --help and --check, and what the script refuses with a better message
else:
    track = config.track
    if config.data in BUILDERS and not any(Path(config.data).glob("[!.]*_val_*.bin")):
        done = subprocess.run([sys.executable, *BUILDERS[config.data]], stdout=sys.stderr)
        if done.returncode:
            sys.exit(done.returncode)
    ranks = choose_ranks(config)
script = continual if track == "continual" else train_gpt
if ranks == 1:
    sys.exit(script.main(words))
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store above, which no rank takes along
fork = get_context("fork")
processes = [fork.Process(target=train, args=[rank]) for rank in range(ranks)]
asked = []
for process in processes:
    process.start()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
        signal.signal(number, pass_on)
first = None  # that failed; the others see it at their next collective, and end by themselves
seconds_left = 60  # until what hangs is ended, as NCCL does
codes = [None]
while None in codes:
    time.sleep(0.05)
    codes = [process.exitcode for process in processes]
    failed = [(code, rank) for rank, code in enumerate(codes) if code]
    first = first or min(failed, default=None)  # the code of a signal is negative
    if first and not asked:
        seconds_left -= 0.05
    if seconds_left < 0:
        for process in processes:
            process.kill()
code, rank = first or (0, 0)
if code < 0:
    status = f"error rank {rank} was ended by {signal.Signals(-code).name}"
    if -code == signal.SIGKILL:
        status += ": killed, perhaps by the system for memory"
    print(f"status:{'interrupted' if asked else status}", flush=True)
    code = 130 if asked else 1
sys.exit(code)
PYTHON
