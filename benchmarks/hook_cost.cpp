// What DistributedDataParallel costs a parameter beyond plain autograd: hook_cost
//
// A model of 1000 parameters of 64 elements each, on one rank, so that nothing is waited for. Forward and backward with
// the wrapper and without it, alternating; medians, with the 10th and 90th percentile.

#include <algorithm>
#include <chrono>
#include <cstdio>

#include <lockstep/lockstep.h>

namespace {

constexpr int kParameters = 1000;
constexpr int kRounds = 201;

struct ManyImpl : torch::nn::Module {
  ManyImpl() {
    for (int i = 0; i < kParameters; ++i)
      parameters_of_mine.push_back(register_parameter(std::to_string(i), torch::randn({64})));
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::cat(parameters_of_mine).dot(x); }

  std::vector<torch::Tensor> parameters_of_mine;
};
TORCH_MODULE(Many);

template <class Model>
double step_us(Model& model, const std::vector<torch::Tensor>& parameters, const torch::Tensor& x) {
  for (const auto& parameter : parameters) parameter.mutable_grad().reset();
  const auto begin = std::chrono::steady_clock::now();
  model(x).backward();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

double percentile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1))];
}

void report(const char* what, const std::vector<double>& values) {
  std::printf("%-28s %8.3f us a parameter (%.3f to %.3f)\n", what, percentile(values, 0.5) / kParameters,
              percentile(values, 0.1) / kParameters, percentile(values, 0.9) / kParameters);
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  lockstep::run_threads(1, [](lockstep::ProcessGroup world) {
    Many plain, wrapped;
    lockstep::DistributedDataParallel ddp(wrapped, world);
    const auto x = torch::randn({64 * kParameters});
    const auto plain_parameters = plain->parameters(), wrapped_parameters = ddp.parameters();
    std::vector<double> without, with, difference;
    for (int round = -10; round < kRounds; ++round) {
      const double a = step_us(plain, plain_parameters, x), b = step_us(ddp, wrapped_parameters, x);
      if (round < 0) continue;
      without.push_back(a);
      with.push_back(b);
      difference.push_back(b - a);
    }
    report("autograd", without);
    report("DistributedDataParallel", with);
    report("the difference", difference);
  });
}
