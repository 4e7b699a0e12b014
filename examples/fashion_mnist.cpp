// Trains a small convolutional network on Fashion-MNIST, on as many ranks as were started.

#include <chrono>
#include <iomanip>
#include <iostream>
#include <optional>
#include <string>

#include <lockstep/lockstep.h>

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    using torch::nn::Conv2dOptions;
    conv1 = register_module("conv1", torch::nn::Conv2d(Conv2dOptions(1, 16, 5).stride(2).padding(2)));
    conv2 = register_module("conv2", torch::nn::Conv2d(Conv2dOptions(16, 32, 3).padding(1)));
    hidden = register_module("hidden", torch::nn::Linear(32 * 7 * 7, 64));
    output = register_module("output", torch::nn::Linear(64, 10));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(conv1(x));
    x = torch::max_pool2d(torch::relu(conv2(x)), 2);
    return output(torch::relu(hidden(x.flatten(1))));
  }
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Linear hidden{nullptr}, output{nullptr};
};
TORCH_MODULE(Net);

struct Settings {
  int epochs = 2;
  size_t batch = 64;  // per rank
  double learning_rate = 0.05;
  std::string checkpoints{};  // a folder; empty: no checkpoints
};

/// Returns the fraction of test images that the model classifies correctly. Each rank evaluates its part; no image is
/// evaluated twice.
double test_accuracy(Net& net, const lockstep::IdxDataset& test, const lockstep::ProcessGroup& world) {
  torch::NoGradGuard no_grad;
  net->eval();
  lockstep::DistributedSampler sampler(test, world, {.shuffle = false, .tail = lockstep::Tail::kExact});
  lockstep::DataLoader loader(test, sampler, {.batch_size = 500, .device = world.device()});
  auto right = torch::zeros({1}, torch::TensorOptions(torch::kLong).device(world.device()));
  for (auto& batch : loader) right += net(batch.data).argmax(1).eq(batch.target).sum();
  world.all_reduce(right);
  net->train();
  return right.item<double>() / static_cast<double>(test.images().size(0));
}

void train(const lockstep::ProcessGroup& world, const Settings& settings) {
  auto folder = lockstep::find_dataset("fashion-mnist");
  lockstep::IdxDataset train_set(folder, lockstep::Split::kTrain);
  lockstep::IdxDataset test_set(folder, lockstep::Split::kTest);

  torch::manual_seed(1);
  Net net;
  net->to(world.device());
  lockstep::DistributedDataParallel ddp(net, world);
  torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(settings.learning_rate).momentum(0.9));
  lockstep::DistributedSampler sampler(train_set, world, {.seed = 1});
  lockstep::DataLoader loader(train_set, sampler, {.batch_size = settings.batch, .device = world.device()});

  bool speaks = world.rank() == 0;
  auto steps = static_cast<int64_t>(loader.size());
  if (speaks)
    std::cout << "Training on " << train_set.images().size(0) << " images, " << world.size() << " ranks, backend "
              << world.backend_name() << ", " << steps << " steps an epoch\n";

  std::optional<lockstep::CheckpointDirectory> checkpoints;
  auto state =
      lockstep::TrainingState{}.add("model", net).add("optimizer", optimizer).add("arch", "small cnn").add_rng();
  int64_t first = 0;
  if (!settings.checkpoints.empty()) {
    checkpoints.emplace(
        world, settings.checkpoints,
        lockstep::CheckpointDirectoryOptions{.best = "accuracy", .unit = "epoch", .asynchronous = true});
    first = checkpoints->resume(state);
    if (speaks && first > 0) std::cout << "Resuming after epoch " << first << "\n";
  }

  for (int64_t epoch = first; epoch < settings.epochs; ++epoch) {
    auto begin = std::chrono::steady_clock::now();
    sampler.set_epoch(epoch);
    auto mean_loss = torch::zeros({1}, world.device());  // over the last steps and all ranks
    for (int64_t step = 0; auto& batch : loader) {
      ++step;
      optimizer.zero_grad();
      auto loss = torch::nn::functional::cross_entropy(ddp(batch.data), batch.target);
      loss.backward();  // gradients are averaged over the ranks when this returns
      optimizer.step();

      mean_loss += loss.detach();
      if (step % 100 == 0 || step == steps) {
        int64_t summed = step % 100 == 0 ? 100 : step % 100;
        world.all_reduce(mean_loss, lockstep::ReduceOp::kAvg);
        if (speaks)
          std::cout << "epoch " << epoch + 1 << "  step " << std::setw(4) << step << "/" << steps << "  loss "
                    << std::fixed << std::setprecision(4) << mean_loss.item<double>() / summed << std::endl;
        mean_loss.zero_();
      }
    }
    double accuracy = test_accuracy(net, test_set, world);
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (speaks)
      std::cout << "epoch " << epoch + 1 << "  test accuracy " << std::fixed << std::setprecision(2) << 100 * accuracy
                << " %  (" << std::setprecision(1) << took.count() << " s, "
                << 100 * std::chrono::duration<double>(loader.waited()) / took << " % of it waiting for data)"
                << std::endl;
    if (checkpoints) checkpoints->save(epoch, state, {{"accuracy", accuracy}});
  }
  if (checkpoints) checkpoints->wait();
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; ++i) {
    std::string argument = argv[i];
    if (argument == "--epochs" && i + 1 < argc) {
      settings.epochs = std::atoi(argv[++i]);
    } else if (argument == "--checkpoints" && i + 1 < argc) {
      settings.checkpoints = argv[++i];
    } else {
      std::cerr << "usage: fashion_mnist [--epochs N] [--checkpoints FOLDER]\n";
      return argument == "--help" ? 0 : 2;
    }
  }
  try {
    torch::set_num_threads(1);  // one core per rank
    lockstep::prefer_fast_convolutions();
    train(lockstep::init_process_group(), settings);
  } catch (const std::exception& error) {
    std::cerr << "fashion_mnist: " << error.what() << '\n';
    return 1;
  }
}
