#!/usr/bin/env bash
# Every check and benchmark that needs a GPU, in under nine minutes and without the network; the table comes
# last. Needs a Python with torch and numpy: python3, or what PYTHON names. Options: gpu_checks.py --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
for module in torch numpy; do
    if ! "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$module') is None)"; then
        echo "gpu.sh: $python has no $module; name a Python that has it: PYTHON=.venv/bin/python $0" >&2
        exit 2
    fi
done
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$PWD/.cache/inductor}"
exec "$python" benchmarks/gpu_checks.py "$@"
