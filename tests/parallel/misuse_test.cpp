// What is done to a model behind the wrapper's back is told at the next forward.

#include <sstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/run_threads.h>

#include "parallel/gradients.h"
#include "parallel/models.h"
#include "support/log_lines.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::Not;

void expect_refused(const std::function<void(MlpImpl&)>& change, const std::string& what,
                    const std::string& more = "") {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    ddp(input_of(world.rank())).sum().backward();
    change(*model);
    expect_error<UsageError>([&] { ddp(input_of(world.rank())); }, "rank " + std::to_string(world.rank()), what, more,
                             "wrap it again");
  });
}

TEST(Misuse, AnAddedParameterIsNamed) {
  expect_refused([](MlpImpl& m) { m.register_module("fourth", torch::nn::Linear(2, 2)); }, "'fourth.weight'",
                 "was added or replaced");
}

TEST(Misuse, AReplacedParameterIsNamed) {
  expect_refused([](MlpImpl& m) { m.replace_module("second", torch::nn::Linear(16, 12)); }, "'second.weight'",
                 "was added or replaced");
}

TEST(Misuse, AMovedParameterIsNamed) {
  expect_refused([](MlpImpl& m) { m.to(torch::kDouble); }, "'first.weight' was [16, 6] Float", "is [16, 6] Double");
}

TEST(Misuse, AReplacedOrAddedBufferIsNamed) {
  run_threads(2, [&](ProcessGroup world) {
    const std::vector<std::pair<const char*, std::function<void(torch::nn::SequentialImpl&)>>> changes{
        {"'1.running_mean' was added or replaced",
         [](auto& model) {
           model.replace_module("1", torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(4).affine(false)));
         }},
        {"'more' was added or replaced", [](auto& model) { model.register_buffer("more", torch::zeros(2)); }}};
    for (const auto& [what, change] : changes) {
      torch::nn::Sequential model(torch::nn::Linear(6, 4),
                                  torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(4).affine(false)));
      DistributedDataParallel ddp(model, world);
      ddp(input_of(world.rank())).sum().backward();
      change(*model);
      expect_error<UsageError>([&] { ddp(input_of(world.rank())); }, "buffer", what, "wrap it again");
    }
  });
}

/// Everything that gives parameters other storage or other values without making them other tensors.
const std::vector<std::pair<const char*, std::function<void(Mlp&)>>> kReplacements{
    {"torch::load",
     [](Mlp& model) {
       std::stringstream file;
       torch::save(filled_mlp(), file);
       torch::load(model, file);
     }},
    {"to() and back",
     [](Mlp& model) {
       model->to(torch::kDouble);
       model->to(torch::kFloat);
     }},
    {"set_data",
     [](Mlp& model) {
       for (auto& parameter : model->parameters()) parameter.set_data(parameter.detach().clone());
     }},
    {"set_",
     [](Mlp& model) {
       torch::NoGradGuard no_grad;
       for (auto& parameter : model->parameters()) parameter.set_(parameter.detach().clone());
     }},
    {"copy_",
     [](Mlp& model) {
       torch::NoGradGuard no_grad;
       for (auto& parameter : model->parameters()) parameter.copy_(parameter.detach().clone());
     }},
    {"torch::load of one layer",
     [](Mlp& model) {
       std::stringstream file;
       torch::save(filled_mlp()->second, file);
       torch::load(model->second, file);
     }},
};

TEST(Misuse, ReplacedStorageStaysConnected) {
  const auto expected = mean_gradients(2);
  for (const auto& [what, replace] : kReplacements) {
    for (const auto& options :
         {DistributedDataParallelOptions{}, DistributedDataParallelOptions{.find_unused_parameters = true},
          DistributedDataParallelOptions{.static_graph = true}}) {
      run_threads(2, [&](ProcessGroup world) {
        auto model = filled_mlp();
        DistributedDataParallel ddp(model, world, options);
        for (int step = 0; step < 4; ++step) {
          SCOPED_TRACE(testing::Message() << what << ", step " << step);
          if (step != 1) replace(model);
          model->zero_grad();
          ddp(input_of(world.rank())).square().sum().backward();
          expect_gradients(*model, expected);
        }
      });
    }
  }
}

// The graph of an earlier forward keeps the accumulators that were replaced since. One layer's backward does not read
// its parameters: autograd refuses graphs of which it would read what has changed.
TEST(Misuse, AGraphFromBeforeALoadIsAveragedAsWell) {
  run_threads(2, [&](ProcessGroup world) {
    torch::nn::Linear model(6, 2);
    DistributedDataParallel ddp(model, world);
    const auto expected = ((input_of(0) + input_of(1)) / 2).sum(0).expand({2, 6});
    auto early = ddp(input_of(world.rank())).sum();
    std::stringstream file;
    torch::save(model, file);
    torch::load(model, file);
    auto late = ddp(input_of(world.rank())).sum();
    for (auto& loss : {early, late}) {
      model->zero_grad();
      loss.backward();
      EXPECT_LE(relative_difference(model->weight.grad(), expected), 1e-6);
    }
  });
}

TEST(Misuse, ALossWithoutTheModelIsNotAnsweredWithUnusedParameters) {
  run_threads_into_an_error(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    const auto message = error_of<UsageError>([&] { Stop::apply(ddp(input_of(world.rank()))).sum().backward(); });
    EXPECT_THAT(message, AllOf(HasSubstr("rank " + std::to_string(world.rank())), HasSubstr("to any parameter"),
                               HasSubstr("does not depend"), Not(HasSubstr("find_unused_parameters"))));
  });
}

