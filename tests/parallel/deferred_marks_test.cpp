// What ranks report about a reduction, read in the next forward instead of in backward, as on GPUs. Here on the CPU.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/error.h>

#include "parallel/ddp/reducer.h"
#include "parallel/ddp/unused_parameters.h"
#include "parallel/gradients.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

TEST(DeferredMarks, AreTakenOnceAndInOrder) {
  DeferredMarks marks;
  EXPECT_FALSE(marks.take().defined());
  auto memory = torch::zeros({4});
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 3; ++i) marks.add(memory.fill_(round + i));
    memory.fill_(-1);  // the next reduction overwrites it
    for (int i = 0; i < 3; ++i) {
      const auto taken = marks.take();
      ASSERT_TRUE(taken.defined());
      EXPECT_TRUE(torch::equal(taken, torch::full({4}, static_cast<float>(round + i))));
    }
    EXPECT_FALSE(marks.take().defined());
  }
}

TEST(DeferredMarks, AreReadAsFloats) {
  DeferredMarks marks;
  marks.add(torch::full({3}, 0.25, torch::kBFloat16));
  const auto taken = marks.take();
  EXPECT_EQ(taken.scalar_type(), torch::kFloat);
  EXPECT_TRUE(torch::equal(taken, torch::full({3}, 0.25f)));
}

/// A model that is wrapped as on a GPU.
class Wrapped {
 public:
  Wrapped(const ProcessGroup& world, bool allow_unused)
      : rank_(world.rank()),
        weight_(world),
        recorder_(world.device()),
        reducer_(parameters(), world, {.allow_unused = allow_unused, .defers_marks = true}, weight_, recorder_) {}

  torch::Tensor forward(bool uses_last = true) {
    reducer_.begin_forward();
    const auto hidden = torch::tanh(model->second(torch::tanh(model->first(input_of(rank_)))));
    const auto output = uses_last ? model->third(hidden) : hidden;
    reducer_.end_forward({output});
    reducer_.check_deferred();
    return output.square().sum();
  }
  void step(bool uses_last = true) { forward(uses_last).backward(); }

  Mlp model = filled_mlp();

 private:
  std::vector<NamedParameter> parameters() const {
    std::vector<NamedParameter> result;
    for (const auto& item : model->named_parameters()) result.push_back({item.key(), item.value()});
    return result;
  }

  const int rank_;
  BatchWeight weight_;
  StepRecorder recorder_;
  Reducer reducer_;
};

// Whichever reduction it is: none is left out.
TEST(DeferredMarks, TellOfFrozenParametersInTheNextForward) {
  for (int reductions = 1; reductions < 11; ++reductions)
    run_threads_into_an_error(3, [&](ProcessGroup world) {
      Wrapped wrapped(world, /*allow_unused=*/false);
      for (int i = 0; i < reductions; ++i) wrapped.step();
      if (world.rank() == 1) wrapped.model->second->bias.set_requires_grad(false);
      EXPECT_NO_THROW(wrapped.step());
      wrapped.model->second->bias.set_requires_grad(true);
      expect_error<MismatchError>([&] { wrapped.forward(); }, "rank " + std::to_string(world.rank()),
                                  "'second.bias' was frozen on some ranks, but trained on others");
    });
}

TEST(DeferredMarks, TellOfUnusedParametersInTheNextForward) {
  for (int reductions = 1; reductions < 11; ++reductions)
    run_threads_into_an_error(3, [&](ProcessGroup world) {
      Wrapped wrapped(world, /*allow_unused=*/false);
      for (int i = 0; i < reductions; ++i) wrapped.step();
      if (world.rank() == 1) {  // knows it without the others
        expect_error<UsageError>([&] { wrapped.step(/*uses_last=*/false); }, "rank 1", "no gradient on this rank",
                                 "'third.weight'");
        return;
      }
      EXPECT_NO_THROW(wrapped.step());
      expect_error<UsageError>([&] { wrapped.forward(); }, "rank " + std::to_string(world.rank()),
                               "no gradient on another rank", "'third.weight'");
    });
}

TEST(DeferredMarks, AreAllReadIfSeveralBackwardsFollowOneAnother) {
  run_threads_into_an_error(2, [&](ProcessGroup world) {
    Wrapped wrapped(world, /*allow_unused=*/false);
    wrapped.step();
    if (world.rank() == 1) wrapped.model->second->bias.set_requires_grad(false);
    const auto first = wrapped.forward();
    first.backward();
    wrapped.model->second->bias.set_requires_grad(true);
    // A backward without a forward of the wrapper before it.
    const auto output = wrapped.model(input_of(world.rank())).square().sum();
    EXPECT_NO_THROW(output.backward());
    expect_error<MismatchError>([&] { wrapped.forward(); }, "'second.bias' was frozen on some ranks");
  });
}

TEST(DeferredMarks, ThatAgreeTellNothing) {
  const auto means = mean_gradients(2);
  run_threads(2, [&](ProcessGroup world) {
    for (const bool allow_unused : {false, true}) {
      Wrapped wrapped(world, allow_unused);
      for (int i = 0; i < 20; ++i) {
        wrapped.model->second->bias.set_requires_grad(i % 3 != 0);  // the same on all ranks
        wrapped.model->zero_grad();
        wrapped.step(/*uses_last=*/!allow_unused || i % 2 == world.rank());
      }
      wrapped.model->zero_grad();
      wrapped.step();
      expect_gradients(*wrapped.model, means);
    }
  });
}

}  // namespace
}  // namespace lockstep
