#include "backends/common/reduction.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <type_traits>

#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>

#include <lockstep/error.h>

#include "backends/common/narrow_floats.h"
#include "backends/common/narrow_sums.h"
#include "base/loop_order.h"
#include "base/loops.h"
#include "base/text.h"

// Sums of float32 and float64 are compiled three times on x86-64: for the instructions that every processor has, for
// AVX2 and for AVX-512. A function with a target attribute inlines functions without, so the loops have none and are
// always inlined. All versions give the same bits: a sum is scaled when it is complete, and a fused multiply-add needs
// a product that is added.

namespace lockstep {
namespace {

using Outputs = std::span<void* const>;
using Inputs = std::span<const void* const>;

constexpr int64_t kBlock = 1024;           // elements; their sums fit into the L1 cache
constexpr int64_t kPartBytes = 16 * 1024;  // of reduce_ranges_in_cache

// Integers are added and multiplied as unsigned, because signed overflow is undefined.
template <class T>
using Wrapping = std::make_unsigned_t<T>;

struct Sum {
  template <class A>
  A operator()(A a, A b) const {
    if constexpr (std::is_floating_point_v<A>)
      return a + b;
    else
      return static_cast<A>(static_cast<Wrapping<A>>(a) + static_cast<Wrapping<A>>(b));
  }
};

struct Product {
  template <class A>
  A operator()(A a, A b) const {
    if constexpr (std::is_floating_point_v<A>)
      return a * b;
    else  // as uint64_t: uint16_t operands would be promoted to int, which may overflow
      return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
};

struct Min {
  template <class A>
  A operator()(A a, A b) const {
    return a < b || a != a ? a : b;
  }
};

struct Max {
  template <class A>
  A operator()(A a, A b) const {
    return a > b || a != a ? a : b;
  }
};

struct And {
  template <class A>
  A operator()(A a, A b) const {
    return static_cast<A>(a & b);
  }
};

struct Or {
  template <class A>
  A operator()(A a, A b) const {
    return static_cast<A>(a | b);
  }
};

struct Xor {
  template <class A>
  A operator()(A a, A b) const {
    return static_cast<A>(a ^ b);
  }
};

struct KeepValue {
  template <class A>
  A operator()(A a) const {
    return a;
  }
};

/// Maps an element type in memory to the type in which sums are computed. Every NaN is narrowed to the same NaN: the
/// NaN that a processor computes from two NaNs depends on the order in which the compiler passes them to an
/// instruction, and this order differs between the loops and between their vectors and remainders.
template <class T>
struct Element {
  using Sum = T;
  static Sum widen(T value) { return value; }
  static T narrow(Sum sum) {
    if constexpr (std::is_floating_point_v<T>)
      return sum != sum ? std::numeric_limits<T>::quiet_NaN() : sum;
    else
      return sum;
  }
};
template <>
struct Element<Float16> {
  using Sum = float;
  static Sum widen(Float16 value) { return lockstep::widen(value); }
  static Float16 narrow(Sum sum) { return narrow_to_half(sum); }
};
template <>
struct Element<BFloat16Bits> {
  using Sum = float;
  static Sum widen(BFloat16Bits value) { return lockstep::widen(value); }
  static BFloat16Bits narrow(Sum sum) { return narrow_to_bfloat16(sum); }
};

template <class T>
using SumOf = typename Element<T>::Sum;

// In all loops below an output either equals an input or does not overlap any input, so no element is written before it
// is read.

// Two inputs and two outputs in one pass, for groups of two ranks.
template <class T, class Combine, class Finish>
[[gnu::always_inline]] inline void reduce_pair(T* to, T* also_to, const T* a, const T* b, int64_t count,
                                               Combine combine, Finish finish) {
  LOCKSTEP_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < count; ++i) {
    T result = Element<T>::narrow(finish(combine(Element<T>::widen(a[i]), Element<T>::widen(b[i]))));
    to[i] = result;
    also_to[i] = result;
  }
}

// sums = a op b op c op d
template <class T, class Combine>
[[gnu::always_inline]] inline void fold(SumOf<T>* sums, const T* a, const T* b, const T* c, const T* d, int64_t count,
                                        Combine combine) {
  LOCKSTEP_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < count; ++i) {
    auto front = combine(Element<T>::widen(a[i]), Element<T>::widen(b[i]));
    sums[i] = combine(combine(front, Element<T>::widen(c[i])), Element<T>::widen(d[i]));
  }
}

// sums = sums op a op b op c
template <class T, class Combine>
[[gnu::always_inline]] inline void fold_more(SumOf<T>* sums, const T* a, const T* b, const T* c, int64_t count,
                                             Combine combine) {
  LOCKSTEP_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < count; ++i) {
    auto front = combine(combine(sums[i], Element<T>::widen(a[i])), Element<T>::widen(b[i]));
    sums[i] = combine(front, Element<T>::widen(c[i]));
  }
}

