#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::messages {

enum class Direction { kSend, kRecv };

/// Bytes to send to one peer, or memory for bytes to receive from it.
struct Buffer {
  int peer = 0;
  void* data = nullptr;
  size_t bytes = 0;
};

/// Selects which receives match a send. Between two ranks, messages of one channel arrive in the order in which they
/// were started, and never at another channel. So ranks that make different calls block and never mix data.
struct Channel {
  enum class Kind {
    kInputs,
    kResults,
    kOneWay,  // the receiver sends nothing back. A send finishes only when it was received: otherwise a sender would
              // not notice that the receiver makes a different call
  };

  uint64_t fingerprint = 0;
  Kind kind = Kind::kInputs;
};

}  // namespace lockstep::messages
