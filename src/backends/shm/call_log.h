#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <lockstep/backend.h>

#include "backends/shm/shared_memory.h"

namespace lockstep::shm {

/// Detects ranks of one host that make different calls, for backends that do not compare calls themselves.
///
/// Each rank writes the fingerprint of a call to shared memory before it makes the call, then reads the entries of the
/// other ranks. Of two ranks that write first and then read, at least one sees the entry of the other. So a mismatch is
/// detected before data moves, and no rank blocks.
///
/// Two ranks that are more than kCalls calls apart are not compared. Not thread-safe.
class CallLog {
 public:
  static constexpr uint64_t kCalls = 1024;

  /// Collective. Ranks that cannot map each other's memory (other hosts, other containers) are not compared.
  explicit CallLog(const BackendContext& context);

  /// Records the next call of this rank. Throws MismatchError when another rank recorded a different call under the
  /// same number.
  void write(uint64_t fingerprint);

 private:
  struct Page;

  static std::shared_ptr<SharedMemory> find(const std::string& offer, const std::string& host_id);

  const int rank_;
  const std::shared_ptr<SharedMemory> own_memory_;
  std::vector<std::shared_ptr<SharedMemory>> other_memories_;  // by rank; null for ranks that cannot be mapped
  uint64_t calls_ = 0;
};

}  // namespace lockstep::shm
