// Hostile files around pickles and tensors: zip directories, manifests and safetensors headers.

#include <sys/stat.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/error.h>
#include <lockstep/safetensors.h>

#include "base/text.h"
#include "checkpoint/archive.h"
#include "checkpoint/digest.h"
#include "checkpoint/files.h"
#include "checkpoint/pickles.h"
#include "checkpoint/resource_use.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/zip.h"
#include "support/messages.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

// --- zip

/// Counts the bytes that are read.
class CountingSource : public detail::ByteSource {
 public:
  explicit CountingSource(const std::string& bytes) : bytes_(bytes) {}
  using ByteSource::read;
  uint64_t size() const override { return bytes_.size(); }
  void read(uint64_t offset, void* to, size_t size) const override {
    read_ += size;
    bytes_.read(offset, to, size);
  }
  uint64_t bytes_read() const { return read_; }

 private:
  const detail::MemorySource bytes_;
  mutable uint64_t read_ = 0;
};

TEST(HostileZip, EntriesDoNotShareAHeader) {
  const detail::ZipRecord record{.name = "a", .offset = 60000};
  const auto bytes = detail::zip_header(record) + detail::zip_directory(std::vector(2000, record), record.offset);
  const CountingSource source(bytes);
  expect_error<CheckpointError>([&] { detail::read_zip(source); }, "record 'a' begins at 0",
                                "expected an end before 0");
  EXPECT_LT(source.bytes_read(), 2 * bytes.size());
}

TEST(HostileZip, RecordsDoNotOverlap) {
  std::vector<detail::ZipRecord> records{{.name = "a", .size = 100}, {.name = "b", .size = 100}};
  const auto directory = detail::lay_out_zip(records);
  const auto expect_refused = [&](const char* part) {
    auto bytes = std::string(directory, '\0') + detail::zip_directory(records, directory);
    for (const auto& record : records) {
      const auto header = detail::zip_header(record);
      bytes.replace(record.header, header.size(), header);
    }
    expect_error<CheckpointError>([&] { detail::read_zip(detail::MemorySource(bytes)); }, part,
                                  "expected an end before");
  };
  records[0].size = records[1].header - records[0].offset + 1;
  expect_refused("record 'a' claims");
  records[0].size = 100;
  records[1].size = directory - records[1].offset + 1;
  expect_refused("record 'b' claims");
}

/// A file with a manifest that begins in this way, and whose checksums are correct.
std::string file_with_manifest(std::string manifest) {
  using namespace detail;
  const auto pickle = kStart + "N.";
  const std::string end = "\"}\n";
  std::vector<ZipRecord> records{{.name = "archive/data.pkl", .size = pickle.size(), .crc = crc32_of(pickle)},
                                 {.name = "archive/lockstep/manifest.json"}};
  manifest += R"("file_sha256":")";
  records[1].size = manifest.size() + kSha256Digits + end.size();
  const auto directory = lay_out_zip(records);
  Sha256 sha;
  for (const auto& record : records) sha.add(zip_header(record));
  sha.add(zip_directory(records, directory));
  sha.add(manifest);
  manifest += hexadecimal(sha.finish()) + end;
  records[1].crc = crc32_of(manifest);
  return zip_header(records[0]) + pickle + zip_header(records[1]) + manifest + zip_directory(records, directory);
}

TEST(HostileManifest, IsRefusedBeforeItTakesMemory) {
  const auto bytes = file_with_manifest(std::string(4 * kMega, '['));
  const detail::MemorySource source(bytes);
  std::vector<Damage> damage;
  EXPECT_LT(peak_of([&] { damage = detail::ArchiveReader(source).verify(); }), 32 * kMega + of_sanitizers(32 * kMega));
  ASSERT_FALSE(damage.empty());
  EXPECT_EQ(damage[0].what, "the manifest has more than 3 levels of objects and lists");
}

// --- tensors with more elements than their storages

