#include <lockstep/idx.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <lockstep/error.h>

#include "support/temporary_folder.h"

namespace {

namespace fs = std::filesystem;
using Bytes = std::string;

Bytes number(uint64_t value, int bytes) {
  Bytes out;
  for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) out.push_back(static_cast<char>(value >> shift & 0xFF));
  return out;
}

Bytes header(int type, const std::vector<uint32_t>& extents) {
  Bytes out = number(static_cast<uint64_t>(type), 3) + number(extents.size(), 1);
  for (const uint32_t extent : extents) out += number(extent, 4);
  return out;
}

// A fresh folder for each test, with the means to fill it.
class Idx : public testing::Test {
 protected:
  void SetUp() override {
    if (const char* data = std::getenv("LOCKSTEP_DATA")) data_before_ = data;
    ::unsetenv("LOCKSTEP_DATA");
  }
  void TearDown() override {
    if (!data_before_.empty()) ::setenv("LOCKSTEP_DATA", data_before_.c_str(), 1);
  }

  fs::path write(const fs::path& name, const Bytes& bytes) const {
    fs::create_directories((folder_ / name).parent_path());
    fs::remove(folder_ / name);  // Truncating a file makes some file systems write it out, which is slow.
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return folder_ / name;
  }

  fs::path write_gzipped(const fs::path& name, const Bytes& bytes) const {
    gzFile out = ::gzopen((folder_ / name).c_str(), "wb");
    ::gzwrite(out, bytes.data(), static_cast<unsigned>(bytes.size()));
    ::gzclose(out);
    return folder_ / name;
  }

  Bytes gzipped(const Bytes& bytes) const {
    std::ifstream in(write_gzipped("packed", bytes), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  // Two images of two pixels by three, and their labels.
  void write_dataset(const fs::path& name, const std::string& prefix) const {
    write(name / (prefix + "-images-idx3-ubyte"), header(8, {2, 2, 3}) + Bytes("\0\x33\xFF\0\0\0\x66\0\0\0\0\xFF", 12));
    write(name / (prefix + "-labels-idx1-ubyte"), header(8, {2}) + "\x07\x02");
  }

  template <class Kind = lockstep::UsageError>
  static std::string error_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const Kind& error) {
      return error.what();
    }
    return "no error";
  }

  // Checks that reading `bytes` fails with a message of the file's name and `part`.
  void expect_refused(const Bytes& bytes, const std::string& part) const {
    const fs::path file = write("refused", bytes);
    const std::string message = error_of([&] { lockstep::read_idx(file); });
    EXPECT_NE(message.find(part), std::string::npos) << message;
    EXPECT_NE(message.find(file.string()), std::string::npos) << message;
  }

  TemporaryFolder temporary_;
  const fs::path folder_ = temporary_.path();
  std::string data_before_;
};

TEST_F(Idx, ReadsEveryType) {
  const auto read = [&](int type, const Bytes& data) {
    return lockstep::read_idx(write("a", header(type, {2}) + data));
  };
  EXPECT_TRUE(at::equal(read(0x08, "\xFE\x01"), at::tensor({254, 1}, at::kByte)));
  EXPECT_TRUE(at::equal(read(0x09, "\xFE\x01"), at::tensor({-2, 1}, at::kChar)));
  EXPECT_TRUE(at::equal(read(0x0B, number(0xFFFE, 2) + number(258, 2)), at::tensor({-2, 258}, at::kShort)));
  EXPECT_TRUE(
      at::equal(read(0x0C, number(0xFFFFFFFE, 4) + number(0x01020304, 4)), at::tensor({-2, 0x01020304}, at::kInt)));
  EXPECT_TRUE(
      at::equal(read(0x0D, number(0x3FC00000, 4) + number(0xC0000000, 4)), at::tensor({1.5, -2.0}, at::kFloat)));
  EXPECT_TRUE(at::equal(read(0x0E, number(0x3FF8000000000000, 8) + number(0xC000000000000000, 8)),
                        at::tensor({1.5, -2.0}, at::kDouble)));
}

TEST_F(Idx, ReadsEveryRank) {
  EXPECT_EQ(lockstep::read_idx(write("a", header(8, {}) + "\x05")).item<int>(), 5);
  const at::Tensor cube = lockstep::read_idx(write("a", header(8, {2, 1, 3}) + "abcdef"));
  EXPECT_EQ(cube.sizes(), (std::vector<int64_t>{2, 1, 3}));
  EXPECT_EQ(cube[1][0][2].item<int>(), 'f');
  const at::Tensor deep = lockstep::read_idx(write("a", header(8, std::vector<uint32_t>(255, 1)) + "\x05"));
  EXPECT_EQ(deep.dim(), 255);
  const at::Tensor empty = lockstep::read_idx(write("a", header(0x0D, {0, 28})));
  EXPECT_EQ(empty.sizes(), (std::vector<int64_t>{0, 28}));
}

