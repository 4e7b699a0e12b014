#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/run_threads.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "parallel/gradients.h"
#include "support/slowness.h"

/// A model and its training, for tests of ZeroRedundancyOptimizer with DistributedDataParallel.

namespace lockstep {

/// Several segments, an odd size that three ranks cannot share equally, another order in memory, and another dtype.
/// `wide` is larger than `kernel`, which is in the same segment, so each rank's share has a part of it.
struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    table = register_parameter("table", torch::zeros({6, 50'021}));
    kernel = register_parameter("kernel", torch::zeros({16, 32, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast));
    wide = register_parameter("wide", torch::zeros({101, 301}));
    scale = register_parameter("scale", torch::zeros({}));
    exact = register_parameter("exact", torch::zeros({5}, torch::kDouble));
    fill_parameters(*this, 3);
  }
  torch::Tensor forward(torch::Tensor x) {
    const auto rows = torch::mm(x, table).tanh();
    return (rows.sum(1) * scale + kernel.square().mean() * x.mean() + wide.tanh().mean() * x.sum() +
            (exact.square().sum() * x.sum().to(torch::kDouble)).to(torch::kFloat))
        .square();
  }
  torch::Tensor table, kernel, wide, scale, exact;
};
TORCH_MODULE(Mixed);

/// Makes a bucket of almost every parameter of Mixed.
inline const DistributedDataParallelOptions kSmallBuckets{
    .buckets = {.first_bytes = 1 << 10, .cap_bytes = 1 << 10, .last_bytes = 1 << 10}};

/// A wrapper and an optimizer that updates in backward.
template <class Module, class Inner>
struct Training {
  template <class Model, class Options>
  Training(Model model, const ProcessGroup& world, Options options, const DistributedDataParallelOptions& wrap = {},
           const ZeroRedundancyOptions& zero_options = {.overlap = Overlap::kUpdate})
      : ddp(model, world, wrap), optimizer(ddp, options, zero_options) {}
  DistributedDataParallel<Module> ddp;
  ZeroRedundancyOptimizer<Inner> optimizer;
};

template <class Ddp>
void run_steps(Ddp& ddp, torch::optim::Optimizer& optimizer, int rank, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    optimizer.zero_grad();
    ddp(input_of(10 * step + rank)).mean().backward();
    optimizer.step();
  }
}

inline std::vector<torch::Tensor> copies(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> result;
  for (const auto& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}

inline void expect_same_bits(const std::vector<torch::Tensor>& actual, const std::vector<torch::Tensor>& expected,
                             const std::string& about) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(torch::equal(actual[i], expected[i])) << about << ' ' << i;
}

/// How many cases of a comparison the short tier has: each number of ranks with each backend, or three ranks with one.
/// The long tier has all.
enum class Cases { kAll, kOne };

struct RanksAndBackends {
  std::vector<int> ranks;
  std::vector<std::string> backends;
};

inline RanksAndBackends ranks_and_backends(Cases cases) {
  if (cases == Cases::kAll || is_long_tier()) return {{1, 2, 3}, {"shm", "threads"}};
  return {{3}, {"shm"}};
}

/// What each rank's own copy of the parameters becomes, with the whole state on each rank.
template <class Inner, class Options>
std::vector<torch::Tensor> trained_apart(int ranks, int steps, Options options) {
  std::vector<torch::Tensor> result;
  run_threads(ranks, [&](ProcessGroup world) {
    Mixed model;
    DistributedDataParallel ddp(model, world);
    Inner optimizer(ddp.parameters(), options);
    run_steps(ddp, optimizer, world.rank(), 0, steps);
    if (world.rank() == 0) result = copies(ddp.parameters());
  });
  return result;
}

}  // namespace lockstep
