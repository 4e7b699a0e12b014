#include "comm/group/membership.h"

#include "base/text.h"

namespace lockstep::detail {

std::string describe_rank(const Membership& group, int rank) {
  const Peer& peer = group.peers.at(rank);
  if (peer.rank == rank) return describe(peer);
  return text("rank ", rank, " (rank ", peer.rank, " of the job, ", describe(peer.process), ")");
}

std::string describe_me(const Membership& group) {
  if (group.rank == Membership::kNotAMember || group.peers.empty() || group.peers[group.rank].rank == group.rank)
    return text("rank ", group.rank);
  return text("rank ", group.rank, " of group '", group.name, "' (rank ", group.peers[group.rank].rank, " of the job)");
}

int rank_in_group(const Membership& group, int rank_in_job) {
  for (size_t r = 0; r < group.peers.size(); ++r)
    if (group.peers[r].rank == rank_in_job) return static_cast<int>(r);
  return Membership::kNotAMember;
}

std::vector<int> ranks_in_job(const Membership& group) {
  std::vector<int> ranks;
  for (const auto& peer : group.peers) ranks.push_back(peer.rank);
  return ranks;
}

}  // namespace lockstep::detail
