# Finds GoogleTest; sets GTest_FOUND and the targets GTest::gtest and GTest::gtest_main.
#
# The library of the machine that builds is of no use on another: for that one it is built from the sources that the
# distribution's package has beside it.

find_package(GTest QUIET)
set(XLLM_GTEST_SOURCES /usr/src/googletest CACHE PATH "GoogleTest's sources, for cross builds")
if(NOT GTest_FOUND AND CMAKE_CROSSCOMPILING AND EXISTS "${XLLM_GTEST_SOURCES}/CMakeLists.txt")
  set(BUILD_GMOCK OFF CACHE BOOL "")
  set(INSTALL_GTEST OFF CACHE BOOL "")
  add_subdirectory("${XLLM_GTEST_SOURCES}" "${PROJECT_BINARY_DIR}/googletest" EXCLUDE_FROM_ALL)
  set(GTest_FOUND ON)
endif()
