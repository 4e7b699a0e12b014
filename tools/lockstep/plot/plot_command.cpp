#include <iostream>
#include <map>
#include <memory>
#include <new>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <lockstep/error.h>

#include "cli/commands.h"
#include "plot/draw_runs.h"

namespace lockstep::plot {
namespace {

constexpr int kFailure = 1, kWrongUsage = 2;

constexpr const char* kPlotFooter = R"(
A run is a folder with a metrics.jsonl, as TrainingRun and MetricLog write it. A run that is still training can be drawn,
too. The picture has a panel for each metric and a colour for each run, and fits light and dark pages.

Steps are thin lines, epochs are lines with markers. Values of steps that go up and down are smoothed, and drawn faintly
behind the smoothed line. A gap is a value that was not finite.

Examples:
  lockstep plot runs/*
  lockstep plot runs/a runs/b --metrics loss,accuracy -o compare.svg
  lockstep plot runs/* --x time --log --smooth 0.9
  lockstep plot runs/a runs/b --names "lr 0.1,lr 0.01" --title "Learning rates"

Exit codes:
  0   the picture was written
  1   a file is damaged, has no records, or cannot be read or written
  2   wrong usage, such as a folder or a metric that does not exist
)";

int run(const PlotArguments& arguments) {
  const auto report = [](const std::string& message, int code) {
    std::cerr << "lockstep plot: " + message + "\n";
    return code;
  };
  try {
    draw_runs(arguments);
    return 0;
  } catch (const UsageError& error) {
    return report(error.what(), kWrongUsage);
  } catch (const std::bad_alloc&) {
    return report("not enough memory to read the records: draw fewer runs at once", kFailure);
  } catch (const std::exception& error) {
    return report(error.what(), kFailure);
  }
}

CLI::Validator is_smoothing() {
  return CLI::Validator(
      [](std::string& written) {
        double weight = 0;
        const bool is_valid = CLI::detail::lexical_cast(written, weight) && weight >= 0 && weight < 1;
        return is_valid ? std::string() : fmt::format("{} is not valid: it must be 0 or more and below 1", written);
      },
      "");
}

void add_options(CLI::App& command, PlotArguments& arguments, std::string& x) {
  command.add_option("run", arguments.runs, "Folders of runs, or metrics.jsonl files")->required()->type_name("FILE");
  command.add_option("-o,--output", arguments.output, "The SVG file to write; - is stdout")
      ->type_name("FILE")
      ->capture_default_str();
  command.add_option("--metrics", arguments.metrics, "Draw only these metrics, in this order (default: all)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("NAME,...");
  command.add_option("--x", x, "The horizontal axis: optimizer steps, epochs, or the time of training")
      ->type_name("step|epoch|time")
      ->check(CLI::Validator(
          [](std::string& written) {
            const bool is_valid = written == "step" || written == "epoch" || written == "time";
            return is_valid ? std::string() : written + " is not valid: it must be step, epoch or time";
          },
          ""))
      ->capture_default_str();
  command
      .add_option("--smooth", arguments.smoothing,
                  "Smooth steps: the weight of earlier values, 0 (not at all) to below 1")
      ->type_name("W")
      ->check(is_smoothing())
      ->capture_default_str();
  command.add_flag("--log", arguments.is_logarithmic, "Make the vertical axes logarithmic");
  command.add_option("--title", arguments.title, "The title of the picture")->type_name("TEXT");
  command.add_option("--names", arguments.names, "Names of the runs in the legend (default: names of their folders)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("NAME,...");
}

}  // namespace
}  // namespace lockstep::plot

void add_plot(CLI::App& app, int& exit_code) {
  using lockstep::plot::XAxis;
  struct Parsed {
    lockstep::plot::PlotArguments arguments{};
    std::string x = "step";
  };
  auto parsed = std::make_shared<Parsed>();
  auto* command = app.add_subcommand("plot", "Draw the curves of runs, such as losses, as an SVG picture");
  lockstep::plot::add_options(*command, parsed->arguments, parsed->x);
  command->footer(lockstep::plot::kPlotFooter);
  command->callback([parsed, &exit_code] {
    parsed->arguments.x = parsed->x == "step" ? XAxis::kStep : parsed->x == "epoch" ? XAxis::kEpoch : XAxis::kTime;
    exit_code = lockstep::plot::run(parsed->arguments);
  });
}
