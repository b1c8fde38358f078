#!/usr/bin/env bash
# GPU tests and figures in one go, under 8 minutes on one GPU; nothing is downloaded.
#
#   benchmarks/gpu.sh [--wheels FOLDER] [--out FOLDER] [--dry]
#
# --wheels  install these wheels into .venv-gpu, over what PYTHON (python3) has already: torch, transformer-engine with its
#           extension, what they and te-convert depend on, pytest, and transformers for the tests of whole models.
# --out     where gpu.json, gpu-tests.xml and gpu-tests.log go (default: $OUT, else benchmarks/results)
# --dry     on any machine: twins, tiny sizes, no tests
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}" wheels="" out="${OUT:-benchmarks/results}" dry=""
while [ $# -gt 0 ]; do
    case "$1" in
        --wheels) wheels="$2"; shift 2 ;;
        --out) out="$2"; shift 2 ;;
        --dry) dry="--dry"; shift ;;
        *) echo "gpu: unknown argument $1; see the head of benchmarks/gpu.sh" >&2; exit 2 ;;
    esac
done
mkdir -p "$out"
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1

if [ -n "$wheels" ]; then
    "$python" -m venv --system-site-packages .venv-gpu
    python=.venv-gpu/bin/python
    "$python" -m pip install -q --no-index --find-links "$wheels" --no-deps "$wheels"/*.whl
fi

status=0
if [ -z "$dry" ]; then
    "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' \
        || { echo "gpu: no CUDA device is available; --dry runs anywhere" >&2; exit 4; }
    "$python" -c 'import torch, transformer_engine.pytorch' \
        || { echo "gpu: Transformer Engine does not import; te-convert doctor says why" >&2; exit 4; }
    if "$python" -c 'import pytest' 2>/dev/null; then
        # Without the project's settings: they want plugins that may be missing here, and a library's warning is no failure.
        timeout 180 "$python" -m pytest -c /dev/null --rootdir . --import-mode importlib -m gpu tests/gpu tests/runtime -q -rs \
            -p no:cacheprovider --junitxml="$out/gpu-tests.xml" 2>&1 | tee "$out/gpu-tests.log" || status=$?
    else
        echo "gpu: pytest is not installed: the GPU tests did not run" | tee "$out/gpu-tests.log" >&2
    fi
fi
timeout 280 "$python" benchmarks/gpu.py --out "$out/gpu.json" --budget 240 $dry || status=$?
exit "$status"
