#pragma once

#include <functional>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/gradient_tools.h>
#include <lockstep/process_group.h>

#include "parallel/gpu.h"
#include "parallel/models.h"
#include "parallel/training.h"
#include "support/ranks.h"

// What the tests of captured steps share.

namespace lockstep {

class CudaCapturedStep : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "this machine has no GPU";
  }
  void on_both(const std::function<void(ProcessGroup)>& body) { on_every_rank("nccl", 2, body, kGpu); }
};

/// One step with gradient clipping. Returns the loss.
template <class Ddp>
torch::Tensor train(Ddp& ddp, torch::optim::Optimizer& optimizer, const torch::Tensor& input,
                    const torch::Tensor& target) {
  optimizer.zero_grad();
  auto loss = torch::cross_entropy_loss(ddp(input), target);
  loss.backward();
  clip_grad_norm_(ddp.parameters(), 0.5);
  optimizer.step();
  return loss;
}

inline void expect_equal(const Mlp& actual, const Mlp& expected, const char* what) {
  for (size_t i = 0; i < expected->parameters().size(); ++i)
    EXPECT_LE(relative_difference(actual->parameters()[i], expected->parameters()[i]), 1e-6) << what << ' ' << i;
}

}  // namespace lockstep
