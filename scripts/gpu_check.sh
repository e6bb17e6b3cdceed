#!/usr/bin/env bash
# On any machine with a CUDA toolkit and a GPU: build the CUDA backend with its check, compare every kernel with float64, time decode
# steps, and look for bad memory accesses. Usage: scripts/gpu_check.sh [OUT_DIR] [options of cuda_backend_check...]
# Where .venv holds the package with its CUDA library (./build.sh, or a wheel), the engine is tested and measured too, with cuBLAS for the
# per-slot mode (pip install xllm[cuda]); XLLM_PYTHON names another Python, `none` leaves it out.
# OUT_DIR (default build/gpu-results) receives check.json, check.log, bench.json, bench.log, build.log and, where compute-sanitizer is there, sanitizer.log.
# Environment: XLLM_CUDA_ARCHITECTURES, a CMake list (default 90a-real); XLLM_SANITIZE_S, seconds for each part under each tool of
# compute-sanitizer (default 60, 0: off). What it finds makes the script fail (86); running out of time does not.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

out=${1:-build/gpu-results}
shift || true
mkdir -p "$out"
build=build/gpu
generator=()
if command -v ninja > /dev/null; then generator=(-G Ninja); fi

nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv || exit 1
start=$SECONDS
{ cmake -S tests/gpu -B $build "${generator[@]}" "-DXLLM_CUDA_ARCHITECTURES=${XLLM_CUDA_ARCHITECTURES:-90a-real}" &&
  cmake --build $build --parallel "$(nproc)"; } > "$out/build.log" 2>&1 || { tail -n 60 "$out/build.log"; exit 1; }
echo "built in $((SECONDS - start)) s"

# Two programs, so that a check that fails or hangs does not take the measurements with it.
status=0
for part in check:repack,rows,matmul,sample,graphs,stages,attention,invariance bench:bandwidth,sampler,prompt_attention,decode; do
  start=$SECONDS
  name=${part%%:*}
  timeout 210 $build/cuda_backend_check --parts "${part#*:}" --json "$out/$name.json" "$@" 2>&1 | tee "$out/$name.log"
  result=${PIPESTATUS[0]}
  if [ "$result" != 0 ]; then status=$result; fi
  echo "$name: $((SECONDS - start)) s, status $result"
done

python=${XLLM_PYTHON:-.venv/bin/python}
if [ "$python" != none ] && "$python" -c 'import cyengine, pytest' 2> /dev/null; then
  "$python" -m pytest -q -m gpu tests/gpu tests/cyengine 2>&1 | tee "$out/tests.log"
  result=${PIPESTATUS[0]}
  if [ "$result" != 0 ]; then status=$result; fi
  "$python" -m bench.gpu_engine --models build/gpu-models --json "$out/gpu_engine.json" 2>&1 | tee "$out/gpu_engine.log"
  result=${PIPESTATUS[0]}
  if [ "$result" != 0 ]; then status=$result; fi
fi

limit=${XLLM_SANITIZE_S:-60}
if [ "$limit" != 0 ] && command -v compute-sanitizer > /dev/null; then
  : > "$out/sanitizer.log"
  for tool in memcheck racecheck; do
    program=$build/cuda_backend_check
    if [ $tool = racecheck ]; then
      program=$build-racecheck/cuda_backend_check
      { cmake -S tests/gpu -B $build-racecheck "${generator[@]}" -DXLLM_RACECHECK=ON \
          "-DXLLM_CUDA_ARCHITECTURES=${XLLM_CUDA_ARCHITECTURES:-90a-real}" &&
        cmake --build $build-racecheck --parallel "$(nproc)"; } >> "$out/build.log" 2>&1 || { tail -n 60 "$out/build.log"; exit 1; }
    fi
    for part in repack rows matmul sample graphs stages attention; do
      start=$SECONDS
      echo "== $tool $part" >> "$out/sanitizer.log"
      timeout "$limit" compute-sanitizer --tool $tool --error-exitcode 86 $program --parts $part --tiny >> "$out/sanitizer.log" 2>&1
      result=$?
      echo "$tool $part: $((SECONDS - start)) s, status $result ($(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$out/sanitizer.log" | tail -n 1))"
      # 124: out of time, which says nothing about what was not reached.
      if [ "$result" != 0 ] && [ "$result" != 124 ]; then status=$result; fi
    done
  done
fi
exit "$status"
