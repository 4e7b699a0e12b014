// What a user's first program does, built as a user would build it.
#include <lockstep/lockstep.h>

struct NetImpl : torch::nn::Module {
  NetImpl() { layer = register_module("layer", torch::nn::Linear(3, 1)); }
  torch::Tensor forward(torch::Tensor x) { return layer(x); }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Net);

int main() {
  std::atomic<int> right{0};
  lockstep::run_threads(2, [&](lockstep::ProcessGroup world) {
    auto t = torch::full({4}, world.rank() + 1.0);
    world.all_reduce(t);
    Net net;
    lockstep::DistributedDataParallel ddp(net, world, {.find_unused_parameters = false});
    lockstep::DistributedSampler sampler(10, world, {.shuffle = false});
    ddp(torch::ones({1, 3})).sum().backward();
    if (torch::equal(t, torch::full({4}, 3.0)) && ddp->layer->weight.grad().defined() && sampler.size() == 5) ++right;
  });
  try {
    lockstep::run_threads(0, [](lockstep::ProcessGroup) {});
  } catch (const lockstep::UsageError&) {  // the kinds of error survive the border of the library
    ++right;
  }
  std::cout << "lockstep " << LOCKSTEP_VERSION_STRING << ": " << right << " of 3 right\n";
  return right == 3 ? 0 : 1;
}
