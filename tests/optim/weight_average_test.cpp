// The oracles are Python's torch.optim.swa_utils (toolbox_oracle.py) and one process on the batches of all ranks.

#include <lockstep/weight_average.h>

#include <memory>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/captured_step.h>
#include <lockstep/checkpoint_file.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/module_state.h>
#include <lockstep/sync_batch_norm.h>
#include <lockstep/training_state.h>

#include "optim/averaged_model.h"
#include "optim/stepping.h"
#include "support/messages.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

static_assert(detail::HasState<WeightAverage>, "can be added to a TrainingState");

constexpr double kDecay = 0.9;
constexpr int kSteps = 6;
constexpr int kMoreSteps = 4;

struct RuleCase {
  std::string name;
  AveragingRule rule;
  bool use_buffers;

  std::string file() const { return name + (use_buffers ? "_1" : "_0"); }
};

const std::vector<RuleCase> kRuleCases{
    {"ema", ema(kDecay), false}, {"ema", ema(kDecay), true}, {"swa", swa(), false}, {"swa", swa(), true}};

INSTANTIATE_TEST_SUITE_P(With, WeightAverageInPython,
                         testing::Values("LOCKSTEP_TEST_PYTHON", "LOCKSTEP_TEST_PYTHON_2X"),
                         [](const auto& info) { return std::string(info.param).ends_with("2X") ? "2x" : "installed"; });

TEST_P(WeightAverageInPython, HasTheSameAverages) {
  for (const auto& one : kRuleCases) {
    SCOPED_TRACE(one.file());
    TiedNet model;
    WeightAverage average(*model, one.rule, {.use_buffers = one.use_buffers});
    update_for(average, *model, 0, kSteps);
    EXPECT_EQ(average.updates(), kSteps);
    expect_equal_averages(average.state_dict(), made(one.file()));
    const auto batches = average.state_dict().at("module.norm.num_batches_tracked").tensor();
    EXPECT_EQ(batches.item<int64_t>(), kSteps) << "integer buffers are the model's";
  }
}

TEST_P(WeightAverageInPython, ContinuesHere) {
  for (const auto& one : kRuleCases) {
    SCOPED_TRACE(one.file());
    TiedNet model;
    WeightAverage average(*model, one.rule, {.use_buffers = one.use_buffers});
    average.load_state_dict(made(one.file()));
    update_for(average, *model, kSteps, kSteps + kMoreSteps);
    expect_equal_averages(average.state_dict(), made(one.file() + ".more"));
  }
}

TEST_P(WeightAverageInPython, ContinuesThere) {
  const TemporaryFolder folder;
  for (const auto& one : {kRuleCases[0], kRuleCases[3]}) {
    SCOPED_TRACE(one.file());
    TiedNet model;
    WeightAverage average(*model, one.rule, {.use_buffers = one.use_buffers});
    update_for(average, *model, 0, kSteps);
    const auto ours = (folder.path() / "ours.pt").string(), theirs = (folder.path() / "theirs.pt").string();
    save_checkpoint(ours, average.state_dict());
    run({"continue", one.name, one.use_buffers ? "1" : "0", ours, theirs});
    update_for(average, *model, kSteps, kSteps + kMoreSteps);
    expect_equal_averages(average.state_dict(), load_checkpoint(theirs));
  }
}

TEST_P(WeightAverageInPython, LoadsWithTheNamesOfAWrappedModel) {
  TiedNet model;
  WeightAverage average(*model, swa());
  average.load_state_dict(made("wrapped"));
  expect_equal_averages(average.state_dict(), made("swa_0"));
}

// --- the average of a model in this process

TEST(WeightAverage, TheFirstUpdateCopies) {
  TiedNet model;
  WeightAverage average(*model, ema(0.999));
  EXPECT_EQ(average.updates(), 0);
  set_weights(*model, 3);
  average.update();
  EXPECT_EQ(average.updates(), 1);
  EXPECT_TRUE(average.state_dict().at("module.first.weight").tensor().equal(model->first->weight));
}

