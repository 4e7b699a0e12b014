// Files that Python's PyTorch writes or reads: of both versions, where both are installed.

#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/error.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/module_state.h>
#include <lockstep/optimizer_state.h>

#include "support/messages.h"
#include "support/python.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

class PythonFiles : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const char* python = std::getenv(GetParam());
    if (!python || !*python) GTEST_SKIP() << "needs Python's torch: set " << GetParam();
    python_ = python;
  }

  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }

  void run(const std::vector<std::string>& arguments) const {
    ASSERT_EQ(run_python(python_, "checkpoint/oracle.py", arguments), 0);
  }

  /// Lets Python write its files, once for all tests.
  void make_files() {
    static std::map<std::string, std::unique_ptr<TemporaryFolder>> made;
    auto& folder = made[python_];
    if (!folder) {
      folder = std::make_unique<TemporaryFolder>();
      run({"make", folder->path().string()});
    }
    for (const auto& file : std::filesystem::directory_iterator(folder->path()))
      std::filesystem::create_symlink(file.path(), folder_.path() / file.path().filename());
  }

  TemporaryFolder folder_;
  std::string python_;
};

INSTANTIATE_TEST_SUITE_P(With, PythonFiles, testing::Values("LOCKSTEP_TEST_PYTHON", "LOCKSTEP_TEST_PYTHON_2X"),
                         [](const auto& info) { return std::string(info.param).ends_with("2X") ? "2x" : "installed"; });

TEST_P(PythonFiles, ComeBackAsTheyWereWritten) {
  const auto shared = torch::randn({5});
  const auto value = Value::dict({
      {"model", Value::dict({{"fc.weight", torch::randn({3, 2})},
                             {"embedding", torch::randn({1000, 300})},
                             {"half", torch::ones({2}, torch::kHalf)},
                             {"tied", shared},
                             {"also tied", shared}})},
      {"optimizer", Value::dict({{"state", Value::dict({{0, Value::dict({{"step", torch::tensor(3.0f)}})}})},
                                 {"param_groups", Value::list({Value::dict({{"lr", 0.1},
                                                                            {"betas", Value::tuple({0.9, 0.999})},
                                                                            {"params", Value::list({0})}})})}})},
      {"epoch", 3},
      {"step", int64_t{1} << 40},
      {"arch", "resnet18"},
      {"metrics", Value::dict({{"accuracy", 0.91}})},
      {"scheduler", nullptr},
      {"rng", Value::list({torch::arange(100, torch::kByte)})},
      {"seed", Value::integer(std::string(9, '\x7f'))},
      {"bytes", Value::bytes(std::string("\0\xff", 2))},
      {"set", Value::set({1})},
      {"dtype", torch::kBFloat16},
      {"empty", Value::list({Value::dict(), Value::tuple(), torch::zeros({0})})},
  });
  save_checkpoint(path("ours.pt"), value);
  run({"rewrite", path("ours.pt"), path("theirs.pt")});
  const auto back = load_checkpoint(path("theirs.pt"));
  EXPECT_EQ(back, value);
  const auto& model = back.at("model");
  EXPECT_EQ(model.at("tied").tensor().data_ptr(), model.at("also tied").tensor().data_ptr());
  const auto verified = verify_checkpoint(path("theirs.pt"));
  EXPECT_FALSE(verified.has_manifest);
  EXPECT_TRUE(verified.damage.empty());
}

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t inputs, int64_t outputs, int64_t stride) {
    using namespace torch::nn;
    register_module("conv1", Conv2d(Conv2dOptions(inputs, outputs, 3).stride(stride).padding(1).bias(false)));
    register_module("bn1", BatchNorm2d(outputs));
    register_module("conv2", Conv2d(Conv2dOptions(outputs, outputs, 3).padding(1).bias(false)));
    register_module("bn2", BatchNorm2d(outputs));
    if (stride != 1)
      register_module("downsample", Sequential(Conv2d(Conv2dOptions(inputs, outputs, 1).stride(stride).bias(false)),
                                               BatchNorm2d(outputs)));
  }
  torch::Tensor forward(torch::Tensor x) { return x; }
};
TORCH_MODULE(Block);

