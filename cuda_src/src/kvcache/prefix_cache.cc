#include "kvcache/prefix_cache.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace xllm {

int max_published_tokens(int prompt_len, int block_size, int segment_size) {
  const int in_segments = prompt_len / segment_size * segment_size;
  return in_segments / block_size * block_size;
}

int max_cached_tokens(int prompt_len, int block_size, int segment_size) {
  if (prompt_len <= 1) return 0;
  const int in_segments = prompt_len / segment_size * segment_size;
  return std::min(prompt_len - 1, in_segments) / block_size * block_size;
}

PrefixCache::PrefixCache(int32_t num_blocks, int block_size, HashKey key, bool is_enabled)
    : block_size_(block_size),
      key_(key),
      is_enabled_(is_enabled),
      pool_(num_blocks),
      entries_(static_cast<size_t>(num_blocks)) {
  XLLM_DCHECK(block_size > 0);
}

PrefixCursor PrefixCache::start(std::string_view salt) const {
  PrefixCursor cursor;
  cursor.parent = siphash128(key_, salt.data(), salt.size());
  return cursor;
}

Hash128 PrefixCache::block_hash(const Hash128 &parent, Span<const int32_t> token_ids) const {
  std::vector<uint8_t> bytes(sizeof parent + token_ids.size() * sizeof(int32_t));
  std::memcpy(bytes.data(), &parent, sizeof parent);
  std::memcpy(bytes.data() + sizeof parent, token_ids.data(), token_ids.size() * sizeof(int32_t));
  return siphash128(key_, bytes.data(), bytes.size());
}

int32_t PrefixCache::find(const Hash128 &hash, const Hash128 &parent,
                          Span<const int32_t> token_ids) const {
  const auto found = by_hash_.find(hash);
  if (found == by_hash_.end()) return kNoBlock;
  const Entry &candidate = entry(found->second);
  const bool is_same = candidate.parent == parent &&
                       std::equal(token_ids.begin(), token_ids.end(), candidate.token_ids.begin(),
                                  candidate.token_ids.end());
  return is_same ? found->second : kNoBlock;
}

int PrefixCache::match(Span<const int32_t> token_ids, int max_tokens, PrefixCursor *cursor,
                       BlockTable *table) {
  XLLM_DCHECK(table->num_blocks() == 0 && cursor->num_blocks == 0);
  XLLM_DCHECK(max_tokens <= static_cast<int>(token_ids.size()));
  if (!is_enabled_) return 0;
  const int max_blocks = max_tokens / block_size_;
  while (cursor->num_blocks < max_blocks) {
    const auto ids = token_ids.subspan(static_cast<size_t>(cursor->num_blocks * block_size_),
                                       static_cast<size_t>(block_size_));
    const Hash128 hash = block_hash(cursor->parent, ids);
    const int32_t block = find(hash, cursor->parent, ids);
    if (block == kNoBlock) break;
    add_reference(block);
    table->append(block);
    cursor->parent = hash;
    ++cursor->num_blocks;
  }
  return cursor->num_blocks * block_size_;
}

int PrefixCache::count_cached(Span<const int32_t> token_ids, int max_tokens,
                              std::string_view salt) const {
  XLLM_DCHECK(max_tokens <= static_cast<int>(token_ids.size()));
  if (!is_enabled_) return 0;
  PrefixCursor cursor = start(salt);
  const std::lock_guard<std::mutex> lock(content_mutex_);
  while (cursor.num_blocks < max_tokens / block_size_) {
    const auto ids = token_ids.subspan(static_cast<size_t>(cursor.num_blocks * block_size_),
                                       static_cast<size_t>(block_size_));
    const Hash128 hash = block_hash(cursor.parent, ids);
    if (find(hash, cursor.parent, ids) == kNoBlock) break;
    cursor.parent = hash;
    ++cursor.num_blocks;
  }
  return cursor.num_blocks * block_size_;
}

