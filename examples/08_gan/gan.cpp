// A GAN that learns to draw points from a ring of eight Gaussians, with two models and two optimizers. The
// discriminator is frozen while the generator is trained through it, so that its gradients are neither computed nor
// sent. The distance between generated and real points falls, and the generator reaches more and more of the eight
// modes.
//
//   lockstep run -n 2 build/gan [STEPS]

#include <cstdlib>
#include <iostream>
#include <numbers>

#include <lockstep/lockstep.h>

namespace {

namespace F = torch::nn::functional;
using torch::Tensor;

constexpr int64_t kModes = 8, kBatch = 256, kNoise = 8;
constexpr double kDeviation = 0.1;

Tensor centers(torch::Device device) {
  const auto angles =
      torch::arange(kModes, torch::TensorOptions(torch::kFloat).device(device)) * (2 * std::numbers::pi / kModes);
  return torch::stack({angles.cos(), angles.sin()}, 1);
}

Tensor draw_real(const Tensor& centers) {
  const auto mode = torch::randint(kModes, {kBatch}, centers.options().dtype(torch::kLong));
  return centers.index_select(0, mode) + kDeviation * torch::randn({kBatch, 2}, centers.options());
}

torch::nn::Sequential layers(int64_t inputs, int64_t outputs) {
  using torch::nn::LeakyReLU, torch::nn::Linear;
  const auto slope = torch::nn::LeakyReLUOptions().negative_slope(0.2);
  return torch::nn::Sequential(Linear(inputs, 128), LeakyReLU(slope), Linear(128, 128), LeakyReLU(slope),
                               Linear(128, outputs));
}

/// Returns the sliced Wasserstein distance: sorts the projections of both sets on 32 directions, and compares them.
Tensor distance(const Tensor& a, const Tensor& b) {
  const auto angles = torch::arange(32, a.options()) * (std::numbers::pi / 32);
  const auto directions = torch::stack({angles.cos(), angles.sin()});
  const auto sorted = [&](const Tensor& points) { return std::get<0>(points.matmul(directions).sort(0)); };
  return (sorted(a) - sorted(b)).abs().mean();
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t steps = argc > 1 ? std::atoll(argv[1]) : 1000;
  if (steps < 1) {
    std::cerr << "usage: gan [STEPS]\n";
    return 2;
  }
  auto world = lockstep::init_process_group();
  lockstep::seed_everything(1, world);  // different points and noise on each rank
  const auto device = world.device();
  auto generator_net = layers(kNoise, 2), discriminator_net = layers(2, 1);
  generator_net->to(device);
  discriminator_net->to(device);
  lockstep::DistributedDataParallel generator(generator_net, world), discriminator(discriminator_net, world);
  const auto options = torch::optim::AdamOptions(1e-3).betas({0.5, 0.999});
  lockstep::FusedAdam generator_optimizer(generator.parameters(), options);
  lockstep::FusedAdam discriminator_optimizer(discriminator.parameters(), options);

  const auto ring = centers(device);
  for (int64_t step = 1; step <= steps; ++step) {
    const auto real = draw_real(ring);
    const auto fake = generator(torch::randn({kBatch, kNoise}, device));

    discriminator_optimizer.zero_grad();
    const auto on_real = discriminator(real), on_fake = discriminator(fake.detach());
    (F::softplus(-on_real) + F::softplus(on_fake)).mean().backward();  // averages the discriminator's gradients
    discriminator_optimizer.step();

    generator_optimizer.zero_grad();
    for (auto& parameter : discriminator.parameters()) parameter.requires_grad_(false);
    F::softplus(-discriminator(fake)).mean().backward();  // averages the generator's gradients
    for (auto& parameter : discriminator.parameters()) parameter.requires_grad_(true);
    generator_optimizer.step();

    if (step != 1 && step % 100 != 0 && step != steps) continue;
    // A mode is covered if at least a quarter of its share of points is within three deviations of its center.
    auto counts = (torch::cdist(fake.detach(), ring) < 3 * kDeviation).sum(0);
    world.all_reduce(counts);
    const auto covered = (counts >= kBatch * world.size() / kModes / 4).sum().item<int64_t>();
    const auto mean = world.all_reduce(distance(fake.detach(), real).item<double>(), lockstep::ReduceOp::kAvg);
    lockstep::print(world, "step ", step, "  distance ", mean, "  modes ", covered, " of ", kModes);
  }
}
