// Gradient accumulation, and activations that are computed again in backward.

#include <optional>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/accumulate.h>
#include <lockstep/autocast.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/recompute.h>
#include <lockstep/run_threads.h>
#include <lockstep/sync_batch_norm.h>

#include "parallel/gradients.h"
#include "support/messages.h"

namespace lockstep {
namespace {

namespace F = torch::nn::functional;
using torch::Tensor;

// --- groups

TEST(InGroups, TheLastGroupIsWhatIsLeft) {
  std::vector<std::vector<int>> groups;
  for (auto& group : in_groups(std::vector<int>{1, 2, 3, 4, 5}, 2)) groups.push_back(group);
  EXPECT_EQ(groups, (std::vector<std::vector<int>>{{1, 2}, {3, 4}, {5}}));
  for (auto& group : in_groups(std::vector<int>{}, 2)) FAIL() << group.size();
  std::vector<int> mine{1, 2};
  struct Counting {  // as a loader: an element is made when it is asked for
    struct iterator {
      int* made;
      int at;
      int operator*() const { return at; }
      iterator& operator++() {
        ++*made;
        ++at;
        return *this;
      }
      bool operator!=(const iterator& other) const { return at != other.at; }
    };
    int made = 0;
    iterator begin() { return {&made, 0}; }
    iterator end() { return {&made, 5}; }
  } counting;
  int seen = 0;
  for (auto& group : in_groups(counting, 2)) {
    seen += static_cast<int>(group.size());
    if (group.size() == 2) {
      EXPECT_LT(counting.made, seen) << "asked for the next group's element";
    }
  }
  EXPECT_EQ(seen, 5);
  size_t count = 0;
  for (auto& group : in_groups(mine, 7)) count += group.size();
  EXPECT_EQ(count, 2u);
  expect_error<UsageError>([&] { in_groups(mine, 0); }, "0 elements", "1 or more");
}

// --- accumulate

/// Micro-batches of 3, 1, 4, ... samples: other ones on each rank.
std::vector<torch::data::Example<>> micro_batches_of(int step, int rank) {
  std::vector<torch::data::Example<>> batches;
  const std::vector<std::vector<int64_t>> sizes{{3, 1, 4}, {2, 5}};
  for (size_t i = 0; i < sizes[rank].size(); ++i) {
    auto generator = at::detail::createCPUGenerator(1000 * step + 10 * rank + i);
    batches.emplace_back(torch::randn({sizes[rank][i], 6}, generator, at::kDouble),
                         torch::randint(0, 4, {sizes[rank][i]}, generator, at::kLong));
  }
  return batches;
}

Mlp double_mlp() {
  auto model = filled_mlp();
  model->to(at::kDouble);
  return model;
}

TEST(Accumulate, EqualsOneProcessOnAllSamples) {
  auto alone = double_mlp();
  torch::optim::SGD alone_optimizer(alone->parameters(), 0.1);
  std::vector<double> losses;
  for (int step = 0; step < 3; ++step) {
    std::vector<Tensor> data, targets;
    for (int rank : {0, 1})
      for (auto& batch : micro_batches_of(step, rank)) {
        data.push_back(batch.data);
        targets.push_back(batch.target);
      }
    alone_optimizer.zero_grad();
    auto loss = F::cross_entropy(alone(torch::cat(data)), torch::cat(targets));
    loss.backward();
    losses.push_back(loss.item<double>());
    alone_optimizer.step();
  }
  run_threads(2, [&](ProcessGroup world) {
    auto model = double_mlp();
    DistributedDataParallel ddp(model, world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      auto batches = micro_batches_of(step, world.rank());
      optimizer.zero_grad();
      const auto before = ddp.logging_data().steps;
      auto loss = accumulate(ddp, batches, [&](auto& b) { return F::cross_entropy(ddp(b.data), b.target); });
      EXPECT_EQ(ddp.logging_data().steps, before + 1) << "one reduction";
      EXPECT_FALSE(loss.requires_grad());
      auto weighted = loss * static_cast<double>(world.rank() == 0 ? 8 : 7);
      world.all_reduce(weighted);
      EXPECT_NEAR(weighted.item<double>() / 15, losses[step], 1e-12);
      optimizer.step();
    }
    for (size_t i = 0; i < model->parameters().size(); ++i)
      EXPECT_LT(relative_difference(model->parameters()[i], alone->parameters()[i]), 1e-10);
  });
}

// Each micro-batch is normalized over all ranks, so the process alone runs one micro-batch of all ranks at a time.
TEST(Accumulate, EqualsOneProcessOnAllSamplesWithSyncBatchNorm) {
  const std::vector<std::vector<int64_t>> sizes{{3, 0, 2}, {2, 5, 3}};  // by rank and micro-batch
  const auto batch_of = [&](int rank, size_t i) {
    auto generator = at::detail::createCPUGenerator(10 * static_cast<uint64_t>(rank) + i);
    const auto data = torch::randn({sizes[rank][i], 6}, generator, at::kDouble);
    return torch::data::Example<>(data, torch::randint(0, 4, {sizes[rank][i]}, generator, at::kLong));
  };
  const auto make_model = [] {
    torch::nn::Sequential model(torch::nn::Linear(6, 5), torch::nn::BatchNorm1d(5), torch::nn::Linear(5, 4));
    fill_parameters(*model, 1);
    model->to(at::kDouble);
    return model;
  };
  auto alone = make_model();
  double loss = 0;
  for (size_t i = 0; i < 3; ++i) {
    const auto one = batch_of(0, i), two = batch_of(1, i);
    const auto part =
        F::cross_entropy(alone->forward(torch::cat({one.data, two.data})), torch::cat({one.target, two.target}),
                         F::CrossEntropyFuncOptions().reduction(torch::kSum)) /
        15;
    part.backward();
    loss += part.item<double>();
  }
  run_threads(2, [&](ProcessGroup world) {
    auto model = make_model();
    convert_sync_batchnorm(*model, world);
    DistributedDataParallel ddp(model, world);
    std::vector<torch::data::Example<>> batches;
    for (size_t i = 0; i < 3; ++i) batches.push_back(batch_of(world.rank(), i));
    auto mean = accumulate(ddp, batches, [&](auto& b) { return F::cross_entropy(ddp(b.data), b.target); });
    auto weighted = mean * static_cast<double>(world.rank() == 0 ? 5 : 10);
    world.all_reduce(weighted);
    EXPECT_NEAR(weighted.item<double>() / 15, loss, 1e-12);
    // The bias before the layer has a gradient of 0, except for rounding.
    for (size_t i = 0; i < model->parameters().size(); ++i)
      EXPECT_TRUE(at::allclose(model->parameters()[i].grad(), alone->parameters()[i].grad(), 1e-10, 1e-14)) << i;
  });
}

TEST(Accumulate, TakesEmptyMicroBatchesButNotNone) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = double_mlp();
    DistributedDataParallel ddp(model, world);
    auto loss = [&](const Tensor& batch) { return ddp(batch).square().mean(); };
    const auto empty = torch::ones({0, 6}, at::kDouble), full = torch::ones({2, 6}, at::kDouble);
    std::vector<Tensor> batches{empty, world.rank() == 0 ? full : empty, empty};
    accumulate(ddp, batches, loss);
    auto alone = double_mlp();
    alone(full).square().mean().backward();
    for (size_t i = 0; i < 6; ++i)
      EXPECT_LT(relative_difference(model->parameters()[i].grad(), alone->parameters()[i].grad()), 1e-12);
    std::vector<Tensor> none;
    expect_error<UsageError>([&] { accumulate(ddp, none, loss); }, "no micro-batch");
  });
}

