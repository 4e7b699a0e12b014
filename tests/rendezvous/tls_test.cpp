#include "rendezvous/net/tls.h"

#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <functional>
#include <memory>

#include "support/messages.h"

namespace lockstep {
namespace {

const Secret kKey = Secret::from_bytes(std::string(32, 'k'));
const Secret kOtherKey = Secret::from_bytes(std::string(32, 'o'));
const std::string kName = "name";

TlsContext server_context(const Secret& key = kKey, const std::string& name = kName) {
  return {TlsContext::Side::kServer, name, key};
}
TlsContext client_context(const Secret& key = kKey, const std::string& name = kName) {
  return {TlsContext::Side::kClient, name, key};
}

/// Two sessions, and the bytes that go from one to the other.
struct Conversation {
  Conversation(const TlsContext& client, const TlsContext& server) : client(client), server(server) {}

  /// Carries bytes until none come, `most` at a time.
  void carry(size_t most = 1 << 20) {
    for (bool moved = true; moved;) {
      moved = false;
      moved |= move(client, server, to_server, server_heard, most);
      moved |= move(server, client, to_client, client_heard, most);
    }
  }

  TlsSession client, server;
  std::string to_server{}, to_client{};        // all that went over the wire
  std::string server_heard{}, client_heard{};  // all that was said

 private:
  static bool move(TlsSession& from, TlsSession& to, std::string& wire, std::string& heard, size_t most) {
    const auto bytes = from.take_output();
    wire += bytes;
    for (size_t at = 0; at < bytes.size(); at += most) heard += to.receive(std::string_view(bytes).substr(at, most));
    return !bytes.empty();
  }
};

TEST(Tls, CarriesBothWaysBetweenThoseWhoKnowTheKey) {
  const auto client = client_context(), server = server_context();
  Conversation talk(client, server);
  EXPECT_FALSE(talk.client.is_authenticated());
  talk.carry();
  EXPECT_TRUE(talk.client.is_authenticated());
  EXPECT_TRUE(talk.server.is_authenticated());
  talk.client.send("ping");
  talk.server.send("pong");
  talk.carry();
  EXPECT_EQ(talk.server_heard, "ping");
  EXPECT_EQ(talk.client_heard, "pong");
  EXPECT_THAT(talk.to_server + talk.to_client, testing::Not(testing::HasSubstr("ping")));
}

TEST(Tls, CarriesMegabytesAndSingleBytes) {
  const auto client = client_context(), server = server_context();
  Conversation talk(client, server);
  talk.carry(1);  // the handshake byte by byte
  std::string large(3 << 20, '\0');
  for (size_t i = 0; i < large.size(); ++i) large[i] = static_cast<char>(i * 2654435761u >> 24);
  talk.client.send(large);
  talk.client.send("");
  talk.server.send(large);
  talk.carry(1000);
  EXPECT_TRUE(talk.server_heard == large);
  EXPECT_TRUE(talk.client_heard == large);
}

// The server's first flight must not carry what only a rank may read.
TEST(Tls, HoldsBackWhatIsSaidUntilTheOtherHasProvedItself) {
  const auto client = client_context(), server = server_context();
  Conversation talk(client, server);
  talk.server.send("for ranks only");
  EXPECT_EQ(talk.server.take_output(), "");
  EXPECT_EQ(talk.server.receive(talk.client.take_output()), "");
  EXPECT_FALSE(talk.server.is_authenticated());
  const auto first_flight = talk.server.take_output();
  EXPECT_EQ(talk.client.receive(first_flight), "");  // the handshake, and nothing after it
  EXPECT_TRUE(talk.client.is_authenticated());
  EXPECT_FALSE(talk.server.is_authenticated());
  EXPECT_EQ(talk.server.receive(talk.client.take_output()), "");
  EXPECT_TRUE(talk.server.is_authenticated());
  EXPECT_EQ(talk.client.receive(talk.server.take_output()), "for ranks only");
}

TEST(Tls, SaysLaterWhatTheClientSaidTooEarly) {
  const auto client = client_context(), server = server_context();
  Conversation talk(client, server);
  talk.client.send("early ");
  talk.client.send("words");
  talk.carry();
  EXPECT_EQ(talk.server_heard, "early words");
}

/// Expects that the server refuses, and that the client, told of it, has not taken the server for one of its own.
void expect_refusal_on_both_sides(const TlsContext& client_side, const TlsContext& server_side) {
  TlsSession client(client_side), server(server_side);
  server.send("for ranks only");
  EXPECT_THROW(server.receive(client.take_output()), TlsError);
  EXPECT_FALSE(server.is_authenticated());
  const auto alert = server.take_output();
  EXPECT_LT(alert.size(), 64u);
  EXPECT_THROW(client.receive(alert), TlsError);
  EXPECT_FALSE(client.is_authenticated());
}

TEST(Tls, RefusesAnotherKeyOnBothSides) {
  const auto client = client_context(kOtherKey), server = server_context();
  expect_refusal_on_both_sides(client, server);
}

TEST(Tls, RefusesAnotherIdentityOnBothSides) {
  for (const std::string name : {"another", "nam", "name2"}) {
    const auto client = client_context(kKey, name), server = server_context();
    expect_refusal_on_both_sides(client, server);
  }
}

TEST(Tls, RefusesGarbageOnBothSides) {
  for (const std::string& garbage :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100, '\0'), std::string(100, '\xff'),
        std::string("\x16\x03\x01\x00\x05hello", 10), std::string("SSH-2.0-OpenSSH_9.2\r\n")}) {
    const auto client_side = client_context();
    const auto server_side = server_context();
    TlsSession client(client_side), server(server_side);
    EXPECT_THROW(client.receive(garbage), TlsError) << garbage;
    EXPECT_THROW(server.receive(garbage), TlsError) << garbage;
  }
}

