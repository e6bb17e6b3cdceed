// Text to token ids and back: the facade over the byte-level BPE and SentencePiece models. It knows
// no file format: the caller fills a VocabSource. Immutable after create(), so any number of
// threads may use one Tokenizer.
//
// Text is UTF-8. encode() refuses invalid UTF-8 (cut sequences, overlong forms, surrogates, bytes
// above 0xF4) with kInvalidArgument and the byte offset; NUL is a character like any other.
// Decoding adds, strips and tidies nothing, and gives U+FFFD for each maximal invalid part, as the
// WHATWG decoder does.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/span.h"

namespace xllm {

class SpecialMatcher;
class TextModel;
class Vocab;

// Values of tokenizer.ggml.token_type.
enum class TokenType : int32_t {
  kUndefined = 0,  // treated as kNormal
  kNormal = 1,
  kUnknown = 2,
  // From text only with parse_special, to text only with render_special. A kUserDefined token with
  // a name that ends turns in some model family counts as one.
  kControl = 3,
  // Always matched in text, longest first, before pre-tokenising; ordinary text in output.
  kUserDefined = 4,
  kUnused = 5,  // padding rows: accepted in prompts, decode to nothing, never chosen
  kByte = 6,    // SentencePiece byte fallback, <0x00> to <0xFF>
};

// What a model file says about its vocabulary. create() copies all it keeps: nothing here need
// outlive that call.
struct VocabSource {
  // tokenizer.ggml.model: "gpt2", "llama" or "no_vocab".
  std::string model;
  // The pre-tokenizer's name, for gpt2 only and never guessed, and the key or flag it came from.
  std::optional<std::string> pre;
  std::string pre_source = "tokenizer.ggml.pre";
  // As stored: in GPT-2's byte alphabet, or with U+2581 for the space.
  std::vector<std::string_view> tokens;
  // llama: one per token; gpt2: not used, may be empty.
  Span<const float> scores;
  // TokenType values; empty: all kNormal.
  Span<const int32_t> types;
  // gpt2: "left right", best first.
  std::vector<std::string_view> merges;
  // Rows of the head, padding included; 0: tokens.size().
  int32_t num_rows = 0;
  // tokenizer.ggml.*_token_id.
  std::optional<int32_t> bos, eos, eot, eom, unk, pad, sep;
  // tokenizer.ggml.add_{bos,eos}_token; unset: the family's default.
  std::optional<bool> add_bos, add_eos;
  // A space in front of every text. llama: unset means true; gpt2: with true there are no text
  // calls.
  std::optional<bool> add_space_prefix;
  // Refused if true.
  std::optional<bool> remove_extra_whitespaces;
  // Keys that would change the ids of any text and are not supported: refused, by the first one's
  // name.
  std::vector<std::string> unsupported_keys;
  // Jinja source; read only to learn what ends an assistant turn.
  std::string_view chat_template;
};

struct EncodeOptions {
  // BOS and EOS as the vocabulary asks; a BOS that the text gave already is not doubled.
  bool add_special = true;
  // CONTROL tokens written out in the text become those tokens.
  bool parse_special = false;
};

// A run of rendered chat text. Control tokens are recognised only where every byte of them comes
// from the template. A plain run is part of no special token of any kind.
struct Segment {
  std::string_view text;
  bool is_template = false;
  bool is_plain = false;
};

struct DecodeOptions {
  bool render_special = false;  // CONTROL and UNKNOWN tokens as their names
  // The ids go on from a prompt: keep the first piece's space. When false, the one space that
  // SentencePiece puts before a text is taken off again. No effect on byte-level BPE.
  bool is_continuation = false;
};

// One member of the end-of-generation set and why it is in it: a key's name, "known name" or "chat
// template".
struct EndToken {
  int32_t id;
  std::string source;
};

class Tokenizer {
 public:
  // Builds the look-up tables. kModelUnsupported: unknown model or pre-tokenizer name.
  // kModelMalformed: arrays of unequal length, ids out of range, a merge that is not a pair. A gpt2
  // vocabulary without a pre-tokenizer name and "no_vocab" are created; their text calls throw
  // kNoTokenizer.
  static std::unique_ptr<Tokenizer> create(const VocabSource &source);
  ~Tokenizer();
  Tokenizer(const Tokenizer &) = delete;
  Tokenizer &operator=(const Tokenizer &) = delete;

