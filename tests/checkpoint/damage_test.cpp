// Damaged and hostile files: every change is found, and nothing worse than an error happens.

#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/error.h>

#include "checkpoint/archive.h"
#include "checkpoint/pickle.h"
#include "checkpoint/pickles.h"
#include "support/messages.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using namespace std::string_literals;

/// The full counts are for the long tier.
int count(int full) {
  const char* share = std::getenv("LOCKSTEP_TEST_SOAK");
  return share && *share ? full : full / 20;
}

Value sample() {
  torch::manual_seed(1);
  auto model = Value::dict();
  for (int i = 0; i < 6; ++i) model.set("layer" + std::to_string(i) + ".weight", torch::randn({30, 20}));
  return Value::dict({{"model", model}, {"epoch", 3}, {"metrics", Value::dict({{"loss", 0.5}})}});
}

std::string bytes_of(const Value& value) {
  detail::MemorySink sink;
  detail::write_archive(sink, value);
  return sink.take();
}

Value value_of_bytes(const std::string& bytes, bool verify = true) {
  const detail::MemorySource source(bytes);
  return detail::ArchiveReader(source).load({.verify = verify});
}

TEST(Damage, IsFoundWhereverABitFlips) {
  const auto intact = bytes_of(sample());
  ASSERT_EQ(value_of_bytes(intact), sample());
  std::mt19937_64 random(7);
  for (int i = 0; i < count(10000); ++i) {
    auto bytes = intact;
    const auto bit = random() % (bytes.size() * 8);
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    EXPECT_THROW(value_of_bytes(bytes), CheckpointError) << "bit " << bit << " of " << bytes.size() * 8;
    try {
      value_of_bytes(bytes, /*verify=*/false);  // may be wrong, but must not crash
    } catch (const Error&) {
    } catch (const c10::Error&) {
      ADD_FAILURE() << "bit " << bit << ": LibTorch's error, expected lockstep's";
    }
  }
}

TEST(Damage, IsFoundInEveryByteOfTheHeadersAndTheDirectory) {
  const auto intact = bytes_of(Value::dict({{"x", torch::ones({3})}}));
  for (size_t i = 0; i < intact.size(); ++i)
    for (int bit = 0; bit < 8; ++bit) {
      auto bytes = intact;
      bytes[i] = static_cast<char>(bytes[i] ^ (1 << bit));
      EXPECT_THROW(value_of_bytes(bytes), CheckpointError) << "bit " << bit << " of byte " << i;
    }
}

TEST(Damage, IsFoundWhereverTheFileIsCut) {
  const auto intact = bytes_of(sample());
  for (size_t size = 0; size < intact.size(); size += 512)
    EXPECT_THROW(value_of_bytes(intact.substr(0, size)), CheckpointError) << size << " bytes";
  for (size_t size = intact.size() - 600; size < intact.size(); ++size)
    EXPECT_THROW(value_of_bytes(intact.substr(0, size)), CheckpointError) << size << " bytes";
  EXPECT_THROW(value_of_bytes(intact + "x"), CheckpointError);
}

TEST(Damage, IsNamed) {
  const TemporaryFolder folder;
  const auto path = (folder.path() / "a.pt").string();
  const auto model = Value::dict({{"a", torch::zeros({1000})}, {"b", torch::ones({1000})}});
  save_checkpoint(path, model);
  {
    const detail::FileSource source(path);
    const auto records = detail::read_zip(source);
    const auto found = std::find_if(records.begin(), records.end(),
                                    [](const auto& record) { return record.name == "archive/data/1"; });
    ASSERT_NE(found, records.end());
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(found->offset) + 100);
    file.put('!');
  }
  expect_error<CheckpointError>([&] { load_checkpoint(path); }, path, "record 'data/1'", "SHA-256");
  const auto verified = verify_checkpoint(path);
  EXPECT_TRUE(verified.has_manifest);
  ASSERT_EQ(verified.damage.size(), 1u);
  EXPECT_EQ(verified.damage[0].record, "data/1");
  EXPECT_NO_THROW(load_checkpoint(path, {.verify = false}));
}

TEST(Damage, OfAFileWithoutManifestIsFoundByItsChecksums) {
  torch::nn::Linear model(30, 20);
  std::ostringstream stream;
  torch::save(model, stream);
  auto bytes = stream.str();
  const detail::MemorySource source(bytes);
  for (const auto& record : detail::read_zip(source))
    if (record.name.find("/data/") != std::string::npos) bytes[record.offset + 5] ^= 1;
  expect_error<CheckpointError>([&] { value_of_bytes(bytes); }, "data/0", "CRC-32");
}

