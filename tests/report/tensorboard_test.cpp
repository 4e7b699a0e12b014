#include <lockstep/tensorboard_writer.h>

#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include "report/event_records.h"
#include "support/temporary_folder.h"

// The oracle is the package tensorboard: tensorboard_oracle.py reads the files with TensorBoard's own code.

namespace lockstep::event_files {
namespace {

using json = nlohmann::json;

constexpr double kInf = std::numeric_limits<double>::infinity();

/// The oracle's numbers are hexadecimal.
double number(const json& text) {
  return std::stod(text.get<std::string>());
}

std::vector<double> numbers(const json& list) {
  std::vector<double> result;
  for (const auto& one : list) result.push_back(number(one));
  return result;
}

class TensorBoard : public testing::Test {
 protected:
  void SetUp() override {
    const char* python = std::getenv("LOCKSTEP_TEST_TENSORBOARD");
    if (!python || !*python)
      GTEST_SKIP() << "needs a python3 with the package tensorboard: ./test installs one, or set "
                      "LOCKSTEP_TEST_TENSORBOARD";
    python_ = python;
  }

  std::string run_folder() const { return (folder_.path() / "run").string(); }

  /// Null if a part is not installed. The test is skipped then.
  json ask(const std::string& arguments, const std::string& python, const std::string& variables = "") const {
    const auto out = (folder_.path() / "out.json").string(), errors = (folder_.path() / "errors").string();
    const auto command = variables + " '" + python + "' '" LOCKSTEP_TEST_SOURCE_DIR "/report/tensorboard_oracle.py' " +
                         arguments + " > '" + out + "' 2> '" + errors + "'";
    const int status = std::system(command.c_str());
    const auto report = file_bytes(errors);
    if (WEXITSTATUS(status) == 77) {
      [&] { GTEST_SKIP() << report; }();
      return nullptr;
    }
    if (status != 0) throw std::runtime_error(command + " failed: " + report);
    return json::parse(file_bytes(out));
  }
  json ask(const std::string& arguments) const { return ask(arguments, python_); }
  json read() const { return ask("read '" + run_folder() + "'"); }

