// Parameters that all ranks of a host share, and updates of them during backward.

#include <lockstep/zero_redundancy_optimizer.h>

#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <string_view>
#include <utility>

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/join.h>
#include <lockstep/run_threads.h>
#include <lockstep/weight_average.h>

#include "optim/sharded_training.h"
#include "optim/zero/undo.h"
#include "support/messages.h"
#include "support/rank_process.h"
#include "support/ranks.h"
#include "support/slowness.h"

namespace lockstep {
namespace {

using namespace torch::optim;
using detail::ZeroUndo;
using testing::ContainsRegex;
using testing::HasSubstr;

const ZeroRedundancyOptions kShared{.share_parameters = true};
const ZeroRedundancyOptions kUpdating{.overlap = Overlap::kUpdate, .share_parameters = true};
const std::vector<std::string> kSharingBackends{"shm", "threads"};

enum class Update { kInStep, kInBackward };

const ZeroRedundancyOptions& options_of(Update update) {
  return update == Update::kInStep ? kShared : kUpdating;
}

template <class Inner, class Options>
void expect_the_same_bits(Cases cases, Options options, Update update) {
  const auto [all_ranks, backends] = ranks_and_backends(cases);
  for (const int ranks : all_ranks) {
    const auto expected = trained_apart<Inner>(ranks, 3, options);
    for (const auto& backend : backends)
      run_threads(ranks,
                  [&](ProcessGroup world) {
                    Mixed model;
                    DistributedDataParallel ddp(model, world);
                    ZeroRedundancyOptimizer<Inner> optimizer(ddp, options, options_of(update));
                    EXPECT_EQ(model->kernel.stride(1), 1) << "the layout stays";
                    run_steps(ddp, optimizer, world.rank(), 0, 3);
                    expect_same_bits(ddp.parameters(), expected, backend);
                  },
                  {.backend = backend});
  }
}

TEST(SharedParameters, TrainToTheBitsOfParametersOnEachRank) {
  expect_the_same_bits<FusedAdamW>(Cases::kAll, AdamWOptions(0.01), Update::kInStep);
  expect_the_same_bits<AdamW>(Cases::kOne, AdamWOptions(0.01), Update::kInStep);
  expect_the_same_bits<FusedSGD>(Cases::kOne, SGDOptions(0.01).momentum(0.9), Update::kInStep);
}

TEST(UpdateInBackward, TrainsToTheBitsOfUpdatesInStep) {
  expect_the_same_bits<FusedAdamW>(Cases::kAll, AdamWOptions(0.01), Update::kInBackward);
  expect_the_same_bits<FusedAdamW>(Cases::kOne, AdamWOptions(0.01).amsgrad(true), Update::kInBackward);
  expect_the_same_bits<FusedAdam>(Cases::kOne, AdamOptions(0.01).weight_decay(0.1), Update::kInBackward);
  expect_the_same_bits<FusedSGD>(Cases::kOne, SGDOptions(0.01).momentum(0.9).nesterov(true), Update::kInBackward);
  expect_the_same_bits<FusedSGD>(Cases::kOne, SGDOptions(0.01), Update::kInBackward);
}

TEST(SharedParameters, AreOneCopyForAllRanks) {
  for (const auto& backend : kSharingBackends)
    run_threads(2,
                [&](ProcessGroup world) {
                  Mixed model;
                  DistributedDataParallel ddp(model, world);
                  const ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp.parameters(), world, AdamWOptions(), kShared);
                  world.barrier();
                  const torch::NoGradGuard no_grad;
                  if (world.rank() == 1) model->scale.fill_(42);
                  world.barrier();
                  EXPECT_EQ(model->scale.item<float>(), 42);
                },
                {.backend = backend});
}

TEST(SharedParameters, MustBeEqualAtFirst) {
  run_threads(2,
              [&](ProcessGroup world) {
                Mixed model;
                const torch::NoGradGuard no_grad;
                if (world.rank() == 1) model->wide[3][4].add_(1);
                expect_error<MismatchError>(
                    [&] {
                      const ZeroRedundancyOptimizer<FusedAdamW> optimizer(
                          {{"table", model->table}, {"wide", model->wide}}, world, AdamWOptions(), kShared);
                    },
                    "parameter 'wide' of rank 1 differs from rank 0's; wrap the model in DistributedDataParallel");
                EXPECT_EQ(model->wide[3][4].item<float>() == Mixed()->wide[3][4].item<float>(), world.rank() == 0);
              },
              {.backend = "shm"});
}

#ifdef LOCKSTEP_HAVE_GLOO
TEST(SharedParameters, NeedRanksThatShareMemory) {
  run_threads(2,
              [&](ProcessGroup world) {
                Mixed model;
                expect_error<UsageError>(
                    [&] {
                      const ZeroRedundancyOptimizer<FusedAdamW> optimizer(model->parameters(), world, AdamWOptions(),
                                                                          kShared);
                    },
                    "uses backend gloo; pass a group of the ranks of one host");
              },
              {.backend = "gloo"});
}
#endif

/// Trains two steps, between which `write` runs on each rank, and returns the message of the error.
std::string error_after_writes(Update update, const std::function<void(Mixed&, int rank)>& write) {
  std::vector<std::string> errors(3);
  run_threads(3,
              [&](ProcessGroup world) {
                Mixed model;
                DistributedDataParallel ddp(model, world);
                ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, AdamWOptions(), options_of(update));
                run_steps(ddp, optimizer, world.rank(), 0, 1);
                {
                  const torch::NoGradGuard no_grad;
                  write(model, world.rank());
                }
                world.barrier();
                try {
                  run_steps(ddp, optimizer, world.rank(), 1, 3);
                } catch (const MismatchError& error) {
                  errors[static_cast<size_t>(world.rank())] = error.what();
                }
              },
              {.backend = "shm"});
  EXPECT_EQ(errors[0].empty(), errors[1].empty());
  EXPECT_EQ(errors[0].empty(), errors[2].empty());
  return errors[0];
}

