// Hostile files: memory, work and what is written are linear in the size of the file.

#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/error.h>
#include <lockstep/module_state.h>
#include <lockstep/safetensors.h>

#include "base/text.h"
#include "checkpoint/archive.h"
#include "checkpoint/pickle.h"
#include "checkpoint/pickles.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/shards.h"
#include "support/messages.h"
#include "support/slowness.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using namespace std::string_literals;

constexpr int64_t kTera = int64_t{1} << 40;

/// The processor time of this thread, which does not depend on what else the machine does.
double seconds_of_thread() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// How many times longer the call takes for an input of size 10 n than of size n: 10 if its work is linear, 100 if
/// quadratic.
template <class Make, class Call>
double growth(int n, const Make& make, const Call& call) {
  const auto seconds = [&](int size) {
    const auto input = make(size);
    double least = 1e9;
    for (int i = 0; i < 3; ++i) {
      const double begin = seconds_of_thread();
      call(input);
      least = std::min(least, seconds_of_thread() - begin);
      if (least > 0.1) break;
    }
    return least;
  };
  return seconds(10 * n) / std::max(seconds(n), 1e-4);
}

constexpr double kLinear = 40;

/// A line of /proc/self/status in bytes.
int64_t memory(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(name + ":")) return std::stoll(line.substr(name.size() + 1)) * 1024;
  return 0;
}

/// The most memory that the call takes beyond what the process has.
template <class Call>
int64_t peak_of(const Call& call) {
  std::ofstream("/proc/self/clear_refs") << "5";  // begins a new VmHWM
  const auto before = memory("VmRSS");
  call();
  return std::max<int64_t>(0, memory("VmHWM") - before);
}

constexpr int64_t kMega = 1 << 20;

/// Memory that only sanitizers need: they keep what was freed, and guard each allocation.
int64_t of_sanitizers(int64_t limit) {
  return kSlowness > 1 ? 4 * limit + 512 * kMega : 0;
}

// --- pickles

/// Reads a pickle that may be refused.
void try_pickle(const std::string& pickle) {
  try {
    read_pickle(pickle);
  } catch (const CheckpointError&) {
  }
}

