// What `lockstep top` draws, and what keys do: without a terminal.

#include <random>
#include <regex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "tools/live_samples.h"
#include "top/find_run.h"
#include "top/view.h"

namespace lockstep::top {
namespace {

using live::call_json;
using live::files_of;
using live::Json;
using live::kNow;
using live::node_json;
using live::rank_json;
using live::worker_json;
using testing::AllOf;
using testing::Contains;
using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;
using testing::StartsWith;

using Strings = std::vector<std::string>;

/// The text as a terminal shows it.
std::string without_colours(const std::string& line) {
  static const std::regex kColours("\033\\[[0-9;]*m");
  return std::regex_replace(line, kColours, "");
}

/// A job with a rank of each kind among many: 0 blocks, 1 failed, 2 is silent, 3 has no file.
live::JobView mixed_job(int64_t ranks) {
  std::vector<Json> files;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    Json changes{{"world_size", ranks}, {"host", "node" + std::to_string(rank / 8)}, {"step", 1000 + rank}};
    if (rank == 0) changes["call"] = call_json(5);
    if (rank == 1)
      changes.update({{"state", "failed"},
                      {"failure",
                       {{"kind", "PeerError"},
                        {"message", "rank 7 is gone, which is told in a message that is longer than a line is"},
                        {"flight_recorder", "/tmp/lockstep-flight-1-rank1.jsonl"}}}});
    if (rank == 2) changes["updated"] = kNow - 12;
    if (rank > 3) changes["gpu"] = {{"name", "H200"}, {"utilization", 0.9}, {"memory_used_bytes", 5 << 20}};
    if (rank != 3) files.push_back(rank_json(rank, changes));
  }
  return live::make_job_view(files_of(files), kNow);
}

Shown shown_of(live::JobView job, Strings log = {}) {
  return {.run = "runs/mnist", .job = std::move(job), .log = std::move(log)};
}

/// A frame without colours, and without blanks at the end of rows.
Strings rows_of(const Shown& shown, Choice choice = {}, Style style = {.columns = 80, .rows = 24}) {
  Strings rows;
  for (const auto& line : draw(shown, choice, style).lines) {
    const auto row = without_colours(line);
    rows.push_back(row.substr(0, row.find_last_not_of(' ') + 1));
  }
  return rows;
}

TEST(TopView, FitsIntoEveryTerminal) {
  auto long_names = shown_of(mixed_job(40), {std::string(300, 'x'), "日本語のログ", "last"});
  long_names.run = "/home/someone/with/a/long/path/to/runs/名前";
  long_names.job.problems = {"live/rank-00003.json: it is damaged"};
  for (const auto& shown : {shown_of({}), shown_of(mixed_job(1)), shown_of(mixed_job(4)), long_names})
    for (size_t columns = 1; columns <= 160; columns += columns < 40 ? 1 : 7)
      for (size_t rows = 1; rows <= 40; ++rows)
        for (const bool has_help : {false, true}) {
          const Style style{
              .columns = columns, .rows = rows, .has_colour = rows % 2 == 0, .has_unicode = rows % 3 == 0};
          Choice choice{.shows_help = has_help};
          const auto frame = draw(shown, choice, style);
          ASSERT_LE(frame.lines.size(), rows);
          for (const auto& line : frame.lines)
            ASSERT_LE(columns_of(without_colours(line)), columns) << columns << "x" << rows << ": " << line;
        }
}

TEST(TopView, HasTheJobInItsHeader) {
  const auto rows =
      rows_of(shown_of(live::make_job_view(files_of({rank_json(0, {{"attempt", 2}, {"world_size", 1}})}), kNow)));
  ASSERT_THAT(rows, SizeIs(24));
  EXPECT_EQ(rows[0], "runs/mnist  running  job job-1  attempt 3  1:00");
  EXPECT_EQ(rows[1], "epoch 1.50/20  step 100  320 samples/s  ranks: 1 running  batch 50/100");
  EXPECT_EQ(rows[3], ">     0 running    100    320  30%  40%  20%   5%   512M");
  EXPECT_EQ(rows[23], "q quit  j/k select  s sort: rank  l log  ? help");
}

TEST(TopView, SaysInWordsHowEveryRankIs) {
  const auto rows = rows_of(shown_of(mixed_job(8)));
  EXPECT_THAT(rows, Contains(ContainsRegex("^>  +0 running +1000 .*in all_reduce for 5 s$")));
  EXPECT_THAT(rows, Contains(ContainsRegex("^ x +1 failed +1001 PeerError: rank 7 is gone, which is")));
  EXPECT_THAT(rows, Contains(ContainsRegex("^ ! +2 silent +1002 no news for 12 s$")));
  EXPECT_THAT(rows, Contains(ContainsRegex("^ ! +3 silent +- no file yet$")));
  EXPECT_THAT(rows, Contains(ContainsRegex("^   +7 running +1007 .* 90%$")));
  EXPECT_THAT(rows, Contains("rank 1: PeerError: rank 7 is gone, which is told in a message that is longer"));
  EXPECT_THAT(rows[0], HasSubstr("  failed  "));
  EXPECT_THAT(rows[1], HasSubstr("ranks: 5 running, 2 silent, 1 failed"));
}

TEST(TopView, MarksTheStraggler) {
  std::vector<Json> files;
  for (int rank = 0; rank < 4; ++rank) files.push_back(rank_json(rank, live::communication(rank == 2 ? 0.0 : 0.5)));
  const auto rows = rows_of(shown_of(live::make_job_view(files_of(files), kNow)));
  EXPECT_THAT(rows, Contains(ContainsRegex("^ ! +2 straggler .* 0% .*the others wait for it")));
}

TEST(TopView, PaintsFailedRowsRedOnlyWithColours) {
  Choice choice{.selected = 0};
  const auto shown = shown_of(mixed_job(4));
  const auto painted = draw(shown, choice, {.columns = 80, .rows = 24, .has_colour = true}).lines;
  EXPECT_THAT(painted, Contains(AllOf(HasSubstr("\033[31m   1"), HasSubstr("\033[1;31mfailed"))));
  for (const auto& line : draw(shown, choice, {.columns = 80, .rows = 24, .has_unicode = true}).lines)
    EXPECT_THAT(line, Not(HasSubstr("\033"))) << line;
}

TEST(TopView, IsAsciiWithoutUnicode) {
  auto shown = shown_of(mixed_job(4), {"caf\xc3\xa9"});
  shown.run = "runs/caf\xc3\xa9";
  for (size_t columns : {40, 80, 140})
    for (const auto& row : rows_of(shown, {}, {.columns = columns, .rows = 24}))
      for (char letter : row) EXPECT_LT(static_cast<unsigned char>(letter), 0x80) << row;
  EXPECT_THAT(rows_of(shown, {}, {.columns = 80, .rows = 24, .has_unicode = true})[0], StartsWith("runs/caf\xc3\xa9 "));
}

TEST(TopView, ShowsNoControlCharactersOfFiles) {
  auto shown = shown_of(live::make_job_view(
      files_of(
          {rank_json(
               0, {{"host", "a\033[2J"}, {"job", "j\r\n"}, {"device", "\033]0;x\a"}, {"call", {{"operation", "\n"}}}}),
           rank_json(1, {{"host", "b\a"}})}),
      kNow));
  shown.run = "runs/\033[1m";
  for (const auto& line : rows_of(shown, {}, {.columns = 140, .rows = 24}))
    for (char letter : line) EXPECT_GE(static_cast<unsigned char>(letter), 0x20) << line;
}

TEST(TopView, ShowsTheDetailsOfTheSelectedRank) {
  const auto shown = shown_of(mixed_job(4), {"line 1", "line 2"});
  auto rows = rows_of(shown, {.selected = 1});
  EXPECT_THAT(rows, Contains("-- rank 1  pid 1001 on node0  cpu"));
  EXPECT_THAT(rows, Contains("flight recorder: /tmp/lockstep-flight-1-rank1.jsonl"));
  EXPECT_THAT(rows, Contains("line 2"));
  EXPECT_THAT(rows_of(shown, {.selected = 0}),
              Contains("-- rank 0  pid 1000 on node0  cpu  in all_reduce (world, call 812) at train.cpp~"));
  rows = rows_of(shown, {.selected = 1, .shows_log = false});
  EXPECT_THAT(rows, Not(Contains("line 2")));
  EXPECT_THAT(rows, Contains(StartsWith("rank 1: PeerError"))) << "the report stays";
  EXPECT_THAT(rows_of(shown_of(mixed_job(4))), Contains("no output"));
}

TEST(TopView, AlwaysShowsTheSelectedRankAmongAThousand) {
  const auto shown = shown_of(mixed_job(1000));
  Choice choice;
  std::mt19937 random(3);
  for (int i = 0; i < 60; ++i) {
    choice.selected = random() % 1000;
    const auto frame = draw(shown, choice, {.columns = 80, .rows = 8 + random() % 40});
    const auto marked = std::count_if(frame.lines.begin(), frame.lines.end(),
                                      [](const std::string& line) { return line.starts_with('>'); });
    EXPECT_EQ(marked, 1) << *choice.selected;
  }
  choice.selected = 999;
  EXPECT_THAT(draw(shown, choice, {.columns = 80, .rows = 24}).lines.back(),
              ContainsRegex("^[0-9]+-1000 of 1000  q quit"));
}

TEST(TopView, ShowsTheColumnsForWhichThereIsRoom) {
  const auto job = mixed_job(40);
  const auto header = [&](size_t columns) { return RankTable(job, {.columns = columns}).header(); };
  EXPECT_THAT(header(60), AllOf(Not(HasSubstr("COMM")), HasSubstr("HOST"), HasSubstr("NOTE")));
  EXPECT_THAT(header(80), AllOf(HasSubstr("COMM"), HasSubstr("HOST"), Not(HasSubstr("GPU"))));
  EXPECT_THAT(header(140), AllOf(HasSubstr("TIME"), HasSubstr("MEM"), HasSubstr("GPUMEM"), HasSubstr("HOST")));
  const RankTable wide(job, {.columns = 140});
  EXPECT_THAT(wide.row(job.ranks[5], false), HasSubstr(" FFFFFFBBBBBBBBCCCCD. "));
  const auto bars = RankTable(job, {.columns = 140, .has_colour = true, .has_unicode = true}).row(job.ranks[5], false);
  EXPECT_THAT(bars, HasSubstr("\033[34m▇▇▇▇▇▇\033[0m\033[35m▇▇▇▇▇▇▇▇\033[0m"));
  const Style coloured{.columns = 140, .has_colour = true, .has_unicode = true};
  EXPECT_THAT(RankTable(job, coloured).row(job.ranks[5], true), HasSubstr("\033[34m▇▇▇▇▇▇\033[0m"))
      << "reverse video would show a block in the colour of the background";
}

TEST(TopView, WaitsForRanks) {
  EXPECT_THAT(rows_of(shown_of({})), Contains(StartsWith("No rank has written a live file yet.")));
}

TEST(TopView, PrintsTheWholeTableOnce) {
  auto shown = shown_of(mixed_job(100));
  shown.job.problems = {"live/rank-00003.json: it is empty", "live/node-000.json: it is empty"};
  const auto lines = draw_once(shown, {.columns = 100});
  EXPECT_THAT(lines, Contains(ContainsRegex("^ +99 node12 +running +1099 ")));
  EXPECT_EQ(lines.back(), "live/rank-00003.json: it is empty (and 1 more)");
  for (const auto& line : lines) EXPECT_FALSE(line.ends_with(' ')) << line;
}

TEST(TopView, FormatsNumbersInLittleRoom) {
  EXPECT_EQ(speed_text(std::nullopt), "-");
  EXPECT_EQ(speed_text(0.5), "0.50");
  EXPECT_EQ(speed_text(9.999), "10.0");
  EXPECT_EQ(speed_text(320), "320");
  EXPECT_EQ(speed_text(999.7), "1.0k");
  EXPECT_EQ(speed_text(12849), "12.8k");
  EXPECT_EQ(speed_text(453000), "453k");
  EXPECT_EQ(speed_text(2.5e6), "2.5M");
  EXPECT_EQ(speed_text(5e12), "5e+12");
  EXPECT_EQ(clock_text(59.9), "0:59");
  EXPECT_EQ(clock_text(3723), "1:02:03");
  EXPECT_EQ(clock_text(-5), "0:00");
  EXPECT_EQ(clock_text(1e300).size(), std::string("277777777:46:40").size());
}

// --- keys

std::vector<Key> keys_of(std::string bytes) {
  return take_keys(bytes);
}

TEST(TopKeys, AreReadFromTheBytesOfATerminal) {
  EXPECT_THAT(keys_of("qjk\033[A\033[B\033OA\033[5~\033[6~gGsl?x"),
              ElementsAre(Key::kQuit, Key::kDown, Key::kUp, Key::kUp, Key::kDown, Key::kUp, Key::kPageUp,
                          Key::kPageDown, Key::kFirst, Key::kLast, Key::kSort, Key::kLog, Key::kHelp, Key::kOther));
  EXPECT_THAT(keys_of("\033[1;5Cq\033q"), ElementsAre(Key::kOther, Key::kQuit, Key::kOther, Key::kQuit));
  std::string bytes = "\033";
  EXPECT_THAT(take_keys(bytes), IsEmpty());
  bytes += "[";
  EXPECT_THAT(take_keys(bytes), IsEmpty());
  bytes += "Bj";
  EXPECT_THAT(take_keys(bytes), ElementsAre(Key::kDown, Key::kDown)) << "a sequence that arrived in parts";
  EXPECT_EQ(bytes, "");
  bytes = "\033[" + std::string(100, '1');
  take_keys(bytes);
  EXPECT_EQ(bytes, "") << "no key is so long";
}

TEST(TopKeys, MoveTheSelection) {
  const auto job = mixed_job(20);
  Choice choice;
  const auto press = [&](Key key) {
    apply(key, choice, job, 5);
    return selected_rank(choice, job);
  };
  EXPECT_EQ(press(Key::kUp), 0);
  EXPECT_EQ(press(Key::kDown), 1);
  EXPECT_EQ(press(Key::kPageDown), 6);
  EXPECT_EQ(press(Key::kLast), 19);
  EXPECT_EQ(press(Key::kDown), 19);
  EXPECT_EQ(press(Key::kPageUp), 14);
  EXPECT_EQ(press(Key::kFirst), 0);
  EXPECT_EQ(press(Key::kSort), 1) << "by state: the failed rank";
  EXPECT_EQ(press(Key::kDown), 2);
  for (auto key : {Key::kDown, Key::kPageDown, Key::kSort, Key::kLast}) apply(key, choice, {}, 5);
  EXPECT_EQ(selected_rank(choice, {}), std::nullopt);
}

TEST(TopKeys, SwitchLogAndHelp) {
  const auto job = mixed_job(4);
  Choice choice;
  apply(Key::kLog, choice, job, 5);
  EXPECT_FALSE(choice.shows_log);
  apply(Key::kHelp, choice, job, 5);
  EXPECT_TRUE(choice.shows_help);
  apply(Key::kDown, choice, job, 5);
  EXPECT_FALSE(choice.shows_help) << "any key leaves the help";
  EXPECT_EQ(selected_rank(choice, job), 0);
}

TEST(TopKeys, SortByWhatNeedsAttention) {
  const auto job = live::make_job_view(
      files_of({rank_json(0, {{"step", 12}, {"samples_per_second", 5}, {"time", {{"communication", 0.3}}}}),
                rank_json(1, {{"step", 11}, {"samples_per_second", nullptr}, {"time", {{"communication", 0.2}}}}),
                rank_json(2, {{"step", 12}, {"samples_per_second", 4}, {"time", {{"communication", 0.25}}}}),
                rank_json(3, {{"step", 12}, {"samples_per_second", 6}, {"state", "failed"}, {"time", nullptr}})}),
      kNow);
  const auto order = [&](Sort sort) {
    std::vector<int64_t> ranks;
    for (const auto* rank : sorted(job, sort)) ranks.push_back(rank->rank);
    return ranks;
  };
  EXPECT_THAT(order(Sort::kRank), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(order(Sort::kState), ElementsAre(3, 0, 1, 2));
  EXPECT_THAT(order(Sort::kStep), ElementsAre(1, 0, 2, 3));
  EXPECT_THAT(order(Sort::kSpeed), ElementsAre(2, 0, 3, 1));
  EXPECT_THAT(order(Sort::kCommunication), ElementsAre(1, 2, 0, 3));
  auto sort = Sort::kRank;
  for (int i = 0; i < 5; ++i) sort = next_of(sort);
  EXPECT_EQ(sort, Sort::kRank);
}

// --- the run to show

TEST(TopFindRun, TakesTheRunWithTheLastNews) {
  const TemporaryFolder folder;
  const auto make = [&](const std::string& name, int seconds_ago) {
    const auto live = folder.path() / name / "live";
    std::filesystem::create_directories(live);
    std::ofstream(live / "rank-00000.json") << "{}";
    std::filesystem::last_write_time(live,
                                     std::filesystem::file_time_type::clock::now() - std::chrono::seconds(seconds_ago));
    return folder.path() / name;
  };
  make("a", 50);
  const auto b = make("group/b", 10);
  make("group/deep/c", 30);
  make("group/deep/too/deep", 0);
  const auto canonical = [](const std::filesystem::path& path) { return std::filesystem::canonical(path); };
  EXPECT_EQ(find_run(folder.path()).folder, canonical(b));
  EXPECT_EQ(find_run(folder.path()).name, b);
  EXPECT_EQ(find_run(folder.path() / "a").folder, canonical(folder.path() / "a"));
  std::filesystem::create_directories(folder.path() / "old");
  std::ofstream(folder.path() / "old" / "metrics.jsonl") << "{}";
  EXPECT_EQ(find_run(folder.path() / "old").folder, canonical(folder.path() / "old"));

  const auto called_live = make("old group/live", 5);
  EXPECT_EQ(find_run(folder.path()).folder, canonical(called_live));
  EXPECT_EQ(find_run(folder.path() / "old group").folder, canonical(called_live));

  make("elsewhere/d", 0);
  std::filesystem::create_directories(folder.path() / "runs");
  std::filesystem::create_directory_symlink(folder.path() / "elsewhere/d", folder.path() / "runs/d");
  EXPECT_THROW(find_run(folder.path() / "runs"), UsageError) << "follows a link below the folder";
  EXPECT_EQ(find_run(folder.path() / "runs/d").folder, canonical(folder.path() / "elsewhere/d"));
  EXPECT_EQ(find_run(folder.path() / "runs/d").name, folder.path() / "runs/d");
}

TEST(TopFindRun, RefusesAFolderWithoutRuns) {
  const TemporaryFolder folder;
  EXPECT_THROW(find_run(folder.path()), UsageError);
  EXPECT_THROW(find_run(folder.path() / "gone"), UsageError);
  std::ofstream(folder.path() / "file") << "x";
  EXPECT_THROW(find_run(folder.path() / "file"), UsageError);
}

}  // namespace
}  // namespace lockstep::top