TEST(SharedParameters, NameTheRankThatWritesOnItsOwn) {
  for (auto update : {Update::kInStep, Update::kInBackward}) {
    const auto lone = error_after_writes(update, [](Mixed& model, int rank) {
      if (rank == 1) model->kernel.mul_(2);
    });
    if (update == Update::kInStep) {
      EXPECT_THAT(lone, HasSubstr("rank 1 wrote to parameter 'kernel' since the last step, and rank 0 did not"));
    } else {
      EXPECT_THAT(lone, ContainsRegex("rank 1 .*after writing to parameter 'kernel', which all ranks share"));
    }
    const auto missing = error_after_writes(update, [](Mixed& model, int rank) {
      if (rank != 2) model->scale.fill_(1);
    });
    EXPECT_THAT(missing, HasSubstr(update == Update::kInStep
                                       ? "rank 0 wrote to parameter 'scale' since the last step, and rank 2 did not"
                                       : "after writing to parameter 'scale', which all ranks share"));
  }
}

// There is one copy, so there is nothing that check_replicas() could compare it with.
TEST(SharedParameters, AWriteThroughAPointerChangesThemForAllRanksUnnoticed) {
  for (auto update : {Update::kInStep, Update::kInBackward})
    run_threads(2,
                [&](ProcessGroup world) {
                  Mixed model;
                  DistributedDataParallel ddp(model, world);
                  ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, AdamWOptions(0.01), options_of(update));
                  run_steps(ddp, optimizer, world.rank(), 0, 1);
                  world.barrier();
                  if (world.rank() == 1) {
                    const float value = 42;
                    std::memcpy(model->scale.data_ptr(), &value, sizeof value);
                    model->wide.data().fill_(0.25);  // has a version of its own
                  }
                  world.barrier();
                  EXPECT_EQ(model->scale.item<float>(), 42);
                  EXPECT_EQ(model->wide[3][4].item<float>(), 0.25);
                  ddp.check_replicas();
                  run_steps(ddp, optimizer, world.rank(), 1, 2);
                },
                {.backend = "shm"});
}

