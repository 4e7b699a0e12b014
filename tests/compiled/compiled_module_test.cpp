// CompiledModule against the same models in Python, which export_models.py has compiled and trained.

#include <lockstep/compiled_module.h>

#include <cstdlib>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/autocast.h>
#include <lockstep/checkpoint_file.h>
#include <lockstep/error.h>
#include <lockstep/module_state.h>

#include "compiled/exported.h"
#include "support/messages.h"
#include "support/python.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::HasSubstr;
using torch::Tensor;

/// A model, and the largest difference to Python's results that rounding explains, relative to the largest element.
struct Case {
  const char* model;
  double tolerance;
};

class CompiledModules : public testing::TestWithParam<Case> {};

TEST_P(CompiledModules, ComputeTheLossAndGradientsOfPython) {
  const auto [name, tolerance] = GetParam();
  const Exported exported(name);
  auto net = exported.load();
  ASSERT_TRUE(net->has_loss());
  const auto loss = exported.call(net);
  EXPECT_LT(difference(loss, exported.tensor("loss")), tolerance);
  loss.backward();
  expect_gradients(*net, exported.reference().at("gradients"), tolerance);
  const auto& buffers = exported.reference().at("buffers");
  for (const auto& [key, value] : buffers.items())
    EXPECT_LT(difference(net->named_buffers()[key.as_string()], value.tensor()), tolerance) << key.as_string();
}

TEST_P(CompiledModules, EvaluateAsPythonDoes) {
  const auto [name, tolerance] = GetParam();
  const Exported exported(name);
  auto net = exported.load();
  exported.call(net);  // changes the statistics of BatchNorm
  net->eval();
  const auto output = net(exported.inputs()[0]).toTensor();
  EXPECT_FALSE(output.requires_grad());
  EXPECT_LT(difference(output, exported.tensor("evaluation")), tolerance);
}

INSTANTIATE_TEST_SUITE_P(Models, CompiledModules,
                         testing::Values(Case{"mlp", 1e-10}, Case{"batch_norm", 1e-10}, Case{"tied", 1e-5},
                                         Case{"unused", 1e-10}),
                         [](const auto& info) { return std::string(info.param.model); });

TEST(CompiledModule, HasTheStateDictOfPython) {
  for (const char* name : {"tied", "batch_norm", "unused"}) {
    const Exported exported(name);
    const auto net = exported.load();
    const auto own = state_dict(*net);
    const auto& expected = exported.reference().at("state_dict");
    ASSERT_EQ(own.size(), expected.size()) << name;
    for (const auto& [key, value] : expected.items())
      EXPECT_TRUE(own.at(key).tensor().equal(value.tensor())) << name << " " << key.as_string();
  }
}

TEST(CompiledModule, SharesTiedParameters) {
  const auto net = Exported("tied").load();
  const auto parameters = net->named_parameters();
  EXPECT_TRUE(parameters["head.weight"].is_same(parameters["embedding.weight"]));
}

TEST(CompiledModule, ReturnsResultsAsPythonDoes) {
  const Exported exported("outputs");
  auto net = exported.load();
  auto inputs = exported.inputs();
  inputs[0].requires_grad_();
  const auto result = net(inputs[0], inputs[1]).toGenericDict();
  const auto hidden = result.at("hidden").toTupleRef().elements();
  const auto& expected = exported.reference().at("outputs");
  EXPECT_LT(difference(result.at("sum").toTensor(), expected.at("sum").tensor()), 1e-10);
  EXPECT_LT(difference(hidden[0].toTensor(), expected.at("hidden").at(0).tensor()), 1e-10);
  EXPECT_TRUE(hidden[1].toTensor().equal(inputs[0]));
  EXPECT_EQ(net->named_buffers()["calls"].item<int64_t>(), 1) << "forward assigns to it";

  // As in export_models.py. `sum` is used twice, and `hidden` through a transposed view.
  (result.at("sum").toTensor().pow(2).sum() + hidden[0].toTensor().t().sin().sum()).backward();
  expect_gradients(*net, exported.reference().at("gradients"), 1e-10);
  EXPECT_LT(difference(inputs[0].grad(), exported.tensor("input_gradient")), 1e-10);
}

TEST(CompiledModule, ComputesGradientsOfTheOutputsThatAreUsed) {
  const Exported exported("outputs");
  auto net = exported.load();
  const auto inputs = exported.inputs();
  const auto result = net(inputs[0], inputs[1]).toGenericDict();
  result.at("sum").toTensor().sum().backward();
  const auto weight = net->named_parameters()["weight"];
  const auto hidden = inputs[0].matmul(weight);
  const auto expected = torch::autograd::grad({(hidden.sin().sum(1) * inputs[1]).sum()}, {weight})[0];
  EXPECT_LT(difference(weight.grad(), expected), 1e-10);
}

