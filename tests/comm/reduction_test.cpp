#include "backends/common/reduction.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "backends/common/narrow_floats.h"
#include "backends/common/narrow_sums.h"
#include "backends/common/slices.h"
#include "comm/oracle.h"
#include "support/torch_threads.h"

namespace lockstep {
namespace {

TEST(Reduction, AgreesWithAPlainLoopAroundTheBlockSize) {
  for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte, at::kChar, at::kShort, at::kInt,
                     at::kLong, at::kBool}) {
    for (auto op : reduce_ops_for(dtype)) {
      for (int64_t n : {1, 3, 1023, 1024, 1025, 5000}) {
        auto inputs = values_of_all(5, dtype, {n});
        std::vector<const void*> pointers;
        for (const auto& input : inputs) pointers.push_back(input.data_ptr());
        auto expected = reduced(inputs, op);
        auto output = at::empty({n}, dtype);
        reduce_elements(output.data_ptr(), pointers, n, dtype, op);
        EXPECT_TRUE(at::equal(output, expected)) << at::toString(dtype) << ' ' << name_of(op) << ' ' << n;
        reduce_elements(inputs[2].data_ptr(), pointers, n, dtype, op);
        EXPECT_TRUE(at::equal(inputs[2], expected)) << "onto an input: " << at::toString(dtype) << ' ' << name_of(op);
      }
    }
  }
}

TEST(Reduction, OfRangesUsesLibTorchsThreads) {
  TorchThreads threads(2);
  const auto inputs = values_of_all(3, at::kFloat, {1000000});
  std::vector<const void*> pointers;
  for (const auto& input : inputs) pointers.push_back(input.data_ptr());
  const std::vector<Backend::Range> ranges{{.begin = 7, .size = 300001}, {.begin = 400000, .size = 600000}};
  auto output = at::zeros({1000000});
  reduce_ranges_in_cache(
      pointers, inputs[0], ReduceOp::kSum, ranges, [&](size_t range, int64_t begin, int64_t count, const void* values) {
        threads.note();
        std::memcpy(output.data_ptr<float>() + ranges[range].begin + begin, values, static_cast<size_t>(count) * 4);
      });
  EXPECT_EQ(threads.noted(), 2);
  const auto sums = reduced(inputs, ReduceOp::kSum);
  auto expected = at::zeros({1000000});
  for (const auto& [begin, size] : ranges) expected.narrow(0, begin, size).copy_(sums.narrow(0, begin, size));
  EXPECT_TRUE(at::equal(output, expected));
}

// As all-reduce does in shared memory: every input becomes the result, whatever their number.
TEST(Reduction, WritesToAllInputsAtOnce) {
  for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt}) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      auto inputs = values_of_all(ranks, dtype, {2500});
      auto expected = reduced(inputs, ReduceOp::kSum);
      std::vector<void*> pointers;
      for (const auto& input : inputs) pointers.push_back(input.data_ptr());
      reduce_elements(std::span<void* const>(pointers), {pointers.data(), pointers.size()}, 2500, dtype,
                      ReduceOp::kSum);
      for (const auto& input : inputs)
        EXPECT_TRUE(at::equal(input, expected)) << ranks << " ranks, " << at::toString(dtype);
    }
  }
}

template <class Narrow>
Narrow from_bits(uint16_t bits) {
  Narrow value{};
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

template <class Narrow>
uint16_t to_bits(Narrow value) {
  uint16_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

TEST(NarrowFloats, WidenAsLibTorchDoes) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    float half = static_cast<float>(from_bits<c10::Half>(static_cast<uint16_t>(bits)));
    float brain = static_cast<float>(from_bits<c10::BFloat16>(static_cast<uint16_t>(bits)));
    float our_half = widen(from_bits<Float16>(static_cast<uint16_t>(bits)));
    float our_brain = widen(from_bits<BFloat16Bits>(static_cast<uint16_t>(bits)));
    if (std::isnan(half)) {
      EXPECT_TRUE(std::isnan(our_half)) << bits;
    } else {
      EXPECT_EQ(std::bit_cast<uint32_t>(our_half), std::bit_cast<uint32_t>(half)) << bits;
    }
    if (std::isnan(brain)) {
      EXPECT_TRUE(std::isnan(our_brain)) << bits;
    } else {
      EXPECT_EQ(std::bit_cast<uint32_t>(our_brain), std::bit_cast<uint32_t>(brain)) << bits;
    }
  }
}

