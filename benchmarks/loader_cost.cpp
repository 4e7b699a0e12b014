// How long a loop waits for a batch, with lockstep's DataLoader and with LibTorch's: loader_cost
//
// 64 images of 1x28x28 a batch, from memory, as they are and shifted at random, which takes several small operations
// each. An epoch is 200 batches; the loop does nothing with them, so this is what the loaders can deliver at most.
// Sides alternate; medians, and the ratio of LibTorch's time to ours, with the 10th and 90th percentile of the rounds.
//
// With a GPU, also how long a step takes that multiplies matrices and needs a batch of 64 MB on the GPU: copied by the
// loader ahead of the loop, copied in the loop, and without a copy. The ratios are to the step without a copy.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

#include <lockstep/lockstep.h>

namespace {

constexpr size_t kImages = 12800, kBatch = 64;
constexpr int kRounds = 15;

using torch::data::Example;

struct Plain : torch::data::datasets::Dataset<Plain> {
  Example<> get(size_t index) override {
    const auto i = static_cast<int64_t>(index);
    return {images[i], targets[i]};
  }
  torch::optional<size_t> size() const override { return kImages; }

  torch::Tensor images = torch::rand({static_cast<int64_t>(kImages), 1, 28, 28});
  torch::Tensor targets = torch::randint(10, {static_cast<int64_t>(kImages)});
};

struct Shifted : torch::data::datasets::Dataset<Shifted> {
  Example<> get(size_t index) override {
    auto sample = plain.get(index);
    const auto shift = torch::randint(-2, 3, {2});
    sample.data = torch::roll(sample.data, {shift[0].item<int64_t>(), shift[1].item<int64_t>()}, {1, 2}) * 2 - 1;
    return sample;
  }
  torch::optional<size_t> size() const override { return kImages; }

  Plain plain{};
};

template <class Loader>
double us_per_batch(Loader& loader) {
  const auto begin = std::chrono::steady_clock::now();
  int64_t samples = 0;
  for (auto& batch : loader) samples += batch.data.size(0);
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  if (samples != static_cast<int64_t>(kImages)) throw std::runtime_error("samples are missing");
  return took.count() / (kImages / kBatch);
}

double percentile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1))];
}

template <class Dataset>
void compare(const char* what, Dataset dataset, int workers) {
  lockstep::DistributedSampler sampler(dataset.size().value(), 0, 1);
  sampler.set_epoch(0);
  lockstep::DataLoader ours(dataset, sampler, {.batch_size = kBatch, .num_workers = workers});
  auto theirs =
      torch::data::make_data_loader(dataset.map(torch::data::transforms::Stack<>()), sampler,
                                    torch::data::DataLoaderOptions(kBatch).workers(static_cast<size_t>(workers)));
  std::vector<double> mine, others, ratios;
  for (int round = -2; round < kRounds; ++round) {
    const double a = us_per_batch(ours), b = us_per_batch(*theirs);
    if (round < 0) continue;
    mine.push_back(a);
    others.push_back(b);
    ratios.push_back(b / a);
  }
  std::printf("%-8s  %d workers  lockstep %7.1f us a batch  LibTorch %7.1f us  ratio %5.2f (%.2f to %.2f)\n", what,
              workers, percentile(mine, 0.5), percentile(others, 0.5), percentile(ratios, 0.5), percentile(ratios, 0.1),
              percentile(ratios, 0.9));
}

/// Large batches in pinned memory, so that reading them takes no time.
struct Pinned {
  torch::Tensor gather(c10::ArrayRef<size_t>) const { return batch; }
  torch::optional<size_t> size() const { return 100; }

  torch::Tensor batch = torch::rand({16 << 20}).pin_memory();
};

void compare_copies() {
  const torch::Device gpu("cuda");
  const auto factor = torch::rand({4096, 4096}, gpu), there = torch::rand({16 << 20}, gpu);
  const auto us_per_step = [&](auto& loader, const auto& batch_of) {
    torch::cuda::synchronize();
    const auto begin = std::chrono::steady_clock::now();
    torch::Tensor sum;
    for (auto& batch : loader) {
      sum = batch_of(batch).sum();
      auto product = torch::matmul(factor, factor);
    }
    torch::cuda::synchronize();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    return took.count() / 100;
  };
  const auto copied = [&](const torch::Tensor& batch) { return batch.to(gpu, /*non_blocking=*/true); };
  const lockstep::DistributedSampler sampler(100, 0, 1);
  lockstep::DataLoader ahead_loader(Pinned(), sampler, {.device = gpu}), loader(Pinned(), sampler);
  std::vector<double> ahead, in_loop, none, ahead_ratio, in_loop_ratio;
  for (int round = -2; round < kRounds; ++round) {
    const double a = us_per_step(ahead_loader, [](const torch::Tensor& batch) { return batch; });
    const double b = us_per_step(loader, copied);
    const double c = us_per_step(loader, [&](const torch::Tensor&) { return there; });
    if (round < 0) continue;
    ahead.push_back(a);
    in_loop.push_back(b);
    none.push_back(c);
    ahead_ratio.push_back(a / c);
    in_loop_ratio.push_back(b / c);
  }
  std::printf(
      "GPU step  copied ahead %6.0f us (ratio %.2f)  copied in the loop %6.0f us (ratio %.2f)  no copy %6.0f us\n",
      percentile(ahead, 0.5), percentile(ahead_ratio, 0.5), percentile(in_loop, 0.5), percentile(in_loop_ratio, 0.5),
      percentile(none, 0.5));
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  for (int workers : {0, 1, 2}) compare("plain", Plain(), workers);
  for (int workers : {0, 1, 2}) compare("shifted", Shifted(), workers);
  if (torch::cuda::is_available()) compare_copies();
}
