#include "rendezvous/net/peer_proof.h"

#include <openssl/crypto.h>

#include <cstdint>

namespace lockstep::peer_proof {
namespace {

enum class Side { kListener, kConnector };

std::string rank_bytes(int rank) {
  const auto number = static_cast<uint32_t>(rank);
  std::string bytes;
  for (int shift = 0; shift < 32; shift += 8) bytes += static_cast<char>(number >> shift & 0xff);
  return bytes;
}

int rank_of(std::string_view bytes) {
  uint32_t number = 0;
  for (int i = 0; i < 4; ++i) number |= static_cast<uint32_t>(static_cast<unsigned char>(bytes[i])) << 8 * i;
  return static_cast<int>(number);
}

/// All parts have a fixed length, so different handshakes never produce the same message.
std::string prove(const Secret& key, Side side, int listener, int connector, std::string_view listener_nonce,
                  std::string_view connector_nonce) {
  std::string message = side == Side::kListener ? "lockstep peer 1 listener " : "lockstep peer 1 connector";
  message += rank_bytes(listener) + rank_bytes(connector);
  message.append(listener_nonce).append(connector_nonce);
  return key.hmac(message);
}

bool is_equal(const std::string& expected, std::string_view actual) {
  return expected.size() == actual.size() && ::CRYPTO_memcmp(expected.data(), actual.data(), expected.size()) == 0;
}

}  // namespace

std::optional<Listener::Accepted> Listener::check(std::string_view answer) const {
  if (answer.size() != kAnswerBytes) return std::nullopt;
  const int connector = rank_of(answer.substr(0, 4));
  const auto nonce = answer.substr(4, kChallengeBytes);
  if (!is_equal(prove(key_, Side::kConnector, rank_, connector, nonce_, nonce), answer.substr(4 + kChallengeBytes)))
    return std::nullopt;
  return Accepted{connector, prove(key_, Side::kListener, rank_, connector, nonce_, nonce)};
}

std::string Connector::answer(std::string_view challenge) {
  challenge_ = challenge;
  return rank_bytes(rank_) + nonce_ + prove(key_, Side::kConnector, listener_, rank_, challenge_, nonce_);
}

bool Connector::check(std::string_view proof) const {
  return is_equal(prove(key_, Side::kListener, listener_, rank_, challenge_, nonce_), proof);
}

}  // namespace lockstep::peer_proof
