// Attention's own source on the host (cta.h): float64, and the same bytes whatever the depth of the
// rings, whoever finishes q, k and v, whether the product left slices, alone as in company, and by
// themselves as in a prompt's tiles.
// Arguments: numbers of cases; none: all. Exit status 0: everything is right.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cta.h"

namespace xllm::cuda {
thread_local __attribute__((aligned(128))) uint8_t shared[256 << 10];  // of attention_kernel
thread_local __attribute__((aligned(1024))) uint8_t wide_shared[256 << 10];
thread_local __attribute__((aligned(16))) float merge_weights[64 << 10];
}  // namespace xllm::cuda

#include "backend/cuda/attention.cuh"
#include "backend/cuda/prompt_attention.cuh"
#include "backend/cuda/prompt_wide.cuh"
#include "backend/cuda/qkv_rows.cuh"
#include "backend/cuda/spread_rows.cuh"

namespace xllm::on_host {
namespace {

using cuda::AttentionArgs;
using Kernel = void (*)(AttentionArgs);

struct Case {
  const char *name;
  int rows, keys, heads, kv_heads, head_dim, block_size, window, rotary_dim;
  bool has_norm, is_neighbor;
  bool is_prompt;  // consecutive rows of one sequence
  int code_bits;   // of a value in the cache; 0: f16
};

// note: keys of row r: 37 r fewer; of a prompt one more than of the row before.
constexpr Case kCases[] = {
    {"groups of 4", 2, 150, 8, 2, 128, 64, 0, 128, true, false},
    {"several splits", 1, 700, 4, 1, 128, 64, 0, 128, false, false},
    {"groups of 6, short", 2, 20, 12, 2, 128, 16, 0, 128, false, false},
    {"one key", 1, 1, 4, 1, 128, 16, 0, 128, true, false},
    {"window over splits", 1, 600, 4, 1, 128, 32, 300, 128, true, false},
    {"neighbours", 1, 333, 8, 2, 128, 16, 0, 128, true, true},
    {"half of a head turns, groups of 16", 1, 270, 16, 1, 128, 64, 0, 64, true, false},
    {"64, groups of 3", 1, 270, 6, 2, 64, 64, 0, 64, false, false},
    {"64, groups of 16", 1, 130, 16, 1, 64, 16, 0, 64, true, true},
    {"64, groups of 24, window", 1, 300, 24, 1, 64, 16, 70, 64, true, false},
    {"80", 1, 200, 4, 1, 80, 128, 0, 32, true, false},
    {"96", 1, 260, 2, 2, 96, 32, 0, 96, false, false},
    {"96, groups of 12, window", 1, 90, 12, 1, 96, 16, 64, 96, true, true},
    {"256", 1, 290, 4, 2, 256, 64, 0, 256, true, false},
    {"256, groups of 16, window", 1, 140, 16, 1, 256, 64, 100, 128, true, false},
    {"prompt, groups of 4 over a split", 11, 262, 8, 2, 128, 64, 0, 128, true, false, true},
    {"prompt, three splits", 3, 600, 4, 1, 128, 32, 0, 128, false, false, true},
    {"prompt from its beginning, 64, groups of 3", 12, 12, 6, 2, 64, 16, 0, 64, false, false, true},
    {"prompt, 96, groups of 12", 3, 130, 12, 1, 96, 32, 0, 96, true, true, true},
    {"prompt, 80", 33, 140, 1, 1, 80, 128, 0, 32, true, false, true},
    {"prompt, groups of 2", 17, 40, 4, 2, 128, 64, 0, 128, true, false, true},
    {"int8, groups of 4", 2, 300, 8, 2, 128, 64, 0, 128, true, false, false, 8},
    {"int4, 64, groups of 12, window", 1, 130, 12, 1, 64, 16, 70, 64, true, false, false, 4},
    {"int8, 256", 1, 90, 2, 1, 256, 16, 0, 256, false, false, false, 8},
    {"int4 prompt over a split", 9, 260, 4, 1, 128, 32, 0, 128, true, false, true, 4},
    {"int8 prompt, 64", 5, 20, 4, 2, 64, 16, 0, 64, true, false, true, 8},
};

template <int kHeadDim, int kGroups>
Kernel kernel_of(int depth, bool finishes) {
  if (!finishes) return cuda::attention_kernel<kHeadDim, kGroups, 1, false>;
  if (depth == 1) return cuda::attention_kernel<kHeadDim, kGroups, 1, true>;
  if (depth == 2) return cuda::attention_kernel<kHeadDim, kGroups, 2, true>;
  if constexpr (kHeadDim <= 128) return cuda::attention_kernel<kHeadDim, kGroups, 4, true>;
  return nullptr;
}

template <int kHeadDim>
Kernel kernel_of(int groups, int depth, bool finishes) {
  return groups == 1 ? kernel_of<kHeadDim, 1>(depth, finishes)
                     : kernel_of<kHeadDim, 2>(depth, finishes);
}

template <int kHeadDim>
Kernel code_kernel_of(const Case &c) {
  const bool is_two = c.heads / c.kv_heads > 8;
  if (c.code_bits == 8)
    return is_two ? cuda::attention_kernel<kHeadDim, 2, 2, false, 8>
                  : cuda::attention_kernel<kHeadDim, 1, 2, false, 8>;
  return is_two ? cuda::attention_kernel<kHeadDim, 2, 2, false, 4>
                : cuda::attention_kernel<kHeadDim, 1, 2, false, 4>;
}

Kernel kernel_of(const Case &c, int depth, bool finishes) {
  if (c.code_bits != 0) {
    if (finishes) return nullptr;
    return c.head_dim == 64    ? code_kernel_of<64>(c)
           : c.head_dim == 128 ? code_kernel_of<128>(c)
                               : code_kernel_of<256>(c);
  }
  const int groups = c.heads / c.kv_heads > 8 ? 2 : 1;
  switch (c.head_dim) {
    case 64:
      return kernel_of<64>(groups, depth, finishes);
    case 80:
      return kernel_of<80>(groups, depth, finishes);
    case 96:
      return kernel_of<96>(groups, depth, finishes);
    case 128:
      return kernel_of<128>(groups, depth, finishes);
    default:
      return kernel_of<256>(groups, depth, finishes);
  }
}

Kernel prompt_kernel_of(const Case &c) {
  switch (1000 * c.code_bits + c.head_dim) {
    case 64:
      return cuda::prompt_attention_kernel<64>;
    case 80:
      return cuda::prompt_attention_kernel<80>;
    case 96:
      return cuda::prompt_attention_kernel<96>;
    case 128:
      return cuda::prompt_attention_kernel<128>;
    case 8064:
      return cuda::prompt_attention_kernel<64, 8>;
    case 4128:
      return cuda::prompt_attention_kernel<128, 4>;
    default:
      return nullptr;
  }
}

Kernel wide_kernel_of(const Case &c) {
  if (c.code_bits != 0) return nullptr;
  return c.head_dim == 64    ? cuda::wide_attention_kernel<64>
         : c.head_dim == 128 ? cuda::wide_attention_kernel<128>
                             : nullptr;
}

class Run {
 public:
  explicit Run(const Case &c) : c_(c), num_all_(c.heads + 2 * c.kv_heads) {
    const int blocks_per_row = (c.keys + c.block_size - 1) / c.block_size;
    const int num_blocks = blocks_per_row * (c.is_prompt ? 1 : c.rows) + 1;
    row_bytes_ = static_cast<size_t>(c.head_dim * (is_coded() ? c.code_bits : 16) / 8);
    page_bytes_ = static_cast<size_t>(c.block_size) *
                  (row_bytes_ + static_cast<size_t>(is_coded() ? c.head_dim / 16 : 0));
    block_bytes_ = page_bytes_ * 2 * static_cast<size_t>(c.kv_heads);
    first_pool_.resize(num_blocks * block_bytes_ / 2);
    for (uint16_t &v : first_pool_) v = __float2half_rn(random()).bits;
    if (is_coded()) fill_codes();
    bias_ = randoms(static_cast<size_t>(num_all_) * c.head_dim, 0.1f);
    slices_ = randoms(3 * bias_.size() * static_cast<size_t>(c.rows), 0.7f);
    const size_t n = slices_.size() / 3;
    for (size_t i = 0; i < n; ++i) {
      const float sum = (slices_[i] + slices_[n + i]) + slices_[2 * n + i];
      qkv_.push_back(sum + bias_[i % bias_.size()]);
    }
    q_norm_ = randoms(static_cast<size_t>(c.head_dim), 1);
    k_norm_ = randoms(static_cast<size_t>(c.head_dim), 1);
    for (int i = 0; i < num_blocks; ++i) tables_.push_back(num_blocks - 1 - i);
    for (int p = 0; p <= c.keys / 512; ++p) add_turns(p * 512, &coarse_);
    for (int p = 0; p < 512; ++p) add_turns(p, &fine_);
    for (int r = 0; r < c.rows; ++r) {
      positions_.push_back(c.is_prompt ? c.keys - c.rows + r : std::max(0, c.keys - 1 - 37 * r));
      row_tables_.push_back(c.is_prompt ? 0 : r * blocks_per_row);
      const int at = positions_.back();
      kv_indices_.push_back(int64_t{block_of(r, at)} * c.block_size + at % c.block_size);
    }
    q_.resize(static_cast<size_t>(c.rows) * c.heads * c.head_dim);
    counters_.resize(static_cast<size_t>(c.rows * c.heads));
    clear();
  }

