#pragma once

#include <string>

#include "bench/request.h"

namespace lockstep::bench {

/// All that stands on the command line of `lockstep bench`.
struct Arguments {
  Request request{};
  int threads = 1;
  bool no_bind = false;
  bool json = false;
  std::string plot_file{};
};

/// Ended in time, but some results were not what they should be.
inline constexpr int kWrongResults = 1;

/// Each carries out what the arguments ask for, prints it and returns lockstep's exit code. UsageError when nothing was
/// started.
int measure_collective(const Arguments& arguments);
int measure_ddp(const Arguments& arguments);
int measure_gpu(const Arguments& arguments);

}  // namespace lockstep::bench
