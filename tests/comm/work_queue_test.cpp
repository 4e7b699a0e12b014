#include "comm/work_queue.h"

#include <atomic>
#include <future>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

namespace lockstep::detail {
namespace {

TEST(WorkQueue, RunsTasksOneAtATimeInTheOrderTheyCame) {
  WorkQueue queue;
  std::vector<int> order;
  std::promise<void> open;
  auto gate = open.get_future().share();
  queue.submit([&, gate] { gate.wait(); });
  for (int i = 0; i < 100; ++i) queue.submit([&order, i] { order.push_back(i); });
  EXPECT_TRUE(order.empty());
  open.set_value();
  queue.run([&] { order.push_back(100); });
  ASSERT_EQ(order.size(), 101u);
  for (int i = 0; i <= 100; ++i) EXPECT_EQ(order[i], i);
}

TEST(WorkQueue, ErrorsComeOutWhereTheTaskWasGiven) {
  WorkQueue queue;
  EXPECT_THROW(queue.run([] { throw std::runtime_error("inline"); }), std::runtime_error);
  auto failed = queue.submit([] { throw std::out_of_range("queued"); });
  EXPECT_THROW(failed->wait(), std::out_of_range);
  EXPECT_THROW(failed->wait(), std::out_of_range);
  int ran = 0;
  queue.run([&] { ++ran; });
  EXPECT_EQ(ran, 1);
}

TEST(WorkQueue, IsDoneOnlyWhenTheTaskIs) {
  WorkQueue queue;
  std::promise<void> open;
  auto gate = open.get_future().share();
  auto work = queue.submit([gate] { gate.wait(); });
  EXPECT_FALSE(work->is_done());
  EXPECT_EQ(queue.pending(), 1u);
  open.set_value();
  work->wait();
  EXPECT_TRUE(work->is_done());
  EXPECT_EQ(queue.pending(), 0u);
}

TEST(WorkQueue, ManyThreadsMayUseIt) {
  WorkQueue queue;
  int count = 0;  // no atomic: the queue itself must keep tasks apart
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) i % 2 ? queue.run([&] { ++count; }) : queue.submit([&] { ++count; })->wait();
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(count, 2000);
}

TEST(WorkQueue, LetsGoOfATaskBeforeItIsDone) {
  WorkQueue queue;
  auto held = std::make_shared<int>(1);
  std::weak_ptr<int> watch = held;
  auto work = queue.submit([held = std::move(held)] {});
  work->wait();
  EXPECT_TRUE(watch.expired());
}

}  // namespace
}  // namespace lockstep::detail
