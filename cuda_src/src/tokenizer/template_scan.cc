#include "tokenizer/template_scan.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <string>

namespace xllm {
namespace {

bool is_name_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

bool is_role(std::string_view word) {
  return word == "user" || word == "system" || word == "assistant" || word == "tool" ||
         word == "model" || word == "developer" || word == "ipython";
}

bool is_assistant(std::string_view word) { return word == "assistant" || word == "model"; }

// A word or a string of an expression.
struct Term {
  std::string_view text;
  bool is_string = false;
  bool is_argument = false;  // inside the parentheses of a call: tested or searched, not written
};

// The terms of an expression or statement, in order.
std::vector<Term> terms_of(std::string_view code) {
  std::vector<Term> terms;
  std::vector<bool> calls;  // open parentheses: whether each belongs to a call
  size_t num_calls = 0;
  for (size_t pos = 0; pos < code.size();) {
    const char c = code[pos];
    const size_t begin = pos++;
    if (c == '\'' || c == '"') {
      while (pos < code.size() && code[pos] != c) pos += code[pos] == '\\' ? 2 : 1;
      pos = std::min(pos, code.size());
      terms.push_back({code.substr(begin + 1, pos - begin - 1), true, num_calls > 0});
      ++pos;
    } else if (is_name_char(c)) {
      while (pos < code.size() && is_name_char(code[pos])) ++pos;
      terms.push_back({code.substr(begin, pos - begin), false, num_calls > 0});
    } else if (c == '(') {
      calls.push_back(begin > 0 && is_name_char(code[begin - 1]));
      num_calls += calls.back();
    } else if (c == ')' && !calls.empty()) {
      num_calls -= calls.back();
      calls.pop_back();
    }
  }
  return terms;
}

class Scanner {
 public:
  Scanner(const Vocab &vocab, const SpecialMatcher &special, std::optional<int32_t> eos)
      : vocab_(vocab), special_(special), eos_(eos) {}

  std::vector<int32_t> scan(std::string_view source) {
    size_t pos = 0;
    while (pos < source.size()) {
      const size_t open = find_open(source, pos);
      written(source.substr(pos, open - pos));
      if (open == source.size()) break;
      const char kind = source[open + 1];
      const std::string_view close = kind == '{' ? "}}" : kind == '%' ? "%}" : "#}";
      const size_t end = find_close(source, open + 2, close, kind != '#');
      const std::string_view code = source.substr(open + 2, end - open - 2);
      if (kind == '{') expression(terms_of(code));
      if (kind == '%') statement(code);
      pos = std::min(end + 2, source.size());
    }
    std::vector<int32_t> ends;
    std::set_difference(ends_.begin(), ends_.end(), starts_.begin(), starts_.end(),
                        std::back_inserter(ends));
    return ends;
  }

 private:
  // Whose message the text at hand is written for.
  enum class Role { kAny, kAssistant, kOther, kPrompt };

  static size_t find_open(std::string_view source, size_t pos) {
    while (true) {
      pos = source.find('{', pos);
      if (pos == std::string_view::npos || pos + 1 >= source.size()) return source.size();
      const char kind = source[pos + 1];
      if (kind == '{' || kind == '%' || kind == '#') return pos;
      ++pos;
    }
  }

  // The closing mark, outside of strings if there may be some.
  static size_t find_close(std::string_view source, size_t pos, std::string_view close,
                           bool has_strings) {
    for (; pos < source.size(); ++pos) {
      const char c = source[pos];
      if (has_strings && (c == '\'' || c == '"')) {
        for (++pos; pos < source.size() && source[pos] != c; ++pos) pos += source[pos] == '\\';
      } else if (source.compare(pos, close.size(), close) == 0) {
        return pos;
      }
    }
    return source.size();
  }

