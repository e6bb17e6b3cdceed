// Hash maps for look-ups that are built once and read often: open addressing, linear probing, at
// most two thirds full, hashes keyed by a seed so that a file cannot choose its collisions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string_view>
#include <vector>

namespace xllm {

// Multiplies to 128 bits and folds: every bit of a and b reaches every bit of the result.
inline uint64_t mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t hash_bytes(std::string_view bytes, uint64_t seed) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15u;
  uint64_t hash = seed ^ (bytes.size() * kOdd);
  while (bytes.size() > 8) {
    uint64_t word;
    std::memcpy(&word, bytes.data(), sizeof word);
    hash = mix(hash ^ word, kOdd ^ seed);
    bytes.remove_prefix(8);
  }
  uint64_t tail = 0;
  if (!bytes.empty()) std::memcpy(&tail, bytes.data(), bytes.size());
  return mix(hash ^ tail, kOdd ^ seed);
}

inline uint64_t random_seed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32 | device()) | 1;
}

// hash_bytes for the standard containers.
class SeededHash {
 public:
  size_t operator()(std::string_view bytes) const { return hash_bytes(bytes, seed_); }

 private:
  uint64_t seed_ = random_seed();
};

// How many slots, a power of two, hold this many entries.
inline size_t num_slots_for(size_t capacity) {
  size_t size = 16;
  while (size / 3 * 2 < capacity) size *= 2;
  return size;
}

// Two 32-bit ids to a value.
template <typename Value>
class PairMap {
 public:
  explicit PairMap(size_t capacity) : seed_(random_seed()) {
    slots_.resize(num_slots_for(capacity));
  }

  // Keeps the value that is there; false then. At most `capacity` pairs may be inserted.
  bool insert(uint32_t left, uint32_t right, const Value &value) {
    Slot &slot = slots_[find_slot(key_of(left, right))];
    if (slot.key != kEmpty) return false;
    slot.key = key_of(left, right);
    slot.value = value;
    return true;
  }

  size_t memory_bytes() const { return slots_.capacity() * sizeof(Slot); }

  // Null if the pair is not there.
  const Value *find(uint32_t left, uint32_t right) const {
    const Slot &slot = slots_[find_slot(key_of(left, right))];
    return slot.key == kEmpty ? nullptr : &slot.value;
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};  // no two ids are both 2^32 - 1
  struct Slot {
    uint64_t key = kEmpty;
    Value value{};
  };

  static uint64_t key_of(uint32_t left, uint32_t right) {
    return static_cast<uint64_t>(left) << 32 | right;
  }
  size_t find_slot(uint64_t key) const {
    const size_t mask = slots_.size() - 1;
    size_t i = mix(key ^ seed_, 0x9E3779B97F4A7C15u ^ seed_) & mask;
    while (slots_[i].key != kEmpty && slots_[i].key != key) i = (i + 1) & mask;
    return i;
  }

  uint64_t seed_;
  std::vector<Slot> slots_;
};

}  // namespace xllm
