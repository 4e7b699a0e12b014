// Large gradients are computed in the memory of buckets, and nothing else changes.

#include <algorithm>
#include <cstdlib>
#include <random>

#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/run_threads.h>

#include "parallel/ddp/in_place_gradients.h"
#include "parallel/models.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

constexpr int64_t kWidth = 64;
constexpr int kLayers = 4;
constexpr int kSine = kLayers;  // in place of a layer: a function without parameters

/// Layers that can be called in any order. With kWidth samples, the weights, their gradients, the activations and their
/// gradients all have the same number of bytes, so they are easily confused.
struct ChainImpl : torch::nn::Module {
  ChainImpl() {
    for (int i = 0; i < kLayers; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    fill_parameters(*this, 1);
  }

  torch::Tensor forward(torch::Tensor x) {
    for (int i : order) x = i == kSine ? x.sin() : torch::tanh(layers[i](x));
    return x;
  }

  std::vector<torch::nn::Linear> layers;
  std::vector<int> order{0, 1, 2, 3};
};
TORCH_MODULE(Chain);

static_assert(kWidth * kWidth * sizeof(float) >= InPlaceGradients::kMinBytes);

torch::Tensor chain_input(int step, int rank) {
  auto generator = at::detail::createCPUGenerator(100 * step + rank);
  return torch::randn({kWidth, kWidth}, generator);
}

/// The averaged gradients of a backward without a wrapper; undefined for parameters that are not used.
std::vector<torch::Tensor> averaged_alone(const ProcessGroup& world, const std::vector<int>& order,
                                          const torch::Tensor& input) {
  Chain alone;
  alone->order = order;
  alone(input).pow(2).sum().backward();
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : alone->parameters()) {
    gradients.push_back(parameter.grad());
    if (parameter.grad().defined()) world.all_reduce(gradients.back(), ReduceOp::kAvg);
  }
  return gradients;
}

void expect_averages(const std::vector<torch::Tensor>& parameters, const std::vector<torch::Tensor>& expected,
                     int step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& gradient = parameters[i].grad();
    ASSERT_EQ(gradient.defined(), expected[i].defined()) << "step " << step << ", parameter " << i;
    if (!gradient.defined()) continue;
    EXPECT_TRUE(gradient.equal(expected[i])) << "step " << step << ", parameter " << i;
  }
}

void release_gradients(const std::vector<torch::Tensor>& parameters) {
  for (const auto& parameter : parameters) parameter.mutable_grad().reset();
}

/// A wrapped chain whose every step is compared with averaged_alone().
struct Watched {
  explicit Watched(const ProcessGroup& group, const DistributedDataParallelOptions& options = {})
      : world(group), ddp(chain, world, options), parameters(chain->parameters()) {}

  void step(int number) {
    release_gradients(parameters);
    const auto input = chain_input(number, world.rank());
    ddp(input).pow(2).sum().backward();
    expect_averages(parameters, averaged_alone(world, chain->order, input), number);
  }

  ProcessGroup world;
  Chain chain;
  DistributedDataParallel<ChainImpl> ddp;
  std::vector<torch::Tensor> parameters;
};

TEST(InPlaceGradients, LargeGradientsAreComputedInTheirBuckets) {
  for (const auto* backend : {"threads", "shm"})
    for (const auto& options : {DistributedDataParallelOptions{}, DistributedDataParallelOptions{.static_graph = true},
                                DistributedDataParallelOptions{.buckets = {20000, 20000}}})
      run_threads(2,
                  [&](ProcessGroup world) {
                    Watched watched(world, options);
                    std::vector<const void*> computed(watched.parameters.size());
                    for (size_t i = 0; i < computed.size(); ++i)
                      watched.parameters[i].register_hook(
                          [&computed, i](const torch::Tensor& gradient) { computed[i] = gradient.data_ptr(); });
                    for (int step = 0; step < 5; ++step) {
                      watched.step(step);
                      if (step < 2) continue;  // the first one learns, and ends with other buckets
                      for (size_t i = 0; i + 2 < computed.size();
                           i += 2)  // weights, but the one with which backward begins
                        EXPECT_EQ(computed[i], watched.parameters[i].grad().data_ptr()) << "step " << step << ", " << i;
                    }
                  },
                  {.backend = backend});
}

