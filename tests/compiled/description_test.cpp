// What a compiled file says about itself, and the machines that it is refused on. With every LibTorch.

#include "compiled/description.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/error.h>

#include "compiled/compatibility.h"
#include "support/messages.h"
#include "support/temporary_folder.h"

namespace lockstep::detail {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Value ints(std::initializer_list<int> numbers) {
  auto list = Value::list();
  for (int number : numbers) list.elements().emplace_back(number);
  return list;
}

Value strings(std::initializer_list<const char*> words) {
  auto list = Value::list();
  for (const char* word : words) list.elements().emplace_back(word);
  return list;
}

/// A tied embedding and head, a frozen parameter, a counter and a mask that is not in the state_dict, for one size.
Value written_file() {
  auto state = Value::dict({{"embedding.weight", torch::ones({4, 2})},
                            {"scale", torch::full({2}, 3.0)},
                            {"calls", torch::zeros({}, torch::kLong)},
                            {"head.weight", torch::ones({4, 2})}});
  const auto input = Value::dict({{"shape", ints({8, 5})}, {"dtype", "int64"}, {"requires_grad", false}});
  const auto forward = Value::dict({{"name", "forward_0"},
                                    {"outputs", 1},
                                    {"structure", 0},
                                    {"written_buffers", ints({0})},
                                    {"output_requires_grad", Value::list({Value(true)})}});
  const auto saved = Value::list({Value::list({"input", 0}), Value::list({"output", 2})});
  const auto tangent = Value::dict({{"output", 0}, {"shape", ints({})}, {"stride", ints({})}, {"dtype", "float32"}});
  const auto backward = Value::dict(
      {{"name", "backward_0"}, {"saved", saved}, {"tangents", Value::list({tangent})}, {"gradients", ints({0})}});
  const auto evaluation = Value::dict({{"name", "evaluation_0"},
                                       {"inputs", 1},
                                       {"outputs", 2},
                                       {"structure", Value::list({"tuple", 0, 1})},
                                       {"written_buffers", ints({})}});
  const auto sizes = Value::dict({{"inputs", Value::list({input, input})},
                                  {"forward", forward},
                                  {"backward", backward},
                                  {"evaluation", evaluation}});
  return Value::dict({{"format", "lockstep compiled model"},
                      {"format_version", 1},
                      {"torch", "2.15.0"},
                      {"device", "cpu"},
                      {"architecture", "x86_64"},
                      {"compute_capability", nullptr},
                      {"instruction_set", strings({"avx2", "fma"})},
                      {"model", "Tied"},
                      {"float32_matmul_precision", "highest"},
                      {"has_loss", true},
                      {"has_batch_norm", false},
                      {"autocast", nullptr},
                      {"state_dict", std::move(state)},
                      {"constants", Value::dict({{"mask", torch::ones({5})}})},
                      {"parameters", strings({"embedding.weight", "scale"})},
                      {"requires_grad", Value::list({Value(true), Value(false)})},
                      {"buffers", strings({"calls", "mask"})},
                      {"aliases", Value::dict({{"head.weight", "embedding.weight"}})},
                      {"shapes", Value::list({sizes})}});
}

CompiledDescription described() {
  return read_description("model.pt2", written_file());
}

TEST(CompiledDescription, HasTheTensorsWithTheNamesOfPython) {
  const auto model = described();
  ASSERT_EQ(model.parameters.size(), 2u);
  EXPECT_TRUE(model.parameters[0].tensor.requires_grad());
  EXPECT_FALSE(model.parameters[1].tensor.requires_grad());
  std::vector<std::string> names;
  for (const auto& [name, tensor] : model.named_parameters) names.push_back(name);
  EXPECT_THAT(names, ElementsAre("embedding.weight", "scale", "head.weight"));
  EXPECT_TRUE(model.named_parameters[2].second.is_same(model.parameters[0].tensor)) << "tied";
  ASSERT_EQ(model.named_buffers.size(), 1u) << "the mask is not in the state_dict";
  EXPECT_EQ(model.named_buffers[0].first, "calls");
  EXPECT_TRUE(model.buffers[0].is_persistent);
  EXPECT_FALSE(model.buffers[1].is_persistent);
}

TEST(CompiledDescription, HasTheGraphsOfEachSize) {
  const auto model = described();
  ASSERT_EQ(model.sizes.size(), 1u);
  const auto& sizes = model.sizes[0];
  EXPECT_EQ(sizes.evaluation_inputs, 1u);
  EXPECT_THAT(sizes.forward.written_buffers, ElementsAre(0u));
  ASSERT_EQ(sizes.backward.saved.size(), 2u);
  EXPECT_FALSE(sizes.backward.saved[0].is_output);
  EXPECT_TRUE(sizes.backward.saved[1].is_output);
  EXPECT_EQ(sizes.backward.saved[1].index, 2u);
  EXPECT_EQ(model.inputs[0][1].sizes, (std::vector<int64_t>{8, 5}));
  EXPECT_EQ(model.inputs[0][1].dtype, torch::kLong);
}

TEST(CompiledDescription, ComposesResultsAsPythonReturnsThem) {
  auto file = written_file();
  file["shapes"][0]["evaluation"].set(
      "structure", Value::list({"dict", Value::list({"value", 1}),
                                Value::list({"rest", Value::list({"list", 0, nullptr, Value::list({"tuple", 2})})})}));
  const auto structure = read_description("model.pt2", file).sizes[0].evaluation.structure;
  const auto result = structure.compose({torch::full({}, 10), torch::full({}, 11), torch::full({}, 12)});
  const auto dict = result.toGenericDict();
  EXPECT_EQ(dict.at("value").toTensor().item<int>(), 11);
  const auto rest = dict.at("rest").toList();
  EXPECT_EQ(rest.get(0).toTensor().item<int>(), 10);
  EXPECT_TRUE(rest.get(1).isNone());
  EXPECT_EQ(rest.get(2).toTupleRef().elements()[0].toTensor().item<int>(), 12);
}

TEST(CompiledDescription, OfAnotherFileIsRefused) {
  const auto plain = Value::dict({{"weight", torch::ones({2})}});
  expect_error<CheckpointError>([&] { read_description("a.pt", plain); }, "a.pt is not a compiled model",
                                "lockstep compile");
  expect_error<CheckpointError>([&] { read_description("a.pt", Value(torch::ones({2}))); }, "not a compiled model");
}

TEST(CompiledDescription, OfAnotherVersionOrWithoutAPartIsRefused) {
  auto newer = written_file();
  newer.set("format_version", 2);
  expect_error<CheckpointError>([&] { read_description("a.pt2", newer); }, "version 2", "reads version 1");
  for (const char* key : {"torch", "parameters", "state_dict", "shapes"}) {
    auto file = written_file();
    file.erase(key);
    expect_error<CheckpointError>([&] { read_description("a.pt2", file); }, "a.pt2", "invalid", key);
  }
  auto file = written_file();
  file["state_dict"].erase("scale");
  expect_error<CheckpointError>([&] { read_description("a.pt2", file); }, "no tensor 'scale'");
}

// --- the machine

const Machine kFitting{.torch = "2.15.1", .architecture = "x86_64", .instructions = {"sse", "fma", "avx2", "avx512f"}};

TEST(CompiledCompatibility, NeedsTheReleaseTheArchitectureAndTheInstructions) {
  const auto model = described();
  EXPECT_THAT(find_incompatibility(model, kFitting), IsEmpty());
  auto machine = kFitting;
  machine.torch = "2.11.0";
  EXPECT_THAT(find_incompatibility(model, machine),
              AllOf(HasSubstr("PyTorch 2.15.0"), HasSubstr("LibTorch 2.11.0"), HasSubstr("compile it with")));
  machine = kFitting;
  machine.architecture = "aarch64";
  EXPECT_THAT(find_incompatibility(model, machine), AllOf(HasSubstr("x86_64"), HasSubstr("aarch64")));
  machine = kFitting;
  machine.instructions = {"sse", "avx2"};
  EXPECT_THAT(find_incompatibility(model, machine), AllOf(HasSubstr("(fma)"), HasSubstr("this processor")));
}

TEST(CompiledCompatibility, NeedsAGpuOfTheSameCapability) {
  auto model = described();
  model.device = torch::kCUDA;
  model.compute_capability = "9.0";
  auto machine = kFitting;
  EXPECT_THAT(find_incompatibility(model, machine), HasSubstr("lockstep doctor"));
  machine.gpus = 1;
  machine.compute_capability = "8.0";
  EXPECT_THAT(find_incompatibility(model, machine), AllOf(HasSubstr("9.0"), HasSubstr("8.0")));
  machine.compute_capability = "9.0";
  EXPECT_THAT(find_incompatibility(model, machine), IsEmpty());
}

TEST(CompiledCompatibility, KnowsThisMachine) {
  const auto machine = this_machine({});
  EXPECT_EQ(machine.torch, TORCH_VERSION);
  EXPECT_THAT(machine.instructions, testing::Contains(machine.architecture == "x86_64" ? "sse2" : "asimd"));
}

TEST(CompiledModules, NeedAFileThatLockstepHasCompiled) {
  const TemporaryFolder folder;
  const auto file = (folder.path() / "plain.pt").string();
  save_checkpoint(file, Value::dict({{"weight", torch::ones({2})}}));
  try {
    const CompiledModule net(file);
    ADD_FAILURE() << "no error was thrown";
  } catch (const CheckpointError& error) {
    EXPECT_THAT(error.what(), HasSubstr("not a compiled model"));
  } catch (const UsageError& error) {  // before 2.11
    EXPECT_THAT(error.what(), AllOf(HasSubstr("need LibTorch 2.11 or later"), HasSubstr(TORCH_VERSION)));
    EXPECT_LT(std::make_pair(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR), std::make_pair(2, 11));
  }
}

}  // namespace
}  // namespace lockstep::detail
