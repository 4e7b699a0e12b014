#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <lockstep/store.h>

namespace lockstep {

/// One rank as the others know it.
struct Peer {
  int rank = 0;
  std::string host;     // its name, for people
  std::string host_id;  // equal exactly for ranks of one host: LOCKSTEP_HOST_ID, else the kernel's boot id
  int64_t pid = 0;
};

/// What a rank is started as, and must be equal on all but for the rank.
struct Enrolment {
  int rank = 0;
  int world_size = 1;
  std::string backend;
};

/// Announces this rank in the store and waits until all of them are there; the peers in order of rank.
///
/// Collective. Throws TimeoutError naming the ranks that did not come, MismatchError when a rank came twice, is of
/// another world size or backend, or runs another version of lockstep: both sides named.
std::vector<Peer> call_roll(Store& store, const Enrolment& mine, std::chrono::milliseconds timeout);

}  // namespace lockstep
