// What the parts of a small step of DistributedDataParallel cost: lockstep run -n 2 build/benchmarks/step_cost
//
// The model small of `lockstep bench ddp` (784-128-128-10, batch 32, SGD, gradients released before each step). Sides
// take turns: ranks that do not communicate; the same with a barrier in each step, which is the floor of any
// synchronous training; with the all-reduce of a buffer as large as all gradients instead; with a wrapper of this rank
// alone (hooks and copies, no other rank); and the wrapper of all ranks. A sample is 50 steps; the time of the slowest
// rank counts. Each rank is pinned to its own core if there are enough. Medians of 101 rounds, and the ratio to the
// first side in the same round, with its 10th and 90th percentile.

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>

#include <lockstep/lockstep.h>

namespace {

constexpr int kRounds = 101;
constexpr int kSteps = 50;
constexpr int64_t kBatch = 32, kPixels = 784, kHidden = 128, kClasses = 10;

using Model = torch::nn::SequentialImpl;
using Wrapper = lockstep::DistributedDataParallel<Model>;

std::shared_ptr<Model> make_model() {
  namespace nn = torch::nn;
  torch::manual_seed(1);
  return nn::Sequential(nn::Linear(kPixels, kHidden), nn::ReLU(), nn::Linear(kHidden, kHidden), nn::ReLU(),
                        nn::Linear(kHidden, kClasses))
      .ptr();
}

double percentile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1))];
}

void pin(int rank, int ranks) {
  cpu_set_t allowed, mine;
  ::sched_getaffinity(0, sizeof allowed, &allowed);
  if (CPU_COUNT(&allowed) < ranks) return;
  CPU_ZERO(&mine);
  for (int core = 0, next = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &allowed) && next++ == rank) CPU_SET(core, &mine);
  ::sched_setaffinity(0, sizeof mine, &mine);
}

/// Steps with a model, with or without a wrapper. `after_backward` runs before the optimizer.
struct Side {
  const char* name;
  std::shared_ptr<Model> model;
  std::unique_ptr<Wrapper> ddp{};
  std::function<void()> after_backward{};
  std::vector<at::Tensor> parameters{}, first{};
  std::unique_ptr<torch::optim::SGD> optimizer{};
  std::vector<double> times{}, ratios{};

  void prepare() {
    parameters = model->parameters();
    for (const auto& parameter : parameters) first.push_back(parameter.detach().clone());
    optimizer = std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.01));
  }

  /// Restores the initial weights: the gradients of a trained model become denormal numbers, which are slow.
  void reset() {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(first[i]);
  }

  void step(const at::Tensor& input, const at::Tensor& target) {
    for (const auto& parameter : parameters) parameter.mutable_grad().reset();
    at::cross_entropy_loss(ddp ? (*ddp)(input) : model->forward(input), target).backward();
    if (after_backward) after_backward();
    optimizer->step();
  }
};

}  // namespace

int main() {
  torch::set_num_threads(1);
  const auto world = lockstep::init_process_group();
  std::vector<lockstep::ProcessGroup> single;
  for (int rank = 0; rank < world.size(); ++rank) {
    auto group = world.new_group({rank});
    if (rank == world.rank()) single.push_back(group);
  }
  const auto buffer = world.allocate({118282}, at::kFloat).zero_();

  std::vector<Side> sides;
  sides.push_back({"no communication", make_model()});
  sides.push_back({"and a barrier", make_model(), nullptr, [&] { world.barrier(); }});
  sides.push_back({"and an all-reduce", make_model(), nullptr, [&] { world.all_reduce(buffer); }});
  sides.push_back({"wrapper of one rank", make_model()});
  sides.back().ddp = std::make_unique<Wrapper>(sides.back().model, single[0]);
  sides.push_back({"wrapper of all ranks", make_model()});
  sides.back().ddp = std::make_unique<Wrapper>(sides.back().model, world);
  for (auto& side : sides) side.prepare();
  pin(world.rank(), world.size());

  torch::manual_seed(world.rank());
  const auto input = at::randn({kBatch, kPixels});
  const auto target = at::randint(kClasses, {kBatch}, at::kLong);
  for (int round = -2; round < kRounds; ++round) {
    std::vector<double> times;
    for (auto& side : sides) {
      side.reset();
      side.step(input, target);
      world.barrier();
      const auto begin = std::chrono::steady_clock::now();
      for (int step = 0; step < kSteps; ++step) side.step(input, target);
      const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
      times.push_back(world.all_reduce(took.count() / kSteps, lockstep::ReduceOp::kMax));
    }
    for (size_t i = 0; round >= 0 && i < sides.size(); ++i) {
      sides[i].times.push_back(times[i]);
      sides[i].ratios.push_back(times[i] / times[0]);
    }
  }
  if (world.rank() != 0) return 0;
  for (const auto& side : sides)
    std::printf("%-22s %8.1f us a step  ratio %.3f (%.3f to %.3f)\n", side.name, percentile(side.times, 0.5),
                percentile(side.ratios, 0.5), percentile(side.ratios, 0.1), percentile(side.ratios, 0.9));
}
