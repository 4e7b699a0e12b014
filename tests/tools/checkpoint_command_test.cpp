// `lockstep checkpoint ls`, `show`, `verify` and `diff` on real files, with the program that does the work.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>

#include <ATen/ATen.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include "support/terminal.h"
#include "tools/checkpoint_process.h"

namespace lockstep {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

Value training_state(int64_t epoch = 3) {
  const auto model = Value::dict({{"fc.weight", at::arange(12, at::kFloat).view({3, 4})}, {"fc.bias", at::ones({3})}});
  const auto state = Value::dict({{0, Value::dict({{"exp_avg", at::full({3, 4}, 0.5)}})}});
  const auto groups = Value::list({Value::dict({{"lr", 0.1}, {"params", Value::list({0, 1})}})});
  return Value::dict({{"model", model},
                      {"optimizer", Value::dict({{"state", state}, {"param_groups", groups}})},
                      {"epoch", epoch},
                      {"metrics", Value::dict({{"loss", 0.25}})},
                      {"world_size", 2}});
}

json entry_named(const json& list, const std::string& key, const std::string& name) {
  for (const auto& entry : list)
    if (entry[key] == name) return entry;
  return nullptr;
}

// --- ls

class Ls : public CheckpointCommand {};

TEST_F(Ls, ListsFilesByUnitAndNumber) {
  for (const auto* name : {"step-00000100.pt", "step-00000020.pt", "epoch-00000003.pt", "other.pt"})
    save(name, training_state());
  std::ofstream(path("notes.txt")) << "no checkpoint";
  const auto ran = run("ls .");
  EXPECT_EQ(ran.code, 0) << ran.errors;
  EXPECT_THAT(ran.output, ContainsRegex("^NAME +UNIT +NUMBER +SIZE +SAVED +WORLD +METRICS\n"
                                        "epoch-00000003.pt +epoch +3 +[0-9.]+ KiB +[-0-9]+ [0-9:]+ +2 +loss 0.25\n"
                                        "step-00000020.pt +step +20 .*\nstep-00000100.pt +step +100 .*\n"
                                        "other.pt +- +- .*\n\n4 checkpoints, [0-9.]+ KiB\n$"));
}

TEST_F(Ls, CountsShardsWithTheirMainFile) {
  save_sharded("step-00000007");
  const auto object = this->object("ls .");
  EXPECT_EQ(object["number"], 7);
  EXPECT_EQ(object["shards"], 2);
  uintmax_t bytes = 0;
  for (const auto& file : std::filesystem::directory_iterator(folder_.path()))
    if (file.path().extension() == ".pt") bytes += file.file_size();
  EXPECT_EQ(object["bytes"], bytes);
  EXPECT_EQ(this->object("ls step-00000007.pt")["shards"], 2) << "also if the path is that of the main file";
}

TEST_F(Ls, PrintsObjects) {
  save("epoch-00000003.pt", training_state());
  ASSERT_EQ(::symlink("epoch-00000003.pt", path("best.pt").c_str()), 0);
  const timespec times[2] = {{1700000000, 0}, {1700000000, 0}};
  ASSERT_EQ(::utimensat(AT_FDCWD, path("epoch-00000003.pt").c_str(), times, 0), 0);
  auto found = object("ls epoch-00000003.pt");
  EXPECT_EQ(found["unit"], "epoch");
  EXPECT_EQ(found["number"], 3);
  EXPECT_EQ(found["saved"], "2023-11-14T22:13:20Z");
  EXPECT_EQ(found["world_size"], 2);
  EXPECT_EQ(found["metrics"], json({{"loss", 0.25}}));
  EXPECT_TRUE(found["link"].is_null());
  EXPECT_TRUE(found["failure"].is_null());
  EXPECT_EQ(object("ls best.pt")["link"], "epoch-00000003.pt");
}

TEST_F(Ls, CountsLinkedFilesOnce) {
  save("step-00000001.pt", training_state());
  ASSERT_EQ(::link(path("step-00000001.pt").c_str(), path("best.pt").c_str()), 0);
  ASSERT_EQ(::symlink("step-00000001.pt", path("first.pt").c_str()), 0);
  const auto ran = run("ls .");
  EXPECT_THAT(ran.output, ContainsRegex("\nbest.pt = step-00000001.pt .*\nfirst.pt -> step-00000001.pt .*\n"));
  const auto size = run("ls step-00000001.pt").output;
  const auto total = size.substr(size.rfind(", "));
  EXPECT_THAT(ran.output, HasSubstr("\n3 checkpoints" + total));
}

TEST_F(Ls, NamesAFileThatItCannotReadAndListsTheOthers) {
  std::ofstream(path("step-00000001.pt")) << "garbage";
  save("step-00000002.pt", training_state());
  const auto ran = run("ls .");
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.output, AllOf(ContainsRegex("step-00000001.pt .* cannot be read\n"), HasSubstr("loss 0.25")));
  EXPECT_THAT(ran.errors, StartsWith("lockstep checkpoint ls: checkpoint ./step-00000001.pt: "));
  expect_failure("ls nowhere", 2, "nowhere: no such file");
}

