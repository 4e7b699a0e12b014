// Groups of ranks: a few ranks read the data, and the others receive it. The first rank of each group of two reads for
// both ranks. This relieves a file system that many ranks share; each rank gets the batches that it would read itself.
// All ranks together train one model. Groups also serve for statistics: here the loss of each group.
//
//   lockstep run -n 4 build/groups [EPOCHS]     any even number of ranks

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <numbers>

#include <lockstep/lockstep.h>

namespace {

/// Points on the three arms of a spiral. The label of a point is the number of its arm.
struct Spiral {
  static constexpr size_t kSize = 8192;

  size_t size() const { return kSize; }
  torch::data::Example<> get(size_t index, at::Generator& random) const {
    const auto arm = static_cast<int64_t>(index % 3);
    const auto radius = torch::rand({}, random);
    const auto angle = 5 * radius + 2 * std::numbers::pi / 3 * arm + 0.1 * torch::randn({}, random);
    return {torch::stack({radius * angle.cos(), radius * angle.sin()}), torch::tensor(arm)};
  }
};

}  // namespace

int main(int argc, char** argv) {
  const int64_t epochs = argc > 1 ? std::atoll(argv[1]) : 10;
  if (epochs < 1) {
    std::cerr << "usage: groups [EPOCHS]\n";
    return 2;
  }
  auto world = lockstep::init_process_group();
  const lockstep::GroupLayout layout(world, 2);  // throws UsageError if the number of ranks is odd
  const auto group = world.new_subgroups(2);     // of four ranks: {0, 1} and {2, 3}
  const auto across = world.new_subgroups_by_enumeration(layout.groups_across());  // {0, 2} and {1, 3}

  lockstep::DistributedSampler sampler(Spiral::kSize, world, {.seed = 1});
  const auto open = [&] {  // called on the ranks that read: only these need access to the file system
    lockstep::print(group, "rank ", world.rank(), " reads for ranks ", layout.group()[0], " and ", layout.group()[1]);
    return Spiral();
  };
  lockstep::GroupLoader loader(open, sampler, {.scatter = group}, {.batch_size = 64, .device = world.device()});

  lockstep::seed_everything(1);
  using torch::nn::Linear, torch::nn::ReLU;
  torch::nn::Sequential net(Linear(2, 64), ReLU(), Linear(64, 64), ReLU(), Linear(64, 3));
  net->to(world.device());
  lockstep::DistributedDataParallel ddp(net, world);
  torch::optim::Adam optimizer(ddp.parameters(), torch::optim::AdamOptions(5e-3));

  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    sampler.set_epoch(epoch);
    lockstep::MeanMetric loss(world.device());
    for (auto& batch : loader) {
      optimizer.zero_grad();
      const auto batch_loss = torch::nn::functional::cross_entropy(ddp(batch.data), batch.target);
      batch_loss.backward();  // averages over the world
      optimizer.step();
      loss.add(batch_loss.detach(), static_cast<double>(batch.target.size(0)));
    }
    const double mean = loss.compute(world);                     // collective, as the next line
    const auto losses = across.all_gather(loss.compute(group));  // one of each group
    const auto [lowest, highest] = std::ranges::minmax(losses);
    lockstep::print(world, "epoch ", epoch + 1, "  loss ", mean, "  in groups from ", lowest, " to ", highest);
  }
}