void PrefixCache::insert(Span<const int32_t> token_ids, int num_tokens, const BlockTable &table,
                         PrefixCursor *cursor) {
  XLLM_DCHECK(num_tokens <= static_cast<int>(token_ids.size()) && num_tokens <= table.capacity());
  if (!is_enabled_) return;
  for (; cursor->num_blocks < num_tokens / block_size_; ++cursor->num_blocks) {
    const auto ids = token_ids.subspan(static_cast<size_t>(cursor->num_blocks * block_size_),
                                       static_cast<size_t>(block_size_));
    const Hash128 parent = cursor->parent;
    const Hash128 hash = block_hash(parent, ids);
    const int32_t block = table.ids()[static_cast<size_t>(cursor->num_blocks)];
    cursor->parent = hash;
    if (entry(block).is_cached || by_hash_.count(hash) != 0) continue;
    const std::lock_guard<std::mutex> lock(content_mutex_);
    by_hash_.emplace(hash, block);
    Entry &added = entry(block);
    added.is_cached = true;
    added.hash = hash;
    added.parent = parent;
    added.token_ids.assign(ids.begin(), ids.end());
    pool_.add_reference(block);
  }
}

int32_t PrefixCache::allocate() {
  if (pool_.num_free() == 0 && !evict_oldest()) return kNoBlock;
  return pool_.allocate();
}

bool PrefixCache::extend(BlockTable *table, int64_t num_tokens) {
  const int num_missing = table->num_missing(num_tokens);
  if (num_missing > num_available()) return false;
  for (int i = 0; i < num_missing; ++i) table->append(allocate());
  return true;
}

void PrefixCache::add_reference(int32_t block) {
  if (entry(block).is_idle) remove_idle(block);
  pool_.add_reference(block);
}

void PrefixCache::share(const BlockTable &from, int64_t num_tokens, BlockTable *to) {
  XLLM_DCHECK(to->num_blocks() == 0 && num_tokens <= from.capacity());
  for (int i = 0; int64_t{i} * block_size_ < num_tokens; ++i) {
    const int32_t block = from.ids()[static_cast<size_t>(i)];
    add_reference(block);
    to->append(block);
  }
}

bool PrefixCache::is_own(const BlockTable &table, int index) const {
  const int32_t block = table.ids()[static_cast<size_t>(index)];
  return num_users(block) == 1 && !entry(block).is_cached;
}

bool PrefixCache::make_own(BlockTable *table, int index, int32_t *copied_from) {
  const int32_t shared = table->ids()[static_cast<size_t>(index)];
  *copied_from = kNoBlock;
  if (is_own(*table, index)) return false;
  *copied_from = shared;
  const int32_t own = allocate();
  if (own == kNoBlock) return false;
  table->replace(index, own);
  release(shared);
  return true;
}

void PrefixCache::release(int32_t block) {
  XLLM_DCHECK(num_users(block) > 0);
  pool_.release(block);
  if (entry(block).is_cached && pool_.reference_count(block) == 1) push_idle(block);
}

void PrefixCache::release_all(BlockTable *table) {
  for (int i = table->num_blocks() - 1; i >= 0; --i) release(table->ids()[static_cast<size_t>(i)]);
  table->clear();
}

int32_t PrefixCache::num_users(int32_t block) const {
  return pool_.reference_count(block) - (entry(block).is_cached ? 1 : 0);
}

void PrefixCache::push_idle(int32_t block) {
  Entry &added = entry(block);
  added.is_idle = true;
  added.previous = newest_idle_;
  added.next = kNoBlock;
  (newest_idle_ == kNoBlock ? oldest_idle_ : entry(newest_idle_).next) = block;
  newest_idle_ = block;
  ++num_idle_;
}

void PrefixCache::remove_idle(int32_t block) {
  Entry &removed = entry(block);
  (removed.previous == kNoBlock ? oldest_idle_ : entry(removed.previous).next) = removed.next;
  (removed.next == kNoBlock ? newest_idle_ : entry(removed.next).previous) = removed.previous;
  removed.is_idle = false;
  removed.previous = kNoBlock;
  removed.next = kNoBlock;
  --num_idle_;
}

bool PrefixCache::evict_oldest() {
  if (oldest_idle_ == kNoBlock) return false;
  const int32_t block = oldest_idle_;
  remove_idle(block);
  {
    const std::lock_guard<std::mutex> lock(content_mutex_);
    by_hash_.erase(entry(block).hash);
    entry(block) = Entry();
  }
  pool_.release(block);
  return true;
}

}  // namespace xllm
