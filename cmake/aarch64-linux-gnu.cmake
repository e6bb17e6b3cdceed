# Toolchain file for AArch64 Linux from another machine, used by the preset `aarch64`: the cross compiler of the
# distribution builds, qemu-user runs the tests (on Debian: g++-aarch64-linux-gnu, qemu-user and libgtest-dev).
#
# XLLM_QEMU_CPU is the CPU that is emulated: `max` has everything; `cortex-a53` has no dot products, and so shows what a
# machine without them does.

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

set(XLLM_SYSROOT /usr/aarch64-linux-gnu)
set(XLLM_QEMU_CPU max CACHE STRING "CPU that qemu-aarch64 emulates")
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -cpu ${XLLM_QEMU_CPU} -L ${XLLM_SYSROOT})

# Programs are this machine's, libraries and packages the other's.
set(CMAKE_FIND_ROOT_PATH ${XLLM_SYSROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
