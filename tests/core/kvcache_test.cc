// Stories with literal block ids, and a property test: no block leaks, none has two owners who
// write.

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/rng.h"
#include "kvcache/block_pool.h"
#include "kvcache/block_table.h"
#include "kvcache/content_hash.h"
#include "kvcache/kv_storage.h"
#include "kvcache/prefix_cache.h"

namespace xllm {
namespace {

using Ids = std::vector<int32_t>;

Ids ids_of(const BlockTable &table) { return Ids(table.ids().begin(), table.ids().end()); }

// num tokens: first, first + 1, ...
Ids tokens(int num, int first = 100) {
  Ids ids(static_cast<size_t>(num));
  for (int i = 0; i < num; ++i) ids[static_cast<size_t>(i)] = first + i;
  return ids;
}

TEST(BlockPool, HandsOutInOrderAndReusesTheLastFreedFirst) {
  BlockPool pool(3);
  EXPECT_EQ(pool.allocate(), 0);
  EXPECT_EQ(pool.allocate(), 1);
  EXPECT_EQ(pool.allocate(), 2);
  EXPECT_EQ(pool.allocate(), kNoBlock);
  EXPECT_EQ(pool.peak_used(), 3);
  EXPECT_TRUE(pool.release(1));
  EXPECT_TRUE(pool.release(0));
  EXPECT_EQ(pool.allocate(), 0);
  EXPECT_EQ(pool.allocate(), 1);
  EXPECT_EQ(pool.num_allocations(), 5u);
}

TEST(BlockPool, ASharedBlockIsFreeOnlyAfterItsLastUser) {
  BlockPool pool(1);
  const int32_t block = pool.allocate();
  pool.add_reference(block);
  EXPECT_FALSE(pool.release(block));
  EXPECT_EQ(pool.allocate(), kNoBlock);
  EXPECT_TRUE(pool.release(block));
  EXPECT_EQ(pool.reference_count(block), 0);
  EXPECT_EQ(pool.allocate(), block);
}

#ifndef NDEBUG
TEST(BlockPoolDeathTest, ReleasingTwiceIsOurMistake) {
  BlockPool pool(1);
  pool.release(pool.allocate());
  EXPECT_DEATH(pool.release(0), "count > 0");
}
#endif

TEST(BlockTable, PlacesPositions) {
  BlockTable table(4);
  EXPECT_EQ(table.num_missing(0), 0);
  EXPECT_EQ(table.num_missing(1), 1);
  EXPECT_EQ(table.num_missing(9), 3);
  table.append(7);
  table.append(2);
  EXPECT_EQ(table.num_missing(8), 0);
  EXPECT_EQ(table.num_missing(9), 1);
  EXPECT_EQ(table.kv_index(0), 28);
  EXPECT_EQ(table.kv_index(3), 31);
  EXPECT_EQ(table.kv_index(4), 8);
  EXPECT_EQ(table.kv_index(7), 11);
}

// Published vectors of SipHash-2-4-128: key 00 01 .. 0f, input 00 01 .. of the given size.
TEST(ContentHash, MatchesThePublishedVectors) {
  const HashKey key{0x0706050403020100u, 0x0f0e0d0c0b0a0908u};
  const auto hex = [&](size_t size) {
    std::vector<uint8_t> input(size);
    for (size_t i = 0; i < size; ++i) input[i] = static_cast<uint8_t>(i);
    const Hash128 hash = siphash128(key, input.data(), size);
    std::string text;
    for (int i = 0; i < 16; ++i) {
      char byte[3];
      std::snprintf(byte, sizeof byte, "%02x",
                    static_cast<unsigned>((i < 8 ? hash.low : hash.high) >> (8 * (i % 8)) & 0xff));
      text += byte;
    }
    return text;
  };
  EXPECT_EQ(hex(0), "a3817f04ba25a8e66df67214c7550293");
  EXPECT_EQ(hex(1), "da87c1d86b99af44347659119b22fc45");
}

TEST(PrefixLimits, OneTokenIsAlwaysComputedAgain) {
  constexpr int kBlock = 16;
  EXPECT_EQ(max_cached_tokens(0, kBlock, 1), 0);
  EXPECT_EQ(max_cached_tokens(1, kBlock, 1), 0);
  EXPECT_EQ(max_cached_tokens(kBlock - 1, kBlock, 1), 0);
  EXPECT_EQ(max_cached_tokens(kBlock, kBlock, 1), 0);
  EXPECT_EQ(max_cached_tokens(kBlock + 1, kBlock, 1), kBlock);
  EXPECT_EQ(max_cached_tokens(3 * kBlock, kBlock, 1), 2 * kBlock);
  EXPECT_EQ(max_published_tokens(3 * kBlock, kBlock, 1), 3 * kBlock);
  EXPECT_EQ(max_published_tokens(kBlock - 1, kBlock, 1), 0);
}

TEST(PrefixLimits, OnlyCompleteSegmentsAreShared) {
  EXPECT_EQ(max_published_tokens(127, 64, 128), 0);  // its one full block ran on the tail's kernels
  EXPECT_EQ(max_published_tokens(300, 64, 128), 256);
  EXPECT_EQ(max_cached_tokens(127, 64, 128), 0);
  EXPECT_EQ(max_cached_tokens(128, 64, 128), 64);  // the rest of the segment is computed again
  EXPECT_EQ(max_cached_tokens(200, 64, 128), 128);
}

class PrefixCacheTest : public ::testing::Test {
 protected:
  static constexpr int kBlock = 4;
  PrefixCache cache{8, kBlock, HashKey{1, 2}};

