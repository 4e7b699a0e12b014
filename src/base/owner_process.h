#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace lockstep {

namespace detail {

/// This process. A child that it forks gets other values before fork() returns there.
struct CurrentProcess {
  uint64_t forks = 0;  // between the first process of the program and this one
  pid_t pid = 0;
};
extern CurrentProcess current_process;

}  // namespace detail

/// The process that made an object. A child that it forks has a copy of the object, but not the threads behind it, and
/// shares the object's connections and shared memory with its parent: the child may neither use nor destroy it.
class OwnerProcess {
 public:
  /// Costs a comparison, no call of the system.
  bool is_this() const { return made_in_.forks == detail::current_process.forks; }

  /// UsageError, in a forked child. `owner` is the process for people: "rank 1's process".
  void check(const char* owner) const {
    if (!is_this()) refuse(owner);
  }
  [[noreturn]] void refuse(const std::string& owner) const;

 private:
  detail::CurrentProcess made_in_ = detail::current_process;
};

/// Keeps an object for ever that this process must not destroy, where a leak checker finds it.
void abandon(const void* object);

/// Deletes an object in the process that made it. A forked child abandons its copy: destroying that could wait for
/// threads that the child does not have, or release what the parent still uses.
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

/// std::make_shared and std::make_unique for such an object.
template <class Object, class... Arguments>
std::shared_ptr<Object> make_shared_owned(Arguments&&... arguments) {
  return std::shared_ptr<Object>(new Object(std::forward<Arguments>(arguments)...), DeleteInOwner());
}
template <class Object, class... Arguments>
OwnedPointer<Object> make_unique_owned(Arguments&&... arguments) {
  return OwnedPointer<Object>(new Object(std::forward<Arguments>(arguments)...));
}

}  // namespace lockstep
