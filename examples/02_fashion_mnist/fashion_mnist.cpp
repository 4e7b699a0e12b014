// Trains a convolutional network on Fashion-MNIST (Debian: dataset-fashion-mnist).
//
//   lockstep run -n 2 fashion_mnist              two ranks; torchrun, srun and mpirun work as well
//   fashion_mnist --n-gpus 2                     starts the processes itself
//   fashion_mnist --n-gpus 2 --data-parallel     one process that uses two devices
//
// With --resume, a run that was interrupted in any way is continued. --help lists the options.

#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>
#include <CLI/CLI.hpp>

namespace {

struct NetImpl : torch::nn::Cloneable<NetImpl> {  // Cloneable for DataParallel
  NetImpl() { reset(); }
  void reset() override {
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
  std::string run = "runs/fashion_mnist", backend = "auto", init_method = "env://", device{};
  int64_t epochs = 5, batch_size = 128, measured_steps = 0;
  double learning_rate = 0.1;
  uint64_t seed = 1;
  int n_gpus = 0, rank = 0, world_size = 0;
  bool distributed = false, data_parallel = false, zero = false, sync_bn = false, resume = false, amp = false;
};

/// Returns the fraction of test images that the network classifies correctly. Each image is evaluated by one rank.
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

/// Prints how many images per second all ranks train on, in at most `count` steps of an epoch after the first ten.
template <class Loader, class Step>
int measure(const lockstep::ProcessGroup& world, Loader& loader, int64_t count, const Step& step) {
  constexpr int64_t kWarmUp = 10;
  int64_t steps = 0, images = 0;
  const auto now = [&] {
    if (world.device().is_cuda()) torch::cuda::synchronize();
    return std::chrono::steady_clock::now();
  };
  auto began = now();
  for (auto& batch : loader) {
    step(batch);
    if (++steps > kWarmUp) images += batch.target.size(0);
    if (steps == kWarmUp) began = now();
    if (steps == kWarmUp + count) break;
  }
  const std::chrono::duration<double> took = now() - began;
  lockstep::print(world, "images per second: ", static_cast<int64_t>(images * world.size() / took.count()));
  return 0;
}

/// `model` is the network, wrapped for several ranks or several devices.
template <class Model, class Optimizer>
int train(const lockstep::ProcessGroup& world, const Settings& settings, Net& net, Model& model, Optimizer& optimizer) {
  const auto folder = lockstep::find_dataset("fashion-mnist");
  const lockstep::IdxDataset train_set(folder, lockstep::Split::kTrain), test_set(folder, lockstep::Split::kTest);
  lockstep::DistributedSampler sampler(train_set, world, {.seed = settings.seed});
  lockstep::DataLoader loader(train_set, sampler,
                              {.batch_size = settings.batch_size / world.size(), .device = world.device()});
  const double rate = optimizer.param_groups()[0].options().get_lr();
  const auto steps = settings.epochs * loader.size();
  lockstep::LRScheduler scheduler(optimizer, lockstep::schedules::one_cycle({.max_lr = rate, .total_steps = steps}));

  const auto step = [&](auto& batch) {
    optimizer.zero_grad();
    const auto loss = [&] {
      auto guard = lockstep::autocast(world.device(), torch::kBFloat16, settings.amp);
      return torch::nn::functional::cross_entropy(model(batch.data), batch.target);
    }();
    loss.backward();  // gradients are averaged over the ranks when this returns
    optimizer.step();
    return loss;
  };
  if (settings.measured_steps > 0) return measure(world, loader, settings.measured_steps, step);

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
    if constexpr (requires { model.sync_buffers(); }) model.sync_buffers();  // if batches are normalized by each rank
    run.log("accuracy", [&] { return test_accuracy(net, test_set, world); });
  }
  return run.exit_code();
}

int run_rank(const lockstep::ProcessGroup& world, const Settings& settings) {
  if (settings.batch_size < world.size() || settings.batch_size % world.size() != 0)
    throw std::invalid_argument("--batch-size " + std::to_string(settings.batch_size) + " is not a multiple of the " +
                                std::to_string(world.size()) + " ranks");
  torch::manual_seed(settings.seed);
  Net net;
  net->to(world.device());
  const double rate = settings.learning_rate * static_cast<double>(settings.batch_size) / 128;
  const auto options = torch::optim::SGDOptions(rate).momentum(0.9).weight_decay(5e-4);
  const auto with_optimizer = [&](auto& model) {
    if (settings.zero) {  // the optimizer's state is divided between the ranks
      lockstep::ZeroRedundancyOptimizer<lockstep::FusedSGD> optimizer(model.parameters(), world, options);
      return train(world, settings, net, model, optimizer);
    }
    torch::optim::SGD optimizer(model.parameters(), options);
    return train(world, settings, net, model, optimizer);
  };
  if (settings.data_parallel) {
    if (world.size() > 1)
      throw std::invalid_argument("--data-parallel is for one process; start it without a launcher");
    std::vector<torch::Device> devices(settings.n_gpus, world.device());  // empty: all GPUs
    for (int i = 0; i < settings.n_gpus && world.device().is_cuda(); ++i) devices[i] = torch::Device(torch::kCUDA, i);
    lockstep::DataParallel model(net, {.devices = devices});
    return with_optimizer(model);
  }
  if (settings.sync_bn) lockstep::convert_sync_batchnorm(*net, world);
  lockstep::DistributedDataParallel model(net, world);
  return with_optimizer(model);
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Trains a convolutional network on Fashion-MNIST.");
  app.option_defaults()->always_capture_default();
  app.add_option("--run", settings.run, "folder for checkpoints, metrics and curves");
  app.add_option("--epochs", settings.epochs, "number of epochs");
  app.add_option("--batch-size", settings.batch_size, "images in a step, over all ranks");
  app.add_option("--lr", settings.learning_rate, "largest learning rate for steps of 128 images");
  app.add_option("--seed", settings.seed, "of the weights and the order of images");
  app.add_flag("--resume", settings.resume, "continue the run if the folder has a checkpoint");
  app.add_flag("--amp", settings.amp, "mixed precision: bfloat16 where that is safe");
  app.add_flag("--zero", settings.zero, "divide the optimizer's state between the ranks (ZeroRedundancyOptimizer)");
  auto* sync_bn = app.add_flag("--sync-bn", settings.sync_bn, "normalize by the batches of all ranks (SyncBatchNorm)");
  auto* data_parallel = app.add_flag("--data-parallel", settings.data_parallel, "one process for all devices");
  data_parallel->excludes(sync_bn);
  app.add_flag("--distributed", settings.distributed, "one process per device (default)")->excludes(data_parallel);
  app.add_option("--n-gpus", settings.n_gpus, "devices to use without a launcher; CPUs if there are not enough GPUs");
  app.add_option("--backend", settings.backend, "auto, shm, gloo, mpi, nccl or hierarchical");
  app.add_option("--device", settings.device, "cpu: do not use GPUs");
  app.add_option("--init", settings.init_method, "tcp://HOST:PORT for ranks that are started by hand");
  app.add_option("--rank", settings.rank, "of a process that is started by hand");
  app.add_option("--world-size", settings.world_size, "number of ranks that are started by hand");
  app.add_option("--measure", settings.measured_steps, "print the speed of so many steps, and end");
  CLI11_PARSE(app, argc, argv);
  lockstep::prefer_fast_convolutions();
  if (settings.n_gpus > 0 && !settings.data_parallel) {
    const auto rank_main = [&](lockstep::ProcessGroup world) { run_rank(world, settings); };
    lockstep::spawn(settings.n_gpus, rank_main, {.backend = settings.backend});
    return 0;
  }
  lockstep::ProcessGroupOptions job{.backend = settings.backend, .init_method = settings.init_method};
  if (settings.world_size > 0) {
    job.rank = settings.rank;
    job.world_size = settings.world_size;
  }
  if (!settings.device.empty()) job.device = torch::Device(settings.device);
  return run_rank(lockstep::init_process_group(job), settings);
}