TEST(Tls, RefusesItsOwnWordsFromAnEcho) {
  const auto context = client_context();
  TlsSession client(context);
  const auto hello = client.take_output();
  EXPECT_THROW(client.receive(hello), TlsError);
}

TEST(Tls, RefusesAConversationThatIsPlayedAgain) {
  const auto client = client_context(), server = server_context();
  Conversation honest(client, server);
  honest.client.send("set the key");
  honest.carry();
  ASSERT_EQ(honest.server_heard, "set the key");
  TlsSession fresh(server);
  fresh.send("for ranks only");
  EXPECT_THROW(fresh.receive(honest.to_server), TlsError);
  EXPECT_FALSE(fresh.is_authenticated());
  TlsSession byte_by_byte(server);
  EXPECT_THROW(
      {
        for (char byte : honest.to_server) EXPECT_EQ(byte_by_byte.receive({&byte, 1}), "");
      },
      TlsError);
  TlsSession another_client(client);
  EXPECT_THROW(another_client.receive(honest.to_client), TlsError);
}

TEST(Tls, RefusesBytesThatWereChangedOnTheWay) {
  const auto client = client_context(), server = server_context();
  Conversation talk(client, server);
  talk.carry();
  talk.client.send("add 1");
  auto bytes = talk.client.take_output();
  bytes.back() ^= 1;
  EXPECT_THROW(talk.server.receive(bytes), TlsError);
}

/// OpenSSL's own other end, without the key.
class Stranger {
 public:
  explicit Stranger(const SSL_METHOD* method) : context_(SSL_CTX_new(method), SSL_CTX_free) {
    SSL_CTX_set_verify(context_.get(), SSL_VERIFY_NONE, nullptr);
  }

  SSL_CTX* context() { return context_.get(); }

  void show_certificate() {
    const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(EVP_EC_gen("P-256"), EVP_PKEY_free);
    const std::unique_ptr<X509, decltype(&X509_free)> certificate(X509_new(), X509_free);
    X509_set_version(certificate.get(), X509_VERSION_3);
    ASN1_INTEGER_set(X509_get_serialNumber(certificate.get()), 1);
    X509_gmtime_adj(X509_getm_notBefore(certificate.get()), -3600);
    X509_gmtime_adj(X509_getm_notAfter(certificate.get()), 3600);
    X509_NAME* name = X509_get_subject_name(certificate.get());
    X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>("store"), -1, -1, 0);
    X509_set_issuer_name(certificate.get(), name);
    X509_set_pubkey(certificate.get(), key.get());
    ASSERT_GT(X509_sign(certificate.get(), key.get(), EVP_sha256()), 0);
    ASSERT_EQ(SSL_CTX_use_certificate(context_.get(), certificate.get()), 1);
    ASSERT_EQ(SSL_CTX_use_PrivateKey(context_.get(), key.get()), 1);
  }

  void start(const std::function<void(SSL*)>& side) {
    ssl_ = {SSL_new(context_.get()), SSL_free};
    SSL_set_bio(ssl_.get(), BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
    side(ssl_.get());
  }

  /// Takes in `bytes` and returns what it says to them; whether it is content then is in is_finished().
  std::string receive(const std::string& bytes) {
    BIO_write(SSL_get_rbio(ssl_.get()), bytes.data(), static_cast<int>(bytes.size()));
    is_finished_ = SSL_do_handshake(ssl_.get()) == 1;
    std::string reply(BIO_ctrl_pending(SSL_get_wbio(ssl_.get())), '\0');
    BIO_read(SSL_get_wbio(ssl_.get()), reply.data(), static_cast<int>(reply.size()));
    return reply;
  }

  bool is_finished() const { return is_finished_; }
  void leave_job() { SSL_shutdown(ssl_.get()); }

 private:
  std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context_;
  std::unique_ptr<SSL, decltype(&SSL_free)> ssl_{nullptr, SSL_free};
  bool is_finished_ = false;
};

