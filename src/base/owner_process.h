#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace lockstep {

namespace detail {

/// The current process. A forked child gets new values before fork() returns in the child.
struct CurrentProcess {
  uint64_t forks = 0;  // number of forks since the program's first process
  pid_t pid = 0;
};
extern CurrentProcess current_process;

}  // namespace detail

/// The process that created an object. A forked child has a copy of the object but not its threads, and shares its
/// connections and shared memory with the parent, so the child must neither use nor destroy the object.
class OwnerProcess {
 public:
  /// Returns whether the current process created the object. One comparison, no system call.
  bool is_this() const { return made_in_.forks == detail::current_process.forks; }

  /// Throws UsageError in a forked child. `owner` describes the creating process: "rank 1's process".
  void check(const char* owner) const {
    if (!is_this()) refuse(owner);
  }
  [[noreturn]] void refuse(const std::string& owner) const;

 private:
  detail::CurrentProcess made_in_ = detail::current_process;
};

/// Closes a descriptor in forked children during its lifetime. Otherwise a living child keeps the connection of its
/// dead parent open, and the peer notices the death late. Thread-safe.
class ClosedInChildren {
 public:
  explicit ClosedInChildren(int descriptor);
  ~ClosedInChildren();
  ClosedInChildren(const ClosedInChildren&) = delete;
  ClosedInChildren& operator=(const ClosedInChildren&) = delete;

 private:
  const int descriptor_;
};

/// Leaks an object that this process must not destroy, but keeps it reachable for leak checkers.
void abandon(const void* object);

/// Deletes an object in the process that created it. A forked child abandons its copy, because the destructor could
/// wait for threads that the child does not have, or release resources that the parent still uses.
struct DeleteInOwner {
  template <class Object>
  void operator()(Object* object) const {
    if (owner.is_this())
      delete object;
    else
      abandon(object);
  }

  OwnerProcess owner{};
};

template <class Object>
using OwnedPointer = std::unique_ptr<Object, DeleteInOwner>;

/// Like std::make_shared and std::make_unique, with DeleteInOwner as the deleter.
template <class Object, class... Arguments>
std::shared_ptr<Object> make_shared_owned(Arguments&&... arguments) {
  return std::shared_ptr<Object>(new Object(std::forward<Arguments>(arguments)...), DeleteInOwner());
}
template <class Object, class... Arguments>
OwnedPointer<Object> make_unique_owned(Arguments&&... arguments) {
  return OwnedPointer<Object>(new Object(std::forward<Arguments>(arguments)...));
}

}  // namespace lockstep
