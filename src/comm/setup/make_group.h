#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "comm/group/group.h"
#include "comm/watch/job.h"

namespace lockstep::detail {

struct GroupSpec {
  std::string name;
  std::vector<int> ranks_in_job;  // in order
  std::string backend;            // for parse_backends
  c10::Device device{c10::kCPU};
  std::chrono::milliseconds timeout{};
};

/// Makes this rank's end of a group, for tensors on its device and, where the backends do both, on the CPU. Collective
/// over the members; the other ranks of the job get an end that they cannot call, and need not.
std::shared_ptr<Group> make_group(const std::shared_ptr<Job>& job, const GroupSpec& spec);

}  // namespace lockstep::detail