TEST(SharedParameters, MayBeBroadcastByTheWrapper) {
  for (auto update : {Update::kInStep, Update::kInBackward})
    for (const auto& backend : kSharingBackends) {
      const auto expected = trained_apart<FusedAdamW>(2, 2, AdamWOptions(0.01));
      run_threads(2,
                  [&](ProcessGroup world) {
                    Mixed model;
                    DistributedDataParallel ddp(model, world);
                    ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, AdamWOptions(0.01), options_of(update));
                    run_steps(ddp, optimizer, world.rank(), 0, 1);
                    ddp.sync_parameters_and_buffers();
                    run_steps(ddp, optimizer, world.rank(), 1, 2);
                    expect_same_bits(ddp.parameters(), expected, backend);
                  },
                  {.backend = backend});
    }
}

TEST(SharedParameters, AreNotOverwrittenByAWeightAverage) {
  for (const auto& backend : kSharingBackends)
    run_threads(2,
                [&](ProcessGroup world) {
                  Mixed model, second;
                  DistributedDataParallel ddp(model, world);
                  ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp.named_parameters(), world, AdamWOptions(0.1),
                                                                kShared);
                  WeightAverage average(*model, ema(0.5));
                  for (int step = 0; step < 3; ++step) {
                    run_steps(ddp, optimizer, world.rank(), step, step + 1);
                    average.update();
                  }
                  const auto weights = copies(ddp.parameters());
                  world.barrier();
                  expect_error<UsageError>([&] { const auto guard = average.apply(); },
                                           "WeightAverage::apply: parameter 'table' is memory that all ranks share",
                                           "second model");
                  expect_error<UsageError>([&] { average.copy_to_model(); },
                                           "WeightAverage::copy_to_model: parameter 'table' is memory");
                  WeightAverage other(*second, ema(0.5));
                  other.load_state_dict(average.state_dict());
                  other.copy_to_model();
                  world.barrier();
                  expect_same_bits(ddp.parameters(), weights, backend);
                  EXPECT_TRUE(torch::equal(second->wide, average.state_dict().at("module.wide").tensor()));
                  EXPECT_FALSE(torch::equal(second->wide, model->wide));
                },
                {.backend = backend});
}

TEST(SharedParameters, CanBeLoadedOnAllRanks) {
  for (auto update : {Update::kInStep, Update::kInBackward}) {
    EXPECT_EQ(error_after_writes(update, [](Mixed& model, int) { model->scale.fill_(1); }), "");
    const auto other = torch::ones({});
    EXPECT_EQ(error_after_writes(update, [&](Mixed& model, int) { model->scale.set_data(other.clone()); }), "");
  }
}

TEST(UpdateInBackward, TakesReplacedMemoryBeforeTheUpdate) {
  std::vector<torch::Tensor> expected;
  for (bool is_shared : {false, true})
    run_threads(2,
                [&](ProcessGroup world) {
                  Mixed model;
                  DistributedDataParallel ddp(model, world);
                  std::unique_ptr<Optimizer> optimizer;
                  if (is_shared)
                    optimizer =
                        std::make_unique<ZeroRedundancyOptimizer<FusedAdamW>>(ddp, AdamWOptions(0.01), kUpdating);
                  else
                    optimizer = std::make_unique<FusedAdamW>(ddp.parameters(), AdamWOptions(0.01));
                  run_steps(ddp, *optimizer, world.rank(), 0, 1);
                  world.barrier();
                  model->wide.set_data(torch::full({101, 301}, 0.25));
                  run_steps(ddp, *optimizer, world.rank(), 1, 3);
                  if (!is_shared && world.rank() == 0) expected = copies(ddp.parameters());
                  if (is_shared) expect_same_bits(ddp.parameters(), expected, "replaced");
                },
                {.backend = "shm"});
}

// --- a rank that copies the values of replaced memory late
//
// Callbacks of LibTorch on a rank's thread make it late. They hold nothing themselves.

constexpr std::chrono::seconds kLongEnough(60);  // passes only if the test fails
std::promise<void>* rank_0_meets = nullptr;
const void* replaced_home = nullptr;  // rank 1's address of the shared memory

