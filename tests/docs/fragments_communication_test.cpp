// Snippets of the pages about groups, failures, GPUs and wrappers of models.

#include <atomic>
#include <iostream>

#include <gmock/gmock.h>

#include "fragments.h"

#include "support/messages.h"
#include "support/rank_process.h"

#ifdef LOCKSTEP_HAVE_NCCL
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(CollectivesPage, GroupsHaveTheRanksOfThePage) {
#ifndef LOCKSTEP_HAVE_GLOO
  GTEST_SKIP() << "this build has no Gloo";
#endif
  lockstep::run_threads(6, [](const lockstep::ProcessGroup& world) {
    const int rank = world.rank();
    auto t = torch::full({3}, rank);
#include "docs/collectives/groups.inc"
    EXPECT_EQ(group.contains_me(), rank == 0 || rank == 2);
    EXPECT_EQ(t[0].item<int64_t>(), rank == 0 ? 2 : rank);
    const int first = rank < 3 ? 0 : 3;
    EXPECT_THAT(mine.global_ranks(), ElementsAre(first, first + 1, first + 2));
    EXPECT_THAT(across.global_ranks(), ElementsAre(rank % 3, rank % 3 + 3));
    EXPECT_THAT(sorted.global_ranks(), ElementsAre(rank % 2 + 4, rank % 2 + 2, rank % 2));
  });
}

TEST(CollectivesPage, RowsArriveFromEachRank) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const auto to_vector = [](const Tensor& t) {
      return std::vector<int64_t>(t.data_ptr<int64_t>(), t.data_ptr<int64_t>() + t.numel());
    };
    const int64_t rank = world.rank();
    const auto rows_to = torch::tensor({1 + rank, 2 - 2 * rank});  // 1 and 2 of rank 0, 2 and 0 of rank 1
    const auto tokens = torch::arange(3 - rank).view({-1, 1}) + 10 * rank;
#include "docs/collectives/rows_for_each_rank.inc"
    EXPECT_EQ(to_vector(received), rank == 0 ? (std::vector<int64_t>{0, 10, 11}) : (std::vector<int64_t>{1, 2}));
  });
}

TEST(CollectivesPage, ManyTensorsAreAveraged) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const std::vector<Tensor> statistics{torch::full({2}, 1.0 * world.rank()), torch::full({3}, 3.0 * world.rank())};
#include "docs/collectives/many_tensors.inc"
    EXPECT_TRUE(torch::equal(statistics[1], torch::full({3}, 1.5)));
  });
}

TEST(CollectivesPage, ACallbackCountsFinishedCalls) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const auto gradient = torch::ones({4});
    std::atomic<int> finished = 0;
    const auto show_progress = [] {};
#include "docs/collectives/waiting_for_asynchronous_calls.inc"
    world.barrier_async().wait();  // callbacks run before the next call
    EXPECT_EQ(finished, 1);
    EXPECT_EQ(gradient[3].item<double>(), 2);
  });
}

TEST(CollectivesPage, NeighboursExchangeTheirEdges) {
  lockstep::run_threads(3, [](const lockstep::ProcessGroup& world) {
    const int left = (world.rank() + 2) % 3, right = (world.rank() + 1) % 3;
    const auto my_left_edge = torch::full({5}, world.rank()), my_right_edge = torch::full({5}, 10 + world.rank());
    auto left_halo = torch::zeros_like(my_left_edge), right_halo = torch::zeros_like(my_left_edge);
#include "docs/collectives/messages.inc"
    EXPECT_EQ(left_halo[0].item<int64_t>(), 10 + left);
    EXPECT_EQ(right_halo[0].item<int64_t>(), right);
  });
}

TEST(CollectivesPage, Rank0GivesOutWork) {
  lockstep::run_threads(3, [](const lockstep::ProcessGroup& world) {
    const int64_t tasks = 7;
    std::vector<double> results;
    const auto solve = [](int64_t task) { return 0.5 * static_cast<double>(task); };
#include "docs/collectives/messages_2.inc"
    std::sort(results.begin(), results.end());
    EXPECT_THAT(results, testing::SizeIs(world.rank() == 0 ? 7 : 0));
    EXPECT_EQ(world.rank() == 0 ? results.back() : 3.0, 3.0);
  });
}

TEST(CollectivesPage, ObjectsArriveInOrderOfRank) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const double loss = 0.5 + world.rank();
    testing::internal::CaptureStdout();
#include "docs/collectives/objects.inc"
    const auto printed = testing::internal::GetCapturedStdout();
    EXPECT_EQ(name, "adamw");
    EXPECT_LT(printed.find("0.5"), printed.find("1.5"));
    EXPECT_NE(printed.find("1.5"), std::string::npos);
  });
}

TEST(CollectivesPage, StoresHaveTheValuesOfBothRanks) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const int rank = world.rank();
    const int port = static_cast<int>(world.broadcast_object(int64_t{free_port()}, 0).toInt());
    const std::string host = rank == 0 ? "first" : "second", gpu = rank == 0 ? "A" : "B";