// --- recompute

struct Counter {
  int calls = 0;
};

TEST(Recompute, GivesTheSameGradients) {
  auto run = [](bool recomputes, Counter& counter) {
    auto model = double_mlp();
    auto input = torch::randn({5, 6}, at::detail::createCPUGenerator(1), at::kDouble).requires_grad_();
    auto segment = [&](Tensor x, double scale) {
      ++counter.calls;
      return std::make_tuple(torch::tanh(model->second(torch::tanh(model->first(x)))) * scale, x * 2);
    };
    auto [one, two] = recomputes ? recompute(segment, input, 0.5) : segment(input, 0.5);
    (model->third(one).square().sum() + two.sum()).backward();
    std::vector<Tensor> gradients{input.grad()};
    for (const auto& parameter : model->parameters()) gradients.push_back(parameter.grad());
    return gradients;
  };
  Counter once, twice;
  const auto expected = run(false, once), actual = run(true, twice);
  EXPECT_EQ(once.calls, 1);
  EXPECT_EQ(twice.calls, 2);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(actual[i].equal(expected[i])) << i;
}

// Between forward and backward other random numbers are drawn, which continue as if nothing had been repeated.
TEST(Recompute, RepeatsRandomNumbersAndContinuesWithNewOnes) {
  auto run = [](bool recomputes) {
    torch::manual_seed(7);
    auto weight = torch::ones({100}).requires_grad_();
    auto drop = [&] { return torch::dropout(weight * 3, 0.5, true); };
    auto dropped = recomputes ? recompute(drop) : drop();
    const auto between = torch::rand({3});
    (dropped * dropped).sum().backward();
    return std::tuple(weight.grad(), between, torch::rand({3}));
  };
  const auto [gradient, between, after] = run(false);
  const auto [again, again_between, again_after] = run(true);
  EXPECT_TRUE(again.equal(gradient));
  EXPECT_TRUE(again_between.equal(between));
  EXPECT_TRUE(again_after.equal(after));
  EXPECT_GT((gradient == 0).sum().item<int64_t>(), 20);
}