  // A whole prompt: look up, take blocks, "compute", publish. Returns the number of cached tokens.
  int prefill(const Ids &prompt, BlockTable *table, std::string_view salt = "") {
    PrefixCursor cursor = cache.start(salt);
    const int length = static_cast<int>(prompt.size());
    const int cached = cache.match(prompt, max_cached_tokens(length, kBlock, 1), &cursor, table);
    EXPECT_TRUE(cache.extend(table, length));
    cache.insert(prompt, max_published_tokens(length, kBlock, 1), *table, &cursor);
    return cached;
  }
};

TEST_F(PrefixCacheTest, TheSecondRequestReusesTwoBlocks) {
  BlockTable first(kBlock);
  BlockTable second(kBlock);
  EXPECT_EQ(prefill(tokens(10), &first), 0);
  EXPECT_EQ(ids_of(first), (Ids{0, 1, 2}));
  EXPECT_EQ(prefill(tokens(10), &second), 8);
  EXPECT_EQ(ids_of(second), (Ids{0, 1, 3}));  // the partly filled one is its own
  EXPECT_EQ(cache.num_users(0), 2);
  EXPECT_EQ(cache.num_in_use(), 4);
}

TEST_F(PrefixCacheTest, APromptThatIsWhollyCachedComputesItsLastBlockInABlockOfItsOwn) {
  BlockTable first(kBlock);
  BlockTable second(kBlock);
  prefill(tokens(8), &first);
  EXPECT_EQ(prefill(tokens(8), &second), 4);
  EXPECT_EQ(ids_of(first), (Ids{0, 1}));
  EXPECT_EQ(ids_of(second), (Ids{0, 2}));
  EXPECT_EQ(cache.num_cached(), 2);  // block 2 holds what block 1 holds and stays private
}

TEST_F(PrefixCacheTest, ABranchSharesOnlyWhatIsBeforeIt) {
  BlockTable first(kBlock);
  BlockTable second(kBlock);
  prefill(tokens(12), &first);
  Ids other = tokens(12);
  other[5] = 7;
  EXPECT_EQ(prefill(other, &second), 4);
  EXPECT_EQ(ids_of(second), (Ids{0, 3, 4}));
}

TEST_F(PrefixCacheTest, TheSameTokensAfterAnotherBeginningAreAnotherPrefix) {
  BlockTable first(kBlock);
  BlockTable second(kBlock);
  Ids prompt = tokens(9);
  prefill(prompt, &first);
  prompt[0] = 7;  // blocks 1 and on hold the same ids as before, but not the same K and V
  EXPECT_EQ(prefill(prompt, &second), 0);
  EXPECT_EQ(cache.count_cached(prompt, 8, ""), 8);  // both are kept beside one another
  EXPECT_EQ(cache.count_cached(tokens(9), 8, ""), 8);
}

TEST_F(PrefixCacheTest, AnotherSaltSeesNothing) {
  BlockTable first(kBlock);
  BlockTable second(kBlock);
  BlockTable third(kBlock);
  prefill(tokens(9), &first, "tenant a");
  EXPECT_EQ(cache.count_cached(tokens(9), 8, "tenant b"), 0);
  EXPECT_EQ(cache.count_cached(tokens(9), 8, "tenant a"), 8);
  EXPECT_EQ(prefill(tokens(9), &second, "tenant b"), 0);
  EXPECT_EQ(prefill(tokens(9), &third, "tenant a"), 8);
}

TEST_F(PrefixCacheTest, IdleBlocksAreFoundAgainUntilTheirMemoryIsNeeded) {
  BlockTable table(kBlock);
  prefill(tokens(9), &table);
  cache.release_all(&table);
  cache.release_all(&table);  // harmless
  EXPECT_EQ(cache.num_in_use(), 0);
  EXPECT_EQ(cache.num_idle(), 2);
  EXPECT_EQ(cache.num_available(), 8);
  EXPECT_EQ(prefill(tokens(9), &table), 8);
  EXPECT_EQ(cache.num_idle(), 0);
}

TEST_F(PrefixCacheTest, TheDeepestIdleBlockOfTheOldestSequenceIsEvictedFirst) {
  BlockTable old(kBlock);
  BlockTable young(kBlock);
  prefill(tokens(9, 100), &old);    // 0 1 | 2
  prefill(tokens(9, 200), &young);  // 3 4 | 5
  cache.release_all(&old);
  cache.release_all(&young);
  BlockTable big(kBlock);
  ASSERT_TRUE(cache.extend(&big, 5 * kBlock));  // four are free; the fifth evicts block 1
  EXPECT_EQ(cache.count_cached(tokens(9, 100), 8, ""), 4);
  EXPECT_EQ(cache.count_cached(tokens(9, 200), 8, ""), 8);
  EXPECT_EQ(big.ids()[4], 1);
}

TEST_F(PrefixCacheTest, BlocksInUseAreNeverEvictedAndExtendIsAllOrNothing) {
  BlockTable held(kBlock);
  BlockTable wanted(kBlock);
  prefill(tokens(20), &held);  // five blocks
  EXPECT_FALSE(cache.extend(&wanted, 4 * kBlock));
  EXPECT_EQ(wanted.num_blocks(), 0);
  EXPECT_TRUE(cache.extend(&wanted, 3 * kBlock));
  EXPECT_EQ(cache.allocate(), kNoBlock);
  EXPECT_EQ(cache.num_cached(), 5);
}

TEST_F(PrefixCacheTest, DisabledItOnlyHandsOutBlocks) {
  PrefixCache off(4, kBlock, HashKey{1, 2}, /*is_enabled=*/false);
  BlockTable table(kBlock);
  PrefixCursor cursor = off.start("");
  ASSERT_TRUE(off.extend(&table, 8));
  off.insert(tokens(8), 8, table, &cursor);
  off.release_all(&table);
  EXPECT_EQ(off.num_idle(), 0);
  EXPECT_EQ(off.match(tokens(8), 8, &cursor, &table), 0);
  EXPECT_EQ(off.pool().num_free(), 4);
}

// Random requests over a small pool and few distinct prompts. After every event: each block is
// free, idle or in use; the users of a block are those whose tables hold it; and a block that two
// tables hold has one content at one place.
TEST(PrefixCacheProperty, NoBlockLeaksAndNoneIsUsedTwice) {
  constexpr int kBlock = 4;
  constexpr int kNumBlocks = 24;
  struct Request {
    Ids prompt;
    BlockTable table{kBlock};
    PrefixCursor cursor;
    int64_t length = 0;
  };
  PrefixCache cache(kNumBlocks, kBlock, HashKey{3, 4});
  std::vector<Request> running;
  uint64_t counter = 0;
  int num_hit_tokens = 0;
  const auto draw = [&](uint32_t limit) {
    return static_cast<int>(philox(42, counter++).value[0] % limit);
  };

  for (int event = 0; event < 4000; ++event) {
    const int kind = draw(4);
    if (kind <= 1 && running.size() < 6) {
      Request request;
      request.prompt = tokens(1 + draw(20), 100 + 50 * draw(2));
      if (request.prompt.size() > 6 && draw(2) == 0) request.prompt[6] = 9;
      request.length = static_cast<int64_t>(request.prompt.size());
      request.cursor = cache.start("");
      const int length = static_cast<int>(request.length);
      const int expected =
          cache.count_cached(request.prompt, max_cached_tokens(length, kBlock, 1), "");
      const int cached = cache.match(request.prompt, max_cached_tokens(length, kBlock, 1),
                                     &request.cursor, &request.table);
      EXPECT_EQ(cached, expected);
      EXPECT_LT(cached, length);
      num_hit_tokens += cached;
      if (!cache.extend(&request.table, request.length)) {
        cache.release_all(&request.table);
      } else {
        cache.insert(request.prompt, max_published_tokens(length, kBlock, 1), request.table,
                     &request.cursor);
        running.push_back(std::move(request));
      }
    } else if (kind == 2 && !running.empty()) {  // a generated token
      Request &request = running[static_cast<size_t>(draw(static_cast<uint32_t>(running.size())))];
      if (cache.extend(&request.table, request.length + 1)) ++request.length;
    } else if (!running.empty()) {
      const auto chosen = static_cast<size_t>(draw(static_cast<uint32_t>(running.size())));
      cache.release_all(&running[chosen].table);
      running.erase(running.begin() + static_cast<ptrdiff_t>(chosen));
    }

    std::map<int32_t, int> users;
    std::map<int32_t, Ids> content;  // the prompt up to and including the block
    for (const Request &request : running) {
      for (int i = 0; i < request.table.num_blocks(); ++i) {
        const int32_t block = request.table.ids()[static_cast<size_t>(i)];
        ++users[block];
        const auto end = static_cast<size_t>((i + 1) * kBlock);
        if (users[block] == 1 && end > request.prompt.size()) continue;
        ASSERT_LE(end, request.prompt.size()) << "a block that is written to has two users";
        const Ids prefix(request.prompt.begin(),
                         request.prompt.begin() + static_cast<ptrdiff_t>(end));
        ASSERT_TRUE(content.emplace(block, prefix).first->second == prefix);
      }
    }
    int in_use = 0;
    for (int32_t block = 0; block < kNumBlocks; ++block) {
      const auto found = users.find(block);
      const int expected = found == users.end() ? 0 : found->second;
      ASSERT_EQ(cache.num_users(block), expected);
      in_use += expected > 0 ? 1 : 0;
    }
    ASSERT_EQ(cache.num_in_use(), in_use);
    ASSERT_EQ(cache.pool().num_free() + cache.num_idle() + in_use, kNumBlocks);
  }
  for (Request &request : running) cache.release_all(&request.table);
  EXPECT_EQ(cache.num_in_use(), 0);
  EXPECT_EQ(cache.pool().num_free() + cache.num_idle(), kNumBlocks);
  EXPECT_GT(num_hit_tokens, 0);
}

class HostAllocator : public Allocator {
 public:
  void *allocate(uint64_t size_bytes) override {
    live_bytes += size_bytes;
    return std::malloc(size_bytes);
  }
  void free(void *memory, uint64_t size_bytes) noexcept override {
    live_bytes -= size_bytes;
    std::free(memory);
  }
  uint64_t live_bytes = 0;
};

KvLayout layout_of(KvType type, int head_dim) {
  KvLayout layout;
  layout.type = type;
  layout.num_layers = 2;
  layout.num_kv_heads = 3;
  layout.head_dim = head_dim;
  layout.block_size = 64;
  return layout;
}

TEST(KvStorage, TakesWhatTheLayoutSaysAndGivesItBack) {
  HostAllocator allocator;
  {
    // Per token: 2 layers x K and V x 3 heads x (64 codes + 2 scales of 2 bytes).
    KvStorage storage(&allocator, layout_of(KvType::kInt8, 64), 5);
    EXPECT_EQ(storage.view().layout.bytes_per_token(), 2u * 2 * 3 * (64 + 4));
    EXPECT_EQ(storage.size_bytes(), 5u * 64 * 2 * 2 * 3 * (64 + 4));
    EXPECT_EQ(allocator.live_bytes, storage.size_bytes());
    EXPECT_EQ(storage.view().num_blocks, 5);
  }
  EXPECT_EQ(allocator.live_bytes, 0u);
}

TEST(KvStorage, RefusesAHeadThatGroupsOf32DoNotDivide) {
  HostAllocator allocator;
  for (const KvType type : {KvType::kInt8, KvType::kInt4}) {
    for (const int head_dim : {8, 40, 80}) {
      try {
        KvStorage storage(&allocator, layout_of(type, head_dim), 1);
        FAIL() << kv_type_name(type) << " " << head_dim;
      } catch (const Error &error) {
        EXPECT_EQ(error.status(), Status::kInvalidArgument);
        EXPECT_NE(error.message().find(kv_type_name(type)), std::string::npos);
        EXPECT_NE(error.message().find(std::to_string(head_dim)), std::string::npos);
      }
    }
  }
  EXPECT_NO_THROW(KvStorage(&allocator, layout_of(KvType::kF16, 40), 1));
  EXPECT_NO_THROW(KvStorage(&allocator, layout_of(KvType::kInt4, 96), 1));
}

}  // namespace
}  // namespace xllm
