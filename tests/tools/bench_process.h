#pragma once

#include <chrono>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "support/rank_process.h"

/// `lockstep bench` as a process.
namespace lockstep {

struct Finished {
  int code = -1;
  std::string output;  // of both streams
};

inline std::vector<std::string> bench_command(const std::string& arguments) {
  std::vector<std::string> command{LOCKSTEP_TOOL, "bench"};
  std::istringstream words(arguments);
  for (std::string word; words >> word;) command.push_back(word);
  return command;
}

/// Without what an outer launcher may have set.
inline const std::map<std::string, std::string> kClean{
    {"OMP_NUM_THREADS", ""}, {"LOCKSTEP_SECRET_FILE", ""}, {"RANK", ""},
    {"WORLD_SIZE", ""},      {"MASTER_ADDR", ""},          {"MASTER_PORT", ""}};

inline Finished run_bench(const std::string& arguments, std::map<std::string, std::string> variables = {}) {
  variables.insert(kClean.begin(), kClean.end());
  RankProcess process(bench_command(arguments), variables);
  Finished finished;
  finished.code = process.wait(std::chrono::minutes(3));
  finished.output = process.output();
  return finished;
}

inline std::vector<nlohmann::json> objects_in(const std::string& output) {
  std::vector<nlohmann::json> objects;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    objects.push_back(nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false));
    if (objects.back().is_discarded()) throw std::runtime_error("expected JSON objects, got: " + output);
  }
  return objects;
}

inline void expect_usage_error(const std::string& arguments, const std::string& part,
                               const std::map<std::string, std::string>& variables = {}) {
  const auto ran = run_bench(arguments, variables);
  EXPECT_EQ(ran.code, 2) << arguments << "\n" << ran.output;
  EXPECT_THAT(ran.output, testing::HasSubstr(part)) << arguments;
}

}  // namespace lockstep
