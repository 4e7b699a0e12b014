#pragma once

#include <cstdint>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <lockstep/export.h>

namespace lockstep {

/// What the plan needs to know of a parameter's gradient.
struct GradientSpec {
  int64_t elements = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Device device{c10::kCPU};
};

struct BucketLimits {
  int64_t first_bytes = 1 << 20;  // small, so that the first all-reduce starts early in backward; on a GPU, where all
                                  // gradients together are at most twice as much, they go in one bucket
  int64_t cap_bytes = 25 << 20;
};

/// Which gradients are reduced together, as indices into the list of parameters.
struct BucketPlan {
  std::vector<std::vector<size_t>> buckets;  // in the order in which they are expected to fill

  friend bool operator==(const BucketPlan&, const BucketPlan&) = default;
};

/// Puts gradients into buckets in the order in which they become ready: of one dtype and device each, and none above
/// its limit unless a single gradient is. Pure: equal arguments give equal plans. `order` holds every index once.
LOCKSTEP_EXPORT BucketPlan plan_buckets(const std::vector<GradientSpec>& gradients, const BucketLimits& limits,
                                        const std::vector<size_t>& order);
/// The order of a model whose modules are used as they were registered: from the last parameter to the first.
LOCKSTEP_EXPORT BucketPlan plan_buckets(const std::vector<GradientSpec>& gradients, const BucketLimits& limits = {});

}  // namespace lockstep
