#pragma once

namespace lockstep {

/// The smallest multiple of `unit` that is at least `value`; value >= 0, unit > 0.
template <class Integer>
constexpr Integer align_up(Integer value, Integer unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace lockstep
