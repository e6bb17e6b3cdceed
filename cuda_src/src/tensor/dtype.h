// Element types of tensors: GGUF's types, by GGUF's numbers, with their block sizes.
#pragma once

#include <cstdint>

namespace xllm {

// Numbers are those of the GGUF tensor table (github.com/ggml-org/ggml docs/gguf.md); gaps are
// types we refuse by name.
enum class DType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
  kBF16 = 30,
};

struct DTypeInfo {
  const char *name;      // as the field writes it, lower case: "q4_1"
  uint32_t block_elems;  // elements per quant block (1 for plain types)
  uint32_t block_bytes;  // bytes per quant block
};

// The description of a GGUF type number, or nullptr when this build does not know it.
const DTypeInfo *find_dtype_info(uint32_t gguf_type);

// The name of any GGUF type number that has one, known to this build or not ("iq2_xxs"), else
// nullptr; for refusals.
const char *gguf_type_name(uint32_t gguf_type);

inline const DTypeInfo &dtype_info(DType dtype) {
  return *find_dtype_info(static_cast<uint32_t>(dtype));
}

// Bytes of `num_elems` elements; num_elems must be a multiple of the block size.
inline uint64_t dtype_bytes(DType dtype, uint64_t num_elems) {
  const DTypeInfo &info = dtype_info(dtype);
  return num_elems / info.block_elems * info.block_bytes;
}

}  // namespace xllm
