#include "bench/ranks/pattern.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include <ATen/ATen.h>

#include <lockstep/error.h>

namespace lockstep::bench {
namespace {

uint32_t hash_bits(uint32_t bits) {
  bits = (bits ^ (bits >> 16)) * 0x7feb352dU;
  bits = (bits ^ (bits >> 15)) * 0x846ca68bU;
  return bits ^ (bits >> 16);
}

/// Small values: sums over hundreds of ranks are exact in float32, and products of ones and twos in every dtype until
/// they overflow.
int64_t value_at(int rank, int64_t position, at::ScalarType dtype, ReduceOp op) {
  const uint32_t bits = hash_bits(static_cast<uint32_t>(rank * kPeriod + position));
  if (dtype == at::kBool) return bits & 1;
  return 1 + (op == ReduceOp::kProduct ? bits & 1 : bits & 7);
}

uint64_t combine(uint64_t a, uint64_t b, ReduceOp op) {
  switch (op) {
    case ReduceOp::kProduct:
      return a * b;
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kAnd:
      return a & b;
    case ReduceOp::kOr:
      return a | b;
    case ReduceOp::kXor:
      return a ^ b;
    default:
      return a + b;
  }
}

template <class Visit>
void for_each_piece(int64_t count, int64_t offset, Visit visit) {
  for (int64_t done = 0; done < count;) {
    const int64_t at = (offset + done) % kPeriod;
    const int64_t size = std::min(count - done, kPeriod - at);
    visit(done, at, size);
    done += size;
  }
}

const char* bytes_at(const at::Tensor& tensor, int64_t element) {
  return static_cast<const char*>(tensor.data_ptr()) + element * static_cast<int64_t>(tensor.element_size());
}

int64_t count_different(const at::Tensor& got, const at::Tensor& expected, double tolerance) {
  const auto off = (got.to(at::kDouble) - expected.to(at::kDouble)).abs();
  return off.le(expected.to(at::kDouble).abs() * tolerance).logical_not().sum().item<int64_t>();  // NaN counts as wrong
}

}  // namespace

at::Tensor input_table(int rank, at::ScalarType dtype, ReduceOp op) {
  std::vector<int64_t> values(kPeriod);
  for (int64_t i = 0; i < kPeriod; ++i) values[static_cast<size_t>(i)] = value_at(rank, i, dtype, op);
  return at::tensor(values, at::kLong).to(dtype);
}

at::Tensor reduced_table(int ranks, at::ScalarType dtype, ReduceOp op) {
  std::vector<int64_t> values(kPeriod);
  for (int64_t i = 0; i < kPeriod; ++i) {
    auto value = static_cast<uint64_t>(value_at(0, i, dtype, op));
    for (int rank = 1; rank < ranks; ++rank)
      value = combine(value, static_cast<uint64_t>(value_at(rank, i, dtype, op)), op);
    values[static_cast<size_t>(i)] = static_cast<int64_t>(value);
  }
  const auto reduced = at::tensor(values, at::kLong);
  return (op == ReduceOp::kAvg ? reduced.to(at::kDouble).div(ranks) : reduced).to(dtype);
}

void write_pattern(const at::Tensor& tensor, const at::Tensor& table, int64_t offset) {
  if (!tensor.is_cpu()) {
    const auto staged = at::empty_like(tensor, at::kCPU);
    write_pattern(staged, table, offset);
    tensor.copy_(staged);
    return;
  }
  const auto element = static_cast<int64_t>(tensor.element_size());
  for_each_piece(tensor.numel(), offset, [&](int64_t done, int64_t at, int64_t size) {
    std::memcpy(const_cast<char*>(bytes_at(tensor, done)), bytes_at(table, at), static_cast<size_t>(size * element));
  });
}

int64_t count_wrong(const at::Tensor& tensor, const at::Tensor& table, int64_t offset, double tolerance) {
  const auto got = tensor.cpu();
  const auto element = static_cast<int64_t>(got.element_size());
  int64_t wrong = 0;
  for_each_piece(got.numel(), offset, [&](int64_t done, int64_t at, int64_t size) {
    if (std::memcmp(bytes_at(got, done), bytes_at(table, at), static_cast<size_t>(size * element)) != 0)
      wrong += count_different(got.narrow(0, done, size), table.narrow(0, at, size), tolerance);
  });
  return wrong;
}

double tolerance_of(at::ScalarType dtype, ReduceOp op) {
  if (op != ReduceOp::kAvg) return 0;
  const std::map<at::ScalarType, double> kSteps{
      {at::kDouble, 0x1p-52}, {at::kFloat, 0x1p-23}, {at::kHalf, 0x1p-10}, {at::kBFloat16, 0x1p-7}};
  return kSteps.at(dtype);
}

at::ScalarType dtype_named(const std::string& name) {
  static const std::map<std::string, at::ScalarType> kDtypes{
      {"float32", at::kFloat}, {"float64", at::kDouble}, {"float16", at::kHalf}, {"bfloat16", at::kBFloat16},
      {"uint8", at::kByte},    {"int8", at::kChar},      {"int16", at::kShort},  {"int32", at::kInt},
      {"int64", at::kLong},    {"bool", at::kBool}};
  const auto found = kDtypes.find(name);
  if (found == kDtypes.end()) throw UsageError("unknown dtype " + name);
  return found->second;
}

ReduceOp reduce_op_named(const std::string& name) {
  static const std::map<std::string, ReduceOp> kOps{
      {"sum", ReduceOp::kSum}, {"avg", ReduceOp::kAvg}, {"product", ReduceOp::kProduct},
      {"min", ReduceOp::kMin}, {"max", ReduceOp::kMax}, {"and", ReduceOp::kAnd},
      {"or", ReduceOp::kOr},   {"xor", ReduceOp::kXor}, {"none", ReduceOp::kSum}};
  const auto found = kOps.find(name);
  if (found == kOps.end()) throw UsageError("unknown reduce operation " + name);
  return found->second;
}

}  // namespace lockstep::bench