  const TemporaryFolder folder_;
  std::string python_;
};

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

TEST_F(TensorBoard, ReadsScalarsWithTheirStepsAndTimes) {
  const double begin = seconds_since_1970();
  TensorBoardWriter writer(run_folder());
  const std::vector<double> values{0.1, -2e30, kInf, -kInf, std::nan(""), 0, 1e300};
  for (size_t i = 0; i < values.size(); ++i) writer.scalar("train/Verlust für α", values[i], int64_t{1} << (9 * i));
  writer.scalar("once", 3, 0);
  const double end = seconds_since_1970();
  const auto scalars = read().at("scalars");
  EXPECT_EQ(scalars.size(), 2u);
  const auto& records = scalars.at("train/Verlust für α");
  ASSERT_EQ(records.size(), values.size());
  double last = begin;
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(records[i].at("step"), int64_t{1} << (9 * i));
    const double value = number(records[i].at("value")), time = number(records[i].at("time"));
    EXPECT_TRUE(std::isnan(values[i]) ? std::isnan(value) : value == static_cast<float>(values[i])) << value;
    EXPECT_LE(last, time);
    last = time;
  }
  EXPECT_LE(last, end);
}

TEST_F(TensorBoard, ReadsTexts) {
  TensorBoardWriter writer(run_folder());
  writer.text("config", "| lr |\n|---|\n| 0.1 |\n", 0);
  writer.text("config", "Grüße, 東京, 😀, \xf0\x9f\x98, \xc3(, \xff, \xed\xa0\x80.", 1);
  writer.text("config", "", 2);
  const auto found = read();
  EXPECT_EQ(found.at("plugins"), (json{{"config", "text"}}));
  std::vector<std::string> texts;
  for (const auto& record : found.at("texts").at("config")) {
    texts.push_back(record.at("text"));
    EXPECT_EQ(record.at("dimensions"), 0) << "TensorBoard shows others as tables";
  }
  // Python's bytes.decode("utf-8", "replace") replaces several bytes at once; here it is one for each byte.
  EXPECT_EQ(texts, (std::vector<std::string>{"| lr |\n|---|\n| 0.1 |\n", "Grüße, 東京, 😀, ���, �(, �, ���.", ""}));
}

/// The pixels of a [C, H, W] image of uint8, row by row.
std::vector<int> pixels_of(const torch::Tensor& image) {
  const auto pixels = image.permute({1, 2, 0}).to(torch::kInt).contiguous();
  return {pixels.data_ptr<int>(), pixels.data_ptr<int>() + pixels.numel()};
}

TEST_F(TensorBoard, ReadsImages) {
  TensorBoardWriter writer(run_folder());
  const std::map<std::string, torch::Tensor> images{
      {"L", torch::randint(256, {1, 7, 5}).to(torch::kByte)},
      {"RGB", torch::randint(256, {3, 33, 21}).to(torch::kByte)},
      {"RGBA", torch::randint(256, {4, 6, 9}).to(torch::kByte).transpose(1, 2)},
  };
  for (const auto& [mode, image] : images) {
    writer.image(mode, image, 1);
    writer.image(mode, (image / 255.0).requires_grad_(), 2);
    writer.image(mode, torch::stack({image, 255 - image}), 3);
  }
  const auto found = read().at("images");
  EXPECT_EQ(found.size(), images.size());
  for (const auto& [mode, image] : images) {
    const auto& records = found.at(mode);
    ASSERT_EQ(records.size(), 3u);
    const auto lines = torch::full({image.size(0), image.size(1), 2}, 128, torch::kByte);
    const std::vector<torch::Tensor> expected{image, image, torch::cat({image, lines, 255 - image}, 2)};
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(records[i].at("step"), i + 1);
      EXPECT_EQ(records[i].at("mode"), mode);
      EXPECT_EQ(records[i].at("size"), (json{expected[i].size(2), expected[i].size(1)}));
      EXPECT_EQ(records[i].at("decoded_size"), records[i].at("size"));
      EXPECT_EQ(records[i].at("pixels"), pixels_of(expected[i])) << mode << ", step " << i + 1;
    }
  }
}

/// Expects the record to be the histogram of these values.
void expect_histogram(const json& record, const torch::Tensor& values) {
  const auto sorted = std::get<0>(values.detach().to(torch::kDouble).reshape({-1}).sort());
  const double *begin = sorted.data_ptr<double>(), *end = begin + sorted.numel();
  EXPECT_EQ(number(record.at("num")), sorted.numel());
  EXPECT_EQ(number(record.at("min")), *begin);
  EXPECT_EQ(number(record.at("max")), end[-1]);
  long double sum = 0, magnitude = 0, squares = 0;
  for (const double* x = begin; x != end; ++x) {
    sum += *x;
    magnitude += std::abs(*x);
    squares += static_cast<long double>(*x) * *x;
  }
  EXPECT_NEAR(number(record.at("sum")), static_cast<double>(sum), 1e-14 * static_cast<double>(magnitude));
  if (const double expected = static_cast<double>(squares); std::isinf(expected))
    EXPECT_EQ(number(record.at("sum_squares")), expected);
  else
    EXPECT_NEAR(number(record.at("sum_squares")), expected, 1e-14 * expected);

  const auto limits = numbers(record.at("limits")), counts = numbers(record.at("counts"));
  ASSERT_EQ(limits.size(), counts.size());
  const double* low = begin;
  for (size_t i = 0; i < counts.size(); ++i) {
    const double* high = std::lower_bound(begin, end, limits[i]);
    EXPECT_EQ(counts[i], high - low) << "below " << limits[i];
    low = high;
  }
  EXPECT_EQ(low, end) << "values above all buckets";
  EXPECT_GT(counts.back(), 0);
}

