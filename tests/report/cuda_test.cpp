// Metrics of values on a GPU, with ranks as processes that share one GPU.

#include <cmath>
#include <fstream>

#include <ATen/cuda/CUDAContext.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <lockstep/captured_step.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/training_run.h>

#include "parallel/gpu.h"
#include "report/event_records.h"
#include "report/records.h"
#include "support/messages.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using torch::Tensor;

class CudaReport : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "this machine has no GPU";
  }
  void on_both(const std::function<void(ProcessGroup, const std::string& folder)>& body) {
    on_every_rank(
        "auto", 2,
        [&](ProcessGroup world) {
          const TemporaryFolder own;
          body(world, world.broadcast_object(own.path().string(), 0).toStringRef());
          world.barrier();
        },
        kGpu);
  }
};

/// Logs the values in all ways, and returns the metrics of the epoch.
std::map<std::string, double> log_all(MetricLog& log, const std::vector<Tensor>& values, int rank) {
  for (size_t i = 0; i < values.size(); ++i) {
    log.log("mean", values[i], {.weight = 1.0 + static_cast<double>(i % 3) + rank});
    log.log("sum", values[i], {.reduce = MetricReduction::kSum});
    log.log("min", values[i], {.reduce = MetricReduction::kMin});
    log.log("max", values[i], {.reduce = MetricReduction::kMax});
    log.log("last", values[i], {.reduce = MetricReduction::kLast});
    log.end_step();
    log.flush();
  }
  return log.end_epoch();
}

TEST_F(CudaReport, ValuesOnAGpuGiveTheResultsOfValuesOnTheHost) {
  on_both([](const ProcessGroup& world, const std::string& folder) {
    std::vector<Tensor> on_host, on_gpu;
    for (int i = 0; i < 23; ++i) {
      on_host.push_back(torch::tensor(std::sin(5.0 * i + world.rank()), torch::kFloat));
      on_gpu.push_back(on_host.back().to(kGpu));
    }
    MetricLog host(world, folder + "/host", {.every = 4}), gpu(world, folder + "/gpu", {.every = 4});
    const auto expected = log_all(host, on_host, world.rank()), actual = log_all(gpu, on_gpu, world.rank());
    ASSERT_EQ(actual.size(), 5);
    for (const auto& [name, value] : expected) EXPECT_NEAR(actual.at(name), value, 1e-12) << name;
    if (world.rank() != 0) return;
    const auto records = records_of(folder + "/gpu"), all = records_of(folder + "/host");
    ASSERT_EQ(records.size(), all.size());
    for (size_t i = 0; i < all.size(); ++i)
      for (const char* name : {"mean", "sum", "min", "max", "last"})
        EXPECT_NEAR(records[i].at(name), all[i].at(name), 1e-12) << i << name;
  });
}

TEST_F(CudaReport, LoggingDoesNotMakeTheHostWait) {
  on_both([](const ProcessGroup& world, const std::string& folder) {
    const auto loss = torch::ones({}, kGpu), big = torch::rand({2048, 2048}, kGpu);
    TrainingRun run(world, folder, TrainingState{}, {.metrics = {.every = 3}});
    auto step = [&] {
      run.step([&] {
        big.mm(big);
        run.log("loss", loss);
        run.log("most", loss, MetricReduction::kMax);
      });
    };
    while (run.next_epoch(1)) {
      for (int i = 0; i < 10; ++i) step();
      const NoWaiting guard;
      for (int i = 0; i < 200; ++i) step();
    }
    EXPECT_EQ(run.results().at("loss"), 1);
  });
}

TEST_F(CudaReport, StopsAllRanksAtAValueThatIsNotFinite) {
  for (const int64_t every : {1, 4, 0})
    on_both([&](const ProcessGroup& world, const std::string& folder) {
      SCOPED_TRACE(testing::Message() << "a record for every " << every << " steps");
      TrainingRun run(world, folder, TrainingState{},
                      {.save_every_steps = 1, .stop_on_nan = true, .metrics = {.every = every}});
      run.next_epoch(1);
      const auto step = [&] {
        run.step([&] {
          run.log("loss", torch::full({}, run.steps() == 4 && world.rank() == 1 ? NAN : 1, kGpu));
          run.log("least", torch::ones({}, kGpu), MetricReduction::kMin);
          run.log("empty", torch::full({}, NAN, kGpu), 0);
        });
      };
      for (int i = 0; i < 4; ++i) step();
      expect_error<Error>(step, "metric 'loss' in step 5 on rank 1", "stop_on_nan");
      if (world.rank() == 0) {
        EXPECT_EQ(run.checkpoints().numbers(), (std::vector<int64_t>{2, 3, 4}));
      }
    });
}