template <class T, class Combine>
[[gnu::always_inline]] inline void fold_one(SumOf<T>* sums, const T* a, int64_t count, Combine combine) {
  LOCKSTEP_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < count; ++i) sums[i] = combine(sums[i], Element<T>::widen(a[i]));
}

template <class T, class Combine, class Finish>
[[gnu::always_inline]] inline void reduce_blocks(Outputs outputs, Inputs inputs, int64_t count, Combine combine,
                                                 Finish finish) {
  auto input = [&](size_t rank, int64_t begin) { return static_cast<const T*>(inputs[rank]) + begin; };
  auto output = [&](size_t rank, int64_t begin) { return static_cast<T*>(outputs[rank]) + begin; };
  if (inputs.size() == 2)
    return reduce_pair(output(0, 0), output(outputs.size() - 1, 0), input(0, 0), input(1, 0), count, combine, finish);
  SumOf<T> sums[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    size_t rank = 0;
    if (inputs.size() >= 4) {
      fold(sums, input(0, begin), input(1, begin), input(2, begin), input(3, begin), n, combine);
      rank = 4;
    } else {
      const T* first = input(0, begin);
      for (int64_t i = 0; i < n; ++i) sums[i] = Element<T>::widen(first[i]);
      rank = 1;
    }
    for (; rank + 3 <= inputs.size(); rank += 3)
      fold_more(sums, input(rank, begin), input(rank + 1, begin), input(rank + 2, begin), n, combine);
    for (; rank < inputs.size(); ++rank) fold_one(sums, input(rank, begin), n, combine);
    T* to = output(0, begin);
    for (int64_t i = 0; i < n; ++i) to[i] = Element<T>::narrow(finish(sums[i]));
    for (size_t other = 1; other < outputs.size(); ++other) std::memcpy(output(other, begin), to, n * sizeof(T));
  }
}

#if defined(__x86_64__)
#if defined(__clang__)
#define LOCKSTEP_WIDEST "avx512f"
#else
#define LOCKSTEP_WIDEST "avx512f,prefer-vector-width=512"  // GCC's default is 256-bit vectors
#endif

template <class T, class Finish>
[[gnu::target("avx2")]] void add_with_avx2(Outputs outputs, Inputs inputs, int64_t count, Finish finish) {
  reduce_blocks<T>(outputs, inputs, count, Sum(), finish);
}

template <class T, class Finish>
[[gnu::target(LOCKSTEP_WIDEST)]] void add_with_avx512(Outputs outputs, Inputs inputs, int64_t count, Finish finish) {
  reduce_blocks<T>(outputs, inputs, count, Sum(), finish);
}
#endif

template <class T, class Finish>
void add_with([[maybe_unused]] std::optional<VectorSet> set, Outputs outputs, Inputs inputs, int64_t count,
              Finish finish) {
#if defined(__x86_64__)
  if (set == VectorSet::kAvx512) return add_with_avx512<T>(outputs, inputs, count, finish);
  if (set == VectorSet::kAvx2) return add_with_avx2<T>(outputs, inputs, count, finish);
#endif
  reduce_blocks<T>(outputs, inputs, count, Sum(), finish);
}

template <class T>
void sum_typed(std::optional<VectorSet> set, Outputs outputs, Inputs inputs, int64_t count, ReduceOp op) {
  if (op == ReduceOp::kSum) return add_with<T>(set, outputs, inputs, count, KeepValue());
  const T share = T(1) / static_cast<T>(inputs.size());
  add_with<T>(set, outputs, inputs, count, [share](T sum) { return sum * share; });
}

/// Returns the fastest vector instructions of this processor.
std::optional<VectorSet> fastest_set() {
  static const auto sets = vector_sets();
  return sets.empty() ? std::nullopt : std::optional(sets.back());
}

template <class T>
void reduce_floating(Outputs outputs, Inputs inputs, int64_t count, ReduceOp op) {
  using A = SumOf<T>;
  A share = A(1) / static_cast<A>(inputs.size());
  if constexpr (std::is_floating_point_v<T>)
    if (op == ReduceOp::kSum || op == ReduceOp::kAvg) return sum_typed<T>(fastest_set(), outputs, inputs, count, op);
  switch (op) {
    case ReduceOp::kSum:
      return reduce_blocks<T>(outputs, inputs, count, Sum(), KeepValue());
    case ReduceOp::kAvg:
      return reduce_blocks<T>(outputs, inputs, count, Sum(), [share](A a) { return a * share; });
    case ReduceOp::kProduct:
      return reduce_blocks<T>(outputs, inputs, count, Product(), KeepValue());
    case ReduceOp::kMin:
      return reduce_blocks<T>(outputs, inputs, count, Min(), KeepValue());
    case ReduceOp::kMax:
      return reduce_blocks<T>(outputs, inputs, count, Max(), KeepValue());
    default:
      throw UsageError(text("reduce operation ", name_of(op), " is not defined for floating point"));
  }
}