struct ResNet18 : torch::nn::Module {
  explicit ResNet18(int64_t width) {
    using namespace torch::nn;
    register_module("conv1", Conv2d(Conv2dOptions(3, width, 7).stride(2).padding(3).bias(false)));
    register_module("bn1", BatchNorm2d(width));
    for (int i = 0; i < 4; ++i) {
      const auto inputs = width << std::max(i - 1, 0), outputs = width << i;
      register_module("layer" + std::to_string(i + 1),
                      Sequential(Block(inputs, outputs, i == 0 ? 1 : 2), Block(outputs, outputs, 1)));
    }
    register_module("fc", Linear(width * 8, 10));
  }
};

struct Tied : torch::nn::Module {
  Tied() {
    using namespace torch::nn;
    auto embedding = register_module("embedding", Embedding(20, 8));
    register_module("encoder", TransformerEncoder(TransformerEncoderOptions(
                                   TransformerEncoderLayerOptions(8, 2).dim_feedforward(16), 2)));
    auto decoder = register_module("decoder", Linear(LinearOptions(8, 20).bias(false)));
    decoder->weight.set_data(embedding->weight.data());
  }
};

TEST_P(PythonFiles, OfModelsAreLoadedByName) {
  make_files();
  ResNet18 net(4), other(4);
  load_state_dict(net, load_checkpoint(path("resnet18.pt")));
  load_state_dict(other, load_checkpoint(path("through_ddp.pt")));
  EXPECT_EQ(state_dict(net), state_dict(other));
  save_checkpoint(path("back.pt"), state_dict(net));
  run({"rewrite", path("back.pt"), path("again.pt")});
  EXPECT_EQ(load_checkpoint(path("again.pt")), load_checkpoint(path("resnet18.pt")));

  const auto tied = load_checkpoint(path("tied.pt"));
  EXPECT_EQ(tied.at("embedding.weight").tensor().data_ptr(), tied.at("decoder.weight").tensor().data_ptr());
  Tied model;
  load_state_dict(model, tied);
  EXPECT_EQ(named_tensors(state_dict(model)).at("embedding.weight").data_ptr(),
            named_tensors(state_dict(model)).at("decoder.weight").data_ptr());

  const auto script = named_tensors(load_checkpoint(path("script.pt")));
  EXPECT_EQ(script.size(), 3u);
  EXPECT_EQ(script.at("fc.weight").sizes(), (std::vector<int64_t>{2, 2}));
  EXPECT_TRUE(torch::equal(script.at("mean"), torch::tensor({5.0f})));
}

TEST_P(PythonFiles, OfOptimizersWithGroupsContinueHere) {
  make_files();
  torch::nn::Linear first(2, 3), second(3, 1);
  auto options = [](double lr) {
    return std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(lr).amsgrad(true));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(first->parameters(), options(1));
  groups.emplace_back(second->parameters(), options(1));
  torch::optim::AdamW optimizer(groups, torch::optim::AdamWOptions(1));
  load_state_dict(optimizer, load_checkpoint(path("groups.pt")));
  const auto state = state_dict(optimizer);
  EXPECT_EQ(state["param_groups"][0]["lr"].as_double(), 0.1);
  EXPECT_EQ(state["param_groups"][1]["lr"].as_double(), 0.01);
  EXPECT_EQ(state["param_groups"][1]["weight_decay"].as_double(), 0.5);
  EXPECT_EQ(state["state"][3]["step"].tensor().item<float>(), 1);
  EXPECT_TRUE(state["state"][0].contains("max_exp_avg_sq"));
}

