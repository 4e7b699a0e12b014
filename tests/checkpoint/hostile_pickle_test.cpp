// Hostile pickles: nothing worse than an error happens, and memory and work are linear in the size of the pickle.

#include <random>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/error.h>
#include <lockstep/module_state.h>

#include "base/text.h"
#include "checkpoint/pickle.h"
#include "checkpoint/pickles.h"
#include "checkpoint/resource_use.h"
#include "support/messages.h"
#include "support/slowness.h"

namespace lockstep {
namespace {

using namespace std::string_literals;

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
  expect_error<CheckpointError>([&] { read_pickle(bomb + "."); }, "its values would take more than");
  // A long string that is copied by short opcodes.
  auto copies =
      kStart + "c_codecs\nencode\nq\0X"s + number(1 << 20) + std::string(1 << 20, 'x') + "X\6\0\0\0latin1\x86q\1"s;
  for (int i = 0; i < 100000; ++i) copies += "h\0h\1R0"s;
  expect_error<CheckpointError>([&] { read_pickle(copies + "N."); }, "its values would take more than");
  // The same for the sizes of tensors.
  const auto tensors = kStart + "ctorch._utils\n_rebuild_tensor_v2\nq\0((X\7\0\0\0storagectorch\nFloatStorage\n"s +
                       "X\1\0\0\0\x30X\3\0\0\0cpuK\x0atQK\0("s + repeated("K\1", 64) + "t(" + repeated("K\0"s, 64) +
                       "t\x89Ntq\1"s + repeated("h\0h\1R0"s, 100000);
  expect_error<CheckpointError>([&] { read_pickle(tensors + "N."); }, "its values would take more than");
  // Items of a dict.
  const auto items = kStart + "ccollections\nOrderedDict\n](" + repeated("K\1N\x86", 1000) + "eq\0"s + "0(" +
                     repeated("h\0"s, 100000) + "tR.";
  expect_error<CheckpointError>([&] { read_pickle(items); }, "its values would take more than");
  // A large integer.
  const auto integers =
      kStart + "](\x8b" + number(1 << 20) + std::string(1 << 20, 'x') + "q\0"s + repeated("h\0"s, 100000) + "e.";
  expect_error<CheckpointError>([&] { read_pickle(integers); }, "its values would take more than");
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
  const auto weights = Value::dict({{"weight", torch::randn({30, 20})}, {"bias", torch::randn({30})}});
  const auto pickled = detail::write_pickle(Value::dict({{"model", weights}, {"epoch", 3}, {"loss", 0.5}}));
  const auto numpy = kStart + "cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85"s +
                     "c_codecs\nencode\nX\1\0\0\0bX\6\0\0\0latin1\x86R\x87R("s + "K\1K\2\x85"s +
                     "cnumpy\ndtype\nX\2\0\0\0f4\x89\x88\x87R\x89X\x08\0\0\0abcdefghtb."s;
  std::mt19937_64 random(11);
  int errors = 0, values = 0;
  for (int i = 0; i < soak_count(200000); ++i) {
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

TEST(HostilePickle, RefusesTensorsBelowLongPaths) {
  const auto key = string_opcode(std::string(100000, 'k'));
  const auto tensors = "](" + tensor_opcodes("K\1", "K\1") + "q\0"s + repeated("h\0"s, 100000) + "e";
  expect_error<CheckpointError>([&] { read_pickle(kStart + "}" + key + tensors + "s."); },
                                "the paths of its tensors would take more than");
  EXPECT_EQ(named_tensors(read_pickle(kStart + "}" + key + tensor_opcodes("K\1", "K\1") + "s.")).size(), 1u);
}

TEST(HostilePickle, RefusesManyDimensions) {
  const auto ones = [](int count) { return repeated("K\1", count); };
  EXPECT_EQ(read_pickle(kStart + tensor_opcodes(ones(64), ones(64)) + ".").tensor().dim(), 64);
  expect_error<CheckpointError>([&] { read_pickle(kStart + tensor_opcodes(ones(65), ones(65)) + "."); },
                                "65 dimensions, expected 64");
}

TEST(HostilePickle, CountsTheDimensionsOfEachReferenceToATensor) {
  const auto ones = repeated("K\1", 64);
  const auto references = [&](const std::string& tensor, int count) {
    return kStart + "](" + tensor + "q\0"s + repeated("h\0"s, count) + "e.";
  };
  const auto numpy = "cnumpy.core.multiarray\n_reconstruct\n)R(K\1("s + ones + "tcnumpy\ndtype\nX\2\0\0\0f4\x85R\x89"s +
                     string_opcode("abcd") + "tb";
  for (const auto& tensor : {tensor_opcodes(ones, ones), numpy}) {
    EXPECT_EQ(read_pickle(references(tensor, 300)).size(), 301u);
    expect_error<CheckpointError>([&] { read_pickle(references(tensor, 3000)); }, "its values would take more than");
  }
}

TEST(HostilePickle, IsNoneWithManyTensors) {
  const auto tensor = tensor_opcodes("K\1K\1K\1K\1", "K\1K\1K\1K\1");
  // As torch.save writes one tensor with many names, or in a list.
  auto named = kStart + "}q\0("s, listed = kStart + "]q\0("s;
  for (uint32_t i = 0; i < 20000; ++i) {
    named += string_opcode(text("w", i)) + "r" + number(2 + i) + (i == 0 ? tensor + "q\1" : "j" + number(1));
    listed += i == 0 ? tensor + "r" + number(300) : "j" + number(300);
  }
  EXPECT_EQ(read_pickle(named + "u.").size(), 20000u);
  EXPECT_EQ(read_pickle(listed + "e.").size(), 20000u);
  // As lockstep writes them.
  for (const int dimensions : {0, 4, 64}) {
    const auto many = Value::list(std::vector<Value>(20000, torch::ones(std::vector<int64_t>(dimensions, 1))));
    EXPECT_EQ(read_pickle(detail::write_pickle(many).bytes).size(), 20000u) << dimensions;
  }
}

TEST(HostilePickle, GivesOneTensorForRepeatedReferences) {
  const auto value = read_pickle(kStart + "](" + tensor_opcodes("K\1", "K\1") + "q\0h\0e."s);
  EXPECT_TRUE(value.at(0).tensor().is_same(value.at(1).tensor()));
}

TEST(HostilePickle, KeepsItsPlacesInAnyOrder) {
  const auto store = [](uint32_t place) { return "r" + number(place); };
  const auto get = [](uint32_t place) { return "j" + number(place); };
  // 7 before 0 and 1, 1 twice, and MEMOIZE, which counts the places so far.
  const auto value = read_pickle(kStart + "(K\1" + store(7) + "K\2" + store(0) + "K\3" + store(1) + "K\4" + store(1) +
                                 "K\5\x94" + get(7) + get(0) + get(1) + get(3) + "t.");
  EXPECT_EQ(value, Value::tuple({1, 2, 3, 4, 5, 1, 2, 4, 5}));
}

// --- work and memory

/// Reads a pickle that may be refused.
void try_pickle(const std::string& pickle) {
  try {
    read_pickle(pickle);
  } catch (const CheckpointError&) {
  }
}

struct Flood {
  std::string name;
  std::string (*pickle)(int size);
};

// Each refers, in a few bytes and again and again, to something large. Half of the bytes are the large thing.
const Flood kFloods[] = {
    {"StatesOfObjects",
     [](int n) { return "cm\nC\n)Rq\0("s + repeated("N", n) + "tq\1" + repeated("h\0h\1b0"s, n / 6) + "N."; }},
    {"Arguments",
     [](int n) {
       return "ccollections\nOrderedDict\nq\0("s + repeated("N", n) + "tq\1" + repeated("h\0h\1R0"s, n / 6) + "N.";
     }},
    {"SizesOfNumpyArrays",
     [](int n) {
       return "cnumpy.core.multiarray\n_reconstruct\n)Rq\0"s + "cnumpy\ndtype\nX\2\0\0\0f4\x85Rq\1("s +
              repeated("K\0"s, n) + "tq\2(K\1h\2h\1\x89"s + string_opcode("") + "tq\3" + repeated("h\0h\3b0"s, n / 6) +
              "N.";
     }},
    {"KeysOfStorages",
     [](int n) {
       return string_opcode(std::string(static_cast<size_t>(n), 'k')) + "q\0"s + string_opcode("storage") + "q\1" +
              "ctorch\nFloatStorage\nq\2" + string_opcode("cpu") + "q\3" + repeated("(h\1h\2h\0h\3K\1tQ0"s, n / 13) +
              "N.";
     }},
    {"PlacesThatCollideInAHashTable",
     [](int n) {
       std::string stores = "N";  // libstdc++ has 10273 buckets for 6000 elements
       const auto count = std::min<uint32_t>(static_cast<uint32_t>(n) / 10, 6000);
       for (uint32_t i = 0; i < count; ++i) stores += "r" + number(i * 10273);
       return stores + repeated("j" + number(0), n) + "0N.";
     }},
};

class HostileFloods : public testing::TestWithParam<Flood> {};

INSTANTIATE_TEST_SUITE_P(Of, HostileFloods, testing::ValuesIn(kFloods),
                         [](const auto& info) { return info.param.name; });

TEST_P(HostileFloods, TakeLinearTime) {
  EXPECT_LT(growth(
                10000, [&](int n) { return kStart + GetParam().pickle(n); }, try_pickle),
            kLinear);
}

TEST(HostileWork, OnDevicesThatDoNotExistTakesNoExceptions) {
  const auto devices = [](const std::string& name) {
    return kStart + "ctorch\ndevice\nq\0"s + "0](" + repeated("h\0("s + string_opcode(name) + "tR", 20000) + "e.";
  };
  const auto seconds = [&](const std::string& name) {
    const double begin = seconds_of_thread();
    EXPECT_EQ(read_pickle(devices(name)).size(), 20000u);
    return seconds_of_thread() - begin;
  };
  const double known = seconds("cuda:1");
  EXPECT_LT(seconds("cudo:1"), 10 * known + 0.01);
}

TEST(HostileWork, DevicesAreReadAsBefore) {
  const auto read = [](const std::string& arguments) {
    return read_pickle(kStart + "ctorch\ndevice\n(" + arguments + "tR.");
  };
  EXPECT_EQ(read(string_opcode("cpu")), Value(c10::Device("cpu")));
  EXPECT_EQ(read(string_opcode("cuda:3")), Value(c10::Device("cuda:3")));
  EXPECT_EQ(read(string_opcode("cuda") + "K\2"), Value(c10::Device("cuda:2")));
  EXPECT_EQ(read(string_opcode("meta")), Value(c10::Device("meta")));
  for (const auto* unknown : {"", "cud", "cuda:", "cuda:x", "cuda:-1", "cuda:1000", "cuda:1:2", "cpu:1"})
    EXPECT_EQ(read(string_opcode(unknown)), Value(unknown));
}

TEST(HostileMemory, OfAPickleIsComputedBeforeItIsTaken) {
  const int count = 1 << 19;
  const std::pair<const char*, std::string> pickles[] = {
      {"a string", "](" + string_opcode(std::string(10000, 'x')) + "q\0"s + repeated("h\0"s, count) + "e."},
      {"a list", "](](" + repeated("N", 100) + "eq\0"s + repeated("h\0"s, count) + "e."},
      {"an integer", "](\x8b" + number(10000) + std::string(10000, 'x') + "q\0"s + repeated("h\0"s, count) + "e."},
      {"a class", "(c" + std::string(10000, 'm') + "\nC\nq\0"s + repeated("h\0"s, count) + "t."},
      {"objects", "(c" + std::string(10000, 'm') + "\nC\nq\0"s + repeated("h\0)R"s, count / 2) + "t."},
  };
  for (const auto& [name, opcodes] : pickles) {
    const auto pickle = kStart + opcodes;
    const auto peak = peak_of([&] {
      expect_error<CheckpointError>([&] { read_pickle(pickle); },
                                    "its values would take more than 160 bytes for each of its",
                                    text(pickle.size(), " bytes, and 1 MiB"));
    });
    const auto limit = 40 * static_cast<int64_t>(pickle.size());
    EXPECT_LT(peak, limit + of_sanitizers(limit)) << name;
  }
}

TEST(HostileMemory, OfDevicesOfStoragesIsLimited) {
  std::string pickle = kStart + string_opcode(std::string(500000, 'd')) + "q\0"s + string_opcode("storage") + "q\1" +
                       "ctorch\nFloatStorage\nq\2";
  for (int i = 0; i < 4000; ++i) pickle += "(h\1h\2"s + string_opcode(std::to_string(i)) + "h\0K\1tQ0"s;
  EXPECT_LT(peak_of([&] { try_pickle(pickle + "N."); }), 256 * kMega + of_sanitizers(256 * kMega));
}

TEST(HostileMemory, OfTheStackAndTheMemoIsFreed) {
  const int count = 4 << 20;
  const std::pair<const char*, std::string> pickles[] = {
      {"memo", "N" + repeated("\x94", count) + "."},
      {"stack", "(" + repeated("N", count) + "1N."},
      {"marks", repeated("(", count) + repeated("1", count) + "N."},
  };
  for (const auto& [name, opcodes] : pickles) {
    const auto pickle = kStart + opcodes;
    const auto size = size_of([&] { return detail::PickleReader(pickle); });
    EXPECT_LT(size, 4 * kMega + of_sanitizers(64 * kMega)) << name;
  }
}

TEST(HostileMemory, OfValuesThatAreAcceptedIsLinear) {
  const std::pair<const char*, std::string> pickles[] = {
      {"None", "](" + repeated("N", 500000) + "e."},
      {"lists", "](" + repeated("]", 500000) + "e."},
      {"tuples", "](" + repeated("N\x85", 250000) + "e."},
      {"memoized", "N" + repeated("\x94", 500000) + "."},
      {"repeated strings", "](" + string_opcode(std::string(200, 'x')) + "q\0"s + repeated("h\0"s, 250000) + "e."},
  };
  for (const auto& [name, opcodes] : pickles) {
    const auto pickle = kStart + opcodes;
    const auto peak = peak_of([&] { read_pickle(pickle); });
    const auto limit = 200 * static_cast<int64_t>(pickle.size());
    EXPECT_LT(peak, limit + of_sanitizers(limit)) << name;
  }
}

}  // namespace
}  // namespace lockstep
