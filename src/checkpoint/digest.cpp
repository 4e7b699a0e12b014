#include "checkpoint/digest.h"

#include <openssl/evp.h>
#include <zlib.h>

#include <algorithm>
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

Sha256Bytes Sha256::finish() {
  Sha256Bytes digest;
  unsigned int size = 0;
  static_assert(sizeof(digest) == 256 / 8);
  if (EVP_DigestFinal_ex(static_cast<EVP_MD_CTX*>(context_.get()), digest.data(), &size) != 1)
    throw SystemError("SHA-256: EVP_DigestFinal_ex failed");
  return digest;
}

std::string hexadecimal(const Sha256Bytes& digest) {
  std::string digits;
  for (const uint8_t byte : digest) {
    digits += "0123456789abcdef"[byte >> 4];
    digits += "0123456789abcdef"[byte & 15];
  }
  return digits;
}

namespace {

/// The number of pieces of `largest` bytes, the last of which may be shorter. An empty record has one.
size_t pieces(uint64_t size, size_t largest) {
  return std::max<size_t>(1, (size + largest - 1) / largest);
}

/// Computes the digests of the parts of `bytes`.
void hash_parts(const uint8_t* bytes, size_t size, Sha256Bytes* digests) {
  constexpr size_t kPart = RecordDigest::kPart;
  const size_t lanes = sha256_lanes(), count = pieces(size, kPart);
  size_t done = 0;
  for (; lanes > 0 && (done + lanes) * kPart <= size; done += lanes)
    sha256_in_lanes(lanes, bytes + done * kPart, kPart, digests + done);
  for (; done < count; ++done) {
    Sha256 sha;
    sha.add(bytes + done * kPart, std::min(kPart, size - done * kPart));
    digests[done] = sha.finish();
  }
}

}  // namespace

RecordDigest::RecordDigest(uint64_t size, Kinds kinds)
    : size_(size),
      sha256_of_parts_(kinds.sha256 ? pieces(size, kPart) : 0),
      crc_of_chunks_(kinds.crc ? pieces(size, kChunk) : 0) {}

size_t RecordDigest::chunk_count() const {
  return pieces(size_, kChunk);
}

size_t RecordDigest::chunk_size(size_t index) const {
  return static_cast<size_t>(std::min<uint64_t>(kChunk, size_ - uint64_t{index} * kChunk));
}

void RecordDigest::add_chunk(size_t index, const void* bytes) {
  const size_t size = chunk_size(index);
  if (!sha256_of_parts_.empty())
    hash_parts(static_cast<const uint8_t*>(bytes), size, &sha256_of_parts_[index * (kChunk / kPart)]);
  if (!crc_of_chunks_.empty()) crc_of_chunks_[index] = crc32_of({static_cast<const char*>(bytes), size});
}

std::string RecordDigest::sha256() const {
  if (sha256_of_parts_.size() == 1) return hexadecimal(sha256_of_parts_[0]);
  Sha256 sha;
  sha.add(sha256_of_parts_.data(), sha256_of_parts_.size() * sizeof(Sha256Bytes));
  return hexadecimal(sha.finish());
}

uint32_t RecordDigest::crc() const {
  uint32_t crc = crc_of_chunks_[0];
  for (size_t i = 1; i < crc_of_chunks_.size(); ++i)
    crc = static_cast<uint32_t>(::crc32_combine(crc, crc_of_chunks_[i], static_cast<z_off_t>(chunk_size(i))));
  return crc;
}

uint32_t crc32_of(std::string_view bytes) {
  return static_cast<uint32_t>(::crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

}  // namespace lockstep::detail
