#!/usr/bin/env bash
# The checks and benchmarks that need a GPU, the most telling first, in under nine minutes and without
# the network; the table comes last. Those that no longer fit can be run by --only. Needs a Python
# with torch, numpy and numba: python3, or what PYTHON names. Options: gpu_checks.py --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
for module in torch numpy numba; do
    if ! "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$module') is None)"; then
        echo "gpu.sh: $python has no $module; name a Python that has it: PYTHON=.venv/bin/python $0" >&2
        exit 2
    fi
done
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$PWD/.cache/inductor}"
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used --format=csv,noheader || true
fi
exec "$python" benchmarks/gpu_checks.py "$@"
