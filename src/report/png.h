#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

struct Png {
  int64_t width = 0, height = 0;
  int64_t channels = 0;  // 1: grey, 3: RGB, 4: RGBA
  std::string bytes{};   // the file
};

/// Encodes an image, or a batch as a grid: TensorBoardWriter::image() lists the shapes and dtypes. Throws UsageError
/// for other shapes and dtypes.
Png to_png(const at::Tensor& image);

}  // namespace lockstep::detail