TEST_P(PythonFiles, OfLightningHaveTheirData) {
  make_files();
  const auto value = load_checkpoint(path("lightning.ckpt"));
  EXPECT_EQ(value.at("epoch"), Value(3));
  EXPECT_EQ(value.at("loops").at("fit_loop").at("epoch_progress").at("current").at("ready"), Value(4));
  const auto& hyper = value.at("hyper_parameters");
  EXPECT_EQ(hyper.kind(), Value::Kind::kObject);
  EXPECT_EQ(hyper.type(), "__main__.AttributeDict");
  EXPECT_EQ(hyper.at("lr"), Value(0.5));
  EXPECT_TRUE(hyper.at("color").type().starts_with("__main__.Color")) << hyper;
  EXPECT_EQ(value.at("namespace").at("batch_size"), Value(32));
  torch::nn::Linear first(2, 3);
  load_state_dict(*first, value.at("state_dict"));
  EXPECT_TRUE(torch::equal(first->weight, value.at("state_dict").at("weight").tensor()));
  EXPECT_EQ(value["optimizer_states"][0]["param_groups"].size(), 2u);
}

TEST_P(PythonFiles, OfEveryProtocolHaveEveryKindOfValue) {
  make_files();
  for (const char* name : {"values2.pt", "values4.pt", "values5.pt"}) {
    SCOPED_TRACE(name);
    const auto value = load_checkpoint(path(name));
    EXPECT_EQ(value.at("none"), Value());
    EXPECT_EQ(value.at("true"), Value(true));
    EXPECT_EQ(value.at("small"), Value(-5));
    EXPECT_EQ(value.at("large"), Value(int64_t{1} << 40));
    EXPECT_EQ(value.at("huge").to_string(), "1267650600228229401496703205376");
    EXPECT_EQ(value.at("negative").to_string(), "-1180591620717411303424");
    EXPECT_EQ(value.at("float"), Value(0.1));
    EXPECT_EQ(value.at("text"), Value("gr\xc3\xbc\xc3\x9f"
                                      "e"));
    EXPECT_EQ(value.at("bytes"), Value::bytes(std::string("\0\xff\x80", 3)));
    EXPECT_EQ(value.at("bytearray"), Value::bytes("ab"));
    EXPECT_EQ(value.at("list"), Value::list({1, Value::list({2, Value::list()})}));
    EXPECT_EQ(value.at("tuple"), Value::tuple({1, Value::tuple({"a"})}));
    EXPECT_EQ(value.at("set"), Value::set({7}));
    EXPECT_EQ(value.at("size"), Value::tuple({2, 3}));
    EXPECT_EQ(value.at("dtype"), Value(torch::kBFloat16));
    EXPECT_EQ(value.at("device"), Value(c10::Device("cuda:1")));
    EXPECT_EQ(value.at("parameter"), Value(torch::ones({2})));
    EXPECT_EQ(value.at("default").at("a"), Value(1));
    EXPECT_EQ(value.at("counter").at("a"), Value(2));
    EXPECT_EQ(value.at(1), Value("integer key"));
    EXPECT_EQ(value.at(Value::tuple({1, 2})), Value("tuple key"));
    EXPECT_EQ(value.at("transposed"), Value(torch::arange(6.0f).view({2, 3}).t()));
    EXPECT_EQ(value.at("half"), Value(torch::ones({3}, torch::kHalf)));
    EXPECT_EQ(value.at("complex").tensor().scalar_type(), torch::kComplexFloat);
    EXPECT_EQ(static_cast<float*>(value.at("part of row").tensor().data_ptr()),
              static_cast<float*>(value.at("row").tensor().data_ptr()) + 2);
    EXPECT_TRUE(value.at("row again").tensor().is_same(value.at("row").tensor()));
    EXPECT_EQ(value.at("expanded"), Value(torch::ones({1000})));
    EXPECT_EQ(value.at("expanded").tensor().storage().nbytes(), sizeof(float));
    if (!value.contains("numpy")) continue;
    EXPECT_EQ(value.at("numpy"), Value(torch::arange(6, torch::kInt).view({2, 3})));
    EXPECT_TRUE(torch::equal(value.at("fortran").tensor(), torch::arange(6.0, torch::kDouble).view({2, 3})));
    EXPECT_EQ(value.at("numpy float"), Value(0.5));
    EXPECT_EQ(value.at("numpy unsigned").to_string(), "18446744073709551615");
  }
  expect_error<CheckpointError>([&] { load_checkpoint(path("legacy.pt")); }, "legacy.pt", "legacy format");
  expect_error<CheckpointError>([&] { load_checkpoint(path("sparse.pt")); }, "sparse.pt", "_rebuild_sparse_tensor");
}