  // The outputs, NaN where nothing was written.
  std::vector<float> attend(int depth, bool finishes, bool has_slices, int first_row = 0) {
    AttentionArgs args = arguments(has_slices);
    if (!finishes) finish_rows(args);
    args.first_row = first_row;
    const unsigned splits = give_splits(&args, first_row);
    const int group_size = c_.heads / c_.kv_heads;
    const Kernel kernel = kernel_of(c_, depth, finishes);
    run_grid({splits, static_cast<unsigned>(c_.kv_heads * ((group_size + 15) / 16)),
              static_cast<unsigned>(c_.rows - first_row)},
             cuda::kAttentionThreads, fill_shared, [&] { kernel(args); });
    if (is_coded()) spread_out();
    return out_;
  }

  // The rows in tiles of one sequence, by either kernel.
  std::vector<float> attend_prompt(int splits_per_cta, bool is_wide) {
    AttentionArgs args = arguments(true);
    finish_rows(args);
    const unsigned splits = give_splits(&args, 0);
    std::vector<int32_t> tiles;
    const int most = cuda::prompt_tile_rows(args.group_size);
    for (int row = 0; row < c_.rows; row += most)
      tiles.push_back(cuda::pack_tile({row, std::min(most, c_.rows - row)}));
    args.tiles = tiles.data();
    args.max_splits = static_cast<int>(splits);
    args.splits_per_cta = splits_per_cta;
    const unsigned ctas = (splits + static_cast<unsigned>(splits_per_cta) - 1) /
                          static_cast<unsigned>(splits_per_cta);
    const auto kv_heads = static_cast<unsigned>(c_.kv_heads);
    const auto num_tiles = static_cast<unsigned>(tiles.size());
    if (is_wide) {
      const Kernel kernel = wide_kernel_of(c_);
      run_grid({num_tiles, kv_heads, ctas}, cuda::kWideThreads, fill_shared, [&] { kernel(args); });
      run_grid({static_cast<unsigned>(c_.rows), kv_heads, 1}, cuda::kMergeThreads, fill_shared,
               [&] { cuda::merge_rows_kernel(args); });
    } else {
      const Kernel kernel = prompt_kernel_of(c_);
      const auto pieces = static_cast<unsigned>(cuda::prompt_tile_pieces(args.group_size));
      run_grid({num_tiles * pieces, kv_heads, ctas}, cuda::kPromptThreads, fill_shared,
               [&] { kernel(args); });
    }
    if (is_coded()) spread_out();
    return out_;
  }

