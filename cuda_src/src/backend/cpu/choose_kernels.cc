#include "backend/cpu/choose_kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "base/error.h"

namespace xllm::cpu {
namespace {

#if defined(__x86_64__)
// note: by hand, because clang 14's __builtin_cpu_supports does not know the name. What the system
// must save for it is what AVX2 needs.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() &&
         __builtin_cpu_supports("bmi2");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}
#elif defined(__aarch64__)
// Dot products of bytes came with ARMv8.2, as an option. A CPU without them computes with the
// scalar set, in which the compiler uses the NEON that every AArch64 has: emulating a dot product
// by widening multiplications would be a second set to hold to the same bytes, for CPUs of 2016.
bool has_neon() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return false;
#endif
}
#endif

#if defined(__x86_64__) || defined(__aarch64__)
[[noreturn]] void refuse(const std::string &name, const char *lacks) {
  throw Error(Status::kInvalidArgument,
              "instruction set " + name + ": this CPU lacks " + lacks + "; leave it unset",
              {{"field", "instruction_set"}});
}
#endif

}  // namespace

const Kernels &choose_kernels(const std::string &name) {
  if (name == "scalar") return scalar_kernels();
#if defined(__x86_64__)
  if (name == "avx512" || (name.empty() && has_avx512())) {
    if (!has_avx512()) refuse(name, "AVX-512 F, BW, VL, DQ or VNNI");
    return avx512_kernels();
  }
  if (name == "avx2" || (name.empty() && has_avx2())) {
    if (!has_avx2()) refuse(name, "AVX2, FMA, F16C or BMI2");
    return avx2_kernels();
  }
#elif defined(__aarch64__)
  if (name == "neon" || (name.empty() && has_neon())) {
    if (!has_neon()) refuse(name, "the dot products of ARMv8.2");
    return neon_kernels();
  }
#endif
  if (name.empty()) return scalar_kernels();
  throw Error(
      Status::kInvalidArgument,
      "instruction set " + name +
          ": this build has none of that name for this machine; leave it unset, or say scalar",
      {{"field", "instruction_set"}});
}

}  // namespace xllm::cpu
