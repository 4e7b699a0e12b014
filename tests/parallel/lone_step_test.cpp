// An optimizer that steps with gradients of no_sync() alone is noticed, whatever it does to the parameters.

#include <functional>
#include <memory>

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/run_threads.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "parallel/gradients.h"
#include "support/log_lines.h"

namespace lockstep {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;
using Optimizer = torch::optim::Optimizer;
using Tensors = std::vector<torch::Tensor>;

struct Maker {
  const char* name;
  std::function<std::unique_ptr<Optimizer>(const Tensors&)> make;
};

template <class Type, class Options>
Maker maker(const char* name, const Options& options) {
  return {name, [options](const Tensors& parameters) { return std::make_unique<Type>(parameters, options); }};
}

/// With a learning rate of 0: a step leaves all values as they are.
const std::vector<Maker> kMakers{
    maker<torch::optim::SGD>("SGD", torch::optim::SGDOptions(0)),
    maker<torch::optim::SGD>("SGDWithMomentum", torch::optim::SGDOptions(0).momentum(0.9)),
    maker<torch::optim::Adam>("Adam", torch::optim::AdamOptions(0)),
    maker<torch::optim::AdamW>("AdamW", torch::optim::AdamWOptions(0)),
    maker<torch::optim::RMSprop>("RMSprop", torch::optim::RMSpropOptions(0)),
    maker<torch::optim::Adagrad>("Adagrad", torch::optim::AdagradOptions(0)),
    maker<FusedSGD>("FusedSGD", torch::optim::SGDOptions(0)),
    maker<FusedAdam>("FusedAdam", torch::optim::AdamOptions(0)),
    maker<FusedAdamW>("FusedAdamW", torch::optim::AdamWOptions(0)),
    {"FusedAdamWWithMasterWeights",
     [](const Tensors& parameters) {
       auto optimizer = std::make_unique<FusedAdamW>(parameters, torch::optim::AdamWOptions(0));
       optimizer->keep_master_weights();
       return optimizer;
     }},
};

class LoneStep : public testing::TestWithParam<Maker> {};

TEST_P(LoneStep, AfterNoSyncIsWarnedOf) {
  LogLines lines;
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    const auto optimizer = GetParam().make(ddp.parameters());
    {
      auto guard = ddp.no_sync();
      ddp(input_of(world.rank())).sum().backward();
    }
    optimizer->step();
    EXPECT_THAT(lines.lines(), IsEmpty());
    world.barrier();
    ddp(input_of(world.rank()));
  });
  EXPECT_THAT(lines.lines(), AllOf(Contains(AllOf(HasSubstr("rank 0"), HasSubstr("the replicas have diverged"))),
                                   Contains(AllOf(HasSubstr("rank 1"), HasSubstr("the replicas have diverged")))));
}

TEST_P(LoneStep, UnderNoSyncIsWarnedOf) {
  LogLines lines;
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    const auto optimizer = GetParam().make(ddp.parameters());
    auto guard = ddp.no_sync();
    ddp(input_of(world.rank())).sum().backward();
    optimizer->step();
    ddp(input_of(world.rank()));
  });
  EXPECT_THAT(lines.lines(), Contains(HasSubstr("the replicas have diverged")).Times(2));
}

TEST_P(LoneStep, IsNotOneThatFollowsAReduction) {
  LogLines lines;
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    const auto optimizer = GetParam().make(ddp.parameters());
    for (int step = 0; step < 3; ++step) {
      optimizer->zero_grad();
      for (int part = 0; part < 2; ++part) {
        auto guard = ddp.no_sync();
        ddp(input_of(world.rank())).sum().backward();
      }
      ddp(input_of(world.rank())).sum().backward();
      optimizer->step();
    }
    ddp(input_of(world.rank()));
  });
  EXPECT_THAT(lines.lines(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Of, LoneStep, testing::ValuesIn(kMakers),
                         [](const auto& info) { return std::string(info.param.name); });

/// Makes one backward under no_sync(), calls `change`, and returns what was logged after the next forward.
std::vector<std::string> logged_after(const std::function<void(ProcessGroup&, Mlp&)>& change, bool under_no_sync) {
  LogLines lines;
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    {
      auto guard = ddp.no_sync();
      ddp(input_of(world.rank())).sum().backward();
      if (under_no_sync) change(world, model);
    }
    if (!under_no_sync) change(world, model);
    ddp(input_of(world.rank()));
  });
  return lines.lines();
}

