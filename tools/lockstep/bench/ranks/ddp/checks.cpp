#include "bench/ranks/ddp/checks.h"

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>

namespace lockstep::bench {
namespace {

/// Of a mean, whose terms may be added in another order.
constexpr double kRounding = 1e-4;
/// In front of a BatchNorm a bias has no gradient but what rounding leaves, which is small beside those of others.
constexpr double kNoise = 1e-6;

std::vector<at::Tensor> gradients_of(Training& training, const Batch& batch) {
  training.reset();
  training.step(batch);
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : training.parameters()) gradients.push_back(parameter.grad().to(at::kDouble));
  return gradients;
}

double largest(const at::Tensor& tensor) {
  return tensor.abs().max().item<double>();
}

/// Every bit counts: each step can be undone.
int64_t fingerprint(const at::Tensor& tensor) {
  const auto dense = tensor.contiguous();
  const auto* bytes = static_cast<const char*>(dense.data_ptr());
  uint64_t hash = 0;
  for (size_t done = 0; done < dense.nbytes(); done += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + done, std::min(sizeof word, dense.nbytes() - done));
    hash = (hash ^ word) * 0x9e3779b97f4a7c15U;
    hash ^= hash >> 32;
  }
  return static_cast<int64_t>(hash);
}

}  // namespace

int64_t count_wrong_gradients(Training& ddp, Training& local, const std::string& model, int rank, int ranks) {
  auto expected = gradients_of(local, make_batch(model, 0));
  for (int other = 1; other < ranks; ++other) {
    const auto gradients = gradients_of(local, make_batch(model, other));
    for (size_t i = 0; i < expected.size(); ++i) expected[i] += gradients[i];
  }
  double most = 0;
  for (const auto& gradient : expected) most = std::max(most, largest(gradient.div_(ranks)));
  const auto got = gradients_of(ddp, make_batch(model, rank));
  int64_t wrong = 0;
  for (size_t i = 0; i < expected.size(); ++i)
    if (!(largest(got[i] - expected[i]) <= kRounding * largest(expected[i]) + kNoise * most)) ++wrong;  // NaN, too
  return wrong;
}

int64_t count_out_of_step(const std::vector<at::Tensor>& tensors, CommonPage& page) {
  int64_t wrong = 0;
  for (const auto& tensor : tensors) {
    const int64_t mine = fingerprint(tensor);
    if (page.decided(mine) != mine) ++wrong;
  }
  return wrong;
}

}  // namespace lockstep::bench
