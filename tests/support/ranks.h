#pragma once

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/environment.h>
#include <lockstep/run_threads.h>

/// The backends of this build that can join ranks.
inline std::vector<std::string> backends_under_test() {
#ifdef LOCKSTEP_HAVE_GLOO
  return {"threads", "shm", "gloo"};
#else
  return {"threads", "shm"};
#endif
}

/// Runs `body` on every rank of a group of `size`: as threads of this process, or, when this is one of several test
/// processes started together (LOCKSTEP_TEST_PROCESSES), as this process's rank.
inline void on_every_rank(const std::string& backend, int size,
                          const std::function<void(lockstep::ProcessGroup)>& body) {
  if (!std::getenv("LOCKSTEP_TEST_PROCESSES")) {
    lockstep::run_threads(size, body, {.backend = backend, .timeout = std::chrono::minutes(2)});
    return;
  }
  static lockstep::ProcessGroup world = lockstep::init_process_group({.backend = backend});
  ASSERT_EQ(world.size(), size) << "started with another number of processes than the filter selects";
  world.barrier();
  body(world);
}
