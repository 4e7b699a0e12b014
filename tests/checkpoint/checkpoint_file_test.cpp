#include <lockstep/checkpoint_file.h>

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <lockstep/error.h>
#include <lockstep/module_state.h>

#include "support/messages.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

class CheckpointFile : public testing::Test {
 protected:
  std::string path(const std::string& name = "a.pt") const { return (folder_.path() / name).string(); }

  Value through_file(const Value& value, const LoadOptions& options = {}) const {
    save_checkpoint(path(), value);
    return load_checkpoint(path(), options);
  }

  TemporaryFolder folder_;
};

TEST_F(CheckpointFile, KeepsEveryKindOfValue) {
  const auto value = Value::dict({
      {"none", nullptr},
      {"true", true},
      {"zero", 0},
      {"byte", 255},
      {"short", 65535},
      {"negative", -1},
      {"int", INT32_MIN},
      {"long", INT64_MIN},
      {"big", Value::integer(std::string(300, '\x7f'))},
      {"float", 0.1},
      {"text", "gr\xc3\xbc\xc3\x9f"},
      {"bytes", Value::bytes(std::string("\0\xff\x80", 3))},
      {"dtype", torch::kBFloat16},
      {"device", c10::Device("cuda:1")},
      {"list", Value::list({1, Value::list()})},
      {"tuple", Value::tuple({1, Value::tuple()})},
      {"set", Value::set({1})},
      {7, Value::dict({{"nested", "yes"}})},
      {"tensor", torch::randn({3, 4})},
      {"scalar", torch::tensor(5)},
      {"no elements", torch::zeros({0, 3})},
      {"half", torch::ones({2}, torch::kHalf)},
      {"complex", torch::ones({2}, torch::kComplexFloat)},
  });
  EXPECT_EQ(through_file(value), value);
}

TEST_F(CheckpointFile, IntegersOf64BitsAreIntegers) {
  EXPECT_EQ(Value::integer(std::string(20, '\xff')), Value(-1));
  EXPECT_EQ(Value::integer(std::string("\x80\0\0\0\0\0\0\0\0\0", 10)), Value(128));
  const auto big = Value::integer(std::string(8, '\0') + '\x01');
  EXPECT_EQ(big.kind(), Value::Kind::kBigInt);
  EXPECT_EQ(big.to_string(), "18446744073709551616");
  EXPECT_EQ(Value::integer(std::string(8, '\0') + '\xff').to_string(), "-18446744073709551616");
  EXPECT_EQ(Value::integer(std::string(80, '\x7f')).to_string().size(), 193u);
  EXPECT_EQ(Value::integer(std::string(81, '\x7f')).to_string(), "<integer of 648 bits>");
}

TEST_F(CheckpointFile, TensorsThatOverlapStillDo) {
  const auto row = torch::arange(10.0);
  const auto loaded = through_file(Value::dict({{"row", row}, {"part", row.narrow(0, 2, 3)}, {"again", row}}));
  loaded.at("part").tensor().fill_(-1);
  EXPECT_TRUE(torch::equal(loaded.at("row").tensor().narrow(0, 2, 3), torch::full({3}, -1.0)));
  EXPECT_EQ(loaded.at("again").tensor().data_ptr(), loaded.at("row").tensor().data_ptr());
}

TEST_F(CheckpointFile, PartsOfALargeBufferAreSavedAlone) {
  const auto buffer = torch::randn({1 << 20});
  const auto value = Value::dict({{"a", buffer.narrow(0, 100, 10)},
                                  {"b", buffer.narrow(0, 5000, 10)},
                                  {"column", torch::randn({1024, 1024}).select(1, 7).narrow(0, 0, 20)}});
  EXPECT_EQ(through_file(value), value);
  EXPECT_LT(std::filesystem::file_size(path()), 8000u);
}

TEST_F(CheckpointFile, KeepsTheStridesOfADenseTensor) {
  const auto image = torch::randn({2, 3, 4, 5}).contiguous(torch::MemoryFormat::ChannelsLast);
  const auto loaded = through_file(Value::dict({{"x", image}})).at("x").tensor();
  EXPECT_EQ(loaded.strides(), image.strides());
  EXPECT_TRUE(torch::equal(loaded, image));
}

