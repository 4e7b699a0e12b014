// Preloaded into a process, it shifts the system's time by Control::clock_shift_s. Other clocks are unchanged.

#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

#include <cstdlib>

#include "attack/control.h"

namespace {

using lockstep::Control;

/// 0 until the file is mapped, which opens it: not in a constructor, which may run after the first call.
int64_t shift_s() {
  static Control* const control = [] {
    const char* path = std::getenv(lockstep::kControlVariable);
    return path ? lockstep::map_control(path) : nullptr;
  }();
  if (!control) return 0;
  ++control->clock_is_shifted;
  return control->clock_shift_s;
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* now) noexcept {
  static const auto real = next<int(clockid_t, timespec*)>("clock_gettime");
  const int result = real(clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift_s();
  return result;
}

int gettimeofday(timeval* now, void* zone) noexcept {
  static const auto real = next<int(timeval*, void*)>("gettimeofday");
  const int result = real(now, zone);
  if (result == 0) now->tv_sec += shift_s();
  return result;
}

time_t time(time_t* result) noexcept {
  static const auto real = next<time_t(time_t*)>("time");
  const time_t now = real(nullptr) + shift_s();
  if (result) *result = now;
  return now;
}

}  // extern "C"
