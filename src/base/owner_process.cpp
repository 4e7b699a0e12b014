#include "base/owner_process.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

struct Abandoned {
  const void* object;
  Abandoned* next;
};

std::atomic<Abandoned*> all_abandoned{nullptr};

/// The descriptors of all ClosedInChildren. Never destroyed: other static objects may hold some.
struct ParentsDescriptors {
  std::mutex mutex;
  std::vector<int> numbers;  // guarded by mutex

  static ParentsDescriptors& all() {
    static ParentsDescriptors& instance = *new ParentsDescriptors;
    return instance;
  }
};

void before_fork() {
  ParentsDescriptors::all().mutex.lock();
}

void after_fork_in_parent() {
  ParentsDescriptors::all().mutex.unlock();
}

// The child has a single thread when this runs. A descriptor is replaced by /dev/null, so that its number is not reused
// while objects of the parent's copy refer to it.
void after_fork_in_child() {
  ++detail::current_process.forks;
  detail::current_process.pid = ::getpid();
  auto& descriptors = ParentsDescriptors::all();
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int number : descriptors.numbers) null < 0 ? ::close(number) : ::dup3(null, number, O_CLOEXEC);
  if (null >= 0) ::close(null);
  descriptors.numbers.clear();
  descriptors.mutex.unlock();
}

}  // namespace

detail::CurrentProcess detail::current_process = [] {
  ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  return CurrentProcess{0, ::getpid()};
}();

void OwnerProcess::refuse(const std::string& owner) const {
  throw UsageError(text("this process (pid ", detail::current_process.pid, ") was forked from ", owner, " (pid ",
                        made_in_.pid,
                        "), whose threads, connections and shared memory it cannot use; make this call in process ",
                        made_in_.pid, ", or create the objects that the child needs after the fork"));
}

ClosedInChildren::ClosedInChildren(int descriptor) : descriptor_(descriptor) {
  auto& descriptors = ParentsDescriptors::all();
  std::lock_guard lock(descriptors.mutex);
  descriptors.numbers.push_back(descriptor);
}

ClosedInChildren::~ClosedInChildren() {
  auto& [mutex, numbers] = ParentsDescriptors::all();
  std::lock_guard lock(mutex);
  if (const auto found = std::find(numbers.begin(), numbers.end(), descriptor_); found != numbers.end())
    numbers.erase(found);
}

void abandon(const void* object) {
  auto* entry = new Abandoned{object, all_abandoned.load()};
  while (!all_abandoned.compare_exchange_weak(entry->next, entry)) {
  }
}

}  // namespace lockstep
