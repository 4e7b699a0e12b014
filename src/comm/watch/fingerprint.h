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

/// The kind of a call. All ranks of a group must make calls of the same kind.
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
  kSplitGroup,
  kMonitoredBarrier,
  kRecvAny,
  kCapturedStep,
  kAllocateShared,
  kReduceRanges,
  kSend,
  kRecv,
};

/// The names that users write, in the order of Operation.
inline constexpr std::array kOperationNames{"all_reduce",
                                            "reduce",
                                            "broadcast",
                                            "all_gather",
                                            "gather",
                                            "scatter",
                                            "reduce_scatter",
                                            "all_to_all",
                                            "barrier",
                                            "new_group",
                                            "new_subgroups",
                                            "new_subgroups_by_enumeration",
                                            "split_group",
                                            "monitored_barrier",
                                            "recv_any",
                                            "captured_step",
                                            "allocate_shared",
                                            "reduce_ranges",
                                            "send",
                                            "recv"};
static_assert(kOperationNames.size() == static_cast<size_t>(Operation::kRecv) + 1);

/// "all_reduce".
constexpr const char* name_of(Operation operation) {
  return kOperationNames[static_cast<size_t>(operation)];
}

/// Sender, receiver and tag. Messages of one route are numbered together.
struct MessageRoute {
  int from = 0;
  int to = 0;
  uint32_t tag = 0;

  auto operator<=>(const MessageRoute&) const = default;
};

/// Identifies a call, equally on all ranks of a group: its number among the calls of its kind.
struct CallId {
  int64_t number = 0;                     // from 1
  std::optional<MessageRoute> message{};  // for messages between two ranks
  std::optional<Operation> unordered{};   // for calls of Group::run_unordered, outside the order of collectives
};

/// "call 7", "message 3 from rank 0 to rank 2 with tag 0", "monitored_barrier 2".
std::string describe(const CallId& call_id);

/// Describes a call. The fingerprints of all ranks must match before data moves.
struct Fingerprint {
  Operation operation{};
  std::optional<c10::ScalarType> dtype{};
  std::optional<int64_t> elements{};  // where all ranks must have the same number
  std::optional<ReduceOp> reduce_op{};
  std::optional<int> root{};
  std::string detail{};             // other properties that must match: the definition of a new group
  std::vector<int64_t> sends{};     // elements to each rank, where the numbers may differ
  std::vector<int64_t> receives{};  // elements from each rank

  bool operator==(const Fingerprint&) const = default;
};

/// "all_reduce(sum, Float[1000])", "broadcast(Float[10], root 0)".
std::string describe(const Fingerprint& call);

/// A hash of the CallId and of all fields that must be equal on all ranks (not of `sends` and `receives`).
uint64_t hash(const Fingerprint& call, const CallId& call_id);

/// Names the first difference between the calls of `rank` and `other_rank` ("the dtype"); nullopt when they match.
std::optional<std::string> difference(const Fingerprint& call, int rank, const Fingerprint& other, int other_rank);

/// Serialize a fingerprint. read_fingerprint throws ProtocolError for malformed bytes.
std::string write(const Fingerprint& call);
Fingerprint read_fingerprint(const std::string& bytes);

}  // namespace lockstep::detail
