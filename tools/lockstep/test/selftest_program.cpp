// lockstep-selftest: one rank of `lockstep test`. With --list it prints the backends of this build, one per line, each
// with the kind of its ranks: "processes", "threads" of one process, or processes started by "mpirun".
//
// A rank checks an all-reduce and data-parallel training. It exits with 0, or prints the error in one line to stderr.

#include <charconv>
#include <cstring>
#include <iostream>
#include <string>

#include <ATen/ATen.h>
#include <torch/cuda.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/process_group.h>
#include <lockstep/run_threads.h>
#include <lockstep/version.h>

namespace {

using lockstep::ProcessGroup;
using std::chrono::milliseconds;

constexpr const char* kThreads = "threads";  // ranks share one process
constexpr const char* kMpi = "mpi";          // ranks are started by mpirun
constexpr const char* kNccl = "nccl";
constexpr int kSteps = 5;
constexpr int64_t kBatch = 4;  // per rank
constexpr double kTolerance = 1e-5;

[[noreturn]] void fail_check(const std::string& what) {
  throw lockstep::Error(
      what +
      ". lockstep, LibTorch or this machine computes wrong results: report this with the output of `lockstep env`");
}

// --- an all-reduce

/// Integers, so that float sums are exact in any order.
void check_all_reduce(const ProcessGroup& world, int64_t elements) {
  const auto base = at::arange(elements, at::kLong).remainder(1000).to(at::kFloat).to(world.device());
  auto tensor = base + static_cast<float>(world.rank() + 1);
  world.all_reduce(tensor);
  const auto expected = base * world.size() + static_cast<float>(world.size() * (world.size() + 1) / 2);
  if (at::equal(tensor, expected)) return;
  const auto wrong = (tensor != expected).nonzero()[0].item<int64_t>();
  fail_check(c10::str("rank ", world.rank(), ": all_reduce of ", elements, " floats: element ", wrong, " is ",
                      tensor[wrong].item<float>(), ", expected ", expected[wrong].item<float>()));
}

// --- a training

/// Values without a random generator, which ranks that are threads would share.
at::Tensor deterministic_values(at::IntArrayRef sizes, double phase) {
  const auto count = c10::multiply_integers(sizes);
  return at::arange(count, at::kFloat).mul(0.7).add(phase).sin().mul(0.5).view(sizes);
}

struct Net : torch::nn::Module {
  Net(double phase, at::Device device) {
    c10::NoGradGuard no_gradients;
    for (auto& parameter : parameters()) parameter.copy_(deterministic_values(parameter.sizes(), phase));
    to(device);
  }
  at::Tensor forward(const at::Tensor& input) { return output->forward(at::tanh(hidden->forward(input))); }

  torch::nn::Linear hidden{register_module("hidden", torch::nn::Linear(8, 32))};
  torch::nn::Linear output{register_module("output", torch::nn::Linear(32, 4))};
};

/// Trains and returns all parameters, concatenated.
template <class Model>
at::Tensor train(Model&& forward, const std::vector<at::Tensor>& parameters, const at::Tensor& inputs,
                 const at::Tensor& targets) {
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    at::mse_loss(forward(inputs), targets).backward();
    optimizer.step();
  }
  std::vector<at::Tensor> flat;
  for (const auto& parameter : parameters) flat.push_back(parameter.detach().flatten());
  return at::cat(flat);
}

void check_equal_on_all(const ProcessGroup& world, const at::Tensor& own) {
  auto all = at::empty({world.size(), own.numel()}, own.options());
  world.all_gather(all, own);
  for (int rank = 1; rank < world.size(); ++rank)
    if (!at::equal(all[0], all[rank]))
      fail_check(c10::str("after ", kSteps, " steps of DistributedDataParallel the parameters of rank ", rank,
                          " differ from those of rank 0 by up to ", (all[0] - all[rank]).abs().max().item<float>()));
}

/// Ranks start with different parameters and train on different samples. The result must equal that of one process on
/// the whole batch.
void check_training(const ProcessGroup& world) {
  const auto device = world.device();
  const auto inputs = deterministic_values({kBatch * world.size(), 8}, 0.3).to(device);
  const auto targets = deterministic_values({kBatch * world.size(), 4}, 1.1).to(device);
  const auto part = [&](const at::Tensor& whole) { return whole.narrow(0, kBatch * world.rank(), kBatch); };

  lockstep::DistributedDataParallel ddp(std::make_shared<Net>(world.rank(), device), world);
  const auto together =
      train([&](const auto& input) { return ddp(input); }, ddp.parameters(), part(inputs), part(targets));
  check_equal_on_all(world, together);

  Net one(0, device);
  const auto alone = train([&](const auto& input) { return one.forward(input); }, one.parameters(), inputs, targets);
  const double difference = ((together - alone).norm() / alone.norm()).item<double>();
  if (!(difference <= kTolerance))
    fail_check(c10::str(
        "rank ", world.rank(), ": after ", kSteps, " steps of DistributedDataParallel the parameters differ by ",
        difference, ", relative, from those of one process on the whole batch; at most ", kTolerance, " is expected"));
}

void check(const ProcessGroup& world) {
  check_all_reduce(world, 10);
  check_all_reduce(world, 100'000);  // large enough to be sent in pieces
  check_training(world);
  world.barrier();
}

// --- the program

/// nccl needs a GPU per rank, so it can only be tested with at least two GPUs.
void list_backends() {
  for (const auto& name : lockstep::available_backends())
    if (name != kNccl || torch::cuda::device_count() > 1)
      std::cout << name << ' ' << (name == kThreads ? "threads" : name == kMpi ? "mpirun" : "processes") << '\n';
}

int to_number(const char* text) {
  int number = 0;
  const auto result = std::from_chars(text, text + std::strlen(text), number);
  if (result.ec != std::errc() || *result.ptr != '\0' || number < 1)
    throw lockstep::UsageError(c10::str("\"", text, "\" is not a number above 0"));
  return number;
}

/// The message of an exception without the backtrace that LibTorch appends.
std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
    list_backends();
    return 0;
  }
  if (argc != 4) throw lockstep::UsageError("usage: lockstep-selftest --list | BACKEND RANKS TIMEOUT_MS");
  const std::string backend = argv[1];
  const int ranks = to_number(argv[2]);
  const milliseconds timeout(to_number(argv[3]));
  if (backend == kThreads)
    lockstep::run_threads(ranks, check, {.backend = backend, .timeout = timeout});
  else
    check(lockstep::init_process_group({.backend = backend, .timeout = timeout}));
  return 0;
} catch (const std::exception& error) {
  // In one write: mpirun interleaves the output of ranks.
  std::cerr << "lockstep-selftest: " + first_line(error.what()) + "\n";
  return 1;
}
