#include "comm/reduction.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "comm/oracle.h"
#include "comm/slices.h"

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
