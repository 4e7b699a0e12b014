#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/module_state.h>
#include <lockstep/optimizer_state.h>

#include "checkpoint/snapshot.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

TEST(CudaCheckpoint, IsSavedForTheCpuAndLoadedOnTheDeviceThatIsAskedFor) {
  const TemporaryFolder folder;
  const auto path = (folder.path() / "a.pt").string();
  const auto row = torch::arange(10.0, torch::kCUDA);
  save_checkpoint(path, Value::dict({{"row", row}, {"part", row.narrow(0, 2, 3)}, {"cpu", torch::ones({2})}}));
  const auto on_cpu = load_checkpoint(path);
  EXPECT_TRUE(on_cpu.at("row").tensor().is_cpu());
  EXPECT_TRUE(torch::equal(on_cpu.at("row").tensor(), row.cpu()));
  const auto on_gpu = load_checkpoint(path, {.map_location = torch::Device("cuda:0")});
  EXPECT_TRUE(on_gpu.at("row").tensor().is_cuda());
  on_gpu.at("part").tensor().fill_(-1);  // still shares the memory of row
  EXPECT_EQ(on_gpu.at("row").tensor()[2].item<float>(), -1);
}

TEST(CudaCheckpoint, SnapshotsAreOfTheMomentTheyAreTaken) {
  auto tensor = torch::zeros({1 << 22}, torch::kCUDA);
  detail::Snapshot snapshot;
  for (int i = 0; i < 5; ++i) {
    for (int k = 0; k < 20; ++k) tensor += 1;  // still queued when the snapshot begins
    const auto value = snapshot.take(Value::dict({{"x", tensor}, {"y", torch::ones({3})}}));
    tensor.zero_();
    EXPECT_TRUE(value.at("x").tensor().is_pinned());
    EXPECT_TRUE(torch::equal(value.at("x").tensor(), torch::full({1 << 22}, 20.0f)));
    EXPECT_TRUE(torch::equal(value.at("y").tensor(), torch::ones({3})));
  }
}

TEST(CudaCheckpoint, HasTheStepCountsOfAFusedOptimizer) {
  torch::nn::Linear model(4, 4);
  model->to(torch::kCUDA);
  FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.1));
  for (int i = 0; i < 3; ++i) {
    model->forward(torch::ones({2, 4}, torch::kCUDA)).sum().backward();
    optimizer.step();
  }
  EXPECT_EQ(state_dict(optimizer)["state"][0]["step"].tensor().item<float>(), 3);
}

}  // namespace
}  // namespace lockstep
