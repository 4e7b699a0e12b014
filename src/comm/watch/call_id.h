#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>

#include "comm/watch/operation.h"

namespace lockstep::detail {

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

}  // namespace lockstep::detail
