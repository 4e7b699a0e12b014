#include "parallel/ddp/bucket_plan.h"

#include <algorithm>
#include <random>

#include <gtest/gtest.h>

namespace lockstep::detail {
namespace {

using Buckets = std::vector<std::vector<size_t>>;

GradientSpec floats(int64_t elements) {
  return {elements, c10::ScalarType::Float, c10::Device(c10::kCPU)};
}

int64_t bytes_of(const GradientSpec& gradient) {
  return gradient.elements * static_cast<int64_t>(c10::elementSize(gradient.dtype));
}

TEST(BucketPlan, GoesFromTheLastParameterToTheFirst) {
  auto plan = plan_buckets({floats(10), floats(20), floats(30)});
  EXPECT_EQ(plan.buckets, (Buckets{{2, 1, 0}}));
}

TEST(BucketPlan, ClosesABucketBeforeItsLimitIsPassed) {
  auto plan =
      plan_buckets({floats(1), floats(2), floats(2), floats(2), floats(1)}, {.first_bytes = 8, .cap_bytes = 16});
  EXPECT_EQ(plan.buckets, (Buckets{{4}, {3, 2}, {1, 0}}));
}

TEST(BucketPlan, AGradientAboveTheLimitIsAlone) {
  auto plan = plan_buckets({floats(1), floats(100), floats(1)}, {.first_bytes = 16, .cap_bytes = 16});
  EXPECT_EQ(plan.buckets, (Buckets{{2}, {1}, {0}}));
}

TEST(BucketPlan, OnlyTheGradientsThatArriveLastAreInTheLastBucket) {
  const BucketLimits limits{.first_bytes = 4000, .cap_bytes = 4000, .last_bytes = 400};
  EXPECT_EQ(plan_buckets({floats(50), floats(50), floats(900)}, limits).buckets, (Buckets{{2}, {1, 0}}));
  EXPECT_EQ(plan_buckets({floats(51), floats(50), floats(899)}, limits).buckets, (Buckets{{2, 1}, {0}}));
  EXPECT_EQ(plan_buckets({floats(50), floats(900), floats(900)}, limits).buckets, (Buckets{{2}, {1}, {0}}));
}

TEST(BucketPlan, ALargeGradientThatArrivesLastDoesNotHoldBackOthers) {
  const BucketLimits limits{.first_bytes = 4000, .cap_bytes = 4000, .last_bytes = 400};
  EXPECT_EQ(plan_buckets({floats(500), floats(100), floats(100)}, limits).buckets, (Buckets{{2, 1}, {0}}));
}

TEST(BucketPlan, ASmallLastBucketIsNotWorthATinyOneBeforeIt) {
  const BucketLimits limits{.first_bytes = 4000, .cap_bytes = 4000, .last_bytes = 400};
  EXPECT_EQ(plan_buckets({floats(100), floats(24)}, limits).buckets, (Buckets{{1, 0}}));
  EXPECT_EQ(plan_buckets({floats(100), floats(25)}, limits).buckets, (Buckets{{1}, {0}}));
}

TEST(BucketPlan, KeepsDtypesAndDevicesApart) {
  auto half = floats(1);
  half.dtype = c10::ScalarType::Half;
  auto elsewhere = floats(1);
  elsewhere.device = c10::Device(c10::kCUDA, 1);
  auto plan = plan_buckets({floats(1), half, elsewhere, floats(1), half});
  EXPECT_EQ(plan.buckets, (Buckets{{2}, {4, 1}, {3, 0}}));
}

TEST(BucketPlan, LittleOnAGpuGoesTogether) {
  auto plan_for = [](c10::Device device, int64_t elements, int64_t cap_bytes = 10000) {
    GradientSpec gradient{elements, c10::ScalarType::Float, device};
    return plan_buckets({gradient, gradient}, {.first_bytes = 400, .cap_bytes = cap_bytes, .last_bytes = 4})
        .buckets.size();
  };
  EXPECT_EQ(plan_for(c10::Device(c10::kCUDA, 0), 100), 1U);
  EXPECT_EQ(plan_for(c10::Device(c10::kCUDA, 0), 101), 2U);
  EXPECT_EQ(plan_for(c10::Device(c10::kCUDA, 0), 100, 400), 2U);
  EXPECT_EQ(plan_for(c10::Device(c10::kCPU), 100), 2U);
}

TEST(BucketPlan, NothingNeedsNoBucket) {
  EXPECT_TRUE(plan_buckets({}).buckets.empty());
}

TEST(BucketPlan, HoldsEveryGradientOnceWhateverTheSizes) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    std::vector<GradientSpec> gradients(random() % 40 + 1);
    for (auto& gradient : gradients) {
      gradient = floats(random() % 3000);
      if (random() % 3 == 0) gradient.dtype = c10::ScalarType::BFloat16;
    }
    BucketLimits limits{.first_bytes = static_cast<int64_t>(random() % 4000),
                        .cap_bytes = static_cast<int64_t>(random() % 9000),
                        .last_bytes = static_cast<int64_t>(random() % 3000)};
    auto plan = plan_buckets(gradients, limits);
    auto undivided = limits;
    undivided.last_bytes = int64_t{1} << 40;
    EXPECT_LE(plan.buckets.size(), plan_buckets(gradients, undivided).buckets.size() + 1);
    std::vector<int> seen(gradients.size());
    for (const auto& bucket : plan.buckets) {
      ASSERT_FALSE(bucket.empty());
      int64_t bytes = 0;
      for (size_t index : bucket) {
        ++seen[index];
        EXPECT_EQ(gradients[index].dtype, gradients[bucket[0]].dtype);
        bytes += bytes_of(gradients[index]);
      }
      EXPECT_TRUE(std::is_sorted(bucket.rbegin(), bucket.rend()));
      EXPECT_TRUE(bucket.size() == 1 || bytes <= std::max(limits.first_bytes, limits.cap_bytes));
      const int64_t largest = bytes_of(gradients[bucket.back()]);
      if (bucket == plan.buckets.back()) {
        EXPECT_LE(bytes, std::max(limits.last_bytes, largest) + limits.last_bytes / 4);
      }
    }
    EXPECT_EQ(seen, std::vector<int>(gradients.size(), 1));
    EXPECT_EQ(plan.buckets, plan_buckets(gradients, limits).buckets);
  }
}

}  // namespace
}  // namespace lockstep::detail
