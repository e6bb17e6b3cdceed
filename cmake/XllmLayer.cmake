# xllm_add_layer(<name> [FOLDER <folder>] [EXCLUDE <regex>] [ONLY <regex>] [DEPENDS <layer>...])
#
# One static library xllm_<name> of the *.cc files in cuda_src/src/<folder> (default: the name), picked up as they appear;
# EXCLUDE and ONLY match file names. A folder of headers alone becomes an interface target. Layers are declared bottom up.

set(XLLM_IS_X86 OFF)
set(XLLM_IS_ARM64 OFF)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(XLLM_IS_X86 ON)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(XLLM_IS_ARM64 ON)
endif()

# A file named for an instruction set is compiled for it; where the machine is of another kind, it is left out.
set(XLLM_ISA_avx2 -mavx2 -mfma -mf16c -mbmi2)
set(XLLM_ISA_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c)
# GCC's scheduler in front of register allocation hoists so many loads that a product of four tokens stores and reads a
# register for every dot product; without it a twelfth as often (docs/perf/cpu.md). The cores reorder by themselves.
set(XLLM_ISA_neon -march=armv8.2-a+dotprod $<$<CXX_COMPILER_ID:GNU>:-fno-schedule-insns>)

function(xllm_add_layer name)
  cmake_parse_arguments(arg "" "FOLDER;EXCLUDE;ONLY" "DEPENDS" ${ARGN})
  if(NOT arg_FOLDER)
    set(arg_FOLDER "${name}")
  endif()
  file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/src/${arg_FOLDER}/*.cc")
  if(arg_ONLY)
    list(FILTER sources INCLUDE REGEX "/${arg_ONLY}$")
  endif()
  if(arg_EXCLUDE)
    list(FILTER sources EXCLUDE REGEX "/${arg_EXCLUDE}$")
  endif()
  if(NOT XLLM_IS_X86)
    list(FILTER sources EXCLUDE REGEX "_avx(2|512)\\.cc$")
  endif()
  if(NOT XLLM_IS_ARM64)
    list(FILTER sources EXCLUDE REGEX "_neon\\.cc$")
  endif()

  set(depends ${arg_DEPENDS})
  list(TRANSFORM depends PREPEND xllm_)
  if(sources)
    add_library(xllm_${name} STATIC ${sources})
    target_include_directories(xllm_${name} PUBLIC
      "${PROJECT_SOURCE_DIR}/cuda_src/src" "${PROJECT_SOURCE_DIR}/cuda_src/include")
    target_link_libraries(xllm_${name} PRIVATE xllm_flags PUBLIC ${depends})
    foreach(isa avx2 avx512 neon)
      set(isa_sources ${sources})
      list(FILTER isa_sources INCLUDE REGEX "_${isa}\\.cc$")
      if(isa_sources)
        set_source_files_properties(${isa_sources} PROPERTIES COMPILE_OPTIONS "${XLLM_ISA_${isa}}")
      endif()
    endforeach()
  else()
    add_library(xllm_${name} INTERFACE)
    target_include_directories(xllm_${name} INTERFACE
      "${PROJECT_SOURCE_DIR}/cuda_src/src" "${PROJECT_SOURCE_DIR}/cuda_src/include")
    target_link_libraries(xllm_${name} INTERFACE ${depends})
  endif()
endfunction()
