#!/usr/bin/env bash
# Runs the CUDA code on a machine without a GPU: a sample of the tests that launches every kernel once, in Triton's
# interpreter and in ours of Gluon (tests/cuda/gluon), and the compiler alone for each architecture that Triton can
# build for.
#   scripts/test_cuda.sh [what pytest is told]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${PYTHON:-python}")

if ! "$python" -c "import torch, triton, pytest" 2> /dev/null; then
  echo "test_cuda: $python has no torch, triton or pytest: pip install 'penstock[cuda]' pytest hypothesis" >&2
  exit 1
fi
if [ $# -gt 0 ]; then
  exec "$python" -m pytest -q tests/cuda "$@"
fi
# The compiler works beside the interpreter, each on a core.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$python" -m pytest -q tests/cuda/test_compiles.py > "$log" 2>&1 &
compiling=$!
"$python" -m pytest -q tests/cuda --ignore=tests/cuda/test_compiles.py || { kill "$compiling"; exit 1; }
compiled=0
wait "$compiling" || compiled=$?
cat "$log"
exit "$compiled"
