#include "tokenizer/tokenizer.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"
#include "tokenizer/bpe.h"
#include "tokenizer/detokenizer.h"
#include "tokenizer/end_of_generation.h"
#include "tokenizer/pretokenize.h"
#include "tokenizer/special_matcher.h"
#include "tokenizer/spm.h"
#include "tokenizer/text_model.h"
#include "tokenizer/unicode.h"
#include "tokenizer/vocab.h"

namespace xllm {
namespace {

constexpr char kPreKey[] = "tokenizer.ggml.pre";

void check_id(const char *key, const std::optional<int32_t> &id, int32_t num_tokens) {
  if (!id || (*id >= 0 && *id < num_tokens)) return;
  throw Error(Status::kModelMalformed, std::string(key) + ": expected a token id below " +
                                           std::to_string(num_tokens) + ", found " +
                                           std::to_string(*id));
}

}  // namespace

Tokenizer::Tokenizer(const VocabSource &source)
    : vocab_(std::make_unique<Vocab>(source)),
      model_(source.model),
      bos_(source.bos),
      eos_(source.eos) {
  const int32_t num_ids = vocab_->num_rows();
  check_id("tokenizer.ggml.bos_token_id", source.bos, num_ids);
  check_id("tokenizer.ggml.eos_token_id", source.eos, num_ids);
  check_id("tokenizer.ggml.eot_token_id", source.eot, num_ids);
  check_id("tokenizer.ggml.eom_token_id", source.eom, num_ids);
  check_id("tokenizer.ggml.unknown_token_id", source.unk, num_ids);
  check_id("tokenizer.ggml.padding_token_id", source.pad, num_ids);
  check_id("tokenizer.ggml.seperator_token_id", source.sep, num_ids);
  special_ = std::make_unique<SpecialMatcher>(*vocab_);
  end_of_generation_ = find_end_of_generation(*vocab_, *special_, source);

  if (model_ == "no_vocab") {
    without_text_reason_ =
        "the model file holds no vocabulary (tokenizer.ggml.model is no_vocab); send token ids";
    return;
  }
  if (vocab_->num_tokens() == 0) {
    throw Error(Status::kModelMalformed, "tokenizer.ggml.tokens: expected tokens, found none");
  }
  bool family_adds_bos = false;
  if (model_ == "gpt2") {
    // "default" names no pre-tokenizer: converters write it when they know none.
    if (!source.pre || source.pre->empty() || *source.pre == "default") {
      without_text_reason_ =
          std::string(kPreKey) + ": expected the name of a pre-tokenizer, found " +
          (source.pre ? "\"" + *source.pre + "\"" : "no such key") + "; name one of " +
          pre_tokenizer_names() + " with a flag, or send token ids";
      return;
    }
    if (source.add_space_prefix.value_or(false)) {
      without_text_reason_ =
          "tokenizer.ggml.add_space_prefix: expected false with a gpt2 vocabulary, found true; "
          "send token ids";
      return;
    }
    const PreTokenizer *pre = find_pre_tokenizer(*source.pre);
    if (pre == nullptr) {
      throw Error(Status::kModelUnsupported, source.pre_source + ": expected one of " +
                                                 pre_tokenizer_names() + ", found \"" +
                                                 *source.pre + "\"");
    }
    pre_tokenizer_ = *source.pre;
    pre_tokenizer_source_ = source.pre_source;
    family_adds_bos = pre->adds_bos;
    text_model_ = std::make_unique<BpeModel>(*vocab_, source, *pre);
  } else if (model_ == "llama") {
    family_adds_bos = true;
    text_model_ = std::make_unique<SpmModel>(*vocab_, source);
  } else {
    throw Error(Status::kModelUnsupported,
                "tokenizer.ggml.model: expected gpt2, llama or no_vocab, found \"" + model_ + "\"");
  }
  if (!source.unsupported_keys.empty()) {
    throw Error(Status::kModelUnsupported,
                source.unsupported_keys.front() +
                    ": the key changes how text becomes tokens and is not supported; convert the "
                    "model without it");
  }
  add_bos_ = source.add_bos.value_or(family_adds_bos) && bos_.has_value();
  add_eos_ = source.add_eos.value_or(false) && eos_.has_value();
}

Tokenizer::~Tokenizer() = default;

std::unique_ptr<Tokenizer> Tokenizer::create(const VocabSource &source) {
  return std::unique_ptr<Tokenizer>(new Tokenizer(source));
}

size_t Tokenizer::memory_bytes() const {
  return vocab_->memory_bytes() + (text_model_ != nullptr ? text_model_->memory_bytes() : 0);
}

void Tokenizer::require_text() const {
  if (!has_text()) throw Error(Status::kNoTokenizer, without_text_reason_);
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, const EncodeOptions &options) const {
  const Segment segment{text, options.parse_special};
  return encode_segments(Span<const Segment>(&segment, 1), options.add_special);
}

std::vector<int32_t> Tokenizer::encode_segments(Span<const Segment> segments,
                                                bool add_special) const {
  require_text();
  std::string joined;
  std::string_view text;
  if (segments.size() == 1) {
    text = segments[0].text;
  } else {
    for (const Segment &segment : segments) joined += segment.text;
    text = joined;
  }
  if (text.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
    throw Error(Status::kInvalidArgument,
                "text: expected at most 2147483647 bytes, found " + std::to_string(text.size()));
  }
  const size_t invalid = find_invalid_utf8(text);
  if (invalid != text.size()) {
    throw Error(
        Status::kInvalidArgument,
        "text: expected UTF-8, found an invalid sequence at byte " + std::to_string(invalid));
  }

  // Matches come in ascending order, so one walk over the message runs serves them all.
  struct Run {
    size_t begin, end;
    bool is_plain;
  };
  std::vector<Run> messages;
  size_t offset = 0;
  for (const Segment &segment : segments) {
    if (!segment.is_template && !segment.text.empty()) {
      messages.push_back({offset, offset + segment.text.size(), segment.is_plain});
    }
    offset += segment.text.size();
  }
  size_t message = 0;
  const auto accept = [&](const SpecialMatcher::Match &match) {
    const bool is_text = vocab_->type(match.id) == TokenType::kUserDefined;
    while (message < messages.size() && messages[message].end <= match.begin) ++message;
    for (size_t i = message; i < messages.size() && messages[i].begin < match.end; ++i) {
      if (!is_text || messages[i].is_plain) return false;
    }
    return true;
  };

  std::vector<int32_t> ids;
  if (add_special && add_bos_) ids.push_back(*bos_);
  bool starts_text = true;
  for (size_t pos = 0; pos < text.size();) {
    SpecialMatcher::Match match{text.size(), text.size(), -1};
    special_->find(text, pos, accept, &match);
    const std::string_view plain = text.substr(pos, match.begin - pos);
    // A text that begins with a USER_DEFINED token still gets the model's own space in front.
    const bool is_control = match.id >= 0 && vocab_->type(match.id) == TokenType::kControl;
    if (!plain.empty() || (match.id >= 0 && !is_control)) {
      text_model_->encode(plain, starts_text, &ids);
    }
    if (match.id >= 0) {
      // The text, or its template, may begin with the BOS that was already added.
      if (!(match.begin == 0 && !ids.empty() && match.id == bos_ && add_special && add_bos_)) {
        ids.push_back(match.id);
      }
      starts_text = is_control;
    }
    pos = match.end;
  }
  if (add_special && add_eos_) ids.push_back(*eos_);
  return ids;
}

std::string Tokenizer::decode(Span<const int32_t> ids, const DecodeOptions &options) const {
  if (vocab_->num_tokens() == 0) throw Error(Status::kNoTokenizer, without_text_reason_);
  Detokenizer detokenizer(*this, options);
  std::string text;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab_size()) {
      throw Error(Status::kInvalidArgument, "token_ids[" + std::to_string(i) + "]: expected 0 to " +
                                                std::to_string(vocab_size() - 1) + ", found " +
                                                std::to_string(ids[i]));
    }
    text += detokenizer.feed(ids[i]);
  }
  text += detokenizer.flush();
  return text;
}

