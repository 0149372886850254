#!/usr/bin/env bash
# The tests of the kernels for ARM on a machine that is not one: cross-compiled, then run by an emulator. As a CPU with
# the 8-bit dot product, and as one without it, which must be found out before an instruction it does not have is met.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-_build/neon}

for tool in cmake aarch64-linux-gnu-g++ qemu-aarch64-static; do
  if ! command -v $tool > /dev/null; then
    echo "test_neon: $tool is missing; on Debian: apt-get install cmake g++-aarch64-linux-gnu qemu-user-static" >&2
    exit 1
  fi
done

cmake -S . -B "$build" -DPENSTOCK_PYTHON=OFF -DPENSTOCK_NATIVE_TESTS=ON -DCMAKE_SYSTEM_NAME=Linux \
  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static
cmake --build "$build" --parallel "$(nproc)"
qemu-aarch64-static -cpu max "$build/test_kernels" neon
qemu-aarch64-static -cpu cortex-a72 "$build/test_kernels"
