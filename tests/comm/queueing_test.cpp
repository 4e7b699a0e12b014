// Backends whose calls return while a device still works on them. The device here is a thread for each rank, which
// makes the calls of the threads backend when its turn comes; one that fails there hangs, as a GPU's does.

#include <atomic>
#include <condition_variable>
#include <deque>
#include <latch>
#include <mutex>
#include <thread>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <lockstep/backend.h>
#include <lockstep/error.h>
#include <lockstep/run_threads.h>

#include "comm/setup/backend_choice.h"
#include "support/eventually.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

/// Does one thing after the other, on a thread of its own. While held, it begins nothing.
class Device {
 public:
  Device() : thread_([this] { work(); }) {}
  ~Device() {
    {
      std::lock_guard lock(mutex_);
      is_over_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  int64_t put(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
    return ++put_;
  }
  int64_t put_so_far() {
    std::lock_guard lock(mutex_);
    return put_;
  }
  bool has_done(int64_t number) {
    std::lock_guard lock(mutex_);
    return done_ >= number || is_ended_;
  }
  void wait_for(int64_t number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= number || is_ended_; });
  }
  void hold(bool is_held) {
    std::lock_guard lock(mutex_);
    is_held_ = is_held;
    changed_.notify_all();
  }
  /// Whatever it does is over, and whoever waits for it goes on.
  void end() {
    std::lock_guard lock(mutex_);
    is_ended_ = true;
    changed_.notify_all();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return is_over_ || (!tasks_.empty() && !is_held_ && !is_ended_); });
      if (is_over_) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      bool is_done = true;
      try {
        task();
      } catch (const std::exception&) {
        is_done = false;
      }
      task = nullptr;
      lock.lock();
      if (is_done)
        ++done_;
      else
        changed_.wait(lock, [&] { return is_over_ || is_ended_; });
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;                    // guarded by mutex_
  int64_t put_ = 0, done_ = 0;                                 // guarded by mutex_
  bool is_held_ = false, is_ended_ = false, is_over_ = false;  // guarded by mutex_
  std::thread thread_;
};

/// What the ranks of a test have done with their devices.
struct Devices {
  std::atomic<Device*> of[4] = {};
  std::atomic<int> ordered{0};
  std::atomic<bool> capture{false};  // calls are written down, and not made
};

class QueueingBackend final : public Backend {
 public:
  QueueingBackend(Devices& devices, const BackendContext& context)
      : devices_(devices), ranks_(detail::find_backend("threads")(context)) {
    devices_.of[context.rank] = &device_;
  }

  bool is_queueing() const override { return true; }
  std::shared_ptr<QueuedCall> queue(const std::function<void()>& call, Stream) override {
    if (devices_.capture) return std::make_shared<Captured>();
    call();
    return std::make_shared<Queued>(*this, device_.put_so_far());
  }

  at::Tensor allocate(int64_t bytes) override { return ranks_->allocate(bytes); }
  void abort(std::exception_ptr cause) noexcept override {
    ranks_->abort(cause);
    device_.end();
  }
  void all_reduce(const at::Tensor& data, ReduceOp op, const CallInfo& call) override {
    device_.put([this, data, op, call] {
      auto patient = call;
      patient.deadline = Deadline::max();  // no device knows how long a rank is ready to wait
      ranks_->all_reduce(data, op, patient);
    });
  }
  void reduce(const at::Tensor&, ReduceOp, int, const CallInfo&) override {}
  void broadcast(const at::Tensor&, int, const CallInfo&) override {}
  void all_gather(const at::Tensor&, const at::Tensor&, const CallInfo&) override {}
  void reduce_scatter(const at::Tensor&, const at::Tensor&, ReduceOp, const CallInfo&) override {}
  void all_to_all_v(const std::vector<at::Tensor>&, const std::vector<at::Tensor>&, const CallInfo&) override {}
  void barrier(const CallInfo& call) override { ranks_->barrier(call); }
  std::unique_ptr<Transfer> start_send(const at::Tensor&, int, uint32_t, uint64_t) override { return nullptr; }
  std::unique_ptr<Transfer> start_recv(const at::Tensor&, int, uint32_t, uint64_t) override { return nullptr; }

 private:
  struct Captured final : QueuedCall {
    void order_current_stream() override {}
    void synchronize() override { throw UsageError("it is captured"); }
    bool is_done() override { return true; }
  };
  struct Queued final : QueuedCall {
    Queued(QueueingBackend& backend, int64_t number) : backend(backend), number(number) {}
    void order_current_stream() override { ++backend.devices_.ordered; }
    void synchronize() override { backend.device_.wait_for(number); }
    bool is_done() override { return backend.device_.has_done(number); }
    QueueingBackend& backend;
    const int64_t number;
  };

  Devices& devices_;
  const std::unique_ptr<Backend> ranks_;
  Device device_;
};

/// A backend over these devices, under a name of its own, so that tests do not share them.
RunThreadsOptions on(Devices& devices) {
  static std::atomic<int> count{0};
  RunThreadsOptions options{.backend = "queueing_" + std::to_string(++count)};
  register_backend(options.backend,
                   [&](const BackendContext& context) { return std::make_unique<QueueingBackend>(devices, context); });
  return options;
}