TEST_F(CudaReport, LiveFilesHaveTheFiguresOfTheGpu) {
  on_both([](const ProcessGroup& world, const std::string& folder) {
    constexpr int64_t kBytes = int64_t{1} << 30;
    const auto held = torch::zeros({kBytes}, torch::device(kGpu).dtype(torch::kByte));
    torch::cuda::synchronize();
    {
      TrainingRun run(world, folder, TrainingState{}, {.metrics = {.every = 1}});
      while (run.next_epoch(1))
        for (int i = 0; i < 3; ++i) run.step([] {});
    }
    std::ifstream file(folder + "/live/rank-0000" + std::to_string(world.rank()) + ".json");
    const auto gpu = nlohmann::json::parse(file).at("gpu");
    ASSERT_TRUE(gpu.is_object()) << gpu;
    EXPECT_EQ(gpu.at("name").get<std::string>(), at::cuda::getDeviceProperties(kGpu.index())->name);
    EXPECT_GE(gpu.at("utilization").get<double>(), 0);
    EXPECT_LE(gpu.at("utilization").get<double>(), 1);
    EXPECT_GE(gpu.at("memory_used_bytes").get<int64_t>(), kBytes);
    EXPECT_GE(gpu.at("memory_total_bytes").get<int64_t>(), gpu.at("memory_used_bytes").get<int64_t>());
  });
}

TEST_F(CudaReport, TheResultOfACapturedStepIsLogged) {
  on_both([](const ProcessGroup& world, const std::string& folder) {
    torch::manual_seed(1);
    torch::nn::Linear net(4, 2);
    net->to(kGpu);
    DistributedDataParallel ddp(net, world);
    FusedSGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.05));
    CapturedStep captured(world, [&](const Tensor& input) {
      optimizer.zero_grad();
      auto loss = ddp(input).square().mean();
      loss.backward();
      optimizer.step();
      return loss;
    });
    TrainingRun run(world, folder, TrainingState{}.add("model", net), {.metrics = {.every = 1}});
    std::vector<double> losses;
    while (run.next_epoch(1))
      for (int i = 0; i < 12; ++i) {
        const auto loss = run.step([&] {
          auto result = captured(torch::full({3, 4}, 1.0 + i + world.rank(), kGpu));
          run.log("loss", result);
          return result;
        });
        auto mean = loss.detach().cpu().to(torch::kDouble);
        losses.push_back(mean.item<double>());
      }
    EXPECT_TRUE(captured.is_captured());
    const auto all = world.all_gather_object(torch::tensor(losses, torch::kDouble));
    const auto means = (all[0].toTensor() + all[1].toTensor()) / 2;
    EXPECT_NEAR(run.results().at("loss"), means.mean().item<double>(), 1e-6 * means.mean().item<double>());
    if (world.rank() != 0) return;
    const auto records = records_of(folder, "step");
    ASSERT_EQ(records.size(), 12);
    for (size_t i = 0; i < 12; ++i)
      EXPECT_NEAR(records[i].at("loss"), means[static_cast<int64_t>(i)].item<double>(),
                  1e-6 * std::abs(losses[i]) + 1e-9);
  });
}

TEST_F(CudaReport, HistogramsAndImagesAreThoseOfTheHost) {
  on_both([](const ProcessGroup& world, const std::string&) {
    if (world.rank() != 0) return;
    const auto values = torch::randint(-64, 65, {3, 20, 30}, kGpu) / 64;  // sums are exact in any order
    auto records_for = [&](const Tensor& tensor) {
      const TemporaryFolder folder;
      TensorBoardWriter writer(folder.path());
      writer.histogram("values", tensor, 1);
      writer.image("image", tensor.clamp(0, 1), 1);
      std::vector<std::map<int, std::string>> records;
      for (const auto& message : event_files::records_in(writer.path())) {
        records.push_back(event_files::Fields(message).texts);
        records.back().erase(1);  // the time
      }
      return records;
    };
    const auto on_gpu = records_for(values);
    EXPECT_GE(on_gpu.size(), 3);
    EXPECT_EQ(on_gpu, records_for(values.cpu()));
  });
}

TEST_F(CudaReport, AValueInsideOfACapturedStepIsRefused) {
  on_both([](const ProcessGroup& world, const std::string& folder) {
    MetricLog log(world, folder);
    CapturedStep captured(world, [&] {
      log.log("loss", torch::ones({}, kGpu));
      log.end_step();
    });
    for (int i = 0; i < 3; ++i) captured();
    expect_error<UsageError>([&] { captured(); }, "'loss' is logged while a step is captured", "log the result");
  });
}

}  // namespace
}  // namespace lockstep
