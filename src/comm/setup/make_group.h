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
  std::vector<int> ranks_in_job;  // in the order of group ranks
  std::string backend;            // for parse_backends
  c10::Device device{c10::kCPU};
  std::chrono::milliseconds timeout{};
};

/// Creates a group for tensors on its device and, if there is a backend for the CPU too, for tensors on the CPU.
/// Collective over the members. Other ranks of the job get a group whose calls throw UsageError; they need not call
/// this.
std::shared_ptr<Group> make_group(const std::shared_ptr<Job>& job, const GroupSpec& spec);

/// Creates the side group of a group (Group::side_group), unless there is one. Collective over the members. Errors name
/// `site`, the call of the user that needs the side group.
void make_side_group(Group& group, const CallSite& site);

}  // namespace lockstep::detail
