#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "rendezvous/join_request.h"

namespace lockstep::detail {

/// Constant facts about a group and this rank's place in it.
struct Membership {
  static constexpr int kNotAMember = -1;

  std::string name;  // of the group: "world", "world/1"
  int rank = 0;      // in the group; kNotAMember for a rank that is not in it
  int size = 1;
  int local_rank = 0;  // among the ranks of the group on this host
  c10::Device device{c10::kCPU};
  std::string backend_asked;  // may be "auto"
  std::string backend_name;   // the backend that was chosen
  std::chrono::milliseconds timeout{};
  std::vector<Peer> peers;    // by rank in the group; Peer::rank is the rank in the job
  std::string why_not_shm{};  // why "auto" did not choose shm although the ranks are on one host; may be empty
};

/// "rank 1 (pid 4711 on node2)"; if the rank in the job differs, "rank 1 (rank 3 of the job, pid 4711 ...)".
std::string describe_rank(const Membership& group, int rank);

/// The prefix of messages: "rank 1"; if the rank in the job differs, "rank 1 of group 'world/2' (rank 3 of the job)".
std::string describe_me(const Membership& group);

/// Converts a rank of the job to a rank of the group; kNotAMember if it is not a member.
int rank_in_group(const Membership& group, int rank_in_job);

/// The members' ranks in the job.
std::vector<int> ranks_in_job(const Membership& group);

}  // namespace lockstep::detail
