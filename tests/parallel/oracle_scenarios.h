#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/sync_batch_norm.h>

#include "parallel/models.h"
#include "parallel/training.h"

/// Training that is done here and, by the same names, in ddp_oracle.py.

namespace lockstep::oracle {

constexpr int kSteps = 20;

using Options = DistributedDataParallelOptions;
using Named = std::vector<std::pair<std::string, torch::Tensor>>;

/// Where a scenario trains, and in which precision unless it has its own.
struct Place {
  torch::Device device;
  at::ScalarType dtype;
};

inline Named result_of(const torch::nn::Module& model) {
  Named result;
  for (const auto& item : model.named_parameters()) result.emplace_back(item.key(), item.value());
  for (const auto& item : model.named_buffers())
    if (!item.key().ends_with("num_batches_tracked")) result.emplace_back(item.key(), item.value());
  return result;
}

inline void zero(const torch::nn::Module& model) {
  for (auto& parameter : model.parameters())
    if (parameter.grad().defined()) parameter.mutable_grad().zero_();
}

inline torch::Tensor loss_of(const torch::Tensor& output, int step, int rank) {
  return torch::nn::functional::cross_entropy(output, targets_of(step, rank).to(output.device()));
}

inline torch::Tensor image_of(int step, int rank, const Place& place) {
  return inputs_of(step, rank, {1, 6, 6}, place.dtype).to(place.device);
}

template <class Model>
Model filled(const Place& place) {
  Model model;
  fill_parameters(*model, 1);
  model->to(place.device, place.dtype);
  return model;
}

inline Named train(ConvNet model, const ProcessGroup& world, const Place& place, const std::string& optimizer_name,
                   const Options& options = {}, const CommHook& hook = {}) {
  DistributedDataParallel ddp(model, world, options);
  if (hook) ddp.register_comm_hook(hook);
  auto optimizer = make_optimizer(optimizer_name, ddp.parameters());
  for (int step = 0; step < kSteps; ++step) {
    zero(*model);
    loss_of(ddp(image_of(step, world.rank(), place)), step, world.rank()).backward();
    optimizer->step();
  }
  return result_of(*model);
}

inline Named plain(const ProcessGroup& world, const Place& place, const std::string& optimizer_name,
                   const Options& options = {}, const CommHook& hook = {}) {
  return train(filled<ConvNet>(place), world, place, optimizer_name, options, hook);
}

inline Named sync_batch_norm(const ProcessGroup& world, const Place& place) {
  auto model = filled<ConvNet>(place);
  convert_sync_batchnorm(*model, world);
  return train(model, world, place, "momentum");
}

struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() {
    body = register_module("body", torch::nn::Linear(6, 8));
    left = register_module("left", torch::nn::Linear(8, 4));
    right = register_module("right", torch::nn::Linear(8, 4));
  }
  torch::Tensor forward(torch::Tensor x, bool use_left, bool use_right) {
    x = torch::tanh(body(x));
    auto y = x.narrow(1, 0, 4);
    if (use_left) y = y + left(x);
    if (use_right) y = y + right(x);
    return y;
  }
  torch::nn::Linear body{nullptr}, left{nullptr}, right{nullptr};
};
TORCH_MODULE(TwoHeads);

/// `heads_of(step)` says whether the left one is used, and the right one.
inline Named two_heads(const ProcessGroup& world, const Place& place, const Options& options,
                       const std::function<std::pair<bool, bool>(int)>& heads_of) {
  auto model = filled<TwoHeads>(place);
  DistributedDataParallel ddp(model, world, options);
  torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    if (step % 4 != 3) zero(*model);  // in the other steps gradients add up
    const auto [use_left, use_right] = heads_of(step);
    auto output = ddp(inputs_of(step, world.rank(), {6}, place.dtype).to(place.device), use_left, use_right);
    loss_of(output, step, world.rank()).backward();
    optimizer.step();
  }
  return result_of(*model);
}

inline Named unused(const ProcessGroup& world, const Place& place, Options options = {}) {
  options.find_unused_parameters = true;
  return two_heads(world, place, options,
                   [&](int step) { return std::pair((step + world.rank()) % 2 == 0, step % 3 == 0); });
}

