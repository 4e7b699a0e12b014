// Models that are not plain modules, complex gradients, and the dtype of the reduction.

#include <cmath>

#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/module_state.h>
#include <lockstep/run_threads.h>
#include <lockstep/sync_batch_norm.h>

#include "parallel/gradients.h"
#include "parallel/python_oracle.h"
#include "parallel/training.h"
#include "support/messages.h"
#include "support/rank_process.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using torch::Tensor;

constexpr int kAnySteps = 10;

// --- TorchScript

torch::jit::Module counting_script() {
  torch::jit::Module script("Counting");
  script.register_parameter("scale", torch::full({3}, 2.0).requires_grad_(), false);
  script.register_buffer("calls", torch::zeros({1}));
  script.define(R"(
    def forward(self, x):
      self.calls = self.calls + 1
      return (x * self.scale, [x * self.scale * 2])
  )");
  return script;
}

TEST(ScriptModules, ThatPythonSavedTrainAsInPython) {
  const auto python = python_with_torch();
  if (python.empty()) GTEST_SKIP() << "needs Python's torch: apt-get install python3-torch";
  TemporaryFolder folder;
  const auto script = std::string(LOCKSTEP_TEST_SOURCE_DIR) + "/parallel/script_oracle.py";
  RankProcess process({python, script, folder.path().string(), std::to_string(kAnySteps)}, {});
  ASSERT_EQ(process.wait(std::chrono::minutes(1)), 0) << process.output();
  const auto expected = load_checkpoint(folder.path() / "trained.pt");

  run_threads(2, [&](ProcessGroup world) {
    DistributedDataParallel ddp(torch::jit::load((folder.path() / "model.pt").string()), world);
    EXPECT_EQ(ddp.module()->script().is_training(), true);
    torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    for (int step = 0; step < kAnySteps; ++step) {
      optimizer.zero_grad();
      const auto output = ddp(inputs_of(step, world.rank(), {6}, at::kDouble)).toTensor();
      torch::nn::functional::cross_entropy(output, targets_of(step, world.rank())).backward();
      optimizer.step();
    }
    const auto state = state_dict(*ddp.module());
    ASSERT_EQ(state.size(), expected.size());
    for (const auto& [name, value] : expected.items())
      EXPECT_LT(relative_difference(state.at(name.as_string()).tensor(), value.tensor()), 1e-10) << name.as_string();
    ddp.eval();
    EXPECT_FALSE(ddp.module()->script().is_training());
    EXPECT_EQ(ddp(torch::ones({1, 6}, at::kDouble)).toTensor().sizes(), at::IntArrayRef({1, 4}));
  });
}

TEST(ScriptModules, MayAssignToTheirBuffers) {
  run_threads(2, [&](ProcessGroup world) {
    DistributedDataParallel ddp(counting_script(), world);
    const auto calls = ddp.module()->named_buffers()["calls"];
    for (int i = 0; i < 3; ++i) {
      const auto result = ddp(torch::ones({2, 3}));
      const auto& parts = result.toTuple()->elements();
      (parts[0].toTensor().sum() + parts[1].toTensorVector()[0].sum()).backward();
    }
    EXPECT_EQ(calls.item<float>(), 3);
    EXPECT_TRUE(ddp.module()->script().attr("calls").toTensor().is_same(calls));
    EXPECT_TRUE(ddp.parameters()[0].grad().equal(torch::full({3}, 3 * 2 * 3.0)));
  });
}

// Backward needs the value from before the assignment.
TEST(ScriptModules, MayUseABufferBeforeTheyAssignToIt) {
  run_threads(2, [&](ProcessGroup world) {
    torch::jit::Module script("Decaying");
    script.register_parameter("weight", torch::ones({3}).requires_grad_(), false);
    script.register_buffer("scale", torch::ones({1}));
    script.define(R"(
      def forward(self, x):
        y = (x * self.weight) * self.scale
        self.scale = self.scale * 0.5
        return y
    )");
    DistributedDataParallel ddp(script, world);
    for (int step = 0; step < 3; ++step) {
      ddp.parameters()[0].mutable_grad().reset();
      ddp(torch::ones({3})).toTensor().sum().backward();
      EXPECT_TRUE(ddp.parameters()[0].grad().equal(torch::full({3}, std::pow(0.5, step)))) << "step " << step;
    }
    EXPECT_EQ(state_dict(*ddp.module()).at("scale").tensor().item<float>(), 0.125f);
  });
}

