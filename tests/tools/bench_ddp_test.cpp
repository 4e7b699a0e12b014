// `lockstep bench ddp` without ranks: what is asked for, and what is made of the figures.

#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <lockstep/error.h>

#include "bench/ddp_report.h"
#include "bench/rank_protocol.h"
#include "bench/request.h"
#include "support/messages.h"

namespace lockstep::bench {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

Request request() {
  Request request;
  request.operation = kDdp;
  return request;
}

DdpPlan plan_of(const Request& asked) {
  return make_ddp_plan(asked, {"gloo", "shm", "threads"});
}

void expect_ddp_refusal(const Request& asked, const std::string& part) {
  expect_error<UsageError>([&] { plan_of(asked); }, part);
}

TEST(BenchDdpRequest, TrainsAllModelsOverTheBackendThatFits) {
  const auto plan = plan_of(request());
  EXPECT_THAT(plan.models, ElementsAre("small", "cnn", "mlp"));
  EXPECT_EQ(plan.backend, "auto");
  EXPECT_EQ(plan.optimizer, "sgd");
  EXPECT_EQ(plan.ranks, 2);
  EXPECT_EQ(plan.python, "");
}

TEST(BenchDdpRequest, KeepsTheOrderThatIsAskedFor) {
  auto asked = request();
  asked.models = {"mlp", "small"};
  asked.backend = "gloo";
  asked.optimizer = "adamw";
  asked.ranks = 4;
  asked.rounds = 9;
  asked.check = false;
  const auto plan = plan_of(asked);
  EXPECT_THAT(plan.models, ElementsAre("mlp", "small"));
  EXPECT_EQ(plan.backend, "gloo");
  EXPECT_EQ(plan.optimizer, "adamw");
  EXPECT_EQ(plan.ranks, 4);
  EXPECT_EQ(plan.rounds, 9);
  EXPECT_FALSE(plan.check);
}

TEST(BenchDdpRequest, SaysWhatThereIs) {
  auto asked = request();
  asked.models = {"small", "gpt"};
  expect_ddp_refusal(asked, "--models: unknown model 'gpt'; it must be one of small, cnn, mlp");
  asked.models = {"cnn", "cnn"};
  expect_ddp_refusal(asked, "--models contains 'cnn' twice");
  asked = request();
  asked.backend = "nccl";
  expect_ddp_refusal(asked, "--backend: unknown backend 'nccl'; this build has auto, gloo, shm");
  asked.backend = "threads";
  expect_ddp_refusal(asked, "unknown backend 'threads'");
  asked = request();
  asked.optimizer = "adam";
  expect_ddp_refusal(asked, "--optimizer is 'adam': it must be sgd or adamw");
  asked = request();
  asked.against = "horovod";
  expect_ddp_refusal(asked, "--against is \"horovod\": it must be python");
}

TEST(BenchDdpRequest, RefusesWhatWouldHaveNoEffect) {
  auto asked = request();
  asked.max_size = "1M";
  asked.dtype = "float16";
  expect_ddp_refusal(asked, "remove --max, --dtype");
  asked = request();
  asked.backends = {"shm"};
  expect_ddp_refusal(asked, "use --backend instead of --backends");
}

TEST(BenchDdpRequest, RefusesNumbersOutOfRange) {
  auto asked = request();
  asked.ranks = 0;
  expect_ddp_refusal(asked, "-n is 0");
  asked.ranks = 2;
  asked.rounds = 4;
  expect_ddp_refusal(asked, "--rounds is 4: it must be 5 or more");
}

TEST(BenchDdpPlan, SurvivesTheWayToTheRanks) {
  auto plan = plan_of(request());
  plan.optimizer = "adamw";
  plan.python = "/usr/bin/python3";
  plan.python_store = "/proc/1/fd/5";
  plan.rounds = 7;
  plan.check = false;
  plan.bind = plan.oversubscribed = true;
  plan.page = "/proc/1/fd/3";
  plan.results = "/proc/1/fd/4";
  EXPECT_EQ(ddp_plan_from(to_text(plan)), plan);
}

/// Steps of 10 ms, and of 8 ms where nobody talks.
DdpSamples some_samples() {
  DdpSamples samples;
  samples.model = "cnn";
  samples.steps = 12;
  samples.local_us = {8000, 7000, 9000};
  samples.ddp_us = {11000, 10000, 9000};
  samples.shared_us = {7000, 6000, 5000};
  samples.alone_us = {6000, 6000, 6000};
  samples.python_us = {25000, 25000, 25000};
  return samples;
}

TEST(BenchDdpMessages, SurviveTheWayFromTheRanks) {
  const DdpMessage messages[] = {DdpSetup{"shm", "1.13.1", false}, DdpModelStarted{"mlp"}, some_samples()};
  for (const auto& message : messages) {
    EXPECT_EQ(ddp_message_from(to_line(message)), message);
    EXPECT_THAT(to_line(message), Not(HasSubstr("\n")));
  }
}

DdpRow row_of(const DdpSamples& samples) {
  return make_ddp_row(plan_of(request()), {"shm", "1.13.1", false}, samples);
}

TEST(BenchDdpRow, ComparesTheSides) {
  const auto row = row_of(some_samples());
  EXPECT_DOUBLE_EQ(row.ddp.median_ms, 10);
  EXPECT_DOUBLE_EQ(row.ddp.p10_ms, 9.2);
  EXPECT_DOUBLE_EQ(row.ddp.p90_ms, 10.8);
  EXPECT_DOUBLE_EQ(row.exposed_ms(), 2);
  EXPECT_DOUBLE_EQ(row.exposed_fraction(), 0.2);
  EXPECT_DOUBLE_EQ(row.ratio_to_local(), 1.25);
  EXPECT_DOUBLE_EQ(*row.shared_ratio_to_local(), 0.75);
  EXPECT_DOUBLE_EQ(*row.ratio_to_python(), 2.5);
  EXPECT_DOUBLE_EQ(row.efficiency(), 0.6);
  EXPECT_EQ(row.rounds, 3U);
}

TEST(BenchDdpRow, IsOneObjectWithAllThatWasMeasured) {
  const auto object = nlohmann::json::parse(to_json_line(row_of(some_samples())));
  EXPECT_EQ(object["model"], "cnn");
  EXPECT_EQ(object["ranks"], 2);
  EXPECT_EQ(object["backend"], "shm");
  EXPECT_EQ(object["batch"], 32);
  EXPECT_EQ(object["rounds"], 3);
  EXPECT_EQ(object["steps"], 12);
  EXPECT_EQ(object["mkldnn"], false);
  EXPECT_EQ(object["local_ms"], 8.0);
  EXPECT_EQ(object["local_p10_ms"], 7.2);
  EXPECT_EQ(object["ddp_ms"], 10.0);
  EXPECT_EQ(object["python_p90_ms"], 25.0);
  EXPECT_EQ(object["shared_ms"], 6.0);
  EXPECT_EQ(object["shared_ratio_to_local"], 0.75);
  EXPECT_EQ(object["alone_ms"], 6.0);
  EXPECT_EQ(object["exposed_ms"], 2.0);
  EXPECT_EQ(object["ratio_to_local"], 1.25);
  EXPECT_EQ(object["ratio_to_python"], 2.5);
  EXPECT_EQ(object["efficiency"], 0.6);
  EXPECT_EQ(object["wrong"], 0);
}

TEST(BenchDdpRow, HasNullsForWhatWasNotMeasured) {
  auto samples = some_samples();
  samples.python_us.clear();
  samples.shared_us.clear();
  auto unchecked = request();
  unchecked.check = false;
  const auto object = nlohmann::json::parse(to_json_line(make_ddp_row(plan_of(unchecked), {}, samples)));
  for (const char* field :
       {"python_ms", "python_p10_ms", "ratio_to_python", "shared_ms", "shared_ratio_to_local", "wrong"}) {
    EXPECT_TRUE(object.contains(field)) << field;
    EXPECT_TRUE(object[field].is_null()) << field;
  }
}

TEST(BenchDdpTable, HasALineForEachSide) {
  EXPECT_EQ(ddp_header() + ddp_lines(row_of(some_samples())),
            "# model  side        time      p10      p90 wrong\n"
            "#                    (ms)     (ms)     (ms)      \n"
            "  cnn    local      8.000    7.200    8.800      \n"
            "  cnn    ddp        10.00    9.200    10.80     0\n"
            "  cnn    shared     6.000    5.200    6.800      \n"
            "  cnn    alone      6.000    6.000    6.000      \n"
            "  cnn    python     25.00    25.00    25.00      \n");
  EXPECT_EQ(ddp_comparison({row_of(some_samples())}),
            "#\n"
            "# model   exposed  exposed  ddp/local  shared/local  python/ddp  efficiency\n"
            "#            (ms)      (%)                                              (%)\n"
            "  cnn       2.000     20.0      1.25x         0.75x       2.50x        60.0\n");
}

TEST(BenchDdpTable, DoesWithoutPythonAndSharedParameters) {
  auto samples = some_samples();
  samples.python_us.clear();
  samples.shared_us.clear();
  EXPECT_THAT(ddp_lines(row_of(samples)), Not(HasSubstr("python")));
  EXPECT_THAT(ddp_lines(row_of(samples)), Not(HasSubstr("shared")));
  EXPECT_THAT(ddp_comparison({row_of(samples)}), HasSubstr("      1.25x           -        60.0\n"));
}

struct DdpPrinted {
  std::ostringstream out, progress;
};

bool tell_ddp(DdpPrinted& printed, PrinterOptions options, int64_t wrong) {
  DdpPrinter printer(plan_of(request()), options, printed.out, printed.progress);
  auto samples = some_samples();
  samples.wrong = wrong;
  printer.handle(DdpSetup{"shm", "1.13.1", false});
  printer.handle(DdpModelStarted{"cnn"});
  printer.handle(samples);
  printer.finish();
  return printer.has_wrong();
}

TEST(BenchDdpPrinter, PrintsTheTableAndHowSidesCompare) {
  DdpPrinted printed;
  EXPECT_FALSE(tell_ddp(printed, {}, 0));
  EXPECT_THAT(printed.out.str(), testing::StartsWith("# batch 32 on each rank, SGD; backend shm; LibTorch 1.13.1; "
                                                     "MKL-DNN off for all sides\n# model"));
  EXPECT_THAT(printed.out.str(), HasSubstr("# 3 rounds per model; all correct\n"));
  EXPECT_THAT(printed.out.str(), testing::EndsWith("60.0\n"));
  EXPECT_EQ(printed.progress.str(), "");
}

TEST(BenchDdpPrinter, SaysThatResultsAreWrong) {
  DdpPrinted printed;
  EXPECT_TRUE(tell_ddp(printed, {}, 3));
  EXPECT_THAT(printed.out.str(), HasSubstr("SOME RESULTS ARE WRONG"));
}

TEST(BenchDdpPrinter, RewritesOneLineWhileItGoesOn) {
  DdpPrinted printed;
  tell_ddp(printed, {.json = true, .shows_progress = true}, 0);
  EXPECT_THAT(printed.progress.str(), HasSubstr("\r\033[Kddp 1 of 3: cnn"));
  EXPECT_THAT(printed.progress.str(), testing::EndsWith("\r\033[K"));
  EXPECT_EQ(nlohmann::json::parse(printed.out.str())["model"], "cnn");  // and nothing else
}

}  // namespace
}  // namespace lockstep::bench