TEST(Queueing, ACallReturnsBeforeItsDeviceIsDone) {
  Devices devices;
  run_threads(
      2,
      [&](ProcessGroup world) {
        Device& device = *devices.of[world.rank()];
        device.hold(true);
        auto tensor = at::ones({4});
        auto work = world.all_reduce_async(tensor);
        work.wait();
        EXPECT_FALSE(work.is_done());
        device.hold(false);
        work.synchronize();
        EXPECT_TRUE(work.is_done());
        EXPECT_TRUE(at::equal(tensor, at::full({4}, 2.0f)));

        world.all_reduce(tensor);
        world.synchronize();
        EXPECT_TRUE(at::equal(tensor, at::full({4}, 4.0f)));
      },
      on(devices));
  EXPECT_GE(devices.ordered, 4) << "twice on each rank";
}

TEST(Queueing, AnAsynchronousCallKeepsItsTensorsUntilTheyAreFree) {
  Devices devices;
  run_threads(
      1,
      [&](ProcessGroup world) {
        Device& device = *devices.of[0];
        device.hold(true);
        auto tensor = at::ones({4});
        auto work = world.all_reduce_async(tensor);
        EXPECT_GT(tensor.use_count(), 2) << "the device has one, and the group another";
        const auto with_group = tensor.use_count();
        work.wait();
        EXPECT_LT(tensor.use_count(), with_group) << "whatever uses the memory next comes after the call";
        device.hold(false);
      },
      on(devices));
}

TEST(Queueing, ACapturedCallKeepsItsTensorsAndHoldsUpNobody) {
  Devices devices;
  run_threads(
      1,
      [&](ProcessGroup world) {
        Device& device = *devices.of[0];
        auto made = at::ones({4}), captured = at::ones({4});
        device.hold(true);
        auto before = world.all_reduce_async(made);
        devices.capture = true;
        auto work = world.all_reduce_async(captured);
        EXPECT_TRUE(work.is_done());
        EXPECT_GT(captured.use_count(), 1);
        expect_error<UsageError>([&] { work.synchronize(); }, "it is captured");
        work.wait();
        EXPECT_TRUE(eventually([&] { return captured.use_count() == 1; })) << captured.use_count();
        device.hold(false);
        world.synchronize();
        EXPECT_TRUE(before.is_done());
        world.all_reduce_async(captured).wait();  // the last before the group goes
      },
      on(devices));
}

TEST(Queueing, ManyCallsLeaveNothingBehind) {
  Devices devices;
  run_threads(
      2,
      [&](ProcessGroup world) {
        auto tensor = at::ones({1});
        for (int i = 0; i < 200; ++i) {
          auto work = world.all_reduce_async(tensor, ReduceOp::kMax);
          if (i % 20 == 19) world.synchronize();
        }
        world.synchronize();
        world.all_reduce_async(tensor, ReduceOp::kMax).synchronize();
        EXPECT_TRUE(eventually([&] { return tensor.use_count() == 1; })) << tensor.use_count();
      },
      on(devices));
}

TEST(Queueing, ACallThatTheOthersDoNotMakeEndsWhenItsTimeIsUp) {
  Devices devices;
  auto rank_main = [&](ProcessGroup world) {
    if (world.rank() == 1) return;
    auto work = world.all_reduce_async(at::ones({4}), ReduceOp::kSum, {.timeout = 700ms});
    expect_error<TimeoutError>([&] { work.synchronize(); }, "all_reduce(sum, Float[4])", "700 ms", "rank 1");
    expect_error<TimeoutError>([&] { world.all_reduce(at::ones({4})); }, "broken by an earlier error");
  };
  run_threads_into_an_error(2, rank_main, on(devices));
}

TEST(Queueing, ACallThatAnotherRankLeavesOutFailsWhenThatRankLeaves) {
  Devices devices;
  std::latch is_queued(1);
  auto rank_main = [&](ProcessGroup world) {
    if (world.rank() == 1) {
      is_queued.wait();
      return world.destroy();
    }
    auto work = world.all_reduce_async(at::ones({4}), ReduceOp::kSum, {.timeout = 60s});
    is_queued.count_down();
    expect_error<PeerError>([&] { work.synchronize(); }, "rank 1", "has left group 'world' after 0 calls");
  };
  run_threads_into_an_error(2, rank_main, on(devices));
}

TEST(Queueing, RanksThatDisagreeAreToldThoughNobodyWaits) {
  Devices devices;
  auto rank_main = [&](ProcessGroup world) {
    auto work = world.all_reduce_async(at::ones({4 + world.rank()}));
    expect_error<MismatchError>([&] { work.synchronize(); }, "Float[4]", "Float[5]");
  };
  run_threads_into_an_error(2, rank_main, on(devices));
}

TEST(Queueing, AFailingPeerEndsWhatTheDeviceWaitsFor) {
  Devices devices;
  std::atomic<int> told{0};
  auto rank_main = [&](ProcessGroup world) {
    if (world.rank() == 1) throw std::runtime_error("bad sample");
    expect_error<PeerError>([&] { world.all_reduce_async(at::ones({4})).synchronize(); }, "rank 1", "bad sample");
    ++told;
  };
  EXPECT_THROW(run_threads(2, rank_main, on(devices)), std::exception);
  EXPECT_EQ(told, 1);
}

}  // namespace
}  // namespace lockstep
