// Events on their way from the step loop to whoever takes them: one queue for all shared requests
// and one for each private request. One wake-up per publish, whatever the number of events.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "engine/event.h"

namespace xllm {

// Thread-safe. Its destructor may run once close() has returned.
class EventQueue {
 public:
  EventQueue();  // Error(kIo) when the system has no descriptor left
  ~EventQueue();
  EventQueue(const EventQueue &) = delete;
  EventQueue &operator=(const EventQueue &) = delete;

  // Readable while events of shared requests wait, and after fail() and close().
  int fd() const { return fd_; }

  // Announces a private request; before its first event.
  void open_private(uint64_t request_id);
  // Takes over the events and leaves the vector empty.
  void publish(std::vector<Event> *events);

  // Waits up to timeout_s (0: not at all, < 0: without limit) for events of one private request, or
  // with request_id 0 for those of all shared ones; empty when nothing came in time.
  // Error(kNotFound): no such private request, or its finished event has been taken.
  // Error(kEngineFailed): closed, or failed and nothing left to take.
  std::vector<Event> take(uint64_t request_id, double timeout_s);

  // Calls of take in progress.
  int num_waiting() const;

  // No more events will come: what is there can still be taken.
  void fail();
  // Turns every waiting take away and waits until it has left.
  void close();

 private:
  std::vector<Event> take_now(uint64_t request_id);
  void set_readable(bool is_readable);

  int fd_;
  bool is_readable_ = false;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable left_;
  std::vector<Event> shared_;
  std::unordered_map<uint64_t, std::vector<Event>> private_;
  int num_waiting_ = 0;
  bool has_failed_ = false;
  bool is_closed_ = false;
};

}  // namespace xllm
