// Parameters that arrive while the next forward runs: the option gather_in_forward.

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <stdexcept>
#include <thread>

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint_directory.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/run_threads.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "optim/sharded_training.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

constexpr std::chrono::seconds kLongEnough(60);  // passes only if the test fails
constexpr std::chrono::milliseconds kDelay(50);
constexpr int kSteps = 3;

/// An optimizer that waits for `gate` before it steps its last bucket.
struct GatedSGD : FusedSGD {
  using FusedSGD::FusedSGD;

  torch::Tensor step(LossClosure closure = nullptr) override {
    if (gate && --steps == 0) {
      if (gate->wait_for(kLongEnough) != std::future_status::ready) throw std::runtime_error("nobody came");
      gate->get();  // may throw
    }
    return FusedSGD::step(std::move(closure));
  }

  // Of this rank, which is a thread:
  static thread_local const std::shared_future<void>* gate;  // null: none
  static thread_local size_t steps;                          // up to the last bucket
};
thread_local const std::shared_future<void>* GatedSGD::gate = nullptr;
thread_local size_t GatedSGD::steps = 0;

using GatedTraining = Training<MixedImpl, GatedSGD>;

const torch::optim::SGDOptions kSgd(0.01);

/// Trains kSteps steps. In the last one, rank 1 updates its share of the last bucket only some time after rank 0 has
/// returned from step(). Until then no parameter can arrive, so `use`, which rank 0 calls, must wait.
void use_before_all_have_arrived(const std::function<void(GatedTraining&, const std::vector<torch::Tensor>&)>& use) {
  const auto expected = trained_apart<FusedSGD>(2, kSteps, kSgd);
  std::promise<void> rank0_is_done;
  const auto gate = rank0_is_done.get_future().share();
  run_threads(2, [&](ProcessGroup world) {
    Mixed model;
    GatedTraining training(model, world, kSgd, kSmallBuckets,
                           {.shard_by = ShardBy::kElements, .gather_in_forward = true});
    run_steps(training.ddp, training.optimizer, world.rank(), 0, kSteps - 1);
    training.optimizer.wait_for_parameters();
    if (world.rank() == 1) {
      GatedSGD::gate = &gate;
      GatedSGD::steps = training.ddp.bucket_plan().buckets.size();
    }
    run_steps(training.ddp, training.optimizer, world.rank(), kSteps - 1, kSteps);
    if (world.rank() == 0) {
      std::atomic<bool> can_arrive = false;
      std::thread opener([&] {
        std::this_thread::sleep_for(kDelay);  // if it were too short, the test would see less
        can_arrive = true;
        rank0_is_done.set_value();
      });
      use(training, expected);
      EXPECT_TRUE(can_arrive) << "did not wait";
      opener.join();
    }
    training.optimizer.wait_for_parameters();
    expect_same_bits(training.ddp.parameters(), expected, "at the end");
    world.barrier();
  });
}

TEST(LateParameters, ForwardWaitsForEachWhenItIsUsed) {
  use_before_all_have_arrived([](GatedTraining& training, const std::vector<torch::Tensor>& expected) {
    Mixed alone;
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < expected.size(); ++i) alone->parameters()[i].copy_(expected[i]);
    EXPECT_TRUE(torch::equal(training.ddp(input_of(77)), alone(input_of(77))));
  });
}

TEST(LateParameters, OperatorsOutsideOfTheWrapperWait) {
  use_before_all_have_arrived([](GatedTraining& training, const std::vector<torch::Tensor>& expected) {
    const torch::NoGradGuard no_grad;
    const auto parameters = training.ddp.parameters();
    for (size_t i = 0; i < expected.size(); ++i)  // as items of a list, if they have dimensions
      EXPECT_TRUE(torch::equal(expected[i].dim() > 0 ? torch::cat({parameters[i]}) : parameters[i], expected[i])) << i;
  });
}

TEST(LateParameters, ForwardOnAnotherThreadWaits) {
  use_before_all_have_arrived([](GatedTraining& training, const std::vector<torch::Tensor>& expected) {
    Mixed alone;
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < expected.size(); ++i) alone->parameters()[i].copy_(expected[i]);
    torch::Tensor output;
    std::thread([&] {
      const torch::NoGradGuard no_grad;
      output = training.ddp(input_of(77));
    }).join();
    EXPECT_TRUE(torch::equal(output, alone(input_of(77))));
  });
}

