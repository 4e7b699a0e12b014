#include <lockstep/sync_batch_norm.h>

#include <mutex>
#include <numeric>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/run_threads.h>

#include "parallel/models.h"
#include "parallel/normalizing.h"
#include "parallel/training.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

/// Compares a layer over ranks whose batches have these sizes with `alone`, the same in one process on all of the
/// batch. `make` makes the layer of a rank.
template <class Alone, class Make>
void expect_as_alone(const std::string& backend, const std::vector<int64_t>& sizes, const std::vector<int64_t>& sample,
                     at::ScalarType dtype, double tolerance, const Alone& alone, const Make& make) {
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  std::vector<int64_t> shape{total};
  shape.insert(shape.end(), sample.begin(), sample.end());
  const auto input = random(shape, 1, dtype), gradient = random(shape, 2, dtype);
  const auto expected = pass(alone, input, gradient);
  run_threads(static_cast<int>(sizes.size()),
              [&](ProcessGroup world) {
                const auto share = share_of(sizes, world.rank());
                const auto actual = pass(make(world), part(input, share), part(gradient, share));
                expect_near(actual.output, part(expected.output, share), tolerance, "output");
                expect_near(actual.input_gradient, part(expected.input_gradient, share), tolerance, "input's gradient");
                expect_near(actual.running_mean, expected.running_mean, tolerance, "running mean");
                expect_near(actual.running_var, expected.running_var, tolerance, "running variance");
                for (auto [mine, all, what] : {std::tuple(actual.weight_gradient, expected.weight_gradient, "weight's"),
                                               std::tuple(actual.bias_gradient, expected.bias_gradient, "bias's")}) {
                  if (mine.defined()) world.all_reduce(mine);
                  expect_near(mine, all, tolerance, what);
                }
              },
              {.backend = backend});
}

class SyncBatchNormOver : public testing::TestWithParam<std::string> {};

TEST_P(SyncBatchNormOver, NormalizesByTheBatchesOfAllRanks) {
  const BatchNormOptions options(3);
  const auto synced = [&](const ProcessGroup& world) { return converted<torch::nn::BatchNorm2d>(options, world); };
  for (const auto& sizes : {std::vector<int64_t>{4, 4}, {2, 7, 5}, {3, 0, 6}, {0, 0, 5, 3}})
    expect_as_alone(GetParam(), sizes, {3, 4, 5}, torch::kDouble, 1e-12, filled<torch::nn::BatchNorm2d>(options),
                    synced);
}

INSTANTIATE_TEST_SUITE_P(Backends, SyncBatchNormOver, testing::ValuesIn(backends_under_test()),
                         [](const auto& info) { return info.param; });

TEST(SyncBatchNormTest, ConvertsLayersOfAllDimensions) {
  const BatchNormOptions options(3);
  const auto check = [&]<class Layer>(Layer alone, const std::vector<int64_t>& sample) {
    expect_as_alone("threads", {3, 5}, sample, torch::kDouble, 1e-12, alone,
                    [&](const ProcessGroup& world) { return converted<Layer>(options, world); });
  };
  check(filled<torch::nn::BatchNorm1d>(options), {3});
  check(filled<torch::nn::BatchNorm1d>(options), {3, 6});
  check(filled<torch::nn::BatchNorm2d>(options), {3, 2, 2});
  check(filled<torch::nn::BatchNorm3d>(options), {3, 2, 3, 2});
}

TEST(SyncBatchNormTest, FollowsTheOptionsOfTheLayer) {
  for (const auto& options : {BatchNormOptions(3).affine(false), BatchNormOptions(3).track_running_stats(false),
                              BatchNormOptions(3).momentum(torch::nullopt), BatchNormOptions(3).momentum(0.4).eps(0.3)})
    expect_as_alone("threads", {3, 5}, {3, 4}, torch::kDouble, 1e-12, filled<torch::nn::BatchNorm1d>(options),
                    [&](const ProcessGroup& world) { return converted<torch::nn::BatchNorm1d>(options, world); });
}

