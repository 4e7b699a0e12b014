#pragma once

#include <torch/torch.h>

/// Models that the tests train. Their parameters are filled by fill_parameters, so that every rank, and Python, begins
/// with the same ones.

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    first = register_module("first", torch::nn::Linear(6, 16));
    second = register_module("second", torch::nn::Linear(16, 12));
    third = register_module("third", torch::nn::Linear(12, 4));
  }
  torch::Tensor forward(torch::Tensor x) { return third(torch::tanh(second(torch::tanh(first(x))))); }
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
};
TORCH_MODULE(Mlp);

/// With buffers: running statistics. The convolution has no bias, since normalization would make its gradient zero but
/// for rounding.
struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).padding(1).bias(false)));
    norm = register_module("norm", torch::nn::BatchNorm2d(4));
    head = register_module("head", torch::nn::Linear(4 * 3 * 3, 4));
  }
  torch::Tensor forward(torch::Tensor x) { return head(torch::max_pool2d(torch::relu(norm(conv(x))), 2).flatten(1)); }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(ConvNet);

/// LibTorch makes its generator when the first module wants it; ThreadSanitizer cannot see that it is careful when
/// several ranks want it at once.
inline const auto kGenerator = at::detail::getDefaultCPUGenerator();

inline void fill_parameters(torch::nn::Module& module, uint64_t seed) {
  torch::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(seed);
  for (auto& parameter : module.parameters())
    parameter.copy_(torch::randn(parameter.sizes(), generator, torch::kDouble) * 0.3);
}

inline double relative_difference(const torch::Tensor& a, const torch::Tensor& b) {
  auto x = a.detach().to(torch::kDouble), y = b.detach().to(torch::kDouble);
  double scale = y.norm().item<double>();
  double difference = (x - y).norm().item<double>();
  return scale > 0 ? difference / scale : difference;
}
