#include "backend/cpu/interleave.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "tensor/quant.h"

namespace xllm::cpu {
namespace {

// Where a block's lone f16 and its fifth bits lie; -1 where it has none.
struct BlockShape {
  int half;
  int fifth_bits;
};

bool find_shape(DType dtype, BlockShape *out) {
  switch (dtype) {
    case DType::kQ4_0:
    case DType::kQ8_0:
      *out = {0, -1};
      return true;
    case DType::kQ5_0:
      *out = {0, 2};
      return true;
    case DType::kQ5_1:
      *out = {-1, 4};
      return true;
    case DType::kQ6_K:
      *out = {208, -1};
      return true;
    case DType::kQ4_1:
    case DType::kQ4_K:
    case DType::kQ5_K:
      *out = {-1, -1};
      return true;
    default:
      return false;
  }
}

// Bit 4 * g + i to bit 8 * i + g.
uint32_t permute_fifth_bits(uint32_t bits) {
  uint32_t out = 0;
  for (int g = 0; g < 8; ++g) {
    for (int i = 0; i < 4; ++i) out |= ((bits >> (4 * g + i)) & 1u) << (8 * i + g);
  }
  return out;
}

// One quant block, the same of each row: words [num_words] of the rows, row_bytes apart, to `out`
// [num_words][kInterleavedRows].
void interleave_words(const uint8_t *words, uint64_t row_bytes, int num_rows, int num_words,
                      uint8_t *out) {
  int w = 0;
#if defined(__SSE2__)
  // Four words of sixteen rows are transposed in registers, and each of the four lines of 64 bytes
  // is written whole.
  if (num_rows == kInterleavedRows) {
    for (; w + 4 <= num_words; w += 4) {
      __m128i lines[4][4];  // [word][four rows]
      for (int g = 0; g < 4; ++g) {
        const uint8_t *from = words + static_cast<uint64_t>(4 * g) * row_bytes + 4 * w;
        __m128i row[4];
        for (int r = 0; r < 4; ++r) {
          row[r] = _mm_loadu_si128(
              reinterpret_cast<const __m128i *>(from + static_cast<uint64_t>(r) * row_bytes));
        }
        const __m128i low01 = _mm_unpacklo_epi32(row[0], row[1]);
        const __m128i low23 = _mm_unpacklo_epi32(row[2], row[3]);
        const __m128i high01 = _mm_unpackhi_epi32(row[0], row[1]);
        const __m128i high23 = _mm_unpackhi_epi32(row[2], row[3]);
        lines[0][g] = _mm_unpacklo_epi64(low01, low23);
        lines[1][g] = _mm_unpackhi_epi64(low01, low23);
        lines[2][g] = _mm_unpacklo_epi64(high01, high23);
        lines[3][g] = _mm_unpackhi_epi64(high01, high23);
      }
      auto *to = reinterpret_cast<__m128i *>(out + 4 * kInterleavedRows * w);
      for (int i = 0; i < 4; ++i) {
        for (int g = 0; g < 4; ++g) _mm_storeu_si128(to + 4 * i + g, lines[i][g]);
      }
    }
  }
#endif
  for (; w < num_words; ++w) {
    for (int r = 0; r < num_rows; ++r) {
      std::memcpy(out + 4 * (kInterleavedRows * w + r),
                  words + static_cast<uint64_t>(r) * row_bytes + 4 * w, 4);
    }
  }
}

// A q6_k block without its f16: ql, qh and scales, as words.
constexpr int kQ6kWords = 52;

// Such a block in the order of its tile (interleave.h).
void reorder_q6_k(const uint8_t *block, uint32_t out[kQ6kWords]) {
  uint32_t in[kQ6kWords];
  std::memcpy(in, block, sizeof(in));
  std::memcpy(out, in + 48, 16);
  for (int s = 0; s < 8; ++s) {
    // Of a half, ql has elements 32 k to 32 k + 31 in the low nibbles (k 0, 1) or the high ones (2,
    // 3) of its first or second eight words, and qh in bits 2 k and 2 k + 1.
    const int half = s / 4, k = s % 4;
    const uint32_t *low = in + 16 * half + 8 * (k % 2), *top = in + 32 + 8 * half;
    uint32_t *to = out + 4 + 6 * s;
    for (int i = 0; i < 2; ++i) {
      to[i] = 0;
      for (int g = 0; g < 4; ++g) to[i] |= ((top[4 * i + g] >> (2 * k)) & 0x03030303) << (2 * g);
    }
    for (int g = 0; g < 4; ++g) {
      const int shift = k < 2 ? 0 : 4;
      to[2 + g] = ((low[g] >> shift) & 0x0f0f0f0f) | ((low[4 + g] >> shift) & 0x0f0f0f0f) << 4;
    }
  }
}

}  // namespace

bool can_interleave(DType dtype) {
  BlockShape shape;
  return find_shape(dtype, &shape);
}

uint64_t interleaved_bytes(int64_t rows, uint64_t row_bytes) {
  const int64_t tiles = (rows + kInterleavedRows - 1) / kInterleavedRows;
  return static_cast<uint64_t>(tiles) * kInterleavedRows * row_bytes;
}

void interleave_rows(DType dtype, const uint8_t *rows, uint64_t row_bytes, int num_rows, int cols,
                     uint8_t *out) {
  BlockShape shape = {-1, -1};
  find_shape(dtype, &shape);
  const DTypeInfo &info = dtype_info(dtype);
  const int block_bytes = static_cast<int>(info.block_bytes);
  const int num_blocks = cols / static_cast<int>(info.block_elems);
  const int half_bytes = shape.half >= 0 ? 2 * kInterleavedRows : 0;
  if (num_rows < kInterleavedRows) std::memset(out, 0, kInterleavedRows * row_bytes);
  const int first_word = shape.half == 0 ? 2 : 0;  // bytes in front of it
  const int num_words = (block_bytes - first_word) / 4;
  for (int b = 0; b < num_blocks; ++b) {
    const uint8_t *block = rows + static_cast<uint64_t>(b) * block_bytes;
    uint8_t *tile = out + static_cast<uint64_t>(b) * kInterleavedRows * block_bytes;
    if (dtype == DType::kQ6_K) {
      uint32_t words[kInterleavedRows][kQ6kWords];
      for (int r = 0; r < num_rows; ++r)
        reorder_q6_k(block + static_cast<uint64_t>(r) * row_bytes, words[r]);
      interleave_words(reinterpret_cast<const uint8_t *>(words), sizeof(words[0]), num_rows,
                       kQ6kWords, tile + half_bytes);
    } else {
      interleave_words(block + first_word, row_bytes, num_rows, num_words, tile + half_bytes);
    }
    for (int r = 0; r < num_rows; ++r, block += row_bytes) {
      if (shape.half >= 0) std::memcpy(tile + 2 * r, block + shape.half, 2);
      if (shape.fifth_bits >= 0) {
        uint32_t bits;
        std::memcpy(&bits, block + shape.fifth_bits, 4);
        bits = permute_fifth_bits(bits);
        const int word = (shape.fifth_bits - first_word) / 4;
        std::memcpy(tile + half_bytes + 4 * (kInterleavedRows * word + r), &bits, 4);
      }
    }
  }
}

}  // namespace xllm::cpu
