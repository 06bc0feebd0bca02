#!/usr/bin/env bash
# One command for everything: set-up, data, launch, tests. `./run.sh --help` says how.
# What this script says goes to stderr: stdout and the exit status are the trainer's own.
if [ -z "${BASH_VERSION:-}" ]; then exec bash "$0" "$@"; fi # sh run.sh
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    cat <<'TEXT'
./run.sh [TRACK] [--key value ...]   train on NVIDIA's GPUs or on a CPU; README.md lists the tracks
./run.sh TRACK --help                list every key with its default
./run.sh TRACK --check               check device, data, memory and disk without a step
./run.sh test [pytest arguments]     run the tests that protect results; with --all all of them

A call first makes what is missing: .venv with requirements.txt, the track's data. A run has one
rank a GPU, or one a core. PYTHON=/path/to/python chooses the Python (3.11 or newer) of a new .venv.
TEXT
    exit
fi
python=.venv/bin/python
installed=.venv/installed-requirements.txt # written last: a killed install is done again
if ! cmp -s requirements.txt "$installed"; then
    base=$python
    if [ ! -e .venv ]; then base=${PYTHON:-python3}; fi
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "run.sh: $base in $PWD is not Python 3.11 or newer; install one and call" \
            "PYTHON=/path/to/python ./run.sh; if .venv is there, move it away" >&2
        exit 2
    fi
    if [ ! -e .venv ]; then "$base" -m venv .venv >&2; fi
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >&2
    "$python" -m pip install --disable-pip-version-check --requirement requirements.txt >&2
    cp requirements.txt "$installed"
fi
export PYTORCH_NVML_BASED_CUDA_CHECK=1 # CUDA must not start before the ranks are forked
# A folder here outlives reboots that clear /tmp: only the first run compiles.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$PWD/.cache/inductor}"
if [ "${1:-}" = test ]; then
    exec "$python" -m pytest --numprocesses=2 --dist=worksteal "${@:2}"
fi
if [[ ${1:-} == [!-]* ]]; then set -- --track "$@"; fi
exec "$python" - "$@" <<'PYTHON'
import os
import signal
import subprocess
import sys
from pathlib import Path

import continual  # its track becomes known
import train_gpt
from train_gpt import dist, torch

BUILDERS = {
    "data/english": ["data/text.py"],
    "data/verse": ["data/text.py", "--corpus", "verse"],
    "data/fineweb10B": ["data/fineweb.py"],
}


def read(path):
    return path.read_text() if path.is_file() else ""


def limits(*names):
    """The numbers in files of this process' control groups, v1 or v2, and of the groups above."""
    for group in read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = group.split(":", 2)
        own = Path("/sys/fs/cgroup", controllers, path.strip("/"))
        for folder in (own, *own.parents):
            words = " ".join(read(folder / name) for name in names).split()
            if words and words[0].isdigit():  # neither "max" nor -1
                yield [int(word) for word in words]


def choose_ranks(config):
    """The most of 8, 4, 2 and 1 ranks that the machine and the micro-batches of steps allow."""
    if config.device != "cpu" and torch.cuda.is_available():
        most = torch.cuda.device_count()
        room = f"{most} GPU(s)"
    else:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        for quota, period in limits("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
            cores = min(cores, quota / period)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            memory = min([memory, *(limit for [limit] in limits(name))])
        # Coarse: torch, the n-gram table, and the vocabulary's weights with their state
        needed = 2**30 + config.model_dim * (4 * config.ngram_rows + 16 * config.vocab_size)
        most = min(cores, memory / needed)
        room = f"{cores:g} core(s), memory for {memory / needed:.1f} rank(s)"
    counts = {stage.micro_batches for stage in config.stages}
    fitting = [n for n in (2, 4, 8) if n <= most and not any(count % n for count in counts)]
    ranks = max(fitting, default=1)
    print(f"run.sh: {ranks} rank(s): {room}, {counts} micro-batches a step", file=sys.stderr)
    return ranks


def train(rank):
    """Train as one rank, a fork of this process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.exit(script.main(words))


def pass_on(number, frame):
    """Ask the ranks to end after their step. At a second signal they end at once."""
    asked.append(number)
    for process in group.processes:
        process.terminate()


words = sys.argv[1:]
script = continual if words[:2] == ["--track", "continual"] else train_gpt
try:
    config, _ = train_gpt.resumed(train_gpt.parse_command_line(words))
except (train_gpt.ConfigError, OSError):
    sys.exit(script.main(words))  # which answers --help, --check and a wrong call
if config.track == "continual":
    script = continual
if config.data in BUILDERS and not any(Path(config.data).glob("[!.]*_val_*.bin")):
    status = subprocess.call([sys.executable, *BUILDERS[config.data]], stdout=sys.stderr)
    if status:
        sys.exit(status)
ranks = choose_ranks(config)
if ranks == 1:
    sys.exit(script.main(words))
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store above
asked = []
group = torch.multiprocessing.start_processes(train, nprocs=ranks, join=False, start_method="fork")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
        signal.signal(number, pass_on)
try:
    # What hangs 60 seconds after a failure is killed. After a signal a rank may still write.
    while not group.join(timeout=1, grace_period=600 if asked else 30):
        pass
except torch.multiprocessing.ProcessExitedException as error:
    if error.exit_code > 0:
        sys.exit(error.exit_code)  # the rank has said why
    reason = ": killed, perhaps by the system for memory" if error.exit_code == -9 else ""
    print(f"status:error rank {error.error_index} was ended by {error.signal_name}{reason}")
    sys.exit(1)
PYTHON
