#!/usr/bin/env bash
# The native code under the address and undefined behaviour sanitizers: the kernels' own tests, then the Python tests
# that drive the extension. Built without optimization: the sanitizers' passes need minutes for unrolled kernels. For
# the same reason Python leaves out the generic kernels, unless it is told what to run.
#   scripts/test_sanitized.sh [build folder] [what pytest runs]
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(realpath -m "${1:-_build/sanitized}")
tests=("${@:2}")
[ ${#tests[@]} -gt 0 ] || tests=(-k "not generic" tests/ops/test_cpu.py tests/ops/test_chain_hash.py
  tests/ops/test_cpu_sampling.py tests/ops/test_cpu_experts.py tests/models/test_cpu_goldens.py)
python=$(command -v "${PYTHON:-python}")

if ! "$python" -c "import nanobind, pytest" 2> /dev/null; then
  echo "test_sanitized: $python has no nanobind or pytest: pip install nanobind '.[test]'" >&2
  exit 1
fi
cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_COMPILER=g++ -DPENSTOCK_SANITIZE=ON \
  -DPENSTOCK_NATIVE_TESTS=ON -DPython_EXECUTABLE="$python"
cmake --build "$build" --parallel "$(nproc)"
"$build/test_kernels"

rm -rf "$build/site" && mkdir -p "$build/site"
cp -r src/penstock "$build/site"
cmake --install "$build" --prefix "$build/site"
# The interpreter is not sanitized: the library must be loaded first, and C++'s own before it looks for __cxa_throw.
preload="$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libstdc++.so)"
LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0 PYTHONPATH="$build/site" "$python" -m pytest -q "${tests[@]}"