  void clear() {
    pool_ = first_pool_;
    out_.assign(q_.size(), NAN);
  }
  const std::vector<uint16_t> &pool() const { return pool_; }

  // Of the rows of this step: the largest distance of a stored value from the value, in the
  // largest of its 32.
  double rounding() const {
    double worst = 0;
    for (int row = 0; row < c_.rows; ++row) {
      for (int kind = 1; kind <= 2; ++kind) {
        for (int h = 0; h < c_.kv_heads; ++h) {
          const int key = positions_[static_cast<size_t>(row)];
          const std::vector<double> value =
              spread(finished(row, c_.heads + (kind - 1) * c_.kv_heads + h, kind));
          const std::vector<double> found =
              stored(pool_, page_of(row, key, kind, h), key % c_.block_size);
          for (size_t i = 0; i < value.size(); ++i) {
            double largest = 0;
            for (size_t k = i / 32 * 32; k < i / 32 * 32 + 32; ++k)
              largest = std::max(largest, std::fabs(value[k]));
            worst = std::max(worst, std::fabs(found[i] - value[i]) / largest);
          }
        }
      }
    }
    return worst;
  }

  double error(const std::vector<float> &out) const {
    double error = 0, norm = 0;
    for (int row = 0; row < c_.rows; ++row) {
      for (int head = 0; head < c_.heads; ++head) {
        const std::vector<double> truth = reference(row, head);
        for (int i = 0; i < c_.head_dim; ++i) {
          const double off = out[static_cast<size_t>((row * c_.heads + head) * c_.head_dim + i)] -
                             truth[static_cast<size_t>(i)];
          error += off * off;
          norm += truth[static_cast<size_t>(i)] * truth[static_cast<size_t>(i)];
        }
      }
    }
    return std::sqrt(error / norm);
  }

