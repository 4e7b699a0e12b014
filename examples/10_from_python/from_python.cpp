// A model that begins in Python, is trained in C++ by all ranks, and returns to Python:
//
//   python3 model.py make new.pt
//   lockstep run -n 2 build/from_python new.pt trained.pt [STEPS]
//   python3 model.py check trained.pt
//
// Both files hold a state_dict. The members of the module have the names that they have in model.py.

#include <cstdlib>
#include <iostream>

#include <lockstep/lockstep.h>

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    using torch::nn::Linear, torch::nn::Tanh;
    hidden = register_module("hidden", torch::nn::Sequential(Linear(2, 64), Tanh(), Linear(64, 64), Tanh()));
    output = register_module("output", Linear(64, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) { return output(hidden->forward(x)).squeeze(1); }
  torch::nn::Sequential hidden{nullptr};
  torch::nn::Linear output{nullptr};
};
TORCH_MODULE(Net);

}  // namespace

int main(int argc, char** argv) {
  const int64_t steps = argc > 3 ? std::atoll(argv[3]) : 1000;
  if (argc < 3 || steps < 1) {
    std::cerr << "usage: from_python INPUT OUTPUT [STEPS]\n";
    return 2;
  }
  auto world = lockstep::init_process_group();
  Net net;
  lockstep::load_state_dict(*net, lockstep::load_checkpoint(argv[1]));  // the error lists all names that differ
  net->to(world.device());
  lockstep::DistributedDataParallel ddp(net, world);
  lockstep::FusedAdam optimizer(ddp.parameters(), torch::optim::AdamOptions(3e-3));

  lockstep::seed_everything(1, world);  // different points on each rank
  lockstep::MeanMetric loss(world.device());
  for (int64_t step = 1; step <= steps; ++step) {
    const auto points = torch::rand({128, 2}, world.device()) * 2 - 1;
    const auto heights = (4 * points.select(1, 0)).sin() * (3 * points.select(1, 1)).cos();
    optimizer.zero_grad();
    const auto batch_loss = torch::mse_loss(ddp(points), heights);
    batch_loss.backward();
    optimizer.step();

    loss.add(batch_loss.detach());
    if (step != 1 && step % 100 != 0 && step != steps) continue;
    const double mean = loss.compute(world);  // collective
    lockstep::print(world, "step ", step, "  loss ", mean);
    loss.reset();
  }
  if (world.rank() == 0) lockstep::save_checkpoint(argv[2], lockstep::state_dict(*net));
}
