#include <lockstep/data_parallel.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/error.h>
#include <lockstep/run_threads.h>
#include <lockstep/sync_batch_norm.h>

#include "parallel/models.h"
#include "parallel/training.h"
#include "support/forked.h"
#include "support/messages.h"

namespace lockstep {
namespace {

const torch::Device kCpu(torch::kCPU);

/// The devices that one machine can have several replicas on: the CPU, its GPU, and one of each.
std::vector<std::vector<torch::Device>> places() {
  std::vector<std::vector<torch::Device>> result{{kCpu, kCpu, kCpu}};
  if (torch::cuda::is_available()) {
    const torch::Device gpu(torch::kCUDA, 0);
    result.push_back({gpu, gpu, gpu});
    result.push_back({gpu, kCpu});
    result.push_back({kCpu, gpu});
  }
  return result;
}

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(6, 16));
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
    second = register_module("second", torch::nn::Linear(16, 4));
    unused = register_parameter("unused", torch::zeros({3}));
  }
  torch::Tensor forward(torch::Tensor x) { return second(torch::tanh(norm(first(x)))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::Tensor unused;
};
TORCH_MODULE(Net);

/// With statistics of its own, so that parts of a batch are normalized as the whole.
Net make_net(torch::Device device = kCpu) {
  Net net;
  fill_parameters(*net, 1);
  net->to(device, torch::kDouble);
  net->norm->eval();
  net->norm->running_var.fill_(0.7);
  return net;
}

torch::Tensor inputs(int64_t size, int step = 0, torch::Device device = kCpu) {
  return torch::randn({size, 6}, at::detail::createCPUGenerator(50 + step), torch::kDouble).to(device);
}

void expect_same_gradients(const torch::nn::Module& actual, const torch::nn::Module& expected) {
  const auto gradients = expected.named_parameters();
  for (const auto& item : actual.named_parameters()) {
    const auto& other = gradients[item.key()].grad();
    ASSERT_EQ(item.value().grad().defined(), other.defined()) << item.key();
    if (!other.defined()) continue;
    EXPECT_LE(relative_difference(item.value().grad().cpu(), other.cpu()), 1e-12) << item.key();
  }
}

TEST(DataParallelTest, HasNoThreadsInAForkedChild) {
  auto net = make_net();
  std::optional<DataParallel<NetImpl>> parallel(std::in_place, net, DataParallelOptions{.devices = {kCpu, kCpu}});
  const auto expected = (*parallel)(inputs(4));
  const int code = exit_code_of_fork([&] {
    expect_error<UsageError>([&] { (*parallel)(inputs(4)); }, "was forked from the process that made the DataParallel");
    parallel.reset();
    ::_exit(testing::Test::HasFailure() ? 1 : 0);  // exit() destroys LibTorch's thread pool, which crashes in a child
  });
  EXPECT_EQ(code, 0);
  EXPECT_TRUE(torch::equal((*parallel)(inputs(4)), expected));
}

TEST(DataParallelTest, TrainsAsTheModuleItselfDoes) {
  for (const auto& devices : places()) {
    auto alone = make_net(devices[0]), module = make_net(devices[0]);
    DataParallel dp(module, {.devices = devices});
    EXPECT_EQ(dp.devices(), devices);
    auto alone_optimizer = make_optimizer("momentum", alone->parameters());
    auto optimizer = make_optimizer("momentum", dp.parameters());
    for (int64_t size : {7, 3, 12, 2, 1, 6}) {
      const auto batch = inputs(size, static_cast<int>(size), devices[0]);
      const auto expected = alone(batch);
      const auto output = dp(batch);
      EXPECT_EQ(output.device(), devices[0]);
      EXPECT_LE(relative_difference(output.cpu(), expected.cpu()), 1e-12) << "batch of " << size;
      for (auto* each : {&alone_optimizer, &optimizer}) (*each)->zero_grad();
      expected.square().mean().backward();
      output.square().mean().backward();
      expect_same_gradients(*module, *alone);
      alone_optimizer->step();
      optimizer->step();
    }
  }
}

/// Uses one layer twice, under two names, and one that has no parameters of its own.
struct SharingImpl : torch::nn::Cloneable<SharingImpl> {
  SharingImpl() { reset(); }
  void reset() override {
    once = register_module("once", torch::nn::Linear(6, 6));
    again = register_module("again", once);
    norm = register_module(
        "norm", torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(6).affine(false).track_running_stats(false)));
  }
  torch::Tensor forward(torch::Tensor x) { return norm(again(torch::tanh(once(x)))); }
  torch::nn::Linear once{nullptr}, again{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Sharing);

TEST(DataParallelTest, LayersMayBeShared) {
  for (const auto& devices : places()) {
    Sharing module, other;
    for (Sharing each : {module, other}) {
      fill_parameters(*each, 1);
      each->to(devices[0], torch::kDouble);
    }
    DataParallel dp(module, {.devices = devices});
    const auto batch = inputs(6, 0, devices[0]);
    dp(batch).pow(3).sum().backward();
    const auto parts = static_cast<int64_t>(devices.size());
    for (int64_t i = 0; i < parts; ++i) other(batch.narrow(0, i * 6 / parts, 6 / parts)).pow(3).sum().backward();
    expect_same_gradients(*module, *other);
  }
}

TEST(DataParallelTest, AnEmptyBatchIsOne) {
  DataParallel dp(make_net(), {.devices = {kCpu, kCpu}});
  EXPECT_EQ(dp(inputs(0)).sizes(), (std::vector<int64_t>{0, 4}));
}

TEST(DataParallelTest, GraphsMayOverlapAndBeUsedTwice) {
  for (const auto& devices : places()) {
    auto alone = make_net(devices[0]), module = make_net(devices[0]);
    DataParallel dp(module, {.devices = devices});
    const auto run = [&](auto& forward) {
      auto first = forward(inputs(7, 1, devices[0])).sum(), second = forward(inputs(5, 2, devices[0])).square().sum();
      first.backward({}, /*retain_graph=*/true);
      second.backward();
      first.backward();
    };
    run(alone);
    run(dp);
    expect_same_gradients(*module, *alone);
  }
}

TEST(DataParallelTest, SecondDerivativesAreRight) {
  auto alone = make_net(), module = make_net();
  DataParallel dp(module, {.devices = {kCpu, kCpu, kCpu}});
  const auto run = [](auto& forward, torch::nn::Module& net) {
    const auto loss = forward(inputs(7)).square().sum();
    const auto weight = net.named_parameters()["first.weight"];
    const auto gradient = torch::autograd::grad({loss}, {weight}, {}, {}, /*create_graph=*/true)[0];
    gradient.square().sum().backward();
  };
  run(alone, *alone);
  run(dp, *module);
  expect_same_gradients(*module, *alone);
}

TEST(DataParallelTest, RunsAnythingOnTheReplicas) {
  for (const auto& devices : places()) {
    auto alone = make_net(devices[0]), module = make_net(devices[0]);
    DataParallel dp(module, {.devices = devices});
    const auto batch = inputs(7, 0, devices[0]);
    const auto targets = torch::arange(7, torch::kLong).remainder(4).to(devices[0]);
    const auto losses = dp.on_each(
        [](NetImpl& net, const torch::Tensor& x, const torch::Tensor& y) {
          return torch::cross_entropy_loss(net.forward(x), y, {}, at::Reduction::Sum);
        },
        batch, targets);
    EXPECT_EQ(losses.sizes(), std::vector<int64_t>{static_cast<int64_t>(devices.size())});
    (losses.sum() / 7).backward();
    torch::cross_entropy_loss(alone(batch), targets).backward();
    expect_same_gradients(*module, *alone);
  }
}

/// Takes and returns more than one tensor.
struct ManyImpl : torch::nn::Cloneable<ManyImpl> {
  ManyImpl() { reset(); }
  void reset() override { scale = register_parameter("scale", torch::ones({1}, torch::kDouble)); }
  std::tuple<torch::Tensor, std::vector<torch::Tensor>, int> forward(
      std::pair<torch::Tensor, std::optional<torch::Tensor>> in, torch::Tensor factor, int number) {
    return {in.first * scale * factor, {in.first.size(1) + torch::zeros({}), in.second.value_or(in.first)}, number};
  }
  torch::Tensor scale;
};
TORCH_MODULE(Many);

TEST(DataParallelTest, SplitsAndGathersWhateverHoldsTensors) {
  DataParallel dp(Many(), {.devices = {kCpu, kCpu, kCpu}, .dim = 1});
  const auto x = torch::arange(14, torch::kDouble).view({2, 7});
  using Pair = std::pair<torch::Tensor, std::optional<torch::Tensor>>;
  const auto [first, rest, number] = dp(Pair(x, std::nullopt), torch::full({}, 3.0, torch::kDouble), 5);
  EXPECT_TRUE(torch::equal(first, 3 * x));
  EXPECT_TRUE(torch::equal(rest.at(0), torch::tensor({3, 2, 2}, torch::kFloat))) << "parts differ by one at most";
  EXPECT_TRUE(torch::equal(rest.at(1), x));
  EXPECT_EQ(number, 5);
}

TEST(DataParallelTest, ReplicasFollowTheModule) {
  for (const auto& devices : places()) {
    auto module = make_net(devices[0]);
    DataParallel dp(module, {.devices = devices});
    const auto batch = inputs(8, 0, devices[0]);
    const auto expect_alike = [&](const char* what) {
      EXPECT_LE(relative_difference(dp(batch).cpu(), module(batch).cpu()), 1e-5) << what;
    };
    expect_alike("as it was");
    module->first->weight.data().mul_(2);
    module->norm->running_mean.add_(0.5);
    expect_alike("values");
    module->second->weight.set_data(torch::ones_like(module->second->weight));
    expect_alike("memory");
    module->second = module->replace_module("second", torch::nn::Linear(16, 4));
    module->to(devices[0], torch::kDouble);
    expect_alike("layers");
    module->to(torch::kFloat);
    EXPECT_EQ(dp(batch.to(torch::kFloat)).scalar_type(), torch::kFloat);
    module->to(torch::kDouble);
    expect_alike("precision");

    module->first->weight.set_requires_grad(false);
    dp.replicate();
    dp(batch).sum().backward();
    EXPECT_FALSE(module->first->weight.grad().defined());
    EXPECT_TRUE(module->second->weight.grad().defined());
    module->first->weight.set_requires_grad(true);
    dp(batch).sum().backward();
    const auto gradient = module->first->weight.grad().clone();
    module->zero_grad();
    module(batch).sum().backward();
    EXPECT_LE(relative_difference(gradient.cpu(), module->first->weight.grad().cpu()), 1e-12) << "trains again";
  }
}

TEST(DataParallelTest, RunningStatisticsAreThoseOfTheFirstPart) {
  for (const auto& devices : places()) {
    auto alone = make_net(devices[0]), module = make_net(devices[0]);
    DataParallel dp(module, {.devices = devices});
    dp.train();
    alone->train();
    const auto batch = inputs(8, 0, devices[0]);
    const auto parts = at::tensor_split(batch, static_cast<int64_t>(devices.size()));
    const auto first = alone(parts.front());
    const auto output = dp(batch);
    EXPECT_LE(relative_difference(module->norm->running_mean.cpu(), alone->norm->running_mean.cpu()), 1e-12);
    EXPECT_LE(relative_difference(output.narrow(0, 0, first.size(0)).cpu(), first.cpu()), 1e-12);
    const auto last = alone(parts.back());
    EXPECT_LE(relative_difference(output.narrow(0, 8 - last.size(0), last.size(0)).cpu(), last.cpu()), 1e-12);
    dp.eval();
    EXPECT_FALSE(module->norm->is_training());
    EXPECT_LE(relative_difference(dp(batch).cpu(), module(batch).cpu()), 1e-12) << "replicas are in evaluation, too";
  }
}

TEST(DataParallelTest, LayersAndTheirOrderMayChange) {
  auto module = make_net();
  DataParallel dp(module, {.devices = {kCpu, kCpu}});
  dp(inputs(4));
  module->register_module("dropout", torch::nn::Dropout());
  EXPECT_THROW(dp(inputs(4)), UsageError) << "reset() does not make it";
  module->unregister_module("dropout");
  const auto first = module->first;
  module->unregister_module("first");
  module->register_module("first", first);  // now the last
  EXPECT_LE(relative_difference(dp(inputs(4)), module(inputs(4))), 1e-12);
}

TEST(DataParallelTest, DrawsNoRandomNumbers) {
  torch::manual_seed(3);
  const auto expected = torch::rand({4});
  auto module = make_net();
  torch::manual_seed(3);
  DataParallel dp(module, {.devices = {kCpu, kCpu}});
  dp.replicate();
  EXPECT_TRUE(torch::equal(torch::rand({4}), expected));
}

TEST(DataParallelTest, GathersWhereItIsAskedTo) {
  for (const auto& devices : places())
    for (const auto& output : devices) {
      DataParallel dp(make_net(devices[0]), {.devices = devices, .output_device = output});
      EXPECT_EQ(dp(inputs(5, 0, devices[0])).device(), output);
      EXPECT_EQ(dp(inputs(1, 0, devices[0])).device(), output) << "of one part";
    }
}

TEST(DataParallelTest, OneDeviceIsTheModuleItself) {
  auto module = make_net();
  DataParallel dp(module, {.devices = {kCpu}});
  EXPECT_TRUE(torch::equal(dp(inputs(5)), module(inputs(5))));
  EXPECT_EQ(dp.module().get(), module.get());
  EXPECT_EQ(dp->first.get(), module->first.get());
}

/// Its replicas wait for each other.
struct MeetingImpl : torch::nn::Cloneable<MeetingImpl> {
  struct Place {
    std::mutex mutex;
    std::condition_variable changed;
    int came = 0;
  };
  void reset() override {}
  torch::Tensor forward(torch::Tensor x) {
    std::unique_lock lock(place->mutex);
    ++place->came;
    place->changed.notify_all();
    const bool met = place->changed.wait_for(lock, std::chrono::seconds(20), [&] { return place->came == 3; });
    return torch::full({x.size(0)}, met && !torch::GradMode::is_enabled() ? 1.0 : 0.0);
  }
  std::shared_ptr<Place> place = std::make_shared<Place>();
};
TORCH_MODULE(Meeting);

TEST(DataParallelTest, ReplicasRunAtTheSameTimeAndWithoutGradientsWhereTheCallerDoes) {
  torch::NoGradGuard no_grad;
  DataParallel dp(Meeting(), {.devices = {kCpu, kCpu, kCpu}});
  EXPECT_EQ(dp(torch::zeros({6, 1})).sum().item<double>(), 6);
}

struct PickyImpl : torch::nn::Cloneable<PickyImpl> {
  void reset() override {}
  torch::Tensor forward(torch::Tensor x) {
    if (x.min().item<float>() < 0) throw std::runtime_error("negative");
    return x;
  }
};
TORCH_MODULE(Picky);

TEST(DataParallelTest, AnErrorOfAReplicaNamesItAndTheNextBatchWorks) {
  DataParallel dp(Picky(), {.devices = {kCpu, kCpu, kCpu}});
  for (int i = 0; i < 3; ++i) {
    expect_error<Error>([&] { dp(torch::tensor({1.0, 2.0, -1.0})); }, "replica 2 on cpu", "negative");
    expect_error<std::runtime_error>([&] { dp(torch::tensor({-1.0})); }, "negative");  // of one part: as it is
    EXPECT_EQ(dp(torch::ones({3})).sum().item<float>(), 3);
  }
}

/// Returns as many tensors as there are rows.
struct RowsImpl : torch::nn::Cloneable<RowsImpl> {
  void reset() override {}
  std::vector<torch::Tensor> forward(torch::Tensor x) { return x.unbind(); }
};
TORCH_MODULE(Rows);

/// Is cloned as what it is derived from.
struct DerivedNetImpl : NetImpl {
  torch::Tensor forward(torch::Tensor x) { return 2 * NetImpl::forward(x); }
};

/// Has a part that is not cloned.
struct HalfClonedImpl : torch::nn::Cloneable<HalfClonedImpl> {
  HalfClonedImpl() { reset(); }
  void reset() override { part = register_module("part", std::make_shared<MlpImpl>()); }
  torch::Tensor forward(torch::Tensor x) { return part->forward(x); }
  std::shared_ptr<MlpImpl> part;
};

TEST(DataParallelTest, WhatCannotBeClonedOrGatheredIsRefused) {
  DataParallel rows(Rows(), {.devices = {kCpu, kCpu}});
  EXPECT_EQ(rows(torch::ones({4, 2})).size(), 2) << "of each part";
  expect_error<UsageError>([&] { rows(torch::ones({3, 2})); }, "replica 1 returned 1 tensors", "replica 0 returned 2");
  expect_error<UsageError>(
      [] {
        DataParallel(std::make_shared<DerivedNetImpl>(), {.devices = {kCpu, kCpu}});
      },
      "layer 'module'", "another class", "torch::nn::Cloneable");
  if (torch::cuda::is_available()) {
    const torch::Device gpu("cuda:0");
    expect_error<UsageError>(
        [&] {
          DataParallel(std::make_shared<HalfClonedImpl>(), {.devices = {kCpu, gpu}});
        },
        "'part.first.weight' of the clone is on cpu", "torch::nn::Cloneable");
  }
}

TEST(DataParallelTest, SaysWhatIsWrong) {
  DataParallel dp(Many(), {.devices = {kCpu, kCpu}});
  using Pair = std::pair<torch::Tensor, std::optional<torch::Tensor>>;
  const auto one = torch::ones({}, torch::kDouble);
  expect_error<UsageError>(
      [&] {
        dp(Pair(torch::ones({4, 2}), torch::ones({3, 2})), one, 1);
      },
      "[4, 2]", "[3, 2]", "dimension 0");
  DataParallel along_columns(Many(), {.devices = {kCpu, kCpu}, .dim = 1});
  expect_error<UsageError>([&] { along_columns(Pair(torch::ones({4}), std::nullopt), one, 1); }, "[4]", "dimension 1");
  expect_error<UsageError>([] { DataParallel(Mlp(), {.devices = {kCpu, kCpu}}); }, "torch::nn::Cloneable", "reset()");
  expect_error<UsageError>([] { DataParallel(make_net(), {.devices = {kCpu}, .dim = -1}); }, "dim is -1");
  expect_error<UsageError>([] { DataParallel(std::shared_ptr<NetImpl>()); }, "empty");
  expect_error<UsageError>([] { DataParallel(make_net(), {.devices = {torch::Device(torch::kCUDA, 99)}}); }, "cuda:99",
                           "GPU", "CUDA_VISIBLE_DEVICES");
  if (torch::cuda::is_available()) {
    expect_error<UsageError>([] { DataParallel(make_net(), {.devices = {torch::Device("cuda:0")}}); },
                             "'unused' is on cpu", "cuda:0", "model->to()");
  }
  run_threads(1, [](ProcessGroup world) {
    auto net = make_net();
    convert_sync_batchnorm(*net, world);
    expect_error<UsageError>([&] { DataParallel(net, {.devices = {kCpu, kCpu}}); }, "layer 'norm'", "SyncBatchNorm");
    auto later = make_net();
    DataParallel wrapped(later, {.devices = {kCpu, kCpu}});
    convert_sync_batchnorm(*later, world);
    expect_error<UsageError>([&] { wrapped(inputs(4)); }, "layer 'norm'", "SyncBatchNorm");
  });
}

}  // namespace
}  // namespace lockstep
