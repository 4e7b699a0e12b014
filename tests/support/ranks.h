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

/// The backends of this build that can join ranks: as threads of this process, or as processes where that is what they
/// are. MPI knows no ranks but processes.
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

/// These; where ranks are processes, as many as were started.
inline std::vector<int> world_sizes(std::vector<int> sizes) {
  if (ranks_are_processes()) sizes = {lockstep::Environment::detect().world_size};
  return sizes;
}

/// Runs `body` on every rank of a group of `size`: as threads of this process, or, when ranks are processes, as
/// this one's rank.
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

/// Runs a body that expects an error which leaves the group unusable, on `size` ranks. No rank leaves before all have
/// seen theirs: the first to leave would end the calls of those still on their way.
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
