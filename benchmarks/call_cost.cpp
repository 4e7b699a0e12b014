// What the checks around a call cost, as a part of a training step: call_cost
//
// The cost of a call is what remains when the backend does nothing: arguments, fingerprint, flight recorder, watch. The
// step is one of DistributedDataParallel on the small model of the CPU benchmarks (784-128-128-10, batch 32, SGD) over
// the first backend there is of gloo and threads, two ranks, one thread each. Both in one run, alternating, medians.

#include <algorithm>
#include <chrono>
#include <cstdio>

#include <lockstep/lockstep.h>

namespace {

using Clock = std::chrono::steady_clock;
using lockstep::CallInfo;
using lockstep::Transfer;

class NoBackend final : public lockstep::Backend {
 public:
  at::Tensor allocate(int64_t bytes) override { return at::empty({bytes}, at::kByte); }
  void abort(std::exception_ptr) noexcept override {}
  void all_reduce(const at::Tensor&, lockstep::ReduceOp, const CallInfo&) override {}
  void reduce(const at::Tensor&, lockstep::ReduceOp, int, const CallInfo&) override {}
  void broadcast(const at::Tensor&, int, const CallInfo&) override {}
  void all_gather(const at::Tensor&, const at::Tensor&, const CallInfo&) override {}
  void reduce_scatter(const at::Tensor&, const at::Tensor&, lockstep::ReduceOp, const CallInfo&) override {}
  void all_to_all_v(const std::vector<at::Tensor>&, const std::vector<at::Tensor>&, const CallInfo&) override {}
  void barrier(const CallInfo&) override {}
  std::unique_ptr<Transfer> start_send(const at::Tensor&, int, uint32_t, uint64_t) override { return nullptr; }
  std::unique_ptr<Transfer> start_recv(const at::Tensor&, int, uint32_t, uint64_t) override { return nullptr; }
};

struct NetImpl : torch::nn::Module {
  NetImpl() { register_module("layers", layers); }
  torch::Tensor forward(const torch::Tensor& input) { return layers->forward(input); }

  torch::nn::Sequential layers{torch::nn::Linear(784, 128), torch::nn::ReLU(), torch::nn::Linear(128, 128),
                               torch::nn::ReLU(), torch::nn::Linear(128, 10)};
};
TORCH_MODULE(Net);

template <class Body>
double microseconds(int times, Body body) {
  auto begin = Clock::now();
  for (int i = 0; i < times; ++i) body();
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / times;
}

double percentile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1))];
}

void measure(const lockstep::ProcessGroup& world) {
  auto idle = world.new_group({0, 1}, {.backend = "none"});
  Net net;
  lockstep::DistributedDataParallel ddp(net, world);
  torch::optim::SGD optimizer(ddp.parameters(), 0.05);
  auto input = torch::randn({32, 784});
  auto target = torch::randint(10, {32});
  auto step = [&] {
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(ddp(input), target).backward();
    optimizer.step();
  };
  auto tensor = at::ones({1000});
  microseconds(20, step);
  std::vector<double> calls, steps;
  for (int round = 0; round < 11; ++round) {
    world.barrier();
    calls.push_back(microseconds(2000, [&] { idle.all_reduce(tensor); }));
    world.barrier();
    steps.push_back(microseconds(50, step));
  }
  if (world.rank() != 0) return;
  size_t buckets = ddp.bucket_plan().buckets.size();
  double call = percentile(calls, 0.5);
  double whole = percentile(steps, 0.5);
  std::printf("backend %s, %zu call(s) a step\n", world.backend_name().c_str(), buckets);
  std::printf("a call without its data: %.2f us (%.2f to %.2f)\n", call, percentile(calls, 0.1),
              percentile(calls, 0.9));
  std::printf("a step:                  %.0f us (%.0f to %.0f)\n", whole, percentile(steps, 0.1),
              percentile(steps, 0.9));
  std::printf("the checks' part of it:  %.3f %%\n", 100 * static_cast<double>(buckets) * call / whole);
}

}  // namespace

int main() {
  at::set_num_threads(1);
  lockstep::prefer_fast_convolutions();
  lockstep::register_backend("none", [](const auto&) { return std::make_unique<NoBackend>(); });
  auto available = lockstep::available_backends();
  bool has_gloo = std::find(available.begin(), available.end(), "gloo") != available.end();
  for (std::string backend : {"gloo", "threads"})
    if (backend != "gloo" || has_gloo) lockstep::run_threads(2, measure, {.backend = backend});
}