// The form of docs/from_pytorch.md.
TEST(Misuse, NoSyncAroundBackwardAloneIsNotWarnedOf) {
  LogLines lines;
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      for (int part = 0; part < 2; ++part) {
        auto loss = ddp(input_of(world.rank())).sum();
        auto guard = ddp.no_sync();
        loss.backward();
      }
      ddp(input_of(world.rank())).sum().backward();
      optimizer.step();
    }
  });
  EXPECT_THAT(lines.lines(), Not(Contains(HasSubstr("diverged"))));
}

TEST(Misuse, AStepBetweenTwoNoSyncsIsWarnedOf) {
  LogLines lines;
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
      auto loss = ddp(input_of(world.rank())).sum();
      {
        auto guard = ddp.no_sync();
        loss.backward();
      }
      optimizer.step();
    }
    auto guard = ddp.no_sync();
  });
  EXPECT_THAT(lines.lines(), Contains(HasSubstr("diverged")));
}

TEST(Misuse, AStepByLocalGradientsAloneIsWarnedOf) {
  LogLines lines;
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    auto backward = [&] { ddp(input_of(world.rank())).sum().backward(); };
    {
      auto guard = ddp.no_sync();
      backward();
    }
    backward();
    optimizer.step();
    ddp(input_of(world.rank()));
    EXPECT_THAT(lines.lines(), Not(Contains(HasSubstr("no_sync")))) << "this was right";
    world.barrier();
    {
      auto guard = ddp.no_sync();
      backward();
    }
    optimizer.step();
    ddp(input_of(world.rank()));
  });
  EXPECT_THAT(lines.lines(), Contains(AllOf(HasSubstr("rank 1"), HasSubstr("the replicas have diverged"),
                                            HasSubstr("outside of no_sync()"))));
}

TEST(Misuse, BackwardWithCreateGraphIsRefusedBeforeAnythingIsSent) {
  const auto expected = mean_gradients(2);
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    expect_error<UsageError>(
        [&] { ddp(input_of(world.rank())).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true); },
        "rank " + std::to_string(world.rank()), "create_graph", "autograd::grad");
    model->zero_grad();
    ddp(input_of(world.rank())).square().sum().backward();
    expect_gradients(*model, expected);
  });
}

TEST(Misuse, AForwardWithinItsOwnBackwardIsNamed) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    const auto output = ddp(input_of(world.rank()));
    std::string message;
    model->first->weight.register_hook(
        [&](const torch::Tensor&) { message = error_of<UsageError>([&] { ddp(input_of(world.rank())); }); });
    output.sum().backward();
    EXPECT_THAT(message,
                AllOf(HasSubstr("rank " + std::to_string(world.rank())), HasSubstr("during backward of the same"),
                      HasSubstr("recompute()"), Not(HasSubstr("did not finish"))));
    world.barrier();
  });
}

// The remedy that the error above names, as a WGAN's gradient penalty does it.
TEST(Misuse, APenaltyOnGradientsIsAveraged) {
  const auto loss_of = [](auto&& model, const torch::Tensor& data) {
    const auto input = data.clone().requires_grad_();
    const auto output = model(input);
    const auto gradient = torch::autograd::grad({output.sum()}, {input}, {}, /*retain_graph=*/true,
                                                /*create_graph=*/true)[0];
    return output.square().sum() + gradient.norm();
  };
  auto alone = filled_mlp();
  ((loss_of(alone, input_of(0)) + loss_of(alone, input_of(1))) / 2).backward();
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    loss_of(ddp, input_of(world.rank())).backward();
    for (size_t i = 0; i < model->parameters().size(); ++i)
      EXPECT_LE(relative_difference(model->parameters()[i].grad(), alone->parameters()[i].grad()), 1e-5);
  });
}

TEST(Misuse, SetStaticGraphOnOneRankOnlyIsNamedInTheFirstBackward) {
  run_threads_into_an_error(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    if (world.rank() == 1) ddp.set_static_graph();
    const auto message = error_of<MismatchError>([&] { ddp(input_of(world.rank())).sum().backward(); });
    EXPECT_THAT(message, AllOf(HasSubstr("rank " + std::to_string(world.rank())), HasSubstr("call it on all ranks"),
                               HasSubstr(world.rank() == 1 ? "was called on this rank" : "was not called on this")));
  });
}

/// Returns another network's tensor unchanged, beside its own result.
struct PassThroughImpl : torch::nn::Module {
  PassThroughImpl() { head = register_module("head", torch::nn::Linear(6, 2)); }
  std::vector<torch::Tensor> forward(const torch::Tensor& x) { return {x, head(x)}; }
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(PassThrough);

TEST(Misuse, BackwardOfAnotherNetworkDoesNotReduceAModelThatPassedItsTensorThrough) {
  run_threads(2, [&](ProcessGroup world) {
    torch::nn::Linear other(6, 6);
    PassThrough model;
    DistributedDataParallel ddp(model, world);
    const auto outputs = ddp(other(input_of(world.rank())));
    if (world.rank() == 0) outputs[0].sum().backward({}, /*retain_graph=*/true);  // without rank 1
    EXPECT_FALSE(model->head->weight.grad().defined());
    outputs[1].sum().backward();
    EXPECT_TRUE(model->head->weight.grad().defined());
  });
}

TEST(Misuse, OneHookForEachWrapper) {
  run_threads(1, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    expect_error<UsageError>([&] { ddp.register_comm_hook({}); }, "empty");
    ddp.register_comm_hook(all_reduce_hook());
    expect_error<UsageError>([&] { ddp.register_comm_hook(bf16_compress()); }, "registered already");
    expect_error<UsageError>([&] { power_sgd({.rank = 0}); }, "rank is 0", "1 or more");
  });
}

}  // namespace
}  // namespace lockstep
