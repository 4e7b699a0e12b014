#include "comm/group/work_queue.h"

#include <atomic>
#include <future>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

namespace lockstep::detail {
namespace {

/// A task that lets go of the mutex at once.
template <class Body>
auto unlocked(Body body) {
  return [body = std::move(body)](WorkQueue::Lock& lock) {
    lock.unlock();
    body();
  };
}

TEST(WorkQueue, GivesATaskTheMutexUntilItLetsGo) {
  std::mutex mutex;
  WorkQueue queue(mutex);
  int count = 0;  // guarded by mutex
  auto task = [&](WorkQueue::Lock& lock) {
    EXPECT_TRUE(lock.owns_lock() && lock.mutex() == &mutex);
    ++count;
    lock.unlock();
    std::lock_guard anybody_can_have_it(mutex);
  };
  auto task_that_ends_with_it = [&](WorkQueue::Lock&) { ++count; };
  for (int i = 0; i < 4; ++i) i % 2 ? queue.run(task) : queue.submit(task)->wait();
  queue.run(task_that_ends_with_it);
  queue.submit(task_that_ends_with_it)->wait();
  std::lock_guard lock(mutex);
  EXPECT_EQ(count, 6);
}

TEST(WorkQueue, RunsTasksOneAtATimeInTheOrderTheyCame) {
  std::mutex mutex;
  WorkQueue queue(mutex);
  std::vector<int> order;
  std::promise<void> open;
  auto gate = open.get_future().share();
  queue.submit(unlocked([&, gate] { gate.wait(); }));
  for (int i = 0; i < 100; ++i) queue.submit(unlocked([&order, i] { order.push_back(i); }));
  EXPECT_TRUE(order.empty());
  open.set_value();
  queue.run(unlocked([&] { order.push_back(100); }));
  ASSERT_EQ(order.size(), 101u);
  for (int i = 0; i <= 100; ++i) EXPECT_EQ(order[i], i);
}

TEST(WorkQueue, ErrorsComeOutWhereTheTaskWasGiven) {
  std::mutex mutex;
  WorkQueue queue(mutex);
  EXPECT_THROW(queue.run(unlocked([] { throw std::runtime_error("inline"); })), std::runtime_error);
  auto failed = queue.submit(unlocked([] { throw std::out_of_range("queued"); }));
  EXPECT_THROW(failed->wait(), std::out_of_range);
  EXPECT_THROW(failed->wait(), std::out_of_range);
  int ran = 0;
  queue.run(unlocked([&] { ++ran; }));
  EXPECT_EQ(ran, 1);
}

TEST(WorkQueue, IsDoneOnlyWhenTheTaskIs) {
  std::mutex mutex;
  WorkQueue queue(mutex);
  std::promise<void> open;
  auto gate = open.get_future().share();
  auto work = queue.submit(unlocked([gate] { gate.wait(); }));
  EXPECT_FALSE(work->is_done());
  EXPECT_EQ(queue.pending(), 1u);
  open.set_value();
  work->wait();
  EXPECT_TRUE(work->is_done());
  EXPECT_EQ(queue.pending(), 0u);
}

TEST(WorkQueue, ManyThreadsMayUseIt) {
  std::mutex mutex;
  WorkQueue queue(mutex);
  int count = 0;  // no atomic: the queue itself must keep tasks apart
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i)
        i % 2 ? queue.run(unlocked([&] { ++count; })) : queue.submit(unlocked([&] { ++count; }))->wait();
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(count, 2000);
}

TEST(WorkQueue, LetsGoOfATaskBeforeItIsDone) {
  std::mutex mutex;
  WorkQueue queue(mutex);
  auto held = std::make_shared<int>(1);
  std::weak_ptr<int> watch = held;
  auto work = queue.submit(unlocked([held = std::move(held)] {}));
  work->wait();
  EXPECT_TRUE(watch.expired());
}

}  // namespace
}  // namespace lockstep::detail
