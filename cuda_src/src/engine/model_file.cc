#include "engine/model_file.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gguf/vocab_arrays.h"

namespace xllm {
namespace {

std::vector<std::string_view> views(const GgufStrings &strings) {
  std::vector<std::string_view> out;
  out.reserve(strings.size());
  for (size_t i = 0; i < strings.size(); ++i) out.push_back(strings[i]);
  return out;
}

std::optional<int32_t> token_id(const GgufFile &file, const char *name) {
  const GgufValue *value = file.find(std::string("tokenizer.ggml.") + name + "_token_id");
  if (value == nullptr) return std::nullopt;
  // note: all ones stands for "none" in files written from a configuration without that token.
  const int64_t id = value->as_int(-1, std::numeric_limits<uint32_t>::max());
  if (id == -1 || id == std::numeric_limits<uint32_t>::max()) return std::nullopt;
  return static_cast<int32_t>(value->as_int(0, std::numeric_limits<int32_t>::max()));
}

std::optional<bool> flag(const GgufFile &file, const char *key) {
  const GgufValue *value = file.find(key);
  if (value == nullptr) return std::nullopt;
  return value->as_bool();
}

// Rules for text that some vocabularies carry and none of our text models follows: SentencePiece's
// compiled normalisation (empty: none), lower-casing, a separator behind every text.
std::vector<std::string> unsupported_keys(const GgufFile &file) {
  std::vector<std::string> out;
  const char *charsmap = "tokenizer.ggml.precompiled_charsmap";
  const GgufValue *value = file.find(charsmap);
  const bool is_text = value != nullptr && value->type() == GgufType::kString;
  if (is_text ? !value->as_string().empty() : value != nullptr && value->num_elements() > 0) {
    out.emplace_back(charsmap);
  }
  for (const char *key : {"tokenizer.ggml.normalizer.lowercase", "tokenizer.ggml.add_sep_token"}) {
    if (flag(file, key).value_or(false)) out.emplace_back(key);
  }
  return out;
}

std::unique_ptr<Tokenizer> make_tokenizer(const GgufFile &file, int32_t num_rows,
                                          const ModelFileOptions &options) {
  VocabSource source;
  source.model = file.get_string("tokenizer.ggml.model", "no_vocab");
  source.num_rows = num_rows;
  source.chat_template = file.get_string("tokenizer.chat_template", "");
  if (options.pretokenizer) {
    source.pre = *options.pretokenizer;
    source.pre_source = "flag";
  } else if (file.find("tokenizer.ggml.pre") != nullptr) {
    source.pre = std::string(file.get_string("tokenizer.ggml.pre"));
  }

  const VocabArrays arrays = read_vocab_arrays(file);
  source.tokens = views(arrays.tokens);
  source.merges = views(arrays.merges);
  source.scores = arrays.scores;
  source.types = arrays.types;
  source.bos = token_id(file, "bos");
  source.eos = token_id(file, "eos");
  source.eot = token_id(file, "eot");
  source.eom = token_id(file, "eom");
  source.unk = token_id(file, "unknown");
  source.pad = token_id(file, "padding");
  source.sep = token_id(file, "seperator");  // the format spells it so
  source.add_bos = flag(file, "tokenizer.ggml.add_bos_token");
  source.add_eos = flag(file, "tokenizer.ggml.add_eos_token");
  source.add_space_prefix = flag(file, "tokenizer.ggml.add_space_prefix");
  source.remove_extra_whitespaces = flag(file, "tokenizer.ggml.remove_extra_whitespaces");
  source.unsupported_keys = unsupported_keys(file);
  return Tokenizer::create(source);
}

}  // namespace

std::shared_ptr<const ModelFile> ModelFile::open(const std::string &path,
                                                 const ModelFileOptions &options) {
  std::shared_ptr<ModelFile> out(new ModelFile());
  out->path_ = path;
  GgufFile file = GgufFile::open(path);
  int32_t num_rows = 0;
  if (file.tensors().empty()) {
    out->vocabulary_file_ = std::move(file);
  } else {
    out->model_ = Model::create(std::move(file));
    num_rows = static_cast<int32_t>(out->model_->dims().vocab_size);
  }
  out->tokenizer_ = make_tokenizer(out->file(), num_rows, options);
  return out;
}

}  // namespace xllm
