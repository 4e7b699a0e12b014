// Training gives the same numbers as Python's DistributedDataParallel on the same machine, option by option.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/run_threads.h>

#include "parallel/oracle_scenarios.h"
#include "parallel/python_oracle.h"

namespace lockstep {
namespace {

TEST(Oracle, TrainingEqualsPythonsDistributedDataParallel) {
  const auto python = python_with_torch();
  if (python.empty()) GTEST_SKIP() << "needs Python's torch: apt-get install python3-torch";
  auto scenarios = oracle::kScenarios;
  scenarios.insert(scenarios.end(), oracle::kCpuScenarios.begin(), oracle::kCpuScenarios.end());
  for (int size : {2, 3, 4}) {
    const PythonOracle python_ranks(python, size, torch::kCPU);
    for (const auto& scenario : scenarios) {
      const auto expected = python_ranks.values(scenario.name);
      run_threads(size, [&](ProcessGroup world) {
        const auto actual = scenario.run(world, {torch::kCPU, at::kDouble});
        oracle::expect_equal(world, scenario, actual, expected[world.rank()]);
      });
    }
  }
}

}  // namespace
}  // namespace lockstep