TEST_F(TensorBoard, ReadsHistogramsOfAnyDtype) {
  torch::manual_seed(1);
  const std::vector<torch::Tensor> cases{
      torch::randn({3, 50}).requires_grad_(),
      torch::randn({20, 30}, torch::kDouble).t() * 1e-9,
      torch::tensor({-1e300, -1e20, 0.0, -0.0, 1e-320, 1e-12, 1e25, 1e300}, torch::kDouble),
      torch::full({}, 3.5),
      torch::zeros({4}),
      torch::randn({100}).to(torch::kBFloat16),
      torch::randn({100}).to(torch::kHalf),
      torch::randint(-100, 100, {200}, torch::kLong),
      torch::randint(0, 255, {200}).to(torch::kByte),
      torch::tensor({true, false, true}),
      torch::randn({5 << 20}),  // in two parts
  };
  TensorBoardWriter writer(run_folder());
  for (size_t i = 0; i < cases.size(); ++i) writer.histogram("h", cases[i], static_cast<int64_t>(i));
  const auto found = read();
  EXPECT_EQ(found.at("scalars").size(), 0u);
  const auto& records = found.at("histograms").at("h");
  ASSERT_EQ(records.size(), cases.size());
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "case " << i);
    EXPECT_EQ(records[i].at("step"), i);
    expect_histogram(records[i], cases[i]);
  }
}

TEST_F(TensorBoard, ReadsHistogramsWithoutWhatIsNotFinite) {
  TensorBoardWriter writer(run_folder());
  writer.histogram("some", torch::tensor({1.0, std::nan(""), kInf, 2.0, -kInf}), 1);
  writer.histogram("none", torch::full({3}, std::nan("")), 1);
  writer.histogram("empty", torch::zeros({0, 4}), 1);
  const auto found = read();
  const auto& histograms = found.at("histograms");
  expect_histogram(histograms.at("some")[0], torch::tensor({1.0, 2.0}));
  for (const char* tag : {"none", "empty"}) {
    EXPECT_EQ(number(histograms.at(tag)[0].at("num")), 0);
    EXPECT_EQ(histograms.at(tag)[0].at("counts").size(), 0u);
  }
  std::map<std::string, double> counts;
  for (const auto& [tag, records] : found.at("scalars").items()) counts[tag] = number(records[0].at("value"));
  EXPECT_EQ(counts, (std::map<std::string, double>{{"none/not_finite", 3}, {"some/not_finite", 3}}));
  for (const char* loader : {"python", "rust"}) {
    const auto shown = ask("shown '" + run_folder() + "' " + loader);
    if (IsSkipped()) return;
    EXPECT_EQ(shown.at("histograms"), (json{{"some", {1}}, {"none", {1}}, {"empty", {1}}})) << loader;
  }
}

TEST_F(TensorBoard, HistogramsAreThoseOfPythonsSummaryWriter) {
  const char* torch_python = std::getenv("LOCKSTEP_TEST_PYTHON_2X");
  if (!torch_python || !*torch_python) GTEST_SKIP() << "needs Python's torch 2.x: set LOCKSTEP_TEST_PYTHON_2X";
  torch::manual_seed(2);
  const std::vector<torch::Tensor> cases{
      torch::randn({1000}, torch::kDouble),
      torch::rand({1000}, torch::kDouble) + 5,
      -torch::rand({100}, torch::kDouble).pow(20),
      torch::pow(10.0, torch::linspace(-13, 19.9, 2000, torch::kDouble)),
      torch::tensor({0.0, -0.0, 1e-12, 1e-12 * 1.1, -1e-12}, torch::kDouble),
  };
  TensorBoardWriter writer(run_folder());
  const auto theirs = (folder_.path() / "theirs").string();
  std::string files;
  for (size_t i = 0; i < cases.size(); ++i) {
    writer.histogram("values", cases[i], static_cast<int64_t>(i));
    const auto file = (folder_.path() / std::to_string(i)).string();
    std::ofstream(file, std::ios::binary)
        .write(static_cast<const char*>(cases[i].data_ptr()), static_cast<std::streamsize>(cases[i].nbytes()));
    files += " '" + file + "'";
  }
  // The package tensorboard is in its own environment: torch's interpreter searches there for what it does not have.
  const auto packages = "$('" + python_ + "' -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')";
  ask("write '" + theirs + "'" + files, torch_python, "LOCKSTEP_TEST_PACKAGES=" + packages);
  if (IsSkipped()) return;
  const auto expected = ask("read '" + theirs + "'").at("histograms").at("values");
  const auto actual = read().at("histograms").at("values");
  ASSERT_EQ(actual.size(), cases.size());
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "case " << i);
    for (const char* name : {"step", "min", "max", "num", "limits", "counts"})
      EXPECT_EQ(actual[i].at(name), expected[i].at(name));
    expect_histogram(expected[i], cases[i]);  // the sums differ in their last bits
    expect_histogram(actual[i], cases[i]);
  }
}

