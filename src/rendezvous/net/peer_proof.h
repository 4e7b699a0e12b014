#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "rendezvous/net/secret.h"

namespace lockstep {

/// How both ends of a connection between two ranks prove that they know a key. Bytes in, bytes out, no sockets:
///
///   listener:   nonce (32 bytes)
///   connector:  its rank (4 bytes, little-endian), nonce (32 bytes), proof (32 bytes)
///   listener:   proof (32 bytes)
///
/// A proof is the HMAC-SHA256, with the key, of the side that proves, both ranks and both nonces. The nonces are fresh,
/// so that a recorded conversation proves nothing; the side is in it, so that no end can be sent its own proof back.
namespace peer_proof {

constexpr size_t kChallengeBytes = 32;
constexpr size_t kAnswerBytes = 4 + 32 + 32;
constexpr size_t kProofBytes = 32;

/// The end that listens, for one connection.
class Listener {
 public:
  Listener(const Secret& key, int rank) : key_(key), rank_(rank) {}

  const std::string& challenge() const { return nonce_; }

  struct Accepted {
    int rank = 0;
    std::string proof;  // for the connector
  };
  /// Who connects; none when the answer, of kAnswerBytes, proves nothing.
  std::optional<Accepted> check(std::string_view answer) const;

 private:
  const Secret key_;
  const int rank_;
  const std::string nonce_ = random_bytes(kChallengeBytes);
};

/// The end that connects, for one connection.
class Connector {
 public:
  Connector(const Secret& key, int rank, int listener) : key_(key), rank_(rank), listener_(listener) {}

  /// To a challenge of kChallengeBytes.
  std::string answer(std::string_view challenge);
  /// Whether the listener knows the key, too.
  bool check(std::string_view proof) const;

 private:
  const Secret key_;
  const int rank_;
  const int listener_;
  const std::string nonce_ = random_bytes(kChallengeBytes);
  std::string challenge_;
};

}  // namespace peer_proof
}  // namespace lockstep
