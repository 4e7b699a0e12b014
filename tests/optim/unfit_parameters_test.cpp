// Parameters that cannot be trained are refused by all ranks, by name; those that only look so are trained.

#include <functional>
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/run_threads.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "support/messages.h"

namespace lockstep {
namespace {

using testing::AllOf;
using testing::HasSubstr;

/// A model whose parameter or buffer `odd` is unfit for training on rank 1 only, so that rank 0 must be told.
struct OddImpl : torch::nn::Module {
  explicit OddImpl(torch::Tensor odd, bool is_buffer = false) {
    plain = register_parameter("plain", torch::ones({4}));
    std::optional<c10::InferenceMode> guard;
    if (odd.is_inference()) guard.emplace();
    this->odd = is_buffer ? register_buffer("odd", std::move(odd)) : register_parameter("odd", std::move(odd));
  }
  torch::Tensor forward(const torch::Tensor& x) { return (plain * x).sum() + torch::abs(odd).sum(); }
  torch::Tensor plain, odd;
};
TORCH_MODULE(Odd);

torch::Tensor expanded() {
  return torch::ones({1}).expand({4});
}

torch::Tensor of_inference() {
  const c10::InferenceMode guard;
  return torch::ones({4});
}

void expect_refused_by_all(const std::function<void(ProcessGroup)>& construct,
                           const testing::Matcher<std::string>& message) {
  run_threads(2, [&](ProcessGroup world) {
    EXPECT_THAT(error_of<UsageError>([&] { construct(world); }), message) << "rank " << world.rank();
    world.barrier();  // the group is in order
  });
}

TEST(UnfitParameters, AreRefusedByTheWrapper) {
  for (const bool is_buffer : {false, true}) {
    const auto name = std::string(is_buffer ? "buffer" : "parameter") + " 'odd'";
    const auto wrap = [&](torch::Tensor (*odd)()) {
      return [=](ProcessGroup world) {
        DistributedDataParallel ddp(Odd(world.rank() == 1 ? odd() : torch::ones({4}), is_buffer), world);
      };
    };
    expect_refused_by_all(wrap(expanded), AllOf(HasSubstr("rank 1: "), HasSubstr(name), HasSubstr("share memory"),
                                                HasSubstr("contiguous()")));
    expect_refused_by_all(wrap(of_inference),
                          AllOf(HasSubstr("rank 1: "), HasSubstr(name), HasSubstr("outside of c10::InferenceMode")));
  }
}

TEST(UnfitParameters, AreRefusedByZero) {
  const auto make = [](torch::Tensor (*odd)()) {
    return [=](ProcessGroup world) {
      const std::vector<std::pair<std::string, torch::Tensor>> parameters{
          {"plain", torch::ones({4})}, {"odd", world.rank() == 1 ? odd() : torch::ones({4})}};
      const ZeroRedundancyOptimizer<FusedSGD> optimizer(parameters, world, torch::optim::SGDOptions(0.1));
    };
  };
  expect_refused_by_all(make(expanded), AllOf(HasSubstr("on rank 1, parameter 'odd'"), HasSubstr("share memory"),
                                              HasSubstr("contiguous()")));
  expect_refused_by_all(make(of_inference),
                        AllOf(HasSubstr("on rank 1, parameter 'odd'"), HasSubstr("outside of c10::InferenceMode")));
}

// A buffer that is neither received from rank 0 nor checked may be anything.
TEST(UnfitParameters, ABufferThatStaysMayBeExpanded) {
  run_threads(2, [](ProcessGroup world) {
    Odd model(expanded(), /*is_buffer=*/true);
    DistributedDataParallel ddp(model, world, {.broadcast_buffers = false, .init_sync = false});
    ddp(torch::full({4}, world.rank() + 1.0f)).backward();
    EXPECT_TRUE(model->plain.grad().equal(torch::full({4}, 1.5f)));
  });
}

TEST(UnfitParameters, ComplexOnesAreRefusedForFusedOptimizersByAllRanks) {
  const auto complex_model = [] { return Odd(torch::ones({4}, at::kComplexFloat)); };
  for (const auto overlap : {Overlap::kNone, Overlap::kGradients, Overlap::kUpdate})
    expect_refused_by_all(
        [&](ProcessGroup world) {
          auto model = complex_model();
          DistributedDataParallel ddp(model, world);
          const ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, torch::optim::AdamWOptions(), {.overlap = overlap});
        },
        AllOf(HasSubstr("parameter 'odd'"), HasSubstr("ComplexFloat"), HasSubstr("view_as_real")));
  run_threads(2, [&](ProcessGroup world) {
    auto model = complex_model();
    DistributedDataParallel ddp(model, world);
    ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(ddp, torch::optim::SGDOptions(0.25));
    ddp(torch::ones({4})).backward();
    optimizer.step();
    EXPECT_TRUE(model->odd.equal(torch::full({4}, 0.75, at::kComplexFloat)));

    auto frozen = complex_model();
    frozen->odd.requires_grad_(false);
    DistributedDataParallel frozen_ddp(frozen, world);
    ZeroRedundancyOptimizer<FusedSGD> fused(frozen_ddp, torch::optim::SGDOptions(0.25));
    frozen_ddp(torch::ones({4})).backward();
    fused.step();
    EXPECT_TRUE(frozen->plain.equal(torch::full({4}, 0.75)));
    EXPECT_TRUE(frozen->odd.equal(torch::ones({4}, at::kComplexFloat)));
  });
}

/// Layers whose weights are cut from one tensor, so that they share autograd's version.
struct CutImpl : torch::nn::Module {
  CutImpl() {
    const auto flat = torch::linspace(-1, 1, 3 * 16);
    for (int i = 0; i < 3; ++i)
      register_parameter("weight" + std::to_string(i), flat.narrow(0, 16 * i, 16).view({4, 4}).detach());
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& weight : parameters()) x = torch::tanh(x.mm(weight));
    return x;
  }
};
TORCH_MODULE(Cut);