bool Tokenizer::has_space_prefix() const {
  return text_model_ != nullptr && text_model_->has_space_prefix();
}

int32_t Tokenizer::vocab_size() const { return vocab_->num_rows(); }

int32_t Tokenizer::num_real_tokens() const {
  return model_ == "no_vocab" ? vocab_->num_rows() : vocab_->num_choosable();
}

bool Tokenizer::is_choosable(int32_t id) const {
  if (model_ == "no_vocab") return id >= 0 && id < vocab_->num_rows();
  return id >= 0 && id < vocab_->num_tokens() && vocab_->type(id) != TokenType::kUnused;
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  if (id >= vocab_->num_tokens() || vocab_->type(id) == TokenType::kUnused) return {};
  return vocab_->piece(id);
}

TokenType Tokenizer::token_type(int32_t id) const {
  return id < vocab_->num_tokens() ? vocab_->type(id) : TokenType::kUnused;
}

std::optional<int32_t> Tokenizer::find_special(std::string_view name) const {
  const int32_t id = vocab_->find_special(name);
  return id >= 0 ? std::optional<int32_t>(id) : std::nullopt;
}

bool Tokenizer::is_end_of_generation(int32_t id) const {
  const auto at = std::lower_bound(end_of_generation_.begin(), end_of_generation_.end(), id,
                                   [](const EndToken &end, int32_t i) { return end.id < i; });
  return at != end_of_generation_.end() && at->id == id;
}

}  // namespace xllm