/// On rank 0, after the forward and backward of the step.
std::unique_ptr<at::ObserverContext> tell_of_barrier(const at::RecordFunction& call) {
  if (std::string_view(call.name()) == "lockstep::barrier" && rank_0_meets)
    std::exchange(rank_0_meets, nullptr)->set_value();
  return nullptr;
}

std::shared_future<void> rank_0_has_met;
bool was_late = false;

std::unique_ptr<at::ObserverContext> delay_copy(const at::RecordFunction& call) {
  if (std::string_view(call.name()) != "aten::copy_" || was_late) return nullptr;
  if (call.inputs()[0].toTensor().data_ptr() != replaced_home) return nullptr;
  was_late = rank_0_has_met.wait_for(kLongEnough) == std::future_status::ready;
  return nullptr;
}

void step_with(std::unique_ptr<at::ObserverContext> (*callback)(const at::RecordFunction&), Optimizer& optimizer) {
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(callback).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  optimizer.step();
  at::removeCallback(handle);
}

// Without a barrier between the copies and the update, rank 0 is in no barrier before it has updated its part of the
// memory, which rank 1 then overwrites.
TEST(SharedParameters, AreUpdatedAfterAllRanksHaveCopiedReplacedMemory) {
  for (const auto& backend : kSharingBackends) {
    std::promise<void> meeting;
    rank_0_meets = &meeting;
    rank_0_has_met = meeting.get_future().share();
    was_late = false;
    std::vector<torch::Tensor> expected;
    for (bool is_shared : {false, true})
      run_threads(2,
                  [&](ProcessGroup world) {
                    Mixed model;
                    DistributedDataParallel ddp(model, world);
                    std::unique_ptr<Optimizer> optimizer;
                    if (is_shared)
                      optimizer = std::make_unique<ZeroRedundancyOptimizer<FusedSGD>>(ddp.named_parameters(), world,
                                                                                      SGDOptions(0.01), kShared);
                    else
                      optimizer = std::make_unique<FusedSGD>(ddp.parameters(), SGDOptions(0.01));
                    run_steps(ddp, *optimizer, world.rank(), 0, 1);
                    world.barrier();
                    if (is_shared && world.rank() == 1) replaced_home = model->wide.data_ptr();
                    model->wide.set_data(torch::full({101, 301}, 0.25));
                    optimizer->zero_grad();
                    ddp(input_of(10 + world.rank())).mean().backward();
                    if (is_shared)
                      step_with(world.rank() == 0 ? &tell_of_barrier : &delay_copy, *optimizer);
                    else
                      optimizer->step();
                    if (!is_shared && world.rank() == 0) expected = copies(ddp.parameters());
                    if (is_shared) expect_same_bits(ddp.parameters(), expected, backend);
                  },
                  {.backend = backend});
    EXPECT_TRUE(was_late) << "rank 1 did not wait in its copy";
  }
}

TEST(UpdateInBackward, SavesAndLoadsItsState) {
  Value saved;
  std::vector<torch::Tensor> middle, expected;
  for (bool resumes : {false, true})
    run_threads(
        resumes ? 3 : 2,
        [&](ProcessGroup world) {
          Mixed model;
          DistributedDataParallel ddp(model, world);
          ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, AdamWOptions(0.01), kUpdating);
          if (resumes) {
            const torch::NoGradGuard no_grad;
            for (size_t i = 0; i < middle.size(); ++i) ddp.parameters()[i].copy_(middle[i]);
            optimizer.load_state_dict(saved);
            world.barrier();
            const auto state = optimizer.consolidated_state_dict();
            if (world.rank() == 0) {
              EXPECT_EQ(state["state"][2]["step"], saved["state"][2]["step"]);
              EXPECT_TRUE(torch::equal(state["state"][2]["exp_avg"].tensor(), saved["state"][2]["exp_avg"].tensor()));
            }
          } else {
            run_steps(ddp, optimizer, world.rank(), 0, 2);
            auto state = optimizer.consolidated_state_dict();
            if (world.rank() == 0) saved = std::move(state), middle = copies(ddp.parameters());
            world.barrier();
          }
          // All ranks get the same input, so that the number of ranks does not matter.
          optimizer.zero_grad();
          ddp(input_of(77)).mean().backward();
          optimizer.step();
          if (world.rank() != 0) return;
          if (resumes)
            for (size_t i = 0; i < expected.size(); ++i)
              EXPECT_TRUE(torch::allclose(ddp.parameters()[i], expected[i], 1e-5, 1e-7)) << i;
          else
            expected = copies(ddp.parameters());
        },
        {.backend = "shm"});
}

