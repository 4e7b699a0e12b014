#include <lockstep/distributed_data_parallel.h>

#include <atomic>
#include <future>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/error.h>
#include <lockstep/run_threads.h>

#include "parallel/gradients.h"
#include "parallel/models.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

TEST(DistributedDataParallel, AveragesGradientsByTheTimeBackwardReturns) {
  auto expected = mean_gradients(3);
  run_threads(3, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, {.buckets = {.first_bytes = 100, .cap_bytes = 300}});
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      ddp(input_of(world.rank())).square().sum().backward();
      expect_gradients(*model, expected);
    }
  });
}

TEST(DistributedDataParallel, ForwardOnTheModuleItselfSynchronizesToo) {
  auto expected = mean_gradients(2);
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    model(input_of(world.rank())).square().sum().backward();
    expect_gradients(*model, expected);
  });
}

// The ways to begin a step: gradients gone, zeroed in place, or replaced by the user.
TEST(DistributedDataParallel, EveryFormOfZeroGradWorks) {
  auto expected = mean_gradients(2);
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    auto backward = [&] { ddp(input_of(world.rank())).square().sum().backward(); };
    backward();
    auto* memory = model->first->weight.grad().data_ptr();
    for (int round = 0; round < 2; ++round) {
      for (bool set_to_none : {false, true}) {
        for (auto& parameter : ddp.parameters())
          set_to_none ? parameter.mutable_grad().reset() : void(parameter.mutable_grad().zero_());
        backward();
        expect_gradients(*model, expected);
        EXPECT_EQ(model->first->weight.grad().data_ptr(), memory) << "the gradient left the bucket";
      }
      torch::optim::SGD(ddp.parameters(), 0.1).zero_grad();  // detaches in place, which views refuse
      backward();
      expect_gradients(*model, expected);
      for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::zeros_like(parameter);
      backward();
      expect_gradients(*model, expected);
    }
  });
}

TEST(DistributedDataParallel, AccumulatesOverBackwardsAsAutogradDoes) {
  auto expected = mean_gradients(2);
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    for (int times = 1; times <= 3; ++times) {
      ddp(input_of(world.rank())).square().sum().backward();
      expect_gradients(*model, expected, times);
    }
  });
}

TEST(DistributedDataParallel, NoSyncLeavesGradientsHereAndTheNextBackwardAveragesAll) {
  auto expected = mean_gradients(2);
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    auto backward = [&] { ddp(input_of(world.rank())).square().sum().backward(); };
    for (int round = 0; round < 2; ++round) {
      model->zero_grad();
      {
        auto guard = ddp.no_sync();
        backward();
        auto inner = ddp.no_sync();
      }
      Mlp alone = filled_mlp();
      alone(input_of(world.rank())).square().sum().backward();
      EXPECT_TRUE(torch::equal(model->first->weight.grad(), alone->first->weight.grad()));
      backward();
      expect_gradients(*model, expected, 2);
    }
  });
}

TEST(DistributedDataParallel, WrappingTakesParametersAndBuffersFromRankZero) {
  run_threads(3, [&](ProcessGroup world) {
    ConvNet model;
    fill_parameters(*model, 10 + world.rank());
    model->norm->running_mean.fill_(world.rank() + 1);
    model->norm->num_batches_tracked.fill_(world.rank() + 5);
    DistributedDataParallel ddp(model, world);
    ConvNet reference;
    fill_parameters(*reference, 10);
    auto expected = reference->parameters(), actual = model->parameters();
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(torch::equal(actual[i], expected[i])) << i;
    EXPECT_TRUE(torch::equal(model->norm->running_mean, torch::ones({4})));
    EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), 5);
  });
}

TEST(DistributedDataParallel, BuffersFollowRankZeroInTrainingOnlyAndOnlyWhenAsked) {
  for (bool broadcast : {true, false}) {
    run_threads(2, [&](ProcessGroup world) {
      ConvNet model;
      fill_parameters(*model, 1);
      DistributedDataParallel ddp(model, world, {.broadcast_buffers = broadcast});
      auto image = torch::zeros({2, 1, 6, 6});
      auto& buffer = model->norm->num_batches_tracked;  // the forward adds one to it
      buffer.fill_(10 * (world.rank() + 1));
      ddp(image);
      EXPECT_EQ(buffer.item<int64_t>(), broadcast ? 11 : 10 * (world.rank() + 1) + 1);
      model->eval();
      model->norm->running_mean.fill_(world.rank());
      if (world.rank() == 1) ddp(image);  // one rank alone may evaluate
      EXPECT_TRUE(torch::equal(model->norm->running_mean, torch::full({4}, static_cast<float>(world.rank()))));
    });
  }
}

struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() {
    body = register_module("body", torch::nn::Linear(6, 4));
    left = register_module("left", torch::nn::Linear(4, 2));
    right = register_module("right", torch::nn::Linear(4, 2));
  }
  std::tuple<torch::Tensor, torch::Tensor> forward(torch::Tensor x, bool use_left, bool use_right) {
    auto h = body(x);
    return {use_left ? left(h) : h, use_right ? right(h) : h};
  }
  torch::nn::Linear body{nullptr}, left{nullptr}, right{nullptr};
};
TORCH_MODULE(TwoHeads);

