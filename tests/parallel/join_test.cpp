#include <lockstep/join.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/comm_hook.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/run_threads.h>

#include "parallel/gradients.h"
#include "parallel/models.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

/// SGD on `batches` inputs in a join, with gradients of the mean of squares.
template <class Ddp>
void train_batches(Ddp& ddp, int rank, int batches) {
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);
  for (int i = 0; i < batches; ++i) {
    optimizer.zero_grad();
    ddp(input_of(10 * i + rank)).square().mean().backward();
    optimizer.step();
  }
}

/// What one process does that knows which ranks have inputs in each iteration.
Mlp reference(const std::vector<int>& batches, bool divide_by_all) {
  auto model = filled_mlp();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const int last = *std::max_element(batches.begin(), batches.end());
  for (int i = 0; i < last; ++i) {
    optimizer.zero_grad();
    torch::Tensor loss = torch::zeros({});
    int trains = 0;
    for (size_t rank = 0; rank < batches.size(); ++rank) {
      if (i >= batches[rank]) continue;
      loss = loss + model(input_of(10 * i + static_cast<int>(rank))).square().mean();
      ++trains;
    }
    (loss / (divide_by_all ? static_cast<double>(batches.size()) : trains)).backward();
    optimizer.step();
  }
  return model;
}

TEST(Join, LetsRanksHaveDifferentNumbersOfInputs) {
  for (const auto& batches :
       std::vector<std::vector<int>>{{3, 5}, {5, 3}, {0, 4}, {2, 6, 4}, {1, 0, 3}, {2, 2, 2}, {0, 0}}) {
    for (bool divide_by_all : {true, false}) {
      auto expected = reference(batches, divide_by_all);
      for (const auto& backend : backends_under_test()) {
        run_threads(static_cast<int>(batches.size()),
                    [&](ProcessGroup world) {
                      auto model = filled_mlp();
                      DistributedDataParallel ddp(model, world, {.buckets = {.first_bytes = 100, .cap_bytes = 300}});
                      ddp.join([&] { train_batches(ddp, world.rank(), batches[world.rank()]); },
                               {.divide_by_initial_world_size = divide_by_all});
                      for (size_t i = 0; i < expected->parameters().size(); ++i)
                        EXPECT_LE(relative_difference(model->parameters()[i], expected->parameters()[i]), 1e-6)
                            << backend << ", parameter " << i;
                      ddp.check_replicas();
                      model->zero_grad();
                      ddp(input_of(world.rank())).sum().backward();  // after it, everybody counts again
                    },
                    {.backend = backend});
      }
    }
  }
}

TEST(Join, CountsSamplesWhereBatchesHaveWeights) {
  const std::vector<int> batches{1, 3};
  auto batch = [](int rank, int i) {
    return torch::randn({2 + 3 * rank + i, 6}, at::detail::createCPUGenerator(10 * i + rank));
  };
  auto alone = filled_mlp();
  torch::optim::SGD optimizer(alone->parameters(), 0.1);
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    auto x = i < 1 ? torch::cat({batch(0, i), batch(1, i)}) : batch(1, i);
    alone(x).square().mean().backward();
    optimizer.step();
  }
  for (const bool divide_by_all : {true, false})  // has no effect
    run_threads(2, [&](ProcessGroup world) {
      auto model = filled_mlp();
      DistributedDataParallel ddp(model, world);
      ddp.join(
          [&] {
            torch::optim::SGD mine(ddp.parameters(), 0.1);
            for (int i = 0; i < batches[world.rank()]; ++i) {
              auto x = batch(world.rank(), i);
              ddp.set_batch_weight(static_cast<double>(x.size(0)));
              mine.zero_grad();
              ddp(x).square().mean().backward();
              mine.step();
            }
          },
          {.divide_by_initial_world_size = divide_by_all});
      EXPECT_LE(relative_difference(model->first->weight, alone->first->weight), 1e-6) << divide_by_all;
    });
}

