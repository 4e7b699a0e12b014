#pragma once

#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include <lockstep/backend.h>

#include "backends/shm/shm_group.h"

namespace lockstep::shm {

/// Messages between two ranks: the sender leaves a copy in its arena, and the receiver fetches it from there. A send is
/// done when it is fetched.
///
/// No thread works at this on its own: a message is fetched while the receiving rank waits for it, or for anything else
/// in its group, or asks whether it is done. Thread-safe.
class PointToPoint {
 public:
  explicit PointToPoint(ShmGroup& group);
  /// What has not been fetched stays for the receivers until they leave.
  ~PointToPoint();

  std::unique_ptr<Transfer> send(const at::Tensor& data, int to, uint64_t fingerprint);
  std::unique_ptr<Transfer> receive(const at::Tensor& data, int from, uint64_t fingerprint);

 private:
  class Sending;
  class Receiving;
  struct Outgoing {
    ShmMessage* message = nullptr;  // none once it is fetched and its memory free
  };

  // All with mutex_ held.
  void discard_fetched(int to);
  void look(int from);
  bool fetch(const Receiving& receiving);

  void fetch_what_is_there();

  ShmGroup& group_;
  std::mutex mutex_;
  std::vector<std::deque<std::shared_ptr<Outgoing>>> sent_;  // guarded by mutex_: to each rank, oldest first
  std::vector<std::list<ShmMessage*>> arrived_;              // guarded by mutex_: from each rank, not yet fetched
  std::vector<ShmMessage*> last_seen_;                       // guarded by mutex_: from each rank
  std::list<Receiving*> pending_;                            // guarded by mutex_
};

}  // namespace lockstep::shm
