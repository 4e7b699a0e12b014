#include "optim/cpu_update.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorIterator.h>

#include "base/loop_order.h"
#include "base/loops.h"

namespace lockstep::detail {
namespace {

constexpr int kMaxTensors = 5;

/// Calls loop(count, pointers, strides) for parts of the tensors, possibly on several threads. Strides are in elements.
/// Tensor indices start with `written`; `read` is last.
template <class T, class Loop>
void for_parts(std::initializer_list<const at::Tensor*> written, const at::Tensor& read, const Loop& loop) {
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false).resize_outputs(false);
  for (const auto* tensor : written) config.add_output(*tensor);
  config.add_input(read);
  auto iterator = config.build();
  const int tensors = iterator.ntensors();
  const auto part = [&](char* const* data, const int64_t* strides, int64_t count) {
    bool is_dense = true;
    for (int i = 0; i < tensors; ++i) is_dense = is_dense && strides[i] == static_cast<int64_t>(sizeof(T));
    auto at = [&](int i) { return reinterpret_cast<T*>(data[i]); };
    if (is_dense) return loop(count, at, [](int) { return int64_t(1); });
    loop(count, at, [&](int i) { return strides[i] / static_cast<int64_t>(sizeof(T)); });
  };
  const auto run_parts = [&](char** data, const int64_t* strides, int64_t count, int64_t parts) {
    const ParallelLoop::Part parallel_part;
    std::array<char*, kMaxTensors> at{};
    std::copy_n(data, tensors, at.begin());
    for (int64_t i = 0; i < parts; ++i) {
      part(at.data(), strides, count);
      for (int t = 0; t < tensors; ++t) at[t] += strides[tensors + t];
    }
  };
  const ParallelLoop parallel_loop;
  iterator.for_each(run_parts);
}

/// Calls loop(count, pointers, strides) once, for elements that lie one after the other.
template <class T, class Loop>
void for_range(int64_t count, std::initializer_list<void*> written, const void* read, const Loop& loop) {
  const auto pointer = [&](int i) {
    return i < static_cast<int>(written.size()) ? static_cast<T*>(written.begin()[i])
                                                : static_cast<T*>(const_cast<void*>(read));
  };
  loop(count, pointer, [](int) { return int64_t(1); });
}

/// The type in which T is computed.
template <class T>
using Wide = at::opmath_type<T>;

/// Calls run(loop), where loop(count, pointers, strides) updates parameter, mean, square and, for AMSGrad, max_square,
/// from the gradient, which is last.
template <class T, class Run>
void adam(const AdamUpdate& update, bool is_amsgrad, const Run& run) {
  using W = Wide<T>;
  const W eps = update.eps;
  const W kept_mean = update.beta1, new_mean = 1 - update.beta1;
  const W kept_square = update.beta2, new_square = 1 - update.beta2;
  const W shrink = update.is_decoupled ? 1 - update.lr * update.weight_decay : 1;
  const W joined_decay = update.is_decoupled ? 0 : update.weight_decay;
  const W step_size = update.lr / (1 - std::pow(update.beta1, static_cast<double>(update.step)));
  const W root_scale = 1 / std::sqrt(1 - std::pow(update.beta2, static_cast<double>(update.step)));

  auto one = [=](T& p, T g, T& m, T& v, auto&& largest) {
    W value = W(p) * shrink;
    const W slope = W(g) + joined_decay * value;
    const W mean_now = W(m) * kept_mean + slope * new_mean;
    const W square_now = W(v) * kept_square + slope * slope * new_square;
    m = mean_now;
    v = square_now;
    value -= step_size * mean_now / (std::sqrt(largest(square_now)) * root_scale + eps);
    p = value;
  };
  if (!is_amsgrad) {
    run([&](int64_t count, auto at, auto stride) {
      T *p = at(0), *m = at(1), *v = at(2), *g = at(3);
      const int64_t dp = stride(0), dm = stride(1), dv = stride(2), dg = stride(3);
      LOCKSTEP_INDEPENDENT_ITERATIONS
      for (int64_t i = 0; i < count; ++i) one(p[i * dp], g[i * dg], m[i * dm], v[i * dv], [](W now) { return now; });
    });
  } else {
    run([&](int64_t count, auto at, auto stride) {
      T *p = at(0), *m = at(1), *v = at(2), *x = at(3), *g = at(4);
      const int64_t dp = stride(0), dm = stride(1), dv = stride(2), dx = stride(3), dg = stride(4);
      LOCKSTEP_INDEPENDENT_ITERATIONS
      for (int64_t i = 0; i < count; ++i)
        one(p[i * dp], g[i * dg], m[i * dm], v[i * dv], [&](W now) {
          const W before = x[i * dx];
          const W largest = before > now ? before : now;
          x[i * dx] = largest;
          return largest;
        });
    });
  }
}

/// The same for SGD: loop(count, pointers, strides) updates parameter and momentum, if there is one, from the gradient.
template <class T, class Run>
void sgd(const SgdUpdate& update, bool has_momentum, const Run& run) {
  using W = Wide<T>;
  const W lr = update.lr, decay = update.weight_decay;
  const W kept = update.is_first ? W(0) : W(update.momentum), added = update.is_first ? 1 : 1 - update.dampening;
  const W ahead = update.momentum;
  const bool is_nesterov = update.is_nesterov;
  if (!has_momentum) {
    run([&](int64_t count, auto at, auto stride) {
      T *p = at(0), *g = at(1);
      const int64_t dp = stride(0), dg = stride(1);
      LOCKSTEP_INDEPENDENT_ITERATIONS
      for (int64_t i = 0; i < count; ++i) p[i * dp] = W(p[i * dp]) - lr * (W(g[i * dg]) + decay * W(p[i * dp]));
    });
  } else {
    run([&](int64_t count, auto at, auto stride) {
      T *p = at(0), *b = at(1), *g = at(2);
      const int64_t dp = stride(0), db = stride(1), dg = stride(2);
      LOCKSTEP_INDEPENDENT_ITERATIONS
      for (int64_t i = 0; i < count; ++i) {
        const W value = p[i * dp];
        const W slope = W(g[i * dg]) + decay * value;
        const W now = kept * W(b[i * db]) + added * slope;
        b[i * db] = now;
        p[i * dp] = value - lr * (is_nesterov ? slope + ahead * now : now);
      }
    });
  }
}

}  // namespace