TEST(SyncBatchNormTest, WorksInOtherPrecisions) {
  const BatchNormOptions options(3);
  for (auto [dtype, tolerance] : {std::pair(torch::kFloat, 2e-6), std::pair(torch::kBFloat16, 2e-2)}) {
    // LibTorch on CPUs does not take 16 bits everywhere, so one process does the same in 32.
    const auto input = random({8, 3, 4}, 1, dtype), gradient = random({8, 3, 4}, 2, dtype);
    auto alone = filled<torch::nn::BatchNorm1d>(options, dtype);
    alone->to(torch::kFloat);
    const auto expected = pass(alone, input.to(torch::kFloat), gradient.to(torch::kFloat));
    run_threads(2, [&, dtype = dtype, tolerance = tolerance](ProcessGroup world) {
      const Share share{world.rank() * 4, 4};
      auto layer = converted<torch::nn::BatchNorm1d>(options, world, dtype);
      const auto actual = pass(layer, part(input, share), part(gradient, share));
      EXPECT_EQ(actual.output.scalar_type(), dtype);
      EXPECT_EQ(actual.input_gradient.scalar_type(), dtype);
      EXPECT_LE(relative_difference(actual.output, part(expected.output, share)), tolerance);
      EXPECT_LE(relative_difference(actual.input_gradient, part(expected.input_gradient, share)), tolerance);
      EXPECT_LE(relative_difference(actual.running_var, expected.running_var), tolerance);
      auto weight_gradient = actual.weight_gradient.to(torch::kFloat);
      world.all_reduce(weight_gradient);
      EXPECT_LE(relative_difference(weight_gradient, expected.weight_gradient), tolerance);
    });
  }
}

TEST(SyncBatchNormTest, TakesInputsOfAnyLayout) {
  const BatchNormOptions options(3);
  const auto input = random({8, 3, 4, 4}, 1), gradient = random({8, 3, 4, 4}, 2);
  const auto expected = pass(filled<torch::nn::BatchNorm2d>(options), input, gradient);
  run_threads(2, [&](ProcessGroup world) {
    const Share share{world.rank() * 4, 4};
    for (auto of : {+[](const torch::Tensor& x) { return x.contiguous(at::MemoryFormat::ChannelsLast); },
                    +[](const torch::Tensor& x) { return x.transpose(2, 3).contiguous().transpose(2, 3); }}) {
      auto layer = converted<torch::nn::BatchNorm2d>(options, world);
      const auto actual = pass(layer, of(part(input, share)), of(part(gradient, share)));
      EXPECT_LE(relative_difference(actual.output, part(expected.output, share)), 1e-12);
      EXPECT_LE(relative_difference(actual.input_gradient, part(expected.input_gradient, share)), 1e-12);
    }
  });
}

TEST(SyncBatchNormTest, TheModuleTakesOneValueForEachChannel) {
  for (const auto& options : {BatchNormOptions(3), BatchNormOptions(3).momentum(torch::nullopt),
                              BatchNormOptions(3).affine(false).track_running_stats(false)})
    expect_as_alone("threads", {1, 1, 1}, {3}, torch::kDouble, 1e-12, filled<torch::nn::BatchNorm1d>(options),
                    [&](const ProcessGroup& world) {
                      SyncBatchNorm layer(options, world);
                      if (layer->weight.defined()) fill_parameters(*layer, 7);
                      layer->to(torch::kDouble);
                      return layer;
                    });
}

/// A model whose only layer sees the inputs themselves, which need no gradient.
struct FirstLayerImpl : torch::nn::Module {
  FirstLayerImpl() {
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    head = register_module("head", torch::nn::Linear(6, 4));
  }
  torch::Tensor forward(torch::Tensor x) { return head(norm(x)); }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(FirstLayer);

/// Ranks whose batches have these sizes, of 5 samples at most, against one process that has them all. The loss is
/// summed, and divided by the mean number of samples of a rank.
template <class Model>
void expect_trains_as_alone(const std::vector<int64_t>& sample, const std::vector<int64_t>& sizes, int64_t layers) {
  constexpr int kSteps = 10;
  const auto ranks = static_cast<int>(sizes.size());
  const double total = std::accumulate(sizes.begin(), sizes.end(), 0.0);
  const auto filled_model = [] {
    Model model;
    fill_parameters(*model, 1);
    model->to(torch::kDouble);
    return model;
  };
  const auto batch_of = [&](int step, int rank) {
    const Share share{0, sizes[rank]};
    return std::pair(part(inputs_of(step, rank, sample, torch::kDouble), share), part(targets_of(step, rank), share));
  };
  const auto step_on = [](auto&& forward, torch::optim::Optimizer& optimizer, const torch::Tensor& inputs,
                          const torch::Tensor& targets, double samples) {
    optimizer.zero_grad();
    (torch::cross_entropy_loss(forward(inputs), targets, {}, at::Reduction::Sum) / samples).backward();
    optimizer.step();
  };
  auto alone = filled_model();
  auto alone_optimizer = make_optimizer("momentum", alone->parameters());
  for (int step = 0; step < kSteps; ++step) {
    std::vector<torch::Tensor> all_inputs, all_targets;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto [inputs, targets] = batch_of(step, rank);
      all_inputs.push_back(inputs);
      all_targets.push_back(targets);
    }
    step_on(alone, *alone_optimizer, torch::cat(all_inputs), torch::cat(all_targets), total);
  }
  run_threads(ranks, [&](ProcessGroup world) {
    auto model = filled_model();
    EXPECT_EQ(convert_sync_batchnorm(*model, world), layers);
    DistributedDataParallel ddp(model, world, {.buckets = {100, 200}});
    auto optimizer = make_optimizer("momentum", ddp.parameters());
    for (int step = 0; step < kSteps; ++step) {
      const auto [inputs, targets] = batch_of(step, world.rank());
      step_on(ddp, *optimizer, inputs, targets, total / ranks);
    }
    for (const auto& item : alone->named_parameters())
      EXPECT_LE(relative_difference(model->named_parameters()[item.key()], item.value()), 1e-12) << item.key();
    for (const auto& item : alone->named_buffers())
      EXPECT_LE(relative_difference(model->named_buffers()[item.key()], item.value()), 1e-12) << item.key();
  });
}

