#pragma once

#include <chrono>
#include <optional>

namespace lockstep {

/// Where in the program a call stands.
struct CallSite {
  const char* file = "";
  int line = 0;

  /// As a default argument: the place of the call that leaves it out.
  static constexpr CallSite here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

/// What may be said about a single call. The last argument of every collective: write it there, so that the site is the
/// call's.
struct CallOptions {
  /// How long this call may take; the group's time-out when not given.
  std::optional<std::chrono::milliseconds> timeout{};
  /// Named in errors and in the flight recorder; filled in by itself.
  CallSite site = CallSite::here();
};

}  // namespace lockstep
