#!/usr/bin/env bash
# Runs the CUDA code on a machine without a GPU: a sample of the tests in Triton's interpreter that launches every
# kernel once, and the compiler alone for each architecture that Triton can build for.
#   scripts/test_cuda.sh [--cuda-all] [what else pytest is told]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${PYTHON:-python}")

if ! "$python" -c "import torch, triton, pytest" 2> /dev/null; then
  echo "test_cuda: $python has no torch, triton or pytest: pip install 'penstock[cuda]' pytest hypothesis" >&2
  exit 1
fi
"$python" -m pytest -q tests/cuda "$@"
