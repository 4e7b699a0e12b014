#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::messages {

enum class Direction { kSend, kRecv };

/// Bytes that go to or come from one peer.
struct Buffer {
  int peer = 0;
  void* data = nullptr;
  size_t bytes = 0;
};

/// Between two ranks, messages of one channel arrive in the order they were started, and never at another channel, so
/// that ranks that make different calls wait and nothing is mixed up.
struct Channel {
  enum class Kind {
    kInputs,
    kResults,
    kOneWay,  // nothing comes back, so that a send is over only when it has been received: else who sends to a rank
              // that makes another call would never know
  };

  uint64_t fingerprint = 0;
  Kind kind = Kind::kInputs;
};

}  // namespace lockstep::messages
