// The time of a training step of compiled models, against eager mode and against Python:
//
//   for model in mlp cnn gpt; do
//     lockstep compile benchmarks/compiled_cost.py:make_$model -o models/$model.pt2
//   done
//   OMP_NUM_THREADS=1 lockstep run -n 2 build/benchmarks/compiled_cost models PYTHON
//
// Sides take turns: a module of LibTorch in eager mode; the compiled model; and in Python, with the same layers, eager
// mode and torch.compile of the model with its loss. With several ranks each side has its DistributedDataParallel: over
// shared memory, and in Python over Gloo. SGD, gradients released before each step, one thread for each rank. A sample
// is the number of steps that take the first side 0.1 s; the time of the slowest rank counts. Medians of 21 rounds with
// the 10th and 90th percentile, and the ratio of each side to the compiled model in the same round.

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <stdexcept>

#include <lockstep/lockstep.h>

namespace {

namespace nn = torch::nn;
using Clock = std::chrono::steady_clock;
using torch::Tensor;

constexpr int kRounds = 21, kWarmUps = 5;
constexpr double kSample = 0.1;
constexpr int64_t kBatch = 32, kClasses = 10;
constexpr int64_t kAlphabet = 256, kContext = 64, kWidth = 64, kHeads = 4, kLayers = 2, kTexts = 16;

// --- the models in eager mode: those of compiled_cost.py

class BlockImpl : public nn::Module {
 public:
  BlockImpl()
      : norm1_(register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({kWidth})))),
        norm2_(register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({kWidth})))),
        qkv_(register_module("qkv", nn::Linear(kWidth, 3 * kWidth))),
        projection_(register_module("projection", nn::Linear(kWidth, kWidth))),
        widen_(register_module("widen", nn::Linear(kWidth, 4 * kWidth))),
        narrow_(register_module("narrow", nn::Linear(4 * kWidth, kWidth))) {}

  Tensor forward(Tensor x) {
    const auto parts = qkv_(norm1_(x)).unflatten(-1, {3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    x = x + projection_(attended.transpose(1, 2).flatten(2));
    return x + narrow_(torch::gelu(widen_(norm2_(x))));
  }

 private:
  nn::LayerNorm norm1_, norm2_;
  nn::Linear qkv_, projection_, widen_, narrow_;
};
TORCH_MODULE(Block);

class GptImpl : public nn::Module {
 public:
  GptImpl()
      : tokens_(register_module("tokens", nn::Embedding(kAlphabet, kWidth))),
        positions_(register_module("positions", nn::Embedding(kContext, kWidth))),
        output_(register_module("output", nn::Linear(kWidth, kAlphabet))) {
    for (int64_t i = 0; i < kLayers; ++i) blocks_->push_back(Block());
    register_module("blocks", blocks_);
  }

  Tensor forward(Tensor tokens) {
    return output_(blocks_->forward(tokens_(tokens) + positions_(torch::arange(kContext)))).flatten(0, 1);
  }

 private:
  nn::Embedding tokens_, positions_;
  nn::Linear output_;
  nn::Sequential blocks_;
};
TORCH_MODULE(Gpt);

void add_convolution(nn::Sequential& model, int64_t before, int64_t after) {
  model->push_back(nn::Conv2d(nn::Conv2dOptions(before, after, 3).padding(1)));
  model->push_back(nn::BatchNorm2d(after));
  model->push_back(nn::ReLU());
  model->push_back(nn::MaxPool2d(2));
}

nn::Sequential make_model(const std::string& name) {
  nn::Sequential model;
  if (name == "gpt") {
    model->push_back(Gpt());
  } else if (name == "mlp") {
    for (int64_t width : {784, 2048, 2048}) {
      model->push_back(nn::Linear(width, 2048));
      model->push_back(nn::ReLU());
    }
    model->push_back(nn::Linear(2048, kClasses));
  } else {
    add_convolution(model, 1, 32);
    add_convolution(model, 32, 64);
    model->push_back(nn::Flatten());
    model->push_back(nn::Linear(3136, 128));
    model->push_back(nn::ReLU());
    model->push_back(nn::Linear(128, kClasses));
  }
  return model;
}

std::pair<Tensor, Tensor> make_batch(const std::string& name) {
  if (name == "gpt")
    return {torch::randint(kAlphabet, {kTexts, kContext}), torch::randint(kAlphabet, {kTexts * kContext})};
  const auto data = name == "mlp" ? torch::randn({kBatch, 784}) : torch::randn({kBatch, 1, 28, 28});
  return {data, torch::randint(kClasses, {kBatch})};
}

// --- the sides

/// compiled_cost.py, which answers each line with an empty one.
class Python {
 public:
  Python(const std::string& python, const std::string& store, const lockstep::ProcessGroup& world) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("socketpair");
    const auto rank = std::to_string(world.rank()), ranks = std::to_string(world.size());
    if (::fork() == 0) {
      ::dup2(ends[1], STDIN_FILENO);
      ::dup2(ends[1], STDOUT_FILENO);
      ::execlp(python.c_str(), python.c_str(), LOCKSTEP_COMPILED_COST, store.c_str(), rank.c_str(), ranks.c_str(),
               nullptr);
      ::_exit(127);
    }
    ::close(ends[1]);
    socket_ = ends[0];
  }
  ~Python() { ::close(socket_); }  // ends it
  Python(const Python&) = delete;
  Python& operator=(const Python&) = delete;

  void request(const std::string& text) {
    const auto line = text + "\n";
    char answer = 0;
    if (::write(socket_, line.data(), line.size()) < 0 || ::read(socket_, &answer, 1) != 1)
      throw std::runtime_error("Python has ended");
  }

 private:
  int socket_ = -1;
};

