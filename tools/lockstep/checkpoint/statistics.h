#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::checkpoint {

/// Statistics of the finite elements of a tensor, in double precision. NaN without a finite element.
struct Statistics {
  double mean = 0, norm = 0, min = 0, max = 0;
  int64_t nan_count = 0, inf_count = 0;
};

/// The bytes that statistics_of() or compare() reads: elements that all of these tensors of equal sizes repeat (stride
/// 0) count once.
uint64_t bytes_without_repetitions(std::vector<at::Tensor> tensors);

/// None for tensors that are not plain real numbers: complex, quantized or sparse tensors.
std::optional<Statistics> statistics_of(const at::Tensor& tensor);

/// The differences between the elements of two tensors of equal sizes.
struct Difference {
  double max_absolute = 0;
  double max_relative = 0;  // |a - b| / max(|a|, |b|)
  int64_t count = 0;        // elements whose absolute difference is above the tolerance
};

/// NaN equals NaN; NaN and a number differ by infinity. Complex numbers differ by the modulus. Quantized and sparse
/// tensors are converted to plain tensors first.
Difference compare(const at::Tensor& a, const at::Tensor& b, double tolerance);

}  // namespace lockstep::checkpoint
