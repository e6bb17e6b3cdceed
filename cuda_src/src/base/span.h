// A view of `size` contiguous elements that someone else owns (C++17 has no std::span).
#pragma once

#include <cstddef>
#include <type_traits>
#include <vector>

namespace xllm {

template <typename T>
class Span {
 public:
  constexpr Span() = default;
  constexpr Span(T *data, size_t size) : data_(data), size_(size) {}
  // Views of a vector: a const one yields Span<const U> only.
  // NOLINTBEGIN(google-explicit-constructor)
  template <typename U, typename = std::enable_if_t<std::is_convertible_v<const U (*)[], T (*)[]>>>
  Span(const std::vector<U> &v) : data_(v.data()), size_(v.size()) {}
  template <typename U, typename = std::enable_if_t<std::is_convertible_v<U (*)[], T (*)[]>>>
  Span(std::vector<U> &v) : data_(v.data()), size_(v.size()) {}
  // NOLINTEND(google-explicit-constructor)

  constexpr T *data() const { return data_; }
  constexpr size_t size() const { return size_; }
  constexpr bool empty() const { return size_ == 0; }
  constexpr T &operator[](size_t i) const { return data_[i]; }
  constexpr T *begin() const { return data_; }
  constexpr T *end() const { return data_ + size_; }
  constexpr Span subspan(size_t offset, size_t count) const { return Span(data_ + offset, count); }

 private:
  T *data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace xllm