TEST(WeightAverage, IsInTheModelWhileItIsApplied) {
  for (auto device : devices_under_test()) {
    TiedNet model;
    model->to(device);
    WeightAverage average(*model, swa());
    update_for(average, *model, 0, 3);
    const auto before = copies_of_state(*model);
    const auto* address = model->first->weight.data_ptr();
    const auto expected = average.state_dict().at("module.first.weight").tensor().clone();
    {
      auto guard = average.apply();
      EXPECT_TRUE(model->first->weight.equal(expected));
      EXPECT_TRUE(model->first->weight.requires_grad());
      EXPECT_EQ(model->first->weight.data_ptr(), address);
      expect_error<UsageError>([&] { auto other = average.apply(); }, "apply", "applied already");
      expect_error<UsageError>([&] { average.update(); }, "update", "applied");
      expect_error<UsageError>([&] { average.copy_to_model(); }, "applied already");
      expect_error<UsageError>([&] { average.load_state_dict(average.state_dict()); }, "applied");
    }
    EXPECT_TRUE(are_equal(tensors_of(*model), before));
    EXPECT_EQ(model->first->weight.data_ptr(), address);
    EXPECT_TRUE(average.state_dict().at("module.first.weight").tensor().equal(expected));

    auto evaluate = [&] {
      auto guard = average.apply();
      throw std::runtime_error("no such file");
    };
    EXPECT_THROW(evaluate(), std::runtime_error);
    EXPECT_TRUE(are_equal(tensors_of(*model), before));
    update_for(average, *model, 3, 4);
    EXPECT_EQ(average.updates(), 4);
  }
}

TEST(WeightAverage, OutlivesItsOwnerWhileItIsApplied) {
  TiedNet model;
  auto average = std::make_unique<WeightAverage>(*model, swa());
  update_for(*average, *model, 0, 3);
  const auto before = copies_of_state(*model);
  {
    auto guard = average->apply();
    average.reset();
  }
  EXPECT_TRUE(are_equal(tensors_of(*model), before));
}

TEST(WeightAverage, IsCopiedForGood) {
  TiedNet model;
  WeightAverage average(*model, swa());
  expect_error<UsageError>([&] { average.copy_to_model(); }, "no average yet", "update()");
  expect_error<UsageError>([&] { auto guard = average.apply(); }, "no average yet");
  update_for(average, *model, 0, 3);
  average.copy_to_model();
  const auto saved = named_tensors(average.state_dict());
  const auto dict = state_dict(*model);
  for (const auto& [name, value] : dict.items())
    EXPECT_TRUE(value.tensor().equal(saved.at("module." + name.as_string()))) << name;
}

TEST(WeightAverage, KeepsStatisticsThatChangeWhileItIsApplied) {
  TiedNet model;
  WeightAverage average(*model, swa());
  update_for(average, *model, 0, 3);
  const auto own = model->norm->running_mean.clone();
  {
    auto guard = average.apply();
    model->norm->running_mean.fill_(7);
    EXPECT_EQ(average.state_dict().at("module.norm.running_mean").tensor()[0].item<double>(), 7);
  }
  EXPECT_TRUE(model->norm->running_mean.equal(own));
  {
    auto guard = average.apply();
    EXPECT_EQ(model->norm->running_mean[0].item<double>(), 7);
  }
  average.update();
  EXPECT_TRUE(average.state_dict().at("module.norm.running_mean").tensor().equal(own));
}

TEST(WeightAverage, AveragesASharedParameterOnce) {
  TiedNet model;
  WeightAverage average(*model, ema(kDecay));
  update_for(average, *model, 0, 2);
  const auto dict = average.state_dict();
  EXPECT_EQ(dict.at("module.tied.weight").tensor().data_ptr(), dict.at("module.again.weight").tensor().data_ptr());
}

TEST(WeightAverage, OfNarrowWeightsMovesInFloat32) {
  for (auto device : devices_under_test())
    for (auto dtype : {torch::kBFloat16, torch::kHalf}) {
      torch::nn::Linear model(2, 2);
      model->to(device, dtype);
      WeightAverage wide(*model, ema(0.9999)), narrow(*model, ema(0.9999), {.float32 = false});
      auto set = [&](double value) {
        torch::NoGradGuard no_grad;
        for (auto& parameter : model->parameters()) parameter.fill_(value);
      };
      auto weight_of = [](const WeightAverage& average) { return average.state_dict().at("module.weight").tensor(); };
      set(1);
      wide.update();
      narrow.update();
      set(2);
      double expected = 1;
      for (int i = 0; i < 20; ++i) {
        wide.update();
        narrow.update();
        expected += 0.0001 * (2 - expected);
      }
      EXPECT_EQ(weight_of(wide).scalar_type(), torch::kFloat);
      EXPECT_NEAR(weight_of(wide)[0][0].item<double>(), expected, 1e-6);
      EXPECT_EQ(weight_of(narrow).scalar_type(), dtype);
      EXPECT_EQ(weight_of(narrow)[0][0].item<double>(), 1) << "the reason for the default";
      auto guard = wide.apply();
      EXPECT_EQ(model->weight.scalar_type(), dtype);
      EXPECT_TRUE(model->weight.equal(weight_of(wide).to(dtype)));
    }
}

