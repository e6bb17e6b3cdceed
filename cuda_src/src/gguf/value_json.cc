// Metadata values as JSON and as text for messages.

#include <charconv>
#include <cmath>
#include <string>
#include <string_view>

#include "gguf/cursor.h"
#include "gguf/value.h"

namespace xllm {
namespace {

constexpr char kHex[] = "0123456789abcdef";

// Bytes of the UTF-8 character that starts `text`; 0 when none does (RFC 3629: no overlong forms,
// no surrogates, nothing above U+10FFFF).
size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  const size_t length = lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  if (length == 0 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  if (lead == 0xe0 && byte(1) < 0xa0) return 0;
  if (lead == 0xed && byte(1) > 0x9f) return 0;
  if (lead == 0xf0 && byte(1) < 0x90) return 0;
  if (lead == 0xf4 && byte(1) > 0x8f) return 0;
  return length;
}

void append_string(std::string_view text, size_t max_bytes, std::string *out) {
  out->push_back('"');
  size_t i = 0;
  while (i < text.size()) {
    const size_t length = utf8_length(text.substr(i));
    if (i + (length == 0 ? 1 : length) > max_bytes) break;
    const char c = text[i];
    if (length == 0) {
      out->append("\xef\xbf\xbd");
    } else if (c == '"' || c == '\\') {
      out->append({'\\', c});
    } else if (c == '\n') {
      out->append("\\n");
    } else if (static_cast<uint8_t>(c) < 0x20 || c == 0x7f) {
      out->append("\\u00");
      out->append({kHex[static_cast<uint8_t>(c) >> 4], kHex[c & 15]});
    } else {
      out->append(text.substr(i, length));
    }
    i += length == 0 ? 1 : length;
  }
  if (i < text.size()) out->append("\xe2\x80\xa6");
  out->push_back('"');
}

template <typename T>
void append_float(T number, std::string *out) {
  if (std::isfinite(number)) {
    char text[64];
    out->append(text, std::to_chars(text, text + sizeof text, number).ptr);
  } else {
    out->append(std::isnan(number) ? "\"NaN\"" : number > 0 ? "\"Infinity\"" : "\"-Infinity\"");
  }
}

// Writes the value of `type` at the cursor and moves past it. Depth is limited by the file's check.
void append_value(Cursor *cursor, GgufType type, size_t max_elements, size_t max_bytes,
                  std::string *out) {
  switch (type) {
    case GgufType::kUint8:
      out->append(std::to_string(cursor->read<uint8_t>()));
      break;
    case GgufType::kInt8:
      out->append(std::to_string(cursor->read<int8_t>()));
      break;
    case GgufType::kUint16:
      out->append(std::to_string(cursor->read<uint16_t>()));
      break;
    case GgufType::kInt16:
      out->append(std::to_string(cursor->read<int16_t>()));
      break;
    case GgufType::kUint32:
      out->append(std::to_string(cursor->read<uint32_t>()));
      break;
    case GgufType::kInt32:
      out->append(std::to_string(cursor->read<int32_t>()));
      break;
    case GgufType::kUint64:
      out->append(std::to_string(cursor->read<uint64_t>()));
      break;
    case GgufType::kInt64:
      out->append(std::to_string(cursor->read<int64_t>()));
      break;
    case GgufType::kFloat32:
      append_float(cursor->read<float>(), out);
      break;
    case GgufType::kFloat64:
      append_float(cursor->read<double>(), out);
      break;
    case GgufType::kBool:
      out->append(cursor->read<uint8_t>() != 0 ? "true" : "false");
      break;
    case GgufType::kString:
      append_string(cursor->read_string(), max_bytes, out);
      break;
    case GgufType::kArray: {
      const GgufType element = read_type(cursor);
      const auto count = cursor->read<uint64_t>();
      out->push_back('[');
      for (uint64_t i = 0; i < count; ++i) {
        if (i < max_elements) {
          if (i > 0) out->append(", ");
          append_value(cursor, element, max_elements, max_bytes, out);
        } else if (gguf_type_bytes(element) != 0) {
          cursor->take((count - i) * gguf_type_bytes(element));
          break;
        } else {
          skip_value(cursor, element);
        }
      }
      out->push_back(']');
      break;
    }
  }
}

}  // namespace

std::string GgufValue::to_json(size_t max_elements, size_t max_bytes) const {
  Cursor cursor(file_, byte_offset());
  cursor.describe(key());
  std::string json;
  append_value(&cursor, type_, max_elements, max_bytes, &json);
  return json;
}

std::string float_json(double number) {
  std::string json;
  append_float(number, &json);
  return json;
}

std::string printable(std::string_view text) {
  constexpr size_t kMaxBytes = 80;
  std::string out;
  for (const char c : text.substr(0, kMaxBytes)) {
    if (c > 0x1f && c < 0x7f) {
      out.push_back(c);
    } else {
      const auto byte = static_cast<uint8_t>(c);
      out.append({'\\', 'x', kHex[byte >> 4], kHex[byte & 15]});
    }
  }
  if (text.size() > kMaxBytes) out.append("...");
  return out;
}

}  // namespace xllm
