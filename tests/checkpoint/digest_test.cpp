#include "checkpoint/digest.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "checkpoint/sha256_lanes.h"

namespace lockstep::detail {
namespace {

std::string random_bytes(size_t size) {
  std::mt19937 random(static_cast<unsigned>(size));
  std::string bytes(size, '\0');
  for (auto& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

Sha256Bytes by_openssl(std::string_view bytes) {
  Sha256 sha;
  sha.add(bytes);
  return sha.finish();
}

TEST(Digest, IsTheSha256OfItsStandard) {
  EXPECT_EQ(hexadecimal(by_openssl("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Digest, OfEachLaneIsThatOfItsMessage) {
  for (const size_t lanes : sha256_lane_counts())
    for (const size_t size : {size_t{0}, size_t{64}, size_t{128}, size_t{4096}, RecordDigest::kPart}) {
      const auto messages = random_bytes(lanes * size);
      std::vector<Sha256Bytes> digests(lanes);
      sha256_in_lanes(lanes, reinterpret_cast<const uint8_t*>(messages.data()), size, digests.data());
      for (size_t lane = 0; lane < lanes; ++lane)
        EXPECT_EQ(hexadecimal(digests[lane]),
                  hexadecimal(by_openssl(std::string_view(messages).substr(lane * size, size))))
            << "lane " << lane << " of " << lanes << ", " << size << " bytes";
    }
}

/// By the definition, without lanes, chunks and threads.
std::string record_sha256(std::string_view bytes) {
  if (bytes.size() <= RecordDigest::kPart) return hexadecimal(by_openssl(bytes));
  Sha256 all;
  for (; !bytes.empty(); bytes.remove_prefix(std::min(bytes.size(), RecordDigest::kPart))) {
    const auto part = by_openssl(bytes.substr(0, RecordDigest::kPart));
    all.add(part.data(), part.size());
  }
  return hexadecimal(all.finish());
}

TEST(Digest, OfARecordDoesNotDependOnTheOrderOfItsChunks) {
  constexpr size_t kPart = RecordDigest::kPart, kChunk = RecordDigest::kChunk;
  for (const size_t size : {size_t{0}, size_t{1}, kPart - 1, kPart, kPart + 1, 16 * kPart, 31 * kPart + 7, kChunk,
                            kChunk + 1, 3 * kChunk, 3 * kChunk + 17 * kPart + 5}) {
    const auto bytes = random_bytes(size);
    RecordDigest digest(size, {.sha256 = true, .crc = true});
    for (size_t i = digest.chunk_count(); i-- > 0;) digest.add_chunk(i, bytes.data() + i * kChunk);
    EXPECT_EQ(digest.sha256(), record_sha256(bytes)) << size << " bytes";
    EXPECT_EQ(digest.crc(), crc32_of(bytes)) << size << " bytes";
  }
}

}  // namespace
}  // namespace lockstep::detail
