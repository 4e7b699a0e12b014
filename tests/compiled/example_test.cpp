// examples/12_compiled, with the model that export_models.py has compiled.

#include <cstdlib>
#include <regex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/rank_process.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

/// Returns the number behind each occurrence of the text.
std::vector<double> numbers_behind(const std::string& text, const std::string& output) {
  std::vector<double> numbers;
  const std::regex pattern(text + " ([0-9.]+)");
  for (auto found = std::sregex_iterator(output.begin(), output.end(), pattern); found != std::sregex_iterator();
       ++found)
    numbers.push_back(std::stod((*found)[1]));
  return numbers;
}

TEST(CompiledExample, LearnsToPredictTheNextCharacter) {
  const TemporaryFolder folder;
  const auto model = std::string(std::getenv("LOCKSTEP_TEST_MODELS")) + "/example.pt2";
  const std::string in_folder = "cd " + folder.path().string() + " && exec \"$@\"";
  RankProcess process(
      {"/bin/sh", "-c", in_folder, "sh", LOCKSTEP_TOOL, "run", "-n", "2", EXAMPLE_COMPILED, model, "60"},
      {{"LOCKSTEP_SECRET_FILE", ""}, {"RANK", ""}, {"WORLD_SIZE", ""}});
  ASSERT_EQ(process.wait(), 0) << process.output();
  const auto losses = numbers_behind("  loss", process.output());
  ASSERT_EQ(losses.size(), 3u) << process.output();  // after 1, 50 and 60 steps
  EXPECT_GT(losses[0], 5.0) << "ln 256: no character is more likely than another";
  EXPECT_LT(losses[2], 3.5);
  const auto unseen = numbers_behind("unseen text", process.output());
  ASSERT_EQ(unseen.size(), 1u) << process.output();
  EXPECT_LT(unseen[0], 3.5);
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "trained.pt"));
}

}  // namespace
}  // namespace lockstep
