// A rank of the tests in failures_test.cpp: failing_rank SCENARIO. It prints what it comes to, one line each, and ends
// with the error it was given: "PeerError: ..." and exit code 3, or "done" and 0.

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include <ATen/ATen.h>

#include <lockstep/lockstep.h>

#include "comm/failing_rank.h"
#include "comm/forking_rank.h"
#include "comm/mixed_calls.h"
#include "comm/setup/backend_choice.h"
#include "comm/shm_rank.h"

namespace {

using lockstep::ProcessGroup;
using lockstep::ProcessGroupOptions;
using std::chrono::milliseconds;

void print(const std::string& line) {
  std::cout << line + "\n" << std::flush;
}

void wait_for_word() {
  std::string word;
  std::getline(std::cin, word);
}

int number(const char* variable, int otherwise) {
  const char* value = std::getenv(variable);
  return value ? std::atoi(value) : otherwise;
}

ProcessGroupOptions options() {
  ProcessGroupOptions result;
  if (const char* backend = std::getenv("TEST_BACKEND")) result.backend = backend;
  if (result.backend == "nccl") {  // ranks that share a GPU, for which NCCL must believe that each has its own host
    result.device = at::Device(at::kCUDA, 0);
    if (number("TEST_ONE_HOST", 0) == 0) ::setenv("NCCL_HOSTID", std::getenv("RANK"), 1);
    ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  }
  result.timeout = milliseconds(number("TEST_TIMEOUT_MS", 60000));
  result.heartbeat_limit = milliseconds(number("TEST_HEARTBEAT_MS", 5000));
  return result;
}

ProcessGroup join() {
  auto world = lockstep::init_process_group(options());
  print("joined");
  return world;
}

void reduce_for_ever(const ProcessGroup& world, int64_t elements) {
  auto tensor = at::ones({elements}, world.device());
  auto begin = std::chrono::steady_clock::now();
  for (bool is_known = false;;) {
    world.all_reduce(tensor, lockstep::ReduceOp::kAvg);
    if (tensor.is_cuda()) world.synchronize();
    // By then the others have heard what this rank does.
    if (is_known || std::chrono::steady_clock::now() - begin < milliseconds(700)) continue;
    print("running");
    is_known = true;
  }
}

void small_calls() {
  reduce_for_ever(join(), 8);
}

void large_calls() {
  reduce_for_ever(join(), 32 << 20);
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

void mixed_calls() {
  auto world = join();
  const int calls = number("TEST_CALLS", 1000);
  int64_t early = 0;
  {
    MixedCalls mixed(world);
    for (int call = 0; call < calls; ++call) {
      if (call == 200) print("running");
      if (call == calls / 2) early = resident_bytes();
      mixed.make_one();
    }
  }
  int64_t grown = resident_bytes() - early;
  if (grown > 16 << 20) throw std::runtime_error("grown by " + std::to_string(grown) + " bytes");
}

/// A stream without end.
class EndlessStream {
 public:
  EndlessStream() { ++count_; }
  EndlessStream(const EndlessStream& other) : next_(other.next_) { ++count_; }
  ~EndlessStream() { --count_; }

  std::optional<at::Tensor> next() { return at::full({4}, next_++, at::kLong); }
  static int count() { return count_; }

 private:
  static inline std::atomic<int> count_{0};
  int64_t next_ = 0;
};

/// Reads streams on two workers. The loop of the loader makes the only calls. Prints how many streams are left when the
/// loader is gone: they belong to its workers.
void reads_a_stream() {
  auto world = join();
  try {
    const auto open = [](const lockstep::StreamPart&) { return EndlessStream(); };
    lockstep::StreamLoader loader(open, world, {.batch_size = 8, .num_workers = 2});
    int64_t batches = 0;
    for ([[maybe_unused]] auto& batch : loader)
      if (++batches == 100) print("running");
  } catch (...) {
    print("left " + std::to_string(EndlessStream::count()));
    throw;
  }
}

// Makes its next call when it is told to.
void waits_between_calls() {
  auto world = join();
  world.barrier();
  print("idle");
  wait_for_word();
  world.barrier();
}

void messages() {
  auto world = join();
  world.barrier();
  print("running");
  auto tensor = at::ones({4}, world.device());
  int peer = (world.rank() + 1) % world.size();
  world.recv(tensor, peer);  // nobody sends
}

struct ModelImpl : torch::nn::Module {
  ModelImpl()
      : net(register_module(
            "net", torch::nn::Sequential(torch::nn::Linear(256, 1024), torch::nn::ReLU(), torch::nn::Linear(1024, 1024),
                                         torch::nn::ReLU(), torch::nn::Linear(1024, 10)))) {}
  torch::Tensor forward(torch::Tensor input) { return net->forward(input); }
  torch::nn::Sequential net;
};
TORCH_MODULE(Model);

/// Forward, backward with its reductions, and a step, over and over: step(inputs, targets).
template <class Step>
void train(const ProcessGroup& world, int known_after, const Step& step) {
  for (int i = 0;; ++i) {
    if (i == known_after) {
      world.synchronize();
      print("running");
    }
    step(torch::randn({64, 256}, world.device()),
         torch::randint(10, {64}, at::TensorOptions(at::kLong).device(world.device())));
  }
}

void training() {
  auto world = join();
  Model model;
  model->to(world.device());
  lockstep::DistributedDataParallel ddp(model, world);
  torch::optim::SGD optimizer(ddp.parameters(), 0.01);
  train(world, 3, [&](const torch::Tensor& inputs, const torch::Tensor& targets) {
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(ddp(inputs), targets).backward();
    optimizer.step();
  });
}

// With an optimizer that is divided between the ranks and, on a GPU, as a graph.
void captured_training() {
  auto world = join();
  Model model;
  model->to(world.device());
  lockstep::DistributedDataParallel ddp(model, world);
  lockstep::ZeroRedundancyOptimizer<lockstep::FusedAdamW> optimizer(ddp.parameters(), world,
                                                                    torch::optim::AdamWOptions(1e-3));
  lockstep::CapturedStep step(world, [&](const torch::Tensor& inputs, const torch::Tensor& targets) {
    optimizer.zero_grad();
    auto loss = torch::nn::functional::cross_entropy(ddp(inputs), targets);
    loss.backward();
    optimizer.step();
    return loss;
  });
  train(world, 6, [&](const torch::Tensor& inputs, const torch::Tensor& targets) { step(inputs, targets); });
}

void sums() {
  auto world = join();
  auto tensor = at::full({100000}, world.rank() + 1.0);
  world.all_reduce(tensor);
  if (!at::equal(tensor, at::full_like(tensor, tensor[0].item()))) throw std::runtime_error("wrong");
  print("rank " + std::to_string(world.rank()) + " of " + std::to_string(world.size()) + ": sum " +
        std::to_string(tensor[0].item<int>()));
}

void reduce(const ProcessGroup& world, const std::string& name) {
  auto tensor = at::full({1000}, world.rank() + 1.0);
  for (int call = 0; call < 5; ++call) world.all_reduce(tensor, lockstep::ReduceOp::kAvg);
  print(name + ": mean " + std::to_string(tensor[999].item<float>()).substr(0, 3));
}

void joins_again() {
  for (int join = 1; join <= 4; ++join) {
    auto world = lockstep::init_process_group(options());
    reduce(world, "join " + std::to_string(join));
    world.destroy();
  }
}

// Rank 1 leaves the first group when all are in the second, and the others make more calls there than in the first.
void leaves_late() {
  auto first = lockstep::init_process_group(options());
  first.barrier();
  if (first.rank() == 0) first.destroy();
  auto second = lockstep::init_process_group(options());
  if (second.rank() == 1) first.destroy();
  second.monitored_barrier();  // by way of the store: rank 0 has heard of it
  reduce(second, "second");
}

// The first group breaks, in a call to which rank 1 does not come.
void breaks_and_joins_again() {
  auto first = lockstep::init_process_group(options());
  try {
    if (first.rank() == 0) first.all_reduce(at::ones({1}), lockstep::ReduceOp::kSum, {.timeout = milliseconds(300)});
    for (;;) try {
        first.monitored_barrier({.timeout = milliseconds(50)});
      } catch (const lockstep::TimeoutError& error) {
        if (std::string(error.what()).find("broken") != std::string::npos) throw;
      }
  } catch (const lockstep::TimeoutError& error) {
    print(std::string("first: ") + error.what());
  }
  first.destroy();
  auto second = lockstep::init_process_group(options());
  reduce(second, "second");
  second.barrier();
  if (second.rank() == 1) throw std::runtime_error("out of luck");
  second.barrier();
}

void dies_between_two_joins() {
  join().destroy();
  if (number("RANK", 0) == 1) ::raise(SIGKILL);
  ::signal(SIGTERM, SIG_IGN);  // it comes when this rank has been told, and before it has said so
  join();
}

void joins_once_too_few() {
  join().destroy();
  if (number("RANK", 0) == 1) ::pause();
  join();
}

// Rank 0 keeps its group, and with it the store.
void joins_again_without_rank_zero() {
  auto world = join();
  if (world.rank() == 0) return wait_for_word();
  world.destroy();
  join();
}

void joins_only() {
  auto world = join();
}

// Rank 1 throws when it is told to, and its group is destroyed on the way.
void throws() {
  auto world = join();
  world.barrier();
  print("running");
  if (world.rank() == 1) {
    wait_for_word();
    throw std::runtime_error("out of luck");
  }
  world.barrier();
}

void exits_early() {
  auto world = join();
  world.barrier();
  print("running");
  if (world.rank() == 1) {
    wait_for_word();
    std::exit(0);
  }
  world.barrier();
}

void returns_early() {
  auto world = join();
  world.barrier();
  print("running");
  if (world.rank() == 1) return wait_for_word();
  if (world.rank() == number("TEST_LATE_RANK", -1)) wait_for_word();
  world.barrier();
}

// The others still receive what the first to leave has sent.
void leaves_after_its_part() {
  auto world = join();
  auto tensor = at::full({1}, world.rank() + 1.0);
  std::vector<at::Tensor> all;
  if (world.rank() == 0)
    for (int r = 0; r < world.size(); ++r) all.push_back(at::zeros({1}));
  if (world.rank() == 2) wait_for_word();
  world.gather(all, tensor, 0);
  if (world.rank() == 1) {
    world.destroy();
    print("left");
    wait_for_word();
  }
  if (world.rank() == 0 && (all[1].item<float>() != 2 || all[2].item<float>() != 3)) throw std::runtime_error("wrong");
}

void straggler() {
  auto world = join();
  world.barrier();
  print("running");
  if (world.rank() == 1) wait_for_word();
  world.all_reduce(at::ones({16}, world.device()), lockstep::ReduceOp::kSum, {.timeout = milliseconds(1500)});
  world.synchronize();
}

// Its first call of this kind, for which a backend may have to connect the ranks anew.
void straggler_in_an_exchange() {
  auto world = join();
  world.barrier();
  print("running");
  if (world.rank() == 1) wait_for_word();
  auto received = at::zeros({world.size()}, world.device());
  world.all_to_all(received.split(1), at::ones_like(received).split(1), {.timeout = milliseconds(1500)});
  world.synchronize();
}

void other_shapes() {
  auto world = join();
  world.barrier();
  print("running");
  if (world.rank() == 1)
    world.all_reduce(at::ones({5}, world.device()));
  else
    world.all_reduce(at::ones({4}, world.device()));
  world.synchronize();
}

void forgets_a_group() {
  auto world = join();
  if (world.rank() == 1) {
    world.barrier();
  } else {
    world.new_group({0, 2});
  }
}

void barrier_with_names() {
  auto world = join();
  if (world.rank() == 1) wait_for_word();
  try {
    world.monitored_barrier({.timeout = milliseconds(1000)});
  } catch (const lockstep::TimeoutError& error) {
    print(std::string("TimeoutError: ") + error.what());
  }
  wait_for_word();
  world.monitored_barrier();
  world.barrier();
}

// Goes on until rank 0 is told to stop.
void counts() {
  auto world = join();
  static std::atomic<bool> is_told{false};
  if (world.rank() == 0) std::thread([] { (wait_for_word(), is_told = true); }).detach();
  for (int64_t step = 1;; ++step) {
    auto tensor = at::full({256}, world.rank() == 0 && is_told ? 1.0 : 0.0);
    world.all_reduce(tensor);
    if (step == 3) print("running");
    if (tensor[0].item<float>() > 0) break;
  }
}

/// The job's store, stopping in the middle of the backend's making: after this rank's first address is known.
class StopsAfterPublishing final : public lockstep::Store {
 public:
  explicit StopsAfterPublishing(std::shared_ptr<Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->set(key, value);
    if (std::exchange(has_stopped_, true)) return;
    print("published");
    wait_for_word();
  }
  std::string get(const std::string& key, milliseconds timeout) override { return store_->get(key, timeout); }
  int64_t add(const std::string& key, int64_t amount) override { return store_->add(key, amount); }
  void append(const std::string& key, const std::string& value) override { store_->append(key, value); }
  std::string compare_set(const std::string& key, const std::string& old, const std::string& value) override {
    return store_->compare_set(key, old, value);
  }
  std::vector<std::string> multi_get(const std::vector<std::string>& keys, milliseconds timeout) override {
    return store_->multi_get(keys, timeout);
  }
  void multi_set(const std::vector<std::pair<std::string, std::string>>& values) override { store_->multi_set(values); }
  void wait(const std::vector<std::string>& keys, milliseconds timeout) override { store_->wait(keys, timeout); }
  bool check(const std::vector<std::string>& keys) override { return store_->check(keys); }
  bool erase(const std::string& key) override { return store_->erase(key); }

 private:
  const std::shared_ptr<Store> store_;
  bool has_stopped_ = false;
};

void stops_while_connecting() {
  lockstep::register_backend("slow", [](const lockstep::BackendContext& context) {
    auto changed = context;
    print("connecting");
    if (context.rank == 1) changed.store = std::make_shared<StopsAfterPublishing>(context.store);
    return lockstep::detail::find_backend("gloo")(changed);
  });
  auto world = join();
  auto ones = at::ones({1000});
  world.all_reduce(ones);
  if (!ones.eq(world.size()).all().item<bool>()) throw std::runtime_error("a wrong sum");
}

/// The child ends by itself after a minute, if nobody kills it.
void forks_a_child_that_stays() {
  auto world = join();
  if (std::getenv("TEST_FORKING_RANK") == std::to_string(world.rank())) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(60);
      for (;;) ::pause();
    }
    print("child " + std::to_string(child));
  }
  print("running");
  for (;;) world.barrier();
}

