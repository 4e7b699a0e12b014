// `lockstep plot` with real files: what the picture shows, what is printed, and what is refused.

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "tools/plot_process.h"

namespace lockstep::plot {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

/// A deterministic number from 0 to 1 that jumps up and down.
double noise(int i) {
  const double product = 0.6180339887498949 * i;
  return product - std::floor(product);
}

/// 60 steps with a noisy loss and a learning rate, and an epoch record with an accuracy.
std::vector<Json> training(double loss) {
  std::vector<Json> records;
  for (int i = 1; i <= 60; ++i)
    records.push_back(step_record(5 * i, {{"loss", loss + noise(i)}, {"lr", 0.1 - 0.001 * i}}));
  for (int epoch = 1; epoch <= 3; ++epoch)
    records.push_back(epoch_record(epoch, {{"loss", loss + 0.5}, {"accuracy", 0.5 + 0.1 * epoch}}));
  return records;
}

std::vector<std::string> texts(const Json& entries, const char* key) {
  std::vector<std::string> all;
  for (const auto& entry : entries) all.push_back(entry.at(key));
  return all;
}

TEST_F(PlotCommand, DrawsAPanelForEachMetricAndACurveForEachRun) {
  write_run("runs/a", training(1));
  write_run("runs/b", training(2));
  const auto ran = shell("plot runs/*");
  EXPECT_EQ(ran.code, 0);
  EXPECT_EQ(ran.output, "curves.svg: 2 runs, 3 metrics\n");
  EXPECT_EQ(ran.errors, "");
  const auto curves = picture("curves.svg");
  EXPECT_THAT(texts(curves["panels"], "metric"), ElementsAre("loss", "lr", "accuracy"));
  EXPECT_THAT(texts(curves["legend"], "text"), ElementsAre("a", "b"));
  EXPECT_THAT(texts(curves["key"], "text"), ElementsAre("steps, smoothed (0.6)", "steps, as measured", "epochs"));
  const auto& loss = curves["panels"][0];
  for (const char* kind : {"raw", "steps", "epochs"})
    EXPECT_THAT(texts(loss[kind], "run"), ElementsAre("a", "b")) << kind;
  const auto& lr = curves["panels"][1];
  EXPECT_THAT(lr["raw"], IsEmpty()) << "a learning rate has no noise";
  EXPECT_EQ(lr["steps"].size(), 2U);
  EXPECT_THAT(lr["epochs"], IsEmpty());
  const auto& accuracy = curves["panels"][2];
  EXPECT_THAT(accuracy["steps"], IsEmpty());
  EXPECT_EQ(accuracy["epochs"][1]["dots"].size(), 3U);
  const auto colours = texts(curves["legend"], "colour");
  EXPECT_NE(colours[0], colours[1]);
  for (const auto& curves_of_runs : {loss["raw"], loss["steps"], loss["epochs"], lr["steps"], accuracy["epochs"]})
    EXPECT_EQ(texts(curves_of_runs, "colour"), colours);
  EXPECT_THAT(curves["style"], HasSubstr("prefers-color-scheme: dark"));
}

TEST_F(PlotCommand, PlacesEveryRecordWhereTheAxesSay) {
  write_run("run", training(1));
  struct Case {
    const char* arguments;
    double x_per_step;
    bool is_logarithmic;
  };
  for (const auto& [arguments, x_per_step, is_logarithmic] :
       {Case{"--x step", 1, false}, Case{"--x epoch", 0.01, false}, Case{"--x time", 1.5, false},
        Case{"--log", 1, true}}) {
    SCOPED_TRACE(arguments);
    const auto panels = drawn(std::string("run --smooth 0 ") + arguments)["panels"];
    for (const auto& panel : panels) {
      const ShownAxis x(panel["x"]), y(panel["y"], is_logarithmic);
      Points steps, epochs;
      for (const auto& record : training(1)) {
        if (!record.contains(panel["metric"])) continue;
        auto& points = record["type"] == "step" ? steps : epochs;
        points.emplace_back(record["step"].get<int>() * x_per_step, record[panel["metric"]]);
      }
      if (!steps.empty()) expect_line(panel["steps"][0]["lines"][0], steps, x, y);
      if (!epochs.empty()) expect_line(panel["epochs"][0]["lines"][0], epochs, x, y);
      EXPECT_THAT(panel["raw"], IsEmpty());
    }
  }
}

TEST_F(PlotCommand, SmoothsNoisyStepsAndKeepsTheirValuesBehind) {
  constexpr double kWeight = 0.8;
  write_run("run", training(1));
  const auto loss = drawn("run --smooth 0.8")["panels"][0];
  Points raw, average;
  for (int i = 1; i <= 60; ++i) {
    raw.emplace_back(5 * i, 1 + noise(i));
    double sum = 0, weights = 0;
    for (int j = 1; j <= i; ++j) {
      sum += std::pow(kWeight, i - j) * (1 + noise(j));
      weights += std::pow(kWeight, i - j);
    }
    average.emplace_back(5 * i, sum / weights);
  }
  const ShownAxis x(loss["x"]), y(loss["y"]);
  expect_line(loss["raw"][0]["lines"][0], raw, x, y);
  expect_line(loss["steps"][0]["lines"][0], average, x, y);
}

TEST_F(PlotCommand, ShowsASpikeAmongAMillionRecordsInASmallPicture) {
  constexpr int kRecords = 1'000'000, kHigh = 371'234, kLow = 371'900;
  std::string text;
  for (int i = 1; i <= kRecords; ++i)
    text += "{\"type\":\"step\",\"step\":" + std::to_string(i) + ",\"loss\":" +
            (i == kHigh  ? "50"
             : i == kLow ? "-50"
                         : std::to_string(1 + noise(i))) +
            "}\n";
  write("run/metrics.jsonl", text);
  const auto panel = drawn("run")["panels"][0];
  EXPECT_LT(std::filesystem::file_size(path("picture.svg")), 60'000U);
  const ShownAxis x(panel["x"]), y(panel["y"]);
  const auto has = [&](double at, double value) {
    const auto& line = panel["raw"][0]["lines"][0];
    return std::any_of(line.begin(), line.end(), [&](const Json& point) {
      return std::abs(point[0].get<double>() - x.at(at)) < 0.2 && std::abs(point[1].get<double>() - y.at(value)) < 0.2;
    });
  };
  EXPECT_TRUE(has(kHigh, 50));
  EXPECT_TRUE(has(kLow, -50));
  for (const auto& point : panel["steps"][0]["lines"][0])  // the average of thousands of values in a pixel is level
    EXPECT_NEAR(point[1].get<double>(), y.at(1.5), 0.5);
}

TEST_F(PlotCommand, LeavesAGapWhereAValueIsNotFinite) {
  std::vector<Json> records;
  for (int i = 1; i <= 20; ++i)
    records.push_back(step_record(10 * i, {{"loss", i}, {"bad", nullptr}, {"zero", i - 5}}));
  for (int i : {6, 7, 9, 10}) records[i]["loss"] = nullptr;  // steps 70, 80, 100 and 110
  records.push_back(epoch_record(2, {{"accuracy", 0.5}}));
  write_run("run", records);
  const auto panels = drawn("run --metrics loss,bad,accuracy")["panels"];
  const auto &loss = panels[0], &bad = panels[1], &accuracy = panels[2];
  const ShownAxis x(loss["x"]), y(loss["y"]);
  const auto& lines = loss["steps"][0]["lines"];
  ASSERT_EQ(lines.size(), 2U);
  expect_line(lines[0], {{10, 1}, {20, 2}, {30, 3}, {40, 4}, {50, 5}, {60, 6}}, x, y);
  EXPECT_EQ(lines[1].size(), 9U);
  expect_line(loss["steps"][0]["dots"], {{90, 9}}, x, y);
  EXPECT_EQ(loss["note"], "4 values not finite");
  EXPECT_EQ(bad["empty"], "no finite values");
  EXPECT_THAT(bad["steps"], IsEmpty());
  EXPECT_EQ(accuracy["epochs"][0]["dots"].size(), 1U);
  EXPECT_THAT(accuracy["epochs"][0]["lines"], IsEmpty());
  EXPECT_EQ(drawn("run --metrics zero --log")["panels"][0]["note"], "5 values not above 0");
}

TEST_F(PlotCommand, DrawsTheChosenMetricsInTheirOrder) {
  write_run("a", training(1));
  EXPECT_THAT(texts(drawn("a --metrics accuracy,loss")["panels"], "metric"), ElementsAre("accuracy", "loss"));
  expect_failure("a --metrics loss,acuracy", 2, "no run has the metric 'acuracy': use some of loss, lr, accuracy");
}

TEST_F(PlotCommand, NamesRunsByTheirFoldersOrAsItIsTold) {
  for (const char* run : {"x/seed/1", "y/seed/1", "z"}) write_run(run, training(1));
  EXPECT_THAT(texts(drawn("x/seed/1 y/seed/1/metrics.jsonl ./z/")["legend"], "text"),
              ElementsAre("x/seed/1", "y/seed/1", "z"));
  const auto named = drawn("x/seed/1 z --names 'first one,second' --title 'Two runs'");
  EXPECT_THAT(texts(named["legend"], "text"), ElementsAre("first one", "second"));
  EXPECT_EQ(named["title"], "Two runs");
  const auto alone = drawn("z");
  EXPECT_EQ(alone["title"], "z");
  EXPECT_THAT(alone["legend"], IsEmpty()) << "the title is the name";
  EXPECT_EQ(shell("cd z; plot .").output, "curves.svg: 1 run, 3 metrics\n");
  expect_failure("x/seed/1 z --names one", 2, "--names has 1 name, but there are 2 runs");
}

TEST_F(PlotCommand, WritesValidXmlForEveryName) {
  write_run("<&>\"'", {step_record(1, {{"<b>&\"c\"", 1}, {"\x01 \xC3\xA9", 2}})});
  write_run("bytes\xFF\x01", training(1));
  const auto curves = drawn("'<&>\"'\\''' bytes* --title '</svg>'");
  EXPECT_THAT(texts(curves["legend"], "text"), ElementsAre("<&>\"'", "bytes\uFFFD\uFFFD"));
  EXPECT_THAT(texts(curves["panels"], "metric"), testing::IsSupersetOf({"<b>&\"c\"", "\uFFFD \u00e9"}));
  EXPECT_EQ(curves["title"], "</svg>");
}

TEST_F(PlotCommand, TellsMoreRunsApartThanThereAreColours) {
  std::set<std::string> names;
  for (int i = 0; i < 24; ++i)
    names.insert(std::string(60, 'm') + "-" + std::to_string(i) + "-" + std::string(60, 'n'));
  for (const auto& name : names)
    write_run("runs/" + name, {epoch_record(1, {{"loss", 1}}), epoch_record(2, {{"loss", 2}})});
  const auto curves = drawn("runs/*");
  std::set<std::pair<std::string, std::string>> looks;
  std::set<std::string> short_names;
  for (const auto& curve : curves["panels"][0]["epochs"]) looks.emplace(curve["colour"], curve["dashes"]);
  EXPECT_EQ(looks.size(), 24U);
  for (const auto& entry : curves["legend"]) {
    EXPECT_TRUE(names.count(entry["full"])) << entry;
    EXPECT_TRUE(looks.count({entry["colour"], entry["dashes"]})) << entry;
    EXPECT_LT(entry["text"].get<std::string>().size(), 60U);
    short_names.insert(entry["text"]);
  }
  EXPECT_EQ(short_names.size(), 24U);
  EXPECT_LT(curves["width"], 1000);
  EXPECT_TRUE(curves["scales"]) << "with the window";
}

TEST_F(PlotCommand, TellsMetricsWithLongNamesApart) {
  Json metrics;
  for (int i = 0; i < 12; ++i) metrics["validation/accuracy_of_each_class/class_" + std::to_string(i) + "_of_12"] = i;
  write_run("run", {step_record(1, metrics), step_record(2, metrics)});
  const auto titles = texts(drawn("run")["panels"], "metric");
  EXPECT_EQ(std::set<std::string>(titles.begin(), titles.end()).size(), 12U);
  for (const auto& title : titles) EXPECT_LT(title.size(), 40U);
}

TEST_F(PlotCommand, IgnoresACutOffLastLineAndRefusesADamagedOne) {
  const auto text = lines_of(training(1));
  const auto third_line = text.find('\n', text.find('\n') + 1) + 1;
  write("cut/metrics.jsonl", text + text.substr(0, 40));
  EXPECT_EQ(shell("plot cut").code, 0);
  write("damaged/metrics.jsonl", text.substr(0, third_line) + "{\"type\": \"step\", \"lo" + text.substr(third_line));
  expect_failure("damaged", 1, "damaged/metrics.jsonl:3: the line is damaged: it is not valid JSON from column");
  struct Case {
    const char *line, *problem;
  };
  for (const auto& [line, problem] :
       {Case{"[1]", "it is an array, not an object"}, Case{"7", "it is a number, not an object"},
        Case{"{\"step\": 1}", "it has no \"type\""},
        Case{"{\"type\": \"batch\", \"step\": 1}", "\"type\" is \"batch\", not \"step\" or \"epoch\""},
        Case{"{\"type\": \"step\", \"loss\": 1}", "it has no number \"step\""},
        Case{"{\"type\": \"step\", \"step\": 1, \"loss\": \"low\"}", "\"loss\" is \"low\", not a number or null"},
        Case{"{\"type\": \"step\", \"step\": 1, \"loss\": {\"a\": 1}}", "\"loss\" is an object"},
        Case{"{\"type\": \"step\", \"step\": 1, \"loss\": NaN}", "it is not valid JSON from column"}}) {
    write("damaged/metrics.jsonl", text.substr(0, third_line) + line + "\n" + text.substr(third_line));
    expect_failure("damaged", 1, std::string("damaged/metrics.jsonl:3: the line is damaged: ") + problem);
  }
}

TEST_F(PlotCommand, RefusesWhatItCannotDraw) {
  write_run("runs/a", training(1));
  write("runs/new/metrics.jsonl", "");
  write("runs/positions/metrics.jsonl", "{\"type\": \"step\", \"step\": 1}\n");
  std::filesystem::create_directories(path("empty"));
  expect_failure("", 2, "run is required");
  expect_failure("runs/b", 2, "runs/b does not exist");
  expect_failure("empty", 2, "empty has no metrics.jsonl: name the folder of a run");
  expect_failure("runs", 2, "runs has no metrics.jsonl, but runs/a has one: name the folders of runs, as in runs/*");
  expect_failure("runs/a ./runs/../runs/a/metrics.jsonl", 2, "is given twice");
  expect_failure("runs/new", 1, "no records in runs/new/metrics.jsonl");
  expect_failure("runs/positions", 1, "the records have no metrics");
  expect_failure("runs/a --smooth 1", 2, "it must be 0 or more and below 1");
  expect_failure("runs/a --smooth nan", 2, "it must be 0 or more and below 1");
  expect_failure("runs/a --x hour", 2, "it must be step, epoch or time");
  expect_failure("runs/a -o empty", 2, "--output is empty, a folder");
  expect_failure("runs/a -o nowhere/curves.svg", 1, "nowhere/curves.svg cannot be written: No such file or directory");
  const auto ran = shell("plot runs/a runs/new");
  EXPECT_EQ(ran.code, 0);
  EXPECT_EQ(ran.output, "curves.svg: 2 runs, 3 metrics\n");
  EXPECT_EQ(ran.errors, "lockstep plot: note: runs/new/metrics.jsonl has no records yet\n");
}

TEST_F(PlotCommand, ReplacesAFileWholeOrNotAtAll) {
  write_run("a", training(1));
  write("pictures/old.svg", "old");
  ASSERT_EQ(shell("plot a -o pictures/new.svg").code, 0);
  EXPECT_EQ(shell("umask 077; plot a -o pictures/private.svg; stat -c %a pictures/private.svg").output,
            "pictures/private.svg: 1 run, 3 metrics\n600\n");
  // A limit of the file size stands for a full disk. It counts blocks of 512 bytes.
  const auto ran = shell("trap '' XFSZ; ulimit -f 1; plot a -o pictures/old.svg");
  EXPECT_EQ(ran.code, 1) << ran.errors;
  EXPECT_EQ(ran.errors, "lockstep plot: pictures/old.svg cannot be written: File too large\n");
  EXPECT_EQ(read("pictures/old.svg"), "old");
  EXPECT_EQ(shell("ls pictures").output, "new.svg\nold.svg\nprivate.svg\n");
  ASSERT_EQ(shell("chmod 640 pictures/old.svg; ln -s old.svg pictures/link.svg; plot a -o pictures/link.svg").code, 0);
  EXPECT_EQ(read("pictures/old.svg"), read("pictures/new.svg"));
  EXPECT_EQ(shell("stat -c '%a %F' pictures/old.svg pictures/link.svg").output,
            "640 regular file\n777 symbolic link\n");
  EXPECT_EQ(shell("plot a -o /dev/null; test -c /dev/null").code, 0);
  EXPECT_EQ(shell("plot a -o - > /dev/full").errors,
            "lockstep plot: stdout cannot be written: No space left on device\n");
}

TEST_F(PlotCommand, SaysWhatToDoWithAPipe) {
  write_run("a", training(1));
  const auto ran = shell("cat a/metrics.jsonl | plot /dev/stdin");
  EXPECT_EQ(ran.code, 1);
  EXPECT_EQ(
      ran.errors,
      "lockstep plot: /dev/stdin cannot be read: it is not a regular file. Copy the records into a file first.\n");
  EXPECT_EQ(shell("plot /dev/stdin -o picture.svg < a/metrics.jsonl").code, 0);
}

TEST_F(PlotCommand, WritesToStdoutAndSaysSoOnStderr) {
  write_run("a", training(1));
  const auto ran = shell("plot a -o - > piped.svg");
  EXPECT_EQ(ran.code, 0);
  EXPECT_EQ(ran.errors, "stdout: 1 run, 3 metrics\n");
  ASSERT_EQ(shell("plot a").code, 0);
  EXPECT_EQ(read("piped.svg"), read("curves.svg"));
  EXPECT_THAT(read("piped.svg"), Not(IsEmpty()));
}

TEST_F(PlotCommand, DrawsEqualBytesForEqualRuns) {
  for (const char* run : {"a", "b", "c"}) write_run(run, training(1));
  ASSERT_EQ(shell("plot a b c -o 1.svg && LC_ALL=C.UTF-8 plot a b c -o 2.svg").code, 0);
  EXPECT_EQ(read("1.svg"), read("2.svg"));
}

TEST_F(PlotCommand, TakesAFolderWithTheNameOfACommand) {
  for (const char* run : {"run", "doctor", "plot"}) write_run(run, training(1));
  EXPECT_EQ(shell("plot run doctor plot").output, "curves.svg: 3 runs, 3 metrics\n");
}

}  // namespace
}  // namespace lockstep::plot
