// The examples as a user starts them, by the installed launcher. With a few steps each must learn, and its ranks must
// train on different data. The first example is run by tests/package/build_examples.cmake.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>
#include <nlohmann/json.hpp>

#include "support/rank_process.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

/// Returns a variable that CTest sets.
std::string variable(const char* name) {
  const char* value = std::getenv(name);
  if (!value || !*value) throw std::runtime_error(std::string(name) + " is not set");
  return value;
}

std::string program(const std::string& name) {
  return variable("LOCKSTEP_EXAMPLES") + "/" + name;
}

struct Finished {
  int code = -1;
  std::string output;  // of both streams
};

Finished finish(const std::vector<std::string>& command) {
  // Without what an outer launcher may have set.
  RankProcess process(command, {{"LOCKSTEP_SECRET_FILE", ""},
                                {"RANK", ""},
                                {"WORLD_SIZE", ""},
                                {"MASTER_ADDR", ""},
                                {"MASTER_PORT", ""},
                                {"OMP_NUM_THREADS", "1"}});
  Finished finished;
  finished.code = process.wait();
  finished.output = process.output();
  return finished;
}

/// Runs a command that succeeds, and returns its output.
std::string output_of(const std::vector<std::string>& command) {
  const auto finished = finish(command);
  EXPECT_EQ(finished.code, 0) << finished.output;
  return finished.output;
}

/// Runs an example on this number of ranks, and returns its output.
std::string run(int ranks, const std::string& example, const std::vector<std::string>& arguments = {}) {
  std::vector<std::string> command{variable("LOCKSTEP_COMMAND"), "run", "-n", std::to_string(ranks), program(example)};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return output_of(command);
}

/// Returns the numbers that follow a word, of all lines.
std::vector<double> numbers_after(const std::string& word, const std::string& output) {
  std::vector<double> numbers;
  std::istringstream words(output);
  for (std::string read, before; words >> read; before = read) {
    char* end = nullptr;
    const double number = std::strtod(read.c_str(), &end);
    if (before == word && *end == '\0') numbers.push_back(number);
  }
  return numbers;
}

/// Returns the first and the last of the numbers that follow a word.
struct Ends {
  double first = NAN, last = NAN;
};
Ends ends_of(const std::string& word, const std::string& output) {
  const auto numbers = numbers_after(word, output);
  EXPECT_GE(numbers.size(), 2U) << "too few of '" << word << "' in:\n" << output;
  if (numbers.size() < 2) return {};
  return {numbers.front(), numbers.back()};
}

/// Expects that the number in the line of the first step changes with the number of ranks. It is a mean over the ranks;
/// rank 0 has the same data in both runs, so the mean changes only if the other ranks have different data.
void expect_data_of_its_own_on_each_rank(const std::string& word, const std::string& of_several_ranks,
                                         const std::string& of_one_rank) {
  const auto several = numbers_after(word, of_several_ranks), one = numbers_after(word, of_one_rank);
  ASSERT_FALSE(several.empty()) << of_several_ranks;
  ASSERT_FALSE(one.empty()) << of_one_rank;
  EXPECT_NE(several.front(), one.front());
}

class FashionMnist : public testing::Test {
 protected:
  void SetUp() override {
    if (const char* data = std::getenv("LOCKSTEP_DATA")) data_before_ = data;
    if (data_before_.empty() && !std::filesystem::exists(kPackaged))
      GTEST_SKIP() << "needs Fashion-MNIST: apt-get install dataset-fashion-mnist, or set LOCKSTEP_DATA";
  }
  void TearDown() override { ::setenv("LOCKSTEP_DATA", data_before_.c_str(), 1); }

  /// From now on the programs find only the first 2048 images of each file: reading all takes seconds.
  void use_few_images() {
    for (const std::string part : {"train", "t10k"}) {
      copy_first(part + "-images-idx3-ubyte", 16, 28 * 28);
      copy_first(part + "-labels-idx1-ubyte", 8, 1);
    }
    ::setenv("LOCKSTEP_DATA", few_.path().c_str(), 1);
  }

 private:
  static constexpr const char* kPackaged = "/usr/share/datasets/fashion-mnist";

  void copy_first(const std::string& name, size_t header_bytes, size_t item_bytes) const {
    const std::string count("\0\0\x08\0", 4);  // 2048, in the second word of the header
    std::string bytes(header_bytes + 2048 * item_bytes, '\0');
    for (const std::string& folder : {data_before_ + "/fashion-mnist", data_before_, std::string(kPackaged)})
      for (const char* suffix : {"", ".gz"}) {
        const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(::gzopen((folder + "/" + name + suffix).c_str(), "rb"),
                                                              ::gzclose);
        if (!file) continue;
        ASSERT_EQ(::gzread(file.get(), bytes.data(), static_cast<unsigned>(bytes.size())), std::ssize(bytes)) << folder;
        std::ofstream(few_.path() / name, std::ios::binary) << bytes.replace(4, 4, count);
        return;
      }
    FAIL() << name << " is not found";
  }

  std::string data_before_;
  const TemporaryFolder few_;
};

