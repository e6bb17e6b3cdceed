#include "model/arch.h"

namespace xllm {
namespace {

constexpr Arch kArchs[] = {
    {"llama", /*is_rope_neighbor=*/true, Presence::kOptional, Presence::kNever},
    {"qwen2", /*is_rope_neighbor=*/false, Presence::kRequired, Presence::kNever},
    {"qwen3", /*is_rope_neighbor=*/false, Presence::kOptional, Presence::kRequired},
};

}  // namespace

const Arch *find_arch(std::string_view name) {
  for (const Arch &arch : kArchs) {
    if (name == arch.name) return &arch;
  }
  return nullptr;
}

const char *arch_names() { return "llama, qwen2, qwen3"; }

}  // namespace xllm
