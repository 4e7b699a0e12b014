#pragma once

#include <chrono>
#include <optional>

namespace lockstep {

/// A source location of the program. If `line` is 0, `file` describes the place in other words.
struct CallSite {
  const char* file = "";
  int line = 0;

  /// As a default argument, returns the location of the call that omits the argument.
  static constexpr CallSite here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

/// Options of a single call. The last argument of every collective. Construct it in the call itself, so that `site` is
/// the location of the call.
struct CallOptions {
  /// Time limit of this call, measured from its start, which is after all earlier calls have finished. Default: the
  /// group's.
  std::optional<std::chrono::milliseconds> timeout{};
  /// Appears in errors and in the flight recorder. Filled in automatically.
  CallSite site = CallSite::here();
};

}  // namespace lockstep
