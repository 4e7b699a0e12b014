// Training on a GPU gives the same numbers as Python's DistributedDataParallel on that GPU, option by option.

#include <optional>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/environment.h>

#include "parallel/gpu.h"
#include "parallel/oracle_scenarios.h"
#include "parallel/python_oracle.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

constexpr int kRanks = 2;

TEST(CudaOracle, TrainingEqualsPythonsDistributedDataParallel) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "this machine has no GPU";
  at::globalContext().setAllowTF32CuBLAS(false);
  at::globalContext().setAllowTF32CuDNN(false);
  at::globalContext().setDeterministicCuDNN(true);

  const auto python = python_with_torch();
  ASSERT_FALSE(python.empty()) << "needs Python's torch for CUDA: set LOCKSTEP_TEST_PYTHON to a python3 that has it";
  std::optional<PythonOracle> python_ranks;  // of rank 0; the other waits until this one joins the group
  if (Environment::detect().rank == 0) python_ranks.emplace(python, kRanks, kGpu);
  on_every_rank(
      "nccl", kRanks,
      [&](ProcessGroup world) {
        auto scenarios = oracle::kScenarios;
        scenarios.insert(scenarios.end(), oracle::kGpuScenarios.begin(), oracle::kGpuScenarios.end());
        for (const auto& scenario : scenarios) {
          const auto values = python_ranks ? c10::IValue(python_ranks->values(scenario.name)) : c10::IValue();
          const auto expected = world.broadcast_object(values, 0).toTensor();
          const auto actual = scenario.run(world, {kGpu, at::kFloat});
          oracle::expect_equal(world, scenario, actual, expected[world.rank()]);
        }
      },
      kGpu);
}

}  // namespace
}  // namespace lockstep