TEST_F(FashionMnist, IsLearnedInAnEpochAndContinuedByResume) {
  const TemporaryFolder folder;
  const auto run_folder = (folder.path() / "run").string();
  const std::vector<std::string> options{"--device", "cpu",      "--epochs",  "1",
                                         "--run",    run_folder, "--sync-bn", "--zero"};
  const auto output = run(2, "fashion_mnist", options);
  EXPECT_THAT(output, HasSubstr("Training on 60000 images with 2 ranks on CPU, backend shm"));
  ASSERT_THAT(numbers_after("accuracy", output), SizeIs(1)) << output;
  EXPECT_GT(numbers_after("accuracy", output).front(), 0.85) << output;

  auto again = options;
  again.push_back("--resume");
  EXPECT_THAT(numbers_after("accuracy", run(2, "fashion_mnist", again)), IsEmpty()) << "it is complete";
  std::vector<std::string> command{program("fashion_mnist")};
  command.insert(command.end(), options.begin(), options.end());
  const auto refused = finish(command);
  EXPECT_NE(refused.code, 0);
  EXPECT_THAT(refused.output, HasSubstr(run_folder)) << "it has checkpoints, and --resume is not given";
}

TEST_F(FashionMnist, IsTrainedOnInEveryWay) {
  ASSERT_NO_FATAL_FAILURE(use_few_images());
  const std::vector<std::string> few{"--device", "cpu", "--batch-size", "32", "--measure", "2"};
  for (const std::vector<std::string>& way : std::vector<std::vector<std::string>>{
           {"--n-gpus", "2", "--data-parallel"}, {"--n-gpus", "2", "--distributed"}, {"--amp"}, {"--zero"}}) {
    std::vector<std::string> command{program("fashion_mnist")};
    for (const auto* words : {&few, &way}) command.insert(command.end(), words->begin(), words->end());
    EXPECT_THAT(numbers_after("second:", output_of(command)), SizeIs(1)) << way.back();
  }
  auto over_gloo = few;
  over_gloo.insert(over_gloo.end(), {"--backend", "gloo"});
  EXPECT_THAT(numbers_after("second:", run(2, "fashion_mnist", over_gloo)), SizeIs(1));
  EXPECT_THAT(finish({program("fashion_mnist"), "--distributed", "--data-parallel"}).output, HasSubstr("excludes"));
  EXPECT_THAT(
      finish({variable("LOCKSTEP_COMMAND"), "run", "-n", "3", program("fashion_mnist"), "--batch-size", "32"}).output,
      HasSubstr("--batch-size 32 is not a multiple of the 3 ranks"));
}

TEST(Examples, DataParallelLearnsTheArmsOfASpiral) {
  const auto output = output_of({program("data_parallel"), "300"});
  EXPECT_THAT(output, HasSubstr(" replicas on "));
  const auto loss = ends_of("loss", output);
  EXPECT_NEAR(loss.first, std::log(3), 0.1) << "at first the three classes are equally likely";
  EXPECT_LT(loss.last, 0.1) << output;
  EXPECT_GT(ends_of("accuracy", output).last, 0.97) << output;
}

TEST(Examples, GroupsReadOnTheirFirstRanks) {
  const auto output = run(4, "groups", {"5"});
  EXPECT_THAT(output, HasSubstr("[0] rank 0 reads for ranks 0 and 1\n"));
  EXPECT_THAT(output, HasSubstr("[2] rank 2 reads for ranks 2 and 3\n"));
  EXPECT_EQ(numbers_after("rank", output).size(), 2U) << "another rank reads:\n" << output;
  const auto loss = ends_of("loss", output);
  EXPECT_LT(loss.last, 0.2 * loss.first) << output;
  const auto low = numbers_after("from", output), high = numbers_after("to", output);
  ASSERT_EQ(low.size(), 5U) << output;
  EXPECT_NE(low, high) << "both groups have the same data:\n" << output;
}

TEST(Examples, ShardedOptimizerContinuesOnAnotherNumberOfRanks) {
  const TemporaryFolder folder;
  const auto first = run(2, "sharded_optimizer", {"2", folder.path().string()});
  EXPECT_THAT(numbers_after("epoch", first), ElementsAre(1, 2));
  const auto second = run(3, "sharded_optimizer", {"4", folder.path().string()});
  EXPECT_THAT(second, HasSubstr("continuing after epoch 2 in "));
  EXPECT_THAT(numbers_after("epoch", second), ElementsAre(2, 3, 4));
  const auto before = ends_of("loss", first), after = ends_of("loss", second);
  EXPECT_LT(before.last, 0.5 * before.first) << first;
  EXPECT_LT(after.first, before.last) << "epoch 3 is worse than epoch 2:\n" << first << second;
  EXPECT_LT(after.last, 0.1 * before.first) << second;
  for (const auto& [output, ranks] : {std::pair(first, 2), std::pair(second, 3)}) {
    const auto kept = numbers_after("keeps", output), all = numbers_after("of", output);
    ASSERT_FALSE(kept.empty() || all.empty()) << output;
    EXPECT_NEAR(kept.front() / all.front(), 1.0 / ranks, 0.01) << output;
  }
  EXPECT_THAT(run(1, "sharded_optimizer", {"4", folder.path().string()}), HasSubstr("nothing to do"));
}

