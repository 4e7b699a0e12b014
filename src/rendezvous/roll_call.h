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

/// One rank as the others know it.
struct Peer {
  int rank = 0;
  ProcessId process{};
  std::string build_id{};  // of its program; empty when it has none
};

/// "rank 3 (pid 4711 on node2)".
std::string describe(const Peer& peer);

/// What a rank is started as, and must be equal on all but for the rank.
struct Enrolment {
  int rank = 0;
  int world_size = 1;
  std::string backend{};
  std::string job{};     // see job_name(); empty on any side: not compared
  int generation = 0;    // see restart_count()
  int joins_before = 0;  // see count_join(); of equal ones a roll is called
};

/// Counts a join of this process at this store, as this rank: how many it has made there before. Ranks that leave and
/// join again at a store that outlives their group agree on it, as long as all do so equally often.
int count_join(Store& store, int rank);

/// Sets the key if it has no value, and returns the value it has then.
using Claim = std::function<std::string(const std::string& key, const std::string& value)>;

/// Ranks did not come to a roll call.
class MissingRanksError : public TimeoutError {
 public:
  MissingRanksError(const std::string& message, std::vector<int> ranks)
      : TimeoutError(message), ranks_(std::move(ranks)) {}
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  std::vector<int> ranks_;
};

/// Announces this rank in the store and waits until all of them are there; the peers in order of rank.
///
/// Collective. `claim` takes the rank's place in the store, for stores that can do more than compare_set. Throws
/// MissingRanksError naming the ranks that did not come; MismatchError, both sides named, when a rank came twice, is of
/// another job, start, world size or backend, or runs another version of lockstep. Programs that differ are worth a
/// warning.
std::vector<Peer> call_roll(Store& store, const Enrolment& mine, std::chrono::milliseconds timeout, Claim claim = {});

}  // namespace lockstep