TEST(CutParameters, AreTrainedWithUpdatesInBackward) {
  const auto train = [](const ZeroRedundancyOptions& options) {
    std::vector<torch::Tensor> result;
    run_threads(2,
                [&](ProcessGroup world) {
                  Cut model;
                  DistributedDataParallel ddp(model, world, {.buckets = {64, 64}});
                  ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, torch::optim::AdamWOptions(0.1), options);
                  for (int step = 0; step < 3; ++step) {
                    optimizer.zero_grad();
                    ddp(torch::full({2, 4}, world.rank() + step + 1.0f)).sum().backward();
                    optimizer.step();
                  }
                  if (world.rank() == 1)
                    for (const auto& parameter : model->parameters()) result.push_back(parameter.detach().clone());
                },
                {.backend = "shm"});
    return result;
  };
  const auto expected = train({});
  EXPECT_FALSE(expected[0].equal(Cut()->parameters()[0]));
  for (const auto& options : {ZeroRedundancyOptions{.overlap = Overlap::kUpdate},
                              ZeroRedundancyOptions{.overlap = Overlap::kUpdate, .share_parameters = true}}) {
    const auto trained = train(options);
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(trained[i].equal(expected[i])) << "weight" << i;
  }
}

TEST(SharedParameters, MayHaveOneElementWithAnyStride) {
  run_threads(2,
              [](ProcessGroup world) {
                Odd model(torch::ones({7}).as_strided({1}, {7}));
                DistributedDataParallel ddp(model, world);
                ZeroRedundancyOptimizer<FusedSGD> optimizer(ddp, torch::optim::SGDOptions(0.25),
                                                            {.share_parameters = true});
                ddp(torch::ones({4})).backward();
                optimizer.step();
                EXPECT_TRUE(model->odd.equal(torch::full({1}, 0.75)));
                EXPECT_TRUE(model->plain.equal(torch::full({4}, 0.75)));
              },
              {.backend = "shm"});
}

}  // namespace
}  // namespace lockstep
