#include "ui/find_runs.h"

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/temporary_folder.h"

namespace lockstep::ui {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

class FindRuns : public testing::Test {
 protected:
  void write(const std::string& name, const std::string& text = "") const {
    fs::create_directories((folder_.path() / name).parent_path());
    std::ofstream(folder_.path() / name) << text;
  }

  /// The runs, relative to the folder.
  std::vector<std::string> found() const {
    std::vector<std::string> names;
    for (const auto& run : find_runs({path()}).folders) names.push_back(run.lexically_relative(path()));
    return names;
  }

  fs::path path() const { return fs::canonical(folder_.path()); }

  TemporaryFolder folder_;
};

TEST_F(FindRuns, KnowsRunsByTheirFiles) {
  write("a/metrics.jsonl");
  write("b/summary.json");
  write("c/live/rank-00000.json");
  write("d/settings.json");
  write("e/live");  // no folder
  EXPECT_THAT(found(), ElementsAre("a", "b", "c"));
}

TEST_F(FindRuns, ARunCalledLiveHidesNoOther) {
  write("a/metrics.jsonl");
  write("live/metrics.jsonl");
  write("live/live/rank-00000.json");
  write("group/live/b/metrics.jsonl");
  write("group/c/live/node-000.json");
  EXPECT_THAT(found(), ElementsAre("a", "group/c", "group/live/b", "live"));
}

TEST_F(FindRuns, LooksThreeFoldersDeep) {
  write("1/2/3/metrics.jsonl");
  write("1/2/other/4/metrics.jsonl");
  write("1/run/metrics.jsonl");
  write("1/run/inner/metrics.jsonl");
  write(".hidden/metrics.jsonl");
  EXPECT_THAT(found(), ElementsAre("1/2/3", "1/run"));
}

TEST_F(FindRuns, FollowsNoLinksAndNamesARunOnce) {
  write("a/metrics.jsonl");
  fs::create_directory_symlink(folder_.path(), folder_.path() / "loop");
  fs::create_directory_symlink(folder_.path() / "a", folder_.path() / "same");
  EXPECT_THAT(found(), ElementsAre("a"));
  EXPECT_THAT(find_runs({path(), path() / "a"}).folders, SizeIs(1));
  EXPECT_THAT(find_runs({path() / "same"}).folders, IsEmpty()) << "not canonical";
  EXPECT_THAT(find_runs({"/nowhere"}).folders, IsEmpty());
}

TEST_F(FindRuns, SaysThatLinksWereSkipped) {
  write("1/2/3/settings.json");
  write("elsewhere/live/rank-00000.json");
  const auto skips_links = [&](const char* target, const char* link) {
    EXPECT_FALSE(find_runs({path()}).has_skipped_links);
    fs::create_symlink(path() / target, path() / link);
    const bool skips = find_runs({path()}).has_skipped_links;
    fs::remove(path() / link);
    return skips;
  };
  EXPECT_TRUE(skips_links("elsewhere", "link"));
  EXPECT_TRUE(skips_links("elsewhere", "1/2/link"));
  EXPECT_TRUE(skips_links("elsewhere/live", "1/live"));
  EXPECT_TRUE(skips_links("elsewhere/live", "1/2/3/live")) << "the deepest folder";
  EXPECT_FALSE(skips_links("elsewhere", "1/.hidden"));
  EXPECT_FALSE(skips_links("elsewhere", "elsewhere/link")) << "inside of a run";
}

TEST_F(FindRuns, ListsCheckpointsWithTheBest) {
  write("a/checkpoints/step-00000010.pt", "12345");
  write("a/checkpoints/step-00000020.pt", "123");
  write("a/checkpoints/step-00000020.shard-0-of-2-183e4bd3.pt", "1");
  write("a/checkpoints/.unfinished-x.pt", "1");
  write("a/checkpoints/.lock");
  fs::create_hard_link(folder_.path() / "a/checkpoints/step-00000010.pt", folder_.path() / "a/checkpoints/best.pt");
  fs::create_symlink("step-00000020.pt", folder_.path() / "a/checkpoints/step-00000030.pt");  // links are left out
  const auto files = list_checkpoints(fs::canonical(folder_.path() / "a"));
  ASSERT_EQ(files.size(), 3U);
  EXPECT_EQ(files[0].name, "best.pt");
  EXPECT_EQ(files[0].best_of, "step-00000010.pt");
  EXPECT_EQ(files[1].name, "step-00000020.pt");
  EXPECT_FALSE(files[1].is_best);
  EXPECT_EQ(files[1].bytes, 3U);
  EXPECT_EQ(files[2].name, "step-00000010.pt");
  EXPECT_TRUE(files[2].is_best);
  EXPECT_THAT(list_checkpoints(fs::canonical(folder_.path()) / "none"), IsEmpty());
}

}  // namespace
}  // namespace lockstep::ui
