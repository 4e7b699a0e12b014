#include "base/start_thread.h"

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

constexpr auto kLongestWaitAtExit = std::chrono::seconds(2);

struct Background {
  std::mutex mutex;
  std::condition_variable changed;
  int running = 0;  // guarded by mutex

  void count(int more) {
    std::lock_guard lock(mutex);
    running += more;
    changed.notify_all();
  }
};

struct WaitAtExit {
  ~WaitAtExit() {
    std::unique_lock lock(background->mutex);
    background->changed.wait_for(lock, kLongestWaitAtExit, [&] { return background->running == 0; });
  }
  const std::shared_ptr<Background> background = std::make_shared<Background>();  // threads may outlive this
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

void run_in_background(const char* purpose, std::function<void()> body) {
  static const WaitAtExit exit;
  const auto background = exit.background;
  background->count(1);
  try {
    start_thread(purpose, [background, body = std::move(body)]() mutable {
      std::exchange(body, nullptr)();  // what it holds goes before it counts as done
      background->count(-1);
    }).detach();
  } catch (const Error&) {
    background->count(-1);
    throw;
  }
}

}  // namespace lockstep
