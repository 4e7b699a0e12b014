#pragma once

#include <cstdint>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <lockstep/ddp_options.h>

namespace lockstep::detail {

/// The properties of a gradient that the plan depends on.
struct GradientSpec {
  int64_t elements = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Device device{c10::kCPU};
};

/// Puts gradients into buckets in `order`, the expected order in which they become ready; it holds every index once.
/// All gradients of a bucket have one dtype and device. A bucket exceeds its limit only with a single gradient. The
/// last bucket may also exceed limits.last_bytes by a quarter, so that no tiny bucket is made. Pure: equal arguments
/// give equal plans.
BucketPlan plan_buckets(const std::vector<GradientSpec>& gradients, const BucketLimits& limits,
                        const std::vector<size_t>& order);
/// The order of a model whose modules are used as they were registered: from the last parameter to the first.
BucketPlan plan_buckets(const std::vector<GradientSpec>& gradients, const BucketLimits& limits = {});

}  // namespace lockstep::detail