  void statement(std::string_view code) {
    const std::vector<Term> terms = terms_of(code);
    if (terms.empty()) return;
    const std::string_view word = terms[0].text;
    if (word == "if") {
      roles_.push_back(role_);
      role_ = role_of_condition(terms, code, role_);
    } else if ((word == "elif" || word == "else") && !roles_.empty()) {
      role_ = word == "elif" ? role_of_condition(terms, code, roles_.back()) : roles_.back();
      awaits_end_ = false;
    } else if (word == "endif" && !roles_.empty()) {
      role_ = roles_.back();
      roles_.pop_back();
    } else if (word == "for") {
      ++num_loops_;
    } else if (word == "endfor") {
      if (num_loops_ > 0) --num_loops_;
      if (num_loops_ == 0) awaits_end_ = false;
    } else if (word == "set" && terms.size() > 2) {
      expression({terms.begin() + 2, terms.end()});  // behind the name that is set
    }
  }

  static Role role_of_condition(const std::vector<Term> &terms, std::string_view code,
                                Role outside) {
    bool has_assistant = false;
    bool has_other = false;
    for (const Term &term : terms) {
      if (!term.is_string && term.text == "add_generation_prompt") return Role::kPrompt;
      if (!term.is_string || !is_role(term.text)) continue;
      (is_assistant(term.text) ? has_assistant : has_other) = true;
    }
    if (has_assistant == has_other || outside == Role::kPrompt) return outside;
    const bool is_negated = code.find("!=") != std::string_view::npos;
    if (has_assistant) return is_negated ? Role::kOther : Role::kAssistant;
    return is_negated ? outside : Role::kOther;
  }

  void expression(const std::vector<Term> &terms) {
    for (const Term &term : terms) {
      if (term.text == "content") {
        awaits_end_ = role_ == Role::kAny || role_ == Role::kAssistant;
        last_control_ = -1;
      } else if (term.is_argument) {
        continue;
      } else if (term.text == "role") {
        starts_turn();
      } else if (term.is_string) {
        written(term.text);
      } else if (term.text == "eos_token" && eos_) {
        control(*eos_);
      }
    }
  }

  // Text that the template writes as it stands.
  void written(std::string_view text) {
    size_t pos = 0;
    while (pos < text.size()) {
      SpecialMatcher::Match match{text.size(), text.size(), -1};
      const auto is_control = [&](const SpecialMatcher::Match &m) {
        return vocab_.type(m.id) == TokenType::kControl;
      };
      special_.find(text, pos, is_control, &match);
      const std::string_view plain = text.substr(pos, match.begin - pos);
      if (last_control_ >= 0 && !plain.empty()) {
        size_t size = 0;
        while (size < plain.size() && is_name_char(plain[size])) ++size;
        if (is_role(plain.substr(0, size))) starts_turn();
        last_control_ = -1;
      }
      if (match.id >= 0) control(match.id);
      pos = match.end;
    }
  }

  void control(int32_t id) {
    if (role_ == Role::kPrompt) {
      starts_.insert(id);
    } else if (awaits_end_) {
      ends_.insert(id);
    }
    awaits_end_ = false;
    last_control_ = id;
  }

  // The token just written stands before a role's name.
  void starts_turn() {
    if (last_control_ >= 0) starts_.insert(last_control_);
    last_control_ = -1;
  }

  const Vocab &vocab_;
  const SpecialMatcher &special_;
  const std::optional<int32_t> eos_;
  Role role_ = Role::kAny;
  std::vector<Role> roles_;  // of the open ifs, as it was outside of each
  size_t num_loops_ = 0;
  bool awaits_end_ = false;    // a message was written; the next CONTROL token ends it
  int32_t last_control_ = -1;  // the CONTROL token just written, if nothing followed it yet
  std::set<int32_t> ends_;
  std::set<int32_t> starts_;
};

}  // namespace

std::vector<int32_t> find_turn_ends(std::string_view source, const Vocab &vocab,
                                    const SpecialMatcher &special, std::optional<int32_t> eos) {
  return Scanner(vocab, special, eos).scan(source);
}

}  // namespace xllm