void expect_none_in_place(const DistributedDataParallelOptions& options) {
  run_threads(2, [&](ProcessGroup world) {
    Watched watched(world, options);
    watched.parameters[0].register_hook(
        [&](const torch::Tensor& gradient) { EXPECT_FALSE(InPlaceGradients::is_taken(gradient)); });
    for (int step = 0; step < 4; ++step) watched.step(step);
  });
}

TEST(InPlaceGradients, CanBeSwitchedOff) {
  expect_none_in_place({.gradient_as_bucket_view = false});
  expect_none_in_place({.in_place_gradients = false});
  ::setenv("LOCKSTEP_IN_PLACE_GRADIENTS", "0", 1);
  expect_none_in_place({});
  ::setenv("LOCKSTEP_IN_PLACE_GRADIENTS", "off", 1);
  EXPECT_THROW(expect_none_in_place({}), UsageError);
  ::unsetenv("LOCKSTEP_IN_PLACE_GRADIENTS");
}

// A hook that keeps a gradient's memory keeps this rank's values, as it does when gradients are copied.
TEST(InPlaceGradients, WhatAHookKeepsDoesNotChange) {
  using Keep = std::function<torch::Tensor(const torch::Tensor&)>;
  const std::vector<Keep> ways{
      [](const torch::Tensor& gradient) { return gradient; },
      [](const torch::Tensor& gradient) { return gradient.detach(); },
      [](const torch::Tensor& gradient) { return gradient.t(); },
      [](const torch::Tensor& gradient) { return gradient.is_view() ? gradient._base() : gradient.narrow(0, 0, 1); }};
  for (const auto& keep : ways)
    run_threads(2, [&](ProcessGroup world) {
      Watched watched(world);
      std::vector<torch::Tensor> kept, copies;
      int step = 0;
      for (const auto& parameter : watched.parameters)
        parameter.register_hook([&](const torch::Tensor& gradient) {
          if (step < 3 || gradient.dim() != 2) return;
          kept.push_back(keep(gradient));
          copies.push_back(kept.back().clone());
        });
      for (; step < 6; ++step) watched.step(step);
      ASSERT_EQ(kept.size(), 3 * kLayers);
      for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(kept[i].equal(copies[i])) << i;
    });
}

// Graphs that change from step to step, in which gradients of activations take the places of others and are kept.
TEST(InPlaceGradients, WrongGuessesChangeNothing) {
  for (const auto* backend : {"threads", "shm"})
    run_threads(2,
                [](ProcessGroup world) {
                  std::mt19937 random(1);  // equal on all ranks
                  int wrong_guesses = 0;
                  for (int round = 0; round < 10; ++round) {
                    Watched watched(world, {.find_unused_parameters = true, .buckets = {20000, 40000}});
                    std::vector<torch::Tensor> kept, copies;
                    for (int step = 0; step < 8; ++step) {
                      auto& order = watched.chain->order = {0, 1, 2, 3, kSine, kSine};
                      std::shuffle(order.begin(), order.end(), random);
                      order.resize(3 + random() % 4);
                      release_gradients(watched.parameters);
                      auto input = chain_input(step, world.rank()).requires_grad_();  // so it gets a gradient as well
                      input.register_hook([&](const torch::Tensor& gradient) {
                        copies.push_back(gradient.clone());
                        wrong_guesses += InPlaceGradients::is_taken(gradient) ? 1 : 0;
                      });
                      watched.ddp(input).pow(2).sum().backward();
                      expect_averages(watched.parameters, averaged_alone(world, order, input.detach()), step);
                      kept.push_back(input.grad());
                    }
                    for (size_t i = 0; i < kept.size(); ++i)
                      EXPECT_TRUE(kept[i].equal(copies[i])) << round << ", " << i;
                  }
                  EXPECT_GT(wrong_guesses, 0) << "the test sees nothing";
                },
                {.backend = backend});
}

