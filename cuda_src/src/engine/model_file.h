// A model file as the engine and its callers see it: metadata, tensors and tokenizer together.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "gguf/gguf.h"
#include "model/model.h"
#include "tokenizer/tokenizer.h"

namespace xllm {

struct ModelFileOptions {
  std::optional<std::string> pretokenizer;  // in place of tokenizer.ggml.pre
};

// Opened once, shared by whoever uses it, and immutable. Opening reads no weights.
class ModelFile {
 public:
  // Throws what GgufFile::open, Model and Tokenizer::create throw. A file without tensors is a
  // vocabulary: it opens, and has no model().
  static std::shared_ptr<const ModelFile> open(const std::string &path,
                                               const ModelFileOptions &options = {});

  const std::string &path() const { return path_; }
  const GgufFile &file() const { return model_ ? model_->file() : *vocabulary_file_; }
  const Model *model() const { return model_ ? &*model_ : nullptr; }
  const Tokenizer &tokenizer() const { return *tokenizer_; }

 private:
  ModelFile() = default;

  std::string path_;
  std::optional<Model> model_;
  std::optional<GgufFile> vocabulary_file_;  // where there is no model
  std::unique_ptr<Tokenizer> tokenizer_;
};

}  // namespace xllm
