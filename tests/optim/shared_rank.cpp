// A rank of the tests in shared_parameters_test.cpp and bucket_updates_test.cpp:
//   test_ranks shared_rank killed|memory|sharded_memory|no_address_space

#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iostream>
#include <optional>
#include <thread>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "optim/zero/undo.h"
#include "ranks/test_ranks.h"

namespace {

using lockstep::FusedAdamW;
using lockstep::Overlap;
using lockstep::ProcessGroup;
using lockstep::ZeroRedundancyOptimizer;
using torch::optim::AdamWOptions;

constexpr int64_t kWidth = 1024;

/// Its last layer is reduced and updated before the first one's backward.
torch::nn::Sequential make_model() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(kWidth, kWidth), torch::nn::ReLU(), torch::nn::Linear(kWidth, kWidth),
                               torch::nn::Linear(kWidth, kWidth));
}

int count_differences(const std::vector<torch::Tensor>& parameters, const std::vector<torch::Tensor>& expected) {
  int different = 0;
  for (size_t i = 0; i < parameters.size(); ++i) different += torch::equal(parameters[i], expected[i]) ? 0 : 1;
  return different;
}

/// In the third backward, rank 1 waits until the last layer is updated and kills itself.
void train_until_killed(const ProcessGroup& world) {
  auto model = make_model();
  lockstep::DistributedDataParallel ddp(model, world,
                                        {.buckets = {.first_bytes = kWidth * kWidth, .cap_bytes = kWidth * kWidth}});
  ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, AdamWOptions(0.01),
                                                {.overlap = Overlap::kUpdate, .share_parameters = true});
  lockstep::detail::ZeroUndo::keep_copies(optimizer);
  std::vector<torch::Tensor> before;
  const auto last = ddp.parameters()[4];
  const auto step = [&](bool is_killed) {
    auto hidden = model->ptr(0)->as<torch::nn::Linear>()->forward(torch::ones({2, kWidth}) * (1 + world.rank()));
    if (is_killed && world.rank() == 1)
      hidden.register_hook([&](const torch::Tensor&) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
        while (torch::equal(last, before[4]) && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
        std::raise(SIGKILL);
      });
    auto output = model->ptr(3)->as<torch::nn::Linear>()->forward(
        model->ptr(2)->as<torch::nn::Linear>()->forward(torch::relu(hidden)));
    output.square().mean().backward();
    optimizer.step();
  };
  step(false);
  step(false);
  for (const auto& parameter : ddp.parameters()) before.push_back(parameter.detach().clone());
  world.barrier();
  try {
    step(true);
  } catch (const lockstep::PeerError&) {
    std::cout << "failed: PeerError, parameters differ: " << (count_differences(ddp.parameters(), before) > 0)
              << std::endl;
  }
  lockstep::detail::ZeroUndo::undo_step(optimizer);
  std::cout << "undone: parameters differ: " << count_differences(ddp.parameters(), before) << std::endl;
}

/// This process's part of the memory that it uses, shared pages divided by the number of their users. Without pages of
/// files: processes of other tests use the same libraries.
double pss_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  double sum = 0;
  for (std::string word; file >> word;) {
    if (word != "Pss_Anon:" && word != "Pss_Shmem:") continue;
    double kib = 0;
    file >> kib;
    sum += kib * 1024;
  }
  return sum;
}

void measure_memory(const ProcessGroup& world) {
  const int64_t elements = 16 << 20;
  const auto parameter = torch::full({elements}, 1.0).requires_grad_();
  lockstep::DistributedDataParallel ddp(
      {{"parameter", parameter}}, [&] { return parameter.sum(); }, world);
  const double size = static_cast<double>(elements) * 4;
  world.barrier();
  std::cout << "before: " << pss_bytes() / size << std::endl;
  world.barrier();
  ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, AdamWOptions(0.01),
                                                {.overlap = Overlap::kUpdate, .share_parameters = true});
  world.barrier();
  std::cout << "after: " << pss_bytes() / size << std::endl;
  world.barrier();
}

/// Measures in the third backward, before the last bucket is reduced.
void measure_sharded_memory(const ProcessGroup& world) {
  constexpr int64_t kParameters = 8, kElements = 4 << 20;
  const double size = 4.0 * kParameters * kElements;
  ::mallopt(M_MMAP_THRESHOLD, 1 << 20);  // freed tensors do not stay in the heap
  const double before = pss_bytes();
  lockstep::NamedTensors parameters;
  for (int64_t i = 0; i < kParameters; ++i)
    parameters.push_back({"parameter" + std::to_string(i), torch::full({kElements}, 1.0).requires_grad_()});
  const auto forward = [&] {
    auto sum = torch::zeros({});
    for (const auto& [name, parameter] : parameters) sum = sum * (parameter * 0.5).mean();  // the last one comes first
    return sum + 1;
  };
  lockstep::DistributedDataParallel ddp(parameters, forward, world,
                                        {.buckets = {.first_bytes = 1 << 20, .cap_bytes = 1 << 20}});
  ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, AdamWOptions(0.01), {.overlap = Overlap::kUpdate});
  for (int step = 0; step < 3; ++step) {
    if (step == 2)
      parameters[0].second.register_hook(
          [&](const torch::Tensor&) { std::cout << "used: " << (pss_bytes() - before) / size << std::endl; });
    ddp().backward();
    optimizer.step();
  }
}

/// Rank 1 cannot map more than 1 GiB in addition to what it has, as under `ulimit -v`.
void share_without_address_space() {
  if (std::getenv("RANK") == std::string("1")) {
    rlim_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlim_t bytes = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + (rlim_t{1} << 30);
    const rlimit little{bytes, bytes};
    ::setrlimit(RLIMIT_AS, &little);
  }
  std::optional<ProcessGroup> world;  // outlives the error: the other rank may not know it yet
  try {
    world = lockstep::init_process_group({.timeout = std::chrono::minutes(2)});  // with Gloo, if it is built
    const std::vector<torch::Tensor> parameters{torch::ones({3}, torch::requires_grad())};
    ZeroRedundancyOptimizer<FusedAdamW>(parameters, *world, AdamWOptions(), {.share_parameters = true});
  } catch (const lockstep::Error& error) {  // the other rank's, if that one has left already
    std::cout << "refused: " << error.what() << std::endl;
  }
}

}  // namespace

int run_shared_rank(const std::vector<std::string>& arguments) {
  const auto& scenario = arguments.at(0);
  at::set_num_threads(1);
  if (scenario == "no_address_space") return share_without_address_space(), 0;
  const auto world = lockstep::init_process_group({.backend = "shm", .timeout = std::chrono::minutes(2)});
  if (scenario == "killed")
    train_until_killed(world);
  else if (scenario == "sharded_memory")
    measure_sharded_memory(world);
  else
    measure_memory(world);
  return 0;
}
