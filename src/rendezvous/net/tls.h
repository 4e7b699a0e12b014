#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

struct ssl_st;
struct ssl_ctx_st;

namespace lockstep {

/// The other side does not know the key, does not speak TLS, or broke off.
class TlsError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One side of TLS 1.3 with a key (32 bytes) that both sides know already, and no other way in: no certificates, no
/// resumption, no early data.
class TlsContext {
 public:
  enum class Side { kServer, kClient };

  /// `identity` names the key in the clear: both sides must say the same.
  TlsContext(Side side, std::string identity, std::string key);
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

/// One encrypted conversation, apart from any socket: the owner carries the bytes. One thread at a time.
class TlsSession {
 public:
  /// `context` must outlive the session.
  explicit TlsSession(const TlsContext& context);

  /// Takes in what came from the socket and returns what it said. TlsError when it is not from one who knows the key.
  std::string receive(std::string_view ciphertext);

  /// Says `plaintext`, as soon as the other side has proved that it knows the key.
  void send(std::string_view plaintext);

  /// What is to be written to the socket next.
  std::string take_output();

  /// Whether the other side has proved that it knows the key.
  bool is_authenticated() const { return authenticated_; }

 private:
  void advance();

  const std::shared_ptr<ssl_st> session_;
  bool authenticated_ = false;
  std::string unsent_;  // said before the other side was known
};

}  // namespace lockstep