template <class T>
void reduce_narrow(NarrowFloat type, Outputs outputs, Inputs inputs, int64_t count, ReduceOp op) {
  const auto set = fastest_set();
  const bool is_sum = op == ReduceOp::kSum || op == ReduceOp::kAvg;
  if (!is_sum || !set) return reduce_floating<T>(outputs, inputs, count, op);
  const float factor = op == ReduceOp::kAvg ? 1 / static_cast<float>(inputs.size()) : 1;
  sum_narrow(*set, type, outputs, inputs, count, factor);
}

template <class T>
void reduce_integers(Outputs outputs, Inputs inputs, int64_t count, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_blocks<T>(outputs, inputs, count, Sum(), KeepValue());
    case ReduceOp::kProduct:
      return reduce_blocks<T>(outputs, inputs, count, Product(), KeepValue());
    case ReduceOp::kMin:
      return reduce_blocks<T>(outputs, inputs, count, Min(), KeepValue());
    case ReduceOp::kMax:
      return reduce_blocks<T>(outputs, inputs, count, Max(), KeepValue());
    case ReduceOp::kAnd:
      return reduce_blocks<T>(outputs, inputs, count, And(), KeepValue());
    case ReduceOp::kOr:
      return reduce_blocks<T>(outputs, inputs, count, Or(), KeepValue());
    case ReduceOp::kXor:
      return reduce_blocks<T>(outputs, inputs, count, Xor(), KeepValue());
    case ReduceOp::kAvg:
      throw UsageError("reduce operation avg is not defined for integers");
  }
}

template <class T>
void scale_typed(void* data, int64_t count, int ranks) {
  const SumOf<T> share = SumOf<T>(1) / static_cast<SumOf<T>>(ranks);
  T* elements = static_cast<T*>(data);
  for (int64_t i = 0; i < count; ++i) elements[i] = Element<T>::narrow(Element<T>::widen(elements[i]) * share);
}

void replace_nans(uint16_t* elements, int64_t count, uint16_t infinity, uint16_t nan) {
  for (int64_t i = 0; i < count; ++i) elements[i] = (elements[i] & 0x7fff) > infinity ? nan : elements[i];
}

// A bool is a byte with value 0 or 1, so "or" is the maximum and "and" is the minimum.
ReduceOp as_byte_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kOr:
      return ReduceOp::kMax;
    case ReduceOp::kProduct:
    case ReduceOp::kAnd:
      return ReduceOp::kMin;
    default:
      return op;
  }
}

}  // namespace

const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kProduct:
      return "product";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kAnd:
      return "and";
    case ReduceOp::kOr:
      return "or";
    case ReduceOp::kXor:
      return "xor";
  }
  return "unknown";
}

bool has_reductions(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Byte:
    case c10::ScalarType::Char:
    case c10::ScalarType::Short:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
    case c10::ScalarType::Bool:
      return true;
    default:
      return false;
  }
}

bool is_reducible(ReduceOp op, c10::ScalarType dtype) {
  if (!has_reductions(dtype)) return false;
  bool bitwise = op == ReduceOp::kAnd || op == ReduceOp::kOr || op == ReduceOp::kXor;
  return c10::isFloatingType(dtype) ? !bitwise : op != ReduceOp::kAvg;
}