// Every exponent with the mantissas around which rounding changes, and a few million others.
TEST(NarrowFloats, NarrowAsLibTorchDoes) {
  auto check = [](uint32_t bits) {
    auto value = std::bit_cast<float>(bits);
    if (std::isnan(value)) {
      ASSERT_EQ(to_bits(narrow_to_half(value)), kHalfNan) << bits;
      ASSERT_EQ(to_bits(narrow_to_bfloat16(value)), kBFloat16Nan) << bits;
      return;
    }
    ASSERT_EQ(to_bits(narrow_to_half(value)), c10::Half(value).x) << bits << ", " << value;
    ASSERT_EQ(to_bits(narrow_to_bfloat16(value)), c10::BFloat16(value).x) << bits << ", " << value;
  };
  for (uint32_t top = 0; top < 0x10000; ++top)
    for (uint32_t low : {0x0u, 0x1u, 0xfffu, 0x1000u, 0x1001u, 0x2fffu, 0x3000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      check(top << 16 | low);
  std::mt19937 random(1);
  for (int i = 0; i < 2'000'000; ++i) check(static_cast<uint32_t>(random()));
}

// The vector instructions of this processor against the portable conversions, for all numbers.
template <class Element, class Narrow>
void expect_portable_sums(NarrowFloat type, const Narrow& narrow_one) {
  constexpr int64_t kCount = 65536 + 37;  // the last elements do not fill a vector
  std::mt19937 random(1);
  for (size_t ranks : {2, 3, 7}) {
    std::vector<std::vector<uint16_t>> inputs(ranks);
    for (size_t rank = 0; rank < ranks; ++rank) {
      for (int64_t i = 0; i < kCount; ++i) inputs[rank].push_back(static_cast<uint16_t>(i));
      if (rank > 0) std::shuffle(inputs[rank].begin(), inputs[rank].end(), random);
    }
    const float factor = ranks == 2 ? 1.0f : 1.0f / static_cast<float>(ranks);
    for (const VectorSet set : vector_sets()) {
      std::vector<uint16_t> output(kCount), other = inputs.back();
      std::vector<const void*> from;
      for (const auto& input : inputs) from.push_back(input.data());
      from.back() = other.data();
      void* const to[] = {output.data(), other.data()};  // the second one is an input
      sum_narrow(set, type, to, from, kCount, factor);
      ASSERT_EQ(output, other);
      for (size_t i = 0; i < output.size(); ++i) {
        float sum = widen(from_bits<Element>(inputs[0][i]));
        for (size_t rank = 1; rank < ranks; ++rank) sum += widen(from_bits<Element>(inputs[rank][i]));
        ASSERT_EQ(output[i], to_bits(narrow_one(sum * factor))) << i << ", " << sum;
      }
    }
  }
}

TEST(NarrowSums, HaveTheBitsOfThePortableLoops) {
  if (vector_sets().empty()) GTEST_SKIP() << "this processor has neither AVX2 nor AVX-512";
  expect_portable_sums<Float16>(NarrowFloat::kHalf, narrow_to_half);
  expect_portable_sums<BFloat16Bits>(NarrowFloat::kBFloat16, narrow_to_bfloat16);
}

// Random bits are numbers of all magnitudes, denormal numbers and infinities included, so every rounding shows.
template <class Element, class Bits>
void expect_rank_order_sums(std::optional<VectorSet> set, at::ScalarType dtype, size_t ranks, ReduceOp op) {
  constexpr int64_t kCount = 2500 + 13;  // neither whole blocks nor whole vectors
  std::mt19937_64 random(ranks);
  std::vector<std::vector<Element>> inputs(ranks), results(ranks);
  std::vector<void*> pointers;
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (int64_t i = 0; i < kCount; ++i) inputs[rank].push_back(std::bit_cast<Element>(static_cast<Bits>(random())));
    results[rank] = inputs[rank];
    pointers.push_back(results[rank].data());
  }
  sum_floats(set, pointers, {pointers.data(), pointers.size()}, kCount, dtype, op);  // onto all inputs
  for (size_t i = 0; i < kCount; ++i) {
    Element expected = inputs[0][i];
    for (size_t rank = 1; rank < ranks; ++rank) expected += inputs[rank][i];
    if (op == ReduceOp::kAvg) expected *= Element(1) / static_cast<Element>(ranks);
    if (std::isnan(expected)) expected = std::numeric_limits<Element>::quiet_NaN();
    for (const auto& result : results) {
      ASSERT_EQ(std::bit_cast<Bits>(result[i]), std::bit_cast<Bits>(expected)) << result[i] << ", not " << expected;
    }
  }
}

TEST(WideSums, AddInTheOrderOfRanksWithAllInstructions) {
  std::vector<std::optional<VectorSet>> sets{std::nullopt};
  for (const VectorSet set : vector_sets()) sets.emplace_back(set);
  for (const auto set : sets)
    for (size_t ranks = 2; ranks <= 17; ++ranks)
      for (auto op : {ReduceOp::kSum, ReduceOp::kAvg}) {
        SCOPED_TRACE(testing::Message() << "set " << (set ? static_cast<int>(*set) : -1) << ", " << ranks << " ranks");
        expect_rank_order_sums<float, uint32_t>(set, at::kFloat, ranks, op);
        expect_rank_order_sums<double, uint64_t>(set, at::kDouble, ranks, op);
      }
}

TEST(Reduction, EveryDtypeHasExactlyTheOperationsOfTheTable) {
  for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    EXPECT_TRUE(is_reducible(ReduceOp::kAvg, dtype));
    for (auto op : {ReduceOp::kAnd, ReduceOp::kOr, ReduceOp::kXor}) EXPECT_FALSE(is_reducible(op, dtype));
  }
  for (auto dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kBool}) {
    EXPECT_FALSE(is_reducible(ReduceOp::kAvg, dtype));
    for (auto op : {ReduceOp::kAnd, ReduceOp::kOr, ReduceOp::kXor}) EXPECT_TRUE(is_reducible(op, dtype));
  }
}

TEST(Slices, CoverEverythingOnceAndDifferByAtMostOne) {
  for (int64_t count : {0, 1, 2, 6, 7, 100, 1001}) {
    for (int parts : {1, 2, 3, 7, 16}) {
      int64_t next = 0;
      for (int index = 0; index < parts; ++index) {
        Slice slice = slice_of(count, parts, index);
        EXPECT_EQ(slice.begin, next);
        EXPECT_GE(slice.size, count / parts);
        EXPECT_LE(slice.size, count / parts + 1);
        next += slice.size;
      }
      EXPECT_EQ(next, count);
    }
  }
}

}  // namespace
}  // namespace lockstep