TEST(WeightAverage, OfNarrowBuffersKeepsItsDigitsWhenItIsApplied) {
  torch::nn::BatchNorm1d model(2);
  model->to(torch::kBFloat16);
  WeightAverage average(*model, ema(kDecay), {.use_buffers = true});
  model->running_mean.fill_(1);
  average.update();
  model->running_mean.fill_(2);
  for (int i = 0; i < 5; ++i) average.update();
  auto mean = [&] { return average.state_dict().at("module.running_mean").tensor().clone(); };
  const auto before = mean();
  EXPECT_FALSE(before.equal(before.to(torch::kBFloat16).to(torch::kFloat))) << "needs digits beyond bfloat16";
  { auto guard = average.apply(); }
  EXPECT_TRUE(mean().equal(before));
}

TEST(WeightAverage, NamesWhatChangedInTheModel) {
  auto refused = [](const std::function<void(TiedNet&)>& change, auto... parts) {
    TiedNet model;
    WeightAverage average(*model, ema(kDecay));
    average.update();
    change(model);
    expect_error<UsageError>([&] { average.update(); }, parts...);
    expect_error<UsageError>([&] { auto guard = average.apply(); }, parts...);
  };
  refused([](TiedNet& model) { model->register_parameter("late", torch::ones({2})); }, "'late'", "added");
  refused([](TiedNet& model) { model->unregister_module("tied"); }, "'tied.weight'", "removed");
  refused(
      [](TiedNet& model) {
        model->first->weight.set_data(torch::ones({4, 5}, torch::kDouble));
      },
      "'first.weight'", "float64 [4, 5] on cpu", "was float64 [4, 3] on cpu");
  refused([](TiedNet& model) { model->to(torch::kFloat); }, "'first.weight'", "float32");
  refused(
      [](TiedNet& model) {
        torch::nn::Linear other(3, 4);
        other->to(torch::kDouble);
        model->replace_module("first", other);
      },
      "'first.weight'", "replaced");
}

TEST(WeightAverage, RefusesAStateThatDoesNotFit) {
  TiedNet model;
  WeightAverage average(*model, swa());
  update_for(average, *model, 0, 2);
  const auto before = average.state_dict().at("module.first.weight").tensor().clone();
  auto state = Value::dict();
  const auto own = average.state_dict();
  for (const auto& [name, value] : own.items()) state.set(name, value.tensor() + 1);
  expect_error<UsageError>([&] { average.load_state_dict(state_dict(*model)); }, "n_averaged", "module.");
  state.erase("module.tied.bias");
  state.set("module.other", torch::ones({1}));
  state.set("module.norm.weight", torch::ones({5}));
  expect_error<UsageError>([&] { average.load_state_dict(state); }, "'tied.bias' is missing", "'other' is unexpected",
                           "'norm.weight' is [5], expected [4]");
  EXPECT_TRUE(average.state_dict().at("module.first.weight").tensor().equal(before)) << "nothing was loaded";
  expect_error<UsageError>([] { ema(1.5); }, "decay is 1.5");
  expect_error<UsageError>([] { ema(NAN); }, "decay is nan");
  torch::nn::Tanh empty;
  expect_error<UsageError>([&] { WeightAverage none(*empty, swa()); }, "no parameters");
}

