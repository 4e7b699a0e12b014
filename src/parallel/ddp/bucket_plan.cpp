#include "parallel/ddp/bucket_plan.h"

#include <algorithm>
#include <map>
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

/// Returns the size limit of the first bucket. A small model on a GPU gets a single bucket: launching one more
/// all-reduce costs the host more than the overlap saves.
int64_t first_limit(const std::vector<GradientSpec>& gradients, const BucketLimits& limits) {
  int64_t all = 0;
  for (const auto& gradient : gradients) {
    if (!gradient.device.is_cuda()) return limits.first_bytes;
    all += gradient_bytes(gradient);
  }
  return all <= std::min(2 * limits.first_bytes, limits.cap_bytes) ? all : limits.first_bytes;
}

}  // namespace

BucketPlan plan_buckets(const std::vector<GradientSpec>& gradients, const BucketLimits& limits,
                        const std::vector<size_t>& order) {
  using Kind = std::tuple<c10::ScalarType, c10::DeviceType, c10::DeviceIndex>;
  const int64_t first_bytes = first_limit(gradients, limits);
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
    const int64_t limit = closed.empty() ? first_bytes : limits.cap_bytes;
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
  return plan;
}

BucketPlan plan_buckets(const std::vector<GradientSpec>& gradients, const BucketLimits& limits) {
  std::vector<size_t> order;
  for (size_t index = gradients.size(); index-- > 0;) order.push_back(index);
  return plan_buckets(gradients, limits, order);
}

}  // namespace lockstep::detail
