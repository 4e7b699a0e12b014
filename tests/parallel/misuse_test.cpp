// What is done to a model behind the wrapper's back is told at the next forward.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/run_threads.h>

#include "parallel/gradients.h"
#include "parallel/models.h"
#include "support/log_lines.h"
#include "support/messages.h"

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
                             "wrap it (again)");
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

TEST(Misuse, AFrozenOrThawedParameterIsNamed) {
  expect_refused([](MlpImpl& m) { m.second->bias.set_requires_grad(false); }, "'second.bias' was trained",
                 "is frozen now");
  run_threads(1, [&](ProcessGroup world) {
    auto model = filled_mlp();
    model->first->weight.set_requires_grad(false);
    DistributedDataParallel ddp(model, world);
    model->first->weight.set_requires_grad(true);
    expect_error<UsageError>([&] { ddp(input_of(0)); }, "'first.weight' was frozen", "is trained now");
  });
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
  EXPECT_THAT(lines.lines(), Contains(AllOf(HasSubstr("rank 1"), HasSubstr("the replicas have come apart"),
                                            HasSubstr("outside of no_sync()"))));
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
