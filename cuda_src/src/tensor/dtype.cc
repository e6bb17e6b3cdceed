#include "tensor/dtype.h"

#include "tensor/quant.h"

namespace xllm {
namespace {

// Indexed by GGUF type number. An empty name is a number that GGUF withdrew; block_elems 0, a type
// this build has no code for.
constexpr DTypeInfo kTypes[] = {
    {"f32", 1, 4},
    {"f16", 1, 2},
    {"q4_0", kQuantBlock, sizeof(BlockQ4_0)},
    {"q4_1", kQuantBlock, sizeof(BlockQ4_1)},
    {"", 0, 0},
    {"", 0, 0},
    {"q5_0", kQuantBlock, sizeof(BlockQ5_0)},
    {"q5_1", kQuantBlock, sizeof(BlockQ5_1)},
    {"q8_0", kQuantBlock, sizeof(BlockQ8_0)},
    {"q8_1", 0, 0},
    {"q2_k", kSuperBlock, sizeof(BlockQ2_K)},
    {"q3_k", kSuperBlock, sizeof(BlockQ3_K)},
    {"q4_k", kSuperBlock, sizeof(BlockQ4_K)},
    {"q5_k", kSuperBlock, sizeof(BlockQ5_K)},
    {"q6_k", kSuperBlock, sizeof(BlockQ6_K)},
    {"q8_k", 0, 0},
    {"iq2_xxs", 0, 0},
    {"iq2_xs", 0, 0},
    {"iq3_xxs", 0, 0},
    {"iq1_s", 0, 0},
    {"iq4_nl", kQuantBlock, sizeof(BlockIQ4_NL)},
    {"iq3_s", 0, 0},
    {"iq2_s", 0, 0},
    {"iq4_xs", kSuperBlock, sizeof(BlockIQ4_XS)},
    {"i8", 0, 0},
    {"i16", 0, 0},
    {"i32", 0, 0},
    {"i64", 0, 0},
    {"f64", 0, 0},
    {"iq1_m", 0, 0},
    {"bf16", 1, 2},
    {"", 0, 0},
    {"", 0, 0},
    {"", 0, 0},
    {"tq1_0", 0, 0},
    {"tq2_0", 0, 0},
    {"", 0, 0},
    {"", 0, 0},
    {"", 0, 0},
    {"mxfp4", 0, 0},
};
constexpr uint32_t kNumTypes = sizeof(kTypes) / sizeof(kTypes[0]);

}  // namespace

const DTypeInfo *find_dtype_info(uint32_t gguf_type) {
  if (gguf_type >= kNumTypes || kTypes[gguf_type].block_elems == 0) return nullptr;
  return &kTypes[gguf_type];
}

const char *gguf_type_name(uint32_t gguf_type) {
  if (gguf_type >= kNumTypes || kTypes[gguf_type].name[0] == '\0') return nullptr;
  return kTypes[gguf_type].name;
}

}  // namespace xllm
