// A rank under attack. It trains until the test stops it, and compares every step with one process on the whole batch.
// Exit code 0: every result was right; 3: lockstep reported an error; 4: a result was wrong.

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <ctime>
#include <stdexcept>
#include <thread>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "attack/control.h"
#include "ranks/test_ranks.h"

namespace {

using namespace lockstep;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr int64_t kSamplesPerRank = 4;
constexpr int64_t kMaxElements = 300'000;

struct WrongResult : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 64));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(64, 2));
};
TORCH_MODULE(Net);

Net make_net() {
  torch::manual_seed(1);
  Net net;
  net->to(torch::kDouble);  // so that the order of summation does not matter after many steps
  return net;
}

/// Notices when the system's time jumps.
class WallClock {
 public:
  bool has_jumped() {
    const std::time_t now = std::time(nullptr);
    const bool jumped = std::abs(std::difftime(now, last_)) > 1800;
    last_ = now;
    return jumped;
  }

 private:
  std::time_t last_ = std::time(nullptr);
};

class Training {
 public:
  Training(const ProcessGroup& world, Control& control)
      : world_(world), control_(control), mine_(control.ranks[world.rank()]) {}

  void run() {
    mine_.pid = ::getpid();
    try {
      do {
        if (world_.rank() == 1) obey();
        train_one_step();
        reduce_one_tensor();
        if (step_ % 16 == 0) world_.monitored_barrier();  // through the store
        if (clock_.has_jumped()) ++mine_.clock_jumps;
        mine_.steps = ++step_;
      } while (!should_stop());
    } catch (const Error&) {
      mine_.told_at_ns = Clock::now().time_since_epoch().count();
      throw;
    }
  }

 private:
  void obey() {
    if (control_.should_hold) ++mine_.held;
    while (control_.should_hold) std::this_thread::sleep_for(1ms);
    while (control_.should_eat) std::fill_n(new char[16 << 20], 16 << 20, 'x');
  }

  void train_one_step() {
    torch::manual_seed(static_cast<uint64_t>(step_));
    const auto batch = torch::randn({kSamplesPerRank * world_.size(), 8}, torch::kDouble);
    optimizer_.zero_grad();
    ddp_(batch.narrow(0, kSamplesPerRank * world_.rank(), kSamplesPerRank)).pow(2).mean().backward();
    optimizer_.step();
    reference_optimizer_.zero_grad();
    reference_->forward(batch).pow(2).mean().backward();
    reference_optimizer_.step();
    const auto expected = reference_->parameters(), actual = net_->parameters();
    for (size_t i = 0; i < expected.size(); ++i)
      if (!torch::allclose(actual[i], expected[i], 1e-6, 1e-9)) throw WrongResult("a parameter differs");
  }

  void reduce_one_tensor() {
    auto tensor = at::full({1 + step_ * 7919 % kMaxElements}, world_.rank() + 1.0);
    world_.all_reduce(tensor);
    const double sum = world_.size() * (world_.size() + 1) / 2;
    if (!tensor.eq(sum).all().item<bool>()) throw WrongResult("a sum differs");
  }

  bool should_stop() {
    auto flag = at::full({1}, world_.rank() == 0 && control_.should_stop ? 1.0 : 0.0);
    world_.all_reduce(flag);
    return flag.item<double>() > 0;
  }

  ProcessGroup world_;
  Control& control_;
  RankProgress& mine_;
  WallClock clock_;
  int64_t step_ = 0;
  Net net_ = make_net(), reference_ = make_net();
  DistributedDataParallel<NetImpl> ddp_{net_, world_};
  torch::optim::SGD optimizer_{ddp_.parameters(), 0.01}, reference_optimizer_{reference_->parameters(), 0.01};
};

int finish(RankProgress& mine, RankOutcome outcome, int culprit, int code, const std::string& words) {
  print_line(words);
  mine.culprit = culprit;
  mine.outcome = outcome;
  return code;
}

}  // namespace

int run_attacked_rank(const std::vector<std::string>&) {
  Control* control = map_control(std::getenv(kControlVariable));
  if (!control) return 5;
  auto& mine = control->ranks[std::atoi(std::getenv("RANK"))];
  try {
    ProcessGroupOptions options;
    options.backend = std::getenv("TEST_BACKEND");
    options.timeout = 60s;
    Training(init_process_group(options), *control).run();
    return finish(mine, RankOutcome::kDone, -1, 0, "done after " + std::to_string(mine.steps) + " steps");
  } catch (const Error& error) {
    const auto outcome = error.kind() == ErrorKind::kPeer ? RankOutcome::kPeerError : RankOutcome::kOtherError;
    const int culprit = error.culprit() ? error.culprit()->rank : -1;
    return finish(mine, outcome, culprit, 3, std::string(name_of(error.kind())) + ": " + error.what());
  } catch (const std::exception& error) {
    return finish(mine, RankOutcome::kWrongResult, -1, 4, std::string("wrong: ") + error.what());
  }
}