void without_descriptors() {
  rlimit few;
  few.rlim_cur = few.rlim_max = 9;
  ::setrlimit(RLIMIT_NOFILE, &few);
  join();
}

void without_threads() {
  rlimit few;
  few.rlim_cur = few.rlim_max = 1;
  ::setrlimit(RLIMIT_NPROC, &few);
  if (::setgid(65534) != 0 || ::setuid(65534) != 0) throw std::runtime_error("setuid");
  join();
}

/// Rank 1 cannot map more than 1 GiB in addition to what it has.
void sums_without_address_space() {
  if (std::string(std::getenv("RANK")) == "1") {
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit little;
    little.rlim_cur = little.rlim_max = static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE) + (int64_t{1} << 30));
    ::setrlimit(RLIMIT_AS, &little);
  }
  sums();
}

/// As on kernels without memfd_create, or in containers that forbid it: a filter refuses the call on rank 1.
void sums_without_memfd() {
  if (std::string(std::getenv("RANK")) == "1") {
    std::array<sock_filter, 4> filter{{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                                       BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 1),
                                       BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
                                       BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)}};
    const sock_fprog program{filter.size(), filter.data()};
    if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
      throw std::runtime_error("cannot refuse memfd_create");
  }
  sums();
}

const std::map<std::string, std::function<void()>> kScenarios{
    {"small_calls", small_calls},
    {"large_calls", large_calls},
    {"mixed_calls", mixed_calls},
    {"reads_a_stream", reads_a_stream},
    {"waits_between_calls", waits_between_calls},
    {"messages", messages},
    {"captured_training", captured_training},
    {"training", training},
    {"sums", sums},
    {"sums_without_address_space", sums_without_address_space},
    {"sums_without_memfd", sums_without_memfd},
    {"joins_again", joins_again},
    {"leaves_late", leaves_late},
    {"breaks_and_joins_again", breaks_and_joins_again},
    {"dies_between_two_joins", dies_between_two_joins},
    {"joins_once_too_few", joins_once_too_few},
    {"joins_again_without_rank_zero", joins_again_without_rank_zero},
    {"joins_only", joins_only},
    {"throws", throws},
    {"exits_early", exits_early},
    {"returns_early", returns_early},
    {"leaves_after_its_part", leaves_after_its_part},
    {"straggler", straggler},
    {"straggler_in_an_exchange", straggler_in_an_exchange},
    {"other_shapes", other_shapes},
    {"forgets_a_group", forgets_a_group},
    {"barrier_with_names", barrier_with_names},
    {"counts", counts},
    {"stops_while_connecting", stops_while_connecting},
    {"without_descriptors", without_descriptors},
    {"without_threads", without_threads},
    {"forks", [] { fork_and_go_on(join()); }},
    {"forks_a_child_that_stays", forks_a_child_that_stays},
    {"stops_in_all_reduce", [] { stop_in_all_reduce(join()); }},
    {"stops_in_broadcast", [] { stop_in_broadcast(join()); }},
    {"frees_memory_after_a_kill", [] { free_memory_after_a_kill(join); }},
};

}  // namespace

int run_failing_rank(const std::string& scenario) {
  try {
    kScenarios.at(scenario)();
    print("done");
    return 0;
  } catch (const lockstep::Error& error) {
    const auto culprit = error.culprit() ? std::to_string(error.culprit()->rank) : "unknown";
    print(std::string(name_of(error.kind())) + ": " + error.what() + " [culprit: " + culprit + "]");
    return 3;
  } catch (const std::exception& error) {
    print(std::string("other: ") + error.what());
    return 4;
  }
}
