#!/usr/bin/env bash
# ./run.sh [TRACK] [--key value ...]   train on NVIDIA's GPUs or a CPU; README.md has the tracks
# ./run.sh TRACK --help                list every key with its default
# ./run.sh TRACK --check               check device, data, memory and disk without a step
# ./run.sh test [pytest arguments]     run the tests that protect results; with --all all of them
# A call first makes what is missing: .venv with requirements.txt, and the track's data. 1, 2, 4 or
# 8 ranks have a GPU or a core each, and equal shares of a step. PYTHON=/path/to/python chooses the
# Python (3.11 or newer) of a new .venv. Set-up and data report to stderr, the trainer to stdout.
if [ -z "${BASH_VERSION:-}" ]; then exec bash "$0" "$@"; fi # sh run.sh
# For macOS all of this is bash 3.2, and does without `readlink -f`.
set -euo pipefail
unset CDPATH
trap 'exit 130' INT # pip alone would end, and the next line begin
file=${BASH_SOURCE[0]}
while [ -L "$file" ]; do
    cd "$(dirname "$file")"
    file=$(readlink "$(basename "$file")")
done
cd "$(dirname "$file")"
case ${1:-} in -h | --help) exec sed -n '2,8s/^# \{0,1\}//p' run.sh ;; esac

python=.venv/bin/python
cpu_index=https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { echo "run.sh: $*" >&2; }

is_installed() { [ -x "$python" ] && cmp -s "$1" ".venv/installed-$1"; }

make_venv() { # unless it is there; its Python has to run, and to be new enough
    local base=${PYTHON:-python3}
    local remedy="set PYTHON=/path/to/python, 3.11 or newer"
    if [[ -e .venv || -L .venv ]]; then
        base=$python
        remedy="move .venv away"
    fi
    local check="import sys; sys.version_info < (3, 11) and sys.exit('older than Python 3.11')"
    local reason
    if ! reason=$("$base" -c "$check" 2>&1); then
        reason=${reason//$'\n'/ }
        reason=${reason##*: line *: } # of this script
        if [[ -L $base && ! -e $base ]]; then reason="a link to a Python that is gone"; fi
        say "$base: $reason; $remedy"
        exit 2
    fi
    if [ "$base" = "$python" ]; then return; fi
    trap 'rm -rf .venv' EXIT # what is half made
    "$base" -m venv .venv >&2
    trap - EXIT
}

install() { # a file of requirements
    "$python" -m pip install --requirement "$1" >&2
    cp "$1" ".venv/installed-$1" # last: a killed install is done again
}

wants_cpu_wheel() { # on Linux, without an NVIDIA device or an index of the user's choice
    [[ $(uname) == Linux && ! -e /proc/driver/nvidia ]] && ! type nvidia-smi >/dev/null 2>&1 &&
        ! "$python" -m pip config list | grep -E '(index-url|no-index)=' >/dev/null
}

install_for_training() { # the sizes are those of torch 2.13.0
    local size="2.8 GB"
    if [[ $(uname) == Darwin ]]; then size="0.2 GB"; fi
    if ! wants_cpu_wheel; then
        say "installs requirements.txt in .venv: downloads up to $size"
    else
        say "installs requirements.txt in .venv: downloads 0.3 GB. Without an NVIDIA device torch" \
            "comes without CUDA, from $cpu_index; PIP_EXTRA_INDEX_URL names another index"
        # Alone, and with few tries: pip waits for an index that is out of reach, at each package.
        local torch
        torch=$(grep '^torch==' requirements.txt)
        "$python" -m pip install --no-deps --retries 1 --index-url "$cpu_index" "$torch" >&2 ||
            say "pip got no torch there, so it comes from PyPI with CUDA: downloads $size"
    fi
    install requirements.txt
}

if ! is_installed requirements.txt; then
    make_venv
    install_for_training
fi
# torch's compiler does not quote its paths: it reaches an odd one by a link.
root=$PWD
if [[ $root == *[!/._[:alnum:]+-]* ]]; then
    root=/tmp/gpt-speedrun-$UID-$(cksum <<<"$PWD" | cut -d' ' -f1)
    if ! ln -sfn "$PWD" "$root" || [[ ! $root -ef . ]]; then root=$PWD; fi
fi
python=$root/.venv/bin/python
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$root/.cache/inductor}" # outlives /tmp
if [[ ${1:-} == test ]]; then
    shift
    if ! is_installed requirements-test.txt; then install requirements-test.txt; fi
    exec "$python" -m pytest -n 2 --dist=worksteal "$@"
fi
if [[ ${1:-} == [!-]* ]]; then set -- --track "$@"; fi
exec "$python" launch.py "$@"