 private:
  static constexpr double kEps = 1e-6;

  bool is_coded() const { return c_.code_bits != 0; }
  // Codes of any bits, scales of about what values are.
  void fill_codes() {
    auto *bytes = reinterpret_cast<uint8_t *>(first_pool_.data());
    for (size_t page = 0; page < first_pool_.size() * 2; page += page_bytes_) {
      const size_t codes = static_cast<size_t>(c_.block_size) * row_bytes_;
      for (size_t i = 0; i < codes; ++i) bytes[page + i] = static_cast<uint8_t>(random() * 1000);
      for (size_t i = codes; i < page_bytes_; i += 2) {
        const float largest = 1.0f + 0.3f * random();
        const __half scale = __float2half_rn(largest / (c_.code_bits == 8 ? 127.0f : 7.0f));
        std::memcpy(bytes + page + i, &scale, 2);
      }
    }
  }
  // The stored row at `at` bytes of the pool's codes, row `row` of its page, in float64.
  std::vector<double> stored(const std::vector<uint16_t> &pool, size_t page, int row) const {
    const auto *bytes = reinterpret_cast<const uint8_t *>(pool.data()) + page;
    const uint8_t *codes = bytes + static_cast<size_t>(row) * row_bytes_;
    const uint8_t *scales = bytes + static_cast<size_t>(c_.block_size) * row_bytes_ +
                            static_cast<size_t>(row * c_.head_dim / 16);
    std::vector<double> v;
    for (int i = 0; i < c_.head_dim; ++i) {
      uint16_t half;
      std::memcpy(&half, is_coded() ? scales + i / 32 * 2 : codes + 2 * i, 2);
      const double value = static_cast<double>(__half2float({half}));
      const int code = c_.code_bits == 8 ? static_cast<int8_t>(codes[i])
                                         : (codes[i / 2] >> (i % 2 * 4) & 15) - 8;
      v.push_back(is_coded() ? value * code : value);
    }
    return v;
  }
  // A normalised Hadamard transform by its definition: entry (i, j) is the parity of i & j.
  static std::vector<double> spread(const std::vector<double> &v) {
    std::vector<double> out(v.size());
    for (size_t i = 0; i < v.size(); ++i) {
      for (size_t j = 0; j < v.size(); ++j) out[i] += __builtin_parityll(i & j) != 0 ? -v[j] : v[j];
      out[i] /= std::sqrt(static_cast<double>(v.size()));
    }
    return out;
  }
  void spread_out() {
    const int heads = c_.rows * c_.heads;
    run_grid(
        {static_cast<unsigned>((heads + cuda::kSpreadWarps - 1) / cuda::kSpreadWarps), 1, 1},
        cuda::kSpreadWarps * 32, [] {},
        [&] { cuda::spread_rows_kernel(out_.data(), heads, c_.head_dim); });
  }
  size_t page_of(int row, int key, int kind, int kv_head) const {
    return static_cast<size_t>(block_of(row, key)) * block_bytes_ +
           static_cast<size_t>((kind - 1) * c_.kv_heads + kv_head) * page_bytes_;
  }
  static void fill_shared() {
    std::fill(std::begin(cuda::shared), std::end(cuda::shared), uint8_t{0xff});
    std::fill(std::begin(cuda::wide_shared), std::end(cuda::wide_shared), uint8_t{0xff});
  }
  void finish_rows(const AttentionArgs &args) const {
    const auto heads = static_cast<unsigned>((num_all_ + cuda::kQkvWarps - 1) / cuda::kQkvWarps);
    run_grid(
        {heads, static_cast<unsigned>(c_.rows), 1}, cuda::kQkvWarps * 32, [] {},
        [&] { cuda::qkv_rows_kernel(args.rows); });
  }
  // Room for the splits of rows first_row..; how many there are.
  unsigned give_splits(AttentionArgs *args, int first_row) {
    unsigned splits = 1;
    for (size_t r = static_cast<size_t>(first_row); r < positions_.size(); ++r) {
      while (static_cast<int>(splits) < cuda::num_splits(positions_[r] + 1)) splits *= 2;
    }
    const size_t entries = static_cast<size_t>(c_.rows * c_.heads) * splits;
    partial_out_.assign(entries * static_cast<size_t>(c_.head_dim), NAN);
    partial_stats_.assign(entries, float2{NAN, NAN});
    args->partial_out = partial_out_.data();
    args->partial_stats = partial_stats_.data();
    return splits;
  }