ElementRange range_of(const at::Tensor& parameter, const at::Tensor& first, const at::Tensor& second,
                      const at::Tensor& max_second, int64_t begin, int64_t count) {
  const auto width = static_cast<int64_t>(parameter.element_size());
  const auto at = [&](const at::Tensor& tensor) -> void* {
    return tensor.defined() ? static_cast<char*>(tensor.data_ptr()) + begin * width : nullptr;
  };
  return {parameter.scalar_type(), count, at(parameter), at(first), at(second), at(max_second)};
}

void update_adam(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& mean,
                 const at::Tensor& square, const at::Tensor& max_square, const AdamUpdate& update) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, parameter.scalar_type(), "adam", [&] {
    adam<scalar_t>(update, max_square.defined(), [&](const auto& loop) {
      if (max_square.defined())
        for_parts<scalar_t>({&parameter, &mean, &square, &max_square}, gradient, loop);
      else
        for_parts<scalar_t>({&parameter, &mean, &square}, gradient, loop);
    });
  });
}

void update_adam(const ElementRange& range, const void* gradient, const AdamUpdate& update) {
  const auto& [dtype, count, parameter, mean, square, max_square] = range;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "adam", [&, count = count] {
    adam<scalar_t>(update, max_square != nullptr, [&](const auto& loop) {
      if (max_square)
        for_range<scalar_t>(count, {parameter, mean, square, max_square}, gradient, loop);
      else
        for_range<scalar_t>(count, {parameter, mean, square}, gradient, loop);
    });
  });
}

void update_sgd(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& momentum,
                const SgdUpdate& update) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, parameter.scalar_type(), "sgd", [&] {
    sgd<scalar_t>(update, momentum.defined(), [&](const auto& loop) {
      if (momentum.defined())
        for_parts<scalar_t>({&parameter, &momentum}, gradient, loop);
      else
        for_parts<scalar_t>({&parameter}, gradient, loop);
    });
  });
}

void update_sgd(const ElementRange& range, const void* gradient, const SgdUpdate& update) {
  const auto& [dtype, count, parameter, momentum, square, max_square] = range;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "sgd", [&] {
    sgd<scalar_t>(update, momentum != nullptr, [&](const auto& loop) {
      if (momentum)
        for_range<scalar_t>(count, {parameter, momentum}, gradient, loop);
      else
        for_range<scalar_t>(count, {parameter}, gradient, loop);
    });
  });
}

}  // namespace lockstep::detail
