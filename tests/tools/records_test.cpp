// The scanner of metrics.jsonl.

#include "live/records.h"

#include <chrono>
#include <cmath>
#include <iostream>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "support/stolen_time.h"

namespace lockstep::live {
namespace {

using testing::DoubleEq;
using testing::ElementsAre;
using testing::NanSensitiveDoubleEq;

Records scanned(const std::string& text) {
  Records records;
  EXPECT_EQ(records.append(text), text.size());
  return records;
}

const Column& column(const Records& records, const RecordTable& table, const std::string& metric) {
  return table.columns.at(static_cast<size_t>(records.find(metric)));
}

TEST(Records, AreColumnsOfNumbers) {
  const auto records = scanned(
      "{\"type\":\"step\",\"step\":10,\"epoch\":0.5,\"seconds\":0.007,\"loss\":2.3342200398445128}\n"
      "{\"type\": \"step\", \"step\": 20, \"epoch\": 1.0, \"seconds\": 0.014, \"loss\": 2.25, \"lr\": 1e-3}\n"
      "{\"type\":\"epoch\",\"step\":20,\"epoch\":1,\"seconds\":0.014,\"accuracy\":0.4}\n");
  EXPECT_THAT(records.metrics(), ElementsAre("loss", "lr", "accuracy"));
  EXPECT_THAT(records.steps().step, ElementsAre(10, 20));
  EXPECT_THAT(records.steps().epoch, ElementsAre(0.5, 1));
  EXPECT_THAT(records.steps().seconds, ElementsAre(0.007, 0.014));
  EXPECT_THAT(records.epochs().step, ElementsAre(20));
  EXPECT_THAT(column(records, records.steps(), "loss").values, ElementsAre(2.3342200398445128, 2.25));
  EXPECT_THAT(column(records, records.steps(), "lr").rows, ElementsAre(1));
  EXPECT_THAT(column(records, records.steps(), "lr").values, ElementsAre(0.001));
  EXPECT_THAT(column(records, records.epochs(), "accuracy").values, ElementsAre(0.4));
  EXPECT_EQ(records.size(), 3U);
  EXPECT_EQ(records.damaged_lines(), 0U);
  EXPECT_EQ(records.find("other"), -1);
}

TEST(Records, HaveTheNumbersOfAnotherParser) {
  for (const std::string written :
       {"0", "-0.0", "1", "-17", "123456789012345678", "9007199254740993", "0.1", "0.3", "1.7", "2.3342200398445128",
        "1e5", "1E-5", "-2.5e+300", "4.9e-324", "0.000000000000000000000123", "12345678901234567890123",
        "3.14159265358979323846264", "1e22", "0.30000000000000004"}) {
    const auto records = scanned("{\"type\":\"step\",\"step\":1,\"v\":" + written + "}\n");
    ASSERT_EQ(records.damaged_lines(), 0U) << written;
    EXPECT_EQ(column(records, records.steps(), "v").values.at(0), nlohmann::json::parse(written).get<double>())
        << written;
  }
}

TEST(Records, HaveGapsForNullAndForNumbersBeyondDouble) {
  const auto records = scanned(
      "{\"type\":\"step\",\"step\":1,\"loss\":null}\n{\"type\":\"step\",\"step\":2,\"loss\":1e999}\n"
      "{\"type\":\"step\",\"loss\":1}\n");
  EXPECT_THAT(column(records, records.steps(), "loss").values,
              ElementsAre(NanSensitiveDoubleEq(NAN), NanSensitiveDoubleEq(NAN), 1));
  EXPECT_TRUE(std::isnan(records.steps().step[2]));
}

TEST(Records, CountDamagedLinesAndGoOn) {
  const std::string good = "{\"type\":\"step\",\"step\":1,\"loss\":1}\n";
  for (const std::string damaged : {"garbage",
                                    "{",
                                    "{}",
                                    "[1]",
                                    "{\"type\":\"step\",\"step\":1,\"loss\":}",
                                    "{\"type\":\"step\" \"step\":1}",
                                    "{\"step\":1,\"loss\":1}",
                                    "{\"type\":\"other\",\"step\":1}",
                                    "{\"type\":\"step\",\"loss\":\"text\"}",
                                    "{\"type\":\"step\",\"loss\":true}",
                                    "{\"type\":\"step\",\"loss\":[1]}",
                                    "{\"type\":\"step\",\"loss\":{\"a\":1}}",
                                    "{\"type\":\"step\",\"loss\":1}}",
                                    "{\"type\":\"step\",\"loss\":nan}",
                                    "{\"type\":\"step\",\"loss\":-inf}",
                                    "{\"type\":\"step\",\"loss\":1.}",
                                    "{\"type\":\"step\",\"loss\":1,}",
                                    "{\"type\":\"step\",\"lo",
                                    "\"",
                                    "\xff\xfe"}) {
    const auto records = scanned(good + damaged + "\n" + good);
    EXPECT_EQ(records.damaged_lines(), 1U) << damaged;
    EXPECT_EQ(records.steps().size(), 2U) << damaged;
    EXPECT_EQ(records.first_damaged_line(), 2U) << damaged;
    EXPECT_NE(records.first_problem(), "") << damaged;
  }
}

TEST(Records, ReadEveryBeginningOfALineWithoutHarm) {
  const std::string line = "{\"type\":\"step\",\"step\":12,\"a\\u0062\\\"c\":-1.5e3,\"x\":null}\n";
  for (size_t size = 0; size < line.size(); ++size) {
    Records cut;
    cut.append(line.substr(0, size) + "\n" + line);
    EXPECT_EQ(cut.steps().size(), size + 1 >= line.size() ? 2U : 1U) << size;
    Records waiting;
    const auto used = waiting.append(line.substr(0, size));
    EXPECT_EQ(used, size + 1 == line.size() ? size : 0U) << size;
    waiting.append(line.substr(used));
    EXPECT_EQ(waiting.steps().size(), 1U) << size;
    EXPECT_EQ(waiting.damaged_lines(), 0U) << size;
  }
}

TEST(Records, AcceptOtherOrdersOfKeysNewMetricsAndEscapes) {
  const auto records = scanned(
      "{\"loss\":1,\"type\":\"step\",\"step\":1}\n{\"type\":\"step\",\"step\":2,\"loss\":2}\n"
      "{\"step\":3,\"type\":\"step\",\"a\\\"b\":7,\"loss\":3}\n\n{\"type\":\"step\",\"step\":4,\"loss\":4,\"loss\":5}"
      "\r\n");
  EXPECT_THAT(column(records, records.steps(), "loss").values, ElementsAre(1, 2, 3, 5));
  EXPECT_THAT(column(records, records.steps(), "a\"b").values, ElementsAre(7));
  EXPECT_THAT(records.steps().step, ElementsAre(1, 2, 3, 4));
}

TEST(Records, AreReadAtHundredsOfMegabytesPerSecond) {
  std::string text;
  for (int i = 0; i < 200000; ++i)
    text += fmt::format("{{\"type\":\"step\",\"step\":{},\"epoch\":{:.4f},\"seconds\":{:.3f},\"loss\":{},\"lr\":{}}}\n",
                        i, i * 1e-3, i * 0.01, 1 / (i + 3.7), 0.1 - i * 1e-7);
  const auto before = thread_cpu_time();
  const auto records = scanned(text);
  const std::chrono::duration<double> took = thread_cpu_time() - before;
  std::cout << "scanned " << static_cast<double>(text.size()) * 1e-6 / took.count() << " MB/s\n";
  EXPECT_EQ(records.size(), 200000U);
  EXPECT_GT(static_cast<double>(text.size()) / took.count(), 20e6);  // of a build for tests
}

}  // namespace
}  // namespace lockstep::live
