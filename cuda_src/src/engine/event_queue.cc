#include "engine/event_queue.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>

namespace xllm {

EventQueue::EventQueue() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (fd_ < 0) {
    throw Error(Status::kIo, std::string("event descriptor: ") + std::strerror(errno) +
                                 "; raise the limit on open files");
  }
}

EventQueue::~EventQueue() { ::close(fd_); }

void EventQueue::set_readable(bool is_readable) {
  if (is_readable == is_readable_) return;
  is_readable_ = is_readable;
  uint64_t count = 1;
  // Neither can fail: the counter is 0 before the write and 1 before the read.
  const ssize_t size =
      is_readable ? ::write(fd_, &count, sizeof count) : ::read(fd_, &count, sizeof count);
  static_cast<void>(size);
}

void EventQueue::open_private(uint64_t request_id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  private_.emplace(request_id, std::vector<Event>());
}

void EventQueue::publish(std::vector<Event> *events) {
  if (events->empty()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Event &event : *events) {
      if (event.delivery == Delivery::kShared) {
        shared_.push_back(std::move(event));
        continue;
      }
      const auto found = private_.find(event.request_id);
      if (found != private_.end()) found->second.push_back(std::move(event));
    }
    if (!shared_.empty()) set_readable(true);
  }
  events->clear();
  changed_.notify_all();
}

std::vector<Event> EventQueue::take_now(uint64_t request_id) {
  if (request_id == 0) {
    if (!has_failed_) set_readable(false);
    return std::exchange(shared_, {});
  }
  const auto found = private_.find(request_id);
  if (found == private_.end()) {
    throw Error(Status::kNotFound, "request " + std::to_string(request_id) +
                                       ": not a private request, or its last event has been taken");
  }
  std::vector<Event> events = std::exchange(found->second, {});
  if (!events.empty() && events.back().kind == EventKind::kFinished) private_.erase(found);
  return events;
}

std::vector<Event> EventQueue::take(uint64_t request_id, double timeout_s) {
  using Clock = std::chrono::steady_clock;
  // Beyond this the clock's arithmetic would overflow; it is as good as without limit.
  constexpr double kLongest = 1e9;
  const bool has_limit = timeout_s >= 0 && timeout_s < kLongest;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(has_limit ? timeout_s : 0));
  std::unique_lock<std::mutex> lock(mutex_);
  ++num_waiting_;
  struct Leave {
    EventQueue *queue;
    ~Leave() {  // runs with the lock held
      if (--queue->num_waiting_ == 0) queue->left_.notify_all();
    }
  } leave{this};
  while (true) {
    if (is_closed_) throw Error(Status::kEngineFailed, "the engine is being destroyed");
    std::vector<Event> events = take_now(request_id);
    if (!events.empty()) return events;
    if (has_failed_) {
      throw Error(Status::kEngineFailed,
                  "the engine has failed and all its events are taken; create another");
    }
    if (!has_limit) {
      changed_.wait(lock);
    } else if (timeout_s == 0 || changed_.wait_until(lock, end) == std::cv_status::timeout) {
      if (is_closed_) continue;
      return take_now(request_id);
    }
  }
}

int EventQueue::num_waiting() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_waiting_;
}

void EventQueue::fail() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    has_failed_ = true;
    set_readable(true);
  }
  changed_.notify_all();
}

void EventQueue::close() {
  std::unique_lock<std::mutex> lock(mutex_);
  is_closed_ = true;
  set_readable(true);
  changed_.notify_all();
  left_.wait(lock, [this] { return num_waiting_ == 0; });
}

}  // namespace xllm