TEST(UpdateInBackward, ConsumesGradients) {
  run_threads(2,
              [&](ProcessGroup world) {
                Mixed model;
                DistributedDataParallel ddp(model, world);
                ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, AdamWOptions(), kUpdating);
                {
                  const auto guard = ddp.no_sync();
                  ddp(input_of(1)).mean().backward();
                }
                EXPECT_TRUE(model->wide.grad().defined());
                ddp(input_of(2)).mean().backward();
                for (const auto& parameter : ddp.parameters()) EXPECT_FALSE(parameter.grad().defined());
                expect_error<UsageError>([&] { ddp(input_of(3)).mean().backward(); },
                                         "was updated in an earlier backward already; call step() after each backward");
              },
              {.backend = "threads"});
}

/// Uses a weight again after its gradient is complete, through a path that needs no gradient of it.
struct ReusesImpl : torch::nn::Module {
  ReusesImpl() {
    first = register_parameter("first", torch::ones({4, 4}));
    last = register_parameter("last", torch::ones({600, 600}));
    fill_parameters(*this, 5);
  }
  torch::Tensor forward(torch::Tensor x) {
    const auto y = torch::mm(x.narrow(1, 0, 4), first);
    const auto used_again = (y * last.detach().narrow(0, 0, 4).narrow(1, 0, 4)).sum();  // its backward runs later
    return used_again + torch::mm(last, last).mean();
  }
  torch::Tensor first, last;
};
TORCH_MODULE(Reuses);

TEST(UpdateInBackward, IsRefusedByAutogradWhereAParameterIsUsedAgain) {
  run_threads(1,
              [&](ProcessGroup world) {
                Reuses model;
                DistributedDataParallel ddp(model, world, {.buckets = {.first_bytes = 1 << 10, .cap_bytes = 1 << 10}});
                ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, AdamWOptions(), kUpdating);
                const auto input = torch::ones({4, 6});
                EXPECT_THROW(
                    {
                      for (int step = 0; step < 3; ++step) {
                        ddp(input).backward();
                        optimizer.step();
                      }
                    },
                    c10::Error);
              },
              {.backend = "threads"});
}

TEST(UpdateInBackward, LeavesFrozenParametersAlone) {
  run_threads(2,
              [&](ProcessGroup world) {
                Mixed model;
                DistributedDataParallel ddp(model, world);
                ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, AdamWOptions(0.01).weight_decay(0.5), kUpdating);
                run_steps(ddp, optimizer, world.rank(), 0, 2);
                model->wide.requires_grad_(false);
                const auto before = copies({model->wide, model->kernel});
                world.barrier();
                run_steps(ddp, optimizer, world.rank(), 2, 4);
                EXPECT_TRUE(torch::equal(model->wide, before[0]));
                EXPECT_FALSE(torch::equal(model->kernel, before[1]));
              },
              {.backend = "shm"});
}

TEST(UpdateInBackward, ReportsParametersThatOneRankDoesNotUse) {
  run_threads(2,
              [&](ProcessGroup world) {
                Mixed model;
                DistributedDataParallel ddp(model, world);
                ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, AdamWOptions(), kUpdating);
                run_steps(ddp, optimizer, world.rank(), 0, 2);
                auto loss = ddp(input_of(1)).mean();
                if (world.rank() == 1) loss = model->table.sum() + model->kernel.sum() + model->wide.sum();
                expect_error<UsageError>([&] { loss.backward(); },
                                         world.rank() == 1 ? "no gradient on this rank for 'scale' and 'exact'"
                                                           : "no gradient on another rank for 'scale' and 'exact'");
              },
              {.backend = "shm"});
}

