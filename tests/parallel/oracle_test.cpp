// Training gives the same numbers as Python's DistributedDataParallel on the same machine, option by option.

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/run_threads.h>

#include "parallel/models.h"
#include "parallel/training.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

constexpr int kSteps = 20;

/// Runs the oracle as `size` processes of Python's torch.distributed and reads what rank 0 ended with.
class PythonOracle {
 public:
  PythonOracle(const std::string& python, int size) {
    const auto script = std::string(LOCKSTEP_TEST_SOURCE_DIR) + "/parallel/ddp_oracle.py";
    std::vector<pid_t> pids;
    for (int rank = 0; rank < size; ++rank) {
      std::vector<std::string> words{python, script, std::to_string(rank), std::to_string(size),
                                     folder_.path().string()};
      std::vector<char*> arguments;
      for (auto& word : words) arguments.push_back(word.data());
      arguments.push_back(nullptr);
      pid_t pid = 0;
      if (::posix_spawnp(&pid, python.c_str(), nullptr, nullptr, arguments.data(), environ) != 0)
        throw std::runtime_error("could not start " + python);
      pids.push_back(pid);
    }
    for (pid_t pid : pids) {
      int status = 0;
      ::waitpid(pid, &status, 0);
      if (status != 0) throw std::runtime_error("the Python oracle failed with status " + std::to_string(status));
    }
  }
  std::vector<double> values(const std::string& scenario) const {
    std::ifstream file(folder_.path() / scenario, std::ios::binary);
    std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
    std::vector<double> result(bytes.size() / sizeof(double));
    std::copy_n(bytes.data(), result.size() * sizeof(double), reinterpret_cast<char*>(result.data()));
    return result;
  }

 private:
  TemporaryFolder folder_;
};

using Named = std::vector<std::pair<std::string, torch::Tensor>>;

Named result_of(const torch::nn::Module& model) {
  Named result;
  for (const auto& item : model.named_parameters()) result.emplace_back(item.key(), item.value());
  for (const auto& item : model.named_buffers())
    if (!item.key().ends_with("num_batches_tracked")) result.emplace_back(item.key(), item.value());
  return result;
}

void zero(const torch::nn::Module& model) {
  for (auto& parameter : model.parameters())
    if (parameter.grad().defined()) parameter.mutable_grad().zero_();
}

torch::Tensor loss_of(const torch::Tensor& output, int step, int rank) {
  return torch::nn::functional::cross_entropy(output, targets_of(step, rank));
}

torch::Tensor image_of(int step, int rank, at::ScalarType dtype = at::kDouble) {
  return inputs_of(step, rank, {1, 6, 6}, dtype);
}

template <class Model>
Model filled(at::ScalarType dtype = at::kDouble) {
  Model model;
  fill_parameters(*model, 1);
  model->to(dtype);
  return model;
}

Named plain(const ProcessGroup& world, const std::string& optimizer_name, at::ScalarType dtype) {
  auto model = filled<ConvNet>(dtype);
  DistributedDataParallel ddp(model, world);
  auto optimizer = make_optimizer(optimizer_name, ddp.parameters());
  for (int step = 0; step < kSteps; ++step) {
    zero(*model);
    loss_of(ddp(image_of(step, world.rank(), dtype)), step, world.rank()).backward();
    optimizer->step();
  }
  return result_of(*model);
}

struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() {
    body = register_module("body", torch::nn::Linear(6, 8));
    left = register_module("left", torch::nn::Linear(8, 4));
    right = register_module("right", torch::nn::Linear(8, 4));
  }
  torch::Tensor forward(torch::Tensor x, bool use_left, bool use_right) {
    x = torch::tanh(body(x));
    auto y = x.narrow(1, 0, 4);
    if (use_left) y = y + left(x);
    if (use_right) y = y + right(x);
    return y;
  }
  torch::nn::Linear body{nullptr}, left{nullptr}, right{nullptr};
};
TORCH_MODULE(TwoHeads);

Named unused(const ProcessGroup& world) {
  auto model = filled<TwoHeads>();
  DistributedDataParallel ddp(model, world, {.find_unused_parameters = true});
  torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    if (step % 4 != 3) zero(*model);  // in the other steps gradients add up
    auto output = ddp(inputs_of(step, world.rank(), {6}, at::kDouble), (step + world.rank()) % 2 == 0, step % 3 == 0);
    loss_of(output, step, world.rank()).backward();
    optimizer.step();
  }
  return result_of(*model);
}

Named no_sync(const ProcessGroup& world) {
  auto model = filled<ConvNet>();
  DistributedDataParallel ddp(model, world);
  torch::optim::SGD optimizer(ddp.parameters(), 0.05);
  for (int step = 0; step < kSteps; ++step) {
    auto train = [&] { loss_of(ddp(image_of(step, world.rank())), step, world.rank()).backward(); };
    if (step % 3 != 2) {
      auto guard = ddp.no_sync();
      train();
    } else {
      train();
      optimizer.step();
      zero(*model);
    }
  }
  return result_of(*model);
}

Named uneven(const ProcessGroup& world, const JoinOptions& options) {
  auto model = filled<ConvNet>();
  DistributedDataParallel ddp(model, world);
  torch::optim::SGD optimizer(ddp.parameters(), 0.05);
  ddp.join(
      [&] {
        for (int step = 0; step < 3 + 2 * ((world.rank() + 1) % world.size()); ++step) {
          zero(*model);
          loss_of(ddp(image_of(step, world.rank())), step, world.rank()).backward();
          optimizer.step();
        }
      },
      options);
  return result_of(*model);
}

struct Scenario {
  std::string name;
  double tolerance;
  std::function<Named(const ProcessGroup&)> run;
};

const std::vector<Scenario> kScenarios{
    {"sgd", 1e-6, [](const ProcessGroup& world) { return plain(world, "momentum", at::kFloat); }},
    {"adam", 1e-10, [](const ProcessGroup& world) { return plain(world, "adam", at::kDouble); }},
    {"unused", 1e-10, unused},
    {"no_sync", 1e-10, no_sync},
    {"join", 1e-10, [](const ProcessGroup& world) { return uneven(world, {}); }},
    {"join_by_current", 1e-10,
     [](const ProcessGroup& world) { return uneven(world, {.divide_by_initial_world_size = false}); }},
};

TEST(Oracle, TrainingEqualsPythonsDistributedDataParallel) {
  const char* python = std::getenv("LOCKSTEP_TEST_PYTHON");
  if (!python || !*python) GTEST_SKIP() << "needs Python's torch: apt-get install python3-torch";
  for (int size : {2, 3, 4}) {
    const PythonOracle oracle(python, size);
    for (const auto& scenario : kScenarios) {
      auto expected = oracle.values(scenario.name);
      run_threads(size, [&](ProcessGroup world) {
        const auto actual = scenario.run(world);
        if (world.rank() != 0) return;
        int64_t at = 0;
        for (const auto& [name, tensor] : actual) {
          ASSERT_LE(at + tensor.numel(), static_cast<int64_t>(expected.size())) << "Python has fewer values";
          auto reference = torch::from_blob(expected.data() + at, {tensor.numel()}, torch::kDouble);
          EXPECT_LE(relative_difference(tensor.flatten(), reference), scenario.tolerance)
              << scenario.name << ", " << size << " ranks, " << name;
          at += tensor.numel();
        }
        EXPECT_EQ(at, static_cast<int64_t>(expected.size())) << "Python has more values";
      });
    }
  }
}

}  // namespace
}  // namespace lockstep