TEST(Recompute, RepeatsAutocast) {
  auto weight = torch::randn({64, 64}).requires_grad_();
  std::vector<at::ScalarType> dtypes;
  auto multiply = [&] {
    auto product = torch::mm(weight, weight);
    dtypes.push_back(product.scalar_type());
    return product.to(at::kFloat);
  };
  Tensor result;
  {
    auto guard = autocast(torch::kCPU, at::kBFloat16);
    result = recompute(multiply);
  }
  result.sum().backward();
  EXPECT_EQ(dtypes, (std::vector<at::ScalarType>{at::kBFloat16, at::kBFloat16}));
  EXPECT_FALSE(AutocastState::current(c10::kCPU).is_enabled);
}

TEST(Recompute, KeepsOnlyTheInputs) {
  auto weight = torch::ones({10}).requires_grad_();
  c10::weak_intrusive_ptr<c10::TensorImpl> inner = [&] {
    c10::intrusive_ptr<c10::TensorImpl> kept = torch::ones({1}).getIntrusivePtr();
    return c10::weak_intrusive_ptr<c10::TensorImpl>(kept);
  }();
  auto input = torch::ones({10}).requires_grad_();
  int calls = 0;
  auto output = recompute(
      [&](Tensor x) {
        const auto square = x.exp();  // saved by an ordinary graph
        if (calls++ == 0) inner = c10::weak_intrusive_ptr<c10::TensorImpl>(square.getIntrusivePtr());
        return square * weight;
      },
      input);
  EXPECT_TRUE(inner.expired());
  output.sum().backward();
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(input.grad().equal(torch::ones({10}).exp()));
}

TEST(Recompute, WithoutGradientsOnlyCalls) {
  int calls = 0;
  const c10::NoGradGuard no_grad;
  auto output = recompute([&](Tensor x) { return ++calls, x * 2; }, torch::ones({2}));
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(output.equal(torch::full({2}, 2.0)));
}

TEST(Recompute, PartsOfAModelTrainOnAllRanks) {
  const auto means = mean_gradients(2);
  run_threads(2, [&](ProcessGroup world) {
    struct RecomputedMlp : MlpImpl {
      Tensor forward(Tensor x) {
        x = recompute([this](Tensor y) { return torch::tanh(first(y)); }, x);
        x = recompute([this](Tensor y) { return torch::tanh(second(y)); }, x);
        return third(x);
      }
    };
    for (const bool find_unused : {false, true}) {
      auto model = std::make_shared<RecomputedMlp>();
      fill_parameters(*model, 1);
      DistributedDataParallel ddp(model, world, {.find_unused_parameters = find_unused, .buckets = {100, 200}});
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        ddp(input_of(world.rank())).square().sum().backward();
        expect_gradients(*model, means);
      }
    }
  });
}