TEST(WeightAverage, IsEqualOnAllRanksOfATraining) {
  on_every_rank("shm", 2, [](const ProcessGroup& world) {
    Mlp net, alone;
    for (auto model : {net, alone}) {
      model->to(torch::kDouble);
      fill_parameters(*model, 1);
    }
    DistributedDataParallel ddp(net, world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.1), optimizer_alone(alone->parameters(), 0.1);
    WeightAverage average(*net, ema(kDecay)), average_alone(*alone, ema(kDecay));
    for (uint64_t step = 0; step < 5; ++step) {
      const auto input = numbers({4, 6}, step, torch::kDouble);
      optimizer.zero_grad();
      ddp(input.chunk(2)[world.rank()]).square().mean().backward();
      optimizer.step();
      average.update();
      optimizer_alone.zero_grad();
      alone(input).square().mean().backward();
      optimizer_alone.step();
      average_alone.update();
      auto guard = average.apply();  // the next step must not notice
      auto guard_alone = average_alone.apply();
      EXPECT_TRUE(torch::allclose(ddp(input), alone(input), 1e-10, 1e-12));
      ddp.check_replicas();
    }
    ddp.check_replicas();
    expect_equal_averages(average.state_dict(), average_alone.state_dict());
  });
}

TEST(WeightAverage, IsUpdatedInACapturedStep) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "this machine has no GPU";
  for (const auto& rule : {ema(kDecay), swa()}) {
    const auto world = init_process_group({.backend = "auto", .rank = 0, .world_size = 1, .device = torch::kCUDA});
    auto reference = [&] {
      TiedNet model;
      model->to(torch::kCUDA);
      return model;
    };
    TiedNet model = reference(), other = reference();
    WeightAverage captured(*model, rule), plain(*other, rule), late(*model, rule);
    auto change = [](TiedNet& net, const torch::Tensor& x) {
      torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.copy_(x.sin() + 1);
    };
    CapturedStep step(world, [&](const torch::Tensor& x) {
      change(model, x);
      captured.update();
      return x * 1;
    });
    for (int i = 0; i < 8; ++i) {
      const auto x = torch::full({}, i, torch::dtype(torch::kDouble).device(torch::kCUDA));
      step(x);
      change(other, x);
      plain.update();
    }
    EXPECT_TRUE(step.is_captured());
    EXPECT_EQ(captured.updates(), 8);
    expect_equal_averages(captured.state_dict(), plain.state_dict());

    int calls = 0;
    CapturedStep first(world, [&](const torch::Tensor& x) {
      if (++calls > 3) late.update();
      return x * 1;
    });
    const auto x = torch::ones({}, torch::kCUDA);
    for (int i = 0; i < 3; ++i) first(x);
    expect_error<UsageError>([&] { first(x); }, "the first update cannot be captured");
  }
}

// --- batch normalization

/// As batches of toolbox_oracle.py.
std::vector<torch::Tensor> oracle_batches() {
  std::vector<torch::Tensor> batches;
  for (int64_t size : {6, 4, 8, 5, 7}) {
    const auto number = static_cast<int64_t>(batches.size()) + 1;
    batches.push_back(torch::sin(torch::arange(3 * size, torch::kDouble) * number).view({size, 3}));
  }
  return batches;
}

TEST_P(WeightAverageInPython, HasTheSameStatisticsAfterUpdateBn) {
  TiedNet model;
  set_weights(*model, 0);
  model->eval();
  update_batch_norm(*model, [&] {
    EXPECT_FALSE(torch::GradMode::is_enabled());
    for (const auto& batch : oracle_batches()) model(batch);
  });
  EXPECT_FALSE(model->is_training());
  EXPECT_EQ(model->norm->options.momentum().value(), 0.1);
  expect_equal_averages(state_dict(*model), made("update_bn"));
  EXPECT_TRUE(model->norm->num_batches_tracked.equal(made("update_bn").at("norm.num_batches_tracked").tensor()));
}

TEST(UpdateBatchNorm, OfSeveralRanksIsThatOfOneProcessOnAllBatches) {
  on_every_rank("shm", 2, [](const ProcessGroup& world) {
    TiedNet model, alone;
    set_weights(*model, 0);
    set_weights(*alone, 0);
    const auto batches = oracle_batches();
    update_batch_norm(*model, world, [&] {
      for (size_t i = 0; i < batches.size(); ++i)
        if ((i < 4) == (world.rank() == 0)) model(batches[i]);  // four batches and one
    });
    update_batch_norm(*alone, [&] {
      for (const auto& batch : batches) alone(batch);
    });
    expect_equal_averages(state_dict(*model), state_dict(*alone));
    EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), 5);
    EXPECT_FALSE(alone->norm->running_mean.equal(torch::zeros({4}, torch::kDouble)));
  });
}

