// Divides the gradients, and the state of AdamW, twice the size of the model, between the ranks. Saves a checkpoint
// after each epoch: started again, the program continues after the last one, with the same or another number of ranks.
//
//   lockstep run -n 2 build/sharded_optimizer 4
//   lockstep run -n 3 build/sharded_optimizer 8     continues with epoch 5
//
// Arguments: [EPOCHS [FOLDER]]. The default folder is runs/sharded_optimizer; remove it to start from the beginning.

#include <cstdlib>
#include <iostream>
#include <string>

#include <lockstep/lockstep.h>

namespace {

/// Random points and a function of them.
struct Waves {
  torch::Tensor points, heights;

  explicit Waves(int64_t count) : points(torch::rand({count, 2}) * 2 - 1) {
    heights = (4 * points.select(1, 0)).sin() * (3 * points.select(1, 1)).cos();
  }
  size_t size() const { return static_cast<size_t>(points.size(0)); }
  torch::data::Example<> get(size_t index) const {
    return {points[static_cast<int64_t>(index)], heights[static_cast<int64_t>(index)]};
  }
};

}  // namespace

int main(int argc, char** argv) {
  const int64_t epochs = argc > 1 ? std::atoll(argv[1]) : 8;
  const std::string folder = argc > 2 ? argv[2] : "runs/sharded_optimizer";
  if (epochs < 1) {
    std::cerr << "usage: sharded_optimizer [EPOCHS [FOLDER]]\n";
    return 2;
  }
  auto world = lockstep::init_process_group();
  lockstep::seed_everything(1);  // the same data on all ranks
  const Waves waves(8192);
  lockstep::DistributedSampler sampler(waves, world, {.seed = 1});
  lockstep::DataLoader loader(waves, sampler, {.batch_size = 64, .device = world.device()});

  using torch::nn::Linear, torch::nn::ReLU;
  torch::nn::Sequential net(Linear(2, 256), ReLU(), Linear(256, 256), ReLU(), Linear(256, 1));
  net->to(world.device());
  lockstep::DistributedDataParallel ddp(net, world);
  // Each rank updates its part of the parameters while backward still runs, and receives the other parts.
  lockstep::ZeroRedundancyOptimizer<lockstep::FusedAdamW> optimizer(ddp, torch::optim::AdamWOptions(1e-3),
                                                                    {.overlap = lockstep::Overlap::kUpdate});

  // With `sharded`, each rank writes its part of the optimizer's state.
  lockstep::CheckpointDirectory checkpoints(world, folder, {.unit = "epoch", .sharded = true});
  auto state = lockstep::TrainingState{}.add("model", net).add("optimizer", optimizer);
  int64_t epoch = checkpoints.resume(state);
  if (epoch > 0) lockstep::print(world, "continuing after epoch ", epoch, " in ", folder);
  if (epoch >= epochs) lockstep::print(world, "nothing to do: ", epoch, " epochs are complete");

  for (; epoch < epochs; ++epoch) {
    sampler.set_epoch(epoch);
    lockstep::MeanMetric loss(world.device());
    for (auto& batch : loader) {
      optimizer.zero_grad();
      const auto batch_loss = torch::mse_loss(ddp(batch.data).squeeze(1), batch.target);
      batch_loss.backward();
      optimizer.step();
      loss.add(batch_loss.detach(), static_cast<double>(batch.target.size(0)));
    }
    const double mean = loss.compute(world);
    lockstep::print(world, "epoch ", epoch + 1, "  loss ", mean);
    checkpoints.save(epoch, state, {{"loss", mean}});
  }
  const int64_t bytes = optimizer.state_bytes(), all_bytes = world.all_reduce(bytes);
  lockstep::print(world, "rank 0 keeps ", bytes, " of ", all_bytes, " bytes of the optimizer's state");
}
