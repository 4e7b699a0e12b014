// Waiting for a call for a limited time, and being called back.

#include <lockstep/work.h>

#include <future>
#include <latch>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>
#include <lockstep/run_threads.h>

#include "support/log_lines.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

class Works : public testing::TestWithParam<std::string> {
 protected:
  static void on_two_ranks(const std::function<void(ProcessGroup)>& body) {
    run_threads(2, body, {.backend = GetParam(), .timeout = 60s});
  }
};

std::string message_in(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::exception& thrown) {
    return thrown.what();
  }
  return "";
}

TEST_P(Works, WaitForALimitedTimeWithoutBreakingTheGroup) {
  std::latch rank_1_may_call(1);
  on_two_ranks([&](ProcessGroup world) {
    auto reduced = at::ones({3}), received = at::zeros({2000});
    if (world.rank() == 1) {
      rank_1_may_call.wait();
      world.all_reduce(reduced);
      world.send(at::ones({2000}), 0);
      return world.barrier();
    }
    const auto reduce = world.all_reduce_async(reduced);
    const auto receive = world.recv_async(received, 1);
    EXPECT_FALSE(reduce.wait_for(0ms));
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_FALSE(reduce.wait_for(20ms));
    EXPECT_FALSE(receive.wait_for(20ms));
    EXPECT_GE(std::chrono::steady_clock::now() - begin, 40ms);
    expect_error<UsageError>([&] { (void)reduce.wait_for(-1ms); }, "-1 ms", "negative");
    rank_1_may_call.count_down();
    EXPECT_TRUE(reduce.wait_for(30s));
    EXPECT_TRUE(receive.wait_for(30s));
    EXPECT_TRUE(reduce.wait_for(0ms)) << "a second time";
    EXPECT_TRUE(at::equal(reduced, at::full({3}, 2.0)));
    EXPECT_TRUE(at::equal(received, at::ones({2000})));
    world.barrier();
  });
}

TEST_P(Works, CallBackWhenTheResultIsInPlace) {
  std::latch rank_1_may_call(1);
  on_two_ranks([&](ProcessGroup world) {
    auto reduced = at::ones({3}),
         received = at::zeros({2000}).view({1000, 2}).t();  // which is copied after its arrival
    if (world.rank() == 1) {
      rank_1_may_call.wait();
      world.all_reduce(reduced);
      world.send(at::ones({2, 1000}), 0);
      return world.barrier();
    }
    std::promise<bool> of_reduce, of_receive;
    const auto reduce = world.all_reduce_async(reduced);
    reduce.on_done([&](std::exception_ptr error) { of_reduce.set_value(!error && reduced[2].item<float>() == 2); });
    world.recv_async(received, 1).on_done([&](std::exception_ptr error) {
      of_receive.set_value(!error && received.eq(1).all().item<bool>());
    });
    rank_1_may_call.count_down();
    EXPECT_TRUE(of_reduce.get_future().get());
    EXPECT_TRUE(of_receive.get_future().get());
    reduce.wait();
    std::thread::id caller;
    reduce.on_done([&](std::exception_ptr) { caller = std::this_thread::get_id(); });
    EXPECT_EQ(caller, std::this_thread::get_id()) << "the call is complete: at once";
    world.barrier();
  });
}

TEST_P(Works, CallBackWithTheError) {
  run_threads_into_an_error(
      2,
      [](ProcessGroup world) {
        const auto of_reduce = std::make_shared<std::promise<std::string>>();
        const auto of_receive = std::make_shared<std::promise<std::string>>();
        auto tensor = at::ones({3}), received = at::ones({4});
        const auto reduce = world.all_reduce_async(tensor);
        const auto receive = world.recv_async(received, 1 - world.rank(), 5);  // which nobody sends
        reduce.synchronize();
        receive.on_done([of_receive](std::exception_ptr error) { of_receive->set_value(message_in(error)); });
        const auto barrier = world.barrier_async();
        barrier.synchronize();
        const auto pending = world.rank() == 0 ? world.all_reduce_async(tensor) : world.barrier_async();
        pending.on_done([of_reduce](std::exception_ptr error) { of_reduce->set_value(message_in(error)); });
        EXPECT_NE(of_reduce->get_future().get().find("operation"), std::string::npos);
        EXPECT_NE(of_receive->get_future().get(), "");
      },
      {.backend = GetParam(), .timeout = 60s});
}

