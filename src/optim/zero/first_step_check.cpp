#include "optim/zero/first_step_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "optim/layout.h"

namespace lockstep::detail {
namespace {

// Relative difference of the norm or the sum. Rounding makes averages and clipped gradients of different processors
// differ by less: a bfloat16 by at most 0.8 %. Gradients of different batches differ by far more.
constexpr double kTolerance = 1e-3, kToleranceOfHalf = 2e-2;

// Elements that are converted to float64 at once: a copy of a whole parameter might not fit into memory.
constexpr int64_t kSummaryPiece = 1 << 20;

/// The properties of a tensor that ranks compare. The sum depends on the signs of the elements, the norm does not.
struct Summary {
  double sum, norm;
  bool is_finite() const { return std::isfinite(sum) && std::isfinite(norm); }
};
constexpr int64_t kSummarySize = sizeof(Summary) / sizeof(double);

/// Adds the numbers of a Summary, which stay on the tensor's device; zeros if there are no elements to compare.
void add_summary(const at::Tensor& tensor, const c10::Device& device, std::vector<at::Tensor>& numbers) {
  if (!tensor.defined() || tensor.layout() != c10::kStrided) {
    numbers.push_back(at::zeros({kSummarySize}, at::TensorOptions(at::kDouble).device(device)));
    return;
  }
  const auto real = (tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor).detach();
  const auto row = real.is_non_overlapping_and_dense() ? as_row(real) : real.reshape({-1});
  auto sum = at::zeros({}, row.options().dtype(at::kDouble)), squares = at::zeros_like(sum);
  for (int64_t begin = 0; begin < row.numel(); begin += kSummaryPiece) {
    const auto piece = row.narrow(0, begin, std::min(kSummaryPiece, row.numel() - begin)).to(at::kDouble);
    sum += piece.sum();
    squares += piece.dot(piece);
  }
  numbers.push_back(at::stack({sum, squares.sqrt()}));
}

bool differ(const Summary& a, const Summary& b, double tolerance) {
  if (!a.is_finite() || !b.is_finite()) return a.is_finite() != b.is_finite();
  const double norm = std::max(a.norm, b.norm), sum = std::max(std::abs(a.sum), std::abs(b.sum));
  return std::abs(a.norm - b.norm) > tolerance * norm || std::abs(a.sum - b.sum) > tolerance * std::max(norm, sum);
}

}  // namespace

bool check_alike_on_all_ranks(const ShardedParameters& parameters) {
  const auto& group = parameters.group();
  if (group.size() == 1) return true;
  std::vector<at::Tensor> numbers;
  for (size_t i = 0; i < parameters.size(); ++i) {
    add_summary(parameters.tensor(i), group.device(), numbers);
    add_summary(parameters.tensor(i).grad(), group.device(), numbers);
  }
  const auto own = at::cat(numbers);
  auto all = at::empty({group.size() * own.numel()}, own.options());
  group.all_gather(all, own, kInStep);
  all = all.cpu();
  const auto count = static_cast<int64_t>(numbers.size());
  const auto summary = [&](int rank, int64_t i) {
    Summary result{};
    std::memcpy(&result, all.data_ptr<double>() + (rank * count + i) * kSummarySize, sizeof result);
    return result;
  };
  bool is_finite = true;
  for (int64_t i = 0; i < count; ++i)
    for (int rank = 0; rank < group.size(); ++rank) {
      const auto first = summary(0, i), other = summary(rank, i);
      const auto parameter = static_cast<size_t>(i / 2);
      const bool is_gradient = i % 2 != 0;
      is_finite = is_finite && (!is_gradient || other.is_finite());
      const bool is_half = parameters.tensor(parameter).element_size() == 2;
      if (!differ(first, other, is_half ? kToleranceOfHalf : kTolerance)) continue;
      throw MismatchError(group.rank(),
                          text("step of ZeroRedundancyOptimizer: ", is_gradient ? "the gradient of " : "",
                               parameters.name_of(parameter), " has norm ", first.norm, " and sum ", first.sum,
                               " on rank 0, norm ", other.norm, " and sum ", other.sum, " on rank ", rank,
                               ", but each rank updates a part of it for all ranks; wrap the model in "
                               "DistributedDataParallel, ",
                               is_gradient ? "which averages gradients" : "which copies rank 0's parameters",
                               ", and give parameters of its option ignore an optimizer of their own"));
    }
  return is_finite;
}

}  // namespace lockstep::detail
