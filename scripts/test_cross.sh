#!/usr/bin/env bash
# Compiles the native code for macOS and Windows on a machine that is neither, with zig's clang and, where it is
# installed, with MinGW's GCC. Objects only: nothing is optimized or linked. The argument is the folder for them.
# With a second argument, `run`, the kernels' tests are linked by MinGW and run by Wine.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/zig.sh
build=${1:-_build/cross}
python=${PYTHON:-python3}
mkdir -p "$build"
build=$(cd "$build" && pwd)
native=src/penstock/backend/cpu/native
gcc=x86_64-w64-mingw32-g++-posix

"$python" -m venv "$build/tools"
"$build/tools/bin/pip" install --quiet ziglang cmake ninja nanobind
PATH="$build/tools/bin:$PATH"
headers=$(python -c "import sysconfig; print(sysconfig.get_paths()['include'])")

compile() { # name, options of CMake: makes a library of objects
  echo "== $1"
  cmake -G Ninja -S . -B "$build/$1" -DPENSTOCK_PYTHON=OFF -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 \
    -DCMAKE_CXX_COMPILER_FORCED=ON "${@:2}" > "$build/$1.log" 2>&1
  cmake --build "$build/$1" --target penstock_cpu -- -k 0 | tail -n 1
}
bind() { # name, folder of pyconfig.h, compiler: compiles the extension itself
  "$3" -std=c++20 -O0 -I "$2" -I "$build/python" -I "$(python -m nanobind --include_dir)" -I $native \
    -c $native/module.cpp -o "$build/$1/module.o"
  echo "compiled the extension for $1"
}

mkdir -p "$build/python" "$build/windows-python"
cp -r "$headers/." "$build/python"
mv "$build/python/pyconfig.h" "$build/pyconfig.h"
# What Python's own headers ask of a compiler for 64-bit Windows; this machine's pyconfig.h says other sizes.
cat > "$build/windows-python/pyconfig.h" <<'CONFIG'
#include <basetsd.h>
#define MS_WINDOWS
#define MS_WIN64
#define NT_THREADS
#define Py_ENABLE_SHARED 1
#define HAVE_DECLSPEC_DLL
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_PID_T 4
#define SIZEOF_SIZE_T 8
#define SIZEOF_TIME_T 8
#define SIZEOF_VOID_P 8
#define SIZEOF_WCHAR_T 2
#define HAVE_STDDEF_H 1
#define HAVE_WCHAR_H 1
#define HAVE_PY_SSIZE_T 1
#define PY_SSIZE_T_MAX 9223372036854775807LL
typedef SSIZE_T Py_ssize_t;
CONFIG
mkdir -p "$build/macos-python"
mv "$build/pyconfig.h" "$build/macos-python"

zig_program "$build/ar" "$build/tools/bin/python" ar
zig_program "$build/macos-c++" "$build/tools/bin/python" c++ -target aarch64-macos -c
zig_program "$build/windows-c++" "$build/tools/bin/python" c++ -target x86_64-windows-gnu -c
archive=(-DCMAKE_AR="$build/ar" -DCMAKE_RANLIB=/bin/true -DCMAKE_INSTALL_NAME_TOOL=/bin/true)
windows=(-DCMAKE_SYSTEM_NAME=Windows -DCMAKE_SYSTEM_PROCESSOR=AMD64)
compile macos "${archive[@]}" -DCMAKE_CXX_COMPILER="$build/macos-c++" -DCMAKE_SYSTEM_NAME=Darwin \
  -DCMAKE_SYSTEM_PROCESSOR=arm64 -DCMAKE_OSX_SYSROOT=/
bind macos "$build/macos-python" "$build/macos-c++"
compile windows "${archive[@]}" "${windows[@]}" -DCMAKE_CXX_COMPILER="$build/windows-c++"
bind windows "$build/windows-python" "$build/windows-c++"
if command -v $gcc > /dev/null; then
  compile mingw "${windows[@]}" -DCMAKE_CXX_COMPILER=$gcc -DCMAKE_EXE_LINKER_FLAGS=-static -DPENSTOCK_NATIVE_TESTS=ON
  if [ "${2:-}" = run ]; then
    cmake --build "$build/mingw" --target test_kernels
    WINEPREFIX="$build/wine" WINEDEBUG=-all wine "$build/mingw/test_kernels.exe"
  fi
else
  echo "skipped GCC for Windows: it needs g++-mingw-w64-x86-64-posix"
fi