template <class Ddp>
void backward_with(Ddp& ddp, int rank, bool use_left, bool use_right) {
  auto [l, r] = ddp(input_of(rank), use_left, use_right);
  (l.sum() + r.sum()).backward();
}

TEST(DistributedDataParallel, NamesTheParametersThatGotNoGradientOnEveryRank) {
  run_threads(3, [&](ProcessGroup world) {
    TwoHeads model;
    fill_parameters(*model, 1);
    DistributedDataParallel ddp(model, world);
    bool unused_here = world.rank() == 1;
    expect_error<UsageError>([&] { backward_with(ddp, world.rank(), true, !unused_here); },
                             "rank " + std::to_string(world.rank()), "'right.weight' and 'right.bias'",
                             unused_here ? "on this rank" : "on another rank", "find_unused_parameters");
    // What was used then counts no more, and the group goes on.
    model->zero_grad();
    expect_error<UsageError>([&] { backward_with(ddp, world.rank(), false, true); }, "'left.weight' and 'left.bias'");
    model->zero_grad();
    backward_with(ddp, world.rank(), true, true);
    EXPECT_TRUE(model->right->weight.grad().defined());
  });
}

TEST(DistributedDataParallel, UnusedParametersCountAsZeroWhereTheyAreAllowed) {
  run_threads(3, [&](ProcessGroup world) {
    TwoHeads model;
    fill_parameters(*model, 1);
    DistributedDataParallel ddp(model, world, {.find_unused_parameters = true});
    backward_with(ddp, world.rank(), /*use_left=*/world.rank() == 0, /*use_right=*/false);

    TwoHeads alone;
    fill_parameters(*alone, 1);
    backward_with(alone, 0, true, false);
    EXPECT_LE(relative_difference(model->left->weight.grad(), alone->left->weight.grad() / 3), 1e-6);
    EXPECT_FALSE(model->right->weight.grad().defined()) << "unused on all ranks";

    backward_with(ddp, world.rank(), true, true);
    // Different on each rank, so that an average of what lies in the bucket would show.
    model->right->weight.mutable_grad().fill_(world.rank());
    backward_with(ddp, world.rank(), true, false);
    EXPECT_TRUE(torch::equal(model->right->weight.grad(), torch::full({2, 4}, static_cast<float>(world.rank()))))
        << "unused on all ranks, so untouched";
  });
}

TEST(DistributedDataParallel, NamesTheFirstDifferenceBetweenTheModels) {
  auto differing = [](const std::function<void(MlpImpl&)>& change, const std::string& a, const std::string& b) {
    run_threads(3, [&](ProcessGroup world) {
      Mlp model;
      if (world.rank() == 2) change(*model);
      expect_error<MismatchError>([&] { DistributedDataParallel ddp(model, world); }, "rank 2", a, b,
                                  "build the same model");
      world.barrier();
    });
  };
  differing([](MlpImpl& m) { m.replace_module("second", torch::nn::Linear(16, 11)); }, "'second.weight' is [11, 16]",
            "rank 0 has [12, 16]");
  differing([](MlpImpl& m) { m.to(torch::kDouble); }, "'first.weight' is [16, 6] Double", "rank 0 has [16, 6] Float");
  differing([](MlpImpl& m) { m.second->bias.set_requires_grad(false); }, "'second.bias' is [12] Float, not trained",
            "rank 0 has [12] Float, trained");
  differing([](MlpImpl& m) { m.register_module("fourth", torch::nn::Linear(1, 1)); }, "has parameter 'fourth.weight'",
            "but rank 0's does not");
  differing([](MlpImpl& m) { m.unregister_module("third"); }, "lacks parameter 'third.weight'", "but rank 0's has it");
  differing([](MlpImpl& m) { m.register_buffer("steps", torch::zeros({1})); }, "has buffer 'steps'", "does not");
  differing(
      [](MlpImpl& m) {
        m.first->weight.set_data(torch::ones({6, 16}).t());
      },
      "'first.weight' is [16, 6] Float", "strides [1, 16]");
}

TEST(DistributedDataParallel, NamesTheOptionThatDiffers) {
  run_threads(2, [&](ProcessGroup world) {
    Mlp model;
    expect_error<MismatchError>(
        [&] { DistributedDataParallel ddp(model, world, {.find_unused_parameters = world.rank() == 1}); },
        "rank 1: option find_unused_parameters is true", "rank 0 has false");
    expect_error<MismatchError>(
        [&] { DistributedDataParallel ddp(model, world, {.buckets = {.cap_bytes = 100 + world.rank()}}); },
        "option buckets", "cap_bytes 101", "rank 0 has first_bytes 1048576, cap_bytes 100");
  });
}

