#include "optim/gpu_lists.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "base/align.h"
#include "comm/capture.h"
#include "optim/layout.h"

namespace lockstep::detail {
namespace {

constexpr int64_t kKernelPiece = 65536;  // the elements that LibTorch assigns to one thread block
constexpr int64_t kMinPiece = 4096;      // each of its 512 threads then updates two vectors of 4 elements
constexpr int64_t kPieces = 128;         // about the number of multiprocessors of a large GPU

int64_t piece_for(const std::vector<at::Tensor>& parameters) {
  int64_t elements = 0;
  for (const auto& parameter : parameters) elements += parameter.numel();
  return std::max(kMinPiece, align_up(elements / kPieces, kMinPiece));
}

void add_pieces(const at::Tensor& tensor, int64_t piece, std::vector<at::Tensor>& to) {
  if (tensor.numel() <= piece || !tensor.is_non_overlapping_and_dense()) {
    to.push_back(tensor);
    return;
  }
  const auto row = as_row(tensor);
  for (int64_t begin = 0; begin < row.numel(); begin += piece)
    to.push_back(row.narrow(0, begin, std::min(piece, row.numel() - begin)));
}

}  // namespace

FusedLists in_pieces_if_captured(const FusedLists& lists, c10::Device gpu) {
  const auto piece = piece_for(lists.parameters);
  if (piece >= kKernelPiece || !is_capturing(gpu)) return lists;
  FusedLists pieces;
  for (size_t i = 0; i < lists.parameters.size(); ++i) {
    const size_t before = pieces.parameters.size();
    add_pieces(lists.parameters[i], piece, pieces.parameters);
    if (!lists.steps.empty())  // the pieces of a parameter share its step count
      pieces.steps.insert(pieces.steps.end(), pieces.parameters.size() - before, lists.steps[i]);
  }
  const auto cut = [&](const std::vector<at::Tensor>& tensors, std::vector<at::Tensor>& to) {
    for (const auto& tensor : tensors) add_pieces(tensor, piece, to);
  };
  cut(lists.gradients, pieces.gradients);
  cut(lists.first, pieces.first);
  cut(lists.second, pieces.second);
  cut(lists.largest, pieces.largest);
  return pieces;
}

}  // namespace lockstep::detail