  // Time O(n log n) in the text, memory O(n), stack O(1). kInvalidArgument: invalid UTF-8, or more
  // than 2^31 - 1 bytes. kNoTokenizer: see create().
  std::vector<int32_t> encode(std::string_view text, const EncodeOptions &options = {}) const;

  // Encodes the joined segments as one text, with parse_special for template text only.
  std::vector<int32_t> encode_segments(Span<const Segment> segments,
                                       bool add_special = false) const;

  // Always valid UTF-8; equal to a Detokenizer's pieces joined. kInvalidArgument: an id outside [0,
  // vocab_size()), with its position. kNoTokenizer: no vocabulary.
  std::string decode(Span<const int32_t> ids, const DecodeOptions &options = {}) const;

  // Whether decoding takes off the one space that the tokenizer puts before a text.
  bool has_space_prefix() const;

  // Whether text calls work; without_text_reason() says why not and what to do ("" when they do).
  bool has_text() const { return without_text_reason_.empty(); }
  const std::string &without_text_reason() const { return without_text_reason_; }

  // Rows of the head, padding included; ids are in [0, vocab_size()).
  int32_t vocab_size() const;
  // Heap memory of the vocabulary and the look-up tables, what is small left out.
  size_t memory_bytes() const;
  // How many ids may be chosen, and whether this one may: UNUSED and padding rows never are (any id
  // is with "no_vocab").
  int32_t num_real_tokens() const;
  bool is_choosable(int32_t id) const;

  // Raw bytes of the piece, mapped back from the file's alphabet; a CONTROL token's name. Empty for
  // padding rows. Valid as long as the tokenizer. The id must be in range.
  std::string_view token_bytes(int32_t id) const;
  TokenType token_type(int32_t id) const;
  // The id of the CONTROL, USER_DEFINED or UNKNOWN token with exactly this name.
  std::optional<int32_t> find_special(std::string_view name) const;

  std::optional<int32_t> bos() const { return bos_; }
  std::optional<int32_t> eos() const { return eos_; }
  bool add_bos() const { return add_bos_; }
  bool add_eos() const { return add_eos_; }

  // Union of the eos, eot and eom keys, CONTROL tokens with known end names, and what the template
  // ends an assistant turn with; ascending by id, each id once with its first source. Never a token
  // that starts a turn.
  const std::vector<EndToken> &end_of_generation() const { return end_of_generation_; }
  bool is_end_of_generation(int32_t id) const;

  // "gpt2", "llama" or "no_vocab"; the pre-tokenizer's name, "" where there is none, and its
  // source.
  const std::string &model() const { return model_; }
  const std::string &pre_tokenizer() const { return pre_tokenizer_; }
  const std::string &pre_tokenizer_source() const { return pre_tokenizer_source_; }

 private:
  explicit Tokenizer(const VocabSource &source);
  void require_text() const;

  std::unique_ptr<const Vocab> vocab_;  // ids, pieces, types
  std::unique_ptr<const SpecialMatcher> special_;
  std::unique_ptr<const TextModel> text_model_;  // null where text calls are refused
  std::string model_;
  std::string pre_tokenizer_;
  std::string pre_tokenizer_source_;
  std::string without_text_reason_;
  std::optional<int32_t> bos_, eos_;
  bool add_bos_ = false;
  bool add_eos_ = false;
  std::vector<EndToken> end_of_generation_;
};

}  // namespace xllm