TEST_F(Idx, ReadsGzippedAsPlain) {
  Bytes bytes = header(8, {1000, 3000});
  for (int64_t i = 0; i < 3000000; ++i) bytes.push_back(static_cast<char>(i * i >> 7));
  const at::Tensor plain = lockstep::read_idx(write("a", bytes));
  EXPECT_EQ(plain[999][2999].item<int>(), static_cast<uint8_t>(bytes.back()));
  EXPECT_TRUE(at::equal(plain, lockstep::read_idx(write_gzipped("a.gz", bytes))));
}

TEST_F(Idx, RefusesWhatIsNotIdx) {
  expect_refused("", "ends after 0 bytes");
  expect_refused(Bytes("\0\0\x08", 3), "ends after 3 bytes, expected the 4");
  expect_refused("PNG and more", "starts with the bytes 80 78, expected 0 0");
  expect_refused(header(0x0A, {1}) + "x", "type code 10, expected 8, 9, 11, 12, 13 or 14");
}

TEST_F(Idx, RefusesAFileThatIsCutShortOrTooLong) {
  expect_refused(header(8, {2, 2}).substr(0, 9), "header ends after 9 bytes, expected 12");
  expect_refused(header(8, {5}) + "abcd", "ends after 4 bytes of data, expected 5");
  expect_refused(header(8, {50}) + "abcd", "announces 50 bytes of data, the file can hold at most 12");
  expect_refused(header(8, {3}) + "abcd", "has more than the 3 bytes");
  expect_refused(gzipped(header(8, {5}) + "abcd"), "ends after 4 bytes of data, expected 5");
  expect_refused(gzipped(header(8, {3}) + "abcd"), "has more than the 3 bytes");
}

TEST_F(Idx, RefusesHostileExtentsWithoutAllocatingThem) {
  constexpr uint32_t kMost = 0xFFFFFFFF;
  expect_refused(header(8, {kMost}) + "a", "announces 4294967295 bytes");
  expect_refused(gzipped(header(8, {kMost}) + "a"), "announces 4294967295 bytes");
  expect_refused(header(0x0E, {kMost, kMost}), "more than 2^63 - 1 bytes");
  expect_refused(header(8, {kMost, kMost, kMost, kMost}), "more than 2^63 - 1 bytes");
  expect_refused(header(8, {0, kMost, kMost, kMost}), "more than 2^63 - 1 bytes");
  expect_refused(header(8, std::vector<uint32_t>(255, 2)), "more than 2^63 - 1 bytes");
}

TEST_F(Idx, RefusesADamagedGzipStream) {
  const Bytes whole = gzipped(header(8, {4}) + "abcd");
  expect_refused(whole.substr(0, whole.size() - 12), "damaged");
  expect_refused(whole.substr(0, whole.size() - 4), "damaged");
  Bytes bad_checksum = whole;
  bad_checksum[whole.size() - 8] ^= 1;
  expect_refused(bad_checksum, "damaged");
}

TEST_F(Idx, NamesTheSystemCallThatFails) {
  const std::string missing = error_of<lockstep::SystemError>([&] { lockstep::read_idx(folder_ / "missing"); });
  EXPECT_NE(missing.find("open"), std::string::npos) << missing;
  EXPECT_NE(missing.find("missing\": No such file or directory"), std::string::npos) << missing;
  const std::string directory = error_of<lockstep::SystemError>([&] { lockstep::read_idx(folder_); });
  EXPECT_NE(directory.find("Is a directory"), std::string::npos) << directory;
}

Bytes corrupted(Bytes bytes, std::mt19937& random) {
  const auto below = [&](size_t bound) { return static_cast<size_t>(random() % bound); };
  for (size_t edits = 1 + below(3); edits > 0 && !bytes.empty(); --edits) {
    const size_t at = below(4) == 0 ? below(std::min<size_t>(bytes.size(), 16)) : below(bytes.size());
    switch (below(5)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 1:
        bytes[at] = static_cast<char>(random());
        break;
      case 2:
        bytes[at] = below(2) == 0 ? '\xFF' : '\0';
        break;
      case 3:
        bytes.resize(at);
        break;
      default:
        bytes.insert(at, bytes.substr(below(bytes.size()), 1 + below(8)));
    }
  }
  return bytes;
}

TEST_F(Idx, GivesATensorOrAnErrorForAnyCorruption) {
  const Bytes plain = header(0x0C, {2, 3, 2}) + Bytes(48, 'x');
  std::mt19937 random(20240229);
  int tensors = 0;
  int errors = 0;
  for (const Bytes& valid : {plain, gzipped(plain)}) {
    for (int i = 0; i < 3000; ++i) {
      const fs::path file = write("corrupted", corrupted(valid, random));
      try {
        EXPECT_GE(lockstep::read_idx(file).numel(), 0);
        ++tensors;
      } catch (const lockstep::Error& error) {
        EXPECT_NE(std::string(error.what()).find("corrupted"), std::string::npos) << error.what();
        ++errors;
      }
    }
  }
  EXPECT_GT(tensors, 100);
  EXPECT_GT(errors, 1000);
}

