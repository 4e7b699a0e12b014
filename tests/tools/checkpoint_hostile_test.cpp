// `lockstep checkpoint` on hostile files: memory, work and output are linear in the size of the file.

#include <sys/resource.h>
#include <sys/stat.h>

#include <cmath>

#include "checkpoint/pickles.h"
#include "support/slowness.h"
#include "tools/checkpoint_process.h"

namespace lockstep {
namespace {

using namespace std::string_literals;
using nlohmann::json;
using testing::HasSubstr;

constexpr int64_t kTera = int64_t{1} << 40;

class HostileFiles : public CheckpointCommand {
 protected:
  /// The processor time of a command that succeeds.
  double seconds(const std::string& arguments) const {
    const auto now = [] {
      rusage used{};
      ::getrusage(RUSAGE_CHILDREN, &used);
      const auto in_seconds = [](const timeval& time) {
        return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
      };
      return in_seconds(used.ru_utime) + in_seconds(used.ru_stime);
    };
    const double begin = now();
    const auto ran = run(arguments);
    EXPECT_EQ(ran.code, 0) << arguments << "\n" << ran.errors;
    return now() - begin;
  }

  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
  }

  int64_t peak_kib(const std::string& arguments) const {
    const auto ran = run(arguments);
    EXPECT_EQ(ran.code, 0) << arguments << "\n" << ran.errors;
    EXPECT_GT(ran.peak_kib, 0);
    return ran.peak_kib;
  }

