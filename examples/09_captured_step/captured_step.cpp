// A training step as a CUDA graph. The host takes longer to launch the many kernels of a small model than the GPU takes
// to run them. CapturedStep captures the whole step once (forward, backward, all-reduce and optimizer), and each later
// call launches one graph. The program trains the same model without and with it, and prints the times. It needs a GPU
// for each rank.
//
//   lockstep run -n gpu build/captured_step [STEPS]

#include <chrono>
#include <cstdlib>
#include <iostream>

#include <lockstep/lockstep.h>

namespace {

using torch::Tensor;
using Clock = std::chrono::steady_clock;

enum class Mode { kEager, kCaptured };

/// Trains a new network for `steps` steps. Prints the losses and returns the microseconds of a step. Collective.
double train(const lockstep::ProcessGroup& world, Mode mode, int64_t steps) {
  lockstep::seed_everything(1, world);  // different points on each rank
  using torch::nn::Linear, torch::nn::Tanh;
  torch::nn::Sequential net(Linear(2, 256), Tanh(), Linear(256, 256), Tanh(), Linear(256, 256), Tanh(), Linear(256, 1));
  net->to(world.device());
  lockstep::DistributedDataParallel ddp(net, world);
  lockstep::FusedAdamW optimizer(ddp.parameters(), torch::optim::AdamWOptions(3e-4));
  const auto points = torch::rand({256, 2}, world.device()) * 2 - 1;
  const auto heights = (4 * points.select(1, 0)).sin() * (3 * points.select(1, 1)).cos();

  const auto eager_step = [&](const Tensor& input, const Tensor& target) {
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(ddp(input).squeeze(1), target);
    loss.backward();
    optimizer.step();  // a fused optimizer: those of LibTorch count their steps on the host
    return loss.detach();
  };
  lockstep::CapturedStep captured_step(world, eager_step);
  const auto step = [&] { return mode == Mode::kEager ? eager_step(points, heights) : captured_step(points, heights); };

  const auto first_loss = step();
  for (int i = 0; i < 9; ++i) step();  // not measured: the first steps create states, and one of them is captured
  torch::cuda::synchronize();
  const auto begin = Clock::now();
  Tensor last_loss;
  for (int64_t i = 0; i < steps; ++i) last_loss = step();
  torch::cuda::synchronize();
  const std::chrono::duration<double, std::micro> took = (Clock::now() - begin) / static_cast<double>(steps);

  auto losses = torch::stack({first_loss, last_loss});
  world.all_reduce(losses, lockstep::ReduceOp::kAvg);
  lockstep::print(world, mode == Mode::kEager ? "eager" : "captured", "  first loss ", losses[0].item<double>(),
                  "  last loss ", losses[1].item<double>(), "  us per step ", took.count());
  return took.count();
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t steps = argc > 1 ? std::atoll(argv[1]) : 500;
  if (steps < 1) {
    std::cerr << "usage: captured_step [STEPS]\n";
    return 2;
  }
  auto world = lockstep::init_process_group();
  if (!world.device().is_cuda()) {
    std::cerr << "captured_step needs a GPU for each rank: a step on a CPU cannot be captured\n";
    return 1;
  }
  const double eager = train(world, Mode::kEager, steps), captured = train(world, Mode::kCaptured, steps);
  lockstep::print(world, "The captured step is ", eager / captured, " times as fast");
}
