#include "checkpoint/digest.h"

#include <openssl/evp.h>
#include <zlib.h>

#include <new>

#include <lockstep/error.h>

namespace lockstep::detail {

void Sha256::Free::operator()(void* context) const {
  EVP_MD_CTX_free(static_cast<EVP_MD_CTX*>(context));
}

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  if (!context_) throw std::bad_alloc();
  if (EVP_DigestInit_ex(static_cast<EVP_MD_CTX*>(context_.get()), EVP_sha256(), nullptr) != 1)
    throw SystemError("OpenSSL has no SHA-256: EVP_DigestInit_ex failed");
}

Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::add(const void* bytes, size_t size) {
  if (EVP_DigestUpdate(static_cast<EVP_MD_CTX*>(context_.get()), bytes, size) != 1)
    throw SystemError("SHA-256: EVP_DigestUpdate failed");
}

std::string Sha256::finish() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  if (EVP_DigestFinal_ex(static_cast<EVP_MD_CTX*>(context_.get()), digest, &size) != 1)
    throw SystemError("SHA-256: EVP_DigestFinal_ex failed");
  std::string digits;
  for (unsigned int i = 0; i < size; ++i) {
    digits += "0123456789abcdef"[digest[i] >> 4];
    digits += "0123456789abcdef"[digest[i] & 15];
  }
  return digits;
}

uint32_t crc32_of(uint32_t before, const void* bytes, size_t size) {
  return static_cast<uint32_t>(::crc32_z(before, static_cast<const Bytef*>(bytes), size));
}

}  // namespace lockstep::detail