// Backward may read the gradient of the step before, which the program has kept.
TEST(InPlaceGradients, AnOldGradientIsKeptUntilTheNewOneIsComplete) {
  for (bool keeps_alias : {false, true})
    run_threads(2, [=](ProcessGroup world) {
      Watched watched(world);
      std::vector<torch::Tensor> old(watched.parameters.size()), copies(old.size());
      for (size_t i = 0; i < old.size(); ++i)
        watched.parameters[i].register_hook(
            [&, i](const torch::Tensor&) { EXPECT_TRUE(!old[i].defined() || old[i].equal(copies[i])) << i; });
      for (int step = 0; step < 5; ++step) {
        watched.step(step);
        for (size_t i = 0; i < old.size() && step >= 2; ++i) {
          old[i] = keeps_alias ? watched.parameters[i].grad().detach() : watched.parameters[i].grad();
          copies[i] = old[i].clone();
        }
      }
    });
}

/// Keeps .grad() of a parameter as it is after its accumulation.
struct KeepGradient : torch::autograd::FunctionPostHook {
  KeepGradient(torch::Tensor parameter, std::vector<torch::Tensor>& kept, std::vector<torch::Tensor>& copies)
      : parameter(std::move(parameter)), kept(kept), copies(copies) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    kept.push_back(parameter.grad());
    copies.push_back(parameter.grad().clone());
    return outputs;
  }

  const torch::Tensor parameter;
  std::vector<torch::Tensor>&kept, &copies;
};

TEST(InPlaceGradients, WhatAnEarlierHookKeepsDoesNotChange) {
  run_threads(2, [](ProcessGroup world) {
    Chain chain;
    std::vector<torch::Tensor> kept, copies;
    const auto accumulator = torch::autograd::impl::grad_accumulator(chain->layers[0]->weight);
    accumulator->add_post_hook(std::make_unique<KeepGradient>(chain->layers[0]->weight, kept, copies));
    DistributedDataParallel ddp(chain, world);
    for (int step = 0; step < 4; ++step) {
      release_gradients(chain->parameters());
      ddp(chain_input(step, world.rank())).pow(2).sum().backward();
    }
    ASSERT_EQ(kept.size(), 4);
    for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(kept[i].equal(copies[i])) << i;
  });
}

/// Sums rows of a table of 32 KiB, with a sparse gradient.
struct TableImpl : torch::nn::Module {
  TableImpl() {
    table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(1000, 8).sparse(true)));
    fill_parameters(*this, 1);
  }
  torch::Tensor forward(torch::Tensor rows) { return table(rows); }
  torch::nn::Embedding table{nullptr};
};
TORCH_MODULE(Table);

TEST(InPlaceGradients, SparseGradientsAreMadeDenseThere) {
  run_threads(2, [](ProcessGroup world) {
    Table model, alone;
    DistributedDataParallel ddp(model, world, {.densify_sparse_gradients = true});
    for (int step = 0; step < 5; ++step) {
      const auto rows = torch::arange(10) * (step + 1) + world.rank();
      release_gradients(model->parameters());
      release_gradients(alone->parameters());
      ddp(rows).pow(2).sum().backward();
      alone(rows).pow(2).sum().backward();
      auto expected = alone->table->weight.grad().to_dense();
      world.all_reduce(expected, ReduceOp::kAvg);
      EXPECT_TRUE(model->table->weight.grad().equal(expected)) << step;
    }
  });
}

