#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/error.h>
#include <lockstep/store.h>

#include "rendezvous/process_id.h"

namespace lockstep {

/// Identifies a rank to the other ranks.
struct Peer {
  int rank = 0;
  ProcessId process{};
  std::string build_id{};  // GNU build id of its program; may be empty
};

/// "rank 3 (pid 4711 on node2)".
std::string describe(const Peer& peer);

/// The parameters that a rank was started with. All except `rank` must be the same on all ranks.
struct JoinRequest {
  int rank = 0;
  int world_size = 1;
  std::string backend{};
  std::string job{};     // see job_name(); not compared if empty on either side
  int generation = 0;    // see restart_count()
  int joins_before = 0;  // see count_join(); requests with different values do not meet
};

/// Counts the joins of this process as this rank at this store. Returns the number of earlier joins. Ranks that leave
/// and join again at a store that outlives their group get equal numbers if all of them join the same number of times.
int count_join(Store& store, int rank);

/// Sets the key if it has no value, and returns the resulting value.
using Claim = std::function<std::string(const std::string& key, const std::string& value)>;

/// Announces this rank in the store and blocks until all ranks have done so. Returns the peers in order of rank.
///
/// Collective. `claim` sets the rank's key; the default uses compare_set. Throws TimeoutError, naming the ranks
/// that did not join, and MismatchError, naming both sides, if a rank joined twice or if two ranks differ in job,
/// restart count, world size, backend or lockstep version. Logs a warning if programs have different build ids.
std::vector<Peer> wait_for_all_ranks(Store& store, const JoinRequest& request, std::chrono::milliseconds timeout,
                                     Claim claim = {});

}  // namespace lockstep
