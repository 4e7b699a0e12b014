#pragma once

#include <algorithm>
#include <cstdint>

#include <ATen/core/Tensor.h>

#include "backends/common/slices.h"

namespace lockstep::messages {

struct Piece {
  char* data = nullptr;
  size_t bytes = 0;
};

/// A tensor cut into a slice for each rank, and the slices into pieces: as many for every slice, of which the last may
/// be shorter or empty.
class Pieces {
 public:
  Pieces(const at::Tensor& data, int ranks, int64_t piece_bytes)
      : data_(static_cast<char*>(data.data_ptr())),
        elements_(data.numel()),
        width_(data.element_size()),
        step_(std::max<int64_t>(1, piece_bytes / width_)),
        ranks_(ranks) {}

  int64_t count() const { return (slice_of(elements_, ranks_, 0).size + step_ - 1) / step_; }

  Piece slice(int rank) const {
    Slice slice = slice_of(elements_, ranks_, rank);
    return {data_ + slice.begin * width_, static_cast<size_t>(slice.size * width_)};
  }

  Piece piece(int rank, int64_t index) const {
    Slice slice = slice_of(elements_, ranks_, rank);
    int64_t begin = std::min(index * step_, slice.size);
    return {data_ + (slice.begin + begin) * width_, static_cast<size_t>(std::min(step_, slice.size - begin) * width_)};
  }

 private:
  char* const data_;
  const int64_t elements_;
  const int64_t width_;  // bytes of an element
  const int64_t step_;   // elements of a piece
  const int ranks_;
};

}  // namespace lockstep::messages
