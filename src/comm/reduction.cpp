#include "comm/reduction.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

using Outputs = std::span<void* const>;
using Inputs = std::span<const void* const>;

constexpr int64_t kBlock = 1024;  // accumulators stay in the first-level cache

// Integers are added and multiplied as unsigned, where wrapping around is defined.
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
    else  // widened, since uint16_t operands would be promoted to int, which overflows
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

struct Identity {
  template <class A>
  A operator()(A a) const {
    return a;
  }
};

template <class T, class A, class Combine, class Finish>
void reduce_typed(Outputs outputs, Inputs inputs, int64_t count, Combine combine, Finish finish) {
  A sums[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    auto input = [&](size_t rank) { return static_cast<const T*>(inputs[rank]) + begin; };
    auto output = [&](size_t rank) { return static_cast<T*>(outputs[rank]) + begin; };
    const T* first = input(0);
    if (inputs.size() == 1) {
      for (int64_t i = 0; i < n; ++i) sums[i] = static_cast<A>(first[i]);
    } else {
      const T* second = input(1);
      for (int64_t i = 0; i < n; ++i) sums[i] = combine(static_cast<A>(first[i]), static_cast<A>(second[i]));
    }
    for (size_t rank = 2; rank < inputs.size(); ++rank) {
      const T* next = input(rank);
      for (int64_t i = 0; i < n; ++i) sums[i] = combine(sums[i], static_cast<A>(next[i]));
    }
    T* to = output(0);
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(finish(sums[i]));
    for (size_t rank = 1; rank < outputs.size(); ++rank) std::memcpy(output(rank), to, n * sizeof(T));
  }
}

template <class T, class A>
void reduce_floating(Outputs outputs, Inputs inputs, int64_t count, ReduceOp op) {
  A share = A(1) / static_cast<A>(inputs.size());
  switch (op) {
    case ReduceOp::kSum:
      return reduce_typed<T, A>(outputs, inputs, count, Sum(), Identity());
    case ReduceOp::kAvg:
      return reduce_typed<T, A>(outputs, inputs, count, Sum(), [share](A a) { return a * share; });
    case ReduceOp::kProduct:
      return reduce_typed<T, A>(outputs, inputs, count, Product(), Identity());
    case ReduceOp::kMin:
      return reduce_typed<T, A>(outputs, inputs, count, Min(), Identity());
    case ReduceOp::kMax:
      return reduce_typed<T, A>(outputs, inputs, count, Max(), Identity());
    default:
      throw UsageError(text("reduce operation ", name_of(op), " on floating point"));
  }
}

template <class T>
void reduce_integers(Outputs outputs, Inputs inputs, int64_t count, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_typed<T, T>(outputs, inputs, count, Sum(), Identity());
    case ReduceOp::kProduct:
      return reduce_typed<T, T>(outputs, inputs, count, Product(), Identity());
    case ReduceOp::kMin:
      return reduce_typed<T, T>(outputs, inputs, count, Min(), Identity());
    case ReduceOp::kMax:
      return reduce_typed<T, T>(outputs, inputs, count, Max(), Identity());
    case ReduceOp::kAnd:
      return reduce_typed<T, T>(outputs, inputs, count, And(), Identity());
    case ReduceOp::kOr:
      return reduce_typed<T, T>(outputs, inputs, count, Or(), Identity());
    case ReduceOp::kXor:
      return reduce_typed<T, T>(outputs, inputs, count, Xor(), Identity());
    case ReduceOp::kAvg:
      throw UsageError("reduce operation avg on integers");
  }
}

// A bool is a byte of 0 or 1, on which "or" is the maximum and "and" the minimum.
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

bool is_reducible(ReduceOp op, c10::ScalarType dtype) {
  bool bitwise = op == ReduceOp::kAnd || op == ReduceOp::kOr || op == ReduceOp::kXor;
  return c10::isFloatingType(dtype) ? !bitwise : op != ReduceOp::kAvg;
}

void reduce_elements(Outputs outputs, Inputs inputs, int64_t count, c10::ScalarType dtype,
                     ReduceOp op) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return reduce_floating<float, float>(outputs, inputs, count, op);
    case c10::ScalarType::Double:
      return reduce_floating<double, double>(outputs, inputs, count, op);
    case c10::ScalarType::Half:
      return reduce_floating<c10::Half, float>(outputs, inputs, count, op);
    case c10::ScalarType::BFloat16:
      return reduce_floating<c10::BFloat16, float>(outputs, inputs, count, op);
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
      throw UsageError(text("reduction of dtype ", c10::toString(dtype)));
  }
}

}  // namespace lockstep