TEST(LoneSteps, AreNotMistakenForOtherChangesOfTheParameters) {
  const std::vector<std::pair<const char*, std::function<void(ProcessGroup&, Mlp&)>>> changes{
      {"broadcast",
       [](ProcessGroup& world, Mlp& model) {
         for (const auto& parameter : model->parameters()) world.broadcast(parameter.detach(), 0);
       }},
      {"broadcast of a tensor that is not contiguous",
       [](ProcessGroup& world, Mlp& model) { world.broadcast(model->first->weight.detach().t(), 0); }},
      {"broadcast_coalesced",
       [](ProcessGroup& world, Mlp& model) {
         std::vector<torch::Tensor> tensors{model->first->weight.detach().t(), model->first->bias.detach()};
         world.broadcast_coalesced(tensors, 0);
       }},
      {"all_reduce",
       [](ProcessGroup& world, Mlp& model) { world.all_reduce(model->first->weight.detach(), ReduceOp::kAvg); }},
      {"an operator that a collective calls",
       [](ProcessGroup&, Mlp& model) {
         at::RecordFunction collective(at::RecordScope::FUNCTION);
         collective.before("lockstep::all_reduce");
         model->first->weight.data().div_(2);
       }},
      {"loading",
       [](ProcessGroup&, Mlp& model) {
         const torch::NoGradGuard no_grad;
         for (auto& parameter : model->parameters()) parameter.copy_(torch::ones_like(parameter));
       }},
      {"a change of the version alone, as by a collective",
       [](ProcessGroup&, Mlp& model) {
         for (const auto& parameter : model->parameters()) parameter.unsafeGetTensorImpl()->bump_version();
       }},
      {"freezing",
       [](ProcessGroup&, Mlp& model) {
         for (auto& parameter : model->parameters()) parameter.requires_grad_(false).requires_grad_(true);
       }},
      {"views of parameters in other shapes",
       [](ProcessGroup&, Mlp& model) {
         model->first->weight.detach().t_().unsqueeze_(0).squeeze_(0).transpose_(0, 1);
       }},
      {"reading",
       [](ProcessGroup&, Mlp& model) {
         for (const auto& parameter : model->parameters()) parameter.data().clone().add_(1);
       }},
      {"changing gradients",
       [](ProcessGroup&, Mlp& model) {
         for (auto& parameter : model->parameters()) parameter.mutable_grad().mul_(0.5);
       }},
      {"a step of another model",
       [](ProcessGroup&, Mlp&) {
         torch::nn::Linear other(3, 3);
         torch::optim::SGD optimizer(other->parameters(), 0.1);
         other(torch::ones({1, 3})).sum().backward();
         optimizer.step();
       }},
  };
  for (const auto& [what, change] : changes)
    for (const bool under_no_sync : {false, true}) {
      SCOPED_TRACE(testing::Message() << what << (under_no_sync ? " under no_sync()" : ""));
      EXPECT_THAT(logged_after(change, under_no_sync), IsEmpty());
    }
}

TEST(LoneSteps, WrittenByHandAreWarnedOf) {
  const std::vector<std::pair<const char*, std::function<void(ProcessGroup&, Mlp&)>>> steps{
      {"through data()", [](ProcessGroup&, Mlp& model) { model->third->bias.data().sub_(0.1); }},
      {"in place",
       [](ProcessGroup&, Mlp& model) {
         const torch::NoGradGuard no_grad;
         model->third->bias.sub_(model->third->bias.grad(), 0.1);
       }},
      {"by an out variant",
       [](ProcessGroup&, Mlp& model) {
         auto bias = model->third->bias.data();
         torch::sub_out(bias, bias, model->third->bias.grad());
       }},
      {"on a part", [](ProcessGroup&, Mlp& model) { model->third->weight.data()[0].sub_(0.1); }},
  };
  for (const auto& [what, step] : steps)
    for (const bool under_no_sync : {false, true}) {
      SCOPED_TRACE(testing::Message() << what << (under_no_sync ? " under no_sync()" : ""));
      EXPECT_THAT(logged_after(step, under_no_sync), Contains(HasSubstr("the replicas have diverged")).Times(2));
    }
}

TEST(LoneSteps, AreNotThoseAfterAReductionWithoutAForward) {
  LogLines lines;
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
      const auto first = ddp(input_of(world.rank())).sum(), second = ddp(input_of(world.rank())).sum();
      {
        auto guard = ddp.no_sync();
        first.backward();
      }
      second.backward();
      optimizer.step();
      ddp(input_of(world.rank()));
    }
  });
  EXPECT_THAT(lines.lines(), IsEmpty());
}

TEST(LoneSteps, AreNotThoseAfterAReductionAtTheBeginningOfTheNextGuard) {
  LogLines lines;
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    ddp(input_of(world.rank())).sum().backward();
    for (int cycle = 0; cycle < 3; ++cycle) {
      {
        auto guard = ddp.no_sync();
        optimizer.step();
        ddp(input_of(world.rank())).sum().backward();
      }
      ddp(input_of(world.rank())).sum().backward();
    }
  });
  EXPECT_THAT(lines.lines(), IsEmpty());
}

TEST(LoneSteps, AreFoundAfterManyPassesWithGuardsOfTheirOwn) {
  LogLines lines;
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    for (int pass = 0; pass < 20; ++pass) {
      auto guard = ddp.no_sync();
      ddp(input_of(world.rank())).sum().backward();
      if (pass == 19) optimizer.step();
    }
    ddp(input_of(world.rank()));
  });
  EXPECT_THAT(lines.lines(), Contains(HasSubstr("the replicas have diverged")).Times(2));
}

// Watched operators are slower. After the first reduction, neither forward nor backward is watched.
TEST(LoneSteps, AreLookedForOnlyBetweenBackwardAndTheNextForward) {
  LogLines lines;
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    const auto is_watched = [] { return at::hasThreadLocalCallbacks(); };
    for (int pass = 0; pass < 20; ++pass) {
      EXPECT_FALSE(is_watched());
      {
        auto guard = ddp.no_sync();
        const auto loss = ddp(input_of(world.rank())).sum();
        if (pass >= 1) {
          EXPECT_FALSE(is_watched());
        }
        loss.backward();
      }
      EXPECT_TRUE(is_watched());
      const auto loss = ddp(input_of(world.rank())).sum();
      EXPECT_FALSE(is_watched());
      loss.backward();
      EXPECT_FALSE(is_watched());
    }
    {
      auto guard = ddp.no_sync();
      ddp(input_of(world.rank())).sum().backward();
    }
    {
      const torch::NoGradGuard no_grad;
      ddp(input_of(world.rank()));  // an evaluation
    }
    torch::optim::SGD(ddp.parameters(), 0.1).step();
    ddp(input_of(world.rank()));
  });
  EXPECT_THAT(lines.lines(), Contains(HasSubstr("the replicas have diverged")).Times(2));
}

}  // namespace
}  // namespace lockstep
