#include <algorithm>
#include <map>

#include "backend/cuda/gemv.cuh"
#include "backend/cuda/matmul.h"
#include "backend/cuda/mma_few.cuh"
#include "backend/cuda/mma_tile.cuh"
#include "backend/cuda/plain_matmul.cuh"
#include "backend/cuda/repack.h"
#include "base/checked.h"

namespace xllm {
namespace cuda {
namespace {

constexpr int kMaxTileTokens = 64;
constexpr int kFewThreads = 512;  // of products of few tokens, on an SM: what registers allow
constexpr int kReservedSharedPerCta = 1024;  // taken by the system from each CTA's share of an SM
constexpr int kStaticShared = 128;  // of the kernels that finish a norm, with its alignment

int largest_chunk(const MatmulArgs &args) {
  int bytes = 0;
  for (int i = 0; i < args.num_segments; ++i)
    bytes = std::max(bytes, static_cast<int>(chunk_bytes(args.segments[i].type)));
  return bytes;
}

MatmulSegment segment_of(const DeviceMatrix &matrix, int64_t out_row) {
  MatmulSegment segment = {};
  segment.tiles = matrix.data;
  segment.tile_bytes = static_cast<int64_t>(tile_bytes(matrix.type, matrix.cols));
  segment.type = matrix.type;
  segment.num_rows = static_cast<int>(matrix.rows);
  segment.num_tiles = (segment.num_rows + kTileRows - 1) / kTileRows;
  segment.out_row = static_cast<int>(out_row);
  return segment;
}

void set_slices(int64_t cols, MatmulArgs *args) {
  const SlicePlan plan = slice_plan(cols);
  args->num_units = plan.num_units;
  args->num_slices = plan.num_slices;
}

// ---- launchers ----

int num_tiles(const MatmulArgs &args) {
  int tiles = 0;
  for (int i = 0; i < args.num_segments; ++i) tiles += args.segments[i].num_tiles;
  return tiles;
}

// Tiles of a group, as group_tiles on the device; for kStore and kAddTo `tiles` at once.
int set_groups(MatmulArgs *args, int tiles) {
  if (args->epilogue == kSwiGlu) return 4;
  if (args->epilogue == kAddNorm) return 2;
  args->tiles_per_group = tiles;
  args->num_groups = (num_tiles(*args) + tiles - 1) / tiles;
  return tiles;
}

void launch_gemv(const Launch &launch, MatmulArgs args) {
  const int tiles = set_groups(&args, 1);
  const int width = args.num_tokens == 1 ? 1 : args.num_tokens <= 4 ? 4 : 8;
  const size_t shared =
      static_cast<size_t>(tiles * args.num_slices * kTileRows * width) * sizeof(float);
  const auto kernel = width == 1 ? gemv_kernel<1> : width == 4 ? gemv_kernel<4> : gemv_kernel<8>;
  launch_kernel(launch, "gemv", kernel, dim3(static_cast<unsigned>(args.num_groups)),
                static_cast<unsigned>(args.num_slices * kWarp), shared, args);
}

[[noreturn]] void refuse_columns(const MatmulArgs &args) {
  throw Error(Status::kUnimplemented,
              "CUDA: a matrix of " + std::to_string(args.num_units * kUnitCols) +
                  " columns is wider than the matrix kernels can take; use the CPU backend");
}

using FewKernel = void (*)(MatmulArgs);
constexpr TypeSet kTypeSets[] = {TypeSet::kQ4KQ6K, TypeSet::kQ8_0, TypeSet::kAll};

template <TypeSet kSet>
FewKernel few_kernel_of(int tokens) {
  return tokens == 1   ? mma_few_kernel<1, kSet>
         : tokens == 2 ? mma_few_kernel<2, kSet>
         : tokens == 4 ? mma_few_kernel<4, kSet>
                       : mma_few_kernel<8, kSet>;
}

FewKernel few_kernel(TypeSet set, int tokens) {
  return set == TypeSet::kQ4KQ6K ? few_kernel_of<TypeSet::kQ4KQ6K>(tokens)
         : set == TypeSet::kQ8_0 ? few_kernel_of<TypeSet::kQ8_0>(tokens)
                                 : few_kernel_of<TypeSet::kAll>(tokens);
}

TypeSet type_set_of(const MatmulArgs &args) {
  for (const TypeSet set : {TypeSet::kQ4KQ6K, TypeSet::kQ8_0}) {
    bool has_all = true;
    for (int i = 0; i < args.num_segments; ++i)
      has_all = has_all && contains(set, args.segments[i].type);
    if (has_all) return set;
  }
  return TypeSet::kAll;
}

int padded_tokens(int num_tokens) {
  int pad = 1;
  while (pad < num_tokens) pad *= 2;
  return pad;
}

int few_shared_bytes(int num_units, int num_slices, int stage_bytes, int group_tiles, int tokens,
                     int warps, int stages) {
  return few_barrier_bytes(warps, stages) + warps * stages * stage_bytes +
         staged_acts_bytes(num_units, tokens) + warps * few_factor_bytes(tokens) +
         few_partials_bytes(group_tiles, num_slices, tokens);
}

// How many tiles of 16 rows a CTA finishes at once where the epilogue leaves the choice: as many as
// give its warps a slice each without leaving SMs idle.
int choose_group(const Device &device, const MatmulArgs &args, int max_warps) {
  const int tiles = num_tiles(args);
  int best = 1;
  for (int n = 2; n <= 4 && n * args.num_slices <= max_warps; ++n) {
    if ((tiles + n - 1) / n * 10 >= device.num_sms * 9) best = n;
  }
  return best;
}

void launch_mma_few(const Launch &launch, MatmulArgs args) {
  const Device &device = *launch.device;
  const int tokens = padded_tokens(args.num_tokens);
  const int max_warps = tokens <= 2 ? FewLayout<1>::kMaxWarps : FewLayout<8>::kMaxWarps;
  const int tiles = set_groups(&args, choose_group(device, args, max_warps));
  const int jobs = tiles * args.num_slices;
  const int rounds = (jobs + max_warps - 1) / max_warps;
  const int warps = (jobs + rounds - 1) / rounds;
  // Two chunks to a copy where two such stages fit, which halves what a ring costs.
  const auto shared_with = [&](int stages) {
    return few_shared_bytes(args.num_units, args.num_slices, args.stage_bytes, tiles, tokens, warps,
                            stages);
  };
  const int most = device.max_shared_bytes - kStaticShared;
  args.stage_chunks = 2;
  args.stage_bytes = 2 * largest_chunk(args);
  if (shared_with(2) > most) {
    args.stage_chunks = 1;
    args.stage_bytes = largest_chunk(args);
  }
  // A very long K leaves no room for 8 tokens at once: fewer, more often.
  if (shared_with(2) > most && tokens > 1) {
    const int first = args.first_token, count = args.num_tokens, half = tokens / 2;
    args.num_tokens = half;
    launch_mma_few(launch, args);
    args.first_token = first + half;
    args.num_tokens = count - half;
    launch_mma_few(launch, args);
    return;
  }
  // As deep a ring as a CTA's share of an SM allows, and two stages at least.
  const int threads = warps * kWarp, by_threads = kFewThreads / threads;
  const int share = device.shared_bytes_per_sm / std::max(1, device.few_ctas) -
                    kReservedSharedPerCta - kStaticShared;
  args.num_stages = shared_with(2) <= most ? 2 : 1;
  if (shared_with(args.num_stages) > most) refuse_columns(args);
  const int ring_stages = std::min(kFewMaxStages, device.ring_stages);
  // Deeper than all of a warp's work is of no use.
  const int warp_chunks = (args.num_units / kUnitsPerChunk / args.num_slices + 1) * rounds;
  const int useful = args.num_groups > device.num_sms ? kFewMaxStages : warp_chunks;
  for (int stages = 3; stages <= std::min(ring_stages, useful / args.stage_chunks + 1); ++stages) {
    if (shared_with(stages) <= std::min(share, most)) args.num_stages = stages;
  }
  const int shared = shared_with(args.num_stages);
  const int by_shared = device.shared_bytes_per_sm / (shared + kReservedSharedPerCta);
  const int fits = std::max(1, std::min(by_shared, by_threads));
  const TypeSet set = type_set_of(args);
  launch_kernel(launch, "mma_few", few_kernel(set, tokens),
                dim3(static_cast<unsigned>(std::min(args.num_groups, device.num_sms * fits))),
                static_cast<unsigned>(threads), static_cast<size_t>(shared), args);
}

int tile_groups(int num_tokens) { return num_tokens <= 16 ? 2 : num_tokens <= 32 ? 4 : 8; }

void launch_mma_tile(const Launch &launch, MatmulArgs args, int num_row_groups, int num_slices_y) {
  args.stage_bytes = largest_chunk(args);
  const int groups = tile_groups(args.num_tokens);
  int shared = kTileStages * mma_tile_stage_bytes(args.stage_bytes, groups);
  if (args.epilogue == kSwiGlu) shared = std::max(shared, 64 * (8 * groups + 1) * 4);
  const auto kernel = groups == 2   ? mma_tile_kernel<2>
                      : groups == 4 ? mma_tile_kernel<4>
                                    : mma_tile_kernel<8>;
  launch_kernel(launch, "mma_tile", kernel,
                dim3(static_cast<unsigned>(num_row_groups), static_cast<unsigned>(num_slices_y)),
                kTileWarps * kWarp, static_cast<size_t>(shared), args);
}

int num_row_groups(const MatmulArgs &args) {
  if (args.epilogue == kSwiGlu) return args.num_groups;
  int groups = 0;
  for (int i = 0; i < args.num_segments; ++i) groups += (args.segments[i].num_tiles + 3) / 4;
  return groups;
}

// Products of more than 8 tokens spread the slices over CTAs where the rows alone would leave SMs
// idle. The choice looks at the matrix only through its speed: partial sums are added up in the
// order in which one CTA would have.
constexpr int64_t kPartialRows = 16384;
bool uses_partials(int64_t rows) { return rows <= kPartialRows; }

void run_tiles(const Launch &launch, MatmulArgs args, const Product *product, int64_t num_rows) {
  const int num_tokens = args.num_tokens;
  for (int first = 0; first < num_tokens;) {
    const int left = num_tokens - first;
    args.first_token = first;
    if (!launch.device->has_int8_mma) {
      args.num_tokens = std::min(left, 8);
      launch_gemv(launch, args);
    } else if (left <= 8) {
      args.num_tokens = left;
      launch_mma_few(launch, args);
    } else {
      args.num_tokens = std::min(left, kMaxTileTokens);
      if (product != nullptr &&
          product->matrix->parts.size() == static_cast<size_t>(args.num_segments) &&
          uses_partials(num_rows) && args.num_slices > 1) {
        MatmulArgs partial = args;
        partial.epilogue = kPartials;
        partial.out = product->partials;
        partial.out_stride = num_rows;
        launch_mma_tile(launch, partial, num_row_groups(args), args.num_slices);
        launch_kernel(launch, "combine_partials", combine_partials_kernel,
                      dim3(static_cast<unsigned>((num_rows + 255) / 256),
                           static_cast<unsigned>(args.num_tokens)),
                      256, 0, static_cast<const float *>(product->partials), args.num_slices,
                      args.num_tokens, static_cast<int>(num_rows), args.out, args.out_stride, first,
                      args.bias, args.epilogue == kAddTo);
      } else {
        launch_mma_tile(launch, args, num_row_groups(args), 1);
      }
    }
    first += args.num_tokens;
  }
}

void run_plain(const Launch &launch, const Product &product, const DeviceMatrix &matrix,
               int64_t out_row) {
  PlainArgs args = {};
  args.weights = matrix.data;
  args.type = matrix.type;
  args.num_rows = matrix.rows;
  args.num_cols = matrix.cols;
  args.act = *product.act;
  args.out = product.out;
  args.out_stride = product.out_stride;
  args.out_row = static_cast<int>(out_row);
  args.bias = product.bias;
  args.is_added = product.is_added;
  for (int first = 0; first < product.num_tokens; first += kActGroup) {
    args.first_token = first;
    args.num_tokens = std::min(kActGroup, product.num_tokens - first);
    launch_kernel(launch, "plain_matmul", plain_matmul_kernel,
                  dim3(static_cast<unsigned>((matrix.rows + 7) / 8)), 256, 0, args);
  }
}

}  // namespace

int64_t FusedMatrix::rows() const {
  int64_t total = 0;
  for (const DeviceMatrix &part : parts) total += part.rows;
  return total;
}

SlicePlan slice_plan(int64_t cols) {
  SlicePlan plan = {};
  plan.num_units = static_cast<int>((cols + kUnitCols - 1) / kUnitCols);
  plan.num_chunks = (plan.num_units + kUnitsPerChunk - 1) / kUnitsPerChunk;
  plan.num_slices = num_slices_of(plan.num_chunks);
  return plan;
}

uint64_t partial_floats(const FusedMatrix &matrix, int64_t num_tokens) {
  if (num_tokens <= 8 || !uses_partials(matrix.rows())) return 0;
  const int64_t tokens = std::min<int64_t>(num_tokens, kMaxTileTokens);
  return static_cast<uint64_t>(slice_plan(matrix.cols()).num_slices * tokens * matrix.rows());
}

void prepare_matmul(Device *device) {
  const auto opt_in = [&](const void *kernel) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               device->max_shared_bytes - kStaticShared),
          "set shared memory size");
  };
  for (const void *kernel : {reinterpret_cast<const void *>(mma_tile_kernel<2>),
                             reinterpret_cast<const void *>(mma_tile_kernel<4>),
                             reinterpret_cast<const void *>(mma_tile_kernel<8>)}) {
    opt_in(kernel);
  }
  for (const TypeSet set : kTypeSets) {
    for (const int tokens : {1, 2, 4, 8})
      opt_in(reinterpret_cast<const void *>(few_kernel(set, tokens)));
  }
}

