#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/plan.h"

namespace lockstep::bench {

/// What the user wrote.
struct Request {
  std::string operation{};
  std::vector<std::string> backends{};  // empty: all that there are
  int ranks = 2;
  std::string least = "4";
  std::string most = "256M";
  int64_t factor = 2;
  std::vector<std::string> sizes{};  // in place of least, most and factor
  std::string dtype = "float32";
  std::string redop = "sum";
  std::string memory = "both";
  int rounds = 0;  // 0: not said
  bool check = true;
};

/// Pure. `available` are the backends that this build has. UsageError, naming the option, what came, what was expected.
Plan make_plan(const Request& request, const std::vector<std::string>& available);

/// How much memory all ranks together need for the largest size, at most.
int64_t memory_bytes(const Plan& plan);

}  // namespace lockstep::bench
