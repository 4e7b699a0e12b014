#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

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
  /// Returns the digest as 64 hexadecimal digits. Call it once.
  std::string finish();

 private:
  struct Free {
    void operator()(void* context) const;
  };
  std::unique_ptr<void, Free> context_;
};

constexpr size_t kSha256Digits = 64;

/// Continues the CRC-32 of zip files, which begins with 0.
uint32_t crc32_of(uint32_t before, const void* bytes, size_t size);

}  // namespace lockstep::detail