TEST_F(Ls, ShortensLongNamesInTheMiddle) {
  auto metrics = Value::dict();
  for (int i = 0; i < 20; ++i) metrics.set("metric" + std::to_string(i), i);
  save(std::string(100, 'a') + "z.pt", Value::dict({{"metrics", metrics}}));
  const auto ran = run("ls .");
  std::istringstream lines(ran.output);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 110U) << line;
  EXPECT_THAT(ran.output, AllOf(ContainsRegex("\naaa+\\.\\.\\.a+z\\.pt "),
                                ContainsRegex(" metric0 0, .*\\.\\.\\..*, metric19 19\n")));
}

TEST_F(Ls, UsesColourOnlyOnATerminal) {
  save("best.pt", training_state());
  EXPECT_THAT(run("ls .").output, Not(HasSubstr("\033")));
  TerminalProcess process({LOCKSTEP_TOOL, "checkpoint", "ls", path("")}, 120, {{"NO_COLOR", ""}, {"TERM", "xterm"}});
  EXPECT_EQ(process.wait(), 0) << process.bytes();
  EXPECT_THAT(process.bytes(), HasSubstr("\033[1mNAME"));
}

// --- show

class Show : public CheckpointCommand {};

TEST_F(Show, PrintsTheTreeAndTheTensors) {
  save("a.pt", training_state());
  const auto ran = run("show a.pt");
  EXPECT_EQ(ran.code, 0) << ran.errors;
  EXPECT_THAT(ran.output, StartsWith("model: dict of 2 entries, 2 tensors, 60 B\n"
                                     "optimizer: dict of 2 entries, 1 tensor, 48 B\n"
                                     "  state: dict of 1 entry, 1 tensor, 48 B\n"
                                     "  param_groups: [{'lr': 0.1, 'params': [0, 1]}]\n"
                                     "epoch: 3\nmetrics: {'loss': 0.25}\nworld_size: 2\n\nTENSOR "));
  EXPECT_THAT(ran.output, ContainsRegex("\nmodel.fc.weight +\\[3, 4\\] +float32 +48 B +5.5 +22.5 +0 +11 +0 +0\n"
                                        "model.fc.bias +\\[3\\] +float32 +12 B +1 +1.73 +1 +1 +0 +0\n"
                                        "optimizer.state.0.exp_avg +\\[3, 4\\] .*\n"
                                        "\n3 tensors, 27 elements, 108 B\n$"));
}

