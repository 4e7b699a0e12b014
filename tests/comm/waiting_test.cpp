// A rank that waits for long prints for whom it waits, where those ranks are and what they do.

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <lockstep/backend.h>
#include <lockstep/error.h>
#include <lockstep/process_group.h>
#include <lockstep/run_threads.h>

#include "comm/setup/backend_choice.h"
#include "support/eventually.h"
#include "support/log_lines.h"
#include "support/messages.h"
#include "support/rank_process.h"

namespace lockstep {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

/// The first line that contains both, as soon as there is one. A line is due after 10 s.
std::string await_line(const LogLines& log, const std::string& part, const std::string& other) {
  std::string found = "no such line";
  eventually(
      [&] {
        for (const auto& line : log.lines())
          if (line.find(part) != std::string::npos && line.find(other) != std::string::npos) found = line;
        return found != "no such line";
      },
      std::chrono::seconds(40));
  return found;
}

std::ptrdiff_t count_lines(const LogLines& log, const std::string& part) {
  const auto lines = log.lines();
  return std::count_if(lines.begin(), lines.end(),
                       [&](const auto& line) { return line.find(part) != std::string::npos; });
}

/// Three ranks of which rank 1 comes to `call` only when another has printed a line with `part`. Returns that line.
std::string wait_of(const LogLines& log, const std::string& part, const std::function<void(ProcessGroup)>& call) {
  std::string line;
  run_threads(3, [&](ProcessGroup world) {
    world.barrier();
    if (world.rank() == 1) line = await_line(log, part, "has waited for 1");
    call(world);
  });
  return line;
}

/// Rank 2 of 3 joins only when another has printed that it is missing.
void join_late(const LogLines& log) {
  const auto place = "tcp://127.0.0.1:" + std::to_string(free_port());
  auto join = [&](int rank) {
    return init_process_group({.backend = "shm", .init_method = place, .rank = rank, .world_size = 3});
  };
  std::thread first([&] { join(0); });
  std::thread second([&] { join(1); });
  EXPECT_THAT(await_line(log, "to join", "has waited for 1"),
              AllOf(HasSubstr("rank 0: has waited"), HasSubstr("for rank 2 to join"), HasSubstr("2 of 3 ranks"),
                    HasSubstr("Check that they were started")));
  join(2);
  first.join();
  second.join();
}

/// Rank 0, which hosts the store, does not come.
void join_without_store(const LogLines& log) {
  const auto place = "127.0.0.1:" + std::to_string(free_port());
  std::thread alone([&] {
    expect_error<TimeoutError>(
        [&] {
          init_process_group({.backend = "shm",
                              .init_method = "tcp://" + place,
                              .rank = 1,
                              .world_size = 2,
                              .timeout = std::chrono::seconds(12)});
        },
        place);
  });
  EXPECT_THAT(await_line(log, "listen at " + place, "has waited for 1"), HasSubstr("rank 0 or the launcher"));
  alone.join();
}

// All of them at once: each takes 10 s.
TEST(Waiting, TheLowestRankThatWaitsPrintsWhomFor) {
  LogLines log;
  std::vector<std::thread> jobs;
  const auto is_outside = AllOf(HasSubstr("Late: rank 1 ("), HasSubstr("outside of any call"), HasSubstr("barrier()"));
  jobs.emplace_back([&] {
    const auto line = wait_of(log, "all_reduce(", [](ProcessGroup world) { world.all_reduce(at::ones({4})); });
    EXPECT_THAT(line, AllOf(HasSubstr("rank 0: all_reduce"), HasSubstr("waiting_test.cpp"), is_outside));
  });
  jobs.emplace_back([&] {
    const auto line = wait_of(log, "reduce_scatter(", [](ProcessGroup world) {
      world.reduce_scatter_async(at::ones({4}), at::ones({12})).wait();
    });
    EXPECT_THAT(line, AllOf(HasSubstr("rank 0: reduce_scatter"), is_outside));
  });
  jobs.emplace_back([&] {
    const auto line = wait_of(log, ": recv(", [](ProcessGroup world) {
      auto message = at::ones({4});
      if (world.rank() == 1) world.send(message, 2);
      if (world.rank() == 2) world.recv(message, 1);
      world.barrier();  // rank 0 hosts the store
    });
    EXPECT_THAT(line, AllOf(HasSubstr("rank 2: recv"), is_outside, Not(HasSubstr("rank 0 ("))));
  });
  jobs.emplace_back([&] {
    const auto line = wait_of(log, "monitored_barrier(", [](ProcessGroup world) { world.monitored_barrier(); });
    EXPECT_THAT(line, AllOf(HasSubstr("rank 0: monitored_barrier"), is_outside));
  });
  jobs.emplace_back([&] {
    const auto line = wait_of(log, "new_group(", [](ProcessGroup world) { world.new_group({0, 1, 2}); });
    EXPECT_THAT(line, AllOf(HasSubstr("rank 0: new_group("), is_outside));
  });
  jobs.emplace_back([&] {
    register_backend("slow", [&](const BackendContext& context) {
      if (context.rank == 1) {
        EXPECT_THAT(await_line(log, "by backend slow", "has waited for 1"),
                    AllOf(HasSubstr("rank 0: has waited"), HasSubstr("the 3 ranks"), HasSubstr("LOCKSTEP_INTERFACE")));
      }
      return detail::find_backend("threads")(context);
    });
    run_threads(3, [](ProcessGroup world) { world.barrier(); }, {.backend = "slow"});
  });
  jobs.emplace_back([&] { join_late(log); });
  jobs.emplace_back([&] { join_without_store(log); });
  for (auto& job : jobs) job.join();
  for (const char* call :
       {": all_reduce(", ": reduce_scatter(", ": recv(", ": monitored_barrier(", ": new_group(", "by backend slow"})
    EXPECT_EQ(count_lines(log, call), 1) << call << ": one rank prints, once in these seconds";
}

}  // namespace
}  // namespace lockstep
