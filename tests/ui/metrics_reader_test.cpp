// A metrics.jsonl that other processes write: it grows, shrinks, is replaced, or is something else.

#include "ui/metrics_reader.h"

#include <fstream>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/temporary_folder.h"
#include "support/watched_pipe.h"

namespace lockstep::ui {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

std::string line(int step) {
  return fmt::format("{{\"type\":\"step\",\"step\":{},\"loss\":{}}}\n", step, step * 0.5);
}

class ReadMetrics : public testing::Test {
 protected:
  ReadMetrics() : file_(folder_.path() / "metrics.jsonl"), reader_(fs::canonical(folder_.path()), "metrics.jsonl") {}

  void append(const std::string& text) const { std::ofstream(file_, std::ios::app) << text; }
  void overwrite(const std::string& text) const { std::ofstream(file_, std::ios::trunc) << text; }

  bool read() {
    return reader_.read_more([] { return true; });
  }

  std::vector<double> steps() const {
    return reader_.with_records([](const Records& records) { return records.steps().step; });
  }

  TemporaryFolder folder_;
  const fs::path file_;
  MetricsReader reader_;
};

using testing::ElementsAre;
using testing::IsEmpty;

TEST_F(ReadMetrics, FollowsAFileThatGrows) {
  EXPECT_FALSE(read());
  append(line(1) + "{\"type\":\"step\",\"st");
  EXPECT_TRUE(read());
  EXPECT_THAT(steps(), ElementsAre(1));
  EXPECT_FALSE(read());
  append("ep\":2,\"loss\":7}\n" + line(3));
  EXPECT_TRUE(read());
  EXPECT_THAT(steps(), ElementsAre(1, 2, 3));
  EXPECT_EQ(reader_.problem(), "");
}

TEST_F(ReadMetrics, BeginsAgainWhenTheFileIsReplaced) {
  append(line(1) + line(2) + line(3));
  read();
  std::ofstream(folder_.path() / "new") << line(1) + line(2) + line(30) + line(40);
  fs::rename(folder_.path() / "new", file_);
  EXPECT_TRUE(read());
  EXPECT_THAT(steps(), ElementsAre(1, 2, 30, 40));
}

TEST_F(ReadMetrics, BeginsAgainWhenTheFileIsSmallerOrWasWrittenAgain) {
  append(line(1) + line(2) + line(3));
  read();
  fs::resize_file(file_, line(1).size());
  EXPECT_TRUE(read());
  EXPECT_THAT(steps(), ElementsAre(1));
  overwrite(line(7) + line(8) + line(9));  // the same file, and longer
  EXPECT_TRUE(read());
  EXPECT_THAT(steps(), ElementsAre(7, 8, 9));
}

TEST_F(ReadMetrics, ForgetsAFileThatIsRemoved) {
  append(line(1));
  read();
  fs::remove(file_);
  EXPECT_TRUE(read());
  EXPECT_THAT(steps(), IsEmpty());
  append(line(5));
  EXPECT_TRUE(read());
  EXPECT_THAT(steps(), ElementsAre(5));
}

TEST_F(ReadMetrics, ReadsFilesOfManyPieces) {
  std::string text;
  for (int i = 0; i < 200000; ++i) text += line(i);
  ASSERT_GT(text.size(), size_t{6} << 20);
  append(text);
  int pieces = 0;
  EXPECT_TRUE(reader_.read_more([&] { return ++pieces < 2; }));  // stopped after the first
  EXPECT_LT(steps().size(), 200000U);
  EXPECT_TRUE(read());
  ASSERT_EQ(steps().size(), 200000U);
  EXPECT_EQ(steps().back(), 199999);
}

TEST_F(ReadMetrics, SkipsALineThatIsTooLong) {
  append(line(1) + std::string(size_t{10} << 20, 'x') + "\n" + line(2));
  EXPECT_TRUE(read());
  EXPECT_THAT(steps(), ElementsAre(1, 2));
  EXPECT_EQ(reader_.with_records([](const Records& records) { return records.damaged_lines(); }), 1U);
  EXPECT_THAT(reader_.with_records([](const Records& records) { return records.first_problem(); }),
              HasSubstr("longer than 1 MiB"));
}

TEST_F(ReadMetrics, ReportsWhatIsNoFile) {
  fs::create_directory(file_);
  read();
  EXPECT_EQ(reader_.problem(), "metrics.jsonl: it is not a regular file");
  fs::remove(file_);
  const WatchedPipe pipe(file_);
  read();
  EXPECT_EQ(reader_.problem(), "metrics.jsonl: it is not a regular file");
  EXPECT_FALSE(pipe.was_opened());
  fs::remove(file_);
  append(line(1));
  read();
  EXPECT_EQ(reader_.problem(), "");
  EXPECT_THAT(steps(), ElementsAre(1));
}

}  // namespace
}  // namespace lockstep::ui