bool can_defer_norm(const Device &device, const FusedMatrix &matrix, int num_tokens) {
  if (!device.has_int8_mma || num_tokens > kActGroup || matrix.parts.size() != 1) return false;
  const DeviceMatrix &part = matrix.parts.front();
  if (is_plain(part.type) || part.rows % kActBlock != 0) return false;
  const SlicePlan plan = slice_plan(part.cols);
  const int warps = std::min(2 * plan.num_slices, FewLayout<8>::kMaxWarps);
  const int shared =
      few_shared_bytes(plan.num_units, plan.num_slices, static_cast<int>(chunk_bytes(part.type)), 2,
                       padded_tokens(num_tokens), warps, 1);
  return shared <= device.max_shared_bytes - kStaticShared;
}

void matmul_norm(const Launch &launch, const Product &product, const float *norm_weight,
                 const ActView &act_out, float *squares) {
  MatmulArgs args = {};
  const DeviceMatrix &part = product.matrix->parts.front();
  set_slices(part.cols, &args);
  args.act = *product.act;
  args.num_tokens = product.num_tokens;
  args.epilogue = kAddNorm;
  args.out = product.out;
  args.out_stride = product.out_stride;
  args.bias = product.bias;
  args.segments[args.num_segments++] = segment_of(part, 0);
  args.num_groups = static_cast<int>(part.rows / kActBlock);
  args.act_out = act_out;
  args.norm_weight = norm_weight;
  args.squares_out = squares;
  launch_mma_few(launch, args);
}

