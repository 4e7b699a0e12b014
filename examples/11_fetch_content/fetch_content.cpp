// A program whose CMakeLists.txt gets lockstep by FetchContent. Two ranks, which are threads of this process, train a
// model for a few steps: no launcher is needed.
//
//   cmake -B build -D CMAKE_BUILD_TYPE=Release && cmake --build build && build/fetch_content

#include <ATen/CPUGeneratorImpl.h>
#include <lockstep/lockstep.h>

int main() {
  lockstep::run_threads(2, [](lockstep::ProcessGroup world) {
    lockstep::DistributedDataParallel ddp(torch::nn::Linear(8, 1), world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.05);
    auto random = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(world.rank()));  // its own data
    for (int step = 0; step <= 60; ++step) {
      const auto input = torch::randn({32, 8}, random, torch::kFloat);
      optimizer.zero_grad();
      auto loss = (ddp(input) - input.sum(1, /*keepdim=*/true)).square().mean();
      loss.backward();  // averages the gradients over the ranks
      optimizer.step();
      if (step % 20 != 0) continue;
      const double mean = world.all_reduce(loss.item<double>(), lockstep::ReduceOp::kAvg);
      lockstep::print(world, "step ", step, "  loss ", mean);
    }
  });
}
