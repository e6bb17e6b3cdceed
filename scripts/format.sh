#!/usr/bin/env bash
# What `./build.sh format` runs: the formatters, over tracked and new files. Needs .venv/bin first on PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export RUFF_CACHE_DIR=$PWD/build/ruff
ruff format -q .
ruff check -q --fix --select I .
git ls-files -co --exclude-standard -- '*.h' '*.cc' '*.c' '*.cu' '*.cuh' | xargs -r clang-format -i
