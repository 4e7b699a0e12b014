// Trains a convolutional network on Fashion-MNIST, on as many ranks as were started:
//
//   lockstep run -n 2 fashion_mnist
//
// Started again after Ctrl-C, kill -9 or a power failure, it continues where it was.

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <string>

#include <lockstep/lockstep.h>

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    using torch::nn::Conv2dOptions;
    conv1 = register_module("conv1", torch::nn::Conv2d(Conv2dOptions(1, 16, 5).stride(2).padding(2).bias(false)));
    norm1 = register_module("norm1", torch::nn::BatchNorm2d(16));
    conv2 = register_module("conv2", torch::nn::Conv2d(Conv2dOptions(16, 32, 3).padding(1).bias(false)));
    norm2 = register_module("norm2", torch::nn::BatchNorm2d(32));
    hidden = register_module("hidden", torch::nn::Linear(32 * 7 * 7, 128));
    output = register_module("output", torch::nn::Linear(128, 10));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(norm1(conv1(x)));
    x = torch::relu(norm2(torch::max_pool2d(conv2(x), 2)));
    return output(torch::relu(hidden(x.flatten(1))));
  }
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::BatchNorm2d norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear hidden{nullptr}, output{nullptr};
};
TORCH_MODULE(Net);

struct Settings {
  std::string run = "runs/fashion_mnist";
  int64_t epochs = 5;
  int64_t batch = 128;         // images in a step, over all ranks
  double learning_rate = 0.1;  // for steps of 128 images; in proportion for others
  uint64_t seed = 1;
  bool resume = true;
  bool sync_batch_norm = true;
  std::optional<torch::Device> device{};  // of each rank; none: its GPU if there is one for each rank, else the CPU
  double measured_seconds = 0;            // measure the speed for so long, instead of training

  // How the ranks come together: by the environment, unless one of these is given.
  int spawned_ranks = 0;
  std::string init_method{};
  int rank = 0;
  int world_size = 1;
};

/// Returns the fraction of test images that the network classifies correctly. Each rank evaluates its part; no image is
/// evaluated twice. Collective.
double test_accuracy(Net& net, const lockstep::IdxDataset& test, const lockstep::ProcessGroup& world) {
  torch::NoGradGuard no_grad;
  net->eval();
  lockstep::DistributedSampler sampler(test, world, {.shuffle = false, .tail = lockstep::Tail::kExact});
  lockstep::DataLoader loader(test, sampler, {.batch_size = 500, .device = world.device()});
  lockstep::Accuracy accuracy(world.device());
  for (auto& batch : loader) accuracy.add(net(batch.data), batch.target);
  net->train();
  return accuracy.compute(world);
}

/// Calls `step` with batches for `seconds` and prints how many images all ranks have trained on in a second.
template <class Loader, class Step>
void measure(const lockstep::ProcessGroup& world, Loader& loader, double seconds, const Step& step) {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kWarmUp = 10;
  int64_t steps = 0, images = 0;
  auto began = Clock::now();
  for (auto& batch : loader) {
    step(batch);
    if (++steps == kWarmUp) began = Clock::now();
    if (steps <= kWarmUp) continue;
    images += batch.target.size(0);
    // The ranks stop after the same step, because rank 0 decides.
    auto is_over = torch::tensor({Clock::now() - began > std::chrono::duration<double>(seconds)}, torch::kLong);
    world.broadcast(is_over, 0);
    if (is_over.item<int64_t>() != 0) break;
  }
  if (world.device().is_cuda()) torch::cuda::synchronize();
  const std::chrono::duration<double> took = Clock::now() - began;
  lockstep::print(world, "images per second: ", static_cast<int64_t>(images * world.size() / took.count()));
}

