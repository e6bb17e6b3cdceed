// Reuse of computed prompt blocks, and the one place that hands out and takes back blocks.
//
// A full block of a prompt is known by a keyed 128-bit hash of (its parent's hash, its token ids);
// the first block's parent is the hash of the request's salt. On a hit the token ids and the parent
// are compared as well, so that a collision costs a miss and never gives one request another's
// keys. A block that no sequence uses any more stays cached until its memory is needed: the one
// unused for longest goes first (after Zheng et al., SGLang's RadixAttention, arXiv:2312.07104,
// with hashes instead of a tree).
//
// Blocks and their state, all within one BlockPool:
//   free      in the pool's free list
//   private   in use by sequences, contents unknown to the cache
//   shared    in use by sequences and cached: no one writes to it any more
//   idle      cached and used by nobody: evictable
#pragma once

#include <cstdint>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/span.h"
#include "kvcache/block_pool.h"
#include "kvcache/block_table.h"
#include "kvcache/content_hash.h"

namespace xllm {

// How far a sequence's prompt has been looked up or published: its next block's parent. Belongs to
// the sequence.
struct PrefixCursor {
  Hash128 parent;
  int num_blocks = 0;  // complete blocks behind the cursor
};

// Most tokens of a prompt that may come from the cache: whole blocks, at most prompt_len - 1 (one
// token is always computed again, for its logits, in a block of the request's own), and only from
// the prompt's own complete segments: the tail behind them is computed by other kernels on some
// devices, so a cached block must not stand in for it. segment_size 1: no such segments.
int max_cached_tokens(int prompt_len, int block_size, int segment_size);

// Leading tokens of a prompt whose blocks may enter the cache: complete blocks within complete
// segments.
int max_published_tokens(int prompt_len, int block_size, int segment_size);

// Not thread-safe: it belongs to the step loop's thread, which alone changes it. count_cached may
// be called from any thread.
class PrefixCache {
 public:
  // `key` should be random, drawn once per engine. Disabled, nothing is ever found or kept, and the
  // rest works the same.
  PrefixCache(int32_t num_blocks, int block_size, HashKey key, bool is_enabled = true);
  PrefixCache(const PrefixCache &) = delete;
  PrefixCache &operator=(const PrefixCache &) = delete;

  // The start of a prompt whose reuse is confined to requests with the same salt.
  PrefixCursor start(std::string_view salt) const;

  // Look up the longest chain of cached blocks of token_ids[0, max_tokens) and append it to *table
  // (empty before), one reference each for the caller. Advances *cursor past it. Returns the number
  // of tokens found, a multiple of block_size.
  int match(Span<const int32_t> token_ids, int max_tokens, PrefixCursor *cursor, BlockTable *table);
  // What match would return, changing nothing. From any thread.
  int count_cached(Span<const int32_t> token_ids, int max_tokens, std::string_view salt) const;

  // Publish the blocks of token_ids[0, num_tokens) from the cursor on: their K and V have been
  // computed and lie in the table's blocks. num_tokens is cut to whole blocks. A block whose
  // content is cached already stays private. Advances *cursor.
  void insert(Span<const int32_t> token_ids, int num_tokens, const BlockTable &table,
              PrefixCursor *cursor);

  // A block of the caller's own, evicting the oldest idle one when none is free; kNoBlock when all
  // are in use.
  int32_t allocate();
  // Append blocks until positions 0 .. num_tokens - 1 have a place. All or nothing: false, and
  // nothing taken, when they do not fit.
  bool extend(BlockTable *table, int64_t num_tokens);
  // One more user of a block (fork).
  void add_reference(int32_t block);
  // Appends the blocks of `from` that hold its first num_tokens tokens to *to (empty before), one
  // reference each for the caller. The last one may be partly filled: whoever writes to it next
  // makes it its own first.
  void share(const BlockTable &from, int64_t num_tokens, BlockTable *to);
  // Makes the index-th block of *table the caller's own where others use it, too: true where that
  // took another block, whose content is then to be copied from *copied_from. False, with
  // *copied_from kNoBlock, where it was its own; false with the shared block where none is left.
  bool make_own(BlockTable *table, int index, int32_t *copied_from);
  // Whether nobody else can read the index-th block of a table.
  bool is_own(const BlockTable &table, int index) const;
  // One user less. A cached block that nobody uses becomes idle.
  void release(int32_t block);
  // Give back a whole sequence and clear the table; harmless when repeated. Deepest blocks first:
  // they are the first to be evicted, because without its parents a block cannot be found.
  void release_all(BlockTable *table);

  int block_size() const { return block_size_; }
  int32_t num_blocks() const { return pool_.num_blocks(); }
  int32_t num_available() const {
    return pool_.num_free() + num_idle_;
  }  // what allocate can still give
  int32_t num_in_use() const { return num_blocks() - num_available(); }  // by sequences
  int32_t num_cached() const { return static_cast<int32_t>(by_hash_.size()); }
  int32_t num_idle() const { return num_idle_; }
  int32_t num_users(int32_t block) const;  // sequences that use it
  const BlockPool &pool() const { return pool_; }

 private:
  // What the cache knows of a cached block; links of the idle list (least recently used first).
  struct Entry {
    bool is_cached = false;
    bool is_idle = false;
    Hash128 hash;
    Hash128 parent;
    std::vector<int32_t> token_ids;
    int32_t previous = kNoBlock;
    int32_t next = kNoBlock;
  };
  struct TakeLow {
    size_t operator()(const Hash128 &hash) const { return static_cast<size_t>(hash.low); }
  };

  Hash128 block_hash(const Hash128 &parent, Span<const int32_t> token_ids) const;
  int32_t find(const Hash128 &hash, const Hash128 &parent, Span<const int32_t> token_ids) const;
  Entry &entry(int32_t block) { return entries_[static_cast<size_t>(block)]; }
  const Entry &entry(int32_t block) const { return entries_[static_cast<size_t>(block)]; }
  void push_idle(int32_t block);
  void remove_idle(int32_t block);
  bool evict_oldest();

  int block_size_;
  HashKey key_;
  bool is_enabled_;
  BlockPool pool_;  // the cache itself holds one reference to each cached block
  // Held to change by_hash_ or what an entry says of a block's content, and by other threads to
  // read them; the owner reads without.
  mutable std::mutex content_mutex_;
  std::vector<Entry> entries_;  // one per block
  std::unordered_map<Hash128, int32_t, TakeLow> by_hash_;
  int32_t oldest_idle_ = kNoBlock;
  int32_t newest_idle_ = kNoBlock;
  int32_t num_idle_ = 0;
};

}  // namespace xllm
