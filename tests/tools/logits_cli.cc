// Logits of token sequences from the core's own forward pass, for tests and comparisons: requests
// on stdin, answers on stdout, everything little-endian.
//
//   logits_cli MODEL raw|dequantized NUM_THREADS INSTRUCTION_SET CHUNK [f16|int8|int4]
//
//   request  u32 num_tokens, u32 first_row, i32 ids[num_tokens]
//   answer   u32 num_rows = num_tokens - first_row, u32 vocab_size, f32 logits[num_rows,
//   vocab_size]
//
// NUM_THREADS 0 and INSTRUCTION_SET "best" leave the choice to the backend; a prompt is computed
// CHUNK tokens at a time. The raw form keeps K and V in f16 unless told otherwise, the dequantised
// one in f32, as the engine does. Ends with 1 and a line on stderr when anything fails.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "backend/factory.h"
#include "base/error.h"
#include "kvcache/kv_storage.h"
#include "kvcache/prefix_cache.h"
#include "model/batch.h"
#include "model/model.h"
#include "model/transformer.h"

namespace {

using xllm::BlockTable;
using xllm::Span;

constexpr int kBlockSize = 64;

// False at the end of the input; a request cut short is an error.
template <typename T>
bool read(T *values, size_t count) {
  const size_t found = std::fread(values, sizeof(T), count, stdin);
  if (found != count && found > 0) throw xllm::Error(xllm::Status::kIo, "the input ends early");
  return found == count;
}

template <typename T>
void write(const T *values, size_t count) {
  if (std::fwrite(values, sizeof(T), count, stdout) != count) {
    throw xllm::Error(xllm::Status::kIo, "the output is closed");
  }
}

class Forward {
 public:
  Forward(const char *path, xllm::WeightForm form, xllm::KvType kv_type,
          const xllm::BackendOptions &options, int chunk)
      : model_(xllm::Model::open(path)),
        backend_(xllm::make_backend(xllm::BackendKind::kCpu, options)),
        weights_(backend_->load_weights(model_.dims(), model_.tensors(), form, nullptr)),
        workspace_(backend_->make_workspace(*weights_, 1)),
        transformer_(backend_.get(), model_.dims(), weights_.get()),
        chunk_(chunk) {
    const xllm::ModelDims &dims = model_.dims();
    layout_.type = kv_type;
    layout_.num_layers = dims.num_layers;
    layout_.num_kv_heads = dims.num_kv_heads;
    layout_.head_dim = dims.head_dim;
    layout_.block_size = kBlockSize;
  }

  // Writes the answer for the rows from `first` on, as they are computed.
  void answer(const std::vector<int32_t> &ids, int first) {
    const int num_tokens = static_cast<int>(ids.size());
    const int32_t num_blocks = (num_tokens + kBlockSize - 1) / kBlockSize;
    const xllm::KvStorage storage(&backend_->allocator(), layout_, num_blocks);
    xllm::PrefixCache cache(num_blocks, kBlockSize, xllm::HashKey{}, false);
    BlockTable blocks{kBlockSize};
    const uint32_t header[2] = {static_cast<uint32_t>(num_tokens - first),
                                static_cast<uint32_t>(model_.dims().vocab_size)};
    write(header, 2);
    xllm::BatchBuilder builder;
    for (int done = 0; done < num_tokens;) {
      const int count = std::min(chunk_, num_tokens - done);
      if (!cache.extend(&blocks, done + count))
        throw xllm::Error(xllm::Status::kInternal, "no block is left");
      xllm::SequenceStep step;
      step.token_ids =
          Span<const int32_t>(ids).subspan(static_cast<size_t>(done), static_cast<size_t>(count));
      step.first_position = done;
      step.prompt_len = num_tokens;
      step.blocks = &blocks;
      step.num_logits = std::min(count, std::max(0, done + count - first));
      builder.clear();
      builder.add(step);
      transformer_.forward(workspace_.get(), storage.view(), builder.finish());
      if (step.num_logits > 0) {
        write(backend_->host_logits(*workspace_), static_cast<size_t>(step.num_logits) * header[1]);
      }
      done += count;
    }
    std::fflush(stdout);
    cache.release_all(&blocks);
  }

 private:
  xllm::Model model_;
  std::unique_ptr<xllm::Backend> backend_;
  std::unique_ptr<xllm::WeightSet> weights_;
  std::unique_ptr<xllm::Workspace> workspace_;
  xllm::Transformer transformer_;
  xllm::KvLayout layout_;
  int chunk_;
};

// A non-negative integer argument.
int number(const char *text) {
  const std::string digits = text;
  if (digits.empty() || digits.size() > 6 ||
      digits.find_first_not_of("0123456789") != digits.npos) {
    throw xllm::Error(xllm::Status::kInvalidArgument, "expected a number, found " + digits);
  }
  return std::stoi(digits);
}

xllm::KvType kv_type_of(const std::string &name) {
  for (const xllm::KvType type : {xllm::KvType::kF16, xllm::KvType::kInt8, xllm::KvType::kInt4}) {
    if (name == xllm::kv_type_name(type)) return type;
  }
  throw xllm::Error(xllm::Status::kInvalidArgument, "expected f16, int8 or int4, found " + name);
}

void serve(int argc, char **argv) {
  const std::string form = argv[2];
  if (form != "raw" && form != "dequantized") {
    throw xllm::Error(xllm::Status::kInvalidArgument, "expected raw or dequantized, found " + form);
  }
  xllm::BackendOptions options;
  options.num_threads = number(argv[3]);
  if (std::string("best") != argv[4]) options.instruction_set = argv[4];
  const int chunk = std::max(1, number(argv[5]));
  const bool is_raw = form == "raw";
  if (!is_raw && argc == 7) {
    throw xllm::Error(xllm::Status::kInvalidArgument, "the dequantised form keeps K and V in f32");
  }
  const xllm::KvType kv_type = !is_raw     ? xllm::KvType::kF32
                               : argc == 7 ? kv_type_of(argv[6])
                                           : xllm::KvType::kF16;
  Forward forward(argv[1], is_raw ? xllm::WeightForm::kRaw : xllm::WeightForm::kDequantized,
                  kv_type, options, chunk);
  uint32_t header[2];
  while (read(header, 2)) {
    if (header[0] == 0 || header[1] >= header[0]) {
      throw xllm::Error(xllm::Status::kInvalidArgument, "a request wants no row");
    }
    std::vector<int32_t> ids(header[0]);
    if (!read(ids.data(), ids.size())) throw xllm::Error(xllm::Status::kIo, "the input ends early");
    forward.answer(ids, static_cast<int>(header[1]));
  }
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 6 && argc != 7) {
    std::fprintf(stderr,
                 "usage: logits_cli MODEL raw|dequantized NUM_THREADS INSTRUCTION_SET CHUNK "
                 "[f16|int8|int4]\n");
    return 2;
  }
  try {
    serve(argc, argv);
    return 0;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "logits_cli: %s\n", error.what());
    return 1;
  }
}
