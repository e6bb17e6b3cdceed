# Finds a CUDA compiler without demanding one, and settles which GPUs to compile for. Sets XLLM_CUDA_FOUND.
#
# Looked at in this order: CUDACXX, nvcc on PATH, /usr/local/cuda, and XLLM_CUDA_WHEELS_DIR, a folder nvidia/cu13 that the
# compiler's wheels were installed into (./build.sh --cuda-wheels sets it).

set(XLLM_CUDA_WHEELS_DIR "" CACHE PATH "nvidia/cu13 folder of the CUDA compiler's wheels")
set(XLLM_CUDA_FOUND OFF)
if(NOT XLLM_BUILD_CUDA)
  return()
endif()

if(XLLM_CUDA_WHEELS_DIR)
  set(CMAKE_CUDA_COMPILER "${XLLM_CUDA_WHEELS_DIR}/bin/nvcc")
  # note: the wheels keep libraries in lib/, where nvcc.profile and CMake look in lib64/ too.
  list(APPEND CMAKE_LIBRARY_PATH "${XLLM_CUDA_WHEELS_DIR}/lib")
  string(APPEND CMAKE_CUDA_FLAGS " -L${XLLM_CUDA_WHEELS_DIR}/lib")
elseif(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(XLLM_NVCC nvcc PATHS /usr/local/cuda/bin)
  if(XLLM_NVCC)
    set(CMAKE_CUDA_COMPILER "${XLLM_NVCC}")
  endif()
endif()

if(CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX})
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # each target names its own, below
  enable_language(CUDA)
  set(XLLM_CUDA_FOUND ON)
else()
  message(STATUS "xLLM: no CUDA compiler found, libxllm_cuda.so is not built (install a CUDA toolkit, or ./build.sh --cuda-wheels)")
  return()
endif()

# Real code for every generation we ship, and PTX of two so that newer GPUs can compile it for themselves.
if(XLLM_CUDA_ARCHITECTURES STREQUAL "release")
  set(XLLM_CUDA_TARGETS 75-real 80 86-real 89-real 90a-real 90-virtual 100-real 120-real)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13)
    list(PREPEND XLLM_CUDA_TARGETS 70-real)  # Volta was dropped by CUDA 13
  endif()
else()
  set(XLLM_CUDA_TARGETS ${XLLM_CUDA_ARCHITECTURES})
endif()
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -lineinfo -DNDEBUG")

# --fmad=false is -ffp-contract=off for the device: an fma is written as one.
add_library(xllm_cuda_flags INTERFACE)
target_compile_options(xllm_cuda_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;--fmad=false;-Xcompiler=-Wall,-Wextra,-Werror,-Wno-unused-parameter,-ffp-contract=off>"
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Werror;-ffp-contract=off;-fno-math-errno>")
