#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <memory>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <lockstep/error.h>

#include "base/live_folder.h"
#include "base/live_line.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "top/find_run.h"
#include "top/full_screen.h"
#include "top/view.h"

namespace lockstep::top {
namespace {

constexpr int kFailure = 1, kWrongUsage = 2;
constexpr std::chrono::seconds kInterval{1};

constexpr const char* kTopFooter = R"(
RUN is the folder that the program passes to its TrainingRun, or a folder with such folders: then the run whose ranks
wrote last is shown. Links below the folder are not followed. Each rank writes its state into the folder live of the run
about once a second. The command only reads these files, so it works on every host that sees the folder, and does not
slow the job down.

The table has the shares of each rank's time in forward, backward, communication (blocked in calls of groups) and data
(waiting for batches). A straggler is the rank for which the others wait. A silent rank has not written for 5 seconds.

Keys: q quit, up/down or j/k select a rank, s sort, l log on or off, ? help. Without a terminal the table is printed
once. NO_COLOR turns colours off.

Examples:
  lockstep top
  lockstep top runs/mnist
  lockstep top runs/mnist --once
  lockstep top runs/mnist --json | jq '.ranks[] | select(.state == "failed")'

Exit codes:
  0   the state was shown; also after q, Ctrl-C and SIGTERM
  1   without a full screen: no live files, or the output cannot be written
  2   wrong usage, such as a folder that does not exist
)";

struct TopArguments {
  std::string run{};
  bool is_once = false, is_json = false;
};

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool has_unicode_locale() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    auto locale = variable(name);
    if (locale.empty()) continue;
    std::transform(locale.begin(), locale.end(), locale.begin(), [](unsigned char c) { return std::tolower(c); });
    return locale.find("utf-8") != locale.npos || locale.find("utf8") != locale.npos;
  }
  return false;
}

Style find_style() {
  const auto stdout_style = tool::stdout_style();
  const bool is_dumb = variable("TERM") == "dumb";
  return {.columns = static_cast<size_t>(std::max(1, stdout_style.columns)),
          .rows = 0,
          .has_colour = stdout_style.colour && !is_dumb,
          .has_unicode = has_unicode_locale()};
}

bool can_be_full_screen() {
  return ::isatty(STDIN_FILENO) != 0 && ::isatty(STDOUT_FILENO) != 0 && variable("TERM") != "dumb";
}

void print(const std::string& text) {
  if (!write_fully(STDOUT_FILENO, text)) throw SystemError("the output cannot be written");
}

/// Returns the exit code.
int show_once(const FoundRun& run, bool is_json) {
  const Shown shown{.run = run.name, .job = live::read_job(run.folder, unix_time())};
  std::string text;
  if (is_json) {
    auto json = live::to_json(shown.job);
    json["run"] = live::printable(shown.run);
    text = json.dump() + "\n";
  } else if (!shown.job.ranks.empty()) {
    for (const auto& line : draw_once(shown, find_style())) text += line + "\n";
  }
  print(text);
  if (!shown.job.ranks.empty()) return 0;
  for (const auto& problem : shown.job.problems) std::cerr << "lockstep top: " + live::printable(problem) + "\n";
  if (!is_json || shown.job.problems.empty())
    std::cerr << fmt::format("lockstep top: {} has no live files that can be read\n", live::printable(run.name));
  return kFailure;
}

/// The last lines of the output of a rank, or why there are none.
std::vector<std::string> log_of(const FoundRun& run, int64_t rank, size_t count) {
  try {
    return live::last_lines(run.folder, rank, count);
  } catch (const Error& error) {
    return {fmt::format("the output cannot be shown: {}", error.what())};
  }
}

/// Shows the run until a key or a signal ends it.
void show_live(const FoundRun& run) {
  using Clock = std::chrono::steady_clock;
  const auto style = find_style();
  FullScreen screen;
  Choice choice;
  Shown shown{.run = run.name};
  std::string typed;
  bool is_stale = true;  // the files must be read again
  for (auto next = Clock::now();;) {
    const auto size = screen.size(style);
    if (is_stale) shown.job = live::read_job(run.folder, unix_time());
    if (is_stale) next = Clock::now() + kInterval;
    const auto rank = selected_rank(choice, shown.job);
    shown.log = choice.shows_log && rank ? log_of(run, *rank, size.rows) : std::vector<std::string>();
    const auto frame = draw(shown, choice, size);
    if (!screen.draw(frame.lines)) return;
    const auto event = screen.wait(std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()));
    if (event.end_signal != 0) return;
    typed += event.keys;
    for (auto key : take_keys(typed)) {
      if (key == Key::kQuit && !choice.shows_help) return;
      apply(key, choice, shown.job, frame.table_rows);
    }
    is_stale = Clock::now() >= next;
  }
}

int run(const TopArguments& arguments) {
  const auto report = [](const std::string& message, int code) {
    std::cerr << "lockstep top: " + message + "\n";
    return code;
  };
  try {
    const auto found = find_run(arguments.run);
    if (arguments.is_once || arguments.is_json || !can_be_full_screen()) return show_once(found, arguments.is_json);
    show_live(found);
    return 0;
  } catch (const UsageError& error) {
    return report(error.what(), kWrongUsage);
  } catch (const std::exception& error) {
    return report(error.what(), kFailure);
  }
}

}  // namespace
}  // namespace lockstep::top

void add_top(CLI::App& app, int& exit_code) {
  auto arguments = std::make_shared<lockstep::top::TopArguments>();
  auto* command = app.add_subcommand("top", "Show the ranks of a running training, live");
  command->add_option("run", arguments->run, "The folder of a run, or of runs (default: runs)")->type_name("DIR");
  command->add_flag("--once", arguments->is_once, "Print the table once, without a full screen");
  command->add_flag("--json", arguments->is_json, "Print the state once, as a JSON object");
  command->footer(lockstep::top::kTopFooter);
  command->callback([arguments, &exit_code] { exit_code = lockstep::top::run(*arguments); });
}
