#include <algorithm>

#include "backend/cuda/act_rows.h"
#include "backend/cuda/matmul.h"
#include "backend/cuda/matmul_kernels.h"
#include "backend/cuda/partial_sums.cuh"
#include "backend/cuda/plain_matmul.cuh"
#include "backend/cuda/repack.h"

namespace xllm {
namespace cuda {
namespace {

static_assert(kMaxSlices <= kMaxPartials, "a row kernel adds up what a product leaves");

// Above this, staging costs a product of few tokens more than a kernel before it.
constexpr int64_t kMaxStagedElements = 16384;
// Wider matrices have rows enough for every SM, and are never cut into slices.
constexpr int64_t kMaxPartialRows = 16384;

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

void set_columns(int64_t cols, MatmulArgs *args) {
  args->num_units = static_cast<int>((cols + kUnitCols - 1) / kUnitCols);
  args->num_chunks = (args->num_units + kUnitsPerChunk - 1) / kUnitsPerChunk;
  args->num_slices = num_slices_of(args->num_chunks);
}

void run_plain(const Launch &launch, const Product &product, const DeviceMatrix &matrix,
               int64_t out_row) {
  PlainArgs args = {};
  args.weights = matrix.data;
  args.type = matrix.type;
  args.num_rows = matrix.rows;
  args.num_cols = matrix.cols;
  args.act = product.act;
  args.out = product.out;
  args.out_stride = product.out_stride;
  args.out_row = static_cast<int>(out_row);
  args.bias = product.bias;
  args.is_added = product.finish == Finish::kAdd;
  for (int first = 0; first < product.num_tokens; first += kActGroup) {
    args.first_token = first;
    args.num_tokens = std::min(kActGroup, product.num_tokens - first);
    launch_kernel(launch, "plain_matmul", plain_matmul_kernel,
                  dim3(static_cast<unsigned>((matrix.rows + 7) / 8)), 256, 0, args);
  }
}

// Up to kMaxTileTokens tokens with the slices spread over CTAs.
void run_partials(const Launch &launch, MatmulArgs args, const Product &product, Partials *left) {
  const int64_t rows = product.matrix->rows();
  const Partials sums = {product.partials, args.num_slices, static_cast<int>(rows)};
  args.epilogue = kPartials;
  args.out = product.partials;
  args.out_stride = rows;
  launch_mma_tile(launch, args);
  if (left != nullptr) {
    *left = sums;
    return;
  }
  add_partials(launch, sums, args.num_tokens, product.bias, product.finish == Finish::kAdd,
               product.out + args.first_token * product.out_stride, product.out_stride);
}

void run_tiles(const Launch &launch, MatmulArgs args, const Product &product, Partials *left) {
  const Device &device = *launch.device;
  if (!device.has_int8_mma) return launch_gemv(launch, args);
  const int num_tokens = args.num_tokens;
  const bool may_cut = args.epilogue != kSwiGlu && product.matrix->rows() <= kMaxPartialRows &&
                       args.num_slices > 1 && !product.matrix->has_plain_part();
  for (int first = 0; first < num_tokens; first += args.num_tokens) {
    args.first_token = first;
    args.num_tokens = num_tokens - first;
    args.num_tokens = tile_launch_tokens(device, args, may_cut);
    if (args.num_tokens <= kMaxFewTokens) {
      launch_mma_few(launch, args);
    } else if (may_cut && args.num_tokens <= kMaxTileTokens && tile_wants_partials(device, args)) {
      run_partials(launch, args, product, num_tokens <= kMaxTileTokens ? left : nullptr);
    } else {
      launch_mma_tile(launch, args);
    }
  }
}

}  // namespace

int64_t FusedMatrix::rows() const {
  int64_t total = 0;
  for (const DeviceMatrix &part : parts) total += part.rows;
  return total;
}

bool FusedMatrix::has_plain_part() const {
  return std::any_of(parts.begin(), parts.end(),
                     [](const DeviceMatrix &part) { return is_plain(part.type); });
}

void prepare_matmul(Device *device) {
  prepare_few(device);
  prepare_tile(device);
}

bool takes_rows(const Device &device, const FusedMatrix &matrix, int num_tokens) {
  return device.has_int8_mma && num_tokens <= kMaxFewTokens &&
         num_tokens * matrix.cols() <= kMaxStagedElements && !matrix.has_plain_part();
}

void matmul(const Launch &launch, const Product &product, Partials *left) {
  if (left != nullptr) *left = {};
  MatmulArgs args = {};
  set_columns(product.matrix->cols(), &args);
  args.act = product.act;
  args.rows = product.rows;
  args.num_tokens = product.num_tokens;
  args.epilogue = product.finish == Finish::kStore ? kStore
                  : product.finish == Finish::kAdd ? kAddTo
                                                   : kSwiGlu;
  args.out = product.out;
  args.out_stride = product.out_stride;
  args.bias = product.bias;
  int64_t row = 0;
  for (const DeviceMatrix &part : product.matrix->parts) {
    if (is_plain(part.type)) {
      run_plain(launch, product, part, row);
    } else {
      args.segments[args.num_segments++] = segment_of(part, row);
    }
    row += part.rows;
  }
  if (args.num_segments > 0) run_tiles(launch, args, product, left);
}

uint64_t partial_floats(int64_t rows, int64_t cols, int64_t num_tokens) {
  if (num_tokens <= kMaxFewTokens || rows > kMaxPartialRows) return 0;
  const int slices = num_slices_of(static_cast<int>((cols + kChunkCols - 1) / kChunkCols));
  return static_cast<uint64_t>(slices * std::min<int64_t>(num_tokens, kMaxTileTokens) * rows);
}

}  // namespace cuda
}  // namespace xllm