TEST_F(CheckpointFile, RefusesTensorsThatPythonCouldNotLoad) {
  EXPECT_THAT(error_of<UsageError>([&] { save_checkpoint(path(), Value::list({at::Tensor()})); }),
              testing::HasSubstr("undefined"));
  EXPECT_THAT(error_of<UsageError>([&] { save_checkpoint(path(), torch::eye(3).to_sparse()); }),
              testing::HasSubstr("sparse"));
  EXPECT_THAT(error_of<UsageError>([&] { save_checkpoint(path(), Value::object("a.B", {}, {})); }),
              testing::HasSubstr("a.B"));
  EXPECT_THAT(error_of<UsageError>([&] { save_checkpoint(path(), Value::list({"caf\xe9"})); }),
              testing::HasSubstr("Value::bytes"));
  EXPECT_THAT(error_of<UsageError>([&] {
                save_checkpoint(path(), Value::dict({{Value::list({1}), 2}}));
              }),
              testing::HasSubstr("cannot hash"));
  EXPECT_THAT(error_of<UsageError>([&] { save_checkpoint(path(), Value::set({Value::tuple({Value::dict()})})); }),
              testing::HasSubstr("cannot hash"));
  auto deep = Value::list();
  for (int i = 0; i < 600; ++i) deep = Value::list({std::move(deep)});
  EXPECT_THAT(error_of<UsageError>([&] { save_checkpoint(path(), deep); }), testing::HasSubstr("nested"));
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

TEST_F(CheckpointFile, KeepsLongStringsThatRepeat) {
  const auto value = Value::list(std::vector<Value>(5000, std::string(5000, 'x')));
  EXPECT_EQ(through_file(value), value);
}

TEST_F(CheckpointFile, LeavesShardsOfOthersAlone) {
  const auto value = Value::dict({{"shards", 8}, {"model", torch::ones({2})}});
  save_checkpoint(path(), value);
  EXPECT_EQ(load_merged_checkpoint(path()), value);
}

TEST_F(CheckpointFile, DictsCanBeChanged) {
  auto value = Value::dict({{"model", Value::dict({{"fc.weight", 1}, {"fc.bias", 2}})}});
  EXPECT_TRUE(value.at("model").erase("fc.weight"));
  EXPECT_FALSE(value.at("model").erase("fc.weight"));
  value.at("model").at("fc.bias") = 3;
  EXPECT_EQ(value, Value::dict({{"model", Value::dict({{"fc.bias", 3}})}}));
}

TEST_F(CheckpointFile, ReplacesAFileOnlyWhenTheNewOneIsComplete) {
  save_checkpoint(path(), Value::dict({{"old", 1}}));
  EXPECT_THROW(save_checkpoint(path(), Value::list({at::Tensor()})), UsageError);
  EXPECT_EQ(load_checkpoint(path()), Value::dict({{"old", 1}}));
}

TEST_F(CheckpointFile, IsEqualForEqualValues) {
  const auto value = Value::dict({{"x", torch::arange(100)}});
  const auto one = save_checkpoint(path("1.pt"), value), two = save_checkpoint(path("2.pt"), value);
  EXPECT_EQ(one, two);
  EXPECT_EQ(one, verify_checkpoint(path("2.pt")).sha256);
  EXPECT_NE(one, save_checkpoint(path("3.pt"), Value::dict({{"x", torch::arange(100) + 1}})));
}

TEST_F(CheckpointFile, OnTheMetaDeviceHasSizesButNoData) {
  const auto loaded = through_file(Value::dict({{"x", torch::ones({3, 4})}, {"y", 1}}), {.map_location = torch::kMeta});
  EXPECT_TRUE(loaded.at("x").tensor().is_meta());
  EXPECT_EQ(loaded.at("x").tensor().sizes(), (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(loaded.at("y").as_int(), 1);
}

TEST_F(CheckpointFile, AsksTheMapForEachDevice) {
  std::vector<std::string> asked;
  MapLocation::Function map = [&](c10::Device saved) {
    asked.push_back(saved.str());
    return c10::Device(c10::kCPU);
  };
  through_file(Value::dict({{"x", torch::ones({3})}}), {.map_location = map});
  EXPECT_EQ(asked, std::vector<std::string>{"cpu"});
  const MapLocation list(
      std::vector<std::pair<c10::Device, c10::Device>>{{c10::Device("cuda:0"), c10::Device("cuda:1")}});
  EXPECT_EQ(list("cuda:0"), c10::Device("cuda:1"));
  EXPECT_EQ(list("cpu"), c10::Device("cpu"));
}

TEST_F(CheckpointFile, ReadsArchivesOfLibTorch) {
  torch::nn::Sequential model(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2));
  torch::save(model, path("module.pt"));
  torch::nn::Sequential other(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2));
  load_state_dict(*other, load_checkpoint(path("module.pt")));
  EXPECT_EQ(state_dict(*other), state_dict(*model));

  torch::serialize::OutputArchive archive, inner(archive.compilation_unit());
  inner.write("flag", c10::IValue(true));
  archive.write("weights", torch::ones({2}));
  archive.write("count", c10::IValue(5));
  archive.write("name", c10::IValue("x"));
  archive.write("rates", c10::IValue(std::vector<double>{0.5, 0.25}));
  archive.write("inner", inner);
  archive.save_to(path("archive.pt"));
  const auto loaded = load_checkpoint(path("archive.pt"));
  EXPECT_TRUE(torch::equal(loaded.at("weights").tensor(), torch::ones({2})));
  EXPECT_EQ(loaded.at("count"), Value(5));
  EXPECT_EQ(loaded.at("name"), Value("x"));
  EXPECT_EQ(loaded.at("rates"), Value::list({0.5, 0.25}));
  EXPECT_EQ(loaded.at("inner").at("flag"), Value(true));

  torch::save(std::vector<torch::Tensor>{torch::ones({2}), torch::zeros({1})}, path("tensors.pt"));
  EXPECT_TRUE(torch::equal(load_checkpoint(path("tensors.pt")).at("0").tensor(), torch::ones({2})));
}

TEST_F(CheckpointFile, ReadsAndWritesSafetensors) {
  const std::map<std::string, at::Tensor> tensors{{"a", torch::randn({3, 2})}, {"b.c", torch::arange(4)}};
  save_safetensors(path("x.safetensors"), tensors);
  const auto loaded = load_checkpoint(path("x.safetensors"));
  EXPECT_TRUE(torch::equal(loaded.at("a").tensor(), tensors.at("a")));
  EXPECT_TRUE(torch::equal(loaded.at("b.c").tensor(), tensors.at("b.c")));
  EXPECT_TRUE(load_checkpoint(path("x.safetensors"), {.map_location = torch::kMeta}).at("a").tensor().is_meta());
  EXPECT_TRUE(verify_checkpoint(path("x.safetensors")).damage.empty());
}

TEST_F(CheckpointFile, NamesTheFileThatIsNone) {
  expect_error<CheckpointError>([&] { load_checkpoint(path("none.pt")); }, path("none.pt"), "no such file");
  expect_error<CheckpointError>([&] { load_checkpoint(folder_.path().string()); }, "not a regular file");
  std::ofstream(path("text.pt")) << "no checkpoint, although long enough to be one";
  expect_error<CheckpointError>([&] { load_checkpoint(path("text.pt")); }, path("text.pt"), "zip");
  std::ofstream(path("empty.pt")).flush();
  expect_error<CheckpointError>([&] { load_checkpoint(path("empty.pt")); }, "0 bytes");
  expect_error<SystemError>([&] { save_checkpoint(path("missing/a.pt"), 1); }, "missing", "No such file");
}

TEST_F(CheckpointFile, ValuesNameTheKindThatTheyHave) {
  const auto value = Value::dict({{"a", 1}, {"b", "text"}});
  expect_error<UsageError>([&] { value.at("c"); }, "'c'", "'a' and 'b'");
  expect_error<UsageError>([&] { value.at("b").as_int(); }, "str", "int");
  expect_error<UsageError>([&] { value.at("a").tensor(); }, "int", "tensor");
  EXPECT_EQ(value.to_string(), "{'a': 1, 'b': 'text'}");
  EXPECT_EQ(value.to_string(10), "{'a': 1...");
}

TEST_F(CheckpointFile, ValuesAreIndexedByKeysAndPositions) {
  auto state = Value::dict({{"groups", Value::list({Value::dict({{"lr", 0.1}})})}, {"betas", Value::tuple({0.9, 1})}});
  state["groups"][0]["lr"] = 0.5;
  const auto& constant = state;
  EXPECT_EQ(constant["groups"][0]["lr"].as_double(), 0.5);
  EXPECT_EQ(constant["betas"].at(1).as_int(), 1);
  expect_error<UsageError>([&] { state["groups"][1]; }, "no element 1 in a list of 1", "from 0 to 0");
  expect_error<UsageError>([&] { constant["betas"][-1]; }, "no element -1 in a tuple of 2", "from 0 to 1");
  expect_error<UsageError>([&] { constant["betas"]["lr"]; }, "no element 'lr' in a tuple of 2");
  expect_error<UsageError>([&] { Value::list()[0]; }, "no element 0 in an empty list");
  expect_error<UsageError>([&] { state["epoch"] = 3; }, "'epoch'", "'groups' and 'betas'");
  EXPECT_FALSE(state.contains("epoch")) << "operator[] must not insert";
}

// --- modules

struct Net : torch::nn::Module {
  Net() : fc(register_module("fc", torch::nn::Linear(2, 3))), norm(register_module("norm", torch::nn::BatchNorm1d(3))) {
    scale = register_parameter("scale", torch::ones({1}));
  }
  torch::Tensor scale;
  torch::nn::Linear fc;
  torch::nn::BatchNorm1d norm;
};

TEST(ModuleState, HasPythonsNamesInPythonsOrder) {
  Net net;
  std::vector<std::string> names;
  const auto dict = state_dict(net);
  for (const auto& [name, tensor] : dict.items()) names.push_back(name.as_string());
  EXPECT_EQ(names, (std::vector<std::string>{"scale", "fc.weight", "fc.bias", "norm.weight", "norm.bias",
                                             "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}));
}

TEST(ModuleState, ReportsAllDifferencesInOneMessageAndChangesNothing) {
  Net net, other;
  auto dict = state_dict(other);
  dict.set("fc.weight", torch::ones({4, 4}));
  dict.set("extra", torch::ones({1}));
  std::erase_if(dict.items(), [](const auto& item) { return item.first == Value("scale"); });
  const auto before = net.fc->bias.clone();
  expect_error<UsageError>([&] { load_state_dict(net, dict); }, "missing: scale", "unexpected: extra",
                           "fc.weight is [4, 4], expected [3, 2]");
  EXPECT_TRUE(torch::equal(net.fc->bias, before));
  expect_error<UsageError>([&] { load_state_dict(net, dict, {.strict = false}); }, "wrong sizes");
  dict.set("fc.weight", torch::ones({3, 2}));
  const auto keys = load_state_dict(net, dict, {.strict = false});
  EXPECT_EQ(keys.missing, std::vector<std::string>{"scale"});
  EXPECT_EQ(keys.unexpected, std::vector<std::string>{"extra"});
  EXPECT_TRUE(torch::equal(net.fc->bias, other.fc->bias));
  EXPECT_TRUE(torch::equal(net.fc->weight, torch::ones({3, 2})));
}

TEST(ModuleState, IgnoresThePrefixOfDistributedDataParallel) {
  Net net, other;
  auto dict = Value::dict();
  const auto plain = state_dict(other);
  for (const auto& [name, tensor] : plain.items()) dict.set("module." + name.as_string(), tensor);
  load_state_dict(net, dict);
  EXPECT_EQ(state_dict(net), state_dict(other));
}

TEST(ModuleState, PointsToTheDictInsideOfACheckpoint) {
  Net net;
  const auto checkpoint = Value::dict({{"epoch", 3}, {"state_dict", state_dict(net)}});
  expect_error<UsageError>([&] { load_state_dict(net, checkpoint); }, "value.at(\"state_dict\")");
  expect_error<UsageError>([&] { load_state_dict(net, Value(3)); }, "expected a dict");
}

}  // namespace
}  // namespace lockstep