TEST(LateParameters, MemoryIsCompleteAfterWaiting) {
  use_before_all_have_arrived([](GatedTraining& training, const std::vector<torch::Tensor>& expected) {
    training.optimizer.wait_for_parameters();
    const auto parameters = training.ddp.parameters();
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_EQ(std::memcmp(parameters[i].data_ptr(), expected[i].data_ptr(), expected[i].nbytes()), 0) << i;
  });
}

TEST(LateParameters, AreCompleteInASavedState) {
  use_before_all_have_arrived([](GatedTraining& training, const std::vector<torch::Tensor>& expected) {
    const auto state = training.optimizer.shard_state_dict();
    const auto parameters = training.ddp.parameters();
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_EQ(std::memcmp(parameters[i].data_ptr(), expected[i].data_ptr(), expected[i].nbytes()), 0) << i;
  });
}

TEST(LateParameters, NoSyncDoesNotMistakeThemForAStep) {
  testing::internal::CaptureStderr();
  use_before_all_have_arrived([](GatedTraining& training, const std::vector<torch::Tensor>&) {
    const auto no_sync = training.ddp.no_sync();
    training.ddp(input_of(1)).mean().backward();
    training.ddp(input_of(2)).mean().backward();
  });
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(LateParameters, ALostRankIsReported) {
  std::promise<void> never;
  never.set_exception(std::make_exception_ptr(std::runtime_error("lost on purpose")));
  const auto gate = never.get_future().share();
  bool is_reported = false;
  const auto body = [&](ProcessGroup world) {
    Mixed model;
    GatedTraining training(model, world, kSgd, kSmallBuckets, {.gather_in_forward = true});
    run_steps(training.ddp, training.optimizer, world.rank(), 0, 2);
    if (world.rank() == 1) {
      GatedSGD::gate = &gate;
      GatedSGD::steps = training.ddp.bucket_plan().buckets.size();
    }
    try {
      run_steps(training.ddp, training.optimizer, world.rank(), 2, 4);
    } catch (const PeerError&) {
      is_reported = world.rank() == 0;
    }
  };
  EXPECT_THROW(run_threads(2, body), Error);
  EXPECT_TRUE(is_reported);
}

// Autograd restores the callbacks of a thread after each node, also one that was removed there because the parameters
// of the other model have arrived.
TEST(LateParameters, LeaveNoCallbacksBehind) {
  run_threads(2, [](ProcessGroup world) {
    const auto callbacks = [] { return at::get_record_function_tls_().sorted_tls_callbacks_.size(); };
    Mixed one, other;
    GatedTraining first(one, world, kSgd, kSmallBuckets, {.gather_in_forward = true});
    GatedTraining second(other, world, kSgd, kSmallBuckets, {.gather_in_forward = true});
    for (int step = 0; step < 10; ++step) {
      run_steps(first.ddp, first.optimizer, world.rank(), step, step + 1);
      EXPECT_EQ(callbacks(), 1) << step;
      run_steps(second.ddp, second.optimizer, world.rank(), step, step + 1);
      EXPECT_EQ(callbacks(), 1) << step;
    }
    first.optimizer.wait_for_parameters();
    second.optimizer.wait_for_parameters();
    torch::ones({1}).add_(1);
    EXPECT_EQ(callbacks(), 0);
  });
}

TEST(LateParameters, NeedUpdatesInBackward) {
  run_threads(2, [](ProcessGroup world) {
    Mixed model;
    DistributedDataParallel ddp(model, world);
    ZeroRedundancyOptimizer<FusedSGD> optimizer(ddp.named_parameters(), world, kSgd, {.gather_in_forward = true});
    ddp(input_of(world.rank())).mean().backward();
    expect_error<UsageError>([&] { optimizer.step(); }, "gather_in_forward needs update_in_backward");

    Mixed shared_model;
    DistributedDataParallel shared_ddp(shared_model, world);
    ZeroRedundancyOptimizer<FusedSGD> shared(shared_ddp.named_parameters(), world, kSgd,
                                             {.share_parameters = true, .gather_in_forward = true});
    expect_error<UsageError>([&] { shared_ddp.update_in_backward(shared.bucket_update()); },
                             "gather_in_forward cannot be combined with share_parameters");
  });
}

}  // namespace
}  // namespace lockstep
