// Which calls backward makes, in which order, and for which of them it waits.

#include <atomic>
#include <chrono>
#include <future>
#include <optional>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/comm_hook.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/recompute.h>
#include <lockstep/run_threads.h>
#include <lockstep/sync_batch_norm.h>

#include "comm/group/group.h"
#include "parallel/gradients.h"
#include "parallel/models.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

constexpr std::chrono::seconds kDeadline(60);  // passes only if the test fails

/// Happens on one rank, another waits for it.
class Happening {
 public:
  Happening() : future_(promise_.get_future().share()) {}

  void happens() { promise_.set_value(); }
  /// Returns whether it happened before the deadline.
  bool wait() const { return future_.wait_for(kDeadline) == std::future_status::ready; }

 private:
  std::promise<void> promise_;
  std::shared_future<void> future_;
};

// --- SyncBatchNorm

/// A layer with a bucket behind it, and one before it.
struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    first = register_module("first", torch::nn::Linear(6, 6));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    last = register_module("last", torch::nn::Linear(6, 6));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(norm(first(x))); }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Normed);

/// Rank 0 holds back the reduction of the first bucket until its backward has passed the layer.
void expect_layer_overtakes_bucket(const std::string& backend) {
  Happening is_held, layer_is_passed;
  run_threads(2,
              [&](ProcessGroup world) {
                Normed model;
                fill_parameters(*model, 1);
                convert_sync_batch_norm(*model, world);
                DistributedDataParallel ddp(model, world, {.buckets = {64, 64}});
                bool is_gated = false;
                std::atomic<bool> in_time = true;
                ddp.register_comm_hook([&](const GradientBucket& bucket, const ProcessGroup& group) {
                  if (is_gated && bucket.index == 0) {
                    if (world.rank() == 1) in_time = is_held.wait();
                    const auto gate =
                        group.barrier_async();  // is done when rank 1 comes, after rank 0 has added the callback
                    if (world.rank() == 0) {
                      gate.on_done([&](const std::exception_ptr&) { in_time = layer_is_passed.wait(); });
                      is_held.happens();
                    }
                  }
                  return all_reduce_hook()(bucket, group);
                });
                model->first->weight.register_hook([&](const torch::Tensor&) {
                  if (is_gated && world.rank() == 0) layer_is_passed.happens();
                });
                for (int step = 0; step < 2; ++step) {
                  is_gated = step == 1;
                  ddp(input_of(world.rank())).square().sum().backward();
                }
                EXPECT_TRUE(in_time) << "the layer waited for a bucket";
                ddp.check_replicas();
              },
              {.backend = backend});
}

TEST(SyncBatchNormOverlap, BackwardOfALayerDoesNotWaitForBuckets) {
  for (const auto& backend : backends_under_test()) expect_layer_overtakes_bucket(backend);
}

TEST(SyncBatchNormOverlap, OnlyCallsInBackwardUseTheSideGroup) {
  run_threads(2, [](ProcessGroup world) {
    Normed model;
    convert_sync_batch_norm(*model, world);
    EXPECT_FALSE(detail::group_of(world)->side_group());
    DistributedDataParallel ddp(model, world);
    const auto side = detail::group_of(world)->side_group();
    ASSERT_TRUE(side);
    const auto calls_in = [&](const std::string& group) {
      int64_t calls = 0;
      for (const auto& record : detail::group_of(world)->recorder()->records()) calls += record.group == group;
      return calls;
    };
    const auto name = side->membership().name;
    const auto output = ddp(input_of(world.rank()));
    EXPECT_EQ(calls_in(name), 0);
    output.square().sum().backward();
    EXPECT_EQ(calls_in(name), 1);
    // A recomputed forward is part of backward.
    const auto recomputed =
        recompute([&](const torch::Tensor& x) { return model->forward(x); }, input_of(world.rank()).requires_grad_());
    EXPECT_EQ(calls_in(name), 1);
    recomputed.square().sum().backward();
    EXPECT_EQ(calls_in(name), 3);
    DistributedDataParallel another(model, world);
    EXPECT_EQ(detail::group_of(world)->side_group(), side) << "a group has one";
  });
}

TEST(SyncBatchNormOverlap, AModelWithoutSuchLayersNeedsNoSideGroup) {
  run_threads(2, [](ProcessGroup world) {
    Normed model;
    convert_sync_batch_norm(*model, world.new_group({0, 1}));
    DistributedDataParallel ddp(model, world);
    EXPECT_FALSE(detail::group_of(world)->side_group()) << "its layers have another group";
    EXPECT_EQ(world.new_group({0, 1}).name(), "world/2");
  });
}

TEST(SyncBatchNormOverlap, ALayerThatIsConvertedOnSomeRanksOnlyIsADifferenceOfTheModels) {
  run_threads(2, [](ProcessGroup world) {
    Normed model;
    if (world.rank() == 0) convert_sync_batch_norm(*model, world);
    expect_error<MismatchError>([&] { DistributedDataParallel ddp(model, world); }, "rank 1",
                                "the number of SyncBatchNorm layers is 0, rank 0 has 1");
  });
}

TEST(SyncBatchNormOverlap, ALateRankIsNamedAndBreaksTheGroup) {
  Happening is_over;
  run_threads_into_an_error(
      2,
      [&](ProcessGroup world) {
        Normed model;
        convert_sync_batch_norm(*model, world);
        DistributedDataParallel ddp(model, world);
        const auto output = ddp(input_of(world.rank()));
        if (world.rank() == 0) {
          expect_error<TimeoutError>([&] { output.square().sum().backward(); }, "SyncBatchNorm 'norm'", "all_reduce",
                                     "group 'world:side'", "rank 1");
          is_over.happens();
        } else {
          EXPECT_TRUE(is_over.wait());
        }
        expect_error<TimeoutError>([&] { world.barrier(); }, "broken by an earlier error", "rank 1");
      },
      {.timeout = std::chrono::milliseconds(500)});
}

TEST(SyncBatchNormOverlap, DestroyingTheGroupDestroysTheSideGroup) {
  run_threads(2, [](ProcessGroup world) {
    Normed model;
    convert_sync_batch_norm(*model, world);
    std::optional<DistributedDataParallel<NormedImpl>> ddp(std::in_place, model, world);
    (*ddp)(input_of(world.rank())).square().sum().backward();
    const auto side = detail::group_of(world)->side_group();
    ddp.reset();
    world.barrier();
    world.destroy();
    expect_error<UsageError>([&] { ProcessGroup(side).barrier(); }, "was destroyed");
  });
}

}  // namespace
}  // namespace lockstep
