// The merging loop that byte-pair encoding and SentencePiece share: best pair first, leftmost first
// among equals, O(n log n) in the number of symbols.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace xllm {

// A run of symbols in places 0 to num_places: each symbol covers some places and is named by the
// first of them. Linked both ways at four bytes a place: sizes_ holds a symbol's length at its
// first place and at its last.
class SymbolList {
 public:
  void reserve(size_t num_places) {
    symbols_.reserve(num_places);
    sizes_.reserve(num_places);
    is_first_.reserve(num_places);
  }

  void append(int32_t symbol, size_t num_places) {
    const size_t first = sizes_.size();
    symbols_.resize(first + num_places);
    sizes_.resize(first + num_places);
    is_first_.resize(first + num_places);
    symbols_[first] = symbol;
    is_first_[first] = true;
    sizes_[first] = sizes_.back() = static_cast<uint32_t>(num_places);
  }

  size_t num_places() const { return sizes_.size(); }
  bool is_first(size_t place) const { return is_first_[place]; }
  int32_t symbol(size_t first) const { return symbols_[first]; }
  size_t next(size_t first) const { return first + sizes_[first]; }
  size_t before(size_t first) const { return first - sizes_[first - 1]; }

  // Joins the symbol at `first` and the one behind it.
  void join(size_t first, int32_t symbol) {
    const size_t second = next(first);
    const size_t end = next(second);
    is_first_[second] = false;
    symbols_[first] = symbol;
    sizes_[first] = sizes_[end - 1] = static_cast<uint32_t>(end - first);
  }

 private:
  std::vector<int32_t> symbols_;
  std::vector<uint32_t> sizes_;
  std::vector<bool> is_first_;
};

// Pairs that may be merged, as priority << 32 | place of the left symbol, smallest first: a sorted
// run, and a heap for those that come up while it is consumed. When the run is used up the heap
// becomes the next run, so that a long text costs few heap operations.
class CandidateQueue {
 public:
  // Before the first pop: room for the run, then what it holds.
  void reserve(size_t num_candidates) { run_.reserve(num_candidates); }
  void add_first(uint64_t candidate) { run_.push_back(candidate); }
  // One character over and over gives candidates in order: not sorting them keeps that case linear.
  void start() {
    if (!std::is_sorted(run_.begin(), run_.end())) std::sort(run_.begin(), run_.end());
  }

  void push(uint64_t candidate) {
    heap_.push_back(candidate);
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  }

  // False when there is none left.
  bool pop(uint64_t *candidate) {
    if (next_ == run_.size()) {
      run_.clear();
      run_.swap(heap_);
      next_ = 0;
      start();
      if (run_.empty()) return false;
    }
    if (!heap_.empty() && heap_.front() < run_[next_]) {
      std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
      *candidate = heap_.back();
      heap_.pop_back();
    } else {
      *candidate = run_[next_++];
    }
    return true;
  }

 private:
  std::vector<uint64_t> run_;
  size_t next_ = 0;  // the first of run_ that was not popped yet
  std::vector<uint64_t> heap_;
};

// What a pair of symbols becomes, and how soon: a smaller priority goes first.
struct PairMerge {
  uint32_t priority = 0;
  int32_t symbol = 0;
};

// Merges until look_up finds nothing any more.
//   look_up(first, second, PairMerge *)   whether the symbols at these places merge, and into what
template <typename LookUp>
void merge_symbols(SymbolList *list, const LookUp &look_up) {
  const size_t num_places = list->num_places();
  const auto candidate = [](uint32_t priority, size_t first) {
    return static_cast<uint64_t>(priority) << 32 | first;
  };
  CandidateQueue queue;
  queue.reserve(num_places);
  PairMerge merge;
  for (size_t first = 0; first < num_places; first = list->next(first)) {
    const size_t second = list->next(first);
    if (second < num_places && look_up(first, second, &merge)) {
      queue.add_first(candidate(merge.priority, first));
    }
  }
  queue.start();
  for (uint64_t popped = 0; queue.pop(&popped);) {
    const auto first = static_cast<size_t>(popped & 0xFFFFFFFFu);
    if (!list->is_first(first)) continue;  // swallowed by a symbol to its left
    const size_t second = list->next(first);
    // One of the two may have changed since: then this is no longer the pair that was meant.
    if (second >= num_places || !look_up(first, second, &merge) ||
        merge.priority != static_cast<uint32_t>(popped >> 32)) {
      continue;
    }
    list->join(first, merge.symbol);
    if (first > 0 && look_up(list->before(first), first, &merge)) {
      queue.push(candidate(merge.priority, list->before(first)));
    }
    const size_t end = list->next(first);
    if (end < num_places && look_up(first, end, &merge)) {
      queue.push(candidate(merge.priority, first));
    }
  }
}

}  // namespace xllm