TEST_F(Show, ComputesStatisticsInDoublePrecision) {
  const double nan = std::nan(""), inf = INFINITY;
  save("a.pt", Value::dict({{"odd", at::tensor({1.0, nan, -3.0, inf, nan}, at::kFloat)},
                            {"int", at::tensor({int64_t{1} << 40, int64_t{2}}, at::kLong)},
                            {"large", at::full({1 << 21}, 0.1, at::kHalf)},
                            {"bool", at::tensor({1, 0, 0, 1}, at::kInt).to(at::kBool)},
                            {"none", at::empty({0})},
                            {"complex", at::ones({2}, at::kComplexFloat)}}));
  const auto object = this->object("show a.pt");
  const auto of = [&](const char* name) { return entry_named(object["tensors"], "name", name); };
  EXPECT_EQ(of("odd")["nan"], 2);
  EXPECT_EQ(of("odd")["inf"], 1);
  EXPECT_EQ(of("odd")["mean"], -1.0);
  EXPECT_EQ(of("odd")["min"], -3.0);
  EXPECT_EQ(of("odd")["max"], 1.0);
  EXPECT_DOUBLE_EQ(of("odd")["norm"], std::sqrt(10.0));
  EXPECT_EQ(of("int")["mean"], std::ldexp(1, 39) + 1);
  EXPECT_NEAR(of("large")["mean"], 0.0999756, 1e-6) << "a sum in half precision would overflow";
  EXPECT_EQ(of("large")["bytes"], 1 << 22);
  EXPECT_EQ(of("bool")["mean"], 0.5);
  EXPECT_TRUE(of("none")["mean"].is_null());
  EXPECT_TRUE(of("complex")["mean"].is_null());
  EXPECT_EQ(of("complex")["dtype"], "complex64");
  EXPECT_EQ(object["totals"]["tensors"], 6);
}

TEST_F(Show, SelectsTensorsByName) {
  save("a.pt", training_state());
  const auto object = this->object("show a.pt --tensor 'model.*.bias'");
  ASSERT_EQ(object["tensors"].size(), 1U);
  EXPECT_EQ(object["tensors"][0]["name"], "model.fc.bias");
  EXPECT_EQ(object["totals"]["elements"], 3);
  expect_failure("show a.pt --tensor 'nothing*'", 2, "no tensor matches 'nothing*'");
}

TEST_F(Show, PrintsNoControlCharactersOfAFile) {
  save("a.pt", Value::dict({{"\033[31mred", 1}, {"\033[2Jgone", at::ones({1})}}));
  const auto ran = run("show a.pt");
  EXPECT_EQ(ran.code, 0);
  EXPECT_THAT(ran.output, AllOf(HasSubstr("?[31mred: 1"), HasSubstr("?[2Jgone"), Not(HasSubstr("\033"))));
}

TEST_F(Show, RefusesADamagedFile) {
  const auto state = training_state();
  save("a.pt", state);
  damage("a.pt", state.at("model").at("fc.weight").tensor());
  expect_failure("show a.pt", 1, "a.pt: record 'data/0' differs from its SHA-256");
  expect_failure("show .", 1, "a.pt: record 'data/0' differs from its SHA-256");
}

TEST_F(Show, PrintsTheNewestCheckpointOfARun) {
  expect_failure("show .", 2, ".: has no checkpoint files, nor has ./checkpoints");
  std::filesystem::create_directory(path("checkpoints"));
  save("exported.pt", training_state(0));
  EXPECT_EQ(object("show .")["file"], "./exported.pt");
  for (const auto* name : {"checkpoints/step-00000100.pt", "checkpoints/step-00000020.pt", "checkpoints/best.pt"})
    save(name, training_state(std::string(name).ends_with("100.pt") ? 5 : 4));
  EXPECT_EQ(object("show checkpoints")["file"], "checkpoints/step-00000100.pt") << "the highest number, not the last";
  const auto ran = run("show .");
  EXPECT_EQ(ran.code, 0) << ran.errors;
  EXPECT_THAT(ran.output, StartsWith("The newest checkpoint: ./checkpoints/step-00000100.pt\n\nmodel: "));
  EXPECT_THAT(ran.output, HasSubstr("\nepoch: 5\n"));

  save("checkpoints/epoch-00000001.pt", training_state(6));
  const auto of_steps = std::filesystem::last_write_time(path("checkpoints/step-00000100.pt"));
  std::filesystem::last_write_time(path("checkpoints/epoch-00000001.pt"), of_steps + std::chrono::seconds(10));
  EXPECT_EQ(object("show .")["file"], "./checkpoints/epoch-00000001.pt") << "of two units the one written last";
  std::filesystem::last_write_time(path("checkpoints/epoch-00000001.pt"), of_steps - std::chrono::seconds(10));
  EXPECT_EQ(object("show .")["file"], "./checkpoints/step-00000100.pt");
}

// --- verify

class Verify : public CheckpointCommand {};