TEST(DistributedDataParallel, RefusesAModelItCannotTrainOnEveryRank) {
  run_threads(2, [&](ProcessGroup world) {
    Mlp frozen;
    for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(world.rank() == 0);
    expect_error<UsageError>([&] { DistributedDataParallel ddp(frozen, world); }, "rank 1", "nothing to average");
    Mlp elsewhere;
    if (world.rank() == 1) elsewhere->register_parameter("extra", torch::empty({2}, torch::kMeta));
    expect_error<UsageError>([&] { DistributedDataParallel ddp(elsewhere, world); }, "rank 1", "'extra' is on meta",
                             "model->to(world.device())");
    expect_error<UsageError>([&] { DistributedDataParallel ddp(std::shared_ptr<MlpImpl>(), world); }, "empty");
  });
}

TEST(DistributedDataParallel, FrozenParametersAreLeftAlone) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    model->first->weight.set_requires_grad(false);
    DistributedDataParallel ddp(model, world);
    ddp(input_of(world.rank())).sum().backward();
    EXPECT_FALSE(model->first->weight.grad().defined());
    EXPECT_TRUE(model->first->bias.grad().defined());
  });
}

struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    weight = register_parameter("weight", torch::full({3, 4}, 2.0, torch::kDouble));
    image = register_parameter("image", torch::ones({2, 3, 4, 5}).contiguous(torch::MemoryFormat::ChannelsLast));
    scalar = register_parameter("scalar", torch::ones({}));
    half = register_parameter("half", torch::ones({7}, torch::kBFloat16));
  }
  torch::Tensor forward(double x) {
    return (weight * x).sum() + ((image * x).sum() + scalar * x).to(torch::kDouble) +
           (half * x).sum().to(torch::kDouble);
  }
  torch::Tensor weight, image, scalar, half;
};

TEST(DistributedDataParallel, MixesDtypesAndLayouts) {
  run_threads(3, [&](ProcessGroup world) {
    auto model = std::make_shared<MixedImpl>();
    DistributedDataParallel ddp(model, world);
    EXPECT_EQ(ddp.bucket_plan().buckets.size(), 3u);  // one for each dtype
    ddp(world.rank() + 1.0).backward();
    for (const auto& parameter : ddp.parameters()) {
      EXPECT_TRUE(torch::equal(parameter.grad(), torch::full_like(parameter, 2.0)));
      EXPECT_EQ(parameter.grad().strides(), parameter.strides());
      EXPECT_EQ(parameter.grad().scalar_type(), parameter.scalar_type());
    }
  });
}

TEST(DistributedDataParallel, ReachesTheModuleAndMayBeMoved) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel first(model, world);
    auto ddp = std::move(first);
    EXPECT_EQ(ddp.module(), model.ptr());
    EXPECT_TRUE(ddp->second->weight.defined());
    ddp(input_of(world.rank())).square().sum().backward();
    expect_gradients(*model, mean_gradients(2));
  });
}

TEST(DistributedDataParallel, TheModuleTrainsAloneWhenTheWrapperIsGone) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    {
      DistributedDataParallel ddp(model, world);
      ddp(input_of(world.rank())).square().sum().backward();
    }
    expect_gradients(*model, mean_gradients(2));  // the gradients outlive the wrapper
    if (world.rank() == 1) return;                // nobody is asked for anything any more
    model->zero_grad();
    model(input_of(0)).square().sum().backward();
    auto alone = filled_mlp();
    alone(input_of(0)).square().sum().backward();
    EXPECT_TRUE(torch::equal(model->first->weight.grad(), alone->first->weight.grad()));
  });
}

TEST(DistributedDataParallel, AnInterruptedBackwardIsNotTakenForTheNext) {
  run_threads(1, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    auto out = ddp(input_of(0)).square().sum();
    model->first->weight.register_hook([](torch::Tensor gradient) -> torch::Tensor {
      if (gradient.defined()) throw std::runtime_error("interrupted");
      return gradient;
    });
    EXPECT_THROW(out.backward(), std::runtime_error);
    expect_error<UsageError>([&] { ddp(input_of(0)); }, "rank 0", "did not finish", "checkpoint");
  });
}

TEST(DistributedDataParallel, AFailingPeerEndsBackwardWithAPeerError) {
  std::atomic<int> told{0};
  std::promise<void> ready;  // the other rank is through with its forward, which the failure would end, too
  EXPECT_THROW(run_threads(2,
                           [&](ProcessGroup world) {
                             auto model = filled_mlp();
                             DistributedDataParallel ddp(model, world);
                             auto loss = ddp(input_of(world.rank())).sum();
                             if (world.rank() == 1) {
                               ready.get_future().wait();
                               throw std::runtime_error("bad sample");
                             }
                             ready.set_value();
                             try {
                               loss.backward();
                             } catch (const PeerError&) {
                               ++told;
                               throw;
                             }
                           }),
               Error);
  EXPECT_EQ(told, 1);
}

}  // namespace
}  // namespace lockstep
