#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backends/shm/shared_memory.h"
#include "base/owner_process.h"

namespace lockstep::shm {

/// Blocks of shared memory. What other processes know a block by is its offset. Thread-safe.
class Arena {
 public:
  static constexpr size_t kAlignment = 128;
  static constexpr size_t kOwnPages = 8 * 1024;  // blocks of this size on share no page with others

  /// The one that all ranks and groups of this process share, so that a tensor allocated by one group is known to all.
  /// A forked child gets one of its own.
  static std::shared_ptr<Arena> of_process();

  /// Takes as much address space as the machine has memory, or LOCKSTEP_SHM_BYTES.
  explicit Arena(SharedMemory::Kind way);

  /// Never at offset 0. Contents undefined. SystemError when there is no room.
  char* allocate(size_t bytes);
  /// The same, but memory is taken only where the block is touched.
  char* reserve(size_t bytes);
  /// Does nothing in a forked child, whose tensors may be the last to refer to the block there: it is the parent's.
  void free(char* block);

  /// Frees the blocks as soon as `is_unused` says that nobody else reads them; asked now and when memory is wanted.
  void retire(std::vector<char*> blocks, std::function<bool()> is_unused);

  /// None for memory that is not of this arena, or that was detached.
  std::optional<uint64_t> offset_of(const void* data) const;

  /// Gives these bytes, of a block of kOwnPages or more, memory of this process alone, with the same contents at the
  /// same address: another process that still writes to them no longer reaches it. The block's room in the arena is
  /// never used again. SystemError when there is no memory.
  void detach(const void* data, size_t bytes);

  SharedMemory& memory() { return *memory_; }

 private:
  struct Retired {
    std::vector<char*> blocks;
    std::function<bool()> is_unused;
  };

  bool is_detached(uint64_t begin, uint64_t end) const;

  // Both with mutex_ held.
  void free_retired();
  void give_back(char* block);

  const OwnerProcess owner_{};
  const std::shared_ptr<SharedMemory> memory_;
  mutable std::mutex mutex_;
  std::map<uint64_t, size_t> free_;      // guarded by mutex_: by offset, no two adjacent
  std::map<uint64_t, size_t> used_;      // guarded by mutex_: by offset
  std::vector<Retired> retired_;         // guarded by mutex_
  std::map<uint64_t, size_t> detached_;  // guarded by mutex_: by offset
  std::atomic<bool> has_detached_{false};
};

}  // namespace lockstep::shm
