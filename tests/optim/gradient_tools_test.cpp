#include <lockstep/gradient_tools.h>

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "optim/stepping.h"
#include "support/messages.h"

namespace lockstep {
namespace {

TEST(ClipGradNorm, ScalesAsLibTorchDoes) {
  for (auto device : devices_under_test())
    for (double norm_type : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()})
      for (double max_norm : {0.0, 0.5, 1e9}) {
        const auto actual = make_parameters(torch::kDouble, device), expected = make_parameters(torch::kDouble, device);
        set_gradients(actual, 0);
        set_gradients(expected, 0);
        const auto norm = clip_grad_norm_(actual, max_norm, {.norm_type = norm_type});
        EXPECT_NEAR(norm.item<double>(), torch::nn::utils::clip_grad_norm_(expected, max_norm, norm_type), 1e-9);
        EXPECT_EQ(norm.device(), device);
        EXPECT_FALSE(actual[1].grad().defined());
        for (size_t i = 0; i < actual.size(); ++i) {
          if (i == 1) continue;
          EXPECT_LE(relative_difference(actual[i].grad(), expected[i].grad()), 1e-12);
        }
      }
}

TEST(ClipGradNorm, TakesGradientsOfSeveralDtypesAndDevices) {
  std::vector<torch::Tensor> parameters;
  double squares = 0;
  for (auto device : devices_under_test())
    for (auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
      parameters.push_back(torch::zeros({4}, torch::dtype(dtype).device(device).requires_grad(true)));
      parameters.back().mutable_grad() = torch::full({4}, 2, torch::dtype(dtype).device(device));
      squares += 16;
    }
  EXPECT_NEAR(clip_grad_norm_(parameters, 1).item<double>(), std::sqrt(squares), 1e-6);
  for (const auto& parameter : parameters)
    EXPECT_NEAR(parameter.grad()[0].item<double>(), 2 / std::sqrt(squares), 4e-3) << parameter.scalar_type();
}

TEST(ClipGradNorm, CountsAParameterOnce) {
  const auto parameter = torch::ones({1}, torch::requires_grad());
  parameter.mutable_grad() = torch::full({1}, 4.0);
  EXPECT_EQ(clip_grad_norm_({parameter, parameter}, 2).item<double>(), 4);
  EXPECT_NEAR(parameter.grad().item<double>(), 2, 1e-5);
}

TEST(ClipGradNorm, TellsWhenTheNormIsNotFinite) {
  const auto parameter = torch::ones({2}, torch::requires_grad());
  EXPECT_EQ(clip_grad_norm_({parameter}, 1).item<double>(), 0) << "without gradients";
  parameter.mutable_grad() = torch::tensor({1.0f, NAN});
  expect_error<Error>([&] { clip_grad_norm_({parameter}, 1, {.error_if_nonfinite = true}); }, "nan", "not finite");
  EXPECT_EQ(parameter.grad()[0].item<float>(), 1);
  expect_error<UsageError>([&] { clip_grad_norm_({parameter}, -1); }, "max_norm is -1");
  EXPECT_TRUE(std::isnan(clip_grad_norm_({parameter}, 1).item<double>()));
}

TEST(ClipGradValue, LimitsAsLibTorchDoes) {
  for (auto device : devices_under_test())
    for (auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16})
      for (double limit : {0.0, 0.5, 1e9}) {
        const auto actual = make_parameters(dtype, device), expected = make_parameters(dtype, device);
        set_gradients(actual, 0);
        set_gradients(expected, 0);
        clip_grad_value_(actual, limit);
        torch::nn::utils::clip_grad_value_(expected, limit);
        EXPECT_FALSE(actual[1].grad().defined());
        for (size_t i = 0; i < actual.size(); ++i) {
          if (i == 1) continue;
          EXPECT_TRUE(torch::equal(actual[i].grad(), expected[i].grad())) << dtype << ", " << limit;
        }
      }
}

TEST(ClipGradValue, TakesSeveralDtypesAndKeepsNan) {
  std::vector<torch::Tensor> parameters;
  for (auto device : devices_under_test())
    for (auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
      if (dtype == torch::kHalf && device.is_cpu()) continue;  // LibTorch 1.13 cannot clamp it there
      parameters.push_back(torch::zeros({4}, torch::dtype(dtype).device(device).requires_grad(true)));
      parameters.back().mutable_grad() = torch::tensor({-4.0f, 0.25f, 4.0f, NAN}).to(device, dtype);
    }
  clip_grad_value_(parameters, 2);
  for (const auto& parameter : parameters) {
    const auto gradient = parameter.grad().cpu().to(torch::kDouble);
    EXPECT_TRUE(gradient.slice(0, 0, 3).equal(torch::tensor({-2.0, 0.25, 2.0}, torch::kDouble))) << gradient;
    EXPECT_TRUE(std::isnan(gradient[3].item<double>()));
  }
  clip_grad_value_({torch::ones({2}, torch::requires_grad())}, 1);  // without a gradient
  expect_error<UsageError>([&] { clip_grad_value_(parameters, -1); }, "max_value is -1");
  expect_error<UsageError>([&] { clip_grad_value_(parameters, NAN); }, "max_value is nan");
  parameters[0].mutable_grad() = torch::ones({4}).to_sparse();
  expect_error<UsageError>([&] { clip_grad_value_(parameters, 1); }, "clip_grad_value_", "sparse");
}

TEST(DropZeroGradients, LeavesWhatIsNotZero) {
  for (auto device : devices_under_test()) {
    std::vector<torch::Tensor> parameters;
    for (int i = 0; i < 4; ++i) parameters.push_back(torch::ones({3}, torch::device(device).requires_grad(true)));
    parameters[0].mutable_grad() = torch::zeros({3}, device);
    parameters[1].mutable_grad() = torch::tensor({0.0f, 0.0f, 1e-30f}).to(device);
    parameters[3].mutable_grad() = torch::tensor({0.0f, NAN, 0.0f}).to(device);
    EXPECT_EQ(drop_zero_gradients(parameters), 1u);
    EXPECT_FALSE(parameters[0].grad().defined());
    EXPECT_TRUE(parameters[1].grad().defined());
    EXPECT_TRUE(parameters[3].grad().defined());
    EXPECT_EQ(drop_zero_gradients(parameters), 0u);
    parameters[0].mutable_grad() = torch::zeros({3}, device);
    EXPECT_EQ(drop_zero_gradients({parameters[0], parameters[0], parameters[1]}), 1u) << "one is listed twice";
    EXPECT_TRUE(parameters[1].grad().defined());
    EXPECT_EQ(drop_zero_gradients({}), 0u);
  }
}

}  // namespace
}  // namespace lockstep
