#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/compiled_module.h>

namespace lockstep {

/// A model of models.py that export_models.py has compiled into the folder LOCKSTEP_TEST_MODELS, with the results that
/// Python computed.
class Exported {
 public:
  explicit Exported(std::string name)
      : name_(std::move(name)), reference_(load_checkpoint(path(name_ + ".reference.pt"))) {}

  const std::string& name() const { return name_; }
  std::string file() const { return path(name_ + ".pt2"); }
  CompiledModule load() const { return CompiledModule(file()); }

  const Value& reference() const { return reference_; }
  const at::Tensor& tensor(const char* key) const { return reference_.at(key).tensor(); }
  std::vector<at::Tensor> inputs() const {
    std::vector<at::Tensor> inputs;
    for (const auto& input : reference_.at("inputs").elements()) inputs.push_back(input.tensor().detach().clone());
    return inputs;
  }
  /// The loss of the inputs and the target that it was compiled with.
  at::Tensor call(CompiledModule& net) const {
    const auto given = inputs();
    return net(given.at(0), given.at(1)).toTensor();
  }

 private:
  static std::string path(const std::string& file) {
    const char* folder = std::getenv("LOCKSTEP_TEST_MODELS");
    if (!folder) throw std::runtime_error("LOCKSTEP_TEST_MODELS is not set");
    return std::string(folder) + "/" + file;
  }

  const std::string name_;
  const Value reference_;
};

/// The largest difference of two tensors, relative to the largest element.
inline double difference(const at::Tensor& got, const at::Tensor& expected) {
  if (got.sizes() != expected.sizes()) return HUGE_VAL;
  const auto exact = expected.detach().cpu().to(at::kDouble), other = got.detach().cpu().to(at::kDouble);
  const double largest = exact.abs().max().item<double>();
  return (other - exact).abs().max().item<double>() / (largest > 0 ? largest : 1);
}

/// Expects the gradients of the parameters that have one in Python, and none of the others. The tolerance is relative
/// to the largest gradient: that of a bias before a BatchNorm is only rounding noise.
inline void expect_gradients(const torch::nn::Module& module, const Value& expected, double tolerance) {
  double largest = 0;
  for (const auto& [name, gradient] : expected.items())
    if (!gradient.is_none()) largest = std::max(largest, gradient.tensor().abs().max().item<double>());
  ASSERT_GT(largest, 0);
  for (const auto& parameter : module.named_parameters()) {
    const auto& gradient = expected.at(parameter.key());
    ASSERT_EQ(parameter->grad().defined(), !gradient.is_none()) << parameter.key();
    if (!parameter->grad().defined()) continue;
    const auto error = (parameter->grad().cpu() - gradient.tensor()).abs().max().item<double>();
    EXPECT_LT(error, tolerance * largest) << parameter.key();
  }
}

inline std::string contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

inline void write(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

}  // namespace lockstep