/// Opcodes of a tensor of 10 floats, with sizes and strides as opcodes.
std::string tensor_opcodes(const std::string& sizes, const std::string& strides) {
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + string_opcode("storage") + "ctorch\nFloatStorage\n" +
         string_opcode("0") + string_opcode("cpu") + "K\x0atQK\0("s + sizes + "t(" + strides + "t\x89NtR";
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
    {"KeysOfADict",
     [](int n) {
       std::string items = "}(";
       for (int i = 0; i < n / 12; ++i) items += string_opcode(std::to_string(1000000 + i)) + "N";
       return items + "u.";
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
    const auto peak = peak_of([&, what = name] {
      expect_error<CheckpointError>([&] { read_pickle(pickle); }, "far larger than the pickle");
      (void)what;
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
    const auto peak = peak_of([&, what = name] { EXPECT_NO_THROW(read_pickle(pickle)) << what; });
    const auto limit = 200 * static_cast<int64_t>(pickle.size());
    EXPECT_LT(peak, limit + of_sanitizers(limit)) << name;
  }
}

TEST(HostilePickle, RefusesTensorsBelowLongPaths) {
  const auto key = string_opcode(std::string(100000, 'k'));
  const auto tensors = "](" + tensor_opcodes("K\1", "K\1") + "q\0"s + repeated("h\0"s, 100000) + "e";
  expect_error<CheckpointError>([&] { read_pickle(kStart + "}" + key + tensors + "s."); }, "paths of its tensors");
  EXPECT_EQ(named_tensors(read_pickle(kStart + "}" + key + tensor_opcodes("K\1", "K\1") + "s.")).size(), 1u);
}

TEST(HostilePickle, RefusesManyDimensions) {
  const auto ones = [](int count) { return repeated("K\1", count); };
  EXPECT_EQ(read_pickle(kStart + tensor_opcodes(ones(64), ones(64)) + ".").tensor().dim(), 64);
  expect_error<CheckpointError>([&] { read_pickle(kStart + tensor_opcodes(ones(65), ones(65)) + "."); },
                                "65 dimensions, expected 64");
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

// --- tensors with more elements than their storages

TEST(ExpandedTensors, ComeBackWithoutTheirElements) {
  const TemporaryFolder folder;
  const auto path = (folder.path() / "a.pt").string();
  const auto value =
      Value::dict({{"x", torch::ones({1}).expand({kTera})}, {"y", torch::ones({2, 1}).expand({2, kTera})}});
  save_checkpoint(path, value);
  struct stat file {};
  ASSERT_EQ(::stat(path.c_str(), &file), 0);
  EXPECT_LT(file.st_size, 4096);
  const auto read = load_checkpoint(path);
  EXPECT_EQ(read.at("x").tensor().numel(), kTera);
  EXPECT_EQ(read, value);
  EXPECT_FALSE(read == Value::dict({{"x", torch::zeros({1}).expand({kTera})}, {"y", value.at("y")}}));
  EXPECT_TRUE(verify_checkpoint(path).damage.empty());
}

// --- shards

Value piece(int64_t begin, int64_t size, const at::Tensor& tensor) {
  return Value::dict({{"parameter", 0}, {"begin", begin}, {"size", size}, {"state", Value::dict({{"m", tensor}})}});
}

Value shard(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, std::vector<Value> pieces) {
  const auto list = [](const std::vector<int64_t>& numbers) {
    return Value::list(std::vector<Value>(numbers.begin(), numbers.end()));
  };
  return Value::dict({{"param_groups", Value::list()},
                      {"sizes", Value::list({list(sizes)})},
                      {"strides", Value::list({list(strides)})},
                      {"pieces", Value::list(std::move(pieces))}});
}

TEST(HostileShards, AreCheckedBeforeMemoryIsAllocated) {
  using detail::merge_shards;
  const auto two = torch::ones({2});
  const auto merged = merge_shards({shard({2, 2}, {1, 2}, {piece(0, 2, two), piece(2, 2, two.clone())})});
  EXPECT_EQ(merged.at("state").at(0).at("m"), Value(torch::ones({2, 2}).t()));

  const auto expect_refused = [](const Value& shard, const auto&... parts) {
    expect_error<CheckpointError>([&] { merge_shards({shard}); }, parts...);
  };
  expect_refused(shard({kTera}, {1}, {piece(0, 2, two)}), "have 2 elements", "expected 1099511627776");
  expect_refused(shard({kTera}, {1}, {piece(0, kTera, torch::ones({1}).expand({kTera}))}),
                 "but only 4 bytes are stored");
  const auto quarter = torch::ones({1}).expand({int64_t{1} << 60});
  expect_refused(shard({1}, {1}, std::vector<Value>(4, piece(0, quarter.numel(), quarter))), "only 4 bytes are stored");
  expect_refused(shard({4}, {1}, {piece(0, 2, two), piece(2, 2, two)}), "have 16 bytes, but only 8");
  expect_refused(shard({4}, {1}, {piece(0, 2, two), piece(2, 2, two.to(torch::kByte))}), "as float32 and as uint8");
  expect_refused(shard({2, kTera}, {1, 0}, {piece(0, 2, two)}), "expected memory without gaps");
  expect_refused(shard({kTera, kTera}, {1, 1}, {piece(0, 2, two)}), "expected memory without gaps");
  expect_refused(shard({2}, {-1}, {piece(0, 2, two)}), "expected memory without gaps");
  expect_refused(shard({2, 1}, {1}, {piece(0, 2, two)}), "expected memory without gaps");
  expect_refused(shard({2}, {1}, {piece(1, 2, two)}), "has 2 elements from 1");
  expect_refused(shard({2}, {1}, {piece(std::numeric_limits<int64_t>::max(), 2, two)}), "has 2 elements from");
}

TEST(HostileShards, AreNotReadTwice) {
  const TemporaryFolder folder;
  const auto in_folder = [&](const std::string& name) { return (folder.path() / name).string(); };
  const auto one = shard({2}, {1}, {piece(0, 2, torch::ones({2}))});
  const auto digest = save_checkpoint(in_folder("shard.pt"), Value::dict({{"o", one}}));
  const auto listed = Value::dict({{"file", "shard.pt"}, {"sha256", digest}});
  save_checkpoint(in_folder("main.pt"), Value::dict({{"lockstep", "0.1.0"}, {"shards", Value::list({listed})}}));
  EXPECT_EQ(load_merged_checkpoint(in_folder("main.pt")).at("o").at("state").size(), 1u);
  const auto twice = Value::list({listed, listed});
  save_checkpoint(in_folder("twice.pt"), Value::dict({{"lockstep", "0.1.0"}, {"shards", twice}}));
  expect_error<CheckpointError>([&] { load_merged_checkpoint(in_folder("twice.pt")); }, "lists shard.pt twice");
}

TEST(HostileShards, OfManyObjectsShareTheLimit) {
  const TemporaryFolder folder;
  const auto in_folder = [&](const std::string& name) { return (folder.path() / name).string(); };
  const auto one = shard({2}, {1}, {piece(0, 2, torch::ones({2}))});
  const auto digest = save_checkpoint(in_folder("shard.pt"), Value::dict({{"a", one}, {"b", one}}));
  const auto listed = Value::dict({{"file", "shard.pt"}, {"sha256", digest}});
  save_checkpoint(in_folder("main.pt"), Value::dict({{"lockstep", "0.1.0"}, {"shards", Value::list({listed})}}));
  expect_error<CheckpointError>([&] { load_merged_checkpoint(in_folder("main.pt")); }, "have 16 bytes, but only 8");
}

TEST(HostileShards, AFifoDoesNotBlock) {
  const TemporaryFolder folder;
  const auto in_folder = [&](const std::string& name) { return (folder.path() / name).string(); };
  ASSERT_EQ(::mkfifo(in_folder("fifo.pt").c_str(), 0600), 0);
  const auto listed = Value::dict({{"file", "fifo.pt"}, {"sha256", "0"}});
  save_checkpoint(in_folder("main.pt"), Value::dict({{"lockstep", "0.1.0"}, {"shards", Value::list({listed})}}));
  expect_error<CheckpointError>([&] { load_checkpoint(in_folder("fifo.pt")); }, "not a regular file");
  expect_error<CheckpointError>([&] { verify_checkpoint(in_folder("fifo.pt")); }, "not a regular file");
  expect_error<CheckpointError>([&] { load_merged_checkpoint(in_folder("main.pt")); }, "fifo.pt", "not a regular file");
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
