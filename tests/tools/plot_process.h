#pragma once

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "support/rank_process.h"
#include "support/temporary_folder.h"

/// `lockstep plot` as a process, in a folder with runs. Pictures are read by Python's parser of XML.
namespace lockstep::plot {

using Json = nlohmann::json;

/// A value at a position: (x, y).
using Points = std::vector<std::pair<double, double>>;

/// A record of a step. One epoch is 100 steps, one step takes 1.5 seconds.
inline Json step_record(int step, const Json& metrics) {
  Json record{{"type", "step"}, {"step", step}, {"epoch", step / 100.0}, {"seconds", step * 1.5}};
  record.update(metrics);
  return record;
}

inline Json epoch_record(int epoch, const Json& metrics) {
  Json record{{"type", "epoch"}, {"step", 100 * epoch}, {"epoch", epoch}, {"seconds", 150 * epoch}};
  record.update(metrics);
  return record;
}

/// The map from values to coordinates that the ticks of an axis show.
class ShownAxis {
 public:
  explicit ShownAxis(const Json& ticks, bool is_logarithmic = false) : is_logarithmic_(is_logarithmic) {
    EXPECT_GE(ticks.size(), 2U);
    from_ = scaled(ticks.front().at("value"));
    to_ = scaled(ticks.back().at("value"));
    from_at_ = ticks.front().at("at");
    to_at_ = ticks.back().at("at");
  }

  double at(double value) const { return from_at_ + (scaled(value) - from_) / (to_ - from_) * (to_at_ - from_at_); }

 private:
  double scaled(double value) const { return is_logarithmic_ ? std::log10(value) : value; }

  bool is_logarithmic_;
  double from_, to_, from_at_, to_at_;
};

class PlotCommand : public testing::Test {
 protected:
  struct Ran {
    int code = -1;
    std::string output, errors;
  };

  std::filesystem::path path(const std::string& name) const { return folder_.path() / name; }

  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories(path(name).parent_path());
    std::ofstream(path(name), std::ios::binary) << text;
  }

  std::string read(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  static std::string lines_of(const std::vector<Json>& records) {
    std::string text;
    for (const auto& record : records) text += record.dump() + "\n";
    return text;
  }

  void write_run(const std::string& name, const std::vector<Json>& records) const {
    write(name + "/metrics.jsonl", lines_of(records));
  }

  /// Runs a line of the shell in the folder. `plot` in it is `lockstep plot`.
  Ran shell(const std::string& line) const {
    const auto script = "cd '" + folder_.path().string() + "'; plot() { " LOCKSTEP_TOOL " plot \"$@\"; }; ( " + line +
                        " ) >.stdout 2>.stderr";
    RankProcess process({"/bin/sh", "-c", script}, {});
    Ran ran;
    ran.code = process.wait();
    ran.output = read(".stdout");
    ran.errors = read(".stderr");
    return ran;
  }

  /// Draws a picture and returns it as tests/tools/read_curves.py reads it.
  Json drawn(const std::string& arguments) const {
    const auto ran = shell("plot " + arguments + " -o picture.svg");
    EXPECT_EQ(ran.code, 0) << arguments << "\n" << ran.errors;
    return picture("picture.svg");
  }

  Json picture(const std::string& name) const {
    const auto ran = shell("python3 " LOCKSTEP_TEST_SOURCE_DIR "/tools/read_curves.py " + name);
    EXPECT_EQ(ran.code, 0) << ran.errors;
    return Json::parse(ran.output, nullptr, false);
  }

  /// Expects this exit code and one line on stderr, of lockstep, that has this part.
  void expect_failure(const std::string& arguments, int code, const std::string& part) const {
    const auto ran = shell("plot " + arguments);
    EXPECT_EQ(ran.code, code) << arguments << "\n" << ran.errors;
    EXPECT_THAT(ran.errors, testing::HasSubstr(part)) << arguments;
    EXPECT_THAT(ran.errors, testing::StartsWith("lockstep")) << arguments;
    EXPECT_EQ(std::count(ran.errors.begin(), ran.errors.end(), '\n'), 1) << ran.errors;
    EXPECT_EQ(ran.output, "") << arguments;
  }

  /// Expects that a line goes through these points, in the order of the axes.
  static void expect_line(const Json& line, const Points& points, const ShownAxis& x, const ShownAxis& y) {
    constexpr double kRounding = 0.11;  // of coordinates, and of the ticks they are compared with
    ASSERT_EQ(line.size(), points.size());
    for (size_t i = 0; i < points.size(); ++i) {
      EXPECT_NEAR(line[i][0].get<double>(), x.at(points[i].first), kRounding) << i;
      EXPECT_NEAR(line[i][1].get<double>(), y.at(points[i].second), kRounding) << i;
    }
  }

  TemporaryFolder folder_;
};

}  // namespace lockstep::plot