TEST(UpdateBatchNorm, OfSynchronizedLayersIsThatOfTheConcatenatedBatches) {
  on_every_rank("shm", 2, [](const ProcessGroup& world) {
    torch::nn::Sequential alone(torch::nn::BatchNorm1d(3), torch::nn::BatchNorm1d(3));
    torch::nn::Sequential model(SyncBatchNorm(3, world), torch::nn::BatchNorm1d(3));
    for (auto net : {alone, model}) {
      net->to(torch::kDouble);
      torch::NoGradGuard no_grad;
      net->named_parameters()["0.bias"].fill_(0.5);  // the mean of the second layer's inputs
    }
    convert_sync_batchnorm(*model, world);
    const std::vector<torch::Tensor> batches{numbers({6, 3}, 1, torch::kDouble), numbers({8, 3}, 2, torch::kDouble)};
    for (int i = 0; i < 2; ++i) {  // the second time shows that layers stay converted
      update_batch_norm(*model, world, [&] {
        for (const auto& batch : batches) model->forward(batch.chunk(2)[world.rank()]);
      });
      update_batch_norm(*alone, [&] {
        for (const auto& batch : batches) alone->forward(batch);
      });
      for (const char* name : {"0.running_mean", "0.running_var", "1.running_mean", "1.running_var"})
        EXPECT_LE(relative_difference(model->named_buffers()[name], alone->named_buffers()[name]), 1e-10) << name;
    }
  });
}

TEST(UpdateBatchNorm, LeavesEverythingAsItWasAfterAnException) {
  torch::nn::Sequential model(torch::nn::BatchNorm1d(3), torch::nn::Dropout());
  model[1]->eval();  // one module in another mode than the rest
  auto& norm = *model[0]->as<torch::nn::BatchNorm1d>();
  norm.options.momentum(0.3);
  norm.running_mean.fill_(5);
  norm.num_batches_tracked.fill_(9);
  const auto before = copies_of_state(*model);
  auto expect_unchanged = [&] {
    EXPECT_TRUE(are_equal(tensors_of(*model), before));
    EXPECT_EQ(norm.options.momentum().value(), 0.3);
    EXPECT_TRUE(model->is_training());
    EXPECT_FALSE(model[1]->is_training());
    EXPECT_TRUE(torch::GradMode::is_enabled());
  };
  auto fail = [&] {
    EXPECT_TRUE(model[1]->is_training());
    model->forward(torch::randn({4, 3}));
    throw std::runtime_error("no such file");
  };
  EXPECT_THROW(update_batch_norm(*model, fail), std::runtime_error);
  expect_unchanged();
  expect_error<UsageError>([&] { update_batch_norm(*model, [] {}); }, "none of the 1 layers got a batch");
  expect_unchanged();
  update_batch_norm(*model, [&] { model->forward(torch::randn({4, 3})); });
  EXPECT_FALSE(are_equal(tensors_of(*model), before));
  EXPECT_FALSE(model[1]->is_training());
}

TEST(UpdateBatchNorm, WithoutBatchesOnAnyRankIsRefusedOnAll) {
  on_every_rank("shm", 2, [](const ProcessGroup& world) {
    torch::nn::BatchNorm1d model(3);
    expect_error<UsageError>([&] { update_batch_norm(*model, world, [] {}); }, "on any rank");
    update_batch_norm(*model, world, [&] {
      if (world.rank() == 1) model(torch::full({2, 3}, 4.0));
    });
    EXPECT_TRUE(model->running_mean.equal(torch::full({3}, 4.0))) << model->running_mean;
  });
}

TEST(UpdateBatchNorm, LeavesALayerWithoutBatchesAsItWas) {
  torch::nn::BatchNorm1d used(3), unused(3);
  torch::nn::BatchNorm1d without(torch::nn::BatchNormOptions(3).track_running_stats(false));
  torch::nn::Sequential model(used, unused, without);
  unused->running_mean.fill_(5);
  update_batch_norm(*model, [&] { used(without(torch::randn({4, 3}))); });
  EXPECT_TRUE(unused->running_mean.equal(torch::full({3}, 5.0)));
  EXPECT_EQ(used->num_batches_tracked.item<int64_t>(), 1);
  torch::nn::Linear no_norm(2, 2);
  update_batch_norm(*no_norm, [] { FAIL() << "called for a model without batch normalization"; });
}

}  // namespace
}  // namespace lockstep