TEST(ScriptModules, WithBatchNormAreNotConverted) {
  run_threads(1, [&](ProcessGroup world) {
    torch::jit::Module script("Normalizing");
    script.register_buffer("norm_running_mean", torch::zeros({3}));
    ScriptModule other(script);
    EXPECT_EQ(convert_sync_batchnorm(other, world), 0);
    script.register_buffer("running_mean", torch::zeros({3}));
    ScriptModule module(script);
    expect_error<UsageError>([&] { convert_sync_batchnorm(module, world); }, "BatchNorm layers of Normalizing",
                             "are not modules of LibTorch");
  });
}

TEST(ScriptModules, LeaveTheirArgumentsAsTheyAre) {
  c10::IValue list(std::vector<Tensor>{torch::ones({1})});
  auto copy = list;
  TensorsIn<c10::IValue>::visit(copy, [](Tensor& tensor) { tensor = tensor + 1; });
  EXPECT_EQ(copy.toTensorVector()[0].item<float>(), 2);
  EXPECT_EQ(list.toTensorVector()[0].item<float>(), 1);
  const c10::IValue tuple(std::make_tuple(torch::ones({1}), 3));
  copy = tuple;
  TensorsIn<c10::IValue>::visit(copy, [](Tensor& tensor) { tensor = tensor + 1; });
  EXPECT_EQ(copy.toTupleRef().elements()[0].toTensor().item<float>(), 2);
  EXPECT_EQ(tuple.toTupleRef().elements()[0].toTensor().item<float>(), 1);
}

TEST(ScriptModules, GetTheBuffersOfRankZero) {
  run_threads(2, [&](ProcessGroup world) {
    auto script = counting_script();
    script.attr("calls").toTensor().fill_(10 + world.rank());
    DistributedDataParallel ddp(script, world);
    ddp(torch::ones({2, 3}));
    EXPECT_EQ(script.attr("calls").toTensor().item<float>(), 11);
  });
}

TEST(ScriptModules, WithAReplacedParameterAreRefused) {
  run_threads(1, [&](ProcessGroup world) {
    auto script = counting_script();
    DistributedDataParallel ddp(script, world);
    script.setattr("scale", torch::ones({3}).requires_grad_());
    expect_error<UsageError>([&] { ddp(torch::ones({2, 3})); }, "parameter 'scale'", "was replaced");
  });
}

TEST(ScriptModules, ReturnTensorsOnTheOutputDevice) {
  run_threads(1, [&](ProcessGroup world) {
    DistributedDataParallel ddp(counting_script(), world, {.output_device = torch::kMeta});
    const auto result = ddp(torch::ones({2, 3}));
    EXPECT_TRUE(result.toTuple()->elements()[0].toTensor().is_meta());
    EXPECT_TRUE(result.toTuple()->elements()[1].toTensorVector()[0].is_meta());
  });
}

// --- functions of parameters

