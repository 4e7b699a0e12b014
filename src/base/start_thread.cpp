#include "base/start_thread.h"

#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

class Threads {
 public:
  ~Threads() {
    for (auto& thread : threads_) thread.join();
  }
  void add(std::thread thread) {
    std::lock_guard lock(mutex_);
    threads_.push_back(std::move(thread));
  }

 private:
  std::mutex mutex_;
  std::vector<std::thread> threads_;  // guarded by mutex_, but for the destructor
};

}  // namespace

std::thread start_thread(const char* purpose, std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw SystemError(text("cannot start a thread for ", purpose, ": ", error.code().message(),
                           ". Raise the limit of processes (ulimit -u, or the container's pids limit)"));
  }
}

void join_at_exit(std::thread thread) {
  static Threads threads;
  threads.add(std::move(thread));
}

}  // namespace lockstep
