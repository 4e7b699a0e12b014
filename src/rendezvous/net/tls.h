#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include "rendezvous/net/secret.h"

struct ssl_st;
struct ssl_ctx_st;

namespace lockstep {

/// The peer does not know the key, does not speak TLS, or aborted the connection.
class TlsError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Configuration of one side of TLS 1.3 with a pre-shared key of 32 bytes. Certificates, resumption and early data are
/// disabled.
class TlsContext {
 public:
  enum class Side { kServer, kClient };

  /// `identity` names the key and is sent unencrypted; it must be the same on both sides.
  TlsContext(Side side, std::string identity, Secret key);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

 private:
  friend class TlsSession;
  struct Key;

  const Side side_;
  const std::unique_ptr<const Key> key_;
  const std::shared_ptr<ssl_ctx_st> context_;
};

/// One TLS connection without a socket: the owner transfers the bytes. Not thread-safe.
class TlsSession {
 public:
  /// `context` must outlive the session.
  explicit TlsSession(const TlsContext& context);

  /// Decrypts bytes from the socket and returns the plaintext. Throws TlsError if the peer does not know the key.
  std::string receive(std::string_view ciphertext);

  /// Encrypts `plaintext` for take_output(). Plaintext is held back until the peer is authenticated.
  void send(std::string_view plaintext);

  /// Returns the bytes to write to the socket, and clears them.
  std::string take_output();

  /// Returns whether the peer has proved that it knows the key.
  bool is_authenticated() const { return authenticated_; }

 private:
  void advance();

  const std::shared_ptr<ssl_st> session_;
  bool authenticated_ = false;
  std::string unsent_;  // plaintext of send() before authentication
};

}  // namespace lockstep
