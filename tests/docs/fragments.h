#pragma once

#include <unistd.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "parallel/models.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "fragments_digest.h"  // changes with the snippets

// What the fragments of the pages assume: a model, a dataset, a loss. All of it is outside of namespace lockstep, so
// that a fragment compiles only if it names lockstep as a program must.

namespace F = torch::nn::functional;
using torch::Tensor;
using torch::data::Example;

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  void reset() override { layer = register_module("layer", torch::nn::Linear(6, 4)); }
  Tensor forward(Tensor x) { return layer(x); }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Net);

inline Tensor loss_function(const Tensor& output, const Tensor& target) {
  return F::cross_entropy(output, target);
}

/// 24 samples of four classes. The first feature is the index.
struct Samples {
  Samples() {
    data = torch::randn({24, 6}, at::detail::createCPUGenerator(1));
    data.select(1, 0) = torch::arange(24);
    target = torch::arange(24) % 4;
  }
  torch::optional<size_t> size() const { return 24; }
  Example<> get(size_t index) const {
    const auto i = static_cast<int64_t>(index);
    return {data[i], target[i]};
  }
  /// The samples from `begin` on, less the one at `end`.
  Example<> slice(int64_t begin, int64_t end) const { return {data.slice(0, begin, end), target.slice(0, begin, end)}; }
  Example<> of_rank(int rank) const { return slice(12 * rank, 12 * (rank + 1)); }

  Tensor data, target;
};

/// The same as a dataset of LibTorch.
struct LibTorchSamples : torch::data::datasets::Dataset<LibTorchSamples> {
  Example<> get(size_t index) override { return samples.get(index); }
  torch::optional<size_t> size() const override { return samples.size(); }
  Samples samples;
};

inline std::vector<int64_t> indices_of(const Tensor& data) {
  const auto first = data.select(-1, 0).to(torch::kLong).contiguous();
  return {first.data_ptr<int64_t>(), first.data_ptr<int64_t>() + first.numel()};
}

/// A Net with the same parameters in each call.
inline Net seeded_net() {
  torch::manual_seed(1);
  return Net();
}

inline void step(auto& model, torch::optim::Optimizer& optimizer, const Example<>& batch) {
  optimizer.zero_grad();
  loss_function(model(batch.data), batch.target).backward();
  optimizer.step();
}

inline void expect_equal_parameters(const Net& net, const Net& expected) {
  const auto actual_parameters = net->parameters(), expected_parameters = expected->parameters();
  for (size_t i = 0; i < expected_parameters.size(); ++i)
    EXPECT_LT(relative_difference(actual_parameters[i], expected_parameters[i]), 1e-6);
}

/// The oracle: expects the parameters of a process that makes one step of SGD with all samples, from seeded_net() on.
inline void expect_step_of_one_process(const Net& net) {
  auto alone = seeded_net();
  torch::optim::SGD optimizer(alone->parameters(), 0.05);
  step(alone, optimizer, Samples().slice(0, 24));
  expect_equal_parameters(net, alone);
}

/// Sets the current folder to `path`, for paths that pages write as "runs/a".
class CurrentFolder {
 public:
  explicit CurrentFolder(const std::filesystem::path& path) : before_(std::filesystem::current_path()) {
    std::filesystem::create_directories(path);
    std::filesystem::current_path(path);
  }
  ~CurrentFolder() { EXPECT_EQ(::chdir(before_.c_str()), 0); }
  CurrentFolder(const CurrentFolder&) = delete;
  CurrentFolder& operator=(const CurrentFolder&) = delete;

 private:
  const std::filesystem::path before_;
};

/// Runs `body` on two ranks, which are processes: fragments call init_process_group, and write into the current folder,
/// which is a new one that both ranks share.
inline void on_two_ranks(const std::function<void(lockstep::ProcessGroup)>& body) {
  ASSERT_TRUE(ranks_are_processes()) << "start this program by tests/support/start_ranks";
  on_every_rank("shm", 2, [&](const lockstep::ProcessGroup& world) {
    const TemporaryFolder own;
    {
      const CurrentFolder current(world.broadcast_object(own.path().string(), 0).toStringRef());
      body(world);
    }
    world.barrier();  // before rank 0 removes the folder
  });
}