// --- hostile pickles

TEST(HostilePickle, ExecutesNothing) {
  const auto value = read_pickle(kStart + "cos\nsystem\n(X\x0a\0\0\0touch /tmptR."s);
  EXPECT_EQ(value.kind(), Value::Kind::kObject);
  EXPECT_EQ(value.type(), "os.system");
  EXPECT_EQ(value.elements()[0], Value("touch /tmp"));
}

TEST(HostilePickle, GivesErrorsForWhatIsMissing) {
  for (const auto& pickle : {""s,
                             kStart,
                             kStart + "."s,
                             kStart + "t."s,
                             kStart + "0."s,
                             kStart + "R."s,
                             kStart + "(R."s,
                             kStart + "Ne."s,
                             kStart + "h\x05."s,
                             kStart + "NNb"s,
                             kStart + "X\xff\xff\xff\xff."s,
                             kStart + "K"s,
                             kStart + "cos\nsystem"s,
                             kStart + "]Na]s."s,
                             kStart + "}(Nu."s,
                             kStart + "NQ."s,
                             kStart + "(tQ."s,
                             kStart + "\x8d\xff\xff\xff\xff\xff\xff\xff\xff."s,
                             kStart + "P1\n."s,
                             "\x80\x09N."s,
                             kStart + "\x82\x01."s,
                             kStart + "ctorch._utils\n_rebuild_tensor_v2\n(tR."s,
                             kStart + "ctorch._utils\n_rebuild_parameter\n)R."s,
                             kStart + "ctorch\ndevice\n(K\x01tR."s,
                             kStart + "ctorch\nSize\n(NtR."s,
                             kStart + "ccollections\nOrderedDict\n(](NelltR."s,
                             kStart + "cnumpy.core.multiarray\nscalar\n(NNtR."s,
                             kStart + "ctorch._tensor\n_rebuild_from_type_v2\n(NNNtR."s})
    EXPECT_THROW(read_pickle(pickle), CheckpointError) << testing::PrintToString(pickle);
}

TEST(HostilePickle, RefusesValuesInsideThemselves) {
  expect_error<CheckpointError>([] { read_pickle(kStart + "]q\0h\0a."s); }, "contains itself");
  expect_error<CheckpointError>([] { read_pickle(kStart + "}q\0K\x01h\0s."s); }, "contains itself");
}

TEST(HostilePickle, RefusesDeepNesting) {
  auto nested = [](int depth) { return kStart + std::string(depth, ']') + std::string(depth - 1, 'a') + "."; };
  EXPECT_NO_THROW(read_pickle(nested(400)));
  expect_error<CheckpointError>([&] { read_pickle(nested(100000)); }, "nested");
}

TEST(HostilePickle, RefusesToGrowFarBeyondItsSize) {
  // Lists of ten times the previous list: 10^12 values.
  auto bomb = kStart + "]q\0N"s + "a";
  for (char i = 0; i < 12; ++i)
    bomb += "](" +
            [&] {
              std::string ten;
              for (int k = 0; k < 10; ++k) ten += "h"s + i;
              return ten;
            }() +
            "eq"s + static_cast<char>(i + 1);
  expect_error<CheckpointError>([&] { read_pickle(bomb + "."); }, "far larger");
  // A long string that is copied by short opcodes.
  auto copies =
      kStart + "c_codecs\nencode\nq\0X"s + number(1 << 20) + std::string(1 << 20, 'x') + "X\6\0\0\0latin1\x86q\1"s;
  for (int i = 0; i < 100000; ++i) copies += "h\0h\1R0"s;
  expect_error<CheckpointError>([&] { read_pickle(copies + "N."); }, "far larger");
  // The same for the sizes of tensors.
  const auto tensors = kStart + "ctorch._utils\n_rebuild_tensor_v2\nq\0((X\7\0\0\0storagectorch\nFloatStorage\n"s +
                       "X\1\0\0\0\x30X\3\0\0\0cpuK\x0atQK\0("s + repeated("K\1", 64) + "t(" + repeated("K\0"s, 64) +
                       "t\x89Ntq\1"s + repeated("h\0h\1R0"s, 100000);
  expect_error<CheckpointError>([&] { read_pickle(tensors + "N."); }, "far larger");
  // Items of a dict.
  const auto items = kStart + "ccollections\nOrderedDict\n](" + repeated("K\1N\x86", 1000) + "eq\0"s + "0(" +
                     repeated("h\0"s, 100000) + "tR.";
  expect_error<CheckpointError>([&] { read_pickle(items); }, "far larger");
  // A large integer.
  const auto integers =
      kStart + "](\x8b" + number(1 << 20) + std::string(1 << 20, 'x') + "q\0"s + repeated("h\0"s, 100000) + "e.";
  expect_error<CheckpointError>([&] { read_pickle(integers); }, "far larger");
}

