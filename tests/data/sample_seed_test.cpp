#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/data_loader.h>

namespace lockstep {
namespace {

TEST(SampleSeed, UsesAll64Bits) {
  auto random = at::detail::createCPUGenerator();
  const auto draw = [&](uint64_t seed) {
    detail::seed_generator(random, seed);
    return torch::rand({8}, random, torch::kDouble);
  };
  const uint64_t seed = 12345;
  EXPECT_TRUE(torch::equal(draw(seed), draw(seed)));
  EXPECT_FALSE(torch::equal(draw(seed), draw(seed + (uint64_t{1} << 32))));
  const auto many = torch::cat({draw(seed), draw(seed + 1)});
  EXPECT_LT(many.max().item<double>(), 1);
  EXPECT_GE(many.min().item<double>(), 0);
  EXPECT_GT(many.std().item<double>(), 0.1);
}

TEST(SampleSeed, ForgetsTheNormalSampleOfTheSampleBefore) {
  auto random = at::detail::createCPUGenerator();
  const auto draw = [&] {
    detail::seed_generator(random, 1);
    return torch::randn({1}, random, torch::kDouble).item<double>();  // computes two and keeps one for the next call
  };
  const double first = draw();
  EXPECT_EQ(draw(), first);
}

}  // namespace
}  // namespace lockstep
