#pragma once

#include <cstdint>

namespace lockstep::bench {

/// One of those that take turns: a backend with one kind of memory, or memory itself.
class Side {
 public:
  virtual ~Side() = default;

  /// Rewrites the buffers, other than the last time: `turn` counts. Local, and not timed.
  virtual void prepare(int64_t turn) = 0;

  /// One call, not timed, so that what other sides have left of caches and clocks does not count. Collective.
  virtual void warm_up() = 0;

  /// The calls of one sample, which are timed. Collective.
  virtual void run() = 0;

  /// How many elements are not what run() should have made of what prepare() wrote. Local, and not timed.
  virtual int64_t count_wrong() = 0;
};

}  // namespace lockstep::bench
