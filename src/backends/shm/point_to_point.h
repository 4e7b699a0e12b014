#pragma once

#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <lockstep/backend.h>

#include "backends/shm/shm_group.h"

namespace lockstep::shm {

/// Send and receive between two ranks. The sender copies the data into its arena, and the receiver fetches the data
/// from there. A send is done when the receiver has fetched it.
///
/// There is no background thread. A message is fetched while the receiving rank blocks on any call of its group, or
/// calls is_done(). Thread-safe.
class PointToPoint {
 public:
  explicit PointToPoint(ShmGroup& group);
  /// Messages that were not fetched stay in memory until their receivers leave the group.
  ~PointToPoint();

  std::unique_ptr<Transfer> send(const at::Tensor& data, int to, uint64_t fingerprint);
  std::unique_ptr<Transfer> receive(const at::Tensor& data, int from, uint64_t fingerprint);

  /// Fetches the messages that have arrived for waiting receives. Returns whether receives still wait.
  bool receive_arrived();

 private:
  class Sending;
  class Receiving;
  struct Outgoing {
    ShmMessage* message = nullptr;  // null once the message was fetched and freed
  };

  /// Messages from one rank that have arrived, and receives that wait for one, by fingerprint. At most one of the two
  /// queues of a fingerprint has entries after match().
  struct Inbox {
    std::unordered_map<uint64_t, std::deque<ShmMessage*>> arrived;
    std::unordered_map<uint64_t, std::list<Receiving*>> waiting;
    ShmMessage* last_seen = nullptr;
  };

  // All require mutex_.
  void discard_fetched(int to);
  void follow_messages(int from);
  void match(int from, uint64_t fingerprint);

  ShmGroup& group_;
  std::mutex mutex_;
  std::vector<std::deque<std::shared_ptr<Outgoing>>> sent_;  // guarded by mutex_: to each rank, oldest first
  std::vector<Inbox> inboxes_;                               // guarded by mutex_: from each rank
};

}  // namespace lockstep::shm
