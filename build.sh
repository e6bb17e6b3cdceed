#!/usr/bin/env bash
# One script for everything a developer does here; `./build.sh help` lists the verbs. Each verb is a few lines that also work
# by hand inside .venv. Every file it makes lies in .venv/, build/ and dist/, and in git-ignored generated stubs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

VENV=.venv
BUILD=build/dev            # one fixed folder, so that a second run compiles nothing
PY=$VENV/bin/python
export PATH="$PWD/$VENV/bin:$PATH"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

usage() {
  cat <<'EOF'
usage: ./build.sh [VERB] [OPTIONS] [-- PYTEST ARGS]

  (no verb)       make .venv and build everything into it, editable
  demo            build, fetch the demo model, serve it on a unix socket and stream two answers
  test [--slow]   build, native tests, then the Python tests; --slow runs every one of them
  check           format, lint, types and layers; changes nothing
  format          let the formatters rewrite the sources
  wheel           dist/: a wheel of xllm and one of xllm-client
  lock            resolve requirements/*.in again into the hash-checked requirements/*.txt
  clean           remove .venv, build, dist and the generated stubs

  --cuda-wheels   compile the CUDA library with the compiler from PyPI wheels (also XLLM_CUDA_WHEELS=1)
  --no-cuda       leave the CUDA library out, whatever the machine has

Environment: PYTHON=python3.12 picks the interpreter of a new .venv; XLLM_CUDA_ARCHITECTURES the GPU targets, a CMake list or
`release`; CXX the compiler; CMAKE_BUILD_PARALLEL_LEVEL the number of compile jobs.
EOF
}

say() { printf '\033[1m== %s\033[0m\n' "$*" >&2; }
die() { printf 'build.sh: %s\n' "$*" >&2; exit 1; }

# apt_install PACKAGE...: where the machine has apt and we may use it; otherwise 1, quietly.
apt_install() {
  [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || return 1
  say "apt-get install $*"
  local apt=(apt-get -qq -o DPkg::Lock::Timeout=120)
  export DEBIAN_FRONTEND=noninteractive
  { "${apt[@]}" install -y --no-install-recommends "$@" ||
    { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "$@"; }; } < /dev/null > /dev/null
}

# The interpreter that .venv is made with: PYTHON, or the first one here that is new enough.
find_python() {
  local python
  for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
      command -v "$python"
      return
    fi
  done
  die "needs Python >= 3.11 (${PYTHON:-python3} is older or missing); install it, or name one: PYTHON=python3.12 ./build.sh"
}

need_tools() {
  local python=$1 version
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  if ! command -v "${CXX:-c++}" > /dev/null; then
    apt_install g++ || die "needs a C++17 compiler; as root: apt-get install g++"
  fi
  if ! "$python" -c 'import ensurepip, venv' 2> /dev/null; then
    apt_install "python$version-venv" || die "Python has no venv module; as root: apt-get install python$version-venv"
  fi
  if [ ! -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]; then
    apt_install "python$version-dev" || die "Python.h is missing; as root: apt-get install python$version-dev"
  fi
}

# install NAME...: the locked sets requirements/NAME.txt, all at once; nothing to do while no lock has changed.
install() {
  local name stamp files=()
  for name in "$@"; do
    stamp=$VENV/.lock-$name
    cmp -s "requirements/$name.txt" "$stamp" || files+=(-r "requirements/$name.txt")
  done
  [ ${#files[@]} = 0 ] && return
  say "installing: $*"
  "$PY" -m pip install -q --require-hashes "${files[@]}"
  for name in "$@"; do cp "requirements/$name.txt" "$VENV/.lock-$name"; done
}

venv() {
  if [ ! -x "$PY" ] || ! "$PY" -c '' 2> /dev/null; then
    local python
    python=$(find_python)
    need_tools "$python"
    say "making $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV"
  fi
  install build run
}

cuda_options() {
  CMAKE_OPTIONS=("-DXLLM_CUDA_ARCHITECTURES=${XLLM_CUDA_ARCHITECTURES:-90a-real}" "-DXLLM_CUDA_WHEELS_DIR="
    "-DXLLM_BUILD_CUDA=${XLLM_BUILD_CUDA:-ON}")
  [ "${XLLM_CUDA_WHEELS:-0}" = 1 ] || return 0
  install cuda
  CMAKE_OPTIONS[1]="-DXLLM_CUDA_WHEELS_DIR=$("$PY" -c 'import nvidia; print(list(nvidia.__path__)[0])')/cu13"
}

cmake_key() { echo "$PWD" "${CXX:-}" "${CUDACXX:-}" "${CMAKE_OPTIONS[@]}"; }

# What an editable install depends on besides the sources that CMake tracks itself.
install_key() {
  cat pyproject.toml clients/python/pyproject.toml requirements/build.txt requirements/run.txt
  cmake_key
}

build() {
  mkdir -p build
  exec 9> build/.lock && flock 9  # two builds in one checkout take turns
  venv
  "$PY" clients/python/generate_stubs.py
  cuda_options
  if [ "$(install_key)" != "$(cat $BUILD/.installed 2> /dev/null)" ] || [ ! -e "$VENV/bin/xllm" ]; then
    say "building and installing, editable"
    mkdir -p "$BUILD"
    # A compiler once chosen stays in CMake's cache: other options begin a new one.
    if [ "$(cmake_key)" != "$(cat $BUILD/.options 2> /dev/null)" ]; then rm -rf "$BUILD/CMakeCache.txt" "$BUILD/CMakeFiles"; fi
    cmake_key > "$BUILD/.options"
    "$PY" -m pip install -q --no-deps --no-build-isolation -e clients/python
    local option settings=(--config-settings "build-dir=$BUILD" --config-settings "cmake.define.XLLM_BUILD_TESTS=ON")
    for option in "${CMAKE_OPTIONS[@]}"; do settings+=(--config-settings "cmake.define.${option#-D}"); done
    "$PY" -m pip install --no-deps --no-build-isolation -e . "${settings[@]}" -v > "$BUILD/install.log" 2>&1 ||
      { sed '/ CMake build failed/q' "$BUILD/install.log" | tail -n 50 >&2; die "the build failed; all of it is in $BUILD/install.log"; }
    grep -hoE 'xLLM: (no )?CUDA .*' "$BUILD/install.log" | sort -u >&2 || true
    install_key > "$BUILD/.installed"
  else
    cmake --build "$BUILD" --parallel "$(jobs_wanted)" -- --quiet
    cmake --install "$BUILD" --component python --prefix "$("$PY" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" > /dev/null
  fi
  exec 9>&-
}

jobs_wanted() { echo "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"; }

native_tests() {
  if ! compgen -G '/usr/*/cmake/GTest/GTestConfig.cmake' > /dev/null && ! compgen -G '/usr/*/*/cmake/GTest/GTestConfig.cmake' > /dev/null; then
    apt_install libgtest-dev || true
  fi
  say "native tests"
  cmake -S . -B "$BUILD" > "$BUILD/configure.log" || { cat "$BUILD/configure.log" >&2; die "configuring failed"; }
  grep -hoE 'xLLM: native test not built.*' "$BUILD/configure.log" || true
  cmake --build "$BUILD" --target xllm_tests --parallel "$(jobs_wanted)"
  ctest --test-dir "$BUILD" --output-on-failure --parallel "$(jobs_wanted)" --no-tests=ignore
}

