#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include <lockstep/reduce_op.h>

namespace lockstep::detail {

/// What a call does: all ranks of a group must do the same.
enum class Operation : uint8_t {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kBarrier,
  kNewGroup,
  kNewSubgroups,
  kNewSubgroupsByEnumeration,
  kMonitoredBarrier,
  kCapturedStep,
  kSend,
  kRecv,
};

/// As users write them, in the order of Operation.
inline constexpr std::array kOperationNames{
    "all_reduce",        "reduce",        "broadcast", "all_gather", "gather",        "scatter",
    "reduce_scatter",    "all_to_all",    "barrier",   "new_group",  "new_subgroups", "new_subgroups_by_enumeration",
    "monitored_barrier", "captured_step", "send",      "recv"};
static_assert(kOperationNames.size() == static_cast<size_t>(Operation::kRecv) + 1);

/// "all_reduce".
constexpr const char* name_of(Operation operation) {
  return kOperationNames[static_cast<size_t>(operation)];
}

/// Which way messages go that are counted together.
struct MessageRoute {
  int from = 0;
  int to = 0;
  uint32_t tag = 0;

  auto operator<=>(const MessageRoute&) const = default;
};

/// What the ranks of a group know a call by: its number among those of its kind.
struct CallId {
  int64_t number = 0;                     // from 1
  std::optional<MessageRoute> message{};  // for messages between two ranks
  std::optional<Operation> aside{};       // for calls that are no part of the order of collectives
};

/// "call 7", "message 3 from rank 0 to rank 2 with tag 0", "monitored_barrier 2".
std::string describe(const CallId& call_id);

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
