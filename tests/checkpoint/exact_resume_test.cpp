// Training that is stopped and resumed gives the same bits as training that is not. Ranks are processes, because
// LibTorch's random number generators belong to the process.

#include <random>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

/// Samples with random noise, from the generator that the loader seeds for each of them.
struct Noisy {
  size_t size() const { return 150; }
  torch::data::Example<> get(size_t index, at::Generator& random) const {
    auto data = torch::sin(torch::arange(8.0) * static_cast<double>(index + 1));
    data += 0.1 * torch::randn({8}, random);
    return {data, torch::tensor(static_cast<int64_t>(index % 3))};
  }
};

struct NoisyNetImpl : torch::nn::Module {
  NoisyNetImpl() {
    register_module("first", first);
    register_module("norm", norm);
    register_module("last", last);
  }
  torch::Tensor forward(torch::Tensor x) {
    return last(torch::dropout(torch::relu(norm(first(x))), 0.3, is_training()));
  }
  torch::nn::Linear first{8, 16};
  torch::nn::BatchNorm1d norm{16};
  torch::nn::Linear last{16, 3};
};
TORCH_MODULE(NoisyNet);

enum class Kind { kMomentum, kAdam, kFused, kSharded };

struct InterruptedTraining {
  InterruptedTraining(ProcessGroup world, Kind kind, uint64_t seed) : world(world) {
    torch::manual_seed(seed + static_cast<uint64_t>(world.rank()) * 1000);
    model = NoisyNet();
    model->to(world.device());
    ddp.emplace(model, world);
    const auto parameters = ddp->parameters();
    if (kind == Kind::kMomentum)
      optimizer = std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
    if (kind == Kind::kAdam)
      optimizer = std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.01));
    if (kind == Kind::kFused) optimizer = std::make_unique<FusedAdamW>(parameters, torch::optim::AdamWOptions(0.01));
    if (kind == Kind::kSharded)
      optimizer = std::make_unique<Sharded>(parameters, world, torch::optim::AdamWOptions(0.01));
    scheduler = std::make_unique<torch::optim::StepLR>(*optimizer, 5, 0.7);
  }

  void train(int64_t until) {
    for (int64_t epoch = sampler.next_epoch(); step < until; ++epoch) {
      sampler.set_epoch(epoch);
      for (auto& batch : loader) {
        optimizer->zero_grad();
        const auto output = (*ddp)(batch.data.to(world.device()));
        torch::nll_loss(torch::log_softmax(output, 1), batch.target.to(world.device())).backward();
        optimizer->step();
        scheduler->step();
        if (++step == until) return;
      }
    }
  }

  TrainingState state() {
    TrainingState all;
    all.add("model", model).add("sampler", sampler).add("scheduler", *scheduler).add("at", step).add_rng();
    if (auto* sharded = dynamic_cast<Sharded*>(optimizer.get())) return all.add("optimizer", *sharded);
    return all.add("optimizer", *optimizer);
  }

  /// Everything that later steps depend on.
  Value result() {
    const auto* sharded = dynamic_cast<Sharded*>(optimizer.get());
    return Value::dict({{"model", state_dict(*model)},
                        {"optimizer", sharded ? sharded->state_dict() : state_dict(*optimizer)},
                        {"random", torch::rand({4})},
                        {"random on device", torch::rand({4}, world.device())},
                        {"position", sampler.position()},
                        {"epoch", sampler.epoch()}});
  }

  using Sharded = ZeroRedundancyOptimizer<torch::optim::AdamW>;
  ProcessGroup world;
  NoisyNet model{nullptr};
  std::optional<DistributedDataParallel<NoisyNetImpl>> ddp;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<torch::optim::StepLR> scheduler;
  DistributedSampler sampler{150, world, {.seed = 3}};
  DataLoader<Noisy> loader{Noisy(), sampler, {.batch_size = 4, .num_workers = 2}};
  int64_t step = 0;
};

TEST(ExactResume, GivesTheSameBits) {
  const bool is_on_gpu = std::getenv("LOCKSTEP_TEST_CUDA") != nullptr;
  const auto world =
      is_on_gpu ? init_process_group({.device = torch::Device("cuda:0")}) : init_process_group({.backend = "shm"});
  const TemporaryFolder temporary;
  const auto root = world.broadcast_object(temporary.path().string(), 0).toStringRef();
  std::mt19937 random(17);  // equal on all ranks
  constexpr int64_t kSteps = 40;
  int runs = 0;
  for (const auto kind : {Kind::kMomentum, Kind::kAdam, Kind::kFused, Kind::kSharded}) {
    InterruptedTraining whole(world, kind, 1);
    whole.train(kSteps);
    const auto expected = whole.result();
    for (int i = 0; i < 20; ++i) {
      const auto stop = static_cast<int64_t>(1 + random() % (kSteps - 1));
      SCOPED_TRACE(testing::Message() << "optimizer " << static_cast<int>(kind) << ", stopped after step " << stop);
      const CheckpointDirectoryOptions options{.asynchronous = i % 2 == 0, .sharded = i % 3 != 0};
      const auto folder = root + "/" + std::to_string(runs++);
      {
        InterruptedTraining first(world, kind, 1);
        first.train(stop);
        CheckpointDirectory checkpoints(world, folder, options);
        EXPECT_TRUE(checkpoints.save(stop, first.state()));
        first.train(stop + 3);  // changes what an asynchronous save must not see
        EXPECT_TRUE(checkpoints.wait());
      }
      InterruptedTraining second(world, kind, 99);
      CheckpointDirectory checkpoints(world, folder, options);
      EXPECT_EQ(checkpoints.resume(second.state()), stop + 1);
      EXPECT_EQ(second.step, stop);
      second.train(kSteps);
      EXPECT_EQ(second.result(), expected);
    }
  }
  world.barrier();
}

}  // namespace
}  // namespace lockstep