int train(const lockstep::ProcessGroup& world, const Settings& settings) {
  const auto folder = lockstep::find_dataset("fashion-mnist");
  const lockstep::IdxDataset train_set(folder, lockstep::Split::kTrain);
  const lockstep::IdxDataset test_set(folder, lockstep::Split::kTest);
  const auto batch_size = static_cast<size_t>(std::max<int64_t>(settings.batch / world.size(), 1));
  lockstep::DistributedSampler sampler(train_set, world, {.seed = settings.seed});
  lockstep::DataLoader loader(train_set, sampler, {.batch_size = batch_size, .device = world.device()});

  torch::manual_seed(settings.seed);
  Net net;
  net->to(world.device());
  if (settings.sync_batch_norm) lockstep::convert_sync_batch_norm(*net, world);
  lockstep::DistributedDataParallel ddp(net, world);
  const double rate = settings.learning_rate * static_cast<double>(settings.batch) / 128;
  torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(rate).momentum(0.9).weight_decay(5e-4));
  const auto steps = settings.epochs * static_cast<int64_t>(loader.size());
  lockstep::LRScheduler scheduler(optimizer, lockstep::schedules::one_cycle({.max_lr = rate, .total_steps = steps}));

  const auto step = [&](auto& batch) {
    optimizer.zero_grad();
    auto loss = torch::nn::functional::cross_entropy(ddp(batch.data), batch.target);
    loss.backward();  // gradients are averaged over the ranks when this returns
    optimizer.step();
    return loss;
  };
  if (settings.measured_seconds > 0) {
    measure(world, loader, settings.measured_seconds, step);
    return 0;
  }

  auto state = lockstep::TrainingState{}
                   .add("model", net)
                   .add("optimizer", optimizer)
                   .add("scheduler", scheduler)
                   .add("arch", "small convolutional network");
  lockstep::TrainingRun run(
      world, settings.run, state,
      {.best = "accuracy", .save_every = std::chrono::seconds(10), .resume = settings.resume, .optimizer = &optimizer});
  if (!run.is_resumed())
    lockstep::print(world, "Training on ", train_set.images().size(0), " images with ", world.size(),
                    world.size() == 1 ? " rank" : " ranks", " on ", world.device().is_cuda() ? "GPU" : "CPU",
                    ", backend ", world.backend_name());
  while (run.next_epoch(settings.epochs)) {
    for (auto& batch : run.batches(loader))
      run.step([&] {
        run.log("loss", step(batch));
        scheduler.step();
      });
    ddp.sync_buffers();  // rank 0's statistics, if batches are normalized locally
    run.log("accuracy", [&] { return test_accuracy(net, test_set, world); });
  }
  return run.exit_code();
}

// --- the command line

constexpr const char* kUsage = R"(usage: fashion_mnist [options]
  --run FOLDER        checkpoints, metrics and curves (default: runs/fashion_mnist)
  --epochs N          how often to see all images (default: 5)
  --batch N           images in a step, over all ranks (default: 128)
  --lr X              largest learning rate for steps of 128 images (default: 0.1)
  --seed N            of the weights and the order of images (default: 1)
  --no-resume         do not continue an earlier run: the folder must have no checkpoints
  --batch-norm local  normalize by each rank's own batch (default: by the batches of all ranks)
  --device cpu        do not use GPUs
  --measure SECONDS   print the speed and end
The ranks are those of the launcher: lockstep run -n 2 fashion_mnist. Without one:
  --n-gpus N          start N processes, one for each GPU, or on the CPU if there are not enough
  --init tcp://HOST:PORT --rank R --world-size N
                      be one rank of a job whose ranks are started by hand
)";

Settings read_settings(int argc, char** argv) {
  Settings settings;
  const std::map<std::string, std::function<void(const std::string&)>> options{
      {"--run", [&](const std::string& value) { settings.run = value; }},
      {"--epochs", [&](const std::string& value) { settings.epochs = std::stoll(value); }},
      {"--batch", [&](const std::string& value) { settings.batch = std::stoll(value); }},
      {"--lr", [&](const std::string& value) { settings.learning_rate = std::stod(value); }},
      {"--seed", [&](const std::string& value) { settings.seed = std::stoull(value); }},
      {"--batch-norm", [&](const std::string& value) { settings.sync_batch_norm = value != "local"; }},
      {"--device", [&](const std::string& value) { settings.device = torch::Device(value); }},
      {"--measure", [&](const std::string& value) { settings.measured_seconds = std::stod(value); }},
      {"--n-gpus", [&](const std::string& value) { settings.spawned_ranks = std::stoi(value); }},
      {"--init", [&](const std::string& value) { settings.init_method = value; }},
      {"--rank", [&](const std::string& value) { settings.rank = std::stoi(value); }},
      {"--world-size", [&](const std::string& value) { settings.world_size = std::stoi(value); }},
  };
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto option = options.find(name);
    if (name == "--no-resume") {
      settings.resume = false;
    } else if (option != options.end() && i + 1 < argc) {
      option->second(argv[++i]);
    } else {
      const bool is_help = name == "--help" || name == "-h";
      (is_help ? std::cout : std::cerr) << kUsage;
      std::exit(is_help ? 0 : 2);
    }
  }
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto settings = read_settings(argc, argv);
    torch::set_num_threads(1);  // one core per rank
    lockstep::prefer_fast_convolutions();
    if (settings.spawned_ranks > 0) {
      lockstep::spawn(settings.spawned_ranks, [&](lockstep::ProcessGroup world) { train(world, settings); });
      return 0;
    }
    lockstep::ProcessGroupOptions job;
    job.device = settings.device;
    if (!settings.init_method.empty()) {
      job.init_method = settings.init_method;
      job.rank = settings.rank;
      job.world_size = settings.world_size;
    }
    return train(lockstep::init_process_group(job), settings);
  } catch (const std::exception& error) {
    std::cerr << "fashion_mnist: " << error.what() << '\n';
    return 1;
  }
}
