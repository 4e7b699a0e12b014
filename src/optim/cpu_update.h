#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

/// Updates of one parameter in one pass over its memory and that of its state, by LibTorch's threads. All tensors are
/// of the same sizes and of one floating dtype; half and bfloat16 are computed in float32.

struct AdamUpdate {
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  bool is_decoupled = false;  // the decay shrinks the parameter (AdamW) and is not part of the gradient (Adam)
  int64_t step = 1;           // the first has number 1
};
/// `max_square` is undefined unless the update is AMSGrad's.
void update_adam(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& mean,
                 const at::Tensor& square, const at::Tensor& max_square, const AdamUpdate& update);

struct SgdUpdate {
  double lr = 0;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool is_nesterov = false;
  bool is_first = false;  // the momentum begins as the gradient
};
/// `momentum` is undefined where there is none.
void update_sgd(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& momentum,
                const SgdUpdate& update);

}  // namespace lockstep::detail