TEST(CompiledModule, HasAGraphForEachSize) {
  const Exported exported("mlp");
  auto net = exported.load();
  ASSERT_EQ(net->inputs().size(), 2u);
  const auto inputs = exported.inputs();
  const auto half = net(inputs[0].slice(0, 0, 2), inputs[1].slice(0, 0, 2)).toTensor();
  const auto other_half = net(inputs[0].slice(0, 2), inputs[1].slice(0, 2)).toTensor();
  EXPECT_LT(difference((half + other_half) / 2, net(inputs[0], inputs[1]).toTensor()), 1e-10);
}

// Generated loops read the input's memory, unlike matrix products, which LibTorch computes.
TEST(CompiledModule, TakesInputsThatAreNotContiguous) {
  auto net = Exported("dropout").load();
  net->eval();  // returns the input, times ones
  const auto input = torch::arange(16.0 * 64).reshape({16, 64}).to(torch::kFloat);
  const auto strided = input.t().contiguous().t();
  ASSERT_FALSE(strided.is_contiguous());
  EXPECT_TRUE(net(strided).toTensor().equal(input));
  EXPECT_TRUE(net(torch::_neg_view(-input)).toTensor().equal(input));
}

TEST(CompiledModule, AccumulatesGradients) {
  const Exported exported("mlp");
  auto net = exported.load();
  exported.call(net).backward();
  const auto parameter = net->parameters()[0];
  const auto once = parameter.grad().clone();
  exported.call(net).backward();
  EXPECT_LT(difference(parameter.grad(), 2 * once), 1e-10);
  auto loss = exported.call(net);
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
  EXPECT_LT(difference(parameter.grad(), 4 * once), 1e-10);
}

TEST(CompiledModule, ComputesNoGradientsUnderNoGradGuard) {
  const Exported exported("mlp");
  auto net = exported.load();
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(exported.call(net).requires_grad());
}

// --- random numbers

TEST(CompiledModule, DropsElementsByTheDefaultGenerator) {
  const Exported exported("dropout");
  auto net = exported.load();
  const auto ones = exported.inputs()[0];
  torch::manual_seed(5);
  const auto first = net(ones).toTensor(), second = net(ones).toTensor();
  torch::manual_seed(5);
  const auto again = net(ones).toTensor();
  torch::manual_seed(6);
  const auto other = net(ones).toTensor();
  EXPECT_TRUE(again.equal(first));
  EXPECT_FALSE(second.equal(first)) << "each call draws new numbers";
  EXPECT_FALSE(other.equal(first)) << "ranks with other seeds drop other elements";
  const double dropped = (first == 0).to(torch::kDouble).mean().item<double>();
  EXPECT_NEAR(dropped, 0.5, 0.1);
  net->eval();
  EXPECT_TRUE(net(ones).toTensor().equal(ones));
}

TEST(CompiledModule, UsesTheMaskOfForwardInBackward) {
  const Exported exported("dropout");
  auto net = exported.load();
  const auto ones = exported.inputs()[0];
  const auto output = net(ones).toTensor();
  net(ones);  // draws other numbers before backward
  output.sum().backward();
  EXPECT_TRUE(net->parameters()[0].grad().equal(output.detach().sum(0))) << "the output is the mask";
}

// --- Python and back

TEST(CompiledModule, TradesCheckpointsWithTheModelInPython) {
  const char* python = std::getenv("LOCKSTEP_TEST_PYTHON");
  const Exported exported("batch_norm");
  const TemporaryFolder folder;
  auto net = exported.load();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  exported.call(net).backward();
  optimizer.step();
  save_checkpoint((folder.path() / "trained.pt").string(), state_dict(*net));
  ASSERT_EQ(run_python(python, "compiled/train_on.py", {exported.name(), folder.path().string()}), 0);

  // Python has made another step with the model in eager mode, from the checkpoint.
  optimizer.zero_grad();
  exported.call(net).backward();
  optimizer.step();
  const auto expected = load_checkpoint((folder.path() / "trained_on.pt").string());
  const auto trained = state_dict(*net);
  for (const auto& [key, value] : trained.items())
    EXPECT_LT(difference(value.tensor(), expected.at(key).tensor()), 1e-10) << key.as_string();
  auto other = exported.load();
  load_state_dict(*other, expected);
  const auto loaded = state_dict(*other);
  for (const auto& [key, value] : expected.items())
    EXPECT_TRUE(loaded.at(key).tensor().equal(value.tensor())) << key.as_string();
}

// --- refusals

