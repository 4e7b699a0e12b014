#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "rendezvous/net/secret.h"

namespace lockstep {

/// Mutual authentication of two ranks with a shared key. Computes bytes only; the caller owns the sockets:
///
///   listener:   nonce (32 bytes)
///   connector:  its rank (4 bytes, little-endian), nonce (32 bytes), proof (32 bytes)
///   listener:   proof (32 bytes)
///
/// A proof is the HMAC-SHA256, under the key, of the proving side, both ranks and both nonces. The nonces are random,
/// so a recorded handshake cannot be replayed. The side is included, so a proof cannot be reflected to its sender.
namespace peer_proof {

constexpr size_t kChallengeBytes = 32;
constexpr size_t kAnswerBytes = 4 + 32 + 32;
constexpr size_t kProofBytes = 32;

/// The listening side of one connection.
class Listener {
 public:
  Listener(const Secret& key, int rank) : key_(key), rank_(rank) {}

  const std::string& challenge() const { return nonce_; }

  struct Accepted {
    int rank = 0;
    std::string proof;  // for the connector
  };
  /// Returns the connecting rank and the proof to send back; none if the answer is not valid.
  std::optional<Accepted> check(std::string_view answer) const;

 private:
  const Secret key_;
  const int rank_;
  const std::string nonce_ = random_bytes(kChallengeBytes);
};

/// The connecting side of one connection.
class Connector {
 public:
  Connector(const Secret& key, int rank, int listener) : key_(key), rank_(rank), listener_(listener) {}

  /// Returns the answer to a challenge of kChallengeBytes.
  std::string answer(std::string_view challenge);
  /// Returns whether the listener's proof is valid.
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