TEST_F(Verify, ReportsBothNamesOfADamagedFile) {
  const auto weight = at::rand({100});
  save("step-00000001.pt", Value::dict({{"weight", weight}}));
  ASSERT_EQ(::link(path("step-00000001.pt").c_str(), path("best.pt").c_str()), 0);
  damage("step-00000001.pt", weight);
  const auto ran = run("verify .");
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.output, AllOf(ContainsRegex("damaged  ./best.pt "), ContainsRegex("damaged  ./step-00000001.pt "),
                                HasSubstr("2 files, 2 damaged")));
}

TEST_F(Verify, NamesTheDamagedRecordAndItsTensors) {
  // Parts of one storage are saved by their position, not by the order in the dict.
  const auto all = at::arange(300, at::kInt);
  const auto views = Value::list({all.narrow(0, 200, 100), all.narrow(0, 0, 100)});
  save("step-00000001.pt", Value::dict({{"views", views}, {"again", views.elements()[0]}}));
  save("step-00000002.pt", training_state());
  damage("step-00000001.pt", all.narrow(0, 200, 100));
  const auto ran = run("verify .");
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.output, ContainsRegex("damaged  ./step-00000001.pt  [0-9.]+ KiB, 6 records \\(SHA-256\\)\n"
                                        "         record 'data/1' differs from its SHA-256\n"
                                        "           tensors: views.0, again\n"
                                        "intact   ./step-00000002.pt .* \\(SHA-256\\)\n\n2 files, 1 damaged\n$"));
  const auto object = this->object("verify step-00000001.pt", 1);
  EXPECT_EQ(object["intact"], false);
  EXPECT_EQ(object["damage"][0]["record"], "data/1");
  EXPECT_EQ(object["damage"][0]["tensors"], json({"views.0", "again"}));
}

TEST_F(Verify, ReportsTheDigestOfAnIntactFile) {
  const auto digest = save("a.pt", training_state());
  const auto object = this->object("verify a.pt");
  EXPECT_EQ(object["intact"], true);
  EXPECT_EQ(object["manifest"], true);
  EXPECT_EQ(object["sha256"], digest);
}

TEST_F(Verify, ChecksFilesWithoutAManifestByCrc32) {
  const auto tensor = at::arange(100, at::kFloat);
  const auto bytes = torch::jit::pickle_save(c10::IValue(tensor));
  std::ofstream(path("python.pt"), std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  const auto intact = run("verify python.pt");
  EXPECT_EQ(intact.code, 0);
  EXPECT_THAT(intact.output, HasSubstr("(CRC-32 only: the file has no manifest of lockstep)"));
  damage("python.pt", tensor);
  const auto damaged = run("verify python.pt");
  EXPECT_EQ(damaged.code, 1);
  EXPECT_THAT(damaged.output, HasSubstr("record 'data/0' "));
}

TEST_F(Verify, ChecksThatShardsAreTheListedOnes) {
  save_sharded("step-00000007");
  EXPECT_EQ(object("verify step-00000007.pt")["shards"], 2);
  save("step-00000007.shard-1-of-2-1a2b3c4d.pt", Value::dict({{"part", at::ones({3})}}));
  const auto other = run("verify .");
  EXPECT_EQ(other.code, 1);
  EXPECT_THAT(other.output, HasSubstr("shard step-00000007.shard-1-of-2-1a2b3c4d.pt: belongs to another checkpoint"));
  ASSERT_EQ(::unlink(path("step-00000007.shard-0-of-2-1a2b3c4d.pt").c_str()), 0);
  const auto missing = run("verify .");
  EXPECT_EQ(missing.code, 1);
  EXPECT_THAT(missing.output, HasSubstr("shard step-00000007.shard-0-of-2-1a2b3c4d.pt: is missing"));
}

TEST_F(Verify, ReportsFilesThatAreNoCheckpoints) {
  std::ofstream(path("a.pt")) << "garbage";
  EXPECT_EQ(object("verify a.pt", 1)["intact"], false);
  expect_failure("verify nowhere.pt", 2, "nowhere.pt: no such file");
}

// --- diff

class Diff : public CheckpointCommand {};

TEST_F(Diff, IsSilentAboutEqualEntries) {
  save("a.pt", training_state());
  save("b.pt", training_state());
  const auto ran = run("diff a.pt b.pt");
  EXPECT_EQ(ran.code, 0);
  EXPECT_EQ(ran.output, "equal: 9 entries in both files, 3 tensors among them\n");
}

TEST_F(Diff, NamesEachDifference) {
  const auto model = [](const at::Tensor& weight, const at::Tensor& bias) {
    return Value::dict({{"weight", weight}, {"bias", bias}});
  };
  save("a.pt", Value::dict({{"model", model(at::tensor({1.0, 2.0}), at::ones({3}))},
                            {"list", Value::list({at::ones({2}), 5})},
                            {"epoch", 3},
                            {"gone", "x"}}));
  save("b.pt", Value::dict({{"epoch", 4},
                            {"model", model(at::tensor({1.0, 2.5}), at::ones({4}))},
                            {"list", Value::list({at::ones({2}, at::kDouble), 5})},
                            {"new", at::ones({1})}}));
  const auto ran = run("diff a.pt b.pt");
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.output, ContainsRegex("A: a.pt\nB: b.pt\n\nENTRY +DIFFERENCE +A / B\n"
                                        "epoch +value +3 / 4\n"
                                        "gone +only in A +'x'\n"
                                        "list.0 +dtype +float32 \\[2\\] / float64 \\[2\\]\n"
                                        "model.bias +shape +float32 \\[3\\] / float32 \\[4\\]\n"
                                        "model.weight +values +max abs 0.5, max rel 0.2, in 1 of 2 elements\n"
                                        "new +only in B +tensor\\(float32, \\[1\\]\\)\n"
                                        "\n6 differences; 5 entries in both files, 3 tensors among them\n$"));
  const auto object = this->object("diff a.pt b.pt", 1);
  EXPECT_EQ(object["equal"], false);
  const auto weight = entry_named(object["differences"], "entry", "model.weight");
  EXPECT_EQ(weight["max_absolute"], 0.5);
  EXPECT_EQ(weight["max_relative"], 0.2);
  EXPECT_EQ(weight["elements"], 1);
}

