#include "parallel/ddp/bucket_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

namespace lockstep::detail {
namespace {

struct OpenBucket {
  std::vector<size_t> gradients;
  int64_t bytes = 0;
  size_t full_at = 0;  // position in the order at which its last gradient arrives
};

int64_t gradient_bytes(const GradientSpec& gradient) {
  return gradient.elements * static_cast<int64_t>(c10::elementSize(gradient.dtype));
}

/// Whether all gradients are on a GPU and small. They get a single bucket: launching one more all-reduce costs the host
/// more than the overlap saves.
bool fits_one_bucket(const std::vector<GradientSpec>& gradients, const BucketLimits& limits) {
  int64_t all = 0;
  for (const auto& gradient : gradients) {
    if (!gradient.device.is_cuda()) return false;
    all += gradient_bytes(gradient);
  }
  return all <= std::min(2 * limits.first_bytes, limits.cap_bytes);
}

/// Divides the bucket that is full last, because no computation is left to hide its reduction: only the gradients that
/// arrive last stay in it, at most `last_bytes`, or one gradient. The other gradients become the bucket before it, if
/// they are worth one more reduction.
void split_last(BucketPlan& plan, const std::vector<GradientSpec>& gradients, int64_t last_bytes) {
  if (plan.buckets.empty()) return;
  const auto bytes_of = [&](size_t index) { return gradient_bytes(gradients[index]); };
  auto& all = plan.buckets.back();
  auto first = all.end() - 1;  // the last bucket begins here
  int64_t kept = bytes_of(*first);
  while (first != all.begin() && kept + bytes_of(*(first - 1)) <= last_bytes) kept += bytes_of(*--first);
  const int64_t earlier =
      std::accumulate(all.begin(), first, int64_t{0}, [&](int64_t sum, size_t index) { return sum + bytes_of(index); });
  if (first == all.begin() || earlier < last_bytes / 4) return;
  std::vector<size_t> last(first, all.end());
  all.erase(first, all.end());
  plan.buckets.push_back(std::move(last));
}

}  // namespace

BucketPlan plan_buckets(const std::vector<GradientSpec>& gradients, const BucketLimits& limits,
                        const std::vector<size_t>& order) {
  using Kind = std::tuple<c10::ScalarType, c10::DeviceType, c10::DeviceIndex>;
  const bool is_one_bucket = fits_one_bucket(gradients, limits);
  std::map<Kind, OpenBucket> open;
  std::vector<OpenBucket> closed;
  auto close = [&](OpenBucket& bucket) {
    closed.push_back(std::move(bucket));
    bucket = {};
  };

  for (size_t at = 0; at < order.size(); ++at) {
    const auto& gradient = gradients[order[at]];
    const int64_t bytes = gradient_bytes(gradient);
    auto& bucket = open[{gradient.dtype, gradient.device.type(), gradient.device.index()}];
    const int64_t limit = closed.empty() && !is_one_bucket ? limits.first_bytes : limits.cap_bytes;
    if (!bucket.gradients.empty() && bucket.bytes + bytes > limit) close(bucket);
    bucket.gradients.push_back(order[at]);
    bucket.bytes += bytes;
    bucket.full_at = at;
  }
  for (auto& [kind, bucket] : open)
    if (!bucket.gradients.empty()) close(bucket);

  std::sort(closed.begin(), closed.end(), [](const auto& a, const auto& b) { return a.full_at < b.full_at; });
  BucketPlan plan;
  for (auto& bucket : closed) plan.buckets.push_back(std::move(bucket.gradients));
  if (!is_one_bucket) split_last(plan, gradients, limits.last_bytes);
  return plan;
}

BucketPlan plan_buckets(const std::vector<GradientSpec>& gradients, const BucketLimits& limits) {
  std::vector<size_t> order;
  for (size_t index = gradients.size(); index-- > 0;) order.push_back(index);
  return plan_buckets(gradients, limits, order);
}

}  // namespace lockstep::detail
