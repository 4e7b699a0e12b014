#include "parallel/ddp/packed_broadcast.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/run_threads.h>

#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

/// Tensors of many kinds, with values of this rank.
std::vector<at::Tensor> of_many_kinds(int rank) {
  return {at::full({3, 5}, rank + 0.5),
          at::full({}, rank, at::kLong),
          at::full({7}, rank == 1, at::kBool),
          at::full({0, 4}, 1.0),
          at::full({4, 6}, rank, at::kInt).t(),
          at::full({2, 3, 4, 4}, rank + 0.25f).contiguous(at::MemoryFormat::ChannelsLast),
          at::full({2}, rank + 1, at::kBFloat16),
          at::full({1, 1}, rank + 0.5f).as_strided({1, 1}, {7, 5}),
          at::full({2}, rank + 1, at::kComplexFloat),
          at::full({3}, c10::complex<float>(rank, 1), at::kComplexFloat).conj(),
          at::_neg_view(at::full({3}, rank + 0.5))};
}

void expect_root(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(at::equal(got[i], expected[i])) << "tensor " << i << ": " << got[i];
    EXPECT_EQ(got[i].strides(), expected[i].strides()) << "tensor " << i;
  }
}

TEST(PackedBroadcast, GivesEveryRankTheRootsValues) {
  for (const auto& backend : backends_under_test())
    run_threads(3,
                [](ProcessGroup world) {
                  const auto tensors = of_many_kinds(world.rank());
                  PackedBroadcast broadcast(world, tensors);
                  for (int root : {1, 0, 2}) {
                    const auto mine = of_many_kinds(world.rank());
                    for (size_t i = 0; i < tensors.size(); ++i) tensors[i].copy_(mine[i]);
                    broadcast.run(root);
                    expect_root(tensors, of_many_kinds(root));
                  }
                },
                {.backend = backend});
}

TEST(PackedBroadcast, SeesThatATensorIsAnotherNow) {
  run_threads(2, [](ProcessGroup world) {
    const float mine = static_cast<float>(world.rank());
    auto moved = at::full({3}, mine), grown = at::full({3}, mine), filled = at::empty({0});
    PackedBroadcast broadcast(world, {moved, grown, filled});
    broadcast.run(0);
    EXPECT_TRUE(at::equal(moved, at::zeros({3})));
    moved.set_data(at::full({2, 5}, mine));
    grown.resize_({8}).fill_(mine);
    filled.resize_({2}).fill_(mine);
    broadcast.run(1);
    EXPECT_TRUE(at::equal(moved, at::ones({2, 5})));
    EXPECT_TRUE(at::equal(grown, at::ones({8})));
    EXPECT_TRUE(at::equal(filled, at::ones({2})));
  });
}

TEST(PackedBroadcast, TakesNothingAndMuch) {
  run_threads(2, [](ProcessGroup world) {
    PackedBroadcast(world, {}).run(0);
    PackedBroadcast(world, {at::empty({0})}).run(0);
    auto much = at::full({8 << 20}, world.rank() + 1.0f), little = at::full({3}, world.rank(), at::kLong);
    PackedBroadcast(world, {much, little}).run(1);
    EXPECT_TRUE(at::equal(much, at::full({8 << 20}, 2.0f)));
    EXPECT_TRUE(at::equal(little, at::ones({3}, at::kLong)));
  });
}

TEST(PackedBroadcast, AutogradHearsOfIt) {
  run_threads(2, [](ProcessGroup world) {
    auto weight = torch::ones({3}, torch::requires_grad());
    auto buffer = at::full({3}, world.rank() + 1.0f), other = at::ones({1});
    const auto loss = (weight * buffer).sum();
    PackedBroadcast(world, {buffer, other}).run(0);
    if (world.rank() == 0) return loss.backward();
    expect_error<c10::Error>([&] { loss.backward(); }, "modified by an inplace operation");
  });
}

}  // namespace
}  // namespace lockstep
