#include "optim/zero/sharded_memory.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/run_threads.h>

namespace lockstep::detail {
namespace {

// The pieces of an optimizer with master weights are views: a new version would mean that the program has written them.
TEST(ShardedMemory, GathersWithoutANewVersion) {
  for (const int64_t size : {3, 512})
    for (const auto by : {ShardBy::kElements, ShardBy::kParameters})
      run_threads(2, [&](ProcessGroup world) {
        const auto parameter = torch::full({size}, 1.0f), other = torch::full({size}, 1.0f);
        const ShardedMemory memory(world, {parameter, other}, by, ShardedMemory::Buffer::kOwn);
        memory.move_parameters();
        std::vector<at::Tensor> views{parameter, other};
        for (const auto& piece : memory.pieces()) {
          views.push_back(memory.values(piece));
          views.back().fill_(world.rank() + 2);
        }
        std::vector<int64_t> before;
        for (const auto& view : views) before.push_back(view._version());
        memory.gather({});
        memory.gather_async({}).wait();
        for (size_t i = 0; i < views.size(); ++i) EXPECT_EQ(views[i]._version(), before[i]) << "view " << i;
        EXPECT_TRUE(at::cat({parameter, other}).ge(2).all().item<bool>()) << "not gathered";
      });
}

}  // namespace
}  // namespace lockstep::detail