  float random() {
    seed_ = seed_ * 1664525u + 1013904223u;
    return (static_cast<float>(seed_ >> 9) / 8388608.0f - 0.5f) * 2.6f;
  }
  std::vector<float> randoms(size_t count, float scale) {
    std::vector<float> v(count);
    for (float &x : v) x = random() * scale;
    return v;
  }
  double angle(int position, int pair) const {
    return position * std::pow(1e6, -2.0 * pair / c_.rotary_dim);
  }
  void add_turns(int position, std::vector<float2> *to) const {
    for (int i = 0; i < c_.rotary_dim / 2; ++i) {
      to->push_back({static_cast<float>(std::cos(angle(position, i))),
                     static_cast<float>(std::sin(angle(position, i)))});
    }
  }
  int block_of(int row, int key) const {
    return tables_[static_cast<size_t>(row_tables_[static_cast<size_t>(row)] +
                                       key / c_.block_size)];
  }

  AttentionArgs arguments(bool has_slices) {
    AttentionArgs args = {};
    args.q = q_.data();
    args.kv.base = reinterpret_cast<uint8_t *>(pool_.data());
    args.kv.block_bytes = static_cast<int64_t>(block_bytes_);
    args.kv.page_bytes = static_cast<int64_t>(page_bytes_);
    args.kv.block_size = c_.block_size;
    args.kv.num_kv_heads = c_.kv_heads;
    args.kv.bits = is_coded() ? c_.code_bits : 16;
    args.kv.scales_offset = static_cast<int64_t>(row_bytes_) * c_.block_size;
    while (1 << args.kv.block_shift < c_.block_size) ++args.kv.block_shift;
    args.positions = positions_.data();
    args.row_tables = row_tables_.data();
    args.tables = tables_.data();
    args.num_heads = c_.heads;
    args.group_size = c_.heads / c_.kv_heads;
    args.head_dim = c_.head_dim;
    args.scale = cuda::kLog2E / std::sqrt(static_cast<float>(c_.head_dim));
    args.window = c_.window;
    args.counters = counters_.data();
    args.out = out_.data();
    cuda::QkvArgs &rows = args.rows;
    rows.qkv = has_slices ? slices_.data() : qkv_.data();
    rows.num_slices = has_slices ? 3 : 1;
    rows.slice_stride = static_cast<int64_t>(qkv_.size());
    rows.bias = has_slices ? bias_.data() : nullptr;
    rows.q_norm = c_.has_norm ? q_norm_.data() : nullptr;
    rows.k_norm = c_.has_norm ? k_norm_.data() : nullptr;
    rows.eps = static_cast<float>(kEps);
    rows.num_heads = c_.heads;
    rows.head_dim = c_.head_dim;
    rows.rope = {coarse_.data(), fine_.data(), c_.rotary_dim, c_.is_neighbor};
    rows.positions = positions_.data();
    rows.kv_indices = kv_indices_.data();
    rows.kv = args.kv;
    rows.q = q_.data();
    return args;
  }

