// The C ABI of models: opening, describing, text to ids and back.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "engine/model_file.h"
#include "xllm.h"

namespace xllm {
namespace {

// "uint32" for the file's u32, "array of string" for its arr[str].
std::string type_text(const GgufValue &value) {
  const auto scalar = [](GgufType type) -> std::string {
    switch (type) {
      case GgufType::kUint8:
        return "uint8";
      case GgufType::kInt8:
        return "int8";
      case GgufType::kUint16:
        return "uint16";
      case GgufType::kInt16:
        return "int16";
      case GgufType::kUint32:
        return "uint32";
      case GgufType::kInt32:
        return "int32";
      case GgufType::kFloat32:
        return "float32";
      case GgufType::kBool:
        return "bool";
      case GgufType::kString:
        return "string";
      case GgufType::kArray:
        return "array";
      case GgufType::kUint64:
        return "uint64";
      case GgufType::kInt64:
        return "int64";
      case GgufType::kFloat64:
        return "float64";
    }
    return "unknown";
  };
  return value.is_array() ? "array of " + scalar(value.element_type()) : scalar(value.type());
}

std::string metadata_json(const GgufValue &value) {
  constexpr size_t kMaxElements = 16;
  std::string json = value.to_json(kMaxElements);
  if (value.is_array() && value.num_elements() > kMaxElements) {
    json.insert(json.size() - 1, ", \"...\"");
  }
  return json;
}

// What was concluded about the vocabulary, beside what the model says of itself.
void add_tokenizer_facts(const Tokenizer &tokenizer, std::vector<Fact> *facts) {
  facts->push_back({"tokenizer", tokenizer.model(), "tokenizer.ggml.model"});
  if (!tokenizer.pre_tokenizer().empty()) {
    facts->push_back({"pretokenizer", tokenizer.pre_tokenizer(), tokenizer.pre_tokenizer_source()});
  }
  if (!tokenizer.has_text()) {
    facts->push_back({"text", "refused", tokenizer.without_text_reason()});
  }
  facts->push_back({"add_bos", tokenizer.add_bos() ? "true" : "false",
                    "tokenizer.ggml.add_bos_token, or the family's rule without it"});
  if (tokenizer.bos()) {
    facts->push_back(
        {"bos_token", std::to_string(*tokenizer.bos()), "tokenizer.ggml.bos_token_id"});
  }
  for (const EndToken &end : tokenizer.end_of_generation()) {
    facts->push_back({"end_of_generation", std::to_string(end.id), end.source});
  }
  if (tokenizer.num_real_tokens() < tokenizer.vocab_size()) {
    facts->push_back({"padding_rows",
                      std::to_string(tokenizer.vocab_size() - tokenizer.num_real_tokens()),
                      "rows of the head beyond tokenizer.ggml.tokens, or of type UNUSED"});
  }
}

void describe(xllm_model *model) {
  const GgufFile &file = model->file->file();
  model->architecture = file.get_string("general.architecture", "");
  model->name = file.get_string("general.name", "");
  model->chat_template = file.get_string("tokenizer.chat_template", "");
  if (model->file->model() != nullptr) model->facts = model->file->model()->facts();
  const Tokenizer &tokenizer = model->file->tokenizer();
  add_tokenizer_facts(tokenizer, &model->facts);
  for (const GgufTensor &tensor : file.tensors()) {
    model->tensor_names.emplace_back(tensor.name);
  }
  for (const EndToken &end : tokenizer.end_of_generation()) {
    model->end_tokens.push_back({end.id, std::string(tokenizer.token_bytes(end.id)), end.source});
  }
}

}  // namespace
}  // namespace xllm

