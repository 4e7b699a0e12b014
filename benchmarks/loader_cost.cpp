// How long a loop waits for a batch, with lockstep's DataLoader and with LibTorch's: loader_cost
//
// 64 images of 1x28x28 a batch, from memory, as they are and shifted at random, which takes several small operations
// each. An epoch is 200 batches; the loop does nothing with them, so this is what the loaders can deliver at most.
// Sides alternate; medians, and the ratio of LibTorch's time to ours, with the 10th and 90th percentile of the rounds.

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
  lockstep::DataLoader ours(dataset, sampler, {.batch_size = kBatch, .workers = workers});
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

}  // namespace

int main() {
  torch::set_num_threads(1);
  for (int workers : {0, 1, 2}) compare("plain", Plain(), workers);
  for (int workers : {0, 1, 2}) compare("shifted", Shifted(), workers);
}
