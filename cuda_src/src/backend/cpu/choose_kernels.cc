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
#endif

}  // namespace

const Kernels &choose_kernels(const std::string &name) {
  if (name == "scalar") return scalar_kernels();
#if defined(__x86_64__)
  if (name == "avx2" || (name.empty() && has_avx2())) {
    if (has_avx2()) return avx2_kernels();
    throw Error(Status::kInvalidArgument,
                "instruction set avx2: this CPU lacks AVX2, FMA, F16C or BMI2; leave it unset",
                {{"field", "instruction_set"}});
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