TEST(Functions, OfParametersTrainAsOneProcess) {
  struct Regression {
    Tensor weight = torch::full({6, 4}, 0.1, at::kDouble).requires_grad_();
    Tensor bias = torch::zeros({4}, at::kDouble).requires_grad_();
    Tensor operator()(const Tensor& input) const { return input.matmul(weight) + bias; }
  };
  auto train = [](auto& model, std::vector<Tensor> parameters, int first, int last) {
    torch::optim::SGD optimizer(std::move(parameters), 0.1);
    for (int step = 0; step < kAnySteps; ++step) {
      optimizer.zero_grad();
      std::vector<Tensor> inputs, targets;
      for (int rank = first; rank <= last; ++rank) {
        inputs.push_back(inputs_of(step, rank, {6}, at::kDouble));
        targets.push_back(targets_of(step, rank));
      }
      torch::nn::functional::cross_entropy(model(torch::cat(inputs)), torch::cat(targets)).backward();
      optimizer.step();
    }
  };
  Regression alone;
  train(alone, {alone.weight, alone.bias}, 0, 1);
  run_threads(2, [&](ProcessGroup world) {
    Regression model;
    if (world.rank() == 1) model.bias.data().fill_(5);  // replaced by rank 0's
    DistributedDataParallel ddp({{"layer.weight", model.weight}, {"layer.bias", model.bias}}, model, world);
    EXPECT_EQ(ddp.named_parameters()[0].first, "layer.weight");
    train(ddp, ddp.parameters(), world.rank(), world.rank());
    EXPECT_LT(relative_difference(model.weight, alone.weight), 1e-10);
    EXPECT_LT(relative_difference(model.bias, alone.bias), 1e-10);
  });
}

TEST(Functions, HaveBuffersWithNamesOfNestedModules) {
  auto weight = torch::ones({1}).requires_grad_();
  auto identity = [](Tensor x) { return x; };
  FunctionModule module({{"a.weight", weight}}, identity,
                        {{"a.b.mean", torch::ones({2})}, {"a.b.count", torch::ones({1})}});
  const auto state = state_dict(module);
  EXPECT_EQ(state.size(), 3u);
  EXPECT_TRUE(state.at("a.b.mean").tensor().equal(torch::ones({2})));
  EXPECT_TRUE(state.at("a.weight").tensor().is_same(weight) || state.at("a.weight").tensor().equal(weight));
}

TEST(Functions, WithUnusableTensorsAreRefusedByName) {
  auto identity = [](Tensor x) { return x; };
  using Module = FunctionModule<decltype(identity)>;
  auto weight = torch::ones({1}).requires_grad_();
  expect_error<UsageError>([&] { Module({{"w", weight}, {"w", weight}}, identity); }, "'w' occurs twice");
  expect_error<UsageError>([&] { Module({{"w", Tensor()}}, identity); }, "'w' is an undefined tensor");
  expect_error<UsageError>([&] { Module({{"w", weight * 2}}, identity); }, "'w' was computed", "requires_grad_()");
  expect_error<UsageError>([&] { Module({{"w", weight}}, identity, {{"w", weight}}); }, "'w' occurs twice");
}

// --- a wrapped module as a member

struct AgentImpl : torch::nn::Module {
  AgentImpl(Mlp net, ProcessGroup world) : policy(net, world) {
    register_module("policy", policy.module());
    value = register_module("value", torch::nn::Linear(4, 1));
  }
  Tensor forward(Tensor x) { return value(policy(x)); }
  DistributedDataParallel<MlpImpl> policy;
  torch::nn::Linear value{nullptr};
};

TEST(WrappedModules, CanBeMembersOfOtherModules) {
  run_threads(2, [&](ProcessGroup world) {
    auto agent = std::make_shared<AgentImpl>(filled_mlp(), world);
    EXPECT_EQ(agent->parameters().size(), 8u);
    EXPECT_TRUE(state_dict(*agent).find("policy.first.weight"));
    agent->eval();
    EXPECT_FALSE(agent->policy->is_training());
    agent->train();
    agent->to(torch::kCPU);
    agent->forward(input_of(world.rank())).sum().backward();
    const auto gradient = agent->policy->first->weight.grad();
    ASSERT_TRUE(gradient.defined());
    EXPECT_TRUE(world.all_gather_object(gradient)[1 - world.rank()].toTensor().equal(gradient));
    agent->zero_grad();
    EXPECT_TRUE(!gradient.defined() || !agent->policy->first->weight.grad().defined() ||
                agent->policy->first->weight.grad().abs().sum().item<float>() == 0);
    agent->forward(input_of(world.rank())).sum().backward();
    EXPECT_TRUE(agent->policy->first->weight.grad().defined());
  });
}

