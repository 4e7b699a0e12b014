#pragma once

#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/module_state.h>
#include <lockstep/weight_average.h>

#include "parallel/models.h"
#include "support/python.h"
#include "support/temporary_folder.h"

/// A model whose weights are averaged here and, in the same way, in toolbox_oracle.py.

namespace lockstep {

constexpr double kAverageTolerance = 1e-12;  // relative, in float64

/// As Net of toolbox_oracle.py: with a module that has two names, and statistics.
struct TiedNetImpl : torch::nn::Module {
  TiedNetImpl() {
    first = register_module("first", torch::nn::Linear(3, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    tied = register_module("tied", torch::nn::Linear(4, 4));
    register_module("again", tied);
    to(torch::kDouble);
    norm->num_batches_tracked.set_data(norm->num_batches_tracked.to(torch::kLong));  // in Python it never changes
  }
  torch::Tensor forward(const torch::Tensor& x) { return tied(torch::tanh(tied(norm(first(x))))); }
  torch::nn::Linear first{nullptr}, tied{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(TiedNet);

/// As set_weights of toolbox_oracle.py.
inline void set_weights(const torch::nn::Module& model, int step) {
  int64_t place = 0;
  const auto dict = state_dict(model);
  for (const auto& [name, value] : dict.items()) {
    auto tensor = value.tensor();
    ++place;
    if (tensor.is_floating_point())
      tensor.copy_(torch::sin(torch::arange(tensor.numel(), torch::kDouble) * place + step).view(tensor.sizes()) + 1.5);
    else
      tensor.fill_(step + 1);
  }
}

inline void update_for(WeightAverage& average, const torch::nn::Module& model, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    set_weights(model, step);
    average.update();
  }
}

/// Integer buffers are left out: Python averages them with use_buffers, lockstep copies them.
inline void expect_equal_averages(const Value& actual, const Value& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto& [name, value] = expected.items()[i];
    EXPECT_EQ(actual.items()[i].first, name);
    const auto& tensor = actual.items()[i].second.tensor();
    if (tensor.is_floating_point() || name == Value("n_averaged")) {
      EXPECT_LE(relative_difference(tensor, value.tensor()), kAverageTolerance) << name;
    }
    EXPECT_EQ(tensor.scalar_type(), value.tensor().scalar_type()) << name;
  }
}

inline std::vector<torch::Tensor> tensors_of(const torch::nn::Module& model) {
  std::vector<torch::Tensor> tensors;
  const auto dict = state_dict(model);
  for (const auto& [name, value] : dict.items()) tensors.push_back(value.tensor());
  return tensors;
}

inline std::vector<torch::Tensor> copies_of_state(const torch::nn::Module& model) {
  std::vector<torch::Tensor> tensors;
  for (const auto& tensor : tensors_of(model)) tensors.push_back(tensor.clone());
  return tensors;
}

inline bool are_equal(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return torch::equal(x, y); });
}

/// Runs toolbox_oracle.py with each installed version of Python's torch.
class WeightAverageInPython : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const char* python = std::getenv(GetParam());
    if (!python || !*python) GTEST_SKIP() << "needs Python's torch: set " << GetParam();
    python_ = python;
    static std::map<std::string, std::unique_ptr<TemporaryFolder>> made;  // once for all tests
    auto& folder = made[python_];
    if (!folder) {
      folder = std::make_unique<TemporaryFolder>();
      run({"make", folder->path().string()});
    }
    made_ = folder->path();
  }

  void run(const std::vector<std::string>& arguments) const {
    ASSERT_EQ(run_python(python_, "optim/toolbox_oracle.py", arguments), 0);
  }

  Value made(const std::string& name) const { return load_checkpoint((made_ / (name + ".pt")).string()); }

  std::string python_;
  std::filesystem::path made_;
};

}  // namespace lockstep
