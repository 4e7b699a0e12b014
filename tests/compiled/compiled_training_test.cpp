// Compiled models in the parts of lockstep that train: DistributedDataParallel, optimizers, checkpoints, captured
// steps.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/captured_step.h>
#include <lockstep/checkpoint_directory.h>
#include <lockstep/compiled_module.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/module_state.h>
#include <lockstep/run_threads.h>
#include <lockstep/sync_batch_norm.h>
#include <lockstep/training_run.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "compiled/exported.h"
#include "support/messages.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using torch::Tensor;

constexpr int kSteps = 20;

/// The part of the batch that belongs to this rank of two.
Tensor half_of(const Tensor& batch, const ProcessGroup& world) {
  return batch.chunk(2)[world.rank()];
}

void expect_equal_parameters(const torch::nn::Module& got, const torch::nn::Module& expected, double tolerance) {
  const auto parameters = expected.named_parameters();
  for (const auto& parameter : got.named_parameters())
    EXPECT_LE(difference(*parameter, parameters[parameter.key()]), tolerance) << parameter.key();
}

TEST(CompiledTraining, OnTwoRanksEqualsOneProcess) {
  const Exported exported("mlp");
  auto alone = exported.load();
  torch::optim::SGD sgd(alone->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    sgd.zero_grad();
    exported.call(alone).backward();
    sgd.step();
  }
  run_threads(2, [&](ProcessGroup world) {
    auto net = exported.load();
    DistributedDataParallel ddp(net, world);
    torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    const auto inputs = exported.inputs();
    const auto data = half_of(inputs[0], world), target = half_of(inputs[1], world);
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      ddp(data, target).toTensor().backward();
      optimizer.step();
    }
    expect_equal_parameters(*net, *alone, 1e-10);
  });
}

/// Trains with an optimizer that `make` creates for the wrapper, and returns the state_dict of rank 0.
Value trained(const Exported& exported, const auto& make) {
  Value result;
  run_threads(2, [&](ProcessGroup world) {
    auto net = exported.load();
    DistributedDataParallel ddp(net, world);
    auto optimizer = make(ddp, world);
    const auto inputs = exported.inputs();
    const auto data = half_of(inputs[0], world), target = half_of(inputs[1], world);
    for (int step = 0; step < kSteps; ++step) {
      for (const auto& parameter : ddp.parameters()) parameter.mutable_grad().reset();
      ddp(data, target).toTensor().backward();
      optimizer.step();
    }
    world.barrier();
    if (world.rank() != 0) return;
    result = Value::dict();
    const auto state = state_dict(*net);
    for (const auto& [name, value] : state.items()) result.set(name, value.tensor().clone());
  });
  return result;
}

TEST(CompiledTraining, GivesTheSameBitsWithShardedOptimizers) {
  const Exported exported("mlp");
  const torch::optim::AdamWOptions options(0.01);
  const auto whole = trained(exported, [&](auto& ddp, const auto&) { return FusedAdamW(ddp.parameters(), options); });
  for (const auto& zero : {ZeroRedundancyOptions{}, ZeroRedundancyOptions{.overlap = Overlap::kGradients},
                           ZeroRedundancyOptions{.overlap = Overlap::kUpdate},
                           ZeroRedundancyOptions{.overlap = Overlap::kUpdate, .share_parameters = true}}) {
    const auto sharded = trained(
        exported, [&](auto& ddp, const auto&) { return ZeroRedundancyOptimizer<FusedAdamW>(ddp, options, zero); });
    EXPECT_TRUE(sharded == whole) << "overlap " << static_cast<int>(zero.overlap) << ", shared "
                                  << zero.share_parameters;
  }
}

TEST(CompiledTraining, NamesAParameterThatIsNotUsed) {
  const Exported exported("unused");
  run_threads_into_an_error(2, [&](ProcessGroup world) {
    auto net = exported.load();
    DistributedDataParallel ddp(net, world);
    const auto inputs = exported.inputs();
    const auto loss = ddp(inputs[0], inputs[1]).toTensor();
    expect_error<UsageError>([&] { loss.backward(); }, "unused.weight", "find_unused_parameters");
  });
  run_threads(2, [&](ProcessGroup world) {
    auto net = exported.load();
    DistributedDataParallel ddp(net, world, {.find_unused_parameters = true});
    const auto inputs = exported.inputs();
    ddp(inputs[0], inputs[1]).toTensor().backward();
    EXPECT_LT(difference(net->named_parameters()["used.weight"].grad(),
                         exported.reference().at("gradients").at("used.weight").tensor()),
              1e-10);
    EXPECT_FALSE(net->named_parameters()["frozen.weight"].grad().defined());
  });
}

