#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include <lockstep/reduce_op.h>

#include "comm/watch/call_id.h"

namespace lockstep::detail {

/// What a call is: all ranks must agree on it before data moves.
struct Fingerprint {
  Operation operation{};
  std::optional<c10::ScalarType> dtype{};
  std::optional<int64_t> elements{};  // where every rank must have as many
  std::optional<ReduceOp> reduce_op{};
  std::optional<int> root{};
  std::string detail{};             // what else must be equal: the members of a new group
  std::vector<int64_t> sends{};     // elements to each rank, where they may differ
  std::vector<int64_t> receives{};  // elements from each rank

  bool operator==(const Fingerprint&) const = default;
};

/// "all_reduce(sum, Float[1000])", "broadcast(Float[10], root 0)".
std::string describe(const Fingerprint& call);

/// A number that is, for all that ranks compare, equal exactly when the fingerprints and what they are for are.
uint64_t hash(const Fingerprint& call, const CallId& call_id);

/// How the call of `rank` and that of `other_rank` differ, in a word ("the dtype"); none when they fit together.
std::optional<std::string> difference(const Fingerprint& call, int rank, const Fingerprint& other, int other_rank);

/// As one string that travels.
std::string write(const Fingerprint& call);
Fingerprint read_fingerprint(const std::string& bytes);

}  // namespace lockstep::detail