  // kind 0: query, 1: key, 2: value.
  std::vector<double> finished(int row, int head, int kind) const {
    const size_t at = static_cast<size_t>((row * num_all_ + head) * c_.head_dim);
    std::vector<double> v(qkv_.begin() + static_cast<long>(at),
                          qkv_.begin() + static_cast<long>(at) + c_.head_dim);
    if (kind == 2) return v;
    if (c_.has_norm) {
      double sum = 0;
      for (const double x : v) sum += x * x;
      const double inverse = 1 / std::sqrt(sum / c_.head_dim + kEps);
      for (size_t i = 0; i < v.size(); ++i) v[i] *= inverse * (kind == 0 ? q_norm_ : k_norm_)[i];
    }
    for (int i = 0; i < c_.rotary_dim / 2; ++i) {
      const double a = angle(positions_[static_cast<size_t>(row)], i);
      const auto first = static_cast<size_t>(c_.is_neighbor ? 2 * i : i);
      const size_t second = c_.is_neighbor ? first + 1 : first + c_.rotary_dim / 2;
      const double u = v[first], w = v[second];
      v[first] = u * std::cos(a) - w * std::sin(a);
      v[second] = u * std::sin(a) + w * std::cos(a);
    }
    return v;
  }

  std::vector<double> reference(int row, int head) const {
    const int last = positions_[static_cast<size_t>(row)];
    const int start = c_.window > 0 ? std::max(0, last + 1 - c_.window) : 0;
    const int kv_head = head / (c_.heads / c_.kv_heads);
    const std::vector<double> as_is = finished(row, head, 0);
    const std::vector<double> query = is_coded() ? spread(as_is) : as_is;
    const auto row_of = [&](int key, int kind) {
      const int of = c_.is_prompt ? key - positions_[0] : key == last ? row : -1;
      const size_t page = page_of(row, key, kind, kv_head);
      // note: what was rounded to codes is read back; that it is near is looked at elsewhere.
      if (of < 0 || is_coded())
        return stored(is_coded() ? pool_ : first_pool_, page, key % c_.block_size);
      return finished(of, c_.heads + (kind - 1) * c_.kv_heads + kv_head, kind);
    };
    std::vector<double> out(static_cast<size_t>(c_.head_dim));
    double sum = 0;
    for (int key = start; key <= last; ++key) {
      const std::vector<double> k = row_of(key, 1), v = row_of(key, 2);
      double score = 0;
      for (size_t i = 0; i < k.size(); ++i) score += query[i] * k[i];
      const double weight = std::exp(score / std::sqrt(static_cast<double>(c_.head_dim)));
      sum += weight;
      for (size_t i = 0; i < v.size(); ++i) out[i] += weight * v[i];
    }
    for (double &x : out) x /= sum;
    return is_coded() ? spread(out) : out;
  }

