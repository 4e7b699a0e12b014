// The bits of NaNs: neither the instructions, nor the position of an element, nor the backend may change them.

#include <algorithm>
#include <cstring>
#include <optional>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "backends/common/reduction.h"
#include "comm/conformance.h"

namespace lockstep {
namespace {

/// The bits of a floating-point type.
struct Format {
  at::ScalarType dtype;
  int bytes;
  uint64_t infinity;
  uint64_t quiet;  // the first bit of the mantissa

  uint64_t nan() const { return infinity | quiet; }  // what all others become
  uint64_t sign() const { return uint64_t{1} << (8 * bytes - 1); }
  bool is_nan(uint64_t bits) const { return (bits & ~sign()) > infinity; }

  void put(std::vector<char>& bytes_of_all, size_t i, uint64_t bits) const {
    std::memcpy(bytes_of_all.data() + i * bytes, &bits, bytes);  // little-endian
  }
  uint64_t get(const std::vector<char>& bytes_of_all, size_t i) const {
    uint64_t bits = 0;
    std::memcpy(&bits, bytes_of_all.data() + i * bytes, bytes);
    return bits;
  }
};

const Format kFormats[] = {
    {at::kHalf, 2, 0x7c00, 0x200},
    {at::kBFloat16, 2, 0x7f80, 0x40},
    {at::kFloat, 4, 0x7f800000, 0x400000},
    {at::kDouble, 8, 0x7ff0000000000000, 0x8000000000000},
};

Format format_of(at::ScalarType dtype) {
  return *std::find_if(std::begin(kFormats), std::end(kFormats), [&](const Format& f) { return f.dtype == dtype; });
}

/// NaNs of either sign, quiet and signalling, with different payloads, and the infinity that makes a NaN of the
/// negative infinities that all other elements are. Different ranks have NaNs at some of the same positions.
std::vector<std::vector<char>> inputs_with_nans(const Format& format, size_t ranks, size_t count) {
  const uint64_t some[] = {
      format.nan(),        format.nan() | format.sign(),        format.infinity | 1,
      format.nan() | 0x2a, format.nan() | 0x15 | format.sign(), format.infinity | 3 | format.sign(),
      format.infinity};
  std::vector<std::vector<char>> inputs(ranks, std::vector<char>(count * format.bytes));
  for (size_t rank = 0; rank < ranks; ++rank)
    for (size_t i = 0; i < count; ++i) {
      const bool is_special = i % ranks == rank || i % 3 == 0;
      format.put(inputs[rank], i,
                 is_special ? some[(i / 2 + rank) % std::size(some)] : format.infinity | format.sign());
    }
  return inputs;
}

/// Of sums and averages every element is the one NaN; of other operations, every element that is a NaN at all.
void expect_one_nan(const Format& format, const std::vector<std::vector<char>>& inputs, size_t count, ReduceOp op,
                    const std::vector<char>& output, size_t first = 0) {
  size_t nans = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t bits = format.get(output, i);
    const bool has_nan = std::any_of(inputs.begin(), inputs.end(),
                                     [&](const auto& input) { return format.is_nan(format.get(input, first + i)); });
    nans += format.is_nan(bits);
    if (has_nan || format.is_nan(bits)) {
      ASSERT_EQ(bits, format.nan()) << std::hex << bits << std::dec << " at " << i << " of " << count << ", "
                                    << name_of(op) << " of " << inputs.size() << ' ' << at::toString(format.dtype);
    }
  }
  if (count > 20) {
    EXPECT_GT(nans, count / 4) << "the inputs must have NaNs";
  }
}

TEST(Nans, HaveTheSameBitsInVectorsAndInRemainders) {
  for (const auto& format : kFormats)
    for (const auto op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax})
      for (size_t ranks : {2, 3, 4, 5, 7})
        for (size_t count = 1; count <= 140; ++count) {
          const auto inputs = inputs_with_nans(format, ranks, count);
          std::vector<const void*> from;
          for (const auto& input : inputs) from.push_back(input.data());
          std::vector<char> output(count * format.bytes);
          reduce_elements(output.data(), from, static_cast<int64_t>(count), format.dtype, op);
          ASSERT_NO_FATAL_FAILURE(expect_one_nan(format, inputs, count, op, output));
        }
}