/// A tensor of a storage of 10 floats: offset, sizes and strides are opcodes.
std::string tensor_pickle(const std::string& elements, const std::string& offset, const std::string& sizes,
                          const std::string& strides) {
  return kStart + "ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0"s +
         "0X\3\0\0\0cpu"s + elements + "tQ" + offset + "(" + sizes + "t(" + strides + "t\x89Nt" + "R.";
}

TEST(HostilePickle, RefusesTensorsOutsideOfTheirStorage) {
  const auto minus = "J"s + number(static_cast<uint32_t>(-1));
  const auto huge = "\x8a\x08\0\0\0\0\0\0\0\x40"s;  // 2^62
  EXPECT_EQ(read_pickle(tensor_pickle("K\x0a", "K\0"s, "K\x05", "K\x02")).tensor().numel(), 5);
  for (const auto& pickle : {
           tensor_pickle("K\x0a", "K\0"s, "K\x0b", "K\x01"),        // too many elements
           tensor_pickle("K\x0a", "K\x0a", "K\x01", "K\x01"),       // begins behind the end
           tensor_pickle("K\x0a", minus, "K\x01", "K\x01"),         // begins before the start
           tensor_pickle("K\x0a", "K\0"s, minus, "K\x01"),          // a negative size
           tensor_pickle("K\x0a", "K\0"s, "K\x02", minus),          // a negative stride
           tensor_pickle("K\x0a", "K\0"s, "K\x02", huge),           // overflow
           tensor_pickle("K\x0a", "K\0"s, huge + huge, "K\0K\0"s),  // overflow of the number of elements
           tensor_pickle("K\x0a", "K\0"s, "K\0"s + huge + huge, "K\0K\0K\0"s),
           tensor_pickle("K\x0a", "K\0"s, "K\x02", ""),               // fewer strides than sizes
           tensor_pickle(minus, "K\0"s, "K\x01", "K\x01"),            // a negative storage
           tensor_pickle(huge, "K\0"s, "K\x01", "K\x01"),             // a storage of 2^64 bytes
           tensor_pickle("M\xff\xff", "K\0"s, "M\xff\xff", "K\x01"),  // a storage that is not there
           tensor_pickle("K\x0a", "K\0"s, "X\1\0\0\0a"s, "K\x01"),    // a size that is no number
       })
    EXPECT_THROW(read_pickle(pickle), CheckpointError) << testing::PrintToString(pickle);
  const auto numpy = kStart + "cnumpy.core.multiarray\n_reconstruct\n)R(K\1(K\0"s + huge + huge + "t" +
                     "cnumpy\ndtype\n(X\2\0\0\0f4tR\x89X\0\0\0\0tb."s;
  EXPECT_THROW(read_pickle(numpy), CheckpointError);
}

TEST(HostilePickle, SurvivesAnyBytes) {
  const auto pickled = detail::write_pickle(sample());
  const auto numpy = kStart + "cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85"s +
                     "c_codecs\nencode\nX\1\0\0\0bX\6\0\0\0latin1\x86R\x87R("s + "K\1K\2\x85"s +
                     "cnumpy\ndtype\nX\2\0\0\0f4\x89\x88\x87R\x89X\x08\0\0\0abcdefghtb."s;
  std::mt19937_64 random(11);
  int errors = 0, values = 0;
  for (int i = 0; i < count(200000); ++i) {
    auto pickle = i % 3 == 0 ? numpy : pickled.bytes;
    for (uint64_t change = 0; change < 1 + random() % 4; ++change)
      pickle[random() % pickle.size()] = static_cast<char>(random() % 3 == 0 ? "(tRbQ}]u)."[random() % 10] : random());
    try {
      read_pickle(pickle);
      ++values;
    } catch (const CheckpointError&) {
      ++errors;
    }
  }
  EXPECT_GT(errors, 100);
  EXPECT_GT(values, 100);
}

}  // namespace
}  // namespace lockstep
