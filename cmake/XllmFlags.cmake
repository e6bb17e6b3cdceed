# Compiler flags of everything we compile ourselves.

set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

# One release flavour: optimised, with line tables so that a profile or a crash names its line.
set(CMAKE_C_FLAGS_RELEASE "-O3 -g1 -DNDEBUG")
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -g1 -DNDEBUG")

find_package(Threads REQUIRED)

# -ffp-contract=off: whether a*b+c becomes one fma must be written in the source, or two instruction sets would round
# differently. No -ffast-math and no -march=native for the same reason: one build gives the same bytes on every machine.
add_library(xllm_flags INTERFACE)
target_compile_options(xllm_flags INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Werror;-ffp-contract=off;-fno-math-errno>)
target_link_libraries(xllm_flags INTERFACE Threads::Threads)

if(XLLM_SANITIZE)
  add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${XLLM_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
  add_link_options("-fsanitize=${XLLM_SANITIZE}")
endif()
