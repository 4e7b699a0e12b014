#include "checkpoint/statistics.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <limits>

#include <ATen/ATen.h>

namespace lockstep::checkpoint {
namespace {

constexpr int64_t kChunk = 1 << 20;  // elements that are converted to double at a time
constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor flat(const at::Tensor& tensor) {
  auto plain = tensor.detach();
  if (plain.layout() != at::kStrided) plain = plain.to_dense();
  if (plain.is_quantized()) plain = plain.dequantize();
  return plain.resolve_conj().resolve_neg().reshape({-1});
}

/// Calls `visit(elements, count)` for each chunk of a flat tensor, as doubles.
template <class Visit>
void for_each_chunk(const at::Tensor& flat_tensor, const Visit& visit) {
  for (int64_t begin = 0; begin < flat_tensor.numel(); begin += kChunk) {
    const auto part =
        flat_tensor.narrow(0, begin, std::min(kChunk, flat_tensor.numel() - begin)).to(at::kDouble).contiguous();
    visit(part.data_ptr<double>(), part.numel());
  }
}

template <class Number>
void compare_element(Number a, Number b, double tolerance, Difference& difference) {
  if (a == b || (a != a && b != b)) return;
  double absolute = std::abs(a - b), relative = absolute / std::max(std::abs(a), std::abs(b));
  if (!std::isfinite(absolute)) absolute = relative = kInfinity;  // NaN or an infinity on one side
  difference.max_absolute = std::max(difference.max_absolute, absolute);
  difference.max_relative = std::max(difference.max_relative, relative);
  if (absolute > tolerance) ++difference.count;
}

/// Integers of 64 bits are compared as such: a double cannot tell all of them apart.
void compare_integers(const at::Tensor& a, const at::Tensor& b, double tolerance, Difference& difference) {
  const auto* left = a.data_ptr<int64_t>();
  const auto* right = b.data_ptr<int64_t>();
  for (int64_t i = 0; i < a.numel(); ++i) {
    if (left[i] == right[i]) continue;
    const auto x = static_cast<double>(left[i]), y = static_cast<double>(right[i]);
    const auto low = std::min(left[i], right[i]), high = std::max(left[i], right[i]);
    const auto absolute = static_cast<double>(static_cast<uint64_t>(high) - static_cast<uint64_t>(low));
    difference.max_absolute = std::max(difference.max_absolute, absolute);
    difference.max_relative = std::max(difference.max_relative, absolute / std::max(std::abs(x), std::abs(y)));
    if (absolute > tolerance) ++difference.count;
  }
}

}  // namespace

std::optional<Statistics> statistics_of(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_complex() || tensor.is_quantized()) return std::nullopt;
  Statistics found;
  found.min = kInfinity;
  found.max = -kInfinity;
  double sum = 0, squares = 0;
  int64_t finite = 0;
  for_each_chunk(flat(tensor), [&](const double* elements, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const double element = elements[i];
      if (std::isnan(element)) {
        ++found.nan_count;
      } else if (std::isinf(element)) {
        ++found.inf_count;
      } else {
        ++finite;
        sum += element;
        squares += element * element;
        found.min = std::min(found.min, element);
        found.max = std::max(found.max, element);
      }
    }
  });
  found.mean = sum / static_cast<double>(finite);  // 0 / 0 is NaN
  found.norm = std::sqrt(squares);
  if (finite == 0) found.norm = found.min = found.max = std::numeric_limits<double>::quiet_NaN();
  return found;
}

Difference compare(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  Difference difference;
  const auto left = flat(a), right = flat(b);
  const auto dtype = left.is_complex() ? at::kComplexDouble : left.scalar_type() == at::kLong ? at::kLong : at::kDouble;
  for (int64_t begin = 0; begin < left.numel(); begin += kChunk) {
    const auto size = std::min(kChunk, left.numel() - begin);
    const auto x = left.narrow(0, begin, size).to(dtype).contiguous();
    const auto y = right.narrow(0, begin, size).to(dtype).contiguous();
    if (dtype == at::kLong) {
      compare_integers(x, y, tolerance, difference);
    } else if (dtype == at::kComplexDouble) {
      const auto* p = static_cast<const std::complex<double>*>(x.data_ptr());
      const auto* q = static_cast<const std::complex<double>*>(y.data_ptr());
      for (int64_t i = 0; i < size; ++i) compare_element(p[i], q[i], tolerance, difference);
    } else {
      const auto *p = x.data_ptr<double>(), *q = y.data_ptr<double>();
      for (int64_t i = 0; i < size; ++i) compare_element(p[i], q[i], tolerance, difference);
    }
  }
  return difference;
}

}  // namespace lockstep::checkpoint