TEST_F(TensorBoard, DropsRecordsThatAResumedRunRepeats) {
  const auto write = [](TensorBoardWriter& writer, int64_t begin, int64_t end) {
    for (int64_t step = begin; step < end; step += 10) {
      writer.scalar("loss", static_cast<double>(step), step);
      writer.histogram("weights", torch::ones({3}), step);
      writer.text("note", "text", step);
      writer.image("input", torch::ones({2, 2}), step);
    }
  };
  {
    TensorBoardWriter first(run_folder());
    write(first, 10, 60);
    first.scalar("only before", 1, 50);
  }
  {
    TensorBoardWriter second(run_folder(), {.first_step = 21});  // from a checkpoint of step 20
    write(second, 30, 50);
  }
  TensorBoardWriter third(run_folder(), {.first_step = 31});
  write(third, 40, 60);

  const json kept{10, 20, 30, 40, 50};
  const auto found = read();
  const auto steps = [](const json& records) {
    auto result = json::array();
    for (const auto& record : records) result.push_back(record.at("step"));
    return result;
  };
  for (const auto& [kind, tag] : std::map<std::string, std::string>{
           {"scalars", "loss"}, {"histograms", "weights"}, {"images", "input"}})  // EventAccumulator keeps all tensors
    EXPECT_EQ(steps(found.at(kind).at(tag)), kept) << kind;
  EXPECT_EQ(found.at("scalars").value("only before", json::array()).size(), 0u);
  std::vector<double> times;
  for (const auto& record : found.at("scalars").at("loss")) times.push_back(number(record.at("time")));
  EXPECT_TRUE(std::is_sorted(times.begin(), times.end())) << "a record of an older file was kept";

  for (const std::string loader : {"python", "rust"}) {
    const auto shown = ask("shown '" + run_folder() + "' " + loader);
    if (IsSkipped()) return;
    for (const auto& [kind, tag] : std::map<std::string, std::string>{
             {"scalars", "loss"}, {"histograms", "weights"}, {"images", "input"}, {"texts", "note"}})
      EXPECT_EQ(shown.at(kind).at(tag), kept) << kind << " by " << loader;
    // The loader in Rust drops records of a tag only when the tag is written again.
    EXPECT_EQ(shown.at("scalars").value("only before", json::array()).size(), loader == "python" ? 0u : 1u) << loader;
  }
}

TEST_F(TensorBoard, KeepsOlderFilesOfARunThatIsNotResumed) {
  for (int64_t step : {1, 2}) TensorBoardWriter(run_folder()).scalar("loss", 1, step);
  for (const char* loader : {"python", "rust"}) {
    const auto shown = ask("shown '" + run_folder() + "' " + loader);
    if (IsSkipped()) return;
    EXPECT_EQ(shown.at("scalars"), (json{{"loss", {1, 2}}})) << loader;
  }
}

}  // namespace
}  // namespace lockstep::event_files