TEST_F(Diff, AllowsDifferencesWithinTheTolerance) {
  save("a.pt", Value::dict({{"x", at::tensor({1.0, 100.0})}, {"lr", 0.5}}));
  save("b.pt", Value::dict({{"x", at::tensor({1.25, 100.0})}, {"lr", 0.75}}));
  EXPECT_EQ(run("diff a.pt b.pt --tolerance 0.25").code, 0);
  EXPECT_EQ(object("diff a.pt b.pt --tolerance 0.2", 1)["differences"].size(), 2U);
  expect_failure("diff a.pt b.pt --tolerance nan", 2, "--tolerance: nan is not valid");
}

TEST_F(Diff, ComparesSpecialNumbers) {
  const double nan = std::nan(""), inf = INFINITY;
  const int64_t large = (int64_t{1} << 53) + 1;
  save("a.pt", Value::dict({{"same", at::tensor({nan, inf, 0.0})},
                            {"nan", at::tensor({nan})},
                            {"int", at::tensor({large}, at::kLong)},
                            {"complex", at::ones({2}, at::kComplexFloat)}}));
  save("b.pt", Value::dict({{"same", at::tensor({nan, inf, -0.0})},
                            {"nan", at::tensor({1.0})},
                            {"int", at::tensor({large - 1}, at::kLong)},
                            {"complex", at::ones({2}, at::kComplexFloat)}}));
  const auto differences = object("diff a.pt b.pt --tolerance 0.5", 1)["differences"];
  ASSERT_EQ(differences.size(), 2U) << differences;
  EXPECT_EQ(differences[0]["entry"], "int");
  EXPECT_EQ(differences[0]["max_absolute"], 1.0);
  EXPECT_EQ(differences[1]["entry"], "nan");
}

TEST_F(Diff, DistinguishesAFailureFromADifference) {
  const auto state = training_state();
  save("a.pt", state);
  expect_failure("diff a.pt nowhere.pt", 2, "nowhere.pt: no such file");
  damage("a.pt", state.at("model").at("fc.weight").tensor());
  expect_failure("diff a.pt a.pt", 2, "differs from its SHA-256");
}

}  // namespace
}  // namespace lockstep
