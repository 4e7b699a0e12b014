// Parameters in half precision with master weights.

#include <functional>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/join.h>
#include <lockstep/optimizer_state.h>
#include <lockstep/run_threads.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "optim/master_weights.h"
#include "support/messages.h"
#include "support/ranks.h"
#include "support/torch_threads.h"

namespace lockstep {
namespace {

using torch::Tensor;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;
using Masters = WithMasterWeights<FusedSGD>;

/// What an optimizer does to a bfloat16 parameter of which it keeps a float32 copy, by LibTorch's own optimizer.
template <class Reference, class Options>
Tensor by_reference(const Options& options, int steps) {
  auto master = torch::linspace(0.5, 2, 7).to(at::kBFloat16).to(at::kFloat).requires_grad_();
  Reference optimizer(std::vector<Tensor>{master}, options);
  for (int step = 0; step < steps; ++step) {
    const auto rounded = master.detach().to(at::kBFloat16);
    master.mutable_grad() = (rounded * 0.001).to(at::kFloat);
    optimizer.step();
  }
  return master.detach();
}

template <class Optimizer>
void step_with_masters(Optimizer& optimizer, Tensor parameter, int steps) {
  for (int step = 0; step < steps; ++step) {
    parameter.mutable_grad() = (parameter.detach() * 0.001);
    optimizer.step();
  }
}

Tensor new_half() {
  return torch::linspace(0.5, 2, 7).to(at::kBFloat16).requires_grad_();
}

template <class Fused, class Reference, class Options>
void expect_masters(const Options& options) {
  constexpr int kSteps = 40;
  auto half = new_half();
  Fused optimizer(std::vector<Tensor>{half}, options);
  optimizer.keep_master_weights();
  step_with_masters(optimizer, half, kSteps);
  const Tensor expected = by_reference<Reference>(options, kSteps);
  const Value state = state_dict(optimizer);
  const Tensor master = state["state"][0]["master_param"].tensor();
  EXPECT_EQ(master.scalar_type(), at::kFloat);
  EXPECT_LT((master - expected).abs().max().item<double>(), 1e-6);
  EXPECT_TRUE(half.equal(master.to(at::kBFloat16)));
  EXPECT_GT((master - new_half().to(at::kFloat)).abs().max().item<double>(), 1e-3) << "nothing moved";

  auto rounded = new_half();
  Fused without(std::vector<Tensor>{rounded}, options);
  expect_error<UsageError>(
      [&] {
        step_with_masters(without, rounded, 1);
        if (without.state().empty()) throw UsageError("after the first step");
        without.keep_master_weights();
      },
      "after the first step");
}

TEST(MasterWeights, AreUpdatedInFloat32) {
  expect_masters<FusedAdamW, torch::optim::AdamW>(AdamWOptions(1e-4));
  expect_masters<FusedAdam, torch::optim::Adam>(AdamOptions(1e-4).amsgrad(true));
  expect_masters<FusedSGD, torch::optim::SGD>(SGDOptions(0.1).momentum(0.9));
  expect_masters<FusedSGD, torch::optim::SGD>(SGDOptions(1.0));
}

// The exact rule, by hand: the copy takes every small update, of which bfloat16 would lose all.
TEST(MasterWeights, KeepUpdatesThatAreSmallerThanTheRounding) {
  auto half = torch::ones({1}, at::kBFloat16).requires_grad_();
  WithMasterWeights<FusedSGD> optimizer(std::vector<Tensor>{half}, SGDOptions(1.0));
  for (int step = 0; step < 16; ++step) {
    half.mutable_grad() = torch::full({1}, 1.0 / 1024, at::kBFloat16);
    optimizer.step();
  }
  EXPECT_EQ(half.item<float>(), 1 - 16.0f / 1024);
  auto lost = torch::ones({1}, at::kBFloat16).requires_grad_();
  FusedSGD without(std::vector<Tensor>{lost}, SGDOptions(1.0));
  for (int step = 0; step < 16; ++step) {
    lost.mutable_grad() = torch::full({1}, 1.0 / 1024, at::kBFloat16);
    without.step();
  }
  EXPECT_EQ(lost.item<float>(), 1);
}

TEST(MasterWeights, TakeOverWhatOthersWrite) {
  auto half = torch::ones({3}, at::kBFloat16).requires_grad_();
  WithMasterWeights<FusedSGD> optimizer(std::vector<Tensor>{half}, SGDOptions(1.0));
  auto step = [&] {
    half.mutable_grad() = torch::full({3}, 1.0 / 1024, at::kBFloat16);
    optimizer.step();
  };
  step();
  {
    const torch::NoGradGuard no_grad;
    half[0].fill_(4);        // loaded, for example
    half[1].copy_(half[1]);  // written, but with the same value: the copy keeps its digits
  }
  step();
  const auto master = state_dict(optimizer)["state"][0]["master_param"].tensor();
  EXPECT_EQ(master[0].item<float>(), 4 - 1.0f / 1024);
  EXPECT_EQ(master[1].item<float>(), 1 - 2.0f / 1024);
  EXPECT_EQ(master[2].item<float>(), 1 - 2.0f / 1024);
}

TEST(MasterWeights, TakeOverReplacedMemoryAndWhatIsWrittenIntoShards) {
  auto half = torch::ones({3}, at::kBFloat16).requires_grad_();
  WithMasterWeights<FusedSGD> optimizer(std::vector<Tensor>{half}, SGDOptions(1.0));
  auto step = [](auto& stepping, Tensor parameter) {
    parameter.mutable_grad() = torch::full({3}, 1.0 / 1024, at::kBFloat16);
    stepping.step();
  };
  step(optimizer, half);
  half.set_data(torch::full({3}, 4.0, at::kBFloat16));  // as torch::load does
  step(optimizer, half);
  EXPECT_EQ(state_dict(optimizer)["state"][0]["master_param"].tensor()[0].item<float>(), 4 - 1.0f / 1024);

  run_threads(2, [&](ProcessGroup world) {
    auto sharded = torch::ones({3}, at::kBFloat16).requires_grad_();
    ZeroRedundancyOptimizer<WithMasterWeights<FusedSGD>> zero(std::vector<Tensor>{sharded}, world, SGDOptions(1.0));
    for (const double value : {4.0, 8.0}) {
      step(zero, sharded);
      {
        const torch::NoGradGuard no_grad;
        value == 4 ? sharded.fill_(value) : sharded.copy_(torch::full({3}, value));
      }
      step(zero, sharded);
      const auto state = zero.consolidated_state_dict(0);
      if (world.rank() == 0) {
        EXPECT_TRUE(state["state"][0]["master_param"].tensor().equal(torch::full({3}, value - 1.0 / 1024)));
      }
    }
  });
}

// parameter.data() has a version of its own, and data_ptr() none.
TEST(MasterWeights, TakeOverWritesThatDoNotChangeTheVersion) {
  for (const auto dtype : {at::kBFloat16, at::kHalf})
    for (const bool is_transposed : {false, true}) {
      const auto memory = torch::ones({300, 500}, dtype);
      auto half = (is_transposed ? memory.t() : memory).detach().requires_grad_();
      Masters optimizer(std::vector<Tensor>{half}, SGDOptions(1.0));
      const auto step = [&] {
        half.mutable_grad() = torch::full_like(half, 1.0 / 1024);
        optimizer.step();
      };
      step();
      half.data()[1][299].fill_(4);
      if (dtype == at::kBFloat16) memory.data_ptr<at::BFloat16>()[memory.numel() - 1] = 2.0f;
      const auto version = half._version();
      step();
      EXPECT_EQ(version, 1) << "the test is void";
      const auto master = state_dict(optimizer)["state"][0]["master_param"].tensor();
      EXPECT_EQ(master[1][299].item<float>(), 4 - 1.0f / 1024);
      if (dtype == at::kBFloat16) {
        EXPECT_EQ(master.flatten()[master.numel() - 1].item<float>(), 2 - 1.0f / 1024);
      }
      EXPECT_EQ(master[0][0].item<float>(), 1 - 2.0f / 1024) << "the copies of others keep their digits";
    }
}

TEST(MasterWeights, AreUpdatedOnLibTorchsThreads) {
  TorchThreads threads(2);
  const auto half = torch::rand({333, 1001}).to(at::kBFloat16);
  const auto gradient = torch::rand({333, 1001}).to(at::kBFloat16);
  detail::MasterWeights masters;
  const auto master = masters.of(half);
  const auto expected = master + gradient.to(at::kFloat);
  masters.update(half, gradient, [&](int64_t begin, int64_t count, const void* slopes) {
    threads.note();
    auto* values = master.data_ptr<float>() + begin;
    for (int64_t i = 0; i < count; ++i) values[i] += static_cast<const float*>(slopes)[i];
  });
  EXPECT_EQ(threads.noted(), 2);
  EXPECT_TRUE(torch::equal(master, expected));
  EXPECT_TRUE(torch::equal(half, expected.to(at::kBFloat16)));
}

TEST(MasterWeights, TakeOverAStorageAtTheAddressOfTheOldOne) {
  std::vector<at::BFloat16> memory(3, 1.0f);
  const auto storage = [&] { return torch::from_blob(memory.data(), {3}, at::kBFloat16); };
  auto half = storage().requires_grad_();
  Masters optimizer(std::vector<Tensor>{half}, SGDOptions(1.0));
  const auto step = [&] {
    half.mutable_grad() = torch::full({3}, 1.0 / 1024, at::kBFloat16);
    optimizer.step();
  };
  step();
  memory[0] = 4.0f;
  half.set_data(storage());
  step();
  EXPECT_EQ(state_dict(optimizer)["state"][0]["master_param"].tensor()[0].item<float>(), 4 - 1.0f / 1024);
}

TEST(MasterWeights, AreSavedAndRestored) {
  auto train = [](auto& optimizer, Tensor half, int steps) { step_with_masters(optimizer, half, steps); };
  auto check = [&](auto make) {
    auto straight = new_half(), first = new_half();
    auto uninterrupted = make(straight), before = make(first);
    train(*uninterrupted, straight, 20);
    train(*before, first, 12);

    auto resumed = first.detach().clone().requires_grad_();
    auto after = make(resumed);
    load_state_dict(*after, state_dict(*before));
    train(*after, resumed, 8);
    EXPECT_TRUE(resumed.equal(straight));

    std::stringstream bytes;
    torch::serialize::OutputArchive out;
    before->save(out);
    out.save_to(bytes);
    auto archived = first.detach().clone().requires_grad_();
    auto from_archive = make(archived);
    torch::serialize::InputArchive in;
    in.load_from(bytes);
    from_archive->load(in);
    train(*from_archive, archived, 8);
    EXPECT_TRUE(archived.equal(straight));
    EXPECT_TRUE(state_dict(*from_archive)["state"][0]["master_param"].tensor().equal(
        state_dict(*uninterrupted)["state"][0]["master_param"].tensor()));
  };
  check([](const Tensor& half) {
    return std::make_unique<WithMasterWeights<FusedAdamW>>(std::vector<Tensor>{half}, AdamWOptions(1e-4));
  });
  check([](const Tensor& half) {
    return std::make_unique<WithMasterWeights<FusedAdam>>(std::vector<Tensor>{half}, AdamOptions(1e-4));
  });
  check([](const Tensor& half) {
    return std::make_unique<WithMasterWeights<FusedSGD>>(std::vector<Tensor>{half}, SGDOptions(0.1).momentum(0.9));
  });
  check([](const Tensor& half) {
    return std::make_unique<WithMasterWeights<FusedSGD>>(std::vector<Tensor>{half}, SGDOptions(1.0));
  });
}

TEST(MasterWeights, AreShardedWithTheState) {
  auto alone = new_half();
  WithMasterWeights<FusedAdamW> reference(std::vector<Tensor>{alone}, AdamWOptions(1e-4));
  step_with_masters(reference, alone, 20);
  const auto expected = state_dict(reference)["state"][0]["master_param"].tensor();
  Value saved;
  run_threads(2, [&](ProcessGroup world) {
    using Sharded = ZeroRedundancyOptimizer<WithMasterWeights<FusedAdamW>>;
    auto half = new_half();
    Sharded before(std::vector<Tensor>{half}, world, AdamWOptions(1e-4));
    step_with_masters(before, half, 12);
    auto state = before.consolidated_state_dict(0);
    if (world.rank() == 0) saved = std::move(state);
    world.barrier();

    auto resumed = half.detach().clone().requires_grad_();
    Sharded after(std::vector<Tensor>{resumed}, world, AdamWOptions(1e-4));
    after.load_state_dict(saved);
    step_with_masters(after, resumed, 8);
    EXPECT_TRUE(resumed.equal(alone));
    const auto whole = after.consolidated_state_dict(0);
    if (world.rank() == 0) {
      EXPECT_TRUE(whole["state"][0]["master_param"].tensor().equal(expected));
    }
  });
}

// --- master weights and communication

/// A step with gradients of zero, which leaves equal parameters equal.
template <class Optimizer>
void step_with_zero_gradients(Optimizer& optimizer, const std::vector<Tensor>& parameters) {
  for (auto parameter : parameters) parameter.mutable_grad() = torch::zeros_like(parameter);
  optimizer.step();
}

/// Steps once, lets `receive` change the parameters, steps with gradients of zero, and expects `value` everywhere.
template <class Optimizer>
void expect_received(Optimizer& optimizer, DistributedDataParallel<torch::nn::LinearImpl>& ddp, double value,
                     const std::function<void()>& receive, const char* how) {
  SCOPED_TRACE(how);
  ddp(torch::ones({2, 16}, at::kBFloat16)).sum().backward();
  optimizer.step();
  {
    const torch::NoGradGuard no_grad;
    receive();
  }
  step_with_zero_gradients(optimizer, ddp.parameters());
  for (const auto& parameter : ddp.parameters())
    EXPECT_TRUE(parameter.equal(torch::full_like(parameter, value))) << parameter;
}

template <class Make>
void expect_that_collectives_are_not_undone(const Make& make) {
  run_threads(2, [&](ProcessGroup world) {
    torch::nn::Linear model(16, 5);
    model->to(at::kBFloat16);
    DistributedDataParallel ddp(model, world);
    const auto optimizer = make(ddp, world);
    const auto parameters = ddp.parameters();
    const auto fill = [&](double value) {
      for (auto& parameter : parameters) parameter.fill_(value);
    };
    const auto fill_on = [&](int rank, double value) {
      if (world.rank() == rank) fill(value);
    };
    expect_received(
        *optimizer, ddp, 4,
        [&] {
          fill_on(0, 4);
          ddp.sync_parameters_and_buffers();
        },
        "sync_parameters_and_buffers");
    expect_received(
        *optimizer, ddp, 5,
        [&] {
          fill_on(1, 5);
          for (auto& parameter : parameters) world.broadcast(parameter, 1);
        },
        "broadcast");
    expect_received(
        *optimizer, ddp, 6,
        [&] {
          fill_on(1, 6);
          world.broadcast_coalesced(parameters, 1);
        },
        "broadcast_coalesced");
    expect_received(
        *optimizer, ddp, 7,
        [&] {
          fill(world.rank() == 0 ? 6 : 8);
          std::vector<Work> works;
          for (auto& parameter : parameters) works.push_back(world.all_reduce_async(parameter, ReduceOp::kAvg));
          for (auto& work : works) work.wait();
        },
        "all_reduce_async");
  });
}

TEST(MasterWeights, TakeOverWhatCollectivesWrite) {
  expect_that_collectives_are_not_undone(
      [](auto& ddp, const ProcessGroup&) { return std::make_unique<Masters>(ddp.parameters(), SGDOptions(0.5)); });
}

TEST(MasterWeights, TakeOverWhatCollectivesWriteIntoShards) {
  expect_that_collectives_are_not_undone([](auto& ddp, const ProcessGroup& world) {
    return std::make_unique<ZeroRedundancyOptimizer<Masters>>(ddp.parameters(), world, SGDOptions(0.5));
  });
}

TEST(MasterWeights, TakeOverTheParametersAtTheEndOfAJoin) {
  run_threads(2, [](ProcessGroup world) {
    torch::nn::Linear model(16, 5);
    model->to(at::kBFloat16);
    DistributedDataParallel ddp(model, world);
    Masters optimizer(ddp.parameters(), SGDOptions(0.5));
    ddp.join([&] {
      for (int batch = 0; batch <= 2 * world.rank(); ++batch) {
        optimizer.zero_grad();
        ddp(torch::ones({2, 16}, at::kBFloat16)).sum().backward();
        optimizer.step();
      }
    });
    std::vector<Tensor> joined;
    for (const auto& parameter : ddp.parameters()) joined.push_back(parameter.detach().clone());
    step_with_zero_gradients(optimizer, ddp.parameters());
    for (size_t i = 0; i < joined.size(); ++i) EXPECT_TRUE(ddp.parameters()[i].equal(joined[i])) << "parameter " << i;
    ddp.check_replicas();
  });
}

}  // namespace
}  // namespace lockstep
