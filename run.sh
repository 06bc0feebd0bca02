#!/usr/bin/env bash
# ./run.sh [TRACK] [--key value ...]   train on NVIDIA's GPUs or a CPU; README.md has the tracks
# ./run.sh TRACK --help                list every key with its default
# ./run.sh TRACK --check               check device, data, memory and disk without a step
# ./run.sh test [pytest arguments]     run the tests that protect results; with --all all of them
# A call first makes what is missing: .venv with requirements.txt, and the track's data. 1, 2, 4 or
# 8 ranks have a GPU or a core each, and equal shares of a step. PYTHON=/path/to/python chooses the
# Python (3.11 or newer) of a new .venv. Set-up and data report to stderr, the trainer to stdout.
if [ -z "${BASH_VERSION:-}" ]; then exec bash "$0" "$@"; fi # sh run.sh
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
if [[ ${1:-} =~ ^(-h|--help)$ ]]; then exec sed -n '2,8s/^# \{0,1\}//p' run.sh; fi
python=.venv/bin/python
if ! cmp -s requirements.txt .venv/installed-requirements.txt; then
    if [ -e .venv ]; then base=$python; else base=${PYTHON:-python3}; fi
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "run.sh: $base is older than Python 3.11; move .venv away, set PYTHON=/path/to/one" >&2
        exit 2
    fi
    if [ ! -e .venv ]; then "$base" -m venv .venv >&2; fi
    "$python" -m pip install --disable-pip-version-check --requirement requirements.txt >&2
    cp requirements.txt .venv/installed-requirements.txt # last: a killed install is done again
fi
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$PWD/.cache/inductor}" # outlives /tmp
export PYTORCH_NVML_BASED_CUDA_CHECK=1 # CUDA must not start before the ranks are forked
if [[ ${1:-} == test ]]; then exec "$python" -m pytest -n 2 --dist=worksteal "${@:2}"; fi
if [[ ${1:-} == [!-]* ]]; then set -- --track "$@"; fi
exec "$python" - "$@" <<'PYTHON'
import os
import signal
import subprocess
import sys
from pathlib import Path

import continual
import train_gpt
from train_gpt import dist, torch

def read(path):
    return path.read_text() if path.is_file() else ""

def limits(*names):
    """Yield the numbers in files of this process' control groups, v1 or v2, and of those above."""
    for line in read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        own = Path("/sys/fs/cgroup", controllers, path.strip("/"))
        for folder in (own, *own.parents):
            found = " ".join(read(folder / name) for name in names).split()
            if found and found[0].isdigit():  # neither "max" nor -1
                yield [int(number) for number in found]

def room_on_cpu(config):
    """How many ranks have a core and memory each."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    for quota, period in limits("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        cores = min(cores, quota / period)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
        memory = min([memory, *(limit for [limit] in limits(name))])
    # Coarse: torch, the n-gram table, and the vocabulary's weights with their state
    room = memory / (2**30 + config.model_dim * (4 * config.ngram_rows + 16 * config.vocab_size))
    print(f"run.sh: {cores:g} core(s), memory for {room:.1f} rank(s)", file=sys.stderr)
    return min(cores, room)

def train(rank):
    """Train as one rank, a fork of this process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.exit(script.main(words))

def pass_on(number, frame):
    """Ask the ranks to end after their step. At a second signal they end at once."""
    for process in group.processes:
        process.terminate()

words = sys.argv[1:]
script = continual if words[:2] == ["--track", "continual"] else train_gpt
try:
    config, _ = train_gpt.resumed(train_gpt.parse_command_line(words))
except (train_gpt.ConfigError, OSError):
    sys.exit(script.main(words))  # which answers --check and a wrong call
script = continual if config.track == "continual" else train_gpt
builders = {f"data/{name}": ["data/text.py", "--corpus", name] for name in ("english", "verse")}
builders["data/fineweb10B"] = ["data/fineweb.py"]
if config.data in builders and not Path(config.data, "manifest.json").exists():
    status = subprocess.call([sys.executable, *builders[config.data]], stdout=sys.stderr)
    if status:
        sys.exit(status)
most = 0 if config.device == "cpu" else torch.cuda.device_count()
most = most or room_on_cpu(config)
counts = [stage.micro_batches for stage in config.stages]
fitting = [n for n in (2, 4, 8) if n <= most and not any(count % n for count in counts)]
ranks = max(fitting, default=1)
if ranks == 1:
    sys.exit(script.main(words))
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
os.environ |= {"WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
group = torch.multiprocessing.start_processes(train, nprocs=ranks, join=False, start_method="fork")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
        signal.signal(number, pass_on)
try:
    while not group.join(timeout=1, grace_period=600):  # a rank may still write a checkpoint
        pass
except torch.multiprocessing.ProcessExitedException as error:
    if error.exit_code < 0:
        reason = ": killed, perhaps by the system for memory" if error.exit_code == -9 else ""
        print(f"status:error rank {error.error_index} was ended by {error.signal_name}{reason}")
    sys.exit(max(1, error.exit_code))  # a rank that ended by itself has said why
PYTHON