TEST(CompiledTraining, BroadcastsBuffers) {
  const Exported exported("batch_norm");
  run_threads(2, [&](ProcessGroup world) {
    auto net = exported.load();
    DistributedDataParallel ddp(net, world);
    const auto inputs = exported.inputs();
    for (int step = 0; step < 2; ++step) ddp(inputs[0] + world.rank(), inputs[1]).toTensor().backward();
    ddp.sync_buffers();
    for (const auto& buffer : net->named_buffers()) {
      auto copy = buffer->clone();
      world.broadcast(copy, 0);
      EXPECT_TRUE(copy.equal(*buffer)) << buffer.key();
    }
    EXPECT_EQ(net->named_buffers()["1.num_batches_tracked"].item<int64_t>(), 2);
  });
}

TEST(CompiledTraining, RefusesToConvertBatchNorm) {
  run_threads(1, [&](ProcessGroup world) {
    auto net = Exported("batch_norm").load();
    expect_error<UsageError>([&] { convert_sync_batchnorm(*net, world); }, "BatchNorm layers of Sequential",
                             "are not modules of LibTorch", "LayerNorm");
    EXPECT_EQ(convert_sync_batchnorm(*Exported("mlp").load(), world), 0);
  });
}

TEST(CompiledTraining, ResumesWithTheSameBits) {
  const Exported exported("dropout");
  run_threads(1, [&](ProcessGroup world) {
    const TemporaryFolder folder;
    const auto train = [&](CompiledModule& net, FusedAdamW& optimizer, int steps) {
      for (int step = 0; step < steps; ++step) {
        optimizer.zero_grad();
        net(exported.inputs()[0]).toTensor().pow(2).sum().backward();
        optimizer.step();
      }
    };
    torch::manual_seed(1);
    auto net = exported.load();
    FusedAdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
    train(net, optimizer, 3);
    CheckpointDirectory checkpoints(world, folder.path().string());
    checkpoints.save(3, TrainingState().add("model", *net).add("optimizer", optimizer).add_rng());
    train(net, optimizer, 3);

    torch::manual_seed(2);
    auto resumed = exported.load();
    FusedAdamW resumed_optimizer(resumed->parameters(), torch::optim::AdamWOptions(0.01));
    const auto state = TrainingState().add("model", *resumed).add("optimizer", resumed_optimizer).add_rng();
    EXPECT_EQ(checkpoints.resume(state), 4);
    train(resumed, resumed_optimizer, 3);
    EXPECT_TRUE(state_dict(*resumed) == state_dict(*net));
  });
}

TEST(CompiledTraining, IsSavedAndResumedByATrainingRun) {
  const Exported exported("mlp");
  run_threads(1, [&](ProcessGroup world) {
    const TemporaryFolder folder;
    const auto train = [&](int64_t epochs) {
      auto net = exported.load();
      DistributedDataParallel ddp(net, world);
      FusedAdamW optimizer(ddp.parameters(), torch::optim::AdamWOptions(0.01));
      TrainingRun run(world, folder.path().string(), TrainingState().add("model", *net).add("optimizer", optimizer));
      while (run.next_epoch(epochs))
        run.step([&] {
          optimizer.zero_grad();
          exported.call(net).backward();
          optimizer.step();
        });
      EXPECT_EQ(run.exit_code(), 0);
      return net->parameters()[0].detach().clone();
    };
    train(2);
    const auto resumed = train(4);
    auto net = exported.load();
    FusedAdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      exported.call(net).backward();
      optimizer.step();
    }
    EXPECT_LT(difference(resumed, net->parameters()[0]), 1e-10);
  });
}

TEST(CompiledTraining, ScalesTheLoss) {
  const Exported exported("tied");
  run_threads(1, [&](ProcessGroup world) {
    auto net = exported.load();
    DistributedDataParallel ddp(net, world);
    GradScaler scaler({.init_scale = 1024});
    FusedAdamW optimizer(ddp.parameters(), torch::optim::AdamWOptions(0.01));
    scaler.scale(exported.call(net)).backward();
    scaler.unscale_(optimizer);
    expect_gradients(*net, exported.reference().at("gradients"), 1e-5);
  });
}

TEST(CompiledTraining, RunsInACapturedStep) {
  const Exported exported("mlp");
  run_threads(2, [&](ProcessGroup world) {
    auto net = exported.load();
    DistributedDataParallel ddp(net, world);
    FusedAdamW optimizer(ddp.parameters(), torch::optim::AdamWOptions(0.01));
    CapturedStep step(world, [&](Tensor data, Tensor target) {
      optimizer.zero_grad();
      const auto loss = ddp(data, target).toTensor();
      loss.backward();
      optimizer.step();
      return loss;
    });
    const auto inputs = exported.inputs();
    const auto first = step(inputs[0], inputs[1]).item<double>();
    EXPECT_LT(difference(torch::tensor(first, torch::kDouble), exported.tensor("loss")), 1e-10);
    double last = first;
    for (int i = 0; i < kSteps; ++i) last = step(inputs[0], inputs[1]).item<double>();
    EXPECT_LT(last, first);
  });
}

}  // namespace
}  // namespace lockstep
