#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

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

}  // namespace lockstep::detail