  const Case &c_;
  const int num_all_;
  unsigned seed_ = 12345;
  size_t row_bytes_, page_bytes_, block_bytes_;
  std::vector<uint16_t> first_pool_, pool_;
  std::vector<float> slices_, bias_, qkv_, q_norm_, k_norm_, out_;
  std::vector<float> partial_out_;
  std::vector<float2> partial_stats_;
  std::vector<float2> coarse_, fine_;
  std::vector<int32_t> tables_, positions_, row_tables_;
  std::vector<int64_t> kv_indices_;
  std::vector<__half> q_;
  std::vector<int> counters_;
};

bool check(const Case &c) {
  bool is_right = true;
  const auto expect = [&](bool ok, const char *what) {
    if (!ok) std::printf("%s: %s\n", c.name, what);
    is_right = is_right && ok;
  };
  Run run(c);
  const auto same = [](const std::vector<float> &a, const std::vector<float> &b, size_t from) {
    return std::memcmp(a.data() + from, b.data() + from, (a.size() - from) * sizeof(float)) == 0;
  };
  const bool finishes = !c.is_prompt && c.code_bits == 0;
  const std::vector<float> out = run.attend(1, finishes, c.is_prompt);
  const std::vector<uint16_t> pool = run.pool();
  const double error = run.error(out);
  expect(error < 1e-3, "far from float64");
  if (c.code_bits != 0) {
    const double most = (c.code_bits == 8 ? 1.0 / 254 : 1.0 / 14) + 1.0 / 2048;
    expect(run.rounding() < most + 1e-5, "codes far from their values");
  }
  for (const int splits_per_cta : {1, 2}) {
    if (!c.is_prompt) continue;
    run.clear();
    expect(same(run.attend_prompt(splits_per_cta, false), out, 0), "other bytes in tiles");
    // Of three splits a CTA takes two, the next one the third.
    if (splits_per_cta == 1 || wide_kernel_of(c) == nullptr) continue;
    run.clear();
    expect(same(run.attend_prompt(splits_per_cta, true), out, 0), "other bytes in wide tiles");
  }
  for (const int depth : {2, 4}) {
    if (c.is_prompt || kernel_of(c, depth, true) == nullptr) continue;
    run.clear();
    expect(same(run.attend(depth, true, false), out, 0), "other bytes with a deeper ring");
    expect(run.pool() == pool, "another cache with a deeper ring");
  }
  if (finishes) {
    run.clear();
    expect(same(run.attend(1, true, true), out, 0), "other bytes from slices");
    expect(run.pool() == pool, "another cache from slices");
    run.clear();
    expect(same(run.attend(1, false, true), out, 0), "other bytes after qkv_rows");
    expect(run.pool() == pool, "another cache after qkv_rows");
  }
  if (c.rows > 1 && finishes) {
    run.clear();
    const size_t from = out.size() / static_cast<size_t>(c.rows) * static_cast<size_t>(c.rows - 1);
    expect(same(run.attend(2, true, false, c.rows - 1), out, from), "the last row alone differs");
  }
  std::printf("%-36s error %.1e %s\n", c.name, error, is_right ? "ok" : "WRONG");
  std::fflush(stdout);
  return is_right;
}

}  // namespace
}  // namespace xllm::on_host

int main(int argc, char **argv) {
  using xllm::on_host::kCases;
  bool is_right = true;
  for (int i = 1; i < argc; ++i)
    is_right = xllm::on_host::check(kCases[std::atoi(argv[i])]) && is_right;
  for (const auto &c : kCases) {
    if (argc == 1) is_right = xllm::on_host::check(c) && is_right;
  }
  return is_right ? 0 : 1;
}
