#!/usr/bin/env bash
# What `./build.sh check` runs once everything is built: every linter, each to its end; fails if any did.
# Needs .venv/bin first on PATH and build/dev configured.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
export BUF_CACHE_DIR=$PWD/build/buf RUFF_CACHE_DIR=$PWD/build/ruff

failed=()
run() {
  local name=$1 start=$SECONDS
  shift
  if "$@"; then
    printf 'ok    %s (%d s)\n' "$name" $((SECONDS - start))
  else
    printf 'FAIL  %s: %s\n' "$name" "$*"
    failed+=("$name")
  fi
}

# Tracked and new files of the working tree, without the ignored ones.
files() { git ls-files -co --exclude-standard -- "$@" | while read -r file; do [ ! -e "$file" ] || printf '%s\n' "$file"; done; }

clang_format() {
  local out
  out=$(files '*.h' '*.cc' '*.c' '*.cu' '*.cuh' | xargs -r clang-format --dry-run -Werror --ferror-limit=1 2>&1) && return
  grep 'error:' <<< "$out"
  return 1
}
cython_lint() { files '*.pyx' '*.pxd' | xargs -r cython-lint; }
shell_check() { { files '*.sh' && files .ci/run; } | xargs -r shellcheck; }
buf_breaking() {
  local tag
  if ! tag=$(git describe --tags --abbrev=0 --match 'v[0-9]*' 2> /dev/null); then
    echo "skip  buf breaking: there is no release tag to compare with"
    return 0
  fi
  buf breaking protos --against ".git#tag=$tag,subdir=protos"
}

run "ruff format" ruff format --check -q .
run "ruff" ruff check -q .
run "mypy" mypy --exclude clients/python/tests cyengine service/xllm_service clients/python tests bench
run "mypy of the client's tests" mypy clients/python/tests
run "import-linter" lint-imports --no-cache
run "cython-lint" cython_lint
run "clang-format" clang_format
run "layers" python tests/lint/check_layers.py cuda_src
run "instruction set objects" python tests/lint/check_isa_objects.py build/dev
run "buf lint" buf lint protos
run "buf breaking" buf_breaking
run "shellcheck" shell_check
run "codespell" codespell -q 3
run "clang-tidy" python tests/lint/run_clang_tidy.py build/dev

if [ ${#failed[@]} -gt 0 ]; then
  printf 'check failed: %s\n' "${failed[*]}"
  exit 1
fi
echo "check: all ok"
