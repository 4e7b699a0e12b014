#include "gpu/adamw.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace lockstep::bench {
namespace {

constexpr double kLearningRate = 3e-4;  // gpu_trainer.py has the same
constexpr double kBeta1 = 0.9, kBeta2 = 0.999, kEpsilon = 1e-8, kDecay = 0.01;

}  // namespace

FusedAdamW::FusedAdamW(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
  for (const auto& parameter : parameters_) {
    means_.push_back(at::zeros_like(parameter));
    squares_.push_back(at::zeros_like(parameter));
    steps_.push_back(at::zeros({}, parameter.options()));
  }
}

void FusedAdamW::release_gradients() {
  for (const auto& parameter : parameters_) parameter.mutable_grad().reset();
}

void FusedAdamW::step() {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  gradients.reserve(parameters_.size());
  for (const auto& parameter : parameters_) gradients.push_back(parameter.grad());
  at::_foreach_add_(steps_, 1);
  at::_fused_adamw_(parameters_, gradients, means_, squares_, {}, steps_, kLearningRate, kBeta1, kBeta2, kDecay,
                    kEpsilon, /*amsgrad=*/false, /*maximize=*/false);
}

}  // namespace lockstep::bench