TEST(UpdateInBackward, RefusesWhatItCannotCombine) {
  run_threads(1, [&](ProcessGroup world) {
    using Zero = ZeroRedundancyOptimizer<FusedAdamW>;
    const auto refuses = [&](const std::string& why, const std::string& remedy,
                             const DistributedDataParallelOptions& options, bool has_hook = false) {
      Mixed model;
      DistributedDataParallel ddp(model, world, options);
      if (has_hook) ddp.register_comm_hook(all_reduce_hook());
      expect_error<UsageError>([&] { Zero(ddp, AdamWOptions(), kUpdating); },
                               "the option overlap cannot be combined with " + why, "; " + remedy + ", or construct");
    };
    const std::string without = "wrap the model without ";
    refuses("the option find_unused_parameters", without + "find_unused_parameters", {.find_unused_parameters = true});
    refuses("the option check_finite", without + "check_finite", {.check_finite = true});
    refuses("the option reduce_dtype", without + "reduce_dtype", {.reduce_dtype = at::kBFloat16});
    refuses("sparse gradients", "set densify_sparse_gradients", {.sparse_parameters = {"wide"}});
    refuses("a comm hook", "register no hook", {}, /*has_hook=*/true);

    Mixed model;
    DistributedDataParallel ddp(model, world);
    expect_error<UsageError>([&] { ZeroRedundancyOptimizer<AdamW>(ddp, AdamWOptions(), kUpdating); },
                             "the optimizer is not FusedAdamW, FusedAdam or FusedSGD");
    expect_error<UsageError>([&] { Zero({OptimizerParamGroup({model->wide})}, ddp, AdamWOptions(), kUpdating); },
                             "parameter 'table' of the wrapper is not a parameter of the optimizer");
    Zero optimizer(ddp, AdamWOptions(), kUpdating);
    run_steps(ddp, optimizer, 0, 0, 1);
    ddp(input_of(1)).mean().backward();
    expect_error<UsageError>([&] { optimizer.step_unless(torch::zeros({1})); }, "a GradScaler cannot be used");
    optimizer.step();
    expect_error<UsageError>([&] { Zero(ddp, AdamWOptions(), kUpdating); },
                             "another optimizer with the option overlap was constructed");
    expect_error<UsageError>([&] { join({&ddp, &optimizer}, [] {}); }, "overlap is not supported in a join");
  });
}

TEST(UpdateInBackward, IsRefusedOnAllRanksIfOneRankCannot) {
  run_threads(2, [&](ProcessGroup world) {
    Mixed model;
    DistributedDataParallel ddp(model, world);
    if (world.rank() == 1) ddp.register_comm_hook(all_reduce_hook());
    expect_error<UsageError>([&] { ZeroRedundancyOptimizer<FusedAdamW>(ddp, AdamWOptions(), kUpdating); },
                             world.rank() == 1 ? "a comm hook" : "on rank 1: ");
  });
}

TEST(UpdateInBackward, RefusesMomentumForWhichThereIsNoMemory) {
  run_threads(1, [&](ProcessGroup world) {
    Mixed model;
    DistributedDataParallel ddp(model, world);
    ZeroRedundancyOptimizer<FusedSGD> optimizer(ddp, SGDOptions(0.01), kUpdating);
    run_steps(ddp, optimizer, 0, 0, 1);
    static_cast<SGDOptions&>(optimizer.param_groups()[0].options()).momentum(0.9);
    expect_error<UsageError>([&] { run_steps(ddp, optimizer, 0, 1, 2); },
                             "momentum or amsgrad was switched on after the ZeroRedundancyOptimizer was constructed");
  });
}