// A rank without inputs in a join is like a rank with an empty batch outside of one.
TEST(Join, WithWeightsARankWithoutInputsCountsAsOneWithAnEmptyBatch) {
  const auto train = [](const ProcessGroup& world, auto&& around) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    const auto step = [&](int64_t samples) {
      ddp.set_batch_weight(static_cast<double>(samples));
      optimizer.zero_grad();
      ddp(input_of(world.rank()).narrow(0, 0, samples)).square().mean().backward();
      optimizer.step();
    };
    around(ddp, step);
    return model->first->weight.detach().clone();
  };
  run_threads(3, [&](ProcessGroup world) {
    const int64_t samples = 1 + world.rank() % 2;
    const auto outside = train(world, [&](auto&, const auto& step) {
      step(samples);
      step(world.rank() == 2 ? 0 : samples);
    });
    const auto joined = train(world, [&](auto& ddp, const auto& step) {
      ddp.join([&] {
        for (int i = 0; i < (world.rank() == 2 ? 1 : 2); ++i) step(samples);
      });
    });
    EXPECT_LE(relative_difference(joined, outside), 1e-6);
  });
}

TEST(Join, ARankWithAnEmptyBatchStillTrains) {
  auto alone = filled_mlp();
  alone(input_of(0)).square().mean().backward();
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    int rounds = 0;
    ddp.join(
        [&] {
          for (; rounds < 2; ++rounds) {
            auto x = world.rank() == 0 ? input_of(0) : torch::empty({0, 6});
            ddp.set_batch_weight(static_cast<double>(x.size(0)));
            model->zero_grad();
            ddp(x).square().mean().backward();
            EXPECT_LE(relative_difference(model->first->weight.grad(), alone->first->weight.grad()), 1e-6);
          }
        },
        {.throw_on_early_termination = true});
    EXPECT_EQ(rounds, 2) << "no rank has run out of inputs";
  });
}

// Before the join, on the first member only, and of exactly one sample: whatever is set counts, and no longer than it
// should.
TEST(Join, WeightsHoldForAllMembersAndAfterIt) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp(), other = filled_mlp();
    DistributedDataParallel a(model, world), b(other, world);
    a.set_batch_weight(world.rank() == 0 ? 1 : 3);
    auto mean_of = [](double first, double second) {
      auto sum = filled_mlp(), more = filled_mlp();
      sum(input_of(0)).square().mean().backward();
      more(input_of(1)).square().mean().backward();
      return (first * sum->first->weight.grad() + second * more->first->weight.grad()) / (first + second);
    };
    auto backward = [&](auto& ddp) {
      ddp.module()->zero_grad();
      ddp(input_of(world.rank())).square().mean().backward();
    };
    join({&a, &b}, [&] {
      backward(a);
      backward(b);
      EXPECT_LE(relative_difference(model->first->weight.grad(), mean_of(1, 3)), 1e-6) << "set before the join";
      EXPECT_LE(relative_difference(other->first->weight.grad(), mean_of(1, 3)), 1e-6) << "of the first member";
      a.set_batch_weight(world.rank() == 0 ? 5 : 1);
      backward(a);
      backward(b);
      EXPECT_LE(relative_difference(model->first->weight.grad(), mean_of(5, 1)), 1e-6) << "set inside";
      if (world.rank() == 1) return;
      a.set_batch_weight(1);
      backward(a);
      backward(b);
      EXPECT_LE(relative_difference(model->first->weight.grad(), mean_of(1, 0)), 1e-6) << "alone, with one sample";
    });
    backward(a);
    EXPECT_LE(relative_difference(model->first->weight.grad(), mean_of(1, 3)), 1e-6) << "as before the join";
    backward(b);
    EXPECT_LE(relative_difference(other->first->weight.grad(), mean_of(1, 1)), 1e-6) << "had none";
  });
}

TEST(Join, RepeatsWhatAHookSends) {
  run_threads(3, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, {.buckets = {.first_bytes = 300, .cap_bytes = 700}});
    ddp.register_comm_hook(power_sgd({.start_iteration = 0, .min_compression_rate = 1}));
    ddp.join([&] { train_batches(ddp, world.rank(), 1 + 2 * world.rank()); });
    ddp.check_replicas();
  });
}

