// One rank on its GPU.

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>
#include <lockstep/process_group.h>

#include "support/messages.h"

namespace lockstep {
namespace {

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    if (c10::cuda::device_count() == 0) GTEST_SKIP() << "this machine has no GPU";
  }
};

ProcessGroup alone_on_gpu(const std::string& backend) {
  return init_process_group({.backend = backend, .rank = 0, .world_size = 1});
}

TEST_F(Gpu, IsChosenAndTensorsOfBothDevicesMove) {
  const auto world = alone_on_gpu("auto");
  EXPECT_EQ(world.device(), c10::Device(c10::kCUDA, 0));
  EXPECT_TRUE(world.backend_name().starts_with("cpu:") && world.backend_name().ends_with(",cuda:nccl"))
      << world.backend_name();
  for (const auto device : {c10::Device(c10::kCPU), world.device()}) {
    EXPECT_TRUE(world.supports(device.type()));
    const auto tensor = at::full({3}, 5.0, device);
    world.all_reduce(tensor, ReduceOp::kAvg);
    world.broadcast(tensor, 0);
    EXPECT_TRUE(at::equal(tensor, at::full({3}, 5.0, device))) << device;
  }
}

TEST_F(Gpu, IsLeftAloneWhereTheCpuIsAskedFor) {
  const auto world = init_process_group({.rank = 0, .world_size = 1, .device = c10::Device(c10::kCPU)});
  EXPECT_EQ(world.device(), c10::Device(c10::kCPU));
  world.all_reduce(at::ones({3}));
}

TEST_F(Gpu, ATensorElsewhereIsRefusedByName) {
  const auto world = alone_on_gpu("nccl");
  expect_error<UsageError>([&] { world.all_reduce(at::ones({3})); }, "is on cpu", "cuda:0", ".to(world.device())");
  const auto tensor = at::ones({3}, world.device());
  world.all_reduce(tensor);
  EXPECT_TRUE(at::equal(tensor, at::ones({3}, world.device())));
}

TEST_F(Gpu, WorkIsWaitedForOnTheDeviceOrOnTheHost) {
  const auto world = alone_on_gpu("nccl");
  const auto tensor = at::ones({1 << 20}, world.device());
  auto work = world.all_reduce_async(tensor, ReduceOp::kAvg);
  work.wait();
  const auto sum = tensor.sum();
  work.synchronize();
  EXPECT_TRUE(work.is_done());
  EXPECT_EQ(sum.item<float>(), 1 << 20);
}

}  // namespace
}  // namespace lockstep
