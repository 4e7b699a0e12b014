#pragma once

#include <string>

#include "bench/request.h"

namespace lockstep::bench {

/// The command line of `lockstep bench`.
struct BenchArguments {
  Request request{};
  int threads = 0;  // 0: not given
  bool no_bind = false;
  bool json = false;
  std::string plot_file{};
};

/// Exit code: the benchmark finished, but some results are wrong.
inline constexpr int kWrongResults = 1;

/// Each function runs a benchmark, prints the results and returns the exit code of lockstep. Throws UsageError before
/// anything is started.
int run_collective_bench(const BenchArguments& arguments);
int run_ddp_bench(const BenchArguments& arguments);
int run_gpu_bench(const BenchArguments& arguments);
int run_checkpoint_bench(const BenchArguments& arguments);

}  // namespace lockstep::bench
