// Sixteen weight rows interleaved, so that a vector register holds the same four bytes of eight or
// sixteen rows and no dot product is summed across lanes. A copy of the same size as the file's
// rows, made once at load.
//
// Sixteen rows of a matrix become `cols / block elements` tiles, one after the other. A tile holds
// one quant block of each row:
//   [16] u16          the f16 scale of types whose block is no whole number of words (q4_0, q5_0,
//                     q8_0, q6_k), wherever the file has it
//   [words][16] u32   the rest of the block word by word, in the file's order but for q6_k: its
//                     scales come first, then six words for each 32 elements. Byte i of the first
//                     has the top bits of element 4 g + i at bits 2 g and 2 g + 1, the second those
//                     of element 16 + 4 g + i; of word g of the other four, byte i has the low bits
//                     of both. So a product meets each line of memory once, in ascending order and
//                     at an even pace, which is what keeps it streaming.
// In q5_0 and q5_1 the word of fifth bits is permuted: bit 8 * i + g belongs to element 4 * g + i.
// Rows that fill up the last sixteen are zeros.
#pragma once

#include <cstdint>

#include "tensor/dtype.h"

namespace xllm::cpu {

constexpr int kInterleavedRows = 16;

// Whether rows of this type can be interleaved.
bool can_interleave(DType dtype);

// Bytes of a matrix of `rows` rows once interleaved.
uint64_t interleaved_bytes(int64_t rows, uint64_t row_bytes);

// Sixteen rows (num_rows of them there) of `cols` elements, row_bytes apart, to out
// [kInterleavedRows * row_bytes].
void interleave_rows(DType dtype, const uint8_t *rows, uint64_t row_bytes, int num_rows, int cols,
                     uint8_t *out);

}  // namespace xllm::cpu