TEST_P(Works, CallBackWhenTheTimeOfAMessageIsUp) {
  run_threads_into_an_error(
      2,
      [](ProcessGroup world) {
        const auto of_receive = std::make_shared<std::promise<std::string>>();
        auto received = at::ones({4});
        world
            .recv_async(received, 1 - world.rank(), 5, {.timeout = 50ms})  // which nobody sends
            .on_done([of_receive](std::exception_ptr error) { of_receive->set_value(message_in(error)); });
        EXPECT_NE(of_receive->get_future().get().find("within 50 ms"), std::string::npos);
      },
      {.backend = GetParam(), .timeout = 60s});
}

TEST_P(Works, CallbacksMayMakeAsynchronousCallsButNotWait) {
  std::latch rank_1_may_call(1);
  on_two_ranks([&](ProcessGroup world) {
    auto behind = at::ones({2}), tensor = at::ones({1});
    if (world.rank() == 1) {
      rank_1_may_call.wait();
      world.barrier();
      world.all_reduce(behind);
      world.all_reduce(tensor);
      return world.barrier();
    }
    std::promise<Work> from_callback;
    std::promise<std::string> of_call, of_wait;
    const auto refusal_of = [](const auto& action) -> std::string {
      try {
        action();
        return "none";
      } catch (const UsageError& error) {
        return error.what();
      }
    };
    const auto pending = world.barrier_async();
    pending.on_done([&](std::exception_ptr) {  // while the next call waits for this thread
      of_call.set_value(refusal_of([&] { world.barrier(); }));
      const auto work = world.all_reduce_async(tensor);
      of_wait.set_value(refusal_of([&] { work.wait(); }));
      from_callback.set_value(work);
    });
    const auto first = world.all_reduce_async(behind);
    rank_1_may_call.count_down();
    EXPECT_NE(of_call.get_future().get().find("a callback of Work::on_done waits"), std::string::npos);
    EXPECT_NE(of_wait.get_future().get().find("a callback of Work::on_done waits"), std::string::npos);
    from_callback.get_future().get().wait();
    first.wait();
    EXPECT_EQ(tensor.item<float>(), 2);
    world.barrier();
  });
}

TEST_P(Works, ExceptionsOfCallbacksAreLogged) {
  const LogLines log;
  on_two_ranks([](ProcessGroup world) {
    const auto work = world.barrier_async();
    work.on_done([](std::exception_ptr) { throw std::runtime_error("the disk is full"); });
    work.wait();
    world.barrier_async().wait();  // the callback runs before the next call
  });
  const auto lines = log.lines();
  ASSERT_EQ(lines.size(), 2u);
  for (const auto& line : lines)
    EXPECT_NE(line.find("a callback of Work::on_done threw an exception, which is ignored: the disk is full"),
              std::string::npos)
        << line;
}

// The callback is destroyed on the thread of the group that it destroys.
TEST_P(Works, CallbacksMayHoldTheLastHandleOfTheirGroup) {
  std::latch rank_1_may_call(1);
  on_two_ranks([&](ProcessGroup world) {
    auto group = std::make_optional(world.new_group({0, 1}));
    auto tensor = at::ones({2});
    if (world.rank() == 1) {
      rank_1_may_call.wait();
      group->all_reduce(tensor);
      return world.barrier();
    }
    std::promise<void> is_called, is_released;
    std::latch may_return(1);
    {
      const auto keeps_alive = std::shared_ptr<void>(nullptr, [&](void*) { is_released.set_value(); });
      group->all_reduce_async(tensor).on_done([&, keeps_alive, handle = *group](std::exception_ptr) {
        is_called.set_value();
        may_return.wait();
      });
    }
    rank_1_may_call.count_down();
    is_called.get_future().get();
    group.reset();
    may_return.count_down();
    is_released.get_future().get();
    EXPECT_TRUE(at::equal(tensor, at::full({2}, 2.0)));
    world.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(On, Works, testing::ValuesIn(backends_under_test()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace lockstep