TEST(ExpandedTensors, ComeBackWithoutTheirElements) {
  constexpr int64_t kMany = int64_t{1} << 40;
  const TemporaryFolder folder;
  const auto path = (folder.path() / "a.pt").string();
  const auto value =
      Value::dict({{"x", torch::ones({1}).expand({kMany})}, {"y", torch::ones({2, 1}).expand({2, kMany})}});
  save_checkpoint(path, value);
  struct stat file {};
  ASSERT_EQ(::stat(path.c_str(), &file), 0);
  EXPECT_LT(file.st_size, 4096);
  const auto read = load_checkpoint(path);
  EXPECT_EQ(read.at("x").tensor().numel(), kMany);
  EXPECT_EQ(read, value);
  EXPECT_FALSE(read == Value::dict({{"x", torch::zeros({1}).expand({kMany})}, {"y", value.at("y")}}));
  EXPECT_TRUE(verify_checkpoint(path).damage.empty());
}

// --- safetensors

std::string safetensors(const std::string& header) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + header;
}

TEST(HostileSafetensors, AreRefusedBeforeTheirHeaderTakesMemory) {
  const auto deep = safetensors(R"({"x":)" + std::string(4 * kMega, '['));
  EXPECT_LT(peak_of([&] { expect_error<UsageError>([&] { from_safetensors(deep); }, "expected 3 levels"); }),
            32 * kMega + of_sanitizers(32 * kMega));
  std::string sizes = "1";
  for (int i = 0; i < 64; ++i) sizes += ",1";
  const auto flat = safetensors(R"({"x":{"dtype":"U8","data_offsets":[0,1],"shape":[)" + sizes + "]}}") + "1";
  expect_error<UsageError>([&] { from_safetensors(flat); }, "65 numbers, expected 64 dimensions");
}

/// Claims a header of this length and has zeros in it.
class LongHeader : public detail::ByteSource {
 public:
  explicit LongHeader(uint64_t length) : length_(length) {}
  using ByteSource::read;
  uint64_t size() const override { return sizeof(length_) + length_; }
  void read(uint64_t offset, void* to, size_t size) const override {
    if (offset == 0) std::memcpy(to, &length_, std::min(size, sizeof(length_)));
  }

 private:
  const uint64_t length_;
};

TEST(HostileSafetensors, HaveShortHeaders) {
  expect_error<CheckpointError>([] { detail::read_safetensors(LongHeader(uint64_t{1} << 40), c10::kCPU); },
                                "has 1099511627776 bytes, expected 100000000");
}

TEST(HostileSafetensors, AreNotWrittenWithLongerOnes) {
  const std::map<std::string, at::Tensor> tensors{{std::string(100'000'000, 'x'), at::empty({0})}};
  expect_error<UsageError>([&] { to_safetensors(tensors); }, "take more than 100000000 bytes, the limit of the format");
}

TEST(HostileSafetensors, AreWrittenInLinearTime) {
  const auto make = [](int n) {
    std::map<std::string, at::Tensor> tensors;
    for (int i = 0; i < n; ++i) tensors[std::to_string(i)] = at::empty({0}, at::kByte);
    return tensors;
  };
  EXPECT_LT(growth(5000, make, to_safetensors), kLinear);
}

TEST(HostileSafetensors, AreReadInLinearTime) {
  const auto entries = [](int n) {
    std::string header = "{";
    for (int i = 0; i < n; ++i)
      header += text(i > 0 ? "," : "", '"', i, R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})");
    return safetensors(header + "}");
  };
  EXPECT_LT(growth(1000, entries, [](const std::string& bytes) { EXPECT_GT(from_safetensors(bytes).size(), 999u); }),
            kLinear);
  const auto empty = [](int n) { return safetensors(R"({"x":[)" + repeated("{},", n) + "{}]}"); };
  const auto refuse = [](const std::string& bytes) { EXPECT_THROW(from_safetensors(bytes), UsageError); };
  EXPECT_LT(growth(5000, empty, refuse), kLinear);
}

}  // namespace
}  // namespace lockstep
