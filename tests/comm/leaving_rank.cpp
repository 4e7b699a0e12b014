// A rank of blame_test.cpp: test_ranks leaving_rank WAY. All ranks make the same calls, until rank 1 leaves the others
// in that way. Nobody catches the error of the others, unless TEST_CATCHES is set.

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include <ATen/ATen.h>

#include <lockstep/lockstep.h>

#include "ranks/test_ranks.h"

namespace {

int call_until_leaving(const std::string& way) {
  auto world = lockstep::init_process_group({.timeout = std::chrono::seconds(30)});
  auto tensor = at::ones({8});
  for (int step = 0; step < 20; ++step) {
    if (world.rank() == 1 && step == 10) {
      if (way == "return") return 7;
      if (way == "exit") std::exit(0);
      if (way == "break") break;
      if (way == "skip") continue;
      if (way == "straggle") ::pause();
      if (way == "shape") tensor = at::ones({5});
      if (way == "kill") ::raise(SIGKILL);
    }
    lockstep::CallOptions options;
    if (way == "straggle" && step >= 10) options.timeout = std::chrono::milliseconds(500);
    world.all_reduce(tensor, lockstep::ReduceOp::kAvg, options);
  }
  return 0;
}

}  // namespace

int run_leaving_rank(const std::vector<std::string>& arguments) {
  if (!std::getenv("TEST_CATCHES")) return call_until_leaving(arguments.at(0));
  try {
    return call_until_leaving(arguments.at(0));
  } catch (const lockstep::PeerError& error) {
    print_line(std::string("caught: ") + error.what());
    return 9;
  }
}