run_tests() {
  local marker=(-m "not slow")
  if [ "$SLOW" = 1 ]; then marker=(); fi
  build
  install test
  native_tests
  say "Python tests"
  xllm pull smollm2-135m > /dev/null  # here, so that no test's time limit has to hold a download
  "$PY" -m pytest "${marker[@]}" "${PYTEST_ARGS[@]}"
}

wheel() {
  venv
  cuda_options
  local option settings=()
  for option in "${CMAKE_OPTIONS[@]}"; do settings+=(--config-settings "cmake.define.${option#-D}"); done
  "$PY" clients/python/generate_stubs.py
  "$PY" -m pip wheel -q --no-deps --no-build-isolation -w dist clients/python
  "$PY" -m pip wheel -q --no-deps --no-build-isolation -w dist . "${settings[@]}"
  ls -l dist
}

# Resolves all sets together, so that they agree, then writes each one with hashes for every supported Python and machine.
lock() {
  venv
  install lint
  mkdir -p build/lock
  local name uv=(uv pip compile -q --universal --python-version 3.11 --no-header --no-annotate)
  "${uv[@]}" requirements/{build,run,test,lint}.in -o build/lock/all.txt "$@"
  for name in build run test lint cuda peer; do
    "${uv[@]}" --generate-hashes -c build/lock/all.txt "requirements/$name.in" -o "build/lock/$name.txt"
    { echo "# Made by ./build.sh lock from $name.in; do not edit."; cat "build/lock/$name.txt"; } > "requirements/$name.txt"
  done
}

clean() {
  rm -rf "$VENV" build dist
  find clients service cyengine tests \( -name '*_pb2.py' -o -name '*_pb2.pyi' -o -name '*_pb2_grpc.py' \
    -o -name '*_pb2_grpc.pyi' -o -name .stubs-key -o -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +
}

{ # read to its end before it runs, so that an edit of this file meanwhile does no harm
VERB=build SLOW=0 PYTEST_ARGS=() ARGS=()
case "${1:-}" in
  demo | test | check | format | wheel | lock | clean | help) VERB=$1 && shift ;;
  build) shift ;;
esac
while [ $# -gt 0 ]; do
  case "$1" in
    --slow) SLOW=1 ;;
    --cuda-wheels) XLLM_CUDA_WHEELS=1 ;;
    --no-cuda) XLLM_BUILD_CUDA=OFF ;;
    -h | --help) VERB=help ;;
    --) shift && PYTEST_ARGS=("$@") && break ;;
    --upgrade | --upgrade-package=*) ARGS+=("$1") ;;
    *) usage >&2 && die "unknown verb or option: $1" ;;
  esac
  shift
done

# note: no `&&` after these functions, it would switch off errexit inside them and a failed build would go on.
case "$VERB" in
  build) build ;;
  demo)
    build
    bash scripts/demo.sh
    ;;
  test) run_tests ;;
  check)
    build
    install test lint
    bash scripts/check.sh
    ;;
  format)
    venv
    install lint
    bash scripts/format.sh
    ;;
  wheel) wheel ;;
  lock) lock "${ARGS[@]}" ;;
  clean) clean ;;
  help) usage ;;
esac
exit
}