TEST_F(Idx, DatasetScalesImagesAndWidensLabels) {
  write_dataset("mine", "train");
  lockstep::IdxDataset dataset(folder_ / "mine", lockstep::Split::kTrain);
  EXPECT_EQ(dataset.size().value(), 2U);
  EXPECT_EQ(dataset.images().sizes(), (std::vector<int64_t>{2, 1, 2, 3}));
  EXPECT_TRUE(at::equal(dataset.targets(), at::tensor({7, 2}, at::kLong)));
  const auto first = dataset.get(0);
  EXPECT_TRUE(at::allclose(first.data, at::tensor({0.0F, 0.2F, 1.0F, 0.0F, 0.0F, 0.0F}).view({1, 2, 3})));
  EXPECT_EQ(first.target.dim(), 0);
  EXPECT_EQ(first.target.item<int64_t>(), 7);
  EXPECT_NE(error_of([&] { dataset.get(2); }).find("index 2, expected less than 2"), std::string::npos);

  const auto both = dataset.gather({1, 0, 1});
  EXPECT_TRUE(torch::equal(both.data, torch::stack({dataset.get(1).data, first.data, dataset.get(1).data})));
  EXPECT_TRUE(torch::equal(both.target, torch::stack({dataset.get(1).target, first.target, dataset.get(1).target})));
  EXPECT_NE(error_of([&] { dataset.gather({0, 2}); }).find("index 2, expected less than 2"), std::string::npos);
}

TEST_F(Idx, DatasetRefusesFilesThatDoNotBelongTogether) {
  const auto refusal = [&] {
    return error_of([&] { lockstep::IdxDataset(folder_ / "mine", lockstep::Split::kTest); });
  };
  write_dataset("mine", "t10k");
  write("mine/t10k-labels-idx1-ubyte", header(8, {3}) + "abc");
  EXPECT_NE(refusal().find("2 t10k images and 3 labels"), std::string::npos) << refusal();
  write("mine/t10k-labels-idx1-ubyte", header(0x0C, {2}) + "abcdefgh");
  EXPECT_NE(refusal().find("1 extents of type Int, expected 1 of type Byte"), std::string::npos) << refusal();
  fs::remove(folder_ / "mine/t10k-labels-idx1-ubyte");
  EXPECT_NE(refusal().find("t10k-labels-idx1-ubyte\" or the same with .gz, found neither"), std::string::npos)
      << refusal();
}

TEST_F(Idx, FindsADatasetThroughTheEnvironment) {
  for (const char* prefix : {"train", "t10k"}) write_dataset("mine", prefix);
  ::setenv("LOCKSTEP_DATA", folder_.c_str(), 1);
  EXPECT_EQ(lockstep::find_dataset("mine"), folder_ / "mine");
  ::setenv("LOCKSTEP_DATA", (folder_ / "mine").c_str(), 1);
  EXPECT_EQ(lockstep::find_dataset("anything"), folder_ / "mine");
  fs::remove(folder_ / "mine/t10k-labels-idx1-ubyte");
  const std::string message = error_of([&] { lockstep::find_dataset("absent"); });
  for (const fs::path& looked : {folder_ / "mine/absent", folder_ / "mine", fs::path("/usr/share/datasets/absent")}) {
    EXPECT_NE(message.find('"' + looked.string() + '"'), std::string::npos) << message;
  }
  EXPECT_NE(message.find("set LOCKSTEP_DATA to a folder with its four files"), std::string::npos) << message;
  EXPECT_NE(error_of([] { lockstep::find_dataset("../etc"); }).find("expected a plain name"), std::string::npos);
}

TEST_F(Idx, ReadsFashionMnist) {
  if (!fs::exists("/usr/share/datasets/fashion-mnist")) {
    GTEST_SKIP() << "needs Fashion-MNIST: apt-get install dataset-fashion-mnist";
  }
  const fs::path folder = lockstep::find_dataset("fashion-mnist");
  const lockstep::IdxDataset train(folder, lockstep::Split::kTrain);
  const lockstep::IdxDataset test(folder, lockstep::Split::kTest);
  EXPECT_EQ(train.images().sizes(), (std::vector<int64_t>{60000, 1, 28, 28}));
  EXPECT_EQ(test.images().sizes(), (std::vector<int64_t>{10000, 1, 28, 28}));
  EXPECT_TRUE(at::equal(train.targets().slice(0, 0, 10), at::tensor({9, 0, 0, 3, 0, 2, 7, 2, 5, 5}, at::kLong)));
  for (const auto* split : {&train, &test}) {
    EXPECT_TRUE(at::equal(split->targets().bincount(), at::full({10}, split->targets().size(0) / 10, at::kLong)));
    EXPECT_EQ(split->images().min().item<float>(), 0.0F);
    EXPECT_EQ(split->images().max().item<float>(), 1.0F);
  }
  EXPECT_NEAR(train.images().mean().item<double>(), 0.2860, 1e-4);  // The figure that is used to normalize it.
}

}  // namespace
