// Live files on a disk: whole, damaged, foreign, huge and many. And what other programs get: JSON and OpenMetrics.

#include <chrono>
#include <cstdlib>
#include <limits>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "live/open_metrics.h"
#include "support/rank_process.h"
#include "support/slowness.h"
#include "support/stolen_time.h"
#include "support/watched_pipe.h"
#include "tools/live_samples.h"

namespace lockstep::live {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;
using testing::StartsWith;

template <class Parse>
std::string problem_of(Parse&& parse, const std::string& text) {
  try {
    parse(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(LiveFiles, ReadEveryKeyOfARank) {
  const auto file = rank_file(
      3, {{"gpu", {{"name", "H200"}, {"utilization", 0.87}, {"memory_used_bytes", 7}, {"memory_total_bytes", 9}}},
          {"call", call_json(3.2)},
          {"unknown", {1, 2}},
          {"failure",
           {{"kind", "PeerError"},
            {"message", "gone"},
            {"flight_recorder", "/tmp/f.jsonl"},
            {"calls",
             {{{"what", "barrier()"},
               {"state", "running"},
               {"group", "world"},
               {"site", "train.cpp:30"},
               {"started_s_ago", 0.5},
               {"took_s", nullptr}}}}}}});
  EXPECT_EQ(file.rank, 3);
  EXPECT_EQ(file.world_size, 4);
  EXPECT_EQ(file.device, "cpu");
  EXPECT_EQ(file.updated, kNow - 0.5);
  EXPECT_EQ(file.epoch, 1.5);
  EXPECT_EQ(file.batches, 100);
  EXPECT_EQ(file.samples_per_second, 320.0);
  EXPECT_EQ(file.time.communication, 0.2);
  EXPECT_EQ(file.time.data, 0.05);
  EXPECT_EQ(file.resident_bytes, 512 << 20);
  ASSERT_TRUE(file.gpu && file.call && file.failure);
  EXPECT_EQ(file.gpu->utilization, 0.87);
  EXPECT_EQ(file.gpu->memory_total_bytes, 9);
  EXPECT_EQ(file.call->number, 812);
  EXPECT_EQ(file.call->where, "train.cpp:88");
  ASSERT_THAT(file.failure->calls, SizeIs(1));
  EXPECT_EQ(file.failure->calls[0].site, "train.cpp:30");
  EXPECT_EQ(file.failure->calls[0].took_seconds, std::nullopt);
}

TEST(LiveFiles, SayWhyTheyCannotBeRead) {
  const auto rank = [](const Json& changes) { return problem_of(parse_rank_file, rank_json(0, changes).dump()); };
  EXPECT_EQ(rank(Json::object()), "");
  EXPECT_EQ(problem_of(parse_rank_file, ""), "it is empty");
  EXPECT_EQ(problem_of(parse_rank_file, "[1]"), "it is not a JSON object");
  EXPECT_EQ(problem_of(parse_rank_file, "{}"), "it has no number \"format\"");
  EXPECT_EQ(problem_of(parse_rank_file, "{\"format\":1e999}"), "it is damaged: a number is out of range");
  EXPECT_THAT(problem_of(parse_rank_file, "{\"a\":"), StartsWith("it is damaged: not valid JSON at byte"));
  EXPECT_EQ(rank({{"format", 2}}), "its format is 2, and this lockstep reads format 1: use the lockstep of the job");
  EXPECT_EQ(rank({{"format", 0}}), "its format is 0, not 1");
  EXPECT_EQ(rank({{"rank", -1}}), "its \"rank\" is -1");
  EXPECT_EQ(rank({{"rank", 1e15}}), "its \"rank\" is 1000000000000000");
  EXPECT_EQ(rank({{"updated", "now"}}), "it has no number \"updated\"");
  EXPECT_EQ(rank({{"state", "dancing"}}),
            "its \"state\" is \"dancing\", not one of running, finished, stopped and failed");
  EXPECT_EQ(problem_of(parse_node_file, node_json({}, {{"state", 1}}).dump()),
            "its \"state\" is \"\", not one of running and ended");
  EXPECT_EQ(problem_of(parse_node_file, node_json({}).dump()), "");
}

TEST_F(LiveFolder, BecomesValidJsonWhateverTheFilesHave) {
  std::string accents;
  for (int i = 0; i < 50; ++i) accents += "\xc3\xa9";  // two bytes each, which must not be separated
  write_rank(rank_json(0, {{"state", "a" + accents}, {"host", accents}}));
  write_rank(
      rank_json(1, {{"host", accents}, {"job", accents}, {"state", "failed"}, {"failure", {{"message", accents}}}}));
  write_node(node_json({worker_json(1, {{"how", accents}})}, {{"job", accents}, {"command", {accents}}}));
  const auto json = Json::parse(to_json(read_job(run(), kNow)).dump());
  EXPECT_EQ(json.at("job"), accents);
  EXPECT_THAT(json.at("problems").at(0), HasSubstr("its \"state\" is"));
}

TEST(LiveFiles, TreatValuesOfOtherTypesAsAbsent) {
  const auto file = rank_file(0, {{"host", 5},
                                  {"step", "x"},
                                  {"time", 3},
                                  {"call", "no"},
                                  {"memory", {1}},
                                  {"gpu", 1},
                                  {"failure", true},
                                  {"samples_per_second", "fast"},
                                  {"world_size", 1e300}});
  EXPECT_EQ(file.host, "");
  EXPECT_EQ(file.step, 0);
  EXPECT_EQ(file.world_size, 0);
  EXPECT_EQ(file.time.forward, std::nullopt);
  EXPECT_FALSE(file.call || file.gpu || file.failure || file.resident_bytes || file.samples_per_second);
  EXPECT_EQ(rank_file(0, {{"time", {{"forward", 7}, {"data", -1}}}}).time.forward, 1.0) << "shares are 0 to 1";
  const auto node = parse_node_file(node_json({Json(7), Json{{"rank", -3}}, worker_json(2)}).dump());
  EXPECT_THAT(node.workers, SizeIs(1));
}

TEST(LiveFiles, SurviveEveryTruncationAndManyDamages) {
  const auto rank = rank_json(3, {{"failure", {{"kind", "Error"}, {"calls", {{{"what", "barrier()"}}}}}}}).dump();
  const auto node = node_json({worker_json(0)}, {{"report", {{"culprit", {{"rank", 0}}}}}}).dump();
  for (size_t length = 0; length < rank.size(); ++length)
    EXPECT_NE(problem_of(parse_rank_file, rank.substr(0, length)), "") << length;
  for (size_t length = 0; length < node.size(); ++length)
    EXPECT_NE(problem_of(parse_node_file, node.substr(0, length)), "") << length;
  std::mt19937 random(7);
  int refused = 0;
  for (int i = 0; i < 5000; ++i) {
    auto damaged = rank;
    for (int change = 0; change < 3; ++change) damaged[random() % damaged.size()] = static_cast<char>(random() % 256);
    refused += problem_of(parse_rank_file, damaged).empty() ? 0 : 1;
  }
  EXPECT_GT(refused, 1000);
}

TEST_F(LiveFolder, WithoutFilesIsAnEmptyJob) {
  for (const auto& path : {run(), folder_.path()}) {
    const auto job = read_job(path, kNow);
    EXPECT_THAT(job.ranks, IsEmpty());
    EXPECT_THAT(job.problems, IsEmpty());
    EXPECT_FALSE(job.is_live);
  }
  write("live", "a file, not a folder");
  EXPECT_THAT(read_job(run(), kNow).ranks, IsEmpty());
}

TEST_F(LiveFolder, ListsFilesThatCannotBeReadWithTheReason) {
  for (int rank : {0, 1}) write_rank(rank_json(rank));
  write("live/rank-00002.json", rank_json(2).dump().substr(0, 100));
  write("live/rank-00003.json", rank_json(1).dump());
  write("live/node-000.json", "{\"format\": 7}");
  write("live/rank-00004.json", std::string(size_t{9} << 20, ' '));
  write("live/rank-00005.json", std::string(1000000, '['));
  write("live/rank-00006.json.tmp", "half");
  write("live/rank-x.json", "foreign");
  write("live/rank-.json", "foreign");
  const WatchedPipe pipe(run() / "live/rank-00007.json");
  std::filesystem::create_directory(run() / "live/rank-00008.json");
  std::filesystem::create_symlink("rank-00000.json", run() / "live/rank-00009.json");
  const auto job = read_job(run(), kNow);
  ASSERT_THAT(job.ranks, SizeIs(4));
  EXPECT_EQ(job.ranks[1].state, RankState::kRunning);
  EXPECT_EQ(job.ranks[2].note, "its live file cannot be read");
  EXPECT_THAT(
      job.problems,
      ElementsAre("live/node-000.json: its format is 7, and this lockstep reads format 1: use the lockstep of "
                  "the job",
                  StartsWith("live/rank-00002.json: it is damaged: not valid JSON at byte"),
                  "live/rank-00003.json: its \"rank\" is 1",
                  "live/rank-00004.json: it has 9437184 bytes, and at most 1048576 are read",
                  StartsWith("live/rank-00005.json: it is damaged"), "live/rank-00007.json: it is not a regular file",
                  "live/rank-00008.json: it is not a regular file",
                  "live/rank-00009.json: it is a symbolic link, which is not followed"));
  EXPECT_FALSE(pipe.was_opened());
}

TEST_F(LiveFolder, IsReadWithoutFollowingLinks) {
  write_rank(rank_json(0, {{"host", "secret"}}));
  write("live/output-00000.log", "secret\n");
  write("metrics.jsonl", "{\"secret\":1}\n");
  const auto other = std::filesystem::canonical(folder_.path()) / "other";
  const auto expect_nothing = [&] {
    EXPECT_THAT(to_json(read_job(other, kNow)).dump(), Not(HasSubstr("secret")));
    EXPECT_THAT(last_metrics(other), IsEmpty());
  };
  const auto problem_of_output = [&] { return problem_of([&](const std::string&) { last_lines(other, 0, 10); }, ""); };
  std::filesystem::create_directories(other / "live");
  for (const char* name : {"live/rank-00000.json", "live/output-00000.log", "metrics.jsonl"})
    std::filesystem::create_symlink(run() / name, other / name);
  EXPECT_THAT(read_job(other, kNow).problems,
              ElementsAre("live/rank-00000.json: it is a symbolic link, which is not followed"));
  EXPECT_EQ(problem_of_output(), "it is a symbolic link, which is not followed");
  expect_nothing();
  std::filesystem::rename(other / "live", other / "former");
  std::filesystem::create_directory_symlink(run() / "live", other / "live");
  EXPECT_THAT(read_job(other, kNow).problems, ElementsAre("live: it is a symbolic link, which is not followed"));
  EXPECT_EQ(problem_of_output(), "live: it is a symbolic link, which is not followed");
  expect_nothing();
  std::filesystem::rename(other, folder_.path() / "former");
  std::filesystem::create_directory_symlink(run(), other);
  EXPECT_THAT(last_lines(other, 0, 10), IsEmpty());
  expect_nothing();
}

TEST_F(LiveFolder, OfAHardLinkIsRead) {
  write_rank(rank_json(0));
  std::filesystem::create_directories(run() / "other/live");
  std::filesystem::create_hard_link(run() / "live/rank-00000.json", run() / "other/live/rank-00000.json");
  EXPECT_THAT(read_job(run() / "other", kNow).ranks, Not(IsEmpty()));
}

TEST_F(LiveFolder, WithAThousandRanksIsReadQuickly) {
  std::vector<Json> workers;
  for (int rank = 0; rank < 1000; ++rank) {
    write_rank(rank_json(rank, {{"world_size", 1000}}));
    workers.push_back(worker_json(rank));
  }
  write_node(node_json(workers));
  auto best = std::chrono::nanoseconds::max();
  for (int i = 0; i < 5; ++i) {  // the first one reads the files from the disk
    const auto before = thread_cpu_time();
    const auto job = read_job(run(), kNow);
    best = std::min(best, thread_cpu_time() - before);
    ASSERT_THAT(job.ranks, SizeIs(1000));
    ASSERT_THAT(job.problems, IsEmpty());
  }
  const auto milliseconds = std::chrono::duration<double, std::milli>(best).count();
  RecordProperty("milliseconds", std::to_string(milliseconds));
  EXPECT_LT(milliseconds, 100 * kSlowness);
}

TEST_F(LiveFolder, ReturnsTheLastLinesOfARank) {
  EXPECT_THAT(last_lines(run(), 3, 10), IsEmpty());
  write("live/output-00003.log", "one\ntwo\n\nthree\n");
  EXPECT_THAT(last_lines(run(), 3, 10), ElementsAre("one", "two", "", "three"));
  EXPECT_THAT(last_lines(run(), 3, 2), ElementsAre("", "three"));
  EXPECT_THAT(last_lines(run(), 3, 0), IsEmpty());
  write("live/output-00003.log", "\033[1;31mred\033[0m\033]0;title\a\r\n 10 %\r 20 %\n\xff\xfe caf\xc3\xa9\tend");
  EXPECT_THAT(last_lines(run(), 3, 10), ElementsAre("red", " 20 %", "\xEF\xBF\xBD\xEF\xBF\xBD caf\xc3\xa9 end"));
  write("live/output-00003.log", "");
  EXPECT_THAT(last_lines(run(), 3, 10), IsEmpty());
  write("live/output-00003.log", std::string(300 << 10, 'x') + "\nlast\n");
  EXPECT_THAT(last_lines(run(), 3, 10), ElementsAre("last")) << "a line that begins before the end that is read";
}

TEST_F(LiveFolder, ReturnsTheLastMetrics) {
  EXPECT_THAT(last_metrics(run()), IsEmpty());
  write("metrics.jsonl",
        "{\"type\":\"epoch\",\"step\":10,\"accuracy\":0.5,\"loss\":2}\ndamaged\n"
        "{\"type\":\"step\",\"step\":20,\"loss\":1.5,\"lr\":null}\n{\"type\":\"st");
  EXPECT_THAT(last_metrics(run()),
              ElementsAre(std::pair("accuracy", 0.5), std::pair("loss", 1.5), std::pair("step", 20.0)));
}

TEST_F(LiveFolder, BecomesJsonForTheDashboard) {
  for (int rank = 0; rank < 4; ++rank) write_rank(rank_json(rank));
  write_rank(rank_json(1, {{"state", "failed"}, {"failure", {{"kind", "PeerError"}, {"message", "gone"}}}}));
  write_node(node_json({worker_json(0)}));
  const auto json = Json::parse(to_json(read_job(run(), kNow)).dump());
  EXPECT_EQ(json.at("state"), "failed");
  EXPECT_EQ(json.at("is_live"), true);
  EXPECT_EQ(json.at("samples_per_second"), 960);
  EXPECT_EQ(json.at("nodes").at(0).at("command"), Json({"./train"}));
  ASSERT_EQ(json.at("ranks").size(), 4U);
  const auto& rank = json.at("ranks").at(1);
  EXPECT_EQ(rank.at("state"), "failed");
  EXPECT_EQ(rank.at("note"), "PeerError: gone");
  EXPECT_EQ(rank.at("time").at("backward"), 0.4);
  EXPECT_EQ(rank.at("gpu"), nullptr);
  EXPECT_EQ(rank.at("failure").at("kind"), "PeerError");
}

// --- OpenMetrics

RunView sample_run(const std::string& name) {
  RunView run{.name = name};
  run.job =
      make_job_view(files_of({rank_json(0, {{"gpu", {{"utilization", 0.5}, {"memory_used_bytes", 1024}}}}),
                              rank_json(1, {{"time", {{"communication", 0.01}}}}),
                              rank_json(2, {{"updated", kNow - 12}, {"samples_per_second", nullptr}}), rank_json(3)}),
                    kNow);
  run.metrics = {{"loss", 0.25}, {"grad \"norm\"\\x", std::numeric_limits<double>::quiet_NaN()}, {"step", 100}};
  return run;
}

TEST(OpenMetrics, ListsRanksAndMetrics) {
  const auto text = open_metrics({sample_run("a\"b\\c\nd")}, kNow);
  EXPECT_THAT(text, HasSubstr("# TYPE lockstep_rank_memory_resident_bytes gauge\n"
                              "# UNIT lockstep_rank_memory_resident_bytes bytes\n"));
  EXPECT_THAT(text, HasSubstr("lockstep_rank_step{run=\"a\\\"b\\\\c d\",rank=\"0\",host=\"node0\"} 100\n"));
  EXPECT_THAT(text, HasSubstr("rank=\"1\",host=\"node0\",part=\"communication\"} 0.01\n"));
  EXPECT_THAT(text, HasSubstr("metric=\"loss\"} 0.25\n"));
  EXPECT_THAT(text, testing::EndsWith("\n# EOF\n"));
  EXPECT_EQ(open_metrics({}, kNow), "# EOF\n");
}

TEST(OpenMetrics, LeavesOutRanksOfJobsThatEndedLongAgo) {
  const auto run = sample_run("a");
  auto ended = run;
  ended.job.is_live = false;
  EXPECT_THAT(open_metrics({ended}, kNow + 3000), HasSubstr("lockstep_rank_up"));
  EXPECT_THAT(open_metrics({ended}, kNow + 4000), AllOf(Not(HasSubstr("lockstep_rank")), HasSubstr("metric=\"loss\"")));
  EXPECT_THAT(open_metrics({run}, kNow + 4000), HasSubstr("lockstep_rank_up"));
}

TEST_F(LiveFolder, AsOpenMetricsIsValidForTheOfficialParser) {
  if (std::system("/usr/bin/python3 -c 'import prometheus_client.openmetrics.parser' 2>/dev/null") != 0)
    GTEST_SKIP() << "Python's parser of OpenMetrics is missing (apt-get install python3-prometheus-client)";
  write("metrics.txt", open_metrics({sample_run("a\"b\\c\nd"), sample_run("caf\xc3\xa9 \xff")}, kNow));
  const std::string script = R"(
import sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse
for family in parse(open(sys.argv[1], encoding='utf-8').read()):
    for sample in family.samples:
        labels = sample.labels
        print(family.type, family.unit, sample.name, labels['run'], labels.get('rank'), labels.get('part'),
              labels.get('metric'), float(sample.value), sep='|')
)";
  RankProcess process({"/usr/bin/python3", "-c", script, (run() / "metrics.txt").string()},
                      {{"PYTHONIOENCODING", "utf-8"}});
  ASSERT_EQ(process.wait(), 0) << process.output();
  for (const char* line :
       {"gauge||lockstep_rank_up|a\"b\\c d|0|None|None|1.0\n", "gauge||lockstep_rank_up|a\"b\\c d|2|None|None|0.0\n",
        "gauge||lockstep_rank_straggler|a\"b\\c d|1|None|None|1.0\n",
        "gauge|seconds|lockstep_rank_news_age_seconds|a\"b\\c d|2|None|None|12.0\n",
        "gauge||lockstep_rank_time_share|a\"b\\c d|1|communication|None|0.01\n",
        "gauge|ratio|lockstep_rank_gpu_utilization_ratio|a\"b\\c d|0|None|None|0.5\n",
        "gauge|bytes|lockstep_rank_memory_resident_bytes|caf\xc3\xa9 \xEF\xBF\xBD|3|None|None|536870912.0\n",
        "gauge||lockstep_run_metric|a\"b\\c d|None|None|grad \"norm\"\\x|nan\n",
        "gauge||lockstep_run_metric|caf\xc3\xa9 \xEF\xBF\xBD|None|None|step|100.0\n"})
    EXPECT_THAT(process.output(), HasSubstr(line));
}

}  // namespace
}  // namespace lockstep::live
