#include "rendezvous/net/secret.h"

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <openssl/rand.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include <lockstep/error.h>

#include "base/text.h"
#include "base/variables.h"
#include "rendezvous/net/secret_file.h"

namespace lockstep {
namespace {

[[noreturn]] void fail_openssl(const std::string& call) {
  const char* reason = ::ERR_reason_error_string(::ERR_get_error());
  throw SystemError(text("OpenSSL: ", call, ": ", reason ? reason : "no reason given"));
}

std::optional<std::string> nonempty(const Environment::Lookup& lookup, const std::string& variable) {
  auto value = lookup(variable);
  return value && !value->empty() ? value : std::nullopt;
}

/// The folder of this user's own secret. Relative folders in XDG_STATE_HOME do not count: that standard says so.
std::string own_folder(const Environment::Lookup& lookup) {
  if (auto state = nonempty(lookup, "XDG_STATE_HOME"); state && state->front() == '/') return *state + "/lockstep";
  if (auto home = nonempty(lookup, "HOME"); home && home->front() == '/') return *home + "/.local/state/lockstep";
  return text(nonempty(lookup, "TMPDIR").value_or("/tmp"), "/lockstep-", ::geteuid());
}

}  // namespace

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  if (::RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()), static_cast<int>(bytes.size())) != 1)
    fail_openssl("RAND_bytes");
  return bytes;
}

Secret::Secret(std::string bytes) : bytes_(std::move(bytes)) {
  if (bytes_.size() < kSecretBytes)
    throw UsageError(text("a secret of ", bytes_.size(), " bytes is too short: it should have at least ", kSecretBytes,
                          " random ones"));
}

Secret::~Secret() {
  ::OPENSSL_cleanse(bytes_.data(), bytes_.size());
}

Secret Secret::random() {
  return Secret(random_bytes(kSecretBytes));
}

Secret Secret::from_bytes(std::string bytes) {
  return Secret(std::move(bytes));
}

Secret Secret::from_file(const std::string& path) {
  return Secret(read_secret_file(path));
}

std::string Secret::key(int generation) const {
  const std::unique_ptr<EVP_KDF, decltype(&::EVP_KDF_free)> kdf(::EVP_KDF_fetch(nullptr, "HKDF", nullptr),
                                                                &::EVP_KDF_free);
  const std::unique_ptr<EVP_KDF_CTX, decltype(&::EVP_KDF_CTX_free)> context(
      kdf ? ::EVP_KDF_CTX_new(kdf.get()) : nullptr, &::EVP_KDF_CTX_free);
  if (!context) fail_openssl("HKDF");
  // OpenSSL takes its parameters by pointers that are not to const, and writes to none of them.
  std::string digest = "SHA256";
  std::string info = text("lockstep store 1 generation ", generation);
  auto& bytes = const_cast<std::string&>(bytes_);
  const OSSL_PARAM parameters[] = {::OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, digest.data(), 0),
                                   ::OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, bytes.data(), bytes.size()),
                                   ::OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, info.data(), info.size()),
                                   ::OSSL_PARAM_construct_end()};
  std::string key(32, '\0');
  if (::EVP_KDF_derive(context.get(), reinterpret_cast<unsigned char*>(key.data()), key.size(), parameters) != 1)
    fail_openssl("HKDF");
  return key;
}

std::string Secret::hmac(const std::string& message) const {
  std::string digest(32, '\0');
  unsigned int bytes = 0;
  if (!::HMAC(::EVP_sha256(), bytes_.data(), static_cast<int>(bytes_.size()),
              reinterpret_cast<const unsigned char*>(message.data()), message.size(),
              reinterpret_cast<unsigned char*>(digest.data()), &bytes) ||
      bytes != digest.size())
    fail_openssl("HMAC");
  return digest;
}

Secret find_secret(bool on_loopback, const Environment::Lookup& lookup) {
  constexpr const char* kVariable = "LOCKSTEP_SECRET_FILE";
  if (auto path = lookup(kVariable)) {
    if (path->empty()) refuse_value(kVariable, *path, "the path of a file with the job's secret");
    return Secret::from_file(*path);
  }
  if (!on_loopback)
    throw UsageError(text(kVariable, " is not set, and the ranks meet where other hosts can connect: start with ",
                          "lockstep run, which creates a secret, or create a file by (umask 077 && head -c 32 ",
                          "/dev/urandom > FILE), copy it to every host and set ", kVariable, " on every rank"));
  return Secret::from_bytes(read_or_create_secret_file(own_folder(lookup), Secret::random().bytes()));
}

}  // namespace lockstep