// The first call is without gradients: what it casts must not be used later.
TEST(Recompute, SharesWeightsWithOtherCallsUnderAutocast) {
  auto weight = torch::randn({8, 8}, at::detail::createCPUGenerator(3)).requires_grad_();
  auto run = [&](bool recomputes) {
    weight.mutable_grad().reset();
    Tensor loss;
    {
      auto guard = autocast(torch::kCPU, at::kBFloat16);
      auto multiply = [&](Tensor x) { return torch::mm(x, weight); };
      auto x = torch::ones({8, 8});
      x = recomputes ? recompute(multiply, x) : multiply(x);
      loss = multiply(x).to(at::kFloat).sum();
    }
    loss.backward();
    return weight.grad().clone();
  };
  EXPECT_LT(relative_difference(run(true), run(false)), 0.01);  // bfloat16 is rounded in other places
}

TEST(Recompute, RefusesWhatItCannotDo) {
  auto input = torch::ones({2}).requires_grad_();
  auto output = recompute([](Tensor x) { return x * x; }, input);
  expect_error<UsageError>([&] { torch::autograd::grad({output.sum()}, {input}); }, "autograd::grad()", "backward()");
  auto twice = recompute([](Tensor x) { return x * x; }, input);
  expect_error<UsageError>([&] { twice.sum().backward({}, true, /*create_graph=*/true); }, "create_graph");
  int calls = 0;
  auto changing = recompute([&](Tensor x) { return std::vector<Tensor>(++calls, x * 2); }, input);
  expect_error<UsageError>([&] { changing[0].sum().backward(); }, "returned 1 tensors in forward and 2");
}

// --- autocast

TEST(AutocastGuard, IsNestedAndRestored) {
  auto matrix = torch::ones({4, 4});
  auto dtype = [&] { return torch::mm(matrix, matrix).scalar_type(); };
  EXPECT_EQ(dtype(), at::kFloat);
  {
    auto outer = autocast(torch::kCPU);
    EXPECT_EQ(dtype(), at::kBFloat16);
    {
      auto inner = no_autocast(torch::kCPU);
      EXPECT_EQ(dtype(), at::kFloat);
    }
    EXPECT_EQ(dtype(), at::kBFloat16);
  }
  EXPECT_EQ(dtype(), at::kFloat);
  expect_error<UsageError>([&] { auto guard = autocast(torch::kCPU, at::kInt); }, "Int", "BFloat16");
  expect_error<UsageError>([&] { auto guard = autocast(torch::kMeta); }, "meta", "CUDA");
}

TEST(AutocastGuard, IsSwitchedOffByItsArgument) {
  auto matrix = torch::ones({4, 4});
  auto dtype = [&] { return torch::mm(matrix, matrix).scalar_type(); };
  for (const bool enabled : {true, false}) {
    auto guard = autocast(torch::kCPU, at::kBFloat16, enabled);
    EXPECT_EQ(dtype(), enabled ? at::kBFloat16 : at::kFloat);
    auto inner = autocast(torch::kCPU, at::kBFloat16, !enabled);
    EXPECT_EQ(dtype(), enabled ? at::kFloat : at::kBFloat16);
  }
  EXPECT_EQ(dtype(), at::kFloat);
}

TEST(AutocastGuard, LastsAsLongAsTheGuardToWhichItWasMoved) {
  auto matrix = torch::ones({4, 4});
  auto dtype = [&] { return torch::mm(matrix, matrix).scalar_type(); };
  std::optional<Autocast> kept;
  {
    auto guard = autocast(torch::kCPU);
    kept.emplace(std::move(guard));
  }
  EXPECT_EQ(dtype(), at::kBFloat16);
  kept.reset();
  EXPECT_EQ(dtype(), at::kFloat);
}

TEST(AutocastGuard, TrainsOnAllRanksInFloat32) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      Tensor loss;
      {
        auto guard = autocast(world.device(), at::kBFloat16);
        loss = ddp(input_of(world.rank())).square().sum();
      }
      loss.backward();
      const auto means = mean_gradients(2);
      for (size_t i = 0; i < means.size(); ++i) {
        EXPECT_EQ(model->parameters()[i].grad().scalar_type(), at::kFloat);
        EXPECT_LT(relative_difference(model->parameters()[i].grad(), means[i]), 0.05);
        EXPECT_GT(relative_difference(model->parameters()[i].grad(), means[i]), 1e-5) << "not in bfloat16";
      }
    }
  });
}

}  // namespace
}  // namespace lockstep
