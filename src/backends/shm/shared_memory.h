#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "rendezvous/net/socket.h"

namespace lockstep::shm {

/// Identifies a piece of shared memory to other processes.
struct MemoryHandle {
  std::string path;  // "/proc/PID/fd/N", or "shm:/NAME"
  std::string id;    // random, because paths are reused
  size_t bytes = 0;
  bool is_locked = false;  // the creating process holds a lock on the file while it uses the memory
};

/// Memory that other processes of this host can map. The whole range is mapped in this process. Only touched pages take
/// memory. Thread-safe.
class SharedMemory {
 public:
  enum class Kind {
    kUnnamed,  // a memfd: freed with the last process that maps it, not limited by the size of /dev/shm
    kNamed,    // a file in /dev/shm until unlink(): for processes that cannot see each other in /proc
  };

  /// Throws SystemError when the memory cannot be created.
  static std::shared_ptr<SharedMemory> create(Kind kind, size_t bytes);
  /// Maps memory that this or another process has created. Returns the existing mapping if this process has one. Throws
  /// SystemError when the memory cannot be opened or mapped, UsageError when its size is not that of the handle.
  static std::shared_ptr<SharedMemory> open(const MemoryHandle& address);

  SharedMemory(FileDescriptor file, MemoryHandle address);
  ~SharedMemory();  ///< also removes the name, if this process created the memory
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  const MemoryHandle& handle() const { return handle_; }
  char* begin() const { return begin_; }
  size_t bytes() const { return handle_.bytes; }
  bool contains(const void* data) const { return data >= begin_ && data < begin_ + bytes(); }

  /// Allocates the pages of these bytes now, so that a lack of memory throws SystemError here and does not raise a
  /// signal later.
  void populate(size_t offset, size_t bytes);
  /// Frees the pages of these bytes. Their contents are lost.
  void release(size_t offset, size_t bytes);
  /// Replaces the pages of these bytes in this process by private memory with the same contents at the same address.
  /// Later writes of other processes are no longer visible here. Throws SystemError when no memory is left.
  void detach(size_t offset, size_t bytes);
  /// Whether this process created the memory.
  bool is_created_here() const { return is_created_here_; }
  /// Returns false once the creating process has closed the memory or has ended in any way. Returns true when this
  /// process cannot know.
  bool is_in_use() const;
  /// Removes the name, if there is one. Existing mappings stay valid; no other process can open the memory afterwards.
  void unlink();

 private:
  const FileDescriptor file_;
  const MemoryHandle handle_;
  char* begin_ = nullptr;         // constant after construction
  bool is_created_here_ = false;  // constant after create()
};

}  // namespace lockstep::shm
