#include "checkpoint/snapshot.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace lockstep {
namespace {

Value tensors_that_share_memory() {
  const auto base = torch::arange(24.0).view({4, 6});
  return Value::dict({{"whole", base},
                      {"row", base[2]},
                      {"column", base.select(1, 3)},
                      {"last", torch::rand({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast)},
                      {"conj", torch::rand({3}, torch::kComplexFloat).conj()},
                      {"empty", torch::empty({0, 3}, torch::kLong)},
                      {"expanded", torch::ones({1}, torch::kBFloat16).expand({5})},
                      {"list", Value::list({1, "two", Value::tuple({torch::ones({}, torch::kBool), nullptr})})}});
}

TEST(Snapshot, HasTheValuesOfTheMomentItWasTaken) {
  const auto value = tensors_that_share_memory();
  const auto expected = value.at("whole").tensor().clone();
  detail::Snapshot snapshot;
  for (int i = 0; i < 2; ++i) {  // the second one uses the memory of the first
    const auto copy = snapshot.take(value);
    EXPECT_EQ(copy, value);
    EXPECT_EQ(copy.at("last").tensor().strides(), value.at("last").tensor().strides());
    value.at("whole").tensor().add_(100);
    EXPECT_TRUE(torch::equal(copy.at("whole").tensor(), expected + 100 * i));
    EXPECT_TRUE(torch::equal(copy.at("column").tensor(), expected.select(1, 3) + 100 * i));
  }
}

TEST(Snapshot, KeepsWhichTensorsShareMemory) {
  detail::Snapshot snapshot;
  const auto copy = snapshot.take(tensors_that_share_memory());
  copy.at("row").tensor().fill_(-1);
  EXPECT_TRUE(copy.at("whole").tensor()[2].eq(-1).all().item<bool>());
  EXPECT_EQ(copy.at("column").tensor()[2].item<float>(), -1);
}

}  // namespace
}  // namespace lockstep
