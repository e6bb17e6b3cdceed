# Run by `cmake -P` on every build: writes OUT from TEMPLATE, with a hash of every source of the core. The file is touched
# only when it changes, so an unchanged tree compiles nothing.
#   SOURCE_DIR   cuda_src/          VERSION   the project's          TEMPLATE, OUT   build_info.h.in and the header

file(GLOB_RECURSE sources LIST_DIRECTORIES false RELATIVE "${SOURCE_DIR}"
  "${SOURCE_DIR}/*.h" "${SOURCE_DIR}/*.cc" "${SOURCE_DIR}/*.cuh" "${SOURCE_DIR}/*.cu")
list(SORT sources)
set(all "${VERSION}")
foreach(source IN LISTS sources)
  file(SHA256 "${SOURCE_DIR}/${source}" digest)
  string(APPEND all "\n${source} ${digest}")
endforeach()
string(SHA256 XLLM_BUILD_ID "${all}")
string(SUBSTRING "${XLLM_BUILD_ID}" 0 16 XLLM_BUILD_ID)
set(XLLM_VERSION "${VERSION}")
configure_file("${TEMPLATE}" "${OUT}" @ONLY)
