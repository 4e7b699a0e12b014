// One process trains on several devices: on all GPUs of the host, or with two replicas on the CPU. DataParallel splits
// each batch, runs a part of it on each replica, and adds the gradients to those of the network.
//
//   build/data_parallel [STEPS]
//
// One process per device with DistributedDataParallel is faster, and also works on several hosts.

#include <cstdlib>
#include <iostream>
#include <numbers>

#include <lockstep/lockstep.h>

namespace {

/// Returns random points on the three arms of a spiral. The label of a point is the number of its arm.
torch::data::Example<> spiral(int64_t count) {
  const auto arm = torch::randint(3, {count}, torch::kLong);
  const auto radius = torch::rand({count});
  const auto angle = 5 * radius + 2 * std::numbers::pi / 3 * arm + 0.1 * torch::randn({count});
  return {torch::stack({radius * angle.cos(), radius * angle.sin()}, 1), arm};
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t steps = argc > 1 ? std::atoll(argv[1]) : 500;
  if (steps < 1) {
    std::cerr << "usage: data_parallel [STEPS]\n";
    return 2;
  }
  torch::set_num_threads(1);  // one core per replica
  torch::manual_seed(1);

  lockstep::DataParallelOptions options;  // by default all GPUs
  if (!torch::cuda::is_available()) options.devices = {torch::kCPU, torch::kCPU};
  const torch::Device device = torch::cuda::is_available() ? torch::Device("cuda:0") : torch::kCPU;

  using torch::nn::Linear, torch::nn::ReLU;
  torch::nn::Sequential net(Linear(2, 128), ReLU(), Linear(128, 128), ReLU(), Linear(128, 3));
  net->to(device);
  lockstep::DataParallel parallel(net, options);
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(2e-3));
  std::cout << "Training with " << parallel.devices().size() << " replicas on " << device << std::endl;

  lockstep::MeanMetric loss(device);
  lockstep::Accuracy accuracy(device);
  for (int64_t step = 1; step <= steps; ++step) {
    const auto batch = spiral(512);
    const auto target = batch.target.to(device);
    optimizer.zero_grad();
    const auto output = parallel(batch.data);  // gathered on the first device
    const auto batch_loss = torch::nn::functional::cross_entropy(output, target);
    batch_loss.backward();  // the network's own gradients are the sum over the replicas
    optimizer.step();

    loss.add(batch_loss.detach());
    accuracy.add(output.detach(), target);
    if (step != 1 && step % 50 != 0 && step != steps) continue;
    std::cout << "step " << step << "  loss " << loss.compute() << "  accuracy " << accuracy.compute() << std::endl;
    loss.reset();
    accuracy.reset();
  }
}