TEST(Nans, HaveTheSameBitsWithAllInstructions) {
  std::vector<std::optional<VectorSet>> sets{std::nullopt};
  for (const VectorSet set : vector_sets()) sets.emplace_back(set);
  for (const auto& format : kFormats)
    for (const auto set : sets)
      for (size_t ranks : {2, 3, 4, 5, 7})
        for (size_t count : {1, 63, 64, 100, 1500}) {
          SCOPED_TRACE(testing::Message() << "set " << (set ? static_cast<int>(*set) : -1));
          if (format.bytes == 2 && !set) continue;  // the loops of all other operations: above
          const auto inputs = inputs_with_nans(format, ranks, count);
          std::vector<const void*> from;
          for (const auto& input : inputs) from.push_back(input.data());
          std::vector<char> output(count * format.bytes);
          void* const to = output.data();
          const auto type = format.dtype == at::kHalf ? NarrowFloat::kHalf : NarrowFloat::kBFloat16;
          if (format.bytes == 2)
            sum_narrow(*set, type, {&to, 1}, from, static_cast<int64_t>(count), 1);
          else
            sum_floats(set, {&to, 1}, from, static_cast<int64_t>(count), format.dtype, ReduceOp::kSum);
          ASSERT_NO_FATAL_FAILURE(expect_one_nan(format, inputs, count, ReduceOp::kSum, output));
        }
}

at::Tensor tensor_of(const Format& format, std::vector<char>& bytes) {
  return at::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size()) / format.bytes}, format.dtype);
}

std::vector<char> bytes_of(const at::Tensor& tensor) {
  const auto* begin = static_cast<const char*>(tensor.data_ptr());
  return {begin, begin + tensor.nbytes()};
}

class ConformanceOfNans : public ConformanceCase {};

TEST_P(ConformanceOfNans, EveryBackendReducesThemToTheSameOne) {
  const auto format = format_of(GetParam().dtype);
  on_every_rank([&](ProcessGroup world) {
    const auto ranks = static_cast<size_t>(size());
    for (const auto op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax})
      for (size_t part : {1, 7, 300, 9000}) {
        auto inputs = inputs_with_nans(format, ranks, part * ranks);
        const auto mine = tensor_of(format, inputs[world.rank()]).clone();
        const auto reduced = mine.clone();
        world.all_reduce(reduced, op);
        ASSERT_NO_FATAL_FAILURE(expect_one_nan(format, inputs, part * ranks, op, bytes_of(reduced)));
        const auto output = at::empty({static_cast<int64_t>(part)}, format.dtype);
        world.reduce_scatter(output, mine, op);
        ASSERT_NO_FATAL_FAILURE(
            expect_one_nan(format, inputs, part, op, bytes_of(output), part * static_cast<size_t>(world.rank())));
        const auto at_root = mine.clone();
        world.reduce(at_root, 0, op);
        if (world.rank() == 0) {
          ASSERT_NO_FATAL_FAILURE(expect_one_nan(format, inputs, part * ranks, op, bytes_of(at_root)));
        }
      }
  });
}

/// NCCL and MPI reduce in their own ways. One rank's NaNs are copied.
std::vector<Case> cases_with_nans() {
  std::vector<Case> cases;
  for (const auto& c : all_cases())
    if (c.backend != "nccl" && c.backend != "mpi" && c.size > 1 && c.size < 5 && at::isFloatingType(c.dtype))
      cases.push_back(c);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, ConformanceOfNans, testing::ValuesIn(cases_with_nans()), name_of_case);

}  // namespace
}  // namespace lockstep
