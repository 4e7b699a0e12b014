#pragma once

#include <string>
#include <vector>

#include <lockstep/backend.h>

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

namespace lockstep {

/// The factory of a backend; UsageError naming those there are when there is none of that name.
BackendFactory find_backend(const std::string& name);

}  // namespace lockstep

namespace lockstep::detail {

/// What backend "auto" stands for: the names to try, best first, for ranks on these hosts (one entry for each rank).
///
/// Shared memory on one host; on several the hierarchy of both, or Gloo alone when each has one rank. Gloo also where
/// ranks of one host turn out not to see each other's memory. UsageError, naming what to install, when there is none.
std::vector<std::string> choose_backends(const std::vector<std::string>& host_of_rank,
                                         const std::vector<std::string>& available);

}  // namespace lockstep::detail