// --- complex parameters

TEST(ComplexGradients, AreAveraged) {
  for (const bool bucket_view : {true, false})
    run_threads(2, [&](ProcessGroup world) {
      auto make = [] {
        return torch::randn({3, 5}, at::detail::createCPUGenerator(1), at::kComplexDouble).requires_grad_();
      };
      auto loss = [](const Tensor& weight, const Tensor& bias, int rank) {
        const auto input = torch::randn({4, 3}, at::detail::createCPUGenerator(50 + rank), at::kComplexDouble);
        return (torch::view_as_real(input.matmul(weight)).square().sum() * (rank + 1)) + bias.square().sum() * rank;
      };
      auto weight = make(), bias = torch::ones({3}).requires_grad_();
      if (world.rank() == 1) weight.data().zero_();
      DistributedDataParallel ddp({{"weight", weight}, {"bias", bias}},
                                  [&](int rank) { return loss(weight, bias, rank); }, world,
                                  {.gradient_as_bucket_view = bucket_view});
      for (int step = 0; step < 2; ++step) {
        for (auto& parameter : ddp.parameters()) parameter.mutable_grad().reset();
        ddp(world.rank()).backward();
        auto alone = make(), other = torch::ones({3}).requires_grad_();
        ((loss(alone, other, 0) + loss(alone, other, 1)) / 2).backward();
        ASSERT_TRUE(weight.grad().is_complex());
        EXPECT_LT((weight.grad() - alone.grad()).abs().max().item<double>(), 1e-12);
        EXPECT_TRUE(bias.grad().equal(other.grad()));
      }
    });
}

// The gradient of w.conj() is computed as a conjugate: LibTorch only sets a bit, and the memory holds other values.
TEST(ComplexGradients, OfConjugatesAreAveraged) {
  for (const bool bucket_view : {true, false})
    for (const bool find_unused : {true, false})
      for (const bool compresses : {true, false})
        for (const int64_t size : {3, 300})  // the gradients of the large one are computed in the bucket
          run_threads(2, [&](ProcessGroup world) {
            SCOPED_TRACE(testing::Message() << "bucket view " << bucket_view << ", find unused " << find_unused
                                            << ", hook " << compresses << ", size " << size);
            const auto make = [&] {
              return torch::randn({size, size}, at::detail::createCPUGenerator(1), at::kComplexDouble).requires_grad_();
            };
            const auto loss = [&](const Tensor& weight, const Tensor& other, int rank) {
              const auto input =
                  torch::randn({size, size}, at::detail::createCPUGenerator(50 + rank), at::kComplexDouble);
              return torch::view_as_real(weight.conj() * input + other * input).sum() * (rank + 1);
            };
            auto weight = make(), other = make();
            DistributedDataParallel ddp(
                {{"weight", weight}, {"other", other}}, [&](int rank) { return loss(weight, other, rank); }, world,
                {.find_unused_parameters = find_unused, .gradient_as_bucket_view = bucket_view});
            if (compresses)
              ddp.register_comm_hook([](const GradientBucket& bucket, const ProcessGroup& group) {
                auto work = group.all_reduce_async(bucket.buffer, ReduceOp::kAvg);
                return [work] { work.wait(); };
              });
            auto alone = make(), alone_other = make();
            ((loss(alone, alone_other, 0) + loss(alone, alone_other, 1)) / 2).backward();
            for (int step = 0; step < 4; ++step) {
              for (auto& parameter : ddp.parameters()) parameter.mutable_grad().reset();
              ddp(world.rank()).backward();
              EXPECT_LT((weight.grad() - alone.grad()).abs().max().item<double>(), 1e-12) << "step " << step;
              EXPECT_LT((other.grad() - alone_other.grad()).abs().max().item<double>(), 1e-12) << "step " << step;
              const auto twice = 2 * alone.grad();
              ddp(world.rank()).backward();  // adds to the gradient
              EXPECT_LT((weight.grad() - twice).abs().max().item<double>(), 1e-12) << "step " << step;
            }
          });
}

