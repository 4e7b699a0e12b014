#pragma once

#include <string>

namespace lockstep::detail {

/// Which backend moves the tensors of which device; empty for a device that has none.
struct BackendNames {
  std::string cpu{};   // may be "auto"
  std::string cuda{};  // may be "auto"
};

/// What a user asks for: "auto", the name of one backend, or "cpu:NAME,cuda:NAME". UsageError when a name is not that
/// of a backend of this build, or the devices make no sense.
BackendNames parse_backends(const std::string& asked);

}  // namespace lockstep::detail
