#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

/// Each function updates one parameter in one pass over the memory of the parameter and its state, on LibTorch's
/// threads. All tensors must have the same sizes and the same floating-point dtype; half and bfloat16 are computed in
/// float32. The overloads for an ElementRange update elements that lie one after the other, on the calling thread.

/// Elements of a parameter and of its state.
struct ElementRange {
  at::ScalarType dtype{};
  int64_t count = 0;
  void* parameter = nullptr;
  void* first = nullptr;       // Adam: the mean; SGD: the momentum, or null
  void* second = nullptr;      // Adam: the square
  void* max_second = nullptr;  // null except for AMSGrad
};
/// Elements [begin, begin + count) of dense tensors, in memory order. Undefined tensors become null.
ElementRange range_of(const at::Tensor& parameter, const at::Tensor& first, const at::Tensor& second,
                      const at::Tensor& max_second, int64_t begin, int64_t count);

struct AdamUpdate {
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  bool is_decoupled =
      false;         // true: the decay shrinks the parameter (AdamW); false: it is added to the gradient (Adam)
  int64_t step = 1;  // number of this step, starting at 1
};
/// `max_square` is undefined except for AMSGrad.
void update_adam(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& mean,
                 const at::Tensor& square, const at::Tensor& max_square, const AdamUpdate& update);
void update_adam(const ElementRange& range, const void* gradient, const AdamUpdate& update);

struct SgdUpdate {
  double lr = 0;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool is_nesterov = false;
  bool is_first = false;  // first step: the momentum buffer is initialized with the gradient
};
/// `momentum` is the momentum buffer; undefined for SGD without momentum.
void update_sgd(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& momentum,
                const SgdUpdate& update);
void update_sgd(const ElementRange& range, const void* gradient, const SgdUpdate& update);

}  // namespace lockstep::detail