  void expect_no_file(const std::string& part_of_name) const {
    for (const auto& file : std::filesystem::directory_iterator(folder_.path()))
      EXPECT_EQ(file.path().filename().string().find(part_of_name), std::string::npos) << file.path();
  }
};

Value nested(int depth, Value value) {
  for (int i = 0; i < depth; ++i) {
    auto outer = Value::list();
    outer.elements().push_back(std::move(value));
    value = std::move(outer);
  }
  return value;
}

/// One name for each of these views of a storage.
Value views_of(const at::Tensor& storage, int64_t count, int64_t size) {
  auto dict = Value::dict();
  for (int64_t i = 0; i < count; ++i) dict.items().emplace_back("t" + std::to_string(i), storage.narrow(0, i, size));
  return dict;
}

TEST_F(HostileFiles, RepeatedElementsAreSummarizedOnce) {
  save("a.pt", Value::dict({{"x", at::tensor({3., -1., NAN}).view({3, 1}).expand({3, kTera})}}));
  const auto found = object("show a.pt")["tensors"][0];
  EXPECT_EQ(found["shape"], json({3, kTera}));
  EXPECT_EQ(found["mean"], 1);
  EXPECT_EQ(found["norm"], std::sqrt(10. * static_cast<double>(kTera)));
  EXPECT_EQ(found["min"], -1);
  EXPECT_EQ(found["max"], 3);
  EXPECT_EQ(found["nan"], kTera);
  save("b.pt", Value::dict({{"x", at::tensor({3., -2., NAN}).view({3, 1}).expand({3, kTera})}}));
  const auto difference = object("diff a.pt b.pt", 1)["differences"][0];
  EXPECT_EQ(difference["max_absolute"], 1);
  EXPECT_EQ(difference["elements"], kTera);
  EXPECT_EQ(run("verify a.pt").code, 0);
}

TEST_F(HostileFiles, RepeatedElementsAreNotWritten) {
  save("a.pt", Value::dict({{"small", at::ones({3})}, {"x", at::zeros({1}).expand({kTera})}}));
  expect_failure(
      "convert a.pt a.safetensors", 1,
      "tensor 'x' of sizes [1099511627776] has 4.0 TiB, but only 16 B are stored: the tensors repeat the "
      "elements of their storages more than 64 times; convert to .pt, which keeps the repetitions, or select");
  expect_no_file("safetensors");
  ASSERT_EQ(run("convert a.pt b.pt").code, 0);
  EXPECT_LT(std::filesystem::file_size(path("b.pt")), 4096u);
  EXPECT_EQ(load_checkpoint(path("b.pt")), load_checkpoint(path("a.pt")));
  ASSERT_EQ(run("convert --key small a.pt small.safetensors").code, 0);
}

TEST_F(HostileFiles, OverlappingRowsAreRefused) {
  const auto rows = at::ones({20000}).as_strided({10000, 10000}, {1, 1});
  save("a.pt", Value::dict({{"small", at::ones({3})}, {"x", rows}}));
  expect_failure("show a.pt", 1, "tensor 'x' of sizes [10000, 10000] has 381.5 MiB, but only 78.1 KiB are stored");
  expect_failure("show a.pt", 1, "select others with --tensor");
  EXPECT_EQ(object("show a.pt --tensor small")["tensors"].size(), 1u);
  save("b.pt", Value::dict({{"small", at::ones({3})}, {"x", rows}}));
  expect_failure("diff a.pt b.pt", 2, "a.pt and b.pt: tensor 'x'");
  expect_failure("diff a.pt b.pt", 2, "'lockstep checkpoint convert --key NAME' writes one entry of a file");
  for (const auto* name : {"a", "b"})
    ASSERT_EQ(run("convert --key small "s + name + ".pt " + name + "-small.pt").code, 0);
  EXPECT_EQ(object("diff a-small.pt b-small.pt")["equal"], true);
  expect_failure("convert a.pt a.safetensors", 1, "tensor 'x'");
  EXPECT_EQ(run("verify a.pt").code, 0);
}

TEST_F(HostileFiles, ManyViewsOfAStorageAreRefused) {
  save("a.pt", views_of(at::ones({200000}), 1000, 100000));
  for (const auto* arguments : {"show a.pt", "convert a.pt a.safetensors"})
    expect_failure(arguments, 1, "the tensors repeat the elements of their storages more than 64 times");
  expect_no_file("safetensors");
}

TEST_F(HostileFiles, NamesOfAStorageDoNotCountAsElements) {
  save("a.pt", views_of(at::ones({20500}, at::kByte), 20000, 500));
  EXPECT_EQ(run("convert a.pt a.safetensors").code, 0);  // 10 MB
  save("b.pt", views_of(at::ones({21000}, at::kByte), 20000, 1000));
  expect_failure("convert b.pt b.safetensors", 1, "b.pt: tensor 't");
  expect_no_file("b.safetensors");
}

TEST_F(HostileFiles, MemoryOfManyDtypesIsRefused) {
  const std::pair<const char*, char> types[] = {{"Float", 4}, {"Int", 4}, {"Short", 8}, {"Byte", 16}, {"Char", 16}};
  std::string opcodes = kStart + "]";
  for (const auto& [type, elements] : types) {
    opcodes += tensor_opcodes("K\4", "K\1", type, elements) + "a";
    write(type + ".pt"s, zip_of({{"data.pkl", opcodes + "."}, {"data/0", std::string(16, '\1')}}));
  }
  EXPECT_EQ(object("convert Byte.pt a.pt")["tensors"], 4);
  expect_failure("convert Char.pt b.pt", 1,
                 "Char.pt: tensor '4' has the memory of tensors of 4 other dtypes, expected 4 dtypes or fewer");
  expect_no_file("b.pt");
}

TEST_F(HostileFiles, SharedTensorsAreNot) {
  auto tied = Value::dict();
  const auto shared = at::ones({100000});
  for (int i = 0; i < 40; ++i) tied.set("layer" + std::to_string(i), shared);
  save("a.pt", tied);
  EXPECT_EQ(object("show a.pt")["totals"]["tensors"], 40);
  EXPECT_EQ(object("diff a.pt a.pt")["equal"], true);
  EXPECT_EQ(object("convert a.pt a.safetensors")["bytes"], 16000000);
  auto more = Value::dict();
  for (int i = 0; i < 1000; ++i) more.set("layer" + std::to_string(i), shared);
  save("b.pt", more);
  EXPECT_EQ(object("show b.pt")["totals"]["tensors"], 1000) << "equal views are summarized once";
  EXPECT_EQ(object("diff b.pt b.pt")["equal"], true);
}

TEST_F(HostileFiles, TransposedTensorsAreSummarizedAsOthers) {
  const auto plain = at::randn({1500, 1500});
  save("a.pt", Value::dict({{"x", plain.t().contiguous()}}));
  save("b.pt", Value::dict({{"x", plain.t()}}));
  EXPECT_EQ(object("show a.pt")["tensors"], object("show b.pt")["tensors"]);
  EXPECT_EQ(object("diff a.pt b.pt")["equal"], true);
}

TEST_F(HostileFiles, ManyKeysTakeLinearTime) {
  for (const int count : {10000, 100000}) {
    auto dict = Value::dict();
    for (int i = 0; i < count; ++i) dict.items().emplace_back("k" + std::to_string(i), i);
    save(std::to_string(count) + ".pt", dict);
  }
  EXPECT_LT(seconds("show --json 100000.pt"), 40 * seconds("show --json 10000.pt"));
}

TEST_F(HostileFiles, DeepListsTakeLittleMemory) {
  save("a.pt", nested(400, Value::list(std::vector<Value>(100000))));
  save("b.pt", Value::list());
  const auto least = peak_kib("show b.pt");
  for (const auto* command : {"show a.pt", "show --json a.pt", "verify a.pt", "convert a.pt c.pt"})
    EXPECT_LT(peak_kib(command) - least, 300 * 100 * kSlowness) << command << ", of 100 KB";
  expect_failure("diff a.pt a.pt", 2, "a.pt: the paths of the first");
}

TEST_F(HostileFiles, DeepListsAreShortTrees) {
  auto dict = Value::dict();
  for (int i = 0; i < 80; ++i) dict.items().emplace_back(i, nested(400, Value::list()));
  save("a.pt", dict);
  const auto ran = run("show a.pt");
  EXPECT_EQ(ran.code, 0);
  EXPECT_THAT(ran.output, HasSubstr("0: list of 1 element\n  0: list of 1 element\n"));
  EXPECT_THAT(ran.output, HasSubstr("... 1 more\n1: list of 1 element\n"));
  EXPECT_LT(ran.output.size(), std::filesystem::file_size(path("a.pt")));
}

TEST_F(HostileFiles, JsonOfADictTakesItsMemoryOnce) {
  auto dict = Value::dict({{"large", Value::list(std::vector<Value>(400000, ""))}});
  for (int i = 0; i < 4; ++i) dict.set(i, i);
  save("a.pt", dict);
  // An empty string takes 64 bytes in JSON, and a list may have room for as many elements again.
  EXPECT_LT(peak_kib("show --json a.pt") - peak_kib("show a.pt"), 40000 * kSlowness);
}

TEST_F(HostileFiles, LongKeysOfManyEntriesAreRefused) {
  const std::string key(200, 'k');
  save("a.pt", Value::dict({{key, Value::list(std::vector<Value>(100000))}, {"small", at::ones({1})}}));
  expect_failure("diff a.pt a.pt", 2, "expected 32 for each of the file's");
  expect_failure("diff a.pt a.pt", 2, "'lockstep checkpoint convert --key NAME' writes one entry of a file");
  // Values beside tensors are listed with their paths.
  std::vector<Value> beside(100000);
  beside.emplace_back(at::ones({1}));
  save("b.pt", Value::dict({{key, Value::list(beside)}, {"small", at::ones({1})}}));
  expect_failure("convert b.pt b.safetensors", 1, "b.pt: the paths of the first");
  expect_failure("convert b.pt b.safetensors", 1, "select another entry with --key");
  EXPECT_EQ(run("convert --key small b.pt b.safetensors").code, 0);
  const auto tensors = "](" + tensor_opcodes("K\1", "K\1", "Float", 1) + "q\0"s + repeated("h\0"s, 10000) + "e";
  const auto pickle = kStart + "}" + string_opcode(std::string(600, 'k')) + tensors + "s" + repeated("N0", 10000) + ".";
  write("c.pt", zip_of({{"data.pkl", pickle}, {"data/0", "abcd"}}));
  for (const auto* command : {"show c.pt", "show --json c.pt", "convert c.pt d.pt", "convert c.pt d.safetensors"})
    expect_failure(command, 1, "c.pt: the paths of the first");
}

TEST_F(HostileFiles, PathsOfOptimizersAreNot) {
  auto state = Value::dict();
  for (int i = 0; i < 4000; ++i) {
    auto of_one = Value::dict({{"step", i}, {"exp_avg", at::ones({1})}, {"exp_avg_sq", at::ones({1})}});
    state.items().emplace_back(std::string(190, 'm') + std::to_string(i), std::move(of_one));
  }
  save("state.pt", Value::dict({{"optimizer", Value::dict({{"state", state}})}}));
  auto numbers = Value::list();
  for (int i = 0; i < 100000; ++i) numbers.elements().push_back(i % 256);
  const auto groups = Value::list({Value::dict({{"params", numbers}})});
  save("groups.pt", Value::dict({{"optimizer", Value::dict({{"param_groups", groups}})}}));
  EXPECT_EQ(object("diff state.pt state.pt")["compared"], 12000);
  EXPECT_EQ(object("diff groups.pt groups.pt")["compared"], 100000);
}

TEST_F(HostileFiles, AFifoDoesNotBlock) {
  ASSERT_EQ(::mkfifo(path("a.pt").c_str(), 0600), 0);
  for (const auto* command : {"show a.pt", "verify a.pt", "convert a.pt b.pt", "diff a.pt a.pt", "ls a.pt"})
    expect_failure(command, 2, "a.pt: no such file");
  const auto listed = Value::dict({{"file", "a.pt"}, {"sha256", "0"}});
  save("main.pt", Value::dict({{"lockstep", "0.1.0"}, {"shards", Value::list({listed})}}));
  expect_failure("show main.pt", 1, "not a regular file");
  EXPECT_EQ(run("verify main.pt").code, 1);
  EXPECT_EQ(run("ls .").code, 0);
}

}  // namespace
}  // namespace lockstep