TEST(SyncBatchNormTest, AModelTrainsAsOneProcessDoesOnAllOfTheBatch) {
  expect_trains_as_alone<ConvNet>({1, 6, 6}, {5, 5, 5}, 1);
  expect_trains_as_alone<ConvNet>({1, 6, 6}, {2, 5, 3}, 1);
  expect_trains_as_alone<FirstLayer>({6}, {4, 4, 4}, 1);
  expect_trains_as_alone<Mlp>({6}, {5, 5, 5}, 0);
}

/// A layer behind which one parameter is used, or not.
struct MayUseImpl : torch::nn::Module {
  MayUseImpl() {
    first = register_module("first", torch::nn::Linear(6, 6));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    last = register_module("last", torch::nn::Linear(6, 6));
  }
  torch::Tensor forward(torch::Tensor x, bool uses_last) {
    x = norm(first(x));
    return uses_last ? last(x) : x;
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(MayUse);

/// Trains over a group with layers over `group_of_layers`.
void expect_ranks_may_leave_out_parameters(
    const std::function<ProcessGroup(const ProcessGroup& world)>& group_of_layers) {
  run_threads(2, [&](ProcessGroup world) {
    MayUse model;
    fill_parameters(*model, 1);
    model->to(torch::kDouble);
    convert_sync_batchnorm(*model, group_of_layers(world));
    DistributedDataParallel ddp(model, world, {.find_unused_parameters = true, .buckets = {64, 64}});
    for (int step = 0; step < 4; ++step) {  // from the second on, buckets are reduced as gradients come
      const bool uses_last = (world.rank() + step) % 2 == 0;
      ddp(inputs_of(step, world.rank(), {6}, torch::kDouble), uses_last).square().sum().backward();
      auto gradient = model->first->weight.grad().clone();
      world.broadcast(gradient, 0);
      EXPECT_TRUE(torch::equal(gradient, model->first->weight.grad()));
    }
  });
}

TEST(SyncBatchNormTest, DoesNotMindWhichParametersRanksLeaveOut) {
  expect_ranks_may_leave_out_parameters([](const ProcessGroup& world) { return world; });
  expect_ranks_may_leave_out_parameters([](const ProcessGroup& world) { return world.new_group({0, 1}); });
}

TEST(SyncBatchNormTest, BackwardIsCollectiveOnlyWhereTheInputNeedsAGradient) {
  run_threads(2, [](ProcessGroup world) {
    auto layer = converted<torch::nn::BatchNorm1d>(BatchNormOptions(3), world);
    const auto output = layer(random({4, 3}, 1));
    if (world.rank() == 0) output.sum().backward();  // the other rank makes no call
    EXPECT_EQ(layer->weight.grad().defined(), world.rank() == 0);
  });
}

TEST(SyncBatchNormTest, InEvaluationEachRankIsOnItsOwn) {
  run_threads(2, [](ProcessGroup world) {
    for (const auto& options : {BatchNormOptions(3), BatchNormOptions(3).track_running_stats(false)}) {
      auto layer = converted<torch::nn::BatchNorm1d>(options, world);
      auto plain = filled<torch::nn::BatchNorm1d>(options);
      SyncBatchNorm module(options, world);
      fill_parameters(*module, 7);
      module->to(torch::kDouble);
      for (torch::nn::Module* each : std::vector<torch::nn::Module*>{&*layer, &*plain, &*module}) each->eval();
      if (world.rank() == 0) {  // the other rank makes no call
        const auto input = random({5, 3}, 3);
        EXPECT_TRUE(torch::equal(layer(input), plain(input)));
        EXPECT_TRUE(torch::equal(module(input), plain(input)));
      }
    }
  });
}

TEST(SyncBatchNormTest, ALayerThatIsNotConvertedIsLeftAlone) {
  const auto input = random({8, 3, 4}, 1), gradient = random({8, 3, 4}, 2);
  const BatchNormOptions options(3);
  const auto before = pass(filled<torch::nn::BatchNorm1d>(options), input, gradient);
  run_threads(2, [&](ProcessGroup world) {
    auto converted_one = converted<torch::nn::BatchNorm1d>(options, world);
    if (world.rank() == 1) return;
    auto copy = std::dynamic_pointer_cast<torch::nn::BatchNorm1dImpl>(converted_one->clone());
    for (auto layer : {filled<torch::nn::BatchNorm1d>(options), torch::nn::BatchNorm1d(copy)}) {
      const auto after = pass(layer, input, gradient);
      EXPECT_TRUE(torch::equal(after.output, before.output));
      EXPECT_TRUE(torch::equal(after.input_gradient, before.input_gradient));
      EXPECT_TRUE(torch::equal(after.running_var, before.running_var));
    }
    EXPECT_TRUE(torch::equal(torch::batch_norm(input.narrow(0, 0, 0), {}, {}, {}, {}, true, 0, 1e-5, false),
                             input.narrow(0, 0, 0)));
  });
}

TEST(SyncBatchNormTest, AConversionFollowsTheLayerAndKeepsItsGroup) {
  std::mutex one_at_a_time;  // ThreadSanitizer cannot see that LibTorch is careful with what it shares between archives
  run_threads(4, [&](ProcessGroup world) {
    torch::nn::BatchNorm1d layer(3);
    convert_sync_batchnorm(*layer, world);
    convert_sync_batchnorm(*layer, world.new_subgroups(2));  // nobody else holds it
    layer->to(torch::kDouble);
    {
      std::lock_guard lock(one_at_a_time);
      std::stringstream file;
      torch::save(layer, file);
      torch::load(layer, file);
    }
    const auto all = random({8, 3}, 1);
    torch::nn::BatchNorm1d alone(3);
    alone->to(torch::kDouble);
    const auto expected = alone(all.narrow(0, world.rank() < 2 ? 0 : 4, 4));
    const auto actual = layer(all.narrow(0, 2 * world.rank(), 2));
    EXPECT_LE(relative_difference(actual, expected.narrow(0, 2 * (world.rank() % 2), 2)), 1e-12);
  });
}

TEST(SyncBatchNormTest, LayersThatCannotBeRecognizedAreRefusedByNameAndNoneIsConverted) {
  run_threads(2, [](ProcessGroup world) {
    torch::nn::Sequential model(torch::nn::BatchNorm1d(3),
                                torch::nn::BatchNorm1d(BatchNormOptions(3).affine(false).track_running_stats(false)));
    expect_error<UsageError>([&] { convert_sync_batchnorm(*model, world); }, "rank " + std::to_string(world.rank()),
                             "layer '1'", "lockstep::SyncBatchNorm");
    if (world.rank() == 0) {
      EXPECT_EQ(model->forward(random({4, 3}, 1, torch::kFloat)).size(0), 4) << "without the other rank";
    }
    auto group = world.new_group({0});
    if (world.rank() == 1) {
      expect_error<UsageError>([&] { convert_sync_batchnorm(*model, group); }, "not in group 'world/1'");
      expect_error<UsageError>([&] { SyncBatchNorm(3, group); }, "not in group 'world/1'");
    }
  });
}

// Without running statistics the weight carries the mark of a converted layer.
TEST(SyncBatchNormTest, HooksOnAWeightAndTheConversionDoNotDisturbEachOther) {
  const auto inputs = random({8, 3}, 1, torch::kDouble);
  torch::nn::BatchNorm1d alone(BatchNormOptions(3).track_running_stats(false));
  alone->to(torch::kDouble);
  const auto expected = alone(inputs);
  run_threads(2, [&](ProcessGroup world) {
    for (const std::string hook : {"before conversion", "after conversion", "before and after"}) {
      SCOPED_TRACE(hook);
      torch::nn::BatchNorm1d layer(BatchNormOptions(3).track_running_stats(false));
      layer->to(torch::kDouble);
      int calls = 0;
      const auto add_hook = [&] { layer->weight.register_hook([&](const torch::Tensor&) { ++calls; }); };
      if (hook != "after conversion") add_hook();
      convert_sync_batchnorm(*layer, world);
      if (hook != "before conversion") add_hook();
      const auto actual = layer(inputs.narrow(0, 4 * world.rank(), 4));
      EXPECT_LE(relative_difference(actual, expected.narrow(0, 4 * world.rank(), 4)), 1e-12);
      actual.sum().backward();
      EXPECT_EQ(calls, hook == "before and after" ? 2 : 1);
    }
  });
}

TEST(SyncBatchNormTest, ALayerWithTwoNamesIsOne) {
  run_threads(1, [](ProcessGroup world) {
    torch::nn::BatchNorm1d layer(3);
    EXPECT_EQ(convert_sync_batchnorm(*torch::nn::Sequential(layer, layer), world), 1);
  });
}

TEST(SyncBatchNormTest, SaysWhatIsWrongWithAnInput) {
  run_threads(2, [](ProcessGroup world) {
    SyncBatchNorm layer(3, world);
    const auto me = "rank " + std::to_string(world.rank());
    torch::nn::Sequential model(torch::nn::BatchNorm1d(3));
    convert_sync_batchnorm(*model, world);
    for (int64_t channels : {1, 2, 4})
      expect_error<UsageError>(
          [&] {
            model->forward(torch::zeros({4, channels}));
          },
          me, "SyncBatchNorm '0'", "[N, 3, ...]", "[4, " + std::to_string(channels) + "]");
    expect_error<UsageError>([&] { layer(torch::zeros({4, 5})); }, me, "[N, 3, ...]", "[4, 5]");
    expect_error<UsageError>([&] { layer(torch::zeros({3})); }, me, "[N, 3, ...]", "[3]");
    const auto one_in_all = torch::zeros({1 - world.rank(), 3});
    expect_error<UsageError>([&] { layer(one_in_all); }, "SyncBatchNorm of 3 channels", me, "1 values per channel",
                             "at least 2");
    EXPECT_EQ(layer(torch::ones({1, 3})).size(0), 1) << "the group goes on";
  });
  run_threads(1, [](ProcessGroup world) {
    expect_error<UsageError>(
        [&] {
          SyncBatchNorm(3, world)(torch::zeros({1, 3}));
        },
        "SyncBatchNorm of 3 channels: rank 0", "1 values per channel");
  });
}

TEST(SyncBatchNormTest, RanksWhoseLayersDifferAreTold) {
  run_threads_into_an_error(2, [](ProcessGroup world) {
    torch::nn::Sequential model(torch::nn::BatchNorm1d(3 + world.rank()));
    convert_sync_batchnorm(*model, world);
    expect_error<MismatchError>(
        [&] {
          model->forward(torch::zeros({4, 3 + world.rank()}));
        },
        "SyncBatchNorm '0'", "all_gather(", "Double[7]", "Double[9]");
  });
}

TEST(SyncBatchNormTest, SecondDerivativesAreRefused) {
  run_threads(2, [](ProcessGroup world) {
    torch::nn::Sequential model(torch::nn::BatchNorm1d(3));
    convert_sync_batchnorm(*model, world);
    const auto input = random({4, 3}, 1, torch::kFloat).requires_grad_();
    const auto loss = model->forward(input).square().sum();
    expect_error<UsageError>([&] { torch::autograd::grad({loss}, {input}, {}, {}, /*create_graph=*/true); },
                             "rank " + std::to_string(world.rank()), "SyncBatchNorm '0'", "create_graph", "eval()");
  });
}

TEST(SyncBatchNormTest, WhatCannotCountUnequalBatchesRefusesIt) {
  run_threads(2, [](ProcessGroup world) {
    ConvNet model;
    convert_sync_batchnorm(*model, world);
    DistributedDataParallel ddp(model, world);
    const auto me = "rank " + std::to_string(world.rank());
    expect_error<UsageError>([&] { ddp.join([] {}); }, me, "layer 'norm'", "throw_on_early_termination");
    ddp.join([] {}, {.throw_on_early_termination = true});
    expect_error<UsageError>([&] { ddp.set_batch_weight(3); }, me, "layer 'norm'", "divide");
  });
}

TEST(SyncBatchNormTest, SaysWhatItIs) {
  run_threads(2, [](ProcessGroup world) {
    std::ostringstream text;
    text << SyncBatchNorm(BatchNormOptions(8).momentum(torch::nullopt), world);
    EXPECT_EQ(text.str(),
              "lockstep::SyncBatchNorm(8, eps=1e-05, momentum=none, affine=true, track_running_stats=true, ranks=2)");
  });
}

}  // namespace
}  // namespace lockstep
