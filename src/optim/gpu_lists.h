#pragma once

#include <map>
#include <tuple>

#include <ATen/core/Tensor.h>

#include "comm/torch_version.h"

namespace lockstep::detail {

/// Parameters on GPUs, sorted into lists by device, dtype and one more trait.
class GpuLists {
 public:
  FusedLists& of(const at::Tensor& parameter, bool trait = false) {
    return lists_[{parameter.device().index(), parameter.scalar_type(), trait}];
  }

  /// Calls call(device, trait, lists) for each list.
  template <class Call>
  void for_each(const Call& call) const {
    for (const auto& [key, lists] : lists_) call(lists.parameters.front().device(), std::get<2>(key), lists);
  }

 private:
  std::map<std::tuple<c10::DeviceIndex, at::ScalarType, bool>, FusedLists> lists_;
};

/// Returns the tensors cut into pieces that keep a whole GPU busy. LibTorch's kernels for lists of tensors assign 65536
/// elements to each thread block, so few blocks update a small model. The pieces are views. Creating them takes time on
/// the host, so only steps that are being captured get pieces; other steps get `lists` itself.
FusedLists in_pieces_if_captured(const FusedLists& lists, c10::Device gpu);

}  // namespace lockstep::detail
