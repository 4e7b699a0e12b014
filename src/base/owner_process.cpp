#include "base/owner_process.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

struct Abandoned {
  const void* object;
  Abandoned* next;
};

std::atomic<Abandoned*> all_abandoned{nullptr};

// The child has a single thread when this runs.
void note_fork() {
  ++detail::current_process.forks;
  detail::current_process.pid = ::getpid();
}

}  // namespace

detail::CurrentProcess detail::current_process = [] {
  ::pthread_atfork(nullptr, nullptr, note_fork);
  return CurrentProcess{0, ::getpid()};
}();

void OwnerProcess::refuse(const std::string& owner) const {
  throw UsageError(text("this process (pid ", detail::current_process.pid, ") was forked from ", owner, " (pid ",
                        made_in_.pid,
                        "), whose threads, connections and shared memory it cannot use; make this call in process ",
                        made_in_.pid, ", or create the objects that the child needs after the fork"));
}

void abandon(const void* object) {
  auto* entry = new Abandoned{object, all_abandoned.load()};
  while (!all_abandoned.compare_exchange_weak(entry->next, entry)) {
  }
}

}  // namespace lockstep