// --- training goes on at the other side

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)>;

struct Trainer {
  explicit Trainer(const Make& make) {
    model->to(torch::kDouble);
    optimizer = make(model->parameters());
  }

  void train(int64_t steps) {
    for (const auto end = step + steps; step < end; ++step) {
      const auto x = torch::sin(torch::arange(24, torch::kDouble) + step).view({6, 4});
      const auto y = torch::cos(torch::arange(18, torch::kDouble) * (step + 1)).view({6, 3});
      optimizer->zero_grad();
      torch::mse_loss(model->forward(x), y).backward();
      optimizer->step();
    }
  }

  Value save() const {
    return Value::dict({{"model", state_dict(*model)}, {"optimizer", state_dict(*optimizer)}, {"step", step}});
  }

  void load(const Value& value) {
    load_state_dict(*model, value.at("model"));
    load_state_dict(*optimizer, value.at("optimizer"));
    step = value.at("step").as_int();
  }

  torch::nn::Sequential model{torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 3)};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  int64_t step = 0;
};

void expect_equal(const Trainer& one, const Trainer& other, const char* when) {
  for (size_t i = 0; i < one.model->parameters().size(); ++i) {
    const auto a = one.model->parameters()[i], b = other.model->parameters()[i];
    EXPECT_LE(((a - b).norm() / b.norm()).item<double>(), 1e-10) << when << ", parameter " << i;
  }
}

TEST_P(PythonFiles, ContinueTrainingOnTheOtherSide) {
  using namespace torch::optim;
  const std::pair<const char*, Make> kinds[] = {
      {"sgd",
       [](auto p) {
         return std::make_unique<SGD>(p, SGDOptions(0.05).momentum(0.9).nesterov(true).weight_decay(1e-3));
       }},
      {"adam", [](auto p) { return std::make_unique<Adam>(p, AdamOptions(0.01).amsgrad(true)); }},
      {"adamw", [](auto p) { return std::make_unique<AdamW>(p, AdamWOptions(0.01).weight_decay(0.1)); }},
      {"rmsprop",
       [](auto p) { return std::make_unique<RMSprop>(p, RMSpropOptions(0.01).momentum(0.5).centered(true)); }},
      {"adagrad", [](auto p) { return std::make_unique<Adagrad>(p, AdagradOptions(0.05)); }},
  };
  std::map<std::string, std::unique_ptr<Trainer>> ours;
  for (const auto& [kind, make] : kinds) {
    ours[kind] = std::make_unique<Trainer>(make);
    ours[kind]->train(5);
    save_checkpoint(path(kind + std::string(".pt")), ours[kind]->save());
    ours[kind]->train(10);
  }
  run({"train", "10", folder_.path().string()});
  for (const auto& [kind, make] : kinds) {
    SCOPED_TRACE(kind);
    Trainer back(make);
    back.load(load_checkpoint(path(kind + std::string(".further.pt"))));
    EXPECT_EQ(back.step, 15);
    expect_equal(*ours[kind], back, "Python's ten steps");
    ours[kind]->train(10);
    back.train(10);
    expect_equal(*ours[kind], back, "ten more steps here");
  }
  Trainer fused([](auto p) { return std::make_unique<FusedAdamW>(p, AdamWOptions(0.01).weight_decay(0.1)); });
  fused.load(load_checkpoint(path("adamw.further.pt")));
  fused.train(10);
  expect_equal(*ours["adamw"], fused, "ten steps of the fused optimizer");
}

}  // namespace
}  // namespace lockstep
