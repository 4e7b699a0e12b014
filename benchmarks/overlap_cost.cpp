// What backward hides of its communication: lockstep run -n 2 build/benchmarks/overlap_cost [gloo|shm]
//
// Steps (forward and backward) of pairs of wrappers of the same model take turns, one of which communicates as lockstep
// does by default, and the other in the way that the first replaces:
//
//   last bucket   the gradients that arrive last in a bucket of their own; all in one bucket with the ones before
//   batch norm    calls of SyncBatchNorm layers in backward on a side group; in the queue of the gradient buckets
//   marks         marks of used parameters in the hook's own all-reduce; in an all-reduce after it
//   power_sgd     the second round of a bucket starts when the next bucket is full; at the end of backward
//
// Medians of rank 0, and the ratio of the first to the second in the same round, with its 10th and 90th percentile.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>

#include <lockstep/lockstep.h>

namespace {

namespace nn = torch::nn;
using Wrapper = lockstep::DistributedDataParallel<nn::SequentialImpl>;

constexpr int kRounds = 25;

/// Adds linear layers with ReLU between them.
void add_linears(nn::Sequential& model, const std::vector<int64_t>& widths) {
  for (size_t i = 1; i < widths.size(); ++i) {
    if (i > 1) model->push_back(nn::ReLU());
    model->push_back(nn::Linear(widths[i - 1], widths[i]));
  }
}

void add_convolution(nn::Sequential& model, int64_t from, int64_t to) {
  model->push_back(nn::Conv2d(nn::Conv2dOptions(from, to, 3).padding(1).bias(false)));
  model->push_back(nn::BatchNorm2d(to));
  model->push_back(nn::ReLU());
}

nn::Sequential mlp(const std::vector<int64_t>& widths) {
  nn::Sequential model;
  add_linears(model, widths);
  return model;
}

/// The model `mlp` of lockstep bench ddp.
nn::Sequential wide_mlp() {
  return mlp({784, 2048, 2048, 2048, 10});
}

/// The model `cnn` of lockstep bench ddp, without the biases of its convolutions.
nn::Sequential cnn() {
  nn::Sequential model;
  add_convolution(model, 1, 32);
  model->push_back(nn::MaxPool2d(2));
  add_convolution(model, 32, 64);
  model->push_back(nn::MaxPool2d(2));
  model->push_back(nn::Flatten());
  add_linears(model, {3136, 128, 10});
  return model;
}

/// Most parameters are behind most of the computation, as in VGG.
nn::Sequential deep_cnn() {
  nn::Sequential model;
  add_convolution(model, 1, 16);
  model->push_back(nn::MaxPool2d(2));
  for (int i = 0; i < 6; ++i) add_convolution(model, 16, 16);
  model->push_back(nn::MaxPool2d(2));
  model->push_back(nn::Flatten());
  add_linears(model, {784, 2048, 2048, 10});
  return model;
}

double percentile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1))];
}

double step_ms(Wrapper& ddp, const torch::Tensor& x) {
  for (const auto& parameter : ddp.parameters()) parameter.mutable_grad().reset();
  const auto begin = std::chrono::steady_clock::now();
  ddp(x).square().sum().backward();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

void compare(const char* name, const lockstep::ProcessGroup& world, Wrapper& now, Wrapper& before,
             const torch::Tensor& x) {
  std::vector<double> times_now, times_before, ratios;
  for (int round = -5; round < kRounds; ++round) {
    world.barrier();
    const double a = step_ms(now, x);
    world.barrier();
    const double b = step_ms(before, x);
    if (round < 0) continue;
    times_now.push_back(a);
    times_before.push_back(b);
    ratios.push_back(a / b);
  }
  if (world.rank() == 0)
    std::printf("%-24s %8.2f ms a step, %8.2f ms  ratio %.3f (%.3f to %.3f)\n", name, percentile(times_now, 0.5),
                percentile(times_before, 0.5), percentile(ratios, 0.5), percentile(ratios, 0.1),
                percentile(ratios, 0.9));
}

void compare_last_bucket(const char* name, const lockstep::ProcessGroup& world, nn::Sequential (*make)(),
                         const torch::Tensor& x) {
  Wrapper now(make().ptr(), world), before(make().ptr(), world, {.buckets = {.last_bytes = int64_t{1} << 40}});
  compare(name, world, now, before, x);
}

/// A layer that is converted after the model was wrapped has no side group. Each wrapper has a group of its own.
void compare_batch_norm(const lockstep::ProcessGroup& world, const torch::Tensor& x) {
  const auto one = world.new_group({0, 1}), other = world.new_group({0, 1});
  auto converted_first = deep_cnn(), wrapped_first = deep_cnn();
  lockstep::convert_sync_batchnorm(*converted_first, one);
  Wrapper now(converted_first.ptr(), one), before(wrapped_first.ptr(), other);
  lockstep::convert_sync_batchnorm(*wrapped_first, other);
  compare("batch norm", world, now, before, x);
}

/// A hook inside of a user's function does not carry the marks.
void compare_marks(const lockstep::ProcessGroup& world, const torch::Tensor& x) {
  const auto small = [] { return mlp({784, 128, 128, 10}); };
  Wrapper now(small().ptr(), world), before(small().ptr(), world);
  now.register_comm_hook(lockstep::all_reduce_hook());
  before.register_comm_hook(
      [hook = lockstep::all_reduce_hook()](const auto& bucket, const auto& group) { return hook(bucket, group); });
  compare("marks", world, now, before, x);
}

/// A PowerSGD hook that sees only one bucket starts the second round at the end of backward. The graph is static, so
/// that no side sends marks in an all-reduce of their own.
void compare_power_sgd(const lockstep::ProcessGroup& world, const torch::Tensor& x) {
  const auto deep = [] { return mlp({784, 768, 768, 768, 768, 768, 768, 768, 10}); };
  const lockstep::DistributedDataParallelOptions options{.static_graph = true, .buckets = {.cap_bytes = 3 << 20}};
  Wrapper now(deep().ptr(), world, options), before(deep().ptr(), world, options);
  const lockstep::PowerSgdOptions power{.rank = 4, .start_iteration = 2};
  now.register_comm_hook(lockstep::power_sgd(power));
  auto hooks = std::make_shared<std::map<size_t, lockstep::CommHook>>();
  before.register_comm_hook([hooks, power](const lockstep::GradientBucket& bucket, const auto& group) {
    auto& hook = (*hooks)[bucket.index];
    if (!hook) hook = lockstep::power_sgd(power);
    return hook(bucket, group);
  });
  compare("power_sgd", world, now, before, x);
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  torch::set_num_threads(1);
  const auto world = lockstep::init_process_group({.backend = argc > 1 ? argv[1] : "auto"});
  const auto rows = torch::randn({32, 784}), images = torch::randn({32, 1, 28, 28});
  const auto wants = [&](const char* name) { return argc < 3 || std::strcmp(argv[2], name) == 0; };
  if (world.rank() == 0) std::printf("backend %s\n", world.backend_name().c_str());
  if (wants("last")) {
    compare_last_bucket("last bucket, cnn", world, cnn, images);
    compare_last_bucket("last bucket, mlp", world, wide_mlp, rows);
    compare_last_bucket("last bucket, deep cnn", world, deep_cnn, images);
  }
  if (wants("norm")) compare_batch_norm(world, images);
  if (wants("marks")) compare_marks(world, rows);
  if (wants("power")) compare_power_sgd(world, rows);
}
