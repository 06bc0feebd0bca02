#!/usr/bin/env bash
# One command for everything: set-up, data, launch, tests. `./run.sh --help` says how.
# All that this script says goes to stderr: stdout, and the exit status, are the trainer's own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
venv_python=.venv/bin/python

say() { echo "run.sh: $*" >&2; }

usage() {
    cat <<'TEXT'
./run.sh [TRACK] [--key value ...]   set up what is missing, then train; the keys go to the track's script
./run.sh TRACK --help                every key, with its default
./run.sh TRACK --check               everything but the steps: device, data, memory, disk
./run.sh test [pytest arguments]     set up, then run the tests that protect results; with --all all of them

Tracks: nano (a minute on a laptop), mini (fineweb's recipe at small scale, minutes on a laptop), fineweb (1 to 8 GPUs),
continual (a trained nano model goes on to C++; needs --init-from RUN). Without TRACK it is fineweb where CUDA and FineWeb shards are present, else nano. The last line of
a run names the folder of its log and plot.
The first call makes .venv, installs requirements.txt and builds the track's data.
PYTHON=/path/to/python chooses the Python (3.11 or newer) that .venv is made with.
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

# Make .venv and install requirements.txt. The stamp is a copy of that file, written last: a killed
# install is done again, and so is one whose requirements have changed since.
set_up() {
    local stamp=.venv/installed-requirements.txt base
    if cmp -s requirements.txt "$stamp"; then
        return
    fi
    rm -f "$stamp"
    if ! "$venv_python" -m pip --version >/dev/null 2>&1; then
        base=$(find_python)
        say "making .venv with $base"
        "$base" -m venv --clear .venv >&2
    fi
    say "installing requirements.txt"
    "$venv_python" -m pip install --disable-pip-version-check --requirement requirements.txt >&2
    cp requirements.txt "$stamp"
}

# Print "PROCESSES SCRIPT DATA" for the trainer's arguments. Those that the trainer is going to refuse
# pass through, since its message is the better one.
plan() {
    "$venv_python" - "$@" <<'PYTHON'
import sys

import continual  # its track becomes known
import torch
import train_gpt

scripts = {"continual": "continual.py"}
try:
    given = train_gpt.parse_command_line(sys.argv[1:])
    train_gpt.require("help" not in given, "help is no run")
    config, _, _ = train_gpt.resumed(given)
except (train_gpt.ConfigError, OSError):
    named = dict(zip(sys.argv, sys.argv[1:])).get("--track")
    print(1, scripts.get(named, "train_gpt.py"), "-")
    sys.exit()
processes = 1  # on a CPU its worker threads use every core: ranks would hold the weights each
if config.device != "cpu" and torch.cuda.is_available():
    gpus = torch.cuda.device_count()
    counts = [stage.micro_batches for stage in config.stages]
    fitting = [n for n in range(1, gpus + 1) if all(count % n == 0 for count in counts)]
    processes = max(fitting)
    if processes < gpus:
        print(
            f"run.sh: {gpus - processes} of {gpus} GPUs idle: the number used must divide "
            f"{counts} micro-batches a step",
            file=sys.stderr,
        )
print(processes, scripts.get(config.track, "train_gpt.py"), config.data)
PYTHON
}

# Build or complete a corpus that this repository has a builder for; others are the user's own.
prepare_data() {
    case $1 in
    data/python) # each time: it looks at manifest and sizes only, and builds for the installed torch
        "$venv_python" data/text.py >/dev/null ;;
    data/cpp) # of the continual track, whose first domain is the Python corpus
        "$venv_python" data/text.py >/dev/null
        "$venv_python" data/text.py --corpus cpp >/dev/null ;;
    data/fineweb10B) # *.part: a download that was cut short, which the builder continues
        if ! ls "$1"/*_train_*.bin "$1"/*_val_*.bin >/dev/null 2>&1 || ls "$1"/*.part >/dev/null 2>&1; then
            "$venv_python" data/fineweb.py >&2
        fi ;;
    esac
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

planned=$(plan "$@")
read -r processes script data <<<"$planned"
prepare_data "$data"
# `exec`: signals reach the trainer, and its status is ours.
if [ "$processes" -gt 1 ]; then
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # what torchrun would set, less its warning
    exec "$venv_python" -m torch.distributed.run --standalone --nproc_per_node="$processes" "$script" "$@"
fi
exec "$venv_python" "$script" "$@"