using xllm::allocate;
using xllm::DecodeOptions;
using xllm::describe;
using xllm::dtype_info;
using xllm::EndTokenText;
using xllm::Error;
using xllm::Fact;
using xllm::GgufTensor;
using xllm::GgufValue;
using xllm::guarded;
using xllm::metadata_json;
using xllm::MetadataText;
using xllm::Model;
using xllm::ModelDims;
using xllm::ModelFile;
using xllm::ModelFileOptions;
using xllm::read_struct;
using xllm::refuse;
using xllm::require;
using xllm::require_array;
using xllm::Segment;
using xllm::Status;
using xllm::Tokenizer;
using xllm::type_text;

extern "C" {

void xllm_model_options_init(xllm_model_options *options) {
  if (options == nullptr) return;
  *options = xllm_model_options{};
  options->struct_size = sizeof *options;
}

xllm_status xllm_model_open(const char *path, const xllm_model_options *options,
                            xllm_model **out_model, xllm_error *err) {
  return guarded(err, [&] {
    require(path, "path");
    require(out_model, "out_model");
    const xllm_model_options read =
        read_struct(options, xllm_model_options_init, "xllm_model_options");
    ModelFileOptions file_options;
    if (read.pretokenizer != nullptr) file_options.pretokenizer = read.pretokenizer;
    auto model = std::make_unique<xllm_model>();
    model->file = ModelFile::open(path, file_options);
    describe(model.get());
    *out_model = model.release();
  });
}

void xllm_model_close(xllm_model *model) { delete model; }

void xllm_model_get_info(const xllm_model *model, xllm_model_info *out) {
  if (model == nullptr || out == nullptr) return;
  *out = xllm_model_info{};
  const Tokenizer &tokenizer = model->file->tokenizer();
  out->architecture = model->architecture.c_str();
  out->name = model->name.c_str();
  out->path = model->file->path().c_str();
  out->file_bytes = model->file->file().file_bytes();
  if (const Model *weights = model->file->model()) {
    const ModelDims &dims = weights->dims();
    out->num_params = weights->num_parameters();
    out->has_weights = 1;
    out->num_layers = dims.num_layers;
    out->hidden_size = dims.hidden_size;
    out->intermediate_size = dims.intermediate_size;
    out->num_heads = dims.num_heads;
    out->num_kv_heads = dims.num_kv_heads;
    out->head_dim = dims.head_dim;
    out->context_length = weights->config().context_length;
  }
  out->vocab_size = tokenizer.vocab_size();
  out->num_real_tokens = tokenizer.num_real_tokens();
  out->tokenizer_model = tokenizer.model().c_str();
  out->pretokenizer = tokenizer.pre_tokenizer().c_str();
  out->has_tokenizer = tokenizer.has_text() ? 1 : 0;
  out->bos_token_id = tokenizer.bos().value_or(-1);
  out->add_bos = tokenizer.add_bos() ? 1 : 0;
  out->chat_template = model->chat_template.c_str();
  out->chat_template_size = model->chat_template.size();
}

int xllm_model_get_metadata(const xllm_model *model, size_t index, xllm_metadata *out) {
  if (model == nullptr || out == nullptr) return 0;
  int is_found = 0;
  guarded(nullptr, [&] {
    std::call_once(model->metadata_once, [&] {
      std::vector<MetadataText> all;
      for (const GgufValue &value : model->file->file().values()) {
        all.push_back({std::string(value.key()), type_text(value), metadata_json(value)});
      }
      model->metadata = std::move(all);
    });
    if (index >= model->metadata.size()) return;
    const MetadataText &text = model->metadata[index];
    *out = {text.key.c_str(), text.type.c_str(), text.json.c_str()};
    is_found = 1;
  });
  return is_found;
}

int xllm_model_get_tensor(const xllm_model *model, size_t index, xllm_tensor_info *out) {
  if (model == nullptr || out == nullptr || index >= model->tensor_names.size()) return 0;
  const GgufTensor &tensor = model->file->file().tensors()[index];
  *out = xllm_tensor_info{};
  out->name = model->tensor_names[index].c_str();
  out->dtype = dtype_info(tensor.dtype).name;
  out->num_dims = static_cast<int32_t>(tensor.num_dims);
  for (int i = 0; i < 4; ++i) out->dims[i] = tensor.dims[i];
  out->size_bytes = tensor.size_bytes;
  out->file_offset = tensor.byte_offset;
  return 1;
}

int xllm_model_get_fact(const xllm_model *model, size_t index, xllm_fact *out) {
  if (model == nullptr || out == nullptr || index >= model->facts.size()) return 0;
  const Fact &fact = model->facts[index];
  *out = {fact.name.c_str(), fact.value.c_str(), fact.source.c_str()};
  return 1;
}

int xllm_model_get_end_token(const xllm_model *model, size_t index, xllm_end_token *out) {
  if (model == nullptr || out == nullptr || index >= model->end_tokens.size()) return 0;
  const EndTokenText &end = model->end_tokens[index];
  *out = {end.id, end.text.c_str(), end.source.c_str()};
  return 1;
}

xllm_status xllm_model_encode(const xllm_model *model, const xllm_text *texts, size_t num_texts,
                              int add_special, int32_t **out_ids, size_t *out_num,
                              xllm_error *err) {
  return guarded(err, [&] {
    require(model, "model");
    require(out_ids, "out_ids");
    require(out_num, "out_num");
    require_array(texts, num_texts, "texts");
    std::vector<Segment> segments;
    for (size_t i = 0; i < num_texts; ++i) {
      require_array(texts[i].data, texts[i].size, "texts");
      if (texts[i].size == 0) continue;
      segments.push_back(
          {{texts[i].data, texts[i].size}, texts[i].trusted > 0, texts[i].trusted < 0});
    }
    const std::vector<int32_t> ids =
        model->file->tokenizer().encode_segments(segments, add_special != 0);
    int32_t *copy = nullptr;
    if (!ids.empty()) {
      copy = static_cast<int32_t *>(allocate(ids.size() * sizeof(int32_t)));
      std::memcpy(copy, ids.data(), ids.size() * sizeof(int32_t));
    }
    *out_ids = copy;
    *out_num = ids.size();
  });
}

xllm_status xllm_model_decode(const xllm_model *model, const int32_t *ids, size_t num_ids,
                              int render_special, char **out_text, size_t *out_size,
                              xllm_error *err) {
  return guarded(err, [&] {
    require(model, "model");
    require(out_text, "out_text");
    require(out_size, "out_size");
    require_array(ids, num_ids, "ids");
    DecodeOptions options;
    options.render_special = render_special != 0;
    const std::string text = model->file->tokenizer().decode({ids, num_ids}, options);
    auto *copy = static_cast<char *>(allocate(text.size() + 1));
    std::memcpy(copy, text.c_str(), text.size() + 1);
    *out_text = copy;
    *out_size = text.size();
  });
}

xllm_status xllm_model_token_piece(const xllm_model *model, int32_t id, const char **out_bytes,
                                   size_t *out_size, int32_t *out_type, xllm_error *err) {
  return guarded(err, [&] {
    require(model, "model");
    require(out_bytes, "out_bytes");
    require(out_size, "out_size");
    const Tokenizer &tokenizer = model->file->tokenizer();
    if (tokenizer.model() == "no_vocab") {
      throw Error(Status::kNoTokenizer, "the model has no vocabulary: ids have no text");
    }
    if (id < 0 || id >= tokenizer.vocab_size()) {
      refuse("id", "expected 0 to " + std::to_string(tokenizer.vocab_size() - 1) + ", found " +
                       std::to_string(id));
    }
    const std::string_view bytes = tokenizer.token_bytes(id);
    *out_bytes = bytes.empty() ? "" : bytes.data();
    *out_size = bytes.size();
    if (out_type != nullptr) *out_type = static_cast<int32_t>(tokenizer.token_type(id));
  });
}

}  // extern "C"