inline Named static_graph(const ProcessGroup& world, const Place& place, Options options = {}) {
  options.static_graph = true;
  return two_heads(world, place, options, [](int) { return std::pair(true, false); });
}

inline Named no_sync(const ProcessGroup& world, const Place& place, const Options& options = {}) {
  auto model = filled<ConvNet>(place);
  DistributedDataParallel ddp(model, world, options);
  torch::optim::SGD optimizer(ddp.parameters(), 0.05);
  for (int step = 0; step < kSteps; ++step) {
    auto train = [&] { loss_of(ddp(image_of(step, world.rank(), place)), step, world.rank()).backward(); };
    if (step % 3 != 2) {
      auto guard = ddp.no_sync();
      train();
    } else {
      train();
      optimizer.step();
      zero(*model);
    }
  }
  return result_of(*model);
}

inline Named uneven(const ProcessGroup& world, const Place& place, const JoinOptions& options) {
  auto model = filled<ConvNet>(place);
  DistributedDataParallel ddp(model, world);
  torch::optim::SGD optimizer(ddp.parameters(), 0.05);
  ddp.join(
      [&] {
        for (int step = 0; step < 3 + 2 * ((world.rank() + 1) % world.size()); ++step) {
          zero(*model);
          loss_of(ddp(image_of(step, world.rank(), place)), step, world.rank()).backward();
          optimizer.step();
        }
      },
      options);
  return result_of(*model);
}

struct TokensImpl : torch::nn::Module {
  TokensImpl() {
    table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(12, 6).sparse(true)));
    head = register_module("head", torch::nn::Linear(6, 4));
  }
  torch::Tensor forward(torch::Tensor tokens) { return head(torch::tanh(table(tokens))); }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Tokens);

/// The rows of a step differ between the ranks.
inline Named sparse(const ProcessGroup& world, const Place& place, const Options& options = {}) {
  auto model = filled<Tokens>(place);
  DistributedDataParallel ddp(model, world, options);
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
    const auto tokens = (targets_of(step, world.rank()) * 2 + world.rank()).to(place.device);
    loss_of(ddp(tokens), step, world.rank()).backward();
    optimizer.step();
  }
  return result_of(*model);
}

/// Trains a generator through a discriminator that is frozen meanwhile.
inline Named gan(const ProcessGroup& world, const Place& place, const Options& options = {}) {
  torch::nn::Linear generator(6, 6);
  fill_parameters(*generator, 1);
  generator->to(place.device, place.dtype);
  auto discriminator = filled<Mlp>(place);
  DistributedDataParallel ddp_generator(generator, world, options);
  DistributedDataParallel ddp_discriminator(discriminator, world, options);
  torch::optim::SGD generator_optimizer(generator->parameters(), 0.1);
  torch::optim::SGD discriminator_optimizer(discriminator->parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    const auto fake = ddp_generator(inputs_of(step, world.rank(), {6}, place.dtype).to(place.device));
    zero(*discriminator);
    loss_of(ddp_discriminator(fake.detach()), step, world.rank()).backward();
    discriminator_optimizer.step();
    zero(*generator);
    for (auto& parameter : discriminator->parameters()) parameter.requires_grad_(false);
    (-loss_of(ddp_discriminator(fake), step, world.rank())).backward();
    for (auto& parameter : discriminator->parameters()) parameter.requires_grad_(true);
    generator_optimizer.step();
  }
  auto result = result_of(*generator);
  for (const auto& item : result_of(*discriminator)) result.push_back(item);
  return result;
}

struct Scenario {
  std::string name;     // of the function in ddp_oracle.py
  std::string variant;  // how it is done here
  std::function<Named(const ProcessGroup&, const Place&)> run;
};

inline const Options kSmallBuckets{.buckets = {100, 200}};
inline const Options kOwnMemory{.gradient_as_bucket_view = false};

inline Place in_float(const Place& place) {
  return {place.device, at::kFloat};
}

