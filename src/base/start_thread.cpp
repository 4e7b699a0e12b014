#include "base/start_thread.h"

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>

#include <lockstep/error.h>

#include "base/owner_process.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr auto kMaxWaitAtExit = std::chrono::seconds(2);

struct Background {
  std::mutex mutex;
  std::condition_variable changed;
  int running = 0;       // guarded by mutex
  bool is_over = false;  // guarded by mutex

  /// Counts one more thread. Returns false after the wait at exit.
  bool begin() {
    std::lock_guard lock(mutex);
    if (!is_over) ++running;
    return !is_over;
  }
  void end() {
    std::lock_guard lock(mutex);
    --running;
    changed.notify_all();
  }
};

struct WaitAtExit {
  ~WaitAtExit() {
    if (!owner.is_this()) return;  // a forked child has none of these threads
    std::unique_lock lock(background->mutex);
    background->changed.wait_for(lock, kMaxWaitAtExit, [&] { return background->running == 0; });
    background->is_over = true;
  }
  const std::shared_ptr<Background> background = std::make_shared<Background>();  // threads may outlive this
  const OwnerProcess owner{};
};

const std::shared_ptr<Background>& background() {
  static const auto& result = *new std::shared_ptr<Background>([] {  // never destroyed: may be used during process exit
    static const WaitAtExit exit;
    return exit.background;
  }());
  return result;
}

}  // namespace

std::thread start_thread(const char* purpose, std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw SystemError(text("cannot start a thread for ", purpose, ": ", error.code().message(),
                           ". Raise the limit of processes (ulimit -u, or the container's pids limit)"));
  }
}

void prepare_background() {
  background();
}

void run_in_background(const char* purpose, std::function<void()> body) {
  const auto& here = background();
  if (!here->begin()) return;
  try {
    start_thread(purpose, [here, body = std::move(body)]() mutable {
      std::exchange(body, nullptr)();  // destroys its captures before it counts as done
      here->end();
    }).detach();
  } catch (const Error&) {
    here->end();
    throw;
  }
}

}  // namespace lockstep
