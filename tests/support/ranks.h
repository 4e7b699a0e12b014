#pragma once

#include <atomic>
#include <cstdlib>
#include <functional>
#include <latch>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/environment.h>
#include <lockstep/error.h>
#include <lockstep/run_threads.h>

/// Whether this is one of several test processes that were started together.
inline bool ranks_are_processes() {
  return std::getenv("LOCKSTEP_TEST_PROCESSES") != nullptr;
}

/// Returns the backends of this build that can connect the test's ranks, which are threads or processes. With MPI,
/// ranks are always processes.
inline std::vector<std::string> backends_under_test() {
  std::vector<std::string> backends{"threads", "shm"};
#ifdef LOCKSTEP_HAVE_GLOO
  backends.push_back("gloo");
#endif
#ifdef LOCKSTEP_HAVE_MPI
  if (ranks_are_processes()) backends.push_back("mpi");
#endif
  return backends;
}

/// Returns `sizes`, or only the number of started processes if ranks are processes.
inline std::vector<int> world_sizes(std::vector<int> sizes) {
  if (ranks_are_processes()) sizes = {lockstep::Environment::detect().world_size};
  return sizes;
}

/// Runs `body` on every rank of a group of `size`: on threads of this process or, if ranks are processes, for this
/// process's rank.
inline void on_every_rank(const std::string& backend, int size, const std::function<void(lockstep::ProcessGroup)>& body,
                          c10::Device device = c10::kCPU) {
  if (!ranks_are_processes()) {
    lockstep::run_threads(size, body, {.backend = backend, .timeout = std::chrono::minutes(2)});
    return;
  }
  static lockstep::ProcessGroup world = lockstep::init_process_group({.backend = backend, .device = device});
  ASSERT_EQ(world.size(), size) << "started with another number of processes than the filter selects";
  world.barrier();
  body(world);
}

/// Runs, on `size` ranks, a body that expects an error that makes the group unusable. No rank leaves before all have
/// seen their error: the first rank to leave would abort the calls that are still running on other ranks.
inline void run_threads_into_an_error(int size, const std::function<void(lockstep::ProcessGroup)>& body,
                                      const lockstep::RunThreadsOptions& options = {}) {
  std::atomic<int> got_there{0};
  std::latch all_are_done(size);
  auto rank_main = [&](lockstep::ProcessGroup world) {
    try {
      body(world);
    } catch (...) {
      all_are_done.count_down();
      throw;
    }
    ++got_there;
    all_are_done.arrive_and_wait();
    throw lockstep::Error("as expected");
  };
  EXPECT_THROW(lockstep::run_threads(size, rank_main, options), lockstep::Error);
  EXPECT_EQ(got_there, size);
}
