// What sharding an optimizer adds to a training step: lockstep run -n 2 build/benchmarks/zero_cost [BACKEND [MODEL]]
//
// Whole steps with AdamW take turns:
//
//   ddp          DistributedDataParallel and FusedAdamW, whose state is on every rank
//   in step      ZeroRedundancyOptimizer: all-reduce in backward; update of the share and all-gather in step()
//   in backward  the same with Overlap::kUpdate: reduce-scatter, update and all-gather of each bucket in backward
//
// Medians of the slowest rank, and ratios in the same round, with their 10th and 90th percentile. Uses a GPU if the
// ranks have one. At the end all sides must have the same parameters, but for rounding.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

#include <lockstep/lockstep.h>

namespace {

namespace nn = torch::nn;
using lockstep::FusedAdamW;
using lockstep::ProcessGroup;
using lockstep::ZeroRedundancyOptimizer;
using torch::optim::AdamWOptions;

constexpr int kRounds = 25;
constexpr std::array kSides{"ddp", "in step", "in backward"};

struct Model {
  const char* name;
  std::vector<int64_t> widths;
  int64_t batch;
};
const std::vector<Model> kModels{{"small", {784, 128, 128, 10}, 32},
                                 {"mlp", {784, 2048, 2048, 2048, 10}, 32},
                                 {"deep", std::vector<int64_t>(13, 1024), 128}};

nn::Sequential make(const Model& model) {
  torch::manual_seed(1);
  nn::Sequential net;
  for (size_t i = 1; i < model.widths.size(); ++i) {
    if (i > 1) net->push_back(nn::ReLU());
    net->push_back(nn::Linear(model.widths[i - 1], model.widths[i]));
  }
  return net;
}

class Side {
 public:
  Side(const Model& model, const ProcessGroup& world, const std::string& name)
      : net_(make(model)), ddp_(wrap(net_, world)) {
    const AdamWOptions options(1e-4);
    if (name == "ddp") {
      optimizer_ = std::make_unique<FusedAdamW>(ddp_.parameters(), options);
      return;
    }
    const auto overlap = name == "in backward" ? lockstep::Overlap::kUpdate : lockstep::Overlap::kNone;
    optimizer_ = std::make_unique<ZeroRedundancyOptimizer<FusedAdamW>>(
        ddp_, options, lockstep::ZeroRedundancyOptions{.overlap = overlap});
  }

  void step(const torch::Tensor& input) {
    for (const auto& parameter : ddp_.parameters()) parameter.mutable_grad().reset();
    ddp_(input).square().mean().backward();
    optimizer_->step();
  }
  std::vector<torch::Tensor> parameters() const { return ddp_.parameters(); }

 private:
  static lockstep::DistributedDataParallel<nn::SequentialImpl> wrap(nn::Sequential& net, const ProcessGroup& world) {
    net->to(world.device());
    return {net, world};
  }

  nn::Sequential net_;
  lockstep::DistributedDataParallel<nn::SequentialImpl> ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

/// Milliseconds for each step, on the slowest rank.
double time_of(Side& side, const ProcessGroup& world, const torch::Tensor& input, int steps) {
  const auto finish = [&] {
    if (world.device().is_cuda()) torch::cuda::synchronize();
  };
  finish();
  world.barrier();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < steps; ++i) side.step(input);
  finish();
  const std::chrono::duration<double, std::milli> passed = std::chrono::steady_clock::now() - begin;
  return world.all_reduce(passed.count() / steps, lockstep::ReduceOp::kMax);
}

double percentile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1))];
}

void measure(const Model& model, const ProcessGroup& world) {
  std::vector<std::unique_ptr<Side>> sides;
  for (const char* name : kSides) sides.push_back(std::make_unique<Side>(model, world, name));
  const auto input =
      torch::randn({model.batch, model.widths[0]}, at::detail::createCPUGenerator(world.rank())).to(world.device());
  std::array<std::vector<double>, kSides.size()> times;
  for (auto& side : sides) time_of(*side, world, input, 3);
  const int steps = std::max(1, static_cast<int>(40 / time_of(*sides[0], world, input, 1)));  // equal on all ranks
  for (size_t s = 1; s < sides.size(); ++s) time_of(*sides[s], world, input, 1);
  for (int round = 0; round < kRounds; ++round)
    for (size_t s = 0; s < sides.size(); ++s) times[s].push_back(time_of(*sides[s], world, input, steps));

  for (size_t i = 0; i < sides[0]->parameters().size(); ++i)
    for (const auto& side : sides)
      if (!torch::allclose(side->parameters()[i], sides[0]->parameters()[i], 1e-3, 1e-4))
        throw std::runtime_error("the sides have trained differently");
  if (world.rank() != 0) return;
  for (size_t s = 0; s < sides.size(); ++s) {
    std::vector<double> ratios;
    for (int round = 0; round < kRounds; ++round) ratios.push_back(times[s][round] / times[0][round]);
    std::printf("%-6s %-12s %9.3f ms a step, %5.2f (%.2f to %.2f) times ddp\n", model.name, kSides[s],
                percentile(times[s], 0.5), percentile(ratios, 0.5), percentile(ratios, 0.1), percentile(ratios, 0.9));
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  const auto world = lockstep::init_process_group({.backend = argc > 1 ? argv[1] : "auto"});
  if (world.device().is_cpu()) torch::set_num_threads(1);
  if (world.rank() == 0) std::printf("%d ranks over %s\n", world.size(), world.backend_name().c_str());
  for (const auto& model : kModels)
    if (argc < 3 || std::string(argv[2]) == model.name) measure(model, world);
}