TEST(InPlaceGradients, GradientsAccumulate) {
  run_threads(2, [](ProcessGroup world) {
    Watched watched(world);
    for (int step = 0; step < 3; ++step) watched.step(step);
    const auto input = [&](int step) { return chain_input(step, world.rank()); };
    release_gradients(watched.parameters);
    {
      const auto no_sync = watched.ddp.no_sync();
      watched.ddp(input(0)).pow(2).sum().backward();
    }
    watched.ddp(input(1)).pow(2).sum().backward();
    watched.ddp(input(2)).pow(2).sum().backward();  // adds to averaged gradients
    Chain alone;
    alone(input(0)).pow(2).sum().backward();
    alone(input(1)).pow(2).sum().backward();
    for (const auto& parameter : alone->parameters()) world.all_reduce(parameter.grad(), ReduceOp::kAvg);
    alone(input(2)).pow(2).sum().backward();
    for (const auto& parameter : alone->parameters()) world.all_reduce(parameter.grad(), ReduceOp::kAvg);
    for (size_t i = 0; i < watched.parameters.size(); ++i)
      EXPECT_TRUE(watched.parameters[i].grad().equal(alone->parameters()[i].grad())) << i;
  });
}

TEST(InPlaceGradients, OfTwoWrappersInOneBackward) {
  run_threads(2, [](ProcessGroup world) {
    Watched first(world), second(world);
    for (int step = 0; step < 5; ++step) {
      release_gradients(first.parameters);
      release_gradients(second.parameters);
      const auto input = chain_input(step, world.rank());
      (first.ddp(input).pow(2).sum() + second.ddp(input).pow(2).sum()).backward();
      const auto expected = averaged_alone(world, first.chain->order, input);
      expect_averages(first.parameters, expected, step);
      expect_averages(second.parameters, expected, step);
    }
  });
}

// A tensor that was allocated in a bucket's memory may live longer than the wrapper and the group.
TEST(InPlaceGradients, TensorsOutliveTheWrapper) {
  std::vector<torch::Tensor> kept(2), copies(2);
  run_threads(2, [&](ProcessGroup world) {
    Watched watched(world);
    int step = 0;
    watched.parameters[0].register_hook([&](const torch::Tensor& gradient) {
      if (step == 3) kept[world.rank()] = gradient;
    });
    for (; step < 4; ++step) watched.step(step);
    EXPECT_TRUE(InPlaceGradients::is_taken(kept[world.rank()]));
    copies[world.rank()] = kept[world.rank()].clone();
  });
  for (int rank = 0; rank < 2; ++rank) EXPECT_TRUE(kept[rank].equal(copies[rank])) << rank;
  const auto* place = kept[0].data_ptr();
  kept.clear();
  EXPECT_FALSE(InPlaceGradients::is_taken(at::from_blob(const_cast<void*>(place), {1})));
}

// LibTorch also allocates without a tensor. The guess is wrong here: the memory takes the place of a gradient.
TEST(InPlaceGradients, RawMemoryMayBeAPlace) {
  run_threads(1, [](ProcessGroup world) {
    Watched watched(world);
    auto* const allocator = c10::GetCPUAllocator();
    std::vector<void*> places;
    int step = 0;
    for (size_t i = 0; i < watched.parameters.size(); ++i)
      watched.parameters[i].register_hook([&](const torch::Tensor&) {
        if (step < 3) return;
        auto* const memory = static_cast<char*>(allocator->raw_allocate(kWidth * kWidth * sizeof(float)));
        std::fill(memory, memory + kWidth * kWidth * sizeof(float), 1);
        if (InPlaceGradients::is_taken(at::from_blob(memory, {1}))) places.push_back(memory);
        allocator->raw_deallocate(memory);
      });
    for (; step < 5; ++step) watched.step(step);
    EXPECT_FALSE(places.empty()) << "the test sees nothing";
    for (void* place : places) EXPECT_FALSE(InPlaceGradients::is_taken(at::from_blob(place, {1})));
  });
}

}  // namespace
}  // namespace lockstep