TEST(UndoStep, RestoresParametersAndState) {
  const auto expected = trained_apart<FusedAdamW>(2, 3, AdamWOptions(0.01));
  run_threads(2,
              [&](ProcessGroup world) {
                Mixed model;
                DistributedDataParallel ddp(model, world);
                ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, AdamWOptions(0.01), kUpdating);
                ZeroUndo::keep_copies(optimizer);
                const auto first = copies(ddp.parameters());
                world.barrier();
                EXPECT_FALSE(ZeroUndo::undo_step(optimizer));
                ddp(input_of(world.rank())).mean().backward();
                EXPECT_FALSE(torch::equal(model->wide, first[2]));
                world.barrier();
                EXPECT_TRUE(ZeroUndo::undo_step(optimizer)) << "of the first step, which creates the state";
                world.barrier();
                expect_same_bits(ddp.parameters(), first, "first step");

                run_steps(ddp, optimizer, world.rank(), 0, 2);
                const auto middle = copies(ddp.parameters());
                const auto state = optimizer.consolidated_state_dict();
                ddp(input_of(10 + world.rank())).mean().backward();
                world.barrier();
                EXPECT_TRUE(ZeroUndo::undo_step(optimizer));
                world.barrier();
                expect_same_bits(ddp.parameters(), middle, "third step");
                EXPECT_EQ(optimizer.consolidated_state_dict(), state);
                run_steps(ddp, optimizer, world.rank(), 2, 3);
                expect_same_bits(ddp.parameters(), expected, "trained on");
              },
              {.backend = "shm"});
}

TEST(UndoStep, SaysWhatItNeeds) {
  run_threads(1, [&](ProcessGroup world) {
    Mixed model;
    DistributedDataParallel ddp(model, world);
    ZeroRedundancyOptimizer<FusedAdamW> in_step(ddp, AdamWOptions(), kShared);
    expect_error<UsageError>([&] { ZeroUndo::keep_copies(in_step); },
                             "with share_parameters and Overlap::kUpdate only");
    ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, AdamWOptions(), kUpdating);
    ddp(input_of(1)).mean().backward();
    expect_error<UsageError>([&] { ZeroUndo::undo_step(optimizer); }, "call keep_copies() before the first step");
  });
}

// --- processes

TEST(UndoStep, RestoresTheShardOfARankThatWasKilledDuringBackward) {
  JobProcesses job(TEST_RANKS, 2, {"shared_rank", "killed"});
  job.start_all();
  EXPECT_EQ(job[1].wait(), 128 + SIGKILL) << job[1].output();
  EXPECT_EQ(job[0].expect_line("failed: "), "failed: PeerError, parameters differ: 1");
  EXPECT_EQ(job[0].expect_line("undone: "), "undone: parameters differ: 0");
  EXPECT_EQ(job[0].wait(), 0) << job[0].output();
}

TEST(SharedParameters, NameTheLimitThatForbidsSharedMemory) {
#ifdef LOCKSTEP_HAVE_GLOO
  const char* refused = "because shm cannot be used";  // but Gloo can: sharing the parameters is refused
#else
  const char* refused = "backend shm of group 'world'";  // no backend is left
#endif
  JobProcesses job(TEST_RANKS, 2, {"shared_rank", "no_address_space"});
  job.start_all();
  for (int rank : {0, 1}) {
    EXPECT_THAT(job[rank].expect_line("refused: "),
                testing::AllOf(testing::HasSubstr(refused), testing::HasSubstr("(rank 1: mmap"),
                               testing::HasSubstr("ulimit -v"), testing::HasSubstr("LOCKSTEP_SHM_BYTES")));
    EXPECT_EQ(job[rank].wait(), 0) << job[rank].output();
  }
}

TEST(SharedParameters, AndTheirStateTakeThreeTimesTheirSizePerHost) {
  constexpr int kRanks = 3;
  JobProcesses job(TEST_RANKS, kRanks, {"shared_rank", "memory"});
  job.start_all();
  double before = 0, after = 0;  // in sizes of the parameters, on all ranks
  for (int rank = 0; rank < kRanks; ++rank) {
    before += std::stod(job[rank].expect_line("before: ").substr(8));
    after += std::stod(job[rank].expect_line("after: ").substr(7));
  }
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(job[rank].wait(), 0) << job[rank].output();
  if (kSlowness == 1) {  // sanitizers keep freed memory
    EXPECT_NEAR(after - before, 3 - kRanks, 0.1) << "one copy and two states, instead of a copy on each rank";
  }
}

}  // namespace
}  // namespace lockstep