TEST(ComplexGradients, AreApproximatedByPowerSgd) {
  run_threads(2, [&](ProcessGroup world) {
    auto weight = torch::zeros({8, 8}, at::kComplexDouble).requires_grad_();
    auto bias = torch::zeros({3}, at::kComplexDouble).requires_grad_();
    const auto left = torch::randn({8, 1}, at::detail::createCPUGenerator(1), at::kComplexDouble);
    const auto right = torch::randn({1, 8}, at::detail::createCPUGenerator(2), at::kDouble);
    // The gradient has rank 2 as a matrix of real numbers.
    auto loss = [&](double by) {
      return by * (torch::view_as_real(weight * (left * right)).sum() + torch::view_as_real(bias).sum());
    };
    DistributedDataParallel ddp({{"weight", weight}, {"bias", bias}}, loss, world);
    ddp.register_comm_hook(power_sgd({.rank = 4, .start_iteration = 0, .min_compression_rate = 1}));
    ddp(world.rank() + 1.0).backward();
    auto alone = torch::zeros({8, 8}, at::kComplexDouble).requires_grad_();
    (1.5 * torch::view_as_real(alone * (left * right)).sum()).backward();
    EXPECT_LT((weight.grad() - alone.grad()).abs().max().item<double>(), 1e-10);
    EXPECT_TRUE(torch::view_as_real(bias.grad()).equal(torch::full({3, 2}, 1.5, at::kDouble)));
  });
}

// --- the dtype of the reduction

TEST(ReduceDtype, SumsHalfPrecisionGradientsInFloat32) {
  constexpr int kRanks = 4;
  run_threads(kRanks, [&](ProcessGroup world) {
    // Of 256 + 1 + 1 + 1, bfloat16 would round the sum to 258 or 260; the mean of the exact sum is 64.75.
    auto weight = torch::ones({8}, at::kBFloat16).requires_grad_();
    auto scale = [&](double by) { return (weight * by).sum(); };
    for (const bool bucket_view : {true, false}) {
      DistributedDataParallel ddp({{"w", weight}}, scale, world,
                                  {.gradient_as_bucket_view = bucket_view, .reduce_dtype = at::kFloat});
      at::ScalarType reduced = at::kByte;
      ddp.register_comm_hook([&](const GradientBucket& bucket, const ProcessGroup& group) {
        reduced = bucket.buffer.scalar_type();
        EXPECT_EQ(bucket.gradients[0].scalar_type(), at::kFloat);
        auto work = group.all_reduce_async(bucket.buffer, ReduceOp::kAvg);
        return [work] { work.wait(); };
      });
      for (int step = 0; step < 2; ++step) {
        weight.mutable_grad().reset();
        ddp(world.rank() == 0 ? 256.0 : 1.0).backward();
        EXPECT_EQ(weight.grad().scalar_type(), at::kBFloat16);
        EXPECT_TRUE(weight.grad().equal(torch::full({8}, 64.75, at::kBFloat16)));
      }
      EXPECT_EQ(reduced, at::kFloat);
    }
  });
}

TEST(ReduceDtype, MayBeNarrowerThanTheParameters) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, {.reduce_dtype = at::kBFloat16});
    const auto means = mean_gradients(2);
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      ddp(input_of(world.rank())).square().sum().backward();
      for (size_t i = 0; i < means.size(); ++i) {
        const auto gradient = model->parameters()[i].grad();
        EXPECT_EQ(gradient.scalar_type(), at::kFloat);
        EXPECT_TRUE(gradient.equal(gradient.to(at::kBFloat16).to(at::kFloat))) << "not rounded";
        EXPECT_LT(relative_difference(gradient, means[i]), 1e-2);
      }
    }
    expect_error<UsageError>([&] { DistributedDataParallel other(model, world, {.reduce_dtype = at::kInt}); },
                             "reduce_dtype is Int", "bfloat16");
  });
}

}  // namespace
}  // namespace lockstep
