#pragma once

#include <string>

#include "bench/request.h"

namespace lockstep::bench {

/// All that stands on the command line of `lockstep bench`.
struct BenchArguments {
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
int run_collective_bench(const BenchArguments& arguments);
int run_ddp_bench(const BenchArguments& arguments);
int run_gpu_bench(const BenchArguments& arguments);

}  // namespace lockstep::bench