/// Expects the server to refuse the stranger without a word that it keeps for ranks.
void expect_no_entry(Stranger& stranger, const TlsContext& context) {
  TlsSession server(context);
  server.send("for ranks only");
  EXPECT_THROW(server.receive(stranger.receive("")), TlsError);
  EXPECT_FALSE(server.is_authenticated());
  stranger.receive(server.take_output());
  EXPECT_FALSE(stranger.is_finished());
}

TEST(Tls, RefusesClientsThatHaveNoKey) {
  const auto server = server_context();
  Stranger plain(TLS_client_method());
  plain.start(SSL_set_connect_state);
  expect_no_entry(plain, server);
  Stranger with_certificate(TLS_client_method());
  with_certificate.show_certificate();
  with_certificate.start(SSL_set_connect_state);
  expect_no_entry(with_certificate, server);
}

TEST(Tls, RefusesOlderProtocols) {
  const auto context = server_context();
  TlsSession server(context);
  Stranger old(TLS_client_method());
  SSL_CTX_set_max_proto_version(old.context(), TLS1_2_VERSION);
  old.start(SSL_set_connect_state);
  EXPECT_THROW(server.receive(old.receive("")), TlsError);
  EXPECT_EQ(server.take_output().back(), SSL_AD_PROTOCOL_VERSION);  // for that, and not for what it lacks besides
}

TEST(Tls, RefusesServersThatShowACertificateInsteadOfTheKey) {
  const auto context = client_context();
  TlsSession client(context);
  client.send("for the store only");
  Stranger impostor(TLS_server_method());
  impostor.show_certificate();
  impostor.start(SSL_set_accept_state);
  const auto flight = impostor.receive(client.take_output());
  ASSERT_GT(flight.size(), 200u);  // it has shown its certificate
  EXPECT_THROW(client.receive(flight), TlsError);
  EXPECT_FALSE(client.is_authenticated());
  impostor.receive(client.take_output());
  EXPECT_FALSE(impostor.is_finished());
}

TEST(Tls, EndsWhenTheOtherSideDoes) {
  const auto context = server_context();
  TlsSession server(context);
  Stranger client(TLS_client_method());
  client.start([&](SSL* ssl) {
    SSL_set_connect_state(ssl);
    SSL_set_psk_use_session_callback(
        ssl, [](SSL* ssl, const EVP_MD*, const unsigned char** id, size_t* size, SSL_SESSION** session) {
          const unsigned char cipher[] = {0x13, 0x01};
          *session = SSL_SESSION_new();
          SSL_SESSION_set1_master_key(*session, reinterpret_cast<const unsigned char*>(kKey.bytes().data()),
                                      kKey.bytes().size());
          SSL_SESSION_set_cipher(*session, SSL_CIPHER_find(ssl, cipher));
          SSL_SESSION_set_protocol_version(*session, TLS1_3_VERSION);
          *id = reinterpret_cast<const unsigned char*>(kName.data());
          *size = kName.size();
          return 1;
        });
  });
  server.receive(client.receive(""));
  server.receive(client.receive(server.take_output()));
  ASSERT_TRUE(server.is_authenticated());  // one who does know the key
  server.send("hello");
  client.leave_job();
  EXPECT_THROW(server.receive(client.receive("")), TlsError);
}

}  // namespace
}  // namespace lockstep