void reduce_elements(Outputs outputs, Inputs inputs, int64_t count, c10::ScalarType dtype, ReduceOp op) {
  if (inputs.size() == 1) {  // a group of one rank
    for (void* output : outputs)
      if (output != inputs[0]) std::memcpy(output, inputs[0], static_cast<size_t>(count) * c10::elementSize(dtype));
    return;
  }
  switch (dtype) {
    case c10::ScalarType::Float:
      return reduce_floating<float>(outputs, inputs, count, op);
    case c10::ScalarType::Double:
      return reduce_floating<double>(outputs, inputs, count, op);
    case c10::ScalarType::Half:
      return reduce_narrow<Float16>(NarrowFloat::kHalf, outputs, inputs, count, op);
    case c10::ScalarType::BFloat16:
      return reduce_narrow<BFloat16Bits>(NarrowFloat::kBFloat16, outputs, inputs, count, op);
    case c10::ScalarType::Byte:
      return reduce_integers<uint8_t>(outputs, inputs, count, op);
    case c10::ScalarType::Char:
      return reduce_integers<int8_t>(outputs, inputs, count, op);
    case c10::ScalarType::Short:
      return reduce_integers<int16_t>(outputs, inputs, count, op);
    case c10::ScalarType::Int:
      return reduce_integers<int32_t>(outputs, inputs, count, op);
    case c10::ScalarType::Long:
      return reduce_integers<int64_t>(outputs, inputs, count, op);
    case c10::ScalarType::Bool:
      return reduce_integers<uint8_t>(outputs, inputs, count, as_byte_op(op));
    default:
      throw UsageError(text("cannot reduce dtype ", c10::toString(dtype)));
  }
}

void sum_floats(std::optional<VectorSet> set, Outputs outputs, Inputs inputs, int64_t count, c10::ScalarType dtype,
                ReduceOp op) {
  if (dtype == c10::ScalarType::Float) return sum_typed<float>(set, outputs, inputs, count, op);
  sum_typed<double>(set, outputs, inputs, count, op);
}

namespace {

/// Calls run(begin, end) for parts of [0, count) on LibTorch's threads, each with at least `grain` numbers unless there
/// are fewer. at::parallel_for does that only where the caller is compiled with OpenMP.
template <class Run>
void in_parallel(int64_t count, int64_t grain, const Run& run) {
  if (count <= grain) return run(0, count);
  const auto numbers = at::empty({count}, at::kByte);  // never read: their addresses identify the parts
  auto parts = at::TensorIteratorConfig().add_output(numbers).check_all_same_dtype(false).resize_outputs(false).build();
  const auto run_part = [&](char** data, const int64_t*, int64_t size, int64_t rows) {
    const detail::ParallelLoop::Part part;
    const int64_t begin = data[0] - static_cast<const char*>(numbers.data_ptr());
    run(begin, begin + size * rows);
  };
  const detail::ParallelLoop loop;
  parts.for_each(run_part, grain);
}

}  // namespace

void reduce_ranges_in_cache(Inputs inputs, const at::Tensor& like, ReduceOp op,
                            const std::vector<Backend::Range>& ranges, const Backend::Consume& consume) {
  const auto width = static_cast<int64_t>(like.element_size());
  const int64_t step = kPartBytes / width;
  std::vector<int64_t> first_part{0};  // index of each range's first part; the last element is the number of parts
  for (const auto& range : ranges) first_part.push_back(first_part.back() + (range.size + step - 1) / step);
  in_parallel(first_part.back(), /*grain=*/16, [&](int64_t part, int64_t end) {
    alignas(64) std::array<char, kPartBytes> values;
    c10::SmallVector<const void*, 16> sources(inputs.size());
    auto range =
        static_cast<size_t>(std::upper_bound(first_part.begin(), first_part.end(), part) - first_part.begin() - 1);
    for (; part < end; ++part) {
      while (part >= first_part[range + 1]) ++range;
      const int64_t begin = (part - first_part[range]) * step;
      const int64_t count = std::min(step, ranges[range].size - begin);
      for (size_t i = 0; i < inputs.size(); ++i)
        sources[i] = static_cast<const char*>(inputs[i]) + (ranges[range].begin + begin) * width;
      reduce_elements(values.data(), {sources.data(), sources.size()}, count, like.scalar_type(), op);
      consume(range, begin, count, values.data());
    }
  });
}

void scale_elements(void* data, int64_t count, c10::ScalarType dtype, int ranks) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return scale_typed<float>(data, count, ranks);
    case c10::ScalarType::Double:
      return scale_typed<double>(data, count, ranks);
    case c10::ScalarType::Half:
      return scale_typed<Float16>(data, count, ranks);
    case c10::ScalarType::BFloat16:
      return scale_typed<BFloat16Bits>(data, count, ranks);
    default:
      throw UsageError(text("cannot average dtype ", c10::toString(dtype)));
  }
}

void make_nans_equal(void* data, int64_t count, c10::ScalarType dtype) {
  auto* elements = static_cast<uint16_t*>(data);
  if (dtype == c10::ScalarType::Half) return replace_nans(elements, count, 0x7c00, kHalfNan);
  if (dtype == c10::ScalarType::BFloat16) return replace_nans(elements, count, 0x7f80, kBFloat16Nan);
  throw UsageError(text("make_nans_equal: dtype is ", c10::toString(dtype), ", expected float16 or bfloat16"));
}

}  // namespace lockstep
