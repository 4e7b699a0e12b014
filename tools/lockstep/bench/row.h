#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/messages.h"
#include "bench/plan.h"

namespace lockstep::bench {

/// What no implementation could be faster than on this machine.
struct Floor {
  double round_trip_us = 0;  // of a flag between two ranks
  double stream_us = 0;      // for all ranks to read and write a message's bytes, each its own
  int64_t bytes = 0;         // of that message
};

/// The larger of two times: for the bytes that must move through memory, and for one flag to reach another rank. None
/// for one rank alone, which moves nothing.
std::optional<double> floor_us(Operation operation, int ranks, const Floor& floor);

/// One line of the table: a backend with messages of one size in one kind of memory.
struct Row {
  Operation operation = Operation::kAllReduce;
  std::string backend{};
  std::string memory{};
  int ranks = 2;
  int64_t bytes = 0;
  int64_t count = 0;
  std::string dtype{};
  std::string redop{};
  double time_us = 0;  // the median
  double p10_us = 0;
  double p90_us = 0;
  double algbw_gbps = 0;
  double busbw_gbps = 0;
  std::optional<int64_t> wrong{};
  std::optional<double> floor_us{};
  std::optional<double> floor_fraction{};  // the floor's time as a part of this one
  size_t rounds = 0;
  int calls = 1;
};

Row make_row(const Plan& plan, const Samples& samples, const Floor& floor);

/// One object without a line end.
std::string to_json_line(const Row& row);

}  // namespace lockstep::bench
