// What find_unused_parameters costs a step: lockstep run -n 2 build/benchmarks/unused_cost
//
// A model of eight layers of 768 x 768 and a batch of 128, on each rank. Steps of three wrappers take turns: without
// the option, with it, and with it and a parameter that is never used, which would hold back the first bucket. Medians
// of rank 0, and the ratio to the step without the option in the same round, with its 10th and 90th percentile.

#include <algorithm>
#include <chrono>
#include <cstdio>

#include <lockstep/lockstep.h>

namespace {

constexpr int64_t kWidth = 768;
constexpr int kRounds = 60;

struct DeepImpl : torch::nn::Module {
  explicit DeepImpl(bool has_unused) {
    for (int i = 0; i < 8; ++i) layers->push_back(torch::nn::Linear(kWidth, kWidth));
    register_module("layers", layers);
    if (has_unused) register_parameter("unused", torch::zeros({kWidth}));  // registered last: in the first bucket
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& layer : *layers) x = torch::relu(layer->as<torch::nn::Linear>()->forward(x));
    return x;
  }

  torch::nn::ModuleList layers{};
};
TORCH_MODULE(Deep);

double percentile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1))];
}

struct Side {
  const char* name;
  std::unique_ptr<lockstep::DistributedDataParallel<DeepImpl>> ddp;
  std::vector<double> times{}, ratios{};

  double step_ms(const torch::Tensor& x) {
    for (const auto& parameter : ddp->parameters()) parameter.mutable_grad().reset();
    const auto begin = std::chrono::steady_clock::now();
    (*ddp)(x).sum().backward();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }
};

}  // namespace

int main() {
  torch::set_num_threads(1);
  const auto world = lockstep::init_process_group();
  const auto make = [&](const char* name, bool has_unused, bool finds_unused) {
    return Side{name, std::make_unique<lockstep::DistributedDataParallel<DeepImpl>>(
                          Deep(has_unused).ptr(), world,
                          lockstep::DistributedDataParallelOptions{.find_unused_parameters = finds_unused,
                                                                   .buckets = {.cap_bytes = 4 << 20}})};
  };
  std::vector<Side> sides;
  sides.push_back(make("without the option", false, false));
  sides.push_back(make("with it", false, true));
  sides.push_back(make("with an unused parameter", true, true));
  const auto x = torch::randn({128, kWidth});
  for (int round = -5; round < kRounds; ++round) {
    std::vector<double> times;
    for (auto& side : sides) {
      world.barrier();
      times.push_back(side.step_ms(x));
    }
    if (round < 0) continue;
    for (size_t i = 0; i < sides.size(); ++i) {
      sides[i].times.push_back(times[i]);
      sides[i].ratios.push_back(times[i] / times[0]);
    }
  }
  if (world.rank() != 0) return 0;
  for (const auto& [name, ddp, times, ratios] : sides)
    std::printf("%-26s %8.2f ms a step  ratio %.3f (%.3f to %.3f)\n", name, percentile(times, 0.5),
                percentile(ratios, 0.5), percentile(ratios, 0.1), percentile(ratios, 0.9));
}
