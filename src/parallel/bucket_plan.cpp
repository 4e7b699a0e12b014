#include <lockstep/bucket_plan.h>

#include <algorithm>
#include <map>
#include <tuple>

namespace lockstep {
namespace {

struct OpenBucket {
  std::vector<size_t> gradients;
  int64_t bytes = 0;
};

}  // namespace

BucketPlan plan_buckets(const std::vector<GradientSpec>& gradients, const BucketLimits& limits) {
  using Kind = std::tuple<c10::ScalarType, c10::DeviceType, c10::DeviceIndex>;
  std::map<Kind, OpenBucket> open;
  BucketPlan plan;
  auto close = [&](OpenBucket& bucket) {
    plan.buckets.push_back(std::move(bucket.gradients));
    bucket = {};
  };

  for (size_t index = gradients.size(); index-- > 0;) {
    const auto& gradient = gradients[index];
    int64_t bytes = gradient.elements * static_cast<int64_t>(c10::elementSize(gradient.dtype));
    auto& bucket = open[{gradient.dtype, gradient.device.type(), gradient.device.index()}];
    int64_t limit = plan.buckets.empty() ? limits.first_bytes : limits.cap_bytes;
    if (!bucket.gradients.empty() && bucket.bytes + bytes > limit) close(bucket);
    bucket.gradients.push_back(index);
    bucket.bytes += bytes;
  }
  for (auto& [kind, bucket] : open)
    if (!bucket.gradients.empty()) close(bucket);

  // A bucket is full when the first of its parameters is done.
  std::sort(plan.buckets.begin(), plan.buckets.end(), [](const auto& a, const auto& b) { return a.back() > b.back(); });
  return plan;
}

}  // namespace lockstep
