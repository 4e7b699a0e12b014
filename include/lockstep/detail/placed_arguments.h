#pragma once

#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/tensors_in.h>

namespace lockstep::detail {

/// Type of an argument passed to a module: a copy with its tensors on the device if the type contains tensors, else the
/// argument itself.
template <class Arg>
using Placed = std::conditional_t<TensorsIn<std::decay_t<Arg>>::kAny, std::decay_t<Arg>, Arg&&>;

template <class Arg>
Placed<Arg> place(Arg&& arg, c10::Device device) {
  if constexpr (TensorsIn<std::decay_t<Arg>>::kAny) {
    std::decay_t<Arg> copy(std::forward<Arg>(arg));
    TensorsIn<std::decay_t<Arg>>::visit(copy, [&](at::Tensor& tensor) { tensor = tensor.to(device); });
    return copy;
  } else {
    return std::forward<Arg>(arg);
  }
}

}  // namespace lockstep::detail
