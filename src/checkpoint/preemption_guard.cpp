#include <lockstep/preemption_guard.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

// Signal handlers can only use globals. Ranks that are threads share them.
std::atomic<bool> signalled{false};

std::mutex handlers_mutex;
int guards = 0;                                                   // guarded by handlers_mutex
std::vector<std::pair<int, struct sigaction>> handlers_before{};  // guarded by handlers_mutex

void on_signal(int number) {
  if (number == SIGINT && signalled) {  // pressed twice: end as if there were no handler
    ::signal(number, SIG_DFL);
    ::raise(number);
  }
  signalled = true;
}

static_assert(std::atomic<bool>::is_always_lock_free, "used in a signal handler");

}  // namespace

struct PreemptionGuard::Handlers {
  explicit Handlers(const std::vector<int>& signals) {
    const std::lock_guard lock(handlers_mutex);
    if (guards++ > 0) return;  // another thread's guard has installed them
    signalled = false;
    for (int number : signals) {
      struct sigaction action {
      }, before{};
      action.sa_handler = on_signal;
      action.sa_flags = SA_RESTART;
      if (::sigaction(number, &action, &before) != 0) {
        const int reason = errno;
        restore();
        throw UsageError(text("PreemptionGuard: signal ", number, " cannot be handled: ", std::strerror(reason)));
      }
      handlers_before.emplace_back(number, before);
    }
  }
  ~Handlers() {
    const std::lock_guard lock(handlers_mutex);
    restore();
  }

  static void restore() {
    if (--guards > 0) return;  // the last guard restores the handlers
    for (const auto& [number, action] : handlers_before) ::sigaction(number, &action, nullptr);
    handlers_before.clear();
  }
};

PreemptionGuard::PreemptionGuard(ProcessGroup group, PreemptionGuardOptions options)
    : group_(std::move(group)), options_(std::move(options)) {
  if (options_.every < 1)
    throw UsageError(group_.rank(), text("PreemptionGuard: every is ", options_.every, ", expected 1 or more"));
  handlers_ = std::make_unique<Handlers>(options_.signals);
  group_.barrier();  // no rank is asked before all are listening
}

PreemptionGuard::~PreemptionGuard() = default;

bool PreemptionGuard::should_stop() {
  if (stops_ || ++calls_ % options_.every != 0) return stops_;
  const auto device = group_.supports(c10::kCPU) ? c10::Device(c10::kCPU) : group_.device();
  const auto flag = at::full({1}, signalled ? 1 : 0, at::TensorOptions(at::kInt).device(device));
  group_.all_reduce(flag, ReduceOp::kMax);
  stops_ = flag.item<int>() != 0;
  return stops_;
}

bool PreemptionGuard::was_signalled() {
  return signalled;
}

}  // namespace lockstep
