#pragma once

#include <string>
#include <vector>

#include <lockstep/backend.h>

namespace lockstep::detail {

/// The backend for each device type; empty for a device type without a backend.
struct BackendNames {
  std::string cpu{};   // may be "auto"
  std::string cuda{};  // may be "auto"
};

/// Parses the backend option: "auto", the name of one backend, or "cpu:NAME,cuda:NAME". Throws UsageError when a name
/// is not a backend of this build, or a backend does not support its device.
BackendNames parse_backends(const std::string& asked);

/// Returns the factory of a backend. Throws UsageError, listing the available backends, when the name is unknown.
BackendFactory find_backend(const std::string& name);

/// Resolves backend "auto" for CPU tensors: returns the backends to try, best first. `host_of_rank` has one entry per
/// rank.
///
/// On one host: shm, then gloo. On several hosts: hierarchical, then gloo; only gloo if each host has one rank. The
/// fallback to gloo is for ranks of one host that cannot map each other's memory. Throws UsageError, naming the package
/// to install, when no suitable backend is available.
std::vector<std::string> choose_backends(const std::vector<std::string>& host_of_rank,
                                         const std::vector<std::string>& available);

}  // namespace lockstep::detail
