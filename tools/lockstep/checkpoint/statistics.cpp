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

at::Tensor plain(const at::Tensor& tensor) {
  auto result = tensor.detach();
  if (result.layout() != at::kStrided) result = result.to_dense();
  if (result.is_quantized()) result = result.dequantize();
  return result.resolve_conj().resolve_neg();
}

/// Calls `visit(pieces)` with flat pieces of tensors of equal sizes, in the order of their elements. Copies a piece of
/// a tensor that is not contiguous, but never the tensor.
template <class Visit>
void for_each_piece(const std::vector<at::Tensor>& tensors, const Visit& visit) {
  const auto& first = tensors[0];
  const auto visit_parts = [&](const auto& part_of) {
    std::vector<at::Tensor> parts;
    for (const auto& tensor : tensors) parts.push_back(part_of(tensor));
    for_each_piece(parts, visit);
  };
  if (first.numel() <= kChunk) {
    std::vector<at::Tensor> pieces;
    for (const auto& tensor : tensors) pieces.push_back(tensor.reshape({-1}));
    if (first.numel() > 0) visit(pieces);
  } else if (const auto row = first.numel() / first.size(0); row >= kChunk) {
    for (int64_t i = 0; i < first.size(0); ++i)
      visit_parts([&](const at::Tensor& tensor) { return tensor.select(0, i); });
  } else {
    const int64_t rows = kChunk / row;
    for (int64_t begin = 0; begin < first.size(0); begin += rows)
      visit_parts(
          [&](const at::Tensor& tensor) { return tensor.narrow(0, begin, std::min(rows, first.size(0) - begin)); });
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

/// Compares 64-bit integers as integers: a double cannot represent all of them.
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

/// Shortens to one element the dimensions in which all of these tensors of equal sizes repeat their elements (stride
/// 0), and returns the number of repetitions.
int64_t drop_repetitions(std::vector<at::Tensor>& tensors) {
  const auto is_strided = [](const at::Tensor& tensor) { return tensor.layout() == at::kStrided; };
  if (!std::all_of(tensors.begin(), tensors.end(), is_strided)) return 1;
  int64_t repetitions = 1;
  for (int64_t d = 0; d < tensors[0].dim(); ++d) {
    const auto repeats = [&](const at::Tensor& tensor) { return tensor.stride(d) == 0 && tensor.size(d) > 1; };
    if (!std::all_of(tensors.begin(), tensors.end(), repeats)) continue;
    repetitions *= tensors[0].size(d);
    for (auto& tensor : tensors) tensor = tensor.narrow(d, 0, 1);
  }
  return repetitions;
}

}  // namespace

uint64_t bytes_without_repetitions(std::vector<at::Tensor> tensors) {
  drop_repetitions(tensors);
  return static_cast<uint64_t>(tensors[0].numel()) * tensors[0].element_size();
}

std::optional<Statistics> statistics_of(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_complex() || tensor.is_quantized()) return std::nullopt;
  Statistics found;
  found.min = kInfinity;
  found.max = -kInfinity;
  double sum = 0, squares = 0;
  int64_t finite = 0;
  std::vector<at::Tensor> tensors{plain(tensor)};
  const auto repetitions = drop_repetitions(tensors);
  for_each_piece(tensors, [&](const std::vector<at::Tensor>& pieces) {
    const auto piece = pieces[0].to(at::kDouble);
    const auto* elements = piece.data_ptr<double>();
    for (int64_t i = 0; i < piece.numel(); ++i) {
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
  found.nan_count *= repetitions;
  found.inf_count *= repetitions;
  found.mean = sum / static_cast<double>(finite);  // 0 / 0 is NaN
  found.norm = std::sqrt(squares * static_cast<double>(repetitions));
  if (finite == 0) found.norm = found.min = found.max = std::numeric_limits<double>::quiet_NaN();
  return found;
}

Difference compare(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  Difference difference;
  std::vector<at::Tensor> tensors{plain(a), plain(b)};
  const auto type = tensors[0].scalar_type();
  const auto dtype = tensors[0].is_complex() ? at::kComplexDouble : type == at::kLong ? at::kLong : at::kDouble;
  const auto repetitions = drop_repetitions(tensors);
  for_each_piece(tensors, [&](const std::vector<at::Tensor>& pieces) {
    const auto x = pieces[0].to(dtype), y = pieces[1].to(dtype);
    if (dtype == at::kLong) {
      compare_integers(x, y, tolerance, difference);
    } else if (dtype == at::kComplexDouble) {
      const auto* p = static_cast<const std::complex<double>*>(x.data_ptr());
      const auto* q = static_cast<const std::complex<double>*>(y.data_ptr());
      for (int64_t i = 0; i < x.numel(); ++i) compare_element(p[i], q[i], tolerance, difference);
    } else {
      const auto *p = x.data_ptr<double>(), *q = y.data_ptr<double>();
      for (int64_t i = 0; i < x.numel(); ++i) compare_element(p[i], q[i], tolerance, difference);
    }
  });
  difference.count *= repetitions;
  return difference;
}

}  // namespace lockstep::checkpoint