TEST(Join, ARankWithoutInputsAtFirstRecordsAStaticGraphLater) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, {.static_graph = true});
    ddp.join([&] { train_batches(ddp, world.rank(), 3 * world.rank()); });
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      ddp(input_of(world.rank())).square().mean().backward();
    }
    auto largest = model->first->weight.grad().clone();
    world.all_reduce(largest, ReduceOp::kMax);
    EXPECT_TRUE(torch::equal(largest, model->first->weight.grad()));
  });
}

TEST(Join, WorksInEvaluationModeToo) {
  run_threads(2, [&](ProcessGroup world) {
    ConvNet model;
    fill_parameters(*model, 1);
    DistributedDataParallel ddp(model, world);
    ddp.eval();  // fine-tuning with frozen statistics
    ddp.join([&] {
      for (int i = 0; i < 1 + world.rank(); ++i) ddp(torch::ones({2, 1, 6, 6})).sum().backward();
    });
    ddp.check_replicas();
  });
}

TEST(Join, FollowsNoSyncAndBuffers) {
  run_threads(3, [&](ProcessGroup world) {
    ConvNet model;
    fill_parameters(*model, 1);
    DistributedDataParallel ddp(model, world);
    ddp.join([&] {
      for (int i = 0; i < 2 + 2 * world.rank(); i += 2) {
        model->zero_grad();
        auto image = torch::randn({3, 1, 6, 6}, at::detail::createCPUGenerator(i));
        {
          auto guard = ddp.no_sync();
          ddp(image).sum().backward();
        }
        ddp(image).sum().backward();
      }
    });
    EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), 6) << "of the last rank to train";
    auto statistics = model->norm->running_mean.clone();
    world.broadcast(statistics, 2);
    EXPECT_TRUE(torch::equal(statistics, model->norm->running_mean));
  });
}

TEST(Join, AnEarlyTerminationKeepsItsTypeOutsideOfRunThreads) {
  expect_error<InputsExhausted>(
      [] {
        run_threads(2, [](ProcessGroup world) {
          DistributedDataParallel ddp(filled_mlp(), world);
          ddp.join(
              [&] {
                for (int i = 0; i < 1 + world.rank(); ++i) ddp(input_of(i)).sum().backward();
              },
              {.throw_on_early_termination = true});
        });
      },
      "rank 0 has no inputs left");
}

TEST(Join, StopsAllRanksAtTheFirstThatRunsOutWhenAsked) {
  run_threads(3, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    int done = 0;
    expect_error<InputsExhausted>(
        [&] {
          ddp.join(
              [&] {
                for (int i = 0; i < 2 + 3 * world.rank(); ++i, ++done) ddp(input_of(i)).sum().backward();
              },
              {.throw_on_early_termination = true});
        },
        "rank " + std::to_string(world.rank()), "rank 0 has no inputs left");
    EXPECT_EQ(done, 2);
    world.barrier();
    ddp(input_of(0)).sum().backward();  // the wrapper is out of the join again
  });
}

TEST(Join, TakesSeveralMembers) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp(), other = filled_mlp();
    DistributedDataParallel a(model, world), b(other, world);
    join({&a, &b}, [&] {
      torch::optim::SGD first(a.parameters(), 0.1), second(b.parameters(), 0.1);
      for (int i = 0; i < 2 + world.rank(); ++i) {
        first.zero_grad();
        second.zero_grad();
        a(input_of(10 * i + world.rank())).square().mean().backward();
        b(input_of(10 * i + world.rank())).square().mean().backward();
        first.step();
        second.step();
      }
    });
    auto expected = reference({2, 3}, true);
    EXPECT_LE(relative_difference(model->first->weight, expected->first->weight), 1e-6);
    EXPECT_LE(relative_difference(other->first->weight, expected->first->weight), 1e-6);
    expect_error<UsageError>([&] { join({}, [] {}); }, "the list of members is empty");
  });
}

TEST(Join, UnusedParametersAreToldToRanksWithoutInputsToo) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    expect_error<UsageError>(
        [&] {
          ddp.join([&] {
            if (world.rank() == 0) return;
            ddp(input_of(1));
            model->first(input_of(1)).sum().backward();
          });
        },
        "'second.weight'", world.rank() == 0 ? "on another rank" : "on this rank");
  });
}

}  // namespace
}  // namespace lockstep