TEST(CompiledModule, RefusesInputsThatItWasNotCompiledFor) {
  const Exported exported("mlp");
  auto net = exported.load();
  const auto inputs = exported.inputs();
  expect_error<UsageError>([&] { net(inputs[0].slice(0, 1), inputs[1].slice(0, 1)); }, "CompiledModule Sequential",
                           "in training mode it was compiled for inputs (float64 [4, 8], int64 [4]) "
                           "and (float64 [2, 8], int64 [2])",
                           "got (float64 [3, 8], int64 [3])");
  expect_error<UsageError>([&] { net(inputs[0].to(torch::kFloat), inputs[1]); }, "got (float32 [4, 8], int64 [4])");
  expect_error<UsageError>([&] { net(inputs[0]); }, "got (float64 [4, 8])");
  expect_error<UsageError>([&] { net(inputs[0], Tensor()); }, "undefined tensor");
  expect_error<UsageError>([&] { net(inputs[0].to(torch::kMeta), inputs[1]); }, "input 0 is on meta");
  expect_error<UsageError>([&] { net(inputs[0].clone().requires_grad_(), inputs[1]); },
                           "input 0 requires a gradient, which the compiled model does not compute");
  expect_error<UsageError>([&] { net(inputs[0].to_sparse(), inputs[1]); }, "got (float64 [4, 8], int64 [4])");
  net->eval();
  expect_error<UsageError>([&] { net(inputs[0], inputs[1]); },
                           "in evaluation mode it was compiled for inputs "
                           "(float64 [4, 8]) and (float64 [2, 8])");
}

TEST(CompiledModule, RefusesAutocast) {
  const Exported exported("mlp");
  auto net = exported.load();
  const auto guard = autocast(torch::kCPU);
  expect_error<UsageError>([&] { exported.call(net); }, "autocast is enabled", "--autocast");
}

TEST(CompiledModule, RefusesParametersThatHaveChangedTheirKind) {
  const Exported exported("mlp");
  auto frozen = exported.load();
  frozen->named_parameters()["0.bias"].requires_grad_(false);
  expect_error<UsageError>([&] { exported.call(frozen); }, "parameter '0.bias' was trained when the model was compiled",
                           "is frozen now");
  {
    const torch::NoGradGuard no_grad;
    EXPECT_NO_THROW(exported.call(frozen));  // no gradients are asked for
  }
  auto converted = exported.load();
  converted->to(torch::kFloat);
  expect_error<UsageError>([&] { exported.call(converted); }, "'0.weight' is float32 [16, 8]", "compiled as float64");
  auto transposed = exported.load();
  auto weight = transposed->named_parameters()["0.weight"];
  weight.set_data(weight.detach().t().contiguous().t());
  expect_error<UsageError>([&] { exported.call(transposed); }, "'0.weight' has strides [1, 16]", "[8, 1]");
  auto thawed = Exported("unused").load();
  thawed->named_parameters()["frozen.weight"].requires_grad_(true);
  expect_error<UsageError>([&] { Exported("unused").call(thawed); }, "parameter 'frozen.weight' was frozen");
}

TEST(CompiledModule, RefusesASecondDerivativeAndASecondBackward) {
  const Exported exported("mlp");
  auto net = exported.load();
  expect_error<UsageError>(
      [&] { torch::autograd::grad({exported.call(net)}, net->parameters(), {}, true, /*create_graph=*/true); },
      "no second derivatives");
  auto loss = exported.call(net);
  loss.backward();
  expect_error<UsageError>([&] { loss.backward(); }, "backward ran a second time", "retain_graph");
}

TEST(CompiledModule, RefusesAParameterThatChangesBeforeBackward) {
  const Exported exported("mlp");
  auto net = exported.load();
  const auto loss = exported.call(net);
  {
    const torch::NoGradGuard no_grad;
    net->named_parameters()["2.weight"].mul_(2);
  }
  expect_error<UsageError>([&] { loss.backward(); }, "'2.weight' was changed in place between forward and backward");
}

TEST(CompiledModule, RefusesAnOutputThatChangesBeforeBackward) {
  const Exported exported("outputs");
  auto net = exported.load();
  const auto inputs = exported.inputs();
  const auto result = net(inputs[0], inputs[1]).toGenericDict();
  {
    const torch::NoGradGuard no_grad;
    result.at("hidden").toTupleRef().elements()[0].toTensor().mul_(2);  // a view of a tensor that backward needs
  }
  expect_error<UsageError>([&] { result.at("sum").toTensor().sum().backward(); },
                           "an input or output of the model was changed in place");
}

TEST(CompiledModule, RefusesAnotherDevice) {
  const Exported exported("mlp");
  expect_error<UsageError>([&] { CompiledModule(exported.file(), torch::Device(torch::kCUDA, 0)); },
                           "was compiled for cpu", "cuda:0");
}

TEST(CompiledModule, RefusesADamagedFile) {
  const Exported exported("mlp");
  const TemporaryFolder folder;
  const auto file = (folder.path() / "cut.pt2").string();
  auto content = contents_of(exported.file());
  content.resize(content.size() / 2);
  write(file, content);
  EXPECT_THROW(CompiledModule{file}, CheckpointError);
  expect_error<CheckpointError>([&] { CompiledModule((folder.path() / "none.pt2").string()); }, "none.pt2");
}

}  // namespace
}  // namespace lockstep
