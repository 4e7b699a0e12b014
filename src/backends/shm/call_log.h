#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <lockstep/backend.h>

#include "backends/shm/shared_memory.h"

namespace lockstep::shm {

/// Where the ranks of one host write down each call before they make it, for backends that do not compare calls: ranks
/// that make different ones are found out before data moves between them, and nobody waits. Of two ranks that first
/// write and then look at what the other wrote, at least one sees it.
///
/// A rank that is ahead of another by more calls than the call log holds is not compared with it. One thread at a time.
class CallLog {
 public:
  static constexpr uint64_t kCalls = 1024;

  /// Collective. Ranks that do not see each other's memory, on other hosts or in other containers, go without.
  explicit CallLog(const BackendContext& context);

  /// The next call of this rank. MismatchError when another rank has written down another one in its place.
  void write(uint64_t fingerprint);

 private:
  struct Page;

  static std::shared_ptr<SharedMemory> find(const std::string& offer, const std::string& host_id);

  const int rank_;
  const std::shared_ptr<SharedMemory> mine_;
  std::vector<std::shared_ptr<SharedMemory>> others_;  // by rank; none of those that are not seen
  uint64_t calls_ = 0;
};

}  // namespace lockstep::shm
