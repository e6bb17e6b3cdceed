// The table of AVX-512 kernels: products of interleaved weights with VNNI, and attention; the rest
// as with AVX2.
// Compiled for AVX-512: nothing of it may run before choose_kernels has looked.
#include "backend/cpu/attention_avx512.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/tile_dot_table.h"

namespace xllm::cpu {
namespace {

Kernels make_kernels() {
  Kernels k = avx2_kernels();
  k.name = "avx512";
  k.tile_rows = kAvx512TileRows;
  for (uint32_t type = 0; type < 32; ++type)
    k.tiles[type] = avx512_tile_dot(static_cast<DType>(type));
  k.attend_tile = avx512_attend_tile;
  k.attend_halves = avx512_attend_halves;
  return k;
}

}  // namespace

const Kernels &avx512_kernels() {
  static const Kernels kernels = make_kernels();
  return kernels;
}

}  // namespace xllm::cpu