/// Also in small buckets, since only those before the last are reduced while backward goes on.
inline const std::vector<Scenario> kScenarios{
    {"sgd", "default", [](auto& world, auto& place) { return plain(world, in_float(place), "momentum"); }},
    {"sgd", "small buckets",
     [](auto& world, auto& place) { return plain(world, in_float(place), "momentum", kSmallBuckets); }},
    {"sgd", "gradients in memory of their own",
     [](auto& world, auto& place) { return plain(world, in_float(place), "momentum", kOwnMemory); }},
    {"adam", "default", [](auto& world, auto& place) { return plain(world, place, "adam"); }},
    {"adam", "small buckets", [](auto& world, auto& place) { return plain(world, place, "adam", kSmallBuckets); }},
    {"bucket_view", "default", [](auto& world, auto& place) { return plain(world, place, "momentum"); }},
    {"fp16", "default",
     [](auto& world, auto& place) { return plain(world, in_float(place), "momentum", {}, fp16_compress()); }},
    {"fp16", "small buckets",
     [](auto& world, auto& place) {
       return plain(world, in_float(place), "momentum", kSmallBuckets, fp16_compress());
     }},
    {"unused", "default", [](auto& world, auto& place) { return unused(world, place); }},
    {"unused", "small buckets", [](auto& world, auto& place) { return unused(world, place, kSmallBuckets); }},
    {"unused", "gradients in memory of their own",
     [](auto& world, auto& place) { return unused(world, place, kOwnMemory); }},
    {"static_graph", "default", [](auto& world, auto& place) { return static_graph(world, place); }},
    {"static_graph", "small buckets",
     [](auto& world, auto& place) { return static_graph(world, place, kSmallBuckets); }},
    {"no_sync", "default", [](auto& world, auto& place) { return no_sync(world, place); }},
    {"no_sync", "small buckets", [](auto& world, auto& place) { return no_sync(world, place, kSmallBuckets); }},
    {"gan", "default", [](auto& world, auto& place) { return gan(world, place); }},
    {"gan", "small buckets", [](auto& world, auto& place) { return gan(world, place, kSmallBuckets); }},
    {"gan", "gradients in memory of their own", [](auto& world, auto& place) { return gan(world, place, kOwnMemory); }},
    {"join", "default", [](auto& world, auto& place) { return uneven(world, place, {}); }},
    {"join_by_current", "default",
     [](auto& world, auto& place) { return uneven(world, place, {.divide_by_initial_world_size = false}); }},
};

/// Those that Python has on CPUs only.
inline const std::vector<Scenario> kCpuScenarios{
    {"sparse", "default", [](auto& world, auto& place) { return sparse(world, place); }},
    {"sparse", "densified",
     [](auto& world, auto& place) { return sparse(world, place, {.densify_sparse_gradients = true}); }},
};

/// Those that Python has on GPUs only.
inline const std::vector<Scenario> kGpuScenarios{
    {"sync_batch_norm", "default", [](auto& world, auto& place) { return sync_batch_norm(world, place); }},
};

/// How far rounding alone may move a tensor, relative to its norm.
inline double tolerance(const Scenario& scenario, at::ScalarType dtype, int ranks) {
  // A gradient that is rounded the other way moves the result by up to 1e-5, gradients that are not rounded to 16 bits
  // at all move parameters by 3e-5 and more. Of more than two ranks, Python rounds sums on the way, too.
  if (scenario.name == "fp16") return ranks == 2 ? 2e-5 : 1e-3;
  // Noise of 1e-7 in every gradient moves results in float32 by up to 1e-6.
  return dtype == at::kFloat ? 2e-6 : 1e-10;
}

/// `expected` has the values of this rank, one after the other.
inline void expect_equal(const ProcessGroup& world, const Scenario& scenario, const Named& actual,
                         const torch::Tensor& expected) {
  int64_t at = 0;
  for (const auto& [name, tensor] : actual) {
    ASSERT_LE(at + tensor.numel(), expected.numel()) << "Python has fewer values";
    EXPECT_LE(relative_difference(tensor.cpu().flatten(), expected.narrow(0, at, tensor.numel())),
              tolerance(scenario, tensor.scalar_type(), world.size()))
        << scenario.name << ", " << scenario.variant << ", rank " << world.rank() << " of " << world.size() << ", "
        << name;
    at += tensor.numel();
  }
  EXPECT_EQ(at, expected.numel()) << "Python has more values";
}

}  // namespace lockstep::oracle