#include "docs/collectives/stores.inc"
    EXPECT_THAT(hosts, ElementsAre("first", "second"));
    EXPECT_THAT(gpus, ElementsAre("A", "B"));
    EXPECT_THAT(store.get("log", 60s), testing::AllOf(HasSubstr("rank 0 is ready\n"), HasSubstr("rank 1 is ready\n")));
    world.barrier();  // before rank 0 closes the store
  });
}

TEST(FailuresPage, TheCulpritIsTheRankThatGaveUp) {
  std::atomic<int> culprit = -1;
  const auto rank_main = [&](const lockstep::ProcessGroup& world) {
    if (world.rank() == 1) throw std::runtime_error("no data");
    const auto train = [&] { world.barrier(); };
    const auto alert = [&](int rank, const std::string& message) {
      culprit = rank;
      EXPECT_THAT(message, HasSubstr("rank 1"));
    };
#include "docs/failures/errors_by_cause.inc"
  };
  EXPECT_THROW(lockstep::run_threads(2, rank_main), lockstep::Error);
  EXPECT_EQ(culprit, 1);
}

TEST(FailuresPage, ACallHasATimeOutOfItsOwn) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const auto loss = torch::tensor(1.0 + world.rank());
#include "docs/failures/time_outs.inc"
    EXPECT_EQ(loss.item<double>(), 1.5);
  });
}

TEST(GpuPage, ABackwardAveragesOnTheDeviceOfTheGroup) {
  on_two_ranks([](const lockstep::ProcessGroup& group) {
    const auto [data, target] = Samples().of_rank(group.rank());
    auto model = seeded_net();
#include "docs/gpu/gpus.inc"
    torch::optim::SGD(ddp.parameters(), 0.05).step();
    expect_step_of_one_process(model);
  });
}

TEST(GpuPage, WorkIsOrdered) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const auto t = torch::full({3}, 1.0 + world.rank()), x = torch::ones({3});
    const auto expensive = [](const Tensor& tensor) { return tensor + 1; };
#include "docs/gpu/streams.inc"
    EXPECT_EQ(sum.item<double>(), 9);
    EXPECT_EQ(t[0].item<double>(), 6);
    EXPECT_EQ(other[0].item<double>(), 2);
  });
}

TEST(GpuPage, TheStepOfACapturedStepTrains) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    auto model = seeded_net(), alone = seeded_net();
    lockstep::DistributedDataParallel ddp(model, world);
    lockstep::DataLoader loader(Samples(), lockstep::DistributedSampler(24, world), {.batch_size = 12});
    auto total = torch::zeros({});
#include "docs/gpu/captured_steps.inc"
    total /= 2;
    world.all_reduce(total);
    const auto all = Samples().slice(0, 24);
    EXPECT_NEAR(total.item<double>(), loss_function(alone(all.data), all.target).item<double>(), 1e-6);
    lockstep::FusedAdamW optimizer_alone(alone->parameters(), torch::optim::AdamWOptions(1e-3));
    ::step(alone, optimizer_alone, all);
    expect_equal_parameters(model, alone);
  });
}

#ifdef LOCKSTEP_HAVE_NCCL
[[maybe_unused]] void capture(const std::function<void()>& step, lockstep::FusedAdamW& optimizer) {
#include "docs/gpu/cuda_graphs_of_your_own.inc"
  graph.reset();
}
#endif

TEST(DdpPage, AStepIsThatOfOneProcess) {
  on_two_ranks([](const lockstep::ProcessGroup& group) {
    using ConvNet = Net;
    const auto [data, target] = Samples().of_rank(group.rank());
    torch::manual_seed(1);
#include "docs/ddp/distributeddataparallel.inc"
    expect_step_of_one_process(model);
  });
}

TEST(DdpPage, FourPartsAreAveraged) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const auto batch = Samples().of_rank(world.rank());
    const auto data = batch.data.chunk(4), target = batch.target.chunk(4);
    const auto loss = loss_function;
    auto net = seeded_net();
    lockstep::DistributedDataParallel ddp(net, world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.05);
#include "docs/ddp/accumulating_gradients.inc"
    expect_step_of_one_process(net);
  });
}

TEST(DdpPage, UnequalBatchesAreWeightedBySamples) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const auto [data, target] = world.rank() == 0 ? Samples().slice(0, 19) : Samples().slice(19, 24);
    auto net = seeded_net();
    lockstep::DistributedDataParallel ddp(net, world);
#include "docs/ddp/unequal_batches.inc"
    loss_function(ddp(data), target).backward();
    torch::optim::SGD(ddp.parameters(), 0.05).step();
    expect_step_of_one_process(net);
  });
}

/// Rank 0 has two batches, rank 1 has one.
std::vector<Example<>> unequal_batches(int rank) {
  const Samples samples;
  if (rank == 0) return {samples.slice(0, 8), samples.slice(8, 16)};
  return {samples.slice(16, 24)};
}

