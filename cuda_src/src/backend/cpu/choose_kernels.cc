#include "backend/cpu/choose_kernels.h"

#include "base/error.h"

namespace xllm::cpu {
namespace {

#if defined(__x86_64__)
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

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
#endif
  if (name.empty()) return scalar_kernels();
  throw Error(
      Status::kInvalidArgument,
      "instruction set " + name +
          ": this build has none of that name for this machine; leave it unset, or say scalar",
      {{"field", "instruction_set"}});
}

}  // namespace xllm::cpu