void matmul(const Launch &launch, const Product &product) {
  MatmulArgs args = {};
  const FusedMatrix &matrix = *product.matrix;
  set_slices(matrix.cols(), &args);
  args.act = *product.act;
  args.num_tokens = product.num_tokens;
  args.epilogue = product.is_added ? kAddTo : kStore;
  args.out = product.out;
  args.out_stride = product.out_stride;
  args.bias = product.bias;
  if (product.norm_in != nullptr) args.norm_in = *product.norm_in;
  int64_t row = 0;
  for (const DeviceMatrix &part : matrix.parts) {
    if (is_plain(part.type)) {
      run_plain(launch, product, part, row);
    } else {
      const MatmulSegment segment = segment_of(part, row);
      args.segments[args.num_segments++] = segment;
    }
    row += part.rows;
  }
  if (args.num_segments > 0) run_tiles(launch, args, &product, row);
}

void matmul_swiglu(const Launch &launch, const DeviceMatrix &gate, const DeviceMatrix &up,
                   const ActView &act, const DeferredNorm *norm_in, int num_tokens,
                   const ActView &act_out) {
  MatmulArgs args = {};
  if (norm_in != nullptr) args.norm_in = *norm_in;
  set_slices(gate.cols, &args);
  args.act = act;
  args.num_tokens = num_tokens;
  args.epilogue = kSwiGlu;
  args.act_out = act_out;
  args.segments[0] = segment_of(gate, 0);
  args.segments[1] = segment_of(up, 0);
  args.num_segments = 2;
  args.num_groups = static_cast<int>(gate.rows / 32);
  run_tiles(launch, args, nullptr, 0);
}

}  // namespace cuda
}  // namespace xllm
