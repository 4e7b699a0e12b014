// How long an optimizer's step takes: lockstep run -n 2 build/benchmarks/optimizer_cost
//
// AdamW on the parameters of three models, with gradients that all ranks have: LibTorch's and FusedAdamW, each with all
// of its state on every rank and divided between them by ZeroRedundancyOptimizer. On a GPU where there is one for each
// rank. Sides alternate; a sample is some steps that all ranks begin together, and takes as long as the slowest rank.
// Medians, and ratios with the 10th and 90th percentile of the rounds. In the end all sides must have the same
// parameters.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

#include <lockstep/lockstep.h>

namespace {

using torch::optim::AdamWOptions;

constexpr int kRounds = 15;

using Sizes = std::vector<std::vector<int64_t>>;

Sizes linear_layers(const std::vector<int64_t>& widths) {
  Sizes sizes;
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    sizes.push_back({widths[i + 1], widths[i]});
    sizes.push_back({widths[i + 1]});
  }
  return sizes;
}

Sizes gpt(int64_t layers, int64_t width, int64_t context, int64_t vocabulary) {
  Sizes sizes{{vocabulary, width}, {context, width}, {width}, {width}};
  for (int64_t i = 0; i < layers; ++i)
    for (const auto& size : Sizes{{width},
                                  {width},
                                  {3 * width, width},
                                  {3 * width},
                                  {width, width},
                                  {width},
                                  {width},
                                  {width},
                                  {4 * width, width},
                                  {4 * width},
                                  {width, 4 * width},
                                  {width}})
      sizes.push_back(size);
  return sizes;
}

struct Side {
  std::string name;
  std::vector<torch::Tensor> parameters;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::vector<double> times{};  // of a step, in us
};

std::vector<torch::Tensor> make_parameters(const Sizes& sizes, c10::Device device) {
  torch::manual_seed(1);
  std::vector<torch::Tensor> parameters;
  for (const auto& size : sizes) {
    parameters.push_back(torch::randn(size).to(device).requires_grad_());
    parameters.back().mutable_grad() = torch::randn(size).to(device);
  }
  return parameters;
}

double sample(const lockstep::ProcessGroup& world, Side& side, int steps) {
  world.barrier();
  world.synchronize();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < steps; ++i) side.optimizer->step();
  if (world.device().is_cuda()) torch::cuda::synchronize(world.device().index());
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  auto slowest = torch::tensor({took.count() / steps}, torch::kDouble).to(world.device());
  world.all_reduce(slowest, lockstep::ReduceOp::kMax);
  return slowest.item<double>();
}

double percentile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1))];
}

void print_ratio(const char* model, const Side& above, const Side& below) {
  std::vector<double> ratios;
  for (size_t i = 0; i < above.times.size(); ++i) ratios.push_back(above.times[i] / below.times[i]);
  std::printf("%-10s %s / %s: %.2f (%.2f to %.2f)\n", model, above.name.c_str(), below.name.c_str(),
              percentile(ratios, 0.5), percentile(ratios, 0.1), percentile(ratios, 0.9));
}

void measure(const lockstep::ProcessGroup& world, const char* model, const Sizes& sizes) {
  const AdamWOptions options(1e-4);
  std::vector<Side> sides;
  auto add = [&](const char* name, auto make) {
    sides.push_back({name, make_parameters(sizes, world.device()), nullptr});
    sides.back().optimizer = make(sides.back().parameters);
  };
  using Parameters = std::vector<torch::Tensor>;
  using Zero = lockstep::ZeroRedundancyOptimizer<torch::optim::AdamW>;
  using FusedZero = lockstep::ZeroRedundancyOptimizer<lockstep::FusedAdamW>;
  add("LibTorch", [&](const Parameters& all) { return std::make_unique<torch::optim::AdamW>(all, options); });
  add("fused", [&](const Parameters& all) { return std::make_unique<lockstep::FusedAdamW>(all, options); });
  add("sharded LibTorch", [&](const Parameters& all) { return std::make_unique<Zero>(all, world, options); });
  add("sharded fused", [&](const Parameters& all) { return std::make_unique<FusedZero>(all, world, options); });
  sample(world, sides[0], 1);  // makes the state
  const int steps = std::clamp(static_cast<int>(1e5 / sample(world, sides[0], 1)), 2, 50);
  for (auto& side : sides) sample(world, side, &side == &sides[0] ? steps - 2 : steps);
  for (int round = 0; round < kRounds; ++round)
    for (auto& side : sides) {
      const double time = sample(world, side, steps);
      side.times.push_back(time);
    }
  int64_t elements = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    elements += sides[0].parameters[i].numel();
    for (const auto& side : sides)
      if (!torch::allclose(side.parameters[i], sides[0].parameters[i], 1e-3, 1e-4))
        throw std::runtime_error(side.name + " has other parameters");
  }
  const auto bytes = static_cast<FusedZero&>(*sides[3].optimizer).state_bytes();
  if (world.rank() != 0) return;
  for (const auto& side : sides)
    std::printf("%-10s %-17s %9.1f us a step\n", model, side.name.c_str(), percentile(side.times, 0.5));
  print_ratio(model, sides[0], sides[1]);
  print_ratio(model, sides[2], sides[0]);
  print_ratio(model, sides[3], sides[1]);
  std::printf("%-10s state of a rank: %lld bytes, 8 N / p are %lld\n", model, static_cast<long long>(bytes),
              static_cast<long long>(8 * elements / world.size()));
}

}  // namespace

int main() {
  const auto world = lockstep::init_process_group();
  if (world.rank() == 0)
    std::printf("%d ranks over %s, %d thread(s) each\n", world.size(), world.backend_name().c_str(),
                at::get_num_threads());
  measure(world, "small", linear_layers({784, 128, 128, 10}));
  measure(world, "mlp", linear_layers({784, 2048, 2048, 2048, 10}));
  measure(world, "gpt-6x384", gpt(6, 384, 256, 96));
  if (world.device().is_cuda()) measure(world, "gpt-124m", gpt(12, 768, 1024, 50304));
}
