#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/sha256_lanes.h"

namespace lockstep::detail {

/// Computes a SHA-256.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void add(const void* bytes, size_t size);
  void add(std::string_view bytes) { add(bytes.data(), bytes.size()); }
  /// Call it once.
  Sha256Bytes finish();

 private:
  struct Free {
    void operator()(void* context) const;
  };
  std::unique_ptr<void, Free> context_;
};

constexpr size_t kSha256Digits = 64;
std::string hexadecimal(const Sha256Bytes& digest);

/// Checksums of a record that threads process in chunks, in any order.
///
/// The digest of a record of up to kPart bytes is the SHA-256 of its bytes. A longer record is cut into parts of kPart
/// bytes, the last of which may be shorter; its digest is the SHA-256 of the SHA-256s of its parts, one after the
/// other. So several threads, and all lanes of a processor's vectors, can work on one record.
class RecordDigest {
 public:
  static constexpr size_t kPart = 16 << 10;
  static constexpr size_t kChunk =
      1 << 20;  // fits into the processor's cache, so that each pass but the first is cheap

  struct Kinds {
    bool sha256 = false;
    bool crc = false;
  };
  RecordDigest(uint64_t size, Kinds kinds);

  size_t chunk_count() const;
  size_t chunk_size(size_t index) const;
  /// Thread-safe for different chunks.
  void add_chunk(size_t index, const void* bytes);

  // Call these after all chunks were added.
  /// In hexadecimal digits.
  std::string sha256() const;
  /// Returns the CRC-32 of zip files.
  uint32_t crc() const;

 private:
  uint64_t size_;
  std::vector<Sha256Bytes> sha256_of_parts_;
  std::vector<uint32_t> crc_of_chunks_;
};

uint32_t crc32_of(std::string_view bytes);

}  // namespace lockstep::detail