TEST(Examples, ReinforcementLearningBalancesThePole) {
  const auto output = run(2, "reinforcement_learning", {"40"});
  const auto returns = ends_of("return", output);
  EXPECT_LT(returns.first, 30) << output;
  EXPECT_GT(returns.last, 400) << output;
  EXPECT_LE(returns.last, 500) << output;
  expect_data_of_its_own_on_each_rank("return", output, run(1, "reinforcement_learning", {"1"}));
}

TEST(Examples, CharTransformerPredictsTheNextCharacter) {
  const auto output = run(2, "char_transformer", {"150"});
  const auto loss = ends_of("loss", output);
  EXPECT_GT(loss.first, 5) << output;
  EXPECT_LT(loss.last, 2.7) << output;
  EXPECT_GT(loss.last, 2) << "after so few steps, this is possible only if the network sees the next character:\n"
                          << output;
  const auto text = output.substr(output.find("The network writes:\n"));
  EXPECT_GT(text.size(), 300U) << output;
  expect_data_of_its_own_on_each_rank("loss", output, run(1, "char_transformer", {"1"}));
}

TEST(Examples, GanCoversAllModes) {
  const auto output = run(2, "gan", {"600"});
  const auto distance = ends_of("distance", output), modes = ends_of("modes", output);
  EXPECT_LT(distance.last, 0.35 * distance.first) << output;
  EXPECT_EQ(modes.first, 0) << output;
  EXPECT_EQ(modes.last, 8) << output;
  expect_data_of_its_own_on_each_rank("distance", output, run(1, "gan", {"1"}));
}

TEST(Examples, CapturedStepIsFasterOrNeedsAGpu) {
  const auto facts = nlohmann::json::parse(output_of({variable("LOCKSTEP_COMMAND"), "env", "--json"}));
  const auto& backends = facts.at("lockstep").at("backends");
  const bool has_gpu =
      !facts.at("LibTorch").at("GPUs").empty() && std::find(backends.begin(), backends.end(), "nccl") != backends.end();
  const auto finished = finish({program("captured_step"), "200"});
  if (!has_gpu) {
    EXPECT_EQ(finished.code, 1) << finished.output;
    EXPECT_EQ(finished.output, "captured_step needs a GPU for each rank: a step on a CPU cannot be captured\n");
    GTEST_SKIP() << "this machine has no GPU, or lockstep was built without NCCL";
  }
  ASSERT_EQ(finished.code, 0) << finished.output;
  const auto losses = numbers_after("loss", finished.output), times = numbers_after("step", finished.output);
  ASSERT_EQ(losses.size(), 4U) << finished.output;
  ASSERT_EQ(times.size(), 2U) << finished.output;
  EXPECT_LT(losses[1], 0.3 * losses[0]) << "eager:\n" << finished.output;
  EXPECT_LT(losses[3], 0.3 * losses[2]) << "captured:\n" << finished.output;
  EXPECT_LT(times[1], times[0]) << finished.output;
}

// tests/compiled/example_test.cpp trains it.
TEST(Examples, CompiledNamesWhatItNeeds) {
  EXPECT_EQ(finish({program("compiled")}).code, 2);
  const auto finished = finish({program("compiled"), "missing.pt2"});
  EXPECT_NE(finished.code, 0);
  EXPECT_THAT(finished.output, HasSubstr("missing.pt2"));
}

TEST(Examples, FromPythonReturnsABetterModelToPython) {
  const char* python = std::getenv("LOCKSTEP_TEST_PYTHON");
  if (!python || !*python) GTEST_SKIP() << "needs Python's torch: set LOCKSTEP_TEST_PYTHON";
  const TemporaryFolder folder;
  const auto made = (folder.path() / "new.pt").string(), trained = (folder.path() / "trained.pt").string();
  const std::string model = LOCKSTEP_TEST_SOURCE_DIR "/../examples/10_from_python/model.py";
  const auto loss_of_new = numbers_after("loss", output_of({python, model, "make", made}));
  const auto output = run(2, "from_python", {made, trained, "500"});
  const auto loss = ends_of("loss", output);
  ASSERT_EQ(loss_of_new.size(), 1U);
  EXPECT_NEAR(loss.first / loss_of_new.front(), 1, 0.2) << "the training began with another model:\n" << output;
  EXPECT_LT(loss.last, 0.2 * loss.first) << output;
  expect_data_of_its_own_on_each_rank("loss", output, run(1, "from_python", {made, trained + ".1", "1"}));

  const char* newer = std::getenv("LOCKSTEP_TEST_PYTHON_2X");
  for (const std::string reader : {python, newer ? newer : ""}) {
    if (reader.empty()) continue;
    const auto checked = numbers_after("loss", output_of({reader, model, "check", trained}));
    ASSERT_EQ(checked.size(), 1U);
    EXPECT_LT(checked.front(), 0.2 * loss_of_new.front()) << reader;
  }
}

}  // namespace
}  // namespace lockstep
