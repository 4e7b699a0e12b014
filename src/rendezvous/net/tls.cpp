#include "rendezvous/net/tls.h"

#include <openssl/err.h>
#include <openssl/ssl.h>

#include <cstring>
#include <utility>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

constexpr unsigned char kCipher[] = {0x13, 0x01};  // TLS_AES_128_GCM_SHA256; a PSK is bound to the hash
constexpr size_t kChunk = 16 << 10;

std::string last_error() {
  unsigned long code = ERR_get_error();
  ERR_clear_error();
  if (code == 0) return "the peer aborted the connection";
  const char* reason = ERR_reason_error_string(code);
  return reason ? reason : text("OpenSSL error ", code);
}

}  // namespace

struct TlsContext::Key {
  const std::string identity;
  const Secret secret;

  SSL_SESSION* to_session(SSL* ssl) const {
    SSL_SESSION* session = SSL_SESSION_new();
    const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl, kCipher);
    const auto& bytes = secret.bytes();
    if (session && cipher &&
        SSL_SESSION_set1_master_key(session, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()) == 1 &&
        SSL_SESSION_set_cipher(session, cipher) == 1 && SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1)
      return session;
    SSL_SESSION_free(session);
    return nullptr;
  }

  static const Key& of(SSL* ssl) { return *static_cast<const Key*>(SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl))); }

  static int offer(SSL* ssl, const EVP_MD*, const unsigned char** id, size_t* size, SSL_SESSION** session) {
    const Key& key = of(ssl);
    *id = reinterpret_cast<const unsigned char*>(key.identity.data());
    *size = key.identity.size();
    *session = key.to_session(ssl);
    return *session ? 1 : 0;
  }

  // An unknown identity is not an error here: without a PSK and a certificate the handshake fails.
  static int find(SSL* ssl, const unsigned char* id, size_t size, SSL_SESSION** session) {
    const Key& key = of(ssl);
    *session = nullptr;
    if (std::string_view(reinterpret_cast<const char*>(id), size) == key.identity) *session = key.to_session(ssl);
    return 1;
  }
};

TlsContext::TlsContext(Side side, std::string identity, Secret key)
    : side_(side),
      key_(new Key{std::move(identity), std::move(key)}),
      context_(SSL_CTX_new(side == Side::kServer ? TLS_server_method() : TLS_client_method()), SSL_CTX_free) {
  SSL_CTX* context = context_.get();
  if (!context) throw SystemError("could not initialize OpenSSL: " + last_error());
  SSL_CTX_set_app_data(context, const_cast<Key*>(key_.get()));
  SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(context, 0);
  SSL_CTX_set_options(context, SSL_OP_NO_TICKET);
  SSL_CTX_set_mode(context, SSL_MODE_RELEASE_BUFFERS);
  if (SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") != 1)
    throw SystemError("OpenSSL does not support TLS_AES_128_GCM_SHA256: " + last_error() +
                      "; enable it in OpenSSL's configuration, for example in the system's crypto policy");
  if (side == Side::kServer) {
    SSL_CTX_set_psk_find_session_callback(context, Key::find);
  } else {
    SSL_CTX_set_psk_use_session_callback(context, Key::offer);
    // A server without the key might offer a certificate; no certificate is trusted.
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  }
}

TlsContext::~TlsContext() = default;

TlsSession::TlsSession(const TlsContext& context) : session_(SSL_new(context.context_.get()), SSL_free) {
  BIO* in = BIO_new(BIO_s_mem());
  BIO* out = BIO_new(BIO_s_mem());
  if (!session_ || !in || !out) throw SystemError("OpenSSL could not create a session: " + last_error());
  SSL_set_bio(session_.get(), in, out);
  if (context.side_ == TlsContext::Side::kServer) {
    SSL_set_accept_state(session_.get());
  } else {
    SSL_set_connect_state(session_.get());
    advance();
  }
}

// OpenSSL's error queue is per thread; clear errors that other code left there.
void TlsSession::advance() {
  ERR_clear_error();
  int result = SSL_do_handshake(session_.get());
  if (result != 1) {
    int error = SSL_get_error(session_.get(), result);
    if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE) return;
    throw TlsError(last_error());
  }
  if (SSL_session_reused(session_.get()) != 1) throw TlsError("the peer did not use the pre-shared key");
  authenticated_ = true;
  if (!unsent_.empty()) send(std::exchange(unsent_, {}));
}

std::string TlsSession::receive(std::string_view ciphertext) {
  BIO_write(SSL_get_rbio(session_.get()), ciphertext.data(), static_cast<int>(ciphertext.size()));
  if (!authenticated_) advance();
  std::string plaintext;
  if (!authenticated_) return plaintext;
  char chunk[kChunk];
  for (;;) {
    ERR_clear_error();
    int read = SSL_read(session_.get(), chunk, sizeof chunk);
    if (read <= 0) {
      int error = SSL_get_error(session_.get(), read);
      if (error == SSL_ERROR_WANT_READ) return plaintext;
      throw TlsError(last_error());
    }
    plaintext.append(chunk, static_cast<size_t>(read));
  }
}

void TlsSession::send(std::string_view plaintext) {
  if (!authenticated_) {
    unsent_ += plaintext;
    return;
  }
  while (!plaintext.empty()) {
    ERR_clear_error();
    int written = SSL_write(session_.get(), plaintext.data(), static_cast<int>(std::min(plaintext.size(), kChunk)));
    if (written <= 0) throw TlsError(last_error());
    plaintext.remove_prefix(static_cast<size_t>(written));
  }
}

std::string TlsSession::take_output() {
  BIO* out = SSL_get_wbio(session_.get());
  std::string bytes(BIO_ctrl_pending(out), '\0');
  if (!bytes.empty()) BIO_read(out, bytes.data(), static_cast<int>(bytes.size()));
  return bytes;
}

}  // namespace lockstep