/// Returns the network of one process that makes the step of both ranks, and then that of rank 0 with `rate`.
Net trained_alone(double rate) {
  auto net = seeded_net();
  torch::optim::SGD both(net->parameters(), 0.05), one(net->parameters(), rate);
  const auto first = unequal_batches(0)[0], second = unequal_batches(1)[0];
  step(net, both, {torch::cat({first.data, second.data}), torch::cat({first.target, second.target})});
  step(net, one, unequal_batches(0)[1]);
  return net;
}

TEST(DdpPage, RanksWithoutInputsCountAsZeros) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    auto net = seeded_net();
    lockstep::DistributedDataParallel ddp(net, world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.05);
    auto batches = unequal_batches(world.rank());
    const auto train = [&](const Example<>& batch) { step(ddp, optimizer, batch); };
#include "docs/ddp/unequal_numbers_of_batches.inc"
    expect_equal_parameters(net, trained_alone(0.05 / 2));
  });
}

TEST(DdpPage, AShardedOptimizerJoinsToo) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    auto net = seeded_net();
    lockstep::DistributedDataParallel ddp(net, world);
    lockstep::ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(ddp.parameters(), world,
                                                                   torch::optim::SGDOptions(0.05));
    auto batches = unequal_batches(world.rank());
    const auto train = [&](const Example<>& batch) { step(ddp, optimizer, batch); };
#include "docs/ddp/unequal_numbers_of_batches_2.inc"
    expect_equal_parameters(net, trained_alone(0.05));
  });
}

TEST(DdpPage, AWrapperHasOneHook) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    auto net = seeded_net();
    lockstep::DistributedDataParallel ddp(net, world);
#include "docs/ddp/comm_hooks.inc"
    EXPECT_THROW(ddp.register_comm_hook(lockstep::bf16_compress()), lockstep::UsageError);
    torch::optim::SGD optimizer(ddp.parameters(), 0.05);
    step(ddp, optimizer, Samples().of_rank(world.rank()));
    expect_step_of_one_process(net);
  });
}

TEST(DdpPage, TheCustomHookAverages) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    auto net = seeded_net();
    lockstep::DistributedDataParallel ddp(net, world);
#include "docs/ddp/comm_hooks_2.inc"
    torch::optim::SGD optimizer(ddp.parameters(), 0.05);
    step(ddp, optimizer, Samples().of_rank(world.rank()));
    expect_step_of_one_process(net);
  });
}

TEST(DdpPage, AConvertedModelHasTheStatisticsOfAllRanks) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    const auto images = torch::randn({7, 1, 6, 6}, at::detail::createCPUGenerator(1));
    torch::manual_seed(1);
#include "docs/ddp/batch_normalization_over_all_ranks.inc"
    const auto output = ddp(world.rank() == 0 ? images.slice(0, 0, 5) : images.slice(0, 5, 7));
    torch::manual_seed(1);
    ConvNet alone;
    const auto expected = alone(images);
    EXPECT_LT(relative_difference(output, world.rank() == 0 ? expected.slice(0, 0, 5) : expected.slice(0, 5, 7)), 1e-5);
    EXPECT_LT(relative_difference(model->norm->running_var, alone->norm->running_var), 1e-5);
  });
}

struct NormalizedImpl : torch::nn::Module {
  explicit NormalizedImpl(const lockstep::ProcessGroup& world) {
#include "docs/ddp/batch_normalization_over_all_ranks_2.inc"
    norm->train();
  }
  lockstep::SyncBatchNorm norm{nullptr};
};

TEST(DdpPage, TheBatchNormClassTakesOneValueForEachChannel) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    NormalizedImpl module(world);
    const auto input = torch::randn({2, 64}, at::detail::createCPUGenerator(1));
    const auto expected = torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(64).eps(1e-3))(input);
    EXPECT_LT(relative_difference(module.norm(input.slice(0, world.rank(), world.rank() + 1)), expected[world.rank()]),
              1e-5);
    EXPECT_TRUE(module.named_parameters().contains("norm.weight"));
  });
}

TEST(DdpPage, AStepOfDataParallelIsThatOfOneDevice) {
  const std::vector<torch::Device> devices{torch::kCPU, torch::kCPU};
  const auto [inputs, targets] = Samples().slice(0, 24);
  torch::manual_seed(1);
#include "docs/ddp/dataparallel.inc"
  expect_step_of_one_process(model);
}

TEST(DdpPage, LossesOfTheReplicasAddUp) {
  auto model = seeded_net();
  lockstep::DataParallel dp(model, {.devices = {torch::kCPU, torch::kCPU}});
  const auto [inputs, targets] = Samples().slice(0, 24);
#include "docs/ddp/balanced_memory.inc"
  EXPECT_EQ(losses.numel(), 2);
  torch::optim::SGD(model->parameters(), 0.05).step();
  expect_step_of_one_process(model);
}

}  // namespace
