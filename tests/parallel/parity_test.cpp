// Training on several ranks equals one process on the concatenated batch, and Python's DistributedDataParallel.

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <mutex>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/run_threads.h>

#include "parallel/models.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

constexpr int kSteps = 8;
constexpr int kBatch = 5;  // of one rank

torch::Tensor inputs_of(int step, int rank, at::IntArrayRef sample, at::ScalarType dtype) {
  auto generator = at::detail::createCPUGenerator(1000 + 10 * step + rank);
  std::vector<int64_t> sizes{kBatch};
  sizes.insert(sizes.end(), sample.begin(), sample.end());
  return torch::randn(sizes, generator, torch::kDouble).to(dtype);
}

torch::Tensor targets_of(int step, int rank) {
  auto generator = at::detail::createCPUGenerator(5000 + 10 * step + rank);
  return torch::randint(0, 4, {kBatch}, generator, torch::kLong);
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                        std::vector<torch::Tensor> parameters) {
  if (name == "adam") return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.01));
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
}

template <class Forward>
void train(Forward&& forward, torch::optim::Optimizer& optimizer,
           const std::function<std::pair<torch::Tensor, torch::Tensor>(int)>& batch) {
  for (int step = 0; step < kSteps; ++step) {
    auto [data, target] = batch(step);
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(forward(data), target).backward();
    optimizer.step();
  }
}

struct Setting {
  std::string optimizer;
  at::ScalarType dtype;
  double tolerance;
};

const std::vector<Setting> kSettings{{"sgd", at::kFloat, 1e-6}, {"adam", at::kDouble, 1e-10}};

TEST(Parity, EqualsOneProcessOnTheConcatenatedBatch) {
  for (const auto& [name, dtype, tolerance] : kSettings) {
    for (int size : {2, 3, 4}) {
      Mlp alone;
      fill_parameters(*alone, 1);
      alone->to(dtype);
      auto optimizer = make_optimizer(name, alone->parameters());
      train([&](torch::Tensor x) { return alone(x); }, *optimizer,
            [&](int step) {
              std::vector<torch::Tensor> data, targets;
              for (int rank = 0; rank < size; ++rank) {
                data.push_back(inputs_of(step, rank, {6}, dtype));
                targets.push_back(targets_of(step, rank));
              }
              return std::pair(torch::cat(data), torch::cat(targets));
            });

      for (const auto& backend : backends_under_test()) {
        run_threads(size,
                    [&](ProcessGroup world) {
                      Mlp model;
                      fill_parameters(*model, 1 + world.rank());  // different ones: wrapping must take rank 0's
                      model->to(dtype);
                      // Buckets of about one parameter each, so that several reductions overlap backward.
                      DistributedDataParallel ddp(model, world, {.buckets = {.first_bytes = 64, .cap_bytes = 512}});
                      EXPECT_GE(ddp.bucket_plan().buckets.size(), 3u);
                      auto mine = make_optimizer(name, ddp.parameters());
                      train([&](torch::Tensor x) { return ddp(x); }, *mine,
                            [&](int step) {
                              return std::pair(inputs_of(step, world.rank(), {6}, dtype),
                                               targets_of(step, world.rank()));
                            });
                      auto expected = alone->parameters();
                      auto actual = ddp.parameters();
                      for (size_t i = 0; i < expected.size(); ++i)
                        EXPECT_LE(relative_difference(actual[i], expected[i]), tolerance)
                            << backend << ", " << name << ", " << size << " ranks, parameter " << i;
                    },
                    {.backend = backend});
      }
    }
  }
}

/// Runs the oracle as `size` processes of Python's torch.distributed and reads what rank 0 ended with.
class PythonOracle {
 public:
  PythonOracle(const std::string& python, int size, const Setting& setting) {
    std::string script = LOCKSTEP_TEST_SOURCE_DIR "/parallel/ddp_oracle.py";
    std::vector<pid_t> pids;
    for (int rank = 0; rank < size; ++rank) {
      std::vector<std::string> words{python,
                                     script,
                                     std::to_string(rank),
                                     std::to_string(size),
                                     setting.optimizer,
                                     setting.dtype == at::kDouble ? "float64" : "float32",
                                     folder_.path().string()};
      std::vector<char*> arguments;
      for (auto& word : words) arguments.push_back(word.data());
      arguments.push_back(nullptr);
      pid_t pid = 0;
      int failed = ::posix_spawnp(&pid, python.c_str(), nullptr, nullptr, arguments.data(), environ);
      if (failed) throw std::runtime_error("could not start " + python);
      pids.push_back(pid);
    }
    for (pid_t pid : pids) {
      int status = 0;
      ::waitpid(pid, &status, 0);
      if (status != 0) throw std::runtime_error("the Python oracle failed with status " + std::to_string(status));
    }
  }
  std::vector<double> values() const {
    std::ifstream file(folder_.path() / "result", std::ios::binary);
    std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
    std::vector<double> result(bytes.size() / sizeof(double));
    std::copy_n(bytes.data(), result.size() * sizeof(double), reinterpret_cast<char*>(result.data()));
    return result;
  }

 private:
  TemporaryFolder folder_;
};

TEST(Parity, EqualsPythonsDistributedDataParallel) {
  const char* python = std::getenv("LOCKSTEP_TEST_PYTHON");
  if (!python || !*python) GTEST_SKIP() << "needs Python's torch: apt-get install python3-torch";
  for (const auto& setting : kSettings) {
    for (int size : {2, 3, 4}) {
      auto expected = PythonOracle(python, size, setting).values();
      run_threads(size, [&](ProcessGroup world) {
        ConvNet model;
        fill_parameters(*model, 1);
        model->to(setting.dtype);
        DistributedDataParallel ddp(model, world);
        auto optimizer = make_optimizer(setting.optimizer, ddp.parameters());
        train(
            [&](torch::Tensor x) { return ddp(x); }, *optimizer,
            [&](int step) {
              return std::pair(inputs_of(step, world.rank(), {1, 6, 6}, setting.dtype), targets_of(step, world.rank()));
            });
        if (world.rank() != 0) return;
        size_t at = 0;
        auto compare = [&](const std::string& name, const torch::Tensor& actual) {
          ASSERT_LE(at + actual.numel(), expected.size()) << "Python has fewer values";
          auto reference = torch::from_blob(expected.data() + at, {actual.numel()}, torch::kDouble);
          EXPECT_LE(relative_difference(actual.flatten(), reference), setting.tolerance)
              << setting.optimizer << ", " << size << " ranks, " << name;
          at += actual.numel();
        };
        for (const auto& item : model->named_parameters()) compare(item.key(), item.value());
        compare("running mean", model->norm->running_mean);
        compare("running variance", model->norm->running_var);
        EXPECT_EQ(at, expected.size()) << "Python has more values";
      });
    }
  }
}

}  // namespace
}  // namespace lockstep