struct Side {
  std::string name;
  std::function<void(int steps)> train;
  std::vector<double> times{};  // of a step, in ms
};

/// Trains with this function of the batch, which returns the loss.
std::function<void(int)> trainer(std::vector<Tensor> parameters, std::function<Tensor()> loss_of) {
  auto optimizer = std::make_shared<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.01));
  return [=](int steps) {
    for (int i = 0; i < steps; ++i) {
      for (const auto& parameter : parameters) parameter.mutable_grad().reset();
      loss_of().backward();
      optimizer->step();
    }
  };
}

template <class Module>
std::function<void(int)> make_side(const Module& model, const lockstep::ProcessGroup& world, auto loss_of) {
  using Wrapper = lockstep::DistributedDataParallel<typename Module::ContainedType>;
  if (world.size() == 1) return trainer(model->parameters(), [=] { return loss_of(*model.ptr()); });
  auto ddp = std::make_shared<Wrapper>(model, world);
  return trainer(ddp->parameters(), [=] { return loss_of(*ddp); });
}

double measure(const Side& side, int steps, const lockstep::ProcessGroup& world) {
  world.barrier();
  const auto begin = Clock::now();
  side.train(steps);
  auto took = torch::tensor(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
  world.all_reduce(took, lockstep::ReduceOp::kMax);
  return took.item<double>();
}

double percentile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1))];
}

void measure_model(const std::string& name, const std::string& folder, Python& python,
                   const lockstep::ProcessGroup& world) {
  const auto [data, target] = make_batch(name);
  std::vector<Side> sides;
  const auto eager_loss = [data = data, target = target](auto& model) {
    return at::cross_entropy_loss(model.forward(data), target);
  };
  const auto compiled_loss = [data = data, target = target](auto& model) {
    return model.forward(data, target).toTensor();
  };
  sides.push_back({"eager", make_side(make_model(name), world, eager_loss)});
  sides.push_back(
      {"compiled", make_side(lockstep::CompiledModule(folder + "/" + name + ".pt2"), world, compiled_loss)});
  for (const std::string kind : {"eager", "compile"}) {
    python.request("model " + name + " " + kind);
    sides.push_back(
        {"python " + kind, [&, kind](int steps) { python.request("train " + kind + " " + std::to_string(steps)); }});
  }
  for (const auto& side : sides) measure(side, kWarmUps, world);
  const double step_ms = measure(sides[0], kWarmUps, world) / kWarmUps;
  const int steps = std::max(1, static_cast<int>(std::ceil(1000 * kSample / step_ms)));
  for (int round = 0; round < kRounds; ++round)
    for (auto& side : sides) side.times.push_back(measure(side, steps, world) / steps);
  for (const auto& side : sides) {
    std::vector<double> ratios;
    for (int round = 0; round < kRounds; ++round) ratios.push_back(side.times[round] / sides[1].times[round]);
    if (world.rank() == 0)
      std::printf("%-5s %-15s %8.3f %8.3f %8.3f   %6.2f\n", name.c_str(), side.name.c_str(),
                  percentile(side.times, 0.5), percentile(side.times, 0.1), percentile(side.times, 0.9),
                  percentile(ratios, 0.5));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: compiled_cost FOLDER PYTHON\n");
    return 2;
  }
  auto world = lockstep::init_process_group({.device = torch::Device(torch::kCPU)});
  torch::set_num_threads(1);
  std::string store = "/tmp/compiled_cost_" + std::to_string(::getpid());
  store = world.broadcast_object(store, 0).toStringRef();
  Python python(argv[2], store, world);
  if (world.rank() == 0)
    std::printf("# %d ranks, LibTorch %s\n# %-3s %-15s %8s %8s %8s   %6s\n", world.size(), TORCH_VERSION, "",
                "step (ms)", "median", "p10", "p90", "/ compiled");
  for (const char* model : {"mlp", "cnn", "gpt"}) measure_model(model, argv[1], python, world);
  ::unlink(store.c_str());
}
