#pragma once

#include <cstdint>

namespace lockstep::bench {

/// A sample of several calls gives each its own buffer, so that each result can be checked; they begin on cache lines
/// of their own. From one to the next, in elements.
inline int64_t slot_stride(int64_t count, int64_t element_bytes, int calls) {
  constexpr int64_t kApartBytes = 128;
  const int64_t apart = kApartBytes / element_bytes;
  return calls == 1 ? count : (count + apart - 1) / apart * apart;
}

}  // namespace lockstep::bench
