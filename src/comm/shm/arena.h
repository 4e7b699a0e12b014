#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/owner_process.h"
#include "comm/shm/shared_memory.h"

namespace lockstep::shm {

/// Blocks of shared memory. What other processes know a block by is its offset. Thread-safe.
class Arena {
 public:
  static constexpr size_t kAlignment = 128;

  /// The one that all ranks and groups of this process share, so that a tensor allocated by one group is known to all.
  /// A forked child gets one of its own.
  static std::shared_ptr<Arena> of_process();

  /// Takes as much address space as the machine has memory, or LOCKSTEP_SHM_BYTES.
  explicit Arena(SharedMemory::Way way);

  /// Never at offset 0. Contents undefined. SystemError when there is no room.
  char* allocate(size_t bytes);
  /// The same, but memory is taken only where the block is touched.
  char* reserve(size_t bytes);
  /// Does nothing in a forked child, whose tensors may be the last to refer to the block there: it is the parent's.
  void free(char* block);

  /// Frees the blocks as soon as `is_unused` says that nobody else reads them; asked now and when memory is wanted.
  void retire(std::vector<char*> blocks, std::function<bool()> is_unused);

  /// None for memory that is not of this arena.
  std::optional<uint64_t> offset_of(const void* place) const;

  SharedMemory& memory() { return *memory_; }

 private:
  struct Retired {
    std::vector<char*> blocks;
    std::function<bool()> is_unused;
  };

  // Both with mutex_ held.
  void free_retired();
  void give_back(char* block);

  const OwnerProcess owner_{};
  const std::shared_ptr<SharedMemory> memory_;
  std::mutex mutex_;
  std::map<uint64_t, size_t> free_;  // guarded by mutex_: by offset, no two adjacent
  std::map<uint64_t, size_t> used_;  // guarded by mutex_: by offset
  std::vector<Retired> retired_;     // guarded by mutex_
};

}  // namespace lockstep::shm
